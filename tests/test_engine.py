"""The engine: order of submission, help by waiters, errors, and inline tasks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from unidist.backends.base import Completed, Group, Work
from unidist.backends.errors import HorovodInternalError
from unidist.backends.serial import SerialBackend
from unidist.engine import Engine
from unidist.handles import HandleTable, Peers, Proposal, Task
from unidist.negotiation import Negotiator

PATIENCE = 30.0

WORLD = Group((0,), 0)

Make = Callable[..., Engine]


def _never(*_: Any) -> Any:
    raise AssertionError("nobody has joined")


def ordered(trace: Callable[[Task], None] | None = None) -> Engine:
    return Engine(SerialBackend(), WORLD, trace)


def negotiating(trace: Callable[[Task], None] | None = None) -> Engine:
    return Negotiator(SerialBackend(), WORLD, _never, _never, _never, trace)


class _ByName(SerialBackend):
    matches_by_name = True


#: what both kinds of engine promise
both = pytest.mark.parametrize("make", [ordered, negotiating])

_numbers = itertools.count()


def task(start: Callable[[], Work], finish: Callable[[], Any], inline: bool = False) -> Task:
    """A task with a name of its own."""

    def begin(peers: Peers | None) -> Work:
        return start()

    return Task(begin, finish, Proposal("test", f"test.{next(_numbers)}"), inline)


class Gate(Work):
    """A work that is done when the test says so."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def wait(self) -> None:
        assert self.opened.wait(PATIENCE)

    def done(self) -> bool:
        return self.opened.is_set()


def recording(log: list[int], number: int) -> Task:
    def start() -> Work:
        log.append(number)
        return Completed()

    return task(start, lambda: number)


@both
def test_tasks_run_in_order_of_submission_whoever_waits_first(make: Make) -> None:
    engine, log = make(), []
    tasks = [engine.submit(recording(log, i)) for i in range(50)]
    assert [engine.wait(task).result() for task in reversed(tasks)] == list(range(49, -1, -1))
    assert log == list(range(50))
    engine.stop()


