# %% [markdown]
# # 05 Asynchronous gradients
#
# **Goal.** Start the all-reduce of each gradient as soon as backward has made it, so that communication runs behind the rest of backward.
#
# **Time.** About 20 minutes to read, about 65 seconds to run on 2 cores.
#
# So far a rank finishes backward, then communicates:
#
# ```
# all params:  [───────── backward ─────────]─[all-reduce]─[step]─[broadcast]
# ```
#
# But the gradient of the last layer is complete long before that of the first, and its all-reduce needs no other gradient. So one row for each parameter, and every all-reduce at its earliest:
#
# ```
# param 0:  [backward]─[all-reduce]─────────────────────────[step]─[broadcast]
# param 1:            [backward]─[all-reduce]───────────────[step]─[broadcast]
# param 2:                      [backward]─[all-reduce]─────[step]─[broadcast]
# ```

# %%
# %load_ext zero1_helpers
# %dist_init --num-processes 4

# %% [markdown]
# On a CPU the ranks share the emulated link of notebook 03. Communication can hide behind computing only while the CPU has nothing to do for it: the link makes the ranks *wait*, as a network would.

# %%
from zero1_helpers import use_link
from zero1_helpers.training.project import project

BATCH, LR = 4, 1e-4  # examples in a rank's batch; learning rate
link = use_link(batch_size=BATCH, folder=project("build/runs"))

# %% [markdown]
# ## Predict
#
# 1. Which part of the communication can hide behind backward: the all-reduces, the broadcasts, or both?
# 2. Will there be fewer collectives, or fewer bytes?
# 3. What does it cost in memory?
#
# ## The workload, and what is right
#
# The same model and data as before.

# %%
from zero1_helpers import get_dataloader, get_dataset, get_smol_model, set_seed, shard_dataset

shard = shard_dataset(get_dataset()["train"], rank, world_size)

def new_model():
    set_seed()
    return get_smol_model().to(device)

# %% [markdown]
# To know what is right, one batch with the synchronous class: these are the gradients to reproduce.

# %%
from zero1_helpers import SimpleDDP

batch = next(iter(get_dataloader(shard, BATCH)))
batch = {name: tensor.to(device) for name, tensor in batch.items()}  # (batch, length) each
sync = SimpleDDP(new_model())
sync(**batch).loss.backward()
sync.sync_gradients()
right = [p.grad.clone() for p in sync.module.parameters()]
tolerance = 1e-4 if right[0].dtype == torch.float32 else 0.1

# %%
def assert_right(model):
    """Every gradient is that of the synchronous class, up to rounding."""
    errors = [(p.grad - g).norm() / g.norm() for p, g in zip(model.parameters(), right, strict=True)]
    print("all gradients as from the synchronous class" if max(errors) < tolerance else max(errors))
    assert max(errors) < tolerance

# %% [markdown]
# ## By hand: a hook on every parameter
#
# PyTorch calls a *post-accumulate-grad hook* when `p.grad` is complete. There we start the all-reduce, and with `async_op=True` do not wait for it. What comes back is a handle, to wait on later.

# %%
model, pending = new_model(), []

def start_all_reduce(p):
    pending.append((p, dist.all_reduce(p.grad, async_op=True)))  # the sum over the ranks, later

hooks = [p.register_post_accumulate_grad_hook(start_all_reduce) for p in model.parameters()]

# %%
model(**batch).loss.backward()
done = sum(work.is_completed() for _, work in pending)
print(f"backward is over: {len(pending)} all-reduces started, {done} of them already done")
assert len(pending) == len(right)

# %% [markdown]
# Look at the second number: those were hidden. It differs from rank to rank and from run to run; a rank whose backward ends last finds more of them done. What is left has to be waited for, and the sums divided:

# %%
def finish():
    for p, work in pending:
        work.wait()
        p.grad /= world_size
    pending.clear()

finish()
assert_right(model)

# %% [markdown]
# In which order did they start? About the reverse of the forward pass:

# %%
names, arrived = {p: name for name, p in model.named_parameters()}, []
hooks += [p.register_post_accumulate_grad_hook(lambda p: arrived.append(names[p])) for p in names]
model.zero_grad()
model(**batch).loss.backward()
finish()
print("first:", ", ".join(arrived[:2]), "| last:", ", ".join(arrived[-2:]))

