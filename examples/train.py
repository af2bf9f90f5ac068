"""Train with any class of the series from a shell; kill the run, and resume it on as many ranks as you like.

    torchrun --standalone --nproc-per-node 4 examples/train.py --variant flat --out runs/flat
    torchrun --standalone --nproc-per-node 2 examples/train.py --variant flat --out runs/flat --resume

On several machines `--out` is a folder that all of them see; `torchrun --help` explains how to start there.
`--batch-size` counts the examples of a step on all ranks together. So any number of ranks trains on the same
batches, and the number of the step says where in the data a run is. A rank takes its part of a batch in
micro-batches of `--micro-batch-size`. Its random numbers (dropout) follow from seed, step and rank.
"""

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

import zero1_helpers as zero1
from zero1_helpers.accumulate import GradientSum
from zero1_helpers.checkpoint import load_checkpoint, save_checkpoint
from zero1_helpers.clip import clip_grad_norm_
from zero1_helpers.measure.meet import torchruns_group
from zero1_helpers.memory_math import state_bytes

VARIANTS = ("ddp", "zero1", "zero1-async", "zero1-bucket", "zero1-overlap", "flat")
FIXED = ("preset", "dtype", "seed", "batch_size", "lr", "warmup", "clip", "dropout")  # for --resume
IS_FIRST = os.environ.get("RANK", "0") == "0"  # it speaks for all ranks
say = partial(print, flush=True) if IS_FIRST else (lambda text: None)


def build(args, model):
    """The model in its wrapper, and the optimizer. Matrices decay, biases and norms do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if args.variant == "flat":
        optimizer = zero1.FlatShardedOptimizer(AdamW, groups, lr=args.lr)
        how = dict(step_in_backward=args.clip is None)
        return zero1.SimpleDDPReduceScatter(model, optimizer, **how), optimizer
    if args.variant == "zero1-overlap":
        optimizer = zero1.ShardedOptimizer(AdamW, groups, lr=args.lr)
        return zero1.SimpleDDPBucketAsync(model, optimizer), optimizer
    wrappers = {"zero1-async": zero1.SimpleDDPAsync, "zero1-bucket": zero1.SimpleDDPBucket}
    optimizer = AdamW(groups, lr=args.lr)
    sharded = optimizer if args.variant == "ddp" else zero1.ZeROOne(optimizer)
    return wrappers.get(args.variant, zero1.SimpleDDP)(model), sharded


def finish_step(args, model, optimizer):
    """Average the gradients, clip them, step: whatever the class has not done behind backward."""
    if isinstance(model, zero1.SimpleDDPAsync):
        model.wait_for_gradients()
    else:
        model.sync_gradients()
    if args.clip and args.variant == "ddp":
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    elif args.clip:
        clip_grad_norm_(optimizer, args.clip)
    optimizer.step()
    if hasattr(model, "wait_for_broadcasts"):
        model.wait_for_broadcasts()
    optimizer.zero_grad()


def micro_batches(args, data, step):
    """This rank's micro-batches from `step` on, epoch after epoch, in an order that the seed decides."""
    sampler = DistributedSampler(data, seed=args.seed, drop_last=True)
    steps = len(data) // args.batch_size  # of an epoch
    need(steps > 0, f"--batch-size is {args.batch_size}, but there are {len(data)} examples")
    while True:
        epoch, done = divmod(step, steps)
        sampler.set_epoch(epoch)
        mine = list(sampler)[done * args.per_rank : steps * args.per_rank]
        # A generator of its own: the default one is dropout's.
        yield from DataLoader(
            data, args.micro_batch_size, sampler=mine, generator=torch.Generator()
        )
        step = (epoch + 1) * steps


def backward(args, model, gradient_sum, batches):
    """Forward and backward of a step. Only the last micro-batch communicates. Returns the mean loss."""
    number, losses = args.per_rank // args.micro_batch_size, []
    for i in range(number):
        with gradient_sum.micro_batch(model, last=i == number - 1):
            loss = model(**next(batches)).loss / number
            loss.backward()
        losses.append(loss.detach())
    return sum(losses)


