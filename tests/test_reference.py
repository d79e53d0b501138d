"""The same numbers as the authors' programs, and their published weights.

reference/*.json holds what those programs gave, unchanged, in float32 on a CPU: ScaleLong (commit 4ca368c), U-ViT
(ce55170), guided-diffusion (22e0df8), Min-SNR (5189997) and EDM (008a4e5). Their networks were filled by the rule in
`filled`. Cases that begin with extra_ go beyond published settings: extra_eps_* make the first activations so small
that the eps of the norms shows, extra_adm_unet_cifar_cs scales the skips of a UNet from outside.
"""

import json
import math
import zlib
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

import unet
import uvit
from diffusion import Denoiser, Diffusion
from sample import heun, karras_sigmas
from weighting import loss_weight

REFERENCE = {file.stem: json.loads(file.read_text()) for file in (Path(__file__).parent / "reference").glob("*.json")}
MODELS, NAMES = REFERENCE["models"]["cases"], REFERENCE["models"]["names"]
HEUN, EDM, LOSSES, WEIGHTS = (REFERENCE[group] for group in ("heun", "edm", "losses", "weights"))
TABLES = ("pos_embed", "label_emb.weight", "class_embedding.weight", "time_embedding.weight")


def normal(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_close(ours, theirs, relative=0.0, absolute=0.0):
    ours, theirs = (torch.as_tensor(values, dtype=torch.float64) for values in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=relative, atol=absolute)


def assert_close_samples(ours, theirs, absolute):
    """Compare with a recorded tensor: its shape, its first 32 entries, 32 spread over all of it, and its norm."""
    assert list(ours.shape) == theirs["shape"]
    flat, spaced = ours.flatten(), [i * (ours.numel() - 1) // 31 for i in range(32)]
    assert_close(flat[:32], theirs["first_32"], absolute=absolute)
    assert_close(flat[spaced], theirs["spaced_32"], absolute=absolute)
    assert_close(flat.norm(), theirs["l2_norm"], relative=absolute)


# ---------------------------------------------------------------------------------------------------------------------
# Networks

def filled(case):
    """The state dict of a case, under the authors' names: normal numbers that depend on name and shape alone."""
    state = {}
    for name, shape in NAMES[MODELS[case]["names"]].items():
        z = normal(shape, zlib.crc32(name.encode()))
        if name.endswith(TABLES):
            z *= 0.5
        elif len(shape) == 1:
            z = 1 + 0.1 * z if name.endswith("weight") else 0.1 * z
        else:
            z /= math.sqrt(z.numel() / shape[0])
        state[name] = z * MODELS[case].get("multiply", {}).get(name, 1)
    return state


def build(case, **changes):
    """Our model for the authors' settings of a case, with its fresh weights."""
    config, kind = MODELS[case]["config"], MODELS[case]["class"]
    model = {"UNet": build_unet, "UViT": build_uvit, "ViT": build_vit}[kind](config, changes)
    return model.eval()


def build_unet(config, changes):
    arguments = dict(
        size=config["image_size"], in_channels=config["in_channels"], out_channels=config["out_channels"],
        channels=config["model_channels"], channel_mult=config["channel_mult"], blocks=config["num_res_blocks"],
        attention=[config["image_size"] // rate for rate in config["attention_resolutions"]],   # theirs: sampling rates
        heads=config["num_heads"], head_channels=max(0, config["num_head_channels"]),           # theirs: -1 is off
        scale_shift_norm=config["use_scale_shift_norm"], resblock_updown=config["resblock_updown"],
        num_classes=config["num_classes"], null_label=False,
        skip_scaling="cs" if "kappa" in config else "none", kappa=config.get("kappa", 1.0))
    return unet.UNet(**{**arguments, **changes})


def build_uvit(config, changes):
    arguments = dict(
        size=config["img_size"], in_channels=config["in_chans"], patch=config["patch_size"], width=config["embed_dim"],
        depth=config["depth"], heads=config["num_heads"], time_mlp=config["mlp_time_embed"], final_conv=config["conv"],
        num_classes=config["num_classes"] if config["num_classes"] > 0 else None, null_label=False,
        skip_scaling=("none", "sqrt2", "cs", "ls", "ls-separate")[config["scalelong_mode"]],
        kappa=config.get("kappa", 1.0))
    return uvit.UViT(**{**arguments, **changes})


def build_vit(config, changes):
    channels = config["in_chans"]
    arguments = dict(
        size=config["img_size"], in_channels=channels, out_channels=2 * channels if config["learn_sigma"] else channels,
        patch=config["patch_size"], width=config["embed_dim"], depth=config["depth"], heads=config["num_heads"],
        timesteps=config["num_steps"], num_classes=config["num_classes"] if config["num_classes"] > 0 else None,
        null_label=config["drop_label_prob"] > 0,
        final_norm=not config["use_mean_pooling"], final_conv=config["use_conv_last"])
    return uvit.ViT(**{**arguments, **changes})


def load(model, case, state):
    if MODELS[case]["class"] == "UNet":
        order = "new" if MODELS[case]["config"]["use_new_attention_order"] else "legacy"
        return unet.load_published(model, state, order)
    return uvit.load_published(model, state)


def reference_model(case):
    model = build(case)
    load(model, case, filled(case))
    return model


@torch.no_grad()
def run(model, case, labels="as recorded"):
    labels = MODELS[case]["labels"] if labels == "as recorded" else labels
    x, t = normal((2, 3, 16, 16), seed=0), torch.tensor(MODELS[case]["timesteps"])
    return model(x, t, None if labels is None else torch.tensor(labels))


@pytest.mark.parametrize("case", MODELS)
def test_network_gives_the_authors_output(case):
    assert_close_samples(run(reference_model(case), case), MODELS[case]["output"], absolute=2e-5)      # their std is 0.5 to 2


@pytest.mark.parametrize("case", [case for case in MODELS if "output_without_labels" in MODELS[case]])
def test_no_labels_means_the_authors_null_label(case):
    assert_close_samples(run(reference_model(case), case, labels=None), MODELS[case]["output_without_labels"], absolute=2e-5)


@pytest.mark.parametrize("case", MODELS)
def test_network_has_the_authors_number_of_parameters(case):
    """Min-SNR's ViT has no bias on the keys; ours has one that the softmax cancels: `width` more parameters a block."""
    config = MODELS[case]["config"]
    key_biases = config["depth"] * config["embed_dim"] if MODELS[case]["class"] == "ViT" else 0
    assert sum(p.numel() for p in build(case).parameters()) == MODELS[case]["parameters"] + key_biases


@pytest.mark.parametrize("case", [case for case in MODELS if MODELS[case]["class"] == "UNet"])
def test_fresh_unet_returns_zero(case):
    assert not run(build(case), case).any()


@pytest.mark.parametrize("case", [case for case in MODELS if "skips" in MODELS[case]])
def test_unet_skips_have_the_authors_shapes(case):
    model, skips, inputs = build(case), [], []
    model.skip_scaling.register_forward_hook(lambda module, arguments, output: skips.append(list(output.shape[1:])))
    for stage in model.decoder:
        stage.register_forward_pre_hook(lambda module, arguments: inputs.append(list(arguments[0].shape[1:])))
    run(model, case)
    assert len(skips) == MODELS[case]["skips"]["number"]
    assert skips == MODELS[case]["skips"]["shape_of_skip_i"]
    assert inputs == MODELS[case]["skips"]["input_shape_of_output_block_j"]


@pytest.mark.parametrize("case", [case for case in MODELS if "coefficients" in MODELS[case]])
def test_uvit_skip_coefficients_are_the_authors(case):
    """Recorded for each skip, outermost first: a constant, or the gates of LS, (B, tokens)."""
    model, coefficients = reference_model(case), []
    model.skip_scaling.register_forward_hook(
        lambda module, arguments, output: coefficients.append(module.coefficient(*arguments)))
    run(model, case)
    for ours, theirs in zip(coefficients, MODELS[case]["coefficients"], strict=True):
        assert_close(torch.as_tensor(ours).squeeze(), theirs, absolute=1e-6)


@pytest.mark.parametrize("width", [8, 9])
@pytest.mark.parametrize("embedding", [unet.timestep_embedding, uvit.sinusoid])
def test_timestep_embedding(embedding, width):
    reference = REFERENCE["timestep_embedding"]
    ours = embedding(torch.tensor(reference["timesteps"]), width)
    assert_close(ours, reference[str(width)], absolute=1e-5)           # the frequency's last bit, in float32, times t


# ---------------------------------------------------------------------------------------------------------------------
# Schedules, weights, losses

@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedule(schedule):
    """Their posterior variances and means have no counterpart here, since the Heun sampler needs none."""
    ours, theirs, t = Diffusion(schedule), REFERENCE["schedules"][schedule], REFERENCE["schedules"]["t"]
    betas = 1 - ours.alphas_cumprod / torch.cat([torch.ones(1), ours.alphas_cumprod[:-1]])
    assert_close(betas[t], theirs["betas"], relative=1e-9)
    assert_close(ours.alphas_cumprod[t], theirs["alphas_cumprod"], relative=1e-9)
    assert_close(ours.snr[t], theirs["snr"], relative=1e-9)
    assert_close(ours.alphas_cumprod.sum(), theirs["sum_of_alphas_cumprod_over_all_t"], relative=1e-9)
    assert (ours.snr >= 5).sum() == theirs["first_t_with_snr_below_5"]
    assert (ours.snr >= 1).sum() == theirs["first_t_with_snr_below_1"]


# Their name -> our weighting and gamma. They spell min-snr for v in another way.
WEIGHTINGS = {"snr": ("snr", 1), "trunc_snr": ("max-snr", 1), "max_snr_1": ("max-snr", 1),
              "min_snr_1": ("min-snr", 1), "min_snr_5": ("min-snr", 5), "vmin_snr_5": ("min-snr", 5)}
PLAIN = {"x0": "constant", "eps": "snr", "v": "snr+1"}      # their "constant" is weight 1 on whatever is predicted


def formula_they_apply(prediction, name):
    """Our arguments for the weight of that name in their program, which takes one branch for eps and v."""
    if name == "constant":
        return PLAIN[prediction], 1, prediction
    if prediction != "x0":
        prediction = "v" if name == "vmin_snr_5" else "eps"
    return *WEIGHTINGS[name], prediction


def weight_cases(*statuses):
    """Cases with one of these statuses, without inv_snr, which we do not have."""
    return [case for case, entry in WEIGHTS["weights"].items() if entry["status"] in statuses and "inv_snr" not in case]


@pytest.mark.parametrize("case", weight_cases("applies"))
def test_weight_is_the_authors(case):
    schedule, prediction, name = case.split(", ")
    ours = loss_weight(Diffusion(schedule).snr[WEIGHTS["t"]], *formula_they_apply(prediction, name))
    assert_close(ours, WEIGHTS["weights"][case]["formula_float64"], relative=1e-9)
    assert_close(ours, WEIGHTS["weights"][case]["official"], relative=2e-6)                        # theirs is in float32


@pytest.mark.parametrize("case", [case for case in weight_cases("applies", "ignored", "error") if "const" not in case])
def test_weight_belongs_to_the_prediction_that_was_asked_for(case):
    """Here a name is one weight on x0, converted for each prediction. Their program raises (vmin_snr on x0), quietly
    takes weight 1 (snr, trunc_snr on eps and v) or another prediction's (min_snr, max_snr on v, vmin_snr on eps).
    """
    schedule, prediction, name = case.split(", ")
    snr = Diffusion(schedule).snr[WEIGHTS["t"]]
    on_x0 = {"snr": snr, "trunc_snr": snr.clamp(min=1), "max_snr_1": snr.clamp(min=1), "min_snr_1": snr.clamp(max=1),
             "min_snr_5": snr.clamp(max=5), "vmin_snr_5": snr.clamp(max=5)}[name]
    expected = on_x0 / {"x0": 1, "eps": snr, "v": snr + 1}[prediction]
    assert_close(loss_weight(snr, *WEIGHTINGS[name], prediction), expected, relative=1e-9)


@pytest.mark.parametrize("prediction", ["x0", "eps", "v"])
@pytest.mark.parametrize("name", ["inv_snr", "min-snr-5", "misspelt"])
def test_unknown_weighting_is_refused(name, prediction):
    """Theirs is 1 for unknown names on eps and v; their inv_snr, 1/SNR on x0, is none of the paper's and left out."""
    with pytest.raises(ValueError, match=name):
        loss_weight(torch.ones(1), name, prediction=prediction)


@pytest.mark.parametrize("case", [case for case in WEIGHTS["snr_zero"]["official"] if "inv_snr" not in case])
def test_weight_at_zero_snr_is_one_as_theirs(case):
    prediction, name = case.split(", ")
    weighting, gamma = (PLAIN[prediction], 1) if name == "constant" else WEIGHTINGS[name]
    _, theirs = WEIGHTS["snr_zero"]["official"][case] or (None, 1)                          # vmin_snr on x0 raises
    assert loss_weight(torch.zeros(1), weighting, gamma, prediction).item() == theirs == 1


LOSS_CASES = {"x0, min_snr_5": "min-snr", "eps, min_snr_5": "min-snr", "v, vmin_snr_5": "min-snr",
              "x0, constant": "constant", "eps, constant": "snr", "v, constant": "snr+1"}


def loss_inputs():
    return normal((4, 3, 8, 8), seed=1), torch.tensor(LOSSES["t"]), normal((4, 3, 8, 8), seed=2)       # x_0, t, noise


def loss(prediction, weighting):
    diffusion = Diffusion("cosine", prediction)
    return diffusion.loss(lambda x, t, labels: 0.3 * x, *loss_inputs(), weighting=weighting, gamma=5)


@pytest.mark.parametrize("case", LOSS_CASES)
def test_loss(case):
    """Their v, (alpha x_t - x_0) / sigma, loses digits at t = 0; ours, alpha eps - sigma x_0, does not."""
    ours, theirs = loss(case.split(", ")[0], LOSS_CASES[case]), LOSSES["cases"][case]
    assert_close(ours, theirs["float64"], relative=1e-6)
    assert_close(ours, theirs["loss"], relative=1e-5 if case.startswith("v") else 1e-6)


def test_min_snr_on_v_is_not_the_weight_of_eps():
    """Asked for min_snr_5 on v, their program takes the weight of eps; ours is what they call vmin_snr_5."""
    theirs = LOSSES["cases"]["v, min_snr_5"]
    assert_close(loss("v", "min-snr"), LOSSES["cases"]["v, vmin_snr_5"]["loss"], relative=1e-5)
    weight_of_eps = loss_weight(Diffusion("cosine").snr[LOSSES["t"]], "min-snr", 5, "eps")
    assert_close(loss("v", "snr+1") * weight_of_eps, theirs["loss"], relative=1e-5)


def test_noisy_image():
    x0, t, noise = loss_inputs()
    assert_close_samples(Diffusion("cosine").add_noise(x0, noise, t), LOSSES["x_t"], absolute=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Sampler

class IdealModel:
    """The best network for independent normal pixels: mean 0.3, std 0.5 with label 0; -0.1 and 0.8 without label."""

    num_classes, null_label = 1, True

    def __init__(self, diffusion):
        self.diffusion, self.timesteps = diffusion, []

    def __call__(self, z, t, labels):
        self.timesteps.append(t[0].item())
        labels = torch.zeros_like(t) if labels is None else labels
        mean, std = torch.tensor([[0.3, -0.1], [0.5, 0.8]], dtype=torch.float64)[:, labels].view(2, -1, 1, 1, 1)
        a = self.diffusion.alphas_cumprod[t].view(-1, 1, 1, 1)
        noise_part = (z - a.sqrt() * mean) / (a * std**2 + 1 - a)
        if self.diffusion.prediction == "eps":
            return (1 - a).sqrt() * noise_part
        return mean + a.sqrt() * std**2 * noise_part


class RecordingDenoiser(Denoiser):
    """Remembers the noise levels at which it was asked."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked = []

    def __call__(self, x, sigma, *arguments):
        self.asked.append(float(sigma))
        return super().__call__(x, sigma, *arguments)


def parse(case):
    kind, schedule, prediction, steps = case.split(", ")
    return kind, schedule, prediction, int(steps.removeprefix("N="))


def draw(case, denoiser):
    kind, _, _, steps = parse(case)
    guided = dict(labels=torch.zeros(2, dtype=torch.long), guidance=1.5)
    options = {"unguided": {}, "guided": guided, "guided limited interval": {**guided, "guidance_interval": (0, 800)}}
    return heun(denoiser, normal((2, 3, 4, 4), seed=0), steps=steps, **options[kind])


def own_denoiser(case):
    _, schedule, prediction, _ = parse(case)
    diffusion = Diffusion(schedule, prediction)
    return RecordingDenoiser(IdealModel(diffusion), diffusion)


def their_recursion(schedule):
    """sigma_t^2 = (sigma_{t-1}^2 + 1) / (1 - beta_t) - 1 from sigma = 0, all in float32.   -> (1000,)

    Where sigma is small that loses half of the digits. The betas of `linear` are 1001, of which the first is left out.
    """
    if schedule == "linear":
        keep = 1 - np.linspace(1e-4, 0.02, 1001).astype(np.float32)[1:]
    else:
        steps = np.arange(1000, -1, -1, dtype=np.float32)
        angle = np.float32(math.pi / 2) * steps / np.float32(1000) / np.float32(1.008)
        alphas_cumprod = np.sin(angle, dtype=np.float64).astype(np.float32) ** 2
        keep = np.maximum(alphas_cumprod[1:] / alphas_cumprod[:-1], np.float32(1e-3))
    sigmas = [np.float32(0)]
    for k in keep:
        sigmas.append(np.sqrt((sigmas[-1] * sigmas[-1] + np.float32(1)) / k - np.float32(1)))
    return torch.tensor(np.array(sigmas[1:], dtype=np.float64))


def recorded_sigmas(schedule):
    """Timesteps and sigmas of their table, as far as they were recorded."""
    grid = HEUN["noise_grid"][schedule]
    pairs = dict(zip(grid["t"], grid["sigma_of_t_in_net"]))
    for case, entry in HEUN["runs"].items():
        if parse(case)[1] == schedule:
            pairs.update(zip(entry["timesteps"], entry["sigmas"]))
    return list(pairs), torch.tensor(list(pairs.values()), dtype=torch.float64)


def their_denoiser(case):
    """A Denoiser that holds their table of noise levels.

    Its last bits depend on the float32 sine and square root of the machine, so recorded entries are taken as they are.
    """
    denoiser, schedule = own_denoiser(case), parse(case)[1]
    t, sigmas = recorded_sigmas(schedule)
    denoiser.sigmas = their_recursion(schedule)
    denoiser.sigmas[t] = sigmas
    denoiser.sigma_min, denoiser.sigma_max = denoiser.sigmas[0].item(), denoiser.sigmas[-1].item()
    return denoiser


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_noise_grid(schedule):
    """Theirs is a float32 recursion, up to 5e-4 off (cosine), and 9.5 % when shifted by one (linear); ours is exact."""
    t, sigmas = recorded_sigmas(schedule)
    assert_close(their_recursion(schedule)[t], sigmas, relative=2e-6)
    grid = HEUN["noise_grid"][schedule]
    ours = Denoiser(None, Diffusion(schedule)).sigmas
    assert_close(ours[grid["t"]], grid["sigma_of_t_in_training_schedule"], relative=1e-9)
    off = (torch.tensor(grid["sigma_of_t_in_net"]) / ours[grid["t"]] - 1).abs().max()
    assert_close(off, {"cosine": 4.79e-4, "linear": 0.095}[schedule], relative=1e-2)


@pytest.mark.parametrize("case", HEUN["runs"])
def test_heun_on_their_grid(case):
    """Noise levels, timesteps and calls exactly, samples as near as their float32 network allows."""
    theirs, denoiser = HEUN["runs"][case], their_denoiser(case)
    x0 = draw(case, denoiser)
    twice = list(chain.from_iterable(zip(theirs["sigmas"], theirs["sigmas"])))
    assert denoiser.asked == twice[1:]                          # the first level is asked for once: 2N - 1 calls
    assert denoiser.model.timesteps == theirs["timestep_of_call"]
    assert_close(x0.flatten(), theirs["values"], absolute=1e-5 if case.endswith("N=5") else 1e-6)


@pytest.mark.parametrize("case", [case for case in HEUN["runs"] if "cosine" in case])
def test_heun_on_our_cosine_grid_takes_the_same_timesteps(case):
    """Ours are the noise levels of training in float64, up to 5e-4 off theirs, which moves the samples by 2e-6."""
    denoiser = own_denoiser(case)
    x0 = draw(case, denoiser)
    assert denoiser.model.timesteps == HEUN["runs"][case]["timestep_of_call"]
    assert_close(x0.flatten(), HEUN["runs"][case]["values"], absolute=3e-5 if case.endswith("N=5") else 3e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_forms_of_one_model_give_one_sample(schedule):
    """With the noise levels of training eps and x0 agree; with their linear table, which is another, not to 0.005."""
    runs = {prediction: f"unguided, {schedule}, {prediction}, N=18" for prediction in ("eps", "x0")}
    eps, x0 = (draw(case, own_denoiser(case)) for case in runs.values())
    assert_close(eps, x0, absolute=1e-9)
    theirs = [torch.tensor(HEUN["runs"][case]["values"]) for case in runs.values()]
    assert ((theirs[0] - theirs[1]).abs().max() > 0.005) == (schedule == "linear")


@pytest.mark.parametrize("ladder", EDM["ladders"])
def test_noise_levels_of_edm(ladder):
    theirs = EDM["ladders"][ladder]
    ours = karras_sigmas(theirs["steps"], theirs["sigma_min"], theirs["sigma_max"], theirs["rho"])
    assert ours.dtype == torch.float64 and ours[-1] == 0
    assert_close(ours[:-1], theirs["sigmas"], relative=1e-14)          # the last bit of a power depends on the machine


class GaussianDenoiser:
    """D(x; sigma) for pixels that are normal with mean 0.3 and std 0.5, at any noise level."""

    sigma_min, sigma_max = 0.0, math.inf

    def __init__(self):
        self.asked = []

    def round_sigma(self, sigma):
        return torch.as_tensor(sigma, dtype=torch.float64)

    def __call__(self, x, sigma, labels=None, guidance=1.0, guidance_interval=None):
        self.asked.append(float(sigma))
        return (0.5**2 * x + sigma**2 * 0.3) / (0.5**2 + sigma**2)


@pytest.mark.parametrize("case", EDM["runs"])
def test_heun_of_edm(case):
    """EDM draws noise at every step, used or not; ours where it is used, so the unused draws are passed over here."""
    theirs, denoiser = EDM["runs"][case], GaussianDenoiser()
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64) for _ in range(theirs["steps"])]
    sigmas = karras_sigmas(theirs["steps"], 0.002, 80.0)
    used = iter([noise for noise, sigma in zip(draws, sigmas) if 0.05 <= sigma <= 50])
    churn = dict(churn=40, churn_range=(0.05, 50), churn_scale=1.003, churn_noise=lambda x: next(used))
    x0 = heun(denoiser, normal((2, 3, 4, 4), seed=0), steps=theirs["steps"], **churn if "churn" in case else {})
    assert_close(denoiser.asked, theirs["sigma_of_call"], relative=1e-13)
    assert_close(x0.flatten(), theirs["values"], absolute=1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# Published weights

RELEASED = [        # name of the file, a case with its parameters
    ("nnet_ema.pth", "uvit_none"), ("nnet_ema.pth", "uvit_classcond"),                                      # U-ViT
    ("nnet_ema.pth", "uvit_ls_shared"), ("nnet_ema.pth", "uvit_ls_separate"),                               # ScaleLong
    ("64x64_diffusion.pt", "adm_unet_in64_new_attention"), ("256x256_diffusion.pt", "adm_unet_in64_legacy_attention"),
    ("ema_0.9999_xl.pt", "minsnr_vit"), ("ema_0.9999.pt", "minsnr_vit_uncond"),
]


@pytest.mark.parametrize("file, case", RELEASED)
def test_released_file_loads(tmp_path, file, case):
    state = filled(case)
    if MODELS[case]["class"] == "ViT":                          # Min-SNR's tables of times have rows never trained
        state["time_embedding.weight"] = torch.cat([state["time_embedding.weight"], torch.ones(3000, 64)])
    torch.save(state, tmp_path / file)
    model = build(case)
    load(model, case, torch.load(tmp_path / file, weights_only=True))
    assert_close_samples(run(model, case), MODELS[case]["output"], absolute=2e-5)


@pytest.mark.parametrize("case", ["uvit_none", "adm_unet_cifar"])
@pytest.mark.parametrize("skip_scaling", ["ls", "ls-separate"])
def test_a_learned_skip_scaling_can_be_added_to_a_released_model(case, skip_scaling):
    model, plain = build(case, skip_scaling=skip_scaling), reference_model(case).state_dict()
    fresh = {name: value.clone() for name, value in model.skip_scaling.state_dict(prefix="skip_scaling.").items()}
    load(model, case, filled(case))
    assert fresh and model.state_dict().keys() == {**plain, **fresh}.keys()
    assert all(torch.equal(value, {**plain, **fresh}[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("case, theirs, ours", [
    ("uvit_none", "decoder_pred.weight", "to_pixels.weight"),
    ("uvit_ls_separate", "se.0.layer1.weight", "skip_scaling.networks.2.fc1.weight"),
    ("adm_unet_in64_new_attention", "input_blocks.0.0.weight", "encoder.0.0.weight"),
    ("adm_unet_in64_legacy_attention", "middle_block.1.qkv.weight", "middle.1.qkv.weight"),
    ("minsnr_vit", "linear_projection.weight", "to_pixels.weight"),
    ("minsnr_vit", "time_embedding.weight", "time.weight"),
])
def test_wrong_shape_is_named(case, theirs, ours):
    model, state = build(case), filled(case)
    found, expected = state[theirs][:-1], list(model.state_dict()[ours].shape)
    with pytest.raises(ValueError) as error:
        load(model, case, {**state, theirs: found})
    for part in ours, str(expected), str(list(found.shape) + [1] * (len(expected) - found.dim())):
        assert part in str(error.value)


@pytest.mark.parametrize("case, theirs, ours", [
    ("uvit_none", "surplus.weight", "surplus.weight"),
    ("uvit_ls_separate", "se.3.layer1.weight", "skip_scaling.networks"),
    ("adm_unet_in64_new_attention", "surplus.weight", "surplus.weight"),
    ("adm_unet_in64_legacy_attention", "input_blocks.1.1.qkv.weight", "encoder.1.1.qkv.weight"),
    ("minsnr_vit", "surplus.weight", "surplus.weight"),
    ("minsnr_vit", "blocks.4.attn.q_bias", "blocks.4.attention"),
])
def test_extra_key_is_named(case, theirs, ours):
    with pytest.raises(ValueError, match=ours.replace(".", r"\.")):
        load(build(case), case, {**filled(case), theirs: torch.ones(192)})


@pytest.mark.parametrize("case, theirs, ours", [
    ("uvit_none", "norm.bias", "norm.bias"),
    ("uvit_ls_shared", "se.layer2.bias", "skip_scaling.networks.0.fc2.bias"),
    ("uvit_ls_separate", "se.1.layer1.weight", "skip_scaling.networks.1.fc1.weight"),
    ("adm_unet_in64_new_attention", "out.0.weight", "out_norm.weight"),
    ("minsnr_vit", "time_embedding.weight", "time.weight"),
    ("minsnr_vit", "blocks.1.attn.q_bias", "blocks.1.attention.qkv.bias"),
    ("minsnr_vit", "blocks.1.attn.v_bias", "blocks.1.attention.qkv.bias"),
])
def test_missing_key_is_named(case, theirs, ours):
    state = filled(case)
    del state[theirs]
    with pytest.raises(ValueError, match=ours.replace(".", r"\.")):
        load(build(case), case, state)


@pytest.mark.parametrize("case", ["uvit_ls_shared", "uvit_ls_separate"])
def test_released_skip_scaling_is_not_dropped(case):
    with pytest.raises(ValueError, match="skip_scaling"):
        load(build(case, skip_scaling="none"), case, filled(case))
