"""Broadcasting parameters, optimizer states and objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from checks.support import equal, raises, same_on_all_ranks, several, values


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


# -- parameters -----------------------------------------------------------------------------------


def check_parameters_of_every_kind(hvd: Any) -> None:
    """state_dict, dict, list of pairs, list of tensors, and the generators of a module."""
    root = hvd.size() - 1
    kinds: dict[str, Callable[[nn.Module], Any]] = {
        "state_dict": lambda model: model.state_dict(),
        "dict": lambda model: dict(model.named_parameters()),
        "list of pairs": lambda model: list(model.named_parameters()),
        "list of tensors": lambda model: list(model.parameters()),
        "generator of pairs": lambda model: model.named_parameters(),
        "generator of tensors": lambda model: model.parameters(),
    }
    for kind, take in kinds.items():
        model, want = _model(hvd.rank()), _model(root)
        if kind == "state_dict":
            for name, buffer in want.named_buffers():
                buffer.fill_(3)
                if hvd.rank() == root:
                    model.get_buffer(name).fill_(3)
        assert hvd.broadcast_parameters(take(model), root_rank=root) is None
        for (name, got), one in zip(model.named_parameters(), want.parameters(), strict=True):
            equal(got.data, one.data, f"{kind}: {name}")
            assert got.requires_grad
        if kind == "state_dict":
            for name, buffer in want.named_buffers():
                equal(model.get_buffer(name), buffer, name)
        hvd.broadcast_parameters(take(model), root_rank=root)  # twice in a row
        same_on_all_ranks(*model.parameters(), what=kind)


def check_parameters_in_different_order(hvd: Any) -> None:
    """Ranks may fill their dictionaries in any order: names tell what belongs together."""
    rank, size = hvd.rank(), hvd.size()
    names = [f"layer{i}.weight" for i in range(6)]
    order = names[rank:] + names[:rank]
    given = OrderedDict((name, torch.full((names.index(name) + 2,), float(rank))) for name in order)
    hvd.broadcast_parameters(given, root_rank=size - 1)
    for name, tensor in given.items():
        equal(tensor, torch.full((names.index(name) + 2,), float(size - 1)), name)


def check_parameters_of_odd_kinds(hvd: Any) -> None:
    """Layouts, dtypes, empty and 0-dim entries, the same tensor twice, None, and no tensor."""
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    tied = values(rank, (3, 2), torch.float32)
    given = {
        "channels_last": values(rank, (2, 3, 4, 5), torch.float32).to(
            memory_format=torch.channels_last
        ),
        "column": values(rank, (4, 3), torch.float32)[:, 1],
        "bfloat16": values(rank, 5, torch.bfloat16),
        "bool": values(rank, 5, torch.bool),
        "empty": torch.empty(0),
        "zero_dim": torch.tensor(rank, dtype=torch.int64),
        "tied": tied,
        "tied_too": tied,
        "nothing": None,
    }
    hvd.broadcast_parameters(given, root_rank=root)
    equal(given["channels_last"], values(root, (2, 3, 4, 5), torch.float32), "channels_last")
    assert given["channels_last"].is_contiguous(memory_format=torch.channels_last)
    equal(given["column"], values(root, (4, 3), torch.float32)[:, 1], "column")
    equal(given["bfloat16"], values(root, 5, torch.bfloat16), "bfloat16")
    equal(given["bool"], values(root, 5, torch.bool), "bool")
    equal(given["zero_dim"], torch.tensor(root), "zero_dim")
    equal(tied, values(root, (3, 2), torch.float32), "tied")
    assert given["nothing"] is None


def check_parameters_of_a_bad_kind(hvd: Any) -> None:
    with raises((ValueError, TypeError)):
        hvd.broadcast_parameters(5, root_rank=0)
    with raises(ValueError, "root"):
        hvd.broadcast_parameters({"a": torch.ones(2)}, root_rank=hvd.size())
    equal(hvd.broadcast(torch.ones(2), 0), torch.ones(2), "after the errors")


@several
def check_parameters_that_differ(hvd: Any) -> None:
    """Other shapes, dtypes or names on a rank: an error on all ranks, and life goes on."""
    last = hvd.rank() == hvd.size() - 1
    for mine, theirs in (
        ({"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)}),
        ({"w": torch.ones(4)}, {"w": torch.ones(4, dtype=torch.float64)}),
        ({"w": torch.ones(4)}, {"v": torch.ones(4)}),
        ({"v": torch.ones(4), "w": torch.ones(4)}, {"w": torch.ones(4)}),
    ):
        with raises(hvd.HorovodInternalError, str(hvd.size() - 1)):
            hvd.broadcast_parameters(theirs if last else mine, root_rank=0)
    equal(hvd.broadcast(torch.full((2,), hvd.rank()), 0), torch.zeros(2, dtype=torch.int64))


# -- optimizer state ------------------------------------------------------------------------------


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return optimizer.state_dict()


def _equal_trees(got: Any, want: Any, where: str) -> None:
    """Equal in value and in exact Python type, all the way down."""
    if isinstance(want, torch.Tensor):
        equal(got, want, where)
        return
    assert type(got) is type(want), f"{where}: got {type(got)}, want {type(want)}"
    if isinstance(want, dict):
        assert list(got) == list(want), f"{where}: keys {list(got)}, want {list(want)}"
        for key in want:
            _equal_trees(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {len(got)} entries, want {len(want)}"
        for index, one in enumerate(want):
            _equal_trees(got[index], one, f"{where}[{index}]")
    else:
        assert got == want, f"{where}: got {got!r}, want {want!r}"


def _trained_at_root(
    hvd: Any, root: int, make: Callable[[Any], torch.optim.Optimizer], stale_steps: int = 0
) -> None:
    """Only the root has trained (and has other options); afterwards all have its state."""
    rank = hvd.rank()
    reference_model = _model(1)
    reference = make(reference_model.parameters())
    _train(reference_model, reference, 5, seed=7)
    reference.param_groups[0]["lr"] = 0.0625

    model = _model(1)
    optimizer = make(model.parameters())
    if rank == root:
        _train(model, optimizer, 5, seed=7)
        optimizer.param_groups[0]["lr"] = 0.0625
    else:
        _train(model, optimizer, stale_steps, seed=rank)
    optimizer.zero_grad(set_to_none=True)
    for index, parameter in enumerate(model.parameters()):
        if index % 2:
            parameter.grad = torch.full_like(parameter, rank + 0.5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    _equal_trees(_state_of(optimizer), _state_of(reference), "state")
    for index, parameter in enumerate(model.parameters()):
        equal(parameter.detach(), before[index], f"parameter {index} was changed")
        if index % 2:
            equal(parameter.grad, torch.full_like(parameter, rank + 0.5), f"gradient {index}")
        else:
            assert parameter.grad is None, f"parameter {index} was given a gradient"
    # ... and the state works: one more step does the same everywhere.
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    _train(model, optimizer, 1, seed=3)
    same_on_all_ranks(*model.parameters(), what="after one more step")


def check_adamw_trained_on_rank_0(hvd: Any) -> None:
    _trained_at_root(hvd, 0, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))


def check_adam_trained_on_last_rank(hvd: Any) -> None:
    root = hvd.size() - 1
    _trained_at_root(hvd, root, lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99)))


def check_state_of_other_ranks_is_replaced(hvd: Any) -> None:
    """Others had trained, too, and more than the root."""
    _trained_at_root(hvd, 0, lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True), stale_steps=7)


def check_sgd_with_momentum(hvd: Any) -> None:
    _trained_at_root(
        hvd, hvd.size() - 1, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True)
    )


def check_sgd_without_state(hvd: Any) -> None:
    _trained_at_root(hvd, 0, lambda p: torch.optim.SGD(p, lr=0.01))


def check_options(hvd: Any) -> None:
    """Every option arrives with its type: tuple, bool, None, int, float, and a tensor lr."""
    rank = hvd.rank()
    root = hvd.size() - 1
    model = _model(0)
    weights, biases = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizer = torch.optim.Adam(
        [
            {"params": weights, "lr": torch.tensor(0.5 + rank), "betas": (0.5, 0.25 + rank / 100)},
            {"params": biases, "lr": 1 + rank, "amsgrad": rank == root, "mine": None},
        ],
        foreach=False,
    )
    optimizer.param_groups[1]["mine"] = {"deep": [rank, (rank, None)]}
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    first, second = optimizer.param_groups
    equal(torch.as_tensor(first["lr"]), torch.tensor(0.5 + root), "tensor lr")
    assert isinstance(first["lr"], torch.Tensor)
    equal(first["betas"], (0.5, 0.25 + root / 100), "betas")
    equal(second["lr"], 1 + root, "int lr")
    equal(second["amsgrad"], True, "bool")
    equal(second["foreach"], False, "foreach")
    equal(second["mine"], {"deep": [root, (root, None)]}, "an option of one's own")
    assert [id(p) for p in first["params"]] == [id(p) for p in weights], "parameters replaced"


def check_all_fresh(hvd: Any) -> None:
    """Nobody has trained: nothing appears that would change a later step."""
    model = _model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for parameter, want in zip(model.parameters(), before, strict=True):
        equal(parameter.detach(), want, "parameter")
        assert parameter.grad is None
    for state in optimizer.state.values():
        assert float(state.get("step", 0)) == 0, state
    _train(model, optimizer, 2, seed=5)
    want_model = _model(1)
    _train(want_model, torch.optim.AdamW(want_model.parameters(), lr=0.01, weight_decay=0.1), 2, 5)
    for parameter, other in zip(model.parameters(), want_model.parameters(), strict=True):
        equal(parameter.detach(), other.detach(), "after two steps")


def check_root_fresh_others_trained(hvd: Any) -> None:
    """An empty state is a state: it replaces what the others have."""
    model = _model(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if hvd.rank() != 0:
        _train(model, optimizer, 3, seed=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for state in optimizer.state.values():
        assert float(state.get("step", 0)) == 0, "a moment of another rank survived"


def check_state_of_wrapped_optimizer(hvd: Any) -> None:
    rank = hvd.rank()
    model = _model(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if rank == 0:
        _train(model, optimizer, 2, seed=2)
    want = _model(1)
    want_optimizer = torch.optim.Adam(want.parameters(), lr=0.01)
    _train(want, want_optimizer, 2, seed=2)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    _equal_trees(_state_of(optimizer), _state_of(want_optimizer), "state")
    _train(model, optimizer, 1, seed=9)
    _train(want, want_optimizer, 1, seed=9)
    for got, one in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got, one)


# -- objects --------------------------------------------------------------------------------------


def _thing(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "none": None,
        "nested": [(rank, "text ü"), {1, 2, rank}],
        "tensor": torch.full((3,), float(rank)),
    }


def check_broadcast_object(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        given = _thing(rank)
        got = hvd.broadcast_object(given, root_rank=root)
        assert got["rank"] == root
        assert got["nested"] == _thing(root)["nested"]
        equal(got["tensor"], torch.full((3,), float(root)))
        assert given["rank"] == rank, "the given object was changed"
        if rank != root:
            assert got is not given
    got = hvd.broadcast_object(None if rank else [1, 2], 0, "a name")
    assert got == [1, 2]
    equal(hvd.broadcast_object(rank, size - 1), size - 1, "a number")
    assert hvd.broadcast_object(None, 0) is None


def check_broadcast_objects_of_any_size(hvd: Any) -> None:
    rank = hvd.rank()
    for length in (0, 1, 1000, 300_001):
        text = "ab" * length if rank == 0 else "other"
        assert hvd.broadcast_object(text, root_rank=0) == "ab" * length, f"{length}"


def check_broadcast_object_is_a_copy(hvd: Any) -> None:
    """What others get is their own: changing it changes nothing elsewhere."""
    rank = hvd.rank()
    got = hvd.broadcast_object({"list": [0]}, root_rank=0)
    got["list"].append(rank)
    gathered = hvd.allgather_object(got["list"])
    assert gathered == [[0, other] for other in range(hvd.size())]


def check_broadcast_lambda(hvd: Any) -> None:
    """Functions of the main program travel by value (cloudpickle)."""
    offset = hvd.rank() + 10
    function = hvd.broadcast_object(lambda x: x + offset, root_rank=0)
    assert function(1) == 11


def check_allgather_object(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    got = hvd.allgather_object({"rank": rank, "text": "x" * (1 + rank * 1000)})
    assert isinstance(got, list)
    assert got == [{"rank": r, "text": "x" * (1 + r * 1000)} for r in range(size)]
    assert hvd.allgather_object(None, name="none") == [None] * size
    assert hvd.allgather_object((rank,)) == [(r,) for r in range(size)]


def check_object_errors(hvd: Any) -> None:
    with raises(ValueError, "root"):
        hvd.broadcast_object(1, root_rank=hvd.size())
    equal(hvd.broadcast_object(hvd.rank(), 0), 0, "after the error")
