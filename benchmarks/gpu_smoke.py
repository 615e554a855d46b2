"""Whether everything that takes a device works on a GPU: caches that grow, sessions that are dropped, every verb, files.

    python benchmarks/gpu_smoke.py                                   # on a card, three minutes; writes results/gpu_smoke.json
    python benchmarks/gpu_smoke.py --target p.gguf --draft q.gguf    # the lines of files with a pair of yours
    python benchmarks/gpu_smoke.py --device cpu --out FILE           # a dry run: it says nothing about a card

Models are tiny or the pair that ships, and nothing is timed: a line passes when what it runs ends well, and where two ways must
say the same, when they do. A line that fails does not stop the others. What there was no time for (`--budget`) is left out, and
the result says so. docs/results.md has the lines in words.
"""

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from typer.testing import CliRunner

import specdecpp as sd
from specdecpp.backends import GraphModel, LeanModel
from specdecpp.cli import app
from specdecpp.lab.trees import CostAwareTree, Widths
from specdecpp.loading import gguf_writing
from specdecpp.loading.models import load_model
from specdecpp.loading.pair import REFERENCE
from specdecpp.loading.tokenizers import load_tokenizer
from specdecpp.policies import CumulativeConfidence, Fixed
from specdecpp.testing import practice_prompts, tiny_draft, tiny_model, tiny_tokenizer

OUT = Path(__file__).parent / "results" / "gpu_smoke.json"
LENGTHS = (20, 400, 1500, 20)
PROMPT = "Tell me about the sea."


@dataclass(frozen=True)
class Place:
    """Where the lines run, and what they share."""

    device: str
    folder: Path
    target: str
    draft: str

    @property
    def prompts(self) -> str:
        return str(self.folder / "prompts.jsonl")

    def verb(self, name: str, *arguments: str, given: str = "", device: bool = True) -> str:
        """The last line of what a verb says. Raises RuntimeError where it fails."""
        where = ["--device", self.device] if device else []
        result = CliRunner().invoke(app, [name, *arguments, *where], input=given)
        if result.exit_code:
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            raise RuntimeError(f"exit code {result.exit_code}: {result.stderr.strip()[-300:]}")
        return ([line.strip() for line in result.stdout.splitlines() if line.strip()] or [""])[-1][:100]


Line = Callable[[Place], str]
"""What is tried; it gives a note."""


class LeftOut(Exception):
    """Why a line cannot be tried here."""


# --- recorded work ---------------------------------------------------------------------------------------------------------


def growing_pairs(place: Place) -> tuple[sd.Pair, sd.Pair]:
    """One whose passes are recorded, and the same by `LeanModel`."""
    target = tiny_model("llama", seed=1, max_position_embeddings=4096)
    models = [model.to(place.device) for model in (target, tiny_draft(target, noise=0.4))]
    backends = [[kind(model) for model in models] for kind in (GraphModel, LeanModel)]
    recorded, plain = (sd.Pair(target=p, draft=q, tokenizer=tiny_tokenizer()) for p, q in backends)
    return recorded, plain


