"""Faults that users of such libraries reported in public: ``check_bNN`` is entry BNN of the list.

The list, with what else tests its entries, is in ``tests/test_reported_faults.py``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from checks.support import (
    close,
    connect,
    equal,
    expected,
    no_warnings,
    raises,
    same_on_all_ranks,
    values,
    world,
)
from checks.training import Net, batch, loss_of, same_weights, sgd


def _still_works(hvd: Any, what: str) -> None:
    """The ranks understand each other: nothing of what failed before is under way."""
    got = hvd.allreduce(values(hvd.rank(), 9, torch.float32), op=hvd.Sum)
    equal(got, expected("Sum", hvd.size(), 9, torch.float32), f"after {what}")


def _rows_of(rows: int, rank: int, size: int) -> slice:
    """The rows of a reducescatter that belong to a rank: the first ranks have one more."""
    counts = [rows // size + (one < rows % size) for one in range(size)]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def _matches_by_name() -> bool:
    """Whether the engine negotiates by itself, and has error messages of its own."""
    from unidist import basics

    return bool(basics.runtime().backend.matches_by_name)


_TALK = (
    "allreduce",
    "allgather",
    "allgather_rows",
    "alltoall",
    "alltoall_rows",
    "barrier",
    "broadcast",
    "exchange",
    "recv",
    "reduce_scatter",
    "send",
)


@contextlib.contextmanager
def _sent() -> Iterator[list[str]]:
    """What the block lets the backend do that needs peers: names of its methods."""
    from unidist import basics

    backend: Any = basics.runtime().backend
    called: list[str] = []

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called.append(name)
            return method(*arguments, **named)

        return call

    for name in _TALK:
        setattr(backend, name, recording(name, getattr(backend, name)))
    try:
        yield called
    finally:
        for name in _TALK:
            delattr(backend, name)


# -- dtypes and layouts ---------------------------------------------------------------------------


@world((2, 3))
def check_b01_bfloat16_everywhere(hvd: Any) -> None:
    """horovod#4047, pytorch#111131, #170073: bfloat16 was refused by gloo, by MPI, or by both.

    Every operation takes it, gives it back, and rounds once where it computes.
    """
    rank, size = hvd.rank(), hvd.size()
    half, shape = torch.bfloat16, (5, 3)
    given = values(rank, shape, half)
    for op in ("Sum", "Average", "Min", "Max", "Product"):
        want = expected(op, size, shape, half)
        equal(hvd.allreduce(given, op=getattr(hvd, op)), want, op)
        equal(hvd.grouped_allreduce([given, given], op=getattr(hvd, op))[1], want, f"grouped {op}")
        written = given.clone()
        hvd.synchronize(hvd.allreduce_async_(written, op=getattr(hvd, op)))
        equal(written, want, f"{op} in place")
    exact = hvd.allreduce(given.float(), op=hvd.Adasum)
    equal(hvd.allreduce(given, op=hvd.Adasum), exact.to(half), "Adasum")
    for op in ("Sum", "Average"):
        want = expected(op, size, shape, half)[_rows_of(5, rank, size)]
        equal(hvd.reducescatter(given, op=getattr(hvd, op)), want, f"reducescatter {op}")
        (got,) = hvd.grouped_reducescatter([given], op=getattr(hvd, op))
        equal(got, want, f"grouped reducescatter {op}")
    parts = [values(other, shape, half) for other in range(size)]
    equal(hvd.allgather(given), torch.cat(parts), "allgather")
    equal(hvd.grouped_allgather([given])[0], torch.cat(parts), "grouped allgather")
    equal(hvd.broadcast(given, size - 1), parts[-1], "broadcast")
    rows = values(rank, (size, 3), half)
    want = torch.stack([values(other, (size, 3), half)[rank] for other in range(size)])
    equal(hvd.alltoall(rows), want, "alltoall")
    sparse = hvd.sparse_allreduce_async(given.to_sparse(), "b01", hvd.Sum)()
    assert sparse.dtype == half
    equal(sparse.to_dense(), expected("Sum", size, shape, half), "sparse")
    equal(given, values(rank, shape, half), "input")


@world((2, 3))
def check_b03_average_of_integers(hvd: Any) -> None:
    """horovod#2054: truncated towards zero on every engine; others divided by numel, or gave 0.

    One rule for all forms of the operation, for negative numbers, and for narrow types whose sum
    does not fit.
    """
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        given = torch.tensor([3 + rank, -3 - rank, 100, -100, 1], dtype=dtype)
        mean = (3 * size + size * (size - 1) // 2) // size
        want = torch.tensor([mean, -mean, 100, -100, 1], dtype=dtype)
        equal(hvd.allreduce(given), want, f"{dtype}")
        equal(hvd.grouped_allreduce([given, given])[1], want, f"{dtype} in a group")
        equal(hvd.reducescatter(given), want[_rows_of(5, rank, size)], f"{dtype} scattered")
        written = given.clone()
        equal(hvd.allreduce_(written), want, f"{dtype} in place")
        if dtype == torch.int64:
            got = hvd.sparse_allreduce_async(given.to_sparse(), "b03", hvd.Average)()
            # Entries of one index are averaged one by one, and added when the tensor is coalesced.
            want = sum(
                torch.div(
                    torch.tensor([3 + one, -3 - one, 100, -100, 1]), size, rounding_mode="trunc"
                )
                for one in range(size)
            )
            equal(got.to_dense(), want, "sparse")


@world((2, 3))
def check_b05_channels_last_parameters(hvd: Any) -> None:
    """horovod#3491, #3622, pytorch#79043: broadcast_parameters wanted contiguous parameters."""
    size = hvd.size()

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 2)).double()
        return net.to(memory_format=torch.channels_last)

    def images(ranks: Any) -> torch.Tensor:
        parts = [
            torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(one)).double()
            for one in ranks
        ]
        return torch.cat(parts).to(memory_format=torch.channels_last)

    model, want = build(hvd.rank()).eval(), build(size - 1).eval()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    hvd.broadcast_parameters(model.parameters(), root_rank=size - 1)
    for got, other in zip(model.parameters(), want.parameters(), strict=True):
        equal(got.detach(), other.detach(), "broadcast")
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    plain = sgd(want)
    model(images([hvd.rank()])).square().mean().backward()
    want(images(range(size))).square().mean().backward()
    optimizer.step()
    plain.step()
    same_weights(model, want)
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()], "were moved"
    for name, parameter in model.named_parameters():
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last), name


