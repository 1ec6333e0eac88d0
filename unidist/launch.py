"""Who started this process, and as which rank: a pure function of the environment.

No library is initialised to find out, since the one that is asked may be the wrong one: a
process that is linked to one MPI and started by another's ``mpirun`` would report a world of one.

Several launchers' variables are often present at once (``mpirun`` inside a Slurm allocation,
``torchrun`` inside ``srun``). The launcher that is nearest to the process wins, hence the order
of ``_DETECTORS``. SLURM_* come last: inside ``salloc`` they are set for processes that Slurm did
not start as ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Env = Mapping[str, str]


@dataclass(frozen=True)
class Launch:
    """One process' place in the job. Fields the launcher does not tell are None.

    ``launcher`` is one of ``torchrun``, ``horovodrun``, ``mpirun``, ``srun``, ``env`` (bare RANK
    and WORLD_SIZE) and ``none``. ``cross_rank`` is the index of this process' node among the
    nodes that have its local rank, ``cross_size`` the number of such nodes.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    #: the variables that decided, for error messages
    source: str = ""


def _integer(env: Env, name: str) -> int | None:
    text = env.get(name)
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"The environment variable {name} must be an integer, but is {text!r}. "
            "Correct it, or unset it to run as a single process."
        ) from None


def _from(
    launcher: str,
    env: Env,
    rank: str,
    size: str,
    local_rank: str | None = None,
    local_size: str | None = None,
    cross_rank: str | None = None,
    cross_size: str | None = None,
) -> Launch:
    """Read one launcher's variables; a rank without a size, or the reverse, is an error."""
    found_rank, found_size = _integer(env, rank), _integer(env, size)
    if found_rank is None or found_size is None:
        state = ", ".join(
            f"{name}={env[name]}" if env.get(name) else f"{name} unset" for name in (rank, size)
        )
        raise ValueError(
            f"This process' place in the {launcher} job is unknown: {state}. "
            f"Start it with the launcher, set both, or unset all of the launcher's variables."
        )
    if not 0 <= found_rank < found_size:
        raise ValueError(
            f"{rank}={found_rank} is not a rank of a world of {size}={found_size} processes."
        )

    def optional(name: str | None) -> int | None:
        return _integer(env, name) if name else None

    return Launch(
        launcher,
        found_rank,
        found_size,
        optional(local_rank),
        optional(local_size),
        optional(cross_rank),
        optional(cross_size),
        source=f"{rank}={found_rank}, {size}={found_size}",
    )


def _has(env: Env, *names: str) -> bool:
    return any(env.get(name) for name in names)


def _unidist(env: Env) -> Launch | None:
    if not _has(env, "UNIDIST_RANK", "UNIDIST_SIZE"):
        return None
    return _from(
        "env", env, "UNIDIST_RANK", "UNIDIST_SIZE", "UNIDIST_LOCAL_RANK", "UNIDIST_LOCAL_SIZE"
    )


def _torchrun(env: Env) -> Launch | None:
    if not _has(env, "TORCHELASTIC_RUN_ID"):
        return None
    return _from(
        "torchrun",
        env,
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    )


def _horovodrun(env: Env) -> Launch | None:
    if not _has(env, "HOROVOD_RANK", "HOROVOD_SIZE"):
        return None
    return _from(
        "horovodrun",
        env,
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
    )


def _open_mpi(env: Env) -> Launch | None:
    if not _has(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    # OMPI_COMM_WORLD_NODE_RANK is a rank within the node over several jobs, not a node's index.
    return _from(
        "mpirun",
        env,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )


def _mvapich(env: Env) -> Launch | None:
    if not _has(env, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"):
        return None
    return _from(
        "mpirun",
        env,
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    )


def _pmi(env: Env) -> Launch | None:
    if not _has(env, "PMI_RANK", "PMI_SIZE"):
        return None
    # A lone PMI_RANK=0, PMI_SIZE=1 may be left by a batch system around one process. With
    # MPI_LOCALRANKID it was set by Hydra or Intel MPI for this process.
    size = _integer(env, "PMI_SIZE")
    if size == 1 and not _has(env, "MPI_LOCALRANKID"):
        return None
    # `srun --mpi=pmi2` sets PMI_* too, and tells the local rank in SLURM_LOCALID.
    if (
        not _has(env, "MPI_LOCALRANKID")
        and _in_step(env)
        and (_integer(env, _slurm_size(env)) == size)
    ):
        return _from("srun", env, "PMI_RANK", "PMI_SIZE", "SLURM_LOCALID")
    return _from("mpirun", env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _bare(env: Env) -> Launch | None:
    if not (_has(env, "RANK") and _has(env, "WORLD_SIZE")):
        return None
    return _from("env", env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


# A step knows its own number of tasks. The others are the allocation's, which an interactive
# shell shows although it is one process.
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")


def _in_step(env: Env) -> bool:
    """Whether Slurm started this process as a rank: as a task of a step that is not a shell.

    A batch script has SLURM_PROCID=0 and no step. An interactive shell (``srun --pty bash``,
    ``salloc``) is a step of one task under a telling job name. Ranks that are started from that
    shell by ``srun`` inherit the name, but are a step of several tasks.
    """
    if not (_has(env, "SLURM_PROCID") and _has(env, "SLURM_STEP_ID")):
        return False
    if env.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return (_integer(env, "SLURM_STEP_NUM_TASKS") or 1) > 1
    return True


def _slurm_size(env: Env) -> str:
    """The name of the variable that holds the number of tasks."""
    return next((name for name in _SLURM_SIZES if _has(env, name)), "SLURM_NTASKS")


def _slurm(env: Env) -> Launch | None:
    if not _in_step(env):
        return None
    return _from("srun", env, "SLURM_PROCID", _slurm_size(env), "SLURM_LOCALID")


_DETECTORS: tuple[Callable[[Env], Launch | None], ...] = (
    _unidist,
    _torchrun,
    _horovodrun,
    _open_mpi,
    _mvapich,
    _pmi,
    _bare,
    _slurm,
)


def detect(env: Env | None = None) -> Launch:
    """Return how this process was launched; a world of one when nothing says otherwise.

    Args:
        env: the environment; None means ``os.environ``.

    Raises:
        ValueError: the deciding launcher's variables are incomplete or no integers.
    """
    env = os.environ if env is None else env
    for detector in _DETECTORS:
        launch = detector(env)
        if launch is not None:
            return launch
    return Launch("none")


#: launcher -> the backend that is native to it
DEFAULT_BACKEND = {
    "torchrun": "torch",
    "horovodrun": "horovod",
    "mpirun": "mpi",
    "srun": "mpi",
    "env": "torch",
    "none": "serial",
}


def choose_backend(argument: str | None, env: Env, launch: Launch) -> str:
    """Name the backend: argument, then UNIDIST_BACKEND, then the launcher's own.

    Over MPI, horovodrun becomes mpirun, and only a variable tells (see horovod_build.py).
    """
    asked = argument or env.get("UNIDIST_BACKEND")
    if not asked and launch.launcher == "mpirun" and env.get("HOROVODRUN_MPI"):
        return "horovod"
    return asked or DEFAULT_BACKEND[launch.launcher]
