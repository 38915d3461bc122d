"""What every command takes, and the beginning of what it does.

Only the standard library, typer and what talks to the user are imported before a command does its
work: `--help` and errors of usage wait for nothing else (tests/unit/test_help_is_quick.py).
"""
