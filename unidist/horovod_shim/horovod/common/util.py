"""The helpers of Horovod's module of this name that have a meaning without its libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import unidist
from unidist.backends.errors import HorovodInternalError  # noqa: F401
from unidist.reduction import Reduction, resolve

EXTENSIONS = ["tensorflow", "torch", "mxnet"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    return ext_base_name == "torch"


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raise ImportError unless ``ext_name`` is ``horovod.torch``."""
    if ext_name != "horovod.torch":
        from horovod._only_torch import refuse

        refuse(ext_name)


def check_installed_version(name: str, version: str, exception: Any = None) -> None:
    """Nothing is built for one version of a framework."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    import torch

    return ext_base_name == "torch" and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    return unidist.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    return unidist.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    return bool(unidist.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    return unidist.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    return unidist.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for the block; those that are None stay as they are."""
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[Reduction | None, bool | None], Reduction]:
    """A function of (op, average) that returns the op that is meant."""
    return lambda op, average: resolve(op, average, "this operation")


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank != 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741
    """Split into ``n`` parts of about equal length."""
    length, rest = divmod(len(l), n)
    starts = [i * length + min(i, rest) for i in range(n + 1)]
    return [l[starts[i] : starts[i + 1]] for i in range(n)]


def is_iterable(x: Any) -> bool:
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compare a version with one of the form major.minor.patch."""
    from packaging import version

    if len(target.split(".")) != 3:
        raise ValueError(
            "is_version_greater_equal_than takes a target of the form major.minor.patch, but got "
            f"{target!r}."
        )
    return version.parse(ver) >= version.parse(target)
