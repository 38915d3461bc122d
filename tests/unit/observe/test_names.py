"""The table of names is whole, and what it takes from OpenTelemetry is really there."""

from __future__ import annotations

import pytest
from opentelemetry.semconv._incubating.attributes import (
    gen_ai_attributes,
    host_attributes,
    messaging_attributes,
    service_attributes,
)
from opentelemetry.semconv.attributes import error_attributes

from dora_pipe.observe.traces.names import ATTRIBUTES, STAGES
from tests.support.traces_page import PAGE, page

MODULES = {
    "gen_ai": (gen_ai_attributes,),
    "messaging": (messaging_attributes,),
    "general": (host_attributes, service_attributes, error_attributes),
}


@pytest.mark.parametrize("source", MODULES)
def test_names_of_the_conventions_are_those_of_the_conventions(source: str) -> None:
    there = {
        value
        for module in MODULES[source]
        for value in vars(module).values()
        if isinstance(value, str)
    }
    ours = {key for key, one in ATTRIBUTES.items() if one.source == source}
    assert ours
    assert ours - there == set()


def test_every_attribute_stands_on_a_stage_or_on_the_resource() -> None:
    used = {key for one in STAGES.values() for key in one.attributes}
    assert used <= set(ATTRIBUTES)
    assert set(ATTRIBUTES) - used == {"service.name", "service.version", "dora.run"}


def test_every_parent_is_a_stage() -> None:
    assert {one.parent for one in STAGES.values()} <= {*STAGES, ""}
    assert [name for name, one in STAGES.items() if not one.parent] == ["group", "step"]


def test_the_page_is_what_the_code_writes() -> None:
    assert PAGE.read_text() == page(), (
        "run: python -m tests.support.traces_page > docs/reference/traces.md"
    )
