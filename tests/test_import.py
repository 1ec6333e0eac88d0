"""Importing unidist starts nothing; its public names and signatures are Horovod's."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import harness
import pytest
import tomllib
from conftest import need

import unidist

SOURCES = sorted(
    path
    for folder in ("unidist", "backends", "examples")
    for path in (harness.REPOSITORY / folder).rglob("*.py")
)

IMPORT = """
import json, os, sys, threading
before = dict(os.environ)
import torch, torch.distributed
threads = threading.active_count()
import signal
handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
hook = sys.excepthook
tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
import unidist
import unidist.backends
print(json.dumps({
    "engines": sorted(name for name in ("mpi4py", "horovod") if name in sys.modules),
    "threads": threading.active_count() - threads,
    "tasks": (len(os.listdir("/proc/self/task")) if tasks else 0) - tasks,
    "environment": sorted(k for k in set(before) | set(os.environ)
                          if before.get(k) != os.environ.get(k)),
    "process group": torch.distributed.is_initialized(),
    "handlers": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] != handlers,
    "hook": sys.excepthook is not hook,
    "initialized": unidist.is_initialized(),
}))
"""


def test_import_starts_nothing() -> None:
    result = harness.launch("none", 1, ["-W", "error", "-c", IMPORT])
    lines = result.outputs["rank 0"].splitlines()
    assert len(lines) == 1, f"importing printed something: {lines}"
    assert json.loads(lines[0]) == {
        "engines": [],
        "threads": 0,
        "tasks": 0,
        "environment": [],
        "process group": False,
        "handlers": False,
        "hook": False,
        "initialized": False,
    }


def test_public_names_are_exactly_all() -> None:
    assert len(set(unidist.__all__)) == len(unidist.__all__)
    for name in unidist.__all__:
        assert hasattr(unidist, name), name
    # What else a user could take for an offer: functions and classes that are not announced.
    offered = {
        name
        for name, value in vars(unidist).items()
        if not name.startswith("_") and (inspect.isroutine(value) or inspect.isclass(value))
    }
    assert offered <= set(unidist.__all__), sorted(offered - set(unidist.__all__))


# The functions of Horovod's torch API, with order and defaults of arguments. ``process_set`` is the
# global one by default. DEVIATIONS says where Horovod's differ.
_REDUCE = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set"
_REDUCE_COMPRESSED = (
    "average=None, name=None, compression=none, op=None, prescale_factor=1.0, "
    "postscale_factor=1.0, process_set"
)
_SCATTER = "op=Average, process_set, prescale_factor=1.0, postscale_factor=1.0"
SIGNATURES = {
    "init": "comm=None, process_sets=None, backend=None, timeout=None",
    "shutdown": "",
    "is_initialized": "",
    "backend_name": "",
    "rank": "",
    "size": "",
    "local_rank": "",
    "local_size": "",
    "cross_rank": "",
    "cross_size": "",
    "is_homogeneous": "",
    "mpi_threads_supported": "",
    "mpi_enabled": "",
    "mpi_built": "",
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "allreduce": f"tensor, {_REDUCE_COMPRESSED}",
    "allreduce_async": f"tensor, {_REDUCE}",
    "allreduce_": f"tensor, {_REDUCE}",
    "allreduce_async_": f"tensor, {_REDUCE}",
    "grouped_allreduce": f"tensors, {_REDUCE_COMPRESSED}",
    "grouped_allreduce_async": f"tensors, {_REDUCE}",
    "grouped_allreduce_": f"tensors, {_REDUCE}",
    "grouped_allreduce_async_": f"tensors, {_REDUCE}",
    "allgather": "tensor, name=None, process_set",
    "allgather_async": "tensor, name=None, process_set",
    "broadcast": "tensor, root_rank, name=None, process_set",
    "broadcast_async": "tensor, root_rank, name=None, process_set",
    "broadcast_": "tensor, root_rank, name=None, process_set",
    "broadcast_async_": "tensor, root_rank, name=None, process_set",
    "alltoall": "tensor, splits=None, name=None, process_set",
    "alltoall_async": "tensor, splits=None, name=None, process_set",
    "grouped_allgather": "tensors, name=None, process_set",
    "grouped_allgather_async": "tensors, name=None, process_set",
    "reducescatter": f"tensor, name=None, compression=none, {_SCATTER}",
    "reducescatter_async": f"tensor, name=None, {_SCATTER}",
    "grouped_reducescatter": f"tensors, name=None, compression=none, {_SCATTER}",
    "grouped_reducescatter_async": f"tensors, name=None, {_SCATTER}",
    "sparse_allreduce_async": "tensor, name, op, process_set",
    "join": "device=-1",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj=None, root_rank=0, name=None, process_set",
    "allgather_object": "obj, name=None",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, "
        "op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, "
        "sparse_as_dense=False, process_set"
    ),
}


def _signature(function: Any) -> str:
    parts = []
    for name, parameter in inspect.signature(function).parameters.items():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, name
        default = parameter.default
        is_global_set = name == "process_set" and default is unidist.global_process_set
        if is_global_set or default is inspect.Parameter.empty:
            parts.append(name)
        elif default is unidist.Compression.none:
            parts.append(f"{name}=none")
        elif default is unidist.Average:
            parts.append(f"{name}=Average")
        else:
            parts.append(f"{name}={default!r}")
    return ", ".join(parts)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_horovods(name: str) -> None:
    assert _signature(getattr(unidist, name)) == SIGNATURES[name]


def test_process_set_has_a_default() -> None:
    """``process_set`` is never required, except where it is the subject."""
    for name in SIGNATURES:
        parameters = inspect.signature(getattr(unidist, name)).parameters
        if "process_set" in parameters and not name.endswith("_process_set"):
            assert parameters["process_set"].default is unidist.global_process_set, name


def test_every_function_of_all_has_a_signature_here() -> None:
    others = {"Compression", "ProcessSet", "BackendUnavailable", "LaunchError"}
    others |= {"HorovodInternalError", "SyncBatchNorm", "global_process_set", "elastic", "mpi_ops"}
    others |= {"Adasum", "Average", "Max", "Min", "Product", "Sum"}
    assert set(unidist.__all__) == set(SIGNATURES) | others


# Where the installed Horovod differs: our signature, and why. Nothing else may.
DEVIATIONS = {
    "init": (
        "comm=None, process_sets=None, backend=None, timeout=None",
        "backend and timeout are ours; Horovod's shows *args, and takes the first two",
    ),
    "shutdown": ("", "Horovod's passes any arguments on to a function that takes none"),
    "broadcast_object": (
        "obj=None, root_rank=0, name=None, process_set=global",
        "ranks other than the root may leave obj out",
    ),
    "optimizer.zero_grad": (
        "self, *args, **kwargs",
        "set_to_none is passed on to the user's class; Horovod's takes no argument",
    ),
    "optimizer.step": (
        "self, *args, **kwargs",
        "passed on to the user's class, which may take more than the closure",
    ),
    "optimizer.load_state_dict": (
        "self, state_dict",
        "torch's own; Horovod's shows *args, and passes them on to it",
    ),
}
ABSENT = {
    "check_extension": "looks for Horovod's library; unmodified scripts have it in common.util",
    "mpi_lib_v2": "is Horovod's library",
}

# What a module with Horovod's API offers: its public names, those of the modules and classes in it
# that users use, and those of a wrapped optimizer. Runs for each in a process of its own.
DESCRIBE = """
import importlib, inspect, json, sys, types
import torch

