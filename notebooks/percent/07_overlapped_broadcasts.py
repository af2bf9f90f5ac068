# %% [markdown]
# # 07 Overlapped broadcasts
#
# After notebook 06, gradients travel behind backward in buckets. Step and broadcast still wait until all are there. But
# a parameter needs only its own gradient: as soon as a bucket is reduced, its parameters can be stepped and sent.
#
# **Goal.** Step and broadcast each bucket while backward still runs, in one order on all ranks, and see what it costs.
#
# **Time.** About 20 minutes to read, about 50 seconds to run on 2 cores.

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# ## Predict
#
# 1. If a parameter is stepped in the middle of backward and its gradient dropped, does the peak of params, grads,
#    opt_state and buckets rise or fall, compared with notebook 06?
# 2. The losses of some steps: equal to the baseline's, or a little off, since the steps come at different times?
# 3. Is there a model for which stepping during backward is wrong?
#
# ## One optimizer per parameter
#
# Gradients first, averaged after backward in the way of notebook 03:

# %%
from zero1_helpers import get_dataloader, get_dataset, get_smol_model, set_seed, shard_dataset

set_seed()
shard = shard_dataset(get_dataset()["train"], rank, world_size)
batch = {name: tensor.to(device) for name, tensor in next(iter(get_dataloader(shard, batch_size=4))).items()}
model = get_smol_model().to(device)

# %%
from zero1_helpers import SimpleDDP

ddp_model = SimpleDDP(model)
ddp_model(**batch).loss.backward()
ddp_model.sync_gradients()

# %% [markdown]
# `optimizer.step()` updates all that the optimizer holds. The post makes it finer by giving each parameter a small
# optimizer of its own, on the rank that owns it:

# %%
from zero1_helpers import by_count

params = list(model.parameters())
owners = by_count(params, world_size)
optimizers = {
    p: torch.optim.Adam([p], lr=1e-3) for p, owner in zip(params, owners, strict=True) if owner == rank
}
print(f"{len(optimizers)} optimizers of {len(params)}")

# %% [markdown]
# Now one parameter alone. The last one registered gets its gradient first in backward. Its owner steps it and sends it:

# %%
p, owner = params[-1], owners[-1]
before = [q.detach().clone() for q in params]
if rank == owner:
    optimizers[p].step()
dist.broadcast(p.data, src=owner)

# %%
changed = [i for i, (q, old) in enumerate(zip(params, before, strict=True)) if not torch.equal(q, old)]
print(f"changed: parameter {changed} of 0 to {len(params) - 1}")
assert changed == [len(params) - 1], "exactly one parameter should have changed"

# %% [markdown]
# ## One optimizer that sees few parameters
#
# Many small optimizers also mean many learning rates to keep equal. Adam keeps its state per parameter, so one
# optimizer can do the same, if for a moment it is shown only the parameters at hand. That is `only`:

# %%
# %%local
from zero1_helpers.report.notebook import show_source
from zero1_helpers.zero import only

show_source(only)

# %%
from zero1_helpers.zero import only

stepped = p.detach().clone()
p.data.copy_(before[-1])  # back to where it was
mine = [q for q, owner_of_q in zip(params, owners, strict=True) if owner_of_q == rank]
optimizer = torch.optim.Adam(mine, lr=1e-3)
with only(optimizer, {p}):  # on the other ranks: nothing
    optimizer.step()
dist.broadcast(p.data, src=owner)
assert torch.equal(p, stepped), "only() should step exactly as a small optimizer does"
print(f"state for {len(optimizer.state)} parameter(s), lr {optimizer.param_groups[0]['lr']}, kept once")

# %% [markdown]
# `ShardedOptimizer.step_parameter` does all of it: step on the owner, drop the gradient everywhere, start the broadcast
# and return at once. Until `.wait()` the parameter must not be read.

# %%
from zero1_helpers import ShardedOptimizer

