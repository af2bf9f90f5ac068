# %% [markdown]
# # 12 In practice
#
# A real run is more than forward, backward and step. It has a schedule, groups with settings of their own, clipping,
# micro-batches, loss scaling, and it is stopped and resumed, often on another number of GPUs.
#
# **Goal.** Put each of these into one training loop, for all three sharded optimizers, and see where the obvious code
# goes wrong without a word.
#
# **Time.** About 30 minutes to read, about 50 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# ## Predict
#
# 1. A flat shard holds slices of the gradients. What does `torch.nn.utils.clip_grad_norm_` do if each rank gives it its
#    own slices: raise, nothing, or something wrong?
# 2. In fp16 a gradient overflows in one rank's slice, and only that rank skips its step. Afterwards, are the
#    parameters equal on all ranks?
# 3. A run is saved by four ranks, resumed on two, saved again, resumed on three; the global batch stays the same. Are its losses
#    those of a run that was never stopped: in every bit, up to rounding, or not?
#
# ## One loop for all
#
# A small model in float64, so that a difference cannot hide as rounding, and 24 rows a step, whatever the number of
# ranks:

# %%
from torch import nn

from zero1_helpers import set_seed


def new_model():
    set_seed()
    layers = nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    return nn.Sequential(*layers).double().to(device)

# %%
ROWS = 24  # in a step, over all ranks


def batch(step, part, parts):  # x: (ROWS / parts, 8), y: (ROWS / parts, 1)
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    y = x[:, :4].sin().sum(1, keepdim=True)
    rows = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    return x[rows].to(device), y[rows].to(device)

# %% [markdown]
# Two **parameter groups**, as is usual: weight decay for matrices, none for biases. The three optimizers of this series
# take groups just as torch's do. `plain` is the yardstick: one process, no sharding.

# %%
from zero1_helpers import FlatShardedOptimizer, ShardedOptimizer, ZeROOne

AdamW, LR, CAP = torch.optim.AdamW, 1e-2, 4 / 1024  # CAP in MiB: several buckets


def split(model):
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]

# %%
def zero1(model, group=None, cls=AdamW):
    return ZeROOne(cls(split(model), lr=LR), process_group=group)

def sharded(model, group=None, cls=AdamW):
    return ShardedOptimizer(cls, split(model), lr=LR, process_group=group)

def flat(model, group=None, cls=AdamW):
    return FlatShardedOptimizer(cls, split(model), CAP, lr=LR, process_group=group)

# %%
def plain(model, group=None, cls=AdamW):
    return cls(split(model), lr=LR)

makers = (zero1, sharded, flat)

# %% [markdown]
# Each has its wrapper. `behind=True` steps behind backward where the class can do it; with `False` all steps come after.

# %%
from zero1_helpers import SimpleDDP, SimpleDDPBucket, SimpleDDPBucketAsync, SimpleDDPReduceScatter


def wrap(model, optimizer, behind=True):
    if isinstance(optimizer, FlatShardedOptimizer):
        return SimpleDDPReduceScatter(model, optimizer, step_in_backward=behind)
    group = getattr(optimizer, "process_group", None)
    if isinstance(optimizer, ShardedOptimizer) and behind:
        return SimpleDDPBucketAsync(model, optimizer, CAP, process_group=group)
    if isinstance(optimizer, ShardedOptimizer):
        return SimpleDDPBucket(model, CAP, process_group=group)
    return SimpleDDP(model, process_group=group) if isinstance(optimizer, ZeROOne) else model

# %% [markdown]
# What comes after backward, and the loop:

# %%
def finish(model, optimizer, before_step=None):
    if isinstance(model, SimpleDDPBucket):  # its buckets are on their way
        model.wait_for_gradients()
    elif isinstance(model, SimpleDDP):
        model.sync_gradients()
    if isinstance(model, SimpleDDPBucketAsync):
        model.wait_for_broadcasts()
    if before_step is not None:
        before_step(optimizer)
    optimizer.step()  # nothing, if all is stepped
    optimizer.zero_grad()

# %%
def train(model, optimizer, steps, part=rank, parts=world_size, schedule=None, before_step=None):
    losses = []
    for step in steps:
        x, y = batch(step, part, parts)
        loss = (model(x) - y).square().mean()
        loss.backward()
        finish(model, optimizer, before_step)
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses

