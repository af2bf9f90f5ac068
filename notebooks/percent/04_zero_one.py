# %% [markdown]
# # 04 ZeRO-1: one shard of the optimizer on each rank
#
# **Goal.** Turn the hand-made steps of notebook 02 into an optimizer class, and measure what it saves and what it costs.
#
# **Time.** About 20 minutes to read, about 65 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# On a CPU the ranks share the emulated link of notebook 03, so that communication takes a share of the time as it did for the post. (It is measured anew if there are no runs yet.)

# %%
from zero1_helpers import use_link
from zero1_helpers.training.project import project

BATCH, LR = 4, 1e-4  # examples in a rank's batch; learning rate
link = use_link(batch_size=BATCH, folder=project("build/runs"))

# %% [markdown]
# ## Predict
#
# In the DDP baseline every rank holds the whole `opt_state`. Now each rank keeps the state of its own shard, steps only that shard, and broadcasts the result. Before you run anything, write down three guesses:
#
# 1. Which part of the whole `opt_state` will the *fullest* rank hold? Is it 1 / `world_size`?
# 2. By how much will the bytes that are communicated in a step grow?
# 3. Will a step take more time, or less?

# %% [markdown]
# ## The workload, as before
#
# Same seed, same data and same model as in the baseline, so that everything can be compared. As in notebook 03 each rank trains on one batch of its own again and again.

# %%
from zero1_helpers import get_dataloader, get_dataset, get_smol_model, set_seed, shard_dataset

shard = shard_dataset(get_dataset()["train"], rank, world_size)
batch = next(iter(get_dataloader(shard, BATCH)))  # input_ids: (BATCH, length)

def new_model():
    set_seed()
    return get_smol_model().to(device)

# %% [markdown]
# ## The class by hand
#
# Three methods are enough. The first splits: `by_count` is the arithmetic of notebook 02 as a function, and returns one owner for each parameter. Then the parameters of other ranks leave the groups. State is made in the first step, for what is in the groups, so the state of the others is never made.

# %%
from zero1_helpers import by_count


class BareZeROOne:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.owners = by_count(self.params, world_size)  # [0, 0, ..., world_size - 1]
        mine = {p for p, owner in zip(self.params, self.owners, strict=True) if owner == rank}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in mine]

# %% [markdown]
# A step is a local step and a broadcast of every parameter by its owner. All ranks walk the same list in the same order, so every broadcast finds its partners.

# %%
def step(self):
    self.optimizer.step()  # only the shard of this rank
    for p, owner in zip(self.params, self.owners, strict=True):
        dist.broadcast(p.data, src=owner)  # p.shape, from its owner to the others

def zero_grad(self):
    for p in self.params:  # all of them: every rank has computed every gradient
        p.grad = None

BareZeROOne.step, BareZeROOne.zero_grad = step, zero_grad

# %% [markdown]
# The loop is that of the baseline, and so is what happens after backward. `check_same_values` raises if one bit differs between the ranks.

# %%
def after_backward(model, optimizer):
    model.sync_gradients()
    optimizer.step()
    optimizer.zero_grad()

# %%
from zero1_helpers import SimpleDDP, train
from zero1_helpers.checks import check_same_values

model = SimpleDDP(new_model())
bare = BareZeROOne(torch.optim.Adam(model.parameters(), lr=LR))
train(model, bare, [batch], after_backward)
check_same_values(model.module)
after_a_step = [p.detach().clone() for p in model.module.parameters()]
print(f"{bare.owners.count(rank)} of {len(bare.params)} tensors owned; the ranks agree after a step")

# %% [markdown]
# Why a `zero_grad` of its own? The wrapped optimizer knows only its shard, and clears no more than that:

# %%
for p in model.parameters():
    p.grad = torch.zeros_like(p)
bare.optimizer.zero_grad()
left = sum(p.grad is not None for p in bare.params)
print(f"{left} of {len(bare.params)} gradients would be left over, and added to in the next step")
assert left == len(bare.params) - bare.owners.count(rank)
bare.zero_grad()
assert all(p.grad is None for p in bare.params)

# %% [markdown]
# ## The finished class
#
# The package's class does the same two things, `step_shard` and `broadcast_parameters`. Read its docstring and these two first; `only`, below it, is how parameters are hidden for a moment.

