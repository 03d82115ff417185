"""OpenAI's routes from several replicas of a patched model, by Ray Serve.

    pip install ".[serve]" "ray[serve]"
    python examples/ray_serve.py --model MODEL --head HEAD --rows 8 --replicas 4 --gpus 1

Each replica is the application of `fastspec serve`: the same routes, and a process with a model and an open batch. Ray
starts replicas as requests come, up to `--replicas`, and gives each request to one that has room; so `/metrics` shows
one replica's.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from ray import serve


def application(
    model: str,
    head: str | None = None,
    *,
    name: str | None = None,
    rows: int = 8,
    least: int = 1,
    replicas: int = 4,
    gpus: float = 0,
) -> serve.Application:
    """What `serve.run` takes: `least` to `replicas` replicas, each with `gpus` GPUs to itself and `rows` requests
    decoded at a time. `head` is an EAGLE-3 head."""

    def build() -> Any:  # in the replica
        from fastspec.programs.cli.serving import chosen_of, opened
        from fastspec.programs.serving.app import build_app
        from fastspec.programs.serving.remote import Remote

        chosen = chosen_of(model, {} if head is None else {"eagle3": head}, None)
        batch = Remote(partial(opened, model, chosen, rows=rows, device="cuda" if gpus else "cpu"))
        return build_app(batch, batch.tokenizer, name or model, head=chosen.head)

    scaling = {"min_replicas": least, "max_replicas": replicas, "target_ongoing_requests": rows}
    options = {"num_gpus": gpus}
    deployed = serve.deployment(
        name="fastspec", autoscaling_config=scaling, ray_actor_options=options, max_ongoing_requests=4 * rows
    )
    return deployed(serve.ingress(build)()).bind()


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description="Serve a patched model from several replicas.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--head", help="an EAGLE-3 head; that of a model that ships one is found")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a replica")
    given = parser.parse_args()
    serve.run(
        application(given.model, given.head, rows=given.rows, replicas=given.replicas, gpus=given.gpus), blocking=True
    )


if __name__ == "__main__":
    main()
