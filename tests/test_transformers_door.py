"""The loop for transformers' `generate`: its tokens, its distribution, its streams and its refusals."""

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributions import Distribution, Request, largest_difference, random_head
from kinds import CACHE, KINDS, model_of
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    set_seed,
)
from transformers.generation.logits_process import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import specdecpp as sd
from specdecpp.backends import EagerModel
from specdecpp.integrations.processors import Processed, as_sampling
from specdecpp.loading.pair import REFERENCE
from specdecpp.policies import Costs, MaxConfidence
from specdecpp.testing import TableModel, save_tiny_pair, tiny_draft, tiny_model, tiny_tokenizer
from specdecpp.verify import BlockVerification, CompareVerification, GreedyVerification, TokenVerification

PROMPT = [2, 7, 21, 13, 5]  # without the padding id, which generate takes for padding
COSTS = Costs(draft_s=0.2, passes={1: 1.0, 9: 1.4})


@cache
def draft_of(kind: str) -> Any:
    return tiny_draft(model_of(kind))


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens or PROMPT])


DEFAULTS = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}


def generate(model: Any, input_ids: torch.Tensor | None = None, **options: Any) -> list[int]:
    """The new tokens of the model's own generate, 24 unless told otherwise, never ended by an id unless one is named."""
    input_ids = ids() if input_ids is None else input_ids
    return model.generate(input_ids, **DEFAULTS | options)[0, input_ids.shape[1] :].tolist()


def result(model: Any, loop: Any, **options: Any) -> Any:
    """The new tokens and the metrics of `generate` with a loop."""
    output = model.generate(ids(), custom_generate=loop, **DEFAULTS | {"return_dict_in_generate": True} | options)
    return output.sequences[0, len(PROMPT) :].tolist(), output.metrics


def padded(num: int) -> dict[str, torch.Tensor]:
    """The prompt behind so many places of padding, and its mask."""
    return {"input_ids": ids(*[0] * num, *PROMPT), "attention_mask": torch.tensor([[0] * num + [1] * len(PROMPT)])}


def pair_of(kind: str = "llama") -> sd.Pair:
    return sd.Pair(target=EagerModel(model_of(kind)), draft=EagerModel(draft_of(kind)), tokenizer=tiny_tokenizer())


class Liking(LogitsProcessor):
    """A processor of a user's own: the token after a token is drawn to twice that token; it writes into what it is given."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, (2 * int(input_ids[0, -1]) + input_ids.shape[1]) % scores.shape[-1]] += 40.0
        return scores


class After(StoppingCriteria):
    """Stops at the n-th new token."""

    def __init__(self, length: int):
        self.length, self.seen = length, []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.seen.append(input_ids.shape[1])
        return torch.full((1,), input_ids.shape[1] >= self.length)


class Tape(BaseStreamer):
    """A streamer that notes its calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Any) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_models_own_generate(kind: str) -> None:
    """Catches a prompt, cache or rejection read otherwise than the model does, and a loop that accepts nothing or all."""
    loop = sd.custom_generate(draft_of(kind), policy="fixed:3")
    tokens, metrics = result(model_of(kind), loop)
    assert tokens == generate(model_of(kind))
    assert metrics.num_draft_tokens > metrics.num_accepted_draft_tokens > 0


PROCESSED: dict[str, dict[str, Any]] = {
    "no-repeat": {"no_repeat_ngram_size": 2},
    "min-new": {"min_new_tokens": 9, "eos_token_id": list(range(1, 50))},
    "bias": {"sequence_bias": [[[8], -20.0], [[4, 8], 9.0]]},
    "forced-end": {"forced_eos_token_id": 1, "eos_token_id": 1},
    "decay": {"exponential_decay_length_penalty": (3, 1.8), "eos_token_id": 1},
    "penalty": {"repetition_penalty": 1.7},
    "custom": {"logits_processor": LogitsProcessorList([Liking()])},
    "warpers": {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(9.0), TopKLogitsWarper(5)])},
    "prefix": {"prefix_allowed_tokens_fn": lambda _, seen: [(int(seen[-1]) + d) % 64 for d in (1, 5, 11)]},
}


@pytest.mark.parametrize("name", PROCESSED)
@pytest.mark.parametrize("num_padding", [0, 3])
def test_processors_and_padding_shape_greedy_tokens_as_they_do_in_generate(name: str, num_padding: int) -> None:
    """Catches a processor that is left out, sees other positions or padding, or whose writing is seen twice."""
    target, prompt = model_of("llama"), padded(num_padding)
    loop = sd.custom_generate(draft_of("llama"), policy=sd.Fixed(k=3))
    expected = generate(target, **prompt, **PROCESSED[name])
    assert generate(target, custom_generate=loop, **prompt, **PROCESSED[name]) == expected
    assert (expected == generate(target, **prompt)) == (name == "warpers"), "which greedy decoding ignores"


SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "warped": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"repetition_penalty": 1.4, "temperature": 1.3},
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("num_padding", [0, 2])
@pytest.mark.parametrize("verification", [TokenVerification(), BlockVerification(), CompareVerification()], ids=repr)
def test_tokens_are_those_of_the_decoder_for_the_same_seed(name: str, num_padding: int, verification: Any) -> None:
    """Catches options of generate that are read otherwise than `Sampling` means them, and coins that are dealt otherwise."""
    options = SAMPLED[name]
    decoder = sd.Decoder(pair_of(), policy=sd.CumulativeConfidence(), verification=verification)
    loop = sd.custom_generate(draft_of("llama"), policy=sd.CumulativeConfidence(), verification=verification, seed=11)
    given: dict[str, Any] = {"do_sample": True, "top_k": 0} | options
    ours = generate(model_of("llama"), custom_generate=loop, **padded(num_padding), **given)
    assert ours == list(decoder.generate(PROMPT, max_tokens=24, seed=11, ignore_eos=True, **options).tokens)


def test_the_global_seed_of_torch_decides_where_none_is_given() -> None:
    """Catches a loop whose answers `set_seed` does not repeat, and one that gives the same answer every time."""
    loop = sd.custom_generate(draft_of("llama"), policy=sd.Fixed(k=3))
    answers = []
    for seed in (set_seed, torch.manual_seed):
        seed(3)
        answers.append([generate(model_of("llama"), custom_generate=loop, do_sample=True) for _ in range(2)])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
    state = torch.get_rng_state()
    generate(model_of("llama"), custom_generate=loop)
    assert torch.equal(state, torch.get_rng_state()), "greedy decoding draws nothing"


def test_a_head_and_its_rule_decide_as_in_the_decoder() -> None:
    """Catches a head or costs that do not reach the rule: the steps must be the decoder's, not the tokens alone."""
    head = random_head(32, seed=3, scale=1.0)
    policy = sd.SpecDecPP(head=head, calibrated=False, threshold=0.6)
    loop = sd.custom_generate(draft_of("llama"), policy=policy, head=head, seed=5, costs=COSTS)
    tokens, metrics = result(model_of("llama"), loop, do_sample=True, top_k=0)
    theirs = sd.Decoder(pair_of(), policy=policy, costs=COSTS).generate(PROMPT, max_tokens=24, seed=5, ignore_eos=True)
    assert tokens == list(theirs.tokens)
    counts = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_tokens")
    assert [getattr(metrics, c) for c in counts] == [getattr(theirs.metrics, c) for c in counts]


def test_the_rule_that_weighs_costs_has_them_measured() -> None:
    """Catches a rule that needs costs and fails, or is given those of another head, when nobody gives any."""
    load, options = AutoModelForCausalLM.from_pretrained, {"dtype": torch.float32}
    target, draft = load(REFERENCE / "target", **options), load(REFERENCE / "draft", **options)
    expected = generate(target)
    named = sd.custom_generate(REFERENCE / "draft", head=REFERENCE / "head", costs=COSTS)
    head = sd.AcceptanceHead.from_pretrained(REFERENCE / "head")
    for loop in (sd.custom_generate(draft, policy=sd.CostAware(head=head)), named):
        assert generate(target, custom_generate=loop) == expected


