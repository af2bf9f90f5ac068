"""Messages between the kernel and its ranks: a dict of plain values, and bytes that go with it.

The dict travels as JSON, so that reading a message never runs code, whoever wrote it. The bytes are
what `push` and `pull` move; only they are unpickled, by whoever asked for them.
"""

import json
import struct
from collections.abc import Iterator

HEAD = struct.Struct(">IQ")  # lengths of the JSON text and of the bytes


def pack(message: dict, payload: bytes = b"") -> list[memoryview]:
    """What to write to a socket, in this order."""
    text = json.dumps(message, ensure_ascii=False).encode(
        errors="replace"
    )  # half a character is "?"
    return [memoryview(HEAD.pack(len(text), len(payload)) + text), memoryview(payload)]


class Reader:
    """Puts messages together from the pieces in which they arrive."""

    def __init__(self):
        self.buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict, bytes]]:
        """The messages that are complete with this piece: (message, payload).

        Raises ValueError when the bytes are no message.
        """
        self.buffer += data
        while len(self.buffer) >= HEAD.size:
            text, payload = HEAD.unpack_from(self.buffer)
            middle, end = HEAD.size + text, HEAD.size + text + payload
            if len(self.buffer) < end:
                return
            message = json.loads(self.buffer[HEAD.size : middle])
            if not isinstance(message, dict):
                raise ValueError("a message is a dict")
            content = bytes(memoryview(self.buffer)[middle:end])
            del self.buffer[:end]
            yield message, content
