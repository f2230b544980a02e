"""Checks the licence of every dependency against the list in deny.toml, as `cargo deny check licenses` would."""

import json
import re
import subprocess
import sys
import tomllib

with open("deny.toml", "rb") as file:
    licenses = tomllib.load(file)["licenses"]
exceptions = {exception["crate"]: set(exception["allow"]) for exception in licenses.get("exceptions", [])}


def holds(name, expression):
    """Whether the SPDX expression of a package can be satisfied with licences that are allowed for it."""
    allowed = set(licenses["allow"]) | exceptions.get(name, set())
    # The old spelling of OR.
    expression = expression.replace("/", " OR ")
    words = re.findall(r"\(|\)|[\w.+-]+(?: WITH [\w.+-]+)?", expression)
    python = {"AND": "and", "OR": "or", "(": "(", ")": ")"}
    return eval(" ".join(python.get(word, str(word in allowed)) for word in words), {"__builtins__": {}})


metadata = json.loads(subprocess.check_output(["cargo", "metadata", "--format-version=1"]))
bad = [
    f"{package['name']} {package['version']}: {package['license']}"
    for package in metadata["packages"]
    if not (package["license"] and holds(package["name"], package["license"]))
]
print("\n".join(bad) or f"the licences of {len(metadata['packages'])} packages are on the list")
sys.exit(bool(bad))
