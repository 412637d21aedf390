"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer that drafts from several depths of the target at once.

The target's hidden states at three places are projected to one feature. Fed the feature of position t and token t + 1,
the layer computes

    x = attention([norm(embedding of the token), norm(feature)]) + feature      made = mlp(norm(x)) + x

and `made`, the feature of t + 1, is fed back for the next draft, without a projection. Its logits are those of a norm
and an output matrix of its own, over a vocabulary that may be smaller than the target's: `d2t` has for each of its
tokens the distance to the target's id. Further layers are usual ones. In EAGLE-3.1 each place has a norm before the
projection (`fc_norm`) and the normed feature is fed back (`norm_output`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from engine.attention import Attend
from engine.attention.registry import ATTENTION_NAME, Ragged, register_hook
from engine.errors import ModelError
from engine.kv.arena import KVArena
from engine.kv.batch import Feed, RaggedBatch
from engine.model.checkpoint import shape_of
from engine.model.fallback import kv_layout
from engine.model.linear.rows import matmul_shape
from engine.model.tap import FINAL
from engine.proposers.heads.base import Head, HeadContext
from engine.proposers.heads.fused import FusedLayers, FusedProjection, logits_in_c, norm_in_c, type_of
from engine.proposers.heads.proposer import HeadProposer
from engine.proposers.heads.speculators import KIND, flattened
from engine.proposers.heads.weights import fill, target_ids, widened

_MARK = "hidden_norm.weight"  # the norm that an EAGLE-1 head does not have
_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
)
_LLAMA_LIKE = frozenset({"llama", "phi3", "eagle3", "eagle"})  # of configs whose tensors are those of Llama's layer
_OF_LAYERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
# Fields, of the config or of its `eagle_config`, that would change what is computed, and the values that do not.
_UNCHANGED: Mapping[str, tuple[object, ...]] = {
    "quantization_config": (), "parallel_drafting": (False,), "mask_token_id": (), "ptd_token_id": (), "pard_token": (),
    "parallel_draft_step": (0, 1), "parallel_draft_heads_num_layers": (0,), "use_mtp_layernorm": (False,),
    "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,), "is_causal": (True,),
    "partial_rotary_factor": (1, 1.0), "logit_scale": (1, 1.0), "kv_lora_rank": (), "use_qk_norm": (False,),
}  # fmt: skip
_TRAINING = ("verifier_lm_head.", "verifier_norm.", "t2d")  # copies of the target's parts; the inverse of `d2t`


def is_eagle3(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint is an EAGLE-3 head, and none of EAGLE-1."""
    named = [str(name) for name in config.get("architectures") or ()]
    kinds = config.get(KIND) in ("eagle3", "peagle") or any("eagle3" in name.lower() for name in named)
    return kinds or "d2t" in tensors or any(key.endswith(_MARK) for key in tensors)


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """What EAGLE-3 heads differ in, beside the sizes of their layers."""

    layers: int
    windows: tuple[int | None, ...]  # of each layer: to how many positions it attends
    places: tuple[int, ...]  # of the target that are projected to one feature; `FINAL` alone is taken as it is
    place_norms: bool  # a norm for each place (`fc_norm`)
    joint_norm: bool  # one norm for all places together (`norm_before_fc`)
    norm_before_residual: bool  # the first layer adds to the normed feature
    norm_output: bool  # the normed feature is fed back

    @property
    def reads_output(self) -> bool:
        """Whether it reads the target's last hidden state as it is, and has no projection."""
        return self.places == (FINAL,)

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str, depth: int) -> Eagle3Options:
        """The options of a flat config (`speculators.flattened`); `depth`: number of the target's layers.

        Raises:
            ModelError: a variant that is not served.
        """
        inner = config.get("eagle_config") or {}
        if not isinstance(inner, Mapping):
            raise ModelError(f"{name!r}: eagle_config is {inner!r}; expected an object")
        both = {**config, **inner}
        _check_variant(both, name)
        layers = both.get("num_hidden_layers", 1)
        kinds, window = both.get("layer_types") or (), both.get("sliding_window")
        windows = [window if kind == "sliding_attention" else None for kind in kinds[:layers]] or [None] * layers
        if KIND in config and "norm_before_residual" not in config:
            raise ModelError(f"{name!r}: config.json does not say norm_before_residual, which has no one default")
        place_norms, joint_norm = (
            bool(both.get("fc_norm") or both.get("use_aux_norm")),
            bool(both.get("norm_before_fc")),
        )
        if place_norms and joint_norm:
            raise ModelError(f"{name!r}: fc_norm and norm_before_fc are both true; one of them is expected")
        reads_layers = both.get("use_aux_hidden_state", True)
        return cls(
            layers,
            tuple(windows),
            _places(config, inner, name, depth) if reads_layers else (FINAL,),
            place_norms,
            joint_norm,
            bool(both.get("norm_before_residual")),
            bool(both.get("norm_output")),
        )


