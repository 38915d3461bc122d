"""`python -m sim`: runs in virtual time under faults, in a checkout after `make setup`."""

from __future__ import annotations

from dora_pipe.cli.main import run_command

if __name__ == "__main__":
    run_command("dora_pipe.cli.sim")
