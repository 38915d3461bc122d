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

    @property
    def source(self) -> Source:
        for source in ("gen_ai", "messaging", "dora"):
            if self.key.startswith(f"{source}."):
                return source
        return "general"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Spans of one name."""

    name: str
    parent: str
    """Stage of its parent; empty for a root."""
    kind: Kind = "internal"
    begins: str
    ends: str
    attributes: tuple[str, ...]
    events: str = ""
    links: str = ""


ATTRIBUTES: Final[dict[str, Attribute]] = {}


def _name(key: str, type: str, meaning: str) -> str:
    assert key not in ATTRIBUTES, key
    ATTRIBUTES[key] = Attribute(key=key, type=type, meaning=meaning)
    return key


SERVICE: Final = _name("service.name", "string", "`dora-pipe`; of the resource.")
PACKAGE: Final = _name(
    "service.version", "string", "Version of dora-pipe that began the run; resource."
)
HOST: Final = _name("host.name", "string", "Machine of the worker.")
ERROR: Final = _name(
    "error.type", "string", "What went wrong, in a word; the status says it in words."
)

RUN: Final = _name("dora.run", "string", "Name of the run; of the resource.")
GROUP: Final = _name("dora.group", "string", "Group id.")
TRAJECTORY: Final = _name("dora.trajectory", "string", "Trajectory id.")
STEP: Final = _name("dora.step", "int", "The training step.")
PURPOSE: Final = _name("dora.purpose", "string", "`train` or `eval`.")
FATE: Final = _name(
    "dora.fate", "string", "How the group ended; of a trajectory, how it ended without it."
)
REASON: Final = _name("dora.reason", "string", "Why, as the decision says it.")
VERSION: Final = _name("dora.version", "int", "Policy version.")
DIGEST: Final = _name("dora.weights.digest", "string", "Weights digest of the version.")
DEADLINE: Final = _name("dora.deadline", "int", "Last step that may train the group.")
STALENESS: Final = _name("dora.staleness", "int", "The step minus the group's version.")
SIBLINGS: Final = _name("dora.siblings", "int", "Siblings of the group.")
ROW: Final = _name("dora.prompt.row", "int", "Row of the data set.")
PASS: Final = _name("dora.prompt.pass", "int", "Pass over the data set, from 0.")
ROUND: Final = _name("dora.round", "int", "Ordinal of the round with the decision.")
WORKER: Final = _name("dora.worker", "string", "Name of the worker.")
EPOCH: Final = _name("dora.epoch", "int", "The worker's role epoch.")
ENGINE: Final = _name("dora.engine", "string", "The worker's engine and its version.")
ATTEMPT: Final = _name("dora.attempt", "int", "Attempt at the request or the batch.")
OUTCOME: Final = _name(
    "dora.outcome",
    "string",
    "How an attempt ended: `logged`, `moved`, `left`, `fenced`, `failed`, `cancelled`, `running`.",
)
MOVED_TO: Final = _name("dora.moved_to", "string", "Worker that shall go on with it.")
RESUMED: Final = _name("dora.resumed.tokens", "int", "Sampled tokens it went on from.")
TURN: Final = _name("dora.turn", "int", "Turn of the model, from 0.")
TOKENS: Final = _name("dora.tokens", "int", "Tokens of the segment.")
CONTEXT: Final = _name(
    "dora.context",
    "int",
    "Number of the context, where the trajectory has several; of calls always.",
)
CALL: Final = _name(
    "dora.call", "int", "Number of the agent's call, as they were answered, from 0."
)
API: Final = _name("dora.call.api", "string", "`chat`, `responses`, `messages` or `generate`.")
IDLE: Final = _name("dora.call.idle_s", "double", "Before it no call was open for so long; s.")
OK: Final = _name("dora.ok", "bool", "False where the tool or environment failed.")
MOVES: Final = _name("dora.moves", "int", "Moves with the KV cache.")
ATTEMPTS: Final = _name("dora.stays", "int", "Attempts on workers, lost ones among them.")
REWARD: Final = _name("dora.reward", "double", "The reward, where it is valid.")
SHA256: Final = _name("dora.sha256", "string", "Of the record's value bytes.")
WAITED_FOR: Final = _name(
    "dora.waited_for", "string", "What the time of this span went into: the last to come."
)
KEPT: Final = _name(
    "dora.sampled_because", "string", "`ratio`, `slow`, `failed`, `moved` or `all`."
)
SKEW: Final = _name("dora.clock_skew_ms", "double", "Clocks of machines disagreed by so much; ms.")
GROUPS: Final = _name("dora.groups", "int", "Groups of the batch, or of the part.")
PART: Final = _name("dora.part", "int", "Part of the batch, from 0, where it has several.")
COMPUTE: Final = _name("dora.compute_s", "double", "Forward, backward and update; s.")
BESIDE: Final = _name(
    "dora.beside_s", "double", "On its first part, while the version before was published; s."
)
FIGURE: Final = _name("dora.figures.*", "double", "Figures of the commit: loss, ...")

OPERATION: Final = _name(
    "gen_ai.operation.name", "string", "`text_completion`, `chat` (a call), or `execute_tool`."
)
PROVIDER: Final = _name("gen_ai.provider.name", "string", "`dora-pipe`.")
MODEL: Final = _name("gen_ai.request.model", "string", "Folder of the model's version 0.")
ANSWERED_BY: Final = _name(
    "gen_ai.response.model", "string", "The same with the policy version: `demo@7`."
)
RESPONSE: Final = _name("gen_ai.response.id", "string", "Trajectory id.")
CONVERSATION: Final = _name("gen_ai.conversation.id", "string", "Trajectory id.")
FINISH: Final = _name(
    "gen_ai.response.finish_reasons", "string[]", "Why the trajectory, or the call, ended."
)
FIRST_TOKEN: Final = _name(
    "gen_ai.response.time_to_first_chunk",
    "double",
    "From the placement to the first token; s. Only on the attempt that sampled it.",
)
INPUT: Final = _name("gen_ai.usage.input_tokens", "int", "Tokens of the prompt.")
OUTPUT: Final = _name("gen_ai.usage.output_tokens", "int", "Sampled tokens.")
TEMPERATURE: Final = _name("gen_ai.request.temperature", "double", "As configured.")
TOP_P: Final = _name("gen_ai.request.top_p", "double", "As configured.")
TOP_K: Final = _name("gen_ai.request.top_k", "double", "As configured, if not 0.")
MAX_TOKENS: Final = _name("gen_ai.request.max_tokens", "int", "As configured.")
CALLER: Final = _name("gen_ai.agent.name", "string", "What the agent called itself.")
TOOL: Final = _name("gen_ai.tool.name", "string", "Name of the tool.")

SYSTEM: Final = _name("messaging.system", "string", "`kafka`, or `sqlite`.")
DO: Final = _name("messaging.operation.name", "string", "`dispatch`, `append`, `take`, `train`.")
DO_TYPE: Final = _name("messaging.operation.type", "string", "`send`, `receive` or `process`.")
TOPIC: Final = _name("messaging.destination.name", "string", "Topic.")
PARTITION: Final = _name("messaging.destination.partition.id", "string", "Partition of the topic.")
OFFSET: Final = _name("messaging.kafka.offset", "int", "Offset, on Kafka or not.")
KEY: Final = _name("messaging.kafka.message.key", "string", "Key of the record.")
MESSAGE: Final = _name("messaging.message.id", "string", "Trajectory id.")
SIZE: Final = _name("messaging.message.body.size", "int", "Bytes of the value.")
COUNT: Final = _name("messaging.batch.message_count", "int", "Trajectories that are taken.")

_MESSAGE: Final = (SYSTEM, DO, DO_TYPE, TOPIC)
_SETTINGS: Final = (TEMPERATURE, TOP_P, TOP_K, MAX_TOKENS)

STAGES: Final[dict[str, Stage]] = {
    one.name: one
    for one in (
        Stage(
            name="group",
            parent="",
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
            begins="its group is dispatched",
            ends="it is published, or its group ends without it",
            attributes=(TRAJECTORY, CONVERSATION, ATTEMPTS, MOVES, STEP, REWARD, FATE, ERROR),
        ),
        Stage(
            name="queued",
            parent="trajectory",
            begins="its group is dispatched, or a worker let go of it",
            ends="it is placed on a worker",
            attributes=(VERSION, ATTEMPT, WORKER, REASON, WAITED_FOR),
        ),
        Stage(
            name="generated",
            parent="trajectory",
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
            begins="it is placed",
            ends="it gets a slot of the running batch",
            attributes=(WORKER, WAITED_FOR),
        ),
        Stage(
            name="called",
            parent="generated",
            begins="an agent asks",
            ends="its answer is durable in the log, and leaves",
            attributes=(OPERATION, CALLER, CALL, CONTEXT, API, IDLE, INPUT, OUTPUT, FINISH),
        ),
        Stage(
            name="sampled",
            parent="generated",
            begins="a turn gets a slot and is prefilled",
            ends="the turn's last token on this worker",
            attributes=(TURN, TOKENS, VERSION, CONTEXT),
        ),
        Stage(
            name="environment",
            parent="generated",
            begins="the environment is asked",
            ends="it has answered",
            attributes=(TURN, TOKENS, OK, CONTEXT, ERROR),
        ),
        Stage(
            name="tool",
            parent="generated",
            begins="the tool is called",
            ends="it has answered",
            attributes=(OPERATION, TOOL, TURN, TOKENS, OK, CONTEXT, ERROR),
        ),
        Stage(
            name="reward",
            parent="trajectory",
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
            begins="the first sibling is published",
            ends="the last one is",
            attributes=(WAITED_FOR,),
        ),
        Stage(
            name="selected",
            parent="group",
            kind="consumer",
            begins="the last sibling is published",
            ends="the round that takes the group into a batch, or a part of it",
            attributes=(*_MESSAGE, COUNT, STEP, PART, ATTEMPT, STALENESS, REASON, WAITED_FOR),
        ),
        Stage(
            name="trained",
            parent="group",
            kind="consumer",
            begins="the batch, or its part, is taken",
            ends="the step is committed",
            attributes=(*_MESSAGE, COUNT, STEP, PART, ATTEMPT, STALENESS),
            links="the `step` that trained it",
        ),
        Stage(
            name="step",
            parent="",
            kind="consumer",
            begins="the trainer is free",
            ends="the step is committed",
            attributes=(*_MESSAGE, COUNT, STEP, ATTEMPT, GROUPS, DIGEST, COMPUTE, BESIDE, FIGURE),
            links="the `trajectory` of every sibling of its batch, with `dora.trajectory`",
        ),
        Stage(
            name="waited",
            parent="step",
            begins="the trainer is free",
            ends="its batch, or the next part of it, is taken",
            attributes=(PART, WAITED_FOR),
        ),
        Stage(
            name="part",
            parent="step",
            begins="a part of its batch is taken, and the trainer is free",
            ends="it is computed, ahead of the batch",
            attributes=(PART, GROUPS, COUNT, OUTPUT, REASON),
        ),
        Stage(
            name="computed",
            parent="step",
            begins="the batch is taken, and its parts so far are computed",
            ends="the step is committed",
            attributes=(COMPUTE,),
        ),
    )
}
"""By name, in the order in which they come."""
