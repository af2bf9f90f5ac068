"""Before a commit: what does it add to every future clone?

    .venv/bin/python tools/check_size.py               looks at what is staged; a pre-commit hook calls it
    ZERO1_TRACES=1 git commit ...                      traces may change in this commit

History never shrinks. So this stops a commit that holds a file of more than 3 MB, that adds more than 3 MB
(compressed, as git keeps it; all executed notebooks are 2.5 MB), or that records traces again without
being asked to. A file that was only moved adds nothing.
"""

import os
import subprocess
import sys
import zlib

LARGEST_FILE = 3_000_000  # bytes, as it lies in the folder
LARGEST_COMMIT = 3_000_000  # bytes, compressed
SUBMODULE = "160000"


def git(*arguments: str) -> bytes:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(said[0] if said else f"git {arguments[0]} failed") from None


def staged() -> dict[str, bytes]:
    """{path: content} of all that the next commit adds or changes."""
    changed = git("diff", "--cached", "--raw", "-z", "--find-renames=100%", "--no-abbrev")
    fields, content = iter(changed.decode(errors="surrogateescape").split("\0")[:-1]), {}
    for about in fields:
        _, mode, _, blob, status = about.split()
        path = next(fields)
        if status[0] in "RC":  # moved or copied, every bit of it
            next(fields)
        elif status[0] != "D" and mode != SUBMODULE:
            content[path] = git("cat-file", "blob", blob)
    return content


def complaints(content: dict[str, bytes], traces_are_meant: bool) -> list[str]:
    """A line for each rule that these files break."""
    traces = [path for path in content if path.startswith("traces/")]
    found = [
        f"{path} has {len(data) / 1e6:.1f} MB; a file may have {LARGEST_FILE / 1e6:g}"
        for path, data in content.items()
        if len(data) > LARGEST_FILE
    ]
    if traces and not traces_are_meant:
        found.append(
            f"{len(traces)} files of traces/ change, the first of them {traces[0]}; "
            "if they are to be recorded again, say ZERO1_TRACES=1 git commit"
        )
    others = sum(len(zlib.compress(data)) for path, data in content.items() if path not in traces)
    if others > LARGEST_COMMIT:
        found.append(
            f"the commit adds {others / 1e6:.1f} MB to every clone; it may add "
            f"{LARGEST_COMMIT / 1e6:g} beside traces"
        )
    return found


def main() -> int:
    try:
        found = complaints(staged(), os.environ.get("ZERO1_TRACES", "") not in ("", "0"))
    except (ValueError, OSError) as error:
        found = [str(error)]
    for line in found:
        print(f"check_size.py: {line}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
