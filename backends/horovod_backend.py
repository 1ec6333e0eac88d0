"""The Horovod engine: every collective is passed to Horovod's own, which negotiates by name.

What Horovod lacks rides on a gloo side group: point to point, and with it Adasum where Horovod
was built or started without MPI. The side group's address is handed round by Horovod's broadcast,
so it exists under every launcher that Horovod knows.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from unidist.backends.base import (
    Backend,
    Capability,
    Group,
    Parts,
    Patience,
    ReduceOp,
    Rows,
    Work,
)
from unidist.backends.errors import (
    ArgumentError,
    BackendUnavailable,
    HorovodInternalError,
    LaunchError,
)
from unidist.backends.horovod_package import import_horovod
from unidist.backends.horovod_rendezvous import clear_rendezvous
from unidist.backends.mpi_job import check_world, load_mpi
from unidist.backends.torch_backend import TorchWork, connect_store, open_store

if TYPE_CHECKING:
    from unidist.launch import Launch

try:
    hvd = import_horovod()
except Exception as error:  # a broken extension raises whatever its loader raises
    raise BackendUnavailable(
        "The horovod backend needs Horovod built for this PyTorch "
        f"(torch {torch.__version__}), but it cannot be imported ({type(error).__name__}: "
        f"{error}). Build and install it with: unidist build-horovod"
    ) from error

_OPS = {
    ReduceOp.SUM: hvd.Sum,
    ReduceOp.MIN: hvd.Min,
    ReduceOp.MAX: hvd.Max,
    ReduceOp.PRODUCT: hvd.Product,
    ReduceOp.ADASUM: hvd.Adasum,
}

_REDUCE_DTYPES = frozenset({torch.int32, torch.int64, torch.float16, torch.float32, torch.float64})


@contextmanager
def _stall_limit(patience: Patience) -> Iterator[None]:
    """Let Horovod end a wait for a peer after our limit; its own default is never.

    It reads these variables while it is initialised. The user's own setting goes first.
    """
    warn_after = patience.warn_after or 60.0
    limits = {
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": max(1, math.ceil(patience.limit)),
        # Horovod looks at the limit only when it looks for a warning.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": max(1, math.ceil(min(warn_after, patience.limit / 2))),
    }
    added = [name for name in limits if os.environ.get(name) in (None, "", "0")]
    before = {name: os.environ.get(name) for name in added}
    os.environ.update({name: str(limits[name]) for name in added})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_timeline() -> Iterator[None]:
    """Keep Horovod from writing the timeline: we do (``unidist/timeline.py``), on every engine.

    Its own file is not valid JSON when the job is interrupted.
    """
    path = os.environ.pop("HOROVOD_TIMELINE", None)
    try:
        yield
    finally:
        if path is not None:
            os.environ["HOROVOD_TIMELINE"] = path


class _HorovodWork(Work):
    def __init__(self, backend: HorovodBackend, handle: int, what: str, keep: Any = None) -> None:
        self._backend = backend
        self._handle = handle
        self._what = what
        self._keep = keep
        self._output: Any = None
        self._waited = False

    def wait(self) -> None:
        if self._waited:
            return
        self._waited = True
        self._poll()
        try:
            self._output = hvd.synchronize(self._handle)
        except RuntimeError as error:
            text = f"{self._what} failed in Horovod: {error}"
            if "shape" in text:
                text += (
                    " (Dimensions of 1 at the end of a shape stand for the operation's options.)"
                )
            raise HorovodInternalError(text) from error
        self._keep = None

    def _poll(self) -> None:
        """Wait with a time limit; Horovod's own wait polls, too, and has none."""
        begin = time.monotonic()
        backend = self._backend
        while not hvd.poll(self._handle):
            if backend.failure:  # one time-out is enough for all that were under way
                raise HorovodInternalError(
                    f"{self._what} was given up, since an earlier operation failed "
                    f"({backend.failure}) Call shutdown() and init() on all ranks to go on."
                )
            elapsed = time.monotonic() - begin
            if elapsed > backend.limit:
                backend.failure = (
                    f"{self._what} has waited {backend.limit:g} s on rank {hvd.rank()} for a peer "
                    "that has not called the same operation, or has died. init(timeout=...) sets "
                    "this limit."
                )
                raise HorovodInternalError(backend.failure)
            time.sleep(min(max(elapsed / 16, 2e-5), 1e-3))

    def done(self) -> bool:
        return self._waited or bool(hvd.poll(self._handle))

    @property
    def output(self) -> Any:
        """What Horovod returned: a tensor, or a pair of them."""
        assert self._output is not None
        return self._output


