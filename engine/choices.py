"""The values of the engine's options."""

from __future__ import annotations

from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
AttentionKind = Literal["auto", "native", "triton", "rows", "sdpa", "reference", "fixed"]
KVType = Literal["auto", "int8"]
ProposerName = Literal["auto", "model", "self", "medusa", "eagle", "dflash", "uno", "mtp", "suffix", "ngram", "none"]
Loop = Literal["auto", "plain", "rounds"]
Rounded = Literal["int8", "int4"]
Weights = Literal["native", "dequantised", "fp8", Rounded]
ADAPTER_NAME = r"^[A-Za-z0-9._:/-]{1,128}$"
