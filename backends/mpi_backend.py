"""The MPI engine: a segmented ring of our own on mpi4py's buffer calls.

MPI only moves bytes here. The arithmetic is done by torch on the segment that has just arrived,
so every dtype that torch can add works, whatever types the MPI library knows.

The engine talks on its own clone of COMM_WORLD, so that a script may use mpi4py beside it. The
calls of one group come from the thread that drives its engine (``unidist/engine.py``), one at a
time; those of different groups at the same time, but one after the other where MPI was initialised
without MPI_THREAD_MULTIPLE. For this reason no call here blocks while peers are late.

After a failure messages may still be under way that nobody waits for, so nothing more is started:
every later operation says what failed first, until ``shutdown`` and ``init``.

Waiting is done by testing: first with the core offered to others in between, then with sleeps
that grow. A blocking MPI call spins, and with more ranks than cores it would take the core from
the rank that it waits for. Testing also lets every wait end.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unidist.backends.algorithms.ring import ring_allreduce
from unidist.backends.algorithms.transport import wire
from unidist.backends.base import (
    ACCUMULATE,
    REAL_DTYPES,
    Backend,
    Completed,
    Group,
    ReduceOp,
    Watch,
    Work,
)
from unidist.backends.errors import HorovodInternalError, LaunchError, StallError
from unidist.backends.mpi_job import abort_mpi_job, check_world, describe_library, load_mpi

if TYPE_CHECKING:
    from unidist.launch import Launch

#: largest single message in bytes; MPI 3 counts are 32-bit
MESSAGE_BYTES = 1 << 30

_RING_TAG, _POINT_TAG, _ALLTOALL_TAG, _NOTICE_TAG = 1, 2, 3, 4

#: seconds of a wait in which the core is offered to others, but no sleep is risked
_YIELDING = 1e-3
_LONGEST_PAUSE = 1e-3
#: room for a notice to the others: that this rank waits, or leaves
_NOTICE_BYTES = 4096
#: tags of notices, used in turn by the lives between init and shutdown
_LIVES = 1000

_lives = 0
_never_freed: list[Any] = []


class _Operation:
    """What the messages of one operation have in common: a name, and whom it waits for.

    ``number`` counts the collectives of a group. A rank that has left without starting this one
    never will; one that has started it has done its part.
    """

    __slots__ = ("backend", "group", "number", "what")

    def __init__(self, backend: MpiBackend, group: Group, what: str, collective: bool) -> None:
        backend.check_usable(what)
        self.backend = backend
        self.group = group
        self.what = what
        self.number = backend.count(group) if collective else 0

    def pending(self, start: Callable[[], Any]) -> _Pending:
        """Start a message, or a native collective."""
        try:
            with self.backend.calls:
                return _Pending(self, start())
        except self.backend.mpi_error as error:
            raise self.backend.failed(f"{self.what} failed in MPI: {error}.") from error


class _Wait:
    """Looks after one long wait: whether it is in vain, or has been too long."""

    def __init__(self, operation: _Operation) -> None:
        self._operation = operation
        self._watch = Watch(operation.backend, operation.group, operation.number, operation.what)
        self._departed: int | None = None

    def look(self) -> None:
        """Called now and then; raises when the wait must end."""
        operation = self._operation
        backend = operation.backend
        if self._departed is not None:  # was seen before the last test, so that counted all it sent
            raise backend.failed(
                f"{operation.what} cannot finish on rank {backend.world.rank} of "
                f"{backend.world.size}: rank {self._departed} has shut down without calling it."
            )
        self._departed = backend.departed_before(operation.group, operation.number)
        try:
            self._watch.look()
        except StallError as error:
            backend.failed(str(error))
            raise


class _Pending:
    """One MPI request. The backend holds it, and it its buffer, until MPI is done with both."""

    __slots__ = ("_operation", "_request")

    def __init__(self, operation: _Operation, request: Any) -> None:
        self._operation = operation
        self._request = request
        operation.backend.active[id(request)] = request

    def _test(self) -> bool:
        with self._operation.backend.calls:
            return bool(self._request.Test())

    def wait(self) -> None:
        backend = self._operation.backend
        try:
            if not self._test():
                self._wait_long()
        except backend.mpi_error as error:
            raise backend.failed(f"{self._operation.what} failed in MPI: {error}.") from error
        backend.active.pop(id(self._request), None)

    def _wait_long(self) -> None:
        begin = time.monotonic()
        wait = _Wait(self._operation)
        while not self._test():
            waited = time.monotonic() - begin
            if waited < _YIELDING:
                os.sched_yield()
                continue
            # The longer the wait, the less a pause adds to it.
            time.sleep(min(waited / 16, _LONGEST_PAUSE))
            wait.look()

    def done(self) -> bool:
        return self._test()


class _MpiWork(Work):
    def __init__(self, pending: Sequence[_Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for pending in self._pending:
            pending.wait()

    def done(self) -> bool:
        return all(pending.done() for pending in self._pending)


class _RingTransport:
    """One all-reduce's messages on a communicator."""

    def __init__(self, operation: _Operation) -> None:
        self.rank = operation.group.me
        self.size = operation.group.size
        self._operation = operation
        self._comm = operation.group.native
        self._byte = operation.backend.byte

    def isend(self, buffer: memoryview, dst: int) -> _Pending:
        return self._operation.pending(
            lambda: self._comm.Isend([buffer, self._byte], dst, _RING_TAG)
        )

    def irecv(self, buffer: memoryview, src: int) -> _Pending:
        return self._operation.pending(
            lambda: self._comm.Irecv([buffer, self._byte], src, _RING_TAG)
        )