def describe(value):
    if isinstance(value, types.ModuleType):
        return "a module"
    if not callable(value):
        return "a value"
    if inspect.isclass(value) and issubclass(value, BaseException):
        return "an error"
    parts = []
    for parameter in inspect.signature(value).parameters.values():
        text, default = str(parameter.replace(annotation=parameter.empty)), parameter.default
        if default is not parameter.empty:
            if parameter.name == "process_set":
                default = "global"
            elif parameter.name == "op" and default is hvd.Average:
                default = "Average"
            elif inspect.isclass(default):
                default = default.__name__
            text = f"{parameter.name}={default}"
        parts.append(text)
    return ", ".join(parts)

hvd = importlib.import_module(sys.argv[1])
found = {name: describe(getattr(hvd, name)) for name in dir(hvd) if not name.startswith("_")}
for path in ("ProcessSet", "SyncBatchNorm", "Compression", "Compression.fp16",
             "elastic.TorchState", "elastic.ElasticSampler", "elastic.run"):
    value = hvd
    for word in path.split("."):
        value = getattr(value, word)
    found[path] = describe(value)
    if inspect.isclass(value):
        for name in dir(value):
            if not name.startswith("_") and callable(getattr(value, name)):
                if not hasattr(torch.nn.SyncBatchNorm, name):
                    found[f"{path}.{name}"] = describe(getattr(value, name))
hvd.init()
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = type(hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1)))
for name in ("step", "zero_grad", "synchronize", "skip_synchronize", "load_state_dict",
             "set_backward_passes_per_step"):
    found["optimizer." + name] = describe(getattr(optimizer, name))
json.dump(found, open(sys.argv[2], "w"))
"""


def test_names_and_signatures_are_those_of_the_installed_horovod(tmp_path: Path) -> None:
    need("horovod-alone")
    described = []
    for module in ("horovod.torch", "unidist"):
        answer = tmp_path / f"{module}.json"
        harness.launch("none", 1, ["-c", DESCRIBE, module, answer])
        described.append(json.loads(answer.read_text()))
    theirs, ours = described
    assert len(theirs) > 90, theirs
    assert set(theirs) - set(ours) == set(ABSENT)
    differences = {
        name: ours[name] for name, want in theirs.items() if ours.get(name, want) != want
    }
    assert differences == {name: found for name, (found, _) in DEVIATIONS.items()}, theirs


def test_errors_have_the_right_ancestors() -> None:
    assert issubclass(unidist.HorovodInternalError, RuntimeError)
    assert issubclass(unidist.LaunchError, RuntimeError)
    assert issubclass(unidist.BackendUnavailable, ImportError)


def test_public_functions_have_a_docstring_and_types() -> None:
    for name in SIGNATURES:
        function = getattr(unidist, name)
        assert inspect.getdoc(function), name
        annotations = inspect.get_annotations(function)
        assert set(inspect.signature(function).parameters) <= set(annotations), name
        assert "return" in annotations, name


def test_oldest_python_can_parse_all_sources() -> None:
    """pyproject.toml promises a Python; no file may use newer syntax."""
    project = tomllib.loads((harness.REPOSITORY / "pyproject.toml").read_text())
    oldest = project["project"]["requires-python"].removeprefix(">=")
    version = tuple(int(part) for part in oldest.split("."))
    assert SOURCES
    for path in SOURCES:
        ast.parse(path.read_text(), str(path), feature_version=version)
