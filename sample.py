"""From a trained model to pictures, and from pictures to a number: samplers, grids, bulk output, FID.

    python sample.py runs/digits                                        # runs/digits/sampled.png, a row a class
    python sample.py runs/digits --labels 3,7 --guidance 2 --out sevens.png
    python sample.py runs/digits --count 50000 --out samples.npz        # killed? the same command goes on
    torchrun --standalone --nproc_per_node=8 sample.py RUN --count 50000 --out samples.npz
    python sample.py samples.npz --fid cifar10                          # or a run, which draws first: RUN --count 50000 --fid train
    python sample.py runs/digits --path --labels 3                      # how one comes out of the noise

The samplers follow Karras et al. 2022, "Elucidating the Design Space of Diffusion-Based Generative Models"
(arXiv 2206.00364): x = x_0 + sigma * noise, and the ODE dx/dsigma = (x - D(x; sigma)) / sigma is followed from pure noise
down to sigma = 0. D is diffusion.Denoiser.
"""

import argparse
import csv
import fcntl
import hashlib
import http.client
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import urllib.request
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont
from torch.nn.attention import SDPBackend, sdpa_kernel

import unet
import uvit
from diffusion import Denoiser, Diffusion, random_stream

BACKBONES = {"UNet": unet.UNet, "UViT": uvit.UViT, "ViT": uvit.ViT}
LATENT_SCALE = 0.18215      # Rombach et al. 2022: what latents are multiplied with before training, so that their std is 1


# ---------------------------------------------------------------------------------------------------------------------
# Samplers. A step goes from noise level s down to s_next, both plain numbers, and returns the new x and the denoised x_0 it used.
# In the last step s_next is 0, where only x_0 itself is left to go to. denoise(x, sigma) may be asked at any sigma above 0.
# `last` is (sigma, x_0) of the step before, None at first: what a multistep method remembers.

def euler_step(denoise, x, s, s_next, last):
    """First order, the same as DDIM (Song et al. 2021).   Karras et al. 2022, Algorithm 1, lines 4 and 5."""
    x0 = denoise(x, s)
    return x + (s_next - s) * (x - x0) / s, x0


def heun_step(denoise, x, s, s_next, last):
    """Second order: the mean of the slopes at both ends.   Karras et al. 2022, Algorithm 1."""
    x_euler, x0 = euler_step(denoise, x, s, s_next, last)
    if s_next == 0:                                         # there is no slope at 0
        return x_euler, x0
    slope, slope_next = (x - x0) / s, (x_euler - denoise(x_euler, s_next)) / s_next
    return x + (s_next - s) * (slope + slope_next) / 2, x0


def dpmpp_2m_step(denoise, x, s, s_next, last):
    """Second order with one model call, from the step before.   Lu et al. 2022, DPM-Solver++ (arXiv 2211.01095), Alg. 2."""
    x0 = denoise(x, s)
    if s_next == 0:
        return x0, x0
    h, extrapolated = math.log(s / s_next), x0              # a step in lambda = -log sigma
    if last is not None:
        r = math.log(last[0] / s) / h
        extrapolated = x0 + (x0 - last[1]) / (2 * r)
    return s_next / s * x - math.expm1(-h) * extrapolated, x0


# To try a new sampler, write such a step and add a line, and its name to MULTISTEP if it looks at `last`.
SOLVERS = {"heun": heun_step, "euler": euler_step, "dpm++2m": dpmpp_2m_step}
MULTISTEP = {"dpm++2m"}         # those that look at `last`: with churn it would not lie on the way


