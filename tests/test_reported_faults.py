"""Faults that users of such libraries reported in public, and what tests each of them.

:data:`ENTRIES` is the list. An entry BNN is tested by functions that bear its number, which are
``check_bNN_…`` in ``checks/reported_faults.py`` and ``test_bNN_…`` here, or by tests that were
there already (:data:`COVERED`). What cannot be tested yet has its reason in :data:`NEEDS_GPU` or
:data:`LATER`. The first test makes sure that nothing is forgotten.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import harness
import pytest
import torch
from checks import CHECKS
from conftest import need
from test_failures import PATIENCE, start

import unidist
from unidist.launch import Launch

ENTRIES = {
    1: "bfloat16 refused",
    2: "int8, uint8 and bool refused by allreduce",
    3: "Average of integers",
    5: "channels_last parameters refused",
    6: "strided tensors: wrong elements",
    8: "complex tensors",
    9: "tensors without elements end the process",
    11: "tensors without dimensions",
    12: "allgather of different first dimensions",
    13: "several parameter groups without names",
    14: "more names than parameters, and fewer",
    15: "two optimizers with equal names",
    16: "gradients that reach the other optimizer",
    18: "an epoch that is no multiple of the window",
    19: "what accumulating gradients means",
    20: "synchronize() and step() reduced twice",
    21: "GradScaler",
    22: "zero_grad(set_to_none=True)",
    23: "unused parameters",
    24: "another order of gradients on every rank",
    25: "sparse gradients",
    26: "wrapping loses state",
    27: "optimizers of one's own",
    29: "pickling",
    30: "schedulers",
    32: "groups",
    33: "float16 overflows",
    34: "Compression.fp16 on the CPU",
    36: "Adasum",
    38: "no_sync",
    39: "only rank 0 loads a checkpoint",
    40: "what broadcast_optimizer_state sends",
    42: "what broadcast_parameters takes",
    43: "more than 2 GB",
    45: "join: another number of batches on every rank",
    47: "join beside allgather and broadcast",
    48: "ranks that call different operations",
    49: "a rank that dies",
    50: "shutdown and init again",
    51: "a world of one",
    52: "allreduce is not in place, and no Sum",
    53: "gradients of allgather, broadcast and others",
    55: "gloo's own average and reduce",
    57: "more ranks than devices",
    58: "every process is rank 0 of one",
    60: "a local rank beyond the visible devices",
    61: "the variables of several launchers",
    65: "threads, fork and spawn beside MPI",
    66: "device tensors through MPI",
    67: "mpirun refuses to start",
    68: "MPI without a launcher",
    69: "SyncBatchNorm",
    70: "the timeline",
    73: "process sets of an earlier world",
    74: "the wrong network interface",
    75: "no Horovod, or a broken one",
}

#: entry -> checks (topic.name) and tests (file::function) that were there for another reason
COVERED: dict[int, tuple[str, ...]] = {
    1: ("allreduce.average", "regressions.bfloat16_gradients_are_rounded_once"),
    2: ("allreduce.sum", "allreduce.min", "allreduce.max", "allreduce.extremes_of_integers"),
    3: ("allreduce.integer_average_truncates",),
    5: ("optimizer.channels_last", "functions.parameters_of_odd_kinds"),
    6: ("allreduce.strided_in_place", "gather_broadcast.broadcast_strided"),
    8: ("allreduce.sum", "allreduce.average", "allreduce.unsupported"),
    9: ("allreduce.empty", "gather_broadcast.allgather_empty"),
    11: ("allreduce.zero_dim", "gather_broadcast.allgather_zero_dim_is_an_error"),
    12: ("gather_broadcast.allgather_different_rows",),
    13: (
        "optimizer.several_groups_without_names",
        "optimizer_adasum.several_groups_without_names",
    ),
    14: (
        "optimizer.more_names_than_parameters",
        "optimizer.frozen_parameters",
        "optimizer.bad_arguments",
    ),
    15: ("optimizer.two_optimizers_with_equal_names",),
    16: ("regressions.gradients_taken_away_without_a_step",),
    18: ("optimizer.incomplete_window", "optimizer.zero_grad_within_window"),
    19: ("optimizer.two_passes", "optimizer.three_passes"),
    20: ("optimizer.clipping", "optimizer.step_after_synchronize_warns"),
    21: ("optimizer.grad_scaler",),
    22: ("optimizer.zero_grad", "regressions.zero_grad_without_arguments"),
    23: (
        "optimizer.rank_dependent_branches",
        "optimizer.rank_dependent_branches_with_zeroed_gradients",
        "optimizer.rank_without_any_gradient",
    ),
    24: ("optimizer.random_branches", "regressions.two_optimizers_and_a_missing_gradient"),
    25: (
        "optimizer_sparse.sgd",
        "optimizer_sparse.sgd_as_dense",
        "optimizer_sparse.sparse_adam",
        "optimizer_sparse.sparse_adam_as_dense",
        "optimizer_sparse.rank_without_gradient",
        "regressions.sparse_parameter_that_nobody_used",
    ),
    26: (
        "optimizer_wrapping.adagrad_initial_value",
        "optimizer_wrapping.state_survives",
        "optimizer_adasum.keeps_state",
    ),
    27: (
        "optimizer_wrapping.demanding_constructor",
        "optimizer_wrapping.class",
        "optimizer.bad_arguments",
    ),
    29: ("optimizer_wrapping.pickle", "optimizer_wrapping.deepcopy"),
    30: ("optimizer_wrapping.schedulers", "optimizer_wrapping.options_are_shared"),
    32: ("optimizer.explicit_groups", "optimizer.groups_with_missing_gradient"),
    33: (
        "allreduce.compression_does_not_overflow",
        "allreduce.compression_keeps_small_values",
        "optimizer.fp16_compression_does_not_overflow",
        "optimizer.predivide",
    ),
    34: (
        "optimizer.fp16_compression",
        "allreduce.compression",
        "test_examples.py::test_options",
    ),
    36: (
        "adasum.equal_vectors_give_their_mean",
        "adasum.orthogonal_vectors_give_their_sum",
        "adasum.zeros",
        "adasum.other_dtypes",
    ),
    38: ("optimizer.set_passes",),
    39: (
        "functions.adamw_trained_on_rank_0",
        "functions.all_fresh",
        "functions.root_fresh_others_trained",
    ),
    40: (
        "functions.options",
        "functions.adam_trained_on_last_rank",
        "functions.sgd_without_state",
    ),
    42: (
        "functions.parameters_of_every_kind",
        "functions.parameters_in_different_order",
        "functions.parameters_of_odd_kinds",
    ),
    45: ("join.uneven_batches", "join.no_batch_before_the_first_step", "join.several_epochs"),
    47: ("join.operations_while_a_rank_has_joined", "join.operations_under_way_when_a_rank_joins"),
    48: (
        "test_failures.py::test_late_peer_is_an_error_within_the_timeout",
        "test_stalls.py::test_a_rank_that_never_calls",
        "test_stalls.py::test_a_rank_that_waits_in_another_operation",
    ),
    49: (
        "test_failures.py::test_rank_that_dies_ends_the_job",
        "test_failures.py::test_script_without_shutdown_ends_cleanly_and_quietly",
    ),
    50: (
        "basics.shutdown_and_init_again",
        "basics.init_again_changes_nothing",
        "test_failures.py::test_operations_before_init_are_refused",
        "test_failures.py::test_script_without_shutdown_ends_cleanly_and_quietly",
    ),
    52: ("allreduce.sum", "allreduce.default_is_average", "allreduce.average_argument"),
    53: (
        "allreduce.backward",
        "gather_broadcast.allgather_backward",
        "gather_broadcast.broadcast_backward",
    ),
    55: ("allreduce.average", "allreduce.floats_agree_to_the_bit"),
    58: (
        "test_failures.py::test_singleton_under_a_launcher_of_four",
        "test_failures.py::test_mpirun_of_another_mpi",
        "test_failures.py::test_serial_under_a_launcher_of_four",
    ),
    61: ("test_launch.py::test_place", "test_launch.py::test_fault"),
    65: ("test_import.py::test_import_starts_nothing",),
    69: (
        "sync_batch_norm.is_torchs_on_the_joined_batch",
        "sync_batch_norm.training_is_that_of_one_process",
        "sync_batch_norm.layers_in_another_order_on_each_rank",
        "sync_batch_norm.an_empty_batch_on_one_rank",
    ),
    70: (
        "timeline.from_init_to_shutdown",
        "timeline.started_and_stopped",
        "timeline.a_path_that_cannot_be_written",
        "test_timeline.py::test_an_interrupted_job_leaves_a_whole_file",
        "test_timeline.py::test_the_file_is_whole_after_every_write",
    ),
    73: ("elastic.run_goes_on_after_a_failure",),
    75: ("test_failures.py::test_missing_or_broken_horovod",),
}

#: entry -> what of it cannot be seen without a device
NEEDS_GPU = {
    57: "two ranks that both see one device, which may be the same one or not",
    60: "that each rank's first CUDA call is on its own device",
    66: "CUDA tensors through MPI, with kernels under way on a side stream",
}

#: entry -> what of it waits for a part of the library that is not there yet
LATER = {
    67: "there is no launcher helper yet that could set Open MPI's flags; the README names them",
}

HERE = Path(__file__).resolve().parent


# -- nothing is forgotten -------------------------------------------------------------------------


@functools.cache
def _functions(file: str) -> frozenset[str]:
    """The names of a test file's functions."""
    path = HERE / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(), str(path))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def _exists(identifier: str) -> bool:
    file, separator, function = identifier.partition("::")
    return function in _functions(file) if separator else identifier in CHECKS


