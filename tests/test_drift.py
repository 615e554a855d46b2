"""Acceptance that falls: how seldom nothing is taken for a fall, how soon one is noticed, and where it is told."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from served import served
from transformers import AutoModelForCausalLM

import specdecpp as sd
from specdecpp import cache_dir, drift
from specdecpp.bench.check import Trial, keep_figures
from specdecpp.costs import measuring
from specdecpp.loading.pair import REFERENCE, Pair
from specdecpp.policies import CostClock, Costs
from specdecpp.prompt import encode
from specdecpp.testing import practice_prompts

PROMPTS = practice_prompts()[::3]


def rows(rng: np.random.Generator, num: int, *, fall: float = 0.0) -> list[drift.Figures]:
    """Requests of two kinds of text, with figures as skewed as real ones."""
    easy = np.where(rng.random(num) < 0.3, 0.85, 0.65)
    acceptance = rng.beta(30 * easy, 30 * (1 - easy)) - fall
    return [drift.Figures(a, s) for a, s in zip(acceptance, 0.03 * rng.standard_t(8, num) - fall, strict=True)]


def noticed(check: list[drift.Figures], requests: list[drift.Figures]) -> int | None:
    comparison = drift.Comparison(check, is_alike=True, rate=drift.RATE)
    return next((n for n, found in enumerate(requests, 1) if comparison.saw(found)), None)


@pytest.mark.parametrize("num", [drift.LEAST, 100])
def test_nothing_is_seldom_taken_for_a_fall(num, monkeypatch):
    """Catches a rate that is not kept, or is forgotten with every request; without margins, which hide it. Were it exactly one
    in 1,000, this test would fail with probability 2e-5; `benchmarks/drift.py` has more runs, and real requests."""
    monkeypatch.setattr(drift, "MARGINS", drift.Figures(0.0, 0.0))
    rng = np.random.default_rng(num)
    assert sum(noticed(rows(rng, num), rows(rng, 200)) is not None for _ in range(500)) <= 5


def test_a_fall_is_noticed_early_and_late():
    """Catches evidence that drowns in good requests, that a rise counts for, or that small falls make."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        check, good = rows(rng, 100), rows(rng, 1000)
        assert (noticed(check, rows(rng, 200, fall=0.05)) or 999) < 100
        late = noticed(check, good + rows(rng, 300, fall=0.05))
        assert late
        assert late > 1000
        assert noticed(check, rows(rng, 300, fall=-0.3)) is None
    assert noticed([drift.Figures(1.0, 0.1)] * 20, [drift.Figures(0.99, 0.1)] * 200) is None
    assert noticed([drift.Figures(1.0, None)] * 20, [drift.Figures(0.9, None)] * 200)
    assert noticed([drift.Figures(1.0, 0.1)] * (drift.LEAST - 1), [drift.Figures(0.1, -0.5)] * 200) is None


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reference pair's draft, and the same with noise on its weights."""
    folder = tmp_path_factory.mktemp("drafts")
    draft = AutoModelForCausalLM.from_pretrained(REFERENCE / "draft", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim >= 2:
                parameter.add_(0.25 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    draft.save_pretrained(folder / "noisy")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "noisy" / file).write_bytes((REFERENCE / "draft" / file).read_bytes())
    return {"own": REFERENCE / "draft", "noisy": folder / "noisy"}


@pytest.fixture(scope="module")
def pair(drafts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair that has been checked, and nothing else in the cache. Steps cost what they would on a quiet machine: on a busy one
    drafting may not pay, and then hardly anything is tested."""
    costs = Costs(draft_s=0.15, passes={1: 1.0, 2: 1.02, 4: 1.06, 8: 1.15, 16: 1.3})
    pair, folder = sd.load_pair(REFERENCE / "target", draft=drafts["own"]), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_dir, "_wanted", lambda: folder)
        patch.setattr(measuring, "known", lambda pair: measuring.Known(costs=costs, now=costs))
        patch.setattr(CostClock, "update", lambda self, step, **_: None)
        keep_figures(pair, [encode(pair, messages(text)) for text in PROMPTS], Trial(seconds=600, max_tokens=48))
        yield pair


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.slow
def test_a_changed_draft_is_told_once(pair, drafts, caplog):
    """Catches a fall that nobody hears of or hears of at every request, one where nothing has changed, a key that changes with
    the draft, and a decoder that remembers although it is not to."""
    output = [sd.Decoder(pair).generate(messages(text), max_tokens=48, temperature=1) for text in PROMPTS][-1]
    assert output.warning is None
    other = sd.load_pair(REFERENCE / "target", draft=drafts["noisy"])
    forgetful = sd.Decoder(other, remember=False)
    with caplog.at_level(logging.WARNING, "specdecpp.drift"):
        assert [forgetful.generate(messages(text), max_tokens=48, temperature=1) for text in PROMPTS[:20]][-1].warning is None
        decoder = sd.Decoder(other)
        outputs = [decoder.generate(messages(text), max_tokens=48, temperature=1) for text in PROMPTS]
    (record,) = caplog.records
    assert outputs[-1].warning == record.getMessage()
    assert outputs[0].warning is None
    assert "Changed since: the draft, the draft's name." in record.getMessage()
    with served(sd.load_pair(REFERENCE / "target", draft=drafts["noisy"])) as server:
        assert "specdecpp_acceptance_fallen 0.0" in server.get("/metrics").text
        for text in PROMPTS:
            server.post("/v1/chat/completions", {"messages": messages(text), "max_tokens": 48, "temperature": 1})
            if "specdecpp_acceptance_fallen 1.0" in server.get("/metrics").text:
                break
        else:
            pytest.fail("it is not told")


def test_ways_without_end_are_not_compared(pair, monkeypatch):
    """Catches a process in which requests fail once there were a thousand ways, and steps kept for nothing."""
    watch = drift.PairWatch(pair)
    for way in range(1100):
        watch.end(str(way), way, [])
    assert (len(watch._comparisons), watch.warning) == (drift.MAX_WAYS, None)
    (decoder := sd.Decoder(pair, policy="none")).generate("x", max_tokens=8)
    steps = [*decoder.stream("x", max_tokens=8, temperature=1.0)]
    comparison = watch._comparisons["0"]
    assert not comparison.add(steps)
    assert comparison._steps == []


def test_another_sampling_is_compared_by_acceptance(pair):
    """Catches estimates that are compared across samplings, and a check that loses what another sampling found."""
    kept = drift.recalled(pair)
    assert kept is not None
    watch = drift.PairWatch(pair)
    watch.end("another", 1, [])
    (of,) = watch._comparisons.values()
    assert [i for i, *_ in of.means()] == []
    assert (of.is_alike, [*of._falls]) == (False, [0])
    drift.keep(pair, "another", [drift.Figures(0.5, 0.0)] * 20)
    again = drift.recalled(pair)
    assert again is not None
    assert [*again.ways] == [*kept.ways, "another"]


def test_the_card_beside_a_draft_goes_along(pair, tmp_path):
    """Catches figures that stay behind on the machine of the check, and a damaged file that ends a request."""
    kept = drift.recalled(pair)
    assert kept is not None
    (tmp_path / "out").mkdir()
    card = tmp_path / "out" / "card.json"
    card.write_text(json.dumps({"reference": kept._replace(day="2026-01-02")._asdict()}))
    moved = replace(pair, draft_name=str(tmp_path / "out" / "draft.gguf"))
    for content, day in ((None, "2026-01-02"), ("{}", kept.day), ('{"reference": {"ways": {"a": [["b"]]}}}', kept.day)):
        if content:
            card.write_text(content)
        found = drift.recalled(moved)
        assert found is not None
        assert found.day == day
    for file in cache_dir.folder().glob("acceptance-*.json"):
        file.write_text("[]")
    assert drift.recalled(moved) is None
    assert drift.PairWatch(moved).kept is None
