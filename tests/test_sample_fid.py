"""FID, precision and recall of sample.py, --interpolate and --path; --fid-every of train.py."""

import csv
import os
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from conftest import ROOT, encrypt, read_picture, save_torchscript
from PIL import Image

import sample
from diffusion import Denoiser

SMALL = ("--size", "8", "--channels", "8", "--channel-mult", "1,2", "--attention", "4", "--heads", "2", "--batch-size", "8",
         "--log-every", "2", "--sample-every", "0", "--save-every", "2", "--device", "cpu", "--precision", "fp32")
MEASURE = ("--device", "cpu", "--features", "features.pt")
DRAW = (*MEASURE, "--steps", "3", "--precision", "fp32")


class Features(torch.nn.Module):
    """Six features of any image: means and roughnesses of its channels; dropout shows whether it runs in eval mode."""

    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, images, return_features: bool = False):
        x = images.to(torch.float32) / 255
        if images.dtype != torch.uint8 or images.shape[1] != 3 or not return_features:
            raise ValueError("uint8 images of three channels, and return_features=True, are expected")
        rough = (x[:, :, :, 1:] - x[:, :, :, :-1]).abs().mean(dim=[2, 3])
        return self.dropout(torch.cat([x.mean(dim=[2, 3]), rough], dim=1))


@pytest.fixture
def features(tmp_path):
    save_torchscript(Features(), tmp_path / "features.pt")
    return sample.FeatureNetwork(tmp_path / "features.pt", tmp_path / "cache", torch.device("cpu"))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    return tmp_path_factory.mktemp("first") / "run"


@pytest.fixture
def trained(command, pictures, features, first_run, tmp_path):
    """A folder with features.pt, pictures.npz and a run in `run`."""
    if not first_run.exists():
        assert command("train.py", "--data", pictures, *SMALL, "--steps", "2", "--out", first_run).returncode == 0
    shutil.copytree(first_run, tmp_path / "run")
    return tmp_path


def write_images(path, count, seed=1, size=8):
    images = np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    np.savez(path, arr_0=images)
    return images


def fid_of(done):
    assert done.returncode == 0, done.stderr
    return float(re.search(r"FID ([\d.e+-]+)", done.stdout)[1])


# ---------------------------------------------------------------------------------------------------------------------
# The distance

def normal_like(d, k):
    """A mean and a well-conditioned covariance from a formula, so that other programs can make the same."""
    waves = np.sin(k + np.arange(d * d, dtype=float) ** 1.3).reshape(d, d)
    return np.cos(k * np.arange(d)), 0.3 * np.eye(d) + waves @ waves.T / d


def test_distances_known_in_closed_form():
    zero, eye, rng = np.zeros(4), np.eye(4), np.random.default_rng(0)
    assert sample.frechet_distance(zero, eye, zero + 1, eye) == pytest.approx(4, rel=1e-12)
    assert sample.frechet_distance(zero, eye, zero, 4 * eye) == pytest.approx(4, rel=1e-12)
    a, b, shift = rng.uniform(0.1, 3, 30), rng.uniform(0.1, 3, 30), rng.normal(size=30)
    expected = ((np.sqrt(a) - np.sqrt(b)) ** 2).sum()
    assert sample.frechet_distance(shift, np.diag(a), shift, np.diag(b)) == pytest.approx(expected, rel=1e-12)
    turn = np.linalg.qr(rng.normal(size=(30, 30)))[0]                   # commuting: the same eigenvectors
    turned = [turn @ np.diag(values) @ turn.T for values in (a, b)]
    both = sample.frechet_distance(0 * shift, turned[0], shift, turned[1])
    assert both == pytest.approx(expected + (shift**2).sum(), rel=1e-12)
    assert sample.frechet_distance(*map(torch.tensor, (zero, eye, zero + 1, 4 * eye))) == pytest.approx(8, rel=1e-12)


