# %% [markdown]
# # 00 Start here
#
# This series follows the blog post *ZeRO One: Sharding the Optimizer* and turns it into notebooks that run. It
# begins with data parallelism, where every process keeps a copy of everything, and ends with an optimizer whose
# state is divided among the processes and whose communication hides behind the backward pass. All of it runs on
# this machine, with GPUs or without.
#
# **Goal.** Know what a rank is, predict what a collective leaves on each of them, and see whether this machine is ready.
#
# **Time.** About 15 minutes to read, about 25 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# `%dist_init` started the **ranks**: Python processes of their own. From here on, every plain cell runs on all of
# them at once. How many there are is written in that line and nowhere else, so you can change it there.

# %% [markdown]
# ## Predict
#
# On each process, `rank` is its number, counted from 0. Rank $r$ will make the tensor $[\,r + 1,\ 10\,r\,]$.
#
# 1. All ranks call `dist.all_reduce`, which adds up their tensors element by element. What does rank 0 hold
#    afterwards? What does the last rank hold?
# 2. From the tensors as they were at first, all ranks call `dist.broadcast` with the last rank as the source. And now?
#
# Write your answers down. Every notebook asks first: predict, run the cells with Shift-Enter, compare.

# %% [markdown]
# ## What a rank is

# %%
print(f"I am rank {rank} of {world_size}, on {device}")

# %% [markdown]
# One cell, and every rank ran it. Where ranks print the same, the text appears once, with all their numbers:

# %%
world_size

# %% [markdown]
# The ranks share no memory. A name is bound on each of them, to a value of its own:

# %%
import os

mine, pid = rank**2, os.getpid()
mine

# %% [markdown]
# The process behind this notebook, the *kernel*, is one more. It trains nothing; it draws and compares. A cell that
# begins with `%%local` runs there, and `pull` fetches a value from every rank, as a list.

# %%
# %%local
import os

print("mine, rank by rank:", pull("mine"))
processes = {os.getpid(), *pull("pid")}
print(len(processes), "processes: the kernel, and", len(processes) - 1, "ranks")
assert len(processes) == 1 + pull("world_size")[0], "two ranks are one process"

# %% [markdown]
# ## The first collective
#
# A **collective** is a call that all ranks make together. `all_reduce` changes the tensor in place.

# %%
before = torch.tensor([rank + 1.0, 10.0 * rank], device=device)  # (2,)
summed = before.clone()
dist.all_reduce(summed)
summed.tolist()

# %% [markdown]
# The same sum on every rank, and none of them is special. That was the first prediction; here it is as a check:

# %%
expected = torch.tensor([[r + 1.0, 10.0 * r] for r in range(world_size)]).sum(dim=0)  # (2,)
assert torch.equal(summed.cpu(), expected), f"rank {rank}: {summed} is not the sum"
mean = summed / world_size
print("sum", summed.tolist(), "and mean", mean.tolist())

# %% [markdown]
# Put gradients in place of these tensors, and the mean is what data parallelism computes after each backward pass.
#
# ## Broadcast
#
# One rank, the source, sends; all others receive into a tensor of the same shape.

# %%
received = before.clone()
dist.broadcast(received, src=world_size - 1)
assert received.tolist() == [float(world_size), 10.0 * (world_size - 1)], "not the last rank's"
received.tolist()

# %% [markdown]
# In ZeRO-1 each rank updates only its share of the parameters, and sends it to the others in this way. Side by side:

# %%
# %%local
import pandas as pd

from zero1_helpers.report.notebook import show_table

names = {"before": "at first", "summed": "after all_reduce", "received": "after broadcast"}
table = pd.DataFrame({title: [str(t.tolist()) for t in pull(name)] for name, title in names.items()})
table.index = [f"rank {number}" for number in table.index]
show_table(table, "What each rank holds.")

# %% [markdown]
# ## Nobody leaves early
#
# A collective ends when its slowest rank has taken part. Here rank 0 comes a second late; each rank measures how long
# `dist.barrier`, a collective without data, takes for it.

# %%
import time

dist.barrier()
time.sleep(1.0 if rank == 0 else 0.0)
start = time.perf_counter()
dist.barrier()
waited = time.perf_counter() - start
print(f"waited {waited:.1f} s")

# %%
# %%local
first, *others = pull("waited")
assert all(first < other for other in others), "someone did not wait for rank 0"