p.data.copy_(before[-1])
optimizer = ShardedOptimizer(torch.optim.Adam, model, lr=1e-3)
on_its_way = optimizer.step_parameter(p)
on_its_way.wait()
assert torch.equal(p, stepped) and p.grad is None
print("gradients left:", sum(q.grad is not None for q in params), "of", len(params))

# %% [markdown]
# ## Who calls it, and when?
#
# The obvious place is a callback: `work.get_future().then(...)` runs it when the all-reduce is done. The post does
# that. Let us see on which thread, and in which order, such callbacks run:

# %%
import threading

ran = []  # (number of the all-reduce, on the main thread?)


def note(i):
    ran.append((i, threading.current_thread() is threading.main_thread()))


# %%
sizes = [2**20 if i % 4 == 0 else 2**12 for i in range(8)]  # some large, some small
works = [dist.all_reduce(torch.ones(size, device=device), async_op=True) for size in sizes]
futures = [work.get_future().then(lambda _, i=i: note(i)) for i, work in enumerate(works)]
for future in futures:
    future.wait()

# %%
print("order of the callbacks:", *(i for i, _ in ran), "| on the main thread:", sum(main for _, main in ran))
assert sorted(i for i, _ in ran) == list(range(8))
if dist.get_backend() == "gloo" and world_size > 1:  # alone, it has nothing to wait for
    assert not all(main for _, main in ran), "expected callbacks on gloo's threads"

# %% [markdown]
# On gloo they run on threads of the backend, and there are two. The order depends on which collective ends first and
# which thread is scheduled when: compare the ranks above, and run the cells again. For adding to a list that is harmless. For a collective it is not, because
# collectives have no names: the first that one rank issues pairs with the first of the others. Two tensors, in
# opposite order on every other rank:

# %%
a, b = torch.full((1,), 1.0, device=device), torch.full((1,), 10.0, device=device)
for tensor in (a, b) if rank % 2 == 0 else (b, a):
    dist.all_reduce(tensor)
print(f"a {a.item():.0f}, should be {world_size}; b {b.item():.0f}, should be {10 * world_size}")
if world_size > 1:
    assert a.item() != world_size, "the order should have mattered"

# %% [markdown]
# Equal shapes, so this gave wrong numbers without a word. With different shapes or sources, ranks abort, or wait for each
# other for ever. Hence the rule, here and with every backend: **never launch a collective from a callback.**
#
# ## A schedule instead
#
# The thread that runs the hooks launches the buckets, in the same order on all ranks. So it may finish them, too, in an
# order that is fixed beforehand: when bucket $k$ is launched, finish bucket $k - \text{lag}$.

# %%
# %%local
def order(num_buckets, lag):
    for k in range(num_buckets):
        yield f"launch {k}"
        if k >= lag:
            yield f"finish {k - lag}"
    for k in range(max(num_buckets - lag, 0), num_buckets):  # after backward
        yield f"finish {k}"


# %%
# %%local
for lag in (0, 1, 2):
    print(f"lag {lag}:", ", ".join(order(4, lag)))
assert all(len(set(order(4, lag))) == 8 for lag in range(6)), "each bucket is launched and finished once"

# %% [markdown]
# *Finish* means: wait for the all-reduce, step the parameters owned here, start their broadcasts. With lag 0
# every bucket is awaited as soon as it is launched; on a CPU backward stands still meanwhile. With lag 1 a bucket travels
# while backward makes the next one.
#
# ## The classes

# %%
# %%local
from zero1_helpers.overlap import SimpleDDPBucketAsync
from zero1_helpers.zero import ShardedOptimizer

show_source(ShardedOptimizer, SimpleDDPBucketAsync)

# %% [markdown]
# One broadcast carries all parameters of a bucket that have the same owner. They are neither packed nor unpacked: with
# each plan they are moved so that they lie end to end (`lay_out`), and from then on they are sent and received in place.

