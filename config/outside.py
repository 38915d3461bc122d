"""Sections about storage, other processes and machines."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dora_pipe.config.section import FullEvery, NonNegative, PortNumber, PositiveFloat, Section
from dora_pipe.schemas.topics import PATTERN


class Policies(Section, frozen=True, kw_only=True):
    """Storage format of policy versions (docs/sizing.md)."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of published weights or adapters, which workers sample with and digests cover. `auto`:
    bfloat16 if the model's config has it and the trainer supports it. The optimizer updates float32
    weights."""
    full_every: FullEvery | Literal["auto"] = "auto"
    """Every N-th version, and every version with a checkpoint, is stored in full; the others as
    deltas (docs/storage.md). 1: no deltas; auto: 8 for published bfloat16 weights, otherwise
    1."""


class Store(Section, frozen=True, kw_only=True):
    """Storage of policy versions and checkpoints."""

    path: str = ""
    """Directory; empty: `policies` in the run directory."""
    url: str = ""
    """Remote store: `s3://bucket/prefix?endpoint_override=...`, `file:///shared/run` or another
    file system of pyarrow. `path` then holds copies. See docs/storage.md."""
    cache_gb: PositiveFloat = 100.0
    """Size limit of the copies in `path`, with a `url` or deltas."""
    keep_every: NonNegative | Literal["auto"] = "auto"
    """Keep every N-th checkpoint and pinned versions, and delete others; replay rebuilds them. 0
    keeps everything; auto: 10 if versions and checkpoints add a GiB or more per step, otherwise 0.
    Fixed at the start of a run."""


class Transfers(Section, frozen=True, kw_only=True):
    """Transfer of KV caches and weights between processes (docs/storage.md). All processes of a run
    share the token in DORA_PIPE_TRANSFERS_TOKEN."""

    kind: Literal["files", "flight", "none"] = "files"
    """`files`: between processes of one machine; `flight`: also between machines; `none`: a request
    that moves is prefilled again."""
    host: str = ""
    """Address of this machine for the others, and for listening; empty: 127.0.0.1."""
    port: PortNumber = 0
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
