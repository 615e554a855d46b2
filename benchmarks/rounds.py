"""What users run by default, beside what is fast by name: one rule under the requests that people send, in turns.

    python benchmarks/rounds.py [--target NAME --draft NAME] [--out benchmarks/results/rounds.json]

The default pair and rule, unless named. Requests differ from the plain one (a seed, a temperature) in one thing each: top-p,
top-k, min-p, a repetition penalty, no seed, log-probabilities, a rule that is a function (run by the loop in Python), the
target alone. All answer a prompt before the next prompt comes. The figure is the median over prompts and cycles of tokens/s
over those of the plain request on the same prompt in the same turn, so that what the machine does meanwhile falls on both.
Nothing else should run.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from peers.provenance import provenance

import specdecpp as sd
from specdecpp.bench.interleaving import in_turn
from specdecpp.decoder import run
from specdecpp.policies import Stop
from specdecpp.request import as_prompt
from specdecpp.serving.evidence import Witness
from specdecpp.testing import practice_prompts

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request: what it changes, how many log-probabilities it wants, and whose decoder answers."""

    options: dict[str, Any] = field(default_factory=dict)
    num_top: int | None = None
    decoder: str = "default"


REQUESTS = {
    PLAIN: Asked(),
    "top_p 0.9": Asked(options={"top_p": 0.9}),
    "top_k 40": Asked(options={"top_k": 40}),
    "min_p 0.05": Asked(options={"min_p": 0.05}),
    "repetition_penalty 1.1": Asked(options={"repetition_penalty": 1.1}),
    "no seed": Asked(options={"seed": None}),
    "logprobs 5": Asked(num_top=5),
    "a function as rule": Asked(decoder="function"),
    "target alone": Asked(decoder="target"),
    "target alone, top_p 0.9": Asked(options={"top_p": 0.9}, decoder="target"),
}


def as_function(policy: sd.Policy) -> sd.Policy:
    """The same rule, said by a function: `stop` is overridden, so that nobody may follow its thresholds."""
    kind = type(policy)

    def stop(self: Any, draft: Any, memory: Any) -> Stop | str | None:
        return kind.stop(self, draft, memory)

    other = object.__new__(type(kind.__name__, (kind,), {"stop": stop}))
    other.__dict__.update(policy.__dict__)
    return other


def rate(decoder: sd.Decoder, prompt: Any, asked: Asked, seed: int, args: argparse.Namespace) -> float:
    """Tokens per second of an answer, its prompt left aside."""
    options = {"max_tokens": args.tokens, "temperature": args.temperature, "seed": seed} | asked.options
    session = decoder.start(prompt, **options)  # pyright: ignore[reportArgumentType]
    witness = None
    if asked.num_top is not None:
        tokenizer = decoder.pair.tokenizer
        session.watch = witness = Witness(tokenizer, session.sampling, ends=session.ends, num_top=asked.num_top)
    session.prefill()
    started, num = perf_counter(), 0
    for outcome in run(session):
        num += outcome.num_tokens
        if witness is not None:
            witness.evidence(outcome)
    return num / (perf_counter() - started)


def measured(decoders: dict[str, sd.Decoder], prompts: list[Any], args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Tokens per second of every request, turn by turn."""
    num_turns = args.cycles * len(prompts)
    for turn in range(num_turns):
        prompt, found = prompts[turn % len(prompts)], {}
        for name in in_turn(list(REQUESTS), turn, num_turns=num_turns):
            found[name] = rate(decoders[REQUESTS[name].decoder], prompt, REQUESTS[name], turn, args)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", help="default: the reference pair")
    parser.add_argument("--draft")
    parser.add_argument("--head")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="2 prompts, 1 cycle")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.cycles = 2, 1
    about = provenance("python", "benchmarks/rounds.py")
    named = {key: value for key, value in (("draft", args.draft), ("head", args.head)) if value}
    pair = sd.load_pair(args.target, **named) if args.target else sd.load_pair(**named)
    default = sd.Decoder(pair, reuses=False)
    decoders = {
        "default": default,
        "function": sd.Decoder(pair, policy=as_function(default.policy), costs=default.costs, reuses=False),
        "target": sd.Decoder(pair, policy=sd.Fixed(k=0), reuses=False),
    }
    prompts = [as_prompt(pair, text) for text in practice_prompts()[:: 200 // args.prompts][: args.prompts]]
    for name, asked in REQUESTS.items():  # caches, compiled code, costs
        rate(decoders[asked.decoder], prompts[0], REQUESTS[name], 0, args)
    turns = list(measured(decoders, prompts, args))
    rows = [
        {
            "request": name,
            "tokens_per_second": round(statistics.median(turn[name] for turn in turns), 1),
            "over_plain": round(statistics.median(turn[name] / turn[PLAIN] for turn in turns), 3),
        }
        for name in REQUESTS
    ]
    print(f"{'request':26}{'tokens/s':>10}{'over plain':>12}")
    for row in rows:
        print(f"{row['request']:26}{row['tokens_per_second']:10.1f}{row['over_plain']:12.3f}")
    if args.out:
        found = {**about, "pair": Path(pair.target_name).name, "rule": type(default.policy).__name__, "turns": len(turns)}
        found |= {"temperature": args.temperature, "tokens": args.tokens, "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
