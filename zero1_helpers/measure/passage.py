"""How one collective passes an emulated link: when it began, when it may end, and whether it was late."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from zero1_helpers.measure.link import Link


@dataclass(eq=False)
class Passage:
    """One collective on the link, times in ns since the epoch. It holds no tensor: a log keeps none alive."""

    op: str
    size: int  # bytes
    begin: int
    deadline: int
    done: int | None = None  # when gloo had moved the data

    def stamp(self, _=None) -> None:
        self.done = self.done or time.time_ns()

    @property
    def late(self) -> bool:
        return self.done is not None and self.done > self.deadline

    @property
    def end(self) -> int:
        return max(self.deadline, self.done or 0)


@dataclass(eq=False)
class Lane:
    """This rank's one link: until when it is taken, and what it carried while somebody looked."""

    link: Link | None = None
    free: int = 0  # time.time_ns() at which the last deadline falls, the clock of torch's profiler
    log: list[Passage] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def carry(self, op: str, size: int, world_size: int) -> Passage:
        """A collective that is issued now."""
        with self.lock:
            begin = max(time.time_ns(), self.free)
            seconds = self.link.seconds(op, size, world_size) if self.link else 0.0
            self.free = begin + round(seconds * 1e9)
            passage = Passage(op, size, begin, deadline=self.free)
            if self.log is not None:
                self.log.append(passage)
            return passage


lane = Lane()


def as_events(passages: Iterable[Passage], base_ns: int) -> list[dict]:
    """Passages as events of a chrome trace: on the link from `begin` to `end`, whoever waits for it."""
    return [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"link:{t.op}",
            "pid": 0,
            "tid": "link",
            "ts": (t.begin - base_ns) / 1e3,
            "dur": (t.end - t.begin) / 1e3,
            "args": {"bytes": t.size},
        }
        for t in passages
    ]


def late_share(ranks: list[list[bool]]) -> float:
    """Share of operations late on every rank; `ranks` has a list of `Passage.late` for each.

    A rank that came early to a collective also ends it after its own deadline, by waiting for the
    others; the rank that came last has no such excuse.
    """
    late = [all(of_one) for of_one in zip(*ranks, strict=True)]
    return sum(late) / len(late) if late else 0.0
