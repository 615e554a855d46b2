"""How the server holds under many clients: what they see, what it remembers, and what a client that goes away leaves behind.

    python benchmarks/serving.py [--out benchmarks/results/serving.json]

`specdecpp serve` runs with the reference pair in a process of its own, on loopback, with places for 40 requests. Three parts,
each a bounded number of requests for 32 to 96 tokens (sampled, no end of text):

    one        one client alone, one request after another
    crowd      64 clients at once; one that gets 429 waits as Retry-After says, and asks again
    leavers    64 clients at once, of whom a third go away in the middle of a stream

`crowd` is repeated, and after every repetition the server's memory is read. Seconds are those of the requests that were
answered, from the one that was let in to its last byte. Nothing else should run meanwhile.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx2
import torch

import specdecpp as sd
from specdecpp.testing import practice_prompts

NUM_CLIENTS, TIMEOUT_S = 64, 600
SERVER = ("serve", "--target", "reference", "--port", "0", "--max-running", "8", "--max-waiting", "32")
PROMPTS = practice_prompts()


@dataclass
class Tally:
    """What clients have seen."""

    seconds: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    elapsed_s: float = 0.0

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        shares = {"p50": 50, "p95": 95, "p99": 99}
        centiles = {name: statistics.quantiles(self.seconds, n=100)[at - 1] for name, at in shares.items()}
        firsts = {name: statistics.quantiles(self.first_s, n=100)[at - 1] for name, at in shares.items()}
        return {
            "outcomes": dict(sorted(self.outcomes.items())),
            "request_s": {name: round(s, 4) for name, s in centiles.items()},
            "first_text_s": {name: round(s, 4) for name, s in firsts.items()},
            "tokens_per_second": round(self.num_tokens / self.elapsed_s, 1),
            "elapsed_s": round(self.elapsed_s, 2),
        }


async def ask(client: httpx2.AsyncClient, body: dict[str, Any], tally: Tally, *, leaves: bool = False) -> float | None:
    """One request; the seconds to wait before it is sent again, None when it needs not be."""
    started, num_events = perf_counter(), 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code == 429:
            tally.count("429")
            return float(reply.headers["retry-after"])
        if reply.status_code != 200:
            tally.count(str(reply.status_code))
            return None
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if not num_events:
                tally.first_s.append(perf_counter() - started)
            num_events += 1
            if leaves and num_events > 5:
                tally.count("left")
                return None
            if line == "data: [DONE]":
                tally.seconds.append(perf_counter() - started)
                tally.num_tokens += body["max_tokens"]
                tally.count("answered")
                return None
    tally.count("cut off")
    return None


async def person(client: httpx2.AsyncClient, dice: random.Random, num: int, tally: Tally, *, leaving: float) -> None:
    """Requests one after another; one that finds no place is sent again."""
    for _ in range(num):
        message = {"role": "user", "content": dice.choice(PROMPTS)}
        body = {"messages": [message], "max_tokens": dice.randint(32, 96), "ignore_eos": True, "stream": True}
        leaves = dice.random() < leaving
        while (wait_s := await ask(client, body, tally, leaves=leaves)) is not None:
            await asyncio.sleep(wait_s * (0.5 + dice.random()))


async def crowd(url: str, *, clients: int, each: int, seed: int, leaving: float = 0.0) -> Tally:
    """So many clients at once."""
    tally, limits = Tally(), httpx2.Limits(max_connections=clients)
    started = perf_counter()
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        people = (person(client, random.Random(1000 * seed + i), each, tally, leaving=leaving) for i in range(clients))
        await asyncio.gather(*people)
    tally.elapsed_s = perf_counter() - started
    return tally


def memory_mb(pid: int) -> float:
    """What the process holds in memory (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


async def settled(url: str) -> dict[str, Any]:
    """The state of the server once it is idle, or after ten seconds."""
    health: dict[str, Any] = {}
    async with httpx2.AsyncClient(base_url=url) as client:
        for _ in range(100):
            health = (await client.get("/health")).json()
            if health["running"] == health["waiting"] == 0:
                break
            await asyncio.sleep(0.1)
    return health


async def measured(url: str, pid: int, *, each: int, repeats: int) -> dict[str, Any]:
    """All three parts."""
    await crowd(url, clients=4, each=2, seed=0)  # warm-up
    alone = await crowd(url, clients=1, each=8 * each, seed=1)
    crowds, memory = [], []
    for repeat in range(repeats):
        crowds.append(await crowd(url, clients=NUM_CLIENTS, each=each, seed=2 + repeat))
        memory.append(memory_mb(pid))
        print(f"crowd {repeat + 1}: {crowds[-1].outcomes}, {memory[-1]} MB", file=sys.stderr)
    leavers = await crowd(url, clients=NUM_CLIENTS, each=each, seed=99, leaving=1 / 3)
    health = await settled(url)
    together = Tally(
        seconds=[s for c in crowds for s in c.seconds],
        first_s=[s for c in crowds for s in c.first_s],
        outcomes={k: sum(c.outcomes.get(k, 0) for c in crowds) for k in {k for c in crowds for k in c.outcomes}},
        num_tokens=sum(c.num_tokens for c in crowds),
        elapsed_s=sum(c.elapsed_s for c in crowds),
    )
    return {
        "one": alone.to_dict(),
        "crowd": {"clients": NUM_CLIENTS, "repeats": repeats, **together.to_dict(), "memory_mb": memory},
        "leavers": {"clients": NUM_CLIENTS, **leavers.to_dict(), "memory_mb": memory_mb(pid), "left_behind": health},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--each", type=int, default=2, help="requests per client")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = [sys.executable, "-m", "specdecpp", *SERVER]
    log = Path("serving.log") if args.out is None else args.out.with_suffix(".log")
    with log.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            found = asyncio.run(measured(url, server.pid, each=args.each, repeats=args.repeats))
        finally:
            server.send_signal(signal.SIGTERM)
    errors = sum('"level": "error"' in line for line in log.read_text().splitlines())
    log.unlink()
    versions = {"specdecpp": sd.__version__, "torch": torch.__version__, "python": platform.python_version()}
    about = {
        "command": "python benchmarks/serving.py",
        "server": " ".join(SERVER),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }
    result = about | found | {"exit_code": server.returncode, "errors_logged": errors}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
