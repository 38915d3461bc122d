"""`init` makes a folder to start from, `sft` warms a model up on demonstrations or a JSONL file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.cli.output import say
from dora_pipe.cli.roles import ENGINES
from dora_pipe.cli.settings import OverrideOption
from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from dora_pipe.errors import PolicyError, TaskError, UsageError
from dora_pipe.producers.tasks.registry import open_task

CONTEXT_TOKENS: Final = 256
SFT_STEPS: Final = 240
SFT_BATCH: Final = 64
SFT_LEARNING_RATE: Final = 2e-3
SFT_SEED: Final = 3
SFT_STEPS_OF: Final = {"arithmetic": SFT_STEPS, "calculator": 300}
"""Steps after which a policy gets a part of the task right, and has something left to learn."""

EXAMPLES: Final = tuple(SFT_STEPS_OF)
TORCH: Final = "torch"
"""The engine that needs nothing of a model but its family."""

PROGRESS_EVERY: Final = 40
"""Steps between two lines of talk."""


def init(
    directory: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    task: Annotated[str, typer.Option(help="arithmetic or calculator.")] = EXAMPLES[0],
    engine: Annotated[str, typer.Option(help="torch, vllm or vllm-server.")] = TORCH,
) -> None:
    """Make a folder with a configuration and a small random model for a built-in task."""
    if task not in EXAMPLES:
        raise UsageError(
            f"no example for task {task!r}",
            hint=f"{' or '.join(EXAMPLES)}; for own data see examples/jsonl-llama",
        )
    if directory.exists():
        raise UsageError(f"{directory} exists", hint="name a folder that does not")
    if engine not in ENGINES:
        raise UsageError(f"no engine {engine!r}", hint=f"one of {', '.join(ENGINES)}")
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(example_config(task, engine))
    parameters = make_model(directory / "model", task)
    say(f"{directory}/config.toml and {directory}/model ({parameters:,} parameters)")
    steps = SFT_STEPS_OF[task]
    say(f"next: dora-pipe sft {directory}/config.toml {directory}/warm --steps {steps}")
    say(f"then: dora-pipe run {directory}/config.toml -o model.path={directory}/warm")


def make_model(directory: Path, task: str) -> int:
    """A small random model with the words of a built-in task; returns its parameters."""
    from dora_pipe.cli.small_model import write_small_model
    from dora_pipe.producers.tasks import arithmetic, calculator

    words = {"arithmetic": arithmetic.WORDS, "calculator": calculator.WORDS}[task]
    return write_small_model(directory, words, context_tokens=CONTEXT_TOKENS)


def example_config(task: str, engine: str = TORCH) -> str:
    """The text of an example's configuration file."""
    text = example_file(task).read_text()
    section = "[workers]\n"
    assert section in text, f"the example of {task} has no {section}"
    return text if engine == TORCH else text.replace(section, f'{section}engine = "{engine}"\n')


def example_file(task: str) -> Path:
    """Where it lies in the package."""
    return Path(__file__).parent / "templates" / f"{task}.toml"


def share_cores() -> None:
    """Before torch is imported: its threads spin for microseconds only while they wait for each
    other. By default they spin for longer than a pass takes: beside other work two of them are
    ten times slower than one. Were they to sleep at once, two would be no faster than one."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def sft(
    config: Annotated[Path, typer.Argument(help="A TOML file: model.path, task.")],
    out: Annotated[Path, typer.Argument(help="Where the warmed-up model goes; must not exist.")],
    data: Annotated[
        Path | None,
        typer.Option(help="JSONL with columns prompt and answer; default: the task's own."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = SFT_STEPS,
    batch: Annotated[int, typer.Option(min=1, help="Demonstrations per step.")] = SFT_BATCH,
    learning_rate: Annotated[float, typer.Option(min=0)] = SFT_LEARNING_RATE,
    seed: Annotated[int, typer.Option(min=0)] = SFT_SEED,
    threads: Annotated[
        int, typer.Option(min=1, help="Of the computation; other bits with another number.")
    ] = 1,
    override: OverrideOption = None,
) -> None:
    """Supervised warm start: train the model of a configuration on (prompt, answer) pairs."""
    resolved = load_config(config, override or ())
    if not Path(resolved.model.path).is_dir():
        raise PolicyError(f"no model directory at {resolved.model.path}", hint="see model.path")
    rows = data or demonstrations(resolved, seed=seed, count=steps * batch)
    share_cores()
    warm_up(
        Path(resolved.model.path),
        rows,
        out,
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        threads=threads,
    )
    say(f"wrote {out}")


def warm_up(
    model: Path,
    rows: Sequence[tuple[str, str]] | Path,
    out: Path,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    threads: int,
) -> None:
    """Train and say how it goes. Raises PolicyError, TaskError, UsageError."""
    from dora_pipe.consumers.trainers.sft import train_sft
    from dora_pipe.producers.tokenizer import Tokenizer

    def progress(step: int, loss: float) -> None:
        if step % PROGRESS_EVERY == 0 or step == steps:
            say(f"sft step {step:>4} of {steps}  loss {loss:.3f}")

    train_sft(
        model,
        rows,
        out,
        tokenizer=Tokenizer(model),
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        threads=threads,
        progress=progress,
    )


def demonstrations(config: Config, *, seed: int, count: int) -> Sequence[tuple[str, str]]:
    """(prompt, answer) pairs of the configuration's task. Raises TaskError if it makes none."""
    sys.path.insert(0, config.task.directory)
    try:
        return open_task(config.task).demonstrations(seed, count)
    except NotImplementedError:
        raise TaskError(
            f"task {config.task.kind} makes no demonstrations", hint="give them with --data"
        ) from None
    finally:
        sys.path.remove(config.task.directory)
