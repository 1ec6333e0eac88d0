"""Process sets: the subsets of ranks that collectives can be limited to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from unidist import basics
from unidist.backends.base import Group


class ProcessSet:
    """A set of global ranks that run collectives together.

    Args:
        ranks_or_comm: global ranks, in any order, or an mpi4py communicator whose processes are
            ranks of this world.

    It takes effect once it is given to ``init`` or ``add_process_set``; until then
    ``process_set_id`` is None, and so are ``rank()`` and ``size()``.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.group: Group | None = None
        if isinstance(ranks_or_comm, Iterable):
            ranks = list(ranks_or_comm)
            if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
                raise ValueError(
                    "ProcessSet takes a list of integer ranks or an mpi4py communicator, but got "
                    f"{ranks!r}."
                )
            if len(set(ranks)) != len(ranks):
                raise ValueError(f"ProcessSet got a rank more than once: {ranks!r}.")
            self.ranks = sorted(ranks)
        elif hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            raise ValueError(
                "ProcessSet takes a list of integer ranks or an mpi4py communicator, but got "
                f"{type(ranks_or_comm).__name__}."
            )

    def size(self) -> int | None:
        """The number of ranks, or None when the set is not active."""
        return None if self.group is None else self.group.size

    def rank(self) -> int | None:
        """This process' rank in the set, or None when the set is not active.

        Raises:
            ValueError: this process is not a member.
        """
        if self.group is None:
            return None
        if self.group.rank is None:
            raise ValueError(
                f"Rank {basics.rank()} is not a member of {self}: it has no rank there."
            )
        return self.group.rank

    def included(self) -> bool | None:
        """Whether this process is a member, or None when the ranks are not known yet.

        Raises:
            ValueError: before ``init``.
        """
        return None if self.ranks is None else basics.rank() in self.ranks

    def _activate(self, identifier: int, group: Group) -> None:
        self.process_set_id = identifier
        self.ranks = list(group.ranks)
        self.group = group

    def _invalidate(self) -> None:
        self.process_set_id = None
        self.group = None

    def __str__(self) -> str:
        fields = f"ranks={self.ranks}, mpi_comm={self.mpi_comm}"
        return f"ProcessSet(process_set_id={self.process_set_id}, {fields})"

    __repr__ = __str__


#: all ranks
global_process_set = ProcessSet([])


def member_group(process_set: ProcessSet, operation: str) -> Group:
    """Return the active group of a set that this process belongs to.

    Raises:
        ValueError: before ``init``; the set is not active; this process is not a member.
    """
    basics.runtime()
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            f"{operation} got process_set={process_set!r}; pass a ProcessSet that was given to "
            "init or add_process_set."
        )
    group = process_set.group
    if group is None:
        raise ValueError(
            f"{operation} got {process_set}, which is not active. Give it to init(process_sets=...)"
            " or add_process_set first, on all ranks."
        )
    if group.rank is None:
        raise ValueError(
            f"{operation} was called on rank {basics.rank()}, which is not a member of "
            f"{process_set}. Call it on the ranks {list(group.ranks)} only."
        )
    return group


def _world_ranks(process_set: ProcessSet) -> list[int]:
    """The global ranks of a set that is to be activated, equal on all ranks and in the world."""
    runtime, size = basics.runtime(), basics.size()
    if process_set.mpi_comm is not None:
        from unidist.backends.mpi_job import translate_ranks

        ranks = translate_ranks(process_set.mpi_comm)
    else:
        ranks = list(process_set.ranks or [])
    from unidist.agreement import exchange_json

    peers = exchange_json(ranks, runtime.backend.world)
    if any(peer != ranks for peer in peers):
        raise ValueError(
            "All ranks must add the same process set, but they named different ranks: "
            + ", ".join(f"rank {rank}: {peer}" for rank, peer in enumerate(peers))
        )
    if not ranks:
        raise ValueError("A process set needs at least one rank, but got none.")
    outside = [rank for rank in ranks if not 0 <= rank < size]
    if outside:
        raise ValueError(
            f"A process set names the ranks {outside}, but the world has the ranks 0 to {size - 1}."
        )
    return ranks


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Activate a process set, or make one of a list of ranks. All ranks must call it.

    Sets can be added at any time after ``init``, on every engine; Horovod's environment variable
    HOROVOD_DYNAMIC_PROCESS_SETS is not needed.

    Raises:
        ValueError: ranks outside the world, none, or the same ranks as an active set.
    """
    runtime = basics.runtime()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} is already active.")
    ranks = _world_ranks(process_set)
    for other in runtime.process_sets.values():
        if other.ranks == ranks:
            raise ValueError(
                f"A process set with the ranks {ranks} is already active: {other}. Use that one."
            )
    name = runtime.name("add_process_set", None, runtime.backend.world)
    group = runtime.engine.call(lambda: runtime.backend.new_group(ranks), name)
    identifier = runtime.next_process_set_id
    runtime.next_process_set_id += 1
    process_set._activate(identifier, group)
    runtime.process_sets[identifier] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Deactivate a set; False for the global set and for one that is not active.

    All ranks must call it.
    """
    runtime = basics.runtime()
    identifier = process_set.process_set_id
    if process_set is global_process_set or identifier is None or process_set.group is None:
        return False
    group = process_set.group
    runtime.stop(group)
    name = runtime.name("remove_process_set", None, runtime.backend.world)
    runtime.engine.call(lambda: runtime.backend.free_group(group), name)
    del runtime.process_sets[identifier]
    process_set._invalidate()
    return True


def _activate_all(process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Activate the global set, and those given to ``init``."""
    runtime = basics.runtime()
    global_process_set._activate(0, runtime.backend.world)
    runtime.process_sets[0] = global_process_set
    if process_sets is None:
        return
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f"init got process_sets={process_sets!r}; pass a list of ProcessSet, 'dynamic', or "
                "None."
            )
        return
    for process_set in process_sets:
        add_process_set(process_set)


def _invalidate_all(process_sets: Iterable[ProcessSet]) -> None:
    for process_set in process_sets:
        process_set._invalidate()
    global_process_set.ranks = []
