"""Master weights: low-precision parameters, stepped in high precision by slices, equal it done by hand."""

import copy
import io
import json

import pytest
import torch
from torch import nn

from zero1_helpers import (
    FlatShardedOptimizer,
    SimpleDDPReduceScatter,
    ZeROOne,
    checkpoint,
    clip,
    flat_bucket,
    get_profiler,
)
from zero1_helpers.bucket import home
from zero1_helpers.memory_math import RECIPES, model_states, nbytes, predict, state_bytes
from zero1_helpers.partition import Flat
from zero1_helpers.training.loop import flush_wait_step

from .models import (
    MLP,
    OPTIMIZERS,
    ChannelsLast,
    Frozen,
    Scalar,
    Tied,
    Unused,
    UnusedOnSomeRanks,
    Variant,
    data,
    loss_of,
    make,
)
from .test_parity import bits_differ, max_difference

MASTER = "master_param"


def pair(model, cls, master=torch.float32, reduce_dtype=None, options=None, **kwargs):
    optimizer = FlatShardedOptimizer(
        cls, model, Variant.cap, master_weights=master, reduce_dtype=reduce_dtype, **kwargs
    )
    return SimpleDDPReduceScatter(model, optimizer, **(options or {})), optimizer


class ByHand:
    """One process: a master of each weight; the ranks' gradients, averaged in the master's dtype."""

    def __init__(self, model, cls, master=torch.float32, **kwargs):
        self.model, self.params = model, [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().to(master).requires_grad_() for p in self.params]
        self.optimizer = cls(self.masters, fused=True, **kwargs)

    def step(self, losses, between=lambda masters: None):
        grads = [torch.autograd.grad(loss, self.params, allow_unused=True) for loss in losses]
        for master, *of_ranks in zip(self.masters, *grads, strict=True):
            used = [g.to(master.dtype) for g in of_ranks if g is not None]
            master.grad = sum(used) / len(of_ranks) if used else None
        between(self.masters)
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.params, self.masters, strict=True):
                p.copy_(master)


def masters(optimizer):
    """Of every trainable parameter, this rank's piece of the master copy, and where it begins."""
    found = []
    for i, p in enumerate(q for q in optimizer.params if q.requires_grad):
        bucket = next(bucket for bucket in optimizer.buckets if p in bucket.layout.views)
        if p in bucket.pieces:
            layout = bucket.layout
            begin = layout.slice.start + layout.cuts[p].start - layout.views[p][2]
            found.append((i, bucket.pieces[p].detach().clone(), begin))
    return found


def off(optimizer, by_hand):
    """The largest difference of a master copy from that made by hand."""
    worst = 0.0
    for i, piece, begin in masters(optimizer):
        whole = by_hand.masters[i].detach()
        whole = torch.as_strided(whole, (whole.numel(),), (1,))[begin : begin + len(piece)]
        worst = max(worst, float((piece - whole).abs().max()))
    return worst


# Parity


class Whole(nn.Module):
    """loss(x) has the gradient x: whole numbers, whose sums bf16 holds exactly."""

    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList([torch.randn(n).bfloat16() for n in (7, 1, 40, 150, 33)])

    def forward(self, x):
        return sum((p * c).sum() for p, c in zip(self.params, x, strict=True))


def whole_numbers(step, rank, world_size):
    """Different on each rank. 1, 2 and 4 of them have the same mean; that of 3 bf16 cannot hold."""
    g = torch.Generator().manual_seed(step)
    for n in (7, 1, 40, 150, 33):
        mean, apart = torch.randint(-9, 10, (2, n), generator=g)
        yield (
            mean + apart * (2 * rank + 1 - world_size) + (rank == 0 and world_size == 3)
        ).bfloat16()


EXACT = [
    (torch.optim.SGD, {"lr": 2**-11}),
    (torch.optim.SGD, {"lr": 2**-11, "momentum": 0.5}),
    (torch.optim.AdamW, {"lr": 1e-3}),
]


