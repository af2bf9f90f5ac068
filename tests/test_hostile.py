"""A run folder from a stranger: its texts stay texts, in pages, paths, terminals and addresses."""

import gzip
import html
import json
import os
import queue
import random
import re
import shutil
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tools import make_post
from zero1_helpers.cli import main
from zero1_helpers.measure.files import RunError
from zero1_helpers.measure.runs import load_run
from zero1_helpers.report import frames, gallery, pages, server
from zero1_helpers.report.style import COLOURS, STACK

from .processes import as_nobody, two_users
from .test_runs import edit, make_run

TAG = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
HOSTILE = f"</title></script>\"'><b>{TAG}"[:190]
ODD = "50% #1? $HOME$ `id` & <b>"


def renamed(names):
    def rename(trace):
        for event in trace["traceEvents"]:
            event["name"] = names.get(event["name"], event["name"])

    return rename


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Two runs in folders with odd names, whose every text is an attack; and one that is damaged."""
    root = tmp_path_factory.mktemp("hostile")
    for name in (ODD, "../up".replace("/", "\u2215"), "zero1"):
        folder = make_run(
            root / "a $x$ #%" / name, 2, variant="../../" + HOSTILE[:150], title=HOSTILE
        )
        texts = dict.fromkeys(("preset", "backend", "hardware", "link"), HOSTILE)
        edit(
            "run.json", lambda r, texts=texts: r.update(texts, model=r["model"] | {"name": HOSTILE})
        )(folder)
        names = {"zero1.launch 0": "zero1." + HOSTILE}
        for rank in range(2):
            edit(f"trace.rank{rank}.json.gz", renamed(names))(folder)
    shutil.copytree(root / "a $x$ #%" / "zero1", root / "a $x$ #%" / "broken")
    (root / "a $x$ #%" / "broken" / "run.json").write_bytes(b"{}")
    return root


def executables(page: str) -> list[str]:
    """Tags that an attack has made, if they are not escaped as in HTML or as in Markdown."""
    return re.findall(r"(?<!\\)<(?:img src=x|script>document\.title)", page)


def test_every_text_of_a_run_is_escaped_in_every_page(hostile, tmp_path):
    assert main(["export-trace", str(hostile), "--html", "--out", str(tmp_path / "pages")]) == 1
    assert make_post.main(
        ["--runs", str(hostile), "--out", str(tmp_path / "post"), "--only", "03*"]
    )
    written = list(tmp_path.rglob("*.html"))
    assert len(written) == 3 + (2 + 1)
    for path in written:
        page = path.read_text(encoding="utf-8")
        assert not executables(page), path
        assert 'http-equiv="Content-Security-Policy" content="default-src &#39;none&#39;' in page, (
            path
        )
    assert {path.name for path in tmp_path.iterdir()} == {"pages", "post"}  # nothing beside them


def test_a_script_in_a_page_does_not_run_even_if_a_tag_gets_through(
    chromium, hostile, tmp_path, monkeypatch
):
    run = load_run(hostile / "a $x$ #%" / "zero1")
    colours = {name: COLOURS[name] for name in STACK}
    for name, page in (
        ("trace", pages.trace_html(run)),
        ("lines", pages.timelines_html([run], colours)),
    ):
        path = tmp_path / f"{name}.html"
        path.write_text(page.replace("</body>", TAG + "</body>"), encoding="utf-8")
        chromium.open(path.as_uri())
        chromium.wait("document.body.dataset.ranks || 'ready' in document.body.dataset")
        assert chromium.ask("document.title") != "owned"
        assert any("Content Security Policy" in error for error in chromium.errors)


def test_texts_on_the_terminal_stay_on_their_line(hostile, capsys):
    assert main(["report", "--runs", str(hostile)]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "broken" in said.err
    assert not executables(said.out)
    rows = [line for line in said.out.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows[: 2 + 3]}) == 1  # as many cells


def test_two_runs_of_one_variant_have_a_page_each(tmp_path):
    for name in ("a/tiny/ddp", "b/tiny/ddp", "b/tiny/again"):
        make_run(tmp_path / "runs" / name, 1, variant="ddp")
    assert (
        main(["export-trace", str(tmp_path / "runs"), "--html", "--out", str(tmp_path / "out")])
        == 0
    )
    assert len(list((tmp_path / "out").rglob("trace.html"))) == 3
    out, kinds = tmp_path / "figures", ("png", "html")
    assert not gallery.draw_all(
        tmp_path / "runs", out, "light", kinds, "memory,timelines", progress=str
    )
    assert (
        len(list(out.rglob("memory.light.png"))) == 3
        and len(list(out.rglob("timelines.html"))) == 2
    )


def test_an_odd_folder_has_its_page_and_its_hash(chromium, hostile, tmp_path):
    runs = [load_run(hostile / "a $x$ #%" / name) for name in (ODD, "zero1")]
    path = tmp_path / "timelines.html"
    path.write_text(
        pages.timelines_html(runs, {name: COLOURS[name] for name in STACK}), encoding="utf-8"
    )
    for name in (ODD, "zero1"):
        chromium.open("about:blank")
        chromium.open(f"{path.as_uri()}#{make_post.address(name)}")
        chromium.wait("'ready' in document.body.dataset")
        assert chromium.ask("find('variant').value") == name
    chromium.open("about:blank")
    chromium.open(f"{path.as_uri()}#%")  # no address of anything
    chromium.wait("'ready' in document.body.dataset")


def test_somebody_elses_figures_json_is_not_replaced(tmp_path, capsys):
    make_run(tmp_path / "runs" / "tiny" / "ddp")
    for text in ("{}", "[1]", "not JSON", '[{"file": 3}, {"no": "file"}]'):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "figures.json").write_text(text, encoding="utf-8")
        if text == "{}":
            continue  # an empty one
        assert (
            main(["figures", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
        )
        assert capsys.readouterr().err.count("\n") == 1
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["figures.json"]


# Any damage at all

VALUES = [None, True, -1, 0, 1, 2**31, 2**63, 1e308, float("nan"), float("inf"), -0.5]
VALUES += ["", "x", "\x1b[31m", "a\nb", "9" * 400, [], {}, [1], {"a": 1}]


def damaged_somewhere(value, rng):
    """The same JSON value with one leaf or branch replaced, removed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: damaged_somewhere(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:at] + value[at + 1 :]
        return value[:at] + [damaged_somewhere(value[at], rng)] + value[at + 1 :]
    return rng.choice(VALUES)


