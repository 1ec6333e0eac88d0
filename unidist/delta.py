"""The optimizer's step with op=Adasum: every rank steps alone, then the changes are combined.

    start ← p;  p ← base step with the local gradient;  p ← start + Adasum(p - start)

As in Horovod (systems that predate it combine gradients) the *changes* are combined, so that an
adaptive optimizer's scaling takes part. Unlike there, the parameters never hold a change in place
of a value: between ``backward`` and ``step`` they and their local gradients can be read, clipped
and logged. Momentum and other state stays local to each rank, as in Horovod.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist import basics
from unidist.adasum import ADASUM_DTYPES, adasum_
from unidist.agreement import agree_on_options, agree_on_tensors
from unidist.backends.base import Backend, Completed, Group, ReduceOp, Work
from unidist.basics import Runtime
from unidist.bucket import Bucket, Shape, bucket_limit, check_still_frozen, plan
from unidist.collective import STAND_INS
from unidist.compression import Compressor, compression_name
from unidist.handles import Peers, Proposal, Task
from unidist.ops import native_adasum, reduce_flats
from unidist.process_sets import ProcessSet, member_group


class DeltaReducer:
    """Combines the changes that a local step made to parameters, bucket by bucket."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        compression: type[Compressor],
        process_set: ProcessSet,
    ) -> None:
        self._named = [(name, p) for name, p in named if p.requires_grad]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._compression = compression
        self._process_set = process_set
        self._runtime: Runtime | None = None
        self._buckets: list[tuple[Bucket, list[torch.nn.Parameter]]] = []
        self._starts: list[list[torch.Tensor]] = []

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Combine the changes of further parameters, too."""
        self._named += [(name, p) for name, p in named if p.requires_grad]
        self._runtime = None

    def begin(self) -> None:
        """Remember the parameters before the local step."""
        check_still_frozen(self._frozen)
        if self._runtime is None or self._runtime is not basics.runtime():
            self._make_plan()
        self._starts = [
            [parameter.detach().clone() for parameter in parameters]
            for _, parameters in self._buckets
        ]

    def finish(self) -> None:
        """Replace each parameter by its start plus the combined change. All ranks must call it."""
        runtime = basics.runtime()
        group = member_group(self._process_set, "DistributedOptimizer")
        engine = runtime.engine_of(group)
        tasks = []
        for (bucket, parameters), starts in zip(self._buckets, self._starts, strict=True):
            for view, parameter, start in zip(bucket.views, parameters, starts, strict=True):
                torch.sub(parameter.detach(), start, out=view)
            tasks.append(engine.submit(self._task(runtime.backend, group, bucket)))
        for task, (bucket, parameters), starts in zip(
            tasks, self._buckets, self._starts, strict=True
        ):
            engine.wait(task).result()
            for view, parameter, start in zip(bucket.views, parameters, starts, strict=True):
                parameter.detach().copy_(start.add_(view))
        self._starts = []

    def _make_plan(self) -> None:
        runtime = basics.runtime()
        group = member_group(self._process_set, "DistributedOptimizer")
        limit = bucket_limit()
        agree_on_tensors(self._named, "DistributedOptimizer", group)
        agree_on_options(
            {
                "compression": compression_name(self._compression),
                "op": "Adasum",
                "HOROVOD_FUSION_THRESHOLD": limit,
            },
            "DistributedOptimizer",
            group,
        )
        shapes = [
            Shape(p.numel() * p.element_size(), f"{p.dtype} {p.device}") for _, p in self._named
        ]
        self._buckets = []
        for members in plan(shapes, range(len(shapes)), limit, limit):
            parameters = [self._named[i][1] for i in members]
            contiguous = [False] * len(parameters)
            bucket = Bucket(parameters, contiguous, runtime.name("deltas", None, group))
            self._buckets.append((bucket, parameters))
        self._runtime = runtime

    def _task(self, backend: Backend, group: Group, bucket: Bucket) -> Task:
        deltas = bucket.gradients
        compressed, context = self._compression.compress(deltas)
        flat = compressed.cpu()
        if flat.dtype not in ADASUM_DTYPES:
            flat = flat.float()

        def finish() -> Any:
            if compressed is not flat:
                compressed.copy_(flat)
            if compressed is not deltas:
                deltas.copy_(self._compression.decompress(compressed, context))

        return _combine(backend, group, bucket.name, flat, bucket.sizes, finish)


def _combine(
    backend: Backend,
    group: Group,
    name: str,
    flat: torch.Tensor,
    sizes: Sequence[int],
    finish: Callable[[], Any],
) -> Task:
    """The task that combines changes laid end to end in ``flat``, on the CPU."""
    native = native_adasum(backend, group)
    terms = {"dtype": str(flat.dtype).removeprefix("torch."), "sizes": list(sizes)}

    def start(peers: Peers | None) -> Work:
        if native:
            return reduce_flats(list(flat.split(sizes)), ReduceOp.ADASUM, backend, group, name)
        adasum_(flat, sizes, backend, group)
        return Completed()

    return Task(start, finish, Proposal("deltas", name, terms), native, flat.numel())


def _stand_in(runtime: Runtime, group: Group, proposal: Proposal) -> Task:
    """No change at all, from a rank that has joined."""
    sizes = proposal.terms["sizes"]
    flat = torch.zeros(sum(sizes), dtype=getattr(torch, proposal.terms["dtype"]), device="cpu")
    return _combine(runtime.backend, group, proposal.name, flat, sizes, lambda: None)


STAND_INS["deltas"] = _stand_in
