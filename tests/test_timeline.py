"""The timeline's file is a whole JSON document after every write and however the job ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import harness
import pytest
from conftest import need

from unidist.backends.base import Completed
from unidist.handles import Proposal, Task
from unidist.timeline import Recording, Timeline, TraceFile

PATIENCE = 120.0


def load(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


# -- the file ---------------------------------------------------------------------------------


def test_the_file_is_whole_after_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the writes of one call, each of which is short enough for no kill to divide."""
    path = tmp_path / "timeline.json"
    sizes: list[int] = []
    real = os.pwrite

    def write_and_look(file: int, data: bytes, offset: int) -> int:
        count = real(file, data, offset)
        load(path)
        sizes.append(len(data))
        return count

    monkeypatch.setattr(os, "pwrite", write_and_look)
    file = TraceFile(str(path), [{"number": -1}])
    numbers = iter(range(10000))
    for count in (1, 0, 3, 500, 1):
        file.append([{"number": next(numbers), "padding": "x" * 90} for _ in range(count)])
    file.append([{"number": next(numbers), "padding": "x" * 9000}])  # longer than any block
    file.append([{"number": next(numbers)}])
    file.close()
    assert [event["number"] for event in load(path)] == list(range(-1, 507))
    assert len(sizes) > 10
    assert sorted(sizes)[-2] <= 4096


def test_a_full_disk_leaves_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timeline.json"
    recording = Recording(str(path), "process", False)
    recording.add(finished("allreduce", "allreduce.before"))
    recording.flush()
    before = load(path)
    real = os.pwrite
    full = [True]

    def write_a_part(file: int, data: bytes, offset: int) -> int:
        if not full[0]:
            return real(file, data, offset)
        full[0] = False
        return real(file, data[:20], offset)

    monkeypatch.setattr(os, "pwrite", write_a_part)
    recording.add(finished("allreduce", "allreduce.too_much"))
    recording.flush()
    assert load(path) == before
    recording.add(finished("allreduce", "allreduce.later"))
    recording.close()
    assert load(path) == before
    warning = capfd.readouterr().err
    assert warning.count("warning") == 1
    assert str(path) in warning


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path, number in (
            (tmp_path, errno.EISDIR),
            (tmp_path / "missing" / "timeline.json", errno.ENOENT),
            (pipe, errno.ESPIPE),
        ):
            with pytest.raises(OSError, match="timeline cannot be written") as caught:
                Timeline(0, 1, False).start(str(path), False)
            assert caught.value.errno == number
            assert str(path) in str(caught.value)
    finally:
        os.close(reader)


# -- events -----------------------------------------------------------------------------------


def finished(
    kind: str,
    name: str,
    terms: dict[str, Any] | None = None,
    times: tuple[float, float, float] | None = None,
    own: Any = None,
    payload: bytes | None = None,
    items: int = 1,
) -> Task:
    """A task that is done; ``times`` are seconds from now: submitted, started, finished."""
    proposal = Proposal(kind, name, terms or {}, own, payload)
    task = Task(lambda peers: Completed(), lambda: None, proposal, items=items)
    task.start(None)
    task.complete()
    if times:
        now = time.perf_counter()
        task.submitted_at, task.started_at, task.finished_at = (now + one for one in times)
    return task


def record(path: Path, *tasks: Task, mark_cycles: bool = False) -> list[dict[str, Any]]:
    recording = Recording(str(path), "process", mark_cycles)
    for task in tasks:
        recording.add(task)
    recording.close()
    return load(path)


def spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_an_operation_has_two_spans(tmp_path: Path) -> None:
    terms = {
        "dtype": "float32",
        "shape": [3, 2],
        "device": "cpu",
        "op": "Sum",
        "prescale_factor": 1.0,
    }
    task = finished("allreduce", "allreduce.x", terms, (1.0, 1.5, 1.75), items=6)
    negotiation, work = spans(record(tmp_path / "timeline.json", task))
    assert (negotiation["name"], work["name"]) == ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")
    assert (negotiation["dur"], work["dur"]) == (500_000, 250_000)
    assert negotiation["ts"] + negotiation["dur"] == work["ts"]
    assert work["args"] == {
        "dtype": "float32",
        "op": "Sum",
        "shape": [3, 2],
        "elements": 6,
        "bytes": 24,
    }


def test_sizes_of_rows_and_of_groups(tmp_path: Path) -> None:
    after = " after the first dimension"
    rows = {"dtype": "float64", f"shape{after}": [4], "device": "cpu"}
    group = {
        "number of tensors": 2,
        "dtypes": ["float32", "float16"],
        "shapes": [[3], []],
        "devices": ["cpu", "cpu"],
    }
    grouped_rows = {
        "number of tensors": 2,
        "dtypes": ["int8", "int8"],
        f"shapes{after}": [[5], []],
        "devices": ["cpu", "cpu"],
    }
    tasks = [
        finished("allgather", "allgather.x", rows, own=[3]),
        finished("alltoall", "alltoall.x", rows, own=[1, 2]),
        finished("grouped_allreduce", "grouped_allreduce.x", group),
        finished("grouped_allgather", "grouped_allgather.x", grouped_rows, own=[2, 1]),
        finished("barrier", "barrier.x", items=0),
        finished("bucket", "gradients.noname.3", {"elements": 7, "dtype": "bfloat16"}, items=7),
        finished("exchange", "exchange.x", payload=b"12345"),
    ]
    found = [event["args"] for event in spans(record(tmp_path / "timeline.json", *tasks))[1::2]]
    gathered = {"dtype": "float64", "shape": [3, 4], "elements": 12, "bytes": 96}
    assert found == [
        gathered,
        gathered,
        {"tensors": 2, "dtype": "float32, float16", "elements": 4, "bytes": 14},
        {"tensors": 2, "dtype": "int8", "elements": 11, "bytes": 11},
        {"elements": 0},
        {"dtype": "bfloat16", "elements": 7, "bytes": 14},
        {"bytes": 5},
    ]


