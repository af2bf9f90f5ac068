"""The kernel's connections with its ranks: one thread reads and writes all of them, and never waits.

Whoever wants something of the ranks queues it here and waits for what the thread finds. So neither a
rank that does not read nor one that prints without end can stop the kernel, also between cells.
"""

import collections
import contextlib
import os
import select
import signal
import socket
import threading
import time
import traceback

from zero1_helpers.ranks.arguments import ClusterError
from zero1_helpers.ranks.interrupts import deferred_interrupt
from zero1_helpers.ranks.job import Job, State
from zero1_helpers.ranks.messages import Reader, pack
from zero1_helpers.ranks.output import Output, indented, span
from zero1_helpers.ranks.process import Processes

HOLD = 4.2  # seconds that a cell waits for the others after a failure; `grace` may be longer
PATIENCE = 3.0  # seconds that ranks get to end by themselves
TICK = 0.05  # seconds between two looks at the clock
SILENT = "not answering: native code holds its interpreter, or it still starts"


class Line:
    """One end of a socket pair that never blocks, and the pipe that the other side prints into."""

    def __init__(self, connection: socket.socket, pipe: int):
        self.connection, self.pipe, self.reader = connection, pipe, Reader()
        self.outgoing: collections.deque[memoryview] = collections.deque()
        self.output, self.broken, self.silent = Output(), "", False  # silent: nobody can print
        self.shown = self.output  # the output before this one

    def queue(self, message: dict, payload: bytes = b"") -> None:
        self.outgoing.extend(part for part in pack(message, payload) if len(part))

    def write(self) -> None:
        """Send as much as fits."""
        try:
            while self.outgoing:
                sent = self.connection.send(self.outgoing[0][: 1 << 20])
                self.outgoing[0] = self.outgoing[0][sent:]
                if not self.outgoing[0]:
                    self.outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more; how it ended, others say
            self.outgoing.clear()

    def read(self) -> list[tuple[dict, bytes]]:
        """The messages that have arrived; what was printed before them is in `output` then."""
        messages = []
        try:
            while not self.broken:
                if data := self.connection.recv(1 << 20):
                    messages += self.reader.feed(data)
                else:
                    self.broken = "it closed its connection to the kernel"
        except BlockingIOError:
            pass
        except OSError as error:
            self.broken = str(error)
        except ValueError:
            self.broken = "something other than a message came from it"
        if not self.silent:
            self.drain()
        return messages

    def drain(self) -> None:
        """Take in what it has printed."""
        with contextlib.suppress(OSError):  # nothing there
            for _ in range(64):  # more than a pipe holds; a rank may never stop printing
                if not (data := os.read(self.pipe, 1 << 16)):
                    self.silent = True
                    return
                self.output.add(data)

    def printed(self) -> str:
        """What it has printed since this was last asked."""
        self.shown, self.output = self.output, Output()
        return self.shown.text()

    def log_tail(self) -> str:
        output = self.output if self.output.text(1).strip() else self.shown
        tail = "\n".join(line[:200] for line in output.text(15).split("\n"))
        return f"\nThe last that it printed:{indented(tail)}" if tail.strip() else ""


class Rank(Line):
    """What the kernel knows of a rank."""

    def __init__(self, number: int, connection: socket.socket, pipe: int):
        super().__init__(connection, pipe)
        self.number, self.pid, self.started, self.device = number, None, time.time(), "CPU"
        self.ended = ""  # how the process ended
        self.answer: dict = {}  # the last one
        self.state, self.seen, self.asked = {}, -1.0, False  # what it does, since when we know it
        self.dropped = 0  # messages that were no answer of this process to the running request

    def answer_to(self, number: int) -> dict | None:
        """Its answer to this request, or {"died": how}, or None: not yet."""
        if self.answer.get("number") == number:
            return self.answer
        how = self.ended or self.broken
        return {"died": how} if how else None

    def take(self, message: dict, payload: bytes, number: int) -> None:
        """Keep a message of this rank. number: of the request that runs."""
        if message.get("pid") != self.pid:
            self.dropped += 1
        elif "state" in message:
            self.state, self.seen, self.asked = message["state"], time.monotonic(), False
        elif message.get("number") == number and self.answer.get("number") != number:
            self.answer = message | {"payload": payload}
        else:
            self.dropped += 1

    def look(self) -> None:
        """Ask what it does, unless it has not yet answered that."""
        if not self.asked and not self.ended:
            self.asked = True
            self.queue({"number": -1, "kind": "look"})

    def doing(self, since: float) -> dict:
        """What it did after this time."""
        if self.ended:
            return {"where": f"died: {self.ended}"}
        return self.state if self.seen >= since else {"where": SILENT}

    def interrupt(self) -> None:
        """KeyboardInterrupt in its request. Its pid is its own until its parent ends."""
        if self.pid and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)


