"""Train a small CNN on MNIST with any number of processes: one script, any launcher, any engine.

    python examples/mnist.py                                   # one process
    torchrun --nproc_per_node 4 examples/mnist.py              # torch.distributed (gloo, nccl)
    horovodrun -np 4 python examples/mnist.py                  # Horovod
    mpirun -n 4 python examples/mnist.py                       # unidist's ring on MPI
    mpirun -n 4 python examples/mnist.py --backend torch       # another engine than the launcher's

Each line that differs from single-process code carries a comment. MNIST is read from --data-dir
(the folder that holds MNIST/raw, or the raw folder itself), else downloaded to it. Where neither
is possible, scikit-learn's 8x8 digits take its place.

N processes with batch size b take the same steps as one process with batch size N*b and learning
rate N*lr; dropout draws differ, hence --no-dropout to compare. With equal seed, number of
processes and threads per process, every engine ends with bit-identical parameters on 2 ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import socket
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import unidist as hvd  # the one import that changes

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class Net(nn.Module):
    """The network of Horovod's MNIST example."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.fc1_drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))  # [batch, 10, 12, 12]
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))  # [batch, 20, 4, 4]
        x = self.fc1_drop(F.relu(self.fc1(x.flatten(1))))
        return self.fc2(x)


# -- data ------------------------------------------------------------------------------------------
# Images are one tensor, normalised once: sixty thousand trips through PIL would take longer than
# the training does.


def find_mnist(data_dir: Path) -> Path | None:
    for folder in (data_dir / "MNIST" / "raw", data_dir / "raw", data_dir):
        if all((folder / name).is_file() for name in FILES):
            return folder
    return None


def download_mnist(data_dir: Path) -> None:
    """Download to a folder aside, so that an interrupted run leaves no half of a file behind."""
    from torchvision.datasets import MNIST  # here, since it is slow to import

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(15)  # torchvision sets none: a silent network would hang the job
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir) as aside:
            raw = Path(MNIST(aside, download=True).raw_folder)
            target = data_dir / "MNIST" / "raw"
            target.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                os.replace(raw / name, target / name)
    finally:
        socket.setdefaulttimeout(before)


def read_idx(path: Path) -> torch.Tensor:
    """Read a file of MNIST: two zero bytes, element type, number of sizes, sizes, elements."""
    data = bytearray(path.read_bytes())
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    return torch.frombuffer(data, dtype=torch.uint8, offset=start).reshape(shape)


def normalise(images: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 28, 28] -> float32 [n, 1, 28, 28], with MNIST's mean and standard deviation."""
    return images.unsqueeze(1).float().div_(255).sub_(0.1307).div_(0.3081)