def exactly(rank, world_size, reduce_dtype):
    """Largest difference of a master copy from one process, and how many weights differ."""
    found = []
    for cls, kwargs in EXACT:
        torch.manual_seed(1)
        model = Whole()
        alone = ByHand(copy.deepcopy(model), cls, **kwargs)
        wrapped, optimizer = pair(model, cls, reduce_dtype=reduce_dtype, **kwargs)
        for step in range(5):
            alone.step(
                [alone.model(list(whole_numbers(step, r, world_size))) for r in range(world_size)]
            )
            wrapped(list(whole_numbers(step, rank, world_size))).backward()
            optimizer.step()
        differ = sum(
            int((p != q).sum()) for p, q in zip(model.parameters(), alone.params, strict=True)
        )
        found.append((off(optimizer, alone), differ))
        assert not bits_differ(model)
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        low = torch.cat([piece for _, piece, _ in masters(optimizer)])
        assert float((low != low.bfloat16()).float().mean()) > 0.5  # most have bits that bf16 drops
    return found


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_same_bits_as_one_process_by_hand(ranks, world_size, reduce_dtype):
    for sgd, momentum, adamw in ranks(exactly, world_size, reduce_dtype):
        assert sgd == momentum == (0.0, 0)
        assert adamw[0] <= 1e-6  # its kernels round by where a piece begins


def follow(rank, world_size):
    """float32 weights and float64 masters: what the ranks sum is exact to 1e-16."""
    worst = {}
    for model_cls in (MLP, Tied, Frozen, UnusedOnSomeRanks, ChannelsLast, Scalar):
        for name, (cls, kwargs) in OPTIMIZERS.items():
            model = make(model_cls).float()
            alone = ByHand(copy.deepcopy(model), cls, torch.float64, **kwargs)
            wrapped, optimizer = pair(model, cls, torch.float64, torch.float64, **kwargs)
            for step in range(3):
                x, y = (t.float() for t in data(step, world_size))
                alone.step([loss_of(alone.model, x[r], y[r]) for r in range(world_size)])
                loss_of(wrapped, x[rank], y[rank]).backward()
                optimizer.step()
            assert not bits_differ(model)
            with torch.no_grad():
                worst[model_cls.__name__, name] = (
                    off(optimizer, alone),
                    max_difference(model, alone.model),
                )
    return worst


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_float64_analogue_equals_one_process(ranks, world_size):
    for found in ranks(follow, world_size):
        assert len(found) == 18
        for which, (masters_off, weights_off) in found.items():
            assert masters_off <= 1e-12 and weights_off <= 1e-12, which


def train(variant, rank, world_size, steps, model_cls=MLP, dtype=torch.bfloat16):
    wrapped, optimizer = variant
    for step in steps:
        x, y = (t.to(dtype) for t in data(step, world_size))
        loss_of(wrapped, x[rank], y[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def schedules(rank, world_size):
    """Weights and masters of every schedule: they must be the same bits."""
    found = []
    for options in ({}, {"lag": 0}, {"lazy_gather": True}, {"step_in_backward": False}):
        model = make(MLP).bfloat16()
        wrapped, optimizer = pair(model, torch.optim.AdamW, options=options, lr=0.01)
        train((wrapped, optimizer), rank, world_size, range(4))
        optimizer.receive()
        found.append([*model.parameters(), *(piece for _, piece, _ in masters(optimizer))])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_every_schedule_makes_the_same_bits(ranks):
    ranks(schedules, 2)


# What sharding must not change


def untouched(rank, world_size):
    for dtype, reduce_dtype in (
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float16, None),
    ):
        model = nn.ModuleDict({name: nn.Linear(6, 3) for name in ("used", "dead", "unused")}).to(
            dtype
        )
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1)
        options = {"reduce_dtype": reduce_dtype, "lr": 0.1, "weight_decay": 0.5}
        wrapped, optimizer = pair(model, torch.optim.AdamW, **options)
        ones = torch.ones(2, 6, dtype=dtype)
        loss = model["used"](ones).sum()
        if rank == 0:  # a gradient that is -0.0, or becomes it in the dtype in which it is sent
            for p in model["dead"].parameters():
                p.register_hook(lambda grad: torch.full_like(grad, -1e-30))
            loss = loss + model["dead"](ones).sum()
        loss.backward()
        wrapped._open = True
        optimizer.step()
        moved = [not bool((p == 1).all()) for p in model.parameters()]
        assert moved == [True, True, True, True, False, False], (dtype, reduce_dtype)
        unused = set(model["unused"].parameters())
        for bucket in optimizer.buckets:
            for p, piece in bucket.pieces.items():
                assert (piece in optimizer.state) == (p not in unused)


def test_what_no_rank_used_is_untouched_in_any_dtype(ranks):
    ranks(untouched, 2)


