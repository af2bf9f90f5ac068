"""Where gradients are while they travel: a bucket of them, and what stands in `p.grad` meanwhile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack
from torch.utils.weak import WeakIdKeyDictionary

from zero1_helpers.collectives import wait
from zero1_helpers.partition import in_buckets
from zero1_helpers.phases import announce
from zero1_helpers.streams import keep


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
    taken: dict[Tensor, "TakenGradient"] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.params)

    def pack(self, names: dict[Tensor, str], world_size: int) -> None:
        """Move the gradients into `flat`, divided by `world_size`; afterwards they live nowhere else."""
        self.ready.update(self.params)
        if not self.taken:
            self.taken = {p: TakenGradient(p, names[p]) for p in self.params}
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
        self.hold(p for p, used in zip(self.params, self.used_here, strict=True) if used)

    def hold(self, params: Iterable[Tensor]) -> None:
        """Whoever reads these gradients now gets an error."""
        for p in params:
            p.grad = self.taken[p]

    def unpack(self) -> None:
        """Wait, and hand each gradient back as a view of `flat`."""
        wait(self.work)
        *rows, flags = self._split()
        # What is used here is used somewhere: no need to read the flags back from the device.
        used = self.used_here if all(self.used_here) else flags.tolist()
        for p, row, used_somewhere in zip(self.params, rows, used, strict=True):
            p.grad = row.view(p.shape) if used_somewhere else None
        self.flat = self.work = None

    def _split(self) -> Sequence[Tensor]:
        return self.flat.split_with_sizes([*(p.numel() for p in self.params), len(self.params)])


is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
_homes = WeakIdKeyDictionary()  # parameter -> the flat tensor that it was settled in


def settle(p: Tensor, place: Tensor, flat: Tensor) -> None:
    """Move p to `place`, a view of `flat` with p's shape.

    As a storage of its own, with these bytes and no more: `torch.save` writes the whole storage of a
    tensor, and would write all of `flat` for one small layer.
    """
    if p.numel():
        place.copy_(p.detach())
        keep([p])  # its old memory is not given away before it is copied
        p.data = from_dlpack(to_dlpack(place))
        _homes[p] = flat


def home(p: Tensor) -> Tensor:
    """The flat tensor that p still lies in, or p itself."""
    flat = _homes.get(p)
    if flat is None or not 0 <= p.data_ptr() - flat.data_ptr() < max(1, flat.nbytes):
        return p
    return flat


def lies_at(p: Tensor, flat: Tensor, offset: int) -> bool:
    """Does p begin at this element of `flat`? What has no elements is anywhere."""
    return not p.numel() or p.data_ptr() == flat.data_ptr() + offset * flat.itemsize


def as_flat(params: Sequence[Tensor]) -> Tensor:
    """The memory of parameters of one dtype, as one flat tensor of shape (sum of numel,).

    They fill it end to end, each with its own strides. If they do not yet, they are moved there. So
    nothing has to be packed or unpacked, and no buffer is needed (as in torch's ZeroRedundancyOptimizer
    with `parameters_as_bucket_view`). While they are moved they exist twice.
    """
    *offsets, numel = accumulate((p.numel() for p in params), initial=0)
    if (
        len(params) == 1
        and is_dense(params[0])
        and params[0].untyped_storage().nbytes() == params[0].nbytes
    ):
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


class TakenGradient(Tensor):
    """Stands in `p.grad` from the moment a bucket takes the gradient until the step is over.

    It holds no memory. Code that would go on with `None` as if there were nothing to do, such as
    `torch.nn.utils.clip_grad_norm_` or GradScaler, gets an error that names the way out.
    """

    @staticmethod
    def __new__(cls, p: Tensor, name: str):
        size, stride = p.shape, p.stride()
        self = Tensor._make_wrapper_subclass(cls, size, stride, dtype=p.dtype, device=p.device)
        self.of = name
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # shapes and the like are as p's

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else [a])]
        name = next((t.of for t in tensors if isinstance(t, cls)), "a parameter")
        if func is torch.ops.aten.add_.Tensor:  # autograd accumulates
            raise RuntimeError(
                f"a second gradient for {name} before the step is over; put all but the last backward under "
                "no_sync(), and call wait_for_gradients() and what follows it before the next one"
            )
        raise RuntimeError(
            f"the gradient of {name} is in a bucket: it is being averaged, or is stepped already. To clip or "
            "unscale, call wait_for_gradients() first, on a wrapper with step_in_backward=False if it has "
            "that option, and then clip.clip_grad_norm_ or clip.scaler_step of zero1_helpers"
        )

    def __repr__(self):
        return f"TakenGradient({self.of})"


def drop_taken(params: Iterable[Tensor]) -> None:
    for p in params:
        if type(p.grad) is TakenGradient:
            p.grad = None
