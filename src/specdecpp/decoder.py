"""The user interface: a prompt in, text out. One request is a `session.Session`; this sets it up and sums up its steps.

Pair -> Decoder.stream(): draft (policy stops it) -> verify -> commit / roll back -> Step ... folded into Output
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypedDict, Unpack, overload

from specdecpp.backends import Draws
from specdecpp.backends.engines import record_passes
from specdecpp.backends.kept import Kept
from specdecpp.detokenize import Detokenizer
from specdecpp.drafters import SuffixDrafter
from specdecpp.errors import PromptError, UnsoundError
from specdecpp.grammar import Grammar, grammar_of
from specdecpp.loading.pair import Pair
from specdecpp.memory import Memory
from specdecpp.metrics import Metrics
from specdecpp.policies import CostAware, CostClock, Costs, Fixed, Policy, SpecDecPP
from specdecpp.policies.head import heads
from specdecpp.policy_spec import policy_of
from specdecpp.prompt import Prompt, are_several, encode
from specdecpp.sampling import Sampling, asked, streams, whole
from specdecpp.scheduler import outcome_of, step
from specdecpp.session import FinishReason, Session, Step
from specdecpp.verify import TokenVerification, Verification, check_rule, is_lossless, verification_for


class Options(TypedDict, total=False):
    """Options of a request, with the defaults of `Decoder.start`."""

    max_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    sampling: Sampling | None
    stop: str | Sequence[str]
    seed: int | None
    ignore_eos: bool
    grammar: Grammar | str | None
    json_schema: Any


@dataclass(frozen=True, kw_only=True)
class Output:
    """A finished answer: its text and tokens (the ending id included), why it ended, its steps and what they cost."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    steps: tuple[Step, ...]
    metrics: Metrics
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    """Sampling that the tokens were drawn under."""
    lossless: bool = True
    """True where the output has the target's own distribution; elsewhere `metrics.mean_tv` says how far from it."""
    warning: str | None = None
    """Set once acceptance has fallen against the pair's last check (`drift`), with what may have caused it."""


