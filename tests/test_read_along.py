"""A draft that begins with its target's layers: a prompt is read by both in one pass, with the bits that two would give."""

import copy
import gc
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch

from specdecpp import Decoder, Pair
from specdecpp.backends import NativeModel, native
from specdecpp.costs import Costs, measuring
from specdecpp.policies import CostAware, learning
from specdecpp.policies.protocol import Given
from specdecpp.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

TEXT = [int(t) for t in torch.randint(2, 64, (330,), generator=torch.Generator().manual_seed(0))]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


def models(kind: str = "llama", kept: int = 2) -> tuple[Any, Any]:
    """A target of three layers; a draft of `kept` of them and one of its own, with its own last norm and output layer."""
    target = tiny_model(kind, seed=1, layers=3, hidden_size=64, max_position_embeddings=1024, **MODELS[kind])
    draft = copy.deepcopy(target)
    layers = [*draft.model.layers[:kept], draft.model.layers[2]]
    draft.model.layers = torch.nn.ModuleList(layers)
    draft.config.num_hidden_layers = len(layers)
    if getattr(draft.config, "layer_types", None):
        draft.config.layer_types = [*draft.config.layer_types[:kept], draft.config.layer_types[2]]
    with torch.no_grad():
        for weight in (*layers[-1].parameters(), *draft.get_output_embeddings().parameters(), *draft.model.norm.parameters()):
            weight.mul_(0.9)
    return target, draft


def backends(target: Any, draft: Any) -> tuple[NativeModel, NativeModel]:
    return NativeModel(target, num_threads=2, probe=False), NativeModel(draft, num_threads=1, probe=False)


