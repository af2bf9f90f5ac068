"""Profile some steps on every rank, and write them down as a run (see `runs`).

One step of the window::

    forward ... step    torch.profiler records operations and allocations, the ledger what they hold
    prof.step(loss)     the step's edge; after the last one nothing more is recorded
    leaving `with`      every rank writes its lane view and memory timeline, rank 0 the summary
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from zero1_helpers import phases
from zero1_helpers.measure import link, runs
from zero1_helpers.measure.blocks import account
from zero1_helpers.measure.ledger import MemoryLedger
from zero1_helpers.measure.peaks import peaks, without_blips
from zero1_helpers.memory_math import RING_FACTOR, bytes_sent, nbytes, predict
from zero1_helpers.partition import by_bytes


def get_profiler(
    file_prefix, steps: int = 4, *, model=None, optimizer=None, keep_raw=False, **about
) -> "RunProfiler":
    """A context manager that records `steps` steps into the folder `file_prefix`, on every rank.

    With `model` (wrapped or not) and `optimizer`, the memory timeline knows parameters, gradients and
    state; without them all is activations and temporaries. `about` goes into run.json: variant,
    title, preset, data, seed. `keep_raw` also keeps the profiler's own trace. Nothing is written when
    the loop raises.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: run %dist_init, or torch.distributed.init_process_group"
        )
    return RunProfiler(Path(file_prefix), steps, model, optimizer, about, keep_raw)


class RunProfiler:
    def __init__(self, folder: Path, steps: int, model, optimizer, about: dict, keep_raw: bool):
        self.folder, self.steps, self.about, self.keep_raw = folder, steps, about, keep_raw
        self.model, self.optimizer = model, optimizer
        self.ledger = MemoryLedger(model, optimizer)
        self.losses, self.step_seconds = [], []
        self.cuda = (
            any(p.is_cuda for p in model.parameters()) if model else torch.cuda.is_available()
        )
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.cuda
        # A schedule, for without one the trace has no ProfilerStep; one more step than is run, so
        # that nothing is cut off. No warm-up: the first step, which makes the state, is wanted.
        with warnings.catch_warnings(action="ignore"):
            schedule = torch.profiler.schedule(wait=0, warmup=0, active=steps + 1)
        self.profiler = torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            profile_memory=True,
            # Gloo's events tell their bytes by it; a link's log does without. It splits the heap so that
            # every step takes fresh pages from the system.
            record_shapes=link.current() is None,
        )

    def __enter__(self) -> "RunProfiler":
        if self.model is not None and not self.cuda:  # a step's activations, and as much again
            touch_free_memory(20 * nbytes(self.model.parameters()))
        self.profiler.start()
        link.lane.log = self.passages = []
        phases.listeners.append(self.ledger)
        self.ledger.look()
        self._began = time.perf_counter()
        return self

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """The end of a step. Its loss, if given, is averaged over the ranks in the record."""
        if len(self.step_seconds) == self.steps:
            return
        if loss is not None:
            self.losses.append(float(loss))
        now = time.perf_counter()
        self.step_seconds.append(now - self._began)
        self.ledger.look()
        if len(self.step_seconds) == self.steps:
            self._stop()
        else:
            self.profiler.step()
        self._began = time.perf_counter()

    def _stop(self) -> None:
        if self.ledger in phases.listeners:
            phases.listeners.remove(self.ledger)
            link.lane.log = None
            if hasattr(self.optimizer, "receive"):  # a gather that is freed after the profiler's end
                self.optimizer.receive()  # takes with it, a second time, what the end has freed
            self.profiler.stop()

    def __exit__(self, kind, error, traceback) -> None:
        self._stop()
        if error is None:
            self._write()

    def _write(self) -> None:
        rank, world_size, steps = dist.get_rank(), dist.get_world_size(), len(self.step_seconds)
        trace = read_trace(self.profiler)
        trace["distributedInfo"] = {
            "backend": link.transport(),
            "rank": rank,
            "world_size": world_size,
        }
        events = trace["traceEvents"]
        base = min(
            gather(min(e["ts"] for e in events if e.get("ph") == "X"))
        )  # one clock for all ranks
        memory = account(events, self.ledger.notes, self.cuda)
        memory["time_us"] = (memory["time_us"] - base).round().astype("int64")
        if rank == 0:
            for old in [self.folder / "run.json", *self.folder.glob("*.rank*.gz")]:
                old.unlink(missing_ok=True)
        dist.barrier()
        raw = trace if self.keep_raw else None
        runs.save_rank(
            self.folder, rank, runs.lane_view(self._on_the_link(trace), base), without_blips(memory), raw
        )
        losses = [sum(at_step) / world_size for at_step in zip(*gather(self.losses), strict=True)]
        measured = {
            "format": runs.FORMAT,
            "world_size": world_size,
            "steps": steps,
            "losses": losses,
            "step_seconds": self.step_seconds,
            "memory": gather(peaks(memory)),
            "predicted": gather(self._predicted()),
            "collectives": count_collectives(self._on_the_link(trace)["traceEvents"], steps, world_size),
            "late_share": link.late_share(gather([p.late for p in self.passages])),
        }
        if rank == 0:
            about = self._about_model() | environment(self.cuda) | self.about
            runs.save_summary(self.folder, about | measured)
        dist.barrier()  # from here on any rank may read the run

    def _on_the_link(self, trace: dict) -> dict:
        """The trace with gloo's own times replaced by those of the emulated link, if there is one."""
        if link.current() is None:
            return trace
        events = [e for e in trace["traceEvents"] if not str(e.get("name")).startswith("gloo:")]
        base = trace["baseTimeNanoseconds"]
        return trace | {"traceEvents": events + link.as_events(self.passages, base)}

    def _about_model(self) -> dict:
        """What run.json says when the caller did not."""
        nothing = {"name": "unknown", "source": "unknown"}
        return {
            "variant": self.folder.name, "title": self.folder.name, "preset": "none",
            "seed": torch.initial_seed(),
            "model": describe_model(self.model) if self.model is not None
            else nothing | {"parameters": 0, "tensors": 0, "dtype": "unknown"},
            "data": nothing | {"examples": 0, "batch_size": 0, "tokens_per_batch": 0},
        }  # fmt: skip

    def _predicted(self) -> dict:
        """What this rank should hold, in bytes."""
        if self.model is None or self.optimizer is None:
            return {"params": 0, "grads": 0, "opt_state": 0}
        torchs = by_bytes if hasattr(self.optimizer, "optim") else None  # ZeroRedundancyOptimizer's rule
        partition = getattr(self.optimizer, "partition", torchs)
        rank = predict(self.model, self.optimizer, dist.get_world_size(), partition)[dist.get_rank()]
        return {"params": rank.params, "grads": rank.grads, "opt_state": rank.opt_state}


