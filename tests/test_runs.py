"""A run on disk: written and read back, sanitised, checked, and its device-lane view."""

import copy
import gzip
import json
import os
import random
import re
from pathlib import Path

import pandas as pd
import pytest

from zero1_helpers.measure import files, lanes, runs, schema
from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.lanes import lane_view
from zero1_helpers.measure.runs import load_run

BASE = 5_121_233_000_000.25  # profilers count microseconds from some old day, with fractions
MAIN, GLOO = 4973, (4979, 4980)  # thread ids


def span(name, ts, dur, tid=MAIN, cat="cpu_op", **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 4973,
        "tid": tid,
        "ts": BASE + ts,
        "dur": dur,
        "args": args,
    }


def cpu_trace(rank=0, world_size=2, steps=3, seed=0):
    """A raw trace as torch.profiler writes it on CPU with gloo: an overlapped variant's steps."""
    rng = random.Random(f"{seed} {rank}")
    events, now, workers = [], 3.3, [0.0, 0.0]

    def note(name, start, cat="user_annotation", **args):
        events.append(span(name, start, now - start, cat=cat, **args))

    def ops(count, prefix="aten::"):
        nonlocal now
        for _ in range(count):
            start, length = now, rng.uniform(5, 90)
            events.append(span(f"{prefix}op{rng.randrange(30)}", start, length))
            events.append(span("aten::inner", start, length / 2))  # starts with its parent
            events.append(span("aten::inner", start + length / 2, length / 3))
            now += length + rng.uniform(0.1, 12)

    def collective(kind, enqueue):
        nonlocal now
        events.append(span(f"c10d::{enqueue}", now, 9.5))
        now += 10.125
        if world_size > 1:
            worker = min((0, 1), key=workers.__getitem__)
            start = max(now, workers[worker]) + rng.uniform(1, 40)
            length = rng.uniform(60, 400)
            events.append(span(f"gloo:{kind}", start, length, GLOO[worker], "user_annotation"))
            workers[worker] = start + length

    for step in range(steps):
        begin = now
        now += 7.7
        start = now
        ops(4)
        note("zero1.forward", start)
        backward = now
        for bucket in range(3):
            start = now
            ops(3)
            hook = now
            launch = now
            ops(1)
            if world_size > 1:
                collective("all_reduce", "allreduce_")
            note(f"zero1.launch {bucket}", launch)
            wait = now
            now += rng.uniform(20, 200)  # the thread waits here: nothing computes
            note(f"zero1.wait {bucket}", wait)
            note("autograd::engine::evaluate_function: AccumulateGrad", hook, "cpu_op")
            note("autograd::engine::evaluate_function: MmBackward0", start, "cpu_op")
            start = now
            ops(2)
            note(f"zero1.step {bucket}", start)
            start = now
            if world_size > 1:
                collective("broadcast", "broadcast_")
            note(f"zero1.broadcast {bucket}", start)
        note("zero1.backward", backward)
        now = max(now, *workers) + 1.5
        ops(1)
        note(f"ProfilerStep#{step}", begin)
        now += 0.6
    home = "/Users/alice/project/train.py"
    events.append(span(f"{home}(12): train", 4, now - 5, cat="python_function"))
    events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": BASE + 9})
    rng.shuffle(events)
    return {
        "schemaVersion": 1,
        "host_name": "laptop-of-alice",
        "traceName": "/tmp/alice/trace.json",
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world_size},
        "traceEvents": [
            {
                "ph": "M",
                "name": "process_name",
                "pid": 4973,
                "tid": 0,
                "ts": BASE,
                "args": {"name": "python3"},
            },
            *events,
        ],
    }


