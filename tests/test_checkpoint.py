"""A run saved from N ranks goes on with M, with any of the classes: DCP's files, this project's pieces."""

import copy
import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn

from zero1_helpers import (
    ShardedOptimizer,
    SimpleDDPBucketAsync,
    ZeROOne,
    checkpoint,
    checkpoint_files,
)
from zero1_helpers.memory_math import state_bytes

from .models import MLP, OPTIMIZERS, ChannelsLast, Scalar, Unused, Variant, data, loss_of, make
from .test_parity import max_difference
from .test_practice import Normalised, calm, step_alone

NAMES = ["zero1", "sharded", "overlap", "flat", "flat-lazy"]


def built(name, model_cls, optimizer_name):
    cls, kwargs = OPTIMIZERS[optimizer_name]
    return Variant(name, make(model_cls), cls, **kwargs)


def train(variant, rank, world_size, steps):
    """With the global batch of 24 rows, whatever the number of ranks."""
    for i in steps:
        x, y = (t.flatten(0, 1) for t in calm(i))
        rows = len(x) // world_size
        loss_of(variant.model, x[rank * rows :][:rows], y[rank * rows :][:rows]).backward()
        variant.finish()


def bits(variant):
    """Every bit of this rank's parameters and state."""
    found = [p.detach().clone() for p in variant.model.parameters()]
    for _, here, _ in checkpoint.shard_of(variant.model.module, variant.optimizer).values():
        entry = variant.optimizer.state.get(here, {})
        found += [
            value.clone() for _, value in sorted(entry.items()) if isinstance(value, torch.Tensor)
        ]
    return found


def going_on(rank, world_size, name, folder):
    for optimizer_name in ("momentum", "adamw"):
        where = f"{folder}/{optimizer_name}"
        variant = built(name, Unused, optimizer_name)
        train(variant, rank, world_size, range(3))
        checkpoint.save_checkpoint(where, variant.model, variant.optimizer, {"step": 3})
        saved = bits(variant)
        train(variant, rank, world_size, range(3, 6))
        again = built(name, Unused, optimizer_name)
        train(again, rank, world_size, range(7, 9))  # something else, to be forgotten
        assert checkpoint.load_checkpoint(where, again.model, again.optimizer) == {"step": 3}
        for a, b in zip(bits(again), saved, strict=True):
            assert torch.equal(a, b)
        train(again, rank, world_size, range(3, 6))
        for a, b in zip(bits(again), bits(variant), strict=True):
            assert torch.equal(a, b), (name, optimizer_name)
        assert state_bytes(again.optimizer) == state_bytes(variant.optimizer)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_run_that_went_on_in_every_bit(ranks, tmp_path, name):
    ranks(going_on, 4, name, str(tmp_path))


def part(rank, world_size, name, optimizer_name, model_cls, folder, i):
    """Steps 2i and 2i + 1, from the checkpoint of the part before, to one of this part."""
    variant = built(name, model_cls, optimizer_name)
    if i:
        checkpoint.load_checkpoint(f"{folder}/{i - 1}", variant.model, variant.optimizer)
    train(variant, rank, world_size, (2 * i, 2 * i + 1))
    checkpoint.save_checkpoint(f"{folder}/{i}", variant.model, variant.optimizer)
    return copy.deepcopy(variant.model.module.state_dict()) if rank == 0 else None


def resized(ranks, names, optimizer_name, model_cls, folder):
    cls, kwargs = OPTIMIZERS[optimizer_name]
    reference = make(model_cls)
    plain = cls(reference.parameters(), **kwargs)
    for i, (name, world_size) in enumerate(zip(names, (4, 2, 3), strict=True)):
        saved, *_ = ranks(part, world_size, name, optimizer_name, model_cls, str(folder), i)
        for k in (2 * i, 2 * i + 1):
            step_alone(reference, plain, 6, k, batches=calm)
        resumed = make(model_cls)
        resumed.load_state_dict(saved)
        assert max_difference(resumed, reference) <= 1e-9, (names, optimizer_name)
    return resumed, reference, plain


