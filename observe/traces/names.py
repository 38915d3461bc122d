"""The words of traces, from which reference/traces.md is printed: stages with spans, attributes.

Attributes that OpenTelemetry's semantic conventions name have their names; the others begin with
`dora.`. Names of spans are the stages, in the words of the design: what a person reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["internal", "producer", "consumer"]
Source = Literal["gen_ai", "messaging", "general", "dora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """One attribute: its type in OTLP, its unit in the meaning where it has one."""

    key: str
    type: str
    meaning: str
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Spans of one name."""

    name: str
    parent: str
    """Stage of its parent; empty for a root."""
    kind: Kind
    begins: str
    ends: str
    attributes: tuple[str, ...]
    events: str = ""
    links: str = ""


ATTRIBUTES: Final[dict[str, Attribute]] = {}


def _name(source: Source, key: str, type: str, meaning: str) -> str:
    assert key not in ATTRIBUTES, key
    ATTRIBUTES[key] = Attribute(key=key, type=type, meaning=meaning, source=source)
    return key


SERVICE: Final = _name("general", "service.name", "string", "`dora-pipe`; of the resource.")
PACKAGE: Final = _name(
    "general", "service.version", "string", "Version of dora-pipe that began the run; resource."
)
HOST: Final = _name("general", "host.name", "string", "Machine of the worker.")
ERROR: Final = _name(
    "general", "error.type", "string", "What went wrong, in a word; the status says it in words."
)

RUN: Final = _name("dora", "dora.run", "string", "Name of the run; of the resource.")
GROUP: Final = _name("dora", "dora.group", "string", "Group id.")
TRAJECTORY: Final = _name("dora", "dora.trajectory", "string", "Trajectory id.")
STEP: Final = _name("dora", "dora.step", "int", "The training step.")
PURPOSE: Final = _name("dora", "dora.purpose", "string", "`train` or `eval`.")
FATE: Final = _name("dora", "dora.fate", "string", "How the group ended.")
REASON: Final = _name("dora", "dora.reason", "string", "Why, as the decision says it.")
VERSION: Final = _name("dora", "dora.version", "int", "Policy version.")
DIGEST: Final = _name("dora", "dora.weights.digest", "string", "Weights digest of the version.")
DEADLINE: Final = _name("dora", "dora.deadline", "int", "Last step that may train the group.")
STALENESS: Final = _name("dora", "dora.staleness", "int", "The step minus the group's version.")
SIBLINGS: Final = _name("dora", "dora.siblings", "int", "Siblings of the group.")
ROW: Final = _name("dora", "dora.prompt.row", "int", "Row of the data set.")
PASS: Final = _name("dora", "dora.prompt.pass", "int", "Pass over the data set, from 0.")
ROUND: Final = _name("dora", "dora.round", "int", "Ordinal of the round with the decision.")
WORKER: Final = _name("dora", "dora.worker", "string", "Name of the worker.")
EPOCH: Final = _name("dora", "dora.epoch", "int", "The worker's role epoch.")
ENGINE: Final = _name("dora", "dora.engine", "string", "The worker's engine and its version.")
ATTEMPT: Final = _name("dora", "dora.attempt", "int", "Attempt at the request or the batch.")
OUTCOME: Final = _name(
    "dora",
    "dora.outcome",
    "string",
    "How an attempt ended: `logged`, `moved`, `left`, `fenced`, `failed`, `cancelled`, `running`.",
)
MOVED_TO: Final = _name("dora", "dora.moved_to", "string", "Worker that shall go on with it.")
RESUMED: Final = _name("dora", "dora.resumed.tokens", "int", "Sampled tokens it went on from.")
TURN: Final = _name("dora", "dora.turn", "int", "Turn of the model, from 0.")
TOKENS: Final = _name("dora", "dora.tokens", "int", "Tokens of the segment.")
OK: Final = _name("dora", "dora.ok", "bool", "False where the tool or environment failed.")
MOVES: Final = _name("dora", "dora.moves", "int", "Moves with the KV cache.")
STAYS: Final = _name("dora", "dora.stays", "int", "Attempts on workers, lost ones among them.")
REWARD: Final = _name("dora", "dora.reward", "double", "The reward, where it is valid.")
SHA256: Final = _name("dora", "dora.sha256", "string", "Of the record's value bytes.")
WAITED_FOR: Final = _name(
    "dora", "dora.waited_for", "string", "What the time of this span went into: the last to come."
)
KEPT: Final = _name(
    "dora", "dora.sampled_because", "string", "`ratio`, `slow`, `failed`, `moved` or `all`."
)
SKEW: Final = _name(
    "dora", "dora.clock_skew_ms", "double", "Clocks of machines disagreed by so much; ms."
)
GROUPS: Final = _name("dora", "dora.groups", "int", "Groups of the batch.")
COMPUTE: Final = _name("dora", "dora.compute_s", "double", "Forward, backward and update; s.")
FIGURE: Final = _name("dora", "dora.figures.*", "double", "Figures of the commit: loss, ...")

