"""The rules by themselves: what each looks at, when it stops, and how drafting asks it."""

import math
from dataclasses import dataclass

import pytest
import torch
from distributions import drafted as host_draft
from distributions import outcome, random_head

from specdecpp.head import AcceptanceHead, Calibration, HeadCard
from specdecpp.lab import Heuristic
from specdecpp.policies import CumulativeConfidence, Entropy, Fixed, MaxConfidence, Policy, SpecDecPP
from specdecpp.sampling import Sampling, streams
from specdecpp.step import Draft
from specdecpp.testing import TableModel


@dataclass(frozen=True, kw_only=True)
class Always(Policy):
    """Stops whenever it is asked."""

    drop: bool = False

    @property
    def drops_last(self):
        return self.drop

    def stop(self, draft, memory):
        return "asked"


class Constant(AcceptanceHead):
    """A head that gives every draft token the same logit."""

    def __init__(self, logit, **card):
        super().__init__(HeadCard(hidden_size=4, num_layers=0, **card))
        with torch.no_grad():
            self.output.weight.zero_()
            self.output.bias.fill_(logit)


def drafted(*candidates):
    """A draft of draft tokens (token, q)."""
    draft = Draft()
    for token, q in candidates:
        draft.append(token, q=torch.tensor(q, dtype=torch.float64))
    return draft


def proposed(policy, *, temperature=1.0, num_tokens=6, ends=(), backend=None, seed=0):
    return host_draft(
        backend or TableModel.random(vocab_size=4, depth=2, seed=5, sparsity=0.0),
        [0, 1],
        policy=policy,
        memory=policy.start(),
        sampling=Sampling(temperature=temperature),
        randomness=streams(seed)[0],
        room=num_tokens,
        ends=ends,
    )


HALF = (0, [0.5, 0.25, 0.25, 0.0])
FIFTH = (1, [0.8, 0.2, 0.0, 0.0])
EVEN = (0, [0.25] * 4)
SURE = (0, [1.0, 0.0, 0.0, 0.0])
SVIP = math.sqrt(0.15 * math.log(4))
"""The bound on the entropy of `EVEN`, in nats."""


@pytest.mark.parametrize(
    ("policy", "candidates", "judged", "words"),
    [
        (MaxConfidence(threshold=0.4), [HALF], [], "None"),
        (MaxConfidence(threshold=0.4), [FIFTH, HALF], [], "None"),  # the last one only
        (MaxConfidence(threshold=0.4), [HALF, FIFTH], [], "q = 0.20 < 0.4"),
        (MaxConfidence(threshold=0.5), [HALF], [], "None"),  # equal is not below
        (CumulativeConfidence(threshold=0.25), [HALF, HALF], [], "None"),
        (CumulativeConfidence(threshold=0.2), [HALF, HALF, HALF], [], "product of q = 0.12 < 0.2"),
        (CumulativeConfidence(threshold=0.1), [HALF, HALF, HALF], [], "None"),
        (Entropy(threshold=SVIP - 1e-6), [FIFTH, EVEN], [], "-entropy = -1.39 < -1.39"),
        (Entropy(threshold=SVIP + 1e-6), [FIFTH, EVEN], [], "None"),
        (Entropy(threshold=SVIP - 1e-6, c=0.1), [FIFTH, EVEN], [], "None"),
        (Entropy(threshold=0.0), [SURE], [], "None"),
        (SpecDecPP(head=random_head(4, seed=0), threshold=0.7), [HALF] * 3, [0.6, 0.51], "None"),
        (SpecDecPP(head=random_head(4, seed=0), threshold=0.7), [HALF] * 3, [0.6, 0.49], "survival = 0.29 < 0.3"),
        (SpecDecPP(head=random_head(4, seed=0), threshold=0.5), [HALF] * 3, [0.5], "None"),
    ],
)
def test_what_a_rule_looks_at(policy, candidates, judged, words):
    """Catches another draft token, a product that misses one, bits for nats, nan from zeros in q, and the wrong side."""
    draft = drafted(*candidates)
    draft.judged = judged
    assert str(policy.stop(draft, None)) == words
    assert policy.stop(Draft(), None) is None, "an empty step is never stopped"


