"""Training: the objective, what each form of head reads, and a training that is killed; then whole recipes on tiny pairs."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from distributions import random_head
from interrupted import at_file, attempts, before, see_killed
from records import Process, logits_of, records
from typer.testing import CliRunner, Result

from specdecpp import AcceptanceHead, cache_dir, cli, load_pair
from specdecpp.decoder import Decoder
from specdecpp.errors import DataError
from specdecpp.head import Calibration
from specdecpp.policies import SpecDecPP
from specdecpp.testing import save_tiny_pair
from specdecpp.training import pipeline
from specdecpp.training.labels import Record
from specdecpp.training.recipe import HeadPlan
from specdecpp.training.scores import raw, scalars_of
from specdecpp.training.train import Epoch, Scale, acceptance_loss, batches, examples, train

PROCESS = Process.random(5, seed=1)
ABOUT = {"pair": {"target": "aa", "draft": "bb"}, "vocab_size": 5, "sampling": {"temperature": 1.0}, "digest": "d"}
PAPER = HeadPlan(form="lagged", num_layers=3, scalars=(), rejection_weight=6.0, epochs=3, batch=32, lr=5e-5)
QUICK = HeadPlan(width=32, num_layers=2, token_table=True, dropout=0.0, epochs=25, batch=4, lr=1e-2)
WITH_DEPTH = replace(QUICK, scalars=("log_q", "depth"))


@pytest.fixture(scope="module")
def answers() -> list[Record]:
    return records(PROCESS, 60, num_tokens=20, seed=2)


@pytest.fixture(scope="module")
def dev() -> list[Record]:
    return records(PROCESS, 10, num_tokens=20, seed=3)


# The objective


def test_the_loss_is_least_where_the_closed_form_says():
    """Catches a weight on the wrong side: the minimiser is s = P/(P + w(1 - P)), which the calibration then undoes."""
    label = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    logit = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([logit], max_iter=100, tolerance_grad=1e-12)

    def closure():
        optimiser.zero_grad()
        loss = acceptance_loss(logit, label, rejection_weight=6.0)
        loss.backward()
        return loss

    optimiser.step(closure)
    torch.testing.assert_close(logit.detach().sigmoid(), label / (label + 6 * (1 - label)), atol=1e-5, rtol=0)
    undone = Calibration(rejection_weight=6.0).apply(logit.detach()).sigmoid()
    torch.testing.assert_close(undone, label, atol=1e-5, rtol=0)


def test_the_loss_is_normalised_by_the_weights():
    """Catches a mean over labels, under which w_rej would also change the step size."""
    label = torch.tensor([0.25, 1.0])
    logit = torch.tensor([0.3, -0.2])
    s = logit.sigmoid()
    expected = -(0.25 * s[0].log() + 6 * 0.75 * (1 - s[0]).log() + s[1].log()) / (0.25 + 6 * 0.75 + 1)
    assert acceptance_loss(logit, label, rejection_weight=6.0) == pytest.approx(float(expected), rel=1e-6)
    assert acceptance_loss(logit[:0], label[:0]) == 0, "of no labels"


@pytest.mark.parametrize("weight", [1.0, 6.0])
def test_a_look_ahead_head_learns_what_there_is_to_learn(weight, answers, dev, tmp_path):
    """Catches states, draft tokens and labels that do not belong together: the toy's acceptance is a function of what the head
    reads, so a trained head must come close to it, at every weight of rejections."""
    told = []
    head = train(replace(QUICK, rejection_weight=weight), answers, dev, ABOUT, tmp_path, tell=told.append)
    found = head.card.calibration.apply(logits_of(head, PROCESS)).sigmoid()
    reached = PROCESS.q > 0.05  # pairs that were seen often
    assert float((found - PROCESS.accept).abs()[reached].max()) < 0.12
    assert told[-1].dev_kl < 0.02
    assert told[-1].loss < told[0].loss


def noisy(record: Record, seed: int, *, most: float = 50.0) -> Record:
    """The answer with states of 200 more entries, of noise that deviates by .1 to `most` about means of as much."""
    generator, scale = torch.Generator().manual_seed(seed), torch.logspace(-1, math.log10(most), 200)
    noise = scale * (1 + torch.randn(*record.states.shape[:-1], 200, generator=generator))
    return replace(record, states=torch.cat([record.states.float(), noise], -1), branches=None)


def test_states_of_few_answers_are_not_learned_by_heart(answers, dev, tmp_path):
    """Catches states that are read unscaled, whose largest entries drown what the scalars say, and a dropout that is none."""

    def last(name: str, most: float, dropout: float) -> Epoch:
        few, held = (
            [noisy(r, seed, most=most) for seed, r in enumerate(of, 100 * i)] for i, of in enumerate((answers[:20], dev))
        )
        told: list[Epoch] = []
        plan = replace(QUICK, token_table=False, dropout=dropout, batch=1)
        assert train(plan, few, held, ABOUT, tmp_path / name, tell=told.append).card.vocab_size is None
        return told[-1]

    wild, tame, whole = last("wild", 50.0, 0.8), last("tame", 0.1, 0.8), last("whole", 50.0, 0.0)
    assert wild.dev_kl == pytest.approx(tame.dev_kl, rel=0.02)
    assert wild.dev_kl < 0.8 * whole.dev_kl
    assert wild.dev_auroc == pytest.approx(tame.dev_auroc, abs=0.005)


def test_scaled_inputs_are_folded_into_the_weights(answers):
    """Catches a saved head that expects inputs which decoding does not scale."""
    wild = [noisy(r, seed) for seed, r in enumerate(answers[:5])]
    head, scale = (
        random_head(205, seed=0, scale=0.3, form="look_ahead", scalars=("log_q", "depth"), width=8),
        Scale.of(wild, WITH_DEPTH),
    )
    inputs, _, depth = examples(wild, WITH_DEPTH)
    whole = torch.cat([inputs.hidden, scalars_of(WITH_DEPTH.scalars, inputs, depth)], -1).double()
    torch.testing.assert_close(scale.mean.double(), whole.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scale.deviation.double(), whole.std(0, correction=0).clamp(min=1e-6), rtol=1e-3, atol=1e-4)
    seen = scale.seen(0.0, torch.Generator())
    torch.testing.assert_close(
        raw(scale.folded(head), inputs, depth), raw(head, inputs, depth, seen=seen), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("text", ["mixed", "leaf"])
def test_a_lagged_head_learns_from_the_state_at_the_draft_token(text, answers, dev, tmp_path):
    """Catches the state before the draft token, or labels of the kept tokens: what remains is the mean over contexts."""
    plan = replace(QUICK, form="lagged", text=text, scalars=(), width=None, token_table=False, epochs=30)
    head = train(plan, answers, dev, ABOUT, tmp_path)
    texts = torch.cat([torch.cat([torch.zeros(1, dtype=torch.long), r.answer[:-1]]) for r in answers])
    share = torch.bincount(texts, minlength=5).double() / len(texts)
    weight = share[:, None] * PROCESS.q
    mean = (weight * PROCESS.accept).sum(0) / weight.sum(0)
    assert float((logits_of(head, PROCESS)[0].sigmoid() - mean).abs().max()) < 0.12


def test_examples_take_the_loss_only_where_the_text_has_the_drafts_token(answers):
    """Catches a label of the draft's token on a state of the answer's token."""
    evidence, label, _ = examples(answers, PAPER)
    num = sum(int(r.is_mixed.sum()) for r in answers if r.is_mixed is not None)
    assert len(evidence.token) == len(label) == num
    assert torch.equal(evidence.hidden.argmax(-1), evidence.token)  # the toy's state at a token is the token
    assert len(examples(answers, QUICK)[1]) == sum(r.candidate.numel() for r in answers)


# The run


def test_another_plan_in_the_same_folder_is_refused(answers, dev, tmp_path):
    """Catches a changed recipe that goes on from another head's weights, or that overwrites it."""
    train(replace(QUICK, epochs=1), answers, dev, ABOUT, tmp_path)
    with pytest.raises(DataError, match=r"another plan: lr changed"):
        train(replace(QUICK, epochs=1, lr=1e-3), answers, dev, ABOUT, tmp_path)
    with pytest.raises(DataError, match=r"another plan: the labels changed"):
        train(replace(QUICK, epochs=1), answers, dev, ABOUT | {"digest": "other"}, tmp_path)


