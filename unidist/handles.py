"""Operations under way, and the integers that name them to the caller."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from unidist.backends.base import Work
from unidist.streams import StreamOrder


@dataclass
class Proposal:
    """What a rank tells the others of an operation before data moves (see negotiation.py)."""

    kind: str
    #: equal on all ranks, and unique among the operations under way in a group
    name: str
    #: what must be equal on all ranks, by the name it has in errors; values are those of JSON
    terms: dict[str, Any] = field(default_factory=dict)
    #: what may differ between ranks, such as a number of rows; a value of JSON
    own: Any = None
    #: the data itself, where it is short
    payload: bytes | None = None


#: what all ranks of the group told; None for a rank that has joined
Peers = Sequence[Proposal | None]


class Task:
    """One operation: ``start`` gives it to the backend, ``finish`` turns its output to a result.

    Whoever needs the result first completes the task: the engine's thread, or the waiter itself.
    An exception of either part is kept, and raised by ``result`` to the caller who waits.

    Args:
        start: called with what the peers told, or None where the engine does not negotiate.
        inline: started by the thread that submits it (device tensors: its stream orders the work).
        proposal: what the peers are told.
        items: the number of elements, for traces.
        order: of the streams, where the tensors are on a device and another thread may work.
    """

    def __init__(
        self,
        start: Callable[[Peers | None], Work],
        finish: Callable[[], Any],
        proposal: Proposal,
        inline: bool = False,
        items: int = 0,
        order: StreamOrder | None = None,
    ) -> None:
        self.proposal = proposal
        self.items = items
        self.inline = inline
        self.finished = False
        #: a thread has begun to wait for it
        self.awaited = False
        self.traced = False
        #: seconds of time.perf_counter(): submitted, given to the backend, finished
        self.submitted_at = time.perf_counter()
        self.started_at = self.finished_at = self.submitted_at
        self._start: Callable[[Peers | None], Work] | None = start
        self._finish: Callable[[], Any] | None = finish
        self._work: Work | None = None
        self._value: Any = None
        #: what ``result`` raises
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._order = order
        # The mode belongs to the thread that made the tensors; the engine's thread takes it over.
        self._inference = torch.is_inference_mode_enabled()

    @property
    def label(self) -> str:
        """Its name in errors and traces."""
        return self.proposal.name

    def then(self, function: Callable[[Any], Any]) -> None:
        """Let the value be ``function`` of what it would be. Called before the task is started."""
        finish = self._finish
        assert finish is not None
        self._finish = lambda: function(finish())

    def start(self, peers: Peers | None) -> None:
        """Give the operation to the backend; a second call does nothing."""
        with self._lock:
            if self._start is None:
                return
            start, self._start = self._start, None
            self.started_at = time.perf_counter()
            try:
                with self._mode():
                    self._work = start(peers)
            except BaseException as error:
                self._end(error)

    def complete(self) -> None:
        """Wait for what was started, and finish. Blocks; never raises what the operation raised."""
        with self._lock:
            if self.finished:
                return
            assert self._work is not None
            assert self._finish is not None
            try:
                with self._mode():
                    self._work.wait()
                    self._value = self._finish()
            except BaseException as error:
                self._end(error)
            else:
                self._end()

    def fail(self, error: BaseException) -> None:
        """End a task that must not start, or whose start nobody will complete."""
        with self._lock:
            if not self.finished:
                self._end(error)

    def succeed(self, value: Any) -> None:
        """End a task that is nothing but the agreement to it."""
        with self._lock:
            self._value = value
            self._end()

    @contextmanager
    def _mode(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self._inference))
            if self._order is not None:
                stack.enter_context(self._order.entered())
            yield

    def _end(self, error: BaseException | None = None) -> None:
        self.error = error
        # Buffers are released now, not when the caller forgets the handle.
        self._start = self._work = self._finish = None
        self.finished_at = time.perf_counter()
        self.finished = True

    @property
    def failed(self) -> bool:
        """Whether it is finished, and ``result`` will raise."""
        return self.error is not None

    def done(self) -> bool:
        """Whether the result can be had without waiting for a peer."""
        if self.finished or not self.inline:
            # A queued task's work belongs to the thread that drives the queue.
            return self.finished
        work = self._work
        return work is not None and work.done()

    def result(self) -> Any:
        """The value of a finished task; raises what the operation raised."""
        assert self.finished
        if self.error is not None:
            raise self.error
        if self._order is not None:
            values = self._value if isinstance(self._value, (list, tuple)) else [self._value]
            self._order.join(values)
        return self._value


class HandleTable:
    """Integer handles of operations whose result has not been fetched.

    Each is kept with the engine that drives it; ``single`` marks an operation on one tensor whose
    task's value is a list of one.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Task, Any, bool]] = {}
        self._next = itertools.count()

    def add(self, task: Task, engine: Any = None, single: bool = False) -> int:
        handle = next(self._next)
        self._entries[handle] = (task, engine, single)
        return handle

    def get(self, handle: int) -> Task | None:
        entry = self._entries.get(handle)
        return entry[0] if entry else None

    def pop(self, handle: int) -> tuple[Task, Any, bool] | None:
        return self._entries.pop(handle, None)
