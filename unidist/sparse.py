"""Reductions of sparse tensors: their indices and values are gathered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unidist import basics
from unidist.layout import check_tensor
from unidist.movement import allgather_async
from unidist.process_sets import ProcessSet, global_process_set, member_group
from unidist.reduction import Average, Reduction, Sum, as_reduction
from unidist.synchronization import synchronize


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: Reduction,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start the reduction of a sparse COO tensor; return a function that waits for the result.

    Args:
        tensor: sparse; the number of its entries may differ between ranks, and be 0.
        name: names the operation in errors and timelines; equal on all ranks.
        op: Average or Sum.
        process_set: the ranks that take part; all of them must call.

    Returns:
        A function without arguments. It returns a sparse tensor of the same shape, dtype and
        device, in which an index stands once for each rank that had it (call ``coalesce()``).

    Raises:
        ValueError: before init; another op; this rank is not in the set.
        TypeError: not a sparse tensor.
    """
    basics.runtime()
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        found = getattr(tensor, "layout", type(tensor).__name__)
        raise TypeError(f"sparse_allreduce_async takes a sparse COO tensor, but got {found}.")
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async takes op=Average or op=Sum, but got {op!r}.")
    op = as_reduction(op, "sparse_allreduce_async")
    size = member_group(process_set, "sparse_allreduce_async").size
    detached = tensor.detach()
    indices, values = detached._indices(), detached._values()
    check_tensor(values, "sparse_allreduce_async")
    handles = [
        # One row of indices for each entry, so that both are joined along the first dimension.
        allgather_async(indices.t().contiguous(), name and f"{name}.indices", process_set),
        allgather_async(values, name and f"{name}.values", process_set),
    ]

    def wait() -> torch.Tensor:
        gathered, reduced = (synchronize(handle) for handle in handles)
        if op is Average:
            if reduced.is_floating_point() or reduced.is_complex():
                reduced = reduced / size
            else:
                reduced = torch.div(reduced, size, rounding_mode="trunc")
        return torch.sparse_coo_tensor(
            gathered.t(), reduced, tensor.shape, check_invariants=False, is_coalesced=False
        )

    return wait
