"""Certificates: what is in one stands in the log, and whatever is changed afterwards is named.

Method: the eventful run is certified once; then one thing at a time is another one: a byte of the
weights, a file, the certificate, its key, the configuration in the log, a record, a round.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.audit.certificate import made_of
from dora_pipe.audit.statement import Statement
from dora_pipe.catalogue.reading import FILE as TABLES
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.cli.certificate import parents_of
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.schemas.control import Lineage, RunStarted, config_digest
from dora_pipe.schemas.rounds import GENESIS_CHAIN, chain_of, decode_round, fold_bytes
from dora_pipe.schemas.wire import sha256_hex
from tests.support import damage
from tests.support.command_line import Call
from tests.support.recorded_run import RecordedRun
from tests.support.retrained import retrained
from tests.support.tamper import Tamper
from tests.support.user_run import call_here

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VERSION = 12
FILE = "it.intoto.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A certificate of the recorded run, its key, and the model that it is of."""

    place: Path
    run: RecordedRun

    @property
    def file(self) -> Path:
        return self.place / FILE

    @property
    def public(self) -> Path:
        return self.place / "key.pub"

    @property
    def model(self) -> Path:
        return self.place / "model"

    @property
    def statement(self) -> dict[str, Any]:
        envelope = json.loads(self.file.read_text())
        found: dict[str, Any] = json.loads(base64.b64decode(envelope["payload"]))
        return found

    def copy(self, place: Path) -> Certified:
        """The same elsewhere, to be changed."""
        shutil.copytree(self.place, place)
        return Certified(place=place, run=self.run)


def write_keys(place: Path) -> None:
    key, pem = Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    (place / "key.pem").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
    (place / "key.pub").write_bytes(key.public_key().public_bytes(pem, spki))


