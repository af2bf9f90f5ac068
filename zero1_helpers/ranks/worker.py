"""One rank: a Python process that runs the notebook's cells. The kernel's side is magics.py.

The kernel starts `python -m zero1_helpers.ranks.worker FD`. FD is one end of a socket pair: there is no
address that anyone else could connect to. Two threads work here:

- the main thread takes requests from a queue, one after the other, and runs them;
- the listener reads the socket. So it sees at once that the kernel is gone (end of file), and while
  the main thread sits in a collective it can still say so, or end this rank.

Requests are (number, kind, data), answers (number, dict). What a cell prints does not travel here:
file descriptors 1 and 2 are a pipe to the kernel, so output of native code arrives too, in order.
"""

import ast
import base64
import builtins
import ctypes
import faulthandler
import inspect
import io
import json
import linecache
import os
import pickle
import queue
import re
import resource
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
import types
import warnings
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from nbdistributed.worker import DistributedWorker

from zero1_helpers.ranks.doors import guard_groups

LIBRARIES = ("<frozen", *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
CELL = "<cell "  # how the file names of cells begin


class Worker(DistributedWorker):
    """nbdistributed's worker: the same namespace (torch, dist, rank, world_size, gpu_id, device).

    connection: socket to the kernel.  rank, world_size: int.  kernel: the kernel's pid.
    folder: private folder of this cluster, for the rendezvous.
    """

    def __init__(self, connection: Connection, rank: int, world_size: int, kernel: int,
                 folder: str):
        self.connection, self.sending = connection, threading.Lock()
        self.rank, self.world_size, self.gpu_id = rank, world_size, None
        self.kernel, self.folder = kernel, folder
        self.requests = queue.SimpleQueue()
        self.number, self.interruptible = None, False  # the running request; None: idle
        self.request, self.began, self.device = "", 0.0, "CPU"
        self.displays, self.warnings = [], {}
        # Cells get a __main__ of their own: their classes pickle, and our names are not in the way.
        self.main = sys.modules["__main__"] = types.ModuleType("__main__")
        self.namespace = vars(self.main)
        self.namespace |= dict(torch=torch, dist=dist, rank=rank, world_size=world_size)
        self.namespace |= dict(gpu_id=None, device=torch.device("cpu"))
        signal.signal(signal.SIGINT, self._interrupted)
        warnings.showwarning = self._warned
        show_with(self.display)
        find_sources_of_classes()
        threading.Thread(target=self._listen, daemon=True).start()

    # ---- the listener

    def _listen(self) -> None:
        """Read the socket; leave when the kernel is gone."""
        try:
            while os.getppid() == self.kernel:  # a fork of the kernel can hold its end open
                if self.connection.poll(1.0):
                    self._take(*self.connection.recv())
        except (EOFError, OSError):
            pass  # the other end is closed
        except BaseException:
            traceback.print_exc()  # an error of ours: the kernel shows what a rank said last
        finally:
            self._leave()

    def _take(self, number: int, kind: str, data) -> None:
        """Answer at once what the main thread is not needed for."""
        if kind == "look":
            self._send(number, {"state": self._look()})
        elif kind in ("hurry", "stop"):
            if kind == "stop":
                self._interrupt(number)
            threading.Thread(target=self._hurry, args=(number, data), daemon=True).start()
        else:
            self.requests.put((number, kind, data))

    def _hurry(self, number: int, grace: float) -> None:
        """Another rank failed, or the user interrupts: `grace` seconds to come back, or end."""
        time.sleep(grace)
        self._interrupt(number)  # pure Python stops here, and the rank survives
        time.sleep(0.7)
        if self.number == number:
            self._send(number, {"stuck": self._look()["where"]})
            self._leave()

    def _interrupt(self, number: int) -> None:
        """KeyboardInterrupt in this request. To the main thread, so that what it waits for returns."""
        if self.number == number:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def _look(self) -> dict:
        """What the main thread does now, for %dist_status and for messages about stopped cells."""
        unit = 1 if sys.platform == "darwin" else 1024
        state = {"where": "idle", "device": self.device,
                 "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
        if self.gpu_id is not None:
            state["device"] += f" ({torch.cuda.memory_allocated() / 1e9:.2f} GB allocated)"
        if self.number is not None:
            frame = sys._current_frames()[threading.main_thread().ident]
            state |= {"request": self.request, "seconds": time.monotonic() - self.began}
            try:
                state["where"], state["stack"] = describe_stack(frame)
            except Exception as error:  # it runs on while we look
                state |= {"where": f"in its cell, whose stack cannot be read ({error!r})", "stack": ""}
        return state

    def _leave(self) -> None:
        """End at once, with all processes that this rank started. The cluster ends with it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.killpg(os.getpid(), signal.SIGKILL)  # our own group: the kernel gave us one

    def _send(self, number: int, answer: dict) -> None:
        with self.sending:
            self.connection.send((number, answer))

    # ---- the main thread

    def run(self) -> None:
        """Answer requests, until "shutdown"."""
        self._send(0, {"gpus": torch.cuda.device_count()})
        while True:
            number, kind, data = self.requests.get()
            if kind == "shutdown":
                return
            self.displays, self.warnings, answer = [], {}, {}
            self.request = f"cell {data['cell']}" if kind == "execute" else kind
            self.began = time.monotonic()
            self.number, self.interruptible = number, True
            try:
                answer = getattr(self, f"_{kind}")(data) or {}
                self._finish_output()
                self.interruptible = False
            except BaseException as error:  # SystemExit, KeyboardInterrupt: the rank survives them
                self.interruptible = False
                answer = {"error": describe(error)}
                flush()
            self.number = None
            self._send(number, answer | {"displays": self.displays, "warnings": [*self.warnings]})

    def _form(self, data: dict) -> None:
        """Join the process group. data: backend ("gloo" or "nccl"), gpu_id (int or None)."""
        device = None
        if data["backend"] == "nccl":
            self.gpu_id = data["gpu_id"]
            device = torch.device("cuda", self.gpu_id)
            torch.cuda.set_device(device)
            self.namespace |= dict(gpu_id=self.gpu_id, device=device)
            self.device = f"GPU {self.gpu_id}, {torch.cuda.get_device_name(device)}"
        else:  # with fewer GPUs than ranks, CUDA is there but not used
            os.environ.setdefault("ZERO1_PRESET", "small")
        # A file in a private folder, because a TCPStore listens on every interface.
        store = dist.FileStore(os.path.join(self.folder, "store"), self.world_size)
        guard_groups(warnings.warn)
        dist.init_process_group(data["backend"], store=store, rank=self.rank,
                                world_size=self.world_size, device_id=device)
        dist.barrier()  # what fails, fails now

    def _execute(self, data: dict) -> None:
        """Run a cell as Jupyter would, showing its last expression. data: code, cell (a number)."""
        code = data["code"]
        name = remember(code, data["cell"])
        body = ast.parse(code, name).body
        last = None
        if body and isinstance(body[-1], ast.Expr) and not code.rstrip().endswith(";"):
            last = ast.Expression(body.pop().value)
        exec(compile(ast.Module(body, []), name, "exec", dont_inherit=True), self.namespace)
        if last:
            value = eval(compile(last, name, "eval", dont_inherit=True), self.namespace)
            if value is not None:
                self.display(value)

    def _get_var(self, expression: str) -> dict:
        """The value of an expression, pickled (for `pull`)."""
        value = eval(compile(expression, "<pull>", "eval"), self.namespace)
        buffer = io.BytesIO()
        try:
            TensorsOnCPU(buffer, protocol=4).dump(value)
        except Exception as error:
            kind = type(value).__name__
            raise TypeError(f"a {kind} cannot be sent to the kernel: {error}") from None
        return {"value": buffer.getvalue()}

    def _set_var(self, data: bytes) -> None:
        """Set names, from a pickled dict (for `push`)."""
        self.namespace |= pickle.loads(data)

    def _sync(self, data) -> None:
        dist.barrier()

    def _interrupted(self, signum, frame) -> None:
        if self.interruptible:  # between cells there is nothing to interrupt
            self.interruptible = False
            raise KeyboardInterrupt

    def _warned(self, message, category, filename, lineno, file=None, line=None) -> None:
        """Instead of warnings.showwarning: the kernel shows a warning once, not once a rank."""
        self.warnings[f"{category.__name__}: {message} ({place(filename, lineno)})"] = True

    def display(self, *objects, **options) -> None:
        """IPython's display(): prints what is only text, and sends pictures and HTML."""
        for value in objects:
            bundle = mime_bundle(value)
            if set(bundle) <= {"text/plain"}:
                print(bundle.get("text/plain", ""))
            else:
                self.displays.append(bundle)

    def _finish_output(self) -> None:
        """End of a cell: show figures that are still open."""
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            for number in pyplot.get_fignums():
                self.display(pyplot.figure(number))
        flush()


def flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # native code's stdout


def place(filename: str, line: int) -> str:
    """ "cell 4, line 2", or "module.py, line 2" without the folder."""
    name = filename.strip("<>") if filename.startswith(CELL) else os.path.basename(filename)
    return f"{name}, line {line}"


def describe_stack(frame) -> tuple[str, str]:
    """What a thread is doing: "waiting in all_reduce (cell 4, line 2)", and its own lines.

    frame: its innermost. Frames of libraries are left out, and those outside the cell.
    """
    steps = []  # (frame, file, line), innermost first
    while frame and frame.f_code.co_filename != __file__:
        steps.append((frame, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    own = [step for step in steps if not step[1].startswith(LIBRARIES)]
    lines = [f"{place(file, line)}: {linecache.getline(file, line).strip()}" for _, file, line in own]
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
    report = traceback.TracebackException.from_exception(error)
    report.stack[:] = [step for step in report.stack if step.filename != __file__]
    where, source = "", ""
    if cells := [step for step in report.stack if step.filename.startswith(CELL)]:
        where, source = place(cells[0].filename, cells[0].lineno), cells[0].line
    elif isinstance(error, SyntaxError) and (error.filename or "").startswith(CELL):
        where, source = place(error.filename, error.lineno), (error.text or "").strip()
        report.stack.clear()  # the parser's
    try:
        message = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    except Exception:
        message = "its message cannot be shown, because its __str__ fails"
    return {"name": type(error).__name__, "message": message, "place": where, "source": source,
            "traceback": "".join(report.format())}


def remember(code: str, cell: int) -> str:
    """Give a cell's source to linecache, for tracebacks and inspect. Returns its file name."""
    lines = code.splitlines(keepends=True)
    name, again = f"{CELL}{cell}>", 1
    while name in linecache.cache and linecache.cache[name][2] != lines:
        again += 1
        name = f"{CELL}{cell}, run {again}>"
    linecache.cache[name] = (len(code), None, lines, name)  # None, no time of change: it is kept
    return name


def find_sources_of_classes() -> None:
    """Let inspect.getsource find classes of cells: a function knows its file, a class does not."""
    original = inspect.getfile

    def getfile(value):
        if inspect.isclass(value) and value.__module__ == "__main__":
            head = re.compile(rf"\s*class {value.__name__}\b")
            for name in reversed(linecache.cache):
                if name.startswith(CELL) and any(map(head.match, linecache.cache[name][2])):
                    return name
        return original(value)

    inspect.getfile = getfile


def show_with(display) -> None:
    """Make this function `display`, as a builtin (as in Jupyter) and when imported from IPython."""
    import IPython.core.display_functions
    import IPython.display

    IPython.display.display = IPython.core.display_functions.display = display
    builtins.display = display
    warnings.filterwarnings("ignore", message=".*is non-interactive, and thus cannot be shown")


def mime_bundle(value) -> dict[str, str]:
    """What a value looks like: text/plain, and text/html or image/png (base64) if it has them."""
    figures = sys.modules.get("matplotlib.figure")
    if figures and isinstance(value, figures.Figure):
        png = io.BytesIO()
        value.savefig(png, format="png", bbox_inches="tight", metadata={"Software": None})
        sys.modules["matplotlib.pyplot"].close(value)
        bundle = {"image/png": png.getvalue(), "text/plain": repr(value)}
    else:
        from IPython.core.formatters import DisplayFormatter

        bundle, _ = DisplayFormatter().format(value)
    return {kind: base64.b64encode(data).decode() if isinstance(data, bytes) else data
            for kind, data in bundle.items() if kind != "application/javascript"}


class TensorsOnCPU(pickle.Pickler):
    """Sends tensors as copies on the CPU: no GPU needed to read them, no storage behind a view."""

    def reducer_override(self, value):
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return value.detach().cpu().clone().__reduce_ex__(4)
        return NotImplemented


def end_with_kernel() -> None:
    """Linux: end soon after the kernel, even when native code never lets the listener run.

    The kernel's death sends us SIGHUP (number 1), whose handler is libc's alarm: alarm(1) leaves
    the listener a second to remove the folder, then SIGALRM ends us. No Python runs for this.
    """
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGHUP, ctypes.cast(libc.alarm, ctypes.c_void_p))
    libc.prctl(1, signal.SIGHUP)  # 1: PR_SET_PDEATHSIG


def main() -> None:
    """Entry point of `python -m zero1_helpers.ranks.worker FD`, which only magics.py starts."""
    descriptor = int(sys.argv.pop())
    os.set_inheritable(descriptor, False)  # a program that a cell starts must not hold it open
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
    faulthandler.enable()  # a segmentation fault leaves the Python stack in the log
    connection = Connection(descriptor)
    settings = connection.recv()
    if settings.pop("from_main_thread") and sys.platform == "linux":
        end_with_kernel()  # "kernel" is the thread that started us: not for one that may end before
    Worker(connection, **settings).run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    from zero1_helpers.ranks.worker import main as start

    start()
