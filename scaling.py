"""Coefficients for the long skip connections of a UNet or UViT.

Huang et al. 2023, "ScaleLong: Towards More Stable Training of Diffusion Model via Scaling Network Long Skip Connection"
(arXiv 2310.13545): the decoder receives kappa_i * h_i instead of h_i. There are N long skips; i = 0 is the outermost
(first encoder output -> last decoder block), i = N - 1 the innermost. The paper counts from 1.

    python scaling.py                       # the coefficients of every mode, and the paper's theorems measured
    python scaling.py --run runs/digits     # what a trained run has made of its skips
    python train.py --skip-scaling cs --kappa 0.7 --probe 20
"""

import math
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn


class LearnedScale(nn.Module):
    """LS, Section 4.2: one coefficient in (0, 1) for each entry of axis 1, computed from the skip itself.

    (B, n, ...) -> (B, n, 1, ...): a channel's coefficient for feature maps (B, C, H, W), a token's for (B, L, D).
    n is fixed, so a UViT with learned scales works at one image size. PyTorch's default initialisation is kept, as in the
    authors' code: the coefficients start near 0.5.
    """

    def __init__(self, n, reduction):
        super().__init__()
        hidden = max(1, n // reduction)
        self.fc1 = nn.Linear(n, hidden)
        self.fc2 = nn.Linear(hidden, n)

    def forward(self, skip):
        a = skip.flatten(2).mean(2)                                             # (B, n)
        kappa = torch.sigmoid(self.fc2(torch.relu(self.fc1(a))))                # (B, n)
        return kappa.view(*kappa.shape, *[1] * (skip.dim() - 2))


# mode -> kappa_i, a number, for i = 0 .. N - 1. To try a new constant scaling, add a line.
CONSTANTS = {
    "none": lambda i, kappa: 1.0,
    "sqrt2": lambda i, kappa: 2**-0.5,              # Song et al. 2021 and Ho et al. 2022, among others
    "cs": lambda i, kappa: kappa**i,                # CS, Section 4.1: kappa^(i - 1) when counted from 1
}


def one_for_each_width(widths, reduction):
    networks = {width: LearnedScale(width, reduction) for width in dict.fromkeys(widths)}
    return [networks[width] for width in widths]


# mode -> (widths, reduction) -> the module of each skip, which maps the skip to kappa_i. To try a new learned scaling, add a line.
LEARNED = {
    "ls": one_for_each_width,
    "ls-separate": lambda widths, reduction: [LearnedScale(width, reduction) for width in widths],
}
MODES = (*CONSTANTS, *LEARNED)


class SkipScaling(nn.Module):
    """Scales long skip i: `scaling(i, h_i)` is kappa_i * h_i, of the same shape and dtype as h_i, (B, n, ...).

    mode: one of MODES; ls has one network for all skips of the same width, ls-separate one for each skip
    widths: n of each skip, outermost first: channels of a UNet, tokens of a UViT
    kappa: in (0, 1], for cs; useful from 0.5 to 0.95   reduction: r of LS, whose hidden layer has max(1, n // r) units
    ValueError: unknown mode, kappa outside (0, 1], reduction below 1.
    """

    def __init__(self, mode, widths, kappa=0.7, reduction=16):
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"skip scaling {mode!r} is not one of {', '.join(MODES)}")
        if not 0 < kappa <= 1:
            raise ValueError(f"kappa must lie in (0, 1], not {kappa}")
        if reduction < 1:
            raise ValueError(f"reduction must be at least 1, not {reduction}")
        self.mode, self.widths = mode, list(widths)
        if mode in CONSTANTS:
            self.kappas = [float(CONSTANTS[mode](i, kappa)) for i in range(len(self.widths))]
        else:
            of_skip = LEARNED[mode](self.widths, reduction)
            self.networks = nn.ModuleList(dict.fromkeys(of_skip))               # each once
            self.network_of_skip = [list(self.networks).index(network) for network in of_skip]

    def coefficient(self, i, skip):
        """kappa_i: a number, or for the learned modes a tensor (B, n, 1, ...) that depends on the skip (B, n, ...)."""
        if self.mode in CONSTANTS:
            return self.kappas[i]
        return self.networks[self.network_of_skip[i]](skip)

    def forward(self, i, skip):
        return skip if self.mode == "none" else skip * self.coefficient(i, skip)


