"""Figures: described, reproducible to the byte, readable in both themes, and right at the peak."""

import base64
import gzip
import json
import re
import shutil
import struct
from dataclasses import replace
from itertools import combinations, pairwise

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from zero1_helpers.cli import main
from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.runs import load_run
from zero1_helpers.measure.schema import CATEGORIES
from zero1_helpers.report import comparisons, figures, frames, gallery, memory, style, timing, words
from zero1_helpers.training.variants import VARIANTS

from .test_runs import cuda_trace, make_run

ONE = {
    "memory": lambda run, **k: figures.memory_timeline(run, rank=1, **k),
    "temporal": figures.temporal_breakdown,
    "overlap": figures.overlap,
    "kernels": figures.kernel_breakdown,
    "schedule": lambda run, **k: figures.schedule_diagram(run, rank=0, step=1, **k),
    "bytes": comparisons.bytes_per_rank,
    "comparison": comparisons.comparison,
    "against": lambda run, **k: comparisons.before_and_after([run], [run], **k),
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
        assert fig.get_figwidth() == style.WIDTH
        for fact in ("CPU, 2 cores", "2 ranks", "gloo", "no emulated link", "2025-01-31"):
            assert fact in fig.caption
            assert fact in " ".join(text.get_text() for text in fig.texts)
        assert len(fig.alt_text) > 60 and fig.title
        assert "nan" not in fig.alt_text + fig.caption
    assert (light.alt_text, light.caption) == (dark.alt_text, dark.caption)
    assert light.get_facecolor() != dark.get_facecolor()
    with pytest.raises(ValueError, match="theme must be one of light, dark, not 'pink'"):
        ONE[name](run, theme="pink")


def test_a_long_setting_is_not_cut_off(tmp_path):
    run = load_run(
        make_run(
            tmp_path,
            hardware="x86_64 CPU, 64 cores",
            link="400 MB/s + 6 ms",
            late_share=0.48,
            preset="smollm2-360m",
        )
    )
    for fig in (figures.memory_timeline(run), comparisons.comparison([run, run])):
        assert any("took gloo longer" in text.get_text() for text in fig.texts)
        for text in fig.texts:
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= style.WIDTH * style.DPI


@pytest.mark.parametrize("name", ["memory", "comparison"])
def test_same_input_same_bytes_whatever_the_users_settings(name, run, folder):
    once = [style.render(ONE[name](run), kind) for kind in ("svg", "png")]
    with mpl.rc_context(
        {
            "font.size": 30,
            "axes.grid": True,
            "svg.hashsalt": "mine",
            "savefig.facecolor": "red",
            "svg.fonttype": "none",
        }
    ):
        fresh = load_run(folder / "tiny" / "zero1-overlap")
        again = [style.render(ONE[name](fresh), kind) for kind in ("svg", "png")]
    assert once == again
    svg = once[0].decode()
    assert "<text" not in svg and "dc:date" not in svg  # letters are shapes, no time of making
    assert "<dc:description>" in svg and len(once[1]) < 100_000


@pytest.mark.parametrize("theme", style.THEMES)
def test_words_can_be_read_on_the_paper(theme):
    def light(colour):  # relative luminance, WCAG 2
        parts = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
        ]
        return np.dot(parts, (0.2126, 0.7152, 0.0722))

    def contrast(one, other):
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    look = style.THEMES[theme]
    assert contrast(look["ink"], look["paper"]) > 10
    assert contrast(look["muted"], look["paper"]) > 4.5
    for colour in style.COLOURS.values():
        assert contrast(words.ink_on(colour), colour) > 3


def test_one_colour_per_category_on_every_chart(run):
    stacked = [style.COLOURS[name] for name in style.STACK if name not in ("other", "counters")]
    assert len(set(stacked)) == len(stacked)
    for name in ("memory", "comparison", "bytes"):
        legend = ONE[name](run).legends[0]
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
            category = {"measured, rank by rank": "opt_state"}.get(text.get_text(), text.get_text())
            if category in style.COLOURS:
                assert handle.get_facecolor()[:3] == to_rgb(style.COLOURS[category])