@both
def test_submissions_from_several_threads_all_complete(make: Make) -> None:
    engine, log = make(), []
    failures: list[BaseException] = []

    def work(base: int) -> None:
        try:
            tasks = [engine.submit(recording(log, base + i)) for i in range(200)]
            for i, task in enumerate(tasks):
                assert engine.wait(task).result() == base + i
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    assert sorted(log) == [1000 * k + i for k in range(4) for i in range(200)]
    for k in range(4):  # each thread's own order is kept
        own = [n for n in log if n // 1000 == k]
        assert own == sorted(own)
    engine.stop()


@both
def test_a_blocking_operation_runs_after_earlier_ones(make: Make) -> None:
    engine, log = make(), []
    engine.submit(recording(log, 0))
    assert engine.run(recording(log, 1)).result() == 1
    assert log == [0, 1]
    engine.stop()


@both
def test_a_blocking_operation_runs_in_the_callers_thread_when_nobody_else_drives(
    make: Make,
) -> None:
    engine = make()
    where: list[int] = []

    def start() -> Work:
        where.append(threading.get_ident())
        return Completed()

    assert engine.run(task(start, lambda: "value")).result() == "value"
    assert where == [threading.get_ident()]
    engine.stop()


def by_name(trace: Callable[[Task], None] | None = None) -> Engine:
    return Engine(_ByName(), WORLD, trace)


@pytest.mark.parametrize("make", [by_name, negotiating])
def test_an_error_belongs_to_its_task_and_the_next_one_runs(make: Make) -> None:
    engine = make()

    def refuse() -> Work:
        raise RuntimeError("refused")

    bad = engine.submit(task(refuse, lambda: None))
    good = engine.submit(task(Completed, lambda: 7))
    assert engine.wait(good).result() == 7
    with pytest.raises(RuntimeError, match="refused"):
        engine.wait(bad).result()
    late = engine.run(task(Completed, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        late.result()
    engine.stop()


def test_where_order_matches_nothing_runs_after_an_error() -> None:
    """Peers may have started what failed here, and would take the next operation for it."""
    engine, log = ordered(), []

    def refuse() -> Work:
        raise RuntimeError("refused")

    bad, queued = engine.submit(task(refuse, lambda: None)), engine.submit(recording(log, 1))
    with pytest.raises(RuntimeError, match="refused"):
        engine.wait(bad).result()
    for later in (engine.wait(queued), engine.run(recording(log, 2))):
        with pytest.raises(HorovodInternalError, match=r"earlier operation failed \(refused\)"):
            later.result()
    assert log == []
    engine.stop()


@both
def test_a_task_is_done_only_when_its_work_is(make: Make) -> None:
    engine, gate = make(), Gate()
    gated = engine.submit(task(lambda: gate, lambda: "finished"))
    assert not gated.done()
    gate.opened.set()
    assert engine.wait(gated).result() == "finished"
    assert gated.done()
    engine.stop()


def test_inline_tasks_start_at_once_and_complete_in_any_order() -> None:
    engine = ordered()
    gates = [Gate(), Gate()]
    started: list[int] = []

    def make(i: int) -> Task:
        def start() -> Work:
            started.append(i)
            return gates[i]

        return task(start, lambda: i, inline=True)

    first, second = engine.submit(make(0)), engine.submit(make(1))
    assert started == [0, 1]
    gates[1].opened.set()
    assert second.done()
    assert not first.done()
    assert engine.wait(second).result() == 1
    gates[0].opened.set()
    assert engine.wait(first).result() == 0
    engine.stop()


@pytest.mark.parametrize("by_name", [False, True])
def test_inline_tasks_wait_for_queued_ones_only_where_order_counts(by_name: bool) -> None:
    """Where names match, a peer may wait for the inline task before it comes to the queued one."""
    engine = Engine(_ByName() if by_name else SerialBackend(), WORLD)
    gate, started = Gate(), threading.Event()

    def start() -> Work:
        started.set()
        return Completed()

    queued = engine.submit(task(lambda: gate, lambda: None))
    inline = task(start, lambda: None, inline=True)
    submitter = threading.Thread(target=engine.submit, args=(inline,))
    submitter.start()
    assert started.wait(PATIENCE if by_name else 0.2) is by_name
    gate.opened.set()
    submitter.join(PATIENCE)
    assert started.is_set()
    engine.wait(queued)
    engine.stop()


@both
def test_stop_completes_what_was_submitted_and_ends_the_thread(make: Make) -> None:
    engine, log = make(), []
    before = threading.active_count()
    for i in range(20):
        engine.submit(recording(log, i))
    engine.stop()
    assert log == list(range(20))
    assert threading.active_count() == before
    for call in (engine.submit, engine.run):
        with pytest.raises(HorovodInternalError, match="after shutdown"):
            call(recording(log, 20))
    assert len(log) == 20


def test_handles_are_integers_used_once() -> None:
    table = HandleTable()
    one = task(Completed, lambda: None)
    handle = table.add(one)
    assert isinstance(handle, int)
    assert table.get(handle) is one
    assert table.pop(handle) == (one, None, False)
    assert table.pop(handle) is None


def test_trace_sees_each_task_once_with_its_label_and_size() -> None:
    seen: list[tuple[str, int]] = []
    engine = ordered(lambda task: seen.append((task.label, task.items)))

    def make(name: str, inline: bool, items: int) -> Task:
        return Task(
            lambda peers: Completed(), lambda: 1, Proposal("allreduce", name), inline, items
        )

    for one in (make("allreduce.x", False, 3), make("allreduce.y", True, 4)):
        engine.submit(one)
        engine.wait(one)
        engine.wait(one)
    engine.stop()
    assert seen == [("allreduce.x", 3), ("allreduce.y", 4)]
