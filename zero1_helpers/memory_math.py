"""The arithmetic of training memory: Ψ parameters, K bytes of optimizer state each, N ranks.

Two ways to the same numbers. The closed forms are those of the ZeRO paper (Rajbhandari et al., 2020,
sections 3.1 and 5): bytes per parameter, times Ψ, with the sharded part divided by N. `predict` counts
the bytes of a real model tensor by tensor, for each rank, and is exact: 1 B off is a bug.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero1_helpers.partition import Flat, Partition, assign_owners, by_count, pieces_of, slice_width


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter of one way to train with Adam."""

    title: str
    params: int  # what forward and backward compute with
    grads: int
    opt_state: int  # K: master copy of the parameters, if any, and the two moments


RECIPES = {
    "fp32": Recipe("full fp32", params=4, grads=4, opt_state=4 + 4),
    "mixed": Recipe("mixed precision, fp32 master copy", params=2, grads=2, opt_state=4 + 4 + 4),
    "mixed-fp32-grads": Recipe(
        "mixed precision, fp32 gradients", params=2, grads=4 + 2, opt_state=12
    ),
    "bf16": Recipe("pure bf16, no master copy", params=2, grads=2, opt_state=2 + 2),
}


def model_states(
    psi: float, recipe: str = "mixed", world_size: int = 1, stage: int = 1
) -> dict[str, float]:
    """Bytes per rank of parameters, gradients and optimizer state, and their total, by closed form.

    `stage` 0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters
    (P_os, P_os+g and P_os+g+p in the paper). Activations and temporary buffers are not in it.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
    if stage not in (0, 1, 2, 3) or world_size < 1:
        raise ValueError(f"stage is 0 to 3 and world_size at least 1, not {stage} and {world_size}")
    r = RECIPES[recipe]
    parts = {
        "params": r.params * psi / (world_size if stage >= 3 else 1),
        "grads": r.grads * psi / (world_size if stage >= 2 else 1),
        "opt_state": r.opt_state * psi / (world_size if stage >= 1 else 1),
    }
    return {**parts, "total": sum(parts.values())}


def paper_table(
    psi: float = 7.5e9, worlds: Iterable[int] = (1, 4, 16, 64, 256, 1024)
) -> list[dict]:
    """The ZeRO paper's table 1: GB (1e9 bytes) per rank for a model of `psi` parameters, mixed precision."""
    return [
        {
            "N": n,
            **{f"stage {s}": model_states(psi, "mixed", n, s)["total"] / 1e9 for s in (1, 2, 3)},
        }
        for n in worlds
    ]


# Bytes that one rank sends for a collective on a tensor of 1 byte, by ring algorithms on n ranks
# (Patarasuk and Yuan, 2009; the "bus bandwidth" factors of NVIDIA's nccl-tests). The tensor is the
# whole one: what all-reduce and broadcast take, reduce-scatter's input, all-gather's output.
RING_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0 if n > 1 else 0.0,
}


def bytes_sent(op: str, size: int, world_size: int) -> float:
    """Bytes that a rank sends (its link carries) for one collective on `size` bytes."""
    if op not in RING_FACTOR:
        raise ValueError(f"unknown collective {op!r}; known are {', '.join(RING_FACTOR)}")
    return RING_FACTOR[op](world_size) * size


def local(t: Tensor) -> Tensor:
    """What this rank holds of it: all, unless it is a DTensor (FSDP2's parameters, gradients and state)."""
    return t.to_local() if hasattr(t, "to_local") else t


@torch.no_grad()
def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in map(local, tensors))


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds between backward and step, in bytes."""

    rank: int
    params: int
    grads: int
    opt_state: int
    counters: int  # Adam's `step`, a scalar per tensor: apart, because no closed form has it
    buckets: int = 0  # gradients on their way, where they live in buckets only: at most

    @property
    def total(self) -> int:
        return self.params + self.grads + self.opt_state + self.counters + self.buckets


def is_counter(key: str) -> bool:
    """Is this entry of an optimizer's state the count of its steps, and not data per parameter?"""
    return key == "step"


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds the state; ours keep it at `.optimizer`, torch's at `.optim`."""
    return getattr(optimizer, "optimizer", getattr(optimizer, "optim", optimizer))


