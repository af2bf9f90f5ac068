"""The repository keeps its own rules: versions, sizes, style, and imports that only point down."""

import ast
import importlib.metadata
import io
import os
import re
import shlex
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import yaml

import zero1_helpers

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zero1_helpers"
PUBLIC = """SimpleDDP SimpleDDPAsync SimpleDDPBucket ZeROOne ShardedOptimizer SimpleDDPBucketAsync
    get_profiler get_memory_timeline set_seed get_smol_model get_smol_tokenizer get_dataset
    get_dataloader""".split()


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines):
    """{canonical name: version} of the lines `name==version`; other lines are left out."""
    found = [re.fullmatch(r"\s*(?:- )?([\w.-]+)==([\w.!+]+)\s*", line) for line in lines]
    return {canonical(match[1]): match[2] for match in found if match}


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    assert len(pins(lines)) == len(lines), "constraints.txt: every line is name==version, once"
    return pins(lines)


def named():
    """Canonical names of pyproject's dependencies, with their version conditions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [re.fullmatch(r"([\w.-]+)(.*)", line) for line in project["dependencies"]]
    return {canonical(match[1]): match[2] for match in found}


def test_pyproject_environment_and_constraints_agree():
    exact = constraints()
    environment = pins((ROOT / "environment.yml").read_text().splitlines())
    assert set(environment) == set(named()), "environment.yml and pyproject.toml name the same"
    assert environment == {name: exact[name] for name in environment}


def test_lower_bounds_admit_the_tested_versions():
    def numbers(version):
        return [int(part) for part in re.findall(r"\d+", version)]

    for name, condition in named().items():
        lower = re.match(r">=([\d.]+)", condition)[1]
        assert numbers(lower) <= numbers(constraints()[name]), name


def test_this_environment_is_the_tested_one():
    for name in named():
        version = importlib.metadata.version(name).partition("+")[0]  # torch: +cpu, +cu…
        assert version == constraints()[name], f"{name}: run `make install`"
    assert "holistictraceanalysis" not in constraints()  # traceinsight has the same module


def modules():
    return {path.stem: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def imports(tree):
    """Names of the modules that `tree` imports, wherever the statement stands; `.x` for our own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "zero1_helpers." * bool(node.level) + (node.module or "")
            one_by_one = base.strip(".") == "zero1_helpers"
            names = [f"zero1_helpers.{a.name}" for a in node.names] if one_by_one else [base]
        else:
            continue
        for name in names:
            ours = name.startswith("zero1_helpers.")
            yield "." + name.split(".")[1] if ours else name.split(".")[0]


def test_imports_only_point_down():
    """The floors stand in pyproject.toml, under importlinter; a module that has none is refused, too."""
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_import_is_a_named_dependency():
    owners = importlib.metadata.packages_distributions()
    wrong = []
    for name, tree in modules().items():
        for used in imports(tree):
            if used.startswith(".") or used in sys.stdlib_module_names:
                continue
            if not {canonical(owner) for owner in owners.get(used, [])} & set(named()):
                wrong.append(f"{name}.py imports {used}: name its distribution in pyproject.toml")
    assert not wrong, "\n".join(wrong)


def code_lines(path):
    """How many lines hold code: not blank, not a comment, not part of a docstring."""
    text = path.read_text()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
               tokenize.ENDMARKER}  # fmt: skip
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {n for t in tokens if t.type not in skipped for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code)


def test_package_is_small():
    sizes = {path.relative_to(PACKAGE): code_lines(path) for path in PACKAGE.rglob("*.py")}
    assert max(sizes.values()) < 600, "one idea a module"
    assert sum(sizes.values()) < 5200


def test_public_names():
    missing = [name for name in PUBLIC if not hasattr(zero1_helpers, name)]
    assert not missing


def files():
    """All files of the project, without environments, caches and build results."""
    apart = {".git", ".venv", "build", "figures", "__pycache__", ".ipynb_checkpoints",
             ".pytest_cache", ".ruff_cache"}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in apart]
        yield from (Path(folder, name) for name in names)


def test_files_are_small():
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in files()}
    assert not {path: size for path, size in sizes.items() if size > 3_000_000}
    assert sum(size for path, size in sizes.items() if path.parts[0] == "traces") < 40_000_000


def test_ruff_and_the_other_checks_before_a_commit():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = [shlex.split(hook["entry"]) for hook in local["hooks"]]
    assert [command[:3] for command in commands] == [[".venv/bin/python", "-m", "ruff"],
                                                     [".venv/bin/python", "-m", "pytest"]]  # fmt: skip
    for command in commands:
        command[0] = sys.executable
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "7 passed" in result.stdout  # of the notebooks' tests, those that execute nothing


def test_the_guide_names_what_there_is():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"make ([a-z]+)", page)) <= set(targets)
