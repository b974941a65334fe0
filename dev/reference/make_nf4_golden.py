"""Makes the goldens of NF4 with bitsandbytes (0.50.2), on the CPU: tests/golden/nf4.safetensors, numbers with their
codes, scales and dequantised values, and tests/golden/gqa3_tied/lora/nf4.safetensors, what make_lora_golden.py
says of that adapter, here on dequantised weights. Prints how far PEFT is from it with the layers of bitsandbytes
itself, in fp32. pip install bitsandbytes peft
"""
import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from make_golden import GOLDEN, documents, fp64_inside
from make_lora_golden import measured

NF4 = {"blocksize": 64, "quant_type": "nf4"}


def numbers():
    levels = get_4bit_type("nf4", device="cpu")
    blocks = torch.randn(24, 64) * 2.0 ** torch.arange(-14, 10)[:, None]
    blocks[0] = 0
    blocks[1, :31] = torch.cat((levels, (levels[1:] + levels[:-1]) / 2))     # halfway: the borders
    blocks[1, 31:] = blocks[1, :31].repeat(2)[:33].nextafter(torch.tensor(9.0))
    blocks[2] *= 1e-39 / blocks[2].abs().max()      # a scale that is not normal
    blocks[3] = blocks[3] / blocks[3].abs().max() * 3e38
    codes, state = quantize_4bit(blocks.flatten(), **NF4)
    out = {"values": blocks, "codes": codes.flatten().float(), "absmax": state.absmax}
    for name, dtype in ("fp32", torch.float32), ("bf16", torch.bfloat16):
        state.dtype = dtype
        out[name] = dequantize_4bit(codes, state)
    save_file(out, GOLDEN / "nf4.safetensors")


def adapted(own_layers):
    base = AutoModelForCausalLM.from_pretrained(GOLDEN / "gqa3_tied", attn_implementation="eager")
    for name, layer in list(base.model.layers.named_modules()):
        if not isinstance(layer, torch.nn.Linear):
            continue
        if own_layers:
            weight = bnb.nn.Params4bit(layer.weight.data, False, compress_statistics=False, **NF4)
            layer = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False,
                                      compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4")
            layer.weight = weight
            base.model.layers.set_submodule(name, layer.to("cpu"))     # now it is quantised
        else:
            layer.weight.data = dequantize_4bit(*quantize_4bit(layer.weight.data, **NF4))
    return PeftModel.from_pretrained(base, GOLDEN / "gqa3_tied" / "lora", is_trainable=True,
                                     autocast_adapter_dtype=False)


torch.manual_seed(1)
torch.set_num_threads(1)
numbers()
docs = documents(load_file(GOLDEN / "gqa3_tied" / "expected.safetensors"))
model = adapted(False).double()
with fp64_inside(model):
    golden = measured(model, docs)
save_file(golden, GOLDEN / "gqa3_tied" / "lora" / "nf4.safetensors")
own = measured(adapted(True), docs)
for kind in "loss", "logits", "grad.", "train_losses", "grad_norms":
    print(kind, max(float((own[n] - t).norm() / t.norm()) for n, t in golden.items() if n.startswith(kind)))