class Decoder:
    """Decode with a pair under a stopping policy; the output has exactly the target's distribution.

    `policy`        a rule or its short form ("fixed:3", "none"); by default that of `default_policy`
    `verification`  the test of draft tokens when sampling; temperature 0 compares with the target's argmax
    `costs`         costs of a step; by default a policy that needs them has them measured, once for a pair and a machine
    `lossless`      False admits a verification that changes the distribution (`lab.lossy`)
    `reuses`        False reads every prompt whole; by default compiled models read only what no earlier text began with
    `remember`      False keeps requests from learning from each other, in this process and on disk (`memory`), and compares
                    none with the pair's check (`drift`)

    A request with a seed sees the costs as measured and learns from itself only, so the seed gives the same answer again. The
    others correct the costs by the clock and begin with what earlier ones have learned; a compiled draft then reads only as
    much of a long text as pays (`Costs.worth_reading`). Raises `UnsoundError` for a policy and a verification that together
    would change the distribution.

    >>> decoder = Decoder(load_pair())                                           # doctest: +SKIP
    >>> decoder.generate("Why is the sky blue?", max_tokens=64, seed=0).text     # doctest: +SKIP
    """

    def __init__(
        self,
        pair: Pair,
        *,
        policy: Policy | str | None = None,
        verification: Verification = TokenVerification(),  # noqa: B008 (frozen)
        costs: Costs | None = None,
        lossless: bool = True,
        reuses: bool = True,
        remember: bool = True,
    ):
        if not isinstance(pair, Pair):
            raise TypeError(f"a Decoder takes a pair, got {pair!r}. Load one first: Decoder(load_pair(...)).")
        policy = policy_for(pair, policy)
        check_rule(policy, verification, lossless=lossless)
        for head in heads(policy):
            pair.check_head(head)
        self.pair, self.policy, self.verification = pair, policy, verification
        self.reuses = reuses
        self.memory = Memory(pair, policy, verification, costs, remembers=remember)
        if record_passes(pair.target, pair.draft):
            for sampling in (asked({}, pair.sampling), Sampling(temperature=0.7, top_p=0.9)):
                _compile_for(pair, sampling)
        if pair.is_identified:
            self.memory.running_costs()

    @property
    def costs(self) -> Costs | None:
        """Costs of a step, measured or given; None where the policy does not ask."""
        return self.memory.costs

    def start(self, prompt: Prompt, **options: Unpack[Options]) -> Session:
        """Set up a request without running it: a session to `prefill` and `step`. The first may measure what steps cost.

        Defaults: max_tokens=256, no stop strings, a fresh seed, any text. Sampling is `sampling` whole, else each parameter as
        given (top_k=0 keeps every token), as the target's generation config has it, or the default of `Sampling`. With
        `json_schema` (a dict, a bool or a text) or `grammar` (a `Grammar`, or rules in llguidance's dialect of Lark) the answer
        has the target's distribution under these, and ends with them. Raises ValueError for a value out of range and a grammar
        that cannot be compiled, `PromptError` for what is no prompt, is empty or too long, `UnsoundError` for sampling under
        `GreedyVerification`.
        """
        unknown = set(options) - set(Options.__annotations__)
        if unknown:
            raise TypeError(f"unknown options {sorted(unknown)}; known are {sorted(Options.__annotations__)}")
        sampling = asked(options, self.pair.sampling)
        if self.verification.greedy_only and not sampling.is_greedy:
            raise UnsoundError(
                f"GreedyVerification keeps the target's distribution at temperature 0 only, got temperature "
                f"{sampling.temperature}. Use TokenVerification() or BlockVerification()."
            )
        ids, kept = encode(self.pair, prompt), self.pair.kept if self.reuses else Kept()
        target, draft = kept.begin(ids, self.pair.target, self.pair.draft)
        try:
            return self._session(ids, target, draft, sampling, options)
        except Exception:
            kept.put(ids, target, draft)  # what they have read stays of use
            raise

    def _session(self, ids: list[int], target: Any, draft: Any, sampling: Sampling, options: Options) -> Session:
        seed, max_tokens = options.get("seed"), whole("max_tokens", options.get("max_tokens", 256))
        costs = self.memory.running_costs() if seed is None else self.costs
        pair, grammar = self.pair, grammar_of(options.get("grammar"), options.get("json_schema"))
        matcher = grammar and grammar.matcher(pair.tokenizer, vocab_size=pair.target.vocab_size, ends=pair.ends)
        is_apart = seed is not None or matcher is not None  # text under a grammar teaches nothing about other text
        if seed is not None and getattr(draft, "num_skipped", 0):
            draft = pair.draft.new_cache()  # what it has left out depends on the requests before
        return Session(
            target=target,
            draft=draft,
            policy=self.policy,
            verification=verification_for(sampling, self.verification),
            lossless=is_lossless(self.verification),
            sampling=sampling,
            prompt=ids,
            max_tokens=max_tokens,
            randomness=streams(seed, draw=pair.draft.draw if isinstance(pair.draft, Draws) else None),
            ends=() if options.get("ignore_eos") else pair.ends,
            detokenizer=Detokenizer(pair.tokenizer, options.get("stop", ()), before=ids),
            costs=costs if matcher is None or not isinstance(costs, CostClock) else costs.now,
            tail=costs.now.worth_reading(max_tokens) if isinstance(costs, CostClock) else None,
            experience=self.memory.practised(sampling) if is_apart else self.memory.experience(sampling),
            kept=pair.kept if self.reuses else None,
            tally=None if matcher is not None else self.memory.tally(sampling, ids),
            grammar=matcher,
        )

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Step]:
        """Steps as they are decided; `step.text` is text to print. Options as in `start`, errors before the first step.

        >>> for step in decoder.stream("Write a sonnet."):     # doctest: +SKIP
        ...     print(step.text, end="", flush=True)
        """
        return run(self.start(prompt, **options))

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Output: ...
    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **options: Unpack[Options]) -> list[Output]: ...
    def generate(self, prompt: Any, **options: Unpack[Options]) -> Output | list[Output]:
        """The whole answer; of a list of texts the answers, as `generate_all` gives them. Options as in `start`.

        >>> decoder.generate("2 + 2 =", max_tokens=8, temperature=0).metrics.mean_acceptance_length   # doctest: +SKIP
        """
        if are_several(prompt):
            return self.generate_all(prompt, **options)
        session = self.start(prompt, **options)
        return finished(session, list(run(session)))

    def generate_all(self, prompts: Sequence[Prompt], *, at_once: int = 8, **options: Unpack[Options]) -> list[Output]:
        """The answers to several prompts, up to `at_once` of them decoded together; options as in `start`, the same for all.

        Each is what `generate` gives. Requests over the same compiled models, and without a seed over the same graphs, share
        passes, which is faster than one after another; requests over other models take turns, step by step.

        >>> [output.text for output in decoder.generate_all(["2 + 2 =", "3 + 3 ="], max_tokens=8)]   # doctest: +SKIP
        """
        if at_once < 1:
            raise ValueError(f"at_once must be at least 1, got {at_once}")
        if isinstance(prompts, str):
            raise PromptError(f"generate_all takes a list of prompts, got one text, {prompts!r:.40}. Put it in a list.")
        waiting = iter(enumerate([encode(self.pair, prompt) for prompt in prompts]))
        running: dict[Session, tuple[int, list[Step]]] = {}
        outputs: dict[int, Output] = {}
        while len(outputs) < len(prompts):
            running |= {self.start(ids, **options): (i, []) for i, ids in islice(waiting, at_once - len(running))}
            on = [session for session in running if session.finish_reason is None]
            for session, outcome in zip(on, step(on), strict=True):
                if isinstance(outcome, Exception):
                    raise outcome
                if isinstance(outcome, Step):
                    running[session][1].append(outcome)
            for session in [session for session in running if session.finish_reason is not None]:
                i, steps = running.pop(session)
                outputs[i] = finished(session, steps)
        return [outputs[i] for i in range(len(prompts))]