# scipy 1.17: trace of scipy.linalg.sqrtm(cov1 @ cov2), of normal_like(d, 1) and normal_like(d, 2), in float64
@pytest.mark.parametrize("d, distance, equal_means", [
    (2, 0.9483623703738311, 0.033567408346902194), (5, 5.846503996510026, 0.8139595256807617),
    (16, 16.2833028547729, 1.614730306042695), (64, 68.75808615444762, 5.9458267071136675), (200, 220.07884868524354, 20.032572480047747)])
def test_distances_computed_with_scipy(d, distance, equal_means):
    (mean1, cov1), (mean2, cov2) = normal_like(d, 1), normal_like(d, 2)
    assert sample.frechet_distance(mean1, cov1, mean2, cov2) == pytest.approx(distance, rel=1e-10)
    assert sample.frechet_distance(mean2, cov2, mean1, cov1) == pytest.approx(distance, rel=1e-10)
    assert sample.frechet_distance(mean1, cov1, mean1, cov2) == pytest.approx(equal_means, rel=1e-10)


def of_ten(d, seed):
    """Ten samples of d features, and their mean and covariance, of rank 9."""
    x = np.random.default_rng(seed).normal(size=(10, d))
    return x, x.mean(0), np.cov(x.T)


@pytest.mark.parametrize("d", [64, 2048])
def test_ten_images_of_many_features(d):
    (a, mean1, cov1), (b, mean2, cov2) = of_ten(d, 0), of_ten(d, 1)
    distance = sample.frechet_distance(mean1, cov1, mean2, cov2)
    assert isinstance(distance, float) and 0 < distance < np.inf
    a, b = (a - mean1) / 3, (b - mean2) / 3                             # C = X^T X: the trace, from 10 x 10 matrices
    trace = np.linalg.svd(a @ b.T, compute_uv=False).sum()
    assert distance == pytest.approx(((mean1 - mean2) ** 2).sum() + (a**2).sum() + (b**2).sum() - 2 * trace, rel=1e-9)


def test_singular_covariances():
    d, (_, mean, cov) = 64, of_ten(64, 0)
    assert 0 <= sample.frechet_distance(mean, cov, mean, cov) < 1e-6
    assert sample.frechet_distance(mean, cov, mean + 1, cov) == pytest.approx(d, rel=1e-9)
    first, last = np.diag((np.arange(d) < 9) * 1.0), np.diag((np.arange(d) >= d - 9) * 4.0)     # nothing in common
    assert sample.frechet_distance(mean, first, mean, last) == pytest.approx(45, rel=1e-9)


def test_distance_of_nothing_and_of_nan():
    zero, none = np.zeros(3), np.zeros((3, 3))
    assert sample.frechet_distance(zero, none, zero, none) == 0
    assert sample.frechet_distance(zero, none, zero + 1, np.eye(3)) == pytest.approx(6)
    with pytest.raises(ValueError, match="nan"):
        sample.frechet_distance(zero, none, zero * np.nan, none)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics

