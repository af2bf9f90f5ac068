"""Which elements of which parameter a rank holds the state of, and all of it put together on one rank."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero1_helpers.flat_optimizer import FlatShardedOptimizer
from zero1_helpers.memory_math import is_counter
from zero1_helpers.partition import pieces_of
from zero1_helpers.zero import ZeROOne

CHUNK = 2**20  # elements that a tensor travels in on its way to one rank


def shard_of(module: nn.Module, optimizer) -> dict[str, tuple[Tensor, Tensor, int]]:
    """{name: (parameter, what this rank keeps its state under, which element of it that begins with)} of all
    that this rank has state of."""
    if isinstance(optimizer, FlatShardedOptimizer):
        optimizer.receive()
    names, rank, shard = (
        {p: name for name, p in module.named_parameters()},
        getattr(optimizer, "rank", 0),
        {},
    )
    strangers = any(p not in names for group in optimizer.param_groups for p in group["params"])
    together(
        ValueError("the optimizer has a parameter that is not in the model") if strangers else None,
        optimizer,
    )
    for p, places, here in _spread(optimizer):
        if here is not None:
            shard[names[p]] = p, here, next(start for owner, start, _ in places if owner == rank)
    return shard


@torch.no_grad()
def full_state_dict(optimizer: ZeROOne | FlatShardedOptimizer, to: int = 0) -> dict | None:
    """All shards put together on the CPU of rank `to`, as the plain optimizer's state_dict; else None.

    Tensors travel in pieces of CHUNK elements, and no other rank holds more than one of them beside its
    own shard. What it returns `load_state_dict` takes, of the plain optimizer and of all three classes,
    on any number of ranks; there, on every rank (`torch.load(..., mmap=True)` reads only the shard).
    """
    described = {
        i: {
            key: value.dtype if is_split(key, value, here) else value
            for key, value in optimizer.state[here].items()
        }
        for i, (_, _, here) in enumerate(_spread(optimizer))
        if here in optimizer.state
    }
    everyone = [None] * optimizer.world_size
    dist.all_gather_object(everyone, described, group=optimizer.process_group)
    index = {p: i for i, p in enumerate(optimizer.params)}
    groups = [
        group | {"params": [index[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    whole = {"state": {}, "param_groups": groups}
    for i, (p, places, here) in enumerate(_spread(optimizer)):
        about = next((known[i] for known in everyone if i in known), {})
        entry = {
            key: _collect(optimizer, p, places, optimizer.state.get(here, {}).get(key), value, to)
            if isinstance(value, torch.dtype)
            else value
            for key, value in about.items()
        }
        if entry:
            whole["state"][i] = entry
    return whole if optimizer.rank == to else None


def _spread(optimizer):
    """For each parameter: itself, [(owner, start, end)] of its elements, and what this rank's state is
    kept under, or None."""
    if not isinstance(
        optimizer, ZeROOne | FlatShardedOptimizer
    ):  # not sharded: all of it, everywhere
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            yield p, [(0, 0, p.numel())], p
        return
    if isinstance(optimizer, ZeROOne):
        optimizer._assign_new_parameters()
        for p in optimizer.params:
            owner = optimizer.param_to_owner_rank.get(p)
            yield (
                p,
                [] if owner is None else [(owner, 0, p.numel())],
                p if optimizer.is_mine(p) else None,
            )
        return
    ranks, spread = range(optimizer.world_size), {}
    for bucket in optimizer.buckets:
        cuts = [pieces_of([p.numel() for p in bucket.params], rank, len(ranks)) for rank in ranks]
        for i, p in enumerate(bucket.params):
            places = [(rank, *cuts[rank][i]) for rank in ranks if i in cuts[rank]]
            spread[p] = places, bucket.pieces.get(p)
    for p in optimizer.params:
        yield p, *spread.get(p, ([], None))


def is_split(key: str, value, here: Tensor) -> bool:
    """Is this entry of the state one number per element, and not one for the whole parameter?"""
    return isinstance(value, Tensor) and not is_counter(key) and value.shape == here.shape


def _collect(optimizer, p, places, mine, dtype, to) -> Tensor | None:
    """One entry of p's state on rank `to`, in p's shape and strides: fused kernels count on them."""
    whole = torch.empty(p.numel(), dtype=dtype) if optimizer.rank == to else None
    for owner, start, end in places:
        for a in range(start, end, CHUNK):
            b = min(a + CHUNK, end)
            if optimizer.rank == owner:
                part = mine.reshape(-1)[a - start : b - start].contiguous()
            else:
                part = torch.empty(b - a, dtype=dtype, device=p.device)
            dist.broadcast(part, group=optimizer.process_group, group_src=owner)
            if optimizer.rank == to:
                whole[a:b] = part
    if optimizer.rank != to:
        return None
    if isinstance(optimizer, FlatShardedOptimizer):  # pieces are cut in the order of p's memory
        return whole.as_strided(p.shape, p.stride())
    return torch.empty_like(p, dtype=dtype, device="cpu").copy_(whole.view(p.shape))


def together(error: Exception | None, optimizer) -> None:
    """Raise on all ranks if one has an error: a rank that went on alone would wait for the others."""
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size(group_of(optimizer))
        dist.all_gather_object(errors, error, group=group_of(optimizer))
    for error in errors:
        if error is not None:
            raise error


def group_of(optimizer):
    return getattr(optimizer, "process_group", None)


def strides_of(p: Tensor) -> tuple[int, ...]:
    """Of a dense tensor in p's order, as its state is."""
    return torch.empty_like(p, device="meta").stride()


def row_of(t: Tensor, like: Tensor) -> Tensor:
    """t as (numel,), in the order of `like`'s memory; a view where t has that order."""
    if t.stride() != strides_of(like):
        t = torch.empty_like(like, dtype=t.dtype).copy_(t)
    return t.as_strided((t.numel(),), (1,), t.storage_offset())
