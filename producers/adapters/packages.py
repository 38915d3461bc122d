"""Versions and digests of third-party packages of a task."""

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

DIGEST_CHARACTERS: Final = 16
"""Logged characters of a package's sha256."""


def required(module: str, *, package: str, extra: str, kind: str) -> Any:
    """Import a module. Raises ConfigError naming the package if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise  # a missing dependency of the package
        raise ConfigError(
            f"task.kind: `{kind}`: {package} is not installed", hint=install_hint(extra)
        ) from None


def packages_of(*modules: ModuleType | str) -> dict[str, str]:
    """Return version and digest of each top-level package of the modules.

    Example: ``{"gymnasium": "1.4.0 3f6b0c9d2a7e81f4"}``; the version of a user's file is `-`.
    """
    versions: dict[str, str] = {}
    for module in modules:
        name = (module if isinstance(module, str) else module.__name__).partition(".")[0]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "-"
        versions[name.replace("_", "-")] = f"{version} {_source_digest(name)}"
    return dict(sorted(versions.items()))


@functools.cache
def _source_digest(name: str) -> str:
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
