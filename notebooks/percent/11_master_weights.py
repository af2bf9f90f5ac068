# %% [markdown]
# # 11 Master weights: steps too small for bf16
#
# **Goal.** Train a bf16 model with an fp32 copy of its weights, of which each rank keeps only its slice.
#
# **Time.** About 20 minutes to read, about 125 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# ## Predict
#
# All runs so far, and the post's, let Adam step the weights in the dtype that the model computes with. In pure bf16 that is $K = 4$: two moments of 2 B. *Mixed precision* adds a copy of the weights in fp32, the **master weights**, which Adam steps, and keeps the moments in fp32: $K = 12$. Before you run anything, write down three guesses:
#
# 1. A bf16 weight is 1. Adam subtracts 0.001. What is it afterwards?
# 2. Which share of a small model's weights moves in one step with lr 1e-4, in pure bf16?
# 3. Unsharded, mixed precision takes $16\Psi$ and pure bf16 $8\Psi$. How far apart are they when 4 ranks share the optimizer?

# %% [markdown]
# ## The numbers of bf16
#
# A bf16 number has 8 significant bits: from 1 to 2 there are 128 of them, from 1/2 to 1 another 128, and so on. So the larger a number, the further away is the next one.

# %%
# %%local
import torch


def spacing(weight):
    """The distance from a bf16 weight to its neighbours on the side away from 0."""
    return 2.0 ** torch.frexp(weight.abs().float()).exponent * 2**-8

# %%
# %%local
for value in (1.0, 0.1, 0.02, 0.001):
    weight = torch.tensor(value, dtype=torch.bfloat16)
    following = torch.nextafter(weight, torch.tensor(torch.inf, dtype=torch.bfloat16))
    gap = spacing(weight)
    assert following.float() - weight.float() == gap
    print(f"after {value:<5} comes {following.item():.7f}: a step below {gap / 2:.7f} is lost")

# %% [markdown]
# A result between two of these numbers becomes the nearer one. So a step of less than half the distance is not made small. It is not made at all, however often it is repeated:

# %%
# %%local
low = torch.ones((), dtype=torch.bfloat16)
master = torch.ones(())  # the same weight in fp32
for _ in range(10):
    low -= 0.001
    master -= 0.001
print(f"ten times 1 - 0.001: in bf16 {low.item()}; in fp32 {master.item():.6f}, in bf16 {master.bfloat16().item()}")
assert low == 1 and master.bfloat16() < 1

# %% [markdown]
# That is the whole idea. The master copy adds up the small steps, and the model gets it rounded. Once in a while the rounded value moves on.

# %% [markdown]
# ## Which weights move?
#
# A small network with weights as PyTorch makes them, on the ranks from here on. Each rank draws its own batches, and the targets come from a fixed network of the same shape.

# %%
from torch import nn

from zero1_helpers import set_seed


def network(width=128):
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))

set_seed(1)
teacher = network().to(device)

# %%
def batch(step, rows=32):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, 32, generator=draw).to(device)  # different on each rank
    return x, teacher(x).detach()

def loss_of(model, x, y):
    dtype = next(model.parameters()).dtype  # what the model computes in
    return (model(x.to(dtype)).float() - y).square().mean()

# %% [markdown]
# One step of Adam in pure bf16. In its first step Adam moves every weight by lr, whatever the gradient (unless that is about 0). So before we look, the spacing tells which weights can move: those with half a spacing below lr.

# %%
def moved(lr):
    set_seed()
    model = network().to(device, torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, *batch(0)).backward()
    torch.optim.Adam(model.parameters(), lr=lr).step()
    pairs = list(zip(before, model.parameters(), strict=True))
    return sum((p != q).sum().item() for p, q in pairs) / sum(p.numel() for p in before), [p.cpu() for p in before]

# %%
# %%local
import pandas as pd

from zero1_helpers.report.notebook import show_table