@world((2, 3))
def check_b06_strided_tensors_in_every_operation(hvd: Any) -> None:
    """pytorch#192920, #24836, #159548: gloo walked the storage instead of the view's elements."""
    rank, size = hvd.rank(), hvd.size()
    takes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "column": lambda base: base[:, 1],
        "transposed": lambda base: base.t(),
        "every second": lambda base: base[::2],
        "expanded": lambda base: base[:, :1].expand(-1, 4),
    }
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "allreduce": lambda one: hvd.allreduce(one, op=hvd.Sum),
        "grouped_allreduce": lambda one: hvd.grouped_allreduce([one], op=hvd.Sum)[0],
        "Adasum": lambda one: hvd.allreduce(one, op=hvd.Adasum),
        "allgather": hvd.allgather,
        "broadcast": lambda one: hvd.broadcast(one, size - 1),
        "reducescatter": lambda one: hvd.reducescatter(one, op=hvd.Sum),
        "alltoall": lambda one: hvd.alltoall(one, [1] * size)[0],
    }
    in_place: dict[str, Callable[[torch.Tensor], Any]] = {
        "allreduce_": lambda one: hvd.allreduce_(one, op=hvd.Sum),
        "allreduce_async_": lambda one: hvd.synchronize(hvd.allreduce_async_(one, op=hvd.Sum)),
        "grouped_allreduce_": lambda one: hvd.grouped_allreduce_([one], op=hvd.Sum),
        "broadcast_": lambda one: hvd.broadcast_(one, size - 1),
        "broadcast_async_": lambda one: hvd.synchronize(hvd.broadcast_async_(one, size - 1)),
    }
    for layout, take in takes.items():
        for name, call in calls.items():
            base = values(rank, (6, 4), torch.float32)
            got = call(take(base))
            equal(got, call(take(base).contiguous()), f"{name} of {layout}")
            equal(base, values(rank, (6, 4), torch.float32), f"input of {name} of {layout}")
        for name, call in in_place.items():
            base, want = (values(rank, (6, 4), torch.float32) for _ in range(2))
            if layout == "expanded":
                with raises(ValueError, "share memory"):
                    call(take(base))
            else:
                parts = [take(values(r, (6, 4), torch.float32)) for r in range(size)]
                new = parts[-1] if name.startswith("broadcast") else torch.stack(parts).sum(0)
                take(want).copy_(new)
                call(take(base))
            equal(base, want, f"{name} of {layout}, with what is beside it")


