"""The table of the README, from results: engines on one pair's files, rows that lose included.

    python benchmarks/front.py            # writes it between the marks in README.md
    python benchmarks/front.py --check    # says whether it is there

`qwen_coder_pair.json` is what `python -m peers.cells` measured of a pair that people have: the README's table. That of
`smollm2_pair.json` stands in results/smollm2_pair.md.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
BEGIN, END = "<!-- table: made by benchmarks/front.py -->", "<!-- until here -->"
SHOWN = {
    "transformers (bfloat16): no draft / the same draft": ("transformers", ["target alone"], ["K = 1", "K = 2"]),
    "vLLM on a CPU (bfloat16): no draft / the same draft": ("vllm", ["target alone"], ["K = 1", "K = 2"]),
    "llama.cpp: no draft / the same draft": (
        "llama.cpp",
        ["target alone"],
        ["n-max 1", "n-max 2", "n-max 4", "n-max 8, p-min 0.4"],
    ),
    "OpenVINO: no draft / the same draft": ("openvino", ["target alone"], ["K = 1", "K = 2"]),
    "ours, no draft": ("ours", ["target"]),
    "ours, best fixed K": ("ours", [f"fixed:{k}" for k in range(1, 9)]),
    "ours, SpecDec++ in the setting of its head": ("ours", ["specdecpp"]),
    "**ours, the default rule**": ("ours", ["default", "cost-aware"]),
}
"""By label: an engine, and settings of which the best is shown, twice where it has two figures."""
PAIRS = {
    "qwen_coder_pair.json": "Qwen2.5-Coder-Instruct 1.5B with the .5B as its draft, two files in Q4_K_M",
    "smollm2_pair.json": "SmolLM2-135M-Instruct's own file (Q4_1) with the draft that ships",
}
PLACES = "README.md", "benchmarks/results/smollm2_pair.md"
Cell = dict[str, Any]


def table(found: dict[str, Any], title: str) -> str:
    """Tokens/s by sampling, the mean over the sets; no row of an engine or a rule that was not asked."""
    samplings = sorted({(cell["temperature"], cell["top_p"]) for cell in found["cells"]})
    columns = [[cell for cell in found["cells"] if (cell["temperature"], cell["top_p"]) == sampling] for sampling in samplings]
    titles = ["greedy" if t == 0 else f"T = {t:g}" + (f", top_p {p:g}" if p < 1 else "") for t, p in samplings]
    runs = f"{num} runs with ours in each" if (num := len(found.get("sittings", ()))) > 1 else "one run"
    lines = [f"{title}, one machine, {runs}, all of it lossless:", ""]
    lines += [f"| tokens/s | {' | '.join(titles)} |", f"|---|{'---:|' * len(titles)}"]
    for label, (engine, *shown) in SHOWN.items():
        rates = [[max(speed(cells, engine, setting) for setting in settings) for settings in shown] for cells in columns]
        if any(rate for of in rates for rate in of):
            cells = [" / ".join(map(figure, of)) for of in rates]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    over = [[cell["default_over_target"][0] for cell in cells] for cells in columns]
    lines.append(f"| default over no draft: mean, worst set | {' | '.join(f'{mean(of):.2f}, {min(of):.2f}' for of in over)} |")
    plan = found["plan"]
    told = (
        f"{found['machine']['cpu']}, {plan['threads']} threads, {found['date']}. Means over GSM8K, HumanEval and Alpaca, "
        f"{plan['prompts']} unseen prompts each ({plan['other_prompts']} for the others), up to {plan['tokens']} tokens, "
        "reading the prompt included; the best setting of each, chosen on these prompts. -: not lossless (vLLM's issue 55005; "
        "OpenVINO accepts what the target would not say)."
    )
    return "\n".join([*lines, "", *textwrap.wrap(told, 132)])


def figure(rate: float) -> str:
    """Two digits at least; a dash where nothing was measured."""
    return "-" if not rate else f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def speed(cells: Sequence[Cell], engine: str, setting: str) -> float:
    """Tokens/s, the mean over cells; 0 where it was not asked."""
    rates = [
        row["tokens_per_second"][0]
        for cell in cells
        for row in cell["rows"]
        if (row["engine"], row["setting"]) == (engine, setting)
    ]
    return mean(rates) if rates else 0.0


def written(text: str, table: str) -> str:
    """A page with this table between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    for place, (name, title) in zip(PLACES, PAIRS.items(), strict=True):
        page, results = ROOT / place, RESULTS / name
        text, found = page.read_text(encoding="utf-8"), table(json.loads(results.read_text(encoding="utf-8")), title)
        if BEGIN not in text or END not in text:
            sys.exit(f"{place} has no place for the table of {results.name}: it goes between {BEGIN} and {END}")
        if not is_check:
            page.write_text(written(text, found), encoding="utf-8")
        elif written(text, found) != text:
            sys.exit(f"{place} has another table than {results.name} gives")


if __name__ == "__main__":
    main()
