"""The parent of the ranks: imports torch once, forks the ranks, and ends all that they started.

    kernel --- starts ---> this process --- forks ---> rank 0, rank 1, ...

The kernel starts `python -m zero1_helpers.ranks.worker FD`. FD is one end of a socket pair: there is no
address that anyone else could connect to. This process runs no cell, so it always answers. On Linux it is
the "subreaper": whatever a rank has started becomes its child when the rank is gone, also a process in a
session of its own. It leaves when the kernel asks or is gone, and then nothing of the ranks is left.
"""

import contextlib
import ctypes
import faulthandler
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback

import psutil

from zero1_helpers.ranks.messages import Reader, pack

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END = 3.0  # seconds for which what does not end is killed again and again


def prctl(option: int, value: int) -> None:
    """Linux: set something about this process. Elsewhere, nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Parent:
    """Forks the ranks and tells the kernel how each of them ends.

    control: the socket to the kernel.  settings: what the kernel sent, see Processes in process.py.
    """

    def __init__(self, control: socket.socket, settings: dict):
        self.control, self.settings = control, settings
        self.folder = tempfile.mkdtemp(
            prefix=f"zero1-{os.getpid()}-"
        )  # only this user can enter it
        self.ranks: dict[int, int] = {}  # pid: rank, of those that have not ended
        self.awake, self.wake = socket.socketpair()

    def run(self) -> None:
        """Fork the ranks and look after them until the kernel is gone."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.wake.setblocking(False)
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)  # wakes the loop below
        try:
            for number in range(self.settings["world_size"]):
                self.ranks[self._fork(number)] = number
            for descriptor in sum(self.settings["descriptors"], []):
                os.close(descriptor)
            self._tell({"folder": self.folder, "pids": list(self.ranks)})
            while os.getppid() == self.settings["kernel"]:  # a fork of it can hold its socket open
                ready, _, _ = select.select([self.control, self.awake], [], [], 0.5)
                if self.control in ready:
                    break  # the kernel asks for the end, or has closed its side
                if self.awake in ready:
                    self.awake.recv(4096)
                self._report_ended()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            end_descendants()
            shutil.rmtree(self.folder, ignore_errors=True)  # what they made in the meantime

    def _fork(self, number: int) -> int:
        """Start a rank. Returns its pid."""
        parent = os.getpid()
        if pid := os.fork():
            return pid
        status = 1
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with this process
            if os.getppid() == parent:
                self._become_rank(number)
                status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)

    def _become_rank(self, number: int) -> None:
        from zero1_helpers.ranks.rank import Worker

        os.setpgid(0, 0)  # a cell's os.killpg must not reach others
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, pipe = self.settings["descriptors"][number]
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        for descriptor in sum(self.settings["descriptors"], []):
            if descriptor != connection:
                os.close(descriptor)
        for end in (self.control, self.awake, self.wake):
            end.close()
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        Worker(
            socket.socket(fileno=connection), number, self.settings["world_size"], self.folder
        ).run()

    def _report_ended(self) -> None:
        """Say which ranks have ended. They stay zombies, so that no other process gets their pids."""
        for pid in [*self.ranks]:
            code = exit_code(pid)
            if code is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what it started in its process group
                self._tell({"rank": self.ranks.pop(pid), "code": code})

    def _tell(self, message: dict) -> None:
        with contextlib.suppress(OSError):  # the kernel is gone
            for part in pack(message):
                self.control.sendall(part)


def exit_code(pid: int) -> int | None:
    """How this child has ended: its exit code, or minus the signal's number. None: it has not."""
    if not hasattr(os, "waitid"):  # macOS
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return how and how.si_status * (1 if how.si_code == os.CLD_EXITED else -1)


def end_descendants() -> None:
    """Kill and reap the children of this process until there are none.

    A child's children become ours when it ends, so that the last round has met all of them.
    """
    own, deadline = psutil.Process(), time.monotonic() + END
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            for child in own.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)


def receive_settings(control: socket.socket) -> dict | None:
    """The first message on this socket, or None if the other side has closed it."""
    reader = Reader()
    while data := control.recv(1 << 16):
        for message, _ in reader.feed(data):
            return message


def main() -> None:
    """Entry point of `python -m zero1_helpers.ranks.worker FD`, which only process.py starts."""
    control = socket.socket(fileno=int(sys.argv.pop()))
    settings = receive_settings(control)
    if settings is None:
        return
    if settings["from_main_thread"]:  # "parent" is a thread for Linux, and others may end before
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing to clean yet; the import takes seconds
        if os.getppid() != settings["kernel"]:
            return
    for descriptor in (control.fileno(), *sum(settings["descriptors"], [])):
        os.set_inheritable(descriptor, False)  # a program that a cell starts must not hold it open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the kernel decides; ranks have a handler
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # whatever the kernel's are
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.pop("PYTHONSAFEPATH")
    os.environ |= settings["environment"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
    faulthandler.enable()  # a segmentation fault leaves the Python stack in the output
    import zero1_helpers.ranks.rank  # noqa: F401  (torch, and all else that a rank needs)

    sys.path.insert(0, "")  # as in a notebook, but after our imports: "random.py" is not for us
    prctl(PR_SET_PDEATHSIG, 0)  # from here on it cleans up when the kernel is gone
    Parent(control, settings).run()
    os._exit(0)  # torch takes its time to leave otherwise


if __name__ == "__main__":
    main()
