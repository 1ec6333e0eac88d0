"""DistributedOptimizer: N ranks do what one process does on the whole batch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from checks.support import close, equal, no_warnings, raises, same_on_all_ranks, several, warns
from checks.training import Net, batch, distributed, loss_of, reference, same_weights, sgd

# -- plain training -----------------------------------------------------------------------------


def check_equals_one_process(hvd: Any) -> None:
    same_weights(distributed(hvd), reference(hvd.size()))


def check_adam(hvd: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, amsgrad=True)

    same_weights(distributed(hvd, make), reference(hvd.size(), make))


def check_sum(hvd: Any) -> None:
    """op=Sum: gradients of the ranks' mean losses are added, not averaged."""
    same_weights(
        distributed(hvd, op=hvd.Sum), reference(hvd.size(), scale=float(hvd.size())), rtol=1e-9
    )


def check_without_names(hvd: Any) -> None:
    same_weights(distributed(hvd, named_parameters=None), reference(hvd.size()))


def check_several_groups_without_names(hvd: Any) -> None:
    """Two groups of equal length, each with its own options, and no names."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [
                {"params": model.first.parameters(), "lr": 0.2, "momentum": 0.5},
                {"params": model.second.parameters(), "lr": 0.05},
            ],
            lr=0.1,
            weight_decay=0.01,
        )

    same_weights(distributed(hvd, make, named_parameters=None), reference(hvd.size(), make))


def check_gradients_are_averaged_in_place(hvd: Any) -> None:
    """After synchronize, p.grad holds the average, and gradients keep their shape and strides."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    optimizer.zero_grad()
    loss_of(model, 0, [hvd.rank()]).backward()
    optimizer.synchronize()
    want = Net()
    loss_of(want, 0, range(hvd.size())).backward()
    for got, other in zip(model.parameters(), want.parameters(), strict=True):
        close(got.grad, other.grad, "gradient", rtol=1e-10, atol=1e-12)
    same_on_all_ranks(*[p.grad for p in model.parameters()], what="gradients")
    with optimizer.skip_synchronize():
        optimizer.step()


def check_float32_and_mixed_dtypes(hvd: Any) -> None:
    """Parameters of several dtypes in one optimizer, also half ones."""
    rank, size = hvd.rank(), hvd.size()
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
    model = nn.ParameterList([torch.ones(i + 2, dtype=dtype) for i, dtype in enumerate(dtypes)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
    )
    for _ in range(2):
        optimizer.zero_grad()
        sum((p * (rank + 1)).sum().double() for p in model).backward()
        optimizer.step()
    mean = (size + 1) / 2
    for index, (parameter, dtype) in enumerate(zip(model, dtypes, strict=True)):
        want = torch.full((index + 2,), 1 - 2 * 0.5 * mean, dtype=dtype)
        close(parameter.detach(), want, f"{dtype}", rtol=1e-2 if dtype.itemsize == 2 else 1e-6)
    same_on_all_ranks(*model)


def check_odd_shapes(hvd: Any) -> None:
    """0-dim, empty, one element, transposed, and many tiny parameters."""
    rank, size = hvd.rank(), hvd.size()
    tensors = [
        torch.tensor(1.0),
        torch.empty(0, 3),
        torch.ones(1),
        torch.ones(4, 3).t(),
        torch.ones(2, 1, 3),
        *[torch.ones(1 + i % 3) for i in range(60)],
    ]
    model = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.25), named_parameters=model.named_parameters()
    )
    for _ in range(3):
        optimizer.zero_grad()
        sum((p * (rank + 1 + i)).sum() for i, p in enumerate(model)).backward()
        optimizer.step()
    for index, (parameter, tensor) in enumerate(zip(model, tensors, strict=True)):
        want = torch.full_like(tensor, 1 - 3 * 0.25 * ((size + 1) / 2 + index))
        close(parameter.detach(), want, f"parameter {index}", rtol=1e-5)