# ---------------------------------------------------------------------------------------------------------------------
# Probes: what the coefficients do to features, gradients and robustness. Whatever has an index i belongs to skip i: encoder
# block i gives it, and "decoder block i" is the one that takes it, so that decoder block 0, the outermost, runs last.
# Nothing here changes the model or waits for a GPU.

def mean_norm(x):
    """The L2 norm of each sample, (B, ...), in float32 at least, averaged over the batch.   -> ()"""
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), dtype=torch.promote_types(x.dtype, torch.float32)).mean()


@contextmanager
def probe(model):
    """Measure the forward passes of a UNet or UViT:   with probe(model) as record: model(x, t, labels)

    record: afterwards {name: (N,)}, each the mean over the passes
      skip_norm, scaled_norm   ||h_i|| and ||kappa_i h_i||, see mean_norm
      decoder_norm             ||h'_i||, the output of decoder block i
      kappa, kappa_square      means of kappa_i and kappa_i^2 over the batch and, where learned, channels or tokens
    """
    record, now, passes = {}, {}, []

    @torch.no_grad()
    def see_skip(scaling, inputs, scaled):
        i, skip = inputs
        kappa = scaling.coefficient(i, skip)
        kappa = kappa.float() if torch.is_tensor(kappa) else torch.full((), kappa, device=skip.device)
        now["skip_norm", i], now["scaled_norm", i] = mean_norm(skip), mean_norm(scaled)
        now["kappa", i], now["kappa_square", i] = kappa.mean(), kappa.square().mean()

    def see_block(i):
        def see(block, inputs, output):
            now["decoder_norm", i] = mean_norm(output.detach())
        return see

    def see_end(model, inputs, output):                     # blocks that checkpointing runs again come later, and do not count
        passes.append(dict(now))

    handles = [model.skip_scaling.register_forward_hook(see_skip), model.register_forward_hook(see_end)]
    handles += [block.register_forward_hook(see_block(i)) for i, block in enumerate(reversed(model.decoder))]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
    for name in dict.fromkeys(name for name, i in now):
        record[name] = torch.stack([torch.stack([seen[name, i] for seen in passes]).mean() for i in range(len(model.decoder))])


def gradient_norms(model):
    """L2 norm of the gradient, .grad, of all parameters of each block.   -> {"encoder_grad": (N,), "decoder_grad": (N,)}"""
    def norm(block):
        return torch.stack([p.grad.norm() for p in block.parameters() if p.grad is not None]).norm()

    return {"encoder_grad": torch.stack([norm(block) for block in model.encoder]),
            "decoder_grad": torch.stack([norm(block) for block in reversed(model.decoder)])}


@torch.no_grad()
def response(model, x, t, labels, delta):
    """||f(x + delta) - f(x)|| / ||delta|| of each sample, which Theorem 3.3 bounds.   x, delta: (B, C, H, W) -> (B,)"""
    moved = (model(x + delta, t, labels) - model(x, t, labels)).float()
    return moved.flatten(1).norm(dim=1) / delta.flatten(1).norm(dim=1)


def oscillation(values, rows=10):
    """How much a positive quantity jumps along training: the standard deviation of its logarithm over so many rows of the
    log, of all such windows the median. 0.1 is about 10 %.   list of floats -> float, nan where there are too few"""
    logs = torch.tensor([value for value in values if math.isfinite(value)], dtype=torch.float64).log()
    return logs.unfold(0, rows, 1).std(1).median().item() if len(logs) >= rows else math.nan


# ---------------------------------------------------------------------------------------------------------------------
# A lesson: python scaling.py. The theorems, measured on fresh networks

# name -> (mode, kappa); fresh, ls-separate is as ls
SETTINGS = {f"cs {kappa}" if mode == "cs" else mode: (mode, kappa)
            for mode in MODES if mode != "ls-separate" for kappa in ((0.9, 0.7, 0.5) if mode == "cs" else (1.0,))}
DEPTHS = 4, 8, 16           # numbers of long skips
SEEDS = 2                   # networks that each number is averaged over
QUANTITIES = "features", "gradients", "response"


