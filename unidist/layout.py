"""Any tensor to the flat contiguous tensor that a backend takes, and back.

A ``Wire`` holds that flat tensor. Elements travel in logical (row-major) order, whatever strides
each rank's tensor has, so a channels_last tensor on one rank meets a contiguous one on another.
A contiguous tensor that is worked on in place is its own wire: nothing is copied.

What a backend's native call does not take is widened here, once for all of them:

    bool                     → uint8: Sum and Max are "or", Min and Product are "and"
    complex                  → its real view (Sum and Average only)
    int8, uint8, int16       → int32, where not native; the result wraps as in the narrow type
    bfloat16, float16        → float32, where not native; one rounding, at the end
    anything (moving only)   → uint8
"""

from __future__ import annotations

import math

import torch

from unidist.backends.base import ReduceOp

_WIDER = {
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}

#: integers whose sum over many ranks easily leaves their range
NARROW_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16})

_SUPPORTED = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


def check_tensor(tensor: object, operation: str, in_place: bool = False) -> torch.Tensor:
    """Return ``tensor`` when a collective can carry it; else say what is wrong with it.

    Raises:
        TypeError: not a tensor.
        ValueError: a kind or dtype that no engine carries, or a result that cannot be written
            in place because elements of the tensor share memory.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{operation} takes a torch.Tensor, but got {type(tensor).__name__}. Wrap numbers with "
            "torch.tensor(...); send other objects with broadcast_object or allgather_object."
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{operation} takes dense tensors, but got one with layout {tensor.layout}. Use "
            "tensor.to_dense(), or sparse_as_dense=True in DistributedOptimizer."
        )
    if tensor.dtype not in _SUPPORTED or tensor.is_quantized:
        raise ValueError(
            f"{operation} does not support tensors of type {tensor.dtype}. Supported are "
            f"{', '.join(sorted(str(d).removeprefix('torch.') for d in _SUPPORTED))}."
        )
    if tensor.is_meta:
        raise ValueError(f"{operation} got a tensor on the meta device, which has no data.")
    if in_place and _overlaps(tensor):
        raise ValueError(
            f"{operation} cannot write in place to a tensor of shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()}: its elements share memory (an expanded tensor). Pass "
            "tensor.contiguous(), or use the form that returns a new tensor."
        )
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def check_reduction(tensor: torch.Tensor, op: ReduceOp, average: bool, operation: str) -> None:
    """Raise ValueError when the reduction has no meaning for the tensor's dtype."""
    if tensor.is_complex() and op is not ReduceOp.SUM:
        raise ValueError(
            f"{operation}: {op.value} has no meaning for complex numbers ({tensor.dtype}); use Sum "
            "or Average, or reduce torch.view_as_real(tensor)."
        )
    if tensor.dtype == torch.bool and average:
        raise ValueError(
            f"{operation}: Average has no meaning for bool. Use Max for 'any', Min for 'all', or "
            "convert to a numeric type."
        )
    if op is ReduceOp.ADASUM and tensor.dtype not in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ):
        raise ValueError(
            f"{operation}: Adasum is defined for floating-point tensors, but got {tensor.dtype}."
        )


def row_elements(tensor: torch.Tensor) -> int:
    """Real numbers in one row (one index of the first dimension) of a tensor."""
    return math.prod(tensor.shape[1:]) * (2 if tensor.is_complex() else 1)


