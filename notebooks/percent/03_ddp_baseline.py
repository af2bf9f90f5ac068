# %% [markdown]
# # 03 The DDP baseline
#
# **Goal.** Measure plain data parallelism, its bytes and its time, so that every later variant has something to be compared with.
#
# **Time.** About 20 minutes to read, about 55 seconds to run on 2 cores.
#
# 02 sharded an optimizer by hand. Before that becomes a class we need a yardstick, and the tools to read it: a profiler, a memory timeline, and the three charts of HolisticTraceAnalysis (HTA).

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# On a CPU the network between ranks is a copy in memory, made by the cores that also compute: nothing could hide behind anything. So in notebooks 03 to 08 the ranks get a *link*, an emulated one. Data travel as before, and results stay exact; but a collective ends no earlier than a link of some latency and bandwidth would have it, and a rank that waits for it sleeps. `use_link` measures steps that only compute, and takes the link on which the baseline should communicate for 16 % of a step, the post's share. (On GPUs the line does nothing: the link is a real one.)
#
# The runs that you start here and later are short: 4 examples in each rank's batch, so that a notebook takes seconds. Where variants are compared, the series shows its own recorded runs, in `traces/small`: the same model and four ranks, with 80 examples in a batch. So the same number is the same number in every notebook.

# %%
from zero1_helpers import use_link

BATCH, LR = 4, 1e-4  # examples in a rank's batch; learning rate
link = use_link(batch_size=BATCH)

# %% [markdown]
# ## Predict
#
# The baseline trains for four steps with Adam, one all-reduce after another when backward is done.
#
# 1. `params`, `grads` and `opt_state` on each rank: how do the three compare, and does any of them depend on `world_size`?
# 2. In which step does `opt_state` appear, and in which phase: forward, backward or step?
# 3. How much of the communication runs while something is computed? (The post, on four GPUs, has 0 %, with 16 % of the time non-compute.)

# %% [markdown]
# ## Data parallelism, again
#
# In DDP every rank holds all `params`, all `grads` and the whole `opt_state`, and works on its own batch. What keeps the copies equal is one thing: before the step, each gradient is replaced by its mean over the ranks.
#
# `All params: [────Backward────]──[AllReduce]──[Step]`
#
# First the pieces: model, wrapper, data.

# %%
from zero1_helpers import SimpleDDP, get_dataloader, get_dataset, get_smol_model, set_seed

set_seed()
model = get_smol_model().to(device)
ddp_model = SimpleDDP(model)

# %%
from zero1_helpers import shard_dataset

shard = shard_dataset(get_dataset()["train"], rank, world_size)
print(f"{len(shard)} examples")

# %% [markdown]
# One backward without any synchronisation, and a copy of what it gave. The gradients of the ranks differ, as their batches do.

# %%
batch = next(iter(get_dataloader(shard, BATCH)))
loss = ddp_model(**{name: t.to(device) for name, t in batch.items()}).loss
loss.backward()
mine = [p.grad.clone() for p in model.parameters()]
print(f"loss {loss.item():.4f}, largest gradient {max(g.abs().max().item() for g in mine):.4f}")

# %% [markdown]
# Now DDP by hand, on the live gradients: add up over the ranks, divide.

# %%
for p in model.parameters():
    dist.all_reduce(p.grad)  # in place: the sum over all ranks
    p.grad /= world_size

by_hand = [p.grad.clone() for p in model.parameters()]
print(f"largest gradient {max(g.abs().max().item() for g in by_hand):.4f}")

# %% [markdown]
# Is that the mean? Gather every rank's copy, which costs `world_size` times the memory, and average the slow way. Up to rounding, which is measured against the largest of the gathered gradients.

# %%
for g, averaged in zip(mine, by_hand, strict=True):
    gathered = [torch.empty_like(g) for _ in range(world_size)]
    dist.all_gather(gathered, g)
    mean = torch.stack(gathered).mean(dim=0)
    scale = max(other.norm() for other in gathered)
    assert (averaged - mean).norm() <= 10 * torch.finfo(g.dtype).eps * scale

