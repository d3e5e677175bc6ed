"""The course's decoder on 1, 2 and 4 processes, by each mode: bytes predicted and measured, losses
beside those of DDP on one rank; then what 7 and 70 billion parameters would take on 8 and 64 ranks,
and the seconds to say so.

    python tests/bench_distributed.py --steps 10 --ranks 1 2 4
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from course_lib.distributed import MODES, launch, predict, task_of

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
}
SEVEN = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11_008,
}
SEVENTY = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28_672,
}
SIZES = {"7 B": SEVEN, "70 B": SEVENTY | {"num_key_value_heads": 8}}
ON_CPU = [mode for mode in MODES if mode != "fsdp-cpu"]


def small(ranks: list[int], steps: int) -> None:
    names = ("parameter", "gradient", "optimizer", "peak", "communicated")
    print(
        f"{'mode':16}{'ranks':>5}"
        + "".join(f"{name:>28}" for name in names)
        + f"{'loss off by':>14}"
    )
    whole = None
    for count in ranks:
        for line in launch(
            count, "--mode", ",".join(ON_CPU), "--steps", str(steps), "--unequal", "--details"
        ):
            mode, sent = line["mode"], line["communicated"]
            task = task_of(unequal=True)
            peak = predict(
                task.make_model, lambda n=count, t=task: t.part(0, n, 0), task.loss_sum, mode, count
            )
            pairs = [(line["predicted"][name], max(line["measured"][name])) for name in names[:3]]
            pairs += [
                (peak.peak_bytes, line["taken"][0]["peak_bytes"]),
                (sent["predicted"], sent["measured"]),
            ]
            whole = whole or line["losses"]  # of DDP on one rank
            off = max(abs(a - b) for a, b in zip(line["losses"], whole, strict=True))
            cells = "".join(f"{f'{a:,}' if a == b else f'{a:,} / {b:,}':>28}" for a, b in pairs)
            print(f"{mode:16}{count:5}{cells}{off:14.1e}", flush=True)
    print(
        "where two figures differ: predicted / measured; the peak is rank 0's, all else the most of"
        " any rank\n"
    )


def large() -> None:
    print(
        f"{'':8}{'ranks':>6} {'mode':16}"
        + "".join(f"{name:>12}" for name in ("held, GB", "peak (GB)", "sent, GB", "s"))
    )
    with tempfile.TemporaryDirectory() as folder:
        for size, shape in SIZES.items():
            config = Path(folder) / f"{size}.json"
            config.write_text(json.dumps(LLAMA | shape))
            for ranks in (8, 64):
                for mode in ("fsdp", "fsdp-checkpoint"):
                    task, began = (
                        task_of(str(config), batch=ranks, sequence=4096),
                        time.process_time(),
                    )
                    part = task.part(0, ranks, 0)
                    taken = predict(
                        task.make_model, lambda part=part: part, task.loss_sum, mode, ranks
                    )
                    seconds = time.process_time() - began
                    figures = [sum(taken.held.values()), taken.peak_bytes, taken.sent_bytes]
                    cells = "".join(f"{figure / 1e9:12,.1f}" for figure in figures)
                    print(f"{size:8}{ranks:6} {mode:16}{cells}{seconds:12.1f}", flush=True)
    print("one sequence of 4,096 tokens a rank, fp32; seconds are of one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    given = parser.parse_args()
    small(given.ranks, given.steps)
    large()


if __name__ == "__main__":
    main()