def test_the_same_seed_gives_the_same_head(answers, dev, tmp_path):
    """Catches randomness that is not the plan's own."""
    heads = []
    for i, seed in enumerate((0, 0, 1)):
        torch.manual_seed(i)
        heads.append(train(replace(QUICK, epochs=1, seed=seed), answers, dev, ABOUT, tmp_path / str(i)).output.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_every_epoch_sees_every_answer_once_in_an_order_of_its_own():
    """Catches answers that are dropped at the end of an epoch, and epochs that repeat one order."""
    plan = replace(QUICK, batch=4)
    generator = torch.Generator().manual_seed(0)
    orders = [[i for batch in batches(10, plan, generator) for i in batch] for _ in range(2)]
    assert [sorted(order) for order in orders] == [list(range(10))] * 2
    assert orders[0] != orders[1]


def test_what_is_missing_is_said(answers, dev, tmp_path):
    """Catches a training without answers, or on states that nobody collected."""
    with pytest.raises(DataError, match="no answers to train on"):
        train(QUICK, [], dev, ABOUT, tmp_path)
    bare = [replace(r, mixed=None, is_mixed=None, leaf=None) for r in answers]
    for text in ("mixed", "leaf"):
        with pytest.raises(DataError, match=f"feature '{text}'"):
            train(replace(PAPER, text=text), bare, dev, ABOUT, tmp_path)


# Whole recipes on tiny pairs


def recipe(folder: Path, *, kind: str = "llama", **changes: Any) -> Path:
    """A tiny pair of a kind, prompts, and the recipe of a look-ahead and a lagged head for it."""
    save_tiny_pair(folder, kind=kind)
    rows = [{"question": f"{a} plus {b}"} for a in range(6) for b in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "pair": {"target": "target", "draft": "draft", "dtype": "float32"},
        "sampling": {"temperature": 0.8, "top_k": 20},
        "collect": {
            "sources": [{"path": "prompts.jsonl", "prompt": "field:question", "name": "sums", "dev_share": 0.4}],
            "max_tokens": 12,
            "shard_size": 8,
            "batch": 8,
            "features": ["mixed", "leaf"],
        },
        "train": {
            "ahead": {"width": 16, "num_layers": 1, "epochs": 2},
            "head_lagged": {"form": "lagged", "text": "leaf", "num_layers": 1, "scalars": [], "epochs": 2},
        },
        "out": "out",
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), prog_name="specdecpp", env={"COLUMNS": "80"})


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_recipe_runs_from_prompts_to_a_head_that_decodes(kind: str, tmp_path: Path):
    """Catches a step that does not fit the next one, on any of the architectures."""
    path = recipe(tmp_path, kind=kind)
    result = call("train", str(path), "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert list(found["heads"]) == ["head", "head_lagged"]
    scores = found["evaluation"]["sums"]
    assert set(scores) == {"head", "head_lagged", "cumulative_q"}
    assert scores["head"]["auroc_product"] is not None
    saved = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert saved["sums"] == scores
    assert saved["provenance"]["command"] == "specdecpp train recipe.yaml"
    pair = load_pair(tmp_path / "target", draft=tmp_path / "draft", head=found["heads"]["head"])
    assert pair.head is not None
    assert pair.head.card.is_calibrated
    assert pair.head.card.sampling is not None
    assert pair.head.card.sampling["top_k"] == 20
    policy = SpecDecPP(head=pair.head, threshold=0.5, calibrated=True, min_tokens=0)
    out = Decoder(pair, policy=policy).generate("3 plus 1", max_tokens=12, seed=0, ignore_eos=True)
    assert any(len(r.judged) == r.num_drafted > 0 for r in out.steps)


def test_the_stages_one_by_one_give_what_all_give(tmp_path: Path):
    """Catches a stage that a whole run does differently."""
    path = recipe(tmp_path)
    shown = call("train", str(path), "--quiet")
    assert shown.exit_code == 0, shown.stderr
    for words in ("sums", "head ", "head_lagged", "cumulative q", "AUROC"):
        assert words in shown.stdout
    assert max(map(len, shown.stdout.splitlines()[1:])) <= 80
    whole = AcceptanceHead.from_pretrained(tmp_path / "out" / "heads" / "ahead")
    for arguments in (
        ("--only", "collect", str(path), "--out", str(tmp_path / "other"), "--quiet"),
        ("--only", "train", str(path), "--out", str(tmp_path / "other"), "--head", "ahead", "--quiet"),
        ("--only", "calibrate", str(path), "--out", str(tmp_path / "other"), "--head", "ahead"),
    ):
        result = call("train", *arguments)
        assert result.exit_code == 0, result.stderr
    parts = AcceptanceHead.from_pretrained(tmp_path / "other" / "heads" / "ahead")
    assert parts.card.calibration == whole.card.calibration
    assert all(torch.equal(v, parts.state_dict()[k]) for k, v in whole.state_dict().items())


def test_the_grid_is_one_command(tmp_path: Path):
    """Catches heads of the grid that overwrite each other."""
    path = recipe(tmp_path)
    assert call("train", "--only", "collect", str(path), "--quiet").exit_code == 0
    result = call("train", "--only", "train", str(path), "--head", "head_lagged", "--grid", "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
    heads = json.loads(result.stdout)["heads"]
    assert len(heads) == len({row["folder"] for row in heads.values()}) == 20
    assert all((Path(row["folder"]) / "head.safetensors").exists() for row in heads.values())


MOMENTS = {
    "one of two files of a shard": at_file("labels/shard-00001.safetensors"),
    "the first epoch": at_file("ahead/state.pt"),
    "half the state": at_file("ahead/state.pt", is_half=True),
    "trained, its card not yet written": at_file("ahead/head.safetensors"),
    "all are trained, none is calibrated": at_file("head_lagged/head.json"),
    "calibrating": before(pipeline, "calibrate_head"),
    "half the weights": at_file("ahead/head.safetensors", is_half=True),
    "calibrated, its card still that of training": at_file("ahead/head.safetensors"),
    "half the card": at_file("ahead/head.json", is_half=True),
    "one is calibrated": at_file("ahead/head.json"),
    "calibrating the other": before(pipeline, "calibrate_head"),
    "all are calibrated": at_file("head_lagged/head.json"),
    "evaluating": before(pipeline, "evaluate"),
    "half the table": at_file("evaluation.json", is_half=True),
}


def test_killed_at_any_moment_it_ends_alike(tmp_path: Path):
    """Catches a half-written step that is taken for a whole one, a head without its calibration, one that is calibrated twice
    or refused for ever, lines of epochs that are lost, and half a table: the process is killed (-9) as it collects, trains,
    calibrates and evaluates, where the last one had come to."""
    path = recipe(tmp_path)
    assert call("train", str(path), "--out", str(tmp_path / "whole"), "--quiet").exit_code == 0
    killed = ["train", str(path), "--out", str(tmp_path / "killed"), "--quiet"]
    see_killed(__file__, MOMENTS, *killed)
    assert call(*killed).exit_code == 0
    files = {of: {p.relative_to(tmp_path / of): p for p in (tmp_path / of / "heads").rglob("*")} for of in ("whole", "killed")}
    assert files["whole"].keys() == files["killed"].keys()
    for name, one in files["whole"].items():
        if one.is_file() and one.suffix != ".pt":
            assert untimed(one) == untimed(files["killed"][name]), name
    assert untimed(tmp_path / "whole" / "evaluation.json") == untimed(tmp_path / "killed" / "evaluation.json")


def untimed(path: Path) -> bytes:
    """What a file holds but for the seconds that epochs took."""
    return re.sub(rb'"elapsed_s": [\d.e-]+', b"", path.read_bytes())


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def damaged(path: Path, harm: str) -> None:
    content, dice = path.read_bytes(), random.Random(0)
    if harm == "flipped":
        at = content.index(b"PK", 2) // 2 + dice.randrange(9)
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    else:
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "other": b"<html>"}[harm])