@world((2, 3))
def check_b08_complex_tensors(hvd: Any) -> None:
    """pytorch#45760, #99518, #156632: no complex numbers on gloo, and no sense in their order."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.complex64, torch.complex128):
        for conjugated in (False, True):

            def of(one: int, dtype: torch.dtype = dtype, lazy: bool = conjugated) -> torch.Tensor:
                found = values(one, (4, 3), dtype)
                return found.conj() if lazy else found

            total = torch.stack([of(one).resolve_conj() for one in range(size)]).sum(0)
            what = f"{dtype}, conjugated: {conjugated}"
            equal(hvd.allreduce(of(rank), op=hvd.Sum), total, f"Sum {what}")
            close(hvd.allreduce(of(rank)), total / size, f"Average {what}")
            mine = _rows_of(4, rank, size)
            equal(hvd.reducescatter(of(rank), op=hvd.Sum), total[mine], f"reducescatter {what}")
            close(hvd.reducescatter(of(rank)), total[mine] / size, f"its Average {what}")
            gathered = torch.cat([of(one).resolve_conj() for one in range(size)])
            equal(hvd.allgather(of(rank)), gathered, f"allgather {what}")
            equal(hvd.broadcast(of(rank), 0), of(0).resolve_conj(), f"broadcast {what}")
            got, _ = hvd.alltoall(of(rank), [1] * size)
            want = torch.stack([of(one).resolve_conj()[rank] for one in range(size)])
            equal(got, want, f"alltoall {what}")
            for op in ("Min", "Max", "Product", "Adasum"):
                with raises(ValueError, "complex"):
                    hvd.allreduce(of(rank), op=getattr(hvd, op))
    _still_works(hvd, "what complex numbers cannot do")


@world((2, 3))
def check_b09_empty_tensors(hvd: Any) -> None:
    """pytorch#85234: gathering a tensor without elements killed the process (SIGFPE)."""
    size = hvd.size()
    for shape in ((0,), (0, 3), (3, 0)):
        rows, *rest = shape
        for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.complex64):
            empty = torch.empty(shape, dtype=dtype)
            what = f"{shape} {dtype}"
            equal(hvd.allreduce(empty, op=hvd.Sum), empty, f"allreduce {what}")
            equal(hvd.grouped_allreduce([empty, empty])[1], empty, f"grouped {what}")
            equal(hvd.broadcast(empty, size - 1), empty, f"broadcast {what}")
            want = torch.empty((rows * size, *rest), dtype=dtype)
            equal(hvd.allgather(empty), want, f"allgather {what}")
            got, counts = hvd.alltoall(empty, [rows] + [0] * (size - 1))
            mine = rows * size if hvd.rank() == 0 else 0
            equal(got, torch.empty((mine, *rest), dtype=dtype), f"alltoall {what}")
            assert sum(counts.tolist()) == mine
            mine = len(range(rows)[_rows_of(rows, hvd.rank(), size)])
            want = torch.empty((mine, *rest), dtype=dtype)
            equal(hvd.reducescatter(empty, op=hvd.Sum), want, f"reducescatter {what}")


@world((1, 2))
def check_b11_zero_dimensions(hvd: Any) -> None:
    """grace#2, horovod#3698: an error only at synchronize(), or the end of the process."""
    size = hvd.size()
    scalar = torch.tensor(hvd.rank() + 1.0)
    for call in (
        hvd.allgather,
        hvd.allgather_async,
        hvd.alltoall,
        hvd.alltoall_async,
        hvd.reducescatter,
        hvd.reducescatter_async,
        lambda one: hvd.grouped_allgather([torch.ones(1), one]),
        lambda one: hvd.grouped_reducescatter([torch.ones(size), one]),
    ):
        with raises(ValueError, "dimension"):
            call(scalar)
    equal(hvd.allreduce(scalar, op=hvd.Sum), torch.tensor(size * (size + 1) / 2), "allreduce")
    equal(hvd.broadcast(scalar, size - 1), torch.tensor(float(size)), "broadcast")
    _still_works(hvd, "the errors")


@world((2, 3))
def check_b12_first_dimensions_differ(hvd: Any) -> None:
    """pytorch#156627, ignite#1569, horovod#941: gloo hung, or wrote beyond its buffers."""
    rank, size = hvd.rank(), hvd.size()
    got = hvd.allgather(values(rank, (rank, 2), torch.float32))
    want = torch.cat([values(other, (other, 2), torch.float32) for other in range(size)])
    equal(got, want, "rank r has r rows")
    odd = rank == size - 1
    for what, mine, theirs in (
        ("another length", torch.ones(2, 3), torch.ones(2, 4)),
        ("another number of dimensions", torch.ones(2, 3), torch.ones(2, 3, 1)),
        ("another dtype", torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64)),
        ("another length, and no rows here", torch.ones(0, 3), torch.ones(2, 4)),
    ):
        with raises(hvd.HorovodInternalError):
            hvd.allgather(theirs if odd else mine)
        with raises(hvd.HorovodInternalError):
            hvd.synchronize(hvd.allgather_async(theirs if odd else mine))
        _still_works(hvd, what)


# -- DistributedOptimizer -------------------------------------------------------------------------


def _nets() -> tuple[nn.Module, nn.Module]:
    """Generator and discriminator: two nets of one class, so their parameters' names are equal."""
    torch.manual_seed(5)
    return nn.Linear(4, 4).double(), nn.Linear(4, 4).double()


def _play(pair: Any, optimizers: Any, ranks: Any, way: str) -> list[torch.Tensor]:
    """Three steps of the loop in horovod#796; the losses of both nets."""
    generator, judge = pair
    generator_optimizer, judge_optimizer = optimizers
    losses = []
    for step in range(3):
        seeds = [100 * step + rank for rank in ranks]
        parts = [torch.randn(2, 4, generator=torch.Generator().manual_seed(s)) for s in seeds]
        noise = torch.cat(parts).double()
        generator_optimizer.zero_grad()
        fake = torch.tanh(generator(noise))
        loss = judge(fake).square().mean()  # its gradient reaches the judge, too
        loss.backward()
        generator_optimizer.step()
        losses.append(loss.detach())
        if way != "zero_grad" and hasattr(judge_optimizer, "synchronize"):
            judge_optimizer.synchronize()
        if way != "synchronize alone":
            judge_optimizer.zero_grad()
        loss = (judge(fake.detach()) - 1).square().mean()
        loss.backward()
        judge_optimizer.step()
        losses.append(loss.detach())
    return losses


