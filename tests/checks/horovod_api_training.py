"""Horovod's promises, five: broadcasting a model, an optimizer and objects; DistributedOptimizer.

See ``horovod_api.py``. Some come from Horovod's own tests, where their names are from.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from checks.support import close, equal, no_warnings, raises, same_on_all_ranks, several, warns


class Pair:
    """An object of a class that the receiving ranks know."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def _linear(*numbers: float) -> nn.Linear:
    """One layer without bias and with these weights."""
    model = nn.Linear(len(numbers), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([numbers]))
    return model


def _wrap(hvd: Any, model: nn.Module, lr: float = 1.0, **options: Any) -> Any:
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), **options)


def _mean(hvd: Any) -> float:
    """Of rank + 1."""
    return float(hvd.size() + 1) / 2


def _pull(model: nn.Linear, factor: float) -> None:
    """Add ``factor`` to the gradient of each weight."""
    (model.weight * factor).sum().backward()


# -- parameters -----------------------------------------------------------------------------------


def check_broadcast_parameters(hvd: Any) -> None:
    """A state_dict, a dict, a list of pairs, a list of tensors: written in place."""
    root = hvd.size() - 1
    takes: list[Callable[[nn.Module], Any]] = [
        lambda model: model.state_dict(),
        lambda model: dict(model.named_parameters()),
        lambda model: list(model.named_parameters()),
        lambda model: list(model.parameters()),
    ]
    for take in takes:
        model = _linear(hvd.rank(), 2.0)
        weight = model.weight
        assert hvd.broadcast_parameters(take(model), root_rank=root) is None
        assert model.weight is weight
        assert weight.requires_grad
        equal(weight.detach(), torch.tensor([[float(root), 2.0]]))


def check_broadcast_buffers(hvd: Any) -> None:
    """Of a state_dict: floats, and a 0-dim integer."""
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(hvd.rank() + 1)
    model.num_batches_tracked.fill_(hvd.rank() + 5)
    hvd.broadcast_parameters(model.state_dict(), 0)
    equal(model.running_mean, torch.ones(3))
    equal(model.num_batches_tracked, torch.tensor(5))


def check_broadcast_parameters_sorts_a_dict(hvd: Any) -> None:
    names = [f"layer.{index}" for index in range(5)]
    order = names if hvd.rank() % 2 else names[::-1]
    given = {name: torch.full((int(name[-1]) + 1,), float(hvd.rank())) for name in order}
    hvd.broadcast_parameters(given, root_rank=0)
    for name in names:
        equal(given[name], torch.zeros(int(name[-1]) + 1), name)


def check_broadcast_nothing(hvd: Any) -> None:
    assert hvd.broadcast_parameters({}, root_rank=0) is None
    assert hvd.broadcast_parameters([], root_rank=0) is None


# -- the state of an optimizer --------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, betas=(0.8, 0.9)),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}


def _equal_states(got: Any, want: Any, what: str) -> None:
    if isinstance(want, torch.Tensor):
        equal(got, want, what)
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{what}: {list(got)}, want {list(want)}"
        for key in want:
            _equal_states(got[key], want[key], f"{what}.{key}")
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want), f"{what}: {got}, want {want}"
        assert len(got) == len(want), f"{what}: {got}, want {want}"
        for index, one in enumerate(want):
            _equal_states(got[index], one, f"{what}.{index}")
    else:
        equal(got, want, what)


