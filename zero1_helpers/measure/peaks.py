"""Peaks of a memory timeline, and a timeline without what nobody can see in it."""

import pandas as pd

from zero1_helpers.measure.schema import STATES


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