@pytest.mark.parametrize("name", ["run.json", "trace.rank0.json.gz"])
def test_any_damage_is_one_line_or_harmless(name, tmp_path):
    rng = random.Random(name)
    folder = make_run(tmp_path / "run", 1)
    data = (folder / name).read_bytes()
    whole = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    drawn = 0
    for _ in range(100):
        text = json.dumps(damaged_somewhere(whole, rng)).encode()
        (folder / name).write_bytes(gzip.compress(text, 1) if name.endswith("gz") else text)
        try:
            run = load_run(folder)
        except RunError as error:
            assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1000
            continue
        if drawn < 5:
            drawn += 1
            frames.temporal_breakdown(run)
            pages.merged_trace(run)
            run.caption.encode()
    assert drawn


# The viewer


@pytest.fixture
def viewer(tmp_path):
    run = load_run(make_run(tmp_path / "tiny" / ODD, 1, variant="../../" + HOSTILE[:150]))
    with server.serve(run, 0) as viewer:
        threading.Thread(target=viewer.serve_forever, daemon=True).start()
        yield viewer
        viewer.shutdown()


def ask(viewer, path, **headers):
    request = urllib.request.Request(
        f"http://127.0.0.1:{viewer.server_port}{path}", headers=headers
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, b""


def test_the_viewer_needs_its_token_and_its_own_name(viewer):
    trace = viewer.prefix + "localtrace"
    status, headers, data = ask(viewer, trace)
    assert status == 200 and json.loads(data)["traceEvents"]
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    for path in (
        "/",
        "/localtrace",
        "/index.html",
        "/" + "A" * 32 + "/localtrace",
        viewer.prefix + "../localtrace",
        viewer.prefix + "..%2f..%2fviewer.py",
        viewer.prefix + "%2fetc%2fpasswd",
        viewer.prefix + "/etc/passwd",
    ):
        assert ask(viewer, path)[0] == 404, path
    for host in (
        "evil.example",
        f"evil.example:{viewer.server_port}",
        "127.0.0.1",
        "",
    ):  # DNS rebinding
        assert ask(viewer, trace, Host=host)[0] == 403, host


def test_a_slow_reader_blocks_nobody_and_no_folder_is_changed(viewer):
    here, slow = os.getcwd(), []
    for _ in range(8):
        slow.append(socket.create_connection(("127.0.0.1", viewer.server_port)))
        slow[-1].sendall(
            f"GET {viewer.prefix}stdlib_docs.json HTTP/1.1\r\nHo".encode()
        )  # and no more
    assert ask(viewer, viewer.prefix)[0] == 200
    assert os.getcwd() == here
    for client in slow:
        client.close()


def test_a_page_from_the_web_cannot_read_the_viewer(chromium, viewer, tmp_path):
    """As another origin, in the same browser, even when it knows the address."""
    path = tmp_path / "evil.html"
    path.write_text("<title>evil</title>", encoding="utf-8")
    chromium.open(path.as_uri())
    address = viewer.address.split("#")[0]
    for attempt in (
        f"fetch('{address}localtrace').then(r => r.text()).then(() => 'read', () => 'refused')",
        f"new Promise(done => {{ const s = document.createElement('script'); s.src = '{address}"
        "offline.js'; s.onload = () => done('read'); s.onerror = () => done('refused'); "
        "document.head.append(s) })",
    ):
        assert chromium.ask(attempt) == "refused"
    chromium.open("about:blank")


def test_the_address_is_on_no_command_line(viewer, monkeypatch):
    opened = queue.Queue()
    monkeypatch.setattr(server.webbrowser, "open", opened.put)
    with server.opened_in_a_browser(viewer.address):
        page = opened.get(timeout=30)
        assert viewer.prefix not in page
        path = Path(urllib.parse.unquote(page.removeprefix("file://")))
        assert viewer.address in html.unescape(path.read_text(encoding="utf-8"))
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


@two_users
def test_another_user_reaches_the_viewer_but_gets_nothing(viewer):
    def attack():
        for path in ("/", "/localtrace", "/" + "A" * 32 + "/localtrace"):
            assert ask(viewer, path)[0] == 404

    assert as_nobody(attack) == 0
