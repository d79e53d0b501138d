"""sample.py: the samplers on distributions whose answer is known, pictures, and the command as a user runs it."""

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ROOT, read_picture, save_torchscript
from torch.utils._python_dispatch import TorchDispatchMode

import sample
import train
from diffusion import Denoiser, Diffusion
from unet import UNet
from uvit import UViT


class GaussianDenoiser:
    """The exact D of data from N(mean, std^2) at any sigma, and how often it was asked."""
    sigma_min, sigma_max = 0.002, 80.0

    def __init__(self, mean=0.0, std=0.5):
        self.mean, self.std, self.asked = mean, std, []

    def round_sigma(self, sigma):
        return torch.as_tensor(sigma, dtype=torch.float64)

    def __call__(self, x, sigma, labels=None, guidance=1.0, guidance_interval=None):
        self.asked.append(float(sigma))
        return self.mean + (x - self.mean) * self.std**2 / (self.std**2 + float(sigma)**2)

    def solution(self, noise):
        """Where the ODE ends: x - mean shrinks with sqrt(std^2 + sigma^2)."""
        return self.mean + (80.0 * noise.double() - self.mean) * self.std / math.sqrt(self.std**2 + 80.0**2)


def relative_error(steps, **options):
    denoiser = GaussianDenoiser()
    end = sample.heun(denoiser, torch.ones(1, 1, 1, 1), steps=steps, **options)
    return abs(end.item() / denoiser.solution(torch.ones(1)).item() - 1)


# ---------------------------------------------------------------------------------------------------------------------
# Precision

class Operations(TorchDispatchMode):
    """Notes (name, dtype of the first tensor) of every operation, and how often it was seen."""
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        self.seen[operation.__name__.split(".")[0], None if first is None else first.dtype] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("backbone", [lambda: UNet(8, channels=8, channel_mult=(1, 2), attention=(8, 4), heads=2),
                                      lambda: UViT(8, patch=2, width=16, depth=2, heads=2)])
def test_attention_on_a_cpu_is_fused_in_fp32_and_written_out_in_bf16(backbone, randomize):
    """Either way every product has the precision asked for: the fallback of PyTorch's own would go back to fp32."""
    model, x, t = randomize(backbone()), torch.randn(2, 3, 8, 8), torch.tensor([3, 900])
    with torch.no_grad():
        exact = model(x, t)
    fused, products = "_scaled_dot_product_flash_attention_for_cpu", {"bmm", "mm", "addmm", "convolution"}
    for dtype in torch.float32, torch.bfloat16:
        with sample.autocast(torch.device("cpu"), dtype), Operations() as operations:
            output = model(x, t)
        assert ((fused, dtype) in operations.seen) == (dtype == torch.float32)
        assert {kind for name, kind in operations.seen if name in products} == {dtype}
        assert (output - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05) * exact.abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# Samplers

def test_karras_sigmas():
    sigmas = sample.karras_sigmas(18, 0.002, 80.0)
    assert sigmas.shape == (19,) and sigmas.dtype == torch.float64
    assert sigmas[0] == 80 and sigmas[17] == pytest.approx(0.002, rel=1e-12) and sigmas[18] == 0
    np.testing.assert_allclose(sample.karras_sigmas(5, 0.002, 80.0), [80, 17.5278, 2.51522, 0.169753, 0.002, 0], rtol=1e-5)
    assert sample.karras_sigmas(1, 0.002, 80.0).tolist() == [80, 0]
    ramp = sample.karras_sigmas(9, 0.1, 10.0, rho=3.0)[:-1] ** (1 / 3)
    torch.testing.assert_close(ramp.diff(), ramp.diff()[:1].expand(8))
    with pytest.raises(ValueError, match="steps"):
        sample.karras_sigmas(0, 0.002, 80.0)


