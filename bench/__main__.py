"""`python -m bench`: runs the measurements that `docs/benchmarks.md` reports.

python -m bench                 # all but the simulated ones, a few minutes
python -m bench ship --json -   # one, as JSON on standard output
python -m bench paper --help    # the PagedAttention paper's tables, simulated; options of their own
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench import paper
from bench.environment import describe
from bench.memory import run_memory
from bench.serve import run_serve
from bench.ship import run_ship

BENCHES = {"ship": run_ship, "serve": run_serve, "memory": run_memory}


def main() -> None:
    """Entry point."""
    if sys.argv[1:2] == ["paper"]:
        sys.exit(paper.main(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure; `python -m bench paper --help` tells of the simulated tables, which take minutes more.",
        epilog="example: python -m bench serve --json out.json",
    )
    parser.add_argument("bench", nargs="?", choices=BENCHES, help="which one; default: all of them")
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
