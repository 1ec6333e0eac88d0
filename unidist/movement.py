"""Collectives that move elements and leave them as they are: allgather, broadcast, alltoall."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from unidist import basics
from unidist.backends.base import Completed, Group, Rows, Work, WorkGroup
from unidist.backends.errors import ArgumentError
from unidist.basics import Runtime
from unidist.collective import (
    REFUSALS,
    STAND_INS,
    describe,
    from_payload,
    inline_payload,
    needs_rows,
    own_of,
    run,
    submit,
    tensors_of,
    wire_device,
)
from unidist.handles import Peers, Proposal, Task
from unidist.layout import Wire, check_tensor
from unidist.ops import allreduce
from unidist.process_sets import ProcessSet, global_process_set, member_group
from unidist.reduction import Reduction
from unidist.streams import order_of

# -- allgather --------------------------------------------------------------------------------

#: a gathered tensor, and how many rows each rank gave
Gathered = tuple[torch.Tensor, list[int]]


def _allgather_task(
    tensors: Sequence[Any], kind: str, name: str | None, process_set: ProcessSet
) -> tuple[Runtime, Group, Task]:
    """The task's value is a list of ``Gathered``."""
    runtime = basics.runtime()
    group = member_group(process_set, kind)
    for tensor in tensors:
        check_tensor(tensor, kind)
        needs_rows(tensor, kind)
    terms = describe(tensors, grouped=kind != "allgather", rows=True)
    own = [tensor.shape[0] for tensor in tensors]
    proposal = Proposal(kind, runtime.name(kind, name, group), terms, own)
    return runtime, group, _make_allgather(runtime, group, proposal, tensors)


def _make_allgather(
    runtime: Runtime, group: Group, proposal: Proposal, tensors: Sequence[torch.Tensor]
) -> Task:
    backend = runtime.backend
    wires = [Wire(t, in_place=True, device=wire_device(backend, t)) for t in tensors]
    moved = [wire.moved(backend.move_dtypes) for wire in wires]
    proposal.payload = inline_payload(runtime, group, moved)
    outputs: list[torch.Tensor] = []
    counts: list[list[int]] = []  # rows of each rank, by tensor
    gathers: list[Rows] = []

    def start(peers: Peers | None) -> Work:
        names = (
            [proposal.name]
            if len(moved) == 1
            else [f"{proposal.name}.{i}" for i in range(len(moved))]
        )
        if peers is None:
            for wire, flat, each in zip(wires, moved, names, strict=True):
                gathers.append(backend.allgather_rows(wire.rows(flat), group, each))
            return WorkGroup(gathers)
        told = [[0] * len(moved) if own is None else own for own in own_of(peers)]
        counts.extend([rows[i] for rows in told] for i in range(len(moved)))
        widths = [wire.row_width(flat) for wire, flat in zip(wires, moved, strict=True)]
        if all(peer is None or peer.payload is not None for peer in peers) and group.size > 1:
            _join_payloads(peers, told, moved, widths, outputs)
            return Completed()
        works = []
        for flat, rows, width, each in zip(moved, counts, widths, names, strict=True):
            output = flat.new_empty(sum(rows) * width)
            outputs.append(output)
            if output.numel():
                elements = [count * width for count in rows]
                works.append(backend.allgather(output, flat, elements, group, each))
        return WorkGroup(works, moved)

    def finish() -> list[Gathered]:
        if gathers:
            results: list[Gathered] = []
            for wire, gather in zip(wires, gathers, strict=True):
                output = gather.output
                results.append((wire.new_rows(output.reshape(-1), output.shape[0]), []))
            return results
        return [
            (wire.new_rows(output, sum(rows)), rows)
            for wire, output, rows in zip(wires, outputs, counts, strict=True)
        ]

    items = sum(flat.numel() for flat in moved)
    order = None if backend.matches_by_name else order_of(tensors)
    return Task(start, finish, proposal, backend.matches_by_name, items, order)


