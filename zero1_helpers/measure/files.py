"""Files of runs, read and written with care: others may have made them, or may be reading them.

A stranger's folder can hold a pipe that never ends, a link to something else, or a few bytes that
unpack to a terabyte. So only regular files are read, links are not followed, and sizes are limited:

    as it is on disk    LARGEST bytes
    unpacked            LARGEST_UNPACKED bytes, MOST_VALUES commas
"""

import gzip
import io
import os
import re
import stat
import zlib
from pathlib import Path

LARGEST = 64 * 2**20
LARGEST_UNPACKED = 256 * 2**20
MOST_VALUES = 20_000_000  # a parsed value takes more memory than the two bytes that name it


class RunError(ValueError):
    """A folder is not a run, or a damaged one. One line: which file, which field, what is wrong."""


def read_file(path) -> bytes:
    """The bytes of a regular file of a run, unpacked if its name ends in .gz. RunError otherwise."""
    path = Path(path)
    try:
        data = _read_regular(path)
        if path.suffix == ".gz":
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(LARGEST_UNPACKED + 1)
    except FileNotFoundError:
        raise RunError(f"{path}: missing; not a recorded run, or an unfinished one") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{path}: damaged, cannot be read ({reason})") from None
    if len(data) > LARGEST_UNPACKED or data.count(b",") > MOST_VALUES:
        raise RunError(
            f"{path}: too large; at most {LARGEST_UNPACKED // 2**20} MiB unpacked, with at most "
            f"{MOST_VALUES // 10**6} million values, are read"
        )
    return data


def _read_regular(path: Path) -> bytes:
    # Without O_NONBLOCK, opening a pipe would wait for somebody who writes into it.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    if path.is_symlink():
        raise RunError(f"{path}: a symbolic link; a run's files are regular ones")
    descriptor = os.open(path, flags)
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise RunError(f"{path}: not a regular file")
    with open(descriptor, "rb") as file:
        if about.st_size > LARGEST:
            raise RunError(f"{path}: too large; at most {LARGEST // 2**20} MiB are read")
        return file.read(LARGEST)


def write_atomic(path, data: bytes) -> None:
    """Write under a temporary name in the same folder, then rename: never half a file.

    Nobody can have prepared the temporary name: it is made anew, and no link is followed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_gz(path, text: str) -> None:
    write_atomic(path, gzip.compress(text.encode(), mtime=0))  # no date inside: same bytes


# What looks like the place of a file or like a person. No fact about this machine or its user is
# needed, and a word is never hidden only because somebody's home folder is called like it.
PRIVATE = re.compile(
    r"""[\w.+-]+@[\w-]+(?:\.[\w-]+)*                       # user@host
      | (?:file:(?://[^/\s]*)?|(?<![\w./~]))                # file:///home/x, or the start of a path,
        (?:~[A-Za-z_][\w.-]*|~)?/(?!/)                      # ~alice/x, ~/x or /x:
        (?:[^/\s"'<>|:;,]+(?:[ ][^/\s"'<>|:;,]+)*/)*        # its folders
        (?=[\w.+@-])                                        # the file's name stays""",
    re.VERBOSE,
)
LONGEST = 2000  # characters of a text in a run; a name of a C++ kernel is that long, at times


def scrub(value):
    """The same value without folders' names and without user@host, each text on one printable line.

    Keys stay as they are: they are ours.
    """
    if isinstance(value, dict):
        return {key: scrub(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(item) for item in value]
    return _scrub_text(value) if isinstance(value, str) else value


def _scrub_text(text: str) -> str:
    if "/" in text or "@" in text:
        text = PRIVATE.sub(lambda found: "-@-" if "@" in found[0] else "", text)
    return one_printable_line(text)[:LONGEST]


def one_printable_line(text: str) -> str:
    """The text with a sign in place of each line break and each control character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
