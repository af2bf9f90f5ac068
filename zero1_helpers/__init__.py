"""Helpers of the ZeRO-1 notebook series. Read it in this order: memory_math, partition, ddp, zero, flat."""

import os

# Before torch is imported: its profiler and its process groups chatter otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from .analysis import get_memory_timeline  # noqa: E402
from .ddp import SimpleDDP, SimpleDDPAsync, SimpleDDPBucket  # noqa: E402
from .flat import FlatShardedOptimizer, SimpleDDPReduceScatter  # noqa: E402
from .partition import by_bytes, by_count  # noqa: E402
from .profiling import get_profiler  # noqa: E402
from .training import VARIANTS, record, record_missing, train, use_link  # noqa: E402
from .workload import (  # noqa: E402
    get_dataloader,
    get_dataset,
    get_smol_model,
    get_smol_tokenizer,
    set_seed,
    shard_dataset,
)
from .zero import ShardedOptimizer, SimpleDDPBucketAsync, ZeROOne  # noqa: E402

__all__ = [
    "VARIANTS",
    "FlatShardedOptimizer",
    "ShardedOptimizer",
    "SimpleDDP",
    "SimpleDDPAsync",
    "SimpleDDPBucket",
    "SimpleDDPBucketAsync",
    "SimpleDDPReduceScatter",
    "ZeROOne",
    "by_bytes",
    "by_count",
    "get_dataloader",
    "get_dataset",
    "get_memory_timeline",
    "get_profiler",
    "get_smol_model",
    "get_smol_tokenizer",
    "record",
    "record_missing",
    "set_seed",
    "shard_dataset",
    "train",
    "use_link",
]


def load_ipython_extension(ipython):
    """`%load_ext zero1_helpers`: nbdistributed's magics, repaired."""
    from .cluster import load_ipython_extension as load

    load(ipython)