def test_greedy_drafting_is_judged_by_the_unwarped_softmax():
    """Catches q = 1 for every greedy draft token, which would make the confidence rules never stop."""
    backend = TableModel.random(vocab_size=4, depth=2, seed=5, sparsity=0.0)
    draft = proposed(Fixed(k=3), temperature=0.0, backend=backend)
    distributions = [backend.distribution([0, 1, *draft.tokens[:i]]) for i in range(3)]
    assert [draft.confidence(i) for i in range(3)] == pytest.approx([float(p.max()) for p in distributions])
    assert draft.cumulative_confidence == pytest.approx(math.prod(float(p.max()) for p in distributions))
    assert draft.entropy(-1) == pytest.approx(-float((distributions[-1] * distributions[-1].log()).sum()))
    assert draft.is_greedy


def test_sampled_draft_tokens_are_judged_by_the_distribution_they_came_from():
    """Catches confidence under the unwarped distribution where sampling warps it."""
    backend = TableModel.random(vocab_size=4, depth=2, seed=5, sparsity=0.0)
    draft = proposed(Fixed(k=2), temperature=0.5, backend=backend)
    for i in range(2):
        distribution = backend.distribution([0, 1, *draft.tokens[:i]]) ** 2
        assert draft.confidence(i) == pytest.approx(float(distribution[draft.tokens[i]] / distribution.sum()))


def test_the_gap_is_between_the_two_largest_if_there_are_two():
    """Catches the gap of another draft token, and an index error in a vocabulary of one."""
    draft = drafted(FIFTH, HALF)
    assert [draft.gap(0), draft.gap(-1)] == pytest.approx([0.6, 0.25])
    assert drafted((0, [1.0])).gap(-1) == 0.0


@pytest.mark.parametrize(
    ("logit", "bounds", "num_judged", "num_candidates"),
    [
        (-9.0, {"min_tokens": 0}, 1, 2),
        (-9.0, {"min_tokens": 1}, 1, 2),
        (-9.0, {}, 1, 2),  # the paper's lower bound is 2
        (-9.0, {"min_tokens": 4}, 3, 4),
        (-9.0, {"min_tokens": 0, "max_tokens": 1}, 0, 1),
        (9.0, {}, 5, 6),  # nothing to stop for: all that there is room for
    ],
)
def test_specdecpp_keeps_the_free_draft_token(logit, bounds, num_judged, num_candidates):
    """Catches a free draft token that is thrown away or judged: after k judgements there are k + 1 draft tokens."""
    draft = proposed(SpecDecPP(head=Constant(logit), **bounds))
    assert (len(draft.judged), draft.num_tokens) == (num_judged, num_candidates)


def test_specdecpp_reads_the_raw_score_unless_told_otherwise():
    """Catches a threshold of the paper applied to probabilities, or the reverse, and raw ones that pass for probabilities."""
    with pytest.warns(UserWarning, match="not been calibrated"):
        SpecDecPP(head=Constant(0.0), calibrated=True)
    head = Constant(0.0, calibration=Calibration(rejection_weight=3.0, num_labels=1))
    judged = [proposed(SpecDecPP(head=head, calibrated=c), num_tokens=2).judged for c in (False, True)]
    assert judged == [[pytest.approx(0.5)], [pytest.approx(0.75)]]


def test_greedy_draft_tokens_are_judged_as_was_calibrated_for_them():
    """Catches one calibration for both, though an argmax is accepted more often than a draw."""
    made = {"calibration": Calibration(bias=1.0, num_labels=1), "greedy": Calibration(bias=-2.0, num_labels=1)}
    policy = SpecDecPP(head=Constant(0.0, **made), calibrated=True, threshold=1.0)
    for temperature, calibration in ((1.0, made["calibration"]), (0.0, made["greedy"])):
        (judged,) = proposed(policy, temperature=temperature, num_tokens=2).judged
        assert judged == pytest.approx(float(calibration.apply(torch.zeros(())).sigmoid()))


