"""Runs every command of pmoe-bench on tiny sizes and checks its JSON, its verdicts and its exit status."""
import argparse
import json
import os
import subprocess
import sys

KEYS = {
    "name", "dtype", "T", "H", "F", "E", "K", "threads", "ranks", "transport", "routing", "median_ms", "min_ms", "floor_ms", "twin_ms",
    "copy_ms", "share_floor", "share_twin", "share_copy", "gflop_per_s", "gb_per_s", "peak_bytes", "saved_bytes", "error", "check", "gemm",
    "gemm_isa", "gemm_bf16", "gemm_warning",
}
NAMES = {
    "layer": ["layer_forward", "layer_backward", "layer"],
    "gate": ["gate_forward", "gate_backward"],
    "rows": ["rows_gather", "rows_combine", "rows_combine_bwd", "rows_dispatch_bwd"],
    "experts": ["experts_forward", "experts_backward", "experts"],
    "exchange": ["exchange_plan", "exchange_dispatch", "exchange_combine", "exchange_transport"],
}
SIZES = ["-T", "37", "-H", "24", "-E", "5", "-K", "2", "-n", "2", "-w", "1", "--threads", "2"]
MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def expect(condition, what):
    if not condition:
        sys.exit(f"smoke: {what}")


def run(command, status=0):
    environment = {**os.environ, **MPI_ENVIRONMENT}
    if "mpi" in os.path.basename(command[0]):
        environment["ASAN_OPTIONS"] = "detect_leaks=0"  # what an MPI keeps to its end is not ours to look for
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    shown = " ".join(command)
    expect(done.returncode == status, f"{shown}: exit status {done.returncode}; {status} was expected\n{done.stdout}{done.stderr}")
    return done


def check_lines(text, names, ranks, shown):
    results = [json.loads(line) for line in text.splitlines()]
    expect([r["name"] for r in results] == names, f"{shown}: names are {[r['name'] for r in results]}")
    for r in results:
        expect(KEYS <= r.keys(), f"{shown}: {sorted(KEYS - r.keys())} missing")
        expect(r["check"] == "ok" and r["error"] is not None, f"{shown}: {r['name']} check {r['check']}, error {r['error']}")
        expect(r["median_ms"] > 0 and r["min_ms"] <= r["median_ms"], f"{shown}: {r['name']} takes {r['median_ms']} ms")
        expect(r["ranks"] == ranks and r["T"] == 37, f"{shown}: {r['ranks']} ranks, T {r['T']}")
        for ceiling in ("floor", "twin", "copy"):
            if r[f"{ceiling}_ms"] is not None:
                share = r[f"{ceiling}_ms"] / r["median_ms"]
                expect(abs(r[f"share_{ceiling}"] - share) <= 1e-9 * share, f"{shown}: share_{ceiling} is {r[f'share_{ceiling}']}")
    return results


def check_json(options, command, *more, ranks=1, launcher=()):
    line = [*launcher, options.bench, command, *SIZES, *more, "--json"]
    results = check_lines(run(line).stdout, NAMES[command], ranks, " ".join(line))
    if command in ("layer", "experts"):
        expect(results[-1]["floor_ms"] > 0 and results[-1]["twin_ms"] > 0, f"{command}: no floor or twin")
    return results


def check_commands(options):
    for command in NAMES:
        inner = ["-F", "40"] if command in ("layer", "experts") else []
        for dtype in ("f32", "bf16"):
            check_json(options, command, *inner, "--dtype", dtype)
        for routing in ("multinomial", "zipf", "one"):
            check_json(options, command, *inner, "--routing", routing)
    for act in ("gelu_tanh", "relu", "silu", "swiglu", "geglu"):
        check_json(options, "layer", "-F", "40", "--act", act, "--bias")
    check_json(options, "layer", "-F", "40", "--residual", "--bias")
    check_json(options, "layer", "-F", "40", "--residual", "--dtype", "bf16", "--capacity-factor", "1.25", "--sizing", "fixed")
    check_json(options, "experts", "-F", "40", "--gemm", "plain")
    rows = run([options.bench, "rows", *SIZES]).stdout
    expect("rows_gather" in rows and " ok" in rows, f"no table: {rows}")


def check_ranks(options):
    results = check_json(options, "layer", "-F", "40", "--ranks", "3", ranks=3)
    expect(results[-1]["one_rank_ms"] > 0 and results[-1]["transport"] == "threads", "layer: no time of one rank")
    check_json(options, "layer", "-F", "40", "--ranks", "2", "--residual", ranks=2)
    check_json(options, "exchange", "--ranks", "4", "--routing", "zipf", ranks=4)
    if not options.mpiexec:
        return
    launcher = [options.mpiexec, "-n", "2", "--oversubscribe", "--bind-to", "none"]
    if "Open MPI" not in run([options.mpiexec, "--version"]).stdout:
        launcher = launcher[:3]
    for r in check_json(options, "exchange", ranks=2, launcher=launcher)[1:]:
        expect(r["transport"] == "mpi" and r["alltoallv_ms"] > 0, "exchange: no bare MPI_Alltoallv")
    check_json(options, "layer", "-F", "40", ranks=2, launcher=launcher)


def check_usage(options):
    for command in ([], *([name] for name in NAMES)):
        expect("Usage:" in run([options.bench, *command, "--help"]).stdout, f"{command} --help prints no usage")
    for wrong in ([], ["layers"], ["layer", "-T", "few"], ["layer", "-K", "9", "-E", "8"], ["gate", "-F", "8"], ["rows", "surplus"]):
        expect(run([options.bench, *wrong], status=2).stderr, f"{wrong}: no message")
    for wrong in (["--dtype", "f16"], ["--graph"], ["--sizing", "fixed"], ["--capacity-factor", "0.5"]):
        expect(run([options.bench, "layer", *SIZES, *wrong], status=2).stderr, f"{wrong}: no message")
    expect("cfg->gemm" in run([options.bench, "gate", *SIZES, "--gemm", "abacus"], status=3).stderr, "--gemm abacus: no reason")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", required=True, help="the pmoe-bench program")
    parser.add_argument("--mpiexec", help="mpirun; without it the runs over MPI are left out")
    options = parser.parse_args()
    check_usage(options)
    check_commands(options)
    check_ranks(options)


if __name__ == "__main__":
    main()
