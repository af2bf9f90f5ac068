"""What a training run asks of the sharded optimizers: each equal to the plain optimizer in one process."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero1_helpers import (
    FlatShardedOptimizer,
    ShardedOptimizer,
    SimpleDDPBucketAsync,
    ZeROOne,
    checkpoint,
    clip,
    shards,
)
from zero1_helpers.memory_math import state_bytes

from .models import MLP, OPTIMIZERS, ChannelsLast, Scalar, Unused, Variant, data, loss_of, make
from .test_parity import max_difference

SEEN = [
    "zero1",
    "balanced",
    "sharded",
    "bucket",
    "flat-after",
]  # gradients are there before the step
KINDS = ["zero1", "balanced", "sharded", "overlap", "flat", "flat-lazy", "flat-after"]


def step(variant, rank, world_size, index, before_step=None):
    x, y = data(index, world_size)
    loss_of(variant.model, x[rank], y[rank]).backward()
    if before_step is None:
        return variant.finish()
    if variant.name in ("zero1", "balanced", "sharded"):
        variant.model.sync_gradients()
    else:
        variant.model.wait_for_gradients()
    before_step(variant.optimizer)


def step_alone(model, optimizer, world_size, index, before_step=lambda params: None, batches=data):
    x, y = batches(index, world_size)
    loss_of(model, x.flatten(0, 1), y.flatten(0, 1)).backward()
    before_step(list(model.parameters()))
    optimizer.step()
    optimizer.zero_grad()


def clipped(rank, world_size):
    norms = []
    for name in SEEN:
        for norm_type in (2.0, 1.0, float("inf")):
            variant, reference = Variant(name, make(Unused), torch.optim.SGD, lr=0.3), make(Unused)
            plain = torch.optim.SGD(reference.parameters(), lr=0.3)
            expected = []

            def clip_alone(params, to=expected, norm_type=norm_type):
                to.append(float(nn.utils.clip_grad_norm_(params, 0.05, norm_type)))

            def clip_and_step(optimizer, norm_type=norm_type):
                norms.append(float(clip.clip_grad_norm_(optimizer, 0.05, norm_type)))
                optimizer.step()
                optimizer.zero_grad()

            for i in range(3):
                step_alone(reference, plain, world_size, i, clip_alone)
                step(variant, rank, world_size, i, clip_and_step)
            assert norms[-3:] == pytest.approx(expected, rel=1e-12) and min(expected) > 0.05
            assert max_difference(variant.model, reference) <= 1e-9, (name, norm_type)
    for name in ("overlap", "flat"):
        variant = Variant(name, make(MLP), torch.optim.SGD, lr=0.1)
        with pytest.raises(RuntimeError, match="step_in_backward=False"):
            step(variant, rank, world_size, 0, lambda o: clip.clip_grad_norm_(o, 1.0))
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(RuntimeError, match="step_in_backward=False"):
            clip.scaler_step(scaler, variant.optimizer)
    return norms


@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_by_the_norm_of_all(ranks, world_size):
    first, *others = ranks(clipped, world_size)
    assert all(norms == first for norms in others)


def calm(index, world_size=6):
    """data() without its extreme rows, on which SGD with momentum diverges."""
    x, y = data(index, world_size)
    return x.clamp(-3, 3), y


def save(rank, world_size, name, optimizer_name, model_cls, state, index):
    """Resume from `state`, train two steps, and save; (model, optimizer) of rank 0."""
    cls, kwargs = OPTIMIZERS[optimizer_name]
    variant = Variant(name, make(model_cls), cls, **kwargs)
    if state is not None:
        model, optimizer = torch.load(io.BytesIO(state))
        variant.model.module.load_state_dict(model)
        variant.optimizer.load_state_dict(optimizer)
    for i in (index, index + 1):
        x, y = (t.flatten(0, 1) for t in calm(i))
        rows = len(x) // world_size
        loss_of(variant.model, x[rank * rows :][:rows], y[rank * rows :][:rows]).backward()
        variant.finish()
    held = state_bytes(variant.optimizer)
    optimizer = checkpoint.full_state_dict(variant.optimizer, to=world_size - 1)
    assert (optimizer is None) == (rank < world_size - 1)
    assert held == state_bytes(variant.optimizer)
    if optimizer is None:
        return None
    file = io.BytesIO()
    torch.save((variant.model.module.state_dict(), optimizer), file)
    return file.getvalue()


@pytest.mark.parametrize("optimizer_name", ["momentum", "adamw"])
@pytest.mark.parametrize("name", ["balanced", "overlap", "flat", "flat-lazy"])
def test_resume_with_another_number_of_ranks(ranks, name, optimizer_name):
    for model_cls in (Scalar, ChannelsLast):
        cls, kwargs = OPTIMIZERS[optimizer_name]
        reference, state = make(model_cls), None
        plain = cls(reference.parameters(), **kwargs)
        for i, world_size in enumerate((4, 2, 3)):
            *_, state = ranks(save, world_size, name, optimizer_name, model_cls, state, 2 * i)
            for k in (2 * i, 2 * i + 1):
                step_alone(reference, plain, 6, k, batches=calm)
            model, saved = torch.load(io.BytesIO(state))
            resumed = make(model_cls)
            resumed.load_state_dict(model)
            assert max_difference(resumed, reference) <= 1e-9
            loaded = cls(resumed.parameters(), **kwargs)
            loaded.load_state_dict(saved)  # into a plain optimizer
            for p, q in zip(resumed.parameters(), reference.parameters(), strict=True):
                mine, wanted = loaded.state[p], plain.state[q]
                assert (
                    mine.keys() == wanted.keys() or not p.numel()
                )  # nobody owns a part of nothing
                for key in mine:
                    torch.testing.assert_close(mine[key], wanted[key], rtol=1e-9, atol=1e-9)
                    assert mine[key].stride() == wanted[key].stride()  # fused kernels count on it
    follower, following = copy.deepcopy(reference), cls(resumed.parameters(), **kwargs)
    following.load_state_dict(copy.deepcopy(saved))
    again = cls(follower.parameters(), **kwargs)
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    step_alone(follower, again, 6, 9)
    step_alone(resumed, following, 6, 9)
    assert max_difference(resumed, follower) <= 1e-9  # and back


def saved_in_pieces(rank, world_size, name):
    """Most elements of any tensor that travels while the state is saved."""
    sizes = []
    variant = Variant(name, make(MLP), torch.optim.Adam, lr=0.1)
    x, y = data(0, world_size)
    loss_of(variant.model, x[rank], y[rank]).backward()
    variant.finish()
    real = dist.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "CHUNK", 10)
        patch.setattr(
            dist, "broadcast", lambda t, *a, **k: sizes.append(t.numel()) or real(t, *a, **k)
        )
        whole = checkpoint.full_state_dict(variant.optimizer)
    patched = checkpoint.full_state_dict(variant.optimizer)
    if rank == 0:
        for a, b in zip(whole["state"].values(), patched["state"].values(), strict=True):
            assert all(torch.equal(a[key], b[key]) for key in b)
    return max(sizes)


@pytest.mark.parametrize("name", ["zero1", "overlap", "flat"])
def test_saving_sends_pieces_of_bounded_size(ranks, name):
    assert set(ranks(saved_in_pieces, 3, name)) == {10}


def scaled(rank, world_size, name, clips):
    """An inf on one rank skips the step on all; otherwise as without a scaler."""
    variant, reference = Variant(name, make(MLP), torch.optim.SGD, lr=0.1), make(MLP)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i in range(4):
        x, y = data(i, world_size)
        bad = i == 1
        scale = float("inf") if bad and rank == world_size - 1 else 1.0
        scaler.scale(loss_of(variant.model, x[rank], y[rank]) * scale).backward()
        if name.startswith("flat") or name == "bucket":
            variant.model.wait_for_gradients()
        else:
            variant.model.sync_gradients()
        before = [p.clone() for p in variant.model.parameters()]
        clip.scaler_step(scaler, variant.optimizer, 0.05 if clips else None)
        scaler.update()
        variant.optimizer.zero_grad()
        if bad:
            assert all(
                torch.equal(p, q) for p, q in zip(variant.model.parameters(), before, strict=True)
            )
            assert scaler.get_scale() == 512
        else:
            step_alone(
                reference,
                plain,
                world_size,
                i,
                lambda params: clips and nn.utils.clip_grad_norm_(params, 0.05),
            )
    assert max_difference(variant.model, reference) <= 1e-9


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", ["zero1", "sharded", "flat-after"])
def test_an_inf_on_one_rank_skips_the_step_on_all(ranks, name, clips):
    ranks(scaled, 3, name, clips)


def half_precision(rank, world_size, name):
    """(steps skipped, scale at the end), with gradients in fp16 that overflow on one rank at first."""
    model = MLP()
    with torch.no_grad():
        for p in model.parameters():
            dist.broadcast(p, 0)
    variant, skipped = Variant(name, model, torch.optim.SGD, lr=0.01), 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    for i in range(12):
        x, y = (t.float() for t in calm(i, world_size))
        with torch.autocast("cpu", torch.float16):
            out = variant.model(x[rank]).float()
        scaler.scale(((out - y[rank] * (100 if rank == 1 else 1)) ** 2).mean()).backward()
        if name in ("zero1", "sharded"):
            variant.model.sync_gradients()
        else:
            variant.model.wait_for_gradients()
        before = [p.clone() for p in model.parameters()]
        clip.scaler_step(scaler, variant.optimizer)
        scaler.update()
        variant.optimizer.zero_grad()
        skipped += all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        clip.check_in_sync(model)
    assert all(p.isfinite().all() for p in model.parameters())
    return skipped, scaler.get_scale()


def test_fp16_gradients_that_overflow_are_skipped_by_all_alike(ranks):
    found = [
        each
        for name in ("zero1", "sharded", "flat-after")
        for each in ranks(half_precision, 3, name)
    ]
    assert len(set(found)) == 1, found
    skipped, scale = found[0]
    assert 0 < skipped < 12 and scale == 2.0 ** (20 - skipped)


def diverged(rank, world_size):
    for name in KINDS:
        variant = Variant(name, make(MLP), torch.optim.SGD, lr=0.1)
        step(variant, rank, world_size, 0)
        clip.check_in_sync(variant.model.module)
        with torch.no_grad():
            variant.model.module.layers[2].weight[0, 0] += 1e-9 if rank == 1 else 0.0
        with pytest.raises(ValueError, match=r"ranks differ in 1 of 8 tensors.* layers.2.weight$"):
            clip.check_in_sync(variant.model.module)


def test_a_rank_that_diverges_is_found_by_name(ranks):
    ranks(diverged, 3)


def test_a_checksum_sees_order_sign_and_size():
    t = torch.randn(100)
    for other in (
        t.flip(0),
        -t,
        t[:-1],
        t + torch.eye(100)[7] * 1e-6,
        torch.cat([t, torch.zeros(1)]),
    ):
        assert clip.checksum(other) != clip.checksum(t)
    assert clip.checksum(t.clone()) == clip.checksum(t)
    assert clip.checksum(torch.tensor([0.0])) != clip.checksum(torch.tensor([-0.0]))


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.seen = []  # the running mean that each forward starts from
        self.layers[1].register_forward_pre_hook(
            lambda norm, _: self.seen.append(norm.running_mean.clone())
        )

    def forward(self, x):
        return self.layers(x)


def buffers(rank, world_size):
    for name in KINDS:
        for shared in (True, False):
            variant = Variant(name, make(Normalised), torch.optim.SGD, lr=0.1)
            variant.model.broadcast_buffers = shared
            for i in range(3):
                x, y = data(i, world_size)
                loss_of(variant.model, x[rank], y[rank]).backward()
                variant.finish()
            seen = torch.stack(variant.model.module.seen)
            everyone = [torch.empty_like(seen) for _ in range(world_size)]
            dist.all_gather(everyone, seen)
            assert torch.equal(everyone[0], everyone[1]) == shared, name
            with pytest.raises(ValueError, match=r"layers.1.running_mean$"):
                clip.check_in_sync(variant.model.module)  # between forwards each rank has its own


def test_buffers_are_rank_0s_in_each_forward_if_asked_for(ranks):
    ranks(buffers, 2)


def compiled(rank, world_size, name):
    torch._dynamo.reset()
    reference, model = make(MLP), make(MLP)
    variant = Variant(name, torch.compile(model, backend="aot_eager"), torch.optim.AdamW, lr=0.05)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.05)
    for i in range(3):
        x, y = data(i, world_size)
        loss_of(variant.model, x[rank], y[rank]).backward()
        variant.finish()
        step_alone(reference, plain, world_size, i)
    assert max_difference(model, reference) <= 1e-9


@pytest.mark.parametrize("name", ["zero1", "overlap"])  # the flat one: test_flat.py
def test_a_compiled_model_trains_alike(ranks, name):
    ranks(compiled, 2, name)


def late_group(rank, world_size):
    reference, model = make(MLP), make(MLP)
    for m in (reference, model):
        m.layers[0].requires_grad_(False)
    plain = torch.optim.AdamW(list(reference.layers[1:].parameters()), lr=0.05)
    optimizer = ShardedOptimizer(torch.optim.AdamW, model.layers[1:], lr=0.05)
    for i in range(5):
        if i == 2:
            for m, o in ((reference, plain), (model, optimizer)):
                m.layers[0].requires_grad_(True)
                o.add_param_group({"params": list(m.layers[0].parameters()), "lr": 0.2})
        if i in (0, 2):
            wrapped = SimpleDDPBucketAsync(model, optimizer, Variant.cap)
        x, y = data(i, world_size)
        loss_of(wrapped, x[rank], y[rank]).backward()
        wrapped.wait_for_gradients()
        wrapped.wait_for_broadcasts()
        step_alone(reference, plain, world_size, i)
    assert max_difference(model, reference) <= 1e-9


def test_a_group_added_later_is_stepped_behind_backward_too(ranks):
    ranks(late_group, 2)


def on_two_devices(rank, world_size):
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    for build in (
        lambda: ZeROOne(torch.optim.SGD(params)),
        lambda: ShardedOptimizer(torch.optim.SGD, params),
        lambda: FlatShardedOptimizer(torch.optim.SGD, params),
    ):
        with pytest.raises(ValueError, match="^parameters are on several devices: cpu, meta$"):
            build()
    late = ZeROOne(torch.optim.SGD(params[:1]))
    with pytest.raises(ValueError, match="on several devices: cpu, meta"):
        late.add_param_group({"params": params[1:]})


def test_parameters_on_two_devices_are_refused(ranks):
    ranks(on_two_devices, 2)
