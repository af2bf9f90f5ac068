"""The notebook layer, driven as a notebook drives it: a real kernel, real ranks, injected faults."""

import os
import re
import signal
import socket
import time

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.kernel import Kernel, gone, patience
from zero1_helpers.ranks.arguments import ClusterError, choose_gpus, parse_gpu_ids, parse_ranks
from zero1_helpers.ranks.magics import ClusterMagics
from zero1_helpers.ranks.output import KEEP, Output, span

pytestmark = pytest.mark.timeout(120)

HOLDS_THE_INTERPRETER = "import itertools; sum(itertools.repeat(1))"  # and ignores signals


@pytest.fixture(scope="module")
def kernels():
    kernels = []
    yield kernels
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def kernel(kernels):
    """The kernel that the tests share, or a new one if a test has ended it."""
    if not kernels or not kernels[-1].manager.is_alive():
        kernels.append(Kernel())
    return kernels[-1]


@pytest.fixture
def run(kernel):
    """Run a cell in a kernel that has two living ranks."""
    if not kernel.workers() or kernel.run("rank").error:
        started = kernel.run("%dist_init --num-processes 2")
        assert not started.error, started.error
    patience(kernel, grace=10, hold=4.5)
    return kernel.run


# ---- cells


def test_cells_run_on_every_rank_and_equal_output_is_folded(run):
    assert run("world_size").text == "ranks 0, 1: 2\n"
    assert run("rank").text == "rank 0: 0\nrank 1: 1\n"
    assert run("print('a', rank)\nrank + 1;").text == "rank 0: a 0\nrank 1: a 1\n"
    assert run("print('a')\nprint('b')").text == "ranks 0, 1:\na\nb\n"
    assert run("%%rank [1]\nprint('only', rank)").text == "rank 1: only 1\n"
    assert run("%%rank[0-1]\nrank, device, gpu_id").text.startswith(
        "rank 0: (0, device(type='cpu')"
    )
    assert run("%%distributed\n'x'").text == "ranks 0, 1: 'x'\n"


def test_ranks_communicate(run):
    cell = "x = torch.full((2,), float(rank + 1))\ndist.all_reduce(x)\nx"
    assert run(cell).text == "ranks 0, 1: tensor([3., 3.])\n"
    assert run("dist.get_backend()").text == "ranks 0, 1: 'gloo'\n"
    assert run("%sync").text == "Synchronized 2 ranks.\n"


def test_output_of_every_kind_arrives_in_order(run):
    ran = run("""
import ctypes, os, sys, threading
print("one")
print("two", file=sys.stderr)
os.write(2, b"three\\n")
ctypes.CDLL(None).puts(b"four")
thread = threading.Thread(target=print, args=("five",))
thread.start(); thread.join()
os.system("echo six");
""")
    words = ran.text.split()
    assert words[:6] == ["ranks", "0,", "1:", "one", "two", "three"]
    assert set(words[6:]) == {"four", "five", "six"}  # C's own buffer is emptied when the cell ends


def test_warnings_show_once(run):
    cell = """import warnings
warnings.simplefilter("always")
for _ in range(3): warnings.warn("careful")
print(rank)"""
    assert run(cell).text.splitlines() == [
        f"ranks 0, 1: UserWarning: careful ({cell_of(run)}, line 3)",
        "rank 0: 0",
        "rank 1: 1",
    ]


def cell_of(run) -> str:
    """The name of the cell before this one."""
    number = re.search(r"cell (\d+)", run("1/0").error)[1]
    return f"cell {int(number) - 1}"


def test_much_output_is_cut_and_says_so(run):
    ran = run("print('first')\nfor i in range(100_000): print('x' * 99)\nprint('last')")
    assert ran.text.startswith("ranks 0, 1:\nfirst\n") and ran.text.endswith("last\n")
    cut = 10_000_000 + len("first\nlast\n") - KEEP
    assert f"... {cut:,} bytes cut ..." in ran.text and len(ran.text) < KEEP + 100
    assert run("rank").text == "rank 0: 0\nrank 1: 1\n"


