"""What goes wrong: each case in a job of its own, which has to end by itself, in bounded time.

Limits are far apart on purpose. A job is killed by the harness after :data:`PATIENCE` seconds,
while the library under test is told to wait for peers much longer (or, where its own limit is the
subject, much shorter): so a job that ends in time ended for the reason that the test is about.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import harness
import pytest
import torch.distributed as dist
from conftest import need

PATIENCE = 90.0

# engine -> how its own launcher starts it, for what must hold under every launcher
ENGINES = ("torch", "horovod-gloo", "horovod-mpi", "mpi", "mpi-openmpi")


def start(
    engine: str,
    size: int,
    code: str,
    environment: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
) -> harness.Result:
    """Run code on some ranks of an engine; how it ends is for the test to judge."""
    need(engine)
    row = harness.ENGINES[engine]
    result = harness.launch(
        row.launcher,
        size,
        ["-c", f"BACKEND = {row.backend!r}\n{code}", *arguments],
        environment=environment,
        timeout=PATIENCE,
        check=False,
    )
    assert not result.left, result.report()
    return result


def alone(
    code: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> harness.Result:
    """Run code in one process without a launcher; it has to succeed."""
    return harness.launch(
        "none", 1, ["-c", code], environment=environment, timeout=PATIENCE, cwd=folder
    )


# -- a rank that ends ends the job --------------------------------------------------------------

DIES = """
import sys
import torch
import unidist as hvd
hvd.init(backend=BACKEND, timeout=600)
hvd.allreduce(torch.ones(3))
if hvd.rank() == hvd.size() - 1:
    if sys.argv[1] == "raise":
        raise RuntimeError("boom on purpose")
    print("exits on purpose", flush=True)
    sys.exit(3)
