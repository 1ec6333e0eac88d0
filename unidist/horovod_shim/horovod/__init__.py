"""What ``import horovod`` means in a run of ``python -m unidist.horovod``: unidist, for PyTorch.

The modules here have the names of Horovod's and hold what a script imports from them. The folder
above is on sys.path in such a run only.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

try:
    import unidist  # noqa: F401
except ModuleNotFoundError as error:  # a checkout that is not installed
    if error.name != "unidist":
        raise
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))))

#: the version whose API this is
__version__ = "0.28.1"

#: tells this package from Horovod's own
__unidist__ = True


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """Not offered: the ranks are there already."""
    raise NotImplementedError(
        "horovod.run is not offered in a run of `python -m unidist.horovod`. Start the ranks with "
        "a launcher: torchrun --nproc_per_node 2 -m unidist.horovod SCRIPT"
    )
