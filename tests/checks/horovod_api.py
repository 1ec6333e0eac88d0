"""Horovod's promises, one: names, signatures, and what its collectives give.

Taken from the documentation, the source and the tests of horovod.torch 0.28.1, not from unidist:
what a script that says ``import horovod.torch as hvd`` relies on. Each check of the topics
``horovod_api*`` passes on Horovod itself, too (``UNIDIST_CHECK_MODULE=horovod.torch``), or says
why not; over MPI Horovod cannot be initialized twice, so the last two of ``_sets`` fail there.

Horovod numbers all calls of a rank to match the unnamed ones. So in these topics each rank makes
the same number of calls, also of those that fail.
"""

from __future__ import annotations

import inspect
import pickle
import time
from typing import Any

import torch

from checks import support
from checks.support import close, equal, no_warnings, raises, values, warns

_NAMES = """
    Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
    allreduce allreduce_async allreduce_ allreduce_async_
    grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_
    sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
    broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
    reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
    join barrier poll synchronize init shutdown is_initialized
    size local_size cross_size rank local_rank cross_rank
    mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built
    nccl_built ddl_built ccl_built cuda_built rocm_built
    ProcessSet global_process_set add_process_set remove_process_set
    Average Sum Adasum Min Max Product HorovodInternalError DistributedOptimizer
    SyncBatchNorm elastic start_timeline stop_timeline
"""

_SCALES = "prescale_factor=1.0, postscale_factor=1.0"
_REDUCE = f"average=None, name=None, op=None, {_SCALES}, process_set=everyone"
_REDUCE_COMPRESSED = (
    f"average=None, name=None, compression=none, op=None, {_SCALES}, process_set=everyone"
)
_SCATTER = f"name=None, op=Average, process_set=everyone, {_SCALES}"
_SCATTER_COMPRESSED = f"name=None, compression=none, op=Average, process_set=everyone, {_SCALES}"
_MOVE = "name=None, process_set=everyone"

REDUCTIONS = {
    "allreduce": f"tensor, {_REDUCE_COMPRESSED}",
    "allreduce_": f"tensor, {_REDUCE}",
    "allreduce_async": f"tensor, {_REDUCE}",
    "allreduce_async_": f"tensor, {_REDUCE}",
    "grouped_allreduce": f"tensors, {_REDUCE_COMPRESSED}",
    "grouped_allreduce_": f"tensors, {_REDUCE}",
    "grouped_allreduce_async": f"tensors, {_REDUCE}",
    "grouped_allreduce_async_": f"tensors, {_REDUCE}",
    "sparse_allreduce_async": "tensor, name, op, process_set=everyone",
    "reducescatter": f"tensor, {_SCATTER_COMPRESSED}",
    "reducescatter_async": f"tensor, {_SCATTER}",
    "grouped_reducescatter": f"tensors, {_SCATTER_COMPRESSED}",
    "grouped_reducescatter_async": f"tensors, {_SCATTER}",
}

MOVEMENTS = {
    "allgather": f"tensor, {_MOVE}",
    "allgather_async": f"tensor, {_MOVE}",
    "grouped_allgather": f"tensors, {_MOVE}",
    "grouped_allgather_async": f"tensors, {_MOVE}",
    "broadcast": f"tensor, root_rank, {_MOVE}",
    "broadcast_": f"tensor, root_rank, {_MOVE}",
    "broadcast_async": f"tensor, root_rank, {_MOVE}",
    "broadcast_async_": f"tensor, root_rank, {_MOVE}",
    "alltoall": f"tensor, splits=None, {_MOVE}",
    "alltoall_async": f"tensor, splits=None, {_MOVE}",
}

OTHERS = {
    "join": "device=-1",
    "barrier": "process_set=everyone",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=everyone",
    "allgather_object": "obj, name=None",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=none, "
    "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, "
    "groups=None, sparse_as_dense=False, process_set=everyone",
}


# -- names and signatures -------------------------------------------------------------------------


def check_names(hvd: Any) -> None:
    missing = [name for name in _NAMES.split() if not hasattr(hvd, name)]
    assert not missing, f"not exported: {missing}"


