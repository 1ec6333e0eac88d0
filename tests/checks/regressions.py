"""What was wrong once: each check tells the symptom that users saw, and why it came about."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from checks.support import (
    TIMEOUT,
    close,
    equal,
    expected,
    no_warnings,
    raises,
    same_on_all_ranks,
    several,
    values,
)
from checks.training import Net, loss_of, same_weights, sgd


def _still_works(hvd: Any, what: str) -> None:
    """The ranks understand each other: nothing of what failed before is under way."""
    got = hvd.allreduce(values(hvd.rank(), 9, torch.float32), op=hvd.Sum)
    equal(got, expected("Sum", hvd.size(), 9, torch.float32), f"after {what}")


def _parameters(count: int = 1, length: int = 4) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(length)) for _ in range(count)]


def _wrap(hvd: Any, *parameters: nn.Parameter, **arguments: Any) -> Any:
    """SGD with a learning rate of 1 that sums gradients unless told otherwise."""
    arguments.setdefault("op", hvd.Sum)
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **arguments)


def _ranks_total(size: int) -> float:
    """1 + 2 + ... + size: the sum of what ranks give when each gives rank + 1."""
    return size * (size + 1) / 2


# -- a rank without a gradient ------------------------------------------------------------------


@several
def check_two_optimizers_and_a_missing_gradient(hvd: Any) -> None:
    """The gradients of two optimizers were mixed up.

    A bucket was launched in backward where its gradients came and in step() where one was missing,
    so the order of the two optimizers' buckets differed between ranks.
    """
    rank, size = hvd.rank(), hvd.size()
    a, b = _parameters(2)
    one = _wrap(hvd, a, named_parameters=[("a", a)])
    other = _wrap(hvd, b, named_parameters=[("b", b)])
    for step in range(4):
        one.zero_grad()
        other.zero_grad()
        loss = (b * 10 * (rank + 1)).sum()
        if step == 0 or rank == size - 1:
            loss = loss + a.sum()
        loss.backward()
        one.step()
        other.step()
        equal(a.grad, torch.full((4,), float(size if step == 0 else 1)), f"a in step {step}")
        equal(b.grad, torch.full((4,), 10 * _ranks_total(size)), f"b in step {step}")


@several
def check_operation_between_backward_and_step(hvd: Any) -> None:
    """A metric reduced there was mixed up with a bucket that only some ranks had launched."""
    rank, size = hvd.rank(), hvd.size()
    a, b = _parameters(2)
    optimizer = _wrap(hvd, a, b)
    for step in range(4):
        optimizer.zero_grad()
        loss = (b * 10 * (rank + 1)).sum()
        if step == 0 or rank == size - 1:
            loss = loss + a.sum()
        loss.backward()
        # As long as the bucket: two parameters of 4 elements, and a flag for each.
        metric = hvd.allreduce(torch.full((10,), 1000.0), op=hvd.Sum)
        optimizer.step()
        equal(metric, torch.full((10,), 1000.0 * size), f"the metric in step {step}")
        equal(a.grad, torch.full((4,), float(size if step == 0 else 1)), f"a in step {step}")
        equal(b.grad, torch.full((4,), 10 * _ranks_total(size)), f"b in step {step}")


def check_sparse_parameter_that_nobody_used(hvd: Any) -> None:
    """It got an empty gradient where one process leaves None."""
    size = hvd.size()
    table = nn.Embedding(5, 2, sparse=True)
    (dense,) = _parameters()
    optimizer = _wrap(hvd, table.weight, dense)
    for used in (True, False, True, False):
        optimizer.zero_grad()
        loss = dense.sum()
        if used:
            loss = loss + table(torch.tensor([1, 1, 3])).sum()
        loss.backward()
        optimizer.step()
        equal(dense.grad, torch.full((4,), float(size)), "the dense gradient")
        if used:
            want = torch.zeros(5, 2)
            want[1], want[3] = 2.0 * size, 1.0 * size
            equal(table.weight.grad.to_dense(), want, "the sparse gradient")
        else:
            assert table.weight.grad is None, f"a gradient nobody computed: {table.weight.grad}"


def check_gradients_taken_away_without_a_step(hvd: Any) -> None:
    """model.zero_grad() and another backward are legal: only what came last is stepped on."""
    rank = hvd.rank()
    model, want = Net(), Net()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), groups=2
    )
    plain = sgd(want)
    for step in range(3):
        for skipped in range(2):
            loss_of(model, 70 + skipped, [rank]).backward()
            model.zero_grad(set_to_none=True)
        loss_of(model, step, [rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(want, step, range(hvd.size())).backward()
        plain.step()
    same_weights(model, want)


# -- closures and what may come between backward and step -----------------------------------------


def check_closure_that_only_returns_the_loss(hvd: Any) -> None:
    """Gradients were computed before step(), whose closure computes none: reduced once, all same.

    The reduction in backward and the closure's were two, so the sum was multiplied.
    """
    rank, size = hvd.rank(), hvd.size()
    (parameter,) = _parameters()
    optimizer = _wrap(hvd, parameter)
    for step in range(3):
        optimizer.zero_grad()
        loss = (parameter * (rank + 1)).sum()
        loss.backward()
        returned = optimizer.step(lambda loss=loss: loss)
        assert returned is loss, "step() returns what the closure returned"
        equal(parameter.grad, torch.full((4,), _ranks_total(size)), f"step {step}")


def check_closure_that_computes_gradients(hvd: Any) -> None:
    """torch's usual closure, alone and after gradients that it throws away."""
    rank, size = hvd.rank(), hvd.size()
    (parameter,) = _parameters()
    optimizer = _wrap(hvd, parameter)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter * (rank + 1)).sum()
        loss.backward()
        return loss

    for step in range(4):
        if step % 2:
            (parameter * 1000.0).sum().backward()
        optimizer.step(closure)
        equal(parameter.grad, torch.full((4,), _ranks_total(size)), f"step {step}")
    equal(parameter.detach(), torch.full((4,), -4 * _ranks_total(size)), "after 4 steps")


