"""Spec-Bench's check that greedy answers are those of the target alone: 96 of its 480 questions, the reference pair.

The target's own answers are transformers'; ours are written in Spec-Bench's format, and its program compares the files.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import Source
from transformers import AutoModelForCausalLM

import specdecpp as sd
from specdecpp.loading.pair import REFERENCE
from specdecpp.policies import Costs

SOURCE = Source(
    repository="hemingkx/Spec-Bench",
    commit="fd2c1cd7d2201ef71db4c5f4e455008f017967bf",
    folders=("evaluation", "data/spec_bench"),
)
QUESTIONS = [json.loads(line) for line in (SOURCE.root / "data/spec_bench/question.jsonl").read_text("utf-8").splitlines()][::5]
POLICIES = ("cost-aware", "fixed:4", "cumulative:0.2", "specdecpp:0.7", "frontier", "ema-skip", "tree:2x2")
NUM_TOKENS, CONTEXT = 32, 1024
COSTS = Costs.relative(0.1)
"""Not measured: on a busy machine those may forbid to draft."""


@cache
def pair() -> sd.Pair:
    return sd.load_pair("reference")


@cache
def prompts() -> list[list[int]]:
    """The turns of all questions, each by itself, the end of those that are longer than the context."""
    texts = [turn for question in QUESTIONS for turn in question["turns"]]
    return [pair().tokenizer.encode(text)[NUM_TOKENS - CONTEXT :] for text in texts]


@cache
def own() -> list[list[int]]:
    """The target's own greedy answers, by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.float32)
    options: Any = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts()]


def written(path: Path, answers: list[list[int]]) -> str:
    """Write answers in the format of Spec-Bench; the name of the file."""
    texts = iter(pair().tokenizer.decode(tokens) for tokens in answers)
    lines = [json.dumps({**q, "choices": [{"index": 0, "turns": [next(texts) for _ in q["turns"]]}]}) for q in QUESTIONS]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path.name


def compared(folder: Path, answers: list[list[int]]) -> str:
    """What Spec-Bench's program prints of the target's own answers and these."""
    names = written(folder / "own.jsonl", own()), written(folder / "answers.jsonl", answers)
    command = [sys.executable, SOURCE.root / "evaluation/equal.py", "--file-path", f"{folder}/"]
    command += ["--jsonfile1", names[0], "--jsonfile2", names[1]]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("policy", POLICIES)
def test_equal(policy: str, tmp_path: Path) -> None:
    """Catches an answer that differs from the target's own."""
    decoder = sd.Decoder(pair(), policy=policy, costs=COSTS, remember=False)
    outputs = [decoder.generate(ids, max_tokens=NUM_TOKENS, temperature=0.0, seed=0) for ids in prompts()]
    assert sum(output.metrics.num_accepted_draft_tokens for output in outputs) > len(outputs), "the comparison is vacuous"
    assert compared(tmp_path, [list(output.tokens) for output in outputs]) == "Result totally Equal!"


def test_one_other_token_is_found(tmp_path: Path) -> None:
    """Catches a comparison of files that are not these answers."""
    answers = [*own()[:-1], [*own()[-1][:-1], own()[-1][-1] ^ 1]]
    assert compared(tmp_path, answers) == "Not Equal!"
