"""A recorded run on disk: written whole, read once, and checked at this door.

A run is a folder::

    run.json             what ran, where, and what was measured (`schema.Record`)
    trace.rank0.json.gz  per rank: a chrome trace that HTA and Perfetto read, by `lanes.lane_view`
    memory.rank0.csv.gz  per rank: time_us, category, delta (bytes); running sums: the timeline
    raw.rank0.json.gz    optional: the profiler's own trace, which is never read here

Nothing in it names a path, a user or a host, the same run gives the same bytes, and a file is
either whole or absent. Every fault of a folder is a `RunError` naming the file and the field.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from zero1_helpers.measure.files import (
    RunError,
    one_printable_line,
    read_file,
    scrub,
    write_atomic,
    write_gz,
)
from zero1_helpers.measure.schema import check_memory, check_record, check_trace

NAMES = ("variant", "title", "preset")  # the user's own words, which stay as they were chosen
TOLERATED_LATE = 0.03  # with more operations later than the emulated link, a run says so


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
    trace_text = json.dumps(scrub(trace))
    check_trace(trace_text.encode(), _file(folder, "trace", rank), rank)
    memory_text = memory.to_csv(index=False, lineterminator="\n")
    check_memory(memory_text.encode(), _file(folder, "memory", rank))
    write_gz(_file(folder, "trace", rank), trace_text)
    write_gz(_file(folder, "memory", rank), memory_text)
    if raw is not None:
        raw = {key: raw[key] for key in raw if key not in ("host_name", "traceName")}
        write_gz(_file(folder, "raw", rank), json.dumps(scrub(raw)))


def save_summary(folder, record: dict):
    """Write run.json. Last of all: a folder without it is not yet a run."""
    path = Path(folder) / "run.json"
    names = {key: one_printable_line(str(record[key])) for key in NAMES if key in record}
    data = json.dumps(scrub(record) | names, indent=1, ensure_ascii=False).encode() + b"\n"
    check_record(data, path)
    write_atomic(path, data)


def _file(folder, kind: str, rank: int) -> Path:
    return Path(folder) / f"{kind}.rank{rank}.{'csv' if kind == 'memory' else 'json'}.gz"


def new_files(folder) -> Path:
    """Where the files of a new run lie until all are there. The old run stays whole until then."""
    return Path(folder) / ".new"


def put_in_place(folder, record: dict) -> None:
    """Write run.json, and replace what an earlier run has left in `folder` by the new files."""
    save_summary(new_files(folder), record)
    folder = Path(folder)
    for old in [folder / "run.json", *folder.glob("*.rank*.gz")]:
        old.unlink(missing_ok=True)
    new = sorted(new_files(folder).iterdir(), key=lambda path: path.name == "run.json")
    for path in new:  # run.json is the last one: a folder without it is not yet a run
        os.replace(path, folder / path.name)
    new_files(folder).rmdir()


# Reading


def find_runs(root) -> list[Path]:
    """Folders under `root` (itself included) that hold a run.json, sorted. Links are not followed."""
    return sorted(path.parent for path in Path(root).rglob("run.json"))


def run_folders(root) -> list[Path]:
    """The same with unfinished runs, which are named when they are read. RunError if there is none."""
    unfinished = {path.parent for path in Path(root).rglob("*.rank*.gz")}
    if not (folders := sorted({*find_runs(root), *unfinished})):
        raise RunError(f"{root}: no recorded run (run.json) in it; make some with `zero1 record`")
    return folders


def run_names(folders: Iterable[Path]) -> dict[Path, str]:
    """{folder: its name, as "small/ddp"}: as many last parts of the path as tell all apart, at least two."""
    parts = {folder: folder.resolve().parts[1:] for folder in map(Path, folders)}
    different, length = len(set(parts.values())), 2
    while len({path[-length:] for path in parts.values()}) < different:
        length += 1
    return {folder: "/".join(path[-length:]) for folder, path in parts.items()}


def load_record(folder) -> dict:
    """run.json alone, checked. RunError if it is missing, damaged or foreign."""
    path = Path(folder) / "run.json"
    return check_record(read_file(path), path)


def load_run(folder) -> Run:
    """Read and check a whole run. RunError if anything in it is missing, damaged or foreign."""
    folder = Path(folder)
    record = load_record(folder)
    traces, memories = {}, {}
    for rank in range(record["world_size"]):
        path = _file(folder, "trace", rank)
        traces[rank] = check_trace(read_file(path), path, rank, record["world_size"])
        path = _file(folder, "memory", rank)
        memories[rank] = check_memory(read_file(path), path)
    return Run(folder, record, traces, memories)
