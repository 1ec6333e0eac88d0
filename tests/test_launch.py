"""Who started this process, and as which rank: launchers' variables against what is made of them.

The variables were copied from real runs of each launcher (reduced to those that tell a place).
"""

from __future__ import annotations

import pytest

from unidist.launch import DEFAULT_BACKEND, Launch, choose_backend, detect

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "40001",
}
HOROVODRUN_GLOO = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BARE = {"RANK": "3", "WORLD_SIZE": "4"}
# An allocation of four tasks: every process in it sees these, also one that is no rank.
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4"}
FULL_PLACE = (3, 4, 1, 2, 1, 2)
LOCAL_PLACE = (3, 4, 1, 2, None, None)

PLACES = {
    "nothing": ({}, "none", (0, 1)),
    "torchrun": (TORCHRUN, "torchrun", FULL_PLACE),
    "horovodrun --gloo": (HOROVODRUN_GLOO, "horovodrun", FULL_PLACE),
    "Open MPI": (OPEN_MPI, "mpirun", LOCAL_PLACE),
    "MVAPICH": (MVAPICH, "mpirun", LOCAL_PLACE),
    "MPICH": (HYDRA, "mpirun", LOCAL_PLACE),
    "PMI without local ranks": (PMI2, "mpirun", (3, 4)),
    "bare": (BARE, "env", (3, 4)),
    "bare with local ranks": (
        BARE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        "env",
        LOCAL_PLACE,
    ),
    "UNIDIST_*": (
        TORCHRUN
        | {
            "UNIDIST_RANK": "1",
            "UNIDIST_SIZE": "2",
            "UNIDIST_LOCAL_RANK": "0",
            "UNIDIST_LOCAL_SIZE": "1",
        },
        "env",
        (1, 2, 0, 1),
    ),
    "srun": (SRUN, "srun", (3, 4, 1)),
    "srun, older variables": (
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NPROCS": "4"},
        "srun",
        (3, 4),
    ),
    "srun --mpi=pmi2": (SRUN | PMI2, "srun", (3, 4, 1)),
    # A step smaller than its allocation: the step's number of tasks counts.
    "srun -n 2 in an allocation of 4": (
        SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        "srun",
        (1, 2, 1),
    ),
    # Ranks that are started from an interactive shell inherit its job name.
    "srun in salloc": (SRUN | {"SLURM_JOB_NAME": "interactive"}, "srun", (3, 4, 1)),
    "srun in srun --pty bash": (SRUN | {"SLURM_JOB_NAME": "bash"}, "srun", (3, 4, 1)),
    # -- no ranks --
    "a batch script": (ALLOCATION | {"SLURM_JOB_NAME": "train"}, "none", (0, 1)),
    "a shell of salloc": (
        ALLOCATION
        | {
            "SLURM_JOB_NAME": "interactive",
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
        },
        "none",
        (0, 1),
    ),
    "srun --pty bash": (
        ALLOCATION | {"SLURM_JOB_NAME": "bash", "SLURM_STEP_ID": "0"},
        "none",
        (0, 1),
    ),
    "one process of a batch system": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "none", (0, 1)),
    "variables without a value": ({"RANK": "", "WORLD_SIZE": "", "PMI_RANK": ""}, "none", (0, 1)),
    "only one of the common names": ({"WORLD_SIZE": "4"}, "none", (0, 1)),
    # -- several launchers: the nearest wins --
    "torchrun in srun": (SRUN | TORCHRUN, "torchrun", FULL_PLACE),
    "torchrun in mpirun": (HYDRA | TORCHRUN, "torchrun", FULL_PLACE),
    "horovodrun in an allocation": (ALLOCATION | HOROVODRUN_GLOO, "horovodrun", FULL_PLACE),
    # Every rank of mpirun sees the SLURM_PROCID=0 of the one task that Slurm started.
    "MPICH in an allocation": (ALLOCATION | {"SLURM_STEP_ID": "0"} | HYDRA, "mpirun", LOCAL_PLACE),
    "Open MPI in an allocation": (ALLOCATION | OPEN_MPI, "mpirun", LOCAL_PLACE),
    "mpirun -n 1": (
        {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        "mpirun",
        (0, 1, 0, 1),
    ),
    "mpirun where RANK is left over": (BARE | HYDRA, "mpirun", LOCAL_PLACE),
}


