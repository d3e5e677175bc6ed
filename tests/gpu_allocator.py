"""What the allocator of a GPU says, in a process of its own: nothing else has allocated there.

Reads {"steps": ["a NAME BYTES", "f NAME", "e"], "fraction": F} and prints {"total": the device's
bytes, "said": [[error, statistics] after each step]}; or {"train": true}: a few steps of a decoder
are trained, and it prints {"history": [[action, address, bytes]], "statistics": ...}.
Run by tests/test_caching_allocator.py.
"""

import json
import sys

import torch


def follow(steps: list[str], fraction: float) -> dict:
    if fraction < 1:
        torch.cuda.set_per_process_memory_fraction(fraction)
    tensors, said = {}, []
    for step in steps:
        what, *which = step.split()
        error = ""
        if what == "e":
            torch.cuda.empty_cache()
        elif what == "f":
            del tensors[which[0]]
        else:
            try:
                tensors[which[0]] = torch.empty(int(which[1]), dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as problem:
                error = str(problem)
        said.append([error, torch.cuda.memory_stats()])
    return {"total": torch.cuda.get_device_properties(0).total_memory, "said": said}


def train() -> dict:
    from course_lib.models import Decoder, random_tokens

    torch.cuda.memory._record_memory_history(context=None, max_entries=10**6)
    model = Decoder(
        vocabulary=1000, hidden=256, heads=8, layers=4, sequence=128, dropout=0.1
    ).cuda()
    tokens = random_tokens(8, 128, 1000).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    [entries] = [trace for trace in torch.cuda.memory._snapshot()["device_traces"] if trace]
    history = [
        [entry["action"], entry["addr"], entry["size"]] for entry in entries if "addr" in entry
    ]
    return {"history": history, "statistics": statistics}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    torch.cuda.init()
    json.dump(
        train() if asked.get("train") else follow(asked["steps"], asked["fraction"]), sys.stdout
    )
