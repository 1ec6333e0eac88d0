"""Tells the states in use that hosts have come or are to go."""

from __future__ import annotations

import enum
import threading
from typing import Protocol


class HostUpdateResult(enum.IntFlag):
    """How the set of hosts has changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class Listener(Protocol):
    """What is told: a State."""

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None: ...


class NotificationManager:
    """Passes each notice on to the states whose function is running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def init(self) -> None:
        """Nothing sends notices yet: the launchers keep the world as it is."""

    def register_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        with self._lock:
            # By identity: states may compare equal.
            self._listeners = [one for one in self._listeners if one is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Tell all of them; may be called from any thread."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


#: the one that ``run`` uses
notification_manager = NotificationManager()
