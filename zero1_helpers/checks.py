"""What must be true before the first step, and raises on every rank in one line that names the tensor if not.

Tensors are of a kind that can be sent, they are equal on all ranks, and one wrapper watches each.
"""

import hashlib
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from zero1_helpers.collectives import all_take_part

CHUNK = 2**20  # elements that a checksum is made of at a time
SENT_AS_THEY_ARE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}

TORN = (
    "the last backward did not come to its end, so this step is torn: some gradients are on their way or "
    "stepped, others never came. Load a checkpoint, or call abandon_step() on every rank"
)
FORWARD_TOO_EARLY = (
    "forward before the gradients of the last backward were finished; call wait_for_gradients() first, if "
    "that backward was this model's own. If another model's loss went through this one (a generator's), run "
    "that backward under this wrapper's no_sync() and drop its gradients by zero_grad()"
)


# One tensor


def check_plain(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError unless all of them have values of their own, here, in ordinary memory."""
    for name, t in tensors:
        if isinstance(t, UninitializedTensorMixin):
            why = "has no shape yet, its module is lazy; run one forward first"
        elif is_traceable_wrapper_subclass(t):
            why = (
                f"is a {type(t).__name__}; these classes shard plain tensors, so leave it to what made it "
                "(FSDP2, tensor parallelism)"
            )
        elif t.is_meta:
            why = "is on the meta device and has no values; use model.to_empty(device=...) and fill it first"
        elif t.layout != torch.strided:
            why = "is sparse; make it dense"
        else:
            continue
        raise ValueError(f"{name} {why}")


def check_model(model: nn.Module, wrapper_class: type) -> None:
    """Raise ValueError unless a model can be wrapped, RuntimeError if there are no ranks yet."""
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: run %dist_init, or torch.distributed.init_process_group"
        )
    for name, part in model.named_modules():
        if isinstance(part, wrapper_class | nn.parallel.DistributedDataParallel):
            which = f"{name} of the model" if name else "the model"
            raise ValueError(f"{which} is a {type(part).__name__} already; wrap its .module")
    check_plain([*model.named_parameters(), *model.named_buffers()])


def check_parameters(params: Sequence[Tensor]) -> None:
    """Raise ValueError unless an optimizer's parameters can be sharded."""
    if len(devices := {str(p.device) for p in params}) > 1:
        raise ValueError(f"parameters are on several devices: {', '.join(sorted(devices))}")
    check_plain((f"parameter {i} of the optimizer", p) for i, p in enumerate(params))


def checksum(t: Tensor) -> Tensor:
    """A number of 62 bits for a tensor's bits: the sum of its bytes, each times a factor of its place."""
    sums = torch.zeros((), dtype=torch.int64, device=t.device)
    flat = t.detach().reshape(-1)
    for a in range(0, flat.numel(), CHUNK):
        data = flat[a : a + CHUNK].contiguous().view(torch.uint8).long() + 1
        places = torch.arange(a, a + data.numel(), device=t.device)
        sums = (
            sums * 1_000_003 + (data * ((places * 2_654_435_761) % 2_147_483_647)).sum()
        ) % 2**61
    return sums


# The same on all ranks


def as_sent(flat: Tensor) -> Tensor:
    """A row as backends take it: its bytes if they do not know the dtype (int16, uint16, fp8, complex)."""
    return flat if flat.dtype in SENT_AS_THEY_ARE else flat.view(torch.uint8)


@torch.no_grad()
def broadcast_from_rank0(tensors: Sequence[Tensor], process_group=None) -> None:
    for t in tensors:
        broadcast(t, 0, process_group)


def broadcast(t: Tensor, owner: int, process_group=None) -> None:
    """In place, whatever the layout: collectives take only contiguous tensors."""
    own = t.detach()
    if 0 in own.stride():  # expand()ed: many elements that are one, which is sent once
        own = own[tuple(slice(0, 1) if s == 0 else slice(None) for s in own.stride())]
    flat = own.reshape(-1)
    with all_take_part():
        dist.broadcast(as_sent(flat), group=process_group, group_src=owner)
    if flat.data_ptr() != own.data_ptr():
        own.copy_(flat.view(own.shape))


def check_same_structure(model: nn.Module, process_group=None) -> None:
    """Raise ValueError on every rank unless names, shapes, strides, dtypes and frozen parts are equal."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = repr(
        [(n, tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for n, t in tensors]
    )
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
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if not tensors:
        return
    differs = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0][1].device)
    for i, (_, t) in enumerate(tensors):
        mine = t.detach().reshape(-1)
        rank0 = mine.clone()
        broadcast(rank0, 0, process_group)
        differs[i] = int(not torch.equal(mine.view(torch.uint8), rank0.view(torch.uint8)))
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=process_group)
    if differs.any():
        name = tensors[int(differs.nonzero()[0])][0]
        raise ValueError(
            f"Model parameters are not synced across ranks: {name} differs. Use set_seed before "
            "the model is made, or pass broadcast_parameters=True"
        )


def start_equal(model: nn.Module, process_group, broadcast_parameters: bool) -> None:
    """The same model on all ranks, with the same values or, if asked for, rank 0's."""
    check_same_structure(model, process_group)
    if broadcast_parameters:
        broadcast_from_rank0([*model.parameters(), *model.buffers()], process_group)
    else:
        check_same_values(model, process_group)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds, by name; the others (rotary frequencies) are constants."""
    names = model.state_dict(keep_vars=True)
    return {name: b for name, b in model.named_buffers() if name in names}


def members(process_group) -> set[int]:
    """The ranks of a group, as the default group counts them."""
    return set(dist.get_process_group_ranks(process_group or dist.group.WORLD))


# One wrapper for each parameter

_watchers = (
    WeakIdKeyDictionary()
)  # parameter -> weak references to the wrappers that average its gradient


def watchers_of(p: Tensor) -> list:
    return [w for ref in _watchers.get(p, ()) if (w := ref()) is not None]


def check_covered(names: dict[Tensor, str], optimizer_params: Sequence[Tensor]) -> None:
    """Raise ValueError unless a wrapper's model and its optimizer have the same trainable parameters."""
    held = set(optimizer_params)
    for p, name in names.items():
        if p not in held:
            raise ValueError(
                f"parameter {name} is not in the optimizer; make it from the same model"
            )
    for i, p in enumerate(optimizer_params):
        if p.requires_grad and p not in names:
            raise ValueError(
                f"parameter {i} of the optimizer, of shape {tuple(p.shape)}, is not in the model, so nobody "
                "would average its gradient; wrap one module that holds all of them"
            )


def check_pair(model: nn.Module, group, in_buckets: Sequence[Tensor], optimizers_group) -> None:
    """Raise ValueError unless a wrapper and a flat optimizer are made for each other."""
    if members(group) != members(optimizers_group):
        raise ValueError("the wrapper and its optimizer are given different process groups")
    check_covered(trainable(model), in_buckets)
    held = set(in_buckets)
    for name, p in model.named_parameters():
        if p in held and not p.requires_grad:
            raise ValueError(
                f"parameter {name} is in a bucket and frozen; make the optimizer again"
            )


def check_real(params: Sequence[Tensor]) -> None:
    for i, p in enumerate(params):
        if p.is_complex() and p.requires_grad:
            raise ValueError(
                f"parameter {i} of the optimizer is complex, and a flat bucket sends real numbers; use "
                "ZeROOne or ShardedOptimizer"
            )


def trainable(model: nn.Module) -> dict[Tensor, str]:
    return {p: name for name, p in model.named_parameters() if p.requires_grad}


def watch(wrapper, names: dict[Tensor, str]) -> None:
    """From here on `wrapper` averages these gradients. An earlier wrapper of the same model is removed.

    Hooks of two wrappers on one parameter would take its gradient from each other: ValueError, if they
    overlap in some parameters only.
    """
    earlier = {id(w): w for p in names for w in watchers_of(p)}.values()
    for other in earlier:
        same = set(map(id, other._names)) == set(map(id, names))
        if same or other.module is wrapper.module:
            other.remove()
        elif wrapper.has_hooks or other.has_hooks:
            name = next(name for p, name in names.items() if other in watchers_of(p))
            raise ValueError(
                f"parameter {name} is watched by another wrapper ({type(other).__name__}) already; wrap one "
                "module that holds both, such as nn.ModuleList, or call remove() on the other wrapper first"
            )
    for p in names:
        _watchers[p] = [
            *(ref for ref in _watchers.get(p, ()) if ref() is not None),
            weakref.ref(wrapper),
        ]


def unwatch(wrapper) -> None:
    for p in wrapper._names:
        _watchers[p] = [ref for ref in _watchers.get(p, ()) if ref() not in (None, wrapper)]
