"""An endpoint that takes traces and forgets them: a process of its own, as a collector is.

It decides nothing. It prints its address, serves until its standard input ends, and then prints how
much it was sent.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Taken:
    requests = 0
    bytes = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Take it."""
        self.rfile.read(int(self.headers["Content-Length"]))
        _Taken.requests += 1
        _Taken.bytes += int(self.headers["Content-Length"])
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nobody's news."""


def main() -> None:
    """Serve until nobody needs it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()
        server.shutdown()
    sys.stdout.write(json.dumps({"requests": _Taken.requests, "bytes": _Taken.bytes}) + "\n")


if __name__ == "__main__":
    main()
