"""Two processes, joined by gloo, train what one process trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

# `accelerate launch` starts one process where there is no GPU; torchrun starts two.
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# Experiment, what makes it small, and the losses in its result.
CASES = {
    "golore": (
        "pretrain",
        {
            "corpus": "generated",
            "num_steps": 6,
            "warmup": 2,
            "num_seeds": 1,
            "batch_size": 4,
            "accumulate": 2,
            "eval_batches": 2,
            "update_interval": 2,
            "methods": ["golore@20"],
        },
        lambda result: result["golore@20"]["train_loss"],
    ),
    "circuits": (
        "compare",
        {
            "model": "random",
            "tasks": ["add_sub"],
            "methods": ["lora"],
            "count": 100,
            "num_steps": 10,
            "batch_size": 32,
            "num_seeds": 1,
        },
        lambda result: result["add_sub"]["methods"]["lora"]["train_loss"][0],
    ),
    "speechssm": (
        "mini",
        {"eval_tokens": 64, "accumulate": 2},
        lambda result: result["loss"],
    ),
}


def losses(slug: str, folder: Path, processes: int) -> list[float]:
    launch = () if processes == 1 else LAUNCH
    name, options, read = CASES[slug]
    path = folder / f"{processes}.json"
    script = str(Path(__file__).with_name("launched.py"))
    done = subprocess.run(
        [sys.executable, *launch, script, slug, name, json.dumps(options), str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads(path.read_text())
    assert written["processes"] == processes
    return read(written["result"])


@pytest.mark.parametrize("slug", CASES)
def test_two_processes_train_like_one(slug, tmp_path):
    one, two = losses(slug, tmp_path, 1), losses(slug, tmp_path, 2)
    assert len(one) == len(two) > 3
    # The same start; then the same batch, in other shares.
    assert two == pytest.approx(one, rel=0.05)
    assert two[-1] < two[0]