class Steering(LogitsProcessor):
    """Depends on the whole context and on its length, and forbids a token at some places."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        context = input_ids[0].tolist()
        shift = torch.tensor([((3 * t + sum(context) + len(context)) % 5) / 4 for t in range(scores.shape[-1])])
        scores = scores + shift.to(scores.dtype)
        banned = sum(context) % scores.shape[-1]
        others = scores.clone()
        others[:, banned] = -torch.inf
        return others if bool(torch.isfinite(others).any()) else scores


TARGET = TableModel.random(vocab_size=3, depth=2, seed=1)
DRAFT = TableModel.random(vocab_size=3, depth=2, seed=2)
LAW_PROMPT, LAW_TOKENS, LAW_END = (0, 1), 4, 2
LAW_PROCESSORS = {
    "steering": LogitsProcessorList([Steering()]),
    "no-repeat": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.6), Steering(), TopPLogitsWarper(0.8)]),
}


def distribution_of_generate(processors: LogitsProcessorList, before: tuple[int, ...]) -> Distribution:
    """The distribution of sampling from the target alone, by recursion, each row processed as `generate` does."""
    distribution: Distribution = {}

    def walk(new: tuple[int, ...], probability: float) -> None:
        if new and new[-1] == LAW_END:
            distribution[new, "eos"] = probability
        elif len(new) == LAW_TOKENS:
            distribution[new, "length"] = probability
        else:
            context: Any = torch.tensor([[*before, *LAW_PROMPT, *new]])
            scores: Any = TARGET.distribution((*LAW_PROMPT, *new)).log()[None]
            for token, chance in enumerate(processors(context, scores).softmax(-1)[0].tolist()):
                if chance > 0:
                    walk((*new, token), probability * chance)

    walk((), 1.0)
    return distribution


@pytest.mark.parametrize("name", LAW_PROCESSORS)
@pytest.mark.parametrize("verification", [TokenVerification(), BlockVerification(), CompareVerification()], ids=repr)
@pytest.mark.parametrize("before", [(), (1, 1, 2)], ids=["", "padded"])
def test_processors_keep_the_distribution_of_sampling_without_a_draft(
    name: str, verification: Any, before: tuple[int, ...]
) -> None:
    """Catches a row processed with another's context or one left too long, and p and q that are processed otherwise."""
    processors = LAW_PROCESSORS[name]

    def processed(table: TableModel) -> Any:
        return SimpleNamespace(new_cache=lambda: Processed(table.new_cache(), processors, before=before))

    request = Request(
        target=processed(TARGET), draft=processed(DRAFT), prompt=LAW_PROMPT, max_tokens=LAW_TOKENS, ends=(LAW_END,)
    )
    distribution = request.distribution(sd.CumulativeConfidence(threshold=0.4), verification)
    assert largest_difference(distribution, distribution_of_generate(processors, before)) < 1e-12


def test_processors_are_read_as_sampling_only_where_that_means_the_same() -> None:
    """Catches a list in another order or with other settings taken for `Sampling`, and one that is needlessly not."""
    penalty, warm, top_k = RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.5), TopKLogitsWarper(4)

    def read(*processors: Any, is_greedy: bool = False, num_padding: int = 0) -> tuple[sd.Sampling, int]:
        sampling, others = as_sampling(LogitsProcessorList(processors), is_greedy=is_greedy, num_padding=num_padding)
        assert len(others) in (0, len(processors))
        return sampling, len(others)

    assert read() == (sd.Sampling(), 0)
    assert read(penalty, warm, top_k) == (sd.Sampling(repetition_penalty=1.5, temperature=0.5, top_k=4), 0)
    assert read(penalty, is_greedy=True) == (sd.Sampling(repetition_penalty=1.5, temperature=0.0), 0)
    assert read(top_k, warm) == (sd.Sampling(), 2), "another order"
    assert read(warm, warm) == (sd.Sampling(), 2), "twice"
    assert read(warm, is_greedy=True) == (sd.Sampling(temperature=0.0), 1), "greedy stays greedy"
    assert read(penalty, Liking(), warm) == (sd.Sampling(), 3), "one that is not known"
    assert read(TopKLogitsWarper(4, min_tokens_to_keep=2)) == (sd.Sampling(), 1)
    assert read(TopPLogitsWarper(0.5, filter_value=-9.0)) == (sd.Sampling(), 1)
    assert read(TopPLogitsWarper(0.0)) == (sd.Sampling(), 1)
    assert read(RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)) == (sd.Sampling(), 1)
    assert read(RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2), num_padding=2)[1] == 0
    assert read(penalty, num_padding=2) == (sd.Sampling(), 1), "it counts the padding as seen"


@pytest.mark.parametrize("num_new", [1, 4, 6, 7])
def test_nothing_follows_the_token_at_which_a_criterion_is_met(num_new: int) -> None:
    """Catches draft tokens of the same step that are returned, streamed (in other shapes, too) or counted all the same."""
    target, tape, own, criterion = model_of("llama"), Tape(), Tape(), After(len(PROMPT) + num_new)
    loop = sd.custom_generate(target, policy=sd.Fixed(k=5))  # a draft that is always right: every step is whole
    tokens, metrics = result(target, loop, stopping_criteria=[criterion], streamer=tape)
    assert tokens == generate(target, stopping_criteria=[After(len(PROMPT) + num_new)], streamer=own)
    assert tape.seen == own.seen
    assert metrics.num_tokens == num_new
    assert criterion.seen == list(range(len(PROMPT) + 1, len(PROMPT) + num_new + 1)), "asked once per token, in order"


