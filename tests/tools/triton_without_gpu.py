"""Compile Triton kernels for a GPU on a machine without one."""

import re
import subprocess
import tempfile
from types import SimpleNamespace


def compile_only(capability: int, shared: int) -> list[dict]:
    """Make launches in this process only compile; return the list to which they add their results.

    Args:
        capability: Compute capability, such as 90 for an H100.
        shared: Bytes of shared memory per instance.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": shared}),
        )
    )
    run, compiled = triton.JITFunction.run, []

    def run_without_launch(kernel, *args, grid, warmup, **options):
        binary = run(kernel, *args, grid=grid, warmup=True, **options)
        with tempfile.NamedTemporaryFile() as file:
            file.write(binary.asm["cubin"])
            file.flush()
            tool = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
        compiled.append(
            {
                "kernel": kernel.fn.__name__,
                # bytes per thread that do not fit into its registers
                "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
                "shared": binary.metadata.shared,
                "tensor cores": "wgmma" in binary.asm["ptx"] or "mma.sync" in binary.asm["ptx"],
            }
        )

    triton.JITFunction.run = run_without_launch
    return compiled
