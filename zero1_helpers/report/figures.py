"""Data frames -> figures: one look, light and dark, and the same bytes from the same input.

Every function takes a run (or a list of runs) and `theme="light"` or `"dark"`, and returns a
matplotlib Figure with three attributes of its own: `.title`, `.caption` (what is shown, then
hardware, ranks, backend, link, date) and `.alt_text`. Units are decimal: 1 MB = 1e6 bytes.
`save` writes files, `show` displays in a notebook; `gallery` draws all of them in a folder.
"""

import base64
import io
import re
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from zero1_helpers.measure.files import RunError, write_atomic
from zero1_helpers.measure.runs import Run, setting_of
from zero1_helpers.measure.schema import STATES
from zero1_helpers.report import frames
from zero1_helpers.training.variants import VARIANTS

WIDTH = 7.2  # inches, whatever the figure: one blog column
DPI = 130
THEMES = {
    "light": {"paper": "#ffffff", "ink": "#1b1f24", "muted": "#5c6670", "rule": "#d5dade"},
    "dark": {"paper": "#12161b", "ink": "#e8ecf0", "muted": "#9aa5b1", "rule": "#343c45"},
}
# Okabe-Ito: told apart with any colour vision. What works on something has its colour: a
# broadcast sends params, an all-reduce sums grads, a step changes opt_state.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, YELLOW, RED, GREY = "#56B4E9", "#E8D535", "#D55E00", "#8B949E"
COLOURS = {
    "params": BLUE, "broadcast": BLUE, "grads": ORANGE, "all-reduce": ORANGE, "sync": ORANGE,
    "opt_state": GREEN, "step": GREEN, "buckets": PINK, "activations": SKY, "backward": SKY,
    "compute": SKY, "receive": BLUE, "temporaries": YELLOW, "copies": YELLOW, "other": GREY, "counters": GREY,
    "idle": GREY, "forward": "#A5D8F3", "exposed": RED, "hidden": "#F2B48C",
}  # fmt: skip
STACK = ("params", "opt_state", "grads", "buckets", "activations", "temporaries", "other",
         "counters")  # fmt: skip
PHASES = {"forward": "fwd", "backward": "bwd", "sync": "sync", "step": "step",
          "broadcast": "bcast", "receive": "recv"}  # fmt: skip
MARGIN = {"left": 0.86, "right": 0.22, "top": 0.74, "bottom": 0.76}  # inches around the axes


# The figures


def memory_timeline(run: Run, rank: int = 0, theme: str = "light") -> Figure:
    """Bytes alive on `rank` over time, stacked by category, with the peak marked."""
    frame = frames.get_memory_timeline(run, rank)
    peak = frame.loc[frame["total"].idxmax()]
    scale, unit = _unit(peak["total"])
    marks = frames.spans(run, rank)
    drawn = frames.downsample(frame, [*marks["start_ms"], *marks["end_ms"]])
    names = [name for name in STACK if frame[name].max() > 0.002 * peak["total"]]
    with _look(theme) as look:
        fig, ax = _canvas(3.9, f"Memory of rank {rank}", run.title, run.setting)
        time = drawn["time_ms"] / 1e3
        low = 0
        for name in names:
            there = drawn[name].gt(0)  # a hairline around it, or a short peak would not be seen
            high = low + drawn[name] / scale
            ax.fill_between(time, low, high, where=there | there.shift(fill_value=False),
                            step="post", color=COLOURS[name], linewidth=0.3)  # fmt: skip
            low = high
        ax.set(xlim=(0, frame["time_ms"].iloc[-1] / 1e3), ylim=(0, 1.25 * peak["total"] / scale),
               xlabel="seconds", ylabel=unit)  # fmt: skip
        _draw_steps(ax, run, rank, look)
        _mark_peak(ax, peak["time_ms"] / 1e3, peak["total"] / scale, unit, look)
        _legend(fig, [(name, COLOURS[name]) for name in names])
        parts = ", ".join(f"{name} {_size(peak[name])}" for name in names if peak[name] > 0)
        where = _where(run, rank, peak["time_ms"])
        return _describe(
            fig, run.setting,
            f"{run.title}: memory of rank {rank} peaks at {_size(peak['total'])}{where}: {parts}."
            " The strip on top shows the phases of each step."
            + (" NCCL's own buffers are invisible to PyTorch and not in it."
               if run.record["backend"] == "nccl" else ""),
            f"Stacked area chart of memory over {run.record['steps']} training steps on rank "
            f"{rank}, by category. The total peaks at {_size(peak['total'])}{where}, made of "
            f"{parts}.")  # fmt: skip


