"""Sources, precedence, refusals and the round trip of the configuration."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from kvferry.cli.options import configuration
from kvferry.config import (
    MAX_DEFAULT_BLOCKS,
    Config,
    EngineConfig,
    FaultsConfig,
    ModelConfig,
    ShippingFaultConfig,
    TenantConfig,
    TransferConfig,
    child_environment,
    load_config,
    to_toml,
    write_private,
)
from kvferry.errors import InvalidArgument, NotFound
from kvferry.host import memory_limit_bytes, num_cores


@pytest.fixture(autouse=True)
def _empty_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("KVFERRY_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_defaults_are_the_documented_ones() -> None:
    config = load_config()
    assert (config.router.grpc_listen, config.router.http_listen) == ("127.0.0.1:50051", "127.0.0.1:8000")
    assert config.engine.block_size == 16
    assert [tier.name for tier in config.tiers] == ["interactive", "standard", "batch"]
    assert config.default_tier.name == "standard"


def test_flags_win_over_environment_over_file_over_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("[engine]\nblock_size = 8\nmax_running = 3\nmax_batched_tokens = 100\n")
    monkeypatch.setenv("KVFERRY_ENGINE__MAX_RUNNING", "4")
    monkeypatch.setenv("KVFERRY_ENGINE__MAX_BATCHED_TOKENS", "200")
    config = load_config(file, {"engine": {"max_batched_tokens": 300, "num_blocks": None}})
    assert (config.engine.block_size, config.engine.max_running, config.engine.max_batched_tokens) == (8, 4, 300)
    assert config.engine.num_blocks is None


def test_file_in_the_working_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "kvferry.toml").write_text('[model]\ndtype = "float32"\n')
    assert load_config().model.dtype == "float32"


@pytest.mark.parametrize("text", ["a:1,b:2", "a:1, b:2"])
def test_addresses_from_the_environment_are_split_at_commas(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVFERRY_ROUTER__PREFILL", text)
    assert load_config().router.prefill == ("a:1", "b:2")


def test_tiers_from_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_TIERS", '[{"name": "only", "rank": 0, "default": true}]')
    assert load_config().tier("").name == "only"


def test_effective_configuration_round_trips(tmp_path: Path) -> None:
    changed: dict[str, dict[str, object]] = {
        "router": {"prefill": ("h:1", "h:2"), "max_attempts": 2},
        "model": {"served_name": 'quote " back\\slash \x7f\n', "cache_dir": tmp_path},
        "engine": {"num_blocks": 20},
    }
    config = load_config(None, changed)
    file = tmp_path / "effective.toml"
    file.write_text(to_toml(config))
    assert load_config(file) == config
    assert "# kv_memory_bytes is unset" in file.read_text()


def test_every_section_and_key_is_explained_above_it() -> None:
    lines = to_toml(Config()).splitlines()
    assert lines[lines.index("block_size = 16") - 1] == "# Tokens of a block; all workers of a cluster agree."
    further_tiers = lines[lines.index('name = "standard"') - 1 : lines.index("[telemetry]") - 1]
    explained = "\n".join(lines).replace("\n".join(further_tiers), "").splitlines()
    for above, line in itertools.pairwise(explained):
        if line.startswith("[") or " = " in line or line.endswith(" is unset"):
            assert above.startswith("# ") and not above.endswith(" is unset"), line


@pytest.mark.parametrize("value", ["h", "h:", ":1", "h:x", "h:65536", "h:0", "http://h:1", "a b:1", "::1:5"])
def test_worker_addresses_are_host_and_port(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"router\.decode\.1: must be host:port") as caught:
        Config().replace("router", decode=("[::1]:1", value))
    assert repr(value) in caught.value.message


def test_listen_addresses_may_have_port_0_and_collectors_a_scheme() -> None:
    Config().replace("router", http_listen="[::]:0", grpc_listen="host-a.example:65535")
    with pytest.raises(InvalidArgument, match=r"router\.grpc_listen: must be host:port.*got '50051'"):
        Config().replace("router", grpc_listen="50051")
    for endpoint in ("h:4317", "http://h:4317", "https://10.0.0.1:4317/"):
        Config().replace("telemetry", otlp_endpoint=endpoint)
    with pytest.raises(InvalidArgument, match=r"telemetry\.otlp_endpoint: must be.*got 'ftp://h:1'"):
        Config().replace("telemetry", otlp_endpoint="ftp://h:1")


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("[engine]\nblock_sise = 8\n", "engine.block_sise", "engine.block_size"),
        ("[engin]\nblock_size = 8\n", "engin", "engine"),
        ("[engine]\nblock_size = 0\n", "engine.block_size", "greater than or equal to 1, got 0"),
        ("[transfer]\nprogress_timeout_s = nan\n", "transfer.progress_timeout_s", "finite"),
        ('[model]\ndtype = "int4"\n', "model.dtype", "float32"),
        ('[[tiers]]\nname = "a"\nrank = 0\n', "configuration", "exactly one must have default"),
        ('[[tiers]]\nname = "a"\nrank = 0\ndefault = true\nslo = 1\n', "tiers.0.slo", "unknown key"),
        ("nonsense", "--config", "not valid TOML"),
    ],
)
def test_faults_in_a_file_name_key_and_limit(tmp_path: Path, text: str, field: str, words: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        load_config(file)
    assert caught.value.field == field
    assert words in caught.value.message


@pytest.mark.parametrize("name", ["KVFERRY_ENGIN__BLOCK_SIZE", "KVFERRY_ENGINE__BLOCK_SISE", "KVFERRY_BLOCK_SIZE"])
def test_unknown_variables_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "8")
    with pytest.raises(InvalidArgument, match=f"{name}: unknown.*KVFERRY_ENGINE__BLOCK_SIZE"):
        load_config()


def test_missing_file_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere\.toml"):
        load_config(Path("nowhere.toml"))


def test_configuration_made_in_code_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_ENGINE__BLOCK_SIZE", "8")
    assert Config().engine.block_size == 16


def test_replace_validates() -> None:
    assert Config().replace("engine", num_blocks=9).engine.num_blocks == 9
    with pytest.raises(InvalidArgument, match=r"engine\.num_blocks"):
        Config().replace("engine", num_blocks=0)


def test_unknown_tier_names_the_known_ones() -> None:
    with pytest.raises(NotFound, match="interactive, standard, batch"):
        Config().tier("gold")


def test_default_pool_is_an_eighth_of_memory_within_bounds() -> None:
    gib = 1 << 30
    engine = EngineConfig()
    assert engine.pool_bytes(8 * gib) == gib
    assert engine.pool_bytes(64 * gib) == 2 * gib
    assert EngineConfig(engines_per_machine=4).pool_bytes(64 * gib) == gib // 2
    assert EngineConfig(kv_memory_bytes=gib, engines_per_machine=4).pool_bytes(64 * gib) == gib
    assert engine.pool_bytes(1 << 20) == 64 << 20
    assert EngineConfig(kv_memory_bytes=1 << 20).pool_blocks(block_bytes=1 << 16) == 16
    assert EngineConfig(num_blocks=5).pool_blocks(block_bytes=1 << 16) == 5
    with pytest.raises(InvalidArgument, match=r"engine\.kv_memory_bytes.*hold 1 blocks"):
        EngineConfig(kv_memory_bytes=1 << 16).pool_blocks(block_bytes=1 << 16)


def test_default_pool_of_tiny_blocks_is_capped_and_a_wanted_one_is_not() -> None:
    assert EngineConfig().pool_blocks(block_bytes=32) == MAX_DEFAULT_BLOCKS == 262_144
    assert EngineConfig(kv_memory_bytes=64 << 20).pool_blocks(block_bytes=32) == 1 << 21


def test_container_limits_are_honoured(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree: 5 kB\n")
    assert memory_limit_bytes(tmp_path, meminfo) == 1_024_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit_bytes(tmp_path, meminfo) == 1_024_000
    (tmp_path / "memory.max").write_text("4096\n")
    assert memory_limit_bytes(tmp_path, meminfo) == 4096
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert num_cores(tmp_path) == 1


def test_children_get_bounded_threads_and_no_kvferry_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_ENGINE__BLOCK_SIZE", "8")
    environment = child_environment(num_threads=3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert not any(name.startswith("KVFERRY_") for name in environment)


def test_public_name_is_the_last_part_of_a_path() -> None:
    assert ModelConfig(name="/models/tiny-llama").public_name == "tiny-llama"
    assert ModelConfig(name="/models/tiny.gguf").public_name == "tiny"
    assert ModelConfig(name="Qwen2.5-0.5B-Instruct").public_name == "Qwen2.5-0.5B-Instruct"
    assert ModelConfig(name="/models/Qwen2.5-0.5B.Q4_1.gguf").public_name == "Qwen2.5-0.5B.Q4_1"
    assert ModelConfig(name="x", served_name="y").public_name == "y"


# -- tenants and their keys -------------------------------------------------------------------------------------------

TENANTS = """
[[tenants]]
name = "search"
api_keys = ["first-key-of-search", "second-key-of-search"]
admin = true
max_used_share = 0.5

