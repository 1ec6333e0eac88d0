"""The collectives a user calls: checks, layout, averages, autograd. Backends only move and add.

Every call becomes one task of the engine: ``start`` hands the flat wire to the backend, ``finish``
turns what comes back into the caller's dtype, shape, device and memory format. A blocking call
runs its task at once; an ``_async`` one returns an integer handle for ``poll``/``synchronize``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from unidist import basics
from unidist.adasum import ADASUM_DTYPES, adasum_
from unidist.backends.base import (
    Backend,
    Capability,
    Completed,
    Group,
    ReduceOp,
    Rows,
    Work,
    WorkGroup,
)
from unidist.basics import Runtime
from unidist.compression import Compression, Compressor
from unidist.handles import Task
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

_HOST = torch.device("cpu")


def wire_device(backend: Backend, tensor: torch.Tensor) -> torch.device | None:
    """Where a backend wants a tensor's elements: where they are, or in host memory."""
    if tensor.device.type == "cpu" or Capability.CUDA in backend.capabilities:
        return None
    return _HOST


def is_inline(backend: Backend, wire: torch.Tensor) -> bool:
    """Whether the submitter starts the task itself (see engine.py)."""
    return backend.matches_by_name or wire.device.type != "cpu"


# -- allreduce --------------------------------------------------------------------------------


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
) -> tuple[Runtime, Task]:
    """Check and pack; the task's value is the list of results."""
    runtime = basics.runtime()
    group = member_group(process_set, kind)
    backend = runtime.backend
    for tensor in tensors:
        check_tensor(tensor, kind, in_place)
        check_reduction(tensor, op.native, op is Reduction.AVERAGE, kind)
    adasum = op is Reduction.ADASUM
    reducible = ADASUM_DTYPES if adasum else backend.reduce_dtypes
    if op is Reduction.AVERAGE:
        reducible -= NARROW_INTEGERS  # their sum may not fit where their average does
    wires = []
    for tensor in tensors:
        wire = Wire(tensor, in_place, wire_device(backend, tensor))
        wire.widen(reducible)
        wires.append(wire)
    full_name = runtime.name(kind, name, group)
    packs: list[_Pack] = []

    def start() -> Work:
        by_op: dict[ReduceOp, list[torch.Tensor]] = {}
        for wire, tensor in zip(wires, tensors, strict=True):
            scale_(wire.flat, prescale_factor)
            native = as_bool_op(op.native) if tensor.dtype == torch.bool else op.native
            by_op.setdefault(native, []).append(wire.flat)
        works = []
        for native, flats in by_op.items():
            if not adasum:  # which has coefficients for each tensor
                packed = _packs(flats)
                packs.extend(packed)
                flats = [pack.flat for pack in packed]
            works.append(reduce_flats(flats, native, backend, group, f"{full_name}.{native.value}"))
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
    inline = (
        bool(wires)
        and not (adasum and not native_adasum(backend, group))
        and is_inline(backend, wires[0].flat)
    )
    items = sum(wire.flat.numel() for wire in wires)
    return runtime, Task(start, finish, inline, full_name, items)


def _run_allreduce(*arguments: Any) -> list[torch.Tensor]:
    runtime, task = _allreduce_task(*arguments)
    results: list[torch.Tensor] = runtime.engine.run(task).result()
    return results


def _submit_allreduce(*arguments: Any, single: bool) -> int:
    runtime, task = _allreduce_task(*arguments)
    return runtime.handles.add(runtime.engine.submit(task), single)


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


# -- allgather --------------------------------------------------------------------------------


def _allgather_task(tensor: Any, name: str | None, process_set: ProcessSet) -> tuple[Runtime, Task]:
    runtime = basics.runtime()
    group = member_group(process_set, "allgather")
    backend = runtime.backend
    check_tensor(tensor, "allgather")
    if tensor.dim() == 0:
        raise ValueError(
            "allgather concatenates along the first dimension, but got a tensor without "
            "dimensions; pass tensor.reshape(1)."
        )
    source = Wire(tensor, in_place=True, device=wire_device(backend, tensor))
    trailing = tuple(tensor.shape[1:]) + ((2,) if tensor.is_complex() else ())
    rows = source.flat.view(tensor.shape[0], *trailing)
    moved = rows if rows.dtype in backend.move_dtypes else _row_bytes(rows)
    full_name = runtime.name("allgather", name, group)
    started: list[Rows] = []

    def start() -> Work:
        started.append(backend.allgather_rows(moved, group, full_name))
        return started[0]

    def finish() -> torch.Tensor:
        output = started[0].output
        shape = (output.shape[0], *trailing)
        if moved is not rows:
            output = output.view(rows.dtype) if output.numel() else rows.new_empty(shape)
        output = output.view(shape)
        if tensor.is_complex():
            output = torch.view_as_complex(output)
        elif tensor.dtype == torch.bool:
            output = output.view(torch.bool)
        return output.to(tensor.device)

    return runtime, Task(start, finish, is_inline(backend, moved), full_name, moved.numel())


