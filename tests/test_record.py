"""A run from training to the table: what it holds is true, and the post's own loop records one."""

import json
import re
import subprocess
import sys

import pytest
import torch

import zero1_helpers as z
from zero1_helpers.cli import main
from zero1_helpers.measure.runs import find_runs, load_run
from zero1_helpers.measure.trace import count_collectives
from zero1_helpers.memory_math import predict
from zero1_helpers.partition import Flat
from zero1_helpers.report.frames import comm_comp_overlap, temporal_breakdown
from zero1_helpers.report.tables import markdown, replace_marked, report, results_table
from zero1_helpers.training.presets import get_preset
from zero1_helpers.training.workload import meta_smol_model


def record_all(rank, world_size, folder):
    z.record_missing(z.VARIANTS, folder, "tiny")
    before = {path: path.stat().st_mtime_ns for path in find_runs(folder)}
    z.record_missing(z.VARIANTS, folder, "tiny")  # nothing is missing
    assert before == {path: path.stat().st_mtime_ns for path in find_runs(folder)}


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    ranks(record_all, 2, folder, timeout=240)
    return {name: load_run(folder / name) for name in z.VARIANTS}, folder


def test_every_variant_trains_alike_and_holds_what_was_predicted(recorded):
    runs, _ = recorded
    largest = max(p.nbytes for p in meta_smol_model("tiny").parameters())
    bucket = get_preset("tiny").bucket_cap_mb * 2**20 + largest
    for name, run in runs.items():
        r = run.record
        assert r["losses"] == pytest.approx(runs["ddp"].record["losses"], abs=1e-5)
        for measured, predicted in zip(r["memory"], r["predicted"], strict=True):
            assert measured["opt_state"] == predicted["opt_state"]
            twice = (
                measured["params"] - predicted["params"]
            )  # about two buckets', when all plan anew
            assert (0 <= twice < 2.1 * bucket) if name == "zero1-overlap" else (twice == 0)
            together = measured["peak_states"]
            assert predicted["params"] + predicted["opt_state"] < together <= measured["peak"]
    grads = {name: run.record["memory"][0]["grads"] for name, run in runs.items()}
    whole = runs["ddp"].record["predicted"][0]["grads"]
    assert grads["ddp"] == grads["zero1"] == grads["zero1-balanced"] == whole
    assert grads["zero1-overlap"] < whole / 2
    flat = predict(
        meta_smol_model("tiny"), torch.optim.Adam, 2, Flat(get_preset("tiny").bucket_cap_mb)
    )
    for measured, predicted in zip(runs["flat"].record["memory"], flat, strict=True):
        assert measured["grads"] <= predicted.grads < whole / 2
        assert 0.8 * predicted.total < measured["peak_states"] <= predicted.total
        assert predicted.total < runs["zero1-bucket"].record["memory"][0]["peak_states"]


def test_collectives_are_counted(recorded):
    runs, _ = recorded
    model = runs["ddp"].record["model"]
    tensors, psi = model["tensors"], model["parameters"]
    calls, size = {}, {}
    for name, run in runs.items():
        calls[name] = {c["op"]: c["calls"] for c in run.record["collectives"]}
        size[name] = {c["op"]: c["bytes"] for c in run.record["collectives"]}
    for name in ("ddp", "zero1", "zero1-async", "zero1-bucket", "zero1-overlap", "zero1-balanced"):
        assert size[name]["all_reduce"] == 4 * (psi + tensors)  # a flag travels with each gradient
        planned = name in ("zero1-async", "zero1-bucket", "zero1-overlap")  # the order, once: int64
        sent = 4 * psi + round(8 * tensors / run.record["steps"]) * planned
        assert name == "ddp" or size[name]["broadcast"] == sent
    assert calls["ddp"] == {"all_reduce": tensors + 1}
    assert calls["zero1"] == {"all_reduce": tensors + 1, "broadcast": tensors}
    assert calls["zero1-async"] == {"all_reduce": tensors, "broadcast": tensors}
    assert 2 < calls["zero1-bucket"]["all_reduce"] < 10
    assert calls["zero1-overlap"]["all_reduce"] == calls["zero1-bucket"]["all_reduce"]
    assert calls["zero1-overlap"]["broadcast"] < 20
    once = round(
        8 * tensors / runs["flat"].record["steps"]
    )  # the order; no flags, and no padding here
    assert size["flat"] == {"all_gather": 4 * psi, "reduce_scatter": 4 * psi, "broadcast": once}
    sent = sum(c["bytes_sent"] for c in runs["flat"].record["collectives"])
    assert sent == 2 * 4 * psi * (2 - 1) / 2 + once
    assert calls["flat"]["all_gather"] == calls["flat"]["reduce_scatter"] < 10


def test_what_is_synchronous_overlaps_nothing_and_what_is_not_does(recorded):
    runs, _ = recorded
    overlap = {name: comm_comp_overlap(run)["overlap_pct"].mean() for name, run in runs.items()}
    assert max(overlap["ddp"], overlap["zero1"]) < 1
    assert min(overlap["zero1-async"], overlap["zero1-bucket"], overlap["zero1-overlap"]) > 3
    assert overlap["flat"] > 3
    for run in runs.values():
        assert len(temporal_breakdown(run)) == 2


def test_the_table_and_the_report(recorded):
    runs, _ = recorded
    table = results_table(reversed(runs.values()))
    assert list(table.index) == list(z.VARIANTS)
    assert (table["opt_state"] == table["predicted"]).all()
    assert markdown(table).count("\n") == len(table) + 1
    text = report(runs.values())
    assert "| zero1-overlap |" in text and "Published in the post" in text
    assert runs["ddp"].setting in text


