"""Builds Horovod 0.28.1 for the torch and the MPI of the running Python environment.

Horovod's last release (2023) is a source distribution that neither compiles against a current
torch nor starts under a current MPICH. This file holds everything that makes it do both, and is
not on the path of a gradient: it runs once, from ``unidist build-horovod``, before the horovod
backend can be used.

The steps, in the order of :func:`build_horovod`::

    1 describe    Target: all that the compiled wheel depends on, hashed into a key
    2 look up     installed already?  ->  done.   wheel in the cache?  ->  4
    3 build       fetch the sources -> apply EDITS -> compile -> put the wheel in the cache
    4 install     pip, then import horovod.torch in a new process and ask what it was built with

Nothing here imports torch or horovod into this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

__all__ = ["EDITS", "BuildError", "Edit", "Progress", "Target", "build_horovod"]

HOROVOD_VERSION = "0.28.1"
# Of the source distribution on the Python package index. pip checks it before it runs any of it.
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

RUNTIME_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging")

# The file inside the wheel that says for what it was built. It travels with the wheel, so it is
# gone when Horovod is uninstalled, and absent from a Horovod that somebody else built.
STAMP = "horovod/_unidist_build.py"

# Settings of Horovod's own build that change what is compiled.
GPU_OPTIONS = (
    "HOROVOD_GPU",
    "HOROVOD_GPU_OPERATIONS",
    "HOROVOD_GPU_ALLREDUCE",
    "HOROVOD_GPU_ALLGATHER",
    "HOROVOD_GPU_BROADCAST",
    "HOROVOD_GPU_ALLTOALL",
    "HOROVOD_GPU_REDUCESCATTER",
)
OTHER_OPTIONS = (
    "HOROVOD_ALLOW_MIXED_GPU_IMPL",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_DEBUG",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_LINK",
    "HOROVOD_ROCM_HOME",
    "HOROVOD_WITH_NVTX",
    "CCL_ROOT",
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
)


class BuildError(RuntimeError):
    """Horovod could not be built or installed.

    ::

        BuildError            a step failed; the message has its first errors and the log's path
         ├── SourceChanged    an edit did not find the text that it expects
         └── ToolMissing      no compiler, CMake, MPI, pip, ...; says what to install
    """


class SourceChanged(BuildError):
    """The source is not the one that an edit was written for."""


class ToolMissing(BuildError):
    """Something that the build needs is not on this machine."""


# --------------------------------------------------------------------------------------------
# The edits: what Horovod 0.28.1 needs to build and start here
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """One change to Horovod's sources: ``find``, there ``count`` times, becomes ``replace``."""

    path: str
    find: str
    replace: str
    reason: str
    count: int = 1

    def apply(self, source: Path) -> None:
        """Change the file under ``source``.

        Raises:
            SourceChanged: the file is missing, or ``find`` is not there exactly ``count`` times.
        """
        file = source / self.path
        text = file.read_text(encoding="utf-8") if file.is_file() else None
        found = 0 if text is None else text.count(self.find)
        if text is None or found != self.count:
            state = "the file does not exist" if text is None else f"found {found} times"
            raise SourceChanged(
                f"An edit of Horovod's sources does not fit.\n"
                f"  file:      {self.path}\n"
                f"  edit:      {self.reason}\n"
                f"  expected:  {self.find!r}\n"
                f"             exactly {self.count} time{'s' * (self.count != 1)}; {state}\n"
                f"The edits are written for the unchanged sources of Horovod {HOROVOD_VERSION}. "
                "For other sources, correct this entry of EDITS in unidist/backends/"
                "horovod_build.py."
            )
        file.write_text(text.replace(self.find, self.replace), encoding="utf-8")


_GPU_OPS = "".join(f"${{{name}}}" for name in GPU_OPTIONS[2:])

