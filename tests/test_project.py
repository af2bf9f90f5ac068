"""The project's folder is found wherever a notebook is started, or the message says where it was sought."""

from pathlib import Path

import pytest

from zero1_helpers.training import project as module
from zero1_helpers.training.project import project

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.quick


def test_any_working_folder_will_do(tmp_path, monkeypatch):
    for folder in (tmp_path, ROOT / "notebooks", ROOT):
        monkeypatch.chdir(folder)
        assert project() == ROOT
        assert project("build/runs/zero1") == ROOT / "build" / "runs" / "zero1"


def test_an_installed_package_looks_upwards_from_the_working_folder(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "zero1_helpers"
    monkeypatch.setattr(module, "__file__", str(package / "training" / "project.py"))
    deeper = tmp_path / "checkout" / "notebooks" / "copy"
    deeper.mkdir(parents=True)
    monkeypatch.chdir(deeper)
    with pytest.raises(FileNotFoundError) as raised:
        project("traces/small")
    for folder in (deeper, package):
        assert str(folder) in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    (tmp_path / "checkout" / "traces").mkdir()
    assert project("traces/small") == tmp_path / "checkout" / "traces" / "small"


def test_no_notebook_names_a_folder_relative_to_where_it_is_started():
    for twin in (ROOT / "notebooks" / "percent").glob("*.py"):
        assert "../" not in twin.read_text(encoding="utf-8"), twin.name
