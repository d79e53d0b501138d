"""How fast training and sampling are: images a second, what the time goes into, and how much memory they take.

    python tests/bench.py                                                       # the default network
    python tests/bench.py --preset cifar10-uvit-s --batch-size 16 --precision fp32,bf16 --skip-scaling none
    python tests/bench.py --batch-size 8,16,32,64 --size 16,32,64 --skip-scaling ls     # how the costs grow
    python tests/bench.py --json new.json --against old.json                    # two revisions, on the same quiet machine

Lists make one row for each combination. The rows of a table are measured in turns, round after round, so that a machine that
slows down slows all of them; a figure is the median over the rounds, a ratio the median of the rounds' ratios to the first row.
Images are random, since a step does not take longer for others.
"""

import argparse
import itertools
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sample
import train
from diffusion import Denoiser

# kind of work -> parts of the names of torch's operations, the first kind that fits
KINDS = {
    "attention": ("scaled_dot_product", "softmax", "bmm", "baddbmm"),
    "convolutions": ("convolution",),
    "matrix products": ("mm", "linear"),
    "norms": ("norm",),
    "optimiser, EMA": ("adam", "lerp", "foreach"),
    "activations": ("silu", "gelu", "sigmoid", "relu"),
    "copies, casts": ("copy", "clone", "cat", "fill", "zero"),
    "the rest": ("",),
}
CLASSES = 10            # of the random labels
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def write_data(folder, args):
    """Random images (or latents, for the presets that train on them) and labels of the preset's size, as files.   -> --data"""
    count, rng = 256, np.random.default_rng(0)
    latents = args.preset.startswith("imagenet256")
    shape = (count, 4, *args.size) if latents else (count, *args.size, 3)
    images = rng.standard_normal(shape, np.float32) if latents else rng.integers(256, size=shape, dtype=np.uint8)
    path = folder / f"{'latents' if latents else 'images'}-{args.size[0]}x{args.size[1]}.npy"
    np.save(path, images)
    np.save(path.with_name(f"{path.stem}_labels.npy"), np.arange(count) % CLASSES)
    return str(path)


def build(folder, preset, batch_size, size, precision, scaling, compiled, checkpointing):
    """A run of train.py with these settings.   -> what train.build returns"""
    given = dict(batch_size=batch_size, precision=precision, compile=compiled, checkpointing=checkpointing, flip=False,
                 out=str(Path(folder) / "run"), cache=str(Path(folder) / "cache"), crop=None)
    args = train.preset_args(preset, given | ({"size": size} if size else {}) | ({"skip_scaling": scaling} if scaling else {}))
    args.data = write_data(Path(folder), args)
    run = train.build(args, lambda line: None)
    if compiled:
        run.model.compile()
    return run


def synchronize(run):
    if run.device.type == "cuda":
        torch.cuda.synchronize()


def training_step(run, step):
    """What train.train does at every step.   -> seconds in train_step alone (a GPU may still be busy with it)"""
    places, timesteps = range(run.args.batch_size), run.diffusion.timesteps
    batch = train.to_device(train.make_batch(run.data, run.args, timesteps, step, places), run.device)
    began = time.perf_counter()
    loss, errors, norm = train.train_step(run.model, run, [batch])
    seconds = time.perf_counter() - began
    train.update_ema(run.ema, run.model, run.args.ema, step)
    train.add_to_window(run.window, loss, errors / run.error_scale[batch[1]], norm, batch[1] * train.BINS // timesteps)
    return seconds


def sampling(run, steps, guidance=1.0):
    """One batch of images from the averaged weights, `steps` Heun steps."""
    labels = None if run.data.labels is None else [k % CLASSES for k in range(run.args.batch_size)]
    with run.autocast():
        sample.generate(Denoiser(run.ema, run.diffusion), run.data.shape, 0, range(run.args.batch_size), labels, run.device,
                        steps=steps, guidance=guidance)


def seconds_of(run, work, least):
    """Seconds of one call of work(), from as many calls as last `least` seconds."""
    synchronize(run)
    began, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - began < least:
        work()
        calls += 1
        synchronize(run)
    return (time.perf_counter() - began) / calls


def measure(runs, work, rounds, least):
    """Seconds of work(run) for each run, measured in turns.   -> medians, medians of the ratios to the first run's speed"""
    for run in runs:
        work(run)                                           # compiles, allocates, fills caches
    times = np.array([[seconds_of(run, lambda: work(run), least) for run in runs] for _ in range(rounds)])
    return np.median(times, 0), np.median(times[:, :1] / times, 0)


def share_outside(run):
    """Share of a step that train.train spends outside train_step: data, EMA, sums of the log. On a CPU, where nothing overlaps."""
    shares = []
    for step in range(9):
        began = time.perf_counter()
        inside = training_step(run, step)
        shares.append(1 - inside / (time.perf_counter() - began))
    return statistics.median(shares)


def share_of_scaling(run, step_seconds):
    """Share of a training step that goes into scaling the long skips, forward and backward.

    A step with and one without scaling differ by less than two steps of the same kind do; the scaling alone can be timed.
    """
    skips, scaling = [], getattr(run.model, "skip_scaling", None)
    if scaling is None or scaling.mode == "none":
        return 0.0
    with scaling.register_forward_hook(lambda module, inputs, scaled: skips.append(inputs)):
        training_step(run, 0)
    skips = [(i, skip.detach().requires_grad_()) for i, skip in skips]
    gradients = [torch.ones_like(skip) for _, skip in skips]

    def work():
        with run.autocast():
            scaled = [scaling(i, skip) for i, skip in skips]
        torch.autograd.grad(scaled, [skip for _, skip in skips] + list(scaling.parameters()), gradients)

    work()
    return statistics.median(seconds_of(run, work, 0.05) for _ in range(9)) / step_seconds


def time_by_kind(run):
    """Shares of a training step's time, by kind of work.   -> {kind: share}"""
    gpu = run.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu]) as profiler:
        for step in range(3):
            training_step(run, step)
        synchronize(run)
    totals = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CPU:              # a kernel's time stands with the operation that asked
            kind = next(kind for kind, parts in KINDS.items() if any(part in event.key.lower() for part in parts))
            totals[kind] += event.self_device_time_total if gpu else event.self_cpu_time_total
    return {kind: total / sum(totals.values()) for kind, total in totals.items()}


