"""The playground in headless Chromium, before a stand-in for the server."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import pytest
from browser import TIMEOUT, Playground
from playwright.sync_api import Browser, ViewportSize, expect
from stand_in import DONE, HANDED, STORY, StandIn, chunk, error, event, last, served, story

from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.server.observe.fleet_metrics import KnownPool
from pilotfish.wire.serving import PoolLoad

HEIGHT = "one => one.getBoundingClientRect().height"
PHONE: ViewportSize = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def server() -> StandIn:
    return StandIn()


@pytest.fixture(autouse=True)
def stand_in(server: StandIn) -> StandIn:
    server.reset()
    return server


@pytest.fixture(scope="module")
def url(server: StandIn) -> Iterator[str]:
    with served(server.app()) as url:
        yield url


@pytest.fixture(scope="module")
def tab(chromium: Browser, url: str) -> Iterator[Playground]:
    """One for all tests: a context of its own takes longer than most of them."""
    with Playground(chromium, url) as tab:
        yield tab


@pytest.fixture
def playground(tab: Playground) -> Playground:
    tab.open()
    return tab


@pytest.fixture
def phone(tab: Playground) -> Iterator[Playground]:
    size = tab.page.viewport_size
    assert size is not None
    tab.page.set_viewport_size(PHONE)
    tab.open()
    yield tab
    tab.page.set_viewport_size(size)


def greeting(**first: Any) -> list[bytes]:
    """Two steps, six tokens. One character is beyond 16 bits, one comes from two tokens. `first`: fields of the first
    chunk."""
    steps = [
        chunk("Hello, <b>", [11, 12, 13], [5, 6, 10], accepted=2, nodes=7, at=5.0),
        chunk("🐟é\n", [14, 15, 16], [11, 11, 13], accepted=1, nodes=3, at=5.02),
    ]
    steps[0] |= first
    return [*map(event, steps), *map(event, last(4, 6)), DONE]


def test_the_text_is_exact_tokens_are_coloured_and_figures_are_told(playground: Playground, stand_in: StandIn) -> None:
    stand_in.parts = greeting(seed=17)
    playground.run("Say hello")
    assert playground.text() == "Hello, <b>🐟é\n"
    assert playground.tokens() == [
        *(("Hello", "drafted"), (",", "drafted"), (" <b>", "own"), ("🐟", "drafted"), ("", "own"), ("é\n", "own")),
    ]
    underlines = playground.page.locator("#output .token").evaluate_all(
        "all => all.map(one => getComputedStyle(one).textDecorationLine)"
    )
    assert underlines == ["underline", "underline", "none", "underline", "none", "none"]
    assert playground.shown("status") == "6 tokens · length · seed 17 · prompt 4 tokens"
    assert playground.shown("acceptance") == "30 %"
    assert playground.shown("acceptance-note") == "3 of 10 nodes"
    assert playground.shown("per-step") == "3.00"
    assert playground.shown("nodes") == "5.0"
    assert playground.shown("first").endswith(" ms")
    summary = "2 steps of the target in 0.04 s: 84 % forward, 9 % verify, 2 % draft, 5 % coordination."
    assert playground.shown("summary") == summary
    expect(playground.page.locator("#timeline")).to_have_attribute("aria-label", f"Timeline. {summary}")
    trees = "Tree sizes of 2 verify steps: 3 to 7 nodes, 3 of 10 nodes accepted"
    expect(playground.page.locator("#trees")).to_have_attribute("aria-label", trees)
    assert all(request.startswith(playground.url) for request in playground.requested) and not playground.complaints


#: Tokens of a prompt of 400 by where their KV came from, and what the page says.
SOURCES: list[tuple[dict[str, int], list[str]]] = [
    (
        {"device": 64, "host": 128, "disk": 192},
        ["64 on the device", "128 in host memory", "192 on disk", "16 computed"],
    ),
    ({"disk": 399}, ["399 on disk", "1 computed"]),
    ({}, ["400 computed"]),
    ({"device": 64, "handed_over": 335}, ["64 on the device", "335 from a prefill worker", "1 computed"]),
    ({"device": 300, "handed_over": 335}, ["300 on the device", "100 from a prefill worker"]),
]


def test_what_of_a_prompt_came_from_where(playground: Playground, stand_in: StandIn) -> None:
    sources = playground.page.get_by_role("region", name="Where the prompt’s KV came from")
    expect(playground.page.locator("#sources")).to_be_hidden()
    for cached, expected in SOURCES:
        handed = {name: cached.pop(name) for name in ("handed_over",) if name in cached}
        stand_in.parts = [greeting()[0], *map(event, last(400, 6, cached=cached, **handed)), DONE]
        playground.run("Say hello")
        assert [text.strip() for text in sources.get_by_role("listitem").all_inner_texts()] == expected
        widths = sources.locator(".sources i").evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
        seen = [width for width in widths if width]
        assert len(seen) == len(expected)
        tokens = [int(line.split()[0]) for line in expected]
        assert [widest == max(seen) for widest in seen] == [count == max(tokens) for count in tokens]
    assert playground.complaints == []


def test_the_draft_pools_are_shown(playground: Playground, stand_in: StandIn) -> None:
    pools = playground.page.locator("#pools")
    expect(pools).to_be_hidden()
    known = PoolLoad(
        *("<b>east</b>", True, 3, 50, 4.0, 0.5),
        drops={"late_nodes": 25, "gaps": 2, "stale_frames": 9},
        capabilities=["pauses", "errors"],
        delay_ms=0.25,
        nodes=100,
        verified=40,
        accepted=30,
    )
    gone = PoolLoad("west", False, 0, 0, 0.0, 0.0)
    stand_in.pools = msgspec.to_builtins([KnownPool("target", known), KnownPool("target", gone)])
    stand_in.parts = greeting()
    playground.run("Say hello")
    expect(pools).to_be_visible()
    assert [row.split("\t") for row in pools.locator("tbody tr").all_inner_texts()] == [
        ["<b>east</b> of target", "ready", "0.25 ms", "4.00 ms", "25.0 %", "75.0 %", "pauses, errors", "gaps 2"],
        ["west of target", "silent", "–", "0.00 ms", "–", "–", "–", "none"],
    ]


def test_what_a_prefill_worker_handed_over_is_told_of_and_drawn(playground: Playground, stand_in: StandIn) -> None:
    canvas, legend = playground.page.locator("#timeline"), playground.page.locator("figure .legend li")
    stand_in.parts = story()
    playground.run("def mean(values):")
    assert playground.text() == STORY
    assert (canvas.evaluate(HEIGHT), legend.locator("visible=true").count()) == (132, 5)
    early = HandOverReport("prefill 1", "tcp", "late", began=98.5, seconds=1.0)
    stand_in.parts = story([early, HANDED])
    playground.run("def mean(values):")
    assert playground.shown("summary").endswith(
        "The draft pushed 208 nodes in 72 messages. A hand-over from prefill 1 ended early (late): 0 tokens in "
        "1000 ms. 3999 tokens came from prefill 0 by shm: 80 ms queued, 300 ms computing, 20 ms exposed."
    )
    assert (canvas.evaluate(HEIGHT), legend.locator("visible=true").count()) == (180, 10)
    playground.page.select_option("#span", "2")
    playground.page.focus("#position")
    playground.page.keyboard.press("Home")
    expect(playground.page.locator("#position")).to_have_attribute("aria-valuetext", "up to 2.0 seconds")
    # from 98.5 s on: a hand-over to 99.5 s, another one from 99.6 s to 100 s, where the first step begins
    lane = [(0.53, "ground"), (1.14, "ground"), (1.3, "prefill"), (1.49, "wait"), (1.6, "ground")]
    strip = [(0.53, "ground"), (1.14, "ground"), (1.3, "transfer"), (1.49, "transfer"), (1.6, "ground")]
    assert [(at, colour_at(playground, at / 2, 115)) for at, _ in lane] == lane
    assert [(at, colour_at(playground, at / 2, 136)) for at, _ in strip] == strip
    framed = [colour_at(playground, at / 2, 105) != "ground" for at in (0.53, 1.05, 1.14, 1.6)]
    assert framed == [True, False, True, False]
    assert [colour_at(playground, at / 2, 26) for at in (1.3, 1.51)] == ["ground", "forward"]


def colour_at(playground: Playground, share: float, top: int) -> str:
    """The name of the colour that the timeline has at a share of the time shown, so many pixels from the top."""
    script = """(canvas, [share, top]) => {
        const ratio = canvas.width / canvas.getBoundingClientRect().width;
        const left = ratio * 52 + share * (canvas.width - ratio * 52);
        const pixel = canvas.getContext("2d").getImageData(left, ratio * top, 1, 1).data;
        const seen = "#" + [...pixel].slice(0, 3).map((one) => one.toString(16).padStart(2, "0")).join("");
        const style = getComputedStyle(document.documentElement);
        const names = ["ground", "prefill", "transfer", "wait", "forward"];
        return names.find((name) => style.getPropertyValue("--" + name).trim() === seen) ?? seen;
    }"""
    return str(playground.page.locator("#timeline").evaluate(script, [share, top]))


@pytest.mark.parametrize("size", [1, 7])
def test_chunks_may_be_cut_anywhere(playground: Playground, stand_in: StandIn, size: int) -> None:
    answer = b": a comment\r\n\r\n" + b"".join(greeting()).replace(b"\n", b"\r\n")
    stand_in.parts = [answer[i : i + size] for i in range(0, len(answer), size)]
    playground.run("Say hello")
    assert playground.text() == "Hello, <b>🐟é\n"
    assert [origin for _, origin in playground.tokens()].count("drafted") == 3
    assert playground.page.locator("#error").is_hidden()


def test_text_held_back_joins_its_token_later(playground: Playground, stand_in: StandIn) -> None:
    held = [chunk("on", [1, 2], [3, 6], accepted=1, nodes=2), chunk("e two t", [3], [10], accepted=0, nodes=2, at=0.1)]
    stand_in.parts = [*map(event, held), *map(event, last(1, 3, "stop")), DONE]
    playground.run("count")
    assert playground.tokens() == [("one", "drafted"), (" tw", "own"), ("o t", "own")]
    assert playground.text() == "one two t"


def test_an_answer_without_details_is_plain_text(playground: Playground, stand_in: StandIn) -> None:
    plain = chunk("plain text", [], [], accepted=0, nodes=0)
    del plain["pilotfish"]
    stand_in.parts = [event(plain), *map(event, last(1, 2)), DONE]
    playground.run("x")
    assert (playground.text(), playground.tokens()) == ("plain text", [])
    assert playground.shown("summary") == "No steps were told of."


def test_the_request_carries_what_the_form_says(playground: Playground, stand_in: StandIn) -> None:
    largest = str(2**64 - 1)  # keeps its digits
    stand_in.parts = greeting(seed=largest)
    playground.page.select_option("#mode", "off")
    playground.run("Hi", max_tokens="8", temperature="0.5", seed=largest, max_nodes="4", key="secret")
    assert f" · seed {largest} · " in playground.shown("status")
    assert stand_in.paths == ["/v1/completions"]
    assert stand_in.bodies == [
        {
            "model": "stand-in",
            "prompt": "Hi",
            "max_tokens": 8,
            "temperature": 0.5,
            "seed": largest,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"mode": "off", "max_nodes": 4, "metrics": "summary", "detail": True},
        }
    ]
    assert stand_in.headers[0]["authorization"] == "Bearer secret"


def test_chat_sends_a_message_and_leaves_out_what_is_empty(playground: Playground, stand_in: StandIn) -> None:
    said = chunk("", [9], [2], accepted=0, nodes=0)
    said["choices"][0] = {"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}
    stand_in.parts = [event(said), *map(event, last(1, 1)), DONE]
    playground.page.locator("input[value=chat]").check()
    playground.run("Hello", temperature="", max_tokens="9")
    assert playground.tokens() == [("Hi", "own")]
    assert stand_in.paths == ["/v1/chat/completions"]
    assert stand_in.bodies[0]["messages"] == [{"role": "user", "content": "Hello"}]
    assert stand_in.bodies[0]["max_completion_tokens"] == 9
    assert stand_in.bodies[0].keys().isdisjoint({"prompt", "max_tokens", "temperature", "seed"})
    assert stand_in.bodies[0]["speculation"] == {"metrics": "summary", "detail": True}


# -- a chat


def spoken(content: str, tokens: list[int], ends: list[int], accepted: int, **detail: Any) -> bytes:
    """A chunk of a chat's answer. `detail`: further fields of what it tells of its tokens."""
    said = chunk("", tokens, ends, accepted, nodes=4)
    said["choices"][0] = {"index": 0, "delta": {"content": content}, "finish_reason": None}
    said["pilotfish"] |= detail
    return event(said)