@pytest.mark.parametrize("harm", ["truncated", *map(slow, ("empty", "other")), "flipped", "foreign", "a folder"])
def test_a_damaged_state_is_told_with_the_way_out(harm: str, answers, dev, tmp_path):
    """Catches the tracebacks of zip, pickle and torch, and an optimiser that goes on from numbers that are not its own."""
    whole = train(QUICK, answers, dev, ABOUT, tmp_path)
    state = tmp_path / "state.pt"
    if harm == "foreign":
        torch.save({"origin": {"plan": {}}}, state)
        with pytest.raises(DataError, match="holds a head of another plan"):
            train(QUICK, answers, dev, ABOUT, tmp_path)
        torch.save([1], state)
    elif harm == "a folder":
        state.unlink()
        state.mkdir()
    else:
        damaged(state, harm)
    with pytest.raises(DataError, match=r"state\.pt is damaged \(.*Delete that file and run the same command again"):
        train(QUICK, answers, dev, ABOUT, tmp_path)
    state.rmdir() if harm == "a folder" else state.unlink()
    again = train(QUICK, answers, dev, ABOUT, tmp_path)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in whole.state_dict().items())


def test_labels_without_their_description_are_told(answers, dev, tmp_path):
    """Catches KeyError: 'pair' where collection.json was left behind."""
    with pytest.raises(DataError, match=r"do not say their pair.*collection\.json is missing"):
        train(QUICK, answers, dev, {}, tmp_path)


