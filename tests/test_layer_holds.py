"""Whatever a rank does, the stop button, the time limits and the next cell work, and nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.kernel import Kernel, gone, patience

pytestmark = pytest.mark.timeout(180)

STOP = 5  # seconds in which the stop button, a time limit and the shutdown hold
HOLDS_THE_INTERPRETER = "import itertools; sum(itertools.repeat(1))"  # and ignores signals
BOTH = "rank 0: 0\nrank 1: 1\n"


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.fixture
def run(kernel):
    """Run a cell in a kernel that has two living ranks."""
    if not kernel.workers() or kernel.run("rank").error:
        started = kernel.run("%dist_init --num-processes 2")
        assert not started.error, started.error
    patience(kernel, grace=10, hold=4.2)
    return kernel.run


def parent_of_ranks(kernel) -> int:
    return psutil.Process(kernel.workers()[0]).ppid()


def folders() -> list[Path]:
    return list(Path(os.environ.get("TMPDIR", "/tmp")).glob("zero1-*"))


def within(seconds: float, call, *args):
    began = time.monotonic()
    result = call(*args)
    assert time.monotonic() - began < seconds
    return result


# ---- the stop button and the time limits

PUSH = "%%local\npush(big=bytes(50_000_000))"  # more than a socket holds
PULL = "%%local\npull('bytes(50_000_000)')"


@pytest.mark.parametrize("request_", [PUSH, PULL, "rank", "%sync"])
def test_the_stop_button_works_while_a_rank_is_stopped(kernel, run, request_):
    pids = kernel.workers()
    os.kill(pids[1], signal.SIGSTOP)
    kernel.press_stop_when_busy()
    error = within(STOP, run, request_).error
    assert "Interrupted" in error and "rank 1" in error
    assert gone(pids, within=1)


def test_a_time_limit_holds_while_native_code_holds_the_interpreter(kernel, run):
    pids = kernel.workers()
    cell = f"%%distributed --timeout 0.5\nif rank == 1:\n    {HOLDS_THE_INTERPRETER}"
    error = within(STOP + 0.5, run, cell).error
    assert "Time limit of 0.5 s" in error and "rank 1 did not stop" in error
    assert gone(pids, within=1)


def test_the_stop_button_works_while_a_push_finds_the_interpreter_held(kernel, run):
    patience(kernel, grace=3, hold=0.2)
    run(
        f"if rank == 0: raise ValueError\n{HOLDS_THE_INTERPRETER}"
    )  # the cell is over, rank 1 is not
    kernel.press_stop_when_busy()
    assert within(STOP, run, PUSH).error


def start_and_stop(kernel) -> list[int]:
    """Press the stop button when the parent of the ranks has started. Returns its pid."""
    request = kernel.client.execute("%dist_init -n 2")
    children = []
    while not children:
        children = [
            child.pid
            for child in psutil.Process(kernel.pid).children()
            if "zero1_helpers.ranks.worker" in child.cmdline()
        ]
    os.kill(children[0], signal.SIGSTOP)
    kernel.manager.interrupt_kernel()
    error = within(STOP, kernel.collect, request).error
    assert "Interrupted" in error
    return children


def test_the_stop_button_works_during_the_start(kernel):
    kernel.run("%dist_shutdown")
    assert gone(start_and_stop(kernel), within=1)
    assert kernel.run("%dist_shutdown").text == "No ranks are running.\n"


@pytest.mark.parametrize("who", ["a rank", "all"])
def test_a_shutdown_ends_stopped_processes(kernel, run, who):
    pids = [*kernel.workers(), parent_of_ranks(kernel)]
    private = kernel.local("print(c._magics._process_manager.folder)").strip()
    for pid in pids[1:2] if who == "a rank" else pids:
        os.kill(pid, signal.SIGSTOP)
    assert within(STOP, run, "%dist_shutdown").text == "2 ranks ended.\n"
    assert gone(pids, within=1) and not os.path.exists(private)


# ---- forks, floods and large answers


def test_a_fork_does_not_answer_for_its_rank(run):
    for fork in ("os.fork()", "ctypes.CDLL(None).fork()"):
        cell = (
            f"import ctypes, os\npid = {fork}\nchild = pid == 0\nmany = 'x' * 3_000_000\n"
            "if pid: os.waitpid(pid, 0)\nmany[:1]"
        )
        assert run(cell).text.split()[-1] == "'x'"
        assert run("%%local\nsizes = pull('len(many)')\nsizes").data == [
            {"text/plain": "[3000000, 3000000]"}
        ]
        assert run("child").text == "ranks 0, 1: False\n"


def test_a_fork_that_raises_does_not_fail_its_rank(run):
    ran = run("import os, signal\nif os.fork() == 0: raise ValueError\nos.wait()\nrank")
    assert not ran.error and ran.text == BOTH


def test_an_answer_to_another_cell_is_dropped_with_a_line(run):
    run("import gc\n(worker,) = [o for o in gc.get_objects() if type(o).__name__ == 'Worker']")
    text = run("%%rank [1]\nworker._send({'number': worker.number - 1})\n'mine'").text
    assert text.startswith("rank 1: 'mine'\nrank 1: ") and "dropped" in text
    assert run("rank").text == BOTH


def test_output_without_end_stops_nothing(kernel, run):
    run("""import threading, time
