"""Coefficients for the long skip connections of a UNet or UViT.

Huang et al. 2023, "ScaleLong: Towards More Stable Training of Diffusion Model via Scaling Network Long Skip Connection"
(arXiv 2310.13545): the decoder receives kappa_i * h_i instead of h_i. There are N long skips; i = 0 is the outermost
(first encoder output -> last decoder block), i = N - 1 the innermost. The paper counts from 1.

    python scaling.py              # the coefficients of every mode, and the sums that the paper's theorems bound with
    python train.py --skip-scaling cs --kappa 0.7
"""

import torch
from torch import nn

# mode -> kappa_i for i = 0 .. N - 1. To try a new constant scaling, add a line.
CONSTANTS = {
    "none": lambda i, kappa: 1.0,
    "sqrt2": lambda i, kappa: 2**-0.5,              # Song et al. 2021 and Ho et al. 2022, among others
    "cs": lambda i, kappa: kappa**i,                # CS, Section 4.1: kappa^(i - 1) when counted from 1
}
MODES = (*CONSTANTS, "ls", "ls-separate")


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


class SkipScaling(nn.Module):
    """Scales long skip i: `scaling(i, h_i)` is kappa_i * h_i, of the same shape and dtype as h_i, (B, n, ...).

    mode: none, sqrt2, cs (kappa ** i), ls (one learned network for all skips of the same width) or ls-separate (one for
    each skip).   widths: n of each skip, outermost first: channels of a UNet, tokens of a UViT.   kappa: in (0, 1], for
    cs; useful from 0.5 to 0.95.   reduction: r of LS, whose hidden layer has max(1, n // r) units.
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
            self.kappas = [CONSTANTS[mode](i, kappa) for i in range(len(self.widths))]
        else:
            owners = [width if mode == "ls" else i for i, width in enumerate(self.widths)]
            self.network_of_skip = [list(dict.fromkeys(owners)).index(owner) for owner in owners]
            self.networks = nn.ModuleList(LearnedScale(self.widths[owners.index(owner)], reduction)
                                          for owner in dict.fromkeys(owners))

    def coefficient(self, i, skip):
        """kappa_i: a number, or for the learned modes a tensor (B, n, 1, ...) that depends on the skip (B, n, ...)."""
        if self.mode in CONSTANTS:
            return self.kappas[i]
        return self.networks[self.network_of_skip[i]](skip)

    def forward(self, i, skip):
        return skip if self.mode == "none" else skip * self.coefficient(i, skip)


# ---------------------------------------------------------------------------------------------------------------------
# A lesson: python scaling.py

def main():
    """Print kappa_i of every constant mode and the sum of kappa_j^2 that the theorems bound norms with."""
    print(__doc__.split("\n\n")[1], "\n")
    for depth in 4, 8, 16:
        print(f"N = {depth} long skips: kappa of the outermost ... innermost, and sum_j kappa_j^2, which by Theorems 3.1 and 3.2")
        print("bounds how much the features and gradients of the decoder can grow")
        for mode, kappa in [*((mode, 0.9) for mode in CONSTANTS), ("cs", 0.7), ("cs", 0.5)]:
            kappas = SkipScaling(mode, [1] * depth, kappa).kappas
            name = mode if mode in ("none", "sqrt2") else f"{mode} {kappa}"
            row = " ".join(f"{k:5.3f}" for k in kappas[:8]) + (" ..." if depth > 8 else "")
            print(f"  {name:8s} {row:52s}  sum of squares {sum(k * k for k in kappas):6.2f}")
        print()
    print("See: without scaling the sum grows with the depth, with cs it stays below 1 / (1 - kappa^2) however deep the network is.")
    torch.manual_seed(0)
    scaling = SkipScaling("ls", [64])
    kappas = scaling.coefficient(0, torch.randn(1, 64, 8, 8))
    print(f"ls starts near one half: here between {kappas.min():.3f} and {kappas.max():.3f} over 64 channels, with "
          f"{sum(p.numel() for p in scaling.parameters())} parameters to learn better ones.")


if __name__ == "__main__":
    main()
