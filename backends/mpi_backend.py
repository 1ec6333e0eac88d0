"""The MPI engine: a segmented ring of our own on mpi4py's buffer calls.

MPI only moves bytes here. The arithmetic is done by torch on the segment that has just arrived,
so every dtype that torch can add works, whatever types the MPI library knows.

The engine talks on its own clone of COMM_WORLD, so that a script may use mpi4py beside it. All
calls come from the thread that drives the engine (``unidist/engine.py``), one at a time.

Waiting is done by testing: first with the core offered to others in between, then with sleeps
that grow. A blocking MPI call spins, and with more ranks than cores it would take the core from
the rank that it waits for. Testing also lets every wait end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unidist.backends.algorithms.ring import ring_allreduce
from unidist.backends.algorithms.transport import wire
from unidist.backends.base import Backend, Completed, Group, ReduceOp, Work
from unidist.backends.errors import HorovodInternalError, LaunchError
from unidist.backends.mpi_job import abort_mpi_job, check_world, describe_library, load_mpi

if TYPE_CHECKING:
    from unidist.launch import Launch

#: largest single message in bytes; MPI 3 counts are 32-bit
MESSAGE_BYTES = 1 << 30

_RING_TAG, _POINT_TAG, _GOODBYE_TAG = 1, 2, 3

#: seconds of a wait in which the core is offered to others, but no sleep is risked
_YIELDING = 1e-3
_LONGEST_PAUSE = 1e-3
#: seconds that an operation goes on after a rank of the job has left
_GRACE = 2.0

_ACCUMULATE = {
    ReduceOp.SUM: lambda mine, theirs: mine.add_(theirs),
    ReduceOp.PRODUCT: lambda mine, theirs: mine.mul_(theirs),
    ReduceOp.MIN: lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    ReduceOp.MAX: lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
}

_ALL_DTYPES = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    }
)


class _Pending:
    """One MPI request with the name of what it belongs to, for the time-out's message."""

    __slots__ = ("_backend", "_request", "_what")

    def __init__(self, backend: MpiBackend, request: Any, what: str) -> None:
        self._backend = backend
        self._request = request
        self._what = what

    def wait(self) -> None:
        request = self._request
        if request.Test():
            return
        begin = now = time.monotonic()
        deadline = begin + self._backend.timeout
        failure = ""
        while not request.Test():
            now = time.monotonic()
            if now - begin < _YIELDING:
                os.sched_yield()
                continue
            # The longer the wait, the less a pause adds to it.
            time.sleep(min((now - begin) / 16, _LONGEST_PAUSE))
            if not failure and self._backend.departed():
                # What a rank sent before it left may still be on its way.
                failure = f"rank {min(self._backend.departed())} has shut down"
                deadline = min(deadline, now + _GRACE)
            if now > deadline:
                # MPI may still write to the buffer, which the request keeps alive.
                self._backend.abandon([request])
                raise HorovodInternalError(
                    f"{self._what} cannot finish on rank {self._backend.world.rank} of "
                    f"{self._backend.world.size}: "
                    + (
                        failure
                        or f"it has waited {self._backend.timeout:g} s for a peer that has not "
                        "called the same operation, or has died. init(timeout=...) sets this limit"
                    )
                    + "."
                )

    def done(self) -> bool:
        return bool(self._request.Test())


class _MpiWork(Work):
    def __init__(self, pending: Sequence[_Pending], keep: Any) -> None:
        self._pending = pending
        self._keep = keep

    def wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._keep = None

    def done(self) -> bool:
        return all(pending.done() for pending in self._pending)


class _RingTransport:
    """One all-reduce's messages on a communicator."""

    def __init__(self, backend: MpiBackend, group: Group, what: str) -> None:
        self.rank = group.me
        self.size = group.size
        self._backend = backend
        self._comm = group.native
        self._what = what
        #: every request of the operation; a request keeps its buffer alive
        self.requests: list[Any] = []

    def isend(self, buffer: memoryview, dst: int) -> _Pending:
        return self._started(self._comm.Isend([buffer, self._backend.byte], dst, _RING_TAG))

    def irecv(self, buffer: memoryview, src: int) -> _Pending:
        return self._started(self._comm.Irecv([buffer, self._backend.byte], src, _RING_TAG))

    def _started(self, request: Any) -> _Pending:
        self.requests.append(request)
        return _Pending(self._backend, request, self._what)


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(buffer), MESSAGE_BYTES):
        yield buffer[start : start + MESSAGE_BYTES]


