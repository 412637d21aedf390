"""A model from weights that are floats or codes. Knows modules; knows no format of codes.

transformers loads the floats, so names, stacked experts and shared weights are as of a float checkpoint. Codes that
stay pass through it as stand-ins, which take no memory; afterwards each module with a stand-in is replaced.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from engine.attention.registry import ATTENTION_NAME
from engine.errors import ModelError
from engine.model.checkpoint import check_complete, check_size, read_config, read_end_tokens, told_as_model_error
from engine.model.linear.activations import make_row_wise
from engine.model.linear.packed import is_matmul
from engine.model.linear.unstack import StackedForm, recognised, routed
from engine.model.published.base import Codes
from engine.model.published.methods import Quantisation, read_weights, without_quantisation
from engine.model.published.stacked import StackedCodes
from engine.model.runner import prepare
from engine.model.text_part import names_in_whole, rest_untold

log = logging.getLogger(__name__)

_STACKS = 2  # of a module of experts


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a model a weight of codes belongs."""

    codes: Codes
    module: nn.Module | None  # whose parameter it is, on the meta device; None where it becomes part of a larger one
    kind: str = "weight"  # of the parameter
    form: StackedForm | None = None  # of a module of experts

    @property
    def keeps(self) -> bool:
        """Whether a module of codes can take the place; of experts, if that of the other stack can too."""
        has_form = self.codes.num_bytes() is not None
        is_table = isinstance(self.module, nn.Embedding) and hasattr(self.codes, "embedding")
        is_stack = self.form is not None and isinstance(self.codes, StackedCodes)
        return has_form and (is_matmul(self.module) or is_table or is_stack)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the float weight as the module has it: `Conv1D` has `[in, out]`."""
        shape = tuple(self.codes.shape)
        return shape[::-1] if isinstance(self.module, Conv1D) else shape

    def check(self, key: str) -> None:
        """Raise ModelError where the codes are of another shape than the weight."""
        wants = self.shape if self.module is None else tuple(self.module.get_parameter(self.kind).shape)
        if self.shape != wants:
            raise ModelError(f"{key} is of shape {list(self.shape)}; its config says {list(wants)}")


class _Later:
    """A weight that is dequantised when transformers takes it."""

    def __init__(self, place: _Place, dtype: torch.dtype) -> None:
        self._place, self._dtype = place, dtype

    def __getitem__(self, _: Any) -> Tensor:
        made = self._place.codes.dequantised().to(self._dtype)
        return made.t().contiguous() if isinstance(self._place.module, Conv1D) else made


def load_published(
    name: str,
    revision: str | None,
    quantisation: Quantisation,
    dtype: torch.dtype,
    device: torch.device,
    *,
    keeps_codes: bool,
) -> PreTrainedModel:
    """Load a quantised checkpoint: its codes on our integer kernels where they fit (on a CPU), or all in `dtype`.

    Raises:
        ModelError: it cannot be loaded, or a tensor is missing, or of another shape or type.
    """
    with told_as_model_error(name):
        weights = read_weights(name, revision, quantisation)
        config = without_quantisation(read_config(name, revision, of_transformers=True))
        model = fill(config, weights, name, dtype, keeps_codes=keeps_codes)
    model.generation_config.eos_token_id = read_end_tokens(name, revision) or model.generation_config.eos_token_id
    placed: Any = model
    return cast("PreTrainedModel", placed.to(device))


def fill(
    config: PreTrainedConfig,
    weights: Mapping[str, Tensor | Codes],
    name: str,
    dtype: torch.dtype,
    *,
    keeps_codes: bool,
) -> PreTrainedModel:
    """Build a model with our attention from weights by their names in a float checkpoint.

    Args:
        config: of the model, without any quantisation.
        weights: floats, and codes.
        name: of the checkpoint, for messages.
        dtype: of the floats, and of codes that are dequantised.
        keeps_codes: whether matmuls keep codes that have a form for our kernels.

    Raises:
        ModelError: weights are missing or of another shape.
    """
    transformers_logging.disable_progress_bar()  # it would write into the log of a server
    prepare(config)
    bare = _on_meta(config, dtype)
    check_size(name, bare, sum(math.prod(weight.shape) for weight in weights.values()))
    forms = dict(recognised(bare))
    places = _places(bare, weights, forms)
    kept = _kept(places) if keeps_codes else {}
    stand_ins = {key: torch.empty(1, dtype=dtype) for key in kept}
    given: dict[str, Any] = dict(weights)
    given |= {key: _Later(place, dtype) for key, place in places.items() if key not in kept}
    given |= {key: stand_in.expand(places[key].shape) for key, stand_in in stand_ins.items()}
    with rest_untold(config):
        loaded: Any = type(bare).from_pretrained(
            None,
            config=config,
            state_dict=given,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_complete` reports them in a clearer message
            key_mapping=names_in_whole(config),
        )
    model, report = loaded
    check_complete(name, report)
    _replace(model, {stand_ins[key].data_ptr(): codes for key, codes in kept.items()}, forms, dtype)
    if kept:
        make_row_wise(model)  # rounding to int8 would enlarge a difference in the last bit
    _tell(name, places, kept, dtype)
    return cast("PreTrainedModel", model.eval())


def num_bytes(model: PreTrainedModel, weights: Mapping[str, Tensor | Codes], *, keeps_codes: bool) -> int:
    """Bytes of the codes that matmuls of `model` keep, which are taken out of it; both are on the meta device.

    Raises:
        ModelError: codes are of another shape than the weight.
    """
    total, places = 0, _places(model, weights, dict(recognised(model)))
    names = {id(module): name for name, module in model.named_modules()}
    for key, codes in _kept(places).items() if keeps_codes else ():
        total += codes.num_bytes() or 0
        model.set_submodule(names[id(places[key].module)], nn.Identity())
    return total


def _kept(places: Mapping[str, _Place]) -> dict[str, Codes]:
    """The weights that keep their codes, by key. A module of experts keeps both of its stacks, or none."""
    keeping = {key: place for key, place in places.items() if place.keeps}
    stacks = Counter(id(place.module) for place in keeping.values() if place.form is not None)
    return {
        key: place.codes for key, place in keeping.items() if place.form is None or stacks[id(place.module)] == _STACKS
    }


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    return model


def _places(
    bare: PreTrainedModel, weights: Mapping[str, Tensor | Codes], forms: Mapping[str, StackedForm]
) -> dict[str, _Place]:
    """Where each weight of codes belongs, by the rules with which transformers renames and merges weights.

    `forms` are those of the modules of experts, by their names.
    """
    rules = get_model_conversion_mapping(bare, names_in_whole(bare.config))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    wanted, places = bare.state_dict(), {}
    for key, codes in weights.items():
        if isinstance(codes, Tensor):
            continue
        renamed, merged = rename_source_key(key, renamings, converters, bare.base_model_prefix, wanted)
        path, _, kind = renamed.rpartition(".")
        alone = merged is None and renamed in wanted and (kind == "weight" or path in forms)
        places[key] = _Place(codes, bare.get_submodule(path) if alone else None, kind, forms.get(path))
        places[key].check(key)
    return places


def _replace(
    model: PreTrainedModel, kept: Mapping[int, Codes], forms: Mapping[str, StackedForm], dtype: torch.dtype
) -> None:
    """Replace every module whose weight is a stand-in; `kept` has the codes by the addresses of the stand-ins."""
    head, done = model.get_output_embeddings(), set()
    for name, module in list(model.named_modules(remove_duplicate=False)):
        found = {
            kind: at for kind, weight in module.named_parameters(recurse=False) if (at := weight.data_ptr()) in kept
        }
        if not found:
            continue
        done |= set(found.values())
        codes = {kind: kept[at] for kind, at in found.items()}
        if name in forms:
            made: Any = _experts(module, forms[name], codes)
        elif isinstance(module, nn.Embedding):
            made = cast("Any", codes["weight"]).embedding(module, dtype)
        else:
            # Logits must be in float32: rounded to bfloat16, many would be equal.
            kind = torch.float32 if module is head else None
            made = codes["weight"].linear(cast("Tensor | None", module.bias), kind)
        model.set_submodule(name, made)
    assert len(done) == len(kept), "transformers copied a stand-in"


def _experts(module: nn.Module, form: StackedForm, codes: Mapping[str, Codes]) -> nn.Module:
    """Matmuls of codes in the place of a module of stacked experts."""
    biases = (getattr(module, f"{name}_bias", None) for name in form.names)
    stacks = (cast("StackedCodes", codes[name]) for name in form.names)
    ups, downs = (stack.linears(several) for stack, several in zip(stacks, biases, strict=True))
    return routed(module, form, ups, downs)


def _tell(name: str, places: Mapping[str, _Place], kept: Mapping[str, Codes], dtype: torch.dtype) -> None:
    plain = [key for key in places if key not in kept]
    kind = str(dtype).removeprefix("torch.")
    floats = f"; {len(plain)} are dequantised to {kind} ({plain[0]} ...)" if plain else ""
    log.info("%r: %d quantised weights, %d keep their codes%s", name, len(places), len(kept), floats)