def test_a_progress_bar_is_one_line():
    output = Output()
    for percent in range(101):
        output.add(f"\r{percent:3d}%|{'#' * percent}".encode())
    output.add(b"\ndone\r\n")
    assert output.text() == f"100%|{'#' * 100}\ndone\n"


def test_several_progress_bars_are_a_line_each():
    output = Output()
    for step in range(50):  # as tqdm writes them: the second one a line below, and back up
        output.add(f"\router {step}".encode())
        for inner in range(20):
            output.add(f"\n\rinner {inner}\x1b[A".encode())
    for byte in b"\n\nend\x1b[A\r\n":  # a control sequence may arrive in pieces
        output.add(bytes([byte]))
    assert output.text() == "outer 49\ninner 19\nend"


def test_progress_bars_of_ranks_are_a_line_each_also_while_they_move(run):
    seen = []
    cell = """import time, tqdm
for _ in tqdm.tqdm(range(180), desc=f"bar {rank}"): time.sleep(0.01)"""
    lines = run(cell, seen.append).text.splitlines()
    assert [re.sub(r"\|.*", "", line) for line in lines] == [
        "rank 0: bar 0: 100%",
        "rank 1: bar 1: 100%",
    ]
    moving = {line for text in seen for line in text.splitlines() if line.startswith("rank 0: bar")}
    assert len(moving) > 2
    assert max(text.count("bar 0:") for text in seen) == 1


def test_printing_from_hooks_and_threads(run):
    text = run("""
import threading
x = torch.ones(1, requires_grad=True)
x.register_hook(lambda grad: print("from a hook"))
def work():
    for _ in range(500): print("t" * 50)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for _ in range(20): (2 * x).sum().backward()
for thread in threads: thread.join()""").text
    assert text.count("t") > 2 * 0.9 * KEEP  # of the 204 kB that each rank has printed
    assert "bytes cut" in text
    assert "from a hook" in run("(2 * x).sum().backward()").text


def test_a_long_cell_shows_life_and_saves_only_its_output(run, tmp_path):
    seen = []
    cell = "import time, os\nprint('begun')\nwhile not os.path.exists(flag): time.sleep(0.02)"
    flag = str(tmp_path / "go on")
    run(f"flag = {flag!r}")

    def meanwhile(text):
        seen.append(text)
        if "running for" in text:
            open(flag, "w").close()

    assert run(cell, meanwhile).text == "ranks 0, 1: begun\n"
    assert any(
        re.search(
            r"ranks 0, 1: begun\n\.\.\. running for \d+ s\n    ranks 0, 1: in its cell "
            r"\(cell \d+, line 3\)\n",
            text,
        )
        for text in seen
    )


def test_figures_and_html_are_shown_with_their_rank(run):
    ran = run("""%%rank [1]
import matplotlib.pyplot as plt
plt.plot([1, 2])
plt.show()
class Table:
    def _repr_html_(self): return "<b>table</b>"
Table()""")
    assert ran.text == "rank 1:\n"
    assert [sorted(data) for data in ran.data] == [
        ["text/html", "text/plain"],
        ["image/png", "text/plain"],
    ]
    assert len(run("from IPython.display import HTML\ndisplay(HTML('<i>both</i>'))").data) == 1


def test_source_of_cells_is_known_on_the_ranks(run):
    run("def double(x):\n    return 2 * x\n\nclass Empty:\n    size = 3\n")
    ran = run("import inspect\nprint(inspect.getsource(double) + inspect.getsource(Empty))")
    assert ran.text == (
        "ranks 0, 1:\ndef double(x):\n    return 2 * x\nclass Empty:\n    size = 3\n"
    )


def test_no_javascript(run):
    assert run("import IPython.display as d\nd.Javascript('alert(1)')").data == []


def test_a_cell_has_no_time_limit(kernel, run):
    patience(kernel, grace=0.1, hold=0.1)  # limits for the time after a failure, and only then
    assert run("import time\ntime.sleep(1 + rank)\nrank").text == "rank 0: 0\nrank 1: 1\n"