def describe_model(model) -> dict:
    """{name, parameters, tensors, dtype, source} of a model, wrapped or not."""
    while not hasattr(model, "zero1_info") and hasattr(model, "module"):
        model = model.module
    params = list(model.parameters())
    info = getattr(model, "zero1_info", {"name": type(model).__name__, "source": "unknown"})
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in params})
    counts = {"parameters": sum(p.numel() for p in params), "tensors": len(params)}
    return {"name": info["name"], **counts, "dtype": "+".join(dtypes), "source": info["source"]}


def touch_free_memory(size: int) -> None:
    """Write to `size` bytes and give them back, so that no step waits for pages that were never used.

    A virtual machine gets such pages from its host at a tenth of the speed of others. At most 1 GiB, and
    half of what is free.
    """
    if "SC_AVPHYS_PAGES" in os.sysconf_names:  # not on macOS
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        torch.ones(min(size, 2**30, free // (2 * dist.get_world_size())), dtype=torch.uint8)
    dist.barrier()


def read_trace(profiler: torch.profiler.profile) -> dict:
    """The chrome trace of a stopped profiler, parsed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as f:
            trace = json.load(f)
    name_reduce_scatters(trace["traceEvents"])
    return trace


def gather(value) -> list:
    """The value of every rank, in order of rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def environment(cuda: bool) -> dict:
    """What a number means nothing without: machine, backend, link, versions, date."""
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if cuda else ""
    packages = {
        "torch": "torch",
        "transformers": "transformers",
        "HTA": "traceinsight",
        "nbdistributed": "nbdistributed",
    }
    versions = {name: importlib.metadata.version(package) for name, package in packages.items()}
    return {
        "backend": link.transport(),
        "device": "cuda" if cuda else "cpu",
        "hardware": gpus or f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "link": str(link.current() or "none"),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
    }


def name_reduce_scatters(events: list[dict]) -> None:
    """A reduce-scatter over gloo is an all-to-all (`collectives`), or in classes of others an all-reduce,
    and the trace says so. Give it its name back.

    All-reduces of both kinds run in the order in which they were issued, which tells them apart.
    """
    for e in events:
        if e.get("name") == "gloo:all_to_all":
            e["name"] = "gloo:reduce_scatter"
    issued = [e["name"] for e in sorted((e for e in events if e.get("ph") == "X" and e["name"] in (
        "c10d::allreduce_", "c10d::_reduce_scatter_base_")), key=lambda e: e["ts"])]  # fmt: skip
    ran = sorted((e for e in events if e.get("name") == "gloo:all_reduce" and e.get("ph") == "X"),
                 key=lambda e: e["ts"])  # fmt: skip
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
        {"op": op, "calls": round(calls / steps), "bytes": round(size / steps),
         "bytes_sent": round(bytes_sent(op, size, world_size) / steps)}
        for op, (calls, size) in sorted(totals.items())
    ]  # fmt: skip
