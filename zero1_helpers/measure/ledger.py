"""What every byte is for: a memory ledger kept beside torch.profiler.

The profiler records every allocation, but not what it was for. The ledger adds that: at each phase of
a step it writes a marker into the trace, and notes which storages are parameters, gradients, optimizer
state or buckets. A block that is alive at a marker that names it has that category for its whole life;
a block that no marker ever names is an activation if it was born in the forward pass, a temporary if
born later in the step, and "other" before (the batch). So each category is exact, to the byte.
"""

import weakref
from dataclasses import dataclass

import pandas as pd
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from zero1_helpers.bucket import TakenGradient
from zero1_helpers.measure.runs import STATES
from zero1_helpers.memory_math import is_counter, local, state_entries

MARKER = "ledger "  # and its number: the name of a marker's event in the trace
WHOLE_PHASES = {"forward", "backward", "sync", "step", "broadcast", "receive"}
CUDA_BLOCK = 512  # bytes; CUDA's caching allocator rounds up to a multiple


@dataclass(frozen=True)
class Note:
    """What was seen at one marker. `whole`: all parameters, gradients and state there are."""

    whole: bool
    found: dict[int, tuple[str, int]]  # address -> (category, bytes)
    gone: list[tuple[int, int | None]]  # address, and the marker that announced it; None: a parameter's


class MemoryLedger:
    """A listener of `phases`; `notes[i]` belongs to marker i."""

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None):
        self.model, self.optimizer = model, optimizer
        self.notes: list[Note] = []
        self._announced: list[tuple[weakref.ref, int, int]] = []  # tensor, address, marker
        self._params: dict[torch.Tensor, None] = {}  # in the order in which they were seen
        self._buckets: dict[int, tuple[StorageWeakRef, int]] = {}  # address -> whether it lives, bytes
        self._homes: dict[int, StorageWeakRef] = {}  # address -> whether parameters still lie there

    @torch.no_grad()
    def look(self) -> None:
        found = {}
        if self.model is not None:
            # All that were ever seen: FSDP2 shows shards or whole parameters, and holds both.
            self._params |= dict.fromkeys(self.model.parameters())
            grads = [p.grad for p in self._params if p.grad is not None]
            grads = [grad for grad in grads if type(grad) is not TakenGradient]  # it holds nothing
            self._add(found, "params", list(self._params))
            homes = (local(p).untyped_storage() for p in self._params)
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
        self._buckets = {a: bucket for a, bucket in self._buckets.items() if not bucket[0].expired()}
        for address, (_, size) in self._buckets.items():
            found.setdefault(address, ("grads", size))

    @staticmethod
    def _add(found: dict, category: str, tensors: list[torch.Tensor]) -> None:
        for storage in (local(t).untyped_storage() for t in tensors):
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), (category, storage.nbytes()))


@dataclass(eq=False)
class Block:
    born: float  # µs
    size: int
    guess: str  # its category, if no marker names it
    category: str | None = None
    died: float | None = None
    seen_born: bool = True  # False: older than the window, known from a marker
    marker: int | None = None  # the last that named it


