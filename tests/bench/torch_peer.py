"""A careful plain PyTorch layer beside pmoe's, on the same shapes, in turn, in one session.

The peer: softmax router, top-k, then for each expert index_select, two linear maps with one weight tensor per expert, and
index_add, forward and backward. Beside it torch.mm of the same products and nothing else. One JSON object a line with --json.

It needs torch on the OpenBLAS kernels that suit the processor; the fastest of --core-types is found first and printed.

With --backend cuda the peer is a bf16 layer on torch's grouped_mm on the GPU (torch_peer_cuda.py). Where torch, a GPU or grouped_mm is missing
the exit status is 77.
"""
import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time

import torch_peer_cuda

DEFAULT_SHAPES = ["T4096,H512,F2048,E8,K2", "T2048,H1024,F4096,E16,K2", "T1024,H1024,F768,E64,K8"]
CORE_TYPES = ["", "SkylakeX", "Cooperlake", "SapphireRapids", "Zen", "Haswell"]


def parse_shape(text):
    shape = {part[0]: int(part[1:]) for part in text.split(",")}
    if sorted(shape) != sorted("THFEK"):
        raise argparse.ArgumentTypeError(f"{text}: T,H,F,E,K were expected, as in {DEFAULT_SHAPES[0]}")
    return shape


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="the pmoe-bench program")
    parser.add_argument("--shape", action="append", type=parse_shape, help=f"for example {DEFAULT_SHAPES[0]}; may be repeated")
    parser.add_argument("--dtype", action="append", choices=["f32", "bf16"], help="may be repeated (both)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5, help="how often the two take turns")
    parser.add_argument("--iters", type=int, default=4, help="iterations of each in a turn")
    parser.add_argument("--core-types", default=",".join(CORE_TYPES), help="OPENBLAS_CORETYPE values to try; empty: its own choice")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--act", choices=["gelu", "swiglu"], default="gelu", help="with --backend cuda")
    parser.add_argument("--residual", action="store_true", help="with --backend cuda: a dense branch, mixed by learned coefficients")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the right kernels ----
def blas_core():
    """The name of the kernels that the loaded OpenBLAS runs, or None."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        paths = {line.split()[-1] for line in maps if "blas" in line}
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        if hasattr(library, "openblas_get_corename"):
            library.openblas_get_corename.restype = ctypes.c_char_p
            return library.openblas_get_corename().decode()
    return None


def probe(threads):
    """Prints the kernels' name and the GFLOP/s of a float32 product, the best of many."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 512), torch.randn(2048, 512)
    best = float("inf")
    for _ in range(40):
        start = time.perf_counter()
        torch.mm(a, b.t())
        best = min(best, time.perf_counter() - start)
    print(json.dumps({"core": blas_core(), "gflop_per_s": 2 * 1024 * 512 * 2048 / best * 1e-9}))


def environment(core_type, threads):
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    env.pop("OPENBLAS_CORETYPE", None)
    if core_type:
        env["OPENBLAS_CORETYPE"] = core_type
    return env


def restart_on_best_core(options):
    """OpenBLAS picks its kernels when it loads: each choice needs a process of its own."""
    found = []
    for core_type in options.core_types.split(","):
        command = [sys.executable, __file__, "--bench", options.bench, "--threads", str(options.threads), "--probe"]
        done = subprocess.run(command, env=environment(core_type, options.threads), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            result = json.loads(done.stdout)
            found.append((result["gflop_per_s"], core_type, result["core"]))
            print(f"# OPENBLAS_CORETYPE={core_type or '(unset)'}: {result['core']}, {result['gflop_per_s']:.0f} GFLOP/s", file=sys.stderr)
    if not found:
        sys.exit("torch_peer: torch does not run; on Debian: apt-get install python3-torch")
    env = environment(max(found)[1], options.threads)
    os.execve(sys.executable, [sys.executable, *sys.argv], {**env, "PMOE_PEER_CORE": max(found)[1] or "default"})


# ---- the peer ----
class Peer:
    """The layer, its micro-batch, and the bare products of the same rows."""

    def __init__(self, shape, dtype):
        import torch

        self.torch = torch
        self.shape = shape
        tokens, hidden, inner, experts, top_k = (shape[c] for c in "THFEK")
        self.dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        torch.manual_seed(1)

        def parameter(*size):
            return (torch.randn(*size) / size[-1] ** 0.5).to(self.dtype).requires_grad_()

        self.w1 = [parameter(inner, hidden) for _ in range(experts)]
        self.w2 = [parameter(hidden, inner) for _ in range(experts)]
        # As pmoe-bench does: codes in x make the router send balanced loads.
        router = torch.randn(experts, hidden) * 1e-4
        router[:, :experts] = torch.eye(experts)
        self.router = router.requires_grad_()
        x = torch.rand(tokens, hidden) * 2 - 1
        x[:, :experts] = 0
        choices = (torch.arange(tokens)[:, None] * top_k + torch.arange(top_k)) % experts
        x.scatter_(1, choices, (4 - 2 * torch.arange(top_k) / top_k).expand(tokens, top_k))
        self.x = x.to(self.dtype).requires_grad_()
        self.dy = (torch.rand(tokens, hidden) * 2 - 1).to(self.dtype)
        self.rows = torch.bincount(choices.flatten(), minlength=experts).tolist()
        self.parameters = [*self.w1, *self.w2, self.router, self.x]
        self.make_bare()

    def forward(self):
        torch = self.torch
        probability = torch.softmax(self.x.float() @ self.router.t(), dim=-1)
        weight, chosen = torch.topk(probability, self.shape["K"], dim=-1)
        weight = weight.to(self.dtype)
        y = torch.zeros_like(self.x)
        for e, (w1, w2) in enumerate(zip(self.w1, self.w2)):
            token, k = (chosen == e).nonzero(as_tuple=True)
            rows = self.x.index_select(0, token)
            out = torch.nn.functional.gelu(rows @ w1.t()) @ w2.t()
            y = y.index_add(0, token, out * weight[token, k, None])
        return y

    def step(self, fresh):
        """fresh: gradients are new tensors in each step, else they are added to."""
        if fresh:
            for p in self.parameters:
                p.grad = None
        self.forward().backward(self.dy)

    def make_bare(self):
        torch = self.torch
        self.bare = []
        with torch.no_grad():
            for rows, w1, w2 in zip(self.rows, self.w1, self.w2):
                x, y = (torch.randn(rows, w1.shape[1]).to(self.dtype) for _ in range(2))
                a, d = (torch.randn(rows, w1.shape[0]).to(self.dtype) for _ in range(2))
                pairs = [(x, w1.t()), (a, w2.t()), (y, w2), (d, w1), (y.t(), a), (d.t(), x)]
                self.bare += [(p, q, torch.mm(p, q)) for p, q in pairs]

    def products(self):
        for p, q, out in self.bare:
            self.torch.mm(p, q, out=out)

    def time(self, what, iters):
        times = []
        with self.torch.set_grad_enabled(what != self.products):
            for _ in range(iters):
                start = time.perf_counter()
                what()
                times.append((time.perf_counter() - start) * 1e3)
        return times


# ---- taking turns ----
def run_pmoe(options, shape, dtype):
    sizes = [part for c in "THFEK" for part in (f"-{c}", str(shape[c]))]
    command = [options.bench, "layer", *sizes, "--dtype", dtype, "--threads", str(options.threads), "-n", str(options.iters), "-w", "1", "--json"]
    if options.backend == "cuda":
        command += ["--backend", "cuda", "--act", options.act, "--check", "0"] + ["--residual"] * options.residual
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"torch_peer: {' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return next(r for r in map(json.loads, done.stdout.splitlines()) if r["name"] == "layer")


def compare(options, shape, dtype):
    peer = Peer(shape, dtype)
    ways = {"fresh": lambda: peer.step(True), "added": lambda: peer.step(False)}
    times = {"fresh": [], "added": [], "bare": [], "pmoe": [], "floor": []}
    for what in (*ways.values(), peer.products):
        peer.time(what, 2)
    for _ in range(options.rounds):
        for name, what in ways.items():
            times[name] += peer.time(what, options.iters)
        times["bare"] += peer.time(peer.products, options.iters)
        pmoe = run_pmoe(options, shape, dtype)
        times["pmoe"].append(pmoe["median_ms"])
        times["floor"].append(pmoe["floor_ms"])
    median = {name: statistics.median(values) for name, values in times.items()}
    way = min(ways, key=median.get)
    flops = 12 * shape["T"] * shape["K"] * shape["H"] * shape["F"]
    return {
        "name": "torch_peer", "dtype": dtype, **shape, "threads": options.threads,
        "torch_ms": median[way], "torch_gradients": way, "torch_mm_ms": median["bare"], "torch_over_mm": median[way] / median["bare"],
        "torch_mm_gflop_per_s": flops / median["bare"] * 1e-6,
        "pmoe_ms": median["pmoe"], "pmoe_floor_ms": median["floor"], "speedup": median[way] / median["pmoe"],
        "blas_core": blas_core(), "core_type": os.environ["PMOE_PEER_CORE"], "torch": peer.torch.__version__, "gemm": pmoe["gemm"],
        "gemm_isa": pmoe["gemm_isa"], "gemm_bf16": pmoe["gemm_bf16"],
    }


def show(r):
    shape = " ".join(f"{c}{r[c]}" for c in "THFEK")
    print(f"{r['dtype']:5} {shape:28} torch {r['torch_ms']:9.2f} ms ({r['torch_over_mm']:.2f} x mm, {r['torch_mm_gflop_per_s']:.0f} GFLOP/s)  "
          f"pmoe {r['pmoe_ms']:9.2f} ms ({r['pmoe_ms'] / r['pmoe_floor_ms']:.2f} x floor)  speed-up {r['speedup']:.2f}", flush=True)


def main_cuda(options):
    reason = torch_peer_cuda.why_not()
    if reason:
        print(f"torch_peer: {reason}", file=sys.stderr)
        sys.exit(77)
    for shape in options.shape or map(parse_shape, DEFAULT_SHAPES):
        r = torch_peer_cuda.compare(options, shape, lambda s=shape: run_pmoe(options, s, "bf16"))
        if options.json:
            print(json.dumps(r), flush=True)
        else:
            sizes = " ".join(f"{c}{r[c]}" for c in "THFEK")
            print(f"{sizes:28} torch {r['torch_ms']:9.3f} ms ({r['torch_gflop_per_s'] * 1e-3:.0f} TFLOP/s)  pmoe {r['pmoe_ms']:9.3f} ms  "
                  f"speed-up {r['speedup']:.2f}", flush=True)


def main():
    options = parse_options()
    if options.backend == "cuda":
        main_cuda(options)
        return
    if options.probe:
        probe(options.threads)
        return
    if "PMOE_PEER_CORE" not in os.environ:
        restart_on_best_core(options)
    import torch

    torch.set_num_threads(options.threads)
    if not options.json:
        print(f"# torch {torch.__version__}, OpenBLAS kernels {blas_core()}, {options.threads} threads")
    for shape in options.shape or map(parse_shape, DEFAULT_SHAPES):
        for dtype in options.dtype or ["f32", "bf16"]:
            result = compare(options, shape, dtype)
            if options.json:
                print(json.dumps(result), flush=True)
            else:
                show(result)


if __name__ == "__main__":
    main()
