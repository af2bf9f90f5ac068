"""An optimizer that a class would step wrongly is refused when the class is made; the others train alike."""

import re
from pathlib import Path

import pytest
import torch

from zero1_helpers import (
    FlatShardedOptimizer,
    ShardedOptimizer,
    SimpleDDP,
    SimpleDDPBucketAsync,
    SimpleDDPReduceScatter,
    ZeROOne,
)

from .models import MLP, Variant, data, loss_of, make
from .optimizers import ANYWHERE, NOWHERE, WHOLE, CountInOptimizer, Own
from .test_parity import max_difference

TORCHS = [
    getattr(torch.optim, name)
    for name in "SGD AdamW RMSprop Adagrad NAdam Adamax RAdam Rprop ASGD Adadelta".split()
]
KINDS = ZeROOne, ShardedOptimizer, FlatShardedOptimizer


def sharded(kind, cls, model, **kwargs):
    if kind is ZeROOne:
        return ZeROOne(cls(model.parameters() if hasattr(model, "parameters") else model, **kwargs))
    return kind(cls, model, **kwargs)


def takes(kind, cls):
    try:
        sharded(kind, cls, make(MLP), lr=0.1)
    except ValueError as error:
        assert cls.__name__ in str(error) and "\n" not in str(error)
        return False
    return True


def accepted(rank, world_size):
    before = torch.random.get_rng_state()
    every = [*TORCHS, *ANYWHERE, *WHOLE, *NOWHERE]
    found = {k.__name__: [cls.__name__ for cls in every if takes(k, cls)] for k in KINDS}
    model = make(MLP)
    torch.random.set_rng_state(before)
    sharded(ZeROOne, Own, model)
    assert torch.equal(torch.random.get_rng_state(), before)  # a trial takes no random numbers
    matrices = [p for p in model.parameters() if p.ndim == 2]
    ZeROOne(torch.optim.Muon(matrices, lr=0.1))  # which takes nothing but matrices
    for bad in ([{"params": matrices, "lr": 0.0}], matrices):  # a warm-up hides nothing
        with pytest.raises(ValueError):
            ShardedOptimizer(CountInOptimizer, bad, lr=0.0)
    return found


def test_each_class_takes_what_it_steps_rightly_and_refuses_the_rest(ranks):
    names = [cls.__name__ for cls in [*TORCHS, *ANYWHERE]]
    whole = [cls.__name__ for cls in WHOLE]
    for found in ranks(accepted, 2):
        # a count of calls is right where there is one call a step, if nobody keeps it in a group
        assert found["ZeROOne"] == [*names, *whole, "CountInOptimizer"]
        assert found["ShardedOptimizer"] == [*names, *whole]
        assert found["FlatShardedOptimizer"] == names


def trained(rank, world_size):
    worst = {}
    for kind in KINDS:
        for cls in [*TORCHS, *ANYWHERE, *(WHOLE if kind is not FlatShardedOptimizer else [])]:
            reference, model = make(MLP), make(MLP)
            plain, optimizer = cls(reference.parameters(), lr=0.01), None
            if kind is FlatShardedOptimizer:
                optimizer = kind(cls, model, Variant.cap, lr=0.01)
                wrapped = SimpleDDPReduceScatter(model, optimizer)
            else:
                optimizer = sharded(kind, cls, model, lr=0.01)
                wrapped = SimpleDDP(model)
            if kind is ShardedOptimizer:
                wrapped = SimpleDDPBucketAsync(model, optimizer, Variant.cap)
            for step in range(3):
                x, y = data(step, world_size)
                loss_of(reference, x.flatten(0, 1), y.flatten(0, 1)).backward()
                plain.step()
                plain.zero_grad()
                loss_of(wrapped, x[rank], y[rank]).backward()
                if kind is ZeROOne:
                    wrapped.sync_gradients()
                elif kind is ShardedOptimizer:
                    wrapped.wait_for_gradients()
                    wrapped.wait_for_broadcasts()
                optimizer.step()
                optimizer.zero_grad()
            worst[kind.__name__, cls.__name__] = max_difference(model, reference)
    return worst


def test_what_is_taken_trains_as_in_one_process(ranks):
    for worst in ranks(trained, 2):
        assert len(worst) == 3 * len(TORCHS) + 7
        assert max(worst.values()) <= 1e-9, worst


def test_every_line_of_which_class_names_a_test():
    here = Path(__file__).parent
    tests = {
        name
        for f in here.glob("test_*.py")
        for name in re.findall(r"def (test_\w+)", f.read_text())
    }
    rows = [
        line.split("|")[1:-1]
        for line in (here.parent / "docs" / "which-class.md").read_text().splitlines()
        if line.startswith("| ") and not line.endswith("| test |")
    ]
    assert len(rows) > 25
    last = set()
    for row in rows:
        named = last if row[-1].strip() == "the same" else set(re.findall(r"`(test_\w+)`", row[-1]))
        assert named and named <= tests, row
        last = named
