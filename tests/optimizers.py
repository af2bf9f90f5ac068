"""Optimizers that sharding cannot all serve, each the smallest one with a trait of a published one."""

import torch
from torch.optim import Optimizer


class PerParameter(Optimizer):
    """The rule of all below is SGD, with a factor that each of them takes from somewhere else."""

    def __init__(self, params, lr=0.1, **settings):
        super().__init__(params, {"lr": lr, **settings})

    def factor(self, group, p):
        return 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.factor(group, p) * p.grad)

    def begin(self, group): ...


class Own(PerParameter):
    """A rule of one's own that works element by element."""

    def factor(self, group, p):
        state = self.state[p]
        state["sum"] = state.get("sum", 0) + p.grad.abs()
        return 1 / (1 + state["sum"])


class CountInGroup(PerParameter):
    """The count of steps is the group's (Apex's fused optimizers)."""

    def begin(self, group):
        group["step"] = group.get("step", 0) + 1

    def factor(self, group, p):
        return 1 / group["step"]


class CountInOptimizer(PerParameter):
    """The same, as an attribute, which no group shows."""

    calls = 0

    def begin(self, group):
        self.calls += 1

    def factor(self, group, p):
        return 1 / self.calls


class ScheduleFree(PerParameter):
    """Weights are averages whose factor 1 / (k + 1) comes from the group (Defazio et al., 2024)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, k=0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    z.sub_(group["lr"] * p.grad)
                    p.lerp_(z, 1 / (group["k"] + 1))
            group["k"] += 1


class Statistics(PerParameter):
    """One estimate over all parameters of how far the start was from the goal (Prodigy, D-Adaptation)."""

    def begin(self, group):
        grads = [p.grad.abs().sum() for p in group["params"] if p.grad is not None]
        self.total = getattr(self, "total", 0) + sum(grads)

    def factor(self, group, p):
        return 1 / (1 + self.total)


class ClipsInside(PerParameter):
    """Clips by the norm over all parameters, inside step()."""

    def begin(self, group):
        grads = [p.grad for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(
            group["params"], 1.0, torch.nn.utils.get_total_norm(grads)
        )


class NormOfEach(PerParameter):
    """Steps of equal length for each parameter (LARS, LAMB)."""

    def factor(self, group, p):
        return 1 / (1 + p.grad.norm())


ANYWHERE = [Own]
WHOLE = [NormOfEach, torch.optim.Adafactor]  # parameter by parameter, but not element by element
NOWHERE = [CountInGroup, CountInOptimizer, ScheduleFree, Statistics, ClipsInside, torch.optim.LBFGS]
