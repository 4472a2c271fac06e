"""`kvferry router|prefill|decode`: one process of a cluster, which takes this one's place; `kvferry config`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvferry.cli.console import note, write
from kvferry.cli.options import (
    ConfigOption,
    DtypeOption,
    ModelOption,
    Overrides,
    QuantizationOption,
    SetOption,
    configuration,
)
from kvferry.config import Config, ModelConfig, child_environment, to_toml, write_private
from kvferry.errors import InvalidArgument
from kvferry.host import num_cores
from kvferry.model_store import ModelStore
from kvferry.rpc import check_can_listen

ListenOption = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Address to serve on; port 0 chooses a free one.")
]
WorkerIdOption = Annotated[
    str | None,
    typer.Option("--worker-id", help="Name in listings, logs and traces.", show_default="ROLE-HOST:PORT"),
]
AdvertiseOption = Annotated[
    str | None, typer.Option("--advertise", metavar="HOST:PORT", help="Where peers reach it, if not where it listens.")
]
AddressesOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,…", help="Workers the router sends to; dns:///HOST:PORT for every address of a name."
    ),
]
JoinOption = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="HOST:PORT,…",
        help="Routers this worker makes itself known to, where they do not list it (router.accept_joins); also "
        "dns:///HOST:PORT. Where they ask for a key: join.key (KVFERRY_JOIN__KEY).",
    ),
]

PIPE_BYTES = 1 << 16
"""What a pipe holds while nobody reads it."""


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command(
        "router", epilog="Example: kvferry router --prefill 10.0.0.1:50061 --decode 10.0.0.2:50062,10.0.0.3:50062"
    )(router)
    app.command("prefill", epilog="Example: kvferry prefill --listen 127.0.0.1:50061 --model smollm2-135m-instruct")(
        prefill
    )
    app.command("decode", epilog="Example: kvferry decode --listen 127.0.0.1:50062 --set engine.num_blocks=2000")(
        decode
    )
    app.command("config", epilog="Example: kvferry config --set engine.block_size=32 --output kvferry.toml")(
        show_config
    )


def router(
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="gRPC address.")] = None,
    http_listen: Annotated[str | None, typer.Option("--http-listen", metavar="HOST:PORT", help="HTTP address.")] = None,
    prefill: AddressesOption = None,
    decode: AddressesOption = None,
    accept_joins: Annotated[
        bool | None, typer.Option("--accept-joins", help="Let workers join by themselves (`--join` of theirs).")
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Runs a router: what clients talk to.

    Where it lists no prefill workers, and none can join, the decode workers compute prompts themselves.
    """
    flags: Overrides = {
        "router": {
            "grpc_listen": listen,
            "http_listen": http_listen,
            "prefill": prefill,
            "decode": decode,
            "accept_joins": accept_joins,
        }
    }
    effective = configuration(config, settings, flags | {"model": {"name": model}})
    if not (effective.router.decode or effective.router.accept_joins):
        raise InvalidArgument("router.decode", "names no worker; give --decode HOST:PORT or --accept-joins")
    _become("router", prepared(effective, note), ["--listen", effective.router.grpc_listen], num_threads=1)


def prefill(
    listen: ListenOption = "127.0.0.1:50061",
    worker_id: WorkerIdOption = None,
    advertise: AdvertiseOption = None,
    join: JoinOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Runs a prefill worker: fills KV blocks and ships them."""
    effective = configuration(config, settings, _model(model, dtype, quantization) | {"join": {"routers": join}})
    _worker("prefill_svc", listen, _identity(worker_id, advertise), effective)


def decode(
    listen: ListenOption = "127.0.0.1:50062",
    worker_id: WorkerIdOption = None,
    advertise: AdvertiseOption = None,
    join: JoinOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Runs a decode worker: takes KV blocks and streams tokens."""
    effective = configuration(config, settings, _model(model, dtype, quantization) | {"join": {"routers": join}})
    _worker("decode_svc", listen, _identity(worker_id, advertise), effective)


def show_config(
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write to this file, which may be the one read.")
    ] = None,
    show_keys: Annotated[bool, typer.Option("--show-keys", help="Write API keys, too; otherwise hidden.")] = False,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Prints the effective configuration as TOML: flags over environment over file over defaults."""
    effective = configuration(config, settings, _model(model, dtype, quantization))
    if output is not None and effective.has_keys and not show_keys:
        raise InvalidArgument(
            "--output", "the configuration holds API keys, which the file would lose; add --show-keys"
        )
    text = to_toml(effective, show_keys=show_keys)
    if effective.engine.num_blocks is None and effective.engine.kv_memory_bytes is None:
        text += f"\n# engine.kv_memory_bytes would be {effective.engine.pool_bytes()} for one engine on this machine\n"
    if output is None:
        write(text)
    else:
        _write_whole(output, text, is_private=effective.has_keys)


def _write_whole(file: Path, text: str, *, is_private: bool) -> None:
    """Replaces `file` at once, so that it is never empty or half written; raises InvalidArgument when it cannot be."""
    target = file.resolve()
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if is_private:
            write_private(scratch, text)
        else:
            scratch.write_text(text, encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise InvalidArgument("--output", f"cannot write {file}: {error.strerror}") from error


def _model(name: str | None, dtype: str | None, quantization: str | None) -> Overrides:
    return {"model": {"name": name, "dtype": dtype, "quantization": quantization}}


def _identity(worker_id: str | None, advertise: str | None) -> list[str]:
    return [*(("--worker-id", worker_id) if worker_id else ()), *(("--advertise", advertise) if advertise else ())]


def _worker(module: str, listen: str, arguments: Sequence[str], config: Config) -> NoReturn:
    check_can_listen(listen)  # at once, not after the model is fetched
    threads = config.engine.num_threads or num_cores()
    keyless = config.without_keys()
    effective = prepared(keyless.of_model(keyless.model), note).replace("engine", num_threads=threads)
    _become(module, effective, ["--listen", listen, *arguments], num_threads=threads)


def prepared(config: Config, report: Callable[[str], None]) -> Config:
    """With the folder of every model filled in; those that are not on this machine are fetched or converted."""

    def with_path(model: ModelConfig) -> ModelConfig:
        if model.path is not None:
            return model
        return model.model_copy(update={"path": str(ModelStore(model.cache_path).prepare(model.name, report))})

    return config.with_models([with_path(model) for model in config.served_models])


def _become(module: str, config: Config, arguments: Sequence[str], num_threads: int) -> NoReturn:
    """Replaces this process by `python -m module`. The configuration goes through a pipe, so that no file is left."""
    text = to_toml(config, show_keys=True).encode()
    if len(text) >= PIPE_BYTES:
        raise InvalidArgument("configuration", f"has {len(text)} bytes as TOML; at most {PIPE_BYTES - 1}")
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    os.write(writer, text)
    os.close(writer)
    command = [sys.executable, "-m", module, "--config", f"/dev/fd/{reader}", *arguments]
    os.execve(sys.executable, command, child_environment(num_threads))  # noqa: S606 - a fixed program, no shell
