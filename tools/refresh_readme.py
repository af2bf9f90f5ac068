"""Draw the README's picture and write its results table, both from traces/."""

from pathlib import Path

from zero1_helpers.measure.files import write_atomic
from zero1_helpers.measure.runs import find_runs, load_run
from zero1_helpers.report.comparisons import comparison
from zero1_helpers.report.style import save
from zero1_helpers.report.tables import replace_marked, report

ROOT = Path(__file__).resolve().parent.parent

runs = [load_run(folder) for folder in find_runs(ROOT / "traces")]
real = [run for run in runs if run.record["preset"] == "smollm2-360m"]
for theme in ("light", "dark"):
    save(comparison(real, theme=theme), ROOT / "docs" / f"comparison.{theme}", formats=("png",))
page = ROOT / "README.md"
text = replace_marked(page.read_text(encoding="utf-8"), report(runs))
write_atomic(page, text.encode())
