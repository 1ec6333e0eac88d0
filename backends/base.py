"""The contract between the public API and an engine: about a dozen small methods.

A backend moves flat contiguous tensors between the ranks of a group and knows nothing else.
Argument checks, averages, scale factors, compression, odd layouts, handles, autograd and Adasum
are written once above it (``unidist/ops.py``, ``unidist/layout.py``), so a backend holds only
what differs: the native call, the native group, and which dtypes the native call takes.

Ranks in these methods are ranks *in the group*; ``Group.ranks`` translates them to the world.
Every method but ``send`` and ``recv`` must be called by all ranks of the group, in one order
(unless ``matches_by_name``).
"""

from __future__ import annotations

import enum
import json
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from unidist.backends.errors import HorovodInternalError

if TYPE_CHECKING:
    from unidist.launch import Launch


class ReduceOp(enum.Enum):
    """What a backend may be asked to do with two elements."""

    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"
    ADASUM = "Adasum"


class Capability(enum.Enum):
    """What some backends can do by themselves; the layer above works around a missing one."""

    ADASUM = "native Adasum"
    CUDA = "device tensors without a copy through the host"


@dataclass(frozen=True, eq=False)
class Group:
    """An ordered set of world ranks with a communication context of its own.

    ``rank`` is this process' index in ``ranks``, or None when it is not a member.
    ``native`` belongs to the backend that made the group.
    """

    ranks: tuple[int, ...]
    rank: int | None
    native: Any = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def me(self) -> int:
        """This process' rank in the group; the layer above never passes a group to a non-member."""
        assert self.rank is not None, "a collective reached a backend on a non-member rank"
        return self.rank


class Work(ABC):
    """A started operation. It keeps the buffers it uses alive until it is done."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the operation is done; HorovodInternalError when it failed or timed out."""

    @abstractmethod
    def done(self) -> bool:
        """True when ``wait`` would not block."""


