"""The distributed test helper itself: it must fail loudly, and leave nothing behind."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankHang, Ranks


def total(rank, world_size, scale):
    value = torch.tensor([float(rank + 1)]) * scale
    dist.all_reduce(value)
    return os.getpid(), value


def one_raises(rank, world_size, culprit):
    if rank == culprit:
        raise ValueError("shard is empty")
    dist.all_reduce(torch.ones(1))


def one_leaves_early(rank, world_size):
    if rank != 0:
        wait_for_rank_0()


def wait_for_rank_0():
    dist.broadcast(torch.ones(1), src=0)
    dist.broadcast(torch.ones(1), src=0)


def one_dies(rank, world_size):
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_answers(ranks, world_size):
    results = ranks(total, world_size, 2.0)
    expected = world_size * (world_size + 1)
    assert [value.item() for _, value in results] == [expected] * world_size


def test_processes_are_used_again(ranks):
    first = [pid for pid, _ in ranks(total, 2, 1.0)]
    assert [pid for pid, _ in ranks(total, 2, 1.0)] == first


def test_exception_names_its_rank_and_line():
    with Ranks() as ranks:
        pids = [pid for pid, _ in ranks(total, 3, 1.0)]
        with pytest.raises(RankError) as error:
            ranks(one_raises, 3, 2)
        assert not isinstance(error.value, RankHang)
        assert list(error.value.failures)[0] == 2
        message = str(error.value)
        assert "rank 2 of 3" in message and "ValueError: shard is empty" in message
        assert "in one_raises" in message
        assert not any(map(alive, pids))
        assert ranks(total, 3, 1.0)[0][1].item() == 6.0  # new processes


def test_hang_shows_stacks_and_leaves_no_process():
    with Ranks() as ranks:
        pids = [pid for pid, _ in ranks(total, 2, 1.0)]
        with pytest.raises(RankHang) as error:
            ranks(one_leaves_early, 2, timeout=2)
        message = str(error.value)
        assert "one_leaves_early hangs: 2 s are over" in message
        assert "--- rank 1" in message and "in wait_for_rank_0" in message
        assert not any(map(alive, pids)) and ranks.pids == []


def test_dead_rank_is_named():
    with Ranks() as ranks, pytest.raises(RankError, match="rank 1 of 2: died, exit code 7"):
        ranks(one_dies, 2)