def check_broadcast_state_of_every_optimizer(hvd: Any) -> None:
    """Each rank trained on its own; afterwards all have what the root has, options included."""
    rank, root = hvd.rank(), hvd.size() - 1
    for name, make in OPTIMIZERS.items():

        def train(seed: int, make: Any = make) -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
            optimizer = make(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.rand(4, 3)).sum().backward()
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.01 * (seed + 1)
            return model, optimizer

        (model, optimizer), (want_model, want) = train(rank), train(root)
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        assert hvd.broadcast_optimizer_state(optimizer, root_rank=root) is None
        if want.state_dict()["state"]:
            _equal_states(optimizer.state_dict(), want.state_dict(), name)
        for one in (model, want_model):
            one.zero_grad()
            one(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        if want.state_dict()["state"]:
            want.step()
            _equal_states(model.state_dict(), want_model.state_dict(), f"{name}, the next step")


def check_broadcast_state_of_a_fresh_optimizer(hvd: Any) -> None:
    """Only the root was trained, as after loading a checkpoint there."""
    for name in ("SGD momentum", "Adam"):
        model = _linear(1.0, 2.0)
        optimizer = OPTIMIZERS[name](model.parameters())
        if hvd.rank() == 0:
            for _ in range(3):
                _pull(model, 0.5)
                optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        model.zero_grad()
        _pull(model, 0.5)
        optimizer.step()
        same_on_all_ranks(model.weight, *optimizer.state[model.weight].values(), what=name)


def check_broadcast_state_of_a_wrapped_optimizer(hvd: Any) -> None:
    """No collective of the training is started by it; before the first step, and after."""
    model = _linear(1.0, 2.0)
    plain = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    for _ in range(3):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        equal(optimizer.param_groups[0]["lr"], 0.1)
        optimizer.zero_grad()
        _pull(model, hvd.rank() + 1.0)
        optimizer.step()
        same_on_all_ranks(model.weight, *optimizer.state[model.weight].values())


def check_broadcast_state_no_grad(hvd: Any) -> None:
    """From Horovod's tests: a parameter that needs no gradient gets none."""
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    trained = nn.Parameter(torch.ones(3))
    plain = torch.optim.SGD([frozen, trained], lr=0.001, momentum=0.9, nesterov=True)
    optimizer = hvd.DistributedOptimizer(
        plain, named_parameters=[("frozen", frozen), ("trained", trained)]
    )
    optimizer.zero_grad()
    (frozen * trained * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert frozen.grad is None
    equal(frozen.detach(), torch.ones(3))
    close(trained.grad, torch.full((3,), _mean(hvd)))


def check_broadcast_state_of_sparse_adam(hvd: Any) -> None:
    """``model`` tells which parameters have sparse gradients."""
    model = nn.Embedding(5, 2, sparse=True)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    equal(optimizer.param_groups[0]["lr"], 0.1)


# -- objects --------------------------------------------------------------------------------------

OBJECTS = [
    None,
    True,
    7,
    1.5,
    "text",
    b"bytes",
    (1, "two", [3.0, None]),
    {"nested": {"list": [1, 2, {"deep": ()}]}, 5: {6}},
    Pair(1, "two"),
    "x" * 100_000,
]


def check_broadcast_object(hvd: Any) -> None:
    """The root gives; what the others hand in plays no part. The root gets its own object."""
    root = hvd.size() - 1
    for value in OBJECTS:
        given = copy.deepcopy(value)
        got = hvd.broadcast_object(given, root_rank=root)
        equal(got, value)
        if hvd.rank() == root:
            assert got is given
        # Of another type on another rank: then it needs a name, in Horovod.
        mine = value if hvd.rank() == 0 else hvd.rank()
        equal(hvd.broadcast_object(mine, name="object"), value, "from rank 0")


def check_broadcast_object_with_tensors(hvd: Any) -> None:
    given = {"tensor": torch.full((3,), float(hvd.rank())), "type": torch.float16}
    got = hvd.broadcast_object(given, 0)
    equal(got["tensor"], torch.zeros(3))
    assert got["type"] is torch.float16


def check_allgather_object(hvd: Any) -> None:
    """In rank order, of any type and size."""
    rank, size = hvd.rank(), hvd.size()
    equal(hvd.allgather_object(rank), list(range(size)))
    equal(hvd.allgather_object({"rank": rank}), [{"rank": other} for other in range(size)])
    got = hvd.allgather_object("x" * (10 ** (rank + 1)), name="lengths")
    equal([len(one) for one in got], [10 ** (other + 1) for other in range(size)])
    equal(hvd.allgather_object(None), [None] * size)
    mine = [1, "two", None, 4.0][rank % 4]
    equal(hvd.allgather_object(mine, name="types"), [1, "two", None, 4.0][:size])


# -- compression ----------------------------------------------------------------------------------


def check_compression_none(hvd: Any) -> None:
    tensor = torch.ones(3)
    got, context = hvd.Compression.none.compress(tensor)
    assert got is tensor
    assert hvd.Compression.none.decompress(got, context) is tensor


def check_compression_fp16(hvd: Any) -> None:
    """Every floating dtype goes as float16 and comes back; integers pass."""
    for dtype in (torch.float16, torch.float32, torch.float64):
        got, context = hvd.Compression.fp16.compress(torch.full((3,), 1.5, dtype=dtype))
        assert got.dtype == torch.float16
        equal(hvd.Compression.fp16.decompress(got, context), torch.full((3,), 1.5, dtype=dtype))
        got = hvd.allreduce(torch.ones(3, dtype=dtype), compression=hvd.Compression.fp16)
        equal(got, torch.ones(3, dtype=dtype))
    tensor = torch.ones(3, dtype=torch.int32)
    got, context = hvd.Compression.fp16.compress(tensor)
    assert got is tensor
    assert hvd.Compression.fp16.decompress(got, context) is tensor


def check_compression_of_ones_own(hvd: Any) -> None:
    """Any class with ``compress`` and ``decompress``, for collectives and for training."""

    class Negative:
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
            return -tensor, "context"

        @staticmethod
        def decompress(tensor: torch.Tensor, context: str) -> torch.Tensor:
            assert context == "context"
            return -2 * tensor

    want = torch.full((3,), 2.0 * hvd.size())
    equal(hvd.allreduce(torch.ones(3), op=hvd.Sum, compression=Negative), want)
    model = _linear(0.0, 0.0)
    optimizer = _wrap(hvd, model, compression=Negative, op=hvd.Sum)
    _pull(model, 1.0)
    optimizer.step()
    equal(model.weight.grad, torch.full((1, 2), 2.0 * hvd.size()))


# -- the wrapped optimizer ------------------------------------------------------------------------


def check_wrapped_class(hvd: Any) -> None:
    model = _linear(1.0)
    plain = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.5, 0.6))
    for op in (hvd.Average, hvd.Adasum):
        optimizer = hvd.DistributedOptimizer(
            plain, named_parameters=model.named_parameters(), op=op
        )
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        assert type(optimizer) is not torch.optim.Adam
        assert optimizer.param_groups[0]["params"][0] is model.weight
        equal(optimizer.param_groups[0]["lr"], 0.5)
        equal(optimizer.param_groups[0]["betas"], (0.5, 0.6))
        for name in ("synchronize", "skip_synchronize", "set_backward_passes_per_step"):
            assert callable(getattr(optimizer, name)), name
        equal(optimizer.backward_passes_per_step, 1)


