"""The ports of a process group take nothing from anybody, once the group has formed."""

import os
import socket

import pytest

from zero1_helpers.ranks import doors


@pytest.fixture
def door():
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door


def connect(door):
    client = socket.create_connection(door.getsockname(), timeout=5)
    accepted, _ = door.accept()
    accepted.settimeout(5)
    return client, accepted


def test_later_connections_are_not_heard(door):
    client, accepted = connect(door)
    doors.shut(door)
    stranger, deaf = connect(door)
    stranger.sendall(b"garbage")
    client.sendall(b"x" * 1_000_000)  # sent after the stranger's, and all of it arrives
    received = 0
    while received < 1_000_000:
        received += len(accepted.recv(1 << 20))
    deaf.setblocking(False)
    with pytest.raises(BlockingIOError):
        deaf.recv(1)
    for end in (client, accepted, stranger, deaf):
        end.close()


def test_who_has_connected(door):
    client, accepted = connect(door)
    assert doors.users_connected_to(door) == {os.geteuid()}
    client.close()
    assert doors.users_connected_to(door) == {-1}
    accepted.close()


def test_listening_sockets_are_found(door):
    inode = os.fstat(door.fileno()).st_ino
    assert doors.listening()[inode] == door.fileno()


def test_a_connection_of_another_user_is_refused(monkeypatch):
    somebody = os.geteuid() + 1
    with pytest.raises(doors.ClosedDoor, match="connected to the process group"):
        with doors.closed_to_others():
            door = socket.create_server(("127.0.0.1", 0))
            client, accepted = connect(door)
            monkeypatch.setattr(os, "geteuid", lambda: somebody)
    for end in (client, accepted, door):
        end.close()
