"""A commit that would make every clone larger is stopped before it is made."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parent.parent / "tools" / "check_size.py"
MB = 1_000_000


@pytest.fixture
def repository(tmp_path):
    """A fresh repository with one commit. Called with {path: content}, it stages them and asks the gate."""
    where = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(tmp_path.parent),
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "ZERO1_"))}

    def run(*command, **env):
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=kept | where | env,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def ask(files, **env):
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(content)
        run("git", "add", "-A")
        answer = run(sys.executable, str(GATE), **env)
        return answer.returncode, answer.stderr.splitlines()

    def commit():
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        assert run("git", *who, "commit", "-m", "x").returncode == 0

    run("git", "init", "-q")
    ask.commit, ask.folder = commit, tmp_path
    return ask


def noise(size, seed=0):
    return random.Random(seed).randbytes(size)


def test_small_files_pass_before_the_first_commit_and_after_it(repository):
    assert repository({"a.py": b"x = 1\n"}) == (0, [])
    repository.commit()
    assert repository({"a.py": b"x = 2\n", "a name\nof two lines": b""}) == (0, [])


def test_a_large_file_is_named(repository):
    status, lines = repository({"movie.bin": b"0" * 4 * MB, "a.py": b""})
    assert status == 1 and len(lines) == 1 and "movie.bin" in lines[0]


def test_many_files_count_together_as_they_are_compressed(repository):
    assert repository({f"zeros{i}": b"0" * 2 * MB for i in range(3)})[0] == 0
    status, lines = repository({f"noise{i}": noise(2 * MB, i) for i in range(3)})
    assert status == 1 and len(lines) == 1


def test_traces_change_only_when_asked(repository):
    traces = {f"traces/small/ddp/rank{i}.gz": noise(2 * MB, i) for i in range(3)}
    status, lines = repository(traces)
    assert status == 1 and len(lines) == 1
    assert repository({}, ZERO1_TRACES="1") == (0, [])
    assert repository({}, ZERO1_TRACES="0")[0] == 1


def test_what_is_moved_or_removed_adds_nothing(repository):
    repository({f"a/noise{i}": noise(2 * MB, i) for i in range(3)})
    repository.commit()
    shutil.move(repository.folder / "a", repository.folder / "b")
    (repository.folder / "b" / "noise0").unlink()
    assert repository({}) == (0, [])


def test_outside_of_a_repository_it_says_so(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    answer = subprocess.run(
        [sys.executable, GATE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 1 and len(answer.stderr.splitlines()) == 1