# %% [markdown]
# ## What is wrong with it
#
# It gave the right gradients, once. Four ways in which it breaks, the last of which we do not run.
#
# **A cell that runs twice.** In a notebook one does that all the time. Then each parameter has two hooks, and each gradient is reduced twice, perhaps both at once on the same memory:

# %%
again = [p.register_post_accumulate_grad_hook(start_all_reduce) for p in model.parameters()]
model.zero_grad()
model(**batch).loss.backward()
print(f"{len(pending)} all-reduces for {len(right)} gradients")
assert len(pending) == 2 * len(right)
finish()
for hook in hooks + again:
    hook.remove()

# %% [markdown]
# No error, only wrong numbers. (The hooks are removed now.)
#
# **A second backward**, as when a batch is accumulated from micro-batches. The first gradient is reduced, the second is added to it, and the sum is reduced *again*. With one weight whose gradient is 1 on every rank, in each of two micro-batches:

# %%
weight = torch.nn.Parameter(torch.zeros(1, device=device))
weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
for _ in range(2):
    weight.sum().backward()
naive = weight.grad.item() / world_size
print(f"mean gradient of two micro-batches: naive {naive:.0f}, right 2")
assert naive == world_size + 1

# %% [markdown]
# Again no error. What was reduced first has been counted `world_size` times.
#
# **Another order, or none at all.** Collectives have no names: the third that one rank starts is matched with the third of every other rank. So all ranks must start the same ones in the same order. Below, rank 0 does not use the bias. The hooks only take notes; nothing is communicated.

# %%
pair, notes = torch.nn.Linear(1, 1, device=device), []
for name, p in pair.named_parameters():
    p.register_post_accumulate_grad_hook(lambda p, name=name: notes.append(name))
used = [pair.weight] if rank == 0 else [pair.weight, pair.bias]
sum(p.sum() for p in used).backward()
print("would all-reduce:", ", ".join(sorted(notes)))
assert len(notes) == (1 if rank == 0 else 2)

# %% [markdown]
# Rank 0 would start one all-reduce and the others two. The second never finds its partner: the others wait until the process group gives up, which takes half an hour by default. That is why we do not try it. And the first? Rank 0's weight is added to whatever the others start with, weight or bias. Both have one element here, so nobody would notice.
#
# ## The finished class
#
# `SimpleDDPAsync` has the same hook and the same wait, and a rule for each of these cases. What it launches is a `Bucket`; until the next notebook, that is a bucket of one.

# %%
# %%local
from zero1_helpers import SimpleDDPAsync
from zero1_helpers.report.notebook import show_source

show_source(SimpleDDPAsync)

# %%
# %%local
from zero1_helpers.ddp import Bucket

show_source(Bucket)

# %% [markdown]
# - **A fixed order.** Buckets have a plan: in the first step the last parameter first, from then on the order in which rank 0's gradients came in that step, which it sends to all. A gradient that comes early waits for its turn (`_on_gradient`), so ranks agree in whatever order gradients arrive.
# - **Everyone takes part.** `wait_for_gradients` launches what never came, with zeros. Each bucket ends with a flag for each parameter, which says whether its gradient is real; summed, it says on how many ranks. If on none, `p.grad` stays `None`.
# - **Gradients move.** `pack` puts them into `flat` and sets `p.grad = None`, so nothing can be added to a gradient that is on its way. It divides them by `world_size` as it does: the sum is then the mean, and in half precision no larger than a gradient. `unpack` hands it back.
# - **Errors instead of wrong numbers.** A second gradient, or a new forward, before `wait_for_gradients()` raises.
# - **Hooks can be removed**: by `.remove()`, and by wrapping the model again.
#
# First: is it right, and is the order what it claims? The last parameter is not the last that is used: in each layer, the first norm is registered after the matrices. So the plan of the first step is not yet the order of backward.

# %%
from zero1_helpers import SimpleDDPAsync

ddp = SimpleDDPAsync(new_model())
names_of = {p: name for name, p in ddp.module.named_parameters()}
assert [b.params for b in ddp.buckets] == [[p] for p in reversed(list(ddp.module.parameters()))]
ddp(**batch).loss.backward()
ddp.wait_for_gradients()
assert_right(ddp.module)
planned = [names_of[b.params[0]] for b in ddp.buckets]
print("planned now, first:", ", ".join(planned[:2]), "| last:", ", ".join(planned[-2:]))
assert rank > 0 or planned == arrived[: len(planned)], "not the order seen above"