def _row_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Each row as bytes: shape (rows, bytes of a row)."""
    width = 1
    for length in rows.shape[1:]:
        width *= length
    return rows.view(rows.shape[0], width).view(torch.uint8)


class _Allgather(torch.autograd.Function):
    """The gradient is averaged over the ranks, and each rank keeps the rows that were its own."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.rows = tensor.shape[0]
        ctx.process_set = process_set
        runtime, task = _allgather_task(tensor, name, process_set)
        output: torch.Tensor = runtime.engine.run(task).result()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        averaged = allreduce(gradient, op=Reduction.AVERAGE, process_set=ctx.process_set)
        rows = torch.tensor([ctx.rows], device="cpu")
        counts = allgather(rows, process_set=ctx.process_set)
        start = int(counts[: ctx.process_set.rank()].sum())
        return averaged.narrow(0, start, ctx.rows), None, None


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
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        output: torch.Tensor = _Allgather.apply(tensor, name, process_set)
        return output
    runtime, task = _allgather_task(tensor, name, process_set)
    return runtime.engine.run(task).result()


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allgather``; ``synchronize(handle)`` returns the new tensor."""
    runtime, task = _allgather_task(tensor, name, process_set)
    return runtime.handles.add(runtime.engine.submit(task))


# -- broadcast --------------------------------------------------------------------------------


def root_in_group(root_rank: int, group: Group, operation: str) -> int:
    """Translate a global root rank to the group's; ValueError when it is not a member."""
    if root_rank not in group.ranks:
        raise ValueError(
            f"{operation} got root_rank={root_rank!r}, which is a global rank and must be one of "
            f"{list(group.ranks)}."
        )
    return group.ranks.index(root_rank)


def _broadcast_task(
    tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> tuple[Runtime, Task]:
    runtime = basics.runtime()
    group = member_group(process_set, "broadcast")
    backend = runtime.backend
    check_tensor(tensor, "broadcast", in_place)
    root = root_in_group(root_rank, group, "broadcast")
    wire = Wire(tensor, in_place, wire_device(backend, tensor))
    moved = wire.moved(backend.move_dtypes)
    full_name = runtime.name("broadcast", name, group)

    def start() -> Work:
        if moved.numel() == 0:
            return Completed()
        return backend.broadcast(moved, root, group, full_name)

    def finish() -> torch.Tensor:
        result = wire.result()
        return tensor if in_place else result

    return runtime, Task(start, finish, is_inline(backend, moved), full_name, moved.numel())


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
        runtime, task = _broadcast_task(tensor, root_rank, name, process_set, False)
        output: torch.Tensor = runtime.engine.run(task).result()
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
        root_rank: the GLOBAL rank to take it from, with a process set too.
        name: names the operation in errors and timelines; equal on all ranks.
        process_set: the ranks that take part; all of them must call.

    Returns:
        A new tensor, on the root too. Differentiable: the root gets the averaged gradient, the
        others zeros.

    Raises:
        ValueError: before init; the root is not in the set; this rank is not in the set.
        HorovodInternalError: a peer failed or came too late.
    """
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        output: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
        return output
    runtime, task = _broadcast_task(tensor, root_rank, name, process_set, False)
    return runtime.engine.run(task).result()


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast``; ``synchronize(handle)`` returns the new tensor."""
    runtime, task = _broadcast_task(tensor, root_rank, name, process_set, False)
    return runtime.handles.add(runtime.engine.submit(task))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor with the root's and return it; arguments as in ``broadcast``."""
    runtime, task = _broadcast_task(tensor, root_rank, name, process_set, True)
    output: torch.Tensor = runtime.engine.run(task).result()
    return output


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast_``; leave the tensor alone until ``synchronize(handle)`` returns it."""
    runtime, task = _broadcast_task(tensor, root_rank, name, process_set, True)
    return runtime.handles.add(runtime.engine.submit(task))


# -- barrier and handles ----------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called."""
    runtime = basics.runtime()
    group = member_group(process_set, "barrier")
    task = Task(lambda: runtime.backend.barrier(group), lambda: None, label="barrier")
    runtime.engine.run(task).result()


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return without waiting.

    Raises:
        ValueError: the handle is unknown, or was synchronized already.
    """
    task = basics.runtime().handles.get(handle)
    if task is None:
        raise ValueError(f"poll got handle {handle!r}, which is not that of an operation under way")
    done = task.done()
    if not done:
        time.sleep(0)  # a loop around poll() would keep the interpreter from the engine's thread
    return done


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result; None for an unknown handle.

    Raises:
        HorovodInternalError: the operation failed. The handle is used up all the same.
    """
    runtime = basics.runtime()
    entry = runtime.handles.pop(handle)
    if entry is None:
        return None
    task, single = entry
    value = runtime.engine.wait(task).result()
    return value[0] if single else value