def _check_variant(config: Mapping[str, Any], name: str) -> None:
    kinds = config.get("architectures") or ()
    if not _ARCHITECTURES.issuperset(kinds):
        raise ModelError(f"{name!r}: architectures are {kinds}; of EAGLE-3 those with Llama's layer are served")
    if config.get("model_type", "llama") not in _LLAMA_LIKE:
        raise ModelError(f"{name!r}: model_type is {config['model_type']!r}; of EAGLE-3 Llama's layer is served")
    for key, unchanged in _UNCHANGED.items():
        if config.get(key) is not None and config[key] not in unchanged:
            raise ModelError(f"{name!r}: {key} is {config[key]!r}; EAGLE-3 heads with it are not served")


def _places(config: Mapping[str, Any], inner: Mapping[str, Any], name: str, depth: int) -> tuple[int, ...]:
    """Where the target is read; the paper's places are before layers 2, depth / 2 and depth - 3.

    Where a config names layers, these are layers whose input is read, as in vLLM and speculators. In `eagle_config` a
    list that begins with 1 names layers whose output is read, as in SpecForge and NVIDIA's heads: SGLang tells them
    apart in this way. So does a list elsewhere that has the paper's places as outputs: it was copied from there.
    """
    paper, key = (2, depth // 2, depth - 3), "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or inner.get(key)
    if not ids:
        if paper[2] < 0:
            raise ModelError(f"{name!r} reads layers 2, {paper[1]} and {paper[2]} of the target, which has {depth}")
        return paper
    outputs = tuple(one + 1 for one in ids)
    are_outputs = outputs == paper if config.get(key) else ids[0] == 1
    places = outputs if are_outputs else tuple(ids)
    if not 0 <= min(places) <= max(places) <= depth:
        raise ModelError(f"{name!r}: {key} are {ids}; the target has {depth} layers")
    return places


class Eagle3Layer(nn.Module):
    """A layer of the head with the published names; the first reads the token's embedding beside its feature."""

    def __init__(self, config: LlamaConfig, index: int, window: int | None, keys: Seq[str]) -> None:
        super().__init__()
        hidden, mark = config.hidden_size, f"layers.{index}."
        self.window, self.norm_before_residual = window, False
        self.self_attn = LlamaAttention(config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (LlamaRMSNorm(hidden, config.rms_norm_eps) for _ in "12")
        if index == 0:
            self.hidden_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
            for name in ("q_proj", "k_proj", "v_proj"):
                out = getattr(self.self_attn, name).out_features
                setattr(self.self_attn, name, nn.Linear(2 * hidden, out))
        for name, matmul in self.named_modules():
            if isinstance(matmul, nn.Linear):
                own = nn.Parameter(torch.zeros(matmul.out_features)) if f"{mark}{name}.bias" in keys else None
                matmul.register_parameter("bias", own)

    def forward(
        self, hidden: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged, *, is_first: bool
    ) -> Tensor:
        """Features and embeddings, `[T, hidden]` each, the latter for the first layer alone -> `[T, hidden]`."""
        normed = self.hidden_norm(hidden) if is_first else self.input_layernorm(hidden)
        residual = normed if is_first and self.norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embedded), normed], -1) if is_first else normed
        mixed = self.self_attn(x[None], position_embeddings=rotary, ragged=ragged, sliding_window=self.window)[0][0]
        middle = residual + mixed
        return cast("Tensor", middle + self.mlp(self.post_attention_layernorm(middle)))