# %% [markdown]
# Every rank also trains alone, on all rows, and compares:

# %%
def alone(steps, **options):
    model = new_model()
    return model, train(model, plain(model), steps, part=0, parts=1, **options)

def gap(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)

# %%
reference, _ = alone(range(5))
for make in makers:
    model = new_model()
    optimizer = make(model)
    train(wrap(model, optimizer), optimizer, range(5))
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    print(f"{make.__name__:7} groups with decay {decay}, off by {gap(model, reference):.0e}")
    assert gap(model, reference) < 1e-9

# %% [markdown]
# In the flat buckets matrices and biases lie side by side. That does no harm: every piece of a parameter stays in its own group.
#
# ## A schedule for the lr
#
# A scheduler writes to `param_groups`. A wrapper that makes groups of its own shows it a copy:

# %%
class Copying(torch.optim.Optimizer):
    def __init__(self, optimizer):
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step()

# %%
from torch.optim.lr_scheduler import LambdaLR


def decaying(optimizer):
    return LambdaLR(optimizer, lambda step: 0.7**step)

model = new_model()
copying = Copying(plain(model))
train(model, copying, range(3), 0, 1, schedule=decaying(copying))
shown, used = (o.param_groups[0]["lr"] for o in (copying, copying.optimizer))
print(f"lr that is shown {shown:.4f}, lr that is used {used:.4f}")
assert shown < used == LR

# %% [markdown]
# No error, and the lr never falls. Here the groups *are* the wrapped optimizer's own:

# %%
model = new_model()
optimizer = plain(model)
train(model, optimizer, range(5), 0, 1, schedule=decaying(optimizer))
reference, lr = model, optimizer.param_groups[0]["lr"]

# %%
for make in makers:
    model = new_model()
    optimizer = make(model)
    train(wrap(model, optimizer), optimizer, range(5), schedule=decaying(optimizer))
    print(f"{make.__name__:7} lr {optimizer.param_groups[0]['lr']:.4f}, off by {gap(model, reference):.0e}")
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == lr
    assert gap(model, reference) < 1e-9

# %% [markdown]
# ## A group that comes later
#
# Fine-tuning often begins with most layers frozen. A layer is thawed: take the wrapper off, `add_param_group`, then wrap the
# model again, so that the new parameters are watched.

# %%
def thaw(make, part=rank, parts=world_size):
    model = new_model()
    model[0].requires_grad_(False)
    optimizer = make(model)
    train(wrapped := wrap(model, optimizer), optimizer, range(3), part, parts)
    if wrapped is not model:  # one process alone has no wrapper
        wrapped.remove()
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": LR / 10})
    train(wrap(model, optimizer), optimizer, range(3, 6), part, parts)
    return model

# %%
reference, start = thaw(plain, 0, 1), new_model()
assert not torch.equal(reference[0].weight, start[0].weight)
for make in makers:
    model = thaw(make)
    print(f"{make.__name__:7} off by {gap(model, reference):.0e}")
    assert gap(model, reference) < 1e-9

# %% [markdown]
# ## Micro-batches
#
# Two backward passes for one step. With hooks, the first would already send its gradients, so the second is an error:

# %%
model = new_model()
ddp_model = wrap(model, sharded(model), behind=False)
x, y = batch(0, rank, world_size)
try:
    for half_x, half_y in zip(x.chunk(2), y.chunk(2), strict=True):
        ((ddp_model(half_x) - half_y).square().mean() / 2).backward()
except RuntimeError as error:
    message = str(error)
print(message)
assert "wait_for_gradients()" in message
ddp_model.abandon_step()  # on every rank: whatever is under way has to arrive

# %% [markdown]
# Under `no_sync()` gradients only add up; the last micro-batch, outside, sends the sum. `SimpleDDP` has no hooks: it
# sends when it is told to.

# %%
from contextlib import nullcontext


def accumulate(model, optimizer, steps):
    wait = getattr(model, "no_sync", nullcontext)
    for step in steps:
        x, y = (t.chunk(2) for t in batch(step, rank, world_size))
        with wait():
            ((model(x[0]) - y[0]).square().mean() / 2).backward()
        ((model(x[1]) - y[1]).square().mean() / 2).backward()
        finish(model, optimizer)

