"""Gloo's connections between ranks, closed to strangers without any privilege.

A gloo process group connects its ranks over TCP. Each rank listens on the loopback interface, on a
port of its own, and gloo does not ask who connects: while the group forms, a process of another user
could take a rank's place, and object collectives would unpickle what it sends. Therefore, whenever
torch has created a group,

1. each rank stops listening (`stop_listening`), because all ranks are connected by then;
2. each rank writes the addresses of its sockets into the group's store, a file that only this user can
   read, and compares (`check_connections`): a connection that no other rank has was made by somebody
   else. Nothing has been received from it yet, and Stranger is raised.

Only this process's own file descriptors are looked at, so neither capabilities nor /proc/net are needed.
"""

import json
import os
import resource
import select
import socket

import torch.distributed as dist

Pair = tuple[tuple, tuple]  # a connection: its address here, and the other end's


class Stranger(RuntimeError):
    """Something that is not a rank of the group has connected to it while it formed."""


def guard_groups(note=lambda message: None) -> None:
    """Let every process group that torch creates from now on close its doors.

    note: called with one line that says what could not be closed.
    """
    create = (
        dist.distributed_c10d._new_process_group_helper
    )  # the one place where torch makes groups

    def guarded(*args, **kwargs):
        before = sockets()[0].keys()
        group, store = create(*args, **kwargs)
        if store is not None:  # None: this rank is not in the group
            listeners, pairs = sockets()
            doors = {number: listeners[number] for number in listeners.keys() - before}
            for number in doors:
                if problem := stop_listening(number):
                    note(
                        f"gloo still listens at {doors[number]}, because {problem}; "
                        "the connections themselves are checked."
                    )
            check_connections(group.rank(), group.size(), store, set(doors.values()), pairs)
        return group, store

    dist.distributed_c10d._new_process_group_helper = guarded


def sockets() -> tuple[dict[int, tuple], list[Pair]]:
    """This process's TCP sockets: the listening ones {file descriptor: address}, and the connected."""
    listeners, pairs = {}, []
    for number in descriptors():
        try:
            found = socket.socket(fileno=number)
        except OSError:
            continue  # not a socket, or closed meanwhile
        try:
            if (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and found.type == socket.SOCK_STREAM
            ):
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listeners[number] = found.getsockname()[:2]
                else:
                    pairs.append((found.getsockname()[:2], found.getpeername()[:2]))
        except OSError:
            pass  # not connected
        finally:
            found.detach()  # the descriptor is somebody else's
    return listeners, pairs


def descriptors() -> list[int]:
    """This process's open file descriptors, or all numbers that could be one."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:  # no /proc
        return list(range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)))


def stop_listening(listener: int) -> str | None:
    """Close gloo's listening socket, whose file descriptor gloo keeps. Returns why it stays open.

    The descriptor is replaced by one that nothing ever arrives at, registered with gloo's event loop
    as before, so that gloo can take it from there when the group ends.
    """
    if not hasattr(select, "epoll"):
        return "this system has no epoll"
    loops = [number for number in descriptors() if registered(number, listener)]
    if not loops:
        return None  # a server of somebody else, such as a thread of a cell: not ours to close
    try:
        silent, other_end = socket.socketpair()
        other_end.detach()  # stays open, because closing it would be an event
        os.dup2(silent.fileno(), listener, inheritable=False)
        silent.close()
        for loop in loops:
            with select.epoll.fromfd(os.dup(loop)) as epoll:
                epoll.register(listener, 0)
    except OSError as error:
        return str(error)
    return None


def registered(loop: int, descriptor: int) -> bool:
    """Whether loop is an epoll instance that watches this descriptor; if so, it hears no more events."""
    try:
        with select.epoll.fromfd(os.dup(loop)) as epoll:
            epoll.modify(descriptor, 0)
    except OSError:
        return False
    return True


def check_connections(rank: int, size: int, store, doors: set[tuple], pairs: list[Pair]) -> None:
    """Raise Stranger if a connection to one of these doors was not made by a rank of the group.

    doors: addresses at which this rank listened.  pairs: its connections.  store: the group's, shared
    by ranks 0 to size - 1, each of which calls this.
    """
    store.set(f"sockets/{rank}", json.dumps(pairs))
    made = {
        (tuple(theirs), tuple(ours))
        for other in range(size)
        if other != rank
        for theirs, ours in json.loads(store.get(f"sockets/{other}"))
    }
    for ours, theirs in pairs:
        if ours in doors and (theirs, ours) not in made:
            raise Stranger(
                f"a process that is not one of the {size} ranks connected from "
                f"{theirs[0]}:{theirs[1]} while the process group formed"
            )
