"""Fixtures and settings for all tests."""

import os

import pytest

from tests.ranks import Ranks

os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # notebooks run on this environment's kernel


def pytest_collection_modifyitems(items):
    # Notebooks have nbmake's limit per cell; the whole of one may take longer than any other test.
    for item in items:
        if getattr(item, "nbmake", False):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def ranks():
    """`ranks(fn, world_size, *args, timeout=120)`: see tests/ranks.py."""
    with Ranks() as pool:
        yield pool
