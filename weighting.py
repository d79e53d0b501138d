"""Loss weights over the timesteps of a diffusion model.

Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy" (arXiv 2303.09556): every timestep is a
task, the tasks' gradients conflict, and min(SNR, gamma) balances them.

    python weighting.py                         # the weights of every strategy, as a table and as a picture
    python weighting.py --run runs/digits       # why they matter: the gradients of a trained run, in a minute or two
    python train.py --weighting min-snr --gamma 5

A weighting is stated once, as a weight w(SNR) on the squared error of x_0, and written for another prediction by the
change of variable (Section 3.4 of the paper): with s = SNR = alpha^2 / sigma^2,

    |eps error|^2 = s |x_0 error|^2          |v error|^2 = (s + 1) |x_0 error|^2

so that the same loss has the weight w/s on eps and w/(s + 1) on v. A small weight on v at high noise is therefore no
mistake: at s = 0.001, min-snr gives v the weight 0.001, and x_0 the same.
"""

import copy
from pathlib import Path
from types import SimpleNamespace

import torch

# name -> w(snr, gamma), the weight on the squared x_0 error, positive at every SNR. To try a new weighting, add a line.
WEIGHTINGS = {
    "constant": lambda snr, gamma: torch.ones_like(snr),            # plain regression of x_0
    "snr": lambda snr, gamma: snr,                                  # plain regression of eps: the "simple" loss of DDPM
    "snr+1": lambda snr, gamma: snr + 1,                            # plain regression of v
    "max-snr": lambda snr, gamma: snr.clamp(min=gamma),             # truncated SNR, Salimans & Ho 2022 (gamma = 1)
    "min-snr": lambda snr, gamma: snr.clamp(max=gamma),             # Min-SNR-gamma, Hang et al. 2023 (gamma = 5)
    "soft-min-snr": lambda snr, gamma: snr / (1 + snr / gamma),     # s g / (s + g), Crowson et al. 2024 (HDiT)
    "p2": lambda snr, gamma: snr / (1 + snr) ** gamma,              # P2, Choi et al. 2022 (gamma = 1)
}

# prediction -> (its squared error) / (the squared error of x_0)
CHANGE_OF_VARIABLE = {
    "x0": lambda snr: torch.ones_like(snr),
    "eps": lambda snr: snr,
    "v": lambda snr: snr + 1,
}


def loss_weight(snr, weighting="min-snr", gamma=5.0, prediction="x0"):
    """The weight on the squared error of `prediction` at signal-to-noise ratio `snr`.   Hang et al. 2023, Section 3.4.

    snr: float tensor of any shape, >= 0.   Returns a tensor of the same shape and dtype, finite and > 0 for every SNR
    that a schedule reaches (p2 with a large gamma excepted, which may underflow to 0).   ValueError: unknown weighting or
    prediction, gamma not a positive number, a weighting that gives negative weights.

    At SNR = 0 exactly (a schedule with zero terminal SNR) the weight is 1 where the formula gives 0, 0/0 or infinity,
    as in the authors' code: otherwise the terminal step would never be trained.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting {weighting!r} is not one of {', '.join(WEIGHTINGS)} (ugd and frank-wolfe have no formula: "
                         f"see pareto_weights)")
    if prediction not in CHANGE_OF_VARIABLE:
        raise ValueError(f"prediction {prediction!r} is not one of {', '.join(CHANGE_OF_VARIABLE)}")
    if not 0 < gamma < float("inf"):
        raise ValueError(f"gamma must be a positive number, not {gamma}")
    weight = WEIGHTINGS[weighting](snr, gamma) / CHANGE_OF_VARIABLE[prediction](snr)
    if not (weight[snr > 0] >= 0).all():
        raise ValueError(f"weighting {weighting!r} gives weights below 0, or that are no numbers")
    no_weight = (snr == 0) & ~((weight > 0) & weight.isfinite())
    return weight.masked_fill(no_weight, 1).clamp(max=torch.finfo(weight.dtype).max)


# ---------------------------------------------------------------------------------------------------------------------
# The Pareto view. With g_i the gradient of the loss of timesteps i alone, weights w on the simplex that minimise
# |sum_i w_i g_i|^2 + lambda |w|^2 give a direction that lowers every loss, as long as there is one. Only the Gram matrix
# G_ij = <g_i, g_j> is needed. min-snr approximates such weights without solving for them.

ROUNDING = 1e-14            # a computed slope <g_i, x> is good to this part of |g_i| sum_j w_j |g_j|
TOLERANCE = 1e-12           # the solvers stop within twice this part of the optimum, or at the rounding errors
DESCENT_STEPS = 500         # 10 to 30 do, unless the Gram matrix is singular to nearly all its digits


def gradient_gram(losses, parameters):
    """Gram matrix of the tasks' gradients: G_ij = <g_i, g_j>, g_i = gradient of loss i.   (K, K) float64 on the CPU.

    losses: K scalars of one graph or of several; a generator that builds each in its turn saves memory, of which K
    gradients are held. parameters: frozen ones are left out; one that a loss does not use counts as zero there. No
    .grad is touched. ValueError: a gradient that is not finite.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True) for loss in losses]
    gram = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for tensors in zip(*gradients):                                   # the K gradients of one parameter
        rows = torch.stack([tensor.flatten() for tensor in tensors])
        rows = (rows.cpu() if rows.is_mps else rows).double()         # Apple's GPUs have no float64
        gram += (rows @ rows.T).cpu()
    for task, square in enumerate(gram.diagonal().tolist()):
        if not square < float("inf"):
            raise ValueError(f"the gradient of task {task} (from 0) must be finite, its squared norm is {square}")
    return gram