def karras_sigmas(steps, sigma_min, sigma_max, rho=7.0):
    """Noise levels from sigma_max down to sigma_min, then 0.   -> (steps + 1,) float64   Karras et al. 2022, Eq. 5"""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    i = torch.arange(steps, dtype=torch.float64) / max(steps - 1, 1)
    sigmas = (sigma_max ** (1 / rho) + i * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho
    return torch.cat([sigmas, sigmas.new_zeros(1)])


@torch.no_grad()       # not inference mode, in which autocast would cast every weight anew at every call
def heun(denoiser, noise, labels=None, steps=18, guidance=1.0, guidance_interval=None, solver="heun", rho=7.0, churn=0.0,
         churn_range=(0.0, math.inf), churn_scale=1.0, churn_noise=torch.randn_like, on_step=None):
    """Sample x_0 from noise.   Karras et al. 2022, Algorithm 1, and with churn > 0 Algorithm 2.

    denoiser: diffusion.Denoiser, or what has its methods   noise: (B, C, H, W), unit normal   labels: (B,) or None
    steps: N noise levels in [0.002, 80], or what the schedule reaches of it, each rounded to the schedule's grid, on which
        some of many become one (of 100 on the cosine schedule 94 are left); heun calls the model 2N - 1 times, others N times
    guidance, guidance_interval: see Denoiser
    churn, churn_range, churn_scale: S_churn, (S_min, S_max), S_noise of the paper; churn_noise: x -> unit normal like x
    on_step(i, sigma, x0): called after each step
    Returns x_0, (B, C, H, W) float64 (float32 on devices without float64).   ValueError: unknown solver, steps below 1.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver {solver!r} is not one of {', '.join(SOLVERS)}")
    if churn and solver in MULTISTEP:
        raise ValueError(f"churn needs a solver without memory, such as heun or euler: {solver} looks at the step before")
    sigmas = karras_sigmas(steps, max(0.002, denoiser.sigma_min), min(80.0, denoiser.sigma_max), rho)
    sigmas = torch.cat([denoiser.round_sigma(sigmas[:-1]), sigmas[-1:]]).tolist()

    def denoise(x, sigma):
        return denoiser(x, sigma, labels, guidance, guidance_interval)

    x, last = noise.to(torch.float32 if noise.device.type == "mps" else torch.float64) * sigmas[0], None
    for i, (s, s_next) in enumerate(zip(sigmas[:-1], sigmas[1:])):
        if churn and churn_range[0] <= s <= churn_range[1]:
            s_hat = float(denoiser.round_sigma(s * (1 + min(churn / steps, math.sqrt(2) - 1))))
            x = x + math.sqrt(s_hat**2 - s**2) * churn_scale * churn_noise(x)
            s = s_hat
        if s == s_next:                                     # two levels that round to the same grid point
            continue
        x, x0 = SOLVERS[solver](denoise, x, s, s_next, last)
        last = s, x0
        if on_step:
            on_step(i, s, x0)
    return x


# ---------------------------------------------------------------------------------------------------------------------
# Models

# what reading a torn, encrypted or foreign array or archive raises
UNREADABLE = (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def first_line(error):
    """What an exception says in a line, with its kind where that is no more than a word; without torch's advice that follows."""
    text, kind = str(error), type(error).__name__
    return (text if " " in text else f"{kind} {text}".strip()).splitlines()[0].partition(". ")[0]


def out_of_memory(error):
    return isinstance(error, MemoryError) or "alloc" in str(error) or "out of memory" in str(error)


def torch_load(file):
    """torch.load of plain values alone; what is not used of a file stays unread, unless it is of PyTorch's older format."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)                            # TorchScript: the error that follows says it too
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


def load_torchscript(flag, file, device):
    """The network in a TorchScript file.   ValueError: names the flag, and what is wrong with the file"""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)                 # of the format, in which networks have been published
            return torch.jit.load(file, map_location=device).eval()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{flag} {file} cannot be read as TorchScript: {first_line(error)}") from None


def load_checkpoint(path):
    """The checkpoint of a run folder, or a checkpoint file, as the dict that train.py saved.   ValueError: says what is wrong."""
    path = Path(path)
    file = path / "checkpoint.pt" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"{file} does not exist: give a run folder of train.py or a checkpoint file")
    try:
        checkpoint = torch_load(file)
        flipped = zipfile.ZipFile(file).testzip()           # torch does not look at the checksums it writes
    except Exception as error:                              # torn, foreign or unsafe files fail in many ways
        raise ValueError(f"{file} cannot be read as a checkpoint: {first_line(error)}") from None
    if flipped:
        raise ValueError(f"{file} is damaged: the checksum of {flipped} is wrong")
    if not isinstance(checkpoint, dict) or not {"model", "ema", "optimizer", "step", "config"} <= checkpoint.keys():
        raise ValueError(f"{file} is no checkpoint of train.py; published weights are read with --weights FILE --preset NAME")
    config = checkpoint["config"]
    if not isinstance(checkpoint["step"], int) or not isinstance(config, dict) or not {"flags", "model", "diffusion", "data"} <= config.keys():
        raise ValueError(f"{file} is a damaged checkpoint: its step or config is not what train.py writes")
    return checkpoint


def build_model(config):
    """A model from config["model"]: the class name under "class", and its arguments.   ValueError: they do not fit."""
    arguments = dict(config)
    return BACKBONES[arguments.pop("class")](**arguments)


def load_model(path, raw=False):
    """A trained model in eval mode, with its EMA weights, or with raw=True those of the last step.

    path: run folder or checkpoint file   -> (model, Diffusion, config dict)   ValueError: no checkpoint, or one that does not fit
    """
    checkpoint = load_checkpoint(path)
    config = checkpoint["config"]
    try:
        model, diffusion = build_model(config["model"]), Diffusion(**config["diffusion"])
    except (KeyError, TypeError, ValueError) as error:      # written by other code, or by hand
        raise ValueError(f"{path} describes a model or a diffusion that this code does not know: {first_line(error)}") from None
    try:
        model.load_state_dict(checkpoint["model" if raw else "ema"])
    except RuntimeError as error:
        raise ValueError(f"{path} holds weights of another architecture: {' '.join(str(error).split())[:300]}") from None
    return model.eval(), diffusion, {**config, "step": checkpoint["step"]}


def read_weights(file):
    """A published file of weights.   -> {name: tensor}   ValueError: missing, or not safely readable as that"""
    try:
        state = torch_load(file)
    except FileNotFoundError:
        raise ValueError(f"--weights {file} does not exist") from None
    except Exception as error:                              # torn, foreign or unsafe files fail in many ways
        raise ValueError(f"--weights {file} cannot be read safely as a dict of tensors: {first_line(error)}") from None
    if not isinstance(state, dict) or not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"--weights {file} is not a dict of tensors as published models are")
    return state


def fill_published(model, state, attention_order):
    """Fill a model from published weights, whatever its class.   ValueError: names what does not fit"""
    if isinstance(model, unet.UNet):
        unet.load_published(model, state, attention_order)
    else:
        uvit.load_published(model, state)


def adapt_config(config, state):
    """Take from published weights what a preset leaves open.   -> config for build_model

    The numbers of channels (learned variances double the output) and of label rows: ImageNet's 1000, or 1001 with "no label".
    """
    config = dict(config)
    for name in "input_blocks.0.0.weight", "patch_embed.proj.weight":
        if name in state:
            config["in_channels"] = state[name].shape[1]
    for name, pixels in ("out.2.weight", 1), ("linear_projection.weight", config.get("patch", 1) ** 2):
        if name in state and config["class"] != "UViT":     # which has as many as it is given
            config["out_channels"] = len(state[name]) // pixels
    for name in "label_emb.weight", "class_embedding.weight":
        if name in state:
            rows = len(state[name])
            config["num_classes"], config["null_label"] = (1000, True) if rows == 1001 else (rows, False)
    return config


# ---------------------------------------------------------------------------------------------------------------------
# Devices and precision, for train.py too

def pick_device(name):
    """auto, cpu, cuda or mps -> torch.device; each process of torchrun takes the GPU of its local rank.   ValueError: not there"""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available() or name == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"--device {name} is not available on this machine; --device auto takes what there is")
    if name != "cuda":
        return torch.device(name)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
        raise ValueError(f"--nproc_per_node asks for more processes than the {torch.cuda.device_count()} GPUs of this machine")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join_processes(device):
    """Meet the other processes of torchrun.   -> (rank, number of processes)   ValueError: half a torchrun environment"""
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if processes > 1 and not {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(f"WORLD_SIZE is {processes} but RANK or MASTER_ADDR is not set: start several processes with torchrun")
    if processes > 1:                                       # decoding a large data set lets the others wait for long
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=1))
    return rank, processes


def wait_for_all():
    """Meet the other processes, if there are any. Before the end, too: one that ends while gloo still frees a tensor is aborted."""
    if dist.is_initialized():
        dist.barrier()


def pick_precision(name, device):
    """auto, fp32, bf16 or fp16 -> the dtype of matrix products, float32 meaning no autocast.   ValueError: not on this device

    auto: bfloat16 where the hardware multiplies it natively; elsewhere it is emulated, up to hundreds of times slower.
    """
    if name == "auto" and device.type == "cuda":
        name = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    elif name == "auto":
        has = torch.cpu.get_capabilities() if device.type == "cpu" else {}
        name = "bf16" if has.get("amx_bf16") or has.get("avx512_bf16") or has.get("bf16") else "fp32"
    if name == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 needs a GPU; on a CPU take fp32, bf16 or auto")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def attention_kernels(device, dtype):
    """The context in which attention is fused or written out; a backward pass that recomputes a forward pass needs the same."""
    # On CPUs that multiply bf16 natively, the backward pass of the fused attention kernel takes three to nine times as long as the
    # products written out, which is what the backend MATH does; in fp32 and on GPUs the fused kernels are the right choice
    if device.type != "cpu" or dtype != torch.bfloat16:
        return nullcontext()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)                # else MATH would multiply in fp32
    return sdpa_kernel(SDPBackend.MATH)


@contextmanager
def autocast(device, dtype):
    """The context in which a model runs with products of that precision."""
    with nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype), attention_kernels(device, dtype):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Images: image k depends on (seed, k) and its label alone, whatever the batch and however many processes there are

def generate(denoiser, shape, seed, indices, labels=None, device="cpu", **options):
    """Sample the images with these indices.   shape: (C, H, W), labels: (B,) or None, options: see heun   -> (B, C, H, W)"""
    streams = [random_stream(seed, "sample", k) for k in indices]

    def unit_normal(x=None):                                # each image draws on from its own stream
        return torch.from_numpy(np.stack([s.standard_normal(shape, dtype=np.float32) for s in streams])).to(device)

    labels = None if labels is None else torch.as_tensor(labels, device=device)
    return heun(denoiser, unit_normal(), labels, churn_noise=unit_normal, **options)


def interpolate(denoiser, shape, seed, ends, count, label=None, device="cpu", **options):
    """Sample on the way from one noise to another, over the sphere on which they lie.   -> (count, C, H, W)

    ends: the indices of two images of this seed, which come first and last, both with this label; a straight way would leave
    unit variance
    """
    a, b = (random_stream(seed, "sample", k).standard_normal(shape, dtype=np.float32) for k in ends)
    angle = math.acos((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    share = np.linspace(0, 1, count)[:, None, None, None]
    noise = (np.sin((1 - share) * angle) * a + np.sin(share * angle) * b) / math.sin(angle)
    labels = None if label is None else torch.full((count,), label, device=device)
    return heun(denoiser, torch.from_numpy(noise.astype(np.float32)).to(device), labels, **options)


def denoising_path(denoiser, shape, seed, indices, labels=None, device="cpu", **options):
    """What the model makes of each image on its way out of the noise.   -> D(x; sigma) (steps, B, C, H, W), the steps' sigmas"""
    frames = []
    generate(denoiser, shape, seed, indices, labels, device, on_step=lambda i, sigma, x0: frames.append((sigma, x0)), **options)
    return torch.stack([x0 for _, x0 in frames]), [sigma for sigma, _ in frames]


def to_uint8(x):
    """Images (B, C, H, W) in [-1, 1] -> uint8 array (B, H, W, C).   ValueError: nan or infinity, which would become black"""
    if not x.isfinite().all():
        raise ValueError("the images hold nan or infinity: the model has diverged, or it overflows at this --precision")
    return ((x.float() + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()


# ---------------------------------------------------------------------------------------------------------------------
# Pictures

def save_picture(picture, path):
    """Write a PIL image, through a temporary name, so that a reader never sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        picture.save(temporary, format="PNG")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def image_grid(images, columns, gap=2):
    """Images (N, H, W, C) uint8, row by row -> one PIL image on a white ground; small images are shown larger."""
    zoom = max(1, 64 // images.shape[1])
    images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
    count, height, width, channels = images.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 255, np.uint8)
    for k, image in enumerate(images):
        y, x = gap + k // columns * (height + gap), gap + k % columns * (width + gap)
        sheet[y:y + height, x:x + width] = image
    return Image.fromarray(sheet.squeeze(2) if channels == 1 else sheet)


def titled(picture, title, row_names=()):
    """A picture with a title above it and names to the left of its rows."""
    font, top = ImageFont.load_default(13), 22 if title else 0
    left = max([int(font.getlength(name)) + 12 for name in row_names], default=0)
    sheet = Image.new("RGB", (max(left + picture.width, int(font.getlength(title)) + 12), top + picture.height), "white")
    sheet.paste(picture, (left, top))
    draw = ImageDraw.Draw(sheet)
    draw.text((6, 3), title, "black", font)
    for row, name in enumerate(row_names):
        draw.text((left - 6, top + (row + 0.5) * picture.height / len(row_names)), name, "black", font, anchor="rm")
    return sheet


def label_grid(images, labels, classes, title=""):
    """One row a class, in the order of the labels, with the class names beside them.   images (N, H, W, C), labels (N,)"""
    present = sorted(set(labels))
    rows = [images[np.flatnonzero(np.equal(labels, label))] for label in present]
    columns = max(map(len, rows))
    blank = np.full_like(images[:1], 255)
    padded = np.concatenate([np.concatenate([row, np.repeat(blank, columns - len(row), 0)]) for row in rows])
    names = [classes[label] if label < len(classes) else "no label" for label in present]
    return titled(image_grid(padded, columns), title, names)


def side_by_side(pictures, columns=2):
    """Pictures in a table with so many columns, each cell as large as the largest of them."""
    width, height = (max(picture.size[axis] for picture in pictures) for axis in (0, 1))
    sheet = Image.new("RGB", (width * columns, height * -(-len(pictures) // columns)), "white")
    for k, picture in enumerate(pictures):
        sheet.paste(picture, (k % columns * width, k // columns * height))
    return sheet


COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")


def line_chart(panels, width=460, height=300):
    """Line plots side by side.   panels: a list of dicts -> PIL image

    Each panel: title, x (axis name), lines {name: (xs, ys)}, and optionally log_x, log_y. Points that are not finite, or
    not positive on a logarithmic axis, are left out.
    """
    return side_by_side([draw_panel(panel, width, height) for panel in panels], columns=min(len(panels), 3))


def draw_panel(panel, width, height):
    """One plot of line_chart: axes with ticks, lines, and a legend."""
    picture, font = Image.new("RGB", (width, height), "white"), ImageFont.load_default(11)
    draw = ImageDraw.Draw(picture)
    left, right, top, bottom = 58, width - 12, 26, height - 40
    draw.text((left, 6), panel["title"], "black", ImageFont.load_default(13))
    draw.text(((left + right) / 2, height - 4), panel["x"], "black", font, anchor="mb")
    draw.rectangle((left, top, right, bottom), outline="#888888")
    logs = panel.get("log_x", False), panel.get("log_y", False)
    lines = {name: keep_drawable(*line, *logs) for name, line in panel["lines"].items()}
    xs, ys = (np.concatenate([line[axis] for line in lines.values()] or [[]]) for axis in (0, 1))
    if not len(xs):
        return picture
    (x_low, x_high, x_ticks), (y_low, y_high, y_ticks) = axis_range(xs, logs[0]), axis_range(ys, logs[1])

    def place(x, y):
        return left + (x - x_low) / (x_high - x_low) * (right - left), bottom - (y - y_low) / (y_high - y_low) * (bottom - top)

    for value, name in x_ticks:
        x, _ = place(value, y_low)
        draw.line((x, top, x, bottom), "#e8e8e8")
        draw.text((x, bottom + 4), name, "black", font, anchor="mt")
    for value, name in y_ticks:
        _, y = place(x_low, value)
        draw.line((left, y, right, y), "#e8e8e8")
        draw.text((left - 5, y), name, "black", font, anchor="rm")
    points = {name: [place(x, y) for x, y in zip(*line)] for name, line in lines.items()}
    for colour, line in zip(itertools.cycle(COLOURS), points.values()):
        draw.line(line, colour, 2)
        for x, y in line if len(line) < 20 else ():
            draw.ellipse((x - 2, y - 2, x + 2, y + 2), colour)
    legend = max(font.getlength(name) for name in lines), 13 * len(lines)                       # its width and height
    x, y = free_corner([point for line in points.values() for point in line], (left + 6, top + 6, right - 6, bottom - 6), *legend)
    for k, (colour, name) in enumerate(zip(itertools.cycle(COLOURS), lines)):
        draw.text((x, y + 13 * k), name, colour, font, stroke_width=2, stroke_fill="white")
    return picture


def free_corner(points, box, width, height):
    """The place in a box for something of that size where it hides the fewest points.   -> its left upper corner"""
    left, top, right, bottom = box

    def hidden(corner):
        return sum(0 <= x - corner[0] <= width and 0 <= y - corner[1] <= height for x, y in points)

    return min([(x, y) for y in (top, bottom - height) for x in (right - width, left)], key=hidden)


def keep_drawable(xs, ys, log_x, log_y):
    """The finite points of a line, logarithms taken where the axis is logarithmic."""
    xs, ys = np.asarray(xs, float), np.asarray(ys, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        xs, ys = np.log10(xs) if log_x else xs, np.log10(ys) if log_y else ys
    keep = np.isfinite(xs) & np.isfinite(ys)
    return xs[keep], ys[keep]


def axis_range(values, log):
    """(low, high, ticks) for an axis that shows these values; ticks are (place, name). Logarithms come as exponents of 10."""
    low, high = values.min(), values.max()
    if high - low < 1e-9 * max(1, abs(high)):
        low, high = low - 0.5, high + 0.5

    def round_numbers(low, high):
        rough = (high - low) / 5
        step = min((m * 10 ** math.floor(math.log10(rough)) for m in (1, 2, 5, 10)), key=lambda step: abs(step - rough))
        return np.arange(math.ceil(low / step) * step, high + step / 1e6, step)

    if log and high - low > 0.7:                            # powers of ten, and 2 and 5 times them where there is room
        step, parts = max(1, round((high - low) / 5)), (1, 2, 5) if high - low < 3 else (1,)
        marks = [part * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1, step) for part in parts]
        ticks = [(math.log10(mark), f"{mark:g}") for mark in marks if low <= math.log10(mark) <= high]
    elif log:
        ticks = [(math.log10(mark), f"{mark:,.6g}") for mark in round_numbers(10**low, 10**high)]
    else:
        ticks = [(mark, f"{mark:,.6g}") for mark in round_numbers(low, high)]
    margin = 0.03 * (high - low)
    return low - margin, high + margin, ticks


# ---------------------------------------------------------------------------------------------------------------------
# Output that survives a kill: finished images are kept, and the same command goes on with the rest

def lock(out):
    """Claim a folder until this process ends.   -> a handle to be kept   ValueError: another process works there"""
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{out} is in use: another process works there") from None
    except OSError:                                         # some network file systems have no locks
        pass
    return handle


class FolderStore:
    """A folder with 000000.png, 000001.png ... and labels.csv, which says label, class and seed of each."""

    def __init__(self, out, count, shape, settings):
        self.out, self.count, self.settings = Path(out), count, settings

    def create(self):
        if self.out.is_dir() and any(self.out.iterdir()) and not (self.out / "settings.json").exists():
            raise ValueError(f"--out {self.out} is a folder with other things in it: choose another")
        self.out.mkdir(parents=True, exist_ok=True)
        keep_settings(self.out / "settings.json", {k: v for k, v in self.settings.items() if k != "count"})
        labels = self.out / "labels.csv"
        count = max(self.count, len(labels.read_text().splitlines()) - 1 if labels.exists() else 0)     # it may hold more already
        with open(labels, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["file", "label", "class", "seed"])
            for k in range(count):
                label = self.settings["labels"][k % len(self.settings["labels"])] if self.settings["labels"] else ""
                name = self.settings["classes"][label] if label != "" and label < len(self.settings["classes"]) else ""
                rows.writerow([f"{k:06d}.png", label, name, self.settings["seed"]])

    def open(self):
        return np.array([(self.out / f"{k:06d}.png").exists() for k in range(self.count)], bool)

    def write(self, indices, images):
        for k, image in zip(indices, images):
            save_picture(Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image), self.out / f"{k:06d}.png")

    def finish(self):
        return f"{self.count} images in {self.out}{os.sep}, their labels in labels.csv"


class ArrayStore:
    """One .npz in the layout of ADM's evaluation suite, or one .png grid; until it is complete, OUT.partial holds the images."""

    def __init__(self, out, count, shape, settings):
        self.out, self.count, self.shape, self.settings = Path(out), count, shape, settings
        self.partial = Path(f"{out}.partial")

    def create(self):
        self.lock = lock(self.partial)
        keep_settings(self.partial / "settings.json", self.settings)
        dtype = np.float32 if self.settings["latents"] else np.uint8
        for name, dtype, shape in ("images", dtype, (self.count, *self.shape)), ("done", np.bool_, (self.count,)):
            if not (self.partial / f"{name}.npy").exists():
                np.lib.format.open_memmap(self.partial / f"{name}.new.npy", "w+", dtype, shape).flush()
                os.replace(self.partial / f"{name}.new.npy", self.partial / f"{name}.npy")

    def open(self):
        self.images = np.load(self.partial / "images.npy", mmap_mode="r+")
        self.done = np.load(self.partial / "done.npy", mmap_mode="r+")
        return np.array(self.done)

    def write(self, indices, images):
        self.images[indices] = images
        self.done[indices] = True                           # only after the images themselves, as a kill may come between

    def finish(self):
        settings, labels = self.settings, self.settings["labels"]
        labels = np.resize(np.array(labels, np.int64), self.count) if labels else None
        if self.out.suffix == ".npz":
            temporary = self.partial / "complete.npz"
            np.savez(temporary, arr_0=self.images, **({} if labels is None else {"arr_1": labels}))
            os.replace(temporary, self.out)
        elif labels is None:
            save_picture(image_grid(self.images, math.ceil(math.sqrt(self.count))), self.out)
        else:
            save_picture(label_grid(self.images, labels, settings["classes"]), self.out)
        for file in self.partial.iterdir():
            file.unlink()
        self.partial.rmdir()
        return str(self.out)


def keep_settings(file, settings):
    """Write the settings beside unfinished images; refuse to mix them with images made with others."""
    if not file.exists():
        file.write_text(json.dumps(settings))
    found = json.loads(file.read_text())
    different = sorted(key for key in settings if found.get(key) != settings[key])
    if different:
        raise ValueError(f"{file.parent} holds images made with other settings ({', '.join(different)}): choose another --out, "
                         f"or delete it")


# ---------------------------------------------------------------------------------------------------------------------
# Measuring quality: Fréchet distance (FID), precision and recall between the features of two sets of images

INCEPTION = "inception-2015-12-05.pt"                       # the network of nearly all published FIDs, as TorchScript
INCEPTION_URL = f"https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/{INCEPTION}"
INCEPTION_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
KEPT = 50_000               # features of so many images are kept, for precision and recall
ENOUGH = 10_000             # of fewer images FID depends strongly on their number
BLOCK = 1000                # rows of a table of distances that are in memory at once


def frechet_distance(mean1, cov1, mean2, cov2):
    """|m1 - m2|^2 + tr C1 + tr C2 - 2 tr (C1^1/2 C2 C1^1/2)^1/2.   Heusel et al. 2017 (arXiv 1706.08500)

    mean (F,), cov (F, F), arrays or tensors -> float, never negative or nan   ValueError: nan or infinity in the input

    With C = A A^T the last trace is the sum of the singular values of A1^T A2. No root of a product is taken, in which
    rounding errors of 1e-16 become 1e-8, so that singular covariances (fewer images than features) are exact as well.
    """
    mean1, cov1, mean2, cov2 = (torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in (mean1, cov1, mean2, cov2))
    if not all(x.isfinite().all() for x in (mean1, cov1, mean2, cov2)):
        raise ValueError("the statistics of the features hold nan or infinity: these images or this network are broken")
    root = torch.linalg.svdvals(covariance_factor(cov1).T @ covariance_factor(cov2)).sum()
    distance = (mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * root
    return max(distance.item(), 0.0)                        # of equal statistics, rounding leaves some -1e-13


def covariance_factor(cov):
    """A with A A^T = C, without the directions in which C is nothing but rounding error.   (F, F) -> (F, rank)"""
    values, vectors = torch.linalg.eigh(cov)
    real = values > len(cov) * torch.finfo(cov.dtype).eps * values[-1]
    return vectors[:, real] * values[real].sqrt()


@torch.inference_mode()
def precision_recall(real, fake, k=3):
    """Shares of fake images that could be real, and of real that could be fake.   Kynkäänniemi et al. 2019, arXiv 1904.06991

    real (N, F), fake (M, F) features -> (precision, recall)   An image could belong to a set if it is no further from one
    of its images than that one's k-th nearest neighbour in the set.
    """
    centre = real.mean(0)                                   # distances are differences of large numbers far from 0
    real, fake = real - centre, fake - centre

    def radii(points):                                      # the nearest of all, and so one more than k, is a point itself
        nearest = [torch.cdist(rows, points).topk(min(k + 1, len(points)), largest=False).values for rows in points.split(BLOCK)]
        return torch.cat(nearest)[:, -1]

    def covered(points, balls):
        reach = radii(balls)
        return torch.cat([(torch.cdist(rows, balls) <= reach).any(1) for rows in points.split(BLOCK)]).double().mean().item()

    return covered(fake, real), covered(real, fake)


class FeatureNetwork:
    """Images to features: a TorchScript network called as network(uint8 (B, 3, H, W), return_features=True) -> (B, F).

    So the Inception network of FID is published; it scales and resizes by itself, and nothing else prepares the images.
    file: None takes that one from the cache folder, or fetches it   ValueError, OSError: missing, or not such a network
    """

    def __init__(self, file, cache, device):
        self.file, self.device = Path(file or Path(cache) / INCEPTION), device
        if not file and not self.file.exists():
            fetch(INCEPTION_URL, self.file, INCEPTION_SHA256, "--features FILE")
        if not self.file.is_file():
            raise ValueError(f"--features {file} does not exist: give a TorchScript file such as {INCEPTION}")
        self.network = load_torchscript("--features", self.file, device)
        self.digest = checksum(self.file)

    @torch.inference_mode()
    def __call__(self, images):
        """(B, H, W, C) uint8, C = 1 or 3 -> (B, F) float32 on the device"""
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
            raise ValueError(f"features are taken of uint8 images with 1 or 3 channels, not of {images.dtype} {images.shape}")
        x = torch.tensor(images, device=self.device).permute(0, 3, 1, 2).expand(-1, 3, -1, -1).contiguous()
        try:
            with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
                features = self.network(x, return_features=True)
        except RuntimeError as error:                       # TorchScript gives the reason last, after a long trace
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"--features {self.file} fails on images of {tuple(x.shape[1:])}: {reason}") from None
        if features.ndim != 2 or len(features) != len(x):
            raise ValueError(f"--features {self.file} gives {tuple(features.shape)} for {len(x)} images, not a row each")
        return features.float()


def fetch(url, path, digest, flag, kind="sha256"):
    """Put a published file at path.   OSError: no network, or another file than expected; says where to put it, or what to give"""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            path.parent.mkdir(parents=True, exist_ok=True)  # only now: where there is no network, nothing is left behind
            with open(partial, "wb") as file:
                shutil.copyfileobj(response, file)
        found = checksum(partial, kind)
        if found != digest:
            raise OSError(f"its {kind} is {found}, not {digest}")
        os.replace(partial, path)
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"{path} is not there and could not be fetched ({error}): put {url} there, or give {flag}") from None
    finally:
        partial.unlink(missing_ok=True)


def checksum(path, kind="sha256"):
    digest = hashlib.new(kind)
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()


def feature_statistics(network, read, count, batch_size, rank=0, processes=1):
    """Mean and covariance of the features of `count` images, in one pass, each process its share.

    read: indices -> (B, H, W, C) uint8   -> mean (F,), covariance (F, F) float64; features (at most KEPT, F) float32

    The sums in float64 are of differences from the first image's features, as far from cancelling as the mean would be.
    """
    if count < 2:
        raise ValueError(f"a covariance needs at least 2 images, and there is {count}")
    origin = network(read(np.arange(1)))[0].cpu()           # (F,)
    every = -(-count // KEPT)
    kept = torch.zeros(-(-count // every), len(origin))
    home = torch.device("cpu") if network.device.type == "mps" else network.device          # mps has no float64
    total, products = (torch.zeros(*shape, dtype=torch.float64, device=home) for shape in (origin.shape, 2 * origin.shape))
    if processes > 1:
        dist.broadcast(origin, 0)
    share = np.arange(rank, count, processes)
    for start in range(0, len(share), batch_size):
        batch = share[start:start + batch_size]
        features = network(read(batch))                     # (B, F)
        centred = features.to(home, torch.float64) - origin.to(home)
        total += centred.sum(0)
        products += centred.T @ centred
        chosen = batch % every == 0
        kept[batch[chosen] // every] = features.cpu()[chosen]
        progress(f"features of {min((start + batch_size) * processes, count)} of {count} images", rank)
    total, products = total.cpu(), products.cpu()
    if processes > 1:
        for part in total, products, kept:
            dist.all_reduce(part)
    return origin + total / count, (products - total.outer(total) / count) / (count - 1), kept


class ImageFiles:
    """The images of a folder or .zip, all of one size: files.shape (N, H, W, 3), files[indices] -> (B, H, W, 3) uint8."""

    def __init__(self, path):
        from train import is_picture                        # train.py imports this file

        try:
            self.path, self.archive = Path(path), None if Path(path).is_dir() else zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        names = self.archive.namelist() if self.archive else [p.relative_to(path).as_posix() for p in self.path.rglob("*")]
        self.names = sorted(filter(is_picture, names))
        if not self.names:
            raise ValueError(f"{path} holds no images")
        self.shape = len(self.names), *self.load(0).shape

    def load(self, k):
        from train import FORMATS, to_rgb

        try:
            file = self.archive.open(self.names[k]) if self.archive else self.path / self.names[k]
            with Image.open(file, formats=FORMATS) as image:
                return np.asarray(to_rgb(image))
        except Exception as error:                          # decoders meet broken bytes with errors of a dozen kinds
            raise ValueError(f"{self.path / self.names[k]} cannot be read: {first_line(error)}") from None

    def __getitem__(self, indices):
        with ThreadPoolExecutor() as pool:
            images = list(pool.map(self.load, indices))
        for k, image in zip(indices, images):
            if image.shape != self.shape[1:]:
                raise ValueError(f"{self.path / self.names[k]} is {image.shape[1]}x{image.shape[0]} pixels, the first of its "
                                 f"images {self.shape[2]}x{self.shape[1]}: bring them to one size")
        return np.stack(images)


def open_images(path, cache):
    """Images as they are, from a folder, .zip, .npz or .npy.   -> mapped array or ImageFiles, (N, H, W, C) uint8"""
    from train import open_array

    if Path(path).suffix.lower() not in (".npz", ".npy"):
        return ImageFiles(path)
    try:
        images, _, _ = open_array(SimpleNamespace(data=path, cache=cache))
    except UNREADABLE as error:
        raise ValueError(f"{path} is not an array of images: {error}") from None
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(f"{path} holds {images.dtype} of shape {images.shape}; images are uint8, (N, H, W, C)")
    return images.reshape(*images.shape[:3], -1)


def reference_images(args, config, shape):
    """The images that --fid names.   shape: (H, W, C) of those to be measured   -> (N, H, W, C) uint8, mapped   ValueError"""
    from train import load_data_once, preset_args

    if Path(args.fid).suffix.lower() in (".npz", ".npy"):
        return open_images(args.fid, args.cache)
    flags = preset_args("digits", {"data": args.fid, "size": (32, 32) if args.fid == "cifar10" else tuple(shape[:2]),
                                   "gray": shape[2] == 1, "data_dir": args.data_dir, "cache": args.cache})
    if args.fid == "train":
        if "flags" not in config:
            raise ValueError("--fid train is the training data of a run, and no run is given")
        if config["data"]["latents"]:
            raise ValueError("--fid train: this run was trained on latents; give the images that they stand for")
        kept = {name: getattr(args, name) for name in ("cache", "data_dir") if getattr(args, name) != build_parser().get_default(name)}
        flags = argparse.Namespace(**{**vars(flags), **config["flags"], **kept})
    try:
        return load_data_once(flags, lambda line: print(line, flush=True)).images
    except ValueError as error:
        raise ValueError(str(error).replace("--data ", "--fid ")) from None


def published_statistics(file):
    """mu (F,) and sigma (F, F) of an .npz, as EDM, ADM and pytorch-fid publish them, or None if it holds images."""
    try:
        with np.load(file) as content:
            if {"mu", "sigma"} <= set(content.files):
                return content["mu"], content["sigma"]
            names = content.files
    except UNREADABLE as error:
        raise ValueError(f"--fid {file} cannot be read: {error}") from None
    if not {"arr_0", "images"} & set(names):                # what train.py takes for images
        raise ValueError(f"--fid {file} holds {', '.join(names)}: neither mu and sigma nor images (arr_0)")


def reference_statistics(args, config, network, shape, rank, processes):
    """Mean and covariance of what --fid names, and its features or None.   shape: (H, W, C) of the images to be measured"""
    width = network(np.zeros((1, *shape), np.uint8)).shape[1]
    published = published_statistics(args.fid) if args.fid.lower().endswith(".npz") else None
    if published:
        if [part.shape for part in published] != [(width,), (width, width)]:
            raise ValueError(f"--fid {args.fid} is of {published[0].size} features, and --features {network.file} gives {width}")
        return *published, None
    images = reference_images(args, config, shape)
    if images.shape[1:3] != tuple(shape[:2]):
        raise ValueError(f"--fid {args.fid}: its images are {images.shape[2]}x{images.shape[1]} pixels, and those to be measured "
                         f"{shape[1]}x{shape[0]}")
    return known_statistics(images, network, args.cache, args.batch_size, rank, processes)


def known_statistics(images, network, cache, batch_size, rank=0, processes=1):
    """feature_statistics of images; of a mapped file they are kept in the cache folder, as an .npz with mu and sigma."""
    from train import source

    if not isinstance(images, np.memmap):                   # a source that keeps its images in memory
        return feature_statistics(network, images.__getitem__, len(images), batch_size, rank, processes)
    key = repr((source(images.filename), images.shape, network.digest))
    file = Path(cache) / f"fid-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    known = torch.tensor([file.exists()])
    if processes > 1:
        dist.broadcast(known, 0)                            # processes may look at different moments
    if known:
        with np.load(file) as content:
            return content["mu"], content["sigma"], torch.from_numpy(content["features"])
    statistics = feature_statistics(network, images.__getitem__, len(images), batch_size, rank, processes)
    if rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.stem}.{os.getpid()}.partial.npz")
        np.savez(partial, **dict(zip(("mu", "sigma", "features"), statistics)))
        os.replace(partial, file)
    return statistics


def warn_of_few(count, features):
    if count < max(ENOUGH, features):
        than = f"the {features} features" if count < features else f"{ENOUGH:,}"
        print(f"warning: FID of {count:,} images, fewer than {than}, is biased upward: compare it only with FIDs of as many",
              file=sys.stderr, flush=True)


def measure(args, images, count, network, reference, rank, processes):
    """FID of images against the reference, and where its features are known, precision and recall.   -> a line, on rank 0"""
    mean, cov, features = feature_statistics(network, images.__getitem__, count, args.batch_size, rank, processes)
    if rank != 0:
        return ""
    warn_of_few(count, len(mean))
    line = f"FID {frechet_distance(mean, cov, *reference[:2]):.5g}"
    if reference[2] is not None:
        precision, recall = precision_recall(*(part.to(network.device) for part in (reference[2], features)))
        line += f", precision {precision:.4f}, recall {recall:.4f}"
    return f"{line}  ({count:,} images against {args.fid}, features of {network.file.name})"


# ---------------------------------------------------------------------------------------------------------------------
# The command

class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help in few lines: --[no-]gray for two spellings, and each line ends with the default, unless it says so itself."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action):
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]")
        return super()._format_action_invocation(action)

    def _get_default_metavar_for_optional(self, action):
        return "X"

    def _get_help_string(self, action):
        said = action.default is None or action.default is False or "(default" in action.help
        return action.help if said else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit status 2."""

    def __init__(self, **options):
        super().__init__(usage=f"{options['prog']} [FLAGS]", formatter_class=Help, allow_abbrev=False, **options)

    def error(self, message):
        message = re.sub("^argument (.*?): must", r"\1 must", message)
        self.exit(2, f"{self.prog}: {message}\n")


def lesson_parser(prog, description):
    """The parser of a lesson, which ends quietly at `| head`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return Parser(prog=prog, description=description)


def number(interval, kind=float):
    """The type of a flag: numbers in an interval such as "[0, 1)"; with kind=int whole ones, 1e5 included.   ArgumentTypeError"""
    low, high = (float(end) for end in interval[1:-1].split(","))

    def parse(text):
        value = math.nan
        for read in (int, float):                           # int first: a float has no room for the digits of a large seed
            with suppress(ValueError):
                value = read(text)
                break
        if value in (low, high):
            fine = interval[0 if value == low else -1] in "[]"
        else:
            fine = low < value < high and (kind is float or value == int(value))
        if not fine:
            raise argparse.ArgumentTypeError(f"must be a {'whole ' * (kind is int)}number in {interval}, not {text}")
        return kind(value)

    return parse


def listed(kind):
    """The type of a flag: values of a kind, separated by commas.   "1,2,2" -> (1, 2, 2), and nothing -> ()"""
    return lambda text: tuple(kind(part) for part in text.split(",") if part)


def build_parser():
    p = Parser(prog="sample.py", description="Draw images with a trained model, or measure images.")
    p.add_argument("run", nargs="?", help="run folder of train.py, or a checkpoint file; with --fid also images: a folder, .zip, .npz")
    p.add_argument("--out", help="grid.png, samples.npz or folder/ (default: sampled.png in the run folder, with --fid samples.npz)")
    p.add_argument("--count", type=number("[1, 1e9]", int), help="number of images (default: 64; 10 with --interpolate, 4 with --path)")
    p.add_argument("--batch-size", type=number("[1, 1e6]", int), default=64, help="images drawn at once by each process")
    p.add_argument("--seed", type=number("[0, 1e18]", int), default=0, help="image k depends on the seed and k alone")
    p.add_argument("--labels", help="class names or numbers separated by commas, taken in turn; 'none' for no label "
                                    "(default: all classes in turn)")
    p.add_argument("--solver", choices=SOLVERS, default="heun", help="how the ODE is followed")
    p.add_argument("--steps", type=number("[1, 1000]", int), default=18, help="noise levels, equal ones counted once; heun calls the model "
                                                                              "twice for each but the last")
    p.add_argument("--churn", type=number("[0, inf)"), default=0.0, help="S_churn of Karras et al. 2022, 0 = deterministic")
    p.add_argument("--guidance", type=number("(-inf, inf)"), default=1.0, help="s in D_none + s (D_label - D_none), 1 = off")
    p.add_argument("--guidance-interval", type=number("[0, 1000)", int), nargs=2, metavar=("FIRST", "LAST"),
                   help="timesteps that are guided, 0 = cleanest")
    p.add_argument("--raw", action="store_true", help="the weights of the last step instead of their moving average (EMA)")
    p.add_argument("--weights", metavar="FILE", help="published weights, with --preset instead of a run")
    p.add_argument("--preset", help="the setting of train.py that describes --weights")
    p.add_argument("--attention-order", choices=("new", "legacy"), default="new", help="qkv layout of --weights from guided-diffusion")
    p.add_argument("--decoder", metavar="FILE", help="TorchScript module from latents to images in [-1, 1]")
    p.add_argument("--fid", metavar="REFERENCE", help="measure FID against this: 'train' (the run's data), digits, cifar10, a folder or .zip "
                                                      "of images, an .npz of images or of mu and sigma")
    p.add_argument("--features", metavar="NETWORK", help=f"of --fid: TorchScript file (default: {INCEPTION} in --cache, fetched if need be)")
    p.add_argument("--cache", default="cache", metavar="DIR", help="of --fid: where decoded references and their statistics are kept")
    p.add_argument("--data-dir", default="cifar10", metavar="DIR", help="of --fid cifar10: where it lies, or is put")
    p.add_argument("--interpolate", type=number("[0, 1e9]", int), nargs=2, metavar=("A", "B"),
                   help="draw the way from the noise of image A of this seed to B's, with A's label")
    p.add_argument("--path", action="store_true", help="draw a film strip of the denoised image along sampling")
    p.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="where to compute")
    p.add_argument("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="precision of products")
    return p


def load_source(args):
    """The model that the command line names.   -> (model, Diffusion, config)"""
    if args.weights is None and args.run is None:
        raise ValueError("give a run folder or checkpoint, or --weights FILE with --preset NAME")
    if args.weights is None and Path(args.run).suffix in (".npz", ".npy", ".zip"):
        raise ValueError(f"{args.run} holds images, which are measured with --fid REFERENCE")
    if args.weights is None:
        return load_model(args.run, args.raw)
    from train import PRESETS, model_config, preset_args    # train.py imports this file

    if args.run is not None or args.preset is None or args.raw:
        raise ValueError("--weights goes with --preset NAME and without a run or --raw")
    if args.preset not in PRESETS:
        raise ValueError(f"--preset {args.preset!r} is not one of {', '.join(PRESETS)}")
    flags, state = preset_args(args.preset), read_weights(args.weights)
    model = build_model(adapt_config(model_config(flags, (3, *flags.size), None), state))
    fill_published(model, state, args.attention_order)
    classes = [str(k) for k in range(model.num_classes or 0)]
    data = {"shape": (model.in_channels, *flags.size), "classes": classes, "latents": model.in_channels == 4}
    return model.eval(), Diffusion(flags.schedule, flags.prediction), {"data": data, "step": 0}


def pick_labels(args, model, classes):
    """The labels that images take in turn; row K of the table, len(classes), means no label.   -> list of int, empty for none"""
    if model.num_classes is None and args.labels not in (None, "none"):
        raise ValueError("--labels: this model was trained without labels")
    if model.num_classes is None:
        return []
    if args.labels is None:
        return list(range(len(classes)))
    names = [name.strip() for name in args.labels.split(",")]
    if "none" in names and not model.null_label:
        raise ValueError("--labels none: this model never learned to do without labels (train with --label-dropout)")
    known = {name: k for k, name in enumerate(classes)} | {"none": model.num_classes}
    numbers = [known[name] if name in known else int(name) if name.isdecimal() else -1 for name in names]
    for name, number in zip(names, numbers):
        if name not in known and not 0 <= number < model.num_classes:
            some = ", ".join(classes[:12]) + (" ..." if len(classes) > 12 else "")
            raise ValueError(f"--labels {name!r} is neither a number below {model.num_classes} nor one of {some}")
    return numbers


def check_effect(args, drawing):
    """One line for flags that would be without effect."""
    from train import SOURCES                               # train.py imports this file

    given = [name for name, value in vars(args).items() if value != build_parser().get_default(name)]
    of_measuring, why = {"run", "fid", "features", "cache", "data_dir", "batch_size", "device"}, {}
    if not drawing:
        why |= dict.fromkeys(set(given) - of_measuring, "where images are measured, not drawn")
    if not args.weights:
        why |= dict.fromkeys(("preset", "attention_order"), "without --weights FILE")
    if not args.fid:
        why |= dict.fromkeys(("features", "cache", "data_dir"), "without --fid REFERENCE")
    elif args.fid not in {"train", *SOURCES} - {"digits"}:
        why |= {"data_dir": f"with --fid {args.fid}"}
    if args.path or args.interpolate:
        why |= {"batch_size": "on a strip, which is drawn at once"}
    if args.interpolate:
        why |= {"path": "beside --interpolate"}
    for name in given:
        if name in why:
            raise ValueError(f"--{name.replace('_', '-')} has no effect {why[name]}")


def check_together(args, model, diffusion):
    """One line for flags that do not go together, or not with this model."""
    if args.steps > diffusion.timesteps:
        raise ValueError(f"--steps {args.steps} is more than the {diffusion.timesteps} timesteps that the model knows")
    if args.guidance != 1 and (model.num_classes is None or not model.null_label or args.labels == "none"):
        raise ValueError(f"--guidance {args.guidance:g} needs labels and a class-conditional model that was trained with "
                         f"--label-dropout; 1 turns it off")
    first, last = args.guidance_interval or (0, 0)
    if args.guidance_interval and (args.guidance == 1 or not first <= last < diffusion.timesteps):
        raise ValueError(f"--guidance-interval goes with --guidance, and needs 0 <= FIRST <= LAST < {diffusion.timesteps}, not {first} {last}")
    if args.fid and args.count < 2:
        raise ValueError(f"--count {args.count}: the covariance of --fid needs at least 2 images")
    if args.interpolate and len(set(args.interpolate)) == 1:
        raise ValueError("--interpolate needs the numbers of two different images")
    if args.interpolate and args.churn:
        raise ValueError("--interpolate goes without --churn, whose noise belongs to neither image")
    if args.churn and args.solver in MULTISTEP:
        raise ValueError(f"--churn goes with --solver heun or euler; {args.solver} remembers the step before")


class Decoder:
    """From what the model draws to what is kept: uint8 images, latents as they are, or latents decoded to images."""

    def __init__(self, file, latents, device):
        if file and not latents:
            raise ValueError("--decoder is for models of latents, and this one draws images")
        self.network = load_torchscript("--decoder", file, device) if file else None
        self.file, self.keep_latents, self.device = file, latents and not file, device

    @torch.inference_mode()
    def __call__(self, x):
        if self.keep_latents:
            return x.float().cpu().numpy()
        if not self.network:
            return to_uint8(x)
        try:
            return to_uint8(self.network(x.float().to(self.device) / LATENT_SCALE))
        except RuntimeError as error:                       # TorchScript gives the reason last, after a long trace
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"--decoder {self.file} fails on latents of {tuple(x.shape[1:])}: {reason}") from None


def sampler_options(args):
    return {name: getattr(args, name) for name in ("steps", "solver", "churn", "guidance", "guidance_interval")}


def draw_strip(args, config, model, diffusion, device, labels, decode):
    """--interpolate: a strip of pictures from one image to another; --path: a row of denoised pictures for each image."""
    denoiser, shape, options = Denoiser(model.to(device), diffusion), config["data"]["shape"], sampler_options(args)
    with autocast(device, pick_precision(args.precision, device)):
        if args.interpolate:
            label = labels[args.interpolate[0] % len(labels)] if labels else None
            x = interpolate(denoiser, shape, args.seed, args.interpolate, args.count, label, device, **options)
            name = f" as {[*config['data']['classes'], 'no label'][label]}" if labels else ""
            columns, title = args.count, "from the noise of image {} to that of {}{}".format(*args.interpolate, name)
        else:
            chosen = [labels[k % len(labels)] for k in range(args.count)] if labels else None
            x, sigmas = denoising_path(denoiser, shape, args.seed, range(args.count), chosen, device, **options)
            x, columns = x.transpose(0, 1).flatten(0, 1), len(sigmas)
            title = f"D(x; sigma) in {columns} steps, sigma from {sigmas[0]:.3g} to {sigmas[-1]:.3g}"
    save_picture(titled(image_grid(decode(x), columns), title), args.out)
    return args.out


def draw_images(args, config, model, diffusion, device, labels, decode, rank, processes):
    """Draw what is still missing of the images and write each batch at once.   -> a line that says where they are"""
    denoiser, dtype = Denoiser(model.to(device), diffusion), pick_precision(args.precision, device)
    data = config["data"]
    if decode.keep_latents and not args.out.endswith(".npz"):
        raise ValueError(f"--out {args.out}: this model draws latents; take an .npz file, or --decoder FILE to see pictures")
    settings = {"source": str(args.run or args.weights), "step": config["step"], "precision": str(dtype), "labels": labels,
                "classes": data["classes"], "latents": decode.keep_latents}
    settings |= {name: getattr(args, name) for name in ("count", "seed", "raw", "decoder")} | sampler_options(args)
    shape = decode(torch.zeros(1, *data["shape"])).shape[1:]
    store = (ArrayStore if args.out.endswith((".png", ".npz")) else FolderStore)(args.out, args.count, shape, settings)
    if rank == 0:
        store.create()
    wait_for_all()
    todo = np.flatnonzero(~store.open())
    batches = [todo[start:start + args.batch_size] for start in range(0, len(todo), args.batch_size)][rank::processes]
    started, finished, mine = time.time(), 0, sum(map(len, batches))
    for batch in batches:
        def show(i, sigma, x0):
            done = finished + len(batch) * (i + 1) / args.steps
            progress(f"{args.count - (mine - finished) * processes} of {args.count} images, step {i + 1} of {args.steps}, "
                     f"{(time.time() - started) * (mine - done) / done:.0f} s left", rank)

        chosen = [labels[k % len(labels)] for k in batch] if labels else None
        with autocast(device, dtype):
            images = generate(denoiser, data["shape"], args.seed, batch.tolist(), chosen, device, on_step=show, **sampler_options(args))
        store.write(batch, decode(images))
        finished += len(batch)
    wait_for_all()
    seconds = time.time() - started
    return f"{store.finish()}  ({len(todo)} images in {seconds:.1f} s, {len(todo) / seconds:.1f} a second)" if rank == 0 else ""


def on_terminal():
    """Whether somebody watches; a closed standard output is None."""
    return sys.stdout is not None and sys.stdout.isatty()


def progress(line, rank=0):
    """A line that is overwritten by the next one on a terminal; a file gets none."""
    if rank == 0 and on_terminal():
        print(f"\r\033[K{line}", end="", flush=True)


def holds_images(path):
    """Whether this is images rather than a run or a checkpoint."""
    return Path(path).suffix in (".npz", ".npy", ".zip") or Path(path).is_dir() and not (Path(path) / "checkpoint.pt").exists()


def pick_out(args):
    """Where the pictures go.   ValueError: not a place for what is asked"""
    folder = Path(args.run if args.run and Path(args.run).is_dir() else Path(args.run or ".").parent)
    strip = "interpolated.png" if args.interpolate else "path.png" if args.path else None
    out = args.out or str(folder / (strip or ("samples.npz" if args.fid else "sampled.png")))
    if Path(out).suffix not in (".png", ".npz", "") and not out.endswith("/"):
        raise ValueError(f"--out {out} must end in .png (a grid), .npz (arrays) or / (a folder of images)")
    if out.endswith((".png", ".npz")) and Path(out).is_dir():
        raise ValueError(f"--out {out} is a folder")
    if out.endswith(".npz") and Path(out).exists():
        raise ValueError(f"--out {out} exists already: delete it, choose another, or measure it with: sample.py {out} --fid REFERENCE")
    if strip and not out.endswith(".png"):
        raise ValueError(f"--out {out}: --interpolate and --path draw one picture, a .png")
    if args.fid and out.endswith(".png"):
        raise ValueError(f"--out {out}: FID is measured on the images of an .npz or a folder, and not on strips or grids")
    return out


def main():
    parser = build_parser()
    args, rank = parser.parse_args(), int(os.environ.get("RANK", 0))

    def say(line):
        if rank == 0:
            print(("\r\033[K" if on_terminal() else "") + line, flush=True)

    try:
        drawing = not (args.fid and args.run and holds_images(args.run))
        check_effect(args, drawing)
        if drawing:
            model, diffusion, config = load_source(args)
            args.count = {None: 10 if args.interpolate else 4 if args.path else 64}.get(args.count, args.count)
            check_together(args, model, diffusion)
            labels = pick_labels(args, model, config["data"]["classes"])
            args.out = pick_out(args)
        device = pick_device(args.device)
        rank, processes = join_processes(device)
        if drawing:
            decode = Decoder(args.decoder, config["data"]["latents"], device)
            shape = decode(torch.zeros(1, *config["data"]["shape"])).shape[1:]
            if decode.keep_latents and (args.fid or args.interpolate or args.path):
                raise ValueError("this model draws latents: --fid, --interpolate and --path need --decoder FILE to see pictures")
        else:
            config, images = {}, open_images(args.run, args.cache)
            shape = images.shape[1:]
        if args.fid:                                        # before hours of drawing, so that a mistake shows at once
            network = FeatureNetwork(args.features, args.cache, device)
            reference = reference_statistics(args, config, network, shape, rank, processes)
        if drawing:
            weights = "published" if args.weights else "raw" if args.raw else "EMA"
            say(f"{args.count} images of {'x'.join(map(str, config['data']['shape']))} with the {weights} weights, {args.solver}, "
                f"{args.steps} steps, guidance {args.guidance:g}, seed {args.seed}, on {device.type}")
        if args.interpolate or args.path:
            say(draw_strip(args, config, model, diffusion, device, labels, decode) if rank == 0 else "")
        elif drawing:
            say(draw_images(args, config, model, diffusion, device, labels, decode, rank, processes))
        if args.fid:
            wait_for_all()                                  # the first process has just finished the file
            images = open_images(args.out, args.cache) if drawing else images
            say(measure(args, images, args.count if drawing else images.shape[0], network, reference, rank, processes))
        wait_for_all()
    except KeyboardInterrupt:
        parser.exit(130, "\nstopped; the same command goes on with what is missing\n" if rank == 0 else None)
    except (ValueError, OSError) as error:
        parser.exit(2, f"sample.py: {error}\n" if rank == 0 else None)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        parser.exit(2, "sample.py: out of memory: a smaller --batch-size needs less\n")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
