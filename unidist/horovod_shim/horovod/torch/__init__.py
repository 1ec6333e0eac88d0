"""``import horovod.torch as hvd``: the public names of unidist, and Horovod's modules."""

from unidist import *  # noqa: F403

# isort: split
# After the names of unidist: `elastic` is the one beside this file.
from horovod.torch import (  # noqa: F401
    compression,
    elastic,
    functions,
    mpi_ops,
    optimizer,
    sync_batch_norm,
)


def _check_has_gpu() -> bool:
    """Horovod calls this in a process of its own, which may find this module in its place."""
    import torch

    return torch.cuda.is_available()
