# %% [markdown]
# # 01 Training memory
#
# What does a rank keep in memory while it trains? Three things come with the model itself: `params`, their gradients
# (`grads`), and what the optimizer remembers of each parameter (`opt_state`).
#
# **Goal.** Predict the bytes of `params`, `grads` and `opt_state` on each rank, and find exactly these bytes in a model.
#
# **Time.** About 15 minutes to read, about 35 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# ## Predict
#
# 1. A model trains with Adam, everything in fp32. How many bytes per parameter are that? Which share is Adam's?
# 2. *Mixed precision* computes in bf16, two bytes a number. How many bytes per parameter does it save?
# 3. Four ranks divide Adam's state among them, and nothing else. Does that save three quarters of the memory?

# %% [markdown]
# ## Bytes per parameter
#
# We write $\Psi$ for the number of parameters, as the ZeRO paper does (*ZeRO: Memory Optimizations Toward Training
# Trillion Parameter Models*). An fp32 number has 4 bytes. Adam keeps two numbers for each parameter, running
# averages of the gradient and of its square.

# %%
# %%local
psi = 1e9  # a billion parameters
params, grads = 4 * psi, 4 * psi
opt_state = (4 + 4) * psi
total = params + grads + opt_state
assert total == 16 * psi
print(f"{total / 1e9:.0f} GB for a billion parameters, {opt_state / total:.0%} of it Adam's")

# %% [markdown]
# The optimizer's bytes per parameter are called $K$. In fp32, $K = 4 + 4 = 8$ and the total is
#
# $$4\Psi + 4\Psi + K\Psi = 16\Psi.$$
#
# In mixed precision `params` and `grads` take 2 bytes each. But small updates would be lost in bf16, so the optimizer
# also keeps a master copy of `params` in fp32: $K = 4 + 4 + 4 = 12$, and the total is
#
# $$2\Psi + 2\Psi + K\Psi = 16\Psi.$$
#
# Nothing is saved; mixed precision is for speed. Summing gradients in fp32 adds another $4\Psi$. *Pure* bf16
# has no master copy: $K = 2 + 2 = 4$, and $8\Psi$ in all. The package knows these recipes:

# %%
# %%local
import pandas as pd

from zero1_helpers.memory_math import RECIPES
from zero1_helpers.report.notebook import show_table

rows = {r.title: [r.params, r.grads, r.opt_state] for r in RECIPES.values()}
table = pd.DataFrame(rows, index=["params", "grads", "K"]).T
table["total"] = table.sum(axis=1)
table["Adam's share"] = (table["K"] / table["total"]).map("{:.0%}".format)
assert list(table["total"]) == [16, 16, 20, 8]
show_table(table.astype(object), "Bytes per parameter, by recipe.")

# %% [markdown]
# The post gives Adam 75–80 % in mixed precision. The upper end comes out if the fp32 gradients count as the optimizer's:

# %%
# %%local
mixed, fp32_grads = RECIPES["mixed"], RECIPES["mixed-fp32-grads"]
low = mixed.opt_state / (mixed.params + mixed.grads + mixed.opt_state)
high = (fp32_grads.opt_state + 4) / (fp32_grads.params + fp32_grads.grads + fp32_grads.opt_state)
assert (low, high) == (0.75, 0.80)
print(f"from {low:.0%} to {high:.0%}")

# %% [markdown]
# ## Divided by N
#
# In data parallelism each of $N$ ranks holds all of this: $N$ copies of the same numbers. Adam's part is the largest,
# and a rank needs it only for the parameters that it updates. If each rank updates one $N$-th of the parameters, then
# in mixed precision it holds, instead of $4\Psi + K\Psi$,
#
# $$4\Psi + \frac{K\Psi}{N}$$
#
# bytes. This is ZeRO-1, the paper's first stage ($P_{os}$). In one line, beside the package's function for all stages:

# %%
# %%local
from zero1_helpers.memory_math import model_states


def zero1_bytes(psi, N, K=12):
    return 4 * psi + K * psi / N


