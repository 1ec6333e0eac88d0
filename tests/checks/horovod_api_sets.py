"""Horovod's promises, four: process sets, join, and shutting down and starting again.

See ``horovod_api.py``. The ranks work in two sets, of the even and of the odd ones, so that each
makes the same number of calls.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from checks import support
from checks.support import close, connect, equal, raises, several, values
from unidist import basics


@contextlib.contextmanager
def _halves(hvd: Any) -> Iterator[tuple[Any, Any]]:
    """The set that this rank is in, and the one that it is not in."""
    size = hvd.size()
    even, odd = hvd.add_process_set(range(0, size, 2)), hvd.add_process_set(range(1, size, 2))
    try:
        yield (odd, even) if hvd.rank() % 2 else (even, odd)
    finally:
        hvd.barrier()
        for one in (even, odd):
            if one.process_set_id is not None:
                assert hvd.remove_process_set(one) is True


def _half(hvd: Any) -> list[int]:
    return list(range(hvd.rank() % 2, hvd.size(), 2))


# -- the object -----------------------------------------------------------------------------------


def check_global_set(hvd: Any) -> None:
    everyone = hvd.global_process_set
    assert isinstance(everyone, hvd.ProcessSet)
    equal(everyone.process_set_id, 0)
    equal(list(everyone.ranks), list(range(hvd.size())))
    equal((everyone.size(), everyone.rank()), (hvd.size(), hvd.rank()))
    assert everyone.included() is True
    assert hvd.remove_process_set(everyone) is False
    equal(everyone.process_set_id, 0)


@several
def check_set_that_was_not_added(hvd: Any) -> None:
    one = hvd.ProcessSet([hvd.size() - 1, 0])
    equal(one.ranks, [0, hvd.size() - 1])
    assert one.process_set_id is None
    assert one.size() is None
    assert one.rank() is None
    assert one.included() is (hvd.rank() in (0, hvd.size() - 1))
    assert one.mpi_comm is None
    assert hvd.remove_process_set(one) is False
    with raises((TypeError, ValueError)):
        hvd.allreduce(torch.ones(2), process_set=one)


def check_repr(hvd: Any) -> None:
    one = hvd.ProcessSet([0])
    equal(str(one), "ProcessSet(process_set_id=None, ranks=[0], mpi_comm=None)")


def check_ranks_that_are_none(hvd: Any) -> None:
    for ranks in (["0"], [0.5], [None], "0", 5, None):
        with raises(ValueError):
            hvd.ProcessSet(ranks)


@several
def check_attributes_of_an_added_set(hvd: Any) -> None:
    with _halves(hvd) as (mine, other):
        ranks = _half(hvd)
        assert isinstance(mine.process_set_id, int)
        assert mine.process_set_id > 0
        assert mine.process_set_id != other.process_set_id
        equal(mine.ranks, ranks)
        equal((mine.size(), mine.rank()), (len(ranks), ranks.index(hvd.rank())))
        assert mine.included() is True
        assert other.included() is False
        equal(other.size(), hvd.size() - len(ranks))
        with raises(ValueError):
            other.rank()
        equal(
            str(mine),
            f"ProcessSet(process_set_id={mine.process_set_id}, ranks={ranks}, mpi_comm=None)",
        )


@several
def check_add_an_object_or_a_sequence(hvd: Any) -> None:
    last = hvd.size() - 1
    for ranks in ([last], (last,), range(last, last + 1), {last}, hvd.ProcessSet([last])):
        one = hvd.add_process_set(ranks)
        assert isinstance(one, hvd.ProcessSet)
        assert one is ranks or not isinstance(ranks, hvd.ProcessSet)
        equal(one.ranks, [last])
        hvd.barrier()
        assert hvd.remove_process_set(one) is True


@several
def check_add_the_same_ranks_twice(hvd: Any) -> None:
    with _halves(hvd) as (mine, _):
        with raises(ValueError):
            hvd.add_process_set(range(0, hvd.size(), 2))
        with raises(ValueError):
            hvd.add_process_set(hvd.ProcessSet(list(range(hvd.size()))))
        equal(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item(), float(mine.size()))


@several
def check_removed_set(hvd: Any) -> None:
    one = hvd.add_process_set([0])
    hvd.barrier()
    assert hvd.remove_process_set(one) is True
    assert one.process_set_id is None
    assert one.size() is None
    assert one.rank() is None
    equal(one.ranks, [0])
    assert hvd.remove_process_set(one) is False
    for call in (
        lambda: hvd.allreduce(torch.ones(2), process_set=one),
        lambda: hvd.broadcast_(torch.ones(2), 0, process_set=one),
        lambda: hvd.barrier(process_set=one),
    ):
        with raises((TypeError, ValueError)):
            call()
    assert hvd.add_process_set(one) is one, "and added again"
    hvd.barrier()
    assert hvd.remove_process_set(one) is True


# -- collectives within a set ---------------------------------------------------------------------


@several
def check_reductions_in_a_set(hvd: Any) -> None:
    rank, ranks = hvd.rank(), _half(hvd)
    stacked = torch.stack([values(other, (4, 3), torch.float64) for other in ranks])
    with _halves(hvd) as (mine, _):
        tensor = values(rank, (4, 3), torch.float64)
        for op, want in (
            (hvd.Sum, stacked.sum(0)),
            (hvd.Average, stacked.mean(0)),
            (hvd.Min, stacked.amin(0)),
            (hvd.Max, stacked.amax(0)),
            (hvd.Product, stacked.prod(0)),
        ):
            close(hvd.allreduce(tensor, op=op, process_set=mine), want, f"{op}")
        (got,) = hvd.grouped_allreduce([tensor], op=hvd.Sum, process_set=mine)
        close(got, stacked.sum(0), "grouped_allreduce")
        rows = torch.ones(2 * len(ranks))
        got = hvd.reducescatter(rows, op=hvd.Sum, process_set=mine)
        equal(got, torch.full((2,), float(len(ranks))), "reducescatter")
        (got,) = hvd.grouped_reducescatter([rows], op=hvd.Sum, process_set=mine)
        equal(got, torch.full((2,), float(len(ranks))), "grouped_reducescatter")
        got = hvd.allreduce_(tensor, op=hvd.Sum, process_set=mine)
        assert got is tensor
        close(got, stacked.sum(0), "allreduce_")


@several
def check_movements_in_a_set(hvd: Any) -> None:
    """The root is a global rank; everything else counts within the set."""
    rank, ranks = hvd.rank(), _half(hvd)
    with _halves(hvd) as (mine, _):
        got = hvd.allgather(torch.full((rank + 1,), rank), process_set=mine)
        equal(got, torch.cat([torch.full((other + 1,), other) for other in ranks]), "allgather")
        (got,) = hvd.grouped_allgather([torch.tensor([rank])], process_set=mine)
        equal(got, torch.tensor(ranks), "grouped_allgather")
        for root in ranks:
            got = hvd.broadcast(torch.tensor([rank]), root, process_set=mine)
            equal(got, torch.tensor([root]), "broadcast")
        got = hvd.alltoall(torch.full((len(ranks),), rank), process_set=mine)
        equal(got, torch.tensor(ranks), "alltoall")
        got, received = hvd.alltoall(
            torch.full((len(ranks),), rank), splits=[1] * len(ranks), process_set=mine
        )
        equal(got, torch.tensor(ranks), "alltoall with splits")
        equal(received, torch.ones(len(ranks), dtype=torch.int32), "received splits")
        got = hvd.broadcast_object({"from": rank}, ranks[-1], process_set=mine)
        equal(got, {"from": ranks[-1]}, "broadcast_object")
        assert hvd.barrier(process_set=mine) is None


@several
def check_sparse_in_a_set(hvd: Any) -> None:
    ranks = _half(hvd)
    given = torch.sparse_coo_tensor(
        torch.tensor([[hvd.rank()]]), torch.ones(1, 2), (hvd.size(), 2), check_invariants=False
    )
    want = torch.zeros(hvd.size(), 2)
    want[ranks] = 1.0 / len(ranks)
    with _halves(hvd) as (mine, _):
        finish = hvd.sparse_allreduce_async(given, "sparse", hvd.Average, process_set=mine)
        close(finish().to_dense(), want)


@several
def check_gradients_in_a_set(hvd: Any) -> None:
    rank, ranks = hvd.rank(), _half(hvd)
    index, count = ranks.index(rank), len(ranks)
    total = float(sum(one + 1 for one in ranks))
    with _halves(hvd) as (mine, _):
        for name, want in (
            ("allreduce", total / count),
            ("allgather", total / count),
            ("broadcast", total / count if index == 0 else 0.0),
            ("alltoall", [one + 1.0 for one in ranks]),
            ("reducescatter", [one + 1.0 for one in ranks]),
        ):
            leaf = torch.ones(count, requires_grad=True)
            arguments = (ranks[0],) if name == "broadcast" else ()
            got = getattr(hvd, name)(leaf, *arguments, process_set=mine)
            got.backward(torch.full_like(got, rank + 1.0))
            want = torch.tensor(want) if isinstance(want, list) else torch.full((count,), want)
            close(leaf.grad, want, name)


@several
def check_one_name_in_two_sets(hvd: Any) -> None:
    """In flight together: a name belongs to a set, too."""
    with _halves(hvd) as (mine, _):
        inner = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="name", process_set=mine)
        outer = hvd.allreduce_async(torch.ones(5), op=hvd.Sum, name="name")
        equal(hvd.synchronize(outer), torch.full((5,), float(hvd.size())))
        equal(hvd.synchronize(inner), torch.full((3,), float(len(_half(hvd)))))


@several
def check_rank_outside_of_the_set(hvd: Any) -> None:
    """An error at once, of the rank that has no business there."""
    with _halves(hvd) as (mine, other):
        root = other.ranks[0]
        for call in (
            lambda: hvd.allreduce(torch.ones(2), process_set=other),
            lambda: hvd.allreduce_async_(torch.ones(2), process_set=other),
            lambda: hvd.grouped_allreduce([torch.ones(2)], process_set=other),
            lambda: hvd.allgather(torch.ones(2), process_set=other),
            lambda: hvd.broadcast(torch.ones(2), root, process_set=other),
            lambda: hvd.alltoall(torch.ones(12), process_set=other),
            lambda: hvd.reducescatter(torch.ones(12), process_set=other),
            lambda: hvd.barrier(process_set=other),
        ):
            with raises((ValueError, RuntimeError)):
                call()
        got = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=mine)
        equal(got, torch.full((2,), float(len(_half(hvd)))), "after the errors")


@several
def check_root_outside_of_the_set(hvd: Any) -> None:
    with _halves(hvd) as (mine, other):
        with raises(ValueError, "root"):
            hvd.broadcast(torch.ones(2), other.ranks[0], process_set=mine)
        equal(hvd.broadcast(torch.ones(2), mine.ranks[0], process_set=mine), torch.ones(2))


@several
def check_adasum_in_a_set(hvd: Any) -> None:
    """Horovod has none, and says so; ours is right: equal vectors give one of them."""
    with _halves(hvd) as (mine, _):
        with contextlib.suppress(NotImplementedError):
            got = hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=mine)
            close(got, torch.ones(2), "allreduce")
        with contextlib.suppress(NotImplementedError):
            (got,) = hvd.grouped_allreduce([torch.ones(2)], op=hvd.Adasum, process_set=mine)
            close(got, torch.ones(2), "grouped_allreduce")
        parameter = nn.Parameter(torch.zeros(2))
        with contextlib.suppress(NotImplementedError):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), op=hvd.Adasum, process_set=mine
            )
            parameter.sum().backward()
            optimizer.step()
            close(parameter.detach(), -torch.ones(2), "DistributedOptimizer")


@several
def check_disagreement_in_a_set(hvd: Any) -> None:
    """Only the set fails, and only once."""
    ranks = _half(hvd)
    with _halves(hvd) as (mine, _):
        if len(ranks) > 1:
            with raises(hvd.HorovodInternalError):
                hvd.allreduce(torch.ones(hvd.rank() + 1), process_set=mine, name="bad")
        got = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=mine, name="bad")
        equal(got, torch.full((2,), float(len(ranks))))
        equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))


@several
def check_optimizer_of_a_set(hvd: Any) -> None:
    """Members average with members; a rank outside trains alone."""
    rank, ranks = hvd.rank(), _half(hvd)
    mean = sum(ranks) / len(ranks) + 1.0
    with _halves(hvd) as (mine, other):
        for process_set, want in ((mine, mean), (other, rank + 1.0)):
            parameter = nn.Parameter(torch.zeros(3))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0),
                named_parameters=[("parameter", parameter)],
                process_set=process_set,
            )
            for step in (1, 2):
                optimizer.zero_grad()
                (parameter * (rank + 1)).sum().backward()
                optimizer.step()
                close(parameter.detach(), torch.full((3,), -want * step), f"step {step}")


# -- join -----------------------------------------------------------------------------------------


@several
def check_join_of_all_at_once(hvd: Any) -> None:
    for _ in range(3):
        got = hvd.join()
        assert type(got) is int
        assert 0 <= got < hvd.size()
        equal(hvd.allgather_object(got), [got] * hvd.size(), "all hear the same")
    assert hvd.join(device=-1) in range(hvd.size())


@several
def check_join_with_uneven_batches(hvd: Any) -> None:
    """Ranks that joined add zeros; an average still divides by all; the last rank is returned.

    Twice, the second time with the ranks in the opposite order.
    """
    rank, size = hvd.rank(), hvd.size()
    for batches in (list(range(1, size + 1)), list(range(size, 0, -1))):
        for batch in range(batches[rank]):
            here = sum(1 for one in batches if one > batch)
            got = hvd.allreduce(torch.ones(5), op=hvd.Sum, name=f"sum.{batch}")
            equal(got, torch.full((5,), float(here)), f"batch {batch}")
        equal(hvd.join(), batches.index(size), "who joined last")
        got = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="afterwards")
        equal(got, torch.full((2,), float(size)), "afterwards")
    for batches in (list(range(1, size + 1)), list(range(size, 0, -1))):
        for batch in range(batches[rank]):
            here = sum(1 for one in batches if one > batch)
            got = hvd.allreduce(torch.ones(5), name=f"average.{batch}")
            close(got, torch.full((5,), here / size), f"batch {batch}")
        hvd.join()


@several
def check_join_of_different_operations(hvd: Any) -> None:
    """What the others do need not be known to a rank that joined: shapes, dtypes, groups."""
    rank, size = hvd.rank(), hvd.size()
    for first in range(size):
        if rank != first:
            got = hvd.allreduce(torch.ones(2, 3), op=hvd.Sum, name="a")
            equal(got, torch.full((2, 3), size - 1.0), "float32")
            got = hvd.allreduce(torch.ones(4, dtype=torch.int64), op=hvd.Sum, name="b")
            equal(got, torch.full((4,), size - 1), "int64")
            given = [torch.ones(2), torch.ones(3)]
            for one in hvd.grouped_allreduce(given, op=hvd.Sum, name="c"):
                equal(one, torch.full_like(one, size - 1.0), "grouped")
        hvd.join()


@several
def check_join_with_training(hvd: Any) -> None:
    """The ranks train on one, two, ... batches an epoch; each batch counts for size ranks."""
    rank, size = hvd.rank(), hvd.size()
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), named_parameters=[("parameter", parameter)]
    )
    hvd.broadcast_parameters({"parameter": parameter}, root_rank=0)
    for batches in (list(range(1, size + 1)), list(range(size, 0, -1))):
        start = parameter.detach().clone()
        for _ in range(batches[rank]):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        last = hvd.join()
        equal(last, batches.index(size), "who joined last")
        want = start - sum(batches) / size
        hvd.broadcast_parameters({"parameter": parameter}, root_rank=last)
        close(parameter.detach(), want)


@several
def check_join_and_other_operations(hvd: Any) -> None:
    """While a rank has joined, a gather or broadcast fails on the others, or is right."""
    if hvd.__name__ != "unidist" or basics.runtime().backend.matches_by_name:
        return  # Horovod's engine fails as it should most times, and stalls at others
    rank, size = hvd.rank(), hvd.size()
    for first in range(size):
        if rank != first:
            with contextlib.suppress(hvd.HorovodInternalError):
                got = hvd.allgather(torch.tensor([rank]), name="gather")
                equal(got, torch.tensor([one for one in range(size) if one != first]))
            root = 0 if first else 1
            with contextlib.suppress(hvd.HorovodInternalError):
                got = hvd.broadcast(torch.tensor([rank]), root, name="broadcast")
                equal(got, torch.tensor([root]))
        hvd.join()
        got = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="afterwards")
        equal(got, torch.full((2,), float(size)), "afterwards")


# -- starting again: last -------------------------------------------------------------------------


def check_shut_down(hvd: Any) -> None:
    """Every function refuses, in a readable way; then all is as at the start."""
    size = hvd.size()
    parameter = nn.Parameter(torch.ones(2))
    assert hvd.shutdown() is None
    assert hvd.is_initialized() is False
    tensor = torch.ones(2)
    try:
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            with raises(ValueError, "not been initialized", "init"):
                getattr(hvd, name)()
        for call in (
            lambda: hvd.allreduce(tensor),
            lambda: hvd.allreduce_(tensor),
            lambda: hvd.allreduce_async(tensor),
            lambda: hvd.grouped_allreduce([tensor]),
            lambda: hvd.allgather(tensor),
            lambda: hvd.grouped_allgather([tensor]),
            lambda: hvd.broadcast(tensor, 0),
            lambda: hvd.broadcast_(tensor, 0),
            lambda: hvd.reducescatter(tensor),
            lambda: hvd.barrier(),
            lambda: hvd.join(),
        ):
            with raises(hvd.HorovodInternalError, "init"):
                call()
        for call in (
            lambda: hvd.alltoall(tensor),
            lambda: hvd.broadcast_object({}, 0),
            lambda: hvd.allgather_object({}),
            lambda: hvd.broadcast_parameters({"a": tensor}, 0),
            lambda: hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0)),
            lambda: hvd.add_process_set([0]),
        ):
            with raises((ValueError, hvd.HorovodInternalError), "init"):
                call()
        assert hvd.shutdown() is None, "again"
    finally:
        connect(hvd)
    assert hvd.is_initialized() is True
    equal(hvd.allreduce(tensor, op=hvd.Sum), torch.full((2,), float(size)), "after init again")


@several
def check_process_sets_of_init(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    options: dict[str, Any] = {}
    if hvd.__name__ == "unidist":
        options = {
            "backend": os.environ.get("UNIDIST_TEST_BACKEND") or None,
            "timeout": support.TIMEOUT,
        }
    hvd.shutdown()
    hvd.init(process_sets=[even, odd], **options)
    try:
        mine = odd if rank % 2 else even
        assert even.process_set_id > 0
        assert odd.process_set_id > 0
        equal((even.size(), odd.size()), (len(even.ranks), len(odd.ranks)))
        got = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=mine)
        equal(got, torch.full((2,), float(mine.size())))
        equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)))
    finally:
        hvd.shutdown()
        connect(hvd)
    equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)), "afterwards")
