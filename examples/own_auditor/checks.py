"""Check commits, trajectories and files against the ledger."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from account import TAKEN, Ledger, Logged
from digests import batch_digest, before, derive, of_value, sha256, tensors_of, weights_digest
from log import Json, Record, row_of, whole

CONTRIBUTIONS = {
    "trajectory": "string",
    "group": "string",
    "version": "int64",
    "staleness": "int64",
    "reward": "double",
    "advantage": "double",
    "tokens": "int64",
    "minibatch": "int64",
}
"""Columns of every contributions file."""


def check_commits(ledger: Ledger) -> None:
    """Check the chain of steps."""
    steps = ledger.started["config"]["run"]["steps"] if ledger.stopped else ledger.newest
    for step in range(ledger.newest if ledger.bound.commanded else steps):
        ledger.findings.holds("steps", f"step {step}", "is missing", step in ledger.commits)
    for step, fact in ledger.commits.items():
        same, who = ledger.findings.same, f"step {step}"
        take, policy = ledger.takes[step, fact["attempt"]], fact["policy"]
        same("steps", who, "trainer's incarnation", fact["trainer"], fact["incarnation"])
        before = ledger.versions.get(step, {}).get("digest")
        same("steps", who, "weights that it begins with", before, fact["digest_before"])
        same("steps", who, "weights that it leaves", fact["digest_after"], policy["digest"])
        same("steps", who, "its manifest", weights_digest(policy["tensors"]), policy["digest"])
        same("batches", who, "groups that were taken", take["groups"], fact["groups"])
        same("batches", who, "settings", take["settings"], fact["settings"])
        same("batches", who, "place to go on from", take["at"] + 1, fact["decisions_next"])
        same("batches", who, "digest", batch_digest(fact["groups"]), fact["batch_digest"])
        for taken in fact["groups"]:
            _check_group(ledger, step, taken)


def _check_group(ledger: Ledger, step: int, taken: Json) -> None:
    """Check a group's deadline, and that it has exactly its records that count."""
    findings, name = ledger.findings, taken["group"]
    group = ledger.groups.get(name)
    if group is None:
        return  # already reported
    spec = group.spec
    findings.same("C2", name, "purpose", "train", spec["purpose"])
    late = f"is trained by step {step}, its deadline is {spec['deadline']}"
    findings.holds("C3", name, late, step <= spec["deadline"])
    early = f"is trained by step {step}, before version {spec['version']} was there"
    findings.holds("C3", name, early, step >= spec["version"])
    for what in ("version", "deadline"):
        findings.same("C3", name, f"{what} in step {step}", spec[what], taken[what])
    findings.same("batches", name, "rewards", group.scores, taken.get("rewards", {}))
    names = ("trajectory", *TAKEN)
    counting = {result["trajectory"]: [result[what] for what in names] for result in group.results}
    trained = {row[0]: row[:6] for row in taken["trajectories"]}
    findings.same("C2", name, f"trajectories of step {step}", [*counting], [*trained])
    for who in counting.keys() & trained.keys():
        what = f"record that step {step} trained"
        findings.same("batches", who, what, counting[who], trained[who])


def check_trajectories(ledger: Ledger, records: Iterable[Record], store: Path) -> Counter[str]:
    """Check every record; return counts by standing."""
    standings: Counter[str] = Counter()
    missing = dict(ledger.logged)
    for record in records:
        location = (record.partition, record.offset)
        entry = missing.pop(location, None)
        who = record.headers.get("trajectory", f"trajectories:{location}")
        run = ledger.started["run"]
        if (f"{run}.trajectories", *location) in ledger.buried and not _trained(ledger, entry):
            continue  # a dead letter
        ledger.findings.same("records", who, "run", run, record.headers.get("run"))
        full = whole(record, store)
        named = record.headers.get("sha256")
        ledger.findings.same("records", who, "sha256", named, of_value(named, full.value))
        if entry is None:
            standings[_standing(ledger, record.headers)] += 1
            dispatched = record.headers.get("group") in ledger.groups
            ledger.findings.holds("records", who, "was never dispatched", dispatched)
            continue
        standings[entry.standing] += 1
        _check_record(ledger, full, entry)
    for location, logged in missing.items():
        who = logged.entry["trajectory"]
        ledger.findings.add("records", who, f"was logged, but is not at {location}")
    return standings


def _trained(ledger: Ledger, logged: Logged | None) -> bool:
    if logged is None:
        return False
    return ledger.groups[logged.entry["trajectory"].rpartition("-")[0]].outcome == "trained"


def _standing(ledger: Ledger, headers: dict[str, str]) -> str:
    group, incarnation = (
        ledger.groups.get(headers.get("group", "")),
        int(headers.get("incarnation", -1)),
    )
    if incarnation in ledger.fenced:
        return "fenced"
    request = group.requests.get(headers.get("trajectory", "")) if group else None
    counted = request is not None and request.counts is not None
    return "superseded" if counted or incarnation not in ledger.workers else "pending"


