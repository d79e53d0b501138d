"""The diffusion process: noise schedules, q(x_t | x_0), prediction targets, the loss, and the denoiser D(x; sigma).

    x_t = alpha_t x_0 + sigma_t eps      alpha_t^2 = alphas_cumprod[t]      sigma_t^2 = 1 - alphas_cumprod[t]
    snr = alpha_t^2 / sigma_t^2          v = alpha_t eps - sigma_t x_0      (Salimans & Ho 2022)

    x_0, eps, v, x_t: (B, C, H, W), images in [-1, 1]      t: (B,) integers in [0, T), 0 = cleanest

Read weighting.py first: it holds the loss weights.   `python diffusion.py` prints what a schedule does.
"""

import math
import zlib

import numpy as np
import torch

from weighting import loss_weight

MAX_SNR = 1e12      # `vp` starts without any noise, where the SNR would be infinite and a weight with it


# ---------------------------------------------------------------------------------------------------------------------
# Noise schedules: T -> alphas_cumprod (T,) in float64, falling from (nearly) 1 to above 0; at 0 there is no signal left

def linear_schedule(timesteps):
    """Ho et al. 2020, Section 4: beta from 1e-4 to 0.02 for T = 1000, scaled by 1000/T otherwise."""
    betas = torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64) * (1000 / timesteps)
    return (1 - betas.clamp(max=0.999)).cumprod(0)


def cosine_schedule(timesteps):
    """Nichol & Dhariwal 2021, Eq. 17: alphas_cumprod follows a squared cosine, beta at most 0.999."""
    u = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
    f = torch.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2
    betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    return (1 - betas).cumprod(0)


def scaled_linear_schedule(timesteps):
    """Rombach et al. 2022 (latent diffusion): sqrt(beta) is linear."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, timesteps, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0)


def vp_schedule(timesteps):
    """Song et al. 2021, Eq. 29 with beta from 0.1 to 20, on a grid from u = 0, where there is no noise at all, to u = 1."""
    u = torch.linspace(0, 1, timesteps, dtype=torch.float64)
    return torch.exp(-0.1 * u - 9.95 * u**2)


# To try a new schedule, write such a function and add a line.
SCHEDULES = {
    "linear": linear_schedule,
    "cosine": cosine_schedule,
    "scaled-linear": scaled_linear_schedule,
    "vp": vp_schedule,
}


def rescale_to_zero_terminal_snr(alphas_cumprod):
    """Shift and stretch sqrt(alphas_cumprod) so that the last SNR is 0 and the first unchanged.   Lin et al. 2024, Alg. 1."""
    alpha = alphas_cumprod.sqrt()
    first, last = alpha[0], alpha[-1]
    return ((alpha - last) * first / (first - last)) ** 2


# ---------------------------------------------------------------------------------------------------------------------
# The process

class Diffusion:
    """A noise schedule together with what the network predicts.

    schedule: one of SCHEDULES.   prediction: x0, eps or v.   timesteps: T, at least 2.
    zero_terminal_snr: rescale the schedule so that x_{T-1} is pure noise; then x_0 cannot be had from eps, and the
    prediction `eps` is refused.   ValueError: any of these unknown or out of range; a schedule that does not fall.
    """

    def __init__(self, schedule="cosine", prediction="x0", timesteps=1000, zero_terminal_snr=False):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
        if prediction not in ("x0", "eps", "v"):
            raise ValueError(f"prediction {prediction!r} is not one of x0, eps, v")
        if timesteps < 2:
            raise ValueError(f"timesteps must be at least 2, not {timesteps}")
        self.prediction, self.timesteps = prediction, timesteps
        self.alphas_cumprod = abar = SCHEDULES[schedule](timesteps)                             # (T,) float64
        if abar.shape != (timesteps,) or abar.dtype != torch.float64 or not 1 >= abar[0] > abar[-1] >= 0 or (abar.diff() >= 0).any():
            raise ValueError(f"schedule {schedule!r} must give {timesteps} values in float64 that fall from at most 1 to at least 0")
        if zero_terminal_snr:
            self.alphas_cumprod = rescale_to_zero_terminal_snr(abar)
        if self.alphas_cumprod[-1] == 0 and prediction == "eps":
            raise ValueError("prediction 'eps' cannot be used with zero terminal SNR, since x_0 cannot be recovered "
                             "from pure noise: choose 'v' or 'x0'")
        self.snr = (self.alphas_cumprod / (1 - self.alphas_cumprod)).clamp(max=MAX_SNR)         # (T,) float64
        self._tables = {}

    def _alpha_sigma(self, t, like):
        """alpha_t and sigma_t, each (B, 1, 1, 1), from float64 tables that are cast once a device and precision."""
        key = like.device, like.dtype
        if key not in self._tables:
            table = torch.stack([self.alphas_cumprod.sqrt(), (1 - self.alphas_cumprod).sqrt()])
            self._tables[key] = table.to(like.dtype).to(like.device)
        return self._tables[key][:, t].view(2, -1, *[1] * (like.dim() - 1))

    def add_noise(self, x0, noise, t):
        """x_t = alpha_t x_0 + sigma_t eps.   x0, noise: (B, C, H, W), t: (B,) -> (B, C, H, W).   Ho et al. 2020, Eq. 4."""
        alpha, sigma = self._alpha_sigma(t, x0)
        return alpha * x0 + sigma * noise

    def target(self, x0, noise, t):
        """What the network should say: x_0, eps or v.   x0, noise: (B, C, H, W), t: (B,) -> (B, C, H, W)."""
        if self.prediction == "x0":
            return x0
        if self.prediction == "eps":
            return noise
        alpha, sigma = self._alpha_sigma(t, x0)
        return alpha * noise - sigma * x0

    def predict_x0(self, output, x_t, t):
        """The x_0 that the network's output implies.   output, x_t: (B, C, H, W), t: (B,) -> (B, C, H, W)."""
        if self.prediction == "x0":
            return output
        alpha, sigma = self._alpha_sigma(t, x_t)
        if self.prediction == "eps":
            return (x_t - sigma * output) / alpha
        return alpha * x_t - sigma * output

    def error(self, model, x0, t, noise, labels=None):
        """Squared error of the prediction, mean over pixels, unweighted, in float32 at least.   -> (B,)"""
        output = model(self.add_noise(x0, noise, t), t, labels)
        prediction = output[:, :x0.shape[1]]                # models with learned variance put it into a second half
        difference = prediction.to(torch.promote_types(x0.dtype, torch.float32)) - self.target(x0, noise, t)
        return difference.square().flatten(1).mean(1)

    def loss(self, model, x0, t, noise, labels=None, weighting="min-snr", gamma=5.0):
        """The weighted training loss of each sample: w(t) |prediction - target|^2, mean over pixels.   -> (B,)

        x0, noise: (B, C, H, W); t, labels: (B,); weighting, gamma: see weighting.loss_weight.
        """
        weight = loss_weight(self.snr, weighting, gamma, self.prediction)                       # (T,)
        return weight.to(x0.device, torch.float32)[t] * self.error(model, x0, t, noise, labels)


