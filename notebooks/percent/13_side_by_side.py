# %% [markdown]
# # 13 Side by side
#
# By now you know the classes of this series from the inside. Torch has its own, and so has DeepSpeed. Here they all do
# the same work: torch's `DistributedDataParallel`, alone and with `ZeroRedundancyOptimizer`, FSDP2's `fully_shard`, and
# DeepSpeed's stage 1 where it is installed.
#
# **Goal.** Compare them with this series' classes, parameter by parameter, byte by byte and message by message; then
# know what to change to move to one of them, and when not to shard the optimizer at all.
#
# **Time.** About 25 minutes to read, about 65 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# ## Predict
#
# Five ways to train: this series' overlapped class and its flat one, torch's DDP with a whole Adam, DDP with torch's
# ZeRO-1, and FSDP2. (Where DeepSpeed is installed, six.)
#
# 1. Four steps in float64, each rank with data of its own. How far are the five from one process with all the data?
# 2. Which of them send more than plain DDP does?
# 3. Which holds the least between two steps? And which at the peak?
# 4. Where is ZeRO-1 the wrong tool: SGD without momentum, LoRA, 70 billion parameters on GPUs of 80 GB, a small model
#    on one GPU?

# %% [markdown]
# ## Torch's three
#
# Each is a function with the same arguments, so that one loop can run them all. These also run in this project's benchmark:

# %%
# %%local
import sys

from zero1_helpers.training.project import project

sys.path.append(str(project()))
from benchmarks.contenders import step, torch_ddp, torch_fsdp2, torch_zero
from zero1_helpers.report.notebook import show_source

show_source(torch_ddp, torch_zero, torch_fsdp2, step)

# %% [markdown]
# - `views=True`: gradients are views of DDP's buckets, parameters views of the buckets that torch's ZeRO-1 sends. That
#   saves a copy of each. The default is off; we switch it on.
# - FSDP2 is asked to gather a layer's parameters once a step (`reshard_after_forward=False`). Between steps they are
#   sharded, as gradients and state are. So it stands between stages 2 and 3 of the paper.
#
# ## This series' two
#
# The same form, with the lines you know:

# %%
from zero1_helpers import ShardedOptimizer, SimpleDDPBucketAsync


def overlap(model, blocks, optimizer_cls, bucket_cap_mb, **kwargs):
    optimizer = ShardedOptimizer(optimizer_cls, model, **kwargs)
    return SimpleDDPBucketAsync(model, optimizer, bucket_cap_mb), optimizer


# %%
from zero1_helpers import FlatShardedOptimizer, SimpleDDPReduceScatter


def flat(model, blocks, optimizer_cls, bucket_cap_mb, **kwargs):
    optimizer = FlatShardedOptimizer(optimizer_cls, model, bucket_cap_mb, **kwargs)
    return SimpleDDPReduceScatter(model, optimizer), optimizer


# %%
from benchmarks.contenders import step, torch_ddp, torch_fsdp2, torch_zero, with_views
from zero1_helpers import VARIANTS

contenders = {  # how each is built, and what follows backward()
    "zero1-overlap": (overlap, VARIANTS["zero1-overlap"].after_backward),
    "flat": (flat, VARIANTS["flat"].after_backward),
    "torch-ddp": (with_views(torch_ddp), step),
    "torch-zero": (with_views(torch_zero), step),
    "torch-fsdp2": (torch_fsdp2, step),
}

# %% [markdown]
# ## The same parameters?
#
# A deep MLP in float64, so that rounding cannot hide a mistake, and a batch for each rank and step:

# %%
import torch
from torch import nn

from zero1_helpers import set_seed


def mlp(depth, width, dtype):
    set_seed()
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).to(device, dtype)


# %%
def batch(number, of_rank, rows=8):
    generator = torch.Generator().manual_seed(1000 * number + of_rank)
    return torch.randn(rows, 64, generator=generator, dtype=torch.float64).to(device)  # (rows, width)


# %% [markdown]
# The judge is one process that sees the batches of all ranks at once:

# %%
STEPS = 4


