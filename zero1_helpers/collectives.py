"""Reduce-scatter and all-gather of flat tensors, under names that every torch knows.

Gloo makes a reduce-scatter out of an all-reduce: it sends everything twice and throws most of it away. Here,
over gloo, every rank is sent the parts of its slice and no others, by an all-to-all, and adds them up.
"""

from contextlib import contextmanager
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from zero1_helpers.phases import announce

# torch 2.13 gave them new names and warns about the old ones, which alone exist before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def all_take_part():
    """Around what waits for other ranks: says what it means that they do not come, or come no more."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "this rank waited for the others in a collective, and not all of them took part "
            f"({str(error).splitlines()[0]}). Either a rank has failed, or ranks have different numbers of "
            "batches: give all the same (DistributedSampler with drop_last=True)"
        ) from error


def wait(work: dist.Work) -> None:
    with all_take_part():
        work.wait()


def reduce_scatter(output: Tensor, input: Tensor, group=None, async_op=False):
    """`output`, (width,), becomes the sum of the ranks' slices of `input`, (world_size * width,)."""
    if dist.get_backend(group) != "gloo":
        return _reduce_scatter(output, input, group=group, async_op=async_op)
    parts = empty_parts(input)
    # Aliases: gloo's thread lets go of them a moment later than we do.
    work = dist.all_to_all_single(parts.detach(), input.detach(), group=group, async_op=True)
    summed = Summed(work, parts, output)
    return summed if async_op else summed.wait()


class Summed:
    """What to wait for: parts that are on their way, and then their sum."""

    def __init__(self, work: dist.Work, parts: Tensor, output: Tensor):
        self.work, self.parts, self.output = work, parts, output

    def wait(self) -> None:
        self.work.wait()
        parts, self.parts = self.parts, None
        if parts is not None:
            combine(parts, torch.add, self.output)


def empty_parts(input: Tensor) -> Tensor:
    """Room for the parts of one rank's slice, of the shape of `input`; gone once they are combined."""
    parts = torch.empty_like(input, memory_format=torch.contiguous_format)
    announce("temporaries", [parts])
    return parts


def combine(parts: Tensor, function, output: Tensor) -> None:
    """`output` becomes the ranks' parts, put together in their order."""
    of_each = parts.view(-1, *output.shape)
    output.copy_(reduce(lambda a, b: function(a, b, out=output), of_each))  # two or more: no copy
