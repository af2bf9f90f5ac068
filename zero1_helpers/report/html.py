"""Text becomes HTML here and nowhere else: escaped, in a page that runs no script but its own.

A run folder or a notebook may come from somebody else. Jinja escapes whatever a template is given.
Should a tag get through, then the page's Content-Security-Policy stops it: the browser runs those
scripts only whose hash stands there, which are the template's own and the viewers'.
"""

import base64
import gzip
import hashlib
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE = Path(__file__).with_name("templates")
SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def render(template: str, *, folder: Path = HERE, scripts: tuple[bytes, ...] = (), **parts) -> str:
    """A page from a template, with its parts escaped. `scripts` are those that it unpacks itself."""
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined
    )
    source = (folder / template).read_text(encoding="utf-8")
    own = [script.encode() for script in SCRIPT.findall(source)]
    return environment.get_template(template).render(csp=policy([*own, *scripts]), **parts)


def policy(scripts: list[bytes]) -> str:
    """The Content-Security-Policy of a page with these scripts, which asks the network for nothing.

    It may show what lies beside it: pictures, and pages in frames.
    """
    return (
        f"default-src 'none'; script-src {allowed(scripts)}; style-src 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src data:; frame-src 'self'; "
        "base-uri 'self'; form-action 'none'"
    )


def allowed(scripts: list[bytes]) -> str:
    """These scripts, as a policy names what may run."""
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def pack(data: bytes) -> str:
    """Bytes as text that a page's script unpacks: letters, digits, +, / and =."""
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()
