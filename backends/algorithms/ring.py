"""Ring all-reduce: reduce-scatter, then all-gather, as one pipeline of segments.

The vector of S bytes is cut into N chunks; chunk c has ``n // N + (c < n % N)`` elements. Each rank
only ever sends to its right neighbour and receives from its left one. With N = 3, what rank r
receives at step t, where ``c`` is the chunk (the sum grows as it travels) ::

    step t      0            1         |     2            3
            reduce-scatter: add        |  all-gather: overwrite
    rank 0   c2 (of 2)    c1 (1+2)     |  c0 (done)    c2 (done)
    rank 1   c0 (of 0)    c2 (2+0)     |  c1 (done)    c0 (done)
    rank 2   c1 (of 1)    c0 (0+1)     |  c2 (done)    c1 (done)

In general rank r receives chunk ``(r - t - 1) mod N`` at step t < N-1, and adds it; it receives
chunk ``(r - (t - (N-1))) mod N`` at step t >= N-1, and keeps it. What it receives at step t is
exactly what it sends at step t+1, over both halves, so the whole all-reduce is one rule:

    receive a segment, reduce it if t < N-1, pass it on unless t is the last step.

Each chunk is cut into segments. Segments are numbered j = t*K + k (K per chunk) in the order in
which they travel. Segment j may be sent once segment j - K has been received and reduced;
``WINDOW`` receives are posted ahead, so that the next segment arrives while the last is added.

Cost, one full-duplex port per rank (Patarasuk & Yuan, JPDC 69(2), 2009):
``2(N-1)·α + 2(N-1)/N·S/B + (N-1)/N·S·C``; each rank sends ``2(N-1)/N·S`` bytes.

Chunk c is summed in the order c, c+1, …, c+N-1 (mod N) on one path, so all ranks get identical
bits, which depend on N.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from unidist.backends.algorithms.transport import NOTHING, Request, Transport, wire

#: bytes of one segment: large enough to hide the call's overhead, small enough for the L2 cache
SEGMENT_BYTES = 512 * 1024
#: receives posted ahead
WINDOW = 4

#: ``accumulate(mine, theirs)`` reduces ``theirs`` into ``mine``
Accumulate = Callable[[torch.Tensor, torch.Tensor], object]


def ring_allreduce(
    transport: Transport,
    tensor: torch.Tensor,
    accumulate: Accumulate,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Reduce a flat contiguous CPU tensor of any dtype and length over all ranks, in place."""
    rank, size, length = transport.rank, transport.size, tensor.numel()
    if size == 1 or length == 0:
        return
    itemsize = tensor.element_size()
    data = wire(tensor)
    left, right = (rank - 1) % size, (rank + 1) % size

    quotient, remainder = divmod(length, size)
    longest = quotient + (remainder > 0)
    segment = max(1, segment_bytes // itemsize)
    per_chunk = -(-longest // segment)
    half = (size - 1) * per_chunk  # segments of the reduce-scatter
    total = 2 * half

    def bounds(chunk: int, k: int) -> tuple[int, int]:
        """First and last-plus-one element of segment k of a chunk; equal when it is empty."""
        start = chunk * quotient + min(chunk, remainder)
        stop = start + quotient + (chunk < remainder)
        return min(start + k * segment, stop), min(start + (k + 1) * segment, stop)

    def received(j: int) -> tuple[int, int]:
        t, k = divmod(j, per_chunk)
        return bounds((rank - t - 1 if j < half else rank - t + size - 1) % size, k)

    def sent(j: int) -> tuple[int, int]:
        return received(j - per_chunk) if j >= per_chunk else bounds(rank, j)

    window = min(WINDOW, total)
    slot_length = min(segment, longest)
    scratch = tensor.new_empty(window * slot_length)
    scratch_data = wire(scratch)

    receives: list[Request] = [NOTHING] * total
    sends: list[Request] = []
    retired = 0  # sends known to be complete

    def retire(upto: int) -> None:
        nonlocal retired
        while retired < upto:
            sends[retired].wait()
            sends[retired] = NOTHING
            retired += 1

    def post_receive(j: int) -> None:
        start, stop = received(j)
        if start == stop:
            return
        if j < half:
            at = (j % window) * slot_length * itemsize
            buffer = scratch_data[at : at + (stop - start) * itemsize]
        else:
            # This segment's partial sum left from here as number j - half: it must be gone.
            retire(j - half + 1)
            buffer = data[start * itemsize : stop * itemsize]
        receives[j] = transport.irecv(buffer, left)

    def post_sends(upto: int) -> None:
        while len(sends) < min(upto, total):
            start, stop = sent(len(sends))
            sends.append(
                transport.isend(data[start * itemsize : stop * itemsize], right)
                if start < stop
                else NOTHING
            )

    ahead = min(window, per_chunk)
    for j in range(window):
        # Receives of the all-gather come after `ahead` sends at least, see retire().
        if j < half:
            post_receive(j)
    post_sends(ahead)
    posted = min(window, half)
    for j in range(total):
        while posted < min(j + window, total) and (posted < half or posted - half < len(sends)):
            post_receive(posted)
            posted += 1
        receives[j].wait()
        receives[j] = NOTHING
        if j < half:
            start, stop = received(j)
            if start < stop:
                at = (j % window) * slot_length
                accumulate(tensor[start:stop], scratch[at : at + stop - start])
        post_sends(j + 1 + ahead)
    retire(total)