# ---------------------------------------------------------------------------------------------------------------------
# The denoiser that a sampler asks

class Denoiser:
    """D(x; sigma): a trained network as the denoiser of Karras et al. 2022, Section 2, where x = x_0 + sigma * noise.

    x = x_t / alpha_t brings the schedule into that form, with sigma = sigma_t / alpha_t = snr^(-1/2). The network is
    asked at the timestep whose sigma is nearest. Timesteps without noise or without signal (vp at t = 0, zero terminal
    SNR at T - 1) have no such sigma and are left out.

    model: maps (x, t, labels) to its prediction.
    Called with   x: (B, C, H, W), float64 in a sampler; the network runs in its own precision   sigma: a number   labels: (B,) or None
    guidance s: D_none + s (D_labels - D_none), 1 = off   guidance_interval: (first, last), guide only where first <= t <= last
    returns       x_0: (B, C, H, W), in the precision of x
    ValueError: guidance without labels, or with a model that has no row for "no label".
    """

    def __init__(self, model, diffusion):
        self.model, self.diffusion = model, diffusion
        abar = diffusion.alphas_cumprod
        self.timesteps = ((abar > 0) & (abar < 1)).nonzero()[:, 0]
        if len(self.timesteps) < 2:
            raise ValueError("this schedule has fewer than two timesteps with both signal and noise: nothing to sample along")
        self.sigmas = ((1 - abar) / abar).sqrt()[self.timesteps]                # increasing, float64, on the CPU
        self.sigma_min, self.sigma_max = self.sigmas[0].item(), self.sigmas[-1].item()
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
        self.dtype = next((p.dtype for p in parameters), torch.float64)         # a model of formulas alone keeps float64

    def _nearest(self, sigma):
        sigma = torch.as_tensor(sigma, dtype=torch.float64, device="cpu").contiguous()
        above = torch.searchsorted(self.sigmas, sigma).clamp(1, len(self.sigmas) - 1)
        return torch.where(sigma - self.sigmas[above - 1] <= self.sigmas[above] - sigma, above - 1, above)

    def round_sigma(self, sigma):
        """The nearest sigma of the schedule.   A number or tensor of any shape -> float64 tensor of the same shape."""
        return self.sigmas[self._nearest(sigma)]

    def timestep(self, sigma):
        """The timestep with the nearest sigma.   A number or tensor of any shape -> integer tensor of the same shape."""
        return self.timesteps[self._nearest(sigma)]

    def __call__(self, x, sigma, labels=None, guidance=1.0, guidance_interval=None):
        sigma, t = float(sigma), self.timestep(sigma).item()
        if guidance != 1 and (getattr(self.model, "num_classes", None) is None or not self.model.null_label):
            raise ValueError("guidance needs a class-conditional model that also learned to do without labels")
        if guidance != 1 and labels is None:
            raise ValueError("guidance needs labels")
        first, last = guidance_interval or (0, self.diffusion.timesteps)
        if guidance == 1 or not first <= t <= last:
            return self._predict_x0(x, sigma, t, labels)
        no_label = torch.full_like(labels, self.model.num_classes)
        both = self._predict_x0(torch.cat([x, x]), sigma, t, torch.cat([labels, no_label]))     # one call is faster than two
        x0_labels, x0_none = both.chunk(2)
        return x0_none + guidance * (x0_labels - x0_none)

    def _predict_x0(self, x, sigma, t, labels):
        alpha_t, sigma_t = 1 / math.sqrt(sigma**2 + 1), sigma / math.sqrt(sigma**2 + 1)
        x_t = alpha_t * x
        output = self.model(x_t.to(self.dtype), torch.full((len(x),), t, device=x.device), labels)
        output = output[:, :x.shape[1]].to(x.dtype)                             # without learned variances
        # Diffusion.predict_x0 at this very sigma, which with churn may lie beside the grid
        if self.diffusion.prediction == "x0":
            return output
        if self.diffusion.prediction == "eps":
            return x - sigma * output
        return alpha_t * x_t - sigma_t * output


