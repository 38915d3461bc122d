"""Packages of others that a task plays with: whether they are there, and which exactly.

A package is known by its version and by a sha256 of its files as they lie here, so that a changed
copy of the same version is another one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dora_pipe.core.errors import ConfigError, install_hint

_BUILT: Final = ("__pycache__", ".pyc")
"""What Python writes beside the files of a package."""

DIGEST_CHARACTERS: Final = 16
"""Of a package's sha256, as it is logged."""


def required(module: str, *, package: str, extra: str, kind: str) -> Any:
    """The module, imported. Raises ConfigError, naming the package, where that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise  # one that the package itself misses
        raise ConfigError(
            f"task.kind: `{kind}`: {package} is not installed",
            hint=install_hint(extra),
        ) from None


def packages_of(*modules: ModuleType | str) -> dict[str, str]:
    """Of each top-level package that the modules are in: version and digest.

    Example: ``{"gymnasium": "1.4.0 3f6b0c9d2a7e81f4"}``. A module that was not installed under its
    name, such as a file of the user's, has no version: ``{"mine": "- 09c2..."}``.
    """
    found: dict[str, str] = {}
    for module in modules:
        name = (module if isinstance(module, str) else module.__name__).partition(".")[0]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "-"
        found[name.replace("_", "-")] = f"{version} {_source_digest(name)}"
    return dict(sorted(found.items()))


@functools.cache
def _source_digest(name: str) -> str:
    """sha256 over the names and bytes of the files of an imported top-level package."""
    module = sys.modules[name]
    file = getattr(module, "__file__", None)
    roots = list(getattr(module, "__path__", ())) or ([file] if file else [])
    digest = hashlib.sha256()
    for root in map(Path, roots):
        files = sorted(path for path in root.rglob("*") if path.is_file()) or [root]
        for path in files:
            if not any(built in str(path) for built in _BUILT):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root.parent).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:DIGEST_CHARACTERS]
