"""Execute the notebooks in order, with progress, and stop at the first cell that fails.

    python tools/run_notebooks.py --out build/run   copies; the committed notebooks stay as they are
    python tools/run_notebooks.py --in-place        from notebooks/percent/*.py, with fresh outputs

A notebook is written only after all of its cells have succeeded. Cells run in notebooks/. With
--in-place, notebooks/times.json notes how long each took, on how many cores and when, and the line
**Time.** at the top of notebook and twin says the same.
"""

import argparse
import atexit
import datetime
import json
import os
import re
import shutil
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, not the home folder's

if os.path.expanduser("~") == "~":  # no HOME, and a user whom the system does not know
    os.environ["HOME"] = tempfile.mkdtemp(prefix="home-")  # Jupyter does not start without one
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
RANKS = re.compile(r"(%dist_init --num-processes )\d+")
TIME = re.compile(r"(?<=\*\*Time\.\*\* ).*")
WORDS_A_MINUTE = 150  # prose and code, for readers in a second language
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class NotebookFailed(RuntimeError):
    """A cell failed, or an output must not be kept; the message names notebook and cell."""


def texts(output):
    """The readable parts of one output: a stream, an error, or its text/* and SVG data."""
    data = output.get("data", {})
    yield from (output.get("text", ""), *output.get("traceback", []))
    yield from (data[mime] for mime in data if mime.startswith("text/") or "svg" in mime)


def normalise(nb):
    """Leave nothing in the notebook that changes from one machine or run to the next."""
    nb.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    nb.nbformat, nb.nbformat_minor = 4, 5
    for index, cell in enumerate(nb.cells):
        cell.id = f"cell-{index:02d}"
        cell.metadata.pop("execution", None)
        outputs = []
        for output in cell.get("outputs", []):
            if outputs and "name" in output and output.get("name") == outputs[-1].get("name"):
                outputs[-1].text += output.text  # one stream, however many messages it came in
            else:
                outputs.append(output)
        if cell.cell_type == "code":
            cell.outputs = outputs


def check_paths(nb, name):
    """Raise when an output shows this checkout's folder or the home folder."""
    home = os.path.expanduser("~")  # stays "~" for a user without a home folder
    folders = [str(ROOT), *([home] if len(home) > 1 else [])]
    pattern = re.compile("|".join(rf"{re.escape(folder)}(?![\w-])" for folder in folders))
    for index, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            if match := next(filter(None, map(pattern.search, texts(output))), None):
                raise NotebookFailed(
                    f"{name}, cell {index}: an output shows the path {match[0]}; "
                    "print a path relative to the project instead"
                )


def execute(nb, name, folder=NOTEBOOKS, ranks=None, timeout=600, progress=lambda cell, cells: None):
    """Run every cell of `nb` with `folder` as working folder, outputs into `nb`; the kernel ends.

    `ranks` replaces the number on the `%dist_init` line; `timeout` is seconds per cell. A cell that
    hangs on the ranks is stopped a little earlier, by the layer, which shows the ranks' stacks.
    """
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs, cell.execution_count = [], None
        if ranks is not None:
            cell.source = RANKS.sub(rf"\g<1>{ranks}", cell.source)
    current = 0

    def start(cell, cell_index):
        nonlocal current
        current = cell_index
        progress(cell_index + 1, len(nb.cells))

    client = NotebookClient(
        nb,
        kernel_name=KERNEL["name"],
        timeout=timeout,
        record_timing=False,
        store_widget_state=False,
        on_cell_start=start,
        extra_arguments=[
            "--log-level=CRITICAL",  # its own log, not cells
            f"--ClusterMagics.timeout={0.95 * timeout:g}",
        ],
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        client.execute()  # ends the kernel on every way out, Ctrl-C included
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        text = ANSI.sub("", str(error))
        raise NotebookFailed(f"{name}, cell {current}: {type(error).__name__}\n{text}") from None
    except AssertionError:  # on Ctrl-C nbclient ends the kernel, then misses it
        raise KeyboardInterrupt from None
    normalise(nb)
    check_paths(nb, name)


def time_line(nb, seconds, cores, date):
    """What the line **Time.** says of a notebook that took `seconds` on `cores` cores."""
    words = sum(len(cell.source.split()) for cell in nb.cells)
    read, run = max(5, 5 * round(words / WORDS_A_MINUTE / 5)), 5 * -(-seconds // 5)
    return f"About {read} minutes to read, about {run} seconds to run on {cores} cores."


def say_time(nb, name, seconds):
    """Put the time that `nb` took into its first cell, its twin and times.json."""
    path, twin = NOTEBOOKS / "times.json", NOTEBOOKS / "percent" / f"{name}.py"
    times = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    date = datetime.date.today().isoformat()
    times[name] = {"seconds": round(seconds), "cores": os.cpu_count(), "date": date}
    line = time_line(nb, **times[name])
    nb.cells[0].source = TIME.sub(line, nb.cells[0].source)
    write(twin, TIME.sub(line, twin.read_text(encoding="utf-8"), count=1))
    write(path, json.dumps(dict(sorted(times.items())), indent=1) + "\n")


def write(path, text):
    """Write `text` so that `path` is the old file or the whole new one, never half of it."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def save(nb, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, nbformat.writes(nb) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder for the executed copies")
    where.add_argument("--in-place", action="store_true", help="refresh the committed notebooks")
    parser.add_argument("--only", default="*", metavar="GLOB", help="names to run, e.g. '04*'")
    parser.add_argument("--ranks", type=int, help="instead of the notebooks' own number")
    parser.add_argument("--timeout", type=int, default=600, help="seconds per cell")
    args = parser.parse_args(argv)
    if not __debug__ or os.environ.get("PYTHONOPTIMIZE"):
        parser.error(
            "assertions are switched off (python -O or PYTHONOPTIMIZE), so the notebooks would "
            "check nothing; unset PYTHONOPTIMIZE"
        )
    if args.in_place and args.ranks:
        parser.error("--ranks changes the cells, so it goes with --out only")

    found = {path.stem: path for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")}
    twins = {path.stem: path for path in NOTEBOOKS.glob("percent/[0-9][0-9]_*.py")}
    sources = found | twins if args.in_place else twins | found
    names = [name for name in sorted(sources) if fnmatch(name, args.only)]
    if not names:
        parser.error(f"no notebook is called {args.only}")
    begin = time.monotonic()
    tty = sys.stdout.isatty()
    for number, name in enumerate(names, 1):

        def progress(cell, cells, number=number, name=name):
            minutes, seconds = divmod(int(time.monotonic() - begin), 60)
            line = f"[{number}/{len(names)}] {name:<27}cell {cell:>2}/{cells}"
            line += f"  {minutes}:{seconds:02d}"
            print(line, end="\r" if tty and cell < cells else "\n", flush=True)

        nb, start = jupytext.read(sources[name]), time.monotonic()
        try:
            execute(nb, name, ranks=args.ranks, timeout=args.timeout, progress=progress)
        except NotebookFailed as error:
            sys.exit(f"\n{error}\nStopped here; {name}.ipynb was not written.")
        except KeyboardInterrupt:
            sys.exit(f"\nInterrupted; {name}.ipynb was not written.")
        if args.in_place:
            say_time(nb, name, time.monotonic() - start)
        save(nb, (NOTEBOOKS if args.in_place else args.out) / f"{name}.ipynb")


if __name__ == "__main__":
    main()
