"""A head calibrated on real steps: what is noted of each draft token, how it is weighted, and that the card is right for the
backend, the draft and the temperature that serve."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributions import unchecked
from records import Process, knowing_head, random_head, records
from typer.testing import CliRunner

from specdecpp import AcceptanceHead, Decoder, Fixed, Pair, Sampling, SpecDecPP, cli
from specdecpp.backends import EagerModel, LeanModel
from specdecpp.errors import DataError, HeadError
from specdecpp.head import Calibration, HeadCard
from specdecpp.testing import TableModel, tiny_draft, tiny_model, tiny_tokenizer
from specdecpp.training import shards
from specdecpp.training.calibrate import calibrate_head, calibrate_live, listen, points
from specdecpp.training.scores import Judged, Steps

BENT = Calibration(rejection_weight=6.0, temperature=1.6, bias=-0.5)


class Known(TableModel):
    """A table of the last token, whose state is that token's one-hot row, as in the records of a `Process`."""

    def extend(self, tokens: list[int], *, rows: int) -> Any:
        logits, _ = super().extend(tokens, rows=rows)
        return logits, torch.eye(self.vocab_size)[self.tokens[-rows:]]


def pair_of(process: Process, **changes: Any) -> Pair:
    models = []
    for distribution in (process.p, process.q):
        table: Any = {(): distribution[0].tolist()} | {(i,): row for i, row in enumerate(distribution.tolist())}
        models.append(Known(table, depth=1))
    return Pair(target=models[0], draft=models[1], tokenizer=tiny_tokenizer(), **changes)


PROCESS = Process.random(6, seed=1)
PAIR = pair_of(PROCESS)
PROMPTS = [[0]] * 8


def heard_of(
    head: AcceptanceHead, *, sampling: Sampling | None = None, prompts: Any = PROMPTS, **options: Any
) -> list[tuple[Judged, Steps]]:
    with unchecked():
        return list(listen(PAIR, head, prompts, sampling=sampling or Sampling(), **options))


def found_of(head: AcceptanceHead, *, pair: Pair = PAIR, prompts: Any = PROMPTS, **options: Any) -> AcceptanceHead:
    with unchecked():
        return calibrate_live(head, pair, prompts, **options)


# What is noted


def test_a_step_adds_up() -> None:
    """Catches weights and products that run on into the next step, and a weight that counts the draft token itself."""
    token, whole = points(np.arange(5.0), np.array([0.5, 0.2, 1.0, 0.25, 0.5]), np.array([1, 2, 3, 1, 2]))
    np.testing.assert_allclose(token.weight, [1, 0.5, 0.1, 1, 0.25])
    np.testing.assert_allclose(whole.label, [0.5, 0.1, 0.1, 0.25, 0.125])
    np.testing.assert_allclose(np.exp(whole.scores(np.log([0.5, 0.5, 0.5, 0.1, 0.1]))), [0.5, 0.25, 0.125, 0.1, 0.01])
    np.testing.assert_allclose(whole.weight, 1)
    token, whole = points(np.zeros(0), np.zeros(0), np.zeros(0, int))
    assert len(token.weight) == len(whole.label) == 0


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_a_head_that_knows_agrees_with_every_label(temperature: float) -> None:
    """Catches labels of the wrong row, of the raw logits instead of the distribution that is sampled, and draft tokens judged
    out of order: this head says min(1, p/q) of each pair of tokens at T = 1, exactly."""
    head = knowing_head(PROCESS)
    for heard, _ in heard_of(head, sampling=Sampling(temperature=temperature)):
        said = 1 / (1 + np.exp(-heard.score))
        if temperature == 1:
            np.testing.assert_allclose(said, heard.label, atol=1e-4)
        else:
            assert np.abs(said - heard.label).max() > 0.1
        if temperature == 0:
            assert set(heard.label) <= {0.0, 1.0}


def test_the_labels_are_how_often_draft_tokens_are_accepted() -> None:
    """Catches labels that are not the odds of the acceptance test: summed with their weights they are the mean number of
    accepted draft tokens of a step. Over 500 steps each the two differ by 5 standard errors less than once in 1e6 seeds."""
    prompts = [[0]] * 12
    heard = heard_of(random_head(PROCESS, form="look_ahead"), prompts=prompts, length=3, max_tokens=160)
    expected = [(of.weight * of.label).sum() for of, _ in heard]
    num_steps = sum((whole.depth == 1).sum() for _, whole in heard)
    decoder = Decoder(PAIR, policy=Fixed(k=3))
    with unchecked():
        steps = [r for i, p in enumerate(prompts) for r in decoder.generate(p, seed=1000 + i, max_tokens=160).steps]
    accepted = [r.num_accepted for r in steps if r.num_drafted]
    assert num_steps > 500
    error = np.std(accepted) * np.sqrt(1 / len(accepted) + 1 / num_steps)
    assert abs(np.sum(expected) / num_steps - np.mean(accepted)) < 5 * error


