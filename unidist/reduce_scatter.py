"""Reduce over all ranks and leave each its own rows of the result: reducescatter and its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unidist import basics
from unidist.backends.base import Group, Work, WorkGroup
from unidist.backends.errors import ArgumentError
from unidist.basics import Runtime
from unidist.collective import (
    STAND_INS,
    describe,
    needs_rows,
    run,
    submit,
    telling,
    tensors_of,
    wire_device,
)
from unidist.compression import Compression, Compressor
from unidist.handles import Peers, Proposal, Task
from unidist.layout import (
    NARROW_INTEGERS,
    Wire,
    check_reduction,
    check_tensor,
    divide_,
    row_elements,
    scale_,
)
from unidist.movement import allgather
from unidist.ops import is_narrowed
from unidist.process_sets import ProcessSet, global_process_set, member_group
from unidist.reduction import Average, Reduction, Sum, as_reduction
from unidist.streams import order_of


def rows_of_ranks(rows: int, size: int) -> list[int]:
    """How many rows each rank gets: the first ``rows % size`` ranks one more than the others."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _check_op(op: Any, operation: str) -> Reduction:
    if op not in (Average, Sum):
        raise ArgumentError(f"{operation} takes op=Average or op=Sum, but got {op!r}.")
    return as_reduction(op, operation)


