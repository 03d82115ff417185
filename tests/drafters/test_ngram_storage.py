"""The storages of n-grams and suffixes, held to dictionaries over all contexts; their files; what they cost."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from helpers.examples import examples
from helpers.threads import GRAIN, Writes
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fastspec
from fastspec.generation.drafters.nasd import grow
from fastspec.generation.drafters.ngram_arrays import WIDTH, Edges
from fastspec.patches.backends import ngram_counter, ngram_grower


class Naive:
    """The specification: every context of `least` to `most` tokens by name, with all that was counted after it, in
    order."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.seen: dict[tuple[int, ...], list[list[int]]] = {}  # context -> [token, count, time of the last count]
        self.clock = 0

    def contexts(self, text: list[int]) -> list[tuple[int, ...]]:
        return [tuple(text[len(text) - k :]) for k in range(min(self.most, len(text)), self.least - 1, -1)]

    def feed(self, text: list[int], token: int, fillers: list[int]) -> None:
        for each in (*fillers, token):
            self.clock += 1
            for context in self.contexts(text):
                known = self.seen.setdefault(context, [])
                entry = next((entry for entry in known if entry[0] == each), None)
                if entry is None:
                    if len(known) == WIDTH:
                        known.remove(min(known, key=lambda entry: entry[1:]))
                    entry = [each, 0, 0]
                    known.append(entry)
                entry[1:] = entry[1] + 1, self.clock

    def look(self, text: list[int]) -> tuple[int, list[tuple[int, int]]]:
        for context in self.contexts(text):
            if context in self.seen:
                best = sorted(self.seen[context], key=lambda entry: (-entry[1], -entry[2]))
                return len(context), [(token, times) for token, times, _ in best]
        return 0, []


MAKERS = {
    "ngram 2": (lambda: fastspec.NgramStorage(2), 1, 1),
    "ngram 4": (lambda: fastspec.NgramStorage(4), 1, 3),
    "one level 3": (lambda: fastspec.NgramStorage(3, back_off=False), 2, 2),
    "suffix": (lambda: fastspec.SuffixStorage(), 1, 32),
    "suffix 2 to 3": (lambda: fastspec.SuffixStorage(2, 3), 2, 3),
}
every_kind = pytest.mark.parametrize("kind", MAKERS)
# (text, token, fillers): several texts that grow in turn, over few tokens so that contexts come again, or over more
# than a tally holds
events = st.integers(2, 12).flatmap(
    lambda size: st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, size), st.lists(st.integers(0, size), max_size=3, unique=True)),
        max_size=60,
    )
)


@every_kind
@examples(150)
@given(events=events, draft=st.lists(st.integers(0, 12), max_size=5))
def test_a_storage_answers_like_dictionaries_of_all_contexts(kind, events, draft):
    make, least, most = MAKERS[kind]
    storage, naive = make(), Naive(least, most)
    texts: list[list[int]] = [[], [], []]
    cursors = [storage.start() for _ in texts]
    for place, token, fillers in events:
        naive.feed(texts[place], token, fillers)
        cursors[place] = storage.feed(cursors[place], token, fillers)
        texts[place].append(token)
        for text, cursor in zip(texts, cursors, strict=True):
            assert storage.look(cursor) == naive.look(text)
    for text, cursor in zip(texts, cursors, strict=True):
        for token in draft:
            text, cursor = [*text, token], storage.step(cursor, token)
            assert storage.look(cursor) == naive.look(text)
    storage.reset()
    assert storage.look(storage.step(storage.start(), 1)) == (0, [])


def test_edges_are_numbered_like_the_keys_of_a_dictionary():
    """Over many enlargements, with tokens of all 24 bits and neighbouring ones, none of which may be taken for
    another."""
    edges, naive, draw = Edges(), {}, random.Random(0)
    for _ in range(20_000):
        pair = (
            draw.randrange(1 << draw.randrange(1, 31)),
            draw.choice([draw.randrange(100), draw.randrange(1 << 24), (1 << 24) - 1]),
        )
        assert edges.find(*pair) == naive.get(pair, 0)
        assert edges.add(*pair) == naive.setdefault(pair, len(naive) + 1)
    assert len(edges) == len(naive)
    assert all(edges.find(*pair) == number and edges.ends(number) == pair for pair, number in naive.items())
    assert 2 * len(edges) <= len(edges.slots) == edges.mask + 1


