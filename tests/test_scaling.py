"""The coefficients of every mode by hand, and what a learned scale may and may not depend on."""

import math

import numpy as np
import pytest
import torch
from conftest import normal, read_picture

from scaling import (CONSTANTS, LEARNED, MODES, SETTINGS, PaperNet, SkipScaling, correlation, gradient_norms, mean_norm, oscillation, probe,
                     response, theory)
from unet import UNet
from uvit import UViT

LS = "ls", "ls-separate"
FEATURE_MAP, TOKENS = (2, 32, 3, 5), (2, 32, 7)                                 # (B, C, H, W) and (B, L, D)


@pytest.mark.parametrize("mode, kappa, by_hand", [
    ("none", 0.7, [1, 1, 1, 1, 1]),
    ("sqrt2", 0.7, [0.5**0.5] * 5),
    ("cs", 0.7, [1, 0.7, 0.49, 0.343, 0.2401]),                                 # the outermost skip is untouched
    ("cs", 0.5, [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]),
    ("cs", 1.0, [1, 1, 1, 1, 1]),
])
def test_constant_coefficients(mode, kappa, by_hand):
    scaling = SkipScaling(mode, [32] * 5, kappa)
    for i, coefficient in enumerate(by_hand):
        for shape in FEATURE_MAP, TOKENS:
            skip = normal(*shape)
            torch.testing.assert_close(scaling(i, skip), coefficient * skip, rtol=1e-14, atol=0)
        assert scaling.coefficient(i, skip) == pytest.approx(coefficient, rel=1e-14)


def test_kappa_is_0_7_unless_told_otherwise():
    assert SkipScaling("cs", [4, 4]).coefficient(1, None) == 0.7


@pytest.mark.parametrize("mode", LS)
@pytest.mark.parametrize("shape", [FEATURE_MAP, TOKENS])
def test_learned_coefficients_by_hand(mode, shape, randomize):
    """sigmoid(W2 relu(W1 a + b1) + b2), a = the mean over everything but sample and channel (or token), in numpy."""
    scaling = randomize(SkipScaling(mode, [32, 32])).double()
    skip = 3 * normal(*shape)
    network = scaling.networks[-1]                                              # of skip 1, shared or not
    w1, b1, w2, b2 = (p.detach().numpy() for layer in (network.fc1, network.fc2) for p in (layer.weight, layer.bias))
    assert w1.shape == (2, 32) and w2.shape == (32, 2)                          # r = 16
    for sample in range(2):
        scaled = scaling(1, skip)[sample].detach().numpy()
        features = skip[sample].numpy()
        a = np.array([features[channel].sum() / features[channel].size for channel in range(32)])
        kappa = 1 / (1 + np.exp(-(w2 @ np.maximum(w1 @ a + b1, 0) + b2)))
        for channel in range(32):
            np.testing.assert_allclose(scaled[channel], kappa[channel] * features[channel], rtol=1e-12)


