"""Loading two models as a pair, every reason to refuse one, and the Decoder on a pair of real (tiny) models."""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from specdecpp import (
    AcceptanceHead,
    Decoder,
    Fixed,
    HeadCard,
    HeadError,
    Pair,
    PairError,
    PairWarning,
    PromptError,
    RunnerError,
    SpecDecPP,
    load_pair,
)
from specdecpp.decoder import default_policy, run
from specdecpp.drafters import SuffixDrafter
from specdecpp.loading import fingerprints, models
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.policies import CostAware
from specdecpp.sampling import Sampling
from specdecpp.testing import save_tiny_pair, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A saved tiny target and draft; nobody may change them."""
    return save_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> Pair:
    return load_pair(folders[0], draft=folders[1])


@pytest.fixture
def draft_copy(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the draft, to be damaged."""
    return Path(shutil.copytree(folders[1], tmp_path / "draft"))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file in place."""
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def save_model(folder: Path, *, vocab_size: int = 64, num_tokens: int = 64, seed: int = 1, **config: Any) -> Path:
    """A tiny llama and a tokenizer of `num_tokens` ids in one folder."""
    tiny_model("llama", vocab_size=vocab_size, seed=seed, **config).save_pretrained(folder)
    tiny_tokenizer(num_tokens).save_pretrained(folder)
    return folder


# Loading


def test_a_pair_from_local_folders_carries_its_names_and_sizes(folders: tuple[Path, Path], pair: Pair) -> None:
    """Catches target and draft being swapped, and provenance that is lost."""
    assert (pair.target_name, pair.draft_name) == (str(folders[0]), str(folders[1]))
    assert pair.target_fingerprint != pair.draft_fingerprint
    assert pair.target.vocab_size == pair.draft.vocab_size == 64
    assert pair.ends == (1,)
    assert pair.head is None
    by_text = load_pair(str(folders[0]), draft=str(folders[1]))
    assert by_text.target_fingerprint == pair.target_fingerprint


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", torch.bfloat16), (torch.float64, torch.float64), ("float32", torch.float32), ("auto", torch.float32)],
)
def test_dtype_reaches_both_models(folders: tuple[Path, Path], dtype: Any, expected: torch.dtype) -> None:
    """Catches a dtype that is dropped on the way to transformers, or reaches the target alone."""
    pair = load_pair(folders[0], draft=folders[1], dtype=dtype)
    for runner in (pair.target, pair.draft):
        logits, hidden = runner.new_cache().extend([3, 4], rows=1)
        assert logits.dtype == hidden.dtype == expected


def test_an_unknown_dtype_is_a_pair_error(folders: tuple[Path, Path]) -> None:
    """Catches the AttributeError of transformers for a misspelt dtype."""
    with pytest.raises(PairError, match="bf17"):
        load_pair(folders[0], draft=folders[1], dtype="bf17")


def test_device_reaches_both_models(folders: tuple[Path, Path]) -> None:
    """Catches a device that is dropped or not understood as text."""
    pair = load_pair(folders[0], draft=folders[1], device="cpu")
    assert pair.target.device == pair.draft.device == torch.device("cpu")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="device_map needs accelerate")
def test_device_map_reaches_transformers(folders: tuple[Path, Path]) -> None:
    """Catches a device_map that is dropped or combined with model.to(), which transformers forbids."""
    pair = load_pair(folders[0], draft=folders[1], device_map="cpu")
    assert pair.target.device == torch.device("cpu")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is not None, reason="accelerate is installed")
def test_device_map_without_accelerate_says_what_to_install(folders: tuple[Path, Path]) -> None:
    """Catches an import error of transformers that escapes the tree, or loses its remedy."""
    with pytest.raises(PairError, match="pip install accelerate"):
        load_pair(folders[0], draft=folders[1], device_map="cpu")


def test_device_and_device_map_exclude_each_other(folders: tuple[Path, Path]) -> None:
    """Catches one of the two silently winning."""
    with pytest.raises(ValueError, match=r"device='cpu' and device_map='auto'.*Give one"):
        load_pair(folders[0], draft=folders[1], device="cpu", device_map="auto")


def test_naming_the_draft_alone_is_an_error(folders: tuple[Path, Path]) -> None:
    """Catches a pair of a named draft and the reference pair's target."""
    with pytest.raises(PairError, match=r"only the draft was named\. Name the target"):
        load_pair(draft=folders[1])


