"""Waiting: for the result of an asynchronous operation, and for all ranks to come."""

from __future__ import annotations

import time
from typing import Any

from unidist import basics
from unidist.backends.base import Completed, Group, Work
from unidist.basics import Runtime
from unidist.collective import STAND_INS, run
from unidist.handles import Peers, Proposal, Task
from unidist.process_sets import ProcessSet, global_process_set, member_group


def _barrier_task(runtime: Runtime, group: Group, proposal: Proposal) -> Task:
    def start(peers: Peers | None) -> Work:
        # Where the engine negotiates, all have come by now.
        return runtime.backend.barrier(group) if peers is None else Completed()

    return Task(start, lambda: None, proposal)


STAND_INS["barrier"] = _barrier_task


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called, or has joined."""
    runtime = basics.runtime()
    group = member_group(process_set, "barrier")
    proposal = Proposal("barrier", runtime.name("barrier", None, group))
    run(runtime, group, _barrier_task(runtime, group, proposal))


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return without waiting.

    Raises:
        ValueError: the handle is unknown, or was synchronized already.
    """
    task = basics.runtime().handles.get(handle)
    if task is None:
        raise ValueError(f"poll got handle {handle!r}, which is not that of an operation under way")
    done = task.done()
    if not done:
        time.sleep(0)  # a loop around poll() would keep the interpreter from the engine's thread
    return done


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result; None for an unknown handle.

    Raises:
        HorovodInternalError: the operation failed. The handle is used up all the same.
    """
    runtime = basics.runtime()
    entry = runtime.handles.pop(handle)
    if entry is None:
        return None
    task, engine, single = entry
    value = engine.wait(task).result()
    return value[0] if single else value
