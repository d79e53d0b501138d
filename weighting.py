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
    "soft-min-snr": lambda snr, gamma: snr * gamma / (snr + gamma), # Crowson et al. 2024 (HDiT)
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
        raise ValueError(f"weighting {weighting!r} is not one of {', '.join(WEIGHTINGS)}")
    if prediction not in CHANGE_OF_VARIABLE:
        raise ValueError(f"prediction {prediction!r} is not one of {', '.join(CHANGE_OF_VARIABLE)}")
    if not 0 < gamma < float("inf"):
        raise ValueError(f"gamma must be a positive number, not {gamma}")
    weight = WEIGHTINGS[weighting](snr, gamma) / CHANGE_OF_VARIABLE[prediction](snr)
    no_weight = (snr == 0) & ~((weight > 0) & weight.isfinite())
    return weight.masked_fill(no_weight, 1).clamp(max=torch.finfo(weight.dtype).max)


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
