"""The contract between the public API and an engine: about a dozen small methods.

A backend moves flat contiguous tensors between the ranks of a group and knows nothing else.
Argument checks, averages, scale factors, compression, odd layouts, handles, autograd and Adasum
are written once above it (``unidist/ops.py``, ``unidist/layout.py``), so a backend holds only
what differs: the native call, the native group, and which dtypes the native call takes.

Ranks in these methods are ranks *in the group*; ``Group.ranks`` translates them to the world.
Every method but ``send`` and ``recv`` must be called by all ranks of the group, in one order
(unless ``matches_by_name``).

Every wait for a peer is watched: see ``Patience`` and ``Watch``.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from unidist.backends.errors import HorovodInternalError, StallError

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


@dataclass(frozen=True)
class Patience:
    """How long to wait for peers, in seconds: until a warning (0 is never), and until an error."""

    warn_after: float
    limit: float

    @classmethod
    def from_environment(cls, env: Mapping[str, str], timeout: float | None) -> Patience:
        """Combine init's ``timeout`` with Horovod's variables.

        HOROVOD_STALL_CHECK_TIME_SECONDS is the time until a warning (60), which
        HOROVOD_STALL_CHECK_DISABLE=1 turns off; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS the time until
        an error, where ``timeout`` does not end the wait earlier. Horovod's own default for it is
        never; here it is ``DEFAULT_TIMEOUT``, and so is a 0.

        Raises:
            ValueError: a variable is not a number of seconds.
        """
        warn_after = _seconds(env, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
        if env.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            warn_after = 0.0
        limits = [_seconds(env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0), timeout or 0.0]
        return cls(warn_after, min((x for x in limits if x > 0), default=DEFAULT_TIMEOUT))


#: seconds that connecting, and later a single wait for the peers, may take; torch's own default
DEFAULT_TIMEOUT = 1800.0

#: seconds of a wait after which the peers are told of it, so that they can say who is missing
_TELLING = 1.0


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of seconds, but is {text!r}.")
    return value


class Watch:
    """Looks at one wait for peers from time to time: warns, and ends it, naming who is missing.

    The ``number``-th collective of a group is in everybody's count the same one. A rank that has
    waited for a second tells the others which number it is at.
    """

    def __init__(self, backend: Backend, group: Group, number: int, what: str) -> None:
        self._backend = backend
        self._group = group
        self._number = number
        self._what = what
        self._begin = time.monotonic()
        self._told = self._warned = False

    def begin(self) -> None:
        """The wait begins now, and not when the watch was made."""
        self._begin = time.monotonic()

    def look(self) -> None:
        """Called again and again during the wait.

        Raises:
            StallError: the wait has reached its limit.
        """
        patience = self._backend.patience
        waited = time.monotonic() - max(self._begin, self._backend.progressed)
        if waited < min(_TELLING, patience.limit / 2, (patience.warn_after or _TELLING) / 2):
            return
        if not self._told:
            self._told = True
            self._backend.announce(self._group, self._number)
        if waited > patience.limit:
            raise StallError(self._describe(waited))
        if not self._warned and 0 < patience.warn_after < waited:
            self._warned = True
            waiting = set(self._group.ranks) - set(self.missing())
            if self._backend.world.rank == min(waiting):  # one of them is enough to say so
                text = self._describe(waited)
                print(f"unidist: warning: {text}", file=sys.stderr, flush=True)

    def missing(self) -> list[int]:
        """World ranks of members that have not said that they wait, too."""
        come = self._backend.announced(self._group)
        return [
            rank
            for index, rank in enumerate(self._group.ranks)
            if index != self._group.rank and come.get(rank, -1) < self._number
        ]

    def _describe(self, waited: float) -> str:
        world, missing = self._backend.world, self.missing()
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return (
            f"{self._what} has waited {waited:.0f} s on rank {world.rank} of {world.size} for "
            + (who if missing else "peers")
            + ", which did not call the same operation or are dead. The limit is that of "
            f"init(timeout=...) or HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: "
            f"{self._backend.patience.limit:g} s."
        )


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


ACCUMULATE = {
    ReduceOp.SUM: lambda mine, theirs: mine.add_(theirs),
    ReduceOp.PRODUCT: lambda mine, theirs: mine.mul_(theirs),
    ReduceOp.MIN: lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    ReduceOp.MAX: lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
}


class _ReduceParts(Work):
    """Parts under way from all ranks, to be reduced in rank order when they have come."""

    def __init__(
        self, work: Work, parts: torch.Tensor, output: torch.Tensor, op: ReduceOp, size: int
    ) -> None:
        self._work: Work | None = work
        self._parts = parts
        self._output = output
        self._op = op
        self._size = size

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        first, *others = self._parts.chunk(self._size) if self._parts.numel() else (self._parts,)
        self._output.copy_(first)
        for part in others:
            ACCUMULATE[self._op](self._output, part)
        self._work = None

    def done(self) -> bool:
        return self._work is None or self._work.done()


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


class Parts(Rows):
    """An ``alltoall_rows`` under way; ``received`` tells how many rows came from each rank."""

    received: list[int]


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
    #: whether ``reduce_scatter`` is the engine's own, and so matched by name where that is
    native_reduce_scatter: ClassVar[bool] = False
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
    #: time.monotonic() when a planned operation ended last; while such go on nobody is stuck, and a
    #: rank that has joined may wait for as long as the others train
    progressed: float = 0.0
    #: how long to wait for peers, set before ``init``
    patience: Patience = Patience(60.0, DEFAULT_TIMEOUT)

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

    def alltoall(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        group: Group,
        name: str,
    ) -> Work:
        """Send part r of ``tensor`` to rank r; ``output`` gets the ranks' parts in rank order.

        The counts are elements; ``receive_counts[r]`` is what rank r has as ``send_counts[me]``.
        """
        sources, targets = tensor.split(list(send_counts)), output.split(list(receive_counts))
        targets[group.me].copy_(sources[group.me])
        works = []
        # In round k a rank talks to the peers k places before and behind it.
        for k in range(1, group.size):
            source, target = (group.me - k) % group.size, (group.me + k) % group.size
            if receive_counts[source]:
                works.append(self.recv(targets[source], source, group))
            if send_counts[target]:
                works.append(self.send(sources[target], target, group))
        return WorkGroup(works, (output, tensor))

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        op: ReduceOp,
        group: Group,
        name: str,
    ) -> Work:
        """Reduce ``tensor`` over the group, of which rank r gets part r, of ``counts[r]`` elements.

        Each rank sends every part to the rank that reduces it: ``(N-1)/N·S`` bytes, the least
        that is possible, in one step.
        """
        received = tensor.new_empty(group.size * counts[group.me])
        work = self.alltoall(received, tensor, counts, [counts[group.me]] * group.size, group, name)
        return _ReduceParts(work, received, output, op, group.size)

    def exchange(self, payload: bytes, group: Group, name: str = "control") -> list[bytes]:
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
        self.allgather(heads, head, counts, group, name).wait()
        rows = heads.split(head.numel())
        lengths = [int(row[:8].view(torch.int64)[0]) for row in rows]
        if max(lengths) <= _INLINE:
            parts = [row[8 : 8 + n] for row, n in zip(rows, lengths, strict=True)]
        else:
            output = head.new_empty(sum(lengths))
            self.allgather(output, mine, lengths, group, f"{name}.body").wait()
            parts = list(output.split(lengths))
        return [part.numpy().tobytes() for part in parts]

    # -- of engines that match by name: what the layer above does for the others -------------------

    def alltoall_rows(
        self, tensor: torch.Tensor, splits: Sequence[int], group: Group, name: str
    ) -> Parts:
        """Send ``splits[r]`` rows to rank r, without knowing how many will come."""
        raise NotImplementedError

    def join(self) -> int:
        """Take part in the reductions of others until all have joined; the last one's rank."""
        raise NotImplementedError

    # -- who is waiting -------------------------------------------------------------------------

    def announce(self, group: Group, number: int) -> None:
        """Tell the members, beside the group's own messages, that this rank waits in a collective.

        Engines that can only wait say nothing.

        Args:
            number: counts the group's collectives.
        """
        del group, number

    def announced(self, group: Group) -> dict[int, int]:
        """The highest number that each world rank has announced for the group, as far as known."""
        return {}

    # -- point to point -------------------------------------------------------------------------

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int, group: Group) -> Work:
        """Send to one rank. Messages between two ranks of a group arrive in order."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int, group: Group) -> Work:
        """Fill ``tensor`` with the next message of one rank; sizes must agree."""
