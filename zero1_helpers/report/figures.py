"""Data frames -> figures: one look, light and dark, and the same bytes from the same input.

Every function takes a run (or a list of runs) and `theme="light"` or `"dark"`, and returns a
matplotlib Figure with three attributes of its own: `.title`, `.caption` (what is shown, then
hardware, ranks, backend, link, date) and `.alt_text`. Units are decimal: 1 MB = 1e6 bytes.
`save` writes files, `show` displays in a notebook; `gallery` draws all of them in a folder.
"""

import numpy as np

from zero1_helpers.measure.runs import Run
from zero1_helpers.report import frames, memory, timing
from zero1_helpers.report.style import (
    COLOURS,
    STACK,
    Figure,
    bars_per_rank,
    described,
    draw_steps,
    legend_below,
    mark_peak,
    new_figure,
    stack_bars,
    step_and_phase,
    themed,
)
from zero1_helpers.report.words import number_text, overlap_text, shortened, size_text, unit_for

# The figures


def memory_timeline(run: Run, rank: int = 0, theme: str = "light") -> Figure:
    """Bytes alive on `rank` over time, stacked by category, with the peak marked."""
    frame = memory.get_memory_timeline(run, rank)
    peak = frame.loc[frame["total"].idxmax()]
    scale, unit = unit_for(peak["total"])
    marks = timing.spans(run, rank)
    drawn = memory.downsample(frame, [*marks["start_ms"], *marks["end_ms"]])
    names = [name for name in STACK if frame[name].max() > 0.002 * peak["total"]]
    with themed(theme) as look:
        fig, ax = new_figure(3.9, f"Memory of rank {rank}", run.title, run.setting)
        time = drawn["time_ms"] / 1e3
        low = 0
        for name in names:
            there = drawn[name].gt(0)  # a hairline around it, or a short peak would not be seen
            high = low + drawn[name] / scale
            ax.fill_between(
                time,
                low,
                high,
                where=there | there.shift(fill_value=False),
                step="post",
                color=COLOURS[name],
                linewidth=0.3,
            )
            low = high
        ax.set(
            xlim=(0, frame["time_ms"].iloc[-1] / 1e3),
            ylim=(0, 1.25 * peak["total"] / scale),
            xlabel="seconds",
            ylabel=unit,
        )
        draw_steps(ax, run, rank, look)
        mark_peak(ax, peak["time_ms"] / 1e3, peak["total"] / scale, unit, look)
        legend_below(fig, [(name, COLOURS[name]) for name in names])
        parts = ", ".join(f"{name} {size_text(peak[name])}" for name in names if peak[name] > 0)
        where = step_and_phase(run, rank, peak["time_ms"])
        return described(
            fig,
            run.setting,
            f"{run.title}: memory of rank {rank} peaks at {size_text(peak['total'])}{where}: {parts}."
            " The strip on top shows the phases of each step."
            + (
                " NCCL's own buffers are invisible to PyTorch and not in it."
                if run.record["backend"] == "nccl"
                else ""
            ),
            f"Stacked area chart of memory over {run.record['steps']} training steps on rank "
            f"{rank}, by category. The total peaks at {size_text(peak['total'])}{where}, made of "
            f"{parts}.",
        )


def temporal_breakdown(run: Run, theme: str = "light") -> Figure:
    """HTA's temporal breakdown: compute, non-compute and idle time of each rank."""
    frame = frames.temporal_breakdown(run)
    kinds = {"compute": "compute", "non-compute": "exposed", "idle": "idle"}
    columns = {kind: frame[kind.replace("-", "_") + "_pct"].to_numpy() for kind in kinds}
    with themed(theme):
        fig, ax = bars_per_rank(frame["rank"], "Where the time goes", run, "% of the rank's time")
        stack_bars(ax, columns, [COLOURS[name] for name in kinds.values()], "{:.0f} %")
        ax.set_xlim(0, 100)
        legend_below(fig, [(kind, COLOURS[name]) for kind, name in kinds.items()])
        each = "; ".join(
            f"rank {r.rank} computes {r.compute_pct:.1f} %, is busy without computing "
            f"{r.non_compute_pct:.1f} % and idle {r.idle_pct:.1f} %"
            for r in frame.itertuples()
        )
        return described(
            fig,
            run.setting,
            f"{run.title}: HTA's temporal breakdown. Non-compute time is "
            f"{frame['non_compute_pct'].mean():.1f} % on average.",
            f"One horizontal bar per rank, split in three: {each}.",
        )


def overlap(run: Run, theme: str = "light") -> Figure:
    """Communication per step and rank, split in what compute hides and what it does not."""
    frame = frames.exposed_comm(run).merge(frames.comm_comp_overlap(run), on="rank")
    exposed = frame["exposed_us"].to_numpy() / 1e3
    hidden = frame["comm_us"].to_numpy() / 1e3 - exposed
    with themed(theme) as look:
        fig, ax = bars_per_rank(frame["rank"], "Communication behind compute", run, "ms per step")
        stack_bars(
            ax,
            {"hidden": hidden, "exposed": exposed},
            [COLOURS["hidden"], COLOURS["exposed"]],
            None,
        )
        ax.set_xlim(0, 1.26 * max(*(hidden + exposed), 1e-3))
        for y, (total, pct) in enumerate(zip(hidden + exposed, frame["overlap_pct"], strict=True)):
            ax.annotate(
                overlap_text(pct),
                (total, y),
                (6, 0),
                textcoords="offset points",
                va="center",
                color=look["ink"],
                weight="bold",
            )
        legend_below(
            fig, [("hidden behind compute", COLOURS["hidden"]), ("exposed", COLOURS["exposed"])]
        )
        each = "; ".join(
            f"rank {r.rank}: {overlap_text(r.overlap_pct)} of {r.comm_us / 1e3:.1f} ms"
            for r in frame.itertuples()
        )
        return described(
            fig,
            run.setting,
            f"{run.title}: HTA's communication-computation overlap is "
            f"{overlap_text(frame['overlap_pct'].mean())} on average.",
            f"One horizontal bar per rank with the communication time of a step, the overlapped "
            f"part first: {each}.",
        )


