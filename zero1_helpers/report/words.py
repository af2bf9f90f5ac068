"""Numbers, names and colours of text as they stand in figures."""

import re

import matplotlib as mpl
import matplotlib.style
import numpy as np


def unit_for(most: float) -> tuple[float, str]:
    return (1e9, "GB") if most >= 1e9 else (1e6, "MB")


def ink_on(colour: str) -> str:
    """Ink that can be read on this colour."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return "#101418" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.4 else "#ffffff"


def size_text(count: float) -> str:
    scale, unit = unit_for(count)
    return f"{number_text(count / scale)} {unit}"


def number_text(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def overlap_text(pct: float) -> str:
    return "none" if np.isnan(pct) else f"{pct:.0f} %"


def shortened(name: str) -> str:
    """A kernel's name without return type, namespaces and arguments, at most 30 characters."""
    if found := re.fullmatch(r"ncclKernel\[(.*)\]", name):
        return found[1]
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|[<(].*", "", name)
    return name if len(name) <= 30 else name[:29] + "…"