def check_optimizer_state_is_sent_between_backward_and_step(hvd: Any) -> None:
    """broadcast_optimizer_state loaded the state on all ranks but the root.

    Loading finished the reduction there, and the root was left in it alone.
    """
    rank, size = hvd.rank(), hvd.size()
    (parameter,) = _parameters()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.5, momentum=0.5), op=hvd.Sum
    )
    with no_warnings():
        for step in range(4):
            optimizer.zero_grad()
            (parameter * (rank + 1)).sum().backward()
            if step % 2:
                hvd.broadcast_optimizer_state(optimizer, root_rank=size - 1)
            optimizer.step()
            equal(parameter.grad, torch.full((4,), _ranks_total(size)), f"step {step}")
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    equal(momenta[0], torch.full((4,), 1.875 * _ranks_total(size)), "momentum")
    same_on_all_ranks(parameter, *momenta)


@several
def check_passes_are_not_changed_within_a_step(hvd: Any) -> None:
    """The buckets' counts no longer matched what was still to come."""
    rank, size = hvd.rank(), hvd.size()
    (parameter,) = _parameters()
    optimizer = _wrap(hvd, parameter)
    for _ in range(2):  # before the buckets exist, and with them
        (parameter * (rank + 1)).sum().backward()
        with raises(ValueError, "backward_passes_per_step"):
            optimizer.set_backward_passes_per_step(2)
        optimizer.step()
        equal(parameter.grad, torch.full((4,), _ranks_total(size)), "one pass")
        optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        (parameter * (rank + 1)).sum().backward()
    optimizer.step()
    equal(parameter.grad, torch.full((4,), 2 * _ranks_total(size)), "two passes")


@several
def check_one_backward_too_many_with_create_graph(hvd: Any) -> None:
    """With create_graph autograd replaces the gradient, so a second backward went unseen."""
    rank, size = hvd.rank(), hvd.size()
    for steps_before in (0, 2):
        parameter = nn.Parameter(torch.ones(4))
        optimizer = _wrap(hvd, parameter)
        for _ in range(steps_before):
            (parameter * 0.0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*create_graph.*")
            (parameter**2 * (rank + 1)).sum().backward(create_graph=True)
            with raises(AssertionError, "backward_passes_per_step"):
                (parameter**2 * (rank + 1)).sum().backward(create_graph=True)
        optimizer.zero_grad()
        (parameter**2 * (rank + 1)).sum().backward()
        optimizer.step()
        equal(parameter.grad, torch.full((4,), 2 * _ranks_total(size)), "the next step")


# -- what the ranks were told ---------------------------------------------------------------------


@several
def check_parameter_unfrozen_after_wrapping(hvd: Any) -> None:
    """It stepped on the gradient of its own rank; with op=Adasum there was no error."""
    rank, size = hvd.rank(), hvd.size()
    for op in (hvd.Adasum, hvd.Average):
        frozen, trained = _parameters(2)
        frozen.requires_grad_(False)
        names = [("layer.frozen", frozen), ("layer.trained", trained)]
        optimizer = _wrap(hvd, frozen, trained, named_parameters=names, op=op)
        trained.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        frozen.requires_grad_(True)
        ((frozen + trained) * (rank + 1)).sum().backward()
        with raises(ValueError, "layer.frozen"):
            optimizer.step()
        _still_works(hvd, f"the error with {op}")
        equal(frozen.detach(), torch.zeros(4), "a parameter that was not to be stepped on")
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names, op=hvd.Sum)
        optimizer.zero_grad()
        ((frozen + trained) * (rank + 1)).sum().backward()
        optimizer.step()
        equal(frozen.grad, torch.full((4,), _ranks_total(size)), "wrapped again")
        equal(trained.grad, torch.full((4,), _ranks_total(size)), "wrapped again")


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _disagree(hvd: Any, words: tuple[str, ...], **arguments: Any) -> None:
    (parameter,) = _parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), **arguments)
    (parameter * (hvd.rank() + 1)).sum().backward()
    with raises(hvd.HorovodInternalError, *words, "rank 0", f"rank {hvd.size() - 1}"):
        optimizer.step()
    _still_works(hvd, f"a difference in {words[0]}")


