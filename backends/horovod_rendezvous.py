"""Clears the meeting point of ``horovodrun``, so that a second ``init`` finds no old addresses.

Ranks tell each other their addresses through a store in ``horovodrun``: one scope for the world,
one for each host, one for each local rank. The store empties a scope when all its ranks have said
that they are connected, and then forgets what the ranks of *other* scopes have said so far. Such a
scope keeps its addresses: in the next ``init`` a rank that is ahead of its peer reads the peer's
old one, and aborts ("connect ...: Connection refused"). Horovod 0.28.1 alone shows it after a few
turns of ``init`` and ``shutdown``.
"""

from __future__ import annotations

import http.client
import os
from contextlib import suppress
from typing import Any

_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


def clear_rendezvous(hvd: Any) -> None:
    """Empty the scopes of which this rank is the first. All ranks are connected by now.

    No rank may be in its next ``init`` before the others have returned from here.
    """
    if not os.environ.get(_ADDRESS) or os.environ.get("HOROVOD_ELASTIC") == "1":
        return
    host = os.environ.get("HOROVOD_HOSTNAME", "localhost")
    for scope, rank, size in (
        ("global", hvd.rank(), hvd.size()),
        (f"local_{host}", hvd.local_rank(), hvd.local_size()),
        (f"cross_{hvd.local_rank()}", hvd.cross_rank(), hvd.cross_size()),
    ):
        if rank == 0:
            # A store that does not answer has ended with its job.
            with suppress(OSError, http.client.HTTPException):
                _clear(scope, size)


def _clear(scope: str, size: int) -> None:
    """Say "connected" until the store believes that all ranks of the scope have."""
    for _ in range(size):
        if _ask("GET", scope) != 200:
            return
        _ask("DELETE", scope)


def _ask(method: str, scope: str) -> int:
    connection = http.client.HTTPConnection(
        os.environ[_ADDRESS], int(os.environ[_PORT]), timeout=10
    )
    try:
        connection.request(method, f"/{scope}/0")
        return connection.getresponse().status
    finally:
        connection.close()
