"""Parameters, optimizer state and Python objects from one rank to the others.

Tensors travel packed: those of one dtype and device are laid end to end and broadcast in pieces, so
a model of hundreds of small tensors costs a few messages. What is to be sent is agreed first, and
a difference between ranks is an error that names it, before any data moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import cloudpickle
import torch

from unidist import basics
from unidist.agreement import agree_on_tensors
from unidist.backends.errors import HorovodInternalError
from unidist.layout import check_tensor
from unidist.movement import broadcast_, root_in_group
from unidist.process_sets import ProcessSet, global_process_set, member_group

#: bytes of one packed message
PACK_BYTES = 64 << 20
# The first byte of what allgather_object exchanges.
_PICKLED, _FAILED = b"P", b"F"
#: bytes of one message of an object's pickle
OBJECT_BYTES = 1 << 28


def _named(params: Any) -> list[tuple[str, Any]]:
    """Every accepted form of parameters as (name, value) pairs in an order equal on all ranks."""
    if isinstance(params, torch.Tensor):
        raise ValueError(
            "broadcast_parameters takes a dict, or tensors or (name, tensor) pairs, but got one "
            "tensor; use broadcast_ for it."
        )
    if isinstance(params, Mapping):
        return sorted(params.items(), key=lambda item: str(item[0]))
    if not isinstance(params, Iterable):
        raise ValueError(
            "broadcast_parameters takes a dict, or tensors or (name, tensor) pairs, but got "
            f"{type(params).__name__}."
        )
    pairs = []
    for index, entry in enumerate(params):
        if isinstance(entry, torch.Tensor):
            pairs.append((str(index), entry))
        elif isinstance(entry, tuple) and len(entry) == 2:
            pairs.append((str(entry[0]), entry[1]))
        else:
            raise ValueError(
                "broadcast_parameters takes tensors or (name, tensor) pairs, but entry "
                f"{index} is {type(entry).__name__}."
            )
    return pairs


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors with the root's, in place. All ranks must call it.

    Args:
        params: a ``state_dict()`` or other dict, or an iterable of tensors or of (name, tensor)
            pairs such as ``model.named_parameters()``. A dict's insertion order does not matter.
            Values that are not tensors are skipped; tensors that occur twice are sent once.
        root_rank: the rank to take them from.

    Raises:
        ValueError: before init; something that holds no parameters; no such rank.
        HorovodInternalError: names, shapes or dtypes differ between ranks, on all of them.
    """
    runtime = basics.runtime()
    root_in_group(root_rank, runtime.backend.world, "broadcast_parameters")
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in _named(params):
        if not isinstance(value, torch.Tensor):
            continue
        check_tensor(value, f"broadcast_parameters ({name})", in_place=True)
        identity = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device)
        if value.numel() and identity in seen:
            continue
        seen.add(identity)
        tensors[name] = value
    agree_on_tensors(tensors.items(), "broadcast_parameters", runtime.backend.world)
    _broadcast_packed(list(tensors.values()), root_rank)


