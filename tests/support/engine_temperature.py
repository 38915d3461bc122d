"""What the contract of engines says of the temperature of log-probs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.engine_contract import Subject, request, run


def check_logprobs_are_at_the_temperature_asked_for(subject: Subject) -> None:
    """Without truncation they are those of what was drawn from, in company of others that are not.

    The tokens do not depend on it.
    """
    hot: dict[str, Any] = {"temperature": 0.7, "max_tokens": 20}
    wanted = [
        request("raw", [5, 6, 7], seed=3, **hot),
        request("tempered", [5, 6, 7], seed=3, logprob_temperature=0.7, **hot),
        request("cut", [5, 6, 7], seed=3, logprob_temperature=0.7, top_k=4, **hot),
        request("plain", [5, 6, 7], seed=3, max_tokens=20),
    ]
    found = run(subject.open(slots=4), wanted)
    raw, tempered, cut, plain = (found[one.request] for one in wanted)
    assert plain.logprobs == plain.sampler_logprobs
    near = 1e-5 + subject.rounding
    assert np.allclose(tempered.logprobs, tempered.sampler_logprobs, atol=near)
    if not subject.coarse:
        assert tempered.tokens == raw.tokens
        assert np.allclose(tempered.logprobs, raw.sampler_logprobs, atol=near)
    if subject.samples:
        assert not np.allclose(raw.logprobs, raw.sampler_logprobs, atol=0.05)
        assert all(a < b for a, b in zip(cut.logprobs, cut.sampler_logprobs, strict=True))
