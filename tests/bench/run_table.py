"""Runs the whole benchmark table: results as JSON lines, a table for docs/performance.md, and a plot.

Each row has the goal it is held against. With --write-docs the table replaces the part of docs/performance.md between its
markers and the plot goes to docs/performance.svg. --from-results draws both again from the results of an earlier run.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
WIDTHS = [(512, 2048), (1024, 4096)]
EXPERTS = [8, 16, 64]
ROWS = [32, 128, 512]  # an expert
TOP_K = 2
MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", help="the pmoe-bench program")
    parser.add_argument("--results", default="bench-results.jsonl", help="where the JSON lines go")
    parser.add_argument("--from-results", action="store_true", help="measure nothing; read --results")
    parser.add_argument("--only", help="comma-separated parts: " + ", ".join(PARTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--iters", type=int, default=7)
    parser.add_argument("--mpiexec", default="mpirun")
    parser.add_argument("--python", default="/usr/bin/python3", help="the Python that has torch")
    parser.add_argument("--install", action="store_true", help="install python3-torch and python3-matplotlib with apt-get first")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    if not options.from_results and not options.bench:
        parser.error("--bench was expected")
    return options


# ---- measuring ----
def run(command):
    print("+", " ".join(map(str, command)), file=sys.stderr, flush=True)
    env = {**os.environ, **MPI_ENVIRONMENT}
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False, env=env)
    if done.returncode != 0:
        sys.exit(f"run_table: exit status {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def bench(options, command, part, launcher=(), **sizes):
    letters = {"T", "H", "F", "E", "K"}
    arguments = [x for name, value in sizes.items() for x in ((f"-{name}" if name in letters else f"--{name}"), value)]
    line = [*launcher, options.bench, command, *arguments, "--iters", options.iters, "--threads", options.threads, "--json"]
    with open(options.results, "a", encoding="utf-8") as out:
        for result in run(line):
            out.write(json.dumps({"part": part, **result}) + "\n")


def measure_layers(options):
    for dtype in ("f32", "bf16"):
        for hidden, inner in WIDTHS:
            for experts in EXPERTS:
                for rows in ROWS:
                    tokens = rows * experts // TOP_K
                    bench(options, "layer", "layers", dtype=dtype, T=tokens, H=hidden, F=inner, E=experts, K=TOP_K)


def measure_routing(options):
    for routing in ("multinomial", "zipf", "one"):
        bench(options, "layer", "routing", routing=routing, T=4096, H=512, F=2048, E=16, K=TOP_K)


def measure_scaling(options):
    for tokens in (1024, 2048, 4096, 8192):
        bench(options, "layer", "scaling", T=tokens, H=512, F=2048, E=8, K=2)
    for top_k in (1, 4, 8):
        bench(options, "layer", "scaling", T=4096, H=512, F=2048, E=8, K=top_k)


def measure_stages(options):
    for dtype in ("f32", "bf16"):
        for hidden, inner in WIDTHS:
            shape = {"dtype": dtype, "T": 4096, "H": hidden, "E": 8, "K": TOP_K}
            bench(options, "gate", "stages", **shape)
            bench(options, "rows", "stages", **shape)
            bench(options, "experts", "stages", F=inner, **shape)


def measure_ranks(options):
    for dtype in ("f32", "bf16"):
        bench(options, "layer", "ranks", dtype=dtype, ranks=4, T=4096, H=512, F=2048, E=8, K=TOP_K)
        bench(options, "exchange", "ranks", dtype=dtype, ranks=4, T=4096, H=512, E=8, K=TOP_K)


def measure_mpi(options):
    for ranks in (2, 4):
        launcher = [options.mpiexec, "-n", ranks, "--oversubscribe", "--bind-to", "none"]
        for hidden in (512, 1024):
            bench(options, "exchange", "mpi", launcher, T=8192, H=hidden, E=8, K=TOP_K)


def measure_peer(options):
    command = [options.python, HERE / "torch_peer.py", "--bench", options.bench, "--threads", options.threads, "--json"]
    with open(options.results, "a", encoding="utf-8") as out:
        for result in run(command):
            out.write(json.dumps({"part": "peer", **result}) + "\n")


PARTS = {
    "layers": measure_layers, "routing": measure_routing, "scaling": measure_scaling, "stages": measure_stages, "ranks": measure_ranks,
    "mpi": measure_mpi, "peer": measure_peer,
}


# ---- goals ----
def layer_goals(r):
    """(key, bound, True if the value must be at least the bound)"""
    rows = r["T"] * r["K"] / r["E"]
    f32 = r["dtype"] == "f32"
    goals = [("saved_share", 1.02, False)]
    if rows >= 32:
        goals.append(("share_floor", 0.88 if f32 else 0.70, True))
    if rows >= 512:
        goals.append(("share_twin", 0.85 if f32 else 0.65, True))
    return goals


PEER_GOALS = {("f32", 4096, 512): 1.1, ("f32", 1024, 1024): 1.3, ("bf16", 4096, 512): 1.6, ("bf16", 1024, 1024): 2.0}


def goals_of(r):
    if r["part"] == "layers" and r["name"] == "layer":
        return layer_goals(r)
    if r["name"] in ("rows_gather", "rows_combine"):
        return [("share_copy", 0.80, True)]
    if r["part"] == "ranks" and r["name"] == "layer":
        return [("ratio_one_rank", 1.15, False)]
    if r["name"] == "exchange_transport" and r["part"] == "mpi":
        return [("share_alltoallv", 0.90, True)]
    if r["name"] == "torch_peer" and (r["dtype"], r["T"], r["H"]) in PEER_GOALS:
        return [("speedup", PEER_GOALS[r["dtype"], r["T"], r["H"]], True)]
    return []


def verdict(value, bound, at_least):
    met = value >= bound if at_least else value <= bound
    return f"{value:.2f} ({'met' if met else 'missed'}: {'≥' if at_least else '≤'} {bound:g})"


# ---- table ----
def cell(value, form="{}"):
    return "–" if value is None else form.format(value)


def table(results, columns):
    """columns: (title, key, format). Keys that have a goal show it."""
    lines = ["| " + " | ".join(title for title, _, _ in columns) + " |", "|" + "---|" * len(columns)]
    for r in results:
        goals = {key: (bound, at_least) for key, bound, at_least in goals_of(r)}
        row = []
        for _, key, form in columns:
            value = r.get(key)
            row.append(verdict(value, *goals[key]) if key in goals and value is not None else cell(value, form))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


SHAPE = [(c, c, "{}") for c in ("T", "H", "F", "E", "K")]
TIME = [("ms", "median_ms", "{:.2f}"), ("GFLOP/s", "gflop_per_s", "{:.0f}")]


def tables(results):
    def part(name, *names):
        return [r for r in results if r["part"] == name and (not names or r["name"] in names)]

    layer = [("dtype", "dtype", "{}"), *SHAPE, *TIME, ("of floor", "share_floor", "{:.2f}"), ("of twin", "share_twin", "{:.2f}")]
    saved = [("saved / least", "saved_share", "{:.3f}"), ("peak MB", "peak_mb", "{:.0f}")]
    yield "Layer, forward and backward", table(part("layers", "layer"), layer + saved)
    yield "Other routings", table(part("routing", "layer"), [("routing", "routing", "{}"), *layer])
    yield "Scaling with T and K", table(part("scaling", "layer"), [*layer, ("ms per 1000 rows", "ms_per_row", "{:.2f}")])
    stage = [("stage", "name", "{}"), ("dtype", "dtype", "{}"), *SHAPE, *TIME, ("GB/s", "gb_per_s", "{:.1f}")]
    shares = [("of floor", "share_floor", "{:.2f}"), ("of twin", "share_twin", "{:.2f}"), ("of copy", "share_copy", "{:.2f}")]
    yield "Stages", table(part("stages"), stage + shares)
    ranks = [("stage", "name", "{}"), ("dtype", "dtype", "{}"), ("ranks", "ranks", "{}"), *SHAPE, ("ms", "median_ms", "{:.2f}")]
    yield "Four ranks as threads", table(part("ranks"), ranks + [("× one rank", "ratio_one_rank", "{:.2f}"), ("of copy", "share_copy", "{:.2f}")])
    mpi = part("mpi", "exchange_dispatch", "exchange_combine", "exchange_transport")
    yield "Exchange over MPI", table(mpi, ranks + [("GB/s", "gb_per_s", "{:.1f}"), ("of MPI_Alltoallv", "share_alltoallv", "{:.2f}")])
    peer = [("dtype", "dtype", "{}"), *SHAPE, ("torch ms", "torch_ms", "{:.1f}"), ("torch / mm", "torch_over_mm", "{:.2f}")]
    yield "Against PyTorch", table(part("peer"), peer + [("pmoe ms", "pmoe_ms", "{:.1f}"), ("speed-up", "speedup", "{:.2f}")])


def machine(results):
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo", encoding="utf-8") if l.startswith("model name")), platform.machine())
    first = next(r for r in results if r["part"] != "peer")
    lines = [f"Machine: {model}, {os.cpu_count()} cores. Matrix products: {first['gemm_library']} ({first['gemm_isa']}; bf16 "
             f"{first['gemm_bf16']})."]
    peer = next((r for r in results if r["part"] == "peer"), None)
    if peer:
        lines.append(f"PyTorch {peer['torch']} on OpenBLAS with its {peer['blas_core']} kernels.")
    return " ".join(lines)


def add_derived(results):
    for r in results:
        if r.get("peak_bytes") is not None:
            r["peak_mb"] = r["peak_bytes"] * 1e-6
        if r["name"] == "layer":
            r["ms_per_row"] = r["median_ms"] / (r["T"] * r["K"]) * 1000


def missing(results):
    """What the whole table has and these results lack: a goal that was not measured is not a goal that was met."""
    lines = [f"- not measured: {part}" for part in PARTS if not any(r["part"] == part for r in results)]
    wanted = {(d, h, e, n * e // TOP_K) for d in ("f32", "bf16") for h, _ in WIDTHS for e in EXPERTS for n in ROWS}
    found = {(r["dtype"], r["H"], r["E"], r["T"]) for r in results if r["part"] == "layers"}
    if found and wanted - found:
        lines.append(f"- not measured: {len(wanted - found)} of the {len(wanted)} shapes of layers")
    return lines


def summary(results):
    verdicts = []
    for r in results:
        for key, bound, at_least in goals_of(r):
            if r.get(key) is not None:
                verdicts.append((r[key] >= bound if at_least else r[key] <= bound, r, key, bound, at_least))
    met = sum(v[0] for v in verdicts)
    lines = [f"{met} of the {len(verdicts)} goals measured in this run met.", *missing(results)]
    for ok, r, key, bound, at_least in verdicts:
        if not ok:
            shape = " ".join(f"{c}{r[c]}" for c in "THFEK" if r.get(c) is not None)
            lines.append(f"- missed: {r['name']} {r['dtype']} {shape} ({r['part']}): {key} {verdict(r[key], bound, at_least)}")
    return "\n".join(lines)


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = [r for r in results if r["part"] == "layers" and r["name"] == "layer"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, dtype, goal in zip(axes, ("f32", "bf16"), (0.88, 0.70)):
        for hidden, inner in WIDTHS:
            for experts in EXPERTS:
                line = sorted((r["T"] * r["K"] / r["E"], r["share_floor"]) for r in layers
                              if (r["dtype"], r["H"], r["E"]) == (dtype, hidden, experts))
                axis.plot(*zip(*line), marker="o", linestyle="-" if hidden == 512 else "--", label=f"H{hidden} F{inner} E{experts}") if line else None
        axis.axhline(goal, color="black", linewidth=0.8, linestyle=":")
        axis.set(title=dtype, xscale="log", xlabel="rows an expert", xticks=ROWS)
        axis.set_xticks(ROWS, labels=[str(n) for n in ROWS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="GEMM floor / layer, forward and backward", ylim=(0, 1.1))
    axes[1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def write_docs(results):
    page = DOCS / "performance.md"
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    body = [machine(results), summary(results)]
    body += [f"### {title}\n\n{lines}" for title, lines in tables(results) if lines.count("\n") > 1]
    body.insert(2, "![Share of the GEMM floor](performance.svg)")
    page.write_text(head + BEGIN + "\n\n" + "\n\n".join(body) + "\n\n" + END + tail, encoding="utf-8")
    plot(results, DOCS / "performance.svg")


def main():
    options = parse_options()
    if options.install:
        subprocess.run(["apt-get", "install", "-y", "python3-torch", "python3-matplotlib"], check=True)
    parts = options.only.split(",") if options.only else list(PARTS)
    if not options.from_results:
        for part in parts:
            PARTS[part](options)
    with open(options.results, encoding="utf-8") as lines:
        results = [json.loads(line) for line in lines]
    add_derived(results)
    print(summary(results))
    if options.write_docs:
        write_docs(results)


if __name__ == "__main__":
    main()