def cuda_trace(rank=0, world_size=2, steps=3, seed=0):
    """A raw trace as on a GPU: launches on the host, kernels on streams 7 and 20, copies on 7."""
    rng = random.Random(f"cuda {seed} {rank}")
    events, now, busy, number = [], 2.0, {7: 0, 20: 0}, 100

    def launch(name, stream, length, cat="kernel"):
        nonlocal now, number
        number += 1
        events.append(
            span("cudaLaunchKernel", now, 3, cat="cuda_runtime", correlation=number, cbid=211)
        )
        start = max(now + 5, busy[stream])
        busy[stream] = start + length
        events.append(
            span(
                name,
                start,
                length,
                stream,
                cat,
                stream=stream,
                correlation=number,
                device=rank,
                **{"External id": 5, "queued": 0},
            )
        )
        now += rng.randrange(5, 30)

    for step in range(steps):
        begin = now
        launch("Memcpy HtoD (Pageable -> Device)", 7, rng.randrange(3, 20), "gpu_memcpy")
        for bucket in range(3):
            for _ in range(4):
                name = (
                    f"void at::native::(anonymous namespace)::kernel{rng.randrange(9)}<float>(int)"
                )
                launch(name, 7, rng.randrange(4, 30))
            start = now
            launch(
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", 20, rng.randrange(20, 240)
            )
            events.append(span(f"zero1.launch {bucket}", start, now - start, cat="user_annotation"))
        now += 300
        events.append(span(f"ProfilerStep#{step}", begin, now - begin, cat="user_annotation"))
        events.append(span(f"ProfilerStep#{step}", begin, 5, 7, "gpu_user_annotation"))
        now += 1
    events.append(span("/Users/alice/train.py(3): <module>", 2, 9, cat="python_function"))
    info = {"backend": "nccl", "rank": rank, "world_size": world_size}
    return {"distributedInfo": info, "traceEvents": events}


def make_record(world_size=2, variant="zero1-overlap", **changes):
    states = {"params": 800, "grads": 400, "opt_state": 1600}
    return {
        "format": 1,
        "variant": variant,
        "title": "ZeRO-1 + overlap",
        "preset": "tiny",
        "model": {
            "name": "mlp",
            "parameters": 200,
            "tensors": 4,
            "dtype": "float32",
            "source": "random weights",
        },
        "data": {
            "name": "pairs",
            "source": "shipped",
            "examples": 64,
            "batch_size": 4,
            "tokens_per_batch": 128,
        },
        "backend": "gloo",
        "device": "cpu",
        "hardware": "CPU, 2 cores",
        "world_size": world_size,
        "link": "none",
        "steps": 3,
        "seed": 314,
        "date": "2025-01-31",
        "versions": {"torch": "2.13.0"},
        "losses": [0.9, 0.8, 0.7],
        "step_seconds": [0.2, 0.1, 0.1],
        "memory": [states | {"counters": 16, "buckets": 200, "peak": 4000, "peak_states": 3000}]
        * world_size,
        "predicted": [dict(states)] * world_size,
        "collectives": [{"op": "all_reduce", "calls": 3, "bytes": 800, "bytes_sent": 800}],
    } | changes


def make_memory(seed=0, rows=200):
    """A valid memory timeline: blocks are born and most of them die."""
    rng = random.Random(seed)
    changes, alive, now = [(0, "params", 800_000), (0, "opt_state", 1_600_000)], [], 0
    for _ in range(rows):
        now += rng.randrange(0, 40)
        if alive and rng.random() < 0.48:
            category, size = alive.pop(rng.randrange(len(alive)))
            changes.append((now, category, -size))
        else:
            alive.append((rng.choice(schema.CATEGORIES[1:]), rng.randrange(1, 90_000)))
            changes.append((now, *alive[-1]))
    return pd.DataFrame(changes, columns=list(schema.MEMORY_COLUMNS))


def make_run(folder, world_size=2, raw=cpu_trace, **changes):
    for rank in range(world_size):
        runs.save_rank(folder, rank, lane_view(raw(rank, world_size), BASE), make_memory(rank))
    runs.save_summary(folder, make_record(world_size, **changes))
    return Path(folder)


def kernels(trace):
    return [e for e in trace["traceEvents"] if "stream" in e.get("args", {})]


# Lane view


def test_outermost_aten_ops_become_compute_kernels():
    raw = {
        "traceEvents": [
            span("aten::linear", 10.4, 20.2),
            span("aten::mm", 10.4, 9),
            span("aten::add", 20, 10.6),
            span("aten::relu", 30.6, 5),
            span("c10d::allreduce_", 40, 30),
            span("aten::op", 12, 3, 77),
            span("autograd::engine::evaluate_function: AccumulateGrad", 90, 500),
        ]
    }
    found = [(e["name"], e["ts"], e["dur"]) for e in kernels(lane_view(raw, BASE))]
    # Both ends are rounded: 10.4..30.6 is 10..31, not 10 and a length of 20.
    assert found == [("aten::linear", 10, 21), ("aten::op", 12, 3), ("aten::relu", 31, 5)]
    assert {e["args"]["stream"] for e in kernels(lane_view(raw, BASE))} == {7}


