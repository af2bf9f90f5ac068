"""What the notebooks show besides figures: source code of the package, and tables."""

import inspect
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display

from zero1_helpers.report.tables import markdown


def show_source(*objects) -> None:
    """Show classes or functions as they stand in the project's files."""
    root = Path(__file__).resolve().parents[2]
    for obj in objects:
        path = Path(inspect.getfile(inspect.unwrap(obj))).resolve().relative_to(root)
        text = f"`{path.as_posix()}`\n\n```python\n{inspect.getsource(obj)}```"
        display(Markdown(text))


def show_table(table: pd.DataFrame, caption: str = "") -> None:
    """Show a table of numbers, with a caption that says what they hold for."""
    text = markdown(table) + (f"\n\n*{caption}*" if caption else "")
    display({"text/markdown": text, "text/plain": table.to_string()}, raw=True)
