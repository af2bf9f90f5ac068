"""Helpers of the ZeRO-1 notebook series. Read it in this order: memory_math, partition, ddp, zero, flat."""

import importlib
import os

from zero1_helpers._groups import explained

# Before torch is imported: its profiler and its process groups chatter otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

_HOME = {  # public name: its module. A module is imported when one of its names is first used.
    **dict.fromkeys(("SimpleDDP", "SimpleDDPAsync", "SimpleDDPBucket"), "ddp"),
    **dict.fromkeys(("ShardedOptimizer", "ZeROOne"), "zero"),
    "SimpleDDPBucketAsync": "overlap",
    **dict.fromkeys(("FlatShardedOptimizer", "SimpleDDPReduceScatter"), "flat"),
    **dict.fromkeys(("by_bytes", "by_count"), "partition"),
    "get_memory_timeline": "report.memory",
    "get_profiler": "measure.profiler",
    "train": "training.loop",
    "VARIANTS": "training.variants",
    **dict.fromkeys(("record", "record_missing", "use_link"), "training.record"),
    **dict.fromkeys(("get_dataloader", "get_dataset", "get_smol_model"), "training.workload"),
    **dict.fromkeys(("get_smol_tokenizer", "shard_dataset"), "training.workload"),
    "set_seed": "training.presets",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        raise explained(error) from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython):
    """`%load_ext zero1_helpers`: nbdistributed's magics, repaired."""
    try:
        from zero1_helpers.ranks.magics import load_ipython_extension as load
    except ModuleNotFoundError as error:
        raise explained(error) from None

    load(ipython)
