"""The ledger's bytes are the true bytes, for every variant, while collectives run behind backward."""

import weakref

import pandas as pd
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders import torch_ddp, torch_fsdp2, torch_zero
from zero1_helpers import phases
from zero1_helpers.measure.blocks import Blocks, account
from zero1_helpers.measure.ledger import MARKER, MemoryLedger, Note
from zero1_helpers.measure.peaks import peaks, without_blips
from zero1_helpers.measure.profiler import get_profiler
from zero1_helpers.measure.runs import load_run
from zero1_helpers.measure.schema import STATES
from zero1_helpers.measure.trace import read_trace
from zero1_helpers.memory_math import local, nbytes, predict, state_bytes

from .models import MLP, OPTIMIZERS, VARIANTS, UnusedOnSomeRanks, Variant, data, loss_of, make


class Buckets:
    """Storages of announced buckets that something still holds."""

    def __init__(self):
        self.refs = []

    def announce(self, category, tensors):
        self.refs += [weakref.ref(t) for t in tensors if category == "buckets"]

    def enter(self, name, index):
        pass

    leave = enter

    def storages(self):
        alive = [ref() for ref in self.refs]
        return {t.untyped_storage().data_ptr() for t in alive if t is not None}


class TorchVariant:
    """Torch's own classes, their gradients as views of DDP's buckets, which are there all the time."""

    def __init__(self, name, model, cls, **kwargs):
        build = {"torch-ddp": torch_ddp, "torch-zero": torch_zero, "torch-fsdp2": torch_fsdp2}[name]
        views = {} if build is torch_fsdp2 else {"views": True}
        self.buckets = nbytes(model.parameters()) if views else 0
        cap = 300 / 2**20  # some buckets have one gradient, some have more
        self.model, self.optimizer = build(model, model.layers, cls, cap, **views, **kwargs)

    def finish(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def profile_steps(rank, world_size, name, optimizer_name, model_cls):
    """Train under the profiler; the truth about the states is read off the tensors at every edge."""
    cls, kwargs = OPTIMIZERS[optimizer_name]
    torchs = name.startswith("torch")
    variant = (TorchVariant if torchs else Variant)(name, make(model_cls), cls, **kwargs)
    ledger = MemoryLedger(variant.model, variant.optimizer)
    truth, buckets, params = [], Buckets(), {}

    def edge():
        """Look, and note which marker it was and what is true at it."""
        state, counters = state_bytes(variant.optimizer)
        params.update(dict.fromkeys(variant.model.parameters()))  # FSDP2 shows shards or whole ones
        grads = [local(p.grad).untyped_storage() for p in params if p.grad is not None]
        grads = {s.data_ptr(): s.nbytes() for s in grads}
        while buckets.storages() - grads.keys():
            pass  # gloo's threads still hold one; only the gradients' own buckets outlive a phase
        ledger.look()
        storages = [local(p).untyped_storage() for p in params]  # flat ones are padded
        truth.append(
            (
                len(ledger.notes) - 1,
                {
                    "params": sum({s.data_ptr(): s.nbytes() for s in storages}.values()),
                    "opt_state": state,
                    "counters": counters,
                    "grads or buckets": getattr(variant, "buckets", 0) or sum(grads.values()),
                },
            )
        )

    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True
    ) as prof:
        phases.listeners += [ledger, buckets]
        try:
            edge()
            for step in range(3):
                x, y = data(step, world_size)
                loss = loss_of(variant.model, x[rank], y[rank])
                edge()
                loss.backward()
                if torchs:
                    edge()
                variant.finish()
                getattr(
                    variant.optimizer, "receive", lambda: None
                )()  # nothing is on its way at an edge
                del x, y, loss
                edge()
                prof.step()
        finally:
            phases.listeners.clear()
    # Flat buckets keep where the pieces of gradients begin: 8 bytes each, on ranks that use all of them.
    flat = [bucket for bucket in getattr(variant.optimizer, "buckets", ()) if bucket.indexed]
    index = sum(8 * len(heads) for bucket in flat for heads in bucket.layout.heads.values())
    return read_trace(prof)["traceEvents"], ledger.notes, truth, index


