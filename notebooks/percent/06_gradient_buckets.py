# %% [markdown]
# # 06 Gradient buckets
#
# Notebook 05 hides each gradient's all-reduce behind the backward pass, but it still makes one call per tensor, and most
# of the tensors are small. Here several gradients travel together, in one flat tensor: a **bucket**.
#
# **Goal.** See why many small collectives hurt, and send the same gradients in few large ones.
#
# **Time.** About 15 minutes to read, about 65 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# On a CPU the ranks share the emulated link of notebook 03, with its latency and its bandwidth.

# %%
from zero1_helpers import use_link
from zero1_helpers.training.project import project

BATCH, LR = 4, 1e-4  # examples in a rank's batch; learning rate
link = use_link(batch_size=BATCH, folder=project("build/runs"))

# %% [markdown]
# ## Predict
#
# Say one all-reduce of $b$ bytes takes $\alpha + b / \beta$: a latency, and a time for the bytes. A model has $n$
# gradients with $B$ bytes in all.
#
# 1. How long do $n$ calls take, one after another, and how long does one call with all the bytes?
# 2. With buckets, which of these change: number of calls, bytes sent, losses, memory while gradients travel?
#
# ## Many small calls, or one

# %%
import time

from zero1_helpers import get_smol_model, set_seed

set_seed()
model = get_smol_model().to(device)
params = list(model.parameters())
sizes = sorted(p.numel() * p.element_size() for p in params)  # bytes
small = [size for size in sizes if size < 4096]
print(f"{len(sizes)} gradients, {sum(sizes):,} B in all, the middle one {sizes[len(sizes) // 2]:,} B")
print(f"{len(small)} of them are under 4 KiB; together they hold {sum(small) / sum(sizes):.2%} of the bytes")

# %% [markdown]
# A stopwatch for collectives: all ranks start together, and the median of a few tries counts.

# %%
def milliseconds(work, repeats=5):
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


# %% [markdown]
# First the latency alone: as many pieces as there are gradients, of 1 KiB each, against one tensor with the same bytes.

# %%
whole = torch.ones(len(params) * 256, device=device)  # fp32
pieces = whole.split(256)  # each (256,)
many = milliseconds(lambda: [dist.all_reduce(piece) for piece in pieces])
one = milliseconds(lambda: dist.all_reduce(whole))
if rank == 0:
    print(f"{len(pieces)} calls {many:.1f} ms, 1 call {one:.1f} ms: ratio {many / one:.0f}")
assert many > 1.5 * one, "many small calls should cost far more than one"

# %% [markdown]
# In the formula, $n\,(\alpha + \frac{B}{n\,\beta}) = n\,\alpha + \frac{B}{\beta}$ against $\alpha + \frac{B}{\beta}$: the
# bytes cost the same, the latency $n$ times as much. Now with gradients of the model's own sizes. The larger the
# tensors and the faster the calls, the smaller the difference; look at yours.

# %%
grads = [torch.zeros_like(p) for p in params]
flat = torch.cat([g.reshape(-1) for g in grads])  # (sum of numel,)
many = milliseconds(lambda: [dist.all_reduce(g) for g in grads])
one = milliseconds(lambda: dist.all_reduce(flat))
if rank == 0:
    print(f"{len(grads)} gradients {many:.1f} ms, one flat tensor {one:.1f} ms: ratio {many / one:.1f}")

# %% [markdown]
# $\alpha$ and $\beta$ are the link's here, if gloo keeps up with it. Without a link $\alpha$ is large on a CPU for a reason
# of its own: in every call the ranks wait for one another, and when they share few cores, some rank is always waiting
# for its turn to run.
#
# ## A bucket by hand
#
# One backward pass, and the mean gradients in the way of notebook 03, to compare with:

# %%
from zero1_helpers import get_dataloader, get_dataset, shard_dataset

