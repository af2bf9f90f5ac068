"""The state of a run on disk, or on one rank, and from there back on any number of ranks.

For `ZeROOne`, `ShardedOptimizer`, `FlatShardedOptimizer` and a plain optimizer alike, and from one to
another. Each function is called on every rank of the optimizer's group, between two steps.

`save_checkpoint` and `load_checkpoint` leave files, planning and resharding to torch.distributed.checkpoint
(DCP). What is here is what DCP cannot know: which elements of which parameter a rank holds the state of. A
slice of a flat bucket begins and ends in the midst of parameters, so every parameter is one row of
elements, in the order of its memory, and a rank writes and reads its pieces of that row.
"""

import os
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zero1_helpers.ddp import SimpleDDP
from zero1_helpers.flat import FlatShardedOptimizer
from zero1_helpers.flat_bucket import MASTER
from zero1_helpers.memory_math import is_counter
from zero1_helpers.partition import pieces_of
from zero1_helpers.stepping import instead
from zero1_helpers.zero import ZeROOne

CHUNK = 2**20  # elements that a tensor travels in on its way to one rank
WRAPPERS = SimpleDDP, nn.parallel.DistributedDataParallel, torch._dynamo.OptimizedModule
KERNELS = ("fused", "foreach")  # settings of a group that belong to this run, not to its state


# On disk


def save_checkpoint(folder: str | os.PathLike, model: nn.Module, optimizer, extra=None) -> None:
    """Write model, optimizer and `extra` (rank 0's: the scheduler's state, the step) to a folder that all
    ranks see. Each rank writes its shard of the state and a share of the model; nothing is collected.
    Until its file is complete DCP keeps a copy on the CPU of what had to be copied: at most that part.

    DCP writes `.metadata` last, under another name first. Without it there is no checkpoint, so
    one that was interrupted is never loaded; a complete one is never written over: FileExistsError.
    """
    there = Path(folder, ".metadata").exists()
    _together(FileExistsError(f"there is a checkpoint in {folder} already") if there else None, optimizer)
    module = _bare(model)
    shard = shard_of(module, optimizer)
    first = not dist.is_initialized() or dist.get_rank(_group(optimizer)) == 0
    values = {"about": _about(module, optimizer), "extra": extra} if first else {}
    buffers, pieces = {name for name, _ in module.named_buffers()}, {}
    for key, value in module.state_dict().items():
        if first or key not in buffers:  # ranks may differ in them, and rank 0's count
            values[f"model/{key}"] = value
    for name, (p, here, start) in shard.items():
        for key, value in optimizer.state.get(here, {}).items():
            if _is_split(key, value, here):
                pieces[f"elements/{key}/{name}"] = Piece(_row(value, here), start, p.numel())
            else:
                values[f"value/{key}/{name}"] = value
    writer = dcp.FileSystemWriter(folder, overwrite=False)
    dcp.save(values, storage_writer=writer, planner=Writer(pieces), process_group=_group(optimizer))


def load_checkpoint(folder: str | os.PathLike, model: nn.Module, optimizer):
    """Take model and optimizer from a checkpoint of any of the classes and any number of ranks; returns
    `extra`. Each rank reads its shard of the state, which it holds once, and the model.

    Settings of the groups (lr and so on) are the saved ones, kernels (fused, foreach) those of this run.
    FileNotFoundError if there is no complete checkpoint, ValueError if it is of another model, kind of
    optimizer or split in groups; on all ranks, and before anything is changed.
    """
    reader, group, missing = dcp.FileSystemReader(folder), _group(optimizer), None
    try:
        stored = reader.read_metadata().state_dict_metadata
    except FileNotFoundError:
        missing = FileNotFoundError(f"there is no complete checkpoint in {folder}")
    _together(missing, optimizer)
    values = {"about": None, "extra": None}
    dcp.load(values, storage_reader=reader, planner=Reader({}), process_group=group)
    about, extra = values["about"], values["extra"]
    module = _bare(model)
    shard = shard_of(module, optimizer)
    _together(_difference(stored, about, module, optimizer), optimizer)

    optimizer.state.clear()  # never twice in memory
    flat = isinstance(optimizer, FlatShardedOptimizer)
    values = {f"model/{key}": value for key, value in module.state_dict().items()}
    pieces, entries = {}, defaultdict(dict)
    for path, saved in stored.items():
        kind, _, rest = path.partition("/")
        key, _, name = rest.partition("/")
        if kind not in ("elements", "value") or name not in shard or (key == MASTER and not flat):
            continue
        p, here, start = shard[name]
        if kind == "elements":
            entries[here][key] = torch.empty_like(here, dtype=saved.properties.dtype)
            pieces[path] = Piece(_row(entries[here][key], here), start, p.numel())
        else:
            is_tensor = isinstance(saved, TensorStorageMetadata)
            values[path] = torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None
    dcp.load(values, storage_reader=reader, planner=Reader(pieces), process_group=group)
    for path, value in values.items():
        if path.startswith("value/"):
            _, key, name = path.split("/", 2)
            entries[shard[name][1]][key] = value
    module.load_state_dict({key: values[f"model/{key}"] for key in module.state_dict()})
    for bucket in optimizer.buckets if flat else ():
        for p, piece in bucket.pieces.items():
            if piece in entries:
                bucket.take_master(p, entries[piece])
    _give(optimizer, {p: here for p, here, _ in shard.values()}, about["groups"], entries)
    return extra


