"""vLLM behind the engine port, in this process: decides which stays vLLM has, and trusts nothing.

One `step` is one step of vLLM's engine core; what its front end would make of the answers (texts,
an object per token) is left out. A request that is let go is aborted inside vLLM; one whose weights
change under it is aborted and given again with all its tokens, so that it goes on as a fresh
request with that prefix would. The KV cache of a running request is read from vLLM's blocks, and
vLLM takes one through a connector of ours (`kv`, `plugins`).

With `lora_rank`, versions are adapters on one base, several of them resident (`lora`), and a
request is given to vLLM with the adapter of its version.

vLLM says of every step by which of its weights it sampled, and its sampler by which adapters. That
is compared with what was loaded and asked for: a difference is an InvariantBroken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.producers.engines.base import check_sizes
from dora_pipe.producers.engines.port import KV_EXPORT, ROUTES, EngineEvent, Kv, StopReason
from dora_pipe.producers.engines.requests import Decode
from dora_pipe.producers.engines.torch.weights import (
    OpenWeights,
    open_directory,
    open_weights,
    weight_files,
)
from dora_pipe.producers.engines.vllm import core as vllm_core
from dora_pipe.producers.engines.vllm import kv as vllm_kv
from dora_pipe.producers.engines.vllm import lora as vllm_lora
from dora_pipe.producers.engines.vllm import routes as vllm_routes
from dora_pipe.producers.engines.vllm import weights as vllm_weights
from dora_pipe.producers.engines.vllm.base import REASONS, VllmEngineBase, VllmRequest
from dora_pipe.producers.engines.vllm.core import VllmSettings
from dora_pipe.producers.engines.vllm.kv_files import array_of
from dora_pipe.producers.engines.vllm.wire import SEED_MASK, extra_args
from dora_pipe.store.vocabulary import unassigned_ids


class VllmEngine(VllmEngineBase):
    """See the module. It has the weights of the model's directory if that holds any, else random
    ones: `load` some.

    Example::

        engine = VllmEngine(Path("model"), slots=64, context_tokens=1024, threads=1)
        engine.load(Path("weights.safetensors"), version=3, digest=digest)
    """

    name = "vllm"

    def __init__(
        self,
        model_dir: Path,
        *,
        slots: int,
        context_tokens: int,
        threads: int,
        settings: VllmSettings | None = None,
        decode: Decode | None = None,
        clock: Clock | None = None,
        lora_rank: int = 0,
        versions_resident: int = 1,
        routes: bool = False,
    ) -> None:
        """With `lora_rank`, up to `versions_resident` versions live beside each other, as adapters
        of that rank on one base. With `routes` requests may ask through which experts their tokens
        went.

        Raises ConfigError where vLLM is not installed or for sizes that cannot be, PolicyError for
        a model that vLLM does not take, ResourceError.
        """
        check_sizes(slots, context_tokens, threads)
        vllm_core.prepare(threads)
        settings = settings or VllmSettings()
        vllm_lora.check_kernels(lora_rank, vllm_core.device_name(), settings.dtype)
        vllm_weights.register()
        self.version = vllm_core.version()
        self.device, self.dtype = vllm_core.device_name(), str(settings.dtype)
        self._shapes, self._tied, self._further = vllm_weights.expected_tensors(model_dir)
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
        host = vllm_lora.LocalHost(self._core, self._shapes, rank=lora_rank) if lora_rank else None
        unassigned = unassigned_ids(model_dir)
        self._sampler = vllm_core.install_sampler(self._core, unassigned)
        self._routes = vllm_routes.install(self._core, self._sampler) if routes else None
        self._tasks = self._core.get_supported_tasks()
        super().__init__(
            slots=slots,
            context_tokens=context_tokens,
            vocabulary=int(self._core.model_config.get_vocab_size()),
            decode=decode,
            clock=clock,
            versions=vllm_lora.LoraVersions(host, most=versions_resident),
            settings=settings,
            unassigned=bool(unassigned),
        )
        self._layout = self._caches.facts.layout
        self.declares |= ({KV_EXPORT} if self._layout else set()) | ({ROUTES} if routes else set())
        self._warm_up(str(self._core.get_weight_version()))
        self._begin_with(model_dir)

    @property
    def kv_tokens(self) -> int:
        """Tokens that vLLM's KV cache has room for, at most those of all slots."""
        cache = self._core.vllm_config.cache_config
        room = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        return min(room, self.slots * self.context_tokens)

    def step(self) -> list[EngineEvent]:
        """See the port; a prompt beyond STEP_TOKENS_MAX is prefilled over several steps."""
        if not self._rows:
            return []
        self._sampler.ask(any(not row.request.params.plain for row in self._rows.values()))
        with self._caches.loading():
            answer = self._core.engine_core.get_output()
        outputs = {one.request_id: one for one in answer.outputs}
        events: list[EngineEvent] = []
        for row in list(self._rows.values()):
            self._note_routes(row)
            output = outputs.get(row.stay)
            if output is not None:
                self._check_weights(row, answer.weight_version)
                events += row.events(self._advance(row, output))
        return events

    def close(self) -> None:
        """Let go of the memory; the engine cannot be used any more."""
        super().close()
        self._core.engine_core.shutdown()

    def _begin_with(self, model_dir: Path) -> None:
        """Have the weights of the model's directory, if it holds any."""
        files = weight_files(model_dir)
        if files:
            expected = self._shapes, self._tied, self._further
            opened, digest = open_directory(files, model_dir, *expected)
            self._replace(opened, 0, digest)
            self._versions.base = digest

    def _note_routes(self, row: VllmRequest) -> None:
        """Take the experts of what the last step computed of a row, a part of its prompt too."""
        if self._routes is not None and row.request.params.routes:
            found = self._routes.found.get(row.stay)
            if found is not None:
                row.routes.note(*found)

    def _advance(self, row: VllmRequest, output: Any) -> StopReason | None:
        """Take what vLLM sampled for a row; why the row ends, which then has left."""
        tokens, finished = output.new_token_ids, output.finish_reason
        prefilled = output.prefill_stats  # of the first output of a stay
        if prefilled is not None:
            self._computed += prefilled.num_computed_tokens
            self._reused += prefilled.num_local_cached_tokens
        reason: StopReason | None = None
        if tokens:
            logprobs = output.new_logprobs.logprobs[:, 0].tolist()
            reason = self._extend(row, tokens, logprobs, self._sampler_logprobs(row, logprobs))
        if reason is None and finished is not None:
            reason = REASONS.get(str(finished), "error")
        if reason is not None:
            if finished is None:
                self._interrupt(row)
            del self._rows[row.request.request]
        return reason

    def _sampler_logprobs(self, row: VllmRequest, logprobs: list[float]) -> list[float]:
        params = row.request.params
        if params.temperature == 0:
            return [0.0] * len(logprobs)
        if params.plain:
            return logprobs
        return [self._sampler.drawn[row.stay]] * len(logprobs)

    def _check_weights(self, row: VllmRequest, found: str | None) -> None:
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

    def _go_on(self, row: VllmRequest) -> None:
        """Begin a stay in vLLM."""
        self._stays += 1
        row.stay, row.cached = f"{row.request.request}/{self._stays}", 0
        version = self._versions.of(row.request)
        row.adapter, row.weights = version.number, version.digest
        prompt: dict[str, Any] = {"prompt_token_ids": row.sequence}
        prompt["cache_salt"] = self._salt(version.name)
        if row.kv is not None:
            self._caches.offer(row.stay, row.kv)
            row.kv, prompt["cache_salt"] = None, row.stay  # it has its own numbers, nobody else's
        self._share(row, prompt["cache_salt"])
        request = self._core.input_processor.process_inputs(
            row.stay,
            prompt,
            self._params(row),
            lora_request=version.adapter,
            supported_tasks=self._tasks,
        )
        self._core.engine_core.add_request(request)

    def _params(self, row: VllmRequest) -> Any:
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
            # Nobody kept the experts of what vLLM finds in its cache.
            skip_reading_prefix_cache=row.unrouted,
            **extra_args(params),
        )

    def _interrupt(self, row: VllmRequest) -> None:
        """End a stay in vLLM."""
        self._core.engine_core.abort_requests([row.stay])

    def _let_go(self, row: VllmRequest) -> None:
        self._interrupt(row)
        del self._rows[row.request.request]

    def _kv_of(self, row: VllmRequest) -> Kv | None:
        return self._caches.copied(row.stay, row.length - 1, row.weights)

    def _kv_array(self, tokens: int) -> tuple[str, str, tuple[int, ...]]:
        return array_of(self._caches.facts, tokens)

    def _fall_asleep(self) -> None:
        self._core.sleep(vllm_core.SLEEP_LEVEL)

    def _wake(self, tag: str) -> None:
        self._core.wake_up([tag])

    def _read(self, weights: Path, version: int, digest: str) -> OpenWeights:
        expected = self._shapes, self._tied, self._further
        return open_weights(weights, version, digest, *expected)

    def _transfer(self, held: OpenWeights, digest: str, label: str) -> None:
        vllm_weights.transfer(self._core, held, label)