# ---------------------------------------------------------------------------------------------------------------------
# Randomness

def random_stream(seed, purpose, place=0, place_within=0):
    """A generator of random numbers that depends on these alone: integers >= 0, and a word that says what the numbers are for.

    Philox (Salmon et al. 2011) is counter-based: any place of the sequence is reached at once. So a training step or an
    image is the same whatever came before it and whichever process draws it, and nothing needs saving to resume.
    """
    key, counter = [seed, zlib.crc32(purpose.encode())], [0, 0, place, place_within]
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


# ---------------------------------------------------------------------------------------------------------------------
# A lesson: python diffusion.py

def main():
    """Print alpha, sigma, SNR and the weights along t, and draw one digit as each schedule dissolves it."""
    from sample import image_grid, lesson_parser, line_chart, save_picture, side_by_side, titled, to_uint8
    from train import draw_digit

    lesson_parser("diffusion.py", "The forward process: a table, and runs/lessons/diffusion.png.").parse_args()
    print(__doc__.split("\n\n")[1], "\n")
    diffusion = Diffusion("cosine")
    min_snr = loss_weight(diffusion.snr, "min-snr", 5.0)
    print("cosine schedule:   t    alpha    sigma          SNR   min-snr weight on x_0 (gamma = 5)")
    for t in (0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 999):
        abar, snr = diffusion.alphas_cumprod[t], diffusion.snr[t]
        print(f"                 {t:3d}   {abar.sqrt():.4f}   {(1 - abar).sqrt():.4f}   {snr:10.3g}   {min_snr[t]:.3g}")

    steps = torch.arange(0, 1000, 111)                                          # 0, 111, ..., 999
    digit = torch.from_numpy(np.array(draw_digit(5, random_stream(0, "lesson").random(13), 32, 32))).permute(2, 0, 1)[None] / 127.5 - 1
    noise = torch.from_numpy(random_stream(0, "lesson").standard_normal((1, 3, 32, 32), dtype=np.float32))
    rows = [Diffusion(name).add_noise(digit.expand(10, -1, -1, -1), noise, steps) for name in SCHEDULES]
    strip = titled(image_grid(to_uint8(torch.cat(rows)), columns=10), "x_t at t = 0, 111, ..., 999", list(SCHEDULES))
    chart = line_chart([{"title": "signal-to-noise ratio", "x": "timestep t", "log_y": True,
                         "lines": {name: (range(1, 1000), Diffusion(name).snr[1:]) for name in SCHEDULES}}], width=strip.width)
    save_picture(side_by_side([strip, chart], columns=1), "runs/lessons/diffusion.png")
    print("\nSee in runs/lessons/diffusion.png: the schedules end alike, in noise, but spend their steps at different noise levels.")


if __name__ == "__main__":
    main()
