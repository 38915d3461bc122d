"""Texts of a run, by its tokenizer and data.

Missing texts are omitted with one message; no command fails.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dora_pipe.audit.export import Rows, TextColumns
from dora_pipe.config.several import pool_specs
from dora_pipe.core.errors import BusError, DoraError, PolicyError, install_hint
from dora_pipe.core.system.console import say
from dora_pipe.core.system.own_code import importable
from dora_pipe.launch.model_checks import has_tokenizer
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import first_record
from dora_pipe.observe.web.view import Decode, RunSource
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.data.prepare import reporting
from dora_pipe.producers.tasks.registry import open_task, rows_digest
from dora_pipe.schemas.control import RunStarted

AS_IDS: Final = "texts are shown as token ids"


def decoder_of(run: OpenRun) -> Decode | None:
    """Return a decoder of the run's token ids, or None."""

    def assets() -> Path:
        started = first_record(run.bus, run.topics)
        return run.policies.assets(started.assets_digest)

    tokenizer = _tokenizer(assets, AS_IDS)
    return None if tokenizer is None else tokenizer.full_text


def source_of(run: OpenRun, *, redact: bool = False) -> RunSource:
    """Return the access of descriptions and pages to a run's records."""
    return RunSource(
        bus=run.bus,
        topics=run.topics,
        policies=run.policies,
        decode=None if redact else decoder_of(run),
        redact=redact,
        catalogue=run.directory.catalogue,
    )


def texts_of(run: OpenRun) -> TextColumns:
    """Return the text columns of an export."""
    started = first_record(run.bus, run.topics)
    words = _tokenizer(lambda: run.policies.assets(started.assets_digest), "note: texts are empty")
    return TextColumns(words, _data(run, started))


def _tokenizer(assets: Callable[[], Path], consequence: str) -> Tokenizer | None:
    try:
        if importlib.util.find_spec("tokenizers") is None:
            raise PolicyError(f"`tokenizers` is not installed: {install_hint('torch')}")
        directory = assets()
        if not has_tokenizer(directory):
            raise PolicyError("the model directory has no tokenizer")
        return Tokenizer(directory)
    except BusError:  # log errors are left to the command
        raise
    except (DoraError, OSError, ImportError) as error:  # transformers reads old formats
        say(f"{consequence}: {error}")
        return None


def _data(run: OpenRun, started: RunStarted) -> dict[str, Rows]:
    digests = {started.dataset_digest, started.eval_digest} - {""}
    digests |= {dataset.digest for dataset in started.datasets.values()}
    rows_by_digest: dict[str, Rows] = {}
    try:
        for task in (spec.task for spec in pool_specs(run.config)):
            with importable(task.directory), reporting(say):
                opened = open_task(task)
                for split in ("train", "eval"):
                    rows = opened.rows(split)
                    digest, _ = rows_digest(rows, split)
                    if digest in digests:
                        rows_by_digest[digest] = rows
    except Exception as error:  # task code may raise anything
        _without(f"{type(error).__name__}: {error}")
        return {}
    if rows_by_digest.keys() != digests:
        _without("the data differs from the run's data")
    return rows_by_digest


def _without(why: str) -> None:
    say(f"note: columns of the data are empty: {why}")
