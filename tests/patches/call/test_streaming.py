"""What a streamer is given of a round's tokens, and the temperature that a call's processors apply."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers.generation import logits_process as lp

from fastspec.patches.call.processors import Streaming, temperature_of


class Columns:
    """A streamer as transformers has them."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


class Lists(Columns):
    """One that takes a round's tokens as they are."""

    def put_tokens(self, tokens: list[int]) -> None:
        self.got.append(tuple(tokens))


def test_a_streamer_that_takes_lists_is_given_those_of_one_row():
    streamer = Lists()
    streaming = Streaming(streamer, 1, pad=0)
    streaming.emit(0, [5, 6], 1, False)
    streaming.emit(0, [7], 0, True)
    assert streamer.got == [(5, 6), (7,)]


@pytest.mark.parametrize("kind", [Columns, Lists])
def test_of_two_rows_columns_come_when_all_have_them(kind):
    streamer = kind()
    streaming = Streaming(streamer, 2, pad=9)
    streaming.emit(0, [5, 6], 1, True)
    assert streamer.got == []
    streaming.emit(1, [7, 8, 4], 2, True)
    assert streamer.got == [[5, 7], [6, 8], [9, 4]]


def test_one_that_answers_to_any_name_is_given_columns():
    streamer = Mock()
    Streaming(streamer, 1, pad=0).emit(0, [5, 6], 1, False)
    streamer.put_tokens.assert_not_called()
    assert [call.args[0].tolist() for call in streamer.put.call_args_list] == [[5], [6]]


def test_the_temperature_is_the_warper_s_or_one():
    warper, other = lp.TemperatureLogitsWarper(0.5), lp.TopKLogitsWarper(3)
    assert temperature_of([other, warper]) == 0.5 and temperature_of([other]) == temperature_of([]) == 1.0
