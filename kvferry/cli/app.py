"""Entry point of `kvferry`: the commands, and what becomes of errors (one line, exit code 1; wrong usage 2)."""

from __future__ import annotations

import os
import sys

import typer

from kvferry.cli import generate, models, serve, up, workers
from kvferry.cli.console import write_error
from kvferry.errors import KvferryError

INTERRUPTED = 130


def make_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        name="kvferry",
        help="Serves large language models over gRPC with prefill and decode on separate workers.",
        epilog="Example: kvferry up --demo",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for module in (up, serve, generate, workers):
        module.register(app)
    app.add_typer(models.make_app(), name="models")
    return app


def main() -> None:
    """Runs the command line."""
    try:
        make_app()()
    except KvferryError as error:
        write_error(error.message)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
