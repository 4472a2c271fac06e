"""`kvferry models`: what can be served by name, and preparing it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.console import note, write, write_json, write_table
from kvferry.cli.options import ConfigOption, JsonOption, SetOption, configuration
from kvferry.model_store import ModelStore


def make_app() -> typer.Typer:
    """The commands below `kvferry models`."""
    app = typer.Typer(help="Lists and prepares models.", epilog="Example: kvferry models prepare", no_args_is_help=True)
    app.command("list", epilog="Example: kvferry models list --json")(list_models)
    app.command("prepare", epilog="Example: kvferry models prepare ./SmolLM2-135M-Instruct.Q4_1.gguf")(prepare)
    return app


def list_models(as_json: JsonOption = False, config: ConfigOption = None, settings: SetOption = None) -> None:
    """Lists the known models and those in the cache."""
    entries = ModelStore(configuration(config, settings).model.cache_path).entries()
    if as_json:
        write_json(
            [
                {
                    "name": entry.name,
                    "description": entry.description,
                    "path": str(entry.path),
                    "prepared": entry.is_prepared,
                }
                for entry in entries
            ]
        )
        return
    write_table(
        {
            "name": [entry.name for entry in entries],
            "prepared": ["yes" if entry.is_prepared else "no" for entry in entries],
            "what": [entry.description for entry in entries],
            "folder": [str(entry.path) for entry in entries],
        }
    )


def prepare(
    name: Annotated[str | None, typer.Argument(help="Name or path; model.name of the configuration.")] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Fetches and converts a model, once; prints its folder."""
    model = configuration(config, settings).model
    write(f"{ModelStore(model.cache_path).prepare(name or model.name, note)}\n")
