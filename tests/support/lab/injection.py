"""Fault injection (``--inject``), to test that faults are detected."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from fp8dist import Slot, StateManager
from fp8dist.errors import ConfigurationError
from fp8dist.modules.casters import SITES
from fp8dist_kernels import ops
from fp8dist_kernels.taps import listener_of, tap_on
from tests.support.lab.flags import BAD_DEVICE, HIDDEN_STATE, NAN_SAMPLE, NONDETERMINISM, PRODUCT, SLOW, Fault
from tests.support.lab.options import Options
from tests.support.lab.ranks import Ranks

WEIGHT, EXPERTS_WEIGHT = "blocks.0.mlp_in.weight", "blocks.0.mlp.experts.up_proj"
"""The parameter that ``weight`` damages, and whose gradient ``gradient`` does: the middle element of the rank's local
part. The second one with ``--experts``."""

OUTLIER, SPIKE = 1e6, 1e3
"""Factor of ``outlier`` on the largest element, beyond the range of both FP8 formats, and of ``spike`` on all."""

MARK = 255
"""The byte of ``nan-sample``. No text in UTF-8 has it."""

MANTISSA_BIT: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 11, torch.bfloat16: 3})
"""The bit that is flipped: in the middle of the mantissa. A relative error of about 1/4096 in float32."""


class Injection:
    """Injects this rank's ``--inject`` faults, usually none.

    Call ``before_update`` and ``after_update`` around ``optimizer.step()``, which starts with the boundary. Each fault
    prints one line to stderr. A job that torchrun restarted injects nothing.
    """

    def __init__(self, options: Options, ranks: Ranks, model: nn.Module, manager: StateManager | None) -> None:
        own = [fault for fault in options.inject if fault.rank == ranks.rank]
        self._faults = tuple(own if ranks.restarts == 0 else ())
        self._rank, self._model, self._manager = ranks.rank, model, manager
        self._weight = EXPERTS_WEIGHT if options.experts else WEIGHT
        self._saved: list[Tensor] = []
        self._step = 0
        self._slow_ms = sum(fault.step for fault in self._faults if fault.kind == SLOW)
        if self._slow_ms:
            print(f"[rank {self._rank}] --inject slow: {self._slow_ms} ms in each forward", file=sys.stderr, flush=True)
        if any(fault.kind in ("kill-forward", "kill-backward", SLOW) for fault in self._faults):
            blocks = model.get_submodule("blocks")
            middle = blocks.get_submodule(str(options.layers // 2))
            middle.register_forward_hook(self._in_the_forward)
        self._middle = f"blocks.{options.layers // 2}"
        self._hook_block(model.get_submodule(self._middle))
        if ranks.restarts == 0 and any(fault.kind == NAN_SAMPLE for fault in options.inject):
            # On all ranks, because the model is the same: only the data differs.
            model.get_submodule("embedding").register_forward_hook(_spoil_marked)
        self._last_microbatch = options.accumulate - 1
        if any(fault.kind == "outlier" for fault in self._faults):
            self._place = f"blocks.{options.layers // 2}.{'mlp' if options.experts else 'mlp_in'}"
            model.get_submodule(self._place).register_forward_pre_hook(self._plant_outlier)
        if any(fault.kind == "spike" for fault in self._faults):
            model.get_submodule("lm_head").register_forward_pre_hook(self._raise_logits)
        if any(fault.kind == "kill-save" for fault in self._faults):
            self._tap_writes()
        for fault in self._faults:
            if fault.kind == BAD_DEVICE:
                self._spoil_products(fault, options.seed)
        if manager is not None and any(fault.kind == PRODUCT for fault in self._faults):
            self._tap_products(manager, ranks.device)
        needs_fp8 = [fault for fault in options.inject if fault.kind in (PRODUCT, BAD_DEVICE)]
        if needs_fp8 and manager is not None and not manager.settings.enabled:
            raise ConfigurationError(f"--inject {needs_fp8[0]}: FP8 is switched off")
        needs_sync = [fault for fault in options.inject if fault.kind in ("scale", "nan", "kill-sync", "stop-sync")]
        if needs_sync and manager is not None and not (manager.settings.enabled and manager.settings.amax_sync):
            raise ConfigurationError(f"--inject {needs_sync[0]}: FP8 or its amax sync is switched off")

    def batch(self, step: int, microbatch: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the batch of a microbatch, with a marked sample if ``nan-sample`` says so. Local."""
        if not self._has(NAN_SAMPLE) or microbatch != self._last_microbatch:
            return batch
        tokens, targets = batch[0].clone(), batch[1]
        place = tokens.shape[1] // 2
        tokens[0, place] = MARK
        self._say(NAN_SAMPLE, f"byte {place} of the first sample of microbatch {microbatch} is {MARK}")
        return tokens, targets

    def before_step(self, step: int) -> None:
        """Inject faults at the start of a step. Local."""
        self._step = step
        if self._has("hang"):
            self._say("hang", "sleeping")
            while True:
                time.sleep(3600)

    def before_update(self, step: int) -> None:
        """Inject faults after the backward, before ``optimizer.step()``. Local."""
        before: dict[str, Callable[[], str | None]] = {
            "scale": self._double_scale,
            "gradient": self._flip_bit_of_gradient,
            "nan": self._record_nan,
            "skip": self._save_parameters,
            "kill-sync": lambda: self._in_the_sync("kill-sync", self._die),
            "stop-update": lambda: self._stop("stop-update", step),
            "stop-sync": lambda: self._in_the_sync("stop-sync", self._stop),
        }
        self._inject(step, before)

    def after_update(self, step: int) -> None:
        """Inject faults after ``optimizer.step()``. Local."""
        after: dict[str, Callable[[], str | None]] = {
            "weight": self._flip_bit,
            "skip": self._put_parameters_back,
            "stop-step": lambda: self._stop("stop-step", step),
        }
        self._inject(step, after)

    def _in_the_forward(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        if not torch.is_grad_enabled():  # Validation is left alone.
            return
        time.sleep(1e-3 * self._slow_ms)
        if self._has("kill-forward"):
            self._die("kill-forward", self._step)
        if self._has("kill-backward"):
            output.register_hook(lambda gradient: self._die("kill-backward", self._step))

    def _tap_writes(self) -> None:
        """Die after this rank has written its file and before the checkpoint is complete."""
        writer: Any = FileSystemWriter
        write = writer.write_data

        def write_data(*args: Any) -> Any:
            results = write(*args)
            if self._has("kill-save"):
                self._die("kill-save", self._step)
            return results

        writer.write_data = write_data

    def _hook_block(self, block: nn.Module) -> None:
        """Install ``nondeterminism`` and ``hidden-state``, which last for the whole run."""
        fresh, calls = random.SystemRandom(), itertools.count()
        factors: dict[str, Callable[[], float]] = {
            NONDETERMINISM: lambda: 1 + 1e-3 * fresh.random(),  # No seed restores it.
            HIDDEN_STATE: lambda: 1 + 1e-3 * (next(calls) % 8),
        }
        for fault in self._faults:
            if fault.kind in factors:
                block.register_forward_hook(functools.partial(_scaled, factors[fault.kind]))
                text = f"--inject {fault}: each output of {self._middle} is scaled by another factor"
                print(f"[rank {self._rank}] {text}", file=sys.stderr, flush=True)

    def _plant_outlier(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not (torch.is_grad_enabled() and self._has("outlier")):
            return None
        (x,) = arguments
        planted = x.clone()
        planted[0, 0, 0] = OUTLIER * x.detach().abs().amax()
        self._say("outlier", f"the input of {self._place} has {float(planted[0, 0, 0]):g} instead of {x[0, 0, 0]:g}")
        return (planted,)

    def _raise_logits(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not (torch.is_grad_enabled() and self._has("spike")):
            return None
        self._say("spike", f"the input of lm_head is multiplied by {SPIKE:g}")
        return (SPIKE * arguments[0],)

    def _say(self, kind: str, what: str, step: int | None = None) -> None:
        at = self._step if step is None else step
        print(f"[rank {self._rank}] --inject {kind}:{self._rank}:{at}: {what}", file=sys.stderr, flush=True)

    def _in_the_sync(self, kind: str, act: Callable[[str, int], None]) -> None:
        """Act inside the next FP8 sync, the first int32 MAX all-reduce of ``optimizer.step()``.

        The other ranks then wait for this rank, or already have its part.
        """
        all_reduce = dist.all_reduce

        def reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
            work = all_reduce(tensor, op, *args, **kwargs)
            if tensor.dtype == torch.int32 and op == dist.ReduceOp.MAX:
                dist.all_reduce = all_reduce
                act(kind, self._step)
            return work

        dist.all_reduce = reduce

    def _has(self, kind: str) -> bool:
        return any((fault.kind, fault.step) == (kind, self._step) for fault in self._faults)

    def _die(self, kind: str, step: int) -> NoReturn:
        self._say(kind, "SIGKILL", step)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    def _stop(self, kind: str, step: int) -> None:
        """Stop the whole process, including communication threads, until it gets SIGCONT."""
        self._say(kind, f"SIGSTOP; kill -CONT {os.getpid()} resumes it")
        os.kill(os.getpid(), signal.SIGSTOP)

    def _inject(self, step: int, ways: dict[str, Callable[[], str | None]]) -> None:
        for fault in self._faults:
            if fault.step == step and fault.kind in ways:
                told = ways[fault.kind]()
                if told is not None:
                    self._say(fault.kind, told)

    def _double_scale(self) -> str:
        """Double a scale in place. ``set_scale`` would update inv_scale as well."""
        slot, manager = self._first_slot("weight")
        scale = manager.slot(*slot).scale
        before = scale.item()
        scale.mul_(2)
        return f"scale of {slot} is now {scale.item():g} instead of {before:g}"

    def _record_nan(self) -> str:
        """Record a NaN amax, as one NaN in a gradient would, but without damage to the parameters.

        MAX propagates NaN, so all ranks see it: the slot keeps its scale in this step, its history does not take the
        amax, and its counter of non-finite amaxes increases on all ranks.
        """
        slot, manager = self._first_slot("grad_output")
        manager.slot(*slot).record(torch.tensor(float("nan"), device=manager.slot(*slot).scale.device))
        return f"recorded a NaN amax for {slot}"

    def _flip_bit(self) -> str:
        """Flip a bit through ``.data``, which does not bump the version counter."""
        return f"{self._weight}{_flipped(self._model.get_parameter(self._weight).data)}"

    def _flip_bit_of_gradient(self) -> str:
        gradient = self._model.get_parameter(self._weight).grad
        assert gradient is not None
        return f"the gradient of {self._weight}{_flipped(gradient)}"

    def _tap_products(self, manager: StateManager, device: torch.device) -> None:
        """Hear all products, before the audit takes them down."""
        job = manager._job
        audit = None if job.tap is None else listener_of(job.tap)
        left = [fault for fault in self._faults if fault.kind == PRODUCT]

        def listener(op: str, site: int, args: Any, options: Any, results: tuple[Tensor, ...]) -> None:
            kind = SITES[site % len(SITES)]
            for fault in [fault for fault in left if (fault.step, fault.gemm) == (self._step, kind)]:
                left.remove(fault)
                self._say(PRODUCT, f"a product of {kind}{_flipped(results[0])}")
            if audit is not None:
                audit(op, site, args, options, results)

        job.tap = tap_on(device, listener)

    def _spoil_products(self, fault: Fault, seed: int) -> None:
        """Flip a bit of products inside the op, so that an audit which this rank repeats is wrong as well."""
        product, chance = ops._product, random.Random(f"{seed} {self._rank}")

        def spoiled(*args: Any, **options: Any) -> Tensor:
            result = product(*args, **options)
            if result.numel() and chance.random() < fault.probability:
                _flipped(result)
            return result

        ops._product = spoiled
        text = f"each product is wrong with probability {fault.probability:g}"
        print(f"[rank {self._rank}] --inject {fault}: {text}", file=sys.stderr, flush=True)

    def _save_parameters(self) -> None:
        self._saved = [parameter.detach().clone() for parameter in self._model.parameters()]

    @torch.no_grad()
    def _put_parameters_back(self) -> str:
        for parameter, saved in zip(self._model.parameters(), self._saved, strict=True):
            parameter.copy_(saved)
        self._saved = []
        return "undid this step's update of the parameters"

    def _first_slot(self, role: str) -> tuple[Slot, StateManager]:
        assert self._manager is not None  # Options require --precision fp8.
        return next(slot for slot in self._manager.slots if slot.role == role), self._manager


def _scaled(factor: Callable[[], float], module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
    return output * factor() if torch.is_grad_enabled() else None  # Validation is left alone.


def _spoil_marked(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    (tokens,) = arguments
    return output.masked_fill((tokens == MARK)[..., None], torch.nan) if torch.is_grad_enabled() else None


@torch.no_grad()
def _flipped(matrix: Tensor) -> str:
    """Flip a bit of the middle element, always the same one. Return where and what it is, in words."""
    if isinstance(matrix, DTensor):
        matrix = matrix.to_local()
    place = [int(i) for i in torch.unravel_index(torch.tensor(matrix.numel() // 2), matrix.shape)]
    element = matrix[tuple(place)]
    before = element.item()
    bits = element.view(torch.int32 if element.itemsize == 4 else torch.int16)
    bits.bitwise_xor_(1 << MANTISSA_BIT[element.dtype])
    return f"{place} is now {element.item()!r} instead of {before!r}"