def _check_record(ledger: Ledger, record: Record, logged: Logged) -> None:
    """Check a record against its log entry, dispatch and value (C1)."""
    entry, findings = logged.entry, ledger.findings
    who = entry["trajectory"]
    spec = ledger.groups[who.rpartition("-")[0]].spec
    headers = _numbers(record.headers)
    digest = of_value(entry["sha256"], record.value)
    findings.same("records", who, "sha256 logged", entry["sha256"], digest)
    findings.same("records", who, "bytes", entry["bytes"], len(record.value))
    findings.same("records", who, "key", spec["group"], record.key.decode(errors="replace"))
    findings.same("records", who, "partition", spec["partition"], record.partition)
    for what in ("trajectory", "attempt", "worker", "incarnation", "version", "digest", "reward"):
        check = "C1" if what in ("version", "digest") else "records"
        findings.same(check, who, f"{what} logged", entry[what], headers.get(what))
    findings.same("records", who, "tokens logged", entry["tokens"], headers.get("sampled"))
    findings.same("C3", who, "deadline", spec["deadline"], headers.get("deadline"))
    findings.same("C1", who, "version dispatched", spec["version"], headers.get("version"))
    published = ledger.versions.get(spec["version"], {}).get("digest")
    findings.same("C1", who, "weights published", published, headers.get("digest"))
    try:
        row = row_of(record.value)
    except (pa.ArrowException, OSError, ValueError, IndexError, KeyError) as error:
        findings.add("records", who, f"cannot be read: {error}")
        return
    for what, value in _said_by(row).items():
        check = "C1" if what in ("version", "digest") else "records"
        findings.same(check, who, f"{what} in its value", headers.get(what), value)
    meta = row["meta"]
    findings.same("records", who, "finish logged", entry["finish"], meta["finish"])
    answers = entry.get("answer", ""), meta.get("reward_answer", "")
    findings.same("records", who, "answer logged", *answers)
    error = _one_line(meta.get("reward_error") or "")
    findings.same("records", who, "error logged", entry.get("error", ""), error)
    contexts = entry.get("contexts", 1), 1 + len(meta.get("contexts", ()))
    findings.same("records", who, "contexts logged", *contexts)
    calls = entry.get("calls", 0), len(meta.get("calls", ()))
    findings.same("records", who, "calls logged", *calls)
    if "parts" in entry:
        parts = _repeated(meta.get("reward_parts", {}))
        findings.same("records", who, "parts logged", entry["parts"], parts)
    _check_value(ledger, who, spec, row)


def _one_line(error: str) -> str:
    """Return at most 200 characters of an error, the ones that cannot be printed escaped."""
    short = error if len(error) <= 200 else error[:197] + "..."
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in short
    )


def _repeated(parts: Json) -> Json:
    """Return the first 16 parts by name, with names of at most 64 characters."""
    short = sorted(name for name in parts if len(name) <= 64)[:16]
    return {name: parts[name] for name in short}


def _numbers(headers: dict[str, str]) -> Json:
    integers = {
        "attempt",
        "version",
        "deadline",
        "incarnation",
        "tokens",
        "sampled",
        "schema_version",
    }
    json: Json = {name: int(text) if name in integers else text for name, text in headers.items()}
    return json | {"reward": float(headers["reward"]) if headers.get("reward") else None}


def _said_by(row: Json) -> Json:
    meta = row["meta"]
    names = ("run", "group", "attempt", "deadline", "worker", "incarnation", "schema_version")
    return {name: meta[name] for name in names} | {
        "trajectory": row["trajectory"],
        "version": row["version"],
        "digest": row["weights_digest"].hex(),
        "tokens": len(row["token_ids"]),
        "sampled": sum(row["loss_mask"]),
        "reward": row["reward"],
    }


def _check_value(ledger: Ledger, who: str, spec: Json, row: Json) -> None:
    findings, meta, mask = ledger.findings, row["meta"], row["loss_mask"]
    for what in ("purpose", "dataset_digest", "index", "data_epoch", "task", "evaluation"):
        findings.same("records", who, what, spec.get(what, ""), meta.get(what, ""))
    findings.same("records", who, "group_size", spec["size"], meta["group_size"])
    seed = derive("trajectory", spec["seed"], meta["sample"])
    findings.same("records", who, "seed", seed, meta["seed"])
    present = [logprob is not None for logprob in row["logprobs"]]
    findings.same("records", who, "log-probs where sampled", [bit == 1 for bit in mask], present)
    ends = [0, *(segment["end"] for segment in row["segments"])]
    starts = [*(segment["start"] for segment in row["segments"]), len(mask)]
    findings.same("records", who, "segments that tile the sequence", ends, starts)
    _check_calls(ledger, who, row)
    if not ledger.started["config"]["staleness"].get("partial_rollout"):
        versions = {segment["version"] for segment in row["segments"] if segment["kind"] == "model"}
        findings.same("C1", who, "versions that sampled", set(), versions - {row["version"]})


