"""A run's steps, phases and collectives as frames of times."""

import copy
import functools
import re

import pandas as pd

from zero1_helpers.measure.lanes import MARKS
from zero1_helpers.measure.ledger import WHOLE_PHASES

NO_INDEX = "all params"
KINDS = {  # of collectives, by the names that gloo and NCCL give them
    "all-reduce": re.compile(r"all_?reduce|reduce_?scatter", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast|all_?gather", re.IGNORECASE),
}


def once_per_run(function):
    """Keep the answer with the run: two themes of a figure and the table ask for the same."""

    @functools.wraps(function)
    def remembered(run, *args, **named):
        frames, key = getattr(run, "frames", {}), (function.__name__, *args, *named.items())
        if key not in frames:
            frames[key] = function(run, *args, **named)
        return copy.deepcopy(frames[key])

    return remembered


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
