"""What every rank runs: plain functions ``check_*(hvd)`` that know no backend.

Each takes the module under test, works at every world size that it does not rule out with
:func:`world`, and can be run twice in a row on one connection (most are, at world size 2).
Expected values are written out from rank and size; helpers are in ``support.py``.
``run_checks.py`` is the program around them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from checks.support import world_rule

#: in the order in which they run; the last two disconnect and connect again
TOPICS = (
    "allreduce",
    "gather_broadcast",
    "functions",
    "adasum",
    "optimizer",
    "optimizer_sparse",
    "optimizer_wrapping",
    "optimizer_adasum",
    "process_sets",
    "negotiation",
    "join",
    "properties",
    "regressions",
    "reported_faults",
    "horovod_api",
    "horovod_api_gradients",
    "horovod_api_errors",
    "horovod_api_training",
    "horovod_api_sets",
    "sync_batch_norm",
    "timeline",
    "elastic",
    "basics",
)


# Topics that more ranks add nothing to. Wrapping is about one process' objects; what was wrong once
# is tested where it was, and at an odd number of ranks, as is what only moves data.
_TOPIC_WORLDS = {
    "elastic": (1, 2),
    "functions": (1, 2, 3),
    "gather_broadcast": (1, 2, 3),
    "horovod_api": (2, 4),
    "horovod_api_gradients": (2,),
    "horovod_api_errors": (2,),
    "horovod_api_training": (2,),
    "horovod_api_sets": (2, 4),
    "join": (1, 2, 3),
    "negotiation": (2, 3),
    "properties": (2, 3),
    "optimizer_sparse": (1, 2, 3),
    "optimizer_wrapping": (1, 2),
    "regressions": (1, 2, 3),
    "sync_batch_norm": (1, 2, 3),
    "timeline": (1, 2),
}


#: topics whose checks run twice in a row at world size 2, on what the first run left behind
TWICE = (
    "allreduce",
    "gather_broadcast",
    "functions",
    "adasum",
    "optimizer",
    "optimizer_sparse",
    "optimizer_adasum",
    "process_sets",
    "join",
    "basics",
)


@dataclass(frozen=True)
class Check:
    """One check: ``topic.name`` and the function."""

    name: str
    topic: str
    function: Callable[[Any], None]

    def runs_at(self, size: int) -> bool:
        rules = (world_rule(self.function), _TOPIC_WORLDS.get(self.topic))
        return all(rule is None or size in rule for rule in rules)


def _load() -> dict[str, Check]:
    found = {}
    for topic in TOPICS:
        module: ModuleType = importlib.import_module(f"checks.{topic}")
        for attribute, function in vars(module).items():
            if attribute.startswith("check_"):
                name = f"{topic}.{attribute.removeprefix('check_')}"
                found[name] = Check(name, topic, function)
    return found


CHECKS = _load()
