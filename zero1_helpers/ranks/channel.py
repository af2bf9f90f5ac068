"""The kernel's connections with its ranks: one thread reads and writes all of them, and never waits.

Whoever wants something of the ranks queues it here and waits for what the thread finds. So neither a
rank that does not read nor one that prints without end can stop the kernel, also between cells.
"""

import contextlib
import os
import select
import socket
import threading
import time
import traceback

from zero1_helpers.ranks.arguments import ClusterError
from zero1_helpers.ranks.interrupts import deferred_interrupt
from zero1_helpers.ranks.job import Job, State
from zero1_helpers.ranks.line import Line, Rank
from zero1_helpers.ranks.output import span
from zero1_helpers.ranks.process import Processes, describe_exit

HOLD = 4.2  # seconds that a cell waits for the others after a failure; `grace` may be longer
PATIENCE = 2.0  # seconds that ranks get to end by themselves
TICK = 0.05  # seconds between two looks at the clock


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
                        self.job.number + 1,
                        [self.ranks[r] for r in sorted(set(ranks))],
                        self.grace,
                        limit,
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
                    self.lost = f"The notebook layer failed:\n{traceback.format_exc()}"
                    with contextlib.suppress(Exception):
                        self._lose(self.lost)
                    self.job.state = State.DONE
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
            for rank in self.ranks:
                rank.ended = rank.ended or self.processes.how_it_ended()
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
            self.ranks[message["rank"]].ended = describe_exit(message["code"])

    def _find_lost(self) -> None:
        """A rank that is gone takes all with it: no collective could work again."""
        failed = self.job.answers.items()
        gone = {rank: answer for rank, answer in failed if answer.keys() & {"died", "stuck"}}
        stuck = [answer["stuck"] for answer in gone.values() if "stuck" in answer]
        dead = [rank for rank in self.ranks if rank.gone]
        if stuck:
            self._lose(
                f"{span(gone)} did not come back in {self.job.grace:g} s and had to be ended: "
                f"{stuck[0]}"
            )
        elif gone:
            self._lose(f"{span(gone)} ended during an earlier cell")
        elif dead:
            how = f"{dead[0].gone}{dead[0].log_tail()}"
            self._lose(f"rank {dead[0].number} died since the last cell: {how}")

    def _lose(self, reason: str) -> None:
        """End all ranks. What was asked of them fails."""
        self.lost = self.lost or reason
        self.processes.end()
        for rank in self.ranks:
            rank.read()
            rank.ended = rank.ended or "ended by the notebook layer"
        if self.job.state is not State.DONE:
            self.job.advance(time.monotonic())
