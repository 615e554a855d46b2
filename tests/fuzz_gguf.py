"""Mutated GGUF files: a model's file with bits, values, tensors or lengths that are others. Seeds are fixed."""

import random
import struct
from collections.abc import Callable

EXTREMES = (0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
KEYS = [
    *(b"llama." + key for key in (b"block_count", b"embedding_length", b"context_length", b"rope.freq_base")),
    *(b"llama.attention." + key for key in (b"head_count", b"head_count_kv", b"layer_norm_rms_epsilon")),
    *(b"tokenizer.ggml." + key for key in (b"model", b"pre", b"tokens", b"token_type", b"merges", b"eos_token_id")),
    *(b"general.architecture", b"tokenizer.chat_template", b"specdecpp.end_token_ids"),
]
TENSORS = b"token_embd", b"output_norm", b"blk.0.attn_q", b"blk.1.ffn_down"


def mutated(content: bytes, end: int, seed: int) -> tuple[str, bytes]:
    """What was done, and the file after it. `end` is where the header ends."""
    rng, data = random.Random(seed), bytearray(content)
    kinds: list[Callable[..., None]] = [_flip, _truncate, _weights, *[_value] * 3, *[_info] * 2]
    how = rng.choice(kinds)
    how(rng, data, end)
    return how.__name__.removeprefix("_"), bytes(data)


def _flip(rng: random.Random, data: bytearray, end: int) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)


def _truncate(rng: random.Random, data: bytearray, end: int) -> None:
    del data[rng.choice((rng.randrange(len(data)), rng.randrange(end), rng.randrange(64), len(data) - rng.randrange(1, 40))) :]


def _value(rng: random.Random, data: bytearray, end: int) -> None:
    """Change the type of a value of the metadata, or the value."""
    key = rng.choice([key for key in KEYS if struct.pack("<Q", len(key)) + key in data[:end]])
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
    form, where, value = rng.choice(
        [
            ("<I", at, rng.choice((*range(14), 99, 2**32 - 1))),
            ("<I", at + 4, rng.choice(EXTREMES) & 0xFFFFFFFF),
            ("<f", at + 4, rng.choice((float("nan"), float("inf"), -1.0, 0.0, 1e-30, 1e30))),
            ("<Q", at + 4 + rng.randrange(64), rng.getrandbits(64)),
        ]
    )
    struct.pack_into(form, data, where, value)


def _info(rng: random.Random, data: bytearray, end: int) -> None:
    """Change the dimensions, the type or the offset of a tensor."""
    name = rng.choice(TENSORS) + b".weight"
    at = data.rindex(name, 0, end) + len(name)
    (num,) = struct.unpack_from("<I", data, at)
    fields = [(at, "<I"), *((at + 4 + 8 * i, "<Q") for i in range(num)), (at + 4 + 8 * num, "<I"), (at + 8 + 8 * num, "<Q")]
    where, form = rng.choice(fields)
    (value,) = struct.unpack_from(form, data, where)
    value = rng.choice((value + 1, value * 2, value // 2, value + 32, rng.randrange(40), *EXTREMES))
    struct.pack_into(form, data, where, value & (2 ** (8 * struct.calcsize(form)) - 1))


def _weights(rng: random.Random, data: bytearray, end: int) -> None:
    for _ in range(rng.choice((1, 100, 10000))):
        data[rng.randrange(end, len(data))] = rng.choice((0, 0x7C, 0xFF, rng.randrange(256)))
