"""An MCP server with one tool over a pipe, written with the standard library.

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


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of a request, or its error."""
    if method == "initialize":
        about = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "sums", "version": "1.0"},
        }
        return {"result": about}
    if method == "tools/list":
        return {"result": {"tools": [TOOL]}}
    if method == "tools/call":
        return {"result": called(params.get("arguments", {}))}
    return {"error": {"code": -32601, "message": f"there is no {method}"}}


def called(given: dict[str, Any]) -> dict[str, Any]:
    """The result of the tool."""
    if not all(isinstance(given.get(name), int) for name in "ab"):
        return {"content": [{"type": "text", "text": "a and b are numbers"}], "isError": True}
    total = (given["a"] + given["b"]) % 100
    return {"content": [{"type": "text", "text": str(total)}]}


def main() -> None:
    """Answer every request, a line each, until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            reply = answer(message["method"], message.get("params", {}))
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