class HalfAndSingle(MLP):
    """A norm in float32 between layers in bf16."""

    def __init__(self):
        super().__init__()
        self.bfloat16()
        self.layers[1].float()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def mixed(rank, world_size):
    torch.manual_seed(3)
    model = HalfAndSingle()
    model.layers[2].bias.requires_grad_(False)
    wrapped, optimizer = pair(model, torch.optim.AdamW, lr=0.01)
    train((wrapped, optimizer), rank, world_size, range(2))
    for bucket in optimizer.buckets:
        for p, piece in bucket.pieces.items():
            assert piece.dtype == torch.float32
            assert (MASTER in optimizer.state[piece]) == (p.dtype == torch.bfloat16)
            assert (piece.untyped_storage().data_ptr() == home(p).untyped_storage().data_ptr()) == (
                p.dtype == torch.float32
            )
    predicted = predict(model, optimizer, world_size, optimizer.partition)[rank]
    assert state_bytes(optimizer) == (predicted.opt_state, predicted.counters)


def test_a_float32_layer_needs_no_master(ranks):
    ranks(mixed, 2)


def micro_batches(rank, world_size):
    """no_sync, two groups, and clipping: by hand, the gradients of both micro-batches in one."""

    def groups(model):
        return [
            {"params": model.layers[:2].parameters()},
            {"params": model.layers[2:].parameters(), "lr": 0.1},
        ]

    model = make(MLP).float()
    alone = ByHand(copy.deepcopy(model), torch.optim.SGD, torch.float64, lr=0.3)
    second = alone.masters[4:]
    alone.optimizer = torch.optim.SGD(
        [{"params": alone.masters[:4], "lr": 0.3}, {"params": second, "lr": 0.1}], momentum=0.9
    )
    optimizer = FlatShardedOptimizer(
        torch.optim.SGD,
        groups(model),
        Variant.cap,
        lr=0.3,
        momentum=0.9,
        master_weights=torch.float64,
        reduce_dtype=torch.float64,
    )
    wrapped = SimpleDDPReduceScatter(model, optimizer, step_in_backward=False)
    for step in range(3):
        x, y = (t.float() for t in data(step, world_size))
        losses = [
            loss_of(alone.model, x[r, :2], y[r, :2]) + loss_of(alone.model, x[r, 2:], y[r, 2:])
            for r in range(world_size)
        ]
        expected = []
        alone.step(
            losses,
            lambda params, norms=expected: norms.append(
                float(nn.utils.clip_grad_norm_(params, 0.05))
            ),
        )
        with wrapped.no_sync():
            loss_of(wrapped, x[rank, :2], y[rank, :2]).backward()
        loss_of(wrapped, x[rank, 2:], y[rank, 2:]).backward()
        wrapped.wait_for_gradients()
        norm = clip.clip_grad_norm_(optimizer, 0.05)
        assert float(norm) == pytest.approx(expected[0], rel=1e-6) and norm > 0.05
        optimizer.step()
        optimizer.zero_grad()
    assert off(optimizer, alone) <= 1e-7  # float32 adds up two micro-batches


def test_accumulating_groups_and_clipping(ranks):
    ranks(micro_batches, 3)


