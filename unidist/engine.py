"""The order in which operations reach the backend, and the thread that keeps them going.

Two kinds of threads drive the operations of a group, one at a time::

    submit ──► operations ──► engine thread: advances them, again and again
                    └──► a waiter: advances them until its own is done, when nobody else is at it

A blocking operation is advanced by its caller at once, with no hand-over between threads.
Operations submitted asynchronously, such as gradient buckets in the midst of backward, are
advanced by the thread. Waiters sleep while another drives, and return as soon as their own task is
finished.

What advancing is, the two kinds of engine differ in. This one completes the oldest task: it serves
where the order of submission is the same on all ranks, as that of an optimizer's buckets is, and
where the backend itself matches operations by name. The other one (``negotiation.py``) lets ranks
submit in different orders.

Operations that the backend matches by name itself, and those on device tensors whose order the
caller's stream keeps, are started by the submitter and completed by whoever waits (``inline``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from unidist.backends.base import Backend, Group
from unidist.backends.errors import HorovodInternalError
from unidist.handles import Task

Value = TypeVar("Value")


class Engine:
    """Drives the tasks of one group in order of submission; safe to use from several threads.

    Args:
        trace: called with each completed task, by the thread that completed it.
    """

    def __init__(
        self, backend: Backend, group: Group, trace: Callable[[Task], None] | None = None
    ) -> None:
        self.backend = backend
        self.group = group
        #: how many operations it has been given
        self.submitted = 0
        self._trace = trace
        self._queue: deque[Task] = deque()
        lock = threading.Lock()
        self._submitted = threading.Condition(lock)  # the engine thread sleeps on this
        self._completed = threading.Condition(lock)  # waiters sleep on this
        self._busy = False  # somebody is advancing the tasks, or talks to the backend alone
        self._failure = ""  # what failed first, where nothing can be started after that
        self._stopping = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> Task:
        """Queue a task; the engine thread will complete it."""
        if task.inline:
            self._start_inline(task)
            if task.failed:
                task.result()  # what the backend refuses at once is raised at once
            return task
        with self._submitted:
            self._enqueue(task)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="unidist-engine", daemon=True
                )
                self._thread.start()
            self._submitted.notify()
        return task

    def run(self, task: Task) -> Task:
        """Complete a task in the caller's thread, when nobody else is at it."""
        if task.inline:
            self._start_inline(task)
        else:
            with self._submitted:
                self._enqueue(task)
        return self.wait(task)

    def wait(self, task: Task) -> Task:
        """Return when a submitted task is finished, helping if the engine thread is idle."""
        if task.inline:
            task.complete()
            self._traced(task)
            return task
        with self._completed:
            self._await(task)
            while not task.finished:
                if self._busy:
                    self._completed.wait()
                else:
                    self._advance()
        return task

    def call(self, function: Callable[[], Value], name: str) -> Value:
        """Call ``function``, which talks to the backend itself; all ranks of the group do so.

        Args:
            name: what it does, equal on all ranks.
        """
        del name
        with self._completed:
            while self._busy or self._has_work():
                if self._busy:
                    self._completed.wait()
                else:
                    self._advance()
            return self._unlocked(function)

    def exchange(self, data: bytes, name: str) -> list[bytes]:
        """Every rank's data, of any length, in rank order. All ranks of the group call it."""
        if self.backend.matches_by_name:  # threads of two ranks may come in different orders
            return self.backend.exchange(data, self.group, name)
        return self.call(lambda: self.backend.exchange(data, self.group, name), name)

    def stop(self) -> None:
        """Complete what was submitted, and end the thread. Nothing can be submitted any more."""
        with self._completed:
            self._stopping = True
            while self._busy or self._has_work():
                if self._busy:
                    self._completed.wait()
                else:
                    self._advance()
            self._stopped = True
            self._submitted.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # -- with the lock held ---------------------------------------------------------------------

    def _check_running(self, task: Task) -> None:
        if self._stopped:
            raise HorovodInternalError(
                f"Operation {task.label!r} was submitted after shutdown(). Call init() again."
            )

    def _cannot_start(self, task: Task) -> HorovodInternalError:
        return HorovodInternalError(
            f"{task.label} cannot start, since an earlier operation failed ({self._failure}) Call "
            "shutdown() and init() on all ranks to go on."
        )

    def _enqueue(self, task: Task) -> None:
        self._check_running(task)
        self.submitted += 1
        self._queue.append(task)

    def _has_work(self) -> bool:
        return bool(self._queue)

    def _await(self, task: Task) -> None:
        """A thread begins to wait for the task."""

    def _advance(self) -> None:
        task = self._queue.popleft()
        self._unlocked(lambda: self._complete(task))

    def _unlocked(self, function: Callable[[], Value]) -> Value:
        """Call ``function`` as the only driver, with the lock released meanwhile."""
        self._busy = True
        self._completed.release()
        try:
            return function()
        finally:
            self._completed.acquire()
            self._busy = False
            self._completed.notify_all()
            if self._has_work():
                self._submitted.notify()

    # -- without it -----------------------------------------------------------------------------

    def _complete(self, task: Task) -> None:
        if self._failure:
            task.fail(self._cannot_start(task))
        task.start(None)
        task.complete()
        if not task.failed:
            self.backend.progressed = time.monotonic()
        elif not self.backend.matches_by_name:
            # Peers may have started what this rank has not, and would take the next for it.
            self._failure = self._failure or str(task.error)
        self._traced(task)

    def _traced(self, task: Task) -> None:
        if self._trace is not None and not task.traced:
            task.traced = True
            self._trace(task)

    def _start_inline(self, task: Task) -> None:
        self._check_running(task)
        self.submitted += 1
        # Tasks that wait in the queue were submitted earlier, so they start earlier: where order
        # is what matches. Where names do, a peer may be waiting for this one first.
        if not self.backend.matches_by_name and (self._queue or self._busy):
            self.call(lambda: task.start(None), "")
        else:
            task.start(None)

    def _run(self) -> None:
        with self._submitted:
            while True:
                while self._busy or not self._has_work():
                    if self._stopped:
                        return
                    self._submitted.wait()
                self._advance()
