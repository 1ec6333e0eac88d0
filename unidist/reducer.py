"""Gradients of one optimizer: watched by hooks, kept in buckets, reduced while backward goes on.

A step on every rank ::

    backward ─ hook(p) ─ hook(p) ─ hook(p) ─ …          gradient moves into its view, bucket counts
                  │ bucket 0 full       │ bucket 1 full
    engine        └─ all-reduce 0 ──────└─ all-reduce 1 ─ …         in index order on every rank
    synchronize()                             └─ zeros for what is missing, launch the rest, wait

The first ``synchronize`` agrees on the plan with one control message: the same parameters and
options everywhere, the order in which gradients came on rank 0, which of them are sparse. Later
steps add none.
"""

from __future__ import annotations

import json
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist import basics
from unidist.agreement import agree_on_tensors, check_options, digest
from unidist.backends.base import Completed, Group, ReduceOp, Work
from unidist.backends.errors import HorovodInternalError
from unidist.basics import Lane, Runtime
from unidist.bucket import (
    FIRST_BUCKET_BYTES,
    Bucket,
    Shape,
    bucket_limit,
    check_still_frozen,
    keeps_strides,
    plan,
)
from unidist.collective import STAND_INS, run, wire_device
from unidist.compression import Compressor, compression_name
from unidist.engine import Engine
from unidist.handles import Peers, Proposal, Task
from unidist.layout import Wire
from unidist.movement import allgather_async
from unidist.ops import is_narrowed
from unidist.process_sets import ProcessSet, member_group
from unidist.streams import order_of
from unidist.synchronization import synchronize

#: all reducers of this process, in the order in which they were made
_reducers: list[weakref.ref[Reducer]] = []


def live_reducers(group: Group | None = None) -> list[Reducer]:
    """The reducers that exist, of one group or of all."""
    found = [reducer for reference in _reducers if (reducer := reference()) is not None]
    _reducers[:] = [weakref.ref(reducer) for reducer in found]
    return [r for r in found if not r.closed and group in (None, r.process_set.group)]


class _Watched:
    """One parameter's state between two steps."""

    __slots__ = (
        "bucket",
        "group",
        "hook",
        "index",
        "name",
        "parameter",
        "passes_left",
        "ready",
        "seen",
        "sparse_dim",
        "view",
    )

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter, passes: int) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.group: int | None = None
        self.passes_left = passes
        self.ready = False
        #: the gradient at the time it was ready, where there is no view to tell it by
        self.seen: torch.Tensor | None = None
        #: sparse dimensions of its gradient, 0 for a dense one; agreed with the plan
        self.sparse_dim = 0
        self.bucket: Bucket | None = None
        self.view: torch.Tensor | None = None
        self.hook: Any = None


