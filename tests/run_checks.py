"""The program that every rank of one launch runs: one check after another, agreeing in between.

At world size 2 most checks run twice in a row, on what their first run left behind. At others they
run once: what a second run finds does not depend on the size.

Ranks agree through a store in the parent process, not through the library under test: after
each check every rank tells how it went and hears how the others fared. When a check failed
somewhere, the ranks try one small all-reduce; if that does not work either, the engine is
unusable and the launch ends here (:data:`UNUSABLE`), with the rest of the checks not run.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checks import CHECKS, TWICE, support

#: exit status of a launch that ended early since the engine could not be used any more
UNUSABLE = 70

#: a check that takes longer than this prints all stacks and ends its process
CHECK_SECONDS = 60.0

OK = "ok"


def turns(topic: str, size: int) -> tuple[str, ...]:
    """The names of a check's runs at this world size."""
    return ("first", "second") if size == 2 and topic in TWICE else ("only",)


def _attempt(function: Any, *arguments: Any) -> str:
    """Run it; ``"ok"`` or the traceback."""
    try:
        function(*arguments)
    except BaseException:  # SystemExit too: nothing may leave the loop on one rank alone
        return traceback.format_exc()
    return OK


def _probe(hvd: Any, index: int) -> None:
    """One all-reduce under a name nobody used: do the ranks still understand each other?"""
    got = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name=f"probe.{index}")
    want = hvd.size() * (hvd.size() + 1) / 2
    assert got.item() == want, f"the probe gave {got.item()}, want {want}"


def main() -> None:
    address, module = sys.argv[1:]
    rank = int(os.environ["UNIDIST_TEST_RANK"])
    size = int(os.environ["UNIDIST_TEST_SIZE"])
    torch.set_num_threads(1)
    channel = support.channel = support.Channel(address, rank, size)

    faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
    hvd = importlib.import_module(module)
    outcome = _attempt(support.connect, hvd)
    channel.use("launch")
    names = channel.hear("checks").split()
    if any(one != OK for one in channel.everyone("connected", outcome, CHECK_SECONDS)):
        _leave()

    for index, name in enumerate(names):
        faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
        check = CHECKS[name]
        started = time.monotonic()
        for turn in turns(check.topic, size):
            channel.use(f"{name}/{turn}")
            outcome = _attempt(check.function, hvd)
            if outcome != OK:
                outcome = f"(in the {turn} run)\n{outcome}"
                channel.use("launch")
                channel.tell(f"{name}/{rank}", outcome)
                channel.use(f"{name}/{turn}")
            # After each turn: nobody may start the second while another is in the first.
            outcomes = channel.everyone("outcome", outcome, CHECK_SECONDS)
            if any(one != OK for one in outcomes):
                break
        channel.use("launch")
        channel.tell(f"{name}/{rank}/seconds", f"{time.monotonic() - started:.3f}")
        channel.tell(f"{name}/{rank}", outcome)
        if all(one == OK for one in outcomes):
            continue
        channel.use(f"{name}/probe")
        outcome = _attempt(_probe, hvd, index)
        if any(one != OK for one in channel.everyone("outcome", outcome, CHECK_SECONDS)):
            _leave()

    faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
    hvd.shutdown()
    faulthandler.cancel_dump_traceback_later()


def _leave() -> None:
    # A normal exit would wait for peers that do not answer.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(UNUSABLE)


if __name__ == "__main__":
    main()