# %%
reference, _ = alone(range(4))
for make in makers:
    model = new_model()
    optimizer = make(model)
    accumulate(wrap(model, optimizer), optimizer, range(4))
    print(f"{make.__name__:7} off by {gap(model, reference):.0e}")
    assert gap(model, reference) < 1e-9

# %% [markdown]
# ## Clipping
#
# Clipping scales *all* gradients by one factor, so that their norm is at most some value. A flat shard, though, shows each
# rank another part of them. Reduce, hand out each slice as gradients of the pieces, and look at the norm:

# %%
model = new_model()
optimizer = flat(model)
ddp_model = wrap(model, optimizer, behind=False)
x, y = batch(0, rank, world_size)
(ddp_model(x) - y).square().mean().backward()
ddp_model.wait_for_gradients()

# %%
for bucket in optimizer.buckets:
    bucket.hand_out_gradients()
pieces = [piece for bucket in optimizer.buckets for piece in bucket.pieces.values()]
here = nn.utils.get_total_norm([piece.grad for piece in pieces]).item()
print(f"norm here {here:.4f}, so the factor is {min(1, 0.1 / here):.4f}")

# %% [markdown]
# First prediction: no error, and a factor for each rank. That does not shorten the gradient, it bends it. Squares add up, so one number has to be
# summed:

# %%
squares = torch.tensor(here**2, dtype=torch.float64, device=device)
dist.all_reduce(squares)
true = squares.sqrt().item()
print(f"norm over all ranks {true:.4f}, factor {0.1 / true:.4f}")
if world_size > 1:
    assert here < true

# %% [markdown]
# And what of the usual line, with the model's parameters?

# %%
message = ""
try:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
except RuntimeError as error:
    message = str(error)
print(message)
assert "clip.clip_grad_norm_" in message

# %% [markdown]
# An error. The gradients are in buckets, and each `.grad` is a stand-in that raises when it is read. If it were `None`, torch
# would find no gradient, clip nothing and say nothing. The package's function does the sum above where it is needed.
# (`ZeROOne` needs none: each rank has all gradients.)

# %%
from zero1_helpers import clip

found = clip.clip_grad_norm_(optimizer, 0.1).item()
print(f"norm before {found:.4f}")
assert abs(found - true) < 1e-12
optimizer.zero_grad()

# %% [markdown]
# In training, beside one process that clips by torch's function:

# %%
def clip_alone(optimizer):
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)

def clip_sharded(optimizer):
    clip.clip_grad_norm_(optimizer, 0.1)

# %%
reference, _ = alone(range(5), before_step=clip_alone)
for make in makers:
    model = new_model()
    optimizer = make(model)
    train(wrap(model, optimizer, behind=False), optimizer, range(5), before_step=clip_sharded)
    print(f"{make.__name__:7} off by {gap(model, reference):.0e}")
    assert gap(model, reference) < 1e-9

# %% [markdown]
# All with `behind=False`. **Stepping behind backward cannot clip**: when the first bucket is stepped, the gradients of the last
# one do not exist yet, so nobody knows the norm. That is said, not ignored:

# %%
for make in (sharded, flat):
    model = new_model()
    optimizer = make(model)
    try:
        train(wrap(model, optimizer), optimizer, range(1), before_step=clip_sharded)
    except RuntimeError as error:
        print(f"{make.__name__:7} {str(error).split(':')[0]}")
        assert "step_in_backward=False" in str(error)
    else:
        raise AssertionError("nothing was clipped, and nobody noticed")

# %% [markdown]
# The price of clipping is the overlap of the steps: reductions still run behind backward, steps come after.
#
# ## fp16 and `GradScaler`
#
# fp16 ends at 65,504, and small gradients vanish in it. So the loss is multiplied by a scale, the gradients are divided by
# it, and a step with an `inf` in it is skipped; then the scale is halved. Who has an `inf`, at which scale?

# %%
def backward(wrapped, step, scale):
    x, y = (t.float() for t in batch(step, rank, world_size))
    with torch.autocast(device.type, torch.float16):
        out = wrapped(x)
    ((out.float() - y).square().mean() * scale).backward()
    wrapped.wait_for_gradients() if isinstance(wrapped, SimpleDDPBucket) else wrapped.sync_gradients()