def test_collectives_get_one_lane_per_thread_and_their_phase():
    view = lane_view(cpu_trace(), BASE)
    comm = [e for e in kernels(view) if e["name"].startswith("ncclKernel[gloo:")]
    assert {e["args"]["stream"] for e in comm} == {20, 21}
    wanted = {f"{kind} {k}": 3 for kind in ("launch", "broadcast") for k in range(3)}
    phases = [e["args"]["phase"] for e in comm]
    assert {phase: phases.count(phase) for phase in phases} == wanted
    assert all(("all_reduce" in e["name"]) == ("launch" in e["args"]["phase"]) for e in comm)


def test_a_collective_without_its_issue_gets_no_phase():
    raw = cpu_trace()
    raw["traceEvents"].remove(next(e for e in raw["traceEvents"] if "allreduce" in e["name"]))
    comm = [e for e in kernels(lane_view(raw, BASE)) if "all_reduce" in e["name"]]
    assert len(comm) == 9 and not any("phase" in e["args"] for e in comm)


@pytest.mark.parametrize("make", [cpu_trace, cuda_trace])
def test_view_keeps_what_matters_and_nothing_private(make):
    raw = make(rank=1, world_size=2)
    untouched = copy.deepcopy(raw)
    view = lane_view(raw, BASE)
    assert raw == untouched
    assert view["distributedInfo"] == raw["distributedInfo"]
    assert view["lane_view"] is (make is cpu_trace)
    events = [e for e in view["traceEvents"] if e["ph"] == "X"]
    for kept in ("ProfilerStep#0", "ProfilerStep#2", "zero1.launch 2"):
        assert sum(e["name"] == kept for e in events) == (1 if "Step" in kept else 3)
    assert all(type(e["ts"]) is int and type(e["dur"]) is int and e["ts"] >= 0 for e in events)
    assert not re.search(r"alice|/home|/tmp|python3|4973|laptop", json.dumps(view))
    assert len(json.dumps(view)) < len(json.dumps(raw))


def test_cuda_view_keeps_kernels_with_their_launches():
    raw = cuda_trace()
    view = lane_view(raw, BASE)
    before = sorted(
        (e["name"], e["args"]["stream"], e["args"]["correlation"], e["ts"] - BASE)
        for e in raw["traceEvents"]
        if e["cat"] in lanes.KERNEL_CATEGORIES
    )
    after = sorted(
        (e["name"], e["args"]["stream"], e["args"]["correlation"], e["ts"]) for e in kernels(view)
    )
    assert before == after
    launched = {
        e["args"]["correlation"] for e in view["traceEvents"] if e.get("cat") == "cuda_runtime"
    }
    assert launched == {c for _, _, c, _ in after}
    phases = [e["args"].get("phase") for e in kernels(view) if "nccl" in e["name"]]
    assert phases == ["launch 0", "launch 1", "launch 2"] * 3


def test_what_began_before_the_base_is_left_out_but_never_a_step():
    raw = {
        "traceEvents": [
            span("aten::early", -5, 9),
            span("aten::late", 5, 9),
            span("ProfilerStep#0", 1, 30, cat="user_annotation"),
        ]
    }
    assert [e["name"] for e in kernels(lane_view(raw, BASE))] == ["aten::late"]
    with pytest.raises(ValueError, match="later than the first ProfilerStep"):
        lane_view(raw, BASE + 2)


# Writing


def test_round_trip(tmp_path):
    raw = cpu_trace(0)
    runs.save_rank(tmp_path, 0, lane_view(raw, BASE), make_memory(7), raw)
    runs.save_rank(tmp_path, 1, lane_view(cpu_trace(1), BASE), make_memory(8))
    assert runs.find_runs(tmp_path) == []  # not before its summary is there
    record = make_record()
    runs.save_summary(tmp_path, record)
    run = load_run(tmp_path)
    assert run.record == record
    assert (run.variant, run.world_size, run.folder) == ("zero1-overlap", 2, tmp_path)
    assert run.trace(1) == lane_view(cpu_trace(1), BASE)
    pd.testing.assert_frame_equal(run.memory(0), make_memory(7))
    assert run.trace_files == {
        r: str(tmp_path.resolve() / f"trace.rank{r}.json.gz") for r in (0, 1)
    }
    assert run.caption == (
        "ZeRO-1 + overlap. CPU, 2 cores · 2 ranks · gloo · no emulated link · tiny · 2025-01-31"
    )
    saved = gzip.decompress((tmp_path / "raw.rank0.json.gz").read_bytes()).decode()
    assert len(json.loads(saved)["traceEvents"]) == len(raw["traceEvents"])
    assert "train.py(12): train" in saved
    assert not re.search(r"/home|/tmp|laptop|host_name", saved)
    with pytest.raises(RunError, match="no rank 2; it has 0 to 1"):
        run.memory(2)