def test_operations_at_the_same_time_are_on_tracks_of_their_own(tmp_path: Path) -> None:
    """Whatever the order in which they end; and operations without a name share a row."""
    times = [(0, 1, 5), (1, 2, 3), (2, 3, 9), (4, 4.5, 6), (7, 8, 8.5)]
    tasks = [
        finished("allreduce", f"allreduce.noname.{number}.of.0.2", times=time)
        for number, time in enumerate(times)
    ]
    tasks.sort(key=lambda task: task.finished_at)
    tasks.append(finished("bucket", "gradients.noname.7", times=(0, 1, 2)))
    events = record(tmp_path / "timeline.json", *tasks)
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["process", "allreduce.noname.of.0.2", "gradients.noname.7"]
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for span in spans(events):
        place = tracks.setdefault((span["pid"], span["tid"]), [])
        place.append((span["ts"], span["ts"] + span["dur"]))
    for found in tracks.values():
        found.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(found)), found
    assert len(tracks) == 4
    numbers = [span["args"].get("number") for span in spans(events) if "args" in span]
    assert sorted(number for number in numbers if number is not None) == [0, 1, 2, 3, 4]


def test_an_operation_that_never_began_was_negotiated_all_the_time(tmp_path: Path) -> None:
    task = finished("broadcast", "broadcast.x", times=(1.0, 1.0, 3.0))
    task.started_at = task.submitted_at
    (only,) = spans(record(tmp_path / "timeline.json", task))
    assert (only["name"], only["dur"]) == ("NEGOTIATE_BROADCAST", 2_000_000)


def test_what_had_begun_before_begins_with_the_file(tmp_path: Path) -> None:
    task = finished("allreduce", "allreduce.x", times=(-20.0, -10.0, 1.0))
    negotiation, work = spans(record(tmp_path / "timeline.json", task))
    assert (negotiation["ts"], negotiation["dur"], work["ts"]) == (0, 0, 0)
    assert 0 < work["dur"] <= 1_000_000 + 100_000


def test_cycles(tmp_path: Path) -> None:
    """Rounds are marked where that was asked for; or operations, where the engine has no rounds."""
    for mark_operations in (False, True):
        for marked in (False, True):
            path = tmp_path / f"{mark_operations}{marked}.json"
            timeline = Timeline(0, 2, mark_operations)
            timeline.start(str(path), marked)
            if not mark_operations:
                timeline.cycle()
            timeline.record(finished("allreduce", "allreduce.x"))
            timeline.stop()
            cycles = [event for event in load(path) if event["name"] == "CYCLE_START"]
            assert len(cycles) == marked
            assert all(event["ph"] == "i" for event in cycles)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(1, 2, False)
    timeline.start(str(path), True)
    timeline.record(finished("allreduce", "allreduce.x"))
    timeline.stop()
    assert not path.exists()
    assert Timeline.from_environment({}, 0, 1, False) is None
    assert Timeline.from_environment({"HOROVOD_TIMELINE": ""}, 0, 1, False) is None


def test_events_are_written_soon_without_being_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    recording = Recording(str(path), "process", False)
    for name in ("one", "two"):  # the second comes when the thread sleeps again
        recording.add(finished("allreduce", f"allreduce.{name}"))
        deadline = time.monotonic() + 20.0
        while name not in path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.002)
    recording.close()
    assert len(spans(load(path))) == 4


def test_a_forked_process_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    recording = Recording(str(path), "process", False)
    recording.add(finished("allreduce", "allreduce.once"))
    child = os.fork()
    if child == 0:
        try:
            recording.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    recording.close()
    assert path.read_text().count('"allreduce.once"') == 1
    load(path)


# -- jobs that do not come to their end -------------------------------------------------------

ENDS_BADLY = """
import os, signal, sys, threading, time, torch
import unidist as hvd
hvd.init(backend=BACKEND, timeout=60)
for number in range(200):
    hvd.allreduce(torch.ones(10), name=f"step.{number % 10}")
hvd.barrier()
if sys.argv[1] == "SIGKILL":
    # In the midst of writing, as far as that can be had.
    if hvd.rank() == 0:
        time.sleep(1.0)
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        hvd.allreduce(torch.ones(10), name="on_and_on")
hvd.allreduce(torch.ones(10), name="the_last")
if hvd.rank() == 0:
    if sys.argv[1] == "SIGINT":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    raise RuntimeError("an exception")
hvd.allreduce(torch.ones(10), name="never")
"""


@pytest.mark.parametrize(
    ("engine", "how"), [("torch", "SIGINT"), ("mpi", "SIGKILL"), ("horovod-gloo", "exception")]
)
def test_an_interrupted_job_leaves_a_whole_file(engine: str, how: str, tmp_path: Path) -> None:
    """Horovod's own file had no closing bracket then (horovod#1595, #3886)."""
    need(engine)
    row = harness.ENGINES[engine]
    path = tmp_path / "timeline.json"
    result = harness.launch(
        row.launcher,
        2,
        ["-c", f"BACKEND = {row.backend!r}\n{ENDS_BADLY}", how],
        environment={"HOROVOD_TIMELINE": str(path)},
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode not in (0, None), result.report()
    assert not result.left, result.report()
    events = load(path)
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert "allreduce.step.9" in names
    assert len(names) == len(set(names))
    assert "allreduce.never" not in names
    last = "allreduce.on_and_on" if how == "SIGKILL" else "allreduce.the_last"
    assert last in names, result.report()
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans(events))
