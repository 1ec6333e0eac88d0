"""Scripts that were written for Horovod, unmodified, through ``python -m unidist.horovod``.

``published/`` holds Horovod's examples, see the README there. No test needs a network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from conftest import need
from test_examples import NO_NETWORK, write_idx

RUNNER = ("-m", "unidist.horovod")
PUBLISHED = harness.REPOSITORY / "tests" / "published"


def python(
    *arguments: str | os.PathLike[str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one process that loads no torch."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=harness.clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# -- the run itself ------------------------------------------------------------------------------

PROBE = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0],
    "package": __package__, "spec": __spec__ and __spec__.name, "doc": __doc__,
    "in main": main.__dict__ is globals(), "flags": list(sys.flags),
    "folder": os.getcwd(), "warnings": sys.warnoptions, "cached": "__cached__" in globals(),
}))
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    for place in ("train.py", "package/train.py"):
        (folder / place).write_text(PROBE)
    return folder


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ((), ("train.py", "--lr", "0.1", "-m", "--", "x y")),
        (("-u", "-W", "error"), ("./package/train.py",)),
        (("-O",), ("-m", "package.train", "--help")),
    ],
    ids=["script", "options", "module"],
)
def test_a_script_sees_what_it_sees_in_a_direct_run(
    scripts: Path, options: tuple[str, ...], command: tuple[str, ...]
) -> None:
    direct = python(*options, *command, cwd=scripts)
    through = python(*options, *RUNNER, *command, cwd=scripts)
    assert through.stderr == direct.stderr == ""
    assert json.loads(through.stdout) == json.loads(direct.stdout)


ENDS = {
    "exception": "def f(x):\n    return 1 / x\n\nf(0)\n",
    "status": "import sys\nsys.exit(3)\n",
    "text": "import sys\nsys.exit('no data')\n",
    "interrupt": "raise KeyboardInterrupt\n",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_as_in_a_direct_run(tmp_path: Path, end: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDS[end])
    direct, through = python(script), python(*RUNNER, script)
    assert direct.returncode != 0
    assert (through.returncode, through.stderr) == (direct.returncode, direct.stderr)


def test_the_runner_is_quick_and_tells_its_usage() -> None:
    help_ = python("-X", "importtime", *RUNNER, "--help")
    assert help_.returncode == 0
    assert help_.stdout.startswith("usage: python -m unidist.horovod SCRIPT")
    loaded = {line.rpartition("|")[2].strip() for line in help_.stderr.splitlines()}
    assert "unidist" in loaded
    assert "torch" not in loaded, "torch is loaded once, by the script"
    nothing = python(*RUNNER)
    assert nothing.returncode == 2
    assert nothing.stderr == help_.stdout
    isolated = python("-E", *RUNNER, "train.py")
    assert isolated.returncode == 1
    assert "PYTHONPATH" in isolated.stderr


def test_outside_of_a_run_horovod_is_the_installed_one_or_none() -> None:
    code = (
        "import importlib.util as u, sys; found = u.find_spec('horovod'); "
        "print(found and found.origin)"
    )
    assert "horovod_shim" not in python("-c", code).stdout
    assert "horovod_shim" in python(*RUNNER, "-c", code).stdout


# -- imports -------------------------------------------------------------------------------------

IMPORTS = """
import importlib, subprocess, sys
import unidist
import horovod
import horovod.torch
import horovod.torch as hvd
from horovod.common.basics import HorovodBasics
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import env, gloo_built, mpi_built, num_rank_is_power_2, split_list
from horovod.torch import DistributedOptimizer, elastic
from horovod.torch.compression import Compression, Compressor, FP16Compressor
from horovod.torch.elastic import ElasticSampler, TorchState, run
from horovod.torch.elastic.sampler import ElasticSampler as ElasticSampler2
from horovod.torch.elastic.state import ModelStateHandler, get_handler_registry
from horovod.torch.functions import broadcast_object, broadcast_parameters
from horovod.torch.mpi_ops import allreduce_async_, handle_average_backwards_compatibility, size
from horovod.torch.optimizer import DistributedOptimizer as DistributedOptimizer2
from horovod.torch.sync_batch_norm import SyncBatchNorm

assert "mpi4py" not in sys.modules and not hvd.is_initialized(), "importing starts nothing"
for name in unidist.__all__:
    if name not in ("elastic", "mpi_ops"):
        assert getattr(hvd, name) is getattr(unidist, name), name
