"""An emulated interconnect: gloo with the pace of a link that you choose.

On a laptop the "network" between ranks is a copy by the cores that also compute, so nothing can hide
behind anything. Here the data still travels by gloo, and results stay exact, but a collective is
complete no earlier than a link of the given latency and bandwidth would have it::

    issue   begin = when this rank's link is free;  deadline = begin + latency + bytes sent / bandwidth
    wait    wait for gloo, then sleep until the deadline

A waiting rank sleeps, as a GPU's copy engine leaves the cores alone. Collectives of one rank queue on
its one link. What each sends is the ring algorithms' count, `memory_math.RING_FACTOR`. Nothing can be
faster than gloo itself: an operation that gloo ends after its deadline is `late`, and a run in which
many are late says so. Over NCCL there is nothing to emulate, and nothing of this is used.
"""

import os
import queue
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.profiler import record_function

from zero1_helpers.collectives import combine, empty_parts
from zero1_helpers.measure.link import Link, parse_link
from zero1_helpers.measure.passage import Passage, lane
from zero1_helpers.memory_math import nbytes

BACKEND = "emulated"  # its name in torch.distributed


class Transfer(dist.Work):
    """What a caller of a collective waits for: gloo, and then the link."""

    def __init__(self, passage: Passage, work: dist.Work, result, finish=None):
        super().__init__()
        self.passage, self._work, self._result, self._finish = passage, work, result, finish
        work.get_future().add_done_callback(passage.stamp)

    def wait(self, timeout=None) -> bool:
        self._work.wait()
        self.passage.stamp()
        time.sleep(max(0, self.passage.deadline - time.time_ns()) / 1e9)
        finish, self._finish = self._finish, None
        if finish:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed() and time.time_ns() >= self.passage.deadline

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list:
        return self._result

    def get_future(self) -> torch.futures.Future:
        """Set by one thread, in the order of the link. Made only for those who ask (torch's DDP)."""
        future = torch.futures.Future()
        _futures().put((self, future))
        return future


COMBINE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class EmulatedLink(dist.ProcessGroup):
    """A process group over gloo whose collectives keep to the pace of `lane.link`."""

    def __init__(self, gloo: dist.ProcessGroup):
        super().__init__(gloo.rank(), gloo.size())
        self.gloo = gloo

    def _carry(self, op, moved, result, method, *args, finish=None) -> Transfer:
        passage = lane.carry(op, nbytes(moved), self.size())
        with record_function(f"c10d::{op}"):  # where it was issued: the lane view looks for this
            work = getattr(self.gloo, method)(*args)
        return Transfer(passage, work, result, finish)

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self._carry("all_reduce", tensors, tensors, "allreduce", tensors, opts)

    def broadcast(self, tensors, opts):
        return self._carry("broadcast", tensors, tensors, "broadcast", tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        opts = opts or AllgatherOptions()
        return self._carry("all_gather", outputs[0], outputs, "allgather", outputs, inputs, opts)

    def all_gather_single(self, output, input, opts=None):
        opts = opts or AllgatherOptions()
        return self._carry("all_gather", [output], [output], "_allgather_base", output, input, opts)

    def reduce_scatter_single(self, output, input, opts=None):
        """By an all-to-all, see `collectives`; with any operation, as others than we use it, too."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        function = next((function for known, function in COMBINE.items() if op == known), None)
        if function is None:
            raise NotImplementedError(f"the emulated link's reduce_scatter does not know {op}")
        parts = empty_parts(input)

        def combine_parts():
            combine(parts, function, output)
            if op == dist.ReduceOp.AVG:
                output.div_(self.size())

        asked = (parts.detach(), input.detach().contiguous(), [], [], dist.AllToAllOptions())
        return self._carry(
            "reduce_scatter", [input], [output], "alltoall_base", *asked, finish=combine_parts
        )

    def reduce_scatter(self, outputs, inputs, opts=None):
        return self.reduce_scatter_single(outputs[0], torch.stack(inputs[0]), opts)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def barrier(self, opts=None):
        return self.gloo.barrier(opts or dist.BarrierOptions())  # free: it carries no data

    @property
    def group_name(self) -> str:  # device meshes (FSDP2) ask for it
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self):
        return BACKEND


def _unknown(op):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError(
            f"the emulated link does not know what {op} costs; it knows all_reduce, broadcast, "
            "all_gather and reduce_scatter"
        )

    return refuse


def _make_group(store, rank: int, size: int, timeout) -> EmulatedLink:
    return EmulatedLink(dist.ProcessGroupGloo(store, rank, size, timeout))


for _op in (
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "allreduce_coalesced",
):
    setattr(EmulatedLink, _op, _unknown(_op))


dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu"])


def emulate(link: Link | str | None) -> Link | None:
    """From here on the default group, and groups made later, have this link; None takes it away.

    Called on every rank of a gloo group. A text is read by `parse_link`; "auto" needs a workload to
    measure: see `training.auto_link`.
    """
    if isinstance(link, str):
        link = parse_link(link)
    backend = dist.get_backend()
    if backend not in ("gloo", BACKEND):
        raise ValueError(
            f"a link is emulated over gloo, not over {backend}: there the link is a real one"
        )
    if link is not None and backend != BACKEND:
        bind_to_cores()
        dist.distributed_c10d._update_default_pg(dist.new_group(backend=BACKEND))
    lane.link = link
    return link


def bind_to_cores() -> None:
    """Give this rank, and the threads that it starts from here on, its even share of the cores.

    Left to the system, two ranks may share a core while a third has one to itself: they drift apart by
    tenths of a second, and all wait for the last. As mpirun's --bind-to does; not on macOS.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    first = rank * each % len(cores)
    os.sched_setaffinity(0, cores[first : first + each])


def current() -> Link | None:
    """The link of the default group; None: it has none, or is not an emulated one any more."""
    return lane.link if dist.is_initialized() and dist.get_backend() == BACKEND else None


def transport() -> str:
    """The backend that moves the data: gloo under an emulated link, otherwise the default group's."""
    backend = dist.get_backend()
    return "gloo" if backend == BACKEND else backend


_queue, _queue_lock = None, threading.Lock()


def _futures() -> queue.SimpleQueue:
    """The queue of the thread that sets futures; started when the first one is asked for."""
    global _queue
    with _queue_lock:
        if _queue is None:
            _queue = queue.SimpleQueue()
            threading.Thread(target=_set_futures, daemon=True, name="link futures").start()
    return _queue


def _set_futures() -> None:
    while True:
        transfer, future = _queue.get()
        try:
            transfer.wait()
            future.set_result(transfer.result())
        except BaseException as error:  # gloo's: the peer is gone
            future.set_exception(error)