@pytest.mark.parametrize("form", ["lagged", "look_ahead"])
def test_every_draft_token_is_judged_to_the_asked_depth(form: str) -> None:
    """Catches a lagged head whose last draft token, which the draft has not read, takes the label of another; steps that a
    rule cuts short; and estimates that are calibrated already."""
    head = random_head(PROCESS, form=form, calibration=replace(BENT, num_labels=1))
    heard = heard_of(head, length=4)
    depths = np.concatenate([whole.depth for _, whole in heard])
    assert depths.max() == 4
    assert (depths == 4).sum() > 0.9 * (depths == 1).sum()
    again = heard_of(head.with_card(calibration=Calibration()), length=4)
    for (one, _), (other, _) in zip(heard, again, strict=True):
        np.testing.assert_array_equal(one.score, other.score)


def test_a_head_on_transformers_states_is_heard_as_it_is() -> None:
    """Catches a state, a token or a scalar of another draft token: logits are the head's for the step's text, read at once."""
    target = tiny_model("llama", seed=1)
    pair = Pair(target=LeanModel(target), draft=EagerModel(tiny_draft(target)), tokenizer=tiny_tokenizer())
    card = HeadCard(hidden_size=32, num_layers=1, form="look_ahead", vocab_size=64, scalars=("log_q", "depth"))
    torch.manual_seed(0)
    head = AcceptanceHead(card).eval()
    ((heard, _),) = listen(pair, head, [(5, 9, 20)], sampling=Sampling(temperature=0.0), max_tokens=30, length=5)
    tokens, model = [5, 9, 20], pair.draft.model  # pyright: ignore[reportAttributeAccessIssue]
    answer = Decoder(pair, policy=Fixed(k=5)).generate(tokens, temperature=0.0, max_tokens=30)
    expected = []
    for r in answer.steps:
        read = list(tokens)
        for k in range(1, r.num_drafted + 1):
            with torch.inference_mode():
                out = model(torch.tensor([read]), output_hidden_states=True)
                q = out.logits[0, -1].softmax(-1)
                y = int(q.argmax())
                scalars = torch.tensor([float(q[y].log()), float(k)])
                expected.append(float(head(out.hidden_states[-1][0, -1], torch.tensor(y), scalars)))
            read.append(y)
        tokens += r.tokens
    np.testing.assert_allclose(heard.score, expected, atol=1e-3)
    assert np.ptp(expected) > 0.1, "the comparison is vacuous"


# The calibration


def test_a_bent_head_is_straightened() -> None:
    """Catches a fit to other labels or weights, and figures that do not say what was gained."""
    head = knowing_head(PROCESS, BENT).with_card(calibration=Calibration(rejection_weight=6.0), notes={"loss": 0.5})
    found = found_of(head)
    assert found.card.calibration.temperature == pytest.approx(1.6, rel=1e-2)
    assert found.card.calibration.bias == pytest.approx(-0.5, abs=1e-2)
    assert found.card.is_calibrated
    assert found.card.notes["loss"] == 0.5
    stages = found.card.notes["calibration"]
    assert list(stages) == ["raw", "debiased", "calibrated"]
    for name in ("ece_token", "kl", "ece_product"):
        assert stages["calibrated"][name] < 0.02 < 0.05 < stages["raw"][name]
    assert stages["calibrated"]["evidence"] == "live"
    assert stages["calibrated"]["num_answers"] == len(PROMPTS)


def test_steps_and_collected_labels_agree() -> None:
    """Catches weights under which the two ways to calibrate a head aim at different probabilities. This head knows
    min(1, p/q) only roughly, so that its calibration depends on which draft tokens count how much; unweighted, the two differ
    by 0.1 in temperature or bias. The tolerance is 4 times the spread over seeds."""
    head = random_head(PROCESS, seed=4, scale=0.7, form="look_ahead", scalars=("log_q",))
    rough = calibrate_head(head, records(PROCESS, 60, num_tokens=60, seed=2)).card.calibration
    found = found_of(head, prompts=[[0]] * 40).card.calibration
    assert 1 / found.temperature == pytest.approx(1 / rough.temperature, abs=0.02)
    assert found.bias == pytest.approx(rough.bias, abs=0.05)


