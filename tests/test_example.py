"""examples/train.py, end to end: killed and resumed, it becomes the run that nobody killed."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train.py"
STEPS = 12
RUN = f"--preset tiny --steps {STEPS} --save-every 2 --warmup 2 --batch-size 8".split()
CLIPPED = [*RUN, *"--variant flat --clip 0.5 --micro-batch-size 2 --accumulate-in-float32".split()]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LIMIT = 250  # seconds, for what takes ten


def environment():
    there = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return there | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent.parent)}


def load_script():
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def weights_after(rank, world_size, *flags):
    """Of the run that these flags describe. Where it is finished already, --resume only loads it."""
    script = load_script()
    args = script.parse(list(flags))
    script.check(args)
    model = script.train(args, torch.device("cpu"))
    weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    model.remove()
    return weights


def shell(launcher, *flags):
    done = subprocess.run(
        [*launcher, SCRIPT, *flags],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    return ranks(weights_after, 2, *CLIPPED, "--out", str(tmp_path_factory.mktemp("whole")))[0]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run whose rank 1 was killed in the midst of it, some steps after a checkpoint."""
    out = tmp_path_factory.mktemp("killed") / "out"
    command = [*TORCHRUN, SCRIPT, *CLIPPED, "--out", out]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        children = []
        for line in run.stdout:
            if line.startswith("step 1/"):
                children = psutil.Process(run.pid).children(recursive=True)
            if line.startswith("step 3/"):
                next(c for c in children if c.environ().get("RANK") == "1").kill()
        run.communicate(timeout=LIMIT)
    assert run.returncode != 0
    _, alive = psutil.wait_procs(children, timeout=LIMIT)
    assert children and not alive
    return out


def largest_difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_killed_and_resumed_it_is_the_run_that_was_not(ranks, whole, killed, tmp_path):
    out = ["--out", str(shutil.copytree(killed, tmp_path / "out"))]
    status, said, errors = shell(TORCHRUN, *CLIPPED, *out, "--resume")
    assert status == 0, errors
    steps = [line for line in said if line.startswith("step ")]
    assert 2 <= STEPS - len(steps) < STEPS and f"step {STEPS}/{STEPS}" in steps[-1]
    resumed = ranks(weights_after, 1, *CLIPPED, *out, "--resume")[0]
    # The first step after a resume has other buckets, so the squares of the norm add up in another order.
    assert largest_difference(whole, resumed) < 1e-6


@pytest.mark.parametrize("world_size", [1, 4])
def test_on_another_number_of_ranks_it_is_so_within_rounding(
    ranks, whole, killed, tmp_path, world_size
):
    out = ["--out", str(shutil.copytree(killed, tmp_path / "out"))]
    for resumed in ranks(weights_after, world_size, *CLIPPED, *out, "--resume"):
        assert largest_difference(whole, resumed) < 1e-5  # float32; the weights have moved by 1e-2


def interrupted(rank, world_size, folder):
    """For each variant: is a run resumed after step 2 in every bit the one that went on? And its weights."""
    equal, weights = {}, {}
    for variant in load_script().VARIANTS:
        flags = [*RUN, *f"--steps 3 --dropout 0.1 --dtype float64 --variant {variant}".split()]
        here = f"{folder}/{variant}"
        weights[variant] = weights_after(rank, world_size, *flags, "--out", f"{here}/whole")
        if rank == 0:
            shutil.copytree(f"{here}/whole/step-000002", f"{here}/part/step-000002")
        torch.distributed.barrier()
        resumed = weights_after(rank, world_size, *flags, "--out", f"{here}/part", "--resume")
        equal[variant] = largest_difference(weights[variant], resumed) == 0
    return equal, weights


def test_every_variant_goes_on_in_every_bit_and_all_train_alike(ranks, tmp_path):
    """In every bit because two ranks add two numbers, in whichever bucket they travel. With more ranks the
    place in a bucket decides who adds first, and the first step after a resume has other buckets."""
    for equal, weights in ranks(interrupted, 2, str(tmp_path), timeout=LIMIT):
        assert all(equal.values()), equal
        for variant in weights:
            assert largest_difference(weights[variant], weights["ddp"]) < 1e-12, variant


BAD = [
    "--steps 0",
    "--lr nan",
    "--dropout 1",
    "--preset huge",
    "--batch-size 3 --micro-batch-size 2",
    "--batch-size 100000 --micro-batch-size 1",
    "--variant zero1-overlap --clip 1",
    "--resume",
]


def accepted(rank, world_size, empty, used):
    """The bad flags that raise no ValueError, of a new run and of one that would mix with another."""
    wrong = []
    bad = [f"--out {empty} {flags}" for flags in BAD]
    for flags in [*bad, f"--out {used}", f"--out {used} --resume --seed 1"]:
        with contextlib.suppress(ValueError):
            weights_after(rank, world_size, *RUN, *flags.split())
            wrong.append(flags)
    return wrong


def test_bad_flags_and_checkpoints_of_another_run_are_refused(ranks, killed, tmp_path):
    assert ranks(accepted, 1, str(tmp_path), str(killed)) == [[]]


def test_a_refusal_is_one_line_and_an_exit_status(tmp_path):
    status, said, errors = shell([sys.executable], *RUN, "--out", tmp_path, "--lr", "x")
    assert status != 0 and len(errors) == 1 and not said
