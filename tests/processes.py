"""What tests ask the system about processes: children, listening ports, and another user's hands."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

NOBODY = 65534
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
two_users = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)


def eventually(condition: Callable, seconds: float = 60):
    """The first true value of `condition()`, asked again and again; an error when time is up."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {seconds} s: {condition}"
        time.sleep(0.01)
    return value


def children(pid: int) -> list[int]:
    """Pids of the processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address in hexadecimal digits as the kernel writes it, port) of these processes' TCP doors."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                continue
    doors = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                doors.add((address, int(port, 16)))
    return doors


def as_nobody(action: Callable) -> int:
    """Run `action()` in a forked process of another user; its exit status, 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
