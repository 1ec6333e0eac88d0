"""Batch normalization with the statistics of all ranks' batches, as if one process had them all.

One gather in forward, one reduction in backward ::

    forward    each rank: count n, mean, M2 = Σ(x - mean)² of every channel ── allgather ──►
               joined n, mean, M2 ─ normalize with them, update the running statistics
    backward   each rank: Σ dy and Σ dy·x̂ of every channel ── allreduce ──► gradient of the input

Means and squared distances from them are combined (Chan, Golub & LeVeque), never sums of squares,
which cancel where a mean is large beside its deviation. All ranks combine the same rows in the same
order, and so hold identical bits.

What normalizes is torch's own kernel for given statistics, and its gradient, which exist on every
device. What torch's and Horovod's classes are built on is private, for CUDA alone, and has changed.

Names. Layers are numbered in the order in which they were made, so that those of a model go by the
same numbers on all ranks, in whatever order (of threads, of devices) they run. Calls of one layer
meet in the order in which they are made, which needs no number: that holds for a layer that is used
twice, and for one that a checkpoint calls again. Their gradients may come in another order, or for
some of the calls only: so the ranks agree, in the gather, on a number for the call, which its
reduction has in its name.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from unidist import basics
from unidist.movement import allgather
from unidist.ops import allreduce
from unidist.reduction import Sum

_numbers = itertools.count()

#: float32 holds whole numbers below this exactly: a count of elements travels as two of them
_DIGIT = 2**20

#: Calls of a layer whose gradients are still to come are told apart up to this number. Few, since
#: Horovod remembers what it has agreed on by name.
_CALLS = 8


class _Statistics(NamedTuple):
    """Of the joined batch, for each channel; computed in double precision."""

    mean: torch.Tensor
    squares: torch.Tensor  # the sum of squared distances from the mean
    size: int
    call: int


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm1d``, ``2d`` and ``3d`` over the joined batch of all ranks.

    Takes inputs of shape ``(N, C, ...)`` on any device; N may differ between ranks, and be 0. All
    ranks must call the layer in training, and run backward through it. In evaluation it uses the
    running statistics and does not communicate, unless ``track_running_stats`` is False: then it
    uses those of the joined batch there, too, as Horovod's does.

    Make the layers of a model in the same order on all ranks: the order gives them their names.

    Gradients of ``weight`` and ``bias`` are those of this rank's rows; ``DistributedOptimizer``
    reduces them as any others.

    Args:
        num_features: the number of channels C.
        eps: is added to the variance.
        momentum: the weight of a batch in the running statistics; None for their plain average.
        affine: whether to learn a weight and a bias for each channel.
        track_running_stats: whether to keep running statistics, for evaluation.

    Raises:
        ValueError: in training, before init; an input of less than two dimensions or another number
            of channels; one value per channel in the joined batch, on all ranks.
        HorovodInternalError: dtypes or channels differ between ranks, on all of them; a peer failed
            or came too late.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._number = next(_numbers)
        self._calls = 0

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features or not self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) takes inputs of shape (N, "
                f"{self.num_features}, ...) with at least one channel, but got "
                f"{tuple(input.shape)}."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch of shape ``(N, C, ...)``; the output has its shape and dtype."""
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not of_batch or basics.size() == 1:
            alone: torch.Tensor = super().forward(input)
            return alone
        self._check_input_dim(input)
        with torch.no_grad():
            joined = self._join(input)
            if self.training and self.track_running_stats:
                self._track(joined)
        dtype = _working_dtype(input)
        output: torch.Tensor = _Normalize.apply(
            input,
            self.weight,
            self.bias,
            joined.mean.to(dtype),
            (joined.squares / max(joined.size, 1)).to(dtype),
            joined.size,
            self.eps,
            f"sync_batch_norm.{self._number}.gradient.{joined.call % _CALLS}",
        )
        return output

    def _join(self, input: torch.Tensor) -> _Statistics:
        """The statistics of all ranks' inputs together."""
        channels = self.num_features
        row = torch.cat([*_mean_and_squares(input), self._tail(input)])
        name = f"sync_batch_norm.{self._number}.statistics"
        rows = allgather(row.unsqueeze(0), name=name)  # (ranks, 2·C + 3)
        tails = rows[:, 2 * channels :].tolist()
        counts = [int(high) * _DIGIT + int(low) for high, low, _ in tails]
        # A rank that had joined while the others went on has made fewer calls.
        call = max(int(number) for *_, number in tails)
        self._calls = (call + 1) % _DIGIT
        count = sum(counts)
        if count == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 in the batches of all "
                f"ranks together (this rank's input has shape {tuple(input.shape)})."
            )
        wide = rows.double()
        means, squares = wide[:, :channels], wide[:, channels : 2 * channels]
        numbers = wide.new_tensor(counts).unsqueeze(1)
        mean = (numbers * means).sum(0) / max(count, 1)
        between = numbers * (means - mean).square()
        return _Statistics(mean, (squares + between).sum(0), count, call)

    def _tail(self, input: torch.Tensor) -> torch.Tensor:
        """What a rank's row ends with: its count in two digits, and the number of its call."""
        high, low = divmod(input.numel() // self.num_features, _DIGIT)
        numbers = [float(high), float(low), float(self._calls)]
        return torch.tensor(numbers, dtype=_working_dtype(input), device=input.device)

    def _track(self, joined: _Statistics) -> None:
        """Update the running statistics as torch does; an empty joined batch has none."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if joined.size == 0:
            return
        weight = self.momentum
        if weight is None:
            weight = 1.0 / float(self.num_batches_tracked)
        unbiased = joined.squares / (joined.size - 1)
        for running, new in ((self.running_mean, joined.mean), (self.running_var, unbiased)):
            if running is not None:
                running.copy_(running.double() * (1.0 - weight) + new * weight)


def _working_dtype(input: torch.Tensor) -> torch.dtype:
    """Half precision is computed in single."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _mean_and_squares(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel's mean, and its sum of squared distances from it; zeros of an empty batch."""
    channels = input.shape[1]
    values = input.to(_working_dtype(input))
    if not values.numel():
        return values.new_zeros(channels), values.new_zeros(channels)
    others = [dimension for dimension in range(values.dim()) if dimension != 1]
    if values.is_cuda:
        variance, mean = torch.var_mean(values, others, correction=0)
        return mean, variance * (values.numel() // channels)
    # Two passes: var_mean takes four times as long on a CPU.
    mean = values.mean(others)
    distances = values - mean.view(-1, *[1] * (values.dim() - 2))
    return mean, distances.mul_(distances).sum(others)


class _Normalize(torch.autograd.Function):
    """Normalizes with given statistics, of which the gradient knows that they are the batch's."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: int,
        eps: float,
        name: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.count, ctx.eps, ctx.name = count, eps, name
        return _affine(input, mean, variance, weight, bias, eps).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, mean, variance = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_input = grad_weight = grad_bias = None
        if input.numel():
            # As if the statistics were constants: dy · scale, Σ dy·x̂ and Σ dy.
            partial, along, plain = torch.ops.aten.native_batch_norm_backward(
                gradient.to(mean.dtype),
                input.to(mean.dtype),
                None if weight is None else weight.to(mean.dtype),
                mean,
                variance,
                None,
                None,
                False,
                ctx.eps,
                [True, True, True],
            )
        else:
            partial, along, plain = torch.zeros_like(input), *torch.zeros_like(mean.expand(2, -1))
        if wants_weight:
            grad_weight = along.to(weight.dtype)
        if wants_bias:
            grad_bias = plain.to(ctx.bias_dtype)
        if wants_input:
            means = allreduce(torch.stack([along, plain]), op=Sum, name=ctx.name)
            scale = (variance + ctx.eps).rsqrt()
            if weight is not None:
                scale = scale * weight
            # And their part: -scale · (x̂ · mean(dy·x̂) + mean(dy))
            along, plain = means * (-scale / max(ctx.count, 1))
            grad_input = partial.add_(_affine(input, mean, variance, along, plain, ctx.eps))
            grad_input = grad_input.to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _affine(
    input: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + eps) · weight + bias`` of each channel, in one kernel."""
    dtype = mean.dtype
    values = input.to(dtype)
    if not values.numel():
        return torch.empty_like(values)
    weight, bias = (None if one is None else one.to(dtype) for one in (weight, bias))
    return functional.batch_norm(values, mean, variance, weight, bias, False, 0.0, eps)