@pytest.mark.parametrize("mode", LS)
@pytest.mark.parametrize("shape", [FEATURE_MAP, TOKENS])
def test_a_learned_coefficient_belongs_to_one_channel_of_one_sample(mode, shape, randomize):
    scaling = randomize(SkipScaling(mode, [32])).double()
    skip = 3 * normal(*shape)
    kappa = (scaling(0, skip) / skip).flatten(2)                                # (B, n, positions)
    torch.testing.assert_close(kappa, kappa[..., :1].expand_as(kappa), rtol=1e-12, atol=0)
    assert ((kappa > 0) & (kappa < 1)).all()
    assert kappa.std(0).min() > 0 and kappa.std(1).min() > 0                    # differs by sample and by channel
    torch.testing.assert_close(scaling(0, skip[1:]), scaling(0, skip)[1:], rtol=1e-12, atol=0)
    turned = skip.flip(-1)                                                      # the order of positions has no say
    torch.testing.assert_close(scaling(0, turned), scaling(0, skip).flip(-1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", LS)
def test_learned_coefficients_start_near_one_half(mode):
    torch.manual_seed(0)
    kappa = SkipScaling(mode, [256]).coefficient(0, normal(8, 256, 4, 4, dtype=torch.float32))
    assert kappa.shape == (8, 256, 1, 1) and abs(kappa.mean().item() - 0.5) < 0.05 and kappa.std() < 0.15


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("n, reduction, hidden", [(1, 16, 1), (15, 16, 1), (16, 16, 1), (31, 16, 1), (32, 16, 2),
                                                  (65, 16, 4), (257, 16, 16), (64, 4, 16), (3, 1, 3)])
def test_hidden_width_is_n_over_r_but_at_least_one(n, reduction, hidden):
    scaling = SkipScaling("ls", [n], reduction=reduction)
    assert count(scaling) == hidden * n + hidden + n * hidden + n
    assert scaling(0, normal(1, n, 2, 2, dtype=torch.float32)).shape == (1, n, 2, 2)


def test_ls_shares_a_network_among_skips_of_the_same_width_only(randomize):
    widths = [32, 64, 32, 64, 128, 32]
    shared, separate = (randomize(SkipScaling(mode, widths)).double() for mode in LS)
    one = {32: 2 * 2 * 32 + 2 + 32, 64: 2 * 4 * 64 + 4 + 64, 128: 2 * 8 * 128 + 8 + 128}
    assert count(shared) == sum(one.values()) and len(shared.networks) == 3
    assert count(separate) == sum(one[width] for width in widths) and len(separate.networks) == 6
    for i, width in enumerate(widths):
        for j in range(i):
            if widths[j] == width:
                skip = normal(2, width, 4, 4)
                assert torch.equal(shared(i, skip), shared(j, skip))
                assert not torch.allclose(separate(i, skip), separate(j, skip))


@pytest.mark.parametrize("mode", LS)
def test_a_skip_of_another_width_is_refused(mode):
    with pytest.raises(RuntimeError):
        SkipScaling(mode, [32, 64])(0, torch.zeros(1, 64, 2, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [FEATURE_MAP, TOKENS])
def test_shape_and_dtype_are_kept_and_the_skip_is_not_modified(mode, shape):
    for dtype in torch.float64, torch.float32, torch.bfloat16:
        scaling, skip = SkipScaling(mode, [32, 32]).to(dtype), normal(*shape).to(dtype)
        before, scaled = skip.clone(), scaling(1, skip)
        assert scaled.shape == shape and scaled.dtype == dtype and scaled.isfinite().all() and torch.equal(skip, before)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in torch.float32, torch.bfloat16:
            assert SkipScaling(mode, [32])(0, normal(*shape).to(dtype)).dtype == dtype


@pytest.mark.parametrize("mode", CONSTANTS)
def test_constant_modes_have_nothing_to_learn_or_to_save(mode):
    scaling = SkipScaling(mode, [32, 64])
    assert count(scaling) == 0 and scaling.state_dict() == {}


@pytest.mark.parametrize("mode", LEARNED)
@pytest.mark.parametrize("shape", [FEATURE_MAP, TOKENS])
def test_gradients_reach_the_learned_scales_and_a_step_changes_them(mode, shape):
    torch.manual_seed(0)
    scaling = SkipScaling(mode, [shape[1]] * 2, reduction=4)                    # 8 hidden units: some above 0
    optimizer = torch.optim.SGD(scaling.parameters(), lr=1.0)
    before = {name: value.clone() for name, value in scaling.state_dict().items()}
    skips = [(10 * normal(*shape, seed=i, dtype=torch.float32)).requires_grad_() for i in range(2)]
    sum(scaling(i, skip).square().mean() for i, skip in enumerate(skips)).backward()
    optimizer.step()
    assert before and all(skip.grad.abs().sum() > 0 for skip in skips)
    for name, value in scaling.state_dict().items():
        assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_exact_through_the_coefficient_too(mode, randomize):
    scaling = randomize(SkipScaling(mode, [8, 8], reduction=2)).double()
    skip = normal(2, 8, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda skip: scaling(1, skip), skip)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="'learned'.*none.*sqrt2.*cs.*ls.*ls-separate"):
        SkipScaling("learned", [8])
    for kappa in 0, -0.5, 1.01, float("nan"), float("inf"):
        for mode in MODES:
            with pytest.raises(ValueError, match=f"kappa.*{kappa}"):
                SkipScaling(mode, [8], kappa)
    for reduction in 0, -1:
        with pytest.raises(ValueError, match=f"reduction.*{reduction}"):
            SkipScaling("ls", [8], reduction=reduction)


# ---------------------------------------------------------------------------------------------------------------------
# The probes, on a network of five numbers that is worked out by hand

class Scales(torch.nn.Module):
    """A U of two skips whose every block multiplies by one number:   2, 3 | 5 | 7, 11"""

    def __init__(self, mode, kappa=0.5):
        super().__init__()
        blocks = [torch.nn.Linear(1, 1, bias=False) for _ in range(5)]
        for block, factor in zip(blocks, (2.0, 3.0, 5.0, 7.0, 11.0)):
            torch.nn.init.constant_(block.weight, factor)
        self.encoder, self.middle, self.decoder = torch.nn.ModuleList(blocks[:2]), blocks[2], torch.nn.ModuleList(blocks[3:])
        self.skip_scaling = SkipScaling(mode, [2, 2], kappa)

    forward = PaperNet.forward


TWO = torch.tensor([[[3.0], [4.0]], [[0.0], [1.0]]])                            # (2, 2, 1): norms 5 and 1, on average 3


def test_norms_of_features_by_hand():
    """x -> 2x -> 6x -> 30x -> 7 (30 + 6/2) x = 231x -> 11 (231 + 2) x = 2563x"""
    model = Scales("cs")
    with probe(model) as record:
        assert torch.equal(model(TWO, None), 2563 * TWO)
    by_hand = {"skip_norm": [2 * 3, 6 * 3], "scaled_norm": [2 * 3, 3 * 3], "decoder_norm": [2563 * 3, 231 * 3],
               "kappa": [1, 0.5], "kappa_square": [1, 0.25]}
    assert {name: value.tolist() for name, value in record.items()} == by_hand


def test_several_passes_are_averaged():
    model = Scales("none")
    with probe(model) as record:
        for x in TWO, 3 * TWO, 5 * TWO:
            model(x, None)
    assert record["skip_norm"].tolist() == [3 * 2 * 3, 3 * 6 * 3]


def test_norms_of_gradients_by_hand():
    """y = a4 (a3 (a2 a1 a0 + k1 a1 a0) + k0 a0) x = 2563 x, so that dy/da4 = 233 x and dy/da3 = 11 * 33 x, for one x = 1."""
    model = Scales("cs")
    model(torch.ones(1, 1, 1).expand(1, 2, 1)[:, :1], None).backward()
    found = gradient_norms(model)
    assert found["decoder_grad"].tolist() == [233, 11 * 33]                     # outermost first, though it runs last
    assert found["encoder_grad"].tolist() == [11 * (7 * (3 * 5 + 0.5 * 3) + 1), 11 * 7 * (2 * 5 + 0.5 * 2)]


def test_gradient_norms_join_the_parameters_of_a_block():
    model = Scales("none")
    model.decoder[1].bias = torch.nn.Parameter(torch.zeros(1))
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    model.decoder[1].bias.grad.fill_(-4)
    assert gradient_norms(model)["decoder_grad"].tolist() == [5, 3]


def test_kappa_of_learned_scales_by_hand(randomize):
    model, x = randomize(Scales("ls")), normal(4, 2, 1, dtype=torch.float32)
    with probe(model) as record:
        model(x, None)
    h0 = model.encoder[0](x)
    for i, skip in enumerate([h0, model.encoder[1](h0)]):
        kappa = model.skip_scaling.coefficient(i, skip)
        assert record["kappa"][i].item() == pytest.approx(kappa.mean().item(), rel=1e-6)
        assert record["kappa_square"][i].item() == pytest.approx((kappa**2).mean().item(), rel=1e-6)
        assert record["scaled_norm"][i].item() == pytest.approx((kappa * skip).flatten(1).norm(dim=1).mean().item(), rel=1e-6)


def test_norms_of_half_precision_neither_overflow_nor_round():
    x = torch.full((2, 100), 60_000.0, dtype=torch.float16)
    assert mean_norm(x).dtype == torch.float32 and mean_norm(x).item() == pytest.approx(10 * x[0, 0].item(), rel=1e-6)


def test_the_response_of_a_linear_map_is_its_stretch():
    a = normal(6, 6)
    x, delta = normal(3, 1, 2, 3, seed=1), normal(3, 1, 2, 3, seed=2)
    stretch = (delta.flatten(1) @ a).norm(dim=1) / delta.flatten(1).norm(dim=1)
    found = response(lambda x, t, labels: (x.flatten(1) @ a + 7).view_as(x), x, None, None, delta)
    torch.testing.assert_close(found, stretch, rtol=1e-6, atol=0, check_dtype=False)


def backbones(mode, randomize):
    return [randomize(UNet(8, channels=8, channel_mult=(1, 2), blocks=1, attention=(4,), heads=2, skip_scaling=mode)),
            randomize(UViT(8, width=16, depth=6, heads=2, skip_scaling=mode))]


@pytest.mark.parametrize("mode", MODES)
def test_probing_changes_nothing_and_leaves_nothing(mode, randomize):
    x, t = normal(2, 3, 8, 8, dtype=torch.float32), torch.tensor([3, 900])
    for model in backbones(mode, randomize):
        without = model(x, t)
        hooks = [len(module._forward_hooks) for module in model.modules()]
        with probe(model) as record:
            within = model(x, t)
        assert torch.equal(without, within) and all(value.shape == (len(model.decoder),) for value in record.values())
        assert [len(module._forward_hooks) for module in model.modules()] == hooks
        with pytest.raises(ValueError), probe(model):
            model(x[:, :, :7], t)
        assert [len(module._forward_hooks) for module in model.modules()] == hooks
        torch.testing.assert_close(record["decoder_norm"][0], mean_norm(last_feature(model, x, t)))


def last_feature(model, x, t):
    """What the last block of the decoder, number 0, gives: the input of the norm behind it."""
    found, last = [], model.out_norm if isinstance(model, UNet) else model.norm
    handle = last.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0].detach()))
    model(x, t)
    handle.remove()
    return found[0]


