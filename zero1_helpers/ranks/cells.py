"""Running a cell in a rank as Jupyter would: magics, `await`, its last expression, figures, HTML."""

import ast
import asyncio
import base64
import builtins
import inspect
import io
import linecache
import re
import sys
import types
import warnings

import IPython.core.display_functions
import IPython.display
from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from zero1_helpers.ranks.describe import CELL, describe, remember

KERNELS = (
    "dist_init",
    "dist_shutdown",
    "dist_reset",
    "dist_status",
    "dist_mode",
    "dist_debug",
    "sync",
    "load_ext",
    "config",
    "debug",
    "pdb",
)  # line magics that make sense in the kernel
FORMATTER = DisplayFormatter()
WIDGET = "application/vnd.jupyter.widget-view+json"


class NotOnRanks(RuntimeError):
    """A cell asked for something that a rank does not have, such as somebody who types."""


class NoInput(io.TextIOBase):
    """The standard input of a rank, for input() and pdb; called, it stands for breakpoint()."""

    def readline(self, *args, **kwargs):
        raise NotOnRanks(
            "nobody can type at a rank, so input(), breakpoint() and pdb do not work "
            "there. Set values with push(name=value), look with print or pull."
        )

    read = __call__ = readline


class RankShell(InteractiveShell):
    """IPython's shell for what is not Python in a cell: %time, %timeit, !ls."""

    def __init__(self, main: types.ModuleType, folder: str):
        config = Config()
        config.HistoryManager.enabled = False
        super().__init__(user_module=main, config=config, ipython_dir=folder)
        main.get_ipython = lambda: self
        for name in ("exit", "quit"):  # IPython's would end the shell; Python's raise SystemExit
            vars(main).pop(name, None)
        line_magics = self.magics_manager.magics["line"]
        line_magics |= {name: refuse(name) for name in KERNELS}
        line_magics["matplotlib"] = lambda line: None  # figures are shown anyway
        self.set_hook("show_in_pager", lambda shell, text, *args: print(text["text/plain"]), 90)

    def showtraceback(self, *args, **kwargs):
        raise  # noqa: PLE0704  (a magic must not hide that its code has failed)


def refuse(name: str):
    def magic(line):
        raise UsageError(
            f"%{name} is not for ranks: give it a cell of its own, which runs in the kernel."
        )

    return magic


class Cells:
    """Runs cells in a namespace of their own, and keeps what they display.

    folder: a private one, for IPython.
    """

    def __init__(self, folder: str):
        # A __main__ of their own: their classes pickle, and our names are not in the way.
        self.main = sys.modules["__main__"] = types.ModuleType("__main__")
        self.namespace = vars(self.main)
        self.shell, self.runner = RankShell(self.main, folder), None
        self.displays: list[dict[str, str]] = []
        sys.stdin = sys.breakpointhook = NoInput()
        self.streams = sys.stdout, sys.stderr
        for module in (IPython.display, IPython.core.display_functions, builtins):
            module.display = self.display
        warnings.filterwarnings("ignore", message=".*is non-interactive, and thus cannot be shown")
        find_sources_of_classes()

    def run(self, code: str, cell: int) -> None:
        """Run a cell, showing its last expression. cell: its number."""
        name = remember(code, cell)
        empty = re.match(r"(\s*\n)?", code)[
            0
        ]  # IPython removes empty lines; line numbers need them
        code = empty.count("\n") * "\n" + self.shell.transform_cell(code[len(empty) :])
        body = ast.parse(code, name).body
        last = None
        quiet = DisplayHook.semicolon_at_end_of_expression(code)
        if body and isinstance(body[-1], ast.Expr) and not quiet:
            last = ast.Expression(body.pop().value)
        self._evaluate(ast.Module(body, []), name, "exec")
        if last:
            value = self._evaluate(last, name, "eval")
            if value is not None:
                self.display(value)

    def _evaluate(self, tree: ast.AST, name: str, mode: str):
        """Run this code. With `await` outside of functions, in the event loop of the cells."""
        # optimize=0: assertions are checked, whatever the environment says
        code = compile(tree, name, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True, optimize=0)
        if not code.co_flags & inspect.CO_COROUTINE:
            return eval(code, self.namespace)
        self.runner = self.runner or asyncio.Runner()
        return self.runner.run(eval(code, self.namespace))

    def display(self, *objects, raw: bool = False, **options) -> None:
        """IPython's display(): prints what is only text, and keeps pictures and HTML to be sent."""
        for value in objects:
            try:
                bundle = value if raw else mime_bundle(value)
                bundle = {
                    str(kind): as_text(data)
                    for kind, data in bundle.items()
                    if kind not in ("application/javascript", WIDGET)
                }
            except Exception as error:
                found = describe(error)
                self.write(
                    f"A {type(value).__name__} cannot be shown: "
                    f"{found['name']}: {found['message']}\n"
                )
                continue
            if set(bundle) <= {"text/plain"}:
                self.write(bundle.get("text/plain", "") + "\n")
            else:
                self.displays.append(bundle)

    def write(self, text: str) -> None:
        """Not print, which a cell may have replaced."""
        self.mend_streams()
        sys.stdout.write(text)

    def show_figures(self) -> None:
        """At the end of a cell: show figures that are still open."""
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                pyplot.close(figure)  # first, so that one that cannot be drawn is met only once
                self.display(figure)

    def mend_streams(self) -> None:
        """Put back the output streams if a cell has closed or removed them."""
        for name, original in zip(("stdout", "stderr"), self.streams, strict=True):
            stream = getattr(sys, name, None)
            if stream is None or getattr(stream, "closed", False):
                if original.closed:
                    original = open(
                        1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False
                    )
                setattr(sys, name, original)


def as_text(data) -> str:
    return base64.b64encode(data).decode() if isinstance(data, bytes) else data


def mime_bundle(value) -> dict[str, str | bytes]:
    """What a value looks like: text/plain, and text/html or image/png if it has them."""
    figures = sys.modules.get("matplotlib.figure")
    if figures and isinstance(value, figures.Figure):
        png = io.BytesIO()
        value.savefig(png, format="png", bbox_inches="tight", metadata={"Software": None})
        sys.modules["matplotlib.pyplot"].close(value)
        return {"image/png": png.getvalue(), "text/plain": repr(value)}
    bundle, _ = FORMATTER.format(value)
    return bundle


def find_sources_of_classes() -> None:
    """Let inspect.getsource find classes of cells: a function knows its file, a class does not."""
    original = inspect.getfile

    def getfile(value):
        if inspect.isclass(value) and value.__module__ == "__main__":
            head = re.compile(rf"\s*class {value.__name__}\b")
            for name in reversed(linecache.cache):
                if name.startswith(CELL) and any(map(head.match, linecache.cache[name][2])):
                    return name
        return original(value)

    inspect.getfile = getfile
