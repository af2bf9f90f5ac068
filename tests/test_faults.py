"""Faults that users of hand-made data parallelism and sharded optimizers hit; each must not happen,
or must raise. And faults planted on purpose, which the parity check must see."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero1_helpers import (
    FlatShardedOptimizer,
    ShardedOptimizer,
    SimpleDDP,
    SimpleDDPAsync,
    SimpleDDPBucket,
    SimpleDDPBucketAsync,
    SimpleDDPReduceScatter,
    ZeROOne,
    by_bytes,
    by_count,
    ddp,
    flat_bucket,
    zero,
)
from zero1_helpers.memory_math import predict, state_bytes
from zero1_helpers.partition import shard_range

from .models import (
    MLP,
    OPTIMIZERS,
    VARIANTS,
    Unused,
    UnusedOnSomeRanks,
    Variant,
    data,
    loss_of,
    make,
)
from .test_parity import bits_differ, max_difference

HOOKED = [name for name in VARIANTS if name not in ("ddp", "zero1", "balanced", "sharded")]
BEHIND = [name for name in VARIANTS if name.startswith(("overlap", "flat"))]
AFTER = [name for name in VARIANTS if name not in BEHIND]  # gradients are seen whole


def single(model, optimizer, step, world_size, before_step=lambda params: None):
    """The same step in one process that sees all the data."""
    x, y = data(step, world_size)
    loss_of(model, x.flatten(0, 1), y.flatten(0, 1)).backward()
    before_step(list(model.parameters()))
    optimizer.step()
    optimizer.zero_grad()


def both(name, model_cls=MLP, optimizer_name="adamw"):
    cls, kwargs = OPTIMIZERS[optimizer_name]
    reference = make(model_cls)
    return (
        Variant(name, make(model_cls), cls, **kwargs),
        reference,
        cls(reference.parameters(), **kwargs),
    )


# The start


def unequal_start(rank, world_size):
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match=r"not synced across ranks: layers.0.weight differs"):
        SimpleDDP(MLP())
    with pytest.raises(ValueError, match="not the same on all ranks"):
        SimpleDDP(nn.Linear(3 + rank, 2))
    with pytest.raises(ValueError, match="not the same on all ranks"):
        SimpleDDP(MLP().requires_grad_(rank == 0))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].running_mean += rank
    SimpleDDP(model, broadcast_parameters=True)
    assert not bits_differ(model)
    assert model[1].running_mean.abs().sum() == 0
    SimpleDDP(model)
    model[1].running_mean += rank
    with pytest.raises(ValueError, match="1.running_mean differs"):
        SimpleDDP(model)


def test_ranks_that_start_unequal_raise_everywhere_or_take_rank_0s_values(ranks):
    ranks(unequal_start, 3)


def test_without_a_process_group_there_is_one_clear_line():
    with pytest.raises(RuntimeError, match="init_process_group"):
        SimpleDDP(MLP())


class Halves(nn.Module):
    """Its gradients are what it is given."""

    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList([torch.zeros(n, dtype=torch.float16) for n in (3, 5, 1)])

    def forward(self, grad):
        return sum((p * grad).sum() for p in self.params)


def large_in_fp16(rank, world_size):
    """Means that fp16 holds and sums that it does not; and small numbers, which are not lost."""
    found = {}
    for name in VARIANTS:
        for grad in (40_000.0, -60_000.0, 2.0**-12):
            model = Halves()
            variant = Variant(name, model, torch.optim.SGD, lr=1.0)
            variant.model(torch.tensor(grad, dtype=torch.float16)).backward()
            variant.finish()
            off = [float((p.detach() / grad + 1).abs().max()) for p in model.parameters()]
            found[name, grad] = max(off)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_divided_before_they_are_added(ranks, world_size):
    for found in ranks(large_in_fp16, world_size):
        assert max(found.values()) <= 2e-3, found


def batch_norm(rank, world_size):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    wrapped = SimpleDDPBucket(model)
    for step in range(3):
        x, y = data(step, world_size)
        loss_of(wrapped, x[rank], y[rank]).backward()
        wrapped.wait_for_gradients()
    wrapped(data(3, world_size)[0][rank])  # sends rank 0's statistics, then adds this batch to them
    seen = [torch.zeros(4, dtype=torch.float64) for _ in range(world_size)]
    dist.all_gather(seen, model[1].running_mean)
    x0 = model[0](data(3, world_size)[0][rank]).mean(0) * 0.1  # what this rank's batch added
    starts = [torch.zeros(4, dtype=torch.float64) for _ in range(world_size)]
    dist.all_gather(starts, (model[1].running_mean - x0).detach())
    assert all(torch.allclose(start, starts[0], atol=1e-12) for start in starts)
    assert not torch.equal(seen[0], seen[1])  # between forwards each rank has its own


def test_buffers_are_rank_0s_in_every_training_forward(ranks):
    ranks(batch_norm, 2)


# Hooks


def wrap_again(rank, world_size):
    model, calls = make(MLP), []
    for _ in range(3):
        wrapped = SimpleDDPAsync(model)
    SimpleDDPBucket(model)
    wrapped = SimpleDDPAsync(model)
    real = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *a, **k: calls.append(0) or real(*a, **k))
        x, y = data(0, world_size)
        loss_of(wrapped, x[rank], y[rank]).backward()
        wrapped.wait_for_gradients()
    assert len(calls) == len(list(model.parameters()))
    reference = make(MLP)
    loss_of(reference, x.flatten(0, 1), y.flatten(0, 1)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)

    wrapped.remove()
    model.zero_grad()
    loss_of(model, x[rank], y[rank]).backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    alone = make(MLP)
    loss_of(alone, x[rank], y[rank]).backward()
    assert all(torch.equal(g, q.grad) for g, q in zip(mine, alone.parameters(), strict=True))


def test_wrapping_again_does_not_sync_twice_and_remove_leaves_no_hook(ranks):
    ranks(wrap_again, 2)


def out_of_order(rank, world_size):
    x, y = data(0, world_size)
    for name in HOOKED:
        variant, _, _ = both(name)
        loss = loss_of(variant.model, x[rank], y[rank])
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="no_sync|modified by an inplace operation"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"call wait_for_(gradients|broadcasts)\(\) first"):
            variant.model(x[rank])
        with torch.no_grad():
            variant.model.module(x[rank])


def test_a_second_gradient_or_a_forward_before_the_end_raises(ranks):
    ranks(out_of_order, 2)


def forgot_broadcasts(rank, world_size):
    for name in ("overlap", "flat", "flat-lazy"):
        variant, _, _ = both(name)
        x, y = data(0, world_size)
        loss_of(variant.model, x[rank], y[rank]).backward()
        variant.finish()  # after the first step all plan anew, and wait for all that is on its way
        loss_of(variant.model, x[rank], y[rank]).backward()
        variant.model.wait_for_gradients()
        with pytest.raises(RuntimeError, match="wait_for_broadcasts"):
            variant.model(x[rank])
        variant.model.wait_for_broadcasts()
        variant.model(x[rank])


def test_a_forward_before_the_broadcasts_arrived_raises(ranks):
    ranks(forgot_broadcasts, 2)


def micro_batches(rank, world_size):
    for name in VARIANTS:
        variant, reference, optimizer = both(name, UnusedOnSomeRanks, "momentum")
        for step in range(3):
            for micro in range(3):
                x, y = data(10 * step + micro, world_size)
                loss_of(reference, x.flatten(0, 1), y.flatten(0, 1)).backward()
                last = micro == 2 or name not in HOOKED
                with nullcontext() if last else variant.model.no_sync():
                    loss_of(variant.model, x[rank], y[rank]).backward()
            variant.finish()
            optimizer.step()
            optimizer.zero_grad()
            assert max_difference(variant.model, reference) <= 1e-9, name
            assert not bits_differ(variant.model)


def test_micro_batches_reduce_their_sum_once(ranks):
    ranks(micro_batches, 3)


def unfreeze(rank, world_size):
    for name in ("ddp", "async", "overlap", "flat"):
        model = make(MLP)
        model.layers[2].requires_grad_(False)
        variant = Variant(name, model, torch.optim.SGD, lr=0.1)
        model.layers[2].requires_grad_(True)
        x, y = data(0, world_size)
        loss_of(variant.model, x[rank], y[rank]).backward()
        with pytest.raises(RuntimeError, match="layers.2.weight became trainable"):
            variant.finish()


def test_a_parameter_that_became_trainable_raises(ranks):
    ranks(unfreeze, 2)


def sparse(rank, world_size):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))
    torch.manual_seed(0)
    wrapped = SimpleDDP(model, broadcast_parameters=True)
    wrapped(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="gradient of 0.weight is sparse"):
        wrapped.sync_gradients()


def test_a_sparse_gradient_is_refused_by_name(ranks):
    ranks(sparse, 2)


class Checkpointed(MLP):
    """Layers recomputed in backward; with `shared`, one layer inside two checkpoints."""

    reentrant, shared = False, False

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))
        for layer in (self.layers[1], self.layers[1 if self.shared else 2]):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return self.layers[3](x)


def recompute(rank, world_size):
    for shared, reentrant in ((False, False), (True, False), (False, True)):
        Checkpointed.shared, Checkpointed.reentrant = shared, reentrant
        for name in VARIANTS:
            variant, reference, optimizer = both(name, Checkpointed)
            for step in range(2):
                single(reference, optimizer, step, world_size)
                x, y = data(step, world_size)
                loss_of(variant.model, x[rank], y[rank]).backward()
                variant.finish()
            assert max_difference(variant.model, reference) <= 1e-9, (name, shared, reentrant)
    Checkpointed.shared, Checkpointed.reentrant = True, True  # the hook fires once per checkpoint
    for name in HOOKED:
        variant, _, _ = both(name, Checkpointed)
        with pytest.raises(RuntimeError, match="second gradient|inplace operation"):
            loss_of(variant.model, x[rank], y[rank]).backward()


def test_activation_checkpointing_is_right_or_raises(ranks):
    ranks(recompute, 2)


class ReadsLate(torch.autograd.Function):
    """Saves a weight and reads its value in backward, after the weight's own gradient is complete."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0], None


