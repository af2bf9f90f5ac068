"""How much the notebook layer bears: ranks, cells, minutes, kernels at once, and how it ends."""

import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError

from tests.kernel import Kernel, gone
from tools.run_notebooks import execute

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def start():
    """`start(ranks)`: a new kernel with so many ranks."""
    kernels = []

    def start(ranks: int) -> Kernel:
        kernels.append(Kernel())
        started = kernels[-1].run(f"%dist_init -n {ranks}")
        assert started.text.startswith(f"{ranks} rank"), started
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.close()


def notebook(*cells: str):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def test_hundreds_of_cells(start):
    kernel = start(2)
    pids = [kernel.pid, *kernel.workers()]
    memory = []
    for number in range(500):
        assert kernel.run(f"{number} + rank * 0").text == f"ranks 0, 1: {number}\n"
        if number in (99, 499):
            memory.append([psutil.Process(pid).memory_info().rss for pid in pids])
    growth = [after - before for before, after in zip(*memory, strict=True)]
    assert max(growth) < 4_000_000, growth  # the kernel keeps the history of the cells


def test_sixteen_ranks(start):
    kernel = start(16)
    pids = kernel.workers()
    assert (
        kernel.run("x = torch.tensor(rank)\ndist.all_reduce(x)\nx.item()").text
        == "ranks 0–15: 120\n"
    )
    assert kernel.run("%dist_status").text.count(": idle, pid ") == 16
    assert kernel.run("%dist_shutdown").text == "16 ranks ended.\n" and gone(pids, within=1)
    assert kernel.run("%dist_init -n 1").text.startswith("1 rank ready")
    assert kernel.run("dist.barrier()\nrank, world_size").text == "rank 0: (0, 1)\n"


def test_two_kernels_at_once():
    kernels = [Kernel(), Kernel()]
    try:
        requests = [kernel.client.execute("%dist_init -n 2") for kernel in kernels]
        for kernel, request in zip(kernels, requests, strict=True):
            assert kernel.collect(request).text.startswith("2 ranks ready")
        cell = "dist.broadcast(x, 0)\nx.item()"
        for number, kernel in enumerate(kernels):
            kernel.local(f"import torch\npush(x=torch.tensor({number}))")
        requests = [kernel.client.execute(cell) for kernel in kernels]
        for number, (kernel, request) in enumerate(zip(kernels, requests, strict=True)):
            assert kernel.collect(request).text == f"ranks 0, 1: {number}\n"
    finally:
        for kernel in kernels:
            kernel.close()


def run_a_notebook(folder) -> list[str]:
    nb = notebook(
        "%load_ext zero1_helpers",
        "%dist_init -n 2",
        "x = torch.tensor(rank)\ndist.all_reduce(x)\nx.item()",
        "%dist_shutdown",
    )
    execute(nb, folder.name, folder=folder)
    return [output.text for cell in nb.cells[2:] for output in cell.outputs]


def test_two_notebooks_in_the_runner_at_once(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        outputs = list(pool.map(run_a_notebook, folders))
    assert outputs == [["ranks 0, 1: 1\n", "2 ranks ended.\n"]] * 2


# ---- no orphans

STUCK = "if rank == 0: dist.barrier()\nwhile True: pass"


def test_ranks_end_when_the_kernel_restarts(start):
    kernel = start(2)
    pids = kernel.workers()
    kernel.manager.restart_kernel()
    assert gone(pids, within=10)


def test_ranks_end_when_the_kernel_is_shut_down_in_a_cell(start):
    kernel = start(2)
    pids = kernel.workers()
    kernel.collect(kernel.client.execute(f"import threading\n{STUCK}"), until="... running")
    kernel.manager.shutdown_kernel()
    assert gone(pids, within=10)


def test_ranks_end_when_the_notebook_runs_into_its_limit():
    nb = notebook("%load_ext zero1_helpers", "%dist_init -n 2", "import os\nos.getpid()", STUCK)
    with pytest.raises(CellTimeoutError):
        NotebookClient(
            nb, kernel_name="python3", timeout_func=lambda cell: 2 if cell.source == STUCK else 60
        ).execute()
    pids = [int(pid) for pid in re.findall(r"rank \d: (\d+)", nb.cells[2].outputs[0].text)]
    assert len(pids) == 2 and gone(pids, within=10)


def test_what_a_rank_has_started_ends_with_it(start):
    kernel = start(2)
    cell = "import subprocess, sys\nchild = subprocess.Popen(['sleep', '1000'])\nchild.pid"
    children = [int(pid) for pid in re.findall(r"rank \d: (\d+)", kernel.run(cell).text)]
    os.kill(kernel.workers()[0], 9)
    assert "rank 0 died" in kernel.run("rank").error
    assert len(children) == 2 and gone(children, within=1)