EDITS: tuple[Edit, ...] = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "torch's headers need C++20",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "the torch extension sets the standard a second time",
    ),
    Edit(
        "CMakeLists.txt",
        "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        f'include(CheckLanguage)\nset(GPU_OPERATIONS "{_GPU_OPS}")\n'
        'if("${GPU_OPERATIONS}" STREQUAL "")\n    unset(CMAKE_CUDA_COMPILER)\n'
        "else()\n    check_language(CUDA)\nendif()\n"
        'if(NOT CMAKE_CUDA_COMPILER AND NOT "${GPU_OPERATIONS}" STREQUAL "")\n',
        "an nvcc that happens to be on PATH is not used unless GPU operations were asked for",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "elseif (Pytorch_CUDA AND NOT HAVE_CUDA)\n    add_cuda()\nendif()\n",
        "endif()\n",
        "a torch that can do CUDA does not pull CUDA in unless GPU operations were asked for",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_ROCM}" Pytorch_ROCM)\n\nif(Pytorch_ROCM)\n',
        'string(TOUPPER "${Pytorch_ROCM}" Pytorch_ROCM)\n'
        "if(NOT HAVE_CUDA)\n    set(Pytorch_CUDA FALSE)\nendif()\n"
        "if(NOT HAVE_ROCM)\n    set(Pytorch_ROCM FALSE)\nendif()\n\nif(Pytorch_ROCM)\n",
        "compile as a CPU extension unless GPU operations were asked for",
    ),
    Edit(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
        "current CUDA compiles C++17 and later only (used when GPU operations were asked for)",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        "Python 3.12 has no distutils",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib_v2")',
        'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib_v2"\n'
        '    BUILD_WITH_INSTALL_RPATH TRUE INSTALL_RPATH "$ENV{UNIDIST_RPATH}")',
        "look for libraries relative to the wheel: its environment is not the one it was built in",
    ),
    Edit(
        "horovod/runner/mpi_run.py",
        "elif 'MPICH' in output:",
        "elif 'MPICH' in output or 'HYDRA' in output:",
        "mpirun --version of a current MPICH says HYDRA; without this horovodrun refuses it",
    ),
    Edit(
        "horovod/runner/mpi_run.py",
        "mpi in (_IMPI_IMPL, _MPICH_IMPL)\n\n    ssh_args = []\n",
        "mpi in (_IMPI_IMPL, _MPICH_IMPL)\n"
        "    env = dict(os.environ if env is None else env, HOROVODRUN_MPI='1')\n\n"
        "    ssh_args = []\n",
        "the processes see only mpirun's variables, and would not take Horovod for their engine",
    ),
    Edit(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        "Python 3.12 has no distutils; the launcher imports this file always",
    ),
    Edit(
        "setup.py",
        "setup_requires=require_list if is_build_action() else [],",
        "setup_requires=[],",
        "nothing is downloaded while building: what is needed is installed before",
    ),
    Edit(
        "setup.py",
        "    require_list.append('cffi>=1.4.0')",
        "    pass",
        "no file of Horovod imports cffi any more, so the wheel need not ask for it",
    ),
)

# gloo and HTTPRequest use uint8_t and friends without <cstdint>, which GCC 13 no longer includes
# by accident. A flag, because some twenty headers would need the line.
EXTRA_CXXFLAGS = "-include cstdint"


def recipe_hash(edits: Sequence[Edit] = EDITS) -> str:
    """A hash of all that this file does to the sources: a changed recipe is another wheel."""
    text = json.dumps([SDIST_SHA256, EXTRA_CXXFLAGS, [asdict(edit) for edit in edits]])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --------------------------------------------------------------------------------------------
# The target: what the wheel depends on
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mpi:
    """An MPI that can be compiled against."""

    name: str
    version: str
    compiler: Path
    library_dirs: tuple[Path, ...]