# %%
# %%local
from zero1_helpers.bucket import as_flat

show_source(as_flat)

# %% [markdown]
# The price: from the launch of its broadcast until all have arrived, nobody may read a parameter. Forward raises if
# somebody forgot to wait. And backward? Of that below.
#
# On a CPU, `work.wait()` stops the thread that runs backward. On CUDA it only tells a stream to wait, but that stream
# must not be the one that backward computes on. So `_finish` queues all it does on a **side stream**:

# %%
# %%local
from zero1_helpers.streams import on_stream

show_source(on_stream)

# %% [markdown]
# The compute stream goes on with backward. At the end, in `wait_for_broadcasts`, it waits for the side stream, once.
# `record_stream` keeps the allocator from handing out the bucket's memory while the side stream still uses it.
#
# ## Run
#
# From here on over the emulated link of notebook 03, if this is a CPU. (Not before: over a link, callbacks run on a thread
# of the link's, and in order.)

# %%
from zero1_helpers import use_link
from zero1_helpers.training.project import project

BATCH, LR = 4, 1e-4  # examples in a rank's batch; learning rate
link = use_link(batch_size=BATCH, folder=project("build/runs"))

# %% [markdown]
# After backward there is no `optimizer.step()` any more:

# %%
def after_backward(model, optimizer):
    model.flush_bucket()
    model.wait_for_gradients()
    model.wait_for_broadcasts()


# %%
from zero1_helpers import SimpleDDPBucketAsync, get_profiler, train
from zero1_helpers.training.presets import get_preset
from zero1_helpers.training.record import describe

set_seed()
model = get_smol_model().to(device)
optimizer = ShardedOptimizer(torch.optim.Adam, model, lr=LR)
ddp_model = SimpleDDPBucketAsync(model, optimizer, bucket_cap_mb=get_preset().bucket_cap_mb)
batches = [batch] * 3  # the same one again and again, so that the loss falls

# %% [markdown]
# The cap is the preset's, as in notebook 06. We keep the plan of the first step, for after it there is another.

# %%
first_plan = list(ddp_model.buckets)
with get_profiler(project("build/runs/zero1-overlap"), steps=3, model=ddp_model, optimizer=optimizer,
                  **describe("zero1-overlap", shard, BATCH)) as prof:
    losses = train(ddp_model, optimizer, batches, after_backward, prof)
print("losses", [round(loss, 3) for loss in losses])

# %% [markdown]
# And the baseline, without a profiler, for its losses:

# %%
from zero1_helpers.training.loop import sync_step

set_seed()
sync = SimpleDDP(get_smol_model().to(device))
baseline = train(sync, torch.optim.Adam(sync.parameters(), lr=LR), batches, sync_step)

# %% [markdown]
# ## Check: ranks and losses
#
# After the last step every rank holds the same parameters, to the last bit:

# %%
flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])  # (sum of numel,)
rank0 = flat.clone()
dist.broadcast(rank0, src=0)
assert torch.equal(flat, rank0), f"rank {rank} has other parameters than rank 0"
print(f"{flat.numel():,} numbers equal rank 0's; gradients left: {sum(p.grad is not None for p in model.parameters())}")

# %%
# %%local
from zero1_helpers.measure.runs import load_run
from zero1_helpers.training.project import project

run = load_run(project("build/runs/zero1-overlap"))
rounding = 1e-4 if run.record["model"]["dtype"] == "float32" else 5e-2
baseline = [sum(at_step) / run.world_size for at_step in zip(*pull("baseline"), strict=True)]
for ours, theirs in zip(run.record["losses"], baseline, strict=True):
    print(f"overlapped {ours:.6f}, baseline {theirs:.6f}")
    assert abs(ours - theirs) <= rounding * max(theirs, 0.1), "another training than the baseline's"
assert run.record["losses"][-1] < run.record["losses"][0]

