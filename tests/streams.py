"""A stand-in for CUDA's streams on a CPU: it runs everything at once and writes down who must wait for whom.

Each stream has a clock for each stream: how much of that one's queue is surely done before its own next
kernel. `wait_stream` and `work.wait()` bring clocks up to date, nothing else does. With that, three faults
can be told without a GPU, whatever the timing would have been:

- a kernel reads memory whose last write it does not wait for;
- a kernel writes memory that another stream may still be reading or writing;
- memory is given away (its last tensor is gone) while another stream than the one that allocated it has work
  on it queued, and nobody said so by `record_stream`.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero1_helpers import flat_bucket, streams


class Stream:
    def __init__(self, name="side"):
        self.name, self.clock = name, {}

    def tick(self) -> int:
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def wait_stream(self, other, upto=None):
        for stream, time in (upto or other.clock).items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def has_seen(self, stream, time) -> bool:
        return stream is self or self.clock.get(stream, 0) >= time

    def __repr__(self):
        return self.name


@dataclass(eq=False)
class Block:
    """Memory, as the caching allocator sees it."""

    storage: StorageWeakRef
    begin: int
    end: int
    home: Stream  # the stream that allocated it
    uses: dict[Stream, int] = field(default_factory=dict)  # the last kernel of each stream on it
    write: tuple[Stream, int] | None = None
    recorded: set[Stream] = field(default_factory=set)


class Work:
    """What a collective returns. Like NCCL's, it keeps its tensors until somebody waits."""

    def __init__(self, streams, tensors):
        self.streams, self.tensors, self.done = streams, tensors, dict(streams.nccl.clock)

    def wait(self):
        self.streams.current.wait_stream(None, upto=self.done)
        self.tensors = None


class Streams(TorchDispatchMode):
    """Takes the place of `torch.cuda` in `zero1_helpers.streams`."""

    def __init__(self):
        super().__init__()
        self.compute, self.nccl = Stream("compute"), Stream("nccl")
        self.current, self.blocks, self.faults, self.quiet = self.compute, [], [], False
        self.kernels = {}  # how many each stream has had

    # as torch.cuda

    def Stream(self):
        return Stream()

    def current_stream(self):
        self.collect()
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # what happens to memory

    def collect(self):
        """Memory whose tensors are gone since the last look is given away."""
        for block in [b for b in self.blocks if b.storage.expired()]:
            self.blocks.remove(block)
            for stream, time in block.uses.items():
                # the allocator waits for the end of each recorded stream, and so for all that it has seen
                if not any(s.has_seen(stream, time) for s in (block.home, *block.recorded)):
                    self.faults.append(
                        f"memory of {block.home} is given away, {stream} has it queued"
                    )

    def block_of(self, t):
        storage = t.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
        if not begin or not size:
            return None
        for block in self.blocks:
            if block.begin <= begin < block.end:
                return block
        self.blocks.append(Block(StorageWeakRef(storage), begin, begin + size, self.current))
        return self.blocks[-1]

    def kernel(self, stream, reads, writes):
        time = stream.tick()
        self.kernels[stream.name] = self.kernels.get(stream.name, 0) + 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for block in {id(b): b for b in map(self.block_of, tensors) if b is not None}.values():
                if block.write and not stream.has_seen(*block.write):
                    self.faults.append(
                        f"{stream} uses what {block.write[0]} has not surely written"
                    )
                if is_write:
                    for other, at in block.uses.items():
                        if not stream.has_seen(other, at):
                            self.faults.append(f"{stream} writes what {other} may be using")
                    block.write = stream, time
                block.uses[stream] = time

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.collect()
        kwargs = kwargs or {}
        reads, writes = [], []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(tensors_in(value))
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                written = argument.alias_info is not None and argument.alias_info.is_write
                (writes if written else reads).extend(tensors_in(kwargs[argument.name]))
        out = func(*args, **kwargs)
        views = [
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        ]
        if not self.quiet and not (views and all(views)) and func.namespace == "aten":
            self.kernel(self.current, reads, [*writes, *tensors_in(out)])
        return out

    # collectives

    def collective(self, real, reads, writes):
        def issue(*args, async_op=False, **kwargs):
            self.collect()
            self.quiet = True
            try:
                real(*args, **kwargs)
            finally:
                self.quiet = False
            self.nccl.wait_stream(self.current)
            used = [args[i] for i in {*reads, *writes}]
            self.kernel(self.nccl, [args[i] for i in reads], [args[i] for i in writes])
            work = Work(self, used)
            del used, args
            return work if async_op else work.wait()

        return issue


def tensors_in(value):
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


@contextmanager
def pretend_gpu():
    """Inside, every parameter counts as one on a GPU; yields the Streams that look on."""
    seen = Streams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "cuda", seen)
        patch.setattr(streams, "on_gpu", lambda t: True)

        def record_stream(t, stream):
            if block := seen.block_of(t):
                block.recorded.add(stream)

        patch.setattr(torch.Tensor, "record_stream", record_stream)
        for module, op, reads, writes in (
            (dist, "all_reduce", (0,), (0,)),
            (dist, "broadcast", (0,), (0,)),
            (flat_bucket, "reduce_scatter", (1,), (0,)),
            (flat_bucket, "all_gather", (1,), (0,)),
        ):
            patch.setattr(module, op, seen.collective(getattr(module, op), reads, writes))
        with seen:
            yield seen
        seen.collect()
