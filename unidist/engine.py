"""The order in which operations reach the backend, and the thread that keeps them going.

torch.distributed and MPI match operations by the order in which each rank starts them. Here they
are started in the order of submission, one at a time. Two kinds of threads drive the queue:

    submit ──► queue ──► engine thread: completes the oldest task, again and again
                    └──► a waiter: completes tasks up to its own, when the thread is not at it

A blocking operation is run by its caller at once, with no hand-over between threads. Operations
submitted asynchronously, such as gradient buckets in the midst of backward, are run by the
thread. The lock between the two is a sleeping one: a waiter takes no core from the thread.

Operations that the backend matches by name itself, and those on device tensors whose order the
caller's stream keeps, are started by the submitter and completed by whoever waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from unidist.handles import Task

Value = TypeVar("Value")


class Engine:
    """Drives tasks in order of submission; safe to use from several threads."""

    def __init__(self, trace: Callable[[Task, float], None] | None = None) -> None:
        #: called with each completed task and the seconds that completing it took
        self._trace = trace
        self._queue: deque[Task] = deque()
        self._submitting = threading.Lock()
        self._driving = threading.Lock()
        self._wake = threading.Semaphore(0)
        self._stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> Task:
        """Queue a task; the engine thread will complete it."""
        if task.inline:
            self._submit_inline(task)
            return task
        with self._submitting:
            self._queue.append(task)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="unidist-engine", daemon=True
                )
                self._thread.start()
        self._wake.release()
        return task

    def run(self, task: Task) -> Task:
        """Complete a task after all that were submitted before it, in the caller's thread."""
        if task.inline:
            self._submit_inline(task)
            self._complete(task)
            return task
        with self._submitting:
            self._queue.append(task)
        self._drive_until(task)
        return task

    def wait(self, task: Task) -> Task:
        """Return when a submitted task is finished, helping if the engine thread is idle."""
        if task.inline:
            self._complete(task)
        elif not task.finished:
            self._drive_until(task)
        return task

    def drain(self) -> None:
        """Complete everything that was submitted."""
        self.alone(lambda: None)

    def alone(self, function: Callable[[], Value]) -> Value:
        """Call ``function``, which talks to the backend itself, after all that was submitted."""
        with self._driving:
            while self._queue:
                self._complete(self._queue.popleft())
            return function()

    def stop(self) -> None:
        """Complete what was submitted, and end the thread."""
        self.drain()
        if self._thread is not None:
            self._stopping = True
            self._wake.release()
            self._thread.join()
            self._thread = None

    def _complete(self, task: Task) -> None:
        if self._trace is None or task.finished:
            task.complete()
            return
        begin = time.perf_counter()
        task.complete()
        self._trace(task, time.perf_counter() - begin)

    def _submit_inline(self, task: Task) -> None:
        # Tasks that wait in the queue were submitted earlier, so they start earlier.
        if self._queue:
            self.drain()
        with self._submitting:
            task.start()

    def _drive_until(self, task: Task) -> None:
        with self._driving:
            while not task.finished:
                self._complete(self._queue.popleft())

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._stopping:
                return
            with self._driving:
                # A waiter may have taken the task of this wake-up: then there is nothing to do.
                if self._queue:
                    self._complete(self._queue.popleft())
