"""What wrapping keeps: the user's class, its state and options, schedulers, pickling."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from checks.support import close, equal, no_warnings, same_on_all_ranks
from checks.training import Net, loss_of, same_weights, sgd


class Demanding(torch.optim.SGD):
    """An optimizer whose constructor wants more than parameters, and keeps what it got."""

    def __init__(self, params: Any, inner: torch.optim.Optimizer, weight: float) -> None:
        super().__init__(params, lr=0.1)
        self.inner = inner
        self.weight = weight
        self.steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Further(Demanding):
    """A subclass of a subclass."""


def _wrap(hvd: Any, optimizer: torch.optim.Optimizer, model: nn.Module, **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **arguments
    )


def _train(hvd: Any, model: nn.Module, optimizer: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, step, [hvd.rank()]).backward()
        optimizer.step()


def _train_whole(hvd: Any, model: nn.Module, optimizer: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, step, range(hvd.size())).backward()
        optimizer.step()


def check_class(hvd: Any) -> None:
    model = Net()
    for make in (
        sgd,
        lambda model: torch.optim.Adam(model.parameters()),
        lambda model: Further(model.parameters(), sgd(Net()), 0.5),
    ):
        given = make(model)
        kind = type(given)
        wrapped = _wrap(hvd, given, model)
        assert isinstance(wrapped, kind)
        assert isinstance(wrapped, torch.optim.Optimizer)
        assert type(wrapped).__name__ == kind.__name__


def check_demanding_constructor(hvd: Any) -> None:
    """The constructor is not run again; attributes and methods stay."""
    model, want = Net(), Net()
    inner = sgd(Net())
    wrapped = _wrap(hvd, Demanding(model.parameters(), inner, weight=0.25), model)
    assert wrapped.inner is inner
    assert wrapped.weight == 0.25
    _train(hvd, model, wrapped, 0, 3)
    assert wrapped.steps == 3, f"the user's step ran {wrapped.steps} times"
    _train_whole(hvd, want, torch.optim.SGD(want.parameters(), lr=0.1), 0, 3)
    same_weights(model, want)


def check_adagrad_initial_value(hvd: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)

    model, want = Net(), Net()
    given = make(model)
    before = copy.deepcopy(given.state_dict())
    wrapped = _wrap(hvd, given, model)
    for index, state in before["state"].items():
        equal(wrapped.state_dict()["state"][index]["sum"], state["sum"], "accumulator")
    assert wrapped.defaults["initial_accumulator_value"] == 0.1
    _train(hvd, model, wrapped, 0, 2)
    _train_whole(hvd, want, make(want), 0, 2)
    same_weights(model, want)


def check_state_survives(hvd: Any) -> None:
    """Adam after load_state_dict of five steps, then wrapped: training goes on as it would."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.02)

    trained = Net()
    trained_optimizer = make(trained)
    _train_whole(hvd, trained, trained_optimizer, 0, 5)
    saved = copy.deepcopy((trained.state_dict(), trained_optimizer.state_dict()))

    model = Net()
    optimizer = make(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    wrapped = _wrap(hvd, optimizer, model)
    found = wrapped.state_dict()
    assert found["param_groups"] == saved[1]["param_groups"]
    for index, state in saved[1]["state"].items():
        for key, value in state.items():
            equal(found["state"][index][key], value, f"state {index}.{key}")
    _train(hvd, model, wrapped, 5, 3)
    _train_whole(hvd, trained, trained_optimizer, 5, 3)
    same_weights(model, trained)


def check_load_state_dict(hvd: Any) -> None:
    """state_dict is the plain one, and loads into a wrapped and into a plain optimizer."""
    model = Net()
    wrapped = _wrap(hvd, sgd(model), model)
    _train(hvd, model, wrapped, 0, 2)
    saved = copy.deepcopy(wrapped.state_dict())
    assert set(saved) == set(sgd(Net()).state_dict())
    other = Net()
    other.load_state_dict(model.state_dict())
    again = _wrap(hvd, sgd(other), other)
    again.load_state_dict(saved)
    _train(hvd, other, again, 2, 2)
    _train(hvd, model, wrapped, 2, 2)
    for got, want in zip(other.parameters(), model.parameters(), strict=True):
        equal(got.detach(), want.detach(), "continued from the saved state")
    plain_model = Net()
    plain = sgd(plain_model)
    plain.load_state_dict(saved)
    same_on_all_ranks(*model.parameters())


def check_load_state_dict_within_a_step(hvd: Any) -> None:
    """Loading drops what was being reduced; training goes on."""
    model, want = Net(), Net()
    wrapped = _wrap(hvd, torch.optim.SGD(model.parameters(), lr=0.1), model)
    fresh = copy.deepcopy(wrapped.state_dict())
    loss_of(model, 50, [hvd.rank()]).backward()
    wrapped.load_state_dict(fresh)
    _train(hvd, model, wrapped, 0, 2)
    _train_whole(hvd, want, torch.optim.SGD(want.parameters(), lr=0.1), 0, 2)
    same_weights(model, want)


def _schedulers() -> dict[str, Callable[[Any], Any]]:
    schedulers = torch.optim.lr_scheduler
    return {
        "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 1, gamma=0.5),
        "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(
            optimizer, max_lr=0.2, total_steps=10
        ),
    }


