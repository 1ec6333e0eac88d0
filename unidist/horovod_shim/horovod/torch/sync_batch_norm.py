from unidist.sync_batch_norm import SyncBatchNorm  # noqa: F401
