"""Decoding from GGUF files: the target's own text under every rule, its distribution, heads that fit, and the verbs."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import chi_square_tail
from gguf_files import converted
from typer.testing import CliRunner, Result

import specdecpp as sd
from specdecpp import cli
from specdecpp.decoder import encode
from specdecpp.errors import BackendError
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.models import load_model
from specdecpp.loading.pair import REFERENCE, Pair, load_pair
from specdecpp.policies import Costs
from specdecpp.policy_spec import KINDS, WRAPPERS, parse_policy
from specdecpp.sampling import Sampling
from specdecpp.testing import practice_prompts
from specdecpp.verify import BlockVerification, CompareVerification, TokenVerification

PROMPTS = [[{"role": "user", "content": text}] for text in practice_prompts()[::50]]
NUM_TOKENS = 24
COSTS = Costs(draft_s=0.2, passes={1: 1.0, 8: 1.4})
WRAPPED = [f"{outer}:cumulative" + ("|fixed:2" if outer == "bandit" else "") for outer in WRAPPERS]
RULES = ["target", *(kind for kind in KINDS if kind != "mlp"), *WRAPPED]
"""All but `mlp`, which needs a network of its own and reads what `entropy` reads."""
HEAD = REFERENCE / "head"


@pytest.fixture(scope="module")
def pair(reference: Path) -> Pair:
    return load_pair(reference / "target-f32.gguf", draft=reference / "draft-f32.gguf", head=HEAD, backend="llama.cpp")


@pytest.fixture(scope="module")
def eager() -> Pair:
    return load_pair(backend="eager")


@cache
def own_text(prompt: tuple[int, ...]) -> list[int]:
    """The target's greedy answer by transformers."""
    model = load_model(REFERENCE / "target", dtype=torch.float32, device=None, device_map=None)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
    return out[0, len(prompt) :].tolist()


# Text


@pytest.mark.parametrize("rule", RULES)
def test_greedy_decoding_is_the_targets_own(rule: str, pair: Pair) -> None:
    """Catches any token that differs from transformers' `generate`, under each rule and with the head that ships."""
    decoder = sd.Decoder(pair, policy=parse_policy(rule).build(pair.head), costs=COSTS)
    answers = [decoder.generate(prompt, max_tokens=NUM_TOKENS, temperature=0) for prompt in PROMPTS]
    assert [list(a.tokens) for a in answers] == [own_text(tuple(encode(pair, prompt))) for prompt in PROMPTS]
    assert rule == "target" or sum(a.metrics.num_accepted_draft_tokens for a in answers) > 10


@pytest.mark.parametrize("kind", [TokenVerification(), BlockVerification(), CompareVerification()])
def test_the_same_seed_gives_the_text_of_the_eager_backend(kind: Any, pair: Pair, eager: Pair) -> None:
    """Catches p and q of other rows or positions, and coins in another order. False alarm for one in 100 sets of seeds."""
    for seed, prompt in enumerate(PROMPTS[:3]):
        answers = [
            sd.Decoder(of, policy=sd.SpecDecPP.tuned(of.head), verification=kind).generate(
                prompt, max_tokens=NUM_TOKENS, seed=seed, temperature=0.8, top_p=0.95, repetition_penalty=1.1
            )
            for of in (pair, eager)
            if of.head is not None
        ]
        assert len(answers) == 2
        assert answers[0].tokens == answers[1].tokens
        assert [r.num_drafted for r in answers[0].steps] == [r.num_drafted for r in answers[1].steps]
        for ours, theirs in zip(answers[0].steps, answers[1].steps, strict=True):
            assert ours.judged == pytest.approx(theirs.judged, abs=1e-3)


