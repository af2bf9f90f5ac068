"""One training loop for every variant.

The loop is the same for all. What differs is what is called between `backward()` and the next batch.
"""

from collections.abc import Callable, Iterable
from itertools import islice

import torch
from torch import nn

from zero1_helpers.measure.profiler import RunProfiler
from zero1_helpers.phases import phase


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[dict],
    after_backward: Callable,
    profiler: RunProfiler | None = None,
) -> list[float]:
    """One step for each batch; returns this rank's losses.

    `after_backward(model, optimizer)` is what one variant does and another does not.
    """
    device = next(model.parameters()).device
    losses = []
    for batch in batches:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        with phase("backward"):
            loss.backward()
        after_backward(model, optimizer)
        losses.append(loss.item())
        del loss, batch  # nothing of this step is alive at its edge
        if profiler is not None:
            profiler.step(losses[-1])
    return losses


def sync_step(model, optimizer) -> None:
    model.sync_gradients()
    optimizer.step()
    optimizer.zero_grad()


def wait_step(model, optimizer) -> None:
    model.wait_for_gradients()
    optimizer.step()
    optimizer.zero_grad()


def flush_wait_step(model, optimizer) -> None:
    model.flush_bucket()
    wait_step(model, optimizer)


def flush_wait_receive(model, optimizer) -> None:
    model.flush_bucket()
    model.wait_for_gradients()
    model.wait_for_broadcasts()


def warm_up(model: nn.Module, batches: Iterable[dict], passes: int = 2) -> None:
    """Forward and backward passes that change nothing: the heap grows, and libraries choose their kernels."""
    for batch in islice(batches, passes):
        batch = {name: tensor.to(next(model.parameters()).device) for name, tensor in batch.items()}
        model(**batch).loss.backward()
        model.zero_grad()


def endless(loader: Iterable[dict]) -> Iterable[dict]:
    """The batches of one epoch after another."""
    if len(loader) == 0:
        raise ValueError(
            f"{len(loader.dataset)} examples are too few for a batch of {loader.batch_size}"
        )
    while True:
        yield from loader
