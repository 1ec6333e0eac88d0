"""Whatever shape, dtype, layout, split and order: results are those of a model in NumPy.

All ranks draw the same cases, from one seed: a case is drawn for all ranks at once, and each rank
takes its part of it.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from checks import support
from checks.support import close, equal

#: cases of each engine, and operations of its soak; each takes some seconds
CASES = 150
SOAK = 1000
SOAK_SECONDS = 5.0

#: operations under way at once, of each thread
_BATCH = 50

_DTYPES = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
_LAYOUTS = ("contiguous", "transposed", "every second", "offset", "block", "conjugate")


@dataclass(frozen=True)
class Case:
    """One operation with what each rank gives to it."""

    operation: str
    op: str
    dtype: str
    columns: tuple[int, ...]
    #: by rank, where ranks may differ
    rows: tuple[int, ...]
    layouts: tuple[str, ...]
    #: by sender, then by receiver
    splits: tuple[tuple[int, ...], ...]
    root: int
    numbers: int
    asynchronous: bool
    in_place: bool


def _cases(size: int) -> Any:
    lengths = st.one_of(st.integers(0, 5), st.sampled_from([31, 64, 200, 1500]))
    small = st.integers(0, 4)
    each = st.tuples(*[small] * size)
    return st.builds(
        Case,
        operation=st.sampled_from(
            [
                "allreduce",
                "grouped_allreduce",
                "allgather",
                "broadcast",
                "alltoall",
                "reducescatter",
            ]
        ),
        op=st.sampled_from(["Sum", "Average", "Min", "Max", "Product"]),
        dtype=st.sampled_from(_DTYPES),
        columns=st.lists(st.integers(0, 4), max_size=2).map(tuple),
        rows=st.tuples(lengths, *[small] * (size - 1)),
        layouts=st.tuples(*[st.sampled_from(_LAYOUTS)] * size),
        splits=st.tuples(*[each] * size),
        root=st.integers(0, size - 1),
        numbers=st.integers(0, 2**31),
        asynchronous=st.booleans(),
        in_place=st.booleans(),
    )


def draw(size: int, count: int, start: int) -> list[Case]:
    """The same cases on every rank."""
    drawn: list[Case] = []

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_cases(size))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    told = support.channel.compare(hashlib.sha256(str(drawn).encode()).hexdigest())
    assert len(set(told)) == 1, "the ranks drew different cases"
    return drawn


# -- the model ------------------------------------------------------------------------------------


def _numbers(case: Case, rank: int, rows: int) -> numpy.ndarray[Any, Any]:
    """What a rank gives: small numbers, so that sums and products are exact in every dtype."""
    generator = numpy.random.default_rng([case.numbers, rank])
    shape = (rows, *case.columns)
    dtype = numpy.dtype(case.dtype)
    low = 0 if dtype.kind in "ub" else -3
    found = generator.integers(low, 2 if dtype.kind == "b" else 4, shape)
    if dtype.kind == "c":
        return (found + 1j * generator.integers(-3, 4, shape)).astype(dtype)
    return found.astype(dtype)


def _reduced(parts: Sequence[numpy.ndarray[Any, Any]], op: str) -> numpy.ndarray[Any, Any]:
    stacked = numpy.stack(parts)
    dtype = stacked.dtype
    if dtype.kind == "b":
        return stacked.any(0) if op in ("Sum", "Max") else stacked.all(0)
    if op == "Min":
        return stacked.min(0)
    if op == "Max":
        return stacked.max(0)
    if op == "Product":
        return stacked.prod(0, dtype=dtype)
    wide = {"f": "float64", "c": "complex128"}.get(dtype.kind, "int64")
    total = stacked.sum(0, dtype=wide)
    if op == "Average":
        total = total / len(parts)
        total = numpy.trunc(total) if dtype.kind in "iu" else total
    return total.astype(dtype)


def _laid_out(array: numpy.ndarray[Any, Any], layout: str) -> torch.Tensor:
    """The numbers as a tensor in some memory layout."""
    tensor = torch.from_numpy(array.copy())
    if layout == "transposed":
        axes = list(range(tensor.dim()))[::-1]
        return tensor.permute(axes).contiguous().permute(axes)
    if layout == "every second":
        room = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        room[..., ::2] = tensor
        return room[..., ::2]
    if layout == "offset":
        room = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
        room[3:] = tensor.reshape(-1)
        return room[3:].view(tensor.shape)
    if layout == "block":
        room = torch.zeros(*(length + 2 for length in tensor.shape), dtype=tensor.dtype)
        inside = room[tuple(slice(1, -1) for _ in tensor.shape)]
        return inside.copy_(tensor)
    if layout == "conjugate" and tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    return tensor


def _legal(case: Case) -> Case:
    """Replace reductions that have no meaning for the dtype."""
    kind = numpy.dtype(case.dtype).kind
    op = case.op
    if case.operation == "reducescatter" and op not in ("Sum", "Average"):
        op = "Sum"
    if kind == "c" and op != "Average":
        op = "Sum"
    if kind == "b" and op == "Average":
        op = "Max"
    return Case(**{**vars(case), "op": op})


def _run(hvd: Any, case: Case, name: str | None) -> Callable[[], None]:
    """Start a case; return what waits and compares."""
    rank, size = hvd.rank(), hvd.size()
    case = _legal(case)
    op = getattr(hvd, case.op)
    what = f"{case}"
    options: dict[str, Any] = {} if name is None else {"name": name}

    if case.operation in ("allreduce", "grouped_allreduce", "reducescatter", "broadcast"):
        parts = [_numbers(case, r, case.rows[0]) for r in range(size)]
    elif case.operation == "allgather":
        parts = [_numbers(case, r, case.rows[r]) for r in range(size)]
    else:
        parts = [_numbers(case, r, sum(case.splits[r]) + case.root) for r in range(size)]
    mine = _laid_out(parts[rank], case.layouts[rank])
    before = mine.clone()
    untouched = True

    if case.operation == "allreduce":
        want: Any = torch.from_numpy(_reduced(parts, case.op))
        untouched = not case.in_place
        call = hvd.allreduce_async_ if case.in_place else hvd.allreduce_async
        handle = call(mine, op=op, **options)
    elif case.operation == "grouped_allreduce":
        half = _numbers(case, rank, 1)
        want = [
            torch.from_numpy(_reduced(parts, case.op)),
            torch.from_numpy(_reduced([_numbers(case, r, 1) for r in range(size)], case.op)),
        ]
        handle = hvd.grouped_allreduce_async([mine, torch.from_numpy(half)], op=op, **options)
    elif case.operation == "allgather":
        want = torch.from_numpy(numpy.concatenate(parts))
        handle = hvd.allgather_async(mine, **options)
    elif case.operation == "broadcast":
        want = torch.from_numpy(parts[case.root])
        untouched = not case.in_place
        call = hvd.broadcast_async_ if case.in_place else hvd.broadcast_async
        handle = call(mine, case.root, **options)
    elif case.operation == "alltoall":
        pieces = []
        for sender in range(size):
            start = sum(case.splits[sender][:rank])
            pieces.append(parts[sender][start : start + case.splits[sender][rank]])
        told = torch.tensor([case.splits[sender][rank] for sender in range(size)])
        want = (torch.from_numpy(numpy.concatenate(pieces)), told.int())
        handle = hvd.alltoall_async(mine, list(case.splits[rank]), **options)
    else:
        total = _reduced(parts, case.op)
        counts = [len(total) // size + (r < len(total) % size) for r in range(size)]
        start = sum(counts[:rank])
        want = torch.from_numpy(total[start : start + counts[rank]])
        handle = hvd.reducescatter_async(mine, op=op, **options)

    def finish() -> None:
        got = hvd.synchronize(handle)
        pairs = zip(got, want, strict=True) if isinstance(want, (list, tuple)) else [(got, want)]
        for one, other in pairs:
            (close if case.op == "Average" else equal)(one, other.clone(), what)
        if untouched:
            equal(mine, before, f"input of {what}")

    return finish


# -- checks ---------------------------------------------------------------------------------------


def check_against_the_model(hvd: Any) -> None:
    """One case after the other, some under way at once."""
    pending: list[Callable[[], None]] = []
    for index, case in enumerate(draw(hvd.size(), CASES, 1)):
        pending.append(_run(hvd, case, None if index % 2 else f"case {index}"))
        if not case.asynchronous:
            for finish in pending:
                finish()
            pending = []
    for finish in pending:
        finish()


def check_soak(hvd: Any) -> None:
    """Thousands of named operations from two threads, in an order of its own on each rank."""
    rank, size = hvd.rank(), hvd.size()
    cases = draw(size, 120, 2)
    begin = time.monotonic()
    failures: list[BaseException] = []
    done = [0, 0]

    def work(thread: int) -> None:
        shuffled = random.Random(100 * rank + thread)
        try:
            for batch in range(SOAK // (2 * _BATCH)):
                order = shuffled.sample(range(_BATCH), _BATCH)
                pending = {
                    i: _run(hvd, cases[(batch * 7 + i) % len(cases)], f"{thread}.{batch}.{i}")
                    for i in order
                }
                for i in shuffled.sample(order, _BATCH):
                    pending[i]()
                    done[thread] += 1
                spent = torch.tensor([time.monotonic() - begin])
                if hvd.allreduce(spent, op=hvd.Max, name=f"{thread}.{batch}").item() > SOAK_SECONDS:
                    break
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(50)
    assert not any(one.is_alive() for one in threads), f"a thread hangs after {done} operations"
    if failures:
        raise failures[0]
    if rank == 0:
        print(f"soak: {sum(done)} operations in {time.monotonic() - begin:.1f} s", flush=True)
