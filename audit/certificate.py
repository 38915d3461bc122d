"""What a version of a policy is made of, by its run's log alone: the predicate of a certificate.

It is computed once when a certificate is written and again when one is verified, from control and
decisions, never from a cache beside them: what trained the weights, under which versions it was
sampled, with which data, rewards, configuration and code, and the chain of rounds over all of it.
Only what stands in the log before the round that folds the commit is in it, so a run that goes on
changes nothing. Fields that the log says once are as true as who wrote it (docs/audit.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from dora_pipe.audit.findings import Findings
from dora_pipe.audit.reading import read_buried
from dora_pipe.audit.round_reader import Fact, FoldedRound, folded_rounds
from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.account import GroupHistory, RunAccount, StepEnded
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.schemas.control import (
    AnyControl,
    Lineage,
    RoleStarted,
    RunStarted,
    StepCommitted,
    WorkerJoined,
    config_digest,
)
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import canonical, sha256_hex

PREDICATE_TYPE: Final = "urn:dora-pipe:certificate:v1"
"""docs/certificate.md describes it."""

GENERATIONS_MAX: Final = 64
"""Runs that each came from the next one, in one certificate."""


class PredicatePart(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of what a predicate is made of; its JSON has camelCase, as in-toto's does."""


class CertifiedWeights(PredicatePart, frozen=True, kw_only=True):
    """The weights of the version, as the run published them."""

    digest: str
    """`schemas.policy.weights_digest` (hex): independent of files and sharding."""
    bytes: int
    tensors: int
    dtype: str


class LogPlace(PredicatePart, frozen=True, kw_only=True):
    """How far the log goes that made the version."""

    run_started: str
    """sha256 (hex) of the record that began the run."""
    control: int
    """Offset of the commit; of version 0, of that record."""
    round: int
    """Ordinal of the round that folds it."""
    decisions: int
    """Offset of that round."""
    chain: str
    """Of that round (hex): over every control record and every decision up to it."""


class SettingsFrom(PredicatePart, frozen=True, kw_only=True):
    """The logged keys that were in force from a step on."""

    step: int
    settings: dict[str, float | int | str | bool]


class Configuration(PredicatePart, frozen=True, kw_only=True):
    """Of the run, as it began and as it was changed."""

    digest: str
    """sha256 (hex) over its plain values as canonical JSON."""
    seed: int
    settings: tuple[SettingsFrom, ...]


class Code(PredicatePart, frozen=True, kw_only=True):
    """What of the code the log names, of everyone who had started before the commit; sorted."""

    packages: tuple[str, ...]
    """Versions of dora-pipe."""
    planner: str
    rewards: tuple[str, ...]
    """sha256 (hex) over the code of rewards (`reward_digest`); "" where it is not known."""
    templates: tuple[str, ...]
    """The same of how messages become tokens; empty without messages."""
    samplers: tuple[str, ...]
    """`name sha256` of what draws rows."""
    tasks: tuple[str, ...]
    """`name version digest` of packages of others that tasks play with."""
    engines: tuple[str, ...]
    numerics: tuple[dict[str, str], ...]
    """Fingerprints of the steps: equal bits are promised under an equal one."""


class DataUsed(PredicatePart, frozen=True, kw_only=True):
    """Rows of a source, and what of it was trained."""

    source: str
    """`train`, `eval`, or with the name of the task or evaluation, as `train/NAME`."""
    digest: str
    """sha256 (hex) over the rows as canonical JSON, a line each."""
    rows: int
    groups: int
    trajectories: int
    tokens: int


class Base(PredicatePart, frozen=True, kw_only=True):
    """The model that the run began with."""

    name: str
    """Last part of its path."""
    digest: str
    """Weights digest of version 0."""
    assets: str
    """sha256 (hex) over config and tokenizer files."""


class VersionShare(PredicatePart, frozen=True, kw_only=True):
    """What was sampled under one version and trained."""

    version: int
    digest: str
    groups: int
    trajectories: int
    """With a valid reward."""
    tokens: int
    """Sampled ones of those."""
    share: float
    """Of all tokens."""


class Trained(PredicatePart, frozen=True, kw_only=True):
    """The steps up to the version, and what they were trained on."""

    steps: int
    digest: str
    """sha256 (hex) over a line a step of canonical JSON: [step, batch digest, weights digest before
    it, after it]."""
    adopted: tuple[int, ...]
    """Steps whose weights before them were adopted, not replayed."""
    groups: int
    trajectories: int
    tokens: int
    versions: tuple[VersionShare, ...]
    """Empty where trajectories may mix versions."""
    mixed: bool
    """Whether they may (`staleness.interruptible`)."""


class Made(PredicatePart, frozen=True, kw_only=True):
    """What a version is made of, by one log."""

    run: str
    version: int
    weights: CertifiedWeights
    log: LogPlace
    configuration: Configuration
    code: Code
    data: tuple[DataUsed, ...]
    base: Base
    trained: Trained


