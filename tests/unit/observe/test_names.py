"""Tests of span names in the page, the code and OpenTelemetry."""

from __future__ import annotations

from opentelemetry.semconv._incubating.attributes import (
    gen_ai_attributes,
    host_attributes,
    messaging_attributes,
    service_attributes,
)
from opentelemetry.semconv.attributes import error_attributes

from dora_pipe.observe.traces import names
from tests.support.tidy import ROOT
from tests.support.traces_page import PAGE, attributes, stages

MODULES = (
    *(gen_ai_attributes, messaging_attributes),
    *(host_attributes, service_attributes, error_attributes),
)


def test_names_of_the_conventions_are_those_of_the_conventions() -> None:
    there = {str(value) for module in MODULES for value in vars(module).values()}
    assert {key for key in attributes() if not key.startswith("dora.")} <= there


def test_the_page_has_every_attribute_of_the_code_and_no_other() -> None:
    ours = {value for name, value in vars(names).items() if name.isupper() and name != "KINDS"}
    assert set(attributes()) == ours


def test_every_attribute_stands_on_a_stage_or_on_the_resource() -> None:
    used = {key for stage in stages().values() for key in stage.attributes}
    assert used <= set(attributes())
    assert set(attributes()) - used == {"service.name", "service.version", "dora.run"}


def test_every_parent_is_a_stage_and_every_kind_is_that_of_the_code() -> None:
    assert {stage.parent for stage in stages().values()} <= {*stages(), ""}
    assert [name for name, stage in stages().items() if not stage.parent] == ["group", "step"]
    kinds = {name: stage.kind for name, stage in stages().items() if stage.kind != "internal"}
    assert kinds == names.KINDS


def test_the_page_shows_the_tree_that_the_code_draws() -> None:
    tree = (ROOT / "tests" / "golden" / "traces" / "group.txt").read_text()
    assert tree in PAGE.read_text()
