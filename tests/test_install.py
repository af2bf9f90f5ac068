"""`make install` and the Python of the Makefile, with a pip that only writes down what it was asked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ODD = ["zero1 (1)", "Anna's", "50% #1", "a $HOME `b`", "two\nlines", "Ψ & Co; ok", "-e"]
FAKE = """#!/bin/sh
case "$1 $2" in
  "-c "*) exit 0 ;;
  "-m venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m pip") test ! -e broken || exit 1; printf '%s\\n' "$*" >> asked ;;
  *) printf '%s\\n' "$HOME" ;;
esac
"""
pytestmark = pytest.mark.quick


@pytest.fixture
def checkout(request, tmp_path):
    """What an install needs, in a folder with the name that the test gives."""
    folder = tmp_path / getattr(request, "param", "zero1")
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "python").write_text(FAKE, encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    return folder


def make(folder, *words, **environment):
    command = ["make", f"PYTHON={folder.parent / 'python'}", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("checkout", ODD, indirect=True)
def test_an_install_asks_once_and_again_after_a_change(checkout):
    assert make(checkout, "install").returncode == 0
    asked = checkout / "asked"
    once = asked.read_text(encoding="utf-8")
    assert (
        ".[notebooks,figures,tests]" in once
        and "-c constraints.txt" in once
        and "deepspeed" not in once
    )
    assert make(checkout, "install").returncode == 0 and asked.read_text(encoding="utf-8") == once
    with (checkout / "constraints.txt").open("a", encoding="utf-8") as file:
        file.write("another==1.0\n")
    assert make(checkout, "install", "EXTRAS=deepspeed").returncode == 0
    assert asked.read_text(encoding="utf-8").count("\n") == 2 * once.count("\n")
    assert "tests,deepspeed]" in asked.read_text(encoding="utf-8")
    assert {path.name for path in checkout.parent.iterdir()} == {
        checkout.name,
        "python",
    }  # no stray file


def test_a_copied_checkout_installs_itself_anew_and_a_failed_install_again(checkout):
    make(checkout, "install")
    copy = checkout.parent / "copy"
    shutil.copytree(checkout, copy)
    (copy / "broken").touch()
    assert make(copy, "install").returncode != 0
    (copy / "broken").unlink()
    assert make(copy, "install").returncode == 0
    assert (copy / "asked").read_text(encoding="utf-8").count("pip install") == 2


@pytest.mark.parametrize("checkout", ["zero1 $x"], indirect=True)
@pytest.mark.parametrize("home", [None, "", "/nowhere/at/all"])
def test_where_no_home_can_be_written_the_build_folder_has_one(checkout, home):
    make(checkout, "install")
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {} if home is None else {"HOME": home}
    run = subprocess.run(
        ["sh", "tools/python.sh", "say"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout == f"{checkout}/build/home\n" and (checkout / "build/home").is_dir()
    assert len(run.stderr.splitlines()) == 1


def test_an_old_python_is_named_in_one_line(checkout):
    (checkout.parent / "python").write_text(
        '#!/bin/sh\n[ "$1" != -c ] || exit 1\necho Python 3.8.1\n'
    )
    run = make(checkout, "install")
    assert run.returncode != 0 and "3.8.1" in run.stderr
    assert not (checkout / ".venv").exists()