def test_no_thread_of_torch_is_woken_to_enlarge_a_table():
    """Of as many edges as would take several: rounds wait for whoever counts."""
    edges = Edges()
    with Writes() as writes:
        for number in range(1, 2 * GRAIN):
            edges.add(number, 7 * number)
    assert len(edges.slots) > 2 * GRAIN and not writes.wakes
    assert all(edges.find(number, 7 * number) == number for number in range(1, 2 * GRAIN, 97))


@every_kind
def test_a_longer_text_answers_like_dictionaries_of_all_contexts(kind):
    make, least, most = MAKERS[kind]
    storage, naive, text, cursor = make(), Naive(least, most), [], None
    cursor = storage.start()
    for token in drawn_text(2_000, 50):
        fillers = [token % 7, token]
        naive.feed(text[-most:], token, fillers)
        cursor = storage.feed(cursor, token, fillers)
        text.append(token)
        assert storage.look(cursor) == naive.look(text[-most:])


def drawn_text(tokens: int, kinds: int) -> list[int]:
    """After each two tokens one of three, the first of them most often, and now and then any token, small ones more
    often than large."""
    draw = random.Random(0)
    text = [0, 0]
    while len(text) < tokens:
        kept = draw.random() < 0.75
        seen = random.Random(text[-2] * kinds + text[-1]) if kept else draw
        ranks = [int(kinds ** seen.random()) for _ in range(3)]
        text.append(ranks[min(2, int(draw.expovariate(1.5)))])
    return text


def read(storage, text):
    cursor = storage.start()
    for token in text:
        cursor = storage.feed(cursor, token, [token + 1])
    return cursor


def looks(storage):
    """Answers at every place of a text that is partly known."""
    cursor, found = storage.start(), []
    for token in [5, 1, 2, 3, 1, 2, 9, 9, 3, 1, 70000, 2]:
        cursor = storage.step(cursor, token)
        found.append(storage.look(cursor))
    return found


@every_kind
@pytest.mark.parametrize("text", [[], [4], [1, 2, 3, 1, 2, 4, 1, 2, 3, 70000, 1, 2]])
def test_a_saved_storage_goes_on_where_it_was(kind, text, tmp_path):
    storage = MAKERS[kind][0]()
    read(storage, text)
    storage.save(tmp_path / "s.safetensors")
    loaded = type(storage).load(tmp_path / "s.safetensors")
    assert looks(loaded) == looks(storage)
    assert repr(loaded) == repr(storage)
    for each in (loaded, storage):
        read(each, [9, 3, 1, 2, 2, 2])
    assert looks(loaded) == looks(storage)


def changed(path, header=None, **tensors):
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        old = file.metadata()
    held = {**load_file(path), **tensors}
    save_file(
        {name: tensor for name, tensor in held.items() if tensor is not None}, path, metadata={**old, **(header or {})}
    )


def first(tensor, value):
    """The tensor with another value in front."""
    return torch.cat((torch.tensor([value]), tensor[1:]))


