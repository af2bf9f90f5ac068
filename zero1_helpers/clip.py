"""What a real training run asks of a sharded optimizer: clipping, loss scaling, a check that ranks agree.

For `ZeROOne`, `ShardedOptimizer` and `FlatShardedOptimizer` alike. Each is called on every rank, in the
same order, as any collective is. Schedulers, several groups and `add_param_group` need no help: all
three are torch optimizers, whose `param_groups` are the real ones. Saving and resuming: `checkpoint`.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero1_helpers.bucket import TakenGradient
from zero1_helpers.checks import checksum
from zero1_helpers.flat_optimizer import FlatShardedOptimizer
from zero1_helpers.stepping import instead
from zero1_helpers.zero import ZeROOne

# Gradients


@torch.no_grad()
def clip_grad_norm_(
    optimizer: ZeROOne | FlatShardedOptimizer, max_norm: float, norm_type: float = 2.0
):
    """Scale the gradients so that their norm, over all parameters and ranks, is at most `max_norm`.

    Between `wait_for_gradients()` (or `sync_gradients()`) and `step()`; returns the norm before, the same
    on all ranks and the same as one process has. A wrapper that steps behind backward has no gradients
    left by then, and no norm before the last of them: RuntimeError.
    """
    if isinstance(optimizer, ZeROOne):  # every rank has every gradient
        grads = [p.grad for p in optimizer.params if is_here(p.grad)]
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


def is_here(grad: Tensor | None) -> bool:
    return grad is not None and type(grad) is not TakenGradient


def _need(gradients: list) -> None:
    if not gradients:
        raise RuntimeError(
            "there are no gradients between backward and step: either wait_for_gradients() has not been "
            "called, or the wrapper steps behind backward. Use SimpleDDPReduceScatter(..., "
            "step_in_backward=False), or ZeROOne with SimpleDDP, SimpleDDPAsync or SimpleDDPBucket"
        )


def scaler_step(
    scaler: torch.amp.GradScaler,
    optimizer: ZeROOne | FlatShardedOptimizer,
    max_norm: float | None = None,
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
        pieces = {p: p for p in optimizer.params if is_here(p.grad)}
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
