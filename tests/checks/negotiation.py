"""Operations matched by name: any order, every disagreement, every layout of the newer operations.

What ranks disagree about must be an error on all of them that tells who said what, and the next
operation must work, named or not. Horovod's engine has words of its own for that.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from checks.support import (
    DTYPES,
    INTEGERS,
    close,
    equal,
    expected,
    raises,
    same_on_all_ranks,
    values,
    world,
)


def _native_names() -> bool:
    """Whether the engine under test matches names itself, and words its errors."""
    from unidist import basics

    return bool(basics.runtime().backend.matches_by_name)


def _works(hvd: Any) -> None:
    """The ranks still understand each other, in operations with and without a name."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    mine = torch.tensor([rank + 1.0])
    equal(hvd.allreduce(mine, op=hvd.Sum), torch.tensor([total]), "the next, without a name")
    equal(hvd.allreduce(mine, op=hvd.Sum, name="next"), torch.tensor([total]), "the next, named")
    equal(hvd.allgather(mine), torch.arange(1.0, size + 1), "the next gather")
    equal(hvd.broadcast(mine, size - 1), torch.tensor([float(size)]), "the next broadcast")


# -- any order ------------------------------------------------------------------------------------


def check_any_order_of_all_kinds(hvd: Any) -> None:
    """Each rank submits in an order of its own, and waits in another."""
    rank, size = hvd.rank(), hvd.size()
    starts: dict[str, tuple[Callable[[], int], Callable[[Any], None]]] = {}

    def add(name: str, start: Callable[[], int], want: torch.Tensor, part: Any = None) -> None:
        def check(got: Any) -> None:
            equal(got if part is None else got[part], want, name)

        starts[name] = (start, check)

    for i in range(6):
        length = (3, 400, 5000)[i % 3]
        given = values(rank, (size * length,), torch.float32)
        rows = torch.full((rank + 1, i + 1), rank, dtype=torch.int32)
        total = expected("Sum", size, size * length, torch.float32)
        add(
            f"sum{i}",
            lambda g=given, i=i: hvd.allreduce_async(g, name=f"sum{i}", op=hvd.Sum),
            total,
        )
        add(
            f"group{i}",
            lambda g=given, i=i: hvd.grouped_allreduce_async([g, g], name=f"g{i}", op=hvd.Sum),
            total,
            part=1,
        )
        add(
            f"gather{i}",
            lambda r=rows, i=i: hvd.allgather_async(r, name=f"gather{i}"),
            torch.cat([torch.full((r + 1, i + 1), r, dtype=torch.int32) for r in range(size)]),
        )
        add(
            f"broadcast{i}",
            lambda g=given, i=i: hvd.broadcast_async(g, i % size, name=f"broadcast{i}"),
            values(i % size, (size * length,), torch.float32),
        )
        add(
            f"all{i}",
            lambda g=given, i=i: hvd.alltoall_async(g, name=f"all{i}"),
            torch.cat(
                [values(r, (size * length,), torch.float32).chunk(size)[rank] for r in range(size)]
            ),
            part=0,
        )
        add(
            f"scatter{i}",
            lambda g=given, i=i: hvd.reducescatter_async(g, name=f"scatter{i}", op=hvd.Sum),
            total.chunk(size)[rank],
        )
    shuffled = random.Random(rank)
    names = sorted(starts)
    handles = {name: starts[name][0]() for name in shuffled.sample(names, len(names))}
    for name in shuffled.sample(names, len(names)):
        starts[name][1](hvd.synchronize(handles[name]))