def temporal_breakdown(run: Run, theme: str = "light") -> Figure:
    """HTA's temporal breakdown: compute, non-compute and idle time of each rank."""
    frame = frames.temporal_breakdown(run)
    kinds = {"compute": "compute", "non-compute": "exposed", "idle": "idle"}
    columns = {kind: frame[kind.replace("-", "_") + "_pct"].to_numpy() for kind in kinds}
    with _look(theme):
        fig, ax = _bars(frame["rank"], "Where the time goes", run, "% of the rank's time")
        _stack_bars(ax, columns, [COLOURS[name] for name in kinds.values()], "{:.0f} %")
        ax.set_xlim(0, 100)
        _legend(fig, [(kind, COLOURS[name]) for kind, name in kinds.items()])
        each = "; ".join(f"rank {r.rank} computes {r.compute_pct:.1f} %, is busy without computing "
                         f"{r.non_compute_pct:.1f} % and idle {r.idle_pct:.1f} %"
                         for r in frame.itertuples())  # fmt: skip
        return _describe(
            fig, run.setting,
            f"{run.title}: HTA's temporal breakdown. Non-compute time is "
            f"{frame['non_compute_pct'].mean():.1f} % on average.",
            f"One horizontal bar per rank, split in three: {each}.")  # fmt: skip


def overlap(run: Run, theme: str = "light") -> Figure:
    """Communication per step and rank, split in what compute hides and what it does not."""
    frame = frames.exposed_comm(run).merge(frames.comm_comp_overlap(run), on="rank")
    exposed = frame["exposed_us"].to_numpy() / 1e3
    hidden = frame["comm_us"].to_numpy() / 1e3 - exposed
    with _look(theme) as look:
        fig, ax = _bars(frame["rank"], "Communication behind compute", run, "ms per step")
        _stack_bars(ax, {"hidden": hidden, "exposed": exposed},
                    [COLOURS["hidden"], COLOURS["exposed"]], None)  # fmt: skip
        ax.set_xlim(0, 1.26 * max(*(hidden + exposed), 1e-3))
        for y, (total, pct) in enumerate(zip(hidden + exposed, frame["overlap_pct"], strict=True)):
            ax.annotate(_overlap(pct), (total, y), (6, 0), textcoords="offset points",
                        va="center", color=look["ink"], weight="bold")  # fmt: skip
        _legend(fig, [("hidden behind compute", COLOURS["hidden"]),
                      ("exposed", COLOURS["exposed"])])  # fmt: skip
        each = "; ".join(f"rank {r.rank}: {_overlap(r.overlap_pct)} of {r.comm_us / 1e3:.1f} ms"
                         for r in frame.itertuples())  # fmt: skip
        return _describe(
            fig, run.setting,
            f"{run.title}: HTA's communication-computation overlap is "
            f"{_overlap(frame['overlap_pct'].mean())} on average.",
            f"One horizontal bar per rank with the communication time of a step, the overlapped "
            f"part first: {each}.")  # fmt: skip


def kernel_breakdown(run: Run, theme: str = "light", top: int = 10) -> Figure:
    """HTA's kernel breakdown: the kernels that take longest, mean of all ranks, per step."""
    kinds, kernels = frames.kernel_breakdown(run)
    colour = {"COMPUTATION": "compute", "COMMUNICATION": "exposed", "MEMORY": "copies"}
    count = run.world_size * max(len(frames.steps(run)), 1)
    sums = kernels.groupby(["name", "kernel_type"], sort=False)["sum_us"].sum() / count / 1e3
    sums = sums.reset_index().sort_values(["sum_us", "name"], ascending=[False, True])
    shown, rest = sums.head(top), sums.iloc[top:]
    names = [_short(name) for name in shown["name"]]
    values, colours = list(shown["sum_us"]), [COLOURS[colour[k]] for k in shown["kernel_type"]]
    if len(rest):
        names.append(f"{len(rest)} others")
        values.append(rest["sum_us"].sum())
        colours.append(COLOURS["other"])
    with _look(theme) as look:
        fig, ax = _canvas(1.52 + 0.27 * len(names), "Kernels by time", run.title, run.setting,
                          left=2.35)  # fmt: skip
        ax.barh(range(len(names)), values, color=colours, height=0.72)
        for y, value in enumerate(values):
            ax.annotate(_number(value), (value, y), (4, 0), textcoords="offset points",
                        va="center", color=look["ink"])  # fmt: skip
        ax.set_yticks(range(len(names)), names)
        ax.set(xlim=(0, 1.1 * max(values)), ylim=(len(names) - 0.4, -0.6),
               xlabel="ms per step, mean of all ranks")  # fmt: skip
        ax.grid(axis="x")
        present = [k for k in colour if k in set(sums["kernel_type"])]
        _legend(fig, [(k.lower(), COLOURS[colour[k]]) for k in present])
        each = ", ".join(f"{n} {_number(v)}" for n, v in zip(names, values, strict=True))
        shares = ", ".join(f"{k.kernel_type.lower()} {k.pct:.1f} %" for k in kinds.itertuples())
        return _describe(
            fig, run.setting, f"{run.title}: HTA's kernel breakdown. Busy time is {shares}.",
            f"Horizontal bars, longest first, ms per step: {each}.")  # fmt: skip


