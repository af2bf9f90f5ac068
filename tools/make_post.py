"""The series as a page: static HTML of the committed notebooks, with their outputs as they are.

    python tools/make_post.py --out build/post             all parts, an index, the recorded runs' explorers
    python tools/make_post.py --out build/post --only '0[34]*'

Nothing is executed. A formula becomes MathML, a picture a file of its own with alt text and caption, long
code is folded, and traces and memory timelines open behind a click. No page needs the network.
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

import nbformat
import numpy as np
from latex2mathml.converter import convert
from matplotlib.colors import to_rgb
from nbconvert.filters import Highlight2HTML, strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from PIL import Image, ImageFilter
from pygments.formatters import HtmlFormatter

from zero1_helpers import VARIANTS
from zero1_helpers.measure.runs import find_runs, load_run, write_atomic
from zero1_helpers.report.figures import COLOURS, THEMES
from zero1_helpers.report.gallery import draw_all
from zero1_helpers.report.pages import trace_html

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_name("post.html")
LONG = 12  # lines of code; more are folded
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
MATH = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$(?!\s)([^$\n]+?)(?<!\s)\$", re.DOTALL)
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PLAIN = re.compile(r'<span class="(?:n|nx|p|pm|w)">([^<]*)</span>')  # drawn as plain text in both themes
CAPTION = re.compile(r"\*([^*].*)\*", re.DOTALL)


def markdown(text: str) -> str:
    """HTML of a Markdown text; formulas outside of code become MathML, long code is folded."""
    parts = CODE.split(text)
    parts[::2] = [MATH.sub(mathml, part) for part in parts[::2]]
    text = FENCE.sub(lambda found: folded(found[1], f"\n\n{found[0]}\n\n"), "".join(parts))
    renderer = IPythonRenderer(escape=False, exclude_anchor_links=True)
    page = MarkdownWithMath(renderer=renderer).render(text)
    page = page.replace("<table>", '<div class="scroll"><table>').replace(
        "</table>", "</table></div>"
    )
    return re.sub(r'href="(\d\d_\w+)\.ipynb', r'href="\1.html', page)


def mathml(found) -> str:
    return convert(found[1] or found[2], display="block" if found[1] else "inline")


def folded(code: str, page: str, what: str = "code") -> str:
    lines = len(code.splitlines())
    if lines <= LONG:
        return page
    return f"<details><summary>{what}, {lines} lines</summary>{page}</details>"


def render(nb, name: str, out: Path) -> str:
    """The body of a notebook's page; its pictures are written into `out`/pictures."""
    parts, highlight = [], Highlight2HTML(pygments_lexer="ipython3")
    for index, cell in enumerate(nb.cells):
        if cell.cell_type == "markdown":
            parts.append(markdown(cell.source))
        elif cell.cell_type == "code":
            parts.append(folded(cell.source, highlight(cell.source)))
            parts += output_parts(cell.outputs, f"{name}-{index:02d}", out)
    return "\n".join(parts)


def output_parts(outputs, stem: str, out: Path):
    """HTML of a cell's outputs; a text in italics below a picture is its caption."""
    outputs = list(outputs)
    for number, output in enumerate(outputs):
        data = output.get("data", {})
        if "image/png" in data:
            alt = output.metadata.get("image/png", {}).get("alt")
            if not alt:
                raise ValueError(f"{stem}: a picture without alt text")
            picture = base64.b64decode(data["image/png"])
            width, height = (int.from_bytes(picture[at : at + 4]) for at in (16, 20))
            path, dark = (
                Path("pictures", f"{stem}-{number}.{theme}png") for theme in ("", "dark.")
            )
            write_atomic(out / path, picture)
            write_atomic(out / dark, darken(picture))
            below = outputs[number + 1].get("data", {}) if number + 1 < len(outputs) else {}
            caption = CAPTION.fullmatch(below.get("text/markdown", "").strip())
            if caption:
                outputs[number + 1] = {}
            text = f"<figcaption>{html.escape(caption[1])}</figcaption>" if caption else ""
            yield (
                f'<figure><div class="scroll"><picture><source media="(prefers-color-scheme: dark)" '
                f'srcset="{dark.as_posix()}"><img src="{path.as_posix()}" alt="{html.escape(alt)}" '
                f'width="{width}" height="{height}" loading="lazy"></picture></div>{text}</figure>'
            )
        elif "text/markdown" in data:
            yield markdown(data["text/markdown"])
        elif "text/html" in data:
            yield f'<div class="scroll">{data["text/html"]}</div>'
        elif (
            text := output.get("text")
            or data.get("text/plain")
            or "\n".join(output.get("traceback", ()))
        ):
            text = strip_ansi(text).rstrip()
            yield folded(text, f'<pre class="out">{html.escape(text)}</pre>', "output")


def darken(picture: bytes) -> bytes:
    """A PNG on light paper in the colours of the dark theme: what was drawn keeps its colour.

    A pixel is nearly always a blend of the paper with one colour, letters' edges for instance. Find which
    and how much; blend the dark paper with that colour's twin. Pixels far from any paper (letters on a
    bar) and blends of two colours stay as they are.
    """
    light, dark = ({key: np.array(to_rgb(value)) for key, value in THEMES[theme].items()}
                   for theme in ("light", "dark"))  # fmt: skip
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


