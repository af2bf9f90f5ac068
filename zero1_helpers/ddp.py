"""Data parallelism in three steps: one gradient after another, behind the backward pass, in buckets.

Every class wraps a model that all ranks hold in full, and leaves in `p.grad` the mean of the ranks'
gradients. They differ in when the all-reduce is launched and how much one of them carries. All follow
one rule: every rank issues the same collectives in the same order, whatever order its gradients
arrive in, so no rank ever waits for a collective that another will not join.
"""

from collections.abc import Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero1_helpers import checks
from zero1_helpers.bucket import Bucket, dense, plan_buckets
from zero1_helpers.collectives import all_take_part
from zero1_helpers.hooks import on_gradients
from zero1_helpers.phases import announce, phase


class SimpleDDP(nn.Module):
    """Every rank holds the whole model and averages every gradient after backward.

    One step::

        forward, backward    each rank on its own batch
        sync_gradients       all-reduce each gradient, one after another, and divide by world_size
        optimizer.step()     the same on every rank, so the ranks stay equal

    The model is at `.module`, and what the wrapper has not is looked up there (`wrapper.config`). Ranks must
    start equal: a difference raises ValueError on every rank and names the tensor, unless
    `broadcast_parameters=True` has rank 0's values (buffers too) sent to all. With `broadcast_buffers` the
    saved buffers (BatchNorm's statistics) are rank 0's in each training forward. Wrapping a model again
    takes the place of the earlier wrapper. After torch's DistributedDataParallel (Li et al., VLDB 2020).
    """

    has_hooks = False  # do its hooks take gradients away?
    _in_backward = False  # a backward that they follow began, and has not come to its end

    def __init__(
        self,
        model: nn.Module,
        *,
        process_group=None,
        broadcast_parameters=False,
        broadcast_buffers=True,
    ):
        super().__init__()
        checks.check_model(model, SimpleDDP)
        self.module = model
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.broadcast_buffers = broadcast_buffers
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._buffer_names = list(checks.saved_buffers(model))
        self._synchronise = True
        self._unsynced: set[Tensor] = set()  # parameters with gradients of this rank alone
        checks.start_equal(model, process_group, broadcast_parameters)
        checks.watch(self, self._names)
        self._hooks = on_gradients(self._names, self._on_gradient)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def _on_gradient(self, param: Tensor) -> None:
        self._unsynced.add(param)

    def forward(self, *args, **kwargs):
        if self.training and self.broadcast_buffers and self._synchronise:
            buffers = [self.module.get_buffer(name) for name in self._buffer_names]
            checks.broadcast_from_rank0(buffers, self.process_group)
        with phase("forward"):
            return self.module(*args, **kwargs)

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Replace each gradient by its mean over the ranks.

        A rank on which a parameter got no gradient takes part with zeros. A parameter that got none
        on any rank keeps `grad = None`, so that no optimizer moves it, not even by weight decay.
        """
        self._check_trainable()
        params = list(self._names)
        if not params:
            return
        with phase("sync"):
            used_here = [p.grad is not None for p in params]
            used = torch.tensor(used_here, dtype=torch.int32, device=params[0].device)
            announce("buckets", [used])
            with all_take_part():
                dist.all_reduce(
                    used, group=self.process_group
                )  # on how many ranks, for each parameter
            # What is used here is used somewhere: no need to read the answer back from the device.
            used = used_here if all(used_here) else used.tolist()
            for p, used_somewhere in zip(params, used, strict=True):
                if used_somewhere:
                    flat = dense(torch.zeros_like(p) if p.grad is None else p.grad, self._names[p])
                    flat.div_(self.world_size)  # first: the sum may be too large for fp16
                    with all_take_part():
                        dist.all_reduce(flat, group=self.process_group)
                    p.grad = flat.view(p.shape)
                for wrapper in checks.watchers_of(p):  # another model may share it
                    wrapper._unsynced.discard(p)

    def unfinished(self) -> str | None:
        late = next((self._names[p] for p in self._unsynced if p.grad is not None), None)
        return late and f"the gradient of {late} is not averaged yet; call sync_gradients() first"

    def torn(self) -> str | None:
        """What is wrong, if the last backward did not come to its end."""
        return checks.TORN if self._in_backward else None

    def remove(self) -> None:
        """Leave the model as it was: no hook of this wrapper is left on it."""
        checks.unwatch(self)
        for hook in self._hooks:
            hook.remove()

    def _check_trainable(self) -> None:
        for name, p in self.module.named_parameters():
            if p.requires_grad and p not in self._names:
                raise RuntimeError(
                    f"parameter {name} became trainable after the model was wrapped; wrap it again"
                )


class SimpleDDPAsync(SimpleDDP):
    """Each gradient's all-reduce starts as soon as backward has computed it, and runs behind the rest.

    One step::

        backward             a hook on each parameter: divide, _launch the all-reduce, without waiting
        wait_for_gradients   launch what never came, then _finish each: wait, hand back

    What is launched is a bucket: here one parameter, in SimpleDDPBucket many. Buckets are launched in
    the order of a plan; one that is ready early waits for its turn. The first step's plan has the last
    registered parameter first, about the order of backward; after it all plan anew by the order in which
    rank 0's gradients arrived, and keep to that (torch's DDP rebuilds its buckets so). While a bucket is
    on its way its gradients live only there, and reading `p.grad` raises. With `no_sync()` around the first
    micro-batches, the last one reduces the sum.

    If backward raises half-way, the step is torn, and every method raises until `abandon_step()` is called on
    all ranks, or a checkpoint is loaded.
    """

    has_hooks = True
    bucket_cap_mb = 0  # a bucket is full with its first parameter

    def __init__(self, model: nn.Module, **kwargs):
        super().__init__(model, **kwargs)
        self._arrived: list[Tensor] | None = []  # in the first step; then None
        self._use(self._plan(list(self._names)))

    def _plan(self, params: list[Tensor]) -> list[Bucket]:
        return plan_buckets(params, self.bucket_cap_mb * 1024 * 1024)

    def _use(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.params}
        self._begin_step()

    def _plan_by_arrival(self) -> None:
        """Plan once more, as rank 0's gradients came; those that did not come are the last."""
        params = list(self._names)
        numbers = {p: i for i, p in enumerate(params)}
        order = [numbers[p] for p in dict.fromkeys([*self._arrived, *reversed(params)])]
        order = torch.tensor(order, device=params[0].device)
        announce("buckets", [order])
        dist.broadcast(order, group=self.process_group, group_src=0)
        self._arrived = None
        self._use(self._plan([params[i] for i in reversed(order.tolist())]))

    def _begin_step(self) -> None:
        self._open = False  # has a forward or a gradient begun a step that nobody has finished?
        self._num_launched = self._num_finished = 0
        for bucket in self.buckets:
            bucket.ready.clear()

    def forward(self, *args, **kwargs):
        self._check_not_open()
        if torch.is_grad_enabled():
            self._open = True
        return super().forward(*args, **kwargs)

    def _check_not_open(self) -> None:
        self._check_not_torn()
        if torch.is_grad_enabled() and any(bucket.ready for bucket in self.buckets):
            raise RuntimeError(checks.FORWARD_TOO_EARLY)

    def _check_not_torn(self) -> None:
        if self._in_backward:
            raise RuntimeError(checks.TORN)

    def abandon_step(self) -> None:
        """End a step whose backward raised; call it on every rank. Its collectives are completed.

        Gradients are dropped. A class that steps in backward completes the step, with zeros for what never
        came: ranks are equal again, but the step is not that of any batch. Better load a checkpoint.
        """
        self._in_backward, self._open = False, True
        self.wait_for_gradients()
        for p in self._names:
            p.grad = None

    def _on_gradient(self, param: Tensor) -> None:
        if not self._synchronise:
            return super()._on_gradient(param)
        bucket = self._bucket_of[param]
        if param in bucket.ready:
            raise RuntimeError(
                f"a second gradient for {self._names[param]} before wait_for_gradients(); "
                "put all but the last backward under no_sync()"
            )
        if not self._in_backward:  # setting an attribute of a Module costs more than a look
            self._in_backward = self._open = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        bucket.ready.add(param)
        if self._arrived is not None:
            self._arrived.append(param)
        while self._num_launched < len(self.buckets) and self.buckets[self._num_launched].is_full:
            self._launch(self.buckets[self._num_launched])

    def _end_backward(self) -> None:
        """Called by autograd at the end of a backward that raised nothing."""
        self._in_backward = False

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        with phase("launch", bucket.index):
            self._num_launched += 1
            bucket.pack(self._names, self.world_size)
            self._unsynced.difference_update(bucket.params)
            bucket.work = dist.all_reduce(bucket.flat, group=self.process_group, async_op=True)

    def _finish(self, bucket: Bucket) -> None:
        with phase("wait", bucket.index):
            self._num_finished += 1
            bucket.unpack()

    def _launch_remaining(self) -> None:
        """Launch every bucket that is not full yet: some gradient of it never came on this rank."""
        while self._open and self._num_launched < len(self.buckets):
            self._launch(self.buckets[self._num_launched])

    def wait_for_gradients(self) -> None:
        """Afterwards every `p.grad` is the mean over the ranks, or None where no rank had any."""
        self._check_not_torn()
        if self._open:
            self._check_trainable()
        self._launch_remaining()
        for bucket in self.buckets[self._num_finished : self._num_launched]:
            self._finish(bucket)
        first = self._num_launched > 0 and self._arrived is not None
        self._begin_step()
        if first:
            self._plan_by_arrival()

    def unfinished(self) -> str | None:
        if self.torn() or not any(bucket.ready for bucket in self.buckets):
            return self.torn() or super().unfinished()
        return "gradients are on their way; call wait_for_gradients() first"

    @contextmanager
    def no_sync(self):
        """Only accumulate in here: for every micro-batch of a step but the last."""
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = True


class SimpleDDPBucket(SimpleDDPAsync):
    """Gradients travel in buckets of about `bucket_cap_mb` MiB: fewer collectives, each worth its latency.

    One step::

        backward             when the last gradient of a bucket has come, _launch the bucket
        flush_bucket         launch the buckets that backward left unfilled
        wait_for_gradients   _finish each bucket: wait, hand the gradients back as views of it
    """

    def __init__(self, model: nn.Module, bucket_cap_mb: float = 25, **kwargs):
        if bucket_cap_mb < 0:
            raise ValueError(f"bucket_cap_mb is a size in MiB, 0 or more, not {bucket_cap_mb}")
        self.bucket_cap_mb = bucket_cap_mb
        super().__init__(model, **kwargs)

    def flush_bucket(self) -> None:
        self._check_not_torn()
        self._launch_remaining()
