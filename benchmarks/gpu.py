"""Decoding on a GPU: what a draft step, a pass and a step take, beside what the memory allows and what transformers does.

    python benchmarks/gpu.py                              # one GPU, under nine minutes; writes benchmarks/results/gpu.json
    python benchmarks/gpu.py --stages together --pairs 1b # requests that share passes
    python benchmarks/gpu.py --device cpu --tiny          # the same stages on toy models, to see that they work

On a CPU nothing is recorded: what it prints there says nothing about speed.

Pairs. `reference` is the pair that ships. `1b` and `8b` have the shapes of TinyLlama 1.1B and of Llama 3 8B and random
weights in bfloat16, for which a draft is made that agrees: the target's embedding, its first layers and its output, copied.
What the target's other layers add to the residual stream is scaled down until the two accept about three draft tokens in
four (the mean of sum min(p, q) at temperature 1 over random texts; the scale and what was reached stand in the result). The
output layer is scaled up first, so that p has a few likely tokens, as that of a trained model.

Stages, for each pair in turn. Every figure is written as soon as it is there, so that an interruption loses nothing:

    memory      bytes per second of a copy on the device, read and written bytes counted
    steps       a draft step with its stop test, a target pass by width: milliseconds, and the floor of each: the bytes of
                its weights at that rate
    waits       calls in a step that wait for the device: as torch warns of them, and as the profiler sees them
    speed       tokens per second, greedy, at temperature 1, and at 0.7 with top_p 0.9, one engine after another: steps on the
                device by the default rule and by fixed lengths, the same backend with the host's loop, the lean
                and the eager backend, transformers' assisted generation, and the target alone by graphs, by transformers,
                and by transformers with a static cache and torch.compile; `first_s` is the first answer, with all recordings
    together    tokens per second of 1, 2, 4 and 8 requests whose steps share passes, and of as many one after the other

    trees       only where `--stages steps,trees` asks: trees of the lab, static and by costs, beside chains of fixed length,
                the default and the target alone, as in `speed`; first what a tree pass takes, and offering its children

A stage for which there is no time left (`--budget`) is left out, and the result says so.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import specdecpp as sd
from specdecpp.backends import EagerModel, GraphModel
from specdecpp.backends.graphs.cache import WIDTHS
from specdecpp.backends.graphs.engine import Device
from specdecpp.backends.graphs.trees import Offers
from specdecpp.costs import CostClock
from specdecpp.costs.measuring import measure
from specdecpp.decoder import encode, finished, run
from specdecpp.lab.trees import parse_tree
from specdecpp.policies.head import costs_for
from specdecpp.policies.learning import Experience
from specdecpp.sampling import streams
from specdecpp.scheduler import step as step_of_all
from specdecpp.session import Session
from specdecpp.step import Host
from specdecpp.testing import practice_prompts
from specdecpp.verify import GreedyVerification, TokenVerification

SHAPES: dict[str, dict[str, int]] = {
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
TINY = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DRAFT_LAYERS = {"1b": 2, "8b": 3}
ACCEPTANCE, LOGIT_SPREAD = 0.75, 4.0
K, LENGTHS = 4, (1, 2, 4, 8)
TREES = ("costs", "2x1x1x1", "3x1x1x1", "2x2x1x1", "4x2x1x1", "3x2x2x1")
COMPILING_S = 75  # what torch.compile of a large model may take
PARTS = ("draft_s", "head_s", "verify_s", "other_s")
SAMPLINGS = {
    "greedy": sd.Sampling(temperature=0.0),
    "T = 1": sd.Sampling(),
    "0.7, top_p 0.9": sd.Sampling(temperature=0.7, top_p=0.9),
}


@dataclass(frozen=True, kw_only=True)
class Models:
    """Two models of transformers, and what else a pair has."""

    name: str
    target: Any
    draft: Any
    vocab_size: int
    prompt: list[int]
    tokenizer: Any = None
    head: Any = None
    about: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return self.target.device


class Result:
    """The file of results, written anew with every figure."""

    def __init__(self, path: Path, budget_s: float):
        self.path, self.started, self.budget_s, self.share = path, time.perf_counter(), budget_s, 1.0
        self.content: dict[str, Any] = {"command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]), "rows": []}

    @property
    def left_s(self) -> float:
        """Until the share of the budget that is open now is spent."""
        return self.share * self.budget_s - self.seconds

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def set(self, **facts: Any) -> None:
        self.content |= facts
        self._write()

    def add(self, stage: str, pair: str, **row: Any) -> None:
        self.content["rows"].append({"stage": stage, "pair": pair} | row)
        self._write()
        print(f"{stage:>8}  {pair:>9}  {json.dumps(row)}", flush=True)

    def _write(self) -> None:
        self.content["seconds"] = round(self.seconds, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device, repetitions: int) -> float:
    """Seconds of one call, of many queued one after the other: launching is in it where it is what takes the time."""
    for _ in range(3):
        work()
    times = []
    for _ in range(3):
        settle(device)
        started = time.perf_counter()
        for _ in range(repetitions):
            work()
        settle(device)
        times.append((time.perf_counter() - started) / repetitions)
    return statistics.median(times)


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a copy on the device; each byte counts twice, read and written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: copy.copy_(source), device, 20)


# --- pairs -----------------------------------------------------------------------------------------------------------------


def reference(device: str) -> Models:
    """The pair that ships, in float32 on every device, as it is loaded by default."""
    pair: Any = sd.load_pair(device=device, backend="eager")
    about = {"dtype": "float32", "weights": "trained"}
    models = {"target": pair.target.model, "draft": pair.draft.model, "vocab_size": pair.target.vocab_size}
    prompt = encode(pair, [{"role": "user", "content": practice_prompts()[0]}])
    return Models(name="reference", **models, prompt=prompt, tokenizer=pair.tokenizer, head=pair.head, about=about)


@torch.no_grad()
def correlated(name: str, device: str, *, is_tiny: bool) -> Models:
    """Random weights, and a draft that agrees as the docstring says."""
    shape = TINY if is_tiny else SHAPES[name]
    torch.manual_seed(0)
    target = random_llama(shape, device)
    num_layers = 1 if is_tiny else DRAFT_LAYERS[name]
    draft = random_llama(shape | {"num_hidden_layers": num_layers}, device)
    texts = torch.randint(0, shape["vocab_size"], (4, 64), device=device)
    target.lm_head.weight.mul_(LOGIT_SPREAD / target(texts).logits.float().std())
    draft.load_state_dict({k: v for k, v in target.state_dict().items() if k in draft.state_dict()})
    q = draft(texts).logits.float().softmax(-1)
    reached, scale, (low, high) = 0.0, 1.0, (1e-3, 1.0)
    for _ in range(10):
        middle = (low * high) ** 0.5
        soften(target, num_layers, middle / scale)
        scale = middle
        reached = float(torch.minimum(target(texts).logits.float().softmax(-1), q).sum(-1).mean())
        low, high = (middle, high) if reached > ACCEPTANCE else (low, middle)
    prompt = texts[0].tolist()
    about = {"dtype": "bfloat16", "weights": "random, the draft correlated", "draft_layers": num_layers}
    about |= {"residual_scale": round(scale, 4), "acceptance": round(reached, 3)}
    return Models(name=name, target=target, draft=draft, vocab_size=shape["vocab_size"], prompt=prompt, about=about)


def random_llama(shape: dict[str, int], device: str) -> Any:
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**shape, **ids, max_position_embeddings=2048)  # pyright: ignore[reportArgumentType]
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def soften(target: Any, first: int, factor: float) -> None:
    """Scale what the layers from `first` on add to the residual stream."""
    for layer in target.model.layers[first:]:
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)


def pairs_of(models: Models) -> dict[str, sd.Pair]:
    """The pair by backend. All read the weights of the first one: laying them out twice would hold them twice."""
    graphs = [GraphModel(m, vocab_size=models.vocab_size) for m in (models.target, models.draft)]
    kinds: dict[str, list[Any]] = {
        "graphs": graphs,
        "lean": [backend.plain() for backend in graphs],
        "eager": [EagerModel(m, vocab_size=models.vocab_size) for m in (models.target, models.draft)],
    }
    common = {"tokenizer": models.tokenizer, "head": models.head}
    return {kind: sd.Pair(target=target, draft=draft, **common) for kind, (target, draft) in kinds.items()}


def num_bytes(model: Any) -> int:
    """Of the weights that a pass reads: all but the embedding, of which it reads a row; where the two are tied, all."""
    whole = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    if model.get_input_embeddings().weight.data_ptr() != model.get_output_embeddings().weight.data_ptr():
        whole.pop(model.get_input_embeddings().weight.data_ptr())
    return sum(whole.values())


# --- stages ----------------------------------------------------------------------------------------------------------------


def steps(result: Result, models: Models, pair: sd.Pair, rate: float, repetitions: int) -> None:
    """A draft step and target passes, replayed as they are recorded, against the bytes of their weights."""
    rule = sd.CumulativeConfidence(threshold=0.0, max_tokens=K)
    session = start(models, pair, rule, sampling=sd.Sampling(), max_tokens=64)
    session.prefill()
    assert isinstance(session.engine, Device), "two graph backends on one device"
    for _ in range(3):
        session.step()
    floor_s = num_bytes(models.draft) / rate
    draft_s = seconds_of(draft_step_of(session), models.device, repetitions)
    result.add("steps", models.name, what="draft step", ms=ms(draft_s), floor_ms=ms(floor_s), ratio=round(draft_s / floor_s, 2))
    target: Any = pair.target.new_cache()
    floor_s = num_bytes(models.target) / rate
    target.extend([5] * 96, rows=1)
    for width in WIDTHS[:6]:
        with torch.inference_mode():
            program = target.static.pass_over(width, target.make_room(96 + width))
            seconds = seconds_of(program, models.device, repetitions)
        row = {"ms": ms(seconds), "floor_ms": ms(floor_s), "ratio": round(seconds / floor_s, 2)}
        result.add("steps", models.name, what=f"target pass of {width}", **row)


def draft_step_of(session: Session) -> Callable[[], None]:
    """The recorded step of a session's steps, at one place of the text."""
    cache = session.draft.static  # pyright: ignore[reportAttributeAccessIssue]
    read = next(p for key, p in reversed(cache._programs.items()) if key[:2] == ("pass", 1))
    note = next(p for key, p in cache._programs.items() if key[0] == "draft")

    @torch.inference_mode()
    def step() -> None:
        cache.record.each[0].order.copy_(
            order
        )  # the number of the draft token, and the place in the text: written over, then let go
        cache.inputs[:1].zero_()
        read()
        note()

    order = torch.tensor([0, 0, 1], device=cache.device)
    return step


