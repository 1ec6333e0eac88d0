from unidist.optimizer import DistributedOptimizer  # noqa: F401
