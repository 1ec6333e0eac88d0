"""Helpers of the checks: data that depends on the rank, comparisons that say what differs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Function = TypeVar("Function", bound=Callable[..., Any])

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*INTEGERS, torch.bool, *FLOATS, *COMPLEX)

#: seconds after which connecting, or any wait of the library under test, is an error
TIMEOUT = 30.0


# -- which world sizes --------------------------------------------------------------------------


def world(sizes: Collection[int]) -> Callable[[Function], Function]:
    """Run the check at these world sizes only."""

    def mark(function: Function) -> Function:
        function.__world__ = frozenset(sizes)  # type: ignore[attr-defined]
        return function

    return mark


def world_rule(function: Callable[..., Any]) -> frozenset[int] | None:
    return getattr(function, "__world__", None)


several = world((2, 3, 4))  # where one rank has nothing to show


# -- the library under test, and a channel between ranks that does not use it ---------------------


def connect(hvd: Any) -> None:
    """Call ``init`` the way this launch was told to."""
    if hvd.__name__ == "unidist":
        hvd.init(backend=os.environ.get("UNIDIST_TEST_BACKEND") or None, timeout=TIMEOUT)
    else:
        hvd.init(process_sets="dynamic")  # unidist can always add process sets


class Channel:
    """Messages between the ranks of one launch, through a store in the parent process."""

    def __init__(self, address: str, rank: int, size: int) -> None:
        host, port = address.rsplit(":", 1)
        self.rank = rank
        self.size = size
        self._store = dist.TCPStore(host, int(port), timeout=timedelta(seconds=60))
        self._prefix = ""
        self._comparisons = 0

    def use(self, prefix: str) -> None:
        """Start a new name space, the same on every rank."""
        self._prefix = prefix
        self._comparisons = 0

    def tell(self, key: str, value: str = "") -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def hear(self, key: str, seconds: float = TIMEOUT + 10) -> str:
        name = f"{self._prefix}/{key}"
        self._store.wait([name], timedelta(seconds=seconds))
        return str(self._store.get(name).decode())

    def everyone(self, key: str, value: str = "", seconds: float = TIMEOUT + 10) -> list[str]:
        """Tell all, and return what all told, in rank order."""
        self.tell(f"{key}/{self.rank}", value)
        return [self.hear(f"{key}/{rank}", seconds) for rank in range(self.size)]

    def compare(self, value: str) -> list[str]:
        """What all ranks gave in their n-th call of this method within the name space."""
        self._comparisons += 1
        return self.everyone(f"compare/{self._comparisons}", value)


#: set by run_checks.py
channel: Channel = None  # type: ignore[assignment]


# -- data ---------------------------------------------------------------------------------------


def lengths(size: int) -> tuple[int, ...]:
    """Lengths where splitting a vector over ``size`` ranks goes wrong first."""
    return tuple(dict.fromkeys((0, 1, size - 1, size, size + 1, 1000, 10007)))


def lengths_of(dtype: torch.dtype, size: int) -> tuple[int, ...]:
    """All of ``lengths`` for two dtypes, some for the others: splitting does not look at dtypes."""
    if dtype in (torch.float32, torch.uint8):
        return lengths(size)
    return (1, size + 1, 1000)


def values(rank: int, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Rank-dependent values from 1 to 3: sums and products of 4 ranks are exact in any dtype.

    Complex: the imaginary part is another such vector. bool: a pattern with both values.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = 1
    for extent in shape:
        count *= extent
    index = torch.arange(count, dtype=torch.int64)
    numbers = (index * 5 + rank * 7 + index // 3) % 3 + 1
    if dtype == torch.bool:
        return (numbers > 1).reshape(shape)
    if dtype.is_complex:
        imaginary = (index * 2 + rank) % 3 + 1
        real_dtype = torch.float64 if dtype == torch.complex128 else torch.float32
        return torch.complex(numbers.to(real_dtype), imaginary.to(real_dtype)).reshape(shape)
    # Signs where the dtype has them: a maximum over zeros would go unseen.
    if dtype != torch.uint8:
        numbers = torch.where((index + rank) % 4 == 0, -numbers, numbers)
    return numbers.to(dtype).reshape(shape)


def expected(
    op: str, size: int | Sequence[int], shape: int | Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """What reducing :func:`values` over ranks gives. ``size``: number of ranks, or the ranks."""
    ranks = range(size) if isinstance(size, int) else size
    parts = [values(rank, shape, dtype) for rank in ranks]
    if dtype == torch.bool:
        return reduce(torch.logical_or if op in ("Sum", "Max") else torch.logical_and, parts)
    if op == "Min":
        return reduce(torch.minimum, parts)
    if op == "Max":
        return reduce(torch.maximum, parts)
    if op == "Product":
        return reduce(torch.mul, parts)
    if op == "Sum":
        return reduce(torch.add, parts)
    assert op == "Average"
    if dtype in INTEGERS:
        wide = reduce(torch.add, [part.to(torch.int64) for part in parts])
        return torch.div(wide, len(parts), rounding_mode="trunc").to(dtype)
    wide_dtype = torch.complex128 if dtype.is_complex else torch.float64
    total = reduce(torch.add, [part.to(wide_dtype) for part in parts])
    return (total / len(parts)).to(dtype)


# -- comparisons --------------------------------------------------------------------------------


def equal(got: Any, want: Any, what: str = "") -> None:
    """Exactly equal; tensors also in dtype and shape."""
    if isinstance(want, torch.Tensor):
        _same_kind(got, want, what)
        if not torch.equal(got, want):
            _differ(got, want, what)
        return
    assert type(got) is type(want), f"{what}: got a {type(got)}, want a {type(want)}: {got!r}"
    assert got == want, f"{what}: got {got!r}, want {want!r}"


def close(
    got: torch.Tensor, want: torch.Tensor, what: str = "", rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Equal up to a tolerance; by default a few units in the last place of the dtype."""
    _same_kind(got, want, what)
    if not (want.is_floating_point() or want.is_complex()):
        equal(got, want, what)
        return
    resolution = torch.finfo(want.dtype).eps
    wide = torch.complex128 if want.is_complex() else torch.float64
    if not torch.allclose(
        got.detach().to(wide),
        want.detach().to(wide),
        rtol=rtol or 4 * resolution,
        atol=atol,
        equal_nan=True,
    ):
        _differ(got, want, what)


