"""Once a process group has formed, its ranks listen nowhere, and only ranks are connected to them."""

import json
import select
import socket

import pytest
import torch.distributed as dist

from zero1_helpers.measure import doors


@pytest.fixture
def door():
    """A listening socket that an event loop watches, as gloo's."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door


def connect(door):
    client = socket.create_connection(door.getsockname(), timeout=5)
    accepted, _ = door.accept()
    return client, accepted


def test_nobody_connects_to_a_closed_door_and_its_connections_go_on(door):
    address = door.getsockname()
    client, accepted = connect(door)
    with client, accepted, select.epoll() as loop:
        loop.register(door.fileno(), select.EPOLLIN)
        assert door.fileno() in doors.sockets()[0]
        assert doors.stop_listening(door.fileno()) is None
        assert door.fileno() not in doors.sockets()[0]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        client.sendall(b"still here")
        assert accepted.recv(10) == b"still here"
        assert loop.poll(0.05) == []
        loop.unregister(door.fileno())  # as gloo does when its group ends


def test_a_server_that_no_event_loop_watches_is_not_gloos(door):
    assert doors.stop_listening(door.fileno()) is None
    connect(door)


def cut(door, others) -> list[str]:
    """The check of rank 0 of two, when rank 1 reports these connections."""
    store = dist.HashStore()
    store.set("sockets/1", json.dumps(others))
    return doors.cut_strangers(0, 2, store, {door.getsockname()}, doors.sockets()[1])


def test_a_connection_that_no_rank_has_made_is_cut(door):
    client, accepted = connect(door)
    stranger, its_end = connect(door)
    other = socket.create_server(("127.0.0.1", 0))
    unrelated = connect(other)  # to a server that is not the group's
    with client, accepted, stranger, its_end, other, unrelated[0], unrelated[1]:
        made = [(client.getsockname(), door.getsockname())]
        assert cut(door, made) == [f"127.0.0.1:{stranger.getsockname()[1]}"]
        assert stranger.recv(1) == b"" and its_end.fileno() >= 0
        for end, peer in ((client, accepted), unrelated):
            end.sendall(b"x")
            assert peer.recv(1) == b"x"


def test_no_descriptor_is_left_open_by_looking(door):
    before = doors.descriptors()
    doors.sockets()
    doors.stop_listening(door.fileno())
    assert doors.descriptors() == before
