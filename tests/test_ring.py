"""The ring all-reduce against the exact sum, on threads: bits, bytes, messages, neighbours."""

from __future__ import annotations

import pytest
import torch
from threads import ThreadTransport, run_threads

from unidist.backends.algorithms.ring import ring_allreduce

LENGTHS = (0, 1, 2, 5, 6, 7, 8, 9, 64, 1000, 10007)
SIZES = range(1, 9)


def add(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    mine.add_(theirs)


def contribution(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Different on every rank, with sums that every dtype here holds exactly."""
    return ((torch.arange(length) + rank) % 5 + rank).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("segment_bytes", [16, 1 << 18])
def test_sum_is_exact_for_every_length(size: int, segment_bytes: int) -> None:
    for length in LENGTHS:

        def reduce(transport: ThreadTransport, length: int = length) -> torch.Tensor:
            mine = contribution(transport.rank, length, torch.float64)
            ring_allreduce(transport, mine, add, segment_bytes)
            return mine

        expected = sum(
            (contribution(r, length, torch.float64) for r in range(size)),
            torch.zeros(length, dtype=torch.float64),
        )
        for result in run_threads(size, reduce):
            assert torch.equal(result, expected), (size, length)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ],
    ids=str,
)
def test_every_dtype(dtype: torch.dtype) -> None:
    for size in (2, 3):

        def reduce(transport: ThreadTransport) -> torch.Tensor:
            mine = contribution(transport.rank, 101, dtype)
            ring_allreduce(transport, mine, add, 64)
            return mine

        expected = sum(contribution(r, 101, torch.float64) for r in range(size))
        for result in run_threads(size, reduce):
            assert result.dtype == dtype
            assert torch.equal(result.double(), expected)


def test_all_ranks_have_identical_bits_when_rounding_depends_on_order() -> None:
    def reduce(transport: ThreadTransport) -> bytes:
        generator = torch.Generator().manual_seed(transport.rank)
        mine = torch.randn(1001, generator=generator) * 10 ** (4 * transport.rank)
        ring_allreduce(transport, mine, add, 128)
        return mine.numpy().tobytes()

    for size in (3, 5):
        results = run_threads(size, reduce)
        assert len(set(results)) == 1


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_sends_the_lower_bound_to_its_right_neighbour_only(size: int) -> None:
    """2(N-1)/N·S bytes per rank (Patarasuk & Yuan, 2009)."""

    def reduce(transport: ThreadTransport) -> tuple[int, int, set[int]]:
        tensor = torch.ones(840 * 4)  # divisible by 1..8
        ring_allreduce(transport, tensor, add, 1 << 20)
        return transport.sent_bytes, transport.sent_messages, transport.destinations

    for rank, (sent, messages, destinations) in enumerate(run_threads(size, reduce)):
        assert sent == 2 * (size - 1) * 840 * 4 * 4 // size
        assert messages == 2 * (size - 1)
        assert destinations == ({(rank + 1) % size} if size > 1 else set())


def test_uneven_lengths_send_the_lower_bound_in_total() -> None:
    for size in (2, 3, 7):
        for length in (1, size - 1, size + 1, 1001):

            def reduce(transport: ThreadTransport, length: int = length) -> int:
                ring_allreduce(transport, torch.ones(length), add, 64)
                return transport.sent_bytes

            assert sum(run_threads(size, reduce)) == 2 * (size - 1) * length * 4


def test_other_reductions() -> None:
    def reduce(transport: ThreadTransport) -> list[float]:
        mine = torch.tensor([float(transport.rank), -float(transport.rank), 2.0])
        ring_allreduce(transport, mine, lambda a, b: torch.maximum(a, b, out=a))
        return mine.tolist()

    assert run_threads(4, reduce) == [[3.0, 0.0, 2.0]] * 4