hvd.allreduce(torch.ones(3), name="the peer never comes")
print("NOT REACHED")
"""


@pytest.mark.parametrize("how", ["raise", "exit"])
@pytest.mark.parametrize("engine", ENGINES)
def test_rank_that_dies_ends_the_job(engine: str, how: str) -> None:
    result = start(engine, 2, DIES, arguments=(how,))
    assert result.returncode is not None, "the job hung: " + result.report()
    assert result.returncode != 0, "the launcher reports success: " + result.report()
    assert "NOT REACHED" not in result.text, result.report()
    if how == "raise":
        assert "boom on purpose" in result.outputs["rank 1"], result.report()
        assert "Traceback" in result.outputs["rank 1"], result.report()
    else:
        assert "exits on purpose" in result.outputs["rank 1"], result.report()


QUIET_END = """
import torch
import unidist as hvd
hvd.init(backend=BACKEND)
model = torch.nn.Linear(3, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
model(torch.ones(4, 3)).sum().backward()
optimizer.step()
print("done", hvd.rank(), hvd.size())
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_script_without_shutdown_ends_cleanly_and_quietly(engine: str) -> None:
    result = start(engine, 2, QUIET_END)
    assert result.returncode == 0, result.report()
    for rank in range(2):
        assert result.outputs[f"rank {rank}"].split("\n") == [f"done {rank} 2", ""], result.report()


LONELY = """
import os, sys
import torch
import unidist as hvd
hvd.init(backend=BACKEND, timeout=4)
import torch.distributed as dist
host, port = sys.argv[1].split(":")
store = dist.TCPStore(host, int(port))
if hvd.rank() == 0:
    try:
        hvd.allreduce(torch.ones(3), name="lonely")
        print("NOT REACHED")
    except hvd.HorovodInternalError as error:
        print("caught:", error, flush=True)
    store.set("over", "")
else:
    store.wait(["over"])
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("engine", ["torch", "horovod-mpi", "mpi"])
def test_late_peer_is_an_error_within_the_timeout(engine: str) -> None:
    """Rank 1 is alive but never calls: rank 0 raises, and says what it was waiting for."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = start(engine, 2, LONELY, arguments=(f"127.0.0.1:{store.port}",))
    assert result.returncode is not None, "the job hung: " + result.report()
    said = result.outputs["rank 0"].partition("caught:")[2]
    assert "allreduce.lonely" in said, result.report()
    if not engine.startswith("horovod"):  # Horovod tells a thread of its own who is missing
        assert "for rank 1" in said, result.report()
    assert "NOT REACHED" not in result.text, result.report()


PEER_NEVER_INITS = """
import os, sys
import torch.distributed as dist
import unidist as hvd
host, port = sys.argv[1].split(":")
store = dist.TCPStore(host, int(port))
if os.environ["UNIDIST_TEST_RANK"] == "0":
    try:
        hvd.init(backend=BACKEND, timeout=4)
        print("NOT REACHED")
    except (RuntimeError, TimeoutError) as error:
        print("caught:", type(error).__name__, error, flush=True)
    store.set("over", "")
else:
    store.wait(["over"])
sys.stdout.flush()
os._exit(0)
"""


def test_peer_that_never_connects_is_an_error_within_the_timeout() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = start("torch", 2, PEER_NEVER_INITS, arguments=(f"127.0.0.1:{store.port}",))
    assert result.returncode is not None, "the job hung: " + result.report()
    assert "caught:" in result.outputs["rank 0"], result.report()


# -- after a failure ----------------------------------------------------------------------------

AFTER_TIMEOUT = """
import os, sys, time
import torch
import unidist as hvd
LIMIT = 4
hvd.init(backend=BACKEND, timeout=LIMIT)
import torch.distributed as dist
host, port = sys.argv[1].split(":")
store = dist.TCPStore(host, int(port))
rank = hvd.rank()
hvd.barrier()

def attempt(what, call):
    try:
        print(f"{what}: gave", call(), flush=True)
    except hvd.HorovodInternalError as error:
        print(f"{what}: raised", error, flush=True)

def add(name, value):
    return hvd.allreduce(torch.full((4,), value), op=hvd.Sum, name=name).tolist()

if rank == 0:
    attempt("1", lambda: add("first", 1.0))
    begin = time.monotonic()
    attempt("2", lambda: add("second", 100.0))
    attempt("3", lambda: hvd.broadcast(torch.ones(4), 0, name="third").tolist())
    attempt("4", lambda: hvd.synchronize(hvd.allgather_async(torch.ones(4))).tolist())
    attempt("5", lambda: hvd.allgather_object("object"))
    attempt("6", hvd.barrier)
    print("the later ones took", time.monotonic() - begin)
    store.set("failed", "")
else:
    store.wait(["failed"])
    attempt("1", lambda: add("first", 1.0))
    attempt("2", lambda: add("second", 1.0))
begin = time.monotonic()
hvd.shutdown()
print("shutdown took", time.monotonic() - begin, flush=True)
store.set(f"over {rank}", "")
store.wait([f"over {other}" for other in range(2)])
os._exit(0)
"""


def _seconds(text: str, what: str) -> float:
    return float(text.partition(f"{what} took ")[2].split()[0])


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_operations_after_a_timeout_fail_at_once(engine: str) -> None:
    """Later operations received what the failed one had left under way, and gave wrong results.

    (Horovod goes on after a time-out: it matches by name, so nothing can be mixed up.)
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = start(engine, 2, AFTER_TIMEOUT, arguments=(f"127.0.0.1:{store.port}",))
    assert result.returncode is not None, "the job hung: " + result.report()
    waiting, late = result.outputs["rank 0"], result.outputs["rank 1"]
    said = {line[0]: line for line in waiting.splitlines() if line[1:3] == ": "}
    assert set(said) == set("123456"), result.report()
    for line in said.values():
        assert ": raised" in line, result.report()
        if engine.startswith("mpi"):
            assert "first" in line, "the first failure is not named: " + result.report()
    # All of them in less than one time-out.
    assert _seconds(waiting, "the later ones") < 3, result.report()
    # What the late rank gets is the right result or an error.
    assert "1: gave [2.0, 2.0, 2.0, 2.0]" in late or "1: raised" in late, result.report()
    assert "2: raised" in late, result.report()
    for text in (waiting, late):
        assert _seconds(text, "shutdown") < 3, result.report()


STEP_ALONE = """
import os, sys, time
import torch
import unidist as hvd
hvd.init(backend=BACKEND, timeout=4)
import torch.distributed as dist
host, port = sys.argv[1].split(":")
store = dist.TCPStore(host, int(port))
parameters = [torch.nn.Parameter(torch.zeros(1 << 12)) for _ in range(6)]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), groups=6)

