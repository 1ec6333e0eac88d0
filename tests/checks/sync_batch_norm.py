"""SyncBatchNorm: what N ranks compute is what torch's BatchNorm computes of the joined batch."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from checks.support import close, equal, raises, same_on_all_ranks, several

CHANNELS = 3

#: what follows (N, C)
TAILS: tuple[tuple[int, ...], ...] = ((), (5,), (4, 3), (2, 3, 2))


def batch(
    rank: int,
    rows: int,
    tail: Sequence[int] = (4, 3),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> torch.Tensor:
    """A rank's rows; every rank has another mean and another deviation."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    shape = (rows, CHANNELS, *tail)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (numbers * (rank + 1) + 2 * rank - 1).to(dtype)


def rows_of(rank: int) -> int:
    return 2 + rank


def layers(hvd: Any, **options: Any) -> tuple[Any, Any]:
    """Ours, and torch's with the same parameters, both in double precision."""
    ours = hvd.SyncBatchNorm(CHANNELS, **options).double()
    # BatchNorm1d, 2d and 3d are one class that checks dimensions.
    theirs = torch.nn.BatchNorm2d(CHANNELS, **options).double()
    theirs._check_input_dim = lambda input: None
    if ours.affine:
        with torch.no_grad():
            for layer in (ours, theirs):
                layer.weight.copy_(torch.tensor([0.5, -2.0, 3.0]))
                layer.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    return ours, theirs


def compare_step(
    hvd: Any,
    ours: Any,
    theirs: Any,
    parts: Sequence[torch.Tensor],
    rtol: float = 1e-9,
    what: str = "",
) -> None:
    """One forward and backward on this rank's part, and by torch on all parts."""
    rank = hvd.rank()
    mine = parts[rank].clone().requires_grad_()
    joined = torch.cat(list(parts)).requires_grad_()
    ours.zero_grad()
    theirs.zero_grad()
    # A loss whose gradient differs from element to element.
    factors = torch.cat([torch.cos(3 * part + 1) for part in parts])
    begin = sum(len(part) for part in parts[:rank])
    rows = slice(begin, begin + len(mine))
    output, want = ours(mine), theirs(joined)
    (output * factors[rows]).sum().backward()
    (want * factors).sum().backward()
    close(output, want[rows], f"output {what}", rtol, 1e-9)
    assert mine.grad is not None
    assert joined.grad is not None
    close(mine.grad, joined.grad[rows], f"gradient of the input {what}", rtol, 1e-9)
    for name, parameter in theirs.named_parameters():
        gradient = hvd.allreduce(getattr(ours, name).grad, op=hvd.Sum)
        close(gradient, parameter.grad, f"gradient of the {name} {what}", rtol, 1e-9)
    for name, buffer in theirs.named_buffers():
        close(getattr(ours, name), buffer, f"{name} {what}", rtol, 1e-9)
        same_on_all_ranks(getattr(ours, name), what=name)


def check_is_torchs_on_the_joined_batch(hvd: Any) -> None:
    """Every number of dimensions, unequal batches, several steps."""
    for tail in TAILS:
        ours, theirs = layers(hvd)
        for step in range(3):
            parts = [batch(r, rows_of(r), tail, seed=step) for r in range(hvd.size())]
            compare_step(hvd, ours, theirs, parts, what=f"{tail} step {step}")


@several
def check_an_empty_batch_on_one_rank(hvd: Any) -> None:
    for empty in (0, hvd.size() - 1):
        ours, theirs = layers(hvd)
        for step in range(2):
            parts = [batch(r, 0 if r == empty else 3, seed=step) for r in range(hvd.size())]
            compare_step(hvd, ours, theirs, parts, what=f"rank {empty} has nothing")


@several
def check_empty_batches_everywhere(hvd: Any) -> None:
    ours, _ = layers(hvd)
    mine = batch(0, 0).requires_grad_()
    output = ours(mine)
    output.sum().backward()
    equal(tuple(output.shape), (0, CHANNELS, 4, 3))
    equal(ours.running_mean, torch.zeros(CHANNELS, dtype=torch.float64))
    equal(ours.running_var, torch.ones(CHANNELS, dtype=torch.float64))


def check_cumulative_average(hvd: Any) -> None:
    ours, theirs = layers(hvd, momentum=None)
    for step in range(4):
        parts = [batch(r, rows_of(r), seed=step) for r in range(hvd.size())]
        compare_step(hvd, ours, theirs, parts, what=f"step {step}")
    equal(int(ours.num_batches_tracked), 4)


