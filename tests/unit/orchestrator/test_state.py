"""States compare by digest: it sees every field but the chain, and no accident of a process."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from dora_pipe.config.model import Config
from dora_pipe.orchestrator.digest import digest_of
from dora_pipe.orchestrator.index import QueueKey, pull, push, queue_key
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.identity import group_id, trajectory_id
from tests.support.orchestrator_stage import Stage


def rich() -> State:
    """A state in which every container holds something."""
    stage = Stage(evaluation__prompts=2).begin()
    stage.worker("w0", slots=5)
    for group in ("g0000000000", "g0000000001"):
        stage.finish_group(group)
    stage.plan()
    stage.state.counters.fates["failed"] = 1
    stage.state.counters.staleness[1] = 2
    stage.finish_group(stage.running()[0].rpartition("-")[0])
    return stage.state


NAMES = [one.name for one in fields(State)]


def other(value: Any, empty: Any = 3) -> Any:
    """Something else of a like kind; `empty` is the key that an empty map gets."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return "e" * 64
    if isinstance(value, list):
        return value[:-1] if value else [QueueKey(0, 0, 0, 0)]
    if isinstance(value, dict):
        return dict(list(value.items())[:-1]) if value else {empty: None}
    if is_dataclass(value):
        changed = copy.copy(value)
        first = fields(changed)[0].name
        setattr(changed, first, other(getattr(changed, first)))
        return changed
    return None


FOLLOWS = ("chain", "planner", "index", "leaves", "queues", "finished", "weights")
"""What a digest leaves out, but for the keys that no run changes."""


@pytest.mark.parametrize("name", [one for one in NAMES if one != "leaves"])
def test_digest_sees_every_field_but_the_chain_and_what_follows_from_others(name: str) -> None:
    state = rich()
    before = digest_of(state)
    value = getattr(state, name)
    changed = 5 if value is None else None if name in ("training",) else other(value, "r")
    setattr(state, name, changed)
    assert (digest_of(state) == before) == (name in FOLLOWS)


def covered(kind: Any) -> Iterator[str]:
    """Names of all fields that a digest covers, each with its class, at any depth."""
    for argument in get_args(kind):
        yield from covered(argument)
    if not isinstance(kind, type) or not (is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        return
    for name, hint in get_type_hints(kind).items():
        if (kind is State and name in FOLLOWS) or name.startswith("__"):
            continue
        yield f"{kind.__name__}.{name}"
        if hint != Config | None:
            yield from covered(hint)


def test_digest_does_not_depend_on_keys_that_no_run_changes() -> None:
    state = rich()
    before, config = digest_of(state), state.config
    assert config is not None
    later = msgspec.structs.replace(config.workers, slots=config.workers.slots + 1)
    state.config = msgspec.structs.replace(config, workers=later)
    assert digest_of(state) == before
    lower = msgspec.structs.replace(config.staleness, max_staleness=0)
    state.config = msgspec.structs.replace(config, staleness=lower)
    assert digest_of(state) != before


def test_digest_sees_into_requests_groups_and_workers() -> None:
    state = rich()
    seen = {digest_of(state)}
    next(iter(state.requests.values())).attempt += 1
    seen.add(digest_of(state))
    next(iter(state.groups.values())).ended += 1
    seen.add(digest_of(state))
    state.workers["w0"].hosted += 1
    seen.add(digest_of(state))
    state.workers["w0"].requests.add("g0000000099-000")
    assert digest_of(state) in seen, "a request says itself where it is"
    state.counters.staleness[7] = 1
    seen.add(digest_of(state))
    assert len(seen) == 5


def test_digest_does_not_depend_on_the_order_in_which_things_came() -> None:
    state, same = rich(), rich()
    same.workers["w0"].requests = set(sorted(same.workers["w0"].requests, reverse=True))
    same.groups = dict(reversed(same.groups.items()))
    same.requests = dict(reversed(same.requests.items()))
    assert digest_of(state) == digest_of(same)


def test_digest_is_the_same_in_every_process() -> None:
    program = "from tests.unit.orchestrator.test_state import rich\nprint(rich().digest())"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {rich().digest()}


def test_queue_is_ordered_by_deadline_then_ordinal_then_sibling_and_evaluation_last() -> None:
    queues: dict[int, list[QueueKey]] = {}
    wanted = [
        QueueKey(0, 3, 8, 1),
        QueueKey(0, 4, 2, 0),
        QueueKey(0, 4, 2, 1),
        QueueKey(0, 4, 7, 0),
        QueueKey(1, -1, 0, 0),
    ]
    for key in wanted[::-1]:
        push(queues, 2, key)
    assert queues == {2: wanted}
    for key in wanted[1:]:
        pull(queues, 2, key)
    pull(queues, 2, wanted[0])
    assert queues == {}, "no empty queue stays"


def test_queue_key_and_trajectory_id_name_each_other() -> None:
    state = rich()
    for name, request in state.requests.items():
        key = queue_key(state.groups[request.group].spec, request.sibling)
        assert key.trajectory == name
    assert QueueKey(1, -1, 5, 2).trajectory == trajectory_id(group_id("eval", 5), 2)
