"""Buckets follow rank 0's gradients from the second step on; broadcasts in buckets change no bit."""

import pytest
import torch
import torch.distributed as dist

from zero1_helpers import (
    FlatShardedOptimizer,
    ShardedOptimizer,
    SimpleDDPAsync,
    SimpleDDPBucket,
    SimpleDDPReduceScatter,
    ZeROOne,
)
from zero1_helpers.zero import as_flat

from .models import MLP, ChannelsLast, Scalar, UnusedOnSomeRanks, Variant, data, loss_of, make


class OtherOrder(MLP):
    """Two layers of one shape, which rank 0 uses the other way round."""

    def forward(self, x):
        layers = list(self.layers[1:3])
        for layer in layers if dist.get_rank() else reversed(layers):
            x = torch.tanh(layer(x if x.shape[1] == 8 else torch.tanh(self.layers[0](x))))
        return self.layers[3](x)


def plans(rank, world_size):
    """Names in the plan before the first step, after it and after the second; and what arrived here."""
    model = make(OtherOrder)
    ddp = SimpleDDPAsync(model)
    names = {p: name for name, p in model.named_parameters()}
    seen, arrived = [], []
    for p in names:
        p.register_post_accumulate_grad_hook(lambda p: arrived.append(names[p]))
    for step in range(2):
        seen.append([names[b.params[0]] for b in ddp.buckets])
        x, y = data(step, world_size)
        loss_of(ddp, x[rank], y[rank]).backward()
        ddp.wait_for_gradients()
        ddp.zero_grad()
    return (
        [*seen, [names[b.params[0]] for b in ddp.buckets]],
        arrived[: len(names)],
        list(names.values()),
    )


def test_the_plan_is_rank_0s_order_of_arrival_on_every_rank(ranks):
    (first, arrived, names), *others = ranks(plans, 3)
    assert first[0] == names[::-1]
    assert first[1] == first[2] == arrived != first[0]
    for plan, arrived_there, _ in others:
        assert plan == first and arrived_there != arrived


def step_in_buckets(rank, world_size, cap):
    found, sent, real = [], [], dist.broadcast
    for bucket_cap_mb in (None, cap):
        model = make(MLP)
        ddp = SimpleDDPBucket(model, cap)
        optimizer = ZeROOne(
            torch.optim.Adam(model.parameters(), lr=0.1), bucket_cap_mb=bucket_cap_mb
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                dist, "broadcast", lambda t, **kwargs: sent.append(t.numel()) or real(t, **kwargs)
            )
            for step in range(3):
                x, y = data(step, world_size)
                loss_of(ddp, x[rank], y[rank]).backward()
                ddp.wait_for_gradients()
                sent.clear()
                optimizer.step()
                optimizer.zero_grad()
        found.append((torch.cat([p.detach().reshape(-1) for p in model.parameters()]), list(sent)))
    (plain, one_by_one), (bucketed, together) = found
    return torch.equal(plain, bucketed), one_by_one, together


@pytest.mark.parametrize(("cap", "calls"), [(0, 8), (25, 3)])
def test_broadcasts_in_buckets_send_the_same_in_fewer_calls(ranks, cap, calls):
    for equal, one_by_one, together in ranks(step_in_buckets, 3, cap):
        assert equal and len(one_by_one) == 8
        assert len(together) == calls and sum(together) == sum(one_by_one)


def launches(rank, world_size):
    """Names in each flat bucket, by launch, before and after the first step; and what arrived here."""
    model = make(OtherOrder)
    optimizer = FlatShardedOptimizer(torch.optim.SGD, model, 0, first_bucket_mb=0, lr=0.1)
    ddp = SimpleDDPReduceScatter(model, optimizer)
    names = {p: name for name, p in model.named_parameters()}
    weights, arrived, plans = [b.weights.data_ptr() for b in optimizer.buckets], [], []
    for p in names:
        p.register_post_accumulate_grad_hook(lambda p: arrived.append(names[p]))
    for step in range(2):
        plans.append([names[b.params[0]] for b in ddp.buckets])
        x, y = data(step, world_size)
        loss_of(ddp, x[rank], y[rank]).backward()
        optimizer.step()
    assert [b.index for b in ddp.buckets] == list(range(len(names)))
    assert [b.weights.data_ptr() for b in optimizer.buckets] == weights  # they stay where they lie
    return plans, arrived[: len(names)]