# ---- names


def test_kernel_and_ranks_keep_their_own_names(kernel, run):
    kernel.local("value, rank = {'mine': 1}, 'kernel'\ndef helper(): return 'mine'")
    run("value = torch.zeros(3)\ndef helper(): return 'theirs'")
    assert run("helper(), value.shape[0], rank * 0").text == "ranks 0, 1: ('theirs', 3, 0)\n"
    assert kernel.local("print(helper(), value, rank)") == "mine {'mine': 1} kernel\n"


def test_pull_and_push(kernel, run):
    run(
        "t = torch.arange(6.).reshape(2, 3)[rank]\nfn = lambda: 0\nclass Local: pass\nobj = Local()"
    )
    assert (
        kernel.local("print(pull('rank * 10'), pull('t')[1].tolist(), pull('t', [1])[0].shape[0])")
        == "[0, 10] [3.0, 4.0, 5.0] 3\n"
    )
    kernel.local("import torch\npush(lr=0.5, big=torch.ones(2_000_000))")
    assert run("lr, int(big.sum())").text == "ranks 0, 1: (0.5, 2000000)\n"
    for expression, expected in [
        ("fn", "function cannot be sent"),
        ("obj", "not in the kernel"),
        ("no_such_name", "NameError"),
    ]:
        assert expected in run(f"%%local\npull({expression!r})").error
    assert "cannot be sent" in run("%%local\npush(f=lambda: 0)").error
    assert "no rank 7" in run("%%local\npull('rank', [7])").error
    assert run("rank").text == "rank 0: 0\nrank 1: 1\n"


def test_where_cells_run(kernel, run):
    assert run("%%local\nrank = 'kernel'\nrank").data == [{"text/plain": "'kernel'"}]
    assert "ranks 0, 1: 2\n" in run("%%time\nworld_size").text  # %%time is here, its cell is not
    assert run("!echo kernel").text.split() == ["kernel"]
    assert "disabled" in run("%dist_mode -d").text
    assert run("1 + 1").data == [{"text/plain": "2"}]
    assert run("%%distributed\nworld_size").text == "ranks 0, 1: 2\n"
    assert "enabled" in run("%dist_mode --enable").text
    assert run("# a comment\nworld_size").text == "ranks 0, 1: 2\n"
    assert run("# only a comment").text == ""


# ---- what the ranks are doing


def test_status(kernel, run):
    lines = run("%dist_status").text.splitlines()
    for rank, (line, pid) in enumerate(zip(lines, kernel.workers(), strict=True)):
        facts = r"CPU, memory (\d\.\d\d) GB, peak memory (\d\.\d\d) GB, up \d+ s"
        memory, peak = re.fullmatch(rf"rank {rank}: idle, pid {pid}, {facts}", line).groups()
        assert 0 < float(memory) <= float(peak) < 5
    assert "PID" in run("%dist_debug").text


def test_status_while_a_cell_runs(kernel, run, tmp_path):
    flag = str(tmp_path / "go on")
    cell = f"""import os, time
x = torch.ones(1)
if rank == 0:
    dist.all_reduce(x, async_op=True).wait()
while not os.path.exists({flag!r}): time.sleep(0.01)
if rank == 1: dist.all_reduce(x)"""
    answer = kernel.client.execute(cell)
    subshell = kernel.subshell()
    try:
        text = ""
        while not ("waiting in all_reduce" in text and "in its cell" in text):
            text = subshell("%dist_status").text
        other = subshell("%%distributed\n1").error
    finally:
        open(flag, "w").close()
        kernel.wait_for(answer)
    rank_0, rank_1 = text.splitlines()
    running = r"running cell (\d+) for \d+ s, "
    assert re.match(rf"rank 0: {running}waiting in all_reduce \(cell \1, line 4\), pid", rank_0)
    assert re.match(rf"rank 1: {running}in its cell \(cell \1, line 5\), pid", rank_1)
    assert "still run a cell" in other
    assert run("x.item()").text == "ranks 0, 1: 2.0\n"