def _packs(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group tensors of one dtype and device into messages of about PACK_BYTES."""
    open_packs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        if key in open_packs and filled[key] + size > PACK_BYTES:
            yield open_packs.pop(key)
        if key not in open_packs:
            open_packs[key], filled[key] = [], 0
        open_packs[key].append(tensor)
        filled[key] += size
    yield from open_packs.values()


def _broadcast_packed(tensors: list[torch.Tensor], root_rank: int) -> None:
    is_root = basics.rank() == root_rank
    with torch.no_grad():
        for pack in _packs(tensors):
            if len(pack) == 1:
                broadcast_(pack[0].detach(), root_rank)
                continue
            sizes = [tensor.numel() for tensor in pack]
            if is_root:
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in pack])
            else:
                flat = pack[0].new_empty(sum(sizes))
            broadcast_(flat, root_rank)
            if not is_root:
                for tensor, part in zip(pack, flat.split(sizes), strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))


# -- objects ----------------------------------------------------------------------------------


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank of the set; the root gets its own object back.

    Args:
        obj: anything cloudpickle can serialise, of any size; ignored on the other ranks.
        root_rank: the GLOBAL rank to take it from.
        name: names the operation in errors; equal on all ranks.
        process_set: the ranks that take part; all of them must call.
    """
    group = member_group(process_set, "broadcast_object")
    root_in_group(root_rank, group, "broadcast_object")
    name = name and f"object.{name}"
    is_root = basics.rank() == root_rank
    failure: Exception | None = None
    data = b""
    if is_root:
        try:
            data = cloudpickle.dumps(obj)
        except Exception as error:  # the others wait for a length: tell them there is none
            failure = error
    length = torch.tensor([-1 if failure else len(data)], dtype=torch.int64, device="cpu")
    broadcast_(length, root_rank, name and f"{name}.length", process_set)
    if failure is not None:
        raise failure
    if length.item() < 0:
        raise HorovodInternalError(
            f"broadcast_object: rank {root_rank} could not serialise its object; see its error."
        )
    buffer = (
        torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        if is_root
        else torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
    )
    for index, piece in enumerate(buffer.split(OBJECT_BYTES)):
        broadcast_(piece, root_rank, name and f"{name}.{index}", process_set)
    return obj if is_root else cloudpickle.loads(buffer.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return every rank's object, in rank order, on all ranks. All ranks must call it.

    Raises:
        HorovodInternalError: another rank could not serialise its object; that rank gets its own
            error.
    """
    runtime = basics.runtime()
    failure: Exception | None = None
    data = _FAILED
    try:
        data = _PICKLED + cloudpickle.dumps(obj)
    except Exception as error:  # the others wait for an answer
        failure = error
    full_name = runtime.name("allgather_object", name, runtime.backend.world)
    parts = runtime.engine.exchange(data, full_name)
    if failure is not None:
        raise failure
    failed = [rank for rank, part in enumerate(parts) if part[:1] == _FAILED]
    if failed:
        raise HorovodInternalError(
            f"allgather_object: rank {failed[0]} could not serialise its object; see its error."
        )
    return [cloudpickle.loads(part[1:]) for part in parts]


# -- optimizer state --------------------------------------------------------------------------


class _Tensor:
    """Stands for a tensor in a state that is sent without its tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        # A rank's own device of that kind: cuda:0 on the root is cuda:1 elsewhere.
        self.kind = tensor.device.type

    def empty(self) -> torch.Tensor:
        device = torch.device(self.kind)
        if self.kind == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Copy a nested state with each dense tensor replaced, and collect the tensors in order."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        tensor = value.detach()
        if any(stride == 0 for stride in tensor.stride()):
            tensor = tensor.contiguous()
        tensors.append(tensor)
        return _Tensor(tensor)
    if type(value) is dict:
        return {key: _without_tensors(entry, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(entry, tensors) for entry in value)
    return value


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Undo ``_without_tensors`` with new, empty tensors, collected in the same order."""
    if isinstance(value, _Tensor):
        tensors.append(value.empty())
        return tensors[-1]
    if type(value) is dict:
        return {key: _with_tensors(entry, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(entry, tensors) for entry in value)
    return value


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Give every rank the root's optimizer state and options. All ranks must call it.

    Parameters and gradients are not touched, and no step is taken to make state exist: a rank whose
    optimizer is fresh takes over what the root has, which may be nothing. Options keep their exact
    Python types.

    Args:
        optimizer: any torch optimizer but LBFGS, wrapped by DistributedOptimizer or not.
        root_rank: the rank to take the state from.
        model: accepted for Horovod's sake; not needed.

    Raises:
        ValueError: LBFGS; before init; no such rank; the ranks' parameter groups differ.
        TypeError: not a torch optimizer.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "broadcast_optimizer_state cannot broadcast torch.optim.LBFGS state; send its "
            "state_dict() with broadcast_object and load it on the other ranks."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "broadcast_optimizer_state takes a torch.optim.Optimizer, but got "
            f"{type(optimizer).__name__}."
        )
    runtime = basics.runtime()
    root_in_group(root_rank, runtime.backend.world, "broadcast_optimizer_state")
    distribution = getattr(optimizer, "_unidist", None)
    if distribution is not None:  # load_state_dict would do so on all ranks but the root
        distribution.settle()
    tensors: list[torch.Tensor] = []
    skeleton = None
    is_root = basics.rank() == root_rank
    if is_root:
        skeleton = _without_tensors(_plain_state_dict(optimizer), tensors)
    skeleton = broadcast_object(skeleton, root_rank)
    if not is_root:
        skeleton = _with_tensors(skeleton, tensors)
    _broadcast_packed(tensors, root_rank)
    if not is_root:
        optimizer.load_state_dict(skeleton)


def _plain_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = dict(optimizer.state_dict())
    state["state"] = dict(state["state"])
    return state
