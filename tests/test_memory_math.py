"""Closed forms against the ZeRO paper and the post; exact predictions against real optimizers."""

import pytest
import torch
from torch import nn

from zero1_helpers.memory_math import (
    RECIPES,
    bytes_sent,
    model_states,
    nbytes,
    paper_table,
    predict,
    state_bytes,
)
from zero1_helpers.partition import by_bytes, by_count
from zero1_helpers.training.workload import meta_smol_model

from .models import MODELS, OPTIMIZERS, make


def test_the_papers_table():
    rows = {row["N"]: row for row in paper_table()}
    first = {n: round(row["stage 1"], 1) for n, row in rows.items()}
    assert first == {1: 120.0, 4: 52.5, 16: 35.6, 64: 31.4, 256: 30.4, 1024: 30.1}
    assert [round(rows[64][f"stage {s}"], 1) for s in (1, 2, 3)] == [31.4, 16.6, 1.9]


def test_bytes_per_parameter():
    assert {name: model_states(1, name)["total"] for name in RECIPES} == {
        "fp32": 16,
        "mixed": 16,
        "mixed-fp32-grads": 20,
        "bf16": 8,
    }
    assert model_states(1, "mixed", world_size=4)["total"] == 4 + 12 / 4
    saved = 1 - model_states(1, "mixed", world_size=4)["total"] / model_states(1, "mixed")["total"]
    assert round(saved, 4) == 0.5625
    assert model_states(1, "fp32", world_size=8)["total"] == 8 + 8 / 8
    for bad in ({"recipe": "fp8"}, {"stage": 4}, {"world_size": 0}):
        with pytest.raises(ValueError):
            model_states(1, **bad)


def test_the_real_model_on_the_meta_device():
    model = meta_smol_model("smollm2-360m")
    (whole,) = predict(model, torch.optim.Adam, partition=None)
    assert whole.params == whole.grads == 723_646_080
    assert whole.opt_state == 1_447_292_160 and whole.counters == 4 * 291
    by_tensor = [rank.opt_state for rank in predict(model, torch.optim.Adam, 4, by_count)]
    assert by_tensor == [4 * n for n in (125_844_480, 79_580_160, 78_965_760, 77_432_640)]
    balanced = [rank.opt_state for rank in predict(model, torch.optim.Adam, 4, by_bytes)]
    assert sum(balanced) == 1_447_292_160
    assert max(balanced) <= 362_496_000
    assert max(balanced) < 1.002 * sum(balanced) / 4


@pytest.mark.parametrize("model_cls", MODELS)
def test_the_prediction_is_what_an_optimizer_really_holds(model_cls):
    more = [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.SGD, {"lr": 0.1}),
    ]
    for cls, kwargs in [*OPTIMIZERS.values(), *more]:
        model = make(model_cls)
        optimizer = cls([p for p in model.parameters() if p.requires_grad], **kwargs)
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
        for asked in ((cls, kwargs), (optimizer, {})):
            (found,) = predict(model, asked[0], **asked[1])
            assert (found.opt_state, found.counters) == state_bytes(optimizer)
        assert found.grads == nbytes(p.grad for p in model.parameters() if p.grad is not None)
        assert found.params == nbytes(model.parameters())


def test_a_model_far_too_large_for_this_machine():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(50_000, 50_000, bias=False) for _ in range(3)])
    first, second = predict(model.bfloat16(), torch.optim.AdamW, 2)
    assert first.params == 15e9
    assert (first.opt_state, second.opt_state) == (20e9, 10e9)  # two tensors and one


def test_ring_volumes():
    assert bytes_sent("all_reduce", 100, 4) == 150
    assert bytes_sent("all_reduce", 100, 1) == bytes_sent("broadcast", 100, 1) == 0
    assert bytes_sent("reduce_scatter", 100, 4) + bytes_sent("all_gather", 100, 4) == 150
    with pytest.raises(ValueError, match="unknown collective 'gossip'"):
        bytes_sent("gossip", 100, 4)


def test_by_bytes_is_deterministic_and_even():
    sizes = [5, 9, 1, 1, 9, 3, 7, 2]
    params = [torch.empty(n) for n in sizes]
    owners = by_bytes(params, 3)
    assert owners == by_bytes(params, 3)
    load = [sum(n for n, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(3)]
    assert load == [13, 12, 12]
    assert by_bytes(params[:2], 4) == [1, 0]
