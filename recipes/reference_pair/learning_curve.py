"""How much more labels would help: heads of a recipe trained on parts of its answers, measured on its test prompts.

    python learning_curve.py head.yaml --heads head,head_lagged,lagged_leaf --out benchmarks/results/learning_curve.json

Run `specdecpp train head.yaml --only collect` before. The parts are nested, and every part is trained for as many epochs.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from specdecpp.training import shards
from specdecpp.training.calibrate import calibrate_head
from specdecpp.training.evaluate import evaluate
from specdecpp.training.recipe import Recipe
from specdecpp.training.train import train

KEPT = ("auroc_token", "auroc_product", "gain_product", "gain_product_error", "ece_product", "kl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--heads", default="head")
    parser.add_argument("--parts", default="0.125,0.25,0.5,1")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    recipe = Recipe.read(args.recipe)
    about = shards.about(recipe.labels)
    answers, dev, test = (list(shards.read(recipe.labels, split=split)) for split in ("train", "dev", "test"))
    rows = []
    for part in map(float, args.parts.split(",")):
        some = [r for i, r in enumerate(answers) if (i * 0.6180339887) % 1 < part]
        for name in args.heads.split(","):
            with TemporaryDirectory() as folder:
                head = train(recipe.train[name], some, dev, about, Path(folder))
            found = evaluate(calibrate_head(head, dev), test)
            figures = {source: {key: scores["head"][key] for key in KEPT} for source, scores in found.items()}
            rows.append({"head": name, "part": part, "positions": sum(len(r.answer) for r in some), "test": figures})
            print(name, part, json.dumps({s: f["auroc_product"] for s, f in figures.items()}), flush=True)
    command = f"python learning_curve.py {args.recipe.name} --heads {args.heads} --parts {args.parts}"
    provenance = {"command": command, "digest": about["digest"], "git": about.get("git"), "versions": about.get("versions")}
    args.out.write_text(json.dumps({"provenance": provenance, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
