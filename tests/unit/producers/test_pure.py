"""Tests of the imports of the worker's machine: no clock, random, thread, loop or bus."""

import ast

import pytest

from tests.support.tidy import ROOT, module_imports

PURE = ("effects", "machine", "request", "request_table", "requests", "status")
FORBIDDEN = {"asyncio", "random", "secrets", "socket", "threading", "time", "uuid", "os"}


@pytest.mark.parametrize("module", PURE)
def test_machine_touches_nothing_that_differs_between_two_runs(module: str) -> None:
    tree = ast.parse((ROOT / "producers/worker" / f"{module}.py").read_text())
    names = {name for _, result in module_imports(tree) for name in result}
    assert names
    buses = {name for name in names if name.startswith("dora_pipe.bus")}
    assert not names & FORBIDDEN
    assert {name for name in buses if not name.startswith("dora_pipe.bus.bus")} == set()
