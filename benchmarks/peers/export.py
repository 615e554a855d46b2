"""Checkpoints as OpenVINO models with packed weights. Runs in OpenVINO's own environment.

python -m peers.export PAIR_FOLDER ...

q4_1 is as near to GGUF's Q4_1 as nncf comes: groups of 32 with a scale and a zero each; embedding and output layer keep 8
bits, as in the GGUF files. It stands for Q4_K too. The whole models are removed.
"""

import shutil
import sys
from pathlib import Path


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        for role in ("target", "draft"):
            whole, packed = folder / f"{role}-ov-f32", folder / f"{role}-ov-q4_1"
            if not _is_there(packed):
                _export(folder / role, whole)
                _compress(whole, packed)
                shutil.rmtree(whole)


def _is_there(model: Path) -> bool:
    return (model / "openvino_model.xml").exists()


def _export(checkpoint: Path, out: Path) -> None:
    if _is_there(out):
        return
    from optimum.exporters.openvino import main_export  # pyright: ignore[reportMissingImports]
    from optimum.intel import OVConfig  # pyright: ignore[reportMissingImports]

    main_export(
        str(checkpoint),
        str(out),
        task="text-generation-with-past",
        stateful=True,
        convert_tokenizer=True,
        library_name="transformers",
        ov_config=OVConfig(),  # without one, models of a billion weights come in int8
    )


def _compress(model: Path, out: Path) -> None:
    import nncf  # pyright: ignore[reportMissingImports]
    import openvino  # pyright: ignore[reportMissingImports]

    options = {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 32, "ratio": 1.0}
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("openvino_model.*"), dirs_exist_ok=True)
    compressed = nncf.compress_weights(openvino.Core().read_model(model / "openvino_model.xml"), **options)
    openvino.save_model(compressed, out / "openvino_model.xml")


if __name__ == "__main__":
    main()
