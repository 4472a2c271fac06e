"""Streams as blocks: `with` ends the request, wherever it is. Whoever iterates without one is told so.

`contextlib`'s own managers would only say that they are not iterable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

_Value_co = TypeVar("_Value_co", covariant=True)
_Value = TypeVar("_Value")
_Arguments = ParamSpec("_Arguments")


class Block(AbstractContextManager[_Value_co, bool | None]):
    """`context`, for a `with`."""

    def __init__(self, context: AbstractContextManager[_Value_co, bool | None]) -> None:
        self._context = context

    def __enter__(self) -> _Value_co:
        return self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool | None:
        return self._context.__exit__(kind, error, where)

    def __iter__(self) -> NoReturn:
        raise TypeError("a stream is read in a block that ends it: with client.stream(…) as pieces: …")


class AsyncBlock(AbstractAsyncContextManager[_Value_co, bool | None]):
    """`context`, for an `async with`."""

    def __init__(self, context: AbstractAsyncContextManager[_Value_co, bool | None]) -> None:
        self._context = context

    async def __aenter__(self) -> _Value_co:
        return await self._context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool | None:
        return await self._context.__aexit__(kind, error, where)

    def __aiter__(self) -> NoReturn:
        raise TypeError("a stream is read in a block that ends it: async with client.stream(…) as pieces: …")


def async_block(
    function: Callable[_Arguments, AsyncIterator[_Value]],
) -> Callable[_Arguments, AsyncBlock[_Value]]:
    """As `contextlib.asynccontextmanager`."""
    managed = asynccontextmanager(function)

    @wraps(function)
    def made(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> AsyncBlock[_Value]:
        return AsyncBlock(managed(*args, **kwargs))

    return made