def scaled(rank, world_size):
    """fp16 with a scaler: an inf on one rank skips the step on all, master copies included."""
    model = make(MLP).half()
    alone = ByHand(copy.deepcopy(model), torch.optim.SGD, lr=0.1)
    wrapped, optimizer = pair(model, torch.optim.SGD, options={"step_in_backward": False}, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        x, y = (t.half().clamp(-3, 3) for t in data(step, world_size))
        scale = float("inf") if step == 1 and rank == world_size - 1 else 1.0
        before = [*model.parameters(), *(piece for _, piece, _ in masters(optimizer))]
        before = [t.detach().clone() for t in before]
        scaler.scale(loss_of(wrapped, x[rank], y[rank]) * scale).backward()
        wrapped.wait_for_gradients()
        clip.scaler_step(scaler, optimizer)
        scaler.update()
        if step == 1:
            after = [*model.parameters(), *(piece for _, piece, _ in masters(optimizer))]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        else:
            alone.step([loss_of(alone.model, x[r], y[r]) for r in range(world_size)])
    assert off(optimizer, alone) <= 1e-3 and scaler.get_scale() == 128


def test_fp16_with_a_scaler(ranks):
    ranks(scaled, 2)


def written(rank, world_size):
    """Weights that somebody writes between two steps count; those that nobody writes keep their master."""
    torch.manual_seed(1)
    model = Whole()
    wrapped, optimizer = pair(model, torch.optim.SGD, lr=2**-11)
    first = [torch.ones_like(p) for p in model.parameters()]
    wrapped(first).backward()
    optimizer.step()
    kept = masters(optimizer)
    with torch.no_grad():
        model.params[3].data[::2] = 3.0  # not even a version tells
    wrapped(first).backward()
    optimizer.step()
    for (i, before, begin), (_, after, _) in zip(kept, masters(optimizer), strict=True):
        expected = before - 2**-11
        if i == 3:
            expected[begin % 2 :: 2] = 3.0 - 2**-11
        assert torch.equal(after, expected)


def test_weights_that_somebody_writes_count(ranks):
    ranks(written, 2)


# Bytes


def held(rank, world_size):
    whole = []
    for model_cls in (MLP, Scalar, Unused):
        for cls, kwargs in [
            *OPTIMIZERS.values(),
            (torch.optim.RMSprop, {"centered": True}),
            (torch.optim.Adagrad, {"lr": 0.1}),
        ]:
            model = make(model_cls).bfloat16()
            wrapped, optimizer = pair(model, cls, **kwargs)
            sum((p * p).sum() for p in model.parameters()).backward()
            wrapped._open = True
            optimizer.step()
            for asked, more in ((cls, kwargs), (optimizer, {})):
                predicted = predict(model, asked, world_size, optimizer.partition, **more)[rank]
                assert state_bytes(optimizer) == (predicted.opt_state, predicted.counters)
            homes = [home(p).untyped_storage() for p in model.parameters()]
            storages = {s.data_ptr(): s.nbytes() for s in homes}
            assert sum(storages.values()) == predicted.params
            numel = sum(p.numel() for p in model.parameters())
            whole.append((cls.__name__, bool(kwargs.get("momentum")), predicted.opt_state, numel))
    return whole


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_state_and_master_are_an_equal_part_as_predicted(ranks, world_size):
    bytes_of = {"AdamW": 12, "RMSprop": 12, "Adagrad": 8, "SGD": 4}
    for of_ranks in zip(*ranks(held, world_size), strict=True):
        name, momentum, _, numel = of_ranks[0]
        assert sum(held for _, _, held, _ in of_ranks) == (bytes_of[name] + 4 * momentum) * numel


def test_the_closed_form_is_the_prediction_of_a_model():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)]).bfloat16()
    psi, n = sum(p.numel() for p in model.parameters()), 4
    assert RECIPES["mixed"].opt_state == 12
    ranks = predict(model, torch.optim.Adam, n, Flat(master_dtype=torch.float32))
    for rank in ranks:
        assert (
            rank.params + nbytes(model.parameters()) + rank.opt_state
            == model_states(psi, "mixed", n)["total"]
            == 4 * psi + 12 * psi / n
        )
    half, single = (
        predict(model, torch.optim.Adam, n, Flat(25, 1, torch.float32, dtype))[0]
        for dtype in (None, torch.float32)
    )
    assert single.buckets == 2 * half.buckets


def sent_by(rank, world_size):
    """Bytes of the tensors of one step's collectives, with gradients in bf16 and in fp32."""
    bytes_of = {}
    for reduce_dtype in (None, torch.float32):
        torch.manual_seed(1)
        model = Whole()
        wrapped, optimizer = pair(model, torch.optim.AdamW, reduce_dtype=reduce_dtype, lr=1e-3)
        issued = bytes_of[reduce_dtype] = {"reduce_scatter": 0, "all_gather": 0}

        def noting(op, whole, issued=issued):
            real = getattr(flat_bucket, op)

            def note(*tensors, **kwargs):
                issued[op] += nbytes([tensors[whole]])
                return real(*tensors, **kwargs)

            return note

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flat_bucket, "reduce_scatter", noting("reduce_scatter", 1))
            patch.setattr(flat_bucket, "all_gather", noting("all_gather", 0))
            wrapped([torch.ones_like(p) for p in model.parameters()]).backward()
            optimizer.step()
        padded = sum(bucket.weights.numel() for bucket in optimizer.buckets)
    return bytes_of, padded


def test_gradients_in_fp32_are_sent_in_twice_the_bytes(ranks):
    for bytes_of, padded in ranks(sent_by, 2):
        assert bytes_of[None] == {"reduce_scatter": 2 * padded, "all_gather": 2 * padded}
        assert bytes_of[torch.float32] == {"reduce_scatter": 4 * padded, "all_gather": 2 * padded}


