"""ZeRO-1 as production systems run it: flat buckets, reduce-scatter, all-gather. 2Ψ sent instead of 3Ψ.

All-reduce is a reduce-scatter and an all-gather. `zero` sends all gradients to all ranks by one, then the
new parameters by a broadcast: 3Ψ. But a rank needs only the gradients of what it steps, and between
the two halves of an all-reduce there is room for the step. So here, for each bucket::

    backward ─ collect ─► grads (n,) ─ reduce-scatter ─► mine (n / world_size,)
    mine ─ step ─► this rank's slice of weights ─ all-gather ─► weights (n,)

and there is nothing left to broadcast. A bucket is one flat tensor, cut in world_size equal slices, and
every rank owns a slice of every bucket: shards are equal whatever the shapes. After DeepSpeed's ZeRO-1
(Rajbhandari et al., 2020) and Megatron-LM's distributed optimizer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .ddp import SimpleDDPBucket, dense
from .memory_math import is_counter
from .partition import Flat, pieces_of, slice_width
from .phases import announce, phase
from .zero import instead, on_stream

# torch 2.13 gave them new names and warns about the old ones, which alone exist before.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SimpleDDPReduceScatter(SimpleDDPBucket):
    """Reduce-scatter, step and all-gather run behind the backward pass, bucket by bucket.

    One step::

        backward             _on_gradient: the bucket collects the gradient, which is free from then on
                             bucket k is full: _launch its reduce-scatter, then _finish bucket k - lag:
                             wait, divide, step the slice owned here, launch the all-gather
        flush_bucket         launch the buckets that backward left unfilled
        wait_for_gradients   _finish the buckets that are left
        optimizer.step()     all of this that is not done yet, then wait for the parameters

    Buckets and their flat weights are the optimizer's. The order of collectives is the order of the
    buckets and nothing else. `wait_for_broadcasts()` waits for the parameters, too: the loop of
    SimpleDDPBucketAsync runs unchanged. With `step_in_backward=False` all steps are made by
    `optimizer.step()`: for clipping by the global norm, for GradScaler, and for a model in which
    backward reads a parameter whose own gradient is complete (autograd raises otherwise).
    With `lazy_gather=True` the all-gathers start when all is stepped, in the order in which forward
    needs them, and run behind the next forward; what reads a parameter waits for it, see `Arriving`.
    """

    def __init__(self, model, zero1_optimizer: "FlatShardedOptimizer", *, lag: int = 1,
                 step_in_backward: bool = True, lazy_gather: bool = False, **kwargs):  # fmt: skip
        if lag < 0:
            raise ValueError(f"lag is a number of buckets, 0 or more, not {lag}")
        self.zero1_optimizer, self.lag = zero1_optimizer, lag
        self.step_in_backward, self.lazy_gather = step_in_backward, lazy_gather
        kwargs.setdefault("process_group", zero1_optimizer.process_group)
        super().__init__(model, zero1_optimizer.partition.bucket_cap_mb, **kwargs)
        self._arrived = None  # weights lie in the order of the first plan, and stay there
        self._side_stream = torch.cuda.Stream() if any(p.is_cuda for p in self._names) else None
        check_negative_zero(self.buckets, self.process_group)
        zero1_optimizer.wrapper = self

    def _plan(self, params: list[Tensor]) -> list["FlatBucket"]:
        held = {p for bucket in self.zero1_optimizer.buckets for p in bucket.params}
        for p, name in self._names.items():
            if p not in held:
                raise ValueError(
                    f"parameter {name} is not in the optimizer; make it from the same model"
                )
        if held - set(self._names):
            raise ValueError("the optimizer has a parameter that is not in the model, or is frozen")
        return self.zero1_optimizer.buckets

    def forward(self, *args, **kwargs):
        if any(
            b.mine is not None or b.is_ahead or (b.gather and not self.lazy_gather) for b in self.buckets
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
    def _launch(self, bucket: "FlatBucket") -> None:
        with phase("launch", bucket.index):
            self._num_launched += 1
            bucket.send_gradients(self._names, self.process_group)
        if bucket.index >= self.lag:
            self._finish(self.buckets[bucket.index - self.lag])

    @torch.no_grad()
    def _finish(self, bucket: "FlatBucket") -> None:
        with on_stream(self._side_stream, keep=bucket.mine):
            with phase("wait", bucket.index):
                self._num_finished += 1
                bucket.receive_gradients(self.world_size)
            if self.step_in_backward:
                self._step(bucket)

    def _step(self, bucket: "FlatBucket") -> None:
        self.zero1_optimizer.step_bucket(bucket)
        if not self.lazy_gather:
            self.zero1_optimizer.gather_bucket(bucket)

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
        with on_stream(self._side_stream), phase("receive"):
            if self.lazy_gather:
                for bucket in reversed(self.buckets):
                    if bucket.is_ahead:
                        self.zero1_optimizer.gather_bucket(bucket)
                        bucket.guard()
            else:
                self.zero1_optimizer.receive()
        if self._side_stream is not None and not self.lazy_gather:
            torch.cuda.current_stream().wait_stream(self._side_stream)

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
    """

    def __init__(
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        model: nn.Module | Iterable,
        bucket_cap_mb: float = 25,
        *,
        first_bucket_mb: float = 1,
        process_group=None,
        **optimizer_kwargs,
    ):
        if bucket_cap_mb < 0 or first_bucket_mb < 0:
            raise ValueError(f"bucket_cap_mb is a size in MiB, 0 or more, not {bucket_cap_mb}")
        check_elementwise(optimizer_cls, optimizer_kwargs)
        optimizer_kwargs = fastest_kernels(optimizer_cls, optimizer_kwargs)
        params = model.parameters() if isinstance(model, nn.Module) else model
        self.optimizer = optimizer_cls(params, **optimizer_kwargs)
        self.partition = Flat(bucket_cap_mb, first_bucket_mb)
        self.process_group, self.wrapper = process_group, None
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.buckets: list[FlatBucket] = []
        self._plan_new_parameters()

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def _plan_new_parameters(self) -> None:
        planned = {p for bucket in self.buckets for p in bucket.params}
        new = [p for p in self.params if p.requires_grad and p not in planned]
        if len(devices := {str(p.device) for p in self.params}) > 1:
            raise ValueError(f"parameters are on several devices: {', '.join(sorted(devices))}")
        for group in self.partition.buckets(new):
            params, index = [new[i] for i in group], len(self.buckets)
            self.buckets.append(FlatBucket.of(params, index, self.rank, self.world_size))

    def add_param_group(self, param_group: dict) -> None:
        """New parameters get new buckets; wrap the model again, for the wrapper to watch them."""
        super().add_param_group(param_group)
        if hasattr(self, "buckets"):  # not while the first groups are being added
            self._plan_new_parameters()

    @torch.no_grad()
    def step_bucket(self, bucket: "FlatBucket") -> None:
        with phase("step", bucket.index):
            bucket.receive_parameters()  # of the step before, if nothing has read them since
            bucket.hand_out_gradients()
            with instead(self.optimizer, bucket.pieces_with_grad()):
                self.optimizer.step()
            bucket.free_gradients()

    def gather_bucket(self, bucket: "FlatBucket") -> None:
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
            raise RuntimeError("gradients come from SimpleDDPReduceScatter(model, optimizer); wrap the model")
        self.wrapper.wait_for_gradients()
        self.wrapper.step_remaining()
        self.wrapper.wait_for_broadcasts()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drop what has been reduced and not been stepped."""
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
        """Take a whole optimizer's state, on every rank; each keeps that of its own pieces."""
        kernels = [{k: g[k] for k in ("fused", "foreach") if k in g} for g in self.param_groups]
        self.optimizer.load_state_dict(state_dict | {"state": {}})
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        for group, kernel in zip(self.param_groups, kernels, strict=True):
            group.update(kernel)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        entries = {p: state_dict["state"].get(i, {}) for i, p in zip(ids, self.params, strict=True)}
        for bucket in self.buckets:
            for p, piece in bucket.pieces.items():
                if entries.get(p):
                    self.state[piece] = {k: bucket.cut(p, k, v) for k, v in entries[p].items()}

    def strides(self, p: Tensor) -> tuple[int, ...]:
        """Those of the view that p is of its bucket."""
        return next(bucket.views[p][1] for bucket in self.buckets if p in bucket.views)


