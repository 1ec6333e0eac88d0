"""``unidist build-horovod`` without a compiler and without a network.

The sources, the compiler, CMake and MPI are small stand-ins; the real build is what CI does first,
and every check of the horovod backend runs on its result.
"""

from __future__ import annotations

import dataclasses
import io
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from unidist import cli
from unidist.backends import horovod_build as hb

# The lines of Horovod 0.28.1 that the edits are about, as they stand there.
EXCERPTS = {
    "CMakeLists.txt": """\
project(horovod CXX)

set(CMAKE_CXX_STANDARD 14)
set(CMAKE_CXX_STANDARD_REQUIRED ON)

if(DEFINED ENV{HOROVOD_CUDA_HOME})
    set(CMAKE_CUDA_COMPILER "$ENV{HOROVOD_CUDA_HOME}/bin/nvcc")
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit)
endif()
if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
endif()
""",
    "horovod/torch/CMakeLists.txt": """\
if (HAVE_CUDA AND NOT Pytorch_CUDA)
    message(FATAL_ERROR "Horovod build with GPU support was requested")
elseif (Pytorch_CUDA AND NOT HAVE_CUDA)
    add_cuda()
endif()
if (HAVE_ROCM AND NOT Pytorch_ROCM)
    message(FATAL_ERROR "Horovod build with GPU support was requested")
elseif (Pytorch_ROCM AND NOT HAVE_ROCM)
    add_definitions(-DHAVE_ROCM=1 -DHAVE_GPU=1)
endif()
execute_process(COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; \
print(get_python_inc())"
                OUTPUT_VARIABLE PYTHON_INCLUDE_PATH OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")
    set(CMAKE_CXX_STANDARD 14)
endif()
set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES PREFIX "")
set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib_v2")
""",
    "cmake/Modules/FindPytorch.cmake": """\
string(REGEX REPLACE "No (CUDA|ROCm) runtime[^\\n]*\\n?" "" Pytorch_ROCM "${Pytorch_ROCM}")
string(TOUPPER "${Pytorch_ROCM}" Pytorch_ROCM)

if(Pytorch_ROCM)
""",
    "horovod/common/ops/cuda/CMakeLists.txt": """\
set(CMAKE_CUDA_STANDARD 11)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
""",
    "horovod/runner/mpi_run.py": """\
        elif 'IBM Spectrum MPI' in output:
            return _SMPI_IMPL
        elif 'MPICH' in output:
            return _MPICH_IMPL

    impi_or_mpich = mpi in (_IMPI_IMPL, _MPICH_IMPL)

    ssh_args = []
    if settings.ssh_port:
""",
    "horovod/runner/js_run.py": """\
from distutils.spawn import find_executable
from shlex import quote
""",
    "setup.py": """\
if not os.environ.get('HOROVOD_WITHOUT_PYTORCH'):
    require_list.append('cffi>=1.4.0')

setup(name='horovod',
      setup_requires=require_list if is_build_action() else [],
      install_requires=require_list)
""",
}

EDIT_NAMES = [f"{edit.path}: {edit.reason[:30]}" for edit in hb.EDITS]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / f"horovod-{hb.HOROVOD_VERSION}"
    for name, text in EXCERPTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# ---- edits ----


@pytest.mark.parametrize("edit", hb.EDITS, ids=EDIT_NAMES)
def test_edit_changes_its_text_and_no_other(edit: hb.Edit, source: Path) -> None:
    before, _, after = EXCERPTS[edit.path].partition(edit.find)
    edit.apply(source)
    assert (source / edit.path).read_text() == before + edit.replace + after
    for name in EXCERPTS.keys() - {edit.path}:
        assert (source / name).read_text() == EXCERPTS[name]