def test_a_target_alone_has_its_text_for_a_draft(folders: tuple[Path, Path]) -> None:
    """Catches a second model that is loaded unasked, a draft that nobody tells of, and a head without states to judge by."""
    pair = load_pair(folders[0])
    assert isinstance(pair.draft, SuffixDrafter)
    assert "suffix" in pair.draft_name
    assert pair.draft.vocab_size == pair.target.vocab_size
    assert default_policy(pair) == CostAware(max_tokens=64, prior=0.2)
    with pytest.raises(PairError, match=r"no draft.*Name the draft that it was trained for"):
        load_pair(folders[0], head="some/head")


@pytest.mark.parametrize("tokenizer", [None, tiny_tokenizer()], ids=["tokenizer of the folder", "tokenizer given"])
@pytest.mark.parametrize("form", [Path, str])
def test_a_missing_folder_is_named(folders: tuple[Path, Path], form: type, tokenizer: Any) -> None:
    """Catches the hub's misleading answer to a misspelt path."""
    missing = form(str(folders[0].parent / "tragte"))
    with pytest.raises(PairError, match=rf"there is no folder {missing}\."):
        load_pair(missing, draft=folders[1], tokenizer=tokenizer)
    with pytest.raises(PairError, match=rf"there is no folder {missing}\."):
        load_pair(folders[0], draft=missing, tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model"])
def test_a_hub_name_that_cannot_be_reached_is_a_pair_error(
    folders: tuple[Path, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches hub exceptions that escape the tree when the name is wrong or the network is down."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PairError, match=rf"no tokenizer could be loaded from {name} .*\. There is no folder {name} here\."):
        load_pair(folders[0], draft=name)
    with pytest.raises(
        PairError, match=rf"no causal language model could be loaded from {name} .*\. There is no folder {name} here\."
    ):
        load_pair(name, draft=folders[1], tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "no tokenizer could be loaded"),
        ("tokenizer.json", "{", "no tokenizer could be loaded"),
        ("tokenizer.json", '{"version": "1.0"}', "no tokenizer could be loaded"),
        ("tokenizer.json", None, "no tokenizer could be loaded"),
        ("model.safetensors", "not weights", "no causal language model could be loaded"),
        ("model.safetensors", None, "no causal language model could be loaded"),
    ],
)
def test_damaged_and_missing_files_are_pair_errors(
    folders: tuple[Path, Path], draft_copy: Path, file: str, content: str | None, message: str
) -> None:
    """Catches errors of json, tokenizers and safetensors that escape the tree or do not say which model."""
    if content is None:
        (draft_copy / file).unlink()
    else:
        (draft_copy / file).write_text(content, encoding="utf-8")
    with pytest.raises(PairError, match=f"{message} from {draft_copy} "):
        load_pair(folders[0], draft=draft_copy)


def test_weights_of_another_shape_are_a_pair_error(folders: tuple[Path, Path], draft_copy: Path) -> None:
    """Catches the RuntimeError of transformers for a config that does not fit the weights."""
    edit(draft_copy / "config.json", lambda c: c.update(hidden_size=48))
    with pytest.raises(PairError, match=f"no causal language model could be loaded from {draft_copy}"):
        load_pair(folders[0], draft=draft_copy)


def test_an_incomplete_checkpoint_is_refused(folders: tuple[Path, Path], draft_copy: Path) -> None:
    """Catches weights that transformers fills with random numbers, with no more than a log line."""
    weights = load_file(draft_copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, draft_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PairError, match=r"incomplete: 1 are missing, first model\.layers\.1\.mlp\.up_proj\.weight"):
        load_pair(folders[0], draft=draft_copy)


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"])
@pytest.mark.parametrize("value", [0, -1, 10**9, 2.5, "two", True])
def test_sizes_that_no_model_has_are_refused(folders: tuple[Path, Path], draft_copy: Path, field: str, value: Any) -> None:
    """Catches a model without layers that decodes, one with a billion that fills the memory, and a division by zero."""
    edit(draft_copy / "config.json", lambda c: c.update({field: value}))
    with pytest.raises(PairError, match=f"{draft_copy}"):
        load_pair(folders[0], draft=draft_copy)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_without_layers_is_refused(folders: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    """Catches the same where the weights agree with the config."""
    tiny_model(kind, layers=0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(PairError, match=r"says num_hidden_layers = 0 in its config\.json"):
        load_pair(folders[0], draft=tmp_path)


def test_weights_that_are_no_numbers_are_refused(folders: tuple[Path, Path], draft_copy: Path) -> None:
    """Catches a draft whose candidates are drawn from NaN."""
    weights = load_file(draft_copy / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, draft_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunnerError, match="no finite numbers"):
        load_pair(folders[0], draft=draft_copy, runner="eager")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma"])
def test_a_tied_output_layer_does_not_count_as_missing(kind: str, tmp_path: Path) -> None:
    """Catches a completeness check that refuses checkpoints whose output layer is the embedding."""
    model = tiny_model(kind, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_pair(tmp_path, draft=tmp_path).target_fingerprint == fingerprint(model)


def test_the_reason_of_a_recurrent_model_survives_loading(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches load_pair hiding why a runner refuses a model."""
    tiny_model("mamba").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RunnerError, match="recurrent state"):
        load_pair(folders[0], draft=tmp_path)


# One tokenizer


def test_different_vocabularies_are_refused_with_the_first_differing_ids(folders: tuple[Path, Path], draft_copy: Path) -> None:
    """Catches two tokenizers of one size being taken for one: the ids of 'a' and 'b' are exchanged here."""

    def exchange(values: Any) -> None:
        vocabulary = values["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    edit(draft_copy / "tokenizer.json", exchange)
    with pytest.raises(PairError, match=r"differ at 2 ids.*: id 4 is 'a' / 'b'; id 5 is 'b' / 'a'\."):
        load_pair(folders[0], draft=draft_copy)


def test_a_missing_token_is_named(folders: tuple[Path, Path], draft_copy: Path) -> None:
    """Catches a shorter vocabulary being taken for a padded one."""
    edit(draft_copy / "tokenizer.json", lambda values: values["model"]["vocab"].pop("N"))
    with pytest.raises(PairError, match=r"\(64 tokens\) and draft \(63 tokens\) differ at 1 .*id 63 is 'N' / missing"):
        load_pair(folders[0], draft=draft_copy)


@pytest.mark.parametrize(
    ("part", "value", "text", "ids"),
    [
        ("normalizer", {"type": "Lowercase"}, "'Hello world'", r"\[57, 8, 15, 15, 18\].*\[11, 8, 15, 15, 18\]"),
        ("pre_tokenizer", {"type": "WhitespaceSplit"}, "'Hello world'", r"\[57, 8, 15, 15, 18\].*\[2, 2\]"),
    ],
)
def test_one_vocabulary_but_another_way_to_split_is_refused(
    folders: tuple[Path, Path], draft_copy: Path, part: str, value: dict[str, str], text: str, ids: str
) -> None:
    """Catches tokenizers with equal tables whose ids for the same text differ."""
    edit(draft_copy / "tokenizer.json", lambda values: values.update({part: value}))
    with pytest.raises(PairError, match=rf"{text} becomes {ids} in the draft from token 0"):
        load_pair(folders[0], draft=draft_copy)


def test_another_end_token_is_refused(folders: tuple[Path, Path], draft_copy: Path) -> None:
    """Catches a draft that would end its texts with a token the target does not know as an end."""
    edit(draft_copy / "tokenizer_config.json", lambda values: values.update(eos_token="N"))
    with pytest.raises(PairError, match="eos_token_id: 1 in the target, 63 in the draft"):
        load_pair(folders[0], draft=draft_copy)


def test_another_padding_token_is_no_difference(folders: tuple[Path, Path], draft_copy: Path) -> None:
    """Catches a refusal for a token that decoding never uses; sizes of one family often pad differently."""
    edit(draft_copy / "tokenizer_config.json", lambda values: values.update(pad_token="N"))
    assert load_pair(folders[0], draft=draft_copy).tokenizer.pad_token is None


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma"])
def test_a_folder_without_a_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    """Catches the tokenizer that transformers makes up, for which every prompt is one start token."""
    tiny_model(kind).save_pretrained(tmp_path)
    with pytest.raises(PairError, match=rf"tokenizer of {tmp_path} cannot spell: 'Hello world' becomes .*Put those of"):
        load_pair(tmp_path, draft=tmp_path)
    assert load_pair(tmp_path, draft=tmp_path, tokenizer=tiny_tokenizer()).ends == (1,)


def test_a_tokenizer_that_knows_no_letter_is_refused(folders: tuple[Path, Path], draft_copy: Path) -> None:
    """Catches texts that become unknown tokens only."""
    edit(draft_copy / "tokenizer.json", lambda values: values["model"].update(vocab={"<s>": 0, "</s>": 1, "<unk>": 2}))
    with pytest.raises(PairError, match=r"cannot spell: 'Hello world' becomes \[2, 2,"):
        load_pair(draft_copy, draft=draft_copy)
    with pytest.raises(PairError, match=f"tokenizer of {draft_copy} cannot spell"):
        load_pair(folders[0], draft=draft_copy)


def test_a_tokenizer_of_something_else_than_language_is_taken(tmp_path: Path) -> None:
    """Catches a refusal of models of proteins, whose alphabet has no small letters and no blank."""
    tokenizer = tiny_tokenizer()

    def of_proteins(values: Any) -> None:
        values["model"]["vocab"] = {"<s>": 0, "</s>": 1, "<unk>": 2} | {c: i for i, c in enumerate("ACDEFGHIKLMNPQRSTVWY", 3)}

    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    edit(tmp_path / "tokenizer.json", of_proteins)
    assert load_pair(tmp_path, draft=tmp_path).tokenizer("GATTACA").input_ids == [8, 3, 19, 19, 3, 4, 3]


def test_one_tokenizer_is_read_once(folders: tuple[Path, Path], draft_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second of reading for files that are the same, and files that differ in a byte and are not read."""
    own, read = models.load_tokenizer, []
    monkeypatch.setattr(models, "load_tokenizer", lambda name: read.append(name) or own(name))
    load_pair(folders[0], draft=folders[1])
    assert read == [str(folders[0])]
    edit(draft_copy / "tokenizer_config.json", lambda values: values.update(pad_token="N"))
    load_pair(folders[0], draft=draft_copy)
    assert read[1:] == [str(folders[0]), str(draft_copy)]


# Padded vocabularies


def test_padded_vocabularies_are_cut_to_the_common_part(tmp_path: Path) -> None:
    """Catches p and q of different width: target 80 rows, draft 72, tokenizer 64 ids."""
    target = save_model(tmp_path / "target", vocab_size=80)
    draft = save_model(tmp_path / "draft", vocab_size=72, seed=2)
    pair = load_pair(target, draft=draft)
    assert pair.target.vocab_size == pair.draft.vocab_size == 72
    out = Decoder(pair, policy=Fixed(k=3)).generate("hello", max_tokens=100, seed=0, ignore_eos=True)
    assert len(out.tokens) == 100
    assert max(out.tokens) < 72
    assert any(t >= 64 for t in out.tokens), "ids past the tokenizer's must not break the text"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_with_fewer_rows_than_the_tokenizer_is_refused(folders: tuple[Path, Path], tmp_path: Path, role: str) -> None:
    """Catches a tokenizer of another model: its highest ids would be out of range."""
    small = save_model(tmp_path / "small", vocab_size=60)
    names = {"target": folders[0], "draft": folders[1]} | {role: small}
    with pytest.raises(PairError, match=f"the {role} scores 60 ids, but the tokenizer has ids up to 63"):
        load_pair(names["target"], draft=names["draft"])


def test_a_pair_of_runners_of_different_width_is_refused(pair: Pair) -> None:
    """Catches a pair built by hand whose p and q have different lengths."""
    from specdecpp import EagerRunner

    with pytest.raises(PairError, match="the target scores 64 ids and the draft 40"):
        replace(pair, draft=EagerRunner(tiny_model("llama"), vocab_size=40))


# Ends and fingerprints


def test_all_end_ids_of_the_generation_config_end_a_text(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches chat models that never stop, because only the tokenizer's own end id counts."""
    target = Path(shutil.copytree(folders[0], tmp_path / "target"))
    edit(target / "generation_config.json", lambda values: values.update(eos_token_id=[1, 7, 9]))
    assert load_pair(target, draft=folders[1]).ends == (1, 7, 9)


def test_without_an_end_id_in_the_model_the_tokenizer_names_it(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches a text without an end when the generation config is silent."""
    target = Path(shutil.copytree(folders[0], tmp_path / "target"))
    for file in ("generation_config.json", "config.json"):
        edit(target / file, lambda values: values.update(eos_token_id=None))
    assert load_pair(target, draft=folders[1]).ends == (1,)


@pytest.mark.parametrize(("named", "left"), [([1, 64, 9], (1, 9)), (128009, ()), ([-1, 1], (1,))])
def test_end_ids_outside_the_vocabulary_are_told(
    folders: tuple[Path, Path], tmp_path: Path, named: Any, left: tuple[int, ...]
) -> None:
    """Catches a text that never ends because its end id is that of another model, in silence."""
    target = Path(shutil.copytree(folders[0], tmp_path / "target"))
    edit(target / "generation_config.json", lambda values: values.update(eos_token_id=named))
    with pytest.warns(PairWarning, match="no other ends a text" if not left else r"are left\. Correct eos_token_id"):
        assert load_pair(target, draft=folders[1]).ends == left


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_the_fingerprint_does_not_depend_on_dtype_or_place(tmp_path: Path, saved: torch.dtype) -> None:
    """Catches a head refused for its own pair because that was loaded in another precision or moved."""
    for name in ("here", "there"):
        save_model(tmp_path / name)
        tiny_model("llama", seed=1).to(saved).save_pretrained(tmp_path / name)
    pairs = [load_pair(tmp_path / "here", draft=tmp_path / "there", dtype=d) for d in ("float32", "bfloat16")]
    prints = {p for pair in pairs for p in (pair.target_fingerprint, pair.draft_fingerprint)}
    assert len(prints) == 1
    assert len(prints.pop() or "") == 32


def test_the_fingerprint_tells_weights_apart() -> None:
    """Catches a fingerprint of the shapes alone, under which any two models of one architecture agree."""
    prints = {fingerprint(tiny_model("llama", seed=seed)) for seed in range(4)}
    assert len(prints) == 4
    tuned = tiny_model("llama", seed=0)
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight.mul_(1.02)
    assert fingerprint(tuned) not in prints


@pytest.mark.parametrize("at", [0, 16, 1000, -1])
def test_a_single_weight_changes_the_fingerprint(at: int) -> None:
    """Catches a fingerprint that reads some of the values: a head, or a copy as GGUF, of other weights would be taken."""
    model = tiny_model("llama")
    before = fingerprint(model), fingerprint(model, is_exact=True)
    values = model.model.layers[1].mlp.down_proj.weight.data.view(-1)
    values[at] *= 1.0001
    assert fingerprint(model) == before[0], "bfloat16 does not tell the two apart"
    assert fingerprint(model, is_exact=True) != before[1]
    values[at] *= 1.02
    assert fingerprint(model) != before[0]


def test_a_changed_file_has_another_fingerprint_in_the_same_process(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches a fingerprint that is remembered although the weights in the folder were replaced."""
    target = Path(shutil.copytree(folders[0], tmp_path / "target"))
    before = load_pair(target, draft=folders[1]).target_fingerprint
    weights = load_file(target / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] += 1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    after = load_pair(target, draft=folders[1]).target_fingerprint
    assert after != before


def test_the_fingerprint_is_remembered_for_the_state_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches weights that are read again at each load, and a memory that outlives a change of any of the files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_bytes(b"{}")
    files, made = fingerprints.weight_files(tmp_path), iter("abcdefgh")
    assert {path.name for path in files} == {"a.safetensors", "config.json"}

    def found() -> str:
        return fingerprints.remembered(files, lambda: next(made), dtype="auto")

    assert (found(), found()) == ("a", "b"), "files of this second may change again without another time"
    monkeypatch.setattr(fingerprints, "SETTLED_S", -1.0)
    assert (found(), found()) == ("c", "c")
    assert fingerprints.remembered(files, lambda: "z", dtype="float16") == "z"
    times = (tmp_path / "a.safetensors").stat()
    (tmp_path / "a.safetensors").write_bytes(b"WEIGHTS")
    os.utime(tmp_path / "a.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (found(), found()) == ("d", "d"), "same size, and the time put back"
    (tmp_path / "config.json").write_bytes(b"{ }")
    assert (found(), found()) == ("e", "e")
    assert fingerprints.remembered([], lambda: next(made), dtype="auto") == "f"
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    assert fingerprints.weight_files(tmp_path) == [], "weights of an adapter's base lie elsewhere"


def test_a_head_of_an_earlier_version_says_what_to_do(folders: tuple[Path, Path], pair: Pair, tmp_path: Path) -> None:
    """Catches heads of before that are called another pair's, or taken without a look."""
    AcceptanceHead(HeadCard(hidden_size=32, draft="0123456789abcdef")).save_pretrained(tmp_path)
    with pytest.raises(HeadError, match=rf"0123456789abcdef, which an earlier .*{pair.draft_fingerprint}.*head\.json"):
        load_pair(folders[0], draft=folders[1], head=tmp_path)
    edit(tmp_path / "head.json", lambda card: card.update(draft=pair.draft_fingerprint))
    assert load_pair(folders[0], draft=folders[1], head=tmp_path).head is not None


# Heads


def test_a_head_for_another_pair_is_refused_with_both_fingerprints(
    folders: tuple[Path, Path], pair: Pair, tmp_path: Path
) -> None:
    """Catches a head that silently judges a draft it never saw."""
    other = 2 * "0123456789abcdef"
    card = HeadCard(hidden_size=32, target=pair.target_fingerprint, draft=other)
    AcceptanceHead(card).save_pretrained(tmp_path)
    with pytest.raises(HeadError, match=rf"another draft.*{other}, this draft is {pair.draft_fingerprint}"):
        load_pair(folders[0], draft=folders[1], head=tmp_path)
    head = AcceptanceHead(HeadCard(hidden_size=32, target=other, draft=pair.draft_fingerprint))
    with pytest.raises(HeadError, match=rf"another target.*{other}, this target is {pair.target_fingerprint}"):
        Decoder(pair, policy=SpecDecPP(head=head))


def test_a_head_of_the_wrong_width_is_refused_with_both_widths(folders: tuple[Path, Path], pair: Pair, tmp_path: Path) -> None:
    """Catches a shape error in the middle of the first answer."""
    head = AcceptanceHead(HeadCard(hidden_size=24))
    head.save_pretrained(tmp_path)
    message = "of width 24, the draft has width 32"
    with pytest.raises(HeadError, match=message):
        load_pair(folders[0], draft=folders[1], head=tmp_path)
    with pytest.raises(HeadError, match=message):
        replace(pair, head=head)
    with pytest.raises(HeadError, match=message):
        Decoder(pair, policy=SpecDecPP(head=head))


def test_the_head_is_as_wide_as_the_draft_and_not_the_target(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches a head checked against, or fed from, the target when the two have different widths."""
    draft = save_model(tmp_path / "draft", hidden_size=16)
    AcceptanceHead(HeadCard(hidden_size=16, num_layers=1)).save_pretrained(tmp_path / "head")
    pair = load_pair(folders[0], draft=draft, head=tmp_path / "head")
    out = Decoder(pair).generate("hello", max_tokens=12, seed=0, ignore_eos=True)
    assert any(r.judged for r in out.rounds)


@pytest.mark.parametrize("stopping", [{}, {"threshold": 0.35, "min_tokens": 1}])
def test_a_pair_with_a_head_decodes_with_it(
    folders: tuple[Path, Path], pair: Pair, tmp_path: Path, stopping: dict[str, Any]
) -> None:
    """Catches a default that ignores the head, or how its card says to stop."""
    card = HeadCard(hidden_size=32, target=pair.target_fingerprint, draft=pair.draft_fingerprint, stopping=stopping)
    AcceptanceHead(card).save_pretrained(tmp_path)
    policy = Decoder(load_pair(folders[0], draft=folders[1], head=tmp_path)).policy
    assert isinstance(policy, SpecDecPP)
    assert (policy.threshold, policy.min_tokens) == ((0.35, 1) if stopping else (0.7, 2))


# The Decoder on real models


@pytest.fixture(scope="module")
def decoder(pair: Pair) -> Decoder:
    return Decoder(pair, policy=Fixed(k=3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_and_stream_agree(decoder: Decoder, temperature: float) -> None:
    """Catches a seed that is used differently, or text lost, on one of the two ways."""
    options: dict[str, Any] = {"max_tokens": 40, "seed": 7, "temperature": temperature, "ignore_eos": True}
    out = decoder.generate("hello you", **options)
    rounds = list(decoder.stream("hello you", **options))
    assert list(out.tokens) == [t for r in rounds for t in r.tokens]
    assert out.text == "".join(r.text for r in rounds)
    assert len(out.tokens) == 40
    assert [r.finish_reason for r in rounds] == [None] * (len(rounds) - 1) + ["length"]


def test_seeds_decide(decoder: Decoder) -> None:
    """Catches a seed that is ignored, and an unseeded request that is not random."""
    same = [decoder.generate("hello", max_tokens=30, seed=3).tokens for _ in range(2)]
    assert same[0] == same[1]
    options: list[dict[str, Any]] = [{"seed": 3}, {"seed": 4}, {}, {}]
    assert len({decoder.generate("hello", max_tokens=30, ignore_eos=True, **o).tokens for o in options}) == 4


def test_decoding_leaves_the_global_generator_alone(decoder: Decoder) -> None:
    """Catches a draw from torch's global generator: seeded requests would depend on what ran before."""
    before = torch.get_rng_state()
    decoder.generate("hello", max_tokens=20)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_string_ends_the_text_before_itself(decoder: Decoder, temperature: float) -> None:
    """Catches a stop string that is shown, missed across rounds, or found too late."""
    options: dict[str, Any] = {"max_tokens": 40, "seed": 5, "temperature": temperature, "ignore_eos": True}
    free = decoder.generate("hello", **options)
    for at in range(2, 30, 3):
        stop = free.text[at : at + 3]
        out = decoder.generate("hello", stop=[stop, "\u20ac"], **options)
        assert out.finish_reason == "stop"
        assert out.text == free.text[: free.text.find(stop)]
        assert out.tokens == free.tokens[: len(out.tokens)]
    assert decoder.generate("hello", stop=stop, **options).text == out.text, "a single string will do"


def test_ends_end_and_ignore_eos_ignores_them(pair: Pair) -> None:
    """Catches several end ids of which one counts, an end id in the text, and an option without effect."""
    decoder = Decoder(replace(pair, ends=(9, 30, 47)), policy=Fixed(k=3))
    found = set()
    for seed in range(30):
        out = decoder.generate("hello", max_tokens=60, seed=seed)
        if out.finish_reason == "eos":
            found.add(out.tokens[-1])
        assert not set(out.tokens[:-1]) & {9, 30, 47}
        assert (out.finish_reason == "eos") == (out.tokens[-1] in (9, 30, 47))
        assert len(out.text) == len(out.tokens) - (out.finish_reason == "eos") - sum(t < 3 for t in out.tokens)
    assert found == {9, 30, 47}
    ignoring = decoder.generate("hello", max_tokens=60, seed=0, ignore_eos=True)
    assert (len(ignoring.tokens), ignoring.finish_reason) == (60, "length")


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_starts_with_the_start_token(decoder: Decoder, prompt: str | list[int]) -> None:
    """Catches a forward pass over nothing."""
    assert decoder.start(prompt).tokens == [0]
    assert len(decoder.generate(prompt, max_tokens=5, seed=0, ignore_eos=True).tokens) == 5


def test_an_empty_prompt_without_a_start_token_is_an_error(pair: Pair) -> None:
    """Catches the same where the tokenizer has no start token to begin with."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(PromptError, match="no start token"):
        Decoder(replace(pair, tokenizer=tokenizer)).generate("")


def test_text_ids_and_messages_mean_the_same(pair: Pair) -> None:
    """Catches special tokens that one of the three forms of a prompt adds or drops."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role[0] }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %} a:{% endif %}"
    )
    decoder = Decoder(replace(pair, tokenizer=tokenizer))
    ids = decoder.start("<s>u: hi a:").tokens
    assert ids[0] == 0
    assert len(ids) == 9
    assert decoder.start(ids).tokens == ids
    assert decoder.start(tuple(ids)).tokens == ids
    assert decoder.start([{"role": "user", "content": "hi"}]).tokens == ids
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert decoder.start("u: hi a:").tokens == ids, "the tokenizer adds the start"
    assert decoder.start([{"role": "user", "content": "hi"}]).tokens == ids, "the template has added it"


def test_messages_without_a_template_are_an_error(decoder: Decoder) -> None:
    """Catches the jinja error of transformers, or a default template of another model."""
    with pytest.raises(PromptError, match="no chat template"):
        decoder.generate([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("token", [64, -1])
def test_an_id_outside_the_vocabulary_is_an_error(decoder: Decoder, token: int) -> None:
    """Catches an index error deep in the embedding, or a negative id that counts from the end."""
    with pytest.raises(PromptError, match=f"token id {token} is outside .* 64 ids"):
        decoder.generate([3, token, 4])


def test_an_unknown_option_is_a_type_error_that_lists_the_known_ones(decoder: Decoder) -> None:
    """Catches a misspelt option that is silently ignored."""
    with pytest.raises(TypeError, match=r"\['max_new_tokens'\].*'max_tokens'"):
        decoder.generate("hello", max_new_tokens=3)  # type: ignore[call-arg]


def test_every_option_of_sampling_reaches_the_session(decoder: Decoder) -> None:
    """Catches an option that is taken and forgotten."""
    asked: dict[str, Any] = {"temperature": 0.5, "top_k": 9, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.5}
    assert decoder.start("hello", **asked).sampling == Sampling(**asked)


def test_the_models_own_generation_config_is_the_default(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches sampling parameters that a model asks for and nobody follows, ones that overrule what was named, and a top-k
    that cannot be switched off."""
    target = Path(shutil.copytree(folders[0], tmp_path / "target"))
    edit(target / "generation_config.json", lambda config: config.update(temperature=0.6, top_k=20, top_p=0.95, do_sample=True))
    decoder = Decoder(load_pair(target, draft=folders[1]))
    own = Sampling(temperature=0.6, top_k=20, top_p=0.95)
    assert decoder.start("hello").sampling == own
    assert decoder.start("hello", temperature=None, top_k=None).sampling == own
    assert decoder.start("hello", temperature=1.0, top_k=0).sampling == Sampling(top_p=0.95)
    assert decoder.start("hello", sampling=Sampling()).sampling == Sampling()
    assert decoder.generate("hello", max_tokens=2).sampling == own
    with pytest.raises(ValueError, match=r"sampling says all of it, and top_p were given too"):
        decoder.start("hello", sampling=Sampling(), top_p=0.5)


def test_a_model_that_asks_for_nothing_is_sampled_as_it_is(decoder: Decoder) -> None:
    """Catches defaults of somebody else's, such as a top-k of 50 that no file names."""
    assert decoder.start("hello").sampling == Sampling()


def test_a_request_that_is_finished_at_once_reads_nothing(decoder: Decoder) -> None:
    """Catches a prompt that is read for an answer of no tokens."""
    session = decoder.start("hello", max_tokens=0)
    assert list(run(session)) == []
    assert (session.target.length, session.draft.length) == (0, 0)


def test_errors_come_before_the_first_round_of_a_stream(decoder: Decoder) -> None:
    """Catches a generator that raises only once it is iterated."""
    with pytest.raises(PromptError):
        decoder.stream([64])


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 7])
def test_max_tokens_is_exact(decoder: Decoder, max_tokens: int) -> None:
    """Catches a round that overshoots the limit, or candidates drafted that can never be used."""
    out = decoder.generate("hello", max_tokens=max_tokens, seed=1, ignore_eos=True)
    assert len(out.tokens) == max_tokens
    assert out.finish_reason == "length"
    left = max_tokens
    for r in out.rounds:
        assert r.num_drafted <= left - 1
        left -= len(r.pieces)


def test_a_negative_max_tokens_is_an_error(decoder: Decoder) -> None:
    """Catches a loop that never ends or an empty answer without a reason."""
    with pytest.raises(ValueError, match="max_tokens must be a whole number, at least 0, got -1"):
        decoder.generate("hello", max_tokens=-1)


def test_prompts_at_the_context_limit(decoder: Decoder) -> None:
    """Catches a position past the model's 256: the answer ends there, and a longer prompt is refused."""
    for length, expected in ((250, 6), (255, 1), (256, 0)):
        out = decoder.generate([5] * length, max_tokens=20, seed=0, ignore_eos=True)
        assert (len(out.tokens), out.finish_reason) == (expected, "length")
    with pytest.raises(PromptError, match="the prompt has 257 tokens, the target's context holds 256"):
        decoder.generate([5] * 257)


def test_a_draft_with_a_shorter_context_stops_drafting_at_its_end(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches a crash, or an answer cut short, where the draft's learned positions end before the target's."""
    draft = tmp_path / "draft"
    tiny_model("gpt2", seed=2, n_positions=16).save_pretrained(draft)
    tiny_tokenizer().save_pretrained(draft)
    decoder = Decoder(load_pair(folders[0], draft=draft), policy=Fixed(k=4))
    out = decoder.generate([5] * 8, max_tokens=30, temperature=0.0, ignore_eos=True)
    alone = Decoder(decoder.pair, policy=Fixed(k=0)).generate([5] * 8, max_tokens=30, temperature=0.0, ignore_eos=True)
    assert out.tokens == alone.tokens
    assert len(out.tokens) == 30
    assert out.rounds[0].num_drafted == 4
    assert out.rounds[-1].num_drafted == 0
    long = decoder.generate([5] * 20, max_tokens=5, seed=0, ignore_eos=True)
    assert (len(long.tokens), long.metrics.num_draft_tokens) == (5, 0)
