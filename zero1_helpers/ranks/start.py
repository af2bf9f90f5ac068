"""Starting ranks, and the lines that say what they are doing."""

import contextlib
import re
import socket
import sys
import time

import psutil

from zero1_helpers.ranks.arguments import ClusterError, choose_gpus
from zero1_helpers.ranks.channel import Channel
from zero1_helpers.ranks.failures import check
from zero1_helpers.ranks.interrupts import deferred_interrupt
from zero1_helpers.ranks.output import alike, count, labelled, span
from zero1_helpers.ranks.process import Processes

START = 180.0  # seconds in which all ranks must have imported torch, and then have joined


def start(world_size: int, master_addr: str, wanted: list[int] | None, grace: float):
    """Start ranks that share a process group. wanted: GPUs, or None: as many as torch sees.

    Returns the channel to them, and a clause on the backend and why. Raises ClusterError; then
    nothing is left of them.
    """
    try:
        processes = Processes(world_size, master_addr)
    except OSError as error:  # no file descriptors, processes or memory left
        raise ClusterError(f"The {count(world_size)} cannot start: {error}.") from None
    with deferred_interrupt():
        channel = Channel(processes, grace)
        try:
            hello = channel.hello(START)
            check_imports(channel)
            check(hello, channel)
            gpus, why = choose_gpus(hello.answers[0]["gpus"], world_size, wanted)
            for rank in channel.ranks:
                rank.device = f"GPU {gpus[rank.number]}" if gpus else "CPU"
            job = channel.request(range(world_size), "form", limit=START, gpus=gpus)
            check(job, channel)
        except BaseException:
            channel.shutdown(patience=0.0)
            raise
    for rank in channel.ranks:
        rank.printed()  # what gloo says about its connections
    notes = {rank: answer["warnings"] for rank, answer in job.answers.items() if answer["warnings"]}
    for who, lines in alike(notes, ["\n".join(lines) for lines in notes.values()]):
        print(labelled(who, lines), end="")
    return channel, why


def check_assertions() -> None:
    """Raise ClusterError if Python was told to skip assertions: no claim would be checked."""
    if not __debug__:
        raise ClusterError(
            "Assertions are switched off (python -O or PYTHONOPTIMIZE), so the notebooks "
            "would check nothing. Unset PYTHONOPTIMIZE and restart the kernel."
        )


def check_address(address: str) -> None:
    """Raise ClusterError if this is no address; ours needs no name to be resolved."""
    if address in ("localhost", "127.0.0.1", "::1"):
        return
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror as error:
        raise ClusterError(f"--master-addr {address} does not resolve: {error}.") from None


def check_imports(channel: Channel) -> None:
    """Raise ClusterError if the ranks could not start because a package is missing."""
    missing = re.search(r"No module named '(.+?)'", channel.parent.output.text(1))
    if channel.lost and missing:
        raise ClusterError(f"The ranks cannot start: {sys.executable} has no module {missing[1]}.")


def describe_ranks(channel: Channel) -> str:
    """One line a rank: what it is doing, its pid, device, memory and uptime."""
    channel.check_alive()
    states, text = channel.look(), ""
    for rank in channel.ranks:
        state, memory = states[rank.number], ""
        with contextlib.suppress(psutil.Error):
            used = psutil.Process(rank.pid).memory_info().rss
            memory = f"memory {used / 1e9:.2f} GB, "
        if "peak" in state:
            memory += f"peak memory {state['peak'] / 1e9:.2f} GB, "
        doing, device = state["where"], state.get("device", rank.device)
        if "request" in state:
            doing = f"running {state['request']} for {state['seconds']:.0f} s, {doing}"
        text += (
            f"rank {rank.number}: {doing}, pid {rank.pid}, {device}, {memory}"
            f"up {time.time() - rank.started:.0f} s\n"
        )
    return text


def show_running(channel: Channel, ranks, seconds: float) -> None:
    """Print the last lines of a cell that still runs, and what each rank is doing."""
    tails = [channel.ranks[rank].output.text(20) for rank in ranks]
    for who, text in alike(ranks, tails):
        print(labelled(who, text), end="")
    print(f"... running for {seconds:.0f} s")
    states = channel.look(ranks, 0.2)
    for who, where in alike(ranks, [states[rank]["where"] for rank in ranks]):
        print(f"    {span(who)}: {where}")


def show_dropped(channel: Channel) -> None:
    """Print how many messages were dropped since the last cell."""
    for rank in channel.ranks:
        if rank.dropped:
            print(
                f"rank {rank.number}: {rank.dropped} messages were dropped, because they were no "
                "answer of this process to this cell."
            )
            rank.dropped = 0
