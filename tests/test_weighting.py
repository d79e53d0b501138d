"""The loss weights against numbers worked out by hand, and the change of variable between predictions."""

import pytest
import torch

from weighting import WEIGHTINGS, loss_weight

PREDICTIONS = "x0", "eps", "v"

# (weighting, gamma) -> {snr: (on x0, on eps, on v)}, each from the table of the papers by hand
TABLE = {
    ("constant", 5): {0.25: (1, 4, 4 / 5), 1: (1, 1, 1 / 2), 4: (1, 1 / 4, 1 / 5), 20: (1, 1 / 20, 1 / 21)},
    ("snr", 5): {0.25: (1 / 4, 1, 1 / 5), 1: (1, 1, 1 / 2), 4: (4, 1, 4 / 5), 20: (20, 1, 20 / 21)},
    ("snr+1", 5): {0.25: (5 / 4, 5, 1), 1: (2, 2, 1), 4: (5, 5 / 4, 1), 20: (21, 21 / 20, 1)},
    ("max-snr", 1): {0.25: (1, 4, 4 / 5), 1: (1, 1, 1 / 2), 4: (4, 1, 4 / 5), 20: (20, 1, 20 / 21)},
    ("max-snr", 5): {0.25: (5, 20, 4), 1: (5, 5, 5 / 2), 4: (5, 5 / 4, 1), 20: (20, 1, 20 / 21)},
    ("min-snr", 5): {0.25: (1 / 4, 1, 1 / 5), 1: (1, 1, 1 / 2), 4: (4, 1, 4 / 5), 20: (5, 1 / 4, 5 / 21)},
    ("min-snr", 1): {0.25: (1 / 4, 1, 1 / 5), 1: (1, 1, 1 / 2), 4: (1, 1 / 4, 1 / 5), 20: (1, 1 / 20, 1 / 21)},
    ("soft-min-snr", 5): {0.25: (5 / 21, 20 / 21, 4 / 21), 1: (5 / 6, 5 / 6, 5 / 12), 4: (20 / 9, 5 / 9, 4 / 9),
                          20: (4, 1 / 5, 4 / 21)},
    ("p2", 1): {0.25: (1 / 5, 4 / 5, 4 / 25), 1: (1 / 2, 1 / 2, 1 / 4), 4: (4 / 5, 1 / 5, 4 / 25),
                20: (20 / 21, 1 / 21, 20 / 441)},
    ("p2", 0.5): {3: (3 / 2, 1 / 2, 3 / 8), 8: (8 / 3, 1 / 3, 8 / 27)},
}

# the weight at SNR = 0 exactly: 1 where the formula gives 0, 0/0 or 1/0, else what it gives (gamma = 5)
AT_ZERO = {"constant": (1, 1, 1), "snr": (1, 1, 1), "snr+1": (1, 1, 1), "max-snr": (5, 1, 5), "min-snr": (1, 1, 1),
           "soft-min-snr": (1, 1, 1), "p2": (1, 1, 1)}


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("weighting, gamma", TABLE)
def test_weights_are_those_of_the_table(weighting, gamma):
    for snr, by_hand in TABLE[weighting, gamma].items():
        weights = [loss_weight(float64(snr), weighting, gamma, prediction) for prediction in PREDICTIONS]
        torch.testing.assert_close(torch.cat(weights), float64(*by_hand), rtol=1e-14, atol=0)


def test_min_snr_on_v_is_not_clamped_after_adding_one():
    """min(snr + 1, gamma) / (snr + 1), a mistake made elsewhere, would be 1 at every SNR up to 4."""
    weight = loss_weight(float64(0.001, 0.5, 1, 4, 5, 20, 100), "min-snr", 5.0, "v")
    by_hand = float64(0.000999001, 0.333333, 0.5, 0.8, 0.833333, 0.238095, 0.0495050)
    torch.testing.assert_close(weight, by_hand, rtol=2e-6, atol=0)


def test_min_snr_clamps_from_above():
    snr = float64(0.5, 5, 20, 100)
    torch.testing.assert_close(loss_weight(snr, "min-snr", 5.0, "eps"), float64(1, 1, 0.25, 0.05))
    torch.testing.assert_close(loss_weight(snr, "min-snr", 5.0, "x0"), float64(0.5, 5, 5, 5))


def test_the_defaults_are_min_snr_5_on_x0():
    snr = torch.logspace(-3, 3, 13, dtype=torch.float64)
    torch.testing.assert_close(loss_weight(snr), torch.minimum(snr, float64(5)))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("gamma", [0.5, 1.0, 5.0])
