"""What scripts/gpu-check has left in a folder (stages.tsv, results.jsonl, log/machine), as gpu-check.json and gpu-check.md."""
import json
import pathlib
import sys

# name: (heading, how it is written)
COLUMNS = {
    "median_ms": ("ms", "{:.3f}"), "train_ms": ("ms in a train", "{:.3f}"), "tflop_per_s": ("TFLOP/s", "{:.0f}"), "gb_per_s": ("GB/s", "{:.0f}"),
    "share_floor": ("of floor", "{:.2f}"), "share_twin": ("of twin", "{:.2f}"), "share_copy": ("of copy", "{:.2f}"),
    "share_bytes_floor": ("of bytes' floor", "{:.2f}"), "device_copy_gb_per_s": ("copy GB/s", "{:.0f}"),
    "one_by_one_ms": ("one by one ms", "{:.3f}"), "batched_ms": ("batched ms", "{:.3f}"), "grouped_ms": ("grouped ms", "{:.3f}"),
    "saved_bytes": ("saved MB", "{:.0f}"), "error": ("error", "{:.1e}"), "check": ("check", "{}"),
}
TABLES = (
    ("Layers", ("layer_forward", "layer_backward", "layer"),
     ("median_ms", "train_ms", "tflop_per_s", "share_floor", "share_twin", "share_bytes_floor", "device_copy_gb_per_s", "saved_bytes", "error", "check")),
    ("Experts, and their products in each way", ("experts_forward", "experts_backward", "experts"),
     ("median_ms", "tflop_per_s", "share_floor", "share_twin", "one_by_one_ms", "batched_ms", "grouped_ms", "error", "check")),
    ("Router and rows", ("gate_forward", "gate_backward", "rows_gather", "rows_combine", "rows_combine_bwd", "rows_dispatch_bwd"),
     ("median_ms", "gb_per_s", "share_copy", "error", "check")),
)
TORCH = ("torch_forward_ms", "torch_backward_ms", "torch_ms", "pmoe_ms", "speedup")


def row(cells):
    return "| " + " | ".join(cells) + " |"


def table(head, rows):
    return [row(head), "|" + "---|" * len(head), *map(row, rows)]


def cell(r, column):
    value = r.get(column)
    if column == "tflop_per_s":
        value = r["gflop_per_s"] * 1e-3 if r.get("gflop_per_s") else None
    if column == "saved_bytes" and value is not None:
        value *= 1e-6
    return "–" if value is None else COLUMNS[column][1].format(value)


def report(machine, stages, results):
    lines = ["# gpu-check", "", "```", *machine, "```"]
    for title, names, columns in TABLES:
        rows = [r for r in results if r.get("name") in names]
        if rows:
            head = ["run", "name", "dtype", *(COLUMNS[c][0] for c in columns)]
            lines += ["", f"## {title}", "", *table(head, [[r["stage"], r["name"], r["dtype"], *(cell(r, c) for c in columns)] for r in rows])]
    peers = [r for r in results if r.get("name") == "torch_peer"]
    if peers:
        head = ["T", "H", "F", "E", "K", "torch", "function", *(name.replace("_", " ") for name in TORCH)]
        body = [[*(str(r[c]) for c in "THFEK"), r["torch"], r["grouped_mm"], *(f"{r[c]:.3f}" for c in TORCH)] for r in peers]
        lines += ["", "## Beside PyTorch", "", *table(head, body)]
    lines += ["", "## Stages", "", *table(["stage", "", "s", ""], stages), ""]
    return "\n".join(lines)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: gpu_report.py FOLDER")
    folder = pathlib.Path(sys.argv[1])
    machine = (folder / "log/machine").read_text(encoding="utf-8", errors="replace").splitlines()
    stages = [line.split("\t") for line in (folder / "stages.tsv").read_text(encoding="utf-8").splitlines()]
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("name", "result", "seconds", "reason")
    whole = {"machine": machine, "stages": [dict(zip(names, s)) for s in stages], "results": results}
    (folder / "gpu-check.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu-check.md").write_text(report(machine, stages, results), encoding="utf-8")


if __name__ == "__main__":
    main()
