"""Every figure of a set of runs, in a folder: drawn by several processes, and listed in figures.json.

`draw_all` is `zero1 figures`. The same runs give the same bytes, whatever the number of processes.
"""

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from zero1_helpers.measure.files import RunError, read_file, write_atomic
from zero1_helpers.measure.runs import Run, load_run, run_folders, run_names
from zero1_helpers.measure.terminal import one_line
from zero1_helpers.report import comparisons, figures, frames, memory, pages, style
from zero1_helpers.report.style import COLOURS, STACK, THEMES

PER_RUN = {
    "memory": figures.memory_timeline,
    "temporal": figures.temporal_breakdown,
    "overlap": figures.overlap,
    "kernels": figures.kernel_breakdown,
    "schedule": lambda run, theme: figures.schedule_diagram(
        run, 0, min(2, run.record["steps"] - 1), theme
    ),
}
PER_PRESET = {"bytes_per_rank": comparisons.bytes_per_rank, "comparison": comparisons.comparison}
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
        names = (f"{name}/{kind}", kind, name, preset_of(name))
        return any(fnmatch(text, glob) for text in names for glob in self.only.split(","))

    def needs(self, name: str) -> bool:
        """Whether a run is in any figure that is wanted."""
        groups = ((name, PER_RUN), (preset_of(name), (*PER_PRESET, "timelines")))
        return any(self.wants(group, kind) for group, kinds in groups for kind in kinds)

    def save(self, name: str, kind: str, draw: Callable, runs: list[Run]) -> list[dict]:
        """Draw in each theme and save; the entries for figures.json."""
        formats = [form for form in self.formats if form != "html"]
        if not formats or not self.wants(name, kind):
            return []
        drawn = [(theme, draw(theme=theme)) for theme in self.themes]
        return [
            _entry(
                path.relative_to(self.out), fig.title, fig.caption, fig.alt_text, name, runs, theme
            )
            for theme, fig in drawn
            for path in style.save(fig, self.out / name / f"{kind}.{theme}", formats)
        ]


def draw_all(
    root,
    out,
    theme: str = "both",
    formats=FORMATS,
    only: str = "*",
    against=None,
    jobs: int = 1,
    progress=print,
) -> int:
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
    names, their_names = run_names(_folders(root)), run_names(others)
    folders = [folder for folder, name in names.items() if against or order.needs(name)]
    if not folders:
        raise ValueError(f"no figure is called {only!r}")
    known = _read_manifest(order.out)
    try:
        write_atomic(order.out / ".writable", b"")
        (order.out / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error.strerror})") from None
    damaged, manifest, groups, count = 0, [], ({}, {}), len(folders)
    tasks = [(folder, names[folder], order) for folder in folders]
    tasks += [(folder, name, None) for folder, name in their_names.items()]
    for number, (name, result) in enumerate(_each(tasks, jobs)):
        progress(f"[{number + 1}/{len(tasks)}] {name}")
        if isinstance(result, str):
            damaged += 1
            progress(f"skipped: {result}")
            continue
        entries, run = result
        manifest += entries
        groups[number >= count].setdefault(preset_of(name), []).append(run)
    for preset, runs in groups[0].items():
        with _skipping(progress) as skipped:
            manifest += _draw_preset(order, preset, runs)
        damaged += len(skipped)
    if against:
        entries, undone = _compare(order, groups, (root, against), progress)
        manifest, damaged = manifest + entries, damaged + undone
    if not manifest and not damaged:
        raise ValueError(f"no figure is called {only!r}")
    _write_manifest(order.out, known, manifest)
    return damaged


def _compare(order: Order, groups, roots, progress) -> tuple[list[dict], int]:
    """Draw two sets of runs, preset by preset. (entries, how many runs could not be compared)."""
    titles = [Path(folder).resolve().name for folder in roots]
    if len(set(titles)) == 1:
        titles = ["/".join(Path(folder).resolve().parts[-2:]) for folder in roots]
    entries, undone = [], 0
    for mine, theirs in _pairs(*groups):
        sets = groups[0][mine], groups[1][theirs]
        with _skipping(progress) as skipped:  # no variant in common, for instance
            draw = partial(comparisons.before_and_after, *sets, titles)
            kind = f"against_{theirs}".replace("/", "_")
            entries += order.save(mine, kind, draw, sum(sets, []))
        undone += len(sets[1]) * len(skipped)
    return entries, undone


