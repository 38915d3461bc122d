"""What a run stands on: workers and their engines, the log, the store, how long things may take.

Each class is a section; the docstrings are what `config show` prints (see `model`).
"""

from __future__ import annotations

from typing import Literal

from dora_pipe.config.section import (
    NonNegative,
    NonNegativeFloat,
    Port,
    Positive,
    PositiveFloat,
    RecordBytes,
    Section,
)


class Vllm(Section, frozen=True, kw_only=True):
    """What only the vLLM engines need; see docs/vllm.md."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation in the engine; the trainer's log-probs are those of float32."""
    eager: bool = True
    """Without compiled graphs: they cost a start of minutes, and pay on a GPU."""
    kv_gb: NonNegativeFloat = 0.0
    """GiB for the KV cache of one worker; 0 is what all slots need for whole contexts."""
    prefix_cache: bool = True
    """Prompts that begin alike are prefilled once; forgotten whenever the weights change."""
    addresses: tuple[str, ...] = ()
    """http://HOST:PORT of servers that run already, for w0, w1, ...; without one, a worker with
    `vllm-server` starts its own. The key is in the environment (VLLM_API_KEY), never here."""


class Workers(Section, frozen=True, kw_only=True):
    """Rollout workers."""

    count: NonNegative = 2
    """Started by `run`; others may join."""
    engine: str = "torch"
    """Which engine generates: torch, vllm, vllm-server, or `module:attribute` of your own
    (docs/extending.md)."""
    engines: tuple[str, ...] = ()
    """Engines of w0, w1, ... in turn, where they differ; empty: all have `engine`."""
    gpus: tuple[NonNegative, ...] = ()
    """GPUs of w0, w1, ... in turn, one each, counted from 0 among those that are visible; empty:
    all take the first. For the vLLM engines."""
    vllm: Vllm = Vllm()
    slots: Positive = 64
    """Requests that one worker generates at the same time."""
    prefetch: NonNegative = 16
    """Placed requests a worker holds ahead of its slots."""
    context_tokens: Positive = 1024
    """Longest sequence a slot holds."""
    checkpoint_tokens: Positive = 128
    """A progress record every so many sampled tokens."""
    threads: Positive = 1
    """Of each worker's process."""
    versions_resident: Positive = 4
    """Versions that one worker hosts at the same time, where they are adapters (`lora.rank`)."""


class Bus(Section, frozen=True, kw_only=True):
    """Where the log is."""

    url: str = ""
    """`sqlite:PATH` or `kafka://host:port,...`; empty is log.sqlite in the run directory."""
    partitions: Positive = 4
    """Of the trajectories and progress topics."""
    record_bytes_max: RecordBytes = 10 * 1024 * 1024
    """Largest record a topic takes when it is made; larger trajectories and progress records lie
    in the store's `claims`, and the log says which. See docs/kafka.md."""
    metrics_keep_hours: NonNegative = 168
    """Statuses of the roles (the metrics topic) older than this are deleted while a run goes on;
    nothing but pictures of that time needs them. 0 keeps them for ever. See docs/storage.md."""
    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How Kafka is spoken to: with TLS or without, with a password or without."""
    mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    """How the password is proved, with SASL."""
    username: str = ""
    """Who this is, with SASL. The password is in the environment (DORA_PIPE_KAFKA_PASSWORD) or in
    `password_file`, never here."""
    password_file: str = ""
    """A file that holds the password; its last line end does not count."""
    ca_file: str = ""
    """PEM certificates that brokers are checked against, with TLS; empty: the machine's own."""
    cert_file: str = ""
    """PEM certificate of this client, where the brokers ask for one."""
    key_file: str = ""
    """PEM key of `cert_file`; DORA_PIPE_KAFKA_KEY_PASSWORD opens an encrypted one."""
    check_hostname: bool = True
    """A broker's certificate must name the host that was connected to."""


class Timing(Section, frozen=True, kw_only=True):
    """Heartbeats, leases and restarts."""

    heartbeat_s: PositiveFloat = 0.5
    """From news of a role to the status record that says them; without news it says so every fifth
    heartbeat, and four times in a lease at least."""
    lease_s: PositiveFloat = 10.0
    """How long a silent role counts as alive; more than two heartbeats."""
    plan_period_s: PositiveFloat = 30.0
    """The orchestrator plans anew at least this often."""
    alarm_s: PositiveFloat = 30.0
    """A role that waits longer raises an alarm: for an acknowledgement, a reward, a first token."""
    alarm_work_s: PositiveFloat = 600.0
    """The same for waits that last as long as others work (a batch, groups, weights), until the
    run has shown how long they last; then four times the longest lately, at least `alarm_s`."""
    restarts_max: NonNegative = 5
    """Restarts of one role within `restart_window_s` before `run` gives up: a worker, the last one
    excepted, is then done without. So many starts in a row that hosted nothing count, too."""
    restart_window_s: PositiveFloat = 60.0
    """See `restarts_max`."""
    stop_timeout_s: PositiveFloat = 30.0
    """How long roles may take to stop in order before they are killed."""


class Store(Section, frozen=True, kw_only=True):
    """Policies and checkpoints."""

    path: str = ""
    """Policies and checkpoints; empty is `policies` in the run directory."""
    url: str = ""
    """Where they lie instead: `s3://bucket/prefix?endpoint_override=...`, `file:///shared/run` or
    another file system of pyarrow. `path` then holds copies. See docs/storage.md."""
    cache_gb: PositiveFloat = 100.0
    """Copies in `path` of a store with a `url` take so much room."""
    keep_every: NonNegative = 0
    """Keep every so many checkpoints for ever, beside what is pinned, and delete other versions;
    replay makes them again. 0 keeps everything."""


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
