"""An MCP server with one tool, over a pipe, of the standard library alone: stands for one of yours.

python3 examples/mcp/server.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

NUMBER = {"type": "integer"}
TOOL = {
    "name": "calculator",
    "description": "Add two numbers, modulo 100.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
    },
}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Of a request."""
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "sums", "version": "1.0"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    given = params["arguments"]
    if method != "tools/call" or not all(isinstance(given.get(name), int) for name in "ab"):
        return {"content": [{"type": "text", "text": "a and b are numbers"}], "isError": True}
    total = (given["a"] + given["b"]) % 100
    return {"content": [{"type": "text", "text": str(total)}]}


def main() -> None:
    """Answer every request, a line each, until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            said = result(message["method"], message.get("params", {}))
            answer = {"jsonrpc": "2.0", "id": message["id"], "result": said}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
