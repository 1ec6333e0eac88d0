"""The examples as users start them: every engine, tiny and on random images; then on real digits.

``UNIDIST_TEST_DATA`` may name a folder with MNIST (torchvision's layout): then it is trained, too.
No test needs a network, and none uses one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import harness
import pytest
import torch
from conftest import need

EXAMPLES = harness.REPOSITORY / "examples"
MNIST = EXAMPLES / "mnist.py"
DENSENET = EXAMPLES / "densenet.py"
MNIST_DATA = os.environ.get("UNIDIST_TEST_DATA")

TINY = {
    MNIST: ["--synthetic", "--no-cuda", "--max-steps", "6", "--batch-size", "16"],
    DENSENET: ["--synthetic", "--no-cuda", "--max-steps", "3", "--batch-size", "4"],
}
# Nothing listens there: a download fails at once, whether or not there is a network.
NO_NETWORK = {
    name: "" if name.startswith("no") else "http://127.0.0.1:9"
    for lower in ("http_proxy", "https_proxy", "no_proxy")
    for name in (lower, lower.upper())
}


def train(
    engine: str, size: int, script: Path, *options: str | os.PathLike[str], timeout: float = 300
) -> str:
    """Run an example on an engine of the table; returns what rank 0 printed."""
    need(engine)
    row = harness.ENGINES[engine]
    result = harness.launch(
        row.launcher,
        size,
        [script, "--backend", row.backend, *options],
        environment=NO_NETWORK,
        timeout=timeout,
    )
    for rank in range(1, size):  # torch's own warnings on stderr are not the examples' words
        assert "Epoch" not in result.outputs[f"rank {rank}"], "only rank 0 prints"
    text = result.outputs["rank 0"]
    assert f"Parameters are equal on {size} rank(s)" in text, text
    return text


def found(pattern: str, text: str) -> str:
    matches = re.findall(pattern, text)
    assert matches, f"no {pattern} in:\n{text}"
    return matches[-1]


@functools.cache
def fingerprint(engine: str, size: int, script: Path) -> str:
    return found(r"sha256 (\w{64})", train(engine, size, script, *TINY[script]))


@pytest.mark.parametrize("engine", ["horovod-gloo", "mpi", "mpi-openmpi"])
def test_mnist_ends_with_the_same_bits_as_on_torch(engine: str) -> None:
    assert fingerprint(engine, 2, MNIST) == fingerprint("torch", 2, MNIST)


@pytest.mark.parametrize("engine", ["horovod-mpi"])
def test_densenet_ends_with_the_same_bits_as_on_torch(engine: str) -> None:
    assert fingerprint(engine, 2, DENSENET) == fingerprint("torch", 2, DENSENET)


def test_densenet_reports_images_per_second() -> None:
    text = train("serial", 1, DENSENET, *TINY[DENSENET])
    assert float(found(r"([\d.]+) images/s on all ranks", text)) > 0


@functools.cache
def one_process(folder: Path) -> dict[str, torch.Tensor]:
    return state_after("serial", 1, folder)


def state_after(engine: str, size: int, folder: Path) -> dict[str, torch.Tensor]:
    """Train without dropout on batches of 48 images over all ranks, with one learning rate."""
    file = folder / f"{engine}-{size}.pt"
    common = ["--synthetic", "--no-cuda", "--no-dropout", "--max-steps", "10", "--save", file]
    train(engine, size, MNIST, *common, "--batch-size", f"{48 // size}", "--lr", f"{0.06 / size}")
    state: dict[str, torch.Tensor] = torch.load(file)
    return state


@pytest.mark.parametrize(("engine", "size"), [("torch", 2), ("mpi", 3)])
def test_ranks_together_equal_one_process(
    engine: str, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    expected, actual = one_process(folder), state_after(engine, size, folder)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("torch", ["--use-adasum"]),
        ("mpi", ["--use-adasum", "--fp16-allreduce"]),
        ("horovod-gloo", ["--fp16-allreduce", "--gradient-predivide-factor", "2"]),
    ],
)
def test_options(engine: str, options: list[str]) -> None:
    train(engine, 2, MNIST, *TINY[MNIST], *options)


def test_without_mnist_and_network_the_digits_are_learnt(tmp_path: Path) -> None:
    text = train("mpi", 2, MNIST, "--no-cuda", "--data-dir", tmp_path, "--epochs", "15")
    assert len([line for line in text.splitlines() if "8x8 digits" in line]) == 1
    assert float(found(r"accuracy ([\d.]+)%", text)) >= 90


if MNIST_DATA:

    def test_mnist_is_learnt_in_one_epoch() -> None:
        assert MNIST_DATA is not None
        text = train("mpi", 2, MNIST, "--no-cuda", "--data-dir", MNIST_DATA, "--epochs", "1")
        assert "digits" not in text
        assert float(found(r"accuracy ([\d.]+)%", text)) >= 97


# Each rank claims other parameters, as if training had diverged.
DIVERGED = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import mnist
import unidist
mnist.fingerprint = lambda model: str(unidist.rank())
mnist.main()
"""


def test_different_parameters_end_the_job_as_failed() -> None:
    need("torch")
    result = harness.launch("torchrun", 2, ["-c", DIVERGED, *TINY[MNIST]], timeout=300, check=False)
    assert result.returncode not in (0, None)
    assert "The parameters differ between the ranks: ['0', '1']" in result.text


# -- data: in this process -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def mnist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mnist_example", MNIST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_idx(path: Path, values: torch.Tensor) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(bytes([0, 0, 8, values.dim()]) + sizes + values.numpy().tobytes())


@pytest.mark.parametrize("given", ["", "MNIST", "MNIST/raw"])
def test_data_dir_is_any_folder_around_the_files(
    mnist: ModuleType, tmp_path: Path, given: str
) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    assert mnist.find_mnist(tmp_path / given) is None
    images = torch.arange(3 * 28 * 28).remainder(256).to(torch.uint8).view(3, 28, 28)
    labels = torch.tensor([7, 0, 9], dtype=torch.uint8)
    for name in mnist.FILES:
        write_idx(raw / name, images if "images" in name else labels)

    folder = mnist.find_mnist(tmp_path / given)
    assert folder == raw
    for data in mnist.load_mnist(folder):
        assert data.tensors[1].tolist() == [7, 0, 9]
        pixels = data.tensors[0] * 0.3081 + 0.1307
        torch.testing.assert_close(pixels, images.unsqueeze(1) / 255)


# -- the README ----------------------------------------------------------------------------------


def test_the_diff_in_the_readme_makes_a_script_that_runs(tmp_path: Path) -> None:
    need("torch")
    readme = (harness.REPOSITORY / "README.md").read_text()
    diff = found(r"(?s)```diff\n(.*?)```", readme).splitlines()
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[1:] for line in diff if line[:1] != "-"))
    result = harness.launch("torchrun", 2, [script], timeout=300)
    assert "loss" in result.outputs["rank 0"]
    assert "loss" not in result.outputs["rank 1"]
