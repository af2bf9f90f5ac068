"""Record one variant as a run, on a link that all variants share."""

import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from zero1_helpers.measure.emulate import current, emulate, transport
from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.link import Link, parse_link
from zero1_helpers.measure.profiler import gather, get_profiler, touch_free_memory
from zero1_helpers.measure.runs import load_record, load_run
from zero1_helpers.measure.terminal import say
from zero1_helpers.memory_math import bytes_sent, nbytes
from zero1_helpers.training.loop import endless, train, warm_up
from zero1_helpers.training.presets import COMMON_SEED, Preset, get_preset, set_seed
from zero1_helpers.training.variants import adam, get_variant
from zero1_helpers.training.workload import (
    describe_data,
    get_dataloader,
    get_dataset,
    get_smol_model,
    meta_smol_model,
    shard_dataset,
)


def describe(variant: str, dataset, batch_size: int | None = None) -> dict:
    """What a profiler cannot know about a run, for get_profiler: variant, title, preset, data, seed."""
    return {
        "variant": variant,
        "title": get_variant(variant, dataset.info.config_name).title,
        "preset": dataset.info.config_name,
        "seed": COMMON_SEED,
        "data": describe_data(dataset, batch_size),
    }


def record_missing(
    variants: Iterable[str], folder, preset: str | None = None, steps: int = 4, **kwargs
) -> None:
    """Record into `folder` those variants that it does not hold yet in this setting.

    So a table can compare variants on one machine, without training again what an earlier notebook
    has already recorded. Called on every rank; rank 0 looks, and the others take its word.
    """
    setting = {
        "world_size": dist.get_world_size(),
        "backend": transport(),
        "link": str(current() or "none"),
        "preset": get_preset(preset).name,
        "steps": steps,
    }
    for name in variants:
        out = Path(folder) / name
        known = [None]
        if dist.get_rank() == 0:
            with contextlib.suppress(RunError):  # missing or damaged: it is recorded anew
                found = load_record(out)
                known = [{key: found[key] for key in setting}]
        dist.broadcast_object_list(known, src=0)
        if known[0] != setting:
            record(name, preset, steps, out, **kwargs)


def record(
    variant: str,
    preset: str | None = None,
    steps: int = 4,
    out="runs",
    *,
    batch_size: int | None = None,
    lr: float = 1e-3,
    device: torch.device | str | None = None,
    keep_raw: bool = False,
) -> list[float]:
    """Train one variant for some steps under the profiler, from the seed that all variants share.

    Called on every rank; writes the run into the folder `out` and returns this rank's losses.
    """
    variant, preset = get_variant(variant, preset), get_preset(preset)
    device = device or ("cuda" if dist.get_backend() == "nccl" else "cpu")
    batch_size = batch_size or preset.batch_size
    set_seed()
    shard = shard_dataset(get_dataset(preset)["train"], dist.get_rank(), dist.get_world_size())
    model = get_smol_model(preset).to(device)
    warm_up(model, endless(get_dataloader(shard, batch_size)))
    model, optimizer = variant.build(model, lr, preset.bucket_cap_mb)
    batches = islice(endless(get_dataloader(shard, batch_size)), steps)
    about = describe(variant.name, shard, batch_size)
    with get_profiler(
        out, steps, model=model, optimizer=optimizer, keep_raw=keep_raw, **about
    ) as profiler:
        return train(model, optimizer, batches, variant.after_backward, profiler)


def record_on_link(
    variant: str, preset: str, steps: int, out, link: str, batch_size: int | None, keep_raw: bool
) -> None:
    """`record` over an emulated link. Called on every rank; rank 0 says what it has written."""
    use_link(link, preset, batch_size)
    record(variant, preset, steps, out, batch_size=batch_size, keep_raw=keep_raw)
    if dist.get_rank() == 0:
        say(f"{out}: {load_run(out).caption}")


def use_link(
    link: str = "auto", preset: str | None = None, batch_size: int | None = None, folder=None
) -> Link | None:
    """`emulate`, where "auto" stands for the link that `auto_link` measures. Called on every rank.

    With `folder`, "auto" is the link of the runs that it holds of this preset on as many ranks, if there
    are any: runs are compared on one link. Rank 0 says which it is. Over NCCL the link is a real one, and
    nothing is done.
    """
    if dist.get_backend() == "nccl":
        return None
    chosen = [None]
    if link == "auto" and folder is not None and dist.get_rank() == 0:
        chosen = [_link_of_runs(Path(folder), get_preset(preset).name)]
    dist.broadcast_object_list(chosen, src=0)
    if chosen[0]:
        link = emulate(replace(parse_link(chosen[0]), source="that of the runs that are there"))
    else:
        link = emulate(auto_link(preset, batch_size) if link == "auto" else link)
    if link and dist.get_rank() == 0:
        say(f"emulated link {link} ({link.source})")
    return link


def _link_of_runs(folder: Path, preset: str) -> str | None:
    """The link of the latest run in `folder` of this preset on as many ranks, as text."""
    for file in sorted(folder.glob("*/run.json"), key=lambda f: f.stat().st_mtime, reverse=True):
        try:
            run = load_record(file.parent)
        except RunError:
            continue
        if (run["preset"], run["world_size"]) == (preset, dist.get_world_size()) and run[
            "link"
        ] != "none":
            return run["link"]
    return None


def auto_link(
    preset: str | None = None, batch_size: int | None = None, share: float = 0.16, steps: int = 3
) -> Link:
    """A link as slow, for this machine's compute, as the post's was for four GPUs.

    Measures a step without communication, of all ranks at once and under the profiler, as it will be
    recorded. `share` of the baseline's step (the post's 16 %) is communication if all that SimpleDDP sends
    takes share / (1 - share) of that time. A fifth of it is latency. Called on every rank; all get the same.
    """
    preset = get_preset(preset)
    emulate(None)
    params = [p for p in meta_smol_model(preset).parameters() if p.requires_grad]
    compute = compute_seconds(preset, batch_size or preset.batch_size, steps)
    communication, collectives = share / (1 - share) * compute, len(params) + 1
    sent = bytes_sent("all_reduce", nbytes(params), dist.get_world_size())
    link = Link(max(sent, 1) / (0.8 * communication), latency=0.2 * communication / collectives)
    return replace(
        parse_link(str(link)),  # rounded, as it is written into a run
        source=f"auto: the baseline communicates for {share:.0%} of a step of {compute:.3g} s compute",
    )


def compute_seconds(preset: Preset, batch_size: int, steps: int) -> float:
    """The median step without communication, on the slowest rank."""
    set_seed()
    shard = shard_dataset(get_dataset(preset)["train"], dist.get_rank(), dist.get_world_size())
    model = get_smol_model(preset)
    seconds, began = [], []

    def step_alone(model, optimizer):
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began.pop())

    def timed(batches):
        for batch in batches:
            dist.barrier()  # all ranks compute at the same time, as they will later
            began.append(time.perf_counter())
            yield batch

    batches = islice(endless(get_dataloader(shard, batch_size)), steps + 1)
    touch_free_memory(20 * nbytes(model.parameters()))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ):
        train(model, adam(model, 1e-3), timed(batches), step_alone)
    return max(gather(sorted(seconds[1:])[steps // 2]))  # the first one makes the state