def overflow(optimizer):  # in the slices of this rank
    return any(not bucket.mine.isfinite().all() for bucket in optimizer.buckets)

# %%
from itertools import product

model = new_model().float()
optimizer = flat(model, cls=torch.optim.SGD)
wrapped, seen = wrap(model, optimizer, behind=False), {}
for step, power in product(range(4), range(12, 21)):
    backward(wrapped, step, 2.0**power)
    seen[step, power] = [None] * world_size
    dist.all_gather_object(seen[step, power], overflow(optimizer))
    optimizer.zero_grad()

# %%
torn = [key for key, flags in seen.items() if 0 < sum(flags) < world_size]
for step, power in torn:
    ranks = [r for r, flag in enumerate(seen[step, power]) if flag]
    print(f"batch {step}, scale 2^{power}: overflow in the slices of ranks {ranks} only")
if world_size > 1:
    assert torn and not any(seen[0, 12]) and all(seen[0, 20])

# %% [markdown]
# At a small scale all is well, at a large one every rank sees an `inf`. In between, a batch can overflow in one layer and
# not in the others, and then the ranks disagree. Take such a batch, and let each rank decide for itself; skip means that its
# slice stays as it is:

# %%
step, power = torn[0] if torn else (0, 12)
before = [p.detach().clone() for p in model.parameters()]
backward(wrapped, step, 2.0**power)
skip = overflow(optimizer)
for bucket in optimizer.buckets:
    bucket.mine.mul_(2.0**-power).nan_to_num_()
for group in optimizer.param_groups:
    group["lr"] = 0.0 if skip else LR
optimizer.step()

# %%
clip.check_in_sync(model)
moved = sum((p != old).sum().item() for p, old in zip(model.parameters(), before, strict=True))
total = sum(p.numel() for p in model.parameters())
print(f"all ranks agree, and {moved} of {total} elements have moved")
if torn:
    assert 0 < moved < 0.95 * total

# %% [markdown]
# Second prediction: the ranks are equal, for each gets every slice from its owner. But the step is torn: some of the elements took it, others did not. No
# comparison of ranks finds that; only asking each other before the step prevents it. `scaler_step` does, and clips
# in between if it is told to.

# %%
def run_fp16(make, steps=20):
    model, skipped = new_model().float(), 0
    wrapped = wrap(model, optimizer := make(model, cls=torch.optim.SGD), behind=False)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24)
    for step in range(steps):
        backward(wrapped, step, scaler.scale(torch.ones((), device=device)))
        clip.scaler_step(scaler, optimizer, max_norm=1.0)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    return model, skipped, scaler.get_scale()

# %%
from math import log2

for make in makers:
    model, skipped, scale = run_fp16(make)
    clip.check_in_sync(model)
    print(f"{make.__name__:7} {skipped} steps skipped, then a scale of 2^{log2(scale):.0f}")
    assert 0 < skipped < 20 and all(p.isfinite().all() for p in model.parameters())

# %% [markdown]
# One line for each optimizer, not four: all ranks skipped the same steps and have the same scale.
#
# ## A rank that diverges
#
# The other mistake with a scaler: ask before the gradients are averaged. Then one rank skips, and the others step with
# what it sent them. Plain data parallelism, one bad batch on the last rank:

# %%
model = new_model().float()
optimizer, wrapped = torch.optim.SGD(model.parameters(), lr=LR), SimpleDDP(model)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
x, y = (t.float() for t in batch(0, rank, world_size))
bad = float("inf") if rank == world_size - 1 else 1.0
scaler.scale((wrapped(x) - y).square().mean() * bad).backward()
scaler.unscale_(optimizer)  # too early: looks at the gradients of this rank
wrapped.sync_gradients()
scaler.step(optimizer)

# %% [markdown]
# Nothing is raised, and the loss that rank 0 prints need not show what happened on another. `check_in_sync` compares a
# checksum of each tensor, 8 bytes, and names the first that differs:

# %%
message = ""
try:
    clip.check_in_sync(model)
except ValueError as error:
    message = str(error)
print(message)
if world_size > 1:
    assert "ranks differ" in message and message.endswith(" 0.weight")
    assert all(p.isfinite().all() for p in model.parameters()) == (rank == world_size - 1)