def _numbers(names: list[str], pattern: str) -> set[int]:
    return {int(found[1]) for name in names if (found := re.match(pattern, name))}


def test_every_entry_is_tested() -> None:
    checks = _numbers(list(CHECKS), r"reported_faults\.b(\d\d)_")
    tests = _numbers(sorted(_functions(Path(__file__).name)), r"test_b(\d\d)_")
    unknown = (checks | tests | set(COVERED) | set(NEEDS_GPU) | set(LATER)) - set(ENTRIES)
    assert not unknown, f"not in the list: {sorted(unknown)}"
    missing = set(ENTRIES) - checks - tests - set(COVERED) - set(NEEDS_GPU) - set(LATER)
    assert not missing, f"not tested: {[f'B{n:02} {ENTRIES[n]}' for n in sorted(missing)]}"
    gone = [name for names in COVERED.values() for name in names if not _exists(name)]
    assert not gone, f"tests that do not exist: {gone}"


# -- more than 2 GB -------------------------------------------------------------------------------

LARGE = """
import torch
import unidist as hvd
hvd.init(backend=BACKEND, timeout=120)
rank, size, count = hvd.rank(), hvd.size(), 2_200_000_000

def ends(tensor):
    return tensor[0].item(), tensor[len(tensor) // 2].item(), tensor[-1].item()

given = torch.full((count,), rank + 1, dtype=torch.uint8)
hvd.broadcast_(given, size - 1)
assert ends(given) == (size,) * 3, f"broadcast: {ends(given)}"
hvd.allreduce_(given, op=hvd.Sum)
assert ends(given) == (size * size,) * 3, f"allreduce: {ends(given)}"
del given
got = hvd.allgather(torch.full((count // size,), rank + 1, dtype=torch.uint8))
assert ends(got) == (1, size // 2 + 1, size), f"allgather: {ends(got)}"
del got
thing = hvd.broadcast_object(bytes([rank + 1]) * count, 0)
assert len(thing) == count and thing[-1] == 1, "broadcast_object"
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "horovod-gloo", "horovod-mpi", "mpi", "mpi-openmpi"])
def test_b43_more_than_two_gigabytes(engine: str) -> None:
    """horovod's int32 length, mpi4py#119, pytorch PR #70605: negative sizes. Takes 16 GB."""
    need(engine)
    row = harness.ENGINES[engine]
    code = f"BACKEND = {row.backend!r}\n{LARGE}"
    result = harness.launch(row.launcher, 2, ["-c", code], timeout=600)
    assert result.text.count("done") == 2, result.report()