def check_without_affine_or_running_statistics(hvd: Any) -> None:
    for options in ({"affine": False}, {"track_running_stats": False}, {"eps": 0.5}):
        ours, theirs = layers(hvd, **options)
        parts = [batch(r, rows_of(r)) for r in range(hvd.size())]
        compare_step(hvd, ours, theirs, parts, what=str(options))
    ours, theirs = layers(hvd, track_running_stats=False)
    ours.eval()
    theirs.eval()
    compare_step(hvd, ours, theirs, parts, what="of the batch in evaluation, too")


def check_evaluation_is_local(hvd: Any) -> None:
    """With the running statistics, and one rank may do it alone."""
    ours, theirs = layers(hvd)
    parts = [batch(r, rows_of(r)) for r in range(hvd.size())]
    compare_step(hvd, ours, theirs, parts)
    ours.eval()
    theirs.eval()
    if hvd.rank() == hvd.size() - 1:
        alone = batch(7, 4)
        close(ours(alone), theirs(alone), "evaluation", 1e-9, 1e-9)
        before = ours.running_mean.clone()
        ours(alone)
        equal(ours.running_mean, before)
    hvd.barrier()


def check_single_and_half_precision(hvd: Any) -> None:
    """Half precision is computed in single: one rounding, of what is returned."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for halved in (False, True):  # the layer's own parameters
            # Alone, the layer is torch's own, which computes all of it in half precision then.
            if halved and (dtype == torch.float32 or hvd.size() == 1):
                continue
            ours = hvd.SyncBatchNorm(CHANNELS)
            theirs = torch.nn.BatchNorm2d(CHANNELS)
            ours = ours.to(dtype) if halved else ours
            parts = [batch(r, rows_of(r), dtype=dtype) for r in range(hvd.size())]
            mine = parts[hvd.rank()].clone().requires_grad_()
            joined = torch.cat(parts).float().requires_grad_()
            output, want = ours(mine), theirs(joined)
            begin = sum(len(part) for part in parts[: hvd.rank()])
            rows = slice(begin, begin + len(mine))
            factors = torch.cos(3 * joined.detach()).to(dtype).float()
            output.backward(factors[rows].to(dtype))
            want.backward(factors)
            assert mine.grad is not None
            assert joined.grad is not None
            what = f"{dtype} halved={halved}"
            resolution = max(torch.finfo(dtype).eps, 1e-5)
            close(output, want[rows].to(dtype), what, resolution, 1e-5)
            close(mine.grad, joined.grad[rows].to(dtype), what, resolution, 2e-5)
            statistics = ours.running_var
            close(
                statistics,
                theirs.running_var.to(statistics.dtype),
                what,
                max(torch.finfo(statistics.dtype).eps, 1e-5),
            )
            equal(ours.weight.grad.dtype, ours.weight.dtype)


def check_a_large_mean_does_not_cancel(hvd: Any) -> None:
    """A deviation of 1 beside means of 30000: squares of float32 would have lost it."""
    parts = [batch(r, 50).sub(2 * r - 1).div(r + 1) + 3e4 + r for r in range(hvd.size())]
    singles = [part.float() for part in parts]
    wide = torch.cat(singles).double()
    ours = hvd.SyncBatchNorm(CHANNELS, momentum=1.0)
    ours(singles[hvd.rank()])
    want = wide.transpose(0, 1).reshape(CHANNELS, -1).var(1)
    # The means themselves are single numbers, of 5 digits before the point.
    close(ours.running_var, want.float(), "variance", 1e-2)


def check_channels_last_is_kept(hvd: Any) -> None:
    for tail, layout in (((4, 3), torch.channels_last), ((2, 3, 2), torch.channels_last_3d)):
        ours, theirs = layers(hvd)
        parts = [batch(r, rows_of(r), tail) for r in range(hvd.size())]
        laid_out = [part.contiguous(memory_format=layout) for part in parts]
        compare_step(hvd, ours, theirs, laid_out, what=str(layout))
        mine = laid_out[hvd.rank()].clone().requires_grad_()
        assert ours(mine).is_contiguous(memory_format=layout)
    # Rows that are a part of others', and a gradient of strides 0.
    ours, _ = layers(hvd)
    wide = batch(hvd.rank(), 4, (4, 6)).requires_grad_()
    ours(wide[:, :, :, ::2]).sum().backward()
    assert wide.grad is not None
    close(wide.grad, torch.zeros_like(wide), "gradient of a sum", atol=1e-9)


def check_one_value_per_channel(hvd: Any) -> None:
    """An error on all ranks, which leaves everything usable."""
    for tail in ((), (1, 1)):
        ours, theirs = layers(hvd)
        mine = batch(hvd.rank(), 1 if hvd.rank() == 0 else 0, tail)
        with raises(ValueError, "Expected more than 1 value per channel when training"):
            ours(mine)
    ours, theirs = layers(hvd)
    compare_step(hvd, ours, theirs, [batch(r, 1) for r in range(hvd.size())])


def check_wrong_inputs(hvd: Any) -> None:
    ours, _ = layers(hvd)
    with raises(ValueError, "at least 2D"):
        ours(torch.zeros(CHANNELS, dtype=torch.float64))
    with raises(ValueError, "channel", str(CHANNELS)):
        hvd.SyncBatchNorm(CHANNELS)(torch.zeros(4, CHANNELS + 1))
    if hvd.size() > 1:
        dtype = torch.float64 if hvd.rank() == 0 else torch.float32
        with raises(hvd.HorovodInternalError, "float64", "float32"):
            hvd.SyncBatchNorm(CHANNELS)(torch.ones(4, CHANNELS, dtype=dtype))
    parts = [batch(r, 2) for r in range(hvd.size())]
    compare_step(hvd, *layers(hvd), parts, what="after errors")


def _in_threads(functions: Sequence[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def catch(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=catch, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@several
def check_layers_in_another_order_on_each_rank(hvd: Any) -> None:
    """In threads, since a single one waits for the first layer before it calls the second."""
    size, rank = hvd.size(), hvd.rank()
    pairs = [layers(hvd) for _ in range(4)]
    inputs = [[batch(r, rows_of(r), seed=i) for r in range(size)] for i in range(len(pairs))]
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def use(i: int) -> Callable[[], None]:
        def forward_and_backward() -> None:
            mine = inputs[i][rank].clone().requires_grad_()
            output = pairs[i][0](mine)
            output.pow(3).sum().backward()
            assert mine.grad is not None
            found[i] = output, mine.grad

        return forward_and_backward

    order = [(i + rank) % len(pairs) for i in range(len(pairs))]
    _in_threads([use(i) for i in order])
    for i, (_, theirs) in enumerate(pairs):
        joined = torch.cat(inputs[i]).requires_grad_()
        want = theirs(joined)
        want.pow(3).sum().backward()
        assert joined.grad is not None
        begin = sum(rows_of(r) for r in range(rank))
        rows = slice(begin, begin + rows_of(rank))
        close(found[i][0], want[rows], f"output of layer {i}", 1e-9, 1e-9)
        close(found[i][1], joined.grad[rows], f"gradient of layer {i}", 1e-9, 1e-9)


def check_a_layer_used_twice(hvd: Any) -> None:
    """Once after the other on its own output, and on two inputs whose gradients meet."""
    size, rank = hvd.size(), hvd.rank()
    ours, theirs = layers(hvd)
    parts = [batch(r, 4) for r in range(size)]
    others = [batch(r, 3, seed=1) for r in range(size)]

    def run(layer: Any, first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
        first, second = first.clone().requires_grad_(), second.clone().requires_grad_()
        twice = layer(torch.tanh(layer(first)))
        once = layer(second)
        (twice.pow(3).sum() + once.pow(3).sum()).backward()
        assert first.grad is not None
        assert second.grad is not None
        return [twice, once, first.grad, second.grad]

    got = run(ours, parts[rank], others[rank])
    want = run(theirs, torch.cat(parts), torch.cat(others))
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        rows = len(a)
        close(a, b[rank * rows : (rank + 1) * rows], f"value {index}", 1e-9, 1e-9)
    close(ours.running_var, theirs.running_var, "running variance", 1e-9)


@several
def check_gradients_of_two_calls_in_another_order(hvd: Any) -> None:
    """Each rank asks for the gradients of its calls in an order of its own, in two threads."""
    size, rank = hvd.size(), hvd.rank()
    ours, theirs = layers(hvd)
    inputs = [[batch(r, 4, seed=i) for r in range(size)] for i in range(2)]
    mine = [parts[rank].clone().requires_grad_() for parts in inputs]
    outputs = [ours(one) for one in mine]
    joined = [torch.cat(parts).requires_grad_() for parts in inputs]
    for one in joined:
        theirs(one).pow(3).sum().backward()
    backward = [lambda one=one: one.pow(3).sum().backward() for one in outputs]
    _in_threads(backward if rank % 2 else backward[::-1])
    for got, want in zip(mine, joined, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        close(got.grad, want.grad[4 * rank : 4 * rank + 4], "gradient", 1e-9, 1e-9)


def check_recomputation(hvd: Any) -> None:
    """A checkpoint calls the layer again in backward; torch's own counts that batch twice, too."""
    size, rank = hvd.size(), hvd.rank()
    for reentrant in (False, True):
        ours, theirs = layers(hvd)
        parts = [batch(r, 4) for r in range(size)]

        def run(layer: Any, input: torch.Tensor, reentrant: bool) -> torch.Tensor:
            input = input.clone().requires_grad_()

            def block(values: torch.Tensor) -> torch.Tensor:
                return torch.tanh(layer(torch.sin(layer(values))))

            out = checkpoint(block, input, use_reentrant=reentrant)
            out = checkpoint(block, out, use_reentrant=reentrant)
            out.pow(3).sum().backward()
            assert input.grad is not None
            return input.grad

        got = run(ours, parts[rank], reentrant)
        want = run(theirs, torch.cat(parts), reentrant)
        close(got, want[4 * rank : 4 * rank + 4], f"reentrant={reentrant}", 1e-8, 1e-9)
        close(ours.running_mean, theirs.running_mean, "running mean", 1e-9, 1e-9)
        equal(int(ours.num_batches_tracked), int(theirs.num_batches_tracked))


