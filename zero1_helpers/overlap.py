"""ZeRO stage 1 behind backward: a bucket is reduced, stepped and broadcast while the next one fills."""

import math
from collections.abc import Sequence

import torch.distributed as dist

from zero1_helpers.bucket import Bucket, drop_taken
from zero1_helpers.checks import check_covered, trainable
from zero1_helpers.collectives import wait
from zero1_helpers.ddp import SimpleDDPBucket
from zero1_helpers.phases import phase
from zero1_helpers.streams import join, on_stream, side_stream
from zero1_helpers.zero import ShardedOptimizer


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

    def __init__(
        self,
        model,
        zero1_optimizer: ShardedOptimizer,
        bucket_cap_mb: float = 25,
        *,
        lag: int = 1,
        step_in_backward: bool = True,
        **kwargs,
    ):
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