def state_entries(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """(key, tensor) of all state that an optimizer holds on this rank now, DeepSpeed's fp32 copy included."""
    states = unwrapped(optimizer).state.values()
    copies = getattr(optimizer, "single_partition_of_fp32_groups", [])
    return [
        (k, v)
        for s in [*states, *({"master_param": c} for c in copies)]
        for k, v in s.items()
        if isinstance(v, Tensor)
    ]


def state_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of optimizer state that an optimizer holds now, and bytes of its step counters."""
    entries = state_entries(optimizer)
    return (
        nbytes(v for k, v in entries if not is_counter(k)),
        nbytes(v for k, v in entries if is_counter(k)),
    )


def predict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer],
    world_size: int = 1,
    partition: Partition | Flat | None = by_count,
    **optimizer_kwargs,
) -> list[RankBytes]:
    """Bytes on each rank, once the first step has made the state; a list of `world_size` RankBytes.

    `optimizer` is an optimizer (its groups' settings count) or a class with its keyword arguments.
    `partition=None` means that nothing is sharded: every rank holds all of it, as in DDP. The model
    may be on the meta device, where 7.5e9 parameters cost nothing: each parameter is stepped once
    there by the very optimizer that is asked about, and the state that it makes is measured.

    Of a model that FSDP2 has sharded, a rank sees its own part only: all RankBytes are those of that part.
    With a `Flat` partition `opt_state` includes the master copy, if it asks for one, and gradients never
    exist all at once: `grads` is the largest one, and `buckets` the most that three neighbours hold: one
    is on its way, one is launched (both with the slice that this rank receives), and the first gradients
    of the next have come early.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if isinstance(partition, Flat):
        return _predict_flat(model, trainable, optimizer, world_size, partition, optimizer_kwargs)
    owners = assign_owners(partition, trainable, world_size) if partition else None
    shapes, dtypes = [local(p).shape for p in trainable], [p.dtype for p in trainable]
    per_param = _state_of_each(trainable, shapes, dtypes, optimizer, optimizer_kwargs)
    result = []
    for rank in range(world_size):
        mine = [s for i, s in enumerate(per_param) if owners is None or owners[i] == rank]
        result.append(
            RankBytes(
                rank,
                params=nbytes(model.parameters()),
                grads=nbytes(trainable),
                opt_state=sum(state for state, _ in mine),
                counters=sum(counters for _, counters in mine),
            )
        )
    return result


def _predict_flat(model, trainable, optimizer, world_size, partition, kwargs) -> list[RankBytes]:
    groups = [[trainable[i] for i in bucket] for bucket in partition.buckets(trainable)]
    sizes = [[p.numel() for p in group] for group in groups]
    weights, travels, collected = (
        nbytes(p for p in model.parameters() if not p.requires_grad),
        [0],
        [],
    )
    for group, sizes_of in zip(groups, sizes, strict=True):
        width, dtype = slice_width(sizes_of, world_size), group[0].dtype
        sent, stepped = partition.reduced_in(dtype).itemsize, partition.stepped_in(dtype).itemsize
        weights += world_size * width * dtype.itemsize
        travels.append(width * max((world_size + 1) * sent, sent + stepped))
        collected.append(width * world_size * sent)
    buckets = max(map(sum, zip(travels, travels[1:], [*collected[1:], 0], strict=False)), default=0)
    result = []
    for rank in range(world_size):
        pieces = [
            (group[i], end - start, partition.stepped_in(group[i].dtype))
            for group, sizes_of in zip(groups, sizes, strict=True)
            for i, (start, end) in pieces_of(sizes_of, rank, world_size).items()
        ]
        held = _state_of_each(*zip(*pieces, strict=True), optimizer, kwargs) if pieces else []
        masters = sum(n * dtype.itemsize for p, n, dtype in pieces if dtype != p.dtype)
        result.append(
            RankBytes(
                rank,
                params=weights,
                grads=max((nbytes([p]) for p in trainable), default=0),
                opt_state=masters + sum(state for state, _ in held),
                counters=sum(counters for _, counters in held),
                buckets=buckets,
            )
        )
    return result


def _state_of_each(params, shapes, dtypes, optimizer, kwargs) -> list[tuple[int, int]]:
    """(state, counters) bytes of each parameter, found by one step of a copy of it on the meta device."""
    if not isinstance(optimizer, type):  # DeepSpeed's is no torch.optim.Optimizer
        cls = type(unwrapped(optimizer))
        settings = {
            p: {k: v for k, v in g.items() if k != "params"}
            for g in optimizer.param_groups
            for p in g["params"]
        }
    else:
        cls, settings = optimizer, {p: kwargs for p in params}
    sizes = []
    for p, shape, dtype in zip(params, shapes, dtypes, strict=True):
        copy = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        copy.grad = torch.empty_like(copy)
        group = {"params": [copy], **settings.get(p, {}), "foreach": False, "fused": False}
        probe = cls([group], **({"lr": group["lr"]} if "lr" in group else {}))
        probe.step()
        sizes.append(state_bytes(probe))
    return sizes
