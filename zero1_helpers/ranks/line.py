"""One rank as the kernel sees it: a socket, a pipe, and what has arrived through them.

Nothing here waits: what does not fit into a socket stays in a queue, and what has not arrived is None.
"""

import collections
import contextlib
import os
import signal
import socket
import time

from zero1_helpers.ranks.messages import Reader, pack
from zero1_helpers.ranks.output import Output, indented

SILENT = "not answering: native code holds its interpreter, or it still starts"


class Line:
    """One end of a socket pair that never blocks, and the pipe that the other side prints into."""

    def __init__(self, connection: socket.socket, pipe: int):
        self.connection, self.pipe, self.reader = connection, pipe, Reader()
        self.outgoing: collections.deque[memoryview] = collections.deque()
        self.output, self.broken, self.silent = Output(), "", False  # silent: nobody can print
        self.shown = self.output  # the output before this one

    def queue(self, message: dict, payload: bytes = b"") -> None:
        self.outgoing.extend(part for part in pack(message, payload) if len(part))

    def write(self) -> None:
        """Send as much as fits."""
        try:
            while self.outgoing:
                sent = self.connection.send(self.outgoing[0][: 1 << 20])
                self.outgoing[0] = self.outgoing[0][sent:]
                if not self.outgoing[0]:
                    self.outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more; how it ended, others say
            self.outgoing.clear()

    def read(self) -> list[tuple[dict, bytes]]:
        """The messages that have arrived; what was printed before them is in `output` then."""
        messages = []
        try:
            while not self.broken:
                if data := self.connection.recv(1 << 20):
                    messages += self.reader.feed(data)
                else:
                    self._break("it closed its connection to the kernel")
        except BlockingIOError:
            pass
        except OSError as error:
            self._break(str(error))
        except ValueError:
            self._break("something other than a message came from it")
        if not self.silent:
            self.drain()
        return messages

    def _break(self, why: str) -> None:
        self.broken, self.broken_at = why, time.monotonic()

    def drain(self) -> None:
        """Take in what it has printed."""
        with contextlib.suppress(OSError):  # nothing there
            for _ in range(64):  # more than a pipe holds; a rank may never stop printing
                if not (data := os.read(self.pipe, 1 << 16)):
                    self.silent = True
                    return
                self.output.add(data)

    def printed(self) -> str:
        """What it has printed since this was last asked."""
        self.shown, self.output = self.output, Output()
        return self.shown.text()

    def log_tail(self) -> str:
        output = self.output if self.output.text(1).strip() else self.shown
        tail = "\n".join(line[:200] for line in output.text(30).split("\n"))
        return f"\nThe last that it printed:{indented(tail)}" if tail.strip() else ""


class Rank(Line):
    """What the kernel knows of a rank."""

    def __init__(self, number: int, connection: socket.socket, pipe: int):
        super().__init__(connection, pipe)
        self.number, self.pid, self.started, self.device = number, None, time.time(), "CPU"
        self.ended = ""  # how the process ended
        self.answer: dict = {}  # the last one
        self.state, self.seen, self.asked = {}, -1.0, False  # what it does, since when we know it
        self.dropped = 0  # messages that were no answer of this process to the running request

    def answer_to(self, number: int) -> dict | None:
        """Its answer to this request, or {"died": how}, or None: not yet."""
        if self.answer.get("number") == number:
            return self.answer
        return {"died": self.gone} if self.gone else None

    @property
    def gone(self) -> str:
        """Why it will never answer again. Who closes a connection has a moment to say how it ended."""
        late = self.broken and time.monotonic() > self.broken_at + 1
        return self.ended or (self.broken if late else "")

    def take(self, message: dict, payload: bytes, number: int) -> None:
        """Keep a message of this rank. number: of the request that runs."""
        self.pid = self.pid or message.get("pid")  # its first word may overtake its parent's
        if message.get("pid") != self.pid:
            self.dropped += 1
        elif "state" in message:
            self.state, self.seen, self.asked = message["state"], time.monotonic(), False
        elif message.get("number") == number and self.answer.get("number") != number:
            self.answer = message | {"payload": payload}
        else:
            self.dropped += 1

    def look(self) -> None:
        """Ask what it does, unless it has not yet answered that."""
        if not self.asked and not self.ended:
            self.asked = True
            self.queue({"number": -1, "kind": "look"})

    def doing(self, since: float) -> dict:
        """What it did after this time."""
        if self.ended:
            return {"where": f"died: {self.ended}"}
        return self.state if self.seen >= since else {"where": SILENT}

    def interrupt(self) -> None:
        """KeyboardInterrupt in its request. Its pid is its own until its parent ends."""
        if self.pid and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)
