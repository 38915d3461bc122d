"""Client of JSON over HTTP with limits on time and size.

Temporary failures raise `EndpointAway`, permanent ones `EndpointRefused`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from dora_pipe.core.errors import ConfigError, ResourceError, one_line

if TYPE_CHECKING:
    import requests

_PASSES: Final = frozenset({408, 409, 425, 429, *range(500, 600)})
_QUOTED: Final = 200

_PIECE_BYTES: Final = 512
"""Small reads, so that slow servers do not delay the deadline check."""


class EndpointAway(ResourceError):
    """Temporary failure."""


class EndpointRefused(ResourceError):
    """Permanent failure."""


class JsonEndpoint:
    """Thread-safe client.

    Example: ``JsonEndpoint("the judge", "http://host:8000/v1").post("/completions", {...})``
    """

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
        self.where = f"{who} at {url.rstrip('/')}"
        self._url = url.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._bytes_max = bytes_max
        self._session: requests.Session | None = None
        self._opening = threading.Lock()

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Return the response body. Raises EndpointAway, EndpointRefused.

        Uses a thread, because socket timeouts do not bound the total.
        """
        done: Future[bytes] = Future()

        def ask() -> None:
            try:
                done.set_result(self._ask(path, body))
            except (ResourceError, ValueError, OSError) as error:
                done.set_exception(error)

        threading.Thread(target=ask, name="json-endpoint", daemon=True).start()
        try:
            return done.result(self._timeout_s)
        except TimeoutError:
            raise EndpointAway(
                f"{self.where} did not answer completely within {self._timeout_s:g} s"
            ) from None

    def _ask(self, path: str, body: Mapping[str, Any]) -> bytes:
        import requests

        end = time.monotonic() + self._timeout_s
        try:
            with self._connected().post(
                self._url + path,
                json=body,
                auth=self._sign,
                timeout=self._timeout_s,
                allow_redirects=False,
                stream=True,
            ) as answer:
                content = self._body(answer, end)
                status = answer.status_code
        except requests.RequestException as error:
            raise EndpointAway(f"{self.where} does not answer: {error}") from None
        if status in _PASSES:
            raise EndpointAway(f"{self.where} says {status}: {self._shown(content)}")
        if status != 200:
            raise EndpointRefused(f"{self.where} answered {status}: {self._shown(content)}")
        return content

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _connected(self) -> requests.Session:
        import requests
        from requests.adapters import HTTPAdapter

        with self._opening:
            if self._session is None:
                self._session = requests.Session()
                adapter = HTTPAdapter(pool_maxsize=self._concurrency)
                self._session.mount("http://", adapter)
                self._session.mount("https://", adapter)
            return self._session

    def _sign(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Set the key's header and ignore .netrc."""
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _body(self, answer: requests.Response, end: float) -> bytes:
        body = bytearray()
        for piece in answer.iter_content(_PIECE_BYTES):
            body += piece
            if len(body) > self._bytes_max or time.monotonic() > end:
                raise EndpointAway(
                    f"the answer of {self.where} is too long or incomplete ({len(body)} bytes)"
                )
        return bytes(body)

    def _shown(self, body: bytes) -> str:
        text = body.decode(errors="replace")
        return quoted(text.replace(self._key, "...") if self._key else text)


def quoted(text: str) -> str:
    """Return the beginning of a text as one line."""
    return one_line(" ".join(text.split()), _QUOTED)


def variable(where: str, option: str, name: str) -> str:
    """Return an environment variable. Raises ConfigError."""
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"{where}{option}: the environment variable {name} is not set")
    return value