class _HorovodRows(Rows):
    """Horovod allocates the output of an uneven gather itself, when the sizes are known."""

    def __init__(self, work: _HorovodWork) -> None:
        super().__init__(work, None)
        self._native = work

    @property
    def output(self) -> torch.Tensor:
        output: torch.Tensor = self._native.output
        return output


class _HorovodParts(Parts):
    """Horovod allocates the output of an all-to-all, too."""

    def __init__(self, work: _HorovodWork) -> None:
        super().__init__(work, None)
        self._native = work

    @property
    def output(self) -> torch.Tensor:
        return self._native.output[0]

    @property
    def received(self) -> list[int]:  # type: ignore[override]
        return [int(count) for count in self._native.output[1]]


class _CopyTo(Work):
    """A native gather whose result is copied to the caller's buffer."""

    def __init__(self, work: _HorovodWork, output: torch.Tensor) -> None:
        self._work = work
        self._target: torch.Tensor | None = output

    def wait(self) -> None:
        self._work.wait()
        if self._target is not None:
            self._target.copy_(self._work.output.view(self._target.shape))
            self._target = None

    def done(self) -> bool:
        return self._work.done()


class HorovodBackend(Backend):
    """Horovod 0.28.1 under ``horovodrun`` or ``mpirun``."""

    name = "horovod"
    matches_by_name = True
    reduce_dtypes = _REDUCE_DTYPES
    move_dtypes = _REDUCE_DTYPES | {torch.uint8, torch.int8, torch.int16}

    def init(self, launch: Launch, timeout: float, comm: Any = None) -> None:
        if launch.launcher in ("torchrun", "env"):
            raise LaunchError(
                f"The horovod backend cannot yet be started by {launch.launcher}. Start the same "
                f"script with `horovodrun -np {launch.size} python SCRIPT`, with "
                "`mpirun`, or stay with torchrun and the torch backend."
            )
        self.timeout = timedelta(seconds=timeout)
        self.limit = self.patience.limit
        #: the time-out of an operation, after which others that are not done are given up
        self.failure = ""
        if launch.launcher != "horovodrun" and hvd.mpi_built():
            # Horovod finalises an MPI that it initialised itself, and could not start again.
            with suppress(BackendUnavailable):
                load_mpi("The horovod backend")
        with _stall_limit(self.patience), _without_timeline():
            # Process sets can then be added at any time, as on the other engines.
            hvd.init(comm, process_sets="dynamic")
        size, rank = hvd.size(), hvd.rank()
        if comm is None:
            try:
                check_world(launch, "Horovod", size, rank)
            except LaunchError:
                hvd.shutdown()
                raise
        self.world = Group(tuple(range(size)), rank, hvd.global_process_set)
        cuda = bool(hvd.nccl_built()) and torch.cuda.is_available()
        native_adasum = hvd.mpi_built() and hvd.mpi_enabled()
        self.capabilities = frozenset(
            [Capability.CUDA] * cuda + [Capability.ADASUM] * native_adasum
        )
        enabled = {
            "mpi": hvd.mpi_enabled(),
            "mpi_threads": hvd.mpi_enabled() and hvd.mpi_threads_supported(),
            "gloo": hvd.gloo_enabled(),
            "nccl": cuda,
        }
        self.transports = frozenset(name for name, there in enabled.items() if there)
        self._side: Any = self._connect_side_group() if size > 1 else None
        if launch.launcher == "horovodrun":
            clear_rendezvous(hvd)

    def _connect_side_group(self) -> Any:
        """Connect all ranks through gloo, for what Horovod does not have."""
        address: tuple[str, int] = ("", 0)
        store: dist.Store | None = None
        if self.world.me == 0:
            store, address = open_store(self.timeout)
        address = hvd.broadcast_object(address, 0, name="unidist.side_group")
        if store is None:
            store = connect_store(address, self.timeout)
        store = dist.PrefixStore("unidist.side_group", store)
        return dist.ProcessGroupGloo(store, self.world.me, self.world.size, self.timeout)

    def shutdown(self) -> None:
        self._side = None
        hvd.shutdown()

    def new_group(self, ranks: Sequence[int]) -> Group:
        me = self.world.me
        native = (
            hvd.global_process_set
            if list(ranks) == list(self.world.ranks)
            else hvd.add_process_set(list(ranks))
        )
        return Group(tuple(ranks), ranks.index(me) if me in ranks else None, native)

    def free_group(self, group: Group) -> None:
        if group.native is not hvd.global_process_set:
            hvd.remove_process_set(group.native)

    # -- collectives ------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, group: Group, name: str) -> Work:
        what = f"allreduce {name!r}"
        handle = _native(
            what,
            lambda: hvd.allreduce_async_(tensor, name=name, op=_OPS[op], process_set=group.native),
        )
        return _HorovodWork(self, handle, what, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, group: Group, name: str) -> Work:
        what = f"broadcast {name!r} from rank {group.ranks[root]}"
        handle = _native(
            what,
            lambda: hvd.broadcast_async_(
                tensor, group.ranks[root], name=name, process_set=group.native
            ),
        )
        return _HorovodWork(self, handle, what, tensor)

    def allgather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        group: Group,
        name: str,
    ) -> Work:
        return _CopyTo(self._gather(tensor, group, name), output)

    def allgather_rows(self, tensor: torch.Tensor, group: Group, name: str) -> Rows:
        return _HorovodRows(self._gather(tensor, group, name))

    def _gather(self, tensor: torch.Tensor, group: Group, name: str) -> _HorovodWork:
        what = f"allgather {name!r}"
        with torch.inference_mode(False):  # Horovod's thread writes to the output made here
            handle = _native(
                what, lambda: hvd.allgather_async(tensor, name=name, process_set=group.native)
            )
        return _HorovodWork(self, handle, what, tensor)

    def alltoall_rows(
        self, tensor: torch.Tensor, splits: Sequence[int], group: Group, name: str
    ) -> Parts:
        what = f"alltoall {name!r}"
        with torch.inference_mode(False):
            counts = torch.tensor(splits, dtype=torch.int32, device="cpu")
            handle = _native(
                what,
                lambda: hvd.alltoall_async(tensor, counts, name=name, process_set=group.native),
            )
        return _HorovodParts(_HorovodWork(self, handle, what, (tensor, counts)))

    native_reduce_scatter = True

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        op: ReduceOp,
        group: Group,
        name: str,
    ) -> Work:
        what = f"reducescatter {name!r}"
        # Horovod divides rows, the first ranks getting one more: a row is what they have more.
        width = max(counts) - min(counts) or max(counts)
        rows = tensor.view(-1, width, *tensor.shape[1:])
        with torch.inference_mode(False):
            handle = _native(
                what,
                lambda: hvd.reducescatter_async(
                    rows, name=name, op=_OPS[op], process_set=group.native
                ),
            )
        return _CopyTo(_HorovodWork(self, handle, what, tensor), output)

    def join(self) -> int:
        return int(hvd.join())

    def barrier(self, group: Group) -> Work:
        # hvd.barrier blocks in Python; a one-element all-reduce is a barrier that can be started.
        return self.allreduce(torch.zeros(1, device="cpu"), ReduceOp.SUM, group, "unidist.barrier")

    # -- point to point ---------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, group: Group) -> Work:
        peer = group.ranks[dst]
        tag = group.native.process_set_id
        work = self._side.send([tensor.view(torch.uint8)], peer, tag)
        return TorchWork(work, f"send to rank {peer}", tensor)

    def recv(self, tensor: torch.Tensor, src: int, group: Group) -> Work:
        peer = group.ranks[src]
        tag = group.native.process_set_id
        work = self._side.recv([tensor.view(torch.uint8)], peer, tag)
        return TorchWork(work, f"receive from rank {peer}", tensor)


def _native(what: str, start: Callable[[], int]) -> int:
    """Start a native operation; what Horovod refuses at once is reported like a later failure."""
    try:
        return start()
    except ValueError as error:
        raise ArgumentError(f"{what} was refused by Horovod: {error}") from error
    except RuntimeError as error:
        raise HorovodInternalError(f"{what} failed in Horovod: {error}") from error