@pytest.mark.parametrize("rank", [0, 1])
def test_downsampling_keeps_the_peak_each_bins_range_and_the_bytes_at_each_edge(run, rank):
    whole = memory.get_memory_timeline(run, rank)
    marks = timing.spans(run, rank)
    edges = np.array([*marks["start_ms"], *marks["end_ms"]])
    edges = edges[edges >= 0]
    assert len(edges) > 10 and any(marks["name"] == "step 2")
    thin = memory.downsample(whole, edges, bins=10)
    assert len(thin) < len(whole)
    assert (thin == whole.loc[thin.index]).all(axis=None)  # real rows only
    for name in ("total", *CATEGORIES):
        assert thin[name].max() == whole[name].max(), name
    assert (
        thin["time_ms"].iloc[thin["total"].argmax()]
        == whole["time_ms"].iloc[whole["total"].argmax()]
    )
    bins = (whole["time_ms"] / whole["time_ms"].iloc[-1] * 10).astype(int)
    for number, part in whole.groupby(bins):
        kept = thin.loc[thin.index.intersection(part.index), "total"]
        assert (kept.min(), kept.max()) == (part["total"].min(), part["total"].max()), number
        assert part.index[-1] in thin.index, number  # what lasts until the next bin
    at = [
        frame.iloc[np.searchsorted(frame["time_ms"], edges, side="right") - 1].drop(
            columns="time_ms"
        )
        for frame in (whole, thin)
    ]
    assert (at[0].to_numpy() == at[1].to_numpy()).all()
    assert memory.downsample(whole, edges, bins=10_000) is whole


def test_every_row_of_a_timeline_knows_its_step_and_phase(run):
    line = memory.timelines(run)[1]
    marks = timing.spans(run, 1)
    for step in marks[marks["name"].str.startswith("step ")].itertuples():
        inside = line[line["time_ms"].between(step.start_ms, step.end_ms, inclusive="left")]
        assert len(inside) and inside["doing"].str.startswith(step.name).all()
    assert line["doing"].str.fullmatch(r"(step \d(, (forward|backward))?)?").all()
    assert (line["doing"] == "step 1, backward").any()


def test_the_peak_is_marked_where_it_is(run):
    ax = ONE["memory"](run).axes[0]
    frame = memory.get_memory_timeline(run, 1)
    top = frame.loc[frame["total"].idxmax()]
    (dot,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (top["time_ms"] / 1e3, top["total"] / 1e6)
    label = f"peak {top['total'] / 1e6:.2f} MB"
    assert label in [text.get_text() for text in ax.texts]
    assert f"{top['total'] / 1e6:.2f} MB" in ONE["memory"](run).caption


def test_names_of_many_variants_do_not_touch(run):
    many = [
        replace(run, record=run.record | {"variant": name})
        for name in (*VARIANTS, "one-collective", "flat-overlapped")
    ]
    fig = comparisons.bytes_per_rank(many)
    FigureCanvasAgg(fig).draw()
    boxes = [label.get_window_extent() for label in fig.axes[0].get_xticklabels()]
    assert (
        all(a.x1 < b.x0 for a, b in pairwise(boxes)) and min(box.y0 for box in boxes) > 25
    )  # the setting


def test_one_unit_in_a_figure(run):
    fig = ONE["bytes"](run)
    (ax,) = fig.axes
    most = max(m["opt_state"] for m in run.record["memory"])
    assert ax.get_ylabel() == "MB" and f"{most / 1e6:.2f}" in [text.get_text() for text in ax.texts]
    assert not any("B" in text.get_text() for text in ax.texts)


def test_units_are_decimal():
    sizes = {1_447_292_160: "1.45 GB", 503_377_920: "503 MB", 1_048_576: "1.05 MB", 0: "0.00 MB"}
    assert {size: words.size_text(size) for size in sizes} == sizes


def test_schedule_draws_the_measured_intervals(run):
    fig = ONE["schedule"](run)
    frame = timing.schedule(run, 0, 1)
    bars = [path for bar in fig.axes[0].collections for path in bar.get_paths()]
    assert len(bars) == len(frame) > 10
    widths = sorted(np.ptp(path.vertices[:, 0]) for path in bars)
    assert widths == pytest.approx(sorted(frame["end_ms"] - frame["start_ms"]))
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == [
        "bucket 0",
        "bucket 1",
        "bucket 2",
    ]
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
    assert "overlap none" in comparisons.comparison(run).alt_text


def test_show_displays_a_small_png_with_alt_text_and_caption(run, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **k: shown.append((data, k)))
    fig = ONE["temporal"](run)
    style.show(fig)
    (picture, about), (caption, _) = shown
    png = base64.b64decode(picture["image/png"])
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) < 1e5
    assert picture["text/plain"] == about["metadata"]["image/png"]["alt"] == fig.alt_text
    width, _ = struct.unpack(">II", png[16:24])
    assert width == int(style.WIDTH * style.DPI)
    assert fig.caption in caption["text/markdown"]
    assert not any("javascript" in kind for data in (picture, caption) for kind in data)