def preset_of(name: str) -> str:
    """The folder in which a run's folder lies: "small" of "small/ddp"."""
    return name.rpartition("/")[0]


@contextmanager
def _skipping(progress):
    """What cannot be drawn is said in a line, and the rest goes on. Yields the list of such lines."""
    skipped = []
    try:
        yield skipped
    except OSError:
        raise  # the folder cannot be written: that ends all
    except Exception as error:
        skipped.append(_reason(error))
        progress(f"skipped: {skipped[0]}")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RunError) else f"cannot be drawn: {one_line(error)}"


def _draw_preset(order: Order, preset: str, runs: list[Run]) -> list[dict]:
    """Draw what has all runs of a preset in it; the entries for figures.json."""
    entries = [
        entry
        for kind, function in PER_PRESET.items()
        for entry in order.save(preset, kind, partial(function, runs), runs)
    ]
    if "html" in order.formats and order.wants(preset, "timelines"):
        page = pages.timelines_html(runs, {name: COLOURS[name] for name in STACK})
        path = Path(preset, "timelines.html")
        write_atomic(order.out / path, page.encode())
        entries.append(
            _entry(
                path,
                f"Memory timelines: {preset}",
                runs[0].setting,
                "Interactive memory timelines of all variants and ranks.",
                preset,
                runs,
                "both",
            )
        )
    return entries


def _folders(root) -> list[Path]:
    """Folders of runs, unfinished ones too: these are named when they are read."""
    if not isinstance(root, str | Path):
        return [Path(folder) for folder in root]
    return run_folders(root)


def _each(tasks, jobs: int):
    """(name, what `_draw_run` says of it), in order, from `jobs` processes."""
    if min(jobs, len(tasks)) < 2:
        yield from ((task[1], _draw_run(*task)) for task in tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [(task[1], pool.submit(_draw_run, *task)) for task in tasks]
        yield from ((name, future.result()) for name, future in futures)


def _draw_run(folder: Path, name: str, order: Order | None):
    """Draw one run. (entries, the run as small as the figures of several runs need it), or what is wrong."""
    entries = []
    try:
        run = load_run(folder)
        for frame in (
            frames.temporal_breakdown,
            frames.comm_comp_overlap,
            memory.fullest,
            memory.timelines,
        ):
            frame(run)  # before anything is written: a run that cannot be analysed leaves no file
        for kind, function in PER_RUN.items() if order else ():
            entries += order.save(name, kind, partial(function, run), [run])
    except OSError:
        raise
    except Exception as error:  # whatever is wrong with this run, the others are drawn
        return _reason(error) if isinstance(error, RunError) else f"{folder}: {_reason(error)}"
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
    return {
        "file": path.as_posix(),
        "title": title,
        "caption": caption,
        "alt": alt,
        "run": name,
        "theme": theme,
        **about,
    }


def _read_manifest(out: Path) -> dict:
    """{file: entry} of an earlier figures.json. ValueError if something else has that name."""
    path = out / "figures.json"
    if not path.exists():
        return {}
    try:
        return {str(entry["file"]): dict(entry) for entry in json.loads(read_file(path))}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path}: not a list of figures; name another folder for them") from None


def _write_manifest(out: Path, known: dict, entries: list[dict]):
    """figures.json: these entries, and earlier ones whose files are still there."""
    known = {file: entry for file, entry in known.items() if (out / file).exists()}
    known |= {entry["file"]: entry for entry in entries}
    entries = [known[file] for file in sorted(known)]
    data = json.dumps(entries, indent=1, ensure_ascii=False).encode(errors="replace")
    write_atomic(out / "figures.json", data + b"\n")
