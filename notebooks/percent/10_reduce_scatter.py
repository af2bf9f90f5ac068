# %% [markdown]
# # 10 Reduce-scatter
#
# In notebooks 04 to 07 a step moves $3\Psi$: an all-reduce brings every gradient to every rank, and then broadcasts
# bring every new parameter. But a rank steps only its own shard. It needs the sum of *those* gradients; the others are
# sent to it for nothing.
#
# **Goal.** Cut the all-reduce into its two halves, put the step between them, and train with $2\Psi$, which is what
# plain DDP sends.
#
# **Time.** About 35 minutes to read, about 75 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# ## Predict
#
# 1. Each of four ranks has a tensor of eight numbers, and each shall end with the sum of all four. How many numbers
#    must a rank send?
# 2. A shard is now a slice of one flat buffer, so it may begin in the middle of a weight matrix. Which optimizers mind?
# 3. The new parameters may arrive while the next forward pass runs already. Suppose each layer waits for its own
#    weights before its own forward. Is that enough?
#
# ## An all-reduce by hand
#
# The ranks stand in a ring. Each cuts its tensor into as many chunks as there are ranks. In every round a rank sends one
# chunk to its right neighbour and takes another one from the left; it adds what arrives, or replaces by it.

# %%
def rounds(chunks, lead, add):
    """All rounds but one; returns how many numbers were sent. `lead` says which chunk goes first."""
    sent, right, left = 0, (rank + 1) % world_size, (rank - 1) % world_size
    for i in range(world_size - 1):
        out, into = (chunks[(rank + lead - i - k) % world_size] for k in (0, 1))
        arrived = torch.empty_like(into)
        ops = [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, arrived, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        into.copy_(into + arrived if add else arrived)
        sent += out.numel()
    return sent

# %% [markdown]
# First half: a chunk travels once round the ring and grows by each rank's part. It ends complete, and on each rank a
# different one does.

# %%
start = torch.arange(2.0 * world_size, device=device) + 100 * rank  # (2 * world_size,)
chunks = list(start.clone().split(2))  # world_size times (2,)
first_half = rounds(chunks, lead=-1, add=True)
print(f"sent {first_half} of {start.numel()} numbers; my chunk: {chunks[rank].tolist()}")

# %%
summed = start.clone()
dist.all_reduce(summed)
done = [torch.equal(chunk, whole) for chunk, whole in zip(chunks, summed.split(2), strict=True)]
print("complete:", done)
assert done[rank] and sum(done) == 1, "one chunk is complete, my own"

# %% [markdown]
# Second half: the complete chunks go round once more, and now they replace what they meet.

# %%
second_half = rounds(chunks, lead=0, add=False)
assert torch.equal(torch.cat(chunks), summed), "both halves together are an all-reduce"
print(f"sent {first_half} + {second_half} numbers for an all-reduce of {start.numel()}")
assert first_half == second_half == start.numel() * (world_size - 1) // world_size

# %% [markdown]
# The halves have names, and backends offer them: **reduce-scatter** and **all-gather**. (torch 2.13 has given its two
# functions new names. Both are taken here, as in the package.)

# %%
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# %%
mine, whole = start.new_empty(2), torch.empty_like(start)
reduce_scatter(mine, start)  # (2 * world_size,) -> (2,)
all_gather(whole, mine)  # (2,) -> (2 * world_size,)
assert torch.equal(mine, chunks[rank]) and torch.equal(whole, summed)
print("reduce-scatter:", mine.tolist(), "| all-gather:", whole.tolist())

# %% [markdown]
# After the first half a rank has the summed gradients of its slice and nothing more, and that is all it needs for its
# step. So step there, and let the second half carry *parameters* instead of gradients. Nothing is left to broadcast.
# In units of $\Psi$, a rank sends in one step:

# %%
# %%local
from zero1_helpers.memory_math import bytes_sent

ways = {"DDP": ["all_reduce"], "ZeRO-1": ["all_reduce", "broadcast"], "flat": ["reduce_scatter", "all_gather"]}
for name, ops in ways.items():
    sent = {n: sum(bytes_sent(op, 1, n) for op in ops) for n in (4, 1024)}
    print(f"{name:7}" + "".join(f"  {n} ranks: {psi:.3f}" for n, psi in sent.items()))
    assert round(sent[1024]) == {"DDP": 2, "ZeRO-1": 3, "flat": 2}[name]

# %% [markdown]
# ## One flat bucket by hand
#
# Slices must be equal, and the all-gather should write straight into the parameters. Both are had by laying all
# parameters end to end in one buffer. A small model in float64, and a batch of its own for each rank and step:

# %%
from zero1_helpers import set_seed


def new_model():
    set_seed()
    linear = [torch.nn.Linear(*shape) for shape in ((6, 8), (8, 8), (8, 3))]
    return torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1], torch.nn.Tanh(), linear[2]).to(device).double()

