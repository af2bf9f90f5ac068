"""Data parallelism in three steps: one gradient after another, behind the backward pass, in buckets.

Every class wraps a model that all ranks hold in full, and leaves in `p.grad` the mean of the ranks'
gradients. They differ in when the all-reduce is launched and how much one of them carries. All follow
one rule: every rank issues the same collectives in the same order, whatever order its gradients
arrive in, so no rank ever waits for a collective that another will not join.
"""

import hashlib
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero1_helpers.partition import in_buckets
from zero1_helpers.phases import announce, phase

_wrapper_of = weakref.WeakKeyDictionary()  # model -> weak reference to the wrapper around it


class SimpleDDP(nn.Module):
    """Every rank holds the whole model and averages every gradient after backward.

    One step::

        forward, backward    each rank on its own batch
        sync_gradients       all-reduce each gradient, one after another, and divide by world_size
        optimizer.step()     the same on every rank, so the ranks stay equal

    The model is at `.module`. Ranks must start equal: a difference raises ValueError on every rank and
    names the tensor, unless `broadcast_parameters=True` has rank 0's values (buffers too) sent to all.
    With `broadcast_buffers` the saved buffers (BatchNorm's statistics) are rank 0's in each training
    forward. Wrapping a model again takes the place of the earlier wrapper. After torch's
    DistributedDataParallel (Li et al., VLDB 2020).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        process_group=None,
        broadcast_parameters=False,
        broadcast_buffers=True,
    ):
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError(
                "no process group: run %dist_init, or torch.distributed.init_process_group"
            )
        if earlier := _wrapper_of.get(model):
            if earlier() is not None:
                earlier().remove()
        _wrapper_of[model] = weakref.ref(self)
        self.module = model
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.broadcast_buffers = broadcast_buffers
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._buffer_names = list(saved_buffers(model))
        self._synchronise = True
        check_same_structure(model, process_group)
        if broadcast_parameters:
            broadcast_from_rank0([*model.parameters(), *saved_buffers(model).values()], process_group)
        else:
            check_same_values(model, process_group)

    def forward(self, *args, **kwargs):
        if self.training and self.broadcast_buffers and self._synchronise:
            buffers = [self.module.get_buffer(name) for name in self._buffer_names]
            broadcast_from_rank0(buffers, self.process_group)
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
            dist.all_reduce(used, group=self.process_group)  # on how many ranks, for each parameter
            # What is used here is used somewhere: no need to read the answer back from the device.
            used = used_here if all(used_here) else used.tolist()
            for p, used_somewhere in zip(params, used, strict=True):
                if used_somewhere:
                    flat = dense(torch.zeros_like(p) if p.grad is None else p.grad, self._names[p])
                    flat.div_(self.world_size)  # first: the sum may be too large for fp16
                    dist.all_reduce(flat, group=self.process_group)
                    p.grad = flat.view(p.shape)

    def remove(self) -> None:
        """Leave the model as it was: no hook of this wrapper is left on it."""
        if (wrapper := _wrapper_of.get(self.module)) and wrapper() is self:
            del _wrapper_of[self.module]

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
    on its way its gradients live only there. With `no_sync()` around the first micro-batches, the last
    one reduces the sum.
    """

    bucket_cap_mb = 0  # a bucket is full with its first parameter

    def __init__(self, model: nn.Module, **kwargs):
        super().__init__(model, **kwargs)
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._names]
        self._arrived: list[Tensor] | None = []  # in the first step; then None
        self._use(self._plan(list(self._names)))

    def _plan(self, params: list[Tensor]) -> list["Bucket"]:
        return plan_buckets(params, self.bucket_cap_mb * 1024 * 1024)

    def _use(self, buckets: Sequence["Bucket"]) -> None:
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
        if torch.is_grad_enabled():
            if any(bucket.ready for bucket in self.buckets):
                raise RuntimeError(
                    "forward before the gradients of the last backward were finished; "
                    "call wait_for_gradients() first"
                )
            self._open = True
        return super().forward(*args, **kwargs)

    def _on_gradient(self, param: Tensor) -> None:
        if not self._synchronise:
            return
        bucket = self._bucket_of[param]
        if param in bucket.ready:
            raise RuntimeError(
                f"a second gradient for {self._names[param]} before wait_for_gradients(); "
                "put all but the last backward under no_sync()"
            )
        if not self._open:  # setting an attribute of a Module costs more than a look
            self._open = True
        bucket.ready.add(param)
        if self._arrived is not None:
            self._arrived.append(param)
        while self._num_launched < len(self.buckets) and self.buckets[self._num_launched].is_full:
            self._launch(self.buckets[self._num_launched])

    @torch.no_grad()
    def _launch(self, bucket: "Bucket") -> None:
        with phase("launch", bucket.index):
            self._num_launched += 1
            bucket.pack(self._names, self.world_size)
            bucket.work = dist.all_reduce(bucket.flat, group=self.process_group, async_op=True)

    def _finish(self, bucket: "Bucket") -> None:
        with phase("wait", bucket.index):
            self._num_finished += 1
            bucket.work.wait()
            bucket.unpack()

    def _launch_remaining(self) -> None:
        """Launch every bucket that is not full yet: some gradient of it never came on this rank."""
        while self._open and self._num_launched < len(self.buckets):
            self._launch(self.buckets[self._num_launched])

    def wait_for_gradients(self) -> None:
        """Afterwards every `p.grad` is the mean over the ranks, or None where no rank had any."""
        if self._open:
            self._check_trainable()
        self._launch_remaining()
        for bucket in self.buckets[self._num_finished : self._num_launched]:
            self._finish(bucket)
        first = self._num_launched > 0 and self._arrived is not None
        self._begin_step()
        if first:
            self._plan_by_arrival()

    @contextmanager
    def no_sync(self):
        """Only accumulate in here: for every micro-batch of a step but the last."""
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = True

    def remove(self) -> None:
        super().remove()
        for hook in self._hooks:
            hook.remove()


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
        self._launch_remaining()


