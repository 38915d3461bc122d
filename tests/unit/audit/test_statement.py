"""The statement of a certificate: its bytes are kept, and what does not hold of it is named.

Method: a value of every field against the bytes that were released (tests/golden/certificate-1).
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from dora_pipe.audit.certificate import (
    Audited,
    Base,
    CertifiedWeights,
    Code,
    Configuration,
    DataUsed,
    LogPlace,
    Made,
    Parent,
    Predicate,
    SettingsFrom,
    Trained,
    TrainedAgain,
    VersionShare,
    differences,
)
from dora_pipe.audit.certificate_checks import check_files, check_lineage, check_statement
from dora_pipe.audit.statement import (
    WEIGHTS,
    SignedStatement,
    Statement,
    Subject,
    files_below,
    read_statement,
    statement_bytes,
    subjects_of,
)
from tests.support.tidy import ROOT

GOLDEN = ROOT / "tests" / "golden" / "certificate-1" / "statement.json"
A, B, C, D = (one * 64 for one in "abcd")

MADE = Made(
    run="demo",
    version=2,
    weights=CertifiedWeights(digest=A, bytes=4096, tensors=21, dtype="float32"),
    log=LogPlace(run_started=B, control=120, round=44, decisions=87, chain=C),
    configuration=Configuration(
        digest=D,
        seed=7,
        settings=(
            SettingsFrom(step=0, settings={"objective.kind": "grpo", "trainer.learning_rate": 0.5}),
            SettingsFrom(step=1, settings={"objective.kind": "grpo", "trainer.learning_rate": 1}),
        ),
    ),
    code=Code(
        packages=("0.1.0", "0.2.0"),
        planner="consolidate-3",
        rewards=("", A),
        templates=(B,),
        samplers=(f"mine:draw {C}",),
        tasks=(f"verifiers 0.1 {D}",),
        engines=("torch 1 on cpu in float32",),
        numerics=({"device": "cpu", "torch": "2.13"},),
    ),
    data=(DataUsed(source="train/sums", digest=A, rows=9, groups=3, trajectories=11, tokens=40),),
    base=Base(name="warm", digest=B, assets=C),
    trained=Trained(
        steps=2,
        digest=D,
        adopted=(1,),
        groups=3,
        trajectories=11,
        tokens=40,
        versions=(
            VersionShare(version=0, digest=B, groups=2, trajectories=8, tokens=30, share=0.75),
            VersionShare(version=1, digest=C, groups=1, trajectories=3, tokens=10, share=0.25),
        ),
        mixed=False,
    ),
)
AUDIT = Audited(
    package="0.2.0",
    clean=False,
    violations=1,
    first=("C3 g1: late",),
    rounds=45,
    chain=C,
    records=9,
)
PARENT = Parent(run="before", version=12, digest=B, made=None)
AGAIN = TrainedAgain(source="first", first=3, steps=2, digest=A, settings={}, change="")
PREDICATE = Predicate(made=MADE, lineage=(PARENT,), audit=AUDIT)
SUBJECTS = [
    Subject(name="demo@2", digest={WEIGHTS: A}),
    Subject(name="config.json", digest={"sha256": B}),
]


def statement(**changes: object) -> Statement:
    return msgspec.structs.replace(
        Statement(subject=tuple(SUBJECTS), predicate=PREDICATE), **changes
    )


def test_a_statement_has_the_bytes_that_were_released() -> None:
    found = statement_bytes(SUBJECTS, PREDICATE)
    assert found == GOLDEN.read_bytes().rstrip(b"\n"), "a released form stays as it is"
    assert read_statement(SignedStatement(payload=found)) == statement()


def test_fields_of_later_versions_are_ignored() -> None:
    plain = json.loads(GOLDEN.read_bytes())
    plain["predicate"]["made"]["later"] = {"more": 1}
    plain["later"] = []
    payload = json.dumps(plain, indent=2).encode()
    assert read_statement(SignedStatement(payload=payload)) == statement()


def test_every_leaf_that_differs_is_named_by_its_path() -> None:
    other = msgspec.structs.replace(
        MADE,
        base=msgspec.structs.replace(MADE.base, name="cold"),
        data=(),
        trained=msgspec.structs.replace(MADE.trained, adopted=(2,)),
    )
    assert list(differences(MADE, MADE)) == []
    assert list(differences(MADE, other)) == [
        ("data (how many)", 1, 0),
        ("base.name", "warm", "cold"),
        ("trained.adopted[0]", 1, 2),
    ]


def test_files_are_compared_by_name_and_digest() -> None:
    said = statement()
    (one,) = check_files(said, {"config.json": B})
    assert one.holds
    found = [one.words for one in check_files(said, {"config.json": None, "x.py": A})]
    assert found == [f"config.json: certified {B}, found nothing to read", "x.py: is not certified"]
    assert [one.words for one in check_files(said, {})] == ["config.json: is not there"]


def test_a_statement_is_held_against_itself() -> None:
    subject, audit = check_statement(statement())
    assert subject.holds
    assert audit.words == "it did not hold when it was certified: 1 violations, C3 g1: late"
    first, _ = check_statement(statement(subject=tuple(SUBJECTS[1:])))
    assert first.holds is False
    assert "are none" in first.words


def test_a_lineage_is_compared_as_far_as_logs_are_here() -> None:
    known = msgspec.structs.replace(PARENT, made=MADE)
    above = Parent(run="first", version=3, digest=C, made=None)
    other = msgspec.structs.replace(PARENT, digest=D)
    again = msgspec.structs.replace(PARENT, again=AGAIN)
    longer = msgspec.structs.replace(PARENT, again=msgspec.structs.replace(AGAIN, steps=3))
    cases = [
        ((again,), (again,), [True]),
        ((again,), (longer,), [False]),
        ((again,), (PARENT,), [None]),
        ((PARENT,), (again,), [None]),
        ((again, above), (again, above), [True, None]),
        ((again,), (again, above), [True, False]),
        ((PARENT,), (PARENT,), [None]),
        ((known,), (known,), [True]),
        ((known,), (PARENT,), [None]),
        ((PARENT,), (known,), [None]),
        ((known, above), (PARENT,), [None, None]),
        ((known, above), (known, above), [True, None]),
        ((known,), (known, above), [True, False]),
        ((PARENT,), (known, above), [None, None]),
        ((PARENT,), (other,), [False]),
        ((PARENT,), (), [False]),
        ((), (PARENT,), [False]),
        ((), (), []),
    ]
    for certified, found, holds in cases:
        assert [one.holds for one in check_lineage(certified, found)] == holds, (certified, found)


def test_files_are_found_in_folders_and_those_with_a_point_are_not_certified(
    tmp_path: Path,
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("config.json", "adapter/adapter.safetensors", ".git/head", ".gitattributes"):
        (tmp_path / name).write_text(name)
    (tmp_path / "linked").symlink_to(tmp_path / "adapter")
    assert files_below(tmp_path) == ["adapter/adapter.safetensors", "config.json", "linked"]
    (tmp_path / "linked").unlink()
    weights, *files = subjects_of(tmp_path, "demo@2", A)
    assert weights == SUBJECTS[0]
    assert [one.name for one in files] == ["adapter/adapter.safetensors", "config.json"]