# -- ranks that wait for different things ---------------------------------------------------------

DIFFERENT = """
import os, sys
import torch
import unidist as hvd
hvd.init(backend=BACKEND, timeout=4)
hvd.allreduce(torch.ones(1), name="first")
try:
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(4), name="loss")
    else:
        hvd.broadcast(torch.ones(4), 0, name="weights")
    print("NOT REACHED")
except hvd.HorovodInternalError as error:
    print("caught:", error, flush=True)
sys.stdout.flush()
os._exit(0)
"""


def test_b48_ranks_that_wait_for_different_operations_on_horovod() -> None:
    """horovod#159, #600, #86: a deadlock. Now an error on both, in the time that init was given."""
    result = start("horovod-gloo", 2, DIFFERENT)
    assert result.returncode is not None, "the job hung: " + result.report()
    assert "NOT REACHED" not in result.text, result.report()
    for rank, name in enumerate(("loss", "weights")):
        said = result.outputs[f"rank {rank}"].partition("caught:")[2]
        assert name in said, result.report()


# -- devices ------------------------------------------------------------------------------------


def _devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let torch see so many devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("devices", "local_size", "native"),
    [(0, 2, "gloo"), (2, 4, "gloo"), (2, 2, "cpu:gloo,cuda:nccl"), (2, 1, "cpu:gloo,cuda:nccl")],
)
def test_b57_more_ranks_than_devices(
    monkeypatch: pytest.MonkeyPatch, devices: int, local_size: int, native: str
) -> None:
    """horovod#3929, #3949, ignite#2139: NCCL's "invalid usage" where two ranks share a device."""
    backend = pytest.importorskip("unidist.backends.torch_backend")
    if not torch.distributed.is_nccl_available():
        monkeypatch.setattr(backend.dist, "is_nccl_available", lambda: True)
    _devices(monkeypatch, devices)
    launch = Launch("torchrun", 0, local_size, 0, local_size)
    if 0 < devices < local_size:
        with pytest.warns(UserWarning, match=f"{local_size} ranks .* {devices} CUDA devices"):
            assert backend.TorchBackend._native_backends(launch) == native
    else:
        assert backend.TorchBackend._native_backends(launch) == native