@world((2, 3))
def check_b16_gradients_of_the_other_optimizer(hvd: Any) -> None:
    """horovod#796, #1417, #2716, #2154: the generator's backward had fired the judge's hooks.

    The judge's next backward was "more than backward_passes_per_step". Legal are: zero_grad(), the
    maintainers' workaround (synchronize() and zero_grad()), and synchronize() alone, after which
    gradients add up as in one process.
    """
    size = hvd.size()
    for way in ("zero_grad", "synchronize and zero_grad", "synchronize alone"):
        pair, want = _nets(), _nets()
        wanted = _play(want, [sgd(net) for net in want], range(size), way)
        wrapped = [
            hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters())
            for net in pair
        ]
        with no_warnings():
            got = _play(pair, wrapped, [hvd.rank()], way)
        for net, other in zip(pair, want, strict=True):
            same_weights(net, other)
        mean = hvd.allreduce(torch.stack(got))
        close(mean, torch.stack(wanted), f"losses with {way}", rtol=1e-10)


@world((2, 3))
def check_b19_one_communication_for_a_window(hvd: Any) -> None:
    """horovod#1535, #2298, #1089: accumulated gradients are summed, and reduced once a window."""
    rank, size = hvd.rank(), hvd.size()
    sent_by_passes = []
    for passes in (1, 2):
        model = Net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=passes,
        )
        for step in range(3):
            optimizer.zero_grad()
            with _sent() as sent:
                for one in range(passes):
                    loss_of(model, one, [rank]).backward()
                optimizer.step()
            want = Net()
            want.load_state_dict(model.state_dict())
            if step == 2:
                sent_by_passes.append(sent)
    assert sent_by_passes[0] == sent_by_passes[1], sent_by_passes
    assert set(sent_by_passes[0]) == {"allreduce"}, sent_by_passes
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), backward_passes_per_step=2
    )
    for weight in (1.0, 10.0):
        (parameter * weight * (rank + 1)).sum().backward()
    optimizer.step()
    equal(parameter.grad, torch.full((3,), 11.0 * (size + 1) / 2), "the sum of both, averaged")


@world((2, 3))
def check_b20_clipped_gradients_are_not_reduced_again(hvd: Any) -> None:
    """horovod#1099: the recipe for clipping reduced twice; the second one undid the clipping."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
    )
    reduced = []
    for step in range(3):
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with _sent() as sent:
            (1000 * loss_of(model, step, [hvd.rank()])).backward()
            optimizer.synchronize()
        reduced.append(len(sent))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with _sent() as sent, optimizer.skip_synchronize():
            optimizer.step()
        assert not sent, f"step {step} inside skip_synchronize() sent {sent}"
        moved = torch.cat(
            [
                (parameter.detach() - old).reshape(-1)
                for parameter, old in zip(model.parameters(), before, strict=True)
            ]
        )
        close(moved.norm(), torch.tensor(0.5 * 0.1, dtype=torch.float64), "update", rtol=1e-4)
    assert reduced[2] == reduced[1] > 0, f"operations in each step: {reduced}"


@world((2, 3))
def check_b21_grad_scaler_without_a_recipe(hvd: Any) -> None:
    """horovod#3160, #1089, Lightning#2730: scaler.step() alone, as without a distributed optimizer.

    It divided and tested the gradients of each rank before they were reduced, so that ranks did not
    agree about skipping a step. An infinity of one rank has to reach all.
    """
    rank, size = hvd.rank(), hvd.size()
    model, want = Net().float(), Net().float()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    plain = torch.optim.SGD(want.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    with no_warnings():
        for step in range(5):
            optimizer.zero_grad()
            inputs, targets = batch(step, [rank])
            loss = (model(inputs.float()) - targets.float()).square().mean()
            if step in (0, 2) and rank == size - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scale = 32.0 if step < 2 else 16.0
            assert scaler.get_scale() == scale, f"{scaler.get_scale()} in step {step}"
            same_on_all_ranks(*model.parameters(), what=f"weights after step {step}")
            if step in (0, 2):
                continue
            plain.zero_grad()
            inputs, targets = batch(step, range(size))
            (want(inputs.float()) - targets.float()).square().mean().backward()
            plain.step()
    same_weights(model, want, rtol=1e-4)


@world((2, 3))
def check_b25_sparse_gradients_stay_sparse(hvd: Any) -> None:
    """horovod#1230, #3529, pytorch#22400: dense after the reduction; Adasum did not know them.

    The last rank touches no row.
    """
    rank, size = hvd.rank(), hvd.size()
    rows = torch.tensor([] if rank == size - 1 else [1, 1, 3], dtype=torch.int64)
    for as_dense in (False, True):
        table = nn.Embedding(5, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0),
            named_parameters=table.named_parameters(),
            sparse_as_dense=as_dense,
        )
        for _ in range(2):
            optimizer.zero_grad()
            table(rows).sum().backward()
            optimizer.synchronize()
            gradient = table.weight.grad
            assert gradient.is_sparse, f"sparse_as_dense={as_dense} left a dense gradient"
            assert gradient.is_coalesced(), f"sparse_as_dense={as_dense} left duplicates"
            share = (size - 1) / size
            want = torch.zeros(5, 2)
            want[1], want[3] = 2 * share, share
            close(gradient.to_dense(), want, f"sparse_as_dense={as_dense}")
            with optimizer.skip_synchronize():
                optimizer.step()
    table = nn.Embedding(5, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Adasum)
    table(torch.tensor([rank])).sum().backward()
    optimizer.step()
    want = torch.zeros(5, 2)
    want[:size] = -1.0
    close(table.weight.detach(), want, "Adasum of orthogonal changes", rtol=1e-6)


@world((2, 3))
def check_b32_groups_with_a_missing_gradient(hvd: Any) -> None:
    """horovod PR #2850: a group's counter was left over; grouping ignored the predivide factor."""
    rank, size = hvd.rank(), hvd.size()
    for groups in (2, "lists"):
        for factor in (1.0, 2.0):
            first, rare, other = (nn.Parameter(torch.zeros(3 + i)) for i in range(3))
            named = [("first", first), ("rare", rare), ("other", other)]
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([first, rare, other], lr=1.0),
                named_parameters=named,
                groups=[[first, rare], [other]] if groups == "lists" else groups,
                gradient_predivide_factor=factor,
            )
            for step in range(4):
                optimizer.zero_grad()
                loss = (first * (rank + 1)).sum() + (other * 3).sum()
                if step % 2 == 0 or rank == 0:
                    loss = loss + (rare * 6).sum()
                loss.backward()
                optimizer.step()
                what = f"groups {groups}, predivide {factor}, step {step}"
                close(first.grad, torch.full((3,), (size + 1) / 2), f"first, {what}")
                close(other.grad, torch.full((5,), 3.0), f"other, {what}")
                share = 6.0 if step % 2 == 0 else 6.0 / size
                close(rare.grad, torch.full((4,), share), f"rare, {what}")


