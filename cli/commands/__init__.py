"""Command definitions of the CLI.

Imports only the standard library, typer and console code until a command runs, so that `--help` and
usage errors are fast (tests/unit/test_help_is_quick.py).
"""
