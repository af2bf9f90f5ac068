"""Fixtures and settings for all tests."""

import os
import sys

import pytest

from tests.ranks import Ranks

os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # notebooks run on this environment's kernel
os.environ.setdefault(
    "ZERO1_PRESET", "tiny"
)  # what a notebook says holds for each preset; this one is quick


collect_ignore = (
    [] if sys.platform.startswith("linux") else ["test_doors.py"]
)  # it does its work there


def pytest_collection_modifyitems(items):
    # Notebooks have nbmake's limit per cell; the whole of one may take longer than any other test.
    for item in items:
        if getattr(item, "nbmake", False):
            item.add_marker(pytest.mark.timeout(1200))
        elif is_quick(item):
            item.add_marker(pytest.mark.quick)


def is_quick(item) -> bool:
    """Whether a test is run for one and two ranks, each on its own, with a model as small as an MLP."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    small = params.get("model", "MLP") == "MLP" and "ranks" in item.fixturenames
    return params.get("world_size") in (1, 2) and small


@pytest.fixture(scope="session")
def ranks():
    """`ranks(fn, world_size, *args, timeout=120)`: see tests/ranks.py."""
    with Ranks() as pool:
        yield pool


@pytest.fixture(scope="session")
def chromium():
    """One tab of a headless Chromium: see tests/browser.py."""
    from tests.browser import find_chromium, open_page

    try:
        find_chromium()
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)
    with open_page() as page:
        yield page
