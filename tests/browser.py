"""Headless Chromium, driven over its own protocol: what a page says, asks for and looks like.

The browser is Debian's package (`apt-get install chromium`), or any that $CHROMIUM names.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless=new",
    "--no-first-run",
    "--disable-gpu",
    "--disable-extensions",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--allow-file-access-from-files",
    # no name is resolved: a page that wants something from outside must fail
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]


def find_chromium() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        raise RuntimeError(
            "no Chromium: run `apt-get install chromium` (the page's tests need it), or "
            "set CHROMIUM to a Chrome's path"
        )
    return found


class Page:
    """One tab. `requests`: addresses asked for; `errors`: what the console and the network complain of."""

    def __init__(self, address: str):
        self.socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        self.requests, self.errors, self.number = [], [], 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        """Ask the browser, and note the events that come before its answer."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.note(message.get("method"), message.get("params", {}))

    def note(self, method, params):
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.loadingFailed" and not params.get("canceled"):
            self.errors.append(f"not loaded: {params['errorText']}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def open(self, url: str, width: int = 1280, height: int = 800, theme: str = "light"):
        self.requests.clear(), self.errors.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def ask(self, expression: str):
        """The value of a JavaScript expression, promises awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60):
        """Return when a JavaScript condition holds."""
        until = time.monotonic() + seconds
        while not self.ask(f"!!({condition})"):
            assert time.monotonic() < until, f"never true: {condition}; errors: {self.errors}"
            self.ask("new Promise(done => setTimeout(done, 100))")

    def screenshot(self, path, whole: bool = False):
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(picture))

    def outside(self) -> list[str]:
        """Requests that leave this machine."""
        at_home = ("file:", "data:", "blob:", "about:", "http://127.0.0.1")
        return [url for url in self.requests if not url.startswith(at_home)]


@contextmanager
def open_page():
    """A tab of a Chromium of its own, which ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium as root needs it
        command = [find_chromium(), *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file, until = Path(profile, "DevToolsActivePort"), time.monotonic() + 60
            while not port_file.exists() or not port_file.read_text().strip():
                assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
                assert time.monotonic() < until, f"{command[0]} did not start within a minute"
                time.sleep(0.05)  # nothing to wait on but a file
            port = port_file.read_text().split()[0]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            tabs = json.load(opener.open(f"http://127.0.0.1:{port}/json/list"))
            page = Page(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
            yield page
            page.socket.close()
        finally:
            process.terminate()
            process.wait(30)
