"""What reference/records.md says that no docstring says: the topics, and names used everywhere.

Whole sections lie as text in `records_texts`.
"""

from __future__ import annotations

from typing import NamedTuple

LETTER = """\
The value is the record's own value, byte for byte. One header, `{header}`, is an ASCII JSON object:

| field | type | meaning |
| --- | --- | --- |
| `topic`, `partition`, `offset` | `str`, `int`, `int` | where the record lies |
| `why`, `path` | `str` | the SchemaError: what is wrong, and where inside the record |
| `at_ns` | `int` | when it could not be read |
| `sha256`, `bytes` | `str`, `int` | of the record's value |
| `kept` | `bool` | false where the value did not fit beside its reason and was left out |
| `key` | `str` | the record's key, base64 |
| `headers` | `list[[str, str]]` | the record's headers, values base64 |
"""


class Where(NamedTuple):
    """How a topic is laid out."""

    partitions: str
    key: str
    value: str


TOPICS = {
    "control": Where("1", "who or what it is about (below)", "JSON"),
    "metrics": Where("1 or more", "`orchestrator`, `trainer`, or the worker's name", "JSON"),
    "decisions": Where("1", "none", "JSON"),
    "trajectories": Where("P", "group id", "Arrow"),
    "progress": Where("P", "trajectory id", "Arrow"),
    "dead-letters": Where("1", "none, or `trainer`", "as it came"),
}

PARTS = (
    ("GroupSpec", "rounds"),
    ("PlacedSibling", "rounds"),
    ("Resume", "control"),
    ("LoggedEntry", "control"),
    ("ScoredSibling", "control"),
    ("TakenGroup", "control"),
    ("TakenTrajectory", "control"),
    ("Offender", "control"),
    ("Lineage", "control"),
    ("DataSet", "control"),
    ("Manifest", "policy"),
    ("Tensor", "policy"),
    ("Blob", "policy"),
    ("Fallback", "policy"),
    ("Times", "trajectory"),
    ("Sampler", "trajectory"),
    ("Context", "contexts"),
    ("Call", "contexts"),
    ("Wait", "metrics"),
    ("Blocker", "metrics"),
    ("AskedCall", "metrics"),
    ("FailingPlace", "metrics"),
    ("Cost", "metrics"),
)

CONTRIBUTIONS = {
    "group": "Group id.",
    "version": "Policy version that sampled it.",
    "staleness": "The step less the version.",
    "reward": "As in `trajectories-logged`; null: not valid, masked.",
    "advantage": "What the objective made of the group's rewards; null: not valid, masked.",
    "tokens": "Sampled tokens.",
    "ratio_mean": "Mean over its tokens of the ratio, present policy by behaviour policy. This and "
    "the next figures are null where no gradient was computed: the trajectory was masked, or its "
    "advantage was zero and there was no KL term.",
    "ratio_min": "The least ratio.",
    "ratio_max": "The largest ratio.",
    "clipped_share": "Share of its tokens whose gradient the clip took away.",
    "kl": "Mean KL estimate.",
    "loss_share": "What it added to the loss.",
    "minibatch": "Which update of the step, from 0.",
    "micro_batch": "Which pass of that update, from 0.",
    "weight_mean": "Mean weight, proximal by behaviour policy; null where the objective has none.",
    "masked_share": "Share of its tokens that the objective left out; null where it has no mask.",
    "teacher_logprobs": "Only in a step with a teacher: its log-probs of the tokens that count.",
}
"""Columns of a contributions file whose meaning is not that of the field of their name."""

COLUMN_MEANINGS = {
    "weights_digest": "Weights digest, as bytes.",
    "meta_json": "Everything that is neither an array nor asked for in bulk, as canonical JSON.",
    "reward": "Null exactly when `reward_error` in `meta_json` says why.",
    "call_json": "The call (see `Call`), as canonical JSON; places are those of the context's whole"
    " sequence.",
}
"""Where a column says less, or more, than the field it becomes."""

