"""Fake endpoint of a judge or teacher."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes]


def completion(text: str) -> Answer:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    body = {"id": "1", "choices": [{"index": 0, "message": message}], "usage": usage}
    return 200, json.dumps(body).encode()


@dataclass(slots=True)
class Endpoint:
    answer: Callable[[int, Any], Answer]
    delay_s: float = 0.0
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    most: int = 0
    """Maximum concurrent requests."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def last_message(body: dict[str, Any]) -> Any:
    return body["messages"][-1]["content"]


@contextmanager
def judge_endpoint(
    answer: Callable[[int, Any], Answer],
    delay_s: float = 0.0,
    asked: Callable[[dict[str, Any]], Any] = last_message,
) -> Iterator[Endpoint]:
    endpoint = Endpoint(answer, delay_s)
    lock = threading.Lock()
    now = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal now
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                now += 1
                endpoint.most = max(endpoint.most, now)
                number = len(endpoint.asked)
                endpoint.asked.append(body)
                endpoint.keys.append(self.headers.get("Authorization", ""))
            time.sleep(endpoint.delay_s)
            status, text = endpoint.answer(number, asked(body))
            with lock:
                now -= 1
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with _Server(("127.0.0.1", 0), Handler) as server:
        endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()
