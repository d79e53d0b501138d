"""Train a diffusion model on one machine, on a laptop or on all its GPUs.

    python train.py                                             # digits, minutes on a CPU; then look at runs/digits
    python train.py --data cifar10 --out runs/cifar             # or a folder, a zip, an .npz or .npy of images
    python train.py --preset cifar10-uvit-s --weighting min-snr --skip-scaling ls
    torchrun --standalone --nproc_per_node=8 train.py ...       # the same flags, the same training
    python train.py --out runs/cifar --resume                   # goes on to the last bit as if it had not stopped

In this order: one training step, the randomness of a batch, weights that are solved for, the log, the run folder, the data, presets
and flags, the run.
"""

import argparse
import colorsys
import copy
import csv
import hashlib
import io
import json
import math
import os
import pickle
import resource
import shlex
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

import sample
from diffusion import SCHEDULES, Denoiser, Diffusion, random_stream
from sample import listed, number
from scaling import CONSTANTS, MODES, gradient_norms, probe
from weighting import CHANGE_OF_VARIABLE, PARETO_SOLVERS, WEIGHTINGS, gradient_gram, loss_weight, pareto_weights, squeeze_into_bin

BINS = 4            # of t, for the error in the log: the loss is weighted, so that only the errors compare between runs


# ---------------------------------------------------------------------------------------------------------------------
# One training step

def train_step(model, run, batches, record=None):
    """One optimiser step on this process's micro-batches of (x0, t, noise, labels).

    model: the network, wrapped where there are several processes   -> loss (), squared errors of the prediction (B,), gradient norm ()
    record: a dict that takes the norms of the blocks' gradients
    Nothing here waits for the GPU, on which all three results stay.
    """
    total, errors = 0, []
    for i, (x0, t, noise, labels) in enumerate(batches):
        last = i == len(batches) - 1
        with nullcontext() if last or run.processes == 1 else model.no_sync():      # gradients travel once a step
            with run.autocast():
                error = run.diffusion.error(model, x0, t, noise, labels)            # (B,)
            loss = (run.weights[t] * error).sum() / run.share
            with sample.attention_kernels(run.device, run.dtype):                   # for what --checkpointing computes again
                run.scaler.scale(loss).backward()
        total += loss.detach()
        errors.append(error.detach())
    run.scaler.unscale_(run.optimizer)                                              # clipping must see the true gradients
    if record is not None:
        record |= gradient_norms(run.model)
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.args.clip)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    return total, torch.cat(errors), norm


def update_ema(ema, model, decay, step):
    """Move the averaged weights toward the model's: ema = d ema + (1 - d) model, with d small at first so that a short run
    has an average worth looking at."""
    d = min(decay, (1 + step) / (10 + step))
    get_ema_multi_avg_fn(d)(list(ema.parameters()), list(model.parameters()), step)


