"""What an audit's books are made of can be frozen, wherever its class is defined."""

from __future__ import annotations

import typing
from dataclasses import is_dataclass

import msgspec

from dora_pipe.audit.index_codec import _CODE, decode_state, encode_state
from dora_pipe.orchestrator import estimates, index, residents, staleness, state
from dora_pipe.orchestrator.queues import QueueKey, push
from dora_pipe.orchestrator.residents import Residence
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas import control, policy, rounds

NAMES = {
    name: one
    for module in (control, policy, rounds, estimates, index, residents, staleness, state)
    for name, one in vars(module).items()
    if isinstance(one, type)
}


def own_classes(kind: object, found: set[type]) -> set[type]:
    """The classes of ours that a value of this type may hold."""
    for part in typing.get_args(kind):
        own_classes(part, found)
    if not isinstance(kind, type) or not kind.__module__.startswith("dora_pipe."):
        return found
    if kind in found or not (is_dataclass(kind) or issubclass(kind, (msgspec.Struct, tuple))):
        return found
    found.add(kind)
    for hint in typing.get_type_hints(kind, localns=NAMES).values():
        own_classes(hint, found)
    return found


def test_every_class_of_the_state_is_in_a_module_that_may_be_frozen() -> None:
    found = own_classes(State, set())
    assert {Residence, QueueKey} <= found
    there = {module.__name__ for module in _CODE}
    assert sorted(one.__qualname__ for one in found if one.__module__ not in there) == []


def test_state_with_residents_and_queues_comes_back() -> None:
    state = State()
    state.residents["w0"] = Residence(most=3, held=[4, 5])
    push(state.queues, 4, QueueKey(rank=0, deadline=6, ordinal=7, sibling=1))
    again = decode_state(encode_state(state))
    assert again.residents == state.residents
    assert again.queues == state.queues
    assert type(again.queues[4][0]) is QueueKey
