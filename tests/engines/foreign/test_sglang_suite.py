"""sglang's vectors of tree verification, over the lab's trees."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sources import Source, adopted, loaded, stand_in
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdecpp.lab.trees import Tree
from specdecpp.lab.trees.tree import ROOT
from specdecpp.lab.trees.verification import verified
from specdecpp.sampling import streams
from specdecpp.verify import CompareVerification, GreedyVerification, TokenVerification

SOURCE = Source(
    repository="sgl-project/sglang",
    commit="27ac831a84d061ad31743554da04c00afce100d3",
    folders=("sgl-kernel/tests/speculative",),
)
EXACT = (TokenVerification(), CompareVerification(), GreedyVerification())


class OnCPU(TorchFunctionMode):
    """Their tensors are for a GPU; here they are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return function(*arguments, **options)


def tree_of(tokens: list[int], firsts: list[int], siblings: list[int], vocab_size: int) -> tuple[Tree, dict[int, int]]:
    """The tree below token 0, and the place of each node in these lists; ROOT has place 0."""
    tree, places, queue = Tree(), {ROOT: 0}, [ROOT]
    while queue:
        parent = queue.pop(0)
        tree.branch(parent, torch.full((vocab_size,), 1 / vocab_size))
        place = firsts[places[parent]]
        while place != -1:
            node = tree.add(parent, tokens[place], is_drawn=False)
            places[node] = place
            queue.append(node)
            place = siblings[place]
    return tree, places


def tree_speculative_sampling_target_only(
    *, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, target_probs: Tensor, **asked: Any
) -> None:
    """Every exact verification of the lab, all of which have to agree: the temperature of these vectors is .01."""
    lists = (candidates, asked["retrive_next_token"], asked["retrive_next_sibling"])
    for b, index in enumerate(asked["retrive_index"].tolist()):
        tree, places = tree_of(*(rows[b].tolist() for rows in lists), vocab_size=target_probs.shape[-1])
        p = {node: target_probs[b, place] for node, place in places.items()}
        verdicts = [verified(one, tree, p.__getitem__, streams(0)[1]) for one in EXACT]
        assert len({(verdict.path, verdict.next_token) for verdict in verdicts}) == 1
        path = [index[places[node]] for node in (ROOT, *verdicts[0].path)]
        accept_index[b, : len(path)] = torch.tensor(path)
        accept_token_num[b] = len(verdicts[0].path)
        predicts[path] = torch.tensor([*map(tree.tokens.__getitem__, verdicts[0].path), verdicts[0].next_token]).int()


kernel = stand_in("sgl_kernel", tree_speculative_sampling_target_only=tree_speculative_sampling_target_only)
path = SOURCE.root / "sgl-kernel/tests/speculative/test_speculative_sampling.py"
theirs = loaded(path, "sglang_tests", {"sgl_kernel": kernel})
LOSSY = pytest.mark.skip(reason="thresholds of 0 accept every draft token, which changes the distribution")
theirs.test_cases[:] = [pytest.param(*case, marks=LOSSY if case[:2] == (0, 0) else ()) for case in theirs.test_cases]
globals().update(adopted(theirs, {}))


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with OnCPU():
        yield
