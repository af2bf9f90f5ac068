# %% [markdown]
# # 08 Results
#
# **Goal.** Put every variant beside the others, and beside the post's numbers, and account for each difference.
#
# **Time.** About 15 minutes to read, about 80 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# On a CPU all variants share an emulated link.

# %%
from zero1_helpers import use_link

link = use_link("500MB/s + 1ms")

# %% [markdown]
# ## Predict
#
# Write three orders down before you go on.
#
# 1. Which variant needs the least memory for params, grads, opt_state and buckets together? Which the most?
# 2. Which spends the largest share of a step without computing? Which the smallest?
# 3. The post reports 1.39 GB of opt_state without sharding and 0.484 GB with it, on four GPUs. A quarter would be
#    0.348 GB. Where did the rest go?

# %% [markdown]
# ## Run: every variant, on this machine
#
# The same model, from the same seed, is trained by each variant for two steps, each rank on 4 examples of its own. We
# keep the losses and count the bytes of state.

# %%
from zero1_helpers import VARIANTS, get_dataloader, get_dataset, shard_dataset
from zero1_helpers.training.presets import get_preset

cap, names = get_preset().bucket_cap_mb, list(VARIANTS)
shard = shard_dataset(get_dataset()["train"], rank, world_size)
batches = [next(iter(get_dataloader(shard, batch_size=4)))] * 2

# %%
from zero1_helpers import get_smol_model, set_seed, train
from zero1_helpers.memory_math import predict, state_bytes

# %%
trained, held = {}, {}
for name, variant in VARIANTS.items():
    set_seed()
    model, optimizer = variant.build(get_smol_model().to(device), 1e-4, cap)
    trained[name] = train(model, optimizer, batches, variant.after_backward)
    partition = getattr(optimizer, "partition", None)  # who holds what; None: every rank holds all
    held[name] = state_bytes(optimizer)[0], predict(model, optimizer, world_size, partition)[rank].opt_state
    del model, optimizer

# %% [markdown]
# ## Check: what holds on every machine
#
# The losses of the variants may differ by rounding only. They are means over the ranks:

# %%
# %%local
import numpy as np

names, world = pull("names")[0], pull("world_size")[0]
losses = np.mean([[trained[name] for name in names] for trained in pull("trained")], axis=0)  # (variants, steps)
print("losses of the baseline:", losses[0].round(4))
print("largest difference between two variants:", np.ptp(losses, axis=0).max())
rounding = 1e-3 if pull("next(iter(get_smol_model().parameters())).dtype == torch.float32")[0] else 5e-2
assert np.ptp(losses, axis=0).max() < rounding and (losses[:, -1] < losses[:, 0]).all()

# %% [markdown]
# The bytes of opt_state are what arithmetic said they would be, on every rank of every variant.

# %%
# %%local
for name in names:
    measured, predicted = zip(*(held[name] for held in pull("held")), strict=True)
    print(f"{name:15} {list(measured)}")
    assert measured == predicted

# %% [markdown]
# ## The recorded runs
#
# Two such steps tell little about time. The runs that come with this repository have 80 examples in a batch,
# and a link to match:

# %%
# %%local
from zero1_helpers.measure.runs import load_run, setting_of
from zero1_helpers.report.notebook import show_table
from zero1_helpers.report.tables import results_table
from zero1_helpers.training.project import project

recorded = {name: load_run(project(f"traces/small/{name}")) for name in names}
table = results_table(recorded.values())
show_table(table, setting_of(recorded.values()))

# %% [markdown]
# One row a variant. Memory is that of the fullest rank; shares of time are means over the ranks.
#
# ## Picture

# %%
# %%local
from zero1_helpers.report import comparisons, style

style.show(comparisons.comparison(list(recorded.values())))

# %% [markdown]
# Sharding adds communication: the broadcasts. All-reduce moves $2\Psi$ values per step (times $(N-1)/N$), the
# broadcasts another $\Psi$. Making communication asynchronous, or putting it into buckets, changes *when* it happens
# and in how many pieces. It does not change how much there is. The last row does: a reduce-scatter and an all-gather
# move $\Psi$ each (times $(N-1)/N$), so the flat variant sends what the baseline sends.

# %%
# %%local
sent = table["sent"]
print((sent / sent["ddp"]).round(2).to_string())
ranks = recorded["ddp"].world_size
expected = (2 * (ranks - 1) / ranks + 1) / (2 * (ranks - 1) / ranks)
assert np.allclose(sent.drop(["ddp", "flat"]) / sent["ddp"], expected, rtol=1e-3)
assert np.isclose(sent["flat"] / sent["ddp"], 1, rtol=1e-3)

