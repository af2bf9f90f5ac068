"""Gloo's connections between ranks, closed to strangers (on Linux).

A gloo process group connects its ranks over TCP. It listens on the loopback interface, on a port of
its own, and does not ask who connects: for the moment in which the group forms, a process of another
user could take a rank's place, and its messages would be unpickled by object collectives. So, once a
group has formed,

- nobody is heard any more: the system drops whatever a new connection to its ports sends;
- if somebody who is not this user did connect in that moment, nothing is used: ClosedDoor is raised.
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from pathlib import Path

import torch.distributed as dist

ESTABLISHED, LISTEN = "01", "0A"  # states in /proc/net/tcp
SO_ATTACH_FILTER = 26
NO_PAYLOAD = [  # a packet filter: operation, jumps if equal and if not, constant
    (0x30, 0, 0, 12),          # A = byte 12 of the TCP header, whose upper half is
    (0x54, 0, 0, 0xF0),        #     the length of the header in words of 4 bytes
    (0x74, 0, 0, 2),           # A = the same in bytes
    (0x07, 0, 0, 0),           # X = A
    (0x80, 0, 0, 0),           # A = length of the packet
    (0x1D, 0, 1, 0),           # A == X?
    (0x06, 0, 0, 0xFFFFFFFF),  # yes, only a header: take it
    (0x06, 0, 0, 0)]           # no: drop it


class ClosedDoor(RuntimeError):
    """A process of another user has connected to a process group that was forming."""


@contextlib.contextmanager
def closed_to_others():
    """Around the creation of a process group, on every rank, its first barrier included."""
    if not sys.platform.startswith("linux"):
        yield
        return
    before = listening()
    yield
    for _, descriptor in listening().items() - before.items():
        with socket.socket(fileno=os.dup(descriptor)) as door:
            shut(door)
            if users := users_connected_to(door) - {os.geteuid()}:
                raise ClosedDoor(f"user {min(users)} connected to the process group while it formed")


def listening() -> dict[int, int]:
    """This process's listening TCP sockets: {inode: file descriptor}."""
    inodes = {int(fields[9]) for fields in tcp_sockets() if fields[3] == LISTEN}
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            inode = os.stat(int(descriptor)).st_ino
            if inode in inodes:
                found[inode] = int(descriptor)
    return found


def shut(door: socket.socket) -> None:
    """Drop what later connections to this listening socket send; earlier ones go on."""
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in NO_PAYLOAD)
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(NO_PAYLOAD), ctypes.addressof(instructions))
    door.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def users_connected_to(door: socket.socket) -> set[int]:
    """User ids at the other ends of this socket's accepted connections; -1: the other end is gone."""
    rows = tcp_sockets()
    address = next(fields[1] for fields in rows if fields[9] == str(os.fstat(door.fileno()).st_ino))
    user = {(fields[1], fields[2]): int(fields[7]) for fields in rows if fields[3] == ESTABLISHED}
    accepted = [fields for fields in rows
                if fields[1] == address and fields[3] != LISTEN and fields[9] != "0"]
    return {user.get((fields[2], address), -1) for fields in accepted}


def tcp_sockets() -> list[list[str]]:
    """The rows of /proc/net/tcp: 1 and 2 are both addresses, 3 the state, 7 the user, 9 the inode."""
    return [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]


def close_new_groups() -> None:
    """Let dist.new_group close its doors, too."""
    create = dist.new_group

    def new_group(*args, **kwargs):
        with closed_to_others():
            return create(*args, **kwargs)

    dist.new_group = dist.distributed_c10d.new_group = new_group
