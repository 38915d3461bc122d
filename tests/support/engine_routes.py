"""Runner of requests on an engine that returns routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dora_pipe.producers.engines.engine import Engine, EngineRequest, TokensSampled
from dora_pipe.schemas.routes import GrowingRoutes, Routes
from tests.support.engine_contract import request


def routed_run(
    engine: Engine, requests: Sequence[EngineRequest]
) -> dict[str, tuple[list[int], Routes]]:
    for req in requests:
        engine.add(req)
    tokens: dict[str, list[int]] = {request.request: [] for request in requests}
    routes = {request.request: GrowingRoutes() for request in requests}
    given = {request.request: len(request.token_ids) - request.routed for request in requests}
    while engine.active:
        for event in engine.step():
            if isinstance(event, TokensSampled):
                tokens[event.request] += event.token_ids
                length = given[event.request] + len(tokens[event.request])
                routes[event.request].add(event.routes, length)
    results = {}
    for name, growing in routes.items():
        between = growing.between(0, growing.known)
        if between is not None:
            results[name] = (tokens[name], between)
    return results


def same_experts(folder: Path, ids: list[int], routes: Routes) -> bool:
    from dora_pipe.producers.engines.torch.engine import TorchEngine

    own = TorchEngine.open(folder, slots=1, context_tokens=128, threads=1, routes=True)
    _, theirs = routed_run(own, [request("w", ids, max_tokens=1, routes=True)])["w"]
    ours, rest = (np.sort(entry.choices[1 : len(ids)], -1) for entry in (routes, theirs))
    return np.array_equal(ours, rest)
