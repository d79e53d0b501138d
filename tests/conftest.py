"""What several test files share.   python -m pytest tests"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)                                # for networks this small, more threads only wait


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Run a long list of tests in two processes, which takes two cores half the time.   -> True, or None: pytest's own loop runs

    Both take the next test from one pipe. The second process writes its reports into a file, from which the first one hands them
    to pytest as its own, so that dots, counts, tracebacks and the exit status are those of one run.
    """
    items, config = session.items, session.config
    if len(items) < 200 or os.cpu_count() == 1 or session.testsfailed or any(map(config.getoption, ("maxfail", "usepdb", "collectonly"))):
        return None
    config._tmp_path_factory.getbasetemp()                                  # one folder for both
    queue, end = os.pipe()
    os.write(end, b"".join(k.to_bytes(2, "big") for k in range(len(items))))
    os.close(end)

    def run(after_each):
        number = os.read(queue, 2)
        while number:
            item, number = items[int.from_bytes(number, "big")], os.read(queue, 2)
            config.hook.pytest_runtest_protocol(item=item, nextitem=items[int.from_bytes(number, "big")] if number else None)
            after_each()

    with tempfile.NamedTemporaryFile("w") as reports, open(reports.name) as replay:
        second, torn = os.fork(), ""
        if second == 0:
            try:
                config.pluginmanager.unregister(name="terminalreporter")
                captured = config.pluginmanager.getplugin("capturemanager")
                captured.stop_global_capturing(), captured.start_global_capturing(), captured.suspend_global_capture()
                config.pluginmanager.register(SimpleNamespace(pytest_runtest_logreport=lambda report: print(json.dumps(
                    config.hook.pytest_report_to_serializable(config=config, report=report)), file=reports, flush=True)))
                run(lambda: None)
                os._exit(0)
            finally:
                os._exit(1)

        def hand_over():
            nonlocal torn
            *lines, torn = (torn + replay.read()).split("\n")
            for data in map(json.loads, lines):
                config.hook.pytest_runtest_logreport(report=config.hook.pytest_report_from_serializable(config=config, data=data))

        run(hand_over)
        code = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
        hand_over()
    if code:
        raise session.Interrupted(f"the second process of tests ended with {code}")
    if session.testsfailed:
        raise session.Failed(f"{session.testsfailed} tests failed")
    return True


# One process imports torch once and forks for every command: each still runs as a process of its own, as a user runs it
SERVER = """
import json, os, resource, runpy, signal, sys, time
sys.path.insert(0, sys.argv[1])
import torch, torch._dynamo, sample, train
torch.set_num_threads(1)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in (1, "stdout"), (2, "stderr"):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(job["cwd"])
        os.environ.update(job["env"])
        if job["largest_file"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
        if job["memory"]:
            held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + job["memory"],) * 2)
        sys.argv, code = job["command"], 1
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    if job["kill_after"]:
        time.sleep(job["kill_after"])
        os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def command_server():
    with subprocess.Popen([sys.executable, "-c", SERVER, str(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        yield server
        server.stdin.close()


def run_command(server, folder, file, *arguments, kill_after=None, largest_file=None, memory=None, **env):
    """Run one of the project's commands in a folder, as a process of its own.   -> CompletedProcess

    kill_after: seconds until SIGKILL   largest_file: bytes after which a write fails, as on a full disk
    memory: bytes that it may take beyond those it starts with   env: variables
    """
    job = {"command": [str(ROOT / file), *map(str, arguments)], "cwd": str(folder), "env": env, "kill_after": kill_after,
           "largest_file": largest_file, "memory": memory, "stdout": str(folder / "stdout"), "stderr": str(folder / "stderr")}
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    return subprocess.CompletedProcess(job["command"], code, (folder / "stdout").read_text(), (folder / "stderr").read_text())


@pytest.fixture
def command(command_server, tmp_path):
    """A function that runs one of the project's commands in an empty folder: command("train.py", "--steps", "3")."""
    return functools.partial(run_command, command_server, tmp_path)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def t(*values):
    return torch.tensor(values)


def watch_skips(model, x, argument):
    """What every encoder block gives, what every decoder block takes as that argument, and gives, in one forward pass."""
    given, taken, decoded = [], [], []
    hooks = [block.register_forward_hook(lambda module, inputs, out: given.append(out)) for block in model.encoder]
    for block in model.decoder:
        hooks.append(block.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[argument])))
        hooks.append(block.register_forward_hook(lambda module, inputs, out: decoded.append(out)))
    with torch.no_grad():
        model(x, torch.full((len(x),), 500))
    for hook in hooks:
        hook.remove()
    return given, taken, decoded


def read_picture(path):
    """A picture that is whole, with its file closed."""
    with Image.open(path) as picture:
        picture.load()
    return picture


def save_torchscript(module, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)                     # sample.py reads the format, so the tests write it
        torch.jit.script(module).save(str(path))


def make_pictures(folder):
    """An .npz with 24 images of 8x8 pixels in three classes that are easy to tell apart.   -> its path"""
    rng, labels = np.random.default_rng(0), np.arange(24) % 3
    images = rng.integers(0, 60, (24, 8, 8, 3), dtype=np.uint8)
    for image, label in zip(images, labels):
        image[..., label] += 180
    np.savez(folder / "pictures.npz", arr_0=images, arr_1=labels)
    return folder / "pictures.npz"


def encrypt(archive, path):
    """Copy a zip with all its members marked as encrypted, which zipfile and numpy refuse to read without a password."""
    data = bytearray(archive.read_bytes())
    for signature, flags in (b"PK\3\4", 6), (b"PK\1\2", 8):                   # local and central headers
        start = data.find(signature)
        while start >= 0:
            data[start + flags] |= 1
            start = data.find(signature, start + 4)
    path.write_bytes(data)


@pytest.fixture
def pictures(tmp_path):
    return make_pictures(tmp_path)


@pytest.fixture(scope="session")
def trained(command_server, tmp_path_factory):
    """A folder with a class-conditional run, one without label dropout and an unconditional one, made once."""
    folder = tmp_path_factory.mktemp("trained")
    tiny = ("--data", make_pictures(folder), "--size", "8", "--channels", "8", "--channel-mult", "1,2", "--attention", "4", "--heads", "2",
            "--batch-size", "8", "--steps", "2", "--sample-every", "0", "--device", "cpu", "--precision", "fp32", "--lr", "0.02", "--warmup", "0")
    for name, flags in ("run", []), ("always", ["--label-dropout", "0"]), ("plain", ["--unconditional"]):
        done = run_command(command_server, folder, "train.py", *tiny, *flags, "--out", name)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    """The runs of `trained`, copied to where `command` runs."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def randomize():
    """A function that fills every parameter of a module with noise, the ones that start at zero too, and returns it."""
    def fill(module, seed=0):
        generator = torch.Generator().manual_seed(seed)
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            if p.dim() > 1:
                p.data = noise / p[0].numel() ** 0.5
            else:
                p.data = 0.2 * noise + name.endswith("weight")                  # norms near 1, biases near 0
        return module
    return fill


@pytest.fixture
def run_lesson(command):
    """A function that runs `python <module>.py` from an empty folder and returns what it printed."""
    def run(module):
        done = command(f"{module}.py")
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout
    return run
