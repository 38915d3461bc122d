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
    results: dict[tuple[str, str], Object] = {}
    for name in asked["resources"]:
        path = folder / name
        more = (
            built(path)
            if path.is_dir()
            else {_key(document): document for document in _documents(path)}
        )
        assert not results.keys() & more.keys(), f"{path} says again what is there"
        results |= more
    for patch in asked.get("patches", []):
        for document in _documents(folder / patch["path"]):
            if document.pop("$patch", "") == "delete":
                del results[_key(document)]
            else:
                results[_key(document)] = _merged(results[_key(document)], document)
    return results


def listed(folder: Path) -> list[str]:
    asked = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return [*asked["resources"], *(row["path"] for row in asked.get("patches", []))]


def _documents(path: Path) -> Iterator[Object]:
    yield from yaml.safe_load_all(path.read_text())


def _key(first_object: Object) -> tuple[str, str]:
    return first_object["kind"], first_object["metadata"]["name"]


def _merged(base: Any, patch: Any, name: str = "") -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        both = {key: _merged(base[key], patch[key], key) for key in base.keys() & patch.keys()}
        return base | patch | both
    if isinstance(base, list) and name in KEYS:
        key = KEYS[name]
        there = {entry[key]: entry for entry in base}
        for entry in patch:
            there[entry[key]] = _merged(there.get(entry[key], {}), entry)
        return [*there.values()]
    return patch
