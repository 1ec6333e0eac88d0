"""Horovod 0.28.1: ``init`` after ``shutdown`` under ``horovodrun --gloo`` aborted now and then.

Symptom: "gloo::IoException ... connect ...: Connection refused" on all ranks. Cause: the store in
``horovodrun`` kept the addresses of the first ``init`` (see backends/horovod_rendezvous.py).
"""

from __future__ import annotations

import http.client
from types import SimpleNamespace

import pytest
from conftest import need

from unidist.backends.horovod_rendezvous import clear_rendezvous

SCOPES = ("global", "local_here", "cross_0", "cross_1")


def test_no_address_is_left_after_init(monkeypatch: pytest.MonkeyPatch) -> None:
    need("horovod-gloo")
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init([SlotInfo("here", rank, rank, 0, 2, 2, 1) for rank in (0, 1)])
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    monkeypatch.setenv("HOROVOD_HOSTNAME", "here")

    def ask(method: str, scope: str, key: int, body: bytes | None = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, f"/{scope}/{key}", body)
        status = connection.getresponse().status
        connection.close()
        return status

    try:
        for scope, ranks in zip(SCOPES, ((0, 1), (0, 1), (0,), (0,)), strict=True):
            for rank in ranks:
                assert ask("PUT", scope, rank, b"an address") == 200
        for scope, rank in (
            ("global", 0),
            ("global", 1),
            ("local_here", 0),
            ("cross_0", 0),  # rank 0 is quick: the store forgets that it was done on its host
            ("local_here", 1),
            ("cross_1", 0),
        ):
            ask("DELETE", scope, rank)
        assert ask("GET", "local_here", 1) == 200, "the defect is gone, and so may be the remedy"
        for rank in (0, 1):
            hvd = SimpleNamespace(
                rank=lambda rank=rank: rank,
                local_rank=lambda rank=rank: rank,
                cross_rank=lambda: 0,
                size=lambda: 2,
                local_size=lambda: 2,
                cross_size=lambda: 1,
            )
            clear_rendezvous(hvd)
        assert [ask("GET", scope, key) for scope in SCOPES for key in (0, 1)] == [404] * 8
    finally:
        server.stop()
