"""bench.py runs and keeps its figures; what they are depends on the machine and is not tested."""

import json

import pytest
from conftest import ROOT

SMALL = ("--size", "8", "--rounds", "1", "--seconds", "0", "--steps", "2", "--precision", "fp32", "--batch-size", "2")


def test_the_bench_measures_every_combination(command, tmp_path):
    done = command(ROOT / "tests/bench.py", *SMALL, "--skip-scaling", "ls", "--checkpointing", "--memory", "--json", "old.json")
    assert done.returncode == 0 and done.stdout.count("scaling the skips") == 2, done.stderr
    rows = json.loads((tmp_path / "old.json").read_text())
    assert [row["variant"] for row in rows] == ["fp32 ls", "fp32 ls checkpointing"]
    for row in rows:
        assert row["train_images_per_s"] > 0 and row["sample_images_per_s"] > 0 and row["peak_memory_gb"] > 0.1
        assert sum(row["shares"].values()) == pytest.approx(1)
    again = command(ROOT / "tests/bench.py", *SMALL, "--skip-scaling", "none,ls", "--against", "old.json")
    assert again.returncode == 0 and again.stdout.count("now / before") == 1 and "fp32 none" in again.stdout, again.stderr


@pytest.mark.parametrize("flags, cause", [
    (["--preset", "nope"], "--preset must be from digits"), (["--precision", "fp33"], "--precision must be from"), (["--batch-size", "8,0"], "--batch-size must be"),
    (["--skip-scaling", "foo"], "--skip-scaling must be from none"), (["--size", "7"], "divisible by 4"), (["--steps", "0"], "--steps must be"),
    (["--rounds", "0"], "--rounds must be"), (["--json", "nowhere/new.json"], "nowhere"), (["--against", "missing.json"], "missing.json")])
def test_mistakes_are_answered_by_one_line(flags, cause, command):
    done = command(ROOT / "tests/bench.py", *flags)
    assert done.returncode == 2 and cause in done.stderr and done.stderr.count("\n") == 1, done.stderr
