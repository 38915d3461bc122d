"""Runs with vLLM on a user's own material: the folder, and who has joined."""

from __future__ import annotations

import shutil
from pathlib import Path

from dora_pipe.schemas.control import WorkerJoined
from tests.support.device import DEVICE, DTYPE
from tests.support.models import make_llama_gqa
from tests.support.user_run import facts, furnish
from tests.support.vllm_engines import need_vllm


def furnished(folder: Path) -> Path:
    """A user's folder with a tied, grouped-query Llama whose heads vLLM has kernels for; trainer
    and vLLM compute as `support.device` says."""
    need_vllm()
    furnish(folder)
    config = (folder / "config.toml").read_text()
    config = config.replace("[trainer]", f'[trainer]\ndevice = "{DEVICE}"')
    config += f'[workers.vllm]\ndtype = "{DTYPE}"\n'
    (folder / "config.toml").write_text(config)
    shutil.rmtree(folder / "model")
    make_llama_gqa(folder / "model", hidden_size=192)
    return folder


def joined(place: Path) -> dict[str, str]:
    """Engines of the workers that joined, by name."""
    if not (place / "runs" / "tiny" / "log.sqlite").exists():
        return {}
    found = [one for one in facts(place, "tiny") if isinstance(one, WorkerJoined)]
    return {one.worker: one.engine for one in found}