def test_what_cannot_be_written_is_told(answers, dev, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Catches tracebacks where the folder of heads is a file, or its disk fails after an epoch."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be made \(Not a directory"):
        train(QUICK, answers, dev, ABOUT, tmp_path / "file" / "head")

    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(cache_dir, "_sync", fail)
    with pytest.raises(DataError, match=r"cannot be written into \(Input/output error\)\. The epochs before this one are safe"):
        train(QUICK, answers, dev, ABOUT, tmp_path / "head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collect.dev_share": 0.0}, r"no prompts to calibrate on: its split dev is empty \(train has 24\)"),
        ({"collect.split": "test"}, r"no prompts to train on: its split train is empty \(test has 24\)"),
        ({"collect.splits": ["train"]}, r"no prompts to calibrate on"),
        ({"collect.features": []}, r"train\.head_lagged reads the leaf text, and collect\.features has none\. Add leaf to it"),
        ({"train": {"a": {}, "head": {}}}, r"calls a head head, which is the name of a score"),
        ({"train": {"a": {}, "cumulative_q": {}}}, r"calls a head cumulative_q, which is the name of a score"),
        ({"train": {}}, r"names no head"),
        ({"train": {"../a": {}}}, r"train\.\.\./a: a head's name is that of its folder"),
    ],
)
def test_what_a_run_would_find_out_at_its_end_is_told_at_once(changes: dict[str, Any], message: str, tmp_path: Path):
    """Catches hours of collecting and training before it is seen that nothing is left to calibrate or to compare on."""
    path = recipe(tmp_path)
    content = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        section, _, name = key.partition(".")
        at = content["collect"]["sources"][0] if name in ("dev_share", "split") else content[section] if name else content
        at[name or section] = value
    path.write_text(yaml.safe_dump(content))
    result = call("train", str(path), "--quiet")
    assert result.exit_code == 1
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "out").exists()


