"""Client of a stock vLLM server, which lacks dora-pipe's extension.

It generates over /v1/completions: every `vllm serve` has it, and it takes and returns token ids.
Without development mode no endpoint can change the weights, so the server hosts the versions whose
digest its model directory has, and no others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dora_pipe.config.model import Sampling
from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.producers.engines.vllm import wire
from dora_pipe.producers.engines.vllm.client import VllmServerClient
from dora_pipe.producers.engines.vllm.core import token_seed
from dora_pipe.producers.engines.vllm.http import NOT_FOUND, Address, HttpStream
from dora_pipe.producers.engines.vllm.kv_files import CacheFacts
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.model_dir import embedding_rows, read_config, weights_digest
from dora_pipe.store.safetensors_file import read_entries

COMPLETIONS: Final = "/v1/completions"

UNREPORTED: Final = 1 << 40
"""Limits that a stock server does not report; it queues requests beyond its own."""

LIMITS: Final = "it serves one version and declares no capabilities (docs/engines.md)"

SAMPLING: Final = (
    "a stock vLLM server reports log-probs only at temperature 1 or 0, without top_k, top_p, min_p"
)

LOG = logging.getLogger(__name__)


def client_of(address: Address) -> VllmServerClient:
    """Return the client of a running server. Raises ResourceError."""
    stream = HttpStream(address, "GET", wire.WEIGHT_INFO)
    try:
        stream.wait()
    finally:
        stream.close()
    return (StockClient if stream.status == NOT_FOUND else VllmServerClient)(address, None)


class StockClient(VllmServerClient):
    def open(self, *, routes: bool = False, unassigned: Sequence[int] = ()) -> wire.ServerFacts:
        """Check that it completes token ids. Raises PolicyError if its model directory is not
        readable here, ResourceError."""
        card = self._call("GET", wire.MODELS)["data"][0]
        self._call("POST", COMPLETIONS, {"prompt": [0], "max_tokens": 1, "ignore_eos": True})
        self._model_dir = Path(card["root"])
        self._digests: dict[PolicyDtype, str] = {}
        rows = embedding_rows(read_config(self._model_dir))
        LOG.warning("vLLM's server at %s is stock: %s", self._address, LIMITS)
        return wire.ServerFacts(
            version=f"{self._call('GET', '/version')['version']} stock",
            slots=UNREPORTED,
            context_tokens=card["max_model_len"],
            kv_tokens=UNREPORTED,
            vocabulary=rows or UNREPORTED,
            device="unknown",
            dtype="unknown",
            lora_rank=0,
            max_resident_versions=1,
            stock=True,
        )

    def read(self, weights: Path, *, version: int, digest: str) -> None:
        """Raise PolicyError for weights other than the server's."""
        entries = read_entries(weights)
        narrow = any(entry.dtype == "BF16" for entry in entries)
        dtype: PolicyDtype = "bfloat16" if narrow else "float32"
        if dtype not in self._digests:
            self._digests[dtype] = weights_digest(self._model_dir, dtype)
        served = self._digests[dtype]
        if digest != served:
            raise PolicyError(
                f"version {version} has the weights {digest[:12]}, and the stock vLLM server at"
                f" {self._address} can serve only {served[:12]} of {self._model_dir}",
                hint="start it with dora-pipe's extension (docs/engines.md)",
            )

    def replace(self, digest: str, label: str) -> None:
        """Do nothing: `read` has compared the weights."""

    def caches(self, folder: str, mark: str) -> CacheFacts:
        return CacheFacts()

    def generate(self, body: dict[str, Any]) -> HttpStream:
        return self._send(COMPLETIONS, completion_body(body))

    def abort(self, attempts: list[str]) -> None:
        """Do nothing: vLLM aborts a request whose connection has closed."""


def completion_body(body: dict[str, Any]) -> dict[str, Any]:
    """Convert the body of a GENERATE request. A resumed one gets another seed, because vLLM draws
    from the start of its random stream."""
    params = dict(body["sampling_params"])
    del params["detokenize"]
    tokens = body["token_ids"]
    return {
        **{name: body[name] for name in ("request_id", "stream", "stream_options", "cache_salt")},
        **params,
        "seed": token_seed(params["seed"], len(tokens)),
        "repetition_penalty": 1.0,  # else that of the model's generation config
        "logprobs": 0,  # of the token alone
        "prompt": tokens,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def has_logprobs(sampling: SamplingParams | Sampling) -> bool:
    """Return whether a stock server's log-probs are those of the sampling distribution."""
    untruncated = sampling.top_k == 0 and sampling.top_p >= 1 and sampling.min_p == 0
    plain = sampling.temperature == 0 or (untruncated and sampling.temperature == 1)
    return plain and sampling.logprob_temperature == 1
