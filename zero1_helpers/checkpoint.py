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
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from zero1_helpers.checkpoint_files import (
    DataReader,
    Piece,
    Writer,
    check_data,
    fits_safetensors,
    load_dcp,
    load_weights,
    room_for,
    save_weights,
)
from zero1_helpers.checks import watchers_of
from zero1_helpers.ddp import SimpleDDP
from zero1_helpers.flat import FlatShardedOptimizer
from zero1_helpers.flat_bucket import MASTER
from zero1_helpers.memory_math import is_counter
from zero1_helpers.partition import by_bytes, pieces_of
from zero1_helpers.stepping import instead
from zero1_helpers.zero import ZeROOne

CHUNK = 2**20  # elements that a tensor travels in on its way to one rank
WRAPPERS = SimpleDDP, nn.parallel.DistributedDataParallel, torch._dynamo.OptimizedModule
KERNELS = ("fused", "foreach")  # settings of a group that belong to this run, not to its state


# On disk


def save_checkpoint(folder: str | os.PathLike, model: nn.Module, optimizer, extra=None) -> None:
    """Write model, optimizer and `extra` (rank 0's: the scheduler's state, the step) to a folder that all
    ranks see. Each rank writes its shard of the state and a share of the weights; nothing is collected.
    Until a file is complete a rank keeps a copy on the CPU of what it writes: at most that part.

    Weights are safetensors, and the rest is DCP's. `extra` is data: tensors, numbers, strings, lists, dicts;
    ValueError if it is more. `.metadata` is written last, under another name first. Without it there is no
    checkpoint, so one that was interrupted is never loaded; a complete one is never written over:
    FileExistsError. A step that is torn (backward raised) is not saved: RuntimeError.
    """
    there = Path(folder, ".metadata").exists()
    _together(FileExistsError(f"there is a checkpoint in {folder} already") if there else None, optimizer)
    module = _bare(model)
    torn = next((why for wrapper in _wrappers(module) if (why := wrapper.torn())), None)
    _together(RuntimeError(why) if (why := torn) else None, optimizer)
    shard, state_dict = shard_of(module, optimizer), module.state_dict()
    rank, ranks = _place(optimizer)
    values = {"about": _about(module, optimizer), "extra": extra} if rank == 0 else {}
    weights = {key: value for key, value in state_dict.items() if fits_safetensors(value)}
    if rank == 0:
        values |= {f"model/{key}": value for key, value in state_dict.items() if key not in weights}
    pieces = {}
    for name, (p, here, start) in shard.items():
        for key, value in optimizer.state.get(here, {}).items():
            if _is_split(key, value, here):
                pieces[f"elements/{key}/{name}"] = Piece(_row(value, here), start, p.numel())
            else:
                values[f"value/{key}/{name}"] = value
    _together(check_data({k: v for k, v in values.items() if not isinstance(v, Tensor)}), optimizer)
    # Ranks may differ in buffers, and rank 0's count.
    buffers = {name for name, _ in module.named_buffers()}
    shares = dict(zip(weights, by_bytes(list(weights.values()), ranks), strict=True))
    shares |= dict.fromkeys(buffers & set(shares), 0)
    _together(_failure(save_weights, folder, weights, shares, rank, ranks), optimizer)
    writer = dcp.FileSystemWriter(folder, overwrite=False)
    dcp.save(values, storage_writer=writer, planner=Writer(pieces), process_group=_group(optimizer))


def load_checkpoint(folder: str | os.PathLike, model: nn.Module, optimizer, cast: bool = False):
    """Take model and optimizer from a checkpoint of any of the classes and any number of ranks; returns
    `extra`. Each rank reads its shard of the state, which it holds once, and the weights.

    Nothing in the files is run: see `checkpoint_files`. Settings of the groups (lr and so on) are the saved
    ones, kernels (fused, foreach) those of this run. FileNotFoundError if there is no complete checkpoint,
    ValueError if it is of another model, kind of optimizer, dtype or split in groups, or not only data; on
    all ranks, and before anything is changed. `cast=True` allows other dtypes: each number is then rounded
    to the dtype that it has here. A torn step is over with this.
    """
    reader, group = DataReader(folder), _group(optimizer)
    module = _bare(model)
    for wrapper in _wrappers(module):
        if wrapper.torn():
            wrapper.abandon_step()
    stored, error = None, None
    try:
        stored = reader.read_metadata().state_dict_metadata
    except FileNotFoundError:
        error = FileNotFoundError(f"there is no complete checkpoint in {folder}")
    except ValueError as found:
        error = found
    _together(error, optimizer)
    values = {"about": None, "extra": None}
    load_dcp(values, reader, {}, group)
    about, extra = values["about"], values["extra"]
    if not isinstance(about, dict) or not {"optimizer", "groups", "strides", "dtypes"} <= set(about):
        raise ValueError(f"{folder} is a checkpoint of another program")  # the same on all ranks
    shard, weights = shard_of(module, optimizer), {}
    error = _failure(lambda: weights.update(load_weights(folder)))
    _together(error or _difference(weights, stored, about, module, optimizer, cast), optimizer)

    optimizer.state.clear()  # never twice in memory
    flat = isinstance(optimizer, FlatShardedOptimizer)
    values = {f"model/{k}": v for k, v in module.state_dict().items() if k not in weights}
    pieces, entries = {}, defaultdict(dict)
    for path, saved in stored.items():
        kind, _, rest = path.partition("/")
        key, _, name = rest.partition("/")
        if kind not in ("elements", "value") or name not in shard or (key == MASTER and not flat):
            continue
        p, here, start = shard[name]
        if kind == "elements":
            entries[here][key] = room_for(saved, here)
            pieces[path] = Piece(_row(entries[here][key], here), start, p.numel())
        else:
            values[path] = room_for(saved)
    load_dcp(values, reader, pieces, group)
    for path, value in values.items():
        if path.startswith("value/"):
            _, key, name = path.split("/", 2)
            entries[shard[name][1]][key] = value
    objects = {path[6:]: value for path, value in values.items() if path.startswith("model/")}
    module.load_state_dict(weights | objects)
    for bucket in optimizer.buckets if flat else ():
        for p, piece in bucket.pieces.items():
            if piece in entries:
                bucket.take_master(p, entries[piece])
    _give(optimizer, {p: here for p, here, _ in shard.values()}, about["groups"], entries, cast)
    return extra


