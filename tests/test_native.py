"""The compiled backend computes what transformers computes, the same bits however a text is cut; and refuses the rest."""

import re
from pathlib import Path

import pytest
import torch
from kinds import LONG, TEXT, VARIANTS, assert_same_bits, built, needs_compiler
from transformers import AutoModelForCausalLM

from specdecpp import Pair
from specdecpp.backends import EagerModel, NativeModel
from specdecpp.backends.native import compilation, weights
from specdecpp.decoder import Decoder
from specdecpp.policies import Fixed
from specdecpp.sampling import inverted
from specdecpp.testing import tiny_tokenizer

pytestmark = needs_compiler


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "phi3-longrope"])
def test_the_same_bits_however_a_text_is_cut(variant: str, threads: int) -> None:
    """Catches sums whose order depends on how many rows are read, on the block a row is in, or on the threads."""
    backend = NativeModel(built(variant), num_threads=2)
    cuts = [1] * 90, [57, 13, 1, 14, 5], [57, 15, 17, 1], [5, 1, 13, 2, 40, 29], [2, 10, 9, 3, 66]
    assert_same_bits(backend, LONG[:90], *cuts, threads=threads)


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
    """Catches a number changed on one side only: tables written past the others, rows of one kind read as another."""
    code = {path.name: path.read_text(encoding="utf-8") for path in compilation.SOURCES.glob("*.h")}

    def names(kind: str, of: str) -> list[str]:
        return re.findall(r"\w+(?: = \d+)?", re.search(rf"enum {kind} {{(.*?)}}", code[of], re.DOTALL)[1])  # pyright: ignore[reportOptionalSubscript]

    assert f"constexpr int TABLES = {weights.TABLES};" in code["model.h"]
    assert set(names("Kind", "packing.h")) == {f"{kind} = {number}" for kind, number in weights.KINDS.items()}
    assert set(weights.DTYPES.values()) <= set(weights.KINDS)
    for kind, own in (("Role", weights._ROLES), ("Norm", weights._NORMS)):
        assert len(names(kind, "model.h")) - 1 == len(own), "but for the last, which counts them"
    (whole, floats) = re.search(r"struct Shape {\s+int32_t (.*?);\s+float (.*?);", code["model.h"]).groups()  # pyright: ignore[reportOptionalMemberAccess]
    assert f"{whole}, {floats}".split(", ") == [name for name, _ in weights._Shape._fields_]


def test_of_equal_logits_the_first_is_the_greedy_token() -> None:
    """Catches a tie that compiled steps decide otherwise than torch: every logit is there twice."""
    model, tokenizer, answers = built("llama"), tiny_tokenizer(), []
    output = model.get_output_embeddings()
    with torch.no_grad():
        output.weight[1::2] = output.weight[::2]
    for backend in (NativeModel(model, num_threads=1), EagerModel(model)):
        pair = Pair(target=backend, draft=backend, tokenizer=tokenizer)
        answers += [Decoder(pair, policy=Fixed(k=k)).generate([1, 5, 9], max_tokens=16, temperature=0.0).tokens for k in (0, 3)]
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert not any(token % 2 for token in answers[0])


@pytest.fixture(scope="module")
def backend() -> NativeModel:
    return NativeModel(built("llama"), num_threads=1)


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 200, 4096])
def test_drawing_is_that_of_the_library(size: int, backend: NativeModel) -> None:
    """Catches a block that is skipped or counted twice, a token without a share, and an index past the end."""
    generator = torch.Generator().manual_seed(size)
    for i in range(100):
        p = torch.rand(size, generator=generator) ** (8 if i % 2 else 30)
        p[torch.rand(size, generator=generator) < 0.3] = 0.0
        p[size * 5 // 6 :] *= i % 2
        p[int(torch.randint(size * 5 // 6 + 1, (1,), generator=generator)) % size] += 0.1
        for u in (float(torch.rand(1, generator=generator, dtype=torch.float64)), 1 - 2**-53):
            token = backend.draw(p, u)
            assert p[token] > 0
            assert token == inverted(p, u) or u > 0.999
    p = torch.rand(2, size, generator=generator, dtype=torch.float64).T[:, 0]
    assert backend.draw(p, 0.5) == inverted(p, 0.5), "of another precision or not in one piece"


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
