"""The reductions a user chooses from, and what Horovod's deprecated ``average=`` means."""

from __future__ import annotations

import enum
import warnings
from typing import Any

from unidist.backends.base import ReduceOp


class Reduction(enum.IntEnum):
    """How a collective combines the ranks' values; the members are exported by name.

    They are integers, and these integers, since Horovod's are.
    """

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    def __repr__(self) -> str:
        return f"unidist.{self.label}"

    @property
    def label(self) -> str:
        """The name a user knows it by."""
        return self.name.capitalize()

    @property
    def native(self) -> ReduceOp:
        """What the backend does: an average is a sum, divided above the backend."""
        return ReduceOp.SUM if self is Reduction.AVERAGE else ReduceOp(self.label)


Average = Reduction.AVERAGE
Sum = Reduction.SUM
Adasum = Reduction.ADASUM
Min = Reduction.MIN
Max = Reduction.MAX
Product = Reduction.PRODUCT


def as_reduction(op: Any, operation: str) -> Reduction:
    """Return the reduction that ``op`` is, or is the integer of.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(op, Reduction):
        return op
    if type(op) is int and op in list(Reduction):
        return Reduction(op)
    raise ValueError(
        f"{operation} got op={op!r}; choose one of {', '.join(one.label for one in Reduction)} "
        "of this package."
    )


def resolve(op: Reduction | None, average: bool | None, operation: str) -> Reduction:
    """Return the reduction that ``op`` and the deprecated ``average`` ask for."""
    if average is not None:
        if op is not None:
            raise ValueError(
                f"{operation} got both op={op!r} and average={average}. The op parameter "
                "supersedes average: pass op alone."
            )
        warnings.warn(
            f"{operation}: the parameter average is deprecated, use op=Average or op=Sum instead.",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if op is None:
        return Average
    return as_reduction(op, operation)