def spoken_by(text: str) -> list[bytes]:
    """A whole answer of two tokens, the first of which was guessed."""
    return [spoken(text, [1, 2], [1, len(text)], accepted=1), *map(event, last(5, 2, "stop")), DONE]


@pytest.fixture
def chat(tab: Playground, stand_in: StandIn) -> Playground:
    """The page of a model whose template marks turns."""
    stand_in.chat = True
    tab.open()
    return tab


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_model_whose_template_marks_turns_opens_as_a_chat(chat: Playground, stand_in: StandIn) -> None:
    assert chat.shown("prompt-label") == "Message" and chat.page.locator("#system").is_visible()
    assert focus_order(chat, 6) == ["endpoint", "system", "prompt", "run", "anew", "summary"]
    stand_in.parts = spoken_by("Scattering.")
    chat.page.get_by_role("button", name="Send").click()
    chat.wait()
    assert stand_in.bodies[0]["messages"] == [user("Why is the sky blue?")]
    assert stand_in.bodies[0]["max_completion_tokens"] == 1024
    chat.page.locator("input[value=completions]").check()
    assert chat.page.locator("#system, #anew, [data-endpoint=chat]").locator("visible=true").count() == 0
    assert chat.shown("run").startswith("Run")


def test_each_endpoint_has_its_own_text_until_it_is_changed(playground: Playground) -> None:
    prompt = playground.page.locator("#prompt")
    own = prompt.input_value()
    assert own.startswith("def mean(values):")
    playground.page.locator("input[value=chat]").check()
    expect(prompt).to_have_value("Why is the sky blue?")
    playground.page.locator("input[value=completions]").check()
    expect(prompt).to_have_value(own)
    prompt.fill("mine")
    playground.page.locator("input[value=chat]").check()
    expect(prompt).to_have_value("mine")


