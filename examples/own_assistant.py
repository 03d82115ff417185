"""An assistant of your own: it drafts what followed the last token where that token occurred before. For one row, kept
plain."""

from __future__ import annotations

import torch

import fastspec
from fastspec.generation.tree import TokenTree
from fastspec.models import load_smollm2


class Repeat:
    """A `Decoding` (name, taps, drafter) that makes a `Drafter` (nodes, max_path, begin, propose, observe) for every
    call."""

    name = "repeat"
    taps = None  # it reads no hidden states

    def __init__(self, length: int = 4) -> None:
        self.nodes = self.max_path = length + 1  # a chain below the root

    def drafter(self, **_) -> Repeat:
        return self

    def begin(self, ids, counts, features, root) -> None:
        self.tokens = [*ids[0, : counts[0]].tolist(), int(root[0])]

    def propose(self, extent: int) -> TokenTree:
        last, wanted = self.tokens[-1], self.nodes - 1
        earlier = [i for i, token in enumerate(self.tokens[:-1]) if token == last]
        draft = self.tokens[earlier[-1] + 1 :][:wanted] if earlier else []
        chain = [last, *draft, *[0] * (wanted - len(draft))]  # the tree's size never changes
        return TokenTree.from_parents(torch.tensor([chain]), torch.arange(-1, wanted).clamp(min=0)[None])

    def observe(self, tree, verdict, logits, features, active, extent) -> None:
        self.tokens += verdict.tokens(tree)[0, : int(verdict.accepted[0]) + 1].tolist()


model, tokenizer = load_smollm2()
turns = [{"role": "user", "content": "Write the numbers from 1 to 20, one per line, each followed by a full stop."}]
inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)
with fastspec.patched(model):
    drafted = model.generate(**inputs, max_new_tokens=64, do_sample=False, assistant=Repeat())
    print(fastspec.report(model))
print(tokenizer.decode(drafted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("identical:", plain.equal(drafted))