def make_optimizer(model, args, device):
    """AdamW. Weight decay acts on the matrices of linear layers and convolutions alone.

    That is common practice (biases, norms, and tables of labels, times and positions are left alone); U-ViT and Min-SNR
    decayed all parameters, DDPM and ADM none.
    """
    decay = {m.weight for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))}
    groups = [{"params": [p for p in model.parameters() if p in decay], "weight_decay": args.weight_decay},
              {"params": [p for p in model.parameters() if p not in decay], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.betas, fused=device.type in ("cpu", "cuda"))


# ---------------------------------------------------------------------------------------------------------------------
# The randomness of a batch: a function of the seed, the step and a sample's place in the global batch, so that nothing
# needs to be remembered to resume, and any number of processes and any micro-batch see the same samples

@lru_cache(maxsize=2)
def shuffled(seed, epoch, count):
    """The order in which an epoch visits the images.   -> (count,) integers"""
    return random_stream(seed, "order", epoch).permutation(count)


def make_batch(data, args, timesteps, step, places):
    """Samples of one step, for these places in the global batch, on the CPU.

    -> images (B, H, W, C) uint8 or latents (B, C, H, W), t (B,), noise (B, C, H, W), labels (B,) or None
    """
    index, t, flips, drops, noise = [], [], [], [], np.empty((len(places), *data.shape), np.float32)
    for k, place in enumerate(places):
        epoch, position = divmod(step * args.batch_size + place, len(data.images))
        index.append(shuffled(args.seed, epoch, len(data.images))[position])
        stream = random_stream(args.seed, "train", step, place)
        t.append(stream.integers(timesteps))
        flips.append(stream.random() < 0.5)
        drops.append(stream.random() < args.label_dropout)
        stream.standard_normal(out=noise[k], dtype=np.float32)
    images = data.images[index]
    if args.flip:
        images[flips] = images[flips, :, ::-1]
    labels = None
    if data.labels is not None:
        labels = torch.from_numpy(np.where(drops, len(data.classes), data.labels[index]))   # the last row: no label
    return torch.from_numpy(images), torch.tensor(t), torch.from_numpy(noise), labels


def to_device(batch, device):
    """Move a batch and bring images into [-1, 1].   -> x0 (B, C, H, W), t (B,), noise (B, C, H, W), labels (B,) or None"""
    if device.type == "cuda":                               # from pinned memory the copy overlaps with computing
        batch = [None if part is None else part.pin_memory() for part in batch]
    images, t, noise, labels = (None if part is None else part.to(device, non_blocking=True) for part in batch)
    x0 = images.permute(0, 3, 1, 2).float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()
    return x0 if device.type == "cuda" else x0.contiguous(), t, noise, labels         # GPUs like channels last, CPUs do not


# ---------------------------------------------------------------------------------------------------------------------
# Weights that are solved for: --weighting ugd or frank-wolfe

PARETO_BATCH = 64       # images on which the gradients of all bins of timesteps are measured


def solve_weights(run, step):
    """Put Pareto-optimal weights on bins of timesteps into run.weights.   -> (bins,) weights on the x_0 loss, mean 1

    Each bin is a task: the squared error of x_0 at its timesteps. All see the same images and noise, those of places behind
    the global batch, which this step does not train on (the next one does, with other noise). One process solves, so that
    all have the same weights.
    """
    args, timesteps, bins = run.args, run.diffusion.timesteps, run.args.pareto_bins
    table = torch.zeros(bins, device=run.device)
    if run.rank == 0:
        places = range(args.batch_size, args.batch_size + PARETO_BATCH)
        x0, t, noise, labels = to_device(make_batch(run.data, args, timesteps, step, places), run.device)

        def bin_losses():
            for k in range(bins):
                t_k = squeeze_into_bin(t, k, bins, timesteps)
                with run.autocast():
                    error = run.diffusion.error(run.model, x0, t_k, noise, labels)
                yield (error / run.error_scale[t_k]).mean()

        with sample.attention_kernels(run.device, run.dtype):
            gram = gradient_gram(bin_losses(), list(run.model.parameters()))
        table += (bins * pareto_weights(gram, args.weighting, args.pareto_regularization)).to(table)
    if run.processes > 1:
        dist.broadcast(table, 0)
    run.weights = table[torch.arange(timesteps, device=run.device) * bins // timesteps] / run.error_scale
    return table


# ---------------------------------------------------------------------------------------------------------------------
# The log. Sums since the last row stay in one tensor on the device, so that adding never waits for it; they are divided by
# the number of good steps (the errors of a bin by its number of samples) when a row is written.

STEPS, LOSS, NORM, SKIPPED = range(4)
ERRORS, COUNTS = (slice(4 + k * BINS, 4 + (k + 1) * BINS) for k in range(2))
IN_A_ROW, WINDOW_SIZE = 4 + 2 * BINS, 5 + 3 * BINS          # these outlive a row: bad steps up to now without a good one between,
BROKEN = slice(IN_A_ROW + 1, WINDOW_SIZE)                   # and how many losses of each bin broke in the first of them
MAY_SKIP = 50               # bad steps in a row that fp16's scaler may skip while it looks for a scale
COLUMNS = ["step", "images", "loss", *(f"error_{k}" for k in range(BINS)), "grad_norm", "skipped", "lr", "images_per_s"]
FID_COLUMNS = ["step", "images", "fid"]

# With --probe K the window goes on with the number of probed steps and, of each of these, the sums for the long skips 0 (outermost)
# to N - 1: see scaling.probe. Means and mean squares do not depend on how a batch is divided, as standard deviations would
PROBED = "decoder_norm", "decoder_grad", "encoder_grad", "kappa", "kappa_square"


def add_to_window(window, loss, errors, norm, bins):
    """Add one step: loss (), squared errors of x_0 (B,), gradient norm (), bins of t (B,)."""
    finite, bad = errors.isfinite(), ~norm.isfinite()
    first = bad & (window[IN_A_ROW] == 0)
    window[:4] += torch.stack([torch.ones_like(loss), loss.masked_fill(bad, 0), norm.masked_fill(bad, 0), bad.float()])
    window[IN_A_ROW] = (window[IN_A_ROW] + 1) * bad
    window[BROKEN] = (window[BROKEN] * bad).index_add(0, bins, (~finite & first).float())
    window[ERRORS].index_add_(0, bins, errors.masked_fill(~finite, 0))
    window[COUNTS].index_add_(0, bins, finite.float())


def add_probe(window, record):
    """Add one probed step, {name: (N,)} of PROBED; not finite ones, which fp16 skips, are left out."""
    values = torch.cat([torch.ones_like(record["kappa"][:1]), *(record[name] for name in PROBED)])
    window[WINDOW_SIZE:] += values.masked_fill(~values.isfinite().all(), 0)


def probe_row(window, learned):
    """The probes' part of a row of the log.   -> {column: value}, nan where no step was probed"""
    means = dict(zip(PROBED, (window[WINDOW_SIZE + 1:] / window[WINDOW_SIZE]).view(len(PROBED), -1)))
    square = means.pop("kappa_square")
    if learned:                                             # over channels or tokens, samples and the probed steps
        means["kappa_std"] = (square - means["kappa"]**2).clamp(min=0).sqrt()
    return {f"{name}_{i}": value for name, values in means.items() for i, value in enumerate(values.tolist())}


def bin_name(k):
    return f"t in [{1000 * k // BINS}, {1000 * (k + 1) // BINS})"


def check_finite(run, step):
    """Stop a run whose loss or gradient is nan or infinite.   FloatingPointError: the step, the timesteps, what is left

    Once weights are lost every later step is bad too, so that counting back finds the first. With fp16 single steps may be
    skipped: its scaler then tries a smaller scale.
    """
    skipped = int(run.window[IN_A_ROW])
    if skipped == 0 or run.scaler.is_enabled() and skipped < MAY_SKIP:
        return
    if run.processes > 1:
        dist.all_reduce(run.window)                         # every process stops here, but the loss broke in one
    broken = [bin_name(k) for k in range(BINS) if run.window[BROKEN][k] > 0]
    where = f"the loss at {' and '.join(broken)}" if broken else "the gradient, while the loss was finite"
    raise FloatingPointError(f"step {step - skipped + 1}: nan or infinity in {where}. {run.out / 'checkpoint.pt'} is the last good "
                             f"checkpoint: if the data is sound, --resume with a lower --lr may help")


def take_row(run, step, images_per_s):
    """The sums as a row of the log, {column: value}; they start again from zero."""
    window = run.window.clone()
    if run.processes > 1:
        dist.all_reduce(window)
    mean = (window[:4] / (window[STEPS] - window[SKIPPED])).tolist()
    errors = (window[ERRORS] / window[COUNTS]).tolist()                 # nan where a bin had no sample
    row = dict(zip(COLUMNS, [step, step * run.args.batch_size, mean[LOSS], *errors, mean[NORM],
                             int(window[SKIPPED]) // run.processes, learning_rate(run.args, step - 1), images_per_s]))
    if run.args.probe:
        row |= probe_row(window, run.args.skip_scaling not in CONSTANTS)
    run.window[:IN_A_ROW], run.window[WINDOW_SIZE:] = 0, 0
    return row


def read_log(path, columns=COLUMNS):
    """log.csv with the probes' columns if it has any, or fid.csv with FID_COLUMNS -> {column: list of floats}"""
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            rows, probes = list(reader), [name for name in reader.fieldnames or [] if name.startswith(PROBED)]
        return {name: [float(row[name]) for row in rows] for name in [*columns, *probes]}
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give a run folder of train.py") from None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not a log of train.py, or a torn one") from None


def append_row(path, values):
    """Write a row at the end of a .csv file."""
    with open(path, "a") as file:
        file.write(",".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values) + "\n")


def cut_log(path, columns, step):
    """Start a .csv file, or take back the rows after the checkpoint that a resumed run goes on from."""
    lines = path.read_text(errors="replace").splitlines()[1:] if path.exists() else []
    rows = [line.split(",") for line in lines]
    kept = [line for line, row in zip(lines, rows) if len(row) == len(columns) and row[0].isdecimal() and int(row[0]) <= step]
    text = "".join(f"{line}\n" for line in [",".join(columns), *kept])
    save_atomically(path, lambda file: file.write(text.encode()))


def draw_curves(runs, path):
    """Draw the curves of one run, or of several laid over each other.   runs: {name: run folder}"""
    logs = {name: read_log(folder / "log.csv") for name, folder in runs.items()}
    fids = {name: read_log(folder / "fid.csv", FID_COLUMNS) for name, folder in runs.items() if (folder / "fid.csv").exists()}

    def panel(title, lines):
        return {"title": title, "x": "training images", "lines": lines, "log_y": True}

    def compared(title, column, logs=logs):
        return panel(title, {name: (log["images"], log[column]) for name, log in logs.items()})

    panels = [compared("weighted loss", "loss"), compared("gradient norm", "grad_norm")]
    if len(logs) == 1:
        log, = logs.values()
        panels.insert(1, panel("squared error of x_0", {bin_name(k): (log["images"], log[f"error_{k}"]) for k in range(BINS)}))
    else:
        panels += [compared(f"squared error of x_0, {bin_name(k)}", f"error_{k}") for k in range(BINS)]
    if fids:
        panels.append(compared("FID of the EMA weights", "fid", fids))
    panels += [panel(title, lines) for title, lines in probe_lines(logs).items() if lines]
    sample.save_picture(sample.line_chart(panels), path)


def probe_lines(logs):
    """What --probe recorded, as lines.   {run: log} -> {title of a panel: {name: (xs, ys)}}, a line for a skip of one run or for a run"""
    depths = {run: sum(name.startswith("decoder_norm_") for name in log) for run, log in logs.items()}
    if len(logs) > 1:
        blocks = {"outermost": {run: 0 for run in logs}, "innermost": {run: depth - 1 for run, depth in depths.items()}}
        return {f"norm of features, {place} decoder block": {
            run: (logs[run]["images"], logs[run][f"decoder_norm_{i}"]) for run, i in block.items() if depths[run]}
            for place, block in blocks.items()}
    (log, depth), = zip(logs.values(), depths.values())
    shown = sorted({round(k * (depth - 1) / 5) for k in range(6)}) if depth else []             # at most six lines
    titles = {"norm of decoder features": "decoder_norm", "gradient norm of decoder blocks": "decoder_grad"}
    if "kappa_std_0" in log:
        titles["mean kappa of long skips"] = "kappa"
    return {title: {f"{i}{' = outermost' * (i == 0)}": (log["images"], log[f"{name}_{i}"]) for i in shown} for title, name in titles.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The run folder

GRID_STEPS, GRID_GUIDANCE = 12, 3.0                 # of the sample grids; guidance where the model has learned to do without labels
PARTS = ("model", "ema", "optimizer", "scaler")     # what a checkpoint holds of a run, beside its step, config and window


def save_atomically(path, write):
    """Call write(file) on a temporary file, then rename it: a kill or a full disk never harms the file that is there."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:                # torch reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written ({sample.first_line(error)}); the one before is untouched") from None


def save_checkpoint(run, step):
    """Write everything that a run needs to go on. All processes must call this."""
    window = run.window.clone()
    if run.processes > 1:
        dist.all_reduce(window)
    if run.rank == 0:
        window[IN_A_ROW] = run.window[IN_A_ROW]             # the same in all processes, since their gradients are
        state = {name: getattr(run, name).state_dict() for name in PARTS}
        state |= {"step": step, "config": run.config, "window": window, "weights": run.weights}
        save_atomically(run.out / "checkpoint.pt", lambda file: torch.save(state, file))


def draw_samples(run, step):
    """A grid from the averaged weights beside one from the last step's, from the same noise every time."""
    data, count, labels, guidance, grids = run.data, 40, None, 1.0, []
    if data.labels is not None:                             # four of each class, of at most ten
        labels = [k % min(len(data.classes), 10) for k in range(count)]
        guidance = GRID_GUIDANCE if run.model.null_label else 1.0
    for title, model in ("EMA weights", run.ema), ("last weights", run.model):
        model.eval()
        with run.autocast():
            x0 = sample.generate(Denoiser(model, run.diffusion), data.shape, run.args.seed, range(count), labels, run.device,
                                 steps=GRID_STEPS, guidance=guidance)
        images = sample.to_uint8(x0[:, :3] / 3 if data.latents else x0)                 # of latents, three channels as colours
        title = f"step {step}, {title}"
        if labels is None:
            grids.append(sample.titled(sample.image_grid(images, 8), title))
        else:
            grids.append(sample.label_grid(images, labels, data.classes, title))
    run.model.train()
    sample.save_picture(sample.side_by_side(grids), run.out / "samples" / f"step_{step:07d}.png")


def measure_fid(run, step):
    """FID of --fid-count images of the averaged weights, the same every time, against the training data, into fid.csv.

    All processes share the work, and must call this.
    """
    data, args, (network, reference) = run.data, run.args, run.fid

    def draw(indices):
        labels = None if data.labels is None else [k % len(data.classes) for k in indices]
        with run.autocast():
            x0 = sample.generate(Denoiser(run.ema, run.diffusion), data.shape, args.seed, indices, labels, run.device)
        return sample.to_uint8(x0)

    mean, cov, _ = sample.feature_statistics(network, draw, args.fid_count, args.micro_batch or run.share, run.rank, run.processes)
    if run.rank == 0:
        append_row(run.out / "fid.csv", [step, step * args.batch_size, sample.frechet_distance(mean, cov, *reference)])


# ---------------------------------------------------------------------------------------------------------------------
# The data: everything becomes one memory-mapped array, decoded once and kept under --cache

EXTENSIONS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"}
FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF"]     # whatever a file is called, Pillow tries no other
CACHE_VERSION = 2                   # to be raised whenever the same files would give other pixels
STALE = 3600                        # seconds without a write after which an unfinished cache is a killed run's
CHUNK = 16                          # pictures that one thread decodes at a time
MAX_CLASSES = 100_000
DIGIT_COUNT = 20_000
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_MD5 = {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
               "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@dataclass
class Data:
    """What a run trains on.

    images: (N, H, W, C) uint8, or latents (N, C, H, W) float16 or float32; memory-mapped
    labels: (N,) int64 in [0, len(classes)), or None;   classes: their names, None exactly when labels is
    """
    images: np.ndarray
    labels: np.ndarray | None
    classes: list[str] | None

    def __post_init__(self):
        if self.labels is not None and not (self.labels.shape == self.images.shape[:1] and 0 <= self.labels.min()
                                            and self.labels.max() < len(self.classes)):
            raise ValueError(f"{len(self.images):,} images of {len(self.classes)} classes need as many labels from 0 to {len(self.classes) - 1}")

    @property
    def checksum(self):
        """Of about a thousand images and all labels: the same run needs the same data, wherever it lies by now."""
        checksum = zlib.crc32(np.ascontiguousarray(self.images[::max(1, len(self.images) // 1000)]))
        return checksum if self.labels is None else zlib.crc32(np.ascontiguousarray(self.labels), checksum)

    @property
    def latents(self):
        return self.images.dtype.kind == "f"

    @property
    def shape(self):
        """(C, H, W) of one training tensor."""
        return self.images.shape[1:] if self.latents else (self.images.shape[3], *self.images.shape[1:3])


@dataclass
class Pictures:
    """Before decoding: open(i) -> PIL image i; names[i]: what errors call it; labels and classes as in Data."""
    names: list[str] | range
    open: Callable
    labels: np.ndarray | None
    classes: list[str] | None


# -- one picture

# EXIF orientation (tag 0x112) -> what sets the picture upright
TURNS = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
         5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
         8: Image.Transpose.ROTATE_90}


def upright_turn(image):
    try:
        return TURNS.get(image.getexif().get(0x112))
    except Exception:               # a broken EXIF block, in whichever way, says nothing against the pixels
        return None


def to_rgb(image):
    """Any PIL image -> RGB: alpha over white, 16 bits scaled to 8, floats as [0, 1], or [0, 255] if any is above 1."""
    if image.mode.startswith("I"):  # Pillow's own conversion would clip 16 bits at 255 instead of scaling
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        values = np.asarray(image)
        if not np.isfinite(values).all():
            raise ValueError("holds values that are not finite")
        scaled = values * 255 if values.max() <= 1 else values
        image = Image.fromarray(scaled.round().clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def centre_crop(image, width, height):
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def fit(image, height, width):
    """Shrink or enlarge until the picture just covers (height, width), never squeezing it; then centre crop.

    Box halving keeps bicubic from aliasing and costs little: Dhariwal & Nichol 2021, released code."""
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    covering = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    return centre_crop(image.resize(covering, Image.Resampling.BICUBIC), width, height)


def decode(image, args):
    """PIL image -> (H, W, C) uint8 pixels of --size, C = 1 with --gray, else 3; and notes of what that took.
    Raises whatever Pillow raises on a damaged file."""
    notes = []
    mode, turn = "L" if args.gray else "RGB", upright_turn(image)
    if image.mode != mode:
        notes.append(f"converted from {image.mode}")
    image = to_rgb(image).convert(mode)
    if turn is not None:
        notes.append("turned")
        image = image.transpose(turn)
    if args.crop:
        if image.width < args.crop or image.height < args.crop:
            notes.append("smaller than --crop")
        image = centre_crop(image, min(args.crop, image.width), min(args.crop, image.height))
    height, width = args.size
    if image.width < width or image.height < height:
        notes.append("enlarged")
    return np.asarray(fit(image, height, width)).reshape(height, width, -1), notes


# -- all pictures, once: the cache

def decode_chunk(pictures, indices, args):
    """-> for each index (pixels, notes), or (None, reason) where the picture is damaged."""
    results = []
    for i in indices:
        try:
            with pictures.open(i) as image:
                results.append(decode(image, args))
        except UnidentifiedImageError:
            results.append((None, "not an image"))
        except Exception as error:  # decoders meet broken bytes with errors of a dozen kinds, OSError to zlib.error
            results.append((None, sample.first_line(error)))
    return results


def decode_all(pictures, args):
    """Yield decode_chunk's results in order. Only a few chunks are in flight: memory does not grow with the data."""
    workers, count = min(os.cpu_count() or 1, 32), len(pictures.names)
    waiting = deque()
    with ThreadPoolExecutor(workers) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")             # remarks on odd metadata, without the file's name
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for start in range(0, count, CHUNK):
            waiting.append(pool.submit(decode_chunk, pictures, range(start, min(start + CHUNK, count)), args))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def write_npy_header(file, shape):
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, header)


def write_images(folder, pictures, args, say):
    """Decode all into folder: images.npy, labels.npy (if labelled) and report.json. Damaged ones are left out."""
    count, (height, width), channels = len(pictures.names), args.size, 1 if args.gray else 3
    good, damaged, notes, start = np.ones(count, bool), [], Counter(), time.monotonic()
    said = start
    with open(folder / "images.npy", "wb") as file:
        write_npy_header(file, (count, height, width, channels))
        for i, (pixels, remarks) in enumerate(decode_all(pictures, args)):
            if pixels is None:
                good[i] = False
                damaged.append([str(pictures.names[i]), remarks])
            else:
                file.write(pixels.tobytes())
                notes.update(remarks)
            if time.monotonic() - said > 10:
                said = time.monotonic()
                say(f"decoded {i + 1:,} of {count:,} images, {(i + 1) / (said - start):,.0f} a second")
        write_npy_header(file, (int(good.sum()), height, width, channels))      # numpy pads headers: as long as before
        file.flush()
        os.fsync(file.fileno())
    if pictures.labels is not None:
        np.save(folder / "labels.npy", pictures.labels[good])
    report = {"found": count, "shape": (channels, height, width), "classes": pictures.classes, "notes": notes,
              "damaged": damaged}
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


def drop_stale(cache):
    for folder in cache.glob("*.partial-*"):
        with suppress(FileNotFoundError):           # another process drops it too, or has just finished it
            if time.time() - max(path.stat().st_mtime for path in [folder, *folder.rglob("*")]) > STALE:
                shutil.rmtree(folder, ignore_errors=True)


def cached(args, key, size, build):
    """The folder under --cache for `key` (a list of plain values); where it is missing, build(folder) fills it first.

    It appears under its name only when complete: a killed run leaves a `.partial-` folder that nobody reads, and of two
    processes that build the same, the first to finish wins. `size` in bytes is checked against the free space."""
    digest = hashlib.sha256()
    for part in [CACHE_VERSION, *key]:
        digest.update(f"{part!r}\n".encode())
    cache = Path(args.cache)
    final = cache / f"{Path(args.data).stem}-{digest.hexdigest()[:16]}"
    if final.exists():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    drop_stale(cache)
    free = shutil.disk_usage(cache).free
    if size > free:
        raise OSError(f"--cache {cache} needs {size / 1e9:.1f} GB for the decoded data, "
                      f"but its disk has only {free / 1e9:.1f} GB free")
    with tempfile.TemporaryDirectory(prefix=f"{final.name}.partial-", dir=cache, ignore_cleanup_errors=True) as partial:
        complete = Path(partial) / "complete"
        complete.mkdir()
        build(complete)
        with suppress(OSError):                     # refused where another process was faster
            complete.rename(final)
    if not final.exists():
        raise OSError(f"--cache {cache}: the finished cache could not be renamed to {final}")
    return final


def cached_images(args, sources, count, load, say):
    """Data of the pictures that load() returns, from the cache where `sources` (names, sizes, times) are unchanged."""
    height, width = args.size
    size = count * height * width * (1 if args.gray else 3)
    key = [(args.size, args.crop, args.gray), *sources]
    folder = cached(args, key, size, lambda partial: write_images(partial, load(), args, say))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    damaged, found = report["damaged"], report["found"]
    shown = ", ".join(f"{name} ({reason})" for name, reason in damaged[:5])
    more = f" and {len(damaged) - 5:,} more" if len(damaged) > 5 else ""
    failures = f"{len(damaged):,} of {found:,} files could not be read: {shown}{more}"
    announce(args, "images", found - len(damaged), report["shape"], report["classes"], say, report["notes"])
    if damaged and (not args.skip_damaged or len(damaged) == found):
        shutil.rmtree(folder, ignore_errors=True)   # a file may be mended without a trace in its size and time
        raise ValueError(f"--data {args.data}: {failures}; repair or remove them, or give --skip-damaged")
    if damaged:
        say(f"{args.data}: {failures}; left out")
    labels = np.load(folder / "labels.npy") if report["classes"] else None
    return Data(np.load(folder / "images.npy", mmap_mode="r"), labels, report["classes"])


def announce(args, kind, count, shape, classes, say, notes=()):
    line = f"{args.data}: {count:,} {kind} of {'x'.join(map(str, shape))}, "
    if classes is None:
        line += "unlabelled"
    else:
        names = classes if len(classes) <= 10 else [*classes[:3], "...", classes[-1]]
        line += f"{len(classes):,} class{'es' * (len(classes) > 1)} ({', '.join(names)})"
    say("; ".join([line, *(f"{notes[note]:,} {note}" for note in sorted(notes))]))


# -- built-in digits

@lru_cache
def glyph(digit, side):
    """Mask of one digit in Pillow's own font, upright in the middle of (side, side) and about 0.75 * side high."""
    font = ImageFont.load_default(side)
    mask, bold = Image.new("L", (side, side)), side / 24
    left, top, right, bottom = font.getbbox(str(digit), stroke_width=bold)
    corner = (side - left - right) / 2, (side - top - bottom) / 2
    ImageDraw.Draw(mask).text(corner, str(digit), fill=255, font=font, stroke_width=bold)
    return mask


def draw_digit(digit, numbers, height, width):
    """RGB picture of a dark digit on light ground or the reverse, of any hues, drawn from 13 numbers in [0, 1)."""
    across, down, size, turn, hue, other_hue, a, b, c, d, shade_x, shade_y, swap = numbers
    dark = colorsys.hsv_to_rgb(hue, 0.4 + 0.5 * a, 0.1 + 0.3 * b)
    light = colorsys.hsv_to_rgb(other_hue, 0.1 + 0.3 * c, 0.85 + 0.15 * d)
    ground, ink = (dark, light) if swap < 0.5 else (light, dark)
    shade = (255 - 35 * abs(shade_y - np.arange(height)[:, None] / height)
             - 35 * abs(shade_x - np.arange(width) / width))                      # (H, W)
    image = Image.fromarray((shade[..., None] * ground).astype(np.uint8))

    side, scale, angle = min(height, width), 0.9 + 0.15 * size, math.radians(12 * turn - 6)
    reach = 0.45 * scale * side                     # from the middle of the digit to its ends
    x, y = reach + (width - 2 * reach) * across, reach + (height - 2 * reach) * down
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    to_glyph = (cos, sin, side / 2 - cos * x - sin * y, -sin, cos, side / 2 + sin * x - cos * y)
    mask = glyph(digit, side).transform(image.size, Image.Transform.AFFINE, to_glyph, Image.Resampling.BICUBIC)
    image.paste(tuple(round(255 * channel) for channel in ink), mask=mask)
    return image


def load_digits(args, say):
    numbers = np.random.default_rng(args.seed).uniform(size=(DIGIT_COUNT, 13))
    pictures = Pictures(range(DIGIT_COUNT), lambda i: draw_digit(i % 10, numbers[i].tolist(), *args.size),
                        np.arange(DIGIT_COUNT) % 10, [str(digit) for digit in range(10)])
    return cached_images(args, [("digits", args.seed)], DIGIT_COUNT, lambda: pictures, say)


# -- CIFAR-10 (Krizhevsky 2009)

class NumpyStandIn:
    """Keeps what a pickle says of a numpy object and does nothing with it: numpy itself would trust its every word."""
    def __init__(self, *_):
        self.state = None

    def __setstate__(self, state):
        self.state = state


class BatchUnpickler(pickle.Unpickler):
    """Reads CIFAR-10 batches and refuses every pickle that asks for anything else."""
    ALLOWED = {"numpy.dtype": NumpyStandIn, "numpy.ndarray": NumpyStandIn,
               "numpy.core.multiarray._reconstruct": NumpyStandIn, "numpy._core.multiarray._reconstruct": NumpyStandIn,
               "_codecs.encode": lambda text, encoding: text.encode("latin1")}

    def find_class(self, module, name):
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"its pickle asks for {module}.{name}, which is refused")
        return self.ALLOWED[f"{module}.{name}"]


def unpickle(raw):
    content = BatchUnpickler(io.BytesIO(raw), encoding="bytes").load()
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}


def read_batch(name, raw):
    """One batch file, binary or pickled -> (n, 3072) uint8 pixels, channel by channel, and (n,) labels."""
    if name.endswith(".bin"):
        records = np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3072)
        pixels, labels = records[:, 1:], records[:, 0]
    else:
        batch = unpickle(raw)
        _, shape, _, fortran, content = batch["data"].state
        pixels = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
        labels = np.array(batch["labels"])
    if len(labels) == 0 or pixels.shape != (len(labels), 3072) or not np.isin(labels, range(10)).all():
        raise ValueError(f"{name} holds pixels {pixels.shape}, labels {labels.shape}, not (n, 3072) and n from 0 to 9")
    return pixels, labels.astype(np.int64)


def read_cifar10_files(path):
    """Folder or archive -> {file name: bytes} of the training batches and the class names."""
    wanted = {f"data_batch_{i}{end}" for i in range(1, 6) for end in ("", ".bin")}
    wanted |= {"batches.meta", "batches.meta.txt"}
    if path.is_dir():
        return {file.name: file.read_bytes() for file in path.iterdir() if file.name in wanted}
    with tarfile.open(path) as tar:
        return {Path(member.name).name: tar.extractfile(member).read() for member in tar
                if member.isfile() and Path(member.name).name in wanted}


def read_cifar10(path):
    """Folder or archive -> pictures, labels and class names of the whole training set; anything else raises."""
    files = read_cifar10_files(path)
    end = ".bin" if "data_batch_1.bin" in files else ""
    names = [f"data_batch_{i}{end}" for i in range(1, 6)]
    if missing := [name for name in names if name not in files]:
        raise ValueError(f"{', '.join(missing)} of the five training batches missing")
    pixels, labels = zip(*[read_batch(name, files[name]) for name in names])
    if len({*map(len, labels)}) > 1:
        raise ValueError(f"its batches hold {', '.join(str(len(batch)) for batch in labels)} images, not equally many")
    classes = CIFAR10_CLASSES
    if "batches.meta" in files:
        names = unpickle(files["batches.meta"])["label_names"]
        classes = [name.decode() if isinstance(name, bytes) else name for name in names]
    elif "batches.meta.txt" in files:
        classes = files["batches.meta.txt"].decode().split()
    if len(classes) != 10:
        raise ValueError(f"it names {len(classes)} classes, not 10")
    images = np.concatenate(pixels).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return array_pictures(images, np.concatenate(labels), classes)


def check_cifar10(path, say):
    official = CIFAR10_MD5.get(path.name)
    if official and sample.checksum(path, "md5") != official:
        say(f"{path} is not the official archive (its md5 is not {official}): used if its batches are whole")
    try:
        return read_cifar10(path)
    except Exception as error:      # a torn archive or pickle fails in a dozen ways
        raise ValueError(f"{path} is not a whole CIFAR-10 ({error}): remove it, and it is fetched again") from None


def find_cifar10(folder):
    """The first of the four official forms in folder, or folder itself if it is one; else None."""
    for name in ["cifar-10-batches-py", "cifar-10-batches-bin", *CIFAR10_MD5]:
        if (folder / name).exists():
            return folder / name
    return folder if list(folder.glob("data_batch_[1-5]*")) else None


def fetch_cifar10(folder, say):
    name = "cifar-10-python.tar.gz"
    say(f"fetching {CIFAR10_URL} (170 MB) into {folder}")
    sample.fetch(CIFAR10_URL, folder / name, CIFAR10_MD5[name], "--data-dir DIR", "md5")
    return folder / name


def load_cifar10(args, say):
    folder = Path(args.data_dir)
    path = find_cifar10(folder) or fetch_cifar10(folder, say)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return cached_images(args, [source(file) for file in files], 50_000, lambda: check_cifar10(path, say), say)


# -- folders and zips of images

def source(path):
    """What tells that a file has not changed since it was cached."""
    stat = os.stat(path)
    return str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns


def is_picture(name):
    """Whether a path, relative and with slashes, is an image's; hidden files and folders are not."""
    path = PurePosixPath(name)
    return path.suffix.lower() in EXTENSIONS and not any(part.startswith(".") for part in path.parts)


def label_by_folder(args, names):
    """Sorted image paths -> labels and classes: the first-level folders; (None, None) where there are none."""
    if not names:
        raise ValueError(f"--data {args.data} holds no images: the files accepted are {', '.join(sorted(EXTENSIONS))}")
    loose = [name for name in names if "/" not in name]
    if len(loose) == len(names):
        return None, None
    if loose:
        raise ValueError(f"--data {args.data} holds images both in class folders and outside them ({loose[0]}): "
                         "put all into folders, or all into the root")
    folders = [name.split("/", 1)[0] for name in names]
    classes = sorted(set(folders))
    label_of = {name: label for label, name in enumerate(classes)}
    return np.array([label_of[folder] for folder in folders]), classes


def stop(error):
    raise error


def load_folder(args, say):
    root, entries = Path(args.data), []
    for folder, _, files in os.walk(root, followlinks=True, onerror=stop):
        prefix = Path(folder).relative_to(root).as_posix()
        for file in files:
            name = file if prefix == "." else f"{prefix}/{file}"
            if is_picture(name):
                path = os.path.join(folder, file)
                stat = os.stat(path) if os.path.exists(path) else os.lstat(path)        # a link to nowhere is a damaged file
                entries.append((name, stat.st_size, stat.st_mtime_ns))
    entries.sort()
    names = [entry[0] for entry in entries]
    pictures = Pictures(names, lambda i: Image.open(root / names[i], formats=FORMATS), *label_by_folder(args, names))
    return cached_images(args, [str(root.resolve()), *entries], len(names), lambda: pictures, say)


def load_zip(args, say):
    try:
        archive = zipfile.ZipFile(args.data)
    except zipfile.BadZipFile as error:
        raise ValueError(f"--data {args.data} is torn or not a zip ({error})") from None
    with archive:
        names = sorted(name for name in archive.namelist() if is_picture(name))
        pictures = Pictures(names, lambda i: Image.open(io.BytesIO(archive.read(names[i])), formats=FORMATS),
                            *label_by_folder(args, names))
        return cached_images(args, [source(args.data)], len(names), lambda: pictures, say)


# -- arrays

def map_npy(path, offset=0):
    """The array of an .npy file, or of one that begins `offset` bytes into another file: mapped, not read."""
    form = np.lib.format
    with open(path, "rb") as file:
        file.seek(offset)
        version = form.read_magic(file)
        shape, fortran, dtype = (form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0)(file)
        if dtype not in (np.uint8, np.float16, np.float32) or 0 in shape:
            raise ValueError(f"it holds {dtype} of shape {shape}; images are uint8, latents float16 or float32")
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def map_npz(args):
    """An .npz of `arr_0` or `images`, and perhaps `arr_1` or `labels` -> images, mapped, and labels or None."""
    with zipfile.ZipFile(args.data) as archive:
        members = {PurePosixPath(info.filename).stem: info for info in archive.infolist()}
        images, labels = members.get("arr_0", members.get("images")), members.get("arr_1", members.get("labels"))
        if images is None:
            raise ValueError(f"it holds {', '.join(members)}, but no arr_0 or images")
        if labels is not None:
            with archive.open(labels) as file:
                labels = np.lib.format.read_array(file, allow_pickle=False)
    if images.compress_type == zipfile.ZIP_STORED:
        with open(args.data, "rb") as file:         # a member's header: 30 bytes, then its name and an extra field
            file.seek(images.header_offset + 26)
            lengths = np.frombuffer(file.read(4), "<u2")
        return map_npy(args.data, images.header_offset + 30 + int(lengths.sum(dtype=int))), labels

    def unpack(folder):
        with zipfile.ZipFile(args.data) as archive, archive.open(images) as packed:
            with open(folder / "unpacked.npy", "wb") as file:
                shutil.copyfileobj(packed, file)

    return map_npy(cached(args, ["unpacked", source(args.data)], images.file_size, unpack) / "unpacked.npy"), labels


def array_pictures(images, labels, classes):
    """(N, H, W) or (N, H, W, C) uint8 -> Pictures; C = 1, 2, 3, 4 are L, LA, RGB, RGBA."""
    images = images[..., 0] if images.shape[3:] == (1,) else images
    return Pictures(range(len(images)), lambda i: Image.fromarray(np.ascontiguousarray(images[i])), labels, classes)


def open_array(args):
    """.npz or .npy -> array, mapped; (N,) int64 labels and the classes, named by number, or None and None."""
    path = Path(args.data)
    beside = path.with_name(f"{path.stem}_labels.npy")
    if path.suffix.lower() == ".npz":
        array, labels = map_npz(args)
    else:
        array, labels = map_npy(path), np.load(beside) if beside.exists() else None
    if labels is None:
        return array, None, None
    integers = labels.shape == array.shape[:1] and labels.dtype.kind in "iu"
    if not integers or not 0 <= labels.min() <= labels.max() < MAX_CLASSES:
        raise ValueError(f"its labels are {labels.dtype} of shape {labels.shape}, not {len(array)} integers "
                         f"from 0 to below {MAX_CLASSES}")
    return array, labels.astype(np.int64), [str(label) for label in range(labels.max() + 1)]


def load_array(args, say):
    try:
        array, labels, classes = open_array(args)
    except sample.UNREADABLE as error:
        raise ValueError(f"--data {args.data} is not an array to train on: {error}") from None
    if array.dtype.kind == "f":
        if array.ndim != 4 or array.shape[2:] != args.size or args.gray or args.crop:
            raise ValueError(f"--data {args.data} holds floats of shape {array.shape}: latents are (N, C, H, W), "
                             f"of --size {args.size[0]}x{args.size[1]}, and take neither --gray nor --crop")
        if not np.isfinite(array[::max(1, len(array) // 1000)]).all():
            raise ValueError(f"--data {args.data} holds latents that are not finite")
    else:
        array = array[..., None] if array.ndim == 3 else array
        if array.ndim != 4 or array.shape[3] > 4:
            raise ValueError(f"--data {args.data} holds uint8 of shape {array.shape}: "
                             "images are (N, H, W) or (N, H, W, C), C up to 4")
        if args.crop or array.shape[1:] != (*args.size, 1 if args.gray else 3):
            key = [source(args.data), None if labels is None else zlib.crc32(labels)]
            return cached_images(args, key, len(array), lambda: array_pictures(array, labels, classes), say)
    data = Data(array, labels, classes)
    announce(args, "latents" if data.latents else "images", len(array), data.shape, classes, say)
    return data


# name -> loader(args, say), and whether its pictures may be mirrored. To try a new source, write a loader and add a line.
SOURCES = {"digits": (load_digits, False), "cifar10": (load_cifar10, True)}


def load_data(args, say=print):
    """--data -> Data, every image decoded once into --cache; say(line) prints what was found.

    A user's mistake is a ValueError or OSError of one line; so is a damaged file, unless --skip-damaged."""
    path = Path(args.data)
    if args.data in SOURCES:
        return SOURCES[args.data][0](args, say)
    if path.is_dir():
        return load_folder(args, say)
    loaders = {".zip": load_zip, ".npz": load_array, ".npy": load_array}
    if not path.is_file() or path.suffix.lower() not in loaders:
        raise ValueError(f"--data {args.data} is not there or of no known kind: give {', '.join(SOURCES)}, a folder or .zip "
                         f"of images ({', '.join(sorted(EXTENSIONS))}), or an .npz or .npy array")
    return loaders[path.suffix.lower()](args, say)


# ---------------------------------------------------------------------------------------------------------------------
# Presets: published settings, as flags. A flag given beside --preset wins.

UVIT = dict(backbone="uvit", skip_scaling="none", time_mlp=False, prediction="eps", weighting="snr", schedule="vp", lr=2e-4,
            weight_decay=0.03, betas=(0.99, 0.99), warmup=5000, ema=0.9999, clip=math.inf, label_dropout=0.0)
UVIT_LATENT = UVIT | dict(schedule="scaled-linear", size=(32, 32), patch=2, batch_size=1024, label_dropout=0.15)
MIN_SNR_VIT = dict(backbone="vit", skip_scaling="none", prediction="x0", weighting="min-snr", gamma=5.0, schedule="cosine", lr=1e-4,
                   weight_decay=0.03, betas=(0.99, 0.99), warmup=0, ema=0.9999, clip=math.inf, label_dropout=0.15)
DDPM = dict(backbone="unet", skip_scaling="none", channels=128, blocks=2, attention=(16,), heads=1, head_channels=None, dropout=0.1,
            scale_shift_norm=False, resblock_updown=False, prediction="eps", weighting="snr", schedule="linear", lr=2e-4,
            weight_decay=0.0, betas=(0.9, 0.999), warmup=5000, ema=0.9999, clip=1.0, batch_size=128, label_dropout=0.0)

PRESETS = {
    "digits": {},                                           # the defaults of the flags
    # Ho et al. 2020, Appendix B: 35.7M parameters. Attention of one head, as there
    "cifar10-unet": DDPM | dict(data="cifar10", size=(32, 32), channel_mult=(1, 2, 2, 2), unconditional=True, steps=800_000),
    # Bao et al. 2023, Table 5 and released configs: U-ViT-S, 44M parameters
    "cifar10-uvit-s": UVIT | dict(data="cifar10", size=(32, 32), patch=2, width=512, depth=12, heads=8, betas=(0.99, 0.999),
                                  warmup=2500, batch_size=128, unconditional=True, steps=500_000),
    # Song et al. 2021 (DDIM), celeba: the same UNet with one level more
    "celeba64-unet": DDPM | dict(data=None, size=(64, 64), crop=140, channel_mult=(1, 2, 2, 2, 4), unconditional=True, steps=500_000),
    "celeba64-uvit-s": UVIT | dict(data=None, size=(64, 64), crop=140, patch=4, width=512, depth=12, heads=8, batch_size=128,
                                   unconditional=True, steps=500_000),
    # Dhariwal & Nichol 2021, Table 11: 296M parameters with learned variances, which are not trained here
    "imagenet64-unet": DDPM | dict(data=None, size=(64, 64), channels=192, channel_mult=(1, 2, 3, 4), blocks=3, attention=(32, 16, 8),
                                   head_channels=64, scale_shift_norm=True, resblock_updown=True, schedule="cosine", lr=3e-4,
                                   warmup=0, clip=math.inf, batch_size=2048, steps=540_000),
    # Bao et al. 2023, Table 5: U-ViT-M and -L
    "imagenet64-uvit-m": UVIT | dict(data=None, size=(64, 64), patch=4, width=768, depth=16, heads=12, lr=3e-4, batch_size=1024,
                                     steps=300_000),
    "imagenet64-uvit-l": UVIT | dict(data=None, size=(64, 64), patch=4, width=1024, depth=20, heads=16, lr=3e-4, batch_size=1024,
                                     steps=300_000),
    # Hang et al. 2023, Section 4.1
    "imagenet64-vit-l": MIN_SNR_VIT | dict(data=None, size=(64, 64), patch=4, width=1024, depth=21, heads=16, batch_size=1024,
                                           steps=800_000),
    "imagenet256-uvit-l": UVIT_LATENT | dict(data=None, width=1024, depth=20, heads=16, steps=300_000),
    "imagenet256-uvit-h": UVIT_LATENT | dict(data=None, width=1152, depth=28, heads=16, final_conv=False, steps=500_000),
    "imagenet256-vit-b": MIN_SNR_VIT | dict(data=None, size=(32, 32), patch=2, width=768, depth=12, heads=12, batch_size=256,
                                            steps=1_000_000),
    "imagenet256-vit-xl": MIN_SNR_VIT | dict(data=None, size=(32, 32), patch=2, width=1152, depth=28, heads=16, batch_size=256,
                                             steps=7_000_000),
}


# ---------------------------------------------------------------------------------------------------------------------
# Flags

def size(text):
    """32, or 32x64 for height and width.   -> (height, width)"""
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be pixels like 32, or HEIGHTxWIDTH like 32x64, not {text}")
    return int(parts[0]), int(parts[-1])


def build_parser():
    p = sample.Parser(prog="train.py", description=__doc__.splitlines()[0])
    on_off = argparse.BooleanOptionalAction
    add = p.add_argument_group("data").add_argument
    add("--preset", choices=PRESETS, default="digits", help="a published setting; flags beside it win", metavar="NAME")
    add("--data", default="digits", help=f"{', '.join(SOURCES)}, or a path: folder or zip of images, .npz, .npy")
    add("--data-dir", default="cifar10", metavar="DIR", help="where CIFAR-10 lies, or is put")
    add("--size", type=size, default="32", help="pixels: 32, or 32x64 for height x width")
    add("--crop", type=number("[1, 1e6]", int), help="first cut out this many pixels from the centre (CelebA: 140)")
    add("--gray", action=on_off, default=False, help="one channel instead of three")
    add("--flip", action=on_off, default=None, help="mirror half of the images (default: yes, but not digits or latents)")
    add("--unconditional", action=on_off, default=False, help="ignore the labels")
    add("--cache", default="cache", metavar="DIR", help="where decoded images are kept")
    add("--skip-damaged", action=on_off, default=False, help="leave out files that cannot be read, instead of stopping")
    add("--check-data", action=on_off, default=False, help="say what was found and stop")
    add = p.add_argument_group("model").add_argument
    add("--backbone", choices=("unet", "uvit", "vit"), default="unet", help="network")
    add("--skip-scaling", choices=MODES, help="coefficients of the long skips (default: ls; none for vit, which has no long skips)")
    add("--kappa", type=number("(0, 1]"), default=0.7, help="of --skip-scaling cs: skip i, 0 the outermost, is scaled by kappa^i")
    add("--heads", type=number("[1, 1e6]", int), default=4, help="attention heads")
    add("--channels", type=number("[1, 1e6]", int), default=16, help="unet: width of the first level")
    add("--channel-mult", type=listed(number("[1, 1e6]", int)), default="1,2,4", metavar="M,M,..", help="unet: width of each level, times --channels")
    add("--blocks", type=number("[1, 1e6]", int), default=1, help="unet: residual blocks of a level")
    add("--attention", type=listed(number("[1, 1e6]", int)), default="8", metavar="H,H,..", help="unet: feature-map heights with attention")
    add("--head-channels", type=number("[1, 1e6]", int), help="unet: channels of a head, instead of --heads")
    add("--dropout", type=number("[0, 1)"), default=0.0, help="unet: share of features dropped in training")
    add("--scale-shift-norm", action=on_off, default=True, help="unet: the embedding scales and shifts (ADM) or adds (DDPM)")
    add("--resblock-updown", action=on_off, default=False, help="unet: resize inside residual blocks (ADM) or by convolutions")
    add("--patch", type=number("[1, 1e6]", int), default=4, help="uvit, vit: pixels of a patch's side")
    add("--width", type=number("[1, 1e6]", int), default=192, help="uvit, vit: features of a token")
    add("--depth", type=number("[1, 1e6]", int), default=6, help="uvit, vit: blocks; uvit has 2 * (depth // 2) + 1")
    add("--time-mlp", action=on_off, default=False, help="uvit: a small network on the timestep")
    add("--final-conv", action=on_off, default=True, help="uvit: a 3x3 convolution over the finished picture")
    add("--weights", metavar="FILE", help="start from published weights of the same architecture")
    add("--attention-order", choices=("new", "legacy"), default="new", help="qkv layout of --weights from guided-diffusion")
    add = p.add_argument_group("diffusion").add_argument
    add("--prediction", choices=("x0", "eps", "v"), default="x0", help="what the network says")
    add("--schedule", choices=SCHEDULES, default="cosine", help="noise schedule")
    add("--zero-terminal-snr", action=on_off, default=False, help="rescale the schedule to end in pure noise")
    add("--weighting", choices=(*WEIGHTINGS, *PARETO_SOLVERS), default="min-snr", help="loss weight over timesteps, stated for x0")
    add("--gamma", type=number("(0, inf)"), default=5.0, help="of min-snr and soft-min-snr; in the papers max-snr and p2 have 1")
    add("--pareto-every", type=number("[1, 1e12]", int), default=100, help="ugd, frank-wolfe: steps between solutions for the weights")
    add("--pareto-bins", type=number("[1, 1000]", int), default=20, help="ugd, frank-wolfe: bins of timesteps, each with one weight")
    add("--pareto-regularization", type=number("[0, inf)"), default=0.0, help="ugd, frank-wolfe: lambda of lambda |w|^2")
    add("--label-dropout", type=number("[0, 1)"), default=0.1, help="share of labels withheld, for guidance; 0 = the model needs labels")
    add = p.add_argument_group("optimisation").add_argument
    add("--steps", type=number("[1, 1e12]", int), default=720, help="optimiser steps in all")
    add("--batch-size", type=number("[1, 1e6]", int), default=32, help="images of a step, over all processes")
    add("--micro-batch", type=number("[1, 1e6]", int), help="images that a process computes at once (default: all of its share)")
    add("--lr", type=number("(0, inf)"), default=2e-3, help="learning rate of AdamW")
    add("--warmup", type=number("[0, 1e12]", int), default=50, help="steps over which the learning rate rises")
    add("--weight-decay", type=number("[0, inf)"), default=0.01, help="of AdamW, on matrices alone")
    add("--betas", type=listed(number("[0, 1)")), default="0.9,0.99", metavar="B1,B2", help="of AdamW")
    add("--clip", type=number("(0, inf]"), default=1.0, help="largest gradient norm, inf = off")
    add("--ema", type=number("[0, 1)"), default=0.99, help="decay of the averaged weights; they start with a smaller one")
    add = p.add_argument_group("run").add_argument
    add("--out", help="run folder (default: runs/ and the preset's name, or the data's)")
    add("--resume", action=on_off, default=False, help="go on from the run folder's checkpoint, with its flags")
    add("--seed", type=number("[0, 1e18]", int), default=0, help="of everything random")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="where to compute")
    add("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="of products; auto: bf16 where native, else fp32")
    add("--compile", action=on_off, default=False, help="torch.compile the network")
    add("--checkpointing", action=on_off, default=False, help="recompute activations in the backward pass: less memory, slower")
    add("--log-every", type=number("[1, 1e12]", int), default=50, help="steps between rows of log.csv")
    add("--probe", type=number("[0, 1e12]", int), default=0, metavar="K", help="steps between measurements of each long skip's norms, gradients and kappa into "
        "log.csv and curves.png, 0 = none")
    add("--sample-every", type=number("[0, 1e12]", int), default=360, help="steps between sample grids; 0 = none, not at the end either")
    add("--save-every", type=number("[1, 1e12]", int), default=360, help="steps between checkpoints")
    add("--fid-every", type=number("[0, 1e12]", int), default=0, help="steps between measurements of FID against the training data into fid.csv, 0 = none")
    add("--fid-count", type=number("[2, 1e9]", int), default=10_000, help="images drawn for each, with 35 model calls for an image")
    add("--features", metavar="NETWORK", help=f"of --fid-every: TorchScript file (default: {sample.INCEPTION} in --cache, fetched if need be)")
    add("--compare", nargs="+", metavar="RUN", help="draw the curves of these runs into one picture, --out, and stop")
    return p


# What a resumed run may change; anything else would make another run of it
MAY_CHANGE = {"data", "steps", "lr", "log_every", "sample_every", "save_every", "fid_every", "fid_count", "features", "micro_batch", "device",
              "compile", "checkpointing", "cache", "data_dir", "check_data", "out", "resume", "compare"}
UNET_FLAGS = {"channels", "channel_mult", "blocks", "attention", "head_channels", "dropout", "scale_shift_norm", "resblock_updown"}
UVIT_FLAGS = {"time_mlp", "final_conv"}
VIT_FLAGS = {"patch", "width", "depth"}


def preset_args(preset, given=()):
    """The flags' defaults, then the preset's, then those given.   -> argparse.Namespace"""
    args = argparse.Namespace(**{**vars(build_parser().parse_args([])), **PRESETS[preset], "preset": preset, **dict(given)})
    args.skip_scaling = args.skip_scaling or ("none" if args.backbone == "vit" else "ls")
    if "heads" in dict(given) and "head_channels" not in dict(given):
        args.head_channels = None                           # one of the two describes the heads, and the one given wins
    return args


def parse_args(argv=None):
    """The command line, completed by the preset or, with --resume, by the flags that the run began with.   -> Namespace"""
    parser, untouched = build_parser(), object()
    flags = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([])), untouched)))
    given = {name: value for name, value in vars(flags).items() if value is not untouched}
    if given.get("data", "digits") not in SOURCES:
        given["data"] = str(Path(given["data"]).absolute())         # a run is resumed, and asked by the lessons, from other folders, too
    args = preset_args(given.get("preset", "digits"), given)
    if args.out is None:
        args.out = "curves.png" if args.compare else f"runs/{Path(str(args.data)).resolve().stem if 'data' in given else args.preset}"
    if args.resume:
        saved = vars(preset_args("digits")) | sample.load_checkpoint(args.out)["config"]["flags"]        # flags newer than the run
        changed = [name for name in given if name not in MAY_CHANGE and given[name] != saved[name]]
        if changed:
            found = ", ".join(f"--{name.replace('_', '-')} {saved[name]}" for name in changed)
            raise ValueError(f"--resume: the run in {args.out} has {found}; leave that out, or start another run with another --out")
        args = argparse.Namespace(**{**vars(args), **saved, **given, "out": args.out, "resume": True})
    check_args(args, given)
    return args


def uses_gamma(weighting):
    snr = torch.logspace(-3, 3, 7)
    return weighting in WEIGHTINGS and not WEIGHTINGS[weighting](snr, 1.0).equal(WEIGHTINGS[weighting](snr, 2.0))


def uses_kappa(skip_scaling):
    return skip_scaling in CONSTANTS and CONSTANTS[skip_scaling](1, 0.5) != CONSTANTS[skip_scaling](1, 0.6)


def check_args(args, given):
    """One line for flags that do not go together, before any work starts.   ValueError"""
    other = {"unet": UVIT_FLAGS | VIT_FLAGS, "uvit": UNET_FLAGS, "vit": UNET_FLAGS | UVIT_FLAGS}[args.backbone]
    wrong = [name for name in given if name in other]
    if wrong:
        raise ValueError(f"--{wrong[0].replace('_', '-')} is not a flag of --backbone {args.backbone}")
    rules = [("gamma", uses_gamma(args.weighting), f"--weighting {args.weighting}, which has no gamma"),
             ("kappa", uses_kappa(args.skip_scaling), f"--skip-scaling {args.skip_scaling}, which has no kappa"),
             *((f"pareto_{what}", args.weighting in PARETO_SOLVERS, f"--weighting {args.weighting}: its weights are not solved for")
               for what in ("every", "bins", "regularization")),
             ("attention_order", args.weights, "a fresh start: it is of --weights"),
             *((name, args.fid_every, "a run without --fid-every") for name in ("features", "fid_count")),
             ("heads", not args.head_channels, f"--head-channels {args.head_channels}"),
             *((name, not args.compare, "--compare, which only draws") for name in given if name not in ("compare", "out")),
             ("label_dropout", not args.unconditional, "--unconditional"),
             ("data_dir", args.data in SOURCES and args.data != "digits", f"--data {args.data}"),
             ("skip_damaged", Path(args.data or "").suffix.lower() not in (".npz", ".npy"), f"--data {args.data}, an array")]
    for name, fine, why in rules:
        if name in given and not fine:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with {why}")
    heights = [args.size[0] >> level for level in range(len(args.channel_mult))]
    if "attention" in given and not set(args.attention) <= set(heights):
        raise ValueError(f"--attention must be from {', '.join(map(str, heights))}, the heights of the levels, not {args.attention}")
    if args.backbone == "vit" and args.skip_scaling != "none":
        raise ValueError(f"--skip-scaling {args.skip_scaling}: --backbone vit has no long skips to scale")
    if args.probe and (args.backbone == "vit" or args.backbone == "uvit" and args.depth < 2):
        raise ValueError(f"--probe {args.probe}: --backbone {args.backbone} of --depth {args.depth} has no long skips to measure")
    if args.probe and args.compile:
        raise ValueError(f"--probe {args.probe} cannot look into a network that --compile has fused: leave one of them out")
    if not args.channel_mult:
        raise ValueError("--channel-mult must be one number for each level")
    if len(args.betas) != 2:
        raise ValueError(f"--betas must be two numbers like 0.9,0.999, not {args.betas}")
    if args.compare and Path(args.out).suffix != ".png":
        raise ValueError(f"--out {args.out}: --compare draws a picture, a .png")
    if args.data is None:
        raise ValueError(f"--data must be digits, cifar10 or a path: the images of preset {args.preset} must be given")


def model_config(args, shape, num_classes):
    """The backbone that the flags describe, for tensors of shape (C, H, W).   -> {"class": name, argument: value}"""
    config = {"class": {"unet": "UNet", "uvit": "UViT", "vit": "ViT"}[args.backbone], "in_channels": shape[0], "size": tuple(shape[1:]),
              "heads": args.heads, "num_classes": num_classes, "null_label": args.label_dropout > 0}
    own = sorted({"unet": UNET_FLAGS, "uvit": VIT_FLAGS | UVIT_FLAGS, "vit": VIT_FLAGS}[args.backbone])
    if args.backbone != "vit":
        own += ["skip_scaling", "kappa"]
    return config | {name: getattr(args, name) for name in own}


# ---------------------------------------------------------------------------------------------------------------------
# The run

def load_data_once(args, say):
    """Data, decoded into the cache by the first process of the machine while the others wait, and fail if it does."""
    rank, cpu, failure = dist.get_rank() if dist.is_initialized() else 0, torch.device("cpu"), [None]
    if rank > 0:
        dist.broadcast_object_list(failure, 0, device=cpu)
        if failure[0]:
            raise ValueError(failure[0])
    try:
        data = load_data(args, say if rank == 0 else lambda line: None)
    except (ValueError, OSError) as error:
        failure = [str(error)]
        raise
    finally:
        if rank == 0 and dist.is_initialized():
            dist.broadcast_object_list(failure, 0, device=cpu)
    if args.unconditional:
        data = Data(data.images, None, None)
    if args.flip is None:
        args.flip = SOURCES.get(args.data, (None, True))[1] and not data.latents
    if args.flip and data.latents:
        raise ValueError("--flip: the latents of a mirrored image are not its mirrored latents; leave it out")
    return data


def learning_rate(args, step):
    """Linear warm-up over the first steps, then constant, as in both papers."""
    return args.lr * min(1.0, (step + 1) / max(args.warmup, 1))


def duration(seconds):
    """65 -> 1m05s"""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{seconds:02d}s"


def prepare_fid(args, data, device, batch_size, rank, processes):
    """For --fid-every: the network of features and the statistics of the training data.   ValueError: latents are no images"""
    if data.latents:
        raise ValueError("--fid-every measures images, and this data is latents: take python sample.py RUN --fid ... --decoder FILE")
    network = sample.FeatureNetwork(args.features, args.cache, device)
    reference = sample.known_statistics(data.images, network, args.cache, batch_size, rank, processes)
    if rank == 0:
        sample.warn_of_few(args.fid_count, len(reference[0]))
    return network, reference[:2]


def build(args, say):
    """Everything that a run consists of, from the flags.   -> SimpleNamespace; with --check-data, None"""
    device = sample.pick_device(args.device)
    rank, processes = sample.join_processes(device)
    dtype = sample.pick_precision(args.precision, device)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")      # torch.compile's choice
    if args.compile and device.type == "cpu" and not shutil.which(compiler):
        raise ValueError(f"--compile needs the C++ compiler {compiler}, which is not there; the variable CXX may name another")
    share = args.batch_size // processes                                # images of a process in each step
    if args.batch_size % processes or share % (args.micro_batch or share):
        raise ValueError(f"--batch-size {args.batch_size} must be a multiple of the number of processes, {processes}, and each "
                         f"one's share a multiple of --micro-batch {args.micro_batch or share}")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file, and a run needs a folder")
    if not (args.resume or args.check_data):
        refuse_second_start(out)
        if out.is_dir() and any(out.iterdir()) and not (out / "config.json").exists():
            raise ValueError(f"--out {out} is a folder with other things in it: choose another")
    data = load_data_once(args, say)
    if not (args.resume or args.unconditional or data.classes) and args.label_dropout != preset_args(args.preset).label_dropout:
        raise ValueError(f"--label-dropout has no effect on --data {args.data}, which has no labels")
    if args.check_data:
        return None
    fid = prepare_fid(args, data, device, share, rank, processes) if args.fid_every else None
    classes = data.classes or []
    process = {"schedule": args.schedule, "prediction": args.prediction, "zero_terminal_snr": args.zero_terminal_snr}
    config = {"flags": vars(args), "model": model_config(args, data.shape, len(classes) or None), "diffusion": process,
              "data": {"shape": tuple(data.shape), "classes": classes, "latents": data.latents, "images": len(data.images),
                       "checksum": data.checksum}}
    diffusion = Diffusion(**process)
    weights = torch.zeros(diffusion.timesteps)                          # solved for at the first step, or:
    if args.weighting in WEIGHTINGS:
        weights = loss_weight(diffusion.snr, args.weighting, args.gamma, args.prediction)
    torch.manual_seed(args.seed)
    model = sample.build_model(config["model"])
    if args.weights:
        sample.fill_published(model, sample.read_weights(args.weights), args.attention_order)
    model.checkpointing = args.checkpointing
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)        # the same run, bit for bit
        torch.set_float32_matmul_precision("high")                      # TF32
        torch.backends.cudnn.allow_tf32 = True
        model = model.to(memory_format=torch.channels_last)
    model = model.to(device)
    probed = 1 + len(PROBED) * len(model.decoder) if args.probe else 0
    window = torch.zeros(WINDOW_SIZE + probed, device=device)
    # The average goes on requiring gradients, though it gets none: only such weights does autocast cast once for many calls
    return SimpleNamespace(
        args=args, out=out, config=config, device=device, rank=rank, processes=processes, data=data, fid=fid,
        diffusion=diffusion, weights=weights.float().to(device),
        error_scale=CHANGE_OF_VARIABLE[args.prediction](diffusion.snr).float().to(device), window=window,
        columns=[*COLUMNS, *probe_row(window, args.skip_scaling not in CONSTANTS)] if args.probe else COLUMNS,
        autocast=lambda: sample.autocast(device, dtype), dtype=dtype, share=share,
        model=model, ema=copy.deepcopy(model).eval(), optimizer=make_optimizer(model, args, device),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16))


def refuse_second_start(out):
    """ValueError: the folder holds a run, which a fresh start would erase."""
    if (out / "checkpoint.pt").exists():
        raise ValueError(f"{out} already holds a run: --resume goes on with it, another --out starts a new one")


def begin(run):
    """Start the run folder, or with --resume go on from it.   -> the step to start with   ValueError: nothing may be lost"""
    args = run.args
    checkpoint = sample.load_checkpoint(run.out) if args.resume else {"step": 0}
    for key in ("data", "model") if args.resume else ():
        now = run.config[key]
        changes = [f"{name} {was} is now {now.get(name)}" for name, was in checkpoint["config"][key].items() if now.get(name) != was]
        if changes:
            raise ValueError(f"--resume: the {key} of {run.out} has changed: {'; '.join(changes)}")
    if checkpoint["step"] > args.steps:
        raise ValueError(f"--steps {args.steps}: the run in {run.out} is at step {checkpoint['step']} already")
    if args.resume:
        try:
            for name in PARTS:
                getattr(run, name).load_state_dict(checkpoint[name])
            window = checkpoint["window"].to(run.device)
            run.window += window * (run.rank == 0)                                  # it holds the sums of all processes
            run.window[IN_A_ROW] = window[IN_A_ROW]
            run.weights = checkpoint["weights"].to(run.device)
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"--resume: {run.out / 'checkpoint.pt'} is damaged: {sample.first_line(error)}") from None
    if run.rank == 0:
        run.lock = sample.lock(run.out)
        if not args.resume:
            refuse_second_start(run.out)                    # another process may have come and gone since `build` looked
        (run.out / "samples").mkdir(parents=True, exist_ok=True)
        save_atomically(run.out / "config.json", lambda out: out.write(json.dumps(run.config, indent=1).encode()))
        cut_log(run.out / "log.csv", run.columns, checkpoint["step"])
        if args.fid_every or (run.out / "fid.csv").exists():
            cut_log(run.out / "fid.csv", FID_COLUMNS, checkpoint["step"])
        if args.weighting in PARETO_SOLVERS:
            cut_log(run.out / "pareto.csv", ["step", *(f"weight_{k}" for k in range(args.pareto_bins))], checkpoint["step"])
    if not args.resume:
        save_checkpoint(run, 0)                             # a disk that is full shows now, and a kill at any time can resume
    return checkpoint["step"]


def catch_signals(processes):
    """Catch Ctrl-C and SIGTERM.   -> a function that says, once a step, whether any process was told to stop (0 or the signal)"""
    caught = torch.zeros(1, dtype=torch.int32)              # on the CPU, so that asking never waits for the GPU

    def catch(signum, frame):
        caught.fill_(signum)
        signal.signal(signum, signal.SIG_DFL)               # the second one ends it at once

    signal.signal(signal.SIGINT, catch)
    signal.signal(signal.SIGTERM, catch)

    def asked():
        if processes == 1:
            return int(caught)
        anyone = caught.clone()
        dist.all_reduce(anyone, dist.ReduceOp.MAX)          # so that all stop after the same step
        return int(anyone)

    return asked


class Progress:
    """What a run says: on a terminal one line that is renewed, in a file a line for each row of the log."""

    def __init__(self, args, start):
        self.args, self.start, self.began, self.shown, self.loss = args, start, time.time(), 0.0, math.nan
        self.since, self.since_step = time.time(), start            # of images per second

    def pause(self, seconds):
        """Leave out time that was not spent on training."""
        self.began += seconds
        self.since += seconds

    def rate(self, step):
        """Training images per second since the last call."""
        now = time.time()
        rate = (step - self.since_step) * self.args.batch_size / max(now - self.since, 1e-9)
        self.since, self.since_step = now, step
        return rate

    def show(self, step, row=None):
        now, terminal = time.time(), sample.on_terminal()
        seconds = (now - self.began) / (step - self.start)          # of a step
        if step - self.start == 5 and not terminal:                 # on a terminal the line below says it from the start
            print(f"this will take about {duration(seconds * (self.args.steps - step))}", flush=True)
        if not (row or terminal and now - self.shown > 1):
            return
        self.loss, self.shown = row["loss"] if row else self.loss, now
        line = (f"step {step:,} of {self.args.steps:,}   loss {self.loss:.4g}   {self.args.batch_size / seconds:.0f} images/s   "
                f"{duration(seconds * (self.args.steps - step))} left   {peak_memory():.1f} GB")
        print(f"\r\033[K{line}" if terminal else line, end="" if terminal else "\n", flush=True)


def peak_memory():
    """GB that this process has needed at most, on the GPU if it has one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


def train(run, start):
    """The loop.   -> the signal that ended it early, or 0"""
    args, device, timesteps = run.args, run.device, run.diffusion.timesteps
    if args.compile:
        run.model.compile()                                 # in place: the names of the weights stay as they are
    model = run.model
    if run.processes > 1:
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    places = range(run.rank * run.share, (run.rank + 1) * run.share)                    # of this process in the global batch
    micro = args.micro_batch or run.share
    stop_signal, progress = catch_signals(run.processes), Progress(args, start)
    for step in range(start, args.steps):
        batches = [to_device(make_batch(run.data, args, timesteps, step, places[i:i + micro]), device)
                   for i in range(0, run.share, micro)]
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        if args.dropout:
            torch.manual_seed(int(random_stream(args.seed, "dropout", step, run.rank).integers(2**62)))
        if args.weighting in PARETO_SOLVERS and step % args.pareto_every == 0:
            weights = solve_weights(run, step)
            if run.rank == 0:
                append_row(run.out / "pareto.csv", [step + 1, *weights.tolist()])        # the first step that uses them
        due = args.probe and step % args.probe == 0
        with probe(run.model) if due else nullcontext() as record:
            loss, errors, norm = train_step(model, run, batches, record)
        update_ema(run.ema, run.model, args.ema, step)
        t = torch.cat([batch[1] for batch in batches])
        add_to_window(run.window, loss, errors / run.error_scale[t], norm, t * BINS // timesteps)
        if due:
            add_probe(run.window, record)

        done, stopped = step + 1, stop_signal()
        last = done == args.steps
        log, save = done % args.log_every == 0, done % args.save_every == 0 or last or stopped
        draw, fid = (every and (done % every == 0 or last) for every in (args.sample_every, args.fid_every))
        if device.type == "cpu" or log or draw or save or fid:
            check_finite(run, done)                         # on a GPU this waits for it, so not at every step
        row = take_row(run, done, progress.rate(done)) if log else None
        if run.rank == 0:
            if row:
                append_row(run.out / "log.csv", row.values())
            progress.show(done, row)
        paused = time.time()
        if fid:
            measure_fid(run, done)
        if save:                                            # before the pictures: none of them is worth a checkpoint
            save_checkpoint(run, done)
        if run.rank == 0 and draw:
            draw_samples(run, done)
            draw_curves({run.out.name: run.out}, run.out / "curves.png")
        progress.pause(time.time() - paused)
        if stopped:
            return stopped
    return 0


def describe(run, start):
    """What a run is about to do, in two lines."""
    args, epochs = run.args, run.args.steps * run.args.batch_size / len(run.data.images)
    parameters = sum(p.numel() for p in run.model.parameters())
    gamma = f" (gamma {args.gamma:g})" if uses_gamma(args.weighting) else ""
    where = f"{run.device.type}" + (f", {run.processes} processes" if run.processes > 1 else "")
    return (f"{type(run.model).__name__} of {parameters / 1e6:.2f}M parameters, skip scaling {args.skip_scaling}; predicts {args.prediction}, "
            f"{args.schedule} schedule, {args.weighting}{gamma} weights\n"
            f"steps {start:,} to {args.steps:,} of {args.batch_size} images ({epochs:.1f} epochs), {str(run.dtype).removeprefix('torch.')} "
            f"on {where}{', compiled in the first step, which takes a while' * args.compile}; everything goes into {run.out}{os.sep}")


def main():
    parser, rank = build_parser(), int(os.environ.get("RANK", 0))

    def say(line):
        if rank == 0:
            print(line, flush=True)

    try:
        args = parse_args()
        if args.compare:
            draw_curves({run: Path(run) for run in args.compare}, args.out)
            return say(f"look at {args.out}")
        run = build(args, say)
        if run is None:
            return
        start, began = begin(run), time.time()
        if start == args.steps:
            return say(f"{run.out} is done: it is at step {start:,} of {args.steps:,}; --steps goes further")
        say(describe(run, start))
        stopped = train(run, start)
        sample.wait_for_all()
        terminal = "\n" if sample.on_terminal() else ""
        if stopped:
            say(f"{terminal}stopped; train.py --out {run.out} --resume goes on from here")
            sys.exit(128 + stopped)
        look = f"look at {run.out / 'samples' / f'step_{args.steps:07d}.png'} and {run.out / 'curves.png'}, or " if args.sample_every else ""
        more = " --out samples.npz" if run.data.latents else ""
        say(f"{terminal}done in {duration(time.time() - began)}: {look}draw images with: python sample.py {shlex.quote(str(run.out))}{more}")
    except KeyboardInterrupt:
        parser.exit(130, "train.py: interrupted\n" if rank == 0 else None)
    except FloatingPointError as error:
        parser.exit(1, f"train.py: {error}\n" if rank == 0 else None)
    except (ValueError, OSError) as error:
        parser.exit(2, f"train.py: {error}\n" if rank == 0 else None)
    except (RuntimeError, MemoryError) as error:
        if not sample.out_of_memory(error):
            raise
        parser.exit(2, "train.py: out of memory: a smaller --micro-batch, --checkpointing or a smaller model needs less\n")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
