"""A run's memory timelines: by category and time, their peaks, and thinned out for drawing."""

import pandas as pd

from zero1_helpers.measure.schema import CATEGORIES, STATES
from zero1_helpers.report.timing import once_per_run, spans


def get_memory_timeline(run, rank: int = 0) -> pd.DataFrame:
    """Bytes alive after each change: time_ms since the window's start, each category, and total.

    Changes in the same microsecond are one: a block is freed and its place taken again.
    """
    changes = run.memory(rank)
    frame = pd.DataFrame({"time_ms": (changes["time_us"] - changes["time_us"].iloc[0]) / 1e3})
    for name in CATEGORIES:
        frame[name] = changes["delta"].where(changes["category"] == name, 0).cumsum()
    frame["total"] = changes["delta"].cumsum()
    return frame.drop_duplicates("time_ms", keep="last", ignore_index=True)


def memory_peaks(run) -> pd.DataFrame:
    """Per rank, in bytes: peak (of the total, at peak_ms), peak_states, each category's peak.

    peak_states is the highest sum of params, grads, opt_state and buckets: what ZeRO is about.
    """
    rows = []
    for rank in range(run.world_size):
        line = get_memory_timeline(run, rank)
        top = line["total"].idxmax()
        rows.append(
            {
                "rank": rank,
                "peak": line["total"][top],
                "peak_ms": line["time_ms"][top],
                "peak_states": line[list(STATES)].sum(axis=1).max(),
                **line[list(CATEGORIES)].max(),
            }
        )
    return pd.DataFrame(rows)


@once_per_run
def fullest(run) -> pd.DataFrame:
    """Two moments, each on the rank where it is worst: rows "states" and "total", columns as in a timeline.

    "states": params, grads, opt_state and buckets together are highest; "total": everything is.
    """
    lines = [get_memory_timeline(run, rank) for rank in range(run.world_size)]
    rows = {}
    for name, columns in {"states": list(STATES), "total": ["total"]}.items():
        sums = [line[columns].sum(axis=1) for line in lines]
        rank = max(range(len(lines)), key=lambda r: sums[r].max())
        rows[name] = lines[rank].loc[sums[rank].idxmax()]
    return pd.DataFrame(rows).T


def downsample(line: pd.DataFrame, edges_ms=(), bins: int = 300) -> pd.DataFrame:
    """A timeline of few enough rows to draw, each a real one.

    Kept are, of every bin of time, the lowest and the highest total and the last row; each category's
    highest; and the row in force at every edge. So the peak and the bytes at each edge are exact.
    """
    if len(line) <= 2 * bins:
        return line
    time = line["time_ms"]
    groups = line["total"].groupby((time / time.iloc[-1] * bins).astype(int))
    edges = time.searchsorted(edges_ms, side="right") - 1
    kept = {
        0,
        *groups.idxmin(),
        *groups.idxmax(),
        *groups.tail(1).index,
        *line[list(CATEGORIES)].idxmax(),
        *edges[edges >= 0],
    }
    return line.loc[sorted(kept)]


@once_per_run
def timelines(run) -> list[pd.DataFrame]:
    """Each rank's memory timeline, downsampled, with a column `doing` ("step 2, backward")."""
    lines = []
    for rank in range(run.world_size):
        marks = spans(run, rank)
        line = downsample(get_memory_timeline(run, rank), [*marks["start_ms"], *marks["end_ms"]])
        doing = [""] * len(line)
        for mark in marks.itertuples():  # steps come first
            inside = line["time_ms"].between(mark.start_ms, mark.end_ms, inclusive="left")
            for i in inside.to_numpy().nonzero()[0]:
                doing[i] += f", {mark.name}" if doing[i] else mark.name
        lines.append(line.assign(doing=doing).reset_index(drop=True))
    return lines
