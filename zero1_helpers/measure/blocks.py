"""From a trace's allocations and the ledger's notes to changes of memory by category.

The profiler tells which addresses were allocated and freed, a note tells which of them held parameters,
gradients, state or buckets at one moment. `Blocks` puts both together. Four things are told by neither, and
each has a method of its own that infers it:

    older_than_window    a note names an address at which no allocation was seen
    ended_unseen         such a block is no longer in a whole note, or a gradient outlived its parameter's
    allocated_again      an address is allocated while a block still lies there, so that one was freed
    announced_and_gone   a tensor that was announced no longer exists
"""

from dataclasses import dataclass, field

import pandas as pd

from zero1_helpers.measure.ledger import MARKER, Note

CUDA_BLOCK = 512  # bytes; CUDA's caching allocator rounds up to a multiple


@dataclass(eq=False)
class Block:
    """Memory between an allocation and a free."""

    born: float  # µs
    size: int  # bytes
    guess: str  # its category, if no note names it
    category: str | None = None
    died: float | None = None
    seen_born: bool = True  # False: older than the window, known from a note
    marker: int | None = None  # the last note that announced it


@dataclass
class Blocks:
    """All blocks of one trace. Call its methods in order of time."""

    start: float  # µs: when blocks older than the window count as born
    cuda: bool = False
    guess: str = "other"  # what a block is that is born now, until a note names it
    every: list[Block] = field(default_factory=list)
    alive: dict[int, Block] = field(default_factory=dict)  # by address

    def allocated(self, ts: float, address: int, size: int) -> None:
        self.allocated_again(ts, address)
        self._add(address, Block(ts, size, self.guess))

    def allocated_again(self, ts: float, address: int) -> None:
        if address in self.alive:
            self.ended(ts, address)

    def freed(self, ts: float, address: int, size: int) -> None:
        """Ignored where the block is not known, or is one that was named by a note and had another size."""
        block = self.alive.get(address)
        if block and (block.seen_born or block.size == size):
            self.ended(ts, address)

    def ended(self, ts: float, address: int) -> None:
        if address in self.alive:
            self.alive.pop(address).died = ts

    def noted(self, ts: float, number: int, note: Note) -> None:
        """What note `number` tells: what is gone, and what the blocks are that it found."""
        for address in {*self.announced_and_gone(note), *self.ended_unseen(note)}:
            self.ended(ts, address)
        for address, (category, size) in note.found.items():
            if address not in self.alive:
                self.older_than_window(address, category, size)
            block = self.alive[address]
            block.category = block.category or category
            if not note.whole:
                block.marker = number

    def announced_and_gone(self, note: Note) -> list[int]:
        """Blocks whose tensor is gone. Marker None: a parameter's, older than the window."""

        def is_it(block: Block, marker: int | None) -> bool:
            return not block.seen_born if marker is None else block.marker == marker

        return [a for a, marker in note.gone if a in self.alive and is_it(self.alive[a], marker)]

    def ended_unseen(self, note: Note) -> list[int]:
        """Blocks that a whole note would name if they were there. Gloo's threads free some unseen."""
        if not note.whole:
            return []
        missing = {a: block for a, block in self.alive.items() if a not in note.found}
        return [
            a for a, block in missing.items() if not block.seen_born or block.category == "grads"
        ]

    def older_than_window(self, address: int, category: str, size: int) -> None:
        if self.cuda:
            size = -(-size // CUDA_BLOCK) * CUDA_BLOCK
        self._add(address, Block(self.start, size, category, seen_born=False))

    def changes(self) -> pd.DataFrame:
        """Frame of time_us (float), category and delta (int bytes), by time."""
        rows = [(b.born, b.category or b.guess, b.size) for b in self.every]
        rows += [(b.died, b.category or b.guess, -b.size) for b in self.every if b.died is not None]
        frame = pd.DataFrame(rows, columns=["time_us", "category", "delta"])
        return frame.sort_values("time_us", kind="stable", ignore_index=True)

    def _add(self, address: int, block: Block) -> None:
        self.alive[address] = block
        self.every.append(block)


def account(events: list[dict], notes: list[Note], cuda: bool = False) -> pd.DataFrame:
    """Changes of memory: a frame of time_us (float), category and delta (int bytes), by time.

    events: those of the trace that holds the markers of `notes`.
    """
    blocks = Blocks(min(e["ts"] for e in events if "ts" in e), cuda)
    for ts, kind, value in _timeline(events, 1 if cuda else 0):
        if kind == "guess":
            blocks.guess = value
        elif kind == "gone":
            blocks.ended(ts, value)
        elif kind == "marker":
            blocks.noted(ts, value, notes[value])
        elif value["Bytes"] > 0:
            blocks.allocated(ts, value["Addr"], value["Bytes"])
        else:
            blocks.freed(ts, value["Addr"], -value["Bytes"])
    return blocks.changes()


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
    ops = [
        e for e in events if e.get("name") == "c10d::_reduce_scatter_base_" and e.get("ph") == "X"
    ]
    ran = [e for e in events if e.get("name") == "gloo:reduce_scatter"]
    births = [e for e in events if e.get("name") == "[memory]" and e["args"]["Bytes"] > 0]
    ends = []
    if len(ops) == len(ran):
        for op, e in zip(
            *(sorted(some, key=lambda e: e["ts"]) for some in (ops, ran)), strict=True
        ):
            ends += [
                (m["args"]["Addr"], e["ts"] + e["dur"])
                for m in births
                if m.get("tid") == op["tid"] and 0 <= m["ts"] - op["ts"] <= op["dur"]
            ]
    return ends