@dataclass(eq=False)
class FlatBucket:
    """Parameters laid end to end, padded to a multiple of world_size; of each slice, one rank's.

    `weights` is (world_size * width,), and every parameter a view of it, with its own strides.
    `pieces` are parameters, too: views of this rank's slice, 1-D. During a step `grads` has the shape
    of `weights`, and `mine` that of a slice.

    Which parameters got no gradient anywhere? No flags travel. A rank without a gradient sends -0.0,
    since x + -0.0 is x, and one with a gradient sends no -0.0. So -0.0 arrives if all sent it, and only
    then.
    """

    index: int
    params: list[Tensor]
    views: dict[Tensor, tuple]  # parameter -> (size, stride, offset) in weights
    weights: Tensor
    slice: slice  # this rank's part of weights
    pieces: dict[Tensor, nn.Parameter]  # parameter -> its piece here, if any
    piece_offsets: dict[Tensor, int]  # in the slice
    ready: set[Tensor] = field(default_factory=set)  # gradients that backward has delivered
    missing: set[Tensor] = field(default_factory=set)  # parameters that got no gradient: here, then anywhere
    grads: Tensor | None = None
    mine: Tensor | None = None
    work: dist.Work | None = None  # the reduce-scatter
    is_ahead: bool = False  # this rank's slice is stepped, and the others do not know
    gather: dist.Work | None = None  # the all-gather

    @classmethod
    def of(cls, params: list[Tensor], index: int, rank: int, world_size: int) -> "FlatBucket":
        sizes = [p.numel() for p in params]
        width = slice_width(sizes, world_size)
        weights = params[0].new_zeros(world_size * width)
        here = slice(rank * width, (rank + 1) * width)
        views, offset = {}, 0
        for p in params:
            views[p] = (p.shape, torch.empty_like(p, device="meta").stride(), offset)  # dense, in p's order
            weights.as_strided(*views[p]).copy_(p)
            p.data = weights.as_strided(*views[p])
            offset += p.numel()
        pieces, piece_offsets = {}, {}
        for i, (start, end) in pieces_of(sizes, rank, world_size).items():
            begin = views[params[i]][2]
            pieces[params[i]] = nn.Parameter(weights[begin + start : begin + end])
            piece_offsets[params[i]] = begin + start - here.start
        return cls(index, params, views, weights, here, pieces, piece_offsets)

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.params)

    def cut(self, p: Tensor, key: str, value):
        """This rank's part of what is one number per element of p; a copy of anything else."""
        if is_counter(key) or not isinstance(value, Tensor) or value.shape != p.shape:
            return value.clone() if isinstance(value, Tensor) else value
        size, stride, offset = self.views[p]
        if value.stride() != stride:
            value = torch.empty_strided(size, stride, dtype=value.dtype).copy_(value)
        start = self.slice.start + self.piece_offsets[p] - offset
        piece = value.as_strided((p.numel(),), (1,), value.storage_offset())
        return piece[start : start + self.pieces[p].numel()].to(self.weights.device, p.dtype, copy=True)

    # Gradients

    @torch.no_grad()
    def collect(self, p: Tensor, name: str) -> None:
        """Take over p.grad. A bucket of one parameter is its gradient, if the layout is the same."""
        if p.data_ptr() != self.weights.as_strided(*self.views[p]).data_ptr():
            raise RuntimeError(
                f"{name} has left the optimizer's flat buffer (the model was moved, or wrapped for "
                "another optimizer); make the optimizer again, and then the wrapper"
            )
        grad, p.grad = p.grad, None
        if grad.layout != torch.strided:
            dense(grad, name)  # raises
        size, stride, offset = self.views[p]
        if self.weights.shape[0] == grad.numel() and grad.stride() == stride:
            self.grads = grad.as_strided(self.weights.shape, (1,)).add_(0.0)
        else:
            self._make_room()
            torch.add(grad, 0.0, out=self.grads.as_strided(size, stride, offset))  # + 0.0: no -0.0 is left

    def _make_room(self) -> None:
        if self.grads is None:
            self.grads = torch.empty_like(self.weights)
            self.grads[sum(p.numel() for p in self.params) :] = 0
            announce("buckets", [self.grads])

    def send_gradients(self, names: dict[Tensor, str], process_group) -> None:
        for p in self.params:
            if p not in self.ready and p.grad is not None:  # of an earlier micro-batch
                self.collect(p, names[p])
                self.ready.add(p)
        self.missing = set(self.params) - self.ready
        for p in self.missing:
            self._make_room()
            self.grads.as_strided(*self.views[p]).fill_(-0.0)
        self.ready.update(self.params)
        self.mine = self.weights.new_empty(self.slice.stop - self.slice.start)
        announce("buckets", [self.mine])
        self.work = reduce_scatter(self.mine, self.grads, group=process_group, async_op=True)

    def receive_gradients(self, world_size: int) -> None:
        """Afterwards `mine` is the mean of this rank's slice."""
        self.work.wait()
        self.grads = self.work = None
        self.missing = {p for p in self.missing if p in self.pieces and is_negative_zero(self._grad_of(p))}
        self.mine.div_(world_size)

    def _grad_of(self, p: Tensor) -> Tensor:
        return self.mine.narrow(0, self.piece_offsets[p], self.pieces[p].numel())

    def hand_out_gradients(self) -> None:
        for p, piece in self.pieces.items():
            piece.grad = None if p in self.missing else self._grad_of(p)

    def pieces_with_grad(self) -> dict[Tensor, nn.Parameter]:
        return {p: piece for p, piece in self.pieces.items() if piece.grad is not None}

    def free_gradients(self) -> None:
        for piece in self.pieces.values():
            piece.grad = None
        self.mine, self.is_ahead = None, True
        torch.autograd.graph.increment_version(self.params)  # backward that still needs the old ones raises

    # Parameters

    def send_parameters(self, process_group) -> None:
        self.is_ahead = False
        self.gather = all_gather(self.weights, self.weights[self.slice], group=process_group, async_op=True)

    def receive_parameters(self) -> None:
        if self.gather is not None:
            self.gather.wait()
            self.gather = None
            for p in self.params:
                if type(p) is Arriving:
                    p.__class__ = nn.Parameter
                    del p.arrives_in

    def guard(self) -> None:
        """Whatever reads one of these parameters waits for them, from here on."""
        if any(type(p) not in (nn.Parameter, Arriving) for p in self.params):
            return self.receive_parameters()  # of a class of its own: cannot be guarded
        for p in self.params:
            p.__class__ = Arriving
            p.arrives_in = self