# %%
# %%local
from zero1_helpers import ZeROOne
from zero1_helpers.report.notebook import show_source
from zero1_helpers.zero import only

show_source(ZeROOne, only)

# %% [markdown]
# What it adds:
#
# - **Groups stay whole.** The bare class throws parameters out of the groups for good. Here they are hidden only while the wrapped optimizer steps (`only`), so `param_groups` shows all of them, and there is one lr: what a scheduler writes is what the next step uses.
# - **Any partition.** `partition=` is a function from parameters to owners.
# - **Parameters come and go.** Frozen ones have no owner; a group added later gets owners in the next step; a parameter without a gradient on any rank is left untouched.
# - **Closures** run once, on every rank, before the step.
# - **No silent loss.** `state_dict()` would hold one shard only, so it raises and says what to do.
#
# And it equals the bare one. To compare the optimizers alone, all three models below get the same gradients: one is stepped by the class, one by the bare class, and one by a whole, unsharded Adam.

# %%
from zero1_helpers import ZeROOne

model, twins = SimpleDDP(new_model()), [new_model(), new_model()]
adams = [torch.optim.Adam(m.parameters(), lr=LR) for m in (model, *twins)]
optimizers = [ZeROOne(adams[0]), BareZeROOne(adams[1]), adams[2]]

# %%
def step_all(model, _):
    model.sync_gradients()
    for twin in twins:
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()

# %%
STEPS = 3
whole_losses = train(model, None, [batch] * STEPS, step_all)  # on which the whole Adam steps as well
for name, twin in zip(["the bare class", "a whole Adam"], twins, strict=True):
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in pairs), name
    print(f"{STEPS} steps, {len(pairs)} tensors: ZeROOne and {name} agree in every bit")

# %% [markdown]
# Sharding the optimizer changes who computes what and where it is kept. It does not change the training.

# %% [markdown]
# ## Run it
#
# Three steps under the profiler, from the same seed as the baseline. Only one line differs from notebook 03: the optimizer is wrapped.

# %%
from zero1_helpers import get_profiler
from zero1_helpers.training.record import describe

model = SimpleDDP(new_model())
optimizer = ZeROOne(torch.optim.Adam(model.parameters(), lr=LR))

with get_profiler(project("build/runs/zero1"), STEPS, model=model, optimizer=optimizer,
                  **describe("zero1", shard, BATCH)) as prof:
    train(model, optimizer, [batch] * STEPS, after_backward, prof)
check_same_values(model.module)

# %% [markdown]
# Is it the same training as the whole, unsharded Adam's above? The losses, averaged over the ranks, say so.

# %%
# %%local
from zero1_helpers.measure.runs import load_run
from zero1_helpers.training.project import project

run = load_run(project("build/runs/zero1"))
tolerance = 1e-4 if run.record["model"]["dtype"] == "float32" else 0.05
whole = [sum(at_step) / run.world_size for at_step in zip(*pull("whole_losses"), strict=True)]
for a, b in zip(whole, run.record["losses"], strict=True):
    print(f"loss: whole Adam {a:.6f}, ZeRO-1 {b:.6f}")
    assert abs(a - b) < tolerance
assert run.record["losses"][-1] < run.record["losses"][0]

# %% [markdown]
# ## Memory falls
#
# Variants are compared on the recorded runs, which have larger batches. First the baseline, then ZeRO-1, both on rank 0, each with an axis of its own. Compare the green `opt_state`. It appears at the end of the first step, when Adam makes it.

# %%
# %%local
from zero1_helpers.report.figures import memory_timeline
from zero1_helpers.report.style import show

ddp, zero1, balanced = [load_run(project(f"traces/small/{v}")) for v in ("ddp", "zero1", "zero1-balanced")]
show(memory_timeline(ddp))
show(memory_timeline(zero1))

# %% [markdown]
# `params` and `grads` are as before: ZeRO-1 shards the optimizer's state and nothing else. And the peak is reached in backward, where activations are alive as well (with these batches they are the largest part), so the whole peak falls by a smaller share than `opt_state` does.