def pareto_objective(gram, weights, regularization=0.0):
    """w'Gw + regularization |w|^2; w'Gw = |sum_i w_i g_i|^2.   Hang et al. 2023, Section 3.3.   (..., K) -> (...)"""
    gram, weights = (torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in (gram, weights))
    return ((weights @ gram) * weights).sum(-1) + regularization * weights.square().sum(-1)


def squeeze_into_bin(t, k, bins, timesteps):
    """Timesteps spread over [0, T) -> spread over bin k of it, which are all t with t * bins // T == k.   (B,) -> (B,)"""
    start, end = -(-timesteps * k // bins), -(-timesteps * (k + 1) // bins)
    return start + t * (end - start) // timesteps


def task_slopes(gram, weights):
    """<g_i, x> of each task with the common gradient x = sum_j w_j g_j, and its rounding error.   (K,), (K,)

    At the optimum none is below |x|^2; if one is by d, then |x|^2 is at most 2 d above the optimum.
    """
    norms = gram.diagonal().sqrt()
    return gram @ weights, ROUNDING * norms * (norms @ weights)


def solve_ugd(gram):
    """Unconstrained gradient descent: w = softmax(beta), descend on beta.   Hang et al. 2023, Section 3.3.

    The plain gradient stalls where weights go to 0 or the g_i differ in size, so it is preconditioned: Gauss-Newton,
    damped by |excess|, with which a superfluous weight shrinks by up to 100 a step. Adding log(1 + step tilt) to beta
    moves w on a straight line, where the objective is a parabola and the best step known.
    """
    beta = -gram.diagonal().log() / 2
    for _ in range(DESCENT_STEPS):
        weights = beta.softmax(0)
        slopes, rounding = task_slopes(gram, weights)
        excess = slopes - weights @ slopes                            # 2 w * excess is the gradient for beta
        if (excess + rounding).min() >= -TOLERANCE * (weights @ slopes):
            break
        curvature = (gram - slopes - excess[:, None]) * weights       # <g_i - x, g_j - x> w_j
        tilt = torch.linalg.solve(curvature + (excess.abs() + rounding).diag(), -excess)
        tilt = tilt - weights @ tilt
        fall, bend = -slopes @ (weights * tilt), pareto_objective(gram, weights * tilt)
        if not fall > 0:                                              # only rounding errors are left
            break
        step = 0.99 / tilt.abs().max()                                # 1 / max(-tilt) brings the first weight to 0
        beta = beta + torch.log1p(tilt * (fall / bend if step * bend > fall else step))
    return weights


def face_minimum(gram, used):
    """argmin w'Gw over all w, of either sign, with sum 1 and w = 0 where not `used`.   (K, K), (K,) bool -> (K,)"""
    face = gram[used][:, used]
    face = face + face.diagonal().min()       # adds c (sum w)^2, constant here: regular even if the minimum is 0
    weights = torch.zeros_like(gram[0])
    weights[used] = torch.linalg.solve(face, torch.ones_like(face[0]))
    return weights / weights.sum()


def solve_frank_wolfe(gram):
    """Frank-Wolfe with exact line search, as in MGDA (Sener & Koltun 2018), in the "min-norm point" variant.

    The plain method zigzags, its error falls as 1/steps. Here (Wolfe 1976; Lacoste-Julien & Jaggi 2015) each new task
    is followed by line searches towards the minimum over the tasks in use, dropping those that reach 0: it ends.
    """
    weights = torch.zeros_like(gram[0])
    weights[gram.diagonal().argmin()] = 1
    while True:
        slopes, rounding = task_slopes(gram, weights)
        task = (slopes + rounding).argmin()
        if (slopes + rounding)[task] >= (1 - TOLERANCE) * (weights @ slopes):
            return weights
        used, better, step = weights > 0, weights, 0.0
        used[task] = True
        while step < 1:
            move = face_minimum(gram, used) - better
            room = torch.where(move < 0, better / -move, torch.inf)   # the step that brings a weight to 0
            step = room.min().clamp(max=1)
            better, used = torch.where(room > step, better + step * move, 0.0), used & (room > step)
        better = better / better.sum()
        if not pareto_objective(gram, better) < pareto_objective(gram, weights):
            return weights                                            # only rounding errors are left
        weights = better


PARETO_SOLVERS = {"ugd": solve_ugd, "frank-wolfe": solve_frank_wolfe}


def pareto_weights(gram, method="ugd", regularization=0.0):
    """argmin w'Gw + regularization |w|^2 over the simplex (w >= 0, sum 1).   Hang et al. 2023, Section 3.3.

    gram: (K, K), symmetric and positive semidefinite within rounding. Returns (K,) float64: if not 0, sum_i w_i g_i
    lowers every loss. Of several optima it is one. ValueError: gram, method or regularization (>= 0) not as said.
    """
    gram = torch.as_tensor(gram, dtype=torch.float64, device="cpu").detach()
    if gram.ndim != 2 or len(gram) != gram.shape[1] or len(gram) == 0 or not gram.isfinite().all():
        raise ValueError(f"gram must be a square matrix of finite numbers, not {tuple(gram.shape)}, "
                         f"{int(gram.isfinite().sum())} of them finite")
    if method not in PARETO_SOLVERS:
        raise ValueError(f"method {method!r} is not one of {', '.join(PARETO_SOLVERS)}")
    if not 0 <= regularization < float("inf"):
        raise ValueError(f"regularization must be a number >= 0, not {regularization}")
    scale = max(gram.abs().max().item(), regularization) or 1.0       # the weights do not depend on it
    gram = (gram / scale + gram.T / scale) / 2 + regularization / scale * torch.eye(len(gram), dtype=torch.float64)
    idle = gram.diagonal() <= 0                                       # g_i = 0: nothing is smaller
    if idle.any():
        return idle / idle.sum(dtype=torch.float64)
    norms = gram.diagonal().sqrt()
    lowest = torch.linalg.eigvalsh(gram / norms / norms[:, None])[0]  # rounding may have brought it below 0
    return PARETO_SOLVERS[method](gram + (1e-15 - lowest.clamp(max=0)) * gram.diagonal().diag())


# ---------------------------------------------------------------------------------------------------------------------
# A lesson: python weighting.py

GAMMAS = {"max-snr": 1.0, "p2": 1.0}        # as published; 5 for the others


def show_weights():
    """Print and draw the weights of every strategy along t, for the three predictions."""
    from diffusion import Diffusion
    from sample import line_chart, save_picture

    snr, shown, panels = Diffusion("cosine").snr, (0, 100, 200, 300, 500, 700, 900, 999), []
    for prediction in CHANGE_OF_VARIABLE:
        print(f"weight on the squared error of {prediction}, gamma = 5 (p2 and max-snr: 1), cosine schedule")
        print("timestep     " + "".join(f"{t:>10d}" for t in shown))
        print("SNR          " + "".join(f"{snr[t]:10.3g}" for t in shown))
        lines = {}
        for name in WEIGHTINGS:
            weight = loss_weight(snr, name, GAMMAS.get(name, 5.0), prediction)
            print(f"{name:13s}" + "".join(f"{weight[t]:10.3g}" for t in shown))
            lines[name] = range(len(snr)), weight
        panels.append({"title": f"weight on {prediction}", "x": "timestep t", "log_y": True, "lines": lines})
        print()
    save_picture(line_chart(panels), "runs/lessons/weighting.png")
    print("See in runs/lessons/weighting.png: snr and constant differ by ten powers of ten across t, so each of them trains some")
    print("timesteps and starves others; min-snr follows snr where noise is strong and is capped where it is weak.")


# ---------------------------------------------------------------------------------------------------------------------
# A lesson: python weighting.py --run RUN. With the digits run and 10 bins: 2560 gradients of one image for the Gram
# matrices, 4800 for the fine-tuning, and 1920 forward passes for the losses before and after.

GRAM_BATCHES, GRAM_IMAGES = 8, 32           # the gradient of each bin is measured on so many batches of so many images
TUNE_IMAGES = 16                            # a step of fine-tuning, with a tenth of the run's learning rate: at the
TUNE_RATE = 0.1                             # whole rate every loss jumps first, since averaged weights lie lower
LOSS_IMAGES = 64                            # the loss of each bin before and after


def open_run(path, bins):
    """A trained run for the experiments: EMA weights, the data its flags name.   ValueError: not there, or not what it was"""
    from sample import load_model, pick_device
    from train import load_data_once

    model, diffusion, config = load_model(path)
    args, device, timesteps = SimpleNamespace(**config["flags"]), pick_device("auto"), diffusion.timesteps
    data = load_data_once(args, print)
    if (tuple(data.shape), data.classes or []) != (tuple(config["data"]["shape"]), list(config["data"]["classes"])):
        raise ValueError(f"--data {args.data} must be what {path} was trained on, but its size or classes have changed")
    starts = [-(-timesteps * k // bins) for k in range(bins + 1)]
    error_scale = CHANGE_OF_VARIABLE[diffusion.prediction](diffusion.snr).float().to(device)
    return SimpleNamespace(model=model.to(device), diffusion=diffusion, data=data, args=args, device=device, bins=bins,
                           error_scale=error_scale, starts=starts[:-1], middles=[timesteps * (k + 0.5) / bins for k in range(bins)],
                           names=[f"[{start}, {end})" for start, end in zip(starts, starts[1:])])


def draw_batch(run, first, count):
    """Samples `first` to `first + count` of an epoch's order, with noise that training did not see.   -> (x0, t, noise, labels)"""
    from train import make_batch, to_device

    start = len(run.data.images) + first                              # step 0 of training drew places up to its batch size
    return to_device(make_batch(run.data, run.args, run.diffusion.timesteps, 0, range(start, start + count)), run.device)


def bin_loss(run, model, batch, k):
    """Mean squared error of x_0 in bin k alone.   -> ()"""
    x0, t, noise, labels = batch
    t = squeeze_into_bin(t, k, run.bins, run.diffusion.timesteps)
    return (run.diffusion.error(model, x0, t, noise, labels) / run.error_scale[t]).mean()


def measure_grams(run):
    """Inner products of the bins' gradients: of each batch alone, (batches, K, K), and of their mean over the batches, (K, K).

    All bins see the same images and noise. The mean has less noise; batches * K gradients are held in memory.
    """
    batches = [draw_batch(run, LOSS_IMAGES + i * GRAM_IMAGES, GRAM_IMAGES) for i in range(GRAM_BATCHES)]
    losses = (bin_loss(run, run.model, batch, k) for batch in batches for k in range(run.bins))
    gram = gradient_gram(losses, run.model.parameters()).view(GRAM_BATCHES, run.bins, GRAM_BATCHES, run.bins)
    return gram.diagonal(dim1=0, dim2=2).permute(2, 0, 1), gram.mean((0, 2))


def strategy_weights(snr, bins):
    """Each strategy's weights on the x_0 loss of the bins: means over their timesteps, with sum 1.   -> {name: (bins,)}"""
    bin_of_t, weights = torch.arange(len(snr)) * bins // len(snr), {}
    for name in WEIGHTINGS:
        sums = snr.new_zeros(bins).index_add_(0, bin_of_t, loss_weight(snr, name, GAMMAS.get(name, 5.0)))
        means = sums / bin_of_t.bincount()
        weights[name] = means / means.sum()
    return weights


def show_cosines(run, gram):
    """(a) The cosine similarities of the bins' gradients.   -> picture"""
    norms = gram.diagonal().sqrt()
    cosines = gram / norms / norms[:, None]
    pairs = cosines[tuple(torch.triu_indices(run.bins, run.bins, 1))]
    print(f"\n(a) cosine similarity of the gradients of {run.bins} bins of t, from {GRAM_BATCHES * GRAM_IMAGES} images")
    print(f"Neighbours: {cosines.diagonal(1).mean():.2f} on average; first and last bin: {cosines[0, -1]:.2f}; below 0: "
          f"{(pairs < 0).sum()} of {len(pairs)} pairs, whose steps undo each other.")
    print("The paper's claim: timesteps near each other help each other, distant ones conflict.")
    print(f"Norms of the gradients, cleanest bin first: {' '.join(f'{norm:.3g}' for norm in norms)}")
    return draw_matrix(cosines, run.names, run.starts)


def draw_matrix(cosines, names, starts):
    """Numbers in [-1, 1] as squares, red above 0 and blue below, with the scale at the right.   (K, K) -> picture"""
    from PIL import Image, ImageDraw, ImageFont

    font, cell, left, top = ImageFont.load_default(11), 34, 80, 10
    side = cell * len(names)
    picture = Image.new("RGB", (left + side + 80, top + side + 50), "white")
    draw = ImageDraw.Draw(picture)

    def square(x, y, width, height, value):
        pale = round(255 - 175 * abs(value))
        draw.rectangle((x, y, x + width, y + height), (255, pale, pale) if value > 0 else (pale, pale, 255))

    for i, row in enumerate(cosines.clamp(-1, 1).tolist()):
        draw.text((left - 6, top + (i + 0.5) * cell), names[i], "black", font, anchor="rm")
        draw.text((left + i * cell, top + side + 6), str(starts[i]), "black", font, anchor="mt")
        for j, value in enumerate(row):
            square(left + j * cell, top + i * cell, cell, cell, value)
            draw.text((left + (j + 0.5) * cell, top + (i + 0.5) * cell), f"{value:.2f}", "black", font, anchor="mm")
    draw.text((left + side / 2, top + side + 40), "timestep t", "black", font, anchor="mm")
    for y in range(side):
        square(left + side + 16, top + y, 14, 1, 1 - 2 * y / side)
    for value in -1, -0.5, 0, 0.5, 1:
        draw.text((left + side + 36, top + (1 - value) / 2 * side), f"{value:g}", "black", font, anchor="lm")
    return picture


def show_objective(run, gram):
    """(b) The paper's Table 1: what each strategy leaves of the objective that Pareto-optimal weights minimise."""
    solved = {name: pareto_weights(gram, name) for name in PARETO_SOLVERS}
    strategies = strategy_weights(run.diffusion.snr, run.bins)
    values = {name: pareto_objective(gram, weights).item() for name, weights in (solved | strategies).items()}
    print(f"\n(b) Pareto objective |sum_i w_i g_i|^2, weights with sum 1 on the {run.bins} bins' x_0 losses; smaller is better")
    print("strategy      objective  / optimum   largest weight")
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        largest, k = (solved | strategies)[name].max(0)
        print(f"{name:13s} {value:9.3g} {value / values['frank-wolfe']:9.1f}x   {largest:.2f} on t in {run.names[k]}")
    best = min(strategies, key=values.get)
    print(f"Of the strategies that need no solving, {best} comes nearest to the optimum, "
          f"{'as' if best == 'min-snr' else 'unlike'} in the paper, where min-snr does.")
    print("A small value also comes from weighting only bins whose gradients are small: look at the largest weight.")


def show_conflict(run, tuned, steps):
    """(c) Fine-tune a copy on one bin of t alone, and see what it does to the others.   -> panel of line_chart"""
    batch, changes = draw_batch(run, 0, LOSS_IMAGES), []

    @torch.no_grad()
    def losses(model):
        return torch.stack([bin_loss(run, model, batch, k) for k in range(run.bins)]).cpu()

    before = losses(run.model)
    for k in tuned:
        changes.append(losses(fine_tune(run, k, steps)) / before - 1)
    print(f"\n(c) loss of x_0 in each bin, and its change after {steps} steps of {TUNE_IMAGES} images on one bin alone")
    print("t             before  " + "".join(f"{'only ' + run.names[k]:>19s}" for k in tuned))
    for i in range(run.bins):
        print(f"{run.names[i]:12s} {before[i]:8.4f}  " + "".join(f"{change[i]:+19.1%}" for change in changes))
    for k, change in zip(tuned, changes):
        worst = change.argmax()
        print(f"Only {run.names[k]}: it changes by {change[k]:+.1%}; {(change < 0).sum()} of {run.bins} bins improve, "
              f"{(change > 0).sum()} suffer, at the worst {run.names[worst]} with {change[worst]:+.1%}.")
    print("The paper's claim: bins near the trained one improve with it, distant ones suffer.")
    lines = {"before": (run.middles, [1.0] * run.bins)}
    lines |= {f"only {run.names[k]}": (run.middles, 1 + change) for k, change in zip(tuned, changes)}
    return {"title": "loss after fine-tuning / before", "x": "timestep t", "log_y": True, "lines": lines}


def fine_tune(run, k, steps):
    """A copy of the model, trained further on the x_0 error of bin k alone."""
    model = copy.deepcopy(run.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=TUNE_RATE * run.args.lr, betas=tuple(run.args.betas))
    for step in range(steps):
        first = LOSS_IMAGES + GRAM_BATCHES * GRAM_IMAGES + step * TUNE_IMAGES
        bin_loss(run, model, draw_batch(run, first, TUNE_IMAGES), k).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def show_variation(run, grams):
    """(d) How much weights that are solved for depend on the batch they are solved on.   -> panel of line_chart"""
    solved = torch.stack([pareto_weights(gram, "ugd") for gram in grams])                 # (batches, K)
    mean, variation = solved.mean(0), solved.std(0) / solved.mean(0)
    min_snr = strategy_weights(run.diffusion.snr, run.bins)["min-snr"]
    print(f"\n(d) UGD's weights solved for on {len(grams)} batches of {GRAM_IMAGES} images: standard deviation over mean")
    print("t            ugd: mean  std/mean   min-snr: mean  std/mean")
    for k in range(run.bins):
        print(f"{run.names[k]:12s} {mean[k]:10.4f} {variation[k]:9.2f}   {min_snr[k]:13.4f} {0:9.2f}")
    k = mean.argmax()
    print(f"UGD's largest weight, on {run.names[k]}, is between {solved[:, k].min():.2f} and {solved[:, k].max():.2f}, as the batch "
          f"has it; min-snr's weights depend on t alone.")
    lines = {f"ugd, batch {i + 1}": (run.middles, weights) for i, weights in enumerate(solved)}
    return {"title": "weight of each bin", "x": "timestep t", "lines": lines | {"min-snr": (run.middles, min_snr)}}


def study_run(path, bins, steps, tuned):
    """Why the weights matter, seen on a trained run: gradient conflicts, the Pareto objective, fine-tuning, instability."""
    from sample import line_chart, save_picture, side_by_side, titled

    run = open_run(path, bins)
    grams, gram = measure_grams(run)
    matrix = titled(show_cosines(run, gram), "cosine similarity of the gradients of bins of t")
    show_objective(run, gram)
    panels = [show_conflict(run, tuned, steps), show_variation(run, grams)]
    charts = side_by_side([line_chart([panel], height=280) for panel in panels], columns=1)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    save_picture(side_by_side([matrix, charts]), folder / "weighting.png")
    print(f"\nlook at {folder / 'weighting.png'}")


def main():
    from sample import lesson_parser, number

    parser = lesson_parser("weighting.py", "What the loss weights are, and with --run why they matter.")
    parser.add_argument("--run", help="run folder of train.py, or a checkpoint file, to experiment with")
    parser.add_argument("--bins", type=number("[2, 100]", int), help="of --run: equal parts of the timesteps (default: 10)")
    parser.add_argument("--steps", type=number("[1, 1e9]", int), help="of --run: of fine-tuning on one bin alone (default: 150)")
    parser.add_argument("--tune", type=number("[0, 100)", int), nargs="+", metavar="BIN", help="of --run: bins to fine-tune on, 0 = cleanest "
                        "(default: one of little and one of much noise)")
    args = parser.parse_args()
    if args.run is None and (args.bins or args.steps or args.tune):
        parser.error("--bins, --steps and --tune go with --run")
    if args.run is None:
        return show_weights()
    bins, steps = args.bins or 10, args.steps or 150
    tuned = args.tune or [bins // 8, bins - 1 - bins // 8]
    if max(tuned) >= bins:
        parser.error(f"--tune must be below the number of --bins, {bins}, not {max(tuned)}")
    try:
        study_run(args.run, bins, steps, tuned)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
