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

import specdecpp as sd
from specdecpp.backends import EagerModel
from specdecpp.decoder import default_policy
from specdecpp.drafters import SuffixDrafter
from specdecpp.head import HeadCard
from specdecpp.loading import fingerprints, models
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.policies import CostAware
from specdecpp.sampling import Sampling
from specdecpp.testing import save_tiny_pair, tiny_model, tiny_tokenizer

Folders = tuple[Path, Path]
Change = Callable[[Path], Any]
"""A change of the files of a saved model."""
has_accelerate = importlib.util.find_spec("accelerate") is not None


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A saved tiny target and draft; nobody may change them."""
    return save_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(folders: Folders) -> sd.Pair:
    return sd.load_pair(folders[0], draft=folders[1])


@pytest.fixture
def copied(folders: Folders, tmp_path: Path) -> Folders:
    """Copies of both, to be changed."""
    target, draft = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in folders)
    return target, draft


def edited(file: str, change: Callable[[Any], Any]) -> Change:
    """A change of what a JSON file holds."""

    def changed(folder: Path) -> None:
        values = json.loads((folder / file).read_text(encoding="utf-8"))
        change(values)
        (folder / file).write_text(json.dumps(values), encoding="utf-8")

    return changed


def setting(file: str, **values: Any) -> Change:
    return edited(file, lambda found: found.update(values))


def vocabulary(change: Callable[[dict[str, int]], Any]) -> Change:
    return edited("tokenizer.json", lambda found: change(found["model"]["vocab"]))


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def changed(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return changed


def file(name: str, content: str | None) -> Change:
    """Another content of a file; None removes it."""
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_text(content)


def save_model(folder: Path, *, kind: str = "llama", num_tokens: int = 64, **config: Any) -> Path:
    """A tiny model and a tokenizer of `num_tokens` ids in one folder."""
    tiny_model(kind, **({"seed": 1} | config)).save_pretrained(folder)
    tiny_tokenizer(num_tokens).save_pretrained(folder)
    return folder


# Loading


def test_a_pair_from_local_folders_carries_its_names_and_sizes(folders: Folders, pair: sd.Pair) -> None:
    """Catches target and draft being swapped, and provenance that is lost."""
    assert (pair.target_name, pair.draft_name) == (str(folders[0]), str(folders[1]))
    assert pair.target_fingerprint != pair.draft_fingerprint
    assert pair.target.vocab_size == pair.draft.vocab_size == 64
    assert sd.load_pair(str(folders[0]), draft=str(folders[1]), device="cpu").target_fingerprint == pair.target_fingerprint


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", torch.bfloat16), (torch.float64, torch.float64), ("auto", torch.float32)]
)
def test_dtype_reaches_both_models(folders: Folders, dtype: Any, expected: torch.dtype) -> None:
    """Catches a dtype that is dropped on the way to transformers, or reaches the target alone."""
    pair = sd.load_pair(folders[0], draft=folders[1], dtype=dtype)
    for backend in (pair.target, pair.draft):
        logits, hidden = backend.new_cache().extend([3, 4], rows=1)
        assert logits.dtype == hidden.dtype == expected


def test_device_map_goes_to_transformers(folders: Folders) -> None:
    """Catches a device_map that is dropped or combined with model.to(), and an import error that loses its remedy."""
    if has_accelerate:
        assert sd.load_pair(folders[0], draft=folders[1], device_map="cpu").target.device == torch.device("cpu")
    else:
        with pytest.raises(sd.PairError, match="pip install accelerate"):
            sd.load_pair(folders[0], draft=folders[1], device_map="cpu")


def test_arguments_that_clash(folders: Folders) -> None:
    """Catches one of two that silently wins, a misspelt dtype, and a named draft beside the reference pair's target."""
    target, draft = folders
    with pytest.raises(sd.PairError, match="bf17"):
        sd.load_pair(target, draft=draft, dtype="bf17")
    with pytest.raises(ValueError, match=r"device='cpu' and device_map='auto'.*Give one"):
        sd.load_pair(target, draft=draft, device="cpu", device_map="auto")
    with pytest.raises(sd.PairError, match=r"only the draft was named\. Name the target"):
        sd.load_pair(draft=draft)
    with pytest.raises(sd.PairError, match=r"no draft.*Name the draft that it was trained for"):
        sd.load_pair(target, head="some/head")


