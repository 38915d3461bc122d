"""Encoding and decoding with a model's own tokenizer files.

1. The tokenizer is `tokenizer.json`; without it, transformers converts the older files.

2. A prompt is encoded without special tokens, then gets the post-processor's prefix unless present.
The suffix is omitted.

3. Other texts are encoded alone, without special tokens. Sampled tokens are never re-encoded.

4. Control tokens in texts are plain text unless `special_tokens = "parse"`, so data and tools
cannot end a turn. A prompt that looks rendered is rejected.

5. Control tokens are added tokens that are special, that the chat template writes, or that formats
of calls and thoughts use.

6. Text for rewards and environments keeps only special tokens of `MARKERS`; text for stop strings
keeps all.

7. A turn ends at the `eos_token`, and at each special `eos_token_id` (generation_config.json, else
config.json). Without either, any `eos_token_id` counts; config.json's default may be a letter of
this tokenizer.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from dora_pipe.core.errors import PolicyError, TaskError
from dora_pipe.producers.chat.template import find_templates, read_object, special_tokens

if TYPE_CHECKING:
    import tokenizers

SpecialTokens = Literal["text", "parse"]
"""Handling of control tokens in texts; see `task.special_tokens`."""

THINK: Final = ("<think>", "</think>")

MARKERS: Final = (*THINK, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>",
)  # fmt: skip
"""Added tokens of call and thought formats; rewards see them."""

_MARKUP: Final = re.compile(r"[^\w\s].*[^\w\s]", re.DOTALL)
"""Form of a control token without a flag; added words (`kilogram`) differ."""

_NOWHERE: Final = "\0{}\0" + "\0" * 62
"""Placeholder of a removed vocabulary piece: no text has 64 zero characters."""

_PROBES: Final = ("0", "a", "A", ".", "\n")
"""Texts with tokens, used to find the post-processor's prefix."""