class MpiBackend(Backend):
    """mpi4py under ``mpirun`` or ``srun``, with MPICH or Open MPI."""

    name = "mpi"
    # bfloat16 is left to the layer above, which sums in float32 and rounds once.
    reduce_dtypes = _ALL_DTYPES
    move_dtypes = _ALL_DTYPES | {torch.bfloat16}

    def init(self, launch: Launch, timeout: float, comm: Any = None) -> None:
        if launch.launcher in ("torchrun", "horovodrun", "env"):
            raise LaunchError(
                f"The mpi backend cannot run under {launch.launcher}, whose processes are "
                "not ranks of one MPI job. Start the same script with "
                f"`mpirun -n {launch.size} python SCRIPT --backend mpi`"
                + (
                    ", or with `horovodrun --mpi`."
                    if launch.launcher == "horovodrun"
                    else f", or stay with {launch.launcher} and the torch backend."
                )
            )
        mpi = load_mpi("The mpi backend")
        self.timeout = timeout
        self.byte = mpi.BYTE
        self._abandoned: list[Any] = []
        self._mpi = mpi
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
        threads = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self.transports = frozenset({"mpi"} | ({"mpi_threads"} if threads else set()))
        self.world = Group(tuple(range(parent.Get_size())), parent.Get_rank(), parent)
        self._departed: set[int] = set()
        self._goodbye: Any = mpi.REQUEST_NULL
        native, cloned = parent.Idup()
        _Pending(self, cloned, "init").wait()
        self.world = Group(self.world.ranks, self.world.rank, native)
        self._listen()

    # A rank that ends, be it by sys.exit in the midst of training, tells the others, and waits for
    # them in MPI_Finalize. They would wait for it in their next collective; so they listen.

    def _listen(self) -> None:
        self._goodbye = self.world.native.Irecv(
            [bytearray(), self.byte], self._mpi.ANY_SOURCE, _GOODBYE_TAG
        )

    def departed(self) -> set[int]:
        """The ranks that have shut down."""
        status = self._mpi.Status()
        while self._goodbye != self._mpi.REQUEST_NULL and self._goodbye.Test(status):
            self._departed.add(status.Get_source())
            self._listen()
        return self._departed

    def shutdown(self) -> None:
        if self._mpi.Is_finalized():
            return
        native = self.world.native
        self.departed()
        farewells = [
            native.Isend([bytearray(), self.byte], rank, _GOODBYE_TAG)
            for rank in range(self.world.size)
            if rank != self.world.rank and rank not in self._departed
        ]
        self._mpi.Request.Waitall(farewells)  # empty messages, which MPI takes at once
        self._goodbye.Cancel()
        self._goodbye.Wait()
        native.Free()

    def abort(self) -> None:
        abort_mpi_job()
        super().abort()

    def abandon(self, requests: Sequence[Any]) -> None:
        """Keep the requests of a failed operation, and with them the memory MPI may still use."""
        self._abandoned.extend(requests)

    def new_group(self, ranks: Sequence[int]) -> Group:
        me = self.world.me
        key = ranks.index(me) if me in ranks else None
        color = self._mpi.UNDEFINED if key is None else 0
        native = self.world.native.Split(color, key or 0)
        return Group(tuple(ranks), key, None if key is None else native)

    def free_group(self, group: Group) -> None:
        if group.native is not None:
            group.native.Free()

    # -- collectives ------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, group: Group, name: str) -> Work:
        transport = _RingTransport(self, group, f"allreduce {name!r}")
        try:
            ring_allreduce(transport, tensor, _ACCUMULATE[op])
        except HorovodInternalError:
            self.abandon(transport.requests)
            raise
        return Completed()

    def broadcast(self, tensor: torch.Tensor, root: int, group: Group, name: str) -> Work:
        what = f"broadcast {name!r} from rank {group.ranks[root]}"
        pending = [
            _Pending(self, group.native.Ibcast([piece, self.byte], root), what)
            for piece in _pieces(wire(tensor))
        ]
        return _MpiWork(pending, tensor)

    def allgather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        group: Group,
        name: str,
    ) -> Work:
        what = f"allgather {name!r}"
        itemsize = tensor.element_size()
        sizes = [count * itemsize for count in counts]
        starts = [sum(sizes[:r]) for r in range(len(sizes))]
        data = wire(output)
        if sum(sizes) <= MESSAGE_BYTES:
            request = group.native.Iallgatherv(
                [wire(tensor), self.byte], [data, sizes, starts, self.byte]
            )
            return _MpiWork([_Pending(self, request, what)], (output, tensor))
        mine = starts[group.me]
        data[mine : mine + sizes[group.me]] = wire(tensor)
        pending = [
            _Pending(self, group.native.Ibcast([piece, self.byte], root), what)
            for root in range(group.size)
            for piece in _pieces(data[starts[root] : starts[root] + sizes[root]])
        ]
        return _MpiWork(pending, output)

    def barrier(self, group: Group) -> Work:
        return _MpiWork([_Pending(self, group.native.Ibarrier(), "barrier")], None)

    # -- point to point ---------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, group: Group) -> Work:
        what = f"send to rank {group.ranks[dst]}"
        comm = group.native
        pending = [
            _Pending(self, comm.Isend([piece, self.byte], dst, _POINT_TAG), what)
            for piece in _pieces(wire(tensor))
        ]
        return _MpiWork(pending, tensor)

    def recv(self, tensor: torch.Tensor, src: int, group: Group) -> Work:
        what = f"receive from rank {group.ranks[src]}"
        comm = group.native
        pending = [
            _Pending(self, comm.Irecv([piece, self.byte], src, _POINT_TAG), what)
            for piece in _pieces(wire(tensor))
        ]
        return _MpiWork(pending, tensor)