# %%
# %%local
peaks = {r.variant: {key: max(m[key] for m in r.record["memory"]) for key in ("peak", "opt_state")}
         for r in (ddp, zero1)}
for key in ("opt_state", "peak"):
    before, after = peaks["ddp"][key], peaks["zero1"][key]
    print(f"{key}, fullest rank: {before:,} B -> {after:,} B, {1 - after / before:.1%} less")
    assert after < before

# %% [markdown]
# (The post, with a model and a batch of quite different proportions: 65 % less `opt_state`, 12.24 % less at the peak.)
#
# How exact is the arithmetic of notebook 01? In your own run, each rank counts the bytes that its optimizer holds now, and compares with the prediction.

# %%
from zero1_helpers.memory_math import predict, state_bytes

measured, counters = state_bytes(optimizer)
predicted = predict(model, optimizer.optimizer, world_size, by_count)[rank].opt_state
print(f"{measured:,} B of opt_state measured, {predicted:,} B predicted")
assert measured == predicted

# %% [markdown]
# The profiler's record of it agrees. On a CPU it does so to the byte; on a GPU the allocator rounds every tensor up to 512 B. The picture shows the two recorded runs.

# %%
# %%local
from zero1_helpers.report.comparisons import bytes_per_rank

model_info, world_size = run.record["model"], run.world_size
rounding = 0 if run.record["device"] == "cpu" else 2 * 512 * model_info["tensors"]
for m, p in zip(run.record["memory"], run.record["predicted"], strict=True):
    assert 0 <= m["opt_state"] - p["opt_state"] <= rounding
show(bytes_per_rank([ddp, zero1]))

# %% [markdown]
# ## Why rank 0 holds more
#
# The ranks own equally many tensors (give or take one), but not equally large ones. Take the model of the post, on the meta device where it costs nothing, split over as many GPUs as the post had.

# %%
# %%local
from zero1_helpers import by_bytes, by_count
from zero1_helpers.training.workload import meta_smol_model

smol, gpus = meta_smol_model(), 4  # the post's
params = list(smol.parameters())
sizes = [p.numel() for p in params]
mean = sum(sizes) / gpus
owners = by_count(params, gpus)
for r in range(gpus):
    held = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == r)
    print(f"rank {r}: {owners.count(r)} tensors, {held:>11,} elements, {held / mean:.2f} times the mean")

# %% [markdown]
# One tensor makes the difference, and it comes first:

# %%
# %%local
name, largest = max(smol.named_parameters(), key=lambda item: item[1].numel())
print(f"{name} {tuple(largest.shape)}: {largest.numel():,} elements, {largest.numel() / mean:.2f} "
      f"times the mean shard; tensor {sizes.index(largest.numel())}, so rank 0 owns it")
assert sizes.index(largest.numel()) == 0 and owners[0] == 0

# %% [markdown]
# The post reports `opt_state` of .484 GB after 1.39 GB, "a bit higher" than a quarter. The imbalance is the whole reason:

# %%
# %%local
import torch

from zero1_helpers.memory_math import predict

state = [r.opt_state for r in predict(smol, torch.optim.Adam, gpus, by_count)]
share = state[0] / sum(state)
print(f"predicted: {state[0]:,} B of {sum(state):,} B = {share:.1%}")
print(f"the post:  .484 GB of 1.39 GB = {0.484 / 1.39:.1%}")
print(f"in GB and in GiB: {state[0] / 1e9:.3f} and {state[0] / 2**30:.3f}")
assert round(share, 3) == round(0.484 / 1.39, 3)

# %% [markdown]
# The share agrees to the last digit given. The absolute number lies between our GB and our GiB; the post does not say how its unit is meant, and a share does not depend on it.
#
# ## Split by bytes instead
#
# `by_bytes` deals out the largest tensor first, always to the rank with the least so far.

# %%
# %%local
for partition in (by_count, by_bytes):
    state = [r.opt_state for r in predict(smol, torch.optim.Adam, gpus, partition)]
    print(f"{partition.__name__:>8}: fullest rank {max(state):,} B, "
          f"{max(state) / (sum(state) / gpus):.3f} times the mean, saves {1 - max(state) / sum(state):.0%}")
assert max(state) < 1.002 * sum(state) / gpus

