"""The doctor answers every question on every machine, and its exit status tells the truth."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from zero1_helpers.ranks import doctor

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def quiet_hub(monkeypatch):
    """No test waits for the network."""
    monkeypatch.setitem(doctor.LOOKS, "hub", lambda: doctor.Answer("ready", "answers"))


def answer_about(subject):
    return dict(doctor.examine())[subject]


def test_a_line_for_each_question_and_one_for_the_sum(capsys):
    healthy = doctor.doctor()
    lines = capsys.readouterr().out.splitlines()
    assert healthy and len(lines) == len(doctor.LOOKS) + 1
    for subject, line in zip(doctor.LOOKS, lines, strict=False):
        assert subject in line


def test_an_old_python_is_a_fault(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (99, 0))
    assert answer_about("Python").state == "fault" and answer_about("Python").advice
    assert not doctor.doctor()


def test_a_missing_package_is_a_fault_that_names_its_group(monkeypatch):
    monkeypatch.setitem(doctor.GROUP_OF, "a_package_that_is_nowhere", "figures")
    answer = answer_about("packages")
    assert answer.state == "fault" and "a_package_that_is_nowhere" in answer.said
    assert "[figures]" in answer.advice


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("50000 100000", 0.5), ("max 100000", None)]
)
def test_a_containers_share_of_the_cores_counts(monkeypatch, quota, cores):
    monkeypatch.setattr(
        doctor, "_first_line", lambda path: quota if path.endswith("cpu.max") else ""
    )
    if cores is None:
        assert doctor.available_cores() >= 1
    else:
        assert doctor.available_cores() == cores
        assert answer_about("cores").state == "limit"


def test_a_containers_share_of_the_memory_counts(monkeypatch):
    lines = {"memory.max": "3000000000", "memory.current": "2500000000"}
    monkeypatch.setattr(doctor, "_first_line", lambda path: lines.get(Path(path).name, ""))
    assert doctor.free_memory() == 500_000_000
    assert answer_about("memory").state == "limit" and doctor.doctor()


def test_a_machine_without_its_loopback_interface_has_a_fault(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "tun0")])
    assert answer_about("loopback").state == "fault"


@pytest.mark.parametrize(
    ("count", "nccl", "state"), [(1, True, "limit"), (4, False, "limit"), (4, True, "ready")]
)
def test_gpus(monkeypatch, count, nccl, state):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a GPU")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    assert answer_about("GPU").state == state


def test_a_hub_that_says_nothing_is_not_waited_for(monkeypatch):
    asked, end = threading.Event(), threading.Event()

    def hang(*args, **kwargs):
        asked.set()
        end.wait(60)

    monkeypatch.setattr(doctor, "HUB_SECONDS", 0.1)
    monkeypatch.setattr(socket, "create_connection", hang)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert doctor.look_at_hub().state == "limit" and asked.is_set()
    end.set()


@pytest.mark.parametrize("error", [OSError("no such thing"), RuntimeError(), MemoryError("a\nb")])
def test_a_look_that_fails_is_a_line_and_the_others_are_answered(monkeypatch, capsys, error):
    def look():
        raise error

    monkeypatch.setitem(doctor.LOOKS, "cores", look)
    doctor.doctor()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.LOOKS) + 1


def test_without_any_package_it_still_answers():
    """In a Python that finds nothing but itself and the checkout, as the shell's command does."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from zero1_helpers.cli import main; "
    code += "sys.exit(main(['doctor']))"
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and not done.stderr
    assert len(done.stdout.splitlines()) == len(doctor.LOOKS) + 1
