"""`fastspec serve --warmup`, and the open batch's own warm-up."""

from __future__ import annotations

import gc
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured import stand_in, what_no_graph_served
from helpers.devices import ON_CUDA
from helpers.models import tiny_head
from helpers.open import GREEDY, alone, made, texts, told
from helpers.serve import MARKS
from helpers.training import save_with_tokenizer, small_target
from typer.testing import CliRunner

import fastspec
from fastspec.errors import Unsupported
from fastspec.generation import sequence_state
from fastspec.generation.drafters import nasd
from fastspec.generation.drafters.base import HostDrafter
from fastspec.generation.stats import Stats
from fastspec.patches import continuous_batch
from fastspec.patches.warmup import room_for, warm_lengths
from fastspec.programs.cli.app import app
from fastspec.programs.serving import app as server
from fastspec.programs.serving import remote
from fastspec.programs.serving.remote import Remote

pytestmark = MARKS
TREE = fastspec.Eagle3(depth=3, top_k=2, total_tokens=6)


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model in a folder, and what the command was about to serve."""
    save_with_tokenizer(small_target(), tmp_path / "model")
    found: dict[str, Any] = {"model": str(tmp_path / "model")}
    build = server.build_app

    class Near(Remote):
        """What the other process does, in this one."""

        def __init__(self, build: Any) -> None:
            self.batch, self.tokenizer = pickle.loads(pickle.dumps(build))()

        def __exit__(self, *_: Any) -> None:
            self.batch.close(cancel=True)

    def built(near: Any, *given: Any, **options: Any) -> Any:
        found.update(batch=near.batch, widths=set(near.batch._widths.made), joined=near.batch.stats.joined)
        return build(near.batch, *given, **options)

    def run(gate: Any, listener: socket.socket, **options: Any) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname())
        found["frozen"] = gc.get_freeze_count()

    monkeypatch.setattr(remote, "Remote", Near)
    monkeypatch.setattr(server, "build_app", built)
    monkeypatch.setattr(server, "run_server", run)
    return found


def test_a_server_warms_up_before_its_port_opens(seen: dict[str, Any]) -> None:
    arguments = ["serve", seen["model"], "--rows", "3", "--port", "0", "--max-length", "200", "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--warmup"])
    assert done.exit_code == 0, done.output
    assert (
        "11 of 11 calls" in done.output and "warmed up in" in done.output
    )  # prompts of 32, 64, 128, 176; rows 1, 2, 3, each twice
    assert seen["widths"] == {1, 2, 3} and seen["joined"] == 0
    assert seen["frozen"] > 100_000 and gc.get_freeze_count() == 0, (
        "collections leave what there was before the first request alone"
    )
    done = CliRunner().invoke(app, [*arguments, "--warmup", "--warmup-length", "40"])
    assert done.exit_code == 0 and "8 of 8 calls" in done.output  # prompts of 40, 32
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "warmed up" not in done.output and seen["widths"] == {3}
    gc.freeze()  # as it was


def test_a_batch_that_was_warmed_up_answers_and_counts_as_another() -> None:
    model = small_target()
    head = tiny_head(model)
    ids = torch.randint(5, model.config.vocab_size, (1, 9))
    alone = model.generate(ids, max_new_tokens=12, do_sample=False)
    fastspec.patch(model, eagle3=head)
    counted, told = [], list[tuple[int, int]]()
    for warm in (False, True):
        with fastspec.continuous(model, TREE, rows=2, max_length=100) as batch:
            if warm:
                state = torch.get_rng_state()
                assert batch.warmup(length=40, told=lambda done, of: told.append((done, of))) > 0
                assert torch.equal(torch.get_rng_state(), state)
                assert (batch.running, batch.waiting, batch.stats) == (0, 0, Stats(assistant="eagle3", rows=2))
            assert torch.equal(batch.submit(ids, max_new_tokens=12, do_sample=False).result(), alone)
        counted.append((batch.stats.joined, batch.stats.round_tokens, batch.stats.rows))
    assert counted[0] == counted[1] and told == [(done, 6) for done in range(7)]


def test_no_end_token_and_no_padding_shorten_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastspec.patch(small_target())
    model.generation_config.eos_token_id = list(range(64))
    model.generation_config.pad_token_id = 70
    with fastspec.continuous(model, "nasd", rows=3, max_length=100) as batch:
        asked, submit = [], batch.submit
        monkeypatch.setattr(
            batch, "submit", lambda *given, **options: asked.append(submit(*given, **options)) or asked[-1]
        )
        batch.warmup(length=40)
    assert [answer.result().shape[1] - 24 for answer in asked] == [40, 32] + [32] * 2 * (1 + 2 + 3)


def test_rows_without_room_for_a_warm_up_are_refused() -> None:
    with fastspec.continuous(fastspec.patch(small_target()), "nasd", rows=1, max_length=24) as batch:
        with pytest.raises(Unsupported, match="length=1920 and max_length=24"):
            batch.warmup()
        with pytest.raises(Unsupported, match="length=0"):
            batch.warmup(0)


def buffers_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buffers begin with 64 slots, and grow to powers of two."""
    monkeypatch.setattr(sequence_state, "FIRST_SLOTS", 64)
    monkeypatch.setattr(
        sequence_state.SequenceState,
        "_wanted",
        lambda self, committed: max(self.first, 1 << (committed - 1).bit_length()),
    )


