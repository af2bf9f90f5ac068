"""ZeRO-1 on paper: memory, traffic and exposed communication of a run that nobody has started yet.

Three questions, three answers::

    memory     model_states: the ZeRO paper's closed forms, by stage; by variant what a schedule frees
    traffic    bytes a rank sends in a step: ring factors (memory_math.RING_FACTOR) times the tensors' bytes
    time       exposed = what comes after backward + what backward was too short to hide + what the next
               forward is too short to hide

Costs are latency + bytes / bandwidth for each collective (the alpha-beta model; Thakur, Rabenseifner and
Gropp, 2005). Over several nodes a collective has two levels, one after the other: inside a node on all
bytes, between nodes on the share of one rank of each, with a latency that grows as log2 of the nodes
(tree algorithms; NCCL's double binary trees). Nothing here is measured.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pandas as pd

from zero1_helpers.measure.link import Link
from zero1_helpers.memory_math import RECIPES, bytes_sent, model_states
from zero1_helpers.training.variants import VARIANTS, Schedule

MIB = 1024 * 1024
WORLDS = (1, 8, 64, 512, 1024, 10_000)


@dataclass(frozen=True)
class Network:
    """`inside` joins the `node_size` ranks of a node, `between` joins nodes, one such link for each rank."""

    inside: Link
    between: Link | None = None
    node_size: int = 8

    def __post_init__(self):
        if self.node_size < 1:
            raise ValueError(f"a node has 1 rank or more, not {self.node_size}")

    def seconds(self, op: str, size: float, world_size: int) -> float:
        """How long one collective on `size` bytes takes."""
        local = min(self.node_size, world_size) if self.between else world_size
        nodes = math.ceil(world_size / local)
        seconds = self.inside.seconds(op, size, local)
        if nodes > 1:
            hops = replace(self.between, latency=self.between.latency * math.ceil(math.log2(nodes)))
            seconds += hops.seconds(op, size / local, nodes)
        return seconds


@dataclass(frozen=True)
class Workload:
    """What one rank computes and holds in a step; `compute` in seconds.

    A third of `compute` is the forward pass, two are backward (Kaplan et al., 2020, section 2.1).
    `last_share` of the gradients' bytes is complete only when backward ends: the embedding, above all.
    """

    params: float
    compute: float
    recipe: str = "mixed"
    tensors: int = 300
    bucket_cap_mb: float = 25
    last_share: float = 0.0

    def __post_init__(self):
        positive = (self.params, self.tensors, self.bucket_cap_mb)
        if not (
            min(positive) > 0 and self.compute >= 0 and math.isfinite(sum(positive) + self.compute)
        ):
            raise ValueError(
                "params, tensors, bucket_cap_mb: above 0; compute: 0 or more; all finite"
            )
        if self.recipe not in RECIPES:
            raise ValueError(f"unknown recipe {self.recipe!r}; choose one of {', '.join(RECIPES)}")

    @property
    def size(self) -> float:
        """Bytes of all gradients, and of all parameters, as they travel."""
        return RECIPES[self.recipe].params * self.params

    @property
    def buckets(self) -> int:
        return min(self.tensors, math.ceil(self.size / (self.bucket_cap_mb * MIB)))

    @property
    def tail(self) -> float:
        """Share of the traffic that nothing of backward is left to hide: at least the last bucket."""
        return max(self.last_share, 1 / self.buckets)

    @property
    def window(self) -> float:
        """Seconds of backward that are left once the first bucket is full."""
        return self.compute * 2 / 3 * (1 - 1 / self.buckets)


# What users compare with, and what clipping makes of a step: it needs all gradients before the first update.
BESIDE = {
    "torch-ddp": Schedule(behind=("all_reduce",), stage=0),
    "zero1-overlap, clipped": Schedule(behind=("all_reduce",), after=("broadcast",)),
    "flat, clipped": Schedule(behind=("reduce_scatter",), after=("all_gather",)),
    "flat, lazy, clipped": Schedule(behind=("reduce_scatter",), ahead=("all_gather",)),
}


def schedules() -> dict[str, Schedule]:
    """Those of the series' variants, then those beside them."""
    return {name: variant.schedule for name, variant in VARIANTS.items()} | BESIDE


def plan(work: Workload, world_size: int, network: Network) -> pd.DataFrame:
    """One row a variant: GB of model states and GB sent per rank, seconds of communication, how many of
    them are exposed, and the step they make."""
    if world_size < 1:
        raise ValueError(f"ranks are 1 or more, not {world_size}")
    rows = {}
    for name, schedule in schedules().items():
        states = model_states(work.params, work.recipe, world_size, schedule.stage)
        if schedule.frees:  # one bucket is filled, one travels, one is stepped
            states["total"] -= states["grads"] * max(0.0, 1 - 3 / work.buckets)
        pieces = getattr(work, schedule.pieces)

        def seconds(ops, pieces=pieces):
            return sum(pieces * network.seconds(op, work.size / pieces, world_size) for op in ops)

        behind, after, ahead = map(seconds, (schedule.behind, schedule.after, schedule.ahead))
        exposed = after + max(work.tail * behind, behind - work.window)
        exposed += max(ahead / work.buckets, ahead - work.window / 2)  # forward is half of backward
        rows[name] = {
            "states_gb": states["total"] / 1e9,
            "sent_gb": sum(bytes_sent(op, work.size, world_size) for op in schedule.ops) / 1e9,
            "communication_s": behind + after + ahead,
            "exposed_s": exposed,
            "step_s": work.compute + exposed,
            "non_compute_pct": 100 * exposed / (work.compute + exposed) if exposed else 0.0,
        }
    return pd.DataFrame(rows).T.rename_axis("variant")


def growth(work: Workload, network: Network, worlds: Iterable[int] = WORLDS) -> pd.DataFrame:
    """non_compute_pct of every variant (rows) over numbers of ranks (columns)."""
    columns = {n: plan(work, n, network)["non_compute_pct"] for n in worlds}
    return pd.DataFrame(columns).rename_axis(columns="ranks")


def stages(params: float, recipe: str, world_size: int) -> pd.DataFrame:
    """GB per rank of model states by ZeRO stage (0 is plain data parallelism), and their parts."""
    rows = {stage: model_states(params, recipe, world_size, stage) for stage in range(4)}
    return (pd.DataFrame(rows).T / 1e9).rename_axis("stage")
