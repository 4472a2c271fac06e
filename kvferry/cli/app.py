"""Entry point of `kvferry`: the commands, and what becomes of errors (one line, exit code 1; wrong usage 2)."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kvferry import __version__
from kvferry.cli import cache, chat, drain, generate, models, plan, serve, up, workers
from kvferry.cli.console import write, write_error
from kvferry.errors import KvferryError

WRONG_USAGE = 2
INTERRUPTED = 130


def make_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(name="kvferry", add_completion=False, pretty_exceptions_enable=False)
    app.callback(epilog="Example: kvferry up --demo", no_args_is_help=True)(kvferry)
    for module in (up, serve, generate, chat, workers, drain, plan):
        module.register(app)
    app.add_typer(models.make_app(), name="models")
    app.add_typer(cache.make_app(), name="cache")
    return app


def _write_version(is_wanted: bool) -> None:
    if is_wanted:
        write(f"kvferry {__version__}\n")
        raise typer.Exit


def kvferry(
    version: Annotated[
        bool, typer.Option("--version", callback=_write_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serves large language models over gRPC with prefill and decode on separate workers."""


def main() -> None:
    """Runs the command line."""
    try:
        make_app()()
    except KvferryError as error:
        write_error(error.message)
        sys.exit(WRONG_USAGE if (error.field or "").startswith("--") else 1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
