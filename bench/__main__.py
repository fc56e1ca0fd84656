"""All rows one after the other, and their table: `make bench`, `make bench ROWS="1 2"`, `make bench QUICK=1`.

python -m bench                # all rows
python -m bench 1 2 9          # these rows
python -m bench --quick        # does everything work? the figures say nothing
python -m bench --table        # the table of what results/ holds, without measuring
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from bench import measure
from common import atomic_io, log

SCRIPTS = {
    "1": "prepare",
    "2": "vocab",
    "3": "generate",
    "4": "capture",
    "5": "store_forms",
    "6": "train_step",
    "7": "acceptance",
    "8": "memory",
    "9": "growth",
    "gpu": "gpu",
}


def main() -> int:
    """Run the rows that were asked for; a row that fails does not keep the others from running."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(SCRIPTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--table", action="store_true", help="measure nothing, show what results/ holds")
    args = parser.parse_args()
    if unknown := set(args.rows) - SCRIPTS.keys():
        parser.error(f"no row {', '.join(sorted(unknown))}")
    scripts = [SCRIPTS[row] for row in args.rows or SCRIPTS]
    failed = [] if args.table else [script for script in scripts if not run(script, args.quick)]
    print(summary([script for script in scripts if script not in failed]))
    if failed:
        print(f"did not end: {', '.join(failed)}; see above")
    return bool(failed)


def run(script: str, quick: bool) -> bool:
    """Measure a row in a process of its own; whether it came to its end."""
    print(f"\n== bench.{script}", flush=True)
    begun = time.monotonic()
    command = [sys.executable, "-m", f"bench.{script}", *(["--quick"] if quick else [])]
    code = subprocess.run(command, cwd=measure.ROOT, check=False).returncode
    print(f"== bench.{script}: {log.human_seconds(time.monotonic() - begun)}", flush=True)
    return code == 0


def summary(scripts: list[str]) -> str:
    """The lines of these scripts' last results as one table, its conditions, and which goals were met."""
    files = {script: measure.RESULTS / f"{script}.json" for script in scripts}
    results = {script: atomic_io.read_json(file) for script, file in files.items() if file.exists()}
    lines = [line for result in results.values() for line in measure.lines_of(result)]
    notes = [f"* row {measure.lines_of(r)[0].row}: {note}" for r in results.values() for note in r["notes"]]
    made = [
        f"{script}: {result['date']}, {result['rounds']} rounds{', --quick' if result['quick'] else ''}"
        for script, result in results.items()
    ]
    goals = {verdict: sum(line.met == verdict for line in lines) for verdict in ("yes", "no")}
    return "\n".join(
        [
            "",
            measure.table(lines),
            *notes,
            *made,
            *sorted({result["machine"] for result in results.values()}),
            f"goals: {goals['yes']} met, {goals['no']} missed",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
