"""Results as `bench` and `replay` write them, made up by simulating steps: as crowded as real ones, in a second."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import numpy as np

from specdecpp.bench.results import Results, Row

DATASETS = {"gsm8k": 0.93, "al<pa>ca & co": 0.86}
NUM_ROUNDS, MOST = 2000, 20
TARGET_S = 0.003
RISE = 0.04
"""What a position adds to a measured target pass, as a share of it."""
NOTE = "Passes < 5 ms are near the clock's resolution & noisy."


@cache
def results(*, c: float = 0.22, kind: Literal["bench", "replay"] = "replay", is_bare: bool = False) -> Results:
    """Two data sets at T = 0 and T = 1, token and block, every role; bare: without intervals, oracles and histograms."""
    rise = RISE * (kind == "bench")
    passes = {str(n): TARGET_S * (1 + rise * (n - 1)) for n in range(1, MOST + 2)}
    name = "measured" if kind == "bench" else f"c = {c:g}"
    costs = {"name": name, "draft_s": TARGET_S * c, "passes": passes, "c": c}
    rows = [row for name in DATASETS for t in (0.0, 1.0) for row in _board(name, t, costs)]
    if is_bare:
        nothing = {"speedup_interval": None, "gain_interval": None, "time_shares": None}
        nothing |= {"share_of_headroom": {"hindsight": None, "perfect": None}}
        rows = [{**row, **nothing} for row in rows if row["role"] != "oracle"]
    return Results(
        kind=kind,
        provenance={
            "command": f"specdecpp {kind} <FILE>",
            "seed": 0,
            "pair": {"target": {"name": "a/b"}, "draft": {"name": "d"}},
        },
        costs=costs,
        rows=tuple(Row(**row) for row in rows),
        reliability={} if is_bare else {name: _reliability(mean) for name, mean in DATASETS.items()},
        notes=() if is_bare else (NOTE,),
    )


def _board(dataset: str, temperature: float, costs: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one data set at one temperature; gains and shares are filled in when all are known."""
    kinds = ("greedy",) if temperature == 0 else ("token", "block")
    rows = [
        {"dataset": dataset, "temperature": temperature, "verification": verification, "num_prompts": 60, **row}
        for verification in kinds
        for row in _arena(dataset, temperature, verification, costs)
        if verification == kinds[0] or row["role"] not in ("target", "oracle")
    ]
    best = next(row["tokens_per_second"] for row in rows if row["role"] == "fixed" and row["chosen"])
    tops = {row["policy"]: row["tokens_per_second"] for row in rows if row["role"] == "oracle"}
    for row in rows:
        own = row["tokens_per_second"]
        row["share_of_headroom"] = {name: (own - best) / (top - best) for name, top in tops.items()}
        row["gain_over_best_fixed"] = own / best - 1
        row["gain_interval"] = None if own == best else (own / best - 1.02, own / best - 0.98)
    return rows


