"""Any tensor to its wire and back: layouts, dtypes, aliasing, and what is refused."""

from __future__ import annotations

import pytest
import torch

from unidist.backends.base import COMMON_REDUCE_DTYPES, ReduceOp
from unidist.layout import Wire, check_reduction, check_tensor, divide_, scale_

BASE = torch.arange(24).reshape(2, 3, 4)
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "strided": lambda t: t[:, ::2, 1::2],
    "column": lambda t: t[0][:, 1],
    "scalar": lambda t: t[1, 2, 3],
    "empty": lambda t: t[:0],
    "channels_last": lambda t: t.reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
}
DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_round_trip(layout, dtype: torch.dtype, in_place: bool) -> None:
    whole = (BASE % 2 if dtype == torch.bool else BASE).to(dtype)
    tensor = layout(whole)
    before, strides = tensor.clone(), tensor.stride()
    wire = Wire(tensor, in_place)
    wire.widen(COMMON_REDUCE_DTYPES)
    assert wire.flat.is_contiguous()
    assert wire.flat.dim() == 1
    assert wire.flat.dtype in COMMON_REDUCE_DTYPES or dtype == torch.bool
    wire.flat.zero_()
    result = wire.result()
    assert result.dtype == dtype
    assert result.shape == tensor.shape
    assert not result.any()
    if in_place:
        assert not tensor.any()
        assert tensor.stride() == strides
    else:
        assert torch.equal(tensor, before)
        assert result.numel() == 0 or result.data_ptr() != tensor.data_ptr()


def test_elements_travel_in_logical_order_whatever_the_strides() -> None:
    image = torch.randn(2, 3, 4, 5)
    last = image.contiguous(memory_format=torch.channels_last)
    assert torch.equal(Wire(image, True).flat, Wire(last, True).flat)
    result = Wire(last, False).result()
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result, image)


def test_a_contiguous_tensor_in_place_is_its_own_wire() -> None:
    tensor = torch.zeros(5)
    assert Wire(tensor, True).flat.data_ptr() == tensor.data_ptr()


def test_writing_to_a_column_leaves_the_others() -> None:
    whole = torch.zeros(3, 2)
    wire = Wire(whole[:, 0], True)
    wire.flat.fill_(7)
    wire.result()
    assert whole.tolist() == [[7, 0]] * 3


def test_lazy_conjugates_and_negations_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(Wire(z.conj(), False).result(), torch.tensor([1 - 2j, 3 + 1j]))
    assert torch.equal(Wire(z.conj().imag, False).result(), torch.tensor([-2.0, 1.0]))


def test_narrow_integers_wrap_as_in_their_own_type() -> None:
    wire = Wire(torch.tensor([200, 100], dtype=torch.uint8), False)
    wire.widen(COMMON_REDUCE_DTYPES)
    wire.flat.mul_(2)
    assert wire.result().tolist() == [(400) % 256, 200]


def test_division_truncates_towards_zero_and_is_exact() -> None:
    numbers = torch.tensor([7, -7, 2**53 + 1, -(2**53) - 1])
    divide_(numbers, 2)
    assert numbers.tolist() == [3, -3, 2**52, -(2**52)]


def test_integers_are_scaled_in_double_and_truncated() -> None:
    numbers = torch.tensor([3, -3])
    scale_(numbers, 0.5)
    assert numbers.tolist() == [1, -1]


@pytest.mark.parametrize(
    ("tensor", "error", "match"),
    [
        ([1.0], TypeError, "list"),
        (torch.eye(2).to_sparse(), ValueError, "dense"),
        (torch.empty(2, device="meta"), ValueError, "meta"),
    ],
)
def test_what_no_engine_carries_is_refused(tensor, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        check_tensor(tensor, "allreduce")


def test_in_place_on_an_expanded_tensor_is_refused_and_a_copy_is_not() -> None:
    expanded = torch.ones(1).expand(3)
    with pytest.raises(ValueError, match="share memory"):
        check_tensor(expanded, "allreduce_", in_place=True)
    assert Wire(check_tensor(expanded, "allreduce"), False).result().tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "op", "average"),
    [
        (torch.complex64, ReduceOp.MIN, False),
        (torch.complex64, ReduceOp.PRODUCT, False),
        (torch.bool, ReduceOp.SUM, True),
        (torch.int32, ReduceOp.ADASUM, False),
    ],
)
def test_reductions_without_meaning_are_refused(
    dtype: torch.dtype, op: ReduceOp, average: bool
) -> None:
    with pytest.raises(ValueError, match="allreduce"):
        check_reduction(torch.zeros(2, dtype=dtype), op, average, "allreduce")
