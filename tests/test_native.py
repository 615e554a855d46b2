"""The compiled backend computes what transformers computes, the same bits however a text is cut; and refuses the rest."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import assert_same_bits
from transformers import AutoModelForCausalLM

from specdecpp import Pair, load_pair
from specdecpp.backends import EagerModel, NativeModel, native
from specdecpp.backends.native import compilation, library, weights
from specdecpp.decoder import Decoder
from specdecpp.errors import BackendError
from specdecpp.policies import Fixed
from specdecpp.sampling import inverted
from specdecpp.testing import save_tiny_pair, tiny_draft, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "as-many-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "wide-heads": ("qwen3", {"head_dim": 48}),
    "odd-widths": ("llama", {"intermediate_size": 37, "hidden_size": 44, "vocab_size": 71}),
    "llama3-angles": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
}
TEXT = [1, 7, 3, 9, 12, 30, 2, 5, 41, 8, 8, 17]


def built(variant: str, **more: Any) -> Any:
    kind, config = VARIANTS[variant]
    return tiny_model(kind, seed=1, **({"head_dim": 16} | config | more))


@pytest.fixture(scope="module", params=list(VARIANTS))
def backends(request: pytest.FixtureRequest) -> tuple[EagerModel, NativeModel]:
    model = built(request.param)
    return EagerModel(model), NativeModel(model, num_threads=2)


def test_logits_and_states_are_those_of_transformers(backends: tuple[EagerModel, NativeModel]) -> None:
    """Catches a wrong angle, head order, norm, bias, mask or edge of a panel."""
    eager, compiled = (r.new_cache() for r in backends)
    expected, states = eager.extend(TEXT, rows=len(TEXT))
    logits, hidden = compiled.extend(TEXT, rows=len(TEXT))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden, states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_however_a_text_is_cut(backends: tuple[EagerModel, NativeModel], threads: int) -> None:
    """Catches sums whose order depends on how many rows are read at once, or on the threads: verification of several
    draft tokens must see what decoding one by one would have seen."""
    assert_same_bits(backends[1], TEXT, [1] * 12, [5, 1, 6], [9, 3], [2, 10], threads=threads)


@pytest.mark.parametrize("width", [13, 14, 15, 17, 29])
def test_the_same_bits_at_any_width(width: int, backends: tuple[EagerModel, NativeModel]) -> None:
    """Catches rows and queries whose sums depend on the block they are in, and blocks of positions that begin within a pass."""
    text = [int(t) for t in torch.randint(0, 64, (57 + width,), generator=torch.Generator().manual_seed(width))]
    at_once, single = backends[1].with_threads(2).new_cache(), backends[1].with_threads(1).new_cache()
    at_once.extend(text[:57], rows=1)
    single.extend(text[:57], rows=1)
    logits, states = at_once.extend(text[57:], rows=width)
    rows = [single.extend([token], rows=1) for token in text[57:]]
    assert torch.equal(logits, torch.cat([row[0] for row in rows]))
    assert torch.equal(states, torch.cat([row[1] for row in rows]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_kept_in_half_give_the_same_bits(variant: str, tmp_path: Path) -> None:
    """Catches a weight that is rounded, or read from its neighbour's half: in products, embeddings and cut vocabularies.

    One weight of every matrix that bfloat16 has not keeps it whole; it is of an input that is zero in no row, and so small that
    it changes no bit.
    """
    built(variant).bfloat16().save_pretrained(tmp_path)
    narrow, wide, mixed = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=t) for t in (torch.bfloat16, *[torch.float32] * 2)
    )
    for module in mixed.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            weight = module.weight.data
            weight[-1, -1] = weight[-1, -1].view(torch.int32).add(1).view(torch.float32)  # by its last bit
    halves = [NativeModel(model, vocab_size=v, num_threads=2) for model in (narrow, wide) for v in (None, 50)]
    whole = NativeModel(mixed, num_threads=2)
    for text in (TEXT, TEXT[:1], TEXT[2:5]):
        first, *others = (half.new_cache().extend(text, rows=len(text)) for half in halves)
        for logits, states in others:
            assert torch.equal(logits[:, :50], first[0][:, :50])
            assert torch.equal(states, first[1])
        torch.testing.assert_close(whole.new_cache().extend(text, rows=len(text))[0], first[0], atol=1e-5, rtol=1e-5)


def test_the_numbers_are_those_of_the_compiled_code() -> None:
    """Catches a number that is changed on one side only: a model with a table too many writes past the others, and rows of one
    kind are read as another."""
    code = {path.name: path.read_text(encoding="utf-8") for path in compilation.SOURCES.glob("*.h")}

    def names(kind: str, of: str) -> list[str]:
        return re.findall(r"\w+(?: = \d+)?", re.search(rf"enum {kind} {{(.*?)}}", code[of], re.DOTALL)[1])  # pyright: ignore[reportOptionalSubscript]

    assert f"constexpr int TABLES = {weights.TABLES};" in code["model.h"]
    assert set(names("Kind", "packing.h")) == {f"{kind} = {number}" for kind, number in weights.KINDS.items()}
    assert set(weights.DTYPES.values()) <= set(weights.KINDS)
    for kind, own in (("Role", weights._ROLES), ("Norm", weights._NORMS)):
        assert list(range(len(names(kind, "model.h")) - 1)) == list(own.values()), "but for the last, which counts them"
    (whole, floats) = re.search(r"struct Shape {\s+int32_t (.*?);\s+float (.*?);", code["model.h"]).groups()  # pyright: ignore[reportOptionalMemberAccess]
    assert f"{whole}, {floats}".split(", ") == [name for name, _ in weights._Shape._fields_]


def test_greedy_text_is_that_of_generate() -> None:
    """Catches anything in a step that the parts above do not show."""
    model = built("llama")
    expected = model.generate(
        torch.tensor([TEXT]), attention_mask=torch.ones(1, len(TEXT)), max_new_tokens=40, do_sample=False, eos_token_id=None
    )[0, len(TEXT) :].tolist()
    pair = Pair(target=NativeModel(model), draft=NativeModel(tiny_draft(model)), tokenizer=tiny_tokenizer())
    for k in (0, 1, 4, 9):
        assert list(Decoder(pair, policy=Fixed(k=k)).generate(TEXT, max_tokens=40, temperature=0).tokens) == expected


def test_of_equal_logits_the_first_is_the_greedy_token() -> None:
    """Catches a tie that compiled steps decide otherwise than torch: every logit is there twice."""
    model = built("llama")
    output = model.get_output_embeddings()
    with torch.no_grad():
        output.weight[1::2] = output.weight[::2]
    native, eager = NativeModel(model, num_threads=1), EagerModel(model)
    answers = []
    for draft in (native, eager):
        target = NativeModel(model, num_threads=1) if draft is native else EagerModel(model)
        pair = Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(int(output.weight.shape[0])))
        answers += [Decoder(pair, policy=Fixed(k=k)).generate([1, 5, 9], max_tokens=16, temperature=0.0).tokens for k in (0, 3)]
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert not any(token % 2 for token in answers[0])


def test_what_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model that would be computed wrongly, or a machine that cannot compile, found out too late."""
    assert "multiple of 16" in (NativeModel.refusal(tiny_model("llama")) or "")
    assert "float64 on cpu" in (NativeModel.refusal(built("llama").to(torch.float64)) or "")
    assert NativeModel.refusal(built("llama").to(torch.float16)) is None
    assert NativeModel.refusal(built("llama").to(torch.bfloat16)) is None
    assert "not one of" in (NativeModel.refusal(tiny_model("gpt2")) or "")
    with pytest.raises(BackendError, match="Use EagerModel"):
        NativeModel(tiny_model("gpt2"))
    monkeypatch.setattr(library, "refusal", lambda: "there is no C++ compiler")
    assert "no C++ compiler" in (NativeModel.refusal(built("llama")) or "")


