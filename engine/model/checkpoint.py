"""Reads and validates configs of checkpoints in a local folder or on the hub. Loads no weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from pilotfish.engine.attention.registry import ATTENTION_NAME
from pilotfish.engine.errors import ModelError, PilotfishError
from pilotfish.engine.model.bounded import check_folder, find_file
from pilotfish.engine.model.decoder.families.described import described_by
from pilotfish.engine.model.gguf.container import gguf_file, open_gguf
from pilotfish.engine.model.gguf.families import config_of
from pilotfish.engine.model.gguf.tokenizer import chat_template_in
from pilotfish.engine.model.text_part import text_part

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_LENGTH = 8  # bytes of a safetensors file that contain the length of its header
_ABOUT = "__metadata__"  # the only entry of a header that is not a tensor
_MOST_HEADER = 1 << 24  # bytes of the header of a safetensors file: 100,000 tensors
_LARGEST = (1 << 31) - 1
# Config fields with the minimum and maximum of integers; a model may have no experts.
_WHOLE = (
    dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, 512))
    | dict.fromkeys(("max_position_embeddings", "max_seq_len"), (2, _LARGEST))
    | dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"), (1, _LARGEST))
    | dict.fromkeys(("vocab_size", "n_embd", "n_head", "d_model"), (1, _LARGEST))
    | dict.fromkeys(("intermediate_size", "moe_intermediate_size", "num_experts_per_tok"), (0, _LARGEST))
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, _LARGEST))
)
_POSITIVE = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon", "rope_theta", "factor")
_OTHER_PARTS = ("vision", "audio")  # of multimodal models, not loaded
_LIMITS = ("max_position_embeddings", "max_seq_len")  # fields of configs, MPT's among them
_UNBOUNDED = 1 << 17  # positions of a model whose config has no limit, for example without attention


def read_config(name: str, revision: str | None, *, of_transformers: bool = False) -> PreTrainedConfig:
    """Read the config of a causal language model, without running the checkpoint's own code.

    For a multimodal model, the config of its language model. That of a well-known family is read without transformers
    (`families/described.py`) and has the same fields; with `of_transformers` it is always transformers'.

    Raises:
        ModelError: the config is missing, or describes another kind of model.
    """
    gguf = open_gguf(name, revision)
    if gguf is not None:
        with as_model_error(name):
            return config_of(gguf, of_transformers=of_transformers)
    refuse_missing_folder(name)
    check_folder(Path(name))
    with as_model_error(name):
        own = None if of_transformers else _described(name, revision)
        if own is not None:
            return own
        from transformers import AutoConfig, PreTrainedConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        _check_numbers(name, PreTrainedConfig.get_config_dict(name, revision=revision)[0])
        whole = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        config = text_part(whole)
    if whole.model_type.endswith("_assistant"):
        raise ModelError(f"{name!r} is a {whole.model_type} model, which reads the K/V of another model: not supported")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{name!r} is a {config.model_type} model; expected a causal language model")
    if config.is_encoder_decoder or getattr(config.get_text_config(), "add_cross_attention", False):
        raise ModelError(
            f"{name!r} is a {config.model_type} model with cross-attention; encoder-decoder models are not supported"
        )
    return config


def refuse_missing_folder(name: str) -> None:
    """Refuse the name of a missing folder, which cannot be a hub id."""
    if not Path(name).is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ModelError(f"cannot load model {name!r}: no such folder")


def _described(name: str, revision: str | None) -> PreTrainedConfig | None:
    """The config of a family that is read without transformers; None for others, or if it is missing."""
    try:
        path = find_file(name, "config.json", revision)
        table = None if path is None else json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError, ModelError):  # transformers reports the error
        return None
    if not isinstance(table, dict):
        return None
    _check_numbers(name, table)
    found: Any = described_by(table)
    return cast("PreTrainedConfig | None", found)


def _check_numbers(name: str, table: Mapping[str, Any]) -> None:
    """Refuse a config with impossible numbers, at any depth, before transformers computes with them."""
    for key, value in table.items():
        if isinstance(value, dict) and not key.startswith(_OTHER_PARTS):
            _check_numbers(name, value)
        if isinstance(value, int) and key in _WHOLE and not _WHOLE[key][0] <= value <= _WHOLE[key][1]:
            low, high = _WHOLE[key]
            raise ModelError(f"{name!r}: config field {key} is {value}; expected {low} to {high}")
        if isinstance(value, int | float) and key in _POSITIVE and not 0 < value < math.inf:
            raise ModelError(f"{name!r}: config field {key} is {value}; expected a positive number")


def read_end_tokens(name: str, revision: str | None) -> list[int] | None:
    """The end tokens of the generation config; None if it has none, or is missing."""
    try:
        path = find_file(name, "generation_config.json", revision)
        found = None if path is None else json.loads(path.read_text("utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    tokens = found if isinstance(found, list) else [found]
    whole = [token for token in tokens if isinstance(token, int)]
    return whole if len(whole) == len(tokens) else None


def named_type(config: PreTrainedConfig) -> torch.dtype | None:
    """The type of weights in a config, for the whole checkpoint or its text part; None if missing."""
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return found if isinstance(found, torch.dtype) else None


def end_tokens_of(config: PreTrainedConfig, generation: list[int] | int | None) -> frozenset[int]:
    """The end tokens of the model: those of its generation config, or else of its config."""
    found = generation
    if found is None:
        found = getattr(config.get_text_config(), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def has_chat_template(name: str, revision: str | None) -> bool:
    """Whether the checkpoint contains a chat template."""
    gguf = open_gguf(name, revision)
    if gguf is not None:
        return chat_template_in(gguf) is not None
    if find_file(name, "chat_template.jinja", revision) is not None:
        return True
    settings = find_file(name, "tokenizer_config.json", revision)
    return settings is not None and bool(json.loads(settings.read_text("utf-8")).get("chat_template"))


def longrope_border(config: PreTrainedConfig) -> int | None:
    """The longest sequence for which the first of two rotary tables is used (longrope), if each has its own; else None.

    Includes only families whose `generate` discards K/V of the short table at the border, so that the result depends
    only on the sequence's length. Others continue with K/V of both tables, and are served up to the border.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    border: int | None = rope.get("original_max_position_embeddings")
    if config.model_type != "phi3" or rope.get("rope_type") != "longrope" or border is None:
        return None
    # One of the two numbers selects the table and the other the time of recomputation, so they must be equal.
    return border if border == getattr(config, "original_max_position_embeddings", None) else None


