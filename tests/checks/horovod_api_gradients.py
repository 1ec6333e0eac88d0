"""Horovod's promises, two: gradients that flow through collectives.

See ``horovod_api.py``. Sums, where one would expect them, are averages: that is Horovod's rule for
``allgather`` and ``broadcast``, and a model trained with it relies on that.
"""

from __future__ import annotations

from typing import Any

import torch

from checks.support import close, equal, values


def _upstream(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return values(rank, shape, torch.float64)


def _sum(size: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([_upstream(other, shape) for other in range(size)]).sum(0)


def _backward(outputs: list[torch.Tensor], rank: int) -> None:
    """Pull on each output with what :func:`_upstream` gives on this rank; it must stay as it is."""
    pulls = [_upstream(rank, tuple(one.shape)) for one in outputs]
    torch.autograd.backward(outputs, pulls)
    for pull in pulls:
        equal(pull, _upstream(rank, tuple(pull.shape)), "the gradient that was handed in")


def _leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64, requires_grad=True)


def check_allreduce_sum(hvd: Any) -> None:
    for shape in ((), (5,), (3, 4), (2, 3, 4)):
        leaf = _leaf(*shape)
        _backward([hvd.allreduce(leaf, op=hvd.Sum)], hvd.rank())
        close(leaf.grad, _sum(hvd.size(), shape))


def check_allreduce_average(hvd: Any) -> None:
    leaf = _leaf(5)
    _backward([hvd.allreduce(leaf)], hvd.rank())
    close(leaf.grad, _sum(hvd.size(), (5,)) / hvd.size())


def check_allreduce_scale_factors(hvd: Any) -> None:
    leaf = _leaf(5)
    got = hvd.allreduce(leaf, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    _backward([got], hvd.rank())
    close(leaf.grad, _sum(hvd.size(), (5,)) * 6)


def check_allreduce_compressed(hvd: Any) -> None:
    leaf = _leaf(5)
    got = hvd.allreduce(leaf, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert got.dtype == torch.float64
    _backward([got], hvd.rank())
    close(leaf.grad, _sum(hvd.size(), (5,)))


def check_grouped_allreduce(hvd: Any) -> None:
    shapes = [(4,), (2, 3), ()]
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
        leaves = [_leaf(*shape) for shape in shapes]
        _backward(hvd.grouped_allreduce(leaves, op=op), hvd.rank())
        for leaf, shape in zip(leaves, shapes, strict=True):
            close(leaf.grad, _sum(hvd.size(), shape) / divisor, f"{shape}")


def check_allgather(hvd: Any) -> None:
    """The average of the gradients, of which each rank gets what belongs to its rows."""
    rank, size = hvd.rank(), hvd.size()
    for lengths in ([2] * size, list(range(1, size + 1)), list(range(size))):
        leaf = _leaf(lengths[rank], 3)
        _backward([hvd.allgather(leaf)], rank)
        start = sum(lengths[:rank])
        mean = _sum(size, (sum(lengths), 3)) / size
        close(leaf.grad, mean[start : start + lengths[rank]], f"{lengths}")


def check_grouped_allgather(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    leaves = [_leaf(2, 3), _leaf(rank + 1)]
    _backward(list(hvd.grouped_allgather(leaves)), rank)
    close(leaves[0].grad, (_sum(size, (2 * size, 3)) / size)[2 * rank : 2 * rank + 2])
    rows, start = size * (size + 1) // 2, rank * (rank + 1) // 2
    close(leaves[1].grad, (_sum(size, (rows,)) / size)[start : start + rank + 1])


def check_broadcast(hvd: Any) -> None:
    """The root gets the average of the gradients, the others zeros."""
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        leaf = _leaf(2, 3)
        _backward([hvd.broadcast(leaf, root)], rank)
        mean = _sum(size, (2, 3)) / size
        close(leaf.grad, mean if rank == root else torch.zeros_like(mean), f"root {root}")


def check_alltoall(hvd: Any) -> None:
    """Gradients go back to where the rows came from."""
    rank, size = hvd.rank(), hvd.size()
    leaf = _leaf(2 * size, 3)
    _backward([hvd.alltoall(leaf)], rank)
    pulls = [_upstream(other, (2 * size, 3)) for other in range(size)]
    equal(leaf.grad, torch.cat([pull[2 * rank : 2 * rank + 2] for pull in pulls]))


def check_alltoall_with_splits(hvd: Any) -> None:
    """Rank r sends r + 1 rows to each rank."""
    rank, size = hvd.rank(), hvd.size()
    leaf = _leaf((rank + 1) * size, 2)
    got, _ = hvd.alltoall(leaf, splits=torch.full((size,), rank + 1, dtype=torch.int32))
    _backward([got], rank)
    start = sum(range(1, rank + 1))
    pulls = [_upstream(other, tuple(got.shape)) for other in range(size)]
    equal(leaf.grad, torch.cat([pull[start : start + rank + 1] for pull in pulls]))


def check_reducescatter(hvd: Any) -> None:
    """Gathered; for a sum that is multiplied by the number of ranks."""
    rank, size = hvd.rank(), hvd.size()
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        leaf = _leaf(2 * size, 3)
        hvd.reducescatter(leaf, op=op).backward(_upstream(rank, (2, 3)))
        want = torch.cat([_upstream(other, (2, 3)) for other in range(size)])
        close(leaf.grad, want * factor)


def check_reducescatter_of_uneven_rows(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    leaf = _leaf(size + 1)
    got = hvd.reducescatter(leaf)
    got.backward(torch.full_like(got, float(rank)))
    equal(leaf.grad, torch.tensor([0.0, *range(size)], dtype=torch.float64))


def check_reducescatter_scale_factors(hvd: Any) -> None:
    leaf = _leaf(hvd.size())
    got = hvd.reducescatter(leaf, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    got.backward(torch.ones_like(got))
    equal(leaf.grad, torch.full((hvd.size(),), 6.0 * hvd.size(), dtype=torch.float64))


def check_grouped_reducescatter(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        leaves = [_leaf(size, 2), _leaf(2 * size)]
        got = hvd.grouped_reducescatter(leaves, op=op)
        torch.autograd.backward(got, [_upstream(rank, (1, 2)), _upstream(rank, (2,))])
        for leaf, shape in zip(leaves, ((1, 2), (2,)), strict=True):
            want = torch.cat([_upstream(other, shape) for other in range(size)])
            close(leaf.grad, want * factor)


def check_chain(hvd: Any) -> None:
    """One collective after another, in one graph, with ordinary operations between them."""
    rank, size = hvd.rank(), hvd.size()
    leaf = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    gathered = hvd.allgather(leaf * 3)
    total = hvd.allreduce(gathered * 2, op=hvd.Sum)
    total.backward(torch.ones_like(total))
    # d total / d gathered: 2 for each of the ranks, and allgather averages what all pull.
    equal(leaf.grad, torch.full((2,), 6.0 * size, dtype=torch.float64))


def check_gradients_accumulate(hvd: Any) -> None:
    leaf = _leaf(3)
    for turn in (1, 2):
        hvd.allreduce(leaf, op=hvd.Sum).backward(torch.ones_like(leaf))
        equal(leaf.grad, torch.full((3,), float(turn * hvd.size()), dtype=torch.float64))