for N in (1, 4, 1024):
    assert zero1_bytes(psi, N) == model_states(psi, "mixed", N)["total"]
    print(f"N = {N:<4}  {zero1_bytes(psi, N) / 1e9:.2f} GB")

# %% [markdown]
# ## The paper's table
#
# Stage 2 divides the gradients as well, stage 3 also the parameters. For 7.5 billion parameters in mixed precision:

# %%
# %%local
from zero1_helpers.memory_math import paper_table

table = pd.DataFrame(paper_table(7.5e9)).set_index("N")
show_table(table.map("{:.4g}".format), "GB per rank, 7.5 billion parameters, mixed precision.")

# %% [markdown]
# The paper prints them with one digit after the point, or two. They are the numbers in this check:

# %%
# %%local
published = {
    "stage 1": [120, 52.5, 35.6, 31.4, 30.4, 30.1],
    "stage 2": [120, 41.3, 21.6, 16.6, 15.4, 15.1],
    "stage 3": [120, 30, 7.5, 1.88, 0.47, 0.12],
}
for stage, numbers in published.items():
    for ours, theirs in zip(table[stage], numbers, strict=True):
        assert abs(ours - theirs) <= (0.005 if theirs < 2 else 0.0501), (stage, ours, theirs)
print("as published")

# %% [markdown]
# ## As N grows
#
# What does ZeRO-1 save? Per parameter, and as a share of what a single rank would hold:

# %%
# %%local
worlds = [1, 2, 4, 8, 12, 16, 64, 1024]
table = pd.DataFrame(index=pd.Index(worlds, name="N"))
table["K/N"] = [12 / N for N in worlds]
table["total"] = [zero1_bytes(1, N) for N in worlds]
table["saved"] = 1 - table["total"] / 16
show_table(
    table.assign(saved=table["saved"].map("{:.1%}".format)).map(lambda x: x if isinstance(x, str) else f"{x:.2f}"),
    "Bytes per parameter and rank, mixed precision (K = 12).",
)

# %% [markdown]
# The post says that the requirement becomes negligible when $N$ is larger than $K$, and that it is a 75 % reduction when
# $K = 12$. Here we part from it, in two points:
#
# - $K\Psi/N$ vanishes as $N$ grows, whatever $K$ is. There is no threshold at $N = K$: there the state takes
#   exactly one byte per parameter. And only this term vanishes; $4\Psi$ stays.
# - So 75 % is the limit for many ranks. It is never reached.

# %%
# %%local
saved = table["saved"]
assert table["K/N"][12] == 1, "at N = K: one byte per parameter"
assert saved[4] == 9 / 16 and (saved < 12 / 16).all() and saved.is_monotonic_increasing
print(f"saved with 4 ranks {saved[4]:.0%}, with 12 ranks {saved[12]:.0%}, in the limit {12 / 16:.0%}")

# %% [markdown]
# Pure bf16, the recipe that the post's code runs, has less to divide: $K = 4$ of 8 bytes.

# %%
# %%local
def saving(recipe, N):
    return 1 - model_states(1, recipe, N)["total"] / model_states(1, recipe)["total"]


for recipe in ("fp32", "mixed", "bf16"):
    print(f"{recipe:<6} saved with 4 ranks: {saving(recipe, 4):.1%}, in the limit {saving(recipe, 1e9):.0%}")
assert saving("bf16", 4) == 0.375

# %% [markdown]
# As a picture: the green part is divided, the rest stays.

# %%
# %%local
from matplotlib.figure import Figure

from zero1_helpers.report.style import COLOURS, show

fig = Figure(figsize=(7.2, 3.2), dpi=130, layout="constrained")
axes = fig.subplots(1, 2, sharey=True)
for ax, recipe in zip(axes, ("mixed", "bf16"), strict=True):
    states = pd.DataFrame([model_states(1, recipe, N) for N in worlds], index=worlds)
    states = states[["params", "grads", "opt_state"]]
    states.plot.bar(ax=ax, stacked=True, color=COLOURS, rot=0, width=0.8, legend=False)
    ax.set(title=RECIPES[recipe].title, xlabel="ranks, N")

