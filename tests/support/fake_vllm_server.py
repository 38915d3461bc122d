"""Fake vLLM server without a model: tokens are hashes of (label of weights or adapter, seed,
position).

Two ranks each hold one head of a KV cache. The server records requests and fails on demand.
``python -m tests.support.fake_vllm_server`` acts as `vllm.serve`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.simulated import mix64
from dora_pipe.producers.engines.vllm.kv_files import CacheFacts, is_seen, opened
from dora_pipe.producers.engines.vllm.wire import BOTH, RANDOM, policy_mark
from dora_pipe.schemas.routes import Routes
from dora_pipe.store.safetensors_file import read_manifest

VOCABULARY = 300
CHUNK_TOKENS = 8
RANKS = 2
GUARD_S = 30.0
"""Limit of a handler's wait."""


class FakeVllm(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    stock: Path | None = None
    """Model directory of a stock server, which has no development endpoints."""

    def __init__(self, key: str = "key", *, slots: int = 64, context_tokens: int = 256) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = key
        self.facts: dict[str, Any] = {
            "version": "0.32.0",
            "slots": slots,
            "context_tokens": context_tokens,
            "kv_tokens": slots * context_tokens,
            "vocabulary": VOCABULARY,
            "device": "none",
            "dtype": "float32",
            "lora_rank": 0,
            "max_resident_versions": 1,
            "sleeps": True,
        }
        self.label, self.held, self.loaded = "default", "", RANDOM
        self.asleep: set[str] = set()
        """vLLM's names of released memory."""
        self.kv = CacheFacts(layout="fake", dtype="<f4", layers=1, heads=2, width=1)
        self.forgets_kv = False
        """Whether ranks report every request as unknown."""
        self.kv_files: list[Path] = []
        """Caches with which requests started."""
        self.named: dict[str, int] = {}
        """Ids of adapters known to the front end."""
        self.served: set[int] = set()
        """Ids of adapters in the worker."""
        self.before: set[int] = set()
        self.opened: list[str] = []
        """Arguments of the last `dora_open`."""
        self.gone: list[str] = []
        """Stays whose routes were dropped."""
        self.loads = 0
        self.refusal = ""
        """Error for the next adapters."""
        self.begin = threading.Event()
        """Gate of streams; an abort before it finds no request."""
        self.begin.set()
        self.doors: list[str] = []
        """Requested paths in order, without /health."""
        self.bodies: list[dict[str, Any]] = []
        """Bodies of streams by arrival: separate connections may overtake each other."""
        self.running: dict[str, threading.Event] = {}
        """Abort events by vLLM's request id."""
        self.aborted: list[str] = []
        self.asked = threading.Semaphore(0)
        """Count of `bodies`."""
        self.hold_after: dict[int, int] = {}
        """By seed: tokens after which a stream waits for `release`."""
        self.release = threading.Event()
        self.trouble: dict[int, Any] = {}
        """By seed: refuse, error, cut, nan, silent end, other weights, other adapter."""
        self.chunk_s = 0.0
        """Seconds between chunks; 0: a stream ends when its second token is read."""
        self.healthy = True
        self.cached_tokens = 0
        """Reported cached tokens of each prompt."""
        self.sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        for entry in self.sockets:
            with suppress(OSError):
                entry.shutdown(socket.SHUT_RDWR)
        self.release.set()
        self._thread.join()

    def last_bodies(self, count: int) -> list[dict[str, Any]]:
        order = sorted(self.bodies, key=lambda row: int(row["request_id"].rpartition("-")[2]))
        return order[-count:]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients."""

    def ranks(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        method, words = body["method"], body.get("args", [])
        if method == "dora_kv":
            observed = is_seen(Path(words[0]), words[1])
            return [msgspec.to_builtins(self.kv if observed else CacheFacts())] * RANKS
        if method == "dora_copy_kv":
            attempt, path = words
            return [{"state": self.copy_kv(attempt, path, rank)} for rank in range(RANKS)]
        return [self.rpc(body)]

    def copy_kv(self, attempt: str, path: str, rank: int) -> str:
        running = [body for body in self.bodies if body["request_id"] == attempt]
        if self.forgets_kv or not running:
            return "ended"
        array = opened(Path(path), write=True)
        array[..., rank, :] = self.head(running[0], array.shape[2], rank)
        return "copied"

    def head(self, body: dict[str, Any], tokens: int, rank: int) -> np.ndarray[Any, Any]:
        seed, weights = body["sampling_params"]["seed"], _weights(self.label)
        numbers = [mix64(mix64(seed ^ rank) ^ weights ^ index) for index in range(tokens)]
        return (np.array(numbers, np.uint64)[:, None] % 1000).astype("<f4")

    def check_kv(self, body: dict[str, Any]) -> None:
        """Reject a KV cache that differs from the expected one."""
        named = body["sampling_params"].get("extra_args", {}).get("kv_file")
        if named is None or not Path(named).exists():
            return
        self.kv_files.append(Path(named))
        array = opened(Path(named))
        assert array.shape[2] == len(body["token_ids"]) - 1
        for rank in range(RANKS):
            assert (array[..., rank, :] == self.head(body, array.shape[2], rank)).all()

    def rpc(self, body: dict[str, Any]) -> dict[str, Any]:
        """Call the extension's other methods; a weights file contains its digest, or is a test
        adapter."""
        method, words = body["method"], body.get("args", [])
        if method == "dora_open":
            self.opened = words
            return self.facts | {"weights": self.loaded}
        if method == "dora_experts":
            self.gone += json.loads(words[1])
            return {"parts": [experts(load["start"], load["end"]) for load in json.loads(words[0])]}
        if method == "dora_forget":
            return {"numbers": sorted(self.served - self.before)}
        if method == "dora_drop_all":
            self.served.clear()
            return {}
        if method == "dora_drop":
            self.served.remove(int(words[0]))
            return {"dropped": True}
        path, digest, version = words[:3]
        actual_digest = _digest_of(Path(path))
        if actual_digest != digest:
            return {
                "error": f"{path} has the digest {actual_digest[:4]}, not {digest[:4]} of {version}"
            }
        if method == "dora_write":
            self.before = set(self.served)
            return {"folder": path}
        self.held = digest
        return {"tensors": 1}

    def adapter(self, path: str, name: str) -> tuple[int, object]:
        is_loaded = name in self.named
        if path.startswith("/v1/load") and not is_loaded and not self.refusal:
            self.loads += 1
            self.named[name] = self.loads
            self.served.add(self.loads)
        elif path.startswith("/v1/unload") and is_loaded:
            del self.named[name]  # the worker keeps the adapter, as in vLLM
        else:
            text = self.refusal or f"The lora adapter '{name}' cannot be found."
            return 400, {"error": {"message": text}}
        return 200, f"Success: {name}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeVllm

    def setup(self) -> None:
        super().setup()
        self.server.sockets.append(self.connection)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        if self._may():
            if self.path == "/health":
                self._answer(None, 200 if self.server.healthy else 503)
            elif self.path == "/v1/models":
                cards = [{"id": entry, "parent": "policy"} for entry in self.server.named]
                limits = {"root": str(self.server.stock), "max_model_len": 256}
                self._answer({"data": [{"id": "policy", "parent": None, **limits}, *cards]})
            elif self.path == "/version":
                self._answer({"version": "0.32.0"})
            elif self.server.stock is not None:
                self._answer({"detail": "Not Found"}, 404)
            else:
                self._answer({"weight_version": self.server.label})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._may():
            return
        server, path = self.server, self.path.partition("?")[0]
        body = json.loads(content) if content else {}
        if path == "/v1/completions" and "stream" not in body:
            self._answer({"choices": [{}]})
        elif path == "/v1/completions":
            self._generate(body | {"token_ids": body["prompt"], "sampling_params": body})
        elif server.stock is not None:
            self._answer({"detail": "Not Found"}, 404)
        elif path == "/inference/v1/generate":
            self._generate(body)
        elif path == "/collective_rpc":
            self._answer({"results": server.ranks(body)})
        elif path.endswith("load_lora_adapter"):
            status, text = server.adapter(path, body["lora_name"])
            self._answer(text, status)
        elif path == "/abort_requests":
            for name in body["request_ids"]:
                server.aborted.append(name)
                if name in server.running:
                    server.running[name].set()
                server.asked.release()
            self._answer({"status": "aborted"})
        elif path == "/reset_prefix_cache":
            self._answer({"success": True})
        else:
            if path == "/pause":
                for event in server.running.values():
                    event.set()
            if path == "/update_weights" and body["update_info"]["digest"] != server.held:
                self._answer({"error": "not held"}, 500)
                return
            if path == "/sleep":
                server.asleep = {"weights", "kv_cache"}
            if path == "/wake_up":
                server.asleep -= set(parse_qs(urlsplit(self.path).query)["tags"])
            if path == "/update_weights":
                assert "weights" not in server.asleep
                server.loaded = server.held
            if path == "/finish_weight_update":
                server.label = body["weight_version"]
            self._answer({"status": "done"})

    def _may(self) -> bool:
        if self.path != "/health":
            self.server.doors.append(self.path)
        if self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self._answer({"error": "Unauthorized"}, 401)
        return False

    def _answer(self, value: object, status: int = 200) -> None:
        content = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _generate(self, body: dict[str, Any]) -> None:
        server, seed = self.server, body["sampling_params"]["seed"]
        server.bodies.append(body)
        trouble, name = server.trouble.get(seed), f"generate-tokens-{body['request_id']}"
        if trouble == "refuse":
            self._answer({"error": {"message": "a bad request"}}, 400)
            return
        if body.get("model", "") not in {"", *server.named}:
            self._answer({"error": {"message": "The model does not exist."}}, 404)
            return
        number = server.named.get(body.get("model", ""), 0)
        server.begin.wait(GUARD_S)
        assert not server.asleep
        server.check_kv(body)
        if number and number not in server.served:
            raise AssertionError("vLLM's engine core would have ended")
        abort = server.running[name] = threading.Event()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(body, trouble, abort, number)
        finally:
            del server.running[name]
        if trouble != "cut":
            self._chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def _stream(
        self, body: dict[str, Any], trouble: Any, abort: threading.Event, number: int
    ) -> None:
        server = self.server
        weights = "c0ffee0" if trouble == "other weights" else server.loaded
        mark = policy_mark(weights, 1 if trouble == "other adapter" else number)
        tokens, finish = _tokens(body, body.get("model", server.label), mark)
        if trouble == "nan":
            tokens[1]["logprob"] = -9999.0
        hold, sent = server.hold_after.get(body["sampling_params"]["seed"]), 0
        while sent < len(tokens):
            if trouble == "error":
                self._event({"error": {"message": "it broke", "code": 500}})
                return
            upto = min(sent + (CHUNK_TOKENS if sent else 1), len(tokens))
            time.sleep(server.chunk_s)
            if hold is not None and upto > hold and not server.release.is_set():
                for _ in range(int(GUARD_S / 0.01)):
                    if server.release.is_set() or abort.wait(0.01):
                        break
            if abort.is_set():
                self._choice(tokens[:0], "abort")
                return
            last = upto == len(tokens) and trouble not in ("cut", "silent end")
            self._choice(tokens[sent:upto], finish if last else None)
            sent = upto
        if last and body.get("stream_options", {}).get("include_usage"):
            usage = {
                "prompt_tokens": len(body["token_ids"]),
                "prompt_tokens_details": {"cached_tokens": server.cached_tokens},
            }
            self._event({"request_id": "x", "choices": [], "usage": usage})

    def _choice(self, tokens: list[Any], finish: str | None) -> None:
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": [token["token_id"] for token in tokens],
            "logprobs": {"content": tokens},
            "finish_reason": finish,
        }
        if self.server.stock is not None:
            choice["logprobs"] = {"token_logprobs": [token["logprob"] for token in tokens]}
        self._event({"request_id": "x", "choices": [choice]})

    def _event(self, value: object) -> None:
        self._chunk(f"data: {json.dumps(value)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


def experts(start: int, end: int) -> dict[str, Any]:
    """Routes of tokens [start, end): two of eight experts per layer, by position."""
    choices = [[[index % 8, (index + 3) % 8]] for index in range(start, end)]
    return dict(msgspec.to_builtins(Routes.of(np.array(choices, np.uint8), 8)))


def _digest_of(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        return read_manifest(path).digest
    except PolicyError:
        return path.read_text()


def _weights(label: str) -> int:
    return mix64(int.from_bytes(label.partition(":")[2].encode()[:8].ljust(8), "big"))


def _tokens(body: dict[str, Any], label: str, mark: int) -> tuple[list[dict[str, Any]], str]:
    params, result = body["sampling_params"], []
    seed = params["seed"] if params["temperature"] else 0
    weights = _weights(label)
    for position in range(len(body["token_ids"]), len(body["token_ids"]) + params["max_tokens"]):
        drawn = mix64(mix64(seed) ^ weights ^ position)
        token, logprob = drawn % VOCABULARY, -(drawn >> 40) / 2**22 - 0.125
        places = [{"token_id": token, "logprob": logprob}, {"token_id": mark, "logprob": logprob}]
        if params["logprobs"] == BOTH:
            places[1]["logprob"] /= 2
        result.append({"token_id": token, "logprob": logprob, "top_logprobs": places})
        if token in params["stop_token_ids"]:
            return result, "stop"
    return result, "length"


def main(words: Sequence[str] | None = None) -> int:
    """Report a port and exit at the end of stdin, as `vllm.serve`. A model called `refused` is
    rejected."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--report", type=int, required=True)
    asked, _ = parser.parse_known_args(words)
    if asked.model.name == "dies":
        return 41
    if asked.model.name == "refused":
        os.write(asked.report, b'{"error": "vLLM does not take it", "exit_code": 9}\n')
        return 9
    server = FakeVllm(os.environ["VLLM_API_KEY"])
    os.write(asked.report, json.dumps({"port": server.server_address[1]}).encode() + b"\n")
    while os.read(sys.stdin.fileno(), 64):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