def one_process(optimizer_cls, dtype=torch.float64, **kwargs):
    model = mlp(6, 64, dtype)
    optimizer = optimizer_cls(model.parameters(), **kwargs)
    for number in range(STEPS):
        everything = torch.cat([batch(number, r) for r in range(world_size)]).to(dtype)
        model(everything).square().mean().backward()
        step(model, optimizer)
    return list(model.parameters())


# %% [markdown]
# And each of the five, where a rank sees its own batch. FSDP2's parameters are DTensors; `full_tensor` puts the shards
# together.

# %%
def together(name, optimizer_cls, dtype=torch.float64, **kwargs):
    build, after_backward = contenders[name]
    model = mlp(6, 64, dtype)
    wrapped, optimizer = build(model, list(model)[::2], optimizer_cls, 0.1, **kwargs)
    for number in range(STEPS):
        wrapped(batch(number, rank).to(dtype)).square().mean().backward()
        after_backward(wrapped, optimizer)
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


# %%
def distance(ours, theirs):
    return max((p - q).abs().max().item() for p, q in zip(ours, theirs, strict=True))


apart, start = {name: {} for name in contenders}, list(mlp(6, 64, torch.float64).parameters())
for title, optimizer_cls, lr in (("SGD", torch.optim.SGD, 0.5), ("Adam", torch.optim.Adam, 0.01)):
    expected = one_process(optimizer_cls, lr=lr)
    assert distance(expected, start) > 1e-3, "nothing was trained"
    for name in contenders:
        apart[name][title] = distance(together(name, optimizer_cls, lr=lr), expected)

# %%
# %%local
import pandas as pd

from zero1_helpers.report.notebook import show_table

everywhere = [pd.DataFrame(apart).T for apart in pull("apart")]
worst = pd.concat(everywhere).groupby(level=0, sort=False).max()
show_table(worst.map("{:.0e}".format), "Largest difference of any parameter from one process, over all ranks.")
assert worst.max().max() < 1e-9

# %% [markdown]
# Rounding, and no more. SGD is the sharper judge: a gradient that is wrong by a factor moves its parameters by that
# factor, while Adam divides the factor away.
#
# ## DeepSpeed
#
# DeepSpeed wraps model and optimizer in one call. What comes back is an engine, which is called like the model, and
# steps itself:

# %%
# %%local
from benchmarks.contenders import deepspeed_stage1, engine_step

show_source(deepspeed_stage1, engine_step)

# %% [markdown]
# DeepSpeed is no dependency of this project; `make install EXTRAS=deepspeed` installs it, too. Where it is missing, the
# tables below have a row less.

# %%
from importlib.metadata import version
from importlib.util import find_spec

from benchmarks.contenders import deepspeed_stage1, engine_step

if installed := find_spec("deepspeed") is not None:
    contenders["deepspeed"] = (deepspeed_stage1, engine_step)
print("DeepSpeed", version("deepspeed") if installed else "is not installed here, and not run")

# %% [markdown]
# It keeps a master copy of this rank's share in fp32, so it is compared in fp32, and with a large `eps`, which tames
# Adam's answer to rounding. (Without the word about clipping in its settings the comparison of losses below would fail:
# these gradients are small, a language model's are not.)

# %%
settings = {"lr": 0.01, "eps": 1e-3}
if installed:
    found = together("deepspeed", torch.optim.Adam, torch.float32, **settings)
    off = distance(found, one_process(torch.optim.Adam, torch.float32, **settings))
    print(f"off from one process by less than 1e-5? {off < 1e-5}")
    assert off < 1e-5

# %% [markdown]
# ## A window on each
#
# Now bytes. A small Llama of the family that you know, and a random batch on each rank:

# %%
from dataclasses import replace

from zero1_helpers import get_smol_model
from zero1_helpers.training.presets import PRESETS


def llama():
    set_seed()
    tiny, shape = PRESETS["tiny"], {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2}
    return get_smol_model(replace(tiny, config=tiny.config | shape)).to(device)


# %%
ids = torch.randint(3, 1000, (4, 64), generator=torch.Generator().manual_seed(rank)).to(device)
labels = torch.zeros(4, dtype=torch.long, device=device)  # (batch,)
tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}  # (batch, length)