def load_mnist(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    images, labels, test_images, test_labels = (read_idx(folder / name) for name in FILES)
    return (
        TensorDataset(normalise(images), labels.long()),
        TensorDataset(normalise(test_images), test_labels.long()),
    )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Scikit-learn's 1797 digits of 8x8 pixels, enlarged; every sixth is for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy(digits.images).float().unsqueeze(1).mul_(255 / 16)
    images = normalise(F.interpolate(small, size=28, mode="bilinear").squeeze(1))
    labels = torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % 6 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def load_synthetic() -> tuple[TensorDataset, TensorDataset]:
    """Noise with random labels, equal on all ranks; the odd lengths divide by no world size."""
    generator = torch.Generator().manual_seed(0)
    train, test = (
        TensorDataset(
            torch.randn(n, 1, 28, 28, generator=generator),
            torch.randint(10, (n,), generator=generator),
        )
        for n in (1021, 257)
    )
    return train, test


def load_data(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    if args.synthetic:
        return load_synthetic()
    problem = None
    if hvd.local_rank() == 0 and find_mnist(args.data_dir) is None:  # one download per host
        try:
            download_mnist(args.data_dir)
        except (ImportError, OSError, RuntimeError) as error:
            problem = str(error).strip().splitlines()[-1]
    # The other ranks wait here, and all hear of a failure: they must train on the same data.
    problems = [text for text in hvd.allgather_object(problem) if text]
    if problems:
        if hvd.rank() == 0:
            print(
                f"No MNIST in {args.data_dir} and no download ({problems[0]}): "
                "training on scikit-learn's 8x8 digits instead."
            )
        return load_digits()
    folder = find_mnist(args.data_dir)
    assert folder is not None
    return load_mnist(folder)


# -- training --------------------------------------------------------------------------------------


def train(
    epoch: int,
    steps: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    device: torch.device,
    log_interval: int,
) -> None:
    model.train()
    started = time.perf_counter()
    # A bar that redraws itself belongs on a terminal. In a log it becomes a line per report.
    terminal = sys.stderr.isatty()
    bar = tqdm(
        total=steps,
        desc=f"Epoch {epoch}",
        ncols=90,
        file=sys.stderr if terminal else io.StringIO(),
        disable=hvd.rank() != 0,  # one bar, not one per rank
    )
    total = torch.zeros((), device=device)
    for step, (images, labels) in enumerate(islice(loader, steps), start=1):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()  # gradients are averaged over the ranks meanwhile
        optimizer.step()  # waits for the averages
        total += loss.detach()
        bar.update()
        if hvd.rank() == 0 and (step % log_interval == 0 or step == steps):  # one rank reports
            bar.set_postfix(loss=f"{loss.item():.4f}")
            if not terminal:
                print(bar, file=sys.stderr, flush=True)
    bar.close()
    mean = hvd.allreduce(total / steps, name="train_loss").item()  # mean over the ranks too
    if hvd.rank() == 0:  # one rank reports
        seconds = time.perf_counter() - started
        print(f"Epoch {epoch}: training loss {mean:.4f}, {seconds:.1f} s", flush=True)


@torch.no_grad()
def evaluate(
    model: nn.Module, test_set: TensorDataset, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Return the mean loss and the share of correct answers over the whole test set."""
    model.eval()
    # Each rank takes every size-th image. DistributedSampler would count some images twice where
    # the test set does not divide by the number of ranks.
    images, labels = (t[hvd.rank() :: hvd.size()] for t in test_set.tensors)
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct answers, images
    for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        output = model(x.to(device)).cpu()
        totals[0] += F.cross_entropy(output, y, reduction="sum").item()
        totals[1] += (output.argmax(1) == y).sum().item()
        totals[2] += len(y)
    loss, correct, count = hvd.allreduce(totals, op=hvd.Sum, name="test")  # sums over all ranks
    return (loss / count).item(), (correct / count).item()


def fingerprint(model: nn.Module) -> str:
    """Hash of the bytes of all parameters: equal only if every bit is."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().cpu().numpy().tobytes())
    return sha.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="MNIST with unidist", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=64, help="images per step and rank")
    add("--test-batch-size", type=int, default=1000, help="images per evaluation step and rank")
    add("--epochs", type=int, default=5, help="passes over the training set")
    add("--lr", type=float, default=0.02, help="learning rate of one rank")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--seed", type=int, default=42, help="of weights, data order and dropout")
    add("--log-interval", type=int, default=50, help="steps between reports of the loss")
    add("--no-cuda", action="store_true", help="train on the CPU even where there is a GPU")
    add("--no-dropout", action="store_true", help="to compare N ranks with one process")
    add("--fp16-allreduce", action="store_true", help="send gradients as float16")
    add("--use-adasum", action="store_true", help="combine gradients by Adasum, not by averaging")
    add("--gradient-predivide-factor", type=float, default=1.0, help="divide by it before summing")
    add("--data-dir", type=Path, default=Path("data"), help="where MNIST is, or is downloaded to")
    add("--synthetic", action="store_true", help="random images: no data needed, nothing learnt")
    add("--max-steps", type=int, help="stop after so many steps")
    add("--save", type=Path, help="write the trained model's state_dict to this file")
    add("--backend", help="engine: torch, horovod, mpi or serial; None: the launcher's own")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    hvd.init(backend=args.backend)  # connect to the other ranks

    use_cuda = not args.no_cuda and torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())  # one GPU per rank
    device = torch.device("cuda" if use_cuda else "cpu")
    if "OMP_NUM_THREADS" not in os.environ:
        # The ranks of a host share its cores; each using all of them is many times slower.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))

    train_set, test_set = load_data(args)
    # Each rank draws its own part of the data.
    sampler: DistributedSampler = DistributedSampler(
        train_set, hvd.size(), hvd.rank(), seed=args.seed
    )
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, pin_memory=use_cuda)

    torch.manual_seed(args.seed)
    model = Net(dropout=0.0 if args.no_dropout else 0.25).to(device)
    torch.manual_seed(args.seed + hvd.rank())  # ranks drop different units

    # The batch of a step grows with the number of ranks, and the learning rate with it. Adasum
    # scales the step by itself.
    lr_scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scale, momentum=args.momentum)

    # All ranks start from rank 0's state, whether fresh or read from a checkpoint.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # From here on, step() uses gradients that are averaged over the ranks.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    if hvd.rank() == 0:  # one rank reports
        print(
            f"Training on {hvd.size()} rank(s) with {hvd.backend_name()}, {device.type}, "
            f"{torch.get_num_threads()} thread(s) "
            f"each: {len(train_set)} training and {len(test_set)} test images",
            flush=True,
        )
    left = args.epochs * len(loader) if args.max_steps is None else args.max_steps
    for epoch in range(1, args.epochs + 1):
        steps = min(left, len(loader))
        if steps <= 0:
            break
        left -= steps
        sampler.set_epoch(epoch)  # shuffle differently each epoch, equally on all ranks
        train(epoch, steps, model, optimizer, loader, device, args.log_interval)
        loss, accuracy = evaluate(model, test_set, args.test_batch_size, device)
        if hvd.rank() == 0:  # one rank reports
            print(f"Epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)

    if args.save is not None and hvd.rank() == 0:  # one rank writes
        torch.save(model.state_dict(), args.save)

    # The proof that the ranks trained one model: the same bits everywhere.
    fingerprints = hvd.allgather_object(fingerprint(model))
    if len(set(fingerprints)) > 1:
        sys.exit(f"The parameters differ between the ranks: {fingerprints}")
    if hvd.rank() == 0:  # one rank reports
        print(f"Parameters are equal on {hvd.size()} rank(s): sha256 {fingerprints[0]}")


if __name__ == "__main__":
    main()
