"""Lines for a terminal, whatever it can show and whoever reads it."""

import contextlib
import os
import sys
import traceback
from pathlib import Path

from zero1_helpers.measure.files import one_printable_line


def tolerate_any_terminal() -> None:
    """Show a replacement for what the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def say(text) -> None:
    """Print. When nobody reads any more (`| head -1`), the work goes on without."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _read_by_nobody(sys.stdout)


def complain(command: str, text) -> None:
    """One line on stderr."""
    with contextlib.suppress(BrokenPipeError):
        print(one_printable_line(f"{command}: {text}"), file=sys.stderr, flush=True)


def flush() -> bool:
    """Write out what is left; whether that went well. Python's own last flush then cannot fail."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError as error:
        _read_by_nobody(sys.stdout)
        return isinstance(error, BrokenPipeError)
    return True


def _read_by_nobody(stream) -> None:
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def one_line(error: BaseException) -> str:
    """An error in one line; with the place where it was raised, unless it says what to do."""
    text = one_printable_line(next(iter(str(error).splitlines()), "")[:500])
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, ValueError | OSError) or not error.__traceback__:
        return line
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{line} ({Path(last.filename).name}, line {last.lineno})"
