"""Every variant against torch's own, on the same work, over emulated links: benchmarks/RESULTS.md.

    make bench                                      all models and links, and how cost grows
    python benchmarks/race.py --models mlp --links 100MB/s --rounds 3 --out build/bench

One race is one group of ranks that holds every contender at once. In each round all of them run a block of
steps, and the next round begins with another one: what the machine does meanwhile hits all alike. The
time of a block is that of the slowest rank. Ratios are taken within a round; a table gives their median
and their spread. (pytest-benchmark and torch.utils.benchmark time one process, one contender after the
other.)
"""

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import pandas as pd
import torch
import torch.distributed as dist
from contenders import CONTENDERS
from torch import nn

from zero1_helpers import FlatShardedOptimizer, get_profiler, get_smol_model
from zero1_helpers.measure.emulate import bind_to_cores, emulate
from zero1_helpers.measure.link import Link, parse_link
from zero1_helpers.measure.meet import run_ranks
from zero1_helpers.measure.passage import lane, late_share
from zero1_helpers.measure.profiler import gather
from zero1_helpers.measure.runs import load_run
from zero1_helpers.memory_math import bytes_sent, state_bytes
from zero1_helpers.phases import phase
from zero1_helpers.report.style import THEMES
from zero1_helpers.training.presets import PRESETS

LINKS = ("none", "50MB/s", "100MB/s", "400MB/s")
CAP_MB, LR = 2, 1e-4
UNLIMITED = Link(1e15)  # counts what is sent, and holds nothing up


