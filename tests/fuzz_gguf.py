"""Mutated GGUF files: a model's file with bits, counts, values, names or tensors that are others. Seeds are fixed."""

import random
import struct
from collections.abc import Callable

EXTREMES = (0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
KEYS = [
    f"{room}.{key}".encode()
    for room, keys in (
        ("llama", "block_count embedding_length feed_forward_length context_length rope.freq_base vocab_size"),
        ("llama.attention", "head_count head_count_kv key_length layer_norm_rms_epsilon"),
        ("general", "architecture file_type"),
        ("tokenizer.ggml", "model pre tokens token_type merges eos_token_id bos_token_id"),
        ("tokenizer", "chat_template huggingface.json"),
        ("specdecpp", "end_token_ids special_tokens fingerprint"),
    )
    for key in keys.split()
]
TENSORS = b"token_embd", b"output_norm", b"blk.0.attn_q", b"blk.1.ffn_down", b"blk.0.attn_norm"
NAMES = (b"blk.0.attn_k", b"blk.1.attn_k"), (b"blk.0.", b"blk.7."), (b"token_embd", b"token_embe"), (b"llama", b"qwen2")


def mutated(content: bytes, end: int, seed: int) -> tuple[str, bytes]:
    """What was done, and the file after it. `end` is where the header ends."""
    rng, data = random.Random(seed), bytearray(content)
    kinds: list[Callable[..., None]] = [_flip, _overwrite, _truncate, _cut, _rename, _weights, *[_value] * 3, *[_info] * 2]
    how = rng.choice(kinds)
    how(rng, data, end)
    return how.__name__.removeprefix("_"), bytes(data)


def _flip(rng: random.Random, data: bytearray, end: int) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)


def _overwrite(rng: random.Random, data: bytearray, end: int) -> None:
    at = rng.randrange(end - 8)
    data[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))


def _truncate(rng: random.Random, data: bytearray, end: int) -> None:
    del data[rng.choice((rng.randrange(len(data)), rng.randrange(end), rng.randrange(64), len(data) - rng.randrange(1, 40))) :]


def _value(rng: random.Random, data: bytearray, end: int) -> None:
    """Change the type of a value of the metadata, or the value."""
    key = rng.choice([key for key in KEYS if struct.pack("<Q", len(key)) + key in data[:end]])
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
    what = rng.randrange(4)
    if what == 0:
        struct.pack_into("<I", data, at, rng.choice((*range(14), 99, 2**32 - 1)))
    elif what == 1:
        struct.pack_into("<I", data, at + 4, rng.choice(EXTREMES) & 0xFFFFFFFF)
    elif what == 2:
        struct.pack_into("<f", data, at + 4, rng.choice((float("nan"), float("inf"), -1.0, 0.0, 1e-30, 1e30)))
    else:
        where = at + 4 + rng.randrange(64)
        data[where : where + 8] = rng.randbytes(8)


def _info(rng: random.Random, data: bytearray, end: int) -> None:
    """Change the dimensions, the type or the offset of a tensor."""
    name = rng.choice(TENSORS) + b".weight"
    at = data.rindex(name, 0, end) + len(name)
    (num,) = struct.unpack_from("<I", data, at)
    fields = [(at, "<I"), *((at + 4 + 8 * i, "<Q") for i in range(num)), (at + 4 + 8 * num, "<I"), (at + 8 + 8 * num, "<Q")]
    where, format_ = rng.choice(fields)
    (value,) = struct.unpack_from(format_, data, where)
    value = rng.choice((value + 1, value * 2, value // 2, value + 32, rng.randrange(40), *EXTREMES))
    struct.pack_into(format_, data, where, value & (2 ** (8 * struct.calcsize(format_)) - 1))


def _cut(rng: random.Random, data: bytearray, end: int) -> None:
    at = rng.randrange(end)
    if rng.random() < 0.5:
        del data[at : at + rng.choice((1, 4, 8, 100))]
    else:
        data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 100)))


def _rename(rng: random.Random, data: bytearray, end: int) -> None:
    """Put one name where another was."""
    one, other = rng.choice(NAMES)
    data[:end] = data[:end].replace(one, other, rng.choice((1, -1)))


def _weights(rng: random.Random, data: bytearray, end: int) -> None:
    for _ in range(rng.choice((1, 100, 10000))):
        data[rng.randrange(end, len(data))] = rng.choice((0, 0x7C, 0xFF, rng.randrange(256)))