[[tenants]]
name = "chat"
api_keys = ["only-key-of-chat"]
max_cached_share = 0.25

[client]
api_key = "key-of-this-client"
"""
SECRETS = ("first-key-of-search", "second-key-of-search", "only-key-of-chat", "key-of-this-client")


@pytest.fixture
def with_tenants(tmp_path: Path) -> Config:
    file = tmp_path / "tenants.toml"
    file.write_text(TENANTS)
    return load_config(file)


def test_tenants_are_read_and_survive_a_child_processes_file(with_tenants: Config, tmp_path: Path) -> None:
    search, chat = with_tenants.tenants
    assert (search.name, search.admin, search.max_used_share, search.max_cached_share) == ("search", True, 0.5, None)
    assert [key.get_secret_value() for key in chat.api_keys] == ["only-key-of-chat"]
    assert with_tenants.own_key == "first-key-of-search"
    file = tmp_path / "child.toml"
    write_private(file, to_toml(with_tenants, show_keys=True))
    assert load_config(file) == with_tenants
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_private(file, "")


def test_keys_are_hidden_unless_asked_for(with_tenants: Config, tmp_path: Path) -> None:
    for shown in (to_toml(with_tenants), repr(with_tenants), str(with_tenants.tenants)):
        assert not [secret for secret in SECRETS if secret in shown]
    file = tmp_path / "hidden.toml"
    file.write_text(to_toml(with_tenants))
    assert "# api_keys is hidden: 2" in file.read_text()
    read = load_config(file)
    assert [tenant.name for tenant in read.tenants] == ["search", "chat"]
    assert not read.has_keys, "what stands for a hidden key must never become one"


def test_workers_get_the_tenants_without_their_keys(with_tenants: Config) -> None:
    for_workers = with_tenants.without_keys()
    assert with_tenants.has_keys and not for_workers.has_keys
    assert [tenant.max_used_share for tenant in for_workers.tenants] == [0.5, None]


def test_without_tenants_a_commented_table_explains_every_key(tmp_path: Path, with_tenants: Config) -> None:
    file = tmp_path / "uncommented.toml"
    file.write_text(explained_example("tenants", TenantConfig))
    (tenant,) = load_config(file).tenants
    assert tenant.model_fields_set == TenantConfig.model_fields.keys()
    assert "# [[tenants]]" not in to_toml(with_tenants)


def explained_example(name: str, model: type[BaseModel]) -> str:
    """The example that stands in for tables there are none of; its keys are explained above them."""
    lines = [*to_toml(Config()).splitlines(), ""]
    begin = lines.index(f"# [[{name}]]")
    table = lines[begin : lines.index("", begin)]
    assert all(line.startswith("# ") for line in table)
    for key, field in model.model_fields.items():
        place = next(place for place, line in enumerate(table) if line.startswith(f"# {key} = "))
        assert table[place - 1] == f"# # {' '.join((field.description or 'nothing').split())}"
    return "\n".join(line.removeprefix("# ") for line in table)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_frame_bytes": 3 << 20, "max_inflight_bytes_per_peer": 1 << 20}, "max_frame_bytes must not be above"),
        ({"max_inflight_bytes_per_peer": 8 << 20, "max_inflight_bytes": 4 << 20}, "per_peer must not be above"),
        ({"transport": "shm", "max_staging_bytes": 0}, "transport shm needs max_staging_bytes of at least"),
    ],
)
def test_bounds_of_shipping_that_do_not_go_together_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TransferConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("table", "field", "words"),
    [
        ('name = "a"\napi_keys = ["SECRET7"]', "tenants.0.api_keys.0", "8 … 512 characters; this one has 7"),
        ('name = "a"\napi_keys = ["SECRET with space"]', "tenants.0.api_keys.0", "printable ASCII"),
        ('name = "a"\napi_keys = ["**********"]', "tenants.0.api_keys.0", "asterisks stand for"),
        ('name = "a"\napi_keys = "SECRET-no-list"', "tenants.0.api_keys", "valid tuple"),
        ('name = "a"\napi_key = "SECRET-misnamed"', "tenants.0.api_key", "the nearest known one is tenants.api_keys"),
        ('name = "a"\nmax_used_share = 0', "tenants.0.max_used_share", "greater than 0, got 0"),
        ('name = "a b"', "tenants.0.name", "got 'a b'"),
        ('name = "a"\n[[tenants]]\nname = "a"', "configuration", "names must differ, got a, a"),
        (
            'name = "a"\napi_keys = ["SECRET-same"]\n[[tenants]]\nname = "b"\napi_keys = ["SECRET-same"]',
            "configuration",
            "a and b have one API key in common",
        ),
    ],
)
def test_faults_of_tenants_name_the_key_and_never_show_a_secret(
    tmp_path: Path, table: str, field: str, words: str
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f"[[tenants]]\n{table}\n")
    with pytest.raises(InvalidArgument) as caught:
        load_config(file)
    assert caught.value.field == field
    assert words in caught.value.message
    assert "SECRET" not in caught.value.message


def test_the_clients_key_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CLIENT__API_KEY", "key-from-environment")
    key = load_config().client.api_key
    assert key is not None and key.get_secret_value() == "key-from-environment"
    monkeypatch.setenv("KVFERRY_CLIENT__API_KEY", "SECRET7")
    with pytest.raises(InvalidArgument, match=r"client\.api_key") as caught:
        load_config()
    assert "SECRET" not in caught.value.message


def test_the_host_pool_is_bounded_in_blocks() -> None:
    engine = EngineConfig(swap_memory_bytes=1 << 20)
    assert engine.swap_blocks(1 << 16) == 16
    assert EngineConfig().swap_blocks(8) == MAX_DEFAULT_BLOCKS
    assert EngineConfig(swap_memory_bytes=0).swap_blocks(1 << 16) == 0


# -- faults committed on purpose --------------------------------------------------------------------------------------

FAULTS = """
[faults]
allow_faults = true
kill_decode_at_step = 40