def waits(result: Result, models: Models, pair: sd.Pair) -> None:
    """Calls that wait for the device, in a step that stops early and in one that does not."""
    for policy in (sd.Fixed(k=K), sd.CumulativeConfidence()):
        for where in ("device", "host"):
            session = start(models, pair, policy, sampling=sd.Sampling(), max_tokens=400)
            if where == "host":
                session.engine = Host()
            session.prefill()
            for _ in range(12):
                session.step()
            row = {"rule": type(policy).__name__, "rounds_by_the": where, **counted(session, 16, models.device)}
            result.add("waits", models.name, **row)


def counted(session: Session, num_rounds: int, device: torch.device) -> dict[str, Any]:
    """Per step: what torch warns of as a synchronisation, and calls of the driver that wait; none on a CPU."""
    if device.type != "cuda":
        drafted = [session.step().num_drafted for _ in range(num_rounds)]
        return {"warned": None, "waited": None, "num_drafted": statistics.mean(drafted)}
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        drafted = [session.step().num_drafted for _ in range(num_rounds)]
    torch.cuda.set_sync_debug_mode("default")
    warned = sum("synchroniz" in str(w.message) for w in seen)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(num_rounds):
            session.step()
    calls = Counter(e.name for e in profile.events() or () if "Synchronize" in e.name)
    per_step = {name: round(count / num_rounds, 2) for name, count in calls.items()}
    return {"warned": warned / num_rounds, "waited": per_step, "num_drafted": statistics.mean(drafted)}