rates, table = (1e-3, 1e-4, 1e-5, 1e-6), pd.DataFrame()
for lr in rates:
    share, before = pull(f"moved({lr})")[0]
    weights = torch.cat([p.reshape(-1) for p in before])
    can = (spacing(weights) / 2 < lr).float().mean().item()
    table[f"lr {lr:.0e}"] = [f"{can:.1%}", f"{share:.1%}"]
    assert abs(can - share) < 0.1

# %%
# %%local
table.index = ["half a spacing is below lr", "moved"]
show_table(table.T, "Share of the weights of the small network on rank 0, one step of Adam in bf16.")

# %% [markdown]
# The larger a weight, the coarser its numbers, and the earlier it stands still. A learning rate that falls, as most schedules let it, stops one weight after another.

# %% [markdown]
# ## A sharded master by hand
#
# A master copy on every rank would double what pure bf16 takes. But a rank steps only its shard, so it needs no more than the master of that. A flat row makes it easy: all weights end to end, cut in equal slices. Each parameter becomes a view of it; the last layer comes first, since its gradients do.

# %%
def flatten(model):
    params = [*model.parameters()][::-1]
    weights = torch.cat([p.detach().reshape(-1) for p in params])  # (n,) in bf16
    for p, part in zip(params, weights.split([p.numel() for p in params]), strict=True):
        p.data = part.view(p.shape)
    return params, weights

set_seed()
by_hand = network().to(device, torch.bfloat16)
params, weights = flatten(by_hand)
width = len(weights) // world_size
assert width * world_size == len(weights)  # otherwise one pads

# %% [markdown]
# Then this rank's slice, its master copy, and an Adam that knows nothing else:

# %%
mine = slice(rank * width, (rank + 1) * width)
master = weights[mine].float().requires_grad_()  # (n / world_size,) in fp32
adam = torch.optim.Adam([master], lr=1e-3)

# %% [markdown]
# A step: reduce-scatter the gradients, take the mean in fp32, step the master copy, round it into the row, all-gather the row.

# %%
from zero1_helpers.flat_bucket import all_gather, reduce_scatter


def step_by_hand():
    grads = torch.cat([p.grad.reshape(-1) for p in params])  # (n,) in bf16
    my_grads = torch.empty_like(weights[mine])  # (n / world_size,)
    reduce_scatter(my_grads, grads)
    master.grad = my_grads.float() / world_size
    adam.step()
    weights[mine] = master.detach()  # rounds
    all_gather(weights, weights[mine].clone())

# %%
loss_of(by_hand, *batch(0)).backward()
step_by_hand()
off = (master - weights[mine].float()).abs().max().item()
print(f"{off:.1e} is the most that a weight of rank {rank} differs from its master copy")
moments = sum(t.numel() for t in adam.state[master].values() if t.shape == master.shape)
assert 4 * (len(master) + moments) == 12 * len(weights) // world_size  # K = 12, an equal part of it

# %% [markdown]
# ## The class
#
# `FlatShardedOptimizer` does this in each of its buckets, with `master_weights=True`. The bucket is where the two dtypes meet. Read its docstring and then `hand_out_gradients`, `_update_master` and `take_step`:

# %%
# %%local
from zero1_helpers.flat_bucket import FlatPieces
from zero1_helpers.report.notebook import show_source

show_source(FlatPieces)

# %% [markdown]
# - A piece becomes a master copy at its first step. Until then it would hold nothing that the weights do not.
# - Afterwards `weights` are the master copy, rounded. Where they are not, somebody has written them (loaded a checkpoint, say), and then the weights are right.
# - `state[piece]["master_param"]` is the copy, so whatever counts, saves or loads optimizer state has it too.
#
# Does it step as we did? The same start, the same batch:

# %%
from zero1_helpers import FlatShardedOptimizer, SimpleDDPReduceScatter


