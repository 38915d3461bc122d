"""The doors of a vLLM server as calls; decides what it means when one does not open.

A refusal of the server's own worker (`error` in its answer) is a PolicyError. Anything else that
goes wrong is a ResourceError, and says how the process ended where it is known and has.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import InvariantBroken, PolicyError, ResourceError
from dora_pipe.producers.engines.vllm import wire as wire
from dora_pipe.producers.engines.vllm.http import Address, Exchange, call
from dora_pipe.producers.engines.vllm.process import ServerProcess

HEALTH_S: Final = 30.0

ABORTS_MAX: Final = 64
"""Aborts whose answer is not read yet; before another one the oldest is waited for."""


class Remote:
    """A server that runs, and the process if it was started from here."""

    def __init__(self, address: Address, process: ServerProcess | None) -> None:
        self._address = address
        self._process = process
        self._aborts: deque[Exchange] = deque()

    def open(self) -> wire.Facts:
        """Prepare it; what it has. Raises PolicyError where it cannot be used."""
        return msgspec.convert(self.rpc("dora_open"), wire.Facts)

    def label(self) -> str:
        """vLLM's name of its weights."""
        return str(self._call("GET", "/weight_info")["weight_version"])

    def read(self, weights: Path, *, version: int, digest: str) -> None:
        """Have it read, digest, compare and hold a file. Raises PolicyError when it refuses."""
        self.rpc("dora_read", str(weights.resolve()), digest, str(version))

    def replace(self, digest: str, label: str) -> None:
        """Have it load what it holds, under this label; what ran there is aborted."""
        self.pause()
        self._call("POST", "/start_weight_update")
        self._call("POST", "/update_weights", {"update_info": {"digest": digest}})
        self._call("POST", "/finish_weight_update", {"weight_version": label})
        if not self._call("POST", "/reset_prefix_cache")["success"]:
            raise ResourceError("vLLM's server has not forgotten its prefixes")
        found = self.label()
        if found != label:
            raise InvariantBroken(f"vLLM names its weights {found!r}, loaded were {label!r}")
        self.resume()

    def rpc(self, method: str, *words: str) -> dict[str, Any]:
        """Call a method of the extension. Raises PolicyError when it refuses, ResourceError where
        its machine does."""
        (found,) = self._call("POST", wire.RPC, {"method": method, "args": words})["results"]
        if "error" in found:
            raise (ResourceError if found.get("here") else PolicyError)(str(found["error"]))
        return dict(found)

    def load_adapter(self, name: str, folder: str) -> str:
        """Have it load an adapter under a name; what it says against that, empty where nothing."""
        return self._tell(wire.LOAD_ADAPTER, {"lora_name": name, "lora_path": folder})

    def unload_adapter(self, name: str) -> str:
        """Have its front end forget a name; likewise. Its worker keeps the adapter."""
        self._settle(0)  # no abort is on the way behind this
        return self._tell(wire.UNLOAD_ADAPTER, {"lora_name": name})

    def adapters(self) -> list[str]:
        """The names that its front end knows."""
        cards = self._call("GET", wire.MODELS)["data"]
        return [str(card["id"]) for card in cards if card["parent"] is not None]

    def pause(self) -> None:
        """Have it abort all that runs, and take nothing up."""
        self._call("POST", "/pause?mode=abort")

    def resume(self) -> None:
        """Have it go on."""
        self._call("POST", "/resume")

    def generate(self, body: dict[str, Any]) -> Exchange:
        """Begin a stream of tokens."""
        return self._send(wire.GENERATE, body)

    def abort(self, stays: list[str]) -> None:
        """Let it drop these: it might notice only with their next token that nobody reads them."""
        if stays:
            ids = [f"{wire.ID_PREFIX}{stay}" for stay in stays]
            self._aborts.append(self._send(wire.ABORT, {"request_ids": ids}))
        self._settle(ABORTS_MAX)

    def well(self, said: str = "") -> None:
        """Raise ResourceError unless it says that it is well; `said` is why it is asked."""
        try:
            call(self._address, "GET", wire.HEALTH, timeout_s=HEALTH_S)
        except ResourceError as error:
            raise self.gone(error, said) from None

    def gone(self, error: ResourceError, said: str = "") -> ResourceError:
        """What is known of a server that does not answer as it should."""
        if self._process is not None:
            try:
                self._process.settle()
            except ResourceError as ended:
                return ended
        message = f"{error.message} ({said})" if said else error.message
        return ResourceError(message, hint=error.hint)

    def close(self, stays: list[str]) -> None:
        """End it if it was started from here, else these requests."""
        try:
            if self._process is None:
                self.abort(stays)
                self._settle(0)
        except ResourceError:
            pass  # it is gone already, and so are they
        for exchange in self._aborts:
            exchange.close()
        self._aborts.clear()
        if self._process is not None:
            self._process.close()

    def _settle(self, most: int) -> None:
        """Read the answers to aborts that have come, and wait for more than so many."""
        try:
            while self._aborts:
                exchange = self._aborts[0]
                exchange.read()
                if not exchange.ended and len(self._aborts) <= most:
                    return
                exchange.wait(HEALTH_S)
                self._aborts.popleft().close()
        except ResourceError as error:
            raise self.gone(error) from None

    def _tell(self, path: str, body: dict[str, Any]) -> str:
        """Ask at a door that answers without a record; what it says where it refuses."""
        exchange = self._send(path, body)
        try:
            answer = exchange.wait()
        except ResourceError as error:
            raise self.gone(error) from None
        finally:
            exchange.close()
        return "" if exchange.status == 200 else wire.read_refusal(answer)

    def _call(self, method: Any, path: str, body: object = None) -> Any:
        try:
            return call(self._address, method, path, body)
        except ResourceError as error:
            raise self.gone(error) from None

    def _send(self, path: str, body: dict[str, Any]) -> Exchange:
        try:
            return Exchange(self._address, "POST", path, body)
        except ResourceError as error:
            raise self.gone(error) from None
