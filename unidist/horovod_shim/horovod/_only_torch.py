"""The answer to an import of what Horovod has for other frameworks."""

from __future__ import annotations

from typing import NoReturn


def refuse(name: str) -> NoReturn:
    raise ImportError(
        f"{name} was imported in a run of `python -m unidist.horovod`, but only horovod.torch is "
        "offered there: unidist is for PyTorch. Run this script without it, on Horovod itself.",
        name=name,
    )
