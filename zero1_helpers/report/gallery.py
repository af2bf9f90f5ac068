"""Every figure of a set of runs, in a folder: drawn by several processes, and listed in figures.json.

`draw_all` is `zero1 figures`. The same runs give the same bytes, whatever the number of processes.
"""

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from zero1_helpers.measure.runs import Run, RunError, find_runs, load_run, write_atomic
from zero1_helpers.report import figures, frames, pages
from zero1_helpers.report.figures import COLOURS, STACK, THEMES

PER_RUN = {
    "memory": figures.memory_timeline, "temporal": figures.temporal_breakdown, "overlap": figures.overlap,
    "kernels": figures.kernel_breakdown,
    "schedule": lambda run, theme: figures.schedule_diagram(run, 0, min(2, run.record["steps"] - 1), theme),
}  # fmt: skip
PER_PRESET = {"bytes_per_rank": figures.bytes_per_rank, "comparison": figures.comparison}
FORMATS = ("svg", "png", "html")


@dataclass(frozen=True)
class Order:
    """What is to be drawn, and where to."""

    out: Path
    themes: tuple = tuple(THEMES)
    formats: tuple = FORMATS
    only: str = "*"

    def wants(self, name: str, kind: str) -> bool:
        """Whether `only` (globs and commas) has the figure's path, or its kind, its preset or its run."""
        names = (f"{name}/{kind}", kind, name, name.split("/")[0])
        return any(fnmatch(text, glob) for text in names for glob in self.only.split(","))

    def needs(self, name: str) -> bool:
        """Whether a run is in any figure that is wanted."""
        groups = ((name, PER_RUN), (name.split("/")[0], (*PER_PRESET, "timelines")))
        return any(self.wants(group, kind) for group, kinds in groups for kind in kinds)

    def save(self, name: str, kind: str, draw: Callable, runs: list[Run]) -> list[dict]:
        """Draw in each theme and save; the entries for figures.json."""
        formats = [form for form in self.formats if form != "html"]
        if not formats or not self.wants(name, kind):
            return []
        drawn = [(theme, draw(theme=theme)) for theme in self.themes]
        return [_entry(path.relative_to(self.out), fig.title, fig.caption, fig.alt_text, name, runs, theme)
                for theme, fig in drawn
                for path in figures.save(fig, self.out / name / f"{kind}.{theme}", formats)]  # fmt: skip


def draw_all(root, out, theme: str = "both", formats=FORMATS, only: str = "*", against=None,
             jobs: int = 1, progress=print) -> int:  # fmt: skip
    """Draw every figure of every run into the folder `out`, and list them in figures.json.

    `root` is a folder with runs below it, or a list of runs' folders; `against` another such folder,
    to be compared with. A damaged or unfinished run is named and left out. Returns how many were: 0
    means that all went well.
    """
    if theme not in (*THEMES, "both"):
        raise ValueError(f"theme must be one of {', '.join(THEMES)}, both, not {theme!r}")
    if strange := set(formats) - set(FORMATS):
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {', '.join(strange)}")
    order = Order(Path(out), tuple(THEMES) if theme == "both" else (theme,), tuple(formats), only)
    others = _folders(against) if against else []
    folders = [folder for folder in _folders(root) if against or order.needs(_name(folder))]
    if not folders:
        raise ValueError(f"no figure is called {only!r}")
    count = len(folders)
    try:
        write_atomic(order.out / ".writable", b"")
        (order.out / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error.strerror})") from None
    damaged, manifest, groups = 0, [], ({}, {})
    for number, (folder, result) in enumerate(_each([*folders, *others], order, count, jobs)):
        name = _name(folder)
        progress(f"[{number + 1}/{count + len(others)}] {name}")
        if isinstance(result, str):
            damaged += 1
            progress(f"skipped: {result}")
            continue
        entries, run = result
        manifest += entries
        groups[number >= count].setdefault(name.split("/")[0], []).append(run)
    for preset, runs in groups[0].items():
        manifest += _draw_preset(order, preset, runs)
    names = [Path(folder).resolve().name for folder in (root, against) if against]
    if len(set(names)) == 1:
        names = [_name(Path(folder)) for folder in (root, against)]
    for mine, theirs in _pairs(*groups):
        sets = groups[0][mine], groups[1][theirs]
        try:
            manifest += order.save(mine, f"against_{theirs}", partial(figures.before_and_after, *sets, names),
                                   sum(sets, []))  # fmt: skip
        except RunError as error:  # no variant in common
            damaged += len(sets[1])
            progress(f"skipped: {error}")
    if not manifest and not damaged:
        raise ValueError(f"no figure is called {only!r}")
    _write_manifest(order.out, manifest)
    return damaged