go_on = True
def flood():
    global lines
    lines = 0
    while go_on:
        print("x" * 1000)
        lines += 1
threading.Thread(target=flood, daemon=True).start()""")
    assert run("before = lines\nwhile lines < before + 200: time.sleep(0.001)").error == ""
    kernel.local(
        "before = pull('lines')\nimport time\n"
        "while not all(b > a + 200 for a, b in zip(before, pull('lines'))): time.sleep(0.01)"
    )
    run("go_on = False")
    run("time.sleep(0.1)")
    assert run("rank").text == BOTH


# ---- one answer does not spoil the next


def test_a_value_that_cannot_be_read_fails_alone(kernel, run):
    run("class Odd:\n    def __reduce__(self): return (int, ('no number',))\nodd = Odd()")
    assert run("%%local\npull('odd')").error
    assert kernel.local("print(pull('rank'))") == "[0, 1]\n"


def test_a_display_that_fails_fails_alone(run):
    ran = run(
        "class Bad:\n    def _repr_png_(self): return {'not': 'bytes'}\n"
        "    def __repr__(self): return 'bad'\nBad()"
    )
    assert not ran.error
    ran = run("import matplotlib.pyplot as plt\nplt.title('$\\\\frac{$')\nprint('drawn')")
    assert "drawn" in ran.text and "Figure" in ran.text and not ran.error
    assert run("rank").text == BOTH


# ---- what is started ends

ORPHANS = """import os, subprocess, sys
code = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(1000)"
session = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
daemon = ("import subprocess as s\\n"
          "print(s.Popen(['sleep', '1000'], start_new_session=True, stdout=s.DEVNULL).pid)")
orphan = subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True).stdout
pids = [int(session.stdout.readline()), int(orphan)]"""


def orphans(kernel) -> list[int]:
    assert not kernel.run(ORPHANS).error
    return eval(kernel.local("print(sum(pull('pids'), []))"))


def test_processes_in_sessions_of_their_own_end_with_the_ranks(kernel, run):
    started = orphans(kernel)
    assert len(started) == 4 and not gone(started, within=0)
    run("%dist_shutdown")
    assert gone(started, within=1)
    run("%dist_init -n 2")
    started = orphans(kernel)
    os.kill(kernel.workers()[1], signal.SIGKILL)
    assert gone(started, within=STOP)  # before the next cell


def test_nothing_is_left_when_the_kernel_is_killed_during_the_start():
    before = folders()
    kernel = Kernel()
    try:
        kernel.client.execute("%dist_init -n 2")
        children = []
        while not children:
            children = [child.pid for child in psutil.Process(kernel.pid).children()]
        os.kill(kernel.pid, signal.SIGKILL)
        assert gone(children, within=1)
    finally:
        kernel.close()
    assert set(folders()) <= set(before)


# ---- what a user's machine may lack

ORDINARY = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in ("%load_ext zero1_helpers", "%dist_init -n 2",
             "x = torch.ones(1)\\ndist.all_reduce(x)\\nx.item()", "%dist_shutdown"):
    shell.run_cell(cell)
"""


