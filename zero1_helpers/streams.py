"""CUDA's streams, in one place. On a CPU there are none, and every function here does nothing.

A kernel is queued on a stream, and each stream works through its queue in order. Two streams know nothing
of each other, so three things have to be said: what waits for what (`on_stream` on the way in, `join` on the
way back), and which memory must not be given away yet (`keep`). PyTorch gives a tensor's memory to the next
tensor of the stream that allocated it as soon as Python drops the tensor, whether or not another stream has
still queued work on it. NCCL has a stream of its own: `work.wait()` makes the current stream wait for it,
and no other.
"""

from collections.abc import Iterable
from contextlib import contextmanager

import torch
from torch import Tensor

cuda = torch.cuda  # what makes and knows streams; the tests put a stand-in here


def on_gpu(t: Tensor) -> bool:
    return t.is_cuda


def side_stream(params: Iterable[Tensor]):
    """A stream beside the current one, or None if these parameters are on a CPU."""
    return cuda.Stream() if any(on_gpu(p) for p in params) else None


@contextmanager
def on_stream(stream, use: Iterable[Tensor | None] = ()):
    """Queue what follows on `stream`, after all that the current stream has queued.

    `use` lists the tensors that the work on `stream` reads or writes and that somebody may drop before it
    is done. The current stream allocated them; they are kept until `stream` has used them.
    """
    if stream is None:
        del use  # this generator is no reason for a tensor to live on
        yield
        return
    stream.wait_stream(cuda.current_stream())
    keep(use, stream)
    del use
    with cuda.stream(stream):
        yield


def join(stream) -> None:
    """From here on the current stream sees all that `stream` has queued so far."""
    if stream is not None:
        cuda.current_stream().wait_stream(stream)


def keep(tensors: Iterable[Tensor | None], stream=None) -> None:
    """Memory of these tensors is not given away before `stream` (the current one) is done with it."""
    for t in tensors:
        if t is not None and on_gpu(t):
            t.record_stream(stream or cuda.current_stream())
