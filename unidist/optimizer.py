"""DistributedOptimizer: the user's optimizer, stepping on gradients reduced over all ranks.

The user's object is kept. It changes its class to one made here, which inherits from the user's
class and has its name, so its state, options and attributes are what they were, schedulers that
hold it go on holding the right object, and no constructor runs a second time.
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unidist import basics
from unidist.compression import Compression, Compressor
from unidist.delta import DeltaReducer
from unidist.process_sets import ProcessSet, global_process_set
from unidist.reducer import Reducer
from unidist.reduction import Adasum, Average, Reduction, Sum, as_reduction

Named = list[tuple[str, torch.nn.Parameter]]


class DistributedMixin:
    """What the class made for a user's optimizer adds to it."""

    _unidist: _Distribution
    _unidist_base: type[torch.optim.Optimizer]

    def synchronize(self) -> None:
        """Reduce the gradients and wait, before reading or clipping them. All ranks call it.

        Afterwards ``step`` would warn: call it inside ``skip_synchronize``.
        """
        self._unidist.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step`` takes the gradients as they are, since ``synchronize`` was called."""
        with self._unidist.skipping():
            yield

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are accumulated before the gradients are reduced."""
        return self._unidist.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes are accumulated before the gradients are reduced."""
        self._unidist.set_passes(passes)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients, then step. All ranks must call it.

        With a closure, the gradients that each call of it computes are reduced, too, so optimizers
        that evaluate it several times see the joint loss' gradient every time.
        """
        base = super().step  # type: ignore[misc]
        return self._unidist.step(base, *args, **kwargs)

    # torch wraps a class' step to run the step hooks; the user's class has that wrapper already.
    step.hooked = True  # type: ignore[attr-defined]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Finish the reduction before a GradScaler looks at the gradients.

        Its ``step`` asks for this first of all, then divides the gradients and tests them for
        infinities. All ranks have to see the same ones, or they disagree about skipping the step.
        """
        self._unidist.settle()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients; arguments are those of the user's class (``set_to_none``).

        A reduction that is under way is finished first, since peers may be waiting for it. Call it
        between ``backward`` and ``step`` only where all ranks do, after the same backward passes.
        """
        self._unidist.discard()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the optimizer's state; a reduction that is under way is finished first."""
        self._unidist.settle()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def add_param_group(self, param_group: Any) -> None:
        """Add parameters, whose gradients are reduced from then on. All ranks must call it."""
        self._unidist.settle()
        super().add_param_group(param_group)  # type: ignore[misc]
        groups = self.param_groups  # type: ignore[attr-defined]
        self._unidist.add_group(len(groups) - 1, groups[-1]["params"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or pickle has parameters of its own, which no hook watches: it is the plain
        # optimizer again, to be wrapped where it is loaded.
        state = self.__getstate__()  # type: ignore[attr-defined]
        return _plain, (self._unidist_base,), state


def _plain(base: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return base.__new__(base)


@functools.cache
def _distributed_class(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    return type(
        base.__name__,
        (DistributedMixin, base),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "_unidist_base": base,
        },
    )


class _Distribution:
    """What a distributed optimizer knows beyond the user's: its reducer, and where a step is."""

    def __init__(
        self,
        reducer: Reducer | None,
        deltas: DeltaReducer | None,
        passes: int,
    ) -> None:
        self.passes = passes
        self._reducer = reducer
        self._deltas = deltas
        self._skip = False
        #: synchronize() was called and no gradient has come since
        self._synchronized = False
        #: that was not the user's call, so that there is nothing to warn of
        self._settled = False
        self._stepping = False

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()

    def synchronize(self) -> None:
        if self._deltas is not None:
            return
        if self._reducer is not None:
            self._reducer.finish()
        self._synchronized = True

    @contextmanager
    def skipping(self) -> Iterator[None]:
        if self._deltas is not None:
            raise AssertionError(
                "skip_synchronize is not supported with op=Adasum, which combines the steps "
                "themselves and not the gradients: clip the local gradients before step()."
            )
        before, self._skip = self._skip, True
        try:
            yield
        finally:
            self._skip = before

    def set_passes(self, passes: int) -> None:
        _check_passes(passes)
        if self._reducer is not None:
            self._reducer.set_passes(passes)
        self.passes = passes

    def discard(self) -> None:
        """Make it legal to forget gradients: what peers are waiting for is reduced first."""
        if self._reducer is not None and self._reducer.dirty:
            self._reducer.discard()
        self._synchronized = self._settled = False

    def settle(self) -> None:
        """Finish a reduction that is under way; ``step`` will take its gradients as they are."""
        if self._reducer is not None and self._reducer.dirty:
            self._reducer.finish()
            self._synchronized = self._settled = True

    def add_group(self, index: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        named = [(f"allreduce.noname.{index}.{i}", p) for i, p in enumerate(parameters)]
        if self._reducer is not None:
            self._reducer.add(named)
        if self._deltas is not None:
            self._deltas.add(named)

    def step(self, base: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``step`` on reduced gradients, or combine the change that it makes."""
        if self._stepping:  # the user's step() calls itself
            return base(*args, **kwargs)
        self._stepping = True
        try:
            if self._deltas is not None:
                self._deltas.begin()
                value = base(*args, **kwargs)
                self._deltas.finish()
                return value
            if not self._skip:
                closure = kwargs.get("closure", args[0] if args else None)
                self._reduce_before_step(closure)
                if self._reducer is not None and callable(closure):
                    closure = self._reducing(closure)
                    if "closure" in kwargs:
                        kwargs["closure"] = closure
                    else:
                        args = (closure, *args[1:])
            return base(*args, **kwargs)
        finally:
            self._stepping = self._synchronized = self._settled = False

    def _reduce_before_step(self, closure: Any) -> None:
        reducer = self._reducer
        if self._synchronized and not (reducer is not None and reducer.dirty):
            if not self._settled:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). The gradients are reduced already and are taken as "
                    "they are. Write: optimizer.synchronize(); with optimizer.skip_synchronize(): "
                    "optimizer.step()",
                    stacklevel=4,
                )
        elif reducer is not None and not callable(closure):
            reducer.finish()

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with the gradients that it computes reduced before it returns."""

        @functools.wraps(closure)
        def closure_and_reduce() -> Any:
            value = closure()
            reducer = self._reducer
            assert reducer is not None
            if not self._synchronized or reducer.dirty:
                reducer.finish()
            return value

        return closure_and_reduce


def _check_passes(passes: int) -> None:
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be an integer > 0, but is {passes!r}.")


def _name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> Named:
    """Pair the optimizer's parameters, in its order, with the user's names or default ones."""
    owned = [
        (f"allreduce.noname.{g}.{i}", parameter)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]
    if named_parameters is None:
        return owned
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(map(str, repeated))}."
        )
    by_parameter = {parameter: name for name, parameter in pairs}
    unnamed = [
        f"parameter {label.removeprefix('allreduce.noname.')} (group.index) of shape "
        f"{tuple(parameter.shape)}"
        for label, parameter in owned
        if parameter not in by_parameter
    ]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{'; '.join(unnamed)}. Python object ids do not help here, so pass all of "
            "model.named_parameters()."
        )
    return [(str(by_parameter[parameter]), parameter) for _, parameter in owned]


def _resolve_groups(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, num_groups: int, named: Named
) -> list[list[str]]:
    """The names of the parameters of each group."""
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed.",
            DeprecationWarning,
            stacklevel=3,
        )
        if groups is None:
            groups = num_groups
    if groups is None:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups should be a non-negative integer or lists, got {groups}.")
        trainable = [name for name, parameter in named if parameter.requires_grad]
        count = min(groups, len(trainable))
        if not count:
            return []
        bounds = [len(trainable) * i // count for i in range(count + 1)]
        return [trainable[a:b] for a, b in itertools.pairwise(bounds)]
    if not isinstance(groups, (list, tuple)) or any(
        not isinstance(group, (list, tuple)) or any(not isinstance(t, torch.Tensor) for t in group)
        for group in groups
    ):
        raise ValueError(
            "groups should be a non-negative integer or a list of lists of torch.Tensor, but is "
            f"{type(groups).__name__}."
        )
    name_of = {parameter: name for name, parameter in named}
    seen: set[torch.Tensor] = set()
    result = []
    for group in groups:
        for tensor in group:
            if tensor in seen:
                raise ValueError(
                    "A parameter can only appear once in groups, but "
                    f"{name_of.get(tensor, 'one')!r} appears more than once."
                )
            seen.add(tensor)
        # Tensors that are not this optimizer's are ignored, as in Horovod.
        result.append([name_of[t] for t in group if t in name_of])
    return result


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer step on gradients that are reduced over all ranks of the process set.

    The same object is returned: it keeps its state, options and attributes, and is an instance of
    a class that inherits from its own and bears its name. Gradients become views into flat buckets
    that are all-reduced while backward goes on; ``step`` waits for them. A parameter without a
    gradient on this rank counts as zeros; one without a gradient on all ranks keeps ``grad is
    None``, so that weight decay leaves it alone.

    Args:
        optimizer: any torch optimizer. All ranks must wrap the same parameters.
        named_parameters: names for errors, usually ``model.named_parameters()``; may hold more
            parameters than the optimizer has, but not fewer.
        compression: ``Compression.fp16`` reduces in half precision.
        backward_passes_per_step: gradients are summed over this many backward passes before they
            are reduced. The sum is not divided by the number of passes.
        op: Average (the default), Sum, or Adasum, which lets each rank step alone and combines the
            changes of the parameters (see ``unidist/delta.py``).
        gradient_predivide_factor: f splits the average's division: by f before the sum, by size/f
            after it.
        num_groups: deprecated, use groups.
        groups: gradients that are reduced together: a number of groups of equal length, or lists
            of parameters.
        sparse_as_dense: reduce sparse gradients as dense tensors; ``grad`` is sparse again after.
        process_set: the ranks that share gradients; on others the optimizer is left as it is.

    Raises:
        TypeError: not a torch optimizer.
        ValueError: before init; an argument that Horovod refuses, too.
    """
    basics.runtime()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "DistributedOptimizer wraps a torch.optim.Optimizer, but got "
            f"{type(optimizer).__name__}. Wrap the inner torch optimizer, and give the result to "
            "the wrapper."
        )
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer takes op=Average, Sum or Adasum, but got {op!r}.")
    op = as_reduction(op, "DistributedOptimizer")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average.")
    if not gradient_predivide_factor > 0:
        raise ValueError(
            f"gradient_predivide_factor must be > 0, but is {gradient_predivide_factor!r}."
        )
    _check_passes(backward_passes_per_step)
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            "DistributedOptimizer takes compression=Compression.none, Compression.fp16 or another "
            f"class with compress and decompress, but got {compression!r}."
        )
    if isinstance(optimizer, DistributedMixin):  # wrapped again: the new options count
        optimizer._unidist.close()
        optimizer.__class__ = optimizer._unidist_base  # type: ignore[assignment]
    named = _name_parameters(optimizer, named_parameters)
    grouped = _resolve_groups(groups, num_groups, named)

    if process_set.group is None:
        raise ValueError(
            f"DistributedOptimizer got {process_set}, which is not active. Give it to "
            "init(process_sets=...) or add_process_set first, on all ranks."
        )
    active = process_set.included() and (
        process_set.size() != 1 or os.environ.get("HOROVOD_ELASTIC") == "1"
    )
    reducer = deltas = None
    if active and op is Adasum:
        deltas = DeltaReducer(named, compression, process_set)
    elif active:
        reducer = Reducer(
            named,
            backward_passes_per_step,
            compression,
            op is Average,
            gradient_predivide_factor,
            grouped,
            sparse_as_dense,
            process_set,
        )
    base: Any = type(optimizer)
    optimizer.__class__ = _distributed_class(base)
    distribution = _Distribution(reducer, deltas, backward_passes_per_step)
    optimizer._unidist = distribution  # type: ignore[attr-defined]
    _redirect_patched_step(optimizer, distribution)
    return optimizer


def _redirect_patched_step(optimizer: torch.optim.Optimizer, distribution: _Distribution) -> None:
    """Let a step that was replaced on the object itself go through the reduction.

    A learning rate scheduler that was made before wrapping has put a counting wrapper of the old
    class' step there, which would hide ours.
    """
    patched = optimizer.__dict__.get("step")
    if patched is None:
        return
    base = getattr(patched, "_unidist_patched", patched)

    @functools.wraps(base)
    def step(*args: Any, **kwargs: Any) -> Any:
        return distribution.step(base, *args, **kwargs)

    step._unidist_patched = base  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