@pytest.mark.parametrize("edit", hb.EDITS, ids=EDIT_NAMES)
@pytest.mark.parametrize("damage", ["different", "edited already", "twice", "missing"])
def test_edit_refuses_other_sources(edit: hb.Edit, damage: str, source: Path) -> None:
    file = source / edit.path
    text = file.read_text()
    if damage == "different":
        file.write_text(text.replace(edit.find, "somebody else's line\n"))
    elif damage == "edited already":
        file.write_text(text.replace(edit.find, edit.replace))
    elif damage == "twice":
        file.write_text(text + edit.find)
    else:
        file.unlink()
    left = file.read_text() if file.exists() else None
    with pytest.raises(hb.SourceChanged) as caught:
        edit.apply(source)
    message = str(caught.value)
    assert edit.path in message
    assert repr(edit.find) in message
    assert "EDITS" in message  # what to do
    assert (file.read_text() if file.exists() else None) == left


def test_cuda_is_touched_only_when_gpu_operations_are_asked_for(source: Path) -> None:
    for edit in hb.EDITS:
        edit.apply(source)
    top = (source / "CMakeLists.txt").read_text()
    assert top.index('if("${GPU_OPERATIONS}" STREQUAL "")') < top.index("check_language(CUDA)")
    for name in hb.GPU_OPTIONS[2:]:
        assert f"${{{name}}}" in top
    torch_lists = (source / "horovod/torch/CMakeLists.txt").read_text()
    assert "add_cuda()" not in torch_lists
    assert "add_definitions(-DHAVE_ROCM=1" in torch_lists  # the edit took its own branch only
    find_torch = (source / "cmake/Modules/FindPytorch.cmake").read_text()
    assert find_torch.index("set(Pytorch_CUDA FALSE)") < find_torch.index("if(Pytorch_ROCM)")


# ---- the key ----

TARGET = hb.Target(
    python="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64",
    torch="2.14.1+cu130",
    mpi="mpich5.0.2",
    gpu="none",
    options="none",
    cpu="-mavx",
    rpath="$ORIGIN/../../torch/lib",
    recipe="0123",
)


def test_key_is_the_same_for_the_same_target_and_names_what_matters() -> None:
    assert dataclasses.replace(TARGET).key == TARGET.key
    assert TARGET.key.startswith("0.28.1-cpython-311-x86_64-linux-gnu-torch2.14.1+cu130-mpich5.0.2")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(hb.Target)])
def test_key_changes_with_each_ingredient(field: str) -> None:
    changed = {field: getattr(TARGET, field) + "x"}
    assert dataclasses.replace(TARGET, **changed).key != TARGET.key


def test_key_is_a_file_name() -> None:
    key = dataclasses.replace(TARGET, torch="2.0/../../x y", gpu="HOROVOD_GPU_OPERATIONS=NCCL").key
    assert "/" not in key
    assert " " not in key
    assert "-gpu-" in key


def test_describe_follows_the_environment() -> None:
    mpi = hb.Mpi("mpich", "5.0.2", Path("/opt/mpi/bin/mpicxx"), (Path("/opt/mpi/lib"),))
    plain = hb.describe({}, mpi)
    assert plain.gpu == plain.options == "none"
    assert plain.rpath.endswith("/opt/mpi/lib")
    assert hb.describe({}, None).mpi == "none"
    assert hb.describe({"HOROVOD_GPU_OPERATIONS": "NCCL"}, mpi).gpu == "HOROVOD_GPU_OPERATIONS=NCCL"
    assert hb.describe({"CXX": "g++-13"}, mpi).options == "CXX=g++-13"
    assert hb.describe({"HOROVOD_BUILD_ARCH_FLAGS": "-mx"}, mpi).cpu == "-mx"


def test_torch_version_keeps_its_local_part() -> None:
    import torch

    version, directory = hb.find_torch()
    assert version == torch.__version__
    assert directory == Path(torch.__file__).parent


def test_recipe_changes_with_each_edit() -> None:
    hashes = {hb.recipe_hash()}
    for i in range(len(hb.EDITS)):
        edits = list(hb.EDITS)
        edits[i] = dataclasses.replace(edits[i], replace=edits[i].replace + " ")
        hashes.add(hb.recipe_hash(edits))
    assert len(hashes) == len(hb.EDITS) + 1


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('#define MPICH_VERSION "5.0.2"\n', ("mpich", "5.0.2")),
        (
            "#define OMPI_MAJOR_VERSION 5\n#define OMPI_MINOR_VERSION 0\n"
            "#define OMPI_RELEASE_VERSION 8\n",
            ("openmpi", "5.0.8"),
        ),
        (
            '#define MPICH_VERSION "3.4"\n#  define I_MPI_VERSION "2021.12"\n',
            ("intelmpi", "2021.12"),
        ),
        (
            '#define MPICH_VERSION "3.2"\n#define MVAPICH2_VERSION "2.3.7"\n',
            ("mvapich", "2.3.7"),
        ),
    ],
)
def test_mpi_version(header: str, expected: tuple[str, str]) -> None:
    assert hb.mpi_version(header) == expected


