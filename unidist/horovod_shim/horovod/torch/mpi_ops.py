from horovod.common.basics import HorovodBasics as _HorovodBasics
from horovod.common.util import get_average_backwards_compatibility_fun
from unidist.mpi_ops import *  # noqa: F403

_basics = _HorovodBasics()
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)