def _signature(hvd: Any, name: str) -> list[str]:
    shown = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        default = parameter.default
        if default is parameter.empty:
            shown.append(parameter.name)
            continue
        text = repr(default)
        if parameter.name == "process_set" and default is hvd.global_process_set:
            text = "everyone"
        elif parameter.name == "compression" and default is hvd.Compression.none:
            text = "none"
        elif parameter.name == "op" and default is not None and default == hvd.Average:
            text = "Average"
        shown.append(f"{parameter.name}={text}")
    return shown


def _equal_signatures(hvd: Any, table: dict[str, str]) -> None:
    """Horovod's parameters come first, in its order; what more there is has a default."""
    for name, text in table.items():
        want, got = text.split(", "), _signature(hvd, name)
        shown = f"{name}({', '.join(got)}), want ({text})"
        assert all("=" in one for one in got[len(want) :]), shown
        for mine, theirs in zip(got, want, strict=False):
            # A default where Horovod has none breaks no call.
            assert theirs in (mine, mine.split("=")[0]), shown
        assert len(got) >= len(want), shown


def check_signatures_of_reductions(hvd: Any) -> None:
    _equal_signatures(hvd, REDUCTIONS)


def check_signatures_of_movements(hvd: Any) -> None:
    _equal_signatures(hvd, MOVEMENTS)


def check_signatures_of_the_rest(hvd: Any) -> None:
    _equal_signatures(hvd, OTHERS)


def check_arguments_by_position(hvd: Any) -> None:
    rank, size, everyone = hvd.rank(), hvd.size(), hvd.global_process_set
    total = float(sum(range(1, size + 1)))
    tensor, none = torch.full((2 * size,), rank + 1.0), hvd.Compression.none
    want = torch.full((2 * size,), total * 6)
    got = hvd.allreduce(tensor, None, "position", none, hvd.Sum, 2.0, 3.0, everyone)
    equal(got, want, "allreduce")
    got = hvd.allreduce_(tensor.clone(), None, "position", hvd.Sum, 2.0, 3.0, everyone)
    equal(got, want, "allreduce_")
    (got,) = hvd.grouped_allreduce([tensor], None, "list", none, hvd.Sum, 2.0, 3.0, everyone)
    equal(got, want, "grouped_allreduce")
    got = hvd.reducescatter(tensor, "position", none, hvd.Sum, everyone, 2.0, 3.0)
    equal(got, want[:2], "reducescatter")
    handle = hvd.reducescatter_async(tensor, "position", hvd.Sum, everyone, 2.0, 3.0)
    equal(hvd.synchronize(handle), want[:2], "reducescatter_async")
    equal(hvd.allgather(tensor[:1], "position", everyone), torch.arange(1.0, size + 1))
    equal(hvd.broadcast(tensor, 0, "position", everyone), torch.ones(2 * size))
    equal(hvd.alltoall(tensor[:size], None, "position", everyone), torch.arange(1.0, size + 1))


def check_reductions_are_integers(hvd: Any) -> None:
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert all(isinstance(op, int) for op in ops)
    assert [int(op) for op in ops] == [0, 1, 2, 3, 4, 5]
    assert len({*ops}) == 6
    assert [pickle.loads(pickle.dumps(op)) for op in ops] == ops
    equal(hvd.allreduce(torch.ones(2), op=1), torch.full((2,), float(hvd.size())), "op=1")


def check_internal_error_is_a_runtime_error(hvd: Any) -> None:
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert str(hvd.HorovodInternalError("text")) == "text"


def check_init_takes_comm_and_process_sets(hvd: Any) -> None:
    """Connected already, it changes nothing."""
    assert hvd.init(comm=None, process_sets=None) is None
    assert hvd.init(None, None) is None
    assert hvd.init(process_sets=[]) is None
    equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([float(hvd.size())]))


def check_places_are_integers(hvd: Any) -> None:
    for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
        assert type(getattr(hvd, name)()) is int, name
    assert 0 <= hvd.local_rank() < hvd.local_size() <= hvd.size()
    assert 0 <= hvd.cross_rank() < hvd.cross_size()


