"""How every figure looks: colours, sizes, axes, captions, and how it is saved or shown."""

import base64
import io
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from zero1_helpers.measure.files import write_atomic
from zero1_helpers.measure.runs import Run
from zero1_helpers.report import timing
from zero1_helpers.report.words import ink_on, number_text
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
    "params": BLUE,
    "broadcast": BLUE,
    "grads": ORANGE,
    "all-reduce": ORANGE,
    "sync": ORANGE,
    "opt_state": GREEN,
    "step": GREEN,
    "buckets": PINK,
    "activations": SKY,
    "backward": SKY,
    "compute": SKY,
    "receive": BLUE,
    "temporaries": YELLOW,
    "copies": YELLOW,
    "other": GREY,
    "counters": GREY,
    "idle": GREY,
    "forward": "#A5D8F3",
    "exposed": RED,
    "hidden": "#F2B48C",
}
STACK = (
    "params",
    "opt_state",
    "grads",
    "buckets",
    "activations",
    "temporaries",
    "other",
    "counters",
)
PHASES = {
    "forward": "fwd",
    "backward": "bwd",
    "sync": "sync",
    "step": "step",
    "broadcast": "bcast",
    "receive": "recv",
}
MARGIN = {"left": 0.86, "right": 0.22, "top": 0.74, "bottom": 0.76}  # inches around the axes


@contextmanager
def themed(theme: str):
    """matplotlib's defaults (whatever the user's own are), then ours; yields the theme."""
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(THEMES)}, not {theme!r}")
    look = THEMES[theme]
    ours = {
        "text.parse_math": False,  # a title is text, dollar signs included
        "font.family": "DejaVu Sans",
        "font.size": 8.5,
        "svg.fonttype": "path",
        "svg.hashsalt": "zero1",
        "figure.facecolor": look["paper"],
        "axes.facecolor": "none",
        "savefig.facecolor": look["paper"],
        "text.color": look["ink"],
        "axes.edgecolor": look["rule"],
        "axes.labelcolor": look["muted"],
        "xtick.color": look["muted"],
        "ytick.color": look["muted"],
        "ytick.labelcolor": look["ink"],
        "grid.color": look["rule"],
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "path.simplify": False,
    }
    with mpl.style.context(["default", ours]):
        yield look


def new_figure(height: float, title: str, subtitle: str, setting: str, left=MARGIN["left"]):
    """A figure of the column's width with its title above and its provenance below one axes."""
    fig = Figure(figsize=(WIDTH, height), dpi=DPI)
    fig.title = f"{title}: {subtitle}" if subtitle else title
    muted = mpl.rcParams["axes.labelcolor"]
    fig.text(0.16 / WIDTH, 1 - 0.16 / height, title, size=12, weight="bold", va="top")
    fig.text(
        1 - 0.16 / WIDTH, 1 - 0.19 / height, subtitle, size=9, va="top", ha="right", color=muted
    )
    line = fig.text(0.16 / WIDTH, 0.13 / height, setting, size=7, color=muted)
    room = (WIDTH - 0.32) * DPI / line.get_window_extent().width
    line.set_size(7 * min(1, room))  # a long one is set smaller, not cut off
    ax = fig.add_axes(
        (
            left / WIDTH,
            MARGIN["bottom"] / height,
            1 - (left + MARGIN["right"]) / WIDTH,
            1 - (MARGIN["top"] + MARGIN["bottom"]) / height,
        )
    )
    return fig, ax


def bars_per_rank(ranks, title: str, run: Run, unit: str):
    """Axes for one horizontal bar per rank."""
    fig, ax = new_figure(1.52 + 0.36 * len(ranks), title, run.title, run.setting)
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    ax.set(ylim=(len(ranks) - 0.4, -0.6), xlabel=unit)
    ax.grid(axis="x")
    return fig, ax


def stack_bars(ax, columns: dict, colours, form: str | None):
    """Horizontal bars piled up; with `form`, wide parts carry their value."""
    left = 0
    for values, colour in zip(columns.values(), colours, strict=True):
        ax.barh(range(len(values)), values, left=left, color=colour, height=0.72)
        for y, value in enumerate(values):
            if form and value >= 5:
                ax.text(
                    left[y] + value / 2 if np.ndim(left) else value / 2,
                    y,
                    form.format(value),
                    ha="center",
                    va="center",
                    color=ink_on(colour),
                    weight="bold",
                )
        left = left + np.asarray(values)


