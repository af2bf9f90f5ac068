"""What every byte is for: a memory ledger kept beside torch.profiler.

The profiler records every allocation, but not what it was for. The ledger adds that: at each phase of
a step it writes a marker into the trace, and notes which storages are parameters, gradients, optimizer
state or buckets. A block that is alive at a marker that names it has that category for its whole life;
a block that no marker ever names is an activation if it was born in the forward pass, a temporary if
born later in the step, and "other" before (the batch). So each category is exact, to the byte.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from zero1_helpers.bucket import TakenGradient, home
from zero1_helpers.memory_math import is_counter, local, state_entries

MARKER = "ledger "  # and its number: the name of a marker's event in the trace
WHOLE_PHASES = {"forward", "backward", "sync", "step", "broadcast", "receive"}


@dataclass(frozen=True)
class Note:
    """What was seen at one marker. `whole`: all parameters, gradients and state there are."""

    whole: bool
    found: dict[int, tuple[str, int]]  # address -> (category, bytes)
    gone: list[
        tuple[int, int | None]
    ]  # address, and the marker that announced it; None: a parameter's


class MemoryLedger:
    """A listener of `phases`; `notes[i]` belongs to marker i."""

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None):
        self.model, self.optimizer = model, optimizer
        self.notes: list[Note] = []
        self._announced: list[tuple[weakref.ref, int, int]] = []  # tensor, address, marker
        self._params: dict[torch.Tensor, None] = {}  # in the order in which they were seen
        self._buckets: dict[
            int, tuple[StorageWeakRef, int]
        ] = {}  # address -> whether it lives, bytes
        self._homes: dict[int, StorageWeakRef] = {}  # address -> whether parameters still lie there

    @torch.no_grad()
    def look(self) -> None:
        found = {}
        if self.model is not None:
            # All that were ever seen: FSDP2 shows shards or whole parameters, and holds both.
            self._params |= dict.fromkeys(self.model.parameters())
            grads = [p.grad for p in self._params if p.grad is not None]
            grads = [grad for grad in grads if type(grad) is not TakenGradient]  # it holds nothing
            in_memory = [
                home(local(p)) for p in self._params
            ]  # buckets, where parameters are parts of some
            self._add(found, "params", in_memory)
            homes = (t.untyped_storage() for t in in_memory)
            self._homes = {home.data_ptr(): StorageWeakRef(home) for home in homes}
            self._add(found, "grads", grads)
            self._add_buckets_of(found, grads)
        if self.optimizer is not None:
            entries = state_entries(self.optimizer)
            self._add(found, "opt_state", [value for key, value in entries if not is_counter(key)])
            self._add(found, "counters", [value for key, value in entries if is_counter(key)])
        self._mark(True, found)

    def announce(self, category: str, tensors: list[torch.Tensor]) -> None:
        found = {}
        self._add(found, category, tensors)
        self._mark(False, found)
        for t in tensors:
            address = t.untyped_storage().data_ptr()
            self._announced.append((weakref.ref(t), address, len(self.notes) - 1))

    def enter(self, name: str, index: int | None) -> None:
        if index is None and name in WHOLE_PHASES:
            self.look()

    leave = enter

    def _mark(self, whole: bool, found: dict) -> None:
        with record_function(f"{MARKER}{len(self.notes)}"):
            # A bucket's last reference may be dropped by a thread of gloo, where no profiler sees
            # the memory freed. The tensor object dies with it, and that is seen here.
            gone = [(address, marker) for t, address, marker in self._announced if t() is None]
            self._announced = [entry for entry in self._announced if entry[0]() is not None]
            # Nor does it see a parameter's memory end that was there before it: the parameter has moved.
            gone += [(address, None) for address, home in self._homes.items() if home.expired()]
            self._homes = {a: home for a, home in self._homes.items() if not home.expired()}
            self.notes.append(Note(whole, found, gone))

    def _add_buckets_of(self, found: dict, grads: list[torch.Tensor]) -> None:
        """Buckets of torch's DDP whose views are its gradients: they stay when zero_grad drops the views."""
        if getattr(self.model, "gradient_as_bucket_view", False):
            for storage in (grad.untyped_storage() for grad in grads):
                self._buckets[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._buckets = {
            a: bucket for a, bucket in self._buckets.items() if not bucket[0].expired()
        }
        for address, (_, size) in self._buckets.items():
            found.setdefault(address, ("grads", size))

    @staticmethod
    def _add(found: dict, category: str, tensors: list[torch.Tensor]) -> None:
        for storage in (local(t).untyped_storage() for t in tensors):
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), (category, storage.nbytes()))
