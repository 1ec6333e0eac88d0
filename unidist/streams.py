"""Device tensors in the engine's thread: ordered with the stream of the thread that submitted them.

Kernels are ordered by the stream they are launched on, and each thread has a current stream of its
own. So the engine works on a side stream, which first waits for what the submitter had launched,
and whoever takes the result makes their own stream wait for the side stream. No thread blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class StreamOrder:
    """Orders one operation on CUDA tensors between two threads."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._device = tensors[0].device
        self._side = torch.cuda.Stream(self._device)
        self._submitted = torch.cuda.current_stream(self._device).record_event()
        self._finished: Any = None
        for tensor in tensors:  # their memory may not be given away while the side stream reads it
            tensor.record_stream(self._side)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work on the side stream, after what had been launched at the submission."""
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._submitted)
            yield
            self._finished = self._side.record_event()

    def join(self, results: Sequence[Any]) -> None:
        """Let the caller's stream wait for the results."""
        stream = torch.cuda.current_stream(self._device)
        if self._finished is not None:
            stream.wait_event(self._finished)
        for result in results:
            if isinstance(result, torch.Tensor) and result.is_cuda:
                result.record_stream(stream)


def order_of(tensors: Sequence[torch.Tensor]) -> StreamOrder | None:
    """The order for an operation on these tensors; None when none of them is on a device."""
    on_device = [tensor for tensor in tensors if tensor.is_cuda]
    return StreamOrder(on_device) if on_device else None