def test_a_target_alone_has_its_text_for_a_draft(folders: Folders) -> None:
    """Catches a second model that is loaded unasked, and a draft that nobody tells of."""
    pair = sd.load_pair(folders[0])
    assert isinstance(pair.draft, SuffixDrafter)
    assert "suffix" in pair.draft_name
    assert pair.draft.vocab_size == pair.target.vocab_size
    assert default_policy(pair) == CostAware(max_tokens=64, prior=0.2)


@pytest.mark.parametrize("form", [Path, str])
def test_a_missing_folder_is_named(folders: Folders, form: type) -> None:
    """Catches the hub's misleading answer to a misspelt path."""
    missing = form(str(folders[0].parent / "tragte"))
    for names, tokenizer in (((missing, folders[1]), None), ((folders[0], missing), tiny_tokenizer())):
        with pytest.raises(sd.PairError, match=rf"there is no folder {missing}\."):
            sd.load_pair(names[0], draft=names[1], tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model"])
def test_a_hub_name_that_cannot_be_reached(folders: Folders, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches hub exceptions that escape the tree when the name is wrong or the network is down."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    where = rf"could be loaded from {name} .*\. There is no folder {name} here, and the hub did not give it\."
    with pytest.raises(sd.PairError, match=f"no tokenizer {where}"):
        sd.load_pair(folders[0], draft=name)
    with pytest.raises(sd.PairError, match=f"no causal language model {where}"):
        sd.load_pair(name, draft=folders[1], tokenizer=tiny_tokenizer())


def exchanged(vocab: dict[str, int]) -> None:
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def without_letters(vocab: dict[str, int]) -> None:
    for token in vocab.keys() - {"<s>", "</s>", "<unk>"}:
        del vocab[token]


NO_TOKENIZER, NO_MODEL = "no tokenizer could be loaded from", "no causal language model could be loaded from"
SPLIT = r"'Hello world' becomes \[57, 8, 15, 15, 18\].*{} in the draft from token 0"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (file("config.json", "{"), NO_MODEL),
        (file("tokenizer.json", "{"), NO_TOKENIZER),
        (file("tokenizer.json", None), NO_TOKENIZER),
        (file("model.safetensors", "not weights"), NO_MODEL),
        (file("model.safetensors", None), NO_MODEL),
        (weights(lambda found: found.pop("model.layers.1.mlp.up_proj.weight")), "incomplete: 1 are missing, first model.lay"),
        (weights(lambda found: found["model.norm.weight"].fill_(float("nan"))), "no finite numbers"),
        (lambda folder: save_model(folder, layers=0), "its cache holds 0"),
        (vocabulary(exchanged), r"differ at 2 ids.*: id 4 is 'a' / 'b'; id 5 is 'b' / 'a'\."),
        (vocabulary(lambda vocab: vocab.pop("N")), r"\(63 tokens\) differ at 1 .*id 63 is 'N' / missing"),
        (vocabulary(without_letters), r"tokenizer of .* cannot spell: 'Hello world' becomes \[2, 2,"),
        (setting("tokenizer.json", normalizer={"type": "Lowercase"}), SPLIT.format(r"\[11, 8, 15, 15, 18\]")),
        (setting("tokenizer.json", pre_tokenizer={"type": "WhitespaceSplit"}), SPLIT.format(r"\[2, 2\]")),
    ],
)
def test_a_draft_that_is_damaged_or_does_not_fit_is_refused(folders: Folders, copied: Folders, spoil: Change, why: str) -> None:
    """Catches errors of json, tokenizers, safetensors and transformers that escape the tree or do not say which model; weights
    that transformers fills with random numbers; a model without layers, which decodes; draft tokens drawn from NaN; and
    tokenizers that are taken for one as their sizes, or their tables, are equal."""
    spoil(copied[1])
    where = f" {copied[1]}" if why in (NO_TOKENIZER, NO_MODEL) else ""
    with pytest.raises((sd.PairError, sd.BackendError), match=why + where):
        sd.load_pair(folders[0], draft=copied[1], backend="eager")


# One tokenizer


