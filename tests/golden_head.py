"""Makes golden_head.json: what heads say of some tokens, worked out from the definitions in float64 and plain numpy.

    python tests/golden_head.py

Rows are draft tokens: a sampled one and a greedy one in each of three places of a step; one was cut by top-k, one has a q
below the least that a head is told. Heads are of either form, look-ahead ones with a token table and without, with each scalar,
all and none of them, with and without a width of their own. Module, rows in numpy, training and compiled code are held against
it (test_golden_head.py).
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).with_suffix(".json")
SEED, VOCAB, HIDDEN, WIDTH = 20261124, 19, 4, 5
SCALARS = ((), ("log_q",), ("entropy",), ("gap",), ("depth",), ("depth", "gap", "entropy", "log_q"))
SAMPLED = {"rejection_weight": 3.0, "temperature": 1.4, "bias": -0.2, "num_labels": 9}
GREEDY = {"rejection_weight": 1.0, "temperature": 0.6, "bias": 0.3, "num_labels": 9}


def row(dice: np.random.Generator, *, depth: int, temperature: float, top_k: int | None = None, is_rare: bool = False) -> dict:
    """A token, what the draft knew, and its scalars. Temperature 0: the token is the likeliest, and q that of T = 1."""
    logits = 2 * dice.standard_normal(VOCAB)
    token = int(logits.argmax()) if not temperature else int(logits.argsort()[-2])
    if is_rare:
        logits[token] = -110.0
    logits = logits.round(3)
    weight = np.exp((logits - logits.max()) / (temperature or 1.0))
    if top_k:
        weight[weight < np.sort(weight)[-top_k]] = 0
    q = weight / weight.sum()
    first, second = np.sort(q)[[-1, -2]]
    scalars = {
        "log_q": math.log(max(q[token], 1e-30)),
        "entropy": -sum(x * math.log(x) for x in q if x > 0),
        "gap": first - second,
        "depth": float(depth),
    }
    hidden = dice.standard_normal(HIDDEN).round(3)
    about = {"depth": depth, "temperature": temperature, "top_k": top_k, "token": token}
    return about | {"hidden": hidden.tolist(), "logits": logits.tolist(), "q": q.tolist(), "scalars": scalars}


def weights(dice: np.random.Generator, card: dict[str, Any]) -> dict[str, np.ndarray]:
    """A head's parameters by their names in its file."""
    width = card["width"] or HIDDEN
    shapes = {
        f"blocks.{i}.linear.{part}": (width,) * n for i in range(card["num_layers"]) for part, n in (("weight", 2), ("bias", 1))
    }
    shapes |= {"output.weight": (1, width), "output.bias": (1,)}
    if card["width"] or card["scalars"] or card["form"] == "look_ahead":
        shapes |= {"input.weight": (width, HIDDEN + len(card["scalars"])), "input.bias": (width,)}
    if card["vocab_size"]:
        shapes["token.weight"] = (VOCAB, width)
    return {name: (0.4 * dice.standard_normal(shape)).round(3) for name, shape in shapes.items()}


def logit(card: dict[str, Any], of: dict[str, np.ndarray], row: dict[str, Any]) -> float:
    """What a head of these weights says of a row, before any calibration."""
    x = np.array([*row["hidden"], *(row["scalars"][name] for name in card["scalars"])])
    if "input.weight" in of:
        x = of["input.weight"] @ x + of["input.bias"]
    if "token.weight" in of:
        x = x + of["token.weight"][row["token"]]
    for i in range(card["num_layers"]):
        z = of[f"blocks.{i}.linear.weight"] @ x + of[f"blocks.{i}.linear.bias"]
        x = x + z / (1 + np.exp(-z))
    return float(of["output.weight"][0] @ x + of["output.bias"][0])


def calibrated(score: float, row: dict[str, Any]) -> float:
    """P(accepted): logit P = (logit s + log w) / temperature + bias, as sampled or greedy decoding has it."""
    by = SAMPLED if row["temperature"] else GREEDY
    return 1 / (1 + math.exp(-((score + math.log(by["rejection_weight"])) / by["temperature"] + by["bias"])))


def made() -> dict[str, Any]:
    """All of it."""
    dice = np.random.default_rng(SEED)
    rows = []
    for depth, of in enumerate(
        ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "is_rare": True}), 1
    ):
        rows += [row(dice, depth=depth, **of), row(dice, depth=depth, temperature=0.0)]
    heads = []
    for form, vocab_size in (("lagged", None), ("look_ahead", VOCAB), ("look_ahead", None)):
        for width in (None, WIDTH):
            for i, scalars in enumerate(SCALARS):
                card = {"hidden_size": HIDDEN, "num_layers": i % 3, "form": form, "scalars": scalars, "width": width}
                card |= {"vocab_size": vocab_size, "calibration": SAMPLED, "greedy": GREEDY}
                of = weights(dice, card)
                said = [logit(card, of, r) for r in rows]
                accept = [calibrated(s, r) for s, r in zip(said, rows, strict=True)]
                heads.append({"card": card, "weights": {k: v.tolist() for k, v in of.items()}, "logit": said, "accept": accept})
    return {"made_by": "python tests/golden_head.py", "rows": rows, "heads": heads}


def text(golden: dict[str, Any]) -> str:
    """JSON with a line for each row and each head."""
    rows, heads = (",\n".join(json.dumps(one) for one in golden[name]) for name in ("rows", "heads"))
    return f'{{"made_by": {json.dumps(golden["made_by"])},\n"rows": [\n{rows}\n],\n"heads": [\n{heads}\n]}}\n'


if __name__ == "__main__":
    PATH.write_text(text(made()), encoding="utf-8")
