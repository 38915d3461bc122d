"""Choice and checks of the teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.consumers.teachers.teacher import Teacher
from dora_pipe.core.errors import ConfigError
from dora_pipe.core.system.json_endpoint import variable
from dora_pipe.store.model_dir import positions_of, read_config, weights_digest

TOKENIZER: Final = "tokenizer.json"


def with_digest(config: Config, policy: Path) -> Config:
    """Check the teacher against the model directory `policy`; return the config with its digest.
    Raises ConfigError, PolicyError."""
    teacher = config.teacher
    if not teacher.path:
        return config
    check_directory(config, policy)
    complete = msgspec.structs.replace(teacher, digest=weights_digest(Path(teacher.path)))
    if teacher.digest and teacher.digest != complete.digest:
        raise ConfigError(f"teacher.digest: the weights of {teacher.path} have {complete.digest}")
    return msgspec.structs.replace(config, teacher=complete)


def open_teacher(config: Config, assets: Path, device: str) -> Teacher | None:
    """Return the teacher, if any; `assets` has the policy's tokenizer. Raises ConfigError,
    PolicyError."""
    teacher, trainer = config.teacher, config.trainer
    if teacher.path:
        from dora_pipe.consumers.learners.torch.memory import memory_options
        from dora_pipe.consumers.learners.torch.teacher import ModelOptions, ModelTeacher

        check_directory(config, assets)
        options = ModelOptions(
            dtype=trainer.dtype,
            device=device,
            temperature=config.sampling.logprob_temperature,
            padded_tokens_max=trainer.micro_batch_tokens,
            threads=trainer.threads,
            memory=memory_options(trainer),
        )
        return ModelTeacher(Path(teacher.path), digest=teacher.digest, options=options)
    if teacher.url:
        from dora_pipe.consumers.teachers.endpoint import EndpointOptions, EndpointTeacher

        asked = EndpointOptions(model=teacher.model)
        return EndpointTeacher(teacher.url, asked, key=key_of(config))
    return None


def key_of(config: Config) -> str:
    """Return the endpoint's key, or empty. Raises ConfigError if its variable is unset."""
    name = config.teacher.key_env
    return variable("teacher.", "key_env", name) if name else ""


def check_directory(config: Config, policy: Path) -> None:
    """Raise ConfigError if the teacher has other tokens or too few positions."""
    path = Path(config.teacher.path)
    longest = positions_of(read_config(path))
    if longest is not None and longest < config.workers.max_model_len:
        raise ConfigError(
            f"teacher.path: {path} has {longest} positions, fewer than a context of"
            f" {config.workers.max_model_len} tokens",
            hint="lower workers.max_model_len",
        )
    ours, theirs = _vocabulary(policy), _vocabulary(path)
    odd = sorted((number, token) for token, number in ours.items() if theirs.get(token) != number)
    if odd:
        number, token = odd[0]
        there = theirs.get(token)
        difference = "has no such token" if there is None else f"calls it {there}"
        raise ConfigError(
            f"teacher.path: token {number} of the policy is {token!r}, and {path} {difference}:"
            " ids must mean the same",
            hint="choose a teacher with the policy's tokenizer",
        )


def _vocabulary(directory: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    file = directory / TOKENIZER
    if not file.is_file():
        raise ConfigError(
            f"teacher.path: {directory} has no {TOKENIZER}, so tokens cannot be compared",
            hint="save it with `save_pretrained` of a fast tokenizer",
        )
    try:
        backend = Tokenizer.from_buffer(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"teacher.path: {file} is not a tokenizer: {error}") from None
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    return vocabulary
