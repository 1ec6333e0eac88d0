"""The reductions a user chooses from, and what Horovod's deprecated ``average=`` means."""

from __future__ import annotations

import enum
import warnings

from unidist.backends.base import ReduceOp


class Reduction(enum.Enum):
    """How a collective combines the ranks' values; the members are exported by name."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"

    def __repr__(self) -> str:
        return f"unidist.{self.value}"

    @property
    def native(self) -> ReduceOp:
        """What the backend does: an average is a sum, divided above the backend."""
        return ReduceOp.SUM if self is Reduction.AVERAGE else ReduceOp(self.value)


Average = Reduction.AVERAGE
Sum = Reduction.SUM
Adasum = Reduction.ADASUM
Min = Reduction.MIN
Max = Reduction.MAX
Product = Reduction.PRODUCT


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
    if not isinstance(op, Reduction):
        raise ValueError(
            f"{operation} got op={op!r}; choose one of {', '.join(m.value for m in Reduction)} "
            "of this package."
        )
    return op
