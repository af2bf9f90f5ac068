"""How ranks meet on one machine: started by `run_ranks`, in a group that no one else can join.

`torchrun` lets its processes find each other through a server on every network interface, and
unpickles what lies there. On a machine with other users that lets any of them run code as you. Here

- the ranks find each other through a file, in a folder that only the user can enter;
- gloo and NCCL talk over the loopback interface alone, and gloo's ports close when all are connected;
- a rank reads its orders from a pipe that it inherits, and says what went wrong into another one;
- a rank ends when its parent ends, however that happens.

Several machines need a rendezvous on the network: that is torchrun's (see docs/trust.md).
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path

from zero1_helpers.measure.terminal import flush, one_line, tolerate_any_terminal

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TIMEOUT = timedelta(minutes=30)  # torch's own for gloo

# The first lines of a rank. Linux ends it with its parent, from before the first long import on;
# elsewhere a thread waits for the parent's end of the pipe to close.
BOOT = """\
import os, sys
if sys.platform.startswith("linux"):
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
else:
    import threading
    orders = os.dup(0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # the parent had ended before that
import pickle
from multiprocessing import spawn
try:
    spawn.prepare(pickle.load(sys.stdin.buffer))  # the parent's path, folder and main module
    function, arguments = pickle.load(sys.stdin.buffer)
except EOFError:
    os._exit(1)  # the parent was interrupted meanwhile
if not sys.platform.startswith("linux"):
    threading.Thread(target=lambda: (os.read(orders, 1), os._exit(1)), daemon=True).start()
function(*arguments)
"""


class RankFailed(RuntimeError):
    """A rank raised or died. `rank`: int. `said`: one line, the error."""

    def __init__(self, rank: int, said: str):
        super().__init__(f"rank {rank}: {said}")
        self.rank, self.said = rank, said


@dataclass(frozen=True)
class Rank:
    """The parent's view of a rank: its process, and the pipe in which it says what went wrong."""

    number: int
    process: subprocess.Popen
    report: Connection


def run_ranks(function: Callable, ranks: int, *arguments, use_gpus: bool = False) -> None:
    """Run `function(*arguments)` in `ranks` new processes that form a process group; wait for all.

    `function` is a module's own: it travels by name. With `use_gpus` each rank takes a GPU and NCCL,
    if there are enough. The first rank that raises or dies ends all others: RankFailed. No rank
    outlives this call, nor this process. They share its session: Linux first shares the cores among
    sessions, so in sessions of their own a rank's threads would wait for other ranks.
    """
    started = []
    with tempfile.TemporaryDirectory(prefix="zero1-") as folder:  # mode 0700
        try:
            for number in range(ranks):
                store = Path(folder, "store")
                orders = (store, number, ranks, use_gpus, function, arguments)
                started.append(_start(number, orders))
            _wait_for(started)
        finally:
            for rank in started:
                rank.process.kill()
            for rank in started:
                rank.process.wait()
                rank.process.stdin.close()
                rank.report.close()


def _start(number: int, orders: tuple) -> Rank:
    mine, theirs = os.pipe()
    command = [sys.executable, "-P", "-c", BOOT, str(os.getpid())]
    # Ctrl-C reaches the whole session. Only the parent takes it: a rank starts with it blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(theirs)
    rank = Rank(number, process, Connection(mine, writable=False))
    with contextlib.suppress(BrokenPipeError):  # it died already, as `_wait_for` will see
        about = spawn.get_preparation_data(f"rank {number}")
        pickle.dump({key: about[key] for key in about if key != "authkey"}, process.stdin)
        pickle.dump((_be_a_rank, (theirs, *orders)), process.stdin)
        process.stdin.flush()
    return rank


def _wait_for(started: list[Rank]) -> None:
    running = {rank.report: rank for rank in started}
    while running:
        wait(list(running), timeout=1)
        for report, rank in list(running.items()):
            ended = rank.process.poll() is not None
            if report.poll():
                try:
                    said = report.recv_bytes(10_000).decode(errors="replace")
                    raise RankFailed(rank.number, said)
                except (EOFError, OSError):
                    ended = True
            if ended:
                del running[report]
                if code := rank.process.wait():
                    raise RankFailed(rank.number, _exit(code))


def _exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed by SIGKILL; the system does that when memory runs out"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _be_a_rank(report, store, rank, ranks, use_gpus, function, arguments) -> None:
    """Body of a process that `run_ranks` has started."""
    os.set_inheritable(report, False)
    tolerate_any_terminal()
    try:
        with group(store, rank, ranks, use_gpus=use_gpus):
            function(*arguments)
        flush()
    except BaseException as error:
        # Said first: the other ranks fail as soon as this one's connections close.
        Connection(report, readable=False).send_bytes(one_line(error).encode(errors="replace"))
        os._exit(1)


@contextlib.contextmanager
def group(store, rank: int, ranks: int, *, use_gpus: bool = False, timeout: timedelta = TIMEOUT):
    """A process group of this machine's ranks, which meet at the file `store` in a private folder.

    When the body raises, the group is left as it is: to take it down, ranks would have to meet.
    """
    import torch.distributed as dist

    from zero1_helpers.measure.doors import guard_groups

    guard_groups()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    store = dist.FileStore(str(store), ranks)
    backend = _take_a_gpu(rank, ranks) if use_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    dist.barrier()
    yield
    if dist.is_initialized():
        dist.barrier()  # a rank that issued fewer collectives than the others is found here
        dist.destroy_process_group()


@contextlib.contextmanager
def torchruns_group():
    """The process group of ranks that torchrun has started, on one machine or on several; of this process
    alone, if torchrun has not started it."""
    import torch.distributed as dist

    alone = "RANK" not in os.environ
    local_rank, local_ranks = (
        (0, 1) if alone else (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    )
    if alone or int(os.environ["WORLD_SIZE"]) == local_ranks:  # one machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    elif os.environ["RANK"] == "0":
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(
            f"waiting for {os.environ['WORLD_SIZE']} ranks at {where}", file=sys.stderr, flush=True
        )
    meeting = dict(store=dist.HashStore(), rank=0, world_size=1) if alone else {}
    dist.init_process_group(_take_a_gpu(local_rank, local_ranks), **meeting)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _take_a_gpu(local_rank: int, local_ranks: int) -> str:
    """The backend: "nccl", on a GPU of this rank's own, if there is one for each, or else "gloo"."""
    import torch

    if torch.cuda.device_count() < local_ranks:
        return "gloo"
    torch.cuda.set_device(local_rank)
    return "nccl"
