"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.architecture.source_tree import PACKAGES, ROOT, nodes, place, source_files

MAX_FUNCTION_LINES = 40
PROMISES = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
DANGEROUS_CALLS = {"eval", "exec", "pickle", "marshal", "shelve", "dill", "cloudpickle"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}


def test_only_config_reads_the_environment() -> None:
    found = [
        place(file, node)
        for file in source_files()
        if file != ROOT / "kvferry" / "config.py"
        for node in nodes(file)
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
    ]
    assert found == []


def _imported_names(node: ast.AST) -> set[str]:
    match node:
        case ast.Import(names=names):
            return {alias.name.partition(".")[0] for alias in names}
        case ast.ImportFrom(module=str(module)):
            return {module.partition(".")[0]}
        case ast.Call(func=ast.Name(id=name)):
            return {name}
    return set()


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = [
        place(file, node) for file in source_files() for node in nodes(file) if _imported_names(node) & DANGEROUS_CALLS
    ]
    assert found == []


def test_nothing_is_left_for_later() -> None:
    files = [*source_files(), *sorted((ROOT / "proto").rglob("*.proto"))]
    assert [str(file) for file in files if PROMISES.search(file.read_text(encoding="utf-8"))] == []


def _num_code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, the docstring not counted."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    found = [
        f"{place(file, node)} {node.name}: {_num_code_lines(node)}"
        for file in source_files()
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _num_code_lines(node) > MAX_FUNCTION_LINES
    ]
    assert found == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [file for file in source_files() if ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) is None]
    assert silent == []


def test_no_module_is_called_utils() -> None:
    names = {"utils", "util", "helpers", "misc", "common"}
    assert [file for file in source_files() if file.stem in names] == []


def test_kernels_package_is_a_docstring_only() -> None:
    (only,) = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(only, ast.Expr)


def test_top_level_holds_no_other_packages() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found <= {*PACKAGES, "proto", "tests", "bench"}


def test_sources_know_no_machine() -> None:
    pattern = re.compile(r"(/home/|/root/|/work/|/Users/)")
    files = [file for file in source_files() if pattern.search(file.read_text(encoding="utf-8"))]
    assert [str(Path(file).relative_to(ROOT)) for file in files] == []