@pytest.mark.parametrize("num_ends", [1, 3])
def test_any_of_the_end_ids_ends_the_text(num_ends: int) -> None:
    """Catches end ids taken from the model, a list of which the first alone is heeded, and an end in the middle of a step."""
    plain = generate(model_of("llama"))
    ends = plain[9 : 9 + num_ends][::-1]
    options = {"eos_token_id": ends if num_ends > 1 else ends[0]}
    expected = generate(model_of("llama"), **options)
    for draft in (draft_of("llama"), model_of("llama")):
        loop = sd.custom_generate(draft, policy=sd.Fixed(k=4))
        assert generate(model_of("llama"), custom_generate=loop, **options) == expected
    assert expected[-1] in ends
    assert len(expected) < 24


def test_a_generation_config_is_heeded() -> None:
    """Catches options that count only when they are given by name: lengths, ends and the manner of decoding."""
    for config in (
        GenerationConfig(max_length=11, pad_token_id=0),
        GenerationConfig(max_new_tokens=6, repetition_penalty=1.5, pad_token_id=0),
        GenerationConfig(max_length=30, min_length=20, eos_token_id=list(range(40)), pad_token_id=0),
    ):
        target = model_of("gpt2")
        plain = target.generate(ids(), generation_config=config)
        loop = sd.custom_generate(draft_of("gpt2"), policy=sd.Fixed(k=4))
        assert target.generate(ids(), generation_config=config, custom_generate=loop).tolist() == plain.tolist()


def test_the_models_are_left_as_they_were() -> None:
    """Catches weights that are changed or laid out anew, dropout that stays off, and hooks that pile up with every loop."""
    target = tiny_model("gpt2", seed=3, attn_pdrop=0.1)
    draft = tiny_draft(target)
    before = [(p, p.data_ptr(), p.detach().clone()) for model in (target, draft) for p in model.parameters()]
    target.train()
    target.transformer.h[0].eval()
    modes = [m.training for model in (target, draft) for m in model.modules()]
    for draws in (False, True, False):
        generate(target, custom_generate=sd.custom_generate(draft, policy=sd.Fixed(k=2)), do_sample=draws)
    assert [m.training for model in (target, draft) for m in model.modules()] == modes
    after = [p for model in (target, draft) for p in model.parameters()]
    for now, (parameter, place, values) in zip(after, before, strict=True):
        assert now is parameter
        assert (now.data_ptr(), now.tolist()) == (place, values.tolist())
    assert all(len(model.get_output_embeddings()._forward_pre_hooks) <= 1 for model in (target, draft))