def schedule_diagram(run: Run, rank: int = 0, step: int = 2, theme: str = "light",
                     most: int = 16) -> Figure:  # fmt: skip
    """[Backward]-[AllReduce]-[Step]-[Broadcast] per bucket, from the measured intervals."""
    frame = frames.schedule(run, rank, step)
    frame = frame.assign(start_ms=frame["start_ms"] - frame["start_ms"].min(),
                         end_ms=frame["end_ms"] - frame["start_ms"].min())  # fmt: skip
    labels = list(dict.fromkeys(frame["label"]))
    kept = [labels[i] for i in np.linspace(0, len(labels) - 1, min(most, len(labels))).round()
            .astype(int)]  # fmt: skip
    kinds = [kind for kind in ("backward", "all-reduce", "step", "broadcast")
             if kind in set(frame["kind"])]  # fmt: skip
    with _look(theme) as look:
        fig, ax = _canvas(1.52 + 0.27 * len(kept), f"One step of rank {rank}", run.title,
                          run.setting)  # fmt: skip
        for y, label in enumerate(kept):
            row = frame[frame["label"] == label]
            ax.plot([row["start_ms"].min(), row["end_ms"].max()], [y, y], color=look["rule"],
                    linewidth=1.2, zorder=1)  # fmt: skip
            for kind in kinds:
                part = row[row["kind"] == kind]
                spans = list(zip(part["start_ms"], part["end_ms"] - part["start_ms"], strict=True))
                ax.broken_barh(spans, (y - 0.36, 0.72), color=COLOURS[kind], linewidth=0, zorder=2)
        ax.set_yticks(range(len(kept)), kept)
        ax.set(xlim=(0, 1.005 * frame["end_ms"].max()), ylim=(len(kept) - 0.4, -0.6),
               xlabel="ms since the start of the backward pass")  # fmt: skip
        ax.grid(axis="x")
        called = {kind: kind for kind in kinds} | _halves(run)
        _legend(fig, [(called[kind], COLOURS[kind]) for kind in kinds])
        last = {called[kind]: frame.loc[frame["kind"] == kind, "end_ms"].max() for kind in kinds}
        ends = ", ".join(f"{kind} {end:.1f} ms" for kind, end in last.items())
        some = f" {len(kept)} of {len(labels)} rows are drawn." if len(kept) < len(labels) else ""
        return _describe(
            fig, run.setting,
            f"{run.title}: measured intervals of step {step} on rank {rank}. The last of each "
            f"ends at: {ends}.{some}",
            f"Timeline with one row each for {', '.join(kept)}, showing {', '.join(last)} as bars. "
            f"The last of each ends at: {ends}.")  # fmt: skip


def _halves(run: Run) -> dict[str, str]:
    """What a run has in place of all-reduce and broadcast, if it sends gradients and parameters by slices."""
    sliced = any(c["op"] == "reduce_scatter" for c in run.record["collectives"])
    return {"all-reduce": "reduce-scatter", "broadcast": "all-gather"} if sliced else {}


