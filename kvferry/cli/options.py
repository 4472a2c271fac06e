"""Options that several commands share, and how they become the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from kvferry.client_routers import check_address
from kvferry.config import Config, load_config
from kvferry.errors import InvalidArgument

ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.toml", help="Configuration; ./kvferry.toml if it is there.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any configuration value, such as engine.block_size=32; repeatable."
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Name of a known model, or path of a folder or .gguf file.")
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16.")]
QuantizationOption = Annotated[
    str | None,
    typer.Option("--quantization", help="none; or int8, int4, auto for the weights: quicker, other tokens."),
]
TargetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        "--router",
        metavar="HOST:PORT",
        help="Router; router.grpc_listen of the configuration. Repeatable: where one dies, another takes over.",
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="Says who calls, where the router knows tenants; client.api_key of the configuration "
        "(KVFERRY_CLIENT__API_KEY), which other users of this machine cannot see.",
    ),
]
ResumeOption = Annotated[
    bool | None,
    typer.Option(
        "--resume/--no-resume",
        help="Whether a response whose router is lost goes on, at another router or, with a single one, at the same "
        "when it is back; where there are several routers, unless told otherwise.",
        show_default=False,
    ),
]
SessionOption = Annotated[
    str, typer.Option("--session-id", help="Requests of one session prefer the workers that have its blocks.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Overrides = dict[str, dict[str, object]]


def configuration(path: Path | None, settings: Sequence[str] | None, flags: Overrides | None = None) -> Config:
    """The effective configuration; named flags win over `--set`."""
    overrides: Overrides = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            raise InvalidArgument("--set", f"must be SECTION.KEY=VALUE, got {setting!r}")
        overrides.setdefault(section, {})[name] = value.strip()
    for section, values in (flags or {}).items():
        given = {key: value for key, value in values.items() if value is not None}
        if given:
            overrides.setdefault(section, {}).update(given)
    return load_config(path, overrides)


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """Where a command's router is, or the routers of which any will do, and as whom they are called.

    Attributes:
        resume: whether responses outlive a router; None for the client's default.
    """

    addresses: tuple[str, ...]
    api_key: str | None = field(default=None, repr=False)
    resume: bool | None = None


def router_of(
    target: str | Sequence[str] | None, api_key: str | None, config: Config, *, resume: bool | None = None
) -> RouterTarget:
    """Flags win over the configuration; raises InvalidArgument when an address is not host:port."""
    configured = config.client.api_key
    key = api_key if api_key is not None or configured is None else configured.get_secret_value()
    chosen = [target] if isinstance(target, str) else target
    addresses = tuple(chosen or [config.router.grpc_listen])
    for address in addresses:
        check_address("--target", address)
    return RouterTarget(addresses, key, resume)