def _arena(dataset: str, temperature: float, verification: str, costs: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rule under one verification."""
    rng = np.random.default_rng([len(dataset), int(temperature), len(verification)])
    level = DATASETS[dataset] - 0.04 * temperature + 0.02 * (verification == "block")
    is_hard = rng.random((NUM_ROUNDS, MOST)) < np.where(rng.random((NUM_ROUNDS, 1)) < 0.5, 0.1, 0.4)
    chance = np.where(is_hard, rng.uniform(0.1, 0.8, is_hard.shape), level + (1 - level) * rng.random(is_hard.shape))
    accepted = np.cumprod(rng.random(chance.shape) < chance, axis=1).sum(1)
    rules: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for role, policy, label, drafted in _settings(rng, chance, accepted):
        row = {"role": role, "policy": policy, "label": label, **_figures(drafted, accepted, costs)}
        rules.setdefault((role, label.rstrip("0123456789.") if "lagged" not in label else "lagged"), []).append(row)
    for (role, _), rows in rules.items():
        best = max(row["tokens_per_second"] for row in rows)
        for row in rows:
            speedup = row["tokens_per_second"] * TARGET_S
            row["chosen"] = row["tokens_per_second"] == best and role != "oracle" and "raw" not in row["label"]
            row |= {"speedup": speedup, "speedup_interval": (0.97 * speedup, 1.03 * speedup) if role != "target" else None}
    return [row for rows in rules.values() for row in rows]


def _settings(rng: np.random.Generator, chance: np.ndarray, accepted: np.ndarray) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """(role, policy, label, draft tokens of each step)."""

    def drafted(noise: float, threshold: float, least: int = 1, lag: int = 0) -> np.ndarray:
        logit = np.log(chance / (1.0001 - chance)) + noise * np.random.default_rng(1).normal(size=chance.shape)
        is_over = 1 - np.cumprod(1 / (1 + np.exp(-logit)), axis=1) > threshold
        return np.clip(np.where(is_over.any(1), is_over.argmax(1) + lag, MOST), least, MOST)

    yield "target", "target", "target alone", np.zeros(NUM_ROUNDS, int)
    for k in range(1, MOST + 1):
        yield "fixed", f"fixed:{k}", f"fixed K = {k}", np.full(NUM_ROUNDS, k)
    for t in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5):
        yield "free", f"cumulative:{t:g}", f"cumulative {t:g}", drafted(2.2, 1 - t)
    yield "free", "max-confidence:0.4", "max-confidence 0.4", drafted(2.6, 0.75)
    yield "free", "entropy:0.3", "entropy 0.3", drafted(2.8, 0.6)
    yield "free", "heuristic:5", "heuristic 5", rng.integers(1, MOST + 1, NUM_ROUNDS)
    for t in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        yield "specdecpp", f"specdecpp:{t:g}", f"SpecDec++ {t:g} lagged", drafted(1.6, t, lag=1)
        yield "specdecpp", f"specdecpp:{t:g}", f"SpecDec++ {t:g}", drafted(1.2, t)
    yield "specdecpp", "specdecpp:0.7", "SpecDec++ 0.7 raw", drafted(1.6, 0.35, least=2, lag=1)
    yield "cost_aware", "cost-aware:0.8", "cost-aware", drafted(1.2, 0.62)
    yield "oracle", "perfect", "perfect probability", drafted(0.0, 0.62)
    yield "oracle", "hindsight", "hindsight", np.minimum(accepted, MOST)


def _figures(drafted: np.ndarray, accepted: np.ndarray, costs: dict[str, Any]) -> dict[str, Any]:
    """Rates as ratios of sums."""
    num_tokens = int(np.minimum(drafted, accepted).sum()) + NUM_ROUNDS
    num_drafted = int(drafted.sum())
    depths, counts = (found.tolist() for found in np.unique(drafted, return_counts=True))
    verify_s = sum(n * costs["passes"][str(k + 1)] for k, n in zip(depths, counts, strict=True))
    draft_s = costs["draft_s"] * num_drafted
    share = draft_s / (draft_s + verify_s)
    return {
        "tokens_per_second": num_tokens / (draft_s + verify_s),
        "mean_acceptance_length": num_tokens / NUM_ROUNDS,
        "discard_rate": (num_drafted - (num_tokens - NUM_ROUNDS)) / num_tokens,
        "verification_rate": NUM_ROUNDS / num_tokens,
        "time_shares": {"draft": share, "verify": 1 - share, "head": 0.0, "other": 0.0},
        "num_tokens": num_tokens,
    }


def _reliability(mean: float) -> dict[str, list[float]]:
    confidence = np.linspace(0.03, 0.99, 15)
    frequency = np.clip(confidence + 0.08 * np.sin(7 * confidence) * (mean - 0.5), 0, 1)
    return {"confidence": confidence.tolist(), "frequency": frequency.tolist(), "weight": (confidence**2).tolist()}
