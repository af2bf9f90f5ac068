"""The optimizer of the flat classes: each rank steps its slice of every bucket, and keeps its state alone."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero1_helpers.bucket import drop_taken
from zero1_helpers.checks import check_parameters, check_real
from zero1_helpers.flat_bucket import MASTER, FlatBucket
from zero1_helpers.partition import Flat
from zero1_helpers.phases import phase
from zero1_helpers.stepping import as_groups, check_optimizer, fastest_kernels, instead


class FlatShardedOptimizer(torch.optim.Optimizer):
    """Shards an optimizer by elements: this rank steps its slice of every flat bucket.

    One step of a bucket::

        step_bucket     the optimizer sees, in place of each parameter, the piece of it in this rank's
                        slice; then the gradients are dropped
        gather_bucket   one asynchronous all-gather of all slices, in place
        receive         wait for it

    From here on each parameter is a view of its bucket's flat `weights`. Pieces are parameters of their
    own, 1-D, so each keeps its group's settings and its own state and count of steps: one bucket may
    hold several groups, and a parameter that no rank used is left out. `model` may be what a torch
    optimizer takes: parameters, or groups of them. `param_groups` lists whole parameters; `state` is
    that of this rank's pieces. The update rule must work element by element (Adam, SGD and most others);
    one that does not is refused. Fused or foreach kernels are used where there are any.

    `master_weights=True` steps parameters of less than 32 bits in fp32 (or in a dtype given instead), from
    `state[piece]["master_param"]`; `reduce_dtype` sums the gradients in another dtype. See above for both.
    """

    def __init__(
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        model: nn.Module | Iterable,
        bucket_cap_mb: float = 25,
        *,
        first_bucket_mb: float = 1,
        master_weights: bool | torch.dtype = False,
        reduce_dtype: torch.dtype | None = None,
        process_group=None,
        **optimizer_kwargs,
    ):
        if bucket_cap_mb < 0 or first_bucket_mb < 0:
            raise ValueError(f"bucket_cap_mb is a size in MiB, 0 or more, not {bucket_cap_mb}")
        check_optimizer(optimizer_cls, groups := as_groups(model), optimizer_kwargs, "in pieces")
        self.optimizer = optimizer_cls(groups, **fastest_kernels(optimizer_cls, optimizer_kwargs))
        master_dtype = torch.float32 if master_weights is True else master_weights or None
        self.partition = Flat(bucket_cap_mb, first_bucket_mb, master_dtype, reduce_dtype)
        self.process_group, self.wrapper = process_group, None
        self.rank, self.world_size = (
            dist.get_rank(process_group),
            dist.get_world_size(process_group),
        )
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.buckets: list[FlatBucket] = []
        self._plan_new_parameters()

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def planned(self) -> list[Tensor]:
        return [
            p for bucket in self.buckets for p in bucket.params
        ]  # these have a place in a bucket

    @torch.no_grad()
    def _plan_new_parameters(self) -> None:
        planned = set(self.planned)
        new = [p for p in self.params if p.requires_grad and p not in planned]
        check_parameters(self.params)
        check_real(self.params)
        for group in self.partition.buckets(new):
            params, index = [new[i] for i in group], len(self.buckets)
            self.buckets.append(
                FlatBucket(params, index, self.rank, self.world_size, self.partition)
            )
        self._take_state(
            {p: self.state.pop(p) for p in new if p in self.state}
        )  # Adagrad has it already

    def add_param_group(self, param_group: dict) -> None:
        """New parameters get new buckets; wrap the model again, for the wrapper to watch them."""
        super().add_param_group(param_group)
        if hasattr(self, "buckets"):  # not while the first groups are being added
            self._plan_new_parameters()

    @torch.no_grad()
    def step_bucket(self, bucket: FlatBucket) -> None:
        with phase("step", bucket.index):
            bucket.receive_parameters()  # of the step before, if nothing has read them since
            bucket.hand_out_gradients()
            with instead(self.optimizer, pieces := bucket.pieces_with_grad()):
                self.optimizer.step()
            bucket.take_step()
            if bucket.has_master:
                for (
                    piece
                ) in pieces.values():  # after the step, for Adam begins where there is no entry
                    self.state[piece].setdefault(MASTER, piece.detach())

    def gather_bucket(self, bucket: FlatBucket) -> None:
        with phase("gather", bucket.index):
            bucket.send_parameters(self.process_group)

    @torch.no_grad()
    def step(self, closure=None):
        """Complete the step: what backward has left over, then the parameters of all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.wrapper is None:
            raise RuntimeError(
                "gradients come from SimpleDDPReduceScatter(model, optimizer); wrap the model"
            )
        self.wrapper.wait_for_gradients()
        self.wrapper.step_remaining()
        self.wrapper.wait_for_broadcasts()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drop what has been reduced and not been stepped."""
        drop_taken(self.params)
        super().zero_grad(set_to_none)
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.mine = None

    def receive(self) -> None:
        """Wait until all parameters are there."""
        for bucket in self.buckets:
            bucket.receive_parameters()

    def state_dict(self):
        raise RuntimeError(
            "state_dict() would hold the shard of this rank only; checkpoint.full_state_dict(optimizer) "
            "puts it together on one rank"
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict) -> None:
        """Take a whole optimizer's state, on every rank; each keeps that of its own pieces.

        Master weights come from it, too; what has none takes the model's weights.
        """
        kernels = [{k: g[k] for k in ("fused", "foreach") if k in g} for g in self.param_groups]
        self.optimizer.load_state_dict(state_dict | {"state": {}})
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        for group, kernel in zip(self.param_groups, kernels, strict=True):
            group.update(kernel)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        self._take_state(
            {p: state_dict["state"].get(i) for i, p in zip(ids, self.params, strict=True)}
        )

    def _take_state(self, entries: dict[Tensor, dict | None]) -> None:
        for bucket in self.buckets:
            for p, piece in bucket.pieces.items():
                if entries.get(p):
                    self.state[piece] = bucket.take_state(p, entries[p])
