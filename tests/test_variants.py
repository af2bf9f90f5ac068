"""A variant is one class and one line in a registry: parity, run, figures, pages and tables follow."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from zero1_helpers import ddp
from zero1_helpers.measure.link import Link
from zero1_helpers.measure.runs import find_runs, load_run
from zero1_helpers.report.gallery import draw_all
from zero1_helpers.report.plan import Network, Workload, plan
from zero1_helpers.report.tables import report, results_table
from zero1_helpers.training import record, variants
from zero1_helpers.training.variants import VARIANTS

from .models import MLP, data, loss_of, make
from .test_parity import bits_differ, max_difference

# The guide in CONTRIBUTING.md, to the letter: its class where `ddp` is, its line where `variants` is.
GUIDE = Path(__file__).parent.with_name("CONTRIBUTING.md").read_text(encoding="utf-8")
CLASS, LINE = (
    textwrap.dedent(text) for text in re.findall(r"^ *```python\n(.*?)^ *```", GUIDE, re.M | re.S)
)
exec(CLASS, added := dict(vars(ddp)))
DUMMY = eval(
    LINE.strip().rstrip(","), {**vars(variants), "OneCollectiveDDP": added["OneCollectiveDDP"]}
)


def equal_to_one_process(rank, world_size, steps=4):
    """{name: largest difference of any parameter} after some steps of Adam, in float64."""
    found = {}
    for variant in [*VARIANTS.values(), DUMMY]:
        reference, model = make(MLP), make(MLP)
        reference_optimizer = variants.adam(reference, 0.01)
        wrapped, optimizer = variant.build(model, 0.01, 300 / 2**20)
        for step in range(steps):
            x, y = data(step, world_size)
            loss_of(reference, x.flatten(0, 1), y.flatten(0, 1)).backward()
            reference_optimizer.step()
            reference_optimizer.zero_grad()
            loss_of(wrapped, x[rank], y[rank]).backward()
            variant.after_backward(wrapped, optimizer)
            assert not bits_differ(model), f"{variant.name}: ranks differ"
        found[variant.name] = max_difference(model, reference)
    return found


def test_every_line_of_the_registry_trains_as_one_process(ranks):
    for found in ranks(equal_to_one_process, 3):
        assert set(found) == {*VARIANTS, DUMMY.name}
        assert max(found.values()) < 1e-9, found


def record_both(rank, world_size, folder):
    with pytest.MonkeyPatch.context() as patch:  # these processes are used again
        patch.setitem(VARIANTS, DUMMY.name, DUMMY)
        record.record_missing(["ddp", DUMMY.name], folder, "tiny", steps=2)


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    ranks(record_both, 2, str(root / "tiny"))
    return root


def test_a_new_variant_is_in_every_figure_page_and_table(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(VARIANTS, DUMMY.name, DUMMY)
    assert variants.get_variant(DUMMY.name) is DUMMY  # what `zero1 record` asks
    runs = [load_run(path) for path in find_runs(folder)]
    collectives = {run.variant: sum(c["calls"] for c in run.record["collectives"]) for run in runs}
    assert collectives[DUMMY.name] == 1 < collectives["ddp"]
    assert list(results_table(runs).index) == ["ddp", DUMMY.name]
    assert f"| {DUMMY.name} |" in report(runs)
    planned = plan(Workload(1e9, 1.0), 4, Network(Link(1e9)))
    assert planned.loc[DUMMY.name, "exposed_s"] == planned.loc[DUMMY.name, "communication_s"] > 0
    assert draw_all(folder, tmp_path, "light", progress=lambda line: None) == 0
    manifest = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    kinds = {
        entry["file"].split("/")[-1].split(".")[0]
        for entry in manifest
        if entry["run"] == f"tiny/{DUMMY.name}"
    }
    assert kinds == {"memory", "temporal", "overlap", "kernels", "schedule"}
    for entry in manifest:
        if entry["file"].startswith(("tiny/comparison", "tiny/bytes_per_rank")):
            assert DUMMY.name in entry["alt"]
    assert (tmp_path / "tiny" / "timelines.html").is_file()
