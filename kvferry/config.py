"""Configuration of every process: one frozen tree, from flags, environment, a TOML file and defaults, in that order.

`load_config` is the only reader of the environment in the whole project. Unknown keys are refused by name, whatever
source they come from. `to_toml` prints the effective values; a child process gets exactly that as its `--config`.

API keys are `SecretStr`: no repr, log line or error shows one. `to_toml` writes them only when asked, for the router's
own file, which nobody else may read (`write_private`); workers get a configuration without keys.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from kvferry.errors import InvalidArgument, NotFound
from kvferry.host import memory_limit_bytes
from kvferry.tomlout import Example, Hidden, toml_document

ENV_PREFIX = "KVFERRY_"
DNS_SCHEME = "dns:///"
"""Begins an address that stands for all addresses of its name, as in gRPC."""
KernelChoice = Literal["auto", "native", "reference"]
Speculation = Literal["auto", "prompt_lookup", "none"]
Quantization = Literal["none", "auto", "int8", "int4"]
DEFAULT_FILE = Path("kvferry.toml")
DEFAULT_MODEL = "smollm2-135m-instruct"
POOL_SHARE = 8
"""The pools of a machine take one part in eight of its memory by default: copies of a small model fit beside them."""
MAX_DEFAULT_POOL_BYTES = 2 << 30
MIN_DEFAULT_POOL_BYTES = 64 << 20
MAX_DEFAULT_BLOCKS = 1 << 18
"""Blocks of a scripted model are tiny: without this the books of its default pool would have millions of entries."""

MIN_KEY_CHARS = 8
MAX_KEY_CHARS = 512
"""Keys travel in headers, of which peers accept 8 KB."""
SAFE_TENANT_KEYS = ("name", "admin", "max_used_share", "max_cached_share")
"""Values of these may stand in an error message; anything else below `tenants` could be a misplaced API key."""

_Section = TypeVar("_Section", bound=BaseModel)


def _split_commas(value: object) -> object:
    """Lists may be written `a,b` where the source is a string (environment, flags)."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _tables_from_text(value: object) -> object:
    """Lists of tables may be written as JSON where the source is a string (flags; the environment always is)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"as text it must be a list of tables in JSON: {error}") from error


def _listen_address(value: str) -> str:
    if not is_host_port(value, lowest_port=0):
        raise ValueError("must be host:port, such as 127.0.0.1:50051; port 0 is any free one")
    return value


def _target(value: str) -> str:
    host = value.removeprefix(DNS_SCHEME).rpartition(":")[0]
    if value.startswith(DNS_SCHEME) and not all(0 < len(label) < 64 for label in host.rstrip(".").split(".")):
        raise ValueError("is no name: its parts, between dots, have 1 … 63 characters each")
    if not is_host_port(value.removeprefix(DNS_SCHEME), lowest_port=1):
        raise ValueError("must be host:port, or dns:///host:port for every address of the name")
    return value


def _otlp_endpoint(value: str) -> str:
    if not is_host_port(value.removeprefix("https://").removeprefix("http://").removesuffix("/"), lowest_port=1):
        raise ValueError("must be host:port, http://host:port or https://host:port, such as 127.0.0.1:4317")
    return value


def _api_key(value: SecretStr) -> SecretStr:
    """Messages name the rule, never the key."""
    key = value.get_secret_value()
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        raise ValueError(f"an API key has {MIN_KEY_CHARS} … {MAX_KEY_CHARS} characters; this one has {len(key)}")
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError("an API key consists of printable ASCII characters without spaces")
    if set(key) == {"*"}:
        raise ValueError("asterisks stand for a hidden API key; write the key itself")
    return value


def is_host_port(text: str, lowest_port: int) -> bool:
    """Whether it is host:port; an IPv6 host stands in brackets."""
    match = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})", text)
    return match is not None and lowest_port <= int(match[1]) <= 65_535


ListenAddress = Annotated[str, AfterValidator(_listen_address)]
Target = Annotated[str, AfterValidator(_target)]
Targets = Annotated[tuple[Target, ...], NoDecode, BeforeValidator(_split_commas)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
OtlpEndpoint = Annotated[str, AfterValidator(_otlp_endpoint)]
ApiKey = Annotated[SecretStr, AfterValidator(_api_key)]
ApiKeys = Annotated[tuple[ApiKey, ...], NoDecode, BeforeValidator(_split_commas)]


class _Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )


class ModelConfig(_Frozen):
    """Which model, in which precision, and where prepared models lie."""

    name: str = DEFAULT_MODEL
    """Name of a known model, or path of a folder or .gguf file."""
    path: str | None = None
    """Prepared folder; set by `kvferry` for its child processes, otherwise found from `name`."""
    served_name: str | None = None
    """Name clients use; the last part of `name`, without .gguf, when unset."""
    aliases: Names = ()
    """Other names clients may use."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of weights, activations and KV blocks; all workers of a cluster agree."""
    tool_format: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = "auto"
    """How the model writes calls of tools, for OpenAI's interface to read; `auto` is as its chat template does."""
    compact_json: bool = False
    """Whether JSON that a request constrains has no white space between its parts, unless the request says otherwise;
    the same at all routers of a deployment."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: the model's generation_config.json has the defaults of temperature, top_p, top_k, min_p, penalties and
    max_tokens (its max_new_tokens) for requests that leave them unset; the same at all routers of a deployment."""
    quantization: Quantization = "none"
    """How linears hold their weights, for models of Llama's family on native kernels; what they multiply is rounded to
    bytes, so tokens may be others than the exact model's. int8: 8 bits, 32 weights a scale. int4: 4 bits; tensors of a
    GGUF in Q4_0, Q4_1 or Q8_0 keep their very values, others are rounded, the output layer's to 8 bits. auto: int4
    where that rounds no weight, else none. All workers of a cluster agree."""
    cache_dir: Path = Path("~/.cache/kvferry")
    """Where models fetched or converted by `kvferry` and the kernels built for this machine are kept."""

    @property
    def public_name(self) -> str:
        path = Path(self.name)
        return self.served_name or (path.stem if path.suffix == ".gguf" else path.name)

    @property
    def cache_path(self) -> Path:
        return self.cache_dir.expanduser()

    @property
    def kernels_path(self) -> Path:
        return self.cache_path / "kernels"


