"""How a class shows an optimizer a part of its parameters, and the trial whether the optimizer stands it.

A sharded class never lets an optimizer see everything at once. `ZeROOne` shows it this rank's parameters,
`ShardedOptimizer` those of one bucket, `FlatShardedOptimizer` this rank's pieces of one bucket. That is right
if the update of an element depends on nothing that is hidden: not on other parameters (Prodigy's statistics,
a norm over all gradients), not on how often `step()` was called (a count that is kept in the group), and for
pieces not on the rest of the same parameter (Adafactor, Muon). No optimizer says so about itself; each class
tries it on small tensors when it is made.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

KERNELS = ("fused", "foreach", "capturable")  # which code does the update, not what it is
NOT_SETTINGS = ("params", "param_names", *KERNELS)
SCALES = (0.1, 1000.0, 0.01, 10.0, 1.0)  # of the gradients in each step of the trial: a clip shows


def only(optimizer: torch.optim.Optimizer, params: Collection[Tensor]):
    """Show an optimizer these parameters and no others, each still in its own group."""
    return instead(optimizer, {p: p for p in params})


@contextmanager
def instead(optimizer: torch.optim.Optimizer, pieces: Mapping[Tensor, Tensor]):
    """Show an optimizer pieces[p] in place of each parameter p, in p's group, and nothing else."""
    everything = [group["params"] for group in optimizer.param_groups]
    for group, all_params in zip(optimizer.param_groups, everything, strict=True):
        group["params"] = [pieces[p] for p in all_params if p in pieces]
    try:
        yield
    finally:
        for group, all_params in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = all_params


def as_groups(model: nn.Module | Iterable) -> list[dict]:
    """What a torch optimizer takes, as groups with lists that can be read more than once."""
    given = list(model.parameters() if isinstance(model, nn.Module) else model)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [
        group | {"params": [p] if isinstance(p := group["params"], Tensor) else list(p)}
        for group in groups
    ]


def check_optimizer(optimizer_cls, groups: list[dict], kwargs: dict, shown: str) -> None:
    """Raise ValueError if an optimizer that is shown its parameters apart is not what it is shown all.

    `shown` is how: "this rank's", "one by one" or "in pieces". Both train for a few steps: `whole` in one
    process; `apart` as two ranks, each with an optimizer of its own and half of the parameters or pieces.
    """
    name = getattr(optimizer_cls, "__name__", repr(optimizer_cls))
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            fault = _try(optimizer_cls, _small(groups), kwargs, shown)
    except Exception as error:
        fault = f"cannot step parameters that are shown {shown} ({str(error).splitlines()[0]})"
    if fault:
        raise ValueError(f"{name} {fault}; {_way_out(optimizer_cls, groups, kwargs, shown)}")


def remade_with(optimizer: torch.optim.Optimizer) -> dict:
    """Those arguments of an optimizer's class that have no default, for the trial to make another one."""
    arguments = list(inspect.signature(type(optimizer)).parameters.values())[1:]
    needed = [a.name for a in arguments if a.default is a.empty]
    return {name: optimizer.defaults[name] for name in needed if name in optimizer.defaults}


def _way_out(optimizer_cls, groups, kwargs, shown: str) -> str:
    if shown != "this rank's":
        try:
            check_optimizer(optimizer_cls, groups, kwargs, "this rank's")
            return "use ZeROOne, which steps whole parameters, once in a step"
        except ValueError:
            pass
    return "use SimpleDDP with the plain optimizer, which sees everything at once"


def _small(groups: list[dict]) -> list[tuple[dict, list[tuple[int, ...]]]]:
    """(settings, shapes) of a group for the trial: one for each way of stepping, a shape for each ndim."""
    distinct = {}
    for group in groups:
        settings = _settings(group)
        if "lr" in settings:
            settings["lr"] = settings["lr"] or 0.1  # a warm-up that begins at 0 shows nothing
        key = repr({k: v for k, v in settings.items() if "lr" not in k})
        ndims = {(p[1] if isinstance(p, tuple) else p).ndim for p in group["params"]}
        distinct.setdefault(key, (settings, set()))[1].update(ndims)
    return [
        (settings, [(3, 2, *[2] * 9)[:n] for n in sorted(ndims)])
        for settings, ndims in distinct.values()
    ]


