"""The order in which operations reach the backend, and the thread that keeps them going.

torch.distributed and MPI match operations by the order in which each rank starts them. Here they
are started in the order of submission, one at a time. Two kinds of threads drive the queue:

    submit ──► queue ──► engine thread: completes the oldest task, again and again
                    └──► a waiter: completes tasks up to its own, when nobody else is at it

A blocking operation is run by its caller at once, with no hand-over between threads. Operations
submitted asynchronously, such as gradient buckets in the midst of backward, are run by the
thread. Waiters sleep while another drives, and return as soon as their own task is finished.

Operations that the backend matches by name itself, and those on device tensors whose order the
caller's stream keeps, are started by the submitter and completed by whoever waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from unidist.backends.errors import HorovodInternalError
from unidist.handles import Task

Value = TypeVar("Value")


class Engine:
    """Drives the tasks of one group in order of submission; safe to use from several threads.

    Args:
        trace: called with each completed task and the seconds that completing it took.
    """

    def __init__(self, trace: Callable[[Task, float], None] | None = None) -> None:
        self._trace = trace
        self._queue: deque[Task] = deque()
        lock = threading.Lock()
        self._submitted = threading.Condition(lock)  # the engine thread sleeps on this
        self._completed = threading.Condition(lock)  # waiters sleep on this
        self._busy = False  # somebody is completing a task, or talks to the backend alone
        self._stopped = False
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> Task:
        """Queue a task; the engine thread will complete it."""
        if task.inline:
            self._start_inline(task)
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
        """Complete a task after all that were submitted before it, in the caller's thread."""
        if task.inline:
            self._start_inline(task)
        else:
            with self._submitted:
                self._enqueue(task)
        return self.wait(task)

    def wait(self, task: Task) -> Task:
        """Return when a submitted task is finished, helping if the engine thread is idle."""
        if task.inline:
            self._complete(task)
            return task
        with self._completed:
            while not task.finished:
                if self._busy:
                    self._completed.wait()
                else:
                    self._complete_next()
        return task

    def alone(self, function: Callable[[], Value]) -> Value:
        """Call ``function``, which talks to the backend itself, after all that was submitted."""
        with self._completed:
            while self._busy or self._queue:
                if self._busy:
                    self._completed.wait()
                else:
                    self._complete_next()
            return self._unlocked(function)

    def stop(self) -> None:
        """Complete what was submitted, and end the thread. Nothing can be submitted any more."""
        self.alone(lambda: None)
        with self._submitted:
            self._stopped = True
            self._submitted.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # -- with the lock held ---------------------------------------------------------------------

    def _enqueue(self, task: Task) -> None:
        if self._stopped:
            raise HorovodInternalError(
                f"Operation {task.label!r} was submitted after shutdown(). Call init() again."
            )
        self._queue.append(task)

    def _complete_next(self) -> None:
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
            if self._queue:
                self._submitted.notify()

    # -- without it -----------------------------------------------------------------------------

    def _complete(self, task: Task) -> None:
        if self._trace is None or task.finished:
            task.complete()
            return
        begin = time.perf_counter()
        task.complete()
        self._trace(task, time.perf_counter() - begin)

    def _start_inline(self, task: Task) -> None:
        if self._stopped:
            raise HorovodInternalError(
                f"Operation {task.label!r} was submitted after shutdown(). Call init() again."
            )
        # Tasks that wait in the queue were submitted earlier, so they start earlier.
        if self._queue or self._busy:
            self.alone(task.start)
        else:
            task.start()

    def _run(self) -> None:
        with self._submitted:
            while True:
                while self._busy or not self._queue:
                    if self._stopped:
                        return
                    self._submitted.wait()
                self._complete_next()