shard = shard_dataset(get_dataset()["train"], rank, world_size)
batch = {name: tensor.to(device) for name, tensor in next(iter(get_dataloader(shard, BATCH))).items()}
model(**batch).loss.backward()
expected = [p.grad.clone() for p in params]
for grad in expected:
    dist.all_reduce(grad)
    grad /= world_size

# %% [markdown]
# **Pack:** lay all gradients in one row. **Reduce:** one call, one division.

# %%
flat = torch.cat([p.grad.reshape(-1) for p in params])  # (sum of numel,)
dist.all_reduce(flat)
flat /= world_size

# %% [markdown]
# **Unpack:** cut the row where it was joined, and give each piece its shape. These are views; nothing is copied.

# %%
for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
    p.grad = piece.view(p.shape)
shared = {p.grad.untyped_storage().data_ptr() for p in params}
print(f"{len(params)} gradients now live in {len(shared)} block of memory")
assert shared == {flat.untyped_storage().data_ptr()}, "some gradient is a copy"

# %% [markdown]
# The same means, in one collective. Only the order of additions can differ, so the last digits may:

# %%
rounding = 1e-4 if flat.dtype == torch.float32 else 5e-2  # relative
close = [torch.allclose(p.grad, grad, rtol=rounding, atol=rounding * grad.abs().max().item())
         for p, grad in zip(params, expected, strict=True)]
print(f"{sum(close)} of {len(close)} gradients equal the mean that was expected")
assert all(close), "packing or unpacking mixed up gradients"

# %% [markdown]
# ## Three ways to get it wrong
#
# **Layout.** The post packs with `g.view(-1)`. A gradient that does not lie row by row in memory (a transposed or
# channels-last weight has one) cannot be *viewed* as one row. `reshape` copies where it must.

# %%
transposed = torch.arange(6.0).reshape(2, 3).t()  # (3, 2), column by column in memory
try:
    transposed.view(-1)
except RuntimeError as error:
    print("view:", str(error).split(" (")[0])
print("reshape:", transposed.reshape(-1).tolist())
assert transposed.reshape(-1).tolist() == [0, 3, 1, 4, 2, 5]

# %% [markdown]
# **Dtype.** `torch.cat` promotes to the wider type without a word: one fp32 gradient among bf16 ones, and the whole
# bucket has twice the bytes. So a bucket holds one dtype.

# %%
half, full = torch.ones(1000, dtype=torch.bfloat16), torch.ones(1)
mixed = torch.cat([half, full])
print(f"{half.nbytes} B and {full.nbytes} B became {mixed.nbytes} B of {mixed.dtype}")
assert mixed.dtype == torch.float32

# %% [markdown]
# **Unused parameters.** A layer may be skipped on one rank only. That rank must take part all the same, with zeros, or
# the others wait for ever. But how does anyone learn whether a zero means "unused"? By one more number in the bucket:

# %%
flag = torch.tensor([float(rank > 0)], device=device)  # rank 0 got no gradient
dist.all_reduce(flag)
print(f"used on {flag.item():.0f} of {world_size} ranks")
assert flag.item() == world_size - 1

# %% [markdown]
# Used on no rank: the gradient stays `None`, and no optimizer moves the parameter, not even by weight decay.
#
# ## The plan
#
# One bucket for everything would be full only when backward has ended, and nothing would overlap. So a bucket is closed
# once it holds `bucket_cap_mb` MiB. Backward starts at the last layer, so for the first step parameters are taken from
# the end. That plan is made from shapes alone: every rank has the same one.

# %%
from zero1_helpers.ddp import plan_buckets
from zero1_helpers.training.presets import get_preset

cap = get_preset().bucket_cap_mb
buckets = plan_buckets(params, cap * 2**20)
print(f"{len(plan_buckets(params, 25 * 2**20))} bucket(s) at the post's 25 MiB, {len(buckets)} at {cap} MiB")
plan = [(len(b.params), sum(p.numel() * p.element_size() for p in b.params) / 1e6) for b in buckets]

