"""Adasum against a NumPy transcription of the algorithm (as Horovod's MPI build computes it).

Ranks beyond the largest power of two p fold in first (rank i combines its vector with that of
rank p + i), then a balanced binary tree in rank order: ((0, 1), (2, 3)), ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from checks.support import close, equal, same_on_all_ranks, several, world

_THRESHOLD = 1.4916681462400413e-154  # the square root of the smallest normal double


def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One pair: coefficients in double, one rounding when the result is stored."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    dot, na, nb = wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b
    ca = 1.0 if not na >= _THRESHOLD else 1.0 - dot / na * 0.5
    cb = 1.0 if not nb >= _THRESHOLD else 1.0 - dot / nb * 0.5
    if a.dtype == np.float16:
        ca, cb = np.float64(np.float32(ca)), np.float64(np.float32(cb))
    return (ca * wide_a + cb * wide_b).astype(a.dtype)


def adasum(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Adasum of flat vectors, one a rank."""
    power = 1 << (len(vectors).bit_length() - 1)
    parts = list(vectors[:power])
    for extra, vector in enumerate(vectors[power:]):
        parts[extra] = combine(parts[extra], vector)
    while len(parts) > 1:
        parts = [combine(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
    return parts[0]


def adasum_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adasum of tensors of any shape, one a rank."""
    flat = adasum([one.detach().contiguous().reshape(-1).numpy() for one in tensors])
    return torch.from_numpy(np.ascontiguousarray(flat)).reshape(tensors[0].shape)


def vector(rank: int, length: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


@world((1, 2, 4))
def check_float32_is_exact(hvd: Any) -> None:
    """Bit for bit what Horovod's MPI build gives."""
    rank, size = hvd.rank(), hvd.size()
    for length in (1, 3, 7, 1000, 65537):
        given = vector(rank, length, torch.float32)
        want = adasum_tensors([vector(r, length, torch.float32) for r in range(size)])
        got = hvd.allreduce(given, op=hvd.Adasum)
        equal(got, want, f"length {length}")
        equal(given, vector(rank, length, torch.float32), "input")


def check_other_dtypes(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype, rtol in ((torch.float64, 1e-14), (torch.float16, 3e-3), (torch.float32, 1e-6)):
        for length in (1, 3, 7, 1000, 65537):
            given = vector(rank, length, dtype)
            want = adasum_tensors([vector(r, length, dtype) for r in range(size)])
            got = hvd.allreduce(given, op=hvd.Adasum)
            close(got, want, f"{dtype}, length {length}", rtol=rtol, atol=rtol)
            same_on_all_ranks(got, what=f"{dtype}, length {length}")


def check_shapes(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for shape in ((), (1,), (5, 3), (2, 1, 7)):
        count = int(np.prod(shape))
        parts = [vector(r, count, torch.float32).reshape(shape) for r in range(size)]
        got = hvd.allreduce(parts[rank], op=hvd.Adasum)
        close(got, adasum_tensors(parts), f"{shape}", rtol=1e-6)
    parts = [vector(r, 12, torch.float32).reshape(3, 4).t() for r in range(size)]
    got = hvd.allreduce(parts[rank], op=hvd.Adasum)
    close(got, adasum_tensors(parts), "transposed", rtol=1e-6)
    equal(hvd.allreduce(torch.empty(0), op=hvd.Adasum), torch.empty(0), "empty")
    given = vector(rank, 9, torch.float32)
    assert hvd.allreduce_(given, op=hvd.Adasum) is given
    parts = [vector(r, 9, torch.float32) for r in range(size)]
    close(given, adasum_tensors(parts), "in place", rtol=1e-6)


def check_equal_vectors_give_their_mean(hvd: Any) -> None:
    for length in (1, 8, 1001):
        given = vector(0, length, torch.float32)
        close(hvd.allreduce(given, op=hvd.Adasum), given, f"length {length}", rtol=1e-6)
    # also where the square of the norm is tiny
    tiny = torch.full((10,), 1e-19)
    close(hvd.allreduce(tiny, op=hvd.Adasum), tiny, "tiny", rtol=1e-6)


def check_orthogonal_vectors_give_their_sum(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    given = torch.zeros(4 * size)
    given[4 * rank : 4 * rank + 4] = torch.tensor([1.0, 2.0, -3.0, 4.0])
    want = torch.tensor([1.0, 2.0, -3.0, 4.0]).repeat(size)
    equal(hvd.allreduce(given, op=hvd.Adasum), want)


def check_zeros(hvd: Any) -> None:
    """No NaN: a zero vector leaves the others alone."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float16, torch.float32, torch.float64):
        nothing = torch.zeros(7, dtype=dtype)
        equal(hvd.allreduce(nothing, op=hvd.Adasum), nothing, f"all zero {dtype}")
        only = vector(5, 7, dtype)
        given = only.clone() if rank == size - 1 else nothing.clone()
        equal(hvd.allreduce(given, op=hvd.Adasum), only, f"one is not zero {dtype}")


def check_grouped(hvd: Any) -> None:
    """Each tensor of a group has its own coefficients: [equal, orthogonal] -> [mean, sum]."""
    rank, size = hvd.rank(), hvd.size()
    same = vector(0, 6, torch.float32)
    apart = torch.zeros(size)
    apart[rank] = rank + 1.0
    different = vector(rank, 1001, torch.float32)
    got = hvd.grouped_allreduce([same, apart, different], op=hvd.Adasum)
    close(got[0], same, "equal", rtol=1e-6)
    equal(got[1], torch.arange(size) + 1.0, "orthogonal")
    want = adasum_tensors([vector(r, 1001, torch.float32) for r in range(size)])
    close(got[2], want, "in a group", rtol=1e-6)


def check_scale_factors(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    given = vector(rank, 33, torch.float64)
    want = adasum_tensors([vector(r, 33, torch.float64) for r in range(size)])
    got = hvd.allreduce(given, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=4.0)
    close(got, want * 2, "scaled", rtol=1e-13)


@several
def check_floats_agree_to_the_bit(hvd: Any) -> None:
    for length in (1, 2, 3, 5, 1023, 10007):
        got = hvd.allreduce(vector(hvd.rank(), length, torch.float32, seed=2), op=hvd.Adasum)
        same_on_all_ranks(got, what=f"length {length}")
