"""The notebook's side of the ranks: `%load_ext zero1_helpers` brings nbdistributed's magics, mended.

    kernel --- one socket pair per rank: requests, answers ---> rank.py, rank r
           <-- one pipe per rank: whatever it prints, native code included ---
                 ranks to each other: gloo or NCCL on the loopback interface

- Nothing here listens. A socket pair has no address, so nobody but the processes that we started can
  read, forge or send what the other side takes in. Ranks meet through a file in a private folder.
- channel.py talks to the ranks, in a thread of its own; job.py decides how long a request may take.
- A cell has no time limit unless it is given one (`--timeout`). It ends when all ranks have answered;
  if one fails, the others get a grace period (`%config ClusterMagics.grace = 10`), then are ended.
- worker.py is the parent of the ranks; it ends all that they started, also when the kernel is gone.
"""

import atexit
import os
import pickle
import re

from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import clear_output
from nbdistributed.magic import DistributedMagic
from traitlets import Float

from zero1_helpers.ranks.arguments import (
    ClusterError,
    parse_gpu_ids,
    parse_ranks,
    parse_seconds,
    route,
    split_timeout,
)
from zero1_helpers.ranks.channel import Channel
from zero1_helpers.ranks.failures import check
from zero1_helpers.ranks.interrupts import deferred_interrupt
from zero1_helpers.ranks.job import State
from zero1_helpers.ranks.output import count, show, span
from zero1_helpers.ranks.start import (
    check_address,
    check_assertions,
    describe_ranks,
    show_dropped,
    show_running,
    start,
)

LIVE = 2.0  # seconds after which a running cell shows what it has printed so far
COLLECTIVE = re.compile(
    r"\b((all_)?(reduce|gather)|broadcast|scatter|reduce_scatter|all_to_all)"
    r"(_into_tensor|_tensor|_single|_object|_object_list)?\s*\(|\bbarrier\s*\("
)


