"""The command line: any terminal, any reader of its output, any number; the exit status tells the truth."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zero1_helpers.cli import main

from .test_runs import make_run

ZERO1 = [sys.executable, "-m", "zero1_helpers"]
PLAN = ["plan", "--params", "1e9", "--ranks", "4", "--link", "100GB/s"]
NARROW = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    root = tmp_path_factory.mktemp("recorded")
    for name in ("ddp", "zero1"):
        make_run(root / "tiny" / name, 1, variant=name)
    return root


@pytest.mark.parametrize(
    "encoding", [NARROW, {"PYTHONIOENCODING": "latin-1"}], ids=["ascii", "latin-1"]
)
def test_a_terminal_that_is_not_utf8_shows_what_it_can(recorded, encoding):
    for command in (["record", "--help"], ["report", "--runs", str(recorded)]):
        done = subprocess.run(
            [*ZERO1, *command], env=os.environ | encoding, capture_output=True, timeout=200
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert len(done.stdout) > 300


@pytest.mark.parametrize("lines", [0, 1])
def test_a_reader_who_leaves_early_is_no_failure(recorded, tmp_path, lines):
    command = [*ZERO1, "export-trace", str(recorded), "--html", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(100) == 0 and not error
    assert len(list(tmp_path.rglob("trace.html"))) == 2  # all the same


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_what_could_not_be_written_is_a_failure(recorded):
    command = [*ZERO1, "report", "--runs", str(recorded)]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode != 0 and done.stderr.count("\n") == 1


NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "0",
    "-1",
    "1e400",
    "9" * 5000,
    "many",
    "",
    "1.5.2",
    "\N{INFINITY}",
]


@pytest.mark.parametrize("option", ["--params", "--ranks", "--node", "--tensors", "--flops"])
def test_no_number_is_a_traceback(option, capsys):
    for number in NUMBERS:
        assert main([*PLAN, f"{option}={number}"]) == 2, number
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("zero1 plan: ") and option in line and len(line) < 300


LINKS = [
    "nan",
    "nanMB/s",
    "infGB/s",
    "-1MB/s",
    "0MB/s",
    "1e999MB/s",
    "1MB/s + 1e999s",
    "1MB/s + nan s",
]


@pytest.mark.parametrize("link", [*LINKS, "1..2MB/s", "9" * 5000])
def test_no_link_is_a_traceback(link, capsys):
    assert main([*PLAN[:-1], link]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_large_numbers_that_make_sense_are_planned(capsys):
    for option, number in (("ranks", 10**7), ("params", 1e18), ("tokens", 0), ("node", 10**7)):
        assert main([*PLAN, f"--{option}={number}", "--between", "1MB/s"]) == 0
        assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize("mu", ["\N{MICRO SIGN}", "\N{GREEK SMALL LETTER MU}", "u"])
def test_both_signs_for_micro_are_read(mu, capsys):
    assert main([*PLAN[:-1], f"1GB/s + 5{mu}s"]) == 0
    assert "0.005 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["view", "x", "--port", "99999"],
        ["view", "x", "--port", "-1"],
        ["record", "--variant", "ddp", "--out", "x", "--ranks", "10000000000"],
        ["record", "--variant", "ddp", "--out", "x", "--steps", "nan"],
        ["record", "--variant", "ddp", "--out", "x", "--batch-size", "0"],
        ["figures", "--theme"],
        ["nothing"],
        [],
    ],
)
def test_wrong_use_is_one_line(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert re.fullmatch(r"zero1.*\n", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_bad_run_does_not_stop_the_others(recorded, tmp_path, capsys):
    make_run(tmp_path / "runs" / "tiny" / "zero1", 1)
    for name, data in (("a", b""), ("b", b"[]"), ("c", b"{}")):
        (tmp_path / "runs" / "tiny" / name).mkdir()
        (tmp_path / "runs" / "tiny" / name / "run.json").write_bytes(data)
    os.mkfifo(tmp_path / "runs" / "tiny" / "pipe.rank0.gz")  # looks like an unfinished run
    for command in (
        ["report", "--runs"],
        ["export-trace", "--html", "--out", str(tmp_path / "out")],
    ):
        assert main([*command, str(tmp_path / "runs")]) == 1
        said = capsys.readouterr()
        assert said.err.count("\n") == 4 and "zero1" in said.out
    few = [
        "--only",
        "memory",
        "--theme",
        "light",
        "--format",
        "png",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(["figures", "--runs", str(tmp_path / "runs"), *few]) == 1
    assert (
        tmp_path / "out" / "tiny" / "zero1" / "memory.light.png"
    ).exists() and capsys.readouterr()
    for name in ("a", "b", "c"):
        assert main(["view", str(tmp_path / "runs" / "tiny" / name), "--no-browser"]) == 1
        assert capsys.readouterr().err.count("\n") == 1
