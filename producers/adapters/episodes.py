"""Shared parts of adapters: seeded rows, episodes, texts or messages, versions of packages."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from dora_pipe.core.errors import ConfigError, TaskError, install_hint
from dora_pipe.core.system.own_code import load_function
from dora_pipe.producers.tasks.arithmetic import EVAL_SEED
from dora_pipe.producers.tasks.task import (
    Environment,
    Observation,
    Prompt,
    Reward,
    Row,
    Split,
    Task,
)
from dora_pipe.schemas.identity import derive_seed

SEED_BITS: Final = 31
"""Bits of a seed, supported by most packages."""


class PromptFormat:
    """Format of an environment's texts: raw text, or messages.

    Example: ``PromptFormat(chat=True).first("a") == [{"role": "user", "content": "a"}]``.
    """

    def __init__(self, *, chat: bool = False, system_prompt: str = "") -> None:
        self.chat = chat or bool(system_prompt)
        self._system = system_prompt

    def first(self, text: str) -> Prompt:
        if not self.chat:
            return text
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": text.strip("\n")}]

    def then(self, text: str, *, ok: bool = True) -> Observation:
        """Return the observation after a turn of a continuing episode."""
        if not self.chat:
            return Observation(text=text, done=False, ok=ok)
        message = {"role": "user", "content": text.strip("\n")}
        return Observation(messages=[message], done=False, ok=ok)


class SeededTask(Task):
    """Task whose rows are seeds of episodes: ``{"seed": 1297450433}``."""

    def __init__(
        self,
        *,
        name: str,
        seed: int,
        count: int,
        eval_count: int,
        prompt_format: PromptFormat,
        observe: str,
        act: str,
        max_mistakes: int,
    ) -> None:
        """`observe` and `act` are users' functions from observations to text and from text to
        actions. Raises ConfigError for invalid counts, TaskError."""
        if count < 1 or eval_count < 0:
            counts = f"count {count} and eval_count {eval_count}"
            raise ConfigError(f"task.options: {counts} is not a number of rows")
        self._name = name
        self._seeds: dict[Split, int] = {"train": seed, "eval": EVAL_SEED}
        self._counts: dict[Split, int] = {"train": count, "eval": eval_count}
        self.prompt_format = prompt_format
        self.max_mistakes = max_mistakes
        self.observe: Callable[..., Any] | None
        self.act: Callable[..., Any] | None
        self.observe, self.act = (
            load_function(f"task.options.{key}", path, TaskError) if path else None
            for key, path in (("observe", observe), ("act", act))
        )

    def rows(self, split: Split) -> Sequence[Row]:
        drawn = (self._name, split, self._seeds[split])
        return [
            {"seed": derive_seed(*drawn, index) % 2**SEED_BITS}
            for index in range(self._counts[split])
        ]

    def single_turn(self) -> bool:
        return False

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        """Unused: episodes score themselves."""
        raise NotImplementedError

    def reward_sources(self) -> Sequence[Any]:
        own = [function for function in (self.observe, self.act) if function is not None]
        packages = [f"{name} {version}" for name, version in self.packages().items()]
        return (type(self), *packages, *own)


AnySeededTask = TypeVar("AnySeededTask", bound=SeededTask)


class SeededEpisode(Environment, Generic[AnySeededTask]):
    """Episode that sums the rewards of its steps."""

    def __init__(self, task: AnySeededTask) -> None:
        self.task = task
        self.total = 0.0
        self.steps = self.mistakes = 0
        self.ended = False

    def mistaken(self, text: str) -> Observation:
        """Return the observation after an invalid action, described by `text`."""
        self.mistakes += 1
        if self.mistakes > self.task.max_mistakes:
            return Observation(done=True, ok=False)
        return self.task.prompt_format.then(text, ok=False)

    def reward(self, text: str, turns: Sequence[str]) -> Reward:
        """Return the sum, with counts as parts."""
        parts = {"steps": self.steps, "mistakes": self.mistakes, "ended": float(self.ended)}
        return Reward(value=self.total, parts=parts)


_BUILT: Final = ("__pycache__", ".pyc")

DIGEST_CHARACTERS: Final = 16
"""Logged characters of a package's sha256."""


def required(module: str, *, package: str, extra: str, kind: str) -> Any:
    """Import a module. Raises ConfigError naming the package if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise  # a missing dependency of the package
        raise ConfigError(
            f"task.kind: `{kind}`: {package} is not installed", hint=install_hint(extra)
        ) from None


def packages_of(*modules: ModuleType | str) -> dict[str, str]:
    """Return version and digest of each top-level package of the modules.

    Example: ``{"gymnasium": "1.4.0 3f6b0c9d2a7e81f4"}``; the version of a user's file is `-`.
    """
    versions: dict[str, str] = {}
    for module in modules:
        name = (module if isinstance(module, str) else module.__name__).partition(".")[0]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "-"
        versions[name.replace("_", "-")] = f"{version} {_source_digest(name)}"
    return dict(sorted(versions.items()))


@functools.cache
def _source_digest(name: str) -> str:
    module = sys.modules[name]
    file = getattr(module, "__file__", None)
    roots = list(getattr(module, "__path__", ())) or ([file] if file else [])
    digest = hashlib.sha256()
    for root in map(Path, roots):
        files = sorted(path for path in root.rglob("*") if path.is_file()) or [root]
        for path in files:
            if not any(built in str(path) for built in _BUILT):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root.parent).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:DIGEST_CHARACTERS]