def start(
    models: Models,
    pair: sd.Pair,
    policy: sd.Policy,
    *,
    sampling: sd.Sampling,
    max_tokens: int,
    costs: CostClock | None = None,
    experience: Experience | None = None,
) -> Session:
    """A request that nothing but its length ends. Its tokens are not turned into text."""
    target, draft = pair.target.new_cache(), pair.draft.new_cache()
    return Session(
        target=target,
        draft=draft,
        policy=policy,
        verification=GreedyVerification() if sampling.is_greedy else TokenVerification(),
        sampling=sampling,
        prompt=models.prompt,
        max_tokens=max_tokens,
        randomness=streams(0),
        costs=costs,
        experience=experience,
    )


Engine = Callable[[sd.Sampling, int], dict[str, Any]]
"""(sampling, tokens) -> what a row says: tokens_per_second and more."""


def ours(models: Models, pair: sd.Pair, policy: sd.Policy, *, by_host: bool = False) -> Engine:
    costs = costs_for(policy, measure(pair)) if policy.needs_costs else None
    clock = None if costs is None else CostClock(now=costs)  # as a decoder has it for requests without a seed
    known = {sampling: Experience(policy) for sampling in SAMPLINGS.values()}

    def decode(sampling: sd.Sampling, num_tokens: int) -> dict[str, Any]:
        own: dict[str, Any] = {"costs": clock, "experience": known[sampling]}
        session = start(models, pair, policy, sampling=sampling, max_tokens=num_tokens, **own)
        if by_host:
            session.engine = Host()
        settle(pair.target.device)
        started = time.perf_counter()
        metrics = finished(session, list(run(session))).metrics
        seconds = time.perf_counter() - started
        return {
            "tokens_per_second": metrics.num_tokens / seconds,
            "ms_per_round": ms(seconds / metrics.num_spec_steps),
            "mean_acceptance_length": round(metrics.mean_acceptance_length, 2),
            "drafts_per_round": round(metrics.num_draft_tokens / metrics.num_spec_steps, 2),
            "prefill_ms": ms(metrics.prefill_s),
            "round_ms": {part: ms(getattr(metrics, part) / metrics.num_spec_steps) for part in PARTS},
        }

    return decode