def _same_kind(got: Any, want: torch.Tensor, what: str) -> None:
    assert isinstance(got, torch.Tensor), f"{what}: got a {type(got).__name__}, want a tensor"
    assert got.dtype == want.dtype, f"{what}: got {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{what}: got shape {got.shape}, want {want.shape}"


def _differ(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    wrong = (got != want).reshape(-1).nonzero().reshape(-1)
    first = int(wrong[0]) if len(wrong) else 0
    a, b = got.detach().reshape(-1), want.detach().reshape(-1)
    show = slice(first, first + 6)
    raise AssertionError(
        f"{what}: {len(wrong)} of {want.numel()} elements differ, first at {first}:\n"
        f"  got  {a[show].tolist()}\n  want {b[show].tolist()} ({want.dtype}, {tuple(want.shape)})"
    )


def bits(*tensors: torch.Tensor) -> str:
    """A hash of dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{flat.dtype}{tuple(tensor.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def same_on_all_ranks(*tensors: torch.Tensor, what: str = "result") -> None:
    """The ranks hold identical bits. Asked beside the library under test, by all ranks."""
    found = channel.compare(bits(*tensors))
    assert len(set(found)) == 1, (
        f"{what}: bits differ between ranks (groups {[found.index(one) for one in found]})"
    )


@contextlib.contextmanager
def raises(
    kinds: type[BaseException] | tuple[type[BaseException], ...], *words: str
) -> Iterator[None]:
    """The block raises one of these, and the message holds all the words."""
    try:
        yield
    except kinds as error:
        text = str(error)
        missing = [word for word in words if word.lower() not in text.lower()]
        assert not missing, f"the message lacks {missing}: {text!r}"
        return
    raise AssertionError(f"nothing was raised, want {kinds}")


@contextlib.contextmanager
def warns(kind: type[Warning], *words: str) -> Iterator[None]:
    """The block issues a warning of this kind with all the words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(one.message) for one in caught if issubclass(one.category, kind)]
    assert any(all(word.lower() in text.lower() for word in words) for text in texts), (
        f"want a {kind.__name__} with {words}, got {[str(one.message) for one in caught]}"
    )


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """A warning in the block is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
