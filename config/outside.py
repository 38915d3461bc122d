"""Sections about processes and machines beside the run: how bytes go to them, what they are told.
See `model`."""

from __future__ import annotations

from typing import Literal

from dora_pipe.config.section import Port, PositiveFloat, Section, Share


class Transfers(Section, frozen=True, kw_only=True):
    """How KV caches and weights go from process to process beside the log (docs/storage.md)."""

    kind: Literal["files", "flight", "none"] = "files"
    """`files` between processes of one machine, `flight` between machines too, `none`: every
    request that moves is prefilled."""
    host: str = ""
    """What others reach this machine by, and where it listens; empty: 127.0.0.1, which only its own
    processes reach."""
    port: Port = 0
    """Where it listens; 0: any port that is free. Processes of one machine cannot share one."""
    token_file: str = ""
    """A file that holds the token of the run, the same for all its processes. The environment
    (DORA_PIPE_TRANSFERS_TOKEN) goes before it; the token itself stands nowhere."""
    cert_file: str = ""
    """PEM certificate of this machine, for TLS; it must name `host`."""
    key_file: str = ""
    """PEM key of `cert_file`, not encrypted; empty: it stands in there too."""
    ca_file: str = ""
    """PEM certificates that peers are checked against, with TLS; empty: those of gRPC."""


class Telemetry(Section, frozen=True, kw_only=True):
    """What a run tells the outside of itself, beside its log (docs/reference/traces.md)."""

    traces: str = "off"
    """`off`, or the address of an endpoint that takes OTLP over HTTP, such as
    http://127.0.0.1:4318: `run` then starts a process that follows the log and sends traces."""
    traces_ratio: Share = 0.1
    """Share of groups whose traces are sent. Slow groups, and those of which something failed or
    changed its worker, are sent whatever it is."""
    traces_slow: PositiveFloat = 2.0
    """A group is slow when it took so many times as long as the median of the 64 before it."""