class Wire:
    """A tensor's elements as the flat tensor that a backend reduces or moves.

    Args:
        tensor: the caller's tensor, any layout.
        in_place: whether the result goes back to ``tensor``; else ``result`` returns a new one.
        device: where the backend wants the wire; None leaves it on the tensor's device.
    """

    def __init__(
        self, tensor: torch.Tensor, in_place: bool, device: torch.device | None = None
    ) -> None:
        self._tensor = tensor.detach()
        self._in_place = in_place
        source = self._tensor.resolve_conj().resolve_neg()
        if source.is_complex():
            source = torch.view_as_real(source.contiguous())
        elif source.dtype == torch.bool:
            source = source.contiguous().view(torch.uint8)
        source = source.contiguous()
        if device is not None and source.device != device:
            source = source.to(device)
        aliases = source.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if aliases and not in_place and source.numel():
            source = source.clone()
            aliases = False
        self._source = source  # has the caller's dtype (or its real or byte view)
        self._aliases = aliases
        # A contiguous tensor of one element may have any strides; a wire's is 1.
        self.flat = source.as_strided((source.numel(),), (1,))

    def widen(self, native: frozenset[torch.dtype]) -> None:
        """Make ``flat`` a dtype that the backend reduces."""
        dtype = self.flat.dtype
        if dtype not in native:
            self.flat = self.flat.to(_WIDER[dtype])

    def moved(self, native: frozenset[torch.dtype]) -> torch.Tensor:
        """The flat tensor as a dtype that the backend moves; shares memory with ``flat``."""
        return self.flat if self.flat.dtype in native else self.flat.view(torch.uint8)

    def result(self) -> torch.Tensor:
        """The caller's tensor, or a new one of its shape, dtype, device and memory format."""
        flat = self.flat
        if flat.dtype != self._source.dtype:
            self._source.view(-1).copy_(flat)
        if self._in_place:
            if not self._aliases:
                self._tensor.copy_(self._as_caller(self._source).view(self._tensor.shape))
            return self._tensor
        value = self._as_caller(self._source).view(self._tensor.shape)
        if value.device != self._tensor.device or not self._tensor.is_contiguous():
            output = torch.empty_like(self._tensor)  # keeps a dense tensor's memory format
            return output.copy_(value)
        return value

    def row_width(self, moved: torch.Tensor) -> int:
        """Elements of ``moved`` in one row of the caller's tensor."""
        width = row_elements(self._tensor)
        return width * self._source.element_size() // moved.element_size()

    def rows(self, moved: torch.Tensor) -> torch.Tensor:
        """``moved`` in the caller's shape, or as rows of bytes."""
        count = self._tensor.shape[0]
        if moved.dtype != self._source.dtype:
            return moved.view(count, self.row_width(moved))
        return moved.view(count, *self._trailing())

    def _trailing(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape[1:]) + ((2,) if self._tensor.is_complex() else ())

    def new_rows(self, moved: torch.Tensor, count: int) -> torch.Tensor:
        """A tensor like the caller's but of ``count`` rows, from elements that a backend gave."""
        dtype = self._source.dtype
        if moved.dtype != dtype:
            as_bytes = moved.dtype == torch.uint8 and dtype != torch.uint8
            moved = moved.view(-1).view(dtype) if as_bytes and moved.numel() else moved.to(dtype)
        value = self._as_caller(moved.view(count, *self._trailing()))
        value = value.to(self._tensor.device)
        for channels_last, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if (
                self._tensor.dim() == dimensions
                and not self._tensor.is_contiguous()
                and self._tensor.is_contiguous(memory_format=channels_last)
            ):
                value = value.contiguous(memory_format=channels_last)
        return value

    def _as_caller(self, source: torch.Tensor) -> torch.Tensor:
        if self._tensor.is_complex():
            return torch.view_as_complex(source)
        if self._tensor.dtype == torch.bool:
            return source.view(torch.bool)
        return source


def as_bool_op(op: ReduceOp) -> ReduceOp:
    """The reduction of 0/1 bytes that is the logical one."""
    return ReduceOp.MAX if op in (ReduceOp.SUM, ReduceOp.MAX) else ReduceOp.MIN


def scale_(flat: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are scaled in double and truncated, as Horovod does."""
    if factor == 1.0:
        return
    if flat.is_floating_point():
        flat.mul_(factor)
    else:
        flat.copy_(flat.to(torch.float64).mul_(factor).trunc_())


def divide_(flat: torch.Tensor, size: int) -> None:
    """Divide in place; integers are truncated towards zero, the rule of every engine here."""
    if size == 1:
        return
    if flat.is_floating_point():
        flat.div_(size)
    else:
        torch.div(flat, size, rounding_mode="trunc", out=flat)