# %%
# %%local
axes[0].set_ylabel("bytes per parameter and rank")
axes[1].legend(frameon=False)
fig.title = "ZeRO-1: bytes per parameter and rank"
fig.caption = "Bytes per parameter on one rank with ZeRO-1, by the formula; nothing was run for it."
ends = [model_states(1, recipe, N)["total"] for recipe in ("mixed", "bf16") for N in (1, 1024)]
fig.alt_text = (
    "Two stacked bar charts over the number of ranks. With more ranks opt_state shrinks and params and grads stay:"
    " in mixed precision {:.0f} bytes fall to {:.1f}, in pure bf16 {:.0f} fall to {:.1f}.".format(*ends)
)
show(fig)

# %% [markdown]
# ## The model of the post
#
# The post fine-tunes SmolLM2-360M. Torch's *meta* device has shapes and dtypes, but no storage, so its
# parameters can be counted on any machine:

# %%
# %%local
from zero1_helpers.training.workload import meta_smol_model

smol = meta_smol_model("smollm2-360m")
psi, tensors = sum(p.numel() for p in smol.parameters()), len(list(smol.parameters()))
print(f"{psi:,} parameters in {tensors} tensors, {next(smol.parameters()).dtype}")
assert (psi, tensors) == (361_823_040, 291)

# %% [markdown]
# The post estimates, for fp32 and 320 million parameters, 16 GB · 0.32. Counting exactly:

# %%
# %%local
fp32, bf16 = model_states(psi, "fp32"), model_states(psi, "bf16")
print(f"the post's estimate, fp32   {16 * 0.32:.2f} GB")
print(f"this model, fp32            {fp32['total'] / 1e9:.2f} GB")
print(f"this model, pure bf16       {bf16['total'] / 1e9:.2f} GB, opt_state {bf16['opt_state'] / 1e9:.3f} GB")
print(f"the post's chart peaks at   5.76 GB; pure bf16 is {bf16['total'] / 5.76e9:.0%} of that")
print(f"and shows for the optimizer 1.39 GB, {1.39e9 / bf16['opt_state']:.0%} of K·Ψ in pure bf16")
assert fp32["total"] == 16 * psi and bf16["total"] == 8 * psi

# %% [markdown]
# The post's code loads the model in bf16 and hands these parameters to Adam, so the third line is its recipe, and $K = 4$
# nearly explains the optimizer state in its chart. That the chart's peak is near the fp32 line is a coincidence: the
# rest of it is something else. We come to that below.
#
# The formula assumes equal parts, but parameters come in tensors of different sizes. `predict` goes through a
# model tensor by tensor and gives each rank's bytes. Without a partition, every rank holds everything:

# %%
# %%local
import torch

from zero1_helpers.memory_math import predict

(whole,) = predict(smol, torch.optim.Adam, partition=None)
print(f"params {whole.params:,} B, grads {whole.grads:,} B, opt_state {whole.opt_state:,} B")
assert whole.opt_state == 4 * psi == 1_447_292_160
assert whole.params == whole.grads == 2 * psi

# %% [markdown]
# With ZeRO-1, as in the post, each rank gets a run of consecutive tensors, (nearly) the same number each.

# %%
# %%local
ranks = pull("world_size")[0]
shards = predict(smol, torch.optim.Adam, ranks)
table = pd.DataFrame({f"rank {s.rank}": [f"{s.opt_state:,}", f"{s.opt_state / whole.opt_state:.1%}"] for s in shards})
table.index = ["`opt_state`, B", "of the whole"]
show_table(table.T, f"Predicted, SmolLM2-360M in bf16, {ranks} ranks; equal parts would be {1 / ranks:.1%}.")
assert sum(s.opt_state for s in shards) == whole.opt_state, "a tensor is lost, or has two owners"
assert max(shards, key=lambda s: s.opt_state).rank == 0

