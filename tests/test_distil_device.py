"""A distillation on a device that is not the CPU, without one: `toy_device.py` refuses what a GPU refuses."""

import os
import subprocess
import sys
from pathlib import Path

from test_distil_kept import filled

from specdecpp.testing import tiny_model, tiny_tokenizer


def test_everything_lies_on_the_device_of_the_target(tmp_path: Path) -> None:
    """Catches a tensor that is made without a device, from choosing a shape to the file: on a GPU the training failed at its
    first step, when the text had been written."""
    tiny_model("llama", seed=1, layers=4, head_dim=16).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    filled(tmp_path)
    command = [sys.executable, str(Path(__file__).with_name("toy_device.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["draft", "draft.gguf draft"]