def wrap(model, lr=1e-3, **options):
    optimizer = FlatShardedOptimizer(torch.optim.Adam, model, lr=lr, **options)
    return SimpleDDPReduceScatter(model, optimizer), optimizer

set_seed()
model, optimizer = wrap(network().to(device, torch.bfloat16), master_weights=True)
loss_of(model, *batch(0)).backward()
optimizer.step()

# %%
for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
    assert torch.allclose(p.float(), q.float(), rtol=2**-7, atol=1e-6)  # a bf16 number apart at most
equal = sum((p == q).sum().item() for p, q in zip(model.parameters(), by_hand.parameters(), strict=True))
dtypes = {str(state["master_param"].dtype) for state in optimizer.state.values()}
print(f"{equal:,} of {len(weights):,} weights have the same bits as by hand; master copies are {dtypes}")
assert equal > 0.99 * len(weights)

# %% [markdown]
# ## Does it matter?
#
# Three runs with the same class, seed and batches: fp32, pure bf16, and bf16 with master weights. All start from the same bf16 numbers, and only the dtypes differ. The learning rate falls from 1e-4 to nothing, along a cosine.

# %%
def run(dtype, steps=300, **options):
    set_seed()
    model, optimizer = wrap(network().bfloat16().to(device, dtype), lr=1e-4, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        loss = loss_of(model, *batch(step))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses

# %%
curves = {
    "fp32": run(torch.float32),
    "pure bf16": run(torch.bfloat16),
    "bf16 + fp32 master": run(torch.bfloat16, master_weights=True),
}

# %% [markdown]
# The mean over the ranks, smoothed over 20 steps:

# %%
# %%local
from matplotlib.figure import Figure

from zero1_helpers.report.style import BLUE, GREEN, RED, show

losses = sum(pd.DataFrame(c) for c in pull("curves")) / len(pull("rank"))
smooth = losses.rolling(20, min_periods=1).mean()

# %%
# %%local
fig = Figure(figsize=(7.2, 3.4), dpi=130, layout="constrained")
ax = fig.subplots()
smooth.plot(ax=ax, color=[BLUE, RED, GREEN], style=["-", "-", "--"], logy=True)
ax.lines[0].set(linewidth=5, alpha=0.4)  # the green line lies on it
ax.set(xlabel="step", ylabel="loss (mean of 20 steps)")
ax.legend(frameon=False)

# %%
# %%local
last = smooth.iloc[-1]
fp32, bf16, mixed = last
fig.title = "Loss in three precisions"
fig.caption = f"Loss of the small network, same seed and batches, {len(pull('rank'))} ranks. Last: " + ", ".join(
    f"{name} {value:.2e}" for name, value in last.items()) + "."
fig.alt_text = ("Line chart, logarithmic, of three losses. Pure bf16 falls more slowly from the start, levels off "
                f"and ends at {bf16:.1e}. With master weights the loss stays on the line of fp32: "
                f"{mixed:.1e} and {fp32:.1e}.")
show(fig)
assert abs(mixed / fp32 - 1) < 0.1 and bf16 > 3 * fp32

# %% [markdown]
# With this lr most weights of pure bf16 do not move at all (the table above), and the fewer the lower lr gets; the curve levels off long before the others do. With master weights forward and backward run in bf16, too, on weights that are just as coarse. What differs is where the steps are added up. How much it matters depends on the ratio of lr to the weights: exercise 1 tries others.

# %% [markdown]
# ## What it takes
#
# Per parameter: 2 B for the weight, 2 B for its gradient, and $K = 12$ B that ZeRO-1 divides: $16\Psi$ becomes $4\Psi + 12\Psi/N$. We measure both on live objects, with this machine's language model: once in a group in which each rank is alone, once in the group of all.

# %%
from zero1_helpers import get_dataloader, get_dataset, get_smol_model, shard_dataset

shard = shard_dataset(get_dataset()["train"], rank, world_size)
tokens = {name: t.to(device) for name, t in next(iter(get_dataloader(shard, 4))).items()}

def new_model():
    set_seed()
    return get_smol_model().to(device, torch.bfloat16)

# %% [markdown]
# The formula is about a moment when everything is there: state from a first step, and gradients from a second backward. `FlatShardedOptimizer` drops each gradient when its bucket is on its way. `no_sync()` keeps them, as if another micro-batch followed.

# %%
from zero1_helpers.memory_math import model_states, nbytes, predict, state_bytes


def held(group=None):
    model, optimizer = wrap(new_model(), master_weights=True, process_group=group)
    model(**tokens).loss.backward()
    optimizer.step()
    with model.no_sync():
        model(**tokens).loss.backward()
    grads = nbytes(p.grad for p in model.parameters())
    found = {"params": nbytes(model.parameters()), "grads": grads, "opt_state": state_bytes(optimizer)[0]}
    return found, predict(model, optimizer, optimizer.world_size, optimizer.partition)[optimizer.rank]

# %%
alone = [dist.new_group([r]) for r in range(world_size)][rank]  # every rank makes all groups
results = {1: held(alone), world_size: held()}
psi = sum(p.numel() for p in new_model().parameters())
for N, (found, predicted) in results.items():
    assert found["opt_state"] == predicted.opt_state, "not the predicted bytes"
    formula = model_states(psi, "mixed", N)["total"]
    assert abs(sum(found.values()) / formula - 1) < 1e-3  # slices are padded to equal length
assert sum(results[1][0].values()) == 16 * psi

# %%
# %%local
psi, N = pull("psi")[0], pull("world_size")[0]
rows = {f"rank {r}, of {n}": found for r, all_of in enumerate(pull("results")) for n, (found, _) in all_of.items()
        if n > 1 or r == 0}  # alone, all are alike
table = pd.DataFrame(rows).T
table["total / Ψ"] = table.sum(axis=1) / psi
shown = table.iloc[:, :3].map("{:,.0f}".format).join(table["total / Ψ"].map("{:.3f}".format))
show_table(shown, f"Bytes counted; Ψ = {psi:,}. By formula 16 Ψ alone, and {4 + 12 / N:.3f} Ψ on {N} ranks.")
shared = table[table.index.str.endswith(f"of {N}")]
assert shared["opt_state"].sum() == 12 * psi

# %% [markdown]
# Not a byte of state is lost or kept twice: the slices add up to $12\Psi$. The profiler sees the same. Two steps, recorded:

# %%
from zero1_helpers import get_profiler, train
from zero1_helpers.training.loop import flush_wait_step
from zero1_helpers.training.presets import get_preset
from zero1_helpers.training.project import project

model, optimizer = wrap(new_model(), master_weights=True)
with get_profiler(project("build/runs/master"), 2, model=model, optimizer=optimizer,
                  title="Flat, fp32 master weights", preset=get_preset().name) as profiler:
    train(model, optimizer, [tokens, tokens], flush_wait_step, profiler)

# %%
# %%local
from zero1_helpers.measure.runs import load_run
from zero1_helpers.report.figures import memory_timeline
from zero1_helpers.training.project import project

recorded = load_run(project("build/runs/master"))
show(memory_timeline(recorded))
rounding = 0 if recorded.record["device"] == "cpu" else 3 * 512 * recorded.record["model"]["tensors"]
for seen, predicted in zip(recorded.record["memory"], recorded.record["predicted"], strict=True):
    assert 0 <= seen["opt_state"] - predicted["opt_state"] <= rounding

# %% [markdown]
# And the same at the real size, from the recorded runs of SmolLM2-360M. On one rank mixed precision would hold $16\Psi$. Here
# gradients live in buckets only, so the peak is below $4\Psi + 12\Psi/N$:

# %%
# %%local
from zero1_helpers.measure.runs import load_record

full = {name: load_record(project(f"traces/smollm2-360m/{name}")) for name in ("ddp", "flat", "flat-master")}
psi = full["ddp"]["model"]["parameters"]
states = {name: max(rank["peak_states"] for rank in record["memory"]) for name, record in full.items()}
for name, most in states.items():
    print(f"{name:12} {most / 1e6:7,.1f} MB on the fullest rank, {most / psi:.2f} Ψ")
print(f"mixed precision by formula: unsharded {16 * psi / 1e6:,.1f} MB, on 4 ranks {7 * psi / 1e6:,.1f} MB")
assert sum(rank["opt_state"] for rank in full["flat-master"]["memory"]) == 12 * psi
assert states["flat"] < states["flat-master"] < min(7 * psi, states["ddp"])

# %%
# %%local
show(memory_timeline(load_run(project("traces/smollm2-360m/flat-master"))))

# %% [markdown]
# With fp32 master weights a rank holds less than plain DDP does without them. Against the post's recipe, pure bf16 with $K = 4$: what do fp32 master weights cost per rank, in bytes per parameter?

# %%
# %%local
from zero1_helpers.memory_math import model_states

worlds = [1, 4, 16, 64]
table = pd.DataFrame({name: [model_states(1, recipe, n)["total"] for n in worlds]
                      for name, recipe in {"pure bf16": "bf16", "fp32 master": "mixed"}.items()},
                     index=pd.Index(worlds, name="N"))
table["difference"] = table["fp32 master"] - table["pure bf16"]
show_table(table.map("{:.3g}".format), "Bytes per parameter and rank with ZeRO-1.")
assert (table["difference"] == 8 / table.index).all()

# %% [markdown]
# The difference is $8\Psi/N$. Unsharded it doubles the memory; on many ranks precision is almost free. This is where ZeRO-1 pays most: the state that it divides is three quarters of the whole.

# %% [markdown]
# ## In which dtype are gradients summed?
#
# The backward pass makes bf16 gradients. A reduce-scatter in bf16 rounds after each addition. In fp32 (`reduce_dtype=torch.float32`) almost nothing is lost, and twice the bytes travel. Both by hand, against the exact mean of what the ranks have:

# %%
loss_of(by_hand, *batch(1)).backward()
grads = torch.cat([p.grad.reshape(-1) for p in params])  # (n,) in bf16
everyone = torch.empty(world_size * len(grads), dtype=grads.dtype, device=device)
all_gather(everyone, grads)
exact = everyone.view(world_size, -1).double().mean(0)[mine]  # (n / world_size,)

# %%
from zero1_helpers.memory_math import bytes_sent

errors, sent = {}, {}
for dtype in (torch.bfloat16, torch.float32):
    total = torch.empty(width, dtype=dtype, device=device)
    reduce_scatter(total, grads.to(dtype))
    errors[str(dtype)] = ((total.double() / world_size - exact).abs().mean() / exact.abs().mean()).item()
    sent[str(dtype)] = round(bytes_sent("reduce_scatter", grads.numel() * dtype.itemsize, world_size))
assert world_size == 1 or errors["torch.float32"] < errors["torch.bfloat16"] / 100

# %%
# %%local
table = pd.DataFrame({"error": pull("errors")[0], "sent, B": pull("sent")[0]})
back = round(pull('bytes_sent("all_gather", 2 * len(weights), world_size)')[0])
table["with the all-gather, B"] = table["sent, B"] + back
show_table(table.assign(error=table["error"].map("{:.1e}".format)),
           "Reduce-scatter on rank 0: mean error relative to the mean gradient, and bytes sent in a step.")
assert table["sent, B"].iloc[1] == 2 * table["sent, B"].iloc[0]

# %% [markdown]
# The weights come back in bf16 in both cases, so a step sends half as much again, not twice as much. And the error? Backward rounds each gradient to 8 bits when it makes it; with few ranks, summing in bf16 adds an error of that kind. It grows with the number of ranks, because the sum outgrows what is added to it:

# %%
# %%local
lost = []
for N in (4, 64, 1024):
    terms = (1 + torch.randn(N, 2000, generator=torch.Generator().manual_seed(0))).bfloat16()  # of N ranks
    total = torch.zeros(2000, dtype=torch.bfloat16)
    for term in terms:
        total += term
    exactly = terms.double().sum(0)
    lost.append(((total - exactly).abs().mean() / exactly.abs().mean()).item())
    print(f"{N:>4} ranks, one after another in bf16: mean error {lost[-1]:.1%}")
assert lost == sorted(lost)

# %% [markdown]
# In the class it is an argument. With `step_in_backward=False` this rank's slice of the mean, `mine`, waits for the step, and we can look at it:

# %%
def mean_gradients(**options):
    set_seed()
    model = network().to(device, torch.bfloat16)
    optimizer = FlatShardedOptimizer(torch.optim.Adam, model, master_weights=True, **options)
    wrapped = SimpleDDPReduceScatter(model, optimizer, step_in_backward=False)
    loss_of(wrapped, *batch(1)).backward()
    wrapped.wait_for_gradients()
    return torch.cat([bucket.mine for bucket in optimizer.buckets])

# %%
rounded, precise = mean_gradients(), mean_gradients(reduce_dtype=torch.float32)
assert rounded.dtype == precise.dtype == torch.float32  # divided, and stepped, in fp32 in either case
apart = ((rounded - precise).abs().mean() / precise.abs().mean()).item()
print(f"summed in bf16 and in fp32, the mean gradients are {apart:.1e} apart")
assert apart < 2**-7 and (apart > 0 or world_size == 1)

# %% [markdown]
# ## Summary
#
# - bf16 has 8 significant bits. A step below half the distance to the next number is lost, and slow progress with it.
# - Master weights add the steps up in fp32. The model computes with their rounded values, in bf16.
# - $K = 12$ is divided by $N$: $16\Psi$ becomes $4\Psi + 12\Psi/N$, and the slices add up to the byte.
# - Against pure bf16 the price is $8\Psi/N$ per rank, and nothing more is sent.
# - Gradients may be summed in bf16 or, for half as much traffic again, in fp32.
#
# ## Exercises
#
# 1. Train all three again with lr 2e-3, then with 1e-5. When is pure bf16 nearly as good as the others, and when does it hardly move at all?
#
#    <details><summary>Hint</summary>
#    The table of the weights that move, above. With the larger lr look at the end of the curves, where a schedule has made it small.
#    </details>
#
# 2. *Stochastic rounding* is another way out, without a copy: round up or down at random, so that the mean is right. Write it for pure bf16, and draw a fourth curve.
#
#    <details><summary>Hint</summary>
#    Step an fp32 copy that is thrown away. Its bits as an integer, <code>w.view(torch.int32)</code>; add <code>torch.randint(0, 2**16, w.shape)</code>; clear the lower 16 bits; view it as float32 again. Every rank must round its own slice only, or all with the same seed.
#    </details>
#
# 3. fp16 has 11 significant bits. Adapt `spacing`, and repeat the table with lr 1e-4. Why is fp16 not simply better?
#
#    <details><summary>Solution</summary>
#    <code>2**-11</code> in place of <code>2**-8</code>. Its smallest numbers are much larger than bf16's, so small gradients become 0: hence <code>GradScaler</code>, here <code>clip.scaler_step</code>.
#    </details>
#
# 4. Save with `checkpoint.full_state_dict`, delete every `"master_param"` and resume. What is lost, and for how many steps does it matter?
#
#    <details><summary>Solution</summary>
#    The master copies start again from the rounded weights: each loses up to half a spacing, once. The moments are still there. The run goes on, but not with the same bits.
#    </details>
#
# Next: [12 In practice](12_in_practice.ipynb)
