"""Reductions of a tensor, or of several as one, over all ranks: allreduce and its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unidist import basics
from unidist.adasum import ADASUM_DTYPES, adasum_
from unidist.backends.base import (
    ACCUMULATE,
    Backend,
    Capability,
    Completed,
    Group,
    ReduceOp,
    Work,
    WorkGroup,
)
from unidist.basics import Runtime
from unidist.collective import (
    INLINE_BYTES,
    STAND_INS,
    describe,
    from_payload,
    inline_payload,
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
    as_bool_op,
    check_reduction,
    check_tensor,
    divide_,
    scale_,
)
from unidist.process_sets import ProcessSet, global_process_set, member_group
from unidist.reduction import Reduction, resolve
from unidist.streams import order_of


def reduce_flats(
    flats: Sequence[torch.Tensor], op: ReduceOp, backend: Backend, group: Group, name: str
) -> Work:
    """Start the reduction of flat wires in place; each is a tensor of its own to Adasum."""
    names = [name] if len(flats) == 1 else [f"{name}.{i}" for i in range(len(flats))]
    if op is ReduceOp.ADASUM and not native_adasum(backend, group):
        for pack in _packs(flats):
            host = pack.flat.cpu()
            adasum_(host, [flat.numel() for flat in pack.flats], backend, group)
            pack.flat.copy_(host)
            pack.spread()
        return Completed()
    return WorkGroup(
        [
            backend.allreduce(flat, op, group, each)
            for flat, each in zip(flats, names, strict=True)
            if flat.numel()
        ],
        flats,
    )


class _Pack:
    """Flat wires of one dtype and device laid end to end; a single one is itself the pack."""

    def __init__(self, flats: Sequence[torch.Tensor]) -> None:
        self.flats = flats
        self.flat = flats[0] if len(flats) == 1 else torch.cat(list(flats))

    def spread(self) -> None:
        """Copy the packed elements back to the wires."""
        if len(self.flats) > 1:
            for flat, part in zip(
                self.flats, self.flat.split([flat.numel() for flat in self.flats]), strict=True
            ):
                flat.copy_(part)


def _packs(flats: Sequence[torch.Tensor]) -> list[_Pack]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for flat in flats:
        kinds.setdefault((flat.dtype, flat.device), []).append(flat)
    return [_Pack(members) for members in kinds.values()]


def native_adasum(backend: Backend, group: Group) -> bool:
    """Whether the backend's own Adasum serves: Horovod's wants 2^n ranks, and all of them."""
    return (
        Capability.ADASUM in backend.capabilities
        and group is backend.world
        and group.size & (group.size - 1) == 0
    )


def _allreduce_task(
    tensors: Sequence[Any],
    kind: str,
    name: str | None,
    op: Reduction,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    in_place: bool,
) -> tuple[Runtime, Group, Task]:
    """Check and pack; the task's value is the list of results."""
    runtime = basics.runtime()
    group = member_group(process_set, kind)
    for tensor in tensors:
        check_tensor(tensor, kind, in_place)
        check_reduction(tensor, op.native, op is Reduction.AVERAGE, kind)
    terms = describe(tensors, grouped=kind != "allreduce") | {
        "op": op.label,
        "prescale_factor": float(prescale_factor),
        "postscale_factor": float(postscale_factor),
    }
    proposal = Proposal(kind, runtime.name(kind, name, group), terms)
    return runtime, group, _make_task(runtime, group, proposal, tensors, op, in_place)