def mlp(depth: int = 16):
    """A deep MLP, `depth` x 512 x 512, and its loss on this rank's batch."""
    torch.manual_seed(0)
    layers = (layer for _ in range(depth) for layer in (nn.Linear(512, 512), nn.ReLU()))
    model = nn.Sequential(*layers)
    batch = torch.randn(256, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model, list(model)[::2], lambda model: model(batch).square().mean()


def llama(depth: int = 6):
    """A small Llama, and its loss on this rank's batch."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": depth}
    model = get_smol_model(replace(PRESETS["tiny"], config=PRESETS["tiny"].config | shape))
    ids = torch.randint(3, 1000, (4, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
    labels = torch.zeros(4, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return model, list(model.model.layers), lambda model: model(**batch).loss


MODELS = {"mlp": mlp, "llama": llama}


class Racer:
    """One contender with a model of its own, on this rank."""

    def __init__(self, name: str, model: str, depth: int | None):
        self.contender = CONTENDERS[name]
        self.plain, blocks, self.loss = MODELS[model](*[depth] if depth else [])
        self.model, self.optimizer = self.contender.build(
            self.plain, blocks, torch.optim.Adam, CAP_MB, lr=LR
        )
        for group in self.optimizer.param_groups:
            group["fused"] = True  # the same kernel for all

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.loss(self.model)
            with phase("backward"):  # at its edges the ledger looks at what is there
                loss.backward()
            del loss
            self.contender.after_backward(self.model, self.optimizer)

    def time(self, steps: int) -> tuple[float, float]:
        """Seconds a step on the slowest rank, and the share of collectives that were late on all.

        The first step is not timed: caches hold another contender's data, and what a step leaves on its
        way for the next one to wait for (a lazy gather) is not there yet.
        """
        dist.barrier()
        self.train(1)
        lane.log = log = []
        began = time.perf_counter()
        self.train(steps)
        seconds = (time.perf_counter() - began) / steps
        lane.log = None
        if isinstance(self.optimizer, FlatShardedOptimizer):
            self.optimizer.receive()
        return max(gather(seconds)), late_share(gather([p.late for p in log]))

    def count(self) -> dict:
        """What one step sends on the fullest rank, and the optimizer state that it holds."""
        lane.log = log = []
        self.train(1)
        lane.log = None
        sent = sum(bytes_sent(p.op, p.size, dist.get_world_size()) for p in log)
        return {
            "sent_mb": max(gather(sent)) / 1e6,
            "collectives": len(log),
            "state_mb": max(gather(state_bytes(self.optimizer)[0])) / 1e6,
        }


CATEGORIES = ("params", "grads", "opt_state", "buckets", "peak")


def peaks_mb(racer: Racer, folder: Path) -> dict:
    """The most that a rank holds in a step, by category and of everything."""
    with get_profiler(folder, 1, model=racer.model, optimizer=racer.optimizer) as profiler:
        racer.train(1)
        profiler.step()
    memory = load_run(folder).record["memory"]
    return {name: max(rank[name] for rank in memory) / 1e6 for name in CATEGORIES}


def race(folder, names, model, links, rounds, steps, depth, details):
    """Body of one rank; rank 0 leaves its tables in `folder`. Link "none", then alone, is gloo itself."""
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if links == ["none"]:
        bind_to_cores()  # as `emulate` does
    else:
        emulate(UNLIMITED)
    racers = {name: Racer(name, model, depth) for name in names}
    for racer in racers.values():
        racer.train(2)  # makes the state; buckets are planned anew
    about = {}
    for name, racer in racers.items() if details else ():
        about[name] = racer.count() | peaks_mb(racer, folder / name)
    times = []
    for link in links:
        if link != "none":
            emulate(link)
        for number in range(rounds):
            for i in range(len(names)):
                name = names[(i + number) % len(names)]
                seconds, late = racers[name].time(steps)
                times.append(
                    {
                        "model": model,
                        "depth": depth,
                        "ranks": world_size,
                        "link": link,
                        "contender": name,
                        "round": number,
                        "seconds": seconds,
                        "late": late,
                    }
                )
        if rank == 0:
            print(f"{model}, {world_size} ranks, link {link}: {rounds} rounds", flush=True)
    if rank == 0:
        pd.DataFrame(times).to_csv(folder / "times.csv", index=False)
        pd.DataFrame(about).T.rename_axis("contender").to_csv(folder / "about.csv")


def run_race(names, model, links, rounds, steps, ranks=4, depth=None, details=False):
    """(times, about) of one race, as frames.

    What is made over gloo itself stays with it, so for `none` and for the links there are ranks of their own.
    """
    emulated, times, about = [link for link in links if link != "none"], [], None
    for part, count in ((["none"], False), (emulated, details)):
        if not set(part) <= set(links) or not (part or count):
            continue
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            run_ranks(race, ranks, folder, names, model, part, rounds, steps, depth, count)
            times += [pd.read_csv(folder / "times.csv")] if part else []
            about = pd.read_csv(folder / "about.csv").set_index("contender") if count else about
    return pd.concat(times, ignore_index=True), about


def ratios(times: pd.DataFrame, to: str) -> pd.DataFrame:
    """Each contender's time over that of `to`, within a round: median, least and most."""
    wide = times.pivot(index="round", columns="contender", values="seconds")
    return wide.div(wide[to], axis=0).agg(["median", "min", "max"]).T


def sending(times: pd.DataFrame, about: pd.DataFrame) -> pd.Series:
    """Seconds that each contender's collectives take on the link of `times`; 0 where there is none."""
    link = parse_link(times["link"].iloc[0]) or UNLIMITED
    return 1e6 * about["sent_mb"] / link.bandwidth + about["collectives"] * link.latency


def of_the_floor(times: pd.DataFrame, about: pd.DataFrame) -> pd.DataFrame:
    """Each contender's time over the longer of compute and its communication, by round."""
    wide = times.pivot(index="round", columns="contender", values="seconds")
    sends = sending(times, about)
    floors = pd.DataFrame({name: wide["compute"].clip(lower=sends[name]) for name in wide})
    return (wide / floors).agg(["median", "min", "max"]).T


def table(times: pd.DataFrame, about: pd.DataFrame) -> pd.DataFrame:
    """One model on one link, one row a contender."""
    median = times.groupby("contender", sort=False)["seconds"].median()
    ratio, zero = ratios(times, "compute"), ratios(times, "torch-zero")
    spread = "{0[median]:.2f} ({0[min]:.2f} to {0[max]:.2f})".format
    return pd.DataFrame(
        {
            "contender": {name: CONTENDERS[name].title for name in about.index},
            "step, ms": (1e3 * median).round().astype(int),
            "of compute": ratio["median"].round(2),
            "of torch-zero (least to most)": zero.apply(spread, axis=1),
            "of the floor": of_the_floor(times, about)["median"].round(2),
            "exposed, ms": (1e3 * (median - median["compute"])).round().astype(int),
            "late, %": (100 * times.groupby("contender")["late"].mean()).round().astype(int),
            "sent, MB": about["sent_mb"].round(1),
            "collectives": about["collectives"].astype(int),
            "state, MB": about["state_mb"].round(1),
            **{f"{name}, MB": about[name].round(1) for name in CATEGORIES},
        }
    ).loc[list(about.index)]


def markdown(frame: pd.DataFrame) -> str:
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(str).values.tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def setting(ranks) -> str:
    return (
        f"{platform.machine()} CPU, {os.cpu_count()} cores · {ranks} ranks, one thread each · gloo · "
        f"torch {torch.__version__.partition('+')[0]} · {datetime.date.today().isoformat()}"
    )


def draw(times: pd.DataFrame, path: Path):
    """Step time of every contender over that of compute alone, by link; one panel a model."""
    from matplotlib.figure import Figure

    models, links = times["model"].unique(), times["link"].unique()
    for theme, look in THEMES.items():
        fig = Figure(figsize=(8, 3.2 * len(models)), layout="constrained", facecolor=look["paper"])
        for ax, model in zip(fig.subplots(len(models), squeeze=False)[:, 0], models, strict=True):
            ax.set_facecolor(look["paper"])
            names = [name for name in times["contender"].unique() if name != "compute"]
            for i, name in enumerate(names):
                of_model = times[times["model"] == model]
                parts = [of_model[of_model["link"] == link] for link in links]
                rows = pd.DataFrame([ratios(part, "compute").loc[name] for part in parts])
                middle = rows["median"]
                spread = [middle - rows["min"], rows["max"] - middle]
                at = [j + (i - len(names) / 2) * 0.8 / len(names) for j in range(len(links))]
                theirs = name.startswith(("torch", "deepspeed"))
                ax.errorbar(
                    at,
                    middle,
                    spread,
                    fmt="s" if theirs else "o",
                    markersize=4,
                    linewidth=1,
                    color=f"C{i % 10}",
                    mfc="none" if theirs else None,
                    label=name,
                )
            ax.set_xticks(range(len(links)), [f"link {link}" for link in links], color=look["ink"])
            ax.tick_params(colors=look["muted"])
            ax.axhline(1, color=look["rule"], linewidth=0.8)
            ax.set_title(
                f"{model}: step time over compute alone (median, least, most)",
                color=look["ink"],
                fontsize=10,
            )
            for spine in ax.spines.values():
                spine.set_color(look["rule"])
            ax.legend(fontsize=7, ncols=2, labelcolor=look["ink"], frameon=False)
        fig.savefig(path.with_suffix(f".{theme}.png"), dpi=110, metadata={"Software": None})


FLOOR = "its floor"
ASKED = [  # of the series' classes: contender, of which other, at most, over which link (None: over any)
    ("zero1-overlap", "torch-zero", 1.0, None),
    ("zero1-overlap", "torch-zero-views", 1.0, None),
    ("flat", "zero1-overlap", 1.0, None),
    ("flat", "torch-zero", 1.0, "none"),
    ("flat", "torch-zero", 0.70, "100MB/s"),
    ("flat", "torch-fsdp2", 0.85, "100MB/s"),
    *((name, FLOOR, 1.2, None) for name in ("zero1-overlap", "flat", "flat-lazy")),
]


def bars(times: pd.DataFrame, about: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """What is asked, and whether this race shows it; of the floor only where that is communication."""
    rows = []
    for (model, link), part in times.groupby(["model", "link"], sort=False):
        floor, sends = of_the_floor(part, about[model]), sending(part, about[model])
        compute = part.loc[part["contender"] == "compute", "seconds"].median()
        for name, other, most, where in ASKED:
            if where not in (None, link) or not {name, other} <= {*floor.index, FLOOR}:
                continue
            if other == FLOOR and sends[name] < compute:
                continue
            of = floor if other == FLOOR else ratios(part, other)
            low, middle, high = of.loc[name, ["min", "median", "max"]].round(2)
            verdict = "yes" if middle <= most else "within the spread" if low <= most else "no"
            rows.append(
                {
                    "model": model,
                    "link": link,
                    "contender": name,
                    "of": other,
                    "takes": f"{middle:.2f} ({low:.2f} to {high:.2f})",
                    "asked": f"{most:.2f}",
                    "met": verdict,
                }
            )
    return pd.DataFrame(rows)


PICTURE = """\
<picture><source media="(prefers-color-scheme: dark)" srcset="race.dark.png">
<img src="race.light.png" alt="Step time of each contender over that of compute alone, by link">
</picture>"""
NO_SENDING_IN_FORWARD = """\
In forward only `flat-lazy` has something to send. The others leave the link idle for that third of computing:
where communication is the longer, that much they are above their floor at best. Without a link nothing can
hide: the cores that compute also carry, and a class pays for whatever it copies or calls more often."""
ABOUT = """\
Medians of {0.rounds} rounds of {0.steps} steps after one that is not timed, contenders interleaved. Links are
emulated; `none` is gloo itself, on the cores that also compute. A reduce-scatter over a link is an
all-to-all and a sum, and so is that of `flat` over gloo; FSDP2's is then gloo's own, a whole all-reduce.
*Late* is the share of collectives that gloo ended after the link's time. *Exposed* is a step less the step
that only computes.
*Of the floor*: no step is shorter than the longer of computing and of its own collectives on the link.
*Sent* and *state* are those of the fullest rank; so are the peaks of a step by category, and *peak*, that
of everything."""


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a block (default: %(default)s)")
    parser.add_argument(
        "--worlds", default="1,2,4,8", help="of the second part; empty leaves it out"
    )
    parser.add_argument(
        "--depths", default="4,8,16,32", help="of the third part; empty leaves it out"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args(argv)
    links, names = args.links.split(","), args.contenders.split(",")
    try:
        for link in links:
            parse_link(link)
        models = args.models.split(",")
        for what, known, chosen in (("contender", CONTENDERS, names), ("model", MODELS, models)):
            for name in set(chosen) - set(known):
                raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(known)}")
        if missing := {"compute", "torch-zero"} - set(names):
            raise ValueError(f"a table compares with {', '.join(sorted(missing))}: name them too")
    except ValueError as error:
        sys.exit(f"race: {error}")
    args.out.mkdir(parents=True, exist_ok=True)
    page = ["# Every variant against torch's own", "", setting(4), "", ABOUT.format(args), ""]
    everything, details = [], {}
    for model in models:
        times, about = run_race(names, model, links, args.rounds, args.steps, details=True)
        everything.append(times)
        details[model] = about
        for link in links:
            page += [
                f"## {model}, link {link}",
                "",
                markdown(table(times[times["link"] == link], about)),
                "",
            ]
    everything = pd.concat(everything)
    page += [
        "## What is asked",
        "",
        NO_SENDING_IN_FORWARD,
        "",
        markdown(bars(everything, details)),
        "",
    ]
    draw(everything, args.out / "race")
    page += [PICTURE, ""]
    page += grow("ranks", args.worlds, lambda n: {"ranks": n}, args)
    page += grow("depth", args.depths, lambda n: {"depth": n}, args)
    everything.to_csv(args.out / "times.csv", index=False, float_format="%.4f")
    (args.out / "RESULTS.md").write_text("\n".join(page), encoding="utf-8")
    print(args.out / "RESULTS.md")
    return 0


def grow(what: str, values: str, as_arguments: Callable, args) -> list[str]:
    """How step time and state grow over the number of ranks, or the depth of the MLP, at 100 MB/s."""
    names, rows = ["compute", "ddp", "zero1", "zero1-overlap", "torch-zero"], []
    for value in map(int, filter(None, values.split(","))):
        times, about = run_race(
            names, "mlp", ["100MB/s"], args.rounds, args.steps, details=True, **as_arguments(value)
        )
        median = times.groupby("contender")["seconds"].median()
        state = about["state_mb"].round(1)
        rows.append(
            {
                what: value,
                **{f"{n}, ms": round(1e3 * median[n]) for n in names},
                **{f"{n}, state MB": state[n] for n in names[1:]},
            }
        )
    if not rows:
        return []
    return [f"## Growth with {what} (mlp, link 100MB/s)", "", markdown(pd.DataFrame(rows)), ""]


if __name__ == "__main__":
    sys.exit(main())