def _give(optimizer, pieces, groups, entries, cast: bool) -> None:
    """Hand an optimizer its state through its own load_state_dict, which knows devices.

    That would also give each entry the dtype of its parameter, whatever the optimizer itself keeps.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    with instead(inner, pieces):
        shown = [p for group in inner.param_groups for p in group["params"]]
        numbers, saved = {p: i for i, p in enumerate(shown)}, []
        for group, settings in zip(inner.param_groups, groups, strict=True):
            kernels = {key: group[key] for key in KERNELS if key in group}
            saved.append(group | settings | kernels | {"params": [numbers[p] for p in group["params"]]})
        state = {numbers[p]: entry for p, entry in entries.items()}
        inner.load_state_dict({"state": state, "param_groups": saved})
        for p, entry in entries.items() if not cast else ():
            for key, value in entry.items():
                if isinstance(value, Tensor) and inner.state[p][key].dtype != value.dtype:
                    inner.state[p][key] = value.to(p.device)
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
    of_state = _state_dtypes(optimizer)
    return {
        "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "groups": [g | {"params": [names[p] for p in g["params"]]} for g in optimizer.param_groups],
        "strides": {name: _strides(p) for p, name in names.items()},
        "dtypes": {names[p]: str(dtype) for p, dtype in of_state.items()},
        "model": {k: [list(v.shape), str(v.dtype)] if isinstance(v, Tensor) else None
                  for k, v in module.state_dict().items()},
    }  # fmt: skip


def _state_dtypes(optimizer) -> dict[Tensor, torch.dtype]:
    """In which dtype each parameter is stepped: its own, or a master copy's."""
    if isinstance(optimizer, FlatShardedOptimizer):
        return {p: bucket.stepped_in for bucket in optimizer.buckets for p in bucket.params}
    return {p: p.dtype for group in optimizer.param_groups for p in group["params"]}


def _difference(weights, stored, about: dict, module: nn.Module, optimizer, cast: bool) -> ValueError | None:
    """What keeps this checkpoint from being that of this model and optimizer."""
    here = _about(module, optimizer)
    if about["optimizer"] != here["optimizer"]:
        return ValueError(f"the checkpoint is of {about['optimizer']}, the optimizer is {here['optimizer']}")
    mine, saved = here["model"], {k[6:]: None for k in stored if k.startswith("model/")}
    saved |= {key: [list(t.shape), str(t.dtype)] for key, t in weights.items()}
    for name in [*mine, *saved]:
        if name not in saved or name not in mine:
            has, lacks = ("model", "checkpoint") if name in mine else ("checkpoint", "model")
            return ValueError(f"the {has} has {name}, the {lacks} has not")
        if mine[name] and saved[name] and saved[name][0] != mine[name][0]:
            shapes = tuple(saved[name][0]), tuple(mine[name][0])
            return ValueError(f"{name} is {shapes[0]} in the checkpoint and {shapes[1]} in the model")
        if mine[name] and saved[name] and saved[name][1] != mine[name][1] and not cast:
            return ValueError(_other_dtype(name, saved[name][1], mine[name][1]))
    for name, dtype in here["dtypes"].items():
        if not cast and about["dtypes"].get(name, dtype) != dtype:
            return ValueError(_other_dtype(f"the state of {name}", about["dtypes"][name], dtype))
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


def _other_dtype(what: str, saved: str, here: str) -> str:
    saved, here = saved.removeprefix("torch."), here.removeprefix("torch.")
    return f"{what} is {saved} in the checkpoint and {here} here; load_checkpoint(..., cast=True) rounds it"


def _failure(function, *args) -> Exception | None:
    """Its error, for _together."""
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def _wrappers(module: nn.Module) -> list:
    return list({id(w): w for p in module.parameters() for w in watchers_of(p)}.values())


def _place(optimizer) -> tuple[int, int]:
    """(rank, how many ranks) of those that save or load together."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(_group(optimizer)), dist.get_world_size(_group(optimizer))


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