def before_and_after(before, after, names=("before", "after"), theme: str = "light") -> Figure:
    """Two sets of runs, variant by variant: states at their peak, non-compute, overlap, step time.

    Sets of one model share an axis. Of different ones (a CPU's and a GPU's), each fills its own, but
    for percentages.
    """
    sets = [{run.variant: run for run in _ordered(runs)} for runs in (before, after)]
    variants = [name for name in sets[0] if name in sets[1]]
    if not variants:
        raise RunError(f"{names[0]} and {names[1]} have no variant in common")
    model = [[runs[name].record["model"]["parameters"] for name in variants] for runs in sets]
    colours = (COLOURS["other"], COLOURS["params"])
    panels = (("states, peak", _states, _size), ("non-compute", _non_compute, "{:.0f} %".format),
              ("overlap", _overlapped, _overlap), ("step", frames.step_seconds, "{:.2f} s".format))
    with _look(theme) as look:
        fig, frame = _canvas(1.4 + 0.5 * len(variants), "Two sets of runs",
                             f"{names[0]} against {names[1]}", setting_of([*before, *after]), left=1.25)
        frame.set_axis_off()
        said = []
        for i, (heading, measure, form) in enumerate(panels):
            ax = frame.inset_axes((0.255 * i, 0, 0.235, 1))
            values = [[measure(runs[name]) for name in variants] for runs in sets]
            tops = [max(*np.nan_to_num(row), 1e-9) for row in values]
            if model[0] == model[1] or "%" in form(1):
                tops = [max(tops)] * 2
            for row, top, y, colour in zip(values, tops, (-0.2, 0.2), colours, strict=True):
                places = y + np.arange(len(row))
                ax.barh(places, np.nan_to_num(row) / top, 0.36, color=colour)
                for place, value in zip(places, row, strict=True):
                    ax.annotate(form(value), (np.nan_to_num(value) / top, place), (4, 0), va="center",
                                textcoords="offset points", color=look["ink"], size=7.5)
            ax.set(xlim=(0, 1.7), ylim=(len(variants) - 0.4, -0.6), xticks=[], yticks=[], xlabel=heading)
            ax.spines["bottom"].set_visible(False)
            if not i:
                ax.set_yticks(range(len(variants)), variants)
            said += [f"{name}, {heading}: {form(a)}, then {form(b)}"
                     for name, a, b in zip(variants, *values, strict=True)]
        _legend(fig, list(zip(names, colours, strict=True)))
        return _describe(
            fig, setting_of([*before, *after]),
            f"{names[0]} (above) and {names[1]} (below), variant by variant: states of the fullest "
            "rank at their peak, HTA's non-compute time and overlap as means of all ranks, median step."
            + ("" if model[0] == model[1] else
               " The models differ: bytes and seconds of each set have a scale of their own."),
            f"Pairs of bars in four columns. {'; '.join(said)}.")  # fmt: skip


def _states(run: Run) -> float:
    return frames.fullest(run).loc["states", list(STATES)].sum()


def _non_compute(run: Run) -> float:
    return frames.temporal_breakdown(run)["non_compute_pct"].mean()


def _overlapped(run: Run) -> float:
    return frames.comm_comp_overlap(run)["overlap_pct"].mean()


def bytes_per_rank(runs, theme: str = "light") -> Figure:
    """Optimizer state on every rank, measured (bars) and predicted (marks), per variant."""
    runs = _ordered(runs)
    measured = [[m["opt_state"] for m in run.record["memory"]] for run in runs]
    predicted = [[p["opt_state"] for p in run.record["predicted"]] for run in runs]
    scale, unit = _unit(max(map(max, measured)))
    with _look(theme) as look:
        fig, ax = _canvas(3.5, "Optimizer state per rank", _one(runs), setting_of(runs))
        for x, (bars, marks) in enumerate(zip(measured, predicted, strict=True)):
            wide = 0.8 / len(bars)
            at = x - 0.4 + wide * (np.arange(len(bars)) + 0.5)
            ax.bar(at, np.array(bars) / scale, 0.86 * wide, color=COLOURS["opt_state"])
            ax.hlines(np.array(marks) / scale, at - wide / 2, at + wide / 2, color=look["ink"],
                      linewidth=1.6)  # fmt: skip
            for rank, place in enumerate(at if len(runs) * len(bars) <= 32 else ()):
                ax.annotate(str(rank), (place, 0), (0, -3), textcoords="offset points",
                            ha="center", va="top", color=look["muted"], size=7)  # fmt: skip
            ax.annotate(_number(max(bars) / scale), (at[np.argmax(bars)], max(bars) / scale), (0, 5),
                        textcoords="offset points", ha="center", weight="bold",
                        bbox=_label(look))  # fmt: skip
        many = len(runs) > 6  # names side by side would touch
        ax.set_xticks(range(len(runs)), [run.variant.replace("-", "-\n") if many else run.variant
                                         for run in runs])  # fmt: skip
        ax.tick_params(axis="x", pad=12)
        ax.set(xlim=(-0.6, len(runs) - 0.4), ylim=(0, 1.15 * max(map(max, measured)) / scale),
               ylabel=unit)  # fmt: skip
        ax.grid(axis="y")
        mark = Line2D([], [], color=look["ink"], linewidth=1.6, label="predicted")
        _legend(fig, [("measured, rank by rank", COLOURS["opt_state"])], mark)
        each = "; ".join(f"{run.variant}: {', '.join(map(_size, bars))}"
                         for run, bars in zip(runs, measured, strict=True))  # fmt: skip
        exact = measured == predicted
        return _describe(
            fig, setting_of(runs),
            "Bytes of optimizer state on each rank; the mark is the prediction"
            + (", met to the byte everywhere." if exact else "."),
            f"Bars of optimizer state, rank by rank. {each}.")  # fmt: skip