class ReadLate(MLP):
    def forward(self, x):
        x = ReadsLate.apply(torch.tanh(self.layers[0](x)), self.layers[2].weight.detach())
        for layer in self.layers[1:3]:
            x = torch.tanh(layer(x))
        return self.layers[3](x)


def read_late(rank, world_size):
    x, y = data(0, world_size)
    for name in ("overlap-after", "flat-after"):
        variant, reference, optimizer = both(name, ReadLate)
        single(reference, optimizer, 0, world_size)
        loss_of(variant.model, x[rank], y[rank]).backward()
        variant.finish()
        assert max_difference(variant.model, reference) <= 1e-9
    for name in ("overlap-lag0", "flat-lag0"):
        variant, _, _ = both(name, ReadLate)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(variant.model, x[rank], y[rank]).backward()


def test_a_value_that_backward_still_reads_is_not_stepped_silently(ranks):
    ranks(read_late, 1)


# Order


def record_order(rank, world_size, name):
    """The collectives that this rank issued, while ranks stumble at different moments."""
    issued = []
    variant, _, _ = both(name, UnusedOnSomeRanks)
    g = torch.Generator().manual_seed(rank)
    for p in variant.model.parameters():
        p.register_hook(
            lambda grad: torch.rand(int(torch.randint(1, 30000, (), generator=g))).sort() and None
        )
    with pytest.MonkeyPatch.context() as patch:
        for module, op in (
            (dist, "all_reduce"),
            (dist, "broadcast"),
            (flat_bucket, "reduce_scatter"),
            (flat_bucket, "all_gather"),
        ):
            real = getattr(module, op)

            def note(tensor, *args, op=op, real=real, **kwargs):
                issued.append((op, tuple(tensor.shape), kwargs.get("group_src")))
                return real(tensor, *args, **kwargs)

            patch.setattr(module, op, note)
        for step in range(3):
            x, y = data(step, world_size)
            loss_of(variant.model, x[rank], y[rank]).backward()
            variant.finish()
    return issued


