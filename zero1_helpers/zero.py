"""ZeRO stage 1: each rank keeps the optimizer state of its own shard of the parameters, and no more.

From "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al., 2020),
P_os. First after backward (`ZeROOne`), then one bucket at a time behind it (`ShardedOptimizer` with
`SimpleDDPBucketAsync`). Every rank computes all gradients and holds all parameters; the owner of a
parameter updates it, and the others receive the result.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .ddp import Bucket, SimpleDDPBucket, broadcast, plan_buckets
from .partition import Partition, assign_owners, by_count
from .phases import announce, phase


class ZeROOne(torch.optim.Optimizer):
    """Shards an optimizer: this rank steps the parameters that it owns, then all ranks share them.

    One step::

        step_shard             the wrapped optimizer sees the parameters of this rank only
        broadcast_parameters   each parameter goes from its owner to the others, one after another;
                               with `bucket_cap_mb`, many of one owner together, in one flat tensor

    `partition` says who owns what: `by_count` as in the post, or `by_bytes`. The groups and the state
    are the wrapped optimizer's own objects: `param_groups` lists all parameters, and what a scheduler
    writes there (lr) is what the next step uses. `state` only ever holds this rank's shard. Gradients
    must be equal on all ranks by the time of `step()`; a DDP wrapper sees to that.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        partition: Partition = by_count,
        process_group=None,
        bucket_cap_mb: float | None = None,
    ):
        self.optimizer, self.partition, self.process_group = optimizer, partition, process_group
        self.bucket_cap_mb = bucket_cap_mb
        self.rank, self.world_size = (
            dist.get_rank(process_group),
            dist.get_world_size(process_group),
        )
        self.param_to_owner_rank: dict[Tensor, int] = {}
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._assign_new_parameters()

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _assign_new_parameters(self) -> None:
        """Give every trainable parameter that has none an owner, and drop the state of others' ones."""
        new = [p for p in self.params if p.requires_grad and p not in self.param_to_owner_rank]
        if not new:
            return
        if len(devices := {str(p.device) for p in self.params}) > 1:
            raise ValueError(f"parameters are on several devices: {', '.join(sorted(devices))}")
        self.param_to_owner_rank |= zip(
            new, assign_owners(self.partition, new, self.world_size), strict=True
        )
        self._drop_others_state()

    def _drop_others_state(self) -> None:
        for p in self.params:
            if not self.is_mine(p):
                self.state.pop(p, None)

    def add_param_group(self, param_group: dict) -> None:
        """New parameters get owners; a wrapper with hooks is made again, to watch them."""
        super().add_param_group(param_group)
        if self.param_groups is self.optimizer.param_groups:  # not while the first groups are being added
            self._assign_new_parameters()

    def is_mine(self, param: Tensor) -> bool:
        return self.param_to_owner_rank.get(param) == self.rank

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._assign_new_parameters()
        self.step_shard()
        self.broadcast_parameters()
        return loss

    def step_shard(self) -> None:
        with phase("step"), only(self.optimizer, {p for p in self.params if self.is_mine(p)}):
            self.optimizer.step()

    def broadcast_parameters(self) -> None:
        with phase("broadcast"):
            if self.bucket_cap_mb is not None:
                return self._broadcast_buckets()
            for p, owner in self.param_to_owner_rank.items():
                broadcast(p, owner, self.process_group)

    def _broadcast_buckets(self) -> None:
        """Two buckets are on their way at any time: while one travels, the next is packed."""
        cap, before = self.bucket_cap_mb * 1024 * 1024, None
        for owner in range(self.world_size):
            owned = [p for p, o in self.param_to_owner_rank.items() if o == owner]
            for bucket in plan_buckets(owned, cap):
                sent = Broadcast.launch(bucket.params, owner, self)
                if before is not None:
                    before.wait()
                before = sent
        if before is not None:
            before.wait()

    def state_dict(self):
        raise RuntimeError(
            "state_dict() would hold the shard of this rank only; to save just that, rank by rank, "
            "ask for it by name: optimizer.optimizer.state_dict()"
        )

    def load_state_dict(self, state_dict) -> None:
        """Take a whole optimizer's state, or this rank's shard; what others own is dropped."""
        self._assign_new_parameters()
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = {i for i, p in zip(ids, self.params, strict=False) if self.is_mine(p)}
        state = {i: entry for i, entry in state_dict["state"].items() if i in mine}
        self.optimizer.load_state_dict(state_dict | {"state": state})  # copies what it is given
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self._drop_others_state()


