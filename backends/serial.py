"""The engine of a world of one: every collective is already done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from unidist.backends.base import (
    REAL_DTYPES,
    Backend,
    Capability,
    Completed,
    Group,
    ReduceOp,
    Work,
)
from unidist.backends.errors import LaunchError

if TYPE_CHECKING:
    from unidist.launch import Launch


class SerialBackend(Backend):
    """One process, no library. Results are those of N ranks with N = 1."""

    name = "serial"
    capabilities = frozenset({Capability.CUDA})
    reduce_dtypes = move_dtypes = REAL_DTYPES

    def init(self, launch: Launch, timeout: float, comm: Any = None) -> None:
        if launch.size != 1:
            raise LaunchError(
                f"The serial backend is a world of one, but {launch.launcher} started "
                f"{launch.size} processes ({launch.source}). Leave out backend='serial' and "
                "UNIDIST_BACKEND to take the launcher's own, or start the script with plain python."
            )
        self.world = Group((0,), 0)

    def shutdown(self) -> None:
        return None

    def new_group(self, ranks: Sequence[int]) -> Group:
        return Group(tuple(ranks), 0 if 0 in ranks else None)

    def free_group(self, group: Group) -> None:
        return None

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, group: Group, name: str) -> Work:
        return Completed()

    def broadcast(self, tensor: torch.Tensor, root: int, group: Group, name: str) -> Work:
        return Completed()

    def allgather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        group: Group,
        name: str,
    ) -> Work:
        output.copy_(tensor)
        return Completed()

    def barrier(self, group: Group) -> Work:
        return Completed()

    def exchange(self, payload: bytes, group: Group, name: str = "control") -> list[bytes]:
        return [payload]

    def send(self, tensor: torch.Tensor, dst: int, group: Group) -> Work:
        raise ValueError("A world of one has no other rank to send to.")

    def recv(self, tensor: torch.Tensor, src: int, group: Group) -> Work:
        raise ValueError("A world of one has no other rank to receive from.")