@pytest.mark.parametrize("optimizer_name", ["momentum", "adamw"])
@pytest.mark.parametrize("name", ["zero1", "overlap", "flat"])
def test_four_ranks_then_two_then_three_are_one_process(ranks, tmp_path, name, optimizer_name):
    for model_cls in (Scalar, ChannelsLast):
        resized(ranks, [name] * 3, optimizer_name, model_cls, tmp_path / model_cls.__name__)


def test_from_class_to_class_and_into_one_process(ranks, tmp_path):
    names = ["flat", "balanced", "flat-lazy"]
    resumed, reference, plain = resized(ranks, names, "adamw", ChannelsLast, tmp_path / "a")
    resized(ranks, ["overlap", "flat", "zero1"], "momentum", Scalar, tmp_path / "b")
    (alone,) = ranks(one_process, 1, str(tmp_path / "a/2"))
    for key, wanted in plain.state_dict()["state"].items():
        for name, value in wanted.items():
            torch.testing.assert_close(alone[key][name], value, rtol=1e-9, atol=1e-9)
            assert alone[key][name].stride() == value.stride()


def one_process(rank, world_size, folder):
    dist.destroy_process_group()  # and needs none
    cls, kwargs = OPTIMIZERS["adamw"]
    model = make(ChannelsLast)
    plain = cls(model.parameters(), **kwargs)
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.load_checkpoint(folder, model, plain)
    assert (
        plain.param_groups[0]["fused"] is None
    )  # the flat class had it, and this one chose not to
    return plain.state_dict()["state"]


def elements_moved(rank, world_size, name, folder):
    """(state elements held, written, read) by this rank, and the model's elements that it wrote."""
    variant, plans = built(name, MLP, "adamw"), {}
    train(variant, rank, world_size, range(1))
    with pytest.MonkeyPatch.context() as patch:
        for cls in (checkpoint_files.Writer, checkpoint_files.Reader):
            finish = cls.finish_plan

            def note(planner, plan, finish=finish):
                if isinstance(planner, checkpoint_files.Reader) and planner.pieces:
                    assert not variant.optimizer.state, "never twice in memory"
                plans.setdefault(type(planner).__name__, []).append(plan.items)
                return finish(planner, plan)

            patch.setattr(cls, "finish_plan", note)
        checkpoint.save_checkpoint(folder, variant.model, variant.optimizer)
        checkpoint.load_checkpoint(folder, variant.model, variant.optimizer)
    held = sum(
        v.numel() for s in variant.optimizer.state.values() for k, v in s.items() if k != "step"
    )
    (saved,), (_, loaded) = plans["Writer"], plans["Reader"]
    wrote = {"elements": 0, "model": 0}
    for item in saved:
        if item.index.fqn.startswith("elements/"):
            wrote["elements"] += item.tensor_data.chunk.sizes.numel()
    weights = safe_open(f"{folder}/model-{rank + 1:05}-of-{world_size:05}.safetensors", "pt")
    wrote["model"] = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    read = sum(
        item.lengths.numel() for item in loaded if item.dest_index.fqn.startswith("elements/")
    )
    return held, wrote["elements"], read, wrote["model"]


@pytest.mark.parametrize("name", ["balanced", "overlap", "flat"])
def test_each_rank_writes_and_reads_its_shard_and_nothing_is_collected(ranks, tmp_path, name):
    found = ranks(elements_moved, 4, name, str(tmp_path))
    whole = sum(p.numel() for p in MLP().parameters())
    for held, written, read, model in found:
        assert held == written == read and model < whole
    assert [sum(column) for column in zip(*found, strict=True)] == [
        2 * whole,
        2 * whole,
        2 * whole,
        whole,
    ]
    assert len(list(tmp_path.glob("*.distcp"))) == len(list(tmp_path.glob("*.safetensors"))) == 4


class Wider(MLP):
    def __init__(self):
        super().__init__()
        self.layers[1] = nn.Linear(8, 9)
        self.layers[2] = nn.Linear(9, 8)


class Deeper(MLP):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(8, 8)


