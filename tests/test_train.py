"""train.py as a user runs it: whole runs, resuming, several processes, mistakes; and its parts by independent derivation."""

import argparse
import copy
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, encrypt, read_picture, run_command

import sample
import train
from unet import UNet
from uvit import UViT, ViT

TINY = ("--size", "8", "--channels", "8", "--channel-mult", "1,2", "--attention", "4", "--heads", "2", "--batch-size", "8",
        "--log-every", "2", "--sample-every", "0", "--save-every", "1000", "--device", "cpu", "--precision", "fp32")


def checkpoint_of(run):
    return torch.load(Path(run) / "checkpoint.pt", weights_only=True)


def assert_equal(a, b):
    """Equal to the last bit, through dicts and lists."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b or a != a


def assert_same_training(run, other):
    """Weights, EMA, optimiser, sums, step and log are equal to the last bit; only the speed may differ."""
    a, b = checkpoint_of(run), checkpoint_of(other)
    for key in ("model", "ema", "optimizer", "scaler", "window", "weights", "step"):
        assert_equal(a[key], b[key])
    logs = [[line.split(",") for line in (Path(r) / "log.csv").read_text().splitlines()] for r in (run, other)]
    speed = train.COLUMNS.index("images_per_s")
    assert [row[:speed] + row[speed + 1:] for row in logs[0]] == [row[:speed] + row[speed + 1:] for row in logs[1]]


def launch(tmp_path, *arguments, processes=1, **env):
    """Start a run in a real process of its own, under torchrun when there are several.   -> Popen"""
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.Popen([*(starter if processes > 1 else [sys.executable]), str(ROOT / "train.py"), *map(str, arguments)],
                            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **env})


def wait_for(run, text):
    """Read what a launched run prints until a line holds the text."""
    for line in run.stdout:
        if text in line:
            return
    raise AssertionError(f"the run ended without saying {text!r}")


# ---------------------------------------------------------------------------------------------------------------------
# A whole run

def test_a_run_leaves_what_the_readme_promises(command, pictures, tmp_path):
    done = command("train.py", "--data", pictures, *TINY, "--steps", "6", "--sample-every", "3", "--out", "runs/a")
    assert done.returncode == 0 and done.stderr == ""
    assert "24 images" in done.stdout and "done in" in done.stdout and "runs/a/samples/step_0000006.png" in done.stdout
    run = tmp_path / "runs/a"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint.pt", "config.json", "curves.png", "log.csv", "samples"]
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["step_0000003.png", "step_0000006.png"]
    for picture in [*run.glob("samples/*.png"), run / "curves.png"]:
        read_picture(picture)
    log = train.read_log(run / "log.csv")
    assert log["step"] == [2, 4, 6] and log["images"] == [16, 32, 48]
    config = json.loads((run / "config.json").read_text())
    assert config["flags"]["weighting"] == "min-snr" and config["data"]["classes"] == ["0", "1", "2"]
    checkpoint = checkpoint_of(run)
    assert {"model", "ema", "optimizer", "step", "config"} <= checkpoint.keys() and checkpoint["step"] == 6
    assert not any(name.startswith(("module.", "_orig_mod.")) for key in ("model", "ema") for name in checkpoint[key])


@pytest.mark.parametrize("backbone", [
    ["--backbone", "unet"], ["--backbone", "uvit", "--patch", "2", "--width", "16", "--depth", "4", "--skip-scaling", "cs"],
    ["--backbone", "vit", "--patch", "2", "--width", "16", "--depth", "2"]])
@pytest.mark.parametrize("prediction", ["x0", "eps", "v"])
def test_every_backbone_and_prediction_trains_samples_and_loads(command, pictures, tmp_path, backbone, prediction):
    tiny = [*TINY[:2], *TINY[8:]]
    flags = ["--prediction", prediction, "--heads", "2", *backbone, *(["--channels", "8", "--channel-mult", "1,2"] if "unet" in backbone else [])]
    done = command("train.py", "--data", pictures, *tiny, *flags, "--steps", "2", "--out", "run")
    assert done.returncode == 0, done.stderr
    model, diffusion, config = sample.load_model(tmp_path / "run")
    assert isinstance(model, {"unet": UNet, "uvit": UViT, "vit": ViT}[backbone[1]]) and not model.training
    assert diffusion.prediction == prediction and config["data"]["shape"] == (3, 8, 8)
    done = command("sample.py", "run", "--count", "3", "--steps", "2", "--out", "three.npz")
    assert done.returncode == 0 and np.load(tmp_path / "three.npz")["arr_0"].shape == (3, 8, 8, 3)


def test_a_run_overfits_eight_images(command, tmp_path):
    """What it draws afterwards are the eight images, up to a little noise, and nothing between them."""
    rng = np.random.default_rng(1)
    images = np.repeat(np.repeat(rng.integers(0, 2, (8, 4, 4, 3), dtype=np.uint8) * 255, 2, 1), 2, 2)
    np.save(tmp_path / "eight.npy", images)
    done = command("train.py", "--data", "eight.npy", *TINY, "--channels", "32", "--steps", "400", "--no-flip", "--log-every", "100",
                   "--out", "run", "--weighting", "constant")
    assert done.returncode == 0, done.stderr
    last = {name: values[-1] for name, values in train.read_log(tmp_path / "run/log.csv").items()}
    assert last["error_0"] < 0.05 and last["error_1"] < 0.06        # of about 1, the error of the best constant answer
    assert command("sample.py", "run", "--count", "16", "--steps", "12", "--out", "drawn.npz").returncode == 0
    drawn = np.load(tmp_path / "drawn.npz")["arr_0"] / 127.5
    distance = np.sqrt(((drawn[:, None] - images[None] / 127.5) ** 2).mean((2, 3, 4)))          # (16, 8)
    assert (distance.min(1) < 0.1).sum() >= 15 and len(set(distance.argmin(1))) >= 4


def test_loss_falls_on_the_built_in_digits(command, tmp_path):
    done = command("train.py", *TINY[2:], "--size", "16", "--attention", "8", "--steps", "40", "--log-every", "10", "--out", "run", "--warmup", "1")
    assert done.returncode == 0, done.stderr
    loss = train.read_log(tmp_path / "run/log.csv")["loss"]
    assert loss[-1] < 0.7 * loss[0]


def test_unconditional_and_gray_and_rectangular(command, pictures, tmp_path):
    done = command("train.py", "--data", pictures, *TINY, "--size", "8x16", "--gray", "--unconditional", "--steps", "2", "--out", "run")
    assert done.returncode == 0, done.stderr
    model, _, config = sample.load_model(tmp_path / "run")
    assert model.num_classes is None and config["data"]["shape"] == (1, 8, 16)


def test_latents_train_and_sample_to_npz(command, tmp_path):
    np.save(tmp_path / "latents.npy", np.random.default_rng(0).standard_normal((16, 4, 8, 8)).astype(np.float32))
    done = command("train.py", "--data", "latents.npy", *TINY, "--steps", "2", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert command("sample.py", "run", "--count", "3", "--steps", "2", "--out", "out.npz").returncode == 0
    latents = np.load(tmp_path / "out.npz")["arr_0"]
    assert latents.shape == (3, 4, 8, 8) and latents.dtype == np.float32
    done = command("sample.py", "run", "--count", "3", "--steps", "2", "--out", "out.png")
    assert done.returncode == 2 and "--decoder" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# The parts

def tiny_run(**changes):
    """A run as build() makes it, from the flags, on 24 random images."""
    flags = {"size": (8, 8), "channels": 8, "channel_mult": (1, 2), "attention": (4,), "heads": 2, "batch_size": 8, "device": "cpu",
             "precision": "fp32", "flip": False, "out": "run", **changes}
    args = train.preset_args("digits", flags)
    train.check_args(args, {})
    images = np.random.default_rng(0).integers(0, 255, (24, 8, 8, 3), dtype=np.uint8)
    data, load = train.Data(images, np.arange(24) % 3, ["a", "b", "c"]), train.load_data
    train.load_data = lambda args, say: data
    try:
        return train.build(args, print)
    finally:
        train.load_data = load


def batches_of(run, step, micro):
    places = range(run.args.batch_size)
    return [train.to_device(train.make_batch(run.data, run.args, 1000, step, places[i:i + micro]), run.device) for i in range(0, len(places), micro)]


@pytest.mark.parametrize("weighting", ["min-snr", "constant"])
@pytest.mark.parametrize("prediction", ["x0", "eps", "v"])
def test_micro_batches_give_the_same_step(weighting, prediction):
    results = []
    for micro in (8, 4, 1):
        run = tiny_run(weighting=weighting, prediction=prediction)
        loss, errors, norm = train.train_step(run.model, run, batches_of(run, 0, micro))
        results.append((loss, errors, norm, torch.cat([p.flatten() for p in run.model.parameters()])))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-5)      # Adam's first step divides a gradient by its own size


def test_a_step_is_the_documented_one(randomize):
    """The loss, the clipped gradient and AdamW's step, computed again without train_step."""
    run = tiny_run(clip=0.5, warmup=0, weight_decay=0.1)
    randomize(run.model)
    other = copy.deepcopy(run.model)
    (x0, t, noise, labels), = batches = batches_of(run, 3, 8)
    loss, errors, norm = train.train_step(run.model, run, batches)

    alpha, sigma = (torch.sqrt(a).float()[t].view(-1, 1, 1, 1) for a in (run.diffusion.alphas_cumprod, 1 - run.diffusion.alphas_cumprod))
    error = (other(alpha * x0 + sigma * noise, t, labels) - x0).square().mean((1, 2, 3))
    expected = (run.diffusion.snr.clamp(max=5)[t] * error).mean()
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(errors, error, rtol=1e-5, atol=0)
    expected.backward()
    gradients = torch.cat([p.grad.flatten() for p in other.parameters()])
    torch.testing.assert_close(norm, gradients.norm().float(), rtol=1e-4, atol=0)
    for (name, p), q in zip(run.model.named_parameters(), other.parameters()):
        decay = 0.1 if q.dim() > 1 and name != "label.weight" else 0.0
        g = q.grad * 0.5 / (gradients.norm() + 1e-6)                    # Adam's first step: g / (|g| + eps)
        moved = q * (1 - 2e-3 * decay) - 2e-3 * g / (g.abs() + 1e-8)
        clear = g.abs() > 1e-6                                          # elsewhere rounding decides the sign
        torch.testing.assert_close(p[clear], moved[clear], rtol=1e-4, atol=1e-5)


