"""MCP server of the standard library for tests, over a pipe or HTTP.

python tests/support/mcp_server.py                one line per message
python tests/support/mcp_server.py --http         prints its address; JSON answers
python tests/support/mcp_server.py --http --sse   server-sent events
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

NUMBER = {"type": "integer", "description": "A number."}
TOOLS = [
    {
        "name": "add-numbers",
        "description": "Add two numbers.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
        },
    },
    {
        "name": "note",
        "description": "Note a word; gives all of this session.",
        "inputSchema": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
    *(
        {"name": name, "inputSchema": {"type": "object", "properties": {}}}
        for name in ("fail", "hang", "die", "picture", "deaf")
    ),
]


class Session:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if "id" not in message or "method" not in message:
            return None
        method, params = message["method"], message.get("params", {})
        result: dict[str, Any]
        if method == "initialize":
            me = {"name": "notes", "version": "0.3"}
            version = params["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": me}
        elif method == "tools/list":  # in two pages
            half = len(TOOLS) // 2
            first = "cursor" not in params
            result = (
                {"tools": TOOLS[:half], "nextCursor": "2"} if first else {"tools": TOOLS[half:]}
            )
        elif method == "tools/call":
            result = self._call(params["name"], params.get("arguments", {}))
        else:
            error = {"code": -32601, "message": f"no {method}"}
            return {"jsonrpc": "2.0", "id": message["id"], "error": error}
        return {"jsonrpc": "2.0", "id": message["id"], "result": result}

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name == "add-numbers":
            if not {"a", "b"} <= set(arguments):
                return {"content": [_text("a and b are needed")], "isError": True}
            return {"content": [_text(str(arguments["a"] + arguments["b"]))]}
        if name == "note":
            self.notes.append(arguments.get("word", ""))
            return {"content": [], "structuredContent": {"notes": self.notes}}
        if name == "fail":
            return {"content": [_text("it is\nbroken")], "isError": True}
        if name == "hang":
            time.sleep(60)
        if name == "die":
            os._exit(3)
        while name == "deaf":  # writes much and stops reading
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": 78, "method": "ping"}) + "\n")
            sys.stdout.flush()
        return {"content": [_text("see"), {"type": "image", "data": "", "mimeType": "image/png"}]}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def over_a_pipe() -> None:
    session = Session()
    sys.stdout.write("notes server, ready\n")  # noise outside the protocol, as some servers print
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("method") == "initialize":
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": 77, "method": "ping"}) + "\n")
        if (answer := session.answer(message)) is not None:
            sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
            sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    sessions: ClassVar[dict[str, Session]] = {}
    sse = False

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != "Bearer secret":
            return self._say(401, b"who are you")
        name = self.headers.get("Mcp-Session-Id", "")
        if message["method"] == "initialize":
            name = uuid.uuid4().hex
            self.sessions[name] = Session()
        if name not in self.sessions:
            return self._say(404, b"no such session")
        if self.sse and message.get("params", {}).get("name") == "hang":
            return self._chat()
        answer = self.sessions[name].answer(message)
        if answer is None:
            return self._say(202, b"", session=name)
        return self._say(200, json.dumps(answer, ensure_ascii=False).encode(), session=name)

    def _chat(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):  # client disconnected
            while True:
                self.wfile.write(b": still there\n\n")
                time.sleep(0.05)

    def do_DELETE(self) -> None:
        name = self.headers.get("Mcp-Session-Id", "")
        self.sessions.clear() if name == "*" else self.sessions.pop(name, None)
        self._say(200, b"")

    def _say(self, status: int, body: bytes, session: str = "") -> None:
        kind = "application/json"
        if self.sse and status == 200 and body:
            kind = "text/event-stream"
            other = b'data: {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}\n\n'
            body = b": hello\n\n" + other + b"event: message\ndata: " + body + b"\n\n"
        self.send_response(status)
        if session:
            self.send_header("Mcp-Session-Id", session)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    if "--http" not in sys.argv:
        return over_a_pipe()
    Handler.sse = "--sse" in sys.argv
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}/mcp\n")
    sys.stdout.flush()
    return server.serve_forever()


if __name__ == "__main__":
    main()
