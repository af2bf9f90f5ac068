"""Figures: described, reproducible to the byte, readable in both themes, and right at the peak."""

import base64
import json
import re
import struct

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from zero1_helpers import analysis, figures, runs
from zero1_helpers.runs import load_run

from .test_runs import cuda_trace, make_run

ONE = {
    "memory": lambda run, **k: figures.memory_timeline(run, rank=1, **k),
    "temporal": figures.temporal_breakdown,
    "overlap": figures.overlap,
    "kernels": figures.kernel_breakdown,
    "schedule": lambda run, **k: figures.schedule_diagram(run, rank=0, step=1, **k),
    "bytes": figures.bytes_per_rank,
    "comparison": figures.comparison,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("traces")
    make_run(root / "tiny" / "zero1-overlap")
    make_run(root / "tiny" / "ddp", variant="ddp", title="DDP baseline")
    return root


@pytest.fixture(scope="module")
def run(folder):
    return load_run(folder / "tiny" / "zero1-overlap")


@pytest.mark.parametrize("name", ONE)
def test_every_figure_is_described_and_has_one_width(name, run):
    light, dark = (ONE[name](run, theme=theme) for theme in ("light", "dark"))
    for fig in (light, dark):
        assert fig.get_figwidth() == figures.WIDTH
        for fact in ("CPU, 2 cores", "2 ranks", "gloo", "no emulated link", "2025-01-31"):
            assert fact in fig.caption
            assert fact in " ".join(text.get_text() for text in fig.texts)
        assert len(fig.alt_text) > 60 and fig.title
        assert "nan" not in fig.alt_text + fig.caption
    assert (light.alt_text, light.caption) == (dark.alt_text, dark.caption)
    assert light.get_facecolor() != dark.get_facecolor()
    with pytest.raises(ValueError, match="theme must be one of light, dark, not 'pink'"):
        ONE[name](run, theme="pink")


@pytest.mark.parametrize("name", ["memory", "comparison"])
def test_same_input_same_bytes_whatever_the_users_settings(name, run, folder):
    once = [figures.render(ONE[name](run), kind) for kind in ("svg", "png")]
    with mpl.rc_context({"font.size": 30, "axes.grid": True, "svg.hashsalt": "mine",
                         "savefig.facecolor": "red", "svg.fonttype": "none"}):  # fmt: skip
        fresh = load_run(folder / "tiny" / "zero1-overlap")
        again = [figures.render(ONE[name](fresh), kind) for kind in ("svg", "png")]
    assert once == again
    svg = once[0].decode()
    assert "<text" not in svg and "dc:date" not in svg  # letters are shapes, no time of making
    assert "<dc:description>" in svg and len(once[1]) < 100_000


@pytest.mark.parametrize("theme", figures.THEMES)
def test_words_can_be_read_on_the_paper(theme):
    def light(colour):  # relative luminance, WCAG 2
        parts = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
        ]
        return np.dot(parts, (0.2126, 0.7152, 0.0722))

    def contrast(one, other):
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    look = figures.THEMES[theme]
    assert contrast(look["ink"], look["paper"]) > 10
    assert contrast(look["muted"], look["paper"]) > 4.5
    for colour in figures.COLOURS.values():
        assert contrast(figures._on(colour), colour) > 3


def test_one_colour_per_category_on_every_chart(run):
    stacked = [figures.COLOURS[name] for name in figures.STACK if name not in ("other", "counters")]
    assert len(set(stacked)) == len(stacked)
    for name in ("memory", "comparison", "bytes"):
        legend = ONE[name](run).legends[0]
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
            category = {"measured, rank by rank": "opt_state"}.get(text.get_text(), text.get_text())
            if category in figures.COLOURS:
                assert handle.get_facecolor()[:3] == to_rgb(figures.COLOURS[category])


def test_thinning_keeps_the_peak_and_the_floor_of_every_bin(run):
    frame = analysis.get_memory_timeline(run, 0)
    thin = figures._thin(frame, bins=10)
    assert len(thin) <= 3 * 11 + 1 < len(frame) / 2
    assert (thin == frame.loc[thin.index]).all(axis=None)  # real rows only
    assert thin["total"].max() == frame["total"].max()
    bins = (frame["time_ms"] / frame["time_ms"].iloc[-1] * 10).astype(int)
    for number, part in frame.groupby(bins):
        kept = thin.loc[thin.index.intersection(part.index), "total"]
        assert (kept.min(), kept.max()) == (part["total"].min(), part["total"].max()), number
        assert part.index[-1] in thin.index, number  # what lasts until the next bin
    assert figures._thin(frame, bins=10_000) is frame


