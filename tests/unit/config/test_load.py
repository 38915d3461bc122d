"""Tests of loading, paths and consistency of configurations."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config.batches import gradient_notes
from dora_pipe.config.changes import FROZEN, LOGGED
from dora_pipe.config.load import (
    PATH_KEYS,
    changed_keys,
    dump_toml,
    from_plain,
    leaves,
    load_config,
)
from dora_pipe.config.model import Config, async_batches
from dora_pipe.config.retention import full_every, keep_every, keep_every_of
from dora_pipe.core.errors import ConfigError
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.schemas.topics import RULE
from tests.support.configs import plain_config, small_config
from tests.support.trainer_driver import run_started

SMALL = """
[run]
name = "small"
steps = 3
[model]
path = "models/tiny"
[task]
kind = "arithmetic"
"""


DEEPSPEED = ["trainer.kind=deepspeed"]
STAGE_0 = ["trainer.zero_stage=0"]
DEALT = ["trainer.expert_parallel_size=2"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    return path


def config(**changes: Any) -> Config:
    plain = plain_config(run={"name": "small", "steps": 3})
    for dotted, value in changes.items():
        *sections, name = dotted.split("__")
        table = plain
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return from_plain(plain)


def refusal(path: Path, *overrides: str) -> tuple[str, str | None]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in caught.value.message
    return caught.value.message, caught.value.hint


# Reading.


def test_relative_paths_are_seen_from_the_folder_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "run.toml").write_text(
        SMALL
        + 'data = "../data.jsonl"\neval_data = "/abs/eval.jsonl"\ndirectory = "code"\n'
        + '[store]\npath = "store"\n[bus]\nurl = "sqlite:log.sqlite"\n'
    )
    monkeypatch.chdir(elsewhere)
    read = load_config(folder / "run.toml", ())
    assert read.model.path == str(folder / "models/tiny")
    assert read.task.data == str(tmp_path / "data.jsonl")
    assert read.task.eval_data == "/abs/eval.jsonl"
    assert read.task.directory == str(folder / "code")
    assert read.store.path == str(folder / "store")
    assert read.bus.url == f"sqlite:{folder / 'log.sqlite'}"


def test_several_sources_of_data_are_paths_globs_and_names_of_the_hub(file: Path) -> None:
    file.write_text(
        SMALL + 'data = ["a/*.parquet", "hf:openai/gsm8k:main"]\ncolumns = {prompt = "question"}\n'
    )
    read = load_config(file, ["task.eval_data=hf:some/name", "task.columns.answer=solution"])
    assert read.task.data == (str(file.parent / "a/*.parquet"), "hf:openai/gsm8k:main")
    assert read.task.eval_data == "hf:some/name"
    assert read.task.columns == {"prompt": "question", "answer": "solution"}
    file.write_text(dump_toml(read))
    assert load_config(file, ()) == read
    with pytest.raises(ConfigError, match=r"task\.data"):
        load_config(file, ["task.data=[3]"])


def test_addresses_of_kafka_stay_as_they_are(file: Path) -> None:
    url = "kafka://one:9092,two:9092"
    assert load_config(file, [f"bus.url={url}"]).bus.url == url


def test_evaluation_samples_as_training_where_it_does_not_say_otherwise(file: Path) -> None:
    file.write_text(
        SMALL + "[sampling]\ntop_k = 5\nmax_tokens = 9\n[evaluation.sampling]\ntop_k = 7\n"
    )
    sampling = load_config(file, ()).evaluation.sampling
    assert (sampling.top_k, sampling.max_tokens) == (7, 9)
    overridden = load_config(file, ["sampling.max_tokens=11"]).evaluation.sampling
    assert overridden.max_tokens == 11


# Overrides.


def test_overrides_are_toml_values_and_bare_words_are_strings(file: Path) -> None:
    read = load_config(
        file,
        [
            "trainer.learning_rate=3e-4",
            "run.steps = 7",
            "objective.loss=sequence-mean",
            'run.name="other"',
            "objective.advantage_std=false",
            "sampling.stop=['a', 'b']",
            "task.options.count=5",
            "task.options.seed=6",
            "task.eval_data=",
        ],
    )
    assert read.trainer.learning_rate == 3e-4
    assert read.run.steps == 7
    assert read.run.name == "other"
    assert read.objective.loss == "sequence-mean"
    assert read.objective.advantage_std is False
    assert read.sampling.stop == ("a", "b")
    assert read.task.options == {"count": 5, "seed": 6}
    assert read.task.eval_data == ""


@pytest.mark.parametrize("name", ["nan", "true", "1", "2024-01-01", "1e3"])
def test_the_value_of_a_key_that_is_a_text_is_a_text(file: Path, name: str) -> None:
    assert load_config(file, [f"run.name={name}"]).run.name == name
    assert load_config(file, [f'run.name = "{name}"']).run.name == name


def test_later_override_wins(file: Path) -> None:
    assert load_config(file, ["run.steps=7", "run.steps=8"]).run.steps == 8


def test_path_of_an_override_is_seen_from_where_the_command_runs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert load_config(file, ["model.path=mine"]).model.path == str(here / "mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run.steps", "not of the form key=value"),
        ("run.steps=1\nrun.seed=2", "not of the form key=value"),
        ("sampling.stop=['a'", "sampling.stop="),
        ("run steps=1", "run steps"),
        ("run=1", "run: is a section"),
        ("run.steps=many", "run.steps: expected `int`, got `str`"),
        ("run.stepps=1", "unknown key `run.stepps`"),
    ],
)
def test_override_that_means_nothing_is_refused(file: Path, text: str, message: str) -> None:
    assert message in refusal(file, text)[0]


# Rejections.


def test_path_below_a_folder_whose_name_is_no_utf_8_is_refused(file: Path) -> None:
    folder = file.parent / "a\udcff"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"^model\.path: .* not UTF-8"):
        load_config(file.rename(folder / file.name), [])


def test_missing_file_and_broken_toml_name_the_file(tmp_path: Path) -> None:
    assert "no.toml" in refusal(tmp_path / "no.toml")[0]
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    assert "line 1" in refusal(broken)[0]
    broken.write_bytes(b"\xff")
    assert "not TOML" in refusal(broken)[0]


@pytest.mark.parametrize(
    ("added", "message", "hint"),
    [
        ("kindd = 1", "unknown key `task.kindd`", "did you mean `task.kind`?"),
        ("max_tokens = 1", "unknown key `task.max_tokens`", "`sampling.max_tokens`"),
        ("[trainer]\nrate = 1", "unknown key `trainer.rate`", "`learning_rate`"),
        ("[evaluation.sampling]\ntop = 1", "unknown key `evaluation.sampling.top`", "top_p"),
        ("[trainr]\nx = 1", "unknown section `trainr`", "did you mean `trainer`?"),
        ("[timing]\nzzz = 1", "unknown key `timing.zzz`", "`heartbeat_s`"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_one(
    file: Path, added: str, message: str, hint: str
) -> None:
    file.write_text(SMALL + added)
    text, hinted = refusal(file)
    assert text == message
    assert hint in (hinted or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL.replace("steps = 3", 'steps = "3"'), "run.steps: expected `int`, got `str`"),
        (SMALL.replace("steps = 3", "steps = true"), "run.steps: expected `int`, got `bool`"),
        (SMALL.replace("steps = 3", "steps = 0"), "run.steps: expected `int` >= 1"),
        (SMALL.replace("steps = 3", ""), "`run.steps` is missing"),
        (SMALL.replace('[task]\nkind = "arithmetic"', ""), "`task` is missing"),
        (SMALL + "[sampling]\nstop = [1]", "sampling.stop[0]: expected `str`"),
        (SMALL + "[trainer]\nlearning_rate = inf", "trainer.learning_rate: a value is not"),
        (SMALL + "[trainer]\nlearning_rate = 1e39", "trainer.learning_rate: 1e+39 is more than"),
        (SMALL + "[objective]\nkl_coef = 1e300", "objective.kl_coef: 1e+300 is more than 1e+06"),
        (
            SMALL + f"[workers]\nmax_num_seqs = {10**40}",
            "workers.max_num_seqs: a value is not finite, too",
        ),
        (SMALL + "[trainer]\nlearning_rate = nan", "trainer.learning_rate"),
        (SMALL + "[task.options]\nday = 2024-01-01", "task.options: a value is not"),
        (SMALL + "[task.options]\nx = [nan]", "task.options: a value is not"),
    ],
)
def test_wrong_value_is_refused_with_its_key(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    assert refusal(file)[0].startswith(message)


@pytest.mark.parametrize(
    ("added", "message", "hint"),
    [
        (
            '[trainer]\nschedule = "cosin"',
            "trainer.schedule: unknown value `cosin`",
            "one of constant, linear, cosine",
        ),
        (
            '[trainer]\noptimizer = "sgd"',
            "trainer.optimizer: unknown value `sgd`",
            "one of adamw, muon, adamw8bit",
        ),
    ],
)
def test_a_value_of_none_of_the_choices_is_refused_with_them(
    file: Path, added: str, message: str, hint: str
) -> None:
    file.write_text(f"{SMALL}\n{added}\n")
    assert refusal(file) == (message, hint)


@pytest.mark.parametrize("name", ["", "sm all", "-small", "sm\u00e4ll", "s" * 101])
def test_run_that_may_not_be_called_so_is_refused_with_the_rule_in_words(
    file: Path, name: str
) -> None:
    file.write_text(SMALL.replace('"small"', f'"{name}"'))
    assert refusal(file) == ("run.name: not a name", RULE)


@pytest.mark.parametrize("key", ["sampling", "evaluation.sampling"])
def test_an_agents_limit_is_over_several_conversations(file: Path, key: str) -> None:
    overrides = [f"{key}.max_tokens=2000", "task.kind=dataset", "task.data=rows.jsonl"]
    assert "2000 leaves no prompt tokens" in refusal(file, *overrides)[0]
    load_config(file, [*overrides, "task.agent=agent:run"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["staleness.async_batches=never"], "unknown value `never`"),
        (["staleness.async_batches=0.5"], "0.5 is not between 1 and 3"),
        (["staleness.async_batches=3.5"], "3.5 is not between 1 and 3"),
        (["staleness.max_staleness=0", "staleness.async_batches=2"], "2 is not between 1 and 1"),
        (["rollout.min_valid_trajectories=9"], "9 exceeds rollout.group_size, 8"),
        (["rollout.group_size=1"], "2 exceeds rollout.group_size, 1"),
        (
            ["rollout.group_size=1", "rollout.min_valid_trajectories=1"],
            "a group of 1 has no advantage",
        ),
        (["trainer.minibatches=257"], "257 is more than the 256 trajectories"),
        (["sampling.max_tokens=1024"], "1024 leaves no prompt tokens"),
        (["evaluation.sampling.max_tokens=2000"], "evaluation.sampling.max_tokens: 2000"),
        (["workers.max_model_len=20000"], "16384 is less than workers.max_model_len, 20000"),
        (["sampling.stop=['']"], "an empty string"),
        (["timing.lease_s=1.0"], "not more than two heartbeats"),
        (["trainer.betas=[0.9, 1.0]"], "must be below 1"),
        (["trainer.ranks=2"], "2 needs trainer.kind = 'deepspeed'"),
        (["trainer.expert_parallel_size=2"], "2 needs trainer.kind = 'deepspeed'"),
        ([*DEEPSPEED, *DEALT, "trainer.ranks=3"], "3 trainer.ranks is not a multiple of 2"),
        ([*DEEPSPEED, "trainer.offload=all"], "needs trainer.zero_stage = 3"),
        ([*DEEPSPEED, *STAGE_0, "trainer.offload=optimizer"], "nothing is offloaded"),
        ([*DEEPSPEED, *STAGE_0, "trainer.dtype=bfloat16"], "needs zero_stage 1, 2 or 3"),
        (["bus.url=http://x"], "`http://x` is neither"),
        (["bus.url=sqlite:"], "`sqlite:` is neither"),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(
    file: Path, overrides: list[str], message: str
) -> None:
    assert message in refusal(file, *overrides)[0]


ALONE = ("rollout.group_size=1", "rollout.min_valid_trajectories=1")


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (["sampling.temperature=0.0"], ["sampling.temperature = 0"]),
        (["task.kind=dataset", "task.data=x", "task.reward=none"], ['task.reward = "none"']),
        (["sampling.temperature=0.0", "objective.kl_coef=0.1"], []),
        (["sampling.temperature=0.0", "objective.advantage=version-baseline"], []),
        ([], []),
    ],
)
def test_settings_that_can_hardly_give_a_gradient_are_noted(
    file: Path, overrides: list[str], noted: list[str]
) -> None:
    notes = list(gradient_notes(load_config(file, overrides)))
    assert [note.partition(":")[0] for note in notes] == noted


@pytest.mark.parametrize(
    "overrides",
    [
        ["staleness.async_batches=1"],
        [*DEEPSPEED, "trainer.ranks=8", "trainer.zero_stage=3", "trainer.offload=all"],
        [*DEEPSPEED, *DEALT, "trainer.ranks=8", "lora.rank=8"],
        ["staleness.async_batches=3"],
        ["staleness.async_batches=auto"],
        ["staleness.async_batches=auto", "staleness.max_staleness=0"],
        ["staleness.max_staleness=0"],
        ["rollout.min_valid_trajectories=8"],
        [*ALONE, "objective.advantage=version-baseline"],
        [*ALONE, "objective.kl_coef=0.1"],
        ["timing.lease_s=1.01"],
        ["sampling.max_tokens=1023"],
    ],
)
def test_values_at_the_edge_are_taken(file: Path, overrides: list[str]) -> None:
    read = load_config(file, overrides)
    eta = read.staleness.max_staleness
    assert 1 <= async_batches(read.staleness) <= eta + 1


# Changes to a run.


def test_changed_keys_are_sorted_by_what_a_resumed_run_may_do() -> None:
    old = config()
    new = config(
        rollout__group_size=4,
        task__options={"count": 2},
        evaluation__sampling={"top_k": 3},
        staleness__max_staleness=3,
        trainer__learning_rate=1e-3,
        workers__max_num_seqs=8,
        bus__url="kafka://x:1",
    )
    frozen, logged, free = changed_keys(old, new)
    assert frozen == {"rollout.group_size", "task.options", "evaluation.sampling.top_k"}
    assert logged == {"staleness.max_staleness", "trainer.learning_rate"}
    assert free == {"workers.max_num_seqs", "bus.url"}
    assert changed_keys(old, old) == (frozenset(), frozenset(), frozenset())


def test_frozen_and_logged_keys_exist_and_no_key_is_both() -> None:
    keys = set(leaves(config()))
    sections = {key.rpartition(".")[0] for key in keys}
    assert keys >= LOGGED
    assert keys | sections >= FROZEN
    assert not {key for key in LOGGED if key in FROZEN or key.split(".")[0] in FROZEN}
    assert set(PATH_KEYS) <= keys


# Writing.


PLAIN = st.recursive(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab. =\"'#", max_size=4), inner)
    ),
    max_leaves=6,
)


@given(options=st.dictionaries(st.text("ab. =\"'#", max_size=4), PLAIN, max_size=4))
def test_any_plain_option_survives_being_written(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]
) -> None:
    stored = tmp_path_factory.getbasetemp() / "options.toml"
    written = config(task__options=options)
    stored.write_text(dump_toml(written), encoding="utf-8")
    assert load_config(stored, ()).task.options == options


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["rollout.prompts_per_step=32"], 4),
        (["rollout.prompts_per_step=12"], 3),
        (["rollout.prompts_per_step=7"], 1),
        (["rollout.prompts_per_step=32", "trainer.batch_parts=1"], 1),
        (["rollout.prompts_per_step=32", "trainer.offload_between_steps=true"], 1),
        (["rollout.prompts_per_step=32", "trainer.minibatches=2"], 1),
        (["rollout.prompts_per_step=32", 'objective.advantage="version-baseline"'], 1),
        (["rollout.prompts_per_step=32", "workers.count=2", "workers.colocated=1"], 1),
    ],
)
def test_a_batch_goes_in_parts_unless_the_file_says_otherwise_or_it_cannot(
    tmp_path: Path, words: list[str], parts: int
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nname = "a"\nsteps = 1\n[model]\npath = "m"\n[task]\nkind = "arithmetic"\n'
    )
    config = load_config(file, words)
    assert config.trainer.batch_parts == parts
    (tmp_path / "again.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "again.toml", ()) == config


@pytest.mark.parametrize(
    ("keys", "dtype", "every"),
    [
        ({}, "bfloat16", 8),
        ({}, "float32", 1),
        ({"lora": {"rank": 4}}, "bfloat16", 1),
        ({"policies": {"full_every": 3}}, "float32", 3),
        ({"policies": {"full_every": 1}}, "bfloat16", 1),
    ],
)
def test_versions_in_bfloat16_are_patches_where_nothing_is_said(
    keys: dict[str, Any], dtype: PolicyDtype, every: int
) -> None:
    assert full_every(small_config(**keys), dtype) == every


FOUR_BILLION = 16 * 10**9  # bytes


@pytest.mark.parametrize(
    ("keys", "dtype", "bytes_", "every"),
    [
        ({}, "float32", FOUR_BILLION, 10),
        ({}, "float32", 2**30 - 10**8, 10),  # larger with its checkpoints
        ({}, "float32", 10**8, 0),
        ({}, "bfloat16", FOUR_BILLION // 2, 10),
        ({}, "bfloat16", 12 * 10**8, 0),  # 600 million parameters: mostly deltas
        ({"trainer": {"checkpoint_every": 1}}, "bfloat16", 12 * 10**8, 10),
        ({"policies": {"full_every": 1}}, "bfloat16", FOUR_BILLION // 2, 10),
        ({"policies": {"full_every": 8}}, "float32", FOUR_BILLION, 10),
        ({"lora": {"rank": 4}}, "bfloat16", 10**8, 0),
        ({"store": {"keep_every": 0}}, "float32", FOUR_BILLION, 0),
        ({"store": {"keep_every": 3}}, "float32", 1000, 3),
    ],
)
def test_large_whole_versions_are_not_all_kept_where_nothing_is_said(
    keys: dict[str, Any], dtype: PolicyDtype, bytes_: int, every: int
) -> None:
    config = small_config(**keys)
    assert keep_every(config, dtype, bytes_) == every


@pytest.mark.parametrize(
    ("began", "says", "every"),
    [
        ({"store": {"keep_every": 10}}, "auto", 10),
        ({"store": {"keep_every": 0}}, "auto", 0),
        ({"store": {"keep_every": 10}}, 0, 0),
        ({"store": {"keep_every": 0}}, 5, 5),
    ],
)
def test_a_run_keeps_what_it_began_with_until_its_file_says_otherwise(
    began: dict[str, Any], says: Any, every: int
) -> None:
    started = msgspec.structs.replace(run_started(), config=began)
    assert keep_every_of(says, started) == every
