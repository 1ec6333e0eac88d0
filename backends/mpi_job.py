"""The parts of mpi4py that several engines need: load it, compare its world, end the job.

mpi4py initialises MPI when ``mpi4py.MPI`` is imported, so it is imported here and nowhere at
import time of the library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from unidist.backends.errors import BackendUnavailable, LaunchError

if TYPE_CHECKING:
    from unidist.launch import Launch


def load_mpi(purpose: str) -> ModuleType:
    """Import ``mpi4py.MPI``, which initialises MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no libmpi was found
        raise BackendUnavailable(
            f"{purpose} needs mpi4py and the MPI library of the mpirun that starts the job "
            f"({type(error).__name__}: {error}). Install them with: pip install mpi4py mpich"
        ) from error
    return MPI


def check_world(launch: Launch, engine: str, size: int, rank: int) -> None:
    """Raise LaunchError unless the engine sees the world that the launcher started."""
    if (launch.size, launch.rank) == (size, rank):
        return
    hint = ""
    if size == 1:
        hint = (
            " The usual cause is a library built for another MPI or launcher than the one that "
            "started this process, so that each process became a world of its own."
        )
        if launch.launcher == "srun":
            hint += " Under Slurm, start with `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix`."
        elif launch.launcher == "mpirun":
            hint += " Use the mpirun that belongs to the MPI in this Python environment."
    raise LaunchError(
        f"The launcher ({launch.launcher}: {launch.source}) started {launch.size} processes and "
        f"made this one rank {launch.rank}, but {engine} sees a world of {size} and is rank "
        f"{rank} in it.{hint}"
    )


def subworld(ranks: Sequence[int]) -> Any:
    """A communicator of some ranks of COMM_WORLD; only those ranks call this."""
    mpi = load_mpi("A world made of a list of ranks")
    return mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.Get_group().Incl(list(ranks)))


def is_null(comm: Any) -> bool:
    """Whether a communicator is COMM_NULL, as ``Split`` gives those that it leaves out."""
    return bool(comm == load_mpi("A world made of a communicator").COMM_NULL)


def translate_ranks(comm: Any) -> list[int]:
    """The ranks in COMM_WORLD of a communicator's processes."""
    mpi = load_mpi("A process set made of a communicator")
    world, group = mpi.COMM_WORLD, comm.Get_group()
    return sorted(group.Translate_ranks(list(range(group.Get_size())), world.Get_group()))


def describe_library(mpi: ModuleType) -> str:
    """Name the MPI library in one short line."""
    return " ".join(mpi.Get_library_version().split("\n")[0].split())


def abort_mpi_job() -> None:
    """End every process of the MPI job, when this process takes part in one."""
    module: Any = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return
    if module.COMM_WORLD.Get_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        module.COMM_WORLD.Abort(1)