def test_flat_buckets_are_launched_as_they_fill_on_rank_0(ranks):
    (plans, arrived), *others = ranks(launches, 3)
    assert plans[1] == arrived != plans[0]
    assert all(its_plans == plans and its_arrived != arrived for its_plans, its_arrived in others)


@pytest.mark.parametrize("model_cls", [MLP, ChannelsLast, Scalar])
def test_parameters_that_travel_together_lie_together(model_cls):
    params = list(make(model_cls).parameters())
    before = [p.detach().clone() for p in params]
    flat = as_flat(params)
    assert flat.shape == (sum(p.numel() for p in params),)
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p, old) and p.stride() == old.stride()
    assert sum(p.numel() for p in params if not p.is_contiguous()) == (108 + 48) * (
        model_cls is ChannelsLast
    )
    assert as_flat(params).data_ptr() == flat.data_ptr()  # nothing is moved twice
    flat.zero_()
    assert all((p == 0).all() for p in params)  # it is their memory
    params[0].data = before[0]  # somebody gives one other memory
    moved = as_flat(params)
    assert moved.data_ptr() != flat.data_ptr() and torch.equal(params[0], before[0])
    assert float(moved.abs().sum()) == pytest.approx(float(before[0].abs().sum()))
    alone = torch.nn.Parameter(torch.ones(1).expand(6))  # six places that are one
    assert as_flat([alone]).add_(torch.arange(6)).tolist() == [1, 2, 3, 4, 5, 6]


def homes(rank, world_size, name):
    """Where the parameters lie after each step, the bytes of that memory, and those of the parameters; and
    how many broadcasts were on their way when some were moved."""
    variant = Variant(name, make(UnusedOnSomeRanks), torch.optim.AdamW, lr=0.01)
    params, seen, on_their_way = list(variant.model.module.parameters()), [], []
    real = variant.optimizer.lay_out

    def lay_out(params):
        on_their_way.append(len(variant.model._broadcasts))
        real(params)

    variant.optimizer.lay_out = lay_out
    for step in range(4):
        x, y = data(step % 2, world_size)  # the branch is taken in every other step
        loss_of(variant.model, x[rank], y[rank]).backward()
        variant.finish()
        storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in params)}
        seen.append(([p.data_ptr() for p in params], sum(storages.values())))
    return seen, sum(p.nbytes for p in params), on_their_way


@pytest.mark.parametrize("name", ["overlap", "overlap-after"])
def test_parameters_move_when_all_plan_anew_and_never_again(ranks, name):
    for (first, *later), needed, on_their_way in ranks(homes, 2, name):
        assert on_their_way and set(on_their_way) == {0}  # a broadcast writes where they lay
        assert all(at == first[0] and held == needed for at, held in later) and first[1] == needed


def versions(rank, world_size):
    """Of two optimizers, which parameters autograd knows to have changed, on a rank that owns few of them."""
    found = []
    for make_optimizer in (
        lambda model: ShardedOptimizer(torch.optim.SGD, model, lr=0.1),
        lambda model: ZeROOne(torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=1),
    ):
        optimizer = make_optimizer(make(MLP))
        before = [p._version for p in optimizer.params]
        for p in optimizer.params:
            p.grad = torch.ones_like(p)
        if isinstance(optimizer, ShardedOptimizer):
            for work in optimizer.step_parameters(optimizer.params):
                work.wait()
        else:
            optimizer.step()
        found.append([p._version > old for p, old in zip(optimizer.params, before, strict=True)])
    return found


def test_what_is_received_in_place_counts_as_changed(ranks):
    assert ranks(versions, 3) == [[[True] * 8] * 2] * 3


def strides(rank, world_size):
    model = make(MLP)
    if rank:
        weight = model.layers[1].weight
        weight.data = weight.data.t().contiguous().t()
    with pytest.raises(ValueError, match="strides"):
        SimpleDDPBucket(model)


def test_ranks_that_lay_out_a_parameter_differently_are_told(ranks):
    ranks(strides, 2)