def refused(rank, world_size, folder):
    adamw, momentum = (built("flat", MLP, name) for name in ("adamw", "momentum"))
    train(adamw, rank, world_size, range(1))

    def loading(match, variant, where="saved", error=ValueError):
        with pytest.raises(error, match=match) as caught:
            checkpoint.load_checkpoint(f"{folder}/{where}", variant.model, variant.optimizer)
        assert "\n" not in str(caught.value)

    loading("there is no complete checkpoint in .*nowhere$", adamw, "nowhere", FileNotFoundError)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(checkpoint.Writer, "lookup_object", lambda self, index: 1 / 0)
        with pytest.raises(dcp.api.CheckpointException, match="division by zero"):  # on all ranks
            checkpoint.save_checkpoint(f"{folder}/saved", adamw.model, adamw.optimizer)
    assert list(Path(folder, "saved").glob("*.distcp"))
    loading("there is no complete checkpoint", adamw, error=FileNotFoundError)
    checkpoint.save_checkpoint(
        f"{folder}/saved", adamw.model, adamw.optimizer
    )  # takes the leftovers' place
    before = bits(adamw)
    for where in ("saved", "saved" if rank == 1 else "fresh"):  # seen by all, or by one
        with pytest.raises(FileExistsError, match="there is a checkpoint in .*saved already"):
            checkpoint.save_checkpoint(f"{folder}/{where}", momentum.model, momentum.optimizer)
    loading("the checkpoint is of AdamW, the optimizer is SGD", momentum)
    wide, deep = (built("flat", cls, "adamw") for cls in (Wider, Deeper))
    loading(r"layers.1.weight is \(8, 8\) in the checkpoint and \(9, 8\) in the model", wide)
    loading("the model has more.weight, the checkpoint has not", deep)
    model = make(MLP)
    some = ZeROOne(torch.optim.AdamW(list(model.parameters())[:-2]))
    with pytest.raises(
        ValueError, match=r"hold other parameters .*: \[6\] parameters, there \[8\]"
    ):
        checkpoint.load_checkpoint(f"{folder}/saved", model, some)
    with pytest.raises(ValueError, match="a parameter that is not in the model"):
        checkpoint.load_checkpoint(f"{folder}/saved", model, adamw.optimizer)
    for a, b in zip(bits(adamw), before, strict=True):
        assert torch.equal(a, b)  # nothing was changed
    checkpoint.load_checkpoint(f"{folder}/saved", adamw.model, adamw.optimizer)
    for a, b in zip(bits(adamw), before, strict=True):
        assert torch.equal(a, b)


def test_what_is_no_checkpoint_of_this_run_is_refused_in_one_line(ranks, tmp_path):
    ranks(refused, 2, str(tmp_path))


def layouts(rank, world_size, folder):
    saved = built("zero1", ChannelsLast, "adamw")
    train(saved, rank, world_size, range(1))
    checkpoint.save_checkpoint(folder, saved.model, saved.optimizer)
    model = make(ChannelsLast)
    model.conv.to(memory_format=torch.contiguous_format)
    other = ZeROOne(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="conv.weight has another order in memory"):
        checkpoint.load_checkpoint(folder, model, other)


def test_another_layout_in_memory_is_refused(ranks, tmp_path):
    ranks(layouts, 2, str(tmp_path))


def scheduled(rank, world_size, folder):
    """A scheduler, two groups, a group added late, and a compiled model: all of it goes on."""
    variants = {}
    for which in ("went on", "resumed"):
        model = make(MLP)
        matrices = [p for p in model.layers[1:].parameters() if p.ndim > 1]
        others = [p for p in model.layers[1:].parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.3},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = ShardedOptimizer(torch.optim.AdamW, groups, lr=0.05)
        optimizer.add_param_group({"params": list(model.layers[0].parameters()), "lr": 0.2})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        compiled = torch.compile(model, backend="eager") if which == "resumed" else model
        variants[which] = (
            SimpleDDPBucketAsync(compiled, optimizer, Variant.cap),
            optimizer,
            schedule,
        )

    def go_on(which, steps):
        wrapped, _, schedule = variants[which]
        for i in steps:
            x, y = data(i, world_size)
            loss_of(wrapped, x[rank], y[rank]).backward()
            wrapped.wait_for_gradients()
            wrapped.wait_for_broadcasts()
            schedule.step()

    go_on("went on", range(3))
    wrapped, optimizer, schedule = variants["went on"]
    checkpoint.save_checkpoint(folder, wrapped, optimizer, {"schedule": schedule.state_dict()})
    wrapped, optimizer, schedule = variants["resumed"]
    schedule.load_state_dict(checkpoint.load_checkpoint(folder, wrapped, optimizer)["schedule"])
    for which in variants:
        go_on(which, range(3, 6))
    settings = [
        [(g["lr"], g["weight_decay"]) for g in o.param_groups] for _, o, _ in variants.values()
    ]
    assert settings[0] == settings[1] == [(0.05 / 8, 0.3), (0.05 / 8, 0.0), (0.2 / 8, 0.01)]
    parameters = [list(m.parameters()) for m, _, _ in variants.values()]
    assert all(torch.equal(p, q) for p, q in zip(*parameters, strict=True))


