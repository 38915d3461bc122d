"""Start vLLM's OpenAI-compatible server for the vllm engine.

    VLLM_API_KEY=... python -m dora_pipe.producers.engines.vllm.serve MODEL --max-num-seqs 64 \\
        --max-model-len 1024 --port 8000

The worker loads the weights. A guard requires the API key on every path: vLLM alone leaves its
weight endpoints open. With `--lifeline` the server exits when its stdin closes.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from dora_pipe.config.workers import Vllm
from dora_pipe.core.errors import ConfigError, DoraError
from dora_pipe.producers.engines.vllm import core as vllm_core
from dora_pipe.producers.engines.vllm import lora as vllm_lora
from dora_pipe.producers.engines.vllm.options import check_args, command_words, option_of

KEY_VARIABLE: Final = "VLLM_API_KEY"

LORA_ENVIRONMENT: Final = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"  # /v1/load_lora_adapter, /v1/unload_lora_adapter
}
"""Environment for adapters."""

STREAM_TOKENS: Final = 8
"""Tokens per chunk after the first; a chunk costs about 200 us."""

END_S: Final = 10.0
"""Time from the end of stdin to SIGKILL."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware that requires the key."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            start = {"type": "http.response.start", "status": 401, "headers": []}
            await send(start)
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: Scope) -> bool:
        shown = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(shown, self._wanted)


def main(words: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, or with `--lifeline` the end of stdin; return the exit code."""
    asked = _parser().parse_args(words)
    if not os.environ.get(KEY_VARIABLE):
        sys.stderr.write(f"error: {KEY_VARIABLE} is not set\n")
        return ConfigError.exit_code
    if asked.lifeline:
        threading.Thread(target=_end_with_stdin, name="lifeline", daemon=True).start()
    try:
        _serve(asked)
    except DoraError as error:
        _report(asked, error=error.message, exit_code=error.exit_code)
        sys.stderr.write(f"error: {error.message}\n")
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dora_pipe.producers.engines.vllm.serve",
        description="vLLM for a vllm worker",
    )
    parser.add_argument("model", type=Path, help="a model directory; its weights are not read")
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="port; 0: any free port")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kv-cache-gb", type=float, default=0.0)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="tensor parallel size")
    parser.add_argument(
        "--pipeline-parallel-size", type=int, default=1, help="pipeline parallel size"
    )
    parser.add_argument("--graphs", action="store_true", help="use compiled graphs (GPU)")
    parser.add_argument("--lora-rank", type=int, default=0, help="maximum rank of adapters")
    parser.add_argument(
        "--max-resident-versions", type=int, default=1, help="maximum resident adapters"
    )
    parser.add_argument("--sleep", action="store_true", help="release GPU memory on request")
    parser.add_argument("--args", type=json.loads, default={}, help="other vLLM options as JSON")
    parser.add_argument("--lifeline", action="store_true", help="exit when stdin closes")
    parser.add_argument("--report", type=int, default=-1, help="file descriptor for one JSON line")
    return parser


def _serve(asked: argparse.Namespace) -> None:
    check_args(asked.args)
    _check_adapters(asked)
    vllm_core.prepare(asked.threads, LORA_ENVIRONMENT if asked.lora_rank else {})
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import create_server_socket
    from vllm.utils.system_utils import decorate_logs

    arguments = _arguments(asked)
    socket = create_server_socket((asked.host, asked.port), reuse_port=False)
    arguments.port = socket.getsockname()[1]
    address = f"http://{asked.host}:{arguments.port}"
    sys.stderr.write(f"vLLM serves at {address}\n")
    _report(asked, port=arguments.port)
    decorate_logs("vllm")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one connection per stream
    asyncio.run(run_server_worker(address, socket, arguments))


def _check_adapters(asked: argparse.Namespace) -> None:
    most = vllm_lora.RANKS[-1]
    if not 0 <= asked.lora_rank <= most:
        raise ConfigError(f"vLLM hosts adapters of ranks up to {most}, not {asked.lora_rank}")
    if asked.max_resident_versions < 1:
        raise ConfigError("a server needs room for at least one version")


def _arguments(asked: argparse.Namespace) -> argparse.Namespace:
    """Return vLLM's arguments. Raises PolicyError for an unsupported model, which vLLM would not
    explain."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = Vllm(
        dtype=asked.dtype,
        enforce_eager=not asked.graphs,
        kv_cache_gb=asked.kv_cache_gb,
        tensor_parallel_size=asked.tensor_parallel_size,
        pipeline_parallel_size=asked.pipeline_parallel_size,
        args=asked.args,
    )
    arguments: argparse.Namespace = vllm_parser().parse_args(command_words(asked.args))
    given = {option_of(name) for name in asked.args}
    engine = vllm_core.arguments(
        asked.model,
        settings,
        sleep=asked.sleep,
        slots=asked.max_num_seqs,
        context_tokens=asked.max_model_len,
    )
    from dora_pipe.producers.engines.vllm import kv as vllm_kv
    from dora_pipe.producers.engines.vllm.weights import BACKEND

    device = vllm_core.device_name()
    vllm_lora.check_kernels(asked.lora_rank, device, asked.dtype)
    adapters = vllm_lora.arguments(asked.lora_rank, asked.max_resident_versions, device=device)
    ours = {
        **engine,
        **adapters,
        **(vllm_kv.arguments() if asked.pipeline_parallel_size == 1 else {}),
        "tokens_only": True,
        "generation_config": "vllm",
        "served_model_name": ["policy"],
        "stream_interval": STREAM_TOKENS,
        "enable_prompt_tokens_details": True,  # prefix cache hits
        "worker_extension_cls": "dora_pipe.producers.engines.vllm.extension.Extension",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "middleware": [f"{__spec__.name if __spec__ else __name__}.Guard"],
        "host": asked.host,
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
        "uvicorn_log_level": "warning",
    }
    for name, value in ours.items():
        assert hasattr(arguments, name), name
        if name not in given:
            setattr(arguments, name, value)
    try:
        model = AsyncEngineArgs.from_cli_args(arguments).create_model_config()
        vllm_core.check_parts(model, settings)
        vllm_core.check_kernels(model, adapters=asked.lora_rank > 0)
    except vllm_core.REFUSALS as error:
        raise vllm_core.refusal(asked.model, error) from error
    return arguments


def vllm_parser() -> Any:
    """Return vLLM's parser, which raises ConfigError. An abbreviation would evade `check_args`."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    parser.error = _unknown_option
    return parser


def _unknown_option(message: str) -> NoReturn:
    raise ConfigError(f"workers.vllm.args: vLLM says {message}", hint="vllm serve --help=all")


def _report(asked: argparse.Namespace, **fields: object) -> None:
    if asked.report >= 0:
        os.write(asked.report, json.dumps(fields).encode() + b"\n")
        os.close(asked.report)
        asked.report = -1


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
