"""join: ranks with less data than others, in training and in single operations.

A parameter's gradient is a coefficient that depends on rank and step, so that what training gives
can be written down: an average over all ranks, with zeros of those that have joined.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from checks import support
from checks.support import close, equal, raises, same_on_all_ranks, several, values, world

SHAPES = ((5,), (3, 4), (7, 2, 2))


def _native() -> bool:
    """Whether the engine is Horovod's, whose join takes part in all-reduces only."""
    from unidist import basics

    return bool(basics.runtime().backend.matches_by_name)


def _coefficient(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    return values(rank + 3 * step, shape, torch.float32)


class _Linear:
    """Parameters whose gradients are coefficients, and an optimizer with a learning rate of 1."""

    def __init__(self, hvd: Any, wrap: bool = True, **options: Any) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        named = [(f"p{i}", parameter) for i, parameter in enumerate(self.parameters)]
        self.optimizer: Any = torch.optim.SGD(self.parameters, lr=1.0)
        if wrap:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=named, **options
            )

    def backward(self, rank: int, step: int, only: int | None = None) -> None:
        used = self.parameters if only is None else self.parameters[only : only + 1]
        sum(
            (parameter * _coefficient(rank, step, tuple(parameter.shape))).sum()
            for parameter in used
        ).backward()  # type: ignore[union-attr]

    def step(self, rank: int, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(rank, step)
        self.optimizer.step()

    def expect(self, size: int, active: Sequence[Sequence[int]], what: str = "") -> None:
        """Parameters after steps in each of which some ranks had data."""
        for parameter in self.parameters:
            want = torch.zeros(parameter.shape)
            for step, ranks in enumerate(active):
                for rank in ranks:
                    want -= _coefficient(rank, step, tuple(parameter.shape)) / size
            close(parameter.detach(), want, what or f"after {len(active)} steps", atol=1e-5)


def _active(batches: Sequence[int]) -> list[list[int]]:
    """For each step the ranks that have data for it."""
    return [[r for r, n in enumerate(batches) if n > step] for step in range(max(batches))]


def _join(hvd: Any, last: int | None = None) -> int:
    """Join; the same answer on all ranks, an integer, and the right one where only one is."""
    got = hvd.join()
    assert type(got) is int, got
    told = set(support.channel.compare(str(got)))
    assert len(told) == 1, f"join returned {told}"
    if last is not None:
        assert got == last, f"join returned {got}, the last rank was {last}"
    return got


def _works(hvd: Any) -> None:
    """Every kind of operation without a name: all ranks have counted to the same number."""
    rank, size = hvd.rank(), hvd.size()
    mine = torch.tensor([rank + 1.0])
    total = torch.tensor([size * (size + 1) / 2])
    equal(hvd.allreduce(mine, op=hvd.Sum), total, "allreduce after join")
    equal(hvd.grouped_allreduce([mine], op=hvd.Sum)[0], total, "grouped_allreduce after join")
    equal(hvd.allgather(mine), torch.arange(1.0, size + 1), "allgather after join")
    equal(hvd.grouped_allgather([mine])[0], torch.arange(1.0, size + 1))
    equal(hvd.broadcast(mine, 0), torch.ones(1), "broadcast after join")
    equal(hvd.alltoall(mine.repeat(size)), torch.arange(1.0, size + 1), "alltoall after join")
    equal(hvd.reducescatter(mine.repeat(size), op=hvd.Sum), total, "reducescatter after join")
    equal(hvd.grouped_reducescatter([mine.repeat(size)], op=hvd.Sum)[0], total)
    assert hvd.allgather_object(rank) == list(range(size))
    assert hvd.broadcast_object(rank, size - 1) == size - 1
    hvd.barrier()


# -- training -------------------------------------------------------------------------------------


def check_join_of_all_at_once(hvd: Any) -> None:
    for _ in range(3):
        assert 0 <= _join(hvd) < hvd.size()
    _works(hvd)


def check_uneven_batches(hvd: Any) -> None:
    """Rank r has r + 1 batches; then the other way round, so that rank 0 is the last."""
    rank, size = hvd.rank(), hvd.size()
    for upwards in (True, False):
        batches = [r + 1 if upwards else size - r for r in range(size)]
        linear = _Linear(hvd)
        for step in range(batches[rank]):
            linear.step(rank, step)
            linear.expect(size, _active(batches)[: step + 1])
        last = _join(hvd, size - 1 if upwards else 0)
        hvd.broadcast_parameters(dict(enumerate(linear.parameters)), last)
        linear.expect(size, _active(batches))
        same_on_all_ranks(*linear.parameters)
        linear.step(rank, 0)  # the plan still holds
        same_on_all_ranks(*linear.parameters)
    _works(hvd)


@several
def check_no_batch_before_the_first_step(hvd: Any) -> None:
    """All ranks but one have joined when the plan is made."""
    if _native():
        return
    rank, size = hvd.rank(), hvd.size()
    for busy in range(size):
        linear = _Linear(hvd)
        if rank == busy:
            for step in range(3):
                linear.step(rank, step)
            linear.expect(size, [[busy]] * 3)
        _join(hvd, busy)
        # The next epoch has data everywhere.
        hvd.broadcast_parameters(dict(enumerate(linear.parameters)), busy)
        linear.step(rank, 3)
        linear.expect(size, [*[[busy]] * 3, range(size)])
    _works(hvd)


@several
def check_first_step_without_one_rank(hvd: Any) -> None:
    if _native():
        return
    rank, size = hvd.rank(), hvd.size()
    linear = _Linear(hvd, compression=hvd.Compression.fp16, op=hvd.Sum)
    if rank:
        linear.step(rank, 0)
        linear.expect(1, [range(1, size)])
    _join(hvd)
    _works(hvd)


def check_several_epochs(hvd: Any) -> None:
    """Each rank is the last one once; no operation and no pause in between."""
    rank, size = hvd.rank(), hvd.size()
    linear = _Linear(hvd)
    linear.step(rank, 0)
    for epoch in range(2 * size):
        with torch.no_grad():
            for parameter in linear.parameters:
                parameter.zero_()
        batches = [1 + (r + epoch) % size for r in range(size)]
        for step in range(batches[rank]):
            linear.step(rank, step)
        last = batches.index(size)
        _join(hvd, last)
        if rank == last:
            linear.expect(size, _active(batches))
    _works(hvd)


def check_two_optimizers(hvd: Any) -> None:
    """A generator steps once for two steps of the discriminator; ranks end after either."""
    rank, size = hvd.rank(), hvd.size()
    first, second = _Linear(hvd), _Linear(hvd)
    for step in range(rank + 1):
        first.step(rank, 2 * step)
        second.step(rank, step)
        first.step(rank, 2 * step + 1)
    _join(hvd, size - 1)
    if rank == size - 1:
        first.expect(size, [range(step // 2, size) for step in range(2 * size)])
        second.expect(size, [range(step, size) for step in range(size)])
    _works(hvd)


def check_accumulated_gradients(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    linear = _Linear(hvd, backward_passes_per_step=2, op=hvd.Sum)
    for step in range(rank + 1):
        linear.optimizer.zero_grad()
        linear.backward(rank, 2 * step)
        linear.backward(rank, 2 * step + 1)
        linear.optimizer.step()
    _join(hvd, size - 1)
    if rank == size - 1:
        for parameter in linear.parameters:
            want = torch.zeros(parameter.shape)
            for r in range(size):
                for backward in range(2 * (r + 1)):
                    want -= _coefficient(r, backward, tuple(parameter.shape))
            close(parameter.detach(), want, atol=1e-5)
    _works(hvd)


@several
def check_half_of_an_accumulation(hvd: Any) -> None:
    """A rank that ends between the passes of a step has nothing to give to it."""
    rank, size = hvd.rank(), hvd.size()
    linear = _Linear(hvd, backward_passes_per_step=2, op=hvd.Sum)
    linear.backward(rank, 0)
    linear.backward(rank, 0)
    linear.optimizer.step()
    linear.optimizer.zero_grad()
    linear.backward(rank, 1)
    if rank:
        linear.backward(rank, 1)
        linear.optimizer.step()
        for parameter in linear.parameters:
            shape = tuple(parameter.shape)
            want = sum(2 * _coefficient(r, 0, shape) for r in range(size))
            want += sum(2 * _coefficient(r, 1, shape) for r in range(1, size))
            close(parameter.detach(), -want, "rank 0 was in the midst of a step")  # type: ignore[operator]
    _join(hvd)
    linear.optimizer.zero_grad()
    _works(hvd)


@several
def check_backward_without_a_step(hvd: Any) -> None:
    """Gradients that were under way count; those of parameters that were not used are zeros."""
    rank, size = hvd.rank(), hvd.size()
    for only in (None, 1):
        # Each parameter has a bucket of its own.
        linear = _Linear(hvd, groups=3)
        linear.step(rank, 0)
        linear.optimizer.zero_grad()
        if rank == 0:
            linear.backward(rank, 1, only)
        else:
            linear.backward(rank, 1)
            linear.optimizer.step()
            for index, parameter in enumerate(linear.parameters):
                shape = tuple(parameter.shape)
                counts = range(only is not None and only != index, size)
                want = sum(_coefficient(r, 0, shape) for r in range(size))
                want += sum(_coefficient(r, 1, shape) for r in counts)
                close(parameter.detach(), -want / size, f"parameter {index}", atol=1e-5)  # type: ignore[operator]
        _join(hvd)
        linear.optimizer.zero_grad()
        linear.step(rank, 2)
    _works(hvd)


def check_compressed_gradients(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    linear = _Linear(hvd, compression=hvd.Compression.fp16, op=hvd.Sum)
    for step in range(rank + 1):
        linear.step(rank, step)
    _join(hvd, size - 1)
    if rank == size - 1:
        for parameter in linear.parameters:
            shape = tuple(parameter.shape)
            want = sum(_coefficient(r, s, shape) for r in range(size) for s in range(r + 1))
            close(parameter.detach(), -want, atol=1e-5)  # type: ignore[operator]
    _works(hvd)


def check_sparse_gradients(hvd: Any) -> None:
    """An embedding beside dense parameters; and one alone, which has no bucket at all."""
    if _native():
        return
    rank, size = hvd.rank(), hvd.size()
    for dense in (True, False):
        embedding = torch.nn.Embedding(size + 1, 3, sparse=True)
        weight = torch.nn.Parameter(torch.zeros(3))
        with torch.no_grad():
            embedding.weight.zero_()
        parameters = [embedding.weight, weight] if dense else [embedding.weight]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0),
            named_parameters=[(f"e{i}", parameter) for i, parameter in enumerate(parameters)],
        )
        for step in range(rank + 1):
            optimizer.zero_grad()
            rows = embedding(torch.tensor([rank, size]))
            (rows.sum() * (step + 1) + (weight.sum() if dense else 0)).backward()
            optimizer.step()
        _join(hvd, None if not dense else size - 1)
        if rank == size - 1:
            want = torch.zeros(size + 1, 3)
            for r in range(size):
                for step in range(r + 1):
                    want[r] -= (step + 1) / size
                    want[size] -= (step + 1) / size
            close(embedding.weight.detach(), want, "embedding", atol=1e-5)
            if dense:
                steps = size * (size + 1) / 2
                close(weight.detach(), torch.full((3,), -steps / size), "weight", atol=1e-5)
    _works(hvd)


def check_adasum_optimizer(hvd: Any) -> None:
    """Changes at right angles are added; no change at all changes nothing."""
    if _native():
        return
    rank, size = hvd.rank(), hvd.size()
    parameter = torch.nn.Parameter(torch.zeros(size + 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), named_parameters=[("p", parameter)], op=hvd.Adasum
    )
    for step in range(rank + 1):
        optimizer.zero_grad()
        (parameter[rank] * (step + 1)).backward()
        optimizer.step()
    _join(hvd, size - 1)
    if rank == size - 1:
        want = [-(r + 1) * (r + 2) / 2 for r in range(size)]
        close(parameter.detach(), torch.tensor([*want, 0.0]))
    _works(hvd)


@several
def check_optimizer_of_a_process_set(hvd: Any) -> None:
    """The set's ranks have different numbers of batches; a rank outside joins, too."""
    if _native():
        return
    rank, size = hvd.rank(), hvd.size()
    members = [0, size - 1]
    process_set = hvd.add_process_set(members) if size > 2 else hvd.global_process_set
    if rank in members:
        linear = _Linear(hvd, process_set=process_set)
        for step in range(3 if rank == 0 else 1):
            linear.step(rank, step)
        if rank == 0:
            linear.expect(2, [members, [0], [0]])
    _join(hvd)
    _works(hvd)
    if size > 2:
        assert hvd.remove_process_set(process_set) is True


@several
def check_an_optimizer_that_is_garbage_on_one_rank_only(hvd: Any) -> None:
    """Those that have it wait for nobody in its buckets."""
    rank, size = hvd.rank(), hvd.size()
    gc.disable()
    try:
        old = _Linear(hvd)
        old.step(rank, 0)
        cycle: list[Any] = [old]
        cycle.append(cycle)
        del old, cycle
        if rank == 0:
            gc.collect()
        linear = _Linear(hvd)
        for step in range(rank + 1):
            linear.step(rank, step)
        _join(hvd, size - 1)
    finally:
        gc.enable()
    _works(hvd)


# -- single operations ----------------------------------------------------------------------------


@several
def check_operations_while_a_rank_has_joined(hvd: Any) -> None:
    """Zeros to reductions, no rows to gathers; what needs the rank is an error on the others."""
    rank, size = hvd.rank(), hvd.size()
    if _native():
        _allreduce_only(hvd)
        return
    others = range(1, size)
    if rank:
        for count in (3, 3000):  # with the control message, and after it
            mine = torch.full((count,), rank + 1.0)
            total = torch.full((count,), sum(r + 1.0 for r in others))
            equal(hvd.allreduce(mine, op=hvd.Sum), total)
            close(hvd.allreduce(mine), total / size, "an average is of all ranks")
            equal(hvd.allreduce(mine, op=hvd.Min), torch.zeros(count), "the least")
            equal(hvd.allreduce(mine, op=hvd.Max), torch.full((count,), float(size)))
            equal(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0), 2 * total)
            close(hvd.allreduce(mine, op=hvd.Adasum)[:1] > 0, torch.tensor([True]))
            flag = torch.ones(count, dtype=torch.bool)
            equal(hvd.allreduce(flag, op=hvd.Max), flag)
            equal(hvd.allreduce(flag, op=hvd.Min), ~flag)
            pair = hvd.grouped_allreduce([mine, mine.long()], op=hvd.Sum)
            equal(pair[0], total)
            equal(pair[1], total.long())
            handle = hvd.allreduce_async(mine, op=hvd.Sum, name="named")
            equal(hvd.synchronize(handle), total)
            inplace = mine.clone()
            hvd.allreduce_(inplace, op=hvd.Sum)
            equal(inplace, total)

            want = torch.cat([torch.full((count * r, 2), r) for r in others])
            equal(hvd.allgather(torch.full((count * rank, 2), rank)), want, "allgather")
            many = hvd.grouped_allgather([torch.full((count * rank, 2), rank), mine[:1]])
            equal(many[0], want)
            equal(many[1], torch.tensor([r + 1.0 for r in others]))

            equal(hvd.broadcast(mine, size - 1), torch.full((count,), float(size)))
            with raises(hvd.HorovodInternalError, "rank 0", "join()", "root"):
                hvd.broadcast(mine, 0)
            with raises(hvd.HorovodInternalError, "rank 0", "join()", "alltoall"):
                hvd.alltoall(mine.repeat(size))
            with raises(hvd.HorovodInternalError, "join()"):
                hvd.allgather_object(rank)
            if size > 2:
                with raises(hvd.HorovodInternalError, "dtype"):
                    hvd.allreduce(mine.double() if rank == 1 else mine)
            rows = torch.full((size * count, 2), rank + 1.0)
            got = hvd.reducescatter(rows, op=hvd.Sum)
            equal(got, torch.full((count, 2), total[0].item()), "reducescatter")
            equal(hvd.grouped_reducescatter([rows], op=hvd.Sum)[0], got)
            hvd.barrier()

            entries = torch.sparse_coo_tensor(
                [[rank]], torch.ones(1), (size,), check_invariants=True
            )
            sparse = hvd.sparse_allreduce_async(entries, None, hvd.Sum)().to_dense()
            equal(sparse, torch.tensor([0.0, *[1.0] * (size - 1)]), "sparse")
            assert hvd.broadcast_object({"of": rank}, size - 1) == {"of": size - 1}

            leaf = mine.clone().requires_grad_()
            hvd.allreduce(leaf, op=hvd.Sum).sum().backward()
            equal(leaf.grad, torch.full((count,), float(size - 1)), "gradient of allreduce")
    _join(hvd)
    _works(hvd)


def _allreduce_only(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank:
        mine = torch.full((3,), rank + 1.0)
        total = torch.full((3,), sum(r + 1.0 for r in range(1, size)))
        equal(hvd.allreduce(mine, op=hvd.Sum, name="alone"), total)
        close(hvd.allreduce(mine, name="mean"), total / size)
        for refused in (
            lambda: hvd.broadcast(mine, size - 1, name="b"),
            lambda: hvd.allgather(mine, name="g"),
        ):
            with raises(hvd.HorovodInternalError):
                refused()
    _join(hvd)


@several
def check_operations_under_way_when_a_rank_joins(hvd: Any) -> None:
    """What it has submitted counts with its values, whenever the others come to it."""
    if _native():
        return  # Horovod's process dies of it
    rank, size = hvd.rank(), hvd.size()
    mine = torch.tensor([rank + 1.0])
    total = torch.tensor([size * (size + 1) / 2])
    if rank == 0:
        handles = [hvd.allreduce_async(mine, op=hvd.Sum, name=f"early{i}") for i in range(3)]
        _join(hvd)
    else:
        got = [hvd.allreduce(mine, op=hvd.Sum, name=f"early{i}") for i in (2, 0, 1)]
        for one in got:
            equal(one, total)
        equal(hvd.allreduce(mine, op=hvd.Sum, name="late"), total - 1)
        handles = []
        _join(hvd)
    for handle in handles:
        equal(hvd.synchronize(handle), total)


@world((3,))
def check_two_of_three_have_joined(hvd: Any) -> None:
    if _native():
        return
    rank = hvd.rank()
    for busy in range(3):
        if rank == busy:
            equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.ones(2))
            equal(hvd.allgather(torch.full((2,), rank)), torch.full((2,), rank))
            with raises(hvd.HorovodInternalError, "join()", "ranks"):
                hvd.alltoall(torch.ones(3))
        _join(hvd, busy)
    _works(hvd)


@several
def check_join_twice_in_a_process_set(hvd: Any) -> None:
    """Operations of a set whose other member has joined."""
    if _native():
        return
    rank, size = hvd.rank(), hvd.size()
    members = [0, size - 1]
    if size == 2:
        return
    process_set = hvd.add_process_set(members)
    for _ in range(2):
        if rank == 0:
            got = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=process_set)
            equal(got, torch.ones(2))
            got = hvd.allgather(torch.full((2,), rank), process_set=process_set)
            equal(got, torch.full((2,), rank))
            with raises(hvd.HorovodInternalError, f"rank {size - 1} called join()"):
                hvd.alltoall(torch.ones(2), process_set=process_set)
        _join(hvd)
        if rank in members:
            got = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=process_set)
            equal(got, torch.full((2,), 2.0))
    _works(hvd)
    assert hvd.remove_process_set(process_set) is True
