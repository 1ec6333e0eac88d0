"""allreduce in all its forms: operators, dtypes, layouts, handles, groups, autograd."""

from __future__ import annotations

from typing import Any

import torch

from checks.support import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    close,
    equal,
    expected,
    lengths,
    lengths_of,
    no_warnings,
    raises,
    same_on_all_ranks,
    several,
    values,
    warns,
)

ORDERED = (*INTEGERS, torch.bool, *FLOATS)


def _reduce_all_lengths(hvd: Any, op: str, dtypes: tuple[torch.dtype, ...]) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in dtypes:
        for length in lengths_of(dtype, size):
            given = values(rank, length, dtype)
            got = hvd.allreduce(given, op=getattr(hvd, op))
            what = f"{op} of {length} {dtype}"
            # An average of three is not exact; everything else is, with values this small.
            compare = close if op == "Average" else equal
            compare(got, expected(op, size, length, dtype), what)
            equal(given, values(rank, length, dtype), f"input of {what}")
            assert got.data_ptr() != given.data_ptr() or length == 0, f"{what} aliases its input"
            if length == 1000:
                same_on_all_ranks(got, what=what)


def check_sum(hvd: Any) -> None:
    _reduce_all_lengths(hvd, "Sum", DTYPES)


def check_average(hvd: Any) -> None:
    _reduce_all_lengths(hvd, "Average", tuple(one for one in DTYPES if one != torch.bool))


def check_min(hvd: Any) -> None:
    _reduce_all_lengths(hvd, "Min", ORDERED)


def check_max(hvd: Any) -> None:
    _reduce_all_lengths(hvd, "Max", ORDERED)


def check_product(hvd: Any) -> None:
    _reduce_all_lengths(hvd, "Product", ORDERED)


def check_default_is_average(hvd: Any) -> None:
    got = hvd.allreduce(values(hvd.rank(), 7, torch.float64))
    close(got, expected("Average", hvd.size(), 7, torch.float64), "no op given")


