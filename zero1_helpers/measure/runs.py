"""A recorded run on disk: read, validate, sanitise, device-lane view.

A run is a folder::

    run.json             what ran, where, and what was measured (the keys are in RECORD below)
    trace.rank0.json.gz  per rank: a chrome trace that HTA and Perfetto read, by `lane_view`
    memory.rank0.csv.gz  per rank: time_us, category, delta (bytes); running sums: the timeline
    raw.rank0.json.gz    optional: the profiler's own trace

Nothing in it names a path, a user or a host, the same run gives the same bytes, and a file is
either whole or absent. Every fault of a folder is a `RunError` naming the file and the field.
"""

import gzip
import json
import os
import re
import socket
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path

import pandas as pd

FORMAT = 1
STATES = ("params", "grads", "opt_state", "buckets")  # what data parallelism can shard or free
CATEGORIES = (*STATES, "counters", "activations", "temporaries", "other")
MEMORY_COLUMNS = ("time_us", "category", "delta")

# run.json: a type, [type] for a list of them, or {key: type} with every key required.
RECORD = {
    "format": int,
    "variant": str,
    "title": str,
    "preset": str,
    "model": {"name": str, "parameters": int, "tensors": int, "dtype": str, "source": str},
    "data": {"name": str, "source": str, "examples": int, "batch_size": int,
             "tokens_per_batch": int},
    "backend": str,
    "device": str,
    "hardware": str,
    "world_size": int,
    "link": str,
    "steps": int,
    "seed": int,
    "date": str,
    "versions": dict,
    "losses": [float],
    "step_seconds": [float],
    "memory": [dict.fromkeys(("params", "grads", "opt_state", "counters", "buckets", "peak",
                              "peak_states"), int)],
    "predicted": [dict.fromkeys(("params", "grads", "opt_state"), int)],
    "collectives": [{"op": str, "calls": int, "bytes": int, "bytes_sent": int}],
}  # fmt: skip
TOLERATED_LATE = 0.03  # with more operations later than the emulated link, a run says so
LENGTHS = {"losses": "steps", "step_seconds": "steps", "memory": "world_size",
           "predicted": "world_size"}  # fmt: skip


class RunError(ValueError):
    """A folder is not a run, or a damaged one. One line: which file, which field, what is wrong."""


@dataclass(frozen=True)
class Run:
    """One recorded run, as `load_run` found it: checked, and read only once."""

    folder: Path
    record: dict  # run.json
    traces: dict  # {rank: parsed trace}
    memories: dict  # {rank: DataFrame of time_us, category, delta}
    frames: dict = field(default_factory=dict, repr=False, compare=False)  # frames.py's cache

    @property
    def variant(self) -> str:
        return self.record["variant"]

    @property
    def title(self) -> str:
        return self.record["title"]

    @property
    def world_size(self) -> int:
        return self.record["world_size"]

    @property
    def trace_files(self) -> dict[int, str]:
        """{rank: path}, the form in which HTA takes traces."""
        return {rank: str(_file(self.folder.resolve(), "trace", rank)) for rank in self.traces}

    def memory(self, rank: int) -> pd.DataFrame:
        """Changes of memory on `rank`: time_us (int), category, delta (int bytes)."""
        return self.memories[self._known(rank)]

    def trace(self, rank: int) -> dict:
        return self.traces[self._known(rank)]

    @property
    def caption(self) -> str:
        """What ran on what, in one line."""
        return f"{self.title}. {self.setting}"

    @property
    def setting(self) -> str:
        """Hardware, ranks, backend, link, date: what a number means nothing without."""
        return setting_of([self])

    @property
    def conditions(self) -> tuple[str, ...]:
        """The parts of `setting` that runs must share to be compared."""
        r = self.record
        ranks = "1 rank" if r["world_size"] == 1 else f"{r['world_size']} ranks"
        link = "no emulated link" if r["link"] == "none" else f"emulated link {r['link']}"
        return (r["hardware"], ranks, r["backend"], link, r["preset"], r["date"])

    def _known(self, rank: int) -> int:
        if rank not in self.traces:
            raise RunError(f"{self.folder}: no rank {rank}; it has 0 to {self.world_size - 1}")
        return rank


def setting_of(runs: Iterable[Run]) -> str:
    """What runs share; where they differ, all that occurs. Of operations that were late, the worst share."""
    runs = list(runs)
    columns = zip(*(run.conditions for run in runs), strict=True)
    parts = [" / ".join(dict.fromkeys(column)) for column in columns]
    if (late := max(run.record.get("late_share", 0) for run in runs)) > TOLERATED_LATE:
        upto = "up to " if len(runs) > 1 else ""
        parts[3] += f" ({upto}{late:.0%} of the operations took gloo longer)"
    return " · ".join(parts)


