"""A Chromium of the system, `specdecpp serve` with the reference pair in a process of its own, and pages between them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from specdecpp.loading.pair import REFERENCE

PATIENCE_MS = 60_000
MANY = 1_000_000
"""Tokens that no machine makes while a test lasts."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A server in a process of its own."""

    url: str
    process: "subprocess.Popen[str]"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.fail("no Chromium is here. Install one, or name it: CHROMIUM=/path/to/chromium make engine-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """Starts a server with options; all are stopped in the end."""
    running: list[subprocess.Popen[str]] = []

    def start(*options: str) -> Service:
        command = [sys.executable, "-m", "specdecpp", "serve", "--port", "0", *options]
        with (tmp_path_factory.mktemp("serve") / "log").open("w") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        running.append(server)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        assert url, "the server did not start"
        return Service(url=url, process=server)

    yield start
    for server in running:
        server.terminate()
        server.communicate(timeout=60)


@pytest.fixture(scope="session")
def url(serve: Callable[..., Service]) -> str:
    return serve().url


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of a server whose answers nothing ends but their length, which may be `MANY`: on any machine they can be looked
    at on their way. It has the reference pair with no end of the text and a long context in its configuration.
    """
    folder = tmp_path_factory.mktemp("endless")
    for role in ("target", "draft"):
        shutil.copytree(REFERENCE / role, folder / role)
        for name, changes in (("config", {"max_position_embeddings": 2 * MANY}), ("generation_config", {"eos_token_id": []})):
            path = folder / role / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    pair = ("--target", str(folder / "target"), "--draft", str(folder / "draft"), "--backend", "eager")
    return (*pair, "--max-tokens", str(MANY), "--timeout", "3600")


@pytest.fixture(scope="session")
def endless_url(serve: Callable[..., Service], endless: tuple[str, ...]) -> str:
    return serve(*endless).url


@pytest.fixture
def opened(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page, and checks in the end that it complained of nothing and asked nobody else.

    `expects` are the failures that the test provokes, in the browser's words: it puts each of them on its console.
    """
    pages: list[tuple[Page, str, list[str], list[str], tuple[str, ...]]] = []

    def open_page(url: str, *, expects: tuple[str, ...] = (), **context: Any) -> Page:
        page = chromium.new_context(**context).new_page()
        page.set_default_timeout(PATIENCE_MS)
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        pages.append((page, url, said, asked, expects))
        page.goto(url)
        return page

    yield open_page
    for page, url, said, asked, expects in pages:
        page.context.close()
        assert asked
        assert [address for address in asked if not address.startswith((url, "data:"))] == []
        assert [text for text in said if not any(known in text for known in expects)] == []


@pytest.fixture
def counter(endless_url: str) -> Callable[[str], float]:
    """A sample of /metrics of the server of endless answers, by the beginning of its line."""

    def read(name: str) -> float:
        lines = httpx2.get(f"{endless_url}/metrics", timeout=PATIENCE_MS / 1000).text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    return read
