"""GGUF files without llama.cpp: the very model and tokenizer that were written, by every backend, or a sentence."""

import os
import resource
import shutil
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fuzz_gguf import mutated
from gguf_files import LLAMA3, SIZE, TOKENIZER, Change, add, model_of, rewritten, values, written
from quantised import fabricated

import specdecpp as sd
from specdecpp.decoder import encode
from specdecpp.errors import BackendError, MissingExtraError, PairError, SpecdecError
from specdecpp.loading import fingerprints
from specdecpp.loading import gguf as files
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_header import Header, opened
from specdecpp.loading.gguf_reading import SIZES, Stored, digest_of
from specdecpp.loading.gguf_tokenizer import ends_of, tokenizer_of
from specdecpp.loading.gguf_writing import new_file
from specdecpp.loading.pair import load_pair
from specdecpp.loading.tokenizers import PROBES
from specdecpp.testing import tiny_draft

IDS = torch.arange(1, 40)[None]


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target.gguf in int8, draft.gguf a noisy copy in float32."""
    folder, target = tmp_path_factory.mktemp("gguf"), model_of()
    written(folder / "target.gguf", target, "q8_0")
    written(folder / "draft.gguf", tiny_draft(target))
    return folder


@pytest.fixture
def changed(sound: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """The target's file again, after a change."""
    return lambda change: rewritten(sound / "target.gguf", tmp_path / "m.gguf", change=change)


# Weights


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_the_model_is_the_one_that_was_written(kind: str, config: dict[str, Any], tmp_path: Path):
    """Catches rows of q and k in llama.cpp's order, lost biases, norms, ties and rotary factors, another epsilon or base."""
    model = model_of(kind, **config)
    source = GGUF(written(tmp_path / "m.gguf", model))
    assert {p.device.type for p in source.skeleton.parameters()} == {"meta"}
    assert torch.allclose(source.skeleton.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-6)
    assert set(source.stored) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(source.stored[name].dequantised(), parameter), name
    assert torch.allclose(logits_of(source.model), logits_of(model), atol=1e-5)


@pytest.mark.parametrize("precision", ["f16", "q8_0", "q4_1"])
def test_rows_stay_packed_and_are_those_of_transformers(precision: str, tmp_path: Path):
    """Catches rows that are moved apart from their scales, and a type that is taken for another."""
    narrow = GGUF(written(tmp_path / "n.gguf", model_of(hidden_size=48), "q8_0")).stored
    assert narrow["model.embed_tokens.weight"].kind == "F16", "48 values fill no blocks of 32"
    assert narrow["model.layers.0.mlp.down_proj.weight"].kind == "Q8_0"
    model = model_of()
    for name, stored in GGUF(written(tmp_path / "m.gguf", model, precision)).stored.items():
        exact = model.get_parameter(name).detach().numpy()
        kind = gguf.GGMLQuantizationType[stored.kind]
        assert stored.kind == (
            "F32" if exact.ndim == 1 else "Q8_0" if "q4" in precision and exact.shape[0] == SIZE else precision.upper()
        )
        assert stored.data.dtype == np.uint8
        assert stored.data.shape[0] == (1 if exact.ndim == 1 else exact.shape[0])
        assert np.array_equal(
            stored.dequantised().numpy(), gguf.dequantize(gguf.quantize(exact, kind), kind).reshape(exact.shape)
        )


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_of_256_arrive(kind: str, tmp_path: Path):
    """Catches rows of larger blocks that are counted as smaller ones; the values are random, the shapes those of a model."""
    written(tmp_path / "f.gguf", model_of(hidden_size=256, intermediate_size=512))
    made = {}

    def change(both: dict[str, Any]) -> None:
        for i, (name, stored) in enumerate(both["tensors"].items()):
            if len(stored.shape) == 2:
                made[name] = both["tensors"][name] = fabricated(kind, *stored.shape, seed=i)

    source = GGUF(rewritten(tmp_path / "f.gguf", tmp_path / "m.gguf", change=change))
    found = source.stored["model.layers.1.mlp.down_proj.weight"]
    assert found.kind == kind
    assert torch.equal(found.dequantised(), made["blk.1.ffn_down.weight"].dequantised())
    q = made["blk.0.attn_q.weight"].dequantised()
    put_back = q.reshape(source.skeleton.config.num_attention_heads, -1, 2, 256).transpose(1, 2).reshape(q.shape)
    assert torch.equal(source.stored["model.layers.0.self_attn.q_proj.weight"].dequantised(), put_back)