class Reducer:
    """Reduces the gradients of named parameters over a process set.

    Args:
        named: the parameters, equal in names, shapes and dtypes on all ranks.
        average: whether to divide the sum by the number of ranks.
        predivide: for an average, divide by this before the reduction and by size / this after it.
        groups: for each group the names of its parameters, reduced as one.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        passes: int,
        compression: type[Compressor],
        average: bool,
        predivide: float,
        groups: Sequence[Sequence[str]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._passes = passes
        self._compression = compression
        self._average = average
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._lock = threading.Lock()
        self._runtime: Runtime | None = None
        self._group: Group | None = None
        self._engine: Engine | None = None
        self._lane: Lane | None = None
        # Whether buckets may be launched before finish(): see _make_plan.
        self._early = False
        self._bucket_predivide: dict[str, float] = {}
        self._watched: list[_Watched] = []
        self._frozen: list[tuple[str, torch.nn.Parameter]] = []
        self._arrived: list[int] = []
        self._buckets: list[Bucket] = []
        self._members: dict[Bucket, list[_Watched]] = {}
        self._next = 0  # the bucket to launch next
        self._tasks: list[Task] = []
        #: whether a gradient has come since the last reduction
        self.dirty = False
        self.closed = False
        self._group_of = {name: g for g, names in enumerate(groups) for name in names}
        self._watch(named)
        _reducers.append(weakref.ref(self))

    # -- hooks --------------------------------------------------------------------------------

    def _watch(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        for name, parameter in named:
            if not parameter.requires_grad:
                self._frozen.append((name, parameter))
                continue
            watched = _Watched(len(self._watched), name, parameter, self._passes)
            watched.group = self._group_of.get(name)
            self._watched.append(watched)
            watched.hook = parameter.register_post_accumulate_grad_hook(self._hook(watched))

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Watch further parameters; the plan is agreed anew at the next reduction."""
        self._watch(named)
        self._forget_plan()

    def close(self) -> None:
        """Remove the hooks, and leave the lane to others."""
        self.closed = True
        for watched in self._watched:
            watched.hook.remove()
        self._leave_lane()

    def _leave_lane(self) -> None:
        # With buckets under way, perhaps not the same ones on all ranks, nobody else may use it.
        if self._lane is not None and not self.dirty:
            self._lane.free = True
        self._lane = None

    def __del__(self) -> None:
        self.close()

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes before the gradients are reduced."""
        if self.dirty:
            raise ValueError(
                "backward_passes_per_step cannot be changed between backward() and step(). Call "
                "step() or zero_grad() first."
            )
        self._passes = passes
        for watched in self._watched:
            watched.passes_left = passes

    def _hook(self, watched: _Watched) -> Callable[[torch.Tensor], None]:
        # The parameter outlives the optimizer, whose hooks must not be kept alive by it.
        reference = weakref.ref(self)

        def gradient_is_there(parameter: torch.Tensor) -> None:
            reducer = reference()
            if reducer is not None:
                reducer._arrive(watched, parameter.grad)

        return gradient_is_there

    def _arrive(self, watched: _Watched, gradient: torch.Tensor | None) -> None:
        if self._runtime is not None and self._runtime is not basics.current():
            self._forget_plan()  # shut down, and perhaps initialised again, since
        view = watched.view
        left = watched.passes_left - 1
        if left < 0:
            earlier = watched.seen if view is None else view
            # With create_graph autograd adds to a copy, so the same gradient is another tensor.
            if gradient is earlier or (gradient is not None and gradient.requires_grad):
                raise AssertionError(
                    f"The gradient of {watched.name!r} was computed more than "
                    f"backward_passes_per_step ({self._passes}) times before optimizer.step(). "
                    "Increase backward_passes_per_step to accumulate gradients locally, or call "
                    "optimizer.zero_grad() or optimizer.synchronize() to discard the earlier ones."
                )
            # The earlier gradients were taken away without a step: another optimizer's
            # zero_grad, or model.zero_grad().
            self.discard()
            left = self._passes - 1
        watched.passes_left = left
        self.dirty = True
        if view is None:  # no plan yet, or sparse
            if left == 0:
                watched.ready = True
                watched.seen = gradient
                self._arrived.append(watched.index)
            return
        if gradient is not view:
            if gradient is not None and (gradient.dtype, gradient.device) != (
                view.dtype,
                view.device,
            ):
                raise ValueError(
                    f"Parameter {watched.name!r} was {view.dtype} on {view.device} in the first "
                    f"step and has a gradient of {gradient.dtype} on {gradient.device} now. Wrap "
                    "the optimizer again after converting or moving the model."
                )
            _adopt(watched, view)
        if left == 0:
            self._ready(watched)

    def _ready(self, watched: _Watched) -> None:
        assert watched.bucket is not None
        with self._lock:  # backward on several devices runs on several threads
            watched.ready = True
            watched.bucket.missing -= 1
            while (
                self._early
                and self._next < len(self._buckets)
                and not self._buckets[self._next].missing
            ):
                self._launch()

    # -- the plan -----------------------------------------------------------------------------

    def _forget_plan(self) -> None:
        self._leave_lane()
        self._buckets, self._members = [], {}
        self._runtime = self._group = self._engine = None
        self._early = False
        for watched in self._watched:
            watched.bucket = watched.view = None
        self._reset()

    def _make_plan(self) -> None:
        """Agree with the peers, then build the buckets and move the gradients into them."""
        runtime = basics.runtime()
        group = member_group(self.process_set, "DistributedOptimizer")
        if self._runtime is not None:  # shut down and initialised again since
            self._forget_plan()
        run(runtime, group, self._plan_task(runtime, group, runtime.name("plan", None, group)))

    def _plan_task(self, runtime: Runtime, group: Group, name: str) -> Task:
        """Exchange what the plan depends on, and build it as soon as all have told."""
        mine = self._describe(runtime, group)
        payload = json.dumps(mine).encode()
        answers: list[dict[str, Any] | None] = []

        def start(peers: Peers | None) -> Work:
            if peers is None:
                told: list[bytes | None] = list(runtime.backend.exchange(payload, group, name))
            else:
                told = [None if peer is None else peer.payload for peer in peers]
            answers.extend(None if one is None else json.loads(one) for one in told)
            return Completed()

        def finish() -> None:
            told = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
            first = next(iter(told.values()))
            if group.me not in told and any(mine[k] != first[k] for k in ("tensors", "options")):
                raise HorovodInternalError(
                    "The other ranks make the first step of an optimizer whose parameters or "
                    "options are not those of this rank, which has joined. Wrap the same optimizers"
                    " on all ranks, in one order."
                )
            self._build(runtime, group, told)

        return Task(start, finish, Proposal("plan", name, payload=payload))

    def _describe(self, runtime: Runtime, group: Group) -> dict[str, Any]:
        """What the plan depends on, on this rank."""
        for watched in self._watched:
            gradient = watched.parameter.grad
            if gradient is not None and gradient.is_sparse:
                watched.sparse_dim = gradient.sparse_dim()
        tensors = [[w.name, str(w.parameter.dtype), list(w.parameter.shape)] for w in self._watched]
        strides = [
            list(w.parameter.stride()) if keeps_strides(w.parameter) else None
            for w in self._watched
        ]
        return {
            "tensors": digest(tensors),
            "options": {
                "compression": compression_name(self._compression),
                "op": "Average" if self._average else "Sum",
                "gradient_predivide_factor": self._predivide,
                "groups": digest(sorted(self._group_of.items())),
                "sparse_as_dense": self._sparse_as_dense,
                "HOROVOD_FUSION_THRESHOLD": bucket_limit(),
            },
            "strides": digest(strides),
            "sparse": [[w.index, w.sparse_dim] for w in self._watched if w.sparse_dim],
            "order": self._arrived,
            "free": runtime.free_lanes(group),
            "index": live_reducers(group).index(self),
        }

    def _build(self, runtime: Runtime, group: Group, told: dict[int, dict[str, Any]]) -> None:
        """Build the plan from what the ranks have told, by rank in the group."""
        answers = list(told.values())
        complete = len(answers) == group.size  # none has joined
        if any(answer["tensors"] != answers[0]["tensors"] for answer in answers):
            return  # see _explain_difference
        options = {group.ranks[rank]: answer["options"] for rank, answer in told.items()}
        check_options(options, "DistributedOptimizer")
        limit = answers[0]["options"]["HOROVOD_FUSION_THRESHOLD"]
        sparse: dict[int, int] = {}
        for answer in answers:
            for index, dimensions in answer["sparse"]:
                sparse[index] = max(dimensions, sparse.get(index, 0))
        same_strides = all(answer["strides"] == answers[0]["strides"] for answer in answers)
        dense = [same_strides and keeps_strides(w.parameter) for w in self._watched]
        arrived: list[int] = answers[0]["order"]
        # Gradients come roughly from the last parameter to the first.
        others = sorted(set(range(len(self._watched))) - set(arrived), reverse=True)
        order = [*arrived, *others]
        # A lane that is free here may not be on a rank that has not told.
        free = set.intersection(*(set(answer["free"]) for answer in answers)) if complete else set()
        for watched in self._watched:
            watched.sparse_dim = sparse.get(watched.index, 0)
        bucketed = [i for i in order if self._sparse_as_dense or not self._watched[i].sparse_dim]
        shapes = [
            Shape(
                w.parameter.numel() * w.parameter.element_size(),
                f"{w.parameter.dtype} {w.parameter.device}",
                w.group,
            )
            for w in self._watched
        ]
        for members in plan(shapes, bucketed, min(FIRST_BUCKET_BYTES, limit), limit):
            inside = [self._watched[i] for i in members]
            bucket = Bucket(
                [w.parameter for w in inside],
                [dense[w.index] for w in inside],
                runtime.name("gradients", None, group),
            )
            self._buckets.append(bucket)
            self._members[bucket] = inside
            for w, view in zip(inside, bucket.views, strict=True):
                w.bucket, w.view = bucket, view
                if w.parameter.grad is not None:
                    _adopt(w, view)
            bucket.missing = sum(not w.ready for w in inside)
        # Which buckets are launched in backward and which in finish() may differ between ranks,
        # where one has a gradient and another has not. So the order of buckets against other
        # operations may differ, too: they need a group of their own where order is what matches.
        self._lane = lane = runtime.take_lane(group, free)
        self._group, self._engine = (
            (group, runtime.engine_of(group)) if lane is None else (lane.group, lane.engine)
        )
        self._early = lane is not None or runtime.backend.matches_by_name
        self._runtime = runtime

    # -- reduction ----------------------------------------------------------------------------

    def _explain_difference(self) -> None:
        """Raise, naming a parameter that is not the same on all ranks."""
        group = member_group(self.process_set, "DistributedOptimizer")
        named = [(w.name, w.parameter) for w in self._watched]
        agree_on_tensors(named, "DistributedOptimizer", group)
        raise AssertionError("the plan was not made, though the ranks agree")

    def is_begun(self, runtime: Runtime) -> bool:
        """Whether gradients have come since the last step, and may be on their way."""
        return self._runtime is runtime and self.dirty

    def is_planned(self, runtime: Runtime) -> bool:
        """Whether the other ranks may have a step under way that this rank would be part of."""
        return self._runtime is runtime and self._lane is not None

    def idle(self) -> None:
        """Give zeros to the steps of the others until no rank has one to do (see join.py)."""
        runtime, engine = self._runtime, self._engine
        assert runtime is not None
        assert engine is not None
        if self.dirty:
            self.launch_rest()
            self.discard()
        while True:
            for index, bucket in enumerate(self._buckets):
                zeros = bucket.zeros()
                engine.wait(engine.submit(self._task(runtime, zeros))).result()
                if index == 0 and not zeros.active.item():
                    return
            if not self._buckets:
                return

    def launch_rest(self) -> None:
        """Of a step that was begun: give the gradients that have come, and zeros for the others."""
        for bucket in self._buckets[self._next :]:
            for position, watched in enumerate(self._members[bucket]):
                if not watched.ready:  # its view holds what an earlier step left there
                    assert watched.view is not None
                    watched.view.zero_()
                    bucket.flags[position] = 0
        with self._lock:
            while self._next < len(self._buckets):
                self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        runtime, engine = self._runtime, self._engine
        assert runtime is not None
        assert engine is not None
        self._tasks.append(engine.submit(self._task(runtime, bucket)))

    def _task(self, runtime: Runtime, bucket: Bucket) -> Task:
        backend, group = runtime.backend, self._group
        assert group is not None
        flat = bucket.flat
        staged = wire_device(backend, flat) is not None
        on_stream = torch.cuda.Event() if staged and flat.is_cuda else None
        if on_stream is not None:
            on_stream.record()  # the copy to the host comes after what backward has enqueued
        wires: list[tuple[Wire, torch.Tensor, Any]] = []
        predivide = self._divisor(flat, group.size)

        def start(peers: Peers | None) -> Work:
            if on_stream is not None:
                on_stream.synchronize()
            if predivide != 1.0:
                bucket.gradients.div_(predivide)
            compressed, context = self._compression.compress(flat)
            wire = Wire(compressed, in_place=True, device=wire_device(backend, flat))
            wire.widen(backend.reduce_dtypes)
            wires.append((wire, compressed, context))
            return backend.allreduce(wire.flat, ReduceOp.SUM, group, bucket.name)

        def finish() -> None:
            wire, compressed, context = wires[0]
            divisor = group.size / predivide if self._average else 1.0
            if compressed is flat:  # divided before it is rounded to a narrower type
                if divisor != 1.0:
                    wire.flat.div_(divisor)
                wire.result()
                return
            wire.result()
            flat.copy_(self._compression.decompress(compressed, context))
            if divisor != 1.0:
                flat.div_(divisor)

        inline = backend.matches_by_name or (
            self._lane is not None and flat.device.type != "cpu" and not staged
        )
        # Terms are compared only where there is no lane, and buckets are negotiated.
        terms = {"elements": flat.numel(), "dtype": str(flat.dtype).removeprefix("torch.")}
        proposal = Proposal("bucket", bucket.name, terms)
        order = None if inline else order_of([flat])
        return Task(start, finish, proposal, inline, flat.numel(), order)

    def _divisor(self, flat: torch.Tensor, size: int) -> float:
        """What gradients are divided by before they are summed."""
        if self._predivide != 1.0 or not self._average:
            return self._predivide
        kind = f"{flat.dtype} {flat.device}"
        if kind not in self._bucket_predivide:
            compressed = self._compression.compress(flat.new_zeros(1))
            # The sum may overflow the narrower type where the average does not.
            narrowed = is_narrowed(compressed, flat)
            self._bucket_predivide[kind] = float(size) if narrowed else 1.0
        return self._bucket_predivide[kind]

    def finish(self) -> None:
        """Reduce what has come since the last call, zeros for what has not, and wait.

        All ranks must call it. Afterwards every parameter's ``grad`` is the reduced gradient, and
        None where no rank had one.

        Raises:
            HorovodInternalError: a peer failed, came too late, or has other parameters.
        """
        check_still_frozen(self._frozen)
        try:
            if self._runtime is None or self._runtime is not basics.runtime():
                self._make_plan()
                if self._runtime is None:
                    self._explain_difference()
            absent = self._complete_buckets()
            sparse = [w for w in self._watched if w.sparse_dim and w.view is None]
            gathers = [self._gather_sparse(w) for w in sparse]
            self._wait()
            for finish_sparse in gathers:
                finish_sparse()
            self._publish(absent)
        finally:
            self._reset()

    def discard(self) -> None:
        """Finish what is under way and forget it; gradients are left as they are.

        Peers may be waiting for buckets that this rank has not launched, so all are launched. All
        ranks must call it.
        """
        runtime = self._runtime
        try:
            if runtime is not None and self.dirty and runtime is basics.current():
                with self._lock:
                    while self._next < len(self._buckets):
                        self._launch()
                self._wait()
        finally:
            self._reset()

    def _wait(self) -> None:
        """Wait until no task writes to the buckets any more; raise what one raised."""
        engine = self._engine
        assert engine is not None
        for task in self._tasks:
            engine.wait(task)
        for task in self._tasks:
            task.result()

    def _complete_buckets(self) -> list[tuple[Bucket, int]]:
        """Fill in what is missing, launch what is not launched; return what this rank lacks."""
        absent: list[tuple[Bucket, int]] = []
        for bucket in self._buckets[self._next :]:
            if bucket.missing:
                for position, watched in enumerate(self._members[bucket]):
                    if watched.ready:
                        continue
                    view, gradient = watched.view, watched.parameter.grad
                    assert view is not None
                    if gradient is None:
                        view.zero_()
                        bucket.flags[position] = 0
                        absent.append((bucket, position))
                    elif gradient is not view:
                        _adopt(watched, view)
        with self._lock:
            while self._next < len(self._buckets):
                self._launch()
        return absent

    def _publish(self, absent: Sequence[tuple[Bucket, int]]) -> None:
        """Make the reduced views the gradients."""
        for bucket in self._buckets:
            for watched in self._members[bucket]:
                parameter, view = watched.parameter, watched.view
                if parameter.grad is not view:
                    parameter.grad = view
                if watched.sparse_dim:
                    assert view is not None
                    parameter.grad = view.to_sparse(watched.sparse_dim)
        for bucket, position in absent:
            if not bucket.flags[position].item():
                self._members[bucket][position].parameter.grad = None

    def _reset(self) -> None:
        for watched in self._watched:
            watched.passes_left = self._passes
            watched.ready = False
            watched.seen = None
        for bucket in self._buckets:
            bucket.missing = len(bucket.views)
            bucket.reset_flags()
        self._arrived = []
        self._tasks = []
        self._next = 0
        self.dirty = False

    def _gather_sparse(self, watched: _Watched) -> Callable[[], None]:
        """Start gathering a sparse gradient's indices and values; return what ends it."""
        runtime, group = self._runtime, self._group
        assert runtime is not None
        assert group is not None
        parameter, dims = watched.parameter, watched.sparse_dim
        gradient = parameter.grad
        absent = gradient is None
        if gradient is None:
            none = torch.empty(dims, 0, dtype=torch.int64, device=parameter.device)
            gradient = _sparse(none, parameter.new_empty(0, *parameter.shape[dims:]), parameter)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(dims)
        gradient = gradient.coalesce()
        name = f"sparse.{watched.name}"
        values, context = self._compression.compress(gradient.values())
        handles = [
            allgather_async(gradient.indices().t(), f"{name}.indices", self.process_set),
            allgather_async(values, f"{name}.values", self.process_set),
        ]

        def finish_sparse() -> None:
            indices, gathered = (synchronize(handle) for handle in handles)
            if absent and not len(gathered):
                return  # no rank has a gradient
            total = self._compression.decompress(gathered, context)
            if self._average:
                total = total / group.size
            parameter.grad = _sparse(indices.t(), total, parameter)

        return finish_sparse


