"""Checkpoints as OpenVINO models: float32, and with 8-bit weights. Runs in OpenVINO's own environment.

python -m peers.export PAIR_FOLDER ...
"""

import sys
from pathlib import Path


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        for role in ("target", "draft"):
            _export(folder / role, folder / f"{role}-ov-f32")
            _compress(folder / f"{role}-ov-f32", folder / f"{role}-ov-int8")


def _export(checkpoint: Path, out: Path) -> None:
    if (out / "openvino_model.xml").exists():
        return
    from optimum.exporters.openvino import main_export  # pyright: ignore[reportMissingImports]

    main_export(
        str(checkpoint),
        str(out),
        task="text-generation-with-past",
        stateful=True,
        convert_tokenizer=True,
        library_name="transformers",
    )


def _compress(model: Path, out: Path) -> None:
    if (out / "openvino_model.xml").exists():
        return
    import shutil

    import nncf  # pyright: ignore[reportMissingImports]
    import openvino  # pyright: ignore[reportMissingImports]

    shutil.copytree(model, out, ignore=shutil.ignore_patterns("openvino_model.*"), dirs_exist_ok=True)
    compressed = nncf.compress_weights(openvino.Core().read_model(model / "openvino_model.xml"))
    openvino.save_model(compressed, out / "openvino_model.xml")


if __name__ == "__main__":
    main()
