"""The page on trust: each of its sentences names the tests that prove it, and these tests are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")


def test_every_promise_names_tests_that_exist():
    promises = re.findall(r"^- (.+?)(?=^- |^$)", PAGE, re.MULTILINE | re.DOTALL)
    assert len(promises) > 20
    for promise in promises:
        named = re.findall(r"`(\w+\.py)::(\w+)`", promise)
        assert named, promise
        for file, test in named:
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{file} has no {test}"


def test_the_limits_are_those_of_the_code():
    from zero1_helpers.measure import files

    assert f"{files.LARGEST // 2**20} MiB are read of a file" in PAGE
    assert f"{files.LARGEST_UNPACKED // 2**20} MiB once" in PAGE.replace("\n", " ")
    assert f"{files.MOST_VALUES // 10**6} million values" in PAGE.replace("\n", " ")