def _example(name: str) -> ModuleType:
    path = harness.REPOSITORY / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_of_reported_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _DeviceChosen(Exception):
    pass


@pytest.mark.parametrize("name", ["mnist", "densenet"])
@pytest.mark.parametrize(
    ("local_rank", "visible", "device"), [(0, 1, 0), (1, 1, 0), (1, 2, 1), (3, 2, 1)]
)
def test_b60_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, name: str, local_rank: int, visible: int, device: int
) -> None:
    """horovod#2831, #1755, ignite#3259: "invalid device ordinal" where a task sees one device.

    The examples choose theirs among those that are visible, before anything else asks for CUDA.
    """

    def set_device(chosen: int) -> None:
        raise _DeviceChosen(chosen)

    def too_early(*arguments: object, **named: object) -> None:
        raise AssertionError("CUDA was used before the device was chosen")

    _devices(monkeypatch, visible)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "_lazy_init", too_early)
    monkeypatch.setattr(unidist, "init", lambda **_: None)
    monkeypatch.setattr(unidist, "local_rank", lambda: local_rank)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--synthetic"])
    with pytest.raises(_DeviceChosen) as caught:
        _example(name).main()
    assert caught.value.args == (device,)


# -- processes that are not ranks -----------------------------------------------------------------

# Workers of the second and third kind import this file again: importing must not start MPI.
LOADERS = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import unidist as hvd