def lr_factor(args, step):
    """A linear warm-up, then half a cosine down to a tenth."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * min(1, done))


def train(args, device):
    zero1.set_seed(args.seed)  # the same weights on every rank
    model = zero1.get_smol_model(args.preset)
    model.to(device, getattr(torch, args.dtype) if args.dtype else model.dtype)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = args.dropout
    gradient_sum = GradientSum(model, args.accumulate_in_float32)
    model, optimizer = build(args, model)
    flags, done = {flag: getattr(args, flag) for flag in FIXED}, 0
    if args.resume:
        saved = load_checkpoint(args.checkpoints[-1], model, optimizer)
        done = saved.pop("step")
        need(flags == saved, f"the checkpoint was made with other flags: {saved}, now {flags}")
    schedule = LambdaLR(optimizer, lambda step: lr_factor(args, step), last_epoch=done - 1)
    data = zero1.get_dataset(args.preset)["train"].with_format("torch", device=device)
    batches = micro_batches(args, data, done)
    for step in range(done + 1, args.steps + 1):
        began = time.perf_counter()
        torch.manual_seed(args.seed + 4096 * step + dist.get_rank())
        loss = backward(args, model, gradient_sum, batches)
        finish_step(args, model, optimizer)
        schedule.step()
        dist.all_reduce(loss)
        loss, seconds = loss.item() / dist.get_world_size(), time.perf_counter() - began
        say(f"step {step}/{args.steps}  loss {loss:.4f}  {seconds:.3f} s")
        need(math.isfinite(loss), "the loss is not finite; go on from an earlier checkpoint")
        if step % args.save_every == 0 or step == args.steps:
            save_checkpoint(args.out / f"step-{step:06}", model, optimizer, flags | {"step": step})
    say(f"rank 0 keeps {state_bytes(optimizer)[0] / 1e6:.2f} MB of optimizer state")
    return model


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = stop
    add = parser.add_argument
    add("--variant", choices=VARIANTS, default="flat")
    add("--preset", help="tiny, small or smollm2-360m (default: see the README)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="default: the preset's")
    add("--out", type=Path, required=True, help="folder of the checkpoints")
    add("--resume", action="store_true", help="go on from the newest complete checkpoint in --out")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=32, help="examples of a step, on all ranks")
    add("--micro-batch-size", type=int, help="examples at once, on a rank (default: its batch)")
    add("--accumulate-in-float32", action="store_true", help="sum micro-batches in float32")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=10, help="steps in which lr rises")
    add("--clip", type=float, help="largest norm of the gradients, over all ranks")
    add("--dropout", type=float, default=0.0, help="in the attention layers")
    add("--seed", type=int, default=314)
    add("--save-every", type=int, default=50, help="steps between checkpoints")
    return parser.parse_args(argv)


def check(args):
    """Complete the flags, and find those that are out of range or do not go together."""
    for flag in ("steps", "batch_size", "micro_batch_size", "lr", "warmup", "clip", "save_every"):
        name, value = flag.replace("_", "-"), getattr(args, flag)
        need(value is None or 0 < value < math.inf, f"--{name} is above 0, not {value}")
    need(0 <= args.dropout < 1, f"--dropout is a share, 0 or more and below 1, not {args.dropout}")
    args.per_rank, rest = divmod(args.batch_size, dist.get_world_size())
    args.micro_batch_size = args.micro_batch_size or args.per_rank
    fits = rest == 0 and args.per_rank % args.micro_batch_size == 0
    need(fits, "--batch-size must be a multiple of --micro-batch-size times the number of ranks")
    clips = args.clip is None or args.variant != "zero1-overlap"
    need(clips, "zero1-overlap steps before there is a norm to --clip; use flat or zero1-bucket")
    args.checkpoints = sorted(path.parent for path in args.out.glob("step-*/.metadata"))
    need(args.resume or not args.checkpoints, f"{args.out} holds checkpoints; --resume goes on")
    need(args.checkpoints or not args.resume, f"{args.out} holds no complete checkpoint")
    args.out.mkdir(parents=True, exist_ok=True)


def need(condition, message):
    if not condition:
        raise ValueError(message)


def stop(error):
    sys.exit(f"train.py: {error}" if IS_FIRST else 2)


if __name__ == "__main__":
    args = parse()
    with torchruns_group():
        try:
            check(args)
            train(args, "cuda" if dist.get_backend() == "nccl" else "cpu")
        except (ValueError, OSError) as error:
            stop(error)
