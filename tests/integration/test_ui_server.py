"""The server of the pages: who is answered, what is forbidden, and that nothing can be changed."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from dora_pipe.cli.pages import RunsPages
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.core.system.http_server import PageServer
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.server import CONNECTIONS_MAX, page_server
from dora_pipe.observe.web.view import parse_query
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.ui_stage import read_all, source_of

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def server(recorded: RecordedRun) -> Iterator[PageServer]:
    worker = QueryWorker(lambda: source_of(recorded))
    read_all(worker)
    with closing(worker), page_server(worker, port=0) as served:
        yield served


def port_of(server: PageServer) -> int:
    return int(server.origin.rpartition(":")[2])


def _ask(server: PageServer, path: str, method: str = "GET", host: str | None = None) -> Answer:
    port = port_of(server)
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        headers = {} if host is None else {"Host": host}
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


def test_it_listens_on_this_machine_alone(server: PageServer) -> None:
    assert server.origin.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/static/style.css", "/api/run"])
def test_answers_forbid_everything_from_elsewhere(server: PageServer, path: str) -> None:
    status, headers, body = _ask(server, path)
    assert status == 200
    assert body
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


def test_page_has_no_script_or_style_inside(server: PageServer) -> None:
    page = _ask(server, "/")[2].decode()
    assert "<style" not in page and " style=" not in page
    assert page.count("<script") == page.count('<script type="module" src=')


@pytest.mark.parametrize("path", ["/", "/api/run", "/static/app.js"])
def test_name_of_elsewhere_is_not_answered(server: PageServer, path: str) -> None:
    port = port_of(server)
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost:80@evil.example",
        "127.0.0.1:x",
        "",
    ):
        status, _, body = _ask(server, path, host=host)
        assert status == 400
        assert b"recorded" not in body
    for host in (f"localhost:{port + 1}", "LOCALHOST", "[::1]:80"):
        assert _ask(server, path, host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading_is_possible(server: PageServer, method: str) -> None:
    status, headers, _ = _ask(server, "/api/run", method)
    assert status == 405
    assert headers["content-security-policy"]


def test_head_is_a_get_without_its_body(server: PageServer) -> None:
    status, headers, body = _ask(server, "/api/run", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 0


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/",
        "/index.html",
        "/api",
        "/etc/passwd",
        "//evil.example/",
    ],
)
def test_other_files_are_not_there(server: PageServer, path: str) -> None:
    assert _ask(server, path)[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "/api/",
        "/api/nothing",
        "/api/step/999",
        "/api/trajectories?tokens_min=x",
        "/api/trajectories?sort=x",
        "/api/overview/more",
        "/api/trajectories?" + "&".join(f"a{index}=1" for index in range(99)),
    ],
)
def test_question_without_an_answer_is_a_line_of_json(server: PageServer, path: str) -> None:
    status, headers, body = _ask(server, path)
    assert (status, headers["content-type"]) == (404, "application/json")
    assert json.loads(body)["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/overview",
        "/api/timeline?from=0&until=1",
        "/api/steps",
        "/api/groups?outcome=trained",
        "/api/trajectories?sort=-tokens&limit=5",
        "/api/decisions?kind=assign",
        "/api/step/0",
        "/api/version/1",
        "/api/mismatch",
        "/api/health",
        "/api/texts?step=0",
    ],
)
def test_every_question_of_the_pages_has_an_answer(server: PageServer, path: str) -> None:
    status, _, body = _ask(server, path)
    assert status == 200
    assert isinstance(json.loads(body), dict)


def test_server_of_several_runs_lists_them_and_opens_those_alone(recorded: RecordedRun) -> None:
    root = recorded.directory.parent
    with RunsPages(root, redact=False) as answers:
        listed = answers.ask(parse_query("/run"))["runs"]
        (row,) = (row for row in listed if row["run"] == "recorded")
        assert (row["steps"], row["state"]) == (STEPS, "finished")
        name = recorded.directory.name
        assert answers.ask(parse_query(f"/{name}/run"))["name"] == "recorded"
        with pytest.raises(UsageError):
            answers.ask(parse_query("/..%2F../run"))


def test_runs_say_how_far_they_are(server: PageServer) -> None:
    run = json.loads(_ask(server, "/api/run")[2])
    assert (run["name"], run["steps"], run["state"]) == ("recorded", STEPS, "finished")


def test_many_ask_at_once_and_each_is_answered(server: PageServer) -> None:
    results: list[int] = []
    ask = lambda: results.append(_ask(server, "/api/overview")[0])  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [200] * len(threads)


def test_more_than_there_is_room_for_are_refused(server: PageServer) -> None:
    with ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(server))))
        assert _ask(server, "/")[0] == 503
    while _ask(server, "/")[0] != 200:
        pass  # the server has yet to see that they left


def test_what_is_no_http_is_refused(server: PageServer) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=60) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 400 " in connection.recv(4096)


def test_port_that_is_taken_is_one_line(server: PageServer, tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as error:
        page_server(RunsPages(tmp_path, redact=False), port=port_of(server))
    assert "--port" in (error.value.hint or "")
