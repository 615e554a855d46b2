"""Labels: every number of a record against the same thing computed token by token, and the distributions of what is drawn."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from distributions import chi_square_tail
from kinds import KINDS, built, model_of, needs_compiler
from records import pooled_tail

from specdecpp import BackendError, Sampling
from specdecpp.backends import EagerModel, NativeModel
from specdecpp.head import features
from specdecpp.sampling import probabilities
from specdecpp.testing import TableModel, tiny_draft
from specdecpp.training import branches as branches_module
from specdecpp.training.branches import believed, check_tree_mask, rejected_distribution
from specdecpp.training.labels import KEEP, LONGEST_STEP, Labelling, Record, Sampled, _depths, batches, label, mixed_text

TREES = ("llama", "qwen3", "gpt2")
SAMPLINGS = {
    "plain": Sampling(),
    "filters": Sampling(temperature=0.8, top_k=20, top_p=0.95),
    "penalty": Sampling(temperature=1.5, min_p=0.01, repetition_penalty=1.3),
    "greedy": Sampling(temperature=0.0),
}
ANSWERS = [
    Sampled(prompt=[5], answer=[7, 9, 12, 3, 1], source="a", split="dev"),
    Sampled(prompt=[9, 8, 7, 20, 21], answer=[30, 31, 30, 31, 30, 31, 40, 41], source="b"),
    Sampled(prompt=[60, 3, 60], answer=[17], source="a"),
]
FULL = Labelling(features=("mixed", "leaf"), branch_length=4, branch_odds=True, ends=(1,), draws=3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def backends(kind: str) -> tuple[EagerModel, EagerModel]:
    target = model_of(kind) if kind in KINDS else built(kind)
    return EagerModel(target), EagerModel(tiny_draft(target))


@cache
def records(kind: str, sampling: str = "plain") -> list[Record]:
    return label(*backends(kind), ANSWERS, replace(FULL, sampling=SAMPLINGS[sampling]), seeded())


def alone(backend: EagerModel, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, state) after the last token of a text that is read by itself."""
    logits, state = backend.new_cache().extend(list(text), rows=1)
    return logits[0], state[0]


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def seen_in(text: list[int], size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill(0, torch.tensor(text), True)


# Numbers


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_number_is_what_a_token_by_token_pass_gives(kind: str, sampling: str) -> None:
    """Catches a position off by one, padding that leaks, p and q swapped, and sampling parameters left out of a label."""
    how = SAMPLINGS[sampling]
    target, draft = backends(kind)
    for answer, record in zip(ANSWERS, records(kind, sampling), strict=True):
        assert (record.prompt.tolist(), record.answer.tolist()) == (answer.prompt, answer.answer)
        assert (record.source, record.split) == (answer.source, answer.split)
        for i, x in enumerate(answer.answer):
            text = [*answer.prompt, *answer.answer[:i]]
            seen = seen_in(text, draft.vocab_size)
            (q_logits, state), (p_logits, _) = alone(draft, text), alone(target, text)
            p = probabilities(p_logits, how, seen)
            q, belief = (d[0] for d in believed(q_logits[None], how, seen[None]))
            y = record.candidate[i]
            near(record.overlap[i], torch.minimum(p, q).sum())
            near(record.accept[i], (p[y] / q[y]).clamp(max=1))
            near(record.log_ratio[i].exp(), p[y] / q[y])
            near(record.log_q[i].exp(), belief[y])
            near(record.entropy[i], torch.special.entr(belief).sum())
            near(record.top[i], belief.topk(8).values)
            near(record.gap[i], belief.topk(2).values.diff().abs()[0])
            near(record.answer_log_q[i].exp(), belief[x])
            near(record.answer_odds[i], (q[x] / p[x]).clamp(max=1) if p[x] > 0 else (q[x] > 0).float())
            assert record.answer_log_ratio is not None
            near(record.answer_log_ratio[i].neg().exp().clamp(max=1), record.answer_odds[i])
            if p[x] > 0:
                near(record.answer_log_ratio[i], p[x].log() - q[x].log(), 1e-3)
            near(record.states[i], state, 2e-3)
        near(record.states[-1], alone(draft, [*answer.prompt, *answer.answer])[1], 2e-3)


def test_the_mixed_text_is_what_its_states_belong_to() -> None:
    """Catches states of the clean text, or a mask that marks the answer's tokens instead of the draft's."""
    _, draft = backends("llama")
    for answer, record in zip(ANSWERS, records("llama"), strict=True):
        assert record.mixed is not None
        assert record.is_mixed is not None
        z = torch.where(record.is_mixed, record.candidate[:, 0], record.answer).tolist()
        for i in range(len(z)):
            near(record.mixed[i], alone(draft, [*answer.prompt, *z[: i + 1]])[1], 2e-3)


def test_the_answer_stays_in_the_mixed_text_as_often_as_it_should() -> None:
    """Catches r and 1 - r swapped; alarms once in 1e6."""
    num = 20_000
    z, is_mixed = mixed_text(torch.zeros(num, dtype=torch.long), torch.ones(num, dtype=torch.long), seeded(1))
    assert z.tolist() == is_mixed.long().tolist()
    assert abs(float(is_mixed.float().mean()) - (1 - KEEP)) < 5 * (KEEP * (1 - KEEP) / num) ** 0.5


def test_features_that_were_not_asked_for_are_absent() -> None:
    """Catches passes that are paid for and not wanted."""
    record = label(*backends("llama"), ANSWERS, Labelling(features=()), seeded())[0]
    assert (record.mixed, record.is_mixed, record.leaf, record.branches) == (None, None, None, None)


def test_batches_are_sorted_and_within_the_budget() -> None:
    """Catches a batch that is padded far, one past the budget, and an answer left out or labelled twice."""
    lengths = [30, 10, 20, 500, 11, 12]
    made = batches(lengths, vocab_size=4096, budget=4096 * 60)
    assert made == [[1, 4, 5], [2, 0], [3]]


# Draws


def test_draft_tokens_follow_q_and_rejected_ones_the_residual() -> None:
    """Catches draws from p, a residual of the wrong sign, and branch tokens not drawn after the last; alarms 1e-6 each."""
    target, draft = backends("llama")
    sampling, text, num = Sampling(temperature=2.0), [5, 9, 8], 2000
    how = replace(FULL, sampling=sampling, branch_length=2, features=(), ends=())
    made = label(target, draft, [Sampled(prompt=text, answer=[7])] * num, how, seeded(3))
    p, q = (probabilities(alone(m, text)[0], sampling) for m in (target, draft))
    assert tail(torch.cat([r.candidate.flatten() for r in made]), q) > 1e-6
    tokens = torch.stack([r.branches.token[0] for r in made if r.branches is not None])
    residual, is_possible = rejected_distribution(p[None], q[None])
    assert is_possible.all()
    assert tail(tokens[:, 0], residual[0]) > 1e-6
    often = tokens[:, 0].mode().values
    after = probabilities(alone(draft, [*text, int(often)])[0], sampling)
    assert tail(tokens[tokens[:, 0] == often][:, 1], after) > 1e-6


def tail(tokens: torch.Tensor, distribution: torch.Tensor) -> float:
    return pooled_tail(Counter(tokens.tolist()), dict(enumerate(distribution.tolist())))


def test_answer_odds_and_the_residual_couple_to_q_exactly() -> None:
    """The identity that replay rests on: X ~ p, then X with b(X), else the residual, is a draw from q.

    Catches odds upside down and a residual that is not normalised, by enumeration over tables with zeros.
    """
    tables = [TableModel.random(vocab_size=5, depth=2, seed=s, sparsity=0.3) for s in (1, 2)]
    for context in tables[0].table:
        p, q = (t.distribution(context) for t in tables)
        residual, is_possible = rejected_distribution(p[None], q[None])
        odds = torch.where(p > 0, (q / p.clamp(min=1e-300)).clamp(max=1), 0.0)
        rejected = 1 - (p * odds).sum()
        assert bool(is_possible) == bool(rejected > 1e-12)
        torch.testing.assert_close(p * odds + rejected * residual[0] * is_possible, q)


def test_depths_are_those_of_steps_that_fail_or_fill_up() -> None:
    """Catches a depth that starts at 0 or goes on after a failed coin, and lengths that are not uniform; alarms once in 1e6."""
    num = 20_000
    assert _depths(torch.zeros(9), [9], seeded()).tolist() == [1] * 9
    depths = _depths(torch.ones(num), [num], seeded(5)).tolist()
    lengths = Counter(a for a, b in pairwise(depths) if b == 1)
    assert all(b in (1, a + 1) for a, b in pairwise(depths))
    assert chi_square_tail(lengths, dict.fromkeys(range(1, LONGEST_STEP + 1), 1 / LONGEST_STEP)) > 1e-6
    assert _depths(torch.ones(6), [3, 3], seeded()).tolist()[3] == 1, "a step does not span two answers"
    halves = _depths(torch.full((num,), 0.5), [num], seeded(6)).tolist()
    # P(a step ends at depth 1) = 1/10 + 9/10 * 1/2
    starts = [b for a, b in pairwise(halves) if a == 1]
    assert abs(starts.count(1) / len(starts) - 0.55) < 5 * 0.5 / len(starts) ** 0.5


# Trees


@pytest.mark.parametrize("kind", TREES)
def test_a_leaf_sees_the_clean_prefix_and_itself_only(kind: str) -> None:
    """Catches a leaf that attends to other leaves or later text, or stands at the wrong position."""
    _, draft = backends(kind)
    for answer, record in zip(ANSWERS, records(kind), strict=True):
        assert record.leaf is not None
        for i, y in enumerate(record.candidate[:, 0].tolist()):
            near(record.leaf[i], alone(draft, [*answer.prompt, *answer.answer[:i], y])[1], 2e-3)


def judged(made: list[Record], kind: str, how: Sampling, scorer: Any = None) -> int:
    """Compare every token of the branches with passes of both models (of `scorer` for q) over the same text; how many."""
    target, draft = backends(kind)
    num = 0
    for record in made:
        branches, prompt, answer = record.branches, record.prompt.tolist(), record.answer.tolist()
        assert branches is not None
        assert branches.log_ratio is not None
        assert branches.overlap is not None
        for i, length in enumerate(branches.length.tolist()):
            text = [*prompt, *answer[:i]]
            p, q, belief = distributions_after(target, scorer or draft, text, how)
            for k, token in enumerate(branches.token[i, :length].tolist()):
                near(branches.log_ratio[i, k], p[token].log() - q[token].log(), 1e-3)
                near(branches.log_q[i, k], belief[token].log(), 1e-3)
                near(branches.entropy[i, k], torch.special.entr(belief).sum())
                near(branches.gap[i, k], features.gap(belief))
                text = [*text, token]
                near(branches.state[i, k], alone(draft, text)[1], 2e-3)
                p, q, belief = distributions_after(target, scorer or draft, text, how)
                near(branches.overlap[i, k], torch.minimum(p, q).sum())
                num += 1
    return num


def distributions_after(target: EagerModel, draft: Any, text: list[int], how: Sampling) -> list[torch.Tensor]:
    """[p, q, what the draft believes] after a text that is read by itself."""
    seen = seen_in(text, draft.vocab_size)
    p = probabilities(alone(target, text)[0], how, seen)
    return [p, *(distribution[0] for distribution in believed(alone(draft, text)[0][None], how, seen[None]))]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", TREES)
def test_a_branch_is_what_the_models_say_in_a_row(kind: str, sampling: str) -> None:
    """Catches branches that mix, figures of the wrong distribution or model, and a penalty that forgets the branch."""
    how = SAMPLINGS[sampling]
    num = judged(records(kind, sampling), kind, how)
    assert num > (3 if how.is_greedy else 10), "the comparison is vacuous"


@needs_compiler
@pytest.mark.parametrize("sampling", ["plain", "penalty", "greedy"])
def test_a_reduced_vocabulary_is_the_one_that_decoding_has(sampling: str) -> None:
    """Catches tokens scored that come later in the text, some left out that came before, and q and belief that differ in it."""
    (target, draft), how = backends("wide-heads"), SAMPLINGS[sampling]
    ids = [i for i in range(draft.vocab_size) if i % 4]
    scorer = NativeModel(draft.model, num_threads=1).reduced(ids)
    made = label(target, draft, ANSWERS, replace(FULL, sampling=how, listed=seen_in(ids, draft.vocab_size)), seeded())
    for record in made:
        text, num_lost = record.prompt.tolist(), 0
        for i, x in enumerate(record.answer.tolist()):
            p, q, belief = distributions_after(target, scorer, text, how)
            near(record.overlap[i], torch.minimum(p, q).sum())
            near(record.answer_log_q[i].exp(), belief[x])
            num_lost += int(belief[x] == 0)
            text.append(x)
        assert num_lost >= len({*record.answer.tolist()} - {*ids} - {*record.prompt.tolist()})
    assert judged(made, "wide-heads", how, scorer) > 3, "the comparison is vacuous"


@pytest.mark.parametrize("sampling", ["plain", "penalty"])
@pytest.mark.parametrize("kind", TREES)
def test_branches_are_the_same_in_parts_and_where_they_end_early(
    kind: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches parts that come back in another order, a part that sees what an earlier one left in a cache, an answer that has
    no positions in a part, and dead branches that disturb the living."""
    monkeypatch.setattr(branches_module, "PASS", 6)
    ends = tuple(range(0, 64, 4))
    answers = [*ANSWERS, Sampled(prompt=list(range(2, 20)), answer=[7])]
    made = label(*backends(kind), answers, replace(FULL, sampling=SAMPLINGS[sampling], ends=ends), seeded(4))
    assert judged(made, kind, SAMPLINGS[sampling]) > 10
    lengths = torch.cat([r.branches.length for r in made if r.branches is not None])
    assert 0 < (lengths < 4).sum() < len(lengths), "the comparison is vacuous"


def test_what_takes_the_target_is_made_only_where_it_is_asked_for() -> None:
    """Catches passes that are paid for and not wanted, and an option that changes what is drawn."""
    plain = label(*backends("llama"), ANSWERS, replace(FULL, branch_odds=False), seeded())
    for without, record in zip(plain, records("llama"), strict=True):
        assert without.branches is not None
        assert record.branches is not None
        assert (without.branches.log_ratio, without.branches.overlap) == (None, None)
        assert torch.equal(without.branches.token, record.branches.token)
        assert torch.equal(without.candidate, record.candidate)


def test_a_pass_over_branches_is_never_larger_than_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches logits of all levels or of all positions at once, which grow past the budget of a batch, for either model."""
    monkeypatch.setattr(branches_module, "PASS", 16)
    pair, shapes = backends("llama"), []
    for backend in pair:
        own = backend.offline_pass

        def spy(cache: Any = None, own: Any = own, **inputs: Any) -> Any:
            shapes.append((inputs["input_ids"].shape, inputs["attention_mask"].shape[-1]))
            return own(cache, **inputs)

        monkeypatch.setattr(backend, "offline_pass", spy)
    answers = [Sampled(prompt=[5, 6], answer=[7, 9] * 12), Sampled(prompt=[5], answer=[8, 9] * 12)]
    label(*pair, answers, replace(FULL, features=()), seeded())
    assert shapes[:2] == [((2, 26), 26)] * 2
    num_parts, width, levels = 3, 8, FULL.branch_length
    assert len(shapes) == 2 + num_parts * levels * 2
    assert {shape for shape, _ in shapes[2:]} == {(2, width)}
    assert max(keys for _, keys in shapes) == 26 + levels * width


def test_a_branch_ends_after_an_end_and_where_the_context_does() -> None:
    """Catches tokens after the end of text, and positions past the table of the model."""
    target, draft = backends("gpt2")
    ends = tuple(range(0, 64, 3))
    how = replace(FULL, ends=ends, branch_length=6, max_length=14, sampling=Sampling(temperature=3.0))
    lengths = set()
    for record in label(target, draft, ANSWERS * 20, how, seeded(2)):
        assert record.branches is not None
        for i, length in enumerate(record.branches.length.tolist()):
            tokens = record.branches.token[i].tolist()
            room = 14 - len(record.prompt) - i
            lengths.add((length, room))
            assert length <= min(6, room)
            assert not set(tokens[: length - 1]) & set(ends)
            assert length in (0, 6, room) or tokens[length - 1] in ends
            assert not any(tokens[length:])
            for name in ("state", "log_q", "entropy", "gap", "log_ratio", "overlap"):
                assert not getattr(record.branches, name)[i, length:].any(), name
    assert any(0 < length < min(6, room) for length, room in lengths), "none ended with the text"
    assert any(length == room < 6 for length, room in lengths), "none ended with the context"


def test_a_draft_that_equals_the_target_has_no_branches() -> None:
    """Catches a rejected draft token where nothing can be rejected."""
    target, _ = backends("llama")
    for record in label(target, target, ANSWERS, FULL, seeded()):
        assert record.branches is not None
        assert not record.branches.length.any()
        assert (record.answer_odds == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_cannot_follow_a_tree_mask_are_refused(kind: str) -> None:
    """Catches a sliding window that the tree mask switches off unnoticed, and a plain model that is refused."""
    _, draft = backends(kind)
    if "sliding_window" in KINDS[kind]:
        with pytest.raises(BackendError, match=r"last \d tokens only and texts may have 40.*Leave 'leaf' out"):
            check_tree_mask(draft, longest=40)
    else:
        check_tree_mask(draft, longest=40)


def test_a_model_that_ignores_the_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a probe that is never unhappy."""
    _, draft = backends("gpt2")
    own = draft.model.forward

    def forgetful(**inputs: object) -> object:
        return own(**{k: v for k, v in inputs.items() if k != "position_ids"})

    monkeypatch.setattr(draft.model, "forward", forgetful)
    with pytest.raises(BackendError, match="ignores the mask or the positions"):
        check_tree_mask(draft, longest=40)