def at_marker(memory, events, number):
    """Bytes by category right after a marker."""
    ts = next(
        e["ts"] for e in events if e.get("name") == f"{MARKER}{number}" and e.get("ph") == "X"
    )
    return memory[memory.time_us <= ts].groupby("category")["delta"].sum().to_dict()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_category_is_exact_at_every_marker(ranks, name, optimizer):
    for events, notes, truth, index in ranks(profile_steps, 2, name, optimizer, UnusedOnSomeRanks):
        memory = account(events, notes)
        assert len(truth) == 7
        for number, true in truth:
            found = at_marker(memory, events, number)
            for category in ("params", "opt_state", "counters"):
                assert found.get(category, 0) == true[category], (number, category)
            # A gradient handed back as a view of its bucket is a bucket in the ledger.
            held = found.get("grads", 0) + found.get("buckets", 0)
            assert held == true["grads or buckets"], (number, found)
        last = at_marker(memory, events, truth[-1][0])
        assert (
            sum(last.values()) == sum(truth[-1][1].values()) + index
        )  # nothing else outlives a step


@pytest.mark.parametrize("name", ["torch-ddp", "torch-zero", "torch-fsdp2"])
def test_torchs_own_classes_are_read_as_exactly(ranks, name):
    whole = sum(p.opt_state for p in predict(make(MLP), torch.optim.AdamW))
    held = []
    for events, notes, truth, _ in ranks(profile_steps, 2, name, "adamw", MLP):
        memory = account(events, notes)
        assert len(truth) == 10
        for number, true in truth:
            found = at_marker(memory, events, number)
            found["grads or buckets"] = found.get("grads", 0) + found.get("buckets", 0)
            assert {category: found.get(category, 0) for category in true} == true, number
        held.append(truth[-1][1]["opt_state"])
    assert (
        (held == [whole] * 2)
        if name == "torch-ddp"
        else (sum(held) == whole and max(held) < 0.6 * whole)
    )


def record_torchs(rank, world_size, name, folder):
    variant = TorchVariant(name, make(MLP), torch.optim.AdamW, lr=0.01)
    with get_profiler(folder, 1, model=variant.model, optimizer=variant.optimizer) as profiler:
        x, y = data(0, world_size)
        loss_of(variant.model, x[rank], y[rank]).backward()
        variant.finish()
        profiler.step()


@pytest.mark.parametrize("name", ["torch-ddp", "torch-zero", "torch-fsdp2"])
def test_what_torchs_classes_hold_is_predicted(ranks, name, tmp_path):
    ranks(record_torchs, 2, name, tmp_path)
    record = load_run(tmp_path).record
    held, predicted = (
        [rank["opt_state"] for rank in record[key]] for key in ("memory", "predicted")
    )
    assert held == predicted and min(held) > 0


def test_peaks_are_the_predicted_bytes(ranks):
    predicted = predict(make(MLP), torch.optim.AdamW, 2)
    for name in ("ddp", "zero1", "overlap"):
        for rank, (events, notes, *_) in enumerate(ranks(profile_steps, 2, name, "adamw", MLP)):
            found = peaks(account(events, notes))
            assert found["params"] == predicted[rank].params
            whole = sum(p.opt_state for p in predicted)
            assert found["opt_state"] == (whole if name == "ddp" else predicted[rank].opt_state)
            if name == "overlap":  # gradients are freed bucket by bucket
                assert found["grads"] < predicted[rank].grads
            else:
                assert found["grads"] == predicted[rank].grads
            assert found["peak"] >= found["peak_states"] >= found["params"] + found["opt_state"]


def memory_event(ts, address, size, device=0):
    args = {"Addr": address, "Bytes": size, "Device Type": device}
    return {"ph": "i", "name": "[memory]", "ts": ts, "args": args}


def annotation(ts, name, dur=1):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur}


def total_at(memory, ts):
    return {
        c: int(d)
        for c, d in memory[memory.time_us <= ts].groupby("category")["delta"].sum().items()
        if d
    }


