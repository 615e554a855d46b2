"""The server's rate with answers under a grammar over its rate without, one client, requests in turns.

    python benchmarks/structured.py --pair smollm2 [--target FILE --draft FILE] [--num 12]

Each prompt asks for the same JSON twice: as any text, and with a schema (`response_format`), in random order. A rate is tokens
over the seconds of a request but for those of its prompt (`timings`), under the default rule, up to 96 tokens. The two texts
differ, and with them what is accepted: `row` is the same ratio of rows of the target's passes, accepted or not.
Nothing else may run meanwhile.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

RESULTS = Path(__file__).parent / "results" / "structured.json"
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9}}
THINGS = ("a lighthouse keeper", "a chess player", "a baker", "a pilot", "a gardener", "a nurse", "a poet", "a diver")
ASKED = "Invent {}. Answer with JSON only: name, age, city, hobbies (a list of three) and a biography of two sentences."
TEXT: dict[str, Any] = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer"},
        "city": TEXT,
        "hobbies": {"type": "array", "items": TEXT, "minItems": 3, "maxItems": 3},
        "biography": TEXT,
    },
    "required": ["name", "age", "city", "hobbies", "biography"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@contextmanager
def running(*names: str) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "specdecpp", "serve", "--port", "0", *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.send_signal(signal.SIGTERM)


def rates(url: str, num: int, sampling: dict[str, Any], *, seed: int) -> dict[str, Any]:
    """Rates of so many prompts, each asked with and without the schema; the first prompt warms up."""
    dice, found = random.Random(seed), {"text": [0, 0.0, 0, 0], "schema": [0, 0.0, 0, 0]}
    for i in range(num + 1):
        message = {"role": "user", "content": ASKED.format(f"{THINGS[i % len(THINGS)]} born in {1900 + i}")}
        for kind in dice.sample(sorted(found), 2):
            body = {"messages": [message], "max_tokens": 96, **sampling} | (
                {"response_format": FORM} if kind == "schema" else {}
            )
            times = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()["timings"]
            if i:
                sums = found[kind]
                sums[0] += times["predicted_n"]
                sums[1] += times["predicted_ms"] / 1e3
                sums[2] += times["draft_n"] or 0
                sums[3] += times["draft_n_accepted"] or 0
    row = {
        kind: {"tokens_per_second": round(n / s, 1), "accepted": round(accepted / max(1, drafted), 3)}
        for kind, (n, s, drafted, accepted) in found.items()
    }
    row_s = {kind: s / (n - accepted + drafted) for kind, (n, s, drafted, accepted) in found.items()}  # rows of passes
    ratio = row["schema"]["tokens_per_second"] / row["text"]["tokens_per_second"]
    return row | {"ratio": round(ratio, 3), "row": round(row_s["text"] / row_s["schema"], 3)}


def main() -> None:
    """Measure a pair; its rows join those of others in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2", help="a name for the rows; without --target that of a shipped pair")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--num", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    names = ("--target", given.target or given.pair, *(("--draft", given.draft) if given.draft else ()))
    with running(*names) as url:
        rows = {name: rates(url, given.num, sampling, seed=0) for name, sampling in SAMPLINGS.items()}
    whole = json.loads(given.out.read_text()) if given.out.exists() else {"pairs": {}}
    whole["pairs"][given.pair] = rows | {"num": given.num}
    whole["summary"] = {pair: min(of[name]["ratio"] for name in SAMPLINGS) for pair, of in whole["pairs"].items()}
    given.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
