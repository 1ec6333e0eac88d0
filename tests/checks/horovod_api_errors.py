"""Horovod's promises, three: what a misuse raises, at once and on all ranks, and that life goes on.

See ``horovod_api.py``. Horovod's engine reports a bad argument of one rank as ValueError, and what
ranks disagree about as HorovodInternalError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from checks import support
from checks.support import equal, raises, several


def _works(hvd: Any, what: str = "after the error") -> None:
    """The next collective is right, under a fresh name and under the one that failed."""
    size = hvd.size()
    equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)), what)
    equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="bad"), torch.full((2,), float(size)), what)
    equal(hvd.allgather(torch.tensor([hvd.rank()]), name="bad"), torch.arange(size), what)


@contextlib.contextmanager
def _disagreement(hvd: Any) -> Iterator[None]:
    """The block fails on this rank (and on the others), and the next collective works."""
    with raises(hvd.HorovodInternalError):
        yield
    _works(hvd)


def _last(hvd: Any) -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


# -- one rank's mistake ---------------------------------------------------------------------------


def check_average_and_op(hvd: Any) -> None:
    tensor = torch.ones(2)
    for name in ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"):
        for average in (True, False):
            with raises(ValueError, "average", "op"):
                getattr(hvd, name)(tensor, average=average, op=hvd.Sum)
    for name in ("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async"):
        with raises(ValueError, "average", "op"):
            getattr(hvd, name)([tensor], average=True, op=hvd.Average)
    equal(tensor, torch.ones(2), "the input")
    _works(hvd)


def check_no_tensor(hvd: Any) -> None:
    kinds = (AttributeError, TypeError, ValueError)
    for given in ("text", None, [1.0, 2.0], 3):
        for call in (
            lambda given: hvd.allreduce(given),
            lambda given: hvd.allreduce_async_(given),
            lambda given: hvd.allgather(given),
            lambda given: hvd.broadcast(given, 0),
            lambda given: hvd.broadcast_(given, 0),
            lambda given: hvd.alltoall(given),
            lambda given: hvd.reducescatter(given),
        ):
            with raises(kinds):
                call(given)
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with raises(kinds):
            call(5)
        with raises(kinds):
            call(["text"])
    _works(hvd)


def check_missing_arguments(hvd: Any) -> None:
    for call in (
        lambda: hvd.allreduce(),
        lambda: hvd.broadcast(torch.ones(2)),
        lambda: hvd.synchronize(),
        lambda: hvd.poll(),
        lambda: hvd.sparse_allreduce_async(torch.ones(2).to_sparse()),
        lambda: hvd.broadcast_parameters({}),
        lambda: hvd.allreduce(torch.ones(2), root_rank=0),
    ):
        with raises(TypeError):
            call()


def check_allgather_of_a_scalar(hvd: Any) -> None:
    with raises((IndexError, ValueError, RuntimeError)):  # Horovod's IndexError is by chance
        hvd.allgather(torch.tensor(1.0), name="bad")
    with _disagreement(hvd):
        hvd.synchronize(hvd.allgather_async(torch.tensor(1.0), name="bad"))


def check_reducescatter_of_a_scalar(hvd: Any) -> None:
    for call in (hvd.reducescatter, hvd.reducescatter_async):
        with raises(ValueError):
            call(torch.tensor(1.0), name="bad")
    _works(hvd)


def check_reducescatter_of_other_operations(hvd: Any) -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with raises((RuntimeError, ValueError)):
            hvd.reducescatter(torch.ones(hvd.size()), op=op, name="bad")
    _works(hvd)


def check_root_that_is_no_rank(hvd: Any) -> None:
    for root in (hvd.size(), -1, 10**6):
        for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
            with raises(ValueError, "root"):
                call(torch.ones(2), root, name="bad")
        with raises(ValueError, "root"):
            hvd.broadcast_parameters({"bad": torch.ones(2)}, root)
    _works(hvd)


def check_alltoall_splits_of_a_wrong_number(hvd: Any) -> None:
    size = hvd.size()
    for number in (size - 1, size + 1):
        with raises(ValueError, "splits"):
            hvd.alltoall(torch.ones(10), torch.ones(number, dtype=torch.int32), name="bad")
    _works(hvd)


def check_alltoall_splits_that_are_too_large(hvd: Any) -> None:
    with raises(ValueError, "splits"):
        hvd.alltoall(torch.ones(hvd.size()), [2] * hvd.size(), name="bad")
    _works(hvd)


def check_alltoall_splits_of_floats(hvd: Any) -> None:
    with raises((ValueError, RuntimeError), "split"):
        hvd.alltoall(torch.ones(hvd.size()), torch.ones(hvd.size()), name="bad")
    _works(hvd)


def check_alltoall_that_does_not_divide(hvd: Any) -> None:
    with raises(ValueError, "splits"):
        hvd.alltoall(torch.ones(hvd.size() + 1), name="bad")
    _works(hvd)


def check_alltoall_of_a_scalar(hvd: Any) -> None:
    if hvd.__name__ != "unidist":
        return  # it ends the process in Horovod
    with raises((ValueError, RuntimeError)):
        hvd.alltoall(torch.tensor(1.0), name="bad")
    _works(hvd)


def check_no_tensors_in_a_group(hvd: Any) -> None:
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with contextlib.suppress(IndexError, ValueError):  # Horovod's, by chance
            assert list(call([])) == []
    _works(hvd)


# -- ranks that disagree --------------------------------------------------------------------------


@several
def check_allreduce_of_different_shapes(hvd: Any) -> None:
    """Another number of elements; the same number in another shape; other dimensions."""
    for mine, other in (((17, 3), (17, 4)), ((4, 6), (6, 4)), ((6,), (2, 3)), ((), (1,))):
        with _disagreement(hvd):
            hvd.allreduce(torch.ones(other if _last(hvd) else mine), name="bad")


@several
def check_allreduce_of_different_dtypes(hvd: Any) -> None:
    for mine, other in ((torch.float32, torch.float64), (torch.int32, torch.float32)):
        with _disagreement(hvd):
            tensor = torch.ones(4, dtype=other if _last(hvd) else mine)
            hvd.allreduce(tensor, op=hvd.Sum, name="bad")


@several
def check_allreduce_of_different_operations(hvd: Any) -> None:
    for mine, other in ((hvd.Sum, hvd.Average), (hvd.Min, hvd.Max)):
        with _disagreement(hvd):
            hvd.allreduce(torch.ones(4), op=other if _last(hvd) else mine, name="bad")


@several
def check_allreduce_of_different_factors(hvd: Any) -> None:
    for factor in ("prescale_factor", "postscale_factor"):
        with _disagreement(hvd):
            scale = {factor: 3.0 if _last(hvd) else 2.0}
            hvd.allreduce(torch.ones(4), op=hvd.Sum, name="bad", **scale)


@several
def check_allgather_that_does_not_fit(hvd: Any) -> None:
    for mine, other in (((2, 3), (2, 4)), ((2, 3), (2, 3, 1)), ((2, 3), (6,))):
        with _disagreement(hvd):
            hvd.allgather(torch.ones(other if _last(hvd) else mine), name="bad")
    with _disagreement(hvd):
        dtype = torch.int64 if _last(hvd) else torch.float32
        hvd.allgather(torch.ones(3, dtype=dtype), name="bad")


@several
def check_broadcast_that_does_not_fit(hvd: Any) -> None:
    with _disagreement(hvd):
        hvd.broadcast(torch.ones(4 if _last(hvd) else 3), 0, name="bad")
    with _disagreement(hvd):
        dtype = torch.int64 if _last(hvd) else torch.float32
        hvd.broadcast(torch.ones(3, dtype=dtype), 0, name="bad")


@several
def check_broadcast_from_different_roots(hvd: Any) -> None:
    with _disagreement(hvd):
        hvd.broadcast(torch.ones(3), 1 if _last(hvd) else 0, name="bad")


@several
def check_alltoall_that_does_not_fit(hvd: Any) -> None:
    size = hvd.size()
    with _disagreement(hvd):
        dtype = torch.int64 if _last(hvd) else torch.float32
        hvd.alltoall(torch.ones(size, dtype=dtype), name="bad")
    for other in ((size, 4), (size, 3, 1)):
        with _disagreement(hvd):
            hvd.alltoall(torch.ones(other if _last(hvd) else (size, 3)), name="bad")


@several
def check_reducescatter_that_does_not_fit(hvd: Any) -> None:
    size = hvd.size()
    with _disagreement(hvd):
        hvd.reducescatter(torch.ones(2 * size if _last(hvd) else size), name="bad")
    with _disagreement(hvd):
        dtype = torch.int64 if _last(hvd) else torch.float32
        hvd.reducescatter(torch.ones(size, dtype=dtype), name="bad")
    with _disagreement(hvd):
        hvd.reducescatter(torch.ones(size), op=hvd.Sum if _last(hvd) else hvd.Average, name="bad")
    with _disagreement(hvd):
        factor = 2.0 if _last(hvd) else 1.0
        hvd.reducescatter(torch.ones(size), prescale_factor=factor, name="bad")


@several
def check_one_of_a_group_does_not_fit(hvd: Any) -> None:
    """All or nothing: the whole group fails, and nothing is written in place."""
    given = [torch.ones(3), torch.ones(4 if _last(hvd) else 5), torch.ones(2)]
    with _disagreement(hvd):
        hvd.grouped_allreduce(given, op=hvd.Sum, name="bad")
    with _disagreement(hvd):
        hvd.grouped_allreduce_(given, op=hvd.Sum, name="bad")
    with _disagreement(hvd):
        given = [torch.ones(2, 2), torch.ones(2, 4 if _last(hvd) else 5)]
        hvd.grouped_allgather(given, name="bad")


@several
def check_parameters_of_different_shapes(hvd: Any) -> None:
    with raises(hvd.HorovodInternalError):
        hvd.broadcast_parameters({"bad": torch.ones(3 if _last(hvd) else 2)}, root_rank=0)
    _works(hvd)


@several
def check_failure_of_an_async_operation(hvd: Any) -> None:
    """It comes in ``synchronize``; the handle is gone; operations beside it are not touched."""
    before = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="before")
    bad = hvd.allreduce_async(torch.ones(4 if _last(hvd) else 5), op=hvd.Sum, name="bad")
    after = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="after")
    want = torch.full((3,), float(hvd.size()))
    equal(hvd.synchronize(after), want, "after")
    with raises(hvd.HorovodInternalError):
        hvd.synchronize(bad)
    assert hvd.synchronize(bad) is None
    equal(hvd.synchronize(before), want, "before")
    _works(hvd)


@several
def check_message_of_a_disagreement(hvd: Any) -> None:
    """Both values are in it, on all ranks."""
    with raises(hvd.HorovodInternalError, "shape", "7", "5"):
        hvd.allreduce(torch.ones(7 if _last(hvd) else 5), name="bad")
    with raises(hvd.HorovodInternalError, "root", "1", "0"):
        hvd.broadcast(torch.ones(3), 1 if _last(hvd) else 0, name="bad")
    _works(hvd)


# -- one name twice -------------------------------------------------------------------------------


@several
def check_one_name_twice_in_flight(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    starts: dict[str, Callable[[], int]] = {
        "allreduce": lambda: hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="twice"),
        "allgather": lambda: hvd.allgather_async(torch.ones(3), name="twice"),
        "broadcast": lambda: hvd.broadcast_async(torch.ones(3), 0, name="twice"),
        "alltoall": lambda: hvd.alltoall_async(torch.ones(size), name="twice"),
        "reducescatter": lambda: hvd.reducescatter_async(torch.ones(size), name="twice"),
        "grouped": lambda: hvd.grouped_allreduce_async([torch.ones(3)] * 2, name="twice"),
    }
    for kind, start in starts.items():
        # Rank 0 has its name in flight while no other rank has begun, then the others have
        # theirs while rank 0 has ended: so all make the same number of calls.
        for leader in (0, 1):
            mine = rank == 0 if leader == 0 else rank != 0
            if mine:
                first = start()
                with raises(ValueError, "name"):
                    start()
                support.channel.everyone(f"{kind} {leader} tried")
            else:
                support.channel.everyone(f"{kind} {leader} tried")
                first = start()
            hvd.synchronize(first)
    _works(hvd)


# -- helpers of training --------------------------------------------------------------------------


def check_training_helpers_refuse(hvd: Any) -> None:
    """What is wrong with the arguments of the helpers is found before anything is sent."""
    parameter = nn.Parameter(torch.ones(2))
    for given in (5, "text", parameter):
        with raises(ValueError):
            hvd.broadcast_parameters(given, root_rank=0)
    with raises(ValueError, "LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([parameter]), root_rank=0)
    _works(hvd)
