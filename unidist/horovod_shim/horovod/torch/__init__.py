"""``import horovod.torch as hvd``: the public names of unidist, and Horovod's modules."""

from unidist import *  # noqa: F403

# isort: split
# Written like this and after the names of unidist, two of which these modules replace.
import horovod.torch.compression
import horovod.torch.elastic
import horovod.torch.functions
import horovod.torch.mpi_ops
import horovod.torch.optimizer
import horovod.torch.sync_batch_norm  # noqa: F401


def _check_has_gpu() -> bool:
    """Horovod calls this in a process of its own, which may find this module in its place."""
    import torch

    return torch.cuda.is_available()