def drawn(root, out, *more, **options):
    """{path: bytes} of what draw_all wrote, what it said and what it returned."""
    said = []
    damaged = gallery.draw_all(root, out, *more, progress=said.append, **options)
    files = [path for path in out.rglob("*") if path.is_file()]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}, said, damaged


def test_two_processes_write_the_same_bytes_as_one(folder, tmp_path):
    kinds = "temporal,comparison,timelines"
    one, said, damaged = drawn(folder, tmp_path / "1", formats=("svg", "png", "html"), only=kinds)
    two, said_again, _ = drawn(
        folder, tmp_path / "2", formats=("svg", "png", "html"), only=kinds, jobs=2
    )
    assert (
        one == two
        and said == said_again == ["[1/2] tiny/ddp", "[2/2] tiny/zero1-overlap"]
        and not damaged
    )
    assert (
        len(one) == 3 * 2 * 2 + 1 + 1
    )  # three figures, two themes, two formats; timelines; the manifest


def test_only_format_and_theme_choose(folder, tmp_path):
    files, _, _ = drawn(folder, tmp_path, "dark", ("png",), "tiny/ddp/m*")
    assert set(files) == {"tiny/ddp/memory.dark.png", "figures.json"}
    files, _, _ = drawn(folder, tmp_path, "light", ("svg",), "tiny/zero1-overlap")
    assert len(files) == 2 + len(gallery.PER_RUN)
    listed = [entry["file"] for entry in json.loads(files["figures.json"])]
    assert listed == sorted(
        set(files) - {"figures.json"}
    )  # the earlier figure too: it is still there


def test_two_sets_of_runs_in_one_figure(folder, tmp_path):
    other = tmp_path / "gpus"
    make_run(
        other / "big" / "ddp",
        2,
        cuda_trace,
        variant="ddp",
        title="DDP",
        preset="big",
        backend="nccl",
        device="cuda",
        hardware="2 x GPU",
        link="NVLink",
        date="2026-06-05",
        step_seconds=[0.01, 0.01, 0.01],
        model={"name": "big", "parameters": 9, "tensors": 1, "dtype": "bfloat16", "source": "-"},
    )
    files, said, damaged = drawn(
        folder, tmp_path / "out", "light", ("svg",), "against*", against=other
    )
    assert said[-1] == "[3/3] big/ddp" and not damaged
    assert set(files) == {"tiny/against_big.light.svg", "figures.json"}
    (entry,) = json.loads(files["figures.json"])
    for fact in (
        "CPU, 2 cores / 2 x GPU",
        "gloo / nccl",
        "2025-01-31 / 2026-06-05",
        "The models differ",
    ):
        assert fact in entry["caption"]
    assert "ddp, step: 0.10 s, then 0.01 s" in entry["alt"]
    assert "zero1-overlap" not in entry["alt"]  # in one set only
    assert (entry["hardware"], entry["backend"]) == ("CPU, 2 cores / 2 x GPU", "gloo / nccl")
    with pytest.raises(RunError, match="no variant in common"):
        overlapped = load_run(folder / "tiny" / "zero1-overlap")
        comparisons.before_and_after([overlapped], [load_run(other / "big" / "ddp")])


def test_two_sets_without_a_common_variant_are_said_and_the_rest_is_drawn(folder, tmp_path):
    make_run(tmp_path / "gpus" / "big" / "zero1", variant="zero1")
    files, said, damaged = drawn(
        folder, tmp_path / "out", "light", ("svg",), "temporal,against*", against=tmp_path / "gpus"
    )
    assert said[-1] == f"skipped: {folder.name} and gpus have no variant in common" and damaged == 1
    listed = [entry["file"] for entry in json.loads(files["figures.json"])]
    assert listed == ["tiny/ddp/temporal.light.svg", "tiny/zero1-overlap/temporal.light.svg"]


