"""Compiles constraints for `grammar_checker.py`, in a process that may be lost: `python -m router.grammar_child`.

The library that compiles them is native code that takes schemas of strangers. What makes it crash, run on or fill the
memory ends this process, and with it one request. A line of JSON in, a line of JSON out: first the tokenizer, then one
constraint after the other.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from typing import Any

from kvferry.errors import KvferryError
from kvferry.grammar import Grammars
from router.constraint import OutputConstraint, checked_grammar

MEMORY_BYTES = 6 << 30
"""Of addresses: half a gigabyte is the compiling thread's stack, the worst grammars take a few hundred megabytes."""


def main() -> None:
    """Entry point; ends with its input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    first = json.loads(sys.stdin.readline())
    grammars = Grammars(lambda: first["tokenizer"], first["vocab_size"])
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            _limit_cpu(first["cpu_s"])
            sys.stdout.write(json.dumps(runner.run(_answer(grammars, json.loads(line)))) + "\n")
            sys.stdout.flush()


async def _answer(grammars: Grammars, job: dict[str, Any]) -> dict[str, str]:
    constraint = OutputConstraint(job["field"], job["text"], is_compact=job["is_compact"])
    try:
        grammar = await checked_grammar(constraint, grammars, tuple(job["eos_token_ids"]), job["named_ids"])
    except KvferryError as error:
        return {"refused": error.message}
    return {"grammar": grammar}


def _limit_cpu(cpu_s: int) -> None:
    """The kernel ends the process when the next job has taken so many seconds of computing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
