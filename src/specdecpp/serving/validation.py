"""Validation of requests beyond their schema: the model's name, the prompt's tokens, the limits, and the decoder to use.

What is refused here has cost no forward pass. Tokenizing may take long and happens off the event loop, one text at a time,
with a tokenizer of its own: the engine's is busy turning tokens into text.
"""

import asyncio
import threading
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdecpp.backends.kept import Forks
from specdecpp.costs.measuring import known
from specdecpp.decoder import Decoder, Options, policy_for
from specdecpp.errors import MissingExtraError, PromptError, UnsoundError, first_line
from specdecpp.grammar import Grammar
from specdecpp.loading.pair import REFERENCE, Pair
from specdecpp.policies import Policy
from specdecpp.policy_spec import parse_policy, spec_of
from specdecpp.prompt import encode
from specdecpp.sampling import Sampling, asked
from specdecpp.serving.engine import Part
from specdecpp.serving.errors import ApiError
from specdecpp.serving.evidence import Recorder
from specdecpp.serving.schema import BaseRequest, Speculative
from specdecpp.serving.settings import ServerSettings
from specdecpp.serving.tools import answer_grammar, told
from specdecpp.session import Session
from specdecpp.verify import check_lossless, check_request, is_lossless, verification_for, verifications

MAX_DRAFTED = 64
"""Draft tokens that a step may have under a policy that a request names."""
_NUM_DECODERS = 64


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """A request that can be answered: its body, the decoder and the verification for it, and the answers to make."""

    body: BaseRequest
    decoder: Decoder
    verification: str
    sampling: Sampling
    parts: tuple[Part, ...]

    @property
    def policy(self) -> str:
        return spec_of(self.decoder.policy)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts. Each counts once, however many answers it gets."""
        return sum(len(part.prompt) for part in self.parts[:: self.body.n])

    def recorder(self, session: Session) -> Recorder | None:
        """A recorder of the evidence that the request asks for; None where it asks for none."""
        num_top, details = self.body.num_top, self.body.speculative.details
        if num_top is None and not details:
            return None
        return Recorder(session, self.decoder.pair.tokenizer, num_top=num_top, details=details)


class RequestValidator:
    """Check bodies for one pair and make plans of them.

    Raises `UnsoundError` for a policy and a verification of the settings that together would change the distribution.
    """

    def __init__(self, pair: Pair, settings: ServerSettings):
        self.pair, self.settings = pair, settings
        self.policy = policy_for(pair, settings.policy)
        self.name = settings.name or model_name(pair)
        self._reader = replace(pair, tokenizer=deepcopy(pair.tokenizer))
        self._decoder = lru_cache(_NUM_DECODERS)(self._new_decoder)
        self._lock = threading.Lock()
        check_verification(settings.verification)
        self._decoder(None, settings.verification)

    def prepare(self) -> None:
        """Measure what a step costs, or read it from the file of an earlier measurement, and run the models once."""
        known(self.pair)  # a request may name a policy that weighs costs
        self._decoder(None, self.settings.verification).generate([0], max_tokens=4, seed=0, ignore_eos=True)

    async def validate(self, body: BaseRequest) -> RequestPlan:
        """Raises `ApiError` for what cannot be answered here."""
        if body.model is not None:
            self.check_model(body.model)
        return await asyncio.to_thread(self.plan, body)

    def check_model(self, name: str) -> None:
        if name != self.name:
            message = f"there is no model {name!r} here; this server has {self.name!r}."
            raise ApiError(message, status=404, code="model_not_found", param="model")

    def plan(self, body: BaseRequest) -> RequestPlan:
        sampling = asked({name: getattr(body, name) for name in Sampling.__dataclass_fields__}, self.pair.sampling)
        with self._lock:
            prompts = [self._encode(prompt, body) for prompt in body.prompts]
            grammar = self._grammar(body)
            decoder, verification = self._chosen(body.speculative, sampling, has_grammar=grammar is not None)
        options: Options = {
            "max_tokens": self._max_tokens(body, longest=max(map(len, prompts))),
            "sampling": sampling,
            "stop": body.stop,
            "ignore_eos": body.ignore_eos,
            "grammar": grammar,
        }
        every = [prompt for prompt in prompts for _ in range(body.n)]
        # A greedy answer needs no coins, but where rows are rounded as their passes are, it is the same every time only if its
        # stops do not follow the clock, and so it has a seed.
        is_rounded = sampling.is_greedy and not isinstance(self.pair.target.new_cache(), Forks)
        seed = 0 if body.seed is None and is_rounded else body.seed
        seeds = [None if seed is None else (seed + i) % 2**64 for i in range(len(every))]
        parts = tuple(Part(prompt=p, options={**options, "seed": s}) for p, s in zip(every, seeds, strict=True))
        return RequestPlan(body=body, decoder=decoder, verification=verification, sampling=sampling, parts=parts)

    def _encode(self, prompt: Any, body: BaseRequest) -> list[int]:
        """The ids of one prompt, within the limit."""
        field, tools = body.prompt_field, None
        try:
            if isinstance(prompt, list) and isinstance(prompt[0], dict):
                prompt, tools = told(prompt, body.tool_use, self._reader.tokenizer)
            ids = encode(self._reader, prompt, tools=tools)
        except PromptError as error:
            raise ApiError(str(error), param=field) from error
        except Exception as error:  # the template's own, or the tokenizer's
            raise ApiError(f"the prompt cannot be read: {first_line(error)}", param=field) from error
        context = self.pair.target.max_length
        if not ids:
            raise ApiError("the prompt has no tokens, and the tokenizer has no start token to begin with.", param=field)
        if context is not None and len(ids) >= context:
            message = f"the prompt has {len(ids)} tokens, and the context of {context} must hold an answer too."
            raise _too_long(f"{message} Shorten the prompt.", body)
        return ids

    def _max_tokens(self, body: BaseRequest, *, longest: int) -> int:
        """Length of an answer: as asked, else as its kind of body has it, where context and budget leave that."""
        num, in_all, context = len(body.prompts) * body.n, self.settings.max_new_tokens, self.pair.target.max_length
        budget = in_all // num
        left = budget if context is None else min(budget, context - longest)
        if body.num_new is None or body.is_cut:
            return max(1, min(left, body.num_new or body.default_new or left))
        if body.num_new > budget:
            message = f"{body.num_new} tokens for each of {num} answers are asked for, and a request gets {in_all} in all."
            raise ApiError(f"{message} Lower max_tokens or n.", param="max_tokens")
        if body.num_new > left:
            message = f"the prompt's {longest} tokens and an answer of {body.num_new} do not fit the context of {context}."
            raise _too_long(f"{message} Shorten the prompt, or ask for at most {left} tokens.", body)
        return body.num_new

    def _grammar(self, body: BaseRequest) -> Grammar | None:
        """The grammar of the answer, compiled once here, where a mistake is the client's."""
        pair, use = self.pair, body.tool_use
        try:
            if (found := answer_grammar(use, body.answer_schema, pair.tokenizer)) is not None:
                found.matcher(pair.tokenizer, vocab_size=pair.target.vocab_size, ends=pair.ends)
            return found
        except (ValueError, MissingExtraError) as error:
            raise ApiError(str(error), param="response_format" if use is None else "tools") from error

    def _chosen(self, how: Speculative, sampling: Sampling, *, has_grammar: bool) -> tuple[Decoder, str]:
        """The decoder for `speculative`, and the name of its verification."""
        name = how.verification or self.settings.verification
        try:
            check_lossless(verifications()[name], lossless=how.lossless)
            if sampling.is_greedy and is_lossless(verification_for(sampling, verifications()[name])):
                name = "greedy"
            decoder = self._decoder(how.policy, name)
            check_request(
                decoder.policy,
                verification_for(sampling, decoder.verification),
                is_greedy=sampling.is_greedy,
                has_costs=True,
                lossless=how.lossless,
                has_grammar=has_grammar,
            )
            return decoder, name
        except ValueError as error:
            raise ApiError(str(error), param="speculative") from error

    def _new_decoder(self, spec: str | None, name: str) -> Decoder:
        """A decoder for a policy and a verification, with running costs of its own. Raises ValueError for a policy that a
        request names and that drafts without end."""
        policy = self.policy if spec is None else parse_policy(spec).build(self.pair.head)
        if spec is not None and (most := longest_draft(policy)) > MAX_DRAFTED:
            raise ValueError(f"policy {spec!r} drafts up to {most} draft tokens, at most {MAX_DRAFTED} are allowed.")
        verification = verifications()[name]
        return Decoder(
            self.pair,
            policy=policy,
            verification=verification,
            lossless=is_lossless(verification),  # what was asked for is checked in `_chosen`
        )


def check_verification(name: str) -> None:
    """Raise `UnsoundError` for a server's own verification that changes the distribution: only a request may ask for that."""
    if not is_lossless(verifications()[name]):
        raise UnsoundError(
            f"a server's own verification is lossless, and {name} is not. Leave it out; a request has it by "
            f'"speculative": {{"verification": "{name}", "lossless": false}}.'
        )


def model_name(pair: Pair) -> str:
    """The name of a pair in /v1/models: the last part of the target's name."""
    return "reference" if pair.target_name == str(REFERENCE / "target") else Path(pair.target_name).name or "target"


def longest_draft(policy: Policy) -> int:
    """The most draft tokens that a policy allows in a step."""
    return max([getattr(policy, "max_nodes", policy.max_tokens), *map(longest_draft, policy.parts)])


def _too_long(message: str, body: BaseRequest) -> ApiError:
    return ApiError(message, param=body.prompt_field, code="context_length_exceeded")
