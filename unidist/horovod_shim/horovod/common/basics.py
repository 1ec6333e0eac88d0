from __future__ import annotations

from typing import Any

from unidist import mpi_ops


class HorovodBasics:
    """Horovod's object around its library; its methods and constants are those of unidist."""

    def __init__(self, pkg_path: str | None = None, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(mpi_ops, name)
