"""Files of the package that a token passes between a draft's forward and an output's text, by profilers in all
processes of an `LLM`: `python tests/token_way.py`."""

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "pilotfish"
#: Where the profilers find the flag and leave what they saw.
FOLDER = "PILOTFISH_TOKEN_WAY"
#: What the flag says while profilers count a short output and a long one, and afterwards.
SHORT, LONG, OVER = 1, 2, 3
#: Tokens of each. A file is on the way if the long one's calls are more, by one for eight tokens: what is done once a
#: request, or once a second, is not.
TOKENS, SELDOM = {SHORT: 32, LONG: 160}, 8


def profile() -> None:
    """Count calls by file as the flag says, then write the counts. Every process calls this first."""
    folder = Path(os.environ[FOLDER])
    with (folder / "flag").open("r+b") as file:
        flag = mmap.mmap(file.fileno(), 1)
    prefix, counts, lock = str(SOURCE), {SHORT: Counter[str](), LONG: Counter[str]()}, threading.Lock()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not (name := frame.f_code.co_filename).startswith(prefix):
            return
        if flag[0] in counts:
            counts[flag[0]][name] += 1
        elif flag[0] == OVER and lock.acquire(blocking=False):  # never released: one thread writes, once
            (folder / f"{os.getpid()}.json").write_text(json.dumps([counts[SHORT], counts[LONG]]))

    threading.setprofile(seen)
    sys.setprofile(seen)


def generate(mode: str) -> None:
    """Outputs in this process and its workers, with the flag as each needs it."""
    from pilotfish import LLM, SamplingParams, resolve_pair

    pair = resolve_pair("pycode")
    with LLM(pair.target, draft=pair.draft, mode=mode, budget="fixed", threads=1, kv_slots=4096) as llm:
        for state, tokens in ((0, 8), *TOKENS.items(), (OVER, 8)):
            with (Path(os.environ[FOLDER]) / "flag").open("r+b") as file:
                file.write(bytes([state]))
            llm.generate(["def mean(values):\n"], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
            time.sleep(1.0)  # a draft's process may have to catch up: that is no part of the next output


def files_on_the_way(mode: str) -> list[set[str]]:
    """Files that a token passes, one set for each process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "flag").write_bytes(bytes([0]))
        (folder / "sitecustomize.py").write_text("from token_way import profile\nprofile()\n")
        paths = (name, str(Path(__file__).parent), str(SOURCE.parent), os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), FOLDER: name}
        command = [sys.executable, "-c", f"from token_way import generate\ngenerate({mode!r})"]
        subprocess.run(command, env=environment, check=True, timeout=300)
        counted = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return [{str(Path(file).relative_to(SOURCE)) for file in _often(*counts)} for counts in counted]


def _often(short: dict[str, int], long: dict[str, int]) -> list[str]:
    more = (TOKENS[LONG] - TOKENS[SHORT]) / SELDOM
    return [file for file, calls in long.items() if calls - short.get(file, 0) >= more]


if __name__ == "__main__":
    for mode in sys.argv[1:] or ("sync", "async"):
        ways = files_on_the_way(mode)
        sys.stdout.write(f"{mode}: {len(set().union(*ways))} files\n")
        for files in ways:
            sys.stdout.write(f"  {len(files)} in one process\n" + "".join(f"    {file}\n" for file in sorted(files)))
