from __future__ import annotations

from unidist.backends.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    return (
        f"Framework {name} installed with version {installed_version} but found version {version}."
    )


class HorovodVersionMismatchError(ImportError):
    """Never raised here: nothing is built for one version of PyTorch."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