class PaperNet(nn.Module):
    """The network that the theorems speak of (Section 3): f_i(x) = b_i(kappa_i a_i(x) + f_{i+1}(a_i(x))), with f_N the middle.

    Each a and b is a ReLU and a random matrix that keeps norms. It adds its skips, where UNet and UViT concatenate, and it
    has no norms and no shortcuts.   (B, L, D) -> (B, L, D)
    """

    def __init__(self, depth, mode, kappa, tokens=4, width=128):
        super().__init__()
        blocks = [nn.Sequential(nn.ReLU(), nn.Linear(width, width, bias=False)) for _ in range(2 * depth + 1)]
        for block in blocks:
            nn.init.kaiming_normal_(block[1].weight)
        self.encoder, self.middle = nn.ModuleList(blocks[:depth]), blocks[depth]
        self.decoder = nn.ModuleList(blocks[depth + 1:])
        self.skip_scaling = SkipScaling(mode, [tokens] * depth, kappa)

    def forward(self, x, t, labels=None):
        skips = []
        for i, block in enumerate(self.encoder):
            x = block(x)
            skips.append(self.skip_scaling(i, x))
        x = self.middle(x)
        for block in self.decoder:
            x = block(x + skips.pop())
        return x


def with_random_weights(model):
    """PyTorch's default weights in all layers of a UNet or UViT: the theorems speak of random weights, while ours begin with
    layers that are zero (UNet) or have a standard deviation made for a width of 512 (UViT)."""
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and "skip_scaling" not in name:
            layer.reset_parameters()
    return model


def fresh_networks():
    """{name: (build(depth, mode, kappa), shape of a sample)}"""
    from unet import UNet
    from uvit import UViT

    def unet(depth, mode, kappa):
        return with_random_weights(UNet(8, channels=16, channel_mult=(1,), blocks=depth - 1, attention=(), skip_scaling=mode,
                                        kappa=kappa))

    def uvit(depth, mode, kappa):
        return with_random_weights(UViT(8, width=64, depth=2 * depth, heads=4, skip_scaling=mode, kappa=kappa))

    return {"paper's network": (PaperNet, (4, 128)), "UNet": (unet, (3, 8, 8)), "UViT": (uvit, (3, 8, 8))}


def measure_fresh(build, shape, depth, mode, kappa):
    """Squares of ||h'_i||, of decoder block i's gradient, (N,), and of the response, (); kappa_i^2 (N,).   Means over SEEDS"""
    results = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)                             # the same input, noise and, up to LS, weights for every mode
        x, direction, delta = torch.randn(3, 8, *shape)
        t = torch.randint(1000, (8,))
        model = build(depth, mode, kappa)
        with probe(model) as record:
            output = model(x, t)
        (output * direction).sum().backward()               # a random direction, of the same norm whatever the output is
        features, gradients = record["decoder_norm"], gradient_norms(model)["decoder_grad"]
        results.append((features**2, gradients**2, response(model, x, t, None, 0.01 * delta).mean()**2, record["kappa_square"]))
    return [torch.stack(values).mean(0) for values in zip(*results)]


def theory(squares):
    """What the theorems say of kappa_i^2, (N,), with blocks that keep norms: features and gradients grow as 1 + sum_{j >= i}
    kappa_j^2 (3.1 and 3.2), the response to a random delta as the whole sum. The 1 is the middle, which no skip scales."""
    sums = 1 + squares.flip(0).cumsum(0).flip(0)            # (N,)
    return sums, sums, sums[0]


def show_coefficients(depth=8):
    print(f"kappa of {depth} long skips, the outermost ... the innermost, and the sum of their squares")
    for name, (mode, kappa) in SETTINGS.items():
        if mode in CONSTANTS:
            kappas = SkipScaling(mode, [1] * depth, kappa).kappas
            print(f"  {name:8s} {' '.join(f'{k:5.3f}' for k in kappas)}   {sum(k * k for k in kappas):6.2f}")
    torch.manual_seed(0)
    scaling = SkipScaling("ls", [64])
    kappas = scaling.coefficient(0, torch.randn(1, 64, 8, 8))
    print(f"  ls       starts near one half: here between {kappas.min():.3f} and {kappas.max():.3f} over 64 channels, with "
          f"{sum(p.numel() for p in scaling.parameters())} parameters to learn better ones")


