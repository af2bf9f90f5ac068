"""The process group of a rank that torchrun has started, or of a process that runs alone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the group that the environment describes, and leave it at the end. Yields this rank's device.

    NCCL, if this machine has a GPU for each of its ranks, else gloo on the CPU. Ranks that share one machine
    talk over its loopback interface: a VPN, or a host name that does not resolve, does not matter then.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_gpus = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    elif int(os.environ.get("WORLD_SIZE", 1)) == local_ranks:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("nccl" if on_gpus else "gloo", **alone)
    try:
        yield device
    finally:
        dist.destroy_process_group()