def _join_payloads(
    peers: Peers,
    told: Sequence[Sequence[int]],
    moved: Sequence[torch.Tensor],
    widths: Sequence[int],
    outputs: list[torch.Tensor],
) -> None:
    """Concatenate what has travelled with the control message."""
    offsets = [0] * len(peers)
    for index, (flat, width) in enumerate(zip(moved, widths, strict=True)):
        parts = []
        for rank, peer in enumerate(peers):
            count = told[rank][index] * width
            if peer is not None and peer.payload is not None:
                parts.append(from_payload(peer.payload, flat, count, offsets[rank]))
                offsets[rank] += count * flat.element_size()
        outputs.append(torch.cat(parts))


def _allgather_stand_in(runtime: Runtime, group: Group, proposal: Proposal) -> Task:
    tensors = tensors_of(proposal, rows=0)
    own = Proposal(proposal.kind, proposal.name, proposal.terms, [0] * len(tensors))
    return _make_allgather(runtime, group, own, tensors)


STAND_INS["allgather"] = STAND_INS["grouped_allgather"] = _allgather_stand_in


class _Allgather(torch.autograd.Function):
    """The gradient is averaged over the ranks, and each rank keeps the rows that were its own."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.own = [tensor.shape[0] for tensor in tensors]
        ctx.process_set = process_set
        gathered: list[Gathered] = run(*_allgather_task(tensors, kind, name, process_set))
        ctx.rows = [rows for _, rows in gathered]
        return tuple(output for output, _ in gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        results = []
        for gradient, own, rows in zip(gradients, ctx.own, ctx.rows, strict=True):
            averaged = allreduce(gradient, op=Reduction.AVERAGE, process_set=ctx.process_set)
            if not rows:  # the engine has matched the ranks by itself, and has not told
                mine = torch.tensor([own], device="cpu")
                rows = allgather(mine, process_set=ctx.process_set).tolist()
            start = sum(rows[: ctx.process_set.rank()])
            results.append(averaged.narrow(0, start, own))
        return (None, None, None, *results)


def _wants_gradient(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )


def _gather_all(
    tensors: Sequence[Any], kind: str, name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    if _wants_gradient(tensors):
        for tensor in tensors:
            needs_rows(check_tensor(tensor, kind), kind)
        return list(_Allgather.apply(kind, name, process_set, *tensors))
    gathered: list[Gathered] = run(*_allgather_task(tensors, kind, name, process_set))
    return [output for output, _ in gathered]


def _submit_allgather(
    tensors: Sequence[Any], kind: str, name: str | None, process_set: ProcessSet, single: bool
) -> int:
    runtime, group, task = _allgather_task(tensors, kind, name, process_set)
    task.then(lambda gathered: [output for output, _ in gathered])
    return submit(runtime, group, task, single)


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order.

    Args:
        tensor: at least one dimension. The first may differ between ranks, and be 0; the others
            and the dtype must agree.
        name: names the operation in errors and timelines; equal on all ranks.
        process_set: the ranks that take part; all of them must call.

    Returns:
        A new tensor, equal on all ranks. Differentiable: each rank gets its rows of the averaged
        gradient.

    Raises:
        ValueError: before init; no dimension; this rank is not in the set.
        HorovodInternalError: dtypes or the other dimensions differ between ranks, on all of them;
            a peer failed or came too late.
    """
    return _gather_all([tensor], "allgather", name, process_set)[0]


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allgather``; ``synchronize(handle)`` returns the new tensor."""
    return _submit_allgather([tensor], "allgather", name, process_set, single=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors as one operation; each as by ``allgather``, in a list."""
    return _gather_all(list(tensors), "grouped_allgather", name, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allgather``; ``synchronize(handle)`` returns the list of new tensors."""
    return _submit_allgather(list(tensors), "grouped_allgather", name, process_set, single=False)


# -- broadcast --------------------------------------------------------------------------------


def root_in_group(root_rank: int, group: Group, operation: str) -> int:
    """Translate a global root rank to the group's; ArgumentError when it is not a member."""
    if root_rank not in group.ranks:
        raise ArgumentError(
            f"{operation} got root_rank={root_rank!r}, which is a global rank and must be one of "
            f"{list(group.ranks)}."
        )
    return group.ranks.index(root_rank)


def _broadcast_task(
    tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> tuple[Runtime, Group, Task]:
    runtime = basics.runtime()
    group = member_group(process_set, "broadcast")
    check_tensor(tensor, "broadcast", in_place)
    root_in_group(root_rank, group, "broadcast")
    terms = describe([tensor], grouped=False) | {"root_rank": int(root_rank)}
    proposal = Proposal("broadcast", runtime.name("broadcast", name, group), terms)
    return runtime, group, _make_broadcast(runtime, group, proposal, tensor, in_place)


def _make_broadcast(
    runtime: Runtime, group: Group, proposal: Proposal, tensor: torch.Tensor, in_place: bool
) -> Task:
    backend = runtime.backend
    root = group.ranks.index(proposal.terms["root_rank"])
    wire = Wire(tensor, in_place, wire_device(backend, tensor))
    moved = wire.moved(backend.move_dtypes)
    if group.me == root:
        proposal.payload = inline_payload(runtime, group, [moved])

    def start(peers: Peers | None) -> Work:
        if moved.numel() == 0:
            return Completed()
        if peers is not None:
            source = peers[root]
            assert source is not None
            if source.payload is not None:
                if group.me != root:
                    moved.copy_(from_payload(source.payload, moved, moved.numel()))
                return Completed()
        return backend.broadcast(moved, root, group, proposal.name)

    def finish() -> torch.Tensor:
        result = wire.result()
        return tensor if in_place else result

    inline = backend.matches_by_name
    order = None if inline else order_of([tensor])
    return Task(start, finish, proposal, inline, moved.numel(), order)


def _broadcast_stand_in(runtime: Runtime, group: Group, proposal: Proposal) -> Task:
    own = Proposal(proposal.kind, proposal.name, proposal.terms)
    return _make_broadcast(runtime, group, own, tensors_of(proposal)[0], in_place=True)


def _broadcast_refusal(proposal: Proposal, joined: Sequence[int]) -> str:
    root = proposal.terms["root_rank"]
    return f"the root, rank {root}, is among them" if root in joined else ""


STAND_INS["broadcast"] = _broadcast_stand_in
REFUSALS["broadcast"] = _broadcast_refusal


class _Broadcast(torch.autograd.Function):
    """The gradient is averaged over the ranks; only the root's tensor has had an influence."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        output: torch.Tensor = run(*_broadcast_task(tensor, root_rank, name, process_set, False))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        averaged = allreduce(gradient, op=Reduction.AVERAGE, process_set=ctx.process_set)
        if basics.rank() != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the root's tensor on every rank, as a new tensor.

    Args:
        tensor: on every rank of the root's shape and dtype; only the root's values matter.
        root_rank: the GLOBAL rank to take it from, with a process set too; equal on all ranks.
        name: names the operation in errors and timelines; equal on all ranks.
        process_set: the ranks that take part; all of them must call.

    Returns:
        A new tensor, on the root too. Differentiable: the root gets the averaged gradient, the
        others zeros.

    Raises:
        ValueError: before init; the root is not in the set; this rank is not in the set.
        HorovodInternalError: shapes, dtypes or roots differ between ranks, on all of them; a peer
            failed or came too late.
    """
    output: torch.Tensor
    if _wants_gradient([tensor]):
        output = _Broadcast.apply(tensor, root_rank, name, process_set)
    else:
        output = run(*_broadcast_task(tensor, root_rank, name, process_set, False))
    return output


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast``; ``synchronize(handle)`` returns the new tensor."""
    return submit(*_broadcast_task(tensor, root_rank, name, process_set, False))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor with the root's and return it; arguments as in ``broadcast``."""
    output: torch.Tensor = run(*_broadcast_task(tensor, root_rank, name, process_set, True))
    return output


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast_``; leave the tensor alone until ``synchronize(handle)`` returns it."""
    return submit(*_broadcast_task(tensor, root_rank, name, process_set, True))


# -- alltoall ---------------------------------------------------------------------------------


def _splits(tensor: torch.Tensor, splits: Any, group: Group) -> list[int]:
    """The number of rows for each rank, checked."""
    rows, size = tensor.shape[0], group.size
    if splits is None:
        if rows % size:
            raise ArgumentError(
                f"alltoall without splits divides the first dimension evenly, but {rows} rows "
                f"cannot be divided over {size} ranks. Pass splits: a number of rows for each rank."
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.is_floating_point() or splits.is_complex():
            raise ArgumentError(
                "alltoall takes splits as a list of integers or a one-dimensional integer tensor, "
                f"but got a tensor of {splits.dtype} of shape {tuple(splits.shape)}."
            )
        splits = splits.tolist()
    try:
        counts = [operator.index(count) for count in splits]
    except TypeError:
        counts = [-1]
    if any(count < 0 for count in counts):
        raise ArgumentError(f"alltoall got splits={splits!r}; pass integers of at least 0.")
    if len(counts) != size or sum(counts) > rows:
        raise ArgumentError(
            f"alltoall needs one split for each of {size} ranks, of together at most {rows} rows "
            f"(the tensor's first dimension), but got splits={counts!r}, in all {sum(counts)}."
        )
    return counts


def _alltoall_task(
    tensor: Any, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[Runtime, Group, Task]:
    """The task's value is the pair (tensor, received splits)."""
    runtime = basics.runtime()
    group = member_group(process_set, "alltoall")
    check_tensor(tensor, "alltoall")
    needs_rows(tensor, "alltoall")
    counts = _splits(tensor, splits, group)
    backend = runtime.backend
    terms = describe([tensor], grouped=False, rows=True)
    proposal = Proposal("alltoall", runtime.name("alltoall", name, group), terms, counts)
    wire = Wire(tensor, in_place=True, device=wire_device(backend, tensor))
    moved = wire.moved(backend.move_dtypes)
    width = wire.row_width(moved)
    used = moved[: sum(counts) * width]
    splits_device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    received: list[int] = []
    outputs: list[torch.Tensor] = []
    native: list[Any] = []

    def start(peers: Peers | None) -> Work:
        if peers is None:
            native.append(
                backend.alltoall_rows(wire.rows(moved)[: sum(counts)], counts, group, proposal.name)
            )
            return native[0]
        received.extend(own[group.me] for own in own_of(peers))
        output = moved.new_empty(sum(received) * width)
        outputs.append(output)
        if not width:
            return Completed()
        return backend.alltoall(
            output,
            used,
            [count * width for count in counts],
            [count * width for count in received],
            group,
            proposal.name,
        )

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        if native:
            output, rows = native[0].output, native[0].received
        else:
            output, rows = outputs[0], received
        told = torch.tensor(rows, dtype=torch.int32, device=splits_device)
        return wire.new_rows(output.reshape(-1), sum(rows)), told

    inline = backend.matches_by_name
    order = None if inline else order_of([tensor])
    return runtime, group, Task(start, finish, proposal, inline, used.numel(), order)


class _Alltoall(torch.autograd.Function):
    """Each rank gets back the gradient of the rows that it had sent."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = run(*_alltoall_task(tensor, splits, name, process_set))
        ctx.received = received
        ctx.rows = tensor.shape[0]
        ctx.process_set = process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        returned, _ = alltoall(gradient, ctx.received, process_set=ctx.process_set)
        unsent = ctx.rows - returned.shape[0]
        if unsent:
            returned = torch.cat([returned, returned.new_zeros(unsent, *returned.shape[1:])])
        return returned, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send a part of the tensor to each rank, and concatenate what comes, in rank order.

    Args:
        tensor: at least one dimension; dtype and the dimensions after the first agree on all ranks.
        splits: how many rows go to each rank, integers as a list or tensor; rows beyond their sum
            are not sent. None divides the first dimension evenly.
        name: names the operation in errors and timelines; equal on all ranks.
        process_set: the ranks that take part; all of them must call.

    Returns:
        With splits None the new tensor; else the pair of it and ``received_splits``, an int32
        tensor of the number of rows that came from each rank. Differentiable.

    Raises:
        ValueError: before init; no dimension; splits that are not one integer for each rank or ask
            for more rows than there are; rows that cannot be divided evenly; not in the set.
        HorovodInternalError: dtypes or shapes differ between ranks, on all of them; a rank has
            joined; a peer failed or came too late.
    """
    if _wants_gradient([tensor]):
        output, received = _Alltoall.apply(tensor, splits, name, process_set)
    else:
        output, received = run(*_alltoall_task(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``alltoall``; ``synchronize(handle)`` returns the pair (tensor, received_splits)."""
    return submit(*_alltoall_task(tensor, splits, name, process_set))