# %%
def batch_of(r, step):
    numbers = torch.Generator().manual_seed(1000 * step + r)
    both = torch.randn(4, 9, generator=numbers, dtype=torch.float64).to(device)
    return both[:, :6], both[:, 6:]  # (4, 6) and (4, 3)

# %%
model = new_model()
params = list(model.parameters())
numel = sum(p.numel() for p in params)
width = -(-numel // world_size)  # of one slice, rounded up
weights = torch.zeros(world_size * width, dtype=torch.float64, device=device)
print(f"{numel} elements, {world_size} slices of {width}, so {len(weights) - numel} of padding")

# %% [markdown]
# Copy each parameter in, and make it a **view** of its place:

# %%
offset = 0
for p in params:
    place = weights[offset:offset + p.numel()].view_as(p)
    p.data = place.copy_(p.data)
    offset += p.numel()

weights[0] = 7.0  # write into the buffer, read it from the model
assert model[0].weight[0, 0].item() == 7.0 and model[0].weight.data_ptr() == weights.data_ptr()

# %% [markdown]
# This rank's slice is a view as well. It is the one parameter that the optimizer gets:

# %%
model.load_state_dict(new_model().state_dict())  # in place, so the views stay
here = slice(rank * width, (rank + 1) * width)
shard = torch.nn.Parameter(weights[here])  # (width,)
optimizer = torch.optim.Adam([shard], lr=0.01)
layout = [(name, p.numel()) for name, p in model.named_parameters()]

# %%
# %%local
from matplotlib.figure import Figure

from zero1_helpers.report.style import COLOURS, show


def draw_row(ax, y, blocks, colour):
    begin = 0
    for name, size in blocks:
        ax.broken_barh([(begin, size)], (y, 0.8), color=COLOURS[colour], edgecolor="white", linewidth=2)
        ax.text(begin + size / 2, y + 0.4, name if size > 20 else "", ha="center", va="center", color="white", size=8)
        begin += size

# %%
# %%local
layout, width, ranks = (pull(name)[0] for name in ("layout", "width", "world_size"))
numel = sum(size for _, size in layout)
fig = Figure(figsize=(7.2, 1.6), dpi=130, layout="constrained")
ax = fig.subplots()
draw_row(ax, 1, layout, "params")
draw_row(ax, 0, [(f"slice of rank {r}", width) for r in range(ranks)], "opt_state")
ax.spines[["left", "top", "right"]].set_visible(False)
ax.set(xlim=(0, ranks * width), xlabel="element of the flat buffer", yticks=[])

# %%
# %%local
fig.title = "Parameters, laid end to end, and the slices of the ranks"
fig.caption = f"{numel} elements in {len(layout)} parameters, {ranks * width - numel} of padding; slices of {width}."
fig.alt_text = f"Two rows of blocks. Above: {layout}. Below: {ranks} equal slices, whose borders cut through parameters."
show(fig)

# %% [markdown]
# The borders of slices care nothing for those of parameters. A step, with the collectives in the only two places where
# there are any:

# %%
def flat_step(step):
    x, y = batch_of(rank, step)
    (model(x) - y).square().mean().backward()
    grads = torch.zeros_like(weights)  # (world_size * width,)
    grads[:numel] = torch.cat([p.grad.flatten() for p in params])
    shard.grad = torch.empty_like(shard)  # (width,)
    reduce_scatter(shard.grad, grads)
    shard.grad /= world_size
    optimizer.step()
    all_gather(weights, weights[here])  # in place: the parameters are views
    model.zero_grad()

# %% [markdown]
# The yardstick is a plain optimizer in one process that sees the data of all ranks:

# %%
def train_plain(model, optimizer, steps=5):
    for step in range(steps):
        for r in range(world_size):
            x, y = batch_of(r, step)
            ((model(x) - y).square().mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()


def gap(model, other):  # the largest difference of any element
    return max((p - q).abs().max().item() for p, q in zip(model.parameters(), other.parameters(), strict=True))

# %%
from zero1_helpers.memory_math import state_bytes

for step in range(5):
    flat_step(step)
alone = new_model()
train_plain(alone, torch.optim.Adam(alone.parameters(), lr=0.01))
print(f"after 5 steps of Adam: off by less than 1e-12? {gap(model, alone) < 1e-12}; state {state_bytes(optimizer)[0]} B")
assert gap(model, alone) < 1e-12 and gap(model, new_model()) > 1e-3
assert state_bytes(optimizer)[0] == 2 * 8 * width, "two moments, 8 B each, of this slice"

# %% [markdown]
# Adam works element by element, so it does not notice that it was given the end of one matrix and the beginning of
# another as one row of numbers. And the state is equal on all ranks, whatever the shapes were.
#
# ## Many buckets
#
# With one bucket, nothing is sent before backward has ended. So: as in notebook 06, several, filled in about the order in
# which backward makes gradients, and *each* is cut into slices. The plan depends on shapes alone.

# %%
# %%local
from zero1_helpers.partition import Flat, in_buckets, pieces_of, slice_width
from zero1_helpers.report.notebook import show_source

show_source(in_buckets, Flat, slice_width, pieces_of)

# %% [markdown]
# The post's model, on the meta device:

# %%
# %%local
from zero1_helpers.training.workload import meta_smol_model

smol = list(meta_smol_model().parameters())
plan = Flat(bucket_cap_mb=25, first_bucket_mb=1).buckets(smol)
sizes = [[smol[i].numel() for i in bucket] for bucket in plan]
for k in (0, 1, 2, len(plan) - 1):
    print(f"bucket {k}: tensors {plan[k][0]} to {plan[k][-1]}, {2 * sum(sizes[k]) / 1e6:.1f} MB")
assert [i for bucket in plan for i in bucket] == list(reversed(range(len(smol)))), "last registered, first sent"

# %% [markdown]
# The first bucket is small; that is on purpose, and explained below. The last one holds the embedding, which is never
# cut *between buckets*. Between ranks it is. What each rank holds of this plan:

# %%
# %%local
for r in range(4):  # the post's four GPUs
    held = sum(end - start for s in sizes for start, end in pieces_of(s, r, 4).values())
    print(f"rank {r}: {held:,} elements")
padding = sum(4 * slice_width(s, 4) - sum(s) for s in sizes)
print(f"padding: {padding} elements in {len(plan)} buckets")
assert padding <= 3 * len(plan), "less than one element a rank and bucket"

# %% [markdown]
# ## The classes
#
# A wrapper with the schedule of notebook 07, and an optimizer that owns the buckets:

# %%
# %%local
from zero1_helpers.flat import FlatBucket, SimpleDDPReduceScatter
from zero1_helpers.flat_optimizer import FlatShardedOptimizer

show_source(SimpleDDPReduceScatter, FlatShardedOptimizer)

# %% [markdown]
# Both lean on the bucket, which is the buffer made by hand above, with more care: strides, several dtypes, several
# groups, parameters without a gradient.

# %%
# %%local
show_source(*reversed(FlatBucket.__mro__[:-1]))  # from the lowest layer up

# %% [markdown]
# Where the bucket of the hand-made version had one row of `width` numbers, this one keeps a *piece* of each parameter: a
# 1-D view of the part that lies in the slice. So each piece can keep the settings of its group and a count of its own.
#
# ## Check: one order
#
# Every phase of a step is announced (`phases`), so a listener can keep a diary:

# %%
from zero1_helpers import FlatShardedOptimizer, SimpleDDPReduceScatter, phases


class Diary(list):
    def enter(self, name, index):
        self.append(name if index is None else f"{name} {index}")

    def leave(self, name, index): ...
    def announce(self, category, tensors): ...

# %%
def flat_pair(model, cls=torch.optim.SGD, **options):
    optimizer = FlatShardedOptimizer(cls, model, bucket_cap_mb=200 / 2**20, lr=0.05)  # 200 B: small buckets
    return SimpleDDPReduceScatter(model, optimizer, **options), optimizer


def train_flat(wrapped, optimizer, steps=5):
    for step in range(steps):
        x, y = batch_of(rank, step)
        (wrapped(x) - y).square().mean().backward()
        optimizer.step()
    optimizer.receive()  # a lazy gather may still be under way
    return wrapped.module

# %%
wrapped, optimizer = flat_pair(new_model())
phases.listeners.append(diary := Diary())
train_flat(wrapped, optimizer, steps=1)
phases.listeners.remove(diary)
print(", ".join(diary))
assert diary == ["forward", "launch 0",
                 "launch 1", "wait 0", "step 0", "gather 0",
                 "launch 2", "wait 1", "step 1", "gather 1",
                 "wait 2", "step 2", "gather 2", "receive"]

# %% [markdown]
# *launch* is a reduce-scatter, *gather* an all-gather, both asynchronous. While bucket 1 is on its way to be reduced,
# bucket 0 is stepped, and its parameters leave behind the rest of backward.
#
# ## Check: parity
#
# SGD shows a wrong factor, Adam a wrong state. Different data on each rank, float64, one process as the yardstick:

# %%
for cls in (torch.optim.SGD, torch.optim.Adam):
    for options in ({}, {"lag": 0}, {"step_in_backward": False}):
        model = train_flat(*flat_pair(new_model(), cls, **options))
        alone = new_model()
        train_plain(alone, cls(alone.parameters(), lr=0.05))
        assert gap(model, alone) < 1e-11, f"{cls.__name__} {options} is another training"
print("equal to one process, 5 steps: SGD and Adam, lag 1 and 0, step in backward or after it")

# %% [markdown]
# ## Run
#
# From here on over the emulated link of notebook 03, if this is a CPU: where all share the cores, gloo alone cannot show
# what it saves to send less.

# %%
from zero1_helpers import use_link
from zero1_helpers.training.project import project

BATCH, LR = 4, 1e-4  # examples in a rank's batch; learning rate
link = use_link(batch_size=BATCH, folder=project("build/runs"))

# %% [markdown]
# The model of the series, under the profiler:

# %%
from zero1_helpers import get_dataloader, get_dataset, get_smol_model, shard_dataset
from zero1_helpers.training.presets import get_preset

set_seed()
data = shard_dataset(get_dataset()["train"], rank, world_size)
batches = [next(iter(get_dataloader(data, BATCH)))] * 3  # the same one again and again, so that the loss falls
model = get_smol_model().to(device)
optimizer = FlatShardedOptimizer(torch.optim.Adam, model, get_preset().bucket_cap_mb, lr=LR)
ddp_model = SimpleDDPReduceScatter(model, optimizer)

# %%
from zero1_helpers import get_profiler, train
from zero1_helpers.training.loop import flush_wait_step
from zero1_helpers.training.record import describe

with get_profiler(project("build/runs/flat"), steps=3, model=ddp_model, optimizer=optimizer,
                  **describe("flat", data, BATCH)) as prof:
    losses = train(ddp_model, optimizer, batches, flush_wait_step, prof)
print("losses", [round(loss, 3) for loss in losses])

# %% [markdown]
# `flush_wait_step` calls `flush_bucket()`, `wait_for_gradients()`, `optimizer.step()` and `optimizer.zero_grad()`, as in
# notebook 06. Here the step has little left to do. To compare the losses with, the baseline without a profiler:

# %%
from zero1_helpers import SimpleDDP
from zero1_helpers.checks import check_same_values
from zero1_helpers.training.loop import sync_step

check_same_values(model)  # raises unless all ranks hold the same bits
set_seed()
sync = SimpleDDP(get_smol_model().to(device))
baseline = train(sync, torch.optim.Adam(sync.parameters(), lr=LR), batches, sync_step)

# %%
# %%local
from zero1_helpers.measure.runs import load_run
from zero1_helpers.training.project import project

run = load_run(project("build/runs/flat"))
rounding = 1e-4 if run.record["model"]["dtype"] == "float32" else 5e-2
baseline = [sum(at_step) / run.world_size for at_step in zip(*pull("baseline"), strict=True)]
for ours, theirs in zip(run.record["losses"], baseline, strict=True):
    print(f"flat {ours:.6f}, baseline {theirs:.6f}")
    assert abs(ours - theirs) <= rounding * max(theirs, 0.1), "another training than the baseline's"
assert run.record["losses"][-1] < run.record["losses"][0]

# %% [markdown]
# ## Check: bytes
#
# What was sent, counted from the trace, and what should be: all buckets with their padding, once scattered and once
# gathered, times $(N-1)/N$ each. (And once, after the first step, rank 0 sends the order in which its buckets were full;
# from then on all launch them so.)

# %%
# %%local
padded, = set(pull("sum(b.weights.nbytes for b in optimizer.buckets)"))  # the same on all ranks
psi, = set(pull("sum(p.nbytes for p in model.parameters())"))
sent = {c["op"]: c["bytes_sent"] for c in run.record["collectives"]}
n, buckets = run.world_size, pull("len(optimizer.buckets)")[0]
print(f"{psi:,} B of parameters, {padded - psi} B of padding, {buckets} buckets")
print("sent in a step:", sent)
once = sent.pop("broadcast")  # after the first step: the order in which its buckets were full
assert sum(sent.values()) == 2 * padded * (n - 1) // n, "2Ψ, times (N - 1) / N, exactly"
assert all(c["calls"] == buckets for c in run.record["collectives"] if c["op"] in sent), "one of each a bucket"

# The same from the recorded runs, beside the other variants:

# %%
# %%local
runs = {name: load_run(project(f"traces/small/{name}")) for name in ("ddp", "zero1", "zero1-overlap", "flat")}
n, whole = runs["flat"].world_size, runs["ddp"].record["predicted"][0]["params"]
total = {name: sum(c["bytes_sent"] for c in r.record["collectives"]) for name, r in runs.items()}
for name, bytes_ in total.items():
    print(f"{name:14} {bytes_:>12,} B, {bytes_ / (whole * (n - 1) / n):.3f} times (N - 1) / N · Ψ")
assert abs(total["flat"] - total["ddp"]) <= 1e-3 * total["ddp"], "what DDP sends"
assert total["flat"] <= total["zero1"] * 2 * (n - 1) / (3 * n - 2) * 1.001

# %% [markdown]
# (In those units a broadcast counts a little more than one: the ring saves it nothing.)
#
# The state is an equal part on every rank, to the byte as predicted:

# %%
from zero1_helpers.memory_math import nbytes, predict

predicted = predict(model, torch.optim.Adam, world_size, optimizer.partition)[rank]
assert state_bytes(optimizer) == (predicted.opt_state, predicted.counters)
assert nbytes(b.weights for b in optimizer.buckets) == predicted.params
whole = 2 * nbytes(model.parameters())  # Adam's two moments
print(f"opt_state {predicted.opt_state:,} B; the whole, divided by the ranks: {whole / world_size:,.1f} B")

# %% [markdown]
# ## Picture: one step

# %%
# %%local
from zero1_helpers.report import figures

show(figures.schedule_diagram(run))

# %% [markdown]
# The reduce-scatter has the colour of the all-reduce elsewhere, and the all-gather that of the broadcast: the same roles.
# (Gloo's own reduce-scatter is a whole all-reduce, so on a CPU every rank is sent the parts of its slice by an all-to-all,
# and adds them up: `collectives.py`.)
#
# ## Picture: memory

# %%
# %%local
show(figures.memory_timeline(run))

# %% [markdown]
# No orange at all. A gradient lives from the operation that makes it until its hook, which moves it into the bucket. After
# the hook, `p.grad` is a stand-in without memory, which raises when it is read. The timeline books that moment as a temporary. (So it does with the
# parts that come over gloo, until they are added up; NCCL needs no room for them.) To see it directly, a hook behind the hook:

# %%
from zero1_helpers.bucket import TakenGradient

wrapped, optimizer = flat_pair(new_model())
left = []
for p in wrapped.parameters():
    p.register_post_accumulate_grad_hook(lambda p: left.append(
        sum(q.grad is not None and type(q.grad) is not TakenGradient for q in wrapped.parameters())))
train_flat(wrapped, optimizer, steps=1)
print("gradients alive after each hook:", left)
assert left == [0] * len(list(wrapped.parameters()))

# %% [markdown]
# And a bucket's gradients go as soon as its reduce-scatter is done. So three buckets are alive at the most: one on its way,
# one that is launched, each with a slice to receive, and the next, if a gradient of it came early. (The norm that is
# registered last in a layer does not run last.) Besides, there is one gradient on its way into a bucket. `predict` knows
# all this:

# %%
# %%local
from zero1_helpers.measure.runs import load_record

full = {name: load_record(project(f"traces/smollm2-360m/{name}")) for name in
        ("ddp", "zero1", "zero1-balanced", "zero1-async", "zero1-bucket", "zero1-overlap", "flat")}
states = {name: max(m["peak_states"] for m in record["memory"]) / 1e6 for name, record in full.items()}
print("SmolLM2-360M, params + grads + opt_state + buckets, MB of the fullest rank, recorded:")
for name, megabytes in states.items():
    print(f"  {name:15} {megabytes:7.1f}")

# %%
# %%local
import torch

from zero1_helpers.memory_math import predict

bound = max(r.total for r in predict(meta_smol_model(), torch.optim.Adam, 4, Flat())) / 1e6
gradient = max(2 * p.numel() for p in smol) / 1e6  # the embedding's: on its way, it counts as temporary
print(f"flat, with the largest gradient on its way: {states['flat'] + gradient:.1f} MB; predicted, at most {bound:.1f}")
assert bound - 0.1 < states["flat"] + gradient <= bound < 1363, "the bound is met, but for rounding"
assert bound < min(megabytes for name, megabytes in states.items() if name != "flat")
print(f"DDP: {states['ddp']:.1f} MB, {states['ddp'] / bound:.1f} times as much")

# %%
# %%local
for name in ("ddp", "flat"):
    show(figures.memory_timeline(load_run(project(f"traces/smollm2-360m/{name}"))))

# %% [markdown]
# Mind the axes. DDP's gradients pile up on top of the whole state; here buckets come and go, and the largest, with the
# embedding, is the last. The overlapped class of notebook 07 holds about as much in gradients and buckets. What it
# needs more is its fullest shard: here none is larger than the others. And on this machine, against the least that DDP
# and ZeRO-1 need, for they hold all gradients at once:

# %%
# %%local
yours = sum(m["peak_states"] for m in run.record["memory"]) / 1e6
largest, = set(pull("max(p.nbytes for p in model.parameters()) / 1e6"))
ddp = run.world_size * 4 * psi / 1e6  # params, grads and two moments
zero1 = (run.world_size * 2 + 2) * psi / 1e6
print(f"states at their peak, all ranks: {yours:.1f} MB; at least {zero1:.1f} MB with ZeRO-1, {ddp:.1f} MB with DDP")
assert run.world_size == 1 or yours + run.world_size * largest < min(ddp, zero1)

# %% [markdown]
# ## Gather lazily
#
# The last all-gather starts when backward ends, and no backward is left to hide it. But the next *forward* could: its
# first layer needs only its own parameters. So gather late, and wait for each bucket only when somebody wants it.
#
# First the obvious way: a hook before each module's forward waits for the parameters that this module owns.

# %%
def wait_in_owners(model, optimizer):
    def before_forward(module, args):
        for bucket in optimizer.buckets:
            if set(bucket.params) & set(module.parameters(recurse=False)):
                bucket.receive_parameters()

    for module in model.modules():
        module.register_forward_pre_hook(before_forward)

# %% [markdown]
# A model for which that is not enough. It scores `hidden` against an embedding's rows, so the table is read, while the
# module that owns it is never called. Retrieval models do this, and so do output heads that borrow the embedding's weight;
# those are right only as long as the embedding happens to be called first.

# %%
class Scorer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.table = torch.nn.Embedding(3, 16)

    def forward(self, x):  # (batch, 6)
        hidden = torch.tanh(self.first(x))
        return torch.nn.functional.linear(hidden, self.table.weight)  # (batch, 3)

# %%
def new_scorer():
    set_seed()
    return Scorer().to(device).double()

# %% [markdown]
# On this machine an all-gather of so few bytes has usually arrived before anybody looks: the fault would be there, and
# the test green. A slow link is easily had, though. Here the values arrive at `wait()`, and not one moment before:

# %%
class LateGather:
    def __init__(self, weights, mine, group=None, async_op=True):
        self.weights, self.arrived = weights, torch.empty_like(weights)
        self.work = all_gather(self.arrived, mine.clone(), group=group, async_op=True)

    def wait(self):
        self.work.wait()
        self.weights.copy_(self.arrived)

# %%
import inspect
from unittest import mock

from zero1_helpers.flat import FlatBucket

late_gathers = mock.patch.object(inspect.getmodule(FlatBucket), "all_gather", LateGather)
no_guard = mock.patch.object(FlatBucket, "guard", lambda bucket: None)  # only the naive hooks
alone = new_scorer()
train_plain(alone, torch.optim.SGD(alone.parameters(), lr=0.05))

# %%
with late_gathers, no_guard:
    wrapped, optimizer = flat_pair(new_scorer(), lazy_gather=True)
    wait_in_owners(wrapped.module, optimizer)
    naive = train_flat(wrapped, optimizer)
check_same_values(naive)  # passes
print(f"naive: the ranks agree, and are off by {gap(naive, alone):.1e}; trained by {gap(alone, new_scorer()):.1e} in all")
assert world_size == 1 or gap(naive, alone) > 1e-4

# %% [markdown]
# No error, no warning, and every rank ends with the same numbers: the wrong ones. In each forward a rank saw its own slice
# of the table as it is, and the other slices as they were one step before.
#
# The hook asks *who owns the weight*. The right question is *who reads it*. Torch can answer that: an argument of a class
# of its own is asked first, by every function (`__torch_function__`). So for the time of its journey a parameter
# changes its class:

# %%
# %%local
import inspect

show_source(inspect.getmodule(FlatBucket).Arriving)

# %% [markdown]
# Same model, same late gathers, `lazy_gather=True` as it comes:

# %%
with late_gathers:
    guarded = train_flat(*flat_pair(new_scorer(), lazy_gather=True))
print(f"guarded: exact? {gap(guarded, alone) < 1e-12}")
assert gap(guarded, alone) < 1e-12

# %% [markdown]
# See it at work. After a step the table is on its way. Its shape is known, so to ask for it is free; its values are not:

# %%
wrapped, optimizer = flat_pair(new_scorer(), lazy_gather=True)
x, y = batch_of(rank, 0)
(wrapped(x) - y).square().mean().backward()
optimizer.step()
weight = wrapped.module.table.weight
kinds = [(type(weight).__name__, tuple(weight.shape))]
weight.norm()  # read by no module at all
kinds += [(type(weight).__name__, tuple(weight.shape))]
print(kinds[0], "-> read ->", kinds[1])
assert [kind for kind, _ in kinds] == ["Arriving", "Parameter"]

# %% [markdown]
# In what order? Forward begins with the parameters that backward finished last. So when all is stepped, the gathers
# leave in reverse. But not all wait for that. Forward is a third of the computing, and all gathers are half of the bytes: too
# much for it to hide. So every second one leaves in backward, as soon as its bucket is stepped:

# %%
optimizer.receive()
wrapped, optimizer = flat_pair(new_model(), lazy_gather=True)
phases.listeners.append(diary := Diary())
train_flat(wrapped, optimizer, steps=1)
phases.listeners.remove(diary)
print(", ".join(diary))  # "receive" is the phase around the gathers
assert [entry for entry in diary if entry.startswith("gather")] == ["gather 1", "gather 2", "gather 0"]

# %% [markdown]
# One thing cannot be guarded: an alias made before (`w = p.data`) is an ordinary tensor, and reads whatever is there. That
# is why eager gathers are the default.
#
# ## Why the first bucket is small
#
# The link can do nothing before the first bucket is full. How much does it lose? A model on paper: backward makes the
# elements at an even pace, and the link is the bottleneck, it needs twice as long for all of them, and a moment more
# for each collective. Backward takes 1.

# %%
# %%local
def on_the_link(sizes, pace=2.0, latency=0.0):
    """When the link starts, how long it is idle until all is sent, and when that is."""
    made, free, idle = 0.0, 0.0, 0.0
    for size in sizes:
        made += size / sum(sizes)  # now the bucket is full
        idle += max(0.0, made - free)
        free = max(made, free) + latency + pace * size / sum(sizes)
    return sizes[0] / sum(sizes), idle, free

# %%
# %%local
layers = [p for p in smol if p.numel() < max(q.numel() for q in smol)]  # without the embedding
lost = {}
for cap, first in ((100, 100), (100, 1), (25, 25), (25, 1), (5, 1)):
    sizes = [sum(layers[i].numel() for i in bucket) for bucket in Flat(cap, first).buckets(layers)]
    begins, idle, end = on_the_link(sizes)
    lost[cap, first] = end - 2
    print(f"cap {cap:3} MiB, first {first:3}: {len(sizes):3} buckets, starts at {begins:.3f}, idle {idle:.3f}, "
          f"ends at {end:.3f}; with latency {on_the_link(sizes, latency=0.005)[2]:.3f}")
assert lost[25, 1] < lost[25, 25] < lost[100, 1] < lost[100, 100]

# %% [markdown]
# With a small first bucket the link starts at once. Then it has to wait for the second, so what is gained is what the first
# one carries: little, but for one collective more it is cheap. This is `first_bucket_mb`, 1 MiB as in torch's DDP.
# Smaller buckets throughout gain more, until the latency of many collectives eats it up: the last column. (The
# embedding is left out of the sum: its gradient comes last, and whatever the plan, its journey begins after backward.)
#
# ## What a flat shard cannot do
#
# **A rule that looks at a whole parameter.** Take an optimizer that moves every parameter by the same length, whatever
# the size of its gradient; LARS and LAMB scale by such norms:

# %%
class EqualSteps(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p -= group["lr"] * p.grad / p.grad.norm()

# %%
whole = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))
halves = [torch.nn.Parameter(half.clone()) for half in whole.detach().split(4)]
whole.grad = torch.arange(8, dtype=torch.float64)  # (8,)
for half, grad in zip(halves, whole.grad.split(4), strict=True):
    half.grad = grad
for params in ([whole], halves):
    EqualSteps(params, lr=0.1).step()
print(f"stepped whole and stepped in halves: off by {(whole - torch.cat(halves)).abs().max():.3f}, lr is 0.1")
assert (whole - torch.cat(halves)).abs().max() > 0.01

# %% [markdown]
# Nothing would raise, and which numbers come out would depend on the number of ranks. So the class tries the rule on a
# small matrix first, whole and in pieces, and refuses what differs:

# %%
messages = {}
for cls in (EqualSteps, torch.optim.Adafactor, torch.optim.Muon, torch.optim.AdamW, torch.optim.RMSprop):
    try:
        FlatShardedOptimizer(cls, new_model(), lr=0.1)
    except ValueError as error:
        messages[cls.__name__] = str(error)
print(*messages.values(), sep="\n")
assert set(messages) == {"EqualSteps", "Adafactor", "Muon"}

# %% [markdown]
# For those there is `ZeROOne`, which shards whole parameters; split by bytes (notebook 09) it is nearly as even:

# %%
from zero1_helpers import SimpleDDP, ZeROOne, by_bytes

wrapped = SimpleDDP(new_model())
optimizer = ZeROOne(EqualSteps(wrapped.parameters(), lr=0.05), partition=by_bytes)
x, y = batch_of(rank, 0)
(wrapped(x) - y).square().mean().backward()
wrapped.sync_gradients()
optimizer.step()
alone = new_model()
train_plain(alone, EqualSteps(alone.parameters(), lr=0.05), steps=1)
assert gap(wrapped.module, alone) < 1e-12

# %% [markdown]
# **A parameter without a gradient.** An optimizer skips it; weight decay must not touch it. In a bucket, something has to
# be sent in its place, and the receiver of the sum must know whether *any* rank had a gradient. Notebook 06 sends flags.
# Here a number does it that floating point has to spare:

# %%
nobody = torch.full((world_size,), -0.0, device=device)  # no rank has a gradient
somebody = nobody + 0.0 if rank == 0 else nobody.clone()  # rank 0 has one, and it is zero
signs = []
for sent in (nobody, somebody):
    arrived = torch.empty(1, device=device)
    reduce_scatter(arrived, sent)
    signs.append("-" if torch.signbit(arrived).item() else "+")
print("nobody had one:", signs[0] + "0.0", "| rank 0 had one:", signs[1] + "0.0")
assert signs == ["-", "+"] and (torch.tensor(1.5) + -0.0).item() == 1.5

# %% [markdown]
# $-0.0$ is the number that changes no sum: $x + (-0.0) = x$, and the sum is $-0.0$ only if all terms are. A rank that has
# a gradient adds $+0.0$ to the first element of each piece, so that no $-0.0$ of its own stands there. The wrapper tries it on the backend before it relies on
# it. Three layers, of which one is used by all ranks, one by rank 0 and one by nobody, under weight decay:

# %%
set_seed()
used = torch.nn.ModuleDict({who: torch.nn.Linear(6, 3) for who in ("all", "rank0", "nobody")}).to(device).double()
before = {name: p.detach().clone() for name, p in used.named_parameters()}
wrapped, optimizer = flat_pair(used, torch.optim.AdamW)
used.forward = lambda x: used["all"](x) + (used["rank0"](x) if rank == 0 else 0)
(wrapped(x) - y).square().mean().backward()
optimizer.step()
moved = {name.split(".")[0] for name, p in used.named_parameters() if not torch.equal(p, before[name])}
print("moved:", sorted(moved))
assert moved == {"all", "rank0"}

# %% [markdown]
# **Several groups in one bucket.** A slice may hold elements of two groups. Each piece keeps its group's settings:

# %%
def in_groups(model):
    kinds = {0.3: [p for p in model.parameters() if p.ndim == 2], 0.0: [p for p in model.parameters() if p.ndim == 1]}
    return [{"params": params, "weight_decay": decay, "lr": 0.01 + decay} for decay, params in kinds.items()]


model, alone = new_model(), new_model()
optimizer = FlatShardedOptimizer(torch.optim.AdamW, in_groups(model), bucket_cap_mb=25, lr=0.01)
train_flat(SimpleDDPReduceScatter(model, optimizer), optimizer)
train_plain(alone, torch.optim.AdamW(in_groups(alone), lr=0.01))
print(f"{len(optimizer.buckets)} bucket, {len(optimizer.param_groups)} groups; equal? {gap(model, alone) < 1e-12}")
assert len(optimizer.buckets) == 1 and gap(model, alone) < 1e-12

# %% [markdown]
# ## The table
#
# The recorded runs; the rows of the others are in notebook 08. *Sent* is exact. Times are those of one short run:
# for a fair race of all classes, round by round, see `benchmarks/RESULTS.md`.

# %%
# %%local
from zero1_helpers.report.notebook import show_table
from zero1_helpers.report.tables import results_table

columns = ["opt_state", "states", "peak", "collectives", "sent", "non_compute_pct", "overlap_pct", "step_s"]
show_table(results_table(runs.values())[columns], runs["flat"].setting)

# %% [markdown]
# ## Summary
#
# - An all-reduce is a reduce-scatter and an all-gather. With the step between them, a step moves $2\Psi$ and not $3\Psi$.
# - Parameters are views of flat buckets, and each rank owns an equal slice of every bucket: the state is $1/N$, to the
#   byte, and nothing has to be copied back.
# - The schedule is that of notebook 07. Gradients live until their hook, buckets until they are reduced.
# - A lazy gather must be guarded by who reads a parameter, not by who owns it. The naive way is wrong without a word.
# - The price: only update rules that work element by element.
#
# ## Exercises
#
# 1. A rank sends $2\frac{N-1}{N}\Psi$. Write the same expression for a class that all-reduces the gradients and
#    all-gathers the parameters. From how many ranks on is it above $2.9\Psi$?
#
#    <details><summary>Hint</summary>
#    Sum <code>bytes_sent(op, 1, n)</code> over the two operations; it is $3\frac{N-1}{N}$.
#    </details>
#
# 2. An all-reduce without a ring: everybody sends its tensor to rank 0, which adds them up and sends the sum back. How
#    much does rank 0 send, how much all ranks together, and what does the ring change?
#
#    <details><summary>Hint</summary>
#    Add up over the ranks, for both. The total is the same; in the ring no link carries more than another.
#    </details>
#
# 3. Train `Scorer` with the naive hooks, but without `LateGather`, a few times. How often is it right? What does that say
#    about tests of such code?
#
#    <details><summary>Hint</summary>
#    Leave <code>late_gathers</code> out. A fast link wins the race nearly always; a test must make the
#    slow case, and not wait for it.
#    </details>
#
# 4. `Scorer` is cured if its forward begins with `self.table(torch.zeros(1, dtype=torch.long))`. Why? Which reads
#    does that not cure?
#
#    <details><summary>Hint</summary>
#    The owner is called, so its hook waits. What of a norm over <code>model.parameters()</code>, or of
#    <code>state_dict()</code>, between two steps?
#    </details>
#
# 5. Make the buckets of `new_model()` so small that each holds one parameter, and let there be more ranks than a bias has
#    elements. How much padding is there, and what do the ranks at the end own?
#
#    <details><summary>Hint</summary>
#    <code>pieces_of([3], rank, 4)</code> for each rank; <code>slice_width</code> is at least 1.
#    </details>
#
# Next: [11 Master weights](11_master_weights.ipynb)