@dataclass(frozen=True, slots=True)
class Positions:
    """The number of positions that a model supports in a ragged batch, and the config field that limits it."""

    limit: int
    reason: str


def positions(config: PreTrainedConfig) -> Positions:
    """Compute how many positions a model supports in a ragged batch.

    Two kinds of rotary embedding select one frequency table per pass by its largest position, so the longest sequence
    would affect all others in the batch. Up to their original training length they always select the same table. Beyond
    it we serve only models for which the decoder uses one table per sequence.
    """
    text, border = config.get_text_config(), longrope_border(config)
    whole = next((n for n in (getattr(text, name, None) for name in _LIMITS) if isinstance(n, int)), None)
    if whole is None:
        return Positions(_UNBOUNDED, "no limit in its config")
    if border is not None:
        return Positions(whole, f"max_position_embeddings; longrope, a second table beyond {border} tokens")
    found = Positions(whole, "max_position_embeddings")
    rope = getattr(text, "rope_parameters", None) or {}
    for table in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = table.get("rope_type")
        if kind in ("dynamic", "longrope"):
            original = table.get("original_max_position_embeddings")
            limit = int(original or getattr(text, "original_max_position_embeddings", None) or whole)
            reason = f"{kind} RoPE of {config.model_type}: beyond this, the table depends on the batch"
            found = min(found, Positions(limit, reason), key=lambda positions: positions.limit)
    return found


def shape_of(config: PreTrainedConfig, name: str) -> int:
    """Read a number of the config that every supported family has. Raises ModelError if it is missing."""
    value = getattr(config.get_text_config(), name, None)
    if not isinstance(value, int):
        raise ModelError(f"{config.model_type} config has no {name}")
    return value


def check_weights(name: str) -> None:
    """Refuse a folder with only pickled weights, because reading a pickle can run code of its author."""
    folder = Path(name)
    if folder.is_dir() and gguf_file(name) is None and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only pickled weights ({pickles[0]}), which can run code" if pickles else "no weights"
        raise ModelError(f"model {name!r} has {found}; expected *.safetensors")


def check_size(name: str, model: PreTrainedModel, stored: int) -> None:
    """Refuse a model that is much larger than its files before it is built: transformers would initialise the rest.

    `model` is on the meta device; `stored`: number of elements in the files. `check_complete` reports missing weights.
    """
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > 2 * stored:
        raise ModelError(f"model {name!r} has {stored} parameters; its config describes {wanted}")


def check_whole(path: Path) -> int:
    """Refuse a truncated file, for example of an interrupted copy; return its number of elements."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = _LENGTH + int.from_bytes(file.read(_LENGTH), "little")
        if start > size:
            raise ModelError(f"{path} is truncated: its header ends at byte {start}, the file at {size}")
        if start > _MOST_HEADER:
            raise ModelError(f"{path}: its header has {start} bytes; expected at most {_MOST_HEADER}")
        try:
            tensors: dict[str, Any] = json.loads(file.read(start - _LENGTH))
            tensors.pop(_ABOUT, None)
            ends = sorted((start + entry["data_offsets"][1], key) for key, entry in tensors.items())
            numbers: int = sum(math.prod(entry["shape"]) for entry in tensors.values())
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path} is not a valid safetensors file: {error!r}") from error
    for end, key in ends:
        if end > size:
            raise ModelError(f"{path} is truncated: {key} ends at byte {end}, the file at {size}")
    return numbers


def weights_size(name: str, revision: str | None) -> int:
    """Bytes of a checkpoint's weight files on this machine."""
    gguf = open_gguf(name, revision)
    if gguf is not None:
        return sum(path.stat().st_size for path in gguf.paths)
    found = find_file(name, "config.json", revision)
    return 0 if found is None else sum(path.stat().st_size for path in found.parent.glob("*.safetensors"))


def check_complete(name: str, report: Mapping[str, Collection[Any]]) -> None:
    """Refuse a checkpoint with missing weights, for which transformers would use random numbers.

    `report` is the loading report of transformers.
    """
    missing, mismatched = report["missing_keys"], sorted(report["mismatched_keys"])
    if missing:
        raise ModelError(f"model {name!r} is missing {len(missing)} weights, including {min(missing)}")
    if mismatched:
        weight, has, wants = mismatched[0]
        raise ModelError(f"model {name!r}: {weight} has shape {list(has)}; expected {list(wants)} from its config")


@contextmanager
def as_model_error(name: str) -> Iterator[None]:
    """Turn any error while `name` is read into a ModelError.

    Any error, because transformers validates few config fields: an invalid one can cause a ZeroDivisionError or
    IndexError.
    """
    try:
        yield
    except PilotfishError:
        raise
    except Exception as error:
        raise ModelError(f"cannot load model {name!r}: {_short(error)}") from error


def _short(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        return "its class does not use the attention interface, which ragged batches require"
    is_of_python = isinstance(error, ArithmeticError | AssertionError | IndexError)  # whose message is not informative
    return repr(error) if is_of_python else str(error) or repr(error)