def _compile_for(pair: Pair, sampling: Sampling) -> None:
    """Run two steps under this sampling: Triton compiles kernels at their first use, which takes seconds. Not run on a GPU yet,
    only with stand-ins for graphs."""
    session = Session(
        target=pair.target.new_cache(),
        draft=pair.draft.new_cache(),
        policy=Fixed(2),
        verification=verification_for(sampling, TokenVerification()),
        sampling=sampling,
        prompt=[0],
        max_tokens=4,
        randomness=streams(0),
    )
    for _ in run(session):
        pass


def run(session: Session) -> Iterator[Step]:
    """Run a session to its end, step by step."""
    try:
        while session.finish_reason is None:
            if (outcome := outcome_of(session)) is not None:
                yield outcome
    except (GeneratorExit, KeyboardInterrupt):  # stopped early: the caches of the text so far are kept all the same
        session.release()
        raise


def finished(session: Session, steps: Sequence[Step]) -> Output:
    """Fold the steps of a finished session."""
    assert session.finish_reason is not None, "the session is still running"
    return Output(
        text="".join(r.text for r in steps),
        tokens=tuple(session.tokens[session.num_prompt_tokens :]),
        finish_reason=session.finish_reason,
        steps=tuple(steps),
        metrics=metrics_of(session, steps),
        sampling=session.sampling,
        lossless=session.is_lossless,
        warning=session.tally and session.tally.watch.warning,
    )


def metrics_of(session: Session, steps: Sequence[Step]) -> Metrics:
    """Sums over the steps of a session so far, its prompt included."""
    about = {name: getattr(session, name) for name in ("prefill_s", "num_prompt_tokens", "num_cached_tokens")}
    return Metrics.of(steps, **about)


def policy_for(pair: Pair, policy: Policy | str | None) -> Policy:
    """The rule that is given, by itself or by its short form; `default_policy` where none is."""
    return default_policy(pair) if policy is None else policy_of(policy, pair.head)


def default_policy(pair: Pair) -> Policy:
    """Policy of a decoder for which none is named: `CostAware`, without a threshold, for a `SuffixDrafter` with up to 64 draft
    tokens; SpecDec++ as the card recommends for a head that nobody has calibrated."""
    if isinstance(pair.draft, SuffixDrafter):
        return CostAware(max_tokens=64, prior=0.2)  # a copy may go on for long; there is none in most steps
    head = pair.default_head
    return CostAware(head=head) if head is None or head.card.is_calibrated else SpecDecPP.tuned(head)
