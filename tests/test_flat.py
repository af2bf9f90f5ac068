"""The flat pair: what is sent, what is held, lazy gathers that are never stale, and what is refused."""

import copy
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from zero1_helpers import (
    FlatShardedOptimizer,
    SimpleDDPReduceScatter,
    flat_bucket,
    get_profiler,
    phases,
)
from zero1_helpers.bucket import home
from zero1_helpers.collectives import reduce_scatter
from zero1_helpers.memory_math import bytes_sent, nbytes, predict, state_bytes
from zero1_helpers.partition import Flat, pieces_of, slice_width

from .models import MLP, OPTIMIZERS, Scalar, Unused, Variant, data, loss_of, make
from .test_parity import bits_differ, max_difference

CAP = Variant.cap


def pair(model, cls=torch.optim.AdamW, cap=CAP, lr=0.05, first=1.0, **options):
    optimizer = FlatShardedOptimizer(cls, model, cap, first_bucket_mb=first, lr=lr)
    return SimpleDDPReduceScatter(model, optimizer, **options), optimizer


def train(wrapped, optimizer, rank, world_size, steps=range(3), each=lambda: None):
    for step in steps:
        x, y = data(step, world_size)
        loss_of(wrapped, x[rank], y[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        each()


def train_alone(model, optimizer, world_size, steps=range(3)):
    for step in steps:
        x, y = data(step, world_size)
        loss_of(model, x.flatten(0, 1), y.flatten(0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_slices_are_equal_and_pieces_are_everything():
    assert pieces_of([5, 2, 4], 0, 2) == {0: (0, 5), 1: (0, 1)}
    assert pieces_of([5, 2, 4], 1, 2) == {1: (1, 2), 2: (0, 4)}
    for sizes in ([5, 2, 4], [1], [0, 3], [0], [7, 7, 7, 7]):
        for world_size in range(1, 6):
            cuts = [pieces_of(sizes, rank, world_size) for rank in range(world_size)]
            for i, size in enumerate(sizes):
                assert [e for cut in cuts for e in range(*cut.get(i, (0, 0)))] == list(range(size))
            for cut in cuts:
                assert sum(b - a for a, b in cut.values()) <= slice_width(sizes, world_size)


def test_buckets_run_backwards_and_the_first_is_small():
    params = [torch.empty(2**18) for _ in range(10)]  # 1 MiB each
    assert Flat(3, 1).buckets(params) == [[9], [8, 7, 6], [5, 4, 3], [2, 1, 0]]
    params[4] = params[4].double()
    assert [4] in Flat(3, 1).buckets(params)


def sent(rank, world_size, model_cls):
    """(op, bytes) of every collective of one step, as they are issued, and the bytes of the model."""
    model, issued = make(model_cls), []
    wrapped, optimizer = pair(model)
    train(wrapped, optimizer, rank, world_size, [0])
    with pytest.MonkeyPatch.context() as patch:
        for module, op, whole in (
            (flat_bucket, "reduce_scatter", 1),
            (flat_bucket, "all_gather", 0),
            (dist, "all_reduce", 0),
            (dist, "broadcast", 0),
        ):
            real = getattr(module, op)

            def note(*tensors, op=op, whole=whole, real=real, **kwargs):
                issued.append((op, nbytes([tensors[whole]])))
                return real(*tensors, **kwargs)

            patch.setattr(module, op, note)
        train(wrapped, optimizer, rank, world_size, [1])
    return issued, nbytes(model.parameters()), len(optimizer.buckets)


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_psi_are_sent_and_not_three(ranks, world_size):
    for issued, psi, buckets in ranks(sent, world_size, EvenMLP):
        assert {op for op, _ in issued} == {"reduce_scatter", "all_gather"} and len(
            issued
        ) == 2 * buckets > 4
        assert sum(bytes_sent(op, size, world_size) for op, size in issued) == (
            2 * psi * (world_size - 1) / world_size
        )


def over_gloo(rank, world_size):
    """Sums in the order of the ranks, -0.0 that stays, and the names of what gloo was asked for."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for op in ("all_reduce", "all_to_all_single", "reduce_scatter_single"):
            real = getattr(dist, op)
            patch.setattr(
                dist, op, lambda *a, op=op, real=real, **k: asked.append(op) or real(*a, **k)
            )
        whole = [torch.linspace(0.1, 2, 5 * world_size).roll(r) for r in range(world_size)]
        mine, zero = torch.empty(5), torch.empty(1)
        work = reduce_scatter(mine, whole[rank], async_op=True)
        work.wait()
        work.wait()  # as for any Work, once more changes nothing
        reduce_scatter(zero, torch.full((world_size,), -0.0))
    expected = whole[0].chunk(world_size)[rank].clone()
    for other in whole[1:]:
        expected += other.chunk(world_size)[rank]
    return torch.equal(mine, expected), bool(torch.signbit(zero)), set(asked)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_over_gloo_a_reduce_scatter_is_no_all_reduce(ranks, world_size):
    for exact, negative, asked in ranks(over_gloo, world_size):
        assert exact and negative and asked == {"all_to_all_single"}


class EvenMLP(MLP):
    """Every bucket can be cut in four without padding."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)])

    def forward(self, x):
        return super().forward(x)[:, :3]


def held(rank, world_size):
    found = []
    for model_cls in (MLP, Scalar, Unused):
        for cls, kwargs in [*OPTIMIZERS.values(), (torch.optim.RMSprop, {"centered": True})]:
            model = make(model_cls)
            optimizer = FlatShardedOptimizer(cls, model, CAP, **kwargs)
            wrapped = SimpleDDPReduceScatter(model, optimizer)
            sum((p * p).sum() for p in model.parameters()).backward()
            wrapped._open = True
            optimizer.step()
            for asked, more in ((cls, kwargs), (optimizer, {})):
                predicted = predict(model, asked, world_size, optimizer.partition, **more)[rank]
                assert state_bytes(optimizer) == (predicted.opt_state, predicted.counters)
            homes = [home(p).untyped_storage() for p in model.parameters()]
            storages = {s.data_ptr(): s.nbytes() for s in homes}
            assert sum(storages.values()) == predicted.params
            found.append(predicted.opt_state)
    return found, [
        predict(make(m), c, **k)[0].opt_state
        for m in (MLP, Scalar, Unused)
        for c, k in [*OPTIMIZERS.values(), (torch.optim.RMSprop, {"centered": True})]
    ]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_state_is_an_equal_part_as_predicted(ranks, world_size):
    results = ranks(held, world_size)
    for of_each, whole in zip(
        zip(*(found for found, _ in results), strict=True), results[0][1], strict=True
    ):
        assert sum(of_each) == whole
        assert (
            max(of_each) - min(of_each) <= 8 * 2 * world_size * 20
        )  # padding, of at most 20 buckets


class Backwards(nn.Module):
    """Of each pair, the layer registered last runs first, so its gradient is the last of the pair."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.ModuleList(
            [nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]) for _ in range(3)]
        )

    def forward(self, x):
        for last, first in self.pairs:
            x = torch.tanh(last(first(x)))
        return x[:, :3]


class Alive(list):
    """A listener of `phases`: how many bytes of buckets are alive, at each announcement."""

    def __init__(self):
        self.refs = []

    def announce(self, category, tensors):
        self.refs += [weakref.ref(t) for t in tensors if category == "buckets"]
        self.append(nbytes(t for t in (ref() for ref in self.refs) if t is not None))

    def enter(self, name, index): ...
    def leave(self, name, index): ...


def in_flight(rank, world_size, model_cls):
    model = make(model_cls)
    wrapped, optimizer = pair(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "listeners", [alive := Alive()])
        train(wrapped, optimizer, rank, world_size)
    return max(alive), predict(model, torch.optim.AdamW, world_size, optimizer.partition)[
        rank
    ].buckets


def test_buckets_in_flight_are_as_predicted(ranks):
    for measured, predicted in ranks(in_flight, 2, Backwards):  # a bucket is begun before its turn
        assert measured == predicted > 0
    for measured, predicted in ranks(in_flight, 2, MLP):
        assert 0 < measured <= predicted


# A parameter that no rank used


def dead(rank, world_size):
    """A gradient that is all -0.0 is a gradient: weight decay moves its parameter, and a count goes up."""
    model = nn.ModuleDict({name: nn.Linear(6, 3) for name in ("used", "dead", "unused")}).double()
    model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    wrapped, optimizer = pair(model, cap=1, lr=0.1)
    loss = model["used"](torch.ones(2, 6).double()).sum()
    loss = loss + (model["dead"](-torch.ones(2, 6).double()) * -0.0).sum() if rank == 0 else loss
    loss.backward()
    wrapped._open = True
    optimizer.step()
    moved = [not bool((p == 1).all()) for p in model.parameters()]
    return moved, [float(s["step"]) for s in optimizer.state.values()]


def test_zero_gradients_are_told_from_none(ranks):
    for moved, steps in ranks(dead, 2):
        assert moved == [True, True, True, True, False, False]
        assert set(steps) == {1.0}


def sums_from_zero(rank, world_size):
    """A backend that begins its sums with +0.0: always, for large tensors, and on one rank only."""
    model = make(MLP)
    optimizer = FlatShardedOptimizer(torch.optim.SGD, model, CAP, lr=0.1)
    real, sizes = flat_bucket.reduce_scatter, [b.weights.numel() for b in optimizer.buckets]
    assert min(sizes) < max(sizes)
    for loses in (lambda n: True, lambda n: n == max(sizes), lambda n: rank == 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                flat_bucket,
                "reduce_scatter",
                lambda out, whole, loses=loses, **k: (
                    real(out, whole, **k) or (loses(whole.numel()) and out.add_(0.0))
                ),
            )
            with pytest.raises(RuntimeError, match="-0.0"):
                SimpleDDPReduceScatter(model, optimizer)
    SimpleDDPReduceScatter(model, optimizer)


def test_a_backend_that_loses_the_sign_of_zero_is_refused(ranks):
    ranks(sums_from_zero, 2)


# Lazy gathers


class ReadsElsewhere(nn.Module):
    """An embedding whose weight is also read outside its forward, before it; and a penalty on all."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.table = nn.Embedding(5, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        scores = F.linear(torch.tanh(self.first(x)), self.table.weight)  # not by self.table()
        h = torch.tanh(scores @ self.table.weight) + self.table(
            torch.ones(len(x), dtype=torch.long)
        )
        return self.last(h) + 1e-3 * sum(p.square().sum() for p in self.parameters())


def copied_at_wait(patch):
    """Gathered parameters are put in place when somebody waits, and not one moment before."""

    class Late:
        def __init__(self, out, arrived, work):
            self.out, self.arrived, self.work = out, arrived, work

        def wait(self):
            self.work.wait()
            self.out.copy_(self.arrived)

    def late(out, mine, real=flat_bucket.all_gather, **kwargs):
        arrived = torch.empty_like(out)
        return Late(out, arrived, real(arrived, mine.clone(), **kwargs))

    patch.setattr(flat_bucket, "all_gather", late)


def guarded_by_owners(patch):
    """The naive way: before a module's own forward its own parameters are awaited, and that is all."""

    def guard(bucket):
        def hook(module, args):
            if any(p in bucket.layout.views for p in module.parameters(recurse=False)):
                bucket.receive_parameters()

        for module in MODULES:
            module.register_forward_pre_hook(hook)

    patch.setattr(flat_bucket.FlatBucket, "guard", guard)


MODULES = []


def lazily(rank, world_size, naive):
    reference, model = make(ReadsElsewhere), make(ReadsElsewhere)
    with pytest.MonkeyPatch.context() as patch:
        copied_at_wait(patch)
        if naive:
            MODULES[:] = model.modules()
            guarded_by_owners(patch)
        wrapped, optimizer = pair(model, torch.optim.SGD, cap=0, first=0, lazy_gather=True)
        train(wrapped, optimizer, rank, world_size)
        optimizer.receive()
    train_alone(reference, torch.optim.SGD(reference.parameters(), lr=0.05), world_size)
    return max_difference(model, reference)


def test_a_weight_read_outside_its_owners_forward_is_never_stale(ranks):
    assert max(ranks(lazily, 2, False)) <= 1e-12
    assert min(ranks(lazily, 2, True)) > 1e-6  # silently wrong


READERS = {
    "module": lambda model, x: model(x),
    "state_dict": lambda model, x: model.state_dict()["layers.0.weight"],
    "deepcopy": lambda model, x: copy.deepcopy(model)(x),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model))(x),
    "numpy": lambda model, x: torch.from_numpy(model.layers[0].weight.detach().numpy().copy()),
    "data": lambda model, x: model.layers[0].weight.data.clone(),
    "norm": lambda model, x: torch.stack([p.norm() for p in model.parameters()]),
    "foreach": lambda model, x: torch.stack(torch._foreach_norm(list(model.parameters()))),
    "functional": lambda model, x: torch.func.functional_call(
        model, dict(model.named_parameters()), x
    ),
    "vector": lambda model, x: nn.utils.parameters_to_vector(model.parameters()),
}


def read(rank, world_size):
    x = data(9, world_size)[0][0]
    eager, lazy = make(MLP), make(MLP)
    train(*pair(eager), rank, world_size)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        copied_at_wait(patch)
        wrapped, optimizer = pair(lazy, lazy_gather=True)
        for name, reader in READERS.items():
            lazy.load_state_dict(make(MLP).state_dict())
            optimizer.state.clear()
            with torch.enable_grad():
                train(wrapped, optimizer, rank, world_size)
            shapes = [
                (p.shape, p.dtype, p.grad, p.requires_grad, isinstance(p, nn.Parameter))
                for p in lazy.parameters()
            ]
            assert all(
                type(p) is flat_bucket.Arriving for p in lazy.parameters()
            )  # shapes do not wait
            assert len(shapes) == 8
            assert torch.equal(reader(lazy, x), reader(eager, x)), name
            optimizer.receive()
            assert all(type(p) is nn.Parameter for p in lazy.parameters())
    assert not bits_differ(lazy)


def test_whatever_reads_a_parameter_waits_for_it(ranks):
    ranks(read, 2)


class Gathers(list):
    """A listener of `phases`: the gathers by their bucket, and where the wrapper begins to receive."""

    def enter(self, name, index):
        if name in ("gather", "receive"):
            self.append(index if name == "gather" else name)

    def leave(self, name, index): ...
    def announce(self, category, tensors): ...


def gathers(rank, world_size, options):
    wrapped, optimizer = pair(make(MLP), cap=0, first=0, lazy_gather=True, **options)
    train(wrapped, optimizer, rank, world_size)
    phases.listeners.append(found := Gathers())
    train(wrapped, optimizer, rank, world_size, steps=range(1))
    phases.listeners.remove(found)
    return found, len(wrapped.buckets)


def test_half_of_the_lazy_gathers_leave_in_backward_and_the_rest_as_forward_needs_them(ranks):
    for found, buckets in ranks(gathers, 2, {}):
        odd, even = range(1, buckets, 2), range(0, buckets, 2)
        assert found == [*odd, "receive", *reversed(even)]
    for found, buckets in ranks(gathers, 2, {"step_in_backward": False}):
        assert [i for i in found if i != "receive"] == [*reversed(range(buckets))]


def profiled(rank, world_size, folder):
    wrapped, optimizer = pair(make(MLP), lazy_gather=True)
    x, y = data(0, world_size)
    on_their_way = []
    with get_profiler(folder, 1, model=wrapped, optimizer=optimizer) as profiler:
        loss_of(wrapped, x[rank], y[rank]).backward()
        optimizer.step()
        for end in (lambda: None, profiler.step):
            end()
            on_their_way.append(sum(bucket.gather is not None for bucket in optimizer.buckets))
    return on_their_way


def test_no_gather_outlives_the_profiler_it_began_in(ranks, tmp_path):
    """Torch keeps the profiler's memory with it, and frees it twice: the process may crash much later."""
    for before, after in ranks(profiled, 2, tmp_path):
        assert before > 1 and after == 0


# Life


def left(rank, world_size):
    model = make(MLP)
    wrapped, optimizer = pair(model)
    train(wrapped, optimizer, rank, world_size)
    wrapped.remove()
    assert optimizer.wrapper is None
    x, y = data(0, world_size)
    loss_of(model, x[rank], y[rank]).backward()
    assert all(p.grad is not None for p in model.parameters())  # no hook took it
    with pytest.raises(RuntimeError, match="wrap the model"):
        optimizer.step()
    model.zero_grad()
    FlatShardedOptimizer(torch.optim.SGD, model, lr=0.1)  # takes the parameters over
    wrapped = SimpleDDPReduceScatter(model, optimizer)
    with pytest.raises(RuntimeError, match="has left the optimizer's flat buffer"):
        loss_of(wrapped, x[rank], y[rank]).backward()


def test_hooks_go_and_a_buffer_that_was_left_is_noticed(ranks):
    ranks(left, 2)


def late_group(rank, world_size):
    reference, model = make(MLP), make(MLP)
    for m in (reference, model):
        m.layers[0].requires_grad_(False)
    alone = torch.optim.AdamW(list(reference.layers[1:].parameters()), lr=0.05)
    optimizer = FlatShardedOptimizer(torch.optim.AdamW, model.layers[1:], CAP, lr=0.05)
    wrapped = SimpleDDPReduceScatter(model, optimizer)
    train(wrapped, optimizer, rank, world_size, range(2))
    train_alone(reference, alone, world_size, range(2))
    for m, o in ((reference, alone), (model, optimizer)):
        m.layers[0].requires_grad_(True)
        o.add_param_group({"params": list(m.layers[0].parameters()), "lr": 0.2})
    wrapped = SimpleDDPReduceScatter(model, optimizer)
    train(wrapped, optimizer, rank, world_size, range(2, 5))
    train_alone(reference, alone, world_size, range(2, 5))
    assert max_difference(model, reference) <= 1e-9


def test_a_group_added_later_gets_buckets_of_its_own(ranks):
    ranks(late_group, 2)


def refused(rank, world_size):
    model = make(MLP)
    for cls in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon):
        with pytest.raises(ValueError, match=cls.__name__):
            FlatShardedOptimizer(cls, model, lr=0.1)
    for cls in (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adamax):
        FlatShardedOptimizer(cls, model, lr=0.1)
    two = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(ValueError, match="on several devices: cpu, meta"):
        FlatShardedOptimizer(torch.optim.SGD, two, lr=0.1)
    table = nn.Embedding(4, 2, sparse=True)
    wrapped, _ = pair(nn.Sequential(table), torch.optim.SGD)
    with pytest.raises(TypeError, match="the gradient of 0.weight is sparse"):
        wrapped(torch.tensor([1])).sum().backward()
    optimizer = FlatShardedOptimizer(torch.optim.SGD, model, lr=0.1)
    with pytest.raises(RuntimeError, match="shard of this rank only"):
        optimizer.state_dict()


def test_what_a_flat_shard_cannot_do_is_said(ranks):
    ranks(refused, 1)


def compiled(rank, world_size):
    for lazy in (False, True):
        reference, model = make(MLP), make(MLP)
        optimizer = FlatShardedOptimizer(torch.optim.AdamW, model, CAP, lr=0.05)
        wrapped = SimpleDDPReduceScatter(
            torch.compile(model, backend="eager"), optimizer, lazy_gather=lazy
        )
        train(wrapped, optimizer, rank, world_size)
        train_alone(reference, torch.optim.AdamW(reference.parameters(), lr=0.05), world_size)
        assert max_difference(model, reference) <= 1e-9


def test_a_compiled_model_trains_alike(ranks):
    ranks(compiled, 2)


def early_state(rank, world_size):
    reference, model = make(MLP), make(MLP)
    wrapped, optimizer = pair(model, torch.optim.Adagrad)
    train(wrapped, optimizer, rank, world_size)
    train_alone(reference, torch.optim.Adagrad(reference.parameters(), lr=0.05), world_size)
    assert max_difference(model, reference) <= 1e-9
    predicted = predict(model, optimizer, world_size, optimizer.partition)[rank]
    assert state_bytes(optimizer) == (predicted.opt_state, predicted.counters)


def test_an_optimizer_that_makes_its_state_at_once(ranks):
    ranks(early_state, 2)
