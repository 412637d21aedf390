"""What lies in a local folder or on the hub, and in plain words what is wrong with it. Loads no weights itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.attention.registry import ATTENTION_NAME
from engine.errors import ModelError

# What transformers and safetensors say of what they cannot load.
_FAULTS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
_LONGEST_COMPLAINT = 300  # characters; some of theirs list every class they know


def read_config(name: str, revision: str | None) -> PreTrainedConfig:
    """The config of a causal language model; none of the checkpoint's own code is run.

    Raises:
        ModelError: there is none, or it describes another kind of model.
    """
    with told_as_model_error(name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{name!r} is a {config.model_type} model, which is no causal language model")
    if config.is_encoder_decoder or getattr(config.get_text_config(), "add_cross_attention", False):
        raise ModelError(
            f"{name!r} is a {config.model_type} model with cross-attention: it waits for an encoder's output"
        )
    return config


def check_weights(name: str) -> None:
    """Refuse a folder whose weights are pickles only: reading one may run code of its maker's."""
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {pickles[0]}, which may run code when it is read" if pickles else "no weights"
        raise ModelError(f"model {name!r} has {found}; expected *.safetensors")


def check_complete(name: str, report: Mapping[str, Collection[Any]]) -> None:
    """Refuse a checkpoint that lacks weights: transformers would draw them at random. `report` is its own."""
    missing, mismatched = report["missing_keys"], sorted(report["mismatched_keys"])
    if missing:
        raise ModelError(f"model {name!r} lacks {len(missing)} of its weights, {min(missing)} among them")
    if mismatched:
        weight, has, wants = mismatched[0]
        raise ModelError(f"model {name!r}: {weight} is of shape {list(has)}; its config says {list(wants)}")


@contextmanager
def told_as_model_error(name: str) -> Iterator[None]:
    """Whatever goes wrong while `name` is read becomes a ModelError of one short line."""
    try:
        yield
    except _FAULTS as error:
        raise ModelError(f"cannot load model {name!r}: {_in_short(error)}") from error


def _in_short(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        return "its class attends in code of its own, which knows nothing of ragged batches"
    text = " ".join((str(error) or repr(error)).split())
    return text if len(text) <= _LONGEST_COMPLAINT else text[:_LONGEST_COMPLAINT] + "…"
