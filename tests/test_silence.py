"""What would go wrong without an error is done right, or refused on every rank in one line that helps."""

import copy
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from zero1_helpers import (
    FlatShardedOptimizer,
    ShardedOptimizer,
    SimpleDDP,
    SimpleDDPAsync,
    SimpleDDPBucket,
    SimpleDDPBucketAsync,
    SimpleDDPReduceScatter,
    ZeROOne,
    checkpoint,
    clip,
)

from .models import MLP, Variant, data, loss_of, make
from .test_faults import BEHIND, HOOKED
from .test_parity import bits_differ, max_difference

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
OPTIMIZERS = [
    lambda model: ZeROOne(SGD(model.parameters(), lr=0.1)),
    lambda model: ShardedOptimizer(SGD, model, lr=0.1),
    lambda model: FlatShardedOptimizer(SGD, model, lr=0.1),
]


def refused(call, *words, error=(RuntimeError, ValueError)):
    """It raises, in one line in which these words stand."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text


def backward(variant, rank, world_size, step=0):
    x, y = data(step, world_size)
    loss_of(variant.model, x[rank], y[rank]).backward()


# Gradients that nobody averaged


def forgotten(rank, world_size):
    for build, call in (
        (SimpleDDP, "sync_gradients"),
        (SimpleDDPAsync, "wait_for_gradients"),
        (SimpleDDPBucket, "wait_for_gradients"),
    ):
        for optimizer_of in OPTIMIZERS[:2]:
            model = make(MLP)
            before = copy.deepcopy(model)
            wrapped, optimizer = build(model), optimizer_of(model)
            x, y = data(0, world_size)
            loss_of(wrapped, x[rank], y[rank]).backward()
            refused(optimizer.step, call)
            assert max_difference(model, before) == 0
            getattr(wrapped, call)()
            optimizer.step()
            optimizer.zero_grad()
            assert max_difference(model, before) > 0 and not bits_differ(model)
            loss_of(wrapped, x[rank], y[rank]).backward()
            optimizer.zero_grad()  # a step that is skipped
            getattr(wrapped, call)()
            optimizer.step()
    wrapped, model = SimpleDDPBucket(model), model
    optimizer = ZeROOne(SGD(model.parameters(), lr=0.1))
    with wrapped.no_sync():
        loss_of(wrapped, x[rank], y[rank]).backward()
    refused(optimizer.step, "not averaged")
    model.zero_grad()
    for p in model.parameters():  # averaged by nobody that we know of
        p.grad = torch.full_like(p, float(rank))
    wrapped.remove()
    refused(ZeROOne(SGD(model.parameters(), lr=0.1)).step, "parameter 0", "differs between ranks")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    ZeROOne(SGD(model.parameters(), lr=0.1)).step()
    assert not bits_differ(model)


def test_a_step_before_the_gradients_are_averaged_is_refused(ranks):
    ranks(forgotten, 2)


class Weighted(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, loss):
        return loss * (-self.log_variance).exp() + self.log_variance


def outside(rank, world_size):
    x, y = data(0, world_size)
    model, weighted = make(MLP), Weighted()
    params = [*model.parameters(), *weighted.parameters()]
    refused(
        lambda: SimpleDDPBucketAsync(model, ShardedOptimizer(SGD, params, lr=0.1)), "parameter 8"
    )
    flat = FlatShardedOptimizer(SGD, params, lr=0.1)
    refused(lambda: SimpleDDPReduceScatter(model, flat), "not in the model")
    wrapped, optimizer = SimpleDDP(model), ZeROOne(SGD(params, lr=0.1))
    weighted(loss_of(wrapped, x[rank], y[rank])).sum().backward()
    wrapped.sync_gradients()
    refused(optimizer.step, "parameter 8", "in no wrapper")
    for build in ("overlap", "flat"):  # added when all is wrapped
        variant = Variant(build, make(MLP), SGD, lr=0.1)
        variant.optimizer.add_param_group({"params": list(weighted.parameters())})
        weighted(loss_of(variant.model, x[rank], y[rank])).sum().backward()
        refused(variant.finish, "not in the model")


def test_a_parameter_outside_the_wrapper_is_refused(ranks):
    ranks(outside, 2)


def groups(rank, world_size):
    """State shared by two ranks of a node, gradients meant over two nodes; and what cannot work."""
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, other = nodes[rank // 2], across[rank % 2]
    for name in ("zero1", "overlap"):
        model, reference = make(MLP), make(MLP)
        plain = ADAMW(reference.parameters(), lr=0.01)
        if name == "zero1":
            optimizer = ZeROOne(ADAMW(model.parameters(), lr=0.01), process_group=mine)
            wrapped = SimpleDDP(model)
        else:
            optimizer = ShardedOptimizer(ADAMW, model, lr=0.01, process_group=mine)
            wrapped = SimpleDDPBucketAsync(model, optimizer, Variant.cap)
        for step in range(3):
            x, y = data(step, world_size)
            loss_of(reference, x.flatten(0, 1), y.flatten(0, 1)).backward()
            plain.step()
            plain.zero_grad()
            loss_of(wrapped, x[rank], y[rank]).backward()
            if name == "zero1":
                wrapped.sync_gradients()
                optimizer.step()
                optimizer.zero_grad()
            else:
                wrapped.wait_for_gradients()
                wrapped.wait_for_broadcasts()
        assert max_difference(model, reference) <= 1e-9 and not bits_differ(model)
        assert len(optimizer.state) == 4  # half of 8 parameters
    model = make(MLP)
    wrapped = SimpleDDP(model, process_group=mine)
    refused(lambda: ZeROOne(SGD(model.parameters(), lr=0.1)), "process group")
    refused(lambda: ZeROOne(SGD(model.parameters(), lr=0.1), process_group=other), "process group")
    late = ZeROOne(SGD(make(MLP).parameters(), lr=0.1), process_group=other)
    wrapped = SimpleDDP(nn.ParameterList(late.params), process_group=mine)
    refused(late.step, "process group")
    sharded = ShardedOptimizer(SGD, make(MLP), lr=0.1, process_group=other)
    params = nn.ParameterList(sharded.params)
    refused(lambda: SimpleDDPBucketAsync(params, sharded, process_group=mine), "process group")
    flat = FlatShardedOptimizer(SGD, model, lr=0.1, process_group=mine)
    refused(lambda: SimpleDDPReduceScatter(model, flat, process_group=None), "process groups")


def test_parts_with_different_process_groups_are_right_or_refused(ranks):
    ranks(groups, 4)


# Gradients that are gone


def clipped_by_torch(rank, world_size):
    for name in HOOKED:
        variant = Variant(name, make(MLP), SGD, lr=0.1)
        for step in range(2):
            backward(variant, rank, world_size, step)
            params = list(variant.model.parameters())
            for averaged in (False, True):
                if averaged:
                    variant.model.wait_for_gradients()
                if name in BEHIND or not averaged:
                    refused(lambda: nn.utils.clip_grad_norm_(params, 1.0), "clip.clip_grad_norm_")  # noqa: B023
                    refused(
                        lambda params=params: [p.grad.norm() for p in params if p.grad is not None],
                        "step_in_backward",
                    )
            variant.finish()
            assert all(p.grad is None for p in variant.model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        x, y = data(0, world_size)
        scaler.scale(loss_of(variant.model, x[rank], y[rank])).backward()
        refused(lambda: scaler.step(variant.optimizer), "clip.scaler_step")  # noqa: B023
        variant.model.wait_for_gradients()
    variant.optimizer.zero_grad(set_to_none=False)


def test_gradients_that_a_bucket_has_taken_are_not_clipped_silently(ranks):
    ranks(clipped_by_torch, 2)


# A backward that raises


class Fails(MLP):
    """Its backward raises before the first layer's gradients, as one that runs out of memory does."""

    failing = False

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))
        if self.failing:
            x.register_hook(lambda grad: 1 / 0)
        for layer in self.layers[1:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


TORN = "torn", "abandon_step()", "heckpoint"


def torn(rank, world_size, folder):
    for name in HOOKED:
        variant = Variant(name, make(Fails), SGD, lr=0.1)
        model = variant.model.module
        backward(variant, rank, world_size)
        variant.finish()
        checkpoint.save_checkpoint(f"{folder}/{name}", variant.model, variant.optimizer)
        good = copy.deepcopy(model.state_dict())
        for way_out in ("abandon", "load"):
            model.failing = True
            with pytest.raises(ZeroDivisionError):
                backward(variant, rank, world_size, 1)
            model.failing = False
            refused(variant.finish, *TORN)
            refused(lambda: backward(variant, rank, world_size, 1), *TORN)  # noqa: B023
            refused(variant.optimizer.step, *TORN)
            save = checkpoint.save_checkpoint, f"{folder}/torn", variant.model, variant.optimizer
            refused(lambda: save[0](*save[1:]), *TORN)  # noqa: B023
            if way_out == "abandon":
                variant.model.abandon_step()
                if name not in BEHIND or name.endswith("after") and name.startswith("flat"):
                    assert all(torch.equal(p, good[key]) for key, p in model.state_dict().items())
            checkpoint.load_checkpoint(f"{folder}/{name}", variant.model, variant.optimizer)
            assert all(torch.equal(p, good[key]) for key, p in model.state_dict().items())
            reference = make(Fails)
            reference.load_state_dict(good)
            x, y = data(1, world_size)
            loss_of(reference, x.flatten(0, 1), y.flatten(0, 1)).backward()
            SGD(reference.parameters(), lr=0.1).step()
            backward(variant, rank, world_size, 1)
            variant.finish()
            assert max_difference(model, reference) <= 1e-9 and not bits_differ(model), (
                name,
                way_out,
            )
            model.load_state_dict(good)


def test_a_step_whose_backward_raised_is_torn_until_it_is_abandoned_or_loaded(ranks, tmp_path):
    ranks(torn, 2, str(tmp_path))


def two_players(rank, world_size):
    """A generator's backward goes through the discriminator."""
    x, _ = data(0, world_size)
    for name in HOOKED:
        generator = Variant(name, nn.Linear(6, 6).double(), SGD, lr=0.1)
        discriminator = Variant(name, make(MLP), SGD, lr=0.1)
        before = copy.deepcopy(discriminator.model.module)
        discriminator.model(generator.model(x[rank])).sum().backward()
        generator.finish()
        refused(lambda: discriminator.model(x[rank]), "no_sync()", "zero_grad()")  # noqa: B023
        discriminator.finish()  # said aloud
        discriminator = Variant(name, copy.deepcopy(before), SGD, lr=0.1)
        with discriminator.model.no_sync():  # the way out
            discriminator.model(generator.model(x[rank])).sum().backward()
        generator.finish()
        discriminator.optimizer.zero_grad()
        discriminator.model.zero_grad()
        assert max_difference(discriminator.model.module, before) == 0
        discriminator.model(x[rank]).sum().backward()
        discriminator.finish()


def test_another_models_backward_is_told_from_ones_own(ranks):
    ranks(two_players, 2)


# One wrapper for each parameter


class Pair(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, 3).double()

    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)))


