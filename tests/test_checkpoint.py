"""A run saved from N ranks goes on with M, with any of the classes: DCP's files, this project's pieces."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from zero1_helpers import ZeROOne, checkpoint
from zero1_helpers.memory_math import state_bytes

from .models import MLP, OPTIMIZERS, ChannelsLast, Scalar, Unused, Variant, data, loss_of, make
from .test_parity import max_difference
from .test_practice import calm, step_alone

NAMES = ["zero1", "balanced", "sharded", "overlap", "flat", "flat-lazy", "flat-after"]


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
    for entry in variant.optimizer.state.values():
        found += [value.clone() for _, value in sorted(entry.items()) if isinstance(value, torch.Tensor)]
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
    return plain.state_dict()["state"]
