"""The trace that torch's profiler writes: read, mended where it is not JSON, and its collectives counted."""

import json
import math
import os
import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from zero1_helpers.measure.files import RunError, write_atomic
from zero1_helpers.memory_math import RING_FACTOR, bytes_sent


def read_trace(profiler: torch.profiler.profile, folder=".") -> dict:
    """The chrome trace of a stopped profiler, parsed. If it cannot be, its text is left in `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as f:
            text = f.read()
    try:
        trace = json.loads(text)
    except ValueError:
        try:
            trace = json.loads(NAME.sub(_quoted, text))
        except ValueError as error:
            left = Path(folder) / f"unread.rank{dist.get_rank()}.json"
            write_atomic(left, text.encode())
            raise RunError(
                f"{left}: torch's profiler wrote this, and it is not JSON ({error}); mend it there, "
                "or give the ranges of record_function plainer names and record again"
            ) from None
    name_reduce_scatters(trace["traceEvents"])
    return trace


# torch's profiler writes a name as it is, quotes included.
NAME = re.compile(r'^(\s*"name": )"(.*)"(?=,$)', re.MULTILINE)


def _quoted(found: re.Match) -> str:
    try:
        json.loads(f'"{found[2]}"')
        return found[0]
    except ValueError:
        return found[1] + json.dumps(found[2])


def name_reduce_scatters(events: list[dict]) -> None:
    """A reduce-scatter over gloo is an all-to-all (`collectives`), or in classes of others an all-reduce,
    and the trace says so. Give it its name back.

    All-reduces of both kinds run in the order in which they were issued, which tells them apart.
    """
    for e in events:
        if e.get("name") == "gloo:all_to_all":
            e["name"] = "gloo:reduce_scatter"
    issued = [
        e["name"]
        for e in sorted(
            (
                e
                for e in events
                if e.get("ph") == "X"
                and e["name"] in ("c10d::allreduce_", "c10d::_reduce_scatter_base_")
            ),
            key=lambda e: e["ts"],
        )
    ]
    ran = sorted(
        (e for e in events if e.get("name") == "gloo:all_reduce" and e.get("ph") == "X"),
        key=lambda e: e["ts"],
    )
    if len(issued) == len(ran):
        for name, e in zip(issued, ran, strict=True):
            if name != "c10d::allreduce_":
                e["name"] = "gloo:reduce_scatter"


ELEMENT_BYTES = {
    **{"double": 8, "long": 8, "long int": 8, "long long": 8, "float": 4, "int": 4},
    **{"bfloat16": 2, "half": 2, "byte": 1, "unsigned char": 1, "bool": 1},
}


def count_collectives(events: list[dict], steps: int, world_size: int) -> list[dict]:
    """Collectives of one rank in a step, read off gloo's or NCCL's events.

    A list of {op, calls, bytes, bytes_sent}: the tensors' bytes, and what a ring algorithm sends.
    """
    totals = {}
    for e in events:
        args = e.get("args", {})
        if e.get("ph") == "X" and e["name"].startswith("link:"):
            op, size = e["name"].removeprefix("link:"), args["bytes"]
        elif e.get("ph") == "X" and e["name"].startswith("gloo:"):
            op, size = e["name"].removeprefix("gloo:"), 0
            for shape, dtype in zip(args["Input Dims"], args["Input type"], strict=True):
                size += math.prod(shape) * ELEMENT_BYTES.get(dtype.removeprefix("c10::").lower(), 0)
            size *= world_size if op == "all_gather" else 1  # its event has the input, a slice
        elif e.get("cat") == "kernel" and "In msg nelems" in args:
            op = (
                args["Collective name"]
                .strip("_")
                .replace("allreduce", "all_reduce")
                .removesuffix("_base")
            )
            size = max(args["In msg nelems"], args["Out msg nelems"]) * ELEMENT_BYTES.get(
                args["dtype"].lower(), 0
            )
        else:
            continue
        if op in RING_FACTOR:
            calls, bytes_ = totals.get(op, (0, 0))
            totals[op] = (calls + 1, bytes_ + size)
    return [
        {
            "op": op,
            "calls": round(calls / steps),
            "bytes": round(size / steps),
            "bytes_sent": round(bytes_sent(op, size, world_size) / steps),
        }
        for op, (calls, size) in sorted(totals.items())
    ]
