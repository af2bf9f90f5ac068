"""Run a command, then say how much memory it and all its children took together at most.

    .venv/bin/python tools/peak_memory.py .venv/bin/python tools/run_notebooks.py --out build/run --only '04*'

Counts proportional set sizes (Linux): memory that several processes share counts once. Looks every 0.2 s.
"""

import sys
import time

import psutil


def memory(parent: psutil.Process) -> list[int]:
    """Bytes of each process now, the largest first."""
    found = []
    for process in [parent, *parent.children(recursive=True)]:
        try:
            found.append(process.memory_full_info().pss)
        except psutil.Error:  # it has ended
            continue
    return sorted(found, reverse=True)


def main() -> int:
    run = psutil.Popen(sys.argv[1:])
    peak, when, began = [], 0.0, time.monotonic()
    while run.poll() is None:
        now = memory(run)
        if sum(now) > sum(peak):
            peak, when = now, time.monotonic() - began
        time.sleep(0.2)
    print(
        f"at most {sum(peak) / 1e9:.2f} GB in {len(peak)} processes, {when:.0f} s after the start: "
        + " + ".join(f"{size / 1e9:.2f}" for size in peak)
    )
    return run.returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (IndexError, FileNotFoundError):
        sys.exit("peak_memory.py: name a command that can be run, and its arguments")
