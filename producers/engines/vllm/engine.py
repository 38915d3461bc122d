"""vLLM behind the engine port, in this process: decides which stays vLLM has, and trusts nothing.

One `step` is one step of vLLM's engine core; what its front end would make of the answers (texts,
an object per token) is left out. A request that is let go is aborted inside vLLM; one whose weights
change under it is aborted and given again with all its tokens, so that it goes on as a fresh
request with that prefix would. The KV cache of a running request is read from vLLM's blocks, and
vLLM takes one through a connector of ours (`kv`, `connector`).

With `lora_rank`, versions are adapters on one base, several of them resident (`lora`), and a
request is given to vLLM with the adapter of its version.

vLLM says of every step by which of its weights it sampled, and its sampler by which adapters. That
is compared with what was loaded and asked for: a difference is an InvariantBroken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import ConfigError, InvariantBroken, PolicyError
from dora_pipe.producers.engines.port import (
    KV_EXPORT,
    EngineEvent,
    EngineRequest,
    Kv,
    StopReason,
    WeightsLoaded,
)
from dora_pipe.producers.engines.stops import Decode
from dora_pipe.producers.engines.torch.weights import check_fit, read_tensors, weight_files
from dora_pipe.producers.engines.vllm import core as vllm_core
from dora_pipe.producers.engines.vllm import kv as vllm_kv
from dora_pipe.producers.engines.vllm import lora as vllm_lora
from dora_pipe.producers.engines.vllm import weights as vllm_weights
from dora_pipe.producers.engines.vllm.adapters import LocalHost
from dora_pipe.producers.engines.vllm.core import VllmSettings
from dora_pipe.producers.engines.vllm.lora import Residents
from dora_pipe.producers.engines.vllm.rows import REASONS, Row
from dora_pipe.producers.engines.vllm.stays import Stays
from dora_pipe.producers.engines.vllm.wire import extra_args

SEED_MASK = (1 << 63) - 1
"""vLLM takes seeds as signed 64-bit numbers."""


class VllmEngine(Stays):
    """See the module, and `open`.

    Example::

        engine = VllmEngine.open(Path("model"), slots=64, context_tokens=1024, threads=1)
        engine.load(Path("weights.safetensors"), version=3, digest=digest)
    """

    name = "vllm"

    def __init__(
        self,
        model_dir: Path,
        settings: VllmSettings,
        *,
        slots: int,
        context_tokens: int,
        decode: Decode | None = None,
        clock: Clock | None = None,
        lora_rank: int = 0,
        versions_resident: int = 1,
    ) -> None:
        vllm_lora.check_kernels(lora_rank, vllm_core.device_name(), settings.dtype)
        vllm_weights.register()
        self.version = vllm_core.version()
        self.device, self.dtype = vllm_core.device_name(), str(settings.dtype)
        self._shapes, self._tied = vllm_weights.expected_tensors(model_dir)
        self._core = vllm_core.open_core(
            model_dir,
            settings,
            slots=slots,
            context_tokens=context_tokens,
            backend=vllm_weights.BACKEND,
            more=vllm_lora.arguments(lora_rank, versions_resident, device=self.device)
            | vllm_kv.arguments(),
        )
        self._caches = vllm_kv.Caches(self._core, self.version)
        host = LocalHost(self._core, self._shapes, rank=lora_rank) if lora_rank else None
        self._sampler = vllm_core.install_sampler(self._core)
        self._tasks = self._core.get_supported_tasks()
        self._of_stay: dict[str, Row] = {}
        super().__init__(
            slots=slots,
            context_tokens=context_tokens,
            vocabulary=int(self._core.model_config.get_vocab_size()),
            decode=decode,
            clock=clock,
            residents=Residents(host, most=versions_resident),
        )
        if self._caches.layout:
            self.declares |= {KV_EXPORT}
        self._warm_up(str(self._core.get_weight_version()))

    @classmethod
    def open(
        cls,
        model_dir: Path,
        *,
        slots: int,
        context_tokens: int,
        threads: int,
        settings: VllmSettings | None = None,
        decode: Decode | None = None,
        lora_rank: int = 0,
        versions_resident: int = 1,
    ) -> VllmEngine:
        """An engine for a model directory, with its weights if it holds any (else `load` some).

        With `lora_rank`, up to `versions_resident` versions live beside each other, as adapters of
        that rank on one base.

        Raises ConfigError where vLLM is not installed or for sizes that cannot be, PolicyError for
        a model that vLLM does not take, ResourceError.
        """
        if min(slots, context_tokens, threads) < 1:
            raise ConfigError("an engine needs at least one slot, one token and one thread")
        vllm_core.prepare(threads)
        engine = cls(
            model_dir,
            settings or VllmSettings(),
            slots=slots,
            context_tokens=context_tokens,
            decode=decode,
            lora_rank=lora_rank,
            versions_resident=versions_resident,
        )
        files = weight_files(model_dir)
        if files:
            tensors, digest = read_tensors(files)
            engine._transfer(tensors, model_dir, f"0:{digest[:16]}")
            engine._residents.rest_on(digest)
        return engine

    @property
    def kv_tokens(self) -> int:
        """Tokens that vLLM's KV cache has room for, at most those of all slots."""
        cache = self._core.vllm_config.cache_config
        room = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        return min(room, self.slots * self.context_tokens)

    def kv_error(self, request: EngineRequest) -> str | None:
        """See the port."""
        if request.kv is None or not self._residents.knows(request):
            return None
        return self._caches.error(request, request.kv, self._residents.of(request).digest)

    def reload_keeping(self, weights: Path, *, version: int, digest: str) -> list[EngineEvent]:
        """See the port; vLLM gets every running request again, as a prompt."""
        self._check_interruptible()
        tensors = self._read(weights, version, digest)
        check_fit(self._shapes, self._tied, tensors, weights)
        pending = self._pending()
        for row in self._rows.values():
            self._abort(row)
        loaded = self._load(tensors, weights, version, digest)
        for row in self._rows.values():
            self._give(row)
        return [*pending, loaded]

    def step(self) -> list[EngineEvent]:
        """See the port; a prompt beyond STEP_TOKENS_MAX is prefilled over several steps."""
        if not self._rows:
            return []
        self._sampler.ask(any(not row.request.params.plain for row in self._rows.values()))
        with self._caches.loading():
            answer = self._core.engine_core.get_output()
        moved: list[tuple[Row, StopReason | None]] = []
        for output in answer.outputs:
            row = self._of_stay.get(output.request_id)
            if row is not None:
                self._check_weights(row, answer.weight_version)
                reason = self._advance(row, output)
                if reason is not None or row.due():
                    moved.append((row, reason))
        events: list[EngineEvent] = []
        for row, reason in sorted(moved, key=_arrival):
            events += [row.emit()] if reason is None else row.end(reason)
        return events

    def close(self) -> None:
        """Let go of the memory; the engine cannot be used any more."""
        for request in list(self._rows):
            self.cancel(request)
        self._core.engine_core.shutdown()

    def _advance(self, row: Row, output: Any) -> StopReason | None:
        """Take what vLLM sampled for a row; why the row ends, which then has left."""
        tokens, finished = output.new_token_ids, output.finish_reason
        reason: StopReason | None = None
        if tokens:
            if not row.tokens:
                row.first_ns = self._clock.wall_ns()
            logprobs = output.new_logprobs.logprobs[:, 0].tolist()
            reason = row.take(tokens, logprobs, self._sampler_logprobs(row, logprobs))
            row.cached = len(row.request.token_ids) + len(row.tokens) - 1
        if reason is None and finished is not None:
            reason = REASONS.get(str(finished), "error")
        if reason is not None:
            self._leave(row, running=finished is None)
        return reason

    def _sampler_logprobs(self, row: Row, logprobs: list[float]) -> list[float]:
        params = row.request.params
        if params.temperature == 0:
            return [0.0] * len(logprobs)
        if params.plain:
            return logprobs
        return [self._sampler.drawn[row.stay]] * len(logprobs)

    def _check_weights(self, row: Row, found: str | None) -> None:
        """Raise InvariantBroken unless vLLM, too, has sampled this from the loaded weights."""
        if found != self._label:
            raise InvariantBroken(
                f"{row.request.request}: vLLM sampled from weights {found!r}, loaded are"
                f" {self._label!r}"
            )
        under = self._sampler.under.get(row.stay)
        if under != row.adapter:
            raise InvariantBroken(
                f"{row.request.request}: vLLM sampled under adapter {under}, asked for was"
                f" {row.adapter}"
            )

    def _give(self, row: Row) -> None:
        """Begin a stay in vLLM."""
        self._stays += 1
        row.stay, row.cached = f"{row.request.request}/{self._stays}", 0
        version = self._residents.of(row.request)
        row.adapter, row.weights = version.number, version.digest
        self._of_stay[row.stay] = row
        prompt: dict[str, Any] = {"prompt_token_ids": row.sequence}
        if row.kv is not None:
            self._caches.offer(row.stay, row.kv)
            row.kv, prompt["cache_salt"] = None, row.stay  # it has its own numbers, nobody else's
        request = self._core.input_processor.process_inputs(
            row.stay,
            prompt,
            self._params(row),
            lora_request=version.adapter,
            supported_tasks=self._tasks,
        )
        self._core.engine_core.add_request(request)

    def _params(self, row: Row) -> Any:
        """vLLM's settings for what is left of a request."""
        from vllm import SamplingParams as VllmParams

        params = row.request.params
        return VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=row.request.seed & SEED_MASK,
            max_tokens=self._tokens_left(row),
            stop_token_ids=list(params.stop_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            **extra_args(params),
        )

    def _kv_of(self, row: Row) -> Kv | None:
        return self._caches.taken(row.stay, len(row.sequence) - 1, row.weights)

    def _let_go(self, row: Row) -> None:
        self._leave(row)

    def _leave(self, row: Row, *, running: bool = True) -> None:
        """Free the row's slot."""
        if running:
            self._abort(row)
        else:
            del self._of_stay[row.stay]
        del self._rows[row.request.request]

    def _abort(self, row: Row) -> None:
        """End a stay in vLLM."""
        del self._of_stay[row.stay]
        self._core.engine_core.abort_requests([row.stay])

    def _read(self, weights: Path, version: int, digest: str) -> dict[str, Any]:
        """The tensors of a file. Raises PolicyError when its digest is another."""
        tensors, found = read_tensors([weights])
        if found != digest:
            raise PolicyError(vllm_weights.other_digest(weights, found, str(version), digest))
        return tensors

    def _replace(self, weights: Path, version: int, digest: str) -> WeightsLoaded:
        return self._load(self._read(weights, version, digest), weights, version, digest)

    def _load(
        self, tensors: dict[str, Any], weights: Path, version: int, digest: str
    ) -> WeightsLoaded:
        started_ns = self._clock.now_ns()
        self._transfer(tensors, weights, f"{version}:{digest[:16]}")
        self._residents.settle(weights, version=version, digest=digest)
        load_ms = (self._clock.now_ns() - started_ns) / 1e6
        return WeightsLoaded(version=version, digest=digest, load_ms=load_ms)

    def _transfer(self, tensors: dict[str, Any], where: Path, label: str) -> None:
        check_fit(self._shapes, self._tied, tensors, where)
        self._label = ""  # what breaks in there leaves an engine that takes no request
        vllm_weights.transfer(self._core, tensors, label)
        self._label = label


def _arrival(moved: tuple[Row, StopReason | None]) -> int:
    return moved[0].arrival
