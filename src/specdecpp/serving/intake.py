"""From a body to work: the model's name, the prompt's tokens, the limits, and the decoder that the request asks for.

What is refused here has cost no forward pass. Tokenizing may take long and happens off the event loop, one text at a time,
with a tokenizer of its own: the engine's is busy turning tokens into text.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdecpp.backends.kept import Forks
from specdecpp.costs.known import measured
from specdecpp.decoder import Decoder, Options, policy_for
from specdecpp.errors import PromptError, UnsoundError, first_line
from specdecpp.loading.pair import REFERENCE, Pair
from specdecpp.policies import Costs, CumulativeConfidence, Policy, SpecDecPP
from specdecpp.policy_spec import parse_policy, spec_of
from specdecpp.prompt import encode
from specdecpp.sampling import Sampling, asked
from specdecpp.serving.evidence import Witness
from specdecpp.serving.limits import Limits
from specdecpp.serving.refusals import Refusal
from specdecpp.serving.requests import ChatRequest, CompletionRequest, Speculative
from specdecpp.serving.work import End, Event, Part, Work
from specdecpp.session import Session
from specdecpp.verify import at, check_lossless, check_request, is_lossless, verifications

_NUM_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """A request that can be answered: the answers to make, the decoder, and what the reply says about them."""

    decoder: Decoder
    policy: str
    verification: str
    sampling: Sampling
    parts: tuple[Part, ...]
    num_prompt_tokens: int
    num_top: int | None = None
    details: bool = False

    def work(self, tell: "Callable[[Event | End], None]", *, timeout_s: float) -> Work:
        """The work for the engine."""
        is_watched = self.num_top is not None or self.details
        return Work(
            decoder=self.decoder,
            parts=self.parts,
            tell=tell,
            timeout_s=timeout_s,
            witness=self._witness if is_watched else None,
        )

    def _witness(self, session: Session) -> Witness:
        tokenizer, sampling = self.decoder.pair.tokenizer, session.sampling
        return Witness(tokenizer, sampling, ends=session.ends, num_top=self.num_top, details=self.details)


class Intake:
    """Checks bodies for one pair and makes plans of them.

    `policy` and `verification` are for requests that name none; without a policy the pair's own (`default_policy`). Raises
    `UnsoundError` for a policy and a verification that together would change the distribution.
    """

    def __init__(
        self,
        pair: Pair,
        limits: Limits,
        *,
        policy: Policy | str | None = None,
        verification: str = "token",
        name: str | None = None,
    ):
        self.pair, self.limits = pair, limits
        self.verification = verification
        self.policy = policy_for(pair, policy)
        self.name = name or model_name(pair)
        self._costs: Costs | None = None
        self._reader = replace(pair, tokenizer=deepcopy(pair.tokenizer))
        self._decoders: OrderedDict[tuple[str | None, str], Decoder] = OrderedDict()
        self._lock = threading.Lock()
        check_own(verification)
        Decoder(pair, policy=self.policy, verification=verifications()[verification])

    def prepare(self) -> None:
        """Measure what a step costs, or read it from the file of an earlier measurement, and run the models once."""
        self._costs = measured(self.pair)
        self._decoder(None, self.verification).generate([0], max_tokens=4, seed=0, ignore_eos=True)

    async def plan(self, body: CompletionRequest | ChatRequest) -> RequestPlan:
        """Raises `Refusal` for what cannot be answered here."""
        if body.model is not None and body.model != self.name:
            message = f"there is no model {body.model!r} here; this server has {self.name!r}."
            raise Refusal(message, status=404, code="model_not_found", param="model")
        return await asyncio.to_thread(self._plan, body)

    def _plan(self, body: CompletionRequest | ChatRequest) -> RequestPlan:
        if (num := len(body.prompts) * body.n) > self.limits.max_choices:
            raise Refusal(f"{num} answers are asked for, at most {self.limits.max_choices} are given at once.", param="n")
        sampling = asked({name: getattr(body, name) for name in Sampling.__dataclass_fields__}, self.pair.sampling)
        with self._lock:
            prompts = [self._tokens(prompt) for prompt in body.prompts]
            decoder, kind = self._chosen(body.how, sampling)
        max_tokens = self._room(body, longest=max(map(len, prompts)))
        options = self._options(body, max_tokens, sampling)
        every = [prompt for prompt in prompts for _ in range(body.n)]
        # A greedy answer needs no coins, but where rows are rounded as their passes are, it is the same every time only if its
        # stops do not follow the clock, and so it has a seed.
        is_rounded = sampling.is_greedy and not isinstance(self.pair.target.new_cache(), Forks)
        seed = 0 if body.seed is None and is_rounded else body.seed
        seeds = [None if seed is None else seed + i for i in range(len(every))]
        return RequestPlan(
            decoder=decoder,
            policy=spec_of(decoder.policy),
            verification=kind,
            sampling=sampling,
            parts=tuple(Part(prompt=p, options={**options, "seed": s}) for p, s in zip(every, seeds, strict=True)),
            num_prompt_tokens=sum(map(len, prompts)),
            num_top=body.num_top,
            details=body.how.details,
        )

    @staticmethod
    def _options(body: CompletionRequest | ChatRequest, max_tokens: int, sampling: Sampling) -> Options:
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return {
            "max_tokens": max_tokens,
            "sampling": sampling,
            "stop": stop,
            "ignore_eos": body.ignore_eos,
        }

    def _tokens(self, prompt: Any) -> list[int]:
        """The ids of one prompt, within the limit."""
        try:
            ids = encode(self._reader, prompt)
        except PromptError as error:
            raise Refusal(str(error), param=_where(prompt)) from error
        except Exception as error:  # the template's own, or the tokenizer's
            raise Refusal(f"the prompt cannot be read: {first_line(error)}", param=_where(prompt)) from error
        if not ids:
            raise Refusal("the prompt has no tokens, and the tokenizer has no start token to begin with.", param=_where(prompt))
        most = self.limits.max_prompt_tokens
        if most is not None and len(ids) > most:
            raise _too_long(f"the prompt has {len(ids)} tokens, this server takes {most}. Shorten the prompt.", prompt)
        context = self.pair.target.max_length
        if context is not None and len(ids) >= context:
            message = f"the prompt has {len(ids)} tokens, and the context of {context} must hold an answer too."
            raise _too_long(f"{message} Shorten the prompt.", prompt)
        return ids

    def _room(self, body: CompletionRequest | ChatRequest, *, longest: int) -> int:
        """How long an answer may get: as asked, else what the context and the budget leave."""
        context, budget = self.pair.target.max_length, self.limits.max_new_tokens // (len(body.prompts) * body.n)
        left = budget if context is None else min(budget, context - longest)
        asked = body.num_new
        if asked is None:
            return max(1, min(left, body.num_new_unasked or left))
        if asked > budget:
            raise Refusal(
                f"{asked} tokens for each of {len(body.prompts) * body.n} answers are asked for, and a request gets "
                f"{self.limits.max_new_tokens} in all. Lower max_tokens or n.",
                param="max_tokens",
            )
        if asked > left:
            raise _too_long(
                f"the prompt's {longest} tokens and an answer of {asked} do not fit the context of {context}. "
                f"Shorten the prompt, or ask for at most {left} tokens.",
                body.prompts[0],
            )
        return asked

    def _chosen(self, how: Speculative, sampling: Sampling) -> tuple[Decoder, str]:
        """The decoder for `speculative`, and what its verification is called."""
        kind = how.verification or self.verification
        try:
            check_lossless(verifications()[kind], lossless=how.lossless)
            if sampling.is_greedy and is_lossless(at(sampling, verifications()[kind])):
                kind = "greedy"
            decoder = self._decoder(how.policy, kind)
            check_request(
                decoder.policy,
                at(sampling, decoder.verification),
                draft=self.pair.draft,
                is_greedy=sampling.is_greedy,
                has_costs=True,
                lossless=how.lossless,
            )
            return decoder, kind
        except ValueError as error:
            raise Refusal(str(error), param="speculative") from error

    def _decoder(self, spec: str | None, kind: str) -> Decoder:
        """One decoder per rule and verification, those used lately; each has running costs of its own."""
        key = spec, kind
        if key not in self._decoders:
            policy = self.policy if spec is None else self._policy(spec)
            verification, heals = verifications()[kind], policy.needs_costs and self.pair.is_identified
            self._decoders[key] = Decoder(
                self.pair,
                policy=policy,
                verification=verification,
                costs=None if heals else self._costs,  # given ones stay as they are
                lossless=is_lossless(verification),  # what was asked for is checked in `_chosen`
            )
        self._decoders.move_to_end(key)
        while len(self._decoders) > _NUM_KEPT:
            self._decoders.popitem(last=False)
        return self._decoders[key]

    def _policy(self, spec: str) -> Policy:
        """The rule that a request names. Raises ValueError for one that drafts without end."""
        policy = parse_policy(spec).build(self.pair.head)
        if (most := _longest(policy)) > self.limits.max_drafted:
            raise ValueError(
                f"policy {spec!r} drafts up to {most} draft tokens, at most {self.limits.max_drafted} are allowed."
            )
        return policy


def check_own(verification: str) -> None:
    """Raise `UnsoundError` for a server's own verification that changes the distribution: only a request may ask for that."""
    if not is_lossless(verifications()[verification]):
        raise UnsoundError(
            f"a server's own verification is lossless, and {verification} is not. Leave it out; a request has it by "
            f'"speculative": {{"verification": "{verification}", "lossless": false}}.'
        )


def model_name(pair: Pair) -> str:
    """The name of a pair in /v1/models: the last part of the target's name."""
    return "reference" if pair.target_name == str(REFERENCE / "target") else Path(pair.target_name).name or "target"


def threshold(policy: Policy) -> float | None:
    """The survival below which a rule with one threshold stops; None for the others."""
    if isinstance(policy, SpecDecPP):
        return 1 - policy.threshold
    return policy.threshold if isinstance(policy, CumulativeConfidence) else None


def _longest(policy: Policy) -> int:
    return max([getattr(policy, "max_nodes", policy.max_tokens), *map(_longest, policy.parts)])


def _too_long(message: str, prompt: Any) -> Refusal:
    return Refusal(message, param=_where(prompt), code="context_length_exceeded")


def _where(prompt: Any) -> str:
    """The field that a prompt came in."""
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    return "messages" if is_chat else "prompt"
