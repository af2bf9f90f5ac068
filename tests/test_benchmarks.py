"""The race: everyone gets the same work, and what is counted is what a ring sends."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from zero1_helpers.training.variants import VARIANTS

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    sys.path.insert(0, str(BENCHMARKS))
    import race

    yield race
    sys.path.remove(str(BENCHMARKS))


def test_a_race_of_all(race):
    names = list(race.CONTENDERS)
    assert set(VARIANTS) < set(names)
    times, about = race.run_race(
        names, "mlp", ["none", "10GB/s"], 1, 1, ranks=2, depth=4, details=True
    )
    assert len(times) == 2 * len(names) and (times["seconds"] > 0).all()
    assert set(times.loc[times["link"] == "none", "late"]) == {0.0}
    psi = 4 * 4 * (512 * 512 + 512) / 1e6  # MB
    sent, state = about["sent_mb"], about["state_mb"]
    assert sent["compute"] == about["collectives"]["compute"] == 0
    for name in (
        "ddp",
        "torch-ddp",
        "torch-fsdp2",
    ):  # an all-reduce, or a reduce-scatter and an all-gather
        assert sent[name] == pytest.approx(psi, rel=1e-3), name
    for name in ("zero1", "zero1-bucket", "zero1-overlap", "torch-zero", "torch-zero-views"):
        assert sent[name] == pytest.approx(2 * psi, rel=1e-3), name
        assert state[name] == pytest.approx(psi, rel=1e-2), name  # half of Adam's two moments
    assert state["ddp"] == state["torch-ddp"] == pytest.approx(2 * psi)
    assert (about["peak"] > psi).all()
    if "deepspeed" in names:  # an all-reduce, and an all-gather of the parameters
        assert sent["deepspeed"] == pytest.approx(1.5 * psi, rel=1e-3)
        assert state["deepspeed"] == pytest.approx(
            1.5 * psi, rel=1e-2
        )  # with a copy of the weights


def raced(seconds: dict[str, list[float]], link="100MB/s") -> pd.DataFrame:
    """The times of a race, from each contender's seconds, round by round."""
    rows = [(name, number, value) for name in seconds for number, value in enumerate(seconds[name])]
    times = pd.DataFrame(rows, columns=["contender", "round", "seconds"])
    return times.assign(model="mlp", link=link)


def test_ratios_are_taken_within_a_round(race):
    times = raced({"compute": [1.0, 10.0, 1.0], "ddp": [2.0, 30.0, 2.5]})
    assert race.ratios(times, "compute").loc["ddp"].to_dict() == {
        "median": 2.5,
        "min": 2.0,
        "max": 3.0,
    }


def test_the_floor_is_the_longer_of_computing_and_sending(race):
    """10 MB over 100 MB/s are 0.1 s: more than computing takes in round 0, less than in round 1."""
    seconds = {"compute": [0.05, 0.2], "flat": [0.15, 0.3]}
    about = pd.DataFrame({"sent_mb": [0.0, 10.0], "collectives": [0, 4]}, index=list(seconds))
    of_floor = race.of_the_floor(raced(seconds), about).loc["flat"]
    assert of_floor[["min", "max"]].tolist() == pytest.approx([1.5, 1.5])
    without_link = race.of_the_floor(raced(seconds, "none"), about).loc["flat"]
    assert without_link[["min", "max"]].tolist() == pytest.approx([1.5, 3.0])


def test_what_is_asked_is_answered_by_the_numbers(race):
    seconds = {
        "compute": [0.01] * 3,
        "flat": [0.69, 0.71, 0.72],
        "torch-zero": [1.0] * 3,
        "zero1-overlap": [0.5, 0.72, 0.9],
    }
    about = pd.DataFrame({"sent_mb": 40.0, "collectives": 4}, index=list(seconds))
    answers = race.bars(raced(seconds), {"mlp": about}).set_index(["contender", "of"])
    assert answers["met"].to_dict() == {
        ("zero1-overlap", "torch-zero"): "yes",
        ("flat", "zero1-overlap"): "yes",
        ("flat", "torch-zero"): "within the spread",  # of 0.70
        ("zero1-overlap", race.FLOOR): "no",
        ("flat", race.FLOOR): "no",
    }
    assert answers.loc[("zero1-overlap", race.FLOOR), "takes"] == "1.80 (1.25 to 2.25)"


def test_a_link_that_is_none_is_refused_in_one_line(race, tmp_path):
    with pytest.raises(SystemExit, match="unknown link 'fast'"):
        race.main(["--links", "fast", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="unknown contender 'horovod'"):
        race.main(["--contenders", "horovod", "--out", str(tmp_path)])
