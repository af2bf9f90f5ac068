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
from zero1_helpers.flat_bucket import MASTER
from zero1_helpers.flat_optimizer import FlatShardedOptimizer
from zero1_helpers.partition import by_bytes
from zero1_helpers.shards import (
    full_state_dict,
    group_of,
    is_split,
    row_of,
    shard_of,
    strides_of,
    together,
)
from zero1_helpers.stepping import instead

WRAPPERS = SimpleDDP, nn.parallel.DistributedDataParallel, torch._dynamo.OptimizedModule
__all__ = ["full_state_dict", "load_checkpoint", "save_checkpoint", "shard_of"]
KERNELS = ("fused", "foreach")  # settings of a group that belong to this run, not to its state


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
    together(
        FileExistsError(f"there is a checkpoint in {folder} already") if there else None, optimizer
    )
    module = _bare(model)
    torn = next((why for wrapper in _wrappers(module) if (why := wrapper.torn())), None)
    together(RuntimeError(why) if (why := torn) else None, optimizer)
    shard, state_dict = shard_of(module, optimizer), module.state_dict()
    rank, ranks = _place(optimizer)
    values = {"about": _about(module, optimizer), "extra": extra} if rank == 0 else {}
    weights = {key: value for key, value in state_dict.items() if fits_safetensors(value)}
    if rank == 0:
        values |= {f"model/{key}": value for key, value in state_dict.items() if key not in weights}
    pieces = {}
    for name, (p, here, start) in shard.items():
        for key, value in optimizer.state.get(here, {}).items():
            if is_split(key, value, here):
                pieces[f"elements/{key}/{name}"] = Piece(row_of(value, here), start, p.numel())
            else:
                values[f"value/{key}/{name}"] = value
    together(check_data({k: v for k, v in values.items() if not isinstance(v, Tensor)}), optimizer)
    # Ranks may differ in buffers, and rank 0's count.
    buffers = {name for name, _ in module.named_buffers()}
    shares = dict(zip(weights, by_bytes(list(weights.values()), ranks), strict=True))
    shares |= dict.fromkeys(buffers & set(shares), 0)
    together(_failure(save_weights, folder, weights, shares, rank, ranks), optimizer)
    writer = dcp.FileSystemWriter(folder, overwrite=False)
    dcp.save(
        values, storage_writer=writer, planner=Writer(pieces), process_group=group_of(optimizer)
    )


def load_checkpoint(folder: str | os.PathLike, model: nn.Module, optimizer, cast: bool = False):
    """Take model and optimizer from a checkpoint of any of the classes and any number of ranks; returns
    `extra`. Each rank reads its shard of the state, which it holds once, and the weights.

    Nothing in the files is run: see `checkpoint_files`. Settings of the groups (lr and so on) are the saved
    ones, kernels (fused, foreach) those of this run. FileNotFoundError if there is no complete checkpoint,
    ValueError if it is of another model, kind of optimizer, dtype or split in groups, or not only data; on
    all ranks, and before anything is changed. `cast=True` allows other dtypes: each number is then rounded
    to the dtype that it has here. A torn step is over with this.
    """
    reader, group = DataReader(folder), group_of(optimizer)
    module = _bare(model)
    for wrapper in _wrappers(module):
        if wrapper.torn():
            wrapper.abandon_step()
    stored = _read_index(reader, folder, optimizer)
    values = {"about": None, "extra": None}
    load_dcp(values, reader, {}, group)
    about, extra = values["about"], values["extra"]
    if not isinstance(about, dict) or not {"optimizer", "groups", "strides", "dtypes"} <= set(
        about
    ):
        raise ValueError(f"{folder} is a checkpoint of another program")  # the same on all ranks
    shard, weights = shard_of(module, optimizer), {}
    error = _failure(lambda: weights.update(load_weights(folder)))
    together(error or _difference(weights, stored, about, module, optimizer, cast), optimizer)

    optimizer.state.clear()  # never twice in memory
    values, pieces, entries = _room(stored, shard, optimizer)
    values |= {f"model/{k}": v for k, v in module.state_dict().items() if k not in weights}
    load_dcp(values, reader, pieces, group)
    for path, value in values.items():
        if path.startswith("value/"):
            _, key, name = path.split("/", 2)
            entries[shard[name][1]][key] = value
    objects = {path[6:]: value for path, value in values.items() if path.startswith("model/")}
    module.load_state_dict(weights | objects)
    _give(optimizer, {p: here for p, here, _ in shard.values()}, about["groups"], entries, cast)
    return extra


def _read_index(reader: DataReader, folder, optimizer) -> dict:
    """What is stored, by path."""
    stored, error = None, None
    try:
        stored = reader.read_metadata().state_dict_metadata
    except FileNotFoundError:
        error = FileNotFoundError(f"there is no complete checkpoint in {folder}")
    except ValueError as found:
        error = found
    together(error, optimizer)
    return stored