def test_statistics_are_numpys_for_any_batch_size(features, tmp_path):
    images = write_images(tmp_path / "a.npz", 23)
    rows = features(images).numpy()
    for batch_size in (1, 7, 23, 50):
        mean, cov, kept = sample.feature_statistics(features, images.__getitem__, 23, batch_size)
        np.testing.assert_allclose(mean, rows.astype(float).mean(0), rtol=1e-6)
        np.testing.assert_allclose(cov, np.cov(rows.T.astype(float)), rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(kept, rows, rtol=1e-5)


def test_statistics_of_images_in_memory_are_those_of_a_file(features, tmp_path):
    """A source of the reader's own may keep its images in memory; only what lies in a file is kept in the cache."""
    images = write_images(tmp_path / "a.npz", 6)
    np.save(tmp_path / "a.npy", images)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    for given, kept in (images, 0), (mapped, 1):
        statistics = sample.known_statistics(given, features, tmp_path / "cache", 4)
        assert all(map(torch.equal, statistics, sample.feature_statistics(features, images.__getitem__, 6, 4)))
        assert len(list((tmp_path / "cache").glob("*.npz"))) == kept


def test_statistics_far_from_zero(features):
    """Features of 10,000 +- 0.01: sums of squares alone would leave nothing of the covariance in single precision."""
    values = torch.from_numpy(1e4 + 1e-2 * np.random.default_rng(0).normal(size=(500, 5))).float()

    def network(indices):
        return values[indices]
    network.device = torch.device("cpu")
    mean, cov, _ = sample.feature_statistics(network, lambda indices: indices, 500, 64)
    np.testing.assert_allclose(cov, np.cov(values.double().T), rtol=1e-9)
    np.testing.assert_allclose(mean, values.double().mean(0), rtol=1e-12)


def test_features_are_kept_evenly(features, monkeypatch, tmp_path):
    images = write_images(tmp_path / "a.npz", 23)
    monkeypatch.setattr(sample, "KEPT", 10)
    kept = sample.feature_statistics(features, images.__getitem__, 23, 4)[2]
    np.testing.assert_allclose(kept, features(images[::3]), rtol=1e-5)


def test_grey_images_are_repeated_and_other_input_is_refused(features, tmp_path):
    images = write_images(tmp_path / "a.npz", 4)
    grey = images[..., :1]
    assert torch.equal(features(grey), features(grey.repeat(3, 3)))
    assert not features.network.training and torch.equal(features(images), features(images))
    for wrong in images[..., :2], images.astype(np.float32), images[0]:
        with pytest.raises(ValueError, match="uint8 images with 1 or 3 channels"):
            features(wrong)


def test_published_network_is_fetched_checked_and_found_again(tmp_path, monkeypatch):
    save_torchscript(Features(), tmp_path / "served.pt")
    monkeypatch.setattr(sample, "INCEPTION_URL", (tmp_path / "served.pt").as_uri())
    with pytest.raises(OSError, match="inception-2015-12-05.pt is not there and could not be fetched .its sha256 is"):
        sample.FeatureNetwork(None, tmp_path / "cache", torch.device("cpu"))
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(sample, "INCEPTION_SHA256", sample.checksum(tmp_path / "served.pt"))
    network = sample.FeatureNetwork(None, tmp_path / "cache", torch.device("cpu"))
    assert network.file == tmp_path / "cache/inception-2015-12-05.pt" and network(np.zeros((2, 5, 5, 3), np.uint8)).shape == (2, 6)
    (tmp_path / "served.pt").unlink()
    sample.FeatureNetwork(None, tmp_path / "cache", torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------------------------
# Precision and recall

def brute_precision_recall(real, fake, k):
    def covered(points, balls):
        radius = [sorted(np.linalg.norm(balls - ball, axis=1))[min(k, len(balls) - 1)] for ball in balls]
        return np.mean([any(np.linalg.norm(point - ball) <= r for ball, r in zip(balls, radius)) for point in points])
    return covered(fake, real), covered(real, fake)


@pytest.mark.parametrize("n, m, k", [(60, 45, 3), (30, 70, 1), (3, 3, 3), (2, 50, 3)])
def test_precision_and_recall_by_brute_force(n, m, k, monkeypatch):
    monkeypatch.setattr(sample, "BLOCK", 16)
    rng = np.random.default_rng(n)
    real, fake = rng.normal(size=(n, 4)), 0.7 * rng.normal(size=(m, 4)) + 0.4
    found = sample.precision_recall(torch.from_numpy(real), torch.from_numpy(fake), k)
    assert found == pytest.approx(brute_precision_recall(real, fake, k))
    far = sample.precision_recall(torch.from_numpy(real + 1e3).float(), torch.from_numpy(fake + 1e3).float(), k)
    assert found == pytest.approx(far, abs=0.05)


def test_precision_and_recall_of_extremes():
    rng = torch.Generator().manual_seed(0)
    real = torch.randn(200, 8, generator=rng)
    assert sample.precision_recall(real, real) == (1, 1)
    assert sample.precision_recall(real, real + 100) == (0, 0)
    precision, recall = sample.precision_recall(real, 0.1 * real)       # all alike and typical: precise, of little variety
    assert precision == 1 and recall < 0.1


# ---------------------------------------------------------------------------------------------------------------------
# The command

def test_images_that_exist_as_npz_folder_and_zip(command, features, pictures, tmp_path):
    images = write_images(tmp_path / "a.npz", 30)
    (tmp_path / "folder").mkdir()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for k, image in enumerate(images):
            Image.fromarray(image).save(tmp_path / f"folder/{k:03d}.png")
            archive.write(tmp_path / f"folder/{k:03d}.png", f"{k}.png")
    mean, cov, _ = sample.feature_statistics(features, images.__getitem__, 30, 64)
    known = np.load(pictures)["arr_0"]
    expected = sample.frechet_distance(mean, cov, *sample.feature_statistics(features, known.__getitem__, 24, 64)[:2])
    for source in ("a.npz", "folder", "a.zip"):
        done = command("sample.py", source, "--fid", pictures, "--features", "features.pt", "--batch-size", "7")
        assert fid_of(done) == pytest.approx(expected, rel=1e-4)
        assert "precision 0.0000, recall 0.0000" in done.stdout and "30 images" in done.stdout
        assert done.stderr.count("\n") == 1 and "30 images, fewer than 10,000" in done.stderr
    done = command("sample.py", pictures, "--fid", pictures, "--features", "features.pt")
    assert fid_of(done) < 1e-9 and "precision 1.0000, recall 1.0000" in done.stdout


def test_reference_statistics_are_computed_once(command, features, pictures, tmp_path):
    write_images(tmp_path / "a.npz", 30)
    flags = ("sample.py", "a.npz", "--features", "features.pt", "--cache", "kept")
    first = fid_of(command(*flags, "--fid", pictures))
    file, = (tmp_path / "kept").glob("fid-*.npz")
    written = file.stat().st_mtime_ns
    assert fid_of(command(*flags, "--fid", pictures)) == first and file.stat().st_mtime_ns == written
    done = command(*flags, "--fid", file)                               # is a reference of mu and sigma itself
    assert fid_of(done) == first and "precision" not in done.stdout
    write_images(pictures, 24, seed=5)
    assert fid_of(command(*flags, "--fid", pictures)) != first
    assert len(list((tmp_path / "kept").glob("fid-*"))) == 2


def test_reference_of_mu_and_sigma(command, features, tmp_path):
    images = write_images(tmp_path / "a.npz", 30)
    mean, cov, _ = sample.feature_statistics(features, images.__getitem__, 30, 64)
    np.savez(tmp_path / "ref.npz", mu=mean + 1, sigma=cov)
    assert fid_of(command("sample.py", "a.npz", "--fid", "ref.npz", "--features", "features.pt")) == pytest.approx(6, rel=1e-4)


def test_reference_folder_is_brought_to_the_size_of_the_images(command, features, tmp_path):
    images = write_images(tmp_path / "a.npz", 12)
    (tmp_path / "large").mkdir()
    for k, image in enumerate(images):
        Image.fromarray(image.repeat(2, 0).repeat(2, 1)).save(tmp_path / f"large/{k}.png")
    assert fid_of(command("sample.py", "a.npz", "--fid", "large", "--features", "features.pt")) < 1e-9


def test_a_run_draws_then_is_measured(command, trained):
    done = command("sample.py", "run", "--count", "20", *DRAW, "--fid", "train")
    fid, out = fid_of(done), trained / "run/samples.npz"
    assert np.load(out)["arr_0"].shape == (20, 8, 8, 3)
    assert done.stdout.count("\n") == 4 and "of 3x8x8" in done.stdout
    for again in (("run", "--out", "folder", "--count", "20", "--batch-size", "3", *DRAW, "--fid", "train"), (out, *MEASURE, "--fid", "pictures.npz")):
        assert fid_of(command("sample.py", *again)) == pytest.approx(fid, rel=1e-4)
    moved = ("run", "--count", "20", *DRAW, "--fid", "train", "--out", "folder")
    assert fid_of(command("sample.py", *moved, "--cache", "elsewhere")) == pytest.approx(fid, rel=1e-4) and any((trained / "elsewhere").iterdir())
    done = command("sample.py", "run", "--count", "20", *DRAW, "--fid", "train")            # known before the reference is measured
    assert done.returncode == 2 and "samples.npz exists already" in done.stderr and done.stdout == ""


def test_two_processes_measure_as_one(command, trained):
    flags = ("run", "--count", "21", *DRAW, "--fid", "train", "--batch-size", "4")
    launched = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "sample.py", *flags,
                                 "--out", "two.npz"], cwd=trained, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, "OMP_NUM_THREADS": "1"})
    one = command("sample.py", *flags, "--out", "one.npz", "--cache", "cache1")         # meanwhile
    two = subprocess.CompletedProcess(launched.args, 0, *launched.communicate(timeout=100))
    assert launched.returncode == 0 and fid_of(one) == pytest.approx(fid_of(two), rel=1e-4) and two.stdout.count("FID") == 1
    assert re.search("precision.*recall [^ ]*", one.stdout)[0] == re.search("precision.*recall [^ ]*", two.stdout)[0]
    assert np.array_equal(np.load(trained / "one.npz")["arr_0"], np.load(trained / "two.npz")["arr_0"])
    kept = [np.load(next((trained / cache).glob("fid-*.npz"))) for cache in ("cache1", "cache")]
    for name in ("mu", "sigma", "features"):
        np.testing.assert_allclose(kept[0][name], kept[1][name], rtol=1e-5, atol=1e-9)


