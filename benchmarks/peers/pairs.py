"""The pairs of our own, as float32 checkpoints and GGUF files, with their heads, prompts and the target's greedy text.

    python -m peers.pairs [--no-heads] FOLDER [NAME ...]

`reference` is the pair that ships. The others have random weights, which cost what trained ones cost, and agree as a trained
pair does: the target holds the draft's layers within its own, and what the rest of it adds is scaled down until the target
accepts 0.6 to 0.8 of what the draft draws. Which prompts, tokens and seeds: all fixed here. Their heads are trained as anyone
would train one: `specdecpp train`, then again with `--only calibrate --temperature 0`.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MAX_TOKENS = 96
"""Tokens of the target's own greedy text that are kept; no answer is longer."""
PROMPTS = (
    "Lena has 14 jars of honey and fills 6 more every week. How many jars does she have after 5 weeks?",
    "A baker sells 18 rolls in the morning and 3 times as many at noon. Each roll costs $2. How much does he earn?",
    "Omar reads 25 pages a day. His book has 300 pages and he has read 75 of them. How many more days does he need?",
    "A bus holds 48 people. 4 buses are full and a fifth is half full. How many people are on the buses?",
    "Ines saves $12 a week and her brother $7. How much do the two save together in 9 weeks?",
    "A farmer has 60 eggs. He packs them into boxes of 12 and sells each box for $5. How much does he get?",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama. Heads have 64 dimensions."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int

    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.inner,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config).eval()


DRAFT = Shape(hidden=192, layers=4, heads=3, kv_heads=1, inner=320)
TARGETS = {  # with what the rest of the target is scaled by
    "30m-2m": (Shape(hidden=512, layers=10, heads=8, kv_heads=4, inner=1280), 0.1),
    "120m-2m": (Shape(hidden=1024, layers=10, heads=16, kv_heads=8, inner=2816), 0.1),
}
GAIN, SHARPNESS, FAINT = 1.0, 3.3, 0.1
"""How much a layer adds to the draft's stream; the spread of its logits; the size of the half of an embedding that the output
layer reads, small so that a token does not make itself likely."""
NAMES = ("reference", *TARGETS)


def main() -> None:
    torch.set_num_threads(1)
    arguments = sys.argv[1:]
    has_heads = arguments[0] != "--no-heads"
    folder, *names = arguments if has_heads else arguments[1:]
    for name in names or NAMES:
        prepare(Path(folder) / name, has_head=has_heads)


def prepare(folder: Path, *, has_head: bool = True) -> None:
    """Everything of one pair, in a folder that is complete or absent; a head for it, if it is to have one and has none."""
    if not (folder / "pair.json").exists():
        _write(folder)
    for role in ("target", "draft"):
        _write_ggufs(folder, role)
    if has_head and not (folder / "head").exists():
        print(f"training a head for {folder}", file=sys.stderr)
        _write_head(folder)


def _write(folder: Path) -> None:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from specdecpp.loading.pair import REFERENCE

    logging.set_verbosity_error()
    shutil.rmtree(folder, ignore_errors=True)
    print(f"writing {folder}", file=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
    models = _reference() if folder.name == "reference" else random_pair(folder.name)
    for role, model in zip(("target", "draft"), models, strict=True):
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    prompts = [as_ids(tokenizer, prompt) for prompt in PROMPTS]
    found = {
        "num_parameters": [sum(p.numel() for p in model.parameters()) for model in models],
        "prompts": prompts,
        "greedy": [greedy(models[0], ids) for ids in prompts],
        "acceptance": [round(acceptance(*models, prompts, temperature), 3) for temperature in (0.0, 1.0)],
    }
    (folder / "pair.json").write_text(json.dumps(found) + "\n")


def _reference() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    from specdecpp.loading.pair import REFERENCE

    target, draft = (AutoModelForCausalLM.from_pretrained(REFERENCE / r, dtype=torch.float32) for r in ("target", "draft"))
    return target.eval(), draft.eval()


def _write_head(folder: Path) -> None:
    """The head that ships, or one trained on the random pair's own labels."""
    from specdecpp.loading.pair import REFERENCE
    from specdecpp.testing import practice_prompts

    if folder.name == "reference":
        shutil.copytree(REFERENCE / "head", folder / "head")
        return
    work = folder / "training"
    work.mkdir(exist_ok=True)
    prompts, names = work / "prompts.jsonl", {role: str((folder / role).resolve()) for role in ("target", "draft")}
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in practice_prompts()))
    source = {"path": str(prompts.resolve()), "prompt": "field:prompt"}
    recipe = {
        "pair": {**names, "dtype": "float32"},
        "collect": {"sources": [source], "max_tokens": MAX_TOKENS},
        "train": {"head": {"form": "look_ahead"}},
        "out": ".",
    }
    (work / "recipe.yaml").write_text(json.dumps(recipe))  # which is YAML too
    verb, head = [sys.executable, "-m", "specdecpp"], work / "heads/head"
    pair = ("--target", names["target"], "--draft", names["draft"], "--dtype", "float32")
    greedily = ("--temperature", "0", "--prompts", prompts, "--prompt", "field:prompt", "--max-tokens", str(MAX_TOKENS))
    subprocess.run([*verb, "run", work / "recipe.yaml", "--quiet"], check=True)
    subprocess.run([*verb, "calibrate", head, *greedily, *pair], check=True)
    head.rename(folder / "head")
    shutil.rmtree(work)