def check_integer_average_truncates(hvd: Any) -> None:
    """-11/4 is -2, never -3, and never 0 by a rounded 1/size; exact beyond 2**24."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.int16, torch.int32, torch.int64):
        given = torch.tensor([3 + rank, -3 - rank, -5, 2**14 + 1, 0], dtype=dtype)
        total = sum(range(size))
        want = [
            (3 * size + total) // size,
            -((3 * size + total) // size),
            -5,
            2**14 + 1,
            0,
        ]
        got = hvd.allreduce(given, op=hvd.Average)
        equal(got, torch.tensor(want, dtype=dtype), f"average of {dtype}")
    big = torch.tensor([2**24 + 1, -(2**24) - 1], dtype=torch.int32)
    equal(hvd.allreduce(big, op=hvd.Average), big, "average above 2**24")


def check_extremes_of_integers(hvd: Any) -> None:
    """The limits of a dtype survive Min and Max (they would not survive a trip through float)."""
    for dtype in INTEGERS:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        mine = [low, high] if hvd.rank() == 0 else [1, 1]
        given = torch.tensor(mine, dtype=dtype)
        others = [1, 1] if hvd.size() > 1 else mine
        want_min = torch.tensor([min(low, others[0]), min(high, others[1])], dtype=dtype)
        want_max = torch.tensor([max(low, others[0]), max(high, others[1])], dtype=dtype)
        equal(hvd.allreduce(given, op=hvd.Min), want_min, f"Min of {dtype}")
        equal(hvd.allreduce(given, op=hvd.Max), want_max, f"Max of {dtype}")


def check_large_int64_sum_is_exact(hvd: Any) -> None:
    given = torch.tensor([2**53 + 1 + hvd.rank(), -(2**60)], dtype=torch.int64)
    size = hvd.size()
    want = [size * (2**53 + 1) + size * (size - 1) // 2, -size * 2**60]
    equal(hvd.allreduce(given, op=hvd.Sum), torch.tensor(want, dtype=torch.int64))


def check_zero_dim(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.complex64):
        got = hvd.allreduce(torch.tensor(rank + 1, dtype=dtype), op=hvd.Sum)
        equal(got, torch.tensor(size * (size + 1) // 2, dtype=dtype), f"0-dim {dtype}")
    written = torch.tensor(float(rank + 1))
    hvd.allreduce_(written, op=hvd.Sum)
    equal(written, torch.tensor(size * (size + 1) / 2), "0-dim in place")


def check_empty(hvd: Any) -> None:
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 5)):
        for dtype in (torch.float32, torch.int8, torch.bool, torch.complex64):
            got = hvd.allreduce(torch.empty(shape, dtype=dtype), op=hvd.Sum)
            equal(got, torch.empty(shape, dtype=dtype), f"empty {shape} {dtype}")


def _layouts(rank: int) -> dict[str, torch.Tensor]:
    """Tensors that do not lie in memory one element after the other."""

    def base() -> torch.Tensor:
        return values(rank, (6, 8), torch.float32)

    def image() -> torch.Tensor:
        return values(rank, (2, 3, 4, 5), torch.float32)

    return {
        "column": base()[:, 3],
        "every second": base().reshape(-1)[::2],
        "transposed": base().t(),
        "block": base()[1:4, 2:7],
        "permuted": image().permute(3, 0, 2, 1),
        "channels_last": image().contiguous(memory_format=torch.channels_last),
        "offset": base().reshape(-1)[5:],
    }


def check_strided_input(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for name, given in _layouts(rank).items():
        before = given.clone()
        want = torch.stack([_layouts(other)[name] for other in range(size)]).sum(0)
        equal(hvd.allreduce(given, op=hvd.Sum), want, name)
        equal(given, before, f"input {name}")
    expanded = values(rank, (4, 1), torch.float32).expand(4, 5)
    want = expected("Sum", size, (4, 1), torch.float32).expand(4, 5)
    equal(hvd.allreduce(expanded, op=hvd.Sum), want.contiguous(), "expanded")
    conjugate = values(rank, 9, torch.complex64).conj()
    equal(
        hvd.allreduce(conjugate, op=hvd.Sum),
        expected("Sum", size, 9, torch.complex64).conj().resolve_conj(),
        "conjugate view",
    )


def check_strided_in_place(hvd: Any) -> None:
    """Writes go through to the tensor that was given, and only there."""
    rank, size = hvd.rank(), hvd.size()
    for name, given in _layouts(rank).items():
        strides, address = given.stride(), given.data_ptr()
        want = torch.stack([_layouts(other)[name] for other in range(size)]).sum(0)
        returned = hvd.allreduce_(given, op=hvd.Sum)
        equal(given, want, f"{name} in place")
        assert returned is given, f"{name}: allreduce_ returned another tensor"
        assert (given.stride(), given.data_ptr()) == (strides, address), f"{name} was moved"
    base = values(rank, (5, 4), torch.float32)
    hvd.allreduce_(base[:, 1], op=hvd.Sum)
    want = values(rank, (5, 4), torch.float32)
    want[:, 1] = expected("Sum", size, (5, 4), torch.float32)[:, 1]
    equal(base, want, "columns beside the reduced one")


def check_in_place(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for op in ("Sum", "Average") if dtype != torch.bool else ("Sum",):
            given = values(rank, 1000, dtype)
            address = given.data_ptr()
            returned = hvd.allreduce_(given, op=getattr(hvd, op))
            assert returned is given, f"{op} {dtype}: another tensor"
            assert given.data_ptr() == address, f"{op} {dtype} moved"
            close(given, expected(op, size, 1000, dtype), f"{op} of {dtype} in place")


def check_in_place_parameter(hvd: Any) -> None:
    """A leaf that requires grad may be reduced in place: that is not a step of the graph."""
    parameter = torch.nn.Parameter(values(hvd.rank(), 11, torch.float32))
    hvd.allreduce_(parameter.data, op=hvd.Sum)
    equal(parameter.data, expected("Sum", hvd.size(), 11, torch.float32))
    assert parameter.grad_fn is None
    assert parameter.requires_grad


def check_async(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    given = values(rank, 1000, torch.float32)
    handle = hvd.allreduce_async(given, op=hvd.Sum)
    assert isinstance(handle, int), f"a handle is an int, not {type(handle)}"
    assert isinstance(hvd.poll(handle), bool)
    got = hvd.synchronize(handle)
    equal(got, expected("Sum", size, 1000, torch.float32), "async")
    equal(given, values(rank, 1000, torch.float32), "input of async")
    handle = hvd.allreduce_async_(given, op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle) is given
    equal(given, expected("Sum", size, 1000, torch.float32), "async in place")


def check_many_handles_in_reverse(hvd: Any) -> None:
    """Handles may be waited for in any order, here one that differs between ranks."""
    rank, size = hvd.rank(), hvd.size()
    count = 40
    handles = [
        hvd.allreduce_async(values(rank, 3 + 7 * i, torch.float32), op=hvd.Sum, name=f"many.{i}")
        for i in range(count)
    ]
    assert len(set(handles)) == count, "handles are not distinct"
    order = list(reversed(range(count)))
    order = order[rank:] + order[:rank]
    for i in order:
        equal(hvd.synchronize(handles[i]), expected("Sum", size, 3 + 7 * i, torch.float32), f"{i}")


def check_name_reuse(hvd: Any) -> None:
    """A name is free again once its operation has been waited for; also for another shape."""
    rank, size = hvd.rank(), hvd.size()
    for length in (5, 5, 9, 5):
        got = hvd.allreduce(values(rank, length, torch.float32), op=hvd.Sum, name="the same")
        equal(got, expected("Sum", size, length, torch.float32), f"length {length}")
    got = hvd.allreduce(values(rank, 5, torch.int64), op=hvd.Max, name="the same")
    equal(got, expected("Max", size, 5, torch.int64), "other dtype and op")


def check_scale_factors(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        given = values(rank, 1000, dtype)
        total = expected("Sum", size, 1000, dtype)
        got = hvd.allreduce(given, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        close(got, total * 2, f"Sum of {dtype} with both factors")
        got = hvd.allreduce(given, op=hvd.Average, prescale_factor=2.0)
        close(got, (total.double() * 2 / size).to(dtype), f"Average of {dtype}, prescaled")
        got = hvd.allreduce(given, op=hvd.Max, postscale_factor=2.0)
        close(got, expected("Max", size, 1000, dtype) * 2, f"Max of {dtype}, postscaled")
        equal(given, values(rank, 1000, dtype), "input")
        hvd.allreduce_(given, op=hvd.Sum, prescale_factor=0.25)
        close(given, total / 4, f"Sum of {dtype} in place, prescaled")


def check_average_argument(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    given = values(rank, 6, torch.float64)
    with warns(DeprecationWarning, "op"):
        got = hvd.allreduce(given, average=False)
    equal(got, expected("Sum", size, 6, torch.float64), "average=False")
    with warns(DeprecationWarning, "op"):
        got = hvd.allreduce(given, average=True)
    close(got, expected("Average", size, 6, torch.float64), "average=True")
    with no_warnings():
        hvd.allreduce(given, op=hvd.Sum)
    for function in (
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allreduce_async,
        hvd.allreduce_async_,
    ):
        with raises(ValueError, "op", "average"):
            function(given, average=True, op=hvd.Sum)
    for function in (hvd.grouped_allreduce, hvd.grouped_allreduce_async_):
        with raises(ValueError, "op", "average"):
            function([given], average=True, op=hvd.Sum)
    equal(given, values(rank, 6, torch.float64), "input")


def check_unsupported(hvd: Any) -> None:
    """A clear error on every rank, after which the library works."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in COMPLEX:
        for op in (hvd.Min, hvd.Max):
            with raises(ValueError, "complex"):
                hvd.allreduce(values(rank, 4, dtype), op=op)
    with raises((ValueError, TypeError)):
        hvd.allreduce(torch.eye(3).to_sparse(), op=hvd.Max)
    with raises((ValueError, TypeError)):
        hvd.allreduce("text")
    with raises((ValueError, TypeError)):
        hvd.allreduce(torch.ones(3), op="sum of all")
    # Overlapping elements cannot be written to.
    with raises((ValueError, RuntimeError)):
        hvd.allreduce_(torch.ones(3, 1).expand(3, 4), op=hvd.Sum)
    got = hvd.allreduce(values(rank, 4, torch.float32), op=hvd.Sum)
    equal(got, expected("Sum", size, 4, torch.float32), "after the errors")


