"""Sparse gradients of embeddings through DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from checks.support import close, same_on_all_ranks

_ROWS, _WIDTH = 11, 3


def _net() -> nn.Module:
    torch.manual_seed(2)
    return nn.ModuleDict(
        {
            "table": nn.Embedding(_ROWS, _WIDTH, sparse=True),
            "head": nn.Linear(_WIDTH, 2),
        }
    ).double()


def _indices(step: int, rank: int, size: int) -> torch.Tensor:
    """Repeated rows, rows of other ranks, and none at all on the last of several ranks."""
    if size > 1 and rank == size - 1:
        return torch.empty(0, dtype=torch.int64)
    return torch.tensor([rank, rank, (rank + step) % _ROWS, 9])


def _loss(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    rows = model["table"](_indices(step, rank, size))
    return model["head"](rows).square().sum() + model["head"].weight.square().sum() * (rank + 1)


Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def _compare(hvd: Any, make: Make, **arguments: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    model, want = _net(), _net()
    wrapped = [
        hvd.DistributedOptimizer(one, named_parameters=model.named_parameters(), **arguments)
        for one in make(model)
    ]
    plain = make(want)
    for step in range(3):
        for optimizer in (*wrapped, *plain):
            optimizer.zero_grad()
        _loss(model, step, rank, size).backward()
        sum(_loss(want, step, other, size) / size for other in range(size)).backward()
        for optimizer in (*wrapped, *plain):
            optimizer.step()
    for (name, got), other in zip(model.named_parameters(), want.parameters(), strict=True):
        close(got.detach(), other.detach(), name, rtol=1e-9, atol=1e-12)
    same_on_all_ranks(*model.parameters(), what="weights")


def _sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def _sparse_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SparseAdam(list(model["table"].parameters()), lr=0.1),
        torch.optim.SGD(model["head"].parameters(), lr=0.1),
    ]


def check_sgd(hvd: Any) -> None:
    _compare(hvd, _sgd)


def check_sgd_as_dense(hvd: Any) -> None:
    _compare(hvd, _sgd, sparse_as_dense=True)


def check_sparse_adam(hvd: Any) -> None:
    """SparseAdam refuses a dense gradient, so the reduced one has to be sparse."""
    _compare(hvd, _sparse_adam)


def check_sparse_adam_as_dense(hvd: Any) -> None:
    """Reduced as a dense tensor, and sparse again for the optimizer that wants it so."""
    _compare(hvd, _sparse_adam, sparse_as_dense=True)


def check_fp16_compression(hvd: Any) -> None:
    """Compression does not break sparse gradients (values may be rounded)."""
    rank, size = hvd.rank(), hvd.size()
    model, want = _net(), _net()
    optimizer = hvd.DistributedOptimizer(
        *_sgd(model),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
    )
    (plain,) = _sgd(want)
    _loss(model, 0, rank, size).backward()
    sum(_loss(want, 0, other, size) / size for other in range(size)).backward()
    optimizer.step()
    plain.step()
    for (name, got), other in zip(model.named_parameters(), want.parameters(), strict=True):
        close(got.detach(), other.detach(), name, rtol=3e-3, atol=3e-3)
    same_on_all_ranks(*model.parameters())


def check_rank_without_gradient(hvd: Any) -> None:
    """The last rank runs no backward at all: it takes part with nothing."""
    rank, size = hvd.rank(), hvd.size()
    quiet = size - 1 if size > 1 else None
    model, want = _net(), _net()
    optimizer = hvd.DistributedOptimizer(*_sgd(model), named_parameters=model.named_parameters())
    (plain,) = _sgd(want)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        if rank != quiet:
            _loss(model, step, rank, size).backward()
        parts = [_loss(want, step, other, size) for other in range(size) if other != quiet]
        (sum(parts) / size).backward()
        optimizer.step()
        plain.step()
    for (name, got), other in zip(model.named_parameters(), want.parameters(), strict=True):
        close(got.detach(), other.detach(), name, rtol=1e-9, atol=1e-12)


def check_two_passes(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    model, want = _net(), _net()
    optimizer = hvd.DistributedOptimizer(
        *_sgd(model), named_parameters=model.named_parameters(), backward_passes_per_step=2
    )
    (plain,) = _sgd(want)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        for one in range(2):
            _loss(model, 2 * step + one, rank, size).backward()
            sum(_loss(want, 2 * step + one, other, size) / size for other in range(size)).backward()
        optimizer.step()
        plain.step()
    for (name, got), other in zip(model.named_parameters(), want.parameters(), strict=True):
        close(got.detach(), other.detach(), name, rtol=1e-9, atol=1e-12)
