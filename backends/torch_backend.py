"""The torch.distributed engine: gloo for CPU tensors, NCCL for CUDA tensors.

Under torchrun the ranks meet at its store. Under mpirun no such address is in the environment, so
rank 0 opens a store on a free port and MPI hands the address round. Every ``init`` meets under a
prefix of its own: the store outlives a shutdown, and would hand out the addresses of dead sockets.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from unidist.backends.base import (
    Backend,
    Capability,
    Group,
    ReduceOp,
    Watch,
    Work,
    WorkGroup,
)
from unidist.backends.errors import (
    BackendUnavailable,
    HorovodInternalError,
    LaunchError,
    StallError,
)
from unidist.backends.mpi_job import abort_mpi_job, check_world, load_mpi

if TYPE_CHECKING:
    from unidist.launch import Launch

if not dist.is_available():
    raise BackendUnavailable(
        "The torch backend needs a PyTorch that was built with torch.distributed "
        f"(torch {torch.__version__} was not)."
    )

# Stores this process serves, by address: the other ranks need them as long as they run.
_served: dict[tuple[str, int], dist.TCPStore] = {}
_generation = 0

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}

# Its name since torch 2.13, and before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# What gloo and NCCL both reduce, in every torch since 2.4.
_REDUCE_DTYPES = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    }
)


#: how long to wait at a time before looking around
_GLANCE = timedelta(seconds=0.5)


class TorchWork(Work):
    """A torch.distributed work whose failure is a HorovodInternalError.

    Args:
        watch: looks after a wait that takes long; None for a work on a device, which is not waited
            for on the host.
    """

    def __init__(self, work: Any, what: str, keep: Any, watch: Watch | None = None) -> None:
        self._work = work
        self._what = what
        self._keep = keep
        self._watch = watch

    def wait(self) -> None:
        try:
            if self._watch is None:
                self._work.wait()
            else:
                self._watch.begin()
                while not self._glance():
                    self._watch.look()
        except StallError:
            raise
        except RuntimeError as error:
            raise HorovodInternalError(
                f"{self._what} failed in torch.distributed: {error}. A peer has not called the "
                "same operation in time, or has died."
            ) from error
        self._keep = None

    def _glance(self) -> bool:
        try:
            return bool(self._work.wait(_GLANCE))
        except RuntimeError:
            if not self._work.is_completed():  # the end of our patience
                return False
            return bool(self._work.wait())  # done meanwhile, or its own error again

    def done(self) -> bool:
        return bool(self._work.is_completed())


def _store_at(host: str, port: int, serve: bool, timeout: timedelta) -> dist.TCPStore:
    key = (host, port)
    if key in _served:
        return _served[key]
    try:
        store = dist.TCPStore(host, port, None, serve, timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"Could not {'open' if serve else 'reach'} the store at {host}:{port} within "
            f"{timeout.total_seconds():g} s: {error}. Check MASTER_ADDR and MASTER_PORT; if the "
            "host has several network interfaces, set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) "
            "to the one that the hosts share."
        ) from error
    if serve:
        _served[host, store.port] = store
    return store


def store_from_environment(
    env: Mapping[str, str], rank: int, size: int, timeout: timedelta
) -> dist.Store:
    """Meet at MASTER_ADDR:MASTER_PORT, as torchrun and hand-set environments name it."""
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        raise LaunchError(
            f"The torch backend of {size} processes needs MASTER_ADDR and MASTER_PORT, the address "
            "of rank 0, but they are not set. Start with torchrun, which sets them."
        )
    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _store_at(
        env["MASTER_ADDR"], int(env["MASTER_PORT"]), rank == 0 and not agent_serves, timeout
    )


def address_of_this_host() -> str:
    """An address under which the other hosts of the job reach this one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def open_store(timeout: timedelta) -> tuple[dist.TCPStore, tuple[str, int]]:
    """Serve a store on a free port; return it with the address the other ranks connect to."""
    host = address_of_this_host()
    store = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
    _served[host, store.port] = store
    return store, (host, store.port)


def connect_store(address: tuple[str, int], timeout: timedelta) -> dist.TCPStore:
    """Connect to a store that another rank serves."""
    return _store_at(address[0], address[1], False, timeout)