[[faults.shipping]]
kind = "corrupt"
block_index = 2
nth = 1

[[faults.shipping]]
kind = "delay"
delay_s = 0.5

[[faults.shipping]]
kind = "stall"
attempt = 1
"""


def test_faults_are_read_and_survive_a_child_processes_file(tmp_path: Path) -> None:
    file, child = tmp_path / "faults.toml", tmp_path / "child.toml"
    file.write_text(FAULTS)
    config = load_config(file)
    assert config.faults == FaultsConfig(
        allow_faults=True,
        kill_decode_at_step=40,
        shipping=(
            ShippingFaultConfig(kind="corrupt", block_index=2, nth=1),
            ShippingFaultConfig(kind="delay", delay_s=0.5),
            ShippingFaultConfig(kind="stall", attempt=1),
        ),
    )
    child.write_text(to_toml(config))
    assert load_config(child) == config
    shipping = ["corrupt, block 2, sending 1", "delay by 0.5 s, every block", "stall, every block, attempt 1"]
    assert config.faults.of_role("decode") == ["kill before step 40", *shipping]
    assert config.faults.of_role("prefill") == shipping


def test_without_faults_there_are_none_and_a_commented_table_explains_every_key(tmp_path: Path) -> None:
    assert not any(Config().faults.of_role(role) for role in ("prefill", "decode"))
    file = tmp_path / "uncommented.toml"
    file.write_text("faults.allow_faults = true\n" + explained_example("faults.shipping", ShippingFaultConfig))
    (fault,) = load_config(file).faults.shipping
    assert fault.model_fields_set == ShippingFaultConfig.model_fields.keys()


def test_faults_come_from_flags_and_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = '[{"kind": "drop", "block_index": 1}]'
    dropped = FaultsConfig(allow_faults=True, shipping=(ShippingFaultConfig(kind="drop", block_index=1),))
    assert configuration(None, ["faults.allow_faults=true", f"faults.shipping={tables}"]).faults == dropped
    monkeypatch.setenv("KVFERRY_FAULTS__ALLOW_FAULTS", "true")
    monkeypatch.setenv("KVFERRY_FAULTS__SHIPPING", tables)
    assert load_config().faults == dropped


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kill_prefill_at_step", "3"),
        ("kill_decode_at_step", "1"),
        ("shipping", '[{ kind = "drop" }]'),
    ],
)
@pytest.mark.parametrize("allowed", ["", "allow_faults = false\n"])
def test_faults_are_refused_unless_they_are_allowed(tmp_path: Path, field: str, value: str, allowed: str) -> None:
    file = tmp_path / "faults.toml"
    file.write_text(f"[faults]\n{field} = {value}\n{allowed}")
    with pytest.raises(InvalidArgument, match=r"refused unless faults\.allow_faults = true") as caught:
        load_config(file)
    assert caught.value.field == f"faults.{field}"


@pytest.mark.parametrize(
    ("table", "field", "words"),
    [
        ('{ kind = "burn" }', "shipping.0.kind", "got 'burn'"),
        ("{ block_index = 1 }", "shipping.0.kind", "required"),
        ('{ kind = "drop", block_index = -1 }', "shipping.0.block_index", "greater than or equal to 0, got -1"),
        ('{ kind = "drop", nth = 0 }', "shipping.0.nth", "greater than or equal to 1, got 0"),
        ('{ kind = "drop", attempt = 0 }', "shipping.0.attempt", "greater than or equal to 1, got 0"),
        ('{ kind = "drop", block = 1 }', "shipping.0.block", "nearest known one is faults.shipping.block_index"),
        ('{ kind = "delay" }', "shipping.0.delay_s", "must be set for kind delay"),
        ('{ kind = "delay", delay_s = 0 }', "shipping.0.delay_s", "greater than 0, got 0"),
        *(
            (f'{{ kind = "{kind}", delay_s = 0.5 }}', "shipping.0.delay_s", f"is for kind delay; kind is {kind}")
            for kind in ("corrupt", "drop", "duplicate", "stall")
        ),
        ('"corrupt"', "shipping", "as text it must be a list of tables in JSON"),
    ],
)
def test_faults_that_make_no_sense_are_refused_by_name(tmp_path: Path, table: str, field: str, words: str) -> None:
    file = tmp_path / "faults.toml"
    shipping = table if table.startswith('"') else f"[{table}]"
    file.write_text(f"[faults]\nallow_faults = true\nshipping = {shipping}\n")
    with pytest.raises(InvalidArgument) as caught:
        load_config(file)
    assert caught.value.field == f"faults.{field}"
    assert words in caught.value.message


@pytest.mark.parametrize("key", ["kill_prefill_at_step", "kill_decode_at_step"])
def test_steps_are_counted_from_one(key: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"faults\.{key}.*greater than or equal to 1, got 0"):
        Config().replace("faults", **{"allow_faults": True, key: 0})


# -- models and joining ----------------------------------------------------------------------------------------------

JOIN_KEYS = ("a-key-to-join", "another-to-join")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[[models]]\nname = "smollm2-135m-instruct"',
            "models: names and aliases must differ, smollm2-135m-instruct stands for more than one",
        ),
        ('[[models]]\nname = "b"\naliases = ["c", "c"]', "c stands for more than one"),
        ('[router]\ndecode = ["dns://decode:1"]', "router.decode.0: must be host:port, or dns:///host:port"),
        ("[router]\nlocal_prefill = true\nprefill = ['a:1']", "local_prefill must not be true"),
        ("[router]\naccept_joins = true\n[[tenants]]\nname = 'a'", "router.join_keys must be set"),
    ],
)
def test_models_and_joins_that_cannot_be_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "some.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        load_config(file)
    assert words in caught.value.message, caught.value.message


def test_decode_computes_prompts_where_nothing_else_could() -> None:
    config = Config()
    assert config.router.has_local_prefill
    assert not config.replace("router", accept_joins=True).router.has_local_prefill
    assert not config.replace("router", prefill=["dns:///a:1"]).router.has_local_prefill
    assert config.replace("router", accept_joins=True, local_prefill=True).router.has_local_prefill


def test_join_keys_are_hidden_and_workers_keep_the_one_they_join_with(tmp_path: Path) -> None:
    config = load_config(None, {"router": {"join_keys": ",".join(JOIN_KEYS)}, "join": {"key": JOIN_KEYS[0]}})
    assert config.has_keys
    shown = to_toml(config)
    assert not any(key in shown for key in JOIN_KEYS) and "join_keys is hidden: 2" in shown
    file = tmp_path / "worker.toml"
    worker = config.without_keys()
    file.write_text(to_toml(worker, show_keys=True))
    assert load_config(file) == worker
    assert worker.join.key is not None and worker.join.key.get_secret_value() == JOIN_KEYS[0]
    assert worker.router.join_keys == ()
    with pytest.raises(InvalidArgument) as caught:
        load_config(None, {"join": {"key": "short"}})
    assert "short" not in caught.value.message


def test_a_worker_of_one_model_is_told_of_no_other(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text('[model]\nname = "a"\naliases = ["x"]\n[[models]]\nname = "/m/b.gguf"\ndtype = "float32"')
    config = load_config(file)
    assert [model.public_name for model in config.served_models] == ["a", "b"]
    assert load_config(_written(tmp_path, config)) == config
    worker = config.of_model(config.models[0])
    assert (worker.model.public_name, worker.model.dtype, worker.models) == ("b", "float32", ())


def _written(folder: Path, config: Config) -> Path:
    file = folder / "written.toml"
    file.write_text(to_toml(config))
    return file