def test_a_rank_that_does_not_answer(kernel, run):
    pids = kernel.workers()
    os.kill(pids[1], signal.SIGSTOP)
    try:
        text = run("%dist_status").text
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert "rank 0: idle" in text and "rank 1: not answering" in text and f"pid {pids[1]}" in text
    assert run("rank").text == "rank 0: 0\nrank 1: 1\n"


# ---- time limits


def test_a_time_limit_shows_all_stacks_and_stops_the_cell(kernel, run):
    patience(kernel, grace=0.5)
    cell = """%%distributed --timeout 0.5
def work():
    import time
    while rank == 0: time.sleep(0.01)
    dist.barrier()
work()"""
    error = run(cell).error
    assert error.startswith("ClusterError: Time limit of 0.5 s reached after ")
    for rank, doing, line, source in [
        (0, "in work", 4, "while rank == 0: time.sleep(0.01)"),
        (1, "waiting in barrier", 5, "dist.barrier()"),
    ]:
        stack = (
            rf"\nrank {rank}: {doing} \((cell \d+), line {line}\)\n    \1, line 6: work\(\)\n"
            rf"    \1, line {line}: {re.escape(source)}\n"
        )
        assert re.search(stack, error), error
    assert re.search(r"\nrank 0: KeyboardInterrupt \(cell \d+, line 6: work\(\)\)\n", error)
    assert "rank 1 did not stop and had to be ended" in error


def test_a_time_limit_for_all_cells(kernel, run):
    kernel.run("%dist_shutdown")
    kernel.run("%dist_init -n 2 --timeout 0.5")
    try:
        assert "Time limit of 0.5 s" in run("while True: pass").error
        assert "Time limit of 0.5 s" in run("%%rank [1]\nwhile True: pass").error
        assert run("%%rank [0] --timeout 0\nimport time\ntime.sleep(1)\nrank").text == "rank 0: 0\n"
    finally:
        kernel.run("%config ClusterMagics.timeout = 0")
    assert "write seconds" in run("%%rank [0] --timeout\n1").error
    assert "--timeout SECONDS only" in run("%%distributed --timout 3\n1").error


# ---- a rank raises


def test_the_same_error_of_all_ranks_is_told_once(run):
    error = run("kept = 1\ndef broken():\n    return rank / 0\nbroken()").error
    assert error.startswith("ClusterError: ranks 0, 1: ZeroDivisionError: division by zero (cell ")
    assert "line 4: broken())" in error and "    return rank / 0\n" in error
    assert error.count("Traceback") == 1 and "worker.py" not in error
    assert run("kept").text == "ranks 0, 1: 1\n"


def test_different_errors_are_all_named(run):
    error = run("if rank == 0:\n    raise ValueError('zero')\nraise KeyError('one')").error
    assert re.search(
        r"rank 0: ValueError: zero \(cell \d+, line 2: raise ValueError\('zero'\)\)", error
    )
    assert re.search(r"rank 1: KeyError: 'one' \(cell \d+, line 3: ", error)
    assert error.count("Traceback") == 1


def test_line_numbers_are_those_of_the_cell(run):
    assert "line 3: 1/0" in run("%%rank [0]\n\n1/0").error
    assert "'(' was never closed (cell" in run("y = 1\nx = (").error
    assert (
        "__str__ fails"
        in run("class Bad(Exception):\n    def __str__(self): 1 / 0\nraise Bad").error
    )
    assert run("import sys; sys.exit(3)").error.startswith(
        "ClusterError: ranks 0, 1: SystemExit: 3"
    )


def test_a_rank_left_in_a_collective_is_ended_after_the_grace_period(kernel, run):
    patience(kernel, grace=0.5)
    pids = kernel.workers()
    error = run("if rank == 0:\n    raise ValueError('lonely')\ndist.barrier()").error
    assert "rank 0: ValueError: lonely" in error and "%dist_init starts afresh" in error
    assert re.search(
        r"rank 1 did not stop and had to be ended: waiting in barrier "
        r"\(cell \d+, line 3\)",
        error,
    )
    assert gone(pids)
    assert "No ranks are running: %dist_init" in run("rank").error
    assert run("%dist_init -n 2").text.startswith("2 ranks ready: gloo")
    assert run("rank").text == "rank 0: 0\nrank 1: 1\n"