# %% [markdown]
# Equally many tensors are not equally many bytes: rank 0 gets the embedding, the largest tensor by far. Notebook 04
# returns to this.
#
# ## Measure
#
# Now the bytes themselves. Each rank builds the model of this machine and an Adam for all of it. A tensor takes its
# number of elements times the bytes of one.

# %%
from zero1_helpers import get_dataloader, get_dataset, shard_dataset

shard = shard_dataset(get_dataset()["train"], rank, world_size)
batch = {name: t.to(device) for name, t in next(iter(get_dataloader(shard, batch_size=4))).items()}

# %%
from zero1_helpers import SimpleDDP, get_smol_model, set_seed

set_seed()
model = get_smol_model().to(device)
ddp_model = SimpleDDP(model)  # averages gradients; notebook 03 has more about it
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %%
def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def held():
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {"params": nbytes(model.parameters()), "grads": nbytes(grads), "opt_state": nbytes(moments)}

# %% [markdown]
# One step, and a look after each part of it:

# %%
stages = {"model built": held()}
ddp_model(**batch).loss.backward()
ddp_model.sync_gradients()
stages["after backward"] = held()
optimizer.step()
stages["after step"] = full = held()
optimizer.zero_grad()
stages["after zero_grad"] = held()

# %%
# %%local
table = pd.DataFrame(pull("stages")[0]).T
table = table.rename(columns="`{}`".format).map("{:,}".format)
show_table(table, "Bytes on rank 0, counted.")

# %% [markdown]
# `grads` appear in the backward pass, `opt_state` only in the first step: Adam makes it when it needs it. The formula
# is about the moment after the step, where all three are there. Against the prediction for this model:

# %%
from zero1_helpers.memory_math import predict, state_bytes

(expected,) = predict(model, optimizer, partition=None)
assert full == {"params": expected.params, "grads": expected.grads, "opt_state": expected.opt_state}
element = next(model.parameters()).element_size()  # B: 4 in fp32, 2 in bf16
psi = sum(p.numel() for p in model.parameters())
assert sum(full.values()) == 4 * element * psi, "params, grads, and two moments"
print(f"{psi:,} parameters of {element} B: {sum(full.values()):,} B, as predicted to the byte")

# %% [markdown]
# ## What Adam keeps
#
# For one parameter tensor:

# %%
p, state = next(iter(optimizer.state.items()))
for name, t in {"the parameter": p, **state}.items():
    print(f"{name:<14}{str(t.dtype):<15}{tuple(t.shape)}")

# %% [markdown]
# Two moments in the parameter's shape and dtype, and `step`, a counter. It is one number per tensor, not per parameter,
# so no formula with $\Psi$ has it. The package counts it apart:

# %%
opt_state, counters = state_bytes(optimizer)
assert (opt_state, counters) == (expected.opt_state, expected.counters)
assert opt_state == full["opt_state"]
print(f"opt_state {opt_state:,} B and counters {counters:,} B")

# %% [markdown]
# ## Measure the other formula
#
# Now ZeRO-1: the class `ZeROOne` leaves each rank its share of the optimizer. How it works is the matter of
# notebooks 02 and 04. Here we only weigh the result after one step.

# %%
from zero1_helpers import ZeROOne

sharded = ZeROOne(torch.optim.Adam(model.parameters(), lr=1e-3))
ddp_model(**batch).loss.backward()
ddp_model.sync_gradients()
sharded.step()
measured, _ = state_bytes(sharded.optimizer)
predicted = predict(model, torch.optim.Adam, world_size)[rank].opt_state
assert measured == predicted, f"rank {rank}: {measured} B, predicted {predicted} B"

# %%
# %%local
rows = zip(pull("predicted"), pull("measured"), strict=True)
table = pd.DataFrame({f"rank {r}": row for r, row in enumerate(rows)}, index=["predicted, B", "measured, B"])
show_table(table.T.map("{:,}".format), "`opt_state` with ZeRO-1, on each rank.")
assert sum(pull("measured")) == pull("expected")[0].opt_state
mean, most = pull("expected")[0].opt_state / ranks, max(pull("measured"))
print(f"equal parts would be {mean:,.0f} B; the fullest rank holds {most / mean:.2f} times that")

