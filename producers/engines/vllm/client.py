"""Client of a vLLM server.

Rejections of its worker raise PolicyError; other failures raise ResourceError, with the process's
exit status if known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import ConfigError, InvariantBroken, PolicyError, ResourceError
from dora_pipe.producers.engines.vllm import wire
from dora_pipe.producers.engines.vllm.core import SLEEP_LEVEL
from dora_pipe.producers.engines.vllm.http import Address, HttpStream, call
from dora_pipe.producers.engines.vllm.kv_files import CacheFacts
from dora_pipe.producers.engines.vllm.process import ServerProcess
from dora_pipe.schemas.routes import Routes

HEALTH_S: Final = 30.0

ABORTS_MAX: Final = 64
"""Maximum unanswered aborts; a further one waits for the oldest."""

SHARED: Final = "check that no other worker uses this server"


class VllmServerClient:
    """A running server, and its process if started here."""

    def __init__(self, address: Address, process: ServerProcess | None) -> None:
        self._address = address
        self._process = process
        self._aborts: deque[HttpStream] = deque()

    def open(self, *, routes: bool = False, unassigned: Sequence[int] = ()) -> wire.ServerFacts:
        """Prepare the server: keep requested experts (`routes`), never sample `unassigned` ids.
        Raises PolicyError."""
        ids = msgspec.json.encode(unassigned).decode()
        words = ("routes" if routes else "", ids)
        return msgspec.convert(self.rpc("dora_open", *words), wire.ServerFacts)

    def experts(self, parts: Sequence[wire.KeptPart], finished: Sequence[str]) -> list[Routes]:
        """Return experts; forget `finished` attempts. Raises InvariantBroken if some are lost."""
        words = [msgspec.json.encode(part).decode() for part in (parts, finished)]
        kept = msgspec.convert(self.rpc("dora_experts", *words), wire.KeptExperts).parts
        experts = [part for part in kept if part is not None]
        if len(experts) != len(parts):
            raise InvariantBroken("vLLM's server lost the routing of running requests", hint=SHARED)
        return experts

    def caches(self, folder: str, mark: str) -> CacheFacts:
        """Return the KV caches' layout; empty if a process does not see the folder."""
        facts = [
            msgspec.convert(answer, CacheFacts) for answer in self._ask("dora_kv", folder, mark)
        ]
        return facts[0] if all(answer == facts[0] for answer in facts) else CacheFacts()

    def copy_cache(self, attempt: str, path: str) -> set[str]:
        """Copy a KV cache into a file; return the processes' states."""
        return {str(answer["state"]) for answer in self._ask("dora_copy_kv", attempt, path)}

    def read(self, weights: Path, *, version: int, digest: str) -> None:
        """Read, check and hold weights. Raises PolicyError."""
        self.rpc("dora_read", str(weights.resolve()), digest, str(version))

    def replace(self, digest: str, label: str) -> None:
        """Load the held weights, aborting all requests."""
        self.pause()
        self._call("POST", "/start_weight_update")
        self._call("POST", "/update_weights", {"update_info": {"digest": digest}})
        self._call("POST", "/finish_weight_update", {"weight_version": label})
        if not self._call("POST", "/reset_prefix_cache")["success"]:
            raise ResourceError("vLLM's server did not clear its prefix cache")
        self.resume()

    def rpc(self, method: str, *words: str) -> dict[str, Any]:
        """Call a method of the extension; return the first process's answer. Raises PolicyError,
        ResourceError."""
        return self._ask(method, *words)[0]

    def load_adapter(self, name: str, folder: str) -> str:
        """Load an adapter; return an error or empty."""
        return self._tell(wire.LOAD_ADAPTER, {"lora_name": name, "lora_path": folder})

    def unload_adapter(self, name: str) -> str:
        """Remove a name from the front end, not its adapter from the worker; return an error or
        empty."""
        self._settle(0)  # no abort may follow
        return self._tell(wire.UNLOAD_ADAPTER, {"lora_name": name})

    def adapters(self) -> list[str]:
        cards = self._call("GET", wire.MODELS)["data"]
        return [str(card["id"]) for card in cards if card["parent"] is not None]

    def pause(self) -> None:
        """Abort all requests and take no new ones."""
        self._call("POST", "/pause?mode=abort")

    def sleep(self) -> None:
        self._call("POST", f"/sleep?level={SLEEP_LEVEL}")

    def wake(self, tag: str) -> None:
        """Allocate a tag's memory, without contents."""
        self._call("POST", f"/wake_up?tags={tag}")

    def resume(self) -> None:
        self._call("POST", "/resume")

    def generate(self, body: dict[str, Any]) -> HttpStream:
        return self._send(wire.GENERATE, body)

    def abort(self, attempts: list[str]) -> None:
        """Abort attempts: vLLM notices closed connections only at the next token."""
        if attempts:
            ids = [f"{wire.ID_PREFIX}{attempt}" for attempt in attempts]
            self._aborts.append(self._send(wire.ABORT, {"request_ids": ids}))
        self._settle(ABORTS_MAX)

    def well(self, detail: str = "") -> None:
        try:
            call(self._address, "GET", wire.HEALTH, timeout_s=HEALTH_S)
        except ResourceError as error:
            raise self.failure(error, detail) from None

    def failure(self, error: ResourceError, detail: str = "") -> ResourceError:
        """Return the process's exit as an error if it has ended, else `error`."""
        if self._process is not None:
            try:
                self._process.settle()
            except ResourceError as ended:
                return ended
        message = f"{error.message} ({detail})" if detail else error.message
        return ResourceError(message, hint=error.hint)

    def close(self, attempts: list[str]) -> None:
        """End the server if started here, else these requests."""
        try:
            if self._process is None:
                self.abort(attempts)
                self._settle(0)
        except ResourceError:
            pass  # already gone
        for stream in self._aborts:
            stream.close()
        self._aborts.clear()
        if self._process is not None:
            self._process.close()

    def _settle(self, most: int) -> None:
        try:
            while self._aborts:
                stream = self._aborts[0]
                stream.read()
                if not stream.ended and len(self._aborts) <= most:
                    return
                stream.wait(HEALTH_S)
                self._aborts.popleft().close()
        except ResourceError as error:
            raise self.failure(error) from None

    def _ask(self, method: str, *words: str) -> list[dict[str, Any]]:
        results = self._call("POST", wire.RPC, {"method": method, "args": words})["results"]
        for result in results:
            if "error" in result:
                raise (ResourceError if result.get("here") else PolicyError)(str(result["error"]))
        return [dict(result) for result in results]

    def _tell(self, path: str, body: dict[str, Any]) -> str:
        stream = self._send(path, body)
        try:
            answer = stream.wait()
        except ResourceError as error:
            raise self.failure(error) from None
        finally:
            stream.close()
        return "" if stream.status == 200 else wire.read_refusal(answer)

    def _call(self, method: Any, path: str, body: object = None) -> Any:
        try:
            return call(self._address, method, path, body)
        except ResourceError as error:
            raise self.failure(error) from None

    def _send(self, path: str, body: dict[str, Any]) -> HttpStream:
        try:
            return HttpStream(self._address, "POST", path, body)
        except ResourceError as error:
            raise self.failure(error) from None