# %% [markdown]
# ## The class
#
# The package's `SimpleDDP` does the same, and takes care of what the loop above ignores: whether the ranks start equal, parameters that got no gradient on some rank (a small tensor of flags is reduced first), and layouts that a collective cannot take.

# %%
# %%local
from zero1_helpers import SimpleDDP
from zero1_helpers.report.notebook import show_source, show_table

show_source(SimpleDDP)

# %% [markdown]
# Put the unsynchronised gradients back, let the class do it, and it equals: not nearly, but bit for bit.

# %%
for p, g in zip(model.parameters(), mine, strict=True):
    p.grad = g.clone()

ddp_model.sync_gradients()
assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), by_hand, strict=True))
del loss, mine, by_hand, gathered, mean, averaged, g, p

# %% [markdown]
# ## The loop
#
# One loop serves every variant of the series. It is shown here once; later notebooks only say what they put in for `after_backward`.

# %%
# %%local
from zero1_helpers import train

show_source(train)

# %% [markdown]
# What the baseline does after backward is three lines:

# %%
def after_backward(model, optimizer):
    model.sync_gradients()
    optimizer.step()
    optimizer.zero_grad()

# %% [markdown]
# ## Profile four steps
#
# Start afresh from the seed. Each rank trains on one batch of its own again and again, so that the loss falls within four steps.

# %%
steps = 4
set_seed()
model = get_smol_model().to(device)
ddp_model = SimpleDDP(model)
optimizer = torch.optim.Adam(model.parameters(), lr=LR)
batches = [next(iter(get_dataloader(shard, BATCH)))] * steps

# %% [markdown]
# `get_profiler` wraps `torch.profiler` and is entered on every rank. It is given the model and the optimizer so that it can tell whose bytes it sees; `describe` adds what it cannot know, such as the name of the variant. No warm-up: the first step, which makes the optimizer state, is one that we want to see.

# %%
from zero1_helpers import get_profiler, train
from zero1_helpers.training.project import project
from zero1_helpers.training.record import describe

about = describe("ddp", shard, BATCH)
with get_profiler(project("build/runs/ddp"), steps, model=ddp_model, optimizer=optimizer, **about) as prof:
    losses = train(ddp_model, optimizer, batches, after_backward, prof)

print("losses", *(f"{loss:.4f}" for loss in losses))

# %% [markdown]
# After four steps the ranks must still be equal. `SimpleDDP` checks that when it wraps a model; wrapping again takes the place of the old wrapper. It would raise.

# %%
ddp_model = SimpleDDP(model)
assert all(p.grad is None for p in model.parameters())

# %% [markdown]
# ## What a run is
#
# A folder. `run.json` says what ran on what and sums it up; each rank adds a trace (what ran when) and a memory timeline (each allocation, with its category). Here are the files of rank 0:

# %%
# %%local
from zero1_helpers.measure.runs import load_run
from zero1_helpers.training.project import project

run = load_run(project("build/runs/ddp"))
for file in sorted(run.folder.iterdir()):
    if "rank" not in file.name or "rank0" in file.name:
        print(f"{file.name:<22}{file.stat().st_size / 1e3:6.0f} kB")
print(run.caption)

# %% [markdown]
# The losses in it are means over the ranks.

# %%
# %%local
means = [sum(at_step) / run.world_size for at_step in zip(*pull("losses"), strict=True)]
assert run.record["losses"] == means and run.record["steps"] == len(means)
print("mean losses", *(f"{loss:.4f}" for loss in means))
assert means[-1] < means[0], "four steps on the same batches, and the loss has not fallen"

# %% [markdown]
# ## Memory

# %%
# %%local
from zero1_helpers.report.figures import memory_timeline
from zero1_helpers.report.style import show

show(memory_timeline(run))

# %% [markdown]
# How to read it, from the bottom:
#
# - **params**: there from the beginning, constant.
# - **opt_state**: Adam's two moments. Nothing until the first step, then constant.
# - **grads**: grow during backward, stay through the all-reduces, and end with `zero_grad`: the saw-tooth.
# - **buckets**: flat tensors that gradients travel in. Here only the flags, too small to see; from 06 on more.
# - **activations**: what forward keeps for backward. They are given back as backward goes.
# - **temporaries**: scratch space of backward and of Adam. **other**: the batch. **counters**: Adam's step numbers, one scalar a tensor.
#
# The dashed line marks the peak, and the strip on top shows the phase. Backward frees activations and makes gradients at the same time.
#
# Each byte has its category from a ledger that the profiler keeps: at each phase it notes which addresses are `params`, `grads`, `opt_state`. The profiler alone would have to guess.

