"""examples/own_auditor, which shares no line with this project, says of a log what audit says.

Goal: reference/records.md is enough for a stranger. Method: the example was written from that
page; it reads a run that holds, and copies of it with every damage that `test_audit_damage` knows.
"""

from __future__ import annotations

import ast
import runpy
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.schemas.control import WorkerReady
from dora_pipe.schemas.trajectory import Trajectory
from tests.integration.test_audit_damage import BREAKS_THE_CHAIN, DAMAGES
from tests.integration.test_audit_every_field import UNSEEN, forge, one_of_each
from tests.integration.test_audit_rules import RULES
from tests.support import damage
from tests.support.branched_run import branch, branched
from tests.support.every_field import LEFT_OUT
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper
from tests.support.tiers import more

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "own_auditor"
LEFT_TO_AUDIT = {
    "worker-joined": ("slots", "prefetch"),
    "command": ("verb", "args.trainer.learning_rate"),
}
"""Fields that only plans made again give away."""

DAMAGING = list(dict.fromkeys(damaging for damaging, _, _ in DAMAGES))
EVERY = 8
"""The fast tier breaks each eighth of the damages and rules."""


@pytest.fixture(scope="module")
def own_audit() -> Callable[[Path], tuple[Any, Counter[str]]]:
    result: Callable[[Path], tuple[Any, Counter[str]]]
    result = runpy.run_path(str(FOLDER), run_name="own_auditor")["audit"]
    return result