TEXT = [3 + (7 * i + i // 11) % 60 for i in range(1500)]
OPTIONS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}


def growth(place: Place) -> str:
    """One decoder, texts of several lengths in turns, answers that outgrow the cache."""
    pair, plain = growing_pairs(place)
    decoder, alone = sd.Decoder(pair, policy=CumulativeConfidence()), sd.Decoder(plain, policy=Fixed(k=0))
    for n in (*LENGTHS, 200):
        own, expected = (of.generate(TEXT[:n], **OPTIONS).tokens for of in (decoder, alone))
        if own != expected:
            raise RuntimeError(f"after a text of {n} tokens the answer is not that of the target alone")
    return f"texts of {', '.join(map(str, (*LENGTHS, 200)))} tokens"


def begun(decoder: sd.Decoder, lengths: tuple[int, ...]) -> None:
    """Requests in turns, of which none is finished."""
    sessions = [decoder.start(TEXT[:n], **OPTIONS) for n in lengths]
    for session in sessions:
        session.prefill()
    for session in sessions * 3:
        session.step()


def dropped(place: Place) -> str:
    """Many sessions at once that are given up in the middle, and their caches used again for longer texts."""
    pair, plain = growing_pairs(place)
    decoder, alone = sd.Decoder(pair, policy=CumulativeConfidence(), reuses=False), sd.Decoder(plain, policy=Fixed(k=0))
    for lengths in ((200, 20, 400, 200), (1500, 20, 400)):
        begun(decoder, lengths)
        gc.collect()
    own, expected = (of.generate(TEXT[:400], **OPTIONS).tokens for of in (decoder, alone))
    if own != expected:
        raise RuntimeError("a cache that was given back gives another answer")
    return "seven sessions"


def several(place: Place) -> str:
    """Requests that share passes: eight texts of different lengths, greedy, and what the target says alone."""
    pair, plain = growing_pairs(place)
    texts = [TEXT[:n] for n in (20, 3, 400, 1, 60, 200, 1500, 9)]
    own = [out.tokens for out in sd.Decoder(pair, policy=CumulativeConfidence()).generate_all(texts, **OPTIONS)]
    alone = sd.Decoder(plain, policy=Fixed(k=0))
    same = sum(tokens == alone.generate(text, **OPTIONS).tokens for tokens, text in zip(own, texts, strict=True))
    if same < len(texts):
        raise RuntimeError(f"{len(texts) - same} of {len(texts)} answers are not those of the target alone")
    return f"{len(texts)} requests"


def trees(place: Place) -> str:
    """Trees of the lab by whole passes, over texts that outgrow a cache."""
    pair, plain = growing_pairs(place)
    alone = sd.Decoder(plain, policy=Fixed(k=0))
    for policy in (Widths(widths=(4, 2, 1)), CostAwareTree()):
        for n in (20, 400, 20):
            own, expected = (of.generate(TEXT[:n], **OPTIONS).tokens for of in (sd.Decoder(pair, policy=policy), alone))
            if own != expected:
                raise RuntimeError(f"after a text of {n} tokens the answer is not that of the target alone")
        drawn: dict[str, Any] = {**OPTIONS, "temperature": 1.0}
        sd.Decoder(pair, policy=policy).generate(TEXT[:20], **drawn, seed=0)
    return "static and by costs"


# --- Python ----------------------------------------------------------------------------------------------------------------


def loaded(backend: Any = None, *, by_map: bool = False) -> Line:
    """`load_pair` with a device, and an answer."""

    def line(place: Place) -> str:
        if by_map and find_spec("accelerate") is None:
            raise LeftOut("accelerate is not installed")
        given: dict[str, Any] = {"device_map": {"": place.device}} if by_map else {"device": place.device}
        pair = sd.load_pair("reference", backend=backend, **given)
        out = sd.Decoder(pair).generate(PROMPT, max_tokens=24, seed=0)
        return f"{type(pair.target).__name__}, {len(out.tokens)} tokens"

    return line


# --- verbs -----------------------------------------------------------------------------------------------------------------


def files(place: Place) -> tuple[str, ...]:
    return "--target", place.target, "--draft", place.draft


def recipe(place: Place, name: str) -> str:
    """The path of one."""
    told = (
        f"pair: {{target: {REFERENCE / 'target'}, draft: {REFERENCE / 'draft'}, device: {place.device}}}\n"
        f"collect:\n  sources:\n    - {{path: {place.prompts}, prompt: text, rows: 48, dev_share: 0.3}}\n"
        f"    - {{path: {place.folder / 'other.jsonl'}, prompt: text, rows: 8, split: test}}\n"
        "  max_tokens: 24\n  shard_size: 32\n  batch: 16\n"
        f"train:\n  own: {{form: look_ahead, width: 16, num_layers: 1, epochs: 1}}\nout: {place.folder / name}\n"
    )
    path = place.folder / f"{name}.yaml"
    path.write_text(told)
    return str(path)


def serve(place: Place) -> str:
    """A server around a pair, and a request."""
    from specdecpp.serving import ServerSettings
    from specdecpp.serving.server import address, bound, server_for

    ready, pair = Event(), sd.load_pair("reference", device=place.device)
    server = server_for(pair, ServerSettings(), on_ready=ready.set)
    with bound("127.0.0.1", 0) as listening:
        thread = Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        ready.wait(60)
        try:
            body = json.dumps({"model": "reference", "prompt": PROMPT, "max_tokens": 16}).encode()
            asked = urllib.request.Request(f"{address(listening)}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return f"{json.load(answer)['usage']['completion_tokens']} tokens"
        finally:
            server.should_exit = True
            thread.join(60)


def distil(*more: str) -> Line:
    def line(place: Place) -> str:
        target = place.target if "--no-check" in more else str(REFERENCE / "target")
        out = str(place.folder / f"draft{len(more)}")
        given = ("--prompts", place.prompts, "--out", out, "--tokens", "1500", "--max-tokens", "16", "--epochs", "1", "--quiet")
        return place.verb("distil", target, *given, *more)

    return line


QUICK = ("--num", "2", "--max-tokens", "16")
LINES: dict[str, Line] = {
    "caches that grow": growth,
    "sessions that are dropped": dropped,
    "several requests in a pass": several,
    "trees of the lab": trees,
    "load_pair(device=)": loaded(),
    'load_pair(device=, backend="lean")': loaded("lean"),
    'load_pair(device=, backend="eager")': loaded("eager"),
    "load_pair(device_map=)": loaded("eager", by_map=True),
    "generate --device": lambda at: at.verb("generate", PROMPT, "--target", "reference", "--max-tokens", "32", "--seed", "1"),
    "generate --device, a pair of files": lambda at: at.verb("generate", PROMPT, *files(at), "--max-tokens", "32"),
    "chat --device, a pair of files": lambda at: at.verb("chat", *files(at), "--max-tokens", "16", given="Hello.\nWhy?\n"),
    "serve --device": serve,
    "train, pair.device in a recipe": lambda at: at.verb("train", recipe(at, "recipe"), device=False),
    "distil --device": distil("--layers", "1+1"),
    "distil --device, a file": distil("--layers", "1+1", "--no-check"),
    "check --device": lambda at: at.verb("check", "--target", "reference", "--num", "2", "--quick"),
    "demo --device": lambda at: at.verb("demo", "--target", "reference", "--num", "1", "--cycles", "1"),
    "bench --device": lambda at: at.verb(
        "bench", "--target", "reference", "--quick", *QUICK, "--temperature", "1", "--policy", "fixed:2"
    ),
}


def prepared(folder: Path, target: str | None, draft: str | None, device: str) -> Place:
    """Prompts, and a pair of files unless one is named."""
    for name, some in (("prompts", practice_prompts()), ("other", practice_prompts()[:16])):
        rows = [json.dumps({"text": f"{text[:60]} ({name})"}) for text in some]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    if target is None or draft is None:
        for name in ("target", "draft"):
            model = load_model(REFERENCE / name, dtype="auto", device=None, device_map=None)
            path, precision = folder / f"{name}.gguf", gguf_writing.Precision.q8_0
            gguf_writing.write(model, load_tokenizer(REFERENCE / name), path, precision=precision, name=name)
        target, draft = str(folder / "target.gguf"), str(folder / "draft.gguf")
    return Place(device=device, folder=folder, target=target, draft=draft)


def tried(line: Line, place: Place) -> tuple[str, str]:
    """(passed, failed or left out, a note)."""
    try:
        return "passed", line(place).replace(str(place.folder), "FOLDER")
    except LeftOut as why:
        return "left out", str(why)
    except Exception as error:  # whatever it is belongs into the table
        traceback.print_exc()
        note = " ".join(str(error).split())[:300]
        return "failed", f"{type(error).__name__}: {note}".replace(str(place.folder), "FOLDER")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run everything that takes a device, briefly.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", help="a GGUF file, with --draft; by default files of the reference pair are made")
    parser.add_argument("--draft")
    parser.add_argument("--budget", type=float, default=170.0, help="seconds; lines for which none are left are left out")
    parser.add_argument("--only", help="lines whose name has this in it")
    parser.add_argument("--out", type=Path, help=f"default on a card: {OUT}")
    given = parser.parse_args(arguments)
    is_card = torch.device(given.device).type == "cuda"
    if is_card and not torch.cuda.is_available():
        print("error: there is no GPU here. --device cpu is a dry run.", file=sys.stderr)
        return 2
    found: dict[str, Any] = {
        "device": given.device,
        "card": torch.cuda.get_device_name(given.device) if is_card else None,
        "is_dry_run": not is_card,
        "date": date.today().isoformat(),
        "versions": {"specdecpp": sd.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "lines": [],
    }
    print(found["card"] or f"DRY RUN on {given.device}: it says nothing about a card", flush=True)
    began, out = time.monotonic(), given.out or (OUT if is_card else None)
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")  # nothing that was measured before, nothing left behind
        place = prepared(Path(name), given.target, given.draft, given.device)
        for title, line in LINES.items():
            if given.only and given.only not in title:
                continue
            started = time.monotonic()
            outcome, note = ("left out", "no time") if started - began > given.budget else tried(line, place)
            row = {"line": title, "outcome": outcome, "seconds": round(time.monotonic() - started, 1), "note": note}
            found["lines"].append(row)
            if out is not None:
                out.write_text(json.dumps(found, indent=1) + "\n")
    for row in found["lines"]:
        print(f"{row['line']:38} {row['outcome']:9} {row['seconds']:6.1f} s  {row['note'][:90]}")
    return int(any(row["outcome"] == "failed" for row in found["lines"]))


if __name__ == "__main__":
    sys.exit(main())
