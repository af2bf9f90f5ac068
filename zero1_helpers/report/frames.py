"""A run as data frames: HTA's three tables, memory timelines, and the schedule of one step.

HTA (HolisticTraceAnalysis; the PyPI package is called `traceinsight`, imported as `hta`) reads
CUDA traces as they are and CPU runs through `runs.lane_view`. What its numbers mean:

- temporal breakdown: from a rank's first kernel to its last, the share of time in which a compute
  kernel runs, in which only others do (communication, copies: "non-compute"), and neither (idle);
- overlap: the share of communication time during which a compute kernel runs too.

The first of several steps warms up: it makes the state, and after it buckets are planned anew. Times are
those of the later steps, memory is that of all.

Everywhere `run` is a `runs.Run`; where only traces matter, {rank: path} will do as well. Times in
frames are in the unit that the column names; memory is in bytes.
"""

import copy
import functools
import logging
import re

import numpy as np
import pandas as pd

from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.lanes import MARKS
from zero1_helpers.measure.ledger import WHOLE_PHASES

NO_INDEX = "all params"
KINDS = {  # of collectives, by the names that gloo and NCCL give them
    "all-reduce": re.compile(r"all_?reduce|reduce_?scatter", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast|all_?gather", re.IGNORECASE),
}


# HTA


def once_per_run(function):
    """Keep the answer with the run: two themes of a figure and the table ask for the same."""

    @functools.wraps(function)
    def remembered(run, *args, **named):
        frames, key = getattr(run, "frames", {}), (function.__name__, *args, *named.items())
        if key not in frames:
            frames[key] = function(run, *args, **named)
        return copy.deepcopy(frames[key])

    return remembered


@once_per_run
def temporal_breakdown(run) -> pd.DataFrame:
    """Per rank: compute_pct, non_compute_pct, idle_pct (they add up to 100), and the same in us."""
    table = _hta(run).get_temporal_breakdown(visualize=False).sort_values("rank")
    us = {name: table[f"{name}_time(us)"] for name in ("compute", "non_compute", "idle")}
    total = table["kernel_time(us)"]
    frame = pd.DataFrame(
        {"rank": table["rank"].astype(int)}
        | {f"{name}_pct": 100 * time / total for name, time in us.items()}
        | {f"{name}_us": time for name, time in us.items()}
        | {"total_us": total}
    )
    return frame.reset_index(drop=True)


@once_per_run
def comm_comp_overlap(run) -> pd.DataFrame:
    """Per rank: overlap_pct, of communication time; NaN where nothing was communicated."""
    with np.errstate(invalid="ignore"):  # HTA divides by the time of communication, maybe 0
        table = _hta(run).get_comm_comp_overlap(visualize=False).sort_values("rank")
    table = table.rename(columns={"comp_comm_overlap_pctg": "overlap_pct"}).astype({"rank": int})
    return table.reset_index(drop=True)


@once_per_run
def kernel_breakdown(run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(by kind, by kernel), over all steps.

    By kind, all ranks together: kernel_type, sum_us, pct; times when two kinds run at once are a
    kind of their own. By kernel and rank: name, kernel_type, rank, sum_us, mean_us, max_us,
    min_us, stddev_us, the longest first.
    """
    kinds, kernels = _hta(run).get_gpu_kernel_breakdown(
        visualize=False,
        duration_ratio=1.0,
        num_kernels=1_000_000,  # fewer, and HTA blends names
    )
    kinds = kinds.rename(columns={"sum": "sum_us", "percentage": "pct"})
    kernels.columns = [name.replace(" (us)", "_us") for name in kernels.columns]
    kernels = kernels.rename(columns={"stddev": "stddev_us"})
    order = ["name", "kernel_type", "rank", "sum_us", "mean_us", "max_us", "min_us", "stddev_us"]
    kernels = kernels[order].sort_values(["sum_us", "name", "rank"], ascending=[False, True, True])
    return kinds, kernels.reset_index(drop=True)


def step_seconds(run) -> float:
    """The median step after the first."""
    seconds = run.record["step_seconds"]
    return float(pd.Series(seconds[1:] or seconds).median())


@once_per_run
def exposed_comm(run) -> pd.DataFrame:
    """Per rank and per step, in us: comm_us, and the exposed_us of it that no compute hides."""
    from hta.utils.utils import get_kernel_type, merge_kernel_intervals

    trace = _hta(run).t
    symbols = trace.symbol_table.get_sym_table()
    rows = []
    for rank, events in sorted(trace.traces.items()):
        kernels = events[events["stream"].ge(0)].copy()
        kinds = kernels["name"].map(
            {name: get_kernel_type(symbols[name]) for name in kernels["name"].unique()}
        )

        def busy(*wanted, kernels=kernels, kinds=kinds):
            merged = merge_kernel_intervals(kernels[kinds.isin(wanted)][["ts", "dur"]].copy())
            return float((merged["end"] - merged["ts"]).sum())

        steps = events[_are_steps(events, symbols) & events["stream"].lt(0)]
        ends = steps["ts"] + steps["dur"]
        count = sum(
            kernels["ts"].between(start, end, inclusive="left").any()
            for start, end in zip(steps["ts"], ends, strict=True)
        )
        compute, both = busy("COMPUTATION"), busy("COMPUTATION", "COMMUNICATION")
        rows.append((rank, busy("COMMUNICATION") / max(count, 1), (both - compute) / max(count, 1)))
    return pd.DataFrame(rows, columns=["rank", "comm_us", "exposed_us"])


def _hta(run):
    """HTA's TraceAnalysis of every rank, of all steps but the first. Read once per run."""
    logging.getLogger("hta").setLevel(logging.ERROR)
    from hta.common.trace import Trace
    from hta.configs.parser_config import ParserConfig
    from hta.trace_analysis import TraceAnalysis

    class Analysis(TraceAnalysis):
        def __init__(self, trace_files):
            least = ParserConfig(ParserConfig.get_minimum_args())  # all that is asked for here
            self.t = Trace(trace_files, parser_config=least)
            # HTA's own constructor forks one process per rank, bad inside a notebook kernel.
            self.t.load_traces(include_last_profiler_step=True, use_multiprocessing=False)
            names = self.t.symbol_table.get_sym_table()
            for rank, events in self.t.traces.items():
                self.t.traces[rank] = ByName(_without_first_step(events, names))

    frames = getattr(run, "frames", {})
    if "hta" not in frames:
        files = {rank: str(path) for rank, path in getattr(run, "trace_files", run).items()}
        frames["hta"] = analysis = Analysis(files)
        for rank, path in files.items():
            events = analysis.t.traces.get(rank)
            if events is None or not events["stream"].ge(0).any():
                raise RunError(f"{path}: no kernel on a stream; a CPU trace needs lane_view")
    return frames["hta"]


class ByName(pd.DataFrame):
    """Events for HTA, which asks for the kind of every event by its name, row by row: here once a name."""

    @property
    def _constructor(self):
        return ByName

    def apply(self, function, axis=0, **options):
        if axis == 1 and list(self.columns) == ["name"]:
            return self["name"].map(
                {name: function({"name": name}) for name in self["name"].unique()}
            )
        return super().apply(function, axis, **options)


def _are_steps(events: pd.DataFrame, names) -> pd.Series:
    """Which events mark a step of the profiler."""
    marks = [code for code in events["name"].unique() if names[code].startswith("ProfilerStep#")]
    return events["name"].isin(marks)


def _without_first_step(events: pd.DataFrame, names) -> pd.DataFrame:
    starts = sorted(
        set(events.loc[_are_steps(events, names), "ts"])
    )  # CUDA traces have a step twice
    return events[events["ts"] >= starts[1]] if len(starts) > 1 else events


# Memory


# Steps and phases


def spans(run, rank: int = 0) -> pd.DataFrame:
    """Steps ("step 0", ...) and then whole phases: name, start_ms, end_ms on the timeline's clock."""
    numbered = steps(run, rank).assign(name=lambda frame: [f"step {i}" for i in frame.index])
    phases = annotations(run, rank)
    marks = pd.concat([numbered, phases[phases["name"].isin(WHOLE_PHASES)]], ignore_index=True)
    zero = run.memory(rank)["time_us"].iloc[0]
    return pd.DataFrame(
        {
            "name": marks["name"],
            "start_ms": (marks["start_us"] - zero) / 1e3,
            "end_ms": (marks["end_us"] - zero) / 1e3,
        }
    )


@once_per_run
def annotations(run, rank: int = 0) -> pd.DataFrame:
    """Steps and phases by start: name ("ProfilerStep#0", "launch 3", ...), start_us, end_us.

    An optimizer's own step (torch marks it) is the phase "step" where no class has marked one.
    """
    rows = [
        (e["name"].removeprefix("zero1."), e["ts"], e["ts"] + e["dur"])
        for e in run.trace(rank)["traceEvents"]
        if e.get("cat") == "user_annotation" and e["name"].startswith(MARKS)
    ]
    frame = pd.DataFrame(rows, columns=["name", "start_us", "end_us"])
    by_torch = frame["name"].str.startswith("Optimizer.step#")
    if frame["name"].str.match(r"step\b").any():
        frame = frame[~by_torch]
    else:
        frame["name"] = frame["name"].mask(by_torch, "step")
    return frame.sort_values("start_us", ignore_index=True)


@once_per_run
def steps(run, rank: int = 0) -> pd.DataFrame:
    """The profiler's steps in which a kernel started (it may open one more at the end)."""
    marks = annotations(run, rank)
    marks = marks[marks["name"].str.startswith("ProfilerStep#")]
    starts = pd.Series([e["ts"] for e in run.trace(rank)["traceEvents"] if _stream(e) >= 0])
    busy = [
        starts.between(m.start_us, m.end_us, inclusive="left").any() for m in marks.itertuples()
    ]
    return marks[busy].reset_index(drop=True)


@once_per_run
def schedule(run, rank: int = 0, step: int = 2) -> pd.DataFrame:
    """What was done for each bucket, and when, in one recorded step (0 is the first).

    Rows: label ("bucket 3", "param 3", or "all params" where a variant does not tell them apart),
    kind ("backward", "all-reduce", "step" or "broadcast"), start_ms and end_ms since the step's
    start. Bucket K's backward is the stretch between two launches: then its gradients were made.
    A step or a broadcast for all buckets at once stands in each of their rows.
    """
    window = steps(run, rank)
    if not 0 <= step < len(window):
        raise ValueError(f"{run.folder}: no step {step}; recorded are 0 to {len(window) - 1}")
    begin, end = window.loc[step, ["start_us", "end_us"]]
    marks = annotations(run, rank)
    marks = marks[marks["start_us"].between(begin, end, inclusive="left")]
    rows = []  # (index or None, kind, start, end)

    for backward in marks[marks["name"] == "backward"].itertuples():
        since = backward.start_us
        for launch in marks[marks["name"].str.match(r"launch \d")].itertuples():
            rows.append(
                (_index(launch.name), "backward", since, min(launch.start_us, backward.end_us))
            )
            since = min(launch.end_us, backward.end_us)
        if not rows:
            rows.append((None, "backward", since, backward.end_us))
    for mark in marks[marks["name"].str.match(r"step\b")].itertuples():
        rows.append((_index(mark.name), "step", mark.start_us, mark.end_us))
    for e in run.trace(rank)["traceEvents"]:
        if _stream(e) < 0 or not begin <= e["ts"] < end:
            continue
        for kind, pattern in KINDS.items():
            if "nccl" in e["name"] and pattern.search(e["name"]):
                index = _index(e["args"].get("phase", ""))
                rows.append((index, kind, e["ts"], e["ts"] + e["dur"]))

    frame = pd.DataFrame(rows, columns=["index", "kind", "start", "end"])
    frame = _spread(frame[frame["end"] > frame["start"]])
    word = "param " if run.variant == "zero1-async" else "bucket "
    label = [NO_INDEX if i < 0 else f"{word}{i:.0f}" for i in frame["index"]]
    return pd.DataFrame(
        {
            "label": label,
            "kind": frame["kind"].to_numpy(),
            "start_ms": (frame["start"].to_numpy() - begin) / 1e3,
            "end_ms": (frame["end"].to_numpy() - begin) / 1e3,
        }
    )


def _spread(frame: pd.DataFrame) -> pd.DataFrame:
    """Give each bucket the step and the broadcasts that were done for all at once, as one span."""
    frame = frame.assign(index=frame["index"].astype(float).fillna(-1))
    buckets = sorted(frame.loc[(frame["kind"] == "backward") & (frame["index"] >= 0), "index"])
    shared = frame[(frame["index"] < 0) & frame["kind"].isin(["step", "broadcast"])]
    if buckets and len(shared):
        spans = shared.groupby("kind").agg({"start": "min", "end": "max"}).reset_index()
        copies = [spans.assign(index=bucket) for bucket in buckets]
        frame = pd.concat([frame.drop(shared.index), *copies])
    return frame.sort_values(["index", "start"])


def _index(name: str) -> int | None:
    found = re.fullmatch(r"[\w-]+ (\d+)", name)
    return int(found[1]) if found else None


def _stream(event: dict) -> int:
    return event.get("args", {}).get("stream", -1) if event.get("ph") == "X" else -1
