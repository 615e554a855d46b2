"""What only a GPU runs: recorded steps, the clocks there, and a pair as it is loaded by default.

Skipped where there is none. On a machine with one: `python -m pytest tests/test_cuda.py tests/test_graphs.py`, and
`tests/engines/kernels` by itself.
"""

import gc
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from batched import PROMPTS
from distributions import chi_square_tail, finish, unchecked
from engine_cases import MANNERS, RULES, VOCAB, Models
from gguf_files import converted
from test_graphs import growing

import specdecpp as sd
from specdecpp.backends import GraphModel, LeanModel
from specdecpp.backends.graphs.engine import Device
from specdecpp.loading.gguf import GGUF
from specdecpp.policies import CumulativeConfidence, Fixed
from specdecpp.sampling import Sampling, probabilities
from specdecpp.testing import practice_prompts, tiny_tokenizer
from specdecpp.training.calibrate import calibrate_live

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


SIZES = {"max_position_embeddings": 1024, "device": "cuda"}


@pytest.fixture(scope="module")
def two() -> Models:
    """A tiny target and draft on the GPU."""
    return Models("device", **SIZES)


def pair_of(two: Models) -> sd.Pair:
    return sd.Pair(target=two.target, draft=two.draft, tokenizer=tiny_tokenizer(VOCAB))


@pytest.fixture(scope="module")
def pair(two: Models) -> sd.Pair:
    return pair_of(two)


def on_gpu(policy: Any) -> Any:
    """With its head where the draft is."""
    for name in ("policy", "head"):
        if (part := getattr(policy, name, None)) is not None:
            return replace(policy, policy=on_gpu(part)) if name == "policy" else replace(policy, head=part.to("cuda"))
    return policy


@pytest.mark.parametrize("manner", list(MANNERS))
@pytest.mark.parametrize("rule", list(RULES))
def test_steps_are_those_of_the_host(rule: str, manner: str, two: Models) -> None:
    """Catches a draw, a stop or a verdict that comes out otherwise when it is replayed: by the same uniforms, in float64."""
    with unchecked():
        sessions = [two.session(on_gpu(RULES[rule]), *MANNERS[manner], by_host=by_host) for by_host in (False, True)]
        assert isinstance(sessions[0].engine, Device)
        own, expected = (
            [(r.tokens, r.num_drafted, r.num_accepted, r.stop.words, r.stop.evidence) for r in finish(session)]
            for session in sessions
        )
    assert own == expected
    assert sessions[0].finish_reason == sessions[1].finish_reason


def test_the_distribution_of_real_draws(pair: sd.Pair) -> None:
    """Catches streams that are not independent: 1,500 first tokens against the target's. Chi-square, false alarm 1e-4."""
    sampling, context = Sampling(temperature=1.2), [3, 5, 2, 40]
    p = probabilities(pair.target.new_cache().extend(context, rows=1)[0], sampling)[0].cpu()
    group = {t: t if p[t] > 0.02 else -1 for t in range(VOCAB)}
    distribution, counts = defaultdict(float), defaultdict(int)
    for t in range(VOCAB):
        distribution[group[t]] += float(p[t])
    decoder = sd.Decoder(pair, policy=CumulativeConfidence(max_tokens=3))
    with unchecked():
        for seed in range(1500):
            out = decoder.generate(context, max_tokens=2, temperature=1.2, seed=seed, ignore_eos=True)
            counts[group[out.tokens[0]]] += 1
    assert len(distribution) > 3
    assert chi_square_tail(counts, dict(distribution)) > 1e-4


def test_requests_in_turns_and_one_after_another(pair: sd.Pair) -> None:
    """Catches graphs that share memory they must not: replays of one request between those of another change nothing."""
    decoder = sd.Decoder(pair, policy=CumulativeConfidence())
    prompts = [[3, 5], [9, 9, 4], [7] * 230]
    alone = [decoder.generate(prompt, max_tokens=40, seed=i).tokens for i, prompt in enumerate(prompts)]
    gc.collect()
    sessions = [decoder.start(prompt, max_tokens=40, seed=i) for i, prompt in enumerate(prompts)]
    for session in sessions:
        session.prefill()
    while any(session.finish_reason is None for session in sessions):
        for session in sessions:
            if session.finish_reason is None:
                session.step()
    assert [tuple(s.tokens[len(p) :]) for s, p in zip(sessions, prompts, strict=True)] == alone


def test_caches_grow_and_sessions_are_dropped() -> None:
    """Catches the pool of dead graphs that is recorded in again, with which every request failed once a cache had grown."""
    with unchecked():
        growing("cuda")


def test_seconds_of_drafting_and_verifying_are_told(pair: sd.Pair) -> None:
    """Catches seconds that the events of the device do not tell, and those of recording taken off twice."""
    out = sd.Decoder(pair, policy=Fixed(k=4)).generate([3, 5, 2], max_tokens=60, seed=0, ignore_eos=True)
    later = [r for r in out.steps[4:] if r.num_drafted]
    assert later
    assert all(r.draft_s > 0 and r.verify_s > 0 for r in later)


@pytest.mark.parametrize("backend", [GraphModel, LeanModel])
def test_a_server_says_what_a_decoder_says(backend: Any) -> None:
    """Catches requests of a server that meet on the device."""
    pytest.importorskip("pydantic", reason="the extra `serve` is not installed")
    from test_batch_serving import served

    decoder = sd.Decoder(pair_of(Models("device", backend=backend, **SIZES)), policy=Fixed(k=2))
    with unchecked():
        alone = [list(decoder.generate(prompt, max_tokens=20, seed=i).tokens) for i, prompt in enumerate(PROMPTS)]
        assert [listener.tokens for listener in served(decoder)] == alone


def test_a_file_becomes_bfloat16_on_a_gpu_unless_a_type_is_named(tmp_path: Any) -> None:
    """Catches twice the bytes in every pass for who names a device and nothing else."""
    path = tmp_path / "target.gguf"
    converted("target", path, "q8_0")
    assert GGUF(path, device="cuda").model.dtype == torch.bfloat16
    assert GGUF(path, device="cuda", dtype="float32").model.dtype == torch.float32


def test_a_head_is_calibrated_on_steps_of_a_gpu() -> None:
    """Catches a head that stays on the CPU, and its figures asked of tensors that are elsewhere."""
    pair = sd.load_pair("reference", device="cuda")
    assert pair.head is not None
    found = calibrate_live(pair.head.cpu(), pair, practice_prompts()[:3], max_tokens=24)
    assert found.card.notes["calibration"]
