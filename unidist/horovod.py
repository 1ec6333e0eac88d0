"""``python -m unidist.horovod train.py``: run an unmodified Horovod script on unidist.

This process becomes ``python train.py``, with one difference: PYTHONPATH begins with the folder
``horovod_shim`` beside this file. The package ``horovod`` in it is what the script imports, and
what it offers is unidist's. Since the program is replaced, nothing of this runner is left in the
script's process: ``__main__``, ``sys.argv``, ``sys.path[0]``, tracebacks and exit codes are those
of a direct run. Processes that the script starts inherit PYTHONPATH, so they import the same.
"""

from __future__ import annotations

import os
import sys

NAME = "unidist.horovod"
SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "horovod_shim")

USAGE = """\
usage: python -m unidist.horovod SCRIPT [ARGUMENT ...]
       python -m unidist.horovod -m MODULE [ARGUMENT ...]

Runs a script that was written for Horovod (import horovod.torch as hvd) on unidist, unmodified.
What follows the module's name is what would follow `python`. Under a launcher:

    torchrun --nproc_per_node 2 -m unidist.horovod train.py
    mpirun -n 2 python -m unidist.horovod train.py
    horovodrun -np 2 python -m unidist.horovod train.py

UNIDIST_BACKEND=torch|horovod|mpi chooses another engine than the launcher's own.
"""


def _interpreter_options() -> list[str] | None:
    """What stood between ``python`` and ``-m unidist.horovod``; None: this is no such run."""
    head = sys.orig_argv[1 : len(sys.orig_argv) - (len(sys.argv) - 1)]
    # `-m NAME` as two words or as one, and perhaps behind other letters: `-um NAME`.
    if len(head) > 1 and head[-1] == NAME and head[-2].endswith("m"):
        options, letters = head[:-2], head[-2][:-1]
    elif head and head[-1].endswith(f"m{NAME}"):
        options, letters = head[:-1], head[-1].removesuffix(f"m{NAME}")
    else:
        return None
    if not letters.startswith("-") or letters.startswith("--"):
        return None
    return options if letters == "-" else [*options, letters]


def replace_process() -> None:
    """Become the script, when this process was started as ``python -m unidist.horovod``."""
    options = _interpreter_options()
    if options is None:
        return
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(USAGE, end="", file=sys.stdout if command else sys.stderr)
        raise SystemExit(0 if command else 2)
    if sys.flags.ignore_environment:
        raise SystemExit(
            f"{NAME}: python was started with -E or -I and ignores PYTHONPATH, by which the script "
            "would find unidist as horovod. Start it without."
        )
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    entries = [SHIM, *(entry for entry in others if entry != SHIM)]
    os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *options, *command])


if __name__ == "__main__":  # where unidist had been imported before, by a .pth file for one
    replace_process()