def test_a_conversation_is_kept_turn_by_turn(chat: Playground, stand_in: StandIn) -> None:
    stand_in.parts = spoken_by("One.")
    chat.run("first?", system="brief")
    expect(chat.page.locator("#prompt")).to_have_value("")
    stand_in.parts = [spoken("Two.", [3], [4], accepted=0), *spoken_by("")[1:]]
    chat.run("<b>second?</b>")
    assert [body["messages"] for body in stand_in.bodies] == [
        [{"role": "system", "content": "brief"}, user("first?")],
        [{"role": "system", "content": "brief"}, user("first?"), assistant("One."), user("<b>second?</b>")],
    ]
    assert chat.turns() == [("first?", "One."), ("<b>second?</b>", "Two.")]
    assert chat.tokens() == [("O", "drafted"), ("ne.", "own"), ("Two.", "own")]
    assert chat.shown("acceptance-note") == "0 of 4 nodes"  # of the last answer
    assert chat.shown("summary").startswith("1 steps of the target")
    assert chat.complaints == []


def test_a_chat_can_be_begun_anew(chat: Playground, stand_in: StandIn) -> None:
    stand_in.parts = spoken_by("One.")
    chat.run("first?")
    chat.page.click("#anew")
    expect(chat.page.locator("#prompt")).to_be_focused(timeout=TIMEOUT)
    assert (chat.turns(), chat.text(), chat.shown("status"), chat.shown("acceptance")) == ([], "", "Ready.", "–")
    chat.run("second?")
    assert stand_in.bodies[1]["messages"] == [user("second?")]
    assert chat.turns() == [("second?", "One.")]