class ClusterMagics(DistributedMagic):
    """nbdistributed's magics, on top of channel.py.

    %dist_init -n 4      start ranks               %%distributed   a cell on all ranks
    %dist_shutdown       end them                  %%rank [0,2]    a cell on some ranks
    %dist_reset          the same                  %%local         a cell in the kernel
    %dist_status         what each is doing        %sync           a barrier
    %dist_mode -e | -d   plain cells go to the ranks, or to the kernel
    %dist_debug          what is running
    """

    magics = {
        "line": {
            name: name
            for name in (
                "dist_init",
                "dist_shutdown",
                "dist_reset",
                "sync",
                "dist_status",
                "dist_mode",
                "dist_debug",
            )
        },
        "cell": {name: name for name in ("distributed", "rank")},
    }
    grace = Float(10.0, help="seconds that busy ranks get after a failure").tag(config=True)
    timeout = Float(0.0, help="seconds that a cell may take; 0: any time").tag(config=True)

    def __init__(self, shell):
        super().__init__(shell)
        shell.input_transformers_cleanup.append(self._transform)

    def _register_timeline_handlers(self) -> None:
        """Nothing: they put JavaScript into each cell, and overwrite the kernel's names."""

    _setup_notebook_save_hook = _register_timeline_handlers

    def _transform(self, lines: list[str]) -> list[str]:
        return route(lines, self._distributed_mode_active)

    def _enable_distributed_mode(self) -> None:
        self._distributed_mode_active = True

    def _disable_distributed_mode(self) -> None:
        self._distributed_mode_active = False

    # ---- start and end

    @magic_arguments()
    @argument("--num-processes", "-n", type=int, default=2, help="how many ranks")
    @argument(
        "--master-addr", "-a", default="localhost", help="of this machine; all ranks are here"
    )
    @argument("--gpu-ids", "-g", default=None, help='one GPU per rank, such as "0,1,3"')
    @argument("--timeout", default=None, help="seconds that a cell may take; 0: any time")
    def dist_init(self, line):
        """Start ranks. Returns when all have joined the process group, or raises ClusterError."""
        args = parse_argstring(self.dist_init, line)
        n, running = args.num_processes, self._comm_manager
        check_assertions()
        if running and not running.lost and running.job.state is State.DONE:
            raise ClusterError(
                f"{count(len(running.ranks))} already running: %dist_shutdown first."
            )
        if n < 1:
            raise ClusterError(f"--num-processes {n}: there must be at least one rank.")
        check_address(args.master_addr)
        wanted = parse_gpu_ids(args.gpu_ids, n)
        if args.timeout is not None:
            self.timeout = parse_seconds(args.timeout)
        self._end()
        with deferred_interrupt():
            channel, why = start(n, args.master_addr, wanted, self.grace)
            self._process_manager, self._comm_manager = channel.processes, channel
            self._num_processes = n
            self._enable_distributed_mode()
        threads = channel.processes.threads
        print(
            f"{count(n)} ready: {why}; {threads} thread{'s' * (threads > 1)} per rank.\n"
            "Cells now run on all of them; each has torch, dist, rank, world_size, gpu_id, device.\n"
            '%%rank [0] runs a cell on some, %%local in the kernel; pull("name") fetches values.'
        )

    def dist_shutdown(self, line):
        """End the ranks. Plain cells run in the kernel again."""
        ended = self._end()
        print(f"{count(ended)} ended." if ended else "No ranks are running.")

    dist_reset = dist_shutdown  # nothing is left over that a reset would have to clear

    def _end(self) -> int:
        """End our ranks, if there are any. Returns how many there were."""
        channel = self._comm_manager
        self._process_manager, self._comm_manager, self._num_processes = None, None, 0
        self._disable_distributed_mode()
        if channel is None:
            return 0
        ended = 0 if channel.lost else len(channel.ranks)
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
            print(
                f"Note: {call[0].rstrip('( ')} waits for every rank of its group, and this cell "
                f"runs on {span(ranks)} only."
            )
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
                show_running(channel, ranks, seconds)

        # Not execution_count: some versions of IPython raise it before a cell runs, some after.
        number = len(self.shell.history_manager.input_hist_parsed) - 1
        job = channel.request(
            ranks, "execute", limit=timeout, progress=progress, code=cell, cell=number
        )
        if shown:
            clear_output()
        show(ranks, job.answers, [channel.ranks[rank].printed() for rank in ranks])
        show_dropped(channel)
        check(job, channel)

    def sync(self, line):
        """%sync: a barrier of all ranks."""
        channel = self._channel()
        check(channel.request(range(len(channel.ranks)), "sync"), channel)
        print(f"Synchronized {count(len(channel.ranks))}.")

    def dist_status(self, line):
        """What each rank is doing, its pid, device, memory and uptime. Also while a cell runs."""
        print(describe_ranks(self._channel()), end="")

    def dist_debug(self, line):
        """Whether plain cells go to the ranks, and the processes behind them."""
        running = self._process_manager
        print(
            f"Plain cells run on the ranks: {self._distributed_mode_active}\n"
            f"Parent of the ranks: {f'PID {running.process.pid}' if running else 'not running'}"
        )
        for rank in self._comm_manager.ranks if running else ():
            print(f"  rank {rank.number} (PID {rank.pid}): {rank.ended or 'running'}")

    def _channel(self) -> Channel:
        if self._comm_manager is None:
            raise ClusterError("No ranks are running: %dist_init --num-processes 4 starts four.")
        self._comm_manager.grace, self._comm_manager.limit = (
            self.grace,
            self.timeout,
        )  # %config changes them
        return self._comm_manager


# ---- names for notebooks

_magics: ClusterMagics | None = None  # those of this kernel


def _running() -> Channel:
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
    job = channel.request(ranks, "get_var", expression=expression)
    check(job, channel)
    try:
        values = {rank: pickle.loads(job.answers[rank].pop("payload")) for rank in set(ranks)}
        return [values[rank] for rank in ranks]
    except Exception as error:  # unpickling runs the code of the value's class
        raise ClusterError(
            f"pull({expression!r}): the value cannot be read, because its class is not in the kernel "
            f"or fails there: {type(error).__name__}: {error}"
        ) from None


def push(**values) -> None:
    """Set names on all ranks: push(lr=0.1). Raises ClusterError if a value cannot travel."""
    channel = _running()
    try:
        data = pickle.dumps(values)
    except Exception as error:
        raise ClusterError(f"push: {', '.join(values)} cannot be sent: {error}") from None
    check(channel.request(range(len(channel.ranks)), "set_var", data), channel)


def load_ipython_extension(ipython) -> None:
    """`%load_ext zero1_helpers`: the magics, and pull and push unless these names are taken."""
    global _magics
    check_assertions()
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