class TrainedAgain(PredicatePart, frozen=True, kw_only=True):
    """What a version is made of whose run is steps of another one, trained again (`retrain`)."""

    source: str
    """The run whose batches they had; it follows in the lineage."""
    first: int
    """The first of these steps, which began with that version of the source."""
    steps: int
    digest: str
    """Of these steps, as `Trained.digest`."""
    settings: dict[str, float | int | str | bool]
    """That were otherwise than in the source."""
    change: str
    """sha256 (hex) of the rows, rewards and weights of rows that were; empty: none."""


class Parent(PredicatePart, frozen=True, kw_only=True):
    """The run that the one before it began with (`run --from`)."""

    run: str
    version: int
    digest: str
    """Weights digest of that version, as the child's log has it."""
    made: Made | None
    """None where its log was not there, or has no rounds."""
    again: TrainedAgain | msgspec.UnsetType = msgspec.UNSET
    """In place of `made`, where its log has no rounds: `retrain` made it."""

    @property
    def known(self) -> Made | TrainedAgain | None:
        """What it is made of; None where its log was not there."""
        return self.made if isinstance(self.again, msgspec.UnsetType) else self.again


class Audited(PredicatePart, frozen=True, kw_only=True):
    """What `audit` said of the whole log when the certificate was written."""

    package: str
    """Version of dora-pipe that audited."""
    clean: bool
    violations: int
    first: tuple[str, ...]
    """Some of them."""
    rounds: int
    """How many were read; what came later was not."""
    chain: str
    """Of the last of them (hex)."""
    records: int
    """Trajectories that were held against control."""


class Predicate(PredicatePart, frozen=True, kw_only=True):
    """Everything that a certificate says of its subjects."""

    made: Made
    lineage: tuple[Parent, ...]
    """The nearest first."""
    audit: Audited


def made_of(bus: Bus, topics: Topics, version: int) -> tuple[Made, Lineage | None]:
    """What a version is made of, and which run its own began with.

    Raises UsageError where the log does not have it, or has no rounds, InvariantBroken where rounds
    or the chain do not hold up to it, BusError.
    """
    books = _Books(version)
    for turn in _held_rounds(bus, topics):
        if books.apply(turn):
            break
    return books.made(topics.run)


def chain_at(bus: Bus, topics: Topics, round_: int) -> str:
    """The chain after a round (hex), recomputed up to it; empty where there is no such round.

    Raises InvariantBroken where the log does not hold up to it, BusError.
    """
    held = (turn.round for turn in _held_rounds(bus, topics) if turn.round is not None)
    return next((one.chain for one in held if one.ordinal == round_), "")


def _held_rounds(bus: Bus, topics: Topics) -> Iterator[FoldedRound]:
    """Rounds with their facts, for as long as each follows from the one before."""
    findings = Findings()
    for turn in folded_rounds(bus, topics, findings, buried=read_buried(bus, topics)):
        if findings.violations:
            raise InvariantBroken(findings.violations[0].line, hint="`dora-pipe audit` says all")
        yield turn


