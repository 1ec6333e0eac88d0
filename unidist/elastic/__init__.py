"""Elastic training: go on from the last commit after a failure, or when hosts come and go.

::

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
    train(state)
"""

from __future__ import annotations

from unidist.backends.errors import HostsUpdatedInterrupt
from unidist.elastic.loop import run, run_fn
from unidist.elastic.sampler import ElasticSampler
from unidist.elastic.state import ObjectState, State, TorchState

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
    "run_fn",
]