@pytest.fixture(scope="module")
def certified(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Certified:
    """Made once, of a copy: commands keep something beside a run."""
    place = tmp_path_factory.mktemp("certified") / "place"
    place.mkdir()
    run = recorded.copy(place.parent / "recorded")
    write_keys(place)
    before = run.log.read_bytes()
    words = ("--key", "key.pem", "--out", FILE, "--model", "model")
    code = call_here(place, "certificate", f"{run.directory}@{VERSION}", *words)
    assert code == 0, (place / "said").read_text()
    assert run.log.read_bytes() == before
    assert "PRIVATE" not in (place / "said").read_text()
    (place / "said").unlink()
    return Certified(place=place, run=run)


def verified(call: Call, one: Certified, *words: object) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, what was looked at, stderr."""
    code, out, err = call("certificate", "verify", one.file, "--json", *words)
    return code, json.loads(out)["checks"] if out else [], err


def wrong(checks: list[dict[str, Any]]) -> list[str]:
    return [f"{one['what']}: {one['words']}" for one in checks if one["holds"] is False]


def test_a_certificate_holds_against_key_model_and_run(certified: Certified, call: Call) -> None:
    words = ("--key", certified.public, "--model", certified.model)
    code, checks, err = verified(call, certified, *words, "--run", certified.run.directory)
    assert code == 0, err
    assert [(one["what"], one["holds"]) for one in checks] == [
        ("signature", True),
        ("statement", True),
        ("files", True),
        ("weights", True),
        ("log", True),
        ("audit", True),
    ]
    assert "NOT CHECKED" not in err


def test_it_is_an_in_toto_statement_over_every_file_and_the_weights(certified: Certified) -> None:
    said = certified.statement
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert said["predicateType"] == "urn:dora-pipe:certificate:v1"
    weights, *files = said["subject"]
    digest = said["predicate"]["made"]["weights"]["digest"]
    assert weights == {"name": f"recorded@{VERSION}", "digest": {"doraPipeWeights": digest}}
    there = {
        one.relative_to(certified.model).as_posix(): sha256_hex(one.read_bytes())
        for one in certified.model.rglob("*")
        if one.is_file()
    }
    assert {one["name"]: one["digest"]["sha256"] for one in files} == there
    assert "model.safetensors" in there


def test_what_trained_the_weights_is_what_the_tables_of_the_log_say(certified: Certified) -> None:
    made = certified.statement["predicate"]["made"]
    with (
        closing(certified.run.open()) as bus,
        closing(read_catalogue(bus, certified.run.topics)) as tables,
    ):
        shares = tables.query(
            """select g.version, v.digest, count(distinct g.group_id), count(t.reward),
                      sum(t.tokens)::bigint
               from groups g join trajectories t using (group_id)
                    join versions v on v.version = g.version
               where fate = 'trained' and step < ? and t.reward is not null
               group by all order by 1""",
            [VERSION],
        )
        published = dict(tables.query("select version, digest from versions"))
        (step,) = tables.query("select control_offset from steps where step = ?", [VERSION - 1])
        (run,) = tables.records("select * from runs")
    trained = made["trained"]
    names = ("version", "digest", "groups", "trajectories", "tokens")
    assert [tuple(one[name] for name in names) for one in trained["versions"]] == shares
    assert trained["steps"] == VERSION
    assert trained["groups"] == sum(one[2] for one in shares) == 4 * VERSION
    assert trained["tokens"] == sum(one[4] for one in shares)
    assert sum(one["share"] for one in trained["versions"]) == pytest.approx(1.0)
    assert made["weights"]["digest"] == published[VERSION]
    assert made["base"]["digest"] == published[0]
    assert made["log"]["control"] == step[0]
    assert made["configuration"]["digest"] == run["config_digest"]
    rates = [one["settings"]["trainer.learning_rate"] for one in made["configuration"]["settings"]]
    assert len(rates) == 2, "a command changed it in the middle"
    data = {one["source"]: one for one in made["data"]}
    assert data["train"]["digest"] == run["dataset_digest"]
    assert data["train"]["tokens"] == trained["tokens"]
    assert (data["eval"]["rows"], data["eval"]["groups"]) == (run["eval_rows"], 0)


def test_the_chain_is_that_of_the_first_round_that_folds_the_commit(certified: Certified) -> None:
    place = certified.statement["predicate"]["made"]["log"]
    with Tamper(certified.run) as log:
        control = [(row.offset, row.value) for row in log.rows("control")]
        rounds = [(row.offset, decode_round(row.value)) for row in log.rows("decisions")]
    chain, start = GENESIS_CHAIN, 0
    for at, one in rounds:
        offset = at
        folded = [value for value in control if start <= value[0] < one.control_next]
        chain = chain_of(chain, b"".join(fold_bytes(*value) for value in folded), one)
        start = one.control_next
        if start > place["control"]:
            break
    assert (place["chain"], place["round"], place["decisions"]) == (chain, one.ordinal, offset)
    assert place["runStarted"] == sha256_hex(control[0][1])


def test_a_statement_is_read_as_it_was_written(certified: Certified) -> None:
    plain = certified.statement
    found = msgspec.convert(plain, Statement)
    assert json.loads(msgspec.json.encode(found)) == plain
    assert found.predicate.audit.clean


def flip(path: Path) -> None:
    damage.flip_last_byte(path)


def another_config(one: Certified) -> None:
    path = one.model / "config.json"
    path.write_text(path.read_text() + "\n")


CHANGES: dict[str, tuple[Callable[[Certified], Any], list[str]]] = {
    "a byte of the weights": (
        lambda one: flip(one.model / "model.safetensors"),
        ["files: model.safetensors: certified ", "weights: certified digest "],
    ),
    "a file": (another_config, ["files: config.json: certified "]),
    "a file more": (
        lambda one: (one.model / "modeling.py").write_text(""),
        ["files: modeling.py: is not certified"],
    ),
    "a file less": (
        lambda one: (one.model / "README.md").unlink(),
        ["files: README.md: is not there"],
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_in_the_model_is_named(
    certified: Certified, call: Call, tmp_path: Path, what: str
) -> None:
    change, named = CHANGES[what]
    one = certified.copy(tmp_path / "changed")
    change(one)
    code, checks, err = verified(call, one, "--key", one.public, "--model", one.model)
    assert code == 5
    found = wrong(checks)
    assert len(found) == len(named), found
    assert all(line.startswith(begins) for line, begins in zip(found, named, strict=True)), found
    assert err.startswith(f"error: {one.file}: {named[0]}")


def resigned(one: Certified, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the statement and leave the signature."""
    envelope, said = json.loads(one.file.read_text()), one.statement
    change(said)
    envelope["payload"] = base64.b64encode(json.dumps(said).encode()).decode()
    one.file.write_text(json.dumps(envelope))


def test_a_changed_certificate_another_key_and_none_are_named(
    certified: Certified, call: Call, tmp_path: Path
) -> None:
    one = certified.copy(tmp_path / "changed")
    resigned(one, lambda said: said["predicate"]["made"]["trained"].update(tokens=1))
    code, checks, _ = verified(call, one, "--key", one.public)
    assert code == 5
    assert wrong(checks)[0].startswith("signature: not by ed25519, key ")
    code, checks, _ = verified(call, one, "--run", one.run.directory)
    assert code == 5
    assert [line.partition(", the log has")[0] for line in wrong(checks)] == [
        "log: trained.tokens: certified 1"
    ]
    write_keys(one.place)
    shutil.copy(certified.file, one.file)
    code, checks, _ = verified(call, one, "--key", one.public)
    assert code == 5
    assert "it says: " in wrong(checks)[0]


def test_subjects_that_are_not_the_version_of_the_predicate_are_named(
    certified: Certified, call: Call, tmp_path: Path
) -> None:
    one = certified.copy(tmp_path / "changed")
    resigned(one, lambda said: said["subject"][0]["digest"].update(doraPipeWeights="ab"))
    code, checks, _ = verified(call, one, "--model", one.model)
    assert code == 5
    assert wrong(checks)[0].startswith("statement: the weights among its subjects are ab")


def forged_config(log: Tamper) -> list[str]:
    """A learning rate in `run started`, with its digest and the chain made to fit."""
    ((row, fact),) = log.facts(RunStarted)
    trainer = {**fact.config["trainer"], "learning_rate": 0.5}
    config = {**fact.config, "trainer": trainer}
    digest = config_digest(config)
    log.rewrite(row, msgspec.structs.replace(fact, config=config, config_digest=digest))
    log.mend()
    return ["log: log.runStarted: ", "log: log.chain: ", "log: configuration.digest: "]


def forged_reward(log: Tamper) -> list[str]:
    name = damage.change_reward(log)
    log.mend()
    return ["log: log.chain: ", f"audit: records {name}"]


def forged_token(log: Tamper) -> list[str]:
    return [f"audit: records {damage.change_token_and_record(log)}"]


def broken_round(log: Tamper) -> list[str]:
    damage.change_round(log)
    return ["log: rounds ", "audit: round "]


@pytest.mark.parametrize("forge", [forged_config, forged_reward, forged_token, broken_round])
def test_what_is_changed_in_the_log_is_named(
    certified: Certified, call: Call, tmp_path: Path, forge: Callable[[Tamper], list[str]]
) -> None:
    run = certified.run.copy(tmp_path / "run")
    with Tamper(run) as log:
        named = forge(log)
    code, checks, _ = verified(call, certified, "--key", certified.public, "--run", run.directory)
    assert code == 5
    found = wrong(checks)
    for begins in named:
        assert any(line.startswith(begins) for line in found), (begins, found)


def test_what_was_remembered_of_a_run_hides_nothing(
    certified: Certified, call: Call, tmp_path: Path
) -> None:
    run = certified.run.copy(tmp_path / "run")
    assert call("audit", run.directory)[0] == 0
    with closing(run.open()) as bus:
        read_catalogue(bus, run.topics, run.directory / TABLES).close()
    assert (run.directory / TABLES).exists()
    with Tamper(run) as log:
        name = damage.change_token_and_record(log)
    code, checks, _ = verified(call, certified, "--run", run.directory)
    assert code == 5
    assert any(name in line for line in wrong(checks))


def test_a_run_that_does_not_hold_is_certified_as_that(
    copy: RecordedRun, call: Call, tmp_path: Path
) -> None:
    with Tamper(copy) as log:
        name = damage.change_token_and_record(log)
    file = tmp_path / "bad.json"
    code, out, err = call("certificate", f"{copy.directory}@3", "--out", file)
    assert code == 5
    assert "audit          NOT CLEAN" in out
    assert f"{file} says that the run does not hold: " in err
    said = json.loads(file.read_text())["predicate"]["audit"]
    assert (said["clean"], said["violations"]) == (False, len(said["first"]))
    assert any(name in line for line in said["first"])
    code, out, err = call("certificate", "verify", file, "--model", tmp_path)
    assert code == 5
    assert "it did not hold when it was certified" in out


def test_an_unsigned_statement_is_called_that(
    copy: RecordedRun, call: Call, tmp_path: Path
) -> None:
    file = tmp_path / "bare.json"
    code, out, err = call("certificate", f"{copy.directory}@0", "--out", file)
    assert code == 0, err
    assert f"certificate    {file}, UNSIGNED" in out
    assert "UNSIGNED: anybody could have written" in err
    made = json.loads(file.read_text())["predicate"]["made"]
    assert (made["version"], made["trained"]["steps"], made["log"]["control"]) == (0, 0, 0)
    assert sorted(one.name for one in tmp_path.glob(".*")) == [], "nothing else is left"


def test_a_bare_statement_holds_against_files_and_against_no_key(
    certified: Certified, call: Call, tmp_path: Path
) -> None:
    file = tmp_path / "bare.json"
    file.write_text(json.dumps(certified.statement))
    code, out, err = call("certificate", "verify", file, "--model", certified.model)
    assert code == 0, err
    assert "signature  NOT CHECKED    UNSIGNED" in out
    assert "the signature was NOT CHECKED: UNSIGNED" in err
    code, out, _ = call("certificate", "verify", file, "--key", certified.public)
    assert code == 5
    assert "signature  DOES NOT HOLD  UNSIGNED" in out


def with_parent(child: RecordedRun, digest: str, run: str = "recorded", at: int = VERSION) -> None:
    with Tamper(child) as log:
        ((row, fact),) = log.facts(RunStarted)
        lineage = Lineage(run=run, step=at, digest=digest)
        log.rewrite(row, msgspec.structs.replace(fact, lineage=lineage))
        log.mend()


def test_a_run_that_came_from_another_has_that_ones_log_in_its_certificate(
    certified: Certified, copy: RecordedRun, call: Call, tmp_path: Path
) -> None:
    parent = certified.statement["predicate"]["made"]
    with_parent(copy, parent["weights"]["digest"])
    file, runs = tmp_path / "child.json", certified.run.directory.parent
    code, _, err = call("certificate", f"{copy.directory}@3", "--out", file, "--runs", runs)
    assert code == 0, err
    (above,) = json.loads(file.read_text())["predicate"]["lineage"]
    assert above["made"] == parent
    code, out, _ = call("certificate", "verify", file, "--run", copy.directory, "--runs", runs)
    assert code == 0
    assert f"recorded@{VERSION}: chain {parent['log']['chain']}" in out


def test_a_run_that_came_from_a_retrained_one_has_its_steps_and_the_log_of_its_source(
    recorded: RecordedRun, copy: RecordedRun, call: Call, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    recorded.copy(runs / "recorded")
    steps = retrained(runs, "again", first=5, last=6, overrides=("trainer.learning_rate=0.5",))
    with_parent(copy, steps[-1].digest_after, "again", 7)
    file = tmp_path / "child.json"
    code, _, err = call("certificate", f"{copy.directory}@3", "--out", file, "--runs", runs)
    assert code == 0, err
    assert "is not here" not in err
    again, source = json.loads(file.read_text())["predicate"]["lineage"]
    assert (again["run"], again["version"], again["made"]) == ("again", 7, None)
    said = again["again"]
    assert (said["source"], said["first"], said["steps"]) == ("recorded", 5, 2)
    assert said["settings"] == {"trainer.learning_rate": 0.5}
    assert (source["run"], source["version"], source["made"]["version"]) == ("recorded", 5, 5)
    verify = ("certificate", "verify", file, "--run", copy.directory, "--runs", runs)
    code, out, _ = call(*verify)
    assert code == 0, out
    assert "again@7: steps 5 to 6 of recorded, trained again" in out
    shutil.rmtree(runs / "again")
    code, out, _ = call(*verify)
    assert code == 0, out
    assert "again@7: its log is not here" in out
    retrained(runs, "again", first=5, last=6)
    code, out, _ = call(*verify)
    assert code == 5
    assert "version 7 of again has the weights" in out


def test_a_version_that_a_run_here_does_not_have_is_not_taken_for_a_log_that_is_elsewhere(
    certified: Certified,
) -> None:
    lineage = Lineage(run="recorded", step=99, digest="ab" * 32)
    with pytest.raises(UsageError, match="no version 99"):
        parents_of(lineage, certified.run.directory.parent)


def test_a_parent_whose_log_is_not_here_is_only_named(tmp_path: Path) -> None:
    lineage = Lineage(run="recorded", step=VERSION, digest="ab" * 32)
    (found,) = parents_of(lineage, tmp_path)
    assert (found.run, found.version, found.digest) == ("recorded", VERSION, "ab" * 32)
    assert found.made is None


def test_a_parent_of_other_weights_is_no_parent(certified: Certified) -> None:
    lineage = Lineage(run="recorded", step=VERSION, digest="ab" * 32)
    with pytest.raises(InvariantBroken, match=f"version {VERSION} of recorded has the weights"):
        parents_of(lineage, certified.run.directory.parent)


def test_a_bundle_needs_the_package_that_can_read_it(
    certified: Certified, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sigstore", None)
    one = certified.copy(tmp_path / "bundle")
    media = "application/vnd.dev.sigstore.bundle.v0.3+json"
    envelope = json.loads(one.file.read_text())
    one.file.write_text(json.dumps({"mediaType": media, "dsseEnvelope": envelope}))
    who = ("--identity", "me@example.com", "--issuer", "https://example.com")
    code, _, err = verified(call, one, *who)
    assert code == 2
    assert "it is a sigstore bundle, and the package sigstore is not installed" in err
    code, checks, _ = verified(call, one, "--key", one.public)
    assert (code, checks[0]["holds"]) == (0, True), "a key has signed it"


def test_a_bundle_of_sigstore_is_verified_with_nothing_but_a_trusted_root(
    certified: Certified, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sigstore")
    from tests.support.sigstore_bundle import Sigstore

    monkeypatch.setattr(socket, "getaddrinfo", _unreachable)
    sigstore, root, file = Sigstore(), tmp_path / "root.json", tmp_path / "bundle.json"
    issuer = "https://issuer.example.com"
    payload = json.dumps(certified.statement).encode()
    root.write_text(sigstore.trusted_root)
    file.write_text(sigstore.bundle(payload, "me@example.com", issuer))

    def found(*words: object) -> tuple[int, str, str]:
        return call("certificate", "verify", file, *words)

    who = ("--identity", "me@example.com", "--issuer", issuer)
    code, out, err = found(*who, "--trusted-root", root, "--model", certified.model)
    assert code == 0, err
    assert "signature  holds          sigstore, me@example.com" in out
    other = ("--identity", "you@example.com", "--issuer", issuer, "--trusted-root", root)
    code, out, _ = found(*other)
    assert code == 5
    assert "signature  DOES NOT HOLD  sigstore: Certificate's SANs do not match" in out
    assert found("--identity", "me@example.com")[0] == 2, "who says so?"
    assert found(*who, "--trusted-root", certified.public)[0] == 2
    root.write_text(Sigstore().trusted_root)
    assert found(*who, "--trusted-root", root)[0] == 5, "another authority"
    root.write_text(sigstore.trusted_root)
    plain = json.loads(file.read_text())
    forged = base64.b64encode(payload.replace(b'"recorded"', b'"forged"')).decode()
    file.write_text(
        json.dumps({**plain, "dsseEnvelope": {**plain["dsseEnvelope"], "payload": forged}})
    )
    assert found(*who, "--trusted-root", root)[0] == 5


def _unreachable(*_: object) -> None:
    raise AssertionError("somebody asks the network")


@pytest.mark.parametrize(
    ("words", "code", "says", "hint"),
    [
        (["recorded"], 2, "not RUN@STEP: 'recorded'", "demo@20"),
        (["{run}@99"], 2, "has no version 99", "its newest version is 14"),
        (["{run}@best"], 2, "has no best version", "evaluation.best"),
        (["{run}@3", "--key", "none.pem"], 2, "the key none.pem: No such file", "openssl genpkey"),
        (["{run}@3", "--out", "{file}"], 2, "is there already", "--force"),
        (["verify", "{file}"], 2, "there is nothing to hold it against", "--key PUB"),
        (["verify", "none.json", "--key", "{key}"], 2, "none.json: No such file", ""),
        (["verify", "{key}", "--key", "{key}"], 2, "key.pub is not JSON", "certificate RUN@STEP"),
        (["verify", "{slsa}", "--key", "{key}"], 2, "a statement of another kind", "urn:dora"),
        (["verify", "{other}", "--key", "{key}"], 2, "has no DSSE envelope", "RUN@STEP"),
        (["verify", "{file}", "--key", "{file}"], 2, "is no public key in PEM", "-pubout"),
        (["verify", "{file}", "--model", "{run}/none"], 2, "no model directory", ""),
    ],
)
def test_what_cannot_be_done_is_one_line_with_a_hint(
    certified: Certified,
    call: Call,
    tmp_path: Path,
    words: list[str],
    code: int,
    says: str,
    hint: str,
) -> None:
    slsa = {"_type": "https://in-toto.io/Statement/v1", "predicateType": "https://slsa.dev/x"}
    (tmp_path / "slsa.json").write_text(json.dumps(slsa))
    (tmp_path / "other.json").write_text('{"payload": "%%%", "payloadType": "", "signatures": []}')
    places = {
        "run": certified.run.directory,
        "file": certified.file,
        "key": certified.public,
        "slsa": tmp_path / "slsa.json",
        "other": tmp_path / "other.json",
    }
    found, _, err = call("certificate", *(one.format_map(places) for one in words))
    assert found == code
    first, *rest = [one for one in err.splitlines() if not one.startswith("the signature was")]
    assert says in first
    assert hint in "".join(rest)


def test_the_log_of_a_broken_chain_makes_nothing(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        damage.change_round(log)
    with closing(copy.open()) as bus, pytest.raises(InvariantBroken, match="chain is broken"):
        made_of(bus, copy.topics, 14)


def test_a_commit_that_no_round_has_folded_yet_makes_nothing(copy: RecordedRun) -> None:
    with closing(copy.open()) as bus:
        made, _ = made_of(bus, copy.topics, 14)
    with Tamper(copy) as log:
        for row in log.rows("decisions"):
            if row.offset >= made.log.decisions:
                log.remove(row)
    with closing(copy.open()) as bus, pytest.raises(UsageError, match="no round has folded"):
        made_of(bus, copy.topics, 14)


@pytest.mark.slow
def test_a_certificate_is_the_same_whose_command_was_killed_before(
    certified: Certified, copy: RecordedRun, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    shutil.copytree(certified.place, place, ignore=shutil.ignore_patterns("model", FILE))
    words = ["certificate", f"{copy.directory}@{VERSION}", "--key", "key.pem", "--out", FILE]
    program = [str(Path(sys.executable).parent / "dora-pipe"), *words]
    killed = subprocess.Popen(program, cwd=place, stderr=subprocess.DEVNULL)
    index, give_up_s = place / f".{FILE}.audit", time.monotonic() + 60.0
    while not index.exists():
        assert time.monotonic() < give_up_s, "it never began"
        time.sleep(0.001)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (place / FILE).exists()
    assert subprocess.run(program, cwd=place, check=False).returncode == 0
    assert (place / FILE).read_bytes() == certified.file.read_bytes()
    assert [one.name for one in place.glob(".*")] == []