class RouterConfig(_Frozen):
    """Addresses and limits of the router."""

    grpc_listen: ListenAddress = "127.0.0.1:50051"
    """host:port of the gRPC server, which clients talk to; port 0 is any free one."""
    http_listen: ListenAddress = "127.0.0.1:8000"
    """host:port of the HTTP server; port 0 is any free one."""
    prefill: Targets = ()
    """host:port of every prefill worker; dns:///host:port stands for every address the name has, and is followed."""
    decode: Targets = ()
    """host:port of every decode worker, or dns:///host:port."""
    accept_joins: bool = False
    """Whether workers that are not listed may join (`join.routers` of theirs). Whoever can join is sent prompts."""
    join_keys: ApiKeys = ()
    """Keys of which a worker must show one to join; needed where there are tenants."""
    local_prefill: bool | None = None
    """Whether decode workers compute prompts themselves, without prefill workers. When unset: where none is listed and
    none can join."""
    dns_refresh_s: float = Field(default=5.0, ge=0.1, le=3600.0)
    """How often dns:/// names are resolved anew."""
    max_request_bytes: int = Field(default=4 << 20, ge=1024, le=1 << 30)
    """Largest request message; larger ones are refused before any work."""
    max_queue: int = Field(default=1024, ge=1)
    """Requests in flight and waiting; each may hold a full prompt in memory, so the number is bounded."""
    max_attempts: int = Field(default=3, ge=1, le=10)
    """Tries of one request without progress."""
    recovery_wait_s: float = Field(default=60.0, ge=0.0)
    """How long a request whose tokens are under way waits for a worker to come back; long enough for a restart."""
    retry_budget: float = Field(default=0.1, ge=0.0, le=1.0)
    """Retries without progress as a share of requests."""
    max_session_lead: int = Field(default=8, ge=0)
    """How much busier than the least busy (running and waiting requests, this router's own counted twice) a session's
    worker may be and still be preferred; a request of the session goes to the least busy one then."""
    min_moved_tokens: int = Field(default=32, ge=0)
    """From how many output tokens on a sequence leaves a draining decode worker with its blocks, shipped from there;
    one with fewer is computed again by a prefill worker. 0: all are."""

    @property
    def has_local_prefill(self) -> bool:
        """Whether decode workers compute prompts themselves."""
        return not (self.prefill or self.accept_joins) if self.local_prefill is None else self.local_prefill

    @model_validator(mode="after")
    def _has_use_for_prefill(self) -> Self:
        if self.local_prefill and self.prefill:
            raise ValueError("local_prefill must not be true where prefill workers are listed: they would do nothing")
        return self