def account(events: list[dict], notes: list[Note], cuda: bool = False) -> pd.DataFrame:
    """Changes of memory: a frame of time_us (float), category and delta (int bytes), by time.

    `events` are those of the trace that holds the markers of `notes`. Four things that the allocator
    does not tell are inferred: blocks older than the window (a marker names them), the end of such
    blocks (a whole note no longer has them, or nothing lies there any more), unreported frees (the
    address is allocated again, or the tensor that was announced is gone), and the end of the copy that
    gloo reduces in place of a reduce-scatter's input.
    """
    blocks, alive = [], {}  # alive: address -> Block
    start = min(e["ts"] for e in events if "ts" in e)
    guess = "other"

    def add(address: int, block: Block) -> None:
        alive[address] = block
        blocks.append(block)

    for ts, kind, value in _timeline(events, 1 if cuda else 0):
        if kind == "guess":
            guess = value
        elif kind == "memory":
            address, size = value["Addr"], value["Bytes"]
            if address in alive and (
                size > 0 or alive[address].seen_born or alive[address].size == -size
            ):
                alive.pop(address).died = ts
            if size > 0:
                add(address, Block(ts, size, guess))
        elif kind == "gone":
            if value in alive:
                alive.pop(value).died = ts
        else:
            note = notes[value]
            gone = [a for a, marker in note.gone if a in alive and
                    (not alive[a].seen_born if marker is None else alive[a].marker == marker)]  # fmt: skip
            if note.whole:
                # Also a gradient that gloo's thread held longer than the parameter did.
                gone += [
                    a
                    for a, b in alive.items()
                    if a not in note.found and (not b.seen_born or b.category == "grads")
                ]
            for address in dict.fromkeys(gone):
                alive.pop(address).died = ts
            for address, (category, size) in note.found.items():
                if address not in alive:
                    size = -(-size // CUDA_BLOCK) * CUDA_BLOCK if cuda else size
                    add(address, Block(start, size, category, seen_born=False))
                alive[address].category = alive[address].category or category
                if not note.whole:
                    alive[address].marker = value

    changes = [(b.born, b.category or b.guess, b.size) for b in blocks]
    changes += [(b.died, b.category or b.guess, -b.size) for b in blocks if b.died is not None]
    frame = pd.DataFrame(changes, columns=["time_us", "category", "delta"])
    return frame.sort_values("time_us", kind="stable", ignore_index=True)


def _timeline(events: list[dict], device_type: int) -> list[tuple]:
    """(ts, kind, value) in order of time: allocations, markers, and what a newborn block would be."""
    found = []
    for e in events:
        name, ts = e.get("name", ""), e.get("ts")
        if name == "[memory]" and e["args"]["Device Type"] == device_type:
            found.append((ts, "memory", e["args"]))
        elif e.get("cat") != "user_annotation":
            continue
        elif name.startswith(MARKER):
            found.append((ts, "marker", int(name.removeprefix(MARKER))))
        elif name.startswith("ProfilerStep#"):
            found.append((ts, "guess", "other"))
        elif name == "zero1.forward":
            found += [(ts, "guess", "activations"), (ts + e["dur"], "guess", "temporaries")]
    found += [(end, "gone", address) for address, end in _copies(events)]
    return sorted(found, key=lambda item: item[0])


def _copies(events: list[dict]) -> list[tuple[int, float]]:
    """(address, end) of what gloo's reduce-scatters allocate when they are issued, on our thread."""
    ops = [e for e in events if e.get("name") == "c10d::_reduce_scatter_base_" and e.get("ph") == "X"]
    ran = [e for e in events if e.get("name") == "gloo:reduce_scatter"]
    births = [e for e in events if e.get("name") == "[memory]" and e["args"]["Bytes"] > 0]
    ends = []
    if len(ops) == len(ran):
        for op, e in zip(*(sorted(some, key=lambda e: e["ts"]) for some in (ops, ran)), strict=True):
            ends += [(m["args"]["Addr"], e["ts"] + e["dur"]) for m in births
                     if m.get("tid") == op["tid"] and 0 <= m["ts"] - op["ts"] <= op["dur"]]  # fmt: skip
    return ends


def peaks(memory: pd.DataFrame) -> dict[str, int]:
    """Most bytes at any time: of each category, of all (`peak`), of params+grads+opt_state+buckets."""

    def most(rows: pd.DataFrame) -> int:
        # Changes at one instant count as one: a block is freed and its address taken again.
        return int(rows.groupby("time_us")["delta"].sum().cumsum().max()) if len(rows) else 0

    of = {c: most(memory[memory.category == c]) for c in (*STATES, "counters")}
    return of | {"peak": most(memory), "peak_states": most(memory[memory.category.isin(STATES)])}


def without_blips(memory: pd.DataFrame, most: int = 64 * 1024) -> pd.DataFrame:
    """Without temporaries of at most `most` bytes that the next event frees, unless they make the peak.

    A CPU's attention takes and frees some for every head and example: most of the events of a large batch.
    """
    peak = peaks(memory)["peak"]
    while True:
        change, passing = memory["delta"], memory["category"] == "temporaries"
        blip = passing & change.between(1, most) & (change.shift(-1) == -change)
        blip &= passing.shift(-1, fill_value=False) & (change.cumsum() < peak)
        if not blip.any():
            return memory
        memory = memory[~(blip | blip.shift(fill_value=False))]