def _sparse(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A coalesced sparse tensor of a parameter's shape."""
    return torch.sparse_coo_tensor(
        indices, values.detach(), like.shape, check_invariants=True
    ).coalesce()


def _adopt(watched: _Watched, view: torch.Tensor) -> None:
    """Copy a gradient into its view and make the view the gradient."""
    gradient = watched.parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        if not watched.sparse_dim:
            warnings.warn(
                f"The gradient of {watched.name!r} is sparse, but was not on any rank in the first "
                "step, when that was agreed. It is reduced as a dense one.",
                stacklevel=2,
            )
        gradient = gradient.to_dense()
    view.copy_(gradient.detach())
    watched.parameter.grad = view


# -- a rank that has joined -----------------------------------------------------------------------


def _plan_with_the_others(runtime: Runtime, group: Group, proposal: Proposal) -> Task:
    """The others have their first step now: plan with them, and give zeros to it."""
    assert proposal.payload is not None
    index = json.loads(proposal.payload)["index"]
    reducers = live_reducers(group)
    if index >= len(reducers):
        raise HorovodInternalError(
            "The other ranks make the first step of an optimizer that this rank, which has joined, "
            "has not wrapped. Wrap the same optimizers on all ranks before join()."
        )
    reducer = reducers[index]
    task = reducer._plan_task(runtime, group, proposal.name)
    task.then(lambda _: runtime.begin_idle(reducer.idle))
    return task


STAND_INS["plan"] = _plan_with_the_others
