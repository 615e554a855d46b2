"""Mutated model files: GGUF files and the heads of policies, loaded and run. Each must work or be refused with a sentence.

    python tests/fuzz_gguf.py --num 300 --heads 100              # a line per class of outcome; exit status 1 if one is bad

Nothing is caught but errors that the package raises on purpose: a signal ends the script, and so does a file that takes more
than two minutes. Seeds are fixed; a bad outcome names its seed. `tests/test_gguf_reading.py` runs a small number.
"""

import argparse
import contextlib
import faulthandler
import os
import random
import resource
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from gguf_files import written

from specdecpp.errors import SpecdecError
from specdecpp.head import AcceptanceHead
from specdecpp.loading.gguf_header import Header
from specdecpp.loading.pair import REFERENCE, load_pair

SLOW_S = 120
LARGE_BYTES = 2**30
"""More memory than this for a file of less than a megabyte is a bad outcome."""
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


def sound_file(folder: Path, *, precision: str = "q8_0", is_whole: bool = True) -> Path:
    """A tiny model as a GGUF file; without the tokenizer.json inside unless `is_whole`."""
    path = written(folder / f"{precision}-{is_whole}.gguf", precision=precision)
    if not is_whole:  # another name for the key; the file stays as long as it was
        content = path.read_bytes()
        path.write_bytes(content.replace(b"tokenizer.huggingface.json", b"tokenizer.somebody.s.json1"))
    return path


def mutated(content: bytes, end: int, seed: int) -> tuple[str, bytes]:
    """What was done, and the file after it. `end` is where the header ends."""
    rng, data = random.Random(seed), bytearray(content)
    how = rng.choice((_flip, _flip, _overwrite, _truncate, _cut, _rename, _weights, *[_value] * 3, *[_info] * 2))
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
    """The type of a value of the metadata, or the value."""
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
    """The dimensions, the type or the offset of a tensor."""
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
    """One name where another was."""
    one, other = rng.choice(NAMES)
    data[:end] = data[:end].replace(one, other, rng.choice((1, -1)))


def _weights(rng: random.Random, data: bytearray, end: int) -> None:
    for _ in range(rng.choice((1, 100, 10000))):
        data[rng.randrange(end, len(data))] = rng.choice((0, 0x7C, 0xFF, rng.randrange(256)))


def outcome_of_file(path: Path, beside: Path) -> str:
    """Load a file as a target and make some passes; a short word of what came of it."""
    try:
        pair = load_pair(path, draft=beside, backend="native")
        pair.tokenizer("Ann's 3 bags")
        cache = pair.target.new_cache()
        logits, states = cache.extend([1, 5, 9], rows=3)
        cache.rollback(1)
        cache.extend([4], rows=1)
    except SpecdecError as error:
        return "refused" if _is_sentence(str(error)) else f"bad: no sentence: {error!s:.100}"
    is_sound = logits.shape == (3, pair.target.vocab_size) and torch.isfinite(logits).all() and torch.isfinite(states).all()
    return "works" if is_sound else "bad: works with values that are not finite"


def outcome_of_head(folder: Path) -> str:
    """Load a head and ask it once."""
    try:
        head = AcceptanceHead.from_pretrained(folder)
        said = head.estimator()(torch.zeros(head.card.hidden_size), 0, (0.0,) * len(head.card.scalars))
    except SpecdecError as error:
        return "refused" if _is_sentence(str(error)) else f"bad: no sentence: {error!s:.100}"
    return "works" if 0 <= said <= 1 else "bad: works with values that are not finite"


def _is_sentence(message: str) -> bool:
    return len(message) > 30 and "Traceback" not in message and message.count("\n") < 3


def watched(do: Callable[[], str]) -> str:
    """An outcome, other errors and waste of memory among them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    faulthandler.dump_traceback_later(SLOW_S, exit=True)
    try:
        found = do()
    except Exception as error:
        found = f"bad: {type(error).__name__}: {error!s:.200}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    is_large = grown > LARGE_BYTES and "asan" not in os.environ.get("LD_PRELOAD", "")
    return f"bad: took {grown / 1e9:.1f} GB" if is_large else found


Found = Counter[tuple[str, str]]


def _note(found: Found, what: str, outcome: str, seed: int) -> None:
    found[what, f"{outcome} (seed {seed})" if outcome.startswith("bad") else outcome] += 1


def fuzz_files(folder: Path, num: int, *, start: int = 0) -> Found:
    """How often which mutation had which outcome."""
    sound = [sound_file(folder, precision=p, is_whole=w) for p, w in (("q8_0", True), ("q4_1", False))]
    contents = [(path.read_bytes(), Header(path).end) for path in sound]
    assert outcome_of_file(sound[0], sound[0]) == "works"
    found: Found = Counter()
    for seed in range(start, start + num):
        what, content = mutated(*contents[seed % len(contents)], seed)
        path = folder / "mutated.gguf"
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        outcome = watched(lambda path=path, seed=seed: outcome_of_file(path, sound[seed % len(sound)]))
        _note(found, what, outcome, seed)
    return found


def fuzz_heads(folder: Path, num: int, *, start: int = 0) -> Found:
    """The same for the files of the head of the reference pair."""
    AcceptanceHead.from_pretrained(REFERENCE / "head").save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".safetensors", ".json")}
    found: Found = Counter()
    for seed in range(start, start + num):
        rng = random.Random(seed)
        name = rng.choice(sorted(name for name in files for _ in range(3 if name.endswith(".safetensors") else 1)))
        data = bytearray(files[name])
        end = 8 + struct.unpack_from("<Q", data)[0] if name.endswith(".safetensors") else len(data)
        how = rng.choice((_flip, _overwrite, _truncate, _cut, _weights if end < len(data) else _flip))
        how(rng, data, end)
        for other, content in files.items():
            (folder / other).write_bytes(bytes(data) if other == name else content)
        _note(found, f"{name} {how.__name__.removeprefix('_')}", watched(lambda: outcome_of_head(folder)), seed)
    return found


def told(found: Found) -> list[str]:
    """A line for each class of outcome, bad ones last."""
    ordered = sorted(found.items(), key=lambda item: (item[0][1][:3] == "bad", item))
    return [f"{num:5} {what:30} {outcome}" for (what, outcome), num in ordered]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--heads", type=int, default=100)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    torch.set_num_threads(1)  # else every load times backends with one thread and with several
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        folder = Path(name)
        found = fuzz_files(folder, given.num, start=given.start) + fuzz_heads(folder, given.heads, start=given.start)
    print("\n".join(told(found)))
    num_bad = sum(num for (_, outcome), num in found.items() if outcome.startswith("bad"))
    print(f"{sum(found.values())} files, {num_bad} bad outcomes")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
