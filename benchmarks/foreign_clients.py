"""What benchmark clients of others report of `specdecpp serve`, beside what the server counted of the same requests.

    python benchmarks/foreign_clients.py --speed-bench speed_bench.py \
        --vllm .engines/vllm/bin/python --aiperf .engines/aiperf/bin/aiperf

The clients run as they are: llama.cpp's `tools/server/bench/speed-bench/speed_bench.py`, `vllm bench serve` and NVIDIA's
aiperf, the latter two in the environments of their tests (`make engine-vllm engine-aiperf`). Those not named are left out.
SPEED-Bench's own prompts are not ours to ship: here are some of ours in its eleven categories, and with --data the rows of
data sets for four of them. Answers are greedy, one request at a time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
from peers.provenance import provenance
from realpair.prompts import BENCHMARKS, SETS, prompts
from structured import running

from specdecpp.loading.pair import REFERENCE

RESULTS = Path(__file__).parent / "results" / "foreign_clients.json"
TOKENS = 64
Prompts = dict[str, list[list[str]]]
"""Conversations by category: what the user says, turn by turn."""
OWN: Prompts = {
    "coding": [
        ["Write a Python function that merges two sorted lists."],
        ["What does `git rebase` do?", "When is it dangerous?"],
    ],
    "humanities": [["Why did the Hanseatic League lose its power?"], ["What did Stoics think of anger?"]],
    "math": [["A train of 180 m passes a pole in 9 s. How fast is it?"], ["How many primes are there below 50?"]],
    "multilingual": [
        ["Übersetze ins Englische: Der Zug hat Verspätung."],
        ["¿Cuál es la capital de Perú? Responde en español."],
    ],
    "qa": [["Who wrote The Trial?"], ["What is the boiling point of water on a high mountain?"]],
    "rag": [["Text: The mill was built in 1712 and burnt down in 1834.\nQuestion: How long did the mill stand?"]],
    "reasoning": [["Anna is older than Ben, and Ben is older than Cem. Who is the youngest? Say why."]],
    "roleplay": [["You are the captain of a ship in a storm. Speak to your crew."]],
    "stem": [["Why is the sky blue?"], ["What holds a nucleus together?"]],
    "summarization": [["Summarise: The council met on Monday. It agreed on a new bridge, which is to cost nine million."]],
    "writing": [["Begin a story about a lighthouse."], ["Write a letter to a neighbour.", "Make it shorter."]],
}
DATASETS = {
    "coding": BENCHMARKS["humaneval"],
    "math": BENCHMARKS["gsm8k"],
    "qa": BENCHMARKS["alpaca"],
    "summarization": SETS["summary"],
}
STUB = """
import json
class Rows(list):
    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)
def get_dataset_config_names(name):
    return ["qualitative"]
def load_dataset(repository, name, split):
    return Rows(json.load(open({path!r})))