class Arriving(nn.Parameter):
    """A parameter whose new value is on its way. Whatever reads it waits for it: any function of torch, in
    any module's forward or outside of all, since all of them ask an argument of a class of its own first.

    A parameter is of this class from the end of a step until it is read. What only asks for its shape
    or the like does not wait. An alias made before (`w = p.data`) is not watched.
    """

    arrives_in: FlatBucket

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for t in tree_leaves((args, kwargs)):
            if type(t) is Arriving:
                t.arrives_in.receive_parameters()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo):
        return self._arrived().__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        return self._arrived().__reduce_ex__(protocol)

    def _arrived(self) -> nn.Parameter:
        self.arrives_in.receive_parameters()
        return self


METADATA = {getattr(torch.Tensor, name).__get__ for name in (
    "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_sparse", "is_leaf", "is_meta",
    "requires_grad", "grad", "grad_fn", "itemsize", "nbytes")} | {getattr(torch.Tensor, name) for name in (
    "size", "stride", "dim", "numel", "element_size", "nelement", "is_floating_point", "is_complex",
    "untyped_storage", "data_ptr", "is_contiguous", "storage_offset")}  # fmt: skip


def is_negative_zero(t: Tensor) -> bool:
    return bool(((t == 0) & torch.signbit(t)).all())


