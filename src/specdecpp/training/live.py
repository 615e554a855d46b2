"""Labels from decoding itself: what a head says of the draft tokens of real steps, and how likely each was to be accepted.

    pair, head, prompts -> steps in which the head judges every draft token and stops none -> Heard

A head is trained on states from transformers, and serves with those of whatever runs the draft: llama.cpp, int8 weights,
another temperature. Here the backend that serves makes the states. The label is not a coin but its odds, min(1, p/q), which
verification knows. A draft token counts as much as it is likely that all before it are accepted, as only then its own
acceptance decides anything; so weighted, the prefix of a draft token is in distribution a text of the target's, like
the clean prefix of collected labels. Used by `calibrate.calibrate_live`.

Shapes: T judged draft tokens of an answer, K of a step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.decoder import Decoder, Prompt, run
from specdecpp.head import AcceptanceHead
from specdecpp.loading.pair import Pair
from specdecpp.policies.head import HeadPolicy
from specdecpp.sampling import Sampling
from specdecpp.session import Session
from specdecpp.step import Plan, Result
from specdecpp.training.scores import LENGTH, Judged
from specdecpp.verify import token_acceptance

_SUREST = 1e-15  # a raw score is taken to lie this far from 0 and 1


@dataclass(frozen=True, kw_only=True)
class Heard:
    """The judged draft tokens of one answer in order: depth 1 begins a step."""

    score: Float[np.ndarray, " T"]
    """The head's raw logit."""
    label: Float[np.ndarray, " T"]
    """min(1, p/q)."""
    depth: Int[np.ndarray, " T"]
    """The place in the step, from 1."""

    def per_token(self) -> Judged:
        """A point for each draft token, weighted by the probability that all before it are accepted."""
        before = np.concatenate([[1.0], self._along(np.multiply, self.label)])[: len(self.label)]
        weight = np.where(self.depth == 1, 1.0, before)
        return Judged(score=self.score, label=self.label, weight=weight, source="live")

    def per_step(self, log_probability: Float[np.ndarray, " T"]) -> Judged:
        """A point for each step as far as it had come at each draft token: whether all so far are accepted."""
        return Judged(
            score=self._along(np.add, log_probability),
            label=self._along(np.multiply, self.label),
            weight=np.ones_like(self.label),
            source="live",
        )

    def _along(self, fold: np.ufunc, values: Float[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
        """Running sums or products, each step by itself."""
        return np.concatenate([fold.accumulate(part) for part in np.split(values, np.flatnonzero(self.depth == 1))])


def listen(
    pair: Pair,
    head: AcceptanceHead,
    prompts: Iterable[Prompt],
    *,
    sampling: Sampling,
    max_tokens: int = 128,
    length: int = LENGTH,
    seed: int = 0,
) -> Iterator[Heard]:
    """Answer each prompt in steps of up to `length` judged draft tokens, and note what the head said.

    Answer i has the seed `seed + i`. At temperature 0 a label is 1 where the draft token is the target's choice, else 0.
    Raises `HeadError` for a head that does not fit the pair, `PromptError` for a prompt that it cannot read.

    >>> heard = next(listen(pair, pair.head, ["Why is the sky blue?"], sampling=Sampling()))     # doctest: +SKIP
    >>> heard.per_token().label.mean()                                                           # doctest: +SKIP
    """
    head = head.with_card().to(pair.draft.device)  # where `load_pair` has it
    num_unjudged = head.card.form == "lagged"  # the last draft token of a step, which the draft has not read
    policy = HeadPolicy(head=head, calibrated=False, max_tokens=length + num_unjudged)
    decoder = Decoder(pair, policy=policy)
    for i, prompt in enumerate(prompts):
        session = decoder.start(prompt, max_tokens=max_tokens, seed=seed + i, sampling=sampling)
        yield _heard(session)


def _heard(session: Session) -> Heard:
    """Decode to the end, and note of each draft token what was said of it and what was true."""
    steps = list[tuple[list[float], list[float]]]()

    def watch(plan: Plan, result: Result) -> None:
        if num := len(result.judged):
            steps.append((list(result.judged), _acceptance(plan, result)[:num].tolist()))

    session.watch = watch
    for _ in run(session):
        pass
    said = np.array([s for scores, _ in steps for s in scores], float).clip(_SUREST, 1 - _SUREST)
    true = np.array([a for _, labels in steps for a in labels], float)
    depth = np.array([k for scores, _ in steps for k in range(1, len(scores) + 1)], int)
    return Heard(score=np.log(said) - np.log1p(-said), label=true, depth=depth)


def _acceptance(plan: Plan, result: Result) -> Float[Tensor, " K"]:
    """min(1, p/q) of each draft token; under greedy drafting there is no q, and p is one-hot."""
    rows = result.rows
    assert rows is not None, "a session that is watched asks for them"
    tokens = torch.tensor(result.tokens, device=rows.p.device)
    if plan.request.sampling.is_greedy:
        return rows.p[:-1].gather(-1, tokens[:, None])[:, 0]
    return token_acceptance(rows.p[:-1], rows.q, tokens)