def check_sleep(facts: wire.ServerFacts, *, needed: bool) -> None:
    """Raise ConfigError for a server that cannot sleep."""
    if needed and facts.device != "cpu" and not facts.sleeps:
        raise ConfigError(
            "vLLM's server cannot release its memory, but the worker is colocated",
            hint="start it with --sleep, or a run with workers.colocated = 0",
        )


def check_room(
    facts: wire.ServerFacts, slots: int, context_tokens: int, rank: int, most: int
) -> None:
    """Raise ConfigError for too few slots, tokens or adapters, or for adapters that the run does
    not use: on a CPU, rows without one get another's."""
    if slots > facts.slots or context_tokens > facts.context_tokens:
        raise ConfigError(
            f"vLLM's server has {facts.slots} slots and contexts of {facts.context_tokens}"
            f" tokens, the worker needs {slots} and {context_tokens}",
            hint="fewer workers.max_num_seqs or workers.max_model_len, or start it with more",
        )
    has = f"adapters of rank {facts.lora_rank}, {facts.max_resident_versions} at once"
    if facts.lora_rank and not rank:
        raise ConfigError(
            f"vLLM's server serves {has}, the run has none",
            hint="start it without --lora-rank",
        )
    if facts.lora_rank < rank or facts.max_resident_versions < most:
        raise ConfigError(
            f"vLLM's server hosts {has if facts.lora_rank else 'no adapters'},"
            f" the worker needs rank {rank}, {most} at once",
            hint=f"start it with --lora-rank {rank} --max-resident-versions {most}",
        )
