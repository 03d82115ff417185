"""The page of `fastspec serve` in headless Chromium: what is typed, what streams in which colours, what goes wrong, and
what a hostile answer may not do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import KEYS, Browser, chromium
from helpers.cascade import trained
from helpers.clients import MARKS
from helpers.serve import Served, served, serving
from helpers.serve_process import cascaded_target
from helpers.training import small_target, small_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fastspec
from fastspec.programs.serving import app

pytestmark = MARKS
QUESTION = "Why is the sky blue?"
HOSTILE = "<img/src=x/onerror=window.hit=1>", "<script>window.hit=1</script>", "</div><b>bold</b>", "javascript:hit()"
IDLE = "!document.getElementById('send').hidden"
SCHEMES = {"light": "rgb(246, 247, 247)", "dark": "rgb(19, 22, 25)"}
CONTRAST = """
const number = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([red, green, blue]) => [red, green, blue].map((each) => each / 255)
  .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
  .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
const ground = (part) => { for (; part; part = part.parentElement) {
  const found = number(getComputedStyle(part).backgroundColor);
  if (found.length < 4 || found[3] > 0) return found;
} };
const low = [];
for (const part of document.querySelectorAll("body *")) {
  const own = [...part.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!own || !part.offsetParent || part.tagName === "SCRIPT" || part.disabled) continue;
  const [one, other] = [light(number(getComputedStyle(part).color)), light(ground(part))];
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (ratio < 4.5) low.push([part.className, part.textContent.slice(0, 30), ratio]);
}
return low;
"""
"""Elements whose text has a contrast below 4.5."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(autouse=True)
def quiet(browser: Browser) -> Iterator[None]:
    """Scripts raise nothing, and the policy has nothing to refuse; an answer that is an error is noted there too."""
    browser.look("light")
    browser.log()
    yield
    told = [line for line in browser.log() if "Failed to load resource" not in line]
    assert not told


@pytest.fixture(scope="module")
def endless() -> Any:
    """A patched model whose answers never end by themselves."""
    model = small_target(peak=0.15)
    model.generation_config.eos_token_id = None
    return fastspec.patch(model)


def opened(browser: Browser, server: Served, most: int = 60) -> None:
    browser.open(server.url)
    browser.wait("document.getElementById('model').textContent")
    browser.run("document.getElementById('most').value = arguments[0]", most)


def ask(browser: Browser, text: str) -> None:
    browser.type("#prompt", text + KEYS["ENTER"])


def marks(browser: Browser) -> set[str]:
    return set(browser.run("return [...document.querySelectorAll('.round span')].map((each) => each.className)"))