def test_logits_that_differ_are_not_used() -> None:
    """Catches a model of the family with a twist that the refusals do not know."""
    model = built("llama")
    twist = model.lm_head.register_forward_hook(lambda module, args, out: out * 1.1)
    with pytest.raises(BackendError, match="other logits than transformers"):
        NativeModel(model)
    twist.remove()


def test_it_can_be_asked_for(tmp_path: Path) -> None:
    """Catches a name that is ignored."""
    target, draft = save_tiny_pair(tmp_path)
    with pytest.raises(BackendError, match="multiple of 16"):
        load_pair(target, draft=draft, backend="native")
    pair = load_pair(backend="native")
    assert type(pair.target) is type(pair.draft) is NativeModel
    assert pair.backends.startswith("native")


@pytest.fixture(scope="module")
def backend() -> NativeModel:
    return NativeModel(built("llama"), num_threads=1)


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 200, 4096])
def test_drawing_is_that_of_the_library(size: int, backend: NativeModel) -> None:
    """Catches a block that is skipped or counted twice, a token without a share, and an index past the end."""
    generator = torch.Generator().manual_seed(size)
    for _ in range(50):
        p = torch.rand(size, generator=generator) ** 8
        p[torch.rand(size, generator=generator) < 0.3] = 0.0
        p[int(torch.randint(size, (1,), generator=generator))] += 0.1
        u = float(torch.rand(1, generator=generator, dtype=torch.float64))
        token = backend.draw(p, u)
        assert token == inverted(p, u)
        assert p[token] > 0
    p = torch.zeros(size)
    p[size // 2] = 1e-30
    assert backend.draw(p, 0.0) == backend.draw(p, 1 - 1e-16) == size // 2
    p = torch.rand(2, size, generator=generator, dtype=torch.float64).T[:, 0]
    assert backend.draw(p, 0.5) == inverted(p, 0.5), "of another precision or not in one piece"


def test_a_point_that_rounding_carries_past_the_last_share_is_that_tokens(backend: NativeModel) -> None:
    """Catches a token without a share behind all others: a running sum can end below the sum of a block's eight parts."""
    generator, num = torch.Generator().manual_seed(0), 0
    for _ in range(500):
        p = torch.rand(64, generator=generator) ** 30
        p[54:] = 0.0
        eight = p.double().reshape(8, 8).cumsum(0)[-1]  # as a block is summed
        whole = ((eight[0] + eight[1]) + (eight[2] + eight[3])) + ((eight[4] + eight[5]) + (eight[6] + eight[7]))
        num += bool(p.double().cumsum(0)[-1] <= (1 - 2**-53) * whole)
        assert p[backend.draw(p, 1 - 2**-53)] > 0
    assert num > 10


def test_draws_are_shared_out_as_the_law_says(backend: NativeModel) -> None:
    """Catches a bias between blocks: on a grid of points every token gets its share of them, to one point."""
    p = torch.tensor([0.1, 0.0, 0.4] + [0.5 / 97] * 97)
    drawn = torch.bincount(torch.tensor([backend.draw(p, (i + 0.5) / 10_000) for i in range(10_000)]), minlength=len(p))
    assert (drawn - 10_000 * p).abs().max() <= 1.01


def test_a_cache_that_begins_in_the_middle_of_a_text_reads_the_rest_alone() -> None:
    """Catches positions that count from the text's beginning, and rows, copies or rollbacks that see what was left out."""
    plain = NativeModel(built("llama"), num_threads=1).new_cache()
    late = plain.model.new_cache()

    def gives(backend: NativeModel, start: int) -> bool:
        """Whether it now gives what a cache gives that has read the text from `start` on."""
        plain.rollback(0)
        plain.extend(TEXT[start : backend.length], rows=1)
        length = backend.length
        found, expected = backend.extend([4, 4], rows=2)[0], plain.extend([4, 4], rows=2)[0]
        backend.rollback(length)
        return torch.equal(found, expected)

    late.skip(3)
    assert (late.length, late.num_skipped) == (3, 3)
    late.extend(TEXT[3:], rows=1)
    assert late.length == len(TEXT)
    assert gives(late, 3)
    copy = late.fork(7)
    assert gives(copy, 3)
    copy.rollback(5)
    assert gives(copy, 3)
    with pytest.raises(ValueError, match="the cache holds 2 tokens, and only an empty one"):
        copy.skip(1)
    copy.rollback(2)
    assert (copy.length, copy.num_skipped) == (2, 2)
    copy.rollback(0)
    copy.extend(TEXT, rows=1)
    assert gives(copy, 0)
    assert gives(late.fork(2), 2)
