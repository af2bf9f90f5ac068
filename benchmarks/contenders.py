"""Who is compared: the series' variants, torch's own classes, and DeepSpeed if it is installed.

`build(model, blocks, optimizer_cls, bucket_cap_mb, **kwargs)` gives (model to call, optimizer); `blocks`
are the modules that FSDP2 gathers one at a time. race.py times them, notebook 13 looks at each.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zero1_helpers import VARIANTS, FlatShardedOptimizer, SimpleDDPReduceScatter, by_bytes


@dataclass(frozen=True)
class Contender:
    title: str
    build: Callable  # (model, blocks, optimizer_cls, bucket_cap_mb, **kwargs) -> (model to call, optimizer)
    after_backward: Callable  # (model, optimizer)


def step(model, optimizer):
    optimizer.step()
    optimizer.zero_grad()


def compute_only(model, blocks, optimizer_cls, bucket_cap_mb, **kwargs):
    """No communication; a rank steps a share of the parameters, as large as any other's."""
    params = list(model.parameters())
    owners = by_bytes(params, dist.get_world_size())
    share = [p for p, owner in zip(params, owners, strict=True) if owner == dist.get_rank()]
    return model, optimizer_cls(share, **kwargs)


def compute_step(model, optimizer):
    optimizer.step()
    model.zero_grad()


def flat_lazy(model, blocks, optimizer_cls, bucket_cap_mb, **kwargs):
    optimizer = FlatShardedOptimizer(optimizer_cls, model, bucket_cap_mb, **kwargs)
    return SimpleDDPReduceScatter(model, optimizer, lazy_gather=True), optimizer


def torch_ddp(model, blocks, optimizer_cls, bucket_cap_mb, views=False, **kwargs):
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=views)
    return ddp, optimizer_cls(model.parameters(), **kwargs)


def torch_zero(model, blocks, optimizer_cls, bucket_cap_mb, views=False, **kwargs):
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=views)
    params = model.parameters()
    return ddp, ZeroRedundancyOptimizer(
        params, optimizer_cls, parameters_as_bucket_view=views, **kwargs
    )


def torch_fsdp2(model, blocks, optimizer_cls, bucket_cap_mb, **kwargs):
    for block in blocks:
        fully_shard(block, reshard_after_forward=False)
    model = fully_shard(model, reshard_after_forward=False)
    return model, optimizer_cls(model.parameters(), **kwargs)


def deepspeed_stage1(model, blocks, optimizer_cls, bucket_cap_mb, **kwargs):
    """An engine, called like the model. Of its share it keeps a copy in fp32, also of fp32 parameters."""
    first = next(model.parameters())
    if first.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # it asks for that; torchrun sets it
    elements = int(bucket_cap_mb * 2**20) // first.element_size()
    stage1 = {"stage": 1, "reduce_bucket_size": elements, "allgather_bucket_size": elements}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": stage1,
        "gradient_clipping": 0.0,
    }  # not said, it clips to a norm of 1 (its PR 8068)
    optimizer = optimizer_cls(model.parameters(), **kwargs)
    with contextlib.redirect_stdout(io.StringIO()):  # it announces itself at length
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings(
            "ignore", ".*all_gather_into_tensor", FutureWarning
        )  # a name of torch's
        deepspeed.utils.groups._WORLD_GROUP = None  # its cache; a link may have come since
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # for inference; takes a compiler
        )
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[:2]


def engine_step(engine, optimizer):
    engine.step()


def with_views(build):
    return lambda *args, **kwargs: build(*args, views=True, **kwargs)


def ours(variant):
    """A variant of the registry, which is always stepped by Adam."""
    return lambda model, blocks, _, bucket_cap_mb, lr: variant.build(model, lr, bucket_cap_mb)


CONTENDERS = {
    "compute": Contender("compute only", compute_only, compute_step),
    **{name: Contender(v.title, ours(v), v.after_backward) for name, v in VARIANTS.items()},
    "flat-lazy": Contender("Flat reduce-scatter, half gathered behind forward", flat_lazy, step),
    "torch-ddp": Contender("torch DDP + Adam", torch_ddp, step),
    "torch-zero": Contender("torch DDP + ZeroRedundancyOptimizer", torch_zero, step),
    "torch-zero-views": Contender("the same, bucket views", with_views(torch_zero), step),
    "torch-fsdp2": Contender("torch FSDP2, reshard_after_forward=False", torch_fsdp2, step),
}
if find_spec("deepspeed"):
    CONTENDERS["deepspeed"] = Contender("DeepSpeed, stage 1", deepspeed_stage1, engine_step)