@pytest.mark.parametrize("name", VARIANTS)
def test_every_rank_issues_the_same_collectives_in_the_same_order(ranks, name):
    first, *others = ranks(record_order, 3, name)
    assert len(first) > 6
    assert all(issued == first for issued in others)


# The optimizer


def shards(rank, world_size):
    """State that this rank holds, and what was predicted for it, per optimizer and partition."""
    found = []
    for cls, kwargs in [*OPTIMIZERS.values(), (torch.optim.Adam, {"amsgrad": True})]:
        for partition in (by_count, by_bytes):
            for kind in (ZeROOne, ShardedOptimizer):
                model = make(Unused)
                if kind is ZeROOne:
                    optimizer = ZeROOne(cls(model.parameters(), **kwargs), partition=partition)
                else:
                    optimizer = ShardedOptimizer(cls, model, partition=partition, **kwargs)
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
                predicted = predict(model, cls, world_size, partition, **kwargs)[rank]
                found.append((state_bytes(optimizer), (predicted.opt_state, predicted.counters)))
                assert all(optimizer.is_mine(p) for p in optimizer.state)
    whole = predict(make(Unused), cls, **kwargs)[0].opt_state
    return found, whole


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_is_sharded_exactly_as_predicted(ranks, world_size):
    results = ranks(shards, world_size)
    for found, _ in results:
        assert all(held == predicted for held, predicted in found)
    assert sum(found[-1][0][0] for found, _ in results) == results[0][1]


