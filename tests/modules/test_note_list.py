"""A NoteList that has notes in arrays finds and takes the same as one that looks at each note by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.optim import SGD

from fp8dist.modules.weight_notes import NoteList, WeightNote

LINEARS = 5


class Notes:
    """A model, optimizers of all its weights, of two, and of none, and the notes of its weights."""

    def __init__(self, lasts: bool) -> None:
        self.model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(LINEARS))
        self.notes = [WeightNote().bind(linear) for linear in self.model]
        for note, linear in zip(self.notes, self.model):
            note.take(linear)
        self.list = NoteList(self.notes, lasts)
        weights = [linear.weight for linear in self.model]
        self.optimizers = [SGD(held, lr=1) for held in (weights, weights[1:3], [torch.zeros(1)])]

    def places(self, notes: list[WeightNote]) -> list[int]:
        return sorted(map(self.notes.index, notes))

    def step(self, which: int, changes: Sequence[tuple[str, int]]) -> tuple[list[int], ...]:
        """Do what StepWatch does around an optimizer's step, which makes these changes. Return the places of the
        weights held, of those written to, and of those that ``take`` found."""
        held, written = self.list.find(self.optimizers[which])
        for change in changes:
            self.change(*change)
        found = self.list.take(held)
        return self.places([*held.listed, *held.others]), self.places(written), self.places(found)

    def change(self, kind: str, place: int) -> None:
        linear, note = self.model[place], self.notes[place]
        if kind == "write":
            linear.weight.detach().mul_(2)
        elif kind == "move":
            linear.weight.data = torch.ones(2, 2)
        elif kind == "replace":
            linear.weight = nn.Parameter(torch.ones(2, 2))
        elif kind == "mark":
            note.mark_written()
        elif kind == "load":
            note.trust_next()
        elif kind == "take":
            note.take(linear)
        elif kind == "forward" and not note.written(linear):
            note.was_recorded()

    def state(self) -> list[tuple[bool, ...]]:
        return [
            (note.written(linear), note.unrecorded, note.awaited, note.changed_between_backwards())
            for note, linear in zip(self.notes, self.model)
        ]


@pytest.mark.parametrize("seed", range(40))
def test_arrays_show_what_each_note_shows(seed: int) -> None:
    chosen = random.Random(seed)
    kinds = ["write"] * 8 + ["move", "replace", "mark", "load", "take", "forward", "forward"]
    sides = [Notes(lasts=True), Notes(lasts=False)]
    for step in range(30):
        changes = [(chosen.choice(kinds), chosen.randrange(LINEARS)) for _ in range(chosen.randrange(4))]
        inside = [(chosen.choice(kinds), chosen.randrange(LINEARS)) for _ in range(chosen.randrange(3))]
        which, stepped, ends = chosen.randrange(3), chosen.random() < 0.7, chosen.random() < 0.5
        seen = []
        for side in sides:
            for change in changes:
                side.change(*change)
            shown = [side.state()]
            results = side.step(which, inside)
            if stepped:
                for place in results[0]:
                    side.notes[place].stepped_at = step
            side.change("write", step % LINEARS)
            taken = side.places(side.list.take(stepped_at=step)) if ends else []
            seen.append((shown, results, taken, side.state()))
        assert seen[0] == seen[1], step
