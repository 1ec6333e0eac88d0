"""Who and where a rank is; disconnecting and connecting again."""

from __future__ import annotations

import os
from typing import Any

import torch

from checks.support import connect, equal, expected, raises, values

PLACES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


def check_place(hvd: Any) -> None:
    """All ranks of a launch are on one host here."""
    rank, size = int(os.environ["UNIDIST_TEST_RANK"]), int(os.environ["UNIDIST_TEST_SIZE"])
    want = {
        "rank": rank,
        "size": size,
        "local_size": size,
        "cross_rank": 0,
        "cross_size": 1,
    }
    for name, value in want.items():
        equal(getattr(hvd, name)(), value, name)
    equal(hvd.is_initialized(), True)
    places = hvd.allgather_object((hvd.rank(), hvd.local_rank()))
    assert [one for one, _ in places] == list(range(size))
    # Launchers number the processes of a node as they like (Open MPI by socket, for one).
    assert sorted(local for _, local in places) == list(range(size))


def check_is_homogeneous(hvd: Any) -> None:
    equal(hvd.is_homogeneous(), True)


def check_init_again_changes_nothing(hvd: Any) -> None:
    connect(hvd)
    hvd.init()
    got = hvd.allreduce(values(hvd.rank(), 4, torch.float32), op=hvd.Sum)
    equal(got, expected("Sum", hvd.size(), 4, torch.float32))


def check_queries(hvd: Any) -> None:
    for name in (
        "mpi_threads_supported",
        "mpi_enabled",
        "mpi_built",
        "gloo_enabled",
        "gloo_built",
        "ddl_built",
        "ccl_built",
        "cuda_built",
        "rocm_built",
    ):
        answer = getattr(hvd, name)()
        assert type(answer) is bool, f"{name}() is {answer!r}"
    assert type(hvd.nccl_built()) is int


def check_reductions_are_distinct(hvd: Any) -> None:
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert len({repr(op) for op in ops}) == 6
    assert all(ops[i] != ops[j] for i in range(6) for j in range(i))


def check_shutdown_and_init_again(hvd: Any) -> None:
    """Twice in one turn; in between, operations are refused in a readable way."""
    rank, size = hvd.rank(), hvd.size()
    for _ in range(2):
        hvd.shutdown()
        equal(hvd.is_initialized(), False)
        for name in PLACES:
            with raises(ValueError, "init"):
                getattr(hvd, name)()
        with raises(ValueError, "init"):
            hvd.allreduce(torch.ones(2))
        hvd.shutdown()  # nothing left to do
        connect(hvd)
        equal(hvd.is_initialized(), True)
        equal((hvd.rank(), hvd.size()), (rank, size), "after init again")
        got = hvd.allreduce(values(rank, 100, torch.float32), op=hvd.Sum)
        equal(got, expected("Sum", size, 100, torch.float32), "after init again")
        hvd.barrier()


def check_optimizer_outlives_a_shutdown(hvd: Any) -> None:
    """Its buckets were launched on the connection that was gone, in the first backward after it.

    Last of all, since Horovod starts and stops for it once more.
    """
    rank, size = hvd.rank(), hvd.size()
    first, second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), op=hvd.Sum)
    total = size * (size + 1) / 2

    def train(steps: int, what: str) -> None:
        for step in range(steps):
            ((first + 2 * second) * (rank + 1)).sum().backward()
            optimizer.step()
            equal(first.grad, torch.full((4,), total), f"step {step} {what}")
            equal(second.grad, torch.full((4,), 2 * total), f"step {step} {what}")
            optimizer.zero_grad()

    train(2, "before")
    hvd.shutdown()
    connect(hvd)
    train(3, "after init again")
    # Also when a step was begun before.
    (first * 100.0).sum().backward()
    optimizer.step()
    hvd.shutdown()
    connect(hvd)
    optimizer.zero_grad()
    train(1, "after the third init")
