"""Distillation at toy size: the same draft however often it is killed, and a draft that agrees more than its start."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import specdecpp as sd
from specdecpp.backends import EagerModel, NativeModel
from specdecpp.cli import app
from specdecpp.distillation import finishing, measuring, network, run, start, text
from specdecpp.distillation.network import Shape
from specdecpp.distillation.run import CARD, PLAN, TEXT, DistilPlan, distil
from specdecpp.distillation.target import Target
from specdecpp.distillation.text import answered
from specdecpp.distillation.training import STATE, Course, Trainer, divergence, overlap, own_weights, targets
from specdecpp.errors import BackendError, DataError, PairError
from specdecpp.loading.models import load_model
from specdecpp.loading.tokenizers import load_tokenizer
from specdecpp.policies import Fixed
from specdecpp.sampling import Sampling
from specdecpp.testing import practice_prompts, tiny_model, tiny_tokenizer
from specdecpp.training.prompts import Source


def filled(folder: Path, kind: str = "llama", **options: Any) -> Path:
    """A folder with a target, and prompts."""
    tiny_model(kind, seed=1, **({"layers": 4, "head_dim": 16} | options)).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    rows = [json.dumps({"text": prompt[:40]}) for prompt in practice_prompts()]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("distil"))


def plan_of(folder: Path, out: Path, **more) -> DistilPlan:
    asked = {
        "target": str(folder / "target"),
        "sources": (Source(path=str(folder / "prompts.jsonl"), prompt="text"),),
        "out": out,
        "tokens": 3000,
        "sampling": Sampling(temperature=0.8),
        "shape": Shape(kept=1, own=1, tokens=40),
        "course": Course(epochs=2, rows=128, lr=1e-3),
        "max_tokens": 12,
    }
    return DistilPlan(**(asked | more))


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run that nobody disturbed."""
    out = folder / "whole"
    distil(plan_of(folder, out))
    return out


class Killed(Exception):
    pass


def killing(number: int) -> Any:
    """Raises when it is told something for the n-th time."""
    left = iter(range(number - 1))

    def tell(step: Any) -> None:
        if next(left, None) is None:
            raise Killed

    return tell


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_model(out / "draft", dtype="auto", device=None, device_map=None).state_dict()


def pieces_of(out: Path) -> list[text.TextPiece]:
    return [piece for path in sorted((out / TEXT).glob("text-*")) for piece in text.pieces(path)]


def test_a_run_that_is_killed_at_every_step_ends_with_the_same_draft(folder, tmp_path):
    """Catches work that is done twice or never, an order that depends on the run, and a state that lacks something."""
    kills, whole = 0, tmp_path / "whole"
    distil(plan_of(folder, whole, tokens=1200))
    for number in range(1, 100):
        try:
            distil(plan_of(folder, tmp_path / "out", tokens=1200), tell=killing(number))
            break
        except Killed:
            kills += 1
    assert 10 < kills < 90
    expected, found = weights(whole), weights(tmp_path / "out")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    same = [json.loads((out / CARD).read_text()) for out in (whole, tmp_path / "out")]
    assert same[0]["acceptance"] == same[1]["acceptance"]


def test_training_makes_a_draft_agree_more(folder, whole):
    """Catches a loss that is not of the target, rows of the output layer of another token, and states of another layer."""
    target = Target(str(folder / "target"))
    pieces = pieces_of(whole)
    trained: Any = load_model(whole / "draft", dtype="auto", device=None, device_map=None)
    trained.config.output_ids = None
    untrained = network.draft(target.model, Shape(kept=1, own=1))
    found = [measuring.agreement(target.model, draft, pieces) for draft in (untrained, trained)]
    assert found[1] > found[0] + 0.05