def test_a_head_is_told_of_an_all_but_impossible_draft_token():
    """Catches the logarithm of 0."""
    policy = SpecDecPP(head=random_head(4, seed=1, scalars=("log_q",)))
    assert 0 <= policy.judge(drafted((0, [0.0, 1.0, 0.0, 0.0])), torch.ones(4)) <= 1


def test_specdecpp_takes_its_setting_from_the_card():
    """Catches a recommendation that is not followed, or that overrules what was asked for."""
    head = Constant(0.0, stopping={"threshold": 0.4, "min_tokens": 1})
    assert SpecDecPP.tuned(head) == SpecDecPP(head=head, threshold=0.4, min_tokens=1)
    assert SpecDecPP.tuned(head, min_tokens=0) == SpecDecPP(head=head, threshold=0.4, min_tokens=0)


@pytest.mark.parametrize(("min_tokens", "num_candidates"), [(0, 1), (1, 1), (2, 2), (4, 4)])
def test_a_look_ahead_head_spends_no_pass_on_a_hopeless_draft_token(min_tokens, num_candidates):
    """Catches a look-ahead rule that reads the draft token it has condemned, or drops it."""
    backend = TableModel.random(vocab_size=4, depth=2, seed=5, sparsity=0.0)
    head = Constant(-9.0, form="look_ahead", vocab_size=4)
    draft = proposed(SpecDecPP(head=head, min_tokens=min_tokens), backend=backend)
    assert (len(draft.judged), draft.num_tokens) == (num_candidates, num_candidates)
    assert backend.length == 2 + num_candidates - 1  # the prompt, and every draft token but the last


@pytest.mark.parametrize("form", ["lagged", "look_ahead"])
def test_a_head_judges_each_draft_token_by_what_is_known_of_it(form):
    """Catches estimates shifted by one draft token, and a scalar read from another position."""
    backend = TableModel.random(vocab_size=4, depth=2, seed=5, sparsity=0.0)
    is_ahead = form == "look_ahead"
    names = ("log_q", "entropy", "gap", "depth")
    head = random_head(4, seed=1, scale=0.5, form=form, vocab_size=4 if is_ahead else None, scalars=names)
    draft = proposed(SpecDecPP(head=head, threshold=1.0), backend=backend, num_tokens=6)
    expected = []
    for i, token in enumerate(draft.tokens[: len(draft.judged)]):
        q = backend.distribution([0, 1, *draft.tokens[:i]])
        first, second = q.topk(2).values.tolist()
        scalars = (float(q[token].log()), float(torch.special.entr(q).sum()), first - second, i + 1.0)
        hidden = q if is_ahead else backend.distribution([0, 1, *draft.tokens[: i + 1]])
        expected.append(head.estimator(calibrated=False)(hidden, token, scalars))
    assert len(expected) == 5 + is_ahead
    assert draft.judged == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 0.1


def test_fixed_drafts_exactly_k():
    """Catches a cap or a floor of the base class that changes k."""
    assert [proposed(Fixed(k=k), num_tokens=30).num_tokens for k in (0, 1, 4, 25)] == [0, 1, 4, 25]