def test_heun_has_the_known_errors_and_falls_with_every_step():
    errors = [relative_error(n) for n in range(4, 21)]
    assert errors == sorted(errors, reverse=True)                   # no parity effect
    for n, error in (18, 0.0553), (36, 0.01221), (72, 0.00287), (144, 0.00069):
        assert relative_error(n) == pytest.approx(error, rel=0.01)
    assert relative_error(18, solver="euler") == pytest.approx(0.154, rel=0.01)
    assert all(math.isfinite(relative_error(n)) for n in (1, 2, 3))


@pytest.mark.parametrize("solver, order", [("euler", 1), ("heun", 2), ("dpm++2m", 2)])
def test_order_of_convergence(solver, order):
    coarse, fine = relative_error(200, solver=solver), relative_error(400, solver=solver)
    assert order - 0.15 < math.log2(coarse / fine) < order + 0.35


@pytest.mark.parametrize("solver", sample.SOLVERS)
def test_every_solver_converges_and_asks_at_most_twice_a_step(solver):
    coarse, fine = relative_error(200, solver=solver), relative_error(400, solver=solver)
    assert fine < 0.01 and fine < 0.6 * coarse
    for n in (1, 2, 18):
        denoiser = GaussianDenoiser()
        sample.heun(denoiser, torch.ones(1, 1, 1, 1), steps=n, solver=solver)
        assert n <= len(denoiser.asked) <= 2 * n and all(0 < sigma <= 80 for sigma in denoiser.asked)


@pytest.mark.parametrize("solver, calls", [("euler", lambda n: n), ("heun", lambda n: 2 * n - 1), ("dpm++2m", lambda n: n)])
def test_number_of_model_calls(solver, calls):
    for n in (1, 2, 5, 18):
        denoiser = GaussianDenoiser()
        sample.heun(denoiser, torch.ones(1, 1, 1, 1), steps=n, solver=solver)
        assert len(denoiser.asked) == calls(n)


