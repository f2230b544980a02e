"""Refuses phrases that a native engineer has to read twice. Say who does what: subject, verb, object."""

import re
import subprocess
import sys

PHRASES = {
    r", of which\b": "say it in two sentences",
    r"\b(that|which) is none\b": "say what is not there",
    r"\bunsaid\b": "silently",
    r"\b(is|are) to be [a-z]+(ed|n|t)\b": "must be, will be",
    r"\b(is|are) no matter\b": "does not matter",
    r"\bis no [A-Z][a-z]+ of (its|their)\b": "does not matter",
    r"\bwhere they were left\b": "say what happened before",
}
# Licences, and this list.
SKIP = re.compile(r"^(LICENSE|\.ci/prose\.py|testdata/|.*\.(lock|json|csv|txt|svg|ptx)$)")

files = subprocess.check_output(["git", "ls-files"], text=True).split("\n")
found = []
for name in files:
    if not name or SKIP.match(name):
        continue
    try:
        lines = open(name, encoding="utf-8").read().split("\n")
    except UnicodeDecodeError:
        continue
    for number, line in enumerate(lines, 1):
        for phrase, better in PHRASES.items():
            if re.search(phrase, line):
                found.append(f"{name}:{number}: {line.strip()}\n    {better}")
print("\n".join(found) or "no phrase that reads as translated")
sys.exit(bool(found))