def check_names_that_are_no_pairs(hvd: Any) -> None:
    model = _linear(1.0)
    for names in (model.parameters(), [model.weight], ["weight"]):
        with raises(ValueError, "named_parameters"):
            _wrap(hvd, model, named_parameters=names)


def check_names_that_repeat(hvd: Any) -> None:
    """From Horovod's tests (test_duplicate_names)."""
    first, second = _linear(1.0), _linear(2.0)
    plain = torch.optim.SGD([first.weight, second.weight], lr=0.1)
    with raises(ValueError, "unique", "weight"):
        hvd.DistributedOptimizer(
            plain, named_parameters=[*first.named_parameters(), *second.named_parameters()]
        )


def check_names_that_are_missing(hvd: Any) -> None:
    first, second = _linear(1.0), _linear(2.0)
    plain = torch.optim.SGD([first.weight, second.weight], lr=0.1)
    with raises(ValueError, "not named"):
        hvd.DistributedOptimizer(plain, named_parameters=first.named_parameters())


def check_names_of_more_than_the_optimizer_has(hvd: Any) -> None:
    model = nn.Sequential(_linear(1.0), _linear(1.0))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([model[0].weight], lr=1.0), named_parameters=model.named_parameters()
    )
    _pull(model[0], hvd.rank() + 1.0)
    optimizer.step()
    close(model[0].weight.detach(), torch.tensor([[1 - _mean(hvd)]]))