# %% [markdown]
# ### Does it meet the prediction?
#
# `predict` from 01 gives the bytes of each rank. The ledger must meet them exactly. (A GPU's allocator rounds blocks up to 512 bytes; there, and only there, that much per tensor is let through: one block for `params` and `grads`, two for the moments.)

# %%
# %%local
blocks = 512 * run.record["model"]["tensors"] * (run.record["device"] == "cuda")
slack = {"params": blocks, "grads": blocks, "opt_state": 2 * blocks}
for measured, predicted in zip(run.record["memory"], run.record["predicted"], strict=True):
    for name, extra in slack.items():
        assert predicted[name] <= measured[name] <= predicted[name] + extra, name
print({name: f"{predicted[name]:,} B" for name in slack}, "on every rank")

# %% [markdown]
# First prediction: `params` and `grads` are equal, Adam's state is twice that, and `world_size` is nowhere in it. Everything is there as many times as there are ranks.

# %%
# %%local
assert all(rank == run.record["predicted"][0] for rank in run.record["predicted"])
assert predicted["grads"] == predicted["params"] and predicted["opt_state"] == 2 * predicted["params"]
copies = run.world_size * predicted["opt_state"]
print(f"opt_state on all ranks: {copies:,} B, of which {copies - predicted['opt_state']:,} B are copies")

# %% [markdown]
# ### When does the state appear?
#
# Second prediction: inside the first `step`. Not before, because Adam makes its moments when it first needs them.

# %%
# %%local
from zero1_helpers.report.memory import get_memory_timeline
from zero1_helpers.report.timing import annotations

born = run.memory(0).query("category == 'opt_state'")["time_us"]
phases = annotations(run)
first = phases[phases["name"] == "step"].iloc[0]
assert born.between(first["start_us"], first["end_us"]).all()
print(f"{len(born)} tensors of state, all made in the first of {(phases['name'] == 'step').sum()} steps")

# %% [markdown]
# This is why a profile of one step would be misleading: its forward and backward run without the state.
#
# ### What is the peak made of?
#
# That depends on how many tokens there are. Beside your run, the recorded one, which has 20 times as many examples in a batch:

# %%
# %%local
recorded = load_run(project("traces/small/ddp"))
peaks = {}
for title, shown in {"yours": run, "recorded": recorded}.items():
    line = get_memory_timeline(shown)
    peaks[title] = line.loc[line["total"].idxmax()]
    assert peaks[title]["total"] == shown.record["memory"][0]["peak"]
for name in ("params", "opt_state", "grads", "activations", "temporaries"):
    parts = [f"{peak[name] / 1e6:8.2f} MB {peak[name] / peak['total']:6.1%}" for peak in peaks.values()]
    print(f"{name:<12}", "  |  ".join(parts))
assert peaks["recorded"]["activations"] > peaks["yours"]["activations"]

# %%
# %%local
show(memory_timeline(recorded))

# %% [markdown]
# With 80 examples the activations are the largest part, and the peak is early in backward, where most of them are still alive. In the post (360 million parameters, bf16) the peak is 5.76 GB and the state 1.39 GB of it, a quarter. Compare the shares: a small model has small tensors, but still an activation for every token and layer. That is why this series also looks at *states*, `params + grads + opt_state + buckets`: the part that ZeRO is about.
#
# What no chart of this kind shows: on GPUs, NCCL takes its communication buffers from CUDA directly. PyTorch's profiler does not see them, so the device is fuller than the chart says. gloo's buffers are invisible in the same way.

# %% [markdown]
# ## Time
#
# HTA reads what ran on the *streams* of a GPU. A CPU has no streams, so we draw them: in the *lane view* of a run each outermost PyTorch operation stands on a compute lane, and each collective on the lane of the gloo thread that carried it. A thread that waits is on no lane. On a GPU the trace is used as it is. The charts below come from the same functions in both cases.

