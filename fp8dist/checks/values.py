"""``fp8dist.check_values``: compares values beside a model's tensors: learning rates, epochs, seeds, batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from fp8dist.checks.contents import Digester, NamedTensor, TensorContent
from fp8dist.checks.findings import findings_of_values, from_senders
from fp8dist.checks.random_state import RandomState
from fp8dist.checks.report import (
    DivergenceReport,
    Sender,
    conclude,
    log_on_one_rank,
    save_evidence,
    sides_of,
    this_rank,
)
from fp8dist.common.divergence import DUPLICATE, Finding
from fp8dist.common.names import require_bool, require_choice
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.state.accord import meet
from fp8dist.state.groups import GroupLike, SyncGroup, group_of_this_rank, local_part, world_size
from fp8dist.state.received import Received
from fp8dist.state.roll_call import enrol, failing_by_name
from fp8dist.state.settings import report_dir

_LONGEST = 60
"""Characters of a value that ranks send as it is. A longer one is sent as its beginning and a digest."""

_ABSENT = "absent"


def check_values(
    values: Mapping[str, Any],
    *,
    distinct: bool = False,
    group: GroupLike | None = None,
    step: int | None = None,
    policy: Literal["raise", "warn"] = "raise",
) -> DivergenceReport:
    """Check that values are the same on all ranks, or, with ``distinct``, that no two ranks have the same. If not,
    report which, and on which ranks. COLLECTIVE: one gather of some 100 bytes for each value.

    A learning rate, an epoch or a seed that one rank has otherwise trains another model without an error; so does a
    batch that two ranks read, because the sampler does not know its rank.

        fp8dist.check_values({"lr": scheduler.get_last_lr(), "sampler": sampler, "random": fp8dist.random_state()})
        fp8dist.check_values({"batch": x}, distinct=True)

    Args:
        values: numbers, strings, bytes, None, tensors and numpy arrays by name; also mappings, lists, tuples, a
            ``random_state()``, a torch.Generator, and a DistributedSampler (its epoch and seed), whose parts are
            compared one by one. Floating-point numbers are compared exactly. Of a tensor, dtype, shape and all bytes
            count; of a DTensor, those of the local part.
        distinct: True: every rank must have another value.
        group: the ranks that call this; None: all ranks of the job.
        step: number of optimizer steps done, for the report.
        policy: "raise", or "warn": one rank logs the differences, and the report has them.

    Returns:
        A report with the same findings on all ranks, of kind "value", or "duplicate" with ``distinct``.

    Raises:
        DivergenceError: on all ranks, if the policy is "raise" and values differ, or with ``distinct`` are equal.
        ConfigurationError: on all ranks, if a rank passed something else. The message names it.
        SyncError: a rank did not take part. The message names it.
    """
    require_choice("policy", policy, ("raise", "warn"))
    require_bool("distinct", distinct)
    anchor = None
    if group is not None or world_size() > 1:
        anchor = group_of_this_rank(dist.group.WORLD if group is None else group)  # type: ignore[arg-type]
    if anchor is None or not anchor.communicates:
        _texts(values)
        return DivergenceReport(skipped=("there is one rank, or no process group",))
    enrol()
    meet(anchor, "fp8dist.check_values()")
    return compare_values(values, anchor, distinct, step or 0, policy == "raise")


def compare_values(
    values: Any,
    anchor: SyncGroup,
    distinct: bool,
    step: int,
    raises: bool,
    notify: Callable[[DivergenceReport], None] | None = None,
) -> DivergenceReport:
    """Compare values over ``anchor``. COLLECTIVE. For the arguments and errors see ``check_values``.

    ``values``: also a function that returns them. ``raises``: raise DivergenceError. Else one rank logs the report.
    ``notify``: called with a report that has findings.
    """
    error, mine = "", {}
    try:
        mine = _texts(values() if callable(values) else values)
    except Exception as raised:  # Other ranks wait for this one.
        error = str(raised) if isinstance(raised, ConfigurationError) else f"{type(raised).__name__}: {raised}"
    with failing_by_name("fp8dist.check_values", lambda: "check_values()", anchor.ranks):
        sender = Sender(this_rank(anchor.device, anchor.mesh_coordinates()), step, {})
        gathered = dict(zip(anchor.ranks, anchor.gather((sender, error, mine))))
        if errors := {rank: text for rank, (_, text, _) in gathered.items() if text}:
            raise ConfigurationError(f"check_values() on rank {min(errors)}: {errors[min(errors)]}")
        names = sorted({name for _, _, theirs in gathered.values() for name in theirs})
        found: list[Finding] = []
        for name in names:
            texts = {rank: theirs.get(name, _ABSENT) for rank, (_, _, theirs) in gathered.items()}
            if distinct and _ABSENT not in texts.values():
                sides = [side for side in sides_of(texts) if len(side) > 1]
                found += [Finding(0, DUPLICATE, name, of, None, detail=texts[of[0]], sides=(of,)) for of in sides]
            else:
                found += findings_of_values("value", texts, name=name)
        findings = from_senders(found, [sender for sender, _, _ in gathered.values()])
        report = DivergenceReport(tuple(findings), compared={"value": len(mine)})
        save_evidence(report, report_dir(), lambda finding: None)
        log_on_one_rank(report, anchor, raises)
    conclude(report, raises, notify)
    return report


def check_received(received: Received, anchor: SyncGroup, policy: Literal["raise", "warn"]) -> DivergenceReport:
    """Compare over ``anchor`` what ranks have received of gradients in FP8. COLLECTIVE: one gather. It is forgotten
    after a difference. For the errors see ``check_values``."""
    require_choice("policy", policy, ("raise", "warn"))
    enrol()
    try:
        report = compare_values(received.texts, anchor, False, 0, policy == "raise")
    except DivergenceError:
        received.forget()
        raise
    if report.diverged:
        received.forget()
    return report


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of all parts by name. See ``_leaves``."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"values must map names to values, got {type(values).__name__}")
    found: dict[str, str] = {}
    for name, text in _leaves("", values):  # "a.b" may be one name, or that of a part.
        found[name] = f"{found[name]}, {text}" if name in found else text
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of all parts of a value. The texts of two parts are equal exactly if the parts are.

    Raises:
        ConfigurationError: a part has another type, or no values.
    """
    parts = _parts_of(value)
    if parts is not None:
        if name and not parts:
            yield name, "empty"
        for key, part in parts:
            yield from _leaves(f"{name}.{key}" if name else str(key), part)
    elif isinstance(value, (Tensor, np.ndarray)):
        # torch takes no negative strides.
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value, order="C"))
        yield name, _of_tensor(name, tensor)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        text = repr(value.item() if isinstance(value, np.generic) else value)
        digest = f"{text[:_LONGEST]}… ({hashlib.sha256(text.encode()).hexdigest()[:32]})"
        yield name, text if len(text) <= _LONGEST else digest
    else:
        raise ConfigurationError(
            f"{name}: cannot compare {type(value).__name__}: pass numbers, strings, bytes, tensors, or "
            "mappings and lists of these"
        )


def _parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return (name, part) of all parts of a value; None if it has none. Parts of one name count as one."""
    if isinstance(value, DistributedSampler):
        value = {"epoch": value.epoch, "seed": value.seed}
    elif isinstance(value, torch.Generator):
        value = {"seed": value.initial_seed(), "state": value.get_state()}
    elif isinstance(value, RandomState):  # Most generators have stored no normal number, whatever their seeds.
        return [(key.removesuffix("_gauss"), part) for key, part in value._asdict().items() if part.numel()]
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    return list(value.items()) if isinstance(value, Mapping) else None


def _of_tensor(name: str, tensor: Tensor) -> str:
    """Return a tensor's dtype, shape and digest as text."""
    try:
        local = local_part(tensor)  # An operation on a DTensor would communicate.
        content = TensorContent("value", [NamedTensor("", local)])
        if local.numel() == 1:
            return f"{content.keys[0].dtype}{list(local.shape)} {local.item()!r}"
        digest = content.digests(Digester())[0].numpy().astype(">i8").tobytes().hex()
    except Exception as error:
        raise ConfigurationError(f"{name}: cannot read this tensor: {error}") from error
    key = content.keys[0]
    return f"{key.dtype}{list(key.shape)} of digest {digest}"
