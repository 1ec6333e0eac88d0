"""Train DenseNet-121 with any number of processes and report images per second over all of them.

    python examples/densenet.py --max-steps 20                                  # one process
    torchrun --nproc_per_node 4 examples/densenet.py --max-steps 20             # torch.distributed
    horovodrun -np 4 python examples/densenet.py --max-steps 20                 # Horovod
    mpirun -n 4 python examples/densenet.py --max-steps 20                      # unidist's MPI ring
    mpirun -n 4 python examples/densenet.py --max-steps 20 --backend torch      # any engine

Each line that differs from single-process code carries a comment. Images are random unless
--data-dir names a folder that holds CIFAR-10 (torchvision's ``cifar-10-batches-py``) or is to hold
it: then it is downloaded there. A full epoch on a CPU takes long; --max-steps ends it early.
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
from torchvision.models import densenet121
from tqdm import tqdm

import unidist as hvd  # the one import that changes

CIFAR_FOLDER = "cifar-10-batches-py"

# -- data ------------------------------------------------------------------------------------------
# Images stay uint8 until they are used: as float32, CIFAR-10 would take 0.6 GB on every rank.


def download_cifar10(data_dir: Path) -> None:
    """Download to a folder aside, so that an interrupted run leaves no half of it behind."""
    from torchvision.datasets import CIFAR10

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(15)  # torchvision sets none: a silent network would hang the job
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir) as aside:
            CIFAR10(aside, download=True)
            os.replace(Path(aside) / CIFAR_FOLDER, data_dir / CIFAR_FOLDER)
    finally:
        socket.setdefaulttimeout(before)


def load_cifar10(data_dir: Path) -> tuple[TensorDataset, TensorDataset]:
    from torchvision.datasets import CIFAR10

    def load(train: bool) -> TensorDataset:
        cifar = CIFAR10(str(data_dir), train=train)
        images = torch.from_numpy(cifar.data).permute(0, 3, 1, 2).contiguous()  # [n, 3, 32, 32]
        return TensorDataset(images, torch.tensor(cifar.targets))

    return load(train=True), load(train=False)


def load_synthetic(size: int) -> tuple[TensorDataset, TensorDataset]:
    """Noise with random labels, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)

    def load(count: int) -> TensorDataset:
        images = torch.randint(256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
        return TensorDataset(images, torch.randint(10, (count,), generator=generator))

    return load(2048), load(256)


def load_data(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    if args.synthetic or args.data_dir is None:
        return load_synthetic(args.image_size)
    problem = None
    if hvd.local_rank() == 0 and not (args.data_dir / CIFAR_FOLDER).is_dir():  # once per host
        try:
            download_cifar10(args.data_dir)
        except (OSError, RuntimeError) as error:
            problem = str(error).strip().splitlines()[-1]
    # The other ranks wait here, and all hear of a failure: they must train on the same data.
    problems = [text for text in hvd.allgather_object(problem) if text]
    if problems:
        if hvd.rank() == 0:
            print(
                f"No CIFAR-10 in {args.data_dir} and no download ({problems[0]}): "
                "training on random images instead."
            )
        return load_synthetic(args.image_size)
    return load_cifar10(args.data_dir)


def prepare(images: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """uint8 [n, 3, h, w] -> float32 [n, 3, size, size] around zero, on the device."""
    x = images.to(device).float().div_(127.5).sub_(1)
    return x if x.shape[-1] == size else F.interpolate(x, size=size, mode="bilinear")


# -- training --------------------------------------------------------------------------------------


def train(
    epoch: int,
    steps: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    device: torch.device,
    args: argparse.Namespace,
) -> None:
    model.train()
    # A bar that redraws itself belongs on a terminal. In a log it becomes a line per report.
    terminal = sys.stderr.isatty()
    bar = tqdm(
        total=steps,
        desc=f"Epoch {epoch}",
        ncols=90,
        file=sys.stderr if terminal else io.StringIO(),
        disable=hvd.rank() != 0,  # one bar, not one per rank
    )
    warm_up = min(args.warm_up, steps - 1) if epoch == 1 else 0
    total, measured = torch.zeros((), device=device), 0
    started = time.perf_counter()
    for step, (images, labels) in enumerate(islice(loader, steps), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(prepare(images, args.image_size, device)), labels.to(device))
        loss.backward()  # gradients are averaged over the ranks meanwhile
        optimizer.step()  # waits for the averages
        total += loss.detach()
        bar.update()
        measured += len(labels)
        if step == warm_up:  # the first steps allocate memory and choose kernels
            synchronise(device)
            started, measured = time.perf_counter(), 0
        if hvd.rank() == 0 and (step % args.log_interval == 0 or step == steps):  # one reports
            bar.set_postfix(loss=f"{loss.item():.4f}")
            if not terminal:
                print(bar, file=sys.stderr, flush=True)
    bar.close()
    synchronise(device)
    own = torch.tensor(measured / (time.perf_counter() - started))
    speed = hvd.allreduce(own, op=hvd.Sum, name="speed").item()  # all ranks' images per second
    mean = hvd.allreduce(total / steps, name="train_loss").item()  # mean over the ranks too
    if hvd.rank() == 0:  # one rank reports
        print(f"Epoch {epoch}: training loss {mean:.4f}, {speed:.1f} images/s on all ranks")


@torch.no_grad()
def evaluate(
    model: nn.Module, test_set: TensorDataset, device: torch.device, args: argparse.Namespace
) -> tuple[float, float]:
    """Return the mean loss and the share of correct answers over the test set."""
    # Batch normalisation gathered its statistics on each rank's own images: use their mean.
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            hvd.allreduce_(buffer, name=f"buffer.{name}")
    model.eval()
    # Each rank takes every size-th image. DistributedSampler would count some images twice where
    # the test set does not divide by the number of ranks.
    images, labels = (t[hvd.rank() :: hvd.size()] for t in test_set.tensors)
    batches = zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True)
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct answers, images
    for x, y in islice(batches, args.max_steps):
        output = model(prepare(x, args.image_size, device)).cpu()
        totals[0] += F.cross_entropy(output, y, reduction="sum").item()
        totals[1] += (output.argmax(1) == y).sum().item()
        totals[2] += len(y)
    loss, correct, count = hvd.allreduce(totals, op=hvd.Sum, name="test")  # sums over all ranks
    return (loss / count).item(), (correct / count).item()


def synchronise(device: torch.device) -> None:
    """Wait for the GPU: a kernel that was merely launched has not taken its time yet."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fingerprint(model: nn.Module) -> str:
    """Hash of the bytes of all parameters: equal only if every bit is."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().cpu().numpy().tobytes())
    return sha.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="DenseNet-121 with unidist",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=16, help="images per step and rank")
    add("--image-size", type=int, default=32, help="edge of the images in pixels, at least 32")
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--lr", type=float, default=0.01, help="learning rate of one rank")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--seed", type=int, default=42, help="of weights and data order")
    add("--log-interval", type=int, default=10, help="steps between reports of the loss")
    add("--no-cuda", action="store_true", help="train on the CPU even where there is a GPU")
    add("--fp16-allreduce", action="store_true", help="send gradients as float16")
    add("--use-adasum", action="store_true", help="combine gradients by Adasum, not by averaging")
    add("--gradient-predivide-factor", type=float, default=1.0, help="divide by it before summing")
    add("--data-dir", type=Path, help="where CIFAR-10 is, or is downloaded to")
    add("--synthetic", action="store_true", help="random images although --data-dir is given")
    add("--max-steps", type=int, help="stop after so many steps, in training and in evaluation")
    add("--warm-up", type=int, default=3, help="first steps that do not count for the speed")
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
    loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, pin_memory=use_cuda, drop_last=True
    )

    torch.manual_seed(args.seed)
    model = densenet121(num_classes=10).to(device)

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
            f"each: {len(train_set)} images of {args.image_size}x{args.image_size}",
            flush=True,
        )
    left = args.epochs * len(loader) if args.max_steps is None else args.max_steps
    for epoch in range(1, args.epochs + 1):
        steps = min(left, len(loader))
        if steps <= 0:
            break
        left -= steps
        sampler.set_epoch(epoch)  # shuffle differently each epoch, equally on all ranks
        train(epoch, steps, model, optimizer, loader, device, args)
        loss, accuracy = evaluate(model, test_set, device, args)
        if hvd.rank() == 0:  # one rank reports
            print(f"Epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)

    # The proof that the ranks trained one model: the same bits everywhere.
    fingerprints = hvd.allgather_object(fingerprint(model))
    if len(set(fingerprints)) > 1:
        sys.exit(f"The parameters differ between the ranks: {fingerprints}")
    if hvd.rank() == 0:  # one rank reports
        print(f"Parameters are equal on {hvd.size()} rank(s): sha256 {fingerprints[0]}")


if __name__ == "__main__":
    main()