def check_schedulers(hvd: Any) -> None:
    """Made before or after wrapping: no warning, and the learning rate arrives in both cases."""
    for name, make in _schedulers().items():
        for order in ("before", "after"):
            model, want = Net(), Net()
            plain = sgd(want)
            plain_scheduler = make(plain)
            with no_warnings():
                given = sgd(model)
                if order == "before":
                    scheduler = make(given)
                    wrapped = _wrap(hvd, given, model)
                else:
                    wrapped = _wrap(hvd, given, model)
                    scheduler = make(wrapped)
                for step in range(3):
                    _train(hvd, model, wrapped, step, 1)
                    scheduler.step()
            for step in range(3):
                _train_whole(hvd, want, plain, step, 1)
                plain_scheduler.step()
            rate = wrapped.param_groups[0]["lr"]
            assert rate == plain.param_groups[0]["lr"], f"{name} {order}: lr {rate}"
            same_weights(model, want)


def check_options_are_shared(hvd: Any) -> None:
    """param_groups may be edited, and a group added, after wrapping."""
    model, want = Net(), Net()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.first.parameters(), lr=0.1)

    wrapped, plain = _wrap(hvd, make(model), model), make(want)
    for optimizer in (wrapped, plain):
        optimizer.param_groups[0]["lr"] = 0.3
        optimizer.param_groups[0]["momentum"] = 0.5
    _train(hvd, model, wrapped, 0, 2)
    _train_whole(hvd, want, plain, 0, 2)
    same_weights(model, want)


def check_pickle(hvd: Any) -> None:
    """A wrapped optimizer is pickled; what comes back is of the user's class, with the state."""
    model = Net()
    wrapped = _wrap(hvd, sgd(model), model)
    _train(hvd, model, wrapped, 0, 2)
    restored = pickle.loads(pickle.dumps(wrapped))
    assert isinstance(restored, torch.optim.SGD)
    _equal_states(restored, wrapped)
    buffer = io.BytesIO()
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 1)
    torch.save(scheduler.state_dict(), buffer)
    pickle.loads(pickle.dumps(scheduler))
    _train(hvd, model, wrapped, 2, 1)  # the original is none the worse for it
    same_on_all_ranks(*model.parameters())


def check_deepcopy(hvd: Any) -> None:
    model = Net()
    wrapped = _wrap(hvd, sgd(model), model)
    _train(hvd, model, wrapped, 0, 2)
    copied = copy.deepcopy(wrapped)
    assert isinstance(copied, torch.optim.SGD)
    _equal_states(copied, wrapped)
    ours = {id(p) for group in wrapped.param_groups for p in group["params"]}
    assert not any(id(p) in ours for group in copied.param_groups for p in group["params"])
    _train(hvd, model, wrapped, 2, 1)
    want = Net()
    _train_whole(hvd, want, sgd(want), 0, 3)
    same_weights(model, want)


def _equal_states(got: torch.optim.Optimizer, want: torch.optim.Optimizer) -> None:
    one, other = got.state_dict(), want.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert list(one["state"]) == list(other["state"])
    for index, state in other["state"].items():
        for key, value in state.items():
            equal(one["state"][index][key], value, f"state {index}.{key}")


def check_hooks_of_the_user(hvd: Any) -> None:
    """Step hooks registered before wrapping still run, once a step."""
    model = Net()
    given = sgd(model)
    calls: list[str] = []
    given.register_step_pre_hook(lambda *_: calls.append("pre"))
    given.register_step_post_hook(lambda *_: calls.append("post"))
    wrapped = _wrap(hvd, given, model)
    _train(hvd, model, wrapped, 0, 2)
    assert calls == ["pre", "post"] * 2, calls


def check_repr_and_truth(hvd: Any) -> None:
    model = Net()
    wrapped = _wrap(hvd, sgd(model), model)
    assert "SGD" in repr(wrapped)
    rate = torch.tensor(wrapped.param_groups[0]["lr"])
    close(rate, torch.tensor(0.1))