def _make_task(
    runtime: Runtime,
    group: Group,
    proposal: Proposal,
    tensors: Sequence[torch.Tensor],
    op: Reduction,
    in_place: bool,
) -> Task:
    backend = runtime.backend
    adasum = op is Reduction.ADASUM
    prescale_factor = proposal.terms["prescale_factor"]
    postscale_factor = proposal.terms["postscale_factor"]
    reducible = ADASUM_DTYPES if adasum else backend.reduce_dtypes
    if op is Reduction.AVERAGE:
        reducible -= NARROW_INTEGERS  # their sum may not fit where their average does
    wires = []
    natives = []
    for tensor in tensors:
        wire = Wire(tensor, in_place, wire_device(backend, tensor))
        wire.widen(reducible)
        wires.append(wire)
        natives.append(as_bool_op(op.native) if tensor.dtype == torch.bool else op.native)
    flats = [wire.flat for wire in wires]
    packs: list[_Pack] = []
    if not adasum:
        scaled = flats
        if prescale_factor != 1.0:
            scaled = [flat.clone() for flat in flats] if _small(flats) else []
            for flat in scaled:
                scale_(flat, prescale_factor)
        if scaled:
            proposal.payload = inline_payload(runtime, group, scaled)

    def start(peers: Peers | None) -> Work:
        if peers is not None and any(peer is not None and peer.payload for peer in peers):
            _reduce_payloads(peers, flats, natives)
            return Completed()
        by_op: dict[ReduceOp, list[torch.Tensor]] = {}
        for flat, native in zip(flats, natives, strict=True):
            scale_(flat, prescale_factor)
            by_op.setdefault(native, []).append(flat)
        works = []
        for index, (native, members) in enumerate(by_op.items()):
            if not adasum:  # which has coefficients for each tensor
                packed = _packs(members)
                packs.extend(packed)
                members = [pack.flat for pack in packed]
                if backend.matches_by_name:
                    members = [telling(flat, proposal.terms) for flat in members]
            # Not named after the operation: where it differs between ranks, they have to meet.
            name = f"{proposal.name}.op{index}" if index else proposal.name
            works.append(reduce_flats(members, native, backend, group, name))
        return WorkGroup(works)

    def finish() -> list[torch.Tensor]:
        for pack in packs:
            pack.spread()
        for wire in wires:
            if op is Reduction.AVERAGE:
                divide_(wire.flat, group.size)
            scale_(wire.flat, postscale_factor)
        results = [wire.result() for wire in wires]
        return list(tensors) if in_place else results

    # Our own Adasum sends several messages, whose order counts on every backend.
    inline = backend.matches_by_name and not (adasum and not native_adasum(backend, group))
    items = sum(flat.numel() for flat in flats)
    order = None if inline else order_of(tensors)
    return Task(start, finish, proposal, inline, items, order)


def _small(flats: Sequence[torch.Tensor]) -> bool:
    return sum(flat.numel() * flat.element_size() for flat in flats) <= INLINE_BYTES


def _reduce_payloads(
    peers: Peers, flats: Sequence[torch.Tensor], natives: Sequence[ReduceOp]
) -> None:
    """Reduce what has travelled with the control message, in rank order, into the flat wires."""
    offset = 0
    for flat, native in zip(flats, natives, strict=True):
        count = flat.numel()
        for rank, peer in enumerate(peers):
            if peer is None or peer.payload is None:  # joined
                part = torch.zeros_like(flat)
            else:
                part = from_payload(peer.payload, flat, count, offset)
            if rank:
                ACCUMULATE[native](flat, part)
            else:
                flat.copy_(part)
        offset += count * flat.element_size()


def _stand_in(runtime: Runtime, group: Group, proposal: Proposal) -> Task:
    tensors = tensors_of(proposal)
    op = Reduction[proposal.terms["op"].upper()]
    own = Proposal(proposal.kind, proposal.name, proposal.terms)
    return _make_task(runtime, group, own, tensors, op, in_place=True)


STAND_INS["allreduce"] = STAND_INS["grouped_allreduce"] = _stand_in


def _run_allreduce(*arguments: Any) -> list[torch.Tensor]:
    results: list[torch.Tensor] = run(*_allreduce_task(*arguments))
    return results


def _submit_allreduce(*arguments: Any, single: bool) -> int:
    return submit(*_allreduce_task(*arguments), single)


class _Allreduce(torch.autograd.Function):
    """The gradient of an all-reduce is the same all-reduce of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        name: str | None,
        op: Reduction,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (op, prescale_factor, postscale_factor, process_set)
        ctx.kind = kind
        ctx.set_materialize_grads(True)
        return tuple(
            _run_allreduce(
                tensors, kind, name, op, prescale_factor, postscale_factor, process_set, False
            )
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None,) * 6 + _Allreduce.apply(ctx.kind, None, *ctx.arguments, *gradients)


def is_narrowed(compressed: tuple[torch.Tensor, Any], tensor: torch.Tensor) -> bool:
    """Whether a compression made a floating-point tensor's elements smaller."""
    smaller = compressed[0].element_size() < tensor.element_size()
    return smaller and tensor.is_floating_point() and compressed[0].is_floating_point()