@every_kind
@pytest.mark.parametrize(
    "change",
    [
        {"header": {"version": "2"}},
        {"header": {"kind": "else"}},
        {"header": {"format": "pt"}},
        {"header": {"n": "x", "min_match": "x"}},
        {"header": {"n": "1", "min_match": "0"}},
        {"sizes": None},
        {"sizes": torch.tensor([1, 2])},
        {"sizes": torch.zeros(3, 2).long()},
        {"tokens": torch.tensor([-1] * 40)},
        {"counts": torch.tensor([0] * 40)},
        {"tokens": 2**24},
        {"counts": 2**30 + 1},
        {"counts": torch.tensor([0.5])},
        {"contexts": None, "states": None},
        {"contexts": torch.tensor([[-1, 4, -1]]), "states": torch.tensor([[1, -1]])},
        {"contexts": torch.zeros(0, 1).long(), "edges": torch.tensor([[0, 1, 999]])},
        {"contexts": torch.tensor([[3, 3]]), "edges": torch.tensor([[0, 3]])},
        {"contexts": torch.tensor([[2**25] * 3]), "states": torch.tensor([[0, -1], [1, 1]])},
    ],
    ids=str,
)
def test_a_changed_file_is_refused(kind, change, tmp_path):
    storage, path = MAKERS[kind][0](), tmp_path / "s.safetensors"
    read(storage, [1, 2, 3, 1, 2, 4])
    storage.save(path)
    change = {
        name: first(load_file(path)[name], value) if isinstance(value, int) else value for name, value in change.items()
    }
    changed(path, **change)
    with pytest.raises(fastspec.CheckpointError, match=r"s\.safetensors"):
        type(storage).load(path)


def test_a_context_that_a_file_has_twice_is_refused(tmp_path):
    storage, path = fastspec.NgramStorage(2), tmp_path / "s.safetensors"
    cursor = storage.start()
    for token in (1, 2, 3):
        cursor = storage.feed(cursor, token)
    storage.save(path)
    changed(path, contexts=torch.tensor([[1], [1]]))
    with pytest.raises(fastspec.CheckpointError, match="twice"):
        fastspec.NgramStorage.load(path)


def test_edges_of_a_file_that_lead_to_no_longer_text_are_refused(tmp_path):
    storage, path = fastspec.SuffixStorage(), tmp_path / "s.safetensors"
    read(storage, [1, 2, 3, 1, 2, 4])
    storage.save(path)
    edges = load_file(path)["edges"]
    edges[-1, 2] = edges[-1, 0]
    changed(path, edges=edges)
    with pytest.raises(fastspec.CheckpointError, match="leads by token"):
        fastspec.SuffixStorage.load(path)


@every_kind
def test_a_damaged_missing_or_foreign_file_is_refused(kind, tmp_path):
    storage, path = MAKERS[kind][0](), tmp_path / "s.safetensors"
    read(storage, [1, 2, 3, 1, 2, 4])
    storage.save(path)
    whole = path.read_bytes()
    for part in (b"", whole[:7], whole[: len(whole) // 2], whole[:-1], b"\0" * len(whole), whole[20:]):
        path.write_bytes(part)
        with pytest.raises(fastspec.CheckpointError):
            type(storage).load(path)
    with pytest.raises(fastspec.CheckpointError, match="absent"):
        type(storage).load(tmp_path / "absent.safetensors")
    with pytest.raises(fastspec.CheckpointError):
        type(storage).load(tmp_path)
    with pytest.raises(fastspec.CheckpointError, match="nowhere"):
        storage.save(tmp_path / "nowhere" / "s.safetensors")
    other = fastspec.SuffixStorage() if isinstance(storage, fastspec.NgramStorage) else fastspec.NgramStorage()
    other.save(path)
    with pytest.raises(fastspec.CheckpointError, match="load it with that class"):
        type(storage).load(path)


@pytest.mark.parametrize("n", [1, 0, -3, 65, 2.0, True, None, "4"])
def test_sizes_out_of_range_are_refused(n):
    with pytest.raises(fastspec.Unsupported, match="n must be"):
        fastspec.NgramStorage(n)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 2), (1, 0), (1.5, 3)])
def test_match_lengths_out_of_range_are_refused(sizes):
    with pytest.raises(fastspec.Unsupported, match="match"):
        fastspec.SuffixStorage(*sizes)