def test_blocks_that_checkpointing_runs_again_do_not_count(randomize):
    for model in backbones("ls", randomize):
        found = []
        for model.checkpointing in (False, True):
            with probe(model) as record:
                for seed in range(2):                       # two micro-batches of different size
                    model((seed + 1) * normal(2, 3, 8, 8, seed=seed, dtype=torch.float32), torch.tensor([3, 900])).sum().backward()
            found.append(record | gradient_norms(model))
            model.zero_grad()
        for name in found[0]:
            torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-4, atol=0)


def test_oscillation_by_hand():
    assert oscillation([7.0] * 10) < 1e-12 and math.isnan(oscillation([7.0] * 9)) and math.isnan(oscillation([math.nan] * 20))
    jumping = [math.exp(0.1 * (-1)**k) for k in range(40)]
    assert oscillation(jumping) == pytest.approx(0.1 * (10 / 9)**0.5, rel=1e-12)            # five of 0.1, five of -0.1
    assert oscillation([5 * value for value in jumping]) == pytest.approx(oscillation(jumping), rel=1e-9)
    assert oscillation([1e-9] * 5 + jumping) == oscillation(jumping)                        # a jump at the start is not typical


def test_the_theory_by_hand():
    sums, again, total = theory(torch.tensor([1, 0.25, 0.0625]))
    assert sums.tolist() == again.tolist() == [2.3125, 1.3125, 1.0625] and total == 2.3125


