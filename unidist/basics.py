"""init, shutdown, and this process' place in the world. Holds the one live backend."""

from __future__ import annotations

import atexit
import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from unidist import launch as launching
from unidist.backends import create
from unidist.backends.base import DEFAULT_TIMEOUT, Backend, Group, Patience
from unidist.backends.errors import ArgumentError, HorovodInternalError
from unidist.engine import Engine
from unidist.handles import HandleTable, Proposal, Task
from unidist.launch import Launch
from unidist.negotiation import Negotiator

if TYPE_CHECKING:
    from unidist.process_sets import ProcessSet
    from unidist.timeline import Timeline


@dataclass
class Place:
    """Where the ranks run: this one's place on its node, and its node's place among the nodes."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


@dataclass
class Lane:
    """A group's clone with an engine of its own, for operations ordered apart from the others."""

    group: Group
    engine: Engine
    free: bool = False


@dataclass
class Runtime:
    """Everything that exists between ``init`` and ``shutdown``."""

    backend: Backend
    place: Place
    #: called with each operation that is done, for traces
    trace: Callable[[Task], None] | None = None
    #: None unless HOROVOD_TIMELINE was set
    timeline: Timeline | None = None
    #: of the call of ``init``, to connect again in the same way
    arguments: dict[str, Any] = field(default_factory=dict)
    #: each drives one group's operations, but for those of an optimizer's lanes
    engines: dict[Group, Engine] = field(default_factory=dict)
    #: the lanes that were made for each group, in the same order on all its ranks
    lanes: dict[Group, list[Lane]] = field(default_factory=dict)
    handles: HandleTable = field(default_factory=HandleTable)
    process_sets: dict[int, ProcessSet] = field(default_factory=dict)
    next_process_set_id: int = 1
    #: how many operations without a name each kind has had in each group; counted by group, so
    #: that members and others go on having equal names in the world
    unnamed: dict[tuple[str, Group], int] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    #: shut down, or about to be
    ended: bool = False
    #: the process that is connected; one forked from it is not
    process: int = field(default_factory=os.getpid)
    #: threads that take part in the steps of others, while this rank has joined
    idlers: list[threading.Thread] = field(default_factory=list)
    idle_failures: list[BaseException] = field(default_factory=list)

    def take_lane(self, group: Group, free_everywhere: set[int]) -> Lane | None:
        """A lane of the group for one owner, until it sets ``free``. All members call it.

        Lanes are used again, since making one costs connections and a thread; but garbage
        collection frees them at different times on different ranks, so the ranks have agreed on
        the numbers of those that are free on all. None where the backend has no clones.
        """
        lanes = self.lanes.setdefault(group, [])
        free = [i for i in sorted(free_everywhere) if lanes[i].free]  # nobody took it since
        if free:
            lane = lanes[free[0]]
            lane.free = False
            return lane
        clone = self.backend.clone_group(group)
        if clone is group and group.size > 1:
            return None
        lanes.append(Lane(clone, Engine(self.backend, clone, self.trace)))
        return lanes[-1]

    def free_lanes(self, group: Group) -> list[int]:
        """The numbers of this rank's free lanes of a group."""
        return [i for i, lane in enumerate(self.lanes.get(group, [])) if lane.free]

    @property
    def engine(self) -> Engine:
        """The world's engine."""
        return self.engine_of(self.backend.world)

    def engine_of(self, group: Group) -> Engine:
        """The engine of a group's operations: one that negotiates, unless the backend does."""
        engine = self.engines.get(group)
        if engine is None:
            with self.lock:
                engine = self.engines.get(group)
                if engine is None:
                    if self.ended:
                        raise HorovodInternalError(
                            "An operation was submitted during or after shutdown()."
                        )
                    engine = self.engines[group] = self._make_engine(group)
        return engine

    def _make_engine(self, group: Group) -> Engine:
        from unidist.collective import refusal, stand_in

        if self.backend.matches_by_name:
            return Engine(self.backend, group, self.trace)
        cycle = self.timeline.cycle if self.timeline is not None else None
        return Negotiator(self.backend, group, stand_in, refusal, self.count_up, self.trace, cycle)

    def stop(self, group: Group) -> None:
        """Complete what was submitted for a group; nothing can be any more."""
        for lane in self.lanes.pop(group, []):
            lane.engine.stop()
        engine = self.engines.pop(group, None)
        if engine is not None:
            engine.stop()

    def begin_idle(self, idle: Callable[[], None]) -> None:
        """Take part in the steps of others, in a thread, until all ranks have joined."""

        def take_part() -> None:
            try:
                idle()
            except BaseException as error:
                self.idle_failures.append(error)

        thread = threading.Thread(target=take_part, name="unidist-joined", daemon=True)
        self.idlers.append(thread)
        thread.start()

    def end_idle(self) -> None:
        """All ranks have joined: wait for the threads; raise what one of them raised."""
        for thread in self.idlers:
            thread.join()
        failures, self.idlers, self.idle_failures = self.idle_failures, [], []
        if failures:
            raise failures[0]

    def count_up(self, proposal: Proposal, group: Group) -> None:
        """Go on counting unnamed operations where the others are, which have submitted one more."""
        kind, *rest = proposal.name.split(".")
        if len(rest) > 1 and rest[0] == "noname" and rest[1].isdecimal():
            with self.lock:
                self.unnamed[kind, group] = max(int(rest[1]), self.unnamed.get((kind, group), 0))

    def name(self, kind: str, name: str | None, group: Group) -> str:
        """The name of an operation: the caller's, or the next one of its kind in the group."""
        if name is None:
            with self.lock:
                number = self.unnamed[kind, group] = self.unnamed.get((kind, group), 0) + 1
            name = f"noname.{number}"
        if group is not self.backend.world:
            name += f".of.{'.'.join(map(str, group.ranks))}"
        return f"{kind}.{name}"