@pytest.mark.parametrize("cut", [[300], [1, 15, 16, 17, 251], [7, 290]], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_are_those_of_two_passes(kind: str, cut: list[int]) -> None:
    """Catches keys copied from the wrong place or layer, a block's border that forgets, and states of the wrong layer."""
    own = backends(*models(kind))
    together, apart = ([model.new_cache() for model in of] for of in (own, backends(*models(kind))))
    at = 0
    for num in cut:
        own[0].forward_both(*together, TEXT[at : at + num])
        for cache in apart:
            cache.extend(TEXT[at : at + num], rows=1)
        at += num
    assert own[0].share_of(own[1]) == 2 / 3
    for both, alone in zip(together, apart, strict=True):
        assert both.length == alone.length == at
        for found, expected in zip(both.extend(TEXT[at:], rows=30), alone.extend(TEXT[at:], rows=30), strict=True):
            assert torch.equal(found, expected)


def test_a_draft_whose_layers_are_all_the_targets_has_nothing_to_compute() -> None:
    """Catches a pass that begins behind the last layer."""
    target, draft = models(kept=2)
    draft.model.layers = draft.model.layers[:2]
    draft.config.num_hidden_layers = 2
    p, q = backends(target, draft)
    alone, both = backends(target, draft)[1].new_cache(), (p.new_cache(), q.new_cache())
    p.forward_both(*both, TEXT[:40])
    alone.extend(TEXT[:40], rows=1)
    assert p.share_of(q) == 1.0
    assert torch.equal(both[1].extend([3, 4], rows=2)[0], alone.extend([3, 4], rows=2)[0])


@pytest.mark.parametrize("first", [0, 1], ids=["target first", "draft first"])
def test_shared_layers_stay_as_long_as_somebody_reads_them(first: int) -> None:
    """Catches layers that a draft reads in the target's memory and that go with the target, or with a draft that itself gives
    up what it shares with a target while a draft of its own still reads it. The layers are larger than a block of memory."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 64}
    target = tiny_model("llama", seed=1, layers=3, max_position_embeddings=64, **sizes)
    draft, drafts_draft = copy.deepcopy(target), copy.deepcopy(target)
    drafts_draft.model.layers = drafts_draft.model.layers[:1]
    drafts_draft.config.num_hidden_layers = 1
    with torch.no_grad():
        for weight in (*draft.model.layers[2].parameters(), draft.model.norm.weight, drafts_draft.model.norm.weight):
            weight.mul_(0.9)
    alone = [NativeModel(model, num_threads=1, probe=False) for model in (draft, drafts_draft)]
    p, q, r = (NativeModel(model, num_threads=1, probe=False) for model in (target, draft, drafts_draft))
    pairs = [(p, q), (q, r)]
    assert all(one.share_of(two) for one, two in (pairs if first == 0 else pairs[::-1]))
    del p, pairs
    gc.collect()
    rubbish = torch.full((2**24,), 7.0)  # where freed memory may be given out again
    for shared, own in zip((q, r), alone, strict=True):
        assert torch.equal(shared.new_cache().extend(TEXT[:20], rows=20)[0], own.new_cache().extend(TEXT[:20], rows=20)[0])
    del q, rubbish
    gc.collect()
    assert torch.isfinite(r.new_cache().extend(TEXT[:4], rows=1)[0]).all()


@pytest.mark.parametrize(
    ("name", "place", "share"),
    [
        ("embed_tokens.weight", (5, 3), 0),
        ("rotary_emb.inv_freq", 2, 0),
        ("layers.0.input_layernorm.weight", 2, 0),
        ("layers.1.self_attn.v_proj.bias", 1, 1 / 3),
        ("layers.1.mlp.down_proj.weight", (-1, -1), 1 / 3),
    ],
)
def test_what_differs_is_not_shared(name: str, place: Any, share: float) -> None:
    """Catches a draft that is told what another model makes of the text: a norm, a bias or an angle that nobody compared."""
    target, draft = models("qwen2")
    draft = copy.deepcopy(draft)
    with torch.no_grad():
        attrgetter(name)(draft.model)[place] += 1e-3
        draft.model.rotary_emb.original_inv_freq = draft.model.rotary_emb.inv_freq
    p, q = backends(target, draft)
    assert p.share_of(q) == share
    assert p.share_of(p) == 0, "the same weights are read by one backend after the other"
    assert p.share_of(object()) == 0


def test_caches_of_two_lengths_are_refused() -> None:
    """Catches a draft that is given tokens at another place."""
    p, q = backends(*models())
    read, unread = p.new_cache(), q.new_cache()
    read.extend(TEXT[:3], rows=1)
    with pytest.raises(ValueError, match="they hold 3 and 0 tokens"):
        p.forward_both(read, unread, TEXT[3:9])
    assert (read.length, unread.length) == (3, 0)
    with pytest.raises(ValueError, match="ids from 99"):
        p.forward_both(p.new_cache(), unread, [99])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call reads for both models."""
    found, reads_both = [], NativeModel.forward_both
    monkeypatch.setattr(NativeModel, "forward_both", lambda *given: (found.append(len(given[3])), reads_both(*given)))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_same(temperature: float, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches prompts that are not read so at all, and answers that depend on it: of one, of the next, of several at once."""

    def answers() -> list[tuple[int, ...]]:
        p, q = backends(*models())
        of = Pair(target=p, draft=q, tokenizer=tiny_tokenizer())
        decoder, anew = (Decoder(of, costs=Costs.relative(0.2), reuses=reuses) for reuses in (True, False))
        ask: dict[str, Any] = {"max_tokens": 12, "temperature": temperature, "seed": 3}
        found = [decoder.generate(prompt, **ask).tokens for prompt in (TEXT[:50], TEXT[:90], TEXT[200:])]
        many = anew.generate_all([TEXT[:60], TEXT[60:130], TEXT[130:150]], **ask)
        return [*found, *(one.tokens for one in many)]

    together = answers()
    assert counted[0] == 49
    assert sorted(counted[-2:]) == [59, 69], "the short one is read beside the others"
    monkeypatch.setattr(NativeModel, "share_of", lambda self, draft: 0.0)
    num = len(counted)
    assert answers() == together
    assert len(counted) == num


def test_what_it_saves_is_part_of_the_costs() -> None:
    """Catches a prompt taken to be as dear as if the draft read all of it, and catching up that costs nothing."""
    p, q = backends(*models())
    assert measuring.measure(Pair(target=p, draft=q, tokenizer=tiny_tokenizer()), budget_s=0.0).read_along == 2 / 3
    costs = Costs(draft_s=0.3, passes={1: 1.0}, read_along=2 / 3)
    first = CostAware().start(Given(num_unread=50))
    assert learning.reading_s(costs, first) == pytest.approx(0.1)
    assert learning.reading_s(costs, replace(first, num_tokens=8)) == pytest.approx(0.3)
