"""What is on this machine, and what to do about it."""

import os
import platform
import shutil
import sys

from .tables import Table, table


def about_this_machine() -> Table:
    """Python, torch, processor, memory and GPU of this machine, and whether that is enough for the course."""
    import torch

    rows = [
        (("Python", "Python"), platform.python_version(), _enough(sys.version_info >= (3, 11), "3.11")),
        (("PyTorch", "PyTorch"), torch.__version__, _enough(_version(torch.__version__) >= (2, 9), "2.9")),
        (("processor cores", "处理器核数"), str(os.cpu_count()), _enough((os.cpu_count() or 0) >= 2, "2")),
        (("memory", "内存"), *_memory()),
        (("GPU", "GPU"), *_gpu(torch)),
    ]
    return table([("what", "项目"), ("here", "本机"), ("enough?", "够用吗？")], rows)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _enough(good: bool, wanted: str) -> tuple[str, str]:
    return ("yes", "够用") if good else (f"no: the course needs {wanted} or more", f"不够：本课程需要 {wanted} 以上")


def _memory() -> tuple[str, tuple[str, str]]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return "?", ("4 GB are enough", "4 GB 就够")
    return f"{total / 1e9:.1f} GB", _enough(total > 4e9, "4 GB")


def _gpu(torch) -> tuple[str, tuple[str, str]]:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), ("yes, lessons show its figures live", "够用，各课会在上面现场测量")
    if shutil.which("nvidia-smi"):
        return "–", (
            "there seems to be one, but this build of torch cannot use it: see Troubleshooting",
            "似乎有 GPU，但当前的 torch 版本用不了它：见“疑难解答”",
        )
    return "–", ("not needed: bytes and FLOPs are the same without one", "不需要：字节数和 FLOPs 在没有 GPU 时也一样")