def test_correlation_is_of_each_depth_alone():
    ratios = {}
    for depth in 4, 8, 16:
        for k, name in enumerate(SETTINGS):
            ratios["theory", depth, name] = torch.tensor([1.0 * k, k, k])
            ratios["net", depth, name] = torch.tensor([2.0 * k + depth, -3.0 * k - depth, (k - (len(SETTINGS) - 1) / 2)**2])
    assert [correlation(ratios, "net", k) for k in range(3)] == pytest.approx([1, -1, 0], abs=1e-6)


def test_the_papers_network_keeps_norms_without_skips_and_adds_them_with():
    """Per block: a wide random network has ||h'_i||^2 / ||x||^2 near 1 + sum_{j >= i} kappa_j^2."""
    for kappa, by_hand in (1.0, [4, 3, 2]), (0.5, [2.3125, 1.3125, 1.0625]):
        torch.manual_seed(0)
        model, x = PaperNet(3, "cs", kappa, width=1024), torch.randn(4, 4, 1024)
        with probe(model) as record, torch.no_grad():
            model(x, None)
        np.testing.assert_allclose((record["decoder_norm"] / mean_norm(x))**2, by_hand, rtol=0.1)


# ---------------------------------------------------------------------------------------------------------------------
# The lessons

def test_the_lesson_shows_the_coefficients_and_the_theorems(run_lesson, tmp_path):
    lines = run_lesson("scaling").splitlines()
    row = next(line for line in lines if "cs 0.7" in line).split()
    assert row[2:6] == ["1.000", "0.700", "0.490", "0.343"] and row[-1] == "1.95"       # (1 - 0.49^8) / (1 - 0.49)
    assert any("ls       starts near one half" in line for line in lines) and max(map(len, lines)) <= 125
    table = {(int(line[:2]), line[4:12].strip()): [float(cell) for cell in line[12:].split()] for line in lines if line[:2].strip().isdecimal()}
    assert table.keys() == {(depth, name) for depth in (4, 8, 16) for name in SETTINGS}
    assert table[8, "none"] == [1] * 12 and table[16, "sqrt2"][:3] == [0.55, 0.55, 0.53]        # (1 + 8.5/2) / (1 + 8.5), 9 / 17
    for cells in table.values():
        np.testing.assert_allclose(cells[3:6], cells[:3], atol=0.1)                     # the paper's network follows the theory
    told = {line.split(", ")[1].split(":")[0]: line for line in lines if line.startswith("correlation")}
    assert "features +0.99" in told["paper's network"] or "features +1.00" in told["paper's network"]
    assert told.keys() == {"paper's network", "UNet", "UViT"}
    read_picture(tmp_path / "runs/lessons/scaling.png")