class ShardedOptimizer(ZeROOne):
    """A sharded optimizer that can step some of its parameters while backward is still running.

    One step of some parameters (`step_parameters`)::

        step        their owner updates them
        free        their gradients are dropped, on every rank
        broadcast   one asynchronous broadcast from each owner, of all that it owns among them

    The post makes one small optimizer for each parameter. One optimizer that is shown only the
    parameters at hand does the same, since state is kept per parameter, and it keeps a single lr.
    `model` may also be what a torch optimizer takes: parameters, or groups of them with settings of
    their own. `step()` is the step after backward: nothing, when all have been stepped already.
    """

    def __init__(
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        model: nn.Module | Iterable,
        *,
        partition=by_count,
        process_group=None,
        **optimizer_kwargs,
    ):
        params = model.parameters() if isinstance(model, nn.Module) else model
        optimizer = optimizer_cls(params, **optimizer_kwargs)
        super().__init__(optimizer, partition, process_group)

    def step_parameter(self, param: Tensor) -> "Broadcast":
        """Step one parameter; `.wait()` on what is returned before anything reads it."""
        return self.step_parameters([param])[0]

    @torch.no_grad()
    def step_parameters(
        self, params: Sequence[Tensor], index: int | None = None
    ) -> list["Broadcast"]:
        """Step parameters of one dtype; `index` is the bucket's, for the trace."""
        with phase("step", index), only(self.optimizer, {p for p in params if self.is_mine(p)}):
            self.optimizer.step()
        for p in params:
            p.grad = None
        with phase("broadcast", index):
            owned = {}
            for p in params:
                owned.setdefault(self.param_to_owner_rank[p], []).append(p)
            return [Broadcast.launch(owned[owner], owner, self) for owner in sorted(owned)]

    def step(self, closure=None):
        if closure is None and all(p.grad is None for p in self.params):
            return None
        return super().step(closure)


