"""Attribute names and span kinds of traces.

OpenTelemetry's semantic conventions where they exist, else `dora.`. Tests compare
docs/reference/traces.md.
"""

from __future__ import annotations

from typing import Final, Literal

Kind = Literal["internal", "producer", "consumer"]

KINDS: Final[dict[str, Kind]] = {
    "dispatched": "producer",
    "published": "producer",
    "selected": "consumer",
    "trained": "consumer",
    "step": "consumer",
}
"""Kinds by stage; others are internal."""

SERVICE: Final = "service.name"
PACKAGE: Final = "service.version"
HOST: Final = "host.name"
ERROR: Final = "error.type"
RUN: Final = "dora.run"
GROUP: Final = "dora.group"
TRAJECTORY: Final = "dora.trajectory"
STEP: Final = "dora.step"
PURPOSE: Final = "dora.purpose"
REASON: Final = "dora.reason"
VERSION: Final = "dora.version"
DIGEST: Final = "dora.weights.digest"
DEADLINE: Final = "dora.deadline"
STALENESS: Final = "dora.staleness"
GROUP_SIZE: Final = "dora.group_size"
ROW: Final = "dora.prompt.row"
PASS: Final = "dora.prompt.pass"
ROUND: Final = "dora.round"
WORKER: Final = "dora.worker"
INCARNATION: Final = "dora.incarnation"
ENGINE: Final = "dora.engine"
ATTEMPT: Final = "dora.attempt"
OUTCOME: Final = "dora.outcome"
MIGRATED_TO: Final = "dora.migrated_to"
RESUMED: Final = "dora.resumed.tokens"
TURN: Final = "dora.turn"
TOKENS: Final = "dora.tokens"
CONTEXT: Final = "dora.context"
CALL: Final = "dora.call"
API: Final = "dora.call.api"
IDLE: Final = "dora.call.idle_s"
OK: Final = "dora.ok"
MIGRATIONS: Final = "dora.migrations"
ATTEMPTS: Final = "dora.attempts"
REWARD: Final = "dora.reward"
SHA256: Final = "dora.sha256"
WAITED_FOR: Final = "dora.waited_for"
KEPT: Final = "dora.sampled_because"
SKEW: Final = "dora.clock_skew_ms"
GROUPS: Final = "dora.groups"
PART: Final = "dora.part"
COMPUTE: Final = "dora.compute_s"
OVERLAP: Final = "dora.overlap_s"
METRIC: Final = "dora.metrics.*"
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
MODEL: Final = "gen_ai.request.model"
ANSWERED_BY: Final = "gen_ai.response.model"
RESPONSE: Final = "gen_ai.response.id"
CONVERSATION: Final = "gen_ai.conversation.id"
FINISH: Final = "gen_ai.response.finish_reasons"
FIRST_TOKEN: Final = "gen_ai.response.time_to_first_chunk"
INPUT: Final = "gen_ai.usage.input_tokens"
OUTPUT: Final = "gen_ai.usage.output_tokens"
TEMPERATURE: Final = "gen_ai.request.temperature"
TOP_P: Final = "gen_ai.request.top_p"
TOP_K: Final = "gen_ai.request.top_k"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
CALLER: Final = "gen_ai.agent.name"
TOOL: Final = "gen_ai.tool.name"
SYSTEM: Final = "messaging.system"
DO: Final = "messaging.operation.name"
DO_TYPE: Final = "messaging.operation.type"
TOPIC: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
OFFSET: Final = "messaging.kafka.offset"
KEY: Final = "messaging.kafka.message.key"
MESSAGE: Final = "messaging.message.id"
SIZE: Final = "messaging.message.body.size"
COUNT: Final = "messaging.batch.message_count"