def wrap_late(rank, world_size):
    """An optimizer that has already stepped, or whose whole state is loaded, keeps only its shard."""
    reference = make(MLP)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    single(reference, optimizer, 0, world_size)
    whole = copy.deepcopy(optimizer.state_dict())
    for load in (False, True):
        model = make(MLP)
        model.load_state_dict(reference.state_dict())
        inner = torch.optim.Adam(model.parameters(), lr=0.5 if load else 0.01)
        if not load:
            inner.load_state_dict(copy.deepcopy(whole))
        sharded = ZeROOne(inner)
        if load:
            sharded.load_state_dict(copy.deepcopy(whole))
        assert all(sharded.is_mine(p) for p in sharded.state)
        follower, follower_optimizer = copy.deepcopy((reference, optimizer))
        wrapped = SimpleDDP(model)
        for step in (1, 2):
            single(follower, follower_optimizer, step, world_size)
            x, y = data(step, world_size)
            loss_of(wrapped, x[rank], y[rank]).backward()
            wrapped.sync_gradients()
            sharded.step()
            sharded.zero_grad()
        assert max_difference(model, follower) <= 1e-9
    with pytest.raises(RuntimeError, match="shard of this rank only"):
        sharded.state_dict()


def test_state_from_before_is_kept_for_the_shard_and_dropped_for_the_rest(ranks):
    ranks(wrap_late, 2)


def schedules(rank, world_size):
    for name in VARIANTS:
        variant, reference, optimizer = both(name)
        schedule = torch.optim.lr_scheduler.StepLR(variant.optimizer, 1, gamma=0.3)
        reference_schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)
        for step in range(3):
            single(reference, optimizer, step, world_size)
            reference_schedule.step()
            x, y = data(step, world_size)
            loss_of(variant.model, x[rank], y[rank]).backward()
            variant.finish()
            schedule.step()
        assert variant.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.001
        assert max_difference(variant.model, reference) <= 1e-9, name


def test_a_scheduler_sets_the_lr_that_is_used(ranks):
    ranks(schedules, 2)


def groups(rank, world_size):
    def split(model):
        matrices = [p for p in model.parameters() if p.ndim > 1]
        return [
            {"params": matrices, "weight_decay": 0.3},
            {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.05},
        ]

    for sharded in (ZeROOne, ShardedOptimizer, FlatShardedOptimizer):
        reference, model = make(MLP), make(MLP)
        optimizer = torch.optim.AdamW(split(reference), lr=0.01, weight_decay=0)
        if sharded is ZeROOne:
            zero1 = ZeROOne(torch.optim.AdamW(split(model), lr=0.01, weight_decay=0))
            wrapped = SimpleDDP(model)
        elif sharded is ShardedOptimizer:
            zero1 = ShardedOptimizer(torch.optim.AdamW, split(model), lr=0.01, weight_decay=0)
            wrapped = SimpleDDPBucketAsync(model, zero1, bucket_cap_mb=Variant.cap)
        else:  # one bucket may hold several groups
            zero1 = FlatShardedOptimizer(
                torch.optim.AdamW, split(model), Variant.cap, lr=0.01, weight_decay=0
            )
            wrapped = SimpleDDPReduceScatter(model, zero1)
        for step in range(3):
            single(reference, optimizer, step, world_size)
            x, y = data(step, world_size)
            loss_of(wrapped, x[rank], y[rank]).backward()
            if sharded is ZeROOne:
                wrapped.sync_gradients()
                zero1.step()
                zero1.zero_grad()
            else:
                wrapped.wait_for_gradients()
                wrapped.wait_for_broadcasts()
        assert max_difference(model, reference) <= 1e-9


def test_parameter_groups_keep_their_settings(ranks):
    ranks(groups, 3)


