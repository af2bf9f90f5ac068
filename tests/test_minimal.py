"""The smallest ZeRO-1 equals one process on every number of ranks, and says so only when it does."""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zero1_helpers import minimal
from zero1_helpers.minimal import MinimalZeRO, compare

ROOT = Path(__file__).resolve().parent.parent
SGD = dict(optimizer_cls=torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = dict(optimizer_cls=torch.optim.Adam, lr=0.01)


class NoDivision(MinimalZeRO):
    """Sums the gradients, and takes the sum for the mean."""

    def reduce_scatter(self):
        self.grads *= self.world_size
        super().reduce_scatter()


class WrongShard(MinimalZeRO):
    """Every rank receives the gradients of the next rank's shard."""

    def shards(self, flat):
        shards = super().shards(flat)
        return shards[1:] + shards[:1] if flat is self.grads else shards


class LocalOnly(MinimalZeRO):
    """Every rank keeps its own gradients."""

    def reduce_scatter(self):
        self.mine.grad.copy_(self.shards(self.grads)[self.rank])
        self.grads.zero_()


class NoGather(MinimalZeRO):
    """The other ranks never see a new shard."""

    def all_gather(self):
        pass


class Unsharded(MinimalZeRO):
    """Every rank keeps the state of everything, and the weights are still right."""

    def __init__(self, model, optimizer_cls, **settings):
        super().__init__(model, optimizer_cls, **settings)
        self.optimizer = optimizer_cls(model.parameters(), **settings)

    def reduce_scatter(self):
        dist.all_reduce(self.grads)
        self.grads /= self.world_size

    def step_shard(self):
        super().step_shard()
        self.grads.zero_()


FAULTS = {cls.__name__: cls for cls in (NoDivision, WrongShard, LocalOnly, NoGather, Unsharded)}


def equals_one_process(rank, world_size):
    return compare(**SGD), compare(**ADAM)


def unnoticed(rank, world_size):
    """The faults that this rank takes for right."""
    passed = []
    for name, fault in FAULTS.items():
        with contextlib.suppress(AssertionError):
            compare(**SGD, zero_cls=fault)
            passed.append(name)
    return passed


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_equals_one_process(ranks, world_size):
    ranks(equals_one_process, world_size)


def test_every_rank_notices_a_planted_fault(ranks):
    assert ranks(unnoticed, 2) == [[], []]


def run(*launcher):
    command = [sys.executable, "-m", *launcher, "zero1_helpers.minimal"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_alone_and_on_four_ranks_it_prints_what_the_readme_shows():
    assert 3 <= len(run().splitlines()) <= 5
    said = run("torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m")
    assert f"```\n{said}```\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_needs_nothing_of_the_package():
    source = Path(minimal.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 100
    names = {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
        )
    }
    assert not any(name.startswith("zero1_helpers") for name in names)
