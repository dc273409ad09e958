"""Runs a program under the interpreter and looks at what its kernels touched.

usage: sectors.py PROGRAM KERNEL...

Fails when a kernel whose name contains one of the words did not run, moved less than 95 % of the bytes of the 32-byte
sectors that it touched, or when any kernel's shared memory had bank conflicts.
"""
import json
import os
import subprocess
import sys
import tempfile

LEAST = 0.95


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        counts = os.path.join(folder, "counts.json")
        subprocess.run([sys.argv[1]], check=True, env=dict(os.environ, PTXVM_STATS=counts))
        with open(counts, encoding="utf-8") as file:
            kernels = json.load(file)["kernels"]
    failures = 0
    for word in sys.argv[2:]:
        mine = [k for k in kernels if word in k["kernel"]]
        failures += not mine
        if not mine:
            print(f"{word}: no kernel of that name ran")
        for k in mine:
            use = k["global_bytes"] / (32 * k["global_sectors"])
            print(f"{use:7.1%} of the sectors' bytes: {k['kernel']}")
            failures += use < LEAST
    for k in kernels:
        if k["shared_conflicts"] > 0:
            print(f"{k['shared_conflicts']} bank conflicts: {k['kernel']}")
            failures += 1
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