@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_a_folder_without_a_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    """Catches the tokenizer that transformers makes up, for which every prompt is one start token."""
    tiny_model(kind).save_pretrained(tmp_path)
    with pytest.raises(sd.PairError, match=rf"tokenizer of {tmp_path} cannot spell: 'Hello world' becomes .*Put those of"):
        sd.load_pair(tmp_path, draft=tmp_path)
    assert sd.load_pair(tmp_path, draft=tmp_path, tokenizer=tiny_tokenizer()).ends == (1,)


def test_one_tokenizer_is_read_once(folders: Folders, copied: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second of reading for files that are the same, files that differ in a byte and are not read, and a refusal for
    another end or padding, which a draft is never asked for."""
    own, read = models.load_tokenizer, []
    monkeypatch.setattr(models, "load_tokenizer", lambda name: read.append(name) or own(name))
    sd.load_pair(folders[0], draft=folders[1])
    assert read == [str(folders[0])]
    setting("tokenizer_config.json", pad_token="N", eos_token="M")(copied[1])
    assert sd.load_pair(folders[0], draft=copied[1]).ends == (1,)
    assert read[1:] == [str(folders[0]), str(copied[1])]


# Padded vocabularies


def test_padded_vocabularies_are_cut_to_the_common_part(tmp_path: Path) -> None:
    """Catches p and q of different width: target 80 rows, draft 72, tokenizer 64 ids."""
    target = save_model(tmp_path / "target", vocab_size=80)
    draft = save_model(tmp_path / "draft", vocab_size=72, seed=2)
    pair = sd.load_pair(target, draft=draft)
    assert pair.target.vocab_size == pair.draft.vocab_size == 72
    out = sd.Decoder(pair, policy=sd.Fixed(k=3)).generate("hello", max_tokens=100, seed=0, ignore_eos=True)
    assert len(out.tokens) == 100
    assert max(out.tokens) < 72
    assert any(t >= 64 for t in out.tokens), "ids past the tokenizer's must not break the text"


def test_models_of_the_wrong_width_are_refused(folders: Folders, pair: sd.Pair, tmp_path: Path) -> None:
    """Catches a tokenizer of another model, whose highest ids would be out of range, and p and q of different lengths."""
    small = save_model(tmp_path / "small", vocab_size=60)
    for role, names in (("target", (small, folders[1])), ("draft", (folders[0], small))):
        with pytest.raises(sd.PairError, match=f"the {role} scores 60 ids, but the tokenizer has ids up to 63"):
            sd.load_pair(names[0], draft=names[1])
    with pytest.raises(sd.PairError, match="the target scores 64 ids and the draft 40"):
        replace(pair, draft=EagerModel(tiny_model("llama"), vocab_size=40))


# Ends and fingerprints


@pytest.mark.parametrize(
    ("named", "ends"), [([1, 7, 9], (1, 7, 9)), (None, (1,)), ([1, 64, 9], (1, 9)), (128009, ()), ([-1, 1], (1,))]
)
def test_the_ids_that_end_a_text(folders: Folders, copied: Folders, named: Any, ends: Any, caplog: Any) -> None:
    """Catches chat models that never stop as only the tokenizer's own end counts, a text without an end where the model names
    none, and one that never ends, in silence, because its end id is that of another model."""
    for name in ("generation_config.json", "config.json") if named is None else ("generation_config.json",):
        setting(name, eos_token_id=named)(copied[0])
    assert sd.load_pair(copied[0], draft=folders[1]).ends == ends
    assert ("the models have ids up to 63" in caplog.text) == (named not in ([1, 7, 9], None))


def test_the_fingerprint_does_not_depend_on_dtype_or_place(tmp_path: Path) -> None:
    """Catches a head refused for its own pair because that was loaded in another precision or moved, and a completeness check
    that refuses checkpoints whose output layer is the embedding."""
    for name, saved in (("here", torch.bfloat16), ("there", torch.float32)):
        save_model(tmp_path / name, tie_word_embeddings=True)
        tiny_model("llama", seed=1, tie_word_embeddings=True).to(saved).save_pretrained(tmp_path / name)
    pairs = [sd.load_pair(tmp_path / "here", draft=tmp_path / "there", dtype=d) for d in ("float32", "bfloat16")]
    prints = {p for pair in pairs for p in (pair.target_fingerprint, pair.draft_fingerprint)}
    assert prints == {fingerprint(tiny_model("llama", seed=1, tie_word_embeddings=True))}


def test_a_single_weight_changes_the_fingerprint() -> None:
    """Catches a fingerprint of the shapes alone, or one that reads some of the values: a head of other weights would fit."""
    model = tiny_model("llama")
    values = model.model.layers[1].mlp.down_proj.weight.data.view(-1)
    for at in (0, 1000):
        before = fingerprint(model)
        values[at] *= 1.0001
        assert fingerprint(model) == before, "bfloat16 does not tell the two apart"
        values[at] *= 1.02
        assert fingerprint(model) != before


def test_the_fingerprint_is_remembered_for_the_state_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches weights that are read again at each load, and a memory that outlives a change of any of the files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"weights")
    (tmp_path / "config.json").write_bytes(b"{}")
    files, made = fingerprints.weight_files(tmp_path), iter("abcdefgh")
    assert {path.name for path in files} == {"a.safetensors", "config.json"}

    def found(dtype: str = "auto") -> str:
        return fingerprints.remembered(files, lambda: next(made), dtype=dtype)

    assert (found(), found()) == ("a", "b"), "files of this second may change again without another time"
    monkeypatch.setattr(fingerprints, "SETTLED_S", -1.0)
    assert (found(), found(), found("float16")) == ("c", "c", "d")
    times = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (found(), found()) == ("e", "e"), "same size, and the time put back"
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    assert fingerprints.weight_files(tmp_path) == [], "weights of an adapter's base lie elsewhere"


# Heads


def test_a_head_that_does_not_fit_is_refused(folders: Folders, pair: sd.Pair, tmp_path: Path) -> None:
    """Catches a head that silently judges a draft it never saw, and a shape error in the middle of the first answer."""
    other = 2 * "0123456789abcdef"
    cards: tuple[tuple[dict[str, Any], str], ...] = (
        ({"draft": other}, rf"another draft.*{other}, this draft is {pair.draft_fingerprint}"),
        ({"target": other}, rf"another target.*{other}, this target is {pair.target_fingerprint}"),
        ({"hidden_size": 24}, "of width 24, the draft has width 32"),
    )
    for said, message in cards:
        fitting = HeadCard(hidden_size=32, target=pair.target_fingerprint, draft=pair.draft_fingerprint)
        head = sd.AcceptanceHead(replace(fitting, **said))
        head.save_pretrained(tmp_path)
        with pytest.raises(sd.HeadError, match=message):
            sd.load_pair(folders[0], draft=folders[1], head=tmp_path)
        with pytest.raises(sd.HeadError, match=message):
            sd.Decoder(pair, policy=sd.SpecDecPP(head=head))


def test_the_head_is_as_wide_as_the_draft_and_not_the_target(folders: Folders, tmp_path: Path) -> None:
    """Catches a head checked against, or fed from, the target when the two have different widths."""
    draft = save_model(tmp_path / "draft", hidden_size=16)
    sd.AcceptanceHead(HeadCard(hidden_size=16, num_layers=1)).save_pretrained(tmp_path / "head")
    pair = sd.load_pair(folders[0], draft=draft, head=tmp_path / "head")
    out = sd.Decoder(pair).generate("hello", max_tokens=12, seed=0, ignore_eos=True)
    assert any(r.judged for r in out.steps)


def test_what_ships_decodes_by_q_and_keeps_its_head_for_rules_that_name_one() -> None:
    """Catches a default that pays for a head which is worth nothing by the clock."""
    pair = sd.load_pair("reference")
    assert default_policy(pair) == sd.CostAware()
    assert sd.Decoder(pair, policy="cost-aware").policy == sd.CostAware(head=pair.head)


@pytest.mark.parametrize("stopping", [{}, {"threshold": 0.35, "min_tokens": 1}])
def test_a_pair_with_a_head_decodes_with_it(folders: Folders, pair: sd.Pair, tmp_path: Path, stopping: dict[str, Any]) -> None:
    """Catches a default that ignores the head, or how its card says to stop."""
    card = HeadCard(hidden_size=32, target=pair.target_fingerprint, draft=pair.draft_fingerprint, stopping=stopping)
    sd.AcceptanceHead(card).save_pretrained(tmp_path)
    policy = sd.Decoder(sd.load_pair(folders[0], draft=folders[1], head=tmp_path)).policy
    assert isinstance(policy, sd.SpecDecPP)
    assert (policy.threshold, policy.min_tokens) == ((0.35, 1) if stopping else (0.7, 2))


# The Decoder on real models


@pytest.fixture(scope="module")
def decoder(pair: sd.Pair) -> sd.Decoder:
    return sd.Decoder(pair, policy=sd.Fixed(k=3))


def test_seeds_decide(decoder: sd.Decoder) -> None:
    """Catches a seed that is ignored, an unseeded request that is not random, and a draw from torch's global generator."""
    before = torch.get_rng_state()
    same = [decoder.generate("hello", max_tokens=30, seed=3).tokens for _ in range(2)]
    assert same[0] == same[1]
    options: list[dict[str, Any]] = [{"seed": 3}, {"seed": 4}, {}, {}]
    assert len({decoder.generate("hello", max_tokens=30, ignore_eos=True, **o).tokens for o in options}) == 4
    assert torch.equal(before, torch.get_rng_state())


def test_text_ids_and_messages_mean_the_same(pair: sd.Pair) -> None:
    """Catches special tokens that one of the three forms of a prompt adds or drops."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role[0] }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %} a:{% endif %}"
    )
    decoder = sd.Decoder(replace(pair, tokenizer=tokenizer))
    ids = decoder.start("<s>u: hi a:").tokens
    assert ids[0] == 0
    assert len(ids) == 9
    assert decoder.start(ids).tokens == ids
    assert decoder.start(tuple(ids)).tokens == ids
    assert decoder.start([{"role": "user", "content": "hi"}]).tokens == ids
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert decoder.start("u: hi a:").tokens == ids, "the tokenizer adds the start"
    assert decoder.start([{"role": "user", "content": "hi"}]).tokens == ids, "the template has added it"


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_starts_with_the_start_token(pair: sd.Pair, decoder: sd.Decoder, prompt: str | list[int]) -> None:
    """Catches a forward pass over nothing, also where the tokenizer has no start token to begin with."""
    assert decoder.start(prompt).tokens == [0]
    assert len(decoder.generate(prompt, max_tokens=5, seed=0, ignore_eos=True).tokens) == 5
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(sd.PromptError, match="no start token"):
        sd.Decoder(replace(pair, tokenizer=tokenizer)).generate(prompt)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "why"),
    [
        ([{"role": "user", "content": "hi"}], {}, sd.PromptError, "no chat template"),
        ([3, 64, 4], {}, sd.PromptError, "token id 64 is outside .* 64 ids"),
        ([3, -1, 4], {}, sd.PromptError, "token id -1 is outside .* 64 ids"),
        ([5] * 257, {}, sd.PromptError, "the prompt has 257 tokens, the target's context holds 256"),
        ("hello", {"max_new_tokens": 3}, TypeError, r"\['max_new_tokens'\].*'max_tokens'"),
        ("hello", {"sampling": Sampling(), "top_p": 0.5}, ValueError, "sampling says all of it, and top_p were given too"),
    ],
)
def test_requests_that_cannot_be_decoded(decoder: sd.Decoder, prompt: Any, options: Any, error: Any, why: str) -> None:
    """Catches errors of jinja or of an embedding, a negative id that counts from the end, an option that is silently ignored,
    and a generator that raises only once it is iterated."""
    for ask in (decoder.generate, decoder.stream):
        with pytest.raises(error, match=why):
            ask(prompt, **options)


def test_the_models_own_generation_config_is_the_default(folders: Folders, copied: Folders) -> None:
    """Catches sampling parameters that a model asks for and nobody follows, ones that overrule what was named, an option
    that is forgotten, and a top-k that cannot be switched off."""
    setting("generation_config.json", temperature=0.6, top_k=20, top_p=0.95, do_sample=True)(copied[0])
    decoder = sd.Decoder(sd.load_pair(copied[0], draft=folders[1]))
    own = Sampling(temperature=0.6, top_k=20, top_p=0.95)
    asked: dict[str, Any] = {"temperature": 0.5, "top_k": 9, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.5}
    assert decoder.start("hello", **asked).sampling == Sampling(**asked)
    assert decoder.start("hello").sampling == own
    assert decoder.start("hello", temperature=None, top_k=None).sampling == own
    assert decoder.start("hello", temperature=1.0, top_k=0).sampling == Sampling(top_p=0.95)
    assert decoder.start("hello", sampling=Sampling()).sampling == Sampling()
    assert decoder.generate("hello", max_tokens=2).sampling == own