def _starts(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Each part's first element and length."""
    return [
        (end - count, count)
        for end, count in zip(itertools.accumulate(counts), counts, strict=True)
    ]


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(buffer), MESSAGE_BYTES):
        yield buffer[start : start + MESSAGE_BYTES]


class MpiBackend(Backend):
    """mpi4py under ``mpirun`` or ``srun``, with MPICH or Open MPI."""

    name = "mpi"
    # bfloat16 is left to the layer above, which sums in float32 and rounds once.
    reduce_dtypes = REAL_DTYPES - {torch.bfloat16}
    move_dtypes = REAL_DTYPES

    def init(self, launch: Launch, timeout: float, comm: Any = None) -> None:
        global _lives
        if launch.launcher in ("torchrun", "horovodrun", "env"):
            raise LaunchError(
                f"The mpi backend cannot run under {launch.launcher}, whose processes are "
                "not ranks of one MPI job. Start the same script with "
                f"`mpirun -n {launch.size} python SCRIPT`"
                + (
                    ", or with `horovodrun --mpi` and UNIDIST_BACKEND=mpi."
                    if launch.launcher == "horovodrun"
                    else f", or stay with {launch.launcher} and the torch backend."
                )
            )
        mpi = load_mpi("The mpi backend")
        self.byte = mpi.BYTE
        self.mpi_error = mpi.Exception
        self._mpi = mpi
        #: requests that MPI is at, whichever operation they belong to, by id
        self.active: dict[int, Any] = {}
        self._failure = ""
        self._listening = threading.Lock()
        self._departed: dict[int, dict[str, int]] = {}
        self._waiting: dict[str, dict[int, int]] = {}
        self._sent: list[Any] = []
        self._notice: Any = mpi.REQUEST_NULL
        _lives += 1
        # MPI may give a clone the context of one that was freed, with a notice still in it.
        self._notice_tag = _NOTICE_TAG + _lives % _LIVES
        self._labels: dict[Group, str] = {}
        self._counts: dict[str, int] = {}
        self._cloned: dict[str, int] = {}
        self._clones: list[Any] = []
        self._made = 0
        parent = mpi.COMM_WORLD if comm is None else comm
        if comm is None:
            check_world(
                launch, f"MPI ({describe_library(mpi)})", parent.Get_size(), parent.Get_rank()
            )
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise LaunchError(
                "MPI was initialised without thread support (MPI_THREAD_SERIALIZED is needed, "
                "since gradients are reduced by a thread). Let mpi4py initialise MPI, or ask for "
                "MPI_THREAD_MULTIPLE."
            )
        multiple = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self.transports = frozenset({"mpi"} | ({"mpi_threads"} if multiple else set()))
        #: held during each call of MPI, where MPI does not take calls of several threads at once
        self.calls: Any = nullcontext() if multiple else threading.RLock()
        self.world = Group(tuple(range(parent.Get_size())), parent.Get_rank(), parent)
        native = self._clone(self.world)
        self.world = Group(self.world.ranks, self.world.rank, native)
        self._label(self.world, "world")
        self._listen()

    # Beside their collectives the ranks listen to each other's notices. A rank that ends, be it by
    # sys.exit in the midst of training, tells the others how many collectives it has started in
    # each group: they would wait for it in their next one. And a rank that has waited for a while
    # tells those that it may be waiting for.

    def _listen(self) -> None:
        self._buffer = bytearray(_NOTICE_BYTES)
        self._notice = self.world.native.Irecv(
            [self._buffer, self.byte], self._mpi.ANY_SOURCE, self._notice_tag
        )

    def _send_notice(self, notice: Any, ranks: Sequence[int]) -> None:
        text = json.dumps(notice).encode()
        with self.calls:
            self._sent = [request for request in self._sent if not request.Test()]
            self._sent += [
                self.world.native.Isend([text, self.byte], rank, self._notice_tag)
                for rank in ranks
                if rank != self.world.rank
            ]

    def announce(self, group: Group, number: int) -> None:
        self._send_notice([self._labels.get(group, ""), number], group.ranks)

    def announced(self, group: Group) -> dict[int, int]:
        self._hear()
        return self._waiting.get(self._labels.get(group, ""), {})

    def _label(self, group: Group, label: str) -> None:
        """Name a group equally on all its ranks, for the counts that are sent at the end."""
        self._labels[group] = label
        self._counts[label] = 0

    def count(self, group: Group) -> int:
        """Count one more collective of a group; return its number."""
        label = self._labels.get(group)
        if label is None:  # the control message of init
            return 0
        self._counts[label] += 1
        return self._counts[label]

    def departed_before(self, group: Group, number: int) -> int | None:
        """A member that has shut down before it started the group's collective ``number``."""
        self._hear()
        label = self._labels.get(group, "")
        for rank, counts in self._departed.items():
            if rank in group.ranks and (not number or counts.get(label, number) < number):
                return rank
        return None

    def _hear(self) -> None:
        with self._listening, self.calls:
            status = self._mpi.Status()
            while self._notice != self._mpi.REQUEST_NULL and self._notice.Test(status):
                notice = json.loads(bytes(self._buffer[: status.Get_count()]))
                rank = status.Get_source()
                if isinstance(notice, dict):
                    self._departed[rank] = notice
                else:
                    label, number = notice
                    self._waiting.setdefault(label, {})[rank] = number
                self._listen()

    def check_usable(self, what: str) -> None:
        """Raise when an earlier operation failed: its messages may still be under way."""
        if self._failure:
            raise HorovodInternalError(
                f"{what} cannot start, since an earlier operation failed ({self._failure}) Call "
                "shutdown() and init() on all ranks to go on."
            )

    def failed(self, message: str) -> HorovodInternalError:
        """Remember the first failure and return the error to raise."""
        self._failure = self._failure or message
        return HorovodInternalError(message)

    def shutdown(self) -> None:
        if self._mpi.Is_finalized():
            return
        native = self.world.native
        counts = self._counts
        if len(json.dumps(counts)) > _NOTICE_BYTES:
            counts = {}  # then the others find out by the time-out
        self._send_notice(counts, self.world.ranks)
        # The communicator is freed when nothing is under way on it any more. MPI may give its
        # number to the next one, and a message that comes late would be taken for a new one's.
        begin = time.monotonic()
        while not self._failure:
            self._hear()
            waited = time.monotonic() - begin
            if len(self._departed) == self.world.size - 1 or waited > self.patience.limit:
                break
            time.sleep(min(waited / 16, _LONGEST_PAUSE))
        self._mpi.Request.Waitall(self._sent)  # short messages, which MPI takes at once
        self._notice.Cancel()
        self._notice.Wait()
        if self._failure:
            # MPI may still write to the buffers of what failed: they live as long as the process.
            _never_freed.append(self.active)
            return
        for group in self._clones:
            group.Free()
        native.Free()

    def abort(self) -> None:
        abort_mpi_job()
        super().abort()

    def new_group(self, ranks: Sequence[int]) -> Group:
        me = self.world.me
        key = ranks.index(me) if me in ranks else None
        color = self._mpi.UNDEFINED if key is None else 0
        native = self.world.native.Split(color, key or 0)
        group = Group(tuple(ranks), key, None if key is None else native)
        self._made += 1
        self._label(group, f"set {self._made}")
        return group

    def clone_group(self, group: Group) -> Group:
        clone = Group(group.ranks, group.rank, self._clone(group))
        self._clones.append(clone.native)
        label = self._labels[group]
        number = self._cloned[label] = self._cloned.get(label, 0) + 1
        self._label(clone, f"{label} clone {number}")
        return clone

    def _clone(self, group: Group) -> Any:
        with self.calls:
            native, request = group.native.Idup()
        _Operation(self, group, "init", False).pending(lambda: request).wait()
        return native

    def free_group(self, group: Group) -> None:
        if group.native is not None:
            group.native.Free()

    # -- collectives ------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, group: Group, name: str) -> Work:
        operation = _Operation(self, group, f"allreduce {name!r}", True)
        ring_allreduce(_RingTransport(operation), tensor, ACCUMULATE[op])
        return Completed()

    def broadcast(self, tensor: torch.Tensor, root: int, group: Group, name: str) -> Work:
        what = f"broadcast {name!r} from rank {group.ranks[root]}"
        return self._broadcasts([(wire(tensor), root)], _Operation(self, group, what, True))

    def _broadcasts(self, parts: Sequence[tuple[memoryview, int]], operation: _Operation) -> Work:
        comm = operation.group.native
        return _MpiWork(
            [
                operation.pending(partial(comm.Ibcast, [piece, self.byte], root))
                for part, root in parts
                for piece in _pieces(part)
            ]
        )

    def allgather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        group: Group,
        name: str,
    ) -> Work:
        operation = _Operation(self, group, f"allgather {name!r}", True)
        itemsize = tensor.element_size()
        sizes = [count * itemsize for count in counts]
        starts = [0, *itertools.accumulate(sizes)][:-1]
        data = wire(output)
        if sum(sizes) <= MESSAGE_BYTES:
            source, target = [wire(tensor), self.byte], [data, sizes, starts, self.byte]
            return _MpiWork([operation.pending(lambda: group.native.Iallgatherv(source, target))])
        mine = starts[group.me]
        data[mine : mine + sizes[group.me]] = wire(tensor)
        parts = [
            (data[start : start + size], root)
            for root, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        return self._broadcasts(parts, operation)

    def alltoall(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        group: Group,
        name: str,
    ) -> Work:
        operation = _Operation(self, group, f"alltoall {name!r}", True)
        comm, me, size, itemsize = group.native, group.me, group.size, tensor.element_size()
        sources, targets = (
            [data[start * itemsize : (start + count) * itemsize] for start, count in parts]
            for data, parts in (
                (wire(tensor), _starts(send_counts)),
                (wire(output), _starts(receive_counts)),
            )
        )
        targets[me][:] = sources[me]
        pending = []
        # In round k a rank talks to the peers k places before and behind it.
        for k in range(1, size):
            source, target = (me - k) % size, (me + k) % size
            for calls, peer, buffer in (
                (comm.Irecv, source, targets[source]),
                (comm.Isend, target, sources[target]),
            ):
                pending += [
                    operation.pending(partial(calls, [piece, self.byte], peer, _ALLTOALL_TAG))
                    for piece in _pieces(buffer)
                ]
        return _MpiWork(pending)

    def barrier(self, group: Group) -> Work:
        operation = _Operation(self, group, "barrier", True)
        return _MpiWork([operation.pending(group.native.Ibarrier)])

    # -- point to point ---------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, group: Group) -> Work:
        comm = group.native
        return self._messages(
            tensor, dst, group, "send to", lambda buffer: comm.Isend(buffer, dst, _POINT_TAG)
        )

    def recv(self, tensor: torch.Tensor, src: int, group: Group) -> Work:
        comm = group.native
        return self._messages(
            tensor, src, group, "receive from", lambda buffer: comm.Irecv(buffer, src, _POINT_TAG)
        )

    def _messages(
        self,
        tensor: torch.Tensor,
        peer: int,
        group: Group,
        verb: str,
        start: Callable[[list[Any]], Any],
    ) -> Work:
        pair = Group((group.ranks[peer],), None)
        operation = _Operation(self, pair, f"{verb} rank {group.ranks[peer]}", False)
        return _MpiWork(
            [
                operation.pending(partial(start, [piece, self.byte]))
                for piece in _pieces(wire(tensor))
            ]
        )