assert hvd.elastic is elastic is horovod.torch.elastic and hvd.elastic.run is run
assert run is unidist.elastic.run and State is unidist.elastic.State
assert ElasticSampler2 is ElasticSampler is unidist.elastic.ElasticSampler
assert hvd.mpi_ops.allreduce is hvd.allreduce and size is unidist.size
assert hvd.compression.Compression is Compression is unidist.Compression
assert hvd.functions.broadcast_object is broadcast_object is unidist.broadcast_object
assert hvd.optimizer.DistributedOptimizer is DistributedOptimizer2 is DistributedOptimizer
assert hvd.sync_batch_norm.SyncBatchNorm is SyncBatchNorm is unidist.SyncBatchNorm
assert HorovodInternalError is hvd.HorovodInternalError is unidist.HorovodInternalError
assert HostsUpdatedInterrupt(True).skip_sync is True
assert global_process_set is hvd.global_process_set
assert handle_average_backwards_compatibility(None, None) is hvd.Average
assert split_list(list(range(5)), 2) == [[0, 1, 2], [3, 4]]
assert num_rank_is_power_2(4) and not num_rank_is_power_2(6)
assert gloo_built() is unidist.gloo_built()
with env(UNIDIST_TEST_VARIABLE="here"):
    assert __import__("os").environ["UNIDIST_TEST_VARIABLE"] == "here"
assert "UNIDIST_TEST_VARIABLE" not in __import__("os").environ
assert tuple(map(int, horovod.__version__.split("."))) >= (0, 28)

for name in ("tensorflow", "tensorflow.keras", "keras", "mxnet", "spark", "spark.torch", "ray",
             "runner", "data"):
    try:
        importlib.import_module(f"horovod.{name}")
    except ImportError as error:
        assert "only horovod.torch is offered" in str(error), error
        assert f"horovod.{name.split('.')[0]}" in str(error), error
    else:
        raise AssertionError(name)
try:
    horovod.run(print, np=2)
except NotImplementedError as error:
    assert "torchrun" in str(error)

# Processes that a script starts are part of the run.
child = [sys.executable, "-c", "import horovod; print(horovod.__unidist__)"]
assert subprocess.run(child, capture_output=True, text=True, check=True).stdout == "True\\n"

hvd.init()
assert (hvd.rank(), hvd.size()) == (0, HorovodBasics(__file__, "mpi_lib_v2").size()) == (0, 1)
print("all is there")
"""


def test_every_import_of_a_script_is_answered(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IMPORTS)
    result = harness.launch("none", 1, [*RUNNER, script])
    assert result.outputs["rank 0"].splitlines() == ["all is there"]


# -- several ranks -------------------------------------------------------------------------------

WORKERS = '''
"""Loads its data in processes that import all of this again; then rank 1 fails."""
import sys

import torch
import torch.utils.data
import horovod
import horovod.torch as hvd


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        assert horovod.__unidist__ and not hvd.is_initialized()
        assert __name__ == "__mp_main__", __name__
        return index * index


def main():
    hvd.init()
    assert sys.argv[1:] == ["--epochs", "1"], sys.argv
    # One method a rank: each process takes seconds to import torch.
    method, workers = [("spawn", 2), ("forkserver", 1)][hvd.rank()]
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=2, num_workers=workers, multiprocessing_context=method)
    for step, batch in enumerate(loader):
        total = hvd.allreduce(batch, op=hvd.Sum)
        print(method, "loaded", total.tolist(), flush=True)
        if step == 1 and hvd.rank() == 1:
            raise ValueError("rank 1 gives up")  # the workers are alive


if __name__ == "__main__":
    main()
'''


def test_workers_of_a_loader_and_an_uncaught_exception(tmp_path: Path) -> None:
    need("torch")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(WORKERS)
    result = harness.launch(
        "torchrun",
        2,
        [*RUNNER, "-m", "package.train", "--epochs", "1"],
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode not in (0, None), result.report()
    assert not result.left, result.report()
    failed = result.outputs["rank 1"]
    for squares in ([0, 2], [8, 18]):
        assert f"spawn loaded {squares}" in result.outputs["rank 0"], result.report()
        assert f"forkserver loaded {squares}" in failed, result.report()
    assert "spawn loaded [32, 50]" not in result.outputs["rank 0"], result.report()
    begin = failed.index("Traceback (most recent call last)")
    end = failed.index("ValueError: rank 1 gives up")
    assert "unidist" not in failed[begin:end], failed
    assert "rank 1 of 2 ended by an uncaught ValueError; ending the job." in failed[end:], failed


BACKEND = """
import sys
import torch
import horovod.torch as hvd

