from horovod.torch.elastic import sampler, state  # noqa: F401
from unidist.elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
