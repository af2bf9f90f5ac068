"""The series as a page: static HTML of the committed notebooks, with their outputs as they are.

    python tools/make_post.py --out build/post             all parts, an index, the recorded runs' explorers
    python tools/make_post.py --out build/post --only '0[34]*'

Nothing is executed. A formula becomes MathML, a picture a file of its own with alt text and caption, long
code is folded, and traces and memory timelines open behind a click. No page needs the network, and none
runs a script but its own: what notebooks and runs say is text, and so are tags in it.
"""

import argparse
import base64
import html
import io
import json
import os
import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import quote

import nbformat
import numpy as np
from latex2mathml.converter import convert
from markupsafe import Markup
from matplotlib.colors import to_rgb
from nbconvert.filters import Highlight2HTML, strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from PIL import Image, ImageFilter
from pygments.formatters import HtmlFormatter

from zero1_helpers import VARIANTS
from zero1_helpers.measure.files import RunError, write_atomic
from zero1_helpers.measure.runs import Run, load_run, run_folders, run_names
from zero1_helpers.measure.terminal import complain, say, tolerate_any_terminal
from zero1_helpers.report.gallery import draw_all, preset_of
from zero1_helpers.report.html import render as render_page
from zero1_helpers.report.pages import trace_html
from zero1_helpers.report.style import COLOURS, THEMES

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
LONG = 12  # lines of code; more are folded
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
MATH = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$(?!\s)([^$\n]+?)(?<!\s)\$", re.DOTALL)
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PLAIN = re.compile(
    r'<span class="(?:n|nx|p|pm|w)">([^<]*)</span>'
)  # drawn as plain text in both themes
CAPTION = re.compile(r"\*([^*].*)\*", re.DOTALL)


TAGS = re.compile(r"&lt;(/?(?:details|summary|code))&gt;")  # those that notebooks may use, bare
FORMULA = re.compile("\ue000(\\d+)\ue001")


class Renderer(IPythonRenderer):
    """Markdown's HTML; other tags than TAGS are shown as they are written."""

    def __init__(self):
        super().__init__(escape=True, exclude_anchor_links=True, allow_harmful_protocols=False)

    def inline_html(self, raw: str) -> str:
        return TAGS.sub(r"<\1>", str(Markup.escape(html.unescape(raw))))

    def block_html(self, raw: str) -> str:
        return self.inline_html(raw) + "\n"


def markdown(text: str) -> Markup:
    """HTML of a Markdown text; formulas outside of code become MathML, long code is folded."""
    formulas = []

    def kept(found) -> str:
        formulas.append(mathml(found))
        return f"\ue000{len(formulas) - 1}\ue001"

    parts = CODE.split(text.replace("\ue000", ""))
    parts[::2] = [MATH.sub(kept, part) for part in parts[::2]]
    text = FENCE.sub(lambda found: folded(found[1], f"\n\n{found[0]}\n\n"), "".join(parts))
    page = MarkdownWithMath(renderer=Renderer()).render(text)
    page = FORMULA.sub(lambda found: formulas[int(found[1])], page)
    page = page.replace("<table>", '<div class="scroll"><table>').replace(
        "</table>", "</table></div>"
    )
    return Markup(re.sub(r'href="(\d\d_\w+)\.ipynb', r'href="\1.html', page))


def mathml(found) -> str:
    return convert(found[1] or found[2], display="block" if found[1] else "inline")


def folded(code: str, page: str, what: str = "code") -> str:
    """`page`, behind a line to click on if `code` is long. Of the same kind as `page`: text or Markup."""
    lines = len(code.splitlines())
    if lines <= LONG:
        return page
    return type(page)("<details><summary>{}</summary>{}</details>").format(
        f"{what}, {lines} lines", page
    )


def render(nb, name: str, out: Path) -> Markup:
    """The body of a notebook's page; its pictures are written into `out`/pictures."""
    parts, highlight = [], Highlight2HTML(pygments_lexer="ipython3")
    for index, cell in enumerate(nb.cells):
        if cell.cell_type == "markdown":
            parts.append(markdown(cell.source))
        elif cell.cell_type == "code":
            parts.append(folded(cell.source, Markup(highlight(cell.source))))
            parts += output_parts(cell.outputs, f"{name}-{index:02d}", out)
    return Markup("\n").join(parts)


FIGURE = Markup(
    '<figure><div class="scroll"><picture><source media="(prefers-color-scheme: dark)" '
    'srcset="{dark}"><img src="{light}" alt="{alt}" {size}></picture></div>{caption}</figure>'
)


