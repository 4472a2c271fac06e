"""The event loop behind all synchronous clients of a process, in a thread of its own.

grpc.aio serves one loop a process well; with several its poller wakes the wrong one and logs it (R091). So clients
share the loop, and the thread ends with the last of them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from kvferry.errors import Cancelled, FailedPrecondition
from kvferry.rpc import new_event_loop

_T = TypeVar("_T")


class SharedLoop:
    """A user's hold on the loop, from the beginning until `release`."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _thread: ClassVar[_LoopThread | None] = None
    _num_users: ClassVar[int] = 0

    def __init__(self) -> None:
        with SharedLoop._lock:
            if SharedLoop._thread is None:
                SharedLoop._thread = _LoopThread()
            SharedLoop._num_users += 1
            self._own: _LoopThread | None = SharedLoop._thread

    @property
    def is_released(self) -> bool:
        return self._own is None

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Result of `main`, run in the loop; whatever interrupts the waiting (Ctrl-C) cancels it.

        Raises FailedPrecondition after `release`.
        """
        if self._own is None:
            main.close()
            raise FailedPrecondition("the client is closed")
        future = asyncio.run_coroutine_threadsafe(main, self._own.loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the client was closed") from None
        except BaseException:
            future.cancel()  # of no effect where the error is its own
            raise

    def release(self) -> None:
        """Ends the thread where nobody else uses it; further calls do nothing."""
        with SharedLoop._lock:
            if self._own is None:
                return
            self._own = None
            SharedLoop._num_users -= 1
            ended, is_last = SharedLoop._thread, SharedLoop._num_users == 0
            if is_last:
                SharedLoop._thread = None
        if is_last and ended is not None:
            ended.end()


class _LoopThread:
    """A daemon: a program that forgets to close its clients ends all the same."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="kvferry-client", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Cancels what runs, and waits for the thread."""
        asyncio.run_coroutine_threadsafe(_end_all(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
