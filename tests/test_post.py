"""The series as a page, in headless Chromium: whole, quiet, readable, at two widths and in both themes."""

import re

import pytest

from tools import make_post
from zero1_helpers.measure.runs import load_run

from .test_explorer import LOOKS, quiet
from .test_runs import make_run

PARTS = sorted(path.stem for path in (make_post.ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.fixture(scope="module")
def post(tmp_path_factory):
    root = tmp_path_factory.mktemp("post")
    for name in ("ddp", "zero1"):
        make_run(root / "traces" / "tiny" / name, 2, variant=name, title=name.upper())
    make_post.main(["--out", str(root / "post"), "--runs", str(root / "traces")])
    assert sorted(path.name for path in root.iterdir()) == ["post", "traces"]
    return root / "post"


def test_there_is_a_page_for_each_part_and_an_index(post):
    assert sorted(path.stem for path in post.glob("*.html")) == [*PARTS, "index"]
    for path in post.rglob("*.html"):
        assert path.stat().st_size < (200_000 if path.parent == post else 4_000_000), path


def test_every_picture_has_alt_text_and_a_caption(post):
    pictures = 0
    for path in post.glob("*.html"):
        page = path.read_text()
        for tag in re.findall(r"<img\b[^>]*>", page):
            assert re.search(r'\balt="[^"]{20,}"', tag), f"{path.name}: {tag}"
        figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
        assert page.count("<img") == len(figures)
        for figure in figures:
            assert re.search(r"<figcaption>[^<]{40,}</figcaption>", figure), (
                f"{path.name}: {figure[:300]}"
            )
        pictures += len(figures)
    assert pictures > 20


def test_formulas_are_mathml_and_long_code_is_folded(post):
    page = (post / "01_training_memory.html").read_text()
    assert page.count("<math") > 20 and "<mfrac>" in page
    for path in post.glob("*.html"):
        text = re.sub(
            r"<pre.*?</pre>|<code.*?</code>|<script.*?</script>",
            "",
            path.read_text(),
            flags=re.DOTALL,
        )
        assert "$" not in text, path.name
        shown = re.sub(r"<details.*?</details>", "", path.read_text(), flags=re.DOTALL)
        blocks = re.findall(r"<pre>(.*?)</pre>", shown, re.DOTALL)
        assert all(len(block.strip().splitlines()) <= make_post.LONG for block in blocks), path.name


def test_links_lead_somewhere(post):
    for path in post.glob("*.html"):
        links = re.findall(r'\b(?:href|src|srcset|data-page)="([^"]+)"', path.read_text())
        assert len(links) > 2
        for link in links:
            assert not link.startswith(("http", "/")) or "<nav" not in link
            if not link.startswith(("#", "data:", "http")):
                assert (post / link.split("#")[0]).is_file(), f"{path.name}: {link}"


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_chromium_shows_every_page(chromium, post, width, theme):
    for path in sorted(post.glob("*.html")):
        chromium.open(path.as_uri(), width, theme=theme)
        chromium.ask("document.querySelectorAll('img').forEach(image => image.loading = 'eager')")
        chromium.wait("[...document.images].every(image => image.complete)")
        assert chromium.ask("[...document.images].every(image => image.naturalWidth > 100)"), (
            path.name
        )
        used = chromium.ask("[...document.images].map(image => image.currentSrc)")
        assert all((".dark." in source) == (theme == "dark") for source in used), path.name
        assert chromium.ask("document.documentElement.scrollWidth") <= width, (
            f"{path.name} is wider than {width}"
        )
        wide = chromium.ask(
            "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, pre, math')"
            " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"
        )
        assert not wide, f"{path.name}: {wide[:3]}"
        if width > 600:  # nor is code or a table cut off on a desktop
            cut = chromium.ask(
                "[...document.querySelectorAll('.scroll, pre, math')].filter("
                "e => e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML)"
            )
            assert not cut, f"{path.name}: {cut[:3]}"
        paper = chromium.ask("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 27)"}[theme]
        quiet(chromium)


def test_a_trace_and_a_timeline_open_behind_a_click(chromium, post):
    chromium.open((post / "03_ddp_baseline.html").as_uri())
    assert not any("explore/" in url or "timelines" in url for url in chromium.requests)
    assert chromium.ask("document.querySelectorAll('details[data-page]').length") == 2
    chromium.ask(
        "document.querySelectorAll('details[data-page] > summary').forEach(box => box.click())"
    )
    chromium.wait(
        "[...document.querySelectorAll('iframe')].length === 2 && [...document.querySelectorAll('iframe')]"
        ".map(frame => (frame.contentDocument.body ?? frame).dataset)"
        ".every(seen => seen.ranks || 'ready' in seen)"
    )
    quiet(chromium)


def test_a_formula_in_code_stays_code():
    page = make_post.markdown(
        "`$HOME` costs \\$5 and $N$ of $$\\frac{K\\Psi}{N}$$\n\n```bash\necho $A $B\n```\n"
    )
    assert page.count("<math") == 2 and "$HOME" in page
    assert "$A" in re.sub(r"<[^>]+>", "", page)


def test_tags_of_a_notebook_are_text():
    page = make_post.markdown(
        "<script>alert(1)</script> a <b onclick=x>b</b> <img src=x onerror=y> [x](javascript:alert(1)) "
        "$a<b$\n\n<details><summary>Hint</summary>use `<b>` & <code>x</code></details>\n\n<iframe src=x>\n"
    )
    known = {"p", "a", "code", "details", "summary", "math", "mrow", "mi", "mo"}
    assert set(re.findall(r"<(\w+)", page)) <= known
    assert 'href="javascript:' not in page and "<details><summary>Hint</summary>" in page


def test_dark_pictures_keep_colours_and_turn_paper_and_ink(tmp_path):
    import io

    import numpy as np
    from PIL import Image

    from zero1_helpers.report import figures, style

    run = load_run(make_run(tmp_path / "tiny" / "ddp", variant="ddp"))
    light, dark = (
        style.render(figures.temporal_breakdown(run, theme=theme)) for theme in style.THEMES
    )
    wanted, found = (
        np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
        for png in (dark, make_post.darken(light))
    )
    assert (abs(wanted - found).max(axis=2) > 40).mean() < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "99*"], "no notebook is called 99"),
        (["--runs", "nowhere"], "nowhere: no recorded run"),
    ],
)
def test_what_cannot_be_built_gets_one_line_and_leaves_the_old_page(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "post").mkdir()
    (tmp_path / "post" / "index.html").write_text("old")
    with pytest.raises(SystemExit) as stopped:
        make_post.main(["--out", "post", *arguments])
    assert message in str(stopped.value.code) + capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["post"]
    assert (tmp_path / "post" / "index.html").read_text() == "old"
