"""Small models, each with a trait that trips hand-made data parallelism; and runs to compare."""

import torch
from torch import nn

from zero1_helpers import (
    FlatShardedOptimizer,
    ShardedOptimizer,
    SimpleDDP,
    SimpleDDPAsync,
    SimpleDDPBucket,
    SimpleDDPBucketAsync,
    SimpleDDPReduceScatter,
    ZeROOne,
    by_bytes,
    by_count,
)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
        )

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Tied(MLP):
    """One weight in two layers, so its gradient comes from two places."""

    def __init__(self):
        super().__init__()
        self.layers[2].weight = self.layers[1].weight


class Frozen(MLP):
    """All layers frozen but one."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.layers[1].requires_grad_(True)


class Unused(MLP):
    """A layer that no rank ever uses, first, in the middle and last."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(5, 5)
        self.layers.insert(2, nn.Linear(8, 8))
        self.layers.insert(0, nn.Linear(4, 4))

    def forward(self, x):
        used = [m for i, m in enumerate(self.layers) if i not in (0, 3)]
        for layer in used[:-1]:
            x = torch.tanh(layer(x))
        return used[-1](x)


class UnusedOnSomeRanks(MLP):
    """A branch that is taken for some inputs: on rank 0 never."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(6, 3)

    def forward(self, x):
        rows = x[:, 0] > 100  # data() marks the rows that take the branch
        out = super().forward(x.clamp(max=100))
        if rows.any():
            out = out + rows[:, None] * self.branch(x.clamp(max=100) / 100)
        return out


class ChannelsLast(nn.Module):
    """Parameters and gradients that are not contiguous."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(3, 16).t())

    def forward(self, x):
        x = x.repeat(1, 18).view(len(x), 3, 6, 6).contiguous(memory_format=torch.channels_last)
        return self.conv(x).mean(1).flatten(1) @ self.transposed


class OneTensor(nn.Module):
    """Fewer tensors than ranks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class MixedDtype(MLP):
    """float32 and float64 in one model: one flat bucket of both would promote."""

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x.to(layer.weight.dtype))
            x = torch.tanh(x) if i < 3 else x
        return x

    def double(self):
        super().double()
        self.layers[1].float()
        return self


class Scalar(MLP):
    """A parameter without dimensions and one without elements."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return super().forward(x) * self.scale + self.empty.sum()


MODELS = [MLP, Tied, Frozen, Unused, UnusedOnSomeRanks, ChannelsLast, OneTensor, MixedDtype, Scalar]

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


class Variant:
    """A wrapper and an optimizer, and what to call after backward. `cap` is small: several buckets."""

    cap = 300 / 2**20

    def __init__(self, name, model, optimizer_cls, **kwargs):
        self.name = name
        make = lambda: optimizer_cls(model.parameters(), **kwargs)  # noqa: E731
        if name.startswith("flat"):
            options = {
                "flat-lag0": {"lag": 0},
                "flat-lazy": {"lazy_gather": True},
                "flat-after": {"step_in_backward": False},
            }.get(name, {})
            self.optimizer = FlatShardedOptimizer(optimizer_cls, model, self.cap, **kwargs)
            self.model = SimpleDDPReduceScatter(model, self.optimizer, **options)
            return
        if name.startswith("overlap"):
            options = {
                "overlap-lag0": {"lag": 0},
                "overlap-lag4": {"lag": 4},
                "overlap-after": {"step_in_backward": False},
            }.get(name, {})
            self.optimizer = ShardedOptimizer(optimizer_cls, model, **kwargs)
            self.model = SimpleDDPBucketAsync(
                model, self.optimizer, bucket_cap_mb=self.cap, **options
            )
            return
        wrapper = {"async": SimpleDDPAsync, "bucket": SimpleDDPBucket}.get(name, SimpleDDP)
        self.model = wrapper(model, bucket_cap_mb=self.cap) if name == "bucket" else wrapper(model)
        if name == "sharded":
            self.optimizer = ShardedOptimizer(optimizer_cls, model, **kwargs)
        elif name == "ddp":
            self.optimizer = make()
        else:
            self.optimizer = ZeROOne(make(), partition=by_bytes if name == "balanced" else by_count)

    def finish(self):
        if self.name in ("ddp", "zero1", "balanced", "sharded"):
            self.model.sync_gradients()
        elif self.name == "async":
            self.model.wait_for_gradients()
        else:
            self.model.flush_bucket()
            self.model.wait_for_gradients()
        if self.name.startswith("overlap"):
            self.model.wait_for_broadcasts()
        self.optimizer.step()
        self.optimizer.zero_grad()


VARIANTS = [
    "ddp",
    "zero1",
    "balanced",
    "sharded",
    "async",
    "bucket",
    "overlap",
    "overlap-lag0",
    "overlap-lag4",
    "overlap-after",
    "flat",
    "flat-lazy",
    "flat-after",
]


def make(model_cls):
    torch.manual_seed(3)
    return model_cls().double()


def data(step, world_size, rows=4):
    """Inputs and targets for all ranks: (world_size, rows, features), different on each rank."""
    g = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(world_size, rows, 6, generator=g, dtype=torch.float64)
    x[1:, 0, 0] = 200 + torch.arange(world_size - 1)  # takes the branch of UnusedOnSomeRanks
    return x, torch.randn(world_size, rows, 3, generator=g, dtype=torch.float64)


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()