# %% [markdown]
# What time it takes is another matter. Look at the two columns of the table: on a CPU, where ranks share cores, they change
# from recording to recording. The counts of collectives do not.

# %%
# %%local
print(table["collectives"].to_string())
order = table["collectives"]
assert max(order["zero1-overlap"], order["zero1-bucket"]) < order["zero1-async"] < order["zero1"]

# %% [markdown]
# ## The post's order
#
# Exposed communication should rise from the baseline to ZeRO-1, and fall with each step after it.

# %%
# %%local
series = ["ddp", "zero1", "zero1-async", "zero1-bucket", "zero1-overlap"]


def in_the_posts_order(table):
    ddp, *falling = table.loc[series, "non_compute_pct"]
    return ddp < falling[0] and falling == sorted(falling, reverse=True)


# %%
# %%local
print(*(f"{name} {value:.1f} %" for name, value in table.loc[series, "non_compute_pct"].items()), sep=", ")
assert in_the_posts_order(table)

# %% [markdown]
# ## How fast must a link be?
#
# On a fast link nothing needs to be hidden, on a slow one nothing can be. A deep network of matrices on a few links shows
# where each variant stops mattering. Points are measured, lines come from `plan`, which knows only the number of
# parameters, the time of a step that just computes, and the link.

# %%
import time

from torch.nn import Linear, ReLU, Sequential


# %%
def step_seconds(build, after_backward, steps=1):
    torch.manual_seed(0)
    layers = (layer for _ in range(8) for layer in (Linear(512, 512), ReLU()))
    model, optimizer = build(Sequential(*layers).to(device), 1e-3, 1)
    x = torch.randn(256, 512, device=device)
    for step in range(steps + 1):
        began = time.perf_counter() if step <= 1 else began  # the first one makes the state
        model(x).square().mean().backward()
        after_backward(model, optimizer)
    return (time.perf_counter() - began) / steps

# %%
def alone(model, lr, bucket_cap_mb):
    return model, torch.optim.Adam(model.parameters(), lr=lr)


def step(model, optimizer):
    optimizer.step()
    optimizer.zero_grad()


# %%
rates = (50, 400) if link else ()  # MB/s
raced = [name for name in names if name != "zero1-balanced"]
compute, times = step_seconds(alone, step), []
for rate in rates:
    use_link(f"{rate}MB/s + 1ms")
    for name in raced:
        times.append((rate, name, step_seconds(VARIANTS[name].build, VARIANTS[name].after_backward)))

from zero1_helpers.measure.environment import environment

about = environment(device.type == "cuda")

# %% [markdown]
# The same from `plan`, on links of all speeds between:

# %%
# %%local
from zero1_helpers.measure.link import Link
from zero1_helpers.report.plan import Network, Workload, plan

compute, rates, raced = max(pull("compute")), pull("rates")[0], pull("raced")[0]
measured = {(rate, name): seconds for rate, name, seconds in pull("times")[0]}
work = Workload(8 * (512 * 512 + 512), compute, recipe="fp32", tensors=16, bucket_cap_mb=1)
speeds = [25 * 1.25**i for i in range(18)]  # MB/s
steps = {speed: plan(work, world, Network(Link(speed * 1e6, 1e-3)))["step_s"] for speed in speeds}

# %%
# %%local
from zero1_helpers.report.style import Figure

fig = Figure(figsize=(7.2, 3.6), dpi=130, layout="constrained")
ax = fig.subplots()
for i, name in enumerate(raced):
    ax.plot(speeds, [1e3 * steps[speed][name] for speed in speeds], f"C{i}", label=name, linewidth=1)
    ax.plot(rates, [1e3 * measured[rate, name] for rate in rates], f"C{i}o")
ax.axhline(1e3 * compute, color="#57606a", linestyle="--", linewidth=0.8)
ax.set(xscale="log", yscale="log", xlabel="bandwidth, MB/s", ylabel="step, ms")
ax.legend(fontsize=8, frameon=False)

# %%
# %%local
fig.title = "Step time against bandwidth"
about = pull("about")[0]
fig.caption = (
    f"8 matrices of 512 x 512. Lines: predicted. Points: measured, one step each, {about['hardware']}, {world} ranks, "
    f"{about['backend']}, emulated links of these bandwidths and 1 ms, {about['date']}."
)
slowest = {name: f"{1e3 * s:.0f} ms" for (rate, name), s in measured.items() if rate == 50}
fig.alt_text = f"Step time falls with bandwidth, for every variant, towards that of computing alone. At 50 MB/s: {slowest}."
style.show(fig)

