"""Ranks that `zero1 record` starts: nobody else gets in, none outlives its parent, each error is one line."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import pytest

from zero1_helpers.measure.meet import RankFailed, run_ranks
from zero1_helpers.measure.runs import load_run

from .processes import alive, as_nobody, children, eventually, linux, listening, two_users

RECORD = [
    sys.executable,
    "-m",
    "zero1_helpers",
    "record",
    "--variant",
    "ddp",
    "--preset",
    "tiny",
    "--ranks",
    "2",
    "--steps",
    "2",
    "--batch-size",
    "4",
]
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1 in /proc/net/tcp


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def send_to(ports, payload):
    for port in ports:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
                client.sendall(payload)
        except OSError:
            continue


def start(command, **kwargs):
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


@linux
def test_a_recording_listens_on_the_loopback_interface_only(tmp_path):
    out, trap = tmp_path / "run", tmp_path / "trap"
    tmp_path.chmod(0o777)
    private = tmp_path / "private"
    private.mkdir()
    process = start([*RECORD, "--out", out], env=os.environ | {"TMPDIR": str(private)})
    doors, folders = set(), set()
    while process.poll() is None:
        ranks = children(process.pid)
        found = listening([process.pid, *ranks])
        folders |= {(path.stat().st_mode & 0o777) for path in private.glob("zero1-*")}
        if new := {port for _, port in found - doors}:
            if os.geteuid() == 0:
                as_nobody(lambda new=new: send_to(new, pickle.dumps(Payload(trap))))
        doors |= found
        assert {os.getsid(pid) for pid in ranks if alive(pid)} <= {os.getsid(0)}
        time.sleep(0.01)
    said, error = process.communicate()
    assert {
        address for address, _ in doors
    } <= LOOPBACK  # none at all, if they were open too briefly
    assert not trap.exists()
    assert folders == {0o700} and not list(private.glob("zero1-*"))
    if os.geteuid() == 0 and process.returncode:  # a stranger in the very moment may be refused
        assert error.count("\n") == 1 and "rank" in error
    else:
        assert process.returncode == 0, error
        assert load_run(out).world_size == 2


@linux
def test_ranks_end_with_their_parent_even_before_torch_is_there(tmp_path):
    code = "from zero1_helpers.measure.meet import run_ranks; import time; run_ranks(time.sleep, 2, 1000)"
    process = start([sys.executable, "-c", code])
    ranks = eventually(lambda: len(children(process.pid)) == 2 and children(process.pid))
    process.kill()
    process.communicate()
    eventually(lambda: not any(map(alive, ranks)), 5)


@linux
@pytest.mark.parametrize("whom", ["session", "launcher"])
def test_ctrl_c_ends_a_recording_in_one_line(tmp_path, whom):
    process = start([*RECORD, "--out", tmp_path / "run"], start_new_session=True)
    ranks = eventually(lambda: len(children(process.pid)) == 2 and children(process.pid))
    if whom == "session":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    said, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 3
    assert process.returncode == 130
    assert error.count("\n") == 1 and error.startswith("zero1 record: ")
    assert not any(map(alive, ranks))
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def fail_on(rank, how):
    import torch.distributed as dist

    if dist.get_rank() == rank:
        if how == "raise":
            raise RuntimeError("first line\nsecond line")
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()  # waits for the one that failed


@pytest.mark.parametrize("how", ["raise", "die"])
def test_the_rank_that_failed_is_named(how):
    with pytest.raises(RankFailed) as failed:
        run_ranks(fail_on, 2, 1, how)
    assert failed.value.rank == 1 and "\n" not in str(failed.value)
    assert ("first line" if how == "raise" else "SIGSEGV") in str(failed.value)


@linux
@two_users
def test_the_rendezvous_is_closed_to_other_users(tmp_path):
    """The file by which ranks meet cannot be read, replaced or removed by somebody else."""
    tmp_path.chmod(0o777)
    private = tmp_path / "tmp"
    private.mkdir(mode=0o1777)
    code = "from zero1_helpers.measure.meet import run_ranks; import time; run_ranks(time.sleep, 1, 1000)"
    process = start([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(private)})
    try:
        folder = eventually(lambda: next(iter(private.glob("zero1-*")), None))
        assert as_nobody(lambda: os.listdir(folder)) == 1
        assert as_nobody(lambda: open(folder / "store", "a")) == 1
    finally:
        process.kill()
        process.communicate()