class Talks(MLP):
    """As a language model does, it returns its loss."""

    def forward(self, x, y):
        return type("Output", (), {"loss": loss_of(super().forward, x, y)})


def recorded(rank, world_size, folder):
    model = make(Talks).bfloat16()
    wrapped, optimizer = pair(model, torch.optim.AdamW, lr=0.01)
    with get_profiler(folder, 2, model=wrapped, optimizer=optimizer) as profiler:
        for step in range(2):
            x, y = (t.bfloat16() for t in data(step, world_size))
            loss = wrapped(x=x[rank], y=y[rank]).loss
            loss.backward()
            flush_wait_step(wrapped, optimizer)
            profiler.step(loss)
    return state_bytes(optimizer)[0]


def test_a_recorded_run_counts_the_master_as_optimizer_state(ranks, tmp_path):
    true = ranks(recorded, 2, str(tmp_path))
    record = json.loads((tmp_path / "run.json").read_text())
    assert [m["opt_state"] for m in record["memory"]] == true
    assert [p["opt_state"] for p in record["predicted"]] == true
    assert sum(true) == 12 * record["model"]["parameters"]


# Resume


def continued(rank, world_size, state, steps, cls, kwargs):
    """Train from a state and save: (weights, state) as bytes, of rank 0."""
    torch.manual_seed(1)
    model = Whole()
    wrapped, optimizer = pair(model, cls, **kwargs)
    if state is not None:
        weights, saved = torch.load(io.BytesIO(state))
        optimizer.load_state_dict(saved)  # before the weights: either order will do
        model.load_state_dict(weights)
    for step in steps:
        wrapped(list(whole_numbers(step, rank, world_size))).backward()
        optimizer.step()
    saved = checkpoint.full_state_dict(optimizer)
    if rank == 0:
        file = io.BytesIO()
        torch.save((model.state_dict(), saved), file)
        return file.getvalue()


def apart(one, other):
    """The largest difference of two saved states: weights, master copies, moments, counts."""
    (weights, a), (others, b) = (torch.load(io.BytesIO(state)) for state in (one, other))
    entries = [
        (a["state"][i][key], b["state"][i][key]) for i in b["state"] for key in b["state"][i]
    ]
    entries += [(weights[key], others[key]) for key in others]
    assert len(entries) >= 15
    return max(float((x - y).abs().max()) for x, y in entries)


@pytest.mark.parametrize("which", [1, 2])
def test_resume_bit_for_bit(ranks, which):
    cls, kwargs = EXACT[which]
    half, *_ = ranks(continued, 4, None, range(3), cls, kwargs)
    whole, *_ = ranks(continued, 4, None, range(6), cls, kwargs)
    weights, saved = torch.load(io.BytesIO(half))
    for i, w in enumerate(weights.values()):
        master = saved["state"][i][MASTER]
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), w)
        assert not torch.equal(master, w.float())  # there is something to lose
    for world_size in (4, 2, 1):
        resumed, *_ = ranks(continued, world_size, half, range(3, 6), cls, kwargs)
        exact = (
            cls is torch.optim.SGD or world_size == 4
        )  # Adam's kernels round by where a piece begins
        assert apart(resumed, whole) <= (0.0 if exact else 1e-6)
    del saved["state"][2][MASTER]
    file = io.BytesIO()
    torch.save((weights, saved), file)
    forgetful, *_ = ranks(continued, 4, file.getvalue(), range(3, 6), cls, kwargs)
    assert apart(forgetful, whole) > 0  # what the test above would see if the copy were lost


def from_disk(rank, world_size, folder, steps, cls, kwargs):
    """The same from and to a checkpoint of torch's; whole state of rank 0, as bytes."""
    torch.manual_seed(1)
    model = Whole()
    wrapped, optimizer = pair(model, cls, **kwargs)
    if steps[0]:
        checkpoint.load_checkpoint(f"{folder}/{steps[0]}", wrapped, optimizer)
    for step in steps:
        wrapped(list(whole_numbers(step, rank, world_size))).backward()
        optimizer.step()
    for _, piece, _ in checkpoint.shard_of(model, optimizer).values():
        assert optimizer.state[piece][MASTER].data_ptr() == piece.data_ptr()
    if not steps[0]:
        checkpoint.save_checkpoint(f"{folder}/{steps[-1] + 1}", wrapped, optimizer)
    saved = checkpoint.full_state_dict(optimizer)
    if rank == 0:
        file = io.BytesIO()
        torch.save((model.state_dict(), saved), file)
        return file.getvalue()


