"""Counts the packages that a user of the library on a processor compiles, and refuses more than the limit."""

import subprocess
import sys

LIMIT = 45
tree = ["cargo", "tree", "--locked", "-p", "dualgemm", "-e", "normal", "--prefix", "none", "--format", "{p}"]
packages = {line.split(" (")[0] for line in subprocess.check_output(tree, text=True).split("\n") if line}
print(f"dualgemm with default features: {len(packages)} packages, {LIMIT} at most")
if len(packages) > LIMIT:
    sys.exit("\n".join(sorted(packages)))