@pytest.mark.slow
def test_another_draft_or_temperature_needs_another_calibration() -> None:
    """Catches a card that says what was true of the backend before: its old calibration is measured as `before`, and the new
    one beats it on other answers too."""
    head = found_of(knowing_head(PROCESS).with_card(sampling={"temperature": 1.0}))
    noise = torch.randn(6, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    other = replace(PROCESS, q=(PROCESS.q.log() + 0.7 * noise).softmax(-1))
    for pair, sampling in ((pair_of(other), Sampling()), (PAIR, Sampling(temperature=0.6, top_k=5))):
        found = found_of(head, pair=pair, sampling=sampling)
        before, after = (found.card.notes["calibration"][stage] for stage in ("before", "calibrated"))
        assert after["kl"] < before["kl"]
        assert (found.card.sampling or {})["temperature"] == sampling.temperature
        new, old = (
            found_of(of, pair=pair, sampling=sampling, seed=500).card.notes["calibration"]["before"] for of in (found, head)
        )
        assert new["kl"] < old["kl"]
    assert head.card.sampling == vars(Sampling())


def test_the_card_says_what_it_was_calibrated_on() -> None:
    """Catches a note that outlives a calibration on other labels, and one that names the wrong pair."""
    pair = replace(PAIR, backends="tables", target_name="/home/somebody/p.gguf", draft_name="q.gguf")
    found = calibrate_live(knowing_head(PROCESS), pair, PROMPTS, max_tokens=12, seed=3)
    on = found.card.notes["calibrated_on"]
    assert (on["runners"], on["target"], on["draft"]) == ("tables", "somebody/p.gguf", "q.gguf"), "a card travels"
    assert (on["num_prompts"], on["max_tokens"], on["seed"]) == (8, 12, 3)
    again = calibrate_live(found, pair, PROMPTS, max_tokens=12, seed=3)
    assert again.card.calibration == found.card.calibration
    other = calibrate_head(found, records(PROCESS, 2, num_tokens=20, seed=2))
    assert "calibrated_on" not in other.card.notes
    assert list(other.card.notes["calibration"]) == ["raw", "debiased", "calibrated"]


def test_temperature_0_has_a_calibration_of_its_own() -> None:
    """Catches greedy steps that bend the calibration for sampling, and a decoder that reads one at the other's temperature."""
    sampled = calibrate_head(knowing_head(PROCESS, calibration=BENT), records(PROCESS, 60, num_tokens=60, seed=2))
    both = found_of(sampled, sampling=Sampling(temperature=0.0), max_tokens=100)
    greedy = both.card.greedy
    assert greedy is not None
    assert greedy != both.card.calibration
    assert (both.card.calibration, both.card.sampling) == (sampled.card.calibration, sampled.card.sampling)
    assert both.card.notes["calibration"] == sampled.card.notes["calibration"]
    stages = both.card.notes["calibration_greedy"]
    assert stages["calibrated"]["kl"] < stages["before"]["kl"]
    assert HeadCard.from_json(both.card.to_json()) == both.card

    def judged(head: AcceptanceHead, temperature: float) -> list[float]:
        decoder = Decoder(PAIR, policy=SpecDecPP(head=head, calibrated=True, threshold=1.0))
        with unchecked():
            steps = decoder.generate([0], temperature=temperature, seed=0, max_tokens=40).steps
        return [said for r in steps for said in r.judged]

    assert judged(both, 1.0) == judged(sampled, 1.0)
    assert judged(both, 0.0) == judged(sampled.with_card(calibration=greedy), 0.0) != judged(sampled, 0.0)


def test_what_cannot_be_calibrated_is_refused() -> None:
    """Catches a calibration on nothing, which would be the prior, and a head of another pair."""
    with pytest.raises(DataError, match="no draft token was judged in 0 answers"):
        calibrate_live(knowing_head(PROCESS), PAIR, [])
    with pytest.raises(DataError, match="no draft token was judged in 8 answers of at most 1 tokens"):
        calibrate_live(knowing_head(PROCESS), PAIR, PROMPTS, max_tokens=1)
    with pytest.raises(HeadError, match="width 5, the draft has width 6"):
        calibrate_live(random_head(Process.random(5, seed=1)), PAIR, PROMPTS)


# The verb


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    rows = [json.dumps({"question": f"what is {i} and {i}?"}) for i in range(8)]
    (folder / "dev.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def test_a_recipe_calibrates_on_steps_at_a_temperature_of_its_own(folder: Path, tmp_path: Path) -> None:
    """Catches a temperature that is ignored, answers to prompts of another split, and a calibration that is shown only."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"pair: {{target: {folder / 'target'}, draft: {folder / 'draft'}}}\nsampling: {{top_k: 20}}\n"
        f"collect: {{sources: [{{path: {folder / 'dev.jsonl'}, prompt: 'field:question', dev_share: 0.5}}], max_tokens: 8}}\n"
        f"train: {{own: {{width: 8, num_layers: 1, epochs: 1}}}}\nout: {tmp_path / 'out'}\n",
        encoding="utf-8",
    )
    for stage in (["collect"], ["train"], ["calibrate", "--temperature", "0", "--json"]):
        done = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["train", str(recipe), "--quiet", "--only", *stage])
        assert done.exit_code == 0, done.stderr
    (said,), card = json.loads(done.stdout)["heads"].values(), AcceptanceHead.from_pretrained(tmp_path / "out/heads/own").card
    num = sum(1 for _ in shards.read(tmp_path / "out/labels", split="dev"))
    assert card.notes["calibrated_on"]["num_prompts"] == num > 0
    assert card.greedy is not None
    assert said["calibration"] == vars(card.greedy)
    assert not card.is_calibrated
    refused = CliRunner().invoke(cli.app, ["train", str(recipe), "--temperature", "0"])
    assert (refused.exit_code, "is for --only calibrate" in refused.stderr) == (2, True)