@pytest.mark.parametrize(("kind", "window"), [("gemma3", 4096), ("gemma3", 8), ("phi3", None)])
def test_other_families_are_read(kind: str, window: int | None, tmp_path: Path):
    """Catches Gemma's norms without the 1 that was added, its second base and window, and Phi's joined rows."""
    config = {"head_dim": 16, "sliding_window": window, "query_pre_attn_scalar": 16} if window else {}
    model = model_of("gemma3_text" if window else kind, **config)
    c, tensors = model.config, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], c.num_hidden_layers)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy() + np.float32(1 if window and "norm" in name else 0)
        own = str(names.get_name(name, try_suffixes=(".weight",)))
        tensors[own] = Stored("F32", values.shape, values.reshape(-1, values.shape[-1]).view(np.uint8))
    told = {key: getattr(c, field) for key, field in SIZES.items()} | {
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": c.rope_parameters.get("full_attention", c.rope_parameters)["rope_theta"],
        "attention.sliding_window": window,
    }
    with new_file(tmp_path / "m.gguf", kind, tensors) as writer:
        for key, value in told.items():
            add(writer, f"{kind}.{key}", value)
    assert torch.allclose(logits_of(GGUF(tmp_path / "m.gguf").model), logits_of(model), atol=1e-4)


def test_parts_of_a_file_are_one(sound: Path, tmp_path: Path):
    """Catches a model of the first part's tensors only, a part of another file, and a later part named as the model."""
    names = list(Header(sound / "target.gguf").tensors)
    for i, own in enumerate((names[:7], names[7:])):

        def change(both: dict[str, Any], i: int = i, own: list[str] = own) -> None:
            both["tensors"] = {name: both["tensors"][name] for name in own}
            kept = both["values"] if i == 0 else {"general.architecture": both["values"]["general.architecture"]}
            both["values"] = kept | {"split.no": i, "split.count": 2}

        rewritten(sound / "target.gguf", tmp_path / f"m-{i + 1:05}-of-00002.gguf", change=change)
    first, second = sorted(tmp_path.glob("m-*.gguf"))
    assert torch.equal(logits_of(GGUF(first).model), logits_of(GGUF(sound / "target.gguf").model))
    shutil.copy(first, tmp_path / "other.gguf")
    for path in (second, tmp_path / "other.gguf"):
        with pytest.raises(BackendError, match=r"is one of 2 parts.*Name the first"):
            GGUF(path)
    shutil.copy(first, second)
    with pytest.raises(BackendError, match="is not part 2 of 2"):
        opened(first)
    second.unlink()
    with pytest.raises(BackendError, match=r"there is no file .*m-00002-of-00002"):
        opened(first)


# Words


def ids_of(tokenizer: Any, texts: tuple[str, ...] = PROBES) -> list[list[int]]:
    return [tokenizer(text).input_ids for text in texts]


def test_the_tokenizer_comes_back_without_its_json(changed: Callable[[Change], Path]):
    """Catches another way to cut texts, special tokens read as text, and a lost start token or chat template."""
    tokenizer = GGUF(changed(values("tokenizer.huggingface.json"))).tokenizer()
    texts = (*PROBES, "<|user|>\nhi</s>", "a  \n\n b", "")
    found = ids_of(tokenizer, texts)
    assert found == ids_of(TOKENIZER, texts)
    assert [tokenizer.decode(ids) for ids in found] == [TOKENIZER.decode(ids) for ids in found]
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id)


def test_a_tokenizer_beside_the_file_is_taken(changed: Callable[[Change], Path], tmp_path: Path):
    """Catches keys of GGUF preferred to the tokenizer itself."""
    path = changed(values("tokenizer.huggingface.json", tokenizer__ggml__pre="unheard-of"))
    with pytest.raises(BackendError, match=r"cuts texts in a way called 'unheard-of'.*tokenizer.json of its checkpoint beside"):
        GGUF(path).tokenizer()
    TOKENIZER.save_pretrained(tmp_path)
    assert ids_of(GGUF(path).tokenizer()) == ids_of(TOKENIZER)


