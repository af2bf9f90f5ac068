"""The map knows every module and folder, the glossary its own words, and no link leads nowhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]


def text_of(page):
    return page.read_text(encoding="utf-8")


def test_the_map_names_every_module_of_the_algorithm_and_every_folder():
    page = text_of(ROOT / "CONTRIBUTING.md")
    package = ROOT / "zero1_helpers"
    modules = [path.name for path in package.glob("*.py") if not path.name.startswith("_")]
    folders = [path.name for path in package.iterdir() if (path / "__init__.py").exists()]
    assert not [name for name in modules if f"(zero1_helpers/{name})" not in page]
    assert not [name for name in folders if f"(zero1_helpers/{name})" not in page]


def test_what_the_map_sends_a_reader_to_is_there():
    page = text_of(ROOT / "CONTRIBUTING.md")
    rows = page.partition("| if you want to change | open |")[2].partition("\n\n")[0].splitlines()
    named = [
        (name.rpartition(".")[2], ROOT / path)
        for row in rows
        for name in re.findall(
            r"`([A-Za-z_.]+)`(?=.* in \[)", row.split("|")[2] if "|" in row else ""
        )
        for path in re.findall(r"\]\((.*?)\)", row)[-1:]
    ]
    assert len(named) >= 5
    assert not [name for name, path in named if name not in text_of(path)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, heading = target.partition("#")
        if "://" in target:
            continue
        where = (page.parent / path).resolve() if path else page
        assert where.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", text_of(where), re.M)
            assert heading in [
                re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles
            ], target


def entries():
    """{term: explanation} of the glossary, and its sections as lists of terms."""
    page, known, sections = text_of(ROOT / "docs/glossary.md"), {}, []
    for section in page.split("\n## ")[1:]:
        found = re.findall(r"^\*\*(.+?)\*\*(.*)$", section, re.M)
        known |= dict(found)
        sections.append([term for term, _ in found])
    return known, sections


def test_the_glossary_has_the_words_that_stop_readers_and_explains_what_it_uses():
    known, sections = entries()
    needed = """kernel step states bucket flag link lane handle stream rank world_size shard
        reduce-scatter all-gather broadcast all-reduce collective overlap micro-batch flat""".split()
    assert not [word for word in needed if word not in known]
    for terms in sections:
        assert terms == sorted(terms, key=lambda t: (not t.isascii(), t.lower()))
    explained = " ".join(known.values())
    used = {word.lower() for word in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", explained)}
    there = {term.lower() + ending for term in known for ending in ("", "s", "es", "es'")}
    assert used <= there | {"step of the optimizer"}, used - there