@dataclass(eq=False)
class Bucket:
    """Gradients that travel together, in one flat tensor of shape (sum of numel + len(params),).

    They are divided by world_size on their way in, so that their sum is the mean, and is as small (torch's
    DDP does the same). The last elements are flags: 1 for each parameter that got a gradient here, 0 for
    zeros sent in its place. So after the all-reduce a flag says on how many ranks.
    """

    index: int
    params: list[Tensor]
    ready: set[Tensor] = field(default_factory=set)  # gradients that backward has delivered
    flat: Tensor | None = None
    work: dist.Work | None = None

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.params)

    def pack(self, names: dict[Tensor, str], world_size: int) -> None:
        """Move the gradients into `flat`, divided by `world_size`; afterwards they live nowhere else."""
        self.ready.update(self.params)
        announce("grads", [p.grad for p in self.params if p.grad is not None])
        self.used_here = [p.grad is not None for p in self.params]
        self.flat = self.params[0].new_empty(sum(p.numel() for p in self.params) + len(self.params))
        announce("buckets", [self.flat])
        *rows, flags = self._split()
        flags.fill_(1)
        for i, (p, row) in enumerate(zip(self.params, rows, strict=True)):
            if p.grad is None:
                row.zero_()
                flags[i] = 0
            else:
                torch.div(dense(p.grad, names[p]), world_size, out=row)
                p.grad = None

    def unpack(self) -> None:
        """Hand each gradient back as a view of `flat`."""
        *rows, flags = self._split()
        # What is used here is used somewhere: no need to read the flags back from the device.
        used = self.used_here if all(self.used_here) else flags.tolist()
        for p, row, used_somewhere in zip(self.params, rows, used, strict=True):
            p.grad = row.view(p.shape) if used_somewhere else None
        self.flat = self.work = None

    def _split(self) -> Sequence[Tensor]:
        return self.flat.split_with_sizes([*(p.numel() for p in self.params), len(self.params)])


def plan_buckets(params: Sequence[Tensor], cap_bytes: float) -> list[Bucket]:
    """The buckets of `partition.in_buckets`, about `cap_bytes` each, the last of `params` first."""
    return [
        Bucket(i, [params[j] for j in group])
        for i, group in enumerate(in_buckets(params, cap_bytes))
    ]


def dense(grad: Tensor, name: str) -> Tensor:
    """A gradient as one row: a view where its layout allows, a copy where not (channels-last)."""
    if grad.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name} is sparse; use a dense layer (Embedding(sparse=False))"
        )
    return grad.reshape(-1)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds, by name; the others (rotary frequencies) are constants."""
    names = model.state_dict(keep_vars=True)
    return {name: b for name, b in model.named_buffers() if name in names}


@torch.no_grad()
def broadcast_from_rank0(tensors: Sequence[Tensor], process_group=None) -> None:
    for t in tensors:
        broadcast(t, 0, process_group)


def broadcast(t: Tensor, owner: int, process_group=None) -> None:
    """In place, whatever the layout: collectives take only contiguous tensors."""
    flat = t.detach().reshape(-1)
    dist.broadcast(flat, group=process_group, group_src=owner)
    if flat.data_ptr() != t.data_ptr():
        t.copy_(flat.view(t.shape))


def check_same_structure(model: nn.Module, process_group=None) -> None:
    """Raise ValueError on every rank unless names, shapes, strides, dtypes and frozen parts are equal."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = repr([(n, tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for n, t in tensors])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    device = tensors[0][1].device if tensors else "cpu"
    highest = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=process_group)
    if highest[0] != -highest[1]:
        raise ValueError(
            "the model is not the same on all ranks: names, shapes, strides, dtypes or frozen parameters "
            "differ"
        )


@torch.no_grad()
def check_same_values(model: nn.Module, process_group=None) -> None:
    """Raise ValueError on every rank unless all hold rank 0's bits; names the first that differs."""
    tensors = [*model.named_parameters(), *saved_buffers(model).items()]
    if not tensors:
        return
    differs = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0][1].device)
    for i, (_, t) in enumerate(tensors):
        mine = t.detach().reshape(-1)
        rank0 = mine.clone()
        dist.broadcast(rank0, group=process_group, group_src=0)
        differs[i] = int(not torch.equal(mine.view(torch.uint8), rank0.view(torch.uint8)))
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=process_group)
    if differs.any():
        name = tensors[int(differs.nonzero()[0])][0]
        raise ValueError(
            f"Model parameters are not synced across ranks: {name} differs. Use set_seed before "
            "the model is made, or pass broadcast_parameters=True"
        )
