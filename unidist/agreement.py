"""Before many tensors travel without names, the ranks make sure that they mean the same ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

from unidist import basics
from unidist.backends.base import Group
from unidist.backends.errors import HorovodInternalError


def exchange_json(record: Any, group: Group) -> list[Any]:
    """Every rank's record, in rank order. Blocks; all ranks of the group must call it."""
    runtime = basics.runtime()
    data = json.dumps(record).encode()
    name = runtime.name("exchange", None, group)
    return [json.loads(answer) for answer in runtime.engine_of(group).exchange(data, name)]


def digest(value: Any) -> str:
    """A short text that is equal for equal JSON values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def agree_on_tensors(
    named: Iterable[tuple[str, torch.Tensor]], operation: str, group: Group
) -> None:
    """Check that all ranks of the group have the same names, dtypes and shapes in the same order.

    Raises:
        HorovodInternalError: on all ranks, naming the first difference.
    """
    mine = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in named]
    if len(set(exchange_json(digest(mine), group))) == 1:
        return
    peers = exchange_json(mine, group)
    first, lead = group.ranks[0], peers[0]
    for rank, theirs in zip(group.ranks, peers, strict=True):
        for index in range(max(len(lead), len(theirs))):
            ours = lead[index] if index < len(lead) else None
            there = theirs[index] if index < len(theirs) else None
            if ours != there:
                raise HorovodInternalError(
                    f"{operation} needs the same tensors on all ranks, but entry {index} is "
                    f"{_spell(ours)} on rank {first} and {_spell(there)} on rank {rank} (rank "
                    f"{first} has {len(lead)} tensors, rank {rank} has {len(theirs)})."
                )


def agree_on_options(options: dict[str, Any], operation: str, group: Group) -> None:
    """Check that all ranks of the group were given the same options.

    Raises:
        HorovodInternalError: on all ranks, with both values.
    """
    peers = exchange_json(options, group)
    check_options(dict(zip(group.ranks, peers, strict=True)), operation)


def check_options(options: dict[int, dict[str, Any]], operation: str) -> None:
    """Compare the options that ranks were given, by (world) rank.

    Raises:
        HorovodInternalError: two of them differ, with both values.
    """
    first, ours = next(iter(options.items()))
    for rank, theirs in options.items():
        differ = [name for name in theirs if theirs[name] != ours[name]]
        if differ:
            raise HorovodInternalError(
                f"{operation} needs the same options on all ranks, but "
                + "; ".join(
                    f"{name} is {ours[name]!r} on rank {first} and {theirs[name]!r} on rank {rank}"
                    for name in differ
                )
                + "."
            )


def _spell(entry: list[Any] | None) -> str:
    if entry is None:
        return "missing"
    name, dtype, shape = entry
    return f"{name!r} {dtype} {tuple(shape)}"
