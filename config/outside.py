"""Sections about processes and machines beside the run: how bytes go to them, what they are told,
what is asked of them. See `model`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dora_pipe.config.section import Port, Section
from dora_pipe.schemas.topics import PATTERN


class Transfers(Section, frozen=True, kw_only=True):
    """How KV caches and weights go from process to process beside the log (docs/storage.md). All
    processes of a run have the same token, in DORA_PIPE_TRANSFERS_TOKEN."""

    kind: Literal["files", "flight", "none"] = "files"
    """`files` between processes of one machine, `flight` between machines too, `none`: every
    request that moves is prefilled."""
    host: str = ""
    """What others reach this machine by, and where it listens; empty: 127.0.0.1, which only its own
    processes reach."""
    port: Port = 0
    """Where it listens; 0: any port that is free. Processes of one machine cannot share one."""
    cert_file: str = ""
    """PEM certificate of this machine and its key, for TLS; it must name `host`."""
    ca_file: str = ""
    """PEM certificates that peers are checked against, with TLS; empty: those of gRPC."""


class Telemetry(Section, frozen=True, kw_only=True):
    """What a run tells the outside of itself, beside its log (docs/reference/traces.md)."""

    traces: str = "off"
    """`off`, or the address of an endpoint that takes OTLP over HTTP, such as
    http://127.0.0.1:4318: `run` then starts a process that follows the log and sends traces."""


class Teacher(Section, frozen=True, kw_only=True):
    """Another model, whose log-probs of the sampled tokens are learnt from (docs/training.md)."""

    path: str = ""
    """A Hugging Face causal LM directory with the policy's tokenizer: the trainer computes them, in
    `trainer.dtype`."""
    url: str = ""
    """In place of a directory: an endpoint of OpenAI's completions that gives log-probs of a prompt
    of token ids, as vLLM's does; what `/completions` is put behind."""
    model: str = ""
    """What the endpoint calls the model."""
    key_env: str = ""
    """The environment variable with the endpoint's key. A key stands in no configuration."""
    digest: str = ""
    """Of the directory's weights. It is found when the run starts; other weights are refused."""

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return bool(self.path or self.url)

    def on(self, local: Teacher) -> Teacher:
        """This teacher of a run as a machine reaches it whose own keys are `local`."""
        if not local.given:
            return self
        return msgspec.structs.replace(local, model=self.model, digest=self.digest)


class McpServer(Section, frozen=True, kw_only=True):
    """One of `task.mcp`: a server whose tools the model may call."""

    command: tuple[str, ...] = ()
    """It is started by this command, in `task.directory`; or it has a `url`."""
    url: str = ""
    """It is spoken to there, by streamable HTTP."""
    key_env: str = ""
    """Name of the environment variable that has the key for `url`."""
    name: Annotated[str, Meta(pattern=f"^$|{PATTERN}")] = ""
    """Its tools are called NAME_TOOL; empty: as the server calls them."""
    tools: tuple[str, ...] = ()
    """Of its tools these alone, by the server's names; empty: all."""
    sessions: Literal["shared", "episode"] = "shared"
    """One session for all episodes of a task process, or one for each, with a state of its own."""
