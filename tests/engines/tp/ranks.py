"""A program: answers of the reference pair in float32, the target whole or in shards. Each rank writes its own, as JSON.

torchrun --nproc-per-node 2 ranks.py FOLDER         # FOLDER/0.json, FOLDER/1.json
python ranks.py FOLDER                              # FOLDER/0.json: one process
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

import specdecpp as sd
from specdecpp.loading.pair import REFERENCE
from specdecpp.policies import Costs

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class OwnClock(StoppingCriteria):
    """Runs out on every rank at another token, as a limit on time does."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((1,), input_ids.shape[1] >= 20 + 5 * RANK)


def target() -> Any:
    if WORLD == 1:
        return AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.float32, tp_plan="auto")
    held = model.model.layers[0].mlp.up_proj.weight.to_local()
    assert held.shape[0] * WORLD == model.config.intermediate_size, "the target is not in shards"
    return model


def answers(model: Any) -> dict[str, Any]:
    draft = AutoModelForCausalLM.from_pretrained(REFERENCE / "draft", dtype=torch.float32)
    head = sd.AcceptanceHead.from_pretrained(REFERENCE / "head")
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
    inputs = tokenizer("What is a guitar?\n", return_tensors="pt")
    fixed = sd.custom_generate(draft, policy=sd.Fixed(k=4))
    seeded = sd.custom_generate(draft, policy=sd.CumulativeConfidence(), seed=7)
    weighing = sd.custom_generate(draft, policy=sd.CostAware(head=head))
    given = sd.custom_generate(draft, policy=sd.CostAware(head=head), costs=Costs(draft_s=0.1, passes={1: 1.0}), seed=7)

    def generate(**options: Any) -> dict[str, Any]:
        output = model.generate(
            **inputs, max_new_tokens=32, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, **options
        )
        metrics = getattr(output, "metrics", None)
        steps = metrics and [metrics.num_spec_steps, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens]
        return {"tokens": output.sequences[0].tolist(), "steps": steps}

    torch.manual_seed(RANK)  # generators that have gone apart: the first one's draw counts
    found = {
        "plain": generate(do_sample=False),
        "greedy": generate(do_sample=False, custom_generate=fixed),
        "processed": generate(do_sample=False, custom_generate=fixed, no_repeat_ngram_size=2),
        "plain-processed": generate(do_sample=False, no_repeat_ngram_size=2),
        "sampled": generate(do_sample=True, top_p=0.9, custom_generate=seeded),
        "unseeded": generate(do_sample=True, custom_generate=fixed),
        "head": generate(do_sample=True, custom_generate=given),
        "measured": generate(do_sample=False, custom_generate=weighing),
        "clocks": generate(do_sample=False, custom_generate=fixed, stopping_criteria=[OwnClock()]),
    }
    time.sleep(0.05 * RANK)  # ranks that are not in step must not matter
    return found | {"again": generate(do_sample=True, top_p=0.9, custom_generate=seeded)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = answers(target())
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    if WORLD > 1:
        torch.distributed.destroy_process_group()