@pytest.mark.some("Eagle3(depth=3, top_k=2, total_tokens=6, fused=None)-random")  # drafts are right in the next test
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize(
    ("assistant", "kind"), [("autoregressive", "random"), (TREE, "random"), (TREE, "bigram")], ids=str
)
def test_texts_behind_a_warm_up_find_everything_captured(
    assistant: Any, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of one token up to the warm-up's length, which is all that buffers have room for, alone and several at
    once, in every number of rows, whatever drafts are accepted."""
    if device == "cpu":
        stand_in(monkeypatch)
    buffers_of_cuda(monkeypatch)
    ran = what_no_graph_served(monkeypatch)
    plain, model = (each.to(device) for each in made(kind, max_position_embeddings=512))
    with fastspec.continuous(model, assistant, rows=2, max_length=400) as batch:
        batch.warmup(length=128)
        assert ran
        ran.clear()
        for count in (2, 1, 3):
            for length in (1, 108):
                with batch._changed:
                    ids = texts(length, *[9] * (count - 1))
                    futures = [
                        batch.submit(each, **GREEDY, max_new_tokens=20 + 9 * (place > 0))
                        for place, each in enumerate(ids)
                    ]
                assert told(futures)[0] == alone(plain, ids[0].to(device), 20)
        assert not ran


@pytest.mark.some("100", "Eagle3")  # n-grams in test_open_batch_warmup.py
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize(
    ("assistant", "length"),
    [("autoregressive", None), ("autoregressive", 100), (TREE, None), ("nasd", None)],
    ids=str,
)
def test_chats_of_any_length_behind_a_warm_up_find_everything_captured(
    assistant: Any, length: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats at once whose turns go on with texts that rows keep, up to what a row has room for; behind a warm-up for
    shorter ones they make buffers larger."""
    if device == "cpu":
        stand_in(monkeypatch)
        monkeypatch.setattr(continuous_batch, "free_memory", lambda device: 2**30)
        monkeypatch.setitem(nasd.COSTS, "cpu", nasd.COSTS["cuda"])
    buffers_of_cuda(monkeypatch)
    ran = what_no_graph_served(monkeypatch)
    model = made("bigram", max_position_embeddings=512)[1].to(device)
    with fastspec.continuous(model, assistant, rows=2, max_length=512) as batch:
        batch.warmup(length)
        ran.clear()
        assert length is not None or bytes_of(batch) == batch._widths.bytes(512)
        assert batch.info["buffers"] == "0.0 GiB"
        chats = texts(380, 150)
        for turn in range(2):
            with batch._changed:
                futures = [batch.submit(each, **GREEDY, max_new_tokens=24) for each in chats]
            more = texts(30, 31, seed=turn + 1)
            chats = [torch.cat((answer.result()[0].cpu(), said)) for answer, said in zip(futures, more, strict=True)]
        assert len(chats[0]) == 488 and batch.stats.reused >= 380 + 150
    assert bool(ran) is (length is not None)


def bytes_of(batch: Any) -> int:
    """Memory of the keys and values of all rows, and of the row that a prompt is read in."""
    engines = [each.engine for each in batch._widths.made.values()]
    pairs = [(engine.target, engine.drafter) for engine in engines] + [engines[0].entries[1]]
    states = [part.state for pair in pairs for part in pair if part is not None and not isinstance(part, HostDrafter)]
    return sum(kind.k.nbytes + kind.v.nbytes for state in states for kind in state.kinds)


def test_a_warm_up_is_for_as_long_texts_as_half_of_the_free_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = list[str]()
    monkeypatch.setattr(continuous_batch, "notice", told.append)
    assert [*warm_lengths(9000)] == [8064, 3968, 1920] and [*warm_lengths(5000)] == [5000, 3968, 1920]
    assert [*warm_lengths(3000)] == [3000, 1920] and [*warm_lengths(1)] == [1]
    _, model = made("random", max_position_embeddings=8192)
    with fastspec.continuous(model, "autoregressive", rows=3) as batch:
        assert batch._warm_length() == 1920  # of rounds that are not captured, whose buffers grow as they like
    stand_in(monkeypatch)
    with fastspec.continuous(made("random", max_position_embeddings=8192)[1], "autoregressive", rows=3) as batch:
        for length, shorter in ((8064, 3968), (3968, 1920), (1920, 1920)):
            need = 2 * batch._widths.bytes(room_for(length, 1))
            for free, wanted in ((need, length), (need - 1, shorter)):
                monkeypatch.setattr(continuous_batch, "free_memory", lambda device, free=free: free)
                told.clear()
                assert batch._warm_length() == wanted and len(told) == (wanted < 8064)
                assert all(f"texts of {wanted:,} tokens" in line and "up to 8,192" in line for line in told)
