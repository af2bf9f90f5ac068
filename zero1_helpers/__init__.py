from .ddp import SimpleDDP, SimpleDDPAsync, SimpleDDPBucket
from .partition import by_bytes, by_count
from .zero import ShardedOptimizer, SimpleDDPBucketAsync, ZeROOne


def load_ipython_extension(ipython):
    from .cluster import load_ipython_extension as load

    load(ipython)