# %% [markdown]
# In the class it is one argument, `ZeROOne(adam, partition=by_bytes)`. Your ranks take a step with it, and then hold what is predicted for it:

# %%
from zero1_helpers import by_bytes

model = SimpleDDP(new_model())
balanced = ZeROOne(torch.optim.Adam(model.parameters(), lr=LR), partition=by_bytes)
train(model, balanced, [batch], after_backward)
pairs = zip(model.module.parameters(), after_a_step, strict=True)
assert all(torch.equal(p, q) for p, q in pairs), "not what a step with by_count gives"
measured, _ = state_bytes(balanced)
assert measured == predict(model, balanced.optimizer, world_size, by_bytes)[rank].opt_state
print(f"{measured:,} B of opt_state")

# %%
# %%local
show(bytes_per_rank([ddp, zero1, balanced]))
fullest = [max(m["opt_state"] for m in r.record["memory"]) for r in (zero1, balanced)]
print(f"fullest rank, recorded: {fullest[0]:,} B by count, {fullest[1]:,} B by bytes")
assert fullest[1] < fullest[0] and max(pull("measured")) <= max(m["opt_state"] for m in run.record["memory"])
pairs = zip(zero1.record["losses"], balanced.record["losses"], strict=True)
assert all(abs(a - b) < tolerance for a, b in pairs), "another training"

# %% [markdown]
# ## Communication rises
#
# All-reduces are as before. The broadcasts are new.

# %%
# %%local
size = ddp.record["predicted"][0]["params"]  # bytes; grads have as many
for r in (ddp, zero1):
    for c in r.record["collectives"]:
        print(f"{r.variant:>5}: {c['calls']} x {c['op']}, tensors of {c['bytes'] / size:.3f} Ψ in all; "
              f"a rank sends {c['bytes_sent'] / size:.3f} Ψ")

# %% [markdown]
# (One all-reduce more than there are tensors: it asks first which parameters were used at all, one flag each.)
#
# How much is sent depends on the algorithm. An all-reduce is a reduce-scatter and an all-gather, so each byte travels about twice; a broadcast brings it to everyone once. In a ring, exactly, $2\frac{N-1}{N}$ and $1$. Counted as the ZeRO paper counts, for large $N$, DDP moves $2\Psi$ and this class $3\Psi$.

# %%
# %%local
from zero1_helpers.memory_math import bytes_sent

moved = {}
for title, r in {"ddp": ddp, "zero1": zero1, "yours": run}.items():
    ops, psi = {c["op"]: c for c in r.record["collectives"]}, r.record["predicted"][0]["params"]
    flags = 4 * r.record["model"]["tensors"]
    grads, sent = ops["all_reduce"]["bytes"] - flags, ops["broadcast"]["bytes"] if r is not ddp else 0
    moved[title] = (2 * grads + sent) / psi
    assert ops["all_reduce"]["bytes_sent"] == round(bytes_sent("all_reduce", grads + flags, r.world_size))
print("moved in a step, for large N:", ", ".join(f"{title} {n:.0f} Ψ" for title, n in moved.items()))
assert moved == {"ddp": 2, "zero1": 3, "yours": 3} and ops["broadcast"]["calls"] == run.record["model"]["tensors"]

# %% [markdown]
# What does it mean for time? Two effects work against each other. Each rank steps fewer parameters, which takes less time; then it takes part in the broadcasts, which takes more. Look at these phases of the recorded runs:

# %%
# %%local
from zero1_helpers.report.timing import annotations


def milliseconds(run, phase):
    marks = [m[m["name"] == phase] for m in (annotations(run, r) for r in range(run.world_size))]
    return sum((m["end_us"] - m["start_us"]).median() for m in marks) / len(marks) / 1e3

print(f"step:      DDP {milliseconds(ddp, 'step'):6.1f} ms, ZeRO-1 {milliseconds(zero1, 'step'):6.1f} ms")
print(f"broadcast: DDP      none, ZeRO-1 {milliseconds(zero1, 'broadcast'):6.1f} ms")
assert milliseconds(zero1, "broadcast") > 0

# %% [markdown]
# HTA shows where all the time goes, from the traces. Non-compute is the time in which a rank communicates and does not compute; a broadcast adds to it, and a shorter step takes from compute.

