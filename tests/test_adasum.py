"""Adasum over threads against a direct transcription of the definition, and its identities."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from threads import ThreadTransport, run_threads

from unidist.adasum import adasum_
from unidist.backends.base import Group

TINY = np.sqrt(np.finfo(np.float64).tiny)


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = a.astype(np.float64), b.astype(np.float64)
    dot, na, nb = x @ y, x @ x, y @ y
    ca = 1.0 if na < TINY else 1.0 - dot / na * 0.5
    cb = 1.0 if nb < TINY else 1.0 - dot / nb * 0.5
    return (ca * x + cb * y).astype(a.dtype)


def tree(vectors: list[np.ndarray]) -> np.ndarray:
    """Ranks beyond the largest power of two fold into the first ones, then a balanced tree."""
    power = 1 << (len(vectors).bit_length() - 1)
    level = [
        pair(vectors[i], vectors[i + power]) if i + power < len(vectors) else vectors[i]
        for i in range(power)
    ]
    while len(level) > 1:
        level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def adasum(vectors: list[np.ndarray], sizes: list[int] | None = None) -> list[torch.Tensor]:
    size = len(vectors)

    def run(transport: ThreadTransport) -> torch.Tensor:
        flat = torch.from_numpy(vectors[transport.rank].copy())
        group = Group(tuple(range(size)), transport.rank)
        adasum_(flat, sizes or [flat.numel()], transport, group)  # type: ignore[arg-type]
        return flat

    return run_threads(size, run)


def vectors(size: int, length: int, dtype: type) -> list[np.ndarray]:
    return [
        np.random.default_rng(100 + rank).standard_normal(length).astype(dtype)
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("length", [0, 1, 3, 7, 1000, 65537])
def test_float32_has_the_bits_of_the_definition(size: int, length: int) -> None:
    inputs = vectors(size, length, np.float32)
    expected = torch.from_numpy(tree(inputs))
    for result in adasum(inputs):
        assert torch.equal(result, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-14), (np.float16, 2e-3)])
def test_other_precisions(dtype: type, tolerance: float) -> None:
    inputs = vectors(4, 1000, dtype)
    expected = tree([v.astype(np.float64) for v in inputs])
    results = adasum(inputs)
    for result in results:
        assert torch.equal(result, results[0])
        error = np.linalg.norm(result.double().numpy() - expected) / np.linalg.norm(expected)
        assert error < tolerance


def test_parallel_is_the_mean_and_orthogonal_the_sum_per_tensor() -> None:
    a = np.array([1, 2, 3, 1, 0], dtype=np.float32)
    b = np.array([1, 2, 3, 0, 1], dtype=np.float32)
    for result in adasum([a, b], sizes=[3, 2]):
        assert result.tolist() == [1, 2, 3, 1, 1]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_equal_vectors_stay_and_zero_vectors_do_not_count(size: int) -> None:
    v = np.array([3.0, -4.0, 0.5], dtype=np.float32)
    for result in adasum([v] * size):
        assert result.tolist() == v.tolist()
    zero = np.zeros(3, dtype=np.float32)
    for result in adasum([v] + [zero] * (size - 1)):
        assert result.tolist() == v.tolist()
    for result in adasum([zero] * size):
        assert result.tolist() == [0, 0, 0]


def test_many_tensors_cut_by_the_halving_have_their_own_coefficients() -> None:
    sizes = [1, 2, 3, 5, 7, 11, 13]
    inputs = vectors(4, sum(sizes), np.float32)
    bounds = np.cumsum([0, *sizes])
    expected = np.concatenate(
        [tree([v[a:b] for v in inputs]) for a, b in itertools.pairwise(bounds)]
    )
    for result in adasum(inputs, sizes):
        assert torch.equal(result, torch.from_numpy(expected))
