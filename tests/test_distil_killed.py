"""A distillation whose process is killed in every phase, from the choice of a shape to the check."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specdecpp.distillation.run import CARD
from specdecpp.testing import practice_prompts, tiny_model, tiny_tokenizer

SCRIPT = Path(__file__).with_name("killed_distillation.py")
SAME = ("text/*", "draft/*", "labels/shard-*", "heads/head/head.safetensors", "head/head.safetensors")
"""What must be the same to the byte; other files say when or where they were made."""


def made(out: Path) -> dict[str, str]:
    files = [path for pattern in SAME for path in out.glob(pattern) if not path.name.endswith(".part")]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_killed_in_every_phase_it_ends_with_the_same_draft_and_head(tmp_path: Path) -> None:
    """Catches half a file that is taken for a whole one, work that is lost or done twice, a training that goes on with less
    than its state, and a head of another draft. One kill (-9) a phase; `killed_distillation.py FOLDER 10` makes ten."""
    tiny_model("llama", seed=1, layers=4, head_dim=16).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    rows = [json.dumps({"text": prompt[:40]}) for prompt in practice_prompts()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    command = [sys.executable, str(SCRIPT), str(tmp_path), "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    ends = [line.rpartition(" ") for line in done.stdout.splitlines()]
    first, *killed, last = ends
    assert (first[2], last[2]) == ("0", "0"), done.stderr[-3000:]
    assert {phase: int(end) for phase, _, end in killed if int(end) != signal.SIGKILL} == {}, done.stderr[-3000:]
    assert len({phase for phase, _, _ in killed}) == 11
    assert len(made(tmp_path / "whole")) > 15
    assert made(tmp_path / "killed") == made(tmp_path / "whole")
    cards = [json.loads((tmp_path / name / CARD).read_text()) for name in ("whole", "killed")]
    assert cards[0]["acceptance"] == cards[1]["acceptance"]
    assert all("check" in card for card in cards)