# %% [markdown]
# ## Buffers
#
# BatchNorm's running statistics are no parameters: no gradient, no step, nobody averages them. A wrapper sends rank 0's
# before each training forward, unless `broadcast_buffers=False`:

# %%
def running_means(make, shared):
    set_seed()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).double().to(device)
    starts, optimizer = [], make(model)
    wrapped = wrap(model, optimizer)
    wrapped.broadcast_buffers = shared
    model[1].register_forward_pre_hook(lambda norm, _: starts.append(norm.running_mean.clone()))
    train(wrapped, optimizer, range(3))
    from_rank0 = starts[-1].clone()
    dist.broadcast(from_rank0, src=0)
    return torch.equal(starts[-1], from_rank0)

# %%
for make in makers:
    same = [None] * world_size
    for shared in (True, False):
        dist.all_gather_object(same, running_means(make, shared))
        print(f"{make.__name__:7} broadcast_buffers={shared}: equal to rank 0's: {same}")
        assert all(same) == (shared or world_size == 1)

# %% [markdown]
# ## Activation checkpointing
#
# Activations are dropped and computed again in backward. The recomputation runs inside backward, in the middle of the launches
# and steps, and must find each weight as the forward did:

# %%
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net[4](checkpoint(self.net[:4], x, use_reentrant=False))

# %%
reference, _ = alone(range(4))
for make in makers:
    model = Recomputed(new_model())
    optimizer = make(model)
    train(wrap(model, optimizer), optimizer, range(4))
    print(f"{make.__name__:7} off by {gap(model, reference):.0e}")
    assert gap(model, reference) < 1e-9

# %% [markdown]
# A weight is stepped once its gradient is complete, and by then its layer has been recomputed. (Where that does not
# hold, autograd raises: notebook 07.)
#
# ## `torch.compile`
#
# Compile the model, then wrap it; the optimizer is made from the same parameters. (The backend here traces forward and
# backward but generates no code, so the cell needs no compiler.)

# %%
for make in makers:
    model = new_model()
    optimizer = make(model)
    compiled = torch.compile(model, backend="aot_eager")
    train(wrap(compiled, optimizer), optimizer, range(4))
    print(f"{make.__name__:7} off by {gap(model, reference):.0e}")
    assert gap(model, reference) < 1e-9

# %% [markdown]
# It trains alike. But what is left to overlap? Follow the graph from the output: the whole backward is one node, and all
# gradients come out of it at once.

# %%
node = compiled(batch(0, rank, world_size)[0]).grad_fn
delivered = [target.variable for target, _ in node.next_functions if hasattr(target, "variable")]
print(f"{node.name()} hands {len(delivered)} of {len(list(model.parameters()))} parameters their gradient")
assert len(delivered) == len(list(model.parameters()))

# %% [markdown]
# So buckets still save collectives, and hide nothing behind the backward of a model that is compiled whole. Compile its
# blocks one by one, and each block hands out its own: the last one comes first, while the others are still to be computed.

# %%
blocks = new_model()
for i in (0, 2, 4):
    blocks[i] = torch.compile(blocks[i], backend="aot_eager")
node = blocks(batch(0, rank, world_size)[0]).grad_fn
delivered = [target.variable for target, _ in node.next_functions if hasattr(target, "variable")]
print(f"{node.name()} hands {len(delivered)} of {len(list(blocks.parameters()))} parameters their gradient")
assert {id(p) for p in delivered} == {id(p) for p in blocks[4].parameters()}

# %% [markdown]
# ## Several devices
#
# A rank's parameters travel in one group, and in flat tensors together, so they have to be on one device. If not, it is said:

# %%
for make in makers:
    model = new_model()
    model[4].to("meta")  # stands for a second device
    try:
        make(model)
    except ValueError as error:
        print(f"{make.__name__:7} {error}")
    else:
        raise AssertionError("made from parameters on two devices")

# %% [markdown]
# ## The whole state on one rank
#
# `state_dict()` of a shard would be saved without complaint, and most of the state would be gone. So it raises:

# %%
for make in makers:
    try:
        make(new_model()).state_dict()
    except RuntimeError as error:
        print(f"{make.__name__:7} {str(error).split(';')[0]}")
    else:
        raise AssertionError("a part of the state, shown as the whole")

