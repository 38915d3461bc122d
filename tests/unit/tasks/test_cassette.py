"""Which recorded answer a call gets, and the file that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.core.errors import ConfigError, ResourceError
from dora_pipe.producers.tasks.cassette import (
    Call,
    History,
    Recorded,
    chosen,
    missed,
    name_of,
    row_digest,
    said,
    step_of,
    tool_call,
)
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.port import Turn

ROW = row_digest({"n": 1})
ADD = tool_call("add", {"a": 1, "b": 2})


def recorded(
    text: str = "3",
    *,
    call: Call = ADD,
    history: str = ROW,
    run: str = "one",
    by: str = "g0000000000-000",
    at_ns: int = 1,
) -> Recorded:
    return Recorded(
        cassette=1,
        row=ROW,
        history=history,
        call=dict(call),
        answer={"text": text, "ok": True},
        run=run,
        by=by,
        at_ns=at_ns,
    )


def text_of(found: Recorded | None) -> str:
    return "" if found is None else str(found.answer["text"])


def test_a_row_is_known_by_its_content_in_whatever_order_its_columns_stand() -> None:
    assert row_digest({"a": 1, "b": [2.0]}) == row_digest({"b": [2.0], "a": 1})
    assert row_digest({"a": 1}) != row_digest({"a": 1.5})


def test_a_call_behind_another_answer_is_another_call() -> None:
    one, other, begun = History(ROW), History(ROW), History(ROW)
    one.add(ADD, {"text": "3"})
    other.add(ADD, {"text": "4"})
    begun.add(ADD)
    assert len({one.digest, other.digest, begun.digest, ROW}) == 4
    assert recorded(history=one.digest).key != recorded(history=other.digest).key


def test_a_trajectory_is_given_its_own_answer_and_the_last_one() -> None:
    found = [
        recorded("first", by="g0000000000-001"),
        recorded("other", by="g0000000000-000"),
        recorded("again", by="g0000000000-001"),
    ]
    assert text_of(chosen(found, run="two", by="g0000000000-001")) == "again"
    assert text_of(chosen(found, run="two", by="g0000000000-000")) == "other"


def test_answers_by_chance_go_around_by_sibling_whatever_the_order_of_recording() -> None:
    found = [recorded(f"{at}", by=f"g0000000000-{at:03d}") for at in (2, 0, 1)]
    given = [text_of(chosen(found, run="two", by=f"g0000000007-{at:03d}")) for at in range(6)]
    assert given == ["0", "1", "2", "0", "1", "2"]
    assert given == [
        text_of(chosen(found[::-1], run="two", by=f"g0000000007-{at:03d}")) for at in range(6)
    ]


def test_a_run_that_records_gives_its_answers_to_no_other_trajectory() -> None:
    found = [recorded("mine", run="two", by="g0000000000-000")]
    assert text_of(chosen(found, run="two", by="g0000000000-000")) == "mine"
    assert chosen(found, run="two", by="g0000000000-001") is None
    assert text_of(chosen(found, run="three", by="g0000000000-001")) == "mine"


def test_the_newest_recording_counts_alone_and_refresh_takes_none_but_its_own() -> None:
    found = [
        recorded("old", run="one", at_ns=1, by="g0000000000-001"),
        recorded("new", run="two", at_ns=2, by="g0000000000-000"),
    ]
    assert text_of(chosen(found, run="three", by="g0000000000-001")) == "new"
    assert chosen(found, run="three", by="g0000000000-000", again=True) is None
    assert text_of(chosen(found, run="two", by="g0000000000-000", again=True)) == "new"


def test_a_call_that_is_missed_is_named_with_its_row_and_what_is_nearest() -> None:
    other = tool_call("add", {"a": 1, "b": 3})
    behind = History(ROW)
    behind.add(ADD, {"text": "3"})

    def words(call: Call, there: list[Recorded]) -> str:
        return str(missed("row 7 of train", call, ROW, there, "tools.jsonl"))

    assert words(other, [recorded()]) == (
        'row 7 of train: add({"a":1,"b":3}) is not on tools.jsonl;'
        ' nearest: add({"a":1,"b":2}), at the same place;'
        ' task.cassette_mode = "record" records it'
    )
    assert "; nearest: the same call, behind other calls or answers; " in words(
        ADD, [recorded(history=behind.digest)]
    )
    assert "; nothing of this row is; " in words(ADD, [])


def test_calls_have_words_and_names() -> None:
    step = step_of(Turn(text="go north"))
    assert (said(step), name_of(step)) == ("the turn 'go north'", "the environment")
    assert (said(ADD), name_of(ADD)) == ('add({"a":1,"b":2})', "add")
    assert said({"kind": "reset"}) == "the beginning of the episode"


def test_what_is_recorded_is_found_by_another_reader_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "tools.jsonl"
    reader, writer = CassetteFile(path), CassetteFile(path)
    for text in ("3", "4"):
        writer.append(recorded(text))
    assert [text_of(one) for one in writer.found(recorded().key)] == ["3", "4"]
    assert reader.found(recorded().key) == []
    reader.refresh()
    assert [text_of(one) for one in reader.found(recorded().key)] == ["3", "4"]
    assert (len(reader), list(reader.of_row(ROW))) == (2, list(reader.all()))


def test_two_cassettes_are_one_by_cat(tmp_path: Path) -> None:
    for name in ("a", "b"):
        CassetteFile(tmp_path / name).append(recorded(name, run=name, by=f"g0-{ord(name)}"))
    both = tmp_path / "both"
    both.write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    found = CassetteFile(both, writes=False).found(recorded().key)
    assert [text_of(one) for one in found] == ["a", "b"]


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "tools.jsonl"
    CassetteFile(path).append(recorded("whole"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert len(CassetteFile(path, writes=False)) == 1
    after = CassetteFile(path)
    after.append(recorded("next"))
    assert path.read_bytes().startswith(whole)
    assert [text_of(one) for one in CassetteFile(path).all()] == ["whole", "next"]


def test_a_torn_line_longer_than_what_is_read_at_a_time_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "tools.jsonl"
    CassetteFile(path).append(recorded("whole"))
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    CassetteFile(path).append(recorded("next"))
    assert [text_of(one) for one in CassetteFile(path).all()] == ["whole", "next"]


@pytest.mark.parametrize(
    ("line", "why"),
    [(b'{"cassette":2}\n', "Invalid"), (b"no json\n", "malformed"), (b"{}\n", "missing")],
)
def test_a_line_that_is_none_is_refused_with_its_place(
    tmp_path: Path, line: bytes, why: str
) -> None:
    path = tmp_path / "tools.jsonl"
    CassetteFile(path).append(recorded())
    at = path.stat().st_size
    with path.open("ab") as file:
        file.write(line)
    with pytest.raises(ConfigError, match=f"at byte {at}: .*{why}"):
        CassetteFile(path)


def test_a_cassette_that_is_only_read_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no cassette"):
        CassetteFile(tmp_path / "none.jsonl", writes=False)
    with pytest.raises(ResourceError):
        CassetteFile(tmp_path)