def into_whole_parameters(rank, world_size, folder):
    """A class without master copies takes what it has a use for."""
    model = Whole()
    optimizer = ZeROOne(torch.optim.AdamW(model.parameters(), lr=1e-3))
    with pytest.raises(ValueError, match="float32 in the checkpoint and bfloat16 here"):
        checkpoint.load_checkpoint(folder, model, optimizer)
    checkpoint.load_checkpoint(folder, model, optimizer, cast=True)
    for p, entry in optimizer.state.items():
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq"} and entry["exp_avg"].dtype == p.dtype
    checkpoint.save_checkpoint(f"{folder}-whole", model, optimizer)
    wrapped, flat_one = pair(model, torch.optim.AdamW, lr=1e-3)
    # and back: master copies of the weights
    checkpoint.load_checkpoint(f"{folder}-whole", wrapped, flat_one, cast=True)
    for p, piece, begin in checkpoint.shard_of(model, flat_one).values():
        assert piece.dtype == torch.float32 == flat_one.state[piece]["exp_avg"].dtype
        assert torch.equal(piece, p.detach().float().flatten()[begin : begin + len(piece)])


@pytest.mark.parametrize("which", [1, 2])
def test_resume_from_disk_bit_for_bit(ranks, tmp_path, which):
    cls, kwargs = EXACT[which]
    whole, *_ = ranks(continued, 4, None, range(6), cls, kwargs)
    ranks(from_disk, 4, str(tmp_path), range(3), cls, kwargs)
    for world_size in (4, 2):
        resumed, *_ = ranks(from_disk, world_size, str(tmp_path), range(3, 6), cls, kwargs)
        exact = cls is torch.optim.SGD or world_size == 4
        assert apart(resumed, whole) <= (0.0 if exact else 1e-6)
    if cls is not torch.optim.SGD:
        ranks(into_whole_parameters, 2, str(tmp_path / "3"))


def others(rank, world_size):
    """The same state in a plain optimizer, in a flat one without master copies, and back."""
    torch.manual_seed(1)
    model = Whole()
    wrapped, optimizer = pair(model, torch.optim.AdamW, lr=1e-3)
    wrapped(list(whole_numbers(0, rank, world_size))).backward()
    optimizer.step()
    box = [checkpoint.full_state_dict(optimizer)]
    torch.distributed.broadcast_object_list(box)
    (saved,) = box
    plain_model = copy.deepcopy(model)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-3)
    plain.load_state_dict(copy.deepcopy(saved))
    plain_model(list(whole_numbers(1, rank, world_size))).backward()
    plain.step()
    wrapped, bare = pair(copy.deepcopy(model), torch.optim.AdamW, master=False, lr=1e-3)
    bare.load_state_dict(saved)
    assert all(
        MASTER not in state and state["exp_avg"].dtype == torch.bfloat16
        for state in bare.state.values()
    )
    pure = checkpoint.full_state_dict(bare)
    box = [pure]
    torch.distributed.broadcast_object_list(box)
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.load_state_dict(box[0])
    for i, piece, begin in masters(optimizer):
        assert torch.equal(piece, weights[i].float()[begin : begin + len(piece)])


def test_the_state_fits_other_optimizers(ranks):
    ranks(others, 2)


# Faults


def forgets(patch):
    patch.setattr(
        flat_bucket.FlatPieces,
        "_update_master",
        lambda bucket, piece, weights: setattr(piece, "data", weights.to(bucket.stepped_in)),
    )


def means_in_half(patch):
    """The mean is taken in the dtype of the gradients: right for 2 and 4 ranks, wrong for 3."""

    def receive(bucket, world_size, real=flat_bucket.FlatBucket.receive_gradients):
        bucket.work.wait()
        bucket.mine.div_(world_size)
        real(bucket, 1)

    patch.setattr(flat_bucket.FlatBucket, "receive_gradients", receive)


PLANTED = {
    "the master is read off the weights": forgets,
    "the mean is taken in bf16": means_in_half,
}


def planted(rank, world_size, which):
    with pytest.MonkeyPatch.context() as patch:
        PLANTED[which](patch)
        return max(difference for difference, _ in exactly(rank, world_size, None)[:2])


@pytest.mark.parametrize("which", PLANTED)
def test_a_planted_fault_is_found(ranks, which):
    assert max(ranks(planted, 3, which)) > 0
