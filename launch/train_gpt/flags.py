"""Flags as fields of a dataclass, and the parser made of them. Nothing here imports torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, NoReturn

from launch.train_gpt.data import BadInput


def flag(default: Any, help: str, **how: Any) -> Any:
    """Return a field that is a flag. ``how``: arguments of argparse."""
    return field(default=default, metadata={"help": help, **how})


def number(default: float | None, help: str, expected: str, fits: Callable[[float], bool], of: Any = float) -> Any:
    """Return a flag with a finite number. ``expected`` says in words what ``fits`` accepts."""

    def number(text: str) -> float:
        value: float = of(text)
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text}")
        return value

    number.__name__ = "integer" if of is int else "number"  # argparse uses it in its messages.
    return flag(default, help, type=number, metavar="N" if of is int else "X")


def count(default: int | None, help: str, least: int = 1) -> Any:
    """Return a flag with a whole number that is not below ``least``."""
    return number(default, help, f"at least {least}", lambda value: value >= least, int)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Appends "(default: …)" to the help of each flag whose default is not None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parser(options: type, epilog: str) -> argparse.ArgumentParser:
    """Return a parser with a flag for each field of a dataclass. It raises BadInput instead of exiting."""
    description = "Train a small byte-level GPT on one or many ranks, in high precision or in FP8."
    made = _Parser("train_gpt", None, description, epilog, formatter_class=_HelpWithDefaults, allow_abbrev=False)
    for one in fields(options):
        made.add_argument(f"--{one.name.replace('_', '-')}", default=one.default, **one.metadata)
    return made
