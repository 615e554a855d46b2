"""Models in GGUF files, run by llama.cpp (extra [gguf]): quantised ones too, on whatever that library was built for.

The calls go through `llama_cpp.llama_cpp`, the plain ctypes of llama-cpp-python; its errors go into ours. A float32 file gets a
float32 cache and plain attention, and logits are those of transformers to rounding (1e-4 over 256 positions; llama.cpp
multiplies up its angles in float32, 5e-4 over 1,024). For other files llama.cpp chooses.
"""

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.backends import trimmed
from specdecpp.backends.base import Cache, check_rollback, scored_rows
from specdecpp.errors import BackendError, MissingExtraError

_ROOM = 1024  # positions a context starts with; it grows by doubling
_WIDEST = 512  # tokens of one pass
_OUTPUTS = 64  # rows with logits of one pass; a context sets aside room for the logits of so many, vocabulary and all
_FEW = 32  # unread tokens whose states cost less than telling llama.cpp not to compute them
_IDLE = 8  # contexts that are kept for later; making one takes as long as several steps


class LlamaCppModel:
    """The model of a GGUF file, on the CPU in float32; `output_ids` are those that are scored (`trimmed`; None: all).

    One thread at a time may use a cache; several may use caches of one file. Raises `MissingExtraError` without
    llama-cpp-python, `BackendError` for a file that cannot be read and for models whose cache cannot be cut.

    >>> cache = LlamaCppModel("target-f32.gguf", num_threads=2).new_cache()        # doctest: +SKIP
    """

    def __init__(
        self, path: "str | Path | GGUFFile", *, vocab_size: int | None = None, output_ids: Any = None, num_threads: int = 1
    ):
        self.file = path if isinstance(path, GGUFFile) else GGUFFile(path)
        self.vocab_size = scored_rows(vocab_size, self.file.num_rows, self.file.path.name)
        self.output_ids = trimmed.checked(output_ids, vocab_size=self.vocab_size)
        self.hidden_size = self.file.hidden_size
        self.max_length: int | None = self.file.max_length
        self.device, self.num_threads = torch.device("cpu"), num_threads

    def new_cache(self) -> "GGUFCache":
        """An empty cache."""
        return GGUFCache(self)

    def forward(
        self, parts: "Sequence[tuple[GGUFCache, list[int]]]", *, rows: int
    ) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens to each cache, one after the other; logits and hidden states of the last `rows` of each."""
        found = [cache.read(tokens, rows) for cache, tokens in parts]
        return found[0] if len(found) == 1 else (torch.cat([one for one, _ in found]), torch.cat([two for _, two in found]))


class GGUFCache(Cache):
    """One sequence of a `LlamaCppModel`, in a context of llama.cpp: an idle one, which is given back when this is gone."""

    def __init__(self, model: LlamaCppModel):
        super().__init__(model)
        self.length = 0
        self._context: _Context | None = None
        self._release: Any = None

    def read(self, tokens: list[int], rows: int) -> tuple[Tensor, Tensor]:
        """Append tokens; logits [rows, V] and hidden states [rows, D] of the last `rows` of them."""
        context, at = self._room_for(self.length + len(tokens)), self.length
        unseen = len(tokens) - rows if len(tokens) - rows > _FEW else 0
        for start in range(0, unseen, _WIDEST):
            context.read(tokens[start : min(start + _WIDEST, unseen)], at + start)
        logits = torch.empty(len(tokens) - unseen, self.model.file.num_rows)
        hidden = torch.empty(len(tokens) - unseen, self.hidden_size)
        for start in range(0, len(logits), _OUTPUTS):
            piece = tokens[unseen + start :][:_OUTPUTS]
            context.read(piece, at + unseen + start, logits[start:], hidden[start:])
        self.length += len(tokens)
        logits = logits[-rows:, : self.vocab_size]
        if (ids := self.model.output_ids) is not None:  # llama.cpp itself scores all
            logits = trimmed.widened(logits[:, ids], ids, vocab_size=self.vocab_size)
        return logits, hidden[-rows:]

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        check_rollback(length, self.length)
        context: Any = self._context
        if context is not None:  # a pass that failed may have left tokens behind `length`
            if not self.model.file.lib.llama_memory_seq_rm(context.memory, 0, length, -1):
                raise BackendError("llama.cpp cannot cut the cache of this model, so draft tokens cannot be taken back.")
            self.length = length

    def _room_for(self, length: int) -> "_Context":
        """A context that holds so many positions, with what the present one holds."""
        context, file = self._context, self.model.file
        if context is not None and length <= context.size:
            return context
        size = max(length, min(max(_ROOM, 1 << (length - 1).bit_length()), file.max_length))
        roomy = file.context(size, self.model.num_threads)
        if context is not None:
            roomy.copy(context)
            self._release()
        self._context = roomy
        self._release = weakref.finalize(self, _put_back, roomy, file.idle)
        return roomy


def _put_back(context: "_Context", idle: "list[_Context]") -> None:
    """Keep a context that nobody uses any longer, but not more than a few."""
    if len(idle) < _IDLE:
        idle.append(context)


def _free(lib: Any, handle: Any, idle: "list[_Context]") -> None:
    """Free a model after the contexts over it."""
    idle.clear()
    lib.llama_model_free(handle)


class GGUFFile:
    """A file's weights, shared by all models over them, and contexts that nobody uses now: they are taken again."""

    def __init__(self, path: str | Path):
        self.path, self.idle, self._lock = Path(path), list[_Context](), Lock()
        self.lib = lib = _library()
        if not self.path.is_file():
            raise BackendError(f"there is no file {path}. Give the path of a GGUF file.")
        _errors.clear()
        self._handle = model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
        if not model:
            raise BackendError(
                f"llama.cpp cannot read {path} ({_last_words()}). If the file is damaged, write or fetch it again; if its kind "
                "of model is unknown, a newer llama-cpp-python may know it."
            )
        weakref.finalize(self, _free, lib, model, self.idle)
        causal = self._metadata(f"{self._metadata('general.architecture')}.attention.causal")
        reason = "is an encoder or has one" if lib.llama_model_has_encoder(model) or causal == "false" else None
        if lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model):
            reason = "keeps a recurrent state, which cannot be rolled back after a rejected draft token"
        if reason:
            raise BackendError(f"{self.path.name} {reason}. Speculative decoding needs a decoder with a plain key-value cache.")
        self.num_rows = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
        self.hidden_size = int(lib.llama_model_n_embd(model))
        self.max_length = int(lib.llama_model_n_ctx_train(model))

    def _metadata(self, key: str) -> str | None:
        """One value of the file's metadata, as text; None for what is not there."""
        text = ctypes.create_string_buffer(64)
        size = self.lib.llama_model_meta_val_str(self._handle, key.encode(), text, len(text))
        return None if size < 0 else text.value.decode(errors="replace")

    def context(self, size: int, num_threads: int) -> "_Context":
        """An empty context of at least so many positions: the smallest idle one that has them, else a new one."""
        with self._lock:
            found = min((one for one in self.idle if one.size >= size), key=lambda one: one.size, default=None)
            if found is not None:
                self.idle.remove(found)
        if found is None:
            found = _Context(self.lib, self._handle, size=size, is_wide=self._metadata("general.file_type") == "0")
        self.lib.llama_memory_clear(found.memory, False)
        self.lib.llama_set_n_threads(found.handle, num_threads, num_threads)
        return found