def test_a_completion_ends_a_chat(chat: Playground, stand_in: StandIn) -> None:
    stand_in.parts = spoken_by("One.")
    chat.run("first?")
    chat.page.locator("input[value=completions]").check()
    stand_in.parts = greeting()
    chat.run("Say hello")
    assert (chat.turns(), chat.text()) == ([], "Hello, <b>🐟é\n")
    chat.page.locator("input[value=chat]").check()
    stand_in.parts = spoken_by("Two.")
    chat.run("second?")
    assert stand_in.bodies[-1]["messages"] == [user("second?")] and chat.turns() == [("second?", "Two.")]


def test_a_chat_goes_on_after_an_answer_that_was_stopped(chat: Playground, stand_in: StandIn) -> None:
    stand_in.parts, stand_in.hold = spoken_by("One.")[:1], True
    chat.start("first?")
    expect(chat.page.locator("#output .token")).to_have_count(2, timeout=TIMEOUT)
    chat.page.click("#anew", force=True)  # not while an answer comes
    chat.page.keyboard.press("Escape")
    chat.wait()
    assert chat.turns() == [("first?", "One.")] and chat.shown("status") == "2 tokens · stopped"
    stand_in.parts, stand_in.hold = spoken_by("Two."), False
    chat.run("second?")
    assert stand_in.bodies[1]["messages"] == [user("first?"), assistant("One."), user("second?")]