# %% [markdown]
# Two steps make the state and let all settle on their buckets. Two more are recorded, by one profiler and one memory
# ledger for all; what is sent is counted in the profiler's trace, whoever sends it.

# %%
from zero1_helpers import get_profiler
from zero1_helpers.phases import phase
from zero1_helpers.training.project import project


def train_step(model, optimizer, after_backward):
    with phase("forward"):
        loss = model(**tokens).loss
    with phase("backward"):
        loss.backward()
    after_backward(model, optimizer)
    return loss.item()


# %%
for name, (build, after_backward) in contenders.items():
    model = llama()
    wrapped, optimizer = build(model, list(model.model.layers), torch.optim.Adam, 0.5, lr=1e-3)
    for _ in range(2):
        train_step(wrapped, optimizer, after_backward)
    with get_profiler(project(f"build/runs/side/{name}"), 2, model=wrapped, optimizer=optimizer,
                      preset="a Llama of 2 layers") as prof:
        for _ in range(2):
            prof.step(train_step(wrapped, optimizer, after_backward))

# %%
# %%local
from zero1_helpers.measure.runs import load_run

names = pull("list(contenders)")[0]
runs = {name: load_run(project(f"build/runs/side/{name}")) for name in names}
losses = pd.DataFrame({name: run.record["losses"] for name, run in runs.items()}, index=["step 3", "step 4"]).T
print(losses.to_string(float_format="{:.6f}".format))
assert (losses - losses.loc["torch-ddp"]).abs().max().max() < 1e-3

# %% [markdown]
# ## opt_state, rank by rank
#
# Torch's ZeRO-1 keeps its state in an optimizer inside, FSDP2 in DTensors; the ledger knows both. The marks are
# predictions from shapes alone: whole tensors dealt out by count (`zero1-overlap`) or by size (`torch-zero`), equal
# slices of buckets (`flat`), rows of each tensor (`torch-fsdp2`), or everything (`torch-ddp`).

# %%
# %%local
from zero1_helpers.report.comparisons import bytes_per_rank
from zero1_helpers.report.style import show

five = [run for name, run in runs.items() if name != "deepspeed"]
show(bytes_per_rank(five))
for run in five:
    measured, predicted = ([rank["opt_state"] for rank in run.record[key]] for key in ("memory", "predicted"))
    rounding = 0 if run.record["device"] == "cpu" else 2 * 512 * run.record["model"]["tensors"]
    assert all(0 <= m - p <= rounding for m, p in zip(measured, predicted, strict=True)), run.variant

# %% [markdown]
# DeepSpeed's state is Adam's two moments and the copy of the weights, 12 B for each parameter of its slice:

# %%
# %%local
if "deepspeed" in runs:
    held = [rank["opt_state"] for rank in runs["deepspeed"].record["memory"]]
    whole = runs["deepspeed"].record["model"]["parameters"]
    print("opt_state of DeepSpeed's ranks:", held, "B;", f"together {sum(held) / whole:.3f} B for each parameter")
    assert len(set(held)) == 1 and abs(sum(held) / whole - 12) < 0.01  # padded to equal slices

# %% [markdown]
# ## All states, at rest and at the peak
#
# State is not all. The ledger's last line is the moment between two steps; the other moment is the one in which
# `params`, `grads`, `buckets` and `opt_state` together are largest.

# %%
# %%local
from zero1_helpers.measure.schema import STATES
from zero1_helpers.report.memory import get_memory_timeline


def fullest(run, moment):  # MB by category, on the rank where their sum is largest
    lines = [get_memory_timeline(run, rank)[list(STATES)] / 1e6 for rank in range(run.world_size)]
    rows = [line.iloc[-1] if moment == "rest" else line.loc[line.sum(axis=1).idxmax()] for line in lines]
    return max(rows, key=sum)


# %%
# %%local
rest, peak = (pd.DataFrame({n: fullest(run, moment) for n, run in runs.items()}).T for moment in ("rest", "peak"))
both = pd.concat({"at rest": rest, "at the peak": peak}, axis=1)
both.columns = [f"{category}, {moment}" for moment, category in both.columns]
show_table(both.loc[:, both.max() > 0], f"MB on the fullest rank. {runs['flat'].setting}.")

# %%
# %%local
from zero1_helpers.report.style import COLOURS, Figure