class _Context:
    """One sequence of a model in llama.cpp: its cache and its output buffers. The model must live as long."""

    def __init__(self, lib: Any, model: Any, *, size: int, is_wide: bool):
        self.size, self._lib = size, lib
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = size, _WIDEST, _WIDEST, 1
        options.n_outputs_max = _OUTPUTS
        options.embeddings, options.pooling_type = True, lib.LLAMA_POOLING_TYPE_NONE
        options.swa_full, options.no_perf = True, True  # every layer keeps every position, so that a cut is exact
        if is_wide:
            options.type_k = options.type_v = 0  # float32
            options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to float16 on the way
        _errors.clear()
        self.handle = lib.llama_init_from_model(model, options)
        if not self.handle:
            raise BackendError(f"llama.cpp cannot make a context of {size} positions: {_last_words()}")
        weakref.finalize(self, lib.llama_free, self.handle)
        self.memory = lib.llama_get_memory(self.handle)
        self._batch = lib.llama_batch_init(_WIDEST, 0, 1)
        weakref.finalize(self, lib.llama_batch_free, self._batch)
        for i in range(_WIDEST):
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, 0
        self._has_outputs = True

    def copy(self, other: "_Context") -> None:
        """Take over what another context holds."""
        size = self._lib.llama_state_seq_get_size(other.handle, 0)
        state = (ctypes.c_uint8 * size)()
        self._lib.llama_state_seq_get_data(other.handle, state, size, 0)
        if not self._lib.llama_state_seq_set_data(self.handle, state, size, 0):
            raise BackendError(f"llama.cpp cannot move a cache to a context of {self.size} positions: {_last_words()}")

    def read(self, tokens: list[int], position: int, *outputs: Tensor) -> None:
        """Put tokens into the cache; logits and states go to the first rows of `outputs`, where they are wanted."""
        batch, lib = self._batch, self._lib
        if bool(outputs) != self._has_outputs:
            self._has_outputs = bool(outputs)
            lib.llama_set_embeddings(self.handle, self._has_outputs)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position + i, self._has_outputs
        batch.n_tokens = len(tokens)
        _errors.clear()
        if status := lib.llama_decode(self.handle, batch):
            raise BackendError(f"llama.cpp fails in a pass over {len(tokens)} tokens (status {status}): {_last_words()}")
        for to, rows in zip(outputs, (lib.llama_get_logits_ith, lib.llama_get_embeddings_ith), strict=False):
            ctypes.memmove(to.data_ptr(), rows(self.handle, 0), 4 * len(tokens) * to.shape[1])


def _library() -> Any:
    """llama.cpp as llama-cpp-python wraps it, its messages kept to itself."""
    try:
        import llama_cpp.llama_cpp as lib  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "models in GGUF files are run by llama.cpp, and llama-cpp-python is not installed. Install it with: pip install "
            "'specdecpp[gguf]' (it is compiled for your machine, which takes some minutes)"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:  # its shared library is missing, or made for another machine
        raise BackendError(
            f"llama-cpp-python is installed and cannot be loaded ({error}). Compile it anew for this machine: pip install "
            "--force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
        ) from error
    if not _callbacks:
        _callbacks.append(lib.llama_log_callback(_listen))
        lib.llama_log_set(_callbacks[0], ctypes.c_void_p(0))
        lib.llama_backend_init()
    return lib


_callbacks: list[Any] = []  # llama.cpp has their addresses
_errors: list[str] = []


def _listen(level: int, text: bytes, _: Any) -> None:
    """Keep llama.cpp's first error (level 4), which is the cause, for our own."""
    if level == 4 and text.strip() and not _errors:
        _errors.append(text.decode(errors="replace").strip())


def _last_words() -> str:
    return _errors[0] if _errors else "no reason is given"