# %% [markdown]
# Remember this for the profiles: time inside a collective includes waiting for the others.
#
# ## The magics
#
# | in a cell | what it does |
# |---|---|
# | `%dist_init --num-processes …` | starts the ranks; returns when all have answered, or says why not |
# | no magic | runs the cell on all ranks |
# | `%%distributed` | the same, said explicitly |
# | `%%rank [0]`, `%%rank [0-1]` | runs the cell on these ranks only |
# | `%%local` | runs the cell in the kernel |
# | `%sync` | waits until all ranks are there (a barrier) |
# | `%dist_status` | a line per rank: process id, device, peak memory, time since its start |
# | `%dist_mode -d`, `%dist_mode -e` | sends plain cells to the kernel, or to the ranks again |
# | `%dist_shutdown` | ends the ranks |
#
# They come from the package nbdistributed; `zero1_helpers` makes them fail loudly. Two functions go with them, both
# for the kernel: `pull("name")` gets a value from each rank, `push(name=value)` sets one on all.

# %%
# %%rank [0]
print("only rank", rank, "runs this")

# %%
# %sync
# %dist_mode

# %%
# %%local
push(lr=0.5)
assert pull("lr") == [0.5] * len(pull("rank")), "a rank missed it"
print("lr on each rank:", pull("lr"))
print("any expression:", pull("lr * rank"))

# %% [markdown]
# `%%rank` with a collective inside would wait for ranks that never come, so a cell like that prints a note first.
#
# The numbers that `%dist_status` shows differ from run to run. Here they are blanked out:

# %%
# %%local
import re

from IPython.utils.capture import capture_output

with capture_output() as captured:
    get_ipython().run_line_magic("dist_status", "")
print(re.sub(r"(pid|memory|up) [\d.]+", r"\1 …", captured.stdout), end="")
assert captured.stdout.count("pid") == len(pull("rank")), "not a line for each rank"

# %% [markdown]
# ## When a rank fails
#
# An exception on any rank stops the notebook, as it would without ranks. To show the message and go on, this cell
# sends two lines to all ranks by hand, and catches what comes back:

# %%
# %%local
cell = "expected = 1\nassert rank != expected, 'this rank disagrees'\n"
try:
    get_ipython().run_cell_magic("distributed", "", cell)
    message = ""
except Exception as error:
    message = str(error)
print(message)
assert "rank 1: AssertionError" in message and "line 2" in message

# %% [markdown]
# It names the rank, the line and the statement, then gives the traceback. The other ranks finished their cell, and all
# of them go on:

# %%
assert expected == 1, "the first line ran everywhere"
print("still here")

# %% [markdown]
# If the others are waiting in a collective for the rank that failed, they get a few seconds (`ClusterMagics.grace`),
# then all ranks are ended and the message says where each was. `%dist_init` starts new ones.
#
# ## Is this machine ready?
#
# `doctor` looks at Python, the packages, cores, memory, the loopback interface, GPUs and the hub. It prints a line for each,
# and after an arrow what you can do. `zero1 doctor` in a shell prints the same.

# %%
# %%local
from zero1_helpers.ranks.doctor import doctor

assert doctor(), "mend the lines that begin with FIX"

# %% [markdown]
# A line that begins with `note` limits something, and nothing has to be mended. The next cells look at what the ranks make
# of this hardware:

# %%
# %%local
import psutil
import torch

cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count()
gpus, memory = torch.cuda.device_count(), psutil.virtual_memory()
print(f"{cores} cores, {memory.total / 1e9:.0f} GB of memory, {gpus} GPUs")

# %%
backend, threads = dist.get_backend(), torch.get_num_threads()
print(f"{backend} on {device.type}, threads per rank: {threads}")

# %% [markdown]
# **Which backend, and why.** NCCL connects GPUs and takes one rank per GPU. With at least as many GPUs as ranks,
# `%dist_init` chooses it. Otherwise all ranks run on the CPU and use gloo, also where there are GPUs, but too few.
# The classes, the loop and the charts are the same; on a CPU the model is smaller. Each figure says what it ran on.
#
# **Cores.** They are divided among the ranks, with at least one thread each. With more ranks than cores the ranks
# take turns, so times vary. Memory and counts do not.

# %%
# %%local
ranks = len(pull("rank"))
assert pull("backend") == ["nccl" if gpus >= ranks else "gloo"] * ranks, "unexpected backend"
assert all(ranks * threads <= max(cores, ranks) for threads in pull("threads")), "too many threads"
print(f"{gpus} GPUs for {ranks} ranks: {pull('backend')[0]}")
print(f"{cores} cores for {ranks} ranks:", "some take turns" if cores < ranks else "one or more each")

