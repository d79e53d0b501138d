"""The data section of train.py: what becomes of every kind of file, and the cache."""

import argparse
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import sample
import train


def flags(tmp_path, data, **given):
    values = dict(data=str(data), data_dir=str(tmp_path / "data"), size=(32, 32), crop=None, gray=False,
                  cache=str(tmp_path / "cache"), skip_damaged=False, check_data=False, seed=0)
    return argparse.Namespace(**{**values, **given})


def load(tmp_path, data, **given):
    """-> Data and the lines that were said."""
    lines = []
    return train.load_data(flags(tmp_path, data, **given), lines.append), lines


def one_pixel(image, **given):
    """What a one-coloured image (or its top left corner) becomes."""
    args = flags(Path("."), "x", size=(image.height, image.width), **given)
    return tuple(train.decode(image, args)[0][0, 0].tolist())


def reopened(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    file.seek(0)
    return Image.open(file)


def save_noise(path, size=(40, 40), seed=0, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def thirds(width, height):
    """Red, green and blue thirds along the longer side."""
    pixels = np.zeros((height, width, 3), np.uint8)
    along = pixels if width > height else pixels.swapaxes(0, 1)
    for i, part in enumerate(np.array_split(np.arange(max(width, height)), 3)):
        along[:, part, i] = 255
    return Image.fromarray(pixels)


# -- one picture

@pytest.mark.parametrize("mode, colour, rgb", [
    ("1", 1, (255, 255, 255)), ("L", 100, (100, 100, 100)), ("RGB", (1, 2, 3), (1, 2, 3)),
    ("LA", (10, 0), (255, 255, 255)), ("LA", (10, 255), (10, 10, 10)),
    ("RGBA", (10, 20, 30, 255), (10, 20, 30)), ("RGBA", (0, 0, 0, 51), (204, 204, 204)),
    ("CMYK", (0, 255, 255, 0), (255, 0, 0)), ("YCbCr", (100, 128, 128), (100, 100, 100)),
    ("HSV", (0, 255, 255), (255, 0, 0)),
    ("I", 0x8000, (128, 128, 128)), ("I", 255, (0, 0, 0)), ("I", 1 << 20, (255, 255, 255)), ("I", -5, (0, 0, 0)),
    ("I;16", 0x80FF, (128, 128, 128)), ("I;16B", 0x80FF, (128, 128, 128)),
    ("F", 0.2, (51, 51, 51)), ("F", 77.2, (77, 77, 77)), ("F", 300.0, (255, 255, 255)),
    ("RGBX", (1, 2, 3, 0), (1, 2, 3))])
def test_every_mode_becomes_rgb(mode, colour, rgb):
    image = Image.new(mode, (8, 8), colour)
    assert one_pixel(image) == rgb
    assert len(one_pixel(image, gray=True)) == 1


def test_gray_keeps_grey_levels_exactly():
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels, notes = train.decode(Image.fromarray(ramp), flags(Path("."), "x", size=(16, 16), gray=True))
    assert pixels.shape == (16, 16, 1) and (pixels[..., 0] == ramp).all() and notes == []


def test_16_bit_ramp_keeps_256_levels():
    ramp = (np.arange(256, dtype=np.uint16) * 256).reshape(16, 16)
    image = reopened(Image.fromarray(ramp), "PNG")
    pixels, notes = train.decode(image, flags(Path("."), "x", size=(16, 16)))
    assert (pixels[..., 0].ravel() == np.arange(256)).all() and notes == ["converted from I;16"]


def test_palette_with_transparency_goes_over_white():
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    image = reopened(image, "PNG", transparency=bytes([0, 255, 128]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels, _ = train.decode(image, flags(Path("."), "x", size=(1, 3)))
    assert pixels[0].tolist() == [[255, 255, 255], [0, 255, 0], [127, 127, 255]]


def test_colour_key_transparency_goes_over_white():
    image = reopened(Image.new("RGB", (8, 8), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert one_pixel(image) == (255, 255, 255)


def test_cmyk_jpeg():
    colour = one_pixel(reopened(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))
    assert np.abs(np.subtract(colour, (255, 0, 0))).max() <= 2


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    assert one_pixel(reopened(frames[0], "GIF", save_all=True, append_images=frames[1:])) == (255, 0, 0)


def test_exif_turn():
    upright = np.zeros((16, 16, 3), np.uint8)
    upright[:8, :8] = 255                            # white corner, top left
    stored = {1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.swapaxes(0, 1),
              6: np.rot90(upright, 1), 7: np.rot90(upright.swapaxes(0, 1), 2), 8: np.rot90(upright, -1)}
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[0x112] = orientation
        image = reopened(Image.fromarray(np.ascontiguousarray(pixels)), "PNG", exif=exif)
        decoded, notes = train.decode(image, flags(Path("."), "x", size=(16, 16)))
        assert (decoded == upright).all(), orientation
        assert notes == ([] if orientation == 1 else ["turned"])


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_does_not_spoil_the_picture():
    assert one_pixel(reopened(Image.new("RGB", (8, 8), "red"), "PNG", exif=b"Exif\0\0II*\0garbage")) == (255, 0, 0)


@pytest.mark.parametrize("width, height", [(200, 100), (100, 200)])
def test_crop_keeps_the_short_side_and_the_middle(width, height):
    pixels, notes = train.decode(thirds(width, height), flags(Path("."), "x"))
    along = pixels if width > height else pixels.swapaxes(0, 1)
    # the short side of 100 becomes 32, the middle third of 200 becomes 200 / 3 * 0.32 = 21.3 of 32 pixels
    assert (along[:, 7:25] == (0, 255, 0)).all()
    assert along[:, 0, 0].min() > 200 and along[:, -1, 2].min() > 200 and notes == []


def test_a_circle_stays_round():
    y, x = np.mgrid[:90, :160]
    disc = Image.fromarray((255 * ((y - 44.5) ** 2 + (x - 79.5) ** 2 < 20**2)).astype(np.uint8))
    for size in [(32, 32), (32, 64), (64, 32)]:
        inside = train.decode(disc, flags(Path("."), "x", size=size))[0][..., 0] > 127
        assert abs(int(inside.any(0).sum()) - int(inside.any(1).sum())) <= 1, size


def test_non_square_size_is_covered_whole():
    white = Image.new("RGB", (50, 300), "white")
    for size in [(32, 64), (64, 32), (20, 7)]:
        pixels, _ = train.decode(white, flags(Path("."), "x", size=size))
        assert pixels.shape == (*size, 3) and (pixels == 255).all()


def test_halving_stops_where_either_side_would_get_too_small():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert (train.decode(Image.fromarray(pixels), flags(Path("."), "x", size=(8, 64)))[0] == pixels[28:36]).all()


def test_size_32_of_a_64_picture_is_the_mean_of_2x2():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    decoded, _ = train.decode(Image.fromarray(pixels), flags(Path("."), "x"))
    means = pixels.reshape(32, 2, 32, 2, 3).mean((1, 3))
    assert np.abs(decoded - means).max() <= 1


def test_crop_comes_before_the_resize_and_never_adds_a_border():
    pixels = np.full((100, 100, 3), 255, np.uint8)
    pixels[30:70, 30:70] = 0
    assert not train.decode(Image.fromarray(pixels), flags(Path("."), "x", crop=40))[0].any()
    small = train.decode(Image.new("RGB", (20, 50), "white"), flags(Path("."), "x", crop=40))
    assert (small[0] == 255).all() and small[1] == ["smaller than --crop", "enlarged"]


def test_damaged_values_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        train.to_rgb(Image.new("F", (8, 8), float("nan")))


# -- folders and zips

def test_folder_names_are_the_classes_and_junk_is_ignored(tmp_path):
    root = tmp_path / "pets"
    for i, name in enumerate(["dog/b.png", "cat/deep/er/a.JPG", "cat/z_1.webp", "Ünique/x.bmp"]):
        save_noise(root / name, seed=i)
    for junk in ["notes.txt", "._a.jpg", ".DS_Store", "cat/Thumbs.db", "dog/._b.png", ".git/a.png", "cat/labels.json"]:
        (root / junk).parent.mkdir(exist_ok=True)
        (root / junk).write_bytes(b"junk")
    data, lines = load(tmp_path, root)
    assert data.classes == ["cat", "dog", "Ünique"] and data.labels.tolist() == [0, 0, 1, 2]
    assert data.labels.dtype == np.int64 and data.images.dtype == np.uint8 and isinstance(data.images, np.memmap)
    assert data.images.shape == (4, 32, 32, 3) and data.shape == (3, 32, 32) and not data.latents
    assert lines == [f"{root}: 4 images of 3x32x32, 3 classes (cat, dog, Ünique)"]


def test_zip_equals_folder(tmp_path):
    root = tmp_path / "pets"
    for i, name in enumerate(["dog/b.png", "cat/a.png", "cat/c.jpg"]):
        save_noise(root / name, seed=i)
    with zipfile.ZipFile(tmp_path / "pets.zip", "w") as archive:
        archive.writestr("__MACOSX/cat/._a.png", b"junk")
        for name in ["dog/b.png", "cat/c.jpg", "cat/a.png"]:
            archive.write(root / name, name)
    folder, zipped = load(tmp_path, root)[0], load(tmp_path, tmp_path / "pets.zip")[0]
    assert (folder.images == zipped.images).all() and folder.classes == zipped.classes
    assert folder.labels.tolist() == zipped.labels.tolist() == [0, 0, 1]


def test_one_class_and_none(tmp_path):
    for i in range(3):
        save_noise(tmp_path / "loose" / f"{i}.png", seed=i)
        save_noise(tmp_path / "one" / "only" / f"{i}.png", seed=i)
    loose, lines = load(tmp_path, tmp_path / "loose")
    assert loose.labels is None and loose.classes is None and len(loose.images) == 3 and "unlabelled" in lines[0]
    one, lines = load(tmp_path, tmp_path / "one")
    assert one.classes == ["only"] and one.labels.tolist() == [0, 0, 0] and "1 class (only)" in lines[0]


def test_images_in_and_outside_class_folders_are_refused(tmp_path):
    save_noise(tmp_path / "mixed" / "cat" / "a.png")
    save_noise(tmp_path / "mixed" / "stray.png")
    with pytest.raises(ValueError, match="stray.png"):
        load(tmp_path, tmp_path / "mixed")


def test_missing_empty_and_imageless(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no image")
    (tmp_path / "torn.zip").write_bytes(b"PK\3\4torn")
    for name in ["missing", "empty", "texts"]:
        with pytest.raises(ValueError, match=rf"{name}.*\.jpeg"):
            load(tmp_path, tmp_path / name)
    for name in ["torn.zip", "texts/a.txt"]:
        with pytest.raises(ValueError, match=name):
            load(tmp_path, tmp_path / name)
    assert not (tmp_path / "cache").exists()


def make_damaged(root):
    """One whole picture and four broken ones; -> the names of the broken."""
    save_noise(root / "whole.png")
    save_noise(root / "torn.jpg", size=(200, 200))
    (root / "torn.jpg").write_bytes((root / "torn.jpg").read_bytes()[:-4000])
    save_noise(root / "torn.png", size=(200, 200))
    (root / "torn.png").write_bytes((root / "torn.png").read_bytes()[:-4000])
    (root / "empty.gif").write_bytes(b"")
    (root / "bomb.ppm").write_bytes(b"P6 10000 10000 255\n")              # 300 MB from a few bytes
    return ["bomb.ppm", "empty.gif", "torn.jpg", "torn.png"]


def test_damaged_files_are_named(tmp_path):
    names = make_damaged(tmp_path / "pictures")
    with pytest.raises(ValueError, match="4 of 5 files.*--skip-damaged") as error:
        load(tmp_path, tmp_path / "pictures")
    assert all(name in str(error.value) for name in names) and "\n" not in str(error.value)
    assert "decompression bomb" in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []
    data, lines = load(tmp_path, tmp_path / "pictures", skip_damaged=True)
    assert len(data.images) == 1 and "4 of 5 files" in lines[1]
    assert (data.images[0] == load(tmp_path, tmp_path / "pictures", skip_damaged=True)[0].images[0]).all()
    with pytest.raises(ValueError, match="4 of 5 files"):               # the cache of --skip-damaged does not hide it
        load(tmp_path, tmp_path / "pictures")


def test_labels_stay_with_their_images_when_damaged_ones_are_left_out(tmp_path):
    for i, name in enumerate(["cat/a.png", "cat/b.png", "dog/c.png", "dog/d.png"]):
        save_noise(tmp_path / "pets" / name, size=(32, 32), seed=i)
    (tmp_path / "pets/cat/b.png").write_bytes(b"broken")
    data, _ = load(tmp_path, tmp_path / "pets", skip_damaged=True)
    assert data.labels.tolist() == [0, 1, 1]
    assert (data.images[1] == np.asarray(Image.open(tmp_path / "pets/dog/c.png"))).all()


def test_a_link_to_nowhere_is_a_damaged_file(tmp_path):
    save_noise(tmp_path / "pictures/a.png", size=(32, 32))
    (tmp_path / "pictures/b.png").symlink_to("nowhere.png")
    with pytest.raises(ValueError, match="b.png.*--skip-damaged"):
        load(tmp_path, tmp_path / "pictures")
    assert len(load(tmp_path, tmp_path / "pictures", skip_damaged=True)[0].images) == 1


def test_nothing_but_damaged_files(tmp_path):
    for i in range(7):
        save_noise(tmp_path / "pictures" / f"{i}.png").tobytes()
        (tmp_path / "pictures" / f"{i}.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match="7 of 7 .*4.png .* and 2 more"):
        load(tmp_path, tmp_path / "pictures", skip_damaged=True)


def test_the_start_line_counts_what_was_done(tmp_path):
    root = tmp_path / "pictures"
    exif = Image.Exif()
    exif[0x112] = 6
    save_noise(root / "turned.jpg", exif=exif)
    save_noise(root / "small.png", size=(20, 60))
    Image.new("L", (40, 40)).save(root / "grey.png")
    Image.new("P", (8, 8)).save(root / "palette.png")
    _, lines = load(tmp_path, root)
    assert lines[0].endswith("unlabelled; 1 converted from L; 1 converted from P; 2 enlarged; 1 turned")
    assert load(tmp_path, root)[1] == lines


def test_a_script_named_jpg_is_never_run(tmp_path):
    save_noise(tmp_path / "p" / "a.png")
    (tmp_path / "p" / "b.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage")
    with pytest.raises(ValueError, match="b.jpg .not an image"):
        load(tmp_path, tmp_path / "p")


# -- the cache

def test_the_second_start_decodes_nothing(tmp_path):
    pixels = save_noise(tmp_path / "p" / "a.bmp", size=(32, 32))
    first, lines = load(tmp_path, tmp_path / "p")
    stat = os.stat(tmp_path / "p" / "a.bmp")
    (tmp_path / "p" / "a.bmp").write_bytes(bytes(stat.st_size))         # unreadable now, but of the same size and time
    os.utime(tmp_path / "p" / "a.bmp", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second, again = load(tmp_path, tmp_path / "p")
    assert (second.images[0] == pixels).all() and again == lines and not second.images.flags.writeable


def test_the_cache_follows_files_and_flags(tmp_path):
    save_noise(tmp_path / "p" / "a.bmp", seed=1)
    before = load(tmp_path, tmp_path / "p")[0].images[0].copy()
    save_noise(tmp_path / "p" / "a.bmp", seed=2)                        # the same size in bytes
    os.utime(tmp_path / "p" / "a.bmp", ns=(1, 1))
    assert (load(tmp_path, tmp_path / "p")[0].images[0] != before).any()
    assert load(tmp_path, tmp_path / "p", size=(16, 24))[0].shape == (3, 16, 24)
    assert load(tmp_path, tmp_path / "p", gray=True)[0].shape == (1, 32, 32)
    assert (load(tmp_path, tmp_path / "p", crop=20)[0].images[0] != before).any()
    save_noise(tmp_path / "p" / "b.bmp", seed=3)
    assert len(load(tmp_path, tmp_path / "p")[0].images) == 2


LOADER = """import sys
sys.path.insert(0, {module!r})
import argparse, train
print("start", flush=True)
train.load_data(argparse.Namespace(**{values!r}))"""


def start_loader(args):
    code = LOADER.format(module=str(Path(train.__file__).parent), values=vars(args))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "start\n"
    return process


def test_a_killed_run_leaves_no_half_cache_and_rivals_agree(tmp_path):
    for i in range(200):
        save_noise(tmp_path / "p" / f"{i}.jpg", size=(256, 256), seed=i)
    args, cache = flags(tmp_path, tmp_path / "p", size=(256, 256)), tmp_path / "cache"
    process = start_loader(args)
    while not any(path.stat().st_size for path in cache.glob("*/complete/images.npy")):
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.communicate()                                               # waits, and closes the pipes
    [left] = cache.iterdir()
    assert ".partial-" in left.name                                     # killed half-way: nothing under the final name
    rival = start_loader(args)
    data = train.load_data(args, lambda line: None)
    rival.communicate()
    assert rival.returncode == 0 and len(data.images) == 200
    for i in (0, 199):
        with Image.open(sorted((tmp_path / "p").iterdir())[i]) as image:
            assert (data.images[i] == np.asarray(image)).all()
    assert sum(".partial-" not in path.name for path in cache.iterdir()) == 1
    for path in [left, *left.rglob("*")]:
        os.utime(path, (0, 0))                                          # hours later
    load(tmp_path, tmp_path / "p", size=(8, 8))
    assert not left.exists()


def test_too_little_disk_names_the_flag(tmp_path):
    with pytest.raises(OSError, match="--cache .* GB"):
        train.cached(flags(tmp_path, "digits"), ["key"], 1 << 60, None)


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "images.npy").write_bytes(b"half")
        raise OSError("No space left on device")
    with pytest.raises(OSError, match="No space"):
        train.cached(flags(tmp_path, "digits"), ["key"], 1, build)
    assert list((tmp_path / "cache").iterdir()) == []


# -- arrays

def noise_array(*shape, dtype=np.uint8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(dtype)


@pytest.mark.parametrize("save", ["npy", "npz", "compressed"])
def test_arrays_of_the_right_size_are_mapped(tmp_path, save):
    images, labels = noise_array(5, 32, 32, 3), np.array([0, 2, 1, 2, 0])
    path = tmp_path / ("a.npy" if save == "npy" else "a.npz")
    if save == "npy":
        np.save(path, images)
        np.save(tmp_path / "a_labels.npy", labels)
    else:
        (np.savez if save == "npz" else np.savez_compressed)(path, images, labels)
    data, lines = load(tmp_path, path)
    assert isinstance(data.images, np.memmap) and not data.images.flags.writeable and (data.images == images).all()
    assert data.labels.tolist() == labels.tolist() and data.classes == ["0", "1", "2"]
    assert "3 classes (0, 1, 2)" in lines[0]
    assert (tmp_path / "cache").exists() == (save == "compressed")
    if save == "compressed":
        path.with_suffix(".old").write_bytes(path.read_bytes())
        assert (load(tmp_path, path)[0].images == images).all()


def test_named_npz_without_labels(tmp_path):
    np.savez(tmp_path / "a.npz", images=noise_array(2, 32, 32, 3))
    assert load(tmp_path, tmp_path / "a.npz")[0].labels is None
    np.savez(tmp_path / "b.npz", images=noise_array(2, 32, 32, 3), labels=np.array([1, 0], np.uint8))
    assert load(tmp_path, tmp_path / "b.npz")[0].labels.tolist() == [1, 0]


def test_arrays_of_another_size_or_depth_go_through_the_cache(tmp_path):
    np.save(tmp_path / "big.npy", noise_array(3, 64, 64, 3))
    np.save(tmp_path / "grey.npy", noise_array(3, 32, 32))
    np.save(tmp_path / "alpha.npy", np.zeros((3, 32, 32, 4), np.uint8))
    big, _ = load(tmp_path, tmp_path / "big.npy")
    assert np.abs(big.images - noise_array(3, 64, 64, 3).reshape(3, 32, 2, 32, 2, 3).mean((2, 4))).max() <= 1
    assert (load(tmp_path, tmp_path / "grey.npy")[0].images == noise_array(3, 32, 32)[..., None]).all()
    mapped = load(tmp_path, tmp_path / "grey.npy", gray=True)[0]
    assert isinstance(mapped.images, np.memmap) and mapped.shape == (1, 32, 32)
    assert (load(tmp_path, tmp_path / "alpha.npy")[0].images == 255).all()


def test_new_labels_of_a_resized_array_are_seen(tmp_path):
    np.save(tmp_path / "a.npy", noise_array(2, 64, 64, 3))
    for labels in ([0, 1], [1, 0]):
        np.save(tmp_path / "a_labels.npy", np.array(labels))
        assert load(tmp_path, tmp_path / "a.npy")[0].labels.tolist() == labels


@pytest.mark.parametrize("array, complaint", [
    (noise_array(4, 3, 32, 32), "shape"), (noise_array(4, 32), "shape"),
    (noise_array(4, 32, 32, 3, dtype=np.int64), "int64"),
    (np.zeros((4, 4, 32, 32)), "float64"), (np.zeros((4, 4, 16, 16), np.float32), "--size 32x32"),
    (np.zeros((4, 32, 32), np.float16), "latents"), (np.zeros((0, 32, 32, 3), np.uint8), "a.npy"),
    (np.array([{}]), "object")])
def test_other_arrays_are_refused(tmp_path, array, complaint):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, tmp_path / "a.npy")


@pytest.mark.parametrize("labels", [[0, 1], [0, -1, 2], [0.0, 1.0, 2.0], [0, 1, 100_000], [[0], [1], [2]]])
def test_labels_that_do_not_fit_are_refused(tmp_path, labels):
    np.savez(tmp_path / "a.npz", noise_array(3, 32, 32, 3), np.array(labels))
    with pytest.raises(ValueError, match="labels"):
        load(tmp_path, tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "b.npz"])
def test_torn_arrays_are_refused(tmp_path, name):
    np.save(tmp_path / "a.npy", noise_array(3, 32, 32, 3))
    np.savez(tmp_path / "a.npz", noise_array(3, 32, 32, 3))
    np.savez(tmp_path / "b.npz", pictures=noise_array(3, 32, 32, 3))
    if name != "b.npz":
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-500])
    with pytest.raises(ValueError, match=name):
        load(tmp_path, tmp_path / name)


def test_latents_are_mapped(tmp_path):
    for dtype in (np.float16, np.float32):
        latents = noise_array(4, 4, 16, 24, dtype=dtype)
        np.save(tmp_path / "z.npy", latents)
        np.save(tmp_path / "z_labels.npy", np.arange(4, dtype=np.int32))
        data, lines = load(tmp_path, tmp_path / "z.npy", size=(16, 24))
        assert data.latents and data.shape == (4, 16, 24) and isinstance(data.images, np.memmap)
        assert data.images.dtype == dtype and (data.images == latents).all() and data.labels.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="--gray"):
        load(tmp_path, tmp_path / "z.npy", size=(16, 24), gray=True)


# -- CIFAR-10

NAMES = [f"class{i}" for i in range(10)]


def make_cifar10(folder, layout, rows=4):
    """A tiny CIFAR-10 -> folder of its batches, images (N, 32, 32, 3), labels (N,)."""
    images, labels = noise_array(5 * rows, 32, 32, 3), np.arange(5 * rows) % 10
    root = folder / f"cifar-10-batches-{layout}"
    root.mkdir(parents=True)
    for i in range(5):
        rows_of = slice(i * rows, (i + 1) * rows)
        data = np.ascontiguousarray(images[rows_of].transpose(0, 3, 1, 2)).reshape(rows, 3072)
        if layout == "py":
            batch = {b"data": data, b"labels": labels[rows_of].tolist()}
            (root / f"data_batch_{i + 1}").write_bytes(pickle.dumps(batch, protocol=2))
        else:
            records = np.concatenate([labels[rows_of, None].astype(np.uint8), data], axis=1)
            (root / f"data_batch_{i + 1}.bin").write_bytes(records.tobytes())
    if layout == "py":
        meta = {b"label_names": [name.encode() for name in NAMES]}
        (root / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    else:
        (root / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    return root, images, labels


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["py", "bin"])
def test_cifar10_layouts(tmp_path, layout, packed):
    root, images, labels = make_cifar10(tmp_path / "made", layout)
    where = [root, root.parent]
    if packed:
        where = [tmp_path / "archives"]
        where[0].mkdir()
        with tarfile.open(where[0] / f"cifar-10-{'python' if layout == 'py' else 'binary'}.tar.gz", "w:gz") as tar:
            tar.add(root, root.name)
    for folder in where:
        data, lines = load(tmp_path, "cifar10", data_dir=str(folder))
        assert (data.images == images).all() and (data.labels == labels).all() and data.classes == NAMES
        assert ("not the official archive" in lines[0]) == packed
    assert load(tmp_path, "cifar10", data_dir=str(where[0]), size=(16, 16))[0].shape == (3, 16, 16)


def test_cifar10_python_2_pickle(tmp_path):
    """The bytes that Python 2 wrote: its strings are the pickle's SHORT_BINSTRING and BINSTRING."""
    def text(value):
        return b"T" + struct.pack("<i", len(value)) + value
    pixels = noise_array(2, 3072)
    raw = (b"\x80\x02}(" + text(b"labels") + b"](K\x03K\x07e" + text(b"data")
           + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
           + b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|")
           + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + text(pixels.tobytes()) + b"tbu.")
    read, labels = train.read_batch("data_batch_1", raw)
    assert (read == pixels).all() and labels.tolist() == [3, 7]


class Malice:
    def __reduce__(self):
        return os.system, ("touch harm",)


@pytest.mark.parametrize("name", ["data_batch_2", "batches.meta"])
def test_malicious_pickle_is_refused_by_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    root, _, _ = make_cifar10(tmp_path / "made", "py")
    (root / name).write_bytes(pickle.dumps({b"data": Malice(), b"labels": [1]}, protocol=2))
    with pytest.raises(ValueError, match="posix.system|nt.system"):
        load(tmp_path, "cifar10", data_dir=str(root))
    assert not (tmp_path / "harm").exists()


def test_torn_and_wrong_cifar10_is_refused(tmp_path):
    def refused(root, complaint):
        with pytest.raises(ValueError, match=complaint) as error:
            load(tmp_path, "cifar10", data_dir=str(root))
        assert "\n" not in str(error.value)
    for layout, last in [("py", "data_batch_5"), ("bin", "data_batch_5.bin")]:
        root, _, _ = make_cifar10(tmp_path / layout, layout)
        whole = (root / last).read_bytes()
        (root / last).write_bytes(whole[:-100])
        refused(root, "not a whole CIFAR-10")
        (root / last).unlink()
        refused(root, f"{last} .*missing")
    (root / last).write_bytes(whole[:3073])
    refused(root, "4, 4, 4, 4, 1 images")
    (root / last).write_bytes(b"\x0a" + whole[1:])                      # label 10
    refused(root, "0 to 9")
    root = tmp_path / "torn"
    root.mkdir()
    with tarfile.open(root / "whole.tar.gz", "w:gz") as tar:
        tar.add(make_cifar10(tmp_path / "packed", "py")[0], "cifar-10-batches-py")
    (root / "cifar-10-python.tar.gz").write_bytes((root / "whole.tar.gz").read_bytes()[:-20_000])
    refused(root, "cifar-10-python.tar.gz")
    assert not any((tmp_path / "cache").iterdir())


def test_cifar10_is_fetched_checked_and_kept(tmp_path, monkeypatch):
    site = tmp_path / "site.tar.gz"
    with tarfile.open(site, "w:gz") as tar:
        tar.add(make_cifar10(tmp_path / "made", "py")[0], "cifar-10-batches-py")
    monkeypatch.setattr(train, "CIFAR10_URL", (tmp_path / "no network").as_uri())
    with pytest.raises(OSError, match="cifar-10-python.tar.gz is not there .* or give --data-dir"):
        load(tmp_path, "cifar10")
    monkeypatch.setattr(train, "CIFAR10_URL", site.as_uri())
    with pytest.raises(OSError, match="md5"):
        load(tmp_path, "cifar10")
    assert list((tmp_path / "data").iterdir()) == []
    monkeypatch.setitem(train.CIFAR10_MD5, "cifar-10-python.tar.gz", sample.checksum(site, "md5"))
    assert len(load(tmp_path, "cifar10")[0].images) == 20
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-python.tar.gz"]


# -- digits

def test_digits_are_balanced_and_a_function_of_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "DIGIT_COUNT", 300)
    first, _ = load(tmp_path, "digits")
    again, _ = load(tmp_path, "digits", cache=str(tmp_path / "elsewhere"))
    other, _ = load(tmp_path, "digits", seed=1)
    assert first.shape == (3, 32, 32) and first.classes == list("0123456789")
    assert np.bincount(first.labels).tolist() == [30] * 10
    assert (first.images == again.images).all() and (first.images != other.images).any((1, 2, 3)).all()
    assert load(tmp_path, "digits", size=(16, 48), gray=True)[0].shape == (1, 16, 48)


def test_digits_are_legible_and_whole():
    """Ink and ground differ clearly, and no ink touches the border."""
    numbers = np.random.default_rng(0).uniform(size=(300, 13))
    for i, row in enumerate(numbers):
        pixels = np.asarray(train.draw_digit(i % 10, row.tolist(), 32, 32).convert("L"), np.int64)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert np.ptp(border) < 80 and np.abs(pixels - np.median(border)).max() > 60, i


@pytest.mark.parametrize("labels", [[0, 1], [0, 1, 2], [0, -1, 1], [[0, 1, 1]]])
def test_a_source_with_labels_that_do_not_fit_is_refused(labels):
    """One too few, one that would mean "no label", a negative one, the wrong shape."""
    with pytest.raises(ValueError, match="3 images of 2 classes need as many labels from 0 to 1"):
        train.Data(np.zeros((3, 8, 8, 3), np.uint8), np.array(labels), ["a", "b"])


def test_a_source_of_one_function_is_loaded_cached_and_mirrored_as_its_table_says(monkeypatch, tmp_path):
    """The recipe of the README: a loader that returns arrays, and one line."""
    def load_mine(args, say):
        images, labels = np.full((6, 4, 4), 7, np.uint8), np.arange(6) % 2
        return train.cached_images(args, [("mine", 1)], 6, lambda: train.array_pictures(images, labels, ["a", "b"]), say)

    for mirrored in False, True:
        monkeypatch.setitem(train.SOURCES, "mine", (load_mine, mirrored))
        args = train.parse_args(["--data", "mine", "--size", "8", "--data-dir", "elsewhere", "--cache", str(tmp_path / "cache")])
        data = train.load_data_once(args, lambda line: None)
        assert data.images.shape == (6, 8, 8, 3) and (data.images == 7).all() and data.classes == ["a", "b"] and args.flip == mirrored