LETTERS = "▁abcdehlorstw"
WORDS = ["▁h", "el", "lo", "hel", "▁hel", "▁hello", "or", "▁w", "▁wor", "he", "ll", "▁he"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *LETTERS, *WORDS, "<end>"]


def spm_file(path: Path, **keys: Any) -> Header:
    said = {
        "model": "llama",
        "tokens": PIECES,
        "scores": [0.0] * 259 + [-1000.0] * 13 + [-float(i) for i in range(len(PIECES) - 272)],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 260), 3],
        **{f"{role}_token_id": i for i, role in enumerate(("unknown", "bos", "eos"))},
    }
    with new_file(path, "llama", {}) as writer:
        for key, value in (said | keys).items():
            add(writer, f"tokenizer.ggml.{key}", value)
    return Header(path)


def merged(text: str) -> list[int]:
    """SentencePiece's rule as llama.cpp has it: again and again the pair of the best score, the leftmost of equals."""
    parts = list("▁" + text.replace(" ", "▁"))
    scores = {piece: -float(i) for i, piece in enumerate(PIECES[272:])} | dict.fromkeys(PIECES[259:272], -1000.0)
    while pairs := [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for part in parts for i in ([PIECES.index(part)] if part in PIECES else [3 + byte for byte in part.encode()])]


def test_scores_become_merges(tmp_path: Path):
    """Catches merges in another order than that of the scores, lost bytes and a blank too many in front of a decoded text."""
    tokenizer = tokenizer_of(spm_file(tmp_path / "m.gguf"), num_rows=300)
    for text in ("hello world", "hel lo", "é\n", "wor ll hell", "  he"):
        assert tokenizer(text).input_ids == [1, *merged(text)]
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer("he<end>he").input_ids == [1, *merged("he"), PIECES.index("<end>"), *merged("he")]
    plain = tokenizer_of(spm_file(tmp_path / "p.gguf", add_space_prefix=False, add_bos_token=False), num_rows=300)
    assert plain("hel").input_ids == [PIECES.index("hel")]


def test_all_ends_are_known(sound: Path, changed: Callable[[Change], Path]):
    """Catches text that goes on after a turn, because the file names one end only, and an end that is not in the vocabulary."""

    def change(both: dict[str, Any]) -> None:
        values("specdecpp.end_token_ids", tokenizer__ggml__eot_token_id=9)(both)
        tokens = both["values"]["tokenizer.ggml.tokens"]
        kinds = both["values"]["tokenizer.ggml.token_type"] = both["values"]["tokenizer.ggml.token_type"].copy()
        tokens[7], kinds[7] = b"<|im_end|>", 3
        tokens[100], kinds[100] = b"<|eot_id|>", 1  # a text that only looks so

    assert ends_of(Header(sound / "target.gguf"), num_rows=SIZE) == (1,), "what the model says"
    assert ends_of(Header(changed(change)), num_rows=SIZE) == (2, 7, 9)
    for named in ("2,99999", "two", "-1", "2,"):
        with pytest.raises(BackendError, match="are no ids of its"):
            GGUF(changed(values(specdecpp__end_token_ids=named))).ends(None)


# Backends


@pytest.mark.parametrize("backend", ["native", "lean", "eager"])
def test_every_backend_decodes_the_targets_text(backend: Any, sound: Path):
    """Catches a file that is still left to llama.cpp, and a backend that computes another model than the file holds."""
    pair = load_pair(sound / "target.gguf", draft=sound / "draft.gguf", backend=backend)
    assert pair.backends.startswith(backend)
    prompt = encode(pair, "Ann has 3 bags of 12 apples")
    out = sd.Decoder(pair, policy=sd.Fixed(k=3)).generate(prompt, max_tokens=12, temperature=0, ignore_eos=True)
    model, ids = GGUF(sound / "target.gguf").model, list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(out.tokens) == ids[len(prompt) :]


def test_a_file_and_a_checkpoint_are_a_pair(sound: Path, tmp_path: Path):
    """Catches a checkpoint's head refused beside its own file, and kinds of one model forced on the other."""
    model = model_of()
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    pair = load_pair(sound / "target.gguf", draft=tmp_path, backend=("eager", "lean"))
    assert pair.target_fingerprint == fingerprint(model)
    assert load_pair(tmp_path, draft=sound / "draft.gguf", backend="eager").backends.startswith("eager")


