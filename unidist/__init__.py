"""unidist: one Horovod-compatible API for PyTorch over torch.distributed, Horovod and MPI.

``import unidist as hvd``. Importing starts nothing: no MPI, no thread, no process group.
"""

from __future__ import annotations

import os as _os
import sys as _sys

if _sys.argv[:1] == ["-m"]:  # Python is still looking for the module to run
    # `python -m unidist.horovod train.py` becomes `python train.py` before torch is loaded in vain.
    from unidist.horovod import replace_process as _replace_process

    _replace_process()

# In a source checkout the engines live in backends/ beside this folder; an installed package has
# them inside it. This lets a checkout run without being installed.
_beside = _os.path.join(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))), "backends")
if not _os.path.isdir(_os.path.join(__path__[0], "backends")) and _os.path.isfile(
    _os.path.join(_beside, "base.py")
):
    __path__.append(_os.path.dirname(_beside))

from unidist import elastic, mpi_ops  # noqa: E402
from unidist.backends.errors import (  # noqa: E402
    BackendUnavailable,
    HorovodInternalError,
    LaunchError,
)
from unidist.basics import (  # noqa: E402
    backend_name,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from unidist.compression import Compression  # noqa: E402
from unidist.functions import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from unidist.join import join  # noqa: E402
from unidist.movement import (  # noqa: E402
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from unidist.ops import (  # noqa: E402
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from unidist.optimizer import DistributedOptimizer  # noqa: E402
from unidist.process_sets import (  # noqa: E402
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from unidist.reduce_scatter import (  # noqa: E402
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from unidist.reduction import Adasum, Average, Max, Min, Product, Sum  # noqa: E402
from unidist.sparse import sparse_allreduce_async  # noqa: E402
from unidist.sync_batch_norm import SyncBatchNorm  # noqa: E402
from unidist.synchronization import barrier, poll, synchronize  # noqa: E402
from unidist.timeline import start_timeline, stop_timeline  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Adasum",
    "Average",
    "BackendUnavailable",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LaunchError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "backend_name",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