class Eagle3Head(nn.Module):
    """Keys as published, `midlayer` being `layers.0`; embedding and output matrix may be the target's."""

    def __init__(self, config: LlamaConfig, options: Eagle3Options, keys: Seq[str], target: tuple[int, int]) -> None:
        super().__init__()
        hidden, eps, (width, vocab), places = config.hidden_size, config.rms_norm_eps, target, len(options.places)
        self.config, self.options = config, options
        self.layers = nn.ModuleList(Eagle3Layer(config, i, w, keys) for i, w in enumerate(options.windows))
        cast("Eagle3Layer", self.layers[0]).norm_before_residual = options.norm_before_residual
        self.norm = LlamaRMSNorm(hidden, eps)
        if not options.reads_output:
            self.fc = nn.Linear(places * width, hidden, bias="fc.bias" in keys)
            if options.place_norms:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps) for _ in options.places)
            elif options.joint_norm:
                self.input_norm = LlamaRMSNorm(places * width, eps)
        if "embed_tokens.weight" in keys:
            self.embed_tokens = nn.Embedding(vocab, hidden)
        if "lm_head.weight" in keys:
            self.lm_head = nn.Linear(hidden, getattr(config, "draft_vocab_size", None) or vocab, bias=False)
        self.rotary = [LlamaRotaryEmbedding(config)]  # in a list: not a part of us

    @property
    def norms(self) -> list[LlamaRMSNorm]:
        """Those before the projection: one for each place, or one for all, or none."""
        return [*self.fc_norm] if self.options.place_norms else [self.input_norm] if self.options.joint_norm else []

    def project(self, features: Tensor) -> Tensor:
        """`[n, places * width]` of the target -> `[n, hidden]`."""
        if self.options.reads_output:
            return features
        if self.norms:
            chunks = features.chunk(len(self.norms), -1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.norms, chunks, strict=True)], -1)
        return cast("Tensor", self.fc(features))

    def forward(self, batch: RaggedBatch, hidden: Tensor, embedded: Tensor, ragged: Ragged) -> Tensor:
        """Features `[T, hidden]` of t, embeddings of the tokens of t + 1 -> features of t + 1, not normed."""
        rotary = self.rotary[0].to(hidden.device)(hidden, batch.positions[None])
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, embedded, rotary, ragged, is_first=i == 0)
        return hidden


def load_eagle3(name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: PreTrainedModel) -> Head:
    """A head of a checkpoint that is read already, on the target's device in the type of `type_of`.

    Raises:
        ModelError: it is of a variant that is not served, or does not fit this target.
    """
    flat = flattened(config, name, "eagle3")
    options = Eagle3Options.of(flat, name, shape_of(target.config, "num_hidden_layers"))
    named = {_key(key): tensor for key, tensor in tensors.items()}
    named = {k: t for k, t in named.items() if not k.startswith(_TRAINING) and not k.endswith("rotary_emb.inv_freq")}
    offsets = named.pop("d2t", None)
    if flat.get("tie_word_embeddings") and "embed_tokens.weight" in named:
        named.setdefault("lm_head.weight", named["embed_tokens.weight"])
    size = matmul_shape(target.get_output_embeddings())
    if size is None:
        raise ModelError(f"{type(target).__name__}: its output is no matrix that says how many tokens there are")
    settings = _settings(flat, options, name, size, named)
    head = Eagle3Head(settings, options, list(named), size)
    fill(head, named, name)
    tokens = _target_ids(offsets, named, name, size[1])
    dtype = type_of(settings, target)
    head.to(target.device, dtype).eval()
    layout = kv_layout(settings, dtype)

    def proposer(context: HeadContext) -> HeadProposer:
        assert context.arena is not None, "it has a layout"
        chain = Eagle3Runner(head, tokens, target, context.arena, context.attend)
        return HeadProposer(chain, context.tap, options.places, context.prefill)

    return Head(options.places, layout, proposer)


def _key(key: str) -> str:
    """The name of a tensor as EAGLE's authors have it, with numbered layers."""
    key = key.removeprefix("module.").removeprefix("model.")
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key