# Writing


def save_rank(folder, rank: int, trace: dict, memory: pd.DataFrame, raw: dict | None = None):
    """Write one rank's lane view and memory timeline, and its raw trace if given."""
    folder = Path(folder)
    _check_trace(trace, rank, _file(folder, "trace", rank))
    memory = _check_memory(memory, _file(folder, "memory", rank))
    _write_gz(_file(folder, "trace", rank), json.dumps(scrub(trace)))
    _write_gz(_file(folder, "memory", rank), memory.to_csv(index=False, lineterminator="\n"))
    if raw is not None:
        raw = {key: raw[key] for key in raw if key not in ("host_name", "traceName")}
        _write_gz(_file(folder, "raw", rank), json.dumps(scrub(raw)))


def save_summary(folder, record: dict):
    """Write run.json. Last of all: a folder without it is not yet a run."""
    path = Path(folder) / "run.json"
    record = scrub(record)
    _check_record(record, path)
    write_atomic(path, json.dumps(record, indent=1, ensure_ascii=False).encode() + b"\n")


def write_atomic(path, data: bytes):
    """Write under a temporary name in the same folder, then rename: never half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def scrub(value):
    """The same value without absolute paths (only file names stay), user name or host name."""
    if isinstance(value, dict):
        return {scrub(key): scrub(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(item) for item in value]
    if not isinstance(value, str):
        return value
    value = re.sub(r"(?<![\w.:/])~?/(?:[\w.+@-]+/)*(?=[\w.+@-])", "", value)
    return _names().sub("-", value)


@cache
def _names() -> re.Pattern:
    """This machine's and its user's names; common words are let through."""
    host = socket.gethostname()
    names = {host, host.split(".")[0], Path.home().name} - {"root", "user", "home", "localhost"}
    names = [rf"\b{re.escape(name)}\b" for name in sorted(names, key=len)[::-1] if len(name) > 3]
    return re.compile("|".join(names) or r"(?!)")


def _write_gz(path: Path, text: str):
    write_atomic(path, gzip.compress(text.encode(), mtime=0))  # no date inside: same bytes


def _file(folder: Path, kind: str, rank: int) -> Path:
    return Path(folder) / f"{kind}.rank{rank}.{'csv' if kind == 'memory' else 'json'}.gz"


# Reading


def find_runs(root) -> list[Path]:
    """Folders under `root` (itself included) that hold a run.json, sorted."""
    return sorted(path.parent for path in Path(root).rglob("run.json"))


def load_run(folder) -> Run:
    """Read and check a whole run. RunError if anything in it is missing, damaged or foreign."""
    folder = Path(folder)
    record = _parse(folder / "run.json", json.loads)
    _check_record(record, folder / "run.json")
    traces, memories = {}, {}
    for rank in range(record["world_size"]):
        path = _file(folder, "trace", rank)
        traces[rank] = _check_trace(_parse(path, json.loads), rank, path)
        path = _file(folder, "memory", rank)
        memories[rank] = _check_memory(_parse(path, _read_csv), path)
    return Run(folder, record, traces, memories)


def _read_csv(text: str) -> pd.DataFrame:
    return pd.read_csv(StringIO(text))


def _parse(path: Path, parser):
    try:
        data = path.read_bytes()
        return parser((gzip.decompress(data) if path.suffix == ".gz" else data).decode())
    except FileNotFoundError:
        raise RunError(f"{path}: missing; not a recorded run, or an unfinished one") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"{path}: damaged, cannot be read ({reason})") from None


def _check_record(record, path: Path):
    _check(record, RECORD, "", path)
    if record["format"] != FORMAT:
        raise RunError(f"{path}: field format is {record['format']}, this version reads {FORMAT}")
    if record["world_size"] < 1:
        raise RunError(f"{path}: field world_size must be at least 1")
    for name, length in LENGTHS.items():
        if name == "losses" and not record[name]:
            continue  # the loop did not tell
        if len(record[name]) != record[length]:
            raise RunError(f"{path}: field {name} has {len(record[name])} entries, but {length} "
                           f"is {record[length]}")  # fmt: skip


def _check(value, spec, name: str, path: Path):
    """Hold `value` against a type, [spec] or {key: spec}; RunError names the first bad field."""
    kind = spec if isinstance(spec, type) else type(spec)
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool):
        raise RunError(f"{path}: field {name or '(whole file)'} must be {kind.__name__}, "
                       f"not {str(value)[:40]!r}")  # fmt: skip
    if isinstance(spec, dict):
        for key, inner in spec.items():
            full = f"{name}.{key}" if name else key
            if key not in value:
                raise RunError(f"{path}: field {full} is missing")
            _check(value[key], inner, full, path)
    elif isinstance(spec, list):
        for i, item in enumerate(value):
            _check(item, spec[0], f"{name}[{i}]", path)


def _check_trace(trace, rank: int, path: Path) -> dict:
    _check(trace, {"traceEvents": [dict], "distributedInfo": {"rank": int, "world_size": int}},
           "", path)  # fmt: skip
    if trace["distributedInfo"]["rank"] != rank:
        raise RunError(f"{path}: field distributedInfo.rank is "
                       f"{trace['distributedInfo']['rank']}, not {rank}")  # fmt: skip
    for i, event in enumerate(trace["traceEvents"]):
        if event.get("ph") == "X" and not {"name", "ts", "dur"} <= event.keys():
            raise RunError(f"{path}: field traceEvents[{i}] has no name, ts or dur")
        if event.get("ts", 0) < 0:
            raise RunError(f"{path}: field traceEvents[{i}].ts is negative")
    if not any("stream" in event.get("args", ()) for event in trace["traceEvents"]):
        raise RunError(f"{path}: field traceEvents has no kernel on a stream: see lane_view")
    if not any(event.get("name", "").startswith("ProfilerStep#") for event in trace["traceEvents"]):
        raise RunError(f"{path}: field traceEvents has no ProfilerStep#N: torch.profiler marks "
                       "steps only when it has a schedule")  # fmt: skip
    return trace


def _check_memory(memory: pd.DataFrame, path: Path) -> pd.DataFrame:
    for name in MEMORY_COLUMNS:
        if name not in memory:
            raise RunError(f"{path}: field {name} (a column) is missing")
        if name != "category" and not pd.api.types.is_integer_dtype(memory[name]):
            raise RunError(f"{path}: field {name} must hold integers only")
    strange = set(memory["category"]) - set(CATEGORIES)
    if strange or not len(memory):
        raise RunError(f"{path}: field category holds {sorted(map(str, strange)) or 'nothing'}; "
                       f"known are {', '.join(CATEGORIES)}")  # fmt: skip
    if not memory["time_us"].is_monotonic_increasing:
        raise RunError(f"{path}: field time_us must not go back in time")
    return memory[list(MEMORY_COLUMNS)]


# Device-lane view

COMPUTE_LANE, COMM_LANE, HOST_LANE = 7, 20, 100_000  # streams 7; 20, 21, ...; host threads
MARKS = ("ProfilerStep#", "zero1.", "Optimizer.step#")  # annotations that are kept
COLLECTIVE = re.compile(r"(gloo|mpi|ucc|nccl|link):")
KERNEL_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def lane_view(raw: dict, base_us: float = 0.0) -> dict:
    """A small trace that HTA reads, from a chrome trace of torch.profiler (parsed JSON).

    CUDA: the kernels, their launches, and the annotations of steps and phases, without the rest.
    CPU: HTA looks only at kernels on streams, and a CPU trace has none. So they are drawn: the
    outermost `aten::*` op of a thread becomes a kernel on stream 7, and a collective
    (`gloo:all_reduce` on one of gloo's own threads) becomes `ncclKernel[gloo:all_reduce]` on
    stream 20, 21, ..., one per thread. A thread that waits is in no aten op: it is not computing.

    Times are whole microseconds since `base_us`, the ends rounded, not the lengths (HTA would
    round inwards). A collective's args.phase is the `zero1.` range in which it was issued.
    What began before `base_us` is left out (HTA loses kernels when a time is negative); a step
    that did is a ValueError.
    """
    spans = [e for e in raw["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    if any(e["name"].startswith("ProfilerStep#") and e["ts"] < base_us for e in spans):
        raise ValueError(f"base_us={base_us} is later than the first ProfilerStep")
    spans = [e for e in spans if e["ts"] >= base_us]
    spans.sort(key=lambda e: (e["ts"], -e["dur"]))  # an outer span comes before its inner ones
    marks = [e for e in spans if e.get("cat") == "user_annotation"
             and e["name"].startswith(MARKS)]  # fmt: skip
    kernels = [e for e in spans if e.get("cat") in KERNEL_CATEGORIES and "stream" in e["args"]]
    view = [(e["name"], e["cat"], None, e, {}) for e in marks]
    view += _cuda_lanes(spans, kernels, marks) if kernels else _cpu_lanes(spans, marks)

    info = {key: raw.get("distributedInfo", {}).get(key, default)
            for key, default in (("backend", "none"), ("rank", 0), ("world_size", 1))}  # fmt: skip
    pid, host, events = info["rank"] + 1, {}, []  # HTA takes process 0 for a GPU
    for name, category, stream, e, args in view:
        lane = host.setdefault(e["tid"], HOST_LANE + len(host)) if stream is None else stream
        start, end = round(e["ts"] - base_us), round(e["ts"] + e["dur"] - base_us)
        events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": lane,
                       "ts": start, "dur": end - start, "args": args})  # fmt: skip
    events.sort(key=lambda e: (e["ts"], -e["dur"]))
    labels = [("process_name", 0, f"rank {info['rank']}")]
    labels += [("thread_name", lane, f"stream {lane}" if lane < HOST_LANE
                else f"thread {lane - HOST_LANE}")
               for lane in sorted({e["tid"] for e in events})]  # fmt: skip
    head = [{"ph": "M", "name": kind, "pid": pid, "tid": lane, "args": {"name": label}}
            for kind, lane, label in labels]  # fmt: skip
    return {"schemaVersion": 1, "distributedInfo": info, "lane_view": not kernels,
            "traceEvents": head + events}  # fmt: skip


def _cpu_lanes(spans, marks):
    """(name, category, stream, span, args) of what a CPU trace has in place of kernels."""
    view, busy_until, issued, ran = [], {}, defaultdict(list), defaultdict(list)
    for e in spans:
        # A sibling may start the nanosecond the last one ends, and ts + dur is not exact.
        if e["name"].startswith("aten::") and e["ts"] > busy_until.get(e["tid"], 0) - 0.002:
            busy_until[e["tid"]] = e["ts"] + e["dur"]
            view.append((e["name"], "kernel", COMPUTE_LANE, e, {"stream": COMPUTE_LANE}))
        elif e["name"].startswith("c10d::"):
            issued[e["name"][6:].replace("_", "").removesuffix("base")].append(e)
        elif COLLECTIVE.match(e["name"]):
            ran[e["name"].partition(":")[2].replace("_", "")].append(e)
    phase_of = _phases([e for ops in issued.values() for e in ops], marks)
    threads = sorted({e["tid"] for events in ran.values() for e in events})
    for kind, events in ran.items():
        # The i-th issued is the i-th to run: one queue. Unequal numbers: one crossed the window.
        same = len(events) == len(issued[kind])
        for i, e in enumerate(events):
            args = {"stream": COMM_LANE + threads.index(e["tid"])}
            if same and (phase := phase_of.get(id(issued[kind][i]))):
                args["phase"] = phase
            view.append((f"ncclKernel[{e['name']}]", "kernel", args["stream"], e, args))
    return view


def _cuda_lanes(spans, kernels, marks):
    """(name, category, stream or None, span, args) of kernels and their launches on the host."""
    wanted = {e["args"].get("correlation") for e in kernels}
    launches = {e["args"]["correlation"]: e for e in spans if e.get("cat", "").startswith("cuda_")
                and e.get("args", {}).get("correlation") in wanted - {None}
                and "stream" not in e["args"]}  # fmt: skip
    phase_of = _phases(launches.values(), marks)
    view = [(e["name"], e["cat"], None, e, {"correlation": c}) for c, e in launches.items()]
    for e in kernels:
        args = {key: e["args"][key] for key in ("stream", "correlation", "device")
                if key in e["args"]}  # fmt: skip
        phase = phase_of.get(id(launches.get(args.get("correlation"))))
        if phase and "nccl" in e["name"]:
            args["phase"] = phase
        view.append((e["name"], e["cat"], args["stream"], e, args))
    return view


def _phases(ops, marks) -> dict[int, str]:
    """{id(op): innermost `zero1.` range around its start, on its thread, e.g. "launch 3"}."""
    threads = defaultdict(list)
    for e in marks:
        if e["name"].startswith("zero1."):
            threads[e["tid"]].append((e["ts"], 0, e))
    for e in ops:
        threads[e["tid"]].append((e["ts"], 1, e))
    phases = {}
    for events in threads.values():
        stack = []
        for ts, is_op, e in sorted(events, key=lambda item: item[:2]):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= ts:
                stack.pop()
            if not is_op:
                stack.append(e)
            elif stack:
                phases[id(e)] = stack[-1]["name"].removeprefix("zero1.")
    return phases
