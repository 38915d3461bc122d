"""Client of JSON over HTTP with limits on time and size.

Temporary failures raise `EndpointAway`, permanent ones `EndpointRefused`.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dora_pipe.core.errors import ConfigError, ResourceError, one_line
from dora_pipe.core.system.background import Background

if TYPE_CHECKING:
    import httpx2

_PASSES: Final = frozenset({408, 409, 425, 429, *range(500, 600)})
_QUOTED: Final = 200

LOOP: Final = Background()


class EndpointAway(ResourceError):
    """Temporary failure."""


class EndpointRefused(ResourceError):
    """Permanent failure."""


class JsonEndpoint:
    """Thread-safe client."""

    def __init__(
        self,
        who: str,
        url: str,
        *,
        key: str = "",
        timeout_s: float,
        concurrency: int,
        bytes_max: int,
    ) -> None:
        import httpx2

        self.where = f"{who} at {url.rstrip('/')}"
        self._url = url.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s
        self._bytes_max = bytes_max
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx2.Limits(max_keepalive_connections=concurrency)
        self._client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)
        self.close: Callable[[], object] = weakref.finalize(self, _close, self._client)

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Return the response body. Raises EndpointAway, EndpointRefused."""
        return LOOP.run(self.ask(path, body)).result()

    async def ask(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Return as `post`, in `LOOP`."""
        import httpx2

        try:
            status, answer = await self._ask(path, msgspec.json.encode(body))
        except TimeoutError:
            raise EndpointAway(
                f"{self.where} did not answer completely within {self._timeout_s:g} s"
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise EndpointAway(f"{self.where} does not answer: {error}") from None
        if status in _PASSES:
            raise EndpointAway(f"{self.where} says {status}: {self._shown(answer)}")
        if status != 200:
            raise EndpointRefused(f"{self.where} answered {status}: {self._shown(answer)}")
        return answer

    async def _ask(self, path: str, content: bytes) -> tuple[int, bytes]:
        body = bytearray()
        async with (
            asyncio.timeout(self._timeout_s),
            self._client.stream("POST", self._url + path, content=content) as answer,
        ):
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > self._bytes_max:
                    raise EndpointAway(
                        f"the answer of {self.where} is too long ({len(body)} bytes)"
                    )
            return answer.status_code, bytes(body)

    def _shown(self, body: bytes) -> str:
        text = body.decode(errors="replace")
        return quoted(text.replace(self._key, "...") if self._key else text)


def _close(client: httpx2.AsyncClient) -> None:
    LOOP.run(client.aclose())


def quoted(text: str) -> str:
    """Return the beginning of a text as one line."""
    return one_line(" ".join(text.split()), _QUOTED)


def variable(where: str, option: str, name: str) -> str:
    """Return an environment variable. Raises ConfigError."""
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"{where}{option}: the environment variable {name} is not set")
    return value
