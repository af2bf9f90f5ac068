"""The repository keeps its own rules: versions, sizes, style, and imports that only point down."""

import ast
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import zero1_helpers
from zero1_helpers._groups import GROUP_OF

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
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    assert len(pins(lines)) == len(lines), "constraints.txt: every line is name==version, once"
    return pins(lines)


def groups():
    """{group: {canonical name: version condition}} of pyproject.toml; "core" is what everybody gets."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = {"core": project["dependencies"], **project["optional-dependencies"]}
    return {group: dict(map(requirement, lines)) for group, lines in lists.items()}


def requirement(line):
    match = re.fullmatch(r"([\w.-]+)(.*)", line)
    return canonical(match[1]), match[2]


def named():
    """The packages that `make` installs: those of all groups but deepspeed, with their conditions."""
    lists = groups()
    del lists["deepspeed"]
    return {name: condition for names in lists.values() for name, condition in names.items()}


def test_pyproject_environment_and_constraints_agree():
    exact = constraints()
    environment = pins((ROOT / "environment.yml").read_text(encoding="utf-8").splitlines())
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
    return {
        path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")
    }


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


def test_the_groups_and_the_messages_about_them_agree():
    """A module that is imported somewhere and missing is looked up in GROUP_OF, which has to know it."""
    owners = importlib.metadata.packages_distributions()
    core, known = set(groups()["core"]), groups()
    for module, group in GROUP_OF.items():
        assert {canonical(owner) for owner in owners[module]} & set(known[group]), module
    outside = {
        used for tree in modules().values() for used in imports(tree) if not used.startswith(".")
    }
    outside -= {used for used in outside if {canonical(o) for o in owners.get(used, [])} & core}
    assert outside - set(sys.stdlib_module_names) <= set(GROUP_OF)


@pytest.mark.quick
def test_the_classes_need_torch_alone():
    """With every package of the groups out of reach, the classes train, and a chart names its group."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_GROUPS, *GROUP_OF], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == "trained"
    assert "zero1_helpers[figures]" in run.stdout and "zero1_helpers[notebooks]" in run.stdout


WITHOUT_GROUPS = """
import sys, tempfile

finders = sys.meta_path[:]

class WithoutGroups:
    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] in sys.argv[1:]
        found = (finder.find_spec(name, path, target) for finder in finders)
        return None if hidden else next(filter(None, found), None)

sys.meta_path[:] = [WithoutGroups]
import torch
import torch.distributed as dist
from zero1_helpers import FlatShardedOptimizer, SimpleDDPReduceScatter

store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
optimizer = FlatShardedOptimizer(torch.optim.Adam, model, lr=0.1)
wrapper = SimpleDDPReduceScatter(model, optimizer)
wrapper(torch.ones(2, 4)).sum().backward()
wrapper.flush_bucket()
wrapper.wait_for_gradients()
optimizer.step()
dist.destroy_process_group()
print("trained")
import zero1_helpers
from zero1_helpers.cli import main

for use in (lambda: zero1_helpers.get_smol_model("tiny"), lambda: zero1_helpers.load_ipython_extension(None),
            lambda: zero1_helpers.get_memory_timeline):
    try:
        use()
    except ModuleNotFoundError as error:
        print(error)
sys.exit(main(["figures"]) != 2)
"""


def test_a_module_is_read_without_scrolling_for_long():
    """Functions are held to a complexity of 10 by ruff, modules to 300 lines here; their sum has no limit."""
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in PACKAGE.rglob("*.py")}
    assert not {str(path.relative_to(PACKAGE)): n for path, n in lengths.items() if n > 300}


def test_public_names():
    missing = [name for name in PUBLIC if not hasattr(zero1_helpers, name)]
    assert not missing


def files():
    """All files of the project, without environments, caches and build results."""
    apart = {
        ".git",
        ".venv",
        "build",
        "figures",
        "__pycache__",
        ".ipynb_checkpoints",
        ".pytest_cache",
        ".ruff_cache",
    }
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in apart]
        yield from (Path(folder, name) for name in names)


def test_files_are_small():
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in files()}
    assert not {path: size for path, size in sizes.items() if size > 3_000_000}
    assert sum(size for path, size in sizes.items() if path.parts[0] == "traces") < 40_000_000


def test_ruff_and_the_other_checks_before_a_commit():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))[
        "repos"
    ]
    commands = [shlex.split(hook["entry"]) for hook in local["hooks"]]
    python = ".venv/bin/python"
    expected = [[python, "-m", "ruff"], [python, "tools/check_size.py"], [python, "-m", "pytest"]]
    assert [command[:3] for command in commands] == expected
    for command in commands:
        command[0] = sys.executable
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "7 passed" in result.stdout  # of the notebooks' tests, those that execute nothing


def test_the_guide_names_what_there_is():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"make ([a-z]+)", page)) <= set(targets)
