"""Schedules against closed forms, conversions between predictions, the loss by hand, the denoiser against an oracle."""

import itertools
import math

import pytest
import torch
from conftest import normal, read_picture

from diffusion import SCHEDULES, Denoiser, Diffusion, random_stream, rescale_to_zero_terminal_snr
from unet import UNet
from uvit import UViT, ViT
from weighting import WEIGHTINGS, loss_weight

# every process that exists: (schedule, prediction, zero_terminal_snr)
PROCESSES = [(schedule, prediction, zero) for schedule, prediction, zero
             in itertools.product(SCHEDULES, ("x0", "eps", "v"), (False, True)) if (prediction, zero) != ("eps", True)]


def x0_noise_t(timesteps=1000):
    """One small picture and its noise for every timestep."""
    return normal(timesteps, 1, 2, 2), normal(timesteps, 1, 2, 2, seed=1), torch.arange(timesteps)


# ---------------------------------------------------------------------------------------------------------------------
# Schedules

def test_linear_schedule_is_the_product_of_ho_et_al():
    product = 1.0
    for i, alphas_cumprod in enumerate(Diffusion("linear").alphas_cumprod.tolist()):
        product *= 1 - (1e-4 + (0.02 - 1e-4) * i / 999)
        assert alphas_cumprod == pytest.approx(product, rel=1e-12)
    assert product == pytest.approx(4.03583e-5, rel=1e-5)


def test_linear_schedule_scales_its_betas_with_the_number_of_timesteps():
    betas = 1 - Diffusion("linear", timesteps=4000).alphas_cumprod[[0]]
    assert betas.item() == pytest.approx(1e-4 / 4, rel=1e-9)
    alphas_cumprod = Diffusion("linear", timesteps=4000).alphas_cumprod
    assert (1 - alphas_cumprod[-1] / alphas_cumprod[-2]).item() == pytest.approx(0.02 / 4, rel=1e-9)
    assert alphas_cumprod[-1].item() == pytest.approx(4.1e-5, rel=0.05)         # the same process in finer steps


