"""Smallest configuration of a run, with changes by section."""

from __future__ import annotations

from typing import Any

from dora_pipe.config.load import from_plain
from dora_pipe.config.model import Config


def plain_config(**sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "m"},
        "task": {"kind": "arithmetic"},
        **sections,
    }


def small_config(**sections: Any) -> Config:
    return from_plain(plain_config(**sections))
