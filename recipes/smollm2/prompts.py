"""The prompts that SmolLM2's draft is trained on: questions, instructions and programs to write, a third each.

    python prompts.py --gsm8k gsm8k_train.jsonl --dolly dolly_2k.jsonl --num 12000 --out prompts.jsonl

Questions are those of GSM8K's training part. Instructions are dolly's, and ours: a task about a topic (`TASKS`, `TOPICS`), or
something to do with a sentence. Programs are documented functions of the Python standard library, and ours: a signature with
a docstring that asks for it (`FUNCTIONS`). One row {"source": ..., "text": ...} a prompt, in a fixed shuffle.

Alpaca and HumanEval, which the draft is measured on, are not read here.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from specdecpp.training.prompts import Source, humaneval

sys.path.append(str(Path(__file__).parents[1] / "reference_pair"))
from corpus import functions, standard_library  # pyright: ignore[reportMissingImports]

TASKS = (
    "Explain {} to a child.",
    "Write a short paragraph about {}.",
    "List five facts about {}.",
    "What are the main advantages and disadvantages of {}?",
    "Give three tips for someone who is new to {}.",
    "Why does {} matter?",
    "Write a short poem about {}.",
    "Describe {} in one sentence.",
    "Compare {} with something similar.",
    "How has {} changed over the last hundred years?",
    "Write a story of four sentences in which {} plays a part.",
    "What questions would you ask an expert on {}?",
    "Summarize the history of {}.",
    "Create a quiz with three questions about {}.",
    "Name some common mistakes people make about {}.",
    "Suggest a title and an outline for an essay about {}.",
    "Write an email to a friend that recommends {}.",
    "Give an example that shows how {} works.",
    "What would the world be like without {}?",
    "Write a slogan for a campaign about {}.",
    "How would you explain {} to someone from the Middle Ages?",
    "Make a list of things one needs for {}.",
)
TOPICS = """
photosynthesis; gravity; the water cycle; electric cars; bicycles; baking bread; chess; gardening;
the Roman Empire; jazz; volcanoes; the human heart; vaccines; inflation; supply and demand;
recycling; solar power; wind energy; the internet; databases; machine learning; encryption; public
libraries; space travel; the moon; black holes; dinosaurs; whales; bees; coral reefs; rain forests;
deserts; glaciers; earthquakes; rainbows; sleep; meditation; running a marathon; swimming; yoga; a
balanced diet; vitamins; coffee; tea; chocolate; cheese; olive oil; rice; pizza; soup; camping;
hiking; sailing; photography; painting with watercolors; pottery; knitting; carpentry; playing the
piano; learning a language; writing a novel; reading aloud; public speaking; job interviews; time
management; saving money; buying a house; insurance; taxes; voting; democracy; human rights; the
printing press; the steam engine; the compass; paper; glass; steel; plastic; antibiotics; the
microscope; telescopes; satellites; weather forecasts; maps; calendars; clocks; money; trade;
markets; advertising; small businesses; customer service; teamwork; leadership; friendship; honesty;
courage; patience; curiosity; creativity; humor; grief; childhood; growing old; cats; dogs; horses;
birds of prey; spiders; trees; mushrooms; roses; cities; bridges; trains; airports; traffic;
museums; theater; movies; video games; social media; newspapers; radio; board games; football;
tennis; the Olympic Games; holidays; birthdays; weddings; traditions; folk tales; myths; philosophy;
logic; probability; fractions; geometry; prime numbers; statistics; chemistry; atoms; DNA; cells;
evolution; the brain; memory; dreams; color; sound; light; magnets; batteries; computers;
programming; open source software; robots; drones; three-dimensional printing; climate change; air
pollution; clean water; farming
"""
CHORES = (
    "Rewrite the sentence in the past tense.",
    "Translate the sentence into French.",
    "Correct the grammar of the sentence.",
    "Is the sentence positive, negative or neutral? Give a reason.",
    "Rewrite the sentence so that it sounds more formal.",
    "Find the nouns in the sentence.",
    "Turn the sentence into a question.",
    "Continue the text with two more sentences.",
    "Make the sentence shorter without changing its meaning.",
    "Replace the adjectives by their opposites.",
)
SENTENCES = tuple(
    f"{who} {what} {when}."
    for who, what, when in product(
        ("My old neighbor", "The new teacher", "A group of tired hikers", "The small bakery on the corner", "Our team"),
        ("was surprised by the cold rain", "have finished a difficult project", "sells the best apple cake in town",
         "forgot to bring the heavy keys", "is looking for a quiet place to rest"),
        ("last Friday", "in the early morning", "after a long and boring meeting"),
    )
)  # fmt: skip
FUNCTIONS = (
    ("count_{k}", "items: list[{t}]", "int", "Return how many items of the list are {p}."),
    ("first_{k}", "items: list[{t}]", "{t} | None", "Return the first item that is {p}, or None if there is none."),
    ("remove_{k}", "items: list[{t}]", "list[{t}]", "Return the list without the items that are {p}, in the same order."),
    ("all_{k}", "items: list[{t}]", "bool", "Check whether all items of the list are {p}."),
    ("index_of_{k}", "items: list[{t}]", "int", "Return the index of the last item that is {p}, and -1 if there is none."),
    ("split_{k}", "items: list[{t}]", "tuple[list[{t}], list[{t}]]", "Split a list: items that are {p}, and all the others."),
    ("longest_run_of_{k}", "items: list[{t}]", "int", "Return the length of the longest run of items that are {p}."),
    ("group_{k}", "items: list[{t}]", "dict[bool, list[{t}]]", "Group the items by whether they are {p}."),
    ("pairs_of_{k}", "items: list[{t}]", "list[tuple[{t}, {t}]]", "Return all pairs of neighbouring items that are both {p}."),
    ("replace_{k}", "items: list[{t}], new: {t}", "list[{t}]", "Return the list with every item that is {p} replaced by new."),
)
KINDS = (
    *((name, "int", name) for name in ("even", "odd", "positive", "negative", "prime")),
    ("perfect_squares", "int", "a perfect square"),
    ("multiples_of_three", "int", "a multiple of three"),
    ("two_digit_numbers", "int", "between 10 and 99"),
    ("palindromes", "str", "a palindrome"),
    ("uppercase_words", "str", "in upper case"),
    ("empty_strings", "str", "empty"),
    ("short_words", "str", "shorter than four letters"),
    ("words_with_vowels", "str", "a word with at least one vowel"),
    ("small_numbers", "float", "smaller than one"),
    ("whole_numbers", "float", "a whole number"),
)
SINGLE = (
    ("sum_of_digits", "n: int", "int", "Return the sum of the digits of n.", "sum_of_digits(123)", "6"),
    ("reverse_words", "text: str", "str", "Reverse the order of the words.", "reverse_words('a b c')", "'c b a'"),
    ("factorial", "n: int", "int", "Return the factorial of n.", "factorial(5)", "120"),
    ("fibonacci", "n: int", "int", "Return the n-th Fibonacci number.", "fibonacci(10)", "55"),
    ("gcd", "a: int, b: int", "int", "Return the greatest common divisor.", "gcd(12, 18)", "6"),
    ("is_anagram", "a: str, b: str", "bool", "Check whether two words are anagrams.", "is_anagram('listen', 'silent')", "True"),
    ("flatten", "items: list", "list", "Flatten a nested list.", "flatten([1, [2, [3]]])", "[1, 2, 3]"),
    ("most_common", "items: list[str]", "str", "Return the most frequent item.", "most_common(['a', 'b', 'a'])", "'a'"),
    ("second_largest", "items: list[int]", "int", "Return the second largest number.", "second_largest([3, 1, 2])", "2"),
    ("rotate", "items: list[int], k: int", "list[int]", "Rotate a list by k places.", "rotate([1, 2, 3], 1)", "[3, 1, 2]"),
    ("to_binary", "n: int", "str", "Return n in binary.", "to_binary(5)", "'101'"),
    ("caesar", "text: str, shift: int", "str", "Shift every letter.", "caesar('abc', 1)", "'bcd'"),
    (
        "transpose",
        "rows: list[list[int]]",
        "list[list[int]]",
        "Swap rows and columns.",
        "transpose([[1, 2], [3, 4]])",
        "[[1, 3], [2, 4]]",
    ),
    (
        "merge_sorted",
        "a: list[int], b: list[int]",
        "list[int]",
        "Merge two sorted lists.",
        "merge_sorted([1, 3], [2])",
        "[1, 2, 3]",
    ),
    ("count_vowels", "text: str", "int", "Count the vowels of a text.", "count_vowels('hello')", "2"),
    (
        "running_maximum",
        "items: list[int]",
        "list[int]",
        "Return the largest so far.",
        "running_maximum([1, 3, 2])",
        "[1, 3, 3]",
    ),
    ("is_balanced", "text: str", "bool", "Check whether brackets are balanced.", "is_balanced('(())')", "True"),
    ("median", "items: list[float]", "float", "Return the median.", "median([3, 1, 2])", "2"),
    (
        "chunks",
        "items: list[int], n: int",
        "list[list[int]]",
        "Cut a list into pieces of n.",
        "chunks([1, 2, 3], 2)",
        "[[1, 2], [3]]",
    ),
    (
        "common_prefix",
        "words: list[str]",
        "str",
        "Return the longest common prefix.",
        "common_prefix(['flow', 'flat'])",
        "'fl'",
    ),
)


def tasks() -> Iterator[str]:
    """Instructions of our own."""
    yield from (task.format(topic) for task, topic in product(TASKS, " ".join(TOPICS.split()).split("; ")))
    yield from (f"{chore}\nInput: {sentence}" for chore, sentence in product(CHORES, SENTENCES))


def programs() -> Iterator[str]:
    """Signatures with docstrings of our own."""
    found = [
        (name.format(k=k), given.format(t=t), result.format(t=t), text.format(p=p))
        for (name, given, result, text), (k, t, p) in product(FUNCTIONS, KINDS)
    ]
    found += [(name, *types, f"{text}\n    >>> {call}\n    {value}") for name, *types, text, call, value in SINGLE]
    for name, given, result, text in found:
        yield f'def {name}({given}) -> {result}:\n    """ {text}\n    """'


def shuffled(texts: Iterator[str] | list[str]) -> list[str]:
    return sorted(dict.fromkeys(texts), key=lambda text: hashlib.sha256(text.encode()).digest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's training part, JSON lines")
    parser.add_argument("--dolly", type=Path, required=True, help="a part of dolly, JSON lines")
    parser.add_argument("--num", type=int, default=12000, help="prompts (default: 12000)")
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file")
    args = parser.parse_args()
    library = (d.prompt for path in standard_library() for d in functions(path) if d.prompt and len(d.prompt) < 1200)
    sources = {
        "questions": [prompt.text for prompt in Source(path=str(args.gsm8k), prompt="gsm8k").prompts()],
        "dolly": [prompt.text for prompt in Source(path=str(args.dolly), prompt="alpaca").prompts() if len(prompt.text) < 1500],
        "tasks": list(tasks()),
        "library": list(library),
        "programs": [humaneval({"prompt": prompt}) for prompt in programs()],
    }
    shares = {
        "questions": 1 / 3,
        "dolly": 1 / 6,
        "tasks": 1 / 6,
        "library": 1 / 3 - len(sources["programs"]) / args.num,
        "programs": 1,
    }
    rows = [(name, text) for name, texts in sources.items() for text in shuffled(texts)[: round(shares[name] * args.num)]]
    rows.sort(key=lambda row: hashlib.sha256(("order" + row[1]).encode()).digest())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps({"source": name, "text": text}) + "\n" for name, text in rows), encoding="utf-8")
    counts = ", ".join(f"{sum(row[0] == name for row in rows):,} {name}" for name in sources)
    print(f"{args.out}: {len(rows):,} prompts ({counts})")


if __name__ == "__main__":
    main()