def test_the_cell_does_not_wait_out_a_long_grace_period(kernel, run):
    patience(kernel, grace=2, hold=1)
    pids = kernel.workers()
    error = run("if rank == 0:\n    raise ValueError('lonely')\ndist.barrier()").error
    assert "rank 1 did not finish: waiting in barrier (cell" in error
    assert "%dist_init starts afresh" in error and not gone(pids, within=0)
    rank_0, rank_1 = run("%dist_status").text.splitlines()  # says what there is, and ends nothing
    assert rank_0.startswith("rank 0: idle, pid")
    assert re.match(
        r"rank 1: running cell \d+ for \d+ s, waiting in barrier \(cell \d+, line 3\), pid", rank_1
    )
    assert "rank 1 did not come back in 2 s and had to be ended" in run("rank").error
    assert gone(pids)


def test_a_late_rank_that_comes_back_saves_the_cluster(kernel, run):
    patience(kernel, grace=0.5)
    run("kept = rank")
    error = run(
        "import time\nif rank == 0:\n    raise ValueError\nwhile True: time.sleep(0.01)"
    ).error
    assert "rank 0: ValueError" in error and "rank 1: KeyboardInterrupt" in error
    assert run("kept").text == "rank 0: 0\nrank 1: 1\n"


# ---- a rank dies


def test_a_rank_that_dies_in_a_cell(kernel, run):
    pids = kernel.workers()
    cell = "import os, signal\nprint('last words')\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()"
    error = run(cell).error
    assert "rank 1 died: signal SIGKILL" in error and "last words" in error
    assert "%dist_init starts afresh" in error and gone(pids)


def test_a_rank_that_crashes_leaves_its_stack(run):
    error = run(
        "import faulthandler\ndef crash():\n    faulthandler._sigsegv()\nif rank == 0: crash()"
    ).error
    assert "rank 0 died: signal SIGSEGV" in error and "in crash" in error


def test_a_rank_that_dies_between_cells(kernel, run):
    os.kill(kernel.workers()[0], signal.SIGKILL)
    error = run("rank").error
    assert "rank 0 died" in error and "SIGKILL" in error
    assert "No ranks are running" in run("%%rank [1]\nrank").error


# ---- interrupts


def when(word, action):
    """Call action once, as soon as the output shows the word."""

    def meanwhile(text, done=[]):  # noqa: B006  (one list per call of when)
        if word in text and not done:
            done.append(True)
            action()

    return meanwhile


def test_an_interrupt_stops_python_code_and_the_ranks_survive(kernel, run):
    run("kept = rank")
    cell = "import time\nprint('begun')\nwhile True: time.sleep(0.01)"
    ran = run(cell, when("begun", kernel.manager.interrupt_kernel))
    assert re.match(
        r"ClusterError: Interrupted after \d+ s, when the ranks were:\nranks 0, 1: in its "
        r"cell \(cell \d+, line 3\)\n    cell \d+, line 3: while True: time",
        ran.error,
    )
    assert "ranks 0, 1: KeyboardInterrupt (cell" in ran.error
    assert run("kept").text == "rank 0: 0\nrank 1: 1\n"


def test_an_interrupt_reaches_what_waits_outside_of_python(kernel, run):
    patience(kernel, grace=10)
    cell = "import ctypes, time\nprint('begun')\nbegan = time.time()\nctypes.CDLL(None).sleep(1000)"
    ran = run(cell, when("begun", kernel.manager.interrupt_kernel))
    assert "ranks 0, 1: KeyboardInterrupt (cell" in ran.error
    seconds = float(run("%%rank [0]\ntime.time() - began").text.split()[2])
    assert seconds < 2  # not only when the grace period is over