MISTAKES = [
    (("a.npz", "--fid", "pictures.npz", "--features", "none.pt"), "none.pt does not exist"),
    (("a.npz", "--fid", "pictures.npz", "--features", "a.npz"), "cannot be read as TorchScript"),
    (("a.npz", "--fid", "pictures.npz", "--features", "plain.pt"), "plain.pt fails on images of"),
    (("a.npz", "--fid", "pictures.npz", "--features", "image.pt"), "not a row each"),
    (("a.npz", "--fid", "nowhere", "--features", "features.pt"), "--fid nowhere is not there"),
    (("a.npz", "--fid", "nowhere.npz", "--features", "features.pt"), "nowhere.npz"),
    (("a.npz", "--fid", "other.npz", "--features", "features.pt"), "holds x, y: neither mu and sigma nor images"),
    (("a.npz", "--fid", "torn.npz", "--features", "features.pt"), "torn.npz cannot be read"),
    (("a.npz", "--fid", "encrypted.npz", "--features", "features.pt"), "encrypted.npz is not an array of images"),
    (("encrypted.npz", "--fid", "a.npz", "--features", "features.pt"), "encrypted.npz is not an array of images"),
    (("a.npz", "--fid", "secret.npz", "--features", "features.pt"), "secret.npz cannot be read"),
    (("a.npz", "--fid", "wide.npz", "--features", "features.pt"), "is of 7 features, and --features features.pt gives 6"),
    (("a.npz", "--fid", "large.npz", "--features", "features.pt"), "its images are 16x16 pixels, and those to be measured 8x8"),
    (("a.npz", "--fid", "train", "--features", "features.pt"), "training data of a run"),
    (("latents.npy", "--fid", "pictures.npz", "--features", "features.pt"), "holds float32"),
    (("single.npz", "--fid", "pictures.npz", "--features", "features.pt"), "at least 2 images"),
    (("mixed", "--fid", "pictures.npz", "--features", "features.pt"), "b.png is 9x9 pixels"),
    (("damaged", "--fid", "pictures.npz", "--features", "features.pt"), "a.png cannot be read"),
    (("empty", "--fid", "pictures.npz", "--features", "features.pt"), "empty holds no images"),
    (("run", "--fid", "train", "--out", "grid.png", "--features", "features.pt"), "--out grid.png: FID"),
    (("a.npz", "--fid", "pictures.npz", "--features", "features.pt", "--data-dir", "x"), "--data-dir has no effect with --fid pictures.npz"),
    (("run", "--fid", "train", "--count", "1", "--features", "features.pt"), "--count 1: the covariance"),
    (("run", "--features", "features.pt"), "--features has no effect without --fid"),
    (("run", "--interpolate", "1", "1"), "--interpolate needs"),
    (("run", "--interpolate", "1", "2", "--path"), "--path has no effect beside --interpolate"),
    (("a.npz", "--fid", "pictures.npz", "--features", "features.pt", "--count", "5"), "--count has no effect where images are measured"),
    (("notes.zip", "--fid", "pictures.npz", "--features", "features.pt"), "notes.zip cannot be read"),
    (("run", "--path", "--out", "x.npz"), "one picture"),
]


