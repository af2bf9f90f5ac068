"""Micro-batches in bf16: added up in float32, and rounded once, whichever wrapper sends the sum."""

import pytest
import torch
from torch import nn

from zero1_helpers import FlatShardedOptimizer, SimpleDDP, SimpleDDPBucket, SimpleDDPReduceScatter
from zero1_helpers.accumulate import GradientSum

COUNT = 64


class Late(nn.Module):
    """Uses its second layer in all micro-batches but the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, last):
        return self.a(x).square().mean() if last else self.b(self.a(x)).square().mean()


def data(rank, i):
    generator = torch.Generator().manual_seed(1000 * rank + i)
    return torch.randn(4, 8, generator=generator).bfloat16()


def exact(world_size):
    """The mean over the ranks of sums that are rounded to bf16 once, as each rank hands them over."""
    mean = None
    for rank in range(world_size):
        model, sums = Late().bfloat16(), None
        for i in range(COUNT):
            model.zero_grad()
            model(data(rank, i), i == COUNT - 1).backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            sums = [s + g.float() for s, g in zip(sums or [0] * len(grads), grads, strict=True)]
        rounded = [s.bfloat16() / world_size for s in sums]
        mean = rounded if mean is None else [a + b for a, b in zip(mean, rounded, strict=True)]
    return mean


def step_taken(rank, world_size, kind, in_float32):
    """Largest error of a gradient, beside the largest one; of flat seen by a step of SGD."""
    model = Late().bfloat16()
    begin = [p.detach().clone() for p in model.parameters()]
    gradient_sum = GradientSum(model, in_float32)
    if kind == "flat":
        optimizer = FlatShardedOptimizer(torch.optim.SGD, model, lr=1.0, master_weights=True)
        wrapper = SimpleDDPReduceScatter(model, optimizer)
    else:
        wrapper = {"ddp": SimpleDDP, "bucket": SimpleDDPBucket}[kind](model)
    for i in range(COUNT):
        with gradient_sum.micro_batch(wrapper, last=i == COUNT - 1):
            wrapper(data(rank, i), i == COUNT - 1).backward()
    if kind == "flat":
        optimizer.step()
        grads = [a - p.detach() for a, p in zip(begin, model.parameters(), strict=True)]
    else:
        wrapper.sync_gradients() if kind == "ddp" else wrapper.wait_for_gradients()
        grads = [p.grad for p in model.parameters()]
    errors = [
        (g - e).abs().max() / e.abs().max() for g, e in zip(grads, exact(world_size), strict=True)
    ]
    return max(errors).item()


@pytest.mark.parametrize("kind", ["ddp", "bucket", "flat"])
def test_the_sum_is_rounded_once(ranks, kind):
    rounding = (
        2**-8 if kind == "flat" else 0
    )  # of flat's weights, in which its gradients are looked at
    assert max(ranks(step_taken, 2, kind, True)) <= rounding
    assert min(ranks(step_taken, 2, kind, False)) > 0.01


def test_nothing_is_left_on_the_model():
    model = Late()
    gradient_sum = GradientSum(model, in_float32=True)
    gradient_sum.remove()
    model(torch.ones(4, 8), False).backward()
    model(torch.ones(4, 8), False).backward()
    assert all(p.grad is not None for p in model.parameters())