_runtime: Runtime | None = None
_life = threading.RLock()


def runtime() -> Runtime:
    """The live runtime; ArgumentError before ``init``."""
    if _runtime is None:
        # A ValueError where Horovod asks for a rank, its internal error where it communicates.
        raise ArgumentError("unidist has not been initialized; call hvd.init() first.")
    return _runtime


def current() -> Runtime | None:
    """The live runtime, or None."""
    return _runtime


def init(
    comm: Sequence[int] | Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    backend: str | None = None,
    timeout: float | None = None,
) -> None:
    """Connect this process to its peers. All ranks must call it; a second call does nothing.

    Args:
        comm: which processes form the world: None for all that were launched, a list of their
            ranks, or an mpi4py communicator (under mpirun and srun). The processes that are left
            out do not call ``init``; under mpirun they start MPI by importing ``mpi4py.MPI``.
        process_sets: process sets to activate, the same list on all ranks. ``"dynamic"`` is
            accepted for Horovod's sake: sets can always be added later.
        backend: ``torch``, ``horovod``, ``mpi`` or ``serial``. None takes the environment
            variable UNIDIST_BACKEND, or the engine that belongs to the launcher.
        timeout: seconds after which connecting, and later waiting for a peer, is an error.

    Raises:
        ValueError: unknown backend, launch variables that contradict each other, or a
            HOROVOD_TIMELINE that cannot be written.
        BackendUnavailable: the engine's library is missing or broken; says what to install.
        LaunchError: the engine cannot run under this launcher, or sees another world than it.
    """
    global _runtime
    from unidist import process_sets as sets
    from unidist.timeline import Timeline

    with _life:
        if _runtime is not None:
            return
        limit = DEFAULT_TIMEOUT if timeout is None else float(timeout)
        if not limit > 0:
            raise ValueError(f"init got timeout={timeout!r}; pass a positive number of seconds.")
        launch = launching.detect()
        name = launching.choose_backend(backend, os.environ, launch)
        if name == "serial" and launch.size == 1:
            launch = Launch("none")
        engine = create(name)
        engine.patience = Patience.from_environment(os.environ, timeout)
        asked = comm
        launch, comm = _restrict(launch, comm, name)
        engine.init(launch, limit, comm)
        timeline, problem = None, ""
        try:
            try:
                timeline = Timeline.from_environment(
                    os.environ, engine.world.me, engine.world.size, engine.matches_by_name
                )
            except OSError as error:
                problem = str(error)
            place = _locate(engine, launch, problem)
            _runtime = Runtime(engine, place, _tracer(engine, timeline), timeline)
            _runtime.arguments = {"comm": asked, "backend": backend, "timeout": timeout}
            sets._activate_all(process_sets)
        except BaseException:
            if _runtime is not None:
                sets._invalidate_all(_runtime.process_sets.values())
            _runtime = None
            if timeline is not None:
                timeline.stop()
            engine.shutdown()
            raise
        if engine.world.size > 1:
            _install_excepthook()
        atexit.register(shutdown)


