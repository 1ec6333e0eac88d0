"""allgather, broadcast and barrier."""

from __future__ import annotations

import time
from typing import Any

import torch

from checks import support
from checks.support import (
    DTYPES,
    close,
    equal,
    lengths,
    lengths_of,
    raises,
    same_on_all_ranks,
    several,
    values,
)


def _rows(rank: int) -> int:
    """Rows of a rank: 0 on rank 0 and 2, so that an empty part comes first and in the middle."""
    return (0, 3, 0, 1)[rank]


def check_allgather_equal_rows(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for shape in ((4,), (1, 3), (2, 3, 5)):
            given = values(rank, shape, dtype)
            got = hvd.allgather(given)
            want = torch.cat([values(other, shape, dtype) for other in range(size)])
            equal(got, want, f"{shape} {dtype}")
            equal(given, values(rank, shape, dtype), "input")
            assert got.data_ptr() != given.data_ptr(), "the result aliases the input"
            same_on_all_ranks(got)


def check_allgather_lengths(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for length in lengths(size):
        got = hvd.allgather(values(rank, length, torch.float32))
        want = torch.cat([values(other, length, torch.float32) for other in range(size)])
        equal(got, want, f"length {length}")


def check_allgather_different_rows(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for trailing in ((), (3,), (2, 5)):
            got = hvd.allgather(values(rank, (_rows(rank), *trailing), dtype))
            parts = [values(other, (_rows(other), *trailing), dtype) for other in range(size)]
            equal(got, torch.cat(parts), f"trailing {trailing} {dtype}")
    # only the last rank has anything, and then a lot
    mine = 5003 if rank == size - 1 else 0
    got = hvd.allgather(values(rank, (mine, 2), torch.float32))
    equal(got, values(size - 1, (5003, 2), torch.float32), "one rank has all rows")


def check_allgather_empty(hvd: Any) -> None:
    size = hvd.size()
    for shape in ((0,), (0, 3), (3, 0)):
        for dtype in (torch.float32, torch.int64, torch.bool):
            got = hvd.allgather(torch.empty(shape, dtype=dtype))
            equal(got, torch.empty((shape[0] * size, *shape[1:]), dtype=dtype), f"{shape}")


def check_allgather_strided(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for name, take in (
        ("transposed", lambda base: base.t()),
        ("column", lambda base: base[:, 1]),
        ("every second row", lambda base: base[::2]),
    ):
        base = values(rank, (4, 6), torch.float32)
        got = hvd.allgather(take(base))
        want = [take(values(other, (4, 6), torch.float32)) for other in range(size)]
        equal(got, torch.cat(want), name)
        equal(base, values(rank, (4, 6), torch.float32), f"input, {name}")


def check_allgather_zero_dim_is_an_error(hvd: Any) -> None:
    with raises((ValueError, RuntimeError)):
        hvd.allgather(torch.tensor(1.0))
    got = hvd.allgather(torch.tensor([hvd.rank()]))
    equal(got, torch.arange(hvd.size()), "after the error")


def check_allgather_async(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    first = hvd.allgather_async(values(rank, (rank, 2), torch.float32), name="first")
    second = hvd.allgather_async(values(rank, (3,), torch.int64), name="second")
    assert isinstance(first, int)
    assert isinstance(hvd.poll(first), bool)
    got = hvd.synchronize(second)
    equal(got, torch.cat([values(other, (3,), torch.int64) for other in range(size)]))
    want = torch.cat([values(other, (other, 2), torch.float32) for other in range(size)])
    equal(hvd.synchronize(first), want)


def check_allgather_backward(hvd: Any) -> None:
    """The gradient is averaged over ranks; this rank's rows of it come back."""
    rank, size = hvd.rank(), hvd.size()
    rows = [other + 1 for other in range(size)]
    leaf = values(rank, (rows[rank], 2), torch.float64).requires_grad_()
    out = hvd.allgather(leaf)
    upstream = values(rank, (sum(rows), 2), torch.float64)
    kept = upstream.clone()
    out.backward(upstream)
    mean = sum(values(other, (sum(rows), 2), torch.float64) for other in range(size)) / size
    start = sum(rows[:rank])
    close(leaf.grad, mean[start : start + rows[rank]], "gradient")
    equal(upstream, kept, "the upstream gradient was written to")


def check_broadcast(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in {0, size - 1}:
        for dtype in DTYPES:
            for length in lengths_of(dtype, size):
                given = values(rank, length, dtype)
                got = hvd.broadcast(given, root)
                equal(got, values(root, length, dtype), f"{length} {dtype} from {root}")
                equal(given, values(rank, length, dtype), f"input {length} {dtype}")
                assert got.data_ptr() != given.data_ptr() or not length, "aliases its input"


def check_broadcast_every_root(hvd: Any) -> None:
    rank = hvd.rank()
    for root in range(hvd.size()):
        got = hvd.broadcast(values(rank, (3, 5), torch.float32), root_rank=root)
        equal(got, values(root, (3, 5), torch.float32), f"from {root}")


def check_broadcast_zero_dim_and_empty(hvd: Any) -> None:
    root = hvd.size() - 1
    for dtype in DTYPES:
        got = hvd.broadcast(torch.tensor(hvd.rank() + 1, dtype=dtype), root)
        equal(got, torch.tensor(root + 1, dtype=dtype), f"0-dim {dtype}")
    for shape in ((0,), (0, 3), (3, 0)):
        got = hvd.broadcast(torch.empty(shape), root)
        equal(got, torch.empty(shape), f"empty {shape}")


def check_broadcast_in_place(hvd: Any) -> None:
    rank = hvd.rank()
    root = hvd.size() - 1
    for dtype in DTYPES:
        given = values(rank, (7, 3), dtype)
        address = given.data_ptr()
        returned = hvd.broadcast_(given, root)
        equal(given, values(root, (7, 3), dtype), f"{dtype} in place")
        assert returned is given
        assert given.data_ptr() == address


def check_broadcast_strided(hvd: Any) -> None:
    """Only the elements of the view change, and it stays the view it was."""
    rank = hvd.rank()
    root = hvd.size() - 1
    for name, take in (
        ("column", lambda base: base[:, 1]),
        ("transposed", lambda base: base.t()),
        ("every second", lambda base: base.reshape(-1)[::2]),
        ("block", lambda base: base[1:3, 1:3]),
    ):
        base = values(rank, (5, 4), torch.float32)
        want = values(rank, (5, 4), torch.float32)
        take(want).copy_(take(values(root, (5, 4), torch.float32)))
        got = hvd.broadcast(take(base), root)
        equal(got, take(values(root, (5, 4), torch.float32)), name)
        equal(base, values(rank, (5, 4), torch.float32), f"input, {name}")
        hvd.broadcast_(take(base), root)
        equal(base, want, f"{name} in place, with what is beside it")
    image = values(rank, (2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last)
    hvd.broadcast_(image, root)
    equal(image, values(root, (2, 3, 4, 5), torch.float32), "channels_last")
    assert image.is_contiguous(memory_format=torch.channels_last)


def check_broadcast_async(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    handles = [
        hvd.broadcast_async(values(rank, 50 + i, torch.float32), i % size, name=f"b.{i}")
        for i in range(6)
    ]
    for i in reversed(range(6)):
        equal(hvd.synchronize(handles[i]), values(i % size, 50 + i, torch.float32), f"{i}")
    given = values(rank, 9, torch.float32)
    handle = hvd.broadcast_async_(given, size - 1, name="in place")
    assert isinstance(handle, int)
    assert hvd.synchronize(handle) is given
    equal(given, values(size - 1, 9, torch.float32))


def check_broadcast_bad_root(hvd: Any) -> None:
    size = hvd.size()
    for root in (size, size + 7, -1):
        with raises(ValueError, "root", str(root)):
            hvd.broadcast(torch.ones(3), root)
        with raises(ValueError, "root", str(root)):
            hvd.broadcast_(torch.ones(3), root)
    equal(hvd.broadcast(torch.ones(3), 0), torch.ones(3), "after the errors")


def check_broadcast_backward(hvd: Any) -> None:
    """The gradient is averaged over ranks and arrives at the root; others get zeros."""
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        leaf = values(rank, (2, 3), torch.float64).requires_grad_()
        upstream = values(rank, (2, 3), torch.float64)
        kept = upstream.clone()
        hvd.broadcast(leaf, root).backward(upstream)
        mean = sum(values(other, (2, 3), torch.float64) for other in range(size)) / size
        want = mean if rank == root else torch.zeros(2, 3, dtype=torch.float64)
        close(leaf.grad, want, f"gradient, root {root}")
        equal(upstream, kept, "the upstream gradient was written to")


def check_handles(hvd: Any) -> None:
    """An unknown handle gives None, as Horovod's does; so does one that was already given up."""
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    assert hvd.synchronize(handle) is not None
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(10**9) is None


@several
def check_barrier(hvd: Any) -> None:
    """Nobody leaves before all have come: one rank comes last, whichever it is."""
    rank, size = hvd.rank(), hvd.size()
    for late in range(size):
        if rank == late:
            for other in range(size):
                if other != late:
                    support.channel.hear(f"coming/{late}/{other}")
            # Work that takes longer than leaving a barrier which does not wait.
            matrix = torch.eye(256)
            for _ in range(30):
                matrix = matrix @ matrix
        else:
            support.channel.tell(f"coming/{late}/{rank}")
        entered = time.monotonic()
        hvd.barrier()
        left = time.monotonic()
        entries = [float(one) for one in support.channel.everyone(f"in/{late}", repr(entered))]
        leaves = [float(one) for one in support.channel.everyone(f"out/{late}", repr(left))]
        assert min(leaves) >= max(entries), f"left {min(leaves)} before {max(entries)}"


def check_barrier_returns_nothing(hvd: Any) -> None:
    assert hvd.barrier() is None