def test_prompts_that_are_too_long_are_seen_before_anything_is_sampled(tmp_path: Path):
    """Catches a dev split whose prompts leave no room for an answer, which is known once they are encoded."""
    path = recipe(tmp_path)
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": "one two three " * 400}) + "\n")
    content = yaml.safe_load(path.read_text())
    content["collect"]["sources"][0]["dev_share"] = 0.0
    content["collect"]["sources"].append({"path": "long.jsonl", "prompt": "field:question", "split": "dev"})
    path.write_text(yaml.safe_dump(content))
    result = call("train", str(path), "--quiet")
    assert (result.exit_code, "its split dev is empty (train has 24)" in result.stderr) == (1, True), result.stderr
    assert not list((tmp_path / "out" / "labels").iterdir())


def test_a_head_that_the_recipe_does_not_have(tmp_path: Path):
    """Catches a typing error that trains nothing and says nothing, and a training that ends well without a head."""
    result = call("train", str(recipe(tmp_path)), "--head", "hade")
    assert result.exit_code == 2
    assert "no head 'hade'. Its heads: ahead, head_lagged" in result.stderr
    result = call("train", "--only", "train", str(recipe(tmp_path, train={})))
    assert result.exit_code == 1
    assert "recipe.yaml names no head" in result.stderr


def main() -> None:
    import forks  # noqa: F401

    attempts(cli.main, MOMENTS)


if __name__ == "__main__":
    main()
