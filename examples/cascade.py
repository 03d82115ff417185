"""A cascade made, weighed and served, in minutes on two CPU cores.

    pip install ".[demo,serve]"
    python examples/cascade.py --folder /tmp/cascade

The large model is SmolLM2-135M-Instruct. The small stage is a copy of it without two of its 30 layers, which nobody has
trained to do without them: it knows fewer capitals, and is hardly cheaper. A real small stage is a model of its own;
the commands are the same. Numbers of some 40 held-out questions show the way and prove nothing. `evaluate` takes the
rates that were measured here, by which the copy may even be the dearer one. What is explained and served decides by
costs in numbers of layers instead, so that it does not hang on what else this machine does.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fastspec
from fastspec.models import SMOLLM2, load_model

LAYERS, DROPPED = 30, (14, 20)
NEW_TOKENS = 12
PRICES = 100, 2000, 40000
"""Milliseconds that a bad answer costs, where a token of the large model costs 30."""
PAIRS = """France:Paris Japan:Tokyo Italy:Rome Spain:Madrid Egypt:Cairo Peru:Lima Kenya:Nairobi Cuba:Havana
Norway:Oslo Poland:Warsaw Greece:Athens Iran:Tehran Chile:Santiago Ghana:Accra Nepal:Kathmandu Turkey:Ankara
Germany:Berlin Austria:Vienna Hungary:Budapest Portugal:Lisbon Ireland:Dublin Sweden:Stockholm Finland:Helsinki
Denmark:Copenhagen Belgium:Brussels Romania:Bucharest Bulgaria:Sofia Serbia:Belgrade Croatia:Zagreb Ukraine:Kyiv
Russia:Moscow China:Beijing Thailand:Bangkok Vietnam:Hanoi Indonesia:Jakarta Philippines:Manila Pakistan:Islamabad
Bangladesh:Dhaka Iraq:Baghdad Syria:Damascus Lebanon:Beirut Jordan:Amman Canada:Ottawa Brazil:Brasilia Colombia:Bogota
Venezuela:Caracas Ecuador:Quito Uruguay:Montevideo Paraguay:Asuncion Nigeria:Abuja Uganda:Kampala Tanzania:Dodoma
Zambia:Lusaka Zimbabwe:Harare Angola:Luanda Senegal:Dakar Mali:Bamako Morocco:Rabat Algeria:Algiers Tunisia:Tunis
Libya:Tripoli Sudan:Khartoum Somalia:Mogadishu Australia:Canberra Iceland:Reykjavik Estonia:Tallinn Latvia:Riga
Lithuania:Vilnius Mongolia:Ulaanbaatar Armenia:Yerevan Georgia:Tbilisi Azerbaijan:Baku Afghanistan:Kabul"""
CAPITALS = dict(pair.split(":") for pair in PAIRS.split())


def save_small(folder: Path) -> None:
    """Save the copy with fewer layers. It needs no tokenizer: a stage's folder without one has the large model's."""
    model, _ = load_model(SMOLLM2)
    kept = [layer for number, layer in enumerate(model.model.layers) if number not in DROPPED]
    model.model.layers = torch.nn.ModuleList(kept)
    for number, layer in enumerate(kept):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(kept)
    model.save_pretrained(folder)


def run(*arguments: Any, status: int = 0) -> None:
    """Run a command of fastspec, which ends with this status."""
    print("\n$ fastspec", *arguments, flush=True)
    done = subprocess.run([sys.executable, "-m", "fastspec", *map(str, arguments)], check=False)
    if done.returncode != status:
        raise SystemExit(f"the command ended with status {done.returncode}")


def judge(answers: Path, right: Path) -> None:
    """Write which answers are right: those that name the capital."""
    lines = [json.loads(line) for line in answers.read_text().splitlines()][1:]
    with right.open("w") as file:
        for line in lines:
            named = CAPITALS[line["item"]] in line["answer"]
            print(json.dumps({"item": line["item"], "stage": line["stage"], "right": named}), file=file)


def explain(config: fastspec.Cascade) -> None:
    """Print how two questions are answered at several prices."""
    large, tokenizer = load_model(SMOLLM2)
    fastspec.patch(large, cascade=replace(config, tokenizer=tokenizer))
    with fastspec.continuous(large, "cascade", rows=4, max_length=512) as batch:
        for place in ("Japan", "Mongolia"):
            turns = [{"role": "user", "content": question(place)}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
            futures = [batch.submit(ids, price=price, **options) for price in PRICES]
            for price, future in zip(PRICES, futures, strict=True):
                answer = tokenizer.decode(future.result()[0, ids.shape[1] :], skip_special_tokens=True)
                print(f"\n{place} at a price of {price} ms: {answer!r}\n{future.explanation}", flush=True)


def question(place: str) -> str:
    """What is asked about a country."""
    return f"What is the capital of {place}?"


@contextmanager
def served(cascade: Path, log: Path) -> Iterator[str]:
    """The address of a server of the cascade, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["serve", SMOLLM2, "--cascade", str(cascade), "--rows", "4", "--max-length", "512", "--port", str(port)]
    print("\n$ fastspec", *command, flush=True)
    with log.open("w") as file:
        server = subprocess.Popen([sys.executable, "-m", "fastspec", *command], stdout=file, stderr=file)
        try:
            while f"serving on http://127.0.0.1:{port}" not in log.read_text():
                if server.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


