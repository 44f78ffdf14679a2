"""Ray is an extra: one package imports it, and the commands of one host do without it. It is none of what development
installs, so the other tests run without it too."""

import re
import subprocess
import sys
from pathlib import Path

from sizes import sized

SOURCE = Path(__file__).parents[2] / "src" / "pilotfish"
#: As where the extra is not installed; then each line is a command, and its exit code is printed.
WITHOUT = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
import importlib.util
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == "ray" else known(name, package)
from pilotfish.cli import main
for line in sys.argv[1:]:
    print(line, main(line.split()), flush=True)
assert not [name for name in sys.modules if name.split(".")[0] == "ray"]
"""
HOST = sized(
    ("chat", "serve", "draft"),
    ("generate", "chat", "demo", "serve", "draft", "prefill", "bench", "keys", "kv", "models", "train"),
)
CLUSTER = [f"cluster {command} any.yaml" for command in ("up", "status", "down")]
NEEDED = "pilotfish: ray: it is not installed; expected pilotfish[ray], as from pip install 'pilotfish[ray]'"


def test_one_package_alone_imports_ray() -> None:
    own = re.compile(r"^\s*(import|from) ray\b", re.MULTILINE)
    importing = {path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py") if own.search(path.read_text())}
    assert importing == {"cluster"}


def test_every_command_of_one_host_starts_and_a_cluster_says_what_it_needs() -> None:
    lines = [*(f"{command} --help" for command in (*HOST, "cluster")), *CLUSTER]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT, *lines], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    codes = [line for line in ran.stdout.splitlines() if line.rsplit(" ", 1)[0] in lines]
    assert codes == [f"{line} {2 if line in CLUSTER else 0}" for line in lines]
    assert ran.stderr.splitlines() == [NEEDED] * len(CLUSTER)
