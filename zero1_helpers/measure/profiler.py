"""Profile some steps on every rank, and write them down as a run (see `runs`).

One step of the window::

    forward ... step    torch.profiler records operations and allocations, the ledger what they hold
    prof.step(loss)     the step's edge; after the last one nothing more is recorded
    leaving `with`      every rank writes its lane view and memory timeline, rank 0 the summary

A recorded run is not lost. If a rank cannot write, all ranks stop together and say why; the run then
lies in a folder for temporary files, or `prof.save(folder)` writes it once more.
"""

import contextlib
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from zero1_helpers import phases
from zero1_helpers.measure import emulate, passage, runs
from zero1_helpers.measure.blocks import account
from zero1_helpers.measure.environment import describe_model, environment
from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.lanes import lane_view
from zero1_helpers.measure.ledger import MemoryLedger
from zero1_helpers.measure.peaks import peaks, without_blips
from zero1_helpers.measure.schema import FORMAT, check_about
from zero1_helpers.measure.terminal import one_line
from zero1_helpers.measure.trace import count_collectives, read_trace
from zero1_helpers.memory_math import nbytes, predict
from zero1_helpers.partition import by_bytes


def get_profiler(
    file_prefix, steps: int = 4, *, model=None, optimizer=None, keep_raw=False, **about
) -> "RunProfiler":
    """A context manager that records `steps` steps into the folder `file_prefix`, on every rank.

    With `model` (wrapped or not) and `optimizer`, the memory timeline knows parameters, gradients and
    state; without them all is activations and temporaries. `about` goes into run.json: variant,
    title, preset, data, seed; a value that no run can hold is refused at once (RunError).
    `keep_raw` also keeps the profiler's own trace. Nothing is written when the loop raises.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: run %dist_init, or torch.distributed.init_process_group"
        )
    check_about(about)
    return RunProfiler(Path(file_prefix), steps, model, optimizer, about, keep_raw)


class RunProfiler:
    def __init__(self, folder: Path, steps: int, model, optimizer, about: dict, keep_raw: bool):
        self.folder, self.steps, self.about, self.keep_raw = folder, steps, about, keep_raw
        self.model, self.optimizer = model, optimizer
        self.ledger = MemoryLedger(model, optimizer)
        self.losses, self.step_seconds = [], []
        self.trace = None  # what `save` reads once, when all is over
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
            record_shapes=emulate.current() is None,
        )

    def __enter__(self) -> "RunProfiler":
        if self.model is not None and not self.cuda:  # a step's activations, and as much again
            touch_free_memory(20 * nbytes(self.model.parameters()))
        self.profiler.start()
        passage.lane.log = self.passages = []
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
            passage.lane.log = None
            if hasattr(
                self.optimizer, "receive"
            ):  # a gather that is freed after the profiler's end
                self.optimizer.receive()  # takes with it, a second time, what the end has freed
            self.profiler.stop()

    def __exit__(self, kind, error, traceback) -> None:
        self._stop()
        if error is not None:
            return
        try:
            self.save(self.folder)
        except CannotWrite as error:
            self._save_elsewhere(error)

    def save(self, folder) -> None:
        """Write the run into `folder`. Called on every rank, when the last step is over.

        If any rank fails, all raise the same RunError, so that none waits for another one.
        """
        folder = Path(folder)
        together(lambda: self._read(folder))
        base = min(gather(self.began_us))  # one clock for all ranks
        together(lambda: self._save_rank(folder, base))
        record = self._record()
        together(lambda: dist.get_rank() == 0 and runs.put_in_place(folder, record))

    def _save_elsewhere(self, error: "CannotWrite") -> None:
        """The folder took no file: a full disk, for example. Try the one for temporary files."""
        spare = [None]
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                spare = [tempfile.mkdtemp(prefix="zero1-run-")]
        dist.broadcast_object_list(spare, src=0)
        try:
            self.save(spare[0] or self.folder)
        except CannotWrite:
            raise CannotWrite(f"{error}; `save(folder)` of the profiler tries again") from None
        raise CannotWrite(f"{error}; the run is in {spare[0]} instead")

    def _read(self, folder: Path) -> None:
        """Read this rank's part of the run out of the profiler and the ledger."""
        if dist.get_rank() == 0:
            shutil.rmtree(
                runs.new_files(folder), ignore_errors=True
            )  # of a recording that was ended
        if self.trace is not None:
            return
        trace = read_trace(self.profiler, folder)
        rank, world_size, steps = dist.get_rank(), dist.get_world_size(), len(self.step_seconds)
        about = {"backend": emulate.transport(), "rank": rank, "world_size": world_size}
        trace["distributedInfo"] = about
        events = self._on_the_link(trace)["traceEvents"]
        self.memory = account(trace["traceEvents"], self.ledger.notes, self.cuda)
        self.began_us = min(e["ts"] for e in trace["traceEvents"] if e.get("ph") == "X")
        self.mine = {
            "losses": self.losses,
            "memory": peaks(self.memory),
            "predicted": self._predicted(),
            "late": [p.late for p in self.passages],
        }
        self.collectives = count_collectives(events, steps, world_size)
        self.trace = trace

    def _save_rank(self, folder: Path, base: float) -> None:
        memory = self.memory.copy()
        memory["time_us"] = (memory["time_us"] - base).round().astype("int64")
        view = lane_view(self._on_the_link(self.trace), base)
        raw = self.trace if self.keep_raw else None
        runs.save_rank(runs.new_files(folder), dist.get_rank(), view, without_blips(memory), raw)

    def _record(self) -> dict:
        """run.json, the same on every rank but for the seconds."""
        parts = gather(self.mine)
        losses = zip(*(part["losses"] for part in parts), strict=True)
        return (
            self._about_model()
            | environment(self.cuda)
            | self.about
            | {
                "format": FORMAT,
                "world_size": len(parts),
                "steps": len(self.step_seconds),
                "losses": [sum(at_step) / len(parts) for at_step in losses],
                "step_seconds": self.step_seconds,
                "memory": [part["memory"] for part in parts],
                "predicted": [part["predicted"] for part in parts],
                "collectives": self.collectives,
                "late_share": passage.late_share([part["late"] for part in parts]),
            }
        )

    def _on_the_link(self, trace: dict) -> dict:
        """The trace with gloo's own times replaced by those of the emulated link, if there is one."""
        if emulate.current() is None:
            return trace
        events = [e for e in trace["traceEvents"] if not str(e.get("name")).startswith("gloo:")]
        base = trace["baseTimeNanoseconds"]
        return trace | {"traceEvents": events + passage.as_events(self.passages, base)}

    def _about_model(self) -> dict:
        """What run.json says when the caller did not."""
        nothing = {"name": "unknown", "source": "unknown"}
        name = self.folder.resolve().name[:100] or "run"
        return {
            "variant": name,
            "title": name,
            "preset": "none",
            "seed": torch.initial_seed(),
            "model": describe_model(self.model)
            if self.model is not None
            else nothing | {"parameters": 0, "tensors": 0, "dtype": "unknown"},
            "data": nothing | {"examples": 0, "batch_size": 0, "tokens_per_batch": 0},
        }

    def _predicted(self) -> dict:
        """What this rank should hold, in bytes."""
        if self.model is None or self.optimizer is None:
            return {"params": 0, "grads": 0, "opt_state": 0}
        torchs = (
            by_bytes if hasattr(self.optimizer, "optim") else None
        )  # ZeroRedundancyOptimizer's rule
        partition = getattr(self.optimizer, "partition", torchs)
        rank = predict(self.model, self.optimizer, dist.get_world_size(), partition)[
            dist.get_rank()
        ]
        return {"params": rank.params, "grads": rank.grads, "opt_state": rank.opt_state}


def touch_free_memory(size: int) -> None:
    """Write to `size` bytes and give them back, so that no step waits for pages that were never used.

    A virtual machine gets such pages from its host at a tenth of the speed of others. At most 1 GiB, and
    half of what is free.
    """
    if "SC_AVPHYS_PAGES" in os.sysconf_names:  # not on macOS
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        torch.ones(min(size, 2**30, free // (2 * dist.get_world_size())), dtype=torch.uint8)
    dist.barrier()


class CannotWrite(RunError):
    """The system refused to write a file of the run, on some rank."""


def together(work) -> None:
    """`work()` on every rank. If it raises anywhere, every rank raises: none waits in a collective."""
    error = None
    try:
        work()
    except Exception as raised:  # whatever it is, the others must hear of it
        error = (one_line(raised), isinstance(raised, OSError))
    failed = [(rank, said) for rank, said in enumerate(gather(error)) if said]
    if failed:
        rank, (said, by_the_system) = failed[0]
        raise (CannotWrite if by_the_system else RunError)(f"rank {rank}: {said}")


def gather(value) -> list:
    """The value of every rank, in order of rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