def test_a_question_that_nobody_answered_is_taken_back(chat: Playground, stand_in: StandIn) -> None:
    stand_in.parts = spoken_by("One.")
    chat.run("first?")
    stand_in.refusal = (400, error("messages: the chat template refuses them"))
    chat.run("second?")
    assert chat.shown("error") == "400: messages: the chat template refuses them"
    assert chat.turns() == [("first?", "One.")]
    expect(chat.page.locator("#prompt")).to_have_value("second?")
    stand_in.refusal = None
    chat.page.click("#run")
    chat.wait()
    assert stand_in.bodies[2]["messages"] == [user("first?"), assistant("One."), user("second?")]
    assert chat.turns() == [("first?", "One."), ("second?", "One.")]


def test_reasoning_is_shown_and_not_said_again(chat: Playground, stand_in: StandIn) -> None:
    stand_in.parts = [spoken("So.", [1, 2], [7, 14], 1, text="<think>why</think>So."), *spoken_by("")[1:]]
    chat.run("first?")
    assert chat.turns() == [("first?", "<think>why</think>So.")]
    chat.run("second?")
    assert stand_in.bodies[1]["messages"] == [user("first?"), assistant("So."), user("second?")]


def test_an_empty_message_is_not_sent(chat: Playground, stand_in: StandIn) -> None:
    chat.page.fill("#prompt", "")
    chat.page.click("#run")
    expect(chat.page.locator("#prompt")).to_be_focused(timeout=TIMEOUT)
    assert (stand_in.bodies, chat.turns()) == ([], [])


