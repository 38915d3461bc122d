"""Tests that run every code block of the pages."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.example import SybilFailure
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from dora_pipe.config import model
from dora_pipe.config.describe import toml
from dora_pipe.config.load import load_config
from dora_pipe.config.several import sections_of
from dora_pipe.producers.tasks.registry import open_task, rows_digest
from tests.support import pages
from tests.support.adapters_of_others import installed
from tests.support.cli_words import parsed
from tests.support.command_line import Call
from tests.support.page_commands import PLAIN, problem, refusal
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.tidy import ROOT

NOT_RUN = {
    'os.environ["DORA_PIPE_ROW"]': "test_agents_page.py runs this program",
    "PeftModel.from_pretrained": "peft is no dependency of the tests",
}
"""Reason why a block with a fragment is not executed."""

SHOWN_ONLY = {"", "text", "properties", "{toctree}"}
"""Languages of blocks that nobody types."""

READ = frozenset(
    {
        "show",
        "why",
        "top",
        "sql",
        "audit",
        "diff",
        "tensorboard",
        "traces",
        "parquet",
        "prune",
        "topics",
        "read",
        "config",
    }
)
"""Commands that read a run and need no torch; tests/slow/test_pages_torch.py runs the others."""

NO_SUCH_RUN = frozenset({"forged"})
"""Runs of pages that are damaged on purpose."""


def _open(config: model.Config) -> None:
    for task in (task for *_, task in sections_of(config) if isinstance(task, model.Task)):
        kind = task.kind.partition(":")[0]
        if kind in ("gymnasium", "reasoning-gym") and installed(kind):
            assert rows_digest(open_task(task).rows("train"), "train")[1] > 0


@dataclass
class Stage:
    folder: Path
    call: Call
    printed: dict[tuple[str, ...], tuple[int, str, str]]
    """Exit code, output and errors of the commands that ran."""

    def toml(self, example: Example) -> str:
        given = tomllib.loads(example.parsed)
        basic = tomllib.loads((ROOT / "config" / "basic.toml").read_text())
        return self.resolve({**PLAIN, **given}) and self.resolve({**basic, **given})

    def resolve(self, table: dict[str, Any]) -> str:
        for section in ("run", "model"):
            table[section] = {**PLAIN[section], **table[section]}
        given = table["task"] if isinstance(table["task"], list) else [table["task"]]
        data = {"kind": "dataset", "data": "rows.jsonl", "reward": "exact"}
        table["task"] = [task if "kind" in task else {**data, **task} for task in given]
        file = self.folder / "block.toml"
        file.write_text("".join(f"{name} = {toml(keys)}\n" for name, keys in table.items()))
        return refusal(lambda: _open(load_config(file, ())))

    def json(self, example: Example) -> str:
        for line in example.parsed.splitlines():
            json.loads(line)
        return ""

    def sql(self, example: Example) -> str:
        code, _, error = self.call("sql", "recorded", example.parsed)
        return error if code else ""

    def console(self, example: Example) -> str:
        return "\n".join(filter(None, map(self.line, pages.typed(example.parsed))))

    def line(self, typed: pages.Typed) -> str:
        for words in typed.commands():
            actual_problem = problem(words, self.folder)
            if actual_problem:
                matches = [pages.matches(line, actual_problem.splitlines()) for line in typed.shown]
                return "" if matches and all(matches) else f"{typed.line}: {actual_problem}"
            if Path(words[0]).name == "dora-pipe" and self.reads(words[1:]):
                code, out, error = self.read(words[1:])
                missing = pages.missing_lines(typed.shown, out)
                if code or missing:
                    return f"{typed.line}: exit code {code} {error}; not printed: {missing}"
        return ""

    def reads(self, words: list[str]) -> bool:
        name, params = parsed(words)
        ends = not params.get("follow") and not params.get("delete")
        local = not any("://" in word for word in words)
        return name in READ and ends and local and params.get("run") not in NO_SUCH_RUN

    def read(self, words: list[str]) -> tuple[int, str, str]:
        name, params = parsed(words)
        for run in filter(None, (params.get("run"), params.get("other"))):
            if not (self.folder / "runs" / run).exists():
                (self.folder / "runs" / run).symlink_to("recorded")
        words = pages.within(
            words, group="g0000000010", trajectory="g0000000010-001", last=STEPS - 1
        )
        if name == "top" and "--once" not in words:
            words.append("--once")
        if tuple(words) not in self.printed:
            self.printed[tuple(words)] = self.call(*words)
        return self.printed[tuple(words)]


@pytest.fixture(scope="module")
def folder(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    recorded.copy(folder / "runs" / "recorded")
    (folder / "tests").symlink_to(ROOT / "tests")
    (folder / "plain.toml").write_text("".join(f"{k} = {toml(v)}\n" for k, v in PLAIN.items()))
    return folder


@pytest.fixture(scope="module")
def printed() -> dict[tuple[str, ...], tuple[int, str, str]]:
    return {}


@pytest.fixture
def stage(
    folder: Path,
    call: Call,
    printed: dict[tuple[str, ...], tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Stage:
    monkeypatch.chdir(folder)
    return Stage(folder, call, printed)


@pytest.mark.parametrize("page", pages.PAGES)
def test_blocks_of_a_page_run(page: str, stage: Stage) -> None:
    evaluators = {name: getattr(stage, name) for name in ("toml", "json", "sql", "console")}
    parsers = [CodeBlockParser(name, evaluator) for name, evaluator in evaluators.items()]
    document = Sybil([PythonCodeBlockParser(), *parsers]).parse(ROOT / page)
    failed = []
    for example in document.examples():
        if not any(fragment in document.text[example.start : example.end] for fragment in NOT_RUN):
            try:
                example.evaluate()
            except SybilFailure as failure:
                failed.append(f"{page}:{example.line}: {failure.result}")
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)


def test_every_block_has_a_language_that_is_run() -> None:
    run = {"python", "toml", "json", "sql", "console"}
    every = [block for page in pages.PAGES for block in pages.blocks(page)]
    assert {block.language for block in every} <= run | SHOWN_ONLY
    typed = [
        block for block in every if block.language in SHOWN_ONLY and "dora-pipe " in block.text
    ]
    assert typed == []


@pytest.mark.parametrize(("fragment", "reason"), NOT_RUN.items())
def test_block_that_is_not_run_is_there(fragment: str, reason: str) -> None:
    texts = [block.text for page in pages.PAGES for block in pages.blocks(page)]
    assert any(fragment in text for text in texts)
    pytest.skip(reason)