@dataclass(frozen=True)
class Target:
    """All that decides whether a compiled Horovod fits this environment."""

    python: str  # cpython-311-x86_64-linux-gnu
    platform: str
    torch: str  # with its local part: 2.14.1+cu130
    mpi: str  # mpich5.0.2, or none
    gpu: str  # NAME=value ... of the GPU operations, or none
    options: str  # other settings of the build, or none
    cpu: str  # instruction sets that the code may use
    rpath: str  # where the extension looks for libtorch and libmpi
    recipe: str

    @property
    def key(self) -> str:
        """Names the wheel in the cache: readable, and different when any ingredient is."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        gpu = "cpu" if self.gpu == "none" else "gpu"
        words = (HOROVOD_VERSION, self.python, f"torch{self.torch}", self.mpi, gpu, digest)
        return re.sub(r"[^A-Za-z0-9_.+-]", "", "-".join(words))


def scripts_dir() -> Path:
    """The ``bin`` of the running environment, where wheels put mpicxx, mpirun and cmake."""
    return Path(sysconfig.get_path("scripts"))


def search_path(env: Mapping[str, str]) -> str:
    """PATH with the environment's own ``bin`` first, activated or not."""
    return os.pathsep.join([str(scripts_dir()), env.get("PATH", os.defpath)])


