"""How long the command line and the package take to start, and whether either of them imports torch.

    python benchmarks/startup.py [--runs 10] [--json]

Every run is a new process. `--help` is timed from outside, interpreter included; `import` is the import alone, on the
clock of its own process; `bare` is an interpreter that does nothing, the floor under `--help`. Standard library only.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

HELP = [sys.executable, "-m", "specdecpp", "--help"]
BARE = [sys.executable, "-c", "pass"]
IMPORT = """
import json, sys, time
start = time.perf_counter()
import specdecpp
print(json.dumps([time.perf_counter() - start, "torch" in sys.modules]))
"""
HELP_MODULES = """
import atexit, runpy, sys
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
sys.argv = ["specdecpp", "--help"]
runpy.run_module("specdecpp", run_name="__main__", alter_sys=True)
"""


def run(command: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Seconds from start to end of a command, and what it left. Exits with its last line if it failed."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    seconds = time.perf_counter() - start
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(f"{Path(command[0]).name} {command[1]} failed ({done.returncode}): {last}. Is specdecpp installed?")
    return seconds, done


def summary(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def measure(num_runs: int) -> dict[str, object]:
    """All three measurements, one of each per turn, after one turn that warms the disk."""
    bare, helps, imports, is_torch_imported = [], [], [], False
    for turn in range(num_runs + 1):
        bare_s, help_s = run(BARE)[0], run(HELP)[0]
        import_s, is_torch_imported = json.loads(run([sys.executable, "-c", IMPORT])[1].stdout)
        if turn:
            bare.append(bare_s)
            helps.append(help_s)
            imports.append(import_s)
    help_modules = run([sys.executable, "-c", HELP_MODULES])[1].stderr.split()
    return {
        "bare": summary(bare),
        "help": {**summary(helps), "is_torch_imported": help_modules[-1] == "True"},
        "import": {**summary(imports), "is_torch_imported": is_torch_imported},
        "num_runs": num_runs,
        "specdecpp": version("specdecpp"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def table(result: dict) -> str:
    lines = [f"{'':<20}{'median ms':>10}{'min':>8}{'max':>8}   torch imported"]
    for key, label in (("bare", "bare interpreter"), ("help", "specdecpp --help"), ("import", "import specdecpp")):
        row = result[key]
        times = f"{row['median_s'] * 1e3:>10.1f}{row['min_s'] * 1e3:>8.1f}{row['max_s'] * 1e3:>8.1f}"
        torch = {None: "", True: "yes", False: "no"}[row.get("is_torch_imported")]
        lines.append(f"{label:<20}{times}   {torch}".rstrip())
    lines.append(f"{result['num_runs']} runs; specdecpp {result['specdecpp']}, Python {result['python']}, {result['machine']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="processes of each kind (default: 10)")
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs is {args.runs}, and a median needs at least one run: say --runs 10")
    result = measure(args.runs)
    print(json.dumps(result, indent=2) if args.json else table(result))


if __name__ == "__main__":
    main()
