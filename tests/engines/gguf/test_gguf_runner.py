"""The llama.cpp backend by itself: its numbers are those of transformers, a rollback is exact, contexts are used again."""

import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from kinds import full_pass

from specdecpp.backends import Model
from specdecpp.backends.llama_cpp import GGUFFile, LlamaCppModel
from specdecpp.errors import BackendError
from specdecpp.loading.models import load_model
from specdecpp.loading.pair import REFERENCE
from specdecpp.testing import practice_prompts


def ids_of(num: int, size: int = 4096, seed: int = 0) -> list[int]:
    return torch.randint(3, size, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def target(reference: Path) -> GGUFFile:
    return GGUFFile(reference / "target-f32.gguf")


@pytest.fixture
def long(tiny_files: Path) -> GGUFFile:
    return GGUFFile(tiny_files / "target.gguf")


# Numbers


@pytest.mark.parametrize("role", ["target", "draft"])
def test_logits_and_states_are_those_of_transformers(role: str, reference: Path, tokenizer: Any):
    """Catches logits of other rows, states before the last norm, float16 on the way, and wrong angles at later positions."""
    model = load_model(REFERENCE / role, dtype=torch.float32, device=None, device_map=None)
    ids = tokenizer("\n".join(practice_prompts())).input_ids[:1024]
    logits, states = full_pass(model, ids)
    backend = LlamaCppModel(reference / f"{role}-f32.gguf").new_cache()
    assert isinstance(backend.model, Model)
    assert (backend.vocab_size, backend.hidden_size, backend.max_length) == (len(logits[0]), len(states[0]), 1024)
    ours, hidden = backend.extend(ids, rows=len(ids))
    assert (ours.dtype, hidden.dtype) == (torch.float32, torch.float32)
    for end, within in ((256, 1e-4), (1024, 5e-4)):
        torch.testing.assert_close(ours[:end], logits[:end], atol=within, rtol=0)
        torch.testing.assert_close(hidden[:end], states[:end], atol=within, rtol=0)


@pytest.mark.parametrize("steps", [[7], [1, 1, 5], [513, 1], [600], [33, 40, 1000], [1025, 3], [1500, 900, 1]])
def test_rows_come_out_right_however_the_text_is_cut(steps: list[int], long: GGUFFile, tiny: Any):
    """Catches a pass too wide for llama.cpp, parts in the wrong order, a context that forgets, rows of the unread part."""
    ids = ids_of(sum(steps))
    logits, states = full_pass(tiny, ids)
    for wanted in (1, 5, 10**9):
        backend, end = LlamaCppModel(long).new_cache(), 0
        for step in steps:
            rows, end = min(step, wanted), end + step
            ours, hidden = backend.extend(ids[end - step : end], rows=rows)
            torch.testing.assert_close(ours, logits[end - rows : end], atol=2e-3, rtol=0)
            torch.testing.assert_close(hidden, states[end - rows : end], atol=2e-3, rtol=0)
        assert backend.length == len(ids)
    assert logits.std() > 1, "the comparison is vacuous"


def test_the_vocabulary_can_be_cut(target: GGUFFile):
    """Catches rows past the tokenizer's ids that a draft would be sampled from."""
    whole, cut = LlamaCppModel(target).new_cache(), LlamaCppModel(target, vocab_size=100).new_cache()
    assert torch.equal(whole.extend([5, 6], rows=2)[0][:, :100], cut.extend([5, 6], rows=2)[0])
    assert cut.vocab_size == 100
    with pytest.raises(BackendError, match=r"vocab_size=5000 asked of target-f32\.gguf, whose output layer has 4096 rows"):
        LlamaCppModel(target, vocab_size=5000).new_cache()


@pytest.mark.parametrize("precision", ["bf16", "q8_0"])
def test_other_precisions_are_near(precision: str, reference: Path, target: GGUFFile):
    """Catches weights that are read in a wrong type, and a cut of a float16 cache that is not exact."""
    ids = ids_of(40)
    own = LlamaCppModel(target).new_cache().extend(ids, rows=40)[0]
    backend = LlamaCppModel(reference / f"target-{precision}.gguf").new_cache()
    logits = backend.extend(ids, rows=40)[0]
    assert 1e-3 < (logits - own).abs().max() < 1
    assert (logits.argmax(-1) == own.argmax(-1)).float().mean() > 0.8
    backend.rollback(30)
    once = backend.extend(ids[30:], rows=10)[0]
    backend.rollback(30)
    assert torch.equal(backend.extend(ids[30:], rows=10)[0], once)


# Rollback


def test_after_a_rollback_the_bits_are_the_same(long: GGUFFile):
    """Catches cells that are left behind or taken in another order, before and after growth, by one token and by all."""
    ids = ids_of(2100)
    for kept, width in ((0, 4), (1, 6), (500, 21), (1020, 21), (1030, 1), (2047, 40)):
        backend = LlamaCppModel(long).new_cache()
        if kept:
            backend.extend(ids[:kept], rows=1)
        backend.extend(ids[kept : kept + width], rows=width)
        backend.rollback(kept)
        once = backend.extend(ids[kept : kept + width], rows=width)
        for _ in range(2):
            backend.rollback(kept)
            backend.extend(ids_of(width, seed=1), rows=width)
            backend.rollback(kept)
            again = backend.extend(ids[kept : kept + width], rows=width)
            assert torch.equal(once[0], again[0])
            assert torch.equal(once[1], again[1])


def test_a_pass_that_fails_leaves_the_cache_as_it_was(target: GGUFFile):
    """Catches an abort of the process, and a backend that is lost, after an id that the model does not have."""
    backend = LlamaCppModel(target).new_cache()
    backend.extend([5, 6], rows=1)
    expected = backend.model.new_cache().extend([5, 6, 7], rows=1)[0]
    with pytest.raises(BackendError, match=r"fails in a pass over 2 tokens \(status -1\): .*invalid token"):
        backend.extend([7, 99999], rows=1)
    assert backend.length == 2
    torch.testing.assert_close(backend.extend([7], rows=1)[0], expected, atol=1e-4, rtol=0)


# Contexts


def test_backends_over_one_file_are_independent(target: GGUFFile):
    """Catches a shared cache, and one that holds what another request left in it."""
    one = LlamaCppModel(target).new_cache()
    expected = one.extend(ids_of(30), rows=1)[0]
    other = LlamaCppModel(target, num_threads=2).new_cache()
    other.extend(ids_of(3, seed=1), rows=1)
    assert (one.length, other.length) == (30, 3)
    following = one.extend([9], rows=1)[0]
    del one, other
    gc.collect()
    again = LlamaCppModel(target).new_cache()
    assert torch.equal(again.extend(ids_of(30), rows=1)[0], expected)
    assert torch.equal(again.extend([9], rows=1)[0], following)


def test_contexts_are_used_again(long: GGUFFile):
    """Catches a context for every request, a smaller one beside an idle larger one, and one that was outgrown and kept."""
    for _ in range(5):
        LlamaCppModel(long).new_cache().extend([5], rows=1)
    assert len(long.idle) == 1
    backend = LlamaCppModel(long).new_cache()
    backend.extend(ids_of(1500), rows=1)
    assert [context.size for context in long.idle] == [1024]
    del backend
    assert sorted(context.size for context in long.idle) == [1024, 2048]
    backends = [LlamaCppModel(long).new_cache() for _ in range(2)]
    for backend in backends:
        backend.extend([5], rows=1)
    assert not long.idle


def test_no_more_contexts_are_kept_than_a_few(long: GGUFFile):
    """Catches memory that stays at its peak after many requests at once."""
    backends = [LlamaCppModel(long).new_cache() for _ in range(12)]
    contexts = [weakref.ref(backend.extend([5], rows=1) and backend._context) for backend in backends]
    assert len({context() for context in contexts}) == 12
    backends.clear()
    gc.collect()
    assert len(long.idle) == len([context for context in contexts if context() is not None]) == 8


def test_a_file_goes_with_its_last_backend(tiny_files: Path):
    """Catches weights and contexts that stay in memory, and a context that is given back after its file is gone."""
    file = GGUFFile(tiny_files / "target.gguf")
    backend, gone = LlamaCppModel(file).new_cache(), weakref.ref(file)
    backend.extend([5], rows=1)
    context = weakref.ref(backend._context)
    del file
    assert gone() is not None
    del backend
    gc.collect()
    assert gone() is None
    assert context() is None


def test_threads_may_use_backends_over_one_file(long: GGUFFile):
    """Catches two threads that take the same idle context, and passes that mix."""
    texts = [ids_of(40, seed=seed) for seed in range(8)]
    expected = [LlamaCppModel(long).new_cache().extend(text, rows=1)[0] for text in texts]

    def turn(i: int) -> bool:
        return all(torch.equal(LlamaCppModel(long).new_cache().extend(texts[i], rows=1)[0], expected[i]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(turn, range(8)))
    assert len(long.idle) <= 5


def test_a_process_ends_in_peace_and_says_nothing(tiny_files: Path):
    """Catches llama.cpp's messages on stderr, and a crash when the interpreter goes while backends are alive."""
    code = (
        "import sys; from specdecpp.backends.llama_cpp import LlamaCppModel, GGUFFile\n"
        "kept = [LlamaCppModel(sys.argv[1]).new_cache() for _ in range(2)]\n"
        "for backend in kept: backend.extend(list(range(3, 1503)), rows=1)\n"
        "backend.cycle = kept; print(backend.length)"
    )
    command = [sys.executable, "-c", code, str(tiny_files / "target.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1500\n", "")


# Files that cannot be run


def test_a_missing_or_damaged_file_is_named(reference: Path, tmp_path: Path):
    """Catches an abort, and an error that does not say which file or why."""
    with pytest.raises(BackendError, match=r"there is no file .*nothing\.gguf"):
        GGUFFile(tmp_path / "nothing.gguf")
    whole = (reference / "draft-f32.gguf").read_bytes()
    for num_bytes, reason in (
        (0, ""),
        (10, "header"),
        (1000, "key-value"),
        (len(whole) - 40_000, "not within the file bounds"),
    ):
        (tmp_path / "cut.gguf").write_bytes(whole[:num_bytes])
        with pytest.raises(BackendError, match=rf"cannot read .*cut\.gguf \(.*{reason}.*\)\. If the file is damaged"):
            GGUFFile(tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("no weights", encoding="utf-8")
    with pytest.raises(BackendError, match="cannot read"):
        GGUFFile(tmp_path / "text.gguf")


def written(path: Path, architecture: str, values: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    """A model of another kind with zero weights and no vocabulary."""
    writer = gguf.GGUFWriter(path, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    sizes = {"context_length": 64, "embedding_length": 32, "block_count": 1, "vocab_size": 8}
    for name, value in (sizes | values).items():
        add[type(value)](f"{architecture}.{name}", value)
    writer.add_tokenizer_model("no_vocab")
    writer.add_token_type_count(2)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_recurrent_model_is_refused(tmp_path: Path):
    """Catches a state that cannot be rolled back: every rejected draft token would change the answer."""
    sizes = {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 64,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 2,
        "feed_forward_length": 0,
    }
    values = sizes | {"attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-5}
    of_block = {
        "attn_norm.weight": (32,),
        "ssm_in.weight": (128, 32),
        "ssm_conv1d.weight": (64, 4),
        "ssm_conv1d.bias": (64,),
        "ssm_x.weight": (34, 64),
        "ssm_dt.weight": (64, 2),
        "ssm_dt.bias": (64,),
        "ssm_a": (64, 16),
        "ssm_d": (64,),
        "ssm_out.weight": (32, 64),
    }
    tensors = {"token_embd.weight": (8, 32), "output_norm.weight": (32,)} | {f"blk.0.{n}": s for n, s in of_block.items()}
    with pytest.raises(BackendError, match="keeps a recurrent state, which cannot be rolled back"):
        GGUFFile(written(tmp_path / "mamba.gguf", "mamba", values, tensors))


def test_an_encoder_is_refused(tmp_path: Path):
    """Catches a null pointer: llama.cpp gives such a model no cache."""
    values = {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False}
    tensors = {"token_embd.weight": (8, 32), "position_embd.weight": (64, 32), "token_types.weight": (2, 32)}
    matrices = {"attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32)}
    matrices |= {"ffn_up": (64, 32), "ffn_down": (32, 64)}
    for name, shape in matrices.items():
        tensors |= {f"blk.0.{name}.weight": shape, f"blk.0.{name}.bias": shape[:1]}
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        tensors |= {f"{name}.weight": (32,), f"{name}.bias": (32,)}
    with pytest.raises(BackendError, match="is an encoder or has one"):
        GGUFFile(written(tmp_path / "bert.gguf", "bert", values | {"feed_forward_length": 64}, tensors))
