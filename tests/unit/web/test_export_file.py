"""Tests of the single-file export: joined scripts, restrictive policy."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import msgspec

from dora_pipe.observe.web.export import MODULES, file_of, joined
from dora_pipe.observe.web.server import static_files

HOSTILE = "</script><script>alert(1)</script><!-- \u2028"


def test_every_module_is_joined_once() -> None:
    static = static_files()
    assert set(MODULES) == {name for name in static if name.endswith(".js")}


def test_modules_are_joined_behind_those_that_they_need() -> None:
    static = static_files()
    for index, name in enumerate(MODULES):
        needed = re.findall(r'from "\./([^"]+)"', static[name].decode())
        assert set(needed) <= set(MODULES[:index]), name


def test_joined_script_has_no_import_or_export_left_and_no_name_twice() -> None:
    script = joined(static_files())
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?function (\w+)", script, re.MULTILINE)
    for line in re.findall(r"^(?:const|let) (.+)", script, re.MULTILINE):
        names += re.findall(r"(?:^|, )(\w+) = ", line)
    assert len(names) > 50
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_policy_of_the_file_allows_its_own_script_and_style_and_nothing_else() -> None:
    page = file_of(b"{}").decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'")
    for tag in ("style", 'script type="module"'):
        match = re.search(rf"<{tag}>(.*?)</{tag.split()[0]}>", page, re.DOTALL)
        assert match is not None
        digest = base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "/static/" not in page


def test_answers_cannot_end_the_element_they_stand_in() -> None:
    page = file_of(msgspec.json.encode({"pages": {"x": HOSTILE}})).decode()
    inside = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(inside) == {"pages": {"x": HOSTILE}}
    assert page.count("<script") == 2


def test_pages_name_no_other_place() -> None:
    for name, body in static_files().items():
        matches = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", body.decode())
        assert set(matches) <= {"http://www.w3.org"}, name