def late_group(rank, world_size):
    reference, model = make(MLP), make(MLP)
    optimizer = torch.optim.AdamW(list(reference.parameters())[:-2], lr=0.01)
    zero1 = ZeROOne(torch.optim.AdamW(list(model.parameters())[:-2], lr=0.01))
    wrapped = SimpleDDP(model)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(reference.parameters())[-2:], "lr": 0.1})
            zero1.add_param_group({"params": list(model.parameters())[-2:], "lr": 0.1})
        single(reference, optimizer, step, world_size)
        reference.zero_grad()
        x, y = data(step, world_size)
        loss_of(wrapped, x[rank], y[rank]).backward()
        wrapped.sync_gradients()
        zero1.step()
        model.zero_grad()
        assert max_difference(model, reference) <= 1e-9
    assert not bits_differ(model)


def test_a_group_added_later_is_sharded_too(ranks):
    ranks(late_group, 2)


def zeroed(rank, world_size):
    for name in VARIANTS:
        variant, reference, optimizer = both(name)
        for step in range(3):
            x, y = data(step, world_size)
            loss_of(variant.model, x[rank], y[rank]).backward()
            variant.optimizer.zero_grad()  # what no rank asked for is dropped, on all ranks
            assert all(p.grad is None for p in variant.model.parameters())
            if name in HOOKED:
                variant.model.wait_for_gradients()
            if name in BEHIND:
                variant.model.wait_for_broadcasts()
                break
            variant.optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step % 2:
                assert all(
                    p.grad is None or p.grad.abs().sum() == 0 for p in variant.model.parameters()
                )
    for name in AFTER:  # gradients kept as zeros, step after step
        variant, reference, optimizer = both(name)
        for step in range(3):
            single(reference, optimizer, step, world_size)
            x, y = data(step, world_size)
            zero_grad = variant.optimizer.zero_grad
            variant.optimizer.zero_grad = lambda zero_grad=zero_grad: zero_grad(set_to_none=False)
            loss_of(variant.model, x[rank], y[rank]).backward()
            variant.finish()
            variant.optimizer.zero_grad = zero_grad
        assert max_difference(variant.model, reference) <= 1e-9, name


def test_zero_grad_clears_every_gradient_and_not_only_the_shards(ranks):
    ranks(zeroed, 2)


def clipped(rank, world_size):
    for name in AFTER:
        variant, reference, optimizer = both(name, optimizer_name="sgd")
        clip = lambda params: nn.utils.clip_grad_norm_(params, 0.05)  # noqa: E731
        zero1_step = variant.optimizer.step
        everything = [p for g in variant.optimizer.param_groups for p in g["params"]]
        variant.optimizer.step = lambda: (clip(everything), zero1_step())  # noqa: B023
        for step in range(3):
            single(reference, optimizer, step, world_size, before_step=clip)
            x, y = data(step, world_size)
            loss_of(variant.model, x[rank], y[rank]).backward()
            variant.finish()
        assert max_difference(variant.model, reference) <= 1e-9, name


def test_clipping_uses_the_norm_of_all_parameters(ranks):
    ranks(clipped, 3)


def subgroup(rank, world_size):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    position = {0: 0, 2: 1}[rank]
    for name in ("zero1", "overlap", "flat"):
        model, reference = make(MLP), make(MLP)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        if name == "zero1":
            zero1 = ZeROOne(torch.optim.SGD(model.parameters(), lr=0.1), process_group=group)
            wrapped = SimpleDDP(model, process_group=group)
        elif name == "flat":
            zero1 = FlatShardedOptimizer(
                torch.optim.SGD, model, Variant.cap, lr=0.1, process_group=group
            )
            wrapped = SimpleDDPReduceScatter(model, zero1)
        else:
            zero1 = ShardedOptimizer(torch.optim.SGD, model, lr=0.1, process_group=group)
            wrapped = SimpleDDPBucketAsync(model, zero1, Variant.cap, process_group=group)
        for step in range(2):
            single(reference, optimizer, step, 2)
            x, y = data(step, 2)
            loss_of(wrapped, x[position], y[position]).backward()
            if name == "zero1":
                wrapped.sync_gradients()
                zero1.step()
                zero1.zero_grad()
            else:
                wrapped.wait_for_gradients()
                wrapped.wait_for_broadcasts()
        assert max_difference(model, reference) <= 1e-9


def test_a_group_of_some_ranks_works_alone(ranks):
    ranks(subgroup, 3)


