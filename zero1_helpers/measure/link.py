"""Links between ranks: latency, bandwidth, and how a user names them."""

import math
import re
from dataclasses import dataclass

from zero1_helpers.memory_math import bytes_sent


@dataclass(frozen=True)
class Link:
    """What one rank sends through: `bandwidth` in bytes/s, `latency` in seconds for each collective."""

    bandwidth: float
    latency: float = 0.0
    source: str = "chosen by hand"

    def __post_init__(self):
        if not 0 < self.bandwidth < math.inf or not 0 <= self.latency < math.inf:
            raise ValueError(
                "a link has a bandwidth above 0 B/s and a latency of 0 s or more, not "
                f"{self.bandwidth} B/s and {self.latency} s"
            )

    def seconds(self, op: str, size: float, world_size: int) -> float:
        """How long a collective on `size` bytes keeps the link of one rank busy; alone, not at all."""
        sent = bytes_sent(op, size, world_size)
        return self.latency + sent / self.bandwidth if world_size > 1 else 0.0

    def __str__(self) -> str:
        latency = f" + {self.latency * 1e3:.3g} ms" if self.latency else ""
        if self.bandwidth >= 1e9:
            return f"{self.bandwidth / 1e9:.3g} GB/s{latency}"
        return f"{self.bandwidth / 1e6:.3g} MB/s{latency}"


# One direction, per GPU. The latency is that of a small collective inside NCCL, of the order that
# nccl-tests reports on such hardware; it is the part that varies most between machines.
PRESETS = {
    "nvlink": Link(450e9, 10e-6, "NVLink 4, half of the 900 GB/s that NVIDIA's H100 page gives"),
    "pcie4": Link(31.5e9, 20e-6, "PCIe 4.0 x16, 16 GT/s a lane with 128b/130b coding"),
    "100gbit": Link(12.5e9, 30e-6, "100 Gb/s Ethernet (IEEE 802.3bm) or InfiniBand EDR"),
    "10gbit": Link(1.25e9, 50e-6, "10 Gb/s Ethernet (IEEE 802.3ae)"),
}
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "bit": 1 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
SECONDS = {"us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}  # micro sign, Greek mu
NUMBER = r"(-?\d+(?:\.\d*)?(?:e[+-]?\d{1,3})?)"
RATE = re.compile(rf"\s*{NUMBER}\s*(\w+)/s(?:\s*\+\s*{NUMBER}\s*({'|'.join(SECONDS)}))?\s*")


def parse_link(text: str) -> Link | None:
    """The link that a user names: "none", a preset, or a rate such as "250 MB/s + 2 ms"."""
    if text == "none":
        return None
    if text in PRESETS:
        return PRESETS[text]
    match = RATE.fullmatch(text)
    if not match or match[2] not in UNITS:
        raise ValueError(
            f"unknown link {text!r}; write none, auto, {', '.join(PRESETS)}, "
            "or a rate such as 250MB/s or '250MB/s + 2ms'"
        )
    latency = float(match[3]) * SECONDS[match[4]] if match[3] else 0.0
    return Link(float(match[1]) * UNITS[match[2]], latency)