# %% [markdown]
# Right of where a line meets the dashed one, there is nothing left for that variant to gain. From the lines, the bandwidth
# at which a step takes a tenth more than computing alone:

# %%
# %%local
for name in raced:
    enough = [speed for speed in speeds if steps[speed][name] <= 1.1 * compute]
    print(f"{name:14}", f"{enough[0]:6.0f} MB/s" if enough else f"more than {speeds[-1]:.0f} MB/s")
assert not rates or world == 1 or measured[50, "flat"] < measured[50, "zero1"], "2 of 3 parts sent, on a slow link"

# %% [markdown]
# ## The real size, recorded
#
# `traces/smollm2-360m` holds recorded runs of the post's model at its full size, in pure bf16, on four ranks without a
# GPU, with random weights. Memory is a matter of shapes. Time is not: the link was chosen as for the small model, so that the
# baseline communicates for about the post's share of a step, and seconds are a CPU's. (Gloo itself takes longer than this
# link for many of the large buckets, beside the computing; the line under the table says how many.) HTA needs half a minute
# for these traces; its shares of time are in the README, made by `zero1 report`. The last row is another training: fp32 master
# weights, the subject of notebook 11.

# %%
# %%local
from zero1_helpers.measure.runs import Run, find_runs, load_record

folders = find_runs(project("traces/smollm2-360m"))
full = {folder.name: Run(folder, load_record(folder), {}, {}) for folder in folders}  # run.json, and no traces
full_table = results_table(full.values(), times=False)
print("{parameters:,} parameters in {tensors} tensors, {dtype}".format(**full["ddp"].record["model"]))
show_table(full_table, setting_of(full.values()))

# %%
# %%local
state = {name: [rank["opt_state"] for rank in run.record["memory"]] for name, run in full.items()}
psi = full["ddp"].record["model"]["parameters"]
print("DDP baseline:    ", state["ddp"])
print("split by count:  ", state["zero1"])
print("split by bytes:  ", state["zero1-balanced"])
print("flat:            ", state["flat"])
assert state["ddp"] == [4 * psi] * 4 == [1_447_292_160] * 4
assert max(state["zero1"]) == 503_377_920 and sum(state["zero1"]) == 4 * psi
assert max(state["zero1-balanced"]) <= 362_496_000 and sum(state["zero1-balanced"]) == 4 * psi

# %%
# %%local
style.show(comparisons.bytes_per_rank([full[name] for name in names]))

# %% [markdown]
# ## Beside the post
#
# The post's own numbers, for the same model on four GPUs with batches of 16:

# %%
# %%local
from zero1_helpers.report.tables import PUBLISHED

show_table(PUBLISHED, "Published in the post. SmolLM2-360M, pure bf16, Adam, 4 GPUs, batch 16, 4 steps.")

# %% [markdown]
# **opt_state is 4 bytes a parameter, not 12.** The run is pure bf16: two moments of 2 bytes, no fp32 master copy. In
# the notation of the paper $K = 4$. That is why the baseline's opt_state is near 1.4 GB and not near 4.3.

# %%
# %%local
from zero1_helpers.memory_math import model_states

for recipe in ("bf16", "mixed"):
    print(f"{recipe:6} opt_state {model_states(psi, recipe)['opt_state'] / 1e9:.3f} GB")
assert model_states(psi, "bf16")["opt_state"] == state["ddp"][0]

# %% [markdown]
# **A quarter became a third.** The post calls 0.484 GB "a bit higher" than a quarter. It is what the split predicts:
# tensors are dealt out by *count*, and the first one is the embedding. So rank 0 holds more than a third of all
# elements. Compare the shares, the post's and the one that is counted here:

# %%
# %%local
share = max(state["zero1"]) / state["ddp"][0]
published = PUBLISHED.loc["zero1", "opt_state_gb"] / PUBLISHED.loc["ddp", "opt_state_gb"]
balanced = max(state["zero1-balanced"]) / state["ddp"][0]
print(f"fullest rank, split by count: {share:.1%} of the whole; in the post: {published:.1%}")
print(f"fullest rank, split by bytes: {balanced:.1%}")
assert abs(share - published) < 0.002
assert 0.25 <= balanced < 0.251

# %% [markdown]
# The shares agree. The absolute numbers do not quite: what is counted here is a little above the post's, by the same
# factor in both rows. A chart that is read in other units would do that; which ones, the post does not say.