def backward():
    sum(parameter.sum() for parameter in parameters).backward()

for _ in range(2):
    backward()
    optimizer.step()
    optimizer.zero_grad()
if hvd.rank() == 0:
    begin = time.monotonic()
    try:
        backward()
        optimizer.step()
        print("NOT REACHED")
    except hvd.HorovodInternalError as error:
        print("caught:", error)
    print("step took", time.monotonic() - begin)
    begin = time.monotonic()
    hvd.shutdown()
    print("shutdown took", time.monotonic() - begin, flush=True)
    store.set("over", "")
else:
    store.wait(["over"])
os._exit(0)
"""


@pytest.mark.parametrize("engine", ["torch", "horovod-gloo", "mpi"])
def test_step_of_several_buckets_fails_within_one_timeout(engine: str) -> None:
    """Six buckets that a peer never reduces cost one time-out, where each waited for its own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = start(engine, 2, STEP_ALONE, arguments=(f"127.0.0.1:{store.port}",))
    assert result.returncode is not None, "the job hung: " + result.report()
    text = result.outputs["rank 0"]
    assert "caught:" in text, result.report()
    assert "NOT REACHED" not in text, result.report()
    assert _seconds(text, "step") < 8, result.report()
    assert _seconds(text, "shutdown") < 5, result.report()


# -- a peer that is late, but comes ---------------------------------------------------------------

# Lateness is the subject of these two, so a sleep is what they need.
MANY_LIVES = """
import time
import torch
import unidist as hvd

def add(what, late, seconds):
    if hvd.rank() == late:
        time.sleep(seconds)
    got = hvd.allreduce(torch.ones(3), op=hvd.Sum, name=what).tolist()
    assert got == [2.0] * 3, f"{what}: {got}"

for life in range(12):
    hvd.init(backend=BACKEND, timeout=60)
    hvd.barrier()
    add(f"life {life}", life % 2, 0.02)
    if life % 6 == 5:
        # Nobody has left since, whatever is still to be heard of the earlier lives.
        add(f"late in life {life}", life % 2, LATE)
    hvd.barrier()
    hvd.shutdown()
print("done")
"""


@pytest.mark.parametrize("engine", ["mpi", "mpi-openmpi"])
def test_slow_peer_after_many_lives(engine: str) -> None:
    """The farewell of an earlier life was heard in a later one: the peer seemed to have left."""
    result = start(engine, 2, MANY_LIVES.replace("LATE", "2"))
    assert result.returncode == 0, result.report()
    assert result.text.count("done") == 2, result.report()


LAST_OPERATION = """
import time
import torch
import unidist as hvd
hvd.init(backend=BACKEND, timeout=60)
hvd.barrier()
if hvd.rank() == 2:
    time.sleep(3)
got = hvd.broadcast(torch.full((4,), float(hvd.rank() + 7)), 0)
print("got", got.tolist())
"""


@pytest.mark.parametrize("engine", ["mpi", "mpi-openmpi"])
def test_late_rank_gets_what_was_sent_before_all_others_left(engine: str) -> None:
    """Ranks that had finished the last operation and ended made it fail for those still in it."""
    result = start(engine, 4, LAST_OPERATION)
    assert result.returncode == 0, result.report()
    assert result.text.count("got [7.0, 7.0, 7.0, 7.0]") == 4, result.report()


# -- the launcher and the engine disagree -------------------------------------------------------

SINGLETON = """
import unidist as hvd
try:
    hvd.init(backend={backend!r}, timeout=20)
    print("NOT REACHED", hvd.size())
except hvd.LaunchError as error:
    print("caught:", error)
assert not hvd.is_initialized()
"""

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "0"}
MVAPICH = {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "0"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("engine", "variables"),
    [
        ("mpi-alone", OPEN_MPI),
        ("mpi-alone", PMI),
        ("mpi-alone", MVAPICH),
        ("mpi-alone", SLURM),
        ("horovod-alone", OPEN_MPI),
        ("horovod-alone", PMI),
    ],
    ids=["mpi-openmpi", "mpi-pmi", "mpi-mvapich", "mpi-slurm", "horovod-openmpi", "horovod-pmi"],
)
def test_singleton_under_a_launcher_of_four(engine: str, variables: dict[str, str]) -> None:
    """N worlds of one, each sure that it is rank 0, never train N times in silence."""
    need(engine)
    backend = harness.ENGINES[engine].backend
    result = alone(SINGLETON.format(backend=backend), variables)
    text = result.outputs["rank 0"]
    assert "caught:" in text, result.report()
    assert "NOT REACHED" not in text, result.report()
    said = text.partition("caught:")[2]
    assert "4 processes" in said, said
    assert "world of 1" in said, said


