"""Entry point of `dora-pipe`; turns errors into a line and an exit code.

Handles Ctrl-C before slow imports.
"""

from __future__ import annotations

import os
import select
import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run `dora-pipe`."""
    run_command("dora_pipe.cli.app")


def run_command(module: str) -> None:
    """Run the `app` of a module and exit with a documented exit code."""
    try:
        _run(module)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)


def _run(module: str) -> None:
    import logging
    from importlib import import_module

    from dora_pipe.core.errors import DoraError
    from dora_pipe.core.system.console import complain, log_to_stderr, speak
    from dora_pipe.core.system.proxies import bypass_proxies

    app = import_module(module).app
    speak()
    bypass_proxies()
    log_to_stderr(logging.WARNING)
    try:
        try:
            app()
        except FileNotFoundError:
            from dora_pipe.core.system.durable import need_temporary_folder

            need_temporary_folder()  # raises if the temporary folder is missing
            raise
    except DoraError as error:
        complain(error)
        sys.exit(error.exit_code)
    except (BrokenPipeError, SystemExit) as end:
        if not _reader_left(end):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for buffered output
        sys.exit(0)


def _reader_left(end: BaseException) -> bool:
    """Return whether the reader of stdout has closed it: `dora-pipe show | head`."""
    cause: BaseException | None = end
    while cause is not None and not isinstance(cause, BrokenPipeError):
        cause = cause.__context__
    if cause is None:
        return False
    pipe = select.poll()
    pipe.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in pipe.poll(0))
