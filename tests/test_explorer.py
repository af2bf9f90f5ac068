"""Traces and timelines as pages: what they hold, and what headless Chromium sees of them."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
from PIL import Image

from zero1_helpers.cli import main
from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.runs import load_run
from zero1_helpers.report import memory, pages, server, style

from .test_runs import cuda_trace, make_run

LOOKS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("traces") / "tiny" / "zero1-overlap", 4)


@pytest.fixture(scope="module")
def run(folder):
    return load_run(folder)


def named(trace, kind):
    return {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == f"{kind}_name"
    }


def test_a_merged_trace_has_every_span_of_every_rank_and_its_memory(run):
    trace = pages.merged_trace(run)
    assert sorted(named(trace, "process").values()) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    tracks = named(trace, "thread")
    for rank in range(4):
        pid = next(
            pid for (pid, _), name in named(trace, "process").items() if name == f"rank {rank}"
        )
        spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]
        wanted = [e for e in run.trace(rank)["traceEvents"] if e["ph"] == "X"]
        assert [(e["ts"], e["dur"], e["tid"]) for e in spans] == [
            (e["ts"], e["dur"], e["tid"]) for e in wanted
        ]
        of = {}
        for e in spans:
            of.setdefault(tracks[pid, e["tid"]], set()).add(e["name"])
        assert set(of) == {"phases", "compute", "communication"}
        assert of["communication"] == {"gloo:all_reduce", "gloo:broadcast"}
        assert all(name.startswith("aten::") for name in of["compute"])
        assert {"backward", "launch 0", "ProfilerStep#0"} <= of["phases"]
        counters = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == pid]
        line = memory.get_memory_timeline(run, rank)
        assert max(sum(e["args"].values()) for e in counters) == line["total"].max()


def test_a_cuda_run_too(tmp_path):
    run = load_run(make_run(tmp_path, 2, cuda_trace, backend="nccl", device="cuda"))
    trace = pages.merged_trace(run)
    tracks = named(trace, "thread")
    talk = {
        tracks[e["pid"], e["tid"]]
        for e in trace["traceEvents"]
        if e["ph"] == "X" and "nccl" in e["name"]
    }
    assert talk == {"communication"} and set(tracks.values()) >= {
        "phases",
        "compute",
        "communication",
    }


def test_the_same_run_gives_the_same_pages(run, folder):
    again = load_run(folder)
    assert pages.trace_html(run) == pages.trace_html(again)
    colours = {name: style.COLOURS[name] for name in style.STACK}
    both = [pages.timelines_html([r], colours) for r in (run, again)]
    assert both[0] == both[1] and len(both[0]) < 3_000_000


def test_a_trace_too_long_for_a_page_loses_short_kernels_and_says_so(run, monkeypatch):
    whole = pages.trace_html(run)
    assert len(whole.encode()) < pages.LARGEST == 4_000_000 and "µs and more" not in whole
    monkeypatch.setattr(pages, "LARGEST", len(whole.encode()) - 2000)
    short = pages.trace_html(run)
    assert len(short.encode()) < pages.LARGEST and "µs and more" in short
    monkeypatch.setattr(pages, "LARGEST", 1_000_000 // 2)
    with pytest.raises(RunError, match="too long for a page"):
        pages.trace_html(run)


def test_damaged_runs_are_named_and_the_others_exported(folder, tmp_path, capsys):
    for name in ("ddp", "zero1"):
        make_run(tmp_path / "runs" / "tiny" / name, variant=name)
    (tmp_path / "runs" / "tiny" / "ddp" / "trace.rank1.json.gz").write_bytes(b"no gzip")
    assert (
        main(["export-trace", str(tmp_path / "runs"), "--html", "--out", str(tmp_path / "out")])
        == 1
    )
    said = capsys.readouterr()
    assert re.fullmatch(
        r"zero1 export-trace: skipped: .*ddp/trace.rank1.json.gz: damaged.*\n", said.err
    )
    assert said.out == f"{tmp_path / 'out' / 'tiny' / 'zero1' / 'trace.html'}\n"
    (tmp_path / "file").write_text("")
    assert main(["export-trace", str(folder), "--html", "--out", str(tmp_path / "file")]) == 2
    assert re.fullmatch(
        r"zero1 export-trace: \S+: (Not a directory|File exists)\n", capsys.readouterr().err
    )


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_the_exported_trace_follows_the_readers_theme_and_width(
    chromium, run, tmp_path, width, theme
):
    path = tmp_path / "trace.html"
    path.write_text(pages.trace_html(run))
    chromium.open(path.as_uri(), width, theme=theme)
    chromium.wait("document.body.innerText.includes('rank 3')")
    seen = tmp_path / "seen.png"
    chromium.screenshot(seen)
    shown = np.asarray(Image.open(seen).convert("L")).astype(int)
    paper, names = np.median(shown), shown[100:400, :130]
    assert paper > 200 if theme == "light" else paper < 60
    assert (abs(names - np.median(names)) > 120).mean() > 0.005  # tracks' names can be read
    named, whole = chromium.ask(
        "[document.querySelector('tr-ui-b-heading').offsetWidth, innerWidth]"
    )
    assert named < 0.4 * whole


def quiet(page):
    """No complaint, and nothing asked of the network."""
    assert not page.errors, page.errors
    assert not page.outside(), page.outside()
    assert page.requests  # else the line above would show nothing


def test_chromium_shows_the_exported_trace(chromium, folder, tmp_path, capsys):
    assert main(["export-trace", str(folder), "--html", "--out", str(tmp_path)]) == 0
    path = tmp_path / "tiny" / "zero1-overlap" / "trace.html"
    assert capsys.readouterr().out == f"{path}\n"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]  # one file has all of it
    chromium.open(path.as_uri())
    chromium.wait("document.body.dataset.ranks")
    chromium.wait("[0, 1, 2, 3].every(rank => document.body.innerText.includes('rank ' + rank))")
    text = chromium.ask("document.body.innerText")
    assert text.count("communication") == 8 and text.count("memory (bytes)") == 4
    assert "ZeRO-1 + overlap" in text and "2025-01-31" in text
    quiet(chromium)


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_chromium_shows_the_timelines(chromium, run, tmp_path, width, theme):
    colours = {name: style.COLOURS[name] for name in style.STACK}
    path = tmp_path / "timelines.html"
    path.write_text(pages.timelines_html([run], colours))
    chromium.open(f"{path.as_uri()}#zero1-overlap", width, theme=theme)
    chromium.wait("'ready' in document.body.dataset")
    chromium.ask("(find('rank').value = 2, find('rank').onchange())")
    line = memory.timelines(run)[2]
    top = line.loc[line["total"].idxmax()]
    said = chromium.ask("find('peak').textContent")
    assert said.startswith(f"peak {top['total'] / 1e6:.2f} MB") and said.endswith(top["doing"])
    x, y = chromium.ask(
        "(b => [b.left + b.width / 2, b.top + b.height / 2])"
        "(document.querySelector('.nsewdrag').getBoundingClientRect())"
    )
    chromium.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    chromium.wait("document.querySelector('.hoverlayer')?.textContent.includes('total')")
    hover = chromium.ask("document.querySelector('.hoverlayer').textContent")
    assert (
        "params" in hover and " MB" in hover and "in step" in hover and re.match(r"[\d.]+ s", hover)
    )
    paper = chromium.ask("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 27)"}[theme]
    assert chromium.ask("document.documentElement.scrollWidth") <= width
    quiet(chromium)


def test_chromium_shows_perfetto_with_all_ranks(chromium, run):
    with server.serve(run, 0) as viewer:
        threading.Thread(target=viewer.serve_forever, daemon=True).start()
        try:
            assert viewer.server_address[0] == "127.0.0.1"  # nobody else on the network sees it
            chromium.open(viewer.address)
            chromium.wait(
                "['rank 0', 'rank 3', 'communication', 'memory (bytes) params']"
                ".every(text => document.body.innerText.includes(text))"
            )
            quiet(chromium)
            chromium.open("about:blank")
        finally:
            viewer.shutdown()


def test_view_serves_until_it_is_interrupted(folder):
    command = [
        sys.executable,
        "-m",
        "zero1_helpers",
        "view",
        str(folder),
        "--port",
        "0",
        "--no-browser",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith(f"{folder} in Perfetto (Ctrl-C ends it): http://127.0.0.1:")
        address = line.split()[-1].split("/#!")[0]
        trace = json.load(urllib.request.urlopen(f"{address}/localtrace"))
        assert sorted(named(trace, "process").values()) == ["rank 0", "rank 1", "rank 2", "rank 3"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/../../../METADATA")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0 and not process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken(run, folder, capsys):
    with server.serve(run, 0) as viewer:
        port = viewer.server_address[1]
        assert main(["view", str(folder), "--port", str(port), "--no-browser"]) == 2
        assert capsys.readouterr().err.splitlines() == [
            f"zero1 view: port {port}: Address already in use; try another --port"
        ]


@pytest.mark.parametrize(
    "command", [["view", "{}", "--no-browser"], ["export-trace", "{}", "--html"]]
)
def test_bad_runs_get_one_line_and_leave_nothing(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    make_run(tmp_path / "broken")
    (tmp_path / "broken" / "trace.rank0.json.gz").write_bytes(b"no gzip")
    for name, message in {
        "empty": "missing|no recorded run",
        "broken": "rank0.json.gz: damaged",
    }.items():
        assert main([part.format(name) for part in command]) in (1, 2)
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(message, line)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "empty"]