class JoinConfig(_Frozen):
    """How a worker makes itself known; not needed where its routers list it."""

    routers: Targets = ()
    """host:port of every router, or dns:///host:port; the worker keeps a connection to each."""
    key: ApiKey | None = None
    """One of `router.join_keys` of theirs."""
    dns_refresh_s: float = Field(default=5.0, ge=0.1, le=3600.0)
    """How often dns:/// names are resolved anew."""


class EngineConfig(_Frozen):
    """One engine: its pool, its batch and its threads."""

    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens of a block; all workers of a cluster agree."""
    num_blocks: int | None = Field(default=None, ge=2)
    """Blocks of the pool; wins over `kv_memory_bytes`."""
    kv_memory_bytes: int | None = Field(default=None, ge=1 << 16)
    """Memory of the pool; when unset, a part of the machine's or container's, which `kvferry up` divides among its
    engines."""
    max_batched_tokens: int = Field(default=256, ge=1)
    """Token budget of a step."""
    max_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one prompt in a step; the token budget when unset."""
    max_running: int = Field(default=64, ge=1)
    """Sequences in the running batch."""
    max_context: int | None = Field(default=None, ge=2)
    """Prompt and output tokens of one sequence; the model's own limit when unset."""
    watermark: float = Field(default=0.01, ge=0.0, lt=1.0)
    """Share of the blocks kept free on admission so that running sequences can grow."""
    prefix_caching: bool = True
    """Whether blocks of earlier prompts are used again."""
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    """What happens to the KV of a preempted sequence: dropped and computed again, or copied to host memory and back;
    auto: what costs less by the copy and step times measured at start."""
    swap_memory_bytes: int = Field(default=256 << 20, ge=0)
    """Most host memory of one engine for blocks of preempted sequences, taken when first used; 0 is off."""
    check_integrity: bool = False
    """Whether the books of the pool are checked against all block tables whenever the engine gets idle; for tests."""
    engines_per_machine: int = Field(default=1, ge=1)
    """Engines that share the default pool of this machine; `kvferry up` sets it."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of one engine; `kvferry up` divides the cores among its engines when unset."""
    kernels: KernelChoice = "auto"
    """What computes: native C++ kernels, built at the first start where there is a compiler, or plain torch
    (reference); auto: native where they can be built. Where workers differ, so may a token by rounding after a move."""
    speculation: Speculation = "auto"
    """Several tokens a step where what follows stands earlier in the prompt or output already (prompt_lookup); they are
    the same as without. auto: where rows depend on nothing beside them, or dtype is float32."""
    max_step_s: float = Field(default=60.0, gt=0.0)
    """A step that takes longer counts as stuck: heartbeats stop, so that peers give the worker up, its health service
    says NOT_SERVING, and `kvferry up` starts it again."""

    def pool_bytes(self, memory_bytes: int | None = None) -> int:
        """Memory for one pool when `num_blocks` is unset; `memory_bytes` stands in for the machine's."""
        if self.kv_memory_bytes is not None:
            return self.kv_memory_bytes
        share = (memory_limit_bytes() if memory_bytes is None else memory_bytes) // POOL_SHARE
        return max(MIN_DEFAULT_POOL_BYTES, min(MAX_DEFAULT_POOL_BYTES, share) // self.engines_per_machine)

    def pool_blocks(self, block_bytes: int) -> int:
        """Number of blocks of `block_bytes` each; raises InvalidArgument when fewer than two fit.

        At most `MAX_DEFAULT_BLOCKS` when neither `num_blocks` nor `kv_memory_bytes` is set.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        num_blocks = self.pool_bytes() // block_bytes
        if num_blocks < 2:
            raise InvalidArgument(
                "engine.kv_memory_bytes",
                f"{self.pool_bytes()} bytes hold {num_blocks} blocks of {block_bytes} bytes; at least 2 are needed",
            )
        return num_blocks if self.kv_memory_bytes is not None else min(num_blocks, MAX_DEFAULT_BLOCKS)

    def swap_blocks(self, block_bytes: int) -> int:
        """Blocks of the host pool; bounded like a default pool, for a scripted model's blocks are tiny."""
        return min(self.swap_memory_bytes // block_bytes, MAX_DEFAULT_BLOCKS)


class TransferConfig(_Frozen):
    """Shipping of blocks and liveness of internal streams."""

    progress_timeout_s: float = Field(default=10.0, ge=0.1, le=3600.0)
    """Silence after which a peer counts as dead; heartbeats come at least three times as often."""
    max_frame_bytes: int = Field(default=1 << 20, ge=4096, le=3 << 20)
    """Largest block frame; larger ones block the event loop while they are serialised, and messages end at 4 MiB."""
    transport: Literal["auto", "shm", "grpc"] = "auto"
    """How payloads travel between two workers. shm: through shared memory, both on one machine; grpc: inside messages;
    auto: shm where it can be used, else grpc."""
    max_inflight_bytes_per_peer: int = Field(default=16 << 20, ge=1 << 20, le=1 << 30)
    """Payload on its way from one prefill worker to one decode worker; also the size of their shared memory."""
    max_inflight_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """Payload on its way from one prefill worker to all decode workers."""
    max_staging_bytes: int = Field(default=256 << 20, ge=0)
    """Shared memory of one decode worker for all its prefill workers; those that come when it is used up use grpc."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        """What is on its way is bounded by frames; a frame above a bound would pass it."""
        bounds = ("max_frame_bytes", "max_inflight_bytes_per_peer", "max_inflight_bytes")
        for smaller, larger in pairwise(bounds):
            if getattr(self, smaller) > getattr(self, larger):
                values = f"{getattr(self, smaller)} and {getattr(self, larger)}"
                raise ValueError(f"{smaller} must not be above {larger}; they are {values}")
        if self.transport == "shm" and self.max_staging_bytes < self.max_inflight_bytes_per_peer:
            raise ValueError(
                "transport shm needs max_staging_bytes of at least max_inflight_bytes_per_peer, one prefill worker's "
                f"shared memory; they are {self.max_staging_bytes} and {self.max_inflight_bytes_per_peer}"
            )
        return self


class ShippingFaultConfig(_Frozen):
    """What becomes of some blocks on their way; a test compares the kinds with `kvtransfer.faults.FaultKind`."""

    kind: Literal["corrupt", "drop", "delay", "duplicate", "stall"]
    """corrupt: a byte is flipped; drop: the block is not sent; delay: it leaves `delay_s` later; duplicate: it is sent
    twice; stall: nothing more is sent in its place, not even heartbeats, and the stream stays open."""
    block_index: int | None = Field(default=None, ge=0)
    """Which block of the prompt, from 0; every one when unset."""
    nth: int | None = Field(default=None, ge=1, le=2)
    """Which sending of the block within a shipment, 2 being its repeat, the last; every one when unset."""
    attempt: int | None = Field(default=None, ge=1)
    """Which attempt of a request, 1 being the first; every one when unset."""
    delay_s: float | None = Field(default=None, gt=0.0, le=3600.0, validate_default=True)
    """How late the block leaves; for kind delay, which needs it, and no other."""

    @field_validator("delay_s")
    @classmethod
    def _is_for_delays(cls, delay_s: float | None, info: ValidationInfo) -> float | None:
        kind = info.data.get("kind")  # absent when it is itself wrong
        if kind == "delay" and delay_s is None:
            raise ValueError("must be set for kind delay")
        if kind not in (None, "delay") and delay_s is not None:
            raise ValueError(f"is for kind delay; kind is {kind}")
        return delay_s

    def __str__(self) -> str:
        block = "every block" if self.block_index is None else f"block {self.block_index}"
        parts = [self.kind if self.delay_s is None else f"delay by {self.delay_s:g} s", block]
        parts += [] if self.nth is None else [f"sending {self.nth}"]
        parts += [] if self.attempt is None else [f"attempt {self.attempt}"]
        return ", ".join(parts)


ShippingFaults = Annotated[tuple[ShippingFaultConfig, ...], BeforeValidator(_tables_from_text)]


class FaultsConfig(_Frozen):
    """Failures that workers commit on purpose, to rehearse them; any is refused unless `allow_faults` is true."""

    allow_faults: bool = False
    """Whether faults may be set; true only where failures are rehearsed, for they fail requests of clients."""
    kill_prefill_at_step: int | None = Field(default=None, ge=1)
    """Each prefill worker ends by SIGKILL before this step of its engine, counted from 1; anew after a restart."""
    kill_decode_at_step: int | None = Field(default=None, ge=1)
    """Each decode worker ends by SIGKILL before this step of its engine, counted from 1; anew after a restart."""
    shipping: ShippingFaults = ()
    """Faults of shipments, those of draining decode workers included, one [[faults.shipping]] table each."""

    @field_validator("kill_prefill_at_step", "kill_decode_at_step", "shipping")
    @classmethod
    def _is_allowed(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("allow_faults") is False:
            raise ValueError("is a fault committed on purpose; refused unless faults.allow_faults = true is set too")
        return value

    def of_role(self, role: str) -> list[str]:
        """Those that a worker of this role commits, in words."""
        step = {"prefill": self.kill_prefill_at_step, "decode": self.kill_decode_at_step}[role]
        kills = [] if step is None else [f"kill before step {step}"]
        return kills + [str(fault) for fault in self.shipping]


class TierConfig(_Frozen):
    """One latency tier."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """What requests call it."""
    rank: int = Field(ge=0)
    """Lower goes first."""
    default: bool = False
    """The tier of a request that names none."""


class TenantConfig(_Frozen):
    """Who may call, one [[tenants]] table each; without any, everybody may do everything, without a key."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Part of the block hashes: no tenant sees another's blocks unless both set one shared salt."""
    api_keys: tuple[ApiKey, ...] = ()
    """Any of these, sent as `authorization: Bearer KEY`, makes a call this tenant's; several allow changing one without
    a pause."""
    admin: bool = False
    """Whether it may see, flush and pin the blocks of all tenants and abort their requests."""
    max_used_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of each worker's pool that its sequences and pins may hold at one time; no bound when unset."""
    max_cached_share: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share of each worker's pool that its cached blocks may take; no bound when unset."""

    def max_used_blocks(self, num_blocks: int) -> int | None:
        """Its bound in a pool of `num_blocks`: at least one; None without a bound."""
        return None if self.max_used_share is None else max(1, int(self.max_used_share * num_blocks))

    def max_cached_blocks(self, num_blocks: int) -> int | None:
        """Its bound in a pool of `num_blocks`; None without a bound."""
        return None if self.max_cached_share is None else int(self.max_cached_share * num_blocks)


class ClientConfig(_Frozen):
    """What the commands that talk to a router use."""

    api_key: ApiKey | None = None
    """Sent with every call; `--api-key` wins."""


class TelemetryConfig(_Frozen):
    """Traces, metrics, logs."""

    otlp_endpoint: OtlpEndpoint | None = None
    """host:port, http://host:port or https://host:port of an OTLP/gRPC collector; no spans are exported when unset."""
    service_namespace: str = "kvferry"
    """Begins the service names of traces, as in kvferry-router."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the events that are written."""
    log_format: Literal["auto", "json", "logfmt"] = "auto"
    """`auto`: logfmt on a terminal, else JSON."""
    max_queued_spans: int = Field(default=4096, ge=1)
    """Spans waiting for the exporter; more are dropped and counted, so a dead collector costs bounded memory."""


class SupervisorConfig(_Frozen):
    """How `kvferry up` looks after its processes."""

    ready_timeout_s: float = Field(default=300.0, gt=0.0)
    """Time a process has to load its model and to serve; one that takes longer is killed."""
    probe_period_s: float = Field(default=1.0, ge=0.05, le=60.0)
    """How often the health service of each process is asked; also how long one answer may take."""
    probe_timeout_s: float = Field(default=15.0, gt=0.0)
    """A process that answers no probe for this long counts as stuck and is started again; far above the wait that a
    busy machine brings."""


class ShutdownConfig(_Frozen):
    """How a process ends."""

    grace_s: float = Field(default=30.0, ge=0.0)
    """Time running requests get after SIGTERM."""


EXAMPLE_TENANT: Mapping[str, object] = MappingProxyType(
    {
        "name": "search",
        "api_keys": ("change-me-please",),
        "admin": False,
        "max_used_share": 0.5,
        "max_cached_share": 0.25,
    }
)

EXAMPLE_SHIPPING_FAULT: Mapping[str, object] = MappingProxyType(
    {"kind": "delay", "block_index": 2, "nth": 1, "attempt": 1, "delay_s": 0.5}
)

EXAMPLE_MODEL: Mapping[str, object] = MappingProxyType(
    {"name": "/models/llama-3.2-1b", "served_name": "llama", "aliases": ("default",), "dtype": "bfloat16"}
)

_TABLES_OF_LISTS: Mapping[str, type[BaseModel]] = {
    "models": ModelConfig,
    "tiers": TierConfig,
    "tenants": TenantConfig,
    "faults.shipping": ShippingFaultConfig,
}

DEFAULT_TIERS = (
    TierConfig(name="interactive", rank=0),
    TierConfig(name="standard", rank=1, default=True),
    TierConfig(name="batch", rank=2),
)


class Config(BaseSettings):
    """The whole effective configuration. Built from its arguments alone; `load_config` reads the other sources."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        protected_namespaces=(),
    )

    model: ModelConfig = ModelConfig()
    models: tuple[ModelConfig, ...] = Field(
        default=(),
        description="Further models behind the router, one [[models]] table each; a worker serves [model] alone.",
    )
    router: RouterConfig = RouterConfig()
    join: JoinConfig = JoinConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    tiers: tuple[TierConfig, ...] = DEFAULT_TIERS
    tenants: tuple[TenantConfig, ...] = ()
    client: ClientConfig = ClientConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    faults: FaultsConfig = FaultsConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only constructor arguments, so that a Config made in code never depends on where it runs."""
        return (init_settings,)

    @model_validator(mode="after")
    def _tiers_are_consistent(self) -> Config:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise ValueError(f"tiers: names must differ, got {', '.join(names)}")
        if sum(tier.default for tier in self.tiers) != 1:
            raise ValueError("tiers: exactly one must have default = true")
        return self

    @model_validator(mode="after")
    def _tenants_are_consistent(self) -> Config:
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) != len(names):
            raise ValueError(f"tenants: names must differ, got {', '.join(names)}")
        owners: dict[str, str] = {}
        for tenant in self.tenants:
            for key in tenant.api_keys:
                owner = owners.setdefault(key.get_secret_value(), tenant.name)
                if owner != tenant.name:
                    raise ValueError(f"tenants: {owner} and {tenant.name} have one API key in common")
        return self

    @model_validator(mode="after")
    def _models_are_consistent(self) -> Config:
        names = [name for model in self.served_models for name in (model.public_name, *model.aliases)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"models: names and aliases must differ, {', '.join(twice)} stands for more than one")
        return self

    @model_validator(mode="after")
    def _joins_are_guarded(self) -> Config:
        if self.router.accept_joins and self.tenants and not self.router.join_keys:
            raise ValueError("router.join_keys must be set where there are tenants and workers may join")
        return self

    @property
    def served_models(self) -> tuple[ModelConfig, ...]:
        """All models behind the router, the default one first."""
        return (self.model, *self.models)

    def of_model(self, model: ModelConfig) -> Config:
        """A copy for a worker of one of the models."""
        return _validated({**self.model_dump(), "model": model.model_dump(), "models": ()})

    def with_models(self, models: Sequence[ModelConfig]) -> Config:
        """A copy with other models, the default one first."""
        first, *others = (model.model_dump() for model in models)
        return _validated({**self.model_dump(), "model": first, "models": others})

    @property
    def has_keys(self) -> bool:
        """Whether any API key is in it."""
        own = (self.client.api_key, self.join.key, *self.router.join_keys)
        return any(own) or any(tenant.api_keys for tenant in self.tenants)

    def without_keys(self) -> Config:
        """A copy for workers, which check no key; the one they join with stays."""
        values = self.model_dump()
        for tenant in values["tenants"]:
            tenant["api_keys"] = ()
        values["client"]["api_key"] = None
        values["router"] |= {"join_keys": (), "accept_joins": False}
        return _validated(values)

    @property
    def own_key(self) -> str | None:
        """A key for calls to a router of this very configuration: an administrator's if there is one."""
        tenants = sorted(self.tenants, key=lambda tenant: not tenant.admin)
        return next((key.get_secret_value() for tenant in tenants for key in tenant.api_keys), None)

    @property
    def default_tier(self) -> TierConfig:
        return next(tier for tier in self.tiers if tier.default)

    def tier(self, name: str) -> TierConfig:
        """The tier called `name`, the default one for an empty name; NotFound names the known ones."""
        for tier in self.tiers:
            if tier.name == name or (not name and tier.default):
                return tier
        known = ", ".join(tier.name for tier in self.tiers)
        raise NotFound(f"tier: there is no tier {name!r}; known tiers: {known}", field="tier")

    def replace(self, section: str, **changes: object) -> Config:
        """A copy with some values of one section changed and validated."""
        values = self.model_dump()
        values[section] = {**values[section], **changes}
        return _validated(values)


def load_config(path: Path | None = None, overrides: Mapping[str, Mapping[str, object]] | None = None) -> Config:
    """The effective configuration; precedence: `overrides` (flags), environment, TOML file, defaults.

    `path` must exist when given; otherwise ./kvferry.toml is read if it is there. `overrides` maps section to key to
    value; None values count as not given. Raises InvalidArgument naming the key and the limit.
    """
    flags = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in (overrides or {}).items()
    }
    environment = EnvSettingsSource(Config)
    _refuse_unknown_variables(os.environ)
    try:
        from_environment = environment()
    except ValueError as error:
        raise InvalidArgument("environment", f"cannot read the {ENV_PREFIX}… variables: {error}") from error
    return _validated(_merged(_read_toml(path), from_environment, flags))