def explorers(runs, variants, out: Path) -> str:
    """Boxes that open the recorded traces and timelines of these variants."""
    boxes = []
    for run, folder in runs:
        if run.variant in variants:
            preset, page = folder.parent.name, f"explore/{folder.parent.name}/{folder.name}.html"
            if not (out / page).exists():
                write_atomic(out / page, trace_html(run).encode())
            timelines = f"figures/{preset}/timelines.html#{run.variant}"
            for what, address in (("trace of all ranks", page), ("memory timeline", timelines)):
                boxes.append(
                    f'<details data-page="{address}"><summary>{html.escape(run.title)}, '
                    f"{html.escape(preset)}: {what}</summary></details>"
                )
    if not boxes:
        return ""
    return (
        '<h2 id="explore">Explore the recorded runs</h2>\n<p class="setting">Runs that come with the '
        "project; the outputs above are this page's own.</p>\n" + "\n".join(boxes)
    )


def comparisons(out: Path, presets) -> str:
    """The figure of all variants, for each preset, in the reader's theme."""
    parts = []
    listed = {entry["file"]: entry for entry in json.loads((out / "figures" / "figures.json").read_text())}
    for preset in presets:
        stem, entry = f"figures/{preset}/comparison", listed[f"{preset}/comparison.light.svg"]
        parts.append(
            '<figure><div class="scroll"><picture>'
            f'<source media="(prefers-color-scheme: dark)" srcset="{stem}.dark.svg">'
            f'<img src="{stem}.light.svg" width="936" alt="{html.escape(entry["alt"])}">'
            "</picture></div>"
            f"<figcaption>All variants. {html.escape(entry['caption'])}</figcaption></figure>"
        )
    return "\n".join(parts)


def page(title: str, body: str, nav: str) -> bytes:
    styles = {"LIGHT": HtmlFormatter(style="default"), "DARK": HtmlFormatter(style="github-dark")}
    parts = {
        key: re.sub(
            r"background: [^;]+;|^pre .*|^td.*|^span.*",
            "",
            style.get_style_defs(".highlight"),
            flags=re.MULTILINE,
        )
        for key, style in styles.items()
    }
    parts |= {"TITLE": html.escape(title), "BODY": PLAIN.sub(r"\1", body), "NAV": nav}
    return re.sub(r"__([A-Z]+)__", lambda found: parts[found[1]], TEMPLATE.read_text()).encode()


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
    try:
        build(paths, args.out, args.runs)
    except (OSError, ValueError) as error:
        sys.exit(f"make_post: {error}")


def build(paths, out: Path, traces: Path):
    """Write all pages beside `out`, then put them there: a page that fails leaves the old ones."""
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        print("figures and timelines of the recorded runs ...", flush=True)
        if draw_all(
            traces,
            part / "figures",
            formats=("svg", "html"),
            only="comparison,timelines",
            jobs=os.cpu_count() or 1,
            progress=lambda line: None,
        ):
            raise ValueError(f"a run under {traces} is damaged; `zero1 figures` names it")
        runs = [(load_run(folder), folder) for folder in find_runs(traces)]
        runs.sort(key=lambda entry: (*VARIANTS, entry[0].variant).index(entry[0].variant))
        notebooks = [nbformat.read(path, 4) for path in paths]
        titles = [re.match(r"# (.+)", nb.cells[0].source)[1] for nb in notebooks]
        entries = []
        for i, (path, nb, title) in enumerate(zip(paths, notebooks, titles, strict=True)):
            print(f"[{i + 1}/{len(paths)}] {path.stem}", flush=True)
            code = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "code")
            named = [name for name in VARIANTS if re.search(rf"""["'/]{name}["']""", code)]
            body = render(nb, path.stem, part) + explorers(runs, named, part)
            links = [
                f'<a href="{paths[i - 1].stem}.html">← {html.escape(titles[i - 1])}</a>'
                if i
                else "",
                '<a href="index.html">All parts</a>',
                f'<a href="{paths[i + 1].stem}.html">{html.escape(titles[i + 1])} →</a>'
                if i + 1 < len(paths)
                else "",
            ]
            nav = "<nav>" + "".join(f"<span>{link}</span>" for link in links) + "</nav>"
            write_atomic(part / f"{path.stem}.html", page(title, body, nav))
            goal = re.search(r"\*\*Goal\.?\*\*\.?\s*(.+?)(?:\n\n|$)", nb.cells[0].source, re.DOTALL)
            entries.append(
                f'<li><a href="{path.stem}.html">{html.escape(title)}</a><br>'
                f"{markdown(goal[1]) if goal else ''}</li>"
            )
        body = (
            "<h1>ZeRO-1, by hand and measured</h1>\n"
            + comparisons(part, sorted({f.parent.name for _, f in runs}))
            + f'\n<ul class="parts">{"".join(entries)}</ul>'
        )
        write_atomic(part / "index.html", page("ZeRO-1, by hand and measured", body, ""))
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{out}/index.html")


if __name__ == "__main__":
    main()
