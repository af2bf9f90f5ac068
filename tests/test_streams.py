"""No class uses memory before it is written, or gives it away while another stream has it queued."""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch

from zero1_helpers import FlatShardedOptimizer, SimpleDDPReduceScatter, clip, flat, overlap, streams

from .models import VARIANTS, UnusedOnSomeRanks, Variant, data, loss_of, make
from .streams import Stream, Work, pretend_gpu

OPTIONS = {
    "flat-master": {},
    "flat-master-lazy": {"lazy_gather": True},
    "flat-master-after": {"step_in_backward": False},
}


def built(name):
    model = make(UnusedOnSomeRanks)
    if name not in OPTIONS:
        return Variant(name, model, torch.optim.AdamW, lr=0.01)
    master = FlatShardedOptimizer(
        torch.optim.AdamW, model.float(), Variant.cap, master_weights=torch.float64, lr=0.01
    )
    variant = Variant.__new__(Variant)
    variant.name, variant.optimizer = name, master
    variant.model = SimpleDDPReduceScatter(model, master, **OPTIONS[name])
    return variant


def train(rank, world_size, name, plant=None):
    with plant() if plant else nullcontext(), pretend_gpu() as seen:
        variant = built(name)
        dtype = next(variant.model.parameters()).dtype
        for step in range(4):
            x, y = (t.to(dtype) for t in data(step, world_size))
            loss_of(variant.model, x[rank], y[rank]).backward()
            if name.endswith("after") and name.startswith("flat"):
                variant.model.wait_for_gradients()
                clip.clip_grad_norm_(variant.optimizer, 0.1)
            variant.finish()
            if step == 1:
                [p.detach().clone() for p in variant.model.module.parameters()]  # saving, say
        del variant
        gc.collect()
    return sorted(set(seen.faults)), seen.kernels


@pytest.mark.parametrize("name", [*VARIANTS, *OPTIONS])
def test_no_class_uses_memory_out_of_turn(ranks, name):
    for faults, kernels in ranks(train, 2, name):
        assert not faults
        assert kernels["compute"] > 100 and kernels["nccl"] > 10
        assert (kernels.get("side", 0) > 10) == name.startswith(("overlap", "flat"))


@contextmanager
def replaced(module, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, value)
        yield


def input_is_not_kept():
    """Only the output of the reduce-scatter is kept; its input is dropped after a wait on the side stream."""
    real = streams.on_stream

    def on_stream(stream, use=()):
        return real(
            stream, [t for t in use if t is None or t.numel() == min(u.numel() for u in use)]
        )

    return replaced(flat, "on_stream", on_stream)


def nothing_is_kept():
    return replaced(streams, "keep", lambda tensors, stream=None: None)


@contextmanager
def no_join():
    with (
        replaced(flat, "join", lambda stream: None),
        replaced(overlap, "join", lambda stream: None),
    ):
        yield


def no_wait_for_nccl():
    return replaced(Work, "wait", lambda work: setattr(work, "tensors", None))


def no_wait_on_the_way_in():
    real = Stream.wait_stream

    def wait_stream(self, other, upto=None):
        if self.name != "side" or upto is not None:
            real(self, other, upto)

    return replaced(Stream, "wait_stream", wait_stream)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("flat", input_is_not_kept),
        ("flat", nothing_is_kept),
        ("overlap", nothing_is_kept),
        ("flat", no_join),
        ("overlap", no_join),
        ("flat-after", no_join),
        ("flat-after", no_wait_on_the_way_in),
        ("bucket", no_wait_for_nccl),
        ("overlap", no_wait_for_nccl),
        ("flat", no_wait_for_nccl),
        ("flat-lazy", no_wait_for_nccl),
    ],
)
def test_a_planted_fault_of_streams_is_found(ranks, name, plant):
    assert all(faults for faults, _ in ranks(train, 2, name, plant))
