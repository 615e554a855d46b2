"""The table of the README, from results: each rule by the clock on the reference pair, rows that lose included.

    python benchmarks/front.py            # writes it between the marks in README.md
    python benchmarks/front.py --check    # says whether it is there

`bench.json` has the rules. What the memory of the machine allows is from `peers.json`: a round must read the weights of the
target once and those of the draft once a candidate, at the bandwidth that a sum over 600 MB reaches.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from specdecpp.bench.results import Results, Row

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- table: made by benchmarks/front.py -->", "<!-- until here -->"
NAMES = {"gsm8k_test": "GSM8K", "HumanEval": "HumanEval", "alpaca_1k": "Alpaca"}
SHOWN = {("target", "token"), ("fixed", "token"), ("cumulative:0.2", "token"), ("specdecpp", "token")}
SHOWN |= {("cost-aware", "token"), ("cost-aware", "block")}


def table(bench: Results, peers: dict[str, Any]) -> str:
    """The rows of every data set, and under them what they were measured on."""
    lines = [
        "| prompts | rule | tokens/s | times the target alone | tokens a pass | of the bandwidth floor |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in bench.rows:
        if is_shown(row):
            lines.append(_line(row, floor_s(row, peers)))
    about = bench.provenance
    target = about["pair"]["target"]
    tokens = about["plan"]["max_tokens"]
    cpu = peers["machine"]["cpu"].partition(" with ")[0]
    where = f"{about['machine']} ({cpu}), {target['dtype']}, {target['runner']}"
    lines += [
        "",
        f"{where}; the reference pair, temperature 1,",
        f"{bench.rows[0].num_prompts} prompts a set, up to {tokens} tokens, 95 % intervals over prompts; settings were chosen",
        "on other prompts. The floor: two bytes a weight from memory in each pass; this pair fits into a cache.",
    ]
    return "\n".join(lines)


def is_shown(row: Row) -> bool:
    """The rules of the front page, each in the setting that other prompts chose."""
    names = {row.policy.split(":")[0], row.policy, row.role}
    return row.chosen and any((name, row.verification) in SHOWN for name in names)


def floor_s(row: Row, peers: dict[str, Any]) -> float:
    """Seconds of a token that only reads weights, of two bytes each: what the pair has, and native keeps."""
    target, draft = (2 * n / 1e9 for n in peers["pairs"]["reference"]["num_parameters"])
    drafted = row.discard_rate + (row.mean_acceptance_length - 1) * row.verification_rate
    return (row.verification_rate * target + drafted * draft) / peers["machine"]["bandwidth_gb_per_s"]["2"]


def _line(row: Row, least_s: float) -> str:
    name = row.label + (", block verification" if row.verification == "block" and "block" not in row.label else "")
    speed = f"{row.tokens_per_second:.0f}" + (" [{:.0f}, {:.0f}]".format(*row.rate_interval) if row.rate_interval else "")
    times = f"{row.speedup:.2f}" + (" [{:.2f}, {:.2f}]".format(*row.speedup_interval) if row.speedup_interval else "")
    cells = (NAMES.get(row.dataset, row.dataset), name, speed, times, f"{row.mean_acceptance_length:.2f}")
    return f"| {' | '.join(cells)} | {row.tokens_per_second * least_s:.2f} |"


def written(text: str, table: str) -> str:
    """The README with this table between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> None:
    import json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    peers = json.loads((RESULTS / "peers.json").read_text(encoding="utf-8"))
    found = table(Results.read(RESULTS / "bench.json"), peers)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        sys.exit(f"README.md has no place for the table: it goes between {BEGIN} and {END}")
    if is_check:
        sys.exit(0 if written(text, found) == text else "README.md has another table than the results give")
    readme.write_text(written(text, found), encoding="utf-8")


if __name__ == "__main__":
    main()