sums = pd.DataFrame({"at rest": rest.sum(axis=1), "at the peak": peak.sum(axis=1)})
fig = Figure(figsize=(7.2, 2.8), dpi=130, layout="constrained")
axes, moments = fig.subplots(1, 2, sharey=True), {"at rest": rest, "at the peak": peak}
for ax, (moment, frame) in zip(axes, moments.items(), strict=True):
    frame[::-1].plot.barh(ax=ax, stacked=True, color=COLOURS, width=0.75, legend=moment == "at rest")
    ax.set(title=moment, xlabel="MB", xlim=(0, 1.05 * sums["at the peak"].max()))

# %%
# %%local
axes[0].legend(frameon=False, fontsize=8)
fig.title, setting = "States of all", runs["flat"].setting
fig.caption = f"Model states of the fullest rank, between two steps and at their highest sum. {setting}."
totals = [", ".join(f"{n} {mb:.1f}" for n, mb in frame.sum(axis=1).items()) for frame in (rest, peak)]
fig.alt_text = f"Two stacked bar charts. MB at rest: {totals[0]}. At the peak: {totals[1]}."
show(fig)

# %%
# %%local
print((sums / sums.loc["torch-ddp"]).map("{:.0%}".format).to_string())
assert runs["flat"].world_size == 1 or sums["at rest"].idxmin() == "torch-fsdp2", "it alone shards the parameters"
assert sums["at the peak"].idxmax() == "torch-ddp"
assert rest.loc["torch-zero", "grads"] > 0.99 * peak.loc["torch-ddp", "params"], "DDP's buckets stay"

# %% [markdown]
# - With views DDP's buckets *are* the gradients, and they are there all the time, also between steps. This series' two
#   classes free a bucket as soon as it is stepped.
# - FSDP2 has the least to keep: a rank's share of everything. During a step it has the whole parameters beside their
#   shards, since here each layer stays gathered until its backward is over.
# - What none of the categories shows are FSDP2's whole gradients of a layer, on their way into the reduce-scatter, and
#   DeepSpeed's buckets: for the ledger they are temporaries.
#
# ## What they send

# %%
# %%local
def traffic(run):
    calls = {c["op"]: str(c["calls"]) for c in run.record["collectives"]}
    return {"sent, MB": sum(c["bytes_sent"] for c in run.record["collectives"]) / 1e6} | calls


sent = pd.DataFrame({name: traffic(run) for name, run in runs.items()}).T
show_table(sent, f"Collectives of one step, and what a rank sends by ring algorithms. {setting}.")

# %%
# %%local
ranks, mb = runs["flat"].world_size, runs["torch-ddp"].record["predicted"][0]["params"] / 1e6
psi = sent["sent, MB"] / mb
print(psi.map("{:.3f} Ψ".format).to_string())
for name in (run.variant for run in five):
    extra = 1 if name in ("zero1-overlap", "torch-zero") and ranks > 1 else 0  # the broadcasts
    assert abs(psi[name] - (2 * (ranks - 1) / ranks + extra)) < 0.02, name
assert int(sent.loc["torch-zero", "broadcast"]) - int(sent.loc["torch-ddp", "broadcast"]) == ranks

# %% [markdown]
# Two families: all-reduce and broadcast, with one Ψ more than DDP; and reduce-scatter and all-gather, with none. Torch's
# ZeRO-1 is of the first family, as the post's class is. The number of messages is a matter of buckets: with views,
# torch's ZeRO-1 sends one broadcast for each rank, and FSDP2 one gather for each block (two layers, and the rest). The
# one broadcast of torch's DDP carries the model's buffers. DeepSpeed, if it is in the table, shows a third way: what it
# calls to reduce and to gather, on this backend, depends on its version.
#
# ## What it costs in time
#
# Times need a network. One emulated link for all, slow enough to matter on this machine, and an MLP:

# %%
from zero1_helpers.measure.emulate import emulate

LINK = "100MB/s" if device.type == "cpu" else "none"  # over NCCL the link is a real one
if LINK != "none":
    emulate(LINK)