def refused(rank, world_size):
    model = make(MLP)
    other = ShardedOptimizer(torch.optim.SGD, make(MLP), lr=0.1)
    with pytest.raises(ValueError, match="layers.0.weight is not in the optimizer"):
        SimpleDDPBucketAsync(model, other)
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        SimpleDDPBucket(model, bucket_cap_mb=-1)
    mine = ShardedOptimizer(torch.optim.SGD, model, lr=0.1)
    with pytest.raises(ValueError, match="lag"):
        SimpleDDPBucketAsync(model, mine, lag=-1)
    mine = FlatShardedOptimizer(torch.optim.SGD, model, lr=0.1)
    with pytest.raises(ValueError, match="lag"):
        SimpleDDPReduceScatter(model, mine, lag=-1)
    with pytest.raises(ValueError, match="layers.0.weight is not in the optimizer"):
        SimpleDDPReduceScatter(make(MLP), mine)
    with pytest.raises(ValueError, match="is not in the model"):
        larger = FlatShardedOptimizer(torch.optim.SGD, nn.ModuleList([model, MLP()]), lr=0.1)
        SimpleDDPReduceScatter(model, larger)
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        FlatShardedOptimizer(torch.optim.SGD, model, -1, lr=0.1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="gave 1 owners for 8 parameters"):
        ZeROOne(sgd, partition=lambda params, world_size: [0])
    with pytest.raises(ValueError, match="gave parameter 0 to rank 7; ranks are 0 to 1"):
        ZeROOne(sgd, partition=lambda params, world_size: [7] * len(params))


def test_bad_arguments_get_one_clear_line(ranks):
    ranks(refused, 2)


def test_the_posts_counts():
    assert [shard_range(291, rank, 4) for rank in range(4)] == [
        (0, 73),
        (73, 146),
        (146, 219),
        (219, 291),
    ]
    for total in range(0, 14):
        for world_size in range(1, 6):
            runs = [range(*shard_range(total, rank, world_size)) for rank in range(world_size)]
            assert [i for run in runs for i in run] == list(range(total))


# Planted faults: the checks above are worth what they find.


def no_average(patch):
    patch.setattr(
        ddp.Bucket,
        "pack",
        lambda bucket, names, world_size, real=ddp.Bucket.pack: real(bucket, names, 1),
    )


def no_broadcast(patch):
    patch.setattr(ZeROOne, "broadcast_parameters", lambda self: None)


def wrong_owner(patch):
    patch.setattr(
        ZeROOne,
        "is_mine",
        lambda self, p: self.param_to_owner_rank.get(p) == (self.rank + 1) % self.world_size,
    )


def late_zero(patch):
    patch.setattr(
        ZeROOne,
        "zero_grad",
        lambda self: [setattr(p, "grad", None) for p in self.params if self.is_mine(p)],
    )


def mean_of_slices_missing(patch):
    patch.setattr(
        flat_bucket.FlatBucket,
        "receive_gradients",
        lambda bucket, world_size, real=flat_bucket.FlatBucket.receive_gradients: real(bucket, 1),
    )


def no_gather(patch):
    patch.setattr(
        flat_bucket.FlatBucket,
        "send_parameters",
        lambda bucket, group: setattr(bucket, "is_ahead", False),
    )


def copy_broadcast(patch):
    patch.setattr(zero, "as_flat", lambda params, real=zero.as_flat: real(params).clone())


PLANTED = {
    "the average is missing": (no_average, "bucket", "sgd"),
    "the broadcast is skipped": (no_broadcast, "zero1", "adamw"),
    "the wrong rank steps": (wrong_owner, "zero1", "sgd"),
    "only the shard is zeroed": (late_zero, "zero1", "sgd"),
    "what is broadcast is a copy": (copy_broadcast, "overlap", "sgd"),
    "the average of a slice is missing": (mean_of_slices_missing, "flat", "sgd"),
    "slices are not gathered": (no_gather, "flat", "adamw"),
}


def planted(rank, world_size, which):
    plant, name, optimizer_name = PLANTED[which]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        variant, reference, optimizer = both(name, MLP, optimizer_name)
        found = []
        for step in range(3):
            single(reference, optimizer, step, world_size)
            x, y = data(step, world_size)
            loss_of(variant.model, x[rank], y[rank]).backward()
            variant.finish()
            found.append(
                bits_differ(variant.model) or max_difference(variant.model, reference) > 1e-9
            )
    return any(found)


@pytest.mark.parametrize("which", PLANTED)
def test_a_planted_fault_is_found(ranks, which):
    assert all(ranks(planted, 2, which))
