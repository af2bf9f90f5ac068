"""The device-lane view: a profiler's trace, as small as HTA and Perfetto need it."""

import re
from collections import defaultdict

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
    marks = [e for e in spans if e.get("cat") == "user_annotation" and e["name"].startswith(MARKS)]
    kernels = [e for e in spans if e.get("cat") in KERNEL_CATEGORIES and "stream" in e["args"]]
    view = [(e["name"], e["cat"], None, e, {}) for e in marks]
    view += _cuda_lanes(spans, kernels, marks) if kernels else _cpu_lanes(spans, marks)

    info = {
        key: raw.get("distributedInfo", {}).get(key, default)
        for key, default in (("backend", "none"), ("rank", 0), ("world_size", 1))
    }
    pid, host, events = info["rank"] + 1, {}, []  # HTA takes process 0 for a GPU
    for name, category, stream, e, args in view:
        lane = host.setdefault(e["tid"], HOST_LANE + len(host)) if stream is None else stream
        start, end = round(e["ts"] - base_us), round(e["ts"] + e["dur"] - base_us)
        events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": pid,
                "tid": lane,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )
    events.sort(key=lambda e: (e["ts"], -e["dur"]))
    labels = [("process_name", 0, f"rank {info['rank']}")]
    labels += [
        (
            "thread_name",
            lane,
            f"stream {lane}" if lane < HOST_LANE else f"thread {lane - HOST_LANE}",
        )
        for lane in sorted({e["tid"] for e in events})
    ]
    head = [
        {"ph": "M", "name": kind, "pid": pid, "tid": lane, "args": {"name": label}}
        for kind, lane, label in labels
    ]
    return {
        "schemaVersion": 1,
        "distributedInfo": info,
        "lane_view": not kernels,
        "traceEvents": head + events,
    }


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
    launches = {
        e["args"]["correlation"]: e
        for e in spans
        if e.get("cat", "").startswith("cuda_")
        and e.get("args", {}).get("correlation") in wanted - {None}
        and "stream" not in e["args"]
    }
    phase_of = _phases(launches.values(), marks)
    view = [(e["name"], e["cat"], None, e, {"correlation": c}) for c, e in launches.items()]
    for e in kernels:
        args = {
            key: e["args"][key] for key in ("stream", "correlation", "device") if key in e["args"]
        }
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
