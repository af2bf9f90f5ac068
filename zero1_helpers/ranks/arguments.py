"""Where a cell runs, and the arguments of the magics, each mistake in one clear line."""

import re

from zero1_helpers.ranks.output import count, span

# Lines that the kernel runs, also at the top of a cell for the ranks.
KERNELS = re.compile(r"%(dist_\w+|sync|load_ext|reload_ext|config)\b")
MEASURES = re.compile(r"%(time|timeit|prun)\b")  # line magics with Python code in them


class ClusterError(RuntimeError):
    """What went wrong on the ranks or in their use. Jupyter shows it without the kernel's frames."""

    def _render_traceback_(self) -> list[str]:
        return f"{type(self).__name__}: {self}".splitlines()


def parse_ranks(text: str, world_size: int) -> list[int]:
    """Ranks of `%%rank [0,2]` or `%%rank [0-2]`."""
    ranks: set[int] = set()
    for part in text.strip().removeprefix("[").removesuffix("]").split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:[-–]\s*(\d+)\s*)?", part)
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise ClusterError(f"%%rank {text}: write the ranks as %%rank [0,2] or %%rank [0-2].")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if unknown := [rank for rank in ranks if rank >= world_size]:
        raise ClusterError(
            f"%%rank {text}: there is no {span(unknown)}; "
            f"{count(world_size)} running, numbered from 0."
        )
    return sorted(ranks)


def split_timeout(line: str) -> tuple[str, float | None]:
    """The arguments of a cell magic: those before `--timeout 60`, and the seconds or None."""
    rest, given, seconds = line.partition("--timeout")
    return rest.strip(), parse_seconds(seconds.strip(" =")) if given else None


def parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ClusterError(f"--timeout {text}: write seconds, such as 60; 0 means any time.")
    return seconds


def parse_gpu_ids(text: str | None, ranks: int) -> list[int] | None:
    """GPUs of `-g 0,1`."""
    if text is None:
        return None
    try:
        ids = [int(part) for part in text.strip("\"'[]").split(",")]
    except ValueError:
        raise ClusterError(f"--gpu-ids {text}: write GPU ids as 0,1,3.") from None
    if len(set(ids)) < ranks or len(set(ids)) < len(ids):
        raise ClusterError(
            f"--gpu-ids {text}: {count(ranks)} need {ranks} different GPUs, "
            "because NCCL takes one rank per GPU."
        )
    return ids[:ranks]


def choose_gpus(available: int, ranks: int, wanted: list[int] | None):
    """Each rank's GPU (None: all on the CPU), and the reason. available: GPUs that torch sees."""
    if wanted:
        if unknown := [gpu for gpu in wanted if not 0 <= gpu < available]:
            raise ClusterError(
                f"--gpu-ids: there is no GPU {', '.join(map(str, unknown))}; "
                f"torch sees {available}."
            )
        return wanted, f"NCCL, because --gpu-ids names GPUs {', '.join(map(str, wanted))}"
    if available >= ranks:
        return list(range(ranks)), "NCCL, because there is a GPU for each"
    if available == 0:
        return None, "gloo on the CPU, because torch sees no GPU"
    return None, f"gloo on the CPU, because NCCL takes one rank per GPU and torch sees {available}"


def route(lines: list[str], distributed: bool) -> list[str]:
    """A cell's lines as IPython shall see them, before it looks for magics.

    distributed: whether plain cells go to the ranks. A cell that begins with a cell magic, or has
    nothing but line magics and `!` lines, stays in the kernel.
    """
    first = lines[0] if lines else ""
    if first.split() == ["%%local"]:
        return lines[1:]
    if re.match(r"%%(rank|distributed)\b", first):  # the empty line keeps line numbers right
        return [re.sub(r"^%%rank\s*", "%%rank ", first), "\n", *lines[1:]]
    code = [(number, line.lstrip()) for number, line in enumerate(lines)]
    code = [(number, line) for number, line in code if line and not line.startswith("#")]
    plain = distributed and code and not code[0][1].startswith("%%")
    if not plain or all(line[0] in "%!?" and not MEASURES.match(line) for _, line in code):
        return lines
    start = next(number for number, line in code if not KERNELS.match(line))
    if start == code[0][0]:
        return ["%%distributed\n", *lines]
    cell = "\n" * start + "".join(lines[start:])
    return [*lines[:start], f"get_ipython().run_cell_magic('distributed', '', {cell!r})\n"]
