"""The GPU half of torch_peer.py: a plain PyTorch layer on grouped products, timed by CUDA events.

Softmax router, top-k, one sort of the choices, row gather, grouped_mm with the experts' weights, activation, grouped_mm, index_add; forward
and, by autograd, backward. Gradients of parameters are in their own type, as PyTorch keeps them (pmoe's are float32).
"""
import statistics


def grouped_mm(torch):
    """The function of this PyTorch, and its name; or None and why not."""
    for place, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm")):
        if hasattr(place, name):
            return getattr(place, name), f"{place.__name__}.{name}"
    return None, f"torch {torch.__version__} has no grouped_mm"


def why_not():
    """None where the layer can run here."""
    try:
        import torch
    except ImportError as error:
        return f"no torch: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return None if grouped_mm(torch)[0] else grouped_mm(torch)[1]


class CudaPeer:
    """The layer and its micro-batch."""

    def __init__(self, shape, act, residual):
        import torch

        self.torch, self.shape, self.act, self.residual = torch, shape, act, residual
        self.mm, self.mm_name = grouped_mm(torch)
        tokens, hidden, inner, experts, top_k = (shape[c] for c in "THFEK")
        inner1 = 2 * inner if act == "swiglu" else inner
        torch.manual_seed(1)

        def parameter(*size):
            return (torch.randn(*size, device="cuda") / size[-1] ** 0.5).bfloat16().requires_grad_()

        self.w1, self.w2 = parameter(experts, inner1, hidden), parameter(experts, hidden, inner)
        self.parameters = [self.w1, self.w2]
        if residual:
            self.branch = [parameter(inner1, hidden), parameter(hidden, inner), parameter(2, hidden)]
            self.parameters += self.branch
        # As pmoe-bench does: codes in x make the router send balanced loads.
        router = torch.randn(experts, hidden, device="cuda") * 1e-4
        router[:, :experts] = torch.eye(experts, device="cuda")
        x = torch.rand(tokens, hidden, device="cuda") * 2 - 1
        x[:, :experts] = 0
        numbers = torch.arange(top_k, device="cuda")
        choices = (torch.arange(tokens, device="cuda")[:, None] * top_k + numbers) % experts
        x.scatter_(1, choices, (4 - 2 * numbers / top_k).expand(tokens, top_k))
        self.router = router.requires_grad_()
        self.x = x.bfloat16().requires_grad_()
        self.dy = (torch.rand(tokens, hidden, device="cuda") * 2 - 1).bfloat16()
        self.parameters += [self.router, self.x]

    def activate(self, h):
        functional = self.torch.nn.functional
        if self.act == "gelu":
            return functional.gelu(h)
        gate, up = h.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def forward(self):
        torch, top_k = self.torch, self.shape["K"]
        weight, chosen = torch.topk(torch.softmax(self.x.float() @ self.router.t(), dim=-1), top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=self.shape["E"]).cumsum(0).to(torch.int32)
        token = order // top_k
        pre = self.mm(self.x[token], self.w1.transpose(1, 2), offs=ends)
        out = self.mm(self.activate(pre), self.w2.transpose(1, 2), offs=ends)
        y = torch.zeros_like(self.x).index_add(0, token, out * weight.flatten()[order, None].to(out.dtype))
        if not self.residual:
            return y
        fc1, fc2, mix = self.branch
        scale = torch.softmax((self.x @ mix.t()).float(), dim=-1).to(y.dtype)
        return scale[:, :1] * y + scale[:, 1:] * (self.activate(self.x @ fc1.t()) @ fc2.t())

    def measure(self, iters, fresh):
        """Medians of forward and backward in ms. fresh: gradients are new tensors in each step, else they are added to."""
        torch = self.torch
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(iters)]
        for begin, middle, end in events:
            if fresh:
                for p in self.parameters:
                    p.grad = None
            begin.record()
            y = self.forward()
            middle.record()
            y.backward(self.dy)
            end.record()
        torch.cuda.synchronize()
        return tuple(statistics.median(e[i].elapsed_time(e[i + 1]) for e in events) for i in range(2))


def compare(options, shape, run_pmoe):
    peer = CudaPeer(shape, options.act, options.residual)
    times = {True: [], False: []}
    pmoe = []
    for fresh in times:
        peer.measure(2, fresh)
    for _ in range(options.rounds):
        for fresh, kept in times.items():
            kept.append(peer.measure(options.iters, fresh))
        pmoe.append(run_pmoe())
    median = {fresh: [statistics.median(part) for part in zip(*kept)] for fresh, kept in times.items()}
    fresh = min(median, key=lambda way: sum(median[way]))
    forward, backward = median[fresh]
    rows = shape["T"] * (shape["K"] + (1 if options.residual else 0))
    flops = 6 * rows * shape["H"] * shape["F"] * (3 if options.act == "swiglu" else 2)
    pmoe_ms = statistics.median(r["median_ms"] for r in pmoe)
    return {
        "name": "torch_peer", "backend": "cuda", "dtype": "bf16", **shape, "act": options.act, "residual": options.residual,
        "torch_forward_ms": forward, "torch_backward_ms": backward, "torch_ms": forward + backward,
        "torch_gradients": "fresh" if fresh else "added", "torch_gflop_per_s": flops / (forward + backward) * 1e-6,
        "pmoe_ms": pmoe_ms, "speedup": (forward + backward) / pmoe_ms, "torch": peer.torch.__version__, "grouped_mm": peer.mm_name,
        "device": peer.torch.cuda.get_device_name(), "gemm": pmoe[-1]["gemm"],
    }