@pytest.mark.parametrize("prediction", ["x0", "eps", "v"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "vp"])
def test_ideal_model_gives_samples_with_the_data_s_mean_and_variance(schedule, prediction):
    """Through the whole chain: a model that knows N(0.3, 0.5^2), Diffusion, Denoiser, Heun."""
    diffusion = Diffusion(schedule, prediction)

    def model(x, t, labels=None):
        abar = diffusion.alphas_cumprod[t].view(-1, 1, 1, 1)
        x0 = 0.3 + (x - abar.sqrt() * 0.3) * abar.sqrt() * 0.25 / (abar * 0.25 + 1 - abar)
        eps = (x - abar.sqrt() * x0) / (1 - abar).sqrt()
        return {"x0": x0, "eps": eps, "v": abar.sqrt() * eps - (1 - abar).sqrt() * x0}[prediction]

    noise = torch.randn(4000, 1, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x0 = sample.heun(Denoiser(model, diffusion), noise, steps=60)
    assert x0.mean() == pytest.approx(0.3 + 0.5 * noise.mean().item(), abs=0.01)
    assert x0.std() == pytest.approx(0.5 * noise.std().item(), rel=0.02)


def test_churn_keeps_the_distribution_and_draws_only_inside_its_range():
    noise = torch.randn(20000, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    generator, draws = torch.Generator().manual_seed(1), []

    def churn_noise(x):
        draws.append(1)
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    x0 = sample.heun(GaussianDenoiser(0.3, 0.5), noise, steps=64, churn=20, churn_range=(0.05, 50.0), churn_noise=churn_noise)
    assert x0.mean() == pytest.approx(0.3, abs=0.02) and x0.std() == pytest.approx(0.5, rel=0.03)
    sigmas = sample.karras_sigmas(64, 0.002, 80.0)[:-1]
    assert len(draws) == ((sigmas >= 0.05) & (sigmas <= 50)).sum()


def test_churn_raises_sigma_by_the_papers_gamma():
    denoiser = GaussianDenoiser()
    sample.heun(denoiser, torch.ones(1, 1, 1, 1), steps=10, churn=2.0, solver="euler")
    np.testing.assert_allclose(denoiser.asked, 1.2 * sample.karras_sigmas(10, 0.002, 80.0)[:-1], rtol=1e-12)      # 1 + S_churn / N
    denoiser = GaussianDenoiser()
    sample.heun(denoiser, torch.ones(1, 1, 1, 1), steps=10, churn=40.0, solver="euler")
    np.testing.assert_allclose(denoiser.asked, math.sqrt(2) * sample.karras_sigmas(10, 0.002, 80.0)[:-1], rtol=1e-12)


def test_any_number_of_steps_works_on_a_coarse_grid():
    """As many noise levels as there are timesteps: some round to the same point, and nothing divides by zero."""
    diffusion = Diffusion("cosine", "x0", timesteps=10)
    for solver in sample.SOLVERS:
        for steps in range(1, 11):
            x0 = sample.heun(Denoiser(lambda x, t, labels=None: 0.5 * x, diffusion), torch.ones(1, 1, 2, 2), steps=steps, solver=solver)
            assert x0.isfinite().all()


def test_unknown_solver_and_churn_with_memory_are_refused():
    with pytest.raises(ValueError, match="heun, euler"):
        sample.heun(GaussianDenoiser(), torch.ones(1, 1, 1, 1), solver="ddpm")
    with pytest.raises(ValueError, match="churn"):
        sample.heun(GaussianDenoiser(), torch.ones(1, 1, 1, 1), solver="dpm++2m", churn=1.0)


def test_untrained_eps_model_stays_finite(randomize):
    """1 / alpha is 20,000 at the end of the cosine schedule; the sampler starts at sigma = 80."""
    model = randomize(UNet(8, channels=8, channel_mult=(1, 2), attention=(), heads=2)).eval()
    for steps in (1, 10, 50):
        assert sample.heun(Denoiser(model, Diffusion("cosine", "eps")), torch.randn(2, 3, 8, 8), steps=steps).isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Images and pictures

def test_image_k_depends_on_seed_and_k_alone(randomize):
    model = randomize(UNet(8, channels=8, channel_mult=(1, 2), attention=(4,), heads=2, num_classes=3)).eval()
    denoiser = Denoiser(model, Diffusion())

    def draw(indices, seed=0):
        return sample.generate(denoiser, (3, 8, 8), seed, indices, [k % 3 for k in indices], steps=4, churn=5.0)

    together, alone = draw(range(6)), torch.cat([draw([k]) for k in range(6)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)           # up to the order of additions
    assert torch.equal(together, draw(range(6))) and not torch.allclose(together, draw(range(6), seed=1))


def test_uint8_rounds_and_refuses_nan():
    x = torch.tensor([-1.0, 0.0, 1.0, 2.0, -3.0, 0.5]).view(1, 1, 2, 3)
    assert sample.to_uint8(x).flatten().tolist() == [0, 128, 255, 255, 0, 191]
    for bad in float("nan"), float("inf"):
        with pytest.raises(ValueError, match="nan or infinity"):
            sample.to_uint8(torch.full((1, 3, 2, 2), bad))


def test_a_grid_shows_every_image_in_its_place():
    images = np.arange(7, dtype=np.uint8).reshape(7, 1, 1, 1) * np.full((1, 64, 64, 3), 30, np.uint8)
    grid = np.asarray(sample.image_grid(images, columns=3, gap=2))
    assert grid.shape == (3 * 66 + 2, 3 * 66 + 2, 3)
    for k in range(7):
        y, x = 2 + k // 3 * 66, 2 + k % 3 * 66
        assert (grid[y:y + 64, x:x + 64] == 30 * k).all()
    assert np.asarray(sample.image_grid(np.zeros((2, 64, 64, 1), np.uint8), 2)).ndim == 2


def test_a_label_grid_has_a_row_for_each_class():
    images = np.stack([np.full((64, 64, 3), value, np.uint8) for value in (10, 20, 30, 40, 50)])
    sheet = np.asarray(sample.label_grid(images, [1, 0, 1, 0, 1], ["cat", "dog"], "title"))
    left, top = sheet.shape[1] - 3 * 66 - 2, sheet.shape[0] - 2 * 66 - 2
    assert [[int(sheet[top + 34 + 66 * r, left + 34 + 66 * c, 0]) for c in range(3)] for r in range(2)] == [[20, 40, 255], [10, 30, 50]]


def test_a_chart_draws_each_line_where_its_points_are():
    panel = {"title": "t", "x": "x", "lines": {"a": ([0, 1, 2], [1, 10, 100]), "b": ([0, 2], [float("nan"), 3])}, "log_y": True}
    picture = sample.line_chart([panel])
    pixels = np.asarray(picture)
    blue = np.argwhere((pixels == [31, 119, 180]).all(-1) & (np.arange(460) < 400)[None])
    assert len(blue) > 100
    slope = np.polyfit(blue[:, 1], blue[:, 0], 1)[0]
    assert slope == pytest.approx(-(300 - 66) / (460 - 70), rel=0.1)              # a straight line on the logarithmic axis
    sample.line_chart([{"title": "empty", "x": "x", "lines": {}}, {"title": "flat", "x": "x", "lines": {"c": ([1, 2], [5, 5])}}])


# ---------------------------------------------------------------------------------------------------------------------
# The command

def test_grid_folder_and_npz_hold_the_same_images(command, runs):
    for out in "grid.png", "images/", "arrays.npz":
        done = command("sample.py", "run", "--count", "7", "--steps", "3", "--out", out)
        assert done.returncode == 0 and done.stderr == "" and "EMA" in done.stdout and "seed 0" in done.stdout, done.stderr
    arrays = np.load(runs / "arrays.npz")
    assert arrays["arr_0"].dtype == np.uint8 and arrays["arr_0"].shape == (7, 8, 8, 3) and arrays["arr_1"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert sorted(path.name for path in (runs / "images").iterdir()) == [*(f"{k:06d}.png" for k in range(7)), "labels.csv", "settings.json"]
    for k in range(7):
        assert np.array_equal(np.asarray(read_picture(runs / f"images/{k:06d}.png")), arrays["arr_0"][k])
    lines = (runs / "images/labels.csv").read_text().splitlines()
    assert lines[:2] == ["file,label,class,seed", "000000.png,0,0,0"] and len(lines) == 8
    assert not list(runs.glob("*.partial"))


def test_fewer_images_into_the_same_folder_leave_the_labels_of_all(command, runs):
    for count in 5, 2, 7:
        assert command("sample.py", "run", "--count", count, "--steps", "2", "--out", "images/").returncode == 0
        lines = (runs / "images/labels.csv").read_text().splitlines()
        assert len(lines) == 1 + max(5, count) == 1 + len(list((runs / "images").glob("*.png")))


@pytest.mark.parametrize("words", [["sample.py", "run", "--count", "2", "--out", "a.png"], ["train.py", "--resume", "--out", "run", "--steps", "3"]])
def test_commands_work_with_a_closed_output(runs, words):
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, ROOT / words[0]]
    done = subprocess.run([*closing, *words[1:]], cwd=runs, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_two_commands_do_not_write_one_file(command, runs):
    handle = sample.lock(runs / "a.npz.partial")
    done = command("sample.py", "run", "--count", "2", "--steps", "2", "--out", "a.npz")
    assert done.returncode == 2 and "a.npz.partial is in use" in done.stderr and done.stderr.count("\n") == 1
    os.close(handle)
    assert command("sample.py", "run", "--count", "2", "--steps", "2", "--out", "a.npz").returncode == 0


def test_seed_batch_size_and_weights(command, runs):
    def draw(*flags):
        (runs / "x.npz").unlink(missing_ok=True)
        assert command("sample.py", "run", "--count", "5", "--steps", "3", "--out", "x.npz", *flags).returncode == 0
        return np.load(runs / "x.npz")["arr_0"].astype(int)

    usual = draw()
    assert np.array_equal(usual, draw()) and abs(usual - draw("--batch-size", "2")).max() <= 1
    for other in ("--seed", "1"), ("--raw",), ("--labels", "2"), ("--guidance", "4"), ("--churn", "20"), ("--solver", "dpm++2m"):
        assert abs(usual - draw(*other)).max() > 1
    narrow = draw("--guidance", "4", "--guidance-interval", "999", "999")
    assert abs(usual - narrow).max() <= 1                                       # sampling starts at t = 991


def test_labels_by_name_number_and_none(command, runs):
    def labels(text):
        (runs / "x.npz").unlink(missing_ok=True)
        assert command("sample.py", "run", "--count", "4", "--steps", "2", "--labels", text, "--out", "x.npz").returncode == 0
        return np.load(runs / "x.npz")["arr_1"].tolist()

    assert labels("2,0") == [2, 0, 2, 0] and labels("none") == [3, 3, 3, 3] and labels("1,none") == [1, 3, 1, 3]


def test_killed_run_goes_on_to_the_same_file(command, runs):
    flags = ("run", "--count", "240", "--batch-size", "2", "--steps", "2")
    assert command("sample.py", *flags, "--out", "whole.npz").returncode == 0
    whole = np.load(runs / "whole.npz")

    def in_arrays():
        done = runs / "killed.npz.partial/done.npy"
        return np.load(done).sum() if done.exists() else 0

    for out, finished in ("killed.npz", in_arrays), ("folder/", lambda: len(list((runs / "folder").glob("*.png")))):
        for wait in (0.2, 0.4, 0.8, 1.6, 3.2, 6.4):                             # a busy machine may need longer for the first image
            assert command("sample.py", *flags, "--out", out, kill_after=wait).returncode == -9
            if finished():
                break
        assert 0 < finished() < 240
        assert command("sample.py", *flags, "--out", out, "--seed", "1").returncode == 2                # other images than those
        assert command("sample.py", *flags, "--out", out).returncode == 0
        if out == "folder/":                                                    # nothing is missing: the same command has nothing to do
            done = command("sample.py", *flags, "--out", out)
            assert done.returncode == 0 and "(0 images" in done.stdout, done.stderr
    killed = np.load(runs / "killed.npz")
    assert np.array_equal(whole["arr_0"], killed["arr_0"]) and np.array_equal(whole["arr_1"], killed["arr_1"])
    for k in (0, 239):
        assert np.array_equal(np.asarray(read_picture(runs / f"folder/{k:06d}.png")), whole["arr_0"][k])


def test_ctrl_c_ends_in_one_line_and_keeps_what_is_drawn(command, runs):
    flags = ("run", "--count", "100000", "--batch-size", "3", "--steps", "3", "--out", "many/", "--device", "cpu")
    drawing = subprocess.Popen([sys.executable, str(ROOT / "sample.py"), *flags], cwd=runs, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))         # jobs in the background ignore it
    while drawing.poll() is None and not list((runs / "many").glob("*.png")):
        time.sleep(0.05)
    drawing.send_signal(signal.SIGINT)
    errors = drawing.communicate(timeout=60)[1]
    assert drawing.returncode == 130 and errors.strip() == "stopped; the same command goes on with what is missing"


def test_two_processes_draw_the_same_images(command, runs):
    flags = ("run", "--count", "10", "--batch-size", "2", "--steps", "3")
    two = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "sample.py"),
                            *flags, "--out", "two.npz"], cwd=runs, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert command("sample.py", *flags, "--out", "one.npz").returncode == 0             # meanwhile
    errors = two.communicate(timeout=100)[1]
    assert two.returncode == 0, errors
    one, two = (np.load(runs / f"{name}.npz")["arr_0"] for name in ("one", "two"))
    assert np.array_equal(one, two) and len({image.tobytes() for image in one}) == 10


PUBLISHED = {"position": "pos_embed", "patch_embed.": "patch_embed.proj.", "encoder": "in_blocks", "middle": "mid_block", "decoder": "out_blocks",
             "attention": "attn", "fc1": "mlp.fc1", "fc2": "mlp.fc2", "to_pixels": "decoder_pred", "final_conv": "final_layer"}


def published(model):
    """The weights of a UViT under the names of U-ViT's released files."""
    released = {}
    for name, value in model.state_dict().items():
        for ours, theirs in PUBLISHED.items():
            name = name.replace(ours, theirs)
        released[name] = value
    return released


def test_published_weights_sample(command, tmp_path):
    """A file as U-ViT released it for CIFAR-10 draws a picture; one with two blocks where thirteen belong is refused."""
    from train import model_config, preset_args
    for depth, code in (12, 0), (2, 2):
        model = sample.build_model(model_config(preset_args("cifar10-uvit-s", {"depth": depth}), (3, 32, 32), None))
        torch.save(published(model), tmp_path / "nnet_ema.pth")
        done = command("sample.py", "--weights", "nnet_ema.pth", "--preset", "cifar10-uvit-s", "--count", "1", "--steps", "1", "--out", "x.png",
                       "--device", "cpu", "--precision", "fp32")
        assert done.returncode == code, done.stderr
    assert "published" not in done.stdout and "encoder.1" in done.stderr and done.stderr.count("\n") == 1
    assert read_picture(tmp_path / "x.png").size == (68, 68)


def test_training_starts_from_published_weights(command, pictures, tmp_path, randomize):
    """Also with a skip scaling added, whose networks are new."""
    model = randomize(sample.build_model({"class": "UViT", "size": (8, 8), "patch": 2, "width": 16, "depth": 4, "heads": 2}))
    torch.save(published(model), tmp_path / "weights.pth")
    flags = ("--data", pictures, "--unconditional", "--size", "8", "--backbone", "uvit", "--patch", "2", "--width", "16", "--depth", "4", "--heads", "2",
             "--batch-size", "8", "--steps", "1", "--sample-every", "0", "--lr", "1e-9", "--device", "cpu", "--precision", "fp32", "--weights", "weights.pth")
    for mode in "none", "ls-separate":
        assert command("train.py", *flags, "--skip-scaling", mode, "--out", mode).returncode == 0
        started, _, _ = sample.load_model(tmp_path / mode, raw=True)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(started.state_dict()[name], value, rtol=0, atol=1e-6)
        assert any("skip_scaling" in name for name in started.state_dict()) == (mode != "none")


def test_decoder_turns_latents_into_pictures(command, tmp_path):
    np.save(tmp_path / "latents.npy", np.random.default_rng(0).standard_normal((16, 4, 8, 8)).astype(np.float32))
    done = command("train.py", "--data", "latents.npy", "--size", "8", "--channels", "8", "--channel-mult", "1,2", "--attention", "4", "--heads", "2",
                   "--batch-size", "8", "--steps", "1", "--sample-every", "0", "--device", "cpu", "--out", "run")
    assert done.returncode == 0, done.stderr

    class Decoder(torch.nn.Module):
        def forward(self, z):
            return torch.nn.functional.interpolate(z[:, :3] * 0.18215, scale_factor=2.0)
    save_torchscript(Decoder(), tmp_path / "decoder.pt")
    assert command("sample.py", "run", "--count", "2", "--steps", "2", "--out", "latents.npz").returncode == 0
    assert command("sample.py", "run", "--count", "2", "--steps", "2", "--out", "images.npz", "--decoder", "decoder.pt").returncode == 0
    latents, images = np.load(tmp_path / "latents.npz")["arr_0"], np.load(tmp_path / "images.npz")["arr_0"]
    expected = ((latents[:, :3].transpose(0, 2, 3, 1) + 1) * 127.5).round().clip(0, 255).repeat(2, 1).repeat(2, 2)
    assert images.shape == (2, 16, 16, 3) and abs(images - expected).max() <= 1
    save_torchscript(torch.nn.Conv2d(3, 3, 1), tmp_path / "wrong.pt")
    done = command("sample.py", "run", "--count", "2", "--steps", "2", "--out", "wrong.npz", "--decoder", "wrong.pt")
    assert done.returncode == 2 and "--decoder wrong.pt fails on latents of (4, 8, 8)" in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_out_of_memory_is_one_line(command, runs):
    done = command("sample.py", "run", "--count", "8000", "--batch-size", "8000", "--steps", "1", "--device", "cpu", "--precision", "fp32",
                   "--out", "x/", memory=100_000_000)
    assert done.returncode == 2 and done.stderr == "sample.py: out of memory: a smaller --batch-size needs less\n", done.stderr


def test_weights_are_cast_once_for_all_calls_of_a_batch(runs):
    """In bf16, neither the model that sample.py loads nor the average that train.py keeps is cast anew at each call."""
    args = train.preset_args("digits", {"data": str(runs / "pictures.npz"), "size": (8, 8), "channel_mult": (1, 2), "channels": 8, "attention": (4,),
                                        "heads": 2, "out": str(runs / "new"), "cache": str(runs / "cache"), "precision": "bf16", "device": "cpu"})
    run = train.build(args, lambda line: None)
    for model in sample.load_model(runs / "run")[0], run.ema:
        casts = []
        for steps in 1, 3:
            with Operations() as operations, run.autocast():
                sample.generate(Denoiser(model, run.diffusion), (3, 8, 8), 0, range(2), [0, 1], solver="euler", steps=steps)
            casts.append(operations.seen["_to_copy", torch.float32])
        assert casts[1] - casts[0] < 2 * len(list(model.parameters())) / 2          # two calls more, without the casts of their weights


MISTAKES = [
    ([], "give a run folder"),
    (["nowhere"], "nowhere does not exist"),
    (["foreign.pt"], "cannot be read as a checkpoint"),
    (["other.pt"], "is no checkpoint of train.py"),
    (["changed.pt"], "another architecture"),
    *((["%s.pt" % name], "%s.pt describes a model or a diffusion that this code does not know" % name) for name in ("class", "argument", "schedule")),
    (["run", "--path", "--batch-size", "2"], "--batch-size has no effect"),
    (["run", "--count", "0"], "--count must be a whole number in [1, 1e9]"),
    (["run", "--batch-size", "-1"], "--batch-size must be"),
    (["run", "--steps", "0"], "--steps must be"),
    (["run", "--steps", "1001"], "--steps must be"),
    (["run", "--seed", "-1"], "--seed must be"),
    (["run", "--solver", "nothing"], "--solver"),
    (["run", "--labels", "3"], "--labels '3'"),
    (["run", "--labels", "dog"], "--labels 'dog'"),
    (["run", "--labels", "-1"], "--labels"),
    (["plain", "--labels", "1"], "trained without labels"),
    (["plain", "--guidance", "2"], "--guidance 2"),
    (["always", "--guidance", "2"], "--guidance 2"),
    (["always", "--labels", "none"], "--label-dropout"),
    (["run", "--labels", "none", "--guidance", "2"], "--guidance 2"),
    (["run", "--guidance", "nan"], "--guidance must be"),
    (["run", "--guidance", "2", "--guidance-interval", "800", "0"], "--guidance-interval"),
    (["run", "--guidance-interval", "0", "800"], "--guidance-interval goes with --guidance"),
    (["run", "--churn", "-1"], "--churn must be"),
    (["run", "--churn", "1", "--solver", "dpm++2m"], "--churn"),
    (["run", "--out", "x.jpg"], "x.jpg must end in"),
    (["run", "--decoder", "foreign.pt"], "--decoder"),
    (["run", "--weights", "foreign.pt"], "--preset"),
    (["run", "--preset", "digits"], "--preset has no effect without --weights"),
    (["run", "--attention-order", "legacy"], "--attention-order has no effect without --weights"),
    (["run", "--cache", "x"], "--cache has no effect without --fid"),
    (["run", "--features", "x.pt"], "--features has no effect without --fid"),
    (["--weights", "adm.pt", "--preset", "cifar10-uvit-s"], "do not fit"),
    (["--weights", "foreign.pt", "--preset", "digits"], "cannot be read safely"),
    (["--weights", "script.pt", "--preset", "digits"], "cannot be read safely"),
    (["--weights", "other.pt", "--preset", "nothing"], "--preset 'nothing'"),
    (["--weights", "other.pt", "--preset", "cifar10-uvit-s"], "do not fit"),
    (["run", "--precision", "fp16"], "--precision fp16"),
    (["run", "--seed", "99999999999999999999999999"], "--seed"),
    (["run", "--out", "pictures.npz"], "pictures.npz exists already"),
    (["run", "--out", "plain"], "other things in it"),
    (["run", "--out", "folder.png"], "folder.png is a folder"),
]


def test_mistakes_are_answered_by_one_line_and_nothing_is_written(command, runs):
    (runs / "foreign.pt").write_bytes(b"nothing")
    torch.save({"a": torch.zeros(2)}, runs / "other.pt")
    torch.save({"out.2.weight": torch.zeros(6, 8, 3, 3)}, runs / "adm.pt")
    changed = torch.load(runs / "run/checkpoint.pt", weights_only=True)
    changed["config"]["model"]["channels"] = 16
    torch.save(changed, runs / "changed.pt")
    for name, part, key in ("class", "model", "class"), ("argument", "model", "depth"), ("schedule", "diffusion", "schedule"):
        torch.save(changed | {"config": changed["config"] | {part: changed["config"][part] | {key: "unknown"}}}, runs / f"{name}.pt")
    save_torchscript(torch.nn.Flatten(), runs / "script.pt")
    (runs / "folder.png").mkdir()
    names, wrong = sorted(path for path in runs.rglob("*")), []
    for flags, cause in MISTAKES:
        done = command("sample.py", *flags, "--device", "cpu", "--steps", *(["2"] if "--steps" not in flags else [flags[flags.index("--steps") + 1]]))
        if not (done.returncode == 2 and done.stderr.startswith("sample.py: ") and done.stderr.count("\n") == 1 and cause in done.stderr):
            wrong.append((flags, done.returncode, done.stderr[-400:]))
        if sorted(path for path in runs.rglob("*")) != names:
            wrong.append((flags, "wrote"))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_model_that_diverged_writes_no_picture(command, runs):
    bad = torch.load(runs / "run/checkpoint.pt", weights_only=True)
    bad["ema"] = {name: value * float("nan") for name, value in bad["ema"].items()}
    torch.save(bad, runs / "bad.pt")
    done = command("sample.py", "bad.pt", "--count", "2", "--steps", "2", "--out", "bad.png")
    assert done.returncode == 2 and "nan" in done.stderr and not (runs / "bad.png").exists()


def test_an_empty_checkpoint_is_refused_in_one_line_by_every_program(command, runs):
    """The exception that it causes says nothing itself."""
    (runs / "empty").mkdir()
    (runs / "empty/checkpoint.pt").write_bytes(b"")
    for words in (["sample.py", "empty"], ["scaling.py", "--run", "empty"], ["weighting.py", "--run", "empty"], ["train.py", "--resume", "--out", "empty"]):
        done = command(*words)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "cannot be read as a checkpoint" in done.stderr, done.stderr
