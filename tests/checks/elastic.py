"""Elastic training in a world that stays as it is: states, the loop, the sampler."""

from __future__ import annotations

from typing import Any

import torch

from checks.support import close, equal, raises, same_on_all_ranks, world


def _model(rank: int) -> torch.nn.Module:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 + rank)
    return model


def _state(hvd: Any, **attributes: Any) -> Any:
    """A state that differs on every rank: parameters are 1 + rank, the learning rate 0.1 · that."""
    model = _model(hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, **attributes)


def check_sync_takes_over_rank_0(hvd: Any) -> None:
    state = _state(hvd, epoch=hvd.rank(), name=f"rank {hvd.rank()}", nothing=None)
    model, optimizer = state.model, state.optimizer
    state.epoch = 10 + hvd.rank()  # set, but not committed: as after loading a checkpoint
    state.sync()
    equal((state.epoch, state.name, state.nothing), (10, "rank 0", None))
    assert state.model is model, "models and optimizers are changed in place"
    assert state.optimizer is optimizer
    for parameter in model.parameters():
        equal(parameter.detach(), torch.ones_like(parameter))
    equal(optimizer.param_groups[0]["lr"], 0.1)
    # What restore returns to is what was taken over.
    state.epoch = 11
    with torch.no_grad():
        model.weight.zero_()
    state.restore()
    equal(state.epoch, 10)
    equal(model.weight.detach(), torch.ones(2, 3))