def check_training_is_that_of_one_process(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, CHANNELS, 3),
        hvd.SyncBatchNorm(CHANNELS),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(CHANNELS * 16, 2),
        hvd.SyncBatchNorm(2),
    ).double()
    alone = torch.nn.Sequential(*(copy.deepcopy(layer) for layer in model))
    alone[1] = torch.nn.BatchNorm2d(CHANNELS).double()
    alone[5] = torch.nn.BatchNorm1d(2).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4 * size, 1, 6, 6, generator=generator, dtype=torch.float64)
        labels = torch.randn(4 * size, 2, generator=generator, dtype=torch.float64)
        rows = slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        functional.mse_loss(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        reference.zero_grad()
        functional.mse_loss(alone(images), labels).backward()
        reference.step()
    for name, value in alone.state_dict().items():
        close(model.state_dict()[name], value, name, 1e-8, 1e-10)
    same_on_all_ranks(*model.state_dict().values(), what="the model")


def check_state_is_torchs(hvd: Any) -> None:
    """Checkpoints of torch's layers can be loaded, and the other way round; copies work."""
    ours, theirs = layers(hvd)
    assert isinstance(ours, torch.nn.modules.batchnorm._BatchNorm)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    parts = [batch(r, 2) for r in range(hvd.size())]
    compare_step(hvd, copy.deepcopy(ours), copy.deepcopy(theirs), parts, what="of a copy")
    options = "eps=1e-05, momentum=0.1, affine=True, track_running_stats=True"
    assert all(option in repr(ours) for option in options.split(", ")), repr(ours)
    with torch.no_grad():
        same_on_all_ranks(ours(torch.ones(2, CHANNELS).double()), what="without gradients")


@several
def check_after_a_rank_has_joined(hvd: Any) -> None:
    """It has no rows, as with an empty batch; afterwards calls go by the same numbers again."""
    if os.environ.get("UNIDIST_TEST_BACKEND") == "horovod":
        return  # Horovod has no gather after a join
    size, rank = hvd.size(), hvd.rank()
    ours, theirs = layers(hvd)
    leaver = size - 1
    for step in range(3):
        if rank != leaver:
            parts = [batch(r, 3, seed=step) for r in range(leaver)]
            mine = parts[rank].clone().requires_grad_()
            joined = torch.cat(parts).requires_grad_()
            ours(mine).pow(3).sum().backward()
            theirs(joined).pow(3).sum().backward()
            assert mine.grad is not None
            assert joined.grad is not None
            close(mine.grad, joined.grad[3 * rank : 3 * rank + 3], f"step {step}", 1e-9, 1e-9)
    hvd.join()
    ours, theirs = layers(hvd)
    compare_step(hvd, ours, theirs, [batch(r, 3) for r in range(size)], what="after all joined")
