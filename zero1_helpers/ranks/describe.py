"""What happens in a rank, as text: its stack while a cell runs, and its exceptions."""

import json
import linecache
import os
import re
import sysconfig
import traceback

import torch
import torch.distributed as dist

OWN = os.path.dirname(__file__)
LIBRARIES = ("<frozen", *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
CELL = "<cell "  # how the file names of cells begin
LONGEST = 20_000  # characters of a message or traceback


def remember(code: str, cell: int) -> str:
    """Give a cell's source to linecache, for tracebacks and inspect. Returns its file name."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", code)  # not splitlines, which knows ten more line ends
    name, again = f"{CELL}{cell}>", 1
    while name in linecache.cache and linecache.cache[name][2] != lines:
        again += 1
        name = f"{CELL}{cell}, run {again}>"
    linecache.cache[name] = (len(code), None, lines, name)  # None, no time of change: it is kept
    return name


def place(filename: str, line: int) -> str:
    """ "cell 4, line 2", or "module.py, line 2" without the folder."""
    name = filename.strip("<>") if filename.startswith(CELL) else os.path.basename(filename)
    return f"{name}, line {line}"


def describe_stack(frame) -> tuple[str, str]:
    """What a thread is doing: "waiting in all_reduce (cell 4, line 2)", and its own lines.

    frame: its innermost. Frames of libraries are left out, and those outside the cell.
    """
    steps = []  # (frame, file, line), innermost first
    while frame and not frame.f_code.co_filename.startswith(OWN):
        steps.append((frame, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    own = [step for step in steps if not step[1].startswith(LIBRARIES)]
    lines = [
        f"{place(file, line)}: {linecache.getline(file, line).strip()}" for _, file, line in own
    ]
    doing = steps[0][0].f_code.co_name.replace("<module>", "its cell") if steps else "the worker"
    if collective := waits_in(steps):
        doing = collective
    cell = next((f" ({place(file, line)})" for _, file, line in own if file.startswith(CELL)), "")
    return f"{'waiting ' if collective else ''}in {doing}{cell}", "\n".join(reversed(lines))


def waits_in(steps) -> str | None:
    """The collective that a stack waits in; None: in none."""
    if calls := [frame for frame, file, _ in steps if file == dist.distributed_c10d.__file__]:
        return calls[-1].f_code.co_name
    if not steps or ".wait(" not in linecache.getline(*steps[0][1:]):
        return None
    try:  # an asynchronous one: torch keeps a record of those that have not finished
        record = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, True))
        running = [entry for entry in record["entries"] if not entry["retired"]]
        return running[0]["profiling_name"].rpartition(":")[2]
    except Exception:  # a private interface, which other versions of torch may lack; or none runs
        return None


def describe(error: BaseException) -> dict[str, str]:
    """An exception as text: name, message, place and source line in the cell, traceback."""
    found = {
        "name": type(error).__name__,
        "message": "",
        "place": "",
        "source": "",
        "traceback": "",
    }
    try:
        found["message"] = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    except Exception:
        found["message"] = "its message cannot be shown, because its __str__ fails"
    try:
        found |= locate(error)
    except Exception as other:  # an exception may carry anything, a SyntaxError odd lines
        found["traceback"] = f"Its traceback cannot be shown ({type(other).__name__})."
    return {key: shortened(text) for key, text in found.items()}


def locate(error: BaseException) -> dict[str, str]:
    report = traceback.TracebackException.from_exception(error)
    report.stack[:] = [step for step in report.stack if not step.filename.startswith(OWN)]
    where, source = "", ""
    if cells := [step for step in report.stack if step.filename.startswith(CELL)]:
        where, source = place(cells[0].filename, cells[0].lineno), cells[0].line
    elif isinstance(error, SyntaxError) and (error.filename or "").startswith(CELL):
        where, source = place(error.filename, error.lineno), (error.text or "").strip()
        report.stack.clear()  # the parser's
    return {"place": where, "source": source, "traceback": "".join(report.format())}


def shortened(text: str) -> str:
    """A text of any length with its middle left out if it is very long."""
    text = str(text)
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n... {len(text) - LONGEST:,} characters cut ...\n{text[-half:]}"
