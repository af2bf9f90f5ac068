"""Phases of a training step, under names that the trace, the memory ledger and the notebooks share.

A class that works behind the backward pass says what it does and with which tensors::

    with phase("launch", 3):          # "zero1.launch 3" in the profiler's trace
        announce("buckets", [flat])   # "from now on this storage is a bucket"

Nobody has to listen: without a listener or a profiler both cost less than a microsecond.
"""

from collections.abc import Iterable
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.profiler import record_function

listeners = []  # objects with .enter(name, index), .leave(name, index) and .announce(category, tensors)


def phase(name: str, index: int | None = None):
    """Mark a stretch of a step: `name`, and which bucket or parameter it works on."""
    seen = listeners or torch.autograd._profiler_enabled()
    return _phase(name, index) if seen else UNSEEN


UNSEEN = nullcontext()


@contextmanager
def _phase(name: str, index: int | None):
    for listener in listeners:
        listener.enter(name, index)
    with record_function(f"zero1.{name}" if index is None else f"zero1.{name} {index}"):
        yield
    for listener in listeners:
        listener.leave(name, index)


def announce(category: str, tensors: Iterable[Tensor]) -> None:
    """Tell listeners what these tensors are: "params", "grads", "opt_state", "buckets" or "temporaries"."""
    if listeners:
        tensors = list(tensors)
        for listener in listeners:
            listener.announce(category, tensors)
