"""Which services `up` means, which it refuses to mix, and what counts as an answer."""

from __future__ import annotations

import http.server
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.bus.kafka import client as kafka_client
from dora_pipe.cli import up as under_test
from dora_pipe.cli.up import (
    BROKERS,
    PROFILES,
    Page,
    answers,
    compose_file,
    compose_words,
    pages_of,
    profiles_of,
    refuse_clash,
    silent_of,
    version_of,
)
from dora_pipe.core.errors import UsageError
from tests.support.tidy import ROOT
from tests.support.worker import VirtualClock

OPTIONS = list(itertools.product((False, True), repeat=4))


@pytest.mark.parametrize(("cluster", "demo", "observe", "kafka_ui"), OPTIONS)
def test_options_pick_one_kind_of_broker_and_what_they_name(
    cluster: bool, demo: bool, observe: bool, kafka_ui: bool
) -> None:
    found = profiles_of(cluster=cluster, demo=demo, observe=observe, kafka_ui=kafka_ui)
    assert ("cluster" in found, "single" in found) == (cluster, not cluster)
    assert ("demo" in found, "observe" in found, "kafka-ui" in found) == (demo, observe, kafka_ui)
    assert sorted(found, key=PROFILES.index) == list(found)
    assert {page.profile for page in pages_of(found)} == set(found) - {"demo"}


def test_words_are_those_that_anybody_may_type() -> None:
    words = compose_words(Path("compose.yaml"), ("single", "observe"))
    assert " ".join(words) == (
        "docker compose --file compose.yaml --profile single --profile observe"
    )


@pytest.mark.parametrize("profile", sorted(BROKERS))
def test_broker_and_cluster_are_not_up_together(profile: str) -> None:
    (other,) = BROKERS.keys() - {profile}
    refuse_clash([profile, "observe"], [*BROKERS[profile], "grafana"])
    with pytest.raises(UsageError, match=f"of profile {other} is up") as refused:
        refuse_clash([profile, "observe"], [BROKERS[other][0], "grafana"])
    assert refused.value.hint is not None and "dora-pipe down" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.23.1\n", (2, 23, 1)),
        ("v2.39.1-desktop.1", (2, 39, 1)),
        ("Docker Compose version v5.2.0", (5, 2, 0)),
        ("dev", ()),
        ("", ()),
    ],
)
def test_version_is_found_in_what_compose_says(text: str, version: tuple[int, ...]) -> None:
    assert version_of(text) == version


def test_compose_file_is_that_of_the_checkout_from_wherever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compose.yaml").write_text("services: {}\n")  # a user's own
    assert compose_file() == ROOT / "compose.yaml"
    monkeypatch.setattr(under_test, "PACKAGE", str(tmp_path / "dora_pipe/__init__.py"))
    with pytest.raises(UsageError, match=r"no compose\.yaml of dora-pipe"):
        compose_file()
    monkeypatch.chdir(ROOT)
    assert compose_file() == ROOT / "compose.yaml"


@pytest.fixture
def served() -> Iterator[str]:
    """A server that has no page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(405)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_refusal_is_an_answer_and_a_closed_port_is_none(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(kafka_client, "CONNECT_LIMIT_S", 0.5)
    assert answers(Page(what="", where=served, profile="observe"))
    assert not answers(Page(what="", where="http://127.0.0.1:9/", profile="observe"))
    assert not answers(Page(what="", where="kafka://127.0.0.1:9", profile="single"))


def test_pages_are_waited_for_within_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [Page(what=name, where=name, profile="observe") for name in ("now", "soon", "never")]
    clock, asked = VirtualClock(), list[str]()

    def later(page: Page) -> bool:
        asked.append(page.where)
        return page.where == "now" or (page.where == "soon" and clock.ns >= 3e9)

    monkeypatch.setattr(under_test, "answers", later)
    assert [page.where for page in silent_of(pages, clock)] == ["never"]
    assert under_test.PAGES_LIMIT_S <= clock.ns / 1e9 < under_test.PAGES_LIMIT_S + 2
    assert asked.count("now") == 1
    assert silent_of(pages[:2], clock) == []