def comparison(runs, theme: str = "light") -> Figure:
    """All variants side by side: states at their peak, the whole peak, non-compute, overlap."""
    runs = _ordered(runs)
    states = [frames.fullest(run).loc["states"] for run in runs]
    peaks = [frames.fullest(run).loc["total", "total"] for run in runs]
    waits, overlaps = list(map(_non_compute, runs)), list(map(_overlapped, runs))
    scale, unit = _unit(max(peaks))
    sums = [sum(row[list(STATES)]) / scale for row in states]
    panels = (  # heading, place, values, what is written beside them, colour
        (f"model states at their peak, {unit}", 0.0, sums, list(map(_number, sums)), None),
        (f"all memory, {unit}", 0.44, [p / scale for p in peaks],
         [_number(p / scale) for p in peaks], COLOURS["other"]),
        ("non-compute time", 0.64, waits, [f"{v:.0f} %" for v in waits], COLOURS["exposed"]),
        ("overlap", 0.84, np.nan_to_num(overlaps), list(map(_overlap, overlaps)),
         COLOURS["hidden"]),
    )  # fmt: skip
    with _look(theme) as look:
        fig, frame = _canvas(1.4 + 0.36 * len(runs), "All variants", _one(runs), setting_of(runs),
                             left=1.25)  # fmt: skip
        frame.set_axis_off()
        for heading, left, values, texts, colour in panels:
            ax = frame.inset_axes((left, 0, 0.16 if left else 0.4, 1))
            if colour:
                ax.barh(range(len(runs)), values, color=colour, height=0.72)
            else:
                _stack_bars(ax, {n: np.array([row[n] for row in states]) / scale for n in STATES},
                            [COLOURS[name] for name in STATES], None)  # fmt: skip
            for y, (value, text) in enumerate(zip(values, texts, strict=True)):
                ax.annotate(text, (value, y), (4, 0), textcoords="offset points", va="center",
                            weight="bold", color=look["ink"])  # fmt: skip
            ax.set(xlim=(0, (1.5 if left else 1.2) * max(*values, 1e-9)), xlabel=heading,
                   ylim=(len(runs) - 0.4, -0.6), xticks=[], yticks=[])  # fmt: skip
            ax.spines["bottom"].set_visible(False)
            if not left:
                ax.set_yticks(range(len(runs)), [run.variant for run in runs])
        _legend(fig, [(name, COLOURS[name]) for name in STATES])
        each = "; ".join(
            f"{run.variant}: states {_size(total * scale)}, all memory {_size(peak)}, non-compute "
            f"{wait:.1f} %, overlap {_overlap(pct)}" for run, total, peak, wait, pct
            in zip(runs, sums, peaks, waits, overlaps, strict=True))  # fmt: skip
        return _describe(
            fig, setting_of(runs),
            "Parameters, gradients, optimizer state and buckets at their highest sum, and the peak "
            "of all memory, both on the fullest rank; HTA's non-compute time and overlap, mean of "
            "all ranks.",
            f"Four bar charts side by side, one row per variant. {each}.")  # fmt: skip


# Pieces