def test_an_interrupt_ends_a_rank_that_is_stuck_in_native_code(kernel, run):
    patience(kernel, grace=0.5)
    pids = kernel.workers()
    cell = "print('begun')\nif rank == 1: dist.barrier()"
    error = run(cell, when("begun", kernel.manager.interrupt_kernel)).error
    assert "rank 1 did not stop" in error and "in barrier (cell" in error and gone(pids)


def test_an_interrupt_ends_a_rank_that_never_lets_go_of_the_interpreter(kernel, run):
    patience(kernel, grace=0.5)
    pids = kernel.workers()
    cell = f"print('begun')\nif rank == 1:\n    {HOLDS_THE_INTERPRETER}"
    error = run(cell, when("begun", kernel.manager.interrupt_kernel)).error
    assert "rank 1 did not stop" in error and gone(pids)


# ---- start and end


def folder(kernel) -> str:
    """The private folder of the cluster."""
    return kernel.local("print(c._magics._process_manager.folder)").strip()


def test_start_and_end(kernel, run):
    pids = kernel.workers()
    assert "2 ranks already running: %dist_shutdown first" in run("%dist_init -n 3").error
    assert kernel.workers() == pids
    private = folder(kernel)
    assert os.stat(private).st_mode & 0o777 == 0o700
    assert run("%dist_shutdown").text == "2 ranks ended.\n"
    assert gone(pids, within=0.5) and not os.path.exists(private)
    assert run("%dist_shutdown").text == run("%dist_reset").text == "No ranks are running.\n"
    assert run("1 + 1").data == [{"text/plain": "2"}]
    assert "No ranks are running: %dist_init" in run("%%distributed\n1").error

    started = run("%dist_init --num-processes 3").text
    threads = max(1, len(os.sched_getaffinity(0)) // 3) if hasattr(os, "sched_getaffinity") else 1
    assert started.startswith(
        f"3 ranks ready: gloo on the CPU, because torch sees no GPU; {threads} thread"
    )
    assert run("world_size, torch.get_num_threads()").text == f"ranks 0–2: (3, {threads})\n"
    assert run("%dist_reset").text == "3 ranks ended.\n"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("-n 0", "at least one rank"),
        ("-n -2", "at least one rank"),
        ("-n 2 -g 0", "2 ranks need 2 different GPUs"),
        ("-n 2 -g 0,0", "2 ranks need 2 different GPUs"),
        ("-n 1 -g zero", "write GPU ids as"),
        ("-n 2 -g 0,7", "there is no GPU 0, 7; torch sees 0"),
        ("-a no.such.host.invalid", "does not resolve"),
        ("-n 2 --timeout soon", "write seconds"),
        ("-n 2 --timeout -1", "write seconds"),
    ],
)
def test_bad_arguments_of_dist_init(kernel, arguments, expected):
    kernel.run("%dist_shutdown")
    error = kernel.run(f"%dist_init {arguments}").error
    assert error.startswith("ClusterError: --") and expected in error and "\n" not in error
    assert kernel.run("%dist_shutdown").text == "No ranks are running.\n"


def test_a_rank_that_cannot_start_shows_its_log(kernel):
    kernel.run("%dist_shutdown")
    kernel.local(
        "import os, tempfile\nbroken = tempfile.mkdtemp()\n"
        "open(broken + '/torch.py', 'w').write('import no_such_package')\n"
        "os.environ['PYTHONPATH'] = broken"
    )
    # Our own package comes first on the path, so that the ranks run the kernel's version of it.
    error = kernel.run("%dist_init -n 2").error
    kernel.local("open(broken + '/torch.py', 'w').write('1 / 0')")
    other = kernel.run("%dist_init -n 2").error
    kernel.local("del os.environ['PYTHONPATH']\nimport shutil\nshutil.rmtree(broken)")
    assert re.fullmatch(
        r"ClusterError: The ranks cannot start: \S+ has no module no_such_package\.", error
    )
    assert "died: exit code 1" in other and "ZeroDivisionError" in other
    assert kernel.run("%dist_shutdown").text == "No ranks are running.\n"


