"""The run that traces are of, and their ids: functions of the run and of what a span is about.

Nothing is drawn: a trace that is made while a run lives and one that is rebuilt from its log years
later have the same ids, whoever makes them, and no record has to carry a context: see
docs/decisions/0017.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from dora_pipe.schemas.control import RunStarted

TRACE_HEX: Final = 32
SPAN_HEX: Final = 16
_KEPT: Final = 4096
"""Ids that are remembered: a group's trace is asked for once per span of it."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """Which run: a name may be used again on another day, and its traces must not mix.

    Example: ``RunKey("demo", 1_750_000_000_000_000_000)``; the time is that of `run started`.
    """

    run: str
    started_ns: int


def group_trace(key: RunKey, group: str) -> str:
    """The trace of a group: 32 hex digits."""
    return _digest(key, "trace", group)[:TRACE_HEX]


def step_trace(key: RunKey, step: int) -> str:
    """The trace of a training step: 32 hex digits."""
    return _digest(key, "trace", f"step {step}")[:TRACE_HEX]


def span_id(trace: str, stage: str, *about: str | int) -> str:
    """A span of a trace: 16 hex digits. `about` tells it from others of its stage."""
    text = "\x1f".join((trace, stage, *map(str, about)))
    return hashlib.sha256(text.encode()).hexdigest()[:SPAN_HEX]


def traceparent(trace: str, span: str) -> str:
    """The W3C trace context of a span, for who wants to hang spans of their own below it."""
    return f"00-{trace}-{span}-01"


@lru_cache(maxsize=_KEPT)
def _digest(key: RunKey, *parts: str) -> str:
    text = "\x1f".join((key.run, str(key.started_ns), *parts))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What holds for all traces of a run."""

    key: RunKey
    package: str
    model: str
    """Folder of version 0, without where it lies."""
    system: str
    """What the log is: `kafka` or `sqlite`."""
    sampling: dict[str, Any]
    eval_sampling: dict[str, Any]


def run_facts(fact: RunStarted) -> RunFacts:
    """What `run started` says of it; a configuration of another version may lack what is asked."""
    config = fact.config
    sampling = dict(config.get("sampling", {}))
    kafka = str(config.get("bus", {}).get("url", "")).startswith("kafka:")
    return RunFacts(
        key=RunKey(fact.run, fact.at_ns),
        package=fact.package,
        model=str(config.get("model", {}).get("path", "")).rstrip("/").rpartition("/")[2],
        system="kafka" if kafka else "sqlite",
        sampling=sampling,
        eval_sampling=sampling | config.get("evaluation", {}).get("sampling", {}),
    )