def find_mpi(env: Mapping[str, str]) -> Mpi:
    """The MPI of this environment, else of this machine, from its C++ compiler wrapper.

    Reads the version from ``mpi.h``, so that no compiler is needed to find a cached wheel.
    """
    wrapper = shutil.which("mpicxx", path=search_path(env))
    if wrapper is None:
        raise ToolMissing(
            f"No MPI compiler: mpicxx is neither in {scripts_dir()} nor on PATH. Either\n"
            "  pip install mpich                    (needs no root), then run this again, or\n"
            "  unidist build-horovod --without-mpi  for Horovod with Gloo only"
        )
    try:
        shown = subprocess.run(
            [wrapper, "-show"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise ToolMissing(f"The MPI compiler {wrapper} does not work: {detail}") from error
    includes: list[Path] = []
    libraries: list[Path] = []
    for word in shlex.split(shown):
        for prefix, paths in (("-I", includes), ("-L", libraries), ("-Wl,-rpath,", libraries)):
            if word.startswith(prefix) and word != prefix:
                paths.append(Path(os.path.realpath(word[len(prefix) :])))
    includes.append(Path("/usr/include"))  # the wrapper names no directory that is a default
    for directory in includes:
        with contextlib.suppress(OSError):
            header = (directory / "mpi.h").read_text(encoding="utf-8", errors="replace")
            name, version = mpi_version(header)
            return Mpi(name, version, Path(wrapper), tuple(dict.fromkeys(libraries)))
    raise ToolMissing(
        f"The MPI compiler {wrapper} names no directory with mpi.h: the MPI is only half "
        "installed (on Debian: apt install libmpich-dev or libopenmpi-dev)."
    )


def mpi_version(header: str) -> tuple[str, str]:
    """The implementation and its version, from the text of its ``mpi.h``."""

    def macro(name: str) -> str | None:
        match = re.search(rf'^\s*#\s*define\s+{name}\s+"?([^"\s]+)"?', header, re.MULTILINE)
        return match.group(1) if match else None

    # Intel MPI and MVAPICH also define MPICH's macro: they come first.
    names = {
        "intelmpi": "I_MPI_VERSION",
        "mvapich": "MVAPICH2_VERSION",
        "mpich": "MPICH_VERSION",
    }
    for name, version_macro in names.items():
        version = macro(version_macro)
        if version:
            return name, version
    parts = [macro(f"OMPI_{part}_VERSION") for part in ("MAJOR", "MINOR", "RELEASE")]
    if all(parts):
        return "openmpi", ".".join(part for part in parts if part)
    return "mpi", hashlib.sha256(header.encode()).hexdigest()[:8]


def find_torch() -> tuple[str, Path]:
    """The version of the installed torch, with its local part, and its directory.

    Read from torch/version.py: the wheel's metadata may lack the ``+cu130``, and importing torch
    takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ToolMissing("torch is not installed in this environment: pip install torch")
    directory = Path(next(iter(spec.submodule_search_locations)))
    text = (directory / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return (match.group(1) if match else importlib.metadata.version("torch")), directory


def cpu_flags(env: Mapping[str, str], cpuinfo: str = "/proc/cpuinfo") -> str:
    """The compiler flags for this processor: those that Horovod's CMake would find itself."""
    if "HOROVOD_BUILD_ARCH_FLAGS" in env:
        return env["HOROVOD_BUILD_ARCH_FLAGS"]
    text = ""
    with contextlib.suppress(OSError):
        text = Path(cpuinfo).read_text(encoding="utf-8")
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    present = match.group(1).split() if match else []
    return " ".join(f"-m{flag}" for flag in ("f16c", "avx", "fma") if flag in present)


def rpath(directories: Sequence[Path], extension_dir: Path, prefix: Path) -> str:
    """CMake's list of places where the extension looks for its libraries.

    Relative to the extension for what lies in the same environment, absolute for the rest.
    """
    extension_dir, prefix = (Path(os.path.realpath(path)) for path in (extension_dir, prefix))
    entries = []
    for directory in directories:
        directory = Path(os.path.realpath(directory))
        inside = prefix in directory.parents and prefix in extension_dir.parents
        relative = os.path.relpath(directory, extension_dir)
        entries.append(f"$ORIGIN/{relative}" if inside else str(directory))
    return ";".join(dict.fromkeys(entries))


def describe(env: Mapping[str, str], mpi: Mpi | None) -> Target:
    """What a wheel for this environment depends on."""
    torch_version, torch_dir = find_torch()
    directories = [torch_dir / "lib", *(mpi.library_dirs if mpi else ())]
    extension_dir = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"

    def chosen(names: Sequence[str]) -> str:
        return " ".join(f"{name}={env[name]}" for name in names if env.get(name)) or "none"

    return Target(
        python=str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
        platform=sysconfig.get_platform(),
        torch=torch_version,
        mpi=f"{mpi.name}{mpi.version}" if mpi else "none",
        gpu=chosen(GPU_OPTIONS),
        options=chosen(OTHER_OPTIONS),
        cpu=cpu_flags(env),
        rpath=rpath(directories, extension_dir, Path(sys.prefix)),
        recipe=recipe_hash(),
    )


# --------------------------------------------------------------------------------------------
# The cache
# --------------------------------------------------------------------------------------------


def cache_dir(env: Mapping[str, str]) -> Path:
    """``$UNIDIST_CACHE``, else ``$XDG_CACHE_HOME/unidist``, else ``~/.cache/unidist``."""
    if env.get("UNIDIST_CACHE"):
        return Path(env["UNIDIST_CACHE"]).expanduser().absolute()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").expanduser().absolute() / "unidist"


def cached_wheel(cache: Path, key: str) -> Path | None:
    """The whole wheel of this key, or None."""
    for wheel in sorted((cache / "wheels" / key).glob("horovod-*.whl")):
        with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
            if archive.testzip() is None:
                return wheel
    return None


def store(file: Path, directory: Path) -> Path:
    """Copy ``file`` into ``directory`` of the cache, so that readers see all of it or nothing.

    Two builds at once each write a file of their own and rename it; the later one stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".", suffix=".tmp")
    os.close(handle)
    try:
        shutil.copyfile(file, temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, directory / file.name)
    except BaseException:
        os.unlink(temporary)
        raise
    return directory / file.name


# --------------------------------------------------------------------------------------------
# Running commands: a sign of life, a log, and nothing left behind
# --------------------------------------------------------------------------------------------

_STEP = re.compile(r"^\[\s*(\d+)%\]\s+(Building|Linking|Built)\s+(.*)$")
_CONFIGURE = re.compile(r"^-- (.+)$")
_PIP = re.compile(r"^\s*((?:Collecting|Downloading|Installing|Preparing|Successfully) .+)$")


def parse_step(line: str) -> str | None:
    """What a line of the build's output says about where it is, or None.

    ``[ 42%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o`` becomes
    ``42% Building horovod/torch/adapter_v2.cc``.
    """
    step = _STEP.match(line)
    if step:
        percent, verb, rest = step.groups()
        name = re.sub(r"CMakeFiles/[^/]+\.dir/(?:__/)*", "", rest.split()[-1])
        return f"{percent}% {verb} {re.sub(r'[.]o$', '', name)}"
    configure = _CONFIGURE.match(line)
    if configure:
        return f"configuring: {configure.group(1)}"
    pip = _PIP.match(line)
    return f"pip: {pip.group(1)}" if pip else None


class Progress:
    """Tells that the build is alive: one line that changes on a terminal, else a line at times."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        every: float = 8.0,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._live = stream.isatty()
        self._every = 0.2 if self._live else every
        self._began = self._last = clock()
        self._step = "starting"

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._write(text, stays=True)

    def start(self, step: str) -> None:
        """Enter a new step and announce it."""
        self._step = step.splitlines()[0]
        self.say(step)
        self._last = self._clock()

    def feed(self, line: str) -> None:
        """Take a line of the running command's output."""
        self._step = parse_step(line) or self._step

    def tick(self) -> None:
        """Print the state if it is time to; call it about once a second or oftener."""
        now = self._clock()
        if now - self._last >= self._every:
            self._last = now
            minutes, seconds = divmod(int(now - self._began), 60)
            self._write(f"  {minutes}:{seconds:02d}  {self._step}", stays=False)

    def _write(self, text: str, stays: bool) -> None:
        if self._live:
            # \r and "erase to the end of the line": a shorter text leaves no rest of a longer one.
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[K" + (text + "\n" if stays else text[:width]))
        else:
            self._stream.write(text + "\n")
        self._stream.flush()


_COMPILER_ERROR = re.compile(r"\berror: ")
_OTHER_ERRORS = re.compile(
    r"CMake Error|undefined reference|cannot find -l|internal compiler error|Killed|"
    r"^(?:ERROR|\w+Error)\b|^make.*\*\*\*|No space left",
)


def first_errors(output: str, limit: int = 5) -> list[str]:
    """The lines of a failed command's output that say why: compiler errors, else others, else
    the last lines."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    for pattern in (_COMPILER_ERROR, _OTHER_ERRORS):
        # CMake puts what went wrong on the line after "CMake Error at FILE:LINE (message):".
        found = [
            f"{line} {lines[i + 1].strip()}"
            if "CMake Error" in line and i + 1 < len(lines)
            else line
            for i, line in enumerate(lines)
            if pattern.search(line)
        ]
        if found:
            return list(dict.fromkeys(found))[:limit]
    return lines[-limit:]


def end_group(process: subprocess.Popen[bytes], grace: float = 5.0) -> None:
    """End a command started in a session of its own, and every process that it started."""
    try:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=grace)
    finally:  # also when an impatient second Ctrl-C cuts the grace short
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Runner:
    """Runs the commands of one build, all into one log."""

    log: Path
    progress: Progress

    def run(
        self, what: str, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None
    ) -> str:
        """Run a command to its end and return its output (stdout and stderr).

        Raises:
            BuildError: it failed; the message has its first errors and the log's path.
        """
        output: list[str] = []
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            try:
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that Ctrl-C is ours to pass on, to all of them
                )
            except OSError as error:
                raise BuildError(f"{what} failed: {error}\nFull log: {self.log}") from error
            try:
                for line in self._lines(process):
                    log.write(line + "\n")
                    log.flush()
                    output.append(line)
                    self.progress.feed(line)
            except BaseException:
                end_group(process)
                raise
            status = process.wait()
        if status != 0:
            reasons = "\n".join(f"  {line[:300]}" for line in first_errors("\n".join(output)))
            raise BuildError(
                f"{what} failed (exit status {status}):\n{reasons}\nFull log: {self.log}"
            )
        return "\n".join(output)

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[str]:
        """The output line by line; ticks the progress while there is none."""
        assert process.stdout is not None
        rest = b""
        with selectors.DefaultSelector() as selector, process.stdout as stdout:
            selector.register(stdout, selectors.EVENT_READ)
            while True:
                ready = selector.select(timeout=0.5)
                self.progress.tick()
                if not ready:
                    continue
                chunk = os.read(stdout.fileno(), 65536)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", "replace").rstrip("\r")
        if rest:
            yield rest.decode("utf-8", "replace")


@contextlib.contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP act like Ctrl-C: the commands run in sessions of their own,
    so a signal that ended only this process would leave a compiler running."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --------------------------------------------------------------------------------------------
# The steps
# --------------------------------------------------------------------------------------------


def check_tools(env: Mapping[str, str]) -> None:
    """See that everything the compile needs is here.

    Raises:
        ToolMissing: with all that is missing, not only the first.
    """
    path = search_path(env)
    missing = []
    compiler = shlex.split(env.get("CXX") or "")[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(name, path=path) for name in compiler):
        missing.append(
            f"a C++ compiler ({' or '.join(compiler)}): on Debian apt install g++, on Fedora "
            "dnf install gcc-c++"
        )
    if not any(shutil.which(name, path=path) for name in ("gmake", "make")):
        missing.append("make: apt install make, or dnf install make")
    cmake = shutil.which(env.get("HOROVOD_CMAKE") or "cmake", path=path)
    if cmake is None:
        missing.append("CMake 3.13 or newer: pip install cmake")
    else:
        try:
            shown = subprocess.run(
                [cmake, "--version"], capture_output=True, text=True, timeout=60
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            shown = str(error)
        match = re.search(r"version (\d+)\.(\d+)", shown)
        if match is None:
            missing.append(f"a working CMake ({cmake} --version said {shown.strip()!r})")
        elif (int(match.group(1)), int(match.group(2))) < (3, 13):
            # Below this, Horovod's setup.py would fetch a CMake of its own without a word.
            missing.append(f"CMake 3.13 or newer: {cmake} is older: pip install cmake")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        missing.append(f"Python's headers ({header}): apt install python3-dev")
    if missing:
        lines = "\n".join(f"  - {item}" for item in missing)
        raise ToolMissing(f"Horovod cannot be compiled here. Missing:\n{lines}")


def ensure_installed(names: Sequence[str], runner: Runner, env: Mapping[str, str]) -> None:
    """Install the small Python packages among ``names`` that this environment lacks."""
    missing = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        what = f"installing {', '.join(missing)}"
        runner.progress.start(what)
        runner.run(what, [*PIP, "install", *missing], env)


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def build_needs() -> tuple[str, ...]:
    """What must be importable while Horovod's setup.py runs."""
    try:
        version = importlib.metadata.version("setuptools")
        has_own_bdist_wheel = tuple(map(int, version.split(".")[:2])) >= (70, 1)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        has_own_bdist_wheel = True  # none yet: pip will install a current one
    return (
        ("setuptools", "packaging") if has_own_bdist_wheel else ("setuptools", "wheel", "packaging")
    )


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def fetch(cache: Path, work: Path, runner: Runner, env: Mapping[str, str]) -> Path:
    """The source distribution of Horovod 0.28.1, from the cache or with pip; its hash is checked.

    pip runs a package's setup.py even to download it; with the hash in the requirement it checks
    first, and without build isolation it needs nothing more from the index.
    """
    name = f"horovod-{HOROVOD_VERSION}.tar.gz"
    kept = cache / "sources" / name
    if kept.is_file() and sha256(kept) == SDIST_SHA256:
        return kept
    what = f"fetching the sources of Horovod {HOROVOD_VERSION}"
    runner.progress.start(what)
    requirement = work / "requirement.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    runner.run(
        what,
        [
            *(*PIP, "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"),
            *("--require-hashes", "--dest", str(work), "--requirement", str(requirement)),
        ],
        env,
    )
    if not (work / name).is_file() or sha256(work / name) != SDIST_SHA256:
        raise BuildError(
            f"pip did not bring {name} with the expected hash.\nFull log: {runner.log}"
        )
    return store(work / name, kept.parent)


def unpack(sdist: Path, work: Path) -> Path:
    """Unpack the source distribution and apply every edit; the folder of the sources."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(work, filter="data")
        else:
            archive.extractall(work)
    source = work / f"horovod-{HOROVOD_VERSION}"
    for edit in EDITS:
        edit.apply(source)
    return source


def build_environment(
    env: Mapping[str, str], target: Target, mpi: Mpi | None, jobs: int
) -> dict[str, str]:
    """The environment variables under which Horovod's setup.py runs."""
    unwanted = {
        "CMAKE_GENERATOR",  # setup.py speaks to make
        "MAKELEVEL",  # and is not part of a make that may be running this
        "MFLAGS",
        "HOROVOD_LOCAL_VERSION",
        "HOROVOD_SKIP_COMPILE",
        "HOROVOD_WITHOUT_GLOO",
        "HOROVOD_WITHOUT_MPI",
        "HOROVOD_WITHOUT_PYTORCH",
        "HOROVOD_WITH_MPI",
        "HOROVOD_WITH_MXNET",
        "HOROVOD_WITH_TENSORFLOW",
    }
    result = {name: value for name, value in env.items() if name not in unwanted}
    # The compiler wrapper's directory comes first: CMake must find this MPI, not another.
    first = [str(mpi.compiler.parent)] if mpi else []
    result.update(
        PATH=os.pathsep.join([*first, search_path(env)]),
        CMAKE_POLICY_VERSION_MINIMUM="3.5",  # CMake 4 refuses gloo's older minimum
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_TENSORFLOW="1",
        HOROVOD_WITHOUT_MXNET="1",
        CXXFLAGS=f"{env.get('CXXFLAGS', '')} {EXTRA_CXXFLAGS}".strip(),
        MAKEFLAGS=f"-j{jobs}",
        UNIDIST_RPATH=target.rpath,
    )
    result["HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    if target.cpu:
        result["HOROVOD_BUILD_ARCH_FLAGS"] = target.cpu
    if target.gpu == "none" and "HOROVOD_WITH_NVTX" not in env:
        result["HOROVOD_WITHOUT_NVTX"] = "1"
    return result


# Calls setuptools as pip would, without pip between us and the compiler's output.
_BUILD = "import sys; from setuptools.build_meta import __legacy__ as b; b.build_wheel(sys.argv[1])"


def compile_wheel(
    target: Target,
    mpi: Mpi | None,
    cache: Path,
    runner: Runner,
    env: Mapping[str, str],
    jobs: int,
) -> Path:
    """Fetch, adapt and compile; returns the wheel in the cache."""
    check_tools(env)
    ensure_installed(build_needs(), runner, env)
    with tempfile.TemporaryDirectory(prefix="unidist-horovod-") as temporary:
        work = Path(temporary)
        source = unpack(fetch(cache, work, runner, env), work)
        (source / STAMP).write_text(f"KEY = {target.key!r}\nTARGET = {asdict(target)!r}\n")
        mpi_words = f"{mpi.name} {mpi.version} ({mpi.compiler})" if mpi else "no MPI (Gloo only)"
        runner.progress.start(
            f"compiling Horovod {HOROVOD_VERSION} for torch {target.torch}, {mpi_words}, "
            f"{jobs} at a time; this takes minutes\n  log: {runner.log}"
        )
        runner.run(
            "compiling Horovod",
            [sys.executable, "-c", _BUILD, str(work / "wheel")],
            build_environment(env, target, mpi, jobs),
            cwd=source,
        )
        wheels = list((work / "wheel").glob("horovod-*.whl"))
        if len(wheels) != 1:
            raise BuildError(f"The build left {len(wheels)} wheels, not 1.\nFull log: {runner.log}")
        return store(wheels[0], cache / "wheels" / target.key)


def installed_key() -> str | None:
    """The key of the Horovod in this environment; None if there is none or it is not ours."""
    try:
        stamp = importlib.metadata.distribution("horovod").locate_file(STAMP)
        text = Path(str(stamp)).read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    match = re.search(r"^KEY = '([^']+)'$", text, re.MULTILINE)
    return match.group(1) if match else None


_VERIFY = (
    "import horovod, horovod.torch as h; "
    "print('found:', horovod.__version__, bool(h.mpi_built()), bool(h.gloo_built()))"
)


def verify(runner: Runner, env: Mapping[str, str], mpi: Mpi | None) -> None:
    """Import horovod.torch in a new process and see that it has what was asked for."""
    what = "importing the installed horovod.torch"
    runner.progress.start(what)
    # Not in the current directory: a folder named horovod there would be imported instead.
    with tempfile.TemporaryDirectory(prefix="unidist-horovod-") as elsewhere:
        output = runner.run(what, [sys.executable, "-c", _VERIFY], env, cwd=Path(elsewhere))
    expected = f"found: {HOROVOD_VERSION} {mpi is not None} True"
    if expected not in output.splitlines():  # torch may print warnings around it
        raise BuildError(
            f"{what}: version, MPI built, Gloo built should be {expected!r}, but it printed\n"
            f"  {output.strip()}\nFull log: {runner.log}"
        )


def install(wheel: Path, runner: Runner, env: Mapping[str, str], mpi: Mpi | None) -> None:
    """Install the wheel and what it needs at run time, and verify the result."""
    ensure_installed(RUNTIME_NEEDS, runner, env)
    runner.progress.start(f"installing {wheel.name}")
    runner.run(
        "installing Horovod",
        [*PIP, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        env,
    )
    verify(runner, env, mpi)


def available_cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def build_horovod(
    progress: Progress,
    *,
    without_mpi: bool = False,
    force: bool = False,
    wheel_only: bool = False,
    jobs: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Path | None:
    """Have a Horovod that fits this environment: built, or from the cache, or there already.

    Args:
        without_mpi: build with Gloo only.
        force: build even if a wheel is cached or Horovod is installed.
        wheel_only: stop when the wheel is there.
        jobs: compilers at a time; default: the processors of this process.
        env: the environment variables; default: those of this process.

    Returns:
        The wheel in the cache; None if Horovod is installed already and no wheel is cached.

    Raises:
        BuildError: with the reason, and the log's path if a command failed.
    """
    env = dict(os.environ) if env is None else env
    if importlib.util.find_spec("pip") is None:
        raise ToolMissing(f"pip is not in this environment: {sys.executable} -m ensurepip")
    mpi = None if without_mpi else find_mpi(env)
    target = describe(env, mpi)
    cache = cache_dir(env)
    try:
        (cache / "logs").mkdir(parents=True, exist_ok=True)
        handle, log = tempfile.mkstemp(dir=cache / "logs", prefix=f"{target.key}-", suffix=".log")
    except OSError as error:
        raise BuildError(
            f"The cache {cache} cannot be written ({error}): "
            "set UNIDIST_CACHE to a folder that can."
        ) from error
    os.close(handle)
    runner = Runner(Path(log), progress)
    with signals_as_interrupt():
        wheel = _obtain(target, mpi, cache, runner, env, force, wheel_only, jobs)
    runner.log.unlink(missing_ok=True)  # only the log of a failure is worth keeping
    return wheel


def _obtain(
    target: Target,
    mpi: Mpi | None,
    cache: Path,
    runner: Runner,
    env: Mapping[str, str],
    force: bool,
    wheel_only: bool,
    jobs: int | None,
) -> Path | None:
    wheel = None if force else cached_wheel(cache, target.key)
    if not force and not wheel_only and installed_key() == target.key:
        try:
            verify(runner, env, mpi)
        except BuildError as error:
            runner.progress.say(f"Horovod is installed, but does not work here: {error}")
        else:
            runner.progress.say(f"Horovod for this environment is installed ({target.key}).")
            return wheel
    if wheel is not None:
        runner.progress.say(f"found in the cache: {wheel}")
        if wheel_only:
            return wheel
        try:
            install(wheel, runner, env, mpi)
            return wheel
        except BuildError as error:
            runner.progress.say(f"The cached wheel does not work here, building anew: {error}")
    wheel = compile_wheel(target, mpi, cache, runner, env, jobs or available_cores())
    if not wheel_only:
        install(wheel, runner, env, mpi)
    return wheel
