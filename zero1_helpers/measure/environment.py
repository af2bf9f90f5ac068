"""What a number means nothing without: machine, backend, link, versions, date, and the model."""

import contextlib
import datetime
import importlib.metadata
import os
import platform

import torch

from zero1_helpers.measure import emulate


def describe_model(model) -> dict:
    """{name, parameters, tensors, dtype, source} of a model, wrapped or not."""
    while not hasattr(model, "zero1_info") and hasattr(model, "module"):
        model = model.module
    params = list(model.parameters())
    info = getattr(model, "zero1_info", {"name": type(model).__name__, "source": "unknown"})
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in params})
    counts = {"parameters": sum(p.numel() for p in params), "tensors": len(params)}
    return {"name": info["name"], **counts, "dtype": "+".join(dtypes), "source": info["source"]}


def environment(cuda: bool) -> dict:
    """What a number means nothing without: machine, backend, link, versions, date."""
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if cuda else ""
    packages = {
        "torch": "torch",
        "transformers": "transformers",
        "HTA": "traceinsight",
        "nbdistributed": "nbdistributed",
    }
    versions = {}
    for name, package in packages.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(package)
    return {
        "backend": emulate.transport(),
        "device": "cuda" if cuda else "cpu",
        "hardware": gpus or f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "link": str(emulate.current() or "none"),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
    }