def flops(run):
    """Floating-point operations of one image's forward and backward pass (a multiply-add is two), without recomputation."""
    model, counter = sample.build_model(run.config["model"]).to(run.device), FlopCounterMode(display=False)
    x, t = torch.zeros(1, *run.data.shape, device=run.device), torch.zeros(1, dtype=torch.long, device=run.device)
    with counter, sdpa_kernel(SDPBackend.MATH):                             # the only attention that is counted on a CPU
        model(x, t, None if run.data.labels is None else t).sum().backward()
    return counter.get_total_flops()


def product_rate(device, dtype):
    """What this machine's matrix products reach in a second of trying, as FLOP/s: the yardstick for the networks."""
    n = 8192 if device.type == "cuda" else 2048
    a, best, began = torch.randn(n, n, device=device).to(dtype), float("inf"), time.perf_counter()
    while time.perf_counter() - began < 1:
        start = time.perf_counter()
        (a[:n // 4] @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * (n // 4) * n * n / best


def peak_memory(folder, variant):
    """GB that a process needs at most which does nothing but two training steps (on a GPU: GPU memory)."""
    run = build(folder, *variant)
    for step in range(2):
        training_step(run, step)
    if run.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


def memory_in_fresh_process(folder, variant):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_memory, folder, variant).result()


def describe_machine(runs):
    device, cpuinfo, name = runs[0].device, Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    elif cpuinfo.exists():
        name = next((line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")), name)
    rates = {run.dtype: product_rate(device, run.dtype) for run in runs}
    products = ", ".join(f"{rate / 1e9:,.1f} GFLOP/s in {SHORT[dtype]}" for dtype, rate in rates.items())
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}; matrix products reach {products}\n")
    return rates


def bench_table(args, folder, preset, batch_size, size):
    """Measure and print all variants of one preset, batch and size.   -> rows, plain dicts"""
    modes = args.skip_scaling or ([None] if train.PRESETS[preset].get("backbone") == "vit" else ["none", "cs", "ls"])
    variants = [(preset, batch_size, size, *rest) for rest in itertools.product(
        args.precision, modes, *([False, True] if flag else [False] for flag in (args.compile, args.checkpointing)))]
    runs = [build(folder, *variant) for variant in variants]
    rates, operations = describe_machine(runs), flops(runs[0])
    step = itertools.count()
    trained, train_ratio = measure(runs, lambda run: training_step(run, next(step)), args.rounds, args.seconds)
    sampled, sample_ratio = measure(runs, lambda run: sampling(run, args.steps), args.rounds, args.seconds)
    size = runs[0].args.size
    print(f"{preset}, {size[0]}x{size[1]}, batch {batch_size}: {operations / 1e9:.2f} GFLOP an image, forward and backward; "
          f"sampling: {args.steps} Heun steps, {2 * args.steps - 1} calls, no guidance")
    print(f"{'':34s}{'training':>30s}{'sampling':>22s}{'peak':>9s}")
    print(f"{'':34s}{'images/s':>10s}{'ratio':>8s}{'of peak':>12s}{'images/s':>14s}{'ratio':>8s}{'memory':>9s}")
    rows = []
    for k, (run, variant) in enumerate(zip(runs, variants)):
        compiled, checkpointing = variant[-2:]
        name = " ".join([SHORT[run.dtype], run.args.skip_scaling, *["compiled"] * compiled, *["checkpointing"] * checkpointing])
        row = {"preset": preset, "batch_size": batch_size, "size": list(size), "variant": name,
               "train_images_per_s": batch_size / trained[k], "sample_images_per_s": batch_size / sampled[k],
               "share_of_product_rate": operations * batch_size / trained[k] / rates[run.dtype],
               "peak_memory_gb": memory_in_fresh_process(folder, variant) if args.memory else None}
        rows.append(row)
        memory = f"{row['peak_memory_gb']:6.2f} GB" if args.memory else ""
        print(f"{name:34s}{row['train_images_per_s']:10.1f}{train_ratio[k]:8.3f}{row['share_of_product_rate']:12.0%}"
              f"{row['sample_images_per_s']:14.2f}{sample_ratio[k]:8.3f}{memory:>9s}")
    for run, row in zip(runs, rows):
        scaling = share_of_scaling(run, batch_size / row["train_images_per_s"])
        row["shares"] = time_by_kind(run)
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in row["shares"].items() if share >= 0.0005)
        outside = f"; the loop around train_step {share_outside(run):.1%}" if run.device.type == "cpu" else ""
        print(f"{row['variant']}: {shares}; scaling the skips {scaling:.2%}{outside}")
    print()
    return rows


def compare(rows, before):
    """Print the speed of each row against the same row of an earlier --json."""
    key = ("preset", "batch_size", "size", "variant")
    old = {json.dumps([row[k] for k in key]): row for row in before}
    for row in rows:
        before = old.get(json.dumps([row[k] for k in key]))
        if before:
            ratios = (f"{what} {row[f'{what}_images_per_s'] / before[f'{what}_images_per_s']:.3f}" for what in ("train", "sample"))
            print(f"{row['preset']}, batch {row['batch_size']}, {row['variant']}: now / before: {', '.join(ratios)}")


def one_of(choices):
    def parse(text):
        if text not in choices:
            raise argparse.ArgumentTypeError(f"must be from {', '.join(choices)}, not {text}")
        return text
    return parse


def main():
    p, whole = sample.Parser(prog="bench.py", description=__doc__.splitlines()[0]), sample.number("[1, 1e6]", int)
    p.add_argument("--preset", type=sample.listed(one_of(train.PRESETS)), default=["digits"], metavar="NAME,..", help="settings of train.py")
    p.add_argument("--batch-size", type=sample.listed(whole), default=[32], metavar="B,..", help="images of a training step, and sampled at once")
    p.add_argument("--size", type=sample.listed(train.size), default=[None], metavar="S,..", help="pixels, instead of the preset's")
    p.add_argument("--precision", type=sample.listed(one_of(("auto", *SHORT.values()))), default=["auto"], metavar="P,..", help="auto, fp32, bf16, fp16")
    p.add_argument("--skip-scaling", type=sample.listed(one_of(train.MODES)), metavar="M,..", help="modes (default: none,cs,ls)")
    p.add_argument("--compile", action="store_true", help="each row with torch.compile, too")
    p.add_argument("--checkpointing", action="store_true", help="each row with activation checkpointing, too")
    p.add_argument("--memory", action="store_true", help="peak memory of each row, in a process of its own")
    p.add_argument("--steps", type=sample.number("[1, 1000]", int), default=18, help="Heun steps of sampling")
    p.add_argument("--rounds", type=whole, default=5, help="of which the median is taken")
    p.add_argument("--seconds", type=sample.number("[0, inf)"), default=1.0, help="that a row is measured for in each round, at least")
    p.add_argument("--json", metavar="FILE", help="keep the figures")
    p.add_argument("--against", metavar="FILE", help="figures of an earlier --json to compare with")
    args = p.parse_args()
    try:
        before = json.loads(Path(args.against).read_text()) if args.against else []
        if args.json:
            Path(args.json).touch()                         # not after minutes of measuring
        with tempfile.TemporaryDirectory() as folder:
            rows = [row for preset in args.preset for batch_size in args.batch_size for size in args.size
                    for row in bench_table(args, folder, preset, batch_size, size)]
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))
        compare(rows, before)
    except (ValueError, OSError) as error:
        p.error(str(error))


if __name__ == "__main__":
    main()