OPERATION: Final = _name(
    "gen_ai", "gen_ai.operation.name", "string", "`text_completion`, or `execute_tool`."
)
PROVIDER: Final = _name("gen_ai", "gen_ai.provider.name", "string", "`dora-pipe`.")
MODEL: Final = _name("gen_ai", "gen_ai.request.model", "string", "Folder of the model's version 0.")
ANSWERED_BY: Final = _name(
    "gen_ai", "gen_ai.response.model", "string", "The same with the policy version: `demo@7`."
)
RESPONSE: Final = _name("gen_ai", "gen_ai.response.id", "string", "Trajectory id.")
CONVERSATION: Final = _name("gen_ai", "gen_ai.conversation.id", "string", "Trajectory id.")
FINISH: Final = _name(
    "gen_ai", "gen_ai.response.finish_reasons", "string[]", "Why the trajectory ended."
)
FIRST_TOKEN: Final = _name(
    "gen_ai",
    "gen_ai.response.time_to_first_chunk",
    "double",
    "From the placement to the first token; s. Only on the attempt that sampled it.",
)
INPUT: Final = _name("gen_ai", "gen_ai.usage.input_tokens", "int", "Tokens of the prompt.")
OUTPUT: Final = _name("gen_ai", "gen_ai.usage.output_tokens", "int", "Sampled tokens.")
TEMPERATURE: Final = _name("gen_ai", "gen_ai.request.temperature", "double", "As configured.")
TOP_P: Final = _name("gen_ai", "gen_ai.request.top_p", "double", "As configured.")
TOP_K: Final = _name("gen_ai", "gen_ai.request.top_k", "double", "As configured, if not 0.")
MAX_TOKENS: Final = _name("gen_ai", "gen_ai.request.max_tokens", "int", "As configured.")
TOOL: Final = _name("gen_ai", "gen_ai.tool.name", "string", "Name of the tool.")

SYSTEM: Final = _name("messaging", "messaging.system", "string", "`kafka`, or `sqlite`.")
DO: Final = _name(
    "messaging", "messaging.operation.name", "string", "`dispatch`, `append`, `take`, `train`."
)
DO_TYPE: Final = _name(
    "messaging", "messaging.operation.type", "string", "`send`, `receive` or `process`."
)
TOPIC: Final = _name("messaging", "messaging.destination.name", "string", "Topic.")
PARTITION: Final = _name(
    "messaging", "messaging.destination.partition.id", "string", "Partition of the topic."
)
OFFSET: Final = _name("messaging", "messaging.kafka.offset", "int", "Offset, on Kafka or not.")
KEY: Final = _name("messaging", "messaging.kafka.message.key", "string", "Key of the record.")
MESSAGE: Final = _name("messaging", "messaging.message.id", "string", "Trajectory id.")
SIZE: Final = _name("messaging", "messaging.message.body.size", "int", "Bytes of the value.")
COUNT: Final = _name(
    "messaging", "messaging.batch.message_count", "int", "Trajectories that are taken."
)

_MESSAGE: Final = (SYSTEM, DO, DO_TYPE, TOPIC)
_SETTINGS: Final = (TEMPERATURE, TOP_P, TOP_K, MAX_TOKENS)

