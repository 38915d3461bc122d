"""What docs/reference/records.md says of the state's digest that follows from the code."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Final

from dora_pipe.orchestrator.digest import BUCKETS, LEFT_OUT, PAIRS, STATE_FORM, TABLES
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.rounds import STATE_DIGEST_EVERY
from tests.golden.state import FOLDER

IDS: Final = {
    "group": "of the group",
    "request": "of the trajectory",
    "worker": "name of the worker",
    "resident": "name of the worker, if it hosts several versions at once",
}


def state_figures() -> dict[str, Any]:
    """Every name that the text uses in braces."""
    leaves = (FOLDER / "leaves.jsonl").read_bytes().splitlines()
    values = {kind: value for kind, _, value in map(json.loads, leaves)}
    kinds = [f"| `{kind}` | {IDS[kind]} | {_named(values[kind])} |" for kind in TABLES]
    return {
        "state_digest_every": STATE_DIGEST_EVERY,
        "form": STATE_FORM,
        "buckets": BUCKETS,
        "kinds": "\n".join(kinds),
        "rest": _named(sorted(one.name for one in fields(State) if one.name not in LEFT_OUT)),
        "pairs": _named(PAIRS),
        "first": [json.loads(one)[:2] for one in leaves[:2]],
        "count": len(leaves),
        "hex": (FOLDER / "digest.txt").read_text("utf-8").strip().partition(":")[2],
    }


def _named(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
