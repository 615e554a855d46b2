"""The recipes: every script runs as far as its help, growing a target changes nothing, nor does packing its documents."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "reference_pair"))
import distil_draft
import models
import train_target

sys.path.pop(0)

RECIPES = Path(__file__).parents[1] / "recipes"
SHAPE = {"num_hidden_layers": 2, "intermediate_size": 64}


def random_model(layers: int, seed: int) -> LlamaForCausalLM:
    return models.build(SHAPE | {"num_hidden_layers": layers}, vocabulary=50, seed=seed).eval()


@torch.no_grad()
def test_a_grown_target_computes_what_the_shallow_one_did() -> None:
    """Catches a block in the wrong order, or a new one that does not begin as the identity."""
    shallow = random_model(3, seed=1)
    deep = train_target.grown(shallow, random_model(5, seed=2))
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(deep(input_ids=ids).logits, shallow(input_ids=ids).logits)
    assert len(deep.model.layers) == 5


@torch.no_grad()
def test_documents_of_one_row_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a mask or an offset that leaks: the teacher must say the same of a document alone and in a packed row."""
    model = random_model(2, seed=4)
    monkeypatch.setattr(distil_draft, "mixed_precision", nullcontext)  # bfloat16 where there is AMX
    documents = [[1, 3, 9, *range(10 + n, 10 + 2 * n), 2] for n in (5, 9, 3, 12)]
    made = distil_draft.lessons(documents, assistant=9, length=32)
    assert [len(row) for row in distil_draft.rows_of(made, length=32)] == [3, 1]
    distil_draft.teach(model.model, made, length=32, rows=3)
    for lesson in made:
        alone = model.model(input_ids=torch.tensor([lesson.ids])).last_hidden_state[0]
        torch.testing.assert_close(lesson.hidden, alone[lesson.answer])
        assert lesson.start == 3


def test_every_script_says_what_it_takes() -> None:
    """Catches a script that names what the library no longer has: all are imported, in one process, and asked for help."""
    scripts = [path for path in sorted(RECIPES.glob("*/*.py")) if "ArgumentParser" in path.read_text(encoding="utf-8")]
    assert {"publish", "evaluate", "tables"} <= {path.stem for path in scripts}
    code = (
        "import runpy, sys\n"
        "for path in sys.argv[1:]:\n"
        "    sys.argv = [path, '--help']\n"
        "    try:\n"
        "        runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0, path\n"
    )
    named = os.pathsep.join(str(folder) for folder in {path.parent for path in scripts})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([named, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-c", code, *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("usage:")] == [p.name for p in scripts]