def show_theorems():
    """Print and draw features, gradients and response at initialisation beside what the theorems say."""
    from sample import line_chart, save_picture

    networks, found = fresh_networks(), {}
    for depth in DEPTHS:
        for name, (mode, kappa) in SETTINGS.items():
            for network, (build, shape) in networks.items():
                *found[network, depth, name], squares = measure_fresh(build, shape, depth, mode, kappa)
                found.setdefault(("theory", depth, name), theory(squares))      # of the paper's network, the first
    rows = ["theory", *networks]
    print("\nSquared norms at initialisation, divided by those of none: features of the decoder and gradients of its blocks,")
    print(f"means over the blocks; response to a random perturbation of the input. Means over {SEEDS} networks")
    print(" " * 12 + "".join(f"{row:>26s}" for row in rows))
    print(f" N  {'mode':8s}" + "".join(f"{'feat.':>10s}{'grad.':>8s}{'resp.':>8s}" for _ in rows))
    means = {key: torch.stack([value.mean() for value in values]) for key, values in found.items()}
    ratios = {(row, depth, name): mean / means[row, depth, "none"] for (row, depth, name), mean in means.items()}
    for depth in DEPTHS:
        for name in SETTINGS:
            print(f"{depth:2d}  {name:8s}" + "".join("{:10.2f}{:8.2f}{:8.2f}".format(*ratios[row, depth, name]) for row in rows))
    for network in networks:
        print(f"correlation with the theory, {network}: " + ", ".join(
            f"{quantity} {correlation(ratios, network, k):+.2f}" for k, quantity in enumerate(QUANTITIES)))
    panels = [panel for row in rows for panel in theorem_panels(found, row)]
    save_picture(line_chart(panels, height=230), "runs/lessons/scaling.png")
    print("\nSee in runs/lessons/scaling.png: in the paper's network all three shrink as the theorems say. In ours the features")
    print("do, but less, while gradients, which without scaling vanish in the inner blocks, grow: norm layers divide by size.")


def correlation(ratios, network, k):
    """Pearson's, of quantity k with the theory over the modes: the mean over depths."""
    pairs = [[[ratios[row, depth, name][k] for name in SETTINGS] for row in ("theory", network)] for depth in DEPTHS]
    return torch.stack([torch.corrcoef(torch.tensor(pair))[0, 1] for pair in pairs]).mean().item()


def theorem_panels(found, row):
    """Features and gradients along the deepest decoder, and the response by depth.   -> panels of line_chart"""
    deepest, panels = DEPTHS[-1], []
    for k, quantity in enumerate(QUANTITIES[:2]):
        largest = found[row, deepest, "none"][k].max()
        lines = {name: (range(deepest), found[row, deepest, name][k] / largest) for name in SETTINGS}
        panels.append({"title": f"{row}: {quantity} squared, N = {deepest}", "x": "decoder block i, 0 = outermost",
                       "log_y": True, "lines": lines})
    responses = {name: torch.stack([found[row, depth, name][2] for depth in DEPTHS]) for name in SETTINGS}
    lines = {name: (DEPTHS, values / responses["none"][0]) for name, values in responses.items()}
    return [*panels, {"title": f"{row}: response squared", "x": "long skips N", "log_y": True, "lines": lines}]


# ---------------------------------------------------------------------------------------------------------------------
# A lesson: python scaling.py --run RUN

RUN_IMAGES = 64             # that every bin of timesteps is measured on
DELTA = 0.01                # standard deviation of the perturbation, where a picture's is about 0.5 and the noise's up to 1


def measure_bins(run):
    """In each bin of t, on the same images: what `probe` records, and the response.   -> {name: (bins, N) or (bins,)}"""
    from weighting import draw_batch, squeeze_into_bin

    x0, t, noise, labels = draw_batch(run, 0, RUN_IMAGES)
    delta, results = DELTA * torch.randn(x0.shape, generator=torch.Generator().manual_seed(0)).to(x0), []
    for k in range(run.bins):
        t_k = squeeze_into_bin(t, k, run.bins, run.diffusion.timesteps)
        x_t = run.diffusion.add_noise(x0, noise, t_k)
        with torch.no_grad(), probe(run.model) as record:
            run.model(x_t, t_k, labels)
        results.append(record | {"response": response(run.model, x_t, t_k, labels, delta).mean()})
    return {name: torch.stack([result[name] for result in results]).cpu() for name in results[0]}