def test_a_file_is_known_by_all_its_bytes(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a changed weight under an old name, a second digest of the same file, and one of what no weight depends on."""
    drop = values("specdecpp.fingerprint")
    path = rewritten(sound / "draft.gguf", tmp_path / "m.gguf", change=drop)
    first = GGUF(path).fingerprint
    named = values("specdecpp.fingerprint", general__name="another")
    assert GGUF(rewritten(sound / "draft.gguf", tmp_path / "r.gguf", change=named)).fingerprint == first
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    (tmp_path / "f.gguf").write_bytes(content)
    assert GGUF(tmp_path / "f.gguf").fingerprint != first
    digests = set()
    for last in (0, 1):  # of a type that only llama.cpp may know
        (tmp_path / "u.gguf").write_bytes(placed("<I", 77, after=20)(path.read_bytes())[:-1] + bytes([last]))
        digests.add(digest_of(Header(tmp_path / "u.gguf")))
    assert len(digests) == 2
    monkeypatch.setattr(fingerprints, "SETTLED_S", -1.0)
    assert GGUF(path).fingerprint == first
    monkeypatch.setattr(files, "digest_of", lambda _: pytest.fail("read again"))
    assert GGUF(path).fingerprint == first


# Refusals


def tensor(name: str, make: Callable[[np.ndarray], Any]) -> Change:
    """A change of a tensor's bytes."""

    def change(both: dict[str, Any]) -> None:
        stored, data = both["tensors"][name], both["tensors"][name].data.copy()
        make(data)
        both["tensors"][name] = Stored(stored.kind, stored.shape, data)

    return change


def extra(name: str) -> Change:
    return lambda both: both["tensors"].update({name: fabricated("F32", 2, 4, seed=0)})


def placed(form: str, value: int, *, after: int) -> Callable[[bytes], bytes]:
    """Another type (20 bytes behind the name of a matrix), or another offset (24)."""

    def spoil(data: bytes) -> bytes:
        at = data.index(b"blk.1.attn_k.weight") + 19 + after
        return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]

    return spoil


def nan(data: np.ndarray) -> None:
    data.view("<f4")[0, 3] = np.nan


def infinite(data: np.ndarray) -> None:
    data[5, 34:36] = np.array([np.inf], "<f2").view(np.uint8)


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (values(general__architecture=b"qwen3moe"), MissingExtraError, "architecture is qwen3moe.*pip install"),
        (values(llama__expert_count=8), MissingExtraError, "a mixture of experts"),
        (values(llama__rope__dimension_count=8), MissingExtraError, "turn 8 of 16"),
        (values(llama__block_count=3), BackendError, "announces 3 layers and has tensors of 2"),
        (values(llama__block_count=2**31 + 5), BackendError, r"block_count = 2147483653, which must lie within 1 and"),
        (values(llama__block_count="two"), BackendError, "block_count that is no int"),
        (values(llama__attention__head_count=8), BackendError, "has blk.0.attn_q.weight of .64, 64., where its metadata ask"),
        (values(llama__attention__layer_norm_rms_epsilon=float("nan")), BackendError, "must be finite and above 0"),
        (extra("rope_freqs.weight"), BackendError, "rope_freqs.weight of .2, 4. in F32, where a list"),
        (values("llama.attention.head_count"), BackendError, "has no llama.attention.head_count"),
        (lambda both: both["tensors"].pop("blk.1.ffn_up.weight"), BackendError, "has no blk.1.ffn_up.weight"),
        (tensor("output_norm.weight", nan), BackendError, "has output_norm.weight with values that are infinite or no numb"),
        (tensor("blk.1.attn_v.weight", infinite), BackendError, "has blk.1.attn_v.weight with values that are infinite"),
        (extra("odd"), BackendError, "has no place for"),
        (lambda both: both["tensors"].pop("token_embd.weight"), BackendError, "has no token_embd.weight"),
        (values(tokenizer__huggingface__json="{}"), BackendError, "a tokenizer that cannot be built"),
        (values(tokenizer__ggml__eos_token_id=70000), BackendError, "no such id"),
        (values("tokenizer.huggingface.json", tokenizer__ggml__model="t5"), BackendError, "of the kind t5"),
        (values("tokenizer.huggingface.json", "tokenizer.ggml.tokens"), BackendError, "has no tokenizer.ggml.tokens"),
        (values("tokenizer.huggingface.json", tokenizer__ggml__tokens=["a"] * 9999), BackendError, "9999 tokens and"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change: Any, error: type[Exception], why: str, sound: Path, changed: Any):
    """Catches tracebacks of transformers, numpy and tokenizers, models with random rows, tables as large as a file says, and a
    tokenizer of other ids than the model has."""
    with pytest.raises(error, match=why):
        load_pair(changed(change), draft=sound / "draft.gguf")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: b"", "is no GGUF file: it begins with b''"),
        (lambda data: b"PK\x03\x04" + data[4:], "is no GGUF file: it begins with"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "is GGUF version 1"),
        (lambda data: data[:8] + struct.pack("<Q", 2**62) + data[16:], "ends within its header|has|gives"),
        (lambda data: data[:24] + struct.pack("<Q", 2**40) + data[32:], "ends within its header.* announces 1099511627808"),
        (lambda data: data[:-100], "is too short"),
        (lambda data: data.replace(b"blk.0.ffn_up", b"blk.1.ffn_up", 1), "has blk.1.ffn_up.weight twice"),
        (lambda data: data.replace(b"llama.vocab_size", b"general.fil\xff_xx", 1), "not UTF-8"),
        (placed("<Q", 0, after=24), "within"),
        (placed("<Q", 33, after=24), "off its alignment of 32"),
        (placed("<I", 77, after=20), "type 77|within|alignment"),
    ],
)
def test_damage_is_told(spoil: Callable[[bytes], bytes], why: str, sound: Path, tmp_path: Path):
    """Catches views past the end of a file, memory for as many values as a file announces, two tensors over the same bytes, and
    errors without a file's name."""
    (tmp_path / "m.gguf").write_bytes(spoil((sound / "target.gguf").read_bytes()))
    with pytest.raises((BackendError, MissingExtraError), match=why) as caught:
        GGUF(tmp_path / "m.gguf")
    assert "m.gguf" in str(caught.value)


