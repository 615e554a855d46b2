"""The recipe as a file: what is wrong in it is told by the key, before anything is loaded."""

from pathlib import Path

import pytest

from specdecpp import DataError
from specdecpp.training.recipe import Recipe

WHOLE = "[{path: p.jsonl, prompt: text}]"
WRONG = {
    "": "holds no recipe",
    "collect: [": "is not readable YAML",
    "out: x": "collect is missing, and it has no default",
    "colect: {}": r"colect is not a key; is collect meant\?",
    "name: x": "collect is missing",
    "collect: {sources: []}": r"collect\.sources: Tuple should have at least 1 item",
    "collect: {sources: p.jsonl}": "collect.sources: it should be a valid array, got 'p.jsonl'",
    "collect: {sources: [{path: p.jsonl}]}": r"collect\.sources\[0\]\.prompt is missing",
    "collect: {sources: [{path: p.jsonl, prompt: txt}]}": r"collect\.sources\[0\]: there is no prompt builder 'txt'",
    "collect: {sources: [{path: q.jsonl, prompt: text}]}": r"collect\.sources\[0\]\.path: there is nothing at .*q\.jsonl",
    "collect: {sources: [{path: p.jsonl, prompt: text, split: val}]}": "split: it should be 'train', 'dev' or 'test', got",
    "collect: {sources: *, max_tokns: 3}": r"collect\.max_tokns is not a key; is max_tokens meant\?",
    "collect: {sources: *, max_tokens: many}": r"collect\.max_tokens: it should be a valid integer, got 'many'",
    "collect: {sources: *, max_tokens: true}": r"collect\.max_tokens: it should be a valid integer, got True",
    "collect: {sources: *, max_tokens: 0}": r"collect\.max_tokens: it should be greater than 0, got 0",
    "collect: {sources: *, splits: [dev, val]}": r"collect\.splits\[1\]: it should be 'train', 'dev' or 'test', got 'val'",
    "collect: {sources: *, features: [leafs]}": r"features\[0\]: it should be 'mixed' or 'leaf', got 'leafs'",
    "collect: {sources: *, branches: {odds: all}}": r"collect\.branches\.odds: it should be a valid boolean, got 'all'",
    "collect: {sources: *}\nsampling: {temperature: warm}": r"sampling\.temperature: it should be a valid number, got 'warm'",
    "collect: {sources: *}\nsampling: {top_p: 2}": r"sampling: top_p must lie in \(0, 1\]",
    "collect: {sources: *}\npair: {dtype: half}": "pair.dtype: it should be 'auto', 'float64'",
    "collect: {sources: *}\npair: {draft: ./none}": r"pair\.draft: there is nothing at .*none",
    "collect: {sources: *}\ntrain: [a]": "train must be a mapping of names to heads",
    "collect: {sources: *}\ntrain: {a: {form: up}}": r"train\.a\.form: it should be 'lagged' or 'look_ahead', got 'up'",
    "collect: {sources: *}\ntrain: {a: {warmup: 1}}": r"train\.a\.warmup: it should be less than 1",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_recipe_is_told_by_the_key(tmp_path: Path, text: str) -> None:
    """Catches a typing error that is taken for nothing, and one that ends in a traceback hours later."""
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "recipe.yaml").write_text(text.replace("*", WHOLE))
    with pytest.raises(DataError, match=rf"recipe\.yaml.*{WRONG[text]}"):
        Recipe.read(tmp_path / "recipe.yaml")


def test_a_recipe_says_what_it_says(tmp_path: Path) -> None:
    """Catches a value that is lost, paths relative to the wrong folder, and 1e-3, which PyYAML takes for text."""
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n')
    text = """
    pair: {target: org/large, draft: org/small, dtype: bfloat16, device: cuda}
    sampling: {temperature: 7e-1, top_k: 40}
    collect:
      sources: [{path: p.jsonl, prompt: "field:x", split: test}, {path: org/data, prompt: gsm8k, part: main}]
      branches: null
    out: ../there
    """
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = Recipe.read(tmp_path / "recipe.yaml")
    assert (recipe.pair.target, recipe.pair.dtype, recipe.pair.device) == ("org/large", "bfloat16", "cuda")
    assert (recipe.sampling.temperature, recipe.sampling.top_k) == (0.7, 40)
    assert [s.path for s in recipe.collect.sources] == [str(tmp_path / "p.jsonl"), "org/data"]
    assert recipe.collect.branches is None
    assert recipe.labels.resolve() == (tmp_path.parent / "there" / "labels").resolve()
    with pytest.raises(DataError, match="there is no recipe"):
        Recipe.read(tmp_path / "other.yaml")
