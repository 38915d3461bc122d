"""What only a vLLM server can get wrong with several versions of a LoRA policy.

The tests of vLLM in process that ask no more than the port and the model are asked again here.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.vllm.client import VllmServerClient
from dora_pipe.producers.engines.vllm.lora import FOLDER_PREFIX
from dora_pipe.store.adapters import read_adapter, write_peft
from tests.contract.test_engine_vllm_lora import (
    Lora,
    published,
    test_adapter_that_vllm_computes_otherwise_breaks_the_promise,
    test_other_base_takes_all_versions_away_and_only_while_nothing_runs,
    test_prompts_that_are_cached_under_one_version_are_not_used_by_another,
    test_rows_of_the_base_meet_no_adapter_that_is_or_was_beside_them,
    under,
)
from tests.support.adapters import RANK
from tests.support.engine_contract import request, run
from tests.support.vllm_engines import need_vllm
from tests.support.vllm_servers import running_server, server_opener

__all__ = [
    "test_adapter_that_vllm_computes_otherwise_breaks_the_promise",
    "test_other_base_takes_all_versions_away_and_only_while_nothing_runs",
    "test_prompts_that_are_cached_under_one_version_are_not_used_by_another",
    "test_rows_of_the_base_meet_no_adapter_that_is_or_was_beside_them",
]


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lora]:
    """The server, under the name by which the tests of vLLM in process ask for theirs."""
    need_vllm()
    made, merged = published(tmp_path_factory.mktemp("vllm_server_lora"))
    with server_opener(RANK) as open_engine:
        yield Lora(policies=list(made.policies), merged=merged, open=open_engine)


def adapters() -> list[str]:
    """The names that the server's front end knows."""
    return sorted(VllmServerClient(running_server(lora_rank=RANK)[0].address, None).adapters())


def test_adapter_that_a_server_has_loaded_lies_nowhere_and_a_dropped_one_is_forgotten(
    lora: Lora,
) -> None:
    lying = set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))
    engine = lora.hosting(0, 1, 2)
    assert set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")) <= lying
    names = [f"{version}:{digest[:16]}" for version, (_, digest) in enumerate(lora.policies)]
    assert adapters() == names[:3]
    engine.drop(1)
    engine.drop(0)
    assert adapters() == names[2:3]
    assert len(engine._server.rpc("dora_drop_all")["numbers"]) == 1


def test_adapter_that_a_servers_vllm_refuses_is_one_line_and_changes_nothing(
    lora: Lora, tmp_path: Path
) -> None:
    engine = lora.hosting(1)
    path, digest = lora.policies[2]
    wide = read_adapter(path, digest=digest)
    pairs = {name: (a.repeat(4, 0), b.repeat(4, 1)) for name, (a, b) in wide.pairs.items()}
    write_peft(tmp_path / "wide", replace(wide, pairs=pairs))
    rpc = engine._server.rpc

    def other_folder(method: str, *words: str) -> dict[str, object]:
        found: dict[str, object] = rpc(method, *words)
        return {"folder": str(tmp_path / "wide")} if method == "dora_write" else found

    engine._server.rpc = other_folder
    with pytest.raises(PolicyError, match=r"vLLM cannot load this adapter: .*rank"):
        lora.load(engine, 2)
    engine._server.rpc = rpc
    one = under(1)
    lora.assert_is(1, one, run(engine, [one])[one.request])


def test_server_outlives_requests_that_are_let_go_as_their_version_is_dropped(lora: Lora) -> None:
    engine, chance = lora.hosting(0, 1, 2), random.Random(5)
    for turn in range(40):
        gone = 1 + turn % 2
        for number in range(6):
            one = request(f"{turn}-{number}", [5, 6, 7, number], max_tokens=40)
            engine.add(replace(one, version=gone if number % 2 else 0))
        for _ in range(chance.randrange(3)):
            engine.step()
        for number in range(6):
            engine.cancel(f"{turn}-{number}")
        engine.drop(gone)
        lora.load(engine, gone)
    one = under(2)
    lora.assert_is(2, one, run(engine, [one])[one.request])
