"""Generation config and model card of exported weights, without paths or host names."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dora_pipe.config.model import Config, Sampling
from dora_pipe.core.errors import ResourceError
from dora_pipe.ledger.database import Catalogue
from dora_pipe.ledger.evaluations import Interval, evaluations_of

CARD: Final = "README.md"
GENERATION: Final = "generation_config.json"
_FRONT: Final = "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
_SAMPLING: Final = frozenset({"do_sample", "temperature", "top_p", "top_k", "min_p"})


def generation_config(
    model_config: Mapping[str, Any], sampling: Sampling, stop_ids: Collection[int]
) -> dict[str, Any]:
    """Return the model's own config (`model_config`) with the run's stop tokens and sampling."""
    generation = {key: value for key, value in model_config.items() if key not in _SAMPLING}
    if stop_ids:
        generation["eos_token_id"] = sorted(stop_ids)
    generation["max_new_tokens"] = sampling.max_tokens
    if not sampling.temperature:
        return {**generation, "do_sample": False}
    generation |= {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,  # 0 disables it; their default is 50
    }
    return generation | ({"min_p": sampling.min_p} if sampling.min_p else {})


def write_beside(
    directory: Path, catalogue: Catalogue, config: Config, version: int, stop_ids: Collection[int]
) -> None:
    """Write both files. Raises ResourceError."""
    path = directory / GENERATION
    try:
        model_config = json.loads(path.read_bytes()) if path.is_file() else {}
        generation = generation_config(model_config, config.sampling, stop_ids)
        path.write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
        (directory / CARD).write_text(model_card(catalogue, config, version))
    except (OSError, ValueError) as error:
        raise ResourceError(f"cannot write {directory}: {error}") from error


def model_card(catalogue: Catalogue, config: Config, version: int) -> str:
    """Return the card: origin, digests, metrics and the command to rebuild."""
    run = catalogue.records("select * from runs")[0]
    name = run["run"]
    parts = [
        f"{_FRONT}\n# {name}, version {version}\n",
        f"A policy of the reinforcement-learning run `{name}` of dora-pipe {run['package']}, after"
        f" {version} of {config.run.steps} steps.\n",
        _table(("", ""), _origin(catalogue, config, run, version)),
    ]
    if version:
        step = catalogue.records("select * from steps where step = ?", [version - 1])[0]
        parts += ["\n## The last step\n", _table(("setting", "value"), _settings(step))]
        metrics = json.loads(step["metrics"])
        parts += ["", _table(("metric", "value"), [(k, f"{v:.6g}") for k, v in metrics.items()])]
    evaluated = evaluations_of(catalogue, versions=(0, version))
    rows = [
        (
            evaluation.evaluation or "-",
            evaluation.version,
            name,
            f"{value.value:.4f}",
            _between(value),
        )
        for evaluation in evaluated
        for name, value in evaluation.metrics.items()
    ]
    if rows:
        columns = ("evaluation", "version", "metric", "value", "95 % interval over prompts")
        parts += ["\n## Evaluation\n", _table(columns, rows)]
    parts += ["\n## Made again\n", *_made_again(name, version)]
    return "\n".join(parts) + "\n"


def _between(interval: Interval) -> str:
    return f"{interval.low:.4f} to {interval.high:.4f}"


def _origin(
    catalogue: Catalogue, config: Config, run: Mapping[str, Any], version: int
) -> Iterator[tuple[str, str]]:
    digests = dict(catalogue.query("select version, digest from versions"))
    yield "base model", f"{Path(config.model.path).name}, weights `{digests[0]}`"
    if run["lineage_run"] is not None:
        yield "which came from", f"run `{run['lineage_run']}`, step {run['lineage_step']}"
    yield "weights", f"`{digests[version]}`"
    if config.lora.rank and version:
        yield (
            "trained",
            f"an adapter of rank {config.lora.rank}, merged; `adapter/` has it unmerged",
        )
    yield "config, tokenizer, template", f"`{run['assets_digest']}`"
    yield "training data", f"{run['dataset_rows']} rows, `{run['dataset_digest']}`"
    if run["eval_rows"]:
        yield "evaluation data", f"{run['eval_rows']} rows, `{run['eval_digest']}`"
    workers = catalogue.records("select * from workers")
    for what, column in (("rewards", "reward_digest"), ("chat template", "template_digest")):
        for digest in sorted({worker[column] for worker in workers if worker.get(column)}):
            yield what, f"`{digest}`"
    yield "configuration", f"`{run['config_digest']}`, seed {run['seed']}"


def _settings(step: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, json.dumps(value)) for key, value in sorted(json.loads(step["settings"]).items())]


def _made_again(name: str, version: int) -> Iterator[str]:
    if not version:
        yield "These are the weights that the run started from."
        return
    yield "This command trains the last step again bit for bit, from the run's log and store:\n"
    yield f"```console\n$ dora-pipe replay {name} --from {version - 1} --to {version}\n```\n"
    yield "`dora-pipe audit` verifies the whole log."


def _table(columns: Sequence[str], rows: Collection[Any] | Iterator[Any]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join(
        [
            *lines,
            *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows),
        ]
    )