# %%
# %%local
ratios = [state["ddp"][0] / 1e9 / 1.39, max(state["zero1"]) / 1e9 / 0.484]
print("counted here / published:", [f"{ratio:.3f}" for ratio in ratios])
assert abs(ratios[0] - ratios[1]) < 0.01

# %% [markdown]
# **The peak falls less than opt_state does.** The peak also holds params, grads and activations, and no stage-1
# sharding touches those. The larger the batch, the larger the part that does not shrink. Here is the same saving as a
# share of the model states alone, and of the recorded peak.

# %%
# %%local
for what in ("opt_state", "states", "peak"):
    before, after = full_table.loc["ddp", what], full_table.loc["zero1", what]
    print(f"{what:10} {before:7,.0f} MB -> {after:7,.0f} MB   {after / before - 1:+.1%}")
post = PUBLISHED["peak_gb"]
print(f"peak, in the post {post['zero1'] / post['ddp'] - 1:+.1%}, with more activations in it")
assert full_table.loc["zero1", "peak"] < full_table.loc["ddp", "peak"]

# %% [markdown]
# **The overlapped variant is leaner here, and fatter in the post.** In the post it needs a little more memory than
# plain ZeRO-1: a saving of 10 % instead of 12 %. The class in this series frees each gradient as soon as its bucket is
# stepped, and sends parameters in place, so grads and buckets together stay far below the full set of gradients
# that the others of the post hold. The flat one needs least, for its shards are equal.

# %%
# %%local
states = full_table["states"].drop("zero1-balanced")
print(states.round(0).to_string())
assert states["flat"] == states.min()
assert states["zero1-overlap"] < 0.85 * states.drop(["zero1-overlap", "flat"]).min()

# %% [markdown]
# **Time.** What the post sees, 22 % of non-compute time falling to 13 % and to 7 %, is communication that disappears behind
# computing. On an emulated link that gives the baseline about the post's share, the same classes do the same. Only the
# baseline's number was chosen, by the choice of the link; the others are what the schedules make of it.

# %%
# %%local
both = table[["non_compute_pct", "overlap_pct"]].join(
    PUBLISHED[["non_compute_pct", "overlap_pct"]].add_suffix(", post")
)
show_table(both.drop("zero1-balanced"), recorded["ddp"].setting)
assert both.loc["zero1-overlap", "overlap_pct"] > both.loc["zero1-async", "overlap_pct"] > both.loc["zero1", "overlap_pct"]

# %% [markdown]
# ZeRO-1's share follows from the baseline's: to $2\frac{N-1}{N}\Psi$ for the all-reduces come $\Psi$ for the broadcasts,
# all of it exposed.

# %%
# %%local
for title, baseline, shown in (
    ("recorded", table.loc["ddp", "non_compute_pct"], table.loc["zero1", "non_compute_pct"]),
    ("the post", *PUBLISHED.loc[["ddp", "zero1"], "non_compute_pct"]),
):
    communication = expected * baseline / (100 - baseline)  # of computing
    follows = 100 * communication / (1 + communication)
    print(f"{title}: {baseline:.1f} % in the baseline, so {follows:.1f} % expected; {shown:.1f} % shown")
    assert abs(follows - shown) < 4

# %% [markdown]
# ## Summary
#
# | step | what changes | what it costs |
# |---|---|---|
# | ZeRO-1 | opt_state is divided among the ranks | one broadcast of all params per step |
# | async | gradients travel while backward goes on | one small collective for each tensor |
# | buckets | few collectives instead of many | a copy into and out of a bucket |
# | overlapped | step and broadcast run behind backward, gradients go early | no gradient is left to look at after backward |
# | split by bytes | every rank gets nearly the same | nothing |
# | flat | equal slices of flat buckets: reduce-scatter, step, all-gather | parameters are views of a flat buffer |
#
# ## Exercises
#
# 1. Change the number of ranks in the second line of the first code cell to 2 and run everything again. By what factor
#    do the bytes of `opt_state` on rank 0 change, variant by variant?
# 2. `results_table` shows the fullest rank. Write the one line that shows the *emptiest* rank's opt_state, from
#    `run.record["memory"]`. By which factor do the two differ for `zero1`, and for `zero1-balanced`?
#
#    <details><summary>Solution</summary>
#
#    `min(rank["opt_state"] for rank in run.record["memory"])`
#
#    </details>
# 3. Suppose the optimizer were SGD with momentum, in pure bf16. What is $K$, what does ZeRO-1 save on four ranks, and
#    is it worth an extra $\Psi$ of communication? `model_states` has no recipe for it; `predict` needs none.
#
# Next: [09 Balanced shards](09_balanced_shards.ipynb), which gives every rank the same.