def test_a_file_that_is_cut_while_it_is_read_is_told(sound: Path, tmp_path: Path):
    """Catches a signal that ends the process where a mapped file becomes shorter."""
    path = Path(shutil.copy(sound / "target.gguf", tmp_path / "m.gguf"))
    model, header = GGUF(path), Header(path)
    os.truncate(path, header.end)
    for read in (lambda: model.backend("native", vocab_size=SIZE), lambda: digest_of(header)):
        with pytest.raises(BackendError, match=r"m.gguf was changed while it was read: it has \d+ bytes now.*Load it again"):
            read()


def test_what_is_no_file_is_told(tmp_path: Path):
    """Catches a wait for a pipe, and a traceback for a folder."""
    (tmp_path / "folder.gguf").mkdir()
    for name in ("nothing.gguf", "folder.gguf"):
        with pytest.raises(BackendError, match="there is no file"):
            GGUF(tmp_path / name)
    with pytest.raises(PairError, match="device_map"):
        GGUF(tmp_path / "x.gguf", device_map="auto")


# Mutations


def test_mutated_files_are_refused_or_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches what nobody thought of: a traceback, logits that are no numbers, gigabytes for a file of less than a megabyte."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # so that nothing is timed
    sound = [written(tmp_path / "a.gguf", precision="q8_0"), written(tmp_path / "b.gguf", precision="q4_1")]
    content = sound[1].read_bytes()  # another name for a key, so that the tokenizer is made of GGUF's own
    sound[1].write_bytes(content.replace(b"tokenizer.huggingface.json", b"tokenizer.somebody.s.json1"))
    contents, refused, path = [(path.read_bytes(), Header(path).end) for path in sound], [], tmp_path / "m.gguf"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(60):
        what, content = mutated(*contents[seed % 2], seed)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        try:
            pair = load_pair(path, draft=sound[seed % 2], backend="native")
            pair.tokenizer("Ann's 3 bags")
            logits, states = pair.target.new_cache().extend([1, 5, 9], rows=3)
        except SpecdecError as error:
            refused.append(str(error))
        else:
            assert logits.isfinite().all(), (what, seed)
            assert states.isfinite().all(), (what, seed)
    assert len(refused) > 30
    assert all(len(told) > 30 and "Traceback" not in told for told in refused)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "kilobytes"
