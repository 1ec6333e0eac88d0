"""Process sets: collectives and training within a subset of the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from checks.support import close, equal, expected, raises, several, values
from checks.training import Net, loss_of, sgd


@contextlib.contextmanager
def _set(hvd: Any, ranks: list[int]) -> Iterator[Any]:
    """A process set for the block; all ranks make and remove it."""
    process_set = hvd.add_process_set(ranks)
    try:
        yield process_set
    finally:
        hvd.barrier()
        assert hvd.remove_process_set(process_set) is True


def _subsets(size: int) -> list[list[int]]:
    return [[0], [size - 1], sorted({0, size - 1}), list(range(size))]


def check_global_process_set(hvd: Any) -> None:
    whole = hvd.global_process_set
    assert whole.size() == hvd.size()
    assert whole.rank() == hvd.rank()
    assert whole.included() is True
    assert whole.process_set_id == 0
    got = hvd.allreduce(values(hvd.rank(), 5, torch.float32), op=hvd.Sum, process_set=whole)
    equal(got, expected("Sum", hvd.size(), 5, torch.float32))
    assert hvd.remove_process_set(whole) is False


def check_attributes(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for ranks in _subsets(size)[:-1]:
        if len(ranks) == size:
            continue  # a set equal to the global one is tried below
        with _set(hvd, ranks) as process_set:
            assert process_set.ranks == ranks
            assert process_set.size() == len(ranks)
            assert process_set.included() is (rank in ranks)
            assert isinstance(process_set.process_set_id, int)
            if rank in ranks:
                assert process_set.rank() == ranks.index(rank)


@several
def check_add_a_process_set_object(hvd: Any) -> None:
    """Ranks are sorted; the object becomes usable; removed, it is unusable."""
    size = hvd.size()
    process_set = hvd.ProcessSet([size - 1, 0]) if size > 2 else hvd.ProcessSet([0])
    assert process_set.ranks == ([0, size - 1] if size > 2 else [0])
    assert process_set.rank() is None or not process_set.included()
    assert hvd.add_process_set(process_set) is process_set
    if process_set.included():
        got = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=process_set)
        equal(got, torch.full((2,), float(process_set.size())))
    hvd.barrier()
    assert hvd.remove_process_set(process_set) is True
    assert hvd.remove_process_set(process_set) is False
    with raises(ValueError):
        hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=process_set)


@several
def check_collectives(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    subsets = _subsets(size)[:3] if size > 2 else _subsets(size)[:2]
    for ranks in subsets:
        with _set(hvd, ranks) as process_set:
            if rank not in ranks:
                continue
            got = hvd.allreduce(
                values(rank, 1000, torch.float32), op=hvd.Sum, process_set=process_set
            )
            equal(got, expected("Sum", ranks, 1000, torch.float32), f"Sum in {ranks}")
            got = hvd.allreduce(values(rank, 10, torch.float64), process_set=process_set)
            close(got, expected("Average", ranks, 10, torch.float64), f"Average in {ranks}")
            got = hvd.allreduce(values(rank, 9, torch.int8), op=hvd.Max, process_set=process_set)
            equal(got, expected("Max", ranks, 9, torch.int8), f"Max in {ranks}")
            got = hvd.allgather(values(rank, (rank, 2), torch.float32), process_set=process_set)
            parts = [values(other, (other, 2), torch.float32) for other in ranks]
            equal(got, torch.cat(parts), f"allgather in {ranks}")
            root = ranks[-1]  # a global rank, also within a set
            got = hvd.broadcast(values(rank, 7, torch.float32), root, process_set=process_set)
            equal(got, values(root, 7, torch.float32), f"broadcast in {ranks}")
            got = hvd.broadcast_object({"from": rank}, root, process_set=process_set)
            assert got == {"from": root}
            hvd.barrier(process_set=process_set)


@several
def check_two_sets_at_once(hvd: Any) -> None:
    """Disjoint sets work side by side, and with the global one in between."""
    rank, size = hvd.rank(), hvd.size()
    low, high = list(range(size // 2)), list(range(size // 2, size))
    with _set(hvd, low) as first, _set(hvd, high) as second:
        mine, ranks = (first, low) if rank in low else (second, high)
        for turn in range(3):
            handle = hvd.allreduce_async(
                values(rank, 50, torch.float32), op=hvd.Sum, process_set=mine, name=f"in.{turn}"
            )
            got = hvd.allreduce(values(rank, 20, torch.float32), op=hvd.Sum, name=f"all.{turn}")
            equal(got, expected("Sum", size, 20, torch.float32), "global")
            equal(hvd.synchronize(handle), expected("Sum", ranks, 50, torch.float32), f"{ranks}")


@several
def check_non_member(hvd: Any) -> None:
    """A rank that is not in the set gets an error at once, and the set is not disturbed."""
    rank, size = hvd.rank(), hvd.size()
    with _set(hvd, [0]) as process_set:
        if rank == 0:
            got = hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=process_set)
            equal(got, torch.ones(3))
        else:
            with raises(ValueError, str(rank)):
                hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=process_set)
            with raises(ValueError):
                hvd.broadcast(torch.ones(3), 0, process_set=process_set)
            with raises(ValueError):
                hvd.allgather(torch.ones(3), process_set=process_set)
        got = hvd.allreduce(torch.ones(3), op=hvd.Sum)
        equal(got, torch.full((3,), float(size)), "afterwards, all ranks")


@several
def check_root_outside_of_the_set(hvd: Any) -> None:
    with _set(hvd, [0]) as process_set:
        if hvd.rank() == 0:
            with raises(ValueError, "root"):
                hvd.broadcast(torch.ones(3), hvd.size() - 1, process_set=process_set)


def check_bad_sets(hvd: Any) -> None:
    size = hvd.size()
    for ranks in ([size], [-1], [0, 0], ["0"]):
        with raises((ValueError, TypeError)):
            hvd.add_process_set(ranks)
    if size > 1:
        with _set(hvd, [0]), raises(ValueError):
            hvd.add_process_set([0])  # the same ranks again
    got = hvd.allreduce(torch.ones(3), op=hvd.Sum)
    equal(got, torch.full((3,), float(size)), "after the errors")


@several
def check_optimizer(hvd: Any) -> None:
    """The ranks of a set train together; the others train alone."""
    rank, size = hvd.rank(), hvd.size()
    ranks = [0, size - 1] if size > 2 else [1]
    with _set(hvd, ranks) as process_set:
        model, want = Net(), Net()
        optimizer = hvd.DistributedOptimizer(
            sgd(model), named_parameters=model.named_parameters(), process_set=process_set
        )
        plain = sgd(want)
        group = ranks if rank in ranks else [rank]
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, [rank]).backward()
            optimizer.step()
            plain.zero_grad()
            loss_of(want, step, group).backward()
            plain.step()
        for got, other in zip(model.parameters(), want.parameters(), strict=True):
            close(got.detach(), other.detach(), f"rank {rank}", rtol=1e-10, atol=1e-12)
