from unidist.elastic.sampler import ElasticSampler  # noqa: F401
