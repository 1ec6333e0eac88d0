"""join: a rank that has run out of data lets the others finish.

A rank that has joined takes part in every operation of the others, with zeros or with no rows. In
operations that are negotiated it hears of them (``negotiation.py``). An optimizer's buckets are not
announced, so for each planned optimizer the rank starts the next step's first bucket of zeros at
once, and waits for the others in it. The last number of each bucket counts the ranks that have a
step to do; when it is 0, all have joined, and nobody starts the next bucket.
"""

from __future__ import annotations

import gc

from unidist import basics
from unidist.backends.base import Completed
from unidist.basics import Runtime
from unidist.handles import Proposal, Task
from unidist.negotiation import JOIN
from unidist.reducer import Reducer, live_reducers


def _planned(runtime: Runtime) -> list[Reducer]:
    return [reducer for reducer in live_reducers() if reducer.is_planned(runtime)]


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and return when all ranks have said so.

    Meanwhile this rank supplies zeros to the reductions of the others (averages are still divided
    by the number of all ranks), no rows to their gathers, and takes what they broadcast. An
    operation that needs something of this rank, such as a broadcast from it, is an error on the
    others. All ranks must call it.

    Args:
        device: accepted for Horovod's sake; zeros are made where the others have their tensors.

    Returns:
        The rank that joined last.

    Raises:
        ValueError: before init.
        HorovodInternalError: a peer failed or came too late.
    """
    runtime = basics.runtime()
    if runtime.backend.matches_by_name:
        begun = [reducer for reducer in live_reducers() if reducer.is_begun(runtime)]
        for reducer in begun:
            reducer.launch_rest()
        for reducer in begun:
            reducer.discard()
        return runtime.engine.call(runtime.backend.join, JOIN)
    groups = [
        process_set.group
        for process_set in runtime.process_sets.values()
        if process_set.group is not None and process_set.group.rank is not None
    ]
    # Ranks that train only meet in a round when all have joined: by their steps they know who is
    # the last one.
    progress = {
        group: sum(lane.engine.submitted for lane in runtime.lanes.get(group, []))
        for group in groups
    }
    planned = _planned(runtime)
    if len(planned) > 1:
        # An optimizer that is garbage on all ranks may still be there on some, and the others would
        # not take part in its buckets.
        planned = []
        gc.collect()
        planned = _planned(runtime)
    for reducer in planned:
        runtime.begin_idle(reducer.idle)
    tasks = []
    for group in groups:
        engine = runtime.engine_of(group)
        task = Task(
            lambda peers: Completed(), lambda: None, Proposal(JOIN, JOIN, own=progress[group])
        )
        tasks.append((engine, engine.submit(task)))
    last = [engine.wait(task).result() for engine, task in tasks]
    runtime.end_idle()
    return int(last[0])
