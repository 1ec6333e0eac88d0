"""The loop around an elastic training function.

::

    ┌─> state.sync()          everybody takes over what rank 0 has
    │   func(state)  ───────> returns: done
    │     │ HorovodInternalError    state.restore(): back to the last commit
    │     │ HostsUpdatedInterrupt   nothing is lost; sync only if hosts were added
    │   shutdown(), init()    the world may be another one
    └── state.on_reset()      the user's callbacks, such as a new learning rate
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from unidist import basics
from unidist.backends.errors import ArgumentError, HorovodInternalError, HostsUpdatedInterrupt
from unidist.elastic.notification import notification_manager
from unidist.process_sets import add_process_set, global_process_set

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate the training function, whose first argument is a ``State``.

    Before it is called, and called again, the state is brought to what rank 0 has. A rank that
    comes later does not know how far the others are, so collectives belong inside the function or
    behind it, not between ``init`` and its call.
    """
    return run_fn(func, _reset)


def run_fn(func: Callable[..., Result], reset: Callable[[], None]) -> Callable[..., Result]:
    """``run`` with another way to connect again."""

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Result:
        notification_manager.init()
        notification_manager.register_listener(state)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except ArgumentError:
                    raise  # a mistake in the script would come again, for ever
                except HorovodInternalError:
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _reset() -> None:
    """Connect again, with the same engine, limits and process sets."""
    runtime = basics.current()
    arguments = runtime.arguments if runtime else {}
    process_sets = list(runtime.process_sets.values()) if runtime else []
    basics.shutdown()
    basics.init(**arguments)
    for process_set in process_sets:
        # A set that names a rank which is gone stays inactive, and says so when it is used.
        if process_set is not global_process_set and max(process_set.ranks or [0]) < basics.size():
            add_process_set(process_set)