def check_blocking_in_another_order_than_asynchronous(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.tensor([float(rank)])
    total = torch.tensor([size * (size - 1) / 2])
    if rank == 0:
        handle = hvd.allreduce_async(mine, op=hvd.Sum, name="a")
        equal(hvd.allreduce(mine, op=hvd.Sum, name="b"), total)
        equal(hvd.synchronize(handle), total)
    else:
        handle = hvd.allreduce_async(mine, op=hvd.Sum, name="b")
        equal(hvd.allreduce(mine, op=hvd.Sum, name="a"), total)
        equal(hvd.synchronize(handle), total)


def check_a_name_again_and_again(hvd: Any) -> None:
    """The name is free as soon as its result is there, whichever thread finished it."""
    for turn in range(60):
        handle = hvd.allreduce_async(torch.tensor([turn]), op=hvd.Max, name="again")
        if turn % 3 == 0:
            while not hvd.poll(handle):
                pass
        equal(hvd.synchronize(handle), torch.tensor([turn]), f"turn {turn}")
        equal(hvd.allreduce(torch.tensor([turn]), op=hvd.Max, name="again"), torch.tensor([turn]))


@world((2, 3))
def check_a_name_that_is_under_way(hvd: Any) -> None:
    """The second submission is refused at once, and the first is not harmed."""
    from checks import support

    mine = torch.tensor([hvd.rank() + 1.0])
    total = torch.tensor([hvd.size() * (hvd.size() + 1) / 2])
    if hvd.rank() == 0:
        first = hvd.allreduce_async(mine, op=hvd.Sum, name="twice")
        for call in (hvd.allreduce_async, hvd.allreduce_async_):
            with raises(hvd.HorovodInternalError, "twice"):
                hvd.synchronize(call(mine.clone(), op=hvd.Sum, name="twice"))
        support.channel.tell("refused")
    else:
        support.channel.hear("refused")
        first = hvd.allreduce_async(mine, op=hvd.Sum, name="twice")
    equal(hvd.synchronize(first), total)
    _works(hvd)


# -- disagreements --------------------------------------------------------------------------------


def _disagree(hvd: Any, call: Callable[[bool], Any], *words: str) -> None:
    """Rank 1 calls it differently: an error on all ranks, whose text names ranks and values."""
    others = "rank 0" if hvd.size() == 2 else "ranks 0, 2"
    texts = [word.format(others=others) for word in words]
    with raises(hvd.HorovodInternalError, *([] if _native_names() else texts)):
        result = call(hvd.rank() == 1)
        if isinstance(result, int):
            hvd.synchronize(result)
    _works(hvd)


@world((2, 3))
def check_differing_terms_of_reductions(hvd: Any) -> None:
    ones = torch.ones(4)
    other = {False: torch.float32, True: torch.float64}
    for name, call in {
        "allreduce": lambda odd: hvd.allreduce(torch.ones(4, dtype=other[odd])),
        "allreduce_": lambda odd: hvd.allreduce_(torch.ones(4, dtype=other[odd])),
        "async": lambda odd: hvd.allreduce_async(torch.ones(4, dtype=other[odd])),
    }.items():
        _disagree(hvd, call, "dtype is float32 on {others}, float64 on rank 1")
        assert name
    _disagree(
        hvd,
        lambda odd: hvd.allreduce(torch.ones(2 + odd, 3), name="named"),
        "'allreduce.named'",
        "shape is [2, 3] on {others}, [3, 3] on rank 1",
        "Nothing was sent",
    )
    # Too long to travel with the control message.
    _disagree(
        hvd, lambda odd: hvd.allreduce(torch.ones(9000 + odd)), "[9000] on {others}, [9001] on rank"
    )
    _disagree(
        hvd,
        lambda odd: hvd.allreduce(ones, op=hvd.Max if odd else hvd.Min),
        "op is Min on {others}, Max on rank 1",
    )
    for factor in ("prescale_factor", "postscale_factor"):
        _disagree(
            hvd,
            lambda odd, f=factor: hvd.allreduce(ones, op=hvd.Sum, **{f: 0.5 if odd else 2}),
            factor + " is 2.0 on {others}, 0.5 on rank 1",
        )


@world((2, 3))
def check_average_against_sum(hvd: Any) -> None:
    """Horovod divides above its engine, and does not see it."""
    if _native_names():
        return
    _disagree(
        hvd,
        lambda odd: hvd.allreduce(torch.ones(4), op=hvd.Sum if odd else hvd.Average),
        "op is Average on {others}, Sum on rank 1",
    )
    _disagree(
        hvd,
        lambda odd: hvd.reducescatter(torch.ones(4), op=hvd.Sum if odd else hvd.Average),
        "op is Average on {others}, Sum on rank 1",
    )


@world((2, 3))
def check_differing_terms_of_movements(hvd: Any) -> None:
    size = hvd.size()
    kinds = {False: torch.int32, True: torch.float32}  # equal in bytes
    _disagree(
        hvd,
        lambda odd: hvd.allgather(torch.ones(2, dtype=kinds[odd])),
        "dtype is int32 on {others}, float32 on rank 1",
    )
    _disagree(
        hvd,
        lambda odd: hvd.allgather(torch.ones(3, 2 + odd)),
        "shape after the first dimension is [2] on {others}, [3] on rank 1",
    )
    _disagree(
        hvd,
        lambda odd: hvd.broadcast(torch.ones(2), root_rank=int(odd)),
        "root_rank is 0 on {others}, 1 on rank 1",
    )
    _disagree(
        hvd,
        lambda odd: hvd.broadcast_(torch.ones(4 + odd), 0),
        "shape is [4] on {others}, [5] on rank 1",
    )
    _disagree(
        hvd,
        lambda odd: hvd.alltoall(torch.ones(size, 1 + odd)),
        "shape after the first dimension is [1] on {others}, [2] on rank 1",
    )
    _disagree(
        hvd,
        lambda odd: hvd.alltoall_async(torch.ones(size, dtype=kinds[odd])),
        "dtype is int32 on {others}, float32 on rank 1",
    )
    _disagree(
        hvd,
        lambda odd: hvd.reducescatter(torch.ones(2 * size, 1 + odd)),
        "shape is",
        "on {others}",
    )


@world((2, 3))
def check_differing_terms_of_groups(hvd: Any) -> None:
    if _native_names():
        return  # a group of other length has members that nobody matches
    pair = [torch.ones(2), torch.ones(3, 2)]
    longer = [*pair, torch.ones(1)]
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        _disagree(
            hvd,
            lambda odd, call=call: call(longer if odd else pair),
            "number of tensors is 2 on {others}, 3 on rank 1",
        )
    _disagree(
        hvd,
        lambda odd: hvd.grouped_allreduce([pair[0], pair[1].int() if odd else pair[1]]),
        "dtypes is ['float32', 'float32'] on {others}, ['float32', 'int32'] on rank 1",
    )
    _disagree(
        hvd,
        lambda odd: hvd.grouped_allgather([pair[0], torch.ones(5, 2 + odd)]),
        "shapes after the first dimension is [[], [2]] on {others}, [[], [3]] on rank 1",
    )


@world((2, 3))
def check_different_kinds_under_one_name(hvd: Any) -> None:
    if _native_names():
        return  # Horovod waits for the time limit
    others = "rank 0" if hvd.size() == 2 else "ranks 0, 2"
    given = torch.ones(6)
    for name in (None, "kind"):
        with raises(
            hvd.HorovodInternalError,
            "is not the same operation everywhere",
            f"allreduce on {others}",
            "broadcast on rank 1",
        ):
            if hvd.rank() == 1:
                _catch_up(hvd, "allreduce", "broadcast")
                hvd.broadcast(given, 0, name=name)
            else:
                _catch_up(hvd, "allreduce", "broadcast")
                hvd.allreduce(given, name=name)
        _works(hvd)


def _catch_up(hvd: Any, *kinds: str) -> None:
    """Make the next unnamed operations of these kinds have one number."""
    from unidist import basics

    runtime = basics.runtime()
    keys = [(kind, runtime.backend.world) for kind in kinds]
    highest = max(runtime.unnamed.get(key, 0) for key in keys)
    for key in keys:
        runtime.unnamed[key] = highest


@world((2, 3))
def check_a_disagreement_among_others_under_way(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.full((3,), float(rank))
    handles = [hvd.allreduce_async(mine * i, op=hvd.Sum, name=f"good{i}") for i in range(5)]
    bad = hvd.allreduce_async(torch.ones(2 + (rank == 1)), name="bad")
    handles += [hvd.allreduce_async(mine * i, op=hvd.Sum, name=f"good{i}") for i in range(5, 9)]
    total = torch.full((3,), size * (size - 1) / 2)
    for i, handle in reversed(list(enumerate(handles))):
        equal(hvd.synchronize(handle), total * i, f"good{i}")
    with raises(hvd.HorovodInternalError):
        hvd.synchronize(bad)
    _works(hvd)


@world((2, 3))
def check_input_of_a_refused_operation_is_untouched(hvd: Any) -> None:
    given = torch.full((3 + (hvd.rank() == 1),), 7.0)
    with raises(hvd.HorovodInternalError):
        hvd.allreduce_(given, op=hvd.Sum, prescale_factor=3.0)
    if not _native_names():  # Horovod's engine is given the scaled tensor
        equal(given, torch.full_like(given, 7.0), "after the refusal")
    _works(hvd)


def check_arguments_that_are_numpys(hvd: Any) -> None:
    """What is told to the peers must be a number for JSON, too."""
    rank, size = hvd.rank(), hvd.size()
    half = numpy.float32(0.5)
    got = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=half, postscale_factor=half)
    equal(got, torch.full((2,), size / 4))
    got = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=torch.tensor(0.5))
    equal(got, torch.full((2,), size / 2))
    got = hvd.broadcast(torch.tensor([rank]), numpy.int64(size - 1))
    equal(got, torch.tensor([size - 1]))
    got = hvd.reducescatter(torch.ones(size), op=hvd.Sum, prescale_factor=half)
    equal(got, torch.full((1,), size / 2))
    got, told = hvd.alltoall(torch.full((size,), rank), splits=numpy.ones(size, dtype=numpy.int64))
    equal(got, torch.arange(size))
    equal(told, torch.ones(size, dtype=torch.int32))


