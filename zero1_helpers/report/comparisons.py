"""Figures that compare runs: before and after, bytes per rank, all variants."""

import numpy as np
from matplotlib.lines import Line2D

from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.runs import Run, setting_of
from zero1_helpers.measure.schema import STATES
from zero1_helpers.report import frames, memory
from zero1_helpers.report.style import (
    COLOURS,
    Figure,
    described,
    in_registry_order,
    label_style,
    legend_below,
    new_figure,
    stack_bars,
    the_setting,
    themed,
)
from zero1_helpers.report.words import number_text, overlap_text, size_text, unit_for


def before_and_after(before, after, names=("before", "after"), theme: str = "light") -> Figure:
    """Two sets of runs, variant by variant: states at their peak, non-compute, overlap, step time.

    Sets of one model share an axis. Of different ones (a CPU's and a GPU's), each fills its own, but
    for percentages.
    """
    sets = [{run.variant: run for run in in_registry_order(runs)} for runs in (before, after)]
    variants = [name for name in sets[0] if name in sets[1]]
    if not variants:
        raise RunError(f"{names[0]} and {names[1]} have no variant in common")
    model = [[runs[name].record["model"]["parameters"] for name in variants] for runs in sets]
    colours = (COLOURS["other"], COLOURS["params"])
    panels = (
        ("states, peak", _states, size_text),
        ("non-compute", _non_compute, "{:.0f} %".format),
        ("overlap", _overlapped, overlap_text),
        ("step", frames.step_seconds, "{:.2f} s".format),
    )
    with themed(theme) as look:
        fig, frame = new_figure(
            1.4 + 0.5 * len(variants),
            "Two sets of runs",
            f"{names[0]} against {names[1]}",
            setting_of([*before, *after]),
            left=1.25,
        )
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
                    ax.annotate(
                        form(value),
                        (np.nan_to_num(value) / top, place),
                        (4, 0),
                        va="center",
                        textcoords="offset points",
                        color=look["ink"],
                        size=7.5,
                    )
            ax.set(
                xlim=(0, 1.7),
                ylim=(len(variants) - 0.4, -0.6),
                xticks=[],
                yticks=[],
                xlabel=heading,
            )
            ax.spines["bottom"].set_visible(False)
            if not i:
                ax.set_yticks(range(len(variants)), variants)
            said += [
                f"{name}, {heading}: {form(a)}, then {form(b)}"
                for name, a, b in zip(variants, *values, strict=True)
            ]
        legend_below(fig, list(zip(names, colours, strict=True)))
        return described(
            fig,
            setting_of([*before, *after]),
            f"{names[0]} (above) and {names[1]} (below), variant by variant: states of the fullest "
            "rank at their peak, HTA's non-compute time and overlap as means of all ranks, median step."
            + (
                ""
                if model[0] == model[1]
                else " The models differ: bytes and seconds of each set have a scale of their own."
            ),
            f"Pairs of bars in four columns. {'; '.join(said)}.",
        )


def _states(run: Run) -> float:
    return memory.fullest(run).loc["states", list(STATES)].sum()


def _non_compute(run: Run) -> float:
    return frames.temporal_breakdown(run)["non_compute_pct"].mean()


def _overlapped(run: Run) -> float:
    return frames.comm_comp_overlap(run)["overlap_pct"].mean()


