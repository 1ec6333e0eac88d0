"""What an elastic training function trains: saved, restored, and made equal on all ranks."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from unidist.backends.errors import HostsUpdatedInterrupt
from unidist.basics import rank
from unidist.elastic.notification import HostUpdateResult
from unidist.elastic.sampler import ElasticSampler
from unidist.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class State:
    """Base class. A subclass defines ``save``, ``restore`` and ``sync``.

    Args:
        bcast_object: returns rank 0's object on every rank.
        get_rank: returns this process' rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these after each reset, for example to scale the learning rate anew."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The world is connected again: forget old notices, reset, call the callbacks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """A notice that hosts have come or are to go; from any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, and give way to a change of hosts. All ranks must call it.

        Saving copies the whole state in host memory. Seldom commits cost less time, and more steps
        that are lost in a failure.

        Raises:
            HostsUpdatedInterrupt: the set of hosts has changed; on all ranks.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Give way to a change of hosts without saving. All ranks must call it.

        Raises:
            HostsUpdatedInterrupt: the set of hosts has changed; on all ranks.
        """
        before = latest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                update |= HostUpdateResult(result)
        # All ranks have to leave at the same point: what rank 0 has heard counts.
        before, self._last_updated_timestamp, found = self._bcast_object(
            (before, latest, int(update))
        )
        if self._last_updated_timestamp > before:
            # Where hosts only go, those that stay agree already.
            raise HostsUpdatedInterrupt(found == HostUpdateResult.removed)

    def save(self) -> None:
        """Save the state in host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state. All ranks must call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called after a reset, before ``sync``."""


class ObjectState(State):
    """A state of Python objects, each an attribute.

    Lists, dicts, sets, arrays and tensors are copied, so that ``restore`` also undoes what was
    changed in them. Other objects are saved by reference.

    Args:
        bcast_object: returns rank 0's object on every rank.
        get_rank: returns this process' rank.
        kwargs: the attributes.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._bcast_object = bcast_object
        self._saved_state = kwargs
        self._set_attributes()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        self._saved_state = {name: _copied(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if not self._saved_state:
            return
        # What rank 0 has now, as with models: after an interrupt nothing is undone.
        ObjectState.save(self)
        self._saved_state = self._bcast_object(self._saved_state)
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, (list, dict, set, bytearray, numpy.ndarray, torch.Tensor)):
        return copy.deepcopy(value)
    return value


class TorchState(ObjectState):
    """The state of a training: models, optimizers, samplers and any other objects.

    Each is an attribute. One whose type has a handler (modules, optimizers, ``ElasticSampler``) is
    changed in place by ``restore`` and ``sync``, and saved anew when the attribute is set.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        kwargs: more attributes.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        self._handlers: dict[str, StateHandler] = {}
        objects = {}
        for name, value in kwargs.items():
            handler = _handler_of(value)
            if handler is None:
                objects[name] = value
            else:
                super().__setattr__(name, value)
                self._handlers[name] = handler
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **objects)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


# -- handlers -----------------------------------------------------------------------------------


class StateHandler:
    """Saves, restores and synchronizes one attribute of a TorchState."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save the value's state in host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the value the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the value rank 0's state. All ranks must call it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the value."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """For what has ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # An optimizer takes over the tensors that it is given, and would change the saved ones.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self._take_over()
        # Should rank 0 be lost before the next commit, this is what the others return to.
        self.save()

    def _take_over(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(_StateDictHandler):
    """Parameters and buffers."""

    def _take_over(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """State and options of an optimizer."""

    def _take_over(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_StateDictHandler):
    """Where a sampler is in its epoch."""


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a type and the handler of its values; the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs, for states that are made from now on."""
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None