# %%
# %%local
from zero1_helpers.report.figures import kernel_breakdown, overlap, temporal_breakdown

show(temporal_breakdown(ddp))
show(temporal_breakdown(zero1))

# %%
# %%local
from zero1_helpers.report.frames import comm_comp_overlap

show(overlap(zero1))
for title, r in {"recorded": zero1, "yours": run}.items():
    percent = comm_comp_overlap(r)["overlap_pct"]
    print(f"overlap of communication and compute, {title}: {percent.mean():.1f} %")
    assert percent.max() < 5

# %% [markdown]
# Nothing is hidden: a rank that communicates does nothing else. (The post: non-compute rises from 16 % to 22 %, with 0 % overlap.)

# %%
# %%local
show(kernel_breakdown(zero1))

# %% [markdown]
# A bar of communication includes waiting for the slowest rank. With split by count that is also rank 0, which steps the embedding while the others are already in the first broadcast. And if ranks share cores with one another, or with other programs, shares of time swing from run to run. That is why variants are compared on the recorded runs: they were made on a quiet machine, with larger batches and a link to match.

# %%
# %%local
from zero1_helpers.report.frames import temporal_breakdown as breakdown

before, after, yours = [breakdown(r)["non_compute_pct"].mean() for r in (ddp, zero1, run)]
print(f"non-compute, recorded: {before:.0f} % with DDP, {after:.0f} % with ZeRO-1; yours: {yours:.0f} % with ZeRO-1")
assert before < after  # as recorded

# %% [markdown]
# Run the notebook again, and your share will be another one. Counts and bytes do not change: that is why they, and not your milliseconds, are what this series asserts. Of times it asserts those of the recorded runs.
#
# ## The table so far

# %%
# %%local
from zero1_helpers.report.notebook import show_table
from zero1_helpers.report.tables import results_table

columns = ["predicted", "opt_state", "states", "peak", "collectives", "sent", "non_compute_pct", "overlap_pct"]
table = results_table([ddp, zero1, balanced])[columns]
show_table(table, f"MB (1e6 bytes) of the fullest rank; the rest per step. {zero1.setting}.")

# %% [markdown]
# ## Summary
#
# - ZeRO-1 is three lines of thought: split the parameters, step your own, broadcast them.
# - It is the same training: equal to an unsharded Adam in every bit.
# - `opt_state` on each rank is what the arithmetic says, to the byte. Split by count, the rank with the embedding holds more; split by bytes, all hold about the same.
# - The price is communication: $3\Psi$ instead of $2\Psi$, all of it exposed.
#
# ## Exercises
#
# 1. Deal the tensors out like cards: write `round_robin(params, world_size)` and `predict` the fullest rank of `smol` with it. Is it better than `by_count`?
#    <details><summary>Solution</summary>
#
#    `def round_robin(params, world_size): return [i % world_size for i in range(len(params))]`, then `predict(smol, torch.optim.Adam, gpus, round_robin)` in a `%%local` cell. It is hardly better. The layers even out either way; what remains is the embedding, which rank 0 gets on top of its share in both.
#    </details>
# 2. Up to how many ranks can `by_bytes` give everybody about the same? Predict first, from the size of the embedding; then try `predict` with growing `gpus`.
#    <details><summary>Hint</summary>
#
#    A tensor is never cut. Once the mean shard is smaller than the largest tensor, `sum(sizes) / gpus < max(sizes)`, its owner is the fullest rank whatever the partition.
#    </details>
# 3. Make a subclass of `ZeROOne` whose `broadcast_parameters` does nothing, train four steps with it, and find out which check of this notebook notices. Do the losses?
#    <details><summary>Hint</summary>
#
#    `class Silent(ZeROOne):` with `def broadcast_parameters(self): pass`. Then `check_same_values(model.module)`.
#    </details>
# 4. Put `torch.optim.lr_scheduler.StepLR` on a `ZeROOne`, step both, and show that the wrapped optimizer has the new lr.
#    <details><summary>Hint</summary>
#
#    Compare `optimizer.param_groups is optimizer.optimizer.param_groups`.
#    </details>
#
# Next: [05 Asynchronous gradients](05_async_gradients.ipynb), where communication begins to hide behind backward.
