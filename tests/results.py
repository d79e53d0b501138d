"""The experiments behind the README's results: every arm is one command of train.py or sample.py.

    python tests/results.py weighting --features NETWORK        # run what is missing, then draw what there is
    python tests/results.py weighting --draw                    # draw alone
    python tests/results.py weighting --print                   # the commands
    python tests/results.py solvers --features NETWORK --run runs/cifar-unet

NETWORK is a TorchScript network as for `sample.py --features`, the Inception network without it. Runs go to runs/results/ARM; one
that was stopped goes on. What the pictures need of the logs is kept beside this file, in results/ARM/, so that they can be drawn
again without the runs.
"""

import csv
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import sample
import train
from scaling import oscillation

KEPT = Path(__file__).resolve().parent / "results"
COMMON = "--data cifar10 --precision fp32"
QUALITY = "--log-every 50 --steps 2000 --lr 1e-3 --ema 0.999 --sample-every 2000 --save-every 400 --fid-every 400 --fid-count 1000"

PROBED = "--log-every 5 --probe 5 --sample-every 0 --save-every 100"
NORMAL = "--steps 400 --batch-size 32 --lr 1e-3"
HARD = "--steps 300 --batch-size 8 --warmup 0 --clip inf"                       # a quarter of the batch, and a higher learning rate
DEEP_UNET = "--channels 16 --channel-mult 1,2,2 --blocks 3"                     # 12 long skips
DEEP_UVIT = "--backbone uvit --patch 4 --width 96 --depth 12 --heads 3"         # 6 long skips
SCALINGS = {"none": "none", "sqrt2": "sqrt2", "cs-0.9": "cs --kappa 0.9", "cs": "cs", "cs-0.5": "cs --kappa 0.5", "ls": "ls", "ls-separate": "ls-separate"}
SMOOTH = 10             # rows of log.csv over which losses are averaged

ARMS = {
    "constant": f"{QUALITY} --weighting constant",
    "snr": f"{QUALITY} --weighting snr",
    "max-snr": f"{QUALITY} --weighting max-snr --gamma 1",
    "min-snr": f"{QUALITY} --weighting min-snr",
    "ugd": f"{QUALITY} --weighting ugd",
    "min-snr-1": f"{QUALITY} --weighting min-snr --gamma 1",
    "min-snr-10": f"{QUALITY} --weighting min-snr --gamma 10",
    "min-snr-20": f"{QUALITY} --weighting min-snr --gamma 20",
    "eps-snr": f"{QUALITY} --prediction eps --weighting snr",
    "eps-min-snr": f"{QUALITY} --prediction eps --weighting min-snr",
    "v-snr+1": f"{QUALITY} --prediction v --weighting snr+1",
    "v-min-snr": f"{QUALITY} --prediction v --weighting min-snr",
    "neither": f"{QUALITY} --weighting constant --skip-scaling none",           # the arms above have --skip-scaling ls, the default
    "min-snr-none": f"{QUALITY} --weighting min-snr --skip-scaling none",
}
SCALED = {
    "unet": f"{DEEP_UNET} {NORMAL}",
    "unet-hard": f"{DEEP_UNET} {HARD} --lr 1e-2",
    "unet-harder": f"{DEEP_UNET} {HARD} --lr 3e-2",
    "uvit": f"{DEEP_UVIT} {NORMAL}",
    "uvit-hard": f"{DEEP_UVIT} {HARD} --lr 3e-3",
    "uvit-harder": f"{DEEP_UVIT} {HARD} --lr 1e-2",
}
SCALED |= {f"{name}-seed-1": f"{SCALED[name]} --seed 1" for name in ("unet-hard", "unet-harder")}
SEEDS = range(1, 4)     # beside 0; in bf16, which spares time where it is native
for seed in SEEDS:
    ARMS |= {f"{arm}-seed-{seed}": f"{ARMS[arm]} --seed {seed} --precision bf16" for arm in ("constant", "min-snr")}
for name, flags in SCALED.items():
    ARMS |= {f"{name}-{mode}": f"{PROBED} {flags} --skip-scaling {choice}" for mode, choice in SCALINGS.items()}