def _settings(
    config: Mapping[str, Any], options: Eagle3Options, name: str, target: tuple[int, int], tensors: Mapping[str, Tensor]
) -> LlamaConfig:
    """The config of the layers as a Llama's, which attends through us."""
    asked = {key: config[key] for key in _OF_LAYERS if config.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        rope = asked.get(key) or {}
        if "mrope" in (rope.get("rope_type"), rope.get("type")):  # of text, all sections have the same position
            asked[key] = {k: v for k, v in rope.items() if k == "rope_theta"} | {"rope_type": "default"}
    try:
        settings = LlamaConfig(**asked, num_hidden_layers=options.layers, pad_token_id=None)
        LlamaRotaryEmbedding(settings)  # knows its kind of positions
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"cannot load {name!r}: its config is not like a Llama's: {error!r}") from error
    width, hidden = config.get("target_hidden_size") or settings.hidden_size, settings.hidden_size
    found, want = f"{width} features and {settings.vocab_size} tokens", f"{target[0]} and {target[1]}"
    shares = not {"embed_tokens.weight", "lm_head.weight"} <= tensors.keys() or options.reads_output
    if (width, settings.vocab_size) != target:
        raise ModelError(f"{name!r} is a head for {found}; the target has {want}")
    if shares and hidden != target[0]:
        raise ModelError(
            f"{name!r} is {hidden} wide, and embed_tokens or lm_head is missing: the target's are {target[0]} wide"
        )
    settings.draft_vocab_size = config.get("draft_vocab_size") or settings.vocab_size
    register_hook()
    settings._attn_implementation = ATTENTION_NAME  # noqa: SLF001 - a config that is not loaded has no other way
    return settings


def _target_ids(offsets: Tensor | None, tensors: Mapping[str, Tensor], name: str, vocab: int) -> Tensor | None:
    """The target's ids of the head's tokens, int64 `[draft vocab]`; None where they are the same."""
    size = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else vocab
    if offsets is None:
        if size != vocab:
            raise ModelError(
                f"{name!r} drafts {size} of the target's {vocab} tokens, and d2t, which says which, is missing"
            )
        return None
    ids = target_ids(offsets, size, vocab)
    if ids is None:
        raise ModelError(f"{name!r}: d2t is no map from the head's {size} tokens to the target's {vocab}")
    return None if torch.equal(ids, torch.arange(vocab)) else ids


class Eagle3Runner:
    """The head over an arena of its own; in C where that can run its layers."""

    def __init__(
        self, head: Eagle3Head, tokens: Tensor | None, target: PreTrainedModel, arena: KVArena, attend: Attend
    ) -> None:
        self.arena, self._head, self._attend = arena, head, attend
        self._device, self._dtype = arena.k[0].device, head.norm.weight.dtype
        self._tokens = None if tokens is None else tokens.to(self._device)
        self._embedding: nn.Module = getattr(head, "embed_tokens", None) or target.get_input_embeddings()
        self._fused = FusedLayers.of(list(head.layers), head.config, head.rotary[0], arena, attend)
        own: nn.Linear | None = getattr(head, "lm_head", None)
        self._norm: Callable[[Tensor], Tensor] = head.norm
        self._output: Callable[[Tensor], Tensor] = own or target.get_output_embeddings()
        self._output_dtype = target.dtype if own is None else self._dtype
        self._fc: FusedProjection | None = None
        if self._fused is not None:  # from here on packed copies are enough
            self._norm, head.layers = norm_in_c(head.norm, self._dtype), nn.ModuleList()
            self._fc = None if head.options.reads_output else FusedProjection.of(head.fc, head.norms)
            if own is not None:
                self._output = logits_in_c(own)
                del head.lm_head

    def project(self, features: Tensor) -> Tensor:
        """The target's features `[n, places * width]` as one feature each, `[n, hidden]`."""
        return self._head.project(features.to(self._dtype)) if self._fc is None else self._fc(features)

    def forward(self, feeds: Seq[Feed], features: Tensor) -> Tensor:
        """One pass, `features` `[T, hidden]` beside the tokens of `feeds`; new ones `[R, hidden]` at the last rows."""
        batch = RaggedBatch.of(feeds, self.arena.page_size, self._device)
        # Heads are trained with the table as it is stored, also where the target's own module scales what it finds.
        table = self._embedding.weight if isinstance(self._embedding, nn.Embedding) else None
        ids = batch.input_ids
        embedded = (self._embedding(ids) if table is None else F.embedding(ids, table)).to(self._dtype)
        if self._fused is None:
            made = self._head(batch, features, embedded, Ragged(batch, self.arena, self._attend))
        else:
            made = self._fused.run(batch, features.clone(), embedded)
        if len(batch.logit_rows) < len(made):
            made = made[batch.logit_rows]
        return self._norm(made) if self._head.options.norm_output else made

    def logits(self, features: Tensor) -> Tensor:
        """float32 `[R, target's vocab]` of features that `forward` made; -inf for tokens that it never drafts."""
        normed = features if self._head.options.norm_output else self._norm(features)
        logits = self._output(normed.to(self._output_dtype)).float()
        if self._tokens is None:
            return logits
        return widened(logits, self._tokens, self._head.config.vocab_size)