def test_mistakes_are_one_line(command, trained, tmp_path):
    write_images(tmp_path / "a.npz", 5), write_images(tmp_path / "large.npz", 5, size=16), write_images(tmp_path / "single.npz", 1)
    save_torchscript(torch.nn.Flatten(), tmp_path / "plain.pt")

    class Image3(torch.nn.Module):
        def forward(self, x, return_features: bool = False):
            return x
    save_torchscript(Image3(), tmp_path / "image.pt")
    np.savez(tmp_path / "other.npz", x=1, y=2)
    np.savez(tmp_path / "wide.npz", mu=np.zeros(7), sigma=np.eye(7))
    np.savez_compressed(tmp_path / "packed.npz", arr_0=np.zeros((5, 8, 8, 3), np.uint8))
    encrypt(tmp_path / "packed.npz", tmp_path / "encrypted.npz"), encrypt(tmp_path / "wide.npz", tmp_path / "secret.npz")
    np.save(tmp_path / "latents.npy", np.zeros((4, 4, 8, 8), np.float32))
    (tmp_path / "notes.zip").write_bytes(b"no archive")
    (tmp_path / "torn.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:300])
    for name, files in ("mixed", (("a.png", 8), ("b.png", 9))), ("damaged", (("a.png", 8),)), ("empty", ()):
        (tmp_path / name).mkdir()
        for file, size in files:
            Image.new("RGB", (size, size)).save(tmp_path / name / file)
    (tmp_path / "damaged/a.png").write_text("not an image")
    before = sorted(path.name for path in tmp_path.iterdir())
    for flags, words in MISTAKES:
        done = command("sample.py", *flags)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and words in done.stderr, (flags, done.stderr)
        assert set(path.name for path in tmp_path.iterdir()) - set(before) <= {"cache", "stdout", "stderr"}


def test_no_fid_of_latents(command, features, tmp_path):
    np.save(tmp_path / "latents.npy", np.random.default_rng(0).normal(size=(16, 4, 8, 8)).astype(np.float32))
    flags = ("--data", "latents.npy", *SMALL, "--steps", "2", "--out", "run")
    done = command("train.py", *flags, "--fid-every", "2", "--features", "features.pt")
    assert done.returncode == 2 and "latents" in done.stderr and not (tmp_path / "run").exists()
    assert command("train.py", *flags).returncode == 0
    done = command("sample.py", "run", "--count", "4", *DRAW, "--fid", "latents.npy")
    assert done.returncode == 2 and "--decoder" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# During training

def read_fid(run):
    with open(run / "fid.csv", newline="") as file:
        return [(int(row["step"]), int(row["images"]), float(row["fid"])) for row in csv.DictReader(file)]


def test_training_measures_fid_and_resumes_its_log(command, pictures, features, tmp_path):
    flags = ("--data", pictures, *SMALL, "--fid-every", "2", "--fid-count", "8", "--features", "features.pt")
    done = command("train.py", *flags, "--steps", "5", "--out", "whole")
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "fewer than 10,000" in done.stderr
    rows = read_fid(tmp_path / "whole")
    assert [row[:2] for row in rows] == [(2, 16), (4, 32), (5, 40)]
    drawn = command("sample.py", "whole", "--count", "8", "--fid", "train", "--device", "cpu", "--features", "features.pt", "--precision", "fp32")
    assert fid_of(drawn) == pytest.approx(rows[-1][2], rel=1e-4)
    assert command("train.py", *flags, "--steps", "2", "--out", "part").returncode == 0
    with open(tmp_path / "part/fid.csv", "a") as file:
        file.write("4,32,1.5\n")                                        # of steps that a kill took back
    assert command("train.py", "--resume", "--steps", "5", "--out", "part").returncode == 0
    assert read_fid(tmp_path / "part") == rows
    plain = command("train.py", "--data", pictures, *SMALL, "--steps", "5", "--out", "plain")
    assert plain.returncode == 0 and not (tmp_path / "plain/fid.csv").exists()
    weights = [torch.load(tmp_path / run / "checkpoint.pt", weights_only=True)["model"] for run in ("whole", "plain")]
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights)))      # to measure changes nothing
    for run in "whole", "plain":
        assert command("train.py", "--compare", run, "--out", f"{run}.png").returncode == 0
    assert read_picture(tmp_path / "whole.png").height > read_picture(tmp_path / "plain.png").height       # one more panel


