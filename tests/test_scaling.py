"""The coefficients of every mode by hand, and what a learned scale may and may not depend on."""

import numpy as np
import pytest
import torch

from scaling import CONSTANTS, MODES, SkipScaling

LEARNED = "ls", "ls-separate"
FEATURE_MAP, TOKENS = (2, 32, 3, 5), (2, 32, 7)                                 # (B, C, H, W) and (B, L, D)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


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


@pytest.mark.parametrize("mode", LEARNED)
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


@pytest.mark.parametrize("mode", LEARNED)
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


@pytest.mark.parametrize("mode", LEARNED)
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
    shared, separate = (randomize(SkipScaling(mode, widths)).double() for mode in LEARNED)
    one = {32: 2 * 2 * 32 + 2 + 32, 64: 2 * 4 * 64 + 4 + 64, 128: 2 * 8 * 128 + 8 + 128}
    assert count(shared) == sum(one.values()) and len(shared.networks) == 3
    assert count(separate) == sum(one[width] for width in widths) and len(separate.networks) == 6
    for i, width in enumerate(widths):
        for j in range(i):
            if widths[j] == width:
                skip = normal(2, width, 4, 4)
                assert torch.equal(shared(i, skip), shared(j, skip))
                assert not torch.allclose(separate(i, skip), separate(j, skip))


@pytest.mark.parametrize("mode", LEARNED)
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
    assert all(skip.grad.abs().sum() > 0 for skip in skips) and len(before) == 4 * len(scaling.networks)
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


def test_the_lesson_prints_the_coefficients_and_the_sums_that_the_theorems_bound_with(run_lesson):
    lines = run_lesson("scaling").splitlines()
    row = next(line for line in lines if "cs 0.7" in line).split()
    assert row[2:6] == ["1.000", "0.700", "0.490", "0.343"] and row[-1] == "1.85"       # 1 + .49 + .2401 + .117649
    assert any("ls starts near one half" in line for line in lines) and max(map(len, lines)) <= 125