def kernel_breakdown(run: Run, theme: str = "light", top: int = 10) -> Figure:
    """HTA's kernel breakdown: the kernels that take longest, mean of all ranks, per step."""
    kinds, kernels = frames.kernel_breakdown(run)
    colour = {"COMPUTATION": "compute", "COMMUNICATION": "exposed", "MEMORY": "copies"}
    count = run.world_size * max(len(timing.steps(run)), 1)
    sums = kernels.groupby(["name", "kernel_type"], sort=False)["sum_us"].sum() / count / 1e3
    sums = sums.reset_index().sort_values(["sum_us", "name"], ascending=[False, True])
    shown, rest = sums.head(top), sums.iloc[top:]
    names = [shortened(name) for name in shown["name"]]
    values, colours = list(shown["sum_us"]), [COLOURS[colour[k]] for k in shown["kernel_type"]]
    if len(rest):
        names.append(f"{len(rest)} others")
        values.append(rest["sum_us"].sum())
        colours.append(COLOURS["other"])
    with themed(theme) as look:
        fig, ax = new_figure(
            1.52 + 0.27 * len(names), "Kernels by time", run.title, run.setting, left=2.35
        )
        ax.barh(range(len(names)), values, color=colours, height=0.72)
        for y, value in enumerate(values):
            ax.annotate(
                number_text(value),
                (value, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                color=look["ink"],
            )
        ax.set_yticks(range(len(names)), names)
        ax.set(
            xlim=(0, 1.1 * max(values)),
            ylim=(len(names) - 0.4, -0.6),
            xlabel="ms per step, mean of all ranks",
        )
        ax.grid(axis="x")
        present = [k for k in colour if k in set(sums["kernel_type"])]
        legend_below(fig, [(k.lower(), COLOURS[colour[k]]) for k in present])
        each = ", ".join(f"{n} {number_text(v)}" for n, v in zip(names, values, strict=True))
        shares = ", ".join(f"{k.kernel_type.lower()} {k.pct:.1f} %" for k in kinds.itertuples())
        return described(
            fig,
            run.setting,
            f"{run.title}: HTA's kernel breakdown. Busy time is {shares}.",
            f"Horizontal bars, longest first, ms per step: {each}.",
        )


def schedule_diagram(
    run: Run, rank: int = 0, step: int = 2, theme: str = "light", most: int = 16
) -> Figure:
    """[Backward]-[AllReduce]-[Step]-[Broadcast] per bucket, from the measured intervals."""
    frame = timing.schedule(run, rank, step)
    frame = frame.assign(
        start_ms=frame["start_ms"] - frame["start_ms"].min(),
        end_ms=frame["end_ms"] - frame["start_ms"].min(),
    )
    labels = list(dict.fromkeys(frame["label"]))
    kept = [
        labels[i]
        for i in np.linspace(0, len(labels) - 1, min(most, len(labels))).round().astype(int)
    ]
    kinds = [
        kind
        for kind in ("backward", "all-reduce", "step", "broadcast")
        if kind in set(frame["kind"])
    ]
    with themed(theme) as look:
        fig, ax = new_figure(
            1.52 + 0.27 * len(kept), f"One step of rank {rank}", run.title, run.setting
        )
        for y, label in enumerate(kept):
            row = frame[frame["label"] == label]
            ax.plot(
                [row["start_ms"].min(), row["end_ms"].max()],
                [y, y],
                color=look["rule"],
                linewidth=1.2,
                zorder=1,
            )
            for kind in kinds:
                part = row[row["kind"] == kind]
                spans = list(zip(part["start_ms"], part["end_ms"] - part["start_ms"], strict=True))
                ax.broken_barh(spans, (y - 0.36, 0.72), color=COLOURS[kind], linewidth=0, zorder=2)
        ax.set_yticks(range(len(kept)), kept)
        ax.set(
            xlim=(0, 1.005 * frame["end_ms"].max()),
            ylim=(len(kept) - 0.4, -0.6),
            xlabel="ms since the start of the backward pass",
        )
        ax.grid(axis="x")
        called = {kind: kind for kind in kinds} | _halves(run)
        legend_below(fig, [(called[kind], COLOURS[kind]) for kind in kinds])
        last = {called[kind]: frame.loc[frame["kind"] == kind, "end_ms"].max() for kind in kinds}
        ends = ", ".join(f"{kind} {end:.1f} ms" for kind, end in last.items())
        some = f" {len(kept)} of {len(labels)} rows are drawn." if len(kept) < len(labels) else ""
        return described(
            fig,
            run.setting,
            f"{run.title}: measured intervals of step {step} on rank {rank}. The last of each "
            f"ends at: {ends}.{some}",
            f"Timeline with one row each for {', '.join(kept)}, showing {', '.join(last)} as bars. "
            f"The last of each ends at: {ends}.",
        )


def _halves(run: Run) -> dict[str, str]:
    """What a run has in place of all-reduce and broadcast, if it sends gradients and parameters by slices."""
    sliced = any(c["op"] == "reduce_scatter" for c in run.record["collectives"])
    return {"all-reduce": "reduce-scatter", "broadcast": "all-gather"} if sliced else {}


# Pieces


# Files and notebooks