def bytes_per_rank(runs, theme: str = "light") -> Figure:
    """Optimizer state on every rank, measured (bars) and predicted (marks), per variant."""
    runs = in_registry_order(runs)
    measured = [[m["opt_state"] for m in run.record["memory"]] for run in runs]
    predicted = [[p["opt_state"] for p in run.record["predicted"]] for run in runs]
    scale, unit = unit_for(max(map(max, measured)))
    with themed(theme) as look:
        fig, ax = new_figure(3.5, "Optimizer state per rank", the_setting(runs), setting_of(runs))
        for x, (bars, marks) in enumerate(zip(measured, predicted, strict=True)):
            wide = 0.8 / len(bars)
            at = x - 0.4 + wide * (np.arange(len(bars)) + 0.5)
            ax.bar(at, np.array(bars) / scale, 0.86 * wide, color=COLOURS["opt_state"])
            ax.hlines(
                np.array(marks) / scale,
                at - wide / 2,
                at + wide / 2,
                color=look["ink"],
                linewidth=1.6,
            )
            for rank, place in enumerate(at if len(runs) * len(bars) <= 32 else ()):
                ax.annotate(
                    str(rank),
                    (place, 0),
                    (0, -3),
                    textcoords="offset points",
                    ha="center",
                    va="top",
                    color=look["muted"],
                    size=7,
                )
            ax.annotate(
                number_text(max(bars) / scale),
                (at[np.argmax(bars)], max(bars) / scale),
                (0, 5),
                textcoords="offset points",
                ha="center",
                weight="bold",
                bbox=label_style(look),
            )
        many = len(runs) > 6  # names side by side would touch
        ax.set_xticks(
            range(len(runs)),
            [run.variant.replace("-", "-\n") if many else run.variant for run in runs],
        )
        ax.tick_params(axis="x", pad=12)
        ax.set(
            xlim=(-0.6, len(runs) - 0.4),
            ylim=(0, 1.15 * max(map(max, measured)) / scale),
            ylabel=unit,
        )
        ax.grid(axis="y")
        mark = Line2D([], [], color=look["ink"], linewidth=1.6, label="predicted")
        legend_below(fig, [("measured, rank by rank", COLOURS["opt_state"])], mark)
        each = "; ".join(
            f"{run.variant}: {', '.join(map(size_text, bars))}"
            for run, bars in zip(runs, measured, strict=True)
        )
        exact = measured == predicted
        return described(
            fig,
            setting_of(runs),
            "Bytes of optimizer state on each rank; the mark is the prediction"
            + (", met to the byte everywhere." if exact else "."),
            f"Bars of optimizer state, rank by rank. {each}.",
        )


def comparison(runs, theme: str = "light") -> Figure:
    """All variants side by side: states at their peak, the whole peak, non-compute, overlap."""
    runs = in_registry_order(runs)
    states = [memory.fullest(run).loc["states"] for run in runs]
    peaks = [memory.fullest(run).loc["total", "total"] for run in runs]
    waits, overlaps = list(map(_non_compute, runs)), list(map(_overlapped, runs))
    scale, unit = unit_for(max(peaks))
    sums = [sum(row[list(STATES)]) / scale for row in states]
    panels = (  # heading, place, values, what is written beside them, colour
        (f"model states at their peak, {unit}", 0.0, sums, list(map(number_text, sums)), None),
        (
            f"all memory, {unit}",
            0.44,
            [p / scale for p in peaks],
            [number_text(p / scale) for p in peaks],
            COLOURS["other"],
        ),
        ("non-compute time", 0.64, waits, [f"{v:.0f} %" for v in waits], COLOURS["exposed"]),
        (
            "overlap",
            0.84,
            np.nan_to_num(overlaps),
            list(map(overlap_text, overlaps)),
            COLOURS["hidden"],
        ),
    )
    with themed(theme) as look:
        fig, frame = new_figure(
            1.4 + 0.36 * len(runs), "All variants", the_setting(runs), setting_of(runs), left=1.25
        )
        frame.set_axis_off()
        for heading, left, values, texts, colour in panels:
            ax = frame.inset_axes((left, 0, 0.16 if left else 0.4, 1))
            if colour:
                ax.barh(range(len(runs)), values, color=colour, height=0.72)
            else:
                stack_bars(
                    ax,
                    {n: np.array([row[n] for row in states]) / scale for n in STATES},
                    [COLOURS[name] for name in STATES],
                    None,
                )
            for y, (value, text) in enumerate(zip(values, texts, strict=True)):
                ax.annotate(
                    text,
                    (value, y),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    weight="bold",
                    color=look["ink"],
                )
            ax.set(
                xlim=(0, (1.5 if left else 1.2) * max(*values, 1e-9)),
                xlabel=heading,
                ylim=(len(runs) - 0.4, -0.6),
                xticks=[],
                yticks=[],
            )
            ax.spines["bottom"].set_visible(False)
            if not left:
                ax.set_yticks(range(len(runs)), [run.variant for run in runs])
        legend_below(fig, [(name, COLOURS[name]) for name in STATES])
        each = "; ".join(
            f"{run.variant}: states {size_text(total * scale)}, all memory {size_text(peak)}, non-compute "
            f"{wait:.1f} %, overlap {overlap_text(pct)}"
            for run, total, peak, wait, pct in zip(runs, sums, peaks, waits, overlaps, strict=True)
        )
        return described(
            fig,
            setting_of(runs),
            "Parameters, gradients, optimizer state and buckets at their highest sum, and the peak "
            "of all memory, both on the fullest rank; HTA's non-compute time and overlap, mean of "
            "all ranks.",
            f"Four bar charts side by side, one row per variant. {each}.",
        )
