"""The Pareto view of weighting.py, and its lesson on a trained run: Gram matrices and weights against enumerated active sets, optimality conditions and closed forms."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import read_picture

import weighting
from diffusion import Diffusion
from train import Data
from weighting import WEIGHTINGS, gradient_gram, pareto_objective, pareto_weights, squeeze_into_bin, strategy_weights

METHODS = ("ugd", "frank-wolfe")
KINDS = ("tall", "square", "rank-deficient", "conflicting", "aligned", "scaled", "collinear", "opposed", "duplicated",
         "integer", "neighbours")


def random_gradients(kind, tasks, seed):
    """Gradients of `tasks` tasks, as rows, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows, columns):
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    common = normal(1, 2 * tasks)
    sign = normal(tasks, 1).sign()
    return {
        "tall": lambda: normal(tasks, 3 * tasks),
        "square": lambda: normal(tasks, tasks),
        "rank-deficient": lambda: normal(tasks, max(1, tasks // 2)) + 1,
        "conflicting": lambda: normal(tasks, max(1, tasks // 3)),                       # the optimum is mostly 0
        "aligned": lambda: normal(tasks, 2 * tasks) + 2 * common,
        "scaled": lambda: normal(tasks, 2 * tasks) * 10 ** (8 * torch.rand(tasks, 1, generator=generator) - 4).double(),
        "collinear": lambda: common + 1e-6 * normal(tasks, 2 * tasks),
        "opposed": lambda: sign * (common + 1e-3 * normal(tasks, 2 * tasks)),
        "duplicated": lambda: normal(max(1, tasks // 2), 2 * tasks)[torch.arange(tasks) // 2 % max(1, tasks // 2)],
        "integer": lambda: (2 * normal(tasks, max(1, tasks // 2))).round(),
        "neighbours": lambda: normal(tasks, 2 * tasks).cumsum(0),
    }[kind]()


def assert_on_simplex(weights, tasks):
    assert weights.shape == (tasks,) and weights.dtype == torch.float64
    assert weights.isfinite().all() and (weights >= 0).all()
    assert abs(weights.sum().item() - 1) < 1e-12


def best_of_all_supports(gram):
    """The optimum: for every set of tasks, the stationary point with sum 1 on it; the lowest one that is >= 0."""
    best = gram.diagonal().min().item()
    for size in range(2, len(gram) + 1):
        for support in itertools.combinations(range(len(gram)), size):
            face = gram[list(support)][:, list(support)]
            scale = face.diagonal().mean()
            system = torch.ones(size + 1, size + 1, dtype=torch.float64)
            system[:size, :size], system[size, size] = face / scale, 0
            right = torch.zeros(size + 1, 1, dtype=torch.float64)
            right[size] = 1
            point = torch.linalg.lstsq(system, right, driver="gelsd").solution[:size, 0]
            if (point >= 0).all() and abs(point.sum() - 1) < 1e-9:
                best = min(best, max(0.0, (point @ face @ point).item()))
    return best


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "scaled"])      # there the enumeration loses digits
@pytest.mark.parametrize("regularization", (0.0, 0.1))
def test_optimum_is_that_of_the_best_support(kind, regularization):
    for tasks in (1, 2, 3, 5, 7):
        gradients = random_gradients(kind, tasks, seed=tasks)
        gram = gradients @ gradients.T
        best = best_of_all_supports(gram + regularization * torch.eye(tasks, dtype=torch.float64))
        for method in METHODS:
            weights = pareto_weights(gram, method, regularization)
            assert_on_simplex(weights, tasks)
            value = pareto_objective(gram, weights, regularization).item()
            assert abs(value - best) <= 1e-9 * max(best, 1e-3 * gram.diagonal().mean().item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_duality_bound_is_met(kind, method):
    """No point of the hull is shorter than min_i <g_i, x> / |x|, for any x: with x = sum_i w_i g_i the two meet."""
    for tasks, seed in ((4, 0), (12, 1), (100, 2)):
        gradients = random_gradients(kind, tasks, seed)
        weights = pareto_weights(gradients @ gradients.T, method)
        assert_on_simplex(weights, tasks)
        common = weights @ gradients
        value = common.square().sum().item()
        bound = max(0.0, (gradients @ common).min().item()) ** 2 / max(value, 1e-300)
        assert value - bound <= 1e-6 * max(value, 1e-3 * gradients.square().sum(1).min().item())


@pytest.mark.parametrize("kind", KINDS)
def test_both_solvers_reach_the_same_value(kind):
    for tasks in (3, 8, 40):
        for seed in range(2):
            gradients = random_gradients(kind, tasks, seed)
            gram = gradients @ gradients.T
            a, b = (pareto_objective(gram, pareto_weights(gram, method)).item() for method in METHODS)
            assert abs(a - b) <= 1e-9 * max(a, b, 1e-3 * gram.diagonal().min().item())


@pytest.mark.parametrize("method", METHODS)
def test_two_tasks_give_the_shortest_point_of_a_segment(method):
    for a, b in (((1, 0), (0, 2)), ((3, 1), (-1, 1)), ((1, 1), (4, 4.5)), ((2, -1), (-4, 2)), ((1e-6, 0), (-1e3, 1e3))):
        a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
        share = (b @ (b - a) / (b - a).square().sum()).clamp(0, 1)          # of a
        gradients = torch.stack([a, b])
        expected = torch.stack([share, 1 - share])
        torch.testing.assert_close(pareto_weights(gradients @ gradients.T, method), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_orthogonal_gradients_share_by_inverse_square_norm(method):
    squares = torch.logspace(-16, 16, 33, dtype=torch.float64)              # norms from 1e-8 to 1e8
    torch.testing.assert_close(pareto_weights(squares.diag(), method), 1 / squares / (1 / squares).sum())
    regularized = 1 / (squares + 0.1)
    torch.testing.assert_close(pareto_weights(squares.diag(), method, 0.1), regularized / regularized.sum())


@pytest.mark.parametrize("method", METHODS)
def test_identical_tasks(method):
    gram = torch.full((5, 5), 2.0, dtype=torch.float64)
    assert pareto_objective(gram, pareto_weights(gram, method)).item() == pytest.approx(2, rel=1e-12)
    torch.testing.assert_close(pareto_weights(gram, method, 1e-3), torch.full((5,), 0.2, dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
def test_task_behind_the_others_gets_no_weight(method):
    gradients = torch.tensor([[1.0, 1, 0], [1, -1, 0], [5, 0, 1]], dtype=torch.float64)
    expected = torch.tensor([0.5, 0.5, 0], dtype=torch.float64)
    torch.testing.assert_close(pareto_weights(gradients @ gradients.T, method), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_scale_and_order_of_tasks_do_not_matter(method):
    for seed in range(5):
        gradients = random_gradients("tall", 10, seed)
        gram = gradients @ gradients.T
        weights = pareto_weights(gram, method, 0.5)
        for factor in (1e-200, 1e-9, 3.0, 1e200):
            scaled = pareto_weights(gram * factor, method, 0.5 * factor)
            torch.testing.assert_close(scaled, weights, rtol=1e-6, atol=1e-9)
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
        shuffled = pareto_weights(gram[order][:, order], method, 0.5)
        torch.testing.assert_close(shuffled, weights[order], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_strong_regularization_gives_equal_weights(method):
    gradients = random_gradients("scaled", 20, seed=0)
    weights = pareto_weights(gradients @ gradients.T, method, 1e16)
    torch.testing.assert_close(weights, torch.full((20,), 0.05, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_extreme_matrices_give_weights_not_nan(method):
    hilbert = 1 / (torch.arange(12)[:, None] + torch.arange(12) + 1.0).double()
    nasty = {
        "one task": torch.tensor([[3.0]]),
        "one zero task": torch.zeros(1, 1),
        "zero": torch.zeros(6, 6),
        "ones": torch.ones(7, 7),
        "zero row": torch.tensor([[0.0, 0, 0], [0, 1, 2], [0, 2, 5]]),
        "opposite": torch.tensor([[1.0, -1], [-1, 1]]),
        "tiny": 1e-310 * torch.eye(3, dtype=torch.float64),
        "huge": 1e308 * torch.eye(3, dtype=torch.float64),
        "norms 1e-8 to 1e8": torch.tensor([[1e16, -1, 1e-9], [-1, 1e-16, 0], [1e-9, 0, 1.0]], dtype=torch.float64),
        "hilbert": hilbert,
        "singular": torch.outer(hilbert[3], hilbert[3]),
        "rounded to float32": (lambda g: (g @ g.T).float())(random_gradients("conflicting", 30, 0)),
        "indefinite": torch.tensor([[1.0, -3], [-3, 1]]),
        "negative": -torch.eye(3),
        "not symmetric": torch.tensor([[1.0, 0.5], [0.4, 1]]),
    }
    for name, gram in nasty.items():
        for regularization in (0.0, 1e-12, 1.0, 1e300):
            before = gram.clone()
            assert_on_simplex(pareto_weights(gram, method, regularization), len(gram))
            assert torch.equal(gram, before), name
    torch.testing.assert_close(pareto_weights(nasty["zero row"], method), torch.tensor([1.0, 0, 0]).double())
    torch.testing.assert_close(pareto_weights(nasty["zero"], method), torch.full((6,), 1 / 6).double())
    float32 = nasty["rounded to float32"]
    assert pareto_objective(float32, pareto_weights(float32, method)) < 1e-5 * float32.diagonal().mean()


def test_weights_refuse_what_they_cannot_use():
    square = torch.eye(3)
    for gram in (torch.ones(2, 3), torch.ones(4), torch.ones(0, 0), square * math.nan, square + math.inf):
        with pytest.raises(ValueError, match="square matrix of finite"):
            pareto_weights(gram)
    with pytest.raises(ValueError, match="'newton' is not one of ugd, frank-wolfe"):
        pareto_weights(square, "newton")
    for regularization in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="regularization must be a number >= 0"):
            pareto_weights(square, "ugd", regularization)


def test_objective_is_the_squared_length_of_the_common_gradient():
    gradients = random_gradients("tall", 6, 0)
    weights = torch.rand(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = (weights @ gradients).square().sum(1) + 0.7 * weights.square().sum(1)
    torch.testing.assert_close(pareto_objective(gradients @ gradients.T, weights, 0.7), expected)
    single = pareto_objective(gradients @ gradients.T, weights[0].tolist(), 0.7)
    torch.testing.assert_close(single, expected[0])


def test_gram_of_a_linear_model_by_hand():
    """loss_i = (w . x_i + b - y_i)^2 has the gradient 2 r_i (x_i, 1), so G_ij = 4 r_i r_j (x_i . x_j + 1)."""
    x = torch.tensor([[1.0, 2], [-1, 0], [3, -2]])
    w, b = torch.tensor([0.5, -1], requires_grad=True), torch.tensor(2.0, requires_grad=True)
    residual = x @ w + b - torch.tensor([1.0, 0, -1])                       # -0.5, 1.5, 6.5
    r = torch.tensor([-0.5, 1.5, 6.5], dtype=torch.float64)
    expected = 4 * torch.outer(r, r) * (x.double() @ x.double().T + 1)
    gram = gradient_gram(residual ** 2, [w, b])                             # a vector of losses, one graph
    assert gram.dtype == torch.float64 and gram.shape == (3, 3)
    torch.testing.assert_close(gram, expected, rtol=1e-6, atol=0)


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.SiLU(), torch.nn.Flatten(), torch.nn.Linear(12, 2))


def test_gram_of_a_network_equals_that_of_its_jacobian():
    model, x = small_model(), torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    parameters = dict(model.named_parameters())
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, x).square().mean(1))(parameters)
    rows = torch.cat([j.detach().flatten(1) for j in jacobian.values()], 1).double()
    together = gradient_gram(list(model(x).square().mean(1)), model.parameters())
    apart = gradient_gram((model(image[None]).square().mean() for image in x), list(model.parameters()))
    torch.testing.assert_close(together, rows @ rows.T, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(apart, rows @ rows.T, rtol=1e-5, atol=1e-7)


def test_gram_leaves_the_model_as_it_is():
    model, x = small_model(), torch.randn(2, 1, 4, 4)
    model(x).sum().backward()
    before = [(p.clone(), p.grad.clone()) for p in model.parameters()]
    losses = model(x).square().mean(1)
    gradient_gram(losses, model.parameters())
    torch.autograd.grad(losses.sum(), list(model.parameters()))             # the graph is still there
    assert all(torch.equal(p, q) and torch.equal(p.grad, g) for p, (q, g) in zip(model.parameters(), before))
    model.zero_grad()
    gradient_gram(model(x).square().mean(1), model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_gram_counts_unused_parameters_as_zero_and_leaves_out_frozen_ones():
    a, b, frozen = (torch.tensor(value, requires_grad=True) for value in ([3.0, 4.0], [2.0], [5.0]))
    frozen.requires_grad_(False)
    gram = gradient_gram([a.sum() * frozen.sum(), 3 * b.sum(), a[0] + b.sum()], [a, b, frozen])
    assert gram.tolist() == [[50, 0, 5], [0, 9, 3], [5, 3, 2]]


def test_gram_sums_in_float64():
    """1e8 + 1 - 1e8 is 0 in float32."""
    a = torch.zeros(3, requires_grad=True)
    gram = gradient_gram([1e4 * a[0] + a[1] + 1e4 * a[2], 1e4 * a[0] + a[1] - 1e4 * a[2]], [a])
    assert gram[0, 1].item() == 1


def test_gram_names_the_task_whose_gradient_is_not_finite():
    a = torch.tensor([0.0, 1.0], requires_grad=True)
    with pytest.raises(ValueError, match="task 1 .*finite"):
        gradient_gram([a.sum(), a.sqrt().sum(), a[0] * math.nan], [a])


@pytest.mark.parametrize("method", METHODS)
def test_common_gradient_lowers_every_loss(method):
    """One step along -sum_i w_i g_i lowers each of the losses, whose plain average would raise one."""
    x = torch.tensor([2.0, 1.0], dtype=torch.float64, requires_grad=True)

    def losses(x):
        return [10 * (x[0] - 1) ** 2 + x[1] ** 2, (x[0] - 4) ** 2 + (x[1] + 1) ** 2, x[1] ** 2]

    gradients = torch.stack([torch.autograd.grad(loss, x)[0] for loss in losses(x)])
    mean_step = x - 1e-4 * gradients.mean(0)
    assert any(after > before for after, before in zip(losses(mean_step), losses(x)))
    step = x - 1e-4 * pareto_weights(gradient_gram(losses(x), [x]), method) @ gradients
    assert all(after < before for after, before in zip(losses(step), losses(x)))


@pytest.mark.parametrize("bins, timesteps", [(20, 1000), (3, 1000), (7, 100), (10, 10)])
def test_timesteps_are_squeezed_into_exactly_one_bin(bins, timesteps):
    t = torch.arange(timesteps)
    for k in range(bins):
        inside = squeeze_into_bin(t, k, bins, timesteps)
        assert set(inside.tolist()) == {s for s in range(timesteps) if s * bins // timesteps == k}


TINY = ("--size", "8", "--channels", "8", "--channel-mult", "1,2", "--attention", "4", "--heads", "2", "--batch-size", "8",
        "--steps", "4", "--device", "cpu", "--precision", "fp32")


# ---------------------------------------------------------------------------------------------------------------------
# The lesson on a trained run

def test_a_strategys_weight_of_a_bin_is_its_mean_over_the_timesteps():
    snr = torch.tensor([16, 6, 4, 2, 1, 0.5], dtype=torch.float64)          # three bins of two
    by_hand = {"constant": (2, 2, 2), "snr": (22, 6, 1.5), "snr+1": (24, 8, 3.5), "max-snr": (22, 6, 2), "min-snr": (10, 6, 1.5)}
    weights = strategy_weights(snr, 3)
    assert weights.keys() == WEIGHTINGS.keys()
    for name, sums in by_hand.items():
        expected = torch.tensor(sums, dtype=torch.float64) / sum(sums)
        torch.testing.assert_close(weights[name], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("bins", [2, 7, 100])
def test_bins_of_unequal_size_are_averaged_too(bins):
    snr = Diffusion("cosine").snr
    expected = [[] for _ in range(bins)]
    for t in range(1000):
        expected[t * bins // 1000].append(min(snr[t].item(), 5.0))
    means = np.array([np.mean(part) for part in expected])
    np.testing.assert_allclose(strategy_weights(snr, bins)["min-snr"], means / means.sum(), rtol=1e-12)


def test_the_objective_by_hand():
    """g = (3, 0), (0, 1): |w_1 g_1 + w_2 g_2|^2 = 9 w_1^2 + w_2^2, least at w = (0.1, 0.9)."""
    gram = torch.tensor([[9.0, 0], [0, 1]])
    assert pareto_objective(gram, [0.5, 0.5]).item() == 2.5
    assert pareto_objective(gram, [0.5, 0.5], regularization=2).item() == 3.5
    assert pareto_objective(gram, [0.1, 0.9]).item() == pytest.approx(0.9, rel=1e-14)
    assert pareto_objective(gram, [[1.0, 0], [0, 1]]).tolist() == [9, 1]


class Scale(torch.nn.Module):
    """A model of two numbers, with an error of x_0 that is easily derived: it says a x where t is below 500, else b x."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (0.3, 0.6))

    def forward(self, x, t, labels):
        return torch.where(t < 500, self.a, self.b).view(-1, 1, 1, 1) * x


def run_of(model, prediction):
    """What open_run returns, of random images and four bins."""
    diffusion, images = Diffusion("cosine", prediction), np.random.default_rng(0).integers(0, 256, (40, 2, 2, 1), dtype=np.uint8)
    return SimpleNamespace(model=model, diffusion=diffusion, data=Data(images, None, None), bins=4, device=torch.device("cpu"),
                           args=SimpleNamespace(seed=0, batch_size=8, label_dropout=0.0, flip=False, lr=0.05, betas=[0.9, 0.99]),
                           error_scale=weighting.CHANGE_OF_VARIABLE[prediction](diffusion.snr))


@pytest.mark.parametrize("prediction", ["x0", "eps", "v"])
def test_grams_are_those_of_the_x0_errors_whatever_is_predicted(prediction):
    run, gradients = run_of(Scale(), prediction), torch.zeros(weighting.GRAM_BATCHES, 4, 2, dtype=torch.float64)
    for i in range(weighting.GRAM_BATCHES):
        x0, t, noise, _ = weighting.draw_batch(run, weighting.LOSS_IMAGES + i * weighting.GRAM_IMAGES, weighting.GRAM_IMAGES)
        for k in range(4):
            t_k, factor = 250 * k + t // 4, torch.tensor(0.3 if k < 2 else 0.6, dtype=torch.float64, requires_grad=True)
            x_t = run.diffusion.add_noise(x0, noise, t_k).double()
            error = run.diffusion.predict_x0(factor * x_t, x_t, t_k) - x0
            gradients[i, k, k // 2], = torch.autograd.grad(error.square().mean(), factor)
    grams, gram = weighting.measure_grams(run)
    torch.testing.assert_close(grams, gradients @ gradients.transpose(1, 2), rtol=1e-4, atol=0)
    torch.testing.assert_close(gram, gradients.mean(0) @ gradients.mean(0).T, rtol=1e-4, atol=0)


def test_fine_tuning_moves_a_copy_toward_the_least_error_of_its_bin():
    """In bin 3 the best b is E[x_0 x_t] / E[x_t^2], by least squares; a, which is not used there, stays."""
    run = run_of(Scale(), "x0")
    tuned, again = (weighting.fine_tune(run, 3, 150) for _ in range(2))
    x0, t, noise, _ = weighting.draw_batch(run, 0, 4000)
    x_t = run.diffusion.add_noise(x0, noise, 750 + t // 4)
    assert tuned.b.item() == pytest.approx((x0 * x_t).sum().item() / x_t.square().sum().item(), abs=0.05)
    assert tuned.a == run.model.a == 0.3 and run.model.b == 0.6 and tuned.b == again.b


def test_the_matrix_is_red_above_0_and_blue_below():
    picture = weighting.draw_matrix(torch.tensor([[1.0, -1], [0, 1]]), ["[0, 500)", "[500, 1000)"], [0, 500])
    corners = [picture.getpixel((80 + 34 * j + 2, 10 + 34 * i + 2)) for i in (0, 1) for j in (0, 1)]
    assert corners == [(255, 80, 80), (80, 80, 255), (255, 255, 255), (255, 80, 80)]


def test_the_lesson_on_a_run(command, pictures, tmp_path):
    assert command("train.py", "--data", pictures, *TINY, "--out", "runs/a").returncode == 0
    first = command("weighting.py", "--run", "runs/a", "--bins", "3", "--steps", "2")
    assert first.returncode == 0 and first.stderr == "", first.stderr
    assert all(f"\n({part}) " in first.stdout for part in "abcd") and "nan" not in first.stdout
    assert all(f"\n{name} " in first.stdout for name in [*WEIGHTINGS, "ugd", "frank-wolfe"])
    assert "      only [0, 334)   only [667, 1000)\n" in first.stdout
    read_picture(tmp_path / "runs/a/weighting.png")
    same = command("weighting.py", "--run", "runs/a/checkpoint.pt", "--bins", "3", "--steps", "2", "--tune", "0", "2")
    assert same.stdout == first.stdout

    np.savez(pictures, arr_0=np.zeros((24, 8, 8, 3), np.uint8), arr_1=np.arange(24) % 4)        # one class more than it had
    refused = command("weighting.py", "--run", "runs/a")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "--data" in refused.stderr


@pytest.mark.parametrize("flags, said", [(("--run", "nowhere"), "nowhere"), (("--steps", "5"), "go with --run"), (("--run", "runs/a", "--bins", "1"), "--bins"),
                                         (("--run", "runs/a", "--steps", "0"), "--steps"), (("--run", "runs/a", "--tune", "10"), "--tune")])
def test_mistakes_are_one_line(command, flags, said):
    done = command("weighting.py", *flags)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and said in done.stderr
