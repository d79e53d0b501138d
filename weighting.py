"""Loss weights over the timesteps of a diffusion model.

Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy" (arXiv 2303.09556): every timestep is a
task, the tasks' gradients conflict, and min(SNR, gamma) balances them.

    python weighting.py            # the weights of every strategy, as a table and as weights.png
    python train.py --weighting min-snr --gamma 5

A weighting is stated once, as a weight w(SNR) on the squared error of x_0, and written for another prediction by the
change of variable (Section 3.4 of the paper): with s = SNR = alpha^2 / sigma^2,

    |eps error|^2 = s |x_0 error|^2          |v error|^2 = (s + 1) |x_0 error|^2

so that the same loss has the weight w/s on eps and w/(s + 1) on v. A small weight on v at high noise is therefore no
mistake: at s = 0.001, min-snr gives v the weight 0.001, and x_0 the same.
"""

import torch

# name -> w(snr, gamma), the weight on the squared x_0 error. To try a new weighting, add a line.
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
    that a schedule reaches.   ValueError: unknown weighting or prediction, gamma not a positive number.

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

def main():
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
            weight = loss_weight(snr, name, 1.0 if name in ("p2", "max-snr") else 5.0, prediction)
            print(f"{name:13s}" + "".join(f"{weight[t]:10.3g}" for t in shown))
            lines[name] = range(len(snr)), weight
        panels.append({"title": f"weight on {prediction}", "x": "timestep t", "log_y": True, "lines": lines})
        print()
    save_picture(line_chart(panels), "runs/lessons/weighting.png")
    print("See in runs/lessons/weighting.png: snr and constant differ by ten powers of ten across t, so each of them trains some")
    print("timesteps and starves others; min-snr follows snr where noise is strong and is capped where it is weak.")


if __name__ == "__main__":
    main()