# %%
racers, x = {}, torch.randn(256, 512, generator=torch.Generator().manual_seed(rank)).to(device)
for name, (build, _) in contenders.items():
    model = mlp(8, 512, torch.float32)
    racers[name] = build(model, list(model)[::2], torch.optim.Adam, 2, lr=1e-4)

# %% [markdown]
# In each round all take a step, in another order; a step takes as long as on its slowest rank. Ratios are taken within a
# round, so that whatever else the machine does hits all alike.

# %%
import time


def seconds_of(name, steps=1):
    (model, optimizer), after_backward = racers[name], contenders[name][1]
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        model(x).square().mean().backward()
        after_backward(model, optimizer)
    torch.zeros(1, device=device).item()  # a GPU has done all of it
    return (time.perf_counter() - began) / steps  # seconds


# %%
from zero1_helpers.measure.passage import lane

floors, times, order = {}, [], list(contenders)
for name in order:
    seconds_of(name, steps=2)  # makes the state; buckets are planned anew
    lane.log = passages = []
    seconds_of(name)
    lane.log, floors[name] = None, sum(p.deadline - p.begin for p in passages) / 1e9
for number in range(3):
    for name in order[number:] + order[:number]:
        times.append({"round": number, "contender": name, "seconds": seconds_of(name)})

# %% [markdown]
# `floors` is what the link alone needs for a step's bytes. No class can beat it, whatever it overlaps.

# %%
# %%local
slowest = pd.concat([pd.DataFrame(times) for times in pull("times")]).groupby(["round", "contender"])["seconds"].max()
wide = slowest.unstack()[names]  # rounds x contenders
ratio = wide.div(wide["torch-zero"], axis=0)
race = pd.DataFrame({"step, ms": 1e3 * wide.median(), "link alone, ms": 1e3 * pd.Series(pull("floors")[0])})
race["of torch-zero"] = ratio.median().map("{:.2f}".format)
race["least to most"] = [f"{a:.2f} to {b:.2f}" for a, b in zip(ratio.min(), ratio.max(), strict=True)]
show_table(race, f"Medians of {len(wide)} rounds; link {pull('LINK')[0]}, {ranks} ranks.")
for name in names:
    assert wide[name].min() >= pull("floors")[0][name], f"{name} was faster than its link"

# %% [markdown]
# Times are shown and not asserted: they differ from machine to machine and from run to run. What does hold is asserted:
# nobody beats the link, and the second family has less to send. Torch's ZeRO-1 steps after backward and sends after the
# step. Its overlapping mode (`overlap_with_ddp=True`) is not for gloo. FSDP2 hides its
# collectives on CUDA streams of their own; a CPU has none, so here it waits for each.
#
# `make bench` does this for all variants, two models and four links, with more rounds.
#
# ## Moving from one to another
#
# | | model | optimizer | after `backward()` |
# |---|---|---|---|
# | overlapped | `SimpleDDPBucketAsync(model, optimizer)` | `ShardedOptimizer(Adam, model, lr=…)` | `flush_bucket()`, `wait_for_gradients()`, `wait_for_broadcasts()` |
# | flat | `SimpleDDPReduceScatter(model, optimizer)` | `FlatShardedOptimizer(Adam, model, lr=…)` | `step()` |
# | torch DDP | `DistributedDataParallel(model)` | `Adam(model.parameters(), lr=…)` | `step()`, `zero_grad()` |
# | torch ZeRO-1 | the same | `ZeroRedundancyOptimizer(model.parameters(), Adam, lr=…)` | the same |
# | FSDP2 | `fully_shard(layer)` for each, then `fully_shard(model)` | `Adam(model.parameters(), lr=…)`, made after that | the same |
# | DeepSpeed | `deepspeed.initialize(…)` | goes into that call | `engine.step()` |
#
# And around the loop:
#
# | | several micro-batches | the whole state, to save |
# |---|---|---|
# | this series | `no_sync()` | `checkpoint.full_state_dict(optimizer)` |
# | torch DDP, ZeRO-1 | `no_sync()` | `consolidate_state_dict()`, then `state_dict()` on that rank |
# | FSDP2 | `set_requires_gradient_sync(False)` | `get_optimizer_state_dict(model, optimizer)` |
# | DeepSpeed | `gradient_accumulation_steps` in its config | `engine.save_checkpoint(folder)`, on all ranks |
#
# Names change. So this cell asks torch and the package whether they have them:

