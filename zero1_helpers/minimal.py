"""ZeRO stage 1 in one file, on a CPU: every rank keeps a share of the optimizer's state, and no more.

    torchrun --standalone --nproc-per-node 4 -m zero1_helpers.minimal    # as four ranks
    python -m zero1_helpers.minimal                                      # as one

Data parallelism (DDP) gives every rank a copy of the model and a batch of its own. Its step::

    backward          the gradients of this rank's batch
    all-reduce        every rank receives the mean of all ranks' gradients
    step              every rank updates all parameters, so it keeps Adam's two moments of all of them

All ranks make the same update. ZeRO-1 divides this work among them, and the moments with it. Its step::

    backward          as before
    reduce_scatter    rank r receives the mean gradient of shard r, and no other
    step_shard        rank r updates shard r of the parameters, so it keeps the moments of shard r only
    all_gather        every rank receives the shards that the other ranks have updated

A reduce-scatter and an all-gather make up an all-reduce, so ZeRO-1 sends no more than DDP does. The rest
of this package hides the sending behind backward. (Rajbhandari et al., 2020.)
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn


class MinimalZeRO:
    """All parameters lie in one tensor, `weights`, all gradients in `grads`; the model sees views."""

    def __init__(self, model: nn.Module, optimizer_cls, **settings):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        sizes = [p.numel() for p in model.parameters()]
        shard_size = -(-sum(sizes) // self.world_size)  # rounded up: the end is padding
        self.weights = next(model.parameters()).new_zeros(self.world_size * shard_size)
        self.grads = torch.zeros_like(self.weights)
        rows = [flat[: sum(sizes)].split(sizes) for flat in (self.weights, self.grads)]
        for p, weight, grad in zip(model.parameters(), *rows, strict=True):
            weight.copy_(p.detach().flatten())
            p.data, p.grad = weight.view_as(p), grad.view_as(p)
        self.mine = nn.Parameter(self.shards(self.weights)[self.rank])  # a view, too
        self.mine.grad = torch.zeros_like(self.mine)
        self.optimizer = optimizer_cls([self.mine], **settings)  # it knows this shard alone

    def shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(flat.chunk(self.world_size))  # shard r, (shard_size,), belongs to rank r

    def step(self) -> None:  # after backward, on every rank
        self.reduce_scatter()
        self.step_shard()
        self.all_gather()

    def reduce_scatter(self) -> None:
        self.grads /= self.world_size  # so that the sum over the ranks is the mean
        dist.reduce_scatter(self.mine.grad, self.shards(self.grads))
        self.grads.zero_()  # the next backward adds to them

    def step_shard(self) -> None:
        self.optimizer.step()

    def all_gather(self) -> None:
        dist.all_gather(self.shards(self.weights), self.mine.detach())


def compare(optimizer_cls, zero_cls=MinimalZeRO, **settings) -> str:
    """Train with ZeRO-1, and in one process that sees all ranks' data; assert that both agree."""
    torch.manual_seed(0)  # the same model and data on every rank
    model = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    reference = copy.deepcopy(model)
    zero = zero_cls(model, optimizer_cls, **settings)
    optimizer = optimizer_cls(reference.parameters(), **settings)
    for _ in range(10):
        batches = torch.randn(zero.world_size, 8, 9).double()  # 8 examples for each rank
        model(batches[zero.rank]).square().mean().backward()
        zero.step()
        optimizer.zero_grad()
        reference(batches).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=1e-12)
    states = [o.state.values() for o in (zero.optimizer, optimizer)]
    held, whole = (sum(t.numel() for entry in s for t in entry.values()) for s in states)
    assert held <= whole / zero.world_size + 3, f"{held} of {whole}"  # padding, a step counter
    return f"equals one process; of {whole} numbers of state each rank keeps {held}."


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("gloo", **alone)
    sgd = compare(torch.optim.SGD, lr=0.1, momentum=0.9)  # Adam hides a wrong factor of gradients
    adam = compare(torch.optim.Adam, lr=0.01)
    if dist.get_rank() == 0:
        print(f"ZeRO-1, ranks: {dist.get_world_size()}, each with its own data. After 10 steps:")
        print(f"SGD with momentum {sgd}\nAdam {adam}")
    dist.destroy_process_group()