# %%
# %%local
from zero1_helpers.report.figures import temporal_breakdown as draw_temporal
from zero1_helpers.report.frames import comm_comp_overlap, temporal_breakdown

show(draw_temporal(run))

# %% [markdown]
# *compute*: a compute kernel runs. *non-compute*: only something else does, mostly a collective. *idle*: nothing runs, for example Python between two operations. Look at the middle part: it is what the later notebooks fight. Times are those of the steps after the first, which also makes the state.

# %%
# %%local
parts = temporal_breakdown(run)[["compute_pct", "non_compute_pct", "idle_pct"]]
assert ((parts.sum(axis=1) - 100).abs() < 0.1).all()
print(f"non-compute {parts['non_compute_pct'].mean():.0f} % here; the post: 16 %")

# %% [markdown]
# The link was chosen for this number, so it says nothing about the machine; how far it is off says how unsteady the machine is. What every later variant makes of the same link is its own merit.

# %% [markdown]
# ### Overlap
#
# How much of the communication hides behind compute?

# %%
# %%local
from zero1_helpers.report.figures import kernel_breakdown, overlap

show(overlap(run))
assert (comm_comp_overlap(run)["overlap_pct"] < 5).all()

# %% [markdown]
# Third prediction: none. The loop waits for each all-reduce before it goes on, so there is nothing to hide behind. This does not depend on the machine; that is why it can be asserted. (The few percent that the assertion allows are for a thread that the system puts to sleep just before it notes an end.)
#
# ### Kernels

# %%
# %%local
show(kernel_breakdown(run))

# %% [markdown]
# On a CPU an operation such as `aten::linear` includes the smaller ones that it calls.
#
# ## Count the collectives
#
# Times vary, counts do not. In each step: one all-reduce for each tensor, and one for the flags. The bytes are those of the `grads`, and 4 for each flag.

# %%
# %%local
(reduce,) = run.record["collectives"]  # a single kind
tensors, grads = run.record["model"]["tensors"], run.record["predicted"][0]["grads"]
print(f"{reduce['calls']} x {reduce['op']} a step, {reduce['bytes']:,} B")
assert reduce["calls"] == tensors + 1
assert reduce["bytes"] == grads + 4 * tensors

# %% [markdown]
# What does a rank send for that? In a ring, every byte goes around almost twice: once to be added up, once to be handed out. Of $M$ bytes a rank sends $2\,\frac{N-1}{N}\,M$, close to $2M$ when $N$ is large.

# %%
# %%local
N, M = run.world_size, reduce["bytes"]
ring = 2 * (N - 1) / N * M
print(f"{ring:,.0f} B sent by each of {N} ranks, {ring / M:.2f} times the tensors' bytes")
assert abs(reduce["bytes_sent"] - ring) <= 1

# %% [markdown]
# ## One step, drawn
#
# The line of text at the top of this notebook, from measured intervals:

# %%
# %%local
from zero1_helpers.report.figures import schedule_diagram
from zero1_helpers.report.timing import schedule

show(schedule_diagram(run))

# %% [markdown]
# One row, because nothing distinguishes one gradient from another: all wait for the end of backward, and the step waits for the last of them.

# %%
# %%local
spans = schedule(run).groupby("kind").agg({"start_ms": "min", "end_ms": "max"})
backward, sync, step = (spans.loc[kind] for kind in ("backward", "all-reduce", "step"))
assert backward["end_ms"] <= sync["start_ms"] < step["start_ms"]
print(f"backward {backward['end_ms'] - backward['start_ms']:.0f} ms, "
      f"all-reduces {sync['end_ms'] - sync['start_ms']:.0f} ms, "
      f"step {step['end_ms'] - step['start_ms']:.0f} ms")

# %% [markdown]
# ## What the link does, and what a CPU does
#
# If you came here without GPUs: how long did a collective take, and how long should it, on such a link?

# %%
# %%local
from zero1_helpers.report.frames import kernel_breakdown as kernels