def _room(stored: dict, shard: dict, optimizer) -> tuple[dict, dict[str, Piece], dict]:
    """Where the state of this rank's shard is read to: whole values, pieces, entries by parameter."""
    flat = isinstance(optimizer, FlatShardedOptimizer)
    values, pieces, entries = {}, {}, defaultdict(dict)
    for path, saved in stored.items():
        kind, _, rest = path.partition("/")
        key, _, name = rest.partition("/")
        if kind not in ("elements", "value") or name not in shard or (key == MASTER and not flat):
            continue
        p, here, start = shard[name]
        if kind == "elements":
            entries[here][key] = room_for(saved, here)
            pieces[path] = Piece(row_of(entries[here][key], here), start, p.numel())
        else:
            values[path] = room_for(saved)
    return values, pieces, entries


def _give(optimizer, pieces, groups, entries, cast: bool) -> None:
    """Hand an optimizer its state through its own load_state_dict, which knows devices.

    That would also give each entry the dtype of its parameter, whatever the optimizer itself keeps.
    """
    for bucket in optimizer.buckets if isinstance(optimizer, FlatShardedOptimizer) else ():
        for p, piece in bucket.pieces.items():
            if piece in entries:
                bucket.take_master(p, entries[piece])
    inner = getattr(optimizer, "optimizer", optimizer)
    with instead(inner, pieces):
        shown = [p for group in inner.param_groups for p in group["params"]]
        numbers, saved = {p: i for i, p in enumerate(shown)}, []
        for group, settings in zip(inner.param_groups, groups, strict=True):
            kernels = {key: group[key] for key in KERNELS if key in group}
            saved.append(
                group | settings | kernels | {"params": [numbers[p] for p in group["params"]]}
            )
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
        model = (
            model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model.module
        )
    return model


def _about(module: nn.Module, optimizer) -> dict:
    names = {p: name for name, p in module.named_parameters()}
    of_state = _state_dtypes(optimizer)
    return {
        "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "groups": [g | {"params": [names[p] for p in g["params"]]} for g in optimizer.param_groups],
        "strides": {name: strides_of(p) for p, name in names.items()},
        "dtypes": {names[p]: str(dtype) for p, dtype in of_state.items()},
        "model": {
            k: [list(v.shape), str(v.dtype)] if isinstance(v, Tensor) else None
            for k, v in module.state_dict().items()
        },
    }


def _state_dtypes(optimizer) -> dict[Tensor, torch.dtype]:
    """In which dtype each parameter is stepped: its own, or a master copy's."""
    if isinstance(optimizer, FlatShardedOptimizer):
        return {p: bucket.stepped_in for bucket in optimizer.buckets for p in bucket.params}
    return {p: p.dtype for group in optimizer.param_groups for p in group["params"]}


def _difference(
    weights, stored, about: dict, module: nn.Module, optimizer, cast: bool
) -> ValueError | None:
    """What keeps this checkpoint from being that of this model and optimizer."""
    here = _about(module, optimizer)
    if about["optimizer"] != here["optimizer"]:
        return ValueError(
            f"the checkpoint is of {about['optimizer']}, the optimizer is {here['optimizer']}"
        )
    mine, saved = here["model"], {k[6:]: None for k in stored if k.startswith("model/")}
    saved |= {key: [list(t.shape), str(t.dtype)] for key, t in weights.items()}
    for name in [*mine, *saved]:
        if name not in saved or name not in mine:
            has, lacks = ("model", "checkpoint") if name in mine else ("checkpoint", "model")
            return ValueError(f"the {has} has {name}, the {lacks} has not")
        if mine[name] and saved[name] and (why := _another(name, saved[name], mine[name], cast)):
            return ValueError(why)
    for name, dtype in here["dtypes"].items():
        if not cast and about["dtypes"].get(name, dtype) != dtype:
            return ValueError(_other_dtype(f"the state of {name}", about["dtypes"][name], dtype))
    for name, strides in here["strides"].items():
        if about["strides"][name] != strides:
            return ValueError(
                f"{name} has another order in memory than in the checkpoint (channels-last?)"
            )
    groups = [[group["params"] for group in which["groups"]] for which in (about, here)]
    if groups[0] != groups[1]:
        sizes = [[len(params) for params in which] for which in groups]
        return ValueError(
            f"the optimizer's groups hold other parameters than the checkpoint's: {sizes[1]} parameters, "
            f"there {sizes[0]}"
        )
    return None


def _another(name: str, saved: list, here: list, cast: bool) -> str | None:
    """Why a saved tensor is not this one, by shape and dtype."""
    if saved[0] != here[0]:
        return f"{name} is {tuple(saved[0])} in the checkpoint and {tuple(here[0])} in the model"
    return None if cast or saved[1] == here[1] else _other_dtype(name, saved[1], here[1])


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
    return dist.get_rank(group_of(optimizer)), dist.get_world_size(group_of(optimizer))