# %%
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zero1_helpers import checkpoint

assert callable(get_optimizer_state_dict) and callable(checkpoint.full_state_dict)
for cls in (DistributedDataParallel, SimpleDDPBucketAsync, SimpleDDPReduceScatter):
    assert hasattr(cls, "no_sync")
assert hasattr(FSDPModule, "set_requires_gradient_sync") and hasattr(ZeroRedundancyOptimizer, "consolidate_state_dict")

# %% [markdown]
# What to take? For work, torch's and DeepSpeed's classes: they are maintained, and know more cases than ours. For a
# model whose parameters and gradients fit on each rank, any ZeRO-1 will do; beyond that, FSDP2 goes on to stage 3 by
# leaving out one argument.
#
# ## What if, on paper
#
# Nobody here has 64 GPUs. But bytes need no machine, and time needs only a link's latency and bandwidth. The paper's
# example, 7.5 billion parameters in mixed precision on 64 ranks, by stage of ZeRO:

# %%
# %%local
from zero1_helpers.report.plan import Network, Workload, growth, plan, stages

by_stage = stages(7.5e9, "mixed", 64)
show_table(by_stage.map("{:.2f}".format), "GB on each of 64 ranks, by the closed forms; stage 0 is plain data parallelism.")
for stage, printed in {0: 120, 1: 31.4, 2: 16.6, 3: 1.88}.items():  # the paper's
    assert abs(by_stage.loc[stage, "total"] - printed) < 0.05

# %% [markdown]
# For time we need a workload and a network. 8,192 tokens on each rank and step, six floating-point operations for each
# token and parameter, on a GPU that does $4\cdot10^{14}$ of them in a second. Eight ranks a node, joined by NVLink;
# nodes joined by 100 Gb/s for each rank:

# %%
# %%local
from zero1_helpers.measure.link import parse_link

work = Workload(7.5e9, compute=6 * 7.5e9 * 8192 / 4e14, recipe="mixed")
network = Network(inside=parse_link("nvlink"), between=parse_link("100gbit"), node_size=8)
on_64 = plan(work, 64, network)
show_table(on_64.map("{:.3g}".format), f"One step of {work.compute:.2f} s of compute on 64 ranks, by variant.")
assert on_64.loc["flat", "exposed_s"] < on_64.loc["zero1-overlap", "exposed_s"] < on_64.loc["zero1", "exposed_s"]

# %% [markdown]
# From one node to ten thousand ranks, the share of a step in which nothing is computed:

# %%
# %%local
worlds = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10_000]
percent = growth(work, network, worlds).T.drop(columns="zero1-balanced")  # the same bytes as zero1
fig = Figure(figsize=(7.2, 3.4), dpi=130, layout="constrained")
ax = fig.subplots()
for i, name in enumerate(["zero1", "ddp", "zero1-bucket", "flat, clipped", "zero1-overlap", "flat, lazy, clipped", "flat"]):
    percent[name].plot(ax=ax, logx=True, marker="os^Dv"[i % 5], markersize=4, style="--" if "clip" in name else "-")
ax.set(xlabel="ranks", ylabel="non-compute, % of a step", ylim=-1)
ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
ax.minorticks_off()
ticks = ax.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4,096"])

# %%
# %%local
fig.title = "Exposed communication, on paper"
fig.caption = (f"Predicted for 7.5 billion parameters in mixed precision, {work.compute:.2f} s of compute a step, "
               f"{network.inside} inside nodes of {network.node_size}, {network.between} between; nothing was run.")
first, last = (", ".join(f"{n} {v:.0f} %" for n, v in percent.loc[N].items()) for N in (8, 10_000))
fig.alt_text = f"Lines that rise with the number of ranks and level off. On 8 ranks: {first}. On 10,000: {last}."
show(fig)