def _give(optimizer, pieces, groups, entries) -> None:
    """Hand an optimizer its state through its own load_state_dict, which knows dtypes and devices."""
    inner = getattr(optimizer, "optimizer", optimizer)
    with instead(inner, pieces):
        shown = [p for group in inner.param_groups for p in group["params"]]
        numbers, saved = {p: i for i, p in enumerate(shown)}, []
        for group, settings in zip(inner.param_groups, groups, strict=True):
            kernels = {key: group[key] for key in KERNELS if key in group}
            saved.append(group | settings | kernels | {"params": [numbers[p] for p in group["params"]]})
        state = {numbers[p]: entry for p, entry in entries.items()}
        inner.load_state_dict({"state": state, "param_groups": saved})
    optimizer.param_groups, optimizer.state = inner.param_groups, inner.state


def _bare(model: nn.Module) -> nn.Module:
    """Out of a wrapper, out of torch.compile."""
    while isinstance(model, WRAPPERS):
        model = model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model.module
    return model


def shard_of(module: nn.Module, optimizer) -> dict[str, tuple[Tensor, Tensor, int]]:
    """{name: (parameter, what this rank keeps its state under, which element of it that begins with)} of all
    that this rank has state of."""
    if isinstance(optimizer, FlatShardedOptimizer):
        optimizer.receive()
    names, rank, shard = {p: name for name, p in module.named_parameters()}, getattr(optimizer, "rank", 0), {}
    strangers = any(p not in names for group in optimizer.param_groups for p in group["params"])
    _together(ValueError("the optimizer has a parameter that is not in the model") if strangers else None,
              optimizer)  # fmt: skip
    for p, places, here in _spread(optimizer):
        if here is not None:
            shard[names[p]] = p, here, next(start for owner, start, _ in places if owner == rank)
    return shard


def _about(module: nn.Module, optimizer) -> dict:
    names = {p: name for name, p in module.named_parameters()}
    return {
        "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "groups": [g | {"params": [names[p] for p in g["params"]]} for g in optimizer.param_groups],
        "strides": {name: _strides(p) for p, name in names.items()},
    }


def _difference(stored: dict, about: dict, module: nn.Module, optimizer) -> ValueError | None:
    """What keeps this checkpoint from being that of this model and optimizer."""
    here, saved = _about(module, optimizer), {k[6:]: v for k, v in stored.items() if k.startswith("model/")}
    if about["optimizer"] != here["optimizer"]:
        return ValueError(f"the checkpoint is of {about['optimizer']}, the optimizer is {here['optimizer']}")
    mine = module.state_dict()
    for name in [*mine, *saved]:
        if name not in saved or name not in mine:
            has, lacks = ("model", "checkpoint") if name in mine else ("checkpoint", "model")
            return ValueError(f"the {has} has {name}, the {lacks} has not")
        if isinstance(mine[name], Tensor) and saved[name].size != mine[name].shape:
            shapes = tuple(saved[name].size), tuple(mine[name].shape)
            return ValueError(f"{name} is {shapes[0]} in the checkpoint and {shapes[1]} in the model")
    for name, strides in here["strides"].items():
        if about["strides"][name] != strides:
            return ValueError(f"{name} has another order in memory than in the checkpoint (channels-last?)")
    groups = [[group["params"] for group in which["groups"]] for which in (about, here)]
    if groups[0] != groups[1]:
        sizes = [[len(params) for params in which] for which in groups]
        return ValueError(
            f"the optimizer's groups hold other parameters than the checkpoint's: {sizes[1]} parameters, "
            f"there {sizes[0]}"
        )
    return None


def _together(error: Exception | None, optimizer) -> None:
    """Raise on all ranks if one has an error: a rank that went on alone would wait for the others."""
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size(_group(optimizer))
        dist.all_gather_object(errors, error, group=_group(optimizer))
    for error in errors:
        if error is not None:
            raise error


def _group(optimizer):
    return getattr(optimizer, "process_group", None)


def _strides(p: Tensor) -> tuple[int, ...]:
    """Of a dense tensor in p's order, as its state is."""
    return torch.empty_like(p, device="meta").stride()


def _row(t: Tensor, like: Tensor) -> Tensor:
    """t as (numel,), in the order of `like`'s memory; a view where t has that order."""
    if t.stride() != _strides(like):
        t = torch.empty_like(like, dtype=t.dtype).copy_(t)
    return t.as_strided((t.numel(),), (1,), t.storage_offset())


@dataclass
class Piece:
    """Elements from `start` on, as many as `row` has, of a row of `total`."""

    row: Tensor
    start: int
    total: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.start]), self.row.shape)

    def written(self, path: str) -> WriteItem:
        about = TensorWriteData(
            self.chunk, TensorProperties.create_from_tensor(self.row), torch.Size([self.total])
        )
        return WriteItem(MetadataIndex(path, self.chunk.offsets), WriteItemType.SHARD, tensor_data=about)


