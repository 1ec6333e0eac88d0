"""What a tensor is reduced as: itself, or half precision. Same interface as Horovod's."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Turns a tensor into what travels, and back. Subclass it for a compression of your own.

    ``DistributedOptimizer`` compresses a whole flat bucket of gradients of one dtype at a time.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to reduce, and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in its original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves the tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Casts floating-point tensors to float16; integers pass through.

    An average is divided before the cast instead of after the sum, so that it cannot overflow
    where the values themselves do not. Values below size·6e-8 lose precision for it.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype.is_floating_point and tensor.dtype != torch.float16:
            return tensor.to(torch.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


def compression_name(compression: Any) -> str:
    """The name of a compressor, which may be a class or an object."""
    return str(getattr(compression, "__name__", type(compression).__name__))


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
