"""The notebook's side of the ranks: `%load_ext zero1_helpers` brings nbdistributed's magics, mended.

    kernel --- one socket pair per rank: requests, answers ---> ranks/worker.py, rank r
           <-- one pipe per rank: whatever it prints, native code included ---
                 ranks to each other: gloo or NCCL on the loopback interface

- Nothing here listens. A socket pair has no address, so nobody but the process that we started can
  read, forge or send what the other side unpickles. Ranks meet through a file in a private folder.
- While a cell runs, one loop (`RankChannel._collect`) reads everything, without threads. Another
  thread may ask what the ranks are doing (`%dist_status` in a subshell); the listener in each rank
  answers, even while its main thread sits in a collective.
- A cell has no time limit unless it is given one (`--timeout`). It ends when all ranks have answered;
  if one fails, the others get a grace period (`%config ClusterMagics.grace = 10`), then are ended.
- Ranks are ended by pid, and only our own. When the kernel is gone they end by themselves.
"""

import atexit
import contextlib
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import clear_output
from nbdistributed.communication import CommunicationManager
from nbdistributed.magic import DistributedMagic
from nbdistributed.process_manager import ProcessManager
from traitlets import Float

from zero1_helpers.ranks.arguments import (
    ClusterError,
    choose_gpus,
    parse_gpu_ids,
    parse_ranks,
    parse_seconds,
    split_timeout,
)
from zero1_helpers.ranks.output import Output, alike, count, indented, labelled, show, span

START = 180.0  # seconds in which all ranks must have imported torch, and then have joined
HOLD = 4.2  # seconds that a cell waits for the others after a failure; `grace` may be longer
LIVE = 2.0  # seconds after which a running cell shows what it has printed so far
COLLECTIVE = re.compile(r"\b((all_)?(reduce|gather)|broadcast|scatter|reduce_scatter|all_to_all)"
                        r"(_into_tensor|_tensor|_single|_object|_object_list)?\s*\(|\bbarrier\s*\(")
FAILURES = ("died", "error", "stuck", "late")  # what an answer may have, most telling first


class Rank:
    """One worker process, the socket to it, and the pipe that it prints into.

    Any thread may send and take in; what has arrived is kept here until somebody looks at it.
    """

    def __init__(self, number: int, process: subprocess.Popen, connection: Connection, pipe: int):
        self.number, self.process, self.connection, self.pipe = number, process, connection, pipe
        os.set_blocking(pipe, False)
        self.sending, self.reading = threading.Lock(), threading.Lock()
        self.output, self.started, self.device = Output(), time.time(), "CPU"
        self.answered, self.answer = -1, {}  # the last answer, and the number of its request
        self.state, self.looked = {}, -1  # what it last said that it does, and when it was asked

    def send(self, number: float, kind: str, data=None) -> None:
        with deferred_interrupt(), self.sending, contextlib.suppress(OSError):  # ended() says why
            self.connection.send((number, kind, data))

    def answer_to(self, number: int) -> dict | None:
        """Its answer to this request, or {"died": how}, or None: not yet."""
        self.take_in()
        if self.answered == number:
            return self.answer
        how = self.ended()
        return how and {"died": how}

    def take_in(self) -> None:
        """Read what it has printed and sent, without waiting."""
        with self.reading:
            self.drain()
            try:
                while self.connection.poll():
                    number, message = self.connection.recv()
                    if "state" in message:
                        self.state, self.looked = message["state"], number
                    else:
                        self.answered, self.answer = number, message
                        self.drain()  # printed before it answered, so all of it is in the pipe now
            except (EOFError, OSError):
                deadline = time.monotonic() + 2.0
                while not self.ended() and time.monotonic() < deadline:
                    time.sleep(0.01)
                self.drain()

    def drain(self) -> None:
        with contextlib.suppress(OSError):  # nothing there, or closed
            for _ in range(64):  # more than a pipe holds; a rank may never stop printing
                if not (data := os.read(self.pipe, 1 << 16)):
                    return
                self.output.add(data)

    def ended(self) -> str | None:
        """How the process ended; None: it has not. It stays a zombie, so that its pid stays its own."""
        if self.process.returncode is not None or not hasattr(os, "waitid"):
            code = self.process.poll()
        elif found := os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            code = found.si_status * (1 if found.si_code == os.CLD_EXITED else -1)
        else:
            return None
        if code is None or code >= 0:
            return None if code is None else f"exit code {code}"
        hint = ", which no one here sent; often it means out of memory" if code == -9 else ""
        return f"signal {signal.Signals(-code).name}{hint}"

    def kill(self) -> None:
        """End it and what it started: its process group, which nobody else can be in."""
        if self.process.returncode is None:  # not yet waited for: the pid is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, deadline: float) -> None:
        """Wait until it has ended by itself, or the time is up; then nothing is left of it."""
        with contextlib.suppress(EOFError, OSError):  # end of file: it has
            while (left := deadline - time.monotonic()) > 0:
                self.drain()
                if self.connection.poll(min(left, 0.05)):
                    self.connection.recv()
        self.kill()
        self.process.wait()
        with self.reading, self.sending:
            self.connection.close()
            os.close(self.pipe)