# %% [markdown]
# Running the cell twice is harmless. We count calls of `dist.all_reduce` from outside:

# %%
from unittest import mock

ddp = SimpleDDPAsync(SimpleDDPAsync(ddp.module).module)
ddp.zero_grad()
with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
    ddp(**batch).loss.backward()
    ddp.wait_for_gradients()
print(f"wrapped again and again: {all_reduce.call_count} all-reduces for {len(right)} gradients")
assert all_reduce.call_count == len(right)
assert_right(ddp.module)

# %% [markdown]
# Forgetting to wait raises, on every rank:

# %%
ddp.zero_grad()
ddp(**batch).loss.backward()
message = ""
try:
    ddp(**batch)
except RuntimeError as error:
    message = str(error)
ddp.wait_for_gradients()
print(message)
assert "wait_for_gradients" in message

# %% [markdown]
# And the unused bias, the case that hangs in the naive version:

# %%
set_seed()
pair = SimpleDDPAsync(torch.nn.Linear(1, 1).to(device))
used = [pair.module.weight] if rank == 0 else [pair.module.weight, pair.module.bias]
sum(p.sum() for p in used).backward()
pair.wait_for_gradients()
grad = pair.module.bias.grad
mean = 0.0 if grad is None else grad.item()  # None on a single rank: nobody has used it
print(f"gradient of the bias: {mean:.3f}, the mean of 0 on rank 0 and 1 on the others")
assert abs(mean - (world_size - 1) / world_size) < 1e-6

# %% [markdown]
# ## Micro-batches: `no_sync`
#
# A batch may be too large for one pass. Under `no_sync()` gradients only accumulate; the last micro-batch, outside, reduces their sum. Here the batch is cut in two, and each half's loss counts one half.

# %%
halves = [{name: t[i::2] for name, t in batch.items()} for i in range(2)]  # (batch / 2, length)
ddp.zero_grad()
with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
    with ddp.no_sync():
        (ddp(**halves[0]).loss / 2).backward()
    assert all_reduce.call_count == 0
    (ddp(**halves[1]).loss / 2).backward()
    ddp.wait_for_gradients()
print(f"2 micro-batches: {all_reduce.call_count} all-reduces for {len(right)} gradients")
assert all_reduce.call_count == len(right)
assert_right(ddp.module)

# %% [markdown]
# One reduction, not two, and the gradients are those of the whole batch.
#
# ## Run it
#
# With the optimizer of notebook 04. What comes after backward changes in its first line: instead of reducing, it waits.

# %%
def after_backward(model, optimizer):
    model.wait_for_gradients()
    optimizer.step()
    optimizer.zero_grad()

# %%
from zero1_helpers import ZeROOne, get_profiler, train
from zero1_helpers.training.record import describe

model, STEPS = SimpleDDPAsync(new_model()), 3
optimizer = ZeROOne(torch.optim.Adam(model.parameters(), lr=LR))
with get_profiler(project("build/runs/zero1-async"), STEPS, model=model, optimizer=optimizer,
                  **describe("zero1-async", shard, BATCH)) as prof:
    train(model, optimizer, [batch] * STEPS, after_backward, prof)

# %% [markdown]
# And the baseline, without a profiler, for its losses:

# %%
def sync_step(model, optimizer):
    model.sync_gradients()
    optimizer.step()
    optimizer.zero_grad()

sync = SimpleDDP(new_model())
baseline = train(sync, torch.optim.Adam(sync.parameters(), lr=LR), [batch] * STEPS, sync_step)

# %%
# %%local
from zero1_helpers.measure.runs import load_run
from zero1_helpers.training.project import project

run = load_run(project("build/runs/zero1-async"))
tolerance = 1e-4 if run.record["model"]["dtype"] == "float32" else 0.05
baseline = [sum(at_step) / run.world_size for at_step in zip(*pull("baseline"), strict=True)]
for a, b in zip(baseline, run.record["losses"], strict=True):
    print(f"loss: DDP {a:.6f}, asynchronous {b:.6f}")
    assert abs(a - b) < tolerance
