"""`kvferry plan`: block size and batch for the lengths of one's own requests and a memory budget.

The planning runs our scheduler, which lives beside the model code: it is a process of its own (`engine/plan.py`), which
loads no model and no torch, and tells how far it is, for a bar on a terminal.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.cli.console import write, write_json, write_table
from kvferry.cli.options import ConfigOption, DtypeOption, JsonOption, ModelOption, SetOption, configuration
from kvferry.config import Config
from kvferry.errors import FailedPrecondition, InvalidArgument
from kvferry.lengths import read_lengths
from kvferry.model_store import ModelStore
from kvferry.tomlout import toml_document

UNIT_BYTES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}

MAX_MEMORY_BYTES = 1 << 50
"""1 PiB, beyond any machine."""

LengthsOption = Annotated[
    Path, typer.Option("--lengths", metavar="FILE.csv", help="One request a line: prompt_len,output_len in tokens.")
]
MemoryOption = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Memory for the KV blocks of one worker, such as 8GiB.")
]


def register(app: typer.Typer) -> None:
    app.command("plan", epilog="Example: kvferry plan --lengths lengths.csv --memory 8GiB")(plan)


def plan(
    lengths: LengthsOption,
    memory: MemoryOption,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Says which block size, batch and concurrency to choose, and why."""
    flags: dict[str, dict[str, object]] = {"model": {"name": model, "dtype": dtype}}
    effective = configuration(config, settings, flags)
    memory_bytes = parse_size(memory)
    read_lengths(lengths)  # wrong lines are told before anything is started
    made = _ask_engine(effective, lengths, memory_bytes)
    if as_json:
        write_json(made)
        return
    _write_plan(made, effective.model.name, memory)


def parse_size(text: str) -> int:
    """Bytes of `8GiB`, `500MB`, `1.5 g` or `1048576`.

    Raises:
        InvalidArgument: it is none of these, less than one byte or more than `MAX_MEMORY_BYTES`.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    size_bytes = 0.0 if match is None else float(match[1]) * UNIT_BYTES[match[2]]  # infinite for hundreds of digits
    if size_bytes < 1:
        raise InvalidArgument("--memory", f"must be a size such as 8GiB, 500MB or 1048576, got {text[:40]!r}")
    if size_bytes > MAX_MEMORY_BYTES:
        raise InvalidArgument("--memory", f"must be at most {MAX_MEMORY_BYTES} bytes (1 PiB), got {text[:40]!r}")
    return int(size_bytes)


def _ask_engine(config: Config, lengths: Path, memory_bytes: int) -> dict[str, Any]:
    folder = ModelStore(config.model.cache_path).find(config.model.name)
    command = [sys.executable, "-m", "engine.plan", "--folder", str(folder), "--lengths", str(lengths), "--progress"]
    command += ["--memory-bytes", str(memory_bytes), "--dtype", config.model.dtype]
    command += ["--max-batched-tokens", str(config.engine.max_batched_tokens)]
    if config.engine.max_context is not None:
        command += ["--max-context", str(config.engine.max_context)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        said = _show_progress(process.stderr)
        made = process.stdout.read()  # one line at the very end, so nothing waits for it to be read
    if process.returncode != 0:
        raise FailedPrecondition(said[-1].removeprefix("error: ") if said else "the planner said nothing")
    answer: dict[str, Any] = json.loads(made)
    return answer


def _show_progress(lines: Iterable[str]) -> list[str]:
    """Shows the planner's progress on a terminal, and returns its other lines."""
    said = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("simulating requests", total=100)
        for line in lines:
            word, _, percent = line.strip().partition(" ")
            if word == "progress" and percent.isdigit():
                progress.update(task, completed=int(percent))
            elif line.strip():
                said.append(line.strip())
    return said


def _write_plan(made: dict[str, Any], model: str, memory: str) -> None:
    requests, chosen = made["requests"], made["chosen"]["block_size"]
    write(
        f"{requests['count']} requests, mean {requests['mean_prompt_tokens']} prompt and "
        f"{requests['mean_output_tokens']} output tokens, longest {requests['longest_tokens']} together; "
        f"{model}, {made['bytes_per_token']} bytes of KV a token; {memory} a worker\n\n"
    )
    rows = made["block_sizes"]
    write_table(
        {
            "block size": [f"{row['block_size']}{' *' if row['block_size'] == chosen else ''}" for row in rows],
            "blocks": [str(row["num_blocks"]) for row in rows],
            "blocks a sequence": [f"{row['mean_blocks']:.1f} ± {row['deviation_blocks']:.1f}" for row in rows],
            "tail waste": [f"{row['tail_waste']:.1%}" for row in rows],
            "sequences": [str(row["mean_sequences"]) for row in rows],
            "with room to vary": [str(row["safe_sequences"]) for row in rows],
        }
    )
    write("\n" + toml_document({"engine": made["settings"]}))
    write(f"# requests in flight on each decode worker: {made['concurrency']}\n\n")
    write("".join(f"- {reason}\n" for reason in made["reasons"]))
