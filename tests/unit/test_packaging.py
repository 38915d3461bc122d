"""Tests of installed packages, locks and tool settings."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.tidy import FOLDERS, INSTALLED, ROOT, files, module_imports

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("base", "slim", "dev", "vllm-cpu")
TORCH = {"torch", "transformers", "safetensors", "vllm", "deepspeed"}


def _packages() -> list[str]:
    inits = [p for p in files(".py") if p.name == "__init__.py"]
    parts = [p.parent.parts for p in inits if p.parts[0] in (*INSTALLED, "__init__.py")]
    return sorted(".".join(("dora_pipe", *names)) for names in parts)


def _pins(lock: str) -> dict[str, set[str]]:
    pins: dict[str, set[str]] = {}
    for line in (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines():
        if result := re.match(r"([a-z0-9._-]+)==(\S+)", line):
            pins.setdefault(result[1], set()).add(result[2])
    return pins


def test_list_of_packages_equals_the_tree() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert listed == _packages(), "pyproject.toml should list:\n" + "\n".join(
        f'  "{name}",' for name in _packages()
    )


def test_every_folder_with_modules_is_a_package() -> None:
    modules = [p for p in files(".py") if p.parts[0] in FOLDERS]
    bare = {str(p.parent) for p in modules if not (ROOT / p.parent / "__init__.py").exists()}
    assert modules
    assert bare == set()


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_pins_every_package_by_version_and_hash(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    entries = [e for e in re.split(r"\n(?=\S)", text) if not e.startswith("#")]
    assert entries
    loose = [e for e in entries if "==" not in e or "--hash=sha256:" not in e]
    assert not loose, loose


def test_locks_satisfy_what_the_project_asks_for() -> None:
    project = PROJECT["project"]
    slim: list[str] = project["dependencies"]
    dev = slim + project["optional-dependencies"]["torch"] + PROJECT["dependency-groups"]["dev"]
    for lock, asked in (("slim", slim), ("dev", dev)):
        pins = _pins(lock)
        for requirement in map(Requirement, asked):
            versions = pins.get(requirement.name, set())
            fitting = [v for v in versions if requirement.specifier.contains(Version(v))]
            assert fitting, f"{lock}.txt lacks {requirement}: run `make lock`"


def test_every_import_is_of_a_package_that_the_project_asks_for() -> None:
    project = PROJECT["project"]
    asked = [project["dependencies"], *project["optional-dependencies"].values()]
    named = {canonicalize_name(Requirement(line).name) for lines in asked for line in lines}
    providers = {
        name: {canonicalize_name(entry) for entry in distribution}
        for name, distribution in packages_distributions().items()
    }
    strangers: set[str] = set()
    for path in files(".py"):
        if path.parts[0] not in (*INSTALLED, "__init__.py"):
            continue
        tree = ast.parse((ROOT / path).read_text())
        roots = {name.split(".")[0] for _, names in module_imports(tree) for name in names}
        outside = roots - {*sys.stdlib_module_names, "_typeshed"} - named
        strangers |= {f"{path}: {r}" for r in outside if not named & providers.get(r, set())}
    assert strangers == set()


def test_slim_lock_holds_no_torch_and_agrees_with_the_developers_lock() -> None:
    slim, dev = _pins("slim"), _pins("dev")
    assert not TORCH & set(slim)
    assert set(dev) >= TORCH & set(dev) | {"torch"}
    assert {name: pins for name, pins in slim.items() if dev.get(name) != pins} == {}


def test_extra_all_holds_every_other_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == set(extras) - {"all"}