# %% [markdown]
# ## Check: one order
#
# The trace holds what each rank did, and in which order. It should be the schedule from above, step after step:

# %%
# %%local
from zero1_helpers.report.timing import annotations

marks = [annotations(run, rank)["name"] for rank in range(run.world_size)]
done = [[m.replace("wait", "finish") for m in names if m.startswith(("launch", "wait"))] for names in marks]
first, later = pull("[len(first_plan), len(ddp_model.buckets)]")[0]
print(", ".join(done[0][-2 * later :]))
expected = list(order(first, lag=1)) + list(order(later, lag=1)) * (run.record["steps"] - 1)
assert done[0] == expected, "not the schedule"

# %%
# %%local
issued = [[m for m in names if m.startswith(("launch", "broadcast"))] for names in marks]
assert all(sequence == issued[0] for sequence in issued), "ranks issued collectives in different orders"
print(f"{len(issued)} ranks, {len(issued[0])} launches and groups of broadcasts each, in the same order")

# %% [markdown]
# How many collectives a step? One all-reduce for each bucket, one broadcast for each owner with parameters in it; and,
# once, a broadcast of the order of gradients:

# %%
def num_broadcasts(buckets):
    return len({(b.index, optimizer.param_to_owner_rank[p]) for b in buckets for p in b.params})


broadcasts = [num_broadcasts(first_plan), num_broadcasts(ddp_model.buckets)]

# %%
# %%local
names = ["ddp", "zero1", "zero1-async", "zero1-bucket", "zero1-overlap"]
runs = {name: load_run(project(f"traces/small/{name}")) for name in names}
for name, shown in (runs | {"yours": run}).items():
    print(f"{name:14}", {c["op"]: c["calls"] for c in shown.record["collectives"]})
calls = {c["op"]: c["calls"] for c in run.record["collectives"]}  # of a step, on average
(one, other), steps = pull("broadcasts")[0], run.record["steps"]
assert calls["all_reduce"] == round((first + (steps - 1) * later) / steps)
assert calls["broadcast"] == round((one + (steps - 1) * other + 1) / steps)

# %% [markdown]
# ## Picture: one step

# %%
# %%local
from zero1_helpers.report import figures
from zero1_helpers.report.style import show

show(figures.schedule_diagram(run))

# %% [markdown]
# Compare with notebook 06: step and broadcast of the early buckets have moved in among the backward of later ones. Only
# those of the last buckets are left at the end.
#
# ## Picture: memory

# %%
# %%local
show(figures.memory_timeline(run))

# %% [markdown]
# Gradients no longer pile up: each bucket's are made, sent, used and dropped. How much is alive at once, gradients and
# everything in buckets, broadcasts included? The most in each step of each rank:

# %%
# %%local
from zero1_helpers.report import memory, timing


def step_peaks(run):  # MB of grads + buckets
    peaks = []
    for rank in range(run.world_size):
        line = memory.get_memory_timeline(run, rank)
        at = line["time_ms"] * 1e3 + run.memory(rank)["time_us"].iloc[0]
        alive = (line["grads"] + line["buckets"]) / 1e6
        peaks += [alive[at.between(s.start_us, s.end_us)].max() for s in timing.steps(run, rank).itertuples()]
    return sorted(peaks)


# %%
# %%local
from statistics import median

peaks = {name: step_peaks(runs[name]) for name in ("zero1", "zero1-bucket", "zero1-overlap")}
yours = step_peaks(run)
for name, values in (peaks | {"yours": yours}).items():
    print(f"{name:14} median {median(values):.2f} MB, from {values[0]:.2f} to {values[-1]:.2f}")
assert median(peaks["zero1-overlap"]) < median(peaks["zero1-bucket"]), "gradients should be freed as they are used"
assert 1e6 * median(yours) < run.record["predicted"][0]["grads"], "your run, too, never holds all of them"