class Channel:
    """All ranks of a cluster. Any thread may call it; one request runs at a time.

    grace: seconds that busy ranks get after another one has failed.
    limit: seconds that a request may take; 0: as long as it takes.
    """

    def __init__(self, processes: Processes, grace: float):
        self.processes, self.grace, self.limit = processes, grace, 0.0
        self.parent = Line(processes.control, processes.log)
        self.ranks = [
            Rank(number, *ends)
            for number, ends in enumerate(zip(processes.sockets, processes.pipes, strict=True))
        ]
        self.job = Job(0, self.ranks, grace)  # a rank says hello when it has started
        self.lines = [self.parent, *self.ranks]
        self.kernel = os.getpid()
        self.busy = threading.Lock()  # held while a request runs
        self.changed = threading.Condition()  # guards all of this, and tells of every change
        self.lost = ""  # why there are no ranks any more
        self.closed = False
        self.awake, self.wake = socket.socketpair()
        self.wake.setblocking(False)
        self.awake.setblocking(False)
        self.thread = threading.Thread(target=self._serve, daemon=True, name="ranks")
        self.thread.start()

    # ---- for any thread

    def hello(self, limit: float) -> Job:
        """Wait until all ranks have started; the answers say what they have."""
        with self.changed:
            self.job.limit, self.job.deadline = limit, self.job.began + limit
        with self.busy, deferred_interrupt() as interrupts:
            return self._wait_for(self.job, interrupts)

    def request(
        self,
        ranks,
        kind: str,
        payload: bytes = b"",
        limit: float | None = None,
        progress=None,
        **data,
    ) -> Job:
        """Ask these ranks and wait for their answers. limit: seconds; None: the usual one.

        Returns the job. Ranks that do not answer within a few seconds after a failure are "late".
        Raises ClusterError when there are no ranks, or when they are busy for another thread.
        """
        if not self.busy.acquire(blocking=False):
            raise ClusterError("The ranks still run a cell for another thread: see %dist_status.")
        try:
            with deferred_interrupt() as interrupts:
                self._wait_for(self.job, interrupts, hold=False)  # of late ranks
                self.check_alive()
                with self.changed:
                    limit = self.limit if limit is None else limit
                    self.job = Job(
                        self.job.number + 1, [self.ranks[r] for r in ranks], self.grace, limit
                    )
                    for rank in self.job.ranks:
                        rank.queue({"number": self.job.number, "kind": kind} | data, payload)
                self._wake()
                return self._wait_for(self.job, interrupts, progress)
        finally:
            self.busy.release()

    def look(self, ranks=None, seconds: float = 1.0) -> dict[int, dict]:
        """What these ranks do at this moment: {rank: state}. From any thread, while a cell runs.

        A state has "where" ("idle", "waiting in barrier (cell 4, line 2)"), and if the rank answers
        within these seconds: request, seconds (since its start), stack, device, peak (bytes).
        """
        asked = [self.ranks[rank] for rank in (range(len(self.ranks)) if ranks is None else ranks)]
        now = time.monotonic()
        with deferred_interrupt(), self.changed:
            for rank in asked:
                rank.look()
            self._wake()
            while (left := now + seconds - time.monotonic()) > 0:
                if all(rank.seen >= now or rank.ended for rank in asked):
                    break
                self.changed.wait(left)
            return {rank.number: rank.doing(now) for rank in asked}

    def check_alive(self) -> None:
        """Raise ClusterError when there are no ranks any more."""
        if os.getpid() != self.kernel:
            raise ClusterError(
                "Only the kernel itself can use the ranks, not a process that it started."
            )
        if self.lost:
            raise ClusterError(f"{self.lost}\nNo ranks are running: %dist_init starts afresh.")

    def shutdown(self, patience: float = PATIENCE) -> None:
        """End all ranks. If a cell is running for another thread, it fails."""
        with deferred_interrupt(), self.changed:
            deadline = time.monotonic() + (0 if self.lost else patience)
            if self.job.state is State.DONE:
                for rank in self.ranks:
                    rank.queue({"number": -1, "kind": "shutdown"})
                self.lost = self.lost or "The ranks were ended by %dist_shutdown."
                self._wake()
                while not all(r.ended for r in self.ranks) and time.monotonic() < deadline:
                    self.changed.wait(TICK)
            self._lose("The ranks were ended by %dist_shutdown.")
            self.closed = True
            self._wake()
        self.thread.join()
        self.processes.close()

    def _wait_for(self, job: Job, interrupts: list, progress=None, hold: bool = True) -> Job:
        """Wait until a job is done, or, after a failure, for as long as a cell is held up."""
        while True:
            with self.changed:
                job.interrupts += len(interrupts)
                interrupts.clear()
                if job.state is State.DONE:
                    return job
                self.changed.wait(TICK)
            if hold and not job.why and time.monotonic() > job.failed_at + HOLD:
                states = self.look([rank.number for rank in job.pending], 0.3)
                job.late = {number: {"late": state["where"]} for number, state in states.items()}
                return job
            if progress and not job.why:
                progress(time.monotonic() - job.began)

    # ---- the thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway
            self.wake.send(b"x")

    def _serve(self) -> None:
        while not self.closed:
            self._wait_for_something()
            with self.changed:
                try:
                    self._go_on()
                except Exception:  # an error of ours must not leave anybody waiting
                    self._lose(f"The notebook layer failed:\n{traceback.format_exc()}")
                self.changed.notify_all()
        self.awake.close()
        self.wake.close()

    def _wait_for_something(self) -> None:
        poll = select.poll()
        poll.register(self.awake, select.POLLIN)
        for line in self.lines:
            if not line.broken:
                poll.register(
                    line.connection, select.POLLIN | (select.POLLOUT if line.outgoing else 0)
                )
            if not line.silent:
                poll.register(line.pipe, select.POLLIN)
        poll.poll(1000 if self.job.state is State.DONE else 1000 * TICK)
        with contextlib.suppress(BlockingIOError):
            self.awake.recv(4096)

    def _go_on(self) -> None:
        """Read and write, let the running job see it, and find out whether ranks are lost."""
        for line in self.lines:
            line.write()
            for message, payload in line.read():
                if line is self.parent:
                    self._take(message)
                else:
                    line.take(message, payload, self.job.number)
        if self.parent.broken and not self.lost:
            how = describe_exit(self.processes.process.wait())
            for rank in self.ranks:
                rank.ended = rank.ended or how
        if self.job.state is not State.DONE:
            self.job.advance(time.monotonic())
        if self.job.state is State.DONE and not self.lost:
            self._find_lost()

    def _take(self, message: dict) -> None:
        """What the parent says: how the ranks have started, or how one has ended."""
        if "pids" in message:
            self.processes.folder = message["folder"]
            for rank in self.ranks:
                rank.pid = message["pids"][rank.number]
        else:
            rank = self.ranks[message["rank"]]
            rank.ended = describe_exit(message["code"])

    def _find_lost(self) -> None:
        """A rank that is gone takes all with it: no collective could work again."""
        stuck = {
            number: answer["stuck"]
            for number, answer in self.job.answers.items()
            if "stuck" in answer
        }
        if stuck:
            where = next(iter(stuck.values()))
            self._lose(
                f"{span(stuck)} did not come back in an earlier cell and had to be ended: {where}"
            )
        elif any("died" in answer for answer in self.job.answers.values()):
            self._lose(
                f"{span(n for n, a in self.job.answers.items() if 'died' in a)} ended during "
                "an earlier cell"
            )
        elif dead := [rank for rank in self.ranks if rank.ended or rank.broken]:
            rank = dead[0]
            self._lose(
                f"rank {rank.number} died since the last cell: "
                f"{rank.ended or rank.broken}{rank.log_tail()}"
            )

    def _lose(self, reason: str) -> None:
        """End all ranks. What was asked of them fails."""
        self.lost = self.lost or reason
        self.processes.end()
        for rank in self.ranks:
            rank.read()
            rank.ended = rank.ended or "ended by the notebook layer"
        if self.job.state is not State.DONE:
            self.job.advance(time.monotonic())


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
