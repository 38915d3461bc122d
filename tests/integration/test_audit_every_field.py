"""Every field of every kind of fact, decision and round, forged by itself with the chain mended:
audit names it, or it is one of those that docs/audit.md lists as beyond it.

Method: one record of each kind of a recorded run, field by field; what a record left out is put in.
`UNSEEN` is all of the fields that pass: the fast tests forge them all at once and hold the page to
them, the slow one forges each of the others by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from dora_pipe.core.errors import SchemaError
from tests.support.every_field import LEFT_OUT, fields_of, with_another
from tests.support.every_field import Path as Field
from tests.support.recorded_run import RecordedRun, audited
from tests.support.tamper import Row, Tamper
from tests.support.tidy import ROOT

UNSEEN: Final = {
    "run-started": "at_ns schema_version eval_rows planner package lineage",
    "role-started": "at_ns instance host pid package",
    "worker-joined": "at_ns instance host pid kv_tokens engine engine_version dtype device "
    "declares.0 reward_digest package",
    "worker-ready": "at_ns load_ms",
    "worker-left": "at_ns reason",
    "trajectories-logged": "at_ns",
    "step-committed": "at_ns early_s overlap_s compute_s metrics.loss metrics.tokens "
    "metrics.trajectories numerics.micro_batch_tokens numerics.trainer dropped",
    "command": "at_ns user",
    "round": "now_ns control_next",
}
"""By kind, what stands once in the log. Times, places and people; what engines say of themselves;
figures and fingerprints, which replay compares; where a run came from; which versions that nobody
pinned retention dropped. Of the kinds that are not here every field is named."""

SEALED: Final = ("kind", "config", "chain", "state_digest", "decisions", "observations")
"""Not forged as fields: tags; a configuration, which has a digest; what a forger mends; and what is
of a kind of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    kind: str
    row: Row
    inside: Field = ()

    def fields(self) -> list[Field]:
        fields = [path for path in fields_of(self.plain()) if path[0] not in SEALED]
        return [(*self.inside, *path) for path in fields]

    def left_out(self) -> list[Field]:
        plain = self.plain()
        result = (name for name in LEFT_OUT.get(self.kind, ()) if name not in plain)
        return [(*self.inside, name) for name in result]

    def plain(self) -> dict[str, Any]:
        plain: Any = msgspec.json.decode(self.row.value)
        for position in self.inside:
            plain = plain[position]
        assert isinstance(plain, dict)
        return plain

    def name(self, path: Field) -> str:
        return ".".join(map(str, path[len(self.inside) :]))


def one_of_each(log: Tamper) -> dict[str, Example]:
    results: dict[str, list[Example]] = {}
    for example in _examples(log):
        results.setdefault(example.kind, []).append(example)
    return {kind: those[len(those) // 2] for kind, those in results.items()}


def _examples(log: Tamper) -> Iterator[Example]:
    for row in log.rows("control"):
        yield Example(kind=msgspec.json.decode(row.value)["kind"], row=row)
    for row in log.rows("decisions"):
        plain = msgspec.json.decode(row.value)
        yield Example(kind="round", row=row)
        for part in ("observations", "decisions"):
            for index, entry in enumerate(plain.get(part, ())):
                yield Example(kind=entry["kind"], row=row, inside=(part, index))


def all_of(example: Example) -> list[Field]:
    return [*example.fields(), *example.left_out()]


def forge(log: Tamper, row: Row, *paths: Field) -> None:
    plain = msgspec.json.decode(row.value)
    for path in paths:
        plain = with_another(plain, path)
    log.put(replace(row, value=msgspec.json.encode(plain, order="deterministic")))
    with suppress(SchemaError):  # an unreadable value cannot be repaired
        log.mend()


def test_what_stands_only_once_in_the_log_passes(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        for kind, example in one_of_each(log).items():
            unseen = UNSEEN.get(kind, "").split()
            forged = [path for path in all_of(example) if example.name(path) in unseen]
            assert len(forged) == len(unseen), kind
            if forged:
                forge(log, example.row, *forged)
    report = audited(copy)
    assert report.holds, [violation.line for violation in report.violations]


def test_page_lists_exactly_what_stands_only_once() -> None:
    page = (ROOT / "docs" / "audit.md").read_text().partition("## Fields recorded only once")[2]
    section = page.partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = {kind.strip(" `"): fields.replace("`", "").split(", ") for kind, fields in rows}
    replies = {kind: sorted(field.strip() for field in fields) for kind, fields in listed.items()}
    assert replies == {kind: sorted(fields.split()) for kind, fields in UNSEEN.items()}


def test_kinds_that_are_forged_are_those_that_the_page_speaks_of(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        kinds = one_of_each(log).keys()
    page = (ROOT / "docs" / "audit.md").read_text().partition("## Fields recorded only once")[2]
    page_head = page.partition("\n## ")[0]
    assert [kind for kind in kinds if f"`{kind}`" not in page_head] == []


@pytest.mark.slow
@pytest.mark.pure
def test_every_other_field_is_named(copy: RecordedRun, tmp_path: Path) -> None:
    with Tamper(copy) as log:
        examples = one_of_each(log)
    passed: dict[str, list[str]] = {}
    for number, (kind, example) in enumerate(examples.items()):
        for index, path in enumerate(all_of(example)):
            forged = copy.copy(tmp_path / f"{number}-{index}")
            with Tamper(forged) as log:
                forge(log, example.row, path)
            if audited(forged).holds:
                passed.setdefault(kind, []).append(example.name(path))
    assert {kind: sorted(names) for kind, names in passed.items()} == {
        kind: sorted(fields.split()) for kind, fields in UNSEEN.items()
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dropped": [0]}, "drops version 0, which retention keeps"),
        ({"dropped": ["pinned"]}, "which retention keeps"),
        ({"adopted": True}, "adopted weights without a `weights adopted`"),
    ],
)
def test_commit_that_excuses_what_is_missing_is_named(
    copy: RecordedRun, changes: dict[str, Any], text: str
) -> None:
    with Tamper(copy) as log:
        commit, take = one_of_each(log)["step-committed"], _take_of(log)
        if changes.get("dropped") == ["pinned"]:
            changes = {"dropped": [max(take["pins"])]}
        value = msgspec.json.encode(commit.plain() | changes, order="deterministic")
        log.put(replace(commit.row, value=value))
        log.mend()
    lines = [violation.line for violation in audited(copy).violations]
    assert any(text in line for line in lines), lines


def _take_of(log: Tamper) -> dict[str, Any]:
    step = one_of_each(log)["step-committed"].plain()["step"]
    takes = (example.plain() for example in _examples(log) if example.kind == "take-batch")
    return next(take for take in takes if take["step"] == step)