def test_the_peak_is_marked_where_it_is(run):
    ax = ONE["memory"](run).axes[0]
    frame = analysis.get_memory_timeline(run, 1)
    top = frame.loc[frame["total"].idxmax()]
    (dot,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (top["time_ms"] / 1e3, top["total"] / 1e6)
    label = f"peak {top['total'] / 1e6:.2f} MB"
    assert label in [text.get_text() for text in ax.texts]
    assert f"{top['total'] / 1e6:.2f} MB" in ONE["memory"](run).caption


def test_units_are_decimal():
    sizes = {1_447_292_160: "1.45 GB", 503_377_920: "503 MB", 1_048_576: "1.05 MB", 0: "0.00 MB"}
    assert {size: figures._size(size) for size in sizes} == sizes


def test_schedule_draws_the_measured_intervals(run):
    fig = ONE["schedule"](run)
    frame = analysis.schedule(run, 0, 1)
    bars = [path for bar in fig.axes[0].collections for path in bar.get_paths()]
    assert len(bars) == len(frame) > 10
    widths = sorted(np.ptp(path.vertices[:, 0]) for path in bars)
    assert widths == pytest.approx(sorted(frame["end_ms"] - frame["start_ms"]))
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == [
        "bucket 0", "bucket 1", "bucket 2"]  # fmt: skip
    few = figures.schedule_diagram(run, most=2)
    assert "2 of 3 rows are drawn" in few.caption


def test_cuda_run_says_what_is_not_seen(tmp_path):
    run = load_run(make_run(tmp_path, 1, cuda_trace, backend="nccl", device="cuda", steps=3))
    assert "NCCL's own buffers are invisible" in figures.memory_timeline(run).caption
    names = [t.get_text() for t in figures.kernel_breakdown(run).axes[0].get_yticklabels()]
    assert "ncclDevKernel_AllReduce_Sum_b…" in names and "kernel1" in names


def test_a_rank_alone_communicates_nothing(tmp_path):
    run = load_run(make_run(tmp_path, 1))
    assert "none of 0.0 ms" in figures.overlap(run).alt_text
    assert "overlap none" in figures.comparison(run).alt_text


def test_show_displays_a_small_png_with_alt_text_and_caption(run, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **k: shown.append((data, k)))
    fig = ONE["temporal"](run)
    figures.show(fig)
    (picture, about), (caption, _) = shown
    png = base64.b64decode(picture["image/png"])
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) < 1e5
    assert picture["text/plain"] == about["metadata"]["image/png"]["alt"] == fig.alt_text
    width, _ = struct.unpack(">II", png[16:24])
    assert width == int(figures.WIDTH * figures.DPI)
    assert fig.caption in caption["text/markdown"]
    assert not any("javascript" in kind for data in (picture, caption) for kind in data)


def test_draw_all(folder, tmp_path):
    broken = folder / "tiny" / "zero1"
    make_run(broken, variant="zero1")
    (broken / "trace.rank1.json.gz").unlink()
    said = []
    assert figures.draw_all(folder, tmp_path, "light", said.append) == 1
    (complaint,) = [line for line in said if line.startswith("skipped")]
    assert "trace.rank1.json.gz" in complaint
    manifest = json.loads((tmp_path / "figures.json").read_text())
    written = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert {entry["file"] for entry in manifest} == written - {"figures.json"}
    assert len(written) == 2 * (2 * len(figures.PER_RUN) + len(figures.PER_PRESET)) + 1
    assert {"tiny/ddp", "tiny/zero1-overlap", "tiny"} == {entry["run"] for entry in manifest}
    for entry in manifest:
        assert entry["alt"] and entry["title"] and entry["hardware"] in entry["caption"]
        assert (entry["backend"], entry["link"], entry["date"]) == ("gloo", "none", "2025-01-31")
        assert re.fullmatch(r"tiny/([\w-]+/)?\w+\.light\.(svg|png)", entry["file"])
    order = [e["alt"].index("ddp") < e["alt"].index("zero1-overlap") for e in manifest
             if "comparison" in e["file"]]  # fmt: skip
    assert order == [True, True]
    with pytest.raises(runs.RunError, match="no recorded run"):
        figures.draw_all(tmp_path / "nowhere", tmp_path)
