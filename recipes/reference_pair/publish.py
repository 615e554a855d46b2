"""Copy a trained pair into the package and write its card.

    python publish.py --pair runs/reference --head runs/head/heads/head --evaluation benchmarks/results/reference_pair.json \\
        --head-figures benchmarks/results/head.json --into src/specdecpp/reference
"""

import argparse
import json
import math
import shutil
from pathlib import Path

from safetensors import safe_open

CARD = """# The reference pair

A small target and draft that ship with specdecpp, for demonstrations and tests. They were trained by this project with
`recipes/reference_pair/` and know three things a little: GSM8K-like word problems, short instructions, and Python
functions from a docstring. They are not meant to be useful beyond that, and what they say is often wrong.

| | target | draft | head |
|---|---|---|---|
| architecture | Llama, {target_layers} layers, width 256 | Llama, {draft_layers} layers, width 256 | {head_blocks} |
| parameters | {target_parameters:.2f} M | {draft_parameters:.2f} M | {head_parameters:.2f} M |
| weights | bfloat16 | bfloat16 | float32 |
| context | 1,024 | 1,024 | |

Tokenizer: byte-level BPE, 4,096 entries, single digits, chat template with `<|user|>` and `<|assistant|>`.

**Data.** GSM8K train (MIT), a sample of 2,000 rows of databricks-dolly-15k (CC BY-SA 3.0), and Python's standard library
(PSF licence). Nothing else. The draft was distilled from the target on the same prompts and on answers that the target
sampled for them; the head saw answers to prompts of all three.

**Licence.** Apache-2.0 for the weights, as for the code; the data keep their licences.

**Target, validation loss** (nats per token, held-out documents): {losses}, at step {step} of the last stage.

**Mean acceptance** 1 - TV(p, q) at temperature 1, on prompts nobody trained on:

| prompts | tokens | mean acceptance | share of tokens above 0.95 | below 0.5 |
|---|---:|---:|---:|---:|
{acceptance}

**Head**: {head_form}, {head_blocks} of width {head_width}, trained on {head_labels:,} labels
(`recipes/reference_pair/head.yaml`) and calibrated on held-out prompts; it stops with {stopping}.
On prompts nobody trained on, AUROC of a step (will all of it be accepted?) and expected calibration error; log q costs
nothing, and its product is the rival:

{head_table}
"""

FIELDS = ("auroc_token", "auroc_product", "ece_product", "kl")
OURS = ("head", "head_lagged", "cumulative_q")


def head_table(figures: dict) -> str:
    """The figures of head.json: a row for each set of prompts and score."""
    lines = ["| prompts | score | AUROC/token | AUROC/step | ECE/step | KL/token |", "|---|---|---:|---:|---:|---:|"]
    for source, scores in figures.items():
        for score in OURS:
            cells = ("-" if scores[score][f] is None else f"{scores[score][f]:.3f}" for f in FIELDS)
            lines.append(f"| {source} | {score.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/, draft/ and target.json")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--head-figures", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    sources = {"target": args.pair / "target", "draft": args.pair / "draft", "head": args.head}
    for part, source in sources.items():
        shutil.rmtree(args.into / part, ignore_errors=True)
        shutil.copytree(source, args.into / part, ignore=shutil.ignore_patterns("state.pt"))
    for file in args.into.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    training = json.loads((args.pair / "target.json").read_text())
    head = json.loads((args.head / "head.json").read_text())
    of_head = {k: v for k, v in json.loads(args.head_figures.read_text()).items() if k != "provenance"}
    figures = json.loads(args.evaluation.read_text())["figures"]
    rows = [
        f"| {name} | {f['tokens']:,} | {f['mean_acceptance']:.3f} | {f['share_above_0.95']:.2f} | {f['share_below_0.5']:.2f} |"
        for name, f in figures.items()
    ]
    layers_of, parameters_of = {}, {}
    for part in ("target", "draft"):
        layers_of[part] = json.loads((args.pair / part / "config.json").read_text())["num_hidden_layers"]
        with safe_open(args.pair / part / "model.safetensors", "pt") as weights:
            parameters_of[part] = sum(math.prod(weights.get_slice(key).get_shape()) for key in sorted(weights.keys())) / 1e6
    with safe_open(args.head / "head.safetensors", "pt") as weights:
        parameters_of["head"] = sum(math.prod(weights.get_slice(key).get_shape()) for key in sorted(weights.keys())) / 1e6
    card = CARD.format(
        target_layers=layers_of["target"],
        draft_layers=layers_of["draft"],
        target_parameters=parameters_of["target"],
        draft_parameters=parameters_of["draft"],
        head_blocks=f"{head['num_layers']} block" + "s" * (head["num_layers"] != 1),
        head_parameters=parameters_of["head"],
        head_form=head["form"].replace("_", "-"),
        head_width=head["width"] or head["hidden_size"],
        head_labels=head["notes"]["epochs"][-1]["num_labels"],
        stopping=", ".join(f"{k} {v}" for k, v in head["stopping"].items()),
        head_table=head_table(of_head),
        losses=", ".join(f"{k} {v:.2f}" for k, v in training["validation_nats"].items()),
        step=training["step"],
        acceptance="\n".join(rows),
    )
    (args.into / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