_, table = kernels(run)
calls = table[table["kernel_type"] == "COMMUNICATION"]
each = calls["sum_us"].sum() / (run.world_size * (run.record["steps"] - 1) * reduce["calls"])
link, size = pull("link")[0], M / reduce["calls"]
print(run.record["hardware"], "for", run.world_size, "ranks")
print(f"a collective: {each / 1e3:.2f} ms on average, for {size / 1e3:.0f} kB")
if link is not None:
    print(f"on a link of {link}: {1e3 * link.seconds('all_reduce', size, run.world_size):.2f} ms")
    assert each >= 0.99e6 * link.seconds("all_reduce", size, run.world_size)

# %% [markdown]
# - **A collective takes as long as the slowest of three**: the link, gloo, and the last rank to come. The caption of a figure says so when gloo was slower than the link in more than a few percent of the cases.
# - **Every message has a price of its own,** whatever its size: the latency. Most tensors are small, and each pays it. 06 does something about it.
# - **Moving data is still work.** gloo adds up gradients on its own threads, on the same cores as everything else; a link of a GPU would not take these cycles.
# - **Kernels are interrupted.** With more ranks than cores, a bar in the kernel chart contains the time in which another rank had the core.
# - **Activations dominate** the memory of a small model that sees many tokens, as the recorded run shows.

# %% [markdown]
# ## The first row
#
# A table that grows with every notebook, made from the recorded runs. Memory is that of the fullest rank, percentages are means over the ranks.

# %%
# %%local
from zero1_helpers.report.tables import PUBLISHED, results_table

columns = ["predicted", "opt_state", "states", "peak", "non_compute_pct", "overlap_pct", "collectives", "sent", "loss"]
table = results_table([recorded])[columns]
show_table(table, f"Recorded. {recorded.setting}.")
show_table(PUBLISHED.loc[["ddp"]], "The post: SmolLM2-360M, bf16, four GPUs.")
assert abs(table.loc["ddp", "predicted"] * 1e6 - recorded.record["predicted"][0]["opt_state"]) < 1

# %% [markdown]
# ## Summary
#
# - DDP is one loop: all-reduce each gradient, divide. The class adds checks, and gives the same bits.
# - `params`, `grads` and `opt_state` meet the prediction, and every rank holds all of them: the same state, `world_size` times.
# - `opt_state` is born in the first step. Look for the peak where the activations are, as forward turns into backward.
# - One all-reduce for each tensor, one for the flags, nothing hidden: communication starts when backward ends.
# - Bytes and counts carry over to GPUs. Shares of time belong to a link, here an emulated one.

# %% [markdown]
# ## Exercises
#
# **1.** Before you run anything: which categories change if the batch doubles? Record it with `BATCH = 8` into `project("build/runs/ddp-large")` and look at `record["memory"]` and at the timeline.
#
# <details><summary>Hint</summary>
#
# `params`, `grads` and `opt_state` know nothing of the batch. Activations are kept for each token, so they about double, and with them the peak.
# </details>
#
# **2.** Predict the bytes of `opt_state` for `torch.optim.SGD`, without momentum and with `momentum=0.9`. Then ask `predict(model, torch.optim.SGD, world_size, None, lr=0.1, momentum=0.9)` from `zero1_helpers.memory_math`. What is left for ZeRO-1 to save?
#
# <details><summary>Solution</summary>
#
# Nothing, and one tensor for each parameter: as much as `params`. Without state there is nothing to shard; ZeRO-1 pays with optimizers that remember.
# </details>
#
# **3.** Use `optimizer.zero_grad(set_to_none=False)` in `after_backward`. How does the memory timeline change, and the peak?
#
# <details><summary>Solution</summary>
#
# The gradients are set to zero but stay alive, a constant layer instead of a saw-tooth. They are there during the next forward, so the peak, which is where the activations are highest, rises by almost all of `grads`.
# </details>
#
# **4.** Remove the division by `world_size` in the loop by hand. Which assertion fails? Would the training have told you?
#
# <details><summary>Hint</summary>
#
# The one that compares with the gathered mean. Adam hardly notices a constant factor, so the loss would not have told.
# </details>
#
# **Next:** 04 puts the sharded optimizer into a class and sees what it does to this picture.