def test_what_the_allocator_does_not_tell():
    events = [
        annotation(0, "ProfilerStep#0", 100),
        annotation(1, "ledger 0"),
        memory_event(5, 0x10, 8),  # the batch
        annotation(10, "zero1.forward", 10),
        memory_event(12, 0x20, 16),
        memory_event(25, 0x30, 32),  # born in backward, named a gradient later
        annotation(30, "ledger 1"),
        memory_event(40, 0x20, 64),  # the same address: 16 bytes were freed and nobody said so
        memory_event(50, 0x30, -32),
        memory_event(55, 0x99, -7),  # older than the window and never named: not ours
        annotation(60, "ledger 2"),
        memory_event(65, 0x30, 32),  # not the one that is gone
        annotation(70, "ledger 3"),
    ]
    notes = [
        Note(True, {0x1: ("params", 100), 0x2: ("grads", 50)}, []),
        Note(True, {0x1: ("params", 100), 0x30: ("grads", 32)}, []),  # 0x2 is gone
        Note(False, {0x20: ("buckets", 64)}, []),
        Note(False, {}, [(0x20, 2), (0x30, 2)]),  # freed out of sight
    ]
    memory = account(events, notes)
    assert total_at(memory, 0) == {"params": 100, "grads": 50}
    assert total_at(memory, 26) == {"params": 100, "grads": 82, "other": 8, "activations": 16}
    assert total_at(memory, 35) == {"params": 100, "grads": 32, "other": 8, "activations": 16}
    assert total_at(memory, 45) == {"params": 100, "grads": 32, "other": 8, "buckets": 64}
    assert total_at(memory, 66) == {"params": 100, "other": 8, "buckets": 64, "temporaries": 32}
    assert total_at(memory, 99) == {"params": 100, "other": 8, "temporaries": 32}
    assert peaks(memory)["peak_states"] == 100 + 32 + 64
    assert set(memory.category) <= {*STATES, "counters", "activations", "temporaries", "other"}


def test_cuda_blocks_are_rounded_as_its_allocator_does():
    events = [
        annotation(0, "ledger 0"),
        memory_event(1, 0x5, 512, device=1),
        memory_event(2, 0x6, 9, device=0),
    ]
    memory = account(events, [Note(True, {0x1: ("params", 600)}, [])], cuda=True)
    assert total_at(memory, 9) == {"params": 1024, "other": 512}


def test_blips_go_and_nothing_else():
    changes = [
        ("params", 1_000_000),
        *(("temporaries", change) for change in (4_000, 4, -4, -4_000)),  # one in another: both go
        *(("temporaries", change) for change in (100_000, -100_000)),  # large
        ("grads", 8),
        ("grads", -8),
        ("activations", 2_000_000),
        ("temporaries", 16),
        ("temporaries", -16),  # the peak
        ("temporaries", 8),
        ("grads", 4),
        ("temporaries", -8),
        ("activations", -2_000_000),
    ]
    changed = [(at, *change) for at, change in enumerate(changes)]
    memory = pd.DataFrame(changed, columns=["time_us", "category", "delta"])
    kept = without_blips(memory)
    assert kept["time_us"].tolist() == [0, *range(5, 16)]  # 10 is the peak
    assert peaks(kept) == peaks(memory) and peaks(memory)["peak"] == 3_000_016


# Blocks: what neither the allocator nor a note tells, one rule after the other.


def rows(blocks):
    return [tuple(row) for row in blocks.changes().itertuples(index=False)]


def test_an_address_that_is_allocated_again_was_freed():
    blocks = Blocks(start=0)
    blocks.allocated(1, 0x10, 8)
    blocks.allocated(5, 0x10, 16)
    assert rows(blocks) == [(1, "other", 8), (5, "other", 16), (5, "other", -8)]


def test_a_free_of_something_else_at_an_address_is_not_a_free_of_what_a_note_named():
    blocks = Blocks(start=0)
    blocks.noted(1, 0, Note(True, {0x10: ("params", 100)}, []))
    blocks.freed(2, 0x10, 7)
    assert rows(blocks) == [(0, "params", 100)]
    blocks.freed(3, 0x10, 100)
    assert rows(blocks)[-1] == (3, "params", -100)


def test_a_block_older_than_the_window_ends_with_the_first_whole_note_that_lacks_it():
    blocks = Blocks(start=0)
    blocks.noted(1, 0, Note(True, {0x10: ("opt_state", 100)}, []))
    blocks.noted(2, 1, Note(False, {}, []))  # not a whole one: it says nothing of what it lacks
    blocks.noted(3, 2, Note(True, {}, []))
    assert rows(blocks) == [(0, "opt_state", 100), (3, "opt_state", -100)]


def test_an_announced_tensor_that_is_gone_takes_its_block_along_and_no_later_one():
    blocks = Blocks(start=0)
    blocks.allocated(1, 0x10, 8)
    blocks.noted(2, 0, Note(False, {0x10: ("buckets", 8)}, []))
    blocks.allocated(3, 0x10, 8)  # the address has another owner by now, which nobody announced
    blocks.noted(4, 1, Note(False, {}, [(0x10, 0)]))
    assert rows(blocks) == [(1, "buckets", 8), (3, "other", 8), (3, "buckets", -8)]
