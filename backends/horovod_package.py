"""Finds the real Horovod, also where ``import horovod`` means unidist.

In a run of ``python -m unidist.horovod`` the script's ``horovod`` is a package of unidist's own
(the folder ``horovod_shim``). The horovod backend needs the one behind it, so two packages of one
name live in the process: the script's in ``sys.modules``, and the real one beside it. They change
places while the real one imports::

                      sys.modules["horovod*"]   sys.path
    script runs       unidist's                 horovod_shim, ..., site-packages
    Horovod imports   Horovod's                 ..., site-packages

Horovod's functions import its own modules when they are called, too. Their ``__import__`` is
therefore replaced by one that changes places for that moment.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

SHIM = "horovod_shim"

_lock = threading.RLock()
_depth = 0
#: Horovod's modules, while those of unidist have their names
_hidden: dict[str, ModuleType] = {}


def import_horovod() -> Any:
    """Return Horovod's own ``horovod.torch``.

    Raises:
        ImportError: it is not installed; a broken one raises whatever its loader raises.
    """
    if not any(_is_shim(entry) for entry in sys.path):
        return importlib.import_module("horovod.torch")
    with _real_horovod():
        return importlib.import_module("horovod.torch")


def _is_shim(entry: str) -> bool:
    return os.path.basename(os.path.normpath(entry)) == SHIM


def _of_horovod(name: str) -> bool:
    return name == "horovod" or name.startswith("horovod.")


def _take_modules() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _of_horovod(name)}


@contextmanager
def _real_horovod() -> Iterator[None]:
    """In the block ``import horovod`` finds the real one; then unidist's modules are back."""
    global _depth, _hidden
    with _lock:
        if _depth:  # Horovod's modules import each other
            yield
            return
        _depth += 1
        ours = _take_modules()
        sys.modules.update(_hidden)
        removed = [(i, entry) for i, entry in enumerate(sys.path) if _is_shim(entry)]
        sys.path[:] = [entry for entry in sys.path if not _is_shim(entry)]
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for index, entry in removed:
                sys.path.insert(index, entry)
            _hidden = _take_modules()
            sys.modules.update(ours)
            _depth -= 1


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """What an import statement in Horovod's modules calls."""
    if level or _of_horovod(name):
        with _real_horovod():
            return builtins.__import__(name, globals, locals, fromlist, level)
    return builtins.__import__(name, globals, locals, fromlist, level)


class _Loader(SourceFileLoader):
    """Gives a module an ``__import__`` of its own; its functions take it over."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if _of_horovod(name) else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