def check_channels_last(hvd: Any) -> None:
    """Parameters keep their memory format, and train as they would without us."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 2)).double()
        return net.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, ranks: Any) -> torch.Tensor:
        images = [
            torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(r)).double()
            for r in ranks
        ]
        return model(torch.cat(images).to(memory_format=torch.channels_last)).square().mean()

    model, want = build(), build()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    plain = sgd(want)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, [hvd.rank()]).backward()
        optimizer.step()
        plain.zero_grad()
        loss(want, range(hvd.size())).backward()
        plain.step()
    same_weights(model, want)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last), name


# -- gradient accumulation ------------------------------------------------------------------------


def check_two_passes(hvd: Any) -> None:
    """Gradients of the passes of one step are summed, not averaged."""
    same_weights(distributed(hvd, passes=2), reference(hvd.size(), passes=2))


def check_three_passes(hvd: Any) -> None:
    same_weights(distributed(hvd, passes=3), reference(hvd.size(), passes=3))


def check_set_passes(hvd: Any) -> None:
    model = Net()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    for one in range(2):
        loss_of(model, one, [hvd.rank()]).backward()
    optimizer.step()
    same_weights(model, reference(hvd.size(), steps=1, passes=2))


def check_incomplete_window(hvd: Any) -> None:
    """step() within a window reduces what is there; the next window is whole again."""
    rank, size = hvd.rank(), hvd.size()
    model, want = Net(), Net()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), backward_passes_per_step=3
    )
    plain = sgd(want)
    index = 0
    for _epoch in range(2):
        for window in (3, 1):  # four batches an epoch
            optimizer.zero_grad()
            plain.zero_grad()
            for _ in range(window):
                loss_of(model, index, [rank]).backward()
                loss_of(want, index, range(size)).backward()
                index += 1
            optimizer.step()
            plain.step()
    same_weights(model, want)


def check_zero_grad_within_window(hvd: Any) -> None:
    """What was accumulated is dropped, and the window starts anew."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), backward_passes_per_step=2
    )
    loss_of(model, 77, [hvd.rank()]).backward()
    optimizer.zero_grad()
    for one in range(2):
        loss_of(model, one, [hvd.rank()]).backward()
    optimizer.step()
    same_weights(model, reference(hvd.size(), steps=1, passes=2))


# -- options ------------------------------------------------------------------------------------


def check_predivide(hvd: Any) -> None:
    """Part of the division happens before the sum; the result is the average all the same."""
    for factor in (1.0, 2.0, 0.5):
        same_weights(
            distributed(hvd, gradient_predivide_factor=factor), reference(hvd.size()), rtol=1e-9
        )


def check_groups(hvd: Any) -> None:
    for groups in (2, 1, 4):
        same_weights(distributed(hvd, groups=groups), reference(hvd.size()))


def check_explicit_groups(hvd: Any) -> None:
    """Some parameters named in groups, the others left out; with a predivide factor, too."""
    for factor in (1.0, 2.0):
        model = Net()
        groups = [[model.second.bias, model.first.weight], [model.first.bias]]
        got = distributed(hvd, model=model, groups=groups, gradient_predivide_factor=factor)
        same_weights(got, reference(hvd.size()), rtol=1e-9)


def check_num_groups(hvd: Any) -> None:
    with warns(DeprecationWarning, "groups"):
        got = distributed(hvd, num_groups=2)
    same_weights(got, reference(hvd.size()))


@several
def check_groups_with_missing_gradient(hvd: Any) -> None:
    """A group one of whose gradients does not come, on one rank."""
    for groups in (1, 2):
        _heads(hvd, groups=groups)


def check_fp16_compression(hvd: Any) -> None:
    """Close to the exact result, equal on all ranks, and dtypes stay."""
    got = distributed(hvd, compression=hvd.Compression.fp16)
    same_weights(got, reference(hvd.size()), rtol=3e-3)
    for parameter in got.parameters():
        assert parameter.dtype == torch.float64
        assert parameter.grad is None or parameter.grad.dtype == torch.float64