def test_a_schedule_groups_and_a_compiled_model_go_on(ranks, tmp_path):
    ranks(scheduled, 2, str(tmp_path))


class Counted(Normalised):
    """Has state that is no tensor."""

    forwards = 0

    def forward(self, x):
        self.forwards += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"forwards": self.forwards}

    def set_extra_state(self, state):
        self.forwards = state["forwards"]


def unequal(rank, world_size, folder):
    """What ranks need not agree on is saved as rank 0 has it, whoever writes the rest."""
    variant = built("zero1", Counted, "momentum")
    train(variant, rank, world_size, range(2))
    mine = [b.clone() for b in variant.model.buffers()]
    checkpoint.save_checkpoint(folder, variant.model, variant.optimizer, extra=f"rank {rank}")
    for old, b in zip(mine, variant.model.buffers(), strict=True):
        assert torch.equal(old, b)  # of this rank, as before
    variant.model.module.forwards = 0
    assert checkpoint.load_checkpoint(folder, variant.model, variant.optimizer) == "rank 0"
    assert variant.model.module.forwards == 2
    return [[b.tolist() for b in which] for which in (mine, variant.model.buffers())]


def test_buffers_and_extra_are_rank_0s(ranks, tmp_path):
    (first, resumed), *others = ranks(unequal, 4, str(tmp_path))
    assert resumed == first
    for mine, resumed in others:
        assert resumed == first != mine


# Data, and no more than was asked for


