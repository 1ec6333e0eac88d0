"""Options and fixtures of all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("unidist")
    group.addoption(
        "--engine",
        action="append",
        metavar="NAME",
        help=f"run the checks on this engine only (repeatable): {', '.join(harness.ENGINES)}",
    )
    group.addoption(
        "--world",
        action="append",
        type=int,
        metavar="N",
        help="run the checks at this world size only (repeatable)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    engines, worlds = config.getoption("--engine"), config.getoption("--world")
    for name in engines or ():
        if name not in harness.ENGINES:
            raise pytest.UsageError(f"no engine {name!r}: choose from {', '.join(harness.ENGINES)}")

    def kept(item: pytest.Item) -> bool:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if engines and parameters.get("engine", engines[0]) not in engines:
            return False
        return not (worlds and parameters.get("size", worlds[0]) not in worlds)

    dropped = [item for item in items if not kept(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if kept(item)]


def need(engine: str) -> None:
    """Skip when the engine is missing here; fail when every engine has to be there."""
    reason = harness.available(engine)
    if reason is None:
        return
    if os.environ.get(harness.REQUIRE_ALL, "") not in ("", "0"):
        pytest.fail(f"{harness.REQUIRE_ALL} is set, but {reason}", pytrace=False)
    pytest.skip(reason)