# what is drawn together; the first is the plain one, with which the others are compared
GROUPS = {
    "weighting": ["constant", "snr", "max-snr", "min-snr", "ugd"],
    "gamma": ["constant", "min-snr-1", "min-snr", "min-snr-10", "min-snr-20"],
    "eps": ["eps-snr", "eps-min-snr"],
    "v": ["v-snr+1", "v-min-snr"],
    "together": ["neither", "constant", "min-snr-none", "min-snr"],             # neither, scaling alone, weighting alone, both
    "seeds": ["constant", "min-snr", *(f"{arm}-seed-{seed}" for seed in SEEDS for arm in ("constant", "min-snr"))],
    **{name: [f"{name}-{mode}" for mode in SCALINGS] for name in SCALED},
}


# solver -> numbers of steps that make 5, 9, 15, 25 and 35 network calls
SOLVER_STEPS = {"heun": (3, 5, 8, 13, 18), "euler": (5, 9, 15, 25, 35), "dpm++2m": (5, 9, 15, 25, 35)}


def train_command(arm, args):
    """The command line of one arm, as a list of words."""
    out = Path(args.runs) / arm
    words = [sys.executable, str(ROOT / "train.py"), *COMMON.split(), *ARMS[arm].split(),
             "--data-dir", args.data_dir, "--cache", args.cache, "--out", str(out)]
    if "--fid-every" in words and args.features:
        words += ["--features", args.features]
    return [*words, "--resume"] if (out / "checkpoint.pt").exists() else words


