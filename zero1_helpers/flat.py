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

import torch
from torch import Tensor

from zero1_helpers.bucket import drop_taken
from zero1_helpers.checks import check_covered, check_pair
from zero1_helpers.ddp import SimpleDDPBucket
from zero1_helpers.flat_bucket import FlatBucket, check_negative_zero
from zero1_helpers.flat_optimizer import FlatShardedOptimizer
from zero1_helpers.lazy_gather import is_compiled
from zero1_helpers.phases import phase
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
