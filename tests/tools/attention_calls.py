"""Calls of `scaled_dot_product_attention`, and the kernels that PyTorch's checks allow for them.

`attention_checks.csv` has one row per call, and one column per version of PyTorch and compute
capability. A field has the first letters of the allowed fused kernels (cudnn, flash, efficient) in
PyTorch's order, so the first one runs. The answers come from the compiled checks of PyTorch's
wheels for CUDA 13, without a GPU. To add the columns of a version, run

    python tests/tools/attention_calls.py 8.0 9.0

in an environment with its wheel and a C++ compiler. The script replaces functions that query the
GPU, and calls `torch._fused_sdp_choice` on tensors that have no memory.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import csv_tables
import torch

CHECKS = Path(__file__).with_name("attention_checks.csv")
HEAD_SIZES = (16, 63, 64, 96, 100, 128, 160, 192, 256)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MASKS = ("none", "causal", "bool", "float", "learned")
# The numbers of the kernels in `torch.nn.attention.SDPBackend`; 0 stands for several operators.
NUMBERS = {3: "cudnn", 1: "flash", 2: "efficient"}
# The capability of a device is stored at these offsets of `cudaDeviceProp` in CUDA 13.
WITHOUT_A_GPU = """
#include <cstdint>
#include <cstdlib>
#include <cstring>
static char properties[8192];
extern "C" {
void* _ZN2at4cuda26getCurrentDevicePropertiesEv() {
  const char* text = getenv("CAPABILITY");
  int major = atoi(text), minor = atoi(strchr(text, '.') + 1);
  memcpy(properties + 0x168, &major, 4);
  memcpy(properties + 0x16c, &minor, 4);
  return properties;
}
int8_t _ZN3c104cuda12device_countEv() { return 1; }
int _ZN3c104cuda9GetDeviceEPa(int8_t* device) { *device = 0; return 0; }
int _ZN3c104cuda9SetDeviceEab(int8_t, bool) { return 0; }
int _ZN3c104cuda14MaybeSetDeviceEa(int8_t) { return 0; }
int8_t _ZN3c104cuda14ExchangeDeviceEa(int8_t) { return 0; }
int8_t _ZN3c104cuda19MaybeExchangeDeviceEa(int8_t) { return 0; }
}
"""


@dataclass(frozen=True)
class Case:
    """Shapes, dtype, mask and options of one call."""

    d: int = 64
    dtype: str = "bf16"
    mask: str = "causal"
    kv_heads: int = 8
    queries: int = 1024
    keys: int | None = None
    d_v: int | None = None
    dropout: float = 0.0
    offset: int = 0
    batch: int = 2
    grouped: bool = True
    strided: bool = False
    grad: bool = True
    dims: int = 4
    deterministic: bool = False

    @property
    def name(self) -> str:
        changed = (f"{k}={v}" for k, v in vars(self).items() if v != getattr(Case, k))
        return " ".join(changed) or "default"

    def arguments(self, device="cpu"):
        """Return (query, key, value) and the options of the call."""
        keys = self.queries if self.keys is None else self.keys
        dtype = DTYPES[self.dtype]
        sizes = [(8, self.queries, self.d), (self.kv_heads, keys, self.d)]
        sizes.append((self.kv_heads, keys, self.d_v or self.d))
        batch = (self.batch,) * (self.dims - 3)
        inputs = [self._tensor((*batch, *size), dtype, device) for size in sizes]
        options = {"dropout_p": self.dropout, "is_causal": self.mask == "causal"}
        options["enable_gqa"] = self.grouped and self.kv_heads != 8
        if (mask := self._mask(keys, dtype, device)) is not None:
            options["attn_mask"] = mask
        return inputs, options

    def positional(self, device="cpu"):
        """Return (query, key, value), (dropout, causal, grouped) and the mask or None."""
        inputs, options = self.arguments(device)
        mask = options.pop("attn_mask", None)
        return inputs, options.values(), mask

    @property
    def runs(self) -> bool:
        """Whether the call is valid, so that some kernel runs."""
        return self.kv_heads in (8, 2 * self.grouped) and 0 not in (self.queries, self.keys)

    def _tensor(self, shape, dtype, device):
        if self.strided:
            shape = (*shape[:-1], 2 * shape[-1])
        count = torch.Size(shape).numel()
        flat = torch.zeros(count + self.offset, dtype=dtype, device=device)[self.offset :]
        found = flat.view(shape)
        found = found[..., ::2] if self.strided else found
        return found.detach().requires_grad_(self.grad)

    def _mask(self, keys, dtype, device):
        kind, n = self.mask, self.queries
        if kind in ("none", "causal"):
            return None
        if kind == "bool":
            return torch.ones(n, keys, dtype=torch.bool, device=device)
        shape = {"rows": (2, 1, 1, keys), "3d": (8, n, keys), "transposed": (keys, n)}
        mask = torch.zeros(shape.get(kind, (n, keys)), dtype=dtype, device=device)
        return mask.requires_grad_(kind == "learned") if kind != "transposed" else mask.T


CASES = [Case(d, t, m, k) for d, t, m, k in product(HEAD_SIZES, DTYPES, MASKS, (8, 2))]
CASES += [Case(d, t, m, queries=n) for d, t, m, n in product((63, 64), DTYPES, MASKS, (1, 63))]
CASES += [
    Case(dtype=dtype, **more)
    for dtype in DTYPES
    for more in (
        *({"d": d} for d in (1, 200, 224, 257, 264)),
        *({"d": d, "dropout": 0.125} for d in (192, 200, 232)),
        *({"mask": mask} for mask in ("rows", "3d", "transposed")),
        *({"mask": mask, "keys": 512} for mask in ("none", "causal", "float")),
        *({"dropout": p, "queries": n} for p in (0.1, 0.125) for n in (1, 1024)),
        *({"d": d, "d_v": d_v, "mask": "none"} for d, d_v in ((64, 128), (192, 128), (64, 60))),
        *({"offset": offset} for offset in (1, 4, 8)),
        {"queries": 1, "keys": 512, "mask": "none"},
        {"keys": 1, "mask": "none"},
        {"kv_heads": 2, "grouped": False},
        {"kv_heads": 3},
        {"strided": True},
        {"strided": True, "d": 1},
        {"batch": 70_000, "queries": 2},
        {"d": 224, "grad": False},
        {"queries": 0},
        {"keys": 0, "mask": "none"},
        {"dims": 3},
        {"deterministic": True},
    )
]


def checks_of_this_pytorch() -> None:
    """Print a line with the kernels that are allowed for each call."""
    from torch._subclasses import fake_tensor

    fake_tensor.init_gpu_context = lambda device: None
    mode, cuda, key = fake_tensor.FakeTensorMode(), torch.backends.cuda, torch._C.DispatchKey.CUDA
    choose = torch.ops.aten._fused_sdp_choice.default
    checks = {"cudnn": cuda.can_use_cudnn_attention, "flash": cuda.can_use_flash_attention}
    checks["efficient"] = cuda.can_use_efficient_attention
    for case in CASES:
        inputs, (dropout, causal, grouped), mask = case.positional("meta")
        q, k, v, mask = (
            x if x is None else fake_tensor.FakeTensor(mode, x, torch.device("cuda", 0))
            for x in (*inputs, mask)
        )
        call = q, k, v, mask, dropout, causal
        torch.use_deterministic_algorithms(case.deterministic)
        number = choose.redispatch(
            torch._C.DispatchKeySet(key), *call, scale=None, enable_gqa=grouped
        )
        order = torch._C._get_sdp_priority_order()
        kernels = [NUMBERS[n] for n in order[: order.index(0)]]
        parameters = cuda.SDPAParams(*call, grouped)
        found = [kernel for kernel in kernels if checks[kernel](parameters, False)]
        assert found[:1] == [NUMBERS[number]][:1] if number else not found
        print(f"{case.name},{''.join(kernel[0] for kernel in found)}")


def answers(capability: str, library: Path) -> dict[str, str]:
    """Return the kernels that are allowed for each call on a GPU of this compute capability."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env=os.environ | {"LD_PRELOAD": str(library), "CAPABILITY": capability},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(line.split(",") for line in found.stdout.splitlines())


def main(*capabilities: str) -> None:
    rows = {case.name: {"case": case.name} for case in CASES}
    if CHECKS.exists():
        for row in csv_tables.read(CHECKS):
            rows[row["case"]] |= row
    version = ".".join(torch.__version__.split(".")[:2])
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "without_a_gpu.so")
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=WITHOUT_A_GPU, text=True, check=True)
        for capability in capabilities:
            for name, kernels in answers(capability, library).items():
                rows[name][f"torch {version} on {capability}"] = kernels
    csv_tables.write(CHECKS, [*rows.values()])


if __name__ == "__main__":
    if "CAPABILITY" in os.environ:
        checks_of_this_pytorch()
    else:
        main(*sys.argv[1:])
