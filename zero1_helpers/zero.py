"""ZeRO stage 1: each rank keeps the optimizer state of its own shard of the parameters, and no more.

From "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al., 2020),
P_os. First after backward (`ZeROOne`), then one bucket at a time behind it (`ShardedOptimizer` with
`SimpleDDPBucketAsync`). Every rank computes all gradients and holds all parameters; the owner of a
parameter updates it, and the others receive the result.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero1_helpers.bucket import (
    Bucket,
    TakenGradient,
    drop_taken,
    home,
    lies_at,
    plan_buckets,
    settle,
)
from zero1_helpers.checks import (
    broadcast,
    check_covered,
    check_parameters,
    checksum,
    members,
    trainable,
    watchers_of,
)
from zero1_helpers.collectives import wait
from zero1_helpers.ddp import SimpleDDPBucket
from zero1_helpers.partition import Partition, assign_owners, by_count
from zero1_helpers.phases import announce, phase
from zero1_helpers.stepping import as_groups, check_optimizer, only, remade_with
from zero1_helpers.streams import join, on_stream, side_stream

is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


class ZeROOne(torch.optim.Optimizer):
    """Shards an optimizer: this rank steps the parameters that it owns, then all ranks share them.

    One step::

        step_shard             the wrapped optimizer sees the parameters of this rank only
        broadcast_parameters   each parameter goes from its owner to the others, one after another;
                               with `bucket_cap_mb`, many of one owner together, see `as_flat`

    `partition` says who owns what: `by_count` as in the post, or `by_bytes`. The groups and the state
    are the wrapped optimizer's own objects: `param_groups` lists all parameters, and what a scheduler
    writes there (lr) is what the next step uses. `state` only ever holds this rank's shard. Gradients
    must be equal on all ranks by the time of `step()`; a DDP wrapper sees to that.
    """

    shown = "this rank's"  # which parameters the optimizer sees in one call of its step()

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
        self._compared = False  # of gradients that no wrapper of ours averages: are they equal?
        check_parameters([p for group in optimizer.param_groups for p in group["params"]])
        check_optimizer(type(optimizer), optimizer.param_groups, remade_with(optimizer), self.shown)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._assign_new_parameters()
        self._check_groups()

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _assign_new_parameters(self) -> None:
        """Give every trainable parameter that has none an owner, and drop the state of others' ones."""
        new = [p for p in self.params if p.requires_grad and p not in self.param_to_owner_rank]
        if not new:
            return
        check_parameters(self.params)
        self.param_to_owner_rank |= zip(
            new, assign_owners(self.partition, new, self.world_size), strict=True
        )
        self._drop_others_state()
        for _, params in self._sent_together():
            as_flat(params)

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
        self._check_gradients()
        self.step_shard()
        self.broadcast_parameters()
        return loss

    def _check_groups(self) -> None:
        """Gradients may be the mean over more ranks than share the state, not over fewer."""
        for wrapper in {id(w): w for p in self.params for w in watchers_of(p)}.values():
            if not members(self.process_group) <= members(wrapper.process_group):
                raise ValueError(
                    f"the optimizer's process group, ranks {sorted(members(self.process_group))}, is not "
                    f"part of the wrapper's, {sorted(members(wrapper.process_group))}, so gradients would "
                    "differ between ranks that share the state; give both the same process_group"
                )

    def _check_gradients(self) -> None:
        """Raise unless all gradients are averaged: by wrappers, or, if there are none, by somebody."""
        wrappers = {p: watchers_of(p) for p in self.param_to_owner_rank}
        self._check_finished()
        if any(wrappers.values()):
            self._check_groups()
            for i, p in enumerate(self.params):
                if p.requires_grad and not wrappers[p]:
                    raise RuntimeError(
                        f"parameter {i} of the optimizer, of shape {tuple(p.shape)}, is in no wrapper, so "
                        "its gradient is this rank's alone; wrap one module that holds all parameters"
                    )
        elif not self._compared:
            self._compare_gradients()

    def _check_finished(self) -> None:
        for wrapper in {id(w): w for p in self.param_to_owner_rank for w in watchers_of(p)}.values():
            if why := wrapper.unfinished():
                raise RuntimeError(why)

    def _compare_gradients(self) -> None:
        self._compared = True
        none = torch.zeros((), dtype=torch.int64, device=self.params[0].device)
        sums = torch.stack([none if p.grad is None else checksum(p.grad) for p in self.params])
        extremes = torch.stack([sums, -sums])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.process_group)
        for i, differs in enumerate((extremes[0] != -extremes[1]).tolist()):
            if differs:
                shape = tuple(self.params[i].shape)
                raise RuntimeError(
                    f"the gradient of parameter {i} of the optimizer, of shape {shape}, differs between "
                    "ranks; wrap the model, and average the gradients before step()"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        drop_taken(self.params)
        super().zero_grad(set_to_none)

    def step_shard(self) -> None:
        with phase("step"), only(self.optimizer, {p for p in self.params if self.is_mine(p)}):
            self.optimizer.step()

    def broadcast_parameters(self) -> None:
        with phase("broadcast"):
            if self.bucket_cap_mb is None:
                for p, owner in self.param_to_owner_rank.items():
                    broadcast(p, owner, self.process_group)
            for work in [self._send(params, owner) for owner, params in self._sent_together()]:
                wait(work)

    def _sent_together(self) -> list[tuple[int, list[Tensor]]]:
        """(owner, parameters), one for each broadcast; none where each parameter has its own."""
        if self.bucket_cap_mb is None:
            return []
        owned = by_owner(self.param_to_owner_rank, self.param_to_owner_rank)
        cap = self.bucket_cap_mb * 1024 * 1024
        return [(o, bucket.params) for o in owned for bucket in plan_buckets(owned[o], cap)]

    def _send(self, params: list[Tensor], owner: int) -> dist.Work:
        """Start to send parameters of one owner, together and in place."""
        flat = as_flat(params)
        torch.autograd.graph.increment_version(params)  # backward that still needs the old ones raises
        return dist.broadcast(flat, group=self.process_group, group_src=owner, async_op=True)

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
        broadcast   one asynchronous broadcast from each owner, of all that it owns among them, in place

    The post makes one small optimizer for each parameter. One optimizer that is shown only the
    parameters at hand does the same, since state is kept per parameter, and it keeps a single lr.
    `model` may also be what a torch optimizer takes: parameters, or groups of them with settings of
    their own. `step()` is the step after backward: nothing, when all have been stepped already.
    """

    shown = "one by one"

    def __init__(
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        model: nn.Module | Iterable,
        *,
        partition=by_count,
        process_group=None,
        **optimizer_kwargs,
    ):
        optimizer = optimizer_cls(as_groups(model), **optimizer_kwargs)
        super().__init__(optimizer, partition, process_group)

    def step_parameter(self, param: Tensor) -> dist.Work:
        """Step one parameter that has a gradient; `.wait()` on what is returned before anything reads it."""
        return self.step_parameters([param])[0]

    def step_parameters(self, params: Sequence[Tensor], index: int | None = None) -> list[dist.Work]:
        """Step those of `params`, of one dtype, that have a gradient; `index` is the bucket's, for the trace.

        Without one they are sent along: what travels together lies together, used or not.
        """
        stepped = [p for p in params if p.grad is not None]
        if not stepped:
            return []
        owned = by_owner(params, self.param_to_owner_rank)
        with phase("step", index):
            if self.rank in owned:
                with only(self.optimizer, owned[self.rank]):
                    self.optimizer.step()
        for p in stepped:
            p.grad = None
        with phase("broadcast", index):
            return [self._send(of_one, owner) for owner, of_one in owned.items()]

    def lay_out(self, params: Sequence[Tensor]) -> None:
        """Move what will be stepped together, so that no step has to, see `as_flat`."""
        for of_one in by_owner(params, self.param_to_owner_rank).values():
            as_flat(of_one)

    def step(self, closure=None):
        if closure is None and all(p.grad is None or type(p.grad) is TakenGradient for p in self.params):
            self._check_finished()
            return None
        return super().step(closure)


class SimpleDDPBucketAsync(SimpleDDPBucket):
    """Step and broadcast, too, run behind backward: a bucket is stepped as soon as it is reduced.

    One step::

        backward             bucket k is full: _launch its all-reduce, then _finish bucket k - lag:
                             wait, step the parameters owned here, launch the broadcasts
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
        self.zero1_optimizer = zero1_optimizer
        self.lag = lag if step_in_backward else math.inf
        self._broadcasts: list[dist.Work] = []
        self._stepped = False  # has this step changed parameters?
        self._side_stream = side_stream(model.parameters())
        check_covered(trainable(model), zero1_optimizer.params)
        super().__init__(model, bucket_cap_mb, **kwargs)
        zero1_optimizer._check_groups()

    def _use(self, buckets: Sequence[Bucket]) -> None:
        """Lay out now, between two steps, what the new plan sends together."""
        super()._use(buckets)
        self._receive()
        for bucket in self.buckets:
            self.zero1_optimizer.lay_out(bucket.params)

    def forward(self, *args, **kwargs):
        self._check_not_open()
        if self._broadcasts:
            raise RuntimeError(
                "forward before the parameters have arrived; call wait_for_broadcasts() first"
            )
        return super().forward(*args, **kwargs)

    def _launch(self, bucket: Bucket) -> None:
        super()._launch(bucket)
        if bucket.index >= self.lag:
            self._finish(self.buckets[bucket.index - self.lag])

    def _finish(self, bucket: Bucket) -> None:
        with on_stream(self._side_stream, use=[bucket.flat]):
            super()._finish(bucket)
            used = [p for p in bucket.params if p.grad is not None]
            self._broadcasts += self.zero1_optimizer.step_parameters(bucket.params, bucket.index)
            bucket.hold(used)
            self._stepped = True

    def wait_for_gradients(self) -> None:
        if self._open:
            self._check_trainable()
            check_covered(self._names, self.zero1_optimizer.params)
        super().wait_for_gradients()

    def wait_for_broadcasts(self) -> None:
        self._check_not_torn()
        self._receive()
        drop_taken(self._names)
        if self._stepped:
            self._stepped = False
            self.zero1_optimizer.step()  # nothing is left to step; schedulers and step hooks hear of it

    def _receive(self) -> None:
        with on_stream(self._side_stream), phase("receive"):
            while self._broadcasts:
                wait(self._broadcasts.pop(0))
        join(self._side_stream)

    def abandon_step(self) -> None:
        super().abandon_step()
        self.wait_for_broadcasts()


def by_owner(params: Iterable[Tensor], owner_of: Mapping[Tensor, int]) -> dict[int, list[Tensor]]:
    """Parameters of each owner, in order of rank."""
    owned = {}
    for p in params:
        owned.setdefault(owner_of[p], []).append(p)
    return dict(sorted(owned.items()))


def as_flat(params: Sequence[Tensor]) -> Tensor:
    """The memory of parameters of one dtype, as one flat tensor of shape (sum of numel,).

    They fill it end to end, each with its own strides. If they do not yet, they are moved there. So
    nothing has to be packed or unpacked, and no buffer is needed (as in torch's ZeroRedundancyOptimizer
    with `parameters_as_bucket_view`). While they are moved they exist twice.
    """
    *offsets, numel = accumulate((p.numel() for p in params), initial=0)
    if len(params) == 1 and is_dense(params[0]) and params[0].untyped_storage().nbytes() == params[0].nbytes:
        return params[0].detach().as_strided((numel,), (1,))
    flat = home(next((p for p in params if p.numel()), params[0]))
    if flat.shape != (numel,) or not all(
        home(p) is flat and lies_at(p, flat, offset) and is_dense(p)
        for p, offset in zip(params, offsets, strict=True)
        if p.numel()
    ):
        flat = params[0].detach().new_empty(numel)
        for p, offset in zip(params, offsets, strict=True):
            strides = torch.empty_like(p, device="meta").stride()  # dense, in p's order
            settle(p, flat.as_strided(p.shape, strides, offset), flat)
        announce("params", [flat])
    return flat