def test_heuristic_follows_the_schedule_of_transformers():
    """Catches a length that grows after a rejection, leaves its bounds, or goes on growing unseen past the upper one."""
    policy = Heuristic(start_tokens=2)
    memory, lengths = policy.start(), []
    for accepted_all in (True, True, False, False, False, False, False, False, True, False):
        num = policy.limit(memory)
        lengths.append(num)
        memory = policy.learn(memory, outcome(num, num if accepted_all else num - 1))
    assert lengths == [2, 4, 6, 5, 4, 3, 2, 1, 1, 3]
    policy = Heuristic(start_tokens=9, min_tokens=3, max_tokens=6)
    assert [policy.limit(memory) for memory in (policy.start(), 5, 1)] == [6, 5, 3]
    memory = policy.start()
    for num_steps in (1, 9):
        assert policy.limit(policy.learn(memory, outcome(6, 0))) == 5
        for _ in range(num_steps):
            memory = policy.learn(memory, outcome(6, 6))
    assert policy.limit(policy.learn(memory, outcome(6, 0))) == 5


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_no_rule_is_asked_below_its_lower_bound(min_tokens):
    """Catches a lower bound that is off by one; a step of nothing does not even run the draft."""
    backend = TableModel.random(vocab_size=4, depth=2, seed=5, sparsity=0.0)
    draft = proposed(Always(min_tokens=min_tokens), backend=backend)
    assert (draft.num_tokens, str(draft.stop)) == (min_tokens, "asked")
    assert backend.length == (min_tokens + 1 if min_tokens else 0)


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 0), (1, 0), (3, 2)])
def test_dropping_removes_one_draft_token_with_all_that_is_known_of_it(min_tokens, kept):
    """Catches columns that no longer line up, and a product of q that still holds the dropped draft token."""
    draft = proposed(Always(min_tokens=min_tokens, drop=True))
    assert (draft.num_tokens, len(draft.q), str(draft.stop)) == (kept, kept, "asked")
    confidences = [draft.confidence(i) for i in range(kept)]
    assert draft.cumulative_confidence == pytest.approx(math.prod(confidences))
    draft = drafted(HALF, FIFTH)
    assert draft.cumulative_confidence == pytest.approx(0.1)
    draft.cut(1)
    assert draft.cumulative_confidence == pytest.approx(0.5)
    draft.append(HALF[0], q=torch.tensor(HALF[1]))
    assert draft.cumulative_confidence == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("policy", "room", "ends", "reason"),
    [
        (Fixed(k=2), 6, (), "limit"),
        (Fixed(k=6), 2, (), "tokens left"),
        (Fixed(k=6), 0, (), "tokens left"),
        (Fixed(k=6), 6, (0, 1, 2, 3), "end of text"),
        (Always(min_tokens=1), 6, (0, 1, 2, 3), "end of text"),
        (Always(min_tokens=1), 6, (), "asked"),
    ],
)
def test_stop_reasons(policy, room, ends, reason):
    """Catches a wrong explanation, and drafting that goes on after the end of the text."""
    draft = proposed(policy, num_tokens=room, ends=ends)
    assert str(draft.stop) == reason
    assert draft.num_tokens == (1 if ends else min(room, 2 if reason == "limit" else 1 if reason == "asked" else room))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(k=-1), r"k of at least 0, got -1; 0 is the target alone"),
        (lambda: Heuristic(start_tokens=0), r"start_tokens of at least 1, got 0"),
        (lambda: MaxConfidence(threshold=1.5), r"MaxConfidence\.threshold must lie in \[0, 1\], got 1\.5"),
        (lambda: CumulativeConfidence(threshold=-0.1), r"CumulativeConfidence\.threshold .* got -0\.1"),
        (lambda: SpecDecPP(head=random_head(4, seed=0), threshold=7.0), r"SpecDecPP\.threshold .* got 7\.0"),
        (lambda: Entropy(threshold=-1.0), r"threshold >= 0, got .*-1\.0"),
        (lambda: Entropy(c=0.0), r"c > 0 .* got c=0\.0"),
        (lambda: MaxConfidence(min_tokens=3, max_tokens=2), r"MaxConfidence .* min_tokens=3 and max_tokens=2"),
        (lambda: Policy(min_tokens=-1), r"Policy .* min_tokens=-1"),
        (lambda: MaxConfidence(threshold=math.nan), r"got nan"),
        (lambda: Entropy(threshold=math.nan), r"got .*nan"),
    ],
)
def test_bad_configurations_are_refused(make, message):
    """Catches a value that would make a rule stop never, always or at random, refused without saying which."""
    with pytest.raises(ValueError, match=message):
        make()
