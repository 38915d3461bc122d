"""Tests of token ids with an embedding row but no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from dora_pipe.core.errors import PolicyError
from dora_pipe.store.model_dir import unassigned_ids


def _model(folder: Path, ids: list[int], config: dict[str, Any], added: str = "") -> Path:
    backend = Tokenizer(
        models.WordLevel({f"w{token_id}": token_id for token_id in ids}, unk_token="w0")
    )
    if added:
        backend.add_tokens([AddedToken(added)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("ids", "config", "added", "expected"),
    [
        ([0, 1, 2, 3], {"vocab_size": 4}, "", ()),
        ([0, 1, 2, 3], {"vocab_size": 6}, "", (4, 5)),
        ([0, 1, 3], {"vocab_size": 5}, "", (2, 4)),
        ([0, 1, 2], {"vocab_size": 5}, "<end>", (4,)),
        ([0, 1], {"text_config": {"vocab_size": 3}}, "", (2,)),
        ([0, 1, 2, 3], {"vocab_size": 2}, "", ()),
        ([0, 1], {}, "", ()),
    ],
)
def test_ids_without_a_token(
    ids: list[int], config: dict[str, Any], added: str, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert unassigned_ids(_model(tmp_path, ids, config, added)) == expected


def test_a_folder_without_a_tokenizer_has_none_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    assert unassigned_ids(tmp_path) == ()
    folder = _model(tmp_path, [0], {"vocab_size": 2})
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(PolicyError, match="is not a tokenizer"):
        unassigned_ids(folder)
