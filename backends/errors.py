"""The errors this library raises on its own account.

::

    RuntimeError
     ├── HorovodInternalError     a collective failed: peers disagree, or are gone
     │    ├── StallError          peers have not come within the time limit
     │    └── ArgumentError       (a ValueError, too) what Horovod's engine refuses, not its Python
     ├── HostsUpdatedInterrupt    no failure: elastic training has to give way to a change of hosts
     └── LaunchError              the launcher's world and the engine's world differ, or the
                                  engine cannot run under this launcher
    ImportError
     └── BackendUnavailable       the engine's library is not installed, or is broken

What the caller got wrong in one process (a bad argument, an operation before ``init``) is a
ValueError or TypeError, as in Horovod.
"""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective operation failed on this rank; the message says which, and why."""


class StallError(HorovodInternalError):
    """Peers have not called the same operation within the time limit; the message names them."""


class ArgumentError(HorovodInternalError, ValueError):
    """A bad argument that Horovod finds in its engine, and reports as an internal error."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed: elastic training leaves its function, and calls it again.

    Args:
        skip_sync: whether the ranks that go on agree already.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class LaunchError(RuntimeError):
    """The launcher and the engine do not fit together; the message says what to run instead."""


class BackendUnavailable(ImportError):
    """The library under a backend cannot be imported; the message says what to install."""