def check_timeline_has_to_be_enabled(hvd: Any) -> None:
    with raises(ValueError, "HOROVOD_TIMELINE"):
        hvd.start_timeline("/nowhere/timeline.json", mark_cycles=True)


# -- allreduce ------------------------------------------------------------------------------------


def check_allreduce_gives_a_new_tensor(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for shape in ((), (17,), (5, 17), (3, 5, 7)):
        tensor = values(rank, shape, torch.float32)
        got = hvd.allreduce(tensor, op=hvd.Sum)
        equal(got, sum(values(other, shape, torch.float32) for other in range(size)), f"{shape}")
        equal(tensor, values(rank, shape, torch.float32), "the input")
        assert got is not tensor
        assert got.data_ptr() != tensor.data_ptr()
        assert got.device == tensor.device
        assert not got.requires_grad
        got.fill_(9)
        equal(tensor, values(rank, shape, torch.float32), "the input after the result is written")


def check_allreduce_averages_unless_told_otherwise(hvd: Any) -> None:
    mean = torch.full((3,), (hvd.size() + 1) / 2)
    tensor = torch.full((3,), hvd.rank() + 1.0)
    with no_warnings():
        close(hvd.allreduce(tensor), mean, "allreduce")
        close(hvd.allreduce(tensor, op=hvd.Average), mean, "op=Average")
        close(hvd.synchronize(hvd.allreduce_async(tensor)), mean, "allreduce_async")
        close(hvd.allreduce_(tensor.clone()), mean, "allreduce_")
        close(hvd.synchronize(hvd.allreduce_async_(tensor.clone())), mean, "allreduce_async_")
        close(hvd.grouped_allreduce([tensor])[0], mean, "grouped_allreduce")


def check_average_argument_is_deprecated(hvd: Any) -> None:
    size = hvd.size()
    total = float(sum(range(1, size + 1)))
    for average, want in ((True, total / size), (False, total)):
        for name in ("allreduce", "allreduce_"):
            with warns(DeprecationWarning, "average", "op"):
                got = getattr(hvd, name)(torch.full((2,), hvd.rank() + 1.0), average=average)
            close(got, torch.full((2,), want), f"{name}, average={average}")
    with warns(DeprecationWarning, "average"):
        (got,) = hvd.grouped_allreduce([torch.ones(2)], average=False)
    equal(got, torch.full((2,), float(size)), "grouped_allreduce")


def check_allreduce_dtypes(hvd: Any) -> None:
    size = hvd.size()
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        for op in (hvd.Sum, hvd.Average):
            got = hvd.allreduce(torch.arange(4, dtype=dtype), op=op)
            want = torch.arange(4, dtype=dtype) * (size if op == hvd.Sum else 1)
            equal(got, want, f"{dtype}")


def check_allreduce_min_max_product(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        stacked = torch.stack([values(other, (5, 3), dtype) for other in range(size)])
        tensor = values(rank, (5, 3), dtype)
        equal(hvd.allreduce(tensor, op=hvd.Min), stacked.amin(0), "Min")
        equal(hvd.allreduce(tensor, op=hvd.Max), stacked.amax(0), "Max")
        equal(hvd.allreduce(tensor, op=hvd.Product), stacked.prod(0).to(dtype), "Product")


def check_allreduce_scale_factors(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    total = float(sum(range(1, size + 1)))
    for dtype in (torch.float32, torch.float64):
        tensor = torch.full((4,), rank + 1.0, dtype=dtype)
        for op, want in ((hvd.Sum, total), (hvd.Average, total / size)):
            for before, after in ((0.5, 1.0), (1.0, 4.0), (0.5, 8.0)):
                got = hvd.allreduce(tensor, op=op, prescale_factor=before, postscale_factor=after)
                scaled = torch.full((4,), want * before * after, dtype=dtype)
                close(got, scaled, f"{dtype}, {before} and {after}")
        equal(tensor, torch.full((4,), rank + 1.0, dtype=dtype), "the input")


def check_allreduce_scale_factors_of_integers(hvd: Any) -> None:
    """Scaled in float64, then cut off: before the sum on each rank, after it once."""
    size = hvd.size()
    for dtype in (torch.int32, torch.int64):
        tensor = torch.tensor([11, 21, 4], dtype=dtype)
        got = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5)
        equal(got, torch.tensor([5, 10, 2], dtype=dtype) * size, "prescale_factor")
        got = hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=0.25)
        want = (tensor.double() * size * 0.25).to(dtype)
        equal(got, want, "postscale_factor")


def check_allreduce_in_place(hvd: Any) -> None:
    size = hvd.size()
    tensor = torch.ones(3, 4)
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    equal(tensor, torch.full((3, 4), float(size)), "once")
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    assert hvd.synchronize(handle) is tensor
    equal(tensor, torch.full((3, 4), float(size) ** 2), "twice")


def check_many_small_reductions_at_once(hvd: Any) -> None:
    """Horovod fuses them; not all are done when the last is started."""
    rank, size = hvd.rank(), hvd.size()
    started = []
    for index in range(40):
        shape = (17,) * (index % 3 + 1)
        handle = hvd.allreduce_async(values(rank, shape, torch.float32), op=hvd.Sum)
        started.append((shape, handle))
    assert len({handle for _, handle in started}) == 40
    for shape, handle in started:
        want = sum(values(other, shape, torch.float32) for other in range(size))
        equal(hvd.synchronize(handle), want, f"{shape}")


def check_large_and_small_at_once(hvd: Any) -> None:
    size = hvd.size()
    large = hvd.allreduce_async(torch.ones(300_000), op=hvd.Sum, name="large")
    small = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="small")
    equal(hvd.synchronize(small), torch.full((1,), float(size)), "small")
    equal(hvd.synchronize(large), torch.full((300_000,), float(size)), "large")


