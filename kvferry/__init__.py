"""Torch-free common ground of all kvferry processes, and the public Python client.

The client's names are here, too, and loaded when they are used: `import kvferry` by itself loads nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.client import AsyncClient, ChatMessage, Completion, GenerateOptions, PinOptions, Tool, ToolCall
    from kvferry.sync_client import Client

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Client",
    "Completion",
    "GenerateOptions",
    "PinOptions",
    "Tool",
    "ToolCall",
    "__version__",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "kvferry.sync_client" if name == "Client" else "kvferry.client"
    return getattr(importlib.import_module(module), name)