@torch.no_grad()
def check_negative_zero(buckets: list[FlatBucket], process_group) -> None:
    """Does this group's reduce-scatter keep -0.0? Sums that begin with +0.0 would not."""
    for kind in {bucket.weights.dtype: bucket.weights for bucket in buckets}.values():
        mine, sent = kind.new_empty(1), kind.new_full((dist.get_world_size(process_group),), -0.0)
        reduce_scatter(mine, sent, group=process_group)
        if not is_negative_zero(mine):
            raise RuntimeError(
                f"the sum of -0.0 over the ranks is {mine.item()} on this backend, so it cannot be told "
                "which parameters got no gradient"
            )


@torch.no_grad()
def check_elementwise(optimizer_cls: type[torch.optim.Optimizer], kwargs: dict) -> None:
    """Raise ValueError if a matrix, stepped whole, is not what its flat halves become, stepped apart."""
    whole = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
    halves = [nn.Parameter(half.clone()) for half in whole.detach().flatten().split(2)]
    grad = torch.tensor([[0.1, -0.3], [0.5, 0.2]])
    try:
        for params, grads in (([whole], [grad]), (halves, grad.flatten().split(2))):
            optimizer = optimizer_cls(params, **kwargs)
            for _ in range(2):
                for p, g in zip(params, grads, strict=True):
                    p.grad = g.clone()
                optimizer.step()
        if torch.allclose(whole.flatten(), torch.cat(halves)):
            return
    except Exception as error:
        raise ValueError(f"{optimizer_cls.__name__} cannot step pieces of parameters: {error}") from error
    raise ValueError(
        f"{optimizer_cls.__name__} does not work element by element, so pieces of a parameter cannot be "
        "stepped apart; use ZeROOne, which shards whole parameters"
    )


def fastest_kernels(optimizer_cls: type[torch.optim.Optimizer], kwargs: dict) -> dict:
    """kwargs, with fused=True where all devices have such a kernel; what the caller chose is kept."""
    if {"fused", "foreach", "capturable", "differentiable"} & set(kwargs):
        return kwargs
    fused = optimizer_cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return kwargs | ({"fused": True} if fused else {})


def is_compiled(model: nn.Module) -> bool:
    return any(
        isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None
        for m in model.modules()
    )