def test_a_chosen_endpoint_stays_when_the_model_becomes_known(tab: Playground, stand_in: StandIn) -> None:
    stand_in.chat, stand_in.refusal = True, (401, error("Authorization: a key is needed"))
    tab.open()
    tab.page.locator("input[value=chat]").check()
    tab.page.locator("input[value=completions]").check()
    stand_in.refusal, stand_in.parts = None, greeting()
    tab.run("Say hello")
    assert stand_in.paths == ["/v1/completions"]


# -- keys, errors, ends


def test_the_key_stays_in_its_tab(playground: Playground) -> None:
    playground.page.fill("#key", "secret")
    playground.page.reload()
    expect(playground.page.locator("#key")).to_have_value("secret", timeout=TIMEOUT)
    assert playground.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_a_refusal_is_shown_in_one_line(playground: Playground, stand_in: StandIn) -> None:
    stand_in.refusal = (400, error("max_tokens: 0 is\nnot allowed"))
    playground.run("Hi")
    assert playground.shown("error") == "400: max_tokens: 0 is not allowed"
    assert playground.shown("status") == "No answer."
    stand_in.refusal, stand_in.parts = None, greeting()
    playground.run("Hi")
    assert playground.page.locator("#error").is_hidden()


def test_a_server_that_asks_for_a_key_says_so_at_once(tab: Playground, stand_in: StandIn) -> None:
    stand_in.refusal = (401, error("Authorization: a key is needed"))
    tab.open()
    assert tab.shown("status") == "Not ready: 401: Authorization: a key is needed"
    stand_in.refusal, stand_in.parts = None, greeting()
    tab.page.fill("#key", "secret")
    tab.page.locator("#key").blur()
    expect(tab.page.locator("#status")).to_have_text("Ready.", timeout=TIMEOUT)
    assert tab.shown("model") == "stand-in"


def test_a_field_that_is_not_valid_is_shown_and_nothing_is_sent(phone: Playground, stand_in: StandIn) -> None:
    phone.page.evaluate("document.getElementById('max-tokens').value = '0'")
    phone.page.click("#run")
    expect(phone.page.locator("#max-tokens")).to_be_focused(timeout=TIMEOUT)
    assert stand_in.bodies == []


def test_an_error_after_the_first_token_leaves_the_text(playground: Playground, stand_in: StandIn) -> None:
    said = "target: was ended by <i>signal 9</i>"
    for end, message in (([event(error(said))], said), ([], "The connection ended before the answer did.")):
        stand_in.parts = [greeting()[0], *end]
        playground.run("Hi")
        assert playground.shown("error") == message
        assert playground.text() == "Hello, <b>"
        assert playground.shown("status") == "3 tokens, then an error."


def test_stop_aborts_the_request_and_a_second_one_is_not_sent(playground: Playground, stand_in: StandIn) -> None:
    stand_in.parts, stand_in.hold = greeting()[:1], True
    playground.start("Hi")
    expect(playground.page.locator("#output .token")).to_have_count(3, timeout=TIMEOUT)
    playground.page.click("#run", force=True)  # waits for the first
    playground.page.click("#stop")
    playground.wait()
    assert stand_in.aborted.wait(30) and len(stand_in.bodies) == 1
    assert playground.text() == "Hello, <b>"
    assert playground.shown("status") == "3 tokens · stopped"
    assert playground.page.locator("#error").is_hidden()


def test_everything_goes_by_keyboard(playground: Playground, stand_in: StandIn) -> None:
    stand_in.parts, stand_in.hold = greeting()[:1], True
    reached = focus_order(playground, 11)
    assert reached == ["endpoint", "prompt", "run", "summary", *FIELDS, "output"]
    playground.page.focus("#prompt")
    playground.page.keyboard.press("Control+End")
    playground.page.keyboard.type("More")
    playground.page.keyboard.press("Control+Enter")
    expect(playground.page.locator("#output .token")).to_have_count(3, timeout=TIMEOUT)
    playground.page.keyboard.press("Escape")
    playground.wait()
    assert stand_in.bodies[0]["prompt"].endswith("More")
    assert playground.shown("status") == "3 tokens · stopped"