def _tracer(backend: Backend, timeline: Timeline | None) -> Callable[[Task], None] | None:
    """With UNIDIST_DEBUG=1, print a line for each operation: rank, name, elements, seconds.

    And tell the timeline, on the rank that writes one.
    """
    record = timeline.record if timeline is not None and timeline.writes else None
    if os.environ.get("UNIDIST_DEBUG") != "1":
        return record
    world = backend.world

    def trace(task: Task) -> None:
        seconds = task.finished_at - task.started_at
        line = f"unidist {world.rank}/{world.size} {task.label} {task.items} items {seconds:.6f} s"
        print(line, file=sys.stderr, flush=True)
        if record is not None:
            record(task)

    return trace


def _restrict(launch: Launch, comm: Any, backend: str) -> tuple[Launch, Any]:
    """Turn a list of ranks into what the engine takes: a communicator, or a smaller launch."""
    if comm is None:
        return launch, None
    in_mpi_job = launch.launcher in ("mpirun", "srun")
    if in_mpi_job:
        from unidist.backends import mpi_job

        # Starting MPI takes all processes of the job, those too that the list leaves out.
        mpi_job.load_mpi("init(comm=...)")
    if not isinstance(comm, (list, tuple)):
        if in_mpi_job and mpi_job.is_null(comm):
            raise ValueError(
                "init got comm=COMM_NULL: this process is not in the communicator. Only its "
                "members call init."
            )
        return launch, comm
    ranks = list(comm)
    if not ranks:  # Horovod's own default
        return launch, None
    if launch.rank not in ranks or len(set(ranks)) != len(ranks) or max(ranks) >= launch.size:
        raise ValueError(
            f"init got comm={ranks} on rank {launch.rank} of {launch.size}: it must name distinct "
            "ranks of the launched processes, this one among them. The others go without init, but "
            "under mpirun they must start MPI (from mpi4py import MPI), which waits for all."
        )
    if backend == "horovod":
        return launch, ranks
    if in_mpi_job:
        return launch, mpi_job.subworld(ranks)
    return replace(launch, rank=ranks.index(launch.rank), size=len(ranks)), None


def _locate(engine: Backend, launch: Launch, problem: str) -> Place:
    """Agree on who shares a node. Launchers tell their local ranks, or host names do.

    A problem of one rank is an error on all.
    """
    mine = [launch.local_rank, launch.cross_rank, socket.gethostname()]
    records = engine.exchange(json.dumps([mine, problem]).encode(), engine.world)
    told = [json.loads(record) for record in records]
    for rank, (_, theirs) in enumerate(told):
        if theirs:
            raise ValueError(f"Rank {rank} cannot start: {theirs}")
    peers = [place for place, _ in told]
    numbered = all(local is not None for local, _, _ in peers)
    # The launcher's own index of the node is better than a name: two agents may share a host.
    grouped = numbered and all(cross is not None for _, cross, _ in peers)
    locals_seen: dict[Any, int] = {}
    nodes: list[Any] = []
    local_ranks: list[int] = []
    for local, cross, host in peers:
        node = [host, cross] if grouped else host
        key = json.dumps(node)
        index = locals_seen.get(key, 0)
        locals_seen[key] = index + 1
        nodes.append(key)
        local_ranks.append(local if numbered else index)
    # A subset of the launched ranks (comm=...) leaves holes in the launcher's numbering.
    for key, count in locals_seen.items():
        members = [r for r, node in enumerate(nodes) if node == key]
        if sorted(local_ranks[r] for r in members) != list(range(count)):
            for index, r in enumerate(members):
                local_ranks[r] = index
    me = engine.world.me
    same_local = [r for r in range(len(peers)) if local_ranks[r] == local_ranks[me]]
    return Place(
        local_rank=local_ranks[me],
        local_size=locals_seen[nodes[me]],
        cross_rank=same_local.index(me),
        cross_size=len(same_local),
        homogeneous=len(set(locals_seen.values())) == 1,
    )