@world((2, 3))
def check_b33_averages_in_half_precision(hvd: Any) -> None:
    """horovod#1699, #278: the sum of the ranks overflowed float16 where their average does not.

    In every operation that averages and compresses; small values are not much worse than float16.
    """
    rank, size = hvd.rank(), hvd.size()
    fp16 = hvd.Compression.fp16
    large, small = torch.full((7,), 60000.0), torch.full((7,), 1e-6)
    want = large.half().float()
    mine = _rows_of(7, rank, size)
    equal(hvd.allreduce(large, compression=fp16), want, "allreduce")
    equal(hvd.grouped_allreduce([large], compression=fp16)[0], want, "grouped_allreduce")
    equal(hvd.reducescatter(large, compression=fp16), want[mine], "reducescatter")
    (got,) = hvd.grouped_reducescatter([large], compression=fp16)
    equal(got, want[mine], "grouped_reducescatter")
    step = 2.0**-24  # of float16 near zero
    for got in (hvd.allreduce(small, compression=fp16), hvd.reducescatter(small, compression=fp16)):
        close(got, small[: len(got)], "small values", atol=size * step)
    for factor in (1.0, float(size)):
        parameter = nn.Parameter(torch.zeros(7))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            compression=fp16,
            gradient_predivide_factor=factor,
        )
        (parameter * large).sum().backward()
        optimizer.step()
        close(parameter.grad, want, f"predivide {factor}", rtol=1e-3)
    # Without compression, a float16 parameter needs the factor, which has to be honoured.
    half = nn.Parameter(torch.zeros(7, dtype=torch.float16))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([half], lr=1.0), gradient_predivide_factor=float(size)
    )
    (half * large.half()).sum().backward()
    optimizer.step()
    close(half.grad, large.half(), "a float16 parameter", rtol=2e-3)


@world((3,))
def check_b36_adasum_of_a_process_set(hvd: Any) -> None:
    """horovod#2244 and source: Adasum knew neither process sets nor three ranks."""
    rank, ranks = hvd.rank(), [0, 2]
    process_set = hvd.add_process_set(ranks)
    if rank in ranks:
        for dtype in (torch.float16, torch.float32):
            same = torch.tensor([1.0, -2.0, 4.0], dtype=dtype)
            got = hvd.allreduce(same, op=hvd.Adasum, process_set=process_set)
            close(got, same, "equal gradients", rtol=1e-3)
            apart = torch.zeros(4, dtype=dtype)
            apart[rank] = rank + 1.0
            got = hvd.allreduce(apart, op=hvd.Adasum, process_set=process_set)
            equal(got, torch.tensor([1.0, 0.0, 3.0, 0.0], dtype=dtype), "orthogonal ones")
            nothing = torch.zeros(3, dtype=dtype)
            got = hvd.allreduce(nothing, op=hvd.Adasum, process_set=process_set)
            equal(got, nothing, "zeros")
    hvd.barrier()
    assert hvd.remove_process_set(process_set)


