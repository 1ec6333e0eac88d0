"""A tiny model, its batches, and training on one process: what N ranks must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from checks.support import close, same_on_all_ranks

ROWS = 4  # samples of one rank in one backward pass

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Two layers in double: sums over ranks differ from one process by 1e-16, not by 1e-7."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def batch(index: int, ranks: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``index``-th batch of these ranks, joined."""
    inputs, targets = [], []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * index + rank)
        inputs.append(torch.randn(ROWS, 6, generator=generator, dtype=torch.float64))
        targets.append(torch.randn(ROWS, 3, generator=generator, dtype=torch.float64))
    return torch.cat(inputs), torch.cat(targets)


def loss_of(model: nn.Module, index: int, ranks: Iterable[int]) -> torch.Tensor:
    inputs, targets = batch(index, ranks)
    return (model(inputs) - targets).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def reference(
    size: int,
    make: MakeOptimizer = sgd,
    steps: int = 4,
    passes: int = 1,
    scale: float = 1.0,
    model: nn.Module | None = None,
) -> nn.Module:
    """One process on the batches of all ranks; ``passes`` backward passes are summed."""
    model = Net() if model is None else model
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        for one in range(passes):
            (scale * loss_of(model, step * passes + one, range(size))).backward()
        optimizer.step()
    return model


def distributed(
    hvd: Any,
    make: MakeOptimizer = sgd,
    steps: int = 4,
    passes: int = 1,
    model: nn.Module | None = None,
    **arguments: Any,
) -> nn.Module:
    """The same on this rank's batches, through DistributedOptimizer."""
    model = Net() if model is None else model
    arguments.setdefault("named_parameters", model.named_parameters())
    optimizer = hvd.DistributedOptimizer(make(model), backward_passes_per_step=passes, **arguments)
    for step in range(steps):
        optimizer.zero_grad()
        for one in range(passes):
            loss_of(model, step * passes + one, [hvd.rank()]).backward()
        optimizer.step()
    return model


def same_weights(got: nn.Module, want: nn.Module, rtol: float = 1e-10) -> None:
    """Close to the reference, and equal to the bit on all ranks."""
    for (name, one), other in zip(got.named_parameters(), want.parameters(), strict=True):
        close(one.detach(), other.detach(), name, rtol=rtol, atol=rtol)
    same_on_all_ranks(*got.parameters(), what="weights")