def test_the_draft_decodes_exactly(folder, whole):
    """Catches a draft that is saved as another model than was trained, and a greedy answer that it changes."""
    pair = sd.load_pair(folder / "target", draft=whole / "draft", backend="eager")
    assert int(pair.draft.new_cache().extend([1], rows=1)[0].isfinite().sum()) == 40
    options = {"max_tokens": 30, "temperature": 0.0}
    answers = [sd.Decoder(pair, policy=Fixed(k=k)).generate("tell me", **options).tokens for k in (1, 4)]
    assert answers[0] == answers[1]


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_trained_is_the_end_of_the_draft(kind):
    """Catches a tail without the kinds of its layers, on which every family that says them in its config failed (Qwen2 and 3,
    Gemma 3), or with those of other layers."""
    draft = network.draft(tiny_model(kind, seed=3, layers=5, **FAMILIES[kind]), Shape(kept=2, own=2))
    ids = torch.tensor([[*range(3, 23)]])
    with torch.inference_mode():
        with network.caught(draft.model.layers[2]) as states:
            whole = draft.model(input_ids=ids, use_cache=False).last_hidden_state
        own = network.tail(draft, 2).model(inputs_embeds=states[0], use_cache=False).last_hidden_state
    torch.testing.assert_close(own, whole)


def test_a_qwen3_comes_to_its_verdict(tmp_path, monkeypatch):
    """Catches a step, from choosing a shape to the check, that only works for a Llama; a random target has nothing to learn."""
    monkeypatch.setattr(finishing, "CHECKED", 2)
    monkeypatch.setattr(finishing.check, "keep_figures", lambda pair, prompts, trial, tell: [*map(list, prompts)])
    course = Course(epochs=1, rows=128)
    plan = plan_of(filled(tmp_path, "qwen3", layers=6), tmp_path / "out", shape=None, tokens=1500, course=course)
    card = finishing.finish(plan, distil(plan))
    settled = json.loads((tmp_path / "out" / PLAN).read_text())
    assert settled["shape"] in [candidate["shape"] for candidate in settled["tried"]]
    assert len(settled["tried"]) > 1
    assert distil(replace(plan))["draft"]["shape"] == card["draft"]["shape"] == settled["shape"]
    assert 0 < card["acceptance"]["prompts"]["1"] <= 1
    trained = run._Run(plan, print, print)._prompts
    assert not [prompt for prompt in card["reference"] if prompt in trained], "the verdict is on prompts that were held out"
    assert card["check"]["sentences"][0].lower().startswith(("worth it", "not worth it", "too close to call"))


def test_the_start_in_closed_form_is_nearer_to_the_target():
    """Catches weights that are fitted to another layer's state, or put the wrong way round."""
    target = tiny_model("llama", seed=5, layers=6, hidden_size=64)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 64, (40,), generator=generator).tolist() for _ in range(24)]
    shape = Shape(kept=2, own=2)
    draft = network.draft(target, shape)
    pieces = text.read(target, [ids[:1] for ids in texts], [ids[1:] for ids in texts], layer=2)
    near = measuring.agreement(target, draft, pieces)
    start.fit(draft, target, texts, shape)
    assert 1 - measuring.agreement(target, draft, pieces) < 0.9 * (1 - near)


def test_the_acceptance_of_a_start_counts_the_tail():
    """Catches a shape that is chosen by the likeliest 64 tokens: of a target that is undecided, as a random one, .03 and not
    .8 was expected of every draft, so that the cheapest was always taken."""
    target = tiny_model("llama", seed=1, layers=4, vocab_size=1000)
    draft = network.draft(target, Shape(kept=1, own=1))
    prompts, answers = [[5, 9, 7], [8, 4]], [[300, 11, 900], [77, 6, 5, 950]]
    pieces = text.read(target, prompts, answers, layer=1)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            p, q = (m(input_ids=torch.tensor([prompt + answer[:-1]])).logits[0].softmax(-1) for m in (target, draft))
        found += (1 - (p - q).abs().sum(-1) / 2)[len(prompt) - 1 :].tolist()
    assert measuring.agreement(target, draft, pieces) == pytest.approx(sum(found) / len(found), abs=1e-4)


def test_losses_are_what_they_say():
    """Catches a bucket that is counted twice, and a token that the draft cannot say but is scored."""
    piece = text.TextPiece(
        ids=torch.tensor([1, 2, 3]),
        num_prompt=2,
        state=torch.zeros(2, 4),
        top=torch.tensor([[3, 0, 5]]),
        log_p=torch.tensor([[0.5, 0.25, 0.125]]).log(),
    )
    rows = torch.tensor([0, -1, 1, 2, 3, -1])  # the draft says 0, 2, 3 and 4
    q = torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    of = targets([piece], rows)
    assert float(overlap(q.log(), *of)) == pytest.approx(0.3 + 0.25)
    rest = 1 - 0.5 - 0.25
    expected = (
        0.5 * torch.tensor(0.5 / 0.3).log() + 0.25 * torch.tensor(0.25 / 0.4).log() + rest * torch.tensor(rest / 0.3).log()
    )
    assert float(divergence(q.log(), *of)) == pytest.approx(float(expected), rel=1e-5)


