"""Trace and span ids, computed from the run and the subject of a span.

Live and rebuilt traces have equal ids: see docs/decisions/0017.
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


@dataclass(frozen=True, slots=True)
class RunKey:
    """Identity of a run; start times distinguish equal names.

    Example: ``RunKey("demo", 1_750_000_000_000_000_000)``; the time is that of `run started`.
    """

    run: str
    started_ns: int


def group_trace(key: RunKey, group: str) -> str:
    return _digest(key, "trace", group)[:TRACE_HEX]


def step_trace(key: RunKey, step: int) -> str:
    return _digest(key, "trace", f"step {step}")[:TRACE_HEX]


def span_id(trace: str, stage: str, *about: str | int) -> str:
    """Return a span id: 16 hex digits. `about` distinguishes spans of the same stage."""
    text = "\x1f".join((trace, stage, *map(str, about)))
    return hashlib.sha256(text.encode()).hexdigest()[:SPAN_HEX]


def traceparent(trace: str, span: str) -> str:
    """Return the W3C trace context for child spans of users."""
    return f"00-{trace}-{span}-01"


@lru_cache(maxsize=_KEPT)
def _digest(key: RunKey, *parts: str) -> str:
    text = "\x1f".join((key.run, str(key.started_ns), *parts))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Attributes common to all traces of a run."""

    key: RunKey
    package: str
    model: str
    system: str
    sampling: dict[str, Any]
    eval_sampling: dict[str, Any]


def run_facts(fact: RunStarted) -> RunFacts:
    """Return the attributes in `run started`; other versions may lack keys."""
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
