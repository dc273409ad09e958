"""Runs the commands of pmoe-bench on a CUDA device, on tiny sizes, and checks their JSON, verdicts and refusals."""
import argparse
import json
import subprocess
import sys

SIZES = ["-T", "16", "-H", "16", "-E", "4", "-K", "2", "-n", "2", "-w", "1", "--backend", "cuda"]
KEYS = {
    "name", "dtype", "T", "H", "F", "E", "K", "threads", "ranks", "transport", "routing", "median_ms", "min_ms", "floor_ms", "twin_ms", "copy_ms",
    "share_floor", "share_twin", "share_copy", "gflop_per_s", "gb_per_s", "peak_bytes", "saved_bytes", "error", "check", "gemm", "gemm_library",
    "gemm_isa", "gemm_bf16", "backend", "device", "sizing", "capacity_factor", "graph", "residual", "cache_bytes", "cache_emptied",
}
NAMES = {
    "layer": ["layer_forward", "layer_backward", "layer"],
    "gate": ["gate_forward", "gate_backward"],
    "rows": ["rows_gather", "rows_combine", "rows_combine_bwd", "rows_dispatch_bwd"],
    "experts": ["experts_forward", "experts_backward", "experts"],
}
FIXED = ["--sizing", "fixed", "--capacity-factor", "1.25"]
RUNS = [
    ("layer", []),
    ("layer", ["--dtype", "bf16", "--residual", "--bias", "--act", "swiglu", "--routing", "zipf"]),
    ("layer", ["--routing", "zipf", "--gemm", "cublas-grouped"]),
    ("layer", ["--dtype", "f16", "--residual", *FIXED]),
    ("layer", ["--residual", *FIXED, "--graph"]),
    ("gate", []),
    ("gate", ["--dtype", "f16"]),
    ("rows", []),
    ("rows", ["--dtype", "bf16", "--routing", "multinomial"]),
    ("experts", []),
    ("experts", ["--routing", "multinomial", "--gemm", "cublas-grouped"]),
    ("experts", ["--dtype", "bf16", "--routing", "zipf"]),
]


def expect(condition, what):
    if not condition:
        sys.exit(f"device_smoke: {what}")


def run(command, status=0):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shown = " ".join(command)
    if "there is no CUDA device" in done.stderr:
        print(f"skipped: {done.stderr.splitlines()[0]}")
        sys.exit(77)
    expect(done.returncode == status, f"{shown}: exit status {done.returncode}; {status} was expected\n{done.stdout}{done.stderr}")
    return done


def check_result(r, shown):
    expect(KEYS <= r.keys(), f"{shown}: {sorted(KEYS - r.keys())} missing")
    expect(r["backend"] == "cuda" and r["device"], f"{shown}: backend {r['backend']}, device {r['device']}")
    expect(r["check"] == "ok" and r["error"] is not None, f"{shown}: {r['name']} check {r['check']}, error {r['error']}")
    expect(0 < r["min_ms"] <= r["median_ms"], f"{shown}: {r['name']} takes {r['median_ms']} ms, at least {r['min_ms']}")
    for ceiling in ("floor", "twin", "copy"):
        if r[f"{ceiling}_ms"] is not None:
            share = r[f"{ceiling}_ms"] / r["median_ms"]
            expect(share > 0 and abs(r[f"share_{ceiling}"] - share) <= 1e-9 * share, f"{shown}: share_{ceiling} {r[f'share_{ceiling}']}")


def check_run(options, command, more):
    inner = ["-F", "24"] if command in ("layer", "experts") else []
    line = [options.bench, command, *SIZES, *inner, *more, "--json"]
    shown = " ".join(line[1:])
    results = [json.loads(text) for text in run(line).stdout.splitlines()]
    expect([r["name"] for r in results] == NAMES[command], f"{shown}: names are {[r['name'] for r in results]}")
    for r in results:
        check_result(r, shown)
    last = results[-1]
    wanted = {"gate": ["copy_ms"], "rows": ["copy_ms"], "experts": ["floor_ms", "twin_ms", "one_by_one_ms"]}
    wanted["layer"] = ["floor_ms", "twin_ms", "train_ms", "device_copy_gb_per_s", "bytes_floor_ms"]
    for key in wanted[command]:
        expect(last.get(key) and last[key] > 0, f"{shown}: {key} is {last.get(key)}")
    if command == "layer":
        expect(last["graph"] == ("--graph" in more) and last["sizing"] == ("fixed" if "fixed" in more else "eager"), f"{shown}: {last}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", required=True, help="the pmoe-bench program")
    options = parser.parse_args()
    for command, more in RUNS:
        check_run(options, command, more)
    table = run([options.bench, "layer", *SIZES, "-F", "24"]).stdout
    expect("layer_backward" in table and "eager sizing" in table and " ok" in table, f"no table: {table}")
    wrong = run([options.bench, "layer", *SIZES, "-F", "24", "--gemm", "onednn"], status=3).stderr
    expect("cublas-grouped" in wrong, f"--gemm onednn: {wrong}")
    expect("exchange" in run([options.bench, "exchange", *SIZES], status=3).stderr, "exchange is not refused")


if __name__ == "__main__":
    main()
