"""The `dora-pipe` command: the one place where errors become a line and an exit code.

Nothing is imported before Ctrl-C is a line too: the commands and what they need take a while.
"""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command; the process ends with one of the named exit codes."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)


def _run() -> None:
    import logging

    from dora_pipe.cli.app import app
    from dora_pipe.core.console import complain, log_to_stderr, speak
    from dora_pipe.core.errors import DoraError
    from dora_pipe.core.proxies import bypass_proxies

    speak()
    bypass_proxies()
    log_to_stderr(logging.WARNING)
    try:
        app()
    except DoraError as error:
        complain(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