def theirs(models: Models, **options: Any) -> Engine:
    """transformers' own `generate`, batch 1, on the same prompt."""
    ids = torch.tensor([models.prompt], device=models.device)

    def decode(sampling: sd.Sampling, num_tokens: int) -> dict[str, Any]:
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": sampling.top_p}
        how: dict[str, Any] = {"do_sample": False} if sampling.is_greedy else drawn
        torch.manual_seed(0)
        settle(models.device)
        started = time.perf_counter()
        out = models.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            **how,
            **options,
        )
        settle(models.device)
        seconds = time.perf_counter() - started
        return {"tokens_per_second": (out.shape[1] - ids.shape[1]) / seconds}

    return decode


def engines(models: Models, pairs: dict[str, sd.Pair]) -> Iterator[tuple[str, str, Callable[[], Engine]]]:
    """(name, setting, how to make it), the slow ones to get ready last."""
    fixed, free = sd.Fixed(k=K), sd.CumulativeConfidence()
    yield "graphs", "default", lambda: ours(models, pairs["graphs"], sd.CostAware())
    for k in LENGTHS:
        yield "graphs", f"K = {k}", lambda k=k: ours(models, pairs["graphs"], sd.Fixed(k=k))
    yield "graphs", "product of q", lambda: ours(models, pairs["graphs"], free)
    if models.head is not None:
        yield "graphs", "cost-aware with its head", lambda: ours(models, pairs["graphs"], sd.CostAware(head=models.head))
    yield "graphs, steps by the host", f"K = {K}", lambda: ours(models, pairs["graphs"], fixed, by_host=True)
    yield "graphs", "target alone", lambda: ours(models, pairs["graphs"], sd.Fixed(k=0))
    yield "lean", f"K = {K}", lambda: ours(models, pairs["lean"], fixed)
    yield "eager", f"K = {K}", lambda: ours(models, pairs["eager"], fixed)
    assisted = {"num_assistant_tokens": K, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    models.draft.generation_config.update(**assisted)
    yield "transformers", f"assisted, K = {K}", lambda: theirs(models, assistant_model=models.draft)
    yield "transformers", "target alone", lambda: theirs(models)
    is_compiled = models.device.type == "cuda"
    setting = "target alone, static cache" + ", compiled" * is_compiled
    yield "transformers", setting, lambda: theirs(models, cache_implementation="static", disable_compile=not is_compiled)


def tree_engines(models: Models, pairs: dict[str, sd.Pair]) -> Iterator[tuple[str, str, Callable[[], Engine]]]:
    """Trees beside chains: (name, setting, how to make it)."""
    policies: dict[str, sd.Policy] = {"target alone": sd.Fixed(k=0), "default": sd.CostAware()}
    policies |= {f"K = {k}": sd.Fixed(k=k) for k in LENGTHS}
    policies |= {f"tree {shape}": parse_tree(shape) for shape in TREES}
    for setting, policy in policies.items():
        yield "graphs", setting, lambda policy=policy: ours(models, pairs["graphs"], policy)


def tree_passes(result: Result, models: Models, pair: sd.Pair, repetitions: int) -> None:
    """A pass of the target over the nodes of a tree, and offering four children to the nodes of a draft pass."""
    target, draft = pair.target.new_cache(), pair.draft.new_cache()
    target.extend([5] * 96, rows=1)
    for width in (5, 17, 33):
        with torch.inference_mode():
            target.read_nodes([5] * width, [1 | 1 << i for i in range(width)])
            program = target.static.pass_over(width, target.make_room(96 + WIDTHS[-1]), is_tree=True)
            result.add(
                "trees", models.name, what=f"tree pass of {width}", ms=ms(seconds_of(program, models.device, repetitions))
            )
    for width in (1, 5):
        with torch.inference_mode():
            offers = Offers(draft.static, sd.Sampling(), width, 4, is_drawn=True)
            program = draft.static.program(("timed", width), offers, reset=lambda: None)
            row = {"what": f"four children of {width}", "ms": ms(seconds_of(program, models.device, repetitions))}
            result.add("trees", models.name, **row)


def speed(
    result: Result, models: Models, chosen: Iterator[tuple[str, str, Callable[[], Engine]]], *, num_tokens: int, cycles: int
) -> None:
    """One engine after another, each warmed up and then timed; a row is the median of its runs. What records anew for a
    sampling is warmed up under each."""
    for name, setting, make in chosen:
        of = {"engine": name, "setting": setting, "dtype": models.about["dtype"]}
        if result.left_s < 0 or ("compiled" in setting and result.budget_s - result.seconds < COMPILING_S):
            result.add("speed", models.name, **of, left_out="no time left")
            continue
        try:
            began, engine = time.perf_counter(), make()
            first_s = None
            for how, sampling in SAMPLINGS.items():
                if first_s is None or name.startswith("graphs"):
                    engine(sampling, num_tokens)
                first_s = first_s or round(time.perf_counter() - began, 2)
                rows = [engine(sampling, num_tokens) for _ in range(cycles)]
                rate = statistics.median(row["tokens_per_second"] for row in rows)
                row = rows[0] | {"tokens_per_second": round(rate, 1), "ms_per_token": ms(1 / rate), "first_s": first_s}
                runs = [round(row["tokens_per_second"], 1) for row in rows]
                result.add("speed", models.name, sampling=how, **of, **row, runs=runs)
        except Exception as error:  # another library's, or a shape it does not take: the others are still worth having
            result.add("speed", models.name, **of, left_out=f"{type(error).__name__}: {error}"[:300])


def together(result: Result, models: Models, pair: sd.Pair, *, num_tokens: int, cycles: int) -> None:
    """Requests of one length each, in the same steps and one after the other; the median of runs behind a first one."""
    for rule, (how, sampling) in itertools.product((sd.Fixed(k=K), sd.CumulativeConfidence()), SAMPLINGS.items()):
        for num in (1, 2, 4, 8):

            def begun(num: int = num, rule: sd.Policy = rule, sampling: sd.Sampling = sampling) -> list[Session]:
                return [start(models, pair, rule, sampling=sampling, max_tokens=num_tokens) for _ in range(num)]

            row: dict[str, Any] = {"requests": num, "rule": str(rule), "sampling": how}
            for name, taken in (("together", lambda some: [some]), ("in_turn", lambda some: [[one] for one in some])):
                rates = []
                for _ in range(cycles + 1):
                    sessions = begun()
                    settle(models.device)
                    began = time.perf_counter()
                    for group in taken(sessions):
                        while on := [one for one in group if one.finish_reason is None]:
                            if failed := [outcome for outcome in step_of_all(on) if isinstance(outcome, Exception)]:
                                raise failed[0]
                    rates.append(num * num_tokens / (time.perf_counter() - began))
                row[name] = round(statistics.median(rates[1:]), 1)
            result.add("together", models.name, **row)


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy models and few tokens: to try the stages")
    parser.add_argument("--pairs", default="reference,1b,8b")
    parser.add_argument("--stages", type=lambda text: text.split(","), default=["steps", "waits", "speed", "together"])
    parser.add_argument("--cycles", type=int, default=2, help="runs of every engine under every sampling")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which nothing new is begun")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here. Try the stages with --device cpu --tiny --out FILE.")
    device = torch.device(args.device)
    result = Result(args.out, args.budget)
    result.set(
        gpu=torch.cuda.get_device_name() if device.type == "cuda" else None,
        machine=[platform.machine(), os.cpu_count()],
        versions={"specdecpp": sd.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        is_tiny=args.tiny,
    )
    rate = bandwidth(device, 2**20 if args.tiny else 2**30)
    result.add("memory", "", gigabytes_per_second=round(rate / 1e9, 1))
    names = args.pairs.split(",")
    for place, name in enumerate(names, 1):
        result.share = place / len(names)  # what one pair leaves goes to the next
        if result.left_s < 0:
            result.add("pair", name, left_out="no time left")
            continue
        models = reference(args.device) if name == "reference" else correlated(name, args.device, is_tiny=args.tiny)
        result.add("pair", name, **models.about)
        pairs = pairs_of(models)
        repetitions = 3 if args.tiny else 200
        timing = {"num_tokens": 8 if args.tiny else 96, "cycles": 1 if args.tiny else args.cycles}
        if "steps" in args.stages:
            steps(result, models, pairs["graphs"], rate, repetitions)
        if "waits" in args.stages:
            waits(result, models, pairs["graphs"])
        if "together" in args.stages:
            together(result, models, pairs["graphs"], **timing)
        if "trees" in args.stages:
            tree_passes(result, models, pairs["graphs"], repetitions)
            speed(result, models, tree_engines(models, pairs), **timing)
        if "speed" in args.stages:
            speed(result, models, engines(models, pairs), **timing)
        del models, pairs
        if device.type == "cuda":
            torch.cuda.empty_cache()
    result.set(is_complete=True)


if __name__ == "__main__":
    main()