# -- short and long -------------------------------------------------------------------------------


def check_around_the_limit_of_the_control_message(hvd: Any) -> None:
    """Bytes that just travel with the message, and just do not; of each rank on its own."""
    from unidist.collective import INLINE_BYTES

    rank, size = hvd.rank(), hvd.size()
    limit = INLINE_BYTES
    for dtype in (torch.uint8, torch.float32, torch.float64, torch.complex64, torch.bool):
        width = torch.empty(0, dtype=dtype).element_size()
        for count in (limit // width - 1, limit // width, limit // width + 1):
            what = f"{count} {dtype}"
            given = values(rank, count, dtype)
            equal(
                hvd.allreduce(given, op=hvd.Sum), expected("Sum", size, count, dtype), f"sum {what}"
            )
            equal(
                hvd.broadcast(given, size - 1), values(size - 1, count, dtype), f"broadcast {what}"
            )
            # On one rank it is short, on another long.
            uneven = [count + r - 1 for r in range(size)]
            equal(
                hvd.allgather(values(rank, uneven[rank], dtype)),
                torch.cat([values(r, n, dtype) for r, n in enumerate(uneven)]),
                f"gather {what}",
            )
            many = hvd.grouped_allreduce([given, given[:3], given[3:]], op=hvd.Sum)
            want = expected("Sum", size, count, dtype)
            for got, part in zip(many, (want, want[:3], want[3:]), strict=True):
                equal(got, part, f"group of {what}")
    same_on_all_ranks(hvd.allreduce(torch.rand(limit // 8, dtype=torch.float64)), what="short")


def check_scaled_short_and_long(hvd: Any) -> None:
    """The factor is applied once, whichever way the elements travel; the input stays."""
    size = hvd.size()
    for count in (5, 5000):
        for dtype in (torch.float32, torch.int32, torch.bfloat16):
            given = torch.full((count,), 3, dtype=dtype)
            got = hvd.allreduce(given, op=hvd.Sum, prescale_factor=2.0, postscale_factor=2.0)
            equal(got, torch.full((count,), 12 * size, dtype=dtype), f"{count} {dtype}")
            equal(given, torch.full((count,), 3, dtype=dtype), "input")
            hvd.allreduce_(given, op=hvd.Sum, prescale_factor=2.0)
            equal(given, torch.full((count,), 6 * size, dtype=dtype), f"in place {count} {dtype}")


# -- every dtype and layout of the newer operations -----------------------------------------------


def _layouts(rank: int, rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of ``rows`` rows in memory layouts of all sorts."""
    image = values(rank, (rows, 2, 3, 2), dtype)
    found = {
        "contiguous": values(rank, (rows, 3), dtype),
        "vector": values(rank, rows, dtype),
        "no columns": values(rank, (rows, 0), dtype),
        "transposed": values(rank, (3, rows), dtype).t(),
        "every second row": values(rank, (2 * rows, 3), dtype)[::2],
        "column": values(rank, (rows, 5), dtype)[:, 2],
        "block": values(rank, (rows + 2, 5), dtype)[1 : rows + 1, 1:4],
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "expanded rows": values(rank, (1, 3), dtype).expand(rows, 3),
        "expanded columns": values(rank, (rows, 1), dtype).expand(rows, 4),
        "flipped": values(rank, (rows, 3), dtype).flip(0),
    }
    if dtype.is_complex:
        found["conjugate"] = values(rank, (rows, 3), dtype).conj()
        found["imaginary of conjugate"] = values(rank, (rows, 3), dtype).conj().imag
    if dtype.is_floating_point or dtype.is_complex:
        found["with gradient"] = values(rank, (rows, 3), dtype).requires_grad_()
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


@contextlib.contextmanager
def _unchanged(tensor: torch.Tensor, what: str) -> Iterator[None]:
    before = _plain(tensor).clone()
    yield
    equal(_plain(tensor), before, f"input of {what}")


def _each_layout(hvd: Any, rows: int) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor]]]:
    """A label, this rank's tensor, and the plain tensors of all ranks."""
    for dtype in DTYPES:
        everyone = [_layouts(rank, rows, dtype) for rank in range(hvd.size())]
        for name, tensor in everyone[hvd.rank()].items():
            yield f"{dtype} {name}", tensor, [_plain(one[name]) for one in everyone]


def check_alltoall_of_every_layout(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for what, given, plain in _each_layout(hvd, 2 * size):
        want = torch.cat([one.chunk(size)[rank] for one in plain])
        with _unchanged(given, what):
            equal(hvd.alltoall(given).detach(), want, f"alltoall {what}")
        # Rank r sends r rows to the first, one to the others; what is left stays at home.
        splits = [[sender if r == 0 else 1 for r in range(size)] for sender in range(size)]
        got, told = hvd.alltoall(given.detach(), splits[rank])
        starts = [sum(splits[sender][:rank]) for sender in range(size)]
        parts = [
            one[start : start + splits[sender][rank]]
            for sender, (one, start) in enumerate(zip(plain, starts, strict=True))
        ]
        equal(got, torch.cat(parts), f"alltoall with splits {what}")
        equal(told, torch.tensor([splits[s][rank] for s in range(size)], dtype=torch.int32))


def _total(plain: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype = plain[0].dtype
    if dtype == torch.bool:
        return torch.stack(plain).any(0)
    if op == "Sum":
        return torch.stack(plain).sum(0).to(dtype)
    if dtype in INTEGERS:
        wide = torch.stack(plain).to(torch.int64).sum(0)
        return torch.div(wide, len(plain), rounding_mode="trunc").to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.stack(plain).to(wide).mean(0).to(dtype)


def check_reducescatter_of_every_layout(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = size + 1
    low, count = rank + (rank > 0), 2 if rank == 0 else 1
    for what, given, plain in _each_layout(hvd, rows):
        with _unchanged(given, what):
            got = hvd.reducescatter(given, op=hvd.Sum).detach()
        equal(got, _total(plain, "Sum")[low : low + count], f"reducescatter {what}")
        if given.dtype != torch.bool:
            got = hvd.reducescatter(given).detach()
            close(got, _total(plain, "Average")[low : low + count], f"average {what}")


def check_groups_of_every_layout(hvd: Any) -> None:
    """All layouts and dtypes in one group; an empty tensor and an empty group, too."""
    rank, size = hvd.rank(), hvd.size()
    rows = size + 1
    everything = list(_each_layout(hvd, rows))
    labels = [what for what, _, _ in everything]
    given = [tensor.detach() for _, tensor, _ in everything]
    for what, got, (_, _, plain) in zip(
        labels, hvd.grouped_allgather(given), everything, strict=True
    ):
        equal(got, torch.cat(plain), f"grouped_allgather {what}")
    scattered = hvd.grouped_reducescatter(given, op=hvd.Sum)
    low, count = rank + (rank > 0), 2 if rank == 0 else 1
    for what, got, (_, _, plain) in zip(labels, scattered, everything, strict=True):
        equal(got, _total(plain, "Sum")[low : low + count], f"grouped_reducescatter {what}")
    uneven = [torch.full((r, 2), float(r)) for r in range(size)]
    got = hvd.grouped_allgather([uneven[rank], torch.empty(0), torch.empty(2, 0)], name="empties")
    equal(got[0], torch.cat(uneven))
    equal(got[1], torch.empty(0))
    equal(got[2], torch.empty(2 * size, 0))


def check_sparse_of_every_dtype(hvd: Any) -> None:
    """Entries that differ in number and place, none on the last rank; one dimension of values."""
    rank, size = hvd.rank(), hvd.size()

    def mine(r: int, dtype: torch.dtype, columns: tuple[int, ...]) -> torch.Tensor:
        count = size - 1 - r
        indices = torch.arange(count).unsqueeze(0) * 2 + r
        return torch.sparse_coo_tensor(
            indices,
            values(r, (count, *columns), dtype),
            (4 * size, *columns),
            check_invariants=True,
        )

    for dtype in (one for one in DTYPES if one != torch.bool):
        for columns in ((), (3,), (2, 2)):
            what = f"sparse {dtype} {columns}"
            given = mine(rank, dtype, columns)
            wait = hvd.sparse_allreduce_async(given, None, hvd.Sum)
            named = hvd.sparse_allreduce_async(given, "sparse", hvd.Average)
            parts = [mine(r, dtype, columns).to_dense() for r in range(size)]
            got = wait()
            assert got.is_sparse, what
            equal(got.to_dense(), torch.stack(parts).sum(0).to(dtype), what)
            # Each entry is averaged, and then those of one place are added.
            averaged = named().to_dense()
            if dtype not in INTEGERS:
                close(averaged, _total(parts, "Average"), f"average {what}", atol=1e-2)


# -- process sets ---------------------------------------------------------------------------------


@world((2, 3))
def check_newer_operations_in_process_sets(hvd: Any) -> None:
    """In a set, in an overlapping one and in the world, all under way at once."""
    rank, size = hvd.rank(), hvd.size()
    subsets = [[0, size - 1], [size - 1]] if size == 3 else [[0], [1]]
    sets = [hvd.add_process_set(ranks) for ranks in subsets]
    for process_set, ranks in [*zip(sets, subsets, strict=True), (None, list(range(size)))]:
        if rank not in ranks:
            continue
        options = {} if process_set is None else {"process_set": process_set}
        me, n = ranks.index(rank), len(ranks)
        given = values(rank, (2 * n, 3), torch.float32)
        everyone = [values(r, (2 * n, 3), torch.float32) for r in ranks]
        handles = [
            hvd.alltoall_async(given, name="x", **options),
            hvd.reducescatter_async(given, name="x", op=hvd.Sum, **options),
            hvd.grouped_allgather_async([given, given[:1]], name="x", **options),
            hvd.grouped_reducescatter_async([given], name="x", op=hvd.Sum, **options),
        ]
        entries = torch.sparse_coo_tensor(
            [[0, rank]], torch.tensor([1.0, 2.0]), (size,), check_invariants=True
        )
        wait = hvd.sparse_allreduce_async(entries, "x", hvd.Sum, **options)
        moved, scattered, gathered, grouped = map(hvd.synchronize, handles)
        equal(moved[0], torch.cat([one.chunk(n)[me] for one in everyone]), f"alltoall {ranks}")
        total = torch.stack(everyone).sum(0)
        equal(scattered, total.chunk(n)[me], f"reducescatter {ranks}")
        equal(gathered[0], torch.cat(everyone), f"grouped_allgather {ranks}")
        equal(gathered[1], torch.cat([one[:1] for one in everyone]))
        equal(grouped[0], total.chunk(n)[me], f"grouped_reducescatter {ranks}")
        dense = torch.zeros(size)
        for r in ranks:
            dense[0] += 1
            dense[r] += 2
        equal(wait().to_dense(), dense, f"sparse {ranks}")
        with raises(ValueError):
            hvd.alltoall(given, [1] * (n + 1), **options)
    hvd.barrier()
    for process_set in sets:
        assert hvd.remove_process_set(process_set) is True


@world((3,))
def check_disagreement_in_a_set_leaves_the_others_alone(hvd: Any) -> None:
    """World ranks are named; a rank outside goes on with the world's operations."""
    process_set = hvd.add_process_set([0, 2])
    rank = hvd.rank()
    if rank != 1:
        words = [] if _native_names() else ["dtype is float32 on rank 0, float64 on rank 2"]
        with raises(hvd.HorovodInternalError, *words):
            dtype = torch.float64 if rank == 2 else torch.float32
            hvd.allreduce(torch.ones(3, dtype=dtype), process_set=process_set)
        got = hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=process_set)
        equal(got, torch.full((3,), 2.0))
    _works(hvd)
    assert hvd.remove_process_set(process_set) is True