# %% [markdown]
# A small model needs a small cap, or everything is one bucket. The preset has one that gives some.

# %%
# %%local
import pandas as pd

from zero1_helpers.report.notebook import show_table

table = pd.DataFrame(pull("plan")[0], columns=["gradients", "MB"])
table["gradients"] = table["gradients"].astype(int).astype(str)
table.index = pd.Index([f"bucket {index}" for index in table.index], name="launched in this order")
show_table(table, f"The plan for this model at {pull('cap')[0]} MiB, the same on every rank.")
assert all(plan == pull("plan")[0] for plan in pull("plan")), "ranks disagree"

# %% [markdown]
# And the post's model at 25 MiB. On the meta device it has shapes and no memory, so planning for it costs nothing.

# %%
# %%local
from zero1_helpers.ddp import plan_buckets
from zero1_helpers.training.workload import meta_smol_model

smol = list(meta_smol_model().parameters())
plan = plan_buckets(smol, 25 * 2**20)
fill, cap = [sum(p.nbytes for p in b.params) / 1e6 for b in plan], 25 * 2**20 / 1e6  # MB
print(f"{len(smol)} gradients, {sum(fill):.0f} MB, in {len(plan)} buckets of {min(fill):.0f} to {max(fill):.0f} MB")
assert sum(len(b.params) for b in plan) == len(smol) and min(fill[:-1]) >= cap

# %%
# %%local
from zero1_helpers.report.style import COLOURS, Figure, show

fig = Figure(figsize=(7.2, 2.4), dpi=130, layout="constrained")
ax = fig.subplots()
ax.bar(range(len(fill)), fill, color=COLOURS["buckets"])
ax.axhline(cap, color="#1b1f24", linestyle="--", linewidth=0.8)
ax.set(xlabel="bucket, in the order of launch", ylabel="MB")
fig.title, fig.caption = "Buckets", "SmolLM2-360M in bf16, planned on the meta device; the dashed line is the cap of 25 MiB."
fig.alt_text = f"Bars: {len(fill)} buckets, the last with {fill[-1]:.0f} MB, the others {max(fill[:-1]):.0f} at most."
show(fig)

# %% [markdown]
# Every bucket is a bit over the cap: it closes with the tensor that reaches it. The last one holds the embedding,
# which cannot be cut in this scheme; and it is the last to be ready, so no backward is left to hide it.
#
# ## The class
#
# All of this is in the package. `SimpleDDPBucket` is 05's class with a cap: there, a bucket was full with its first
# gradient.

# %%
# %%local
from zero1_helpers.ddp import Bucket, SimpleDDPBucket
from zero1_helpers.report.notebook import show_source

show_source(SimpleDDPBucket, Bucket, plan_buckets)

# %% [markdown]
# Two differences from the post. Its bucket is whatever arrived since the last one; here it is planned, and launched in
# the plan's order, so ranks agree even if gradients arrive in different orders. (As in 05, the plan is made anew after
# the first step, in the order in which rank 0's gradients came.) And while a bucket travels, its gradients live only
# there: `pack` lets go of the originals. (It also divides them, where by hand we divided their sum. The mean is the same.)
#
# Broadcasts can share a trip as well, and need no packing: parameters stay what they are. `ZeROOne(..., bucket_cap_mb=...)`
# moves the parameters of one owner into one block of memory, as soon as it is made. One broadcast can then send many of
# them, without copying anything.
#
# ## Run
#
# The loop is `train` from notebook 03. After backward, one line more than in 05: `flush_bucket` launches what is left.

# %%
def after_backward(model, optimizer):
    model.flush_bucket()
    model.wait_for_gradients()
    optimizer.step()
    optimizer.zero_grad()


# %%
from zero1_helpers import SimpleDDPBucket, ZeROOne, get_profiler, train
from zero1_helpers.training.record import describe