def test_serial_under_a_launcher_of_four() -> None:
    result = alone(SINGLETON.format(backend="serial"), OPEN_MPI)
    assert "caught:" in result.text, result.report()


def test_mpirun_of_another_mpi() -> None:
    """MPICH's mpirun starts ranks whose mpi4py is linked to Open MPI: each is alone."""
    need("mpi")
    need("mpi-openmpi")
    result = harness.launch(
        "mpirun",
        2,
        ["-c", SINGLETON.format(backend="mpi")],
        environment=harness.LAUNCHERS["openmpi"].environment(),
        timeout=PATIENCE,
    )
    for rank in range(2):
        said = result.outputs[f"rank {rank}"].partition("caught:")[2]
        assert "2 processes" in said, result.report()


REFUSED = """
import unidist as hvd
try:
    hvd.init(backend="mpi", timeout=20)
    print("NOT REACHED")
except hvd.LaunchError as error:
    print("caught:", error)
"""


@pytest.mark.parametrize("engine", ["torch", "horovod-gloo"])
def test_mpi_is_refused_where_no_mpi_was_started(engine: str) -> None:
    """torchrun and horovodrun over gloo start no MPI: the error names the command to use."""
    need("mpi")
    result = start(engine, 2, REFUSED)
    assert result.returncode == 0, result.report()
    for rank in range(2):
        text = result.outputs[f"rank {rank}"]
        assert "caught:" in text, result.report()
        assert "mpirun -n 2" in text, result.report()


# -- engines that are not there -----------------------------------------------------------------

UNKNOWN = """
import torch
import unidist as hvd
try:
    hvd.init(backend="smoke signals")
    print("NOT REACHED")
except ValueError as error:
    print("caught:", error)
hvd.init()
print("works", hvd.allreduce(torch.ones(1)).item(), hvd.size())
"""


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_unknown_backend(by: str) -> None:
    """All names are listed, and the library can still be used."""
    code, variables = UNKNOWN, {}
    if by == "variable":
        code = code.replace('hvd.init(backend="smoke signals")', "hvd.init()")
        code = code.replace("hvd.init()\nprint", "hvd.init(backend='serial')\nprint")
        variables = {"UNIDIST_BACKEND": "smoke signals"}
    text = alone(code, variables).text
    assert "NOT REACHED" not in text
    for name in ("smoke signals", "torch", "horovod", "mpi", "serial"):
        assert name in text, text
    assert "works 1.0 1" in text


MISSING = """
import torch
import unidist as hvd
print("imported")
try:
    hvd.init(backend={backend!r}, timeout=20)
    print("NOT REACHED")
except hvd.BackendUnavailable as error:
    assert isinstance(error, ImportError)
    print("caught:", error)
assert not hvd.is_initialized()
hvd.init(backend="torch", timeout=20)
print("works", hvd.allreduce(torch.ones(1)).item())
"""


