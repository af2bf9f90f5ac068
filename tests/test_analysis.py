"""HTA's numbers on runs equal brute force on the profiler's own events; memory; schedules."""

import gzip
import json
import multiprocessing
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from zero1_helpers.measure import runs
from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.lanes import lane_view
from zero1_helpers.measure.runs import load_run
from zero1_helpers.measure.schema import CATEGORIES
from zero1_helpers.report import frames, memory, timing

from .test_runs import BASE, cpu_trace, cuda_trace, make_memory, make_run, span

TOLERANCE = 0.1  # percentage points


def intervals(raw, kind):
    """(start, end) of every compute or communication event in a raw trace, however nested."""
    chosen = {
        "compute": lambda e: (
            e["name"].startswith("aten::") or (e.get("cat") == "kernel" and "nccl" not in e["name"])
        ),
        "communication": lambda e: e["name"].startswith(("gloo:", "nccl")),
        "copy": lambda e: e.get("cat") == "gpu_memcpy",
    }[kind]
    found = [
        (e["ts"] - BASE, e["ts"] - BASE + e["dur"])
        for e in raw["traceEvents"]
        if e["ph"] == "X" and chosen(e) and e["ts"] >= second_step(raw)
    ]
    return np.array(found).reshape(-1, 2)


def second_step(trace):
    return next(e["ts"] for e in trace["traceEvents"] if e["name"] == "ProfilerStep#1")