def check_no_names(hvd: Any) -> None:
    """With several groups of parameters, too."""
    first, second = _linear(1.0), _linear(1.0)
    plain = torch.optim.SGD([{"params": [first.weight]}, {"params": [second.weight]}], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain)
    _pull(first, hvd.rank() + 1.0)
    _pull(second, 2.0 * (hvd.rank() + 1))
    optimizer.step()
    close(first.weight.grad, torch.tensor([[_mean(hvd)]]))
    close(second.weight.grad, torch.tensor([[2 * _mean(hvd)]]))


def check_bad_options(hvd: Any) -> None:
    model = _linear(1.0)
    for passes in (0, -1):
        with raises(ValueError, "backward_passes_per_step"):
            _wrap(hvd, model, backward_passes_per_step=passes)
    with raises(ValueError, "gradient_predivide_factor"):
        _wrap(hvd, model, gradient_predivide_factor=2.0, op=hvd.Sum)
    with raises(ValueError, "groups"):
        _wrap(hvd, model, groups=-1)
    with raises(ValueError, "groups"):
        _wrap(hvd, model, groups=[["weight"]])
    with raises(ValueError, "groups"):
        _wrap(hvd, model, groups=[[model.weight], [model.weight]])
    with warns(DeprecationWarning, "num_groups", "groups"):
        _wrap(hvd, model, num_groups=1)


def check_step_averages(hvd: Any) -> None:
    for op, factor in ((hvd.Average, 1), (hvd.Sum, hvd.size())):
        model = _linear(0.0, 0.0)
        optimizer = _wrap(hvd, model, op=op)
        for step in (1, 2, 3):
            optimizer.zero_grad()
            _pull(model, hvd.rank() + 1.0)
            assert optimizer.step() is None
            want = torch.full((1, 2), _mean(hvd) * factor)
            close(model.weight.grad, want, "gradient")
            close(model.weight.detach(), -step * want, "weight")


def check_synchronize(hvd: Any) -> None:
    """The averaged gradient is there after it, once and again; the weight has not moved."""
    model = _linear(0.0)
    optimizer = _wrap(hvd, model)
    _pull(model, hvd.rank() + 1.0)
    for _ in range(2):
        assert optimizer.synchronize() is None
        close(model.weight.grad, torch.tensor([[_mean(hvd)]]))
    equal(model.weight.detach(), torch.tensor([[0.0]]))
    with no_warnings(), optimizer.skip_synchronize():
        optimizer.step()
    close(model.weight.detach(), torch.tensor([[-_mean(hvd)]]))


