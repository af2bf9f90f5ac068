# %% [markdown]
# # 02 Sharding by hand
#
# **Goal.** Do one ZeRO-1 step with your own hands, on live objects: split the optimizer over the ranks, step, see the ranks drift apart, and bring them together again.
#
# **Time.** About 20 minutes to read, about 30 seconds to run on 2 cores.
#
# Notebook 01 counted bytes on paper. Here the same bytes are made, or rather not made, on running ranks. No class of ours shards anything in this notebook; what you write here becomes the class `ZeROOne` in 04.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# ## Predict
#
# All ranks start with equal `params`, each works on its own batch, and the `grads` are averaged. Then each rank steps *only its shard*, and nothing else is sent.
#
# 1. On rank 1, which `params` are now different from rank 0's: none, those of rank 1, those of rank 0 and rank 1, or all?
# 2. Afterwards every `param` is broadcast by its owner. How far is the result from one process that sees all batches at once?
#
# Write your answers down; both are checked below.

# %% [markdown]
# ## Equal models, different data
#
# The same seed on every rank gives the same random weights. Plain cells run on all ranks; lines that are equal are shown once.

# %%
from zero1_helpers import SimpleDDP, get_dataloader, get_dataset, get_smol_model, set_seed

set_seed()
model = get_smol_model().to(device)
first = next(model.parameters()).flatten()[0].item()
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, the first is {first:+.6f}")

# %% [markdown]
# The data is not the same: each rank takes its own part of one shuffled list. The parts have equal lengths, so that all ranks do the same number of steps. A rank with one batch more would wait in a collective that no other rank joins.

# %%
train_ds = get_dataset()["train"].shuffle(seed=314)
per_rank, dropped = divmod(len(train_ds), world_size)
start = rank * per_rank
shard = train_ds.select(range(start, start + per_rank))  # (per_rank,) examples
print(f"examples {start} to {start + per_rank - 1} of {len(train_ds)}, {dropped} dropped at the end")

# %% [markdown]
# Equal, disjoint and covering: laid end to end, the parts are the list again, up to the remainder. The package's `shard_dataset` cuts the same parts.

# %%
from zero1_helpers import shard_dataset

starts = [None] * world_size
dist.all_gather_object(starts, start)
covered = [i for s in starts for i in range(s, s + per_rank)]
assert covered == list(range(len(train_ds) - dropped)), "a hole or an overlap"
assert shard[:] == shard_dataset(train_ds, rank, world_size)[:]

# %% [markdown]
# `SimpleDDP` averages `grads`; 03 takes it apart. When it wraps a model it compares every `param` with rank 0's, bit for bit, and raises an error if one differs. So if this cell passes, the ranks are equal.