hvd.init()
from unidist.backends import horovod_backend

real = horovod_backend.hvd
assert "horovod_shim" in hvd.__file__ and "horovod_shim" not in real.__file__
assert real.is_initialized() and hvd.size() == real.size() == 1
assert sys.modules["horovod.torch"] is hvd and real.allreduce is not hvd.allreduce
assert hvd.allreduce(torch.ones(3), op=hvd.Sum).equal(torch.ones(3))

# A function of Horovod that imports its own modules when it is called.
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
wrapped = real.DistributedOptimizer(optimizer)
real.broadcast_optimizer_state(wrapped, 0)
names = real.broadcast_optimizer_state.__builtins__["__import__"]
module = names("horovod.torch.elastic.state", fromlist=["TorchState"])
assert "horovod_shim" not in module.__file__, module.__file__
import horovod.torch.elastic.state
assert "horovod_shim" in horovod.torch.elastic.state.__file__
assert sys.modules["horovod.torch"] is hvd and "horovod_shim" in sys.path[1]
try:
    import horovod.runner
except ImportError:
    print("both are there")
"""


def test_the_horovod_backend_finds_the_real_one_behind(tmp_path: Path) -> None:
    need("horovod-alone")
    script = tmp_path / "train.py"
    script.write_text(BACKEND)
    result = harness.launch(
        "none", 1, [*RUNNER, script], environment={"UNIDIST_BACKEND": "horovod"}
    )
    assert "both are there" in result.outputs["rank 0"]


# -- Horovod's examples --------------------------------------------------------------------------


def run_published(engine: str, name: str, *options: str | Path, folder: Path) -> dict[str, str]:
    """Run an example on two ranks; returns what each printed."""
    need(engine)
    row = harness.ENGINES[engine]
    result = harness.launch(
        row.launcher,
        2,
        [*RUNNER, PUBLISHED / name, "--no-cuda", *options],
        environment={**NO_NETWORK, "HOME": str(folder)},
        timeout=300,
        cwd=folder,
    )
    return result.outputs


def test_published_mnist(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 96), ("t10k", 32)):
        images = torch.randint(256, (count, 28, 28), dtype=torch.uint8)
        labels = torch.randint(10, (count,), dtype=torch.uint8)
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels)
    small = ["--epochs", "2", "--batch-size", "8", "--test-batch-size", "16", "--log-interval", "1"]
    outputs = run_published(
        "torch", "pytorch_mnist.py", "--data-dir", tmp_path, *small, folder=tmp_path
    )
    for rank in (0, 1):
        assert outputs[f"rank {rank}"].count("Train Epoch: 2 ") == 6
    assert outputs["rank 0"].count("Test set: Average loss") == 2
    assert "Test set" not in outputs["rank 1"]


def test_published_synthetic_benchmark(tmp_path: Path) -> None:
    small = ["--model", "resnet18", "--batch-size", "2", "--num-warmup-batches", "1"]
    small += ["--num-batches-per-iter", "1", "--num-iters", "2", "--fp16-allreduce"]
    outputs = run_published("mpi", "pytorch_synthetic_benchmark.py", *small, folder=tmp_path)
    assert "Number of CPUs: 2" in outputs["rank 0"]
    assert "Total img/sec on 2 CPU(s):" in outputs["rank 0"]
    assert "img/sec" not in outputs["rank 1"]


def test_published_imagenet(tmp_path: Path) -> None:
    from torchvision.transforms.functional import to_pil_image

    for part, count in (("train", 4), ("val", 2)):
        for kind in ("cat", "dog"):
            folder = tmp_path / part / kind
            folder.mkdir(parents=True)
            for index in range(count):
                image = to_pil_image(torch.randint(256, (3, 64, 64), dtype=torch.uint8))
                image.save(folder / f"{index}.png")
    small = ["--epochs", "1", "--batch-size", "2", "--val-batch-size", "2"]
    small += ["--batches-per-allreduce", "2", "--log-dir", str(tmp_path / "logs")]
    outputs = run_published(
        "horovod-gloo",
        "pytorch_imagenet_resnet50.py",
        *("--train-dir", tmp_path / "train", "--val-dir", tmp_path / "val"),
        *small,
        folder=tmp_path,
    )
    assert "Validate Epoch  #1: 100%" in outputs["rank 0"]
    assert "Epoch" not in outputs["rank 1"]
    saved = torch.load(tmp_path / "checkpoint-1.pth.tar")
    assert saved["optimizer"]["state"], "a step was taken"
    assert list((tmp_path / "logs").iterdir())
