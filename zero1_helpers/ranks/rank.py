"""One rank: a process that runs the notebook's cells. worker.py forks it, channel.py talks to it.

Two threads work here:

- the main thread takes requests from a queue, one after the other, and runs them;
- the listener reads the socket. So it sees at once that the kernel is gone (end of file), and while
  the main thread sits in a collective it can still say so.

A request is {"number", "kind", ...}, an answer {"number", "pid", ...}: plain values, see messages.py. What
a cell prints does not travel here: file descriptors 1 and 2 are a pipe to the kernel, so output of native
code arrives too, in order. To interrupt a request, the kernel sends the signal SIGINT.
"""

import atexit
import contextlib
import ctypes
import io
import os
import pickle
import queue
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import warnings

import numpy as np
import torch
import torch.distributed as dist

from zero1_helpers.measure.doors import guard_groups
from zero1_helpers.ranks.cells import Cells
from zero1_helpers.ranks.describe import describe, describe_stack, place
from zero1_helpers.ranks.messages import Reader, pack


class Worker:
    """A rank. Its namespace is nbdistributed's: torch, dist, rank, world_size, gpu_id, device.

    connection: socket to the kernel.  rank, world_size: int.
    folder: private folder of this cluster, for the rendezvous.
    """

    def __init__(self, connection: socket.socket, rank: int, world_size: int, folder: str):
        self.connection, self.sending, self.pid = connection, threading.Lock(), os.getpid()
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.gpu_id, self.device = None, "CPU"
        self.requests = queue.SimpleQueue()
        self.number, self.interruptible = None, False  # the running request; None: idle
        self.request, self.began, self.warnings = "", 0.0, {}
        self.cells = Cells(folder)
        self.cells.namespace |= dict(
            torch=torch,
            dist=dist,
            rank=rank,
            world_size=world_size,
            gpu_id=None,
            device=torch.device("cpu"),
        )
        np.random.seed()  # the fork has copied numpy's random state; Python's own is new by itself
        signal.signal(signal.SIGINT, self._interrupted)
        os.register_at_fork(after_in_child=connection.close)  # only the rank itself answers
        warnings.showwarning = self._warned
        threading.Thread(target=self._listen, daemon=True).start()

    # ---- the listener

    def _listen(self) -> None:
        """Read the socket; leave when the kernel is gone."""
        reader = Reader()
        try:
            while data := self.connection.recv(1 << 20):
                for message, payload in reader.feed(data):
                    self._take(message, payload)
        except BaseException:
            traceback.print_exc()  # an error of ours, or a cell has closed the socket
        finally:
            os.killpg(self.pid, signal.SIGKILL)  # our own group, which the parent gave us

    def _take(self, message: dict, payload: bytes) -> None:
        """Answer at once what the main thread is not needed for."""
        if message["kind"] == "look":
            self._send({"number": message["number"], "state": self._look()})
        else:
            self.requests.put((message, payload))

    def _look(self) -> dict:
        """What the main thread does now, for %dist_status and for messages about stopped cells."""
        unit = 1 if sys.platform == "darwin" else 1024
        state = {
            "where": "idle",
            "device": self.device,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        }
        if self.gpu_id is not None:
            state["device"] += f" ({torch.cuda.memory_allocated() / 1e9:.2f} GB allocated)"
        if self.number is not None:
            frame = sys._current_frames()[threading.main_thread().ident]
            state |= {"request": self.request, "seconds": time.monotonic() - self.began}
            try:
                state["where"], state["stack"] = describe_stack(frame)
            except Exception as error:  # it runs on while we look
                state |= {
                    "where": f"in its cell, whose stack cannot be read ({error!r})",
                    "stack": "",
                }
        return state

    def _send(self, answer: dict, payload: bytes = b"") -> None:
        if os.getpid() != self.pid:  # a fork that has returned from its cell
            os._exit(0)
        with self.sending:
            for part in pack(answer | {"pid": self.pid}, payload):
                self.connection.sendall(part)

    # ---- the main thread

    def run(self) -> None:
        """Answer requests, until "shutdown"."""
        self._send({"number": 0, "gpus": torch.cuda.device_count()})
        while True:
            message, payload = self.requests.get()
            if message["kind"] == "shutdown":
                return self._shut_down()
            self._send(*self._answer(message, payload))

    def _answer(self, message: dict, payload: bytes) -> tuple[dict, bytes]:
        """Run a request. SystemExit and KeyboardInterrupt end it like any other exception."""
        kind, answer, result = message["kind"], {}, b""
        self.cells.displays, self.warnings = [], {}
        self.request = f"cell {message['cell']}" if kind == "execute" else kind
        self.began, self.number = time.monotonic(), message["number"]
        try:
            self.interruptible = True
            result = getattr(self, f"_{kind}")(message, payload) or b""
            self.cells.show_figures()
            self.cells.mend_streams()
            flush()
            self.interruptible = False
        except BaseException as error:
            self.interruptible = False
            answer = {"error": describe(error)}
        self.number = None
        self.cells.mend_streams()
        flush()
        answer |= {
            "number": message["number"],
            "displays": self.cells.displays,
            "warnings": [*self.warnings],
        }
        return answer, result

    def _shut_down(self) -> None:
        """Leave the group, and do what the cells asked for at exit."""
        if dist.is_initialized():
            dist.destroy_process_group()
        atexit._run_exitfuncs()
        flush()

    def _form(self, message: dict, payload: bytes) -> None:
        """Join the process group. message: gpus, each rank's for NCCL, or None for gloo."""
        device = None
        if message["gpus"]:
            self.gpu_id = message["gpus"][self.rank]
            device = torch.device("cuda", self.gpu_id)
            torch.cuda.set_device(device)
            self.cells.namespace |= dict(gpu_id=self.gpu_id, device=device)
            self.device = f"GPU {self.gpu_id}, {torch.cuda.get_device_name(device)}"
        else:  # with fewer GPUs than ranks, CUDA is there but not used
            os.environ.setdefault("ZERO1_PRESET", "small")
        guard_groups(self._note)
        # A file in a private folder, because a TCPStore listens on every interface.
        store = dist.FileStore(os.path.join(self.folder, "store"), self.world_size)
        dist.init_process_group(
            "nccl" if message["gpus"] else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            device_id=device,
        )
        dist.barrier()  # what fails, fails now

    def _execute(self, message: dict, payload: bytes) -> None:
        self.cells.run(message["code"], message["cell"])

    def _get_var(self, message: dict, payload: bytes) -> bytes:
        """The value of an expression, pickled (for `pull`)."""
        value = eval(compile(message["expression"], "<pull>", "eval"), self.cells.namespace)
        buffer = io.BytesIO()
        try:
            TensorsOnCPU(buffer, protocol=4).dump(value)
        except Exception as error:
            kind = type(value).__name__
            raise TypeError(f"a {kind} cannot be sent to the kernel: {error}") from None
        return buffer.getvalue()

    def _set_var(self, message: dict, payload: bytes) -> None:
        """Set names, from a pickled dict (for `push`)."""
        self.cells.namespace |= pickle.loads(payload)

    def _sync(self, message: dict, payload: bytes) -> None:
        dist.barrier()

    def _interrupted(self, signum, frame) -> None:
        if self.interruptible:  # between cells there is nothing to interrupt
            self.interruptible = False
            raise KeyboardInterrupt

    def _warned(self, message, category, filename, lineno, file=None, line=None) -> None:
        """Instead of warnings.showwarning: the kernel shows a warning once, not once a rank."""
        self._note(f"{category.__name__}: {message} ({place(filename, lineno)})")

    def _note(self, text: str) -> None:
        self.warnings[text] = True


def flush() -> None:
    """Send on what Python and native code have buffered."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a cell may have put anything there
            stream.flush()
    ctypes.CDLL(None).fflush(None)


class TensorsOnCPU(pickle.Pickler):
    """Sends tensors as copies on the CPU: no GPU needed to read them, no storage behind a view."""

    def reducer_override(self, value):
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return value.detach().cpu().clone().__reduce_ex__(4)
        return NotImplemented