def test_an_answer_streams_in_the_colours_of_its_tokens(
    pair: Any, tokenizer: Any, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real model: typed, seen while it comes, and walked through by keys; with and without drafts. Comments
    between the events are skipped."""
    monkeypatch.setattr(app, "SILENCE", 0.001)
    with served(pair[1], rows=2, max_length=300, assistant="eagle3", tokenizer=tokenizer) as server:
        opened(browser, server, 48)
        assert "eagle3" in browser.run("return document.getElementById('served').textContent")
        browser.click("#compare")
        ask(browser, QUESTION)
        partly = browser.wait("document.querySelector('.text').textContent")
        assert browser.run("return document.getElementById('log').getAttribute('aria-busy')") == "true"
        browser.wait(IDLE)
        texts = browser.run("return [...document.querySelectorAll('.text')].map((each) => each.textContent)")
        given = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 48}
        answer = server.client().chat.completions.create(model="small", **given).choices[0].message.content
        assert texts == [answer, answer] and len(partly) < len(answer)
        found = marks(browser)
        assert found == {"accepted", "recovered", "bonus", "own"}
        colours = "(name) => getComputedStyle(document.querySelector('.text .' + name)).color"
        assert len({browser.run(f"return ({colours})(arguments[0])", name) for name in found}) == 4
        drafted, plain = browser.run("return [...document.querySelectorAll('.stats')].map((each) => each.textContent)")
        assert "drafts accepted" in drafted and "1.00 acceptance length" in plain and "48 tokens" in plain
        assert "The same tokens" in browser.run("return document.querySelector('.verdict').textContent")
        browser.run("document.querySelector('.text').focus()")
        for _ in range(
            int(browser.run("return document.querySelector('.text .accepted').parentElement.dataset.round")) + 1
        ):
            browser.type(".text", KEYS["RIGHT"])
        number = browser.run("return Number(document.querySelector('.round.on').dataset.round)")
        said = browser.run("return document.getElementById('which').textContent")
        assert said == f"Round {number}" in browser.run("return document.getElementById('said').textContent")
        count = browser.run("return document.querySelectorAll('.round.on .accepted').length")
        assert f"{count} of " in browser.run("return document.getElementById('counts').textContent")
        drawn = browser.run(
            "return [...document.querySelectorAll('#tree .node.accepted')].map((each) => each.firstChild.data)"
        )
        token = "return [...document.querySelectorAll('.round.on .accepted')].map((each) => each.textContent)"
        assert [each.strip("·") for each in drawn] == browser.run(token)
        drafts = int(browser.run("return document.getElementById('counts').textContent").split()[2])
        assert browser.run("return document.querySelectorAll('#tree .node').length") >= drafts + 1
        browser.run(
            "document.querySelectorAll('.round')[3].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
        )
        assert browser.run("return document.getElementById('which').textContent") == "Round 3"
        for scheme, ground in SCHEMES.items():
            browser.picture(tmp_path / f"{scheme}.png", scheme)
            assert (tmp_path / f"{scheme}.png").stat().st_size > 20_000
            assert browser.run("return getComputedStyle(document.documentElement).backgroundColor") == ground
            assert browser.run(CONTRAST) == []
        browser.wait("document.getElementById('rows').textContent === '0/2'")
        browser.type("#prompt", "And at night?" + KEYS["ENTER"])  # goes on from the first answer
        browser.wait(f"document.querySelectorAll('.answers').length === 2 && {IDLE}")
        second = [*given["messages"], {"role": "assistant", "content": answer}]
        given["messages"] = [*second, {"role": "user", "content": "And at night?"}]
        answer = server.client().chat.completions.create(model="small", **given).choices[0].message.content
        assert browser.run("return document.querySelectorAll('.text')[2].textContent") == answer


def test_a_cascade_tells_which_stage_has_answered(browser: Browser) -> None:
    """The answers of smaller stages come at once, rounds and trees with them; nothing is asked without drafts."""
    batch = fastspec.continuous(cascaded_target(), "cascade", rows=2, max_length=400)
    with batch, serving(batch, small_tokenizer()) as server:
        opened(browser, server, 30)
        assert browser.run("return document.getElementById('compares').hidden")
        for number, (price, told) in enumerate(((0, "small: answered, "), (1e9, "small: sent on, "))):
            batch.config = replace(batch.config, price=price)
            ask(browser, "w5")
            browser.wait(f"document.querySelectorAll('.text')[{number}]?.textContent && {IDLE}")
            asked = {"messages": [{"role": "user", "content": "w5"}], "temperature": 0, "max_tokens": 30}
            if number == 0:
                own = server.client().chat.completions.create(model="small", **asked).choices[0].message.content
                text = browser.run("return document.querySelector('.text').textContent")
                assert text == own and marks(browser) >= {"own", "accepted"}
            part = f"return document.querySelectorAll('.answer')[{number}].querySelector(arguments[0]).textContent"
            stages, stats = (browser.run(part, name) for name in (".stages", ".stats"))
            assert stages.startswith(told) and stages.endswith("large: answered") == (number == 1)
            facts = re.search(r"^([\d.]+) tokens/s.*?(\d+) tokens([\d.]+) (m?s) to first", stats)
            assert facts is not None, stats
            speed, tokens, first = map(float, facts.groups()[:3])
            assert 0 < speed < 1.2 * tokens / first * (1000 if facts[4] == "ms" else 1)
        browser.click(".round:nth-child(2)")
        assert browser.run("return document.getElementById('which').textContent") == "Round 1"


def test_the_answer_of_a_stage_with_another_prompt_is_one_round(browser: Browser) -> None:
    stage = fastspec.Stage(small_target(), name="small", prompt=lambda text: f"w4 {text}")
    given = {"tokenizer": small_tokenizer(), "label": "large", "predictor": trained(("small", "large"))}
    model = fastspec.patch(small_target(), cascade=fastspec.Cascade(stages=[stage], costs=[1, 2], price=0, **given))
    batch = fastspec.continuous(model, "cascade", rows=2, max_length=400)
    with batch, serving(batch, small_tokenizer()) as server:
        opened(browser, server, 30)
        ask(browser, "w5")
        browser.wait(f"document.querySelector('.text')?.textContent && {IDLE}")
        assert browser.run("return document.querySelectorAll('.round').length") == 1 and marks(browser) == {"own"}
        browser.click(".round")
        told = browser.run("return ['which', 'counts'].map((each) => document.getElementById(each).textContent)")
        assert told == ["Whole answer", "of a stage with other tokens or another prompt"]


def test_an_answer_can_be_stopped(endless: Any, browser: Browser) -> None:
    """By the button and by Escape: its row is free, what came stays, and the next question is answered."""
    with served(endless, rows=1, max_length=4000, assistant="nasd") as server:
        opened(browser, server, 3000)
        for number, stop in enumerate((lambda: browser.click("#stop"), lambda: browser.type("body", KEYS["ESCAPE"]))):
            ask(browser, "w5 w9")
            browser.wait(f"document.querySelectorAll('.text')[{number}]?.textContent.length > 40")
            stop()
            browser.wait(IDLE)
            server.wait(lambda: server.batch.running == server.batch.waiting == 0)
            stats = browser.run(f"return document.querySelectorAll('.stats')[{number}].textContent")
            assert stats.endswith("stopped") and server.metric('fastspec_requests_total{outcome="cancelled"}') >= number
        browser.run("document.getElementById('most').value = 5")
        ask(browser, "w7")
        browser.wait(f"document.querySelectorAll('.text')[2]?.textContent && {IDLE}")
        assert "5 tokens" in browser.run("return document.querySelectorAll('.stats')[2].textContent")
        ask(browser, "w8" + KEYS["ENTER"])
        browser.click("#fresh")
        assert browser.run("return [document.querySelectorAll('.asked').length, document.activeElement.id]") == [
            *(0, "prompt")
        ]


def test_errors_are_told(endless: Any, browser: Browser) -> None:
    """Of the server, and of one that has gone."""
    with served(endless, rows=1, max_length=200, assistant="nasd") as server:
        opened(browser, server, 9000)
        ask(browser, "w5")
        alert = "document.querySelector('[role=alert]')"
        assert "9000 new tokens are asked for" in browser.wait(f"{alert}?.textContent")
        assert browser.run("return document.querySelector('.stats').textContent") == "failed"
        browser.run("document.getElementById('most').value = 4")
        ask(browser, "w6")
        browser.wait(f"document.querySelectorAll('.text')[1]?.textContent && {IDLE}")
    ask(browser, "w7")
    assert browser.wait("document.querySelectorAll('[role=alert]')[1]?.textContent")
    browser.wait("document.getElementById('served').textContent === 'the server cannot be reached'")


def hostile() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are markup."""
    known = small_tokenizer().get_vocab()
    words = {
        word if word[0] != "w" else HOSTILE[number % len(HOSTILE)] + f"<{word}>": number
        for word, number in known.items()
    }
    raw = Tokenizer(models.WordLevel(words, unk_token="<start>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<start>")
    made.chat_template = "{{ messages[-1].content }}"
    return made


def test_markup_stays_text(endless: Any, browser: Browser) -> None:
    """In answers and their trees, in questions, and in the server's errors and name."""
    with served(endless, rows=1, max_length=200, assistant="nasd", tokenizer=hostile(), name="<b>small</b>") as server:
        opened(browser, server)
        ask(browser, HOSTILE[0])
        browser.wait(f"document.querySelector('.text')?.textContent && {IDLE}")
        texts = browser.run(
            "return ['.text', '.asked', '#model'].map((each) => document.querySelector(each).textContent)"
        )
        assert all(each in texts[0] for each in HOSTILE) and texts[1:] == [HOSTILE[0], "<b>small</b>"]
        browser.run(
            "for (const round of document.querySelectorAll('.round'))"
            " round.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
        )
        assert browser.run("return document.getElementById('tree').textContent.includes('<')")
        browser.run("document.getElementById('most').value = 5000")
        ask(browser, HOSTILE[1])
        browser.wait("document.querySelector('[role=alert]')")
        made = "return document.querySelectorAll('main img, main script, main b:not(.stats b), aside img, h1 b').length"
        assert browser.run(made) == 0
        assert browser.run("return window.hit ?? null") is None


def test_the_policy_holds_in_the_browser(endless: Any, browser: Browser) -> None:
    """Had a text become markup, its script would not run, and nothing would be sent elsewhere."""
    with served(endless, rows=1, max_length=200, assistant="nasd") as server:
        opened(browser, server)
        browser.run(
            "window.refused = [];"
            "addEventListener('securitypolicyviolation', (event) => refused.push(event.effectiveDirective));"
            "try { document.body.innerHTML = '<p>'; } catch (error) { refused.push(error.name); }"
            "const made = document.createElement('img'); made.src = '/health'; document.body.append(made);"
            "const script = document.createElement('style'); script.textContent = 'p {}'; document.head.append(script);"
            "fetch('http://127.0.0.2:9/').catch(() => refused.push('fetch'));"
        )
        wanted = {"TypeError", "require-trusted-types-for", "img-src", "style-src-elem", "connect-src", "fetch"}
        browser.wait("new Set(window.refused).size === arguments[0]", len(wanted))
        assert set(browser.run("return refused")) == wanted and browser.log()


def test_a_key_is_asked_for_and_kept_nowhere(endless: Any, browser: Browser) -> None:
    with served(endless, rows=1, max_length=200, assistant="nasd", api_key="secret") as server:
        browser.open(server.url)
        browser.wait("!document.getElementById('unlock').hidden && document.activeElement.id === 'key'")
        assert browser.run("return document.getElementById('model').textContent") == ""
        browser.type("#key", "wrong" + KEYS["ENTER"])
        browser.wait("document.getElementById('served').textContent.includes('not the server')")
        ask(browser, "w5")
        assert "API key is missing or wrong" in browser.wait("document.querySelector('[role=alert]')?.textContent")
        browser.type("#key", "secret" + KEYS["ENTER"])
        assert browser.wait("document.getElementById('model').textContent") == "small"
        assert browser.run("return document.getElementById('unlock').hidden")
        browser.run("document.getElementById('most').value = 4")
        ask(browser, "w5")
        browser.wait(f"document.querySelectorAll('.text')[1]?.textContent && {IDLE}")
        kept = browser.run(
            "return [document.cookie, localStorage.length, sessionStorage.length, location.href,"
            " document.getElementById('key').value]"
        )
        assert kept == ["", 0, 0, f"{server.url}/", ""]
        browser.open(server.url)
        browser.wait("!document.getElementById('unlock').hidden")


def test_it_fits_a_phone_and_goes_by_keys(endless: Any, browser: Browser) -> None:
    with served(endless, rows=1, max_length=200, assistant="nasd") as server:
        browser.look("dark", 360, 700, phone=True)
        opened(browser, server, 40)
        ask(browser, "w5 w9 " + "w" * 300)
        browser.wait(f"document.querySelector('.text')?.textContent && {IDLE}")
        browser.click(".round:nth-child(3)")
        inside = browser.run(
            "return ['#send', '#prompt', '#fresh', '#close', '#tree'].map((each) => {"
            " const box = document.querySelector(each).getBoundingClientRect();"
            " return box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.top < innerHeight; })"
        )
        assert inside == [True] * 5
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth && innerWidth <= 360")
        assert browser.run(CONTRAST) == []
        browser.click("#close")
        assert browser.run("return document.getElementById('round').hidden")
        browser.run("document.getElementById('prompt').focus()")
        order = []
        for _ in range(6):
            order.append(browser.run("return document.activeElement.id"))
            browser.type(f"#{order[-1]}", KEYS["TAB"])
        assert order == ["prompt", "send", "most", "temperature", "compare", "fresh"]
        tree = browser.tool("Accessibility.getFullAXTree")["nodes"]
        named = {(node["role"]["value"], node.get("name", {}).get("value")) for node in tree if not node["ignored"]}
        wanted = {
            *(("textbox", "Message"), ("button", "Send"), ("spinbutton", "new tokens"), ("spinbutton", "temperature")),
            *(("checkbox", "also without drafts"), ("log", "Conversation"), ("complementary", "Round")),
        }
        assert wanted - named <= {("complementary", "Round")}, json.dumps(sorted(map(str, named)))