assert run.record["losses"][-1] < run.record["losses"][0]

# %% [markdown]
# The same training, again. And the same traffic as in the recorded run of notebook 04's class:

# %%
# %%local
ddp, zero1, zero1_async = [load_run(project(f"traces/small/{v}")) for v in ("ddp", "zero1", "zero1-async")]
for title, r in {"zero1": zero1, "zero1-async": zero1_async, "yours": run}.items():
    ops = {c["op"]: c for c in r.record["collectives"]}
    print(f"{title:>11}: " + ", ".join(f"{c['calls']} x {op}, {c['bytes']:,} B" for op, c in ops.items()))
    grads, flags = r.record["predicted"][0]["grads"], r.record["model"]["tensors"]
    assert ops["all_reduce"]["bytes"] == grads + flags * (grads // r.record["model"]["parameters"] if r is not zero1 else 4)
assert ops["all_reduce"]["calls"] == ops["broadcast"]["calls"] == run.record["model"]["tensors"]

# %% [markdown]
# (The synchronous class has one all-reduce more, for all flags at once; here each flag travels with its gradient.)
#
# ## The schedule, measured
#
# The two diagrams from above, drawn from traces. First ZeRO-1 as in notebook 04, recorded, with all parameters in one row:

# %%
# %%local
from zero1_helpers.report.figures import schedule_diagram
from zero1_helpers.report.style import show

show(schedule_diagram(zero1))

# %% [markdown]
# Now your run, with a row for each bucket of one, in the order of launch. A bucket's "backward" is the time since the launch before: then its gradient was made. The step and the broadcasts belong to all parameters together, so they stand in every row.

# %%
# %%local
show(schedule_diagram(run))

# %% [markdown]
# Reality is less tidy than the diagram:
#
# - A collective needs all ranks. A bar that starts early and is long is mostly waiting: for the rank that is latest in its backward.
# - Started is not begun. A rank has one link, and its collectives queue on it (over gloo alone, they queue for its two threads).
# - Where hardly any "backward" is to be seen, the gradient came right after another.
#
# What overlaps, then? Ask the trace: which collectives began while backward was still running?

# %%
# %%local
from zero1_helpers.report.timing import schedule

rows = schedule(run)
end = rows.loc[rows["kind"] == "backward", "end_ms"].max()
early = {kind: (rows.loc[rows["kind"] == kind, "start_ms"] < end).sum() for kind in ("all-reduce", "broadcast")}
print(f"began before the end of backward: {early['all-reduce']} all-reduces, {early['broadcast']} broadcasts")
assert early["all-reduce"] > 0 and early["broadcast"] == 0

# %% [markdown]
# The all-reduces hide. The broadcasts cannot: `optimizer.step()` comes after backward, and there is nothing to broadcast before it. They are as exposed as in notebook 04.
#
# ## Time
#
# How much is hidden, of the recorded runs' communication:

# %%
# %%local
from zero1_helpers.report.figures import kernel_breakdown, overlap, temporal_breakdown

show(overlap(zero1))
show(overlap(zero1_async))

# %%
# %%local
from zero1_helpers.report.frames import comm_comp_overlap

before, after, yours = [comm_comp_overlap(r)["overlap_pct"].mean() for r in (zero1, zero1_async, run)]
print(f"overlap: {before:.1f} % synchronous, {after:.1f} % asynchronous; yours {yours:.1f} %")
assert min(after, yours) > before

# %%
# %%local
show(temporal_breakdown(zero1_async))
show(kernel_breakdown(zero1_async))

# %% [markdown]
# (The kernel chart adds up collectives that run side by side, and each counts its wait for the other ranks. So all-reduces may come to more than a whole step.)
#
# In the post this step takes non-compute time from 22 % to 13 %, and overlap from 0 % to 77 %.
#
# Hidden is not free. gloo moves bytes and adds numbers on threads of its own, and these run on the same cores as backward. (NCCL also takes a part of the GPU for its kernels, but a small one.) So look at what backward itself takes now:

# %%
# %%local
from zero1_helpers.report.timing import annotations

for r in (zero1, zero1_async):
    marks = [m[m["name"] == "backward"] for m in (annotations(r, number) for number in range(r.world_size))]
    times = [(m["end_us"] - m["start_us"]).median() / 1e3 for m in marks]
    print(f"{r.variant:>11}: backward takes {sum(times) / len(times):.0f} ms")

# %% [markdown]
# If the second is longer, backward has paid for the moving of bytes inside it: the time on the link is emulated, gloo's work is not. Each of these collectives is also small, and has a cost of its own however small it is; the next notebook is about that.
#
# ## Memory

# %%
# %%local
from zero1_helpers.report.figures import memory_timeline

show(memory_timeline(zero1_async))

# %% [markdown]
# `opt_state` is that of notebook 04. The gradients have changed their name: while they are on their way they live in `buckets` only, and afterwards `p.grad` is a view into one. What still counts as `grads` came before its turn, or is just being packed.

# %%
# %%local
def most(run, key):
    return max(m[key] for m in run.record["memory"])

for key in ("grads", "buckets", "opt_state", "peak_states", "peak"):
    print(f"{key:>11}: {most(zero1, key):>14,} B synchronous, {most(zero1_async, key):>14,} B asynchronous")
assert most(zero1_async, "opt_state") == most(zero1, "opt_state")
assert most(zero1_async, "grads") < most(zero1, "grads")

# %% [markdown]
# `peak_states`, the highest sum of params, grads, `opt_state` and buckets, is a little higher. `pack` copies, so for a moment a gradient and its bucket are both alive. The largest of them is packed last, when all others are there:

# %%
# %%local
from zero1_helpers.training.workload import meta_smol_model

more = most(zero1_async, "peak_states") - most(zero1, "peak_states")
embedding = max(p.nbytes for p in meta_smol_model("small").parameters())  # the recorded model's
print(f"{more:,} B more; the largest gradient has {embedding:,} B")
assert 0 < more < 1.05 * embedding

# %% [markdown]
# ## The table so far

# %%
# %%local
from zero1_helpers.report.notebook import show_table
from zero1_helpers.report.tables import results_table

columns = ["opt_state", "states", "peak", "collectives", "sent", "non_compute_pct", "overlap_pct", "step_s"]
table = results_table([ddp, zero1, zero1_async])[columns]
show_table(table, f"MB (1e6 bytes) of the fullest rank; the rest per step. {zero1_async.setting}.")

# %% [markdown]
# ## Summary
#
# - A hook and `async_op=True` start each all-reduce inside backward; `wait_for_gradients()` makes sure of the rest.
# - Same bytes, same gradients. Only *when* they travel has changed.
# - All ranks must start the same collectives in the same order. A planned order, zeros with a flag for what is missing, and errors instead of guesses make that so.
# - The all-reduces overlap with backward; step and broadcasts still come after it.
#
# ## Exercises
#
# 1. Turn the plan round: after wrapping, `model._use(model._plan(list(model.module.parameters())[::-1]))`, and `model._arrived = None` so that it stays. Predict the overlap, then run it under the profiler into `project("build/runs/reversed")`.
#    <details><summary>Solution</summary>
#
#    The first bucket is now the embedding, whose gradient comes last. All others wait for their turn, so everything is launched at the end of backward, and almost nothing overlaps. The gradients are still right: the order is a matter of speed, as long as all ranks have the same.
#    </details>
# 2. Freeze the embedding (`requires_grad_(False)`) before wrapping. How many all-reduces are there, and how many broadcasts?
#    <details><summary>Hint</summary>
#
#    Count calls with `mock.patch.object(dist, "broadcast", wraps=dist.broadcast)`, as above.
#    </details>
# 3. Cut the batch into four micro-batches under `no_sync`, and check the gradients with `assert_right`.
#    <details><summary>Hint</summary>
#
#    `t[i::4]`, each loss divided by four, and only the last backward outside `no_sync()`.
#    </details>
# 4. Could `dist.broadcast` be asynchronous too, with one wait at the end of `step()`? What would it hide behind?
#    <details><summary>Solution</summary>
#
#    The broadcasts would run behind each other, but not behind compute: after the step a rank has nothing left to compute before the next forward, and that needs the parameters. To hide them, the step itself has to move into backward: notebook 07.
#    </details>
#
# Next: [06 Gradient buckets](06_gradient_buckets.ipynb), because one collective for each parameter is too many.