def as_ids(tokenizer: Any, text: str) -> list[int]:
    """A question in the form that the model was trained on."""
    messages = [{"role": "user", "content": f"{text}\nLet's think step by step."}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False).input_ids


def _write_ggufs(folder: Path, role: str) -> None:
    """The files that are not there yet. In them no token ends a text: every engine goes on to the last that it is asked for."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from specdecpp.loading import gguf_writing

    kinds = (getattr(gguf_writing.Precision, name) for name in ("f32", "bf16", "q8_0", "q4_0"))
    missing = {path: kind for kind in kinds if not (path := folder / f"{role}-{kind}.gguf").exists()}
    if not missing:
        return
    whole = (folder / role / "tokenizer.json").read_text(encoding="utf-8").replace('"</s>"', '"[end]"')
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(whole), bos_token="<s>", eos_token="<pad>")
    model = AutoModelForCausalLM.from_pretrained(folder / role, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for path, precision in missing.items():
        gguf_writing.write(model, tokenizer, path, precision=precision, name=role)


# Random weights that agree


def random_pair(name: str) -> tuple[Any, Any]:
    """A target and a draft of random weights that agree as a trained pair does."""
    shape, rest = TARGETS[name]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        draft, target = DRAFT.model(), shape.model()
        _fill(draft, GAIN, DRAFT.hidden, generator)
        _set_norms(draft, DRAFT.hidden)
        draft.model.embed_tokens.weight.normal_(generator=generator)
        draft.model.embed_tokens.weight[:, DRAFT.hidden // 2 :] *= FAINT
        _fill(target, GAIN * rest, DRAFT.hidden, generator)
        _set_norms(target, DRAFT.hidden)
        target.model.embed_tokens.weight.normal_(0, rest * FAINT, generator=generator)
        target.model.embed_tokens.weight[:, : DRAFT.hidden] = draft.model.embed_tokens.weight
        for own, inner in zip(target.model.layers, draft.model.layers, strict=False):
            _implant(own, inner, shape)
    return target, draft


def _fill(model: Any, gain: float, width: int, generator: torch.Generator) -> None:
    """Matrices that keep a stream of `width` dimensions at unit size; what they add to it is multiplied by `gain`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            reads_stream = not name.endswith(("o_proj", "down_proj"))
            size = (width if reads_stream else module.in_features) ** -0.5
            module.weight.normal_(0, size if reads_stream else gain * size, generator=generator)


def _set_norms(model: Any, width: int) -> None:
    """Norms that see a stream whose size is in its first `width` dimensions; the last one sets the spread of the logits."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_((width / len(parameter)) ** 0.5)
            if name == "model.norm.weight":
                parameter.mul_(SHARPNESS / FAINT / (width / 2) ** 0.5)
                parameter[: width // 2] = parameter[width:] = 0


def _implant(own: Any, inner: Any, shape: Shape) -> None:
    """Put the draft's layer into the target's: its heads are the first ones, its stream the first dimensions."""
    d, i, q = DRAFT.hidden, DRAFT.inner, DRAFT.heads * 64
    kv = -(-DRAFT.heads // (shape.heads // shape.kv_heads)) * 64  # key-value heads that the first query heads read
    _block(own.self_attn.q_proj.weight, inner.self_attn.q_proj.weight, rows=q)
    for name in ("k_proj", "v_proj"):
        copies = getattr(inner.self_attn, name).weight.repeat(kv // 64, 1)  # the draft has one such head
        _block(getattr(own.self_attn, name).weight, copies, rows=kv)
    for name in ("gate_proj", "up_proj"):
        _block(getattr(own.mlp, name).weight, getattr(inner.mlp, name).weight, rows=i)
    for matrix, part, columns in (
        (own.self_attn.o_proj.weight, inner.self_attn.o_proj.weight, q),
        (own.mlp.down_proj.weight, inner.mlp.down_proj.weight, i),
    ):
        matrix[:, :columns] = 0
        matrix[:d, :columns] = part


def _block(matrix: Tensor, part: Tensor, *, rows: int) -> None:
    """The first rows read what the draft reads, and nothing else."""
    matrix[:rows] = 0
    matrix[:rows, : part.shape[1]] = part


# What the target says


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> dict[str, list]:
    """The target's own greedy text, and how far its two best logits lie apart at each token."""
    from transformers import DynamicCache

    cache, unread, tokens, gaps = DynamicCache(), prompt, [], []
    for _ in range(MAX_TOKENS):
        logits = model(torch.tensor([unread]), past_key_values=cache, use_cache=True).logits[0, -1]
        best = logits.topk(2)
        unread = [int(best.indices[0])]
        tokens += unread
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
    return {"tokens": tokens, "gaps": gaps}


@torch.inference_mode()
def acceptance(target: Any, draft: Any, prompts: list[list[int]], temperature: float) -> float:
    """The share of single draft tokens that the target accepts, along its own answers."""
    torch.manual_seed(0)
    shares = []
    for prompt in prompts:
        options = {"do_sample": temperature > 0, "top_k": 0, "eos_token_id": None, "max_new_tokens": 64, "pad_token_id": 0}
        ids = target.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
        p, q = (model(ids).logits[0, len(prompt) - 1 : -1] for model in (target, draft))
        if temperature:
            shares.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1))
        else:
            shares.append((p.argmax(-1) == q.argmax(-1)).float())
    return float(torch.cat(shares).mean())


if __name__ == "__main__":
    main()