def saved_bytes(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def one_layer(rank, world_size):
    """Bytes that the file of one layer has beside the layer, for each class."""
    found = {}
    for name in ("zero1", "zero1-cap", "overlap", "flat", "flat-lazy"):
        large = [nn.Linear(64, 64) for _ in range(6)]
        model = nn.ModuleList([nn.Linear(6, 8), *large, nn.Linear(8, 3)]).double()
        if name == "zero1-cap":
            ZeROOne(torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=25)
        else:
            Variant(name, model, torch.optim.SGD, lr=0.1)
        for layer in (model[0], model[-1]):
            needed = sum(p.nbytes for p in layer.parameters())
            for value in (layer.state_dict(), layer, layer.weight, list(layer.parameters())):
                found[name, type(value).__name__] = saved_bytes(value) - needed
        assert saved_bytes(model.state_dict()) < sum(p.nbytes for p in model.parameters()) + 10_000
    return found


def test_saving_one_layer_saves_one_layer(ranks):
    for found in ranks(one_layer, 2):
        assert max(found.values()) < 4000, found


def another_dtype(rank, world_size, folder):
    for saved, here in ((torch.float64, torch.bfloat16), (torch.float32, torch.float64)):
        for name in ("zero1", "overlap", "flat"):
            where = f"{folder}/{name}-{saved}"
            cls, kwargs = OPTIMIZERS["adamw"]
            before = Variant(name, make(MLP).to(saved), cls, **kwargs)
            x, y = (t.to(saved) for t in data(0, world_size))
            loss_of(before.model, x[rank], y[rank]).backward()
            before.finish()
            checkpoint.save_checkpoint(where, before.model, before.optimizer)
            after = Variant(name, make(MLP).to(here), cls, **kwargs)
            values = [p.detach().clone() for p in after.model.parameters()]
            words = str(saved)[6:], str(here)[6:], "cast=True"
            with pytest.raises(ValueError) as caught:
                checkpoint.load_checkpoint(where, after.model, after.optimizer)
            assert all(word in str(caught.value) for word in words) and "layers.0.weight" in str(
                caught.value
            )
            assert all(
                torch.equal(p, v) for p, v in zip(after.model.parameters(), values, strict=True)
            )
            checkpoint.load_checkpoint(where, after.model, after.optimizer, cast=True)
            for p, q in zip(after.model.parameters(), before.model.parameters(), strict=True):
                assert torch.equal(p, q.to(here))


class KeepsFloat32(torch.optim.SGD):
    """Its state is in float32, whatever the parameters are in."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.float32))
                mean.mul_(0.9).add_(p.grad.float(), alpha=0.1)
                p.sub_((group["lr"] * mean).to(p.dtype))


def precise_state(rank, world_size, folder):
    for name in ("zero1", "flat"):
        variants = [Variant(name, make(MLP).bfloat16(), KeepsFloat32, lr=0.1) for _ in range(2)]
        x, y = (t.bfloat16() for t in data(0, world_size))
        loss_of(variants[0].model, x[rank], y[rank]).backward()
        variants[0].finish()
        checkpoint.save_checkpoint(f"{folder}/{name}", variants[0].model, variants[0].optimizer)
        checkpoint.load_checkpoint(f"{folder}/{name}", variants[1].model, variants[1].optimizer)
        for a, b in zip(bits(variants[0]), bits(variants[1]), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        assert all(s["mean"].dtype == torch.float32 for s in variants[1].optimizer.state.values())


def test_no_number_is_rounded_unless_asked(ranks, tmp_path):
    ranks(another_dtype, 2, str(tmp_path))
    ranks(precise_state, 2, str(tmp_path))


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def foreign(rank, world_size, folder):
    variant, exploded = built("flat", MLP, "adamw"), Path(folder, "exploded")
    train(variant, rank, world_size, range(1))
    checkpoint.save_checkpoint(f"{folder}/good", variant.model, variant.optimizer, {"step": 1})
    before = bits(variant)
    for extra in (Bomb(exploded), {"step": [1, Bomb(exploded)]}, torch.nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="extra is more than"):
            checkpoint.save_checkpoint(f"{folder}/never", variant.model, variant.optimizer, extra)
        exploded.unlink(missing_ok=True)  # what made it was this rank's own
    assert not Path(folder, "never", ".metadata").exists()
    dist.barrier()
    if rank == 0:
        metadata = Path(folder, "good", ".metadata").read_bytes()
        for name in ("index", "garbage", "escape"):
            shutil.copytree(f"{folder}/good", f"{folder}/{name}")
        Path(folder, "index", ".metadata").write_bytes(pickle.dumps([Bomb(exploded)]))
        Path(folder, "garbage", ".metadata").write_bytes(metadata[: len(metadata) // 2])
        index = json.loads(Path(folder, "escape", "model.safetensors.index.json").read_text())
        index["weight_map"] = dict.fromkeys(
            index["weight_map"], "../good/model-00001-of-00002.safetensors"
        )
        Path(folder, "escape", "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.MonkeyPatch.context() as patch:  # somebody saves what we would not
        patch.setattr(checkpoint, "check_data", lambda values: None)
        checkpoint.save_checkpoint(
            f"{folder}/bomb", variant.model, variant.optimizer, Bomb(exploded)
        )
    dist.barrier()
    for name in ("index", "garbage", "escape", "bomb"):
        with pytest.raises(ValueError) as caught:
            checkpoint.load_checkpoint(f"{folder}/{name}", variant.model, variant.optimizer)
        assert "\n" not in str(caught.value), name
    dist.barrier()
    assert not exploded.exists()
    for a, b in zip(bits(variant), before, strict=True):
        assert torch.equal(a, b)
    assert checkpoint.load_checkpoint(f"{folder}/good", variant.model, variant.optimizer) == {
        "step": 1
    }


def test_what_is_loaded_is_data_and_runs_nothing(ranks, tmp_path):
    ranks(foreign, 2, str(tmp_path))