# %%
ddp_model = SimpleDDP(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% [markdown]
# ## Parameter groups
#
# An optimizer keeps its `params` in *groups*: dictionaries with a list under `"params"`, and the settings for that list beside it. Two groups would be two learning rates. Here there is one.

# %%
for group in optimizer.param_groups:
    settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    print(len(group["params"]), "tensors with", settings)

params = [p for group in optimizer.param_groups for p in group["params"]]  # flat, in order
assert all(p is q for p, q in zip(params, model.parameters(), strict=True))

# %% [markdown]
# `is`, not `==`: the optimizer holds the model's own tensors, no copies. What is taken out of a group stays in the model.

# %% [markdown]
# ## Counting out the tensors
#
# Who gets what? The post's rule: the same number of *tensors* for each rank, however large they are. Try it first on the post's model. On the meta device it has names and shapes but no storage, so it costs nothing here.

# %%
from zero1_helpers.training.workload import meta_smol_model

real = list(meta_smol_model("smollm2-360m").parameters())
print(f"{sum(p.numel() for p in real):,} parameters in {len(real)} tensors, on {real[0].device}")
params_per_rank, remainder = divmod(len(real), world_size)
params_per_rank, remainder

# %% [markdown]
# The tensors that are left over go to the first ranks, one each. So a rank starts later by as many extra tensors as there are extra tensors before it: `min(rank, remainder)`.

# %%
start_idx = rank * params_per_rank + min(rank, remainder)
end_idx = start_idx + params_per_rank + (1 if rank < remainder else 0)
start_idx, end_idx  # one past the last

# %% [markdown]
# And it equals what the package computes, for this world and for the post's four GPUs. The published pair is (72, 3); the ranges in the assertion are the post's.

# %%
from zero1_helpers.partition import shard_range

assert (start_idx, end_idx) == shard_range(len(real), rank, world_size)
published = [(0, 73), (73, 146), (146, 219), (219, 291)]
assert [shard_range(len(real), r, len(published)) for r in range(len(published))] == published
assert divmod(len(real), len(published)) == (72, 3)

# %% [markdown]
# ## The same on the live model
#
# Other numbers, same arithmetic.

# %%
params_per_rank, remainder = divmod(len(params), world_size)
start_idx = rank * params_per_rank + min(rank, remainder)
end_idx = start_idx + params_per_rank + (1 if rank < remainder else 0)
local_params = set(params[start_idx:end_idx])
print(f"tensors {start_idx} to {end_idx - 1} of {len(params)}: {len(local_params)} are mine")

# %% [markdown]
# Later, in a broadcast, every rank must know the owner of *every* tensor. That is the same sum backwards: the first `remainder` ranks own one more.

# %%
from zero1_helpers import by_count


def owner_of(i):
    if i < (params_per_rank + 1) * remainder:
        return i // (params_per_rank + 1)
    return (i - remainder) // params_per_rank


owners = [owner_of(i) for i in range(len(params))]
assert owners == by_count(params, world_size)
assert [i for i in range(len(params)) if owners[i] == rank] == list(range(start_idx, end_idx))

# %% [markdown]
# Nobody sent anything: all ranks know the same shapes, so all come to the same answer.

# %% [markdown]
# ## Keep only what is mine
#
# Overwrite the groups, and the optimizer knows nothing of the other tensors. (`local_params` is a set: `in` on a list would compare the tensors' values.)

# %%
for group in optimizer.param_groups:
    group["params"] = [p for p in group["params"] if p in local_params]

kept = sum(len(group["params"]) for group in optimizer.param_groups)
print(f"the optimizer has {kept} tensors, the model {len(list(model.parameters()))}")
assert kept == end_idx - start_idx

# %% [markdown]
# What memory does this free? None yet. The model still holds all its `params`, and Adam makes its two moments at the first step. The saving is in what will never be made.

# %%
from zero1_helpers.memory_math import nbytes, predict, state_bytes

assert state_bytes(optimizer) == (0, 0)
everything = predict(model, torch.optim.Adam)[0].opt_state  # on one rank, unsharded
predicted = predict(model, torch.optim.Adam, world_size)[rank].opt_state
print(f"expected: {predicted:,} B of {everything:,} B")

# %% [markdown]
# ## One batch
#
# Forward and backward, each rank on its own batch: losses and gradients differ.

# %%
batch = next(iter(get_dataloader(shard, batch_size=4)))  # input_ids: (batch, length)
batch = {name: tensor.to(device) for name, tensor in batch.items()}


def norm(tensors):
    return torch.stack([t.detach().float().norm() for t in tensors]).norm().item()


loss = ddp_model(**batch).loss
loss.backward()
print(f"loss {loss.item():.4f}, norm of grads {norm(p.grad for p in params):.6f}")

# %% [markdown]
# Average the gradients. Now every rank holds the same `grads`, and all of them, also for tensors that it does not own. ZeRO-1 shards the optimizer state and nothing else.

# %%
ddp_model.sync_gradients()
print(f"norm of grads {norm(p.grad for p in params):.6f}")

# %% [markdown]
# Step. First note what the `params` were, to see which of them move.

# %%
before = [p.detach().clone() for p in params]
optimizer.step()
moved = [not torch.equal(p, old) for p, old in zip(params, before, strict=True)]
print(f"{sum(moved)} tensors moved, {nbytes(before):,} B of params, state {state_bytes(optimizer)[0]:,} B")
assert state_bytes(optimizer)[0] == predicted
assert not any(m for m, owner in zip(moved, owners, strict=True) if owner != rank)

# %% [markdown]
# The state is what was predicted, to the byte. A table of it, drawn in the kernel from every rank's values:

# %%
# %%local
import pandas as pd

from zero1_helpers.report.notebook import show_table

sizes = {"tensors": pull("kept"), "state, B": pull("state_bytes(optimizer)[0]")}
table = pd.DataFrame(sizes).rename_axis("rank")
table["of the whole, %"] = 100 * table["state, B"] / pull("everything")[0]
assert table["state, B"].sum() == pull("everything")[0]
show_table(table.astype(object), "Optimizer state on each rank after one step. The parts add up to the whole.")

# %% [markdown]
# Equal numbers of tensors are not equal numbers of bytes: look at the rank that owns the embedding. 04 comes back to it.

# %% [markdown]
# ## See the ranks drift apart
#
# Send each tensor's copy from some rank, and compare with one's own. The copy goes into a clone, so the look changes nothing.

# %%
def differs_from(sources):
    """For each tensor: is mine different from that of rank sources[i]?"""
    answers = []
    for p, source in zip(params, sources, strict=True):
        theirs = p.detach().clone()
        dist.broadcast(theirs, src=source)
        answers.append(not torch.equal(p, theirs))
    return answers


from_rank0 = differs_from([0] * len(params))
print(f"{sum(from_rank0)} of {len(params)} tensors differ from rank 0's")

# %% [markdown]
# First prediction. Rank 0 has moved its own shard, and another rank the other one. So a rank differs from rank 0 in two shards: rank 0's, where its own copy is old, and its own, where rank 0's copy is old.
#
# Measured against the *owner* of each tensor, a rank is behind in exactly the tensors of all others. (Exactly those that moved at the owner. In bf16 a weight of 1.0 may be too coarse to move by the learning rate, so the cell asks.)

# %%
has_moved = torch.tensor(moved, dtype=torch.int32, device=device)
dist.all_reduce(has_moved)  # at the owner
has_moved = [bool(m) for m in has_moved.tolist()]
behind = differs_from(owners)
others = [m and owner != rank for m, owner in zip(has_moved, owners, strict=True)]
two = [m and rank > 0 and owner in (0, rank) for m, owner in zip(has_moved, owners, strict=True)]
assert behind == others and from_rank0 == two
assert any(behind), "the step changed nothing on the other ranks"

# %% [markdown]
# As a picture: which tensors are new, on which rank?

# %%
from zero1_helpers.measure.environment import environment

about = environment(device.type == "cuda")

# %%
# %%local
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from zero1_helpers.report.style import COLOURS, show


# %%
# %%local
def draw(rows, title):
    fig = Figure(figsize=(7.2, 1.9), dpi=130, layout="constrained")
    ax, colours = fig.subplots(), ListedColormap(["#d5dade", COLOURS["step"]])
    ax.pcolormesh(rows, cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=1)
    ax.set(title=title, xlabel="index of the tensor", ylim=(len(rows), 0))
    ax.set_yticks([r + 0.5 for r in range(len(rows))], [f"rank {r}" for r in range(len(rows))])
    fig.title = title
    return fig

# %%
# %%local
def caption(fig, what, rows):
    about, counts = pull("about")[0], [sum(row) for row in rows]
    setting = f"{about['hardware']} · {len(rows)} ranks · {about['backend']} · no emulated link"
    fig.caption = f"{what} Green: new, grey: as before the step. {setting} · {about['date']}."
    fig.alt_text = f"A grid of ranks and tensors. New are, rank by rank, {counts} of {len(rows[0])}."
    show(fig)

rows = pull("moved")
caption(draw(rows, "After the step"), "Each rank has moved its own shard and no other.", rows)

# %% [markdown]
# ## What to send
#
# The others lack the update. They could be sent the owner's *optimizer state* and compute the update themselves, or they could be sent the updated `params`. Equally many messages, but compare the bytes:

# %%
print(f"state of all params: {everything:,} B, the params: {nbytes(params):,} B")
assert everything > nbytes(params)

# %% [markdown]
# So: send `params`. Each tensor goes from its owner to everyone else, in the same order on all ranks.

# %%
for p, owner in zip(params, owners, strict=True):
    dist.broadcast(p.data, src=owner)

# %% [markdown]
# Do they agree? Bit for bit, on every rank, with rank 0's copy and so with each other's. The checksum below adds up the raw bytes, so lines that fold into one are a second witness.

# %%
assert not any(differs_from([0] * len(params)))
moved = [not torch.equal(p, old) for p, old in zip(params, before, strict=True)]
assert moved == has_moved
checksum = sum(int(p.detach().contiguous().view(torch.uint8).sum()) for p in params)
print(f"{sum(moved)} of {len(params)} tensors are new; checksum {checksum:,}")

# %%
# %%local
rows = pull("moved")
caption(draw(rows, "After the broadcasts"), "Every rank has every new tensor.", rows)

# %% [markdown]
# ## Zero *all* gradients
#
# The optimizer's own `zero_grad` clears what is in its groups: only the local shard, now that we have cut them down.

# %%
optimizer.zero_grad()
left = [p.grad for p in params if p.grad is not None]
print(f"{len(left)} of {len(params)} grads are still there, {nbytes(left):,} B")
assert len(left) == len(params) - kept

# %% [markdown]
# The next backward would *add* to these: the step would mix two batches for some tensors and not for others. It has to be all of them:

# %%
for p in params:
    p.grad = None

assert all(p.grad is None for p in model.parameters())

# %% [markdown]
# ## And it equals one process
#
# Second prediction. One process that sees all batches of a step as one big batch does no communication at all; it is what we want to imitate. The mean of equal-sized means is the mean of the whole, so the update should be the same.
#
# float64, so that a difference cannot hide as rounding, and the smallest model of the family, so that you need not wait. First the whole step as one function:

# %%
def sharded_step(ddp_model, optimizer, batch, share=True):
    ddp_model(**batch).loss.backward()
    ddp_model.sync_gradients()
    optimizer.step()
    for p, owner in zip(ddp_model.parameters(), tiny_owners, strict=True):
        if share:
            dist.broadcast(p.data, src=owner)
        p.grad = None

# %% [markdown]
# Two copies of the model: one is trained by all ranks together, the other by each rank alone, on everyone's batches. (This family of models computes its norms in float32 even when all else is float64. Dividing by three ranks rounds there where one process does not, and Adam enlarges that for tiny gradients. So the norms are told to keep the dtype.)

# %%
def build():
    set_seed()
    model = get_smol_model("tiny").to(device).double()
    for norm in [m for m in model.modules() if hasattr(m, "variance_epsilon")]:
        norm.forward = lambda x, m=norm: torch.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)
    return model