def check_gradient_clipping(hvd: Any) -> None:
    """From Horovod's tests: what is done between synchronize and step counts."""
    model = _linear(0.5)
    optimizer = _wrap(hvd, model, lr=0.1)
    loss = functional.mse_loss(model(torch.ones(1, 1)), torch.ones(1, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.synchronize()
    before = model.weight.grad.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert abs(before) > abs(model.weight.grad.item()) > 0
    with optimizer.skip_synchronize():
        optimizer.step()
    close(model.weight.detach(), torch.tensor([[0.51]]), rtol=1e-3)


def check_synchronize_step_warning(hvd: Any) -> None:
    """From Horovod's tests: synchronize, then step without skip_synchronize."""
    model = _linear(0.0)
    optimizer = _wrap(hvd, model)
    _pull(model, 1.0)
    optimizer.synchronize()
    with warns(UserWarning, "skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    _pull(model, 1.0)
    with no_warnings():
        optimizer.step()
    close(model.weight.detach(), torch.tensor([[-2.0]]))


def check_skip_synchronize_ends_on_an_error(hvd: Any) -> None:
    model = _linear(0.0)
    optimizer = _wrap(hvd, model)
    with raises(KeyError), optimizer.skip_synchronize():
        raise KeyError("within the block")
    _pull(model, hvd.rank() + 1.0)
    optimizer.step()
    close(model.weight.grad, torch.tensor([[_mean(hvd)]]))


def check_zero_grad(hvd: Any) -> None:
    """Without arguments; the gradients are gone or zero."""
    model = _linear(0.0)
    optimizer = _wrap(hvd, model)
    optimizer.zero_grad()
    for end in (optimizer.step, optimizer.synchronize):
        _pull(model, 1.0)
        end()
        assert optimizer.zero_grad() is None
        assert model.weight.grad is None or model.weight.grad.item() == 0


def check_one_backward_too_many(hvd: Any) -> None:
    """An AssertionError that tells what to increase; a step later all is well."""
    model = _linear(0.0)
    optimizer = _wrap(hvd, model)
    _pull(model, 1.0)
    with raises(AssertionError, "backward_passes_per_step"):
        _pull(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    _pull(model, hvd.rank() + 1.0)
    optimizer.step()
    close(model.weight.grad, torch.tensor([[_mean(hvd)]]))


def check_backward_passes_are_summed(hvd: Any) -> None:
    model = _linear(0.0)
    optimizer = _wrap(hvd, model, backward_passes_per_step=3)
    for step in (1, 2):
        optimizer.zero_grad()
        for _ in range(3):
            _pull(model, hvd.rank() + 1.0)
        optimizer.step()
        close(model.weight.grad, torch.tensor([[3 * _mean(hvd)]]))
        close(model.weight.detach(), torch.tensor([[-3 * step * _mean(hvd)]]))


def check_step_before_all_passes(hvd: Any) -> None:
    model = _linear(0.0)
    optimizer = _wrap(hvd, model, backward_passes_per_step=3)
    for _ in range(2):
        optimizer.zero_grad()
        _pull(model, hvd.rank() + 1.0)
        optimizer.step()
        close(model.weight.grad, torch.tensor([[_mean(hvd)]]))


def check_set_backward_passes_per_step(hvd: Any) -> None:
    model = _linear(0.0)
    optimizer = _wrap(hvd, model)
    for passes in (2, 1, 3):
        assert optimizer.set_backward_passes_per_step(passes) is None
        equal(optimizer.backward_passes_per_step, passes)
        optimizer.zero_grad()
        for _ in range(passes):
            _pull(model, hvd.rank() + 1.0)
        optimizer.step()
        close(model.weight.grad, torch.tensor([[passes * _mean(hvd)]]))


def check_one_graph_twice(hvd: Any) -> None:
    model = _linear(0.0)
    optimizer = _wrap(hvd, model, backward_passes_per_step=2)
    loss = (model.weight * (hvd.rank() + 1.0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    close(model.weight.grad, torch.tensor([[2 * _mean(hvd)]]))


def check_groups(hvd: Any) -> None:
    """A number of groups, or lists of parameters; what is in no list is a group of its own."""
    for case in ("1", "2", "9", "lists", "some"):
        model = nn.Sequential(*(_linear(0.0) for _ in range(4)))
        weights = [layer.weight for layer in model]
        groups = {"lists": [weights[:2], weights[2:]], "some": [weights[1:3]]}.get(case)
        optimizer = _wrap(hvd, model, groups=groups or int(case))
        for _ in range(2):
            optimizer.zero_grad()
            for index, layer in enumerate(model):
                _pull(layer, (hvd.rank() + 1.0) * (index + 1))
            optimizer.step()
            for index, weight in enumerate(weights):
                close(weight.grad, torch.tensor([[_mean(hvd) * (index + 1)]]), case)


def check_gradient_predivide_factor(hvd: Any) -> None:
    for factor in (2.0, float(hvd.size())):
        model = _linear(0.0)
        optimizer = _wrap(hvd, model, gradient_predivide_factor=factor)
        _pull(model, hvd.rank() + 1.0)
        optimizer.step()
        close(model.weight.grad, torch.tensor([[_mean(hvd)]]))


def check_compression_of_gradients(hvd: Any) -> None:
    for dtype in (torch.float32, torch.float64):
        model = _linear(0.0).to(dtype)
        optimizer = _wrap(hvd, model, compression=hvd.Compression.fp16)
        _pull(model, hvd.rank() + 1.0)
        optimizer.step()
        close(model.weight.grad, torch.tensor([[_mean(hvd)]], dtype=dtype))


def check_parameters_of_several_dtypes(hvd: Any) -> None:
    model = nn.Sequential(_linear(0.0), _linear(0.0).double(), _linear(0.0).half())
    optimizer = _wrap(hvd, model)
    for layer in model:
        _pull(layer, hvd.rank() + 1.0)
    optimizer.step()
    for layer in model:
        close(layer.weight.grad, torch.tensor([[_mean(hvd)]], dtype=layer.weight.dtype))


def check_state_dict(hvd: Any) -> None:
    """The plain optimizer's, in both directions."""
    model, twin = _linear(1.0), _linear(1.0)
    make = OPTIMIZERS["Adam"]
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), named_parameters=model.named_parameters()
    )
    plain = make(twin.parameters())
    for _ in range(2):
        for one, factor in ((model, hvd.rank() + 1.0), (twin, _mean(hvd))):
            one.zero_grad()
            _pull(one, factor)
        optimizer.step()
        plain.step()
        _equal_states(optimizer.state_dict(), plain.state_dict(), "state_dict")
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, factor in ((model, hvd.rank() + 1.0), (twin, _mean(hvd))):
        one.zero_grad()
        _pull(one, factor)
    optimizer.step()
    plain.step()
    equal(model.weight.detach(), twin.weight.detach())


def check_schedulers(hvd: Any) -> None:
    """Built on the wrapped optimizer, its rates hold, and it does not warn."""
    model = _linear(0.0)
    optimizer = _wrap(hvd, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with no_warnings():
        for step in range(3):
            equal(optimizer.param_groups[0]["lr"], 0.5**step)
            optimizer.zero_grad()
            _pull(model, 1.0)
            optimizer.step()
            scheduler.step()
    close(model.weight.detach(), torch.tensor([[-1.75]]))


def check_closure(hvd: Any) -> None:
    """Its loss comes back; it runs once."""
    model = _linear(0.0)
    optimizer = _wrap(hvd, model)
    calls = []

    def closure() -> float:
        calls.append(1)
        return 5.0

    _pull(model, hvd.rank() + 1.0)
    equal(optimizer.step(closure), 5.0)
    equal(len(calls), 1)
    close(model.weight.detach(), torch.tensor([[-_mean(hvd)]]))
    optimizer.zero_grad()
    _pull(model, hvd.rank() + 1.0)
    equal(optimizer.step(closure=closure), 5.0)


def check_step_without_backward(hvd: Any) -> None:
    model = _linear(1.0)
    optimizer = _wrap(hvd, model)
    optimizer.step()
    equal(model.weight.detach(), torch.tensor([[1.0]]))


def check_sparse_gradients(hvd: Any) -> None:
    """They stay sparse, as dense or not."""
    for as_dense in (False, True):
        model = nn.Embedding(hvd.size() + 1, 2, sparse=True)
        hvd.broadcast_parameters(model.state_dict(), 0)
        before = model.weight.detach().clone()
        optimizer = _wrap(hvd, model, sparse_as_dense=as_dense)
        for step in (1, 2):
            optimizer.zero_grad()
            model(torch.tensor([0, hvd.rank() + 1])).sum().backward()
            optimizer.step()
            assert model.weight.grad.is_sparse
            want = torch.full((hvd.size() + 1, 2), 1.0 / hvd.size())
            want[0] = 1.0
            close(model.weight.detach(), before - step * want, f"step {step}", rtol=1e-5, atol=1e-5)


@several
def check_force_allreduce(hvd: Any) -> None:
    """From Horovod's tests: ranks use different heads, and all average all of them."""
    shared, first, second = _linear(0.0), _linear(0.0), _linear(0.0)
    model = nn.Sequential(shared, first, second)
    optimizer = _wrap(hvd, model)
    size, low = hvd.size(), hvd.size() // 2
    for step in (1, 2):
        optimizer.zero_grad()
        _pull(shared, 1.0)
        _pull(first if hvd.rank() < low else second, 1.0)
        optimizer.step()
        for layer, count in ((shared, size), (first, low), (second, size - low)):
            close(layer.weight.detach(), torch.tensor([[-step * count / size]]))


def check_parameter_that_nobody_used(hvd: Any) -> None:
    model = nn.Sequential(_linear(0.0), _linear(3.0))
    optimizer = _wrap(hvd, model)
    _pull(model[0], 1.0)
    optimizer.step()
    equal(model[1].weight.detach(), torch.tensor([[3.0]]))
    assert model[1].weight.grad is None or model[1].weight.grad.item() == 0


def check_dynamic_requires_grad(hvd: Any) -> None:
    """From Horovod's tests: two optimizers take turns, the other's model is frozen."""
    generator, critic = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)
    hvd.broadcast_parameters(generator.state_dict(), 0)
    hvd.broadcast_parameters(critic.state_dict(), 0)
    both = [(generator, _wrap(hvd, generator, 0.1)), (critic, _wrap(hvd, critic, 0.1))]
    inputs = torch.rand(2, 1, 4, 4) + hvd.rank()
    for _ in range(3):
        for trained in (generator, critic):
            for model, optimizer in both:
                for parameter in model.parameters():
                    parameter.requires_grad_(model is trained)
                optimizer.zero_grad()
            critic(generator(inputs)).sum().backward()
            for model, optimizer in both:
                for parameter in model.parameters():
                    has = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
                    assert has == (model is trained)
                if model is trained:
                    optimizer.step()
            same_on_all_ranks(*trained.parameters())


def check_two_optimizers_in_one_backward(hvd: Any) -> None:
    first, second = _linear(0.0), _linear(0.0)
    one = _wrap(hvd, first, named_parameters=[("first", first.weight)])
    two = _wrap(hvd, second, named_parameters=[("second", second.weight)], op=hvd.Sum)
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        ((first.weight + 2 * second.weight) * (hvd.rank() + 1)).sum().backward()
        one.step()
        two.step()
        close(first.weight.grad, torch.tensor([[_mean(hvd)]]))
        close(second.weight.grad, torch.tensor([[2 * _mean(hvd) * hvd.size()]]))


def check_training_beside_other_collectives(hvd: Any) -> None:
    """A metric is averaged between backward and step, unnamed, as in Horovod's examples."""
    model = _linear(0.0)
    optimizer = _wrap(hvd, model)
    for _ in range(3):
        optimizer.zero_grad()
        _pull(model, hvd.rank() + 1.0)
        got = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), name="loss")
        close(got, torch.tensor(_mean(hvd)))
        optimizer.step()
        close(hvd.allreduce(torch.tensor(hvd.rank() + 1.0)), torch.tensor(_mean(hvd)))
        close(model.weight.grad, torch.tensor([[_mean(hvd)]]))


def check_adasum_optimizer(hvd: Any) -> None:
    """From Horovod's tests (test_delta_optimizer): equal steps give one of them."""
    if hvd.__name__ != "unidist" and not hvd.mpi_enabled():
        return  # Horovod has no Adasum over gloo
    model = _linear(0.0, 0.0)
    optimizer = _wrap(hvd, model, op=hvd.Adasum)
    for step in (1, 2):
        optimizer.zero_grad()
        _pull(model, 2.0)
        assert optimizer.step() is None
        close(model.weight.detach(), torch.full((1, 2), -2.0 * step), rtol=1e-5)
    assert optimizer.synchronize() is None
    with raises(AssertionError, "Adasum"), optimizer.skip_synchronize():
        pass


@several
def check_sync_batch_norm(hvd: Any) -> None:
    """Horovod's wants a GPU; ours need not. At least: torch's arguments, and 2 dimensions."""
    layer = hvd.SyncBatchNorm(3, eps=1e-3, momentum=0.2, affine=True, track_running_stats=True)
    assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
    equal((layer.num_features, layer.eps, layer.momentum), (3, 1e-3, 0.2))
    with raises(ValueError):
        layer(torch.ones(3))


def check_training_is_quiet(hvd: Any) -> None:
    """No warning in the whole of an ordinary script."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        optimizer = _wrap(hvd, model, 0.1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.rand(4, 2)).square().mean()
            loss.backward()
            optimizer.step()
            hvd.allreduce(loss.detach())
    same_on_all_ranks(*model.parameters())
