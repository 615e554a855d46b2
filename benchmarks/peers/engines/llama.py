"""llama.cpp's own server, a process per setting, because the server's speculation is set when it starts. The argument is the
binary.

Settings: {"n_max": null} for the target alone, or {"n_max": K, "p_min": p}, without p_min as the engine has it; with
`ready` so many parallel slots of 1,024 places.

The cache is float32 for float32 weights; other types have the engine's default. Its own clock is used (reading the prompt and
decoding), so that HTTP costs it nothing. Samplers that would change the distribution are off.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peers.environments import BINDING
from peers.protocol import Answer, Load, Request, serve


class Server:
    """A running llama-server."""

    def __init__(self, command: list[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen([*command, "--port", str(self.port)], stdout=sys.stderr, stderr=sys.stderr)
        deadline = time.monotonic() + 60
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"llama-server did not start: {' '.join(command)}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.loads(reply.read())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class LlamaCpp:
    """Servers by setting, started when they are first asked."""

    def __init__(self, binary: str):
        self.binary = binary
        self.servers: dict[str, Server] = {}
        self.current: Server | None = None
        self.slots = 1

    def load(self, load: Load) -> dict[str, str]:
        self.close()
        self.spec = load
        shown = subprocess.run([self.binary, "--version"], capture_output=True, text=True, check=True)
        lines = (shown.stdout + shown.stderr).strip().splitlines()
        version = next((line.split(":", 1)[1].split()[0] for line in lines if line.startswith("version")), lines[0])
        return {"llama.cpp": f"{version} (sources of {BINDING})"}

    def close(self) -> None:
        for server in self.servers.values():
            server.stop()
        self.servers, self.current = {}, None

    def pids(self) -> list[int]:
        return [self.current.process.pid] if self.current else []

    def run(self, request: Request) -> Answer:
        self.current = self._server(request.options)
        found = self._asked(self.current, request)
        clock = found["timings"]
        accepted = clock.get("draft_n_accepted", 0)
        return Answer(
            tokens=found["tokens"],
            steps=len(found["tokens"]) - accepted,
            drafted=clock.get("draft_n", 0),
            accepted=accepted,
            seconds=(clock["prompt_ms"] + clock["predicted_ms"]) / 1e3,
            reading_s=clock["prompt_ms"] / 1e3,
        )

    def ready(self, at_once: int) -> None:
        if at_once != self.slots:
            self.close()  # slots are given when it starts
        self.slots = at_once

    def run_all(self, requests: Sequence[Request]) -> list[int]:
        """A thread for each slot; the server decodes what it has in one batch."""
        server = self.current = self._server(requests[0].options)
        with ThreadPoolExecutor(self.slots) as pool:
            found = list(pool.map(lambda request: self._asked(server, request), requests))
        return [len(one["tokens"]) for one in found]

    @staticmethod
    def _asked(server: Server, request: Request) -> dict[str, Any]:
        return server.complete(
            {
                "prompt": request.prompt,
                "n_predict": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "samplers": ["temperature", *(["top_p"] if request.top_p < 1 else [])],
                "seed": request.seed,
                "cache_prompt": False,
                "return_tokens": True,
                "ignore_eos": request.ignore_eos,
            }
        )

    def _server(self, options: dict[str, Any]) -> Server:
        key = json.dumps([self.slots, options], sort_keys=True)
        if key not in self.servers:
            self.servers[key] = Server(self._command(options))
        return self.servers[key]

    def _command(self, options: dict[str, Any]) -> list[str]:
        spec, n = self.spec, str(self.spec.threads)
        command = [self.binary, "-m", f"{spec.folder}/target-{spec.dtype}.gguf", "-t", n, "-tb", n]
        command += ["-c", str(1024 * self.slots), "-np", str(self.slots)]
        command += ["--cache-ram", "0", "--no-ui", "-fit", "off", "-fa", "off"]  # plain attention is the faster one on a CPU
        if options["n_max"]:
            command += ["-md", f"{spec.folder}/draft-{spec.dtype}.gguf", "-td", n, "-tbd", n, "--spec-type", "draft-simple"]
            command += ["--spec-draft-n-max", str(options["n_max"])]
            command += ["--spec-draft-p-min", str(options["p_min"])] if "p_min" in options else []
        return command


if __name__ == "__main__":
    engine = LlamaCpp(sys.argv[1])
    try:
        serve(engine)
    finally:
        engine.close()