def child_environment(num_threads: int) -> dict[str, str]:
    """Environment of a worker process: ours without KVFERRY_ variables (its file has them), with bounded thread pools.

    Waiting threads sleep instead of spinning; two spinning pools on the same cores slow each other tenfold.
    """
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    return {**kept, "OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}


def to_toml(config: Config, *, show_keys: bool = False) -> str:
    """The effective values as TOML; `load_config` of it gives an equal Config, but for API keys that are hidden.

    Above each key stands what it means. Unset values, and hidden ones, are comments; so are examples of a model, of a
    tenant and of a fault where there is none.
    """
    values = config.model_dump(mode="json")

    def shown(keys: Sequence[SecretStr]) -> object:
        return [key.get_secret_value() for key in keys] if show_keys or not keys else Hidden(len(keys))

    def shown_one(key: SecretStr | None) -> object:
        return None if key is None else key.get_secret_value() if show_keys else Hidden(1)

    for tenant, written in zip(config.tenants, values["tenants"], strict=True):
        written["api_keys"] = shown(tenant.api_keys)
    values["router"]["join_keys"] = shown(config.router.join_keys)
    values["join"]["key"] = shown_one(config.join.key)
    values["client"]["api_key"] = shown_one(config.client.api_key)
    values["models"] = values["models"] or Example(EXAMPLE_MODEL)
    values["tenants"] = values["tenants"] or Example(EXAMPLE_TENANT)
    values["faults"]["shipping"] = values["faults"]["shipping"] or Example(EXAMPLE_SHIPPING_FAULT)
    return toml_document(values, _key_docs())


def write_private(file: Path, text: str) -> None:
    """Makes `file`, which must not exist, readable by its owner alone from its first moment."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None and not DEFAULT_FILE.is_file():
        return {}
    file = path or DEFAULT_FILE
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument("--config", f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument("--config", f"{file} is not valid TOML: {error}") from error


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win, key by key, down through tables."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            both = isinstance(below, Mapping) and isinstance(value, Mapping)
            result[key] = _merged(below, value) if isinstance(below, Mapping) and both else value
    return result


def _validated(values: Mapping[str, Any]) -> Config:
    try:
        return Config(**values)
    except ValidationError as error:
        raise _explain(error) from error


def _explain(error: ValidationError) -> InvalidArgument:
    """The first fault, unknown keys before others, as key and reason."""
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    location = [str(part) for part in fault["loc"]]
    key = ".".join(location) or "configuration"
    if fault["type"] == "extra_forbidden":
        return InvalidArgument(key, f"unknown key{_nearest(key, _known_keys())}")
    reason = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    shown = "" if isinstance(fault["input"], Mapping) or _may_be_secret(location) else f", got {fault['input']!r}"
    return InvalidArgument(key, f"{reason}{shown}")


def _may_be_secret(location: Sequence[str]) -> bool:
    is_tenants = location[:1] == ["tenants"] and location[-1] not in SAFE_TENANT_KEYS
    return is_tenants or location[:1] == ["client"] or location[:2] in (["router", "join_keys"], ["join", "key"])


def _known_keys() -> list[str]:
    """Every section, and every key as `section.key`."""
    return list(_key_docs())


def _key_docs() -> dict[str, str]:
    """What every section, and every key as `section.key`, means."""
    docs: dict[str, str] = {}
    for section, field in Config.model_fields.items():
        inner = _TABLES_OF_LISTS.get(section) or field.annotation
        assert isinstance(inner, type) and issubclass(inner, BaseModel)
        docs[section] = field.description or inner.__doc__ or ""
        docs |= _docs_below(section, inner)
    return docs


def _docs_below(section: str, model: type[BaseModel]) -> dict[str, str]:
    docs: dict[str, str] = {}
    for key, field in model.model_fields.items():
        name = f"{section}.{key}"
        docs[name] = field.description or ""
        if name in _TABLES_OF_LISTS:
            docs |= _docs_below(name, _TABLES_OF_LISTS[name])
    return docs


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """pydantic ignores variables that match no section; a mistyped one must not pass silently."""
    known = {ENV_PREFIX + key.replace(".", "__").upper() for key in _known_keys()}
    for name in environment:
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            raise InvalidArgument(name, f"unknown environment variable{_nearest(name.upper(), sorted(known))}")


def _nearest(key: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; the nearest known one is {matches[0]}" if matches else ""
