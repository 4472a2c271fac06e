"""The product's source files, for tests that read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvferry", "engine", "kernels", "kvtransfer", "prefill_svc", "decode_svc", "router")


def source_files() -> list[Path]:
    """Every hand-written module of the product."""
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def module_name(file: Path) -> str:
    """Dotted name of the module in `file`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def nodes(file: Path) -> Iterator[ast.AST]:
    """All nodes of the file's syntax tree."""
    yield from ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file)))


def place(file: Path, node: ast.AST) -> str:
    """`path:line` for messages."""
    return f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