class TorchBackend(Backend):
    """torch.distributed, in the script's default process group."""

    name = "torch"
    reduce_dtypes = _REDUCE_DTYPES
    move_dtypes = _REDUCE_DTYPES | {torch.bfloat16, torch.bool}

    def init(self, launch: Launch, timeout: float, comm: Any = None) -> None:
        global _generation
        if launch.launcher == "horovodrun":
            raise LaunchError(
                "The torch backend cannot yet be started by horovodrun. Start the same script with "
                f"`torchrun --nproc_per_node {launch.size} SCRIPT`, or with "
                "UNIDIST_BACKEND=torch under `mpirun`."
            )
        self.timeout = timedelta(seconds=timeout)
        # gloo's own limit of a wait comes after ours, which can say whom it waits for.
        self._limit = timedelta(seconds=self.patience.limit + 10)
        self._owns_default = not dist.is_initialized()
        self._groups: list[Any] = []
        # Of each group: a name equal on all its ranks, and how many collectives it has had.
        self._labels: dict[Group, str] = {}
        self._counts: dict[Group, int] = {}
        self._cloned: dict[Group, int] = {}
        self._made = 0
        self._store: dist.Store | None = None
        # Groups of ours serve CPU tensors even where the script's default group does not.
        self._backends = backends = self._native_backends(launch)
        if self._owns_default:
            if launch.size > 1 or comm is not None:
                store, rank, size = self._meet(launch, comm)
            else:
                store, rank, size = dist.HashStore(), 0, 1
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            prefix = f"unidist/{restart}/{_generation}"
            _generation += 1
            self._store = dist.PrefixStore(prefix, store)
            try:
                dist.init_process_group(
                    backends,
                    store=self._store,
                    rank=rank,
                    world_size=size,
                    timeout=self._limit,
                )
            except RuntimeError as error:
                raise LaunchError(
                    f"torch.distributed could not connect rank {rank} of {size} within {timeout:g} "
                    f"s: {error}. If the hosts have several network interfaces, set "
                    "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the one that they share."
                ) from error
            native: Any = dist.group.WORLD
        else:
            # The script made the default group; a clone keeps its collectives apart from ours.
            native = dist.new_group(timeout=self._limit, backend=backends)
            self._groups.append(native)
        uses_nccl = "nccl" in str(dist.get_backend_config(native))
        self.transports = frozenset({"gloo", "nccl"} if uses_nccl else {"gloo"})
        self.capabilities = frozenset({Capability.CUDA} if uses_nccl else ())
        self.world = Group(tuple(range(dist.get_world_size())), dist.get_rank(), native)
        self._labels[self.world] = "world"
        if comm is None:
            check_world(launch, "torch.distributed", self.world.size, self.world.me)

    @staticmethod
    def _native_backends(launch: Launch) -> str:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            return "gloo"
        devices, local = torch.cuda.device_count(), launch.local_size or 1
        if local > devices and devices > 1:
            warnings.warn(
                f"{local} ranks on this host share {devices} CUDA devices, which NCCL refuses; "
                "CUDA tensors will travel through the host with gloo. Start at most one rank per "
                "device to use NCCL.",
                stacklevel=2,
            )
            return "gloo"
        return "cpu:gloo,cuda:nccl"

    def _meet(self, launch: Launch, comm: Any) -> tuple[dist.Store, int, int]:
        if comm is None and launch.launcher not in ("mpirun", "srun"):
            store = store_from_environment(os.environ, launch.rank, launch.size, self.timeout)
            return store, launch.rank, launch.size
        mpi = load_mpi(f"The torch backend under {launch.launcher}")
        parent = mpi.COMM_WORLD if comm is None else comm
        rank, size = parent.Get_rank(), parent.Get_size()
        if comm is None:
            check_world(launch, "MPI, which hands round the address of rank 0,", size, rank)
        if rank == 0:
            served, address = open_store(self.timeout)
            parent.bcast(address, root=0)
            return served, rank, size
        return connect_store(parent.bcast(None, root=0), self.timeout), rank, size

    def shutdown(self) -> None:
        if not dist.is_initialized():
            return
        if self._owns_default:
            dist.destroy_process_group()
        else:
            for group in self._groups:
                dist.destroy_process_group(group)

    def abort(self) -> None:
        abort_mpi_job()
        super().abort()

    def new_group(self, ranks: Sequence[int]) -> Group:
        native = dist.new_group(list(ranks), timeout=self._limit, backend=self._backends)
        self._made += 1
        me = self.world.me
        if me not in ranks:
            return Group(tuple(ranks), None)
        self._groups.append(native)
        group = Group(tuple(ranks), ranks.index(me), native)
        self._labels[group] = f"set {self._made}"
        return group

    def clone_group(self, group: Group) -> Group:
        label = self._labels[group]
        number = self._cloned[group] = self._cloned.get(group, 0) + 1
        label = f"{label}.clone.{number}"
        native: Any
        if group is self.world:
            native = dist.new_group(timeout=self._limit, backend=self._backends)
            self._groups.append(native)
        elif self._store is None or Capability.CUDA in self.capabilities:
            return group
        else:
            # torch.distributed makes groups with all ranks of the world; here are only members.
            store = dist.PrefixStore(label, self._store)
            native = dist.ProcessGroupGloo(store, group.me, group.size, self._limit)
        clone = Group(group.ranks, group.rank, native)
        self._labels[clone] = label
        return clone

    def free_group(self, group: Group) -> None:
        if group.native is not None:
            self._groups.remove(group.native)
            dist.destroy_process_group(group.native)

    # -- who is waiting -------------------------------------------------------------------------

    def announce(self, group: Group, number: int) -> None:
        if self._store is not None:
            self._store.set(f"waiting/{self._labels[group]}/{self.world.rank}", str(number))

    def announced(self, group: Group) -> dict[int, int]:
        found: dict[int, int] = {}
        if self._store is not None:
            for rank in group.ranks:
                key = f"waiting/{self._labels[group]}/{rank}"
                if self._store.check([key]):
                    found[rank] = int(self._store.get(key))
        return found

    # -- collectives ------------------------------------------------------------------------------

    def _work(self, work: Any, what: str, tensor: torch.Tensor, group: Group, keep: Any) -> Work:
        number = self._counts[group] = self._counts.get(group, 0) + 1
        on_host = tensor.device.type == "cpu"
        return TorchWork(work, what, keep, Watch(self, group, number, what) if on_host else None)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, group: Group, name: str) -> Work:
        if isinstance(group.native, dist.ProcessGroupGloo):  # see clone_group
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]
            work = group.native.allreduce([tensor], options)  # type: ignore[attr-defined]
        else:
            work = dist.all_reduce(tensor, _OPS[op], group.native, async_op=True)
        return self._work(work, f"allreduce {name!r}", tensor, group, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, group: Group, name: str) -> Work:
        work = dist.broadcast(tensor, group.ranks[root], group.native, async_op=True)
        what = f"broadcast {name!r} from rank {group.ranks[root]}"
        return self._work(work, what, tensor, group, tensor)

    def allgather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        group: Group,
        name: str,
    ) -> Work:
        what = f"allgather {name!r}"
        if len(set(counts)) == 1:
            work = _all_gather_single(output, tensor, group.native, async_op=True)
            return self._work(work, what, tensor, group, (output, tensor))
        # Neither gloo nor NCCL gathers uneven parts: each rank broadcasts its own.
        parts = output.split(list(counts))
        parts[group.me].copy_(tensor)
        return WorkGroup(
            [
                self._work(
                    dist.broadcast(part, group.ranks[root], group.native, async_op=True),
                    what,
                    part,
                    group,
                    part,
                )
                for root, part in enumerate(parts)
                if part.numel()
            ]
        )

    def alltoall(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        group: Group,
        name: str,
    ) -> Work:
        work = dist.all_to_all_single(
            output, tensor, list(receive_counts), list(send_counts), group.native, async_op=True
        )
        return self._work(work, f"alltoall {name!r}", tensor, group, (output, tensor))

    def barrier(self, group: Group) -> Work:
        work = dist.barrier(group.native, async_op=True)
        return self._work(work, "barrier", torch.empty(0), group, None)

    # -- point to point ---------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, group: Group) -> Work:
        work = dist.isend(tensor.view(torch.uint8), group.ranks[dst], group.native)
        return TorchWork(work, f"send to rank {group.ranks[dst]}", tensor)

    def recv(self, tensor: torch.Tensor, src: int, group: Group) -> Work:
        work = dist.irecv(tensor.view(torch.uint8), group.ranks[src], group.native)
        return TorchWork(work, f"receive from rank {group.ranks[src]}", tensor)