# %% [markdown]
# **Memory.** Last, each rank builds the model of the series. Where torch sees a GPU that is the post's SmolLM2-360M,
# otherwise a tiny model of the same family; rank 0 says which.

# %%
import psutil

from zero1_helpers import get_smol_model, set_seed

set_seed()
model = get_smol_model().to(device)
parameters, occupied = sum(p.numel() for p in model.parameters()), psutil.Process().memory_info().rss
print(f"{parameters:,} parameters")

# %%
# %%local
free, used = psutil.virtual_memory().available, sum(pull("occupied"))
print(f"the ranks occupy {used / 1e9:.1f} GB, most of it libraries; {free / 1e9:.0f} GB are free")
assert free > 1e9, "close other programs: profiling takes some more memory than this"
assert len(set(pull("parameters"))) == 1, "the ranks have different models"
print("ready")

# %% [markdown]
# ## The map
#
# | notebook | idea |
# |---|---|
# | 00 Start here | ranks, collectives, magics, this machine |
# | [01 Training memory](01_training_memory.ipynb) | bytes per parameter: predicted, then measured |
# | [02 Sharding by hand](02_sharding_by_hand.ipynb) | give each rank its share of an optimizer, and see why parameters must be sent |
# | [03 DDP baseline](03_ddp_baseline.ipynb) | the yardstick, under the profiler |
# | [04 ZeRO-1](04_zero_one.ipynb) | the sharded optimizer as a class: less memory, more time |
# | [05 Async gradients](05_async_gradients.ipynb) | start each all-reduce during the backward pass |
# | [06 Gradient buckets](06_gradient_buckets.ipynb) | few large collectives instead of many small ones |
# | [07 Overlapped broadcasts](07_overlapped_broadcasts.ipynb) | step and send during the backward pass, too |
# | [08 Results](08_results.ipynb) | all variants side by side, beside the post's numbers |
# | [09 Balanced shards](09_balanced_shards.ipynb) | why a quarter became a third: split by count, by bytes, flat |
# | [10 Reduce-scatter](10_reduce_scatter.ipynb) | flat buckets: two thirds of the bytes |
# | [11 Master weights](11_master_weights.ipynb) | why small steps vanish in bf16, and what keeps them |
# | [12 In practice](12_in_practice.ipynb) | clipping, accumulation, saving, resuming on other ranks |
# | [13 Side by side](13_side_by_side.ipynb) | torch's own and DeepSpeed; when not to use ZeRO-1 |
#
# Every notebook starts its own ranks and stands alone. Numbers are printed by cells, and each claim has an `assert`
# next to it: a claim that fails turns the notebook red.
#
# ## Ending
#
# The ranks end with the kernel, or on command. After that, plain cells run in the kernel.

# %%
# %dist_shutdown

# %%
assert "world_size" not in globals(), "this is not the kernel"
"in the kernel"

# %% [markdown]
# ## Summary
#
# - A rank is a process; plain cells run on all of them, each with its own values.
# - `all_reduce` leaves the sum on every rank; `broadcast` leaves the source's values on every rank.
# - A collective takes as long as its slowest rank.
# - What goes wrong on a rank stops the notebook and says where.
#
# ## Exercises
#
# For these, run the first cell and `before = …` again.
#
# 1. Predict, then run: `dist.all_reduce(before.clone(), op=dist.ReduceOp.MAX)`. Keep the clone in a name, to see it.
#    <details><summary>Solution</summary>Every rank holds the last rank's tensor, because both elements grow with the
#    rank.</details>
# 2. Build a broadcast out of an `all_reduce`.
#    <details><summary>Hint</summary>What must all ranks but the source contribute, so that the sum is the source's
#    tensor?</details>
# 3. Let rank 1 fail while the others sit in a collective: `assert rank != 1`, and below it `dist.barrier()`. What does the
#    message say about the others, and what does the next cell do?
#    <details><summary>Solution</summary>It gives rank 1's assertion first, then that the others did not finish and in
#    which line of the cell they were. They cannot come back, so the next cell says that no ranks are running:
#    <code>%dist_init</code> starts afresh.</details>
# 4. Change the first cell to two ranks. What is the sum now? Run all cells and compare.
#
# Next: [01 Training memory](01_training_memory.ipynb).