# %% [markdown]
# `full_state_dict` puts the shards together on the CPU of one rank. It is the plain optimizer's own format: one process
# goes on with it.

# %%
from zero1_helpers.checkpoint import full_state_dict

reference, _ = alone(range(6))
whole = {}
for make in makers:
    model = new_model()
    optimizer = make(model)
    train(wrap(model, optimizer), optimizer, range(4))
    whole[make.__name__] = full_state_dict(optimizer), model.state_dict()

# %%
# %%rank [0]
for name, (state, weights) in whole.items():
    single = new_model()
    single.load_state_dict(weights)
    adamw = plain(single)
    adamw.load_state_dict(state)
    train(single, adamw, range(4, 6), 0, 1)
    print(f"{name:7} -> plain: off by {gap(single, reference):.0e}")
    assert gap(single, reference) < 1e-9

# %% [markdown]
# The other ranks got `None`, and held one short piece of a tensor at a time. And back: each rank gives `load_state_dict` the whole, and keeps its
# shard. Fine for a small model. For a large one, no rank should hold all of it at any time.
#
# ## Each rank writes its own
#
# torch.distributed.checkpoint (DCP) does that: every rank writes a file of its own, and a plan, `.metadata`, says which
# elements of which tensor are where. What DCP cannot know is who holds what. A slice of a flat bucket starts in the
# midst of one parameter and ends in the midst of another:

# %%
from zero1_helpers.checkpoint import shard_of

for name, (p, piece, start) in shard_of(model, optimizer).items():
    print(f"{name}: elements {start} to {start + piece.numel() - 1} of {p.numel()}")

# %% [markdown]
# So each parameter is taken as one row of elements, and its state is saved in pieces of this row. An owner of
# whole parameters has one piece: all of it. Then it does not matter by whom a piece was written.

# %%
# %%local
from zero1_helpers.checkpoint import Piece, Writer, save_checkpoint
from zero1_helpers.report.notebook import show_source

show_source(Piece, Writer, save_checkpoint)

# %% [markdown]
# Save the flat run from above, and list what has been written:

# %%
import os
import shutil
from pathlib import Path

from zero1_helpers.checkpoint import load_checkpoint, save_checkpoint
from zero1_helpers.training.project import project

folder = Path(os.path.relpath(project("build/checkpoints")))  # short, for the messages below
if rank == 0:
    shutil.rmtree(folder, ignore_errors=True)
dist.barrier()
save_checkpoint(folder / "flat", model, optimizer, extra={"step": 4})

# %%
files = sorted(path.name for path in (folder / "flat").iterdir())
print(files)
shares = [f"model-{r + 1:05}-of-{world_size:05}.safetensors" for r in range(world_size)]
assert files == [".metadata", *(f"__{r}_0.distcp" for r in range(world_size)), *shares, "model.safetensors.index.json"]

# %% [markdown]
# The weights are in safetensors, which any tool reads. The state is in DCP's own files, and their index is a pickle:
# torch's `dcp.load` would run what a stranger put into it, `load_checkpoint` reads data only.
#
# `.metadata` comes last, under another name until it is complete. Without it there is no checkpoint: a run that dies
# while it saves leaves nothing that could be taken for one. And a complete one is not written over.

# %%
for what, error in ((lambda: load_checkpoint(folder / "none", model, optimizer), FileNotFoundError),
                    (lambda: save_checkpoint(folder / "flat", model, optimizer), FileExistsError)):
    try:
        what()
    except error as refused:
        print(f"{error.__name__}: {refused}")
    else:
        raise AssertionError("no error")

# %% [markdown]
# ## Resume, the same number of ranks
#
# Each class: save after 4 steps, go on for 3. Then a new model and a new optimizer, load, and the same 3 steps. The
# arithmetic is the same in the same order, so it must agree **in every bit**.

# %%
def stop_and_go(make, where):
    for resumed in (False, True):
        model = new_model()
        optimizer = make(model)
        wrapped = wrap(model, optimizer)
        if resumed:
            load_checkpoint(where, wrapped, optimizer)
        else:
            train(wrapped, optimizer, range(4))
            save_checkpoint(where, wrapped, optimizer)
        yield model, train(wrapped, optimizer, range(4, 7))

