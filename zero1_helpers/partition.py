"""Who owns what: ways to split a list of parameters over the ranks.

A partition is a function `(params, world_size) -> owners`, where `owners[i]` is the rank that keeps
the optimizer state of `params[i]` and updates it. Nothing is communicated: every rank computes the
same answer from the same shapes, so all that matters is that the function is deterministic.
"""

from collections.abc import Callable, Sequence

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
