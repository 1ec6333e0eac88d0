"""The engines. One table names them; a module is imported when its engine is first asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from unidist.backends.base import Backend
from unidist.backends.errors import BackendUnavailable

__all__ = ["BACKENDS", "BackendEntry", "create"]


@dataclass(frozen=True)
class BackendEntry:
    """Where an engine lives, and what a user installs to have it."""

    module: str
    class_name: str
    needs: str
    install: str


BACKENDS: dict[str, BackendEntry] = {
    "serial": BackendEntry("unidist.backends.serial", "SerialBackend", "nothing", ""),
    "torch": BackendEntry(
        "unidist.backends.torch_backend",
        "TorchBackend",
        "torch built with torch.distributed",
        "pip install torch",
    ),
    "horovod": BackendEntry(
        "unidist.backends.horovod_backend",
        "HorovodBackend",
        "Horovod 0.28.1 built for this torch",
        "pip install 'unidist-torch[horovod,mpi]' && unidist build-horovod",
    ),
    "mpi": BackendEntry(
        "unidist.backends.mpi_backend",
        "MpiBackend",
        "mpi4py and an MPI library",
        "pip install mpi4py mpich",
    ),
}


def create(name: str) -> Backend:
    """Return a new, not yet connected backend.

    Raises:
        ValueError: no engine has this name.
        BackendUnavailable: its library cannot be imported; says what to install.
    """
    entry = BACKENDS.get(name)
    if entry is None:
        raise ValueError(
            f"Unknown backend {name!r}: choose one of {', '.join(BACKENDS)} "
            "(argument of init, or the environment variable UNIDIST_BACKEND)."
        )
    try:
        module = importlib.import_module(entry.module)
    except BackendUnavailable:
        raise
    except ImportError as error:
        raise BackendUnavailable(
            f"The {name!r} backend was asked for, but its library cannot be imported "
            f"({type(error).__name__}: {error}). It needs {entry.needs}: {entry.install}"
        ) from error
    backend: Backend = getattr(module, entry.class_name)()
    return backend