def test_the_same_mistake_costs_the_same_whatever_is_predicted(weighting, gamma):
    """One wrong guess of x_0 and the eps and v that it implies, by x_t = alpha x_0 + sigma eps alone."""
    x0, eps, wrong_x0 = 0.3, -0.8, 0.7
    for snr in 1e-6, 0.01, 0.9, 5.0, 77.0, 1e6:
        alpha, sigma = (snr / (1 + snr)) ** 0.5, (1 / (1 + snr)) ** 0.5
        x_t = alpha * x0 + sigma * eps
        wrong_eps = (x_t - alpha * wrong_x0) / sigma
        errors = [wrong_x0 - x0, wrong_eps - eps, alpha * wrong_eps - sigma * wrong_x0 - (alpha * eps - sigma * x0)]
        losses = [loss_weight(float64(snr), weighting, gamma, prediction) * error**2
                  for prediction, error in zip(PREDICTIONS, errors)]
        torch.testing.assert_close(torch.cat(losses), losses[0].expand(3), rtol=1e-7, atol=0)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_finite_at_every_snr(weighting, dtype):
    snr = torch.tensor([0, 1e-45, 1e-38, 1e-30, 1e-12, 1e-3, 1, 5, 1e3, 1e9, 1e12], dtype=dtype)
    for prediction in PREDICTIONS:
        for gamma in 1e-3, 0.5, 1.0, 5.0:
            weight = loss_weight(snr, weighting, gamma, prediction)
            assert weight.isfinite().all() and (weight >= 0).all() and weight.dtype == dtype
            ordinary = (snr == 0) | (snr > 1e-37) & (snr < 1e3)                 # beyond, s * gamma or p2 may underflow
            assert (weight[ordinary] > 0).all()


@pytest.mark.parametrize("weighting", AT_ZERO)
def test_without_any_signal_the_weight_is_one_unless_the_formula_gives_a_number(weighting):
    for prediction, by_hand in zip(PREDICTIONS, AT_ZERO[weighting]):
        assert loss_weight(float64(0, 1), weighting, 5.0, prediction)[0] == by_hand


def test_only_snr_0_is_an_exception():
    """A weight that overflows at tiny SNR is cut to the largest number, one that underflows at large SNR stays 0."""
    tiny = torch.tensor([0, 1e-45], dtype=torch.float32)
    assert loss_weight(tiny, "constant", prediction="eps").tolist() == [1, torch.finfo(torch.float32).max]
    assert loss_weight(float64(1e12), "p2", 100.0) < 1e-100


@pytest.mark.parametrize("weighting", ["min-snr", "soft-min-snr"])
def test_min_snr_rises_on_x0_and_falls_on_eps(weighting):
    snr = torch.logspace(-8, 8, 400, dtype=torch.float64)
    slack = 1e-12                                                               # rounding of s/s
    assert (loss_weight(snr, weighting, 5.0, "x0").diff() >= 0).all()
    assert (loss_weight(snr, weighting, 5.0, "eps").diff() <= slack).all()
    on_v, peak = loss_weight(snr, weighting, 5.0, "v"), 5 if weighting == "min-snr" else 5**0.5
    assert (on_v[snr <= peak].diff() >= -slack).all() and (on_v[snr >= peak].diff() <= slack).all()


def test_soft_min_snr_lies_between_half_of_min_snr_and_min_snr():
    snr = torch.logspace(-6, 6, 100, dtype=torch.float64)
    soft, hard = (loss_weight(snr, weighting, 3.0) for weighting in ("soft-min-snr", "min-snr"))
    assert (soft < hard).all() and (soft >= hard / 2).all()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_input_is_not_modified_and_shape_is_kept(weighting):
    snr = float64(0, 1e-9, 0.5, 3, 20, 1e12).view(2, 3)
    before = snr.clone()
    for prediction in PREDICTIONS:
        first, second = (loss_weight(snr, weighting, 5.0, prediction) for _ in range(2))
        assert torch.equal(snr, before) and torch.equal(first, second) and first.shape == (2, 3)
        assert loss_weight(snr[1, 0], weighting, 5.0, prediction).shape == ()


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(ValueError, match="min_snr") as refusal:
        loss_weight(float64(1), "min_snr")
    assert all(name in str(refusal.value) for name in WEIGHTINGS)
    with pytest.raises(ValueError, match="'epsilon'.*x0.*eps.*v"):
        loss_weight(float64(1), "snr", prediction="epsilon")


@pytest.mark.parametrize("gamma", [0, 0.0, -1, -5.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("weighting", ["snr", "min-snr"])
def test_gamma_must_be_a_positive_number(weighting, gamma):
    with pytest.raises(ValueError, match=f"gamma.*positive.*{gamma}"):
        loss_weight(float64(1), weighting, gamma)


def test_a_weighting_that_turns_negative_is_refused(monkeypatch):
    monkeypatch.setitem(WEIGHTINGS, "mine", lambda snr, gamma: snr.log())
    with pytest.raises(ValueError, match="'mine' gives weights below 0"):
        loss_weight(float64(0.5, 2), "mine")


def test_the_lesson_prints_and_draws_every_weighting(run_lesson, tmp_path):
    printed = run_lesson("weighting")
    for name in WEIGHTINGS:
        assert printed.count(f"\n{name} ") == 3                                 # for each prediction
    assert (tmp_path / "runs/lessons/weighting.png").exists()
