"""A wrapper and its hooks keep no model alive once nobody uses it any more."""

import gc
import weakref

import pytest

from .models import MLP, OPTIMIZERS, VARIANTS, Variant, data, loss_of, make


def what_outlives(rank, world_size, steps):
    left = {}
    for name in VARIANTS:
        cls, kwargs = OPTIMIZERS["adamw"]
        variant = Variant(name, model := make(MLP), cls, **kwargs)
        seen = [weakref.ref(model), *map(weakref.ref, model.parameters())]
        for step in range(steps):
            x, y = data(step, world_size)
            loss_of(variant.model, x[rank], y[rank]).backward()
            variant.finish()
        getattr(variant.optimizer, "receive", lambda: None)()
        del variant, model
        gc.collect()
        left[name] = sum(ref() is not None for ref in seen)
    return left


@pytest.mark.quick
@pytest.mark.parametrize("steps", [0, 2])
def test_nothing_of_a_model_outlives_its_last_use(ranks, steps):
    for left in ranks(what_outlives, 2, steps):
        assert not {name: count for name, count in left.items() if count}