def check_fp16_compression_does_not_overflow(hvd: Any) -> None:
    parameter = nn.Parameter(torch.zeros(5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        named_parameters=[("p", parameter)],
        compression=hvd.Compression.fp16,
    )
    (parameter * 60000.0).sum().backward()
    optimizer.step()
    equal(parameter.detach(), torch.full((5,), -60000.0).half().float())


# -- parameters without a gradient ----------------------------------------------------------------


class Heads(nn.Module):
    """A body and one head per rank; rank r uses head r only. The last head nobody uses."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2 + i) for i in range(size + 1))
        self.double()

    def loss(self, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        return self.heads[rank](torch.tanh(self.body(x))).square().mean()


def _heads(hvd: Any, set_to_none: bool = True, **arguments: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    model, want = Heads(size), Heads(size)
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), **arguments
    )
    plain = sgd(want)
    unused = [parameter.detach().clone() for parameter in model.heads[size].parameters()]
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        model.loss(step, rank).backward()
        optimizer.step()
        plain.zero_grad(set_to_none=set_to_none)
        sum(want.loss(step, other) / size for other in range(size)).backward()
        plain.step()
    same_weights(model, want)
    # Nobody had a gradient: none appears, and weight decay leaves the parameter alone.
    for parameter, before in zip(model.heads[size].parameters(), unused, strict=True):
        assert parameter.grad is None, "a gradient that nobody computed"
        equal(parameter.detach(), before, "a parameter that nobody used")


def check_rank_dependent_branches(hvd: Any) -> None:
    _heads(hvd)


def check_rank_dependent_branches_with_zeroed_gradients(hvd: Any) -> None:
    _heads(hvd, set_to_none=False)


@several
def check_random_branches(hvd: Any) -> None:
    """Each rank skips other parameters, in another order: results are right, nothing hangs."""
    rank, size = hvd.rank(), hvd.size()
    shapes = [(i % 4 + 1, i + 1) for i in range(10)]
    model = nn.ParameterList([torch.zeros(shape) for shape in shapes])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
    )
    want = [torch.zeros(shape) for shape in shapes]

    def used(step: int, who: int) -> list[int]:
        generator = torch.Generator().manual_seed(97 * step + who)
        order = torch.randperm(len(shapes), generator=generator).tolist()
        return order[: 1 + (step + who) % len(shapes)]

    for step in range(12):
        optimizer.zero_grad()
        sum((model[i] * (rank + 1) * 8).sum() for i in used(step, rank)).backward()
        optimizer.step()
        for who in range(size):
            for i in used(step, who):
                want[i] -= (who + 1) * 8 / size
    for index, parameter in enumerate(model):
        close(parameter.detach(), want[index], f"parameter {index}", rtol=1e-5)
    same_on_all_ranks(*model)


@several
def check_rank_without_any_gradient(hvd: Any) -> None:
    """One rank has no batch left and only calls step()."""
    rank, size = hvd.rank(), hvd.size()
    model = Net()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    optimizer.zero_grad()
    if rank != size - 1:
        loss_of(model, 0, [rank]).backward()
    optimizer.step()
    want = Net()
    plain = sgd(want)
    sum(loss_of(want, 0, [other]) / size for other in range(size - 1)).backward()
    plain.step()
    same_weights(model, want)


def check_frozen_parameters(hvd: Any) -> None:
    """Frozen ones may be in the optimizer, named, or neither."""
    model, want = Net(), Net()
    for one in (model, want):
        one.first.weight.requires_grad_(False)
    before = model.first.weight.detach().clone()
    got = distributed(hvd, model=model)
    same_weights(got, reference(hvd.size(), model=want))
    equal(model.first.weight.detach(), before, "the frozen parameter")

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    model, want = Net(), Net()
    for one in (model, want):
        one.first.weight.requires_grad_(False)
    same_weights(distributed(hvd, make, model=model), reference(hvd.size(), make, model=want))


def check_more_names_than_parameters(hvd: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.second.parameters(), lr=0.1)

    same_weights(distributed(hvd, make), reference(hvd.size(), make))


# -- zero_grad, synchronize, step -----------------------------------------------------------------


def check_zero_grad(hvd: Any) -> None:
    """Both values of set_to_none; gradients are None, or zero, afterwards."""
    for set_to_none in (True, False):
        model, want = Net(), reference(hvd.size(), steps=3)
        optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            for parameter in model.parameters():
                if set_to_none:
                    assert parameter.grad is None
                elif parameter.grad is not None:
                    equal(parameter.grad, torch.zeros_like(parameter), "zeroed gradient")
            loss_of(model, step, [hvd.rank()]).backward()
            optimizer.step()
        same_weights(model, want)


def check_gradients_set_by_hand(hvd: Any) -> None:
    """A user may drop or replace p.grad, and model.zero_grad() may be used."""
    rank, size = hvd.rank(), hvd.size()
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
    )
    want = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        loss_of(model, 0, [rank]).backward()
        optimizer.synchronize()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(size))
        with optimizer.skip_synchronize():
            optimizer.step()
        want = [tensor - size for tensor in want]
    for parameter, tensor in zip(model.parameters(), want, strict=True):
        close(parameter.detach(), tensor, "after gradients set by hand", rtol=1e-12)


def _clipped(hvd: Any, steps: int) -> nn.Module:
    want = Net()
    plain = torch.optim.SGD(want.parameters(), lr=0.5)
    for step in range(steps):
        plain.zero_grad()
        loss_of(want, step, range(hvd.size())).backward()
        torch.nn.utils.clip_grad_norm_(want.parameters(), 0.1)
        plain.step()
    return want


def check_clipping(hvd: Any) -> None:
    """synchronize, clip, step inside skip_synchronize: no second reduction, no warning."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
    )
    with no_warnings():
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, [hvd.rank()]).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
    same_weights(model, _clipped(hvd, 3))