def test_a_rank_that_never_starts(kernel):
    kernel.run("%dist_shutdown")
    kernel.local(
        "import os, tempfile\nbroken = tempfile.mkdtemp()\n"
        "open(broken + '/sitecustomize.py', 'w').write("
        "'import os, time\\nif \"PYTHONSAFEPATH\" in os.environ: time.sleep(1000)')\n"
        "os.environ['PYTHONPATH'] = broken\nlimit, start.START = start.START, 0.5"
    )
    error = kernel.run("%dist_init -n 2").error
    kernel.local(
        "del os.environ['PYTHONPATH']\nimport shutil\nshutil.rmtree(broken)\nstart.START = limit"
    )
    assert error.startswith("ClusterError: Time limit of 0.5 s reached")
    assert "All ranks are ended now: %dist_init starts afresh" in error
    assert kernel.run("%dist_init -n 2").text.startswith("2 ranks ready")


# ---- closed to others


def listening(pid: int) -> set:
    """Addresses at which a process listens, from the system's own tables."""
    connections = psutil.Process(pid).net_connections("all")
    assert [c for c in connections if c.family == socket.AF_UNIX and c.laddr] == []
    return {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}


def test_nothing_listens_once_the_ranks_have_started(kernel, run):
    run("%dist_shutdown")
    before = listening(kernel.pid)
    run("%dist_init -n 2")
    assert listening(kernel.pid) == before  # Jupyter's own
    cell = "x = torch.ones(1)\ng = dist.new_group()\ndist.all_reduce(x, group=g)\nx.item()"
    assert run(cell).text == "ranks 0, 1: 2.0\n"
    run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (world_size,))"
    )
    assert set.union(*map(listening, kernel.workers())) == set()
    assert run(cell.replace("group=g", "group=mesh.get_group()")).text == "ranks 0, 1: 2.0\n"
    assert run("%dist_shutdown").text == "2 ranks ended.\n"


STRANGER = """import os, socket, struct, threading, time
from zero1_helpers.measure import doors
before, keep = doors.sockets()[0], []
def connect():
    while not (new := [door for n, door in doors.sockets()[0].items() if n not in before]):
        time.sleep(0.001)
    for number in numbers:  # gloo tells its connections apart by such a number
        keep.append(socket.create_connection(new[0]))
        keep[-1].sendall(struct.pack("<q", number))
    open(flag, "w").close()
if rank == 0:
    threading.Thread(target=connect).start()
else:
    while not os.path.exists(flag): time.sleep(0.01)
g = dist.new_group()
x = torch.ones(1)
dist.all_reduce(x, group=g)
x.item()"""


def test_a_stranger_who_connects_while_a_group_forms_is_cut_off(kernel, run, tmp_path):
    ran = run(f"numbers, flag = [999], {str(tmp_path / 'useless')!r}\n{STRANGER}")
    assert ran.text.startswith("rank 0: connected from") and ran.text.endswith("ranks 0, 1: 2.0\n")


def test_a_stranger_who_takes_a_ranks_place_is_not_heard(kernel, run, tmp_path):
    patience(kernel, grace=0.5)
    ran = run(f"numbers, flag = range(8), {str(tmp_path / 'first')!r}\n{STRANGER}")
    assert ran.text.startswith("rank 0: connected from")
    if ran.error:  # gloo waited at rank 0 for rank 1, and took the stranger for it
        assert "rank 0: RuntimeError" in ran.error and "Connection closed" in ran.error
    else:  # gloo had rank 0 connect to rank 1
        assert ran.text.endswith("ranks 0, 1: 2.0\n")


def test_the_command_line_tells_nothing(kernel, run):
    for pid in kernel.workers():
        command = psutil.Process(pid).cmdline()
        assert command[1:3] == ["-m", "zero1_helpers.ranks.worker"] and command[3].isdigit()
        assert command[4:] == []


