"""Adasum on any backend that can send and receive (Maleki et al., MLSys 2021, arXiv 2006.02924).

Two gradients a, b combine to ``(1 - a·b/(2|a|²)) a + (1 - a·b/(2|b|²)) b``: their sum when they are
orthogonal, their mean when they are parallel. Ranks combine as a balanced binary tree in rank
order, ((0,1),(2,3)),…, by vector halving and distance doubling: at level L a rank and its peer
``rank ^ L`` each keep one half of what they hold and combine it with the other's, so the kept
parts shrink while the number of ranks in them grows. Dot products run over whole tensors, so
those of the parts are summed over the block of 2L ranks. Then the parts are exchanged back.

    N = 4       level 1            level 2            back
    rank 0   (01) first half    (0123) 1st quarter    everything
    rank 1   (01) second half   (0123) 3rd quarter
    rank 2   (23) first half    (0123) 2nd quarter
    rank 3   (23) second half   (0123) 4th quarter

Traffic per rank: 2(N-1)/N·S, and 3 doubles per tensor and level. Arithmetic and grouping are those
of Horovod 0.28.1 on CPU, so float32 results have the same bits.

Horovod refuses a number of ranks N that is not a power of two. Here, with p the largest power of
two up to N, rank p+i first combines into rank i: three ranks give ((0,2),1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from unidist.backends.base import Backend, Group

#: what ``adasum_`` takes; bfloat16 is widened to float32 by the caller
ADASUM_DTYPES = frozenset({torch.float16, torch.float32, torch.float64})

#: squared norms below this count as zero; the square root of the smallest normal double
_TINY = 1.4916681462400413e-154
#: elements converted to double at a time, so that the copies stay in the cache
_BLOCK = 1 << 15


def adasum_(flat: torch.Tensor, sizes: Sequence[int], backend: Backend, group: Group) -> None:
    """Combine ``flat`` over all ranks of the group, in place. Blocks; all its ranks call it.

    Args:
        flat: float16, float32 or float64, on the CPU; one tensor, or several laid end to end.
        sizes: elements of each of those tensors, which get coefficients of their own.
    """
    rank, size = group.me, group.size
    if size == 1 or flat.numel() == 0:
        return
    power = 1 << (size.bit_length() - 1)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    if rank >= power:
        backend.send(flat, rank - power, group).wait()
        backend.recv(flat, rank - power, group).wait()
        return
    if rank + power < size:
        theirs = torch.empty_like(flat)
        backend.recv(theirs, rank + power, group).wait()
        _combine(flat, theirs, 0, ends, _products(flat, theirs, 0, ends), mine_is_first=True)

    low, high = 0, flat.numel()
    steps: list[tuple[int, slice, slice]] = []
    level = 1
    while level < power:
        peer, mine_is_first = rank ^ level, not rank & level
        middle = low + ((high - low) >> 1)
        first, second = slice(low, middle), slice(middle, high)
        keep, give = (first, second) if mine_is_first else (second, first)
        mine = flat[keep]
        theirs = torch.empty_like(mine)
        _swap(backend, group, peer, flat[give], theirs)
        left, right = (mine, theirs) if mine_is_first else (theirs, mine)
        products = _products(left, right, keep.start, ends)
        bit = 1
        while bit <= level:
            other = torch.empty_like(products)
            _swap(backend, group, rank ^ bit, products.view(-1), other.view(-1))
            products += other
            bit *= 2
        _combine(mine, theirs, keep.start, ends, products, mine_is_first)
        steps.append((peer, keep, give))
        low, high = keep.start, keep.stop
        level *= 2
    for peer, keep, give in reversed(steps):
        _swap(backend, group, peer, flat[keep], flat[give])

    if rank + power < size:
        backend.send(flat, rank + power, group).wait()


def _swap(
    backend: Backend, group: Group, peer: int, ours: torch.Tensor, theirs: torch.Tensor
) -> None:
    works = []
    if ours.numel():
        works.append(backend.send(ours, peer, group))
    if theirs.numel():
        works.append(backend.recv(theirs, peer, group))
    for work in works:
        work.wait()


def _parts(length: int, start: int, ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut ``length`` elements from ``start`` of the whole by tensor: (index, low, high)."""
    begin = 0
    for index, end in enumerate(ends):
        low, high = max(begin, start) - start, min(end, start + length) - start
        if low < high:
            yield index, low, high
        begin = end


def _products(a: torch.Tensor, b: torch.Tensor, start: int, ends: Sequence[int]) -> torch.Tensor:
    """(a·b, |a|², |b|²) of each tensor's part, in double; shape (tensors, 3)."""
    products = torch.zeros(len(ends), 3, dtype=torch.float64, device="cpu")
    for index, low, high in _parts(a.numel(), start, ends):
        for at in range(low, high, _BLOCK):
            stop = min(at + _BLOCK, high)
            x, y = a[at:stop].double(), b[at:stop].double()
            products[index, 0] += torch.dot(x, y)
            products[index, 1] += torch.dot(x, x)
            products[index, 2] += torch.dot(y, y)
    return products


def _coefficient(dot: float, norm: float) -> float:
    if math.isnan(norm) or norm < _TINY:
        return 1.0
    return 1.0 - dot / norm * 0.5


def _combine(
    mine: torch.Tensor,
    theirs: torch.Tensor,
    start: int,
    ends: Sequence[int],
    products: torch.Tensor,
    mine_is_first: bool,
) -> None:
    """Write the combination of two parts to ``mine``."""
    half = mine.dtype == torch.float16
    for index, low, high in _parts(mine.numel(), start, ends):
        dot, norm_a, norm_b = products[index].tolist()
        ca, cb = _coefficient(dot, norm_a), _coefficient(dot, norm_b)
        if half:  # Horovod's coefficients are float32 here
            ca, cb = torch.tensor([ca, cb], dtype=torch.float32).tolist()
        own, other = (ca, cb) if mine_is_first else (cb, ca)
        for at in range(low, high, _BLOCK):
            stop = min(at + _BLOCK, high)
            value = mine[at:stop].double().mul_(own)
            value += theirs[at:stop].double().mul_(other)
            mine[at:stop] = value.float() if half else value