def check_step_after_synchronize_warns(hvd: Any) -> None:
    """step() after synchronize() says so, and the clipped gradients survive."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
    )
    optimizer.zero_grad()
    loss_of(model, 0, [hvd.rank()]).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with warns(UserWarning, "skip_synchronize"):
        optimizer.step()
    same_weights(model, _clipped(hvd, 1))
    with no_warnings():  # and the next step is an ordinary one
        optimizer.zero_grad()
        loss_of(model, 1, [hvd.rank()]).backward()
        optimizer.step()


def check_grad_scaler(hvd: Any) -> None:
    """An infinity on one rank reaches all: all skip that step, all halve the scale, all go on.

    The reduction has to come before unscaling, hence synchronize() and skip_synchronize().
    """
    rank, size = hvd.rank(), hvd.size()
    model, want = Net().float(), Net().float()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    plain = torch.optim.SGD(want.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(step, [rank])
        loss = (model(inputs.float()) - targets.float()).square().mean()
        if step == 1 and rank == size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (64.0 if step == 0 else 32.0), scaler.get_scale()
        if step == 1:
            continue
        plain.zero_grad()
        inputs, targets = batch(step, range(size))
        (want(inputs.float()) - targets.float()).square().mean().backward()
        plain.step()
    same_weights(model, want, rtol=1e-4)


def check_closure(hvd: Any) -> None:
    """What the closure computes is reduced, and its loss comes back."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    for step in range(3):
        calls = []

        def closure(step: int = step, calls: list[float] = calls) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, [hvd.rank()])
            loss.backward()
            calls.append(loss.item())
            return loss

        loss = optimizer.step(closure)
        assert len(calls) == 1, f"the closure was called {len(calls)} times"
        assert loss.item() == calls[0]
    same_weights(model, reference(hvd.size(), steps=3))


def check_step_without_backward(hvd: Any) -> None:
    """Nothing to reduce on any rank: nothing changes, and training goes on."""
    model = Net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    optimizer.step()
    for parameter, tensor in zip(model.parameters(), before, strict=True):
        equal(parameter.detach(), tensor, "a step on nothing")
    want = reference(hvd.size(), steps=2)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, [hvd.rank()]).backward()
        optimizer.step()
    same_weights(model, want)