COMMON = {
    "active": "Requests in the running batch.",
    "adopted": "Whether the weights before this step were adopted.",
    "args": "The verb's arguments.",
    "assets_digest": "Digest of the model directory's config and tokenizer files.",
    "at_ns": "When the fact happened: the writer's wall clock.",
    "agent_answer": "The text that an agent gave as its answer; null where it gave none.",
    "answer": "What its reward read as its answer; empty where none said one.",
    "attempt": "Which try this is; a batch or a request that is tried again gets the next number.",
    "batch_digest": "See `schemas/batch.py`: what the batch is made of.",
    "bytes": "Size of the value.",
    "AskedCall.trajectory": "Of which session.",
    "Blocker.id": "Which one: an id, a worker's name, a number, a role, the end of a topic's name.",
    "Blob.bytes": "Size of the file.",
    "Manifest.bytes": "Size of all tensors.",
    "cached_bytes": "Size of the records in the cache.",
    "cached_records": "Trajectories read ahead of their batch.",
    "compute_s": "Wall time of forward, backward and update.",
    "config_digest": "sha256 of `config`.",
    "Wait.words": "The wait as a person reads it.",
    "cost": "What the role's CPU time went into.",
    "data_epoch": "Pass over the data set, from 0.",
    "dataset_digest": "sha256 of the data set.",
    "dataset_rows": "Rows of the data set.",
    "decisions": "What was decided, in order.",
    "observations": "What enters state from outside control, in order.",
    "declares": "What the engine promises, e.g. `batch_invariant`.",
    "deadline": "Last step that may train the group; -1 for evaluation.",
    "device": "What the engine runs on.",
    "digest": "Weights digest.",
    "Lineage.digest": "Weights digest of that version.",
    "digest_after": "Weights digest of version `step + 1`.",
    "digest_before": "Weights digest of version `step`.",
    "digest_committed": "Weights digest in the commit.",
    "digest_replayed": "Weights digest that this machine computed.",
    "dtype": "Number type of the weights.",
    "end": "First token behind the segment.",
    "end_ns": "When it ended.",
    "engine": "Name of the generation engine.",
    "engine_version": "Its version.",
    "epoch": "The worker's incarnation: offset of its `worker-joined`.",
    "error": "Class of the error.",
    "eval_digest": "sha256 of the evaluation data.",
    "eval_rows": "Rows of the evaluation data.",
    "extra": "Whatever a user's task or engine adds; plain JSON.",
    "fate": "How the group ended.",
    "finish": "Why the trajectory ended.",
    "finished": "Its last token was there.",
    "first_token": "Its first token was sampled.",
    "group": "Group id.",
    "group_size": "Siblings that were dispatched.",
    "groups": "The batch, group by group.",
    "host": "Name of the machine.",
    "index": "Row of the data set.",
    "instance": "Name of the process, for people.",
    "kind": "Where the tokens come from.",
    "kv_tokens": "Tokens that fit into the KV cache.",
    "kv_used_tokens": "Tokens in the KV cache now.",
    "lineage": "Where the initial weights come from; null for a model directory.",
    "load_ms": "From the assignment to loaded and checked weights.",
    "logprobs": "Log-probs of the policy: of softmax(logits / `sampling.temperature`), or of"
    " softmax(logits) where the temperature is 0 (greedy); null where nothing was sampled.",
    "message": "What happened, in one line.",
    "meta": "See below.",
    "moves": "How often the request changed its worker with its KV cache.",
    "name": "Name of the parameter.",
    "offenders": "The groups that cannot be accepted.",
    "offset": "Offset of the record.",
    "ok": "False where the tool or environment failed.",
    "open_groups": "Groups dispatched and not yet ended.",
    "ordinal": "Dispatch ordinal, counted per purpose.",
    "Round.ordinal": "Number of the round, from 0, without gaps.",
    "package": "Version of dora-pipe.",
    "parts": "What its reward is made of: the first 16 parts with names of at most 64 characters.",
    "partition": "Partition of the trajectories (or progress) topic.",
    "phase": "What it does, in a word.",
    "pid": "Process id.",
    "placed": "It was placed on the worker that finished it.",
    "packages": "Packages and servers of others that its tasks play with, each with its version "
    "and a digest of its source.",
    "planner": "Name and version of the planner.",
    "policy": "The new version's weights.",
    "prefetch": "Placed requests it holds ahead of its slots.",
    "prompt_tokens": "Tokens of the prompt.",
    "purpose": "What the group is for.",
    "queued_requests": "Requests without a place.",
    "reason": "Why, in words.",
    "resume": "The newest progress record to go on from; null to begin.",
    "Progressed.resume": "Its newest progress record.",
    "retryable": "Whether it is placed again.",
    "reward_digest": "Digest of the reward function's code.",
    "reward_answer": "What the reward read as the answer; empty where none said one.",
    "reward_parts": "What the reward is made of.",
    "reward_raw": "Before shaping; null where nothing is shaped.",
    "rewarded": "Its reward was there.",
    "rewarded_by": "Whose its reward is: the task's, or its agent's own.",
    "role": "Which role.",
    "role_epoch": "Incarnation of the exclusive role that wrote this.",
    "RoleStarted.role_epoch": "The incarnation that begins.",
    "rss_bytes": "Resident memory.",
    "run": "Name of the run.",
    "Lineage.run": "Name of that run.",
    "sampler_logprobs": "Log-probs of the distribution that was sampled from; a null column where "
    "equal to `logprobs`.",
    "schema_version": "Version of the writer's records.",
    "seed": "Seed of the run.",
    "GroupSpec.seed": "Seed of the group: hash of the run's seed, purpose and ordinal.",
    "segments": "Turns and their sources; they tile the sequence.",
    "sha256": "Of the value bytes as stored.",
    "Tensor.sha256": "Of its row-major little-endian bytes.",
    "Blob.sha256": "Of the file.",
    "shape": "Sizes.",
    "sibling": "Which of the group's siblings, from 0.",
    "slots": "Requests in its running batch at most.",
    "spec": "The group's stamp.",
    "start": "First token.",
    "Progress.start": "How many sampled tokens came before these.",
    "start_ns": "When it began.",
    "started": "It got a slot.",
    "step": "The training step.",
    "Lineage.step": "Steps that were committed there.",
    "template_digest": "Of how messages become token ids and turns are read; empty: not at all.",
    "tensors": "Every tensor.",
    "times": "When things happened.",
    "token_ids": "Tokens as sampled, never tokenised again.",
    "tokens": "How many sampled tokens it reaches.",
    "tool": "Name of the tool; empty where none was called.",
    "total_s": "All of it.",
    "trajectories": "All its logged siblings, in order.",
    "trajectory": "Trajectory id.",
    "turn": "Turn of the model that it belongs to, from 0.",
    "used_tokens": "Tokens in the KV cache.",
    "user": "Who asks.",
    "verb": "What is asked.",
    "version": "Policy version.",
    "Segment.version": "Policy version that sampled it; -1 for what no engine made.",
    "Segment.epoch": "That worker's incarnation; -1 for what no engine made.",
    "Segment.start": "First token of the segment.",
    "waiting": "Requests that wait for a slot.",
    "why": "What is wrong with it.",
    "VersionsDropped.user": "Who called `prune`.",
    "VersionsDropped.versions": "Sorted; they are deleted after this record is durable.",
    "WeightsAdopted.why": "How the machines differ.",
    "worker": "Name of the worker.",
}
"""Meaning of a field by its name, or by record and name where it means something of its own."""
