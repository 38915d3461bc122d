"""Names for ways to train: which keys each of them sets, and which of them a configuration is.

There is one code path; a paradigm is nothing but these keys. `--paradigm NAME` lays them over the
file, and `-o` has the last word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from dora_pipe.config.model import Config, Staleness, in_flight_batches
from dora_pipe.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Paradigm:
    """A name, what it stands for, and the keys of [staleness] that make it."""

    name: str
    what: str
    staleness: Staleness

    @property
    def keys(self) -> dict[str, Any]:
        """The keys it sets, by their dotted names."""
        fields = self.staleness.__struct_fields__
        found = {f"staleness.{name}": getattr(self.staleness, name) for name in fields}
        if self.staleness.in_flight_batches != "auto":
            found["staleness.in_flight_batches"] = in_flight_batches(self.staleness)
        return found

    @property
    def overrides(self) -> tuple[str, ...]:
        """The keys as `load_config` takes overrides."""
        return tuple(f"{key}={json.dumps(value)}" for key, value in self.keys.items())


PARADIGMS: Final[Mapping[str, Paradigm]] = MappingProxyType(
    {
        one.name: one
        for one in (
            Paradigm(
                name="sync",
                what="generate a batch, train it, load the weights, and again",
                staleness=Staleness(max_staleness=0, in_flight_batches=1.0),
            ),
            Paradigm(
                name="one-step",
                what="generate the next batch while one trains; at most one version old",
                staleness=Staleness(max_staleness=1, in_flight_batches=2.0),
            ),
            Paradigm(
                name="dora",
                what="several versions generate at once, one version per trajectory",
                staleness=Staleness(max_staleness=2, in_flight_batches=3.0),
            ),
            Paradigm(
                name="interruptible",
                what="every worker takes new weights at once, running requests go on under them",
                staleness=Staleness(max_staleness=2, in_flight_batches=3.0, interruptible=True),
            ),
        )
    }
)
"""By name."""


def paradigm(name: str) -> Paradigm:
    """The paradigm of this name. Raises ConfigError, naming those there are."""
    found = PARADIGMS.get(name)
    if found is None:
        raise ConfigError(f"no paradigm {name!r}", hint=f"there are {', '.join(PARADIGMS)}")
    return found


def paradigm_of(config: Config) -> str:
    """What a configuration is, in words: a paradigm by name, or the nearest with what it changes.

    Example: ``"dora"``, ``"dora with max_staleness 3"``.
    """
    mine = config.staleness
    for one in PARADIGMS.values():
        if _as_keys(mine) == one.keys:
            return one.name
    near = _nearest(mine)
    differing = [name for name, value in _as_keys(mine).items() if near.keys[name] != value]
    told = [f"{name.partition('.')[2]} {_told(_as_keys(mine)[name])}" for name in differing]
    return f"{near.name} with {' and '.join(told)}"


def _told(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _as_keys(staleness: Staleness) -> dict[str, Any]:
    return Paradigm(name="", what="", staleness=staleness).keys


def _nearest(mine: Staleness) -> Paradigm:
    if mine.interruptible:
        return PARADIGMS["interruptible"]
    return {0: PARADIGMS["sync"], 1: PARADIGMS["one-step"]}.get(
        mine.max_staleness, PARADIGMS["dora"]
    )
