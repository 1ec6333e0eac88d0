"""Operations under way, and the integers that name them to the caller."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unidist.backends.base import Work


class Task:
    """One operation: ``start`` gives it to the backend, ``finish`` turns its output to a result.

    Whoever needs the result first completes the task: the engine's thread, or the waiter itself.
    An exception of either part is kept, and raised by ``result`` to the caller who waits.
    """

    def __init__(
        self,
        start: Callable[[], Work],
        finish: Callable[[], Any],
        inline: bool = False,
        label: str = "",
        items: int = 0,
    ) -> None:
        #: what UNIDIST_DEBUG prints: the operation's name and its number of elements
        self.label = label
        self.items = items
        #: started by the thread that submits it (device tensors: its stream orders the work)
        self.inline = inline
        self.finished = False
        self._start: Callable[[], Work] | None = start
        self._finish: Callable[[], Any] | None = finish
        self._work: Work | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        # The mode belongs to the thread that made the tensors; the engine's thread takes it over.
        self._inference = torch.is_inference_mode_enabled()

    def start(self) -> None:
        """Give the operation to the backend; a second call does nothing."""
        with self._lock:
            self._start_locked()

    def _start_locked(self) -> None:
        if self._start is None:
            return
        start, self._start = self._start, None
        try:
            with self._mode():
                self._work = start()
        except BaseException as error:
            self._fail(error)

    def complete(self) -> None:
        """Start if need be, wait, finish. Blocks; never raises what the operation raised."""
        with self._lock:
            self._start_locked()
            if self.finished:
                return
            assert self._work is not None
            assert self._finish is not None
            try:
                with self._mode():
                    self._work.wait()
                    self._value = self._finish()
            except BaseException as error:
                self._fail(error)
            # Buffers are released now, not when the caller forgets the handle.
            self._work = self._finish = None
            self.finished = True

    def _mode(self) -> AbstractContextManager[Any]:
        if self._inference == torch.is_inference_mode_enabled():
            return nullcontext()
        return torch.inference_mode(self._inference)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._work = self._finish = None
        self.finished = True

    def done(self) -> bool:
        """Whether ``complete`` would return without waiting for a peer."""
        if self.finished or not self.inline:
            # A queued task's work belongs to the thread that drives the queue.
            return self.finished
        work = self._work
        return work is not None and work.done()

    def result(self) -> Any:
        """The value of a finished task; raises what the operation raised."""
        assert self.finished
        if self._error is not None:
            raise self._error
        return self._value


class HandleTable:
    """Integer handles of operations whose result has not been fetched.

    ``single`` marks an operation on one tensor whose task's value is a list of one.
    """

    def __init__(self) -> None:
        self._tasks: dict[int, tuple[Task, bool]] = {}
        self._next = itertools.count()

    def add(self, task: Task, single: bool = False) -> int:
        handle = next(self._next)
        self._tasks[handle] = (task, single)
        return handle

    def get(self, handle: int) -> Task | None:
        entry = self._tasks.get(handle)
        return entry[0] if entry else None

    def pop(self, handle: int) -> tuple[Task, bool] | None:
        return self._tasks.pop(handle, None)