def brute_force(raw):
    """Cut time at every event's edge; look what covers the middle of each piece."""
    kinds = {kind: intervals(raw, kind) for kind in ("compute", "communication", "copy")}
    edges = np.unique(np.concatenate([k.ravel() for k in kinds.values()]))
    middle, length = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    on = {
        kind: ((k[:, 0, None] < middle) & (middle < k[:, 1, None])).any(axis=0)
        for kind, k in kinds.items()
    }
    compute, comm, busy = on["compute"], on["communication"], on["communication"] | on["copy"]
    total = length.sum()
    return {
        "compute_pct": 100 * length[compute].sum() / total,
        "non_compute_pct": 100 * length[busy & ~compute].sum() / total,
        "idle_pct": 100 * length[~busy & ~compute].sum() / total,
        "overlap_pct": 100 * length[comm & compute].sum() / max(length[comm].sum(), 1e-9),
        "comm_us": length[comm].sum(),
        "exposed_us": length[comm & ~compute].sum(),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(make_run(tmp_path_factory.mktemp("runs") / "run"))


@pytest.mark.parametrize(
    ("make", "world_size"), [(cpu_trace, 2), (cpu_trace, 3), (cuda_trace, 1), (cuda_trace, 2)]
)
def test_hta_equals_brute_force(make, world_size, tmp_path):
    run = load_run(make_run(tmp_path, world_size, make))
    times, overlap = frames.temporal_breakdown(run), frames.comm_comp_overlap(run)
    exposed = frames.exposed_comm(run)
    assert list(times["rank"]) == list(overlap["rank"]) == list(exposed["rank"])
    assert list(times["rank"]) == list(range(world_size))
    for rank in range(world_size):
        wanted = brute_force(make(rank, world_size))
        assert 5 < wanted["overlap_pct"] < 95  # else this would show little
        for name in ("compute_pct", "non_compute_pct", "idle_pct"):
            assert times[name][rank] == pytest.approx(wanted[name], abs=TOLERANCE)
        assert overlap["overlap_pct"][rank] == pytest.approx(wanted["overlap_pct"], abs=TOLERANCE)
        for name in ("comm_us", "exposed_us"):  # of two steps; a rounding error per event
            assert exposed[name][rank] == pytest.approx(wanted[name] / 2, abs=20)
    assert times[["compute_pct", "non_compute_pct", "idle_pct"]].sum(axis=1).to_numpy() == (
        pytest.approx(100)
    )


def test_cuda_traces_as_they_are(tmp_path):
    """Without a view: HTA on the profiler's own files, the last step counted too."""
    files, raws = {}, [cuda_trace(0), cuda_trace(1)]
    for rank, raw in enumerate(raws):
        for event in raw["traceEvents"]:
            event["ts"] = int(event["ts"])  # HTA shortens each kernel that has a fraction
        files[rank] = tmp_path / f"{rank}.json.gz"
        files[rank].write_bytes(gzip.compress(json.dumps(raw).encode()))
    times, overlap = frames.temporal_breakdown(files), frames.comm_comp_overlap(files)
    for rank, raw in enumerate(raws):
        wanted = brute_force(raw)
        assert times["compute_pct"][rank] == pytest.approx(wanted["compute_pct"], abs=TOLERANCE)
        assert overlap["overlap_pct"][rank] == pytest.approx(wanted["overlap_pct"], abs=TOLERANCE)


def test_one_rank_without_communication(tmp_path, monkeypatch):
    make_run(tmp_path / "run", 1, partial(cpu_trace, steps=9))
    monkeypatch.chdir(tmp_path)
    run = load_run("run")  # a relative path will do, too
    times = frames.temporal_breakdown(run)
    assert times["non_compute_pct"][0] == 0
    wanted = brute_force(cpu_trace(0, 1, steps=9))
    assert times["compute_pct"][0] == pytest.approx(wanted["compute_pct"], abs=TOLERANCE)
    assert frames.comm_comp_overlap(run)["overlap_pct"].isna().all()
    assert frames.exposed_comm(run)[["comm_us", "exposed_us"]].to_numpy().tolist() == [[0, 0]]
    assert list(frames.kernel_breakdown(run)[0]["kernel_type"]) == ["COMPUTATION"]


def test_kernel_breakdown_keeps_every_name(run):
    kinds, kernels = frames.kernel_breakdown(run)
    wanted = pd.DataFrame(
        [
            (e["name"], rank, e["dur"])
            for rank in range(2)
            for e in run.trace(rank)["traceEvents"]
            if "stream" in e.get("args", {}) and e["ts"] >= second_step(run.trace(rank))
        ],
        columns=["name", "rank", "dur"],
    )
    wanted = wanted.groupby(["name", "rank"])["dur"].agg(["sum", "mean", "max", "min"])
    assert len(wanted) > 40
    found = kernels.set_index(["name", "rank"]).loc[wanted.index]
    assert len(kernels) == len(wanted)
    for name in wanted:
        assert found[f"{name}_us"].to_numpy() == pytest.approx(wanted[name].to_numpy())
    assert kernels["sum_us"].is_monotonic_decreasing
    assert kinds["pct"].sum() == pytest.approx(100, abs=0.2)
    assert "COMPUTATION overlapping COMMUNICATION" in set(kinds["kernel_type"])


def test_hta_is_quiet_and_forks_nothing(run, capfd, caplog, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a process was to be forked")

    monkeypatch.setattr(multiprocessing, "get_context", refuse)
    files = dict(run.trace_files)  # a dict is not cached
    frames.temporal_breakdown(files)
    frames.kernel_breakdown(files)
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_a_cpu_trace_without_lanes_is_named(tmp_path):
    path = tmp_path / "raw.json"
    path.write_text(json.dumps(cpu_trace()))
    with pytest.raises(RunError, match=r"raw\.json: no kernel on a stream; .* lane_view"):
        frames.temporal_breakdown({0: path})


# Memory


def test_memory_timeline_equals_a_loop(run):
    frame = memory.get_memory_timeline(run, 1)
    alive, wanted = dict.fromkeys(CATEGORIES, 0), {}
    for time, category, delta in make_memory(1).itertuples(index=False):
        alive[category] += delta
        wanted[time / 1e3] = (*alive.values(), sum(alive.values()))  # the last of its microsecond
    assert list(frame.columns) == ["time_ms", *CATEGORIES, "total"]
    assert list(frame.index) == list(range(len(wanted)))
    assert (
        dict(
            zip(frame["time_ms"], frame.iloc[:, 1:].itertuples(index=False, name=None), strict=True)
        )
        == wanted
    )


def test_memory_peaks(run):
    peaks = memory.memory_peaks(run)
    for rank in range(2):
        frame = memory.get_memory_timeline(run, rank)
        row = peaks.loc[rank]
        assert (row["rank"], row["peak"]) == (rank, frame["total"].max())
        assert frame.set_index("time_ms")["total"][row["peak_ms"]] == row["peak"]
        states = frame["params"] + frame["grads"] + frame["opt_state"] + frame["buckets"]
        assert row["peak_states"] == states.max() < row["peak"]
        assert all(row[name] == frame[name].max() for name in CATEGORIES)


# Schedules


def scheduled(folder, events, variant):
    marks = [
        span("ProfilerStep#0", 0, 100, cat="user_annotation"),
        span("ProfilerStep#1", 1000, 900, cat="user_annotation"),
        span("aten::mm", 5, 9),
    ]
    raw = cpu_trace(0, 1) | {"traceEvents": marks + events}
    runs.save_rank(folder, 0, lane_view(raw, BASE), make_memory())
    make_run(folder.parent / "other", 1, variant=variant)
    (folder / "run.json").write_bytes((folder.parent / "other" / "run.json").read_bytes())
    frame = timing.schedule(load_run(folder), rank=0, step=1)
    return [tuple(row) for row in frame.itertuples(index=False)]


def phase(name, ts, dur):
    return span(f"zero1.{name}", ts, dur, cat="user_annotation")


def gloo(name, ts, dur):
    return span(f"gloo:{name}", ts, dur, 4979, "user_annotation")


def issue(name, ts):
    return span(f"c10d::{name}", ts, 1)


def test_schedule_of_buckets(tmp_path):
    events = [
        phase("forward", 1010, 40),
        phase("backward", 1100, 300),
        span("aten::mm", 1100, 50),
        phase("launch 0", 1150, 10),
        issue("allreduce_", 1151),
        gloo("all_reduce", 1165, 70),
        phase("launch 1", 1250, 10),
        issue("allreduce_", 1251),
        gloo("all_reduce", 1265, 30),
        phase("step 0", 1270, 20),
        phase("broadcast 0", 1291, 9),
        issue("broadcast_", 1292),
        gloo("broadcast", 1300, 50),
        phase("step 1", 1410, 20),
        phase("broadcast 1", 1431, 9),
        issue("broadcast_", 1432),
        gloo("broadcast", 1440, 50),
    ]
    assert scheduled(tmp_path / "run", events, "zero1-overlap") == [
        ("bucket 0", "backward", 0.1, 0.15),
        ("bucket 0", "all-reduce", 0.165, 0.235),
        ("bucket 0", "step", 0.27, 0.29),
        ("bucket 0", "broadcast", 0.3, 0.35),
        ("bucket 1", "backward", 0.16, 0.25),
        ("bucket 1", "all-reduce", 0.265, 0.295),
        ("bucket 1", "step", 0.41, 0.43),
        ("bucket 1", "broadcast", 0.44, 0.49),
    ]


def test_schedule_spreads_what_is_done_for_all(tmp_path):
    events = [
        phase("backward", 1100, 100),
        phase("launch 0", 1150, 10),
        issue("allreduce_", 1151),
        gloo("all_reduce", 1165, 70),
        phase("launch 1", 1250, 10),
        issue("allreduce_", 1251),
        gloo("all_reduce", 1265, 30),
        phase("step", 1300, 20),
        phase("broadcast", 1330, 20),
        issue("broadcast_", 1331),
        issue("broadcast_", 1341),
        gloo("broadcast", 1335, 5),
        gloo("broadcast", 1345, 15),
    ]
    rows = scheduled(tmp_path / "run", events, "zero1-async")
    assert rows == [
        ("param 0", "backward", 0.1, 0.15),
        ("param 0", "all-reduce", 0.165, 0.235),
        ("param 0", "step", 0.3, 0.32),
        ("param 0", "broadcast", 0.335, 0.36),
        # Launched after the backward pass: its backward ends with that.
        ("param 1", "backward", 0.16, 0.2),
        ("param 1", "all-reduce", 0.265, 0.295),
        ("param 1", "step", 0.3, 0.32),
        ("param 1", "broadcast", 0.335, 0.36),
    ]


def test_schedule_without_launches_is_one_row(tmp_path):
    events = [
        phase("backward", 1100, 100),
        phase("sync", 1200, 100),
        issue("allreduce_", 1201),
        gloo("all_reduce", 1202, 20),
        issue("allreduce_", 1241),
        gloo("all_reduce", 1242, 20),
        span("Optimizer.step#Adam.step", 1310, 30, cat="user_annotation"),
    ]
    assert scheduled(tmp_path / "run", events, "ddp") == [
        ("all params", "backward", 0.1, 0.2),
        ("all params", "all-reduce", 0.202, 0.222),
        ("all params", "all-reduce", 0.242, 0.262),
        ("all params", "step", 0.31, 0.34),
    ]


def test_schedule_on_cuda_and_of_a_step_that_is_not_there(tmp_path):
    run = load_run(make_run(tmp_path, 1, cuda_trace))
    frame = timing.schedule(run, 0, 2)
    assert list(frame["kind"]) == ["all-reduce"] * 3
    assert list(frame["label"]) == ["bucket 0", "bucket 1", "bucket 2"]
    with pytest.raises(ValueError, match="no step 3; recorded are 0 to 2"):
        timing.schedule(run, 0, 3)


def test_steps_leave_out_an_empty_last_one(run):
    assert list(timing.steps(run)["name"]) == [f"ProfilerStep#{i}" for i in range(3)]
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 10**6, "dur": 5}
    trace = run.trace(0) | {"traceEvents": [*run.trace(0)["traceEvents"], mark]}
    longer = replace(run, traces=run.traces | {0: trace}, frames={})
    assert "ProfilerStep#3" in set(timing.annotations(longer)["name"])
    assert len(timing.steps(longer)) == 3