def test_unknown_mpi_is_told_apart_by_its_header() -> None:
    assert hb.mpi_version("#define A 1") != hb.mpi_version("#define A 2")


def test_cpu_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx avx2 f16c\n")
    assert hb.cpu_flags({}, str(cpuinfo)) == "-mf16c -mavx"
    assert hb.cpu_flags({}, str(tmp_path / "none")) == ""


def test_rpath_is_relative_inside_the_environment_and_absolute_outside() -> None:
    site = Path("/env/lib/python3.11/site-packages")
    entries = hb.rpath(
        [site / "torch/lib", Path("/env/lib"), Path("/opt/mpi/lib"), Path("/env/lib")],
        site / "horovod/torch",
        Path("/env"),
    )
    assert entries == "$ORIGIN/../../torch/lib;$ORIGIN/../../../..;/opt/mpi/lib"


# ---- the build's environment ----


def test_build_environment() -> None:
    mpi = hb.Mpi("mpich", "5.0.2", Path("/opt/mpi/bin/mpicxx"), ())
    given = {
        "PATH": "/usr/bin",
        "CMAKE_GENERATOR": "Ninja",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_SKIP_COMPILE": "1",
        "MAKEFLAGS": " --jobserver-auth=3,4",
        "CXXFLAGS": "-g0",
    }
    env = hb.build_environment(given, TARGET, mpi, 3)
    assert env["PATH"].split(os.pathsep)[0] == "/opt/mpi/bin"
    assert env["PATH"].endswith("/usr/bin")
    assert env["HOROVOD_WITH_MPI"] == env["HOROVOD_WITH_GLOO"] == env["HOROVOD_WITH_PYTORCH"] == "1"
    assert env["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert env["MAKEFLAGS"] == "-j3"
    assert env["CXXFLAGS"] == "-g0 -include cstdint"
    assert env["UNIDIST_RPATH"] == TARGET.rpath
    assert env["HOROVOD_WITHOUT_NVTX"] == "1"
    for name in ("CMAKE_GENERATOR", "HOROVOD_WITHOUT_MPI", "HOROVOD_SKIP_COMPILE"):
        assert name not in env


def test_build_environment_without_mpi_and_with_gpu() -> None:
    target = dataclasses.replace(TARGET, mpi="none", gpu="HOROVOD_GPU_OPERATIONS=NCCL")
    env = hb.build_environment({"HOROVOD_GPU_OPERATIONS": "NCCL"}, target, None, 1)
    assert env["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in env
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert "HOROVOD_WITHOUT_NVTX" not in env


# ---- signs of life ----


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (
            "[ 42%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o",
            "42% Building horovod/torch/adapter_v2.cc",
        ),
        (
            "[  7%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/half.cc.o",
            "7% Building horovod/torch/common/half.cc",
        ),
        (
            "[100%] Linking CXX shared library ../lib/mpi_lib_v2.so",
            "100% Linking ../lib/mpi_lib_v2.so",
        ),
        ("[ 50%] Built target gloo", "50% Built gloo"),
        ("-- Found MPI_CXX: /opt/lib/libmpi.so", "configuring: Found MPI_CXX: /opt/lib/libmpi.so"),
        ("  Downloading horovod-0.28.1.tar.gz", "pip: Downloading horovod-0.28.1.tar.gz"),
        ("cd /tmp && /usr/bin/c++ -DX -c half.cc", None),
        ("half.h:76:11: warning: dereferencing", None),
    ],
)
def test_parse_step(line: str, step: str | None) -> None:
    assert hb.parse_step(line) == step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_progress_prints_a_line_at_times() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = hb.Progress(stream, clock, every=8)
    progress.start("compiling\n  log: x")
    clock.now += 8
    progress.tick()
    assert stream.getvalue() == "compiling\n  log: x\n  0:08  compiling\n"
    progress.feed("[ 42%] Building CXX object a/CMakeFiles/b.dir/c.cc.o")
    progress.feed("c.cc: warning: whatever")
    clock.now += 7
    progress.tick()
    assert len(stream.getvalue().splitlines()) == 3
    clock.now += 1
    progress.tick()
    progress.tick()
    clock.now += 62
    progress.tick()
    assert stream.getvalue().splitlines()[3:] == [
        "  0:16  42% Building a/c.cc",
        "  1:18  42% Building a/c.cc",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_updates_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    clock, stream = Clock(), Terminal()
    progress = hb.Progress(stream, clock)
    progress.feed("[ 42%] Building CXX object a/CMakeFiles/b.dir/a_rather_long_name.cc.o")
    clock.now += 1
    progress.tick()
    progress.say("done")
    state, line = stream.getvalue().split("\r\x1b[K")[1:]
    assert state == "  0:01  42% Building"[:19]  # cut, lest it wrap; and no newline
    assert line == "done\n"


# ---- reasons ----


def test_first_errors_are_the_compilers() -> None:
    output = "\n".join(
        [
            "[ 10%] Building CXX object a.cc.o",
            "a.cc:1:2: warning: unused",
            "a.cc:3:4: error: 'foo' was not declared",
            "a.cc:3:4: error: 'foo' was not declared",
            "b.cc:1:10: fatal error: mpi.h: No such file or directory",
            "make: *** [Makefile:1: all] Error 2",
            "RuntimeError: CMake failed",
        ]
    )
    assert hb.first_errors(output) == [
        "a.cc:3:4: error: 'foo' was not declared",
        "b.cc:1:10: fatal error: mpi.h: No such file or directory",
    ]


def test_first_errors_without_a_compilers_error() -> None:
    cmake = (
        "-- Checking\nCMake Error at X.cmake:3 (message):\n\n  Could NOT find MPI\n\n-- Incomplete"
    )
    assert hb.first_errors(cmake) == ["CMake Error at X.cmake:3 (message): Could NOT find MPI"]
    killed = "c++: fatal: x\nc++: internal compiler error: Killed signal terminated program"
    assert hb.first_errors(killed) == killed.splitlines()[1:]
    assert hb.first_errors("one\ntwo\n\nthree", limit=2) == ["two", "three"]


# ---- running commands ----


@pytest.fixture
def runner(tmp_path: Path) -> hb.Runner:
    return hb.Runner(tmp_path / "log", hb.Progress(io.StringIO()))


def test_runner_returns_and_logs_the_output(runner: hb.Runner) -> None:
    code = (
        "import sys; print('out', flush=True); print('err', file=sys.stderr); print('end', end='')"
    )
    assert runner.run("x", [sys.executable, "-c", code], os.environ) == "out\nerr\nend"
    assert runner.log.read_text().splitlines()[1:] == ["out", "err", "end"]


def test_runner_tells_what_a_missing_command_is(runner: hb.Runner, tmp_path: Path) -> None:
    with pytest.raises(hb.BuildError, match=r"(?s)trying failed: .*no-such-command.*Full log: "):
        runner.run("trying", [str(tmp_path / "no-such-command")], {})


@pytest.mark.parametrize("stubborn", [False, True], ids=["polite", "ignores SIGTERM"])
def test_interrupt_ends_the_whole_process_group(
    stubborn: bool, runner: hb.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The grandchild holds the write end of a pipe: it reports "hung up" when, and only when, the
    # grandchild is gone.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    script = f"exec 9>{pipe}; (sleep 600) & echo started; wait"
    if stubborn:
        script = f"trap '' TERM; {script}"
        end_group = hb.end_group
        monkeypatch.setattr(hb, "end_group", lambda process: end_group(process, grace=0.01))

    def interrupt(line: str) -> None:
        assert line == "started"
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.progress, "feed", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            runner.run("waiting", ["/bin/sh", "-c", script], os.environ)
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        assert [event & select.POLLHUP for _, event in poll.poll(20_000)] == [select.POLLHUP]
    finally:
        os.close(reader)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_become_an_interrupt_and_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), hb.signals_as_interrupt():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


# ---- the cache ----


def write_wheel(file: Path, text: str = "x") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("horovod/__init__.py", text)
    return file


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"UNIDIST_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/unidist"),
        ({}, "~/.cache/unidist"),
    ],
)
def test_cache_dir(env: Mapping[str, str], expected: str) -> None:
    assert hb.cache_dir(env) == Path(expected).expanduser()


