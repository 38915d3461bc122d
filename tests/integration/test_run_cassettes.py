"""A cassette made of a log alone: what stands in records as tokens answers calls as it was said.

Method: records are put together by the very parts that a worker has, without a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dora_pipe.audit.cassette_diff import answers_by_key, compare
from dora_pipe.audit.run_cassette import NO_ANSWER, NotReadable, recorded_of
from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from dora_pipe.config.several import without_cassettes
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.launch.cassettes import with_cassettes
from dora_pipe.launch.examples import write_word_tokenizer
from dora_pipe.producers.chat.chat import Chat, ChatOptions
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calculator import CHAT_TEMPLATE, ROLES, WORDS, CalculatorTask
from dora_pipe.producers.tasks.calls import RowDescribed, TaskFacts
from dora_pipe.producers.tasks.cassette import CassetteMiss, Recorded, row_digest
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.messages import tool_schema
from dora_pipe.producers.tasks.port import Environment, Observation, Row, Task, Tool, Turn
from dora_pipe.producers.tasks.registry import check_cassette
from dora_pipe.producers.tasks.tape import Cassette, EpisodeTape
from dora_pipe.producers.tasks.taped_environment import open_taped
from dora_pipe.producers.tasks.tools import ToolEnvironment
from dora_pipe.schemas.trajectory import Segment, Trajectory
from tests.support.batches import make_trajectory
from tests.support.tidy import ROOT

NAME = "g0000000000-003"
ROW = {"numbers": [7, 5, 4]}
Piece = tuple[str, Sequence[int]]


def record_of(pieces: Sequence[Piece], **meta: object) -> Trajectory:
    """A trajectory of a prompt, turns and answers."""
    made = make_trajectory(NAME, reward=1.0)
    segments, ids = [], list[int]()
    for at, (kind, tokens) in enumerate(pieces):
        start = len(ids)
        ids += tokens
        segments.append(
            Segment(
                kind=kind,  # type: ignore[arg-type]
                start=start,
                end=len(ids),
                turn=max(0, at - 1) // 2,
                start_ns=10 * at,
                end_ns=10 * at + 5,
                tool="calculator" if kind == "tool" else "",
            )
        )
    changed = msgspec.structs.replace(made.meta, prompt_tokens=len(pieces[0][1]), **meta)
    return replace(made, token_ids=ids, segments=segments, meta=changed)


def kept_in(tmp_path: Path, lines: Sequence[Recorded]) -> Cassette:
    file = CassetteFile(tmp_path / "log.jsonl")
    for line in lines:
        file.append(line)
    return Cassette(file=file, mode="strict", run="later")


def never(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    raise AssertionError("a tool was called")


never.__name__ = "calculator"


class Sums(CalculatorTask):
    def environment(self, row: Row) -> Environment | None:
        raise AssertionError("an environment was asked for")

    def tools(self, row: Row) -> Sequence[Tool]:
        return [never]


def test_calls_of_tools_in_a_log_answer_the_same_calls(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path, WORDS, ROLES)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    words = Tokenizer(tmp_path)
    parser = load_config(ROOT / "examples" / "calculator.toml", ()).task.tool_parser
    chat = Chat.open(tmp_path, words, ChatOptions(tool_parser=parser))
    task = Sums(tools=True)
    messages, tools = task.prompt(ROW), (tool_schema(never),)
    assert not isinstance(messages, str)
    conversation = chat.start(messages, tools)
    pieces: list[Piece] = [("prompt", conversation.prompt_ids)]
    turns: list[Turn] = []
    for said, answer in (("n2 call calculator 7 5", "12"), ("n1 call calculator 12 4", "16")):
        ids = [*words.ids(f"{said} "), 2]
        turns.append(conversation.say(ids))
        call = turns[-1].tool_calls[0]
        told = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": answer}
        pieces += [("model", ids), ("tool", conversation.answered([told]))]
    pieces.append(("model", [*words.ids("answer 16"), 2]))
    row = RowDescribed(
        request="",
        digest=row_digest(ROW),
        environment=False,
        may_have=True,
        messages=tuple(dict(one) for one in messages),
        tools=tools,
    )
    lines = list(recorded_of(record_of(pieces, finish="environment"), row, words, chat, "old"))
    assert [one.answer for one in lines] == [
        {"none": True},
        {"text": "12", "ok": True},
        {"text": "16", "ok": True},
    ]
    assert lines[1].seconds == 5e-9

    async def played() -> list[str]:
        tape = EpisodeTape(kept_in(tmp_path, lines), ROW, by="g0000000099-001", where="row 0")
        assert await open_taped(task, ROW, tape) is None
        world = ToolEnvironment(task, task.tools(ROW), tape)
        seen = [await world.respond(one) for one in turns]  # type: ignore[misc]
        assert tape.use.turns == (0, 1)
        return [str(one.messages[0]["content"]) for one in seen]

    assert asyncio.run(played()) == ["12", "16"]


class Letters:
    """A token is a character, but for a capital, which nothing else is written as."""

    def prompt_ids(self, text: str) -> list[int]:
        return self.ids(text)

    def ids(self, text: str) -> list[int]:
        return [ord(one) for one in text.lower()]

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    full_text = text


class World(Environment):
    def reset(self, row: Row) -> str:
        raise AssertionError("an environment was begun")


class Worlds(Task):
    def environment(self, row: Row) -> Environment:
        raise AssertionError("an environment was asked for")


OWN = RowDescribed(request="", digest=row_digest(ROW), environment=True, may_have=True)


def ids(text: str) -> list[int]:
    return [ord(one) for one in text]


def walk(*answers: str) -> list[Piece]:
    pieces: list[Piece] = [("prompt", ids("begin"))]
    for at, answer in enumerate(answers):
        pieces += [("model", ids(f"go {at}")), ("environment", ids(answer))]
    return pieces


def test_an_environments_log_answers_its_episode_and_gives_its_reward(tmp_path: Path) -> None:
    one = record_of(walk("wall", "door"), finish="environment")
    lines = list(recorded_of(one, OWN, Letters(), None, "old"))
    tape = EpisodeTape(kept_in(tmp_path, lines), ROW, by=NAME, where="row 0")
    task = Worlds()

    async def played() -> tuple[object, list[Observation], object]:
        world = await open_taped(task, ROW, tape)
        assert world is not None
        begun = world.reset(ROW)
        seen = [world.respond(Turn(text=f"go {at}")) for at in range(2)]
        return begun, seen, world.reward("go 1", ())  # type: ignore[return-value]

    begun, seen, reward = asyncio.run(played())
    assert begun == "begin"
    assert [(one.text, one.done) for one in seen] == [("wall", False), ("door", True)]
    assert getattr(reward, "value", None) == 1.0


def test_what_cannot_be_read_back_is_left_out_with_all_that_stands_behind_it() -> None:
    one = record_of(walk("wall", "DOOR", "hall"), finish="environment")
    found: list[Recorded] = []
    with pytest.raises(NotReadable, match=NO_ANSWER):
        found.extend(recorded_of(one, OWN, Letters(), None, "old"))
    lines = recorded_of(one, OWN, Letters(), None, "old")
    assert [next(lines).answer, next(lines).answer["text"]] == [{"text": "begin"}, "wall"]


def test_a_tool_that_answers_otherwise_is_named_and_what_stands_behind_it_is_another_call() -> None:
    def lines(*answers: str) -> list[Recorded]:
        one = record_of(walk(*answers), finish="environment")
        return list(recorded_of(one, OWN, Letters(), None, "old"))

    (same,) = compare(lines("wall", "door"), answers_by_key(lines("wall", "door")))
    assert (same.name, same.compared, same.unknown, same.changed) == ("the environment", 3, 0, [])
    (tool,) = compare(lines("hole", "door"), answers_by_key(lines("wall", "door")))
    assert (tool.compared, tool.unknown) == (2, 1)
    assert [(one.call, one.recorded, one.found) for one in tool.changed] == [
        ("the turn 'go 0'", "wall", "hole")
    ]


def test_an_answer_by_chance_is_the_same_as_any_that_was_recorded() -> None:
    def lines(answer: str, name: str) -> list[Recorded]:
        one = replace(record_of(walk(answer), finish="environment"), trajectory=name)
        return list(recorded_of(one, OWN, Letters(), None, "old"))

    known = answers_by_key([*lines("heads", "a"), *lines("tails", "b")])
    assert not compare(lines("heads", "c"), known)[0].changed
    assert not compare(lines("tails", "c"), known)[0].changed
    assert compare(lines("edge", "c"), known)[0].changed


def test_a_strict_run_of_a_log_refuses_what_is_not_in_it(tmp_path: Path) -> None:
    lines = list(recorded_of(record_of(walk("wall")), OWN, Letters(), None, "old"))
    tape = EpisodeTape(kept_in(tmp_path, lines), ROW, by=NAME, where="row 0 of train")
    world = asyncio.run(open_taped(Worlds(), ROW, tape))
    assert world is not None
    world.reset(ROW)
    with pytest.raises(CassetteMiss, match="row 0 of train: the turn 'fly' is not on"):
        world.respond(Turn(text="fly"))


def config_of(cassette: Path, mode: str = "record") -> Config:
    keys = (f"task.cassette={cassette}", f"task.cassette_mode={mode}")
    return load_config(ROOT / "examples" / "arithmetic.toml", keys)


def test_a_cassette_is_a_file_that_is_there_or_will_be_and_a_strict_one_is_there(
    tmp_path: Path,
) -> None:
    there, new = tmp_path / "there.jsonl", tmp_path / "new.jsonl"
    there.touch()
    for mode, path in (("strict", there), ("record", there), ("record", new)):
        config = config_of(path, mode)
        assert with_cassettes(config, tmp_path / "runs").task.cassette == str(path)
    with pytest.raises(ConfigError, match=r"there is no cassette .*new\.jsonl, and no run"):
        with_cassettes(config_of(new, "strict"), tmp_path / "runs")
    with pytest.raises(ConfigError, match="is no file"):
        with_cassettes(config_of(tmp_path / "nowhere" / "new.jsonl"), tmp_path / "runs")


def test_a_server_of_tasks_without_the_cassette_is_refused(tmp_path: Path) -> None:
    task = config_of(tmp_path / "new.jsonl", "strict").task
    facts = TaskFacts(train_digest="", train_rows=1, eval_digest="", eval_rows=0, reward_digest="")
    with pytest.raises(TaskError, match="the server of the task has none, not strict"):
        check_cassette(facts, task)
    check_cassette(msgspec.structs.replace(facts, cassette="strict"), task)
    assert without_cassettes(config_of(tmp_path / "new.jsonl")).task.cassette == ""
