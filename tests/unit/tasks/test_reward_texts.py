"""Tests of text rewards on right, unusual and hostile answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy
import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.rewards import bounded, texts
from dora_pipe.producers.rewards.registry import Rewards
from dora_pipe.producers.tasks.task import Completion, Reward


@pytest.fixture(scope="module", autouse=True)
def _helper() -> Iterator[None]:
    yield
    bounded.HELPER.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    helper = bounded.Helper(bounded.CPU_S / 10)
    monkeypatch.setattr(texts, "HELPER", helper)
    yield
    helper.close()


def score(use: str, text: str, row: dict[str, Any], **options: Any) -> Reward:
    score = Rewards([model.RewardUse(use=use, options=options)]).score(row, Completion(text=text))
    assert isinstance(score, Reward)
    return score


RIGHT = [
    ("1/2", "0.5"),
    ("0.5", r"so \boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", "The answer is 0.50."),
    ("72", "#### 72"),
    ("2 * 36 = 72\n#### 72", "It is 72 apples."),
    ("72 cm", r"\boxed{72\text{ cm}}"),
    (r"\{1,2\}", r"$\{2,1\}$"),
    ("(1,2)", "$(1,2)$"),
    (r"(-\infty,3]", r"$x \le 3$"),
    ("$x^2+2x+1$", "$(x+1)^2$"),
    ("1,000", "1000"),
    ("1e3", "1000"),
    ("50%", "0.5"),
    (r"\sqrt{2}", r"first $\sqrt 3$, no: $\sqrt 2$"),
    ("-3", "-3.0"),
]
WRONG = [
    ("3", "I think 3 or 4"),
    ("(1,2)", "$[1,2)$"),
    ("18", r"$\{18, 19\}$"),
    ("18", "\\boxed{" * 2000),
    ("18", "17.99"),
    ("18", "${$"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_an_expression_that_equals_the_answer_is_right_however_it_is_written(
    gold: str, text: str
) -> None:
    actual_score = score("math", text, {"answer": gold})
    assert (actual_score.value, actual_score.parts) == (1.0, {"math": 1.0, "math.parsed": 1.0})
    assert actual_score.answer


@pytest.mark.parametrize(
    ("use", "text", "row", "options", "answer"),
    [
        ("math", ["1/2", "it is 0.50", r"$\frac{2}{4}$"], "1/2", {}, "1/2"),
        ("math", ["7.0", "#### 7"], "3", {}, "7"),
        ("math", ["no idea", ""], "3", {}, ""),
        ("exact", ["42", " 42 "], "7", {}, "42"),
        (
            "regex",
            ["is 42", "3, no, is  42 "],
            "7",
            {"pattern": "is ([ 0-9]+)", "group": "1"},
            "42",
        ),
        (
            "json-schema",
            ['{"b": 1, "a": 2}', '{"a":2,"b":1}'],
            "",
            {"schema": {"type": "object"}},
            '{"a":2,"b":1}',
        ),
    ],
)
def test_equal_answers_are_said_alike_and_no_answer_is_empty(
    use: str, text: list[str], row: str, options: dict[str, Any], answer: str
) -> None:
    answers = [score(use, text, {"answer": row}, **options).answer for text in text]
    assert answers == [answer] * len(text)


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_an_expression_that_does_not_equal_the_answer_is_wrong(gold: str, text: str) -> None:
    assert score("math", text, {"answer": gold}).value == 0.0


@pytest.mark.parametrize("text", ["", "no idea", "a" * 10_000, "\x00\uffff"])
def test_a_text_without_an_expression_is_no_error_but_wrong(text: str) -> None:
    actual_score = score("math", text, {"answer": "18"})
    assert (actual_score.value, actual_score.parts["math.parsed"]) == (0.0, 0.0)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("text", ["$9^{9^{9^9}}$", "$1000000000!$"])
def test_an_expression_that_nobody_can_compute_is_wrong_within_seconds(text: str) -> None:
    actual_score = score("math", text, {"answer": "18"})
    assert (actual_score.value, actual_score.parts["math.stopped"]) == (0.0, 1.0)
    assert score("math", "18", {"answer": 18}).value == 1.0  # A new helper answers.


def test_a_helper_that_ends_by_no_limit_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded.HELPER.close()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ChildProcessError, match="ended with status 1"):
        score("math", "18", {"answer": "18"})
    bounded.HELPER.close()


@pytest.mark.parametrize(
    ("text", "value"),
    [(r"4, so \boxed{3}, not 4", 1.0), ("3", 0.0), (r"\boxed{3", 0.0), (r"\boxed{\frac{6}{2}}", 1)],
)
def test_math_may_count_only_what_is_boxed(text: str, value: float) -> None:
    assert score("math", text, {"answer": "3"}, boxed=True).value == value


@pytest.mark.parametrize(
    ("text", "answer", "options", "value"),
    [
        (" 42\n", "42", {}, 1.0),
        (" 42\n", "42", {"strip": False}, 0.0),
        ("42", 42, {}, 1.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"case": False}, 1.0),
        ("", "", {}, 1.0),
    ],
)
def test_exact_compares_characters(
    text: str, answer: object, options: dict[str, Any], value: float
) -> None:
    assert score("exact", text, {"answer": answer}, **options).value == value


FORMS: list[tuple[Any, str, str]] = [
    (["3", "three"], "three", "four"),
    ([3, 4], "4", "5"),
    (3, "3", "4"),
    (3.0, "3", "3.1"),
    (0.1, "0.10", "0.11"),
    (2**70, str(2**70), "1"),
    (Decimal("1.50"), "1.5", "1.51"),
    (numpy.float64(0.5), "0.5", "5"),
    ({"value": ["3", "three"], "unit": "m"}, "3", "m"),
    ([{"value": "3"}, {"value": 4}], "4", "5"),
]
FIELD = {"field": "value"}
GROUP = {"pattern": "^(.*)$", "group": "1"}


@pytest.mark.parametrize(("answer", "right", "wrong"), FORMS)
@pytest.mark.parametrize(("use", "options"), [("exact", {}), ("regex", GROUP), ("math", {})])
def test_an_answer_means_what_its_form_says(
    use: str, options: Any, answer: Any, right: str, wrong: str
) -> None:
    if use == "math":
        right = right.replace("three", "3")
    scores = [score(use, text, {"answer": answer}, **FIELD, **options) for text in (right, wrong)]
    assert [score.value for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize("use", ["exact", "math"])
def test_the_reasoning_may_be_compared(use: str) -> None:
    rewards = Rewards([model.RewardUse(use=use, options={"of": "reasoning"})])
    scores = [
        rewards.score({"answer": 3}, Completion(text="no", reasoning=entry)) for entry in "34"
    ]
    assert [reward.value for reward in scores if isinstance(reward, Reward)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "options", "why"),
    [
        (None, {}, "the row's answer is null"),
        (["3", None], {}, "the row's answer is null"),
        ([], {}, "empty list"),
        ({"value": 3}, {}, "an object with 'value': set the reward's option `field`"),
        ({"value": 3}, {"field": "number"}, "has no `number`"),
        ({"a": {"b": None}}, {"field": "a.b"}, "is null"),
        ([["3"]], {}, "a list in a list"),
    ],
)
@pytest.mark.parametrize("use", ["exact", "regex", "math"])
def test_an_answer_that_cannot_be_compared_is_named(
    use: str, answer: Any, options: dict[str, Any], why: str
) -> None:
    more = GROUP if use == "regex" else {}
    with pytest.raises(TaskError, match=why):
        score(use, "3", {"answer": answer}, **options, **more)
    with pytest.raises(TaskError, match=why):
        Rewards([model.RewardUse(use=use, options={**options, **more})]).check_answer(answer)


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        ("<think>a</think>b", {"pattern": r"^<think>[^<]*</think>[^<]+$"}, 1.0),
        ("b", {"pattern": r"^<think>"}, 0.0),
        ("<a>1</a><a> 42 </a>", {"pattern": "<a>(.*?)</a>", "group": "1"}, 1.0),
        ("<a>42</a><a>1</a>", {"pattern": "<a>(?P<said>.*?)</a>", "group": "said"}, 0.0),
        ("nothing", {"pattern": "<a>(.*?)</a>", "group": "1"}, 0.0),
    ],
)
def test_regex_finds_a_pattern_or_compares_a_group(
    text: str, options: dict[str, Any], value: float
) -> None:
    assert score("regex", text, {"answer": "42"}, **options).value == value


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"pattern": "(?s)^<think>.*</think>"}, 1.0),
        ({"pattern": "so"}, 0.0),
        ({"pattern": "so", "of": "reasoning"}, 1.0),
        ({"pattern": "^3 is$", "of": "text"}, 1.0),
        ({"pattern": "</think>", "of": "text"}, 0.0),
    ],
)
def test_regex_sees_thoughts_where_it_is_asked_to(options: dict[str, Any], value: float) -> None:
    completion = Completion(text="3 is", reasoning="so", turns=("so</think>3 is",))
    score = Rewards([model.RewardUse(use="regex", options=options)]).score({}, completion)
    assert isinstance(score, Reward) and score.value == value


@pytest.mark.usefixtures("hasty")
def test_a_pattern_that_tries_for_ever_is_stopped_and_no_match() -> None:
    actual_score = score("regex", "a" * 60 + "b", {}, pattern="(a+)+$")
    assert (actual_score.value, actual_score.parts) == (0.0, {"regex": 0.0, "regex.stopped": 1.0})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "value", "is_json"),
    [
        ('{"a": 1}', 1.0, 1.0),
        ('Here:\n```json\n{"a": 1}\n```\nDone.', 1.0, 1.0),
        ('{"a": "x"}', 0.0, 1.0),
        ('{"a": NaN}', 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_json_that_a_schema_describes_is_right(text: str, value: float, is_json: float) -> None:
    for options, row in (({"schema": SCHEMA}, {}), ({"column": "s"}, {"s": SCHEMA})):
        actual_score = score("json-schema", text, row, **options)
        assert actual_score.parts == {"json-schema": value, "json-schema.json": is_json}


def test_a_schema_fetches_nothing_from_elsewhere() -> None:
    elsewhere = {"$ref": "http://127.0.0.1:9/schema.json"}
    with pytest.raises(ValueError, match=r"the schema has an unresolved reference: .*:9/schema"):
        score("json-schema", "1", {}, schema=elsewhere)


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("regex", {"pattern": "("}, r"`regex`: pattern: missing \)"),
        ("regex", {"pattern": "a", "group": "1"}, "the pattern has no group `1`"),
        ("regex", {}, "`regex`: .*missing required field `pattern`"),
        ("exact", {"stripp": True}, "`exact` has no option `stripp`"),
        ("exact", {"strip": 1}, "`exact`: Expected `bool`, got `int`"),
        ("json-schema", {}, "needs one of the options `schema` and `column`"),
        ("json-schema", {"schema": {"type": 3}}, "`json-schema`: schema: "),
    ],
)
def test_options_that_cannot_be_are_one_line(
    use: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        score(use, "", {"answer": ""}, **options)