def _task(
    tensors: Sequence[Any],
    kind: str,
    name: str | None,
    op: Reduction,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> tuple[Runtime, Group, Task]:
    """The task's value is the list of this rank's rows of each tensor."""
    runtime = basics.runtime()
    group = member_group(process_set, kind)
    op = _check_op(op, kind)
    for tensor in tensors:
        check_tensor(tensor, kind)
        needs_rows(tensor, kind)
        check_reduction(tensor, op.native, op is Average, kind)
    terms = describe(tensors, grouped=kind != "reducescatter") | {
        "op": op.label,
        "prescale_factor": float(prescale_factor),
        "postscale_factor": float(postscale_factor),
    }
    proposal = Proposal(kind, runtime.name(kind, name, group), terms)
    return runtime, group, _make_task(runtime, group, proposal, tensors)


def _make_task(
    runtime: Runtime, group: Group, proposal: Proposal, tensors: Sequence[torch.Tensor]
) -> Task:
    backend = runtime.backend
    op = Reduction[proposal.terms["op"].upper()]
    prescale_factor = proposal.terms["prescale_factor"]
    postscale_factor = proposal.terms["postscale_factor"]
    reducible = backend.reduce_dtypes - (NARROW_INTEGERS if op is Average else frozenset())
    wires = []
    for tensor in tensors:
        wire = Wire(tensor, in_place=prescale_factor == 1.0, device=wire_device(backend, tensor))
        # Flags are added up, and clamped at the end: Horovod scatters nothing but sums.
        wire.widen(reducible - {torch.uint8} if tensor.dtype == torch.bool else reducible)
        wires.append(wire)
    rows = [rows_of_ranks(tensor.shape[0], group.size) for tensor in tensors]
    outputs: list[torch.Tensor] = []

    def start(peers: Peers | None) -> Work:
        works = []
        for index, (wire, counts, tensor) in enumerate(zip(wires, rows, tensors, strict=True)):
            flat = wire.flat
            scale_(flat, prescale_factor)
            width = row_elements(tensor)
            output = flat.new_empty(counts[group.me] * width)
            outputs.append(output)
            if flat.numel():
                elements = [count * width for count in counts]
                name = f"{proposal.name}.{index}"
                if backend.matches_by_name:
                    flat = telling(flat, proposal.terms, by_rows=True)
                works.append(backend.reduce_scatter(output, flat, elements, op.native, group, name))
        return WorkGroup(works, wires)

    def finish() -> list[torch.Tensor]:
        results = []
        for wire, output, counts, tensor in zip(wires, outputs, rows, tensors, strict=True):
            if tensor.dtype == torch.bool:
                output.clamp_(max=1)
            if op is Average:
                divide_(output, group.size)
            scale_(output, postscale_factor)
            results.append(wire.new_rows(output, counts[group.me]))
        return results

    # Parts travel as messages between two ranks where a backend has nothing better.
    inline = backend.matches_by_name and backend.native_reduce_scatter
    items = sum(wire.flat.numel() for wire in wires)
    order = None if inline else order_of(tensors)
    return Task(start, finish, proposal, inline, items, order)


def _stand_in(runtime: Runtime, group: Group, proposal: Proposal) -> Task:
    own = Proposal(proposal.kind, proposal.name, proposal.terms)
    return _make_task(runtime, group, own, tensors_of(proposal))


STAND_INS["reducescatter"] = STAND_INS["grouped_reducescatter"] = _stand_in


class _Reducescatter(torch.autograd.Function):
    """The gradient is what all ranks have of it, times the number of ranks for a sum."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        name: str | None,
        op: Reduction,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        arguments = (kind, name, op, process_set, prescale_factor, postscale_factor)
        ctx.process_set = process_set
        ctx.factor = prescale_factor * postscale_factor
        if op is Sum:
            ctx.factor *= member_group(process_set, kind).size
        ctx.set_materialize_grads(True)
        return tuple(run(*_task(tensors, *arguments)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        results = []
        for gradient in gradients:
            scaled = gradient if ctx.factor == 1.0 else gradient * ctx.factor
            results.append(allgather(scaled, process_set=ctx.process_set))
        return (None,) * 6 + tuple(results)


def _scatter(
    tensors: Sequence[Any],
    kind: str,
    name: str | None,
    compression: type[Compressor],
    op: Reduction,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> list[torch.Tensor]:
    basics.runtime()
    op = _check_op(op, kind)
    for tensor in tensors:
        needs_rows(check_tensor(tensor, kind), kind)
    pairs = [compression.compress(tensor) for tensor in tensors]
    if op is Average and tensors and all(map(is_narrowed, pairs, tensors)):
        # The sum may overflow the narrow type where the average does not.
        size = member_group(process_set, kind).size
        pairs = [compression.compress(tensor / size) for tensor in tensors]
        op = Sum
    compressed = [pair[0] for pair in pairs]
    arguments = (kind, name, op, process_set, prescale_factor, postscale_factor)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in compressed):
        outputs = list(_Reducescatter.apply(*arguments, *compressed))
    else:
        outputs = run(*_task(compressed, *arguments))
    return [compression.decompress(o, pair[1]) for o, pair in zip(outputs, pairs, strict=True)]


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks of the set, and return this rank's rows of the result.

    Args:
        tensor: at least one dimension; equal in shape and dtype on all ranks. It is not modified.
            Where its rows cannot be divided evenly, the first ranks get one more than the others;
            with fewer rows than ranks the last ones get none.
        name: names the operation in errors and timelines; equal on all ranks.
        compression: ``Compression.fp16`` reduces in half precision.
        op: Average or Sum.
        process_set: the ranks that take part; all of them must call.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        A new tensor. Differentiable: the gradient is gathered from all ranks, and multiplied by
        the factors, and by the number of ranks for a Sum.

    Raises:
        ValueError: before init; no dimension; another op; this rank is not in the set.
        HorovodInternalError: dtypes, shapes, op or factors differ between ranks, on all of them; a
            peer failed or came too late.
    """
    return _scatter(
        [tensor],
        "reducescatter",
        name,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
    )[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``reducescatter``; ``synchronize(handle)`` returns the new tensor."""
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    return submit(*_task([tensor], "reducescatter", *arguments), single=True)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors as one operation; each as by ``reducescatter``."""
    return _scatter(
        list(tensors),
        "grouped_reducescatter",
        name,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
    )


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``grouped_reducescatter``; ``synchronize(handle)`` returns the list of new tensors."""
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    return submit(*_task(list(tensors), "grouped_reducescatter", *arguments))