def test_same_run_same_bytes(tmp_path, monkeypatch):
    make_run(tmp_path / "a")
    monkeypatch.setattr("time.time", lambda: 4e9)
    make_run(tmp_path / "b")
    names = sorted(os.listdir(tmp_path / "a"))
    assert names == sorted(os.listdir(tmp_path / "b")) and len(names) == 5
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    files.write_atomic(tmp_path / "file", b"old")

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(tmp_path / "file", b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_bad_run_is_not_written(tmp_path):
    with pytest.raises(RunError, match=r"run\.json: field memory\[1\]\.peak"):
        record = copy.deepcopy(make_record())
        record["memory"] = [record["memory"][0], record["memory"][1] | {"peak": 1.5}]
        runs.save_summary(tmp_path, record)
    with pytest.raises(RunError, match=r"distributedInfo\.rank is 1, not 0"):
        runs.save_rank(tmp_path, 0, lane_view(cpu_trace(1), BASE), make_memory())
    assert os.listdir(tmp_path) == []


# Reading


def test_find_runs_is_sorted(tmp_path):
    for name in ("b/two", "a/one", "b/one"):
        make_run(tmp_path / name, world_size=1)
    (tmp_path / "b" / "empty").mkdir()
    found = [path.relative_to(tmp_path).as_posix() for path in runs.find_runs(tmp_path)]
    assert found == ["a/one", "b/one", "b/two"]
    assert runs.find_runs(tmp_path / "a" / "one") == [tmp_path / "a" / "one"]


def edit(name, change):
    """Damage a JSON file of a run."""

    def damage(folder):
        path = folder / name
        data = path.read_bytes()
        value = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
        value = change(value) or value
        text = json.dumps(value).encode()
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)

    return damage