def output_parts(outputs, stem: str, out: Path):
    """HTML of a cell's outputs; a text in italics below a picture is its caption."""
    outputs = list(outputs)
    for number, output in enumerate(outputs):
        data = output.get("data", {})
        if "image/png" in data:
            below = outputs[number + 1].get("data", {}) if number + 1 < len(outputs) else {}
            caption = CAPTION.fullmatch(below.get("text/markdown", "").strip())
            if caption:
                outputs[number + 1] = {}
            yield picture_part(output, f"{stem}-{number}", caption[1] if caption else "", out)
        elif "text/markdown" in data:
            yield markdown(data["text/markdown"])
        elif (
            text := output.get("text")
            or data.get("text/plain")
            or "\n".join(output.get("traceback", ()))
        ):
            text = strip_ansi(text).rstrip()
            yield folded(text, Markup('<pre class="out">{}</pre>').format(text), "output")


def picture_part(output, stem: str, caption: str, out: Path) -> Markup:
    alt = output.metadata.get("image/png", {}).get("alt")
    if not alt:
        raise ValueError(f"{stem}: a picture without alt text")
    picture = base64.b64decode(output["data"]["image/png"])
    width, height = (int.from_bytes(picture[at : at + 4]) for at in (16, 20))
    path, dark = (Path("pictures", f"{stem}.{theme}png") for theme in ("", "dark."))
    write_atomic(out / path, picture)
    write_atomic(out / dark, darken(picture))
    return FIGURE.format(
        dark=dark.as_posix(),
        light=path.as_posix(),
        alt=alt,
        size=Markup('width="{}" height="{}" loading="lazy"').format(width, height),
        caption=Markup("<figcaption>{}</figcaption>").format(caption) if caption else "",
    )


def darken(picture: bytes) -> bytes:
    """A PNG on light paper in the colours of the dark theme: what was drawn keeps its colour.

    A pixel is nearly always a blend of the paper with one colour, letters' edges for instance. Find which
    and how much; blend the dark paper with that colour's twin. Pixels far from any paper (letters on a
    bar) and blends of two colours stay as they are.
    """
    light, dark = (
        {key: np.array(to_rgb(value)) for key, value in THEMES[theme].items()}
        for theme in ("light", "dark")
    )
    twins = [(light[key], dark[key]) for key in ("ink", "muted", "rule")] + [
        (np.zeros(3), dark["ink"])
    ]
    twins += [(np.array(to_rgb(colour)),) * 2 for colour in dict.fromkeys(COLOURS.values())]
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    pixels = np.asarray(image)
    on_paper = (
        np.asarray(Image.fromarray(pixels.min(axis=2)).filter(ImageFilter.MaxFilter(9))) > 250
    )
    codes, where = np.unique(pixels.astype(int) @ (1 << 16, 1 << 8, 1), return_inverse=True)
    colours = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=1) / 255
    seen = colours - light["paper"]
    best, result = np.full(len(seen), 0.02), colours.copy()
    for before, after in twins:
        line = before - light["paper"]
        share = np.clip(seen @ line / (line @ line), 0, 1)[:, None]
        error = np.abs(seen - share * line).max(axis=1)
        better = error < best - 1e-6
        best[better] = error[better]
        result[better] = (share * after + (1 - share) * dark["paper"])[better]
    buffer = io.BytesIO()
    mapped = (255 * result).round().astype(np.uint8)[where].reshape(pixels.shape)
    Image.fromarray(np.where(on_paper[..., None], mapped, pixels)).save(buffer, "PNG")
    return buffer.getvalue()


def explorers(runs: dict[str, Run], variants, out: Path) -> Markup:
    """Boxes that open the recorded traces and timelines of these variants. `runs`: {name: run}."""
    boxes = []
    for name, run in runs.items():
        if run.variant in variants:
            page = f"explore/{name}.html"
            if not (out / page).exists():
                write_atomic(out / page, trace_html(run).encode())
            preset, _, folder = name.rpartition("/")
            timelines = f"{address(f'figures/{preset}/timelines.html')}#{address(folder)}"
            for what, where in (
                ("trace of all ranks", address(page)),
                ("memory timeline", timelines),
            ):
                box = '<details data-page="{}"><summary>{}, {}: {}</summary></details>'
                boxes.append(Markup(box).format(where, run.title, preset, what))
    if not boxes:
        return Markup()
    return Markup(
        '<h2 id="explore">Explore the recorded runs</h2>\n<p class="setting">Runs that come with the '
        "project; the outputs above are this page's own.</p>\n{}"
    ).format(Markup("\n").join(boxes))


def address(path: str) -> str:
    """A file's path as a page's address: a folder may be called `50% #1?`."""
    return quote(os.fsencode(path))


def comparisons(out: Path, presets) -> Markup:
    """The figure of all variants, for each preset, in the reader's theme."""
    parts = []
    entries = json.loads((out / "figures" / "figures.json").read_text(encoding="utf-8"))
    listed = {entry["file"]: entry for entry in entries}
    for preset in presets:
        if entry := listed.get(f"{preset}/comparison.light.svg"):
            stem = f"figures/{preset}/comparison"
            caption = Markup("<figcaption>All variants. {}</figcaption>").format(entry["caption"])
            parts.append(
                FIGURE.format(
                    dark=address(f"{stem}.dark.svg"),
                    light=address(f"{stem}.light.svg"),
                    alt=entry["alt"],
                    size=Markup('width="936"'),
                    caption=caption,
                )
            )
    return Markup("\n").join(parts)