# %% [markdown]
# ## What the formula leaves out
#
# The batch does not occur in it. But the forward pass keeps *activations* for the backward pass, and they grow with the
# batch. The profiler sees every allocation. So we record one step of the smallest model twice: with 2 examples on each
# rank, and with 8.

# %%
from zero1_helpers import record
from zero1_helpers.training.project import project

for size in (2, 8):
    record("ddp", "tiny", 1, project(f"build/runs/memory-{size}"), batch_size=size, device=device)

# %%
# %%local
from zero1_helpers.measure.runs import load_run
from zero1_helpers.report.memory import get_memory_timeline
from zero1_helpers.training.project import project

runs = [load_run(project(f"build/runs/memory-{size}")) for size in (2, 8)]
rows = {f"batch of {run.record['data']['batch_size']}": get_memory_timeline(run, 0).max() / 1e6 for run in runs}
shown = ["params", "grads", "opt_state", "activations", "total"]
table = pd.DataFrame(rows).T[shown]
show_table(table.rename(columns="`{}`".format), f"MB on rank 0, each at its highest. {runs[0].setting}.")

# %%
# %%local
few, many = table.to_numpy()
states, activations = slice(0, 3), shown.index("activations")
assert (few[states] == many[states]).all(), "params, grads, opt_state know no batch"
assert many[activations] > 2 * few[activations], "activations grow with the batch"
sizes = [runs[1].record["memory"][0][name] / 1e6 for name in ("peak_states", "peak")]
print(f"activations: {many[activations] / few[activations]:.1f} times as much")
print("with the larger batch, states {:.1f} MB and everything {:.1f} MB at the peak".format(*sizes))

# %% [markdown]
# *States* are `params`, `grads` and `opt_state` together. Dividing `opt_state` cannot lower the rest, so the saving in
# total memory is smaller than the formula's. The more examples a step has, the more of the total are activations, and
# the smaller is the saving. The post, too, measures 12.24 % in total; compare the bf16 line above. Its chart's other half is most
# likely activations and temporary tensors. Buffers of NCCL and the GPU's kernels come on top; torch does not see them.
#
# ## Summary
#
# - Training with Adam takes $16\Psi$ bytes in fp32 ($K = 8$) and in mixed precision ($K = 12$), $8\Psi$ in pure bf16 ($K = 4$).
# - ZeRO-1 divides $K\Psi$ by $N$; `params` and `grads` stay. What is saved grows with $N$ towards a limit, without a
#   threshold.
# - `predict` gives the bytes of each rank for a real model, and the bytes that we counted are exactly these.
# - Adam's state appears in the first step. Activations are not in the formula.
#
# ## Exercises
#
# 1. SGD with momentum keeps one number per parameter. What are $K$, and the saving with four ranks, in fp32? Check with
#    `predict(smol, torch.optim.SGD, partition=None, lr=0.1, momentum=0.9)` in a `%%local` cell.
#    <details><summary>Solution</summary>K = 4 of 12 bytes, so 3/4 of a third: a quarter is saved. The model is in bf16, so
#    <code>predict</code> says 2 bytes per parameter for it.</details>
# 2. From how many ranks on does ZeRO-1 save 70 % in mixed precision?
#    <details><summary>Solution</summary>(12 − 12/N)/16 = 0.7 gives N = 15.</details>
# 3. A GPU has 80 GB. How many parameters fit in mixed precision on 64 ranks, at each stage, without activations?
#    <details><summary>Hint</summary>Divide 80e9 by <code>model_states(1, "mixed", 64, stage)["total"]</code>.</details>
# 4. Give `predict` the partition `by_bytes` from `zero1_helpers.partition` for `smol`. How much does the fullest rank
#    hold now?
#    <details><summary>Solution</summary>Hardly more than the mean: the largest tensors go first, each to the rank with the
#    least so far.</details>
#
# Next: [02 Sharding by hand](02_sharding_by_hand.ipynb).
