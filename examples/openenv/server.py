"""An environment with OpenEnv's protocol: guess a number from 1 to 9.

It needs websockets only and answers like an environment written with the package `openenv`.

    python examples/openenv/server.py [PORT [SESSIONS]]      prints its address; port 0: a free one
"""

from __future__ import annotations

import json
import random
import sys
from http import HTTPStatus
from typing import Any

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

PORT, SESSIONS = 8765, 64

SCHEMA = {
    "action": {
        "properties": {"metadata": {"type": "object"}, "guess": {"type": "integer"}},
        "required": ["guess"],
    },
    "observation": {"properties": {"hint": {"type": "string"}}},
    "state": {},
}
ABOUT = {"name": "guess", "description": "Guess.", "version": "0.7"}


def pages(connection: ServerConnection, request: Request) -> Response | None:
    """Answer a request without a websocket."""
    page = {"/schema": SCHEMA, "/metadata": ABOUT}.get(request.path)
    if request.path == "/ws":
        return None
    status = HTTPStatus.NOT_FOUND if page is None else HTTPStatus.OK
    body = json.dumps(page).encode()
    headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(body))})
    return Response(status.value, status.phrase, headers, body)


class Sessions:
    """How many may be open."""

    def __init__(self, most: int) -> None:
        self._most, self._open = most, 0

    def serve(self, connection: ServerConnection) -> None:
        """Play episodes until the connection ends."""
        if self._open >= self._most:
            connection.send(error("CAPACITY_REACHED", "Server at capacity"))
            return
        self._open += 1
        try:
            number = 0
            for message in connection:
                asked = json.loads(message)
                data = asked["data"]
                if asked["type"] == "reset":
                    number = random.Random(data["seed"]).randint(1, data.get("largest", 9))
                    connection.send(observed("1 to 9?", None, done=False))
                else:
                    connection.send(stepped(data, number))
        finally:
            self._open -= 1


def stepped(data: dict[str, Any], number: int) -> str:
    """The answer to a guess; 50 and more are out of bounds, 99 breaks the environment."""
    guess = data["guess"]
    if guess == 99:
        return error("EXECUTION_ERROR", "it broke")
    if guess >= 50:
        problem = {"loc": ["guess"], "msg": "should be below 50", "type": "less_than"}
        return error("VALIDATION_ERROR", "Invalid message", errors=[problem])
    if guess == number:
        return observed("yes", 1.0, done=True)
    return observed("higher" if guess < number else "lower", -0.1, done=False)


def observed(hint: str, reward: float | None, *, done: bool) -> str:
    observation = {"hint": hint, "metadata": {}}
    data = {"observation": observation, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def error(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


def main() -> None:
    """See the module."""
    port, most = (*map(int, sys.argv[1:]), *(PORT, SESSIONS)[len(sys.argv) - 1 :])
    with serve(Sessions(most).serve, "127.0.0.1", port, process_request=pages) as server:
        sys.stdout.write(f"http://127.0.0.1:{server.socket.getsockname()[1]}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