def legend_below(fig: Figure, entries, mark: Line2D | None = None):
    handles = [Patch(color=colour, label=name) for name, colour in entries]
    handles += [mark] if mark else []
    fig.legend(
        handles=handles,
        loc="upper left",
        ncols=len(handles),
        frameon=False,
        bbox_to_anchor=(0.16 / WIDTH, 1 - 0.42 / fig.get_figheight()),
        borderpad=0,
        borderaxespad=0,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.5,
        columnspacing=1.3,
    )


def mark_peak(ax, x: float, y: float, unit: str, look: dict):
    """The peak looks the same on every chart: a dashed line, a dot, a bold label."""
    ax.axhline(y, color=look["ink"], linewidth=0.8, linestyle=(0, (4, 3)))
    ax.plot([x], [y], "o", color=look["ink"], markersize=4.5, clip_on=False)
    right = x > np.mean(ax.get_xlim())
    ax.annotate(
        f"peak {number_text(y)} {unit}",
        (x, y),
        (-7 if right else 7, 5),
        weight="bold",
        textcoords="offset points",
        ha="right" if right else "left",
        color=look["ink"],
        bbox=label_style(look),
    )


def label_style(look: dict) -> dict:
    """Paper below a label, so that no line goes through it."""
    return {"facecolor": look["paper"], "edgecolor": "none", "pad": 0.8}


def draw_steps(ax, run: Run, rank: int, look: dict):
    """Edges of the profiler's steps, and a strip of their phases along the top."""
    marks = timing.spans(run, rank)
    for phase, short in PHASES.items():
        part = marks[marks["name"] == phase]
        spans = list(
            zip(part["start_ms"] / 1e3, (part["end_ms"] - part["start_ms"]) / 1e3, strict=True)
        )
        ax.broken_barh(
            spans,
            (0.95, 0.05),
            transform=ax.get_xaxis_transform(),
            color=COLOURS[phase],
            linewidth=0,
        )
        for start, length in spans:
            if length > 0.01 * len(short) * np.ptp(ax.get_xlim()):  # there is room
                ax.text(
                    start + length / 2,
                    0.973,
                    short,
                    transform=ax.get_xaxis_transform(),
                    ha="center",
                    va="center",
                    size=6.5,
                    color=ink_on(COLOURS[phase]),
                )
    for step in marks[marks["name"].str.match(r"step \d")].itertuples():
        start, end = max(step.start_ms, 0) / 1e3, step.end_ms / 1e3
        ax.axvline(start, color=look["rule"], linewidth=0.8)
        ax.annotate(
            step.name,
            ((start + end) / 2, 0.94),
            va="top",
            ha="center",
            xycoords=ax.get_xaxis_transform(),
            color=look["muted"],
            size=7,
        )


def step_and_phase(run: Run, rank: int, time_ms: float) -> str:
    """Such as " in step 2, backward"; nothing if the trace does not say."""
    names = [
        m.name for m in timing.spans(run, rank).itertuples() if m.start_ms <= time_ms < m.end_ms
    ]
    return f" in {', '.join(names)}" if names else ""


def described(fig: Figure, setting: str, caption: str, alt_text: str) -> Figure:
    fig.caption, fig.alt_text = f"{caption} {setting}.", alt_text
    return fig


def in_registry_order(runs) -> list[Run]:
    """A run or runs, in the order of the series; others after them, as given."""
    runs = [runs] if isinstance(runs, Run) else list(runs)
    return sorted(runs, key=lambda run: (*VARIANTS, run.variant).index(run.variant))


def the_setting(runs) -> str:
    return runs[0].title if len(runs) == 1 else ""


def save(fig: Figure, stem, formats=("svg", "png")) -> list[Path]:
    """Write `stem`.svg and `stem`.png; the same figure gives the same bytes."""
    paths = []
    for kind in formats:
        paths.append(Path(f"{stem}.{kind}"))
        write_atomic(paths[-1], render(fig, kind))
    return paths


def render(fig: Figure, kind: str = "png") -> bytes:
    buffer = io.BytesIO()
    about = (
        {"Title": fig.title, "Description": fig.alt_text, "Date": None, "Creator": None}
        if kind == "svg"
        else {"Title": fig.title, "Software": None}
    )
    with themed("light"):  # only for what is decided when saving; colours were set when drawing
        fig.savefig(buffer, format=kind, metadata=about, facecolor=fig.get_facecolor())
    return buffer.getvalue()


def show(fig: Figure) -> None:
    """Display in a notebook: a PNG with its alt text, and the caption below."""
    from IPython.display import display

    picture = base64.b64encode(render(fig)).decode()
    display(
        {"image/png": picture, "text/plain": fig.alt_text},
        raw=True,
        metadata={"image/png": {"alt": fig.alt_text, "width": int(WIDTH * 100)}},
    )
    display({"text/markdown": f"*{fig.caption}*", "text/plain": fig.caption}, raw=True)
