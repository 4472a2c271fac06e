"""`python -m bench`: runs the measurements that `docs/benchmarks.md` reports.

python -m bench                   # all but the simulated ones, three quarters of an hour
python -m bench serve --json -    # one, as JSON on standard output
python -m bench transfer --help   # engine, speculation, split, transfer, handoff, receive, moves, paper have options
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench import engine, handoff, moves, paper, receive, speculation, split, transfer
from bench.environment import describe
from bench.events import run_events
from bench.memory import run_memory
from bench.quality import run_quality
from bench.sampling import run_sampling
from bench.serve import run_serve

BENCHES = {
    "transfer": transfer.run_transfer,
    "handoff": handoff.run_handoff,
    "receive": receive.run_receive,
    "moves": moves.run_moves,
    "serve": run_serve,
    "memory": run_memory,
    "events": run_events,
    "sampling": run_sampling,
    "quality": run_quality,
}
WITH_OPTIONS = {
    "transfer": transfer.main,
    "handoff": handoff.main,
    "receive": receive.main,
    "moves": moves.main,
    "engine": engine.main,
    "speculation": speculation.main,
    "split": split.main,
    "paper": paper.main,
}


def main() -> None:
    """Entry point."""
    if own_main := WITH_OPTIONS.get("".join(sys.argv[1:2])):
        sys.exit(own_main(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Measure; {', '.join(WITH_OPTIONS)} have options of their own, see `python -m bench NAME --help`.",
        epilog="example: python -m bench serve --json out.json",
    )
    parser.add_argument(
        "bench",
        nargs="?",
        choices=[*BENCHES, "engine", "speculation", "split", "paper"],
        help="which one; default: all but the last four",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for standard output")
    options = parser.parse_args()
    names = [options.bench] if options.bench else list(BENCHES)
    figures: dict[str, object] = {"environment": describe()}
    for name in names:
        print(f"== {name} ==", file=sys.stderr, flush=True)
        figures[name] = BENCHES[name]()
    print("the PagedAttention paper's tables: python -m bench paper --help", file=sys.stderr)
    text = json.dumps(figures, indent=2)
    if options.json == "-" or options.json is None:
        print(text)
    else:
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