class Completed(Work):
    """The work of an operation that was finished by the time its method returned."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


class WorkGroup(Work):
    """Several works waited for together, with buffers kept alive until then."""

    def __init__(self, works: Sequence[Work], keep: Any = None) -> None:
        self._works = list(works)
        self._keep = keep

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._keep = None

    def done(self) -> bool:
        return all(work.done() for work in self._works)


class Rows(Work):
    """An ``allgather_rows`` under way; ``output`` is complete after ``wait``."""

    def __init__(self, work: Work, output: torch.Tensor | None) -> None:
        self._work = work
        self._output = output

    def wait(self) -> None:
        self._work.wait()

    def done(self) -> bool:
        return self._work.done()

    @property
    def output(self) -> torch.Tensor:
        assert self._output is not None
        return self._output


# What every engine's all-reduce is given by the layer above at least; anything else is widened
# to one of these (layout.py) unless the backend's ``reduce_dtypes`` says it takes it as it is.
COMMON_REDUCE_DTYPES = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})

#: what a backend names that does its arithmetic with torch, and so takes every real number
REAL_DTYPES = COMMON_REDUCE_DTYPES | {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.float16,
    torch.bfloat16,
}

#: bytes of a control message that travel with its length
_INLINE = 1024


class Backend(ABC):
    """One engine. ``init`` connects it, ``shutdown`` disconnects it; it can be connected again."""

    name: ClassVar[str]
    #: True when the engine itself matches operations by name, so that ranks may start them in
    #: different orders; otherwise all ranks must start them in one order
    matches_by_name: ClassVar[bool] = False
    capabilities: frozenset[Capability] = frozenset()
    #: what the live engine moves data with: some of "mpi", "mpi_threads" (MPI with
    #: THREAD_MULTIPLE), "gloo", "nccl"
    transports: frozenset[str] = frozenset()
    #: dtypes that ``allreduce`` takes without conversion
    reduce_dtypes: frozenset[torch.dtype] = COMMON_REDUCE_DTYPES
    #: dtypes that ``broadcast`` and ``allgather`` take; others arrive as uint8 views
    move_dtypes: frozenset[torch.dtype] = frozenset({torch.uint8})
    #: the group of all ranks, set by ``init``
    world: Group

    # -- life ---------------------------------------------------------------------------------

    @abstractmethod
    def init(self, launch: Launch, timeout: float, comm: Any = None) -> None:
        """Connect to the peers and set ``world``.

        Args:
            launch: who started this process and as which rank (see ``unidist/launch.py``).
            timeout: seconds after which connecting, and later any single wait, is an error.
            comm: an mpi4py communicator whose processes are the world, or None for all.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything ``init`` and ``new_group`` made. Callable once per ``init``."""

    def abort(self) -> None:
        """End the job after a failure on this rank; does not return.

        Ends this process at once: an orderly exit would wait for peers that wait for this rank.
        The launcher, or the broken connection, ends the others.
        """
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    @abstractmethod
    def new_group(self, ranks: Sequence[int]) -> Group:
        """Make a group of world ranks. Called by *all* ranks of the world, with equal ranks."""

    @abstractmethod
    def free_group(self, group: Group) -> None:
        """Release a group of ``new_group``. Called by all ranks of the world."""

    def clone_group(self, group: Group) -> Group:
        """Make another group of the same ranks, whose operations are ordered among themselves only.

        Called by the group's members. Operations of the two may be under way at the same time, in
        different threads. Where that cannot be had, or is not needed since the engine matches by
        name, the group itself is returned.
        """
        return group

    # -- collectives on flat contiguous tensors -------------------------------------------------

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, group: Group, name: str) -> Work:
        """Reduce ``tensor`` over the group, in place; every rank ends with identical bits."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, group: Group, name: str) -> Work:
        """Fill ``tensor`` with the root's."""

    @abstractmethod
    def allgather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        group: Group,
        name: str,
    ) -> Work:
        """Concatenate the ranks' tensors in rank order into ``output``.

        ``counts[r]`` is the number of elements of rank r; ``sum(counts)`` is output's.
        """

    def allgather_rows(self, tensor: torch.Tensor, group: Group, name: str) -> Rows:
        """Concatenate contiguous tensors along dim 0, whose length may differ between ranks.

        Raises:
            HorovodInternalError: dtypes or the other dimensions differ, on every rank.
        """
        mine = (str(tensor.dtype), *tensor.shape)
        peers = [json.loads(record) for record in self.exchange(json.dumps(mine).encode(), group)]
        if any([dtype, *shape[1:]] != [peers[0][0], *peers[0][2:]] for dtype, *shape in peers):
            found = ", ".join(
                f"rank {rank}: {dtype} {tuple(shape)}"
                for rank, (dtype, *shape) in zip(group.ranks, peers, strict=True)
            )
            raise HorovodInternalError(
                f"allgather {name!r} needs equal dtypes and equal dimensions after the first on "
                f"all ranks, but got {found}."
            )
        rows = [shape[0] for _, *shape in peers]
        output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        if output.numel() == 0:
            return Rows(Completed(), output)
        width = output.numel() // output.shape[0]
        counts = [count * width for count in rows]
        work = self.allgather(output.view(-1), tensor.view(-1), counts, group, name)
        return Rows(work, output)

    @abstractmethod
    def barrier(self, group: Group) -> Work:
        """Done once every rank of the group has called it."""

    def exchange(self, payload: bytes, group: Group) -> list[bytes]:
        """Give every rank every rank's ``payload`` (of any length), in rank order. Blocks.

        One message in the common case: the length, and with it the payload if it is short.
        """
        head = torch.zeros(8 + _INLINE, dtype=torch.uint8, device="cpu")
        head[:8].view(torch.int64)[0] = len(payload)
        mine = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
        short = min(len(payload), _INLINE)
        head[8 : 8 + short] = mine[:short]
        heads = head.new_empty(group.size * head.numel())
        counts = [head.numel()] * group.size
        self.allgather(heads, head, counts, group, "control.head").wait()
        rows = heads.split(head.numel())
        lengths = [int(row[:8].view(torch.int64)[0]) for row in rows]
        if max(lengths) <= _INLINE:
            parts = [row[8 : 8 + n] for row, n in zip(rows, lengths, strict=True)]
        else:
            output = head.new_empty(sum(lengths))
            self.allgather(output, mine, lengths, group, "control.body").wait()
            parts = list(output.split(lengths))
        return [part.numpy().tobytes() for part in parts]

    # -- point to point -------------------------------------------------------------------------

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int, group: Group) -> Work:
        """Send to one rank. Messages between two ranks of a group arrive in order."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int, group: Group) -> Work:
        """Fill ``tensor`` with the next message of one rank; sizes must agree."""