def _draw_preset(order: Order, preset: str, runs: list[Run]) -> list[dict]:
    """Draw what has all runs of a preset in it; the entries for figures.json."""
    entries = [entry for kind, function in PER_PRESET.items()
               for entry in order.save(preset, kind, partial(function, runs), runs)]  # fmt: skip
    if "html" in order.formats and order.wants(preset, "timelines"):
        page = pages.timelines_html(runs, {name: COLOURS[name] for name in STACK})
        path = Path(preset, "timelines.html")
        write_atomic(order.out / path, page.encode())
        entries.append(_entry(path, f"Memory timelines: {preset}", runs[0].setting,
                              "Interactive memory timelines of all variants and ranks.",
                              preset, runs, "both"))  # fmt: skip
    return entries


def _folders(root) -> list[Path]:
    """Folders of runs, unfinished ones too: these are named when they are read."""
    if not isinstance(root, str | Path):
        return [Path(folder) for folder in root]
    unfinished = {path.parent for path in Path(root).rglob("*.rank*.gz")}
    if not (folders := sorted({*find_runs(root), *unfinished})):
        raise RunError(f"{root}: no recorded run (run.json) in it; make some with `zero1 record`")
    return folders


def _name(folder: Path) -> str:
    return "/".join(folder.resolve().parts[-2:])


def _each(folders, order: Order, count: int, jobs: int):
    """(folder, what `_draw_run` says of it), in order, from `jobs` processes; the first `count` are drawn."""
    tasks = [(folder, order if i < count else None) for i, folder in enumerate(folders)]
    if min(jobs, len(tasks)) < 2:
        yield from ((folder, _draw_run(folder, order)) for folder, order in tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [(task[0], pool.submit(_draw_run, *task)) for task in tasks]
        yield from ((folder, future.result()) for folder, future in futures)


def _draw_run(folder: Path, order: Order | None):
    """Draw one run. (entries, the run as small as the figures of several runs need it), or what is wrong."""
    entries, name = [], _name(folder)
    try:
        run = load_run(folder)
        for frame in (frames.temporal_breakdown, frames.comm_comp_overlap, frames.fullest,
                      frames.timelines):  # fmt: skip
            frame(run)  # before anything is written: a run that cannot be analysed leaves no file
        for kind, function in PER_RUN.items() if order else ():
            entries += order.save(name, kind, partial(function, run), [run])
    except ValueError as error:
        return str(error)
    run.frames.pop("hta", None)
    return entries, replace(run, traces={}, memories={})


def _pairs(mine: dict, theirs: dict) -> list[tuple[str, str]]:
    """Which presets of two sets to compare: those of one name, or else all with all."""
    same = [(name, name) for name in mine if name in theirs]
    return same or [(a, b) for a in mine for b in theirs]


def _entry(path: Path, title, caption, alt, name, runs: list[Run], theme) -> dict:
    about = {}
    for key in ("hardware", "backend", "world_size", "link", "date"):
        values = list(dict.fromkeys(run.record[key] for run in runs))
        about[key] = values[0] if len(values) == 1 else " / ".join(map(str, values))
    return {"file": path.as_posix(), "title": title, "caption": caption, "alt": alt, "run": name,
            "theme": theme, **about}  # fmt: skip


def _write_manifest(out: Path, entries: list[dict]):
    """figures.json: these entries, and earlier ones whose files are still there."""
    path = out / "figures.json"
    known = {entry["file"]: entry for entry in json.loads(path.read_text())} if path.exists() else {}
    known = {file: entry for file, entry in known.items() if (out / file).exists()}
    known |= {entry["file"]: entry for entry in entries}
    entries = [known[file] for file in sorted(known)]
    write_atomic(path, json.dumps(entries, indent=1, ensure_ascii=False).encode() + b"\n")
