"""Programs that call `generate` for their user: pipelines, streamers in threads and event loops, LangChain,
smolagents."""

from __future__ import annotations

import asyncio
from threading import Thread
from typing import Any

import pytest
from helpers.clients import HEAD, MARKS, QUESTIONS, asked, chats, drafting

import fastspec

pytestmark = MARKS
OPTIONS = {"max_new_tokens": 16, "do_sample": False}


@pytest.mark.parametrize("batch", [1, 4])
def test_pipelines(pair, tokenizer, batch):
    from transformers import pipeline

    original, served = pair

    def emitted(model: Any) -> Any:
        made = pipeline("text-generation", model=model, tokenizer=tokenizer)
        return [row[0]["generated_text"] for row in made(chats(*QUESTIONS), batch_size=batch, **OPTIONS)]

    expected = emitted(original)
    with drafting(served, calls=4 // batch):
        assert emitted(served) == expected
    assert all(row[-1]["content"] for row in expected)


def streamed(model: Any, tokenizer: Any) -> list[str]:
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**asked(tokenizer, QUESTIONS[0]), **OPTIONS, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    return pieces


async def streamed_async(model: Any, tokenizer: Any) -> list[str]:
    from transformers import AsyncTextIteratorStreamer

    streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**asked(tokenizer, QUESTIONS[0]), **OPTIONS, "streamer": streamer})
    thread.start()
    pieces = [piece async for piece in streamer]
    thread.join()
    return pieces


def test_streamers(pair, tokenizer):
    original, served = pair
    expected = streamed(original, tokenizer)
    assert len(expected) > 4
    with drafting(served, calls=2):
        assert streamed(served, tokenizer) == expected
        assert asyncio.run(streamed_async(served, tokenizer)) == expected


def test_langchain(pair, tokenizer):
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from transformers import pipeline

    original, served = pair

    def emitted(model: Any) -> list[Any]:
        made = pipeline("text-generation", model=model, tokenizer=tokenizer, return_full_text=False, **OPTIONS)
        llm = HuggingFacePipeline(pipeline=made)
        chat = ChatHuggingFace(llm=llm, tokenizer=tokenizer, model_id="local")
        told = (
            llm.invoke("The sky is"),
            llm.batch(["One, two,", "The capital of France is"]),
            list(llm.stream("Once upon a time")),
        )
        return [*told, chat.invoke(QUESTIONS[1]).content]

    expected = emitted(original)
    with drafting(served):
        assert emitted(served) == expected
    assert len(expected[2]) > 4


def test_smolagents(folder):
    """Its model loads its own weights, and stops at words through a criterion with a state; an agent calls it."""
    from smolagents import CodeAgent, TransformersModel

    models = [
        TransformersModel(model_id=str(folder), device_map="cpu", max_new_tokens=24, do_sample=False) for _ in range(2)
    ]
    fastspec.patch(models[1].model, eagle3=HEAD, assistant="eagle3")
    message = [{"role": "user", "content": [{"type": "text", "text": "Count from one to twenty in words."}]}]

    def emitted(model: Any) -> list[Any]:
        agent = CodeAgent(tools=[], model=model, max_steps=1, verbosity_level=0)
        agent.prompt_templates["system_prompt"] = "Answer with code between <code> and </code>."
        agent.run("What is 2+2?")
        return [
            model.generate(message, stop_sequences=["sentence", "Ten"]).content,
            [piece.content for piece in model.generate_stream(message)],
            [step.model_output for step in agent.memory.steps if hasattr(step, "model_output")],
        ]

    expected = emitted(models[0])
    with drafting(models[1].model):
        assert emitted(models[1]) == expected
