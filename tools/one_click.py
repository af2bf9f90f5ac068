"""What opens the series in a browser: the README's badges, and a first cell for Colab and Kaggle.

    .venv/bin/python tools/one_click.py          print both
    .venv/bin/python tools/one_click.py --write  put the badges into the README

The repository's address stands in one place: `repository` under `[tool.zero1]` in pyproject.toml. While it is
empty there is nothing to open, so there are no badges, and no notebook has the cell.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FIRST = "notebooks/00_start_here.ipynb"
BADGES = {  # title: (picture, link)
    "Open in GitHub Codespaces": (
        "https://github.com/codespaces/badge.svg",
        "https://codespaces.new/{name}",
    ),
    "Open in Colab": (
        "https://colab.research.google.com/assets/colab-badge.svg",
        "https://colab.research.google.com/github/{name}/blob/main/{first}",
    ),
    "Open in Kaggle": (
        "https://kaggle.com/static/images/open-in-kaggle.svg",
        "https://kaggle.com/kernels/welcome?src={address}/blob/main/{first}",
    ),
}
MARKS = "<!-- badges, by tools/one_click.py -->", "<!-- end of badges -->"
CELL = """\
# Colab and Kaggle: fetch the series and install it. Where it is installed, this cell does nothing.
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("zero1_helpers") is None:
    subprocess.run(["git", "clone", "--depth=1", "{address}", "zero1"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "{what}"], check=True)
if os.path.isdir("zero1/notebooks"):
    os.chdir("zero1/notebooks")
"""


def address() -> str:
    """https://github.com/OWNER/NAME, or "" as long as there is none."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = settings["tool"]["zero1"]["repository"].removesuffix("/").removesuffix(".git")
    if found and not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", found):
        raise ValueError(
            f"pyproject.toml: repository is https://github.com/OWNER/NAME, not {found}"
        )
    return found


def badges(address: str) -> str:
    """One line of Markdown; nothing without an address."""
    where = {
        "address": address,
        "name": address.removeprefix("https://github.com/"),
        "first": FIRST,
    }
    links = [f"[![{t}]({picture})]({to.format(**where)})" for t, (picture, to) in BADGES.items()]
    return " ".join(links) if address else ""


def first_cell(address: str, extras: str = "notebooks,figures") -> str:
    """Source of the code cell that stands before `%load_ext zero1_helpers`; nothing without an address."""
    return CELL.format(address=address, what=f"./zero1[{extras}]") if address else ""


def with_badges(page: str, address: str) -> str:
    """The README with the badges of this address between its marks."""
    begin, end = MARKS
    if begin not in page or end not in page:
        raise ValueError(f"README.md: the marks {begin} and {end} are not there")
    return page.partition(begin)[0] + f"{begin}{badges(address)}{end}" + page.partition(end)[2]


def main() -> int:
    try:
        if sys.argv[1:] == ["--write"]:
            page = with_badges(README.read_text(encoding="utf-8"), address())
            README.write_text(page, encoding="utf-8")
        else:
            print(badges(address()), first_cell(address()), sep="\n\n")
    except (ValueError, KeyError) as error:
        print(f"one_click.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
