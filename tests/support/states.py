"""The public state of a StateManager, as plain numbers for bitwise comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8dist import StateManager
from fp8dist.state.storage import from_bytes

_BY_SLOT = ("scale", "amax", "cold", "history")


def bits(tensor: Tensor) -> Any:
    """Return the bits of a float32 tensor as (nested lists of) int32."""
    return tensor.detach().contiguous().view(torch.int32).tolist()


def saved_of(manager: StateManager) -> dict[str, Any]:
    """Merge the states of all keys of ``state_dict()``: names and tensors, in slot order."""
    parts = [from_bytes(blob, key)[0] for key, blob in manager.state_dict().items()]
    slots = [slot for part in parts for slot in part["slots"]]
    order = sorted(range(len(slots)), key=slots.__getitem__)
    saved = {
        **parts[0],
        "slots": [slots[i] for i in order],
        "formats": [[name for part in parts for name in part["formats"]][i] for i in order],
        "counters": torch.cat([part["counters"] for part in parts], 1)[:, order],
    }
    saved.update({name: torch.cat([part[name] for part in parts])[order] for name in _BY_SLOT})
    return saved


def state_of(manager: StateManager) -> dict[tuple[str, str], dict[str, Any]]:
    """Return history, scale, inv_scale, amax, cold, counters (taken, non-finite) and saturated of each slot."""
    saved = saved_of(manager)
    state = {}
    for place, (fqn, role) in enumerate(saved["slots"]):
        state[fqn, role] = {
            "history": bits(manager.slot(fqn, role).amax_history),
            "scale": bits(manager.slot(fqn, role).scale),
            "inv_scale": bits(manager.slot(fqn, role).inv_scale),
            "amax": bits(manager.slot(fqn, role).amax),
            "cold": bool(saved["cold"][place]),
            "counters": saved["counters"][:2, place].tolist(),
            "saturated": int(saved["counters"][2, place]),
        }
    return state


def without(state: dict[Any, dict[str, Any]], *names: str) -> dict[Any, dict[str, Any]]:
    """Return the state without some entries of each slot."""
    return {slot: {k: v for k, v in entry.items() if k not in names} for slot, entry in state.items()}
