"""Imports vLLM, which takes seconds of CPU, for a process that forks workers; decides nothing."""

from dora_pipe.producers.engines.vllm import core as vllm_core
from dora_pipe.producers.engines.vllm import engine as vllm_engine

__all__ = ["LLMEngine", "vllm_engine"]

vllm_core.prepare(threads=1)

from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402 - its environment comes first