def test_nothing_is_ended_by_name(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("starts a program")

    monkeypatch.setattr("subprocess.run", forbidden)
    monkeypatch.setattr("subprocess.Popen", forbidden)
    for end in (
        ClusterMagics.shutdown_all,
        ClusterMagics.force_shutdown_all,
        ClusterMagics._nuclear_shutdown,
    ):
        end()


# ---- a notebook


def test_a_notebook_with_a_failing_rank_fails():
    cells = [
        "%load_ext zero1_helpers",
        "%dist_init -n 2",
        "print('fine')",
        "assert rank == 0, 'not me'",
        "print('never')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    with pytest.raises(CellExecutionError, match="rank 1: AssertionError: not me"):
        NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    assert notebook.cells[2].outputs[0].text == "ranks 0, 1: fine\n"
    assert notebook.cells[4].outputs == []


# ---- small parts


def test_rank_lists():
    assert parse_ranks("[0,2]", 4) == parse_ranks("0, 2", 4) == [0, 2]
    assert parse_ranks("[0-2, 2]", 4) == [0, 1, 2]
    for wrong in ("", "[]", "[a]", "[2-0]", "[4]", "[0,,1]", "[-1]"):
        with pytest.raises(ClusterError, match="%%rank"):
            parse_ranks(wrong, 4)
    assert [span([2]), span([0, 2]), span([1, 0, 2])] == ["rank 2", "ranks 0, 2", "ranks 0–2"]


def test_choice_of_gpus():
    assert choose_gpus(4, 4, None) == ([0, 1, 2, 3], "NCCL, because there is a GPU for each")
    assert choose_gpus(0, 4, None)[0] is None and "no GPU" in choose_gpus(0, 4, None)[1]
    assert choose_gpus(2, 4, None)[0] is None and "torch sees 2" in choose_gpus(2, 4, None)[1]
    assert choose_gpus(4, 2, parse_gpu_ids("3,1", 2))[0] == [3, 1]
    with pytest.raises(ClusterError, match="no GPU 9; torch sees 4"):
        choose_gpus(4, 2, [0, 9])


def test_a_collective_on_some_ranks_is_noted(run):
    note = "Note: all_reduce waits for every rank"
    assert run("%%rank [0]\nif world_size > 9: dist.all_reduce(torch.ones(1))").text.startswith(
        note
    )
    assert run("%%rank [0]\nprint('all_reduce')").text == "rank 0: all_reduce\n"


# ---- the end of the kernel


def test_ranks_end_with_the_kernel(kernel, run):
    pids, private = kernel.workers(), folder(kernel)
    kernel.manager.shutdown_kernel()
    assert gone(pids, within=10) and not os.path.exists(private)


def test_ranks_end_when_the_kernel_is_killed(kernel, run):
    pids, private = kernel.workers(), folder(kernel)
    kernel.client.execute(
        f"open(f'{private}/{{rank}}', 'w').close()\n"
        f"if rank == 1:\n    {HOLDS_THE_INTERPRETER}\nwhile True: pass"
    )
    while not all(os.path.exists(f"{private}/{rank}") for rank in (0, 1)):
        time.sleep(0.01)
    os.kill(kernel.pid, signal.SIGKILL)
    assert gone(pids, within=10)
    assert not os.path.exists(private)


def test_a_stack_that_cannot_be_read_costs_no_rank(run):
    run("import zero1_helpers.ranks.rank as module\nread_stack = module.describe_stack")
    assert not run("module.describe_stack = lambda frame: 1 / 0").error
    long_cell = run("import time\ntime.sleep(3)\nprint('done')")  # looked at after two seconds
    run("module.describe_stack = read_stack")
    assert not long_cell.error, long_cell.error
    assert not run("rank").error


def test_a_listener_that_fails_says_why_before_its_rank_ends(run):
    run("import gc\n(worker,) = [o for o in gc.get_objects() if type(o).__name__ == 'Worker']")
    run("if rank == 1: worker._take = lambda *message: 1 / 0")
    run("%dist_status")  # asks every rank
    error = run("rank").error
    assert "rank 1 died" in error and "ZeroDivisionError" in error
