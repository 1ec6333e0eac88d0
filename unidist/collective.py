"""What all collectives have in common: where their elements travel, and how the engine gets them.

Every call becomes one task of the group's engine: ``start`` hands the flat wire to the backend,
``finish`` turns what comes back into the caller's dtype, shape, device and memory format. A
blocking call runs its task at once; an ``_async`` one returns an integer handle.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unidist import basics
from unidist.backends.base import Backend, Capability, Group
from unidist.backends.errors import ArgumentError
from unidist.basics import Runtime
from unidist.handles import Peers, Proposal, Task

_HOST = torch.device("cpu")

#: bytes of a payload that travels with the control message
INLINE_BYTES = 1024


def wire_device(backend: Backend, tensor: torch.Tensor) -> torch.device | None:
    """Where a backend wants a tensor's elements: where they are, or in host memory."""
    if tensor.device.type == "cpu" or Capability.CUDA in backend.capabilities:
        return None
    return _HOST


def run(runtime: Runtime, group: Group, task: Task) -> Any:
    """Complete a task in the caller's thread and return its value."""
    return runtime.engine_of(group).run(task).result()


def submit(runtime: Runtime, group: Group, task: Task, single: bool = False) -> int:
    """Start a task and return its handle."""
    engine = runtime.engine_of(group)
    return runtime.handles.add(engine.submit(task), engine, single)


def inline_payload(runtime: Runtime, group: Group, flats: Sequence[torch.Tensor]) -> bytes | None:
    """The elements as bytes, where they are few enough to travel with the control message."""
    if runtime.backend.matches_by_name or group.size == 1:
        return None
    total = 0
    for flat in flats:
        total += flat.numel() * flat.element_size()
        if total > INLINE_BYTES or flat.device.type != "cpu":
            return None
    return b"".join(flat.view(torch.uint8).numpy().tobytes() for flat in flats)


def from_payload(data: bytes, like: torch.Tensor, count: int, offset: int = 0) -> torch.Tensor:
    """``count`` elements of a payload, as a flat tensor of the dtype of ``like``."""
    if count == 0:
        return like.new_empty(0)
    size = count * like.element_size()
    return torch.frombuffer(bytearray(data[offset : offset + size]), dtype=like.dtype)


def describe(tensors: Sequence[torch.Tensor], grouped: bool, rows: bool = False) -> dict[str, Any]:
    """The terms of tensors that must be equal on all ranks.

    Args:
        rows: whether the first dimension may differ.
    """
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    shapes = [list(tensor.shape[rows:]) for tensor in tensors]
    devices = [tensor.device.type for tensor in tensors]
    after = " after the first dimension" if rows else ""
    if grouped:
        count = {"number of tensors": len(tensors)}
        return count | {"dtypes": dtypes, f"shapes{after}": shapes, "devices": devices}
    return {"dtype": dtypes[0], f"shape{after}": shapes[0], "device": devices[0]}


def needs_rows(tensor: torch.Tensor, operation: str) -> None:
    """Raise when a tensor has no first dimension to divide or to join along.

    Raises:
        ArgumentError: it has none.
    """
    if tensor.dim() == 0:
        raise ArgumentError(
            f"{operation} works along the first dimension, but got a tensor without dimensions; "
            "pass tensor.reshape(1)."
        )


# -- ranks that have joined -----------------------------------------------------------------------

#: kind of operation -> makes the task of a rank that has joined, from what another rank proposed
STAND_INS: dict[str, Callable[[Runtime, Group, Proposal], Task]] = {}

#: kind of operation -> why it cannot run without the ranks that have joined, or ""
REFUSALS: dict[str, Callable[[Proposal, Sequence[int]], str]] = {}


def stand_in(proposal: Proposal, group: Group) -> Task:
    """The part of a rank that has joined in an operation of the others: zeros, or no rows."""
    return STAND_INS[proposal.kind](basics.runtime(), group, proposal)


def refusal(proposal: Proposal, joined: Sequence[int]) -> str:
    """Why an operation cannot run without the (world) ranks that have joined; "" when it can."""
    if proposal.kind not in STAND_INS:
        return f"{proposal.kind} needs something from every rank"
    refuses = REFUSALS.get(proposal.kind)
    return refuses(proposal, joined) if refuses else ""


def tensors_of(proposal: Proposal, rows: int | None = None) -> list[torch.Tensor]:
    """Zeros like the tensors that another rank has described; ``rows`` in the first dimension."""
    terms = proposal.terms
    grouped = "number of tensors" in terms
    keys = [key for key in terms if key.startswith("shape")]
    shapes = terms[keys[0]] if grouped else [terms[keys[0]]]
    dtypes = terms["dtypes"] if grouped else [terms["dtype"]]
    devices = terms["devices"] if grouped else [terms["device"]]
    lead = [] if rows is None else [rows]
    return [
        torch.zeros(lead + shape, dtype=getattr(torch, dtype), device=device)
        for shape, dtype, device in zip(shapes, dtypes, devices, strict=True)
    ]


def own_of(peers: Peers) -> list[Any]:
    """What each rank told of its own; None for a rank that has joined."""
    return [None if peer is None else peer.own for peer in peers]


# -- engines that match names themselves ----------------------------------------------------------


def telling(flat: torch.Tensor, terms: Mapping[str, Any], by_rows: bool = False) -> torch.Tensor:
    """A view of a wire whose shape tells what such an engine compares, but would not see.

    Averages are divided and factors applied above the engine, and wires are flat: ranks that
    differ in that would get a wrong result, and no error. So the view has the tensor's shape where
    it can, and dimensions of 1 after it, whose number stands for the rest. They cost nothing.

    Args:
        flat: the wire.
        terms: what must be equal on all ranks.
        by_rows: the engine divides the wire: its first dimension has to stay.
    """
    shape = terms.get("shape")
    rest = [terms["prescale_factor"], terms["postscale_factor"]]
    if by_rows or not shape or len(shape) > 8 or math.prod(shape) != flat.numel():
        rest += [shape, terms.get("shapes")]
        shape = [flat.numel()]
    number = 0 if rest == [1.0, 1.0] else zlib.crc32(json.dumps(rest).encode()) % 23 + 1
    return flat.view([*shape] + [1] * (2 * number + (terms["op"] == "Average")))