@pytest.mark.each_value
@pytest.mark.parametrize("make", [fastspec.NgramStorage, fastspec.SuffixStorage])
@pytest.mark.parametrize("text", ["one token", "few tokens"])
def test_repetitive_texts_cost_no_more_than_others(make, text):
    """20,000 tokens that match all the way back; a cost that grew with the text would take minutes."""
    storage = make()
    tokens = [7] * 20_000 if text == "one token" else [1, 2, 1, 3] * 5_000
    began = time.process_time()
    cursor = read(storage, tokens)
    assert storage.look(cursor)[1][0][0] in (7, 1, 2, 3, 8)
    assert time.process_time() - began < 20


@pytest.mark.some("ngram 4", "suffix")
@pytest.mark.parametrize("kind", ["ngram 4", "one level 3", "suffix"])
def test_forty_thousand_tokens_cost_no_more_each_than_the_first(kind):
    """Of blocks of 500 tokens the fastest is taken, in seconds of the CPU, so that other work on the machine does not
    count. A structure whose insert grows with what it holds takes some 20 times as long for the last tenth as for the
    first (38,000 against 2,000 on average); these take 1 to 2 times, for the processor's caches. The absolute bounds
    are a step of the smallest model measured, 0.45 ms on an H200, where a tenth of it is wanted and a fiftieth
    reached."""
    storage, text, block = MAKERS[kind][0](), drawn_text(40_000, 12_000), 500
    cursor, cursors, spent = storage.start(), [], []
    for start in range(0, len(text), block):
        began = time.process_time()
        for token in text[start : start + block]:
            cursor = storage.feed(cursor, token, (token % 64, token % 63, token))
        spent.append((time.process_time() - began) / block)
        cursors.append((cursor, token))
    tenth = len(spent) // 10
    assert min(spent[-tenth:]) < 5 * min(spent[:tenth])
    assert min(spent[-tenth:]) < 0.45e-3
    looked, grown = [], []
    for cursor, token in cursors[-tenth:]:
        times = [time.process_time()]
        storage.look(cursor)
        times.append(time.process_time())
        grow(storage, cursor, token, gamma=8, nodes=16, ends=frozenset())
        times.append(time.process_time())
        looked.append(times[1] - times[0])
        grown.append(times[2] - times[1])
    assert min(looked) < 0.45e-3 and min(grown) < 16 * 0.45e-3


@pytest.fixture(scope="module")
def counter():
    found = ngram_counter()
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["ngram 2", "ngram 4", "one level 3"])
@examples(100)
@given(events=events, cut=st.integers(1, 20))
def test_a_counter_leaves_what_feeding_token_by_token_leaves(kind, events, cut, counter):
    ours, theirs = MAKERS[kind][0](), MAKERS[kind][0]()
    cursors = [[ours.start()] * 3, [theirs.start()] * 3]
    for start in range(0, len(events), cut):
        for number in range(3):
            steps = [(token, fillers) for text, token, fillers in events[start : start + cut] if text == number]
            cursors[0][number] = ours.feed_all(cursors[0][number], steps, counter)
            for token, fillers in steps:
                cursors[1][number] = theirs.feed(cursors[1][number], token, fillers)
    assert cursors[0] == cursors[1] and ours.edges.keys == theirs.edges.keys
    assert all(getattr(ours.tallies, name) == getattr(theirs.tallies, name) for name in ours.tallies.__slots__)
    assert all(ours.edges.find(*ours.edges.ends(edge)) == edge for edge in range(1, len(ours.edges) + 1))


