"""Writes `published.safetensors`: small matrices as the libraries of the formats pack them, and what they say it means.

    python make_published.py FOLDER...

The folders hold the unpacked archives of compressed-tensors 0.20.0 (with loguru and psutil), autoawq 0.2.9 and
auto-gptq 0.7.1. Of the latter two only the modules that pack are imported: the rest needs an older transformers. Scales
are widened to float32 before a library dequantises, so that its result is not rounded to their type.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUT, IN, GROUP = 32, 64, 32


def module_of(name: str) -> ModuleType:
    """A module without the code of the packages around it."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        package = ModuleType(".".join(parts[:i]))
        package.__path__ = [str(Path(folder, *parts[:i])) for folder in sys.path if Path(folder, *parts[:i]).is_dir()]
        sys.modules[package.__name__] = package
    return importlib.import_module(name)


def drawn(seed: int) -> Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(seed))


def compressed(**options: object) -> tuple[dict[str, Tensor], Tensor]:
    """By compressed-tensors, with scales and zero points of its own observers' formula."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    form = options.pop("format")
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**options), format=form)
    weight, args = drawn(len(options)), scheme.weights
    parts = {"group": weight.unflatten(1, (-1, GROUP)), "channel": weight[:, None], "tensor": weight.view(1, 1, -1)}
    low, high = (edge(-1) for edge in (parts[args.strategy].amin, parts[args.strategy].amax))
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": weight, "weight_scale": scale.bfloat16().float(), "weight_zero_point": zero}
    if args.strategy == "tensor":
        state |= {"weight_scale": state["weight_scale"].view(1), "weight_zero_point": zero.view(1)}
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    return packed, compressor.decompress(packed, scheme)["weight"]


def integers(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales in float16 and zero points from 1, `[groups, out]`."""
    parts = weight.unflatten(1, (-1, GROUP))
    low, high = parts.amin(-1), parts.amax(-1)
    scale = ((high - low) / ((1 << bits) - 1)).half().float()
    return scale.t().contiguous(), (-low / scale).round().clamp(1, (1 << bits) - 1).t().contiguous()


def awq() -> tuple[dict[str, Tensor], Tensor]:
    packing, gemm = module_of("awq.utils.packing_utils"), module_of("awq.modules.linear.gemm")
    linear = nn.Linear(IN, OUT, bias=False)
    linear.weight.data.copy_(drawn(5))
    scale, zero = integers(linear.weight.data, 4)
    made = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scale, zeros=zero)
    # It may round a code out of its bits; the packed words are what counts.
    plain = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, GROUP)
    return {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}, plain.t()


def gptq(bits: int, order: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    module = module_of("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    linear = nn.Linear(IN, OUT, bias=False)
    linear.weight.data.copy_(drawn(bits))
    scale, zero = integers(linear.weight.data[:, order], bits)
    index = torch.empty(IN, dtype=torch.int32)
    index[order] = torch.arange(IN, dtype=torch.int32) // GROUP
    made = module.QuantLinear(bits, GROUP, IN, OUT, False)
    made.pack(linear, scale.t(), zero.t(), index)
    tensors = {name: getattr(made, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    tensors["scales"] = tensors["scales"].half()
    made.scales = made.scales.float()
    made.wf = made.wf.int()
    return tensors, made(torch.eye(IN)).t()


def main(folders: list[str]) -> None:
    sys.path[:0] = folders
    generator = torch.Generator().manual_seed(1)
    forward, shuffled = torch.arange(IN), torch.randperm(IN, generator=generator)
    matrices = {
        "ct-int4": compressed(format="pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
        "ct-int4-zeros": compressed(
            format="pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False
        ),
        "ct-packed8": compressed(format="pack-quantized", num_bits=8, strategy="channel"),
        "ct-int8": compressed(format="int-quantized", num_bits=8, strategy="channel"),
        "ct-int8-zeros": compressed(format="naive-quantized", num_bits=8, strategy="channel", symmetric=False),
        "ct-fp8": compressed(format="float-quantized", num_bits=8, strategy="tensor", type="float"),
        "ct-fp8-rows": compressed(format="float-quantized", num_bits=8, strategy="channel", type="float"),
        "awq": awq(),
        "gptq": gptq(4, forward),
        "gptq-ordered": gptq(4, shuffled),
        "gptq-8": gptq(8, forward),
    }
    tensors = {f"{kind}/x.{name}": part for kind, (parts, _) in matrices.items() for name, part in parts.items()}
    tensors |= {f"{kind}/plain": plain.float() for kind, (_, plain) in matrices.items()}
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, Path(__file__).with_name("published.safetensors")
    )


if __name__ == "__main__":
    main(sys.argv[1:])
