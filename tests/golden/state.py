"""A state whose digest is known: its leaves, the rest, and the digest.

`python -m tests.golden.state` records it again.
"""

from __future__ import annotations

from typing import Final

from dora_pipe.orchestrator.digest import Leaves, rest_of
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.wire import canonical
from tests.golden.make import FOLDER as RECORDS
from tests.support.orchestrator_stage import Stage

FOLDER: Final = RECORDS.parent / "state"


def golden_state() -> State:
    """Groups of every phase, requests that run, wait and move, both kinds of workers."""
    stage = Stage(rollout__group_size=2, rollout__prompts_per_step=2, evaluation__prompts=1).begin()
    stage.worker("w0", slots=5, moves=True)
    stage.worker("w1", slots=3, versions=2)
    for group in ("g0000000000", "g0000000001"):
        stage.finish_group(group)
    stage.settle()
    stage.finish_group(stage.running()[0].rpartition("-")[0])
    return stage.state


def content(state: State) -> dict[str, bytes]:
    lines = sorted(line for one in Leaves.of(state).settled(state) for line in one.values())
    return {
        "leaves.jsonl": b"".join(line + b"\n" for line in lines),
        "rest.json": canonical(rest_of(state)),
        "digest.txt": state.digest().encode() + b"\n",
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in content(golden_state()).items():
        (FOLDER / name).write_bytes(data)
