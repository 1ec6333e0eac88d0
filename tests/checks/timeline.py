"""The timeline: a Chrome trace of what rank 0 did, by variable or by calls."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from checks.support import connect, equal, raises

VARIABLES = ("HOROVOD_TIMELINE", "HOROVOD_TIMELINE_MARK_CYCLES")


@contextmanager
def connected(hvd: Any, timeline: str = "", cycles: str = "") -> Iterator[None]:
    """Connect anew with these variables; afterwards as before."""
    hvd.shutdown()
    values = dict(zip(VARIABLES, (timeline, cycles), strict=True))
    os.environ.update({name: value for name, value in values.items() if value})
    try:
        connect(hvd)
        yield
    finally:
        hvd.shutdown()
        for name in VARIABLES:
            os.environ.pop(name, None)
        connect(hvd)


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a file, none of which lies outside of it."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    for event in events:
        assert event["ph"] in ("M", "X", "i"), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
    return events


def spans(events: list[dict[str, Any]], row: str) -> list[dict[str, Any]]:
    """The spans in the row of a name."""
    numbers = [e["pid"] for e in events if e["ph"] == "M" and e["args"]["name"] == row]
    assert len(numbers) == 1, f"{row} has {len(numbers)} rows"
    return [event for event in events if event["ph"] == "X" and event["pid"] == numbers[0]]


def check_needs_the_variable(hvd: Any) -> None:
    """Without HOROVOD_TIMELINE at init there is no timeline, and it costs nothing."""
    with tempfile.TemporaryDirectory() as folder:
        with raises(ValueError, "Set HOROVOD_TIMELINE"):
            hvd.start_timeline(f"{folder}/timeline.json")
        with raises(ValueError, "Set HOROVOD_TIMELINE"):
            hvd.stop_timeline()
        assert not os.listdir(folder)
    if hvd.__name__ == "unidist":
        from unidist import basics

        assert basics.runtime().trace is None
        assert basics.runtime().timeline is None


def check_from_init_to_shutdown(hvd: Any) -> None:
    size = hvd.size()
    writes = hvd.rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        with connected(hvd, str(path), "1"):
            equal(os.environ["HOROVOD_TIMELINE"], str(path), "the variable stays")
            hvd.allreduce(torch.ones(3, 5), name="test_allreduce")
            if writes:
                # Horovod's own test waits for a tenth of a second; a loaded machine may be slow.
                deadline = time.monotonic() + 20
                while "allreduce.test_allreduce" not in json.dumps(load(path)):
                    assert time.monotonic() < deadline, path.read_text()
                    time.sleep(0.01)
        equal(path.exists(), writes, "only rank 0 writes")
        if not writes:
            return
        text = path.read_text()
        for word in (
            "allreduce.test_allreduce",
            "start_time_since_epoch_in_micros",
            "NEGOTIATE_ALLREDUCE",
            "ALLREDUCE",
            "CYCLE_START",
        ):
            assert word in text, word
        negotiation, work = spans(load(path), "allreduce.test_allreduce")
        equal(negotiation["name"], "NEGOTIATE_ALLREDUCE")
        equal(work["name"], "ALLREDUCE")
        equal(negotiation["ts"] + negotiation["dur"], work["ts"])
        found = {key: work["args"][key] for key in ("dtype", "shape", "elements", "bytes", "op")}
        want = {"dtype": "float32", "shape": [3, 5], "elements": 15, "bytes": 60, "op": "Average"}
        equal(found, want)
        assert any(f"of {size}" in event["args"]["name"] for event in load(path) if "args" in event)


def check_a_path_that_cannot_be_written(hvd: Any) -> None:
    """It is an error of init, on all ranks, which says what to do."""
    writes = hvd.rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        for path in (folder, f"{folder}/missing/timeline.json"):
            hvd.shutdown()
            os.environ["HOROVOD_TIMELINE"] = path
            words = ("timeline", "rank 0", "Give HOROVOD_TIMELINE")
            with raises(ValueError, *words, *([path] if writes else [])):
                connect(hvd)
            equal(hvd.is_initialized(), False)
            del os.environ["HOROVOD_TIMELINE"]
            connect(hvd)


def check_started_and_stopped(hvd: Any) -> None:
    """As often as one likes, with the same file or another."""
    writes = hvd.rank() == 0
    with tempfile.TemporaryDirectory() as folder, connected(hvd, "DYNAMIC"):
        first, second = Path(folder, "first.json"), Path(folder, "second.json")
        hvd.stop_timeline()  # nothing to stop
        hvd.allreduce(torch.ones(2), name="too_early")

        hvd.start_timeline(str(first), mark_cycles=True)
        hvd.allreduce(torch.ones(2), name="test_allreduce")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(2), name="between")
        equal(first.exists(), writes, "only rank 0 writes")
        if writes:
            text = first.read_text()
            assert "allreduce.test_allreduce" in text
            assert "CYCLE_START" in text
            assert "too_early" not in text
            assert "between" not in text
            load(first)

        hvd.start_timeline(str(second))
        hvd.allreduce(torch.ones(2), name="of_the_second")
        # A file that is being written ends when another begins, and this one is overwritten.
        hvd.start_timeline(str(first))
        hvd.allreduce(torch.ones(2), name="of_the_first")
        hvd.stop_timeline()
        if writes:
            text = second.read_text()
            assert "of_the_second" in text
            assert "of_the_first" not in text
            assert "CYCLE_START" not in text
            load(second)
            text = first.read_text()
            assert "of_the_first" in text
            assert "test_allreduce" not in text
            load(first)
            for path in (folder, f"{folder}/missing/timeline.json"):
                with raises(OSError, "timeline", path):
                    hvd.start_timeline(path)
        hvd.allreduce(torch.ones(2), name="at_the_end")


def check_every_operation_is_recorded(hvd: Any) -> None:
    """Under its name, with what it does; a name that is used again keeps its row."""
    rank, size = hvd.rank(), hvd.size()
    with tempfile.TemporaryDirectory() as folder, connected(hvd, "DYNAMIC"):
        path = Path(folder, "timeline.json")
        parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))

        def step() -> None:
            sum(parameter.sum() for parameter in parameters).backward()
            optimizer.step()
            optimizer.zero_grad()

        hvd.start_timeline(str(path))
        for _ in range(3):
            hvd.allreduce(torch.ones(4, dtype=torch.float64), name="again")
            hvd.allreduce(torch.ones(4))
        hvd.grouped_allreduce([torch.ones(4), torch.ones(2, 2).double()], name="group")
        hvd.allgather(torch.ones(rank + 1, 2), name="rows")
        hvd.broadcast(torch.ones(2), 0, name="root")
        hvd.alltoall(torch.ones(size, 3), name="parts")
        hvd.reducescatter(torch.ones(size, 3), name="own")
        hvd.barrier()
        step()
        step()
        step()
        hvd.stop_timeline()
        hvd.barrier()
        if rank:
            return
        events = load(path)
        for row, activity, count, size_in_bytes in (
            ("allreduce.again", "ALLREDUCE", 3, 32),
            ("allreduce.noname", "ALLREDUCE", 3, 16),
            ("grouped_allreduce.group", "ALLREDUCE", 1, 48),
            ("allgather.rows", "ALLGATHER", 1, 8),
            ("broadcast.root", "BROADCAST", 1, 8),
            ("alltoall.parts", "ALLTOALL", 1, 12 * size),
            ("reducescatter.own", "REDUCESCATTER", 1, 12 * size),
            ("barrier.noname", "BARRIER", 1, None),
        ):
            found = spans(events, row)
            names = [event["name"] for event in found]
            equal(names, [f"NEGOTIATE_{activity}", activity] * count, row)
            for event in found[1::2]:
                equal(event["args"].get("bytes"), size_in_bytes, row)
        if size == 1:  # there is nothing to reduce, and no bucket
            return
        gradients = {
            event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["args"]["name"].startswith("gradients.")
        }
        equal(len(gradients), 1, "rows of buckets")
        bucket = spans(events, gradients.pop())
        equal([event["name"] for event in bucket], ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 3)


def check_not_initialized(hvd: Any) -> None:
    hvd.shutdown()
    for call in (lambda: hvd.start_timeline("timeline.json"), hvd.stop_timeline):
        with raises(ValueError, "init"):
            call()
    connect(hvd)