# %%
tiny_owners = by_count(list(build().parameters()), world_size)


def build_sharded():
    ddp_model = SimpleDDP(build())
    everyones = zip(ddp_model.parameters(), tiny_owners, strict=True)
    return ddp_model, torch.optim.Adam([p for p, o in everyones if o == rank], lr=1e-3)

# %%
from itertools import islice

tiny_ds = get_dataset("tiny")["train"]
whole_loader = [get_dataloader(shard_dataset(tiny_ds, r, world_size), batch_size=4) for r in range(world_size)]


def steps_of_data(steps):
    """For each step: this rank's batch, and all ranks' batches in one."""
    for parts in islice(zip(*whole_loader, strict=True), steps):
        parts = [{k: t.to(device) for k, t in part.items()} for part in parts]
        yield parts[rank], {k: torch.cat([part[k] for part in parts]) for k in parts[0]}

# %% [markdown]
# Train both side by side, and take the largest difference of any element: once over the tensors owned here, once over the others. The generator yields it after each step.

# %%
def compare(steps, share=True):
    alone, (ddp_model, optimizer) = build(), build_sharded()
    adam = torch.optim.Adam(alone.parameters(), lr=1e-3)
    for mine, whole in steps_of_data(steps):
        sharded_step(ddp_model, optimizer, mine, share)
        alone(**whole).loss.backward()
        adam.step()
        adam.zero_grad()
        pairs = zip(ddp_model.parameters(), alone.parameters(), tiny_owners, strict=True)
        gaps = [(o == rank, (p - q).abs().max().item()) for p, q, o in pairs]
        yield max(gap for own, gap in gaps if own), max(gap for own, gap in gaps if not own)

