"""A finished run is not lost: what fails after training is said on every rank, and the parts are kept."""

import errno
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch

import zero1_helpers as z
from zero1_helpers.measure import environment, files, runs, trace
from zero1_helpers.measure.runs import RunError, load_run


def some_steps(folder, name="zero1.mine", **about):
    with z.get_profiler(folder, 2, **about) as prof:
        for _ in range(2):
            with torch.profiler.record_function(name):
                torch.ones(4) + 1
            prof.step(1.0)
    return prof


NAMES = [
    'quotes "x" \\',
    "new\nline",
    '", "pid": 3, "x": "',
    "zero1.\x1b[31m\u2028",
    "zero1." + "long" * 999,
]


def odd_names(rank, world_size, folder):
    for number, name in enumerate(NAMES):
        some_steps(folder / str(number), name if rank else "plain")  # on one rank only


def test_odd_names_of_ranges_do_not_cost_the_run(ranks, tmp_path):
    ranks(odd_names, 2, tmp_path)
    for number in range(len(NAMES)):
        load_run(tmp_path / str(number))


def failures(rank, world_size, folder):
    kept = some_steps(folder / "kept")  # an earlier run, which must stay whole
    before = {path.name: path.read_bytes() for path in (folder / "kept").iterdir()}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_here(path, data):
        if "kept" in str(path):
            full()
        return write(path, data)

    write = files.write_atomic
    tempfile.tempdir = str(folder)
    if rank == 1:  # the disk is full for one rank
        files.write_atomic = full_here
    with pytest.raises(RunError, match="No space left.*; the run is in") as failed:
        some_steps(folder / "kept")
    files.write_atomic = write
    load_run(Path(str(failed.value).split("the run is in ")[1].split(" instead")[0]))
    assert {
        path.name: path.read_bytes() for path in (folder / "kept").iterdir() if path.is_file()
    } == before

    kept.save(folder / "again")  # what is still in memory can be written once more
    load_run(folder / "again")

    if rank == 1:  # the profiler's text cannot be mended
        trace.NAME = re.compile("nothing")
        name = 'a "quoted" name'
    else:
        name = "plain"
    with pytest.raises(RunError, match="rank 1: .*unread.rank1.json"):
        some_steps(folder / "unread", name)
    if rank == 1:
        assert 'a "quoted" name' in (folder / "unread" / "unread.rank1.json").read_text(
            encoding="utf-8"
        )


def test_every_rank_hears_of_a_failure_and_nothing_is_lost(ranks, tmp_path):
    ranks(failures, 2, tmp_path, timeout=60)


def odd_facts(rank, world_size, folder):
    with pytest.raises(RunError, match="seed"):  # before any training
        z.get_profiler(folder / "x", 1, seed="many")
    with pytest.raises(RunError, match="data.source"):
        z.get_profiler(folder / "x", 1, data={"name": "x"})
    os.chdir(folder)
    some_steps(".", variant="data@home", title="a $x$ | <b>")
    os.makedirs("data@host #1\n", exist_ok=True)
    some_steps("data@host #1\n")
    metadata = environment.importlib.metadata
    found, metadata.version = metadata.version, lambda name: metadata.distribution("no-such-thing")
    try:
        some_steps("none")
    finally:
        metadata.version = found
        os.chdir("/")


def test_facts_about_person_and_machine_are_not_needed(ranks, tmp_path):
    ranks(odd_facts, 1, tmp_path)
    assert load_run(tmp_path).variant == "data@home"  # a word of the user's, not a place
    assert load_run(tmp_path / "data@host #1\n").variant == "data@host #1\N{REPLACEMENT CHARACTER}"
    assert set(load_run(tmp_path / "none").record["versions"]) == {"python"}


def test_scrub_masks_places_and_never_words():
    private = {
        "a": [
            "/Users/alice/x/train.py(7): f",
            "~/data/pairs.json",
            "file:///home/data/x.py",
            "data:/home/data/y.py",
            "file://node17/home/data/z.py",
            "~alice/x.py",
        ],
        "node17": "on node17",
        "c": "alice@node17.lab.example",
        "d": "see /etc/hosts and /opt",
        "e": "/home/zero1 (1)/x.py",
        "data": "data",
    }
    assert runs.scrub(private) == {
        "a": ["train.py(7): f", "pairs.json", "x.py", "data:y.py", "z.py", "x.py"],
        "node17": "on node17",
        "c": "-@-",
        "d": "see hosts and opt",
        "e": "x.py",
        "data": "data",
    }
    public = [
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "https://example.org/a/b",
        "~5 MB/s",
        "aten::mm",
        "malice",
        3,
        None,
        0.5,
        "1 / 2",
        "a/b/c",
    ]
    assert runs.scrub(public) == public
    assert json.loads(json.dumps(runs.scrub({"x": "a\x1b[31m\nb"})))["x"].isprintable()
