"""`ui`: a local web application on a log, or the same pages as one file."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dora_pipe.core.console import say
from dora_pipe.core.errors import PolicyError, UsageError
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.observe.lineage import policy_after
from dora_pipe.observe.web.pages import Decode, Source
from dora_pipe.observe.web.query_worker import Opener


def opener_of(
    name: str, root: Path, archive: Path | None = None, *, redact: bool = False
) -> Opener:
    """Opens a run, or the archive of one, as the pages need it."""

    @contextmanager
    def open_source() -> Iterator[Source]:
        with opened(name, root, archive) as run:
            yield Source(
                bus=run.bus,
                topics=run.topics,
                policies=run.policies if run.has_policies else None,
                decode=None if redact else _decoder(run),
                redact=redact,
                catalogue=run.directory.catalogue,
            )

    return open_source


def _decoder(run: OpenRun) -> Decode | None:
    """The run's tokenizer; None, and said, where it cannot be used."""
    if not run.has_policies or importlib.util.find_spec("tokenizers") is None:
        say("texts are shown as token ids: no tokenizer can be used here")
        return None
    from dora_pipe.producers.worker.tokenizer import Tokenizer

    try:
        started, _ = policy_after(run.bus, run.topics, 0)
        assets = run.policies.assets(started.assets_digest)
        if any(assets.glob("tokenizer*")):
            return Tokenizer(assets).full_text
        say("texts are shown as token ids: the model directory has no tokenizer")
    except (PolicyError, UsageError, OSError) as error:
        say(f"texts are shown as token ids: {error}")
    return None
