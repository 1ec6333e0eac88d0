"""The engine: order of submission, help by waiters, errors, and inline tasks."""

from __future__ import annotations

import threading

import pytest

from unidist.backends.base import Completed, Work
from unidist.engine import Engine
from unidist.handles import HandleTable, Task

PATIENCE = 30.0


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

    return Task(start, lambda: number)


def test_tasks_run_in_order_of_submission_whoever_waits_first() -> None:
    engine, log = Engine(), []
    tasks = [engine.submit(recording(log, i)) for i in range(50)]
    assert [engine.wait(task).result() for task in reversed(tasks)] == list(range(49, -1, -1))
    assert log == list(range(50))
    engine.stop()


def test_submissions_from_several_threads_all_complete() -> None:
    engine, log = Engine(), []
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


def test_a_blocking_operation_runs_after_earlier_ones() -> None:
    engine, log = Engine(), []
    engine.submit(recording(log, 0))
    assert engine.run(recording(log, 1)).result() == 1
    assert log == [0, 1]
    engine.stop()


def test_a_blocking_operation_runs_in_the_callers_thread_when_nobody_else_drives() -> None:
    engine = Engine()
    where: list[int] = []

    def start() -> Work:
        where.append(threading.get_ident())
        return Completed()

    assert engine.run(Task(start, lambda: "value")).result() == "value"
    assert where == [threading.get_ident()]
    engine.stop()


def test_an_error_belongs_to_its_task_and_the_next_one_runs() -> None:
    engine = Engine()

    def refuse() -> Work:
        raise RuntimeError("refused")

    bad = engine.submit(Task(refuse, lambda: None))
    good = engine.submit(Task(Completed, lambda: 7))
    assert engine.wait(good).result() == 7
    with pytest.raises(RuntimeError, match="refused"):
        engine.wait(bad).result()
    late = engine.run(Task(Completed, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        late.result()
    engine.stop()


def test_a_task_is_done_only_when_its_work_is() -> None:
    engine, gate = Engine(), Gate()
    task = engine.submit(Task(lambda: gate, lambda: "finished"))
    assert not task.done()
    gate.opened.set()
    assert engine.wait(task).result() == "finished"
    assert task.done()
    engine.stop()


def test_inline_tasks_start_at_once_and_complete_in_any_order() -> None:
    engine = Engine()
    gates = [Gate(), Gate()]
    started: list[int] = []

    def make(i: int) -> Task:
        def start() -> Work:
            started.append(i)
            return gates[i]

        return Task(start, lambda: i, inline=True)

    first, second = engine.submit(make(0)), engine.submit(make(1))
    assert started == [0, 1]
    gates[1].opened.set()
    assert second.done()
    assert not first.done()
    assert engine.wait(second).result() == 1
    gates[0].opened.set()
    assert engine.wait(first).result() == 0
    engine.stop()


def test_stop_completes_what_was_submitted_and_ends_the_thread() -> None:
    engine, log = Engine(), []
    before = threading.active_count()
    for i in range(20):
        engine.submit(recording(log, i))
    engine.stop()
    assert log == list(range(20))
    assert threading.active_count() == before


def test_handles_are_integers_used_once() -> None:
    table = HandleTable()
    task = Task(Completed, lambda: None)
    handle = table.add(task)
    assert isinstance(handle, int)
    assert table.get(handle) is task
    entry = table.pop(handle)
    assert entry == (task, False)
    assert table.pop(handle) is None


def test_trace_sees_each_task_once_with_its_label_and_size() -> None:
    seen: list[tuple[str, int]] = []
    engine = Engine(lambda task, seconds: seen.append((task.label, task.items)))
    task = engine.submit(Task(Completed, lambda: 1, False, "allreduce.x", 3))
    engine.wait(task)
    engine.wait(task)
    inline = engine.submit(Task(Completed, lambda: 1, True, "allreduce.y", 4))
    engine.wait(inline)
    engine.wait(inline)
    engine.stop()
    assert seen == [("allreduce.x", 3), ("allreduce.y", 4)]
