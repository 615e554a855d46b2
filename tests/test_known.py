"""What is kept of a pair: costs that are wrong heal within a request, and are right for the next process."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from distributions import unchecked

from specdecpp import Decoder, Pair, decoder, scheduler, step
from specdecpp.costs import chain_tokens, measuring
from specdecpp.costs.clock import differ
from specdecpp.policies import Costs
from specdecpp.sampling import streams
from specdecpp.testing import TableModel, tiny_tokenizer

TRUE = Costs(draft_s=0.43, passes={1: 1.0, 2: 1.03, 3: 1.21, 5: 1.47, 9: 2.3, 17: 4.0})
"""A pair of two real models on two cores, in passes of the target."""


class Priced(TableModel):
    """A table whose passes take given seconds of a clock that nothing else moves."""

    clock: list[float]
    costs: Costs

    def extend(self, tokens: list[int], *, rows: int) -> Any:
        self.clock[0] += self.costs.pass_s(len(tokens))
        return super().extend(tokens, rows=rows)


_names = count()


def priced(true: Costs, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair of tables whose steps take what these costs say, by the clock of every module that times steps."""
    clock = [0.0]
    for module in (scheduler, step, measuring):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    p = Priced.random(vocab_size=8, depth=1, seed=6, sparsity=0.0)
    other = TableModel.random(vocab_size=8, depth=1, seed=9, sparsity=0.0)
    q = Priced({k: (0.8 * distribution + 0.2 * other.table[k]).tolist() for k, distribution in p.table.items()}, depth=1)
    for model, costs in ((p, true), (q, Costs(draft_s=0.0, passes={1: true.draft_s}))):
        model.__class__, model.clock, model.costs = Priced, clock, costs  # pyright: ignore
    monkeypatch.setattr(decoder, "streams", lambda seed, draw=None: streams(7 if seed is None else seed, draw=draw))
    name = f"pair {next(_names)}"
    return Pair(target=p, draft=q, tokenizer=tiny_tokenizer(8), target_fingerprint=name, draft_fingerprint=name)


def scaled(costs: Costs, draft: float, wide: float, alone: float) -> Costs:
    """These costs, wrong by factors: a draft step, the passes over draft tokens, the target alone."""
    passes = {n: s * (alone if n == 1 else wide) for n, s in costs.passes.items()}
    return replace(costs, draft_s=draft * costs.draft_s, passes=passes)


WRONG = [(2, 1, 1), (0.5, 1, 1), (1, 2, 1), (1, 0.5, 0.5), (2, 2, 1), (2, 2, 2), (0.5, 2, 2), (1, 2, 0.5)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specdecpp"


@pytest.mark.parametrize("draft_s", [0.43, 0.2])
@pytest.mark.parametrize("factors", WRONG, ids=str)
def test_wrong_costs_heal_within_a_request(
    factors: tuple[float, float, float], draft_s: float, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches figures of a busy minute that are a verdict: costs by which drafting does not pay were never measured again, so
    that nothing was ever drafted until the file was deleted by hand."""
    true = replace(TRUE, draft_s=draft_s)
    pair, wrong = priced(true, monkeypatch), scaled(true, *factors)
    measuring.keep(pair, measuring.Known(costs=wrong, now=wrong))
    with unchecked():
        made = Decoder(pair)
        output = made.generate([1, 2], max_tokens=64, ignore_eos=True, temperature=1.0)
        assert made.memory.clock is not None
        now, lengths = made.memory.clock.now, {0, 1, 2, *(r.num_drafted for r in output.steps)}
        usual = {k for k in lengths if k < 3 or sum(r.num_drafted == k for r in output.steps) > 2}
        assert [k for k in sorted(usual) if not 0.85 < now.step_s(k) / true.step_s(k) < 1.15] == []
        for acceptance in (0.5, 0.7, 0.8, 0.9):
            k, best = (costs.best_length(acceptance, range(9)) for costs in (now, true))
            tokens, most = chain_tokens(acceptance, k), chain_tokens(acceptance, best)
            assert tokens / true.step_s(k) > 0.94 * most / true.step_s(best), "as many are drafted, or as good as"
        assert made.costs == wrong, "a request with a seed goes on to see what was kept"
        later = Decoder(replace(pair))
    assert later.costs is not None
    assert not differ(later.costs, true), "the next process knows better, with a seed too"


def test_right_costs_are_kept_for_a_seed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a seed that gives other stops in the next process, because a request without one has corrected the costs by
    little, or because all of the machine was slower."""
    pair, slow = priced(TRUE, monkeypatch), scaled(TRUE, 1.6, 1.5, 1.5)
    measuring.keep(pair, measuring.Known(costs=slow, now=slow))
    with unchecked():
        drafted = []
        for _ in range(2):
            made = Decoder(replace(pair))  # as of another process
            assert made.costs == slow
            drafted.append([r.num_drafted for r in made.generate([1, 2], max_tokens=40, ignore_eos=True, seed=3).steps])
            made.generate([1, 2], max_tokens=64, ignore_eos=True)
    assert drafted[0] == drafted[1]
    now = measuring.known(pair).now
    assert now.verify_s(2) == pytest.approx(TRUE.verify_s(2), rel=0.15), "the others begin with what is now"


def test_a_decoder_that_is_made_has_measured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a first request that waits for seconds of measuring, and a pair that cannot be kept measured unasked."""
    pair = priced(TRUE, monkeypatch)
    made = Decoder(pair)
    assert list(home.glob("costs-*"))
    assert made.costs is not None
    assert made.costs.step_s(2) / made.costs.verify_s(1) == pytest.approx(TRUE.step_s(2), rel=0.05)
    assert Decoder(replace(pair, draft_fingerprint=None)).memory._costs is None
