"""Data of smollm2's head: prompts, made of forms and subjects, and what the model has answered to them.

    python benchmarks/smollm2.py > prompts.jsonl
    pilotfish generate --target smollm2 --mode off --prompts prompts.jsonl --temperature 0.8 --seed 1 \\
        --max-tokens 512 --concurrency 48 --json > answers.jsonl
    python benchmarks/smollm2.py answers.jsonl > data.jsonl
    pilotfish train head --target smollm2 --kind eagle3 --lean --draft-vocab 8192 --tokens 1843200 --sampled-tokens 0 \\
        --data data.jsonl --out smollm2-head
"""

import json
import random
import sys
import tomllib
from pathlib import Path

NUMBERS = 300  # prompts with numbers in them


def prompts() -> list[str]:
    """Each form with each of its subjects, in an order of their own."""
    table, generator = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")), random.Random(1)
    forms, subjects = table["forms"], table["subjects"]
    made = [form.format(subject) for kind in subjects for form in forms[kind] for subject in subjects[kind]]
    for number in range(NUMBERS):
        a, b = generator.randrange(20, 200), generator.randrange(2, 20)
        made.append(forms["numbers"][number % len(forms["numbers"])].format(a=a, b=b))
    random.Random(0).shuffle(made)
    return made


def main(answers: str | None = None) -> None:
    asked = prompts()
    if answers is None:
        lines = [{"id": place, "turns": [prompt]} for place, prompt in enumerate(asked)]
    else:
        rows = map(json.loads, Path(answers).read_text("utf-8").splitlines())
        lines = [{"turns": [asked[row["id"]]], "response": row["text"]} for row in rows]
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