def shutdown() -> None:
    """Finish what was submitted and disconnect; ``init`` may be called again. All ranks call it."""
    global _runtime
    from unidist import process_sets as sets

    with _life:
        if _runtime is None:
            return
        ended, _runtime = _runtime, None
        atexit.unregister(shutdown)
        if ended.process != os.getpid():
            return  # the connections, and the threads that drive them, are the parent's
        try:
            with ended.lock:
                ended.ended = True
            for group in [*ended.lanes, *ended.engines]:
                ended.stop(group)
        finally:
            if ended.timeline is not None:
                ended.timeline.stop()
            sets._invalidate_all(ended.process_sets.values())
            ended.backend.shutdown()


def _install_excepthook() -> None:
    """Make an uncaught exception end the whole job, with the rank printed.

    The other ranks would wait for this one in their next collective, and under MPI this one would
    wait for them in MPI_Finalize.
    """
    if getattr(sys.excepthook, "_unidist", False):
        return
    previous = sys.excepthook

    def ends_the_job(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        previous(kind, value, trace)
        live = _runtime
        if live is None or live.process != os.getpid():
            return
        if hasattr(sys, "ps1"):  # an interactive session goes on
            return
        if live.timeline is not None:
            live.timeline.stop()
        world = live.backend.world
        print(
            f"unidist: rank {world.rank} of {world.size} ended by an uncaught {kind.__name__}; "
            "ending the job.",
            file=sys.stderr,
            flush=True,
        )
        _end_workers()
        live.backend.abort()

    ends_the_job._unidist = True  # type: ignore[attr-defined]
    sys.excepthook = ends_the_job


def _end_workers() -> None:
    """End the daemonic children, as an orderly exit does.

    A data loader's workers that were started by "forkserver" do not notice that this process ends:
    they watch the server, and it serves as long as they live.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            with suppress(OSError):
                child.terminate()


def backend_name() -> str:
    """The engine in use: ``torch``, ``horovod``, ``mpi`` or ``serial``."""
    return runtime().backend.name


def is_initialized() -> bool:
    """Whether ``init`` was called and ``shutdown`` was not."""
    return _runtime is not None


def rank() -> int:
    """This process' rank in the world."""
    return runtime().backend.world.me


def size() -> int:
    """The number of processes in the world."""
    return runtime().backend.world.size


def local_rank() -> int:
    """This process' rank among those of its node; choose the device by it."""
    return runtime().place.local_rank


def local_size() -> int:
    """The number of processes on this node."""
    return runtime().place.local_size


def cross_rank() -> int:
    """The index of this process' node among the nodes that have this local rank."""
    return runtime().place.cross_rank


def cross_size() -> int:
    """The number of nodes that have this local rank."""
    return runtime().place.cross_size


def is_homogeneous() -> bool:
    """Whether every node runs the same number of processes."""
    return runtime().place.homogeneous


# -- what is there ------------------------------------------------------------------------------
# The *_built queries ask whether an engine could use the library, the *_enabled ones whether the
# live engine does. Without the library of their name they answer False (0 for nccl_built).


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether the live engine moves data through MPI."""
    return "mpi" in runtime().backend.transports


def mpi_threads_supported() -> bool:
    """Whether the live engine uses MPI, initialised with MPI_THREAD_MULTIPLE."""
    return "mpi_threads" in runtime().backend.transports


def gloo_built() -> bool:
    """Whether this PyTorch has gloo."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_gloo_available())


def gloo_enabled() -> bool:
    """Whether the live engine moves data through gloo."""
    return "gloo" in runtime().backend.transports


def nccl_built() -> int:
    """The version of NCCL in this PyTorch as an integer (2.19.3 is 21903), 0 when it has none."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """IBM DDL is not an engine here."""
    return False


def ccl_built() -> bool:
    """Intel oneCCL is not an engine here."""
    return False


def cuda_built() -> bool:
    """Whether this PyTorch was built with CUDA."""
    import torch

    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch was built with ROCm."""
    import torch

    return torch.version.hip is not None