def keep_logs(arm, args):
    """Copy what the pictures need of a run's logs; of log.csv about 100 rows."""
    run, kept = Path(args.runs) / arm, KEPT / arm
    if not (run / "log.csv").exists():
        return
    kept.mkdir(parents=True, exist_ok=True)
    with open(run / "log.csv", newline="") as file:
        header, *rows = csv.reader(file)
    wanted = [k for k, name in enumerate(header) if name in train.COLUMNS or name.startswith("decoder_norm_")]
    thin = rows[::-1][::max(1, len(rows) // 100)][::-1]                     # the last row stays
    (kept / "log.csv").write_text("".join(",".join(row[k] for k in wanted) + "\n" for row in [header, *thin]))
    for name in "fid.csv", "pareto.csv":
        if (run / name).exists():
            (kept / name).write_text((run / name).read_text())


def steps_to_reach(steps, values, goal):
    """Steps at which a falling quantity first reaches a goal, on the straight line between two values; None if it never does."""
    for step, value, next_step, next_value in zip(steps, values, steps[1:], values[1:]):
        if next_value <= goal < value:
            return step + (next_step - step) * (value - goal) / (value - next_value)
    return steps[0] if values[0] <= goal else None


def reached(curves):
    """When each curve, (steps, values), first reaches the last value of the first one, in words.   {arm: curve} -> {arm: text}"""
    goal = next(iter(curves.values()))[1][-1]
    steps = {arm: steps_to_reach(*curve, goal) for arm, curve in curves.items()}
    plain = next(iter(steps.values()))
    return {arm: "not reached" if step is None else f"{step:,.0f} ({plain / step:.2f}x)" for arm, step in steps.items()}


def kept_logs(group, file, columns):
    """{arm: log} of the arms of a group that have got somewhere, the plain one first."""
    logs = {arm: train.read_log(KEPT / arm / file, columns) for arm in GROUPS[group] if (KEPT / arm / file).exists()}
    logs = {arm: log for arm, log in logs.items() if len(log["step"]) >= (1 if file == "fid.csv" else SMOOTH)}
    if GROUPS[group][0] not in logs:
        sys.exit(f"{group}: there is no log of its plain arm, {GROUPS[group][0]}, to compare with yet")
    return logs


def draw_quality(group):
    """Print a table of the distances and draw them along the steps."""
    logs = kept_logs(group, "fid.csv", train.FID_COLUMNS)
    times = reached({arm: (log["step"], log["fid"]) for arm, log in logs.items()})
    print("| distance of |" + "".join(f" {step:,.0f} steps |" for step in next(iter(logs.values()))["step"]) + " steps to the first row's last |")
    for arm, log in logs.items():
        print(f"| {arm} |" + "".join(f" {fid:.2f} |" for fid in log["fid"]) + f" {times[arm]} |")
    return [{"title": "Frechet distance of EMA samples", "x": "steps", "log_y": True,
             "lines": {arm: (log["step"], log["fid"]) for arm, log in logs.items()}}]


def draw_seeds(group):
    """Print for each seed by how much min-snr is ahead of constant, and the means of both; draw them along the steps."""
    logs, arms = kept_logs(group, "fid.csv", train.FID_COLUMNS), GROUPS[group]
    steps = logs[arms[0]]["step"]
    pairs = {f"seed {seed}": [logs[arm]["fid"] for arm in pair] for seed, pair in enumerate(zip(arms[::2], arms[1::2]))
             if all(arm in logs and logs[arm]["step"] == steps for arm in pair)}
    leads = {seed: np.subtract(*pair) for seed, pair in pairs.items()}
    plain, other = np.mean([*pairs.values()], 0)
    errors = np.std([*leads.values()], 0, ddof=1) / len(leads)**0.5
    print(f"| {len(leads)} seeds |" + "".join(f" {step:,.0f} steps |" for step in steps))
    for name, values in {"constant, mean": plain, "min-snr, mean": other, "min-snr ahead by": plain - other, "standard error": errors, **leads}.items():
        print(f"| {name} |" + "".join(f" {value:.2f} |" for value in values))
    return [{"title": f"Frechet distance, mean of {len(leads)} seeds", "x": "steps", "log_y": True,
             "lines": {"constant": (steps, plain), "min-snr": (steps, other)}},
            {"title": "min-snr ahead of constant by", "x": "steps", "lines": {seed: (steps, lead) for seed, lead in leads.items()}}]


def smooth(values):
    """Running means over SMOOTH rows of a log."""
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid")


def draw_scaling(group):
    """Print a table of loss, features and oscillation, a column for each scaling, and draw them along the steps."""
    logs = {arm.removeprefix(f"{group}-"): log for arm, log in kept_logs(group, "log.csv", train.COLUMNS).items()}
    losses = {mode: (smooth(log["step"]), smooth(log["loss"])) for mode, log in logs.items()}
    norms = {mode: [log[name] for name in log if name.startswith("decoder_norm_")] for mode, log in logs.items()}
    jumps = {mode: [oscillation(values) for values in blocks] for mode, blocks in norms.items()}
    times, end = reached(losses), max(steps[-1] for steps, _ in losses.values())
    ends = {mode: f"{loss[-1]:.4f}" if steps[-1] == end else f"nan after {logs[mode]['step'][-1]:.0f}" for mode, (steps, loss) in losses.items()}
    rows = {group: logs, "loss of the last 50 steps": ends,
            "steps to the last loss of none": times,
            "outermost features, largest norm": {mode: f"{max(blocks[0]):.3g}" for mode, blocks in norms.items()},
            "their oscillation": {mode: f"{jump[0]:.3f}" for mode, jump in jumps.items()},
            "oscillation, mean of blocks": {mode: f"{sum(jump) / len(jump):.3f}" for mode, jump in jumps.items()}}
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(mode if row is logs else row[mode] for mode in logs) + " |")
    return [{"title": f"{group}: {title}", "x": "steps", "log_y": True, "lines": lines} for title, lines in (
        ("weighted loss, mean of 50 steps", losses),
        ("norm of outermost decoder features", {mode: (log["step"], log["decoder_norm_0"]) for mode, log in logs.items()}),
        ("gradient norm", {mode: (log["step"], log["grad_norm"]) for mode, log in logs.items()}))]


def run_arm(arm, args):
    words = train_command(arm, args)
    if args.print:
        print(shlex.join(words))
    elif not args.draw:
        if subprocess.run(words).returncode not in (0, 1):                      # 1: it diverged, which is a result, too
            sys.exit(f"{arm} ended early: the same command goes on")
        keep_logs(arm, args)


def run_solvers(args):
    """Fréchet distance of 1,000 images for each solver and number of steps, into results/solvers.csv; then the picture."""
    table = KEPT / "solvers.csv"
    rows = list(csv.DictReader(table.read_text().splitlines())) if table.exists() else []
    rows = [row for row in rows if row["run"] == Path(args.run).name]
    done = [(row["solver"], int(row["steps"])) for row in rows]
    for solver, steps in [(solver, steps) for solver, choices in SOLVER_STEPS.items() for steps in choices]:
        out = Path(args.runs) / "solvers" / f"{solver}-{steps}.npz"
        words = [sys.executable, str(ROOT / "sample.py"), args.run, "--solver", solver, "--steps", str(steps), "--count", "1000", "--precision", "fp32",
                 "--out", str(out), "--fid", "train", "--cache", args.cache, *(["--features", args.features] if args.features else [])]
        if args.print:
            print(shlex.join(words))
        elif not args.draw and (solver, steps) not in done:
            out.parent.mkdir(parents=True, exist_ok=True)
            said = subprocess.run(words, stdout=subprocess.PIPE, text=True)
            if said.returncode:
                sys.exit(f"{solver} with {steps} steps ended early: the same command goes on")
            fid, precision, recall = re.search(r"FID (\S+), precision (\S+), recall (\S+)", said.stdout).groups()
            rows.append({"run": Path(args.run).name, "solver": solver, "steps": steps, "calls": 2 * steps - 1 if solver == "heun" else steps,
                         "fid": fid, "precision": precision, "recall": recall})
            KEPT.mkdir(exist_ok=True)
            table.write_text("".join(",".join(map(str, line)) + "\n" for line in [rows[0], *(row.values() for row in rows)]))
    if not args.print:
        draw_solvers(rows, args.run)


def draw_solvers(rows, run):
    if not rows:
        sys.exit(f"solvers: nothing was measured of {run} yet")
    lines = {solver: [row for row in rows if row["solver"] == solver] for solver in SOLVER_STEPS}
    sample.save_picture(sample.line_chart([
        {"title": title, "x": "network calls for an image",
         "lines": {solver: ([int(row["calls"]) for row in own], [float(row[column]) for row in own]) for solver, own in lines.items()}}
        for column, title in (("fid", "Frechet distance"), ("recall", "recall"))]), KEPT / "solvers.png")
    print(f"look at {KEPT / 'solvers.png'}")


def main():
    p = sample.Parser(prog="results.py", description=__doc__.splitlines()[0])
    p.add_argument("group", nargs="+", choices=[*GROUPS, "solvers"], help="experiments")
    p.add_argument("--draw", action="store_true", help="run nothing")
    p.add_argument("--print", action="store_true", help="print the commands and stop")
    p.add_argument("--features", metavar="NETWORK", help="TorchScript network for the distances (default: Inception)")
    p.add_argument("--run", default="runs/cifar-unet", help="of solvers: what to draw from")
    p.add_argument("--runs", default="runs/results", metavar="DIR", help="where the run folders are")
    p.add_argument("--data-dir", default="cifar10", metavar="DIR", help="as of train.py")
    p.add_argument("--cache", default="cache", metavar="DIR", help="as of train.py")
    args = p.parse_args()
    if args.features and not Path(args.features).is_file():
        p.error(f"--features {args.features} does not exist")
    if "solvers" in args.group:
        run_solvers(args)
    for group in [group for group in args.group if group != "solvers"]:
        for arm in GROUPS[group]:
            run_arm(arm, args)
        if not args.print:
            draw = draw_seeds if group == "seeds" else draw_quality if "--fid-every" in ARMS[GROUPS[group][0]] else draw_scaling
            panels = draw(group)
            sample.save_picture(sample.line_chart(panels), KEPT / f"{group}.png")
            print(f"look at {KEPT / group}.png")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)           # `| head` ends it quietly
    main()
