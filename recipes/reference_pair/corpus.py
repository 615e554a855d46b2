"""The reference pair's training text: three kinds of documents, all as (prompt, answer) or plain text.

GSM8K train (MIT), a dolly sample (CC BY-SA 3.0) and the Python standard library of the running interpreter (PSF).
A document is a string; chat documents are rendered exactly as the tokenizer's chat template renders them, so that what
is learned is what is served. The split is by hash of the prompt, so adding files never moves a document across it.
"""

import ast
import gzip
import hashlib
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VALIDATION_SHARE = 0.04
MAX_FUNCTION_CHARS = 2400


@dataclass(frozen=True, kw_only=True)
class Document:
    """One training document. `prompt` is None for plain text (a module of the standard library)."""

    domain: str  # "gsm8k" | "dolly" | "python" | "module"
    prompt: str | None
    answer: str

    def render(self) -> str:
        """The document as the tokenizer's chat template writes it, without <s> and </s>."""
        if self.prompt is None:
            return self.answer
        return f"<|user|>\n{self.prompt}\n<|assistant|>\n{self.answer}"

    @property
    def is_validation(self) -> bool:
        digest = hashlib.sha256((self.prompt or self.answer[:500]).encode()).digest()
        return int.from_bytes(digest[:4]) / 2**32 < VALIDATION_SHARE


def read_jsonl(path: Path) -> list[dict]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def gsm8k_prompt(row: dict) -> str:
    return f"{row['question'].strip()}\nLet's think step by step."


def instruction_prompt(row: dict) -> str:
    return row["instruction"].strip() + (f"\nInput: {row['input'].strip()}" if row.get("input") else "")


def python_prompt(code: str) -> str:
    return f"Write a Python script for this problem:\n\n{code.strip()}"


def gsm8k(path: Path) -> list[Document]:
    return [Document(domain="gsm8k", prompt=gsm8k_prompt(r), answer=r["answer"].strip()) for r in read_jsonl(path)]


def dolly(path: Path) -> list[Document]:
    return [Document(domain="dolly", prompt=instruction_prompt(r), answer=r["output"].strip()) for r in read_jsonl(path)]


def standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__", "pydoc_data"}
    return sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))


def functions(path: Path) -> Iterator[Document]:
    """Every documented function of a module: signature and docstring as the problem, signature and body as the answer."""
    source = path.read_text(encoding="utf-8", errors="ignore")
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 2:
            continue
        doc = node.body[0]
        signature = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1]))
        problem = textwrap.dedent("\n".join(lines[node.lineno - 1 : doc.end_lineno]))
        body = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).splitlines()
        answer = signature + "\n" + "\n".join(body[(doc.end_lineno or 0) - node.lineno + 1 :])
        if signature and len(problem) + len(answer) < MAX_FUNCTION_CHARS:
            yield Document(domain="python", prompt=python_prompt(problem), answer=answer.rstrip())


def modules(paths: list[Path], *, chars: int) -> list[Document]:
    """Whole modules as plain text, cut at blank lines into pieces of about `chars` characters."""
    pieces = []
    for path in paths:
        piece = ""
        for paragraph in path.read_text(encoding="utf-8", errors="ignore").split("\n\n"):
            piece += paragraph + "\n\n"
            if len(piece) >= chars:
                pieces.append(Document(domain="module", prompt=None, answer=piece.rstrip()))
                piece = ""
    return pieces


def load(*, gsm8k_train: Path, dolly_sample: Path, module_share: float) -> list[Document]:
    """All documents; `module_share` of the standard library's plain text is kept (by hash, deterministically)."""
    paths = standard_library()
    plain = modules(paths, chars=2500)
    plain = [d for d in plain if int.from_bytes(hashlib.md5(d.answer.encode()).digest()[:4]) / 2**32 < module_share]
    python = {d.render(): d for path in paths for d in functions(path)}
    return gsm8k(gsm8k_train) + dolly(dolly_sample) + list(python.values()) + plain