def _settings(group: dict) -> dict:
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}


def _made(optimizer_cls, small, kwargs) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer of four parameters of each shape, the same numbers each time."""
    groups, params = [], []
    for settings, shapes in small:
        of_group = []
        for shape in shapes * 4:
            numbers = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
            params.append(nn.Parameter(torch.sin(numbers * (len(params) + 1)).reshape(shape)))
            of_group.append(params[-1])
        groups.append(settings | {"params": of_group})
    kwargs = {k: (v or 0.1 if k == "lr" else v) for k, v in kwargs.items() if k not in KERNELS}
    return optimizer_cls(groups, **kwargs), params


def _try(optimizer_cls, small, kwargs, shown: str) -> str | None:
    """What is wrong with it, if anything."""
    whole, params = _made(optimizer_cls, small, kwargs)
    ranks = [Apart(rank, *_made(optimizer_cls, small, kwargs), shown) for rank in range(2)]
    first = None
    for step, scale in enumerate(SCALES):
        before = [p.detach().clone() for p in params]
        for i, p in enumerate(params):
            unused = step == 2 and i == 1
            p.grad = None if unused else scale * torch.cos(before[i] * 7 + step)
        grads = [None if p.grad is None else p.grad.clone() for p in params]  # some change them
        whole.step()
        for rank in ranks:
            rank.step(grads)
        settings = [{k: repr(v) for k, v in _settings(g).items()} for g in whole.param_groups]
        first = first or settings
        if settings != first:
            changed = {
                k for a, b in zip(first, settings, strict=True) for k in b if a.get(k) != b[k]
            }
            return f"keeps state in its groups ({', '.join(sorted(changed))}), which each step() changes"
        for i, (p, old) in enumerate(zip(params, before, strict=True)):
            found = torch.cat([rank.row(i) for rank in ranks if i in rank.pieces])
            error, moved = (found - p.detach().reshape(-1)).abs().max(), (p - old).abs().max()
            if not error <= 1e-6 * moved + 1e-12:
                by = "element by element" if shown == "in pieces" else "parameter by parameter"
                return f"does not work {by}: what is stepped apart comes out different"
    return None


class Apart:
    """One of two ranks of the trial: an optimizer, and what this rank steps of each parameter."""

    def __init__(self, rank: int, optimizer, params: list[nn.Parameter], shown: str):
        self.optimizer, self.params, self.shown = optimizer, params, shown
        self.pieces, self.cuts = {}, {}
        for i, p in enumerate(params):
            half = -(-p.numel() // 2)
            if shown != "in pieces" and i % 2 == rank:
                self.pieces[i], self.cuts[i] = p, slice(None)
            elif shown == "in pieces" and (rank == 0 or p.numel() > 1):
                self.cuts[i] = cut = slice(0, half) if rank == 0 else slice(half, None)
                self.pieces[i] = nn.Parameter(p.detach().reshape(-1)[cut].clone())

    def row(self, i: int) -> Tensor:
        return self.pieces[i].detach().reshape(-1)

    def step(self, grads: list[Tensor | None]) -> None:
        for i, piece in self.pieces.items():
            row = None if grads[i] is None else grads[i].reshape(-1)[self.cuts[i]].clone()
            piece.grad = None if row is None else row.reshape(piece.shape)
        shown = [
            i for i, p in self.pieces.items() if self.shown != "in pieces" or p.grad is not None
        ]
        calls = [shown] if self.shown == "this rank's" else [[i] for i in reversed(shown)]
        for call in calls:
            with instead(self.optimizer, {self.params[i]: self.pieces[i] for i in call}):
                self.optimizer.step()


def fastest_kernels(optimizer_cls: type[torch.optim.Optimizer], kwargs: dict) -> dict:
    """kwargs, with fused=True where all devices have such a kernel; what the caller chose is kept."""
    if {"fused", "foreach", "capturable", "differentiable"} & set(kwargs):
        return kwargs
    fused = optimizer_cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return kwargs | ({"fused": True} if fused else {})