def test_the_distribution_of_two_tokens_is_the_targets(tiny_files: Path, tiny: Any) -> None:
    """Catches a wrong ratio with an int8 draft: chi-square over 3,000 answers; false alarm for one set of seeds in 10,000."""
    sampling, prompt, num = Sampling(temperature=2.0, top_k=4), [5, 9, 20], 3000
    distribution = {}
    for first, chance in _distribution(tiny, prompt, sampling).items():
        distribution |= {(first, second): chance * q for second, q in _distribution(tiny, [*prompt, first], sampling).items()}
    pair = load_pair(tiny_files / "target.gguf", draft=tiny_files / "draft.gguf", backend="llama.cpp")
    decoder = sd.Decoder(pair, policy=sd.Fixed(k=2))
    answers = [
        decoder.generate(prompt, max_tokens=2, seed=seed, temperature=2.0, top_k=4, ignore_eos=True) for seed in range(num)
    ]
    rejected = sum(out.metrics.num_draft_tokens - out.metrics.num_accepted_draft_tokens for out in answers)
    assert rejected > 100, "the comparison is vacuous"
    assert chi_square_tail(Counter(out.tokens for out in answers), distribution) > 1e-4


@torch.inference_mode()
def _distribution(model: Any, tokens: list[int], sampling: Sampling) -> dict[int, float]:
    """The next token's distribution by transformers: temperature, then top-k, written out again."""
    top = (model(torch.tensor([tokens])).logits[0, -1].double() / sampling.temperature).topk(sampling.top_k or 1)
    return dict(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("precision", ["f32", "q8_0"])
def test_llama_cpp_and_the_reader_of_files_see_one_model(precision: str, reference: Path) -> None:
    """Catches rows of q and k, norms or angles that are put back otherwise than llama.cpp reads them."""
    file = GGUF(reference / f"target-{precision}.gguf")
    backends = [file.backend(kind, vocab_size=file.num_rows) for kind in ("native", "llama.cpp")]
    tokens = file.tokenizer()(practice_prompts()[0]).input_ids
    ours, theirs = (backend.new_cache().extend(tokens, rows=len(tokens))[0] for backend in backends)
    assert float((ours - theirs).abs().max()) < {"f32": 5e-4, "q8_0": 0.5}[precision]
    assert file.ends(None) == (2,)


def test_a_checkpoint_is_not_left_to_llama_cpp(reference: Path) -> None:
    """Catches a pair of which one model is run by a program that cannot read it."""
    for target, draft in (
        (reference / "target-f32.gguf", REFERENCE / "draft"),
        (REFERENCE / "target", reference / "draft-q8_0.gguf"),
    ):
        with pytest.raises(BackendError, match=r"llama\.cpp: it runs GGUF files, and this is a checkpoint"):
            load_pair(target, draft=draft, backend="llama.cpp")


def test_prompts_become_the_same_ids(pair: Pair, eager: Pair) -> None:
    """Catches a chat template, a start token or a special token that the file does not keep."""
    for prompt in (*PROMPTS, "plain", "", "<|user|>\nnaïve \U0001f600"):
        assert encode(pair, prompt) == encode(eager, prompt)
    assert pair.ends == eager.ends
    assert (pair.target_fingerprint, pair.draft_fingerprint) == (eager.target_fingerprint, eager.draft_fingerprint)


# The verbs


def call(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [str(a) for a in arguments])


def test_the_verbs_take_files(tmp_path: Path) -> None:
    """Catches a verb that knows checkpoints only."""
    files = {f"--{role}": converted(role, tmp_path / f"{role}.gguf") for role in ("target", "draft")}
    names = [part for item in files.items() for part in item] + ["--backend", "llama.cpp"]
    result = call("generate", "Why?", *names, "--head", HEAD, "--max-tokens", 12, "--temperature", 0, "--json")
    assert result.exit_code == 0, result.stderr
    assert (
        json.loads(result.stdout)["tokens"] == own_text(tuple(encode(load_pair(), [{"role": "user", "content": "Why?"}])))[:12]
    )


@pytest.mark.parametrize("options", [[], ["--backend", "llama.cpp"]])
def test_check_takes_files(options: list[object], reference: Path) -> None:
    """Catches a pair of files that `check` cannot record in batches, from their weights; another backend timed."""
    names = [reference / "target-f32.gguf", "--draft", reference / "draft-f32.gguf"]
    result = call("check", "--target", *names, "--num", 2, *options)
    assert result.exit_code == 0, result.stderr
    assert "The pair" in result.stdout
