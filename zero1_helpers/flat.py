"""ZeRO-1 as production systems run it: flat buckets, reduce-scatter, all-gather. 2Ψ sent instead of 3Ψ.

All-reduce is a reduce-scatter and an all-gather. `zero` sends all gradients to all ranks by one, then the
new parameters by a broadcast: 3Ψ. But a rank needs only the gradients of what it steps, and between
the two halves of an all-reduce there is room for the step. So here, for each bucket::

    backward ─ collect ─► grads (n,) ─ reduce-scatter ─► mine (n / world_size,)
    mine ─ step ─► this rank's slice of weights ─ all-gather ─► weights (n,)

and there is nothing left to broadcast. A bucket is one flat tensor, cut in world_size equal slices, and
every rank owns a slice of every bucket: shards are equal whatever the shapes. After DeepSpeed's ZeRO-1
(Rajbhandari et al., 2020) and Megatron-LM's distributed optimizer.

Mixed precision (`master_weights`) is K = 12: bf16 or fp16 parameters and gradients; the slice is stepped
in fp32, as a master copy of which each rank has its slice only, with fp32 moments; then it is rounded into
`weights`, and those are gathered as before. `reduce_dtype` is what gradients are summed in. In bf16, their
own, a rank sends 2 B (world_size - 1) / world_size for each and every addition is rounded; in fp32 it sends
twice as much, and hardly anything is lost. The mean is taken in the master's dtype in either case. Under
`no_sync()` micro-batches add up in `p.grad`, in the dtype of p.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero1_helpers.bucket import drop_taken
from zero1_helpers.checks import check_covered, check_pair, check_parameters, check_real
from zero1_helpers.ddp import SimpleDDPBucket
from zero1_helpers.flat_bucket import MASTER, FlatBucket, check_negative_zero
from zero1_helpers.lazy_gather import is_compiled
from zero1_helpers.partition import Flat
from zero1_helpers.phases import phase
from zero1_helpers.stepping import as_groups, check_optimizer, fastest_kernels, instead
from zero1_helpers.streams import join, on_stream, side_stream


class SimpleDDPReduceScatter(SimpleDDPBucket):
    """Reduce-scatter, step and all-gather run behind the backward pass, bucket by bucket.

    One step::

        backward             _on_gradient: the bucket collects the gradient, which is free from then on
                             bucket k is full: _launch its reduce-scatter, then _finish bucket k - lag:
                             wait, divide, step the slice owned here, launch the all-gather
        flush_bucket         launch the buckets that backward left unfilled
        wait_for_gradients   _finish the buckets that are left
        optimizer.step()     all of this that is not done yet, then wait for the parameters

    Buckets and their flat weights are the optimizer's. They are launched in a planned order, after the
    first step that in which they were full on rank 0, and the order of collectives is nothing else.
    `wait_for_broadcasts()` waits for the parameters, too: the loop of
    SimpleDDPBucketAsync runs unchanged. With `step_in_backward=False` all steps are made by
    `optimizer.step()`: for clipping by the global norm, for GradScaler, and for a model in which
    backward reads a parameter whose own gradient is complete (autograd raises otherwise).
    With `lazy_gather=True` every second all-gather waits until all is stepped. They then start in the order
    in which forward needs them and run behind the next one; what reads a parameter waits for it, see
    `Arriving`. Every second: backward, two thirds of computing, has the reduce-scatters to hide as well.
    """

    def __init__(
        self,
        model,
        zero1_optimizer: "FlatShardedOptimizer",
        *,
        lag: int = 1,
        step_in_backward: bool = True,
        lazy_gather: bool = False,
        **kwargs,
    ):
        if lag < 0:
            raise ValueError(f"lag is a number of buckets, 0 or more, not {lag}")
        self.zero1_optimizer, self.lag = zero1_optimizer, lag
        self.step_in_backward, self.lazy_gather = step_in_backward, lazy_gather
        group = kwargs.setdefault("process_group", zero1_optimizer.process_group)
        check_pair(model, group, zero1_optimizer.planned, zero1_optimizer.process_group)
        check_negative_zero(zero1_optimizer.buckets, group)
        super().__init__(model, zero1_optimizer.partition.bucket_cap_mb, **kwargs)
        self._side_stream = side_stream(self._names)
        zero1_optimizer.wrapper = self

    def _plan(self, params: list[Tensor]) -> list[FlatBucket]:
        place = {p: i for i, p in enumerate(reversed(params))}  # weights stay where they lie
        buckets = sorted(
            self.zero1_optimizer.buckets, key=lambda b: max(place[p] for p in b.params)
        )
        for index, bucket in enumerate(buckets):
            bucket.index = index
        return buckets

    def forward(self, *args, **kwargs):
        self._check_not_open()
        if any(
            b.mine is not None or b.is_ahead or (b.gather and not self.lazy_gather)
            for b in self.buckets
        ):
            raise RuntimeError(
                "forward before the parameters have arrived; call wait_for_broadcasts() first, "
                "or the optimizer's step()"
            )
        if self.lazy_gather and is_compiled(self.module):
            self.zero1_optimizer.receive()  # compiled code reads weights without asking
        return super().forward(*args, **kwargs)

    def _on_gradient(self, param: Tensor) -> None:
        bucket = self._bucket_of[param]
        if self._synchronise and param not in bucket.ready:
            bucket.collect(param, self._names[param])
        super()._on_gradient(param)

    @torch.no_grad()
    def _launch(self, bucket: FlatBucket) -> None:
        with phase("launch", bucket.index):
            self._num_launched += 1
            bucket.send_gradients(self._names, self.process_group)
            self._unsynced.difference_update(bucket.params)
        if bucket.index >= self.lag:
            self._finish(self.buckets[bucket.index - self.lag])

    @torch.no_grad()
    def _finish(self, bucket: FlatBucket) -> None:
        with on_stream(self._side_stream, use=[bucket.grads, bucket.mine]):
            with phase("wait", bucket.index):
                self._num_finished += 1
                bucket.receive_gradients(self.world_size)
            if self.step_in_backward:
                self._step(bucket)

    def _step(self, bucket: FlatBucket) -> None:
        self.zero1_optimizer.step_bucket(bucket)
        if not self.lazy_gather or (self.step_in_backward and bucket.index % 2):
            self.zero1_optimizer.gather_bucket(bucket)

    def wait_for_gradients(self) -> None:
        if self._open:
            self._check_trainable()
            check_covered(self._names, self.zero1_optimizer.planned)
        super().wait_for_gradients()
        if not self.step_in_backward:  # others read them: clipping
            join(self._side_stream)

    @torch.no_grad()
    def step_remaining(self) -> None:
        """Step what has been reduced and not been stepped."""
        with on_stream(self._side_stream):
            for bucket in self.buckets:
                if bucket.mine is not None:
                    self._step(bucket)

    @torch.no_grad()
    def wait_for_broadcasts(self) -> None:
        """Afterwards the parameters are equal on all ranks, or guarded until they are."""
        self._check_not_torn()
        drop_taken(self._names)  # first: to set a guarded parameter's grad is to wait for it
        with on_stream(self._side_stream), phase("receive"):
            if self.lazy_gather:
                for bucket in reversed(self.buckets):
                    if bucket.is_ahead:
                        self.zero1_optimizer.gather_bucket(bucket)
                    bucket.guard()
            else:
                self.zero1_optimizer.receive()
        if not self.lazy_gather:
            join(self._side_stream)

    def abandon_step(self) -> None:
        super().abandon_step()
        if self.step_in_backward:
            self.step_remaining()
        self.zero1_optimizer.zero_grad()
        self.wait_for_broadcasts()

    def remove(self) -> None:
        super().remove()
        self.zero1_optimizer.receive()
        if self.zero1_optimizer.wrapper is self:
            self.zero1_optimizer.wrapper = None


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