@contextmanager
def _look(theme: str):
    """matplotlib's defaults (whatever the user's own are), then ours; yields the theme."""
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(THEMES)}, not {theme!r}")
    look = THEMES[theme]
    ours = {
        "text.parse_math": False,  # a title is text, dollar signs included
        "font.family": "DejaVu Sans", "font.size": 8.5, "svg.fonttype": "path",
        "svg.hashsalt": "zero1", "figure.facecolor": look["paper"], "axes.facecolor": "none",
        "savefig.facecolor": look["paper"], "text.color": look["ink"],
        "axes.edgecolor": look["rule"], "axes.labelcolor": look["muted"],
        "xtick.color": look["muted"], "ytick.color": look["muted"],
        "ytick.labelcolor": look["ink"], "grid.color": look["rule"], "grid.linewidth": 0.6,
        "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
        "xtick.major.size": 0, "ytick.major.size": 0, "path.simplify": False,
    }  # fmt: skip
    with mpl.style.context(["default", ours]):
        yield look


def _canvas(height: float, title: str, subtitle: str, setting: str, left=MARGIN["left"]):
    """A figure of the column's width with its title above and its provenance below one axes."""
    fig = Figure(figsize=(WIDTH, height), dpi=DPI)
    fig.title = f"{title}: {subtitle}" if subtitle else title
    muted = mpl.rcParams["axes.labelcolor"]
    fig.text(0.16 / WIDTH, 1 - 0.16 / height, title, size=12, weight="bold", va="top")
    fig.text(1 - 0.16 / WIDTH, 1 - 0.19 / height, subtitle, size=9, va="top", ha="right",
             color=muted)  # fmt: skip
    line = fig.text(0.16 / WIDTH, 0.13 / height, setting, size=7, color=muted)
    room = (WIDTH - 0.32) * DPI / line.get_window_extent().width
    line.set_size(7 * min(1, room))  # a long one is set smaller, not cut off
    ax = fig.add_axes((left / WIDTH, MARGIN["bottom"] / height,
                       1 - (left + MARGIN["right"]) / WIDTH,
                       1 - (MARGIN["top"] + MARGIN["bottom"]) / height))  # fmt: skip
    return fig, ax


def _bars(ranks, title: str, run: Run, unit: str):
    """Axes for one horizontal bar per rank."""
    fig, ax = _canvas(1.52 + 0.36 * len(ranks), title, run.title, run.setting)
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    ax.set(ylim=(len(ranks) - 0.4, -0.6), xlabel=unit)
    ax.grid(axis="x")
    return fig, ax


def _stack_bars(ax, columns: dict, colours, form: str | None):
    """Horizontal bars piled up; with `form`, wide parts carry their value."""
    left = 0
    for values, colour in zip(columns.values(), colours, strict=True):
        ax.barh(range(len(values)), values, left=left, color=colour, height=0.72)
        for y, value in enumerate(values):
            if form and value >= 5:
                ax.text(left[y] + value / 2 if np.ndim(left) else value / 2, y, form.format(value),
                        ha="center", va="center", color=_on(colour), weight="bold")  # fmt: skip
        left = left + np.asarray(values)


def _legend(fig: Figure, entries, mark: Line2D | None = None):
    handles = [Patch(color=colour, label=name) for name, colour in entries]
    handles += [mark] if mark else []
    fig.legend(handles=handles, loc="upper left", ncols=len(handles), frameon=False,
               bbox_to_anchor=(0.16 / WIDTH, 1 - 0.42 / fig.get_figheight()), borderpad=0,
               borderaxespad=0, handlelength=0.9, handleheight=0.9, handletextpad=0.5,
               columnspacing=1.3)  # fmt: skip


def _mark_peak(ax, x: float, y: float, unit: str, look: dict):
    """The peak looks the same on every chart: a dashed line, a dot, a bold label."""
    ax.axhline(y, color=look["ink"], linewidth=0.8, linestyle=(0, (4, 3)))
    ax.plot([x], [y], "o", color=look["ink"], markersize=4.5, clip_on=False)
    right = x > np.mean(ax.get_xlim())
    ax.annotate(f"peak {_number(y)} {unit}", (x, y), (-7 if right else 7, 5), weight="bold",
                textcoords="offset points", ha="right" if right else "left", color=look["ink"],
                bbox=_label(look))  # fmt: skip


def _label(look: dict) -> dict:
    """Paper below a label, so that no line goes through it."""
    return {"facecolor": look["paper"], "edgecolor": "none", "pad": 0.8}