@several
def check_options_that_differ(hvd: Any) -> None:
    """Ranks that divide differently, or cut other buckets, stop before they mix them up."""
    odd = hvd.rank() == hvd.size() - 1
    name = "gradient_predivide_factor"
    _disagree(hvd, (name, "1.0", "2.0"), gradient_predivide_factor=2.0 if odd else 1.0)
    name = "HOROVOD_FUSION_THRESHOLD"
    with _variable(name, "70007" if odd else "80008"):
        for op in (hvd.Average, hvd.Adasum):
            _disagree(hvd, (name, "70007", "80008"), op=op)


@several
def check_compressor_with_a_state(hvd: Any) -> None:
    """A compressor that keeps what it rounded away sees the same whole buckets in every step."""
    rank, size = hvd.rank(), hvd.size()
    lengths: list[int] = []

    class Recording(hvd.Compression.fp16):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            lengths.append(tensor.numel())
            return hvd.Compression.fp16.compress(tensor)

    first, second = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(300))
    optimizer = _wrap(
        hvd, first, second, op=hvd.Average, compression=Recording, groups=[[first], [second]]
    )
    steps = []
    for step in range(4):
        optimizer.zero_grad()
        loss = (first * (rank + 1)).sum()
        if step < 2 or rank == 0:
            loss = loss + second.sum()
        loss.backward()
        optimizer.step()
        mean = torch.full((1000,), _ranks_total(size) / size)
        close(first.grad, mean, f"step {step}", rtol=1e-2)
        # Whether it narrows a dtype may be asked once, with one element.
        steps.append(sorted(length for length in lengths if length > 1))
        assert not step or 1 not in lengths, f"asked with one element in step {step}"
        lengths.clear()
    assert steps == [steps[0]] * 4, steps
    small, large = steps[0]
    assert small >= 300, steps
    assert large >= 1000, steps