class _Books:
    """What is gathered on the way to a version."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._account = RunAccount()
        self._started = ""
        self._policy: Manifest | None = None
        self._control = -1
        self._at: FoldedRound | None = None
        self._steps: list[StepCommitted] = []
        self._by_version: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._by_source: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._roles: list[RoleStarted] = []
        self._workers: list[WorkerJoined] = []

    def apply(self, turn: FoldedRound) -> bool:
        """Book a round; whether it folds the commit that is wanted."""
        for fact in turn.facts:
            if isinstance(fact.record, AnyControl):
                self._fact(fact, fact.record)
        if turn.round is not None:
            self._account.round(turn.round, turn.offset)
            if self._policy is not None:
                self._at = turn
        return self._at is not None

    def _fact(self, fact: Fact, record: AnyControl) -> None:
        events = self._account.fact(fact.offset, record)
        if self._policy is not None:
            return  # Folded by the same round, behind the commit.
        if isinstance(record, RunStarted) and not self._started:
            self._started = sha256_hex(fact.value)
            if self._version == 0:
                self._policy, self._control = record.policy, fact.offset
        elif isinstance(record, RoleStarted):
            self._roles.append(record)
        elif isinstance(record, WorkerJoined):
            self._workers.append(record)
        for event in events:
            if isinstance(event, StepEnded):
                self._step(event)

    def _step(self, event: StepEnded) -> None:
        self._steps.append(event.fact)
        for group in event.groups:
            figures = _figures(group)
            self._by_version[group.spec.version] += figures
            self._by_source[group.spec.source] += figures
        if event.fact.step + 1 == self._version:
            self._policy, self._control = event.fact.policy, event.offset

    def made(self, run: str) -> tuple[Made, Lineage | None]:
        """What was gathered. Raises UsageError where the version was not met."""
        started = self._account.started
        if started is not None and started.retrained is not None:
            source = started.retrained.run
            raise UsageError(
                f"run {started.run} is steps of {source} that were trained again: its log has no "
                "rounds, so there is no chain to certify",
                hint=f"versions of {source} itself can be certified",
            )
        if self._policy is None or started is None:
            raise UsageError(
                f"run {run} has no version {self._version}",
                hint=f"its newest version is {len(self._steps) if started else -1}",
            )
        if self._at is None or self._at.round is None:
            raise UsageError(
                f"no round has folded the commit of version {self._version} yet",
                hint="the run goes on: the same command in a moment",
            )
        return Made(
            run=started.run,
            version=self._version,
            weights=CertifiedWeights(
                digest=self._policy.digest,
                bytes=self._policy.bytes,
                tensors=len(self._policy.tensors),
                dtype=self._policy.dtype,
            ),
            log=LogPlace(
                run_started=self._started,
                control=self._control,
                round=self._at.round.ordinal,
                decisions=self._at.offset,
                chain=self._at.round.chain,
            ),
            configuration=Configuration(
                digest=config_digest(started.config),
                seed=started.seed,
                settings=tuple(_settings(self._steps)),
            ),
            code=self._code(started),
            data=tuple(self._data(started)),
            base=Base(
                name=str(started.config["model"]["path"]).rstrip("/").rpartition("/")[2],
                digest=started.policy.digest,
                assets=started.assets_digest,
            ),
            trained=self._trained(started),
        ), started.lineage

    def _code(self, started: RunStarted) -> Code:
        roles, workers = self._roles, self._workers
        packages = {started.package}
        packages |= {one.package for one in roles} | {one.package for one in workers}
        samplers = {f"{name} {digest}" for one in roles for name, digest in one.samplers.items()}
        tasks = {f"{name} {said}" for one in workers for name, said in one.packages.items()}
        engines = {
            f"{one.engine} {one.engine_version} on {one.device} in {one.dtype}" for one in workers
        }
        numerics = {canonical(one.numerics): one.numerics for one in self._steps}
        return Code(
            packages=tuple(sorted(packages)),
            planner=started.planner,
            rewards=tuple(sorted({one.reward_digest for one in workers})),
            templates=tuple(sorted({one.template_digest for one in workers} - {""})),
            samplers=tuple(sorted(samplers)),
            tasks=tuple(sorted(tasks)),
            engines=tuple(sorted(engines)),
            numerics=tuple(numerics[key] for key in sorted(numerics)),
        )

    def _data(self, started: RunStarted) -> Iterator[DataUsed]:
        names = dict.fromkeys(("train", "eval"))
        if started.datasets:
            names = dict.fromkeys(sorted(started.datasets))
        for name in (*names, *sorted(self._by_source.keys() - names.keys())):
            data, figures = started.data(name), self._by_source[name]
            if data is not None and (data.rows or figures):
                yield DataUsed(
                    source=name, digest=data.digest, rows=data.rows, **figures_of(figures)
                )

    def _trained(self, started: RunStarted) -> Trained:
        digests = [one.digest_before for one in self._steps]
        mixed = bool(started.config.get("staleness", {}).get("interruptible"))
        total = Counter[str]()
        for figures in self._by_version.values():
            total += figures
        shares = (
            VersionShare(
                version=version,
                digest=digests[version],
                share=figures["tokens"] / total["tokens"] if total["tokens"] else 0.0,
                **figures_of(figures),
            )
            for version, figures in sorted(self._by_version.items())
        )
        return Trained(
            steps=len(self._steps),
            digest=steps_digest(self._steps),
            adopted=tuple(one.step for one in self._steps if one.adopted),
            versions=() if mixed else tuple(shares),
            mixed=mixed,
            **figures_of(total),
        )


def steps_digest(steps: Iterable[StepCommitted]) -> str:
    """sha256 (hex) over what each step was trained on, from which weights, to which."""
    return sha256_hex(
        *(
            canonical([one.step, one.batch_digest, one.digest_before, one.digest_after]) + b"\n"
            for one in steps
        )
    )


def figures_of(found: Counter[str]) -> dict[str, int]:
    """Groups, trajectories and tokens."""
    return {name: found[name] for name in ("groups", "trajectories", "tokens")}


def _figures(group: GroupHistory) -> Counter[str]:
    valid = [one for one in group.results if one.valid]
    tokens = sum(one.tokens for one in valid)
    return Counter(groups=1, trajectories=len(valid), tokens=tokens)


def _settings(steps: list[StepCommitted]) -> Iterator[SettingsFrom]:
    before: dict[str, Any] | None = None
    for one in steps:
        if one.settings != before:
            before = one.settings
            yield SettingsFrom(step=one.step, settings=before)


def differences(
    certified: msgspec.Struct, found: msgspec.Struct, where: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Leaves of two values of one shape that differ: dotted path, the one, the other."""
    pair = (msgspec.to_builtins(certified), msgspec.to_builtins(found))
    yield from _differing(*pair, where)


def _differing(one: Any, other: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (*one, *(key for key in other if key not in one)):
            yield from _differing(one.get(key), other.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{where} (how many)", len(one), len(other)
        for at, pair in enumerate(zip(one, other, strict=False)):
            yield from _differing(*pair, f"{where}[{at}]")
    elif one != other:
        yield where, one, other
