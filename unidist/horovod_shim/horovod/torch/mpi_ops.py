from unidist.mpi_ops import *  # noqa: F403
