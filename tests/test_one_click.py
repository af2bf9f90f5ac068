"""The doors for people who have nothing: a container, badges, a first cell that is harmless at home."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from tools import one_click
from zero1_helpers.training.workload import PRESETS

ROOT = Path(__file__).resolve().parent.parent
SOMEWHERE = "https://github.com/someone/a.series"


def test_the_container_is_made_by_a_target_that_there_is():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert container["hostRequirements"]["cpus"] == 2
    assert container["hostRequirements"]["memory"] == "8gb"
    assert container["containerEnv"]["ZERO1_PRESET"] in PRESETS
    make, target = container["postCreateCommand"].split()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert make == "make" and target in targets


def test_every_badge_opens_the_first_notebook_or_the_repository():
    links = re.findall(r"\)\]\((.*?)\)", one_click.badges(SOMEWHERE))
    assert len(links) == 3 and all("someone/a.series" in link for link in links)
    assert (ROOT / one_click.FIRST).exists()
    assert sum(one_click.FIRST in link for link in links) == 2


def test_the_readme_shows_the_badges_of_the_address_in_pyproject():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page == one_click.with_badges(page, one_click.address())
    assert one_click.badges("") == one_click.first_cell("") == ""


@pytest.mark.parametrize("present", [True, False])
def test_the_first_cell_installs_only_what_is_absent(monkeypatch, tmp_path, present):
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if present else None)
    exec(compile(one_click.first_cell(SOMEWHERE), "cell", "exec"), {})
    assert [SOMEWHERE in command for command in commands] == ([] if present else [True, False])
    assert Path.cwd() == tmp_path


def test_the_cell_of_a_notebook_is_the_one_that_is_rendered():
    for twin in (ROOT / "notebooks/percent").glob("*.py"):
        source = twin.read_text(encoding="utf-8")
        if one_click.CELL.splitlines()[0] in source:
            assert one_click.first_cell(one_click.address()) in source, twin.name


def test_an_address_of_another_kind_is_refused(monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.zero1]\nrepository = "git@host:x"\n')
    monkeypatch.setattr(one_click, "ROOT", tmp_path)
    with pytest.raises(ValueError):
        one_click.address()
