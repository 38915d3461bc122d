"""`python -m bench NAME`: benchmarks and studies. Needs a checkout after `make setup`."""

from __future__ import annotations

from dora_pipe.cli.main import run_command

if __name__ == "__main__":
    run_command("dora_pipe.bench.commands")
