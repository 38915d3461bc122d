"""From the configuration to transfers, and from statuses to the peers that have weights."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.config.outside import Transfers as Section
from dora_pipe.core.errors import BusError, ConfigError, PolicyError
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.metrics import Cost, TrainerStatus, WorkerStatus
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.wire import encode
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.open import TOKEN_VARIABLE, need_transfers, open_transfers
from dora_pipe.store.transfers.peers import PEERS_MAX, TAIL_RECORDS, PeerFinder, PeerWeights
from dora_pipe.store.transfers.transfers import GONE, NO_ROOM, UNREACHABLE, Lost, weights_url
from tests.support.stores import Writer, publish_walk
from tests.support.transfers import served
from tests.support.worker import TOPICS, VirtualClock

SECRET = "s3cret-of-this-run"
COST = Cost(total_s=0, bus_s=0, control_s=0, codec_s=0, rss_bytes=0)
DIGEST, OTHER = "d" * 64, "e" * 64
NAME = f"weights/{DIGEST}.safetensors"


def no_bus() -> Bus:
    raise BusError("no log")


def opened(tmp_path: Path, **keys: Any) -> MappedFiles:
    return open_transfers(
        Section(**keys),
        tmp_path / "handover",
        topics=TOPICS,
        open_bus=no_bus,
        stored=lambda name: tmp_path / name,
        clock=VirtualClock(),
    )


# Configuration


def test_files_are_the_default_and_ask_nobody(tmp_path: Path) -> None:
    files = opened(tmp_path)
    assert type(files) is MappedFiles and files.peers is None


def test_none_keeps_nothing(tmp_path: Path) -> None:
    none = opened(tmp_path, kind="none")
    assert none.offer([memoryview(b"x")]) == Lost(NO_ROOM)
    assert none.fetch(Blob(sha256="a" * 64, bytes=1), timeout_s=1.0) == Lost(GONE)
    assert none.address == ""


def test_token_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    entry, other = (opened(tmp_path / name, kind="flight", host="127.0.0.1") for name in "ab")
    try:
        blob = entry.offer([memoryview(b"x")])
        assert not isinstance(blob, Lost)
        assert not isinstance(other.fetch(blob, timeout_s=20.0), Lost)
    finally:
        entry.close()
        other.close()
    assert SECRET not in caplog.text


def test_a_short_token_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match="fewer than 16") as error:
        need_transfers(Section(kind="flight"))
    assert "short" not in str(error.value)


def test_missing_token_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError) as error:
        need_transfers(Section(kind="flight"))
    assert TOKEN_VARIABLE in (error.value.hint or "")
    need_transfers(Section())


def test_address_of_another_machine_cannot_be_listened_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    with pytest.raises(ConfigError, match="cannot listen on"):
        opened(tmp_path, kind="flight", host="192.0.2.1")


def test_host_that_is_not_given_is_reached_by_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    transfers = opened(tmp_path, kind="flight")
    try:
        assert transfers.address.startswith("grpc://127.0.0.1:")
        number = int(transfers.address.rpartition(":")[2])
        rows = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        ]
        hosts = {
            row[1][:-5] for row in rows if row[1].endswith(f":{number:04X}") and row[3] == "0A"
        }
        assert hosts and all(host.endswith("0100007F") for host in hosts)
    finally:
        transfers.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-subj", "/CN=tiny", "-days", "2")
    files = ("-keyout", "key.pem", "-out", "cert.pem")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, *files]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=60)
    both = folder / "both.pem"
    both.write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return str(both), str(folder / "cert.pem")


def test_with_certificates_the_wire_is_encrypted_and_peers_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: tuple[str, str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    identity, ca = certificate
    keys = {"kind": "flight", "host": "127.0.0.1", "cert_file": identity}
    source = opened(tmp_path / "a", **keys)
    trusting = opened(tmp_path / "b", **keys, ca_file=ca)
    doubting = opened(tmp_path / "c", **keys)
    try:
        blob = source.offer([memoryview(b"x" * 1000)])
        assert not isinstance(blob, Lost)
        assert blob.peer == source.address and blob.peer.startswith("grpc+tls://127.0.0.1:")
        assert doubting.fetch(blob, timeout_s=5.0) == Lost(UNREACHABLE)
        assert not isinstance(trusting.fetch(blob, timeout_s=20.0), Lost)
        plain = msgspec.structs.replace(blob, peer=blob.peer.replace("+tls", ""))
        assert isinstance(doubting.fetch(plain, timeout_s=5.0), Lost)
    finally:
        for entry in (source, trusting, doubting):
            entry.close()


def test_certificate_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    for name in ("cert_file", "ca_file"):
        with pytest.raises(ConfigError, match=f"transfers.{name}: nowhere.pem"):
            section = msgspec.structs.replace(Section(kind="flight"), **{name: "nowhere.pem"})
            need_transfers(section)


# Peers


class Log:
    def __init__(self) -> None:
        self.log = MemoryLog()
        self.bus = self.open()
        self.bus.create([TopicSpec(name=TOPICS.metrics, partitions=2)])
        self.said = 0

    def open(self) -> Bus:
        return MemoryBus(self.log, now_ms=lambda: 0)

    def say(self, weights_at: str, *, trainer: bool = False) -> None:
        common: dict[str, Any] = {"at_ns": 1, "cost": COST, "weights_at": weights_at}
        status: msgspec.Struct
        if trainer:
            status = TrainerStatus(
                incarnation=1, step=1, phase="idle", cached_records=0, cached_bytes=0, **common
            )
        else:
            status = WorkerStatus(
                worker="w",
                incarnation=1,
                version=1,
                active=0,
                waiting=0,
                kv_used_tokens=0,
                tokens_total=0,
                progress={},
                **common,
            )
        self.put(encode(status))

    def put(self, value: bytes) -> None:
        self.said += 1
        append = Append(topic=TOPICS.metrics, partition=self.said % 2, value=value)
        self.bus.writer().append([append])

    def book(self, own: str = "grpc://me:1") -> PeerFinder:
        return PeerFinder(self.open, TOPICS, own=own)


def test_peers_are_those_whose_last_status_has_the_weights() -> None:
    log = Log()
    log.say(weights_url("grpc://a:1", OTHER))
    log.say(weights_url("grpc://a:1", OTHER))
    log.say(weights_url("grpc://a:1", DIGEST))
    log.say(weights_url("grpc://a:1", DIGEST))
    log.say(weights_url("grpc://b:1", DIGEST))
    log.say(weights_url("grpc://b:1", DIGEST))
    log.say(weights_url("grpc://b:1", OTHER))
    log.say(weights_url("grpc://b:1", OTHER))
    log.say(weights_url("grpc://t:1", DIGEST), trainer=True)
    log.say(weights_url("grpc://me:1", DIGEST))
    log.say("")
    log.put(b'{"kind":"worker-status","weights_at":"grpc://c:1"')
    log.put(b'{"kind":"later-status","weights_at":"grpc://c:1"}')
    assert set(log.book().having(NAME)) == {"grpc://a:1", "grpc://t:1"}


def test_every_process_begins_with_a_peer_of_its_own_choice() -> None:
    log = Log()
    for number in range(6):
        log.say(weights_url(f"grpc://p{number}:1", DIGEST))
    orders = [log.book(f"grpc://me{number}:1").having(NAME) for number in range(12)]
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(orders[0]))}
    assert len({order[0] for order in orders}) > 2
    assert log.book("grpc://me3:1").having(NAME) == orders[3]


def test_only_the_end_of_the_topic_is_read() -> None:
    log = Log()
    log.say(weights_url("grpc://old:1", DIGEST))
    log.say("")
    for _ in range(2 * TAIL_RECORDS + 2):
        log.put(b"{}")
    assert log.book().having(NAME) == []


def test_without_a_log_there_are_no_peers() -> None:
    assert PeerFinder(no_bus, TOPICS, own="").having(NAME) == []


def test_process_that_serves_nothing_has_no_url() -> None:
    assert weights_url("", DIGEST) == weights_url("grpc://a:1", "") == ""


# Weights


class CountedFiles:
    where = "elsewhere"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reads = 0

    def get(self, name: str, target: Path) -> bool:
        self.reads += 1
        target.write_bytes((self.root / name).read_bytes())
        return True

    def put(self, source: Path, name: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.read_bytes())

    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not asked for")


def peers_of(*addresses: str) -> Callable[[str], list[str]]:
    return lambda name: list(addresses)


def test_weights_come_from_a_peer_and_the_store_is_not_read(tmp_path: Path) -> None:
    remote = CountedFiles(tmp_path / "remote")
    trainer = PolicyStore(tmp_path / "t" / "policies", remote)
    manifest = trainer.publish_weights(Writer(1.5))
    with served(tmp_path / "t") as source, served(tmp_path / "w") as target:
        peers = PeerWeights(target.copy, peers_of(source.address))
        store = PolicyStore(tmp_path / "w" / "policies", remote, peers=peers)
        assert (
            store.weights(manifest.digest).read_bytes()
            == trainer.weights_path(manifest.digest).read_bytes()
        )
        with served(tmp_path / "v") as third:  # who has them serves them
            peers = PeerWeights(third.copy, peers_of(target.address))
            other = PolicyStore(tmp_path / "v" / "policies", remote, peers=peers)
            assert other.verify(manifest.digest) == manifest
    assert remote.reads == 0


def test_a_delta_comes_from_a_peer_too_and_is_as_good_as_the_whole(tmp_path: Path) -> None:
    remote = CountedFiles(tmp_path / "remote")
    trainer = PolicyStore(tmp_path / "t" / "policies", remote)
    first, second = publish_walk(trainer, 2, full_every=8)
    worker = PolicyStore(tmp_path / "w" / "policies", remote)
    worker.weights(first.manifest.digest)
    with served(tmp_path / "t") as source, served(tmp_path / "w") as target:
        peers = PeerWeights(target.copy, peers_of(source.address))
        store = PolicyStore(tmp_path / "w" / "policies", remote, peers=peers, with_deltas=True)
        assert store.verify(second.manifest.digest) == second.manifest
    assert remote.reads == 1


@pytest.mark.parametrize("case", ["nobody", "gone", "dead", "other weights", "no weights", "torn"])
def test_store_is_read_where_peers_do_not_help(case: str, tmp_path: Path) -> None:
    remote = CountedFiles(tmp_path / "remote")
    trainer = PolicyStore(tmp_path / "t" / "policies", remote)
    manifest = trainer.publish_weights(Writer(1.5))
    path = trainer.weights_path(manifest.digest)
    with served(tmp_path / "t") as source, served(tmp_path / "w") as target:
        address = source.address
        if case == "gone":
            path.unlink()
        elif case == "other weights":
            path.write_bytes(
                trainer.weights_path(trainer.publish_weights(Writer(2)).digest).read_bytes()
            )
        elif case == "no weights":
            path.write_bytes(b"no weights at all")
        elif case == "torn":
            path.write_bytes(path.read_bytes()[:-1])
        elif case == "dead":
            source.close()
        peers = PeerWeights(target.copy, peers_of(*([] if case == "nobody" else [address])))
        store = PolicyStore(tmp_path / "w" / "policies", remote, peers=peers)
        assert store.verify(manifest.digest) == manifest
    assert remote.reads == 1


def test_peer_cannot_give_weights_that_the_store_lacks_under_a_wrong_name(tmp_path: Path) -> None:
    remote = CountedFiles(tmp_path / "remote")
    trainer = PolicyStore(tmp_path / "t" / "policies", remote)
    manifest = trainer.publish_weights(Writer(1.5))
    (tmp_path / "remote" / f"weights/{manifest.digest}.safetensors").write_bytes(b"damaged")
    trainer.weights_path(manifest.digest).write_bytes(b"damaged too")
    with served(tmp_path / "t") as source, served(tmp_path / "w") as target:
        peers = PeerWeights(target.copy, peers_of(source.address))
        store = PolicyStore(tmp_path / "w" / "policies", remote, peers=peers)
        with pytest.raises(PolicyError):
            store.weights(manifest.digest)
    assert not store.weights_path(manifest.digest).exists()


def test_so_many_peers_are_asked_and_for_weights_only(tmp_path: Path) -> None:
    asked: list[str] = []

    def dead(peer: str, name: str, target: Any) -> Lost | None:
        asked.append(peer)
        return Lost(UNREACHABLE if len(asked) % 2 else GONE)

    addresses = [f"grpc://p{number}:1" for number in range(PEERS_MAX + 3)]
    peers = PeerWeights(dead, peers_of(*addresses))
    assert peers(NAME, tmp_path / "x") is False
    assert asked == addresses[:PEERS_MAX]
    assert peers("optimizer/" + DIGEST, tmp_path / "x") is False
    assert len(asked) == PEERS_MAX
