"""What-if on paper: the ZeRO paper's table, two-level collectives, and what a schedule hides."""

import pytest

from zero1_helpers.cli import main
from zero1_helpers.measure.link import PRESETS, Link
from zero1_helpers.memory_math import paper_table
from zero1_helpers.report.plan import Network, Workload, growth, plan, schedules, stages

GB = 1e9
FAST, SLOW = Link(100 * GB), Link(10 * GB, 1e-3)

# Table 1 of the ZeRO paper for 7.5e9 parameters: GB per device of P_os, P_os+g, P_os+g+p.
TABLE_1 = {
    1: "120 120 120",
    4: "52.5 41.3 30",
    16: "35.6 21.6 7.5",
    64: "31.4 16.6 1.88",
    256: "30.4 15.4 0.47",
    1024: "30.1 15.1 0.12",
}


@pytest.mark.parametrize("ranks", TABLE_1)
def test_the_papers_table(ranks):
    totals = stages(7.5e9, "mixed", ranks)["total"]
    for stage, printed in zip((1, 2, 3), TABLE_1[ranks].split(), strict=True):
        last_digit = 10.0 ** -len(printed.partition(".")[2])
        assert abs(totals[stage] - float(printed)) <= last_digit / 2 + 1e-9
    assert [row for row in paper_table() if row["N"] == ranks] == [
        {"N": ranks, **{f"stage {s}": totals[s] for s in (1, 2, 3)}}
    ]


def test_one_level_is_the_emulated_link():
    network = Network(SLOW)
    for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        assert network.seconds(op, GB, 64) == SLOW.seconds(op, GB, 64)
        assert network.seconds(op, GB, 1) == 0


def test_two_levels_are_all_inside_and_a_share_between():
    network = Network(FAST, SLOW, node_size=8)
    inside = 2 * 7 / 8 * 4 / 100
    between = 1e-3 * 3 + 2 * 7 / 8 * (4 / 8) / 10  # 8 nodes: a tree of 3 levels
    assert network.seconds("all_reduce", 4 * GB, 64) == pytest.approx(inside + between)
    assert network.seconds("all_reduce", 4 * GB, 8) == pytest.approx(inside)
    assert network.seconds("all_reduce", 4 * GB, 64) == pytest.approx(
        network.seconds("reduce_scatter", 4 * GB, 64)
        + network.seconds("all_gather", 4 * GB, 64)
        - 1e-3 * 3
    )


def test_each_schedule_by_hand():
    """1 GB of gradients in 40 buckets, on a link that takes 0.3 s for a ring's all-reduce among 4."""
    work = Workload(0.5e9, compute=3.0, recipe="bf16", tensors=40, bucket_cap_mb=1e-3)
    rows = plan(work, 4, Network(Link(5 * GB)))
    reduce, broadcast, half = 0.3, 0.2, 0.15
    hidden = 1 / 40  # the last bucket alone is exposed
    expected = {
        "ddp": reduce,
        "zero1": reduce + broadcast,
        "zero1-async": hidden * reduce + broadcast,
        "zero1-bucket": hidden * reduce + broadcast,
        "zero1-overlap": hidden * (reduce + broadcast),
        "zero1-balanced": reduce + broadcast,  # other owners, the same bytes
        "flat": hidden * 2 * half,
        "torch-ddp": hidden * reduce,
        "zero1-overlap, clipped": hidden * reduce + broadcast,
        "flat, clipped": hidden * half + half,
        "flat, lazy, clipped": hidden * half + hidden * half,
    }
    assert set(schedules()) == set(expected)
    assert rows["exposed_s"].to_dict() == pytest.approx(expected)
    assert rows["sent_gb"].to_dict() == pytest.approx(
        {name: 1.5 if name.startswith(("ddp", "torch", "flat")) else 2.5 for name in expected}
    )
    assert (rows["step_s"] == 3.0 + rows["exposed_s"]).all()


def test_what_backward_is_too_short_for_is_exposed():
    work = Workload(0.5e9, compute=0.3, recipe="bf16", tensors=40, bucket_cap_mb=1e-3)
    exposed = plan(work, 4, Network(Link(5 * GB)))["exposed_s"]
    assert exposed["zero1-overlap"] == pytest.approx(0.5 - 0.2 * (1 - 1 / 40))
    lazy = plan(work, 4, Network(Link(1 * GB)))["exposed_s"]["flat, lazy, clipped"]  # 0.75 s each
    assert lazy == pytest.approx((0.75 - 0.2 * (1 - 1 / 40)) + (0.75 - 0.1 * (1 - 1 / 40)))
    embedding = Workload(0.5e9, 3.0, "bf16", 40, 1e-3, last_share=0.13)
    assert plan(embedding, 4, Network(Link(5 * GB)))["exposed_s"]["zero1-overlap"] == pytest.approx(
        0.065
    )


def test_exposed_communication_grows_with_the_ranks_and_in_the_posts_order():
    table = growth(Workload(7.5e9, 0.9), Network(PRESETS["nvlink"], PRESETS["100gbit"]))
    assert list(table.columns) == [1, 8, 64, 512, 1024, 10_000]
    assert (table[1] == 0).all() and (table.diff(axis=1).iloc[:, 1:] >= -1e-9).all(axis=None)
    order = ["zero1", "ddp", "zero1-async", "zero1-overlap", "flat"]
    for ranks in table.columns[1:]:
        assert table[ranks][order].is_monotonic_decreasing


def test_command_line(capsys):
    assert main("plan --params 7.5e9 --ranks 64 --link nvlink --between 100gbit".split()) == 0
    text = capsys.readouterr().out
    assert "On paper" in text and "31.41" in text and "10000" in text
    for wrong in (
        ["--ranks", "0"],
        ["--params", "-1"],
        ["--link", "none"],
        ["--link", "fast"],
        ["--recipe", "fp8"],
        ["--tensors", "0"],
        ["--node", "0"],
    ):
        arguments = {"--params": "1e9", "--ranks": "4", "--link": "nvlink"} | dict([wrong])
        assert main(["plan", *(word for pair in arguments.items() for word in pair)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and len(said.err.splitlines()) == 1