def check_restore_returns_to_the_last_commit(hvd: Any) -> None:
    state = _state(hvd, batch=0, losses=[])
    state.sync()
    for step in range(4):
        state.model(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.batch += 1
        state.losses.append(step)  # changed in place
        if step == 1:
            state.commit()
            weight = state.model.weight.detach().clone()
            momentum = state.optimizer.state[state.model.weight]["momentum_buffer"].clone()
    for _ in range(2):  # what is restored once must not be what later steps change
        state.restore()
        equal(state.batch, 2)
        equal(state.losses, [0, 1])
        equal(state.model.weight.detach(), weight)
        equal(state.optimizer.state[state.model.weight]["momentum_buffer"], momentum)
        state.model(torch.ones(1, 3)).sum().backward()
        state.optimizer.step()
        state.losses.append(9)
    same_on_all_ranks(state.model.weight)


def check_setting_a_model_replaces_it(hvd: Any) -> None:
    state = _state(hvd)
    other = _model(4)
    state.model = other
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    equal(other.weight.detach(), torch.full((2, 3), 5.0))


def check_object_state(hvd: Any) -> None:
    state = hvd.elastic.ObjectState(
        bcast_object=hvd.broadcast_object, get_rank=hvd.rank, step=hvd.rank(), seen={hvd.rank()}
    )
    state.sync()
    equal((state.step, state.seen), (0, {0}))
    state.seen.add(7)
    state.restore()
    equal(state.seen, {0})
    base = hvd.elastic.State(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
    for method in (base.save, base.restore, base.sync):
        with raises(NotImplementedError):
            method()


def check_hosts_updates_interrupt_all_ranks(hvd: Any) -> None:
    """Rank 0 has heard of a change, the others need not have; all leave at the same point."""
    from unidist.elastic.notification import HostUpdateResult as Update

    Interrupt = hvd.elastic.HostsUpdatedInterrupt
    assert issubclass(Interrupt, RuntimeError)
    for update, skips in ((Update.added, False), (Update.removed, True), (Update.mixed, False)):
        state = _state(hvd, batch=0)
        state.check_host_updates()  # nothing was heard
        state.batch = 5
        if hvd.rank() == 0:
            state.on_hosts_updated(1.0, update)
        try:
            state.commit()
        except Interrupt as interrupt:
            equal(interrupt.skip_sync, skips, str(update))
        else:
            raise AssertionError("commit did not interrupt")
        state.commit()  # once is enough
        if hvd.rank() == 0:
            state.on_hosts_updated(0.5, update)  # older than the last one
        state.check_host_updates()
        state.restore()
        equal(state.batch, 5, "commit saves before it interrupts")


def _train(hvd: Any, state: Any, until: int, fail_at: dict[int, BaseException]) -> list[int]:
    """Steps of SGD; each commits, and each failure comes once, with gradients under way."""
    steps = []
    while state.step < until:
        steps.append(state.step)
        state.optimizer.zero_grad()  # of the step that failed, too
        x = torch.full((1, 3), float((state.step + 1) * (hvd.rank() + 1)))
        state.model(x).sum().backward()
        error = fail_at.pop(state.step, None)
        if error is not None:
            with torch.no_grad():
                state.model.weight.fill_(float("nan"))
            state.step += 100
            raise error
        state.optimizer.step()
        state.step += 1
        state.commit()
    return steps


def check_run_goes_on_after_a_failure(hvd: Any) -> None:
    """A collective that fails on all ranks costs what was not committed, and nothing else."""
    straight = _state(hvd, step=0)
    straight.sync()
    equal(_train(hvd, straight, 4, {}), [0, 1, 2, 3])

    place = (hvd.rank(), hvd.size())
    # In a world of one, the set of its rank is there already.
    mine = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    state = _state(hvd, step=0)
    calls: list[str] = []
    state.register_reset_callbacks([lambda: calls.append("a")])
    state.register_reset_callbacks([lambda: calls.append("b")])

    @hvd.elastic.run
    def train(state: Any, until: int, *, fail_at: dict[int, BaseException]) -> list[int]:
        """Trains."""
        return _train(hvd, state, until, fail_at)

    equal((train.__name__, train.__doc__), ("train", "Trains."))
    done = train(state, 4, fail_at={2: hvd.HorovodInternalError("as if a peer were gone")})
    equal(done, [2, 3], "the function was called again, where the last commit was")
    equal(calls, ["a", "b"])
    equal((hvd.rank(), hvd.size()), place)
    for got, want in zip(state.model.parameters(), straight.model.parameters(), strict=True):
        close(got.detach(), want.detach(), "as if nothing had happened")
    same_on_all_ranks(*state.model.parameters())
    # The sets of ranks are those from before.
    equal(mine.included(), hvd.rank() == 0)
    if hvd.rank() == 0:
        equal(hvd.allreduce(torch.ones(2), process_set=mine), torch.ones(2))
    equal(hvd.remove_process_set(mine), hvd.size() > 1)


def check_run_gives_way_to_new_hosts(hvd: Any) -> None:
    """After an interrupt nothing is undone; without a sync each rank keeps what it has."""
    for skip in (False, True):
        state = _state(hvd, value="first", turns=0)
        resets: list[str] = []
        state.register_reset_callbacks([lambda resets=resets: resets.append("reset")])

        @hvd.elastic.run
        def train(state: Any, skip: bool = skip) -> str:
            state.turns += 1
            if state.turns == 1:
                state.value = f"of rank {hvd.rank()}"
                raise hvd.elastic.HostsUpdatedInterrupt(skip)
            return str(state.value)

        want = f"of rank {hvd.rank()}" if skip else "of rank 0"
        equal(train(state), want, f"skip_sync={skip}")
        equal(resets, ["reset"])


@world((1, 2))
def check_run_passes_other_errors_on(hvd: Any) -> None:
    """Also a bad argument, which is an internal error in Horovod: it would come again, for ever."""
    from unidist.backends.errors import ArgumentError

    state = _state(hvd)
    mistakes = [KeyError("a mistake"), ArgumentError("a bad argument")]

    @hvd.elastic.run
    def train(state: Any) -> None:
        raise mistakes[0]

    for mistake in list(mistakes):
        with raises(type(mistake), str(mistake)):
            train(state)
        mistakes.pop(0)
    equal(hvd.is_initialized(), True)


def check_sampler_divides_what_is_left(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for length in (0, 1, 2, 7, 12):
        sampler = hvd.elastic.ElasticSampler(range(length), shuffle=False)
        parts = hvd.allgather_object(list(sampler))
        share = -(-length // size)
        equal(len(sampler), share)
        equal([len(part) for part in parts], [share] * size)
        equal({index for part in parts for index in part}, set(range(length)))
        mixed = [index for group in zip(*parts, strict=True) for index in group]
        equal(mixed[:length], list(range(length)))
        equal(mixed[length:], [i % max(length, 1) for i in range(len(mixed) - length)], "padding")

    sampler = hvd.elastic.ElasticSampler(range(20), seed=3)
    first = hvd.allgather_object(list(sampler))
    equal(sorted({index for part in first for index in part}), list(range(20)))
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    state = sampler.state_dict()
    equal(state, {"epoch": 0, "processed_num": 4 * size})

    other = hvd.elastic.ElasticSampler(range(20), seed=3)
    other.load_state_dict(state)
    rest = {index for part in hvd.allgather_object(list(other)) for index in part}
    equal(rest, set(range(20)) - {index for part in first for index in part[:4]})

    # Fewer samples than ranks are left, and more ranks are to be padded than there are samples:
    # the padding was once taken from what is left in one piece.
    other.load_state_dict({"epoch": 0, "processed_num": 19})
    equal(len(list(other)), 1)
    other.load_state_dict({"epoch": 0, "processed_num": 20})
    equal(list(other), [])
    other.set_epoch(1)
    equal(other.state_dict(), {"epoch": 1, "processed_num": 0})
    assert hvd.allgather_object(list(other)) != first or size == 20, "each epoch has its order"

    # In a state it is changed in place, and restored like the rest.
    state = hvd.elastic.TorchState(sampler=sampler, batch=0)
    state.sync()
    state.commit()
    sampler.record_batch(2, 1)
    state.restore()
    equal(sampler.state_dict(), {"epoch": 0, "processed_num": 4 * size})
    if rank == 0:
        sampler.set_epoch(5)
    state.sync()
    equal(sampler.epoch, 5)