def show_run(run, found):
    """Print kappa_i and the response in each bin of t, and the norms of the skips."""
    kappa, skips = found["kappa"], range(found["kappa"].shape[1])
    spread = (found["kappa_square"].mean(0) - kappa.mean(0)**2).clamp(min=0).sqrt()
    print(f"\nkappa_i of the {len(skips)} long skips (0 = outermost), skip scaling {run.model.skip_scaling.mode}; "
          f"response: ||f(x_t + delta) - f(x_t)|| / ||delta||")
    print(f"{'t':12s}" + "".join(f"{i:6d}" for i in skips) + "   response")
    for name, row, answer in zip(run.names, kappa, found["response"]):
        print(f"{name:12s}" + "".join(f"{k:6.3f}" for k in row) + f"{answer:11.4f}")
    print(f"{'all':12s}" + "".join(f"{k:6.3f}" for k in kappa.mean(0)) + f"{found['response'].mean():11.4f}")
    print(f"{'spread':12s}" + "".join(f"{k:6.3f}" for k in spread) + "   over images, timesteps, and channels or tokens")
    for name, title in ("skip_norm", "||h_i||"), ("scaled_norm", "||k h_i||"), ("decoder_norm", "||h'_i||"):
        print(f"{title:12s}" + "".join(f"{value:6.4g}" for value in found[name].mean(0)))
    print(f"sum of kappa_i^2: {found['kappa_square'].mean(0).sum():.2f} of {len(skips)} without scaling")


def show_oscillation(log):
    """One number for a run that was trained with --probe."""
    values = [oscillation(log[name]) for name in log if name.startswith("decoder_norm_")]
    if values and math.isfinite(values[0]):                 # a short log has none
        print(f"oscillation of the decoder's features along training: {sum(values) / len(values):.3f} on average over its blocks,"
              f" {values[0]:.3f} in the outermost\n(standard deviation of the logarithm of the norm over 10 rows of log.csv, median)")


def study_run(path, bins):
    """What a trained run has made of its long skips: kappa and response along t.   ValueError: no run, or none with skips"""
    from sample import line_chart, load_checkpoint, save_picture
    from train import read_log
    from weighting import open_run

    model = load_checkpoint(path)["config"]["model"]
    if model["class"] == "ViT" or model["class"] == "UViT" and model["depth"] < 2:
        raise ValueError(f"--run {path}: a {model['class']} of depth {model['depth']} has no long skips to look at")
    run, folder = open_run(path, bins), Path(path) if Path(path).is_dir() else Path(path).parent
    found = measure_bins(run)
    show_run(run, found)
    if (folder / "log.csv").exists():
        show_oscillation(read_log(folder / "log.csv"))
    depth = found["kappa"].shape[1]
    shown = sorted({round(k * (depth - 1) / 7) for k in range(8)})      # at most eight lines
    panels = [{"title": "kappa of each long skip", "x": "timestep t",
               "lines": {f"skip {i}": (run.middles, found["kappa"][:, i]) for i in shown}},
              {"title": "response to a small perturbation", "x": "timestep t", "log_y": True,
               "lines": {"": (run.middles, found["response"])}}]
    save_picture(line_chart(panels), folder / "scaling.png")
    low, high = found["response"].argmin(), found["response"].argmax()
    print(f"The answer moves least where t is in {run.names[low]}, most where it is in {run.names[high]}.")
    print(f"\nlook at {folder / 'scaling.png'}")


def main():
    from sample import lesson_parser, number

    parser = lesson_parser("scaling.py", "What the coefficients of the long skips are and do, and with --run what a "
                           "trained run has made of them.")
    parser.add_argument("--run", help="run folder of train.py, or a checkpoint file, to look into")
    parser.add_argument("--bins", type=number("[1, 100]", int), help="of --run: equal parts of the timesteps (default: 10)")
    args = parser.parse_args()
    if args.run is None and args.bins:
        parser.error("--bins goes with --run")
    if args.run is None:
        show_coefficients()
        return show_theorems()
    try:
        study_run(args.run, args.bins or 10)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