def test_a_page_is_only_changed_between_its_marks():
    from zero1_helpers.report.tables import MARKS

    page = f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n"
    assert replace_marked(page, "new") == f"before\n{MARKS[0]}\n\nnew\n\n{MARKS[1]}\nafter\n"
    with pytest.raises(ValueError, match="needs a line"):
        replace_marked("no marks", "new")


def the_posts_loop(rank, world_size, folder):
    """As the post writes it, against the package."""
    from zero1_helpers import (
        ShardedOptimizer,
        SimpleDDPBucketAsync,
        get_dataloader,
        get_dataset,
        get_profiler,
        get_smol_model,
        set_seed,
    )

    set_seed()
    train_ds = get_dataset()["train"]
    train_shard = train_ds.select(range(rank * 32, rank * 32 + 32))
    train_dataloader = get_dataloader(train_shard)
    model = get_smol_model()
    model.train()
    zero1_opt = ShardedOptimizer(torch.optim.Adam, model, lr=1e-3)
    ddp_model = SimpleDDPBucketAsync(model, zero1_optimizer=zero1_opt)
    max_steps = 2
    with get_profiler(f"{folder}/zero1-ddp-bucket-opt", max_steps) as prof:
        for i, batch in enumerate(train_dataloader):
            if i >= max_steps:
                break
            output = ddp_model(**batch)
            output.loss.backward()
            ddp_model.flush_bucket()
            ddp_model.wait_for_gradients()
            ddp_model.wait_for_broadcasts()
            prof.step()


def test_the_posts_own_loop_records_a_run(ranks, tmp_path):
    ranks(the_posts_loop, 2, tmp_path)
    run = load_run(tmp_path / "zero1-ddp-bucket-opt")
    assert run.record["steps"] == 2 and run.world_size == 2
    assert len(z.get_memory_timeline(run)) > 100
    assert comm_comp_overlap(run)["overlap_pct"].notna().all()


def broken_loop(rank, world_size, folder):
    with pytest.raises(ZeroDivisionError):
        with z.get_profiler(folder / "run", 2) as profiler:
            profiler.step(0.5)
            raise ZeroDivisionError
    assert not (folder / "run").exists()


def more_steps(rank, world_size, folder):
    with z.get_profiler(folder / "run", 2) as profiler:
        for loss in range(5):
            torch.ones(4) + 1
            profiler.step(loss + rank)


def test_a_loop_that_raises_writes_nothing_and_a_long_one_is_cut(ranks, tmp_path):
    ranks(broken_loop, 2, tmp_path)
    ranks(more_steps, 2, tmp_path)
    assert load_run(tmp_path / "run").record["losses"] == [0.5, 1.5]


def test_collectives_of_a_cuda_trace():
    def kernel(op, count, dtype):
        args = {
            "stream": 20,
            "Collective name": op,
            "In msg nelems": count,
            "Out msg nelems": count,
            "dtype": dtype,
        }
        return {
            "ph": "X",
            "cat": "kernel",
            "name": f"ncclDevKernel_{op}",
            "ts": 0,
            "dur": 1,
            "args": args,
        }

    events = [kernel("allreduce", 100, "BFloat16")] * 4 + [kernel("broadcast", 10, "Float")] * 2
    assert count_collectives(events, steps=2, world_size=4) == [
        {"op": "all_reduce", "calls": 2, "bytes": 400, "bytes_sent": 600},
        {"op": "broadcast", "calls": 1, "bytes": 40, "bytes_sent": 40},
    ]


# The command line


def test_recording_from_the_command_line(tmp_path):
    out = tmp_path / "tiny" / "zero1-overlap"
    command = [
        sys.executable,
        "-m",
        "zero1_helpers",
        "record",
        "--variant",
        "zero1-overlap",
        "--preset",
        "tiny",
        "--ranks",
        "2",
        "--steps",
        "2",
        "--batch-size",
        "4",
        "--out",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    record = load_run(out).record
    assert (record["world_size"], record["steps"], record["data"]["batch_size"]) == (2, 2, 4)
    assert not list(out.glob("raw*"))
    assert str(tmp_path) not in json.dumps(record)


def test_a_rank_that_fails_is_said_in_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "zero1_helpers",
        "record",
        "--variant",
        "ddp",
        "--preset",
        "tiny",
        "--ranks",
        "2",
        "--batch-size",
        "1000",
        "--out",
        tmp_path / "run",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and not list((tmp_path / "run").iterdir())
    assert re.fullmatch(
        r"zero1 record: rank \d: ValueError: \d+ examples are too few for a batch of 1000\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["record", "--variant", "zero3"],
            "unknown variant 'zero3'; small can be trained by ddp, zero1,",
        ),
        (
            ["record", "--variant", "flat-master", "--preset", "small"],
            "'flat-master'; small can be",
        ),
        (["record", "--variant", "ddp", "--preset", "huge"], "unknown preset 'huge'"),
        (["record", "--variant", "ddp", "--ranks", "0"], "--ranks"),
        (["record", "--variant", "ddp", "--out", "FOREIGN"], "is not a run, and not empty"),
        (["figures", "--runs", "EMPTY"], "no recorded run"),
        (["report", "--runs", "EMPTY"], "no recorded run"),
    ],
)
def test_bad_arguments_get_one_line(arguments, message, tmp_path, capsys):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    folders = {"FOREIGN": str(tmp_path / "foreign"), "EMPTY": str(tmp_path / "empty")}
    arguments = [folders.get(a, a) for a in arguments]
    if arguments[0] == "record" and "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "new")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "foreign" / "thesis.txt").read_text() == "mine"