class SimpleDDPBucketAsync(SimpleDDPBucket):
    """Step and broadcast, too, run behind backward: a bucket is stepped as soon as it is reduced.

    One step::

        backward             bucket k is full: _launch its all-reduce, then _finish bucket k - lag:
                             wait, divide, step the parameters owned here, launch their broadcasts
        flush_bucket         launch the buckets that backward left unfilled
        wait_for_gradients   _finish the buckets that are left
        wait_for_broadcasts  afterwards the parameters are equal on all ranks; the gradients are gone

    There is no optimizer.step(). The schedule is the order of the buckets and nothing else, so all
    ranks issue the same collectives in the same order; a callback on a future would issue them from
    the backend's threads, whose order differs from rank to rank. On CUDA, _finish runs on a side
    stream: waiting there holds nothing back, and the compute stream joins it at the end.

    `step_in_backward=False` puts every step after backward: for a model in which backward reads the
    value of a parameter whose own gradient is complete (autograd raises then).
    """

    def __init__(self, model, zero1_optimizer: ShardedOptimizer, bucket_cap_mb: float = 25, *,
                 lag: int = 1, step_in_backward: bool = True, **kwargs):  # fmt: skip
        if lag < 0:
            raise ValueError(f"lag is a number of buckets, 0 or more, not {lag}")
        super().__init__(model, bucket_cap_mb, **kwargs)
        for p, name in self._names.items():
            if p not in zero1_optimizer.param_to_owner_rank:
                raise ValueError(
                    f"parameter {name} is not in the optimizer; make it from the same model"
                )
        self.zero1_optimizer = zero1_optimizer
        self.lag = lag if step_in_backward else math.inf
        self._broadcasts: deque[list[Broadcast]] = deque()  # one list a bucket
        on_cuda = next(iter(self._names)).is_cuda if self._names else False
        self._side_stream = torch.cuda.Stream() if on_cuda else None

    def forward(self, *args, **kwargs):
        if self._broadcasts:
            raise RuntimeError(
                "forward before the parameters have arrived; call wait_for_broadcasts() first"
            )
        return super().forward(*args, **kwargs)

    def _launch(self, bucket: Bucket) -> None:
        super()._launch(bucket)
        if bucket.index >= self.lag:
            self._finish(self.buckets[bucket.index - self.lag])

    @torch.no_grad()
    def _finish(self, bucket: Bucket) -> None:
        with on_stream(self._side_stream, keep=bucket.flat):
            super()._finish(bucket)
            self._receive(all_but=1)
            params = [p for p in bucket.params if p.grad is not None]  # got a gradient on some rank
            self._broadcasts.append(self.zero1_optimizer.step_parameters(params, bucket.index))

    def _receive(self, all_but: int = 0) -> None:
        """Wait for broadcasts in the order of their launch; `all_but` the last few are left for later."""
        while len(self._broadcasts) > all_but:
            for sent in self._broadcasts.popleft():
                sent.wait()

    @torch.no_grad()
    def wait_for_broadcasts(self) -> None:
        with on_stream(self._side_stream), phase("receive"):
            self._receive()
        if self._side_stream is not None:
            torch.cuda.current_stream().wait_stream(self._side_stream)


@dataclass(eq=False)
class Broadcast:
    """Parameters of one owner on their way, in one flat tensor of shape (sum of numel,)."""

    params: list[Tensor]  # to copy into; none on the owner
    flat: Tensor
    work: dist.Work

    @classmethod
    def launch(cls, params: list[Tensor], owner: int, optimizer: ZeROOne) -> "Broadcast":
        if optimizer.rank == owner:
            flat = torch.cat([p.detach().reshape(-1) for p in params])
        else:
            flat = params[0].new_empty(sum(p.numel() for p in params))
        announce("buckets", [flat])
        work = dist.broadcast(flat, group=optimizer.process_group, group_src=owner, async_op=True)
        return cls([] if optimizer.rank == owner else params, flat, work)

    @torch.no_grad()
    def wait(self) -> None:
        """Copy in what has arrived. The copy counts as a change: if backward still needs the old value,
        autograd raises instead of using the new one."""
        self.work.wait()
        offset = 0
        for p in self.params:
            p.copy_(self.flat[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()
        self.flat = self.work = None


def only(optimizer: torch.optim.Optimizer, params: Collection[Tensor]):
    """Show an optimizer these parameters and no others, each still in its own group."""
    return instead(optimizer, {p: p for p in params})


@contextmanager
def instead(optimizer: torch.optim.Optimizer, pieces: Mapping[Tensor, Tensor]):
    """Show an optimizer pieces[p] in place of each parameter p, in p's group, and nothing else."""
    everything = [group["params"] for group in optimizer.param_groups]
    for group, all_params in zip(optimizer.param_groups, everything, strict=True):
        group["params"] = [pieces[p] for p in all_params if p in pieces]
    try:
        yield
    finally:
        for group, all_params in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = all_params


@contextmanager
def on_stream(stream: "torch.cuda.Stream | None", keep: Tensor | None = None):
    """Queue what follows on `stream`, after all that the current stream has queued; on a CPU just run it.

    `keep` was allocated for the current stream: its memory is not given away while `stream` uses it.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    if keep is not None:
        keep.record_stream(stream)
    with torch.cuda.stream(stream):
        yield