# %%
# %%local
between = percent.loc[16:]  # more than one node
print(percent.loc[[8, 16, 64, 10_000]].round(1).T.to_string())
assert (percent.diff().iloc[1:] > -1e-9).all(axis=None), "more ranks never mean less communication"
assert (between["zero1"] > between["ddp"]).all() and (between["flat"] <= between["zero1-overlap"]).all()
second, later = (percent.loc[b, "ddp"] - percent.loc[a, "ddp"] for a, b in ((8, 16), (16, 10_000)))
assert 2 / 3 < second / later < 1.5
assert percent.loc[64, "zero1-overlap"] < 1 < percent.loc[10_000, "zero1-overlap"] and percent["flat"].max() < 1
assert percent.loc[64, "flat, lazy, clipped"] < 1 < 10 < percent.loc[64, "flat, clipped"]

# %% [markdown]
# For DDP the second node costs about as much as all that follow. From there on the bytes of a rank at most double,
# however many ranks there are, and latency goes on growing. Behind backward there is room for nearly all of it on 64
# ranks. On ten thousand the broadcasts no longer fit, and the flat class still does. (On paper all nodes are joined
# alike, and a collective behind backward runs at full speed. Real networks do worse.)
#
# Lines that would lie on others are left out: `zero1-async` runs as `zero1-bucket` does, torch's DDP as `flat`. The dashed
# lines clip gradients by their global norm, as most training of language models does. The norm needs all
# gradients, so every step comes after backward, and the all-gather of the flat class with it. A lazy gather moves that
# behind the next forward pass, and the line falls back to where it was without clipping.
#
# ## When not to use ZeRO-1
#
# **When the state is a small part.** Shares of the model states on one rank, for SmolLM2-360M in pure bf16, and what
# four ranks save. For LoRA, the model is frozen, and each linear layer gets two thin matrices of rank 8:

# %%
# %%local
from zero1_helpers import by_bytes
from zero1_helpers.memory_math import predict


def saving(model, optimizer_cls, **kwargs):
    alone = predict(model, optimizer_cls, partition=None, **kwargs)[0]
    sharded = max(rank.total for rank in predict(model, optimizer_cls, 4, by_bytes, **kwargs))
    return {"opt_state, % of states": 100 * alone.opt_state / alone.total,
            "saved by 4 ranks, %": 100 * (1 - sharded / alone.total)}


# %%
# %%local
import torch

from zero1_helpers.training.workload import meta_smol_model

lora = meta_smol_model().requires_grad_(False)
for layer in [m for m in lora.modules() if isinstance(m, torch.nn.Linear)]:
    down, up = torch.empty(8, layer.in_features), torch.empty(layer.out_features, 8)
    layer.down, layer.up = (torch.nn.Parameter(t.to("meta", torch.bfloat16)) for t in (down, up))

# %%
# %%local
adam, sgd, smol = torch.optim.Adam, torch.optim.SGD, meta_smol_model()
small = pd.DataFrame({
    "Adam": saving(smol, adam), "SGD with momentum": saving(smol, sgd, lr=0.1, momentum=0.9),
    "SGD": saving(smol, sgd, lr=0.1), "Adam, LoRA of rank 8": saving(lora, adam),
}).T
show_table(small, "SmolLM2-360M, pure bf16, by shapes alone; the fullest of four ranks, split by bytes.")
saved = small["saved by 4 ranks, %"]
assert saved["SGD"] == 0 and saved["Adam, LoRA of rank 8"] < 5 < saved["SGD with momentum"] < saved["Adam"]

# %% [markdown]
# **When the parameters alone do not fit.** ZeRO-1 leaves `params` and `grads` whole on each rank, however many ranks
# there are. For 70 billion parameters on GPUs of 80 GB, how many ranks does each stage need? (Activations come on top.)

# %%
# %%local
def enough(stage, params=70e9, gpu=80):
    worlds = (2**k for k in range(20))
    return next((n for n in worlds if stages(params, "mixed", n).loc[stage, "total"] < gpu), None)


needed = {stage: enough(stage) for stage in range(4)}
for stage, ranks_needed in needed.items():
    print(f"stage {stage}: {f'{ranks_needed} ranks' if ranks_needed else 'no number of ranks is enough'}")
assert needed[1] is None and needed[2] is None and needed[3] is not None

# %% [markdown]
# **When two ranks share a slow link.** On two ranks a ring all-reduce sends each byte once, and a broadcast once more:

