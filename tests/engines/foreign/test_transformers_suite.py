"""transformers' own tests of assisted generation: its vectors over `verify`, and its mixin through `custom_generate`, on the
tiny model of every family that transformers has a causal LM of."""

import importlib
import sys
import unittest
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sources import Source
from torch import Tensor
from transformers import GenerationMixin
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdecpp.integrations.transformers import SpeculativeOutput, custom_generate
from specdecpp.policies import Fixed
from specdecpp.sampling import streams
from specdecpp.verify import TokenVerification

SOURCE = Source(
    repository="huggingface/transformers",
    commit="0dad7b822255a0ae261ec45ae937371e859ffd1a",  # v5.10.2
    folders=("src", "tests", "utils"),
)
METHODS = (
    "test_assisted_decoding_matches_greedy_search_0_random",
    "test_assisted_decoding_matches_greedy_search_1_same",
    "test_assisted_decoding_sample",
)
FAMILIES = sorted({model_type_to_module_name(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})
REFUSALS = ("encoder-decoder", "input_ids alone", "recurrent state", "is not supported")
"""Words of our own errors where a model or an input is not one that speculative decoding here runs: a reason to skip."""
CHECK = "_check_generate_outputs"
UNSUPPORTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "cache_implementation")
"""Options that `custom_generate` refuses, taken out of the calls that it answers: the tokens are compared."""

sys.path.insert(0, str(SOURCE.root))  # `tests` is theirs: the tests of this library are no package


def named(name: str) -> Any:
    """A module of theirs. What their code warns of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


theirs = named("tests.generation.test_utils")
plain: Any = vars(GenerationMixin)["generate"]


def speculative_sampling(tokens: Tensor, q: Tensor, length: int, p: Tensor, is_ended: bool) -> tuple[Tensor, Tensor]:
    """Our ratio test with the signature of transformers' function, which takes logits."""
    assert not is_ended
    draft = tokens[0, -length:]
    verdict = TokenVerification()(p[0].softmax(-1).nan_to_num(0.1), q[0].softmax(-1), draft, streams(None)[1])
    valid = [*draft[: verdict.num_accepted].tolist(), verdict.next_token]
    return torch.tensor([valid]), torch.tensor(verdict.num_accepted)


@pytest.mark.parametrize("name", ["test_speculative_sampling", "test_speculative_sampling_target_distribution"])
def test_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a verification that rejects a sure token, or whose corrections are not of norm((p - q)+)."""
    monkeypatch.setattr(theirs, "_speculative_sampling", speculative_sampling)
    run(theirs.UtilsFunctionsTest, name)


def generate(model: Any, *inputs: Any, assistant_model: Any = None, **options: Any) -> Any:
    """`generate` with our loop where it is asked for an assistant (two draft tokens a step).

    Some of their masks hide most of the prompt behind tokens that count, and some inputs have token types: no call has those.
    """
    options.pop("token_type_ids", None)
    if "input_ids" in options:
        options["attention_mask"] = torch.ones_like(options["input_ids"])
    if assistant_model is None:
        return plain(model, *inputs, **options)
    loop = custom_generate(assistant_model, policy=Fixed(k=2))
    options = {name: value for name, value in options.items() if name not in UNSUPPORTED}
    return plain(model, *inputs, custom_generate=loop, **options)


def checking(check: Callable[..., None]) -> Callable[..., None]:
    """Their check of an output's scores and states; of ours, which has none, the number of tokens."""

    def checked(case: Any, output: Any, config: Any, **more: Any) -> None:
        if not isinstance(output, SpeculativeOutput):
            return check(case, output, config, **more)
        assert output.metrics is not None
        assert (output.metrics.num_tokens, output.lossless) == (4, True), "max_new_tokens of these tests"

    return checked


def same_tokens(plain_output: Any, output: Any, **tolerance: float) -> None:
    """In place of their comparison, which lets tokens differ where the scores before them are close."""
    assert output.sequences.tolist() == plain_output.sequences.tolist()


def run(kind: type[unittest.TestCase], method: str) -> None:
    """Run one test of a class; its outcome is that of ours, and an error of ours that refuses is a reason to skip."""
    outcome = unittest.TestResult()
    kind(method).run(outcome)
    if outcome.skipped:
        pytest.skip(f"transformers skips it: {outcome.skipped[0][1]}")
    for _, text in outcome.errors + outcome.failures:
        last = text.strip().splitlines()[-1]
        if "specdecpp/" in text and "Error: " in last and any(word in last for word in REFUSALS):
            pytest.skip(f"refused: {last.partition(': ')[2]}")
        pytest.fail(text)
    assert outcome.testsRun == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixin(family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tokens that differ from the model's own greedy search, whether all or no draft tokens are accepted."""
    name = f"tests.models.{family}.test_modeling_{family}"
    if not (SOURCE.root / f"{name.replace('.', '/')}.py").is_file():
        pytest.skip("transformers has no test file of that name")
    try:
        module = named(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"its tests need a package: {error.name or error}")
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and hasattr(kind, method)]
    found = [kind for kind in found if issubclass(kind, unittest.TestCase) and kind.__module__ == name]
    if not found:
        pytest.skip("transformers does not run its generation tests on it")
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    monkeypatch.setattr(theirs, "assert_similar_generate_outputs", same_tokens)
    for kind in found:
        with patch.object(kind, CHECK, checking(getattr(kind, CHECK))):
            run(kind, method)