def _check_calls(ledger: Ledger, who: str, row: Json) -> None:
    """Check that contexts begin with prompts and that calls cover all sampled tokens."""
    same, meta = ledger.findings.same, row["meta"]
    contexts, calls = meta.get("contexts", []), meta.get("calls", [])
    prompts = [segment["start"] for segment in row["segments"] if segment["kind"] == "prompt"]
    same("records", who, "contexts", prompts[1:], [context["start"] for context in contexts])
    if not calls:
        return
    sampled = [index for index, bit in enumerate(row["loss_mask"]) if bit]
    spans = sorted((call["start"], call["end"]) for call in calls)
    of_calls = [index for start, end in spans for index in range(start, end)]
    same("records", who, "tokens of calls", sampled, of_calls)
    occurrences = set()
    for call in calls:
        prompt = sha256(array("i", before(row["token_ids"], contexts, call["start"])).tobytes())
        occurrence = call.get("occurrence", 0)
        seed = derive("call", meta["seed"], prompt, occurrence)
        same("records", who, f"seed of the call at {call['start']}", seed, call["seed"])
        occurrences.add((prompt, occurrence))
    same("records", who, "calls with a prompt and an occurrence", len(calls), len(occurrences))


def check_store(ledger: Ledger, store: Path) -> None:
    """Check the files of commits that no later commit drops."""
    same = ledger.findings.same
    for version, manifest in ledger.versions.items():
        path, who = store / "weights" / f"{manifest['digest']}.safetensors", f"version {version}"
        if path.exists() or version not in ledger.dropped:
            tensors, size = tensors_of(path) if path.exists() else ([], 0)
            same(
                "policies", who, "tensors", [tensor[:4] for tensor in manifest["tensors"]], tensors
            )
            same("policies", who, "bytes", manifest["bytes"], size)
    for step, fact in ledger.commits.items():
        who, blob = f"contributions of step {step}", fact["contributions"]
        path = store / "contributions" / f"{blob['sha256']}.arrow"
        if _check_blob(ledger, who, blob, path):
            _check_contributions(ledger, fact, path)
        if (blob := fact.get("checkpoint")) is not None:
            path = store / "optimizer" / f"{blob['sha256']}.safetensors"
            if path.exists() or step + 1 not in ledger.dropped:
                _check_blob(ledger, f"checkpoint of step {step}", blob, path)


def _check_blob(ledger: Ledger, who: str, blob: Json, path: Path) -> bool:
    data = path.read_bytes() if path.exists() else b""
    ledger.findings.same("policies", who, "bytes", blob["bytes"], len(data))
    ledger.findings.same("policies", who, "sha256", blob["sha256"], sha256(data))
    return bool(sha256(data) == blob["sha256"])


def _check_contributions(ledger: Ledger, fact: Json, path: Path) -> None:
    who, same = f"contributions of step {fact['step']}", ledger.findings.same
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        table = reader.read_all()
    types = {field.name: str(field.type) for field in table.schema}
    same("policies", who, "columns", CONTRIBUTIONS, {k: types.get(k) for k in CONTRIBUTIONS})
    entries: dict[str, Any] = {
        result["trajectory"]: result
        for taken in fact["groups"]
        if taken["group"] in ledger.groups
        for result in ledger.groups[taken["group"]].results
    }
    rewards: dict[str, float | None] = {}
    for taken in fact["groups"]:
        if taken["group"] in ledger.groups:
            rewards |= ledger.groups[taken["group"]].rewards
    rows = table.to_pylist()
    same("policies", who, "trajectories", sorted(entries), [row["trajectory"] for row in rows])
    for row in rows:
        result = entries.get(row["trajectory"])
        if result is None:
            continue
        reward = rewards[row["trajectory"]]
        expected = [result["version"], fact["step"] - result["version"], reward, result["tokens"]]
        actual = [row[name] for name in ("version", "staleness", "reward", "tokens")]
        same("policies", row["trajectory"], f"{who} (version, staleness, ...)", expected, actual)


def check_cut(ledger: Ledger, control: list[Record], folded: int) -> None:
    """Check that no round folds missing control records."""
    end = control[-1].offset + 2 if control else 0
    strange = sorted(ledger.wrote - ledger.announced)
    ledger.findings.same("rounds", "the run", "incarnations that nobody announced", [], strange)
    ledger.findings.holds(
        "rounds", "the last round", f"folds control to {folded}, which ends at {end}", folded <= end
    )