def ask(server: str, place: str, price: float) -> None:
    """Print an answer as it streams."""
    body = {"messages": [{"role": "user", "content": question(place)}], "max_tokens": NEW_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{server}/v1/chat/completions",
        json.dumps({**body, "stream": True, "price": price}).encode(),
        {"Content-Type": "application/json"},
    )
    print(f"\n{place} at a price of {price:g} ms:", end="", flush=True)
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                text = choices[0]["delta"].get("content") if choices else None
                print(f" [{text}]" if text else "", end="", flush=True)
    print()


def main() -> None:
    """Make, train, evaluate, explain and serve."""
    parser = argparse.ArgumentParser(description="A cascade of SmolLM2 and a copy of it with fewer layers.")
    parser.add_argument("--folder", type=Path, default=Path("cascade-example"), help="for models, answers and results")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    small, items, answers, right, predictor, cascade = (
        folder / name
        for name in ("small", "capitals.jsonl", "answers.jsonl", "right.jsonl", "predictor.safetensors", "cascade.yaml")
    )
    save_small(small)
    items.write_text("".join(json.dumps({"id": place, "prompt": question(place)}) + "\n" for place in CAPITALS))

    train = ["cascade", "train", "--stage", f"small={small}", "--model", f"large={SMOLLM2}", "--prompts", items]
    train += ["--answers", answers, "--right", right, "--out", predictor, "--max-new-tokens", NEW_TOKENS]
    if not right.exists():
        run(*train, status=1)  # it writes the answers, and says that nobody has judged them yet
    judge(answers, right)
    run(*train)
    run("cascade", "evaluate", "--predictor", predictor, "--answers", answers)

    stage, costs = fastspec.Stage(str(small), name="small"), [LAYERS - len(DROPPED), LAYERS]
    fastspec.Cascade(stages=[stage], label="large", predictor=str(predictor), costs=costs).to_yaml(cascade)
    explain(fastspec.Cascade.from_yaml(cascade))

    with served(cascade, folder / "server.log") as server:
        for price in (PRICES[0], PRICES[-1]):
            ask(server, "Japan", price)
        with urllib.request.urlopen(f"{server}/metrics") as page:
            told = page.read().decode().splitlines()
    print("\n".join(line for line in told if line.startswith("fastspec_stage_requests_total")))
    print("\n".join(line for line in (folder / "server.log").read_text().splitlines() if "; small: " in line))


if __name__ == "__main__":
    main()
