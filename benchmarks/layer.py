"""How fast the notebook layer is: starting ranks, a cell, ending them.

    python benchmarks/layer.py [--ranks 1 2 4] [--cells 200]

A start is also given as a ratio to one `import torch` on the same machine, because it imports torch once
and forks the ranks. A cell's time is compared with a cell that runs in the kernel alone. Run it while
nothing else is running.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.kernel import Kernel  # noqa: E402


def seconds(call, *args) -> float:
    """How long this call takes."""
    began = time.perf_counter()
    call(*args)
    return time.perf_counter() - began


def import_torch() -> float:
    """Seconds for a Python process that only imports torch, the fastest of three."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import torch"]
    return min(
        seconds(lambda: subprocess.run(command, env=environment, check=True)) for _ in range(3)
    )


def run(kernel: Kernel, code: str) -> None:
    error = kernel.run(code).error
    if error:
        raise SystemExit(f"{code!r} failed: {error}")


def median_cell(kernel: Kernel, code: str, cells: int) -> float:
    """Median milliseconds of a cell."""
    return 1000 * statistics.median(seconds(run, kernel, code) for _ in range(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument(
        "--starts", type=int, default=3, help="the fastest of so many starts is shown"
    )
    args = parser.parse_args()
    torch_alone = import_torch()
    print(f"import torch alone: {torch_alone:.2f} s\n")
    print(
        "| ranks | start, s | start ÷ import torch | cell, ms | cell in the kernel, ms | end, s |"
    )
    print("|---|---|---|---|---|---|")
    for ranks in args.ranks:
        kernel = Kernel()
        try:
            starts, ends = [], []
            for _ in range(args.starts):
                starts.append(seconds(run, kernel, f"%dist_init -n {ranks}"))
                if len(starts) == args.starts:
                    cell = median_cell(kernel, "rank", args.cells)
                    alone = median_cell(kernel, "%%local\n1", args.cells)
                ends.append(seconds(run, kernel, "%dist_shutdown"))
        finally:
            kernel.close()
        print(
            f"| {ranks} | {min(starts):.2f} | {min(starts) / torch_alone:.2f} | {cell:.1f} "
            f"| {alone:.1f} | {min(ends):.2f} |"
        )


if __name__ == "__main__":
    main()