def trained(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def test_weights_that_change_between_calls_are_those_that_decode() -> None:
    """Catches a loop that goes on with what it once read: training between calls, another type, an output layer of its own."""
    target, other = tiny_model("llama", seed=3), tiny_model("llama", seed=4).double().get_output_embeddings()
    loop = sd.custom_generate(tiny_draft(target), policy=sd.Fixed(k=3))
    for change in (lambda _: None, trained, lambda model: model.double(), lambda model: model.set_output_embeddings(other)):
        change(target)
        assert generate(target, custom_generate=loop) == generate(target)


def test_a_model_that_was_used_can_be_copied() -> None:
    """Catches backends and hooks that go with a copy of the model and listen at the original's output layer."""
    used = tiny_model("llama")
    generate(used, custom_generate=sd.custom_generate(used, policy=sd.Fixed(k=2)))
    for other in (copy.deepcopy(used), tiny_draft(used)):
        assert generate(other, custom_generate=sd.custom_generate(other, policy=sd.Fixed(k=2))) == generate(other)


def test_the_draft_sees_the_processors_and_the_ends_too() -> None:
    """Catches a draft that proposes what a processor forbids or goes on after an end: as its own target, all must pass."""
    target = model_of("llama")
    plain = generate(target, no_repeat_ngram_size=1)
    loop = sd.custom_generate(target, policy=sd.Fixed(k=5))
    tokens, metrics = result(target, loop, no_repeat_ngram_size=1, eos_token_id=plain[2])
    assert tokens == plain[:3]
    assert (metrics.num_draft_tokens, metrics.num_accepted_draft_tokens) == (3, 3)


def filled() -> DynamicCache:
    cache = DynamicCache()
    model_of("llama")(ids(), **{CACHE: cache})
    return cache


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"inputs": torch.tensor([PROMPT, PROMPT])}, "one sequence at a time, got 2"),
    "beams": ({"num_beams": 3}, "one sequence at a time, got 3"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores is not supported"),
    "states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states is not supported"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted generation is another way"),
    "static": ({"cache_implementation": "static"}, "cache_implementation='static' is not supported"),
    "filled": ({CACHE: filled(), "inputs": ids(*PROMPT, 4)}, "past_key_values is not supported"),
    "empty": ({CACHE: DynamicCache()}, "past_key_values is not supported"),
    "embeddings": ({"inputs": None, "inputs_embeds": torch.zeros(1, 5, 32)}, "inputs_embeds: not supported"),
    "hole": ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "the attention mask hides tokens"),
    "positions": ({"position_ids": torch.tensor([[4, 5, 6, 7, 8]])}, "position_ids other than"),
    "guidance": ({"guidance_scale": 2.0}, "remembers the tokens it has seen"),
    "watermark": (
        {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
        "SynthIDTextWatermarkLogitsProcessor remembers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_reason(name: str) -> None:
    """Catches an option of generate that goes unheeded without a word."""
    options, message = REFUSED[name]
    loop = sd.custom_generate(draft_of("llama"), policy=sd.Fixed(k=2))
    given = {"inputs": ids(), "max_new_tokens": 4, "pad_token_id": 0} | options
    with pytest.raises(ValueError, match=re.escape(message)):
        model_of("llama").generate(**given, custom_generate=loop)


def test_unsound_rules_are_refused() -> None:
    """Catches the two ways of changing the distribution that `Decoder` refuses too."""
    with pytest.raises(sd.UnsoundError, match="removes a sampled draft token"):
        sd.custom_generate(draft_of("llama"), policy=MaxConfidence(threshold=0.5, drop=True))
    with pytest.raises(TypeError, match="policy must be a rule"):
        sd.custom_generate(draft_of("llama"), policy=3)  # pyright: ignore[reportArgumentType]
    sd.custom_generate(draft_of("llama"), policy=MaxConfidence(threshold=0.5, drop=True), verification=CompareVerification())
    loop = sd.custom_generate(draft_of("llama"), verification=GreedyVerification())
    assert generate(model_of("llama"), custom_generate=loop) == generate(model_of("llama"))
    with pytest.raises(sd.UnsoundError, match="only without do_sample"):
        generate(model_of("llama"), custom_generate=loop, do_sample=True)


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Catches a draft over another vocabulary, whose tokens would mean other words, or that cuts tokens off the target."""
    target, draft = save_tiny_pair(tmp_path)
    tokenizer = tiny_tokenizer(64)
    tokenizer.add_tokens(["<new>"])
    model = AutoModelForCausalLM.from_pretrained(target)
    assert generate(model, custom_generate=sd.custom_generate(draft)) == generate(model)
    tokenizer.save_pretrained(draft)
    with pytest.raises(sd.PairError, match="the vocabularies of target"):
        generate(model, custom_generate=sd.custom_generate(draft))
    with pytest.raises(sd.PairError, match="nothing says which of them are padding"):
        generate(model_of("llama"), custom_generate=sd.custom_generate(tiny_model("llama", vocab_size=40)))


def test_rows_of_padding_are_cut_and_tokens_in_them_refused(tmp_path: Path) -> None:
    """Catches models of one family whose output layers are padded to different sizes, which most large pairs are."""
    paths = save_tiny_pair(tmp_path)
    draft = AutoModelForCausalLM.from_pretrained(paths[1])
    draft.resize_token_embeddings(80)
    with torch.no_grad():
        draft.get_output_embeddings().weight[64:] = 50.0  # rows that would win, were they counted
    draft.save_pretrained(paths[1])
    target = AutoModelForCausalLM.from_pretrained(paths[0])
    loop = sd.custom_generate(paths[1], policy=sd.Fixed(k=3))
    assert generate(target, custom_generate=loop) == generate(target)
    larger = AutoModelForCausalLM.from_pretrained(paths[1])
    with pytest.raises(sd.PromptError, match="token id 70 is outside"):
        generate(larger, ids(3, 70), custom_generate=sd.custom_generate(paths[0]))


@pytest.mark.parametrize("way", ["head", "policy"])
def test_a_head_of_another_draft_is_refused(way: str) -> None:
    """Catches a head that judges states it was not trained on, given by itself or within a rule."""
    head = random_head(32, seed=1)
    head.card = replace(head.card, draft=2 * "0123456789abcdef")
    given = {"head": head} if way == "head" else {"policy": sd.SpecDecPP(head=head, calibrated=False)}
    with pytest.raises(sd.HeadError, match="made for another draft"):
        generate(model_of("llama"), custom_generate=sd.custom_generate(draft_of("llama"), **given))