@world((2,))
def check_b38_passes_are_accumulated_without_communication(hvd: Any) -> None:
    """pytorch#21736, accelerate#1726: what no_sync is for, by set_backward_passes_per_step.

    Backward passes of a longer window send nothing, and the window's last one includes them.
    """
    rank, size = hvd.rank(), hvd.size()
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    for passes in (1, 3, 1, 2):
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(passes)
        with _sent() as sent:
            for _ in range(passes - 1):
                (parameter * (rank + 1)).sum().backward()
        assert not sent, f"a window of {passes} passes sent {sent} before its last"
        (parameter * (rank + 1)).sum().backward()
        optimizer.step()
        equal(parameter.grad, torch.full((3,), passes * (size + 1) / 2), f"{passes} passes")


# -- large things ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _small_messages(hvd: Any, limit: int) -> Iterator[None]:
    """Cut messages after a thousand bytes instead of a thousand million."""
    import unidist.functions

    changes: list[tuple[Any, str]] = [
        (unidist.functions, "PACK_BYTES"),
        (unidist.functions, "OBJECT_BYTES"),
    ]
    mpi = sys.modules.get("unidist.backends.mpi_backend")
    if mpi is not None:
        changes.append((mpi, "MESSAGE_BYTES"))
    before = [getattr(module, name) for module, name in changes]
    # The ranks have to cut alike, so nothing may be under way when one of them changes.
    hvd.barrier()
    for module, name in changes:
        setattr(module, name, limit)
    try:
        yield
        hvd.barrier()
    finally:
        for (module, name), value in zip(changes, before, strict=True):
            setattr(module, name, value)