def shared(rank, world_size):
    x, y = data(0, world_size)
    encoder = nn.Linear(6, 8).double()
    actor, critic = Pair(encoder), Pair(encoder)
    for build in (SimpleDDPAsync, SimpleDDPBucket):
        wrapped = build(actor)
        refused(lambda: build(critic), "encoder.weight", "remove()")  # noqa: B023
        refused(lambda: SimpleDDP(critic), "encoder.weight")
        refused(lambda: build(nn.Sequential(wrapped)), "0 of the model is a")  # noqa: B023
        refused(lambda: build(wrapped), "the model is a", ".module")  # noqa: B023
        refused(lambda: build(nn.parallel.DistributedDataParallel(make(MLP))), ".module")  # noqa: B023
        both = build(nn.Sequential(actor))  # the same parameters: takes the other's place
        both.remove()
    first, second = SimpleDDP(actor), SimpleDDP(critic)
    (loss_of(first, x[rank], y[rank]) + loss_of(second, x[rank], -y[rank])).backward()
    first.sync_gradients()
    second.sync_gradients()
    mean = encoder.weight.grad.clone()
    for model in (actor, critic):
        model.zero_grad()
    x, y = x.flatten(0, 1), y.flatten(0, 1)
    (loss_of(actor, x, y) + loss_of(critic, x, -y)).backward()
    assert torch.allclose(mean, encoder.weight.grad, atol=1e-12)
    ZeROOne(SGD([*actor.parameters(), *critic.head.parameters()], lr=0.1))


