"""The matrix: every check on every engine at every world size, each one a test of its own.

Starting torch on four ranks takes seconds, so all selected checks of one (engine, size) run in
one launch (``run_checks.py``), which starts when the first of its tests asks for the results::

    pytest tests/test_checks.py --engine mpi --world 3 -k adasum

``UNIDIST_CHECK_MODULE=horovod.torch`` runs the checks against Horovod itself, on the engines
that are Horovod: a way to test the checks while developing them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import harness
import pytest
import torch.distributed as dist
from checks import CHECKS
from conftest import need
from run_checks import OK, UNUSABLE

MODULE = os.environ.get("UNIDIST_CHECK_MODULE", "unidist")

# A check that makes the engine unusable ends its launch. The checks behind it get another launch,
# this many times, so that one fault does not hide what else is wrong.
_LAUNCHES = 4

CELLS = [(engine.name, size) for engine in harness.ENGINES.values() for size in engine.sizes]
CASES = [
    (engine, size, check.name)
    for engine, size in CELLS
    for check in CHECKS.values()
    if check.runs_at(size) and harness.ENGINES[engine].runs(check.topic, size)
]


@dataclass
class Cell:
    """The outcome of one (engine, size): a text for each check, and how the launches ended."""

    outcomes: dict[str, str] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class Matrix:
    """Runs each cell once, when it is first asked for."""

    def __init__(self, selected: dict[tuple[str, int], list[str]]) -> None:
        self._selected = selected
        self._cells: dict[tuple[str, int], Cell] = {}

    def cell(self, engine: str, size: int) -> Cell:
        key = engine, size
        if key not in self._cells:
            self._cells[key] = _run_cell(engine, size, self._selected.get(key, []))
        return self._cells[key]


def _run_cell(engine: str, size: int, names: list[str]) -> Cell:
    cell = Cell()
    waiting = list(names)
    for _ in range(_LAUNCHES):
        done, result = _run_launch(engine, size, waiting, cell)
        if result.returncode == 0 and not result.left:
            noise = [line for line in result.text.splitlines() if "warning" in line.lower()]
            if noise:
                cell.ends.append("a clean launch printed warnings:\n" + "\n".join(noise))
            return cell
        if result.left or result.returncode != UNUSABLE or not done:
            cell.ends.append(result.report())
        waiting = [name for name in waiting if name not in done]
        if not waiting or not done:
            break
    last = next((name for name in reversed(names) if name in cell.outcomes), "the launch")
    for name in waiting:
        cell.outcomes[name] = f"not run: {last} failed before (see test_launch)"
    return cell


def _run_launch(
    engine: str, size: int, names: list[str], cell: Cell
) -> tuple[list[str], harness.Result]:
    """One launch; files the outcomes in ``cell``. Returns the checks that were begun."""
    row = harness.ENGINES[engine]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("launch/checks", " ".join(names))
    result = harness.launch(
        row.launcher,
        size,
        [harness.REPOSITORY / "tests" / "run_checks.py", f"127.0.0.1:{store.port}", MODULE],
        environment={"UNIDIST_TEST_BACKEND": row.backend},
        timeout=120 + 4 * len(names),
        check=False,
    )

    def told(key: str) -> str | None:
        name = f"launch/{key}"
        return store.get(name).decode() if store.check([name]) else None

    connected = [told(f"connected/{rank}") for rank in range(size)]
    if any(one != OK for one in connected):
        for rank, one in enumerate(connected):
            cell.ends.append(f"init on rank {rank}: {one or 'no answer'}")
        return [], result

    done = []
    broken = False
    for name in names:
        outcomes = [told(f"{name}/{rank}") for rank in range(size)]
        if broken or not any(outcomes):
            # When ranks died without a word it was in the first check that has no outcome.
            died = not broken and not any(outcomes) and result.returncode not in (0, UNUSABLE)
            if not died:
                broken = True
                continue
        done.append(name)
        took = [told(f"{name}/{rank}/seconds") for rank in range(size)]
        cell.seconds[name] = max((float(one) for one in took if one), default=0.0)
        if all(one == OK for one in outcomes):
            cell.outcomes[name] = OK
            continue
        parts = []
        for rank, one in enumerate(outcomes):
            if one is None:
                parts.append(f"rank {rank} of {size}: no answer (stuck, killed or dead)")
            elif one != OK:
                parts.append(f"rank {rank} of {size}: {one.rstrip()}")
        if None in outcomes:
            parts.append(result.report())
            broken = True
        cell.outcomes[name] = "\n".join(parts)
    return done, result


def _need(engine: str) -> None:
    if MODULE == "unidist":
        need(engine)


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    selected: dict[tuple[str, int], list[str]] = {}
    for item in request.session.items:
        if getattr(item, "originalname", "") == "test_check":
            parameters = item.callspec.params  # type: ignore[attr-defined]
            key = parameters["engine"], parameters["size"]
            selected.setdefault(key, []).append(parameters["check"])
    matrix = Matrix(selected)
    yield matrix
    if request.config.get_verbosity() > 0:
        for (engine, size), cell in matrix._cells.items():
            slow = sorted(cell.seconds.items(), key=lambda pair: -pair[1])[:12]
            total = sum(cell.seconds.values())
            shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in slow)
            print(f"\n{engine}-{size}: {total:.1f} s in checks; slowest {shown}")


@pytest.mark.parametrize(
    ("engine", "size", "check"), CASES, ids=[f"{e}-{s}-{c}" for e, s, c in CASES]
)
def test_check(matrix: Matrix, engine: str, size: int, check: str) -> None:
    _need(engine)
    outcome = matrix.cell(engine, size).outcomes.get(check, "not run: the launch did not begin")
    if outcome != OK:
        pytest.fail(outcome, pytrace=False)


@pytest.mark.parametrize(("engine", "size"), CELLS, ids=[f"{e}-{s}" for e, s in CELLS])
def test_launch(matrix: Matrix, engine: str, size: int) -> None:
    """The launch itself: all ranks connected, ended with status 0, quietly, and none was left."""
    _need(engine)
    cell = matrix.cell(engine, size)
    if cell.ends:
        pytest.fail("\n".join(cell.ends), pytrace=False)
