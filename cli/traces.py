"""Traces of a run: `export --traces`, and the role that follows a run which is configured so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dora_pipe.cli.output import say
from dora_pipe.cli.rundir import OpenRun, RunDir
from dora_pipe.clock import SystemClock
from dora_pipe.config.model import Config
from dora_pipe.errors import ResourceError, UsageError
from dora_pipe.schemas.topics import Topics
from dora_pipe.telemetry.follow import Follower, Mark, Sent
from dora_pipe.telemetry.keeping import Share
from dora_pipe.telemetry.sinks import FileSink, HttpSink, Sink, is_address
from dora_pipe.telemetry.tracer import Tracer

NICE: Final = 5
"""The follower of a run has time; workers and trainer go first."""


def export_traces(run: OpenRun, target: str, *, follow: bool, ratio: float) -> None:
    """Send the traces of a log to a file or an address; `follow` waits for more."""
    share = Share(ratio=ratio, slow=run.config.telemetry.traces_slow)
    if is_address(target):
        sink = HttpSink(target)
        try:
            done = _follow(run, sink, share) if follow else _whole(run, sink, share)
        finally:
            sink.close()
    elif follow:
        raise UsageError("--follow sends to an address", hint="e.g. --traces http://127.0.0.1:4318")
    else:
        with FileSink(Path(target)) as file:
            done = _whole(run, file, share)
    _tell(target, done)


def _whole(run: OpenRun, sink: Sink, share: Share) -> Sent:
    """Everything that has ended in the log. Raises ResourceError where it cannot be sent."""
    tracer = Tracer(run.bus, run.topics, share)
    sent = Sent()
    try:
        while not tracer.caught_up:
            for traced in tracer.turn(timeout_s=1.0):
                assert tracer.run is not None
                sink.send(tracer.run, traced.spans)
                sent.spans += len(traced.spans)
        sent.groups, sent.left_out, sent.whole = tracer.kept, tracer.left_out, True
        if tracer.open:
            say(f"note: {tracer.open} groups are open yet, and left out")
    finally:
        tracer.close()
    return sent


def _follow(run: OpenRun, sink: Sink, share: Share) -> Sent:
    """Until the run is over, or Ctrl-C."""
    return Follower(run.bus, run.topics, sink, share, clock=SystemClock()).run()


def _tell(target: str, sent: Sent) -> None:
    share = f", {sent.left_out} groups left out by their share" if sent.left_out else ""
    say(f"{target}: {sent.groups} groups, {sent.spans} spans{share}")
    if not sent.whole:
        raise ResourceError("not everything was sent", hint="the same command sends it all again")


def follow_run(directory: RunDir, config: Config, stop: Callable[[], bool]) -> None:
    """Be the follower of a run; what it has not sent when it ends is said."""
    os.nice(NICE)
    telemetry = config.telemetry
    share = Share(ratio=telemetry.traces_ratio, slow=telemetry.traces_slow)
    sink = HttpSink(telemetry.traces)
    bus = directory.open_bus(config)
    try:
        sent = Follower(
            bus,
            Topics(config.run.name),
            sink,
            share,
            clock=SystemClock(),
            stop=stop,
            mark=Mark(directory.path / "traces.sent"),
        ).run()
    finally:
        bus.close()
        sink.close()
    say(f"{sent.groups} groups traced, {sent.left_out} left out by their share, {sent.spans} spans")
    if not sent.whole and not stop():
        say(
            f"not everything was sent; dora-pipe export {config.run.name} --traces URL sends it all"
        )