@world((2, 3))
def check_b43_longer_than_one_message(hvd: Any) -> None:
    """mpi4py#119, #23, pytorch PR #70605: counts of 32 bits; objects end at 2 GB in Horovod."""
    rank, size = hvd.rank(), hvd.size()
    with _small_messages(hvd, 1000):
        thing = {"rank": rank, "bytes": bytes([rank + 1]) * 10_000}
        got = hvd.broadcast_object(thing, size - 1)
        equal(got, {"rank": size - 1, "bytes": bytes([size]) * 10_000}, "broadcast_object")
        got = hvd.allgather_object(bytes([rank + 1]) * 10_000)
        equal(got, [bytes([other + 1]) * 10_000 for other in range(size)], "allgather_object")
        for dtype in (torch.uint8, torch.float32, torch.float64):
            count = 10_001 // dtype.itemsize
            given = values(rank, count, dtype)
            parts = [values(other, count, dtype) for other in range(size)]
            total = expected("Sum", size, count, dtype)
            equal(hvd.allreduce(given, op=hvd.Sum), total, "allreduce")
            equal(hvd.grouped_allreduce([given, given], op=hvd.Sum)[1], total, "grouped")
            equal(hvd.broadcast(given, size - 1), parts[-1], "broadcast")
            equal(hvd.allgather(given), torch.cat(parts), "allgather")
            uneven = [part[: count - other * 7] for other, part in enumerate(parts)]
            equal(hvd.allgather(uneven[rank]), torch.cat(uneven), "uneven allgather")
            mine = total[_rows_of(count, rank, size)]
            equal(hvd.reducescatter(given, op=hvd.Sum), mine, "reducescatter")
            share = count // size
            got, _ = hvd.alltoall(given, [share] * size)
            want = torch.cat([part[rank * share : (rank + 1) * share] for part in parts])
            equal(got, want, "alltoall")
        close(
            hvd.allreduce(values(0, 10_000, torch.float32), op=hvd.Adasum),
            values(0, 10_000, torch.float32),
            "Adasum of equal ones",
            rtol=1e-6,
        )
        model, want = Net(hvd.rank()), Net(0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for one, other in zip(model.parameters(), want.parameters(), strict=True):
            equal(one.detach(), other.detach(), "broadcast_parameters")
        model = nn.Linear(600, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + rank)
        if rank == 0:
            model(torch.ones(1, 600)).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        state = optimizer.state_dict()["state"]
        assert len(state) == 2
        same_on_all_ranks(*(one["exp_avg"] for one in state.values()), what="state")


@world((2,))
def check_b65_objects_from_several_threads(hvd: Any) -> None:
    """mpi4py#784, #468: pickled messages of one thread were taken for those of another."""
    rank, size = hvd.rank(), hvd.size()
    failures: list[BaseException] = []

    def talk(who: int) -> None:
        try:
            for turn in range(10):
                name = f"b65.{who}.{turn}"
                thing = {"who": who, "turn": turn, "text": "x" * (100 * who * turn)}
                equal(hvd.broadcast_object(thing if rank == 0 else None, 0, name), thing, name)
                got = hvd.allgather_object((who, turn, rank), name)
                equal(got, [(who, turn, other) for other in range(size)], name)
                got = hvd.allreduce(torch.full((500,), who + 1.0), op=hvd.Sum, name=name)
                equal(got, torch.full((500,), size * (who + 1.0)), name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# -- ranks that disagree --------------------------------------------------------------------------


@world((2, 3))
def check_b48_ranks_that_call_different_things(hvd: Any) -> None:
    """horovod#159, #600, #403, #3950: a warning after 60 s, and no end.

    An error on every rank that names what differs and where; the next operation works.
    """
    size = hvd.size()
    odd = hvd.rank() == size - 1
    double = torch.float64 if odd else torch.float32
    longer = 5 if odd else 4
    calls: dict[str, Callable[[], Any]] = {
        "dtype": lambda: hvd.allreduce(torch.ones(4, dtype=double), op=hvd.Sum),
        "shape": lambda: hvd.allreduce(torch.ones(longer), op=hvd.Sum),
        "op": lambda: hvd.allreduce(torch.ones(4), op=hvd.Min if odd else hvd.Sum),
        "shapes": lambda: hvd.grouped_allreduce([torch.ones(3), torch.ones(longer)], op=hvd.Sum),
        "root_rank": lambda: hvd.broadcast(torch.ones(4), size - 1 if odd else 0),
        "shape ": lambda: hvd.broadcast(torch.ones(longer), 0),
        "shape after": lambda: hvd.allgather(torch.ones(2, longer)),
        "shape after ": lambda: hvd.alltoall(torch.ones(size, longer)),
        "shape  ": lambda: hvd.reducescatter(torch.ones(longer), op=hvd.Sum),
    }
    if not _matches_by_name():  # Horovod sees flat tensors of unscaled sums, and names kinds
        calls["prescale_factor"] = lambda: hvd.allreduce(
            torch.ones(4), op=hvd.Sum, prescale_factor=2.0 if odd else 1.0
        )
        calls["op "] = lambda: hvd.allreduce(torch.ones(4), op=hvd.Average if odd else hvd.Sum)
        calls["shape   "] = lambda: hvd.allreduce(torch.ones(2, 3) if odd else torch.ones(3, 2))
        calls["not the same operation"] = lambda: (
            hvd.broadcast(torch.ones(4), 0, name="b48")
            if odd
            else hvd.allreduce(torch.ones(4), name="b48")
        )
    for what, call in calls.items():
        words = () if _matches_by_name() else (what.strip(), f"rank {size - 1}")
        with raises(hvd.HorovodInternalError, *words):
            call()
        _still_works(hvd, what)


# -- a world of one, copies, gradients ------------------------------------------------------------


@world((1,))
def check_b51_all_operations_in_a_world_of_one(hvd: Any) -> None:
    """pytorch/gloo#209: collectives of one rank crashed, or gave back their input itself."""
    given = torch.arange(6.0).reshape(3, 2)
    new: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "allreduce": hvd.allreduce,
        "allreduce_async": lambda one: hvd.synchronize(hvd.allreduce_async(one)),
        "grouped_allreduce": lambda one: hvd.grouped_allreduce([one])[0],
        "grouped_allreduce_async": lambda one: hvd.synchronize(hvd.grouped_allreduce_async([one]))[
            0
        ],
        "allgather": hvd.allgather,
        "allgather_async": lambda one: hvd.synchronize(hvd.allgather_async(one)),
        "grouped_allgather": lambda one: hvd.grouped_allgather([one])[0],
        "grouped_allgather_async": lambda one: hvd.synchronize(hvd.grouped_allgather_async([one]))[
            0
        ],
        "broadcast": lambda one: hvd.broadcast(one, 0),
        "broadcast_async": lambda one: hvd.synchronize(hvd.broadcast_async(one, 0)),
        "alltoall": hvd.alltoall,
        "alltoall_async": lambda one: hvd.synchronize(hvd.alltoall_async(one))[0],
        "reducescatter": hvd.reducescatter,
        "reducescatter_async": lambda one: hvd.synchronize(hvd.reducescatter_async(one)),
        "grouped_reducescatter": lambda one: hvd.grouped_reducescatter([one])[0],
        "grouped_reducescatter_async": lambda one: hvd.synchronize(
            hvd.grouped_reducescatter_async([one])
        )[0],
        "sparse_allreduce_async": lambda one: hvd.sparse_allreduce_async(
            one.to_sparse(), "b51", hvd.Sum
        )().to_dense(),
    }
    for name, call in new.items():
        got = call(given)
        equal(got, given, name)
        assert got is not given, f"{name} gives back its input"
        assert got.untyped_storage().data_ptr() != given.untyped_storage().data_ptr(), name
        got.fill_(7)
        equal(given, torch.arange(6.0).reshape(3, 2), f"the input of {name}")
    in_place: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "allreduce_": hvd.allreduce_,
        "allreduce_async_": lambda one: hvd.synchronize(hvd.allreduce_async_(one)),
        "grouped_allreduce_": lambda one: hvd.grouped_allreduce_([one])[0],
        "grouped_allreduce_async_": lambda one: hvd.synchronize(
            hvd.grouped_allreduce_async_([one])
        )[0],
        "broadcast_": lambda one: hvd.broadcast_(one, 0),
        "broadcast_async_": lambda one: hvd.synchronize(hvd.broadcast_async_(one, 0)),
    }
    for name, call in in_place.items():
        assert call(given) is given, name
        equal(given, torch.arange(6.0).reshape(3, 2), name)
    for op in ("Sum", "Average", "Min", "Max", "Product", "Adasum"):
        equal(hvd.allreduce(given, op=getattr(hvd, op)), given, op)
    got, counts = hvd.alltoall(given, [2])
    equal(got, given[:2], "alltoall with splits")
    equal(counts.tolist(), [2], "received splits")
    assert hvd.barrier() is None
    equal(hvd.join(), 0, "join")
    equal(hvd.broadcast_object([1], 0), [1], "broadcast_object")
    equal(hvd.allgather_object((1,)), [(1,)], "allgather_object")
    hvd.broadcast_parameters({"a": given}, 0)
    offered = {
        name
        for name in hvd.__all__
        if name.removeprefix("grouped_").removesuffix("_").removesuffix("_async")
        in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "sparse_allreduce")
    }
    assert offered == set(new) | set(in_place), offered ^ (set(new) | set(in_place))


