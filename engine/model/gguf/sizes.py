"""Whether the numbers in a file's metadata are those of its tensors, before anything is built as large as they say.

Knows which numbers of the metadata a part of a layer shows; what a family does with them is said elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ModelError
from engine.model.gguf.container import StoredTensor
from engine.model.gguf.header import Numbers
from engine.model.gguf.keys import Keys
from engine.model.gguf.names import part_of

_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\..+", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Size:
    """A dimension of a part that the metadata tells."""

    axis: int  # 0 for outputs, or for experts of a stack; -1 for inputs
    keys: tuple[str, ...]
    told: Callable[[Keys], int]


def _expert_width(keys: Keys) -> int:
    own = "expert_feed_forward_length"
    return keys.size(own if keys.full(own) in keys.container.metadata else "feed_forward_length")


def _shared_width(keys: Keys) -> int:
    own = keys.integer("expert_shared_feed_forward_length", least=0)
    return keys.size("expert_shared_count") * _expert_width(keys) if own is None else own


def _mixed(keys: Keys) -> int:
    """Queries, keys and values of linear attention, which a convolution mixes."""
    return 2 * keys.size("ssm.group_count") * keys.size("ssm.state_size") + keys.size("ssm.inner_size")


_HEADS, _KV = ("attention.head_count", "attention.key_length"), "attention.head_count_kv"
_MIXED = ("ssm.group_count", "ssm.state_size", "ssm.inner_size")
_SIZES = (
    ("token_embd", _Size(-1, ("embedding_length",), lambda keys: keys.size("embedding_length"))),
    ("attn_output", _Size(-1, _HEADS, lambda keys: keys.heads * keys.head_dim)),
    ("attn_k", _Size(0, (_KV, "attention.key_length"), lambda keys: keys.kv_heads * keys.head_dim)),
    ("attn_v", _Size(0, (_KV, "attention.key_length"), lambda keys: keys.kv_heads * keys.head_dim)),
    ("ffn_down", _Size(-1, ("feed_forward_length",), lambda keys: keys.size("feed_forward_length"))),
    ("ffn_gate_inp", _Size(0, ("expert_count",), lambda keys: keys.size("expert_count"))),
    ("ffn_down_exps", _Size(0, ("expert_count",), lambda keys: keys.size("expert_count"))),
    ("ffn_down_exps", _Size(-1, ("expert_feed_forward_length", "feed_forward_length"), _expert_width)),
    ("ffn_down_shexp", _Size(-1, ("expert_shared_feed_forward_length", "expert_shared_count"), _shared_width)),
    ("shortconv.conv", _Size(-1, ("shortconv.l_cache",), lambda keys: keys.size("shortconv.l_cache"))),
    ("ssm_conv1d", _Size(-1, ("ssm.conv_kernel",), lambda keys: keys.size("ssm.conv_kernel"))),
    ("ssm_conv1d", _Size(0, _MIXED, _mixed)),
    ("ssm_a", _Size(0, ("ssm.time_step_rank",), lambda keys: keys.size("ssm.time_step_rank"))),
    ("ssm_out", _Size(-1, ("ssm.inner_size",), lambda keys: keys.size("ssm.inner_size"))),
)


def check_sizes(keys: Keys) -> None:
    """Compare the metadata with the tensors: layers, and the width of everything that a family builds.

    Raises:
        ModelError: a number is not that of the tensors.
    """
    _check_layers(keys)
    of_part: dict[str, list[StoredTensor]] = {}
    for name, tensor in keys.container.tensors.items():
        if not name.endswith(".bias"):
            of_part.setdefault(part_of(name), []).append(tensor)
    for part, size in _SIZES:
        for tensor in of_part.get(part, ()):
            if tensor.shape[size.axis] != size.told(keys):
                values = ((keys.full(key), keys.container.metadata.get(keys.full(key))) for key in size.keys)
                told = ", ".join(f"{key} {_shown(value)}" for key, value in values if value is not None)
                has = f"{tensor.name} is of shape {list(tensor.shape)}"
                raise ModelError(
                    f"{keys.container.path}: {has}; expected {size.told(keys)} {_AXES[size.axis]} ({told})"
                )


_AXES = {0: "rows", -1: "columns"}


def _shown(value: object) -> str:
    return f"an array of {len(value)}" if isinstance(value, Numbers) else str(value)


def _check_layers(keys: Keys) -> None:
    """Refuse layers that the file lacks, and those that it has beyond what it says."""
    found, path, blocks = set[int](), keys.container.path, keys.blocks
    for name in keys.container.tensors:
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            found.add(int(layer[1]))
        elif name.startswith("blk."):
            raise ModelError(f"{path} holds {name}, which is a part of no layer")
    # Layers that only draft may have been left out.
    wrong = min(set(range(keys.layers)) - found, default=None), max(found, default=0)
    if wrong[0] is not None or wrong[1] >= blocks:
        what = f"has no tensors of layer {wrong[0]}" if wrong[0] is not None else f"has tensors of layer {wrong[1]}"
        raise ModelError(f"{path} {what}: {keys.full('block_count')} is {blocks}")
