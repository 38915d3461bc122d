"""Sections about other processes and machines."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dora_pipe.config.section import Port, Section
from dora_pipe.schemas.topics import PATTERN


class Transfers(Section, frozen=True, kw_only=True):
    """Transfer of KV caches and weights between processes (docs/storage.md). All processes of a run
    share the token in DORA_PIPE_TRANSFERS_TOKEN."""

    kind: Literal["files", "flight", "none"] = "files"
    """`files`: between processes of one machine; `flight`: also between machines; `none`: a request
    that moves is prefilled again."""
    host: str = ""
    """Address of this machine for the others, and for listening; empty: 127.0.0.1."""
    port: Port = 0
    """Port; 0: any free port. Processes of one machine need different ports."""
    cert_file: str = ""
    """PEM certificate of this machine with its key, for TLS; it must name `host`."""
    ca_file: str = ""
    """PEM certificates to verify peers with, for TLS; empty: gRPC's."""


class Telemetry(Section, frozen=True, kw_only=True):
    """Telemetry of a run (docs/reference/traces.md)."""

    traces: str = "off"
    """`off`, or an OTLP/HTTP endpoint such as http://127.0.0.1:4318. `run` then starts a process
    that follows the log and sends traces."""


class Teacher(Section, frozen=True, kw_only=True):
    """Teacher model: training moves the policy toward its log-probs (docs/training.md)."""

    path: str = ""
    """Hugging Face causal LM directory with the policy's tokenizer. The trainer computes the
    log-probs, in `trainer.dtype`."""
    url: str = ""
    """OpenAI completions endpoint that returns log-probs of a prompt of token ids, such as vLLM's;
    `/completions` is appended."""
    model: str = ""
    """Model name at the endpoint."""
    key_env: str = ""
    """Environment variable with the endpoint's key."""
    digest: str = ""
    """Digest of the directory's weights. The run sets it at its start and refuses other weights."""

    @property
    def given(self) -> bool:
        return bool(self.path or self.url)

    def on(self, local: Teacher) -> Teacher:
        """Return this teacher with the local keys of a machine."""
        if not local.given:
            return self
        return msgspec.structs.replace(local, model=self.model, digest=self.digest)


class McpServer(Section, frozen=True, kw_only=True):
    """An MCP server of `task.mcp`, whose tools the model may call."""

    command: tuple[str, ...] = ()
    """Command that starts the server in `task.directory`; or set `url`."""
    url: str = ""
    """Address of a server with streamable HTTP."""
    key_env: str = ""
    """Environment variable with the key for `url`."""
    name: Annotated[str, Meta(pattern=f"^$|{PATTERN}")] = ""
    """Prefix of tool names, NAME_TOOL; empty: none."""
    tools: tuple[str, ...] = ()
    """Tools to use, by the server's names; empty: all."""
    sessions: Literal["shared", "episode"] = "shared"
    """One session per task process, or one per episode with its own state."""