FIELDS = ("max-tokens", "temperature", "seed", "max-nodes", "mode", "key")


def focus_order(playground: Playground, count: int) -> list[str]:
    """Elements that Tab reaches, by id, name or tag. Each shows that it is focused."""
    reached = []
    for _ in range(count):
        playground.page.keyboard.press("Tab")
        name, outline = playground.page.evaluate(
            """() => {
                const one = document.activeElement;
                const seen = one.type === "radio" ? one.parentElement : one;
                return [one.id || one.name || one.localName, getComputedStyle(seen).outlineStyle];
            }"""
        )
        assert outline == "solid", name
        reached.append(name)
    return reached


def test_the_focus_survives_the_end_of_an_answer(playground: Playground, stand_in: StandIn) -> None:
    stand_in.parts, stand_in.hold = greeting()[:1], True
    playground.start("Hi")
    playground.page.focus("#stop")
    playground.page.keyboard.press("Enter")
    playground.wait()
    expect(playground.page.locator("#run")).to_be_focused(timeout=TIMEOUT)


def test_every_field_has_a_label_and_tokens_are_not_announced(playground: Playground) -> None:
    unlabelled = "all => all.filter(one => !one.labels.length && !one.ariaLabel).map(one => one.id)"
    assert playground.page.locator("input, select, textarea").evaluate_all(unlabelled) == []
    expect(playground.page.get_by_role("status")).to_have_count(1)
    assert playground.page.locator("#output").evaluate("one => one.closest('[aria-live], [role=status]')") is None


def test_it_fits_a_phone(phone: Playground, stand_in: StandIn) -> None:
    named = dataclasses.replace(HANDED, pool="tcp://" + "x" * 200)
    long = chunk("x" * 500, [1], [500], accepted=0, nodes=3, handovers=[named])
    stand_in.parts = [event(long), *map(event, last(1, 1)), DONE]
    assert phone.overflow() <= 0
    phone.page.click("summary")
    phone.run("y" * 500)
    assert phone.overflow() <= 0
    phone.page.locator("input[value=chat]").check()
    stand_in.parts = spoken_by("x" * 500)
    phone.run("y" * 500)
    assert phone.overflow() <= 0


def test_it_is_dark_where_dark_is_wanted_and_legible_in_both(playground: Playground) -> None:
    backgrounds = []
    for scheme in SCHEMES:
        playground.page.emulate_media(color_scheme=scheme)
        backgrounds.append(playground.background())
        for name, ground in TEXTS:
            assert contrast(playground, name, ground) >= 4.5, (scheme, name, ground)
    playground.page.emulate_media(color_scheme="null")
    assert backgrounds == ["rgb(244, 246, 248)", "rgb(14, 19, 23)"]


SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
#: Custom properties of text and of the ground that it stands on.
TEXTS = [
    *(("text", "panel"), ("muted", "panel"), ("muted", "ground"), ("drafted", "drafted-tint")),
    *(("drafted", "panel"), ("own", "panel"), ("bad", "bad-tint"), ("on-accent", "accent")),
]


def contrast(playground: Playground, *names: str) -> float:
    """WCAG 2.2's contrast ratio of two custom properties."""
    script = "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()"
    low, high = sorted(luminance(playground.page.evaluate(script, name)) for name in names)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_policy_is_in_force(playground: Playground) -> None:
    playground.page.evaluate(
        """() => {
            const script = document.createElement("script");
            try { script.textContent = "window.injected = true"; } catch { window.refused = true; }
            document.head.append(script);
            const image = new Image();
            image.onerror = () => document.body.dataset.image = "refused";
            image.src = "http://127.0.0.1:9/image.png";
        }"""
    )
    expect(playground.page.locator("body")).to_have_attribute("data-image", "refused", timeout=TIMEOUT)
    assert playground.page.evaluate("[window.refused, window.injected ?? null]") == [True, None]
    assert any("Content Security Policy" in complaint for complaint in playground.complaints)