def test_what_cannot_be_distilled_is_said(folder, whole, tmp_path):
    """Catches tracebacks, and hours that are spent before an error is told."""
    with pytest.raises(BackendError, match="no smaller"):
        distil(plan_of(folder, tmp_path / "a", shape=Shape(kept=3, own=1)))
    with pytest.raises(DataError, match="distillation of another kind"):
        distil(plan_of(folder, whole, course=Course(epochs=3, rows=128)))
    (tmp_path / "few.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    few = (Source(path=str(tmp_path / "few.jsonl"), prompt="text"),)
    with pytest.raises(DataError, match="2 prompts leave room"):
        distil(plan_of(folder, tmp_path / "b", sources=few))
    (tmp_path / "c" / "draft").mkdir(parents=True)
    with pytest.raises(DataError, match="has a draft and no plan"):
        distil(plan_of(folder, tmp_path / "c"))
    few = (Source(path=str(folder / "prompts.jsonl"), prompt="text", rows=90),)
    found = run._Run(plan_of(folder, tmp_path / "d", sources=few, tokens=1500), print, print)._decided()
    assert found["num_shards"] == 2, "a shard has 64 answers also where fewer prompts train"
    wrongs = {
        "got neither": {"tokens": None},
        "got both": {"minutes": 3.0},
        "must be positive, got 0$": {"tokens": 0},
        "must be positive, got -0.5": {"tokens": None, "minutes": -0.5},
        "max_tokens must be at least 2": {"max_tokens": 1},
        "small has layers of its own": {"start": "small"},
    }
    for words, wrong in wrongs.items():
        with pytest.raises(ValueError, match=words):
            plan_of(folder, tmp_path, **wrong)


def test_a_mistyped_file_or_device_is_told_before_a_model_is_loaded(folder, tmp_path, monkeypatch):
    """Catches a prompt file that is looked for once the target has been loaded, and a device that ends in a traceback."""
    monkeypatch.setattr(run, "Target", lambda *_: pytest.fail("loaded"))
    nowhere = str(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="there is no file"):
        distil(plan_of(folder, tmp_path / "a", sources=(Source(path=nowhere, prompt="text"),)))
    prompts, out = str(folder / "prompts.jsonl"), str(tmp_path / "b")
    options = ["--prompts", prompts, "--out", out, "--tokens", "9", "--device", "abacus"]
    result = CliRunner().invoke(app, ["distil", str(folder / "target"), *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --device abacus cannot be used here")


def flipped(content: bytes) -> bytes:
    at = len(content) // 3
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize("name", [PLAN, STATE, f"{TEXT}/text-00001.safetensors"])
def test_a_damaged_file_is_told(folder, whole, tmp_path, name):
    """Catches a flipped byte that is trained on, and a traceback for a file that was cut."""
    for damage in (lambda content: content[: len(content) // 2], flipped):
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        (out / name).write_bytes(damage((out / name).read_bytes()))
        with pytest.raises(DataError, match="damaged"):
            distil(plan_of(folder, out))


def test_a_file_gets_a_file(folder, tmp_path):
    """Catches layers of the target that are not its bytes, rows of q and k as transformers has them, ids not in the file."""
    from specdecpp.loading import gguf_writing
    from specdecpp.loading.gguf import GGUF
    from specdecpp.loading.pair import REFERENCE

    whole = tmp_path / "whole.gguf"
    model = load_model(REFERENCE / "target", dtype=torch.float32, device=None, device_map=None)
    tokenizer = load_tokenizer(REFERENCE / "target")
    gguf_writing.write(model, tokenizer, whole, precision=gguf_writing.Precision.q8_0)
    more = {"target": str(whole), "shape": Shape(kept=2, own=1, tokens=500), "tokens": 1500, "max_tokens": 16}
    card = distil(plan_of(folder, tmp_path / "out", **more))
    assert card["draft"]["files"] == ["draft.gguf", "draft"]
    target, draft = GGUF(whole).stored, GGUF(tmp_path / "out" / "draft.gguf")
    for name, stored in draft.stored.items():
        is_own = name.startswith("model.layers.2.") or name == "model.norm.weight"
        assert is_own or (stored.data == target[name].data).all()
    assert len(draft.skeleton.config.output_ids) == 500
    pairs = [sd.load_pair(whole, draft=tmp_path / "out" / name, backend="eager") for name in ("draft.gguf", "draft")]
    rows = [pair.draft.new_cache().extend([5, 9, 7, 300], rows=4)[0] for pair in pairs]
    scored = rows[0].isfinite()
    assert torch.equal(scored, rows[1].isfinite())
    gap = (rows[0][scored].float() - rows[1][scored].float()).abs().mean() / rows[1][scored].float().std()
    assert gap < 0.05  # eight bits beside bfloat16


def test_transformers_writes_as_the_compiled_code_does(folder, monkeypatch):
    """Catches pieces of a GPU's path (whole batches by transformers) that are of other rows, states or lengths."""
    target = Target(str(folder / "target"))
    prompts = [[5, 9, 7], [4, 8, 6, 11, 12, 20, 21], [*range(3, 28)]]
    found = []
    for backend in (NativeModel(target.model), EagerModel(target.model)):
        backend.max_length = 30
        monkeypatch.setattr(Target, "writer", backend)
        found.append(answered(target, prompts, Sampling(temperature=0.0), max_tokens=10, layer=2, seed=(0, 1)))
    assert [p.num_answer for p in found[1]][2] <= 5
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert a.num_prompt == b.num_prompt
        torch.testing.assert_close(a.state.float(), b.state.float(), rtol=0.02, atol=0.02)
        torch.testing.assert_close(a.log_p, b.log_p, rtol=0.01, atol=0.02)
        assert (a.top[:, 0] == b.top[:, 0]).all()


def test_a_small_model_may_be_the_start(folder, tmp_path):
    """Catches a start that is trained on states of the target, one with more rows of padding, and one of another tokenizer."""
    small = tiny_model("llama", seed=7, layers=1, hidden_size=16, head_dim=16)
    small.save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    more = {"shape": None, "start": str(tmp_path / "small"), "tokens": 4000}
    card = distil(plan_of(folder, tmp_path / "out", **more))
    assert card["draft"]["shape"] == {"kept": 0, "own": 1, "tokens": None}
    trained = load_model(tmp_path / "out" / "draft", dtype="auto", device=None, device_map=None)
    assert trained.config.hidden_size == 16
    target = Target(str(folder / "target"))
    pieces = pieces_of(tmp_path / "out")
    found = [measuring.agreement(target.model, draft, pieces) for draft in (small, trained)]
    assert found[1] > found[0] + 0.02
    padded = tiny_model("llama", seed=7, layers=1, hidden_size=16, head_dim=16, vocab_size=72)
    padded.save_pretrained(tmp_path / "padded")
    tiny_tokenizer().save_pretrained(tmp_path / "padded")
    given = {"start": str(tmp_path / "padded"), "shape": None, "tokens": 600}
    assert 0 < distil(plan_of(folder, tmp_path / "of_padded", **given))["acceptance"]["prompts"]["1"] < 1
    tiny_tokenizer(40).save_pretrained(tmp_path / "small")
    with pytest.raises(PairError):
        distil(plan_of(folder, tmp_path / "other", **more))


def test_a_draft_of_this_target_is_trained_further(folder, whole, tmp_path, monkeypatch):
    """Catches a second training that begins from the layers of the target again, or takes the draft for a small model."""
    begun, learn, first = whole / "draft", Trainer.learn, []

    def noted(self: Trainer, pieces: Any) -> Any:
        first.extend(p.detach().clone() for p in self.own if not self.step)
        return learn(self, pieces)

    monkeypatch.setattr(Trainer, "learn", noted)
    card = distil(plan_of(folder, tmp_path / "out", start=str(begun), shape=None, seed=1))
    assert card["draft"]["shape"] == {"kept": 1, "own": 1, "tokens": 40}
    assert card["start"]["name"] == "whole/draft"
    trained = network.tail(load_model(begun, dtype=torch.float32, device=None, device_map=None), 1)
    assert all(torch.equal(a, b) for a, b in zip(first, own_weights(trained), strict=True))
    target = Target(str(folder / "target"))
    assert network.shape_of(target.model, target.model) is None
