"""Gloo's connections between ranks, closed to strangers without any privilege.

A gloo process group connects its ranks over TCP. Each rank listens on the loopback interface, on a
port of its own, and gloo does not ask who connects: while the group forms, a process of another user
could take a rank's place, and object collectives would unpickle what it sends. Therefore, whenever
torch has created a group,

1. each rank stops listening (`stop_listening`), because all ranks are connected by then;
2. each rank writes the addresses of its sockets into the group's store, a file that only this user can
   read, and compares (`cut_strangers`): a connection that no other rank has was made by somebody else, and
   is cut. Nothing has been received from it yet. If gloo had taken it for a rank's, the group fails now.

Only this process's own file descriptors are looked at, so neither capabilities nor /proc/net are needed.
"""

import contextlib
import json
import os
import resource
import select
import socket

import torch.distributed as dist

Pair = tuple[tuple, tuple]  # a connection: its address here, and the other end's


def guard_groups(note=lambda message: None) -> None:
    """Let every process group that torch creates from now on close its doors.

    note: called with one line about whatever could not be closed, or was cut.
    """
    create = dist.distributed_c10d._new_process_group_helper  # torch makes all groups there
    if hasattr(create, "guards"):  # by an earlier call
        return

    def guarded(*args, **kwargs):
        before = sockets()[0].keys()
        group, store = create(*args, **kwargs)
        if store is not None:  # None: this rank is not in the group
            listeners, pairs = sockets()
            doors = {number: listeners[number] for number in listeners.keys() - before}
            if not doors:  # not gloo's: nobody could have connected to this rank
                return group, store
            for number in doors:
                if problem := stop_listening(number):
                    note(
                        f"gloo still listens at {doors[number]}, because {problem}; "
                        "the connections themselves are checked."
                    )
            cut = cut_strangers(group.rank(), group.size(), store, {*doors.values()}, pairs)
            if cut:
                note(
                    f"connected from {', '.join(cut[:3])} while a process group formed: a process that "
                    f"is not one of its {group.size()} ranks. The connections were cut ({len(cut)})."
                )
        return group, store

    guarded.guards = True
    dist.distributed_c10d._new_process_group_helper = guarded


def sockets() -> tuple[dict[int, tuple], dict[int, Pair]]:
    """This process's TCP sockets by file descriptor: addresses of the listening ones, and connections."""
    listeners, pairs = {}, {}
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
                    pairs[number] = (found.getsockname()[:2], found.getpeername()[:2])
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


def cut_strangers(
    rank: int, size: int, store, doors: set[tuple], pairs: dict[int, Pair]
) -> list[str]:
    """End the connections to these doors that no rank of the group has made. Returns their addresses.

    doors: addresses at which this rank listened.  pairs: its connections, by file descriptor.
    store: the group's, shared by ranks 0 to size - 1, each of which calls this.
    """
    store.set(f"sockets/{rank}", json.dumps([*pairs.values()]))
    made = {
        (tuple(theirs), tuple(ours))
        for other in range(size)
        if other != rank
        for theirs, ours in json.loads(store.get(f"sockets/{other}"))
    }
    cut = []
    for number, (ours, theirs) in pairs.items():
        if ours in doors and (theirs, ours) not in made:
            stranger = socket.socket(fileno=number)
            with contextlib.suppress(OSError):  # it has left by itself
                stranger.shutdown(socket.SHUT_RDWR)
            stranger.detach()  # gloo closes it
            cut.append(f"{theirs[0]}:{theirs[1]}")
    return cut