# %%
worst = max(max(gaps) for gaps in compare(steps=3))
print(f"largest difference in three steps: {worst:.0e}")
assert worst < 1e-9

# %% [markdown]
# Rounding, and nothing more. ZeRO-1 is not an approximation: it is the same training with the state in another place.

# %% [markdown]
# ## What if the broadcast is skipped?
#
# No error is raised. After one step the own shard is right and the rest is old. In the next step every rank computes its gradients at a point of its own, the all-reduce averages what does not belong together, and the own shard goes wrong too. Look at the first column:

# %%
skipped = list(compare(steps=3, share=False))

# %%
# %%rank [0]
for step, (own, other) in enumerate(skipped):
    print(f"step {step}: off by {own:.0e} in the own shard, {other:.0e} elsewhere")

# %%
(own_first, elsewhere), (own_second, _) = skipped[:2]
assert own_first < 1e-9, "in the first step all ranks still started equal"
assert elsewhere > 1e-4, "other shards are one Adam step behind: about the learning rate"
assert own_second > 1e-6, "from the second step on, the gradients are of different points"

# %% [markdown]
# The loss of such a run may well go down. Only a check tells: the ranks must be equal after a step.

# %% [markdown]
# ## Free the memory
#
# A tensor lives as long as anything refers to it: model, optimizer, our lists, and also loop variables (`p`, `group`) and `loss`, whose graph leads to every parameter. The wrapper's hooks lead from each parameter back to the model, so `remove()` takes them off first. Weak references watch without holding on.