"""
"""A module `datasets` whose only data set is a file of ours, in SPEED-Bench's form."""
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` without looking up vLLM's version, which a rebuild for CPUs has not."""
Client = Callable[["Asked"], dict[str, Any]]


class Asked:
    """A server, prompts for it, and a folder for what clients need and write."""

    def __init__(self, url: str, tokenizer: str, conversations: Prompts, folder: Path):
        self.url, self.tokenizer, self.folder, self.conversations = url, tokenizer, folder, conversations
        self.model: str = httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]
        self.num = sum(map(len, conversations.values()))

    def firsts(self, name: str, key: str) -> str:
        """A file with a line of JSON for the first turn of each conversation."""
        path = self.folder / name
        lines = [json.dumps({key: turns[0]}) for of in self.conversations.values() for turns in of]
        path.write_text("\n".join(lines) + "\n")
        return str(path)


def ended(*command: str, folder: Path, env: Mapping[str, str] = {}) -> None:
    """Run a client. Raises RuntimeError with its last words where it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, **env})
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def speed_bench(path: str) -> Client:
    def client(asked: Asked) -> dict[str, Any]:
        rows = [
            {"question_id": f"{category}-{i}", "category": category, "turns": turns}
            for category, of in asked.conversations.items()
            for i, turns in enumerate(of)
        ]
        prompts, out = asked.folder / "prompts.json", asked.folder / "speed_bench.json"
        prompts.write_text(json.dumps(rows))
        (asked.folder / "datasets.py").write_text(STUB.format(path=str(prompts)))
        options = ("--url", asked.url, "--model", asked.model, "--osl", str(TOKENS), "--output", str(out))
        ended(sys.executable, str(Path(path).resolve()), *options, folder=asked.folder, env={"PYTHONPATH": str(asked.folder)})
        found = json.loads(out.read_text())
        (overall,) = [row for row in found["summary"] if row["category"] == "overall"]
        return {
            "requests": overall["turns"],
            "failed": overall["failed"],
            "prompt_tokens": sum(row["prompt_tokens"] for row in found["results"]),
            "completion_tokens": sum(row["completion_tokens"] for row in found["results"]),
            "draft_tokens": overall["draft_n"],
            "accepted_tokens": overall["accepted"],
            "acceptance_rate": overall["accept_rate"],
            "decoding_tokens_per_second": overall["avg_pred_t_s"],
            "categories": len(found["summary"]) - 1,
        }

    return client


def vllm_bench(path: str) -> Client:
    def client(asked: Asked) -> dict[str, Any]:
        data, out = asked.firsts("vllm.jsonl", "prompt"), asked.folder / "vllm.json"
        ended(
            *(str(Path(path).absolute()), "-c", BENCH_SERVE, "--backend", "openai-chat", "--base-url", asked.url),
            *("--endpoint", "/v1/chat/completions", "--model", asked.model, "--tokenizer", asked.tokenizer, "--seed", "0"),
            *("--dataset-name", "custom", "--dataset-path", data, "--custom-output-len", str(TOKENS), "--temperature", "0"),
            *("--skip-chat-template", "--num-prompts", str(asked.num), "--max-concurrency", "1"),
            *("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name),
            folder=asked.folder,
        )
        found = json.loads(out.read_text())
        return {
            "requests": found["completed"],
            "failed": found["failed"],
            "prompt_tokens": found["total_input_tokens"],
            "completion_tokens": found["total_output_tokens"],
            "drafts": found["spec_decode_num_drafts"],
            "draft_tokens": found["spec_decode_draft_tokens"],
            "accepted_tokens": found["spec_decode_accepted_tokens"],
            "acceptance_rate": found["spec_decode_acceptance_rate"] / 100,
            "acceptance_length": found["spec_decode_acceptance_length"],
            "acceptance_by_place": found["spec_decode_per_position_acceptance_rates"],
            "decoding_tokens_per_second": 1000 / found["mean_tpot_ms"],
        }

    return client


def aiperf(path: str) -> Client:
    def client(asked: Asked) -> dict[str, Any]:
        data, out = asked.firsts("aiperf.jsonl", "text"), asked.folder / "aiperf"
        ended(
            *(
                str(Path(path).absolute()),
                "profile",
                "--model",
                asked.model,
                "--url",
                asked.url,
                "--tokenizer",
                asked.tokenizer,
            ),
            *("--endpoint-type", "chat", "--streaming", "--input-file", data, "--custom-dataset-type", "single_turn"),
            *("--request-count", str(asked.num), "--concurrency", "1", "--use-server-token-count", "--ui", "none"),
            *("--extra-inputs", "temperature:0", "--extra-inputs", f"max_tokens:{TOKENS}", "--artifact-dir", str(out)),
            folder=asked.folder,
        )
        found = json.loads((out / "profile_export_aiperf.json").read_text())
        accepted = {int(num): steps for num, steps in found["pooled_spec_decode_acceptance_histogram"].items()}
        return {
            "requests": found["request_count"]["avg"],
            "failed": found["request_error_rate"]["avg"],
            "prompt_tokens": found["total_usage_prompt_tokens"]["avg"],
            "completion_tokens": found["total_usage_completion_tokens"]["avg"],
            "drafts": sum(accepted.values()),
            "draft_tokens": found["total_draft_tokens"]["avg"],
            "accepted_tokens": found["total_accepted_draft_tokens"]["avg"],
            "acceptance_rate": found["spec_decode_overall_draft_acceptance_rate"]["avg"] / 100,
            "acceptance_length": found["spec_decode_token_weighted_acceptance_length"]["avg"],
            "acceptance_histogram": accepted,
            "decoding_tokens_per_second": found["effective_decode_throughput"]["avg"],
        }

    return client


CLIENTS = {"speed-bench": speed_bench, "vllm": vllm_bench, "aiperf": aiperf}


def counted(url: str) -> dict[str, float]:
    """The server's counters."""
    lines = [line for line in httpx2.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def ours(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """What the server counted in between, by the names of the clients' rows."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    drafts, drafted, accepted = (
        grown(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    stages = ("draft", "head", "verify", "other")
    return {
        "requests": int(grown('specdecpp_requests_total{outcome="finished"}')),
        "prompt_tokens": int(grown("specdecpp_prompt_tokens_total")),
        "completion_tokens": int(grown("specdecpp_generation_tokens_total")),
        "drafts": int(drafts),
        "draft_tokens": int(drafted),
        "accepted_tokens": int(accepted),
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "decoding_tokens_per_second": grown("specdecpp_generation_tokens_total")
        / sum(grown(f'specdecpp_stage_seconds_total{{stage="{stage}"}}') for stage in stages),
    }


def compared(client: Client, asked: Asked) -> dict[str, Any]:
    """What a client reports of its run, and what the server counted meanwhile."""
    before = counted(asked.url)
    return {"client": client(asked), "server": ours(before, counted(asked.url))}


SAME = ("requests", "prompt_tokens", "completion_tokens", "draft_tokens", "accepted_tokens")
"""What a client must report as the server counted it."""


def check(row: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise RuntimeError where requests failed, or a client has other counts than the server."""
    client, server = row["client"], row["server"]
    other = {name: (client[name], server[name]) for name in SAME if client[name] != server[name]}
    if other or client["failed"] or not server["accepted_tokens"]:
        raise RuntimeError(f"{client['failed']} requests failed; client and server differ: {other}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="reference")
    parser.add_argument("--draft")
    parser.add_argument(
        "--tokenizer", default=str(REFERENCE / "target"), help="a folder with the target's, as transformers has it"
    )
    parser.add_argument(
        "--data", type=Path, help="a folder with HumanEval.jsonl.gz, gsm8k_test.jsonl, alpaca_1k.jsonl, dolly_2k.jsonl"
    )
    parser.add_argument("--num", type=int, default=4, help="rows of each data set")
    for name in CLIENTS:
        parser.add_argument(f"--{name}", help="the client's path")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    conversations = OWN if given.data is None else OWN | {
        name: [[messages[0]["content"]] for messages in of] for name, of in prompts(given.data, given.num, DATASETS).items()
    }  # fmt: skip
    named = {name: path for name in CLIENTS if (path := getattr(given, name.replace("-", "_")))}
    found = provenance("python", "benchmarks/foreign_clients.py") | {"pair": given.target, "clients": {}}
    found["conversations"] = sum(map(len, conversations.values()))
    with (
        running("--target", given.target, *(("--draft", given.draft) if given.draft else ())) as url,
        tempfile.TemporaryDirectory() as folder,
    ):
        asked = Asked(url, given.tokenizer, conversations, Path(folder))
        for name, path in named.items():
            check(found["clients"].setdefault(name, compared(CLIENTS[name](path), asked)))
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