class _Fused(torch.optim.SGD):
    """As in apex and DeepSpeed: gradients are always set to None."""

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def check_zero_grad_without_arguments(hvd: Any) -> None:
    """The user's zero_grad was given set_to_none, which it does not know."""
    rank, size = hvd.rank(), hvd.size()
    (parameter,) = _parameters()
    optimizer = hvd.DistributedOptimizer(_Fused([parameter], lr=1.0), op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        assert parameter.grad is None
        (parameter * (rank + 1)).sum().backward()
        optimizer.step()
        equal(parameter.grad, torch.full((4,), _ranks_total(size)), f"step {step}")


@several
def check_bfloat16_gradients_are_rounded_once(hvd: Any) -> None:
    """The sum was rounded to bfloat16, and its quotient again."""
    size, length = hvd.size(), 997
    # Multiples of 1/256 up to 1: exact in bfloat16, and so is their sum in float32.
    parts = [
        torch.randint(-256, 257, (length,), generator=torch.Generator().manual_seed(other)) / 256
        for other in range(size)
    ]
    want = (sum(part.double() for part in parts) / size).to(torch.bfloat16)
    parameter = nn.Parameter(torch.zeros(length, dtype=torch.bfloat16))
    optimizer = _wrap(hvd, parameter, op=hvd.Average)
    mine = parts[hvd.rank()].to(torch.bfloat16)
    for step in range(2):
        optimizer.zero_grad()
        (parameter * mine).sum().backward()
        optimizer.step()
        equal(parameter.grad, want, f"step {step}")
    equal(hvd.allreduce(mine), want, "allreduce")


# -- operations -----------------------------------------------------------------------------------


def _poll(hvd: Any, handle: int) -> Any:
    """Wait by asking only, so that it is the engine's thread that does the work."""
    end = time.monotonic() + TIMEOUT + 10
    while not hvd.poll(handle):
        assert time.monotonic() < end, "poll() never says that the operation is finished"
    return hvd.synchronize(handle)


def check_poll_while_the_engine_works(hvd: Any) -> None:
    """Asking tested a message that the engine's thread was waiting for.

    It lost the answer in one of the two threads, which crashed or waited for ever.
    """
    rank, size = hvd.rank(), hvd.size()
    for turn in range(40):
        root = turn % size
        got = _poll(hvd, hvd.broadcast_async(torch.full((1000,), float(rank)), root))
        equal(got, torch.full((1000,), float(root)), f"broadcast {turn}")
        if turn % 5:
            continue
        got = _poll(hvd, hvd.allreduce_async(torch.full((1000,), float(rank + 1)), op=hvd.Sum))
        equal(got, torch.full((1000,), _ranks_total(size)), f"allreduce {turn}")


def check_inference_mode(hvd: Any) -> None:
    """An inference tensor may be written to in that mode only, which a thread does not inherit."""
    rank, size = hvd.rank(), hvd.size()
    total = _ranks_total(size)
    with torch.inference_mode():

        def mine() -> torch.Tensor:
            return torch.full((4,), float(rank + 1))

        for wait in (lambda handle: _poll(hvd, handle), hvd.synchronize):
            equal(wait(hvd.allreduce_async(mine(), op=hvd.Sum)), torch.full((4,), total))
            written = mine()
            wait(hvd.allreduce_async_(written, op=hvd.Sum))
            equal(written, torch.full((4,), total), "in place")
            written = mine()
            wait(hvd.broadcast_async_(written, size - 1))
            equal(written, torch.full((4,), float(size)), "broadcast in place")
            equal(wait(hvd.broadcast_async(mine(), 0)), torch.ones(4), "broadcast")
            want = torch.arange(1.0, size + 1).repeat_interleave(4)
            equal(wait(hvd.allgather_async(mine())), want, "allgather")
            group = [mine(), mine() * 2]
            wait(hvd.grouped_allreduce_async_(group, op=hvd.Sum))
            equal(group[1], torch.full((4,), 2 * total), "grouped")
    _still_works(hvd, "inference mode")


def check_default_device(hvd: Any) -> None:
    """What was made for a CPU tensor's sake, without naming a device, came to lie elsewhere."""
    rank, size = hvd.rank(), hvd.size()
    given = values(rank, 1000, torch.float32)
    halves = values(rank, 1000, torch.bfloat16)
    uneven = torch.full((rank + 1,), float(rank))
    torch.set_default_device("meta")
    try:
        summed = hvd.allreduce(given, op=hvd.Sum)
        summed_halves = hvd.allreduce(halves, op=hvd.Sum)
        averaged = hvd.allreduce(given, op=hvd.Average)
        gathered = hvd.allgather(uneven)
        sent = hvd.broadcast(given, size - 1)
        sent_object = hvd.broadcast_object({"rank": rank, "long": "x" * 10_000}, 0)
        objects = hvd.allgather_object((rank, "x" * 5_000 * rank))
        adasum = hvd.allreduce(given, op=hvd.Adasum)
        hvd.barrier()
    finally:
        torch.set_default_device(None)
    equal(summed, expected("Sum", size, 1000, torch.float32), "Sum")
    equal(summed_halves, expected("Sum", size, 1000, torch.bfloat16), "Sum of bfloat16")
    close(averaged, expected("Average", size, 1000, torch.float32), "Average")
    want = torch.cat([torch.full((other + 1,), float(other)) for other in range(size)])
    equal(gathered, want, "allgather")
    equal(sent, values(size - 1, 1000, torch.float32), "broadcast")
    equal(sent_object, {"rank": 0, "long": "x" * 10_000}, "broadcast_object")
    equal(objects, [(other, "x" * 5_000 * other) for other in range(size)], "allgather_object")
    equal(adasum, hvd.allreduce(given, op=hvd.Adasum), "Adasum as without a default device")


def check_object_that_cannot_be_sent(hvd: Any) -> None:
    """allgather_object left the others waiting for a rank whose object cannot be pickled."""
    rank, size = hvd.rank(), hvd.size()
    for odd in {0, size - 1}:
        if rank == odd:
            with raises(TypeError, "lock"):
                hvd.allgather_object(threading.Lock())
        else:
            with raises(hvd.HorovodInternalError, f"rank {odd}"):
                hvd.allgather_object("x" * 10_000)
        equal(hvd.allgather_object(rank), list(range(size)), "the next one")
        _still_works(hvd, "an object that cannot be sent")


def _lone(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """One element whose stride is 2, which torch calls contiguous all the same."""
    return values(rank, 4, dtype)[::2][:1]


def check_one_element_with_a_stride(hvd: Any) -> None:
    """It was not copied, being contiguous, and then could not be seen as bytes."""
    rank, size = hvd.rank(), hvd.size()
    ranks = range(size)
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool):
        given = _lone(rank, dtype)
        equal(hvd.allgather(given), torch.cat([_lone(r, dtype) for r in ranks]), "allgather")
        equal(hvd.broadcast(given, size - 1), _lone(size - 1, dtype), "broadcast")
        total = expected("Sum", size, 4, dtype)[:1]
        equal(hvd.allreduce(given, op=hvd.Sum), total, "allreduce")
        hvd.broadcast_(given, size - 1)
        equal(given, _lone(size - 1, dtype), "broadcast in place")
        given = _lone(rank, dtype)
        hvd.allreduce_(given, op=hvd.Sum)
        equal(given, total, "allreduce in place")
        (got,) = hvd.grouped_allreduce([_lone(rank, dtype)], op=hvd.Sum)
        equal(got, total, "grouped allreduce")


def _mixture(rank: int) -> list[torch.Tensor]:
    """Neighbours that differ in dtype, and what packing gets wrong: no elements, no dimensions."""
    return [
        values(rank, 5, torch.float32),
        values(rank, (), torch.int64),
        values(rank, (0, 3), torch.float32),
        values(rank, (3, 4), torch.float32).t(),
        values(rank, 7, torch.bfloat16),
        values(rank, (), torch.float32),
        values(rank, 6, torch.bool),
        values(rank, 0, torch.uint8),
        values(rank, (2, 3), torch.complex64),
        values(rank, 1001, torch.float64)[::2],
        values(rank, (2, 1, 3), torch.int64),
        values(rank, (), torch.bfloat16),
    ]


def check_grouped_mixture_equals_single_ones(hvd: Any) -> None:
    """A group is packed by dtype: its results are those of its tensors alone."""
    rank, size = hvd.rank(), hvd.size()
    for op in (hvd.Sum, hvd.Average):
        kept = [one for one in _mixture(rank) if op == hvd.Sum or one.dtype != torch.bool]
        given = [one.clone() for one in kept]
        singles = [hvd.allreduce(one, op=op) for one in kept]
        for index, one in enumerate(hvd.grouped_allreduce(given, op=op)):
            close(one, singles[index], f"{index} in a group")
            equal(given[index], kept[index], f"input {index}")
        for index, one in enumerate(hvd.grouped_allreduce_(given, op=op)):
            assert one is given[index], f"{index}: another tensor"
            close(one, singles[index], f"{index} in a group in place")
    wants = [_mixture(other)[0] for other in range(size)]
    got = hvd.grouped_allreduce(_mixture(rank), op=hvd.Sum)
    equal(got[0], torch.stack(wants).sum(0), "and those are right")


def check_optimizers_come_and_go(hvd: Any) -> None:
    """Each optimizer had a group, a thread and its sockets until shutdown."""
    threads = []
    for _ in range(5):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("weight", weight)], op=hvd.Sum
        )
        for _ in range(2):
            optimizer.zero_grad()
            (weight.sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
        size = hvd.size()
        equal(weight.detach(), torch.full((3,), -float(size * (size + 1))), "two steps of Sum")
        del optimizer, weight
        gc.collect()
        threads.append(threading.active_count())
    assert threads[-1] == threads[0], f"threads after each optimizer: {threads}"


def check_flags_survive_a_large_predivide_factor(hvd: Any) -> None:
    """1/factor was zero in float16, so a gradient that only some ranks had was dropped there."""
    used, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([used, other], lr=1.0),
        [("used", used), ("other", other)],
        compression=hvd.Compression.fp16,
        gradient_predivide_factor=1e9,
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss = used.sum()
        if hvd.rank() == 0:
            loss = loss + other.sum()
        loss.backward()
        optimizer.synchronize()
        assert other.grad is not None, "rank 0 has a gradient"
        with optimizer.skip_synchronize():
            optimizer.step()
