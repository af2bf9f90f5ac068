"""The committed notebooks, the runner that makes them, and one of them on two ranks.

That every notebook runs on four ranks is checked by nbmake, in the same pytest call (`make test`).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools import run_notebooks
from tools.run_notebooks import (
    KERNEL,
    NOTEBOOKS,
    RANKS,
    TIME,
    NotebookFailed,
    execute,
    texts,
    time_line,
)

PATHS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
SERIES = [(path.stem, nbformat.read(path, 4)) for path in PATHS]
HEADINGS = ["Goal", "Predict", "Summary", "Exercises"]
FOLDERS = re.compile(r"(?<![\w.:/~-])/(?:home|root|Users|tmp|var|private|opt|mnt)/[\w.-]")


def code_cells(nb):
    return [(index, cell) for index, cell in enumerate(nb.cells) if cell.cell_type == "code"]


def outputs(nb):
    return [(index, output) for index, cell in code_cells(nb) for output in cell.outputs]


def described(output):
    """Whether every picture in this output has alt text."""
    data, meta = output.get("data", {}), output.get("metadata", {})
    for mime in data:
        if mime.startswith("image/"):
            alt = meta.get(mime, {}).get("alt") or meta.get("alt")
            if not (alt or "").strip():
                return False
    html = data.get("text/html", "")
    return all(re.search(r"""alt=["'][^"']*\w""", tag) for tag in re.findall(r"<img\b[^>]*>", html))


def test_the_series_is_complete():
    numbers = [path.name[:2] for path in PATHS]
    assert numbers == sorted(set(numbers)), "two notebooks have one number"
    missing = {f"{number:02d}" for number in range(14)} - set(numbers)
    assert not missing, f"missing: {sorted(missing)}"


def test_percent_twins_are_equal():
    twins = {path.stem: path for path in NOTEBOOKS.glob("percent/*.py")}
    assert sorted(twins) == [name for name, _ in SERIES]
    for name, nb in SERIES:
        twin = jupytext.read(twins[name])
        for index, (ours, theirs) in enumerate(zip(nb.cells, twin.cells, strict=True)):
            assert (ours.cell_type, ours.source) == (theirs.cell_type, theirs.source), (
                f"{name}, cell {index} differs from its twin: run `make notebooks`"
            )
            assert ours.metadata.get("tags") == theirs.metadata.get("tags"), f"{name}, cell {index}"


def test_every_cell_was_executed_in_order():
    for name, nb in SERIES:
        cells = code_cells(nb)
        counts = [cell.execution_count for _, cell in cells]
        assert counts == list(range(1, len(cells) + 1)), name
        assert outputs(nb), f"{name} has no outputs"
        assert nb.metadata.kernelspec == KERNEL, name


def test_no_output_is_an_error_or_script_or_path():
    for name, nb in SERIES:
        assert "widgets" not in nb.metadata, name
        for index, output in outputs(nb):
            where = f"{name}, cell {index}"
            assert output.output_type != "error", where
            assert not [mime for mime in output.get("data", {}) if "javascript" in mime], where
            for text in texts(output):
                assert "<script" not in text.lower(), where
                assert not FOLDERS.search(text), f"{where}: {FOLDERS.search(text)[0]}…"
                assert str(NOTEBOOKS.parent) not in text, where


def test_pictures_have_alt_text():
    for name, nb in SERIES:
        for index, output in outputs(nb):
            assert described(output), f"{name}, cell {index}: a picture has no alt text"
        for index, cell in enumerate(nb.cells):
            if cell.cell_type == "markdown":
                assert not re.search(r"!\[\s*\]\(", cell.source), f"{name}, cell {index}"


def test_house_style():
    for (name, nb), path in zip(SERIES, PATHS, strict=True):
        assert path.stat().st_size < 1_000_000, f"{name} is too large"
        for index, cell in code_cells(nb):
            assert len(cell.source.splitlines()) <= 12, f"{name}, cell {index} is too long"
        code = "\n".join(cell.source for _, cell in code_cells(nb))
        prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
        assert re.search(r"^\s*assert\b", code, re.M), f"{name} asserts nothing"
        missing = [word for word in HEADINGS if word not in prose]
        assert not missing, f"{name} lacks {missing}"


def test_each_notebook_says_how_long_it_takes_as_it_was_measured():
    times = json.loads((NOTEBOOKS / "times.json").read_text(encoding="utf-8"))
    assert sorted(times) == [name for name, _ in SERIES]
    for name, nb in SERIES:
        assert TIME.findall(nb.cells[0].source) == [time_line(nb, **times[name])], name


def test_the_number_of_ranks_is_written_once():
    for name, nb in SERIES:
        code = "\n".join(cell.source for _, cell in code_cells(nb))
        lines = [match[0] for match in RANKS.finditer(code)]
        assert lines == ["%dist_init --num-processes 4"], f"{name}: {lines}"


@pytest.mark.timeout(1200)
def test_zero_one_runs_on_two_ranks(tmp_path):
    run_notebooks.main(["--only", "04_*", "--ranks", "2", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("04_*.ipynb")
    nb = nbformat.read(path, 4)
    assert any("%dist_init --num-processes 2" in cell.source for _, cell in code_cells(nb))
    assert all(cell.execution_count for _, cell in code_cells(nb))


# The runner itself, on small notebooks without ranks.


def small(*sources):
    return new_notebook(cells=[new_markdown_cell("# x")] + [new_code_cell(s) for s in sources])


def test_runner_executes_and_normalises(tmp_path):
    nb, seen = small("print('a'); print('b')", "6 * 7"), []
    execute(nb, "x", folder=tmp_path, progress=lambda cell, cells: seen.append((cell, cells)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert nb.cells[1].outputs[0].text == "a\nb\n" and len(nb.cells[1].outputs) == 1
    assert nb.cells[2].outputs[0].data["text/plain"] == "42"
    assert nb.metadata == {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    assert [cell.id for cell in nb.cells] == ["cell-00", "cell-01", "cell-02"]


def test_runner_runs_cells_in_the_given_folder_and_replaces_the_ranks(tmp_path):
    nb = small("# %dist_init --num-processes 4\nfrom pathlib import Path\nPath('here').touch()")
    execute(nb, "x", folder=tmp_path, ranks=2)
    assert (tmp_path / "here").exists()
    assert nb.cells[1].source.startswith("# %dist_init --num-processes 2\n")


def test_a_failing_cell_stops_the_runner_and_ends_the_kernel(tmp_path):
    nb = small("import os; print('kernel', os.getpid())", "assert 1 == 2, 'params differ'", "2")
    with pytest.raises(NotebookFailed, match=r"(?s)x, cell 2: .*assert 1 == 2.*params differ"):
        execute(nb, "x", folder=tmp_path)
    assert nb.cells[3].execution_count is None
    pid = int(nb.cells[1].outputs[0].text.split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_cell_that_never_ends_is_stopped(tmp_path):
    nb = small("import threading; threading.Event().wait()")
    with pytest.raises(NotebookFailed, match="x, cell 1: CellTimeoutError"):
        execute(nb, "x", folder=tmp_path, timeout=1)


def test_ranks_that_hang_are_stopped_before_the_runner_stops_the_kernel(tmp_path):
    nb = small("%load_ext zero1_helpers\nimport zero1_helpers.ranks.magics as c\nc._magics.timeout")
    execute(nb, "x", folder=tmp_path, timeout=100)
    assert nb.cells[1].outputs[0].data["text/plain"] == "95.0"


def test_an_output_with_the_checkouts_path_is_refused(tmp_path):
    nb = small(f"print({str(NOTEBOOKS)!r})")
    with pytest.raises(NotebookFailed, match="x, cell 1: an output shows the path"):
        execute(nb, "x", folder=tmp_path)


def test_a_failed_run_leaves_the_old_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", tmp_path)
    (tmp_path / "percent").mkdir()
    twin, path = tmp_path / "percent" / "00_x.py", tmp_path / "00_x.ipynb"
    twin.write_text(
        "# %% [markdown]\n# # x\n#\n# **Time.** Unknown.\n\n# %%\nx = 1\nx\n", encoding="utf-8"
    )
    run_notebooks.main(["--in-place"])
    good, cells = path.read_bytes(), nbformat.read(path, 4).cells
    assert cells[1].outputs[0].data["text/plain"] == "1"
    assert cells[0].source == jupytext.read(twin).cells[0].source
    times = json.loads((tmp_path / "times.json").read_text(encoding="utf-8"))
    assert (
        cells[0].source == f"# x\n\n**Time.** {time_line(nbformat.read(path, 4), **times['00_x'])}"
    )
    twin.write_text(twin.read_text(encoding="utf-8") + "raise ValueError('no')\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="00_x, cell 1: CellExecutionError"):
        run_notebooks.main(["--in-place"])
    assert path.read_bytes() == good
    assert sorted(p.name for p in Path(tmp_path).iterdir()) == [
        "00_x.ipynb",
        "percent",
        "times.json",
    ]


def test_the_runner_refuses_when_assertions_are_switched_off(tmp_path):
    command = [
        sys.executable,
        "-O",
        run_notebooks.__file__,
        "--out",
        str(tmp_path / "out"),
        "--only",
        "00_*",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "assertions are switched off" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_user_without_a_home_folder_can_run_notebooks(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    nb = small("print('~/x and /x')")
    run_notebooks.check_paths(nb, "x")