STAGES: Final[dict[str, Stage]] = {
    one.name: one
    for one in (
        Stage(
            name="group",
            parent="",
            kind="internal",
            begins="it is dispatched",
            ends="it has its fate",
            attributes=(
                *(GROUP, PURPOSE, VERSION, DIGEST, DEADLINE, SIBLINGS, ROW, PASS),
                *(FATE, REASON, STEP, STALENESS, KEPT, SKEW, ERROR),
            ),
        ),
        Stage(
            name="dispatched",
            parent="group",
            kind="producer",
            begins="the round with the decision",
            ends="at once",
            attributes=(*_MESSAGE, OFFSET, GROUP, ROUND, REASON),
        ),
        Stage(
            name="trajectory",
            parent="group",
            kind="internal",
            begins="its group is dispatched",
            ends="it is published, or its group ends without it",
            attributes=(TRAJECTORY, CONVERSATION, STAYS, MOVES, STEP, REWARD, ERROR),
        ),
        Stage(
            name="queued",
            parent="trajectory",
            kind="internal",
            begins="its group is dispatched, or a worker let go of it",
            ends="it is placed on a worker",
            attributes=(VERSION, ATTEMPT, WORKER, REASON, WAITED_FOR),
        ),
        Stage(
            name="generated",
            parent="trajectory",
            kind="internal",
            begins="it is placed on a worker",
            ends="its last token is there, or the worker lets go of it",
            attributes=(
                *(OPERATION, PROVIDER, MODEL, ANSWERED_BY, RESPONSE, CONVERSATION, INPUT, OUTPUT),
                *(FINISH, FIRST_TOKEN, *_SETTINGS, VERSION, WORKER, EPOCH, HOST, ENGINE),
                *(ATTEMPT, RESUMED, OUTCOME, MOVED_TO, REASON, ERROR),
            ),
            events="`first token`; `move asked`",
        ),
        Stage(
            name="slot",
            parent="generated",
            kind="internal",
            begins="it is placed",
            ends="it gets a slot of the running batch",
            attributes=(WORKER, WAITED_FOR),
        ),
        Stage(
            name="sampled",
            parent="generated",
            kind="internal",
            begins="a turn gets a slot and is prefilled",
            ends="the turn's last token on this worker",
            attributes=(TURN, TOKENS, VERSION),
        ),
        Stage(
            name="environment",
            parent="generated",
            kind="internal",
            begins="the environment is asked",
            ends="it has answered",
            attributes=(TURN, TOKENS, OK, ERROR),
        ),
        Stage(
            name="tool",
            parent="generated",
            kind="internal",
            begins="the tool is called",
            ends="it has answered",
            attributes=(OPERATION, TOOL, TURN, TOKENS, OK, ERROR),
        ),
        Stage(
            name="reward",
            parent="trajectory",
            kind="internal",
            begins="the last token is there",
            ends="the reward is there, or why there is none",
            attributes=(REWARD, ERROR),
        ),
        Stage(
            name="published",
            parent="trajectory",
            kind="producer",
            begins="the reward is there",
            ends="`trajectories logged` says where the record lies",
            attributes=(*_MESSAGE, PARTITION, OFFSET, KEY, MESSAGE, SIZE, SHA256, TRAJECTORY),
        ),
        Stage(
            name="gathered",
            parent="group",
            kind="internal",
            begins="the first sibling is published",
            ends="the last one is",
            attributes=(WAITED_FOR,),
        ),
        Stage(
            name="selected",
            parent="group",
            kind="consumer",
            begins="the last sibling is published",
            ends="the round that takes the group into a batch",
            attributes=(*_MESSAGE, COUNT, STEP, ATTEMPT, STALENESS, REASON, WAITED_FOR),
        ),
        Stage(
            name="trained",
            parent="group",
            kind="consumer",
            begins="the batch is taken",
            ends="the step is committed",
            attributes=(*_MESSAGE, COUNT, STEP, ATTEMPT, STALENESS),
            links="the `step` that trained it",
        ),
        Stage(
            name="step",
            parent="",
            kind="consumer",
            begins="the trainer is free",
            ends="the step is committed",
            attributes=(*_MESSAGE, COUNT, STEP, ATTEMPT, GROUPS, DIGEST, COMPUTE, FIGURE),
            links="the `trajectory` of every sibling of its batch, with `dora.trajectory`",
        ),
        Stage(
            name="waited",
            parent="step",
            kind="internal",
            begins="the trainer is free",
            ends="its batch is taken",
            attributes=(WAITED_FOR,),
        ),
        Stage(
            name="computed",
            parent="step",
            kind="internal",
            begins="the batch is taken",
            ends="the step is committed",
            attributes=(COMPUTE,),
        ),
    )
}
"""By name, in the order in which they come."""