# %%
# %%local
count, tensors = sum(p.numel() for p in smol.parameters()), len(list(smol.parameters()))
slow = Workload(count, compute=6 * count * 8192 / 4e14, recipe="bf16", tensors=tensors)
pair = plan(slow, 2, Network(parse_link("10gbit")))[["sent_gb", "exposed_s", "step_s"]]
show_table(pair.assign(of_torchs=pair["step_s"] / pair.loc["torch-ddp", "step_s"]).map("{:.3g}".format),
           f"SmolLM2-360M in bf16 on two ranks, {slow.compute:.3f} s of compute, {parse_link('10gbit')}.")
assert pair.loc["zero1", "sent_gb"] == 2 * pair.loc["ddp", "sent_gb"]
assert pair.loc["flat", "sent_gb"] == pair.loc["ddp", "sent_gb"]
assert abs(pair.loc["flat", "step_s"] / pair.loc["torch-ddp", "step_s"] - 1) < 0.01

# %% [markdown]
# `of_torchs` compares each step with that of torch's DDP, which hides its all-reduce behind backward, too. The broadcasts
# send twice DDP's bytes to halve the state. If the state must be sharded over such a link, then use reduce-scatter and
# all-gather: the flat class takes DDP's time with half of its state.
#
# **When the model is small and the GPU is not.** All states of SmolLM2-360M in mixed precision on a GPU of 80 GB:

# %%
# %%local
from zero1_helpers.memory_math import model_states

alone, eight = (model_states(count, "mixed", N)["total"] / 80e9 for N in (1, 8))
print(f"{count:,} parameters: {alone:.1%} of the GPU; with ZeRO-1 on 8 ranks {eight:.1%}")
assert model_states(count, "mixed", 1, stage=1) == model_states(count, "mixed", 1, stage=0), "alone it saves nothing"
assert alone - eight < 0.05

# %% [markdown]
# What it saves there, nobody misses; what it sends, everybody waits for.
#
# ## Summary
#
# - This series' classes, torch's and one process end at the same parameters, SGD included, to rounding.
# - Torch's ZeRO-1 deals whole tensors out by size and sends 3Ψ, one of them after backward; FSDP2 cuts each tensor, sends 2Ψ, and
#   keeps the least between steps. The flat class sends 2Ψ as well.
# - DDP's buckets stay for the whole training; classes that free gradients bucket by bucket have a lower peak.
# - On paper, what runs behind backward hides nearly all communication on 64 ranks; on ten thousand only the flat class
#   still does.
# - Not for SGD without momentum or LoRA, not where parameters do not fit, not over a slow link by broadcasts, and not
#   where there is room.
#
# ## Exercises
#
# 1. Leave `reshard_after_forward=False` out of `torch_fsdp2` and record it again. Which column of the memory table falls,
#    and which count in the table of collectives rises?
#    <details><summary>Hint</summary>Copy the function into a cell, under a new name in <code>contenders</code>. A layer's
#    parameters are then freed after its forward, and gathered once more for its backward. (The outermost block keeps
#    its own.)</details>
# 2. Switch the views off for `torch-zero`. What happens to the number of broadcasts? Where do DDP's buckets go in the
#    memory table?
#    <details><summary>Hint</summary>One broadcast for each tensor. The buckets were made before the window, and nothing
#    names them: they are in none of the categories.</details>
# 3. How many tokens must a rank have in a step, so that on 64 ranks over `10gbit` between nodes the flat class exposes
#    less than a tenth of a step? Predict first, from bytes and bandwidth.
#    <details><summary>Hint</summary><code>plan(Workload(7.5e9, compute), 64, network)</code> in a loop over
#    <code>compute = 6 * 7.5e9 * tokens / 4e14</code>; look at <code>non_compute_pct</code>.</details>
# 4. At which rank of LoRA does ZeRO-1 on four ranks save as much as a tenth of the states?
#    <details><summary>Hint</summary>Put <code>saving</code> into a loop over the rank. The thin matrices need gradients,
#    too, which are not sharded.</details>
#
# This is the last notebook of the series. Back to the table of all variants: [08 Results](08_results.ipynb), or to the
# beginning: [00 Start here](00_start_here.ipynb).
