"""Random adapters in the format of peft, written here without peft, and models that they are merged into."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# By adapter: rank, alpha, target modules. Each kind of matmul of a Llama model is in one, alone and beside others.
ADAPTERS: dict[str, tuple[int, float, list[str]]] = {
    "all": (4, 8.0, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "qv": (1, 2.0, ["q_proj", "v_proj"]),
    "k": (8, 8.0, ["k_proj"]),
    "o": (3, 6.0, ["o_proj"]),
    "gate": (16, 16.0, ["gate_proj"]),
    "up-down": (5, 5.0, ["up_proj", "down_proj"]),
    "down": (17, 17.0, ["down_proj"]),
    "head": (2, 4.0, ["lm_head", "q_proj"]),
}


def write(folder: Path, model: PreTrainedModel, rank: int, alpha: float, targets: Seq[str], **config: Any) -> Path:
    """Write an adapter of all matmuls of `model` whose last name is in `targets`; `config` are more fields of it."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets:
            own = _own_rank(config, path, rank)
            outputs, inputs = _matrix(module).shape
            named = f"base_model.model.{path}"
            tensors[f"{named}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) * 0.2
            tensors[f"{named}.lora_B.weight"] = torch.randn(outputs, own, generator=generator) * 0.2
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config), "utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _own_rank(config: dict[str, Any], path: str, rank: int) -> int:
    return next((own for name, own in config.get("rank_pattern", {}).items() if path.endswith(name)), rank)


def _matrix(module: torch.nn.Module) -> Tensor:
    """`[out, in]`."""
    return module.weight.t() if isinstance(module, Conv1D) else module.weight


def write_all(root: Path, model: PreTrainedModel) -> dict[str, str]:
    """Write `ADAPTERS`; what the option `adapter` takes."""
    return {name: str(write(root / name, model, *kind)) for name, kind in ADAPTERS.items()}


@torch.no_grad()
def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A copy of a transformers model, with W + scale * B A in place of each W: by hand, as the paper has it."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    tensors, twin = load_file(folder / "adapter_model.safetensors"), copy.deepcopy(model)
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        path, b = key[len("base_model.model.") : -len(".lora_A.weight")], tensors[key.replace("lora_A", "lora_B")]
        alpha = config.get("alpha_pattern", {}).get(path.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        matmul = twin.get_submodule(path)
        change = (scale * b @ a).to(matmul.weight.dtype)
        if matmul is twin.get_output_embeddings():  # its weight may be the embedding's, which stays
            matmul.weight = torch.nn.Parameter(matmul.weight + change)
        else:
            matmul.weight += change.t() if isinstance(matmul, Conv1D) else change
    return twin