def _reduce_new(
    tensors: Sequence[torch.Tensor],
    kind: str,
    name: str | None,
    op: Reduction,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    compression: type[Compressor],
) -> list[torch.Tensor]:
    """Compress, reduce to new tensors, decompress; differentiable where a tensor requires grad."""
    basics.runtime()
    for tensor in tensors:
        check_tensor(tensor, kind)
    pairs = [compression.compress(tensor) for tensor in tensors]
    if op is Reduction.AVERAGE and tensors and all(map(is_narrowed, pairs, tensors)):
        # The sum may overflow the narrow type where the average does not.
        size = member_group(process_set, kind).size
        pairs = [compression.compress(tensor / size) for tensor in tensors]
        op = Reduction.SUM
    arguments = (kind, name, op, prescale_factor, postscale_factor, process_set)
    compressed = [pair[0] for pair in pairs]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in compressed):
        reduced = list(_Allreduce.apply(*arguments, *compressed))
    else:
        # What compression has copied may be reduced where it is.
        fresh = all(c is not t for c, t in zip(compressed, tensors, strict=True))
        reduced = _run_allreduce(compressed, *arguments, fresh and bool(tensors))
    return [compression.decompress(r, pair[1]) for r, pair in zip(reduced, pairs, strict=True)]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks of the set and return the result as a new tensor.

    Args:
        tensor: any shape, strides, device and supported dtype; equal in shape and dtype on all
            ranks. It is not modified.
        average: deprecated; True is op=Average, False is op=Sum.
        name: names the operation in errors and timelines; equal on all ranks.
        compression: ``Compression.fp16`` reduces in half precision.
        op: Average (the default), Sum, Adasum, Min, Max or Product. Average of integers stays an
            integer, truncated towards zero. For bool, Sum and Max mean "or", Min and Product "and".
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; all of them must call.

    Returns:
        A tensor of the same shape, dtype, device and memory format. Differentiable: the gradient
        is reduced in the same way.

    Raises:
        ValueError: before init; op and average both given; the reduction has no meaning for the
            dtype; this rank is not in the set.
        TypeError: not a tensor.
        HorovodInternalError: a peer failed or came too late.
    """
    op = resolve(op, average, "allreduce")
    return _reduce_new(
        [tensor],
        "allreduce",
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        compression,
    )[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce``; ``synchronize(handle)`` returns the new tensor."""
    op = resolve(op, average, "allreduce_async")
    return _submit_allreduce(
        [tensor],
        "allreduce",
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        False,
        single=True,
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor in place and return it; arguments as in ``allreduce``, not differentiable."""
    op = resolve(op, average, "allreduce_")
    return _run_allreduce(
        [tensor], "allreduce", name, op, prescale_factor, postscale_factor, process_set, True
    )[0]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce_``; leave the tensor alone until ``synchronize(handle)`` returns it."""
    op = resolve(op, average, "allreduce_async_")
    return _submit_allreduce(
        [tensor],
        "allreduce",
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        True,
        single=True,
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one operation; new tensors, arguments as in ``allreduce``."""
    op = resolve(op, average, "grouped_allreduce")
    return _reduce_new(
        list(tensors),
        "grouped_allreduce",
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        compression,
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allreduce``; ``synchronize(handle)`` returns the list of new tensors."""
    op = resolve(op, average, "grouped_allreduce_async")
    return _submit_allreduce(
        list(tensors),
        "grouped_allreduce",
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        False,
        single=False,
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place as one operation and return them."""
    op = resolve(op, average, "grouped_allreduce_")
    return _run_allreduce(
        list(tensors),
        "grouped_allreduce",
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        True,
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allreduce_``; ``synchronize(handle)`` returns the caller's tensors."""
    op = resolve(op, average, "grouped_allreduce_async_")
    return _submit_allreduce(
        list(tensors),
        "grouped_allreduce",
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        True,
        single=False,
    )
