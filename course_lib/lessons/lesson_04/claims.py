"""Claims that lesson 04 tests."""

from course_lib.teaching import Claim

#: Claims that learners may have read; each says whether it was tested here.
CLAIMS = (
    Claim(
        "Activation offloading should be used alongside activation checkpointing.",
        "run: peak of the decoder's step and bytes copied to the file, offload alone / with"
        " checkpoints, p = 1",
        "Partly: only 1/18 of the bytes are moved. But here the peak is 9 MB higher, because"
        " a whole layer is in memory at once.",
        outcome="partly",
        source="torchtune documentation, Memory Optimization Overview",
    ),
    Claim(
        "PyTorch's own activation offloading lets GPUs idle while activations are fetched back.",
        "run on the simulated device: time at the threshold relative to the baseline, p = 0 /"
        " 1 / 2; recorded on a GPU (section 4.21): PyTorch's `save_on_cpu`",
        "Holds: `save_on_cpu` fetches nothing ahead, and on an H200 the step takes 1.95 times"
        " the baseline. With two storages fetched ahead, the simulated step takes 1% longer.",
        outcome="holds",
        source="Amazon SageMaker documentation, Activation offloading",
    ),
    Claim(
        "Offloading is faster than recomputation when the link between CPU and GPU is fast enough.",
        "run on the simulated device: the decoder's time relative to the baseline,"
        " checkpoints / offload at 20 GB/s / at 2 GB/s, p = 2",
        "Holds: here a link of 9.3 GB/s is fast enough, with two storages fetched ahead."
        " Nearly all copies are hidden only on a faster link, such as 20 GB/s.",
        outcome="holds",
        source="NVIDIA Transformer Engine documentation, CPU Offloading",
    ),
    Claim(
        "`non_blocking=True` makes a copy asynchronous, so it is safe to use everywhere.",
        "run on the simulated device: the host reads at once / after it has waited; pageable"
        " memory: not run",
        "No: after a copy to the host (D2H) has started, the host must wait before it reads."
        " And only copies from or to pinned memory are asynchronous.",
        outcome="fails",
        source="the mistake that PyTorch's guide to non_blocking and pin_memory warns of",
    ),
    Claim(
        "In ZeRO-Offload significant time is spent on CPUAdam.",
        "not run: bytes per parameter through host memory, and over the link each way",
        "Holds, by the bytes: the update reads and writes far more bytes than the link carries.",
        outcome="holds",
        source="DeepSpeed, pull request 7474",
    ),
)

#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "An autograd function that copies its input to the CPU offloads the activation.",
        "gradient relative to the baseline; bytes in the graph without the function and with it",
        "No: the next operator keeps the same storage, and the function doubles the gradient.",
        outcome="fails",
    ),
    Claim(
        '`value.to("cpu")` over `optimizer.state` offloads the optimizer.',
        "state tensors still at their old addresses",
        "No: on a GPU `.to` returns a copy (here: `copy=True`), and the code throws it away.",
        outcome="fails",
    ),
    Claim(
        "This prefetcher works: it loads the first batch in `__init__`.",
        "error when it is created",
        "No: it uses an iterator that `__iter__` has not created yet.",
        outcome="fails",
    ),
    Claim(
        "Make the causal mask with the method of a new `nn.Transformer()`.",
        "peak with it, and with the static method alone, n = 512",
        "Partly: the mask is right, but every call creates 44 million parameters and throws"
        " them away.",
        outcome="partly",
    ),
)