def test_decay_spares_biases_norms_and_tables():
    for model in (UNet(8, channels=8, channel_mult=(1, 2), attention=(4,), heads=2, num_classes=3, skip_scaling="ls"),
                  UViT(8, patch=2, width=16, depth=4, heads=2, num_classes=3), ViT(8, patch=2, width=16, depth=2, heads=2, num_classes=3)):
        optimizer = train.make_optimizer(model, train.preset_args("digits"), torch.device("cpu"))
        decayed, rest = ([id(p) for p in group["params"]] for group in optimizer.param_groups)
        assert len(decayed) + len(rest) == len(list(model.parameters())) and not set(decayed) & set(rest)
        for name, p in model.named_parameters():
            matrix = p.dim() > 1 and not any(table in name for table in ("label.", "position")) and not (name == "time.weight")
            assert (id(p) in decayed) == matrix, name
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


def test_ema_follows_its_formula():
    model = torch.nn.Linear(2, 2)
    ema, expected = copy.deepcopy(model), model.weight.detach().clone()
    for step in range(50):
        with torch.no_grad():
            model.weight.add_(1.0)
        train.update_ema(ema, model, 0.9, step)
        d = min(0.9, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * model.weight.detach()
    torch.testing.assert_close(ema.weight, expected)


def test_learning_rate_rises_then_stays():
    args = train.preset_args("digits", {"lr": 1.0, "warmup": 4})
    assert [train.learning_rate(args, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert train.learning_rate(train.preset_args("digits", {"lr": 1.0, "warmup": 0}), 0) == 1.0


def test_a_batch_depends_on_seed_step_and_place_alone():
    run = tiny_run(label_dropout=0.5)
    whole = train.make_batch(run.data, run.args, 1000, 5, range(8))
    part = train.make_batch(run.data, run.args, 1000, 5, range(3, 6))
    for a, b in zip(whole, part):
        assert torch.equal(a[3:6], b)
    other_step, other_seed = train.make_batch(run.data, run.args, 1000, 6, range(8)), None
    run.args.seed = 1
    other_seed = train.make_batch(run.data, run.args, 1000, 5, range(8))
    for other in (other_step, other_seed):
        assert not torch.equal(whole[2], other[2]) and not torch.equal(whole[1], other[1])


def test_every_epoch_shows_every_image_once():
    run = tiny_run(batch_size=7)                                        # does not divide 24
    pixels = torch.from_numpy(run.data.images).flatten(1).tolist()
    seen = [pixels.index(image) for step in range(24) for image in train.make_batch(run.data, run.args, 1000, step, range(7))[0].flatten(1).tolist()]
    for epoch in range(7):
        assert sorted(seen[24 * epoch:24 * (epoch + 1)]) == list(range(24))
    assert seen[:24] != seen[24:48]


def test_timesteps_noise_flips_and_label_drops_have_their_distributions():
    run = tiny_run(label_dropout=0.2, flip=True)
    t, noise, labels, mirrored = [], [], [], 0
    for step in range(250):
        images, t_, noise_, labels_ = train.make_batch(run.data, run.args, 1000, step, range(8))
        t, noise, labels = t + t_.tolist(), noise + [noise_], labels + labels_.tolist()
        originals = {image.tobytes() for image in run.data.images}
        mirrored += sum(image.numpy().tobytes() not in originals for image in images)
    noise = torch.cat(noise)
    assert 0 <= min(t) < 10 and 990 < max(t) < 1000 and abs(np.mean(t) - 499.5) < 20
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    assert 0.17 < np.mean(np.equal(labels, 3)) < 0.23 and set(labels) == {0, 1, 2, 3}
    assert 0.45 < mirrored / 2000 < 0.55


def test_the_log_means_what_it_says(command, pictures, tmp_path):
    """Rows of a run with a row a step, averaged by hand, are the rows of the same run with a row every three."""
    for every in (1, 3):
        assert command("train.py", "--data", pictures, *TINY, "--steps", "6", "--log-every", every, "--out", f"run{every}").returncode == 0
    fine, coarse = (train.read_log(tmp_path / f"run{every}/log.csv") for every in (1, 3))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(np.reshape(fine[name], (2, 3)).mean(1), coarse[name], rtol=1e-4)
    assert coarse["step"] == [3, 6] and fine["lr"][2] == coarse["lr"][0]


def test_logged_errors_are_errors_of_x0():
    """An eps model's squared error is divided by the SNR, and lands in the bin of its t."""
    window = torch.zeros(train.WINDOW_SIZE)
    t = torch.tensor([0, 249, 250, 999])
    train.add_to_window(window, torch.tensor(2.0), torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.tensor(0.5), t * train.BINS // 1000)
    assert window[train.ERRORS].tolist() == [4, 5, 0, 7] and window[train.COUNTS].tolist() == [2, 1, 0, 1]
    run = tiny_run(prediction="eps")
    torch.testing.assert_close(run.error_scale, run.diffusion.snr.float())


def test_bad_steps_are_left_out_of_the_log_and_counted_across_its_rows():
    """fp16 may skip steps while its scaler looks for a scale, but not for ever, however often a row is written."""
    run, nan, inf = tiny_run(), torch.tensor(math.nan), torch.tensor(math.inf)
    run.scaler = torch.amp.GradScaler("cpu")
    t = torch.tensor([0, 999])

    def add(loss, norm, *errors):
        train.add_to_window(run.window, torch.as_tensor(loss), torch.tensor(errors), torch.as_tensor(norm), t * train.BINS // 1000)

    add(1.0, 2.0, 1.0, 3.0), add(inf, nan, 1.0, math.inf), add(5.0, inf, 1.0, 3.0), add(3.0, 4.0, 1.0, 3.0)
    row = train.take_row(run, 4, 1.0)
    assert (row["loss"], row["grad_norm"], row["skipped"], row["error_0"], row["error_3"]) == (2, 3, 2, 1, 3)
    assert not run.window.any()                                         # the good step has ended the row of bad ones
    for step in range(5, 4 + train.MAY_SKIP):
        add(nan, nan, 1.0, math.nan)
        train.check_finite(run, step)
        if step % 10 == 0:
            assert math.isnan(train.take_row(run, step, 1.0)["loss"])
    add(nan, nan, math.nan, math.nan)
    with pytest.raises(FloatingPointError, match=r"step 5: nan or infinity in the loss at t in \[750, 1000\)\."):
        train.check_finite(run, 4 + train.MAY_SKIP)
    run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.window.zero_()
    add(1.0, nan, 1.0, 1.0)
    with pytest.raises(FloatingPointError, match="step 7: nan or infinity in the gradient, while the loss was finite"):
        train.check_finite(run, 7)


def test_compare_draws_several_runs(command, pictures, tmp_path):
    for name, weighting in ("a", "min-snr"), ("b", "constant"):
        assert command("train.py", "--data", pictures, *TINY, "--steps", "4", "--weighting", weighting, "--out", name).returncode == 0
    done = command("train.py", "--compare", "a", "b", "--out", "both.png")
    assert done.returncode == 0 and read_picture(tmp_path / "both.png").size[0] > 1000


def test_sampling_and_logging_do_not_change_the_training(command, pictures, tmp_path):
    assert command("train.py", "--data", pictures, *TINY, "--steps", "4", "--out", "a").returncode == 0
    assert command("train.py", "--data", pictures, *TINY, "--steps", "4", "--out", "b", "--sample-every", "1", "--save-every", "1").returncode == 0
    assert_same_training(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("flags", [[], ["--weighting", "ugd", "--pareto-bins", "2"], ["--backbone", "uvit", "--width", "16", "--depth", "2"]])
def test_activation_checkpointing_in_bf16(command, pictures, tmp_path, flags):
    """What is computed again must find the attention kernels of the forward pass, which are others in bf16 on a CPU."""
    model = [] if "uvit" in flags else ["--channels", "8", "--channel-mult", "1,2", "--attention", "4"]
    for name, more in ("a", []), ("b", ["--checkpointing"]):
        done = command("train.py", "--data", pictures, "--size", "8", "--heads", "2", "--batch-size", "4", "--sample-every", "0", "--device", "cpu",
                       "--precision", "bf16", "--steps", "2", *model, *flags, *more, "--out", name)
        assert done.returncode == 0, done.stderr
    assert_same_training(tmp_path / "a", tmp_path / "b")


def test_activation_checkpointing_gives_the_same_training(command, pictures, tmp_path):
    for name, flags in ("a", []), ("b", ["--checkpointing"]):
        assert command("train.py", "--data", pictures, *TINY, "--steps", "3", "--out", name, *flags).returncode == 0
    a, b = checkpoint_of(tmp_path / "a"), checkpoint_of(tmp_path / "b")
    for name in a["model"]:
        torch.testing.assert_close(a["model"][name], b["model"][name], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# --probe

def test_the_probes_columns_are_means_over_the_probed_steps(command, pictures, tmp_path):
    """Every step probed and logged, then averaged by hand over the rows of a coarser log; a window without a probe is nan."""
    for name, flags in ("fine", ["--probe", "1", "--log-every", "1"]), ("coarse", ["--probe", "2", "--log-every", "3"]), \
                       ("rare", ["--probe", "4", "--log-every", "2"]), ("none", ["--log-every", "1"]):
        assert command("train.py", "--data", pictures, *TINY, "--steps", "6", *flags, "--out", name).returncode == 0
    fine, coarse, rare, none = (train.read_log(tmp_path / name / "log.csv") for name in ("fine", "coarse", "rare", "none"))
    kinds = "decoder_norm", "decoder_grad", "encoder_grad", "kappa", "kappa_std"
    assert list(fine) == [*train.COLUMNS, *(f"{kind}_{i}" for kind in kinds for i in range(4))] and list(none) == train.COLUMNS
    for name in list(fine)[len(train.COLUMNS):]:
        if "std" not in name:
            np.testing.assert_allclose(coarse[name], [(fine[name][0] + fine[name][2]) / 2, fine[name][4]], rtol=1e-4)
        assert np.isnan(rare[name]).tolist() == [False, True, False] and min(fine[name][1:]) > 0      # at first the output layer is zero
        assert rare[name][::2] == [fine[name][0], fine[name][4]]
    assert fine["loss"] == none["loss"]                             # looking changes nothing
    assert_equal(checkpoint_of(tmp_path / "fine")["model"], checkpoint_of(tmp_path / "none")["model"])
    squares = sum(np.square(fine[f"{side}_grad_{i}"]) for side in ("decoder", "encoder") for i in range(4))
    assert (squares < np.square(fine["grad_norm"])).all()           # both before clipping; the rest is in other layers


def test_probed_norms_are_those_of_the_step(randomize):
    run = tiny_run(probe=1, clip=0.01)
    randomize(run.model)
    other, batches = copy.deepcopy(run.model), batches_of(run, 0, 4)
    with train.probe(run.model) as record:
        train.train_step(run.model, run, batches, record)
    train.add_probe(run.window, record)
    row = train.probe_row(run.window, learned=True)
    kappas, outputs = [], []
    other.decoder[-1].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    other.skip_scaling.networks[0].register_forward_hook(lambda module, inputs, output: kappas.append(output.detach()))
    (run.weights[(t := torch.cat([batch[1] for batch in batches]))] * run.diffusion.error(
        other, *(torch.cat([batch[k] for batch in batches]) for k in range(4)))).mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in other.decoder[-1].parameters()]).norm().item()
    assert row["decoder_norm_0"] == pytest.approx(outputs[0].detach().flatten(1).norm(dim=1).mean().item(), rel=1e-5)
    assert row["decoder_grad_0"] == pytest.approx(gradient, rel=1e-4)       # not clipped
    assert row["kappa_0"] == pytest.approx(kappas[0].mean().item(), rel=1e-5)
    assert row["kappa_std_0"] == pytest.approx(kappas[0].std(correction=0).item(), rel=1e-3)
    assert len(t) == 8 and run.columns[len(train.COLUMNS):] == list(row)


def test_a_probed_step_that_is_not_finite_is_left_out():
    window, record = torch.zeros(train.WINDOW_SIZE + 6), {name: torch.tensor([2.0]) for name in train.PROBED}
    train.add_probe(window, record)
    train.add_probe(window, record | {"encoder_grad": torch.tensor([math.inf])})
    assert window[train.WINDOW_SIZE:].tolist() == [1, 2, 2, 2, 2, 2]


def test_a_probed_run_resumes_exactly_and_is_drawn(command, pictures, tmp_path):
    """Stopped between two rows and two probes; and with micro-batches, which change nothing but the last digits."""
    flags = ("--data", pictures, *TINY, "--probe", "3", "--log-every", "5", "--sample-every", "0")
    assert command("train.py", *flags, "--steps", "10", "--out", "a").returncode == 0
    for steps in (2, 4, 8, 10):
        assert command("train.py", *flags, "--steps", steps, "--out", "b", *(["--resume"] if steps > 2 else [])).returncode == 0
    assert_same_training(tmp_path / "a", tmp_path / "b")
    for out, more in ("c", ["--micro-batch", "2"]), ("d", ["--checkpointing"]), ("plain", ["--probe", "0", "--skip-scaling", "cs"]):
        assert command("train.py", *flags, *more, "--steps", "5", "--out", out).returncode == 0
    whole, *others = (train.read_log(tmp_path / run / "log.csv") for run in "acd")
    for other in others:
        for name in set(whole) - {"images_per_s"}:
            np.testing.assert_allclose(other[name][:1], whole[name][:1], rtol=2e-3)
    done = command("train.py", "--out", "a", "--resume", "--steps", "12", "--probe", "4")
    assert done.returncode == 2 and "has --probe 3" in done.stderr
    assert command("train.py", "--compare", "a", "plain", "c", "--out", "all.png").returncode == 0
    train.draw_curves({"a": tmp_path / "a"}, tmp_path / "one.png")
    assert read_picture(tmp_path / "one.png").size == (1380, 600) and read_picture(tmp_path / "all.png").size == (1380, 900)


def test_curves_show_at_most_six_blocks_the_outermost_and_the_innermost_among_them():
    names = [f"{kind}_{i}" for kind in ("decoder_norm", "decoder_grad", "kappa") for i in range(12)]
    log = {"images": [1, 2], **{name: [float(name.split("_")[-1])] * 2 for name in names}}
    panels = train.probe_lines({"run": log})
    assert len(panels) == 2 and all(list(lines) == ["0 = outermost", "2", "4", "7", "9", "11"] for lines in panels.values())
    assert "mean kappa of long skips" in train.probe_lines({"run": log | {"kappa_std_0": [0.1] * 2}})
    compared = train.probe_lines({"run": log, "plain": {"images": [1, 2]}})
    assert [[(run, y[0]) for run, (x, y) in lines.items()] for lines in compared.values()] == [[("run", 0.0)], [("run", 11.0)]]
    assert not any(train.probe_lines({"plain": {"images": [1, 2]}}).values())


def test_a_torn_log_of_a_probed_run_is_refused(tmp_path):
    header = ",".join([*train.COLUMNS, "decoder_norm_0"])
    (tmp_path / "log.csv").write_text(f"{header}\n{','.join('1' * len(train.COLUMNS))},2\n")
    assert train.read_log(tmp_path / "log.csv")["decoder_norm_0"] == [2]
    (tmp_path / "log.csv").write_text(f"{header}\n{','.join('1' * len(train.COLUMNS))}\n")
    with pytest.raises(ValueError, match="torn"):
        train.read_log(tmp_path / "log.csv")


# ---------------------------------------------------------------------------------------------------------------------
# Resuming

def test_resumed_run_is_the_uninterrupted_one(command, pictures, tmp_path):
    """In one go, or stopped and resumed twice: at a step between two rows of the log, and with dropout."""
    flags = ("--data", pictures, *TINY, "--dropout", "0.2", "--log-every", "4")
    assert command("train.py", *flags, "--steps", "15", "--out", "a").returncode == 0
    assert command("train.py", *flags, "--steps", "5", "--out", "b").returncode == 0
    assert command("train.py", "--out", "b", "--resume", "--steps", "10").returncode == 0
    assert command("train.py", *flags, "--out", "b", "--resume", "--steps", "15").returncode == 0
    assert_same_training(tmp_path / "a", tmp_path / "b")
    done = command("train.py", "--out", "b", "--resume")
    assert done.returncode == 0 and "done" in done.stdout          # nothing left to do
    assert_same_training(tmp_path / "a", tmp_path / "b")


def test_resumed_pareto_run_is_the_uninterrupted_one(command, pictures, tmp_path):
    flags = ("--data", pictures, *TINY, "--weighting", "frank-wolfe", "--pareto-every", "3", "--pareto-bins", "4")
    assert command("train.py", *flags, "--steps", "9", "--out", "a").returncode == 0
    for steps in (2, 3, 7, 9):                                      # before, at and after a solution
        assert command("train.py", *flags, "--steps", steps, "--out", "b", *(["--resume"] if steps > 2 else [])).returncode == 0
    assert_same_training(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a/pareto.csv").read_text() == (tmp_path / "b/pareto.csv").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint(command, tmp_path, pictures, number):
    flags = ("--data", pictures, *TINY, "--steps", "400", "--log-every", "1")
    run = launch(tmp_path, *flags, "--out", "b")
    wait_for(run, "step 5 of")
    run.send_signal(number)
    rest = run.communicate(timeout=60)[0]
    assert run.returncode == 128 + number and "--resume" in rest and "Traceback" not in rest
    stopped = checkpoint_of(tmp_path / "b")["step"]
    assert 5 <= stopped < 400
    for out, more in ("a", ()), ("b", ("--resume",)):
        assert command("train.py", *flags, "--steps", stopped + 3, "--out", out, *more).returncode == 0
    assert_same_training(tmp_path / "a", tmp_path / "b")


def test_twenty_kills_leave_a_run_that_resumes_to_the_same_end(command, pictures, tmp_path):
    """SIGKILL at random moments, while a checkpoint is written at every step."""
    flags = ("--data", pictures, *TINY, "--steps", "80", "--save-every", "1", "--log-every", "3")
    assert command("train.py", *flags, "--out", "a").returncode == 0
    assert command("train.py", *flags, "--out", "b", "--steps", "1").returncode == 0
    rng = np.random.default_rng(0)
    codes = [command("train.py", "--out", "b", "--resume", "--steps", "100000", kill_after=rng.uniform(0.05, 0.25)).returncode for _ in range(20)]
    reached = checkpoint_of(tmp_path / "b")["step"]
    assert codes.count(-signal.SIGKILL) == 20
    (tmp_path / "b/checkpoint.pt.tmp").write_bytes(b"torn")         # what a kill may leave, too
    assert command("train.py", "--out", "b", "--resume", "--steps", max(80, reached)).returncode == 0
    if reached > 80:
        assert command("train.py", "--out", "a", "--resume", "--steps", reached).returncode == 0
    assert_same_training(tmp_path / "a", tmp_path / "b")


def test_a_full_disk_ends_the_run_and_spares_the_last_checkpoint(command, pictures, tmp_path):
    flags = ("--data", pictures, *TINY, "--steps", "4", "--out", "run")
    assert command("train.py", *flags).returncode == 0
    before = (tmp_path / "run/checkpoint.pt").read_bytes()
    done = command("train.py", "--out", "run", "--resume", "--steps", "8", largest_file=20_000)
    assert done.returncode == 2 and "checkpoint.pt could not be written" in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "run/checkpoint.pt").read_bytes() == before and not (tmp_path / "run/checkpoint.pt.tmp").exists()


def test_a_change_of_the_data_is_noticed_but_not_its_place(command, pictures, tmp_path):
    assert command("train.py", "--data", "pictures.npz", *TINY, "--steps", "2", "--out", "run").returncode == 0
    (tmp_path / "elsewhere").mkdir()
    assert command("train.py", "--out", "run", "--resume", "--steps", "3").returncode == 0
    pictures.rename(tmp_path / "elsewhere/moved.npz")
    assert command("train.py", "--out", "run", "--resume", "--steps", "4").returncode == 2
    assert command("train.py", "--out", "run", "--resume", "--steps", "4", "--data", "elsewhere/moved.npz").returncode == 0
    assert checkpoint_of(tmp_path / "run")["config"]["flags"]["data"] == str(tmp_path / "elsewhere/moved.npz")
    content = dict(np.load(tmp_path / "elsewhere/moved.npz"))
    one_other = content["arr_0"].copy()
    one_other[5] = 255 - one_other[5]
    for images, labels in (one_other, content["arr_1"]), (content["arr_0"], content["arr_1"][::-1]), (content["arr_0"][:8], content["arr_1"][:8]):
        np.savez(pictures, arr_0=images, arr_1=labels)
        done = command("train.py", "--out", "run", "--resume", "--steps", "5", "--data", "pictures.npz")
        assert done.returncode == 2 and "the data of run has changed" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_run_is_resumed_from_another_folder(command_server, pictures, tmp_path):
    assert run_command(command_server, tmp_path, "train.py", "--data", "pictures.npz", *TINY, "--steps", "2", "--out", "run").returncode == 0
    (tmp_path / "elsewhere").mkdir()
    for file, *flags in ("train.py", "--resume", "--steps", "3", "--out", "../run"), ("scaling.py", "--run", "../run", "--bins", "1"):
        done = run_command(command_server, tmp_path / "elsewhere", file, *flags)
        assert done.returncode == 0, done.stderr


def test_a_run_folder_in_use_is_refused(command, pictures, tmp_path):
    running = launch(tmp_path, "--data", pictures, *TINY, "--steps", "100000", "--log-every", "1", "--out", "run")
    wait_for(running, "step 2 of")
    done = command("train.py", "--resume", "--out", "run")
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert done.returncode == 2 and "run is in use" in done.stderr and done.stderr.count("\n") == 1
    assert command("train.py", "--resume", "--out", "run", "--steps", checkpoint_of(tmp_path / "run")["step"] + 1).returncode == 0      # free again


def test_a_run_that_ended_while_another_started_is_not_erased(command, pictures, tmp_path):
    """The second one looked before the first one's checkpoint was there, and takes the lock after the first one ended."""
    flags = ["--data", str(pictures), *TINY, "--steps", "2", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]
    second = train.build(train.parse_args(flags), lambda line: None)
    assert command("train.py", *flags).returncode == 0
    before = everything_in(tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run"):
        train.begin(second)
    assert everything_in(tmp_path / "run") == before


def test_damaged_checkpoints_are_answered_by_one_line(command, pictures, tmp_path):
    assert command("train.py", "--data", pictures, *TINY, "--steps", "2", "--out", "run").returncode == 0
    good = checkpoint_of(tmp_path / "run")
    name = next(iter(good["model"]))
    damages = [{"step": "2"}, {"config": {}}, {"model": {name: good["model"][name]}}, {"model": good["model"] | {name: torch.zeros(7)}},
               {"optimizer": {}}, {"window": torch.zeros(3)}, {"weights": None}]
    for damage in damages:
        torch.save(good | damage, tmp_path / "run/checkpoint.pt")
        done = command("train.py", "--resume", "--out", "run", "--steps", "3")
        assert done.returncode == 2 and "damaged" in done.stderr and done.stderr.count("\n") == 1, (damage.keys(), done.stderr)
    torch.save(good, tmp_path / "run/checkpoint.pt")
    whole = (tmp_path / "run/checkpoint.pt").read_bytes()
    weights = good["ema"][name].numpy().tobytes()
    torn = bytearray(whole)
    torn[whole.rindex(weights) + len(weights) // 2] ^= 4                        # one bit of one weight
    (tmp_path / "run/checkpoint.pt").write_bytes(torn)
    for words in ("train.py", "--resume", "--out", "run", "--steps", "3"), ("sample.py", "run"):
        done = command(*words)
        assert done.returncode == 2 and "damaged: the checksum of" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_loss_that_is_not_finite_stops_the_run(command, tmp_path):
    """One bad latent among many: the step and the bin of t are named, and the checkpoint before is still there."""
    latents = np.random.default_rng(0).standard_normal((64, 4, 8, 8)).astype(np.float32)
    latents[7] = 1e30                                               # its square overflows
    np.save(tmp_path / "latents.npy", latents)
    done = command("train.py", "--data", "latents.npy", *TINY, "--steps", "30", "--save-every", "1", "--out", "run")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    step = int(re.search(r"step (\d+): nan or infinity in the loss at t in \[", done.stderr)[1])
    checkpoint = checkpoint_of(tmp_path / "run")
    assert checkpoint["step"] == step - 1 and all(value.isfinite().all() for value in checkpoint["model"].values())


# ---------------------------------------------------------------------------------------------------------------------
# Several processes

def test_two_processes_train_as_one(command, pictures, tmp_path):
    """Gradients of the first step, losses and weights of twenty; resumed once on two processes and once on one."""
    flags = ("--data", pictures, *TINY, "--log-every", "1", "--label-dropout", "0.3", "--probe", "1")
    for steps in (1, 20):
        run = launch(tmp_path, *flags, "--steps", steps, "--out", "two", *(["--resume"] if steps > 1 else []), processes=2)
        assert command("train.py", *flags, "--steps", steps, "--out", f"one{steps}").returncode == 0            # meanwhile
        printed = run.communicate(timeout=100)[0]
        assert run.returncode == 0, printed
        assert printed.count("done in") == 1                        # only the first process speaks
        one, two = checkpoint_of(tmp_path / f"one{steps}"), checkpoint_of(tmp_path / "two")
        if steps == 1:
            for a, b in zip(*(c["optimizer"]["state"].values() for c in (one, two))):       # a tenth of the gradient
                assert (a["exp_avg"] - b["exp_avg"]).norm() <= 1e-5 * a["exp_avg"].norm() + 1e-9
            gradients = [torch.cat([state["exp_avg"].flatten() for state in c["optimizer"]["state"].values()]) for c in (one, two)]
            assert (gradients[0] - gradients[1]).norm() <= 1e-6 * gradients[0].norm()
    logs = [train.read_log(tmp_path / f"{run}/log.csv") for run in ("one20", "two")]
    np.testing.assert_allclose(logs[0]["loss"], logs[1]["loss"], rtol=1e-4)
    for name in list(logs[0])[len(train.COLUMNS):]:                 # what the probes saw: first to the last digits, then as losses do
        np.testing.assert_allclose(logs[0][name][0], logs[1][name][0], rtol=2e-4)
        np.testing.assert_allclose(logs[0][name], logs[1][name], rtol=0.02)
    weights = [torch.cat([value.flatten() for value in c["model"].values()]) for c in (one, two)]
    assert (weights[0] - weights[1]).norm() <= 1e-4 * weights[0].norm()
    assert command("train.py", "--out", "two", "--resume", "--steps", "22").returncode == 0
    assert checkpoint_of(tmp_path / "two")["step"] == 22


def children_of(pid):
    """Process numbers whose parent is pid."""
    stats = [Path(f"/proc/{name}/stat") for name in os.listdir("/proc") if name.isdecimal()]
    parents = {int(stat.parent.name): int(stat.read_text().rsplit(")", 1)[1].split()[1]) for stat in stats if stat.exists()}
    return [child for child, parent in parents.items() if parent == pid]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_process_that_dies_takes_the_others_with_it(pictures, tmp_path):
    run = launch(tmp_path, "--data", pictures, *TINY, "--log-every", "1", "--steps", "100000", "--out", "run", processes=2)
    wait_for(run, "step 3 of")
    os.kill(children_of(run.pid)[-1], signal.SIGKILL)
    run.communicate(timeout=60)
    assert run.returncode != 0 and not children_of(run.pid)


def test_ctrl_c_stops_two_processes_after_the_same_step(pictures, tmp_path):
    run = launch(tmp_path, "--data", pictures, *TINY, "--log-every", "1", "--steps", "100000", "--out", "run", processes=2)
    wait_for(run, "step 3 of")
    run.send_signal(signal.SIGINT)
    printed = run.communicate(timeout=60)[0]
    assert "--resume" in printed
    assert checkpoint_of(tmp_path / "run")["step"] >= 3


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes: one line that names the cause, exit status 2, nothing written

MISTAKES = [
    # flags
    (["--no-such-flag"], "--no-such-flag"),
    (["--steps", "many"], "--steps must be"),
    (["--steps", "1.5"], "--steps must be"),
    (["--steps", "0"], "--steps must be a whole number in [1, 1e12]"),
    (["--batch-size", "0"], "--batch-size must be a whole number in [1, 1e6]"),
    (["--batch-size", "8", "--micro-batch", "3"], "--micro-batch"),
    (["--micro-batch", "0"], "--micro-batch must be a whole number in [1,"),
    (["--lr", "0"], "--lr must be a number in (0, inf)"),
    (["--lr", "nan"], "--lr must be a number in (0, inf)"),
    (["--lr", "fast"], "--lr"),
    (["--warmup", "-1"], "--warmup must be a whole number in [0,"),
    (["--weight-decay", "-0.1"], "--weight-decay must be a number in [0, inf)"),
    (["--betas", "0.9"], "--betas"),
    (["--betas", "0.9,1.0"], "--betas must be a number in [0, 1), not 1.0"),
    (["--fid-every", "1", "--fid-count", "1"], "--fid-count must be"),
    (["--fid-count", "50"], "--fid-count has no effect with a run without --fid-every"),
    (["--heads", "2", "--head-channels", "8"], "--heads has no effect with --head-channels 8"),
    (["--compare", "trained", "--steps", "5"], "--steps has no effect with --compare"),
    (["--features", "f.pt"], "--features has no effect with a run without --fid-every"),
    (["--weighting", "constant", "--gamma", "3"], "--gamma has no effect with --weighting constant"),
    (["--skip-scaling", "ls", "--kappa", "0.5"], "--kappa has no effect with --skip-scaling ls"),
    (["--unconditional", "--label-dropout", "0.2"], "--label-dropout has no effect with --unconditional"),
    (["--data-dir", "elsewhere"], "--data-dir has no effect with --data digits"),
    (["--schedul", "vp"], "--schedul"),
    (["--pareto-every", "5"], "--pareto-every has no effect with --weighting min-snr"),
    (["--attention-order", "legacy"], "--attention-order has no effect"),
    (["--attention", "5"], "--attention must be from 32, 16, 8"),
    (["--ema", "1"], "--ema must be a number in [0, 1)"),
    (["--clip", "0"], "--clip must be a number in (0, inf]"),
    (["--dropout", "1"], "--dropout must be a number in [0, 1)"),
    (["--label-dropout", "-0.1"], "--label-dropout must be a number in [0, 1)"),
    (["--gamma", "0"], "--gamma must be a number in (0, inf)"),
    (["--gamma", "-5"], "--gamma must be a number in (0, inf)"),
    (["--weighting", "min_snr"], "--weighting"),
    (["--schedule", "nothing"], "--schedule"),
    (["--prediction", "x1"], "--prediction"),
    (["--prediction", "eps", "--zero-terminal-snr"], "zero terminal SNR"),
    (["--skip-scaling", "nothing"], "--skip-scaling"),
    (["--kappa", "0"], "--kappa must be a number in (0, 1]"),
    (["--kappa", "1.5"], "--kappa must be a number in (0, 1]"),
    (["--preset", "imagenet"], "--preset"),
    (["--preset", "celeba64-unet"], "--data must be"),
    (["--seed", "-1"], "--seed must be a whole number in [0, 1e18], not -1"),
    (["--seed", "1e30"], "--seed must be"),
    (["--steps", "1e30"], "--steps must be"),
    (["--batch-size", "1e20"], "--batch-size must be"),
    (["--flip", "False"], "False"),
    (["--log-every", "0"], "--log-every must be"),
    (["--sample-every", "-1"], "--sample-every must be"),
    (["--probe", "-1"], "--probe must be"),
    (["--probe", "often"], "--probe"),
    (["--probe", "20", "--compile"], "--compile"),
    (["--pareto-bins", "0"], "--pareto-bins must be"),
    (["--weighting", "ugd", "--pareto-bins", "1e9"], "--pareto-bins must be"),
    # the model
    (["--size", "big"], "--size"),
    (["--size", "0"], "--size"),
    (["--size", "30"], "divisible by 4"),
    (["--backbone", "uvit", "--patch", "5"], "patch 5 must divide"),
    (["--backbone", "uvit", "--width", "30", "--heads", "4"], "width 30"),
    (["--backbone", "uvit", "--channels", "32"], "--channels is not a flag of --backbone uvit"),
    (["--backbone", "unet", "--patch", "2"], "--patch is not a flag of --backbone unet"),
    (["--backbone", "vit", "--skip-scaling", "ls"], "no long skips"),
    (["--backbone", "vit", "--probe", "20"], "no long skips"),
    (["--backbone", "uvit", "--depth", "1", "--probe", "20"], "no long skips"),
    (["--heads", "3"], "attention heads"),
    (["--channel-mult", ""], "--channel-mult"),
    (["--channel-mult", "1,-2"], "--channel-mult"),
    # data
    (["--data", "nowhere"], "nowhere"),
    (["--data", "empty"], "empty"),
    (["--data", "notes.txt"], "notes.txt"),
    (["--data", "nan.npy", "--size", "8"], "not finite"),
    (["--data", "damaged"], "broken.png"),
    (["--data", "cifar10", "--data-dir", "elsewhere"], "--data-dir"),
    (["--data", "digits", "--data-dir", "elsewhere"], "--data-dir has no effect with --data digits"),
    (["--data", "plain.npy", "--size", "8", "--label-dropout", "0.5"], "plain.npy, which has no labels"),
    (["--data", "nan.npy", "--skip-damaged"], "--skip-damaged has no effect"),
    (["--data", "encrypted.npz"], "encrypted.npz is not an array to train on"),
    (["--crop", "0"], "--crop must be"),
    # checkpoints and weights
    (["--resume"], "runs/digits does not exist"),
    (["--resume", "--out", "foreign"], "cannot be read as a checkpoint"),
    (["--resume", "--out", "trained", "--seed", "3"], "--seed 0"),
    (["--resume", "--out", "trained", "--weighting", "snr"], "--weighting min-snr"),
    (["--out", "trained"], "already holds a run"),
    (["--out", "damaged"], "other things in it"),
    (["--resume", "--out", "trained", "--steps", "1"], "is at step 2 already"),
    (["--compare", "foreign"], "is not a log of train.py"),
    (["--compare", "trained", "--out", "curves.txt"], "a .png"),
    (["--compare", "trained", "--out", "folder.png"], "folder.png"),
    (["--weights", "nothing.pt"], "nothing.pt does not exist"),
    (["--weights", "notes.txt"], "notes.txt cannot be read"),
    (["--weights", "trained/checkpoint.pt"], "is not a dict of tensors"),
    (["--compare", "nowhere"], "nowhere/log.csv does not exist"),
    # the machine
    (["--device", "cuda"], "--device cuda is not available"),
    (["--precision", "fp16", "--device", "cpu"], "--precision fp16 needs a GPU"),
    (["--out", "notes.txt/run"], "notes.txt"),
    (["--out", "notes.txt"], "--out notes.txt is a file"),
    (["--cache", "notes.txt/cache"], "notes.txt"),
]


@pytest.fixture
def workshop(command, pictures, tmp_path):
    """A folder with a finished run and various things that are wrong."""
    assert command("train.py", "--data", pictures, *TINY, "--steps", "2", "--out", "trained").returncode == 0
    for folder in ("empty", "damaged", "foreign", "folder.png"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notes.txt").write_text("nothing to train on")
    np.save(tmp_path / "nan.npy", np.full((4, 4, 8, 8), np.nan, np.float32))
    encrypt(pictures, tmp_path / "encrypted.npz")
    np.save(tmp_path / "plain.npy", np.zeros((4, 8, 8, 3), np.uint8))
    (tmp_path / "damaged/broken.png").write_bytes(b"not a picture")
    (tmp_path / "foreign/checkpoint.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "foreign/log.csv").write_text("a,b\n1,2\n")
    for name in ("stdout", "stderr"):
        (tmp_path / name).touch()
    return tmp_path


def everything_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
            if path.name not in ("stdout", "stderr")}


def test_mistakes_are_answered_by_one_line_and_nothing_is_written(command, workshop):
    before, wrong = everything_in(workshop), []
    for flags, cause in MISTAKES:
        if flags == ["--device", "cuda"] and torch.cuda.is_available():
            continue
        done = command("train.py", *(("--steps", "1") if "--compare" not in flags else ()), *flags)
        fine = done.returncode == 2 and done.stderr.startswith("train.py: ") and done.stderr.count("\n") == 1 and cause in done.stderr
        if not fine:
            wrong.append((flags, done.returncode, done.stderr[-500:]))
        after = {name: content for name, content in everything_in(workshop).items() if not name.startswith("cache")}
        if after != before:
            wrong.append((flags, "wrote", sorted(after.keys() ^ before.keys())))
            before = after
    assert not wrong, "\n".join(map(str, wrong))


def test_environment_mistakes(command, workshop):
    done = command("train.py", "--steps", "1", WORLD_SIZE="2")
    assert done.returncode == 2 and "torchrun" in done.stderr and done.stderr.count("\n") == 1
    done = command("train.py", "--steps", "1", "--compile", "--device", "cpu", CXX="nowhere/c++")
    assert done.returncode == 2 and "C++ compiler nowhere/c++" in done.stderr and done.stderr.count("\n") == 1
    run = launch(workshop, "--data", "pictures.npz", *TINY, "--batch-size", "5", "--out", "run", processes=2)
    printed = run.communicate(timeout=60)[0]
    assert run.returncode != 0 and printed.count("--batch-size 5 must be a multiple of the number of processes, 2") == 1
    assert not (workshop / "run").exists()
    run = launch(workshop, "--data", "nan.npy", "--size", "8", "--out", "run", processes=2)          # only one process reads the data
    printed = run.communicate(timeout=60)[0]
    assert run.returncode != 0 and printed.count("not finite") == 1 and "train.py\", line" not in printed, printed


def test_no_permission_to_write(command, pictures, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write everywhere")
    done = command("train.py", "--data", pictures, *TINY, "--out", "locked/run")
    assert done.returncode == 2 and "locked" in done.stderr


def test_help_names_every_flag_with_its_default(command):
    done = command("train.py", "--help", COLUMNS="100")
    assert done.returncode == 0 and done.stdout.count("\n") <= 104                      # two screens; Python 3.10 needs 103
    text = done.stdout.replace("[no-]", "")
    for action in train.build_parser()._actions:
        assert action.option_strings[0] in text and action.help


@pytest.mark.parametrize("parser", [train.build_parser(), sample.build_parser()], ids=["train", "sample"])
def test_every_flag_with_a_number_says_which_numbers_it_takes(parser, capsys):
    words = "help", "data", "data_dir", "cache", "weights", "out", "features", "compare", "run", "labels", "decoder", "fid", "preset"
    for action in parser._actions:
        if action.dest in words or action.choices or action.nargs == 0:
            continue
        for text in "nan", "x":
            with pytest.raises(SystemExit) as end:
                parser.parse_args([f"{action.option_strings[0]}={text}"] if action.nargs is None else [action.option_strings[0], text, text])
            said = capsys.readouterr().err
            assert end.value.code == 2 and said.startswith(f"{parser.prog}: {action.option_strings[0]} must be ") and said.endswith(f"not {text}\n"), said


def test_numbers_of_flags():
    share, count, above = sample.number("[0, 1)"), sample.number("[1, 1e18]", int), sample.number("(0, inf]")
    assert share("0") == 0.0 and type(share("0")) is float and share("0.999") == 0.999 and above("inf") == float("inf")
    assert count("1e5") == 100000 and type(count("1e5")) is int and count("9007199254740993") == 2**53 + 1              # no float on the way
    for kind, text in [(share, "1"), (share, "-1e-9"), (share, "nan"), (share, ""), (count, "0"), (count, "1.5"), (count, "1e19"), (count, "inf"),
                       (above, "0"), (sample.number("(0, inf)"), "inf")]:
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            kind(text)


# ---------------------------------------------------------------------------------------------------------------------
# Precision and devices

def test_bf16_is_exact_to_resume(command, pictures, tmp_path):
    flags = ("--data", pictures, *TINY, "--precision", "bf16")
    assert command("train.py", *flags, "--steps", "3", "--out", "a").returncode == 0
    assert command("train.py", *flags, "--steps", "1", "--out", "b").returncode == 0
    assert command("train.py", "--out", "b", "--resume", "--steps", "3").returncode == 0
    assert_same_training(tmp_path / "a", tmp_path / "b")
    checkpoint = checkpoint_of(tmp_path / "a")
    assert all(value.dtype == torch.float32 for key in ("model", "ema") for value in checkpoint[key].values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gpu_trains_and_resumes(command, pictures, tmp_path, precision):
    flags = ("--data", pictures, *TINY, "--device", "cuda", "--precision", precision)
    assert subprocess.run([sys.executable, str(ROOT / "train.py"), *map(str, flags), "--steps", "4", "--out", "a"], cwd=tmp_path).returncode == 0
    for steps, more in (2, []), (4, ["--resume"]):
        assert subprocess.run([sys.executable, str(ROOT / "train.py"), *map(str, flags), "--steps", str(steps), "--out", "b", *more],
                              cwd=tmp_path).returncode == 0
    assert_same_training(tmp_path / "a", tmp_path / "b")


# ---------------------------------------------------------------------------------------------------------------------
# Presets, with their published numbers of parameters

PARAMETERS = {      # millions
    "cifar10-unet": 35.7,           # Ho et al. 2020, Appendix B
    "cifar10-uvit-s": 44,           # Bao et al. 2023, Table 1
    "celeba64-uvit-s": 44,          # the same
    "celeba64-unet": 78.7,          # Song et al. 2021 (DDIM), released model
    "imagenet64-unet": 296,         # Dhariwal & Nichol 2021, Table 11
    "imagenet64-uvit-m": 131,       # Bao et al. 2023, Table 1
    "imagenet64-uvit-l": 287,
    "imagenet256-uvit-l": 287,
    "imagenet256-uvit-h": 501,
}


def preset_model(name):
    args = train.preset_args(name)
    train.check_args(train.preset_args(name, {"data": "x"}), {})
    channels = 4 if name.startswith("imagenet256") else 3
    classes = 10 if args.data in ("digits", "cifar10") else 1000
    config = train.model_config(args, (channels, *args.size), None if args.unconditional else classes)
    with torch.device("meta"):
        return sample.build_model(config)


@pytest.mark.parametrize("name", train.PRESETS)
def test_presets_build_with_their_published_size(name):
    model = preset_model(name)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(name, millions)
    if name in PARAMETERS:
        assert millions == pytest.approx(PARAMETERS[name], rel=0.01)