# %% [markdown]
# The first three lines are recorded runs. The first step has more, for its plan is not yet the order in which gradients come; a later one has a bucket more now and
# then, when one of gloo's threads lets go of it a moment late. The sum of all states, rank by
# rank, and the gradients that were alive outside buckets:

# %%
# %%local
states = {name: [m["peak_states"] / 1e6 for m in runs[name].record["memory"]] for name in peaks}
for name, values in states.items():
    print(f"{name:14} states at their peak, MB:", *(f"{value:.2f}" for value in values))
assert sum(states["zero1-overlap"]) < sum(states["zero1-bucket"]), "so the peak of the states should fall"
for held, predicted in zip(run.record["memory"], run.record["predicted"], strict=True):
    assert held["grads"] < predicted["grads"], "never all gradients at once"

# %% [markdown]
# That is the gain. The price is in there too: while bucket $k$ is packed it exists twice, and bucket $k-1$ is still on
# its way. So about three buckets' worth, however many there are:

# %%
# %%local
from zero1_helpers.ddp import plan_buckets
from zero1_helpers.training.workload import meta_smol_model


def most_alive(sizes):
    return max(2 * sizes[k] + sum(sizes[max(k - 1, 0):k]) for k in range(len(sizes)))


plans = pull("[[sum(p.nbytes for p in b.params) for b in plan] for plan in (first_plan, ddp_model.buckets)]")[0]
ours = max(plans, key=most_alive)
smol = [sum(p.nbytes for p in b.params) for b in plan_buckets(list(meta_smol_model().parameters()), 25 * 2**20)]

# %%
# %%local
for title, sizes in (("this model", ours), ("SmolLM2-360M at 25 MiB", smol)):
    most, whole = most_alive(sizes), sum(sizes)
    print(f"{title}, {len(sizes)} buckets: {most / 1e6:.2f} of {whole / 1e6:.2f} MB of gradients, {most / whole:.0%}")
measured = median(yours)
print(f"measured here, median: {measured:.2f} MB")
assert abs(1e6 * measured / most_alive(ours) - 1) < 0.2, "not what the schedule predicts"

# %% [markdown]
# With few buckets, three of them are nearly everything; with many, the gain is large, down to what the bucket with
# the embedding needs. The post reports a little *more* memory for its overlapped class than for plain ZeRO-1. In its
# code a bucket exists twice, as gradients and as flat tensor, from its launch until its callback has run.
#
# ## Picture: time

# %%
# %%local
show(figures.temporal_breakdown(run))
show(figures.overlap(run))

# %%
# %%local
show(figures.kernel_breakdown(run))

# %% [markdown]
# On its four GPUs the post reports 87 % overlap and 7 % non-compute time for this variant. What is left? The last bucket:
# when it is launched backward is over, and its all-reduce, step and broadcast have nothing to hide behind. On a CPU there
# is also what ranks that share cores wait for each other. So beside yours, the recorded runs, with more tokens a step:

# %%
# %%local
from zero1_helpers.report.frames import comm_comp_overlap, temporal_breakdown

for title, shown in ({"yours": run} | runs).items():
    exposed = temporal_breakdown(shown)["non_compute_pct"].mean()
    hidden = comm_comp_overlap(shown)["overlap_pct"].mean()
    print(f"{title:14} non-compute {exposed:4.1f} %, overlap {hidden:4.1f} %")
assert hidden >= 87 and exposed <= 7  # the overlapped class, as recorded

# %% [markdown]
# ## The table, complete

# %%
# %%local
from zero1_helpers.report.notebook import show_table
from zero1_helpers.report.tables import results_table

columns = ["opt_state", "states", "peak", "collectives", "sent", "non_compute_pct", "overlap_pct", "step_s"]
show_table(results_table(runs.values())[columns], runs["zero1-overlap"].setting)

