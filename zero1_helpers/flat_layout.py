"""Where parameters lie in a flat bucket, and which elements of them are this rank's."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from zero1_helpers.bucket import lies_at
from zero1_helpers.partition import pieces_of, slice_width


@dataclass(eq=False)
class FlatLayout:
    """Where parameters lie in a flat tensor (world_size * width,), each with its own strides.

    A slice is (width,), and a piece is what lies in it of one parameter, in the order of its memory.
    """

    views: dict[Tensor, tuple]  # parameter -> (size, stride, offset) in the flat tensor
    cuts: dict[Tensor, slice]  # parameter -> its piece in this rank's slice, if any
    heads: dict[Tensor, list[int]]  # parameter -> where its piece begins in each slice that has one
    shape: tuple[int]  # of the flat tensor
    numel: int  # of it without the padding at its end
    slice: slice  # of it, this rank's

    @classmethod
    def of(cls, params: Sequence[Tensor], rank: int, world_size: int) -> "FlatLayout":
        sizes = [p.numel() for p in params]
        *offsets, numel = accumulate(sizes, initial=0)
        begin = rank * (width := slice_width(sizes, world_size))
        views = {
            p: (p.shape, torch.empty_like(p, device="meta").stride(), offset)  # dense, in p's order
            for p, offset in zip(params, offsets, strict=True)
        }
        cuts = {
            params[i]: slice(offsets[i] + start - begin, offsets[i] + end - begin)
            for i, (start, end) in pieces_of(sizes, rank, world_size).items()
        }
        heads = {
            p: [*range(offset, offset + p.numel())][:1]
            + [*range(width * (offset // width + 1), offset + p.numel(), width)]
            for p, offset in zip(params, offsets, strict=False)
        }
        return cls(views, cuts, heads, (world_size * width,), numel, slice(begin, begin + width))

    def view(self, flat: Tensor, p: Tensor) -> Tensor:
        return flat.as_strided(*self.views[p])

    def holds(self, flat: Tensor, p: Tensor) -> bool:
        """Does p still lie where it should?"""
        return lies_at(p, flat, self.views[p][2])

    def cut(self, p: Tensor, value: Tensor) -> Tensor:
        """This rank's piece of a tensor that is one number per element of p."""
        size, stride, offset = self.views[p]
        if value.stride() != stride:
            value = torch.empty_strided(size, stride, dtype=value.dtype).copy_(value)
        row = value.as_strided((p.numel(),), (1,), value.storage_offset())
        begin = self.slice.start - offset
        return row[begin + self.cuts[p].start : begin + self.cuts[p].stop]