def _group(rank: int) -> list[torch.Tensor]:
    return [
        values(rank, 5, torch.float32),
        values(rank, (0, 2), torch.float32),
        values(rank, (3, 4), torch.float32).t(),
        values(rank, (), torch.float32),
        values(rank, 1001, torch.float32),
    ]


def check_grouped(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    groups = [_group(other) for other in range(size)]
    wants = [torch.stack(parts).sum(0) for parts in zip(*groups, strict=True)]
    given = _group(rank)
    got = hvd.grouped_allreduce(given, op=hvd.Sum)
    assert isinstance(got, list)
    for index, want in enumerate(wants):
        equal(got[index], want, f"grouped {index}")
        equal(given[index], _group(rank)[index], f"input {index}")
    handle = hvd.grouped_allreduce_async(given, op=hvd.Sum)
    assert isinstance(hvd.poll(handle), bool)
    for index, one in enumerate(hvd.synchronize(handle)):
        equal(one, wants[index], f"grouped async {index}")
    returned = hvd.grouped_allreduce_(given, op=hvd.Sum)
    for index, want in enumerate(wants):
        equal(given[index], want, f"grouped in place {index}")
        assert returned[index] is given[index]
    given = _group(rank)
    hvd.synchronize(hvd.grouped_allreduce_async_(given, op=hvd.Average))
    for index, want in enumerate(wants):
        close(given[index], want / size, f"grouped async in place {index}")


def check_grouped_mixed_dtypes(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    dtypes = (torch.float32, torch.int64, torch.float32, torch.bfloat16, torch.uint8)
    got = hvd.grouped_allreduce([values(rank, 10, dtype) for dtype in dtypes], op=hvd.Max)
    for one, dtype in zip(got, dtypes, strict=True):
        equal(one, expected("Max", size, 10, dtype), f"{dtype} in a group")


def check_compression(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*FLOATS, torch.int32, torch.int64):
        given = values(rank, 1000, dtype)
        got = hvd.allreduce(given, op=hvd.Sum, compression=hvd.Compression.fp16)
        equal(got, expected("Sum", size, 1000, dtype), f"fp16 compression of {dtype}")
        equal(given, values(rank, 1000, dtype), "input")
    # What is rounded: the values, to float16, and nothing else.
    given = torch.full((5,), 1.0 + 2.0**-14, dtype=torch.float64)
    got = hvd.allreduce(given, op=hvd.Average, compression=hvd.Compression.fp16)
    equal(got, torch.ones(5, dtype=torch.float64), "float64 through fp16")
    integers = torch.tensor([2**30 + 1, 70000], dtype=torch.int64)
    got = hvd.allreduce(integers, op=hvd.Max, compression=hvd.Compression.fp16)
    equal(got, integers, "integers pass by")
    got = hvd.grouped_allreduce(
        [values(rank, 3, torch.float64), values(rank, 4, torch.int32)],
        op=hvd.Sum,
        compression=hvd.Compression.fp16,
    )
    equal(got[0], expected("Sum", size, 3, torch.float64), "grouped float64")
    equal(got[1], expected("Sum", size, 4, torch.int32), "grouped int32")


def check_compression_does_not_overflow(hvd: Any) -> None:
    """The sum of the ranks' 60000 is beyond float16; their average is not."""
    given = torch.full((9,), 60000.0)
    got = hvd.allreduce(given, op=hvd.Average, compression=hvd.Compression.fp16)
    equal(got, given.half().float(), "average of 60000 on every rank")


def check_compression_keeps_small_values(hvd: Any) -> None:
    """1e-7 is two steps of float16; their average over the ranks does not vanish.

    Each rank's share is rounded to float16 before the sum: half a step (2**-25) each.
    """
    small = torch.full((9,), 1e-7)
    got = hvd.allreduce(small, op=hvd.Average, compression=hvd.Compression.fp16)
    want = small.half().float()
    close(got, want, "average of 1e-7 on every rank", atol=hvd.size() * 2.0**-25)


def check_compressors(hvd: Any) -> None:
    """The compressors by themselves, as user code calls them."""
    given = torch.tensor([1.0, 2.5], dtype=torch.float64)
    packed, context = hvd.Compression.fp16.compress(given)
    assert packed.dtype == torch.float16
    equal(hvd.Compression.fp16.decompress(packed, context), given)
    packed, context = hvd.Compression.none.compress(given)
    assert packed is given
    assert hvd.Compression.none.decompress(packed, context) is given


def check_backward(hvd: Any) -> None:
    """The gradient goes through the same all-reduce: same operator, same factors."""
    rank, size = hvd.rank(), hvd.size()
    for op, factors in (
        ("Sum", {}),
        ("Average", {}),
        ("Sum", {"prescale_factor": 0.5, "postscale_factor": 4.0}),
    ):
        leaf = values(rank, 7, torch.float64).requires_grad_()
        out = hvd.allreduce(leaf * 2, op=getattr(hvd, op), **factors)
        assert out.requires_grad
        upstream = values(rank, 7, torch.float64)
        kept = upstream.clone()
        out.backward(upstream)
        want = expected(op, size, 7, torch.float64) * 2 * (2.0 if factors else 1.0)
        close(leaf.grad, want, f"gradient of {op} {factors}")
        equal(upstream, kept, "the upstream gradient was written to")
    with torch.no_grad():
        assert not hvd.allreduce(leaf, op=hvd.Sum).requires_grad
    assert not hvd.allreduce(leaf.detach(), op=hvd.Sum).requires_grad


def check_grouped_backward(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    first = values(rank, 3, torch.float64).requires_grad_()
    second = values(rank, (2, 2), torch.float64).requires_grad_()
    outs = hvd.grouped_allreduce([first, second], op=hvd.Sum)
    (outs[0].sum() * (rank + 1) + (outs[1] * 3).sum()).backward()
    total = float(size * (size + 1) // 2)
    equal(first.grad, torch.full((3,), total, dtype=torch.float64), "first of the group")
    equal(second.grad, torch.full((2, 2), 3.0 * size, dtype=torch.float64), "second")


def check_long_vector(hvd: Any) -> None:
    """Long enough for several segments of any pipelined algorithm, and odd."""
    rank, size = hvd.rank(), hvd.size()
    count = 3 * 2**20 + 5
    index = torch.arange(count, dtype=torch.float32)
    given = index % 1021 + rank
    got = hvd.allreduce(given, op=hvd.Sum)
    equal(got, (index % 1021) * size + size * (size - 1) / 2, "3 Mi + 5 elements")
    same_on_all_ranks(got)


@several
def check_floats_agree_to_the_bit(hvd: Any) -> None:
    """Sums whose value depends on the order of addition are still the same on every rank."""
    rank = hvd.rank()
    generator = torch.Generator().manual_seed(rank)
    for length in (*lengths(hvd.size()), 65537):
        for dtype in FLOATS:
            given = torch.randn(length, generator=generator, dtype=torch.float64)
            given = (given * 10.0 ** (rank - 2)).to(dtype)
            for op in (hvd.Sum, hvd.Average):
                same_on_all_ranks(hvd.allreduce(given, op=op), what=f"{length} {dtype}")
