"""The timeline: what rank 0 did when, as a Chrome trace (chrome://tracing, https://ui.perfetto.dev).

::

    HOROVOD_TIMELINE=/tmp/timeline.json        from init to shutdown
    HOROVOD_TIMELINE=DYNAMIC                   from start_timeline(path) to stop_timeline()
    HOROVOD_TIMELINE_MARK_CYCLES=1             and a mark for each round of negotiation

Each operation is a row by its name, with two spans as in Horovod's own timeline:
``NEGOTIATE_ALLREDUCE`` from the call until all ranks have made it, ``ALLREDUCE`` while data moves.
Long negotiations are waits for a slower rank. Where Horovod is the engine it negotiates inside of
the second span. Operations under way at the same time have rows of their own.

An operation takes 200 to 300 bytes, so a long training job makes a large file: switch the timeline
on for the steps of interest with ``start_timeline`` and ``stop_timeline``.

The file is a whole JSON document all the time, however the job ends: a block of events overwrites
the closing bracket of the last one and brings its own, in one write of at most 4 KiB ::

    [ {...}, {...} ]
                   , {...}, {...} ]
                                  , {...} ]

An operation costs its thread a tuple in a list; a thread of the timeline's own writes, a moment
later. Without HOROVOD_TIMELINE there is none of all this.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from unidist import basics
from unidist.handles import Task

VARIABLE = "HOROVOD_TIMELINE"
MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"

#: seconds for which events are collected before they are written
_COLLECT = 0.02

#: the most that one write holds: where a write ends within a page, no kill can divide it
_BLOCK = 4096

_CLOSING = b"\n]\n"

#: the number in the name of an operation to which the caller gave none
_UNNAMED = re.compile(r"\.noname\.(\d+)")

#: kinds of operations that are not called what they do
_ACTIVITIES = {"bucket": "ALLREDUCE"}


@dataclass
class _Operation:
    """What is kept of a finished task; times are seconds of time.perf_counter()."""

    kind: str
    label: str
    terms: dict[str, Any]
    own: Any
    payload: int  # bytes that travelled with the negotiation
    items: int
    submitted: float
    started: float
    finished: float


class TraceFile:
    """A JSON array on disk that is whole after every write.

    Raises:
        OSError: the path cannot be written, or is not that of an ordinary file.
    """

    def __init__(self, path: str, first: Sequence[dict[str, Any]]) -> None:
        try:
            # Not blocking: a named pipe would make us wait for somebody to read it.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o666)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            block = b"[\n" + b",\n".join(map(_line, first)) + _CLOSING
            os.pwrite(self._file, block, 0)
        except OSError as error:  # a pipe or a terminal, a full disk
            os.close(self._file)
            raise _unwritable(path, error) from error
        self._end = len(block) - len(_CLOSING)

    def append(self, events: Sequence[dict[str, Any]]) -> None:
        """Write events behind the others.

        Raises:
            OSError: the disk is full, for one; what was written before stays whole.
        """
        block: list[bytes] = []
        size = len(_CLOSING)
        for line in map(_line, events):
            if block and size + len(line) + 2 > _BLOCK:
                self._write(b"".join(block))
                block, size = [], len(_CLOSING)
            block.append(b",\n" + line)
            size += len(line) + 2
        if block:
            self._write(b"".join(block))

    def _write(self, block: bytes) -> None:
        try:
            written = os.pwrite(self._file, block + _CLOSING, self._end)
            if written < len(block) + len(_CLOSING):
                raise OSError(f"only {written} of {len(block) + len(_CLOSING)} bytes were written")
        except OSError:
            with suppress(OSError):
                os.pwrite(self._file, _CLOSING, self._end)
                os.ftruncate(self._file, self._end + len(_CLOSING))
            raise
        self._end += len(block)

    def close(self) -> None:
        os.close(self._file)


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


def _unwritable(path: str, error: OSError) -> OSError:
    why = error.strerror or str(error)
    return type(error)(
        error.errno,
        f"The timeline cannot be written ({why}). Give HOROVOD_TIMELINE or start_timeline() the "
        "path of a file in a folder that exists",
        path,
    )


class Recording:
    """One timeline file: collects operations, and writes them in a thread of its own.

    Args:
        title: of the process in the trace.
        mark_cycles: whether to mark rounds of negotiation.
    """

    def __init__(self, path: str, title: str, mark_cycles: bool) -> None:
        self.path = path
        self.mark_cycles = mark_cycles
        self._origin = time.perf_counter()
        epoch = int(time.time() * 1e6)
        self._file = TraceFile(
            path,
            [_named(0, title, start_time_since_epoch_in_micros=epoch)],
        )
        self._process = os.getpid()
        self._pending: deque[_Operation | float] = deque()  # a number is the time of a cycle
        self._rows: dict[str, int] = {}
        #: of each row, when the last operation of each of its tracks ended
        self._tracks: dict[str, list[float]] = {}
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="unidist-timeline", daemon=True)
        self._thread.start()

    def add(self, task: Task) -> None:
        """Record a finished operation."""
        if self._ended:
            return
        proposal = task.proposal
        self._pending.append(
            _Operation(
                proposal.kind,
                task.label,
                proposal.terms,
                proposal.own,
                len(proposal.payload or b""),
                task.items,
                task.submitted_at,
                task.started_at,
                task.finished_at,
            )
        )
        if not self._wake.is_set():
            self._wake.set()

    def mark(self) -> None:
        """Mark a cycle."""
        if self._ended:
            return
        self._pending.append(time.perf_counter())
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait()
            self._wake.clear()
            if not self._ended:
                time.sleep(_COLLECT)
                self.flush()

    def flush(self) -> None:
        """Write what has been recorded. Warns, and writes no more, where that fails."""
        if os.getpid() != self._process:  # a fork has the file too, but nothing to tell
            return
        with self._writing:
            if self._ended:
                return
            events = []
            while self._pending:  # threads go on adding: take one after another
                events += self._events(self._pending.popleft())
            try:
                self._file.append(events)
            except OSError as error:
                self._ended = True
                self._file.close()
                print(
                    f"unidist: warning: the timeline {self.path!r} ends here, since it cannot be "
                    f"written any more: {error}",
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        with self._writing:
            if self._ended:
                return
            self._ended = True
            self._file.close()
        self._wake.set()
        if self._process == os.getpid():
            self._thread.join()

    # -- events -----------------------------------------------------------------------------------

    def _micros(self, seconds: float) -> int:
        """Since the file was begun. What had begun earlier begins with it."""
        return max(0, round((seconds - self._origin) * 1e6))

    def _events(self, one: _Operation | float) -> list[dict[str, Any]]:
        if isinstance(one, float):
            at = {"ts": self._micros(one), "pid": 0, "tid": 0}
            return [{"name": "CYCLE_START", "ph": "i", "s": "g", **at}]
        label, number = one.label, None
        # A bucket keeps its number; numbers of operations would make a row for each call.
        if one.kind != "bucket" and (found := _UNNAMED.search(label)):
            number = int(found[1])
            label = _UNNAMED.sub(".noname", label)
        events = []
        if label not in self._rows:
            self._rows[label] = len(self._rows) + 1
            events.append(_named(self._rows[label], label))
        place = {"pid": self._rows[label], "tid": self._track(label, one)}
        kind = one.kind.removeprefix("grouped_")
        activity = _ACTIVITIES.get(kind, kind.upper())
        begin, middle, end = map(self._micros, (one.submitted, one.started, one.finished))
        never_started = one.started == one.submitted
        spans = [(f"NEGOTIATE_{activity}", begin, end if never_started else middle)]
        if not never_started:
            spans.append((activity, middle, end))
        for name, since, until in spans:
            event = {"name": name, "ph": "X", "ts": since, "dur": until - since, **place}
            events.append(event)
        arguments = _arguments(one)
        if number is not None:
            arguments["number"] = number
        events[-1]["args"] = arguments
        return events

    def _track(self, label: str, one: _Operation) -> int:
        """A row has as many tracks as operations that go on at the same time."""
        ends = self._tracks.setdefault(label, [])
        for track, end in enumerate(ends):
            if end <= one.submitted:
                ends[track] = one.finished
                return track
        ends.append(one.finished)
        return len(ends) - 1


def _named(row: int, name: str, **others: Any) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": row, "args": {"name": name, **others}}


def _arguments(one: _Operation) -> dict[str, Any]:
    """What an operation works on, from what its ranks have agreed on."""
    terms = dict(one.terms)
    shape_key = next((key for key in terms if key.startswith("shape")), "")
    shapes = terms.pop(shape_key, None)
    for key, usual in (("device", "cpu"), ("prescale_factor", 1.0), ("postscale_factor", 1.0)):
        if terms.get(key) == usual:
            del terms[key]
    devices = terms.pop("devices", None)
    dtypes = terms.pop("dtypes", None)
    if dtypes is None:
        dtypes = [terms["dtype"]] if "dtype" in terms else []
        shapes = None if shapes is None else [shapes]
    else:
        terms["tensors"] = terms.pop("number of tensors")
        terms["dtype"] = ", ".join(dict.fromkeys(dtypes))
        if devices and set(devices) != {"cpu"}:
            terms["device"] = ", ".join(dict.fromkeys(devices))
    if shapes is not None and "first dimension" in shape_key and one.own is not None:
        rows = [sum(one.own)] if one.kind == "alltoall" else one.own
        shapes = [[count, *shape] for count, shape in zip(rows, shapes, strict=True)]
    if shapes is None:
        elements = [one.items]
    else:
        elements = [math.prod(shape) for shape in shapes]
        if len(shapes) == 1:
            terms["shape"] = shapes[0]
    terms["elements"] = sum(elements)
    if dtypes:
        sizes = [getattr(torch, dtype).itemsize for dtype in dtypes]
        terms["bytes"] = sum(n * size for n, size in zip(elements, sizes, strict=True))
    elif one.payload:  # an object, or a plan
        del terms["elements"]
        terms["bytes"] = one.payload
    return terms


# -- switching it on and off ----------------------------------------------------------------------


class Timeline:
    """The timeline of one init: whether it may be used, and what is recorded now.

    Args:
        mark_operations: let each operation be a cycle, where the engine has no rounds of ours.
    """

    def __init__(self, rank: int, size: int, mark_operations: bool) -> None:
        self._title = f"unidist rank {rank} of {size}"
        #: as in Horovod, it is rank 0 that writes
        self.writes = rank == 0
        self._mark_operations = mark_operations
        self._recording: Recording | None = None
        self._switching = threading.Lock()

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], rank: int, size: int, mark_operations: bool
    ) -> Timeline | None:
        """The timeline that HOROVOD_TIMELINE asks for, begun where it is a path; else None.

        Raises:
            OSError: the path cannot be written.
        """
        path = environment.get(VARIABLE)
        if not path:
            return None
        timeline = cls(rank, size, mark_operations)
        if path != "DYNAMIC":
            timeline.start(path, environment.get(MARK_CYCLES, "0") not in ("", "0"))
        return timeline

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a file, and end the one that is written; nothing changes when they are the same.

        Raises:
            OSError: the path cannot be written.
        """
        if not self.writes:
            return
        with self._switching:
            current = self._recording
            if current is not None and current.path == path:
                current.mark_cycles = mark_cycles
                return
            self._recording = Recording(path, self._title, mark_cycles)
            if current is not None:
                current.close()

    def stop(self) -> None:
        """Write what has been recorded, and record no more."""
        with self._switching:
            ended, self._recording = self._recording, None
            if ended is not None:
                ended.close()

    def record(self, task: Task) -> None:
        """Take in a finished operation."""
        recording = self._recording
        if recording is not None:
            if self._mark_operations and recording.mark_cycles:
                recording.mark()
            recording.add(task)

    def cycle(self) -> None:
        """A round of negotiation begins."""
        recording = self._recording
        if recording is not None and recording.mark_cycles:
            recording.mark()


def _enabled() -> Timeline:
    timeline = basics.runtime().timeline
    if timeline is None:
        raise ValueError(
            "Set HOROVOD_TIMELINE environment variable before calling start_timeline(). It is read "
            "by init(): a path begins a timeline there and then, DYNAMIC leaves it to "
            "start_timeline()."
        )
    return timeline


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to record operations in a file; only rank 0 does, and the others may call it, too.

    A file that exists is overwritten. A timeline that is being written ends.

    Args:
        file_path: where; the file is a whole JSON document as long as it is written, and after.
        mark_cycles: mark the rounds in which ranks tell each other what they have been given.

    Raises:
        ValueError: before init; HOROVOD_TIMELINE was not set then.
        OSError: the path is a directory, or cannot be written (on rank 0).
    """
    _enabled().start(os.fspath(file_path), bool(mark_cycles))


def stop_timeline() -> None:
    """Write what has been recorded and close the file; ``start_timeline`` may be called again.

    Raises:
        ValueError: before init; HOROVOD_TIMELINE was not set then.
    """
    _enabled().stop()