def check_input_with_gradient(hvd: Any) -> None:
    """The result is part of the graph if, and only if, the input is."""
    leaf = torch.ones(hvd.size(), requires_grad=True)
    for name in ("allreduce", "allgather", "alltoall", "reducescatter"):
        got = getattr(hvd, name)(leaf)
        assert got.requires_grad, name
        assert got.grad_fn is not None, name
        assert not getattr(hvd, name)(leaf.detach()).requires_grad, name
        with torch.no_grad():
            assert not getattr(hvd, name)(leaf).requires_grad, name
    assert hvd.broadcast(leaf, 0).requires_grad
    assert not hvd.broadcast(leaf.detach(), 0).requires_grad


# -- grouped --------------------------------------------------------------------------------------


def check_grouped_allreduce(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    shapes = [(4,), (2, 3), (), (1, 1, 5)]
    given = [values(rank, shape, torch.float32) for shape in shapes]
    wants = [sum(values(other, shape, torch.float32) for other in range(size)) for shape in shapes]
    got = hvd.grouped_allreduce(given, op=hvd.Sum, name="grouped")
    assert type(got) is list
    assert len(got) == 4
    for one, want, mine in zip(got, wants, given, strict=True):
        equal(one, want, "result")
        assert one.data_ptr() != mine.data_ptr()
    for mine, shape in zip(given, shapes, strict=True):
        equal(mine, values(rank, shape, torch.float32), "input")


def check_grouped_allreduce_takes_any_iterable(hvd: Any) -> None:
    want = torch.full((2,), float(hvd.size()))
    for given in ((torch.ones(2), torch.ones(2)), (torch.ones(2) for _ in range(2))):
        for one in hvd.grouped_allreduce(given, op=hvd.Sum):
            equal(one, want)


def check_grouped_allreduce_async_and_in_place(hvd: Any) -> None:
    want = torch.full((2,), float(hvd.size()))
    given = [torch.ones(2) for _ in range(3)]
    handle = hvd.grouped_allreduce_async(given, op=hvd.Sum)
    assert type(handle) is int
    got = hvd.synchronize(handle)
    assert isinstance(got, (list, tuple))
    assert len(got) == 3
    assert all(torch.equal(one, want) for one in got)
    assert all(torch.equal(one, torch.ones(2)) for one in given)
    got = hvd.grouped_allreduce_(given, op=hvd.Sum)
    assert all(one is mine for one, mine in zip(got, given, strict=True))
    assert all(torch.equal(one, want) for one in given)
    got = hvd.synchronize(hvd.grouped_allreduce_async_(given, op=hvd.Average))
    assert all(one is mine for one, mine in zip(got, given, strict=True))
    assert all(torch.equal(one, want) for one in given)


def check_grouped_allreduce_scale_and_compression(hvd: Any) -> None:
    given = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    got = [
        hvd.grouped_allreduce([one], op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)[0]
        for one in given
    ]
    for one, mine in zip(got, given, strict=True):
        equal(one, mine * 6 * hvd.size())
    got = hvd.grouped_allreduce(given, op=hvd.Sum, compression=hvd.Compression.fp16)
    for one, mine in zip(got, given, strict=True):
        equal(one, mine * hvd.size(), "fp16")


def check_grouped_allgather(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    given = [torch.full((rank + 1, 2), float(rank)), torch.tensor([rank])]
    wants = [
        torch.cat([torch.full((other + 1, 2), float(other)) for other in range(size)]),
        torch.arange(size),
    ]
    # One dtype in a list: Horovod looks at the first tensor only.
    given[1] = given[1].float()
    wants[1] = wants[1].float()
    got = hvd.grouped_allgather(given, name="grouped")
    assert isinstance(got, (list, tuple))
    handle = hvd.grouped_allgather_async(given, name="grouped")
    assert type(handle) is int
    for results in (got, hvd.synchronize(handle)):
        for one, want in zip(results, wants, strict=True):
            equal(one, want)


def check_grouped_reducescatter(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    given = [torch.ones(2 * size, 3), torch.arange(float(size))]
    wants = [torch.full((2, 3), float(size)), torch.tensor([float(rank * size)])]
    got = hvd.grouped_reducescatter(given, op=hvd.Sum, name="grouped")
    assert type(got) is list
    handle = hvd.grouped_reducescatter_async(given, op=hvd.Sum, name="grouped")
    assert type(handle) is int
    for results in (got, hvd.synchronize(handle)):
        for one, want in zip(results, wants, strict=True):
            equal(one, want)
    equal(hvd.grouped_reducescatter(given)[0], torch.ones(2, 3), "the default is Average")


# -- moving data ----------------------------------------------------------------------------------


def check_allgather_in_rank_order(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for shape in ((17,), (3, 17), (2, 3, 5)):
        tensor = values(rank, shape, torch.float32)
        got = hvd.allgather(tensor)
        equal(got, torch.cat([values(other, shape, torch.float32) for other in range(size)]))
        equal(tensor, values(rank, shape, torch.float32), "the input")


def check_allgather_of_different_lengths(hvd: Any) -> None:
    """Also when a rank has no row at all."""
    rank, size = hvd.rank(), hvd.size()
    for lengths in (list(range(1, size + 1)), list(range(size)), [0] * (size - 1) + [3]):
        tensor = torch.full((lengths[rank], 2, 3), float(rank))
        want = [torch.full((one, 2, 3), float(other)) for other, one in enumerate(lengths)]
        equal(hvd.allgather(tensor), torch.cat(want), f"{lengths}")


def check_movement_dtypes(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    ):
        everyone = [values(other, (size, 2), dtype) for other in range(size)]
        equal(hvd.allgather(everyone[rank]), torch.cat(everyone), "allgather")
        equal(hvd.broadcast(everyone[rank], size - 1), everyone[-1], "broadcast")
        want = torch.cat([one[rank : rank + 1] for one in everyone])
        equal(hvd.alltoall(everyone[rank]), want, "alltoall")


def check_many_gathers_at_once(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    handles = [
        hvd.allgather_async(torch.full((index % 3 + rank, 2), float(index))) for index in range(20)
    ]
    for index, handle in enumerate(handles):
        rows = sum(index % 3 + other for other in range(size))
        equal(hvd.synchronize(handle), torch.full((rows, 2), float(index)))


def check_broadcast_gives_a_new_tensor(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        for shape in ((), (17,), (2, 3, 5)):
            tensor = values(rank, shape, torch.float32)
            got = hvd.broadcast(tensor, root_rank=root)
            equal(got, values(root, shape, torch.float32), f"from {root}")
            assert got.data_ptr() != tensor.data_ptr()
            equal(tensor, values(rank, shape, torch.float32), "the input")


def check_broadcast_in_place(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = values(rank, (3, 4), torch.float32)
    assert hvd.broadcast_(tensor, size - 1) is tensor
    equal(tensor, values(size - 1, (3, 4), torch.float32), "broadcast_")
    tensor = values(rank, 5, torch.float32)
    handle = hvd.broadcast_async_(tensor, root_rank=0, name="broadcast")
    assert type(handle) is int
    assert hvd.synchronize(handle) is tensor
    equal(tensor, values(0, 5, torch.float32), "broadcast_async_")
    handle = hvd.broadcast_async(tensor * (rank + 1), 0)
    equal(hvd.synchronize(handle), values(0, 5, torch.float32), "broadcast_async")


def check_alltoall_in_equal_parts(hvd: Any) -> None:
    """Without splits: one tensor comes back."""
    rank, size = hvd.rank(), hvd.size()
    for shape in ((2 * size,), (2 * size, 3), (2 * size, 2, 2)):
        tensor = torch.full(shape, float(rank))
        got = hvd.alltoall(tensor)
        assert isinstance(got, torch.Tensor)
        want = [torch.full((2, *shape[1:]), float(other)) for other in range(size)]
        equal(got, torch.cat(want), f"{shape}")
        equal(tensor, torch.full(shape, float(rank)), "the input")
    equal(hvd.alltoall(torch.empty(0, 3)), torch.empty(0, 3), "no rows")


def check_alltoall_with_splits(hvd: Any) -> None:
    """A pair comes back: what was received, and how many rows from each rank."""
    rank, size = hvd.rank(), hvd.size()
    # Rank r sends r + 1 rows to each rank; splits may be a tensor or a list.
    tensor = torch.full(((rank + 1) * size, 2), float(rank))
    for splits in (torch.full((size,), rank + 1, dtype=torch.int32), [rank + 1] * size):
        got = hvd.alltoall(tensor, splits=splits)
        assert type(got) is tuple
        assert len(got) == 2
        want = [torch.full((other + 1, 2), float(other)) for other in range(size)]
        equal(got[0], torch.cat(want), "rows")
        equal(got[1], torch.arange(1, size + 1, dtype=torch.int32), "received splits")
        assert not got[1].requires_grad


def check_alltoall_of_nothing(hvd: Any) -> None:
    """A rank that sends nothing, one that receives nothing, all that do neither."""
    rank, size = hvd.rank(), hvd.size()
    splits = [0] * size if rank == size - 1 else [1] * size
    got, received = hvd.alltoall(torch.full((sum(splits),), float(rank)), splits)
    equal(got, torch.arange(float(size - 1)), "the last sends nothing")
    equal(received, torch.tensor([1] * (size - 1) + [0], dtype=torch.int32))
    splits = [2] * (size - 1) + [0]
    got, received = hvd.alltoall(torch.full((sum(splits), 3), float(rank)), splits)
    if rank == size - 1:
        equal(got, torch.empty(0, 3), "the last receives nothing")
        equal(received, torch.zeros(size, dtype=torch.int32))
    else:
        equal(got[:, 0].contiguous(), torch.arange(float(size)).repeat_interleave(2))
    got, received = hvd.alltoall(torch.ones(3), [0] * size)
    equal(got, torch.empty(0), "nobody sends")
    equal(received, torch.zeros(size, dtype=torch.int32))


def check_alltoall_of_some_rows(hvd: Any) -> None:
    """Rows beyond the sum of the splits stay where they are."""
    size = hvd.size()
    got, _ = hvd.alltoall(torch.arange(float(size + 5)), [1] * size)
    equal(got, torch.full((size,), float(hvd.rank())))


def check_alltoall_async_gives_a_pair(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.full((size,), float(rank))
    for splits in (None, [1] * size, torch.ones(size, dtype=torch.int32)):
        handle = hvd.alltoall_async(tensor, splits, name="pair")
        assert type(handle) is int
        got, received = hvd.synchronize(handle)
        equal(got, torch.arange(float(size)), f"splits {splits}")
        equal(received, torch.ones(size, dtype=torch.int32), f"splits {splits}")


def check_reducescatter(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    total = float(sum(range(1, size + 1)))
    for shape in ((2 * size,), (2 * size, 3), (2 * size, 2, 2)):
        tensor = torch.full(shape, rank + 1.0)
        mine = (2, *shape[1:])
        close(hvd.reducescatter(tensor), torch.full(mine, total / size), "the default is Average")
        equal(hvd.reducescatter(tensor, op=hvd.Sum), torch.full(mine, total), "Sum")
        equal(tensor, torch.full(shape, rank + 1.0), "the input")
    tensor = torch.arange(2 * size, dtype=torch.float32)
    equal(hvd.reducescatter(tensor), tensor[2 * rank : 2 * rank + 2], "whose rows")


def check_reducescatter_dtypes(hvd: Any) -> None:
    size = hvd.size()
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        got = hvd.reducescatter(torch.full((size, 2), 3, dtype=dtype), op=hvd.Sum)
        equal(got, torch.full((1, 2), 3 * size, dtype=dtype), f"{dtype}")


def check_reducescatter_of_uneven_rows(hvd: Any) -> None:
    """The first ranks get one row more; with fewer rows than ranks the last get none."""
    rank, size = hvd.rank(), hvd.size()
    for rows in (2 * size + 1, 3 * size - 1, 1, size - 1):
        tensor = torch.arange(2.0 * rows).reshape(rows, 2)
        each, more = divmod(rows, size)
        start = rank * each + min(rank, more)
        want = tensor[start : start + each + (rank < more)] * size
        equal(hvd.reducescatter(tensor, op=hvd.Sum), want, f"{rows} rows")


def check_reducescatter_options(hvd: Any) -> None:
    size = hvd.size()
    tensor = torch.ones(size, 2)
    got = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    equal(got, torch.full((1, 2), 6.0 * size), "factors")
    got = hvd.reducescatter(tensor, prescale_factor=0.5)
    equal(got, torch.full((1, 2), 0.5), "factor of an average")
    got = hvd.reducescatter(tensor, compression=hvd.Compression.fp16, op=hvd.Sum)
    equal(got, torch.full((1, 2), float(size)), "compressed")


def check_sparse_allreduce(hvd: Any) -> None:
    """A callable comes back; what it gives is sparse and has the rows of all ranks."""
    rank, size = hvd.rank(), hvd.size()
    indices = torch.tensor([[0, rank + 1]])
    given = torch.sparse_coo_tensor(
        indices, torch.full((2, 3), rank + 1.0), (size + 2, 3), check_invariants=False
    )
    dense = torch.zeros(size + 2, 3)
    for other in range(size):
        dense[0] += other + 1
        dense[other + 1] += other + 1
    for op, want in ((hvd.Sum, dense), (hvd.Average, dense / size)):
        finish = hvd.sparse_allreduce_async(given, "sparse", op)
        assert callable(finish)
        got = finish()
        assert got.is_sparse
        assert got.shape == given.shape
        assert got.dtype == given.dtype
        close(got.to_dense(), want)


# -- handles and names ----------------------------------------------------------------------------


def check_handles(hvd: Any) -> None:
    """Integers; used once they are unknown, and an unknown one is no error."""
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    assert type(handle) is int
    assert type(hvd.poll(handle)) is bool
    equal(hvd.synchronize(handle), torch.full((2,), float(hvd.size())))
    assert hvd.synchronize(handle) is None, "the second time"
    assert hvd.synchronize(10**9) is None


def check_poll_an_unknown_handle(hvd: Any) -> None:
    handle = hvd.allreduce_async(torch.ones(2))
    hvd.synchronize(handle)
    for unknown in (handle, 10**9):
        with raises(ValueError, str(unknown)):
            hvd.poll(unknown)


def check_poll_until_done(hvd: Any) -> None:
    handles = [hvd.allreduce_async(torch.ones(1000), op=hvd.Sum) for _ in range(5)]
    deadline = time.monotonic() + 20
    while not all(hvd.poll(handle) for handle in handles):
        time.sleep(0.001)
        assert time.monotonic() < deadline
    for handle in handles:
        assert hvd.poll(handle) is True, "done stays done"
        equal(hvd.synchronize(handle), torch.full((1000,), float(hvd.size())))


def check_poll_before_the_others_came(hvd: Any) -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="late")
        assert hvd.poll(handle) is False
        support.channel.everyone("go")
    else:
        support.channel.everyone("go")
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="late")
    equal(hvd.synchronize(handle), torch.full((2,), float(hvd.size())))


def check_names_match_in_any_order(hvd: Any) -> None:
    """Each rank starts the same operations, of all kinds, in an order of its own."""
    rank, size = hvd.rank(), hvd.size()
    start = {
        "reduce": lambda: hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="reduce"),
        "gather": lambda: hvd.allgather_async(torch.tensor([rank]), name="gather"),
        "send": lambda: hvd.broadcast_async(torch.tensor([rank]), size - 1, name="send"),
        "all": lambda: hvd.alltoall_async(torch.full((size,), rank), name="all"),
        "scatter": lambda: hvd.reducescatter_async(torch.ones(size), op=hvd.Sum, name="scatter"),
        "list": lambda: hvd.grouped_allreduce_async([torch.ones(1)] * 2, op=hvd.Sum, name="list"),
    }
    order = list(start)
    order = order[rank:] + order[:rank]
    handles = {name: start[name]() for name in order}
    got = {name: hvd.synchronize(handles[name]) for name in reversed(order)}
    equal(got["reduce"], torch.full((3,), float(size)))
    equal(got["gather"], torch.arange(size))
    equal(got["send"], torch.tensor([size - 1]))
    equal(got["all"][0], torch.arange(size))
    equal(got["scatter"], torch.tensor([float(size)]))
    equal(got["list"][1], torch.tensor([float(size)]))


def check_one_name_for_different_kinds(hvd: Any) -> None:
    """In flight together: a name belongs to a kind of operation."""
    rank, size = hvd.rank(), hvd.size()
    reduced = hvd.allreduce_async(torch.ones(size), op=hvd.Sum, name="same")
    gathered = hvd.allgather_async(torch.tensor([rank]), name="same")
    sent = hvd.broadcast_async(torch.tensor([rank]), 0, name="same")
    equal(hvd.synchronize(sent), torch.tensor([0]))
    equal(hvd.synchronize(gathered), torch.arange(size))
    equal(hvd.synchronize(reduced), torch.full((size,), float(size)))


def check_names_of_any_characters(hvd: Any) -> None:
    for name in ("a b/c:d", "100%s {}", "größe.权重", "x" * 3000, "layer.0.weight", ""):
        got = hvd.allreduce(torch.ones(2), op=hvd.Sum, name=name)
        equal(got, torch.full((2,), float(hvd.size())), name[:20])


def check_a_name_again_for_something_else(hvd: Any) -> None:
    """After an operation ended its name may come with another shape, dtype or reduction."""
    size = hvd.size()
    for shape, dtype, op, want in (
        ((4,), torch.float32, hvd.Sum, size),
        ((4,), torch.float32, hvd.Sum, size),
        ((2, 3), torch.float32, hvd.Sum, size),
        ((2, 3), torch.int64, hvd.Sum, size),
        ((2, 3), torch.int64, hvd.Max, 1),
        ((4,), torch.float32, hvd.Average, 1),
    ):
        got = hvd.allreduce(torch.ones(shape, dtype=dtype), op=op, name="again")
        equal(got, torch.full(shape, want, dtype=dtype), f"{shape} {dtype}")


def check_unnamed_and_named_between_each_other(hvd: Any) -> None:
    size = hvd.size()
    handles = []
    for index in range(10):
        name = f"named.{index}" if index % 2 else None
        handles.append(hvd.allreduce_async(torch.full((2,), float(index)), op=hvd.Sum, name=name))
    for index, handle in enumerate(handles):
        equal(hvd.synchronize(handle), torch.full((2,), float(index * size)))


def check_barrier(hvd: Any) -> None:
    """Nobody leaves before all came."""
    if hvd.rank() == 0:
        support.channel.tell("came")
    assert hvd.barrier() is None
    support.channel.hear("came", 0.5)
    assert hvd.barrier(process_set=hvd.global_process_set) is None