@pytest.mark.parametrize(("env", "launcher", "place"), PLACES.values(), ids=PLACES.keys())
def test_place(env: dict[str, str], launcher: str, place: tuple[int, ...]) -> None:
    launch = detect(env)
    assert launch == Launch(launcher, *place, source=launch.source)
    assert (launch.source == "") == (launcher == "none")


# Variables, and the words that the error must have: what is wrong, and what was found.
FAULTS = {
    "torchrun, no integer": (TORCHRUN | {"RANK": "three"}, ["RANK", "'three'"]),
    "torchrun, no rank": (
        {name: value for name, value in TORCHRUN.items() if name != "RANK"},
        ["torchrun", "RANK unset", "WORLD_SIZE=4"],
    ),
    "torchrun, neither": ({"TORCHELASTIC_RUN_ID": "x"}, ["RANK unset", "WORLD_SIZE unset"]),
    "horovodrun, no size": ({"HOROVOD_RANK": "0"}, ["HOROVOD_RANK=0", "HOROVOD_SIZE unset"]),
    "horovodrun, no rank": ({"HOROVOD_SIZE": "2"}, ["HOROVOD_RANK unset", "HOROVOD_SIZE=2"]),
    "Open MPI, no size": (
        {"OMPI_COMM_WORLD_RANK": "1"},
        ["OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE unset"],
    ),
    "MVAPICH, no rank": (
        {"MV2_COMM_WORLD_SIZE": "2"},
        ["MV2_COMM_WORLD_RANK unset", "MV2_COMM_WORLD_SIZE=2"],
    ),
    "PMI, no size": ({"PMI_RANK": "1"}, ["PMI_RANK=1", "PMI_SIZE unset"]),
    "PMI, no rank": ({"PMI_SIZE": "2"}, ["PMI_RANK unset", "PMI_SIZE=2"]),
    "srun, no size": ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, ["SLURM_NTASKS unset"]),
    "UNIDIST_*, no size": ({"UNIDIST_RANK": "0"}, ["UNIDIST_SIZE unset"]),
    "a rank too high": (BARE | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
    "a negative rank": (BARE | {"RANK": "-1"}, ["RANK=-1"]),
    "no processes": (BARE | {"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    "local rank, no integer": (TORCHRUN | {"LOCAL_RANK": "x"}, ["LOCAL_RANK", "'x'"]),
}


@pytest.mark.parametrize(("env", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_fault(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        detect(env)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value} does not say {missing}"


def test_environment_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIDIST_RANK", "1")
    monkeypatch.setenv("UNIDIST_SIZE", "3")
    assert (detect().rank, detect().size) == (1, 3)


@pytest.mark.parametrize(
    ("argument", "variable", "launcher", "backend"),
    [
        ("mpi", "torch", "torchrun", "mpi"),
        (None, "torch", "mpirun", "torch"),
        (None, "", "mpirun", "mpi"),
        (None, None, "torchrun", "torch"),
        (None, None, "horovodrun", "horovod"),
        (None, None, "mpirun", "mpi"),
        (None, None, "srun", "mpi"),
        (None, None, "env", "torch"),
        (None, None, "none", "serial"),
    ],
)
def test_backend(argument: str | None, variable: str | None, launcher: str, backend: str) -> None:
    env = {} if variable is None else {"UNIDIST_BACKEND": variable}
    assert choose_backend(argument, env, Launch(launcher)) == backend


def test_horovodrun_over_mpi_takes_horovod() -> None:
    env = {"HOROVODRUN_MPI": "1"}
    assert choose_backend(None, env, Launch("mpirun")) == "horovod"
    assert choose_backend("mpi", env, Launch("mpirun")) == "mpi"
    assert choose_backend(None, env | {"UNIDIST_BACKEND": "torch"}, Launch("mpirun")) == "torch"
    assert choose_backend(None, env, Launch("torchrun")) == "torch"  # a job started by a rank


def test_every_launcher_has_a_backend() -> None:
    launchers = {launcher for _, launcher, _ in PLACES.values()}
    assert launchers == set(DEFAULT_BACKEND)