@pytest.mark.parametrize("timesteps", [10, 1000, 4000])
def test_cosine_schedule_telescopes_to_its_closed_form(timesteps):
    """Without the cap on beta the product of f(i + 1)/f(i) is f(i + 1)/f(0); the cap only bites at the last step."""
    f = [math.cos((i / timesteps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(timesteps + 1)]
    alphas_cumprod = Diffusion("cosine", timesteps=timesteps).alphas_cumprod.tolist()
    assert alphas_cumprod[:-1] == pytest.approx([value / f[0] for value in f[1:-1]], rel=1e-8)
    assert alphas_cumprod[-1] == pytest.approx(alphas_cumprod[-2] * 0.001, rel=1e-9)


def test_cosine_schedule_has_the_published_values():
    alphas_cumprod = Diffusion("cosine").alphas_cumprod
    betas = 1 - alphas_cumprod[1:] / alphas_cumprod[:-1]
    assert (1 - alphas_cumprod[0]).item() == pytest.approx(4.12842e-5, rel=2e-6)
    assert betas[-2:].tolist() == pytest.approx([0.749999, 0.999], rel=2e-6)
    assert alphas_cumprod[[499, 999]].tolist() == pytest.approx([0.493844, 2.42877e-9], rel=2e-6)


def test_scaled_linear_schedule_squares_a_line():
    product, first, last = 1.0, math.sqrt(0.00085), math.sqrt(0.012)
    for i, alphas_cumprod in enumerate(Diffusion("scaled-linear").alphas_cumprod.tolist()):
        product *= 1 - (first + (last - first) * i / 999) ** 2
        assert alphas_cumprod == pytest.approx(product, rel=1e-12)


def test_vp_schedule_is_the_integral_of_its_noise_rate():
    """alphas_cumprod(u) = exp(-integral of beta), beta(s) = 0.1 + 19.9 s: one trapezoid integrates it."""
    for i, alphas_cumprod in enumerate(Diffusion("vp").alphas_cumprod.tolist()):
        u = i / 999
        integral = u * (0.1 + (0.1 + 19.9 * u)) / 2
        assert alphas_cumprod == pytest.approx(math.exp(-integral), rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("timesteps", [10, 1000, 4000])
@pytest.mark.parametrize("zero", [False, True])
def test_snr_falls_strictly_from_at_most_1e12_to_at_least_0(schedule, timesteps, zero):
    diffusion = Diffusion(schedule, "v", timesteps, zero)
    for table in diffusion.alphas_cumprod, diffusion.snr:
        assert table.shape == (timesteps,) and table.dtype == torch.float64
        assert (table.diff() < 0).all() and table.isfinite().all() and (table >= 0).all()
    assert diffusion.alphas_cumprod[0] <= 1 and diffusion.snr[0] <= 1e12
    assert (diffusion.snr[-1] == 0) == zero
    inside = diffusion.alphas_cumprod < 1
    by_definition = diffusion.alphas_cumprod.sqrt().square() / (1 - diffusion.alphas_cumprod)
    torch.testing.assert_close(diffusion.snr[inside], by_definition[inside], rtol=1e-12, atol=0)


@pytest.mark.parametrize("table", [torch.linspace(1, 0.1, 11, dtype=torch.float64), torch.linspace(0.9, 0.1, 10),
                                   torch.linspace(0.1, 0.9, 10, dtype=torch.float64), torch.linspace(1.1, 0.1, 10, dtype=torch.float64),
                                   torch.linspace(0.9, -0.1, 10, dtype=torch.float64), torch.full((10,), 0.5, dtype=torch.float64)])
def test_a_schedule_that_is_none_is_refused(table, monkeypatch):
    """Wrong length, float32, rising, above 1, below 0, flat."""
    monkeypatch.setitem(SCHEDULES, "mine", lambda timesteps: table)
    with pytest.raises(ValueError, match="schedule 'mine' must give 10 values in float64 that fall"):
        Diffusion("mine", timesteps=10)


def test_a_schedule_that_ends_in_pure_noise_refuses_eps_by_itself(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "mine", lambda timesteps: torch.linspace(0.9, 0, timesteps, dtype=torch.float64))
    assert Diffusion("mine", "v").snr[-1] == 0
    with pytest.raises(ValueError, match="eps"):
        Diffusion("mine", "eps")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_zero_terminal_snr_keeps_the_first_step_and_empties_the_last(schedule):
    plain, rescaled = (Diffusion(schedule, "v", zero_terminal_snr=zero) for zero in (False, True))
    assert rescaled.alphas_cumprod[-1] == 0 and rescaled.snr[-1] == 0
    assert rescaled.snr[0].item() == pytest.approx(plain.snr[0].item(), rel=1e-9)
    ratio = rescaled.alphas_cumprod.sqrt().diff() / plain.alphas_cumprod.sqrt().diff()      # a shift and one stretch
    torch.testing.assert_close(ratio, ratio[:1].expand(999), rtol=1e-6, atol=0)


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="'cosin'.*linear.*cosine.*scaled-linear.*vp"):
        Diffusion("cosin")
    with pytest.raises(ValueError, match="'epsilon'.*x0.*eps.*v"):
        Diffusion(prediction="epsilon")
    with pytest.raises(ValueError, match="timesteps.*2.*1"):
        Diffusion(timesteps=1)
    for schedule in SCHEDULES:
        with pytest.raises(ValueError, match="eps.*zero terminal SNR.*'v' or 'x0'"):
            Diffusion(schedule, "eps", zero_terminal_snr=True)


# ---------------------------------------------------------------------------------------------------------------------
# Noise, targets, conversions

def test_noise_keeps_unit_variance_and_shrinks_the_picture():
    diffusion = Diffusion("linear")
    for t, x0_scale in itertools.product((0, 300, 999), (0.0, 1.0)):
        x0, noise = x0_scale * normal(1, 1, 500, 500), normal(1, 1, 500, 500, seed=1)
        alphas_cumprod = diffusion.alphas_cumprod[t].item()
        x_t = diffusion.add_noise(x0, noise, torch.tensor([t]))
        assert x_t.var().item() == pytest.approx(1 - alphas_cumprod + alphas_cumprod * x0_scale, rel=0.01)
        still = diffusion.add_noise(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), torch.tensor([t]))
        torch.testing.assert_close(still, torch.full((1, 1, 2, 2), alphas_cumprod**0.5))


@pytest.mark.parametrize("schedule, prediction, zero", PROCESSES)
def test_the_true_target_gives_back_x0(schedule, prediction, zero):
    diffusion = Diffusion(schedule, prediction, zero_terminal_snr=zero)
    x0, noise, t = x0_noise_t()
    back = diffusion.predict_x0(diffusion.target(x0, noise, t), diffusion.add_noise(x0, noise, t), t)
    possible = diffusion.alphas_cumprod > (1e-6 if prediction == "eps" else -1)  # eps divides rounding errors by alpha
    assert possible.sum() >= 998
    torch.testing.assert_close(back[possible], x0[possible], rtol=0, atol=1e-12)
    torch.testing.assert_close(back, x0, rtol=0, atol=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero", [False, True])
def test_v_is_x_t_turned_by_a_right_angle(schedule, zero):
    """(x_t, v) is (x_0, eps) turned by the angle whose cosine is alpha, so turning back gives both x_0 and eps."""
    diffusion = Diffusion(schedule, "v", zero_terminal_snr=zero)
    x0, noise, t = x0_noise_t()
    alpha = diffusion.alphas_cumprod.sqrt().view(-1, 1, 1, 1)
    sigma = (1 - diffusion.alphas_cumprod).sqrt().view(-1, 1, 1, 1)
    x_t, v = diffusion.add_noise(x0, noise, t), diffusion.target(x0, noise, t)
    torch.testing.assert_close(alpha * x_t - sigma * v, x0, rtol=0, atol=1e-12)
    torch.testing.assert_close(sigma * x_t + alpha * v, noise, rtol=0, atol=1e-12)
    if zero:
        torch.testing.assert_close(v[-1], -x0[-1], rtol=0, atol=0)              # all that is left to say at pure noise


def test_each_sample_gets_its_own_timestep():
    x0, noise, t = normal(3, 2, 4, 4), normal(3, 2, 4, 4, seed=1), torch.tensor([7, 999, 7])
    for prediction in "x0", "eps", "v":
        diffusion = Diffusion("cosine", prediction)
        x_t = diffusion.add_noise(x0, noise, t)
        for i in range(3):
            one = slice(i, i + 1)
            assert torch.equal(x_t[one], diffusion.add_noise(x0[one], noise[one], t[one]))
            assert torch.equal(diffusion.target(x0, noise, t)[one], diffusion.target(x0[one], noise[one], t[one]))
            back = diffusion.predict_x0(noise, x_t, t)
            assert torch.equal(back[one], diffusion.predict_x0(noise[one], x_t[one], t[one]))


def test_the_tables_keep_the_precision_of_the_pictures():
    diffusion = Diffusion("cosine", "eps")
    for dtype in torch.float32, torch.float64, torch.float32:                   # and do not forget it
        x0, t = torch.ones(1, 1, 1, 1, dtype=dtype), torch.tensor([999])
        x_t = diffusion.add_noise(x0, torch.zeros_like(x0), t)
        assert x_t.dtype == dtype and x_t.item() == pytest.approx(1 / 20291, rel=1e-4)
        assert diffusion.predict_x0(torch.zeros_like(x0), x_t, t).item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("prediction", ["x0", "eps", "v"])
def test_no_function_modifies_its_input(prediction):
    x0, noise, t = x0_noise_t()
    diffusion, inputs = Diffusion("vp", prediction), (x0, noise, t)
    before = [tensor.clone() for tensor in (*inputs, diffusion.alphas_cumprod, diffusion.snr)]
    rescale_to_zero_terminal_snr(diffusion.alphas_cumprod)
    results = [(diffusion.add_noise(x0, noise, t), diffusion.target(x0, noise, t), diffusion.predict_x0(noise, x0, t),
                diffusion.loss(lambda x, t, labels: 0.5 * x, x0, t, noise),
                Denoiser(lambda x, t, labels: 0.5 * x, diffusion)(x0, 1.0)) for _ in range(2)]
    for tensor, copy in zip((*inputs, diffusion.alphas_cumprod, diffusion.snr), before):
        assert torch.equal(tensor, copy)
    assert all(torch.equal(first, second) for first, second in zip(*results))


# ---------------------------------------------------------------------------------------------------------------------
# The loss

@pytest.mark.parametrize("schedule, prediction, zero", PROCESSES)
def test_the_loss_is_weight_times_mean_squared_error(schedule, prediction, zero):
    diffusion = Diffusion(schedule, prediction, zero_terminal_snr=zero)
    x0, noise, t = normal(3, 2, 2, 2), normal(3, 2, 2, 2, seed=1), torch.tensor([0, 400, 999])

    def model(x, t, labels):
        return 0.3 * x + t.view(-1, 1, 1, 1) / 1000

    for weighting in WEIGHTINGS:
        loss = diffusion.loss(model, x0, t, noise, weighting=weighting, gamma=2.0)
        assert loss.shape == (3,)
        for i in range(3):
            alphas_cumprod, snr = diffusion.alphas_cumprod[t[i]].item(), diffusion.snr[t[i]]
            alpha, sigma, total = math.sqrt(alphas_cumprod), math.sqrt(1 - alphas_cumprod), 0.0
            for x, e in zip(x0[i].flatten().tolist(), noise[i].flatten().tolist()):
                output = 0.3 * (alpha * x + sigma * e) + t[i].item() / 1000
                total += (output - {"x0": x, "eps": e, "v": alpha * e - sigma * x}[prediction]) ** 2 / 8
            by_hand = loss_weight(snr, weighting, 2.0, prediction).item() * total
            assert loss[i].item() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("schedule, prediction, zero", PROCESSES)
def test_weights_and_losses_are_finite_at_every_timestep(schedule, prediction, zero):
    """At t = 0 `vp` has no noise, its SNR is capped; at T - 1 a rescaled schedule has no signal."""
    diffusion = Diffusion(schedule, prediction, zero_terminal_snr=zero)
    x0, noise, t = (tensor.float() if tensor.is_floating_point() else tensor for tensor in x0_noise_t())
    x_t = diffusion.add_noise(x0, noise, t)
    assert x_t.isfinite().all() and diffusion.predict_x0(noise, x_t, t).isfinite().all()
    for weighting in WEIGHTINGS:
        assert loss_weight(diffusion.snr, weighting, 5.0, prediction).sum().isfinite()
        loss = diffusion.loss(lambda x, t, labels: x, x0, t, noise, weighting=weighting)
        assert loss.isfinite().all() and loss.dtype == torch.float32


def test_vp_starts_without_any_noise():
    diffusion = Diffusion("vp", "x0")
    x0, noise, t = normal(1, 1, 2, 2), normal(1, 1, 2, 2, seed=1), torch.tensor([0])
    assert diffusion.alphas_cumprod[0] == 1 and diffusion.snr[0] == 1e12
    assert torch.equal(diffusion.add_noise(x0, noise, t), x0)


@pytest.mark.parametrize("schedule, prediction, zero", PROCESSES)
def test_a_perfect_model_has_no_loss(schedule, prediction, zero):
    diffusion = Diffusion(schedule, prediction, zero_terminal_snr=zero)
    x0, noise, t = x0_noise_t()
    x0, noise = x0.float(), noise.float()
    for weighting in WEIGHTINGS:
        loss = diffusion.loss(lambda x, t, labels: diffusion.target(x0, noise, t), x0, t, noise, weighting=weighting)
        assert (loss == 0).all()


def test_the_model_gets_the_noisy_picture_the_timesteps_and_the_labels():
    diffusion, seen = Diffusion("linear", "eps"), []
    x0, noise, t, labels = normal(2, 1, 2, 2), normal(2, 1, 2, 2, seed=1), torch.tensor([3, 500]), torch.tensor([1, 0])
    diffusion.loss(lambda *inputs: seen.append(inputs) or inputs[0], x0, t, noise, labels)
    (x_t, asked_t, asked_labels), = seen
    assert torch.equal(x_t, diffusion.add_noise(x0, noise, t)) and asked_t is t and asked_labels is labels


def test_a_second_half_of_channels_for_the_variance_is_left_alone():
    diffusion = Diffusion("cosine", "v")
    x0, noise, t = normal(2, 3, 2, 2), normal(2, 3, 2, 2, seed=1), torch.tensor([3, 500])
    plain = diffusion.loss(lambda x, t, labels: 0.3 * x, x0, t, noise)
    twice = diffusion.loss(lambda x, t, labels: torch.cat([0.3 * x, torch.full_like(x, torch.nan)], 1), x0, t, noise)
    assert torch.equal(plain, twice)
    plain = Denoiser(lambda x, t, labels: 0.3 * x, diffusion)(x0, 0.7)
    twice = Denoiser(lambda x, t, labels: torch.cat([0.3 * x, torch.full_like(x, torch.nan)], 1), diffusion)(x0, 0.7)
    assert torch.equal(plain, twice)


# ---------------------------------------------------------------------------------------------------------------------
# The denoiser's grid

def nothing(x, t, labels):
    return torch.zeros_like(x)


@pytest.mark.parametrize("schedule, prediction, zero", PROCESSES)
def test_the_grid_leaves_out_steps_without_noise_or_without_signal(schedule, prediction, zero):
    diffusion = Diffusion(schedule, prediction, zero_terminal_snr=zero)
    first, last = (1 if schedule == "vp" else 0), (998 if zero else 999)
    denoiser = Denoiser(nothing, diffusion)
    for sigma, t in (denoiser.sigma_min, first), (denoiser.sigma_max, last):
        alphas_cumprod = diffusion.alphas_cumprod[t].item()
        assert sigma == pytest.approx(math.sqrt((1 - alphas_cumprod) / alphas_cumprod), rel=1e-12)
        assert denoiser.round_sigma(sigma).item() == sigma and denoiser.timestep(sigma).item() == t


def test_known_ends_of_the_grid():
    linear, cosine, vp = (Denoiser(nothing, Diffusion(schedule)) for schedule in ("linear", "cosine", "vp"))
    assert linear.sigma_min == pytest.approx(0.01 / math.sqrt(0.9999), rel=1e-9)
    assert linear.sigma_max == pytest.approx(157.407, rel=1e-5)
    assert cosine.sigma_max == pytest.approx(20291, rel=1e-5)
    assert vp.sigma_min == pytest.approx(math.sqrt(math.expm1(0.1 / 999 + 9.95 / 999**2)), rel=1e-9)
    assert vp.sigma_max == pytest.approx(math.sqrt(math.expm1(10.05)), rel=1e-9)


@pytest.mark.parametrize("schedule, prediction, zero", PROCESSES)
def test_rounding_finds_the_nearest_sigma_of_the_schedule(schedule, prediction, zero):
    diffusion = Diffusion(schedule, prediction, zero_terminal_snr=zero)
    denoiser = Denoiser(nothing, diffusion)
    grid = ((1 - diffusion.alphas_cumprod) / diffusion.alphas_cumprod).sqrt()   # 0 or inf where left out
    grid[(grid == 0) | grid.isinf()] = torch.nan
    generator = torch.Generator().manual_seed(0)
    anywhere = 10 ** (torch.rand(2000, generator=generator, dtype=torch.float64) * 10 - 4)  # 1e-4 to 1e6
    middles = (grid[1:-2] + grid[2:-1]) / 2
    for sigma in anywhere, middles * (1 - 1e-6), middles * (1 + 1e-6), grid[1:-1]:
        distance = (sigma[:, None] - grid).abs().nan_to_num(nan=torch.inf)                  # brute force
        assert torch.equal(denoiser.timestep(sigma), distance.argmin(1))
        assert torch.equal(denoiser.round_sigma(sigma), grid[distance.argmin(1)])


def test_rounding_takes_numbers_and_tensors_of_any_shape_and_leaves_them_alone():
    denoiser = Denoiser(nothing, Diffusion("linear"))
    sigmas = torch.tensor([[80.0, 0.002, 1.0], [1e9, 0.0, 157.0]])
    before, rounded = sigmas.clone(), denoiser.round_sigma(sigmas)
    assert rounded.shape == (2, 3) and rounded.dtype == torch.float64 and torch.equal(sigmas, before)
    assert rounded[0, 1] == rounded[1, 1] == denoiser.sigma_min and rounded[1, 0] == denoiser.sigma_max
    assert denoiser.round_sigma(80.0).shape == () and denoiser.round_sigma(80.0) == rounded[0, 0]
    assert torch.equal(denoiser.round_sigma(rounded), rounded)


# ---------------------------------------------------------------------------------------------------------------------
# The denoiser

def test_the_model_is_asked_at_the_nearest_timestep_with_the_input_scaled_by_this_very_sigma():
    diffusion, seen = Diffusion("cosine", "x0"), []
    denoiser = Denoiser(lambda *inputs: seen.append(inputs) or inputs[0], diffusion)
    x = normal(3, 1, 2, 2)
    grid = ((1 - diffusion.alphas_cumprod) / diffusion.alphas_cumprod).sqrt().tolist()
    for sigma in 0.01, 0.5, 3.3, 80.0:
        denoiser(x, sigma, torch.tensor([4, 5, 6]))
        x_t, t, labels = seen.pop()
        torch.testing.assert_close(x_t, x / math.sqrt(sigma**2 + 1), rtol=1e-12, atol=0)
        assert t.tolist() == [min(range(1000), key=lambda i: abs(grid[i] - sigma))] * 3 and not t.is_floating_point()
        assert labels.tolist() == [4, 5, 6]


MEAN, VARIANCE = 0.3, 0.25


def gaussian_oracle(diffusion):
    """What a perfect network says when x_0 ~ N(MEAN, VARIANCE): from x_t, E[x_0 | x_t] by Bayes."""
    def model(x_t, t, labels):
        alphas_cumprod = diffusion.alphas_cumprod[t].view(-1, 1, 1, 1)
        alpha, sigma = alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()
        precision = alpha**2 / sigma**2 + 1 / VARIANCE
        x0 = (alpha * x_t / sigma**2 + MEAN / VARIANCE) / precision
        eps = (x_t - alpha * x0) / sigma
        return {"x0": x0, "eps": eps, "v": alpha * eps - sigma * x0}[diffusion.prediction]
    return model


@pytest.mark.parametrize("schedule, prediction, zero", PROCESSES)
def test_the_denoiser_of_a_gaussian_is_exact_through_every_prediction(schedule, prediction, zero):
    """D(x; sigma) of N(MEAN, VARIANCE) is (VARIANCE x + sigma^2 MEAN) / (VARIANCE + sigma^2)."""
    diffusion = Diffusion(schedule, prediction, zero_terminal_snr=zero)
    denoiser = Denoiser(gaussian_oracle(diffusion), diffusion)
    for sigma in denoiser.round_sigma(torch.tensor([0.002, 0.05, 0.5, 1.0, 7.0, 80.0])).tolist():
        x = MEAN + math.sqrt(VARIANCE + sigma**2) * normal(4, 2, 3, 3)
        exact = (VARIANCE * x + sigma**2 * MEAN) / (VARIANCE + sigma**2)
        torch.testing.assert_close(denoiser(x, sigma), exact, rtol=0, atol=1e-10)


def small_unet(**options):
    return UNet(4, channels=8, channel_mult=(1, 2), blocks=1, attention=(), heads=2, **options)


def small_uvit(**options):
    return UViT(4, patch=2, width=16, depth=2, heads=2, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_network_runs_in_its_own_precision_and_the_state_keeps_its_own(dtype, randomize):
    model, seen = randomize(small_unet(out_channels=6)).to(dtype).requires_grad_(False), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    for prediction in "x0", "eps", "v":
        assert Denoiser(model, Diffusion("linear", prediction))(normal(2, 3, 4, 4), 0.7).dtype == torch.float64
    assert seen == [dtype] * 3


@pytest.mark.parametrize("backbone", [small_unet, small_uvit])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("prediction", ["x0", "eps", "v"])
def test_guidance_moves_every_channel_away_from_the_unlabelled_prediction(backbone, channels, prediction, randomize):
    model = randomize(backbone(in_channels=channels, num_classes=3)).double().requires_grad_(False)
    diffusion = Diffusion("linear", prediction)
    denoiser = Denoiser(model, diffusion)
    x, labels = normal(2, channels, 4, 4), torch.tensor([2, 0])
    t, sigma = 400, math.sqrt(1 / diffusion.alphas_cumprod[400].item() - 1)
    alpha_t = 1 / math.sqrt(1 + sigma**2)
    conversion = {"x0": lambda out: out, "eps": lambda out: x - sigma * out,
                  "v": lambda out: alpha_t**2 * x - sigma * alpha_t * out}[prediction]
    with_labels, without, no_label_row = (conversion(model(alpha_t * x, torch.tensor([t, t]), row))
                                          for row in (labels, None, torch.tensor([3, 3])))
    assert ((with_labels - without).abs().amax((2, 3)) > 1e-4).all()            # else this would test nothing
    torch.testing.assert_close(without, no_label_row, rtol=0, atol=0)
    for guidance in 0.0, 1.0, 1.5, 4.0:
        by_hand = without + guidance * (with_labels - without)
        torch.testing.assert_close(denoiser(x, sigma, labels, guidance), by_hand, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(denoiser(x, sigma), without, rtol=1e-10, atol=1e-10)


def test_guidance_1_makes_one_call_and_more_makes_one_of_twice_the_batch(randomize):
    model, batches = randomize(small_uvit(num_classes=3)).requires_grad_(False), []
    model.register_forward_pre_hook(lambda module, inputs: batches.append(len(inputs[0])))
    denoiser, x, labels = Denoiser(model, Diffusion()), normal(2, 3, 4, 4), torch.tensor([0, 1])
    denoiser(x, 1.0, labels)
    denoiser(x, 1.0, labels, guidance=1)
    denoiser(x, 1.0, labels, guidance=1.5)
    denoiser(x, 1.0)
    assert batches == [2, 2, 4, 2]


@pytest.mark.parametrize("interval", [(200, 600), (0, 0), (0, 999), (999, 999)])
def test_the_guidance_interval_includes_its_ends(interval, randomize):
    model, batches = randomize(small_uvit(num_classes=3)).requires_grad_(False), []
    model.register_forward_pre_hook(lambda module, inputs: batches.append(len(inputs[0])))
    denoiser, x, labels = Denoiser(model, Diffusion()), normal(1, 3, 4, 4), torch.tensor([1])
    for t in {0, 400, 999, *interval, max(interval[0] - 1, 0), min(interval[1] + 1, 999)}:
        plain, guided = (denoiser(x, denoiser.sigmas[t], labels, guidance) for guidance in (1.0, 3.0))
        batches.clear()
        limited = denoiser(x, denoiser.sigmas[t], labels, 3.0, interval)
        inside = interval[0] <= t <= interval[1]
        assert torch.equal(limited, guided if inside else plain) and batches == [2 if inside else 1]


def test_guidance_is_refused_where_there_is_nothing_to_guide_with():
    x, labels, diffusion = normal(1, 3, 4, 4), torch.tensor([0]), Diffusion()
    for model in small_unet(), small_uvit(), small_unet(num_classes=3, null_label=False), nothing:
        for given in labels, None:
            with pytest.raises(ValueError, match="guidance needs a class-conditional model"):
                Denoiser(model, diffusion)(x, 1.0, given, guidance=1.5)
    vit = ViT(4, patch=2, width=16, depth=1, heads=2, num_classes=3)
    with pytest.raises(ValueError, match="guidance needs labels"):
        Denoiser(vit, diffusion)(x, 1.0, None, guidance=1.5)


# ---------------------------------------------------------------------------------------------------------------------
# Randomness

def test_a_random_stream_depends_on_its_place_alone():
    first = random_stream(3, "noise", 17, 4).standard_normal(100)
    random_stream(3, "noise", 17, 3).standard_normal(100_000)
    assert (random_stream(3, "noise", 17, 4).standard_normal(100) == first).all()


def test_other_places_purposes_and_seeds_have_other_numbers():
    places = [(3, "noise", 1, 2), (3, "noise", 2, 1), (3, "noise", 1, 3), (3, "noise", 2, 2), (3, "labels", 1, 2),
              (4, "noise", 1, 2), (3, "noise"), (3, "noise", 1), (0, "noise"), (2**32, "noise"), (3, "noise", 2**40, 2)]
    draws = [set(random_stream(*place).integers(2**63, size=2000).tolist()) for place in places]
    for one, other in itertools.combinations(draws, 2):
        assert not one & other                                                  # not even shifted


def test_random_streams_of_neighbours_are_unrelated_normal_numbers():
    draws = torch.stack([torch.from_numpy(random_stream(0, "noise", k).standard_normal(10_000)) for k in range(20)])
    assert draws.mean(1).abs().max() < 0.05 and (draws.var(1) - 1).abs().max() < 0.08
    assert (draws.corrcoef() - torch.eye(20)).abs().max() < 0.05


def test_guidance_is_refused_outside_its_interval_too(randomize):
    model = UNet(8, channels=8, channel_mult=(1, 2), attention=(), heads=2)
    denoiser = Denoiser(model, Diffusion())
    with pytest.raises(ValueError, match="class-conditional"):
        denoiser(torch.zeros(1, 3, 8, 8), denoiser.sigmas[10], torch.tensor([0]), 3.0, (500, 600))


def test_the_lesson_prints_and_draws_every_schedule(run_lesson, tmp_path):
    printed = run_lesson("diffusion")
    assert "999   0.0000   1.0000" in printed and "runs/lessons/diffusion.png" in printed
    assert read_picture(tmp_path / "runs/lessons/diffusion.png").width > 400
