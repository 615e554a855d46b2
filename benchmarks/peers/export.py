"""Checkpoints as OpenVINO models: float32, and with packed weights. Runs in OpenVINO's own environment.

python -m peers.export PAIR_FOLDER ...

int8 is nncf's default (a scale and a zero for each row). int4 and q4_1 are as near to GGUF's Q4_0 and Q4_1 as nncf comes:
groups of 32, a scale each, for q4_1 a zero too; embedding and output layer keep 8 bits, as in the GGUF files. q4_1 stands for
Q4_K too, and of that pair nothing else stays.
"""

import shutil
import sys
from pathlib import Path

from peers.plan import QWEN_CODER, SMOLLM2


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        forms = ("q4_1",) if folder.name in (SMOLLM2, QWEN_CODER) else ("int8", "int4")
        for role in ("target", "draft"):
            whole, packed = folder / f"{role}-ov-f32", {form: folder / f"{role}-ov-{form}" for form in forms}
            if folder.name == QWEN_CODER and all(map(_is_there, packed.values())):
                continue
            _export(folder / role, whole)
            for form, out in packed.items():
                _compress(whole, out, form)
            if folder.name == QWEN_CODER:
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


def _compress(model: Path, out: Path, form: str) -> None:
    if _is_there(out):
        return
    import nncf  # pyright: ignore[reportMissingImports]
    import openvino  # pyright: ignore[reportMissingImports]

    modes = nncf.CompressWeightsMode
    options = {
        "int8": {},
        "int4": {"mode": modes.INT4_SYM, "group_size": 32, "ratio": 1.0},
        "q4_1": {"mode": modes.INT4_ASYM, "group_size": 32, "ratio": 1.0},
    }[form]
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("openvino_model.*"), dirs_exist_ok=True)
    compressed = nncf.compress_weights(openvino.Core().read_model(model / "openvino_model.xml"), **options)
    openvino.save_model(compressed, out / "openvino_model.xml")


if __name__ == "__main__":
    main()
