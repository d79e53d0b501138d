"""README.md keeps its word: its commands are ones that the programs take, its flags exist, its pictures and links are there."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

import sample
import train
import weighting

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands():
    """Every command line of the shell blocks, with continued lines joined, and without its comment."""
    lines = "".join(text for kind, text in BLOCKS if kind == "sh").replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def python_commands(file):
    """The arguments of every command that runs this file, behind variables and torchrun."""
    return [words[words.index(file) + 1:] for words in commands() if file in words]


def test_there_are_commands_for_every_program():
    files = {word for words in commands() for word in words if word.endswith(".py")}
    assert files >= {"train.py", "sample.py", "weighting.py", "scaling.py"}, files
    assert all((ROOT / file).exists() for file in files)


@pytest.mark.parametrize("arguments", python_commands("train.py"), ids=" ".join)
def test_train_takes_these_flags(arguments):
    args = train.build_parser().parse_args([word for word in arguments if word != "..."])
    if not (args.resume or args.compare):
        train.parse_args([word for word in arguments if word != "..."])


@pytest.mark.parametrize("arguments", python_commands("sample.py"), ids=" ".join)
def test_sample_takes_these_flags(arguments):
    args = sample.build_parser().parse_args(arguments)
    assert args.run or args.weights


@pytest.mark.parametrize("name", ["weighting", "scaling"])
def test_the_lessons_on_a_run_take_these_flags(name, command):
    """They are asked about a run that is not there, and get as far as missing it."""
    for arguments in python_commands(f"{name}.py"):
        if arguments:
            done = command(f"{name}.py", *arguments)
            assert done.returncode == 2 and arguments[arguments.index("--run") + 1] in done.stderr


@pytest.mark.parametrize("name", ["diffusion", "weighting", "scaling", "unet", "uvit"])
def test_a_lesson_whose_reader_leaves_ends_quietly(name, tmp_path):
    with subprocess.Popen([sys.executable, ROOT / f"{name}.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}) as lesson:
        lesson.stdout.close()
        assert lesson.stderr.read() == ""


@pytest.mark.parametrize("name", ["diffusion", "weighting", "scaling", "unet", "uvit"])
def test_lessons_refuse_what_they_do_not_know(name, command):
    done = command(f"{name}.py", "--foo")
    assert done.returncode == 2 and done.stdout == "" and "--foo" in done.stderr and done.stderr.count("\n") == 1


def test_flags_in_the_text_are_flags_of_the_programs():
    known = {option for module in (train, sample) for action in module.build_parser()._actions for option in action.option_strings}
    known |= {"--run", "--bins", "--tune", "--standalone", "--nproc_per_node"}          # of the lessons and of torchrun
    known |= set(re.findall(r"\"(--[a-z-]+)\"", "".join((ROOT / "tests" / f"{name}.py").read_text() for name in ("bench", "results"))))
    named = set(re.findall(r"--[a-z][a-z0-9_-]+", README))
    assert named - known == set()
    listed = re.search(r"^## Flags\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)[1]
    flags = {option for action in train.build_parser()._actions for option in action.option_strings if option.startswith("--")}
    flags -= {flag for flag in flags if flag.startswith("--no-") and f"--{flag[5:]}" in flags} | {"--help"}
    assert flags - set(re.findall(r"--[a-z][a-z0-9-]+", listed)) == set()


def test_links_and_pictures_are_there():
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", README, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_python_blocks_compile():
    programs = [compile(text, "README.md", "exec") for kind, text in BLOCKS if kind == "python"]
    assert programs


def added_by_recipes():
    """The names that the recipes add to the tables, for who has adopted one."""
    lines = [line for kind, text in BLOCKS if kind == "diff" for line in text.splitlines()]
    new, old = ({name for line in lines if (line[:1] == "+") == is_new for name in re.findall(r'"([^" ]+)"', line)} for is_new in (True, False))
    return new - old


def test_every_name_of_the_tables_of_choices_is_explained():
    for name in [*weighting.WEIGHTINGS, *weighting.PARETO_SOLVERS, *train.PRESETS, *sample.SOLVERS, *train.SCHEDULES, *train.MODES]:
        assert f"`{name}`" in README or f" {name}`" in README or name in added_by_recipes(), f"README.md does not mention {name}"


def apply_diff(folder, diff):
    """Apply one recipe: the file's name, then one hunk whose context stands there once, unless it is applied already."""
    name, *lines = diff.rstrip("\n").split("\n")
    path = folder / name.removeprefix("--- ")
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in (kind, " ", "")) for kind in "-+")
    text = path.read_text(encoding="utf-8")
    if after in text:
        return
    assert text.count(before) == 1, f"{name} does not hold the context of its recipe"
    path.write_text(text.replace(before, after), encoding="utf-8")


def test_the_recipes_work(tmp_path):
    """All five changes together, in a copy: each new name is a choice of its flag, trains, is saved and samples."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    recipes = [text for kind, text in BLOCKS if kind == "diff"]
    for diff in recipes:
        apply_diff(tmp_path, diff)
    assert len(recipes) == 6

    def run(*words):
        return subprocess.Popen([sys.executable, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    tiny = "--size 8 --channels 8 --channel-mult 1,2 --attention 4 --heads 2 --batch-size 4 --steps 2 --sample-every 0 --device cpu --precision fp32"
    trained = [run("train.py", *tiny.split(), *"--data stripes --weighting root-snr --schedule sigmoid --skip-scaling scalar --out run".split()),
               run("train.py", *tiny.split(), *"--data stripes --skip-scaling root --out constant".split())]
    errors = [command.communicate()[1] for command in trained]
    assert [command.returncode for command in trained] == [0, 0], errors
    drawn = run("sample.py", "run", *"--solver dpm2 --count 2 --steps 3 --labels upright --device cpu --precision fp32".split())
    errors = drawn.communicate()[1]
    assert drawn.returncode == 0, errors
    weights = sample.load_checkpoint(tmp_path / "run")["model"]
    assert [name for name in weights if "skip_scaling" in name] == [f"skip_scaling.networks.{i}.kappa" for i in range(4)]


def test_the_sizes_of_the_recipes_are_right():
    section = re.search(r"^## Changing it\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)[1]
    sizes = [sum(line.startswith("+") for line in text.splitlines()) for kind, text in BLOCKS if kind == "diff"]
    promised = [int(number) for title in re.findall(r"^\*\*A.*?\*\*", section, re.MULTILINE) for number in re.findall(r"\d+", title)]
    assert sizes == promised
