"""Files of the package that a token passes between a draft's forward and a client's socket, by profilers in all
processes of a server: `python tests/token_way.py`."""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "pilotfish"
#: Where the profilers of a server's processes find the flag and leave what they saw.
FOLDER = "PILOTFISH_TOKEN_WAY"
#: Chunks of the answer after which profilers begin to count and end.
BEGIN, END = 8, 32
#: Seconds that a paced target takes for a step. A file is on the way if it is entered in half of all intervals of that
#: length: what is done once a second is not.
STEP = 0.1
#: What the flag says while profilers count, and afterwards.
UP, OVER = 1, 2


def profile() -> None:
    """Count calls by file while the flag is up; write the counts once it is down again. Each process's
    `sitecustomize` calls this."""
    folder = Path(os.environ[FOLDER])
    with (folder / "flag").open("r+b") as file:
        flag = mmap.mmap(file.fileno(), 1)
    prefix, steps, lock = str(SOURCE), defaultdict[str, set[int]](set), threading.Lock()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not (name := frame.f_code.co_filename).startswith(prefix):
            return
        if flag[0] == UP:
            steps[name].add(int(time.monotonic() / STEP))
        elif flag[0] == OVER and steps and lock.acquire(blocking=False):  # never released: one thread writes, once
            counts = {name: len(entered) for name, entered in list(steps.items())}
            (folder / f"{os.getpid()}.json").write_text(json.dumps(counts))

    threading.setprofile(seen)
    sys.setprofile(seen)


def files_on_the_way(target: Path, **options: Any) -> dict[str, set[str]]:
    """Files that a streamed token passes, by what the process is (its pid where it has no title)."""
    from live import LiveServer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "flag").write_bytes(bytes([0]))
        (folder / "sitecustomize.py").write_text("from token_way import profile\nprofile()\n")
        before = {key: os.environ.get(key) for key in ("PYTHONPATH", FOLDER)}
        paths = (str(folder), str(Path(__file__).parent), before["PYTHONPATH"] or "")
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ[FOLDER] = name
        try:
            with LiveServer(target=target, **options) as server:
                _stream(server.url, folder / "flag", 8 * END)
                _stream(server.url, None, 8)  # every process calls something, and writes what it has counted
        finally:
            for key, value in before.items():
                os.environ.pop(key, None)
                os.environ.update({key: value} if value is not None else {})
        return {path.stem: _often(json.loads(path.read_text())) for path in folder.glob("*.json")}


def _often(counts: dict[str, int]) -> set[str]:
    most = max(counts.values())
    return {str(Path(name).relative_to(SOURCE)) for name, steps in counts.items() if 2 * steps >= most}


def _stream(url: str, flag: Path | None, max_tokens: int) -> None:
    model = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
    asked = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": max_tokens, "ignore_eos": True}
    body = json.dumps({**asked, "temperature": 0, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    chunks = 0
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            chunks += line.startswith(b"data: {")
            if flag is not None and chunks in (BEGIN, END):
                with flag.open("r+b") as file:
                    file.write(bytes([UP if chunks == BEGIN else OVER]))
    assert flag is None or chunks >= END, "the stream ended while profilers counted"


if __name__ == "__main__":
    from pilotfish import resolve_pair

    pair = resolve_pair("pycode")
    for mode in sys.argv[1:] or ("off", "sync", "async"):
        given = {"pace": f"target={1000 * STEP:.0f}ms,draft=20ms"} | ({} if mode == "off" else {"draft": pair.draft})
        ways = files_on_the_way(pair.target, mode=mode, **given)
        sys.stdout.write(f"{mode}: {len(set().union(*ways.values()))} files\n")
        for process, files in ways.items():
            sys.stdout.write(f"  process {process}: {len(files)}\n    " + "\n    ".join(sorted(files)) + "\n")
