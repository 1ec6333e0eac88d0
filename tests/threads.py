"""A world of threads and queues, for algorithms that know only rank, size, send and receive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from unidist.backends.algorithms.transport import wire
from unidist.backends.base import Completed, Group, Work

#: seconds that any single wait may take before the test fails
PATIENCE = 30.0


class _Delivered:
    def wait(self) -> None:
        return None


class _Receive(Work):
    def __init__(self, source: queue.Queue[bytes], buffer: memoryview) -> None:
        self._source = source
        self._buffer = buffer

    def wait(self) -> None:
        data = self._source.get(timeout=PATIENCE)
        assert len(data) == len(self._buffer), "message and buffer differ in size"
        self._buffer[:] = data

    def done(self) -> bool:
        return not self._source.empty()


class ThreadTransport:
    """One rank's end of a world of threads; counts what it sends, and to whom."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue[bytes]], size: int):
        self.rank = rank
        self.size = size
        self.sent_bytes = 0
        self.sent_messages = 0
        self.destinations: set[int] = set()
        self._queues = queues

    def isend(self, buffer: memoryview, dst: int) -> _Delivered:
        self.sent_bytes += len(buffer)
        self.sent_messages += 1
        self.destinations.add(dst)
        self._queues[self.rank, dst].put(bytes(buffer))
        return _Delivered()

    def irecv(self, buffer: memoryview, src: int) -> _Receive:
        return _Receive(self._queues[src, self.rank], buffer)

    # The point-to-point half of a Backend, over the same queues.

    def send(self, tensor: torch.Tensor, dst: int, group: Group) -> Work:
        self.isend(wire(tensor), dst)
        return Completed()

    def recv(self, tensor: torch.Tensor, src: int, group: Group) -> Work:
        return self.irecv(wire(tensor), src)


def run_threads(size: int, function: Callable[[ThreadTransport], Any]) -> list[Any]:
    """Run ``function`` once per rank; return the values in rank order, or raise what one raised."""
    queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    values: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            values[rank] = function(ThreadTransport(rank, queues, size))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    assert all(q.empty() for q in queues.values()), "a message was sent and never received"
    return values