def overwrite(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def csv(text):
    return overwrite("memory.rank0.csv.gz", lambda _: gzip.compress(text.encode()))


TRACE = "trace.rank1.json.gz"
INFINITE = float("inf")
DAMAGES = {
    "no record": (lambda folder: (folder / "run.json").unlink(), "run.json", "missing"),
    "not JSON": (overwrite("run.json", lambda data: data[:99]), "run.json", "damaged"),
    "not text": (overwrite("run.json", lambda _: b"\xff\xfe\x00"), "run.json", "damaged"),
    "foreign": (edit("run.json", lambda _: [1, 2]), "run.json", "whole file"),
    "no field": (edit("run.json", lambda r: r.pop("backend") and None), "run.json", "backend"),
    "no inner field": (
        edit("run.json", lambda r: r["model"].pop("dtype") and None),
        "run.json",
        "model.dtype",
    ),
    "no field in a list": (
        edit("run.json", lambda r: r["memory"][1].pop("peak") and None),
        "run.json",
        "memory[1].peak",
    ),
    "wrong type": (edit("run.json", lambda r: r.update(steps="3")), "run.json", "steps"),
    "bool is no number": (edit("run.json", lambda r: r.update(seed=True)), "run.json", "seed"),
    "other format": (edit("run.json", lambda r: r.update(format=2)), "run.json", "format"),
    "no ranks": (edit("run.json", lambda r: r.update(world_size=0)), "run.json", "world_size"),
    "short list": (edit("run.json", lambda r: r["losses"].pop() and None), "run.json", "losses"),
    "no trace": (lambda folder: (folder / TRACE).unlink(), TRACE, "missing"),
    "cut trace": (overwrite(TRACE, lambda data: data[:-20]), TRACE, "damaged"),
    "flipped bytes": (overwrite(TRACE, lambda d: d[:60] + bytes(60) + d[120:]), TRACE, "damaged"),
    "trace not JSON": (overwrite(TRACE, lambda _: gzip.compress(b'{"a":')), TRACE, "damaged"),
    "foreign trace": (
        edit(TRACE, lambda t: t.pop("distributedInfo") and None),
        TRACE,
        "distributedInfo",
    ),
    "trace of another rank": (
        edit(TRACE, lambda t: t["distributedInfo"].update(rank=0)),
        TRACE,
        "distributedInfo.rank",
    ),
    "no duration": (edit(TRACE, lambda t: t["traceEvents"][-1].pop("dur") and None), TRACE, ".dur"),
    "negative time": (edit(TRACE, lambda t: t["traceEvents"][-1].update(ts=-1)), TRACE, ".ts"),
    "no steps": (edit(TRACE, lambda t: t.update(traceEvents=kernels(t))), TRACE, "ProfilerStep"),
    "raw trace": (edit(TRACE, lambda t: cpu_trace(1)), TRACE, "traceEvents"),
    "no memory": (
        lambda folder: (folder / "memory.rank0.csv.gz").unlink(),
        "memory.rank0.csv.gz",
        "missing",
    ),
    "no column": (csv("time_us,category\n1,params\n"), "memory.rank0.csv.gz", "delta"),
    "no rows": (csv("time_us,category,delta\n"), "memory.rank0.csv.gz", "field"),
    "text for bytes": (
        csv("time_us,category,delta\n1,params,many\n"),
        "memory.rank0.csv.gz",
        "delta",
    ),
    "other category": (csv("time_us,category,delta\n1,gold,8\n"), "memory.rank0.csv.gz", "gold"),
    "back in time": (
        csv("time_us,category,delta\n2,params,8\n1,params,8\n"),
        "memory.rank0.csv.gz",
        "time_us",
    ),
    "negative sum": (
        csv("time_us,category,delta\n1,params,8\n2,params,-9\n"),
        "memory.rank0.csv.gz",
        "delta",
    ),
    "more bytes than 64 bits": (
        csv(f"time_us,category,delta\n1,params,{2**63}\n"),
        "memory.rank0.csv.gz",
        "delta",
    ),
    "a sum that wraps around": (
        csv("time_us,category,delta\n" + f"1,params,{2**53}\n" * 1030),
        "memory.rank0.csv.gz",
        "delta",
    ),
    "an empty file": (overwrite("run.json", lambda _: b""), "run.json", "damaged"),
    "nested too deep": (overwrite("run.json", lambda _: b"[" * 10**6), "run.json", "damaged"),
    "half a sign": (
        overwrite("run.json", lambda d: d.replace(b"ZeRO-1", rb"\ud800")),
        "run.json",
        "damaged",
    ),
    "an escape sequence": (
        edit("run.json", lambda r: r.update(title="\x1b[2J")),
        "run.json",
        "title",
    ),
    "two lines": (
        edit("run.json", lambda r: r["model"].update(name="a\nb")),
        "run.json",
        "model.name",
    ),
    "a book for a title": (
        edit("run.json", lambda r: r.update(title="x" * 10**5)),
        "run.json",
        "title",
    ),
    "date": (edit("run.json", lambda r: r.update(date="soon")), "run.json", "date"),
    "infinite share": (
        edit("run.json", lambda r: r.update(late_share=INFINITE)),
        "run.json",
        "late_share",
    ),
    "no number": (
        edit("run.json", lambda r: r["step_seconds"].__setitem__(1, float("nan"))),
        "run.json",
        "step_seconds[1]",
    ),
    "text for a loss": (
        edit("run.json", lambda r: r.update(losses=["low"] * 3)),
        "run.json",
        "losses[0]",
    ),
    "null": (
        edit("run.json", lambda r: r["predicted"].__setitem__(1, None)),
        "run.json",
        "predicted[1]",
    ),
    "negative bytes": (
        edit("run.json", lambda r: r["memory"][0].update(peak=-1)),
        "run.json",
        "memory[0].peak",
    ),
    "too many bytes": (
        edit("run.json", lambda r: r["memory"][0].update(peak=10**30)),
        "run.json",
        "memory[0].peak",
    ),
    "huge world": (
        edit("run.json", lambda r: r.update(world_size=10**9)),
        "run.json",
        "world_size",
    ),
    "another world": (
        edit(TRACE, lambda t: t["distributedInfo"].update(world_size=4)),
        TRACE,
        "distributedInfo.world_size",
    ),
    "negative length": (edit(TRACE, lambda t: t["traceEvents"][-1].update(dur=-1)), TRACE, ".dur"),
    "endless": (edit(TRACE, lambda t: t["traceEvents"][-1].update(dur=INFINITE)), TRACE, ".dur"),
    "no time": (edit(TRACE, lambda t: t["traceEvents"][-1].update(ts=float("nan"))), TRACE, ".ts"),
    "text for a stream": (
        edit(TRACE, lambda t: kernels(t)[0]["args"].update(stream="7")),
        TRACE,
        "stream",
    ),
    "no name": (edit(TRACE, lambda t: t["traceEvents"][-1].update(name=None)), TRACE, ".name"),
    "other events": (
        edit(TRACE, lambda t: t["traceEvents"][-1].update(ph="B")),
        TRACE,
        "traceEvents",
    ),
    "events in no list": (edit(TRACE, lambda t: t.update(traceEvents={})), TRACE, "traceEvents"),
    "odd steps": (
        edit(
            TRACE,
            lambda t: (
                [
                    e.update(name="ProfilerStep#x")
                    for e in t["traceEvents"]
                    if e["name"].startswith("ProfilerStep")
                ]
                and None
            ),
        ),
        TRACE,
        "ProfilerStep",
    ),
    "a folder": (
        lambda f: ((f / "run.json").unlink(), (f / "run.json").mkdir()),
        "run.json",
        "regular",
    ),
    "a pipe": (lambda f: ((f / TRACE).unlink(), os.mkfifo(f / TRACE)), TRACE, "regular"),
    "a link": (
        lambda f: (f / TRACE).rename(f / "x") and (f / TRACE).symlink_to(f / "x"),
        TRACE,
        "link",
    ),
    "an endless device": (
        lambda f: ((f / "run.json").unlink(), (f / "run.json").symlink_to("/dev/zero")),
        "run.json",
        "link",
    ),
    "a large file": (lambda f: os.truncate(f / "run.json", 2**40), "run.json", "too large"),
    "a bomb": (overwrite(TRACE, lambda _: gzip.compress(bytes(2**29), 9)), TRACE, "too large"),
    "a bomb of values": (
        overwrite(TRACE, lambda _: gzip.compress(b"[" + b"0," * (files.MOST_VALUES + 1), 1)),
        TRACE,
        "too large",
    ),
    "a bomb of events": (
        overwrite(
            TRACE,
            lambda _: gzip.compress(
                b'{"distributedInfo": {"backend": "", "rank": 1, "world_size": 2}, "traceEvents": ['
                + b"{}," * 10**6
                + b"{}]}"
            ),
        ),
        TRACE,
        "traceEvents[0]",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("sound") / "run")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_gives_one_line_with_file_and_field(damage, sound, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for path in sound.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    load_run(folder)
    harm, name, what = DAMAGES[damage]
    harm(folder)
    with pytest.raises(RunError) as caught:
        load_run(folder)
    message = str(caught.value)
    assert str(folder / name) in message and what in message and "\n" not in message


def test_a_device_is_not_read(tmp_path):
    """As /dev/zero it would never end; a device file of one's own takes root."""
    with pytest.raises(RunError, match="regular"):
        files.read_file("/dev/zero")


def test_a_temporary_name_that_somebody_has_prepared_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "precious").write_bytes(b"mine")
    monkeypatch.setattr(os, "urandom", bytes)  # the attacker guesses it
    guessed = []
    monkeypatch.setattr(os, "replace", lambda source, _: guessed.append(source))
    files.write_atomic(tmp_path / "file", b"first")
    guessed[0].unlink()
    guessed[0].symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        files.write_atomic(tmp_path / "file", b"second")
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_names_tell_runs_apart(tmp_path):
    folders = [tmp_path / name for name in ("a/tiny/ddp", "b/tiny/ddp", "b/tiny/zero1")]
    names = runs.run_names(folders)
    assert list(names.values()) == ["a/tiny/ddp", "b/tiny/ddp", "b/tiny/zero1"]
    assert list(runs.run_names(folders[:1]).values()) == ["tiny/ddp"]


def test_losses_need_not_be_finite(tmp_path):
    make_run(tmp_path, losses=[float("nan"), float("inf"), 1])
    assert str(load_run(tmp_path).record["losses"]) == "[nan, inf, 1.0]"