@world((2, 3))
def check_b53_gradients_of_moved_tensors(hvd: Any) -> None:
    """horovod#2654: wrong factors; and reducescatter multiplied the caller's gradient in place.

    Those of allreduce, allgather and broadcast stand in the checks of these.
    """
    rank, size = hvd.rank(), hvd.size()
    double = torch.float64

    def back(output: torch.Tensor, upstream: torch.Tensor, what: str) -> None:
        kept = upstream.clone()
        output.backward(upstream)
        equal(upstream, kept, f"the gradient that {what} was given")

    for op in ("Sum", "Average"):
        for factors in ({}, {"prescale_factor": 0.5, "postscale_factor": 8.0}):
            scale = (size if op == "Sum" else 1) * (4.0 if factors else 1.0)
            for grouped in (False, True):
                leaf = values(rank, (5, 2), double).requires_grad_()
                if grouped:
                    (out,) = hvd.grouped_reducescatter([leaf], op=getattr(hvd, op), **factors)
                else:
                    out = hvd.reducescatter(leaf, op=getattr(hvd, op), **factors)
                what = f"reducescatter {op} {factors}, grouped: {grouped}"
                back(out, values(rank, tuple(out.shape), double), what)
                upstreams = [
                    values(other, (len(range(5)[_rows_of(5, other, size)]), 2), double)
                    for other in range(size)
                ]
                close(leaf.grad, torch.cat(upstreams) * scale, what)

    # Rank r sends r + 1 rows to each rank, and keeps one row.
    leaf = values(rank, ((rank + 1) * size + 1, 2), double).requires_grad_()
    out, received = hvd.alltoall(leaf, [rank + 1] * size)
    equal(received.tolist(), [other + 1 for other in range(size)], "received splits")
    back(out, torch.full_like(out, 10.0 + rank), "alltoall")
    want = torch.zeros_like(leaf)
    for other in range(size):
        want[other * (rank + 1) : (other + 1) * (rank + 1)] = 10.0 + other
    equal(leaf.grad, want, "alltoall")
    leaf = values(rank, (2 * size, 2), double).requires_grad_()
    out = hvd.alltoall(leaf)
    back(out, torch.full_like(out, 10.0 + rank), "alltoall without splits")
    want = torch.arange(10.0, 10.0 + size, dtype=double).repeat_interleave(2)
    equal(leaf.grad, want[:, None].expand(-1, 2).contiguous(), "alltoall without splits")

    rows = [other + 1 for other in range(size)]
    leaves = [values(rank, (rows[rank], 2), double).requires_grad_() for _ in range(2)]
    outs = hvd.grouped_allgather(leaves)
    upstream = values(rank, (sum(rows), 2), double)
    kept = upstream.clone()
    torch.autograd.backward(outs, [upstream, upstream])
    equal(upstream, kept, "the gradient that grouped_allgather was given")
    mean = sum(values(other, (sum(rows), 2), double) for other in range(size)) / size
    start = sum(rows[:rank])
    for leaf in leaves:
        close(leaf.grad, mean[start : start + rows[rank]], "grouped_allgather")


# -- connecting again: last, since the engines start and stop for it ------------------------------


@world((2,))
def check_b73_process_sets_of_an_earlier_world(hvd: Any) -> None:
    """horovod#4021: process sets named the ranks of a world that had been formed anew since.

    They are refused with the remedy, also by an optimizer, and work once they are added again.
    """
    rank, size = hvd.rank(), hvd.size()
    process_set = hvd.add_process_set([0])
    parameter = nn.Parameter(torch.zeros(3))
    whole = hvd.ProcessSet(list(range(size)))
    hvd.shutdown()
    for one in (process_set, whole):
        assert one.rank() is None
        assert one.process_set_id is None
    connect(hvd)
    with raises(ValueError, "not active", "add_process_set"):
        hvd.allreduce(torch.ones(2), process_set=process_set)
    with raises(ValueError, "not active", "add_process_set"):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=process_set)
    assert hvd.remove_process_set(process_set) is False
    with raises(ValueError, str(size)):  # a rank that the new world lacks
        hvd.add_process_set([0, size])
    assert hvd.add_process_set(process_set) is process_set
    assert process_set.included() is (rank == 0)
    if rank == 0:
        got = hvd.allreduce(torch.full((2,), 3.0), op=hvd.Sum, process_set=process_set)
        equal(got, torch.full((2,), 3.0), "in the set that was added again")
    hvd.barrier()
    assert hvd.remove_process_set(process_set)
    _still_works(hvd, "init again")
