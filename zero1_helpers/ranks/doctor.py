"""Is this machine ready? `zero1 doctor` and notebook 00 ask one question after another, and say what to do.

Needs nothing but Python. It looks for torch and the optional groups without importing what may be missing.
Every look is allowed to fail. The answer is then that it could not be looked at.
"""

import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from zero1_helpers._groups import GROUP_OF

RANKS = 4  # of the notebooks
OLDEST_PYTHON = (3, 11)
ROOM = 8e9  # bytes; four ranks of the preset `small` and the kernel take 5.6e9 and more, of `tiny` 3.4e9
HUB_SECONDS = 3
MARKS = {"ready": "ok  ", "limit": "note", "fault": "FIX "}


@dataclass(frozen=True)
class Answer:
    """`state`: "ready"; "limit", with which the series runs; or "fault", which has to be mended first."""

    state: str
    said: str  # what there is
    advice: str = ""  # what to do


def look_at_python() -> Answer:
    there = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return Answer("fault", there, f"take {wanted} or newer: make install PYTHON=python3.12")
    if platform.system() not in ("Linux", "Darwin"):
        return Answer("fault", there, "take Linux or macOS; on Windows, the Linux subsystem")
    return Answer("ready", there)


def look_at_packages() -> Answer:
    if find_spec("torch") is None:
        return Answer("fault", "torch is missing", "run: make install")
    missing = {}
    for module, group in GROUP_OF.items():
        if find_spec(module) is None:
            missing.setdefault(group, []).append(module)
    if missing:
        lacking = "; ".join(f"{', '.join(m)} of the group {group}" for group, m in missing.items())
        install = f"pip install 'zero1_helpers[{','.join(missing)}]', or make install"
        return Answer("fault", f"missing: {lacking}", install)
    return Answer("ready", f"torch {version('torch')}, and all of the groups {', '.join(groups())}")


def groups() -> list[str]:
    return sorted(set(GROUP_OF.values()))


def look_at_cores() -> Answer:
    cores = available_cores()
    threads = max(1, int(cores // RANKS))
    said = f"{cores:g}, so {RANKS} ranks compute with {threads} thread{'s' * (threads > 1)} each"
    if cores < 2:
        return Answer("limit", said, "expect long waits; ZERO1_PRESET=tiny makes all cells quick")
    return Answer("ready", said)


def available_cores() -> float:
    """Cores that this process may use: by affinity, and by a container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _first_line("/sys/fs/cgroup/cpu.max").split()
    return min(cores, int(quota[0]) / int(quota[1])) if quota[:1] not in ([], ["max"]) else cores


def look_at_memory() -> Answer:
    free = free_memory()
    said = f"{free / 1e9:.1f} GB free"
    if free < ROOM:
        advice = (
            f"the notebooks need up to {ROOM / 1e9:g} GB; set ZERO1_PRESET=tiny before make lab"
        )
        return Answer("limit", said, advice)
    return Answer("ready", said)


def free_memory() -> int:
    """Bytes that can still be taken: of the machine, and of a container's share."""
    for line in (
        Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ()
    ):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            break
    else:  # macOS does not tell what is free
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _first_line("/sys/fs/cgroup/memory.max")
    if limit.isdigit():
        free = min(free, int(limit) - int(_first_line("/sys/fs/cgroup/memory.current") or 0))
    return free


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""


def look_at_loopback() -> Answer:
    """Two sockets on this machine, and a folder in which ranks may meet."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    if name not in [interface for _, interface in socket.if_nameindex()]:
        advice = "name the right one: export GLOO_SOCKET_IFNAME=..."
        return Answer("fault", f"there is no interface {name}", advice)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HUB_SECONDS)
        with socket.create_connection(server.getsockname(), timeout=HUB_SECONDS) as mine:
            theirs, _ = server.accept()
            with theirs:
                mine.sendall(b"ready")
                answered = theirs.recv(5) == b"ready"
    if not answered:
        return Answer("fault", "127.0.0.1 does not answer", "look at firewall and VPN")
    return Answer("ready", f"127.0.0.1 on {name} answers")


def look_at_room() -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        free = shutil.disk_usage(folder).free
    if free < 1e9:
        return Answer(
            "limit",
            f"{free / 1e9:.1f} GB free for temporary files",
            "set TMPDIR to a folder with room",
        )
    return Answer("ready", f"{free / 1e9:.0f} GB free for temporary files")


def look_at_gpus() -> Answer:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    if count == 0 and Path("/dev/nvidia0").exists():
        advice = "install torch's CUDA build to use it; until then the ranks run on the CPU"
        return Answer(
            "limit", f"there is one, but torch {torch.__version__} does not see it", advice
        )
    if count == 0:
        return Answer("ready", "none: the ranks run on the CPU and talk over gloo")
    said = f"{count} x {torch.cuda.get_device_name(0)}"
    if not dist.is_nccl_available():
        return Answer("limit", f"{said}, but this torch has no NCCL", "install torch's CUDA build")
    if count < RANKS:
        advice = f"{RANKS} ranks run on the CPU; %dist_init --num-processes {count} uses the GPUs"
        return Answer("limit", said, advice)
    return Answer("ready", f"{said}: the ranks talk over NCCL")


def look_at_hub() -> Answer:
    """In a thread, because a look-up of a name knows no time limit."""
    from huggingface_hub import constants

    without = (
        "only smollm2-360m asks for it, and takes random weights and the shipped pairs without it"
    )
    if constants.HF_HUB_OFFLINE:
        return Answer("limit", "switched off by HF_HUB_OFFLINE", without)
    host, answers = constants.ENDPOINT.partition("://")[2].partition("/")[0], []

    def ask():
        name, _, port = host.partition(":")
        with socket.create_connection((name, int(port or 443)), timeout=HUB_SECONDS):
            answers.append(True)

    thread = threading.Thread(target=_quietly, args=[ask], daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return Answer("ready", "answers") if answers else Answer("limit", "cannot be reached", without)


def _quietly(function: Callable) -> None:
    try:
        function()
    except Exception:
        pass


LOOKS = {
    "Python": look_at_python,
    "packages": look_at_packages,
    "cores": look_at_cores,
    "memory": look_at_memory,
    "loopback": look_at_loopback,
    "disk": look_at_room,
    "GPU": look_at_gpus,
    "hub": look_at_hub,
}


def examine() -> Iterator[tuple[str, Answer]]:
    """(subject, answer), one after another. Never raises."""
    for subject, look in LOOKS.items():
        try:
            yield subject, look()
        except Exception as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            yield subject, Answer("limit", f"could not be looked at: {said}")


def doctor() -> bool:
    """Print a line for each answer; returns whether nothing has to be mended."""
    healthy = True
    for subject, answer in examine():
        healthy &= answer.state != "fault"
        advice = f" -> {answer.advice}" if answer.advice else ""
        print(f"{MARKS[answer.state]}  {subject:<9} {answer.said}{advice}", flush=True)
    print("This machine is ready." if healthy else "Mend what is marked FIX, then ask again.")
    return healthy
