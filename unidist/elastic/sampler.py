"""A sampler that knows which samples are done, and divides the others among the ranks there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from unidist.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a dataset among the ranks, like ``DistributedSampler``, and again after a reset.

    Make it an attribute of the ``TorchState``, call ``record_batch`` after each batch, and
    ``set_epoch`` at the END of each epoch.

    Args:
        dataset: what is sampled, of constant length.
        shuffle: whether each epoch has an order of its own.
        seed: of the shuffling; equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing is processed, and the order is another one."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Say that every rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was saved, with the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many samples all ranks have processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Divide what is not processed yet among the present ranks."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:  # the same order on all ranks
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # All ranks get equally many. What is missing is taken from the front, more than once
        # around when fewer samples remain than are missing.
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
