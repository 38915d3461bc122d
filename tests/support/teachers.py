"""Teachers for tests: hashes, and an endpoint that scores with a model."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dora_pipe.consumers.teachers.teacher import Row, Scores
from tests.support.judge_endpoint import Answer, Endpoint, judge_endpoint


class HashTeacher:
    """Teacher whose log-probs hash the ids and, with `forgets`, the number of calls."""

    waits_for = ""

    def __init__(self, *, forgets: bool = False) -> None:
        self.repeatable = not forgets
        self.asked = 0

    def name(self) -> str:
        return "hash"

    def logprobs(self, rows: Sequence[Row]) -> Scores:
        self.asked += 1
        yield
        return [
            [self._of(ids[: index + 1]) for index in range(1, len(ids)) if mask[index]]
            for ids, mask in rows
        ]

    def _of(self, ids: Sequence[int]) -> float:
        salt = "" if self.repeatable else str(self.asked)
        return -hashlib.sha256(f"{salt}{list(ids)}".encode()).digest()[0] / 64


def own_logprobs(directory: Path, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    read: Any = AutoModelForCausalLM.from_pretrained
    network = read(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([list(ids)])).logits[0].double() / temperature
    probabilities = torch.log_softmax(logits, dim=-1)
    results: list[float] = [
        float(probabilities[index, token_id]) for index, token_id in enumerate(ids[1:])
    ]
    return results


@contextmanager
def teacher_endpoint(
    directory: Path, *, fails: int = 0, delay_s: float = 0.0
) -> Iterator[Endpoint]:
    """Answer like vLLM with this model; the first `fails` requests get 503."""
    read: Any = AutoModelForCausalLM.from_pretrained
    network = read(directory, dtype=torch.float32)
    alone = threading.Lock()

    def prompt_logprobs(ids: list[int]) -> list[dict[str, Any] | None]:
        with alone, torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0]
        probabilities = torch.log_softmax(logits, dim=-1)
        values = [float(probabilities[index, token_id]) for index, token_id in enumerate(ids[1:])]
        assert all(map(math.isfinite, values))
        return [
            None,
            *(
                {str(token_id): {"logprob": value, "rank": 1}}
                for token_id, value in zip(ids[1:], values, strict=True)
            ),
        ]

    def answer(number: int, body: dict[str, Any]) -> Answer:
        if number < fails:
            return 503, b"busy"
        choices = [
            {"index": index, "text": "x", "prompt_logprobs": prompt_logprobs(ids)}
            for index, ids in enumerate(body["prompt"])
        ]
        return 200, json.dumps({"choices": choices}).encode()

    opened: AbstractContextManager[Endpoint] = judge_endpoint(
        answer, delay_s, asked=lambda body: body
    )
    with opened as endpoint:
        yield endpoint
