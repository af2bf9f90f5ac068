"""Who owns what: ways to split a list of parameters over the ranks.

A partition is a function `(params, world_size) -> owners`, where `owners[i]` is the rank that keeps
the optimizer state of `params[i]` and updates it. Nothing is communicated: every rank computes the
same answer from the same shapes, so all that matters is that the function is deterministic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

Partition = Callable[[Sequence[Tensor], int], list[int]]


def shard_range(num_params: int, rank: int, world_size: int) -> tuple[int, int]:
    """First index, and one past the last, of the tensors that `rank` owns when they are counted out.

    291 tensors on 4 ranks are 72 each, and the remainder of 3 goes to the first three ranks:
    (0, 73), (73, 146), (146, 219), (219, 291).
    """
    params_per_rank, remainder = divmod(num_params, world_size)
    start = rank * params_per_rank + min(rank, remainder)
    return start, start + params_per_rank + (1 if rank < remainder else 0)


def by_count(params: Sequence[Tensor], world_size: int) -> list[int]:
    """Consecutive runs with the same number of tensors each, however large the tensors are."""
    owners = []
    for rank in range(world_size):
        start, end = shard_range(len(params), rank, world_size)
        owners += [rank] * (end - start)
    return owners


def by_bytes(params: Sequence[Tensor], world_size: int) -> list[int]:
    """The largest tensor first, each to the rank with the least bytes so far; ties by index.

    The greedy rule of torch's ZeroRedundancyOptimizer (and of scheduling theory: Graham's longest
    processing time, at most 4/3 - 1/(3 world_size) times the best possible maximum).
    """
    sizes = [p.numel() * p.element_size() for p in params]
    owners, load = [0] * len(sizes), [0] * world_size
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[owners[i]] += sizes[i]
    return owners


def in_buckets(
    params: Sequence[Tensor], cap_bytes: float, first_cap_bytes: float | None = None
) -> list[list[int]]:
    """Indices of the tensors that travel together, bucket by bucket, in reverse order of registration.

    That is about the order in which backward makes their gradients. A bucket is closed once it holds
    `cap_bytes` or more, the first one at `first_cap_bytes`. One dtype and device a bucket: torch.cat
    would promote bf16 to fp32. The plan depends on shapes alone, so all ranks make the same one.
    """
    filling, closed = {}, []
    for i in reversed(range(len(params))):
        kind = (params[i].dtype, params[i].device)
        filling.setdefault(kind, []).append(i)
        held = sum(params[j].numel() * params[j].element_size() for j in filling[kind])
        if held >= (cap_bytes if closed or first_cap_bytes is None else first_cap_bytes):
            closed.append(filling.pop(kind))
    return [*closed, *filling.values()]


def slice_width(sizes: Sequence[int], world_size: int) -> int:
    """Elements of each rank's slice of tensors laid end to end, the last one padded; at least 1."""
    return max(1, -(-sum(sizes) // world_size))


def pieces_of(sizes: Sequence[int], rank: int, world_size: int) -> dict[int, tuple[int, int]]:
    """{i: (start, end)}: which elements of tensor i lie in `rank`'s slice of tensors laid end to end.

    Sizes 5, 2 and 4 on 2 ranks: 11 elements, slices of 6 and of 5 with 1 of padding, so rank 0 has
    {0: (0, 5), 1: (0, 1)} and rank 1 {1: (1, 2), 2: (0, 4)}.
    """
    width = slice_width(sizes, world_size)
    begins = accumulate(sizes, initial=0)
    cut = {
        i: (max(0, rank * width - begin), min(size, (rank + 1) * width - begin))
        for i, (begin, size) in enumerate(zip(begins, sizes, strict=False))
    }
    return {i: (start, end) for i, (start, end) in cut.items() if start < end}


@dataclass(frozen=True)
class Flat:
    """Not a partition of tensors: every rank owns an equal slice of every flat bucket.

    Gradients are reduced in `reduce_dtype`, and slices stepped in `master_dtype`, if that holds more
    than the parameters' dtype does: then this rank has a master copy of its slice, and state, in it.
    """

    bucket_cap_mb: float = 25
    first_bucket_mb: float = 1
    master_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def buckets(self, params: Sequence[Tensor]) -> list[list[int]]:
        cap = self.bucket_cap_mb * 2**20
        return in_buckets(params, cap, min(cap, self.first_bucket_mb * 2**20))

    def reduced_in(self, dtype: torch.dtype) -> torch.dtype:
        return self.reduce_dtype or dtype

    def stepped_in(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, self.master_dtype or dtype)


def assign_owners(partition: Partition, params: Sequence[Tensor], world_size: int) -> list[int]:
    """Call a partition and check its answer: one rank of this world for every parameter."""
    owners = list(partition(params, world_size))
    name = getattr(partition, "__name__", repr(partition))
    if len(owners) != len(params):
        raise ValueError(f"partition {name} gave {len(owners)} owners for {len(params)} parameters")
    for i, owner in enumerate(owners):
        if owner not in range(world_size):
            raise ValueError(
                f"partition {name} gave parameter {i} to rank {owner}; ranks are 0 to {world_size - 1}"
            )
    return owners