def test_store_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for text in ("first", "second"):
        wheel = write_wheel(tmp_path / "horovod-0.28.1-x.whl", text)
        kept = hb.store(wheel, cache / "wheels" / "key")
    assert list((cache / "wheels" / "key").iterdir()) == [kept]
    assert hb.cached_wheel(cache, "key") == kept
    assert zipfile.ZipFile(kept).read("horovod/__init__.py") == b"second"


def test_failed_store_leaves_the_old_wheel_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(tmp_path / "horovod-0.28.1-x.whl")
    kept = hb.store(wheel, tmp_path / "key")
    content = kept.read_bytes()

    def half(source: Path, target: str) -> None:
        Path(target).write_bytes(source.read_bytes()[:10])
        raise OSError("disk full")

    monkeypatch.setattr("shutil.copyfile", half)
    with pytest.raises(OSError, match="disk full"):
        hb.store(wheel, tmp_path / "key")
    assert list((tmp_path / "key").iterdir()) == [kept]
    assert kept.read_bytes() == content


def test_broken_wheel_is_not_a_hit(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "wheels" / "key" / "horovod-0.28.1-x.whl", "y" * 1000)
    assert hb.cached_wheel(tmp_path, "key") == wheel
    assert hb.cached_wheel(tmp_path, "other") is None
    content = wheel.read_bytes()
    wheel.write_bytes(content[: len(content) // 2])
    assert hb.cached_wheel(tmp_path, "key") is None
    wheel.write_bytes(content.replace(b"yyyyy", b"zzzzz", 1))
    assert hb.cached_wheel(tmp_path, "key") is None


def test_installed_key_comes_from_the_installed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n"
    (tmp_path / "horovod-0.28.1.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    assert hb.installed_key() is None  # a Horovod, but not one that we built
    (tmp_path / "horovod").mkdir()
    (tmp_path / hb.STAMP).write_text("KEY = 'a-key'\nTARGET = {}\n")
    assert hb.installed_key() == "a-key"


# ---- the command, with everything around it replaced ----


class Machine:
    """A PATH, a cache and an MPI of their own, with whatever tools a test puts there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin = root / "bin"
        self.cache = root / "cache"
        self.monkeypatch = monkeypatch
        self.bin.mkdir()
        (root / "include").mkdir()
        (root / "include" / "mpi.h").write_text('#define MPICH_VERSION "9.8.7"\n')
        (root / "include" / "Python.h").write_text("")
        for name in (*hb.GPU_OPTIONS, *hb.OTHER_OPTIONS, "HOROVOD_CMAKE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("UNIDIST_CACHE", str(self.cache))
        monkeypatch.setattr(hb, "scripts_dir", lambda: self.bin)
        get_path = sysconfig.get_path
        monkeypatch.setattr(
            sysconfig,
            "get_path",
            lambda name, *more: (
                str(root / "include") if name == "include" else get_path(name, *more)
            ),
        )
        # Nothing may be installed into the environment that runs the tests.
        monkeypatch.setattr(hb, "build_needs", lambda: ())
        monkeypatch.setattr(hb, "PIP", (str(self.bin / "no-pip"),))
        self.tool("mpicxx", f"echo c++ -I{root}/include -L{root}/lib -lmpi")
        self.tool("c++", "exit 1")
        self.tool("make", "exit 1")
        self.tool("cmake", "echo cmake version 3.25.1")

    def tool(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def sources(self, edits: Mapping[str, str] | None = None) -> None:
        """Put a source distribution with the excerpts into the cache."""
        file = self.cache / "sources" / f"horovod-{hb.HOROVOD_VERSION}.tar.gz"
        file.parent.mkdir(parents=True)
        with tarfile.open(file, "w:gz") as archive:
            for name, text in {**EXCERPTS, **(edits or {})}.items():
                info = tarfile.TarInfo(f"horovod-{hb.HOROVOD_VERSION}/{name}")
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
        self.monkeypatch.setattr(hb, "SDIST_SHA256", hb.sha256(file))

    def builds(self, code: str) -> None:
        """What runs in place of setuptools, in the folder of the sources."""
        self.monkeypatch.setattr(hb, "_BUILD", code)

    def key(self, without_mpi: bool = False) -> str:
        return hb.describe(os.environ, None if without_mpi else hb.find_mpi(os.environ)).key


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def fails(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command, which must fail tidily; returns what it said."""
    assert cli.main(["build-horovod", *arguments]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


BUILD_A_WHEEL = """
import os, sys, zipfile
os.mkdir(sys.argv[1])
with zipfile.ZipFile(os.path.join(sys.argv[1], "horovod-0.28.1-py3-none-any.whl"), "w") as wheel:
    wheel.write("horovod/_unidist_build.py")
    wheel.writestr("environment", os.environ["HOROVOD_WITH_GLOO"] + os.environ["UNIDIST_RPATH"])
print("[100%] Built target pytorch")
"""


def test_builds_once_then_finds_it_in_the_cache(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.sources()
    machine.builds(BUILD_A_WHEEL)
    assert cli.main(["build-horovod", "--wheel-only"]) == 0
    out, err = capfd.readouterr()
    wheel = Path(out.strip())
    assert wheel.parent == machine.cache / "wheels" / machine.key()
    assert "compiling Horovod 0.28.1 for torch" in err
    assert "mpich 9.8.7" in err
    archive = zipfile.ZipFile(wheel)
    assert f"KEY = '{machine.key()}'" in archive.read(hb.STAMP).decode()
    assert archive.read("environment").startswith(b"1")
    assert not list((machine.cache / "logs").iterdir())  # only failures leave one

    machine.builds("raise SystemExit('built again')")
    (machine.bin / "c++").unlink()  # a hit needs no compiler
    assert cli.main(["build-horovod", "--no-install"]) == 0
    assert capfd.readouterr().out.strip() == str(wheel)

    machine.tool("c++", "exit 1")
    assert "built again" in fails(capfd, "--wheel-only", "--force")
    assert "built again" in fails(capfd, "--wheel-only", "--without-mpi")  # another key
    machine.monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    assert "built again" in fails(capfd, "--wheel-only")  # another key


def test_cached_wheel_is_installed_and_then_verified(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(machine.cache / "wheels" / machine.key() / "horovod-0.28.1-x.whl")
    done: list[str] = []

    def run(self: hb.Runner, what: str, command: list[str], *_: object, **__: object) -> str:
        done.append(f"{what}: {command[-1]}" if "install" in command else what)
        return "a warning\nfound: 0.28.1 True True\n"

    monkeypatch.setattr(hb.Runner, "run", run)
    monkeypatch.setattr(hb, "RUNTIME_NEEDS", ("no-such-package-at-all",))
    assert cli.main(["build-horovod"]) == 0
    assert done == [
        "installing no-such-package-at-all: no-such-package-at-all",
        f"installing Horovod: {wheel}",
        "importing the installed horovod.torch",
    ]


@pytest.mark.parametrize("found", ["0.28.1 False True", "0.28.1 True False", "0.27.0 True True"])
def test_verify_refuses_a_horovod_that_lacks_what_was_asked_for(
    found: str, runner: hb.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = hb.Mpi("mpich", "5.0.2", Path("mpicxx"), ())
    monkeypatch.setattr(hb, "_VERIFY", f"print('found: {found}')")
    with pytest.raises(hb.BuildError, match=found):
        hb.verify(runner, os.environ, mpi)
    monkeypatch.setattr(hb, "_VERIFY", "print('found: 0.28.1 True True')")
    hb.verify(runner, os.environ, mpi)


def test_nothing_to_do_when_the_right_one_is_installed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key = machine.key()
    monkeypatch.setattr(hb, "installed_key", lambda: key)
    monkeypatch.setattr(hb, "_VERIFY", "print('found: 0.28.1 True True')")
    assert cli.main(["build-horovod"]) == 0  # there is no source and no pip: it did nothing
    assert key in capfd.readouterr().err
    (machine.bin / "c++").unlink()
    assert "a C++ compiler" in fails(capfd, "--force")
    assert "a C++ compiler" in fails(capfd, "--wheel-only")  # none is cached


def test_installed_one_that_does_not_import_is_built_anew(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.sources()
    key = machine.key()
    monkeypatch.setattr(hb, "installed_key", lambda: key)
    monkeypatch.setattr(hb, "_VERIFY", "raise ImportError('libmpi.so.12 is gone')")
    machine.builds("raise SystemExit('built again')")
    err = fails(capfd)
    assert "libmpi.so.12 is gone" in err
    assert "built again" in err


def test_failing_build_gives_the_reason_and_the_log(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.sources()
    machine.builds("print('adapter.cc:7:1: error: no such type'); print('x'); raise SystemExit(3)")
    err = fails(capfd)
    assert "compiling Horovod failed (exit status 3)" in err
    assert "  adapter.cc:7:1: error: no such type\n" in err
    log = Path(err.rsplit("Full log: ", 1)[1].strip())
    assert log.parent == machine.cache / "logs"
    assert "adapter.cc:7:1: error: no such type\nx\n" in log.read_text()
    assert hb.cached_wheel(machine.cache, machine.key()) is None


def test_other_sources_are_refused(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    machine.sources({"setup.py": "setup()\n"})
    machine.builds("raise SystemExit('compiled all the same')")
    err = fails(capfd)
    assert "file:      setup.py" in err
    assert "compiled all the same" not in err


def test_sources_with_another_hash_are_fetched_again(
    machine: Machine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.sources()
    monkeypatch.setattr(hb, "SDIST_SHA256", "0" * 64)
    assert "fetching the sources of Horovod 0.28.1 failed" in fails(capfd)  # there is no pip here


@pytest.mark.parametrize(
    ("tool", "reason"),
    [("c++", "a C++ compiler"), ("cmake", "pip install cmake"), ("make", "make: apt install make")],
)
def test_missing_tool(
    tool: str, reason: str, machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    (machine.bin / tool).unlink()
    err = fails(capfd)
    assert reason in err
    assert err.count("\n  - ") == 1


def test_all_missing_tools_are_named_at_once(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    for tool in ("c++", "cmake", "make"):
        (machine.bin / tool).unlink()
    assert fails(capfd).count("\n  - ") == 3


def test_old_cmake_is_refused(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    machine.tool("cmake", "echo cmake version 3.9.6")
    assert "CMake 3.13 or newer" in fails(capfd)


def test_missing_mpi_says_how_to_go_on(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    (machine.bin / "mpicxx").unlink()
    err = fails(capfd)
    assert "pip install mpich" in err
    assert "--without-mpi" in err
    machine.sources()
    machine.builds(BUILD_A_WHEEL)
    assert cli.main(["build-horovod", "--without-mpi", "--wheel-only"]) == 0


def test_broken_mpi_wrapper(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    machine.tool("mpicxx", "echo cannot find my data >&2; exit 1")
    assert "cannot find my data" in fails(capfd)


def test_unwritable_cache(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    machine.cache.write_text("a file where the folder should be")
    assert "UNIDIST_CACHE" in fails(capfd)


def test_interrupt_has_its_own_exit_status(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hb, "check_tools", interrupted)
    assert cli.main(["build-horovod"]) == 130
    assert "Traceback" not in capfd.readouterr().err


# ---- the command line ----


@pytest.mark.parametrize("arguments", [[], ["no-such"], ["build-horovod", "--jobs", "0"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: unidist" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("unidist ")


def test_the_command_line_itself_loads_no_engine() -> None:
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='cli')['_parser'](); "
        "sys.exit(' '.join({'torch', 'horovod', 'mpi4py'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(cli.__file__)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
