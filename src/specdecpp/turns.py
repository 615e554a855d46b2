"""Decoders in turns: the fair way to time them side by side, so that a slow moment of the machine falls on all of them.

All answer a prompt before the next prompt comes, in an order that changes from turn to turn. Used by the demo and the bench.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from specdecpp.decoder import Decoder, Output, Prompt

Key = TypeVar("Key", bound=Hashable)


def interleaved(
    decoders: Mapping[Key, Decoder],
    prompts: Sequence[Prompt],
    *,
    num_cycles: int,
    max_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    seed: int,
) -> Iterator[tuple[Key, int, Output]]:
    """Every decoder on every prompt in every cycle, as it comes: (whose, of which prompt, the answer).

    A prompt has the same seed for all, and another one in every cycle.
    """
    num_turns = num_cycles * len(prompts)
    for turn in range(num_turns):
        place = turn % len(prompts)
        for key in in_turn(list(decoders), turn, num_turns=num_turns):
            sampled = {"temperature": temperature, "top_p": top_p, "seed": seed + turn}
            yield key, place, decoders[key].generate(prompts[place], max_tokens=max_tokens, **sampled)


def in_turn(contestants: Sequence[Any], turn: int, *, num_turns: int) -> Sequence[Any]:
    """The order of one turn: who begins moves on, further where turns are too few to go around, and every other turn goes
    backwards, so that neither a slow start of the turns nor a slow end falls on the same ones."""
    num = len(contestants)
    first = turn * max(1, num // num_turns) % num if num else 0
    if turn % 2:
        return [*contestants[: first + 1][::-1], *contestants[first + 1 :][::-1]]
    return [*contestants[first:], *contestants[:first]]
