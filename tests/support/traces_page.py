"""Prints reference/traces.md: tables from the names in the code, an example from the golden tree.

python -m tests.support.traces_page > docs/reference/traces.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dora_pipe.observe.traces.names import ATTRIBUTES, STAGES, Source
from dora_pipe.observe.traces.trace_sampling import RECENT, RECENT_MIN

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "traces.md"
TREE: Final = ROOT / "tests" / "golden" / "traces" / "group.txt"

SOURCES: Final[dict[Source, str]] = {
    "gen_ai": "OpenTelemetry, generative AI",
    "messaging": "OpenTelemetry, messaging",
    "general": "OpenTelemetry, general",
    "dora": "own",
}

HEAD: Final = """# Traces

Every group of a run has a trace, from the decision that dispatched it to the optimizer step that
trained it, and every training step has one. They are made from the log alone, so they can be looked
at without any backend, sent while the run lives, or rebuilt from a log years later.
This page is printed from the code (`python -m tests.support.traces_page >
docs/reference/traces.md`); a test compares the two.

## Without a backend

`dora-pipe show RUN ID` ends with the trace of a group (`g0000000007`), a trajectory
(`g0000000007-001`) or a step (`4`): when each part began, how long it lasted, who waited for whom.
`--json` gives the same rows with their trace and span ids. It reads the part of the log in which
the group lies, however long the log is.

```text
{tree}```

A `step` shows the groups of its batch in the order in which they were complete: the last one is
who the trainer waited for.

## To a backend

```console
$ dora-pipe export traces demo http://127.0.0.1:4318         # OTLP over HTTP, protobuf
$ dora-pipe export traces demo traces.jsonl                  # OTLP's JSON, a request a line
$ dora-pipe export traces demo http://127.0.0.1:4318 --follow --ratio 0.1
```

An address without a path gets `/v1/traces`. What an endpoint wants as headers (a token, say) is in
the environment, as for every exporter of OpenTelemetry: `OTEL_EXPORTER_OTLP_HEADERS`; certificates
too: `OTEL_EXPORTER_OTLP_CERTIFICATE`. No key holds a secret. Memory is bounded by what is open in
the run. A file that is there already is replaced with `--force` alone.

The exporter of OpenTelemetry sends a request again while the endpoint answers 429, 502, 503 or 504,
or does not answer: as `Retry-After` says, or after 1, 2, 4, ... s. After 30 s the command ends with
one line that says why; any other refusal ends it at once. What was sent is remembered in
`traces-sent/` of the run's directory (of `$XDG_CACHE_HOME/dora-pipe` where that is not here), a
file for each address and share: the same command continues where the last one ended, and sends
nothing twice. Remove the file to send everything again, under the same ids.

While a run lives:

```toml
[telemetry]
traces = "http://127.0.0.1:4318"
traces_ratio = 0.1
```

`run` then starts one process more, `traces`, which follows the log and sends what has ended, about
a second later. Workers, trainer and orchestrator do nothing for it, and nothing waits for it: while
the endpoint is away or busy it stands still in the log, and the run goes on; if it dies for good,
the run goes on without it. What it has sent is remembered in `traces.sent` in the run's directory,
so a resumed run sends nothing twice. When the run is over it stops at the first request that fails,
and says so; `export traces` sends the rest later, under the same ids. For a run on several machines
start `export traces URL --follow` on any one that reaches the log.
`off`, the default, starts nothing.

## Which groups

`traces_ratio` (or `--ratio`) is a share of the groups, drawn by their trace ids as OpenTelemetry's
own sampler does it. Whatever it is, these are always traced:

- `failed`: the group failed, or an attempt of it did, or a worker of it was fenced;
- `moved`: a sibling changed its worker;
- `slow`: it took more than twice the median of the {lately} groups of its purpose
  that ended before it (from the {lately_min}th on).

It is decided when a group has ended, so a trace is whole or not there. Steps are always traced.
`dora.sampled_because` says why a trace is there.

## What it costs

Following a log of 20 944 short trajectories (48 steps, 102 s on two cores) takes 5.1 s of one core
where a tenth of the groups is drawn, which is 2.5 % of what the machine has; 13.1 s where all are
traced. Off takes nothing. The follower has a lower priority than the roles.

With a tenth of the groups sent, the demo's task lost 2 % of its throughput (five rounds on and off
in turns, 2026-11-27, commit 098e7b28).

## Ids

Ids are functions of the run (its name and when it started) and of what a span is about; nothing is
drawn, and no record carries a context (docs/decisions/0017). So a live trace and a rebuilt one have
the same ids, and who knows a trajectory's id knows its span:

```python
from dora_pipe.observe.traces.ids import RunKey, group_trace, span_id, traceparent

trace = group_trace(RunKey("demo", started_ns), "g0000000007")  # at_ns of `run started`
traceparent(trace, span_id(trace, "trajectory", "g0000000007-001"))
```

From a trajectory one reaches its step by the link of its group's `trained`, from a step its
trajectories by the links of `step`.

## Time

The time of a group is tiled: each sibling's spans follow each other without a gap, from the
dispatch to `published`; then come `selected` and `trained`. Orchestrator, workers and trainer have
clocks of their own. What a worker says lies between the orchestrator's decisions before and after
it; where clocks disagree, spans are cut to that, and the group says by how much
(`dora.clock_skew_ms`).

## Spans

Their names are the stages, in the words of the design.
"""


def page() -> str:
    head = HEAD.format(tree=TREE.read_text(), lately=RECENT, lately_min=RECENT_MIN + 1)
    return "\n".join([head, *_stages(), "## Attributes\n", *_attributes()])


def _stages() -> Iterable[str]:
    yield from ("| span | under | kind | begins | ends |", "|" + " --- |" * 5)
    for one in STAGES.values():
        parent = f"`{one.parent}`" if one.parent else "a trace of its own"
        yield f"| `{one.name}` | {parent} | {one.kind} | {one.begins} | {one.ends} |"
    yield ""
    for one in STAGES.values():
        more = f"; events {one.events}" if one.events else ""
        more += f"; links {one.links}" if one.links else ""
        keys = ", ".join(f"`{key}`" for key in one.attributes)
        yield f"- **{one.name}**: {keys}{more}"
    yield ""


def _attributes() -> Iterable[str]:
    yield from ("| attribute | type | from | meaning |", "|" + " --- |" * 4)
    for source, words in SOURCES.items():
        for one in sorted(ATTRIBUTES.values(), key=lambda one: one.key):
            if one.source == source:
                yield f"| `{one.key}` | {one.type} | {words} | {one.meaning} |"
    yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
