"""Subset of `kubectl kustomize`: resources, nested folders, strategic merge patches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""Merge key of list members; other lists are replaced."""

Object = dict[str, Any]


def built(folder: Path) -> dict[tuple[str, str], Object]:
    asked = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert asked.keys() <= {"apiVersion", "kind", "namespace", "resources", "patches"}
    found: dict[tuple[str, str], Object] = {}
    for name in asked["resources"]:
        path = folder / name
        more = built(path) if path.is_dir() else {_key(one): one for one in _documents(path)}
        assert not found.keys() & more.keys(), f"{path} says again what is there"
        found |= more
    for patch in asked.get("patches", []):
        for one in _documents(folder / patch["path"]):
            if one.pop("$patch", "") == "delete":
                del found[_key(one)]
            else:
                found[_key(one)] = _merged(found[_key(one)], one)
    return found


def listed(folder: Path) -> list[str]:
    asked = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return [*asked["resources"], *(one["path"] for one in asked.get("patches", []))]


def _documents(path: Path) -> Iterator[Object]:
    yield from yaml.safe_load_all(path.read_text())


def _key(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def _merged(base: Any, patch: Any, name: str = "") -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        both = {key: _merged(base[key], patch[key], key) for key in base.keys() & patch.keys()}
        return base | patch | both
    if isinstance(base, list) and name in KEYS:
        key = KEYS[name]
        there = {one[key]: one for one in base}
        for one in patch:
            there[one[key]] = _merged(there.get(one[key], {}), one)
        return [*there.values()]
    return patch
