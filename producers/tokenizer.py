"""Text to token ids and back by a model's own tokenizer files; decides which special tokens count.

Rules:

1. The tokenizer is `tokenizer.json`, as it stands (what transformers' fast tokenizers are). Only
   where a model directory has none is one made by transformers from its older files.
2. A prompt is encoded without special tokens; then what the tokenizer's post-processor puts in
   front of every text (usually a begin-of-sequence token) is put in front, unless the prompt
   begins with it already. What the post-processor puts behind is left out.
3. Any other text (what an environment says) is encoded alone, without special tokens, and
   appended. Tokens as sampled are never made again from text.
4. Text for rewards and environments has no special tokens in it; text for stop strings has.
5. A turn ends at the tokenizer's `eos_token`, and at those ids of `eos_token_id` (in
   generation_config.json, else config.json) that the tokenizer knows as special tokens. Where
   neither is left, `eos_token_id` is taken as it is: libraries write one of their own into
   config.json, which may be any letter of another tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dora_pipe.errors import PolicyError

if TYPE_CHECKING:
    import tokenizers

_PROBES: Final = ("0", "a", "A", ".", "\n")
"""Any text that has tokens: only what is put around it counts."""


class Tokenizer:
    """A model's tokenizer.

    Example: ``Tokenizer(store.assets_path(digest)).prompt_ids("1+2=")``. Raises PolicyError where
    the directory has no tokenizer that can be read.
    """

    def __init__(self, assets: Path) -> None:
        self._backend = _backend(assets)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._prefix = _prefix_of(self._backend)
        self.stop_ids = _stop_ids(assets, self._backend)
        """Token ids that end a turn, sorted."""

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt, a begin-of-sequence token included where the model has one."""
        ids = self.ids(text)
        if ids[: len(self._prefix)] == self._prefix:
            return ids
        return [*self._prefix, *ids]

    def ids(self, text: str) -> list[int]:
        """Token ids of a text that is appended to others."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, token_ids: Sequence[int]) -> str:
        """What the model said, without special tokens."""
        return self._decode(token_ids, skip=True)

    def full_text(self, token_ids: Sequence[int]) -> str:
        """What the model said, special tokens written out."""
        return self._decode(token_ids, skip=False)

    def _decode(self, token_ids: Sequence[int], *, skip: bool) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip)
        return text


def _backend(assets: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = assets / "tokenizer.json"
    if not file.is_file():
        return _converted(assets)
    try:
        return Backend.from_buffer(file.read_bytes())
    except ValueError as error:
        raise PolicyError(f"{file} is not a tokenizer: {error}") from None


def _converted(assets: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    try:
        made: Any = AutoTokenizer.from_pretrained(assets, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise PolicyError(
            f"{assets} has no tokenizer that can be read: {str(error).splitlines()[0]}",
            hint="save it with `save_pretrained` of a fast tokenizer, which writes tokenizer.json",
        ) from None
    if not getattr(made, "is_fast", False):
        raise PolicyError(f"the tokenizer in {assets} has no fast version")
    backend: tokenizers.Tokenizer = made.backend_tokenizer
    return backend


def _prefix_of(backend: tokenizers.Tokenizer) -> list[int]:
    """What the post-processor puts in front of every text."""
    for probe in _PROBES:
        bare: list[int] = backend.encode(probe, add_special_tokens=False).ids
        dressed: list[int] = backend.encode(probe, add_special_tokens=True).ids
        for at in range(len(dressed) - len(bare) + 1 if bare else 0):
            if dressed[at : at + len(bare)] == bare:
                return dressed[:at]
    return []


def _stop_ids(assets: Path, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    named = _eos_token(assets)
    own = None if named is None else backend.token_to_id(named)
    found = set() if own is None else {own}
    special = {
        token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
    }
    configured = _eos_ids(assets)
    found |= configured & special
    return tuple(sorted(found or configured))


def _eos_token(assets: Path) -> str | None:
    """The `eos_token` of tokenizer_config.json or special_tokens_map.json: text, or an object."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json(assets / name).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _eos_ids(assets: Path) -> set[int]:
    for name in ("generation_config.json", "config.json"):
        ids = _json(assets / name).get("eos_token_id")
        if ids is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    return set()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise PolicyError(f"{path} is not a JSON object")
    return value