def _draw_steps(ax, run: Run, rank: int, look: dict):
    """Edges of the profiler's steps, and a strip of their phases along the top."""
    marks = frames.spans(run, rank)
    for phase, short in PHASES.items():
        part = marks[marks["name"] == phase]
        spans = list(zip(part["start_ms"] / 1e3, (part["end_ms"] - part["start_ms"]) / 1e3,
                         strict=True))  # fmt: skip
        ax.broken_barh(spans, (0.95, 0.05), transform=ax.get_xaxis_transform(),
                       color=COLOURS[phase], linewidth=0)  # fmt: skip
        for start, length in spans:
            if length > 0.01 * len(short) * np.ptp(ax.get_xlim()):  # there is room
                ax.text(start + length / 2, 0.973, short, transform=ax.get_xaxis_transform(),
                        ha="center", va="center", size=6.5, color=_on(COLOURS[phase]))  # fmt: skip
    for step in marks[marks["name"].str.match(r"step \d")].itertuples():
        start, end = max(step.start_ms, 0) / 1e3, step.end_ms / 1e3
        ax.axvline(start, color=look["rule"], linewidth=0.8)
        ax.annotate(step.name, ((start + end) / 2, 0.94), va="top", ha="center",
                    xycoords=ax.get_xaxis_transform(), color=look["muted"], size=7)  # fmt: skip


def _where(run: Run, rank: int, time_ms: float) -> str:
    """Such as " in step 2, backward"; nothing if the trace does not say."""
    names = [m.name for m in frames.spans(run, rank).itertuples() if m.start_ms <= time_ms < m.end_ms]
    return f" in {', '.join(names)}" if names else ""


def _describe(fig: Figure, setting: str, caption: str, alt_text: str) -> Figure:
    fig.caption, fig.alt_text = f"{caption} {setting}.", alt_text
    return fig


def _ordered(runs) -> list[Run]:
    """A run or runs, in the order of the series; others after them, as given."""
    runs = [runs] if isinstance(runs, Run) else list(runs)
    return sorted(runs, key=lambda run: (*VARIANTS, run.variant).index(run.variant))


def _one(runs) -> str:
    return runs[0].title if len(runs) == 1 else ""


def _unit(most: float) -> tuple[float, str]:
    return (1e9, "GB") if most >= 1e9 else (1e6, "MB")


def _on(colour: str) -> str:
    """Ink that can be read on this colour."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return "#101418" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.4 else "#ffffff"


def _size(count: float) -> str:
    scale, unit = _unit(count)
    return f"{_number(count / scale)} {unit}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _overlap(pct: float) -> str:
    return "none" if np.isnan(pct) else f"{pct:.0f} %"


def _short(name: str) -> str:
    """A kernel's name without return type, namespaces and arguments, at most 30 characters."""
    if found := re.fullmatch(r"ncclKernel\[(.*)\]", name):
        return found[1]
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|[<(].*", "", name)
    return name if len(name) <= 30 else name[:29] + "…"


# Files and notebooks


def save(fig: Figure, stem, formats=("svg", "png")) -> list[Path]:
    """Write `stem`.svg and `stem`.png; the same figure gives the same bytes."""
    paths = []
    for kind in formats:
        paths.append(Path(f"{stem}.{kind}"))
        write_atomic(paths[-1], render(fig, kind))
    return paths


def render(fig: Figure, kind: str = "png") -> bytes:
    buffer = io.BytesIO()
    about = ({"Title": fig.title, "Description": fig.alt_text, "Date": None, "Creator": None}
             if kind == "svg" else {"Title": fig.title, "Software": None})  # fmt: skip
    with _look("light"):  # only for what is decided when saving; colours were set when drawing
        fig.savefig(buffer, format=kind, metadata=about, facecolor=fig.get_facecolor())
    return buffer.getvalue()


def show(fig: Figure) -> None:
    """Display in a notebook: a PNG with its alt text, and the caption below."""
    from IPython.display import display

    picture = base64.b64encode(render(fig)).decode()
    display({"image/png": picture, "text/plain": fig.alt_text}, raw=True,
            metadata={"image/png": {"alt": fig.alt_text, "width": int(WIDTH * 100)}})  # fmt: skip
    display({"text/markdown": f"*{fig.caption}*", "text/plain": fig.caption}, raw=True)
