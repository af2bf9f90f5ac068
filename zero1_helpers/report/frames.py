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

import logging

import numpy as np
import pandas as pd

from zero1_helpers.measure.files import RunError
from zero1_helpers.report.timing import once_per_run

# HTA


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