def without_privileges() -> None:
    """Drop every capability at the next exec, if there are any."""
    import ctypes

    for capability in range(64):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # 24: PR_CAPBSET_DROP


def test_an_ordinary_user_without_a_home(tmp_path):
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    ran = subprocess.run(
        [sys.executable, "-c", ORDINARY],
        env=environment,
        text=True,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        preexec_fn=without_privileges,
        timeout=120,
    )
    assert "ranks 0, 1: 2.0\n2 ranks ended." in ran.stdout


# ---- assertions are checked


def test_without_assertions_there_are_no_ranks():
    kernel = Kernel(PYTHONOPTIMIZE="1")
    try:
        assert kernel.loaded.error.startswith("ClusterError")
    finally:
        kernel.close()


def test_ranks_check_assertions_whatever_the_environment_says(tmp_path):
    modules = ("random", "queue", "token", "psutil")
    for name in modules:  # beside the notebook, and of no concern to the ranks
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the standard module')\n")
    kernel = Kernel()
    try:
        kernel.local(f"import os\nos.environ['PYTHONOPTIMIZE'] = '2'\nos.chdir({str(tmp_path)!r})")
        assert not kernel.run("%dist_init -n 1").error
        assert "AssertionError" in kernel.run("assert False").error
        (tmp_path / "beside.py").write_text("def check():\n    assert False\n")
        assert "AssertionError" in kernel.run("import beside\nbeside.check()").error
    finally:
        kernel.close()


# ---- cells as in Jupyter


def test_magics_work_on_the_ranks(kernel, run):
    assert run("%matplotlib inline\nvalue = rank").error == ""
    assert run("value").text == BOTH
    assert run("%time x = rank\n!echo from $rank\nx").text.count("Wall time") == 2
    assert run("%time later = rank + 1").text.count("Wall time") == 2
    assert run("!echo from $rank\nx").text == "rank 0:\nfrom 0\n0\nrank 1:\nfrom 1\n1\n"
    assert run("y = !echo $rank\ny[0]").text == "rank 0: '0'\nrank 1: '1'\n"
    assert run("import asyncio\nawait asyncio.sleep(0)\nrank").text == BOTH
    assert run("%%rank [1]\n%%time\nz = 3\n").text.startswith("rank 1:")
    assert run("%sync\nrank").text == "Synchronized 2 ranks.\n" + BOTH


@pytest.mark.parametrize(
    "cell",
    [
        "breakpoint()",
        "input('name: ')",
        "import pdb\npdb.set_trace()\n1",
        "x = 1\n%sync\n",
        "x = 1\n%dist_status",
        "%no_such_magic\nx = 1",
    ],
)
def test_what_is_not_for_ranks_is_refused_in_a_line(run, cell):
    assert re.match("ClusterError: ranks 0, 1: (NotOnRanks|UsageError): ", run(cell).error)
    assert run("rank").text == BOTH


@pytest.mark.parametrize(
    "cell, shown",
    [
        ("x = '\u2028'\n\n1/0", "line 3: 1/0"),
        (
            "error = SyntaxError('odd')\nerror.lineno, error.filename = 'x', 7\nraise error",
            "SyntaxError",
        ),
        ("raise ValueError('x' * 100_000_000)", "characters cut"),
    ],
)
def test_odd_errors_are_told(run, cell, shown):
    error = run(cell).error
    assert shown in error and len(error) < 200_000
    assert run("rank").text == BOTH


@pytest.mark.parametrize(
    "cell",
    [
        "import builtins\nbuiltins.print = lambda *args, **options: None",
        "import sys\nsys.stdout.close()",
        "import sys\nsys.stdout = sys.stderr = None",
        "print('escape \\x1b')",
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    ],
)
def test_odd_cells_spoil_no_other(run, cell):
    assert run(cell).error == ""
    assert run("rank").text == BOTH
    assert run("1 + 1  # done;").text == "ranks 0, 1: 2\n"
    assert run("1 + 1;  # done").text == ""


def test_names_of_the_kernel_are_its_own(kernel, run):
    kernel.local("In = 5\nimport signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    assert run("rank").text == BOTH
    kernel.local("signal.signal(signal.SIGCHLD, signal.SIG_DFL)")
