"""The way of steps from the engine's thread to those who wait for them: nothing is lost, and the last one is not late."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest

pytest.importorskip("fastapi")

from specdecpp.serving import routes
from specdecpp.serving.refusals import Refusal
from specdecpp.serving.routes import Channel
from specdecpp.serving.work import End, Step


def steps(num: int) -> Iterator[Step]:
    """Steps of which nobody reads more than their place."""
    for i in range(num):
        step = object.__new__(Step)
        object.__setattr__(step, "index", i)
        yield step


async def heard(channel: Channel) -> list[list[int]]:
    return [[step.index for step in some] async for some in channel.steps()]


def told(channel: Channel, num: int, pause_s: float, end: End) -> None:
    for step in steps(num):
        channel.put(step)
        time.sleep(pause_s)
    channel.put(end)


@pytest.mark.parametrize("pause_s", [0.0, 0.0005])
def test_every_round_arrives_in_order(pause_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step that is put between the end of a delivery and its word, and waits for ever; and steps of another."""
    monkeypatch.setattr(routes, "PAUSE_S", 0.002)

    async def all_of_them() -> list[list[list[int]]]:
        posts: Any = WeakKeyDictionary()
        channels = [Channel(posts) for _ in range(4)]
        threads = [threading.Thread(target=told, args=(c, 100 + i, pause_s, End())) for i, c in enumerate(channels)]
        for thread in threads:
            thread.start()
        found = await asyncio.wait_for(asyncio.gather(*map(heard, channels)), 60)
        for thread in threads:
            thread.join()
        assert len(posts) == 1
        return list(found)

    for i, found in enumerate(asyncio.run(all_of_them())):
        assert [index for some in found for index in some] == list(range(100 + i))


def test_the_first_and_the_end_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a first text, an end or an error that waits for others, and steps that are sent one by one."""
    monkeypatch.setattr(routes, "PAUSE_S", 3600.0)

    async def one() -> list[list[int]]:
        channel = Channel(WeakKeyDictionary())
        some = []
        first, *others = steps(5)
        channel.put(first)
        heard = aiter(channel.steps())
        some.append([step.index for step in await asyncio.wait_for(anext(heard), 60)])
        for step in others:
            channel.put(step)
        channel.put(End(refusal=Refusal("no more", status=504)))
        some.append([step.index for step in await asyncio.wait_for(anext(heard), 60)])
        with pytest.raises(Refusal, match="no more"):
            await asyncio.wait_for(anext(heard), 60)
        return some

    assert asyncio.run(one()) == [[0], [1, 2, 3, 4]]


def test_a_loop_that_has_gone() -> None:
    """Catches an engine that fails because nobody listens any more."""

    async def left() -> Channel:
        return Channel(WeakKeyDictionary())

    channel = asyncio.run(left())
    for step in steps(3):
        channel.put(step)
    channel.put(End())
