"""The variants: how the model is wrapped, which optimizer steps it, and what is called after `backward()`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zero1_helpers.ddp import SimpleDDP, SimpleDDPAsync, SimpleDDPBucket
from zero1_helpers.flat import SimpleDDPReduceScatter
from zero1_helpers.flat_optimizer import FlatShardedOptimizer
from zero1_helpers.overlap import SimpleDDPBucketAsync
from zero1_helpers.partition import by_bytes
from zero1_helpers.training.loop import flush_wait_receive, flush_wait_step, sync_step, wait_step
from zero1_helpers.training.presets import Preset, get_preset
from zero1_helpers.zero import ShardedOptimizer, ZeROOne


def adam(model, lr):
    return torch.optim.Adam(model.parameters(), lr=lr)


def ddp(model, lr, bucket_cap_mb):
    return SimpleDDP(model), adam(model, lr)


def zero1(model, lr, bucket_cap_mb):
    return SimpleDDP(model), ZeROOne(adam(model, lr))


def zero1_async(model, lr, bucket_cap_mb):
    return SimpleDDPAsync(model), ZeROOne(adam(model, lr))


def zero1_bucket(model, lr, bucket_cap_mb):
    optimizer = ZeROOne(adam(model, lr), bucket_cap_mb=bucket_cap_mb)
    return SimpleDDPBucket(model, bucket_cap_mb), optimizer


def zero1_overlap(model, lr, bucket_cap_mb):
    optimizer = ShardedOptimizer(torch.optim.Adam, model, lr=lr)
    return SimpleDDPBucketAsync(model, optimizer, bucket_cap_mb), optimizer


def flat(model, lr, bucket_cap_mb):
    optimizer = FlatShardedOptimizer(torch.optim.Adam, model, bucket_cap_mb, lr=lr)
    return SimpleDDPReduceScatter(model, optimizer), optimizer


def flat_master(model, lr, bucket_cap_mb):
    optimizer = FlatShardedOptimizer(
        torch.optim.Adam, model, bucket_cap_mb, lr=lr, master_weights=True
    )
    return SimpleDDPReduceScatter(model, optimizer), optimizer


def zero1_balanced(model, lr, bucket_cap_mb):
    return SimpleDDP(model), ZeROOne(adam(model, lr), partition=by_bytes)


@dataclass(frozen=True)
class Schedule:
    """Collectives of a step on all parameters' bytes, by what may hide them; the planner reads it.

    behind: those that run while backward computes.  after: those that nothing hides.  ahead: those that run
    while the next forward computes.  pieces: what one collective carries, "tensors" or "buckets".
    stage: of ZeRO; 0 keeps the whole state on every rank.  frees: a gradient lives no longer than its bucket.
    """

    behind: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    pieces: str = "buckets"
    stage: int = 1
    frees: bool = False

    @property
    def ops(self) -> tuple[str, ...]:
        return self.behind + self.after + self.ahead


@dataclass(frozen=True)
class Variant:
    """All that one variant is: a new one is a class and an entry in VARIANTS."""

    name: str
    title: str
    build: Callable  # (model, lr, bucket_cap_mb) -> (wrapped model, optimizer)
    after_backward: Callable  # (wrapped model, optimizer)
    schedule: Schedule


STEP_BY_STEP = Schedule(after=("all_reduce", "broadcast"), pieces="tensors")
ALL_BEHIND = Schedule(behind=("reduce_scatter", "all_gather"), frees=True)
ENTRIES = [
    Variant(
        "ddp",
        "DDP baseline",
        ddp,
        sync_step,
        Schedule(after=("all_reduce",), pieces="tensors", stage=0),
    ),
    Variant("zero1", "ZeRO-1", zero1, sync_step, STEP_BY_STEP),
    Variant(
        "zero1-async",
        "ZeRO-1 + async all-reduce",
        zero1_async,
        wait_step,
        Schedule(behind=("all_reduce",), after=("broadcast",), pieces="tensors"),
    ),
    Variant(
        "zero1-bucket",
        "ZeRO-1 + buckets",
        zero1_bucket,
        flush_wait_step,
        Schedule(behind=("all_reduce",), after=("broadcast",)),
    ),
    Variant(
        "zero1-overlap",
        "ZeRO-1 + overlapped step and broadcast",
        zero1_overlap,
        flush_wait_receive,
        Schedule(behind=("all_reduce", "broadcast"), frees=True),
    ),
    Variant("zero1-balanced", "ZeRO-1, split by bytes", zero1_balanced, sync_step, STEP_BY_STEP),
    Variant("flat", "Flat reduce-scatter", flat, flush_wait_step, ALL_BEHIND),
]
VARIANTS = {variant.name: variant for variant in ENTRIES}

# Another training than the others': there is nothing to keep a master copy of in fp32.
FLAT_MASTER = Variant(
    "flat-master",
    "Flat reduce-scatter, fp32 master weights",
    flat_master,
    flush_wait_step,
    ALL_BEHIND,
)


def variants_of(preset: str | Preset | None = None) -> dict[str, Variant]:
    """All that can be recorded of a preset."""
    low = getattr(torch, get_preset(preset).dtype).itemsize < 4
    return VARIANTS | ({FLAT_MASTER.name: FLAT_MASTER} if low else {})


def get_variant(name: str, preset: str | Preset | None = None) -> Variant:
    known = variants_of(preset)
    if name not in known:
        raise ValueError(
            f"unknown variant {name!r}; {get_preset(preset).name} can be trained by {', '.join(known)}"
        )
    return known[name]
