"""A run whose workers host several versions at once, audited; and decisions that could not be."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from dora_pipe.audit.ledger import Ledger
from dora_pipe.ledger.history import Moment
from dora_pipe.orchestrator.process.recovery import read_rounds
from dora_pipe.schemas.control import LoggedEntry, TrajectoriesLogged
from dora_pipe.schemas.rounds import AnyDecision, Assign, Schedule
from tests.support.cluster import Cluster, SimulatedParts, make_config
from tests.support.ledgers import build_ledger

STEPS = 8
AT = Moment(round=0, offset=0, now_ns=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("residents")
    config = make_config(run__steps=STEPS, run__name="residents", timing__lease_s=0.5)
    parts = SimulatedParts(versions=3)
    with Cluster(folder, config, parts=parts, workers=("w0", "w1")) as running:
        running.until(lambda: running.version >= 2)
        running.kill("w1")
        running.ticks(130)
        running.start("w1")
        running.until(lambda: running.version >= 4)
        running.restart("orchestrator")
        running.run()
        yield running


def decisions(cluster: Cluster) -> list[AnyDecision]:
    rounds = read_rounds(cluster.bus, cluster.topics)
    return [decision for logged_round in rounds for decision in logged_round.round.decisions]


def test_audit_is_clean_and_plans_can_be_made_again(cluster: Cluster) -> None:
    report = cluster.clean_report()
    assert report.steps == STEPS
    assert report.several_versions_seconds > 0


def wrong(ledger: Ledger, decision: AnyDecision) -> list[str]:
    ledger.stopped = None
    before = len(ledger.findings.violations)
    ledger.legality.decision(decision, AT)
    if isinstance(decision, Schedule):
        ledger.legality.placed(decision.requests(), AT)
    return [violation.line for violation in ledger.findings.violations[before:]]


@pytest.fixture
def ledger(cluster: Cluster) -> Ledger:
    ledger = build_ledger(cluster.bus, cluster.topics)
    for worker in ledger.accounts.workers.values():
        worker.gone = None
    return ledger


def last(cluster: Cluster, kind: type[msgspec.Struct]) -> AnyDecision:
    return [decision for decision in decisions(cluster) if isinstance(decision, kind)][-1]


def test_placement_on_a_worker_that_does_not_have_the_version_is_named(
    cluster: Cluster, ledger: Ledger
) -> None:
    location = last(cluster, Schedule)
    assert isinstance(location, Schedule)
    ledger.accounts.workers[location.incarnation].held = {location.spec.version}
    assert not [entry for entry in wrong(ledger, location) if "another version" in entry]
    ledger.accounts.workers[location.incarnation].held = {location.spec.version - 1}
    assert [entry for entry in wrong(ledger, location) if "another version" in entry]


def test_assignment_of_more_than_fits_and_drop_of_what_is_not_there_are_named(
    cluster: Cluster, ledger: Ledger
) -> None:
    assign = last(cluster, Assign)
    assert isinstance(assign, Assign)
    worker = ledger.accounts.workers[assign.incarnation]
    worker.held = {1, 2}
    fits = msgspec.structs.replace(assign, drop=())
    assert wrong(ledger, fits) == []
    worker.held = {1, 2, 3}
    (line,) = wrong(ledger, fits)
    assert "other versions than it has room for" in line
    assert wrong(ledger, msgspec.structs.replace(assign, drop=(1,))) == []
    (line,) = wrong(ledger, msgspec.structs.replace(assign, drop=(0,)))
    assert "other versions than it has room for" in line


def test_trajectory_of_a_version_that_its_worker_never_had_is_named(
    cluster: Cluster, ledger: Ledger
) -> None:
    bound = next(
        request.bound
        for group in ledger.accounts.groups.values()
        for request in group.requests.values()
        if request.bound is not None
    )
    fact = TrajectoriesLogged(
        at_ns=0,
        worker=bound.fact.worker,
        incarnation=bound.fact.incarnation,
        version=bound.fact.version,
        digest=bound.fact.digest,
        trajectories=(
            LoggedEntry(
                **{
                    entry: getattr(bound.fact, entry)
                    for entry in LoggedEntry.__struct_fields__
                    if hasattr(bound.fact, entry)
                }
            ),
        ),
    )
    ledger.accounts.open[bound.fact.group] = ledger.accounts.groups[bound.fact.group]
    ledger._check_served(fact)
    assert not ledger.findings.violations
    ledger.accounts.workers[bound.fact.incarnation].first_ready.clear()
    ledger._check_served(fact)
    assert "never served version" in ledger.findings.violations[-1].line