class Writer(dcp.DefaultSavePlanner):
    """DCP's plan, and this rank's pieces."""

    def __init__(self, pieces: dict[str, Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = [piece.written(path) for path, piece in self.pieces.items()]
        return replace(plan, items=[*plan.items, *items])

    def lookup_object(self, index):
        return self.pieces[index.fqn].row if index.fqn in self.pieces else super().lookup_object(index)


class Reader(dcp.DefaultLoadPlanner):
    """DCP's plan, and from whichever files hold them, this rank's pieces."""

    def __init__(self, pieces: dict[str, Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self):
        plan, stored = super().create_local_plan(), self.metadata.state_dict_metadata
        items = [item for path, piece in self.pieces.items()
                 for item in create_read_items_for_chunk_list(path, stored[path], [piece.chunk])]  # fmt: skip
        return replace(plan, items=[*plan.items, *items])

    def lookup_tensor(self, index):
        return self.pieces[index.fqn].row if index.fqn in self.pieces else super().lookup_tensor(index)


# On one rank


@torch.no_grad()
def full_state_dict(optimizer: ZeROOne | FlatShardedOptimizer, to: int = 0) -> dict | None:
    """All shards put together on the CPU of rank `to`, as the plain optimizer's state_dict; else None.

    Tensors travel in pieces of CHUNK elements, and no other rank holds more than one of them beside its
    own shard. What it returns `load_state_dict` takes, of the plain optimizer and of all three classes,
    on any number of ranks; there, on every rank (`torch.load(..., mmap=True)` reads only the shard).
    """
    described = {
        i: {key: value.dtype if _is_split(key, value, here) else value for key, value in
            optimizer.state[here].items()}
        for i, (_, _, here) in enumerate(_spread(optimizer)) if here in optimizer.state
    }  # fmt: skip
    everyone = [None] * optimizer.world_size
    dist.all_gather_object(everyone, described, group=optimizer.process_group)
    index = {p: i for i, p in enumerate(optimizer.params)}
    groups = [group | {"params": [index[p] for p in group["params"]]} for group in optimizer.param_groups]
    whole = {"state": {}, "param_groups": groups}
    for i, (p, places, here) in enumerate(_spread(optimizer)):
        about = next((known[i] for known in everyone if i in known), {})
        entry = {
            key: _collect(optimizer, p, places, optimizer.state.get(here, {}).get(key), value, to)
            if isinstance(value, torch.dtype) else value
            for key, value in about.items()
        }  # fmt: skip
        if entry:
            whole["state"][i] = entry
    return whole if optimizer.rank == to else None


def _spread(optimizer):
    """For each parameter: itself, [(owner, start, end)] of its elements, and what this rank's state is
    kept under, or None."""
    if not isinstance(optimizer, ZeROOne | FlatShardedOptimizer):  # not sharded: all of it, everywhere
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            yield p, [(0, 0, p.numel())], p
        return
    if isinstance(optimizer, ZeROOne):
        optimizer._assign_new_parameters()
        for p in optimizer.params:
            owner = optimizer.param_to_owner_rank.get(p)
            yield p, [] if owner is None else [(owner, 0, p.numel())], p if optimizer.is_mine(p) else None
        return
    ranks, spread = range(optimizer.world_size), {}
    for bucket in optimizer.buckets:
        cuts = [pieces_of([p.numel() for p in bucket.params], rank, len(ranks)) for rank in ranks]
        for i, p in enumerate(bucket.params):
            places = [(rank, *cuts[rank][i]) for rank in ranks if i in cuts[rank]]
            spread[p] = places, bucket.pieces.get(p)
    for p in optimizer.params:
        yield p, *spread.get(p, ([], None))


def _is_split(key: str, value, here: Tensor) -> bool:
    """Is this entry of the state one number per element, and not one for the whole parameter?"""
    return isinstance(value, Tensor) and not is_counter(key) and value.shape == here.shape


def _collect(optimizer, p, places, mine, dtype, to) -> Tensor | None:
    """One entry of p's state on rank `to`, in p's shape and strides: fused kernels count on them."""
    whole = torch.empty(p.numel(), dtype=dtype) if optimizer.rank == to else None
    for owner, start, end in places:
        for a in range(start, end, CHUNK):
            b = min(a + CHUNK, end)
            if optimizer.rank == owner:
                part = mine.reshape(-1)[a - start : b - start].contiguous()
            else:
                part = torch.empty(b - a, dtype=dtype, device=p.device)
            dist.broadcast(part, group=optimizer.process_group, group_src=owner)
            if optimizer.rank == to:
                whole[a:b] = part
    if optimizer.rank != to:
        return None
    if isinstance(optimizer, FlatShardedOptimizer):  # pieces are cut in the order of p's memory
        return whole.as_strided(p.shape, p.stride())
    return torch.empty_like(p, dtype=dtype, device="cpu").copy_(whole.view(p.shape))