# %%
import gc
import weakref

watch = [weakref.ref(p) for p in params]
ddp_model.remove()
del model, ddp_model, optimizer, params, local_params, p, group, loss, left, before
gc.collect()
alive = sum(ref() is not None for ref in watch)
print(f"{alive} of {len(watch)} params are still in memory")
assert alive == 0
torch.cuda.empty_cache()  # hands the blocks back to the driver; without CUDA it does nothing

# %% [markdown]
# ## Summary
#
# - A parameter group is a list of the model's own tensors, with settings. Overwriting the lists shards the optimizer.
# - Tensors are counted out: `divmod`, the remainder to the first ranks. All ranks compute the same owners without sending a byte.
# - The saving is optimizer state that is never made. `params` and `grads` stay whole on every rank.
# - After the sharded step a rank is right in its own shard and old elsewhere; broadcasts from the owners make all ranks equal, to the bit.
# - The result is that of one process with all the data. Without the broadcast it is not, and nothing complains.
# - On a CPU nothing of this is different. Only what it costs is: that is for 03 and 04.

# %% [markdown]
# ## Exercises
#
# **1.** Give each rank a seed of its own, `set_seed(rank)`, make a model and wrap it in `SimpleDDP`. Who complains, and about which tensor? Then do the same with `broadcast_parameters=True`.
#
# <details><summary>Hint</summary>
#
# Every rank raises the same `ValueError`, not only those that differ: a rank that went on alone would wait for the others in its next collective. The tensor is the first one that the model registers.
# </details>
#
# **2.** Leave `ddp_model.sync_gradients()` out of `sharded_step` and run the comparison. Are the ranks equal after the broadcasts? Which assertion notices?
#
# <details><summary>Solution</summary>
#
# They are equal: each tensor comes from its owner, who stepped it with its own gradient. But that is the gradient of one batch, not of all. Only the comparison with one process notices. Equality of ranks is necessary, not sufficient.
# </details>
#
# **3.** Replace the owners by `by_bytes(params, world_size)` from `zero1_helpers`. Which cells must change, and what happens to the table and to the first picture?
#
# <details><summary>Hint</summary>
#
# Those that use `start_idx` and `end_idx`, and the one that makes `owners`: take `local_params` from `owners`, and pass `partition=by_bytes` to `predict`. Broadcast and comparison need owners, not ranges, and stay as they are. The shards are no longer consecutive, and their bytes are closer to equal.
# </details>
#
# **4.** Plant a wrong factor: multiply every gradient by `world_size` after the sync, as if the division had been forgotten. Compare once with Adam, once with `torch.optim.SGD` and `lr=0.1` in both places. Which of the two errors would a test with a tolerance of `1e-3` let pass?
#
# <details><summary>Solution</summary>
#
# Adam's. It divides by the size of its gradients, so a constant factor nearly cancels; what is left comes from its `eps`, in elements with tiny gradients. SGD is off by as much as it moved. That is why tests of such code should use SGD too, and float64 for Adam.
# </details>
#
# **Next:** 03 sets up the yardstick: plain data parallelism, profiled.
