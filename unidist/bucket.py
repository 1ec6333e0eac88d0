"""Flat buckets: gradients are views into them, so a full bucket is reduced without packing.

    bucket 0 (1 MiB)                 bucket 1 (25 MiB)               …
    ┌────────┬──────┬─────┬───────┐  ┌───────────────┬───────┬────┬───────┐
    │ fc2.w  │ fc2.b│fc1.b│ flags │  │ fc1.w         │conv2.w│ …  │ flags │
    └────────┴──────┴─────┴───────┘  └───────────────┴───────┴────┴───────┘
      ▲ param.grad is this view

Parameters are laid out in the order in which gradients came on rank 0's first backward, so that the
first bucket is full early. ``plan`` is a pure function; the plan is agreed once by all ranks.

The flags at the end travel with the gradients: one number per parameter, 1 where this rank has a
gradient for it. After the reduction a 0 says that no rank had one, so that a parameter that nobody
used keeps ``grad is None`` and is left alone by the optimizer, as in a single process. The very
last number is 1 on a rank that has a step to do, and 0 on one that has joined (see ``join.py``).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: bytes of the first bucket, which should be on its way early, and of the others
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


def bucket_limit() -> int:
    """The size of a bucket in bytes: HOROVOD_FUSION_THRESHOLD, or ours."""
    text = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    if not text:
        return BUCKET_BYTES
    if not text.isdecimal():
        raise ValueError(f"HOROVOD_FUSION_THRESHOLD must be a number of bytes, but is {text!r}.")
    return int(text)


@dataclass(frozen=True)
class Shape:
    """What the plan must know of a parameter."""

    bytes: int
    #: parameters of different kinds (dtype, device) never share a bucket
    kind: str
    #: parameters of one group share one bucket of their own; None for no group
    group: int | None = None


def plan(
    shapes: Sequence[Shape],
    order: Sequence[int],
    first_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[list[int]]:
    """Lay parameters out in buckets; return each bucket's parameter indices.

    Args:
        shapes: of all parameters, by index.
        order: the indices to place, in the order in which their gradients are expected.
        first_bytes: limit of the first bucket of each kind.
        bucket_bytes: limit of the following ones. A larger parameter gets a bucket of its own.

    Returns:
        The buckets, in the order in which they will be full: each stands where its last parameter
        came.
    """
    closed: list[tuple[int, list[int]]] = []  # (position of the last parameter, members)
    filling: dict[str, tuple[list[int], int, int]] = {}  # kind -> members, bytes, last position
    limits: dict[str, int] = {}
    groups: dict[tuple[int, str], tuple[list[int], int]] = {}
    for position, index in enumerate(order):
        shape = shapes[index]
        if shape.group is not None:
            members, _ = groups.get((shape.group, shape.kind), ([], 0))
            groups[shape.group, shape.kind] = ([*members, index], position)
            continue
        limit = limits.setdefault(shape.kind, first_bytes)
        members, filled, last = filling.get(shape.kind, ([], 0, 0))
        if members and filled + shape.bytes > limit:
            closed.append((last, members))
            members, filled = [], 0
            limits[shape.kind] = bucket_bytes
        filling[shape.kind] = ([*members, index], filled + shape.bytes, position)
    closed.extend((last, members) for members, _, last in filling.values())
    closed.extend((last, members) for members, last in groups.values())
    return [members for _, members in sorted(closed, key=lambda entry: entry[0])]


class Bucket:
    """One flat buffer, the gradients in it, and what is still missing before it can be reduced.

    Args:
        parameters: in the order of their views; one dtype, one device.
        dense: for each, whether its view may have the parameter's own strides (they are equal on
            all ranks, and dense); else the view is contiguous.
        name: names its all-reduce; equal on all ranks.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], dense: Sequence[bool], name: str
    ) -> None:
        self.name = name
        self.sizes = [parameter.numel() for parameter in parameters]
        total, count = sum(self.sizes), len(parameters)
        first = parameters[0]
        self.flat = torch.zeros(total + count + 1, dtype=first.dtype, device=first.device)
        #: the gradients without the flags
        self.gradients = self.flat[:total]
        self.flags = self.flat[total:-1]
        self.active = self.flat[-1:]
        self.reset_flags()
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter, size, keeps_strides in zip(parameters, self.sizes, dense, strict=True):
            part = self.flat[start : start + size]
            self.views.append(
                part.as_strided(parameter.shape, parameter.stride())
                if keeps_strides
                else part.view(parameter.shape)
            )
            start += size
        #: views whose gradient is not there yet
        self.missing = count

    def reset_flags(self) -> None:
        """Say that every gradient is there, and a step to do."""
        self.flags.fill_(1)
        self.active.fill_(1)

    def zeros(self) -> Bucket:
        """A bucket of the same layout, for a rank that has joined."""
        shadow = copy.copy(self)
        shadow.flat = torch.zeros_like(self.flat)
        shadow.gradients = shadow.flat[: self.gradients.numel()]
        shadow.active = shadow.flat[-1:]
        return shadow


def keeps_strides(parameter: torch.Tensor) -> bool:
    """Whether the parameter fills its memory without holes or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(parameter.stride(), parameter.shape, strict=True)
        if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def check_still_frozen(frozen: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise ValueError when a parameter that nobody watches requires a gradient by now."""
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise ValueError(
                f"Parameter {name!r} was frozen when DistributedOptimizer was made and requires a "
                "gradient now, which would not be reduced. Wrap the optimizer again after changing "
                "requires_grad."
            )