# ---------------------------------------------------------------------------------------------------------------------
# Strips

def test_interpolation_goes_over_the_sphere_between_two_images(command, trained):
    model, diffusion, config = sample.load_model(trained / "run")
    denoiser, shape = Denoiser(model, diffusion), config["data"]["shape"]
    x = sample.interpolate(denoiser, shape, 5, (3, 8), 7, label=1, steps=3)
    ends = sample.generate(denoiser, shape, 5, [3, 8], [1, 1], steps=3)
    assert torch.allclose(x[[0, -1]], ends, atol=1e-5) and x.isfinite().all()

    class Identity:                                                     # shows the noise itself
        sigma_min, sigma_max, round_sigma = 1.0, 1.0, staticmethod(lambda sigma: sigma)

        def __call__(self, x, sigma, *_):
            return x
    noise = sample.interpolate(Identity(), (3, 32, 32), 0, (0, 1), 5, steps=1)
    np.testing.assert_allclose(noise.square().mean((1, 2, 3)), 1, atol=0.1)
    turns = torch.nn.functional.cosine_similarity(noise[:-1].flatten(1), noise[1:].flatten(1))
    np.testing.assert_allclose(turns, turns[0], rtol=1e-2)              # in equal turns
    assert command("sample.py", "run", "--interpolate", "3", "8", "--labels", "1", "--device", "cpu").returncode == 0
    picture = read_picture(trained / "run/interpolated.png")
    assert picture.width > 9 * picture.height / 2


def test_film_strip_ends_in_the_image(command, trained):
    model, diffusion, config = sample.load_model(trained / "run")
    frames, sigmas = sample.denoising_path(Denoiser(model, diffusion), config["data"]["shape"], 0, [4, 5], [0, 1], steps=6, solver="euler")
    x = sample.generate(Denoiser(model, diffusion), config["data"]["shape"], 0, [4, 5], [0, 1], steps=6, solver="euler")
    assert frames.shape == (len(sigmas), 2, *config["data"]["shape"]) and sigmas == sorted(sigmas, reverse=True)
    assert torch.allclose(frames[-1], x, atol=1e-12)
    assert command("sample.py", "run", "--path", "--steps", "6", "--count", "2", "--device", "cpu").returncode == 0
    picture = read_picture(trained / "run/path.png")
    assert picture.width == 6 * 66 + 2 and picture.height == 22 + 2 * 66 + 2
