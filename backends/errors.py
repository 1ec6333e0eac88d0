"""The errors this library raises on its own account.

::

    RuntimeError
     ├── HorovodInternalError     a collective failed: peers disagree, are late, or are gone
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


class LaunchError(RuntimeError):
    """The launcher and the engine do not fit together; the message says what to run instead."""


class BackendUnavailable(ImportError):
    """The library under a backend cannot be imported; the message says what to install."""