def test_the_lesson_on_a_run(command, runs):
    done = command("scaling.py", "--run", "run", "--bins", "4")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "4 long skips (0 = outermost), skip scaling ls" in done.stdout and "nan" not in done.stdout
    rows = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(rows) == 4 and all(len(row) == 5 and all(0 < float(kappa) < 1 for kappa in row[:4]) for row in rows)
    read_picture(runs / "run/scaling.png")
    same = command("scaling.py", "--run", "run/checkpoint.pt", "--bins", "4")
    assert same.stdout == done.stdout and "oscillation" not in done.stdout


def test_the_lesson_tells_the_oscillation_of_a_probed_run(command, pictures, tmp_path):
    tiny = ("--data", pictures, "--size", "8", "--backbone", "uvit", "--width", "16", "--depth", "4", "--patch", "2", "--skip-scaling", "cs",
            "--batch-size", "4", "--steps", "10", "--sample-every", "0", "--device", "cpu", "--precision", "fp32", "--unconditional")
    assert command("train.py", *tiny, "--probe", "1", "--log-every", "1", "--out", "run").returncode == 0
    done = command("scaling.py", "--run", "run")
    assert done.returncode == 0 and " 1.000 0.700 " in done.stdout and "oscillation" in done.stdout, done.stderr
    rows = [line.split(",") for line in (tmp_path / "run/log.csv").read_text().splitlines()]
    logs = [np.log([float(row[rows[0].index(f"decoder_norm_{i}")]) for row in rows[1:]]) for i in (0, 1)]
    outermost, both = logs[0].std(ddof=1), np.std(logs, axis=1, ddof=1).mean()
    assert f"{both:.3f} on average over its blocks, {outermost:.3f} in the outermost" in done.stdout


@pytest.mark.parametrize("flags, said", [(("--run", "nowhere"), "nowhere"), (("--run", "vit"), "no long skips"), (("--bins", "0"), "--bins must be"),
                                          (("--bins", "4"), "--bins goes with --run")])
def test_mistakes_are_one_line(command, pictures, flags, said):
    if "vit" in flags:
        assert command("train.py", "--data", pictures, "--size", "8", "--backbone", "vit", "--width", "16", "--depth", "2", "--steps", "1",
                       "--batch-size", "4", "--sample-every", "0", "--out", "vit").returncode == 0
    done = command("scaling.py", *flags)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and said in done.stderr
