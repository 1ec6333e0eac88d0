"""DistributedOptimizer(op=Adasum): ranks step by themselves, and their steps are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from checks.adasum import adasum_tensors
from checks.support import close, equal, raises, same_on_all_ranks
from checks.training import Net, loss_of

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def _reference(size: int, make: Make, steps: int, passes: int = 1) -> nn.Module:
    """All ranks in one process: start + Adasum of the ranks' own steps, tensor by tensor.

    Every rank keeps its own optimizer state; one rank alone is an ordinary optimizer.
    """
    models = [Net() for _ in range(size)]
    optimizers = [make(model) for model in models]
    for step in range(steps):
        start = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for one in range(passes):
                loss_of(model, step * passes + one, [rank]).backward()
            optimizer.step()
        for index, tensor in enumerate(start):
            ours = [list(model.parameters())[index] for model in models]
            combined = tensor + adasum_tensors([p.detach() - tensor for p in ours])
            for parameter in ours:
                parameter.data.copy_(combined)
    return models[0]


def _distributed(hvd: Any, make: Make, steps: int, passes: int = 1, **arguments: Any) -> nn.Module:
    model = Net()
    arguments.setdefault("named_parameters", model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        make(model), op=hvd.Adasum, backward_passes_per_step=passes, **arguments
    )
    assert isinstance(optimizer, torch.optim.Optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        for one in range(passes):
            loss_of(model, step * passes + one, [hvd.rank()]).backward()
        optimizer.step()
        same_on_all_ranks(*model.parameters(), what=f"weights after step {step}")
    return model


def _compare(got: nn.Module, want: nn.Module, rtol: float = 1e-9) -> None:
    for (name, one), other in zip(got.named_parameters(), want.parameters(), strict=True):
        close(one.detach(), other.detach(), name, rtol=rtol, atol=rtol)


def check_sgd(hvd: Any) -> None:
    _compare(_distributed(hvd, _sgd, 4), _reference(hvd.size(), _sgd, 4))


def check_adam(hvd: Any) -> None:
    _compare(_distributed(hvd, _adam, 4), _reference(hvd.size(), _adam, 4))


def check_passes(hvd: Any) -> None:
    got = _distributed(hvd, _sgd, 2, passes=2)
    _compare(got, _reference(hvd.size(), _sgd, 2, passes=2))


def check_fp16_compression(hvd: Any) -> None:
    """The deltas travel as float16; the weights do not."""
    got = _distributed(hvd, _sgd, 3, compression=hvd.Compression.fp16)
    _compare(got, _reference(hvd.size(), _sgd, 3), rtol=5e-3)


def check_several_groups_without_names(hvd: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [
                {"params": model.first.parameters(), "lr": 0.2, "momentum": 0.5},
                {"params": model.second.parameters(), "lr": 0.05},
            ],
            lr=0.1,
        )

    got = _distributed(hvd, make, 3, named_parameters=None)
    _compare(got, _reference(hvd.size(), make, 3))


def check_wrapped_twice(hvd: Any) -> None:
    """Two optimizers over the same names, one after the other (Horovod's old hooks stay)."""
    _distributed(hvd, _sgd, 1)
    _compare(_distributed(hvd, _sgd, 2), _reference(hvd.size(), _sgd, 2))


def check_closure(hvd: Any) -> None:
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        _sgd(model), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    for step in range(2):
        calls = []

        def closure(step: int = step, calls: list[float] = calls) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, [hvd.rank()])
            loss.backward()
            calls.append(loss.item())
            return loss

        loss = optimizer.step(closure)
        assert len(calls) == 1
        assert loss.item() == calls[0]
    _compare(model, _reference(hvd.size(), _sgd, 2))
    same_on_all_ranks(*model.parameters())


def check_zero_grad(hvd: Any) -> None:
    for set_to_none in (True, False):
        model = Net()
        optimizer = hvd.DistributedOptimizer(
            _sgd(model), named_parameters=model.named_parameters(), op=hvd.Adasum
        )
        for step in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, step, [hvd.rank()]).backward()
            optimizer.step()
        _compare(model, _reference(hvd.size(), _sgd, 2))


def check_missing_gradient(hvd: Any) -> None:
    """A parameter that only rank 0 has a gradient for: the others' delta is zero."""
    rank = hvd.rank()
    used, rare = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([used, rare], lr=0.5),
        named_parameters=[("used", used), ("rare", rare)],
        op=hvd.Adasum,
    )
    loss = used.sum()
    if rank == 0:
        loss = loss + rare.sum()
    loss.backward()
    optimizer.step()
    close(used.detach(), torch.full((3,), 0.5), "equal steps: their mean", rtol=1e-6)
    equal(rare.detach(), torch.full((4,), 0.5), "one step, and zeros")


def check_keeps_state(hvd: Any) -> None:
    model = Net()
    given = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    optimizer = hvd.DistributedOptimizer(
        given, named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    for state in optimizer.state_dict()["state"].values():
        assert float(state["sum"].min()) == float(state["sum"].max())
        close(state["sum"].reshape(-1)[:1], torch.tensor([0.1], dtype=torch.float64), "state")


def check_predivide_is_refused(hvd: Any) -> None:
    model = Net()
    with raises(ValueError, "gradient_predivide_factor"):
        hvd.DistributedOptimizer(
            _sgd(model),
            named_parameters=model.named_parameters(),
            op=hvd.Adasum,
            gradient_predivide_factor=2.0,
        )
