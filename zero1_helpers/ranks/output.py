"""What the reader of a notebook sees of the ranks' output: one line a progress bar, equals folded."""

import json
import re

from IPython.display import display

KEEP = 100_000  # bytes of output shown per rank and cell: half its beginning, half its end
SCREEN = 30  # lines at the end that a progress bar can still move over
CONTROLS = re.compile(rb"(\n|\r|\x1b\[A)")  # new line, back to its start, one line up


class Output:
    """What a rank printed since its last request, as a terminal would show it.

    A progress bar goes back to the start of its line, and one of several bars also up some lines:
    what it writes there replaces what was there. Of more than KEEP bytes, the middle is cut out.
    """

    def __init__(self):
        self.settled, self.cut = bytearray(), 0  # lines that nothing can overwrite any more
        self.screen, self.row = [b""], 0  # the lines after these, and the cursor's
        self.overwrite = False  # whether the cursor is at the start of its line
        self.rest = b""  # beginning of a control sequence whose end has not arrived

    def add(self, data: bytes) -> None:
        data = self.rest + data
        self.rest = re.search(rb"(\x1b\[?)?\Z", data)[0]
        for piece in CONTROLS.split(data[: len(data) - len(self.rest)]):
            if piece == b"\n":
                self.row, self.overwrite = self.row + 1, True
                if self.row == len(self.screen):
                    self.screen.append(b"")
            elif piece == b"\r":
                self.overwrite = True
            elif piece == b"\x1b[A":
                self.row = max(0, self.row - 1)
            elif piece:
                self.screen[self.row] = piece if self.overwrite else self.screen[self.row] + piece
                self.overwrite = False
        self._settle(min(self.row, len(self.screen) - SCREEN))
        if len(self.screen[self.row]) > KEEP:  # a line without an end
            self._settle(self.row)
            self.settled += self.screen[0]
            self.screen[0] = b""

    def _settle(self, lines: int) -> None:
        """Fix the first lines of the screen, and cut if it is too much."""
        if lines > 0:
            self.settled += b"\n".join(self.screen[:lines]) + b"\n"
            del self.screen[:lines]
            self.row -= lines
        if len(self.settled) > 2 * KEEP:
            self.cut += len(self.settled) - KEEP
            del self.settled[KEEP // 2 : -KEEP // 2]

    def text(self, lines: int | None = None) -> str:
        """All of it, or the last lines."""
        data = bytes(self.settled) + b"\n".join(self.screen)
        cut = self.cut + len(data) - KEEP
        if cut > 0:
            note = f"\n... {cut:,} bytes cut ...\n".encode()
            data = data[: KEEP // 2] + note + data[-KEEP // 2 :]
        text = data.decode(errors="replace")
        return "\n".join(text.rstrip("\n").split("\n")[-lines:]) if lines else text


def show(ranks, answers: dict[int, dict], texts: list[str]) -> None:
    """Print a cell's output: warnings, what each rank printed, what it displayed; equals folded."""
    answers = [answers.get(rank, {}) for rank in ranks]
    warned: dict[str, list[int]] = {}
    for rank, answer in zip(ranks, answers, strict=True):
        for warning in answer.get("warnings", ()):
            warned.setdefault(warning, []).append(rank)
    text = "".join(f"{span(who)}: {warning}\n" for warning, who in warned.items())
    displays = [json.dumps(answer.get("displays", [])) for answer in answers]
    for who, (printed, bundles) in alike(ranks, list(zip(texts, displays, strict=True))):
        bundles = json.loads(bundles)
        text += labelled(who, printed) or (f"{span(who)}:\n" if bundles else "")
        for bundle in bundles:
            print(text, end="", flush=True)
            text = ""
            display(bundle, raw=True)
    print(text, end="", flush=True)


def alike(ranks, values: list) -> list[tuple[list[int], object]]:
    """Ranks grouped by equal values, in the order of each group's first rank."""
    groups: dict = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return [(who, value) for value, who in groups.items()]


def labelled(ranks, text: str) -> str:
    """ "rank 1: text", with the text on lines of its own if it has several; "" without text."""
    text = text.rstrip("\n")
    if not text.strip():
        return ""
    return f"{span(ranks)}:{chr(10) if chr(10) in text else ' '}{text}\n"


def span(ranks) -> str:
    """Ranks in words: "rank 2", "ranks 0, 2", "ranks 0–3"."""
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def count(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"


def indented(text: str) -> str:
    return "".join(f"\n    {line}" for line in text.rstrip("\n").split("\n") if text)