def check_two_losses(hvd: Any) -> None:
    """Two backward passes of separate losses that reach separate parameters make one step."""
    rank, size = hvd.rank(), hvd.size()
    model, want = Heads(2), Heads(2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.heads.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    plain = torch.optim.SGD(want.heads.parameters(), lr=0.1)

    def loss(net: Heads, head: int, seed: int) -> torch.Tensor:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return net.heads[head](x).square().mean()

    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        for head in (0, 1):
            loss(model, head, 10 * step + rank).backward()
            sum(loss(want, head, 10 * step + other) / size for other in range(size)).backward()
        optimizer.step()
        plain.step()
    same_weights(model, want)


# -- two optimizers -----------------------------------------------------------------------------


def check_two_optimizers_with_equal_names(hvd: Any) -> None:
    """A GAN: both nets have equal names, and the generator's loss flows through the other one."""
    rank, size = hvd.rank(), hvd.size()

    def nets() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(5)
        return nn.Linear(4, 6).double(), nn.Linear(6, 4).double()

    def noise(step: int, ranks: Any) -> torch.Tensor:
        parts = [
            torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + r))
            for r in ranks
        ]
        return torch.cat(parts).double()

    def play(pair: Any, optimizers: Any, ranks: Any) -> None:
        generator, judge = pair
        generator_optimizer, judge_optimizer = optimizers
        for step in range(3):
            x = noise(step, ranks)
            generator_optimizer.zero_grad()
            judge(torch.tanh(generator(x))).square().mean().backward()
            generator_optimizer.step()
            judge_optimizer.zero_grad()
            fake = torch.tanh(generator(x)).detach()
            (judge(fake) - 1).square().mean().backward()
            judge_optimizer.step()

    pair, want = nets(), nets()
    play(want, [sgd(net) for net in want], range(size))
    wrapped = [
        hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters()) for net in pair
    ]
    play(pair, wrapped, [rank])
    for net, other in zip(pair, want, strict=True):
        same_weights(net, other)


def check_two_optimizers_at_once(hvd: Any) -> None:
    """Two optimizers whose backward passes interleave."""
    size = hvd.size()
    models = [Net(seed=1), Net(seed=2)]
    optimizers = [
        hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
        for model in models
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models:
            loss_of(model, step, [hvd.rank()]).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    for model, seed in zip(models, (1, 2), strict=True):
        same_weights(model, reference(size, steps=3, model=Net(seed=seed)))


def check_other_collectives_in_between(hvd: Any) -> None:
    """Metrics are averaged while gradients are on their way, as training scripts do."""
    rank, size = hvd.rank(), hvd.size()
    model = Net()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, [rank]).backward()
        metric = hvd.allreduce(torch.tensor(float(rank)), name="metric")
        assert metric.item() == (size - 1) / 2
        optimizer.step()
        hvd.barrier()
        assert hvd.broadcast_object(step * 10 + rank, 0) == step * 10
    same_weights(model, reference(size, steps=3))


# -- errors -------------------------------------------------------------------------------------


def check_bad_arguments(hvd: Any) -> None:
    """Each is refused with a reason; none of them breaks the library."""
    model = Net()
    names = list(model.named_parameters())

    def wrap(**arguments: Any) -> Any:
        return hvd.DistributedOptimizer(sgd(model), **arguments)

    with raises(ValueError, "first.weight"):  # repeated
        wrap(named_parameters=[*names, ("first.weight", names[1][1])])
    with raises(ValueError, "named_parameters"):  # two parameters without a name: shapes told
        wrap(named_parameters=names[:2])
    with raises(ValueError, "3, 8"):
        wrap(named_parameters=names[:2])
    with raises((ValueError, TypeError), "tuple"):
        wrap(named_parameters=model.parameters())
    for groups in ([model.first.weight], "ab", -1, [[names[0][1]], [names[0][1]]], [["x"]]):
        with raises((ValueError, TypeError), "group"):
            wrap(named_parameters=names, groups=groups)
    with raises(ValueError, "gradient_predivide_factor"):
        wrap(named_parameters=names, gradient_predivide_factor=2.0, op=hvd.Sum)
    for passes in (0, -1):
        with raises(ValueError, "backward_passes_per_step"):
            wrap(named_parameters=names, backward_passes_per_step=passes)
    with raises((TypeError, ValueError), "optimizer"):
        hvd.DistributedOptimizer(model, named_parameters=names)

    class Wrapper:
        """Looks like an optimizer, as Lookahead and Noam wrappers do, but is none."""

        param_groups = sgd(model).param_groups

        def step(self) -> None:
            pass

    with raises(TypeError, "Wrapper"):
        hvd.DistributedOptimizer(Wrapper(), named_parameters=names)
    same_weights(distributed(hvd, steps=1), reference(hvd.size(), steps=1))


def check_no_warnings_in_ordinary_use(hvd: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed(hvd, steps=2)
