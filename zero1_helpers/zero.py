"""ZeRO stage 1: each rank keeps the optimizer state of its own shard of the parameters, and no more.

From "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al., 2020),
P_os. First after backward (`ZeROOne`), then one bucket at a time behind it (`ShardedOptimizer`, with the
wrapper of the module `overlap`). Every rank computes all gradients and holds all parameters; the owner of a
parameter updates it, and the others receive the result.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero1_helpers.bucket import TakenGradient, as_flat, drop_taken, plan_buckets
from zero1_helpers.checks import broadcast, check_parameters, checksum, members, watchers_of
from zero1_helpers.collectives import wait
from zero1_helpers.partition import Partition, assign_owners, by_count
from zero1_helpers.phases import phase
from zero1_helpers.stepping import as_groups, check_optimizer, only, remade_with


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
        if (
            self.param_groups is self.optimizer.param_groups
        ):  # not while the first groups are being added
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
        for wrapper in {
            id(w): w for p in self.param_to_owner_rank for w in watchers_of(p)
        }.values():
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
        torch.autograd.graph.increment_version(
            params
        )  # backward that still needs the old ones raises
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

    def step_parameters(
        self, params: Sequence[Tensor], index: int | None = None
    ) -> list[dist.Work]:
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
        if closure is None and all(
            p.grad is None or type(p.grad) is TakenGradient for p in self.params
        ):
            self._check_finished()
            return None
        return super().step(closure)


def by_owner(params: Iterable[Tensor], owner_of: Mapping[Tensor, int]) -> dict[int, list[Tensor]]:
    """Parameters of each owner, in order of rank."""
    owned = {}
    for p in params:
        owned.setdefault(owner_of[p], []).append(p)
    return dict(sorted(owned.items()))