assert "mpi4py.MPI" not in sys.modules

def main():
    hvd.init(backend=sys.argv[1], timeout=60)
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    data = TensorDataset(torch.randn(8, 4))
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=method)
        rows = 0
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            rows += len(inputs)
        total = hvd.allreduce(torch.tensor(rows), op=hvd.Sum)
        assert total.item() == 8 * hvd.size(), (method, total)
        print(method, "done", flush=True)
    hashes = hvd.allgather_object([p.tolist() for p in model.parameters()])
    assert hashes == hashes[:1] * hvd.size()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("engine", ["horovod-mpi", "mpi", "mpi-openmpi"])
def test_b65_data_loaders_with_processes(engine: str, tmp_path: Path) -> None:
    """horovod#2898, #1824, pytorch#13787: workers crashed or hung beside MPI, by fork or spawn."""
    need(engine)
    script = tmp_path / "loaders.py"
    script.write_text(LOADERS)
    row = harness.ENGINES[engine]
    result = harness.launch(row.launcher, 2, [script, row.backend], timeout=300)
    for method in ("fork", "spawn", "forkserver"):
        assert result.text.count(f"{method} done") == 2, result.report()


# -- start --------------------------------------------------------------------------------------

SINGLETON = """
import torch
import unidist as hvd
hvd.init(backend="mpi", timeout=60)
print("alone:", hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(2)).tolist())
"""


@pytest.mark.parametrize("engine", ["mpi", "mpi-openmpi"])
def test_b68_mpi_without_a_launcher(engine: str) -> None:
    """ompi#10590, #8004, mpich PR #6135: `python script.py` aborted in MPI_Init."""
    need(engine)
    variables = harness.LAUNCHERS[harness.ENGINES[engine].launcher].environment()
    result = harness.launch("none", 1, ["-c", SINGLETON], environment=variables, timeout=PATIENCE)
    assert "alone: 0 1 [1.0, 1.0]" in result.text, result.report()


# Nobody answers in the first network, which is for documentation; nobody listens at port 9.
UNREACHABLE = """
import os, time
import unidist as hvd
for address in ("192.0.2.1:29500", "127.0.0.1:9", "no.such.host.invalid:1"):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.split(":")
    begin = time.monotonic()
    try:
        hvd.init(backend="torch", timeout=2)
        print("NOT REACHED")
    except hvd.LaunchError as error:
        seconds = time.monotonic() - begin
        for word in (address, "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            assert word in str(error), (word, error)
        print(f"caught {address} took {seconds}")
    assert not hvd.is_initialized()
"""


def test_b74_address_that_cannot_be_reached() -> None:
    """horovod#2216, #765, #490: a start over several nodes hung, having taken another interface."""
    variables = {"RANK": "1", "WORLD_SIZE": "2"}
    result = harness.launch("none", 1, ["-c", UNREACHABLE], environment=variables, timeout=PATIENCE)
    lines = [line for line in result.text.splitlines() if line.startswith("caught")]
    assert len(lines) == 3, result.report()
    assert all(float(line.split()[-1]) < 15 for line in lines), result.report()


# -- what is not offered --------------------------------------------------------------------------


def test_b38_no_sync_is_not_offered() -> None:
    """pytorch#21736: it would have to cover the forward pass, too. Who adds it, tests that.

    Gradients are accumulated with ``backward_passes_per_step``.
    """
    from unidist.optimizer import DistributedMixin

    assert not hasattr(DistributedMixin, "no_sync")
    assert not hasattr(unidist, "no_sync")