class Tokenizer:
    """Tokenizer of a model. Raises PolicyError if the directory has no readable tokenizer."""

    def __init__(self, assets: Path, *, special_tokens: SpecialTokens = "text") -> None:
        self.backend = _backend(assets)
        self.backend.no_truncation()
        self.backend.no_padding()
        self._parses = special_tokens == "parse"
        added = self.backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._prefix = _prefix_of(self.backend)
        self.size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())
        """Largest token id plus 1."""
        self.stop_ids = _stop_ids(assets, self.backend)
        texts = find_templates(assets).values()
        self.control = control_tokens(self.backend, texts, self.stop_ids)
        """Control tokens, which texts of the data never become."""
        self.hidden = frozenset(
            token_id
            for token_id, token in added.items()
            if (token.special and token.content not in MARKERS) or token_id in self.stop_ids
        )
        """Ids hidden from rewards, environments and agents."""
        self._found = _any_of(self.control)
        self._openers = self._opening(assets)

    def reading(self, special_tokens: SpecialTokens) -> Tokenizer:
        """Return this tokenizer with another rule for control tokens."""
        other = copy.copy(self)
        other._parses = special_tokens == "parse"
        other.__dict__.pop("_encoder", None)
        return other

    def _opening(self, assets: Path) -> tuple[str, ...]:
        named = {text for key, text in special_tokens(assets).items() if key != "bos_token"}
        ends = {self.backend.id_to_token(token_id) for token_id in self.stop_ids}
        return tuple(self.control - named - ends - set(MARKERS))

    def check_unrendered(self, text: str) -> None:
        """Raise TaskError if a text starts like a rendered conversation whose control tokens would
        become plain text."""
        start = text.lstrip()
        if self._parses or not start.startswith(self._openers):
            return
        opener = max(filter(start.startswith, self._openers), key=len)
        raise TaskError(
            f"the text is already rendered: it begins with the control token {opener}",
            hint='task.special_tokens = "parse" parses control tokens; or store the messages',
        )

    def spelled(self, text: str) -> str:
        """Return the first control token that a text spells in plain text, or an empty string."""
        match = None if self._parses else self._found.search(text)
        return match[0] if match else ""

    def prompt_ids(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the model's begin-of-sequence token. Raises TaskError as
        `check_unrendered`."""
        self.check_unrendered(text)
        ids = self.ids(text)
        if ids[: len(self._prefix)] == self._prefix:
            return ids
        return [*self._prefix, *ids]

    @functools.cached_property
    def _encoder(self) -> tokenizers.Tokenizer:  # lazy: decoding does not need it
        return self.backend if self._parses else plain_encoder(self.backend, self.control)

    def ids(self, text: str) -> list[int]:
        """Return the ids of an appended text."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def again(self, token_ids: Sequence[int]) -> list[int]:
        """Decode and re-encode these ids; added tokens stay, other control tokens follow the rule
        for texts."""
        if self._parses:
            return self.ids(self.full_text(token_ids))
        ids: list[int] = []
        for is_added, group in itertools.groupby(token_ids, key=self._added.__contains__):
            part = list(group)
            ids += part if is_added else self.ids(self.full_text(part))
        return ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens without those of `hidden`."""
        return self.full_text([token_id for token_id in token_ids if token_id not in self.hidden])

    def full_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens with all special tokens."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=False)
        return text


def control_tokens(
    backend: tokenizers.Tokenizer, templates: Iterable[str], stop_ids: Collection[int] = ()
) -> frozenset[str]:
    """Return a model's control tokens; its other added tokens are words."""
    written = "\0".join(templates)
    return frozenset(
        token.content
        for token_id, token in backend.get_added_tokens_decoder().items()
        if token.special
        or token_id in stop_ids
        or token.content in MARKERS
        or (_MARKUP.fullmatch(token.content) and token.content in written)
    )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def plain_encoder(backend: tokenizers.Tokenizer, control: Collection[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer with the ids of `backend` but without these added tokens.

    Also removes them from the vocabulary, where WordLevel or Unigram models would match them. The
    unknown token and added words stay.
    """
    from tokenizers import Tokenizer as Backend

    spec: dict[str, Any] = json.loads(backend.to_str())
    model = spec["model"]
    words = [word for word in spec["added_tokens"] if word["content"] not in control]
    added = set(control) - {_unknown(model)}
    spec["added_tokens"], spec["post_processor"] = words, None
    # Keep the words' ids: otherwise they would get the first free ones.
    ids = {word["content"]: word["id"] for word in words}
    if isinstance(model["vocab"], dict):
        vocabulary = {
            piece: token_id for piece, token_id in model["vocab"].items() if piece not in added
        }
        model["vocab"] = vocabulary | ids
    else:
        model["vocab"] = _without(model["vocab"], added, ids)
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if added.isdisjoint(_pieces(merge))]
    return Backend.from_str(json.dumps(spec))


def _without(
    pieces: Sequence[tuple[str, float]], added: Collection[str], ids: Mapping[str, int]
) -> list[tuple[str, float]]:
    least = min(score for _, score in pieces)
    converted = [
        (_NOWHERE.format(index) if piece in added else piece, score)
        for index, (piece, score) in enumerate(pieces)
    ]
    end = max([len(converted), *(token_id + 1 for token_id in ids.values())])
    converted += [(_NOWHERE.format(index), least) for index in range(len(converted), end)]
    for piece, token_id in ids.items():
        converted[token_id] = (piece, converted[token_id][1])
    return converted


def _unknown(model: Mapping[str, Any]) -> str | None:
    token_id = model.get("unk_id")
    if token_id is not None:
        return str(model["vocab"][token_id][0])
    return model.get("unk_token")


def _pieces(merge: str | Sequence[str]) -> tuple[str, ...]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second, first + second


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
        tokenizer: Any = AutoTokenizer.from_pretrained(assets, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise PolicyError(
            f"{assets} has no readable tokenizer: {str(error).splitlines()[0]}",
            hint="save it with `save_pretrained` of a fast tokenizer, which writes tokenizer.json",
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise PolicyError(f"the tokenizer in {assets} has no fast version")
    backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    return backend


def _prefix_of(backend: tokenizers.Tokenizer) -> list[int]:
    for probe in _PROBES:
        bare: list[int] = backend.encode(probe, add_special_tokens=False).ids
        dressed: list[int] = backend.encode(probe, add_special_tokens=True).ids
        for index in range(len(dressed) - len(bare) + 1 if bare else 0):
            if dressed[index : index + len(bare)] == bare:
                return dressed[:index]
    return []


def _stop_ids(assets: Path, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    named = special_tokens(assets).get("eos_token")
    own = None if named is None else backend.token_to_id(named)
    stop_ids = set() if own is None else {own}
    special = {
        token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
    }
    configured = _eos_ids(assets)
    stop_ids |= configured & special
    return tuple(sorted(stop_ids or configured))


def _eos_ids(assets: Path) -> set[int]:
    for name in ("generation_config.json", "config.json"):
        ids = read_object(assets / name).get("eos_token_id")
        if ids is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    return set()
