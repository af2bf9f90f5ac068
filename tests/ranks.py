"""Run a function on several ranks, in processes that are used again from test to test.

`ranks(fn, world_size, *args)` runs `fn(rank, world_size, *args)` on every rank, in a fresh gloo
group, and returns the results. `fn` is a top-level function of a test module: it travels by name.

- A rank raises or dies: RankError, with the traceback of the rank that failed first.
- A rank gives no answer for `timeout` seconds: RankHang, with the Python stacks of all such ranks.
After either, these processes are ended, by pid, and the next call starts new ones.
"""

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

START_TIMEOUT = 120  # seconds; importing torch on a busy machine
GRACE = 2  # seconds that the other ranks get once one of them has failed
GROUP_TIMEOUT = timedelta(hours=1)  # never gloo's own limit first: a hang is reported by stacks


class RankError(RuntimeError):
    """A rank raised or died. `failures` maps each failed rank to its traceback."""

    def __init__(self, message, failures):
        super().__init__(message)
        self.failures = failures


class RankHang(RankError):
    """At least one rank gave no answer in time; the message holds the stacks of all ranks."""


def _worker(rank, conn, stacks):
    """Body of one process: answer calls until the pipe closes or the parent is gone."""
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"), all_threads=True)
    parent = mp.parent_process().sentinel
    threading.Thread(target=lambda: (wait([parent]), os._exit(1)), daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    conn.send_bytes(b"ready")
    while True:
        try:
            call = conn.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            answer = pickle.dumps((True, _run(rank, *pickle.loads(call))))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        conn.send_bytes(answer)


def _run(rank, store, world_size, fn, args):
    import torch

    from zero1_helpers.measure.meet import group

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    with group(store, rank, world_size, timeout=GROUP_TIMEOUT):
        return fn(rank, world_size, *args)


class Ranks:
    """A pool of processes; a call with world_size w uses the first w of them."""

    def __init__(self):
        self._ctx = mp.get_context("spawn")
        self._dir = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pool = []  # (process, pipe, file of stacks), by rank
        self._calls = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def pids(self):
        return [process.pid for process, _, _ in self._pool]

    def __call__(self, fn, world_size, *args, timeout=120):
        """Results by rank. `timeout`: seconds for the call, the start of processes apart."""
        try:
            self._start(world_size)
            self._calls += 1
            store = os.path.join(self._dir.name, f"store{self._calls}")
            call = pickle.dumps((store, world_size, fn, args))
            for _, conn, _ in self._pool[:world_size]:
                conn.send_bytes(call)
            return self._collect(world_size, timeout, fn.__qualname__)
        except BaseException:
            self._end()  # whatever the ranks are doing now, no later test may meet it
            raise

    def _start(self, world_size):
        first = len(self._pool)
        for rank in range(first, world_size):
            conn, theirs = self._ctx.Pipe()
            stacks = Path(self._dir.name) / f"stacks{rank}.{self._calls}"
            process = self._ctx.Process(
                target=_worker, args=(rank, theirs, str(stacks)), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pool.append((process, conn, stacks))
        for rank, (_, conn, _) in enumerate(self._pool[first:], first):
            try:
                ready = conn.poll(START_TIMEOUT) and conn.recv_bytes()
            except EOFError:
                ready = False
            if not ready:
                raise RankError(f"rank {rank} did not start", {rank: "did not start"})

    def _collect(self, world_size, timeout, name):
        results, failures = {}, {}  # rank -> result, rank -> traceback; in order of arrival
        pending = {conn: rank for rank, (_, conn, _) in enumerate(self._pool[:world_size])}
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            for conn in wait(list(pending), left):
                rank = pending.pop(conn)
                try:
                    ok, value = pickle.loads(conn.recv_bytes())
                except (EOFError, OSError):
                    self._pool[rank][0].join(GRACE)
                    ok, value = False, f"died, exit code {self._pool[rank][0].exitcode}\n"
                (results if ok else failures)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE)
        report = [f"rank {rank} of {world_size}: {text}" for rank, text in failures.items()]
        if pending:
            waiting = sorted(pending.values())
            report.append(f"no answer from rank {', '.join(map(str, waiting))}; stacks:")
            report += [f"--- rank {rank}\n{text}" for rank, text in self._stacks(waiting).items()]
        if failures:
            raise RankError(f"{name} failed\n" + "\n".join(report), failures)
        if pending:
            raise RankHang(f"{name} hangs: {timeout} s are over\n" + "\n".join(report), failures)
        return [results[rank] for rank in range(world_size)]

    def _stacks(self, ranks):
        """rank -> stacks of all its threads; asked for by signal, so a blocked rank answers too."""
        for rank in ranks:
            os.kill(self._pool[rank][0].pid, signal.SIGUSR1)
        sizes, until = None, time.monotonic() + 5
        while time.monotonic() < until:
            now = [self._pool[rank][2].stat().st_size for rank in ranks]
            if all(now) and now == sizes:
                break
            sizes = now
            time.sleep(0.05)
        return {rank: self._pool[rank][2].read_text() for rank in ranks}

    def _end(self):
        for process, conn, _ in self._pool:
            process.kill()
            process.join()
            conn.close()
        self._pool.clear()

    def close(self):
        self._end()
        self._dir.cleanup()