class RankProcesses(ProcessManager):
    """nbdistributed's process manager, with this interpreter, a channel per rank, ending by pid."""

    def __init__(self):
        super().__init__()
        self.ranks: list[Rank] = []
        self.folder = tempfile.mkdtemp(prefix="zero1-")  # only this user can enter it
        self.threads = 1

    def start_workers(self, num_processes: int, master_addr="localhost", gpu_ids=None) -> None:
        """Start the processes. They are still importing torch when this returns."""
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):  # not on macOS
            cores = len(os.sched_getaffinity(0))
        self.num_processes, self.threads = num_processes, max(1, cores // num_processes)
        path = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": str(self.threads),
            "MPLBACKEND": "agg", "MASTER_ADDR": master_addr, "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        for number in range(num_processes):
            ours, theirs = socket.socketpair()
            pipe, printed = os.pipe()
            process = subprocess.Popen(
                [sys.executable, "-m", "zero1_helpers.ranks.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=printed,
                # A group of its own, to be ended with its children; not a session, because Linux shares
                # the cores among sessions first, and a rank's threads then wait for the other ranks.
                stderr=subprocess.STDOUT, process_group=0,
                env=environment | {"RANK": str(number), "LOCAL_RANK": str(number)})
            theirs.close()
            os.close(printed)
            rank = Rank(number, process, Connection(ours.detach()), pipe)
            self.processes.append(process)
            self.ranks.append(rank)
            rank.connection.send({
                "rank": number, "world_size": num_processes, "folder": self.folder,
                "kernel": os.getpid(),
                "from_main_thread": threading.current_thread() is threading.main_thread()})

    def is_running(self) -> bool:
        return bool(self.ranks)

    def shutdown(self, patience: float = 3.0) -> None:
        """Ask the ranks to end; end them by pid after `patience` seconds. Twice is harmless."""
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.send(0, "shutdown")
        deadline = time.monotonic() + patience
        for rank in ranks:
            rank.end(deadline)
        shutil.rmtree(self.folder, ignore_errors=True)


class RankChannel(CommunicationManager):
    """nbdistributed's communication manager without its port, its thread and its time limit.

    processes: started.  grace: seconds that busy ranks get after another one has failed.
    """

    def __init__(self, processes: RankProcesses, grace: float):
        self.processes, self.ranks, self.grace = processes, processes.ranks, grace
        self.limit = 0.0  # seconds that a request may take; 0: as long as it takes
        self.number = 0  # of the last request
        self.busy = threading.Lock()  # held while a request runs
        self.late: set[int] = set()  # ranks still busy with a request that failed elsewhere
        self.late_until = 0.0
        self.stopped = ""  # why the last request was stopped, and what the ranks were doing then
        self.lost = ""  # why there are no ranks any more

    def send_to_all(self, msg_type, data=None, timeout=None, progress=None) -> dict[int, dict]:
        return self.send_to_ranks(range(len(self.ranks)), msg_type, data, timeout, progress)

    def send_to_ranks(self, ranks, msg_type, data=None, timeout=None, progress=None):
        """Ask these ranks and wait for their answers: {rank: answer}, in the order they came.

        An answer has "error" (an exception there), "died", "stuck" (we ended it), "late" (still
        busy), or what was asked for. timeout: seconds, or None for the usual limit.
        Raises ClusterError when there are no ranks, or when they are busy for another thread.
        """
        if not self.busy.acquire(blocking=False):
            raise ClusterError("The ranks still run a cell for another thread: see %dist_status.")
        try:
            self._settle()
            self.number += 1
            for rank in ranks:
                self.ranks[rank].output = Output()
                self.ranks[rank].send(self.number, msg_type, data)
            return self.gather(ranks, progress, self.limit if timeout is None else timeout)
        finally:
            self.busy.release()

    def gather(self, ranks, progress=None, limit: float = 0.0) -> dict[int, dict]:
        """Collect answers. A rank that is gone takes all with it: no collective could work again."""
        answers, self.late = self._collect(ranks, progress, limit=limit)
        late = self.look(sorted(self.late), 0.3)
        self._lose_if_gone(answers, "ended during an earlier cell")
        return answers | {rank: {"late": late[rank]["where"]} for rank in late}

    def look(self, ranks=None, seconds: float = 1.0) -> dict[int, dict]:
        """What these ranks do at this moment: {rank: state}. From any thread, while a cell runs.

        A state has "where" ("idle", "waiting in barrier (cell 4, line 2)"), and if the rank answers
        within these seconds: request, seconds (since its start), stack, device, peak (bytes).
        """
        ranks = range(len(self.ranks)) if ranks is None else ranks
        asked = time.monotonic()
        states, waiting = {}, set(ranks)
        with deferred_interrupt():  # half a message would spoil the rest
            for number in ranks:
                self.ranks[number].send(asked, "look")
            while waiting and time.monotonic() < asked + seconds:
                for rank in [self.ranks[number] for number in sorted(waiting)]:
                    rank.take_in()
                    if rank.looked >= asked or rank.ended():
                        waiting.remove(rank.number)
                        states[rank.number] = rank.state
                time.sleep(0.002 if waiting else 0)
        for number in ranks:
            if how := self.ranks[number].ended():
                states[number] = {"where": f"died: {how}"}
        silent = {"where": "not answering: native code holds its interpreter, or it still starts"}
        return {number: states.get(number, silent) for number in ranks}

    def check_alive(self) -> None:
        """Raise ClusterError when there are no ranks any more."""
        if self.lost:
            raise ClusterError(f"{self.lost}\nNo ranks are running: %dist_init starts afresh.")

    def _settle(self) -> None:
        """Before a request: wait for late ranks, and find out which ranks died meanwhile."""
        self.stopped = ""
        if self.late and not self.lost:
            answers, late = self._collect(self.late, give_up=self.late_until)
            where = self.look(sorted(late))
            answers |= {number: {"stuck": where[number]["where"]} for number in late}
            self.late = set()
            self._lose_if_gone(answers, f"did not come back in {self.grace:g} s and had to be ended")
        for rank in self.ranks if not self.lost else ():
            if how := rank.ended():
                rank.take_in()
                self._lose(f"rank {rank.number} died since the last cell: {how}{log_tail(rank)}")
        self.check_alive()

    def _lose_if_gone(self, answers: dict[int, dict], what: str) -> None:
        gone = {rank: answers[rank] for rank in answers if answers[rank].keys() & {"died", "stuck"}}
        if gone:
            stuck = [answer["stuck"] for answer in gone.values() if "stuck" in answer]
            self._lose(f"{span(gone)} {what}" + "".join(f": {where}" for where in stuck[:1]))

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self.processes.shutdown(patience=0.0)

    def shutdown(self) -> None:
        """End all ranks. If a cell is running for another thread, it fails first."""
        if not self.busy.acquire(blocking=False):
            for rank in self.ranks:
                rank.kill()
            self.busy.acquire(timeout=HOLD)
        self.processes.shutdown()

    def _collect(self, ranks, progress=None, give_up: float | None = None, limit: float = 0.0):
        """Read until these ranks have answered or it is time to `give_up`: answers, ranks left."""
        pending, answers, stopped = set(ranks), {}, False
        began = time.monotonic()
        with deferred_interrupt() as interrupts:
            while pending and (give_up is None or time.monotonic() < give_up):
                wait([source for rank in pending
                      for source in (self.ranks[rank].connection, self.ranks[rank].pipe)], 0.1)
                for number in sorted(pending):
                    if not (answer := self.ranks[number].answer_to(self.number)):
                        continue
                    answers[number] = answer
                    pending.remove(number)
                    if give_up is None and answer.keys() & set(FAILURES):
                        give_up = self._hurry(pending, self.grace)
                    if "died" in answer:
                        give_up = min(give_up, time.monotonic() + 1.0)
                seconds = time.monotonic() - began
                expired = limit and seconds > limit and give_up is None
                if pending and stopped and interrupts:
                    give_up = time.monotonic()  # a second interrupt does not wait for anything
                elif pending and (interrupts or expired):
                    why = "Interrupted" if interrupts else f"Time limit of {limit:g} s reached"
                    interrupts.clear()
                    give_up, stopped = self._stop(ranks, pending, why, seconds), True
                if progress:
                    progress(seconds)
            if stopped:
                interrupts.clear()  # the cell fails anyway
        if stopped:  # who has not even said that it is stuck holds the interpreter: ended too
            where = self.look(sorted(pending), 0.2)
            answers |= {number: {"stuck": where[number]["where"]} for number in pending}
            pending = set()
        return answers, pending

    def _stop(self, ranks, pending: set[int], why: str, seconds: float) -> float:
        """Interrupt the pending ranks; note what all did. Returns until when the cell waits for them."""
        states = self.look(ranks, 0.5).values()
        self.stopped = f"{why} after {seconds:.0f} s, when the ranks were:"
        for who, (where, stack) in alike(ranks, [(s["where"], s.get("stack", "")) for s in states]):
            self.stopped += f"\n{span(who)}: {where}{indented(stack)}"
        grace = min(self.grace, 2.5)
        return min(self._hurry(pending, grace, "stop"), time.monotonic() + grace + 1.2)

    def _hurry(self, pending, grace: float, kind: str = "hurry") -> float:
        """Start the grace period of these ranks. Returns until when the cell waits for them."""
        for number in pending:
            self.ranks[number].send(self.number, kind, grace)
        self.late_until = time.monotonic() + grace + 2.0
        return time.monotonic() + HOLD

class ClusterMagics(DistributedMagic):
    """nbdistributed's magics, on top of the two classes above.

    %dist_init -n 4      start ranks               %%distributed   a cell on all ranks
    %dist_shutdown       end them                  %%rank [0,2]    a cell on some ranks
    %dist_reset          the same                  %%local         a cell in the kernel
    %dist_status         what each is doing        %sync           a barrier
    %dist_mode -e | -d   plain cells go to the ranks, or to the kernel
    %dist_debug          nbdistributed's view of the processes
    """

    magics = {"line": {name: name for name in ("dist_init", "dist_shutdown", "dist_reset", "sync",
                                               "dist_status", "dist_mode", "dist_debug")},
              "cell": {name: name for name in ("distributed", "rank")}}
    grace = Float(10.0, help="seconds that busy ranks get after a failure").tag(config=True)
    timeout = Float(0.0, help="seconds that a cell may take; 0: any time").tag(config=True)

    def __init__(self, shell):
        super().__init__(shell)
        shell.input_transformers_cleanup.append(self._transform)

    def _register_timeline_handlers(self) -> None:
        """Nothing: they put JavaScript into each cell, and overwrite the kernel's names."""

    _setup_notebook_save_hook = _register_timeline_handlers

    # ---- which cell goes where

    def _transform(self, lines: list[str]) -> list[str]:
        """IPython passes each cell's lines through this, before it looks for magics."""
        code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        first = lines[0] if lines else ""
        if first.split() == ["%%local"]:
            return lines[1:]
        if re.match(r"%%(rank|distributed)\b", first):  # the empty line keeps line numbers right
            return [re.sub(r"^%%rank\s*", "%%rank ", first), "\n", *lines[1:]]
        if self._distributed_mode_active and code and code[0].lstrip()[0] not in "%!?":
            return ["%%distributed\n", *lines]
        return lines

    def _enable_distributed_mode(self) -> None:
        self._distributed_mode_active = True

    def _disable_distributed_mode(self) -> None:
        self._distributed_mode_active = False

    # ---- start and end

    @magic_arguments()
    @argument("--num-processes", "-n", type=int, default=2, help="how many ranks")
    @argument("--master-addr", "-a", default="localhost", help="of this machine; all ranks are here")
    @argument("--gpu-ids", "-g", default=None, help='one GPU per rank, such as "0,1,3"')
    @argument("--timeout", default=None, help="seconds that a cell may take; 0: any time")
    def dist_init(self, line):
        """Start ranks. Returns when all have joined the process group, or raises ClusterError."""
        args = parse_argstring(self.dist_init, line)
        n, running = args.num_processes, self._comm_manager
        if running and not running.lost and not running.late:
            raise ClusterError(f"{count(len(running.ranks))} already running: %dist_shutdown first.")
        if n < 1:
            raise ClusterError(f"--num-processes {n}: there must be at least one rank.")
        try:
            socket.getaddrinfo(args.master_addr, None)
        except OSError:
            raise ClusterError(f"--master-addr {args.master_addr} does not resolve.") from None
        wanted = parse_gpu_ids(args.gpu_ids, n)
        if args.timeout is not None:
            self.timeout = parse_seconds(args.timeout)
        self._end()
        processes = RankProcesses()
        try:
            processes.start_workers(n, args.master_addr)
            channel = RankChannel(processes, self.grace)
            answers = channel.gather(range(n), limit=START)  # a rank says hello when it has imported torch
            check_imports(channel)
            check(answers, channel)
            gpus, why = choose_gpus(answers[0]["gpus"], n, wanted)
            channel.number = 1
            for rank in channel.ranks:
                rank.device = f"GPU {gpus[rank.number]}" if gpus else "CPU"
                rank.send(1, "form", {"backend": "nccl" if gpus else "gloo",
                                      "gpu_id": gpus[rank.number] if gpus else None})
            check(channel.gather(range(n), limit=START), channel)
        except BaseException:
            processes.shutdown(patience=0.0)
            raise
        self._process_manager, self._comm_manager, self._num_processes = processes, channel, n
        self._enable_distributed_mode()
        threads = f"{processes.threads} thread{'s' * (processes.threads > 1)}"
        print(f"{count(n)} ready: {why}; {threads} per rank.\n"
              "Cells now run on all of them; each has torch, dist, rank, world_size, gpu_id, device.\n"
              '%%rank [0] runs a cell on some, %%local in the kernel; pull("name") fetches values.')

    def dist_shutdown(self, line):
        """End the ranks. Plain cells run in the kernel again."""
        ended = self._end()
        print(f"{count(ended)} ended." if ended else "No ranks are running.")

    dist_reset = dist_shutdown  # nothing is left over that a reset would have to clear

    def _end(self) -> int:
        """End our ranks, if there are any. Returns how many there were."""
        processes, channel = self._process_manager, self._comm_manager
        self._process_manager, self._comm_manager, self._num_processes = None, None, 0
        self._disable_distributed_mode()
        ended = len(processes.ranks) if processes else 0
        if channel:
            channel.shutdown()
        return ended

    @classmethod
    def shutdown_all(cls) -> None:
        """In nbdistributed the last resort, which ends processes by name. Here: our own, by pid."""
        if _magics:
            _magics._end()

    force_shutdown_all = _nuclear_shutdown = shutdown_all

    # ---- cells

    def distributed(self, line, cell):
        """%%distributed, %%distributed --timeout 60: run this cell on all ranks."""
        rest, timeout = split_timeout(line)
        if rest:
            raise ClusterError(f"%%distributed {line}: it takes --timeout SECONDS only.")
        self._run(range(len(self._channel().ranks)), cell, timeout)

    def rank(self, line, cell):
        """%%rank [0,2], %%rank [0-2], %%rank [0] --timeout 60: run this cell on these ranks."""
        rest, timeout = split_timeout(line)
        world_size = len(self._channel().ranks)
        ranks = parse_ranks(rest, world_size)
        if len(ranks) < world_size and (call := COLLECTIVE.search(cell)):
            print(f"Note: {call[0].rstrip('( ')} waits for every rank of its group, and this cell "
                  f"runs on {span(ranks)} only.")
        self._run(ranks, cell, timeout)

    def _run(self, ranks, cell: str, timeout: float | None = None) -> None:
        """Run a cell; while it takes long, show what there is so far, and replace it at the end.

        So the saved output depends on what the ranks printed, not on how long they took.
        """
        channel, shown = self._channel(), 0.0

        def progress(seconds: float) -> None:
            nonlocal shown
            if seconds - shown > (1 if shown else LIVE) and hasattr(self.shell, "kernel"):
                shown = seconds
                clear_output(wait=True)
                tails = [channel.ranks[rank].output.text(20) for rank in ranks]
                for who, text in alike(ranks, tails):
                    print(labelled(who, text), end="")
                print(f"... running for {seconds:.0f} s")
                states = channel.look(ranks, 0.2)
                for who, where in alike(ranks, [states[rank]["where"] for rank in ranks]):
                    print(f"    {span(who)}: {where}")

        # Not execution_count: some versions of IPython raise it before a cell runs, some after.
        request = {"code": cell, "cell": len(self.shell.user_ns["In"]) - 1}
        answers = channel.send_to_ranks(ranks, "execute", request, timeout, progress)
        if shown:
            clear_output()
        show(ranks, answers, [channel.ranks[rank].output.text() for rank in ranks])
        check(answers, channel)

    def sync(self, line):
        """%sync: a barrier of all ranks."""
        channel = self._channel()
        check(channel.send_to_all("sync"), channel)
        print(f"Synchronized {count(len(channel.ranks))}.")

    def dist_status(self, line):
        """What each rank is doing, its pid, device, memory and uptime. Also while a cell runs."""
        print(self.status(), end="")

    def status(self) -> str:
        channel = self._channel()
        channel.check_alive()
        states, text = channel.look(), ""
        for rank in channel.ranks:
            state, memory = states[rank.number], ""
            with contextlib.suppress(psutil.Error):
                used = psutil.Process(rank.process.pid).memory_info().rss
                memory = f"memory {used / 1e9:.2f} GB, "
            if "peak" in state:
                memory += f"peak memory {state['peak'] / 1e9:.2f} GB, "
            doing, device = state["where"], state.get("device", rank.device)
            if "request" in state:
                doing = f"running {state['request']} for {state['seconds']:.0f} s, {doing}"
            text += (f"rank {rank.number}: {doing}, pid {rank.process.pid}, {device}, {memory}"
                     f"up {time.time() - rank.started:.0f} s\n")
        return text

    def _channel(self) -> RankChannel:
        if self._comm_manager is None:
            raise ClusterError("No ranks are running: %dist_init --num-processes 4 starts four.")
        self._comm_manager.grace, self._comm_manager.limit = self.grace, self.timeout  # %config changes them
        return self._comm_manager


# ---- failures


def log_tail(rank: Rank) -> str:
    tail = "\n".join(line[:200] for line in rank.output.text(15).splitlines())
    return f"\nThe last that it printed:{indented(tail)}" if tail.strip() else ""


def check_imports(channel: RankChannel) -> None:
    """Raise ClusterError if a rank could not start because a package is missing."""
    for rank in channel.ranks:
        if rank.ended() and (missing := re.search(r"No module named '(.+?)'", rank.output.text(1))):
            raise ClusterError(f"The ranks cannot start: {sys.executable} has no module {missing[1]}.")


def check(answers: dict[int, dict], channel: RankChannel) -> None:
    """Raise ClusterError if a rank failed: the first failure in full, others in a line each."""
    failures: dict = {}  # answers came in order of time, so the first error is likely the cause
    for rank, answer in answers.items():
        for kind in answer.keys() & set(FAILURES):
            failure = answer[kind]
            if kind == "error":  # alike but for numbers: gloo's messages name ports
                failure = (failure["name"], failure["place"], re.sub(r"\d+", "#", failure["message"]))
            failures.setdefault((kind, failure), []).append(rank)
    parts = []
    if failures and channel.stopped:
        parts.append(channel.stopped)
    for (kind, failure), ranks in sorted(failures.items(), key=lambda f: FAILURES.index(f[0][0])):
        if kind == "died":
            part = f"{span(ranks)} died: {failure}{log_tail(channel.ranks[ranks[0]])}"
        elif kind == "error":
            error = answers[ranks[0]]["error"]
            part = f"{span(ranks)}: {': '.join(filter(None, [error['name'], error['message']]))}"
            part = part if not parts else part.splitlines()[0][:200]
            part += f" ({error['place']}: {error['source']})" if error["place"] else ""
            part += "" if parts else f"\n{error['traceback'].rstrip()}"
        elif kind == "stuck":
            part = f"{span(ranks)} did not stop and had to be ended: {failure}"
        elif not channel.lost:
            part = (f"{span(ranks)} did not finish: {failure}. Ended {channel.grace:g} s after the "
                    "failure, unless done by then; after that, %dist_init starts afresh.")
        else:
            continue
        parts.append(part)
    if failures and channel.lost:
        parts.append("All ranks are ended now: %dist_init starts afresh.")
    if parts:
        raise ClusterError("\n".join(parts))


# ---- interrupts


class Interrupts(list):
    """A signal handler that remembers what came."""

    def __call__(self, signum, frame) -> None:
        self.append(signum)


@contextlib.contextmanager
def deferred_interrupt():
    """Collect SIGINTs in a list, so that none raises KeyboardInterrupt halfway through a message.

    What is still in the list at the end is raised then, by the outermost of several.
    """
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or isinstance(before, Interrupts):
        yield interrupts  # signals arrive in the main thread only
        return
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


# ---- names for notebooks

_magics: ClusterMagics | None = None  # those of this kernel


def _running() -> RankChannel:
    if _magics is None:
        raise ClusterError("No ranks are running: %load_ext zero1_helpers, then %dist_init.")
    return _magics._channel()


def pull(expression: str, ranks: list[int] | None = None) -> list:
    """The values of a name or expression on all ranks (or these), as a list; tensors on the CPU.

    Raises ClusterError if it fails on a rank or the value cannot travel.
    """
    channel = _running()
    ranks = range(len(channel.ranks)) if ranks is None else ranks
    if unknown := [rank for rank in ranks if rank not in range(len(channel.ranks))]:
        raise ClusterError(f"pull: there is no {span(unknown)}.")
    answers = channel.send_to_ranks(ranks, "get_var", expression)
    check(answers, channel)
    try:
        return [pickle.loads(answers[rank]["value"]) for rank in ranks]
    except (AttributeError, ImportError) as error:
        raise ClusterError(f"pull({expression!r}): this class is not in the kernel: {error}") from None


def push(**values) -> None:
    """Set names on all ranks: push(lr=0.1). Raises ClusterError if a value cannot travel."""
    channel = _running()
    try:
        data = pickle.dumps(values)
    except Exception as error:
        raise ClusterError(f"push: {', '.join(values)} cannot be sent: {error}") from None
    check(channel.send_to_all("set_var", data), channel)


def load_ipython_extension(ipython) -> None:
    """`%load_ext zero1_helpers`: the magics, and pull and push unless these names are taken."""
    global _magics
    unload_ipython_extension(ipython)
    _magics = ClusterMagics(ipython)
    ipython.register_magics(_magics)
    ipython.user_ns.setdefault("pull", pull)
    ipython.user_ns.setdefault("push", push)
    kernel = os.getpid()  # a fork of the kernel must not end the ranks
    atexit.register(lambda: os.getpid() == kernel and ClusterMagics.shutdown_all())


def unload_ipython_extension(ipython) -> None:
    global _magics
    if _magics:
        _magics._end()
        ipython.input_transformers_cleanup.remove(_magics._transform)
        _magics = None