# %%
for make in makers:
    (went_on, losses), (resumed, again) = stop_and_go(make, folder / make.__name__ / "same")
    pairs = zip(went_on.parameters(), resumed.parameters(), strict=True)
    assert losses == again and all(torch.equal(p, q) for p, q in pairs)
    print(f"{make.__name__:7} equal in every bit")

# %% [markdown]
# ## Resume on fewer ranks, and on more
#
# Now a run of 30 steps, stopped after each 10: on 4 ranks, then on 2, then on 3. A group of some of our ranks stands for the
# smaller machine; the rest wait. The schedule is part of the run, so its state travels as `extra`.

# %%
STEPS, sizes = 30, (world_size, max(1, world_size // 2), max(1, world_size - 1))
groups = [dist.new_group(list(range(size))) for size in sizes]

def schedule_of(optimizer):  # 5 steps up, then down to 5 %
    return LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1 - 0.95 * (step - 4) / (STEPS - 4)))

# %%
def one_part(i, make, where):
    model, lr = new_model(), []
    optimizer = make(model, groups[i])
    schedule, wrapped = schedule_of(optimizer), wrap(model, optimizer)
    if i > 0:
        schedule.load_state_dict(load_checkpoint(where / str(i - 1), wrapped, optimizer)["schedule"])
    losses = []
    for step in range(10 * i, 10 * i + 10):
        lr.append(optimizer.param_groups[0]["lr"])
        losses += train(wrapped, optimizer, [step], rank, sizes[i], schedule)
    save_checkpoint(where / str(i), wrapped, optimizer, {"schedule": schedule.state_dict()})
    return model, losses, lr

# %% [markdown]
# The loss of a step is the mean over its ranks, for all have equally many rows. (The sum is over all of our ranks; those that wait add zero.)

# %%
def relay(runners, where):  # runners: for each part, which class
    losses, lr, models = torch.zeros(STEPS, dtype=torch.float64, device=device), [], []
    for i, make in enumerate(runners):
        if rank < sizes[i]:
            model, part, rates = one_part(i, make, where)
            losses[10 * i : 10 * i + 10] = torch.tensor(part, dtype=torch.float64) / sizes[i]
            lr += rates
            models.append(model)
        dist.barrier()
    dist.all_reduce(losses)
    return losses.tolist(), lr, models[-1]

# %% [markdown]
# Each class by itself, and a relay in which every part is run by another class. Beside them, one process that is never stopped:

# %%
teams = {make.__name__: [make] * 3 for make in makers} | {"relay": [zero1, sharded, flat]}
curves, ends = {}, {}
for name, runners in teams.items():
    curves[name], rates, ends[name] = relay(runners, folder / name)

model = new_model()
optimizer = plain(model)
unbroken = train(model, optimizer, range(STEPS), 0, 1, schedule=schedule_of(optimizer))

# %%
# %%rank [0]
for name, losses in curves.items():
    off = max(abs(a - b) for a, b in zip(losses, unbroken, strict=True))
    print(f"{name:7} largest difference of a loss {off:.0e}, of a parameter {gap(ends[name], model):.0e}")
    assert off < 1e-9 and gap(ends[name], model) < 1e-9

# %% [markdown]
# Third prediction. Not in every bit: a sum over 4 ranks rounds where a sum over 2 does not. But up to rounding it is the run that was
# never stopped, whichever class wrote and whichever read.

# %%
from zero1_helpers.measure.environment import environment

about = environment(device.type == "cuda")

# %%
# %%local
from zero1_helpers.report.style import COLOURS, Figure, show

curves, unbroken, rates, sizes = pull("[curves, unbroken, rates, sizes]")[0]
fig = Figure(figsize=(7.2, 4.2), dpi=130, layout="constrained")
ax, below = fig.subplots(2, sharex=True, height_ratios=[3, 1])
ax.plot(unbroken, color="#c3c9ce", linewidth=6, label="one process, never stopped")
for i, size in enumerate(sizes):
    ax.plot(range(10 * i, 10 * i + 10), curves["relay"][10 * i : 10 * i + 10], "o-", markersize=3,
            color=COLOURS[("params", "opt_state", "grads")[i]],
            label=f"{('ZeROOne', 'ShardedOptimizer', 'FlatShardedOptimizer')[i]}, {size} ranks")