@pytest.mark.parametrize("kind", ["ngram 2", "ngram 4", "one level 3"])
@examples(150)
@given(
    text=st.lists(st.integers(0, 5), max_size=60),
    root=st.integers(0, 6),
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 33)),
    ends=st.frozensets(st.integers(0, 5) | st.sampled_from([-1, 2**40]), max_size=2),  # calls may name any
    guess=st.booleans(),
    least=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_a_grower_makes_the_tree_that_look_ups_make(kind, text, root, sizes, ends, guess, least):
    """Node by node, with the same chances to the last bit."""
    storage, grower = MAKERS[kind][0](), ngram_grower()
    assert grower is not None
    cursor = storage.start()
    for token in text:
        cursor = storage.feed(cursor, token, (token // 2,))
    more = {"gamma": sizes[0], "nodes": sizes[1], "ends": ends, "guess": guess, "least": least}
    for at in (cursor, storage.step(cursor, root)):
        assert grow(storage, at, root, **more, grower=grower) == grow(storage, at, root, **more)


def test_a_counter_takes_long_texts_in_parts(counter):
    ours, theirs, text = fastspec.NgramStorage(4), fastspec.NgramStorage(4), drawn_text(5_000, 12_000)
    cursor = ours.feed_all(ours.start(), [(token, (token % 64,)) for token in text], counter)
    expected = theirs.start()
    for token in text:
        expected = theirs.feed(expected, token, (token % 64,))
    assert cursor == expected and ours.edges.keys == theirs.edges.keys
    assert all(getattr(ours.tallies, name) == getattr(theirs.tallies, name) for name in ours.tallies.__slots__)


def test_an_interrupted_counter_leaves_what_it_has_counted(counter, tmp_path):
    """The interrupt comes behind the call, where arrays still have more room than was used."""

    def interrupted(*given: object) -> None:
        counter(*given)
        raise KeyboardInterrupt

    ours, theirs, cursor, steps = (
        fastspec.NgramStorage(4),
        fastspec.NgramStorage(4),
        (),
        [(n % 7, ()) for n in range(40)],
    )
    with pytest.raises(KeyboardInterrupt):
        ours.feed_all(ours.start(), steps, interrupted)
    for token, fillers in steps:
        cursor = theirs.feed(cursor, token, fillers)
    assert ours.edges.keys == theirs.edges.keys
    assert all(getattr(ours.tallies, name) == getattr(theirs.tallies, name) for name in ours.tallies.__slots__)
    ours.save(tmp_path / "kept")
    assert repr(fastspec.NgramStorage.load(tmp_path / "kept")) == repr(theirs)


@pytest.mark.parametrize("counts", [False, True])
def test_counting_goes_on_where_an_interrupt_left_arrays_uneven(counts, counter):
    """Behind an edge without its context, and in the middle of an entry, which the counter writes anew."""
    ours, theirs, steps = fastspec.NgramStorage(4), fastspec.NgramStorage(4), [(n % 7, ()) for n in range(40)]
    ours.edges.add(0, 99)
    if counts:
        ours.tallies.tokens.append(5)
        ours.feed_all(ours.start(), steps, counter)
    mine = cursor = ours.start()
    for token, fillers in steps:
        mine = mine if counts else ours.feed(mine, token, fillers)
        cursor = theirs.feed(cursor, token, fillers)
        assert counts or ours.look(mine) == theirs.look(cursor)
    assert ours.look(cursor) == theirs.look(cursor) and len(ours.tallies) == len(ours.edges.keys)
    assert len({len(each) for each in (ours.tallies.tokens, ours.tallies.counts, ours.tallies.later)}) == 1


@pytest.mark.parametrize("way", ["feed", "feed_all", "save"])
def test_threads_that_share_a_storage_take_turns(way, counter, tmp_path):
    ours, steps = fastspec.NgramStorage(4), [(n % 11, ()) for n in range(20)]
    ways = {
        "feed": lambda: ours.feed((1, 2, 3), 4),
        "feed_all": lambda: ours.feed_all(ours.start(), steps, counter),
        "save": lambda: ours.save(tmp_path / "kept"),
    }
    other = threading.Thread(target=ways[way])

    def meanwhile(*given: object) -> None:
        other.start()
        other.join(0.05)
        assert other.is_alive(), "it did not wait"
        counter(*given)

    ours.feed_all(ours.start(), steps, meanwhile)
    other.join()
    assert len(ours.edges.keys) == len(ours.tallies) and len({*ours.edges.keys[1:]}) == len(ours.edges)
    assert way != "save" or repr(fastspec.NgramStorage.load(tmp_path / "kept")) == repr(ours)