# %% [markdown]
# Look at *states* and *all*: with a small model the activations set the peak of all memory, before the first bucket is
# full. What overlap saves then shows in the states alone.
#
# ## When stepping in backward is wrong
#
# Backward may still need the old *value* of a parameter whose own gradient is complete. An ordinary layer uses its
# weight first. But this model reads the last layer's bias in the first layer, outside the graph:

# %%
class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):  # (batch, 4)
        hidden = self.first(x) * self.last.bias.detach()
        return self.last(self.second(hidden))


# %% [markdown]
# The gradient of `first` is multiplied by that bias; by then the bias has been stepped. One parameter a bucket and lag 0,
# so that all ranks get there at the same point:

# %%
def one_step(**options):
    set_seed()
    toy = Reader().to(device)
    optimizer = ShardedOptimizer(torch.optim.SGD, toy, lr=0.1)
    wrapped = SimpleDDPBucketAsync(toy, optimizer, bucket_cap_mb=0, **options)
    try:
        wrapped(torch.ones(8, 4, device=device) + rank).square().mean().backward()
    except RuntimeError:
        wrapped.abandon_step()  # on every rank: whatever is under way has to arrive
        raise
    after_backward(wrapped, optimizer)
    return toy


# %%
message = ""
try:
    one_step(lag=0)
except RuntimeError as error:
    message = str(error).split(":")[0]
print("autograd:", message)
assert "modified by an inplace operation" in message

# %% [markdown]
# Autograd counts the changes of every tensor that it has saved, so this raises instead of giving a wrong gradient. For
# such a model, `step_in_backward=False` puts every step after backward. The result is that of one plain step:

# %%
toy = one_step(step_in_backward=False)
set_seed()
plain = Reader().to(device)
reference = SimpleDDP(plain)
reference(torch.ones(8, 4, device=device) + rank).square().mean().backward()
reference.sync_gradients()
torch.optim.SGD(plain.parameters(), lr=0.1).step()
assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(toy.parameters(), plain.parameters(), strict=True))
print("equal to SimpleDDP and a plain SGD step")

# %% [markdown]
# ## Summary
#
# - A parameter needs only its own gradient: one optimizer, shown a bucket's parameters, can step them during backward.
# - Collectives pair by order, so all ranks must issue them in one order. Callbacks cannot promise that; a schedule can.
# - Finish bucket $k - \text{lag}$ when bucket $k$ is launched; on CUDA on a side stream that joins at the end.
# - Gradients are dropped as they are used. Alive at once: about three buckets, whatever the size of the model.
# - What travels together lies together, so broadcasts are in place.
# - If backward still reads a value that was stepped, autograd raises; `step_in_backward=False` is the way out.
#
# ## Exercises
#
# 1. Run the training with `lag=0`, `2` and a lag larger than the number of buckets. Say first how the schedule
#    changes, and what `most_alive` becomes.
#
#    <details><summary>Hint</summary>
#    <code>list(order(num_buckets, lag))</code>. A bucket more on its way for each lag; with a lag beyond the last
#    bucket all steps come after backward, as with <code>step_in_backward=False</code>.
#    </details>
#
# 2. Halve `bucket_cap_mb`. What happens to the number of collectives, to `most_alive`, and to the broadcasts in a bucket?
#
#    <details><summary>Hint</summary>
#    Smaller buckets have fewer owners each: count the pairs as in <code>groups</code>. Which tensor keeps
#    <code>most_alive</code> from falling by half?
#    </details>
#
# 3. A scheduler changes the lr after each step. How many places must it write to with one optimizer per parameter,
#    and how many here? Try `torch.optim.lr_scheduler.LambdaLR` on a `ShardedOptimizer`.
#
#    <details><summary>Solution</summary>
#    One per optimizer, so as many as this rank owns parameters; here one, <code>optimizer.param_groups[0]["lr"]</code>,
#    because the groups are the wrapped optimizer's own. <code>ShardedOptimizer</code> is a torch optimizer, so the
#    scheduler takes it.
#    </details>
#
# Next: [08 Results](08_results.ipynb)
