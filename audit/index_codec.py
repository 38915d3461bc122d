"""Turns an audit's books into bytes and back; decides which classes may come back.

The books are a graph of plain values, containers and instances of the classes listed here: nothing
else is written, and nothing else is made on reading, so that bytes from elsewhere can at worst be
refused. Instances that are shared stay shared. What bytes mean depends on the code: `fingerprint`
says which code wrote them.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from dora_pipe.audit import (
    auditor,
    check_fold,
    check_mixed,
    check_policies,
    check_records,
    check_steps,
    entries,
    evidence,
    findings,
    gathering,
    ledger,
    legality,
    reading,
    specs,
    sums,
)
from dora_pipe.audit import bound_ledger as books
from dora_pipe.audit import effective_config as in_force
from dora_pipe.audit import group_ledger as accounts
from dora_pipe.audit import round_reader as walk
from dora_pipe.audit import spill as shelf
from dora_pipe.audit import version_residency as hosting
from dora_pipe.config.model import Config
from dora_pipe.core.errors import SchemaError
from dora_pipe.orchestrator import apply_command as rules_command
from dora_pipe.orchestrator import apply_control as rules_control
from dora_pipe.orchestrator import apply_decision as rules_decision
from dora_pipe.orchestrator import apply_training as rules_training
from dora_pipe.orchestrator import (
    digest,
    estimates,
    failures,
    fold,
    index,
    moving,
    planner,
    queues,
    residents,
    settings,
    staleness,
    state,
)
from dora_pipe.orchestrator import group_outcome as verdicts
from dora_pipe.orchestrator import hosting as orchestrator_hosting
from dora_pipe.orchestrator import specs as orchestrator_specs
from dora_pipe.orchestrator import state_ops as transitions
from dora_pipe.schemas import (
    arrow_frame,
    arrow_message,
    batch,
    control,
    headers,
    identity,
    policy,
    rounds,
    trajectory,
    trajectory_codec,
    trajectory_numbers,
    trajectory_row,
    wire,
)
from dora_pipe.schemas import fast_validate as trajectory_glance

_OWN_PREFIX: Final = "dora_pipe."


def _config_modules() -> tuple[ModuleType, ...]:
    """Where the sections of a configuration and what they are made of are defined."""
    kinds = [Config, *(one.type for one in msgspec.structs.fields(Config))]
    names = {base.__module__ for kind in kinds for base in kind.__mro__}
    return tuple(sys.modules[name] for name in sorted(names) if name.startswith(_OWN_PREFIX))


_MODULES: Final[tuple[ModuleType, ...]] = (
    *_config_modules(),
    accounts,
    auditor,
    books,
    check_fold,
    check_policies,
    check_records,
    check_steps,
    control,
    entries,
    estimates,
    evidence,
    failures,
    findings,
    gathering,
    hosting,
    in_force,
    index,
    ledger,
    legality,
    policy,
    queues,
    residents,
    rounds,
    shelf,
    staleness,
    state,
    sums,
    trajectory,
    trajectory_row,
    walk,
)
"""Their classes may be frozen."""

_CODE: Final[tuple[ModuleType, ...]] = (
    *_MODULES,
    arrow_frame,
    arrow_message,
    batch,
    check_mixed,
    digest,
    fold,
    headers,
    identity,
    moving,
    orchestrator_hosting,
    orchestrator_specs,
    planner,
    reading,
    rules_command,
    rules_control,
    rules_decision,
    rules_training,
    settings,
    specs,
    trajectory_codec,
    trajectory_glance,
    trajectory_numbers,
    transitions,
    verdicts,
    wire,
    sys.modules[__name__],
)
"""What an audit finds depends on these."""

_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_SEQUENCES: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_MAPS: Final[dict[str, type]] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "SpillDict": shelf.SpillDict,
}


@cache
def fingerprint() -> str:
    """sha256 over the code that an audit's books depend on."""
    digest = hashlib.sha256(sys.version.encode())
    for module in sorted(_CODE, key=lambda one: one.__name__):
        assert module.__file__ is not None
        digest.update(f"\n{module.__name__}\n".encode())
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()


@cache
def _classes() -> dict[str, type]:
    found: dict[str, type] = {}
    for module in _MODULES:
        for name, one in vars(module).items():
            if isinstance(one, type) and one.__module__ == module.__name__:
                found[f"{module.__name__}.{name}"] = one
    return found


@cache
def _names() -> dict[type, str]:
    return {one: name for name, one in _classes().items()}


def encode_state(root: object) -> bytes:
    """An object with all it refers to, as bytes. Methods that it holds are left out."""
    return msgspec.msgpack.encode(_Writer().node(root))


def decode_state(data: bytes) -> Any:
    """The object again. Raises SchemaError for bytes that say anything else."""
    try:
        return _Reader().value(msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SchemaError(f"no audit's books: {error}") from None


class _Writer:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []
        """Whatever has a number stays alive: its id must not be given to another."""

    def node(self, one: Any) -> Any:
        kind = type(one)
        if kind in _PLAIN:
            return one
        number = self._seen.get(id(one))
        if number is not None:
            return ["@", number]
        self._seen[id(one)] = len(self._alive)
        self._alive.append(one)
        node = self.node
        if kind is list or kind is deque:
            return [kind.__name__, *map(node, one)]
        if kind.__name__ in _SEQUENCES and kind.__module__ == "builtins":
            return [kind.__name__, *map(node, one)]
        if _MAPS.get(kind.__name__) is kind:
            flat = [node(part) for pair in one.items() for part in pair]
            return [kind.__name__, *flat]
        name = _names().get(kind)
        if name is None:
            if callable(one):
                return ["-"]
            raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not to be frozen")
        if isinstance(one, tuple):
            return ["n", name, *map(node, one)]
        return ["o", name, *[node(part) for field in _fields(one) for part in field]]


class _Reader:
    def __init__(self) -> None:
        self._seen: list[Any] = []

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        tag = node[0]
        if tag == "@":
            return self._seen[node[1]]
        number = len(self._seen)
        self._seen.append(None)
        if tag == "-":
            return None
        if tag in ("list", "deque"):
            filled: Any = [] if tag == "list" else deque()
            self._seen[number] = filled
            filled.extend(map(self.value, node[1:]))
            return filled
        if tag in _MAPS:
            mapping: Any = _MAPS[tag]()
            self._seen[number] = mapping
            for place in range(1, len(node), 2):
                key = self.value(node[place])
                dict.__setitem__(mapping, key, self.value(node[place + 1]))
            return mapping
        made = self._made(tag, node, number)
        self._seen[number] = made
        return made

    def _made(self, tag: str, node: list[Any], number: int) -> Any:
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](list(map(self.value, node[1:])))
        kind = _classes()[node[1]]
        if tag == "n":
            return kind(*map(self.value, node[2:]))
        if tag != "o":
            raise SchemaError(f"unknown tag {tag!r}")
        struct = issubclass(kind, msgspec.Struct)
        made: Any = None
        if not struct:
            made = self._seen[number] = object.__new__(kind)
        values = {node[place]: self.value(node[place + 1]) for place in range(2, len(node), 2)}
        if struct:
            return kind(**values)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made


def _fields(one: Any) -> list[tuple[str, Any]]:
    if isinstance(one, msgspec.Struct):
        names = list(one.__struct_fields__)
    elif is_dataclass(one):
        names = [field.name for field in fields(one)]
    else:
        names = list(vars(one))
    transient = getattr(type(one), "TRANSIENT", ())
    return [(name, getattr(one, name)) for name in names if name not in transient]