def test_a_run_that_cannot_be_analysed_leaves_no_file(folder, tmp_path, monkeypatch):
    def fail(run):
        raise RunError(f"{run.folder}: no communication")

    monkeypatch.setattr(frames, "comm_comp_overlap", fail)
    files, _, damaged = drawn(folder, tmp_path / "out", "light", ("svg",), "temporal,overlap")
    assert damaged == 2 and set(files) == {"figures.json"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theme": "pink"}, "theme must be one of light, dark, both, not 'pink'"),
        ({"formats": ("jpg",)}, "format must be one of svg, png, html, not jpg"),
        ({"only": "memroy"}, "no figure is called 'memroy'"),
    ],
)
def test_a_wrong_choice_gets_one_line_and_leaves_nothing(folder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        gallery.draw_all(folder, tmp_path / "out", **options)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_figure_that_two_sets_of_runs_do_not_have_either(folder, tmp_path):
    with pytest.raises(ValueError, match="no figure is called 'memroy'"):
        gallery.draw_all(folder, tmp_path / "out", only="memroy", against=folder)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_output_folder_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ValueError, match=r"out: cannot be written \(.*\)$"):
        gallery.draw_all(folder, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "a file"


def test_figures_from_the_command_line(folder, tmp_path, capfd):
    assert (
        main(
            [
                "figures",
                "--runs",
                str(folder),
                "--out",
                str(tmp_path),
                "--only",
                "tiny/ddp/memory",
                "--format",
                "svg",
                "--theme",
                "dark",
            ]
        )
        == 0
    )
    assert (tmp_path / "tiny/ddp/memory.dark.svg").is_file()
    assert main(["figures", "--runs", str(folder), "--out", str(tmp_path), "--theme", "pink"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["zero1 figures: theme must be one of light, dark, both, not 'pink'"]


# As Viénot, Brettel and Mollon (1999) simulate it: linear RGB seen without long- or middle-wave cones.
DICHROMATS = {
    "protan": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
    "deutan": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
}


@pytest.mark.parametrize("eye", DICHROMATS)
def test_what_touches_is_told_apart_without_full_colour_vision(eye):
    def seen(colour):  # CIE L*a*b* of the simulated colour
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        linear = np.clip(DICHROMATS[eye] @ linear, 0, 1)
        xyz = [
            [0.4124, 0.3576, 0.1805],
            [0.2126, 0.7152, 0.0722],
            [0.0193, 0.1192, 0.9505],
        ] @ linear
        ratio = xyz / (0.9505, 1, 1.089)
        f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    groups = [
        ["params", "grads", "opt_state", "buckets"],
        ["compute", "exposed", "idle"],
        ["hidden", "exposed"],
        ["backward", "all-reduce", "step", "broadcast"],
        *([a, b] for a, b in pairwise(style.STACK[:6])),
    ]
    for group in groups:
        for a, b in combinations(group, 2):
            distance = np.linalg.norm(seen(style.COLOURS[a]) - seen(style.COLOURS[b]))
            assert distance > 15, (a, b, distance)


def test_draw_all(folder, tmp_path):
    broken, unfinished = folder / "tiny" / "zero1", folder / "tiny" / "zero1-async"
    for damaged in (broken, unfinished):
        make_run(damaged, variant=damaged.name)
    (broken / "trace.rank1.json.gz").write_bytes(gzip.compress(b"[]not JSON"))
    (unfinished / "run.json").unlink()
    files, said, damaged = drawn(folder, tmp_path, "light", ("svg", "png"))
    for path in (broken, unfinished):
        shutil.rmtree(path)
    assert damaged == 2
    complaints = [line for line in said if line.startswith("skipped")]
    assert re.search(r"zero1/trace.rank1.json.gz: damaged, cannot be read \(.*\)$", complaints[0])
    assert (
        "zero1-async/run.json: missing; not a recorded run, or an unfinished one" in complaints[1]
    )
    manifest = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    written = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert {entry["file"] for entry in manifest} == written - {"figures.json"}
    assert len(written) == 2 * (2 * len(gallery.PER_RUN) + len(gallery.PER_PRESET)) + 1
    assert {"tiny/ddp", "tiny/zero1-overlap", "tiny"} == {entry["run"] for entry in manifest}
    for entry in manifest:
        assert entry["alt"] and entry["title"] and entry["hardware"] in entry["caption"]
        assert (entry["backend"], entry["link"], entry["date"]) == ("gloo", "none", "2025-01-31")
        assert re.fullmatch(r"tiny/([\w-]+/)?\w+\.light\.(svg|png)", entry["file"])
    order = [
        e["alt"].index("ddp") < e["alt"].index("zero1-overlap")
        for e in manifest
        if "comparison" in e["file"]
    ]
    assert order == [True, True]
    with pytest.raises(RunError, match="no recorded run"):
        gallery.draw_all(tmp_path / "nowhere", tmp_path)
