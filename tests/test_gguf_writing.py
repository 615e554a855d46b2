"""GGUF files: every weight, name and id of a model arrives, and what llama.cpp would compute differently is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from gguf_files import SIZE, TOKENIZER, model_of, written
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from specdecpp.backends import LeanModel
from specdecpp.errors import BackendError
from specdecpp.loading.gguf_tokenizer import ENDS
from specdecpp.loading.gguf_writing import vocabulary_of, write
from specdecpp.loading.pair import REFERENCE
from specdecpp.testing import tiny_tokenizer

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}


def altered(change: Callable[[dict[str, Any], list[Any]], Any]) -> Any:
    """The reference tokenizer with its tokenizer.json changed; a change sees it, and the steps of its pre-tokenizer."""
    whole = json.loads(TOKENIZER.backend_tokenizer.to_str())
    change(whole, whole["pre_tokenizer"]["pretokenizers"])
    other = AutoTokenizer.from_pretrained(REFERENCE / "target")
    other._tokenizer = Tokenizer.from_str(json.dumps(whole))
    return other


# Weights


@pytest.mark.parametrize(
    ("kind", "config"), [("llama", {}), ("qwen2", {}), ("qwen3", {"tie_word_embeddings": True, "head_dim": 16})]
)
def test_another_reader_computes_the_same_logits(kind: str, config: dict[str, Any], tmp_path: Path):
    """Catches rows of q and k that are left as they are or turned twice, swapped names, tensors that are left out, lost biases,
    head norms or ties, and wrong hyperparameters: transformers' own reader must give back the very same model."""
    model = model_of(kind, **config)
    path = written(tmp_path / "m.gguf", model)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    told = {key: value for key, value in read["config"].items() if key not in ("architectures", "model_type")}
    if kind == "qwen3":
        told["head_dim"] = 16  # the one thing this reader does not look for
    again = AutoModelForCausalLM.from_config(AutoConfig.for_model(read["config"]["model_type"], **told)).eval()
    missing, unexpected = again.load_state_dict({k: torch.as_tensor(v) for k, v in read["tensors"].items()}, strict=False)
    again.tie_weights()
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"} if model.config.tie_word_embeddings else not missing
    assert len(tensors(path)) == len(list(model.parameters()))
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_weights_in_another_layout_are_the_same(tmp_path: Path):
    """Catches bytes taken as they lie: the lean backend lays weights out anew."""
    model = model_of()
    before = written(tmp_path / "before.gguf", model).read_bytes()
    LeanModel(model)
    assert written(tmp_path / "after.gguf", model).read_bytes() == before


# Words


def test_every_id_keeps_its_token_and_role(tmp_path: Path):
    """Catches ids that move, special tokens written as text, rows without a token that get none, a second end that is lost, and
    an added word that llama.cpp would hide from the text. Of SmolLM2's end, which pads too, only the last role was written."""
    model, tokenizer = model_of(), AutoTokenizer.from_pretrained(REFERENCE / "target")
    model.generation_config.eos_token_id = [2, 7]
    tokenizer.add_tokens(["<think>"])
    tokenizer.pad_token = tokenizer.eos_token
    found = fields(written(tmp_path / "m.gguf", model, tokenizer=tokenizer))
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    num = len(TOKENIZER)
    assert tokens == [*TOKENIZER.convert_ids_to_tokens(list(range(num))), "<think>", f"[PAD{num + 1}]", f"[PAD{num + 2}]"]
    assert types == [3 if i in TOKENIZER.added_tokens_decoder else 1 for i in range(num)] + [4, 5, 5]
    assert found["tokenizer.ggml.pre"] == "qwen2"
    assert len(found["tokenizer.ggml.merges"]) == len(json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]["merges"])
    assert [found[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")] == [1, 2, 2]
    assert (found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]) == (True, False)
    assert found["tokenizer.chat_template"] == TOKENIZER.chat_template
    assert (found[ENDS], found["tokenizer.ggml.eot_token_id"]) == ("2,7", 7)
    assert found["tokenizer.huggingface.json"] == tokenizer.backend_tokenizer.to_str(), "GGUF's own keys know no normaliser"


# Refusals


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("gpt2", {}, "not one of"),
        ("mistral", {"sliding_window": 8}, "window of 8"),
        ("llama", {"mlp_bias": True}, "layers have biases"),
        ("phi3", {}, "not one of"),
        ("gemma3_text", {}, "not one of"),
        ("qwen3", {"rope_parameters": LINEAR}, "angles are scaled"),
        ("llama", {"rope_parameters": LINEAR}, "angles are scaled"),
    ],
)
def test_models_that_would_change_are_refused(kind: str, config: dict[str, Any], why: str, tmp_path: Path):
    """Catches a file that llama.cpp reads but computes otherwise."""
    with pytest.raises(BackendError, match=f"{why}.*knows more families"):
        write(model_of(kind, **config), TOKENIZER, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def like_gpt4(whole: dict[str, Any], steps: list[Any]) -> None:
    steps[0]["pattern"]["Regex"] = steps[0]["pattern"]["Regex"].replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def like_llama3(whole: dict[str, Any], steps: list[Any]) -> None:
    like_gpt4(whole, steps)
    whole["model"]["ignore_merges"] = True


def like_gpt2(whole: dict[str, Any], steps: list[Any]) -> None:
    whole["pre_tokenizer"] = steps[1] | {"use_regex": True}


def like_smollm(whole: dict[str, Any], steps: list[Any]) -> None:
    steps[:] = [{"type": "Digits", "individual_digits": True}, steps[1] | {"use_regex": True}]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda whole, steps: None, "qwen2"),
        (like_gpt4, "dbrx"),
        (like_llama3, "llama-bpe"),
        (like_gpt2, "gpt-2"),
        (like_smollm, "smollm"),
        (lambda whole, steps: steps.pop(0), None),
        (lambda whole, steps: steps[0]["pattern"].update(Regex=r"\p{N}{3}|\s+"), None),
        (lambda whole, steps: steps.insert(0, {"type": "Digits", "individual_digits": True}), None),
        (lambda whole, steps: steps[1].update(add_prefix_space=True), None),
        (lambda whole, steps: whole["model"].update(ignore_merges=True), None),
    ],
)
def test_ways_to_cut_a_text(change: Any, name: str | None):
    """Catches a file in which llama.cpp would cut texts otherwise, and tokenizers refused or taken for each other."""
    if name is None:
        with pytest.raises(BackendError, match="no name here"):
            vocabulary_of(altered(change), size=SIZE)
    else:
        assert vocabulary_of(altered(change), size=SIZE)[2] == name


def test_other_tokenizers_are_refused():
    """Catches a tokenizer of characters written as if it were byte-level BPE, and one of another model."""
    with pytest.raises(BackendError, match="not byte-level BPE"):
        vocabulary_of(tiny_tokenizer(), size=SIZE)
    with pytest.raises(BackendError, match="ids up to 4095, but the model scores 100"):
        vocabulary_of(TOKENIZER, size=100)
