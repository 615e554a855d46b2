"""The rules by themselves: what each looks at, when it stops, and how drafting asks it."""

import math
from dataclasses import dataclass

import pytest
import torch
from distributions import drafted as host_draft
from distributions import outcome, random_head
from policies_list import constant_head

from specdecpp.head import Calibration
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
        (MaxConfidence(threshold=0.4), [HALF, FIFTH], [], "q = 0.2 < 0.4"),
        (MaxConfidence(threshold=0.5), [HALF], [], "None"),  # equal is not below
        (CumulativeConfidence(threshold=0.25), [HALF, HALF], [], "None"),
        (CumulativeConfidence(threshold=0.2), [HALF, HALF, HALF], [], "product of q = 0.125 < 0.2"),
        (CumulativeConfidence(threshold=0.1), [HALF, HALF, HALF], [], "None"),
        (Entropy(threshold=SVIP - 1e-6), [FIFTH, EVEN], [], "-entropy = -1.39 < -1.39"),
        (Entropy(threshold=SVIP + 1e-6), [FIFTH, EVEN], [], "None"),
        (Entropy(threshold=SVIP - 1e-6, c=0.1), [FIFTH, EVEN], [], "None"),
        (Entropy(threshold=0.0), [SURE], [], "None"),
        (SpecDecPP(head=random_head(4, seed=0), threshold=0.7), [HALF] * 3, [0.6, 0.51], "None"),
        (SpecDecPP(head=random_head(4, seed=0), threshold=0.7), [HALF] * 3, [0.6, 0.49], "survival = 0.294 < 0.3"),
        (SpecDecPP(head=random_head(4, seed=0), threshold=0.5), [HALF] * 3, [0.5], "None"),
    ],
)
def test_what_a_rule_looks_at(policy, candidates, judged, words):
    """Catches another draft token, a product that misses one, bits for nats, nan from zeros in q, and the wrong side."""
    draft = drafted(*candidates)
    draft.judged = judged
    assert str(policy.stop(draft, None)) == words
    assert policy.stop(Draft(), None) is None, "an empty step is never stopped"


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_the_evidence_is_of_the_distribution_that_was_drawn_from(temperature):
    """Catches q = 1 for every greedy draft token, which would make the confidence rules never stop, and confidence under the
    unwarped distribution where sampling warps it."""
    backend = TableModel.random(vocab_size=4, depth=2, seed=5, sparsity=0.0)
    draft = proposed(Fixed(k=3), temperature=temperature, backend=backend)
    warped = [backend.distribution([0, 1, *draft.tokens[:i]]) ** (1 / (temperature or 1.0)) for i in range(3)]
    distributions = [p / p.sum() for p in warped]
    confidences = [float(p[token]) for p, token in zip(distributions, draft.tokens, strict=True)]
    assert [draft.confidence(i) for i in range(3)] == pytest.approx(confidences)
    assert draft.cumulative_confidence == pytest.approx(math.prod(confidences))
    assert draft.entropy(-1) == pytest.approx(float(torch.special.entr(distributions[-1]).sum()))
    assert draft.is_greedy == (not temperature)


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
    draft = proposed(SpecDecPP(head=constant_head(logit), **bounds))
    assert (len(draft.judged), draft.num_tokens) == (num_judged, num_candidates)


def test_specdecpp_reads_the_raw_score_unless_told_otherwise():
    """Catches a threshold of the paper applied to probabilities, or the reverse, and raw ones that pass for probabilities."""
    with pytest.warns(UserWarning, match="not been calibrated"):
        SpecDecPP(head=constant_head(0.0), calibrated=True)
    head = constant_head(0.0, calibration=Calibration(rejection_weight=3.0, num_labels=1))
    judged = [proposed(SpecDecPP(head=head, calibrated=c), num_tokens=2).judged for c in (False, True)]
    assert judged == [[pytest.approx(0.5)], [pytest.approx(0.75)]]


@pytest.mark.parametrize(("min_tokens", "num_candidates"), [(0, 1), (1, 1), (2, 2), (4, 4)])
def test_a_look_ahead_head_spends_no_pass_on_a_hopeless_draft_token(min_tokens, num_candidates):
    """Catches a look-ahead rule that reads the draft token it has condemned, or drops it."""
    backend = TableModel.random(vocab_size=4, depth=2, seed=5, sparsity=0.0)
    head = constant_head(-9.0, form="look_ahead", vocab_size=4)
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
        (Fixed(k=25), 30, (), "limit"),
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
    assert draft.num_tokens == (1 if ends or reason == "asked" else min(room, policy.max_tokens))


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