# %%
# %%local
below.plot(rates, color="#1b1f24")
for axes in (ax, below):
    for stop in (9.5, 19.5):
        axes.axvline(stop, color="#1b1f24", linestyle=":", linewidth=0.8)
ax.legend(frameon=False)
ax.set(ylabel="loss", ylim=(0, None))
below.set(xlabel="step", ylabel="lr", ylim=(0, None))
fig.title = "Stopped twice, resumed on other numbers of ranks"

# %%
# %%local
about = pull("about")[0]
fig.caption = (f"Loss and lr of a run that was saved and resumed at the dotted lines, by another class and on another "
               f"number of ranks; in grey a run in one process. {about['hardware']} · {about['backend']} · {about['date']}.")
fig.alt_text = (f"Two curves that coincide: the loss falls from {unbroken[0]:.2f} to {unbroken[-1]:.2f} in {len(unbroken)} "
                f"steps, without a jump where the number of ranks changes from {sizes[0]} to {sizes[1]} to {sizes[2]}. "
                "Below, the lr rises and then falls in a straight line.")
show(fig)

# %% [markdown]
# A checkpoint of another model is refused, on all ranks, in one line, before anything is changed:

# %%
wider = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 1)).double().to(device)
for other, make in ((wider, flat), (new_model(), lambda model: flat(model, cls=torch.optim.SGD))):
    try:
        load_checkpoint(folder / "flat" / "same", other, make(other))
    except ValueError as error:
        print(error)
    else:
        raise AssertionError("loaded what does not fit")

# %% [markdown]
# ## Summary
#
# - Schedules, groups and `add_param_group` need nothing special, if `param_groups` are the real ones and not copies.
# - With hooks, micro-batches but the last belong under `no_sync()`; a forgotten one raises.
# - Clipping needs the norm over all ranks, known only after the last gradient. So there is no clipping behind
#   backward; `step_in_backward=False` keeps the reductions there and steps afterwards.
# - With sharded gradients the ranks must agree before a step is skipped. Else the step is torn, and ranks are equal all the
#   same.
# - Buffers are rank 0's. Checkpointed and compiled models train alike; one compiled whole has nothing to hide
#   collectives behind.
# - `full_state_dict`: all on one rank, for a plain optimizer. `save_checkpoint`: each rank its own, for any number of ranks and any of
#   the classes.
# - Same ranks: equal in every bit. Other numbers of ranks: equal up to rounding.
#
# ## Exercises
#
# 1. Clip the flat optimizer by each rank's own norm, in `train`, and compare with `reference`. Does the loss still fall? Are the
#    ranks equal?
#
#    <details><summary>Hint</summary>
#    <code>before_step</code> gets the optimizer: hand out the gradients as above, then
#    <code>nn.utils.clip_grad_norm_(pieces, 0.1)</code>. Adam divides by the size of the gradient, so use SGD as well to see the
#    effect at once.
#    </details>
#
# 2. Resume the relay without the schedule's state. Which of the two curves of the picture shows it first?
#
#    <details><summary>Hint</summary>
#    Leave out <code>schedule.load_state_dict</code>. The lr of the group comes with the optimizer, so what does the scheduler do to it
#    in its next step? Mind <code>initial_lr</code>.
#    </details>
#
# 3. `check_in_sync` costs a pass over all parameters. Call it every 10 steps inside `train`, and let one rank add `1e-12` to one
#    weight in step 13. When is it found, and could the losses have told?
#
#    <details><summary>Solution</summary>
#    At step 20, by name. Not from the losses: rounding differs by as much. The ranks stay apart for ever, though, and every
#    gradient from then on is an average over different points.
#    </details>
#
# 4. Mixed precision with a master copy, 64 ranks: how many bytes does a rank write with `save_checkpoint`, and how many must
#    rank 0 hold for `full_state_dict`? Take Ψ and K from notebook 01.
#
#    <details><summary>Hint</summary>
#    With DCP each rank writes K·Ψ/N and a share of the weights. Rank 0 has to hold K·Ψ, after having received nearly all of it.
#    </details>
#
# Next: [13 Side by side](13_side_by_side.ipynb)
