"""Where the project's folder is: a notebook may be started in any other, by an editor or as a copy."""

from pathlib import Path


def project(path: str = "") -> Path:
    """`path` inside the project's folder, which holds `notebooks` and `traces`.

    Looked for above this package, then from the working folder upwards. FileNotFoundError names both.
    """
    package, here = Path(__file__).resolve().parents[1], Path.cwd()
    for folder in (*package.parents, here, *here.parents):
        if all((folder / name).is_dir() for name in ("notebooks", "traces")):
            return folder / path
    raise FileNotFoundError(
        f"no project folder (one with notebooks/ and traces/) above {package} or {here}: "
        "start the notebook inside a checkout of the project"
    )
