"""What a real training run asks of a sharded optimizer: clipping, saving, resuming, loss scaling, a check.

For `ZeROOne`, `ShardedOptimizer` and `FlatShardedOptimizer` alike. Each is called on every rank, in the
same order, as any collective is. Schedulers, several groups and `add_param_group` need no help: all
three are torch optimizers, whose `param_groups` are the real ones.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .flat import FlatShardedOptimizer
from .memory_math import is_counter
from .partition import pieces_of
from .zero import ZeROOne, instead

CHUNK = 2**20  # elements that a tensor travels in when it is saved or loaded


# Gradients


@torch.no_grad()
def clip_grad_norm_(optimizer: ZeROOne | FlatShardedOptimizer, max_norm: float, norm_type: float = 2.0):
    """Scale the gradients so that their norm, over all parameters and ranks, is at most `max_norm`.

    Between `wait_for_gradients()` (or `sync_gradients()`) and `step()`; returns the norm before, the same
    on all ranks and the same as one process has. A wrapper that steps behind backward has no gradients
    left by then, and no norm before the last of them: RuntimeError.
    """
    if isinstance(optimizer, ZeROOne):  # every rank has every gradient
        grads = [p.grad for p in optimizer.params if p.grad is not None]
        _need(grads)
        total = nn.utils.get_total_norm(grads, norm_type)
    else:
        _hand_out(optimizer)
        grads = [p.grad for b in optimizer.buckets for p in b.pieces.values() if p.grad is not None]
        total = _norm_over_ranks(grads, norm_type, optimizer)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


def _norm_over_ranks(grads: list[Tensor], norm_type: float, optimizer) -> Tensor:
    device = optimizer.params[0].device
    mine = nn.utils.get_total_norm(grads, norm_type).to(device, torch.float64) if grads else None
    mine = torch.zeros((), dtype=torch.float64, device=device) if mine is None else mine
    if math.isinf(norm_type):
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=optimizer.process_group)
        return mine
    mine.pow_(norm_type)
    dist.all_reduce(mine, group=optimizer.process_group)
    return mine.pow_(1 / norm_type)


def _hand_out(optimizer: FlatShardedOptimizer) -> None:
    """Show the reduced slices as gradients of the pieces."""
    reduced = [bucket for bucket in optimizer.buckets if bucket.mine is not None]
    _need(reduced)
    for bucket in reduced:
        bucket.hand_out_gradients()


def _need(gradients: list) -> None:
    if not gradients:
        raise RuntimeError(
            "there are no gradients between backward and step: either wait_for_gradients() has not been "
            "called, or the wrapper steps behind backward. Use SimpleDDPReduceScatter(..., "
            "step_in_backward=False), or ZeROOne with SimpleDDP, SimpleDDPAsync or SimpleDDPBucket"
        )


def scaler_step(
    scaler: torch.amp.GradScaler, optimizer: ZeROOne | FlatShardedOptimizer, max_norm: float | None = None
) -> None:
    """`scaler.step(optimizer)`: a step that all ranks skip if any of them found an inf or a nan.

    Of a flat shard each rank sees its slice only, so the ranks ask each other. With `max_norm` the
    gradients are clipped in between, when they have their true size.
    """
    flat = isinstance(optimizer, FlatShardedOptimizer)
    if flat:
        _hand_out(optimizer)
        pieces = {p: piece for bucket in optimizer.buckets for p, piece in bucket.pieces.items()}
    else:
        pieces = {p: p for p in optimizer.params if p.grad is not None}
        _need(list(pieces))
    with instead(optimizer.optimizer, pieces):
        scaler.unscale_(optimizer.optimizer)
    found = scaler._found_inf_per_device(optimizer.optimizer)  # as torch's ShardedGradScaler does
    device = optimizer.params[0].device
    found[device] = sum((t.to(device) for t in found.values()), torch.zeros(1, device=device))
    dist.all_reduce(found[device], group=optimizer.process_group)
    if found[device].item():
        optimizer.zero_grad()
        return
    if max_norm is not None:
        clip_grad_norm_(optimizer, max_norm)
    optimizer.step()


# State


@torch.no_grad()
def full_state_dict(optimizer: ZeROOne | FlatShardedOptimizer, to: int = 0) -> dict | None:
    """All shards put together on the CPU of rank `to`, as the plain optimizer's state_dict; else None.

    Tensors travel in pieces of CHUNK elements, and no other rank holds more than one of them beside its
    own shard. What it returns `load_state_dict` takes, of the plain optimizer and of all three classes,
    on any number of ranks; there, on every rank (`torch.load(..., mmap=True)` reads only the shard).
    """
    described = {
        i: {key: value.dtype if _is_split(key, value, here) else value for key, value in
            optimizer.state[here].items()}
        for i, (_, _, here) in enumerate(_spread(optimizer)) if here in optimizer.state
    }  # fmt: skip
    everyone = [None] * optimizer.world_size
    dist.all_gather_object(everyone, described, group=optimizer.process_group)
    index = {p: i for i, p in enumerate(optimizer.params)}
    groups = [group | {"params": [index[p] for p in group["params"]]} for group in optimizer.param_groups]
    whole = {"state": {}, "param_groups": groups}
    for i, (p, places, here) in enumerate(_spread(optimizer)):
        about = next((known[i] for known in everyone if i in known), {})
        entry = {
            key: _collect(optimizer, p, places, optimizer.state.get(here, {}).get(key), value, to)
            if isinstance(value, torch.dtype) else value
            for key, value in about.items()
        }  # fmt: skip
        if entry:
            whole["state"][i] = entry
    return whole if optimizer.rank == to else None


def _spread(optimizer):
    """For each parameter: itself, [(owner, start, end)] of its elements, and what this rank's state is
    kept under, or None."""
    if isinstance(optimizer, ZeROOne):
        for p in optimizer.params:
            owner = optimizer.param_to_owner_rank.get(p)
            yield p, [] if owner is None else [(owner, 0, p.numel())], p if optimizer.is_mine(p) else None
        return
    ranks, spread = range(optimizer.world_size), {}
    for bucket in optimizer.buckets:
        cuts = [pieces_of([p.numel() for p in bucket.params], rank, len(ranks)) for rank in ranks]
        for i, p in enumerate(bucket.params):
            places = [(rank, *cuts[rank][i]) for rank in ranks if i in cuts[rank]]
            spread[p] = places, bucket.pieces.get(p)
    for p in optimizer.params:
        yield p, *spread.get(p, ([], None))


def _is_split(key: str, value, here: Tensor) -> bool:
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


# Equality


@torch.no_grad()
def check_in_sync(model: nn.Module, process_group=None) -> None:
    """Raise ValueError on every rank unless all hold the same bits; names the first tensor that differs.

    Compares checksums, 8 bytes a tensor: cheap enough for every few hundred steps.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if not tensors:
        return
    sums = torch.stack([checksum(t).to(tensors[0][1].device) for _, t in tensors])
    extremes = torch.stack([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=process_group)
    differs = (extremes[0] != -extremes[1]).tolist()
    if any(differs):
        raise ValueError(
            f"ranks differ in {sum(differs)} of {len(tensors)} tensors, the first of them "
            f"{tensors[differs.index(True)][0]}"
        )


def checksum(t: Tensor) -> Tensor:
    """A number of 62 bits for a tensor's bits: the sum of its bytes, each times a factor of its place."""
    sums = torch.zeros((), dtype=torch.int64, device=t.device)
    flat = t.detach().reshape(-1)
    for a in range(0, flat.numel(), CHUNK):
        data = flat[a : a + CHUNK].contiguous().view(torch.uint8).long() + 1
        places = torch.arange(a, a + data.numel(), device=t.device)
        sums = (sums * 1_000_003 + (data * ((places * 2_654_435_761) % 2_147_483_647)).sum()) % 2**61
    return sums