def test_wrappers_that_share_parameters_are_right_or_refused(ranks):
    ranks(shared, 2)


def attributes(rank, world_size):
    model = make(MLP)
    model.config = {"hidden": 8}
    for name in ("ddp", *HOOKED):
        wrapped = Variant(name, model, SGD, lr=0.1).model
        assert wrapped.config == {"hidden": 8} and wrapped.layers is model.layers
        with pytest.raises(AttributeError, match="missing"):
            wrapped.missing  # noqa: B018


def test_a_wrapper_has_its_models_attributes(ranks):
    ranks(attributes, 1)


# Odd tensors


class Odd(nn.Module):
    """Buffers of all kinds, all of them in use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3).double()
        tensors = {
            "int16": torch.arange(4, dtype=torch.int16),
            "uint16": torch.tensor([1, 2], dtype=torch.uint16),
            "fp8": torch.arange(4).to(torch.float8_e4m3fn),
            "bool": torch.tensor([True, False]),
            "complex": torch.tensor([1 + 2j, 3.0]),
            "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
            "transposed": torch.arange(6.0).view(2, 3).t(),
            "scalar": torch.tensor(3, dtype=torch.int16),
            "empty": torch.zeros(0, dtype=torch.int16),
        }
        for name, t in tensors.items():
            self.register_buffer(name, t)
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.linear(x)


def odd_buffers(rank, world_size):
    for name in ("ddp", "bucket", "overlap", "flat"):
        model = Odd()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1)
        variant = Variant(name, model, SGD, lr=0.1)
        backward(variant, rank, world_size)
        variant.finish()
        backward(variant, rank, world_size)
    for changed in ("int16", "complex", "frequencies", "transposed"):
        model = Odd()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1)
            getattr(model, changed).add_(rank)
        refused(lambda: SimpleDDP(model), f"{changed} differs")  # noqa: B023
        SimpleDDP(model, broadcast_parameters=True)
        assert torch.equal(getattr(model, changed), getattr(Odd(), changed))
        SimpleDDP(model)
    model.expanded = torch.tensor([[1.0], [2.0]]).add(rank).expand(2, 5)
    model.expanded_too = None
    SimpleDDP(model, broadcast_parameters=True)
    assert model.expanded.tolist() == [[1.0] * 5, [2.0] * 5]


def test_buffers_of_any_kind_are_sent_and_compared(ranks):
    ranks(odd_buffers, 2)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.real = nn.Parameter(torch.randn(6, 3, generator=g, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(6, 3, generator=g, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs() + x @ self.real


def complex_weights(rank, world_size):
    for name in ("zero1", "balanced", "sharded", "async", "bucket", "overlap"):
        reference, model = Complex(), Complex()
        plain = ADAMW(reference.parameters(), lr=0.01)
        variant = Variant(name, model, ADAMW, lr=0.01)
        for step in range(3):
            x, y = data(step, world_size)
            loss_of(reference, x.flatten(0, 1), y.flatten(0, 1)).backward()
            plain.step()
            plain.zero_grad()
            backward(variant, rank, world_size, step)
            variant.finish()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert float((p - q).detach().abs().max()) <= 1e-9, name
    refused(lambda: FlatShardedOptimizer(SGD, Complex(), lr=0.1), "complex", "ZeROOne")


def test_complex_weights_are_right_or_refused(ranks):
    ranks(complex_weights, 2)


def no_plain_tensors(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    parallel = nn.Linear(6, 4)
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight.detach(), mesh))
    with torch.device("meta"):
        meta = nn.Linear(6, 4)
    for model, word in ((nn.LazyLinear(4), "lazy"), (parallel, "DTensor"), (meta, "meta")):
        for build in (SimpleDDP, SimpleDDPAsync, SimpleDDPBucket):
            refused(lambda: build(model), "weight ", word)  # noqa: B023
        for build in OPTIMIZERS:
            refused(lambda: build(model), "parameter 0", word)  # noqa: B023
    lazy = nn.LazyLinear(4)
    lazy(torch.zeros(1, 6))
    SimpleDDP(lazy, broadcast_parameters=True)


def test_tensors_without_values_of_their_own_are_refused_by_name(ranks):
    ranks(no_plain_tensors, 2)


# Schedulers, hooks, batches


def scheduled(rank, world_size):
    for name in ("zero1", "overlap", "overlap-after", "flat", "flat-lazy"):
        variant = Variant(name, make(MLP), SGD, lr=0.1)
        fired = []
        variant.optimizer.register_step_pre_hook(lambda *args: fired.append("pre"))  # noqa: B023
        variant.optimizer.register_step_post_hook(lambda *args: fired.append("post"))  # noqa: B023
        schedule = torch.optim.lr_scheduler.StepLR(variant.optimizer, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                backward(variant, rank, world_size, step)
                if name.startswith("overlap"):  # the README's loop
                    variant.model.flush_bucket()
                    variant.model.wait_for_gradients()
                    variant.model.wait_for_broadcasts()
                else:
                    variant.finish()
                schedule.step()
                assert fired == ["pre", "post"] * (step + 1), name


def test_a_scheduler_and_step_hooks_hear_of_every_step_once(ranks):
    ranks(scheduled, 2)


def one_more(rank, world_size, name):
    """Rank 1 has one batch more. At which step it learns so, and what it says."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = make(MLP)
    if name.startswith("flat"):
        optimizer = FlatShardedOptimizer(SGD, model, Variant.cap, lr=0.1, process_group=group)
        wrapped = SimpleDDPReduceScatter(model, optimizer, lazy_gather=name == "flat-lazy")
        finish = optimizer.step
    elif name == "overlap":
        optimizer = ShardedOptimizer(SGD, model, lr=0.1, process_group=group)
        wrapped = SimpleDDPBucketAsync(model, optimizer, Variant.cap, process_group=group)
        finish = lambda: (wrapped.wait_for_gradients(), wrapped.wait_for_broadcasts())  # noqa: E731
    else:
        wrapped = (SimpleDDP if name == "ddp" else SimpleDDPBucket)(model, process_group=group)
        finish = wrapped.sync_gradients if name == "ddp" else wrapped.wait_for_gradients
    for step in range(2 + rank):
        x, y = data(step, world_size)
        try:
            loss_of(wrapped, x[rank], y[rank]).backward()
            finish()
        except RuntimeError as error:
            return step, str(error)


@pytest.mark.parametrize("name", ["ddp", "bucket", "overlap", "flat", "flat-lazy"])
def test_ranks_with_more_batches_than_others_end_with_a_line(ranks, name):
    first, second = ranks(one_more, 2, name, timeout=60)
    assert first is None
    step, text = second
    assert step == 2 and "different numbers of batches" in text and "\n" not in text


def clipping_still_works(rank, world_size):
    for name in ("zero1", "bucket", "flat-after"):
        variant = Variant(name, make(MLP), SGD, lr=0.1)
        backward(variant, rank, world_size)
        (variant.model.sync_gradients if name == "zero1" else variant.model.wait_for_gradients)()
        assert clip.clip_grad_norm_(variant.optimizer, 0.1) > 0
        variant.optimizer.step()


def test_the_way_out_that_the_messages_name_works(ranks):
    ranks(clipping_still_works, 2)
