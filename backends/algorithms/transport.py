"""What an algorithm may know of the world: a rank, a size, and messages in order.

``wire`` turns a tensor into the buffer that messages are cut from. An algorithm calls it once for
each tensor and slices the result in bytes, since making a buffer per segment would cost more than
sending a small one.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Request(Protocol):
    """A message under way; its buffer may be touched only after ``wait``."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Messages between two ranks arrive in the order in which they were sent."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def isend(self, buffer: memoryview, dst: int) -> Request: ...

    def irecv(self, buffer: memoryview, src: int) -> Request: ...


def wire(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a flat contiguous CPU tensor of any dtype, without a copy."""
    return tensor.view(torch.uint8).numpy().data


class _Sent:
    def wait(self) -> None:
        return None


#: the request of a message that has no bytes and so is never sent
NOTHING: Request = _Sent()
