"""The processes of the ranks, seen from the kernel: how they start, and that nothing is left of them."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from zero1_helpers.ranks.messages import pack

END = 1.0  # seconds in which the parent has to end all that the ranks started; then we do


class Processes:
    """The parent of the ranks (worker.py) and our ends of what connects us with them.

    control: socket to the parent.  log: pipe that the parent prints into.
    sockets, pipes: one a rank, for messages and for what it prints. All of them never block.
    threads: CPU threads of each rank.  folder: the private one, once the ranks are forked.
    """

    def __init__(self, world_size: int, master_addr: str = "localhost"):
        """Start the parent. It is still importing torch when this returns."""
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):  # not on macOS
            cores = len(os.sched_getaffinity(0))
        self.threads, self.folder = max(1, cores // world_size), None
        self.sockets: list[socket.socket] = []
        self.pipes: list[int] = []
        self.control = self.log = None
        with contextlib.ExitStack() as theirs:

            def channel() -> list[int]:
                ours, other = socket.socketpair()
                self.sockets.append(ours)
                descriptor = other.detach()
                theirs.callback(os.close, descriptor)
                return [descriptor, pipe()]

            def pipe() -> int:
                reading, writing = os.pipe()
                self.pipes.append(reading)
                theirs.callback(os.close, writing)
                return writing

            try:
                descriptors = [channel() for _ in range(world_size + 1)]
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "zero1_helpers.ranks.worker", str(descriptors[-1][0])],
                    pass_fds=sum(descriptors, [])[:-1],
                    stdin=subprocess.DEVNULL,
                    stdout=descriptors[-1][1],
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    start_new_session=True,
                )  # no terminal, and not in the kernel's process group
            except BaseException:
                self.close()
                raise
        self.control, self.log = self.sockets.pop(), self.pipes.pop()
        for end in (self.control, *self.sockets):
            end.setblocking(False)
        for pipe in (self.log, *self.pipes):
            os.set_blocking(pipe, False)
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self._tell(
            {
                "kernel": os.getpid(),
                "world_size": world_size,
                "descriptors": descriptors[:-1],
                "from_main_thread": threading.current_thread() is threading.main_thread(),
                "environment": {
                    "MASTER_ADDR": master_addr,
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "TORCH_GLOO_LAZY_INIT": "0",
                    "GLOO_SOCKET_IFNAME": loopback,
                    "NCCL_SOCKET_IFNAME": loopback,
                },
            }
        )

    def _environment(self) -> dict[str, str]:
        """Of all ranks. Our own package comes first, so that they run the kernel's version of it."""
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "MPLBACKEND": "agg"}
        environment["PYTHONSAFEPATH"] = "1"  # no module is imported from the notebook's folder
        package = str(Path(__file__).parent.parent.parent)
        path = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        for switch in ("PYTHONOPTIMIZE", "PYTHONINSPECT", "PYTHONSTARTUP"):
            environment.pop(switch, None)  # the first one would switch assertions off
        return environment

    def _tell(self, message: dict) -> None:
        with contextlib.suppress(OSError):  # it has ended, which others notice
            self.control.send(b"".join(pack(message)))

    def end(self) -> None:
        """End everything that is left, within a few seconds, whatever state it is in."""
        self._tell({"end": True})
        try:
            self.process.wait(END if self.folder else 0)  # without a folder, it still imports torch
        except subprocess.TimeoutExpired:  # or somebody has stopped it
            end_tree(self.process.pid)
            self.process.wait()
        for folder in Path(tempfile.gettempdir()).glob(f"zero1-{self.process.pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def how_it_ended(self) -> str:
        """How the parent ended, when it has closed its side of `control`."""
        try:
            how = describe_exit(self.process.wait(END))
        except subprocess.TimeoutExpired:
            how = "it closed its connection to the kernel"
        return f"its parent process ended: {how}" if self.folder else how

    def close(self) -> None:
        """Close our ends."""
        for end in (*self.sockets, self.control):
            end and end.close()
        for pipe in (*self.pipes, self.log):
            pipe and os.close(pipe)
        self.sockets, self.pipes, self.control, self.log = [], [], None, None


def end_tree(pid: int) -> None:
    """Kill a child of ours with all its descendants; it comes last, because it adopts orphans."""
    deadline = time.monotonic() + END
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        while time.monotonic() < deadline:
            living = [child for child in parent.children(recursive=True) if not is_zombie(child)]
            if not living:
                break
            for child in living:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            time.sleep(0.005)
    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).kill()


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def describe_exit(code: int) -> str:
    """How a process ended, from its exit code, or minus the number of the signal."""
    if code >= 0:
        return f"exit code {code}"
    hint = (
        ", which the notebook layer did not send; often it means out of memory"
        if code == -9
        else ""
    )
    with contextlib.suppress(ValueError):  # not every number has a name
        return f"signal {signal.Signals(-code).name}{hint}"
    return f"signal {-code}"
