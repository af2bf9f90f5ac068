"""All variants side by side: predicted, measured, and what the post published."""

import re
from collections.abc import Iterable
from numbers import Integral

import pandas as pd

from zero1_helpers.measure.runs import Run, setting_of
from zero1_helpers.report.frames import comm_comp_overlap, step_seconds, temporal_breakdown
from zero1_helpers.training.variants import VARIANTS

# SmolLM2-360M, pure bf16, Adam, 4 GPUs, batch 16, 4 steps. Memory in GB, times in percent. The post
# gives no separate figure where there is None ("similar", "slightly reduced").
PUBLISHED = pd.DataFrame(
    [
        ("ddp", 5.76, 1.39, 16, 0),
        ("zero1", 5.05, 0.484, 22, 0),
        ("zero1-async", None, None, 13, 77),
        ("zero1-bucket", None, None, None, None),
        ("zero1-overlap", 0.90 * 5.76, None, 7, 87),
    ],
    columns=["variant", "peak_gb", "opt_state_gb", "non_compute_pct", "overlap_pct"],
).set_index("variant")


def results_table(runs: Iterable[Run], times: bool = True) -> pd.DataFrame:
    """One row a run, in the order of the series. Memory in MB of the fullest rank, percentages as means.

    `predicted` is opt_state by memory_math, `opt_state` the same as measured; `states` is the peak of
    parameters, gradients, optimizer state and buckets together, `peak` that of everything. Without
    `times` HTA is not asked for its two percentages, so that run.json is enough.
    """
    order = list(VARIANTS)
    rows = []
    for run in sorted(
        runs, key=lambda run: order.index(run.variant) if run.variant in order else len(order)
    ):
        r = run.record
        fullest = {
            key: max(rank[key] for rank in r["memory"]) / 1e6
            for key in ("opt_state", "peak_states", "peak")
        }
        rows.append(
            {
                "variant": run.variant,
                "predicted": max(rank["opt_state"] for rank in r["predicted"]) / 1e6,
                "opt_state": fullest["opt_state"],
                "states": fullest["peak_states"],
                "peak": fullest["peak"],
                **(_shares(run) if times else {}),
                "collectives": sum(c["calls"] for c in r["collectives"]),
                "sent": sum(c["bytes_sent"] for c in r["collectives"]) / 1e6,
                "step_s": step_seconds(run),
                "loss": r["losses"][-1] if r["losses"] else None,
            }
        )
    return pd.DataFrame(rows).set_index("variant")


def _shares(run: Run) -> dict[str, float]:
    return {
        "non_compute_pct": temporal_breakdown(run)["non_compute_pct"].mean(),
        "overlap_pct": comm_comp_overlap(run)["overlap_pct"].mean(),
    }


HEADINGS = {
    "predicted": "opt_state, predicted MB",
    "opt_state": "measured MB",
    "states": "states, peak MB",
    "peak": "all, peak MB",
    "non_compute_pct": "non-compute %",
    "overlap_pct": "overlap %",
    "collectives": "collectives",
    "sent": "sent MB",
    "step_s": "step s",
    "loss": "last loss",
    "peak_gb": "all, peak GB",
    "opt_state_gb": "opt_state GB",
}


def markdown(table: pd.DataFrame) -> str:
    """A table as Markdown: a row for each entry of the index, numbers with sensible digits."""
    digits = {"collectives": 0, "loss": 4, "step_s": 2, "peak_gb": 2, "opt_state_gb": 3}
    known = HEADINGS if table.index.name == "variant" else {}
    lines = ["| " + " | ".join([table.index.name or "", *(known.get(c, c) for c in table)]) + " |"]
    lines.append("|---|" + "---:|" * len(table.columns))
    for name, row in table.astype(object).iterrows():  # as objects, or integers become floats
        cells = [_cell(value, digits.get(column, 1)) for column, value in row.items()]
        lines.append(f"| {plain(str(name))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plain(text: str) -> str:
    """A text of a run in Markdown: what could be a tag, a cell's end or a link stays text."""
    return re.sub(r"([\\`|\[\]<>])", r"\\\1", text)


def _cell(value, digits: int) -> str:
    if isinstance(value, str):
        return plain(value)
    if pd.isna(value):
        return "–"
    return f"{value:,}" if isinstance(value, Integral) else f"{value:,.{digits}f}"


def report(runs: Iterable[Run]) -> str:
    """A table for each setting (preset, machine, date) among the runs, then the post's; Markdown."""
    by_conditions: dict[tuple, list[Run]] = {}
    for run in runs:
        by_conditions.setdefault(run.conditions, []).append(run)
    parts = []
    for alike in by_conditions.values():
        steps, setting = alike[0].record["steps"], setting_of(alike)
        parts.append(
            f"Measured, {steps} steps, memory of the fullest rank, times as the mean over ranks.\n"
            f"{plain(setting)}\n"
        )
        parts.append(markdown(results_table(alike)) + "\n")
    parts.append(
        "Published in the post: SmolLM2-360M, bf16, Adam, 4 GPUs, batch 16, 4 steps; memory in GB.\n"
    )
    parts.append(markdown(PUBLISHED))
    return "\n".join(parts)


MARKS = "<!-- results, by `zero1 report` -->", "<!-- end of results -->"


def replace_marked(text: str, results: str) -> str:
    """A page with its results, which stand between two marks, replaced."""
    if any(text.count(mark) != 1 for mark in MARKS):
        raise ValueError(
            f"the page needs a line {MARKS[0]} and, after the table, a line {MARKS[1]}"
        )
    before, rest = text.split(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{results}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}"