set_seed()
model = get_smol_model().to(device)
ddp_model = SimpleDDPBucket(model, bucket_cap_mb=cap)
optimizer = ZeROOne(torch.optim.Adam(model.parameters(), lr=LR), bucket_cap_mb=cap)
batches = [batch] * 3  # the same one again and again, so that the loss falls

# %%
with get_profiler(project("build/runs/zero1-bucket"), steps=3, model=ddp_model, optimizer=optimizer,
                  **describe("zero1-bucket", shard, BATCH)) as prof:
    losses = train(ddp_model, optimizer, batches, after_backward, prof)
print("losses", [round(loss, 3) for loss in losses])

# %% [markdown]
# And the baseline, without a profiler, for its losses:

# %%
from zero1_helpers import SimpleDDP
from zero1_helpers.training.loop import sync_step

set_seed()
sync = SimpleDDP(get_smol_model().to(device))
baseline = train(sync, torch.optim.Adam(sync.parameters(), lr=LR), batches, sync_step)

# %% [markdown]
# ## Check: the same training

# %%
# %%local
from zero1_helpers.measure.runs import load_run
from zero1_helpers.training.project import project

run, rounding = load_run(project("build/runs/zero1-bucket")), pull("rounding")[0]
baseline = [sum(at_step) / run.world_size for at_step in zip(*pull("baseline"), strict=True)]
for ours, theirs in zip(run.record["losses"], baseline, strict=True):
    print(f"in buckets {ours:.6f}, baseline {theirs:.6f}")
    assert abs(ours - theirs) <= rounding * max(theirs, 0.1), "another training than the baseline's"
assert run.record["losses"][-1] < run.record["losses"][0]

# %% [markdown]
# ## Check: calls and bytes
#
# Your run, and the recorded runs of all variants so far:

# %%
# %%local
names = ["ddp", "zero1", "zero1-async", "zero1-bucket"]
runs = {name: load_run(project(f"traces/small/{name}")) for name in names}


def all_reduces(run):
    return next(c for c in run.record["collectives"] if c["op"] == "all_reduce")


for name, shown in (runs | {"yours": run}).items():
    print(f"{name:13} {all_reduces(shown)['calls']:4} all-reduces a step, {all_reduces(shown)['bytes']:,} B")

# %%
# %%local
bucket, single = all_reduces(run), all_reduces(runs["zero1-async"])
first, later = pull("len(buckets)")[0], pull("len(ddp_model.buckets)")[0]  # planned anew after the first step
assert bucket["calls"] == round((first + 2 * later) / 3), "one all-reduce for each bucket"
assert single["calls"] == runs["zero1-async"].record["model"]["tensors"], "one all-reduce for each gradient"

# %% [markdown]
# Fewer calls, the same bytes. To be exact: the gradients, and one flag for each parameter.

# %%
# %%local
grads = run.record["predicted"][0]["grads"]
flags = pull("len(params) * params[0].element_size()")[0]
print(f"{grads:,} B of gradients + {flags:,} B of flags = {bucket['bytes']:,} B")
assert bucket["bytes"] == grads + flags
assert all_reduces(runs["zero1-bucket"])["bytes"] == single["bytes"]

# %% [markdown]
# ## Picture: one step

# %%
# %%local
from zero1_helpers.report import figures
from zero1_helpers.report.style import show

show(figures.schedule_diagram(run))

# %% [markdown]
# Read a row from left to right: gradients are made, the bucket travels, and then it waits. Step and broadcast are one
# block at the end, the same in each row, with nothing beside it. The post saw little gain from buckets, and names this
# as the likely reason. Notebook 07 takes it up.
#
# ## Picture: memory

# %%
# %%local
show(figures.memory_timeline(run))

# %% [markdown]
# During backward, gradients turn into buckets; afterwards no gradient is outside one. `peak_states` is the highest sum
# of params, grads, opt_state and buckets. Did it change? In your run, rank 0 holds at rest what ZeRO-1 predicts, and at the
# peak all gradients as well:

# %%
# %%local
memory, predicted = run.record["memory"][0], run.record["predicted"][0]
extra = memory["peak_states"] - sum(predicted[name] for name in ("params", "grads", "opt_state"))
largest = pull("max(sum(p.nbytes for p in b.params) for b in buckets + ddp_model.buckets)")[0]
print(f"rank 0, most at once: grads {memory['grads'] / 1e6:.2f} MB, buckets {memory['buckets'] / 1e6:.2f} MB")
print(f"peak_states is {extra / 1e6:.2f} MB above ZeRO-1's; the largest bucket has {largest / 1e6:.2f} MB")
assert memory["buckets"] >= grads, "all gradients end up in buckets"
assert 0 < extra < 1.1 * largest, "the price should be one bucket"

# %%
# %%local
before, after = (runs[name].record["memory"][0]["peak_states"] for name in ("zero1", "zero1-bucket"))
print(f"recorded: {before / 1e6:.2f} MB without buckets, {after / 1e6:.2f} MB with them")
assert before < after

# %% [markdown]
# While it is packed, a bucket exists twice: gradients and flat tensor. With the last bucket all others are there too.
# The broadcasts cost nothing: parameters that travel together lie together in memory, and are sent in place.
#
# ## Picture: time, recorded

# %%
# %%local
show(figures.temporal_breakdown(runs["zero1-bucket"]))
show(figures.overlap(runs["zero1-bucket"]))

# %%
# %%local
show(figures.kernel_breakdown(runs["zero1-bucket"]))

# %% [markdown]
# On a CPU, moving the bytes is work for the cores that compute, so what hides makes backward a little longer. And time
# in a collective includes waiting for the slowest rank. Compare variants with care, and only within one machine and one
# link.
#
# ## The table grows

# %%
# %%local
from zero1_helpers.report.tables import results_table

columns = ["opt_state", "states", "peak", "collectives", "sent", "non_compute_pct", "overlap_pct", "step_s"]
show_table(results_table(runs.values())[columns], runs["zero1-bucket"].setting)

# %% [markdown]
# Fewer calls again, now that the broadcasts share theirs. Look at the last columns: is it faster?
#
# ## Summary
#
# - $n$ calls pay the latency $n$ times; a bucket pays it once for many gradients. The bytes stay the same.
# - Pack row by row, one dtype a bucket; unpack as views; a flag per parameter says who was used.
# - Buckets are planned, after the first step in the order in which gradients come, and launched so on every rank.
# - The price: a bucket more in memory, for a moment. What remains is the block of step and broadcasts.
#
# ## Exercises
#
# 1. Vary the cap: run the training with `bucket_cap_mb` 0, 0.1 and 5. Before each, say how many all-reduces there will
#    be, and whether more or less of them can hide behind backward.
#
#    <details><summary>Hint</summary>
#    <code>len(plan_buckets(params, 0.1 * 2**20))</code> is the number. Write each run into a folder of its own, such as
#    <code>project("build/runs/cap-0.1")</code>, and draw its schedule: with one bucket nothing starts before backward ends; with
#    a cap of 0 you are back in notebook 05.
#    </details>
#
# 2. Until the first bucket is full, no gradient travels. PyTorch's DDP therefore starts with a bucket of 1 MiB. Write
#    `plan_small_first(params, first_bytes, cap_bytes)` on top of `plan_buckets`.
#
#    <details><summary>Solution</summary>
#    Plan the whole list with <code>first_bytes</code> and keep bucket 0; plan the parameters that are not in it with
#    <code>cap_bytes</code>; number the buckets again.
#    </details>
#
# 3. For the real model, which cap gives the lowest $n\,\alpha$ while the last bucket stays as it is? Why can no cap make
#    that one smaller than the embedding?
#
#    <details><summary>Hint</summary>
#    In a <code>%%local</code> cell, print number and size of the last bucket for caps from 1 to 200 MiB. A bucket
#    holds whole tensors.
#    </details>
#
# Next: [07 Overlapped broadcasts](07_overlapped_broadcasts.ipynb)