def _fake(folder: Path, package: str, source: str) -> dict[str, str]:
    """A package of that name whose import runs this source, in front of the real one."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(source)
    path = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else str(folder)}


@pytest.mark.parametrize(
    "source",
    [
        "raise ModuleNotFoundError(\"No module named 'horovod'\", name='horovod')",
        "raise ImportError('undefined symbol: _ZN3c10')",
        "raise OSError('libmpi.so.12: cannot open shared object file')",
    ],
    ids=["absent", "undefined symbol", "library gone"],
)
def test_missing_or_broken_horovod(tmp_path: Path, source: str) -> None:
    """Importing is silent, asking for it says what to do, and other engines work."""
    variables = _fake(tmp_path, "horovod", source)
    lines = alone(MISSING.format(backend="horovod"), variables).outputs["rank 0"].splitlines()
    assert lines[0] == "imported", lines
    assert lines[1].startswith("caught:"), lines
    assert "unidist build-horovod" in "\n".join(lines), lines
    assert lines[-1] == "works 1.0", lines


@pytest.mark.parametrize(
    "source",
    [
        "raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')",
        "raise RuntimeError('cannot load MPI library')",
    ],
    ids=["absent", "no library"],
)
def test_missing_mpi(tmp_path: Path, source: str) -> None:
    variables = _fake(tmp_path, "mpi4py", source)
    text = alone(MISSING.format(backend="mpi"), variables).text
    assert "NOT REACHED" not in text
    assert "pip install" in text.partition("caught:")[2], text
    assert "mpi4py" in text.partition("caught:")[2], text
    assert "works 1.0" in text, text


# -- before init --------------------------------------------------------------------------------

BEFORE_INIT = """
import torch
import unidist as hvd
calls = {
    "rank": hvd.rank, "size": hvd.size, "local_rank": hvd.local_rank,
    "local_size": hvd.local_size, "cross_rank": hvd.cross_rank, "cross_size": hvd.cross_size,
    "is_homogeneous": hvd.is_homogeneous,
    "allreduce": lambda: hvd.allreduce(torch.ones(2)),
    "allreduce_": lambda: hvd.allreduce_(torch.ones(2)),
    "allreduce_async": lambda: hvd.allreduce_async(torch.ones(2)),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([torch.ones(2)]),
    "allgather": lambda: hvd.allgather(torch.ones(2)),
    "broadcast": lambda: hvd.broadcast(torch.ones(2), 0),
    "broadcast_": lambda: hvd.broadcast_(torch.ones(2), 0),
    "barrier": hvd.barrier,
    "broadcast_parameters": lambda: hvd.broadcast_parameters({"a": torch.ones(2)}, 0),
    "broadcast_object": lambda: hvd.broadcast_object(1, 0),
    "allgather_object": lambda: hvd.allgather_object(1),
    "add_process_set": lambda: hvd.add_process_set([0]),
}
for name, call in calls.items():
    try:
        call()
        print("NOT REFUSED:", name)
    except ValueError as error:
        if "init()" not in str(error):
            print("UNCLEAR:", name, error)
for moment in ("before", "after"):
    hvd.shutdown()
    assert hvd.is_initialized() is False
    hvd.init(backend="serial")
    assert hvd.allreduce(torch.ones(2)).sum().item() == 2
    hvd.shutdown()
try:
    hvd.rank()
    print("NOT REFUSED: rank after shutdown")
except ValueError:
    pass
try:
    hvd.init(timeout=-1)
    print("NOT REFUSED: timeout")
except ValueError:
    pass
print("end")
"""


def test_operations_before_init_are_refused() -> None:
    result = alone(BEFORE_INIT)
    assert result.outputs["rank 0"] == "end\n", result.report()


# -- the harness itself -------------------------------------------------------------------------

DAEMON = """\
import os, sys, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.pause()
    os._exit(0)
os.wait()
signal.pause() if sys.argv[1] == "hang" else sys.exit(0)
"""


def _alive(job_code: str) -> list[str]:
    listed = subprocess.run(
        ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout
    return [line for line in listed.splitlines() if job_code in line]


def test_harness_kills_what_hangs(tmp_path: Path) -> None:
    """A rank that hangs, with a daemon: both are killed, and the stack is in the message."""
    script = tmp_path / "hangs.py"
    script.write_text(DAEMON)
    with pytest.raises(harness.LaunchFailed, match="timed out") as caught:
        harness.launch("none", 1, [script, "hang"], timeout=5)
    assert "hangs.py" in str(caught.value)
    assert "line 8 in <module>" in str(caught.value), "no stack of the hanging rank"
    assert not _alive(str(script))


def test_harness_reports_what_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_GRACE_SECONDS", 0.5)
    script = tmp_path / "leaves.py"
    script.write_text(DAEMON)
    with pytest.raises(harness.LaunchFailed, match="left behind"):
        harness.launch("none", 1, [script, "end"])
    assert not _alive(str(script))


def test_harness_cleans_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "HOROVOD_RANK"):
        monkeypatch.setenv(name, "7")
    left = harness.clean_environment()
    assert not {"RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "HOROVOD_RANK"} & set(
        left
    )
    assert left["OMP_NUM_THREADS"] == "1"