def _program(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(FOLDER), str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_imports_the_standard_library_pyarrow_and_one_digest_alone() -> None:
    own = {path.stem for path in FOLDER.glob("*.py")}
    names: set[str] = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names.add((node.module or "").split(".")[0])
    assert names - own - set(sys.stdlib_module_names) == {"pyarrow", "blake3"}


def test_a_run_that_holds_has_no_finding_and_the_figures_of_audit(
    copy: RecordedRun, own_audit: Callable[[Path], tuple[Any, Counter[str]]]
) -> None:
    ledger, standings = own_audit(copy.directory)
    bus = copy.open()
    ours = audit(bus, copy.topics, copy.store)
    bus.close()
    assert ledger.findings.lines == []
    assert ledger.findings.looked > 10_000
    assert (len(ledger.commits), ledger.rounds) == (ours.steps, ours.rounds)
    assert dict(standings) == {"counts": ours.record_statuses.pop("bound")} | ours.record_statuses
    outcomes = Counter(group.outcome for group in ledger.groups.values())
    assert outcomes == Counter(
        {outcome.outcome: outcome.groups for outcome in ours.outcomes if outcome.groups}
    )


def few(values: list[Any]) -> list[Any]:
    return [*values[::EVERY], *more(value for i, value in enumerate(values) if i % EVERY)]


@pytest.mark.parametrize("damaging", few(DAMAGING), ids=lambda entry: entry.__name__)
def test_every_damage_that_audit_names_is_found_from_the_page_alone(
    copy: RecordedRun,
    own_audit: Callable[[Path], tuple[Any, Counter[str]]],
    damaging: Callable[[Tamper], str],
) -> None:
    with Tamper(copy) as log:
        subject = damaging(log)
        if damaging in BREAKS_THE_CHAIN:
            log.mend()
    ledger, _ = own_audit(copy.directory)
    lines = ledger.findings.lines
    assert any(subject in line for line in lines), (subject, lines)
    assert not any(": chain: " in line for line in lines), lines


def test_an_agents_trajectory_is_checked_from_the_page_alone(
    copy: RecordedRun, own_audit: Callable[[Path], tuple[Any, Counter[str]]]
) -> None:
    with Tamper(copy) as log:
        name = branch(log)
    ledger, _ = own_audit(copy.directory)
    assert [
        line for line in ledger.findings.lines if name in line and "contributions" not in line
    ] == []


def _other_seed(trajectory: Trajectory) -> Trajectory:
    first, *rest = trajectory.meta.calls
    calls = (msgspec.structs.replace(first, seed=first.seed + 1), *rest)
    return replace(trajectory, meta=msgspec.structs.replace(trajectory.meta, calls=calls))


def _one_less(trajectory: Trajectory) -> Trajectory:
    return replace(
        trajectory, meta=msgspec.structs.replace(trajectory.meta, calls=trajectory.meta.calls[1:])
    )


@pytest.mark.parametrize(
    ("change", "text"), [(_other_seed, "seed of the call"), (_one_less, "tokens of calls")]
)
def test_a_call_that_does_not_follow_is_found_from_the_page_alone(
    copy: RecordedRun,
    own_audit: Callable[[Path], tuple[Any, Counter[str]]],
    change: Callable[[Trajectory], Trajectory],
    text: str,
) -> None:
    with Tamper(copy) as log:
        name = branch(log, change=lambda result: change(branched(result)))
    ledger, _ = own_audit(copy.directory)
    assert [line for line in ledger.findings.lines if name in line and text in line]


@pytest.mark.parametrize("name", few(list(RULES)))
def test_forged_fields_and_broken_rules_are_found_from_the_page_alone(
    copy: RecordedRun, own_audit: Callable[[Path], tuple[Any, Counter[str]]], name: str
) -> None:
    with Tamper(copy) as log:
        RULES[name][0](log)
        log.mend()
    ledger, _ = own_audit(copy.directory)
    assert ledger.findings.lines
    assert not any(": chain: " in line for line in ledger.findings.lines)


def test_decisions_that_lost_their_end_show_in_the_facts_that_answered_them(
    copy: RecordedRun, own_audit: Callable[[Path], tuple[Any, Counter[str]]]
) -> None:
    with Tamper(copy) as log:
        log.remove(log.rows("decisions")[-1])
    ledger, _ = own_audit(copy.directory)
    lines = [line for line in ledger.findings.lines if "but no decision stopped it" in line]
    assert len(lines) == 3, ledger.findings.lines


def test_records_under_another_key_and_in_no_partition_are_found(
    copy: RecordedRun, own_audit: Callable[[Path], tuple[Any, Counter[str]]]
) -> None:
    with Tamper(copy) as log:
        trained, fact = log.trained()
        ready, _ = log.facts(WorkerReady)[3]
        for row in (trained, ready, log.rows("decisions")[40]):
            log.put(replace(row, key=b"w9"))
    with closing(sqlite3.connect(copy.log)) as file, file:
        (topic,) = file.execute("SELECT id FROM topics WHERE name LIKE '%.decisions'").fetchone()
        for position in (77 << 52 | 3, topic << 52 | 5 << 40 | 1):
            file.execute("INSERT INTO records (at, key, value) VALUES (?, x'', x'')", (position,))
    ledger, _ = own_audit(copy.directory)
    assert ledger.findings.lines == [
        f"control control:{ready.offset}: key: expected {ready.key.decode()}, found w9",
        "rounds round 40: key: expected b'', found b'w9'",
        f"records topic {topic}, partition 5: nobody reads what lies there (1)",
        "records topic 77, partition 0: nobody reads what lies there (1)",
        f"records {fact.trajectory}: key: expected {trained.key.decode()}, found w9",
    ]


def test_a_changed_byte_of_control_breaks_the_chain(
    copy: RecordedRun, own_audit: Callable[[Path], tuple[Any, Counter[str]]]
) -> None:
    with Tamper(copy) as log:
        row, fact = log.facts(WorkerReady)[0]
        log.rewrite(row, msgspec.structs.replace(fact, load_ms=fact.load_ms + 1))
    ledger, _ = own_audit(copy.directory)
    (line,) = ledger.findings.lines
    assert line.startswith("rounds round ") and ": chain: expected " in line


def test_the_program_prints_a_line_per_finding_and_ends_with_1(copy: RecordedRun) -> None:
    program = _program(copy.directory)
    assert (program.returncode, program.stderr) == (0, "")
    assert "findings  0\n" in program.stdout
    with Tamper(copy) as log:
        subject = damage.change_token(log)
    broken = _program(copy.directory)
    assert (broken.returncode, broken.stderr) == (1, "")
    expected = f"records {subject}: sha256 logged: expected "
    assert any(line.startswith(expected) for line in broken.stdout.splitlines())


def test_what_is_no_run_is_one_line_and_ends_with_2(tmp_path: Path) -> None:
    for content in (None, b"no database", b""):
        if content is not None:
            (tmp_path / "log.sqlite").write_bytes(content)
        done = _program(tmp_path)
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_it_reads_beside_a_writer_as_of_one_moment(
    copy: RecordedRun, own_audit: Callable[[Path], tuple[Any, Counter[str]]]
) -> None:
    bus = copy.open()
    writer = bus.writer()
    before = copy.log.read_bytes()
    ledger, _ = own_audit(copy.directory)
    writer.close()
    bus.close()
    assert ledger.findings.lines == []
    assert copy.log.read_bytes() == before


@pytest.mark.slow
@pytest.mark.pure
@pytest.mark.parametrize("kind", [entry for entry in UNSEEN if entry != "round"])
def test_every_field_that_audit_names_is_found_but_what_takes_the_planner(
    copy: RecordedRun,
    own_audit: Callable[[Path], tuple[Any, Counter[str]]],
    tmp_path: Path,
    kind: str,
) -> None:
    with Tamper(copy) as log:
        example = one_of_each(log)[kind]
    passed = []
    for number, path in enumerate(example.fields()):
        forged = copy.copy(tmp_path / str(number))
        with Tamper(forged) as log:
            forge(log, example.row, path)
        ledger, _ = own_audit(forged.directory)
        if not ledger.findings.lines:
            passed.append(example.name(path))
    there = {example.name(path) for path in example.fields()}
    unseen = set(UNSEEN[kind].split()) - (LEFT_OUT.get(kind, {}).keys() - there)
    assert sorted(passed) == sorted([*unseen, *LEFT_TO_AUDIT.get(kind, ())])
