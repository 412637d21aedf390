"""Loads a model of the table (`architecture.py`) from any checkpoint into a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, get_args

from engine import heap
from engine.choices import Rounded, Weights
from engine.errors import ModelError
from engine.model.checkpoint import end_tokens_of, read_end_tokens, told_as_model_error
from engine.model.decoder.architecture import Architecture
from engine.model.decoder.decoder import DecoderModel
from engine.model.decoder.share import Share, ShareOfWeights, share_of, sum_results
from engine.model.decoder.weights import CPU, WeightReader, check, converted_by, prepared
from engine.model.published.methods import read_weights
from engine.model.text_part import names_in_whole

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from engine.model.published.methods import Quantisation


def load_decoder(
    name: str,
    revision: str | None,
    config: PreTrainedConfig,
    architecture: Architecture,
    dtype: torch.dtype,
    weights: Weights = "native",
    quantisation: Quantisation | None = None,
    *,
    keeps_codes: bool = True,
    device: torch.device = CPU,
    packs: bool = True,
    share: Share | None = None,
) -> DecoderModel:
    """Load the checkpoint `name`, which `config` describes.

    Args:
        name: a folder, a GGUF file, or their name on the hub.
        revision: of the hub.
        config: of the checkpoint.
        architecture: what the config describes.
        dtype: of everything that is neither rounded nor codes.
        weights: how matrices of floats are held.
        quantisation: how others have quantised the checkpoint; None if they have not.
        keeps_codes: whether our kernels multiply its codes; else they are dequantised.
        device: where it is to run.
        packs: whether our C multiplies floats on a CPU.
        share: of the model, where it is not whole.

    Raises:
        ModelError: weights cannot be read, are missing or of another shape, or are not for this type.
    """
    converted = converted_by(weights, on_cuda=device.type == "cuda")
    if converted is not None and dtype not in converted.types:
        raise ModelError(f"{weights} weights are for models in bfloat16; dtype is {str(dtype).removeprefix('torch.')}")
    rounded = cast("Rounded", weights) if weights in get_args(Rounded) and converted is None else None
    names = (names_in_whole(config) or {}).items()
    with told_as_model_error(name):
        found = prepared(read_weights(name, revision, quantisation), architecture, names)
        check(name, architecture, found)
        if share is not None:
            found, architecture = ShareOfWeights(found, architecture, share), share_of(architecture, share.size)
        reader = WeightReader(
            found, dtype, rounded, keeps_codes=keeps_codes, device=device, packs=packs, converted=converted
        )
        made = DecoderModel(architecture, config, reader)
    if share is not None:
        sum_results(made, share)
    heap.give_back()  # what codes were on their way to panels
    ends = end_tokens_of(config, read_end_tokens(name, revision))
    config.eos_token_id = sorted(ends) or None
    return made.eval()