def page(title: str, body: Markup, nav: Markup) -> bytes:
    styles = {"light": HtmlFormatter(style="default"), "dark": HtmlFormatter(style="github-dark")}
    unused = re.compile(r"background: [^;]+;|^pre .*|^td.*|^span.*", re.MULTILINE)
    parts = {
        name: Markup(unused.sub("", style.get_style_defs(".highlight")))
        for name, style in styles.items()
    }
    body = Markup(PLAIN.sub(r"\1", body))
    return render_page("post.html", folder=HERE, title=title, body=body, nav=nav, **parts).encode()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "post")
    parser.add_argument("--only", default="*", metavar="GLOB", help="names of parts, e.g. '0[34]*'")
    parser.add_argument("--runs", type=Path, default=ROOT / "traces")
    args = parser.parse_args(argv)
    paths = [
        path
        for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
        if fnmatch(path.stem, args.only)
    ]
    if not paths:
        parser.error(f"no notebook is called {args.only}")
    tolerate_any_terminal()
    try:
        return bool(build(paths, args.out, args.runs))
    except KeyboardInterrupt:
        sys.exit("make_post: interrupted")
    except (OSError, ValueError) as error:
        sys.exit(f"make_post: {error}")


def build(paths, out: Path, traces: Path) -> int:
    """Write all pages beside `out`, then put them there: a page that fails leaves the old ones.

    A damaged run is named and left out. Returns how many were.
    """
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        say("figures and timelines of the recorded runs ...")
        runs, damaged = sound_runs(traces)
        if runs:
            folders = [run.folder for run in runs.values()]
            damaged += draw_all(
                folders,
                part / "figures",
                formats=("svg", "html"),
                only="comparison,timelines",
                jobs=os.cpu_count() or 1,
                progress=lambda line: line.startswith("skipped") and complain("make_post", line),
            )
        notebooks = [nbformat.read(path, 4) for path in paths]
        titles = [re.match(r"# (.+)", nb.cells[0].source)[1] for nb in notebooks]
        entries = []
        for i, (path, nb, title) in enumerate(zip(paths, notebooks, titles, strict=True)):
            say(f"[{i + 1}/{len(paths)}] {path.stem}")
            code = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "code")
            named = [name for name in VARIANTS if re.search(rf"""["'/]{name}["']""", code)]
            body = Markup("{}{}").format(render(nb, path.stem, part), explorers(runs, named, part))
            nav = navigation(paths, titles, i)
            write_atomic(part / f"{path.stem}.html", page(title, body, nav))
            entries.append(entry_of(path, nb, title))
        presets = sorted({preset_of(name) for name in runs})
        body = Markup('<h1>{}</h1>\n{}\n<ul class="parts">{}</ul>').format(
            TITLE, comparisons(part, presets), Markup().join(entries)
        )
        write_atomic(part / "index.html", page(TITLE, body, Markup()))
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    say(f"{out}/index.html")
    return damaged


TITLE = "ZeRO-1, by hand and measured"


def sound_runs(traces: Path) -> tuple[dict[str, Run], int]:
    """({name: run} in the order of the series, how many are damaged)."""
    sound, damaged = [], 0
    for folder in run_folders(traces):
        try:
            sound.append(load_run(folder))
        except RunError as error:
            damaged += 1
            complain("make_post", f"skipped: {error}")
    sound.sort(key=lambda run: (*VARIANTS, run.variant).index(run.variant))
    names = run_names(run.folder for run in sound)
    return {names[run.folder]: run for run in sound}, damaged


def navigation(paths, titles, i: int) -> Markup:
    """Links to the part before, to all parts, and to the next one."""
    link = Markup('<span><a href="{}.html">{}</a></span>')
    before = link.format(paths[i - 1].stem, f"← {titles[i - 1]}") if i else Markup("<span></span>")
    after = Markup("<span></span>")
    if i + 1 < len(paths):
        after = link.format(paths[i + 1].stem, f"{titles[i + 1]} →")
    return Markup("<nav>{}{}{}</nav>").format(before, link.format("index", "All parts"), after)


def entry_of(path: Path, nb, title: str) -> Markup:
    """A part in the index: its title, and its goal."""
    goal = re.search(r"\*\*Goal\.?\*\*\.?\s*(.+?)(?:\n\n|$)", nb.cells[0].source, re.DOTALL)
    text = markdown(goal[1]) if goal else ""
    return Markup('<li><a href="{}.html">{}</a><br>{}</li>').format(path.stem, title, text)


if __name__ == "__main__":
    sys.exit(main())
