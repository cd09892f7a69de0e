"""The pages of the console in a real Chromium, on a broker and a member. They skip without Chromium."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gazette.auth import Capability, Claims, KeyedAuth
from gazette.cluster.etcd.client import Etcd
from gazette.protocol.label_set import EVERYTHING
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture
from tests.consumer.apps import append, frame
from tests.run.console.conftest import KEY, Console, Page
from tests.run.console.shop import HOSTILE, LETTERS, OUTPUT, SHARD, SOURCE
from tests.run.console.test_cluster_view import until
from tests.run.console.test_shard_view import ENDLESS, consumed, page, shop
from tests.support.browser import Browser, missing_browser

pytestmark = pytest.mark.skipif(
    bool(missing_browser()), reason=f"apt-get install {missing_browser()}"
)
__all__ = ["page", "shop"]
CLOCK = SystemClock()
TRACE_S = 5.0
HUNDRED_MILLION = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000000)"
    " SELECT i FROM n"
)


@pytest.fixture
async def browser(page: Page) -> AsyncIterator[Browser]:
    async with Browser() as browser:
        await browser.open(f"{page.url}?key={KEY}")
        await browser.until_seen("Cluster")
        yield browser


async def test_every_view_shows_its_things_and_runs_no_script_of_them(
    page: Page, browser: Browser, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    await append(broker, b"<script>alert(1)</script>\x1b[2J\n", journal=LETTERS)
    await consumed(broker, shop, "one", HOSTILE, "poison", "one")
    await until(page, "application", lambda seen: seen["rows"][0]["poison_messages"] >= 1.0)
    views = {
        "#/": ("Everything is as it should be", "broker-one", "consumer-one", "ready"),
        "#/journals": (SOURCE, OUTPUT, "application/x-ndjson", "Page 1 of 1"),
        f"#/journal/{SOURCE.replace('/', '%2F')}": ("Fragments over time", HOSTILE, "1 of 1"),
        f"#/journal/{LETTERS.replace('/', '%2F')}": ("<script>alert(1)</script>\\u001b[2J",),
        "#/application": (SHARD, "PRIMARY", LETTERS, "ValueError", f"{HOSTILE} is no word"),
        f"#/shard/{SHARD}": (HOSTILE, "Timers to come", "Last transactions", "processing"),
        "#/journal/none": ("there is no journal none",),
        "#/shard/%3Cscript%3E": ("there is no shard <script>",),
        "#/nothing": ("There is no such page",),
        "#/journal/%E0%A4": ("There is no such page",),
    }
    for address, words in views.items():
        await browser.open(f"{page.url}{address}")
        await browser.until_seen(*words)
        assert await browser.run("return document.querySelectorAll('h1').length") == 1
        assert (
            await browser.run("return document.querySelectorAll('main script, main img').length")
            == 0
        )
    refused = [text for text in await browser.problems() if "status of 404" not in text]
    assert refused == []


async def test_from_an_output_to_its_inputs_and_rows_in_one_click(
    page: Page, browser: Browser, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    await consumed(broker, shop, "one", "two")
    await consumed(broker, shop, "one", "three")
    await browser.open(f"{page.url}#/journal/{OUTPUT.replace('/', '%2F')}")
    await browser.until_seen('"three"')
    script = """
        const rows = [...document.querySelectorAll("tr")];
        return rows.find((row) => row.textContent.includes('"three"')).querySelector("a").hash;
    """
    address = await browser.run(script)
    begun = CLOCK.monotonic()
    await browser.click(f'a[href="{address}"]')
    text = await browser.until_seen(
        "Rows that its transaction changed", "counts: 1 changed, 1 added"
    )
    assert CLOCK.monotonic() - begun < TRACE_S
    assert text.index("Messages that its transaction read") < text.index(
        '"one"', text.index("read\n")
    )
    # The page of the shard leads to the state of that moment.
    await browser.click("dd a", "to")
    await browser.until_seen(f"Shard {SHARD}", "three")


async def test_sql_and_the_slider_show_states_of_moments(
    page: Page, browser: Browser, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    first = await consumed(broker, shop, "one")
    await consumed(broker, shop, "one", "late")
    await browser.open(f"{page.url}#/shard/{SHARD}")
    await browser.until_seen("Rows: 2.", "late")
    await browser.run("document.getElementById('sql').value = 'DELETE FROM counts'")
    await browser.click("button", "Run")
    await browser.until_seen("readonly database")
    await browser.run("document.getElementById('sql').value = 'SELECT n AS times FROM counts'")
    await browser.click("button", "Run")
    await browser.until_seen("times", "Rows: 2.")
    await browser.run(f"document.getElementById('at').value = '{first}'")
    await browser.click("button", "Go there")
    await browser.until_seen("Rows: 1.")
    await browser.click("button", "Rows it changed")
    await browser.until_seen("counts: 1 changed, 1 added")
    slide = """
        const slider = document.getElementById("moment");
        slider.value = 0;
        slider.dispatchEvent(new Event("input"));
        slider.dispatchEvent(new Event("change"));
    """
    await browser.run(slide)
    await browser.until_seen("Kind: ")
    assert [text for text in await browser.problems() if "status of 400" not in text] == []


HOLD = """
    const [part] = arguments, real = window.fetch;
    window.held = [];
    window.fetch = (url, options) => {
        const answer = real(url, options);
        if (!String(url).includes(part)) return answer;
        return new Promise((resolve) => window.held.push(() => resolve(answer)));
    };
"""
RELEASE = """
    const frame = () => new Promise((drawn) => requestAnimationFrame(drawn));
    window.held.forEach((release) => release());
    return real_frames(10);
    async function real_frames(count) { for (let at = 0; at < count; at += 1) await frame(); }
"""


async def held(browser: Browser, part: str) -> None:
    """Hold back answers whose address has a part, until the next poll asks for one."""
    await browser.run(HOLD, part)
    while not await browser.run("return window.held.length"):
        await CLOCK.sleep(0.1)


async def test_what_the_user_asks_for_goes_before_what_a_poll_asked(
    page: Page, browser: Browser, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    await append(broker, *(frame(f"w{n}", n + 1) for n in range(40)), journal=SOURCE)
    await browser.open(f"{page.url}#/journal/{SOURCE.replace('/', '%2F')}")
    await browser.until_seen('"w39"')
    await held(browser, "next=")
    await browser.run("document.getElementById('place').value = '0'")
    await browser.click("button", "Read")
    await browser.until_seen('"w0"')
    await browser.run(RELEASE)
    text = await browser.text()
    assert ('"w0"' in text, '"w39"' in text) == (True, False)

    await browser.open(f"{page.url}#/journals")
    await browser.until_seen("4 journals")
    await held(browser, "search=&")
    await browser.run("document.getElementById('search').value = 'letters'")
    await browser.click("button", "Search")
    await browser.until_seen("1 journal.")
    await browser.run(RELEASE)
    assert "1 journal." in await browser.text()


async def test_a_line_that_is_not_whole_is_not_read_again_and_again(
    page: Page, browser: Browser, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    await append(broker, b"{}\nhalf a line", journal=LETTERS)
    await browser.open(f"{page.url}#/journal/{LETTERS.replace('/', '%2F')}")
    asked = """
        const names = performance.getEntriesByType("resource").map((one) => one.name);
        return names.filter((name) => name.includes("/api/messages"));
    """
    while len(names := await browser.run(asked)) < 3:
        await CLOCK.sleep(0.1)
    assert ["seen=" in name for name in names[:3]] == [False, True, True]


async def test_a_broker_that_is_killed_while_the_page_is_open_is_a_sentence(
    etcd: Etcd, tmp_path: Path, console: Console
) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0)
    async with console(f"--broker.address={broker.endpoint}", "--timeout=3s") as page:
        async with Browser() as browser:
            await browser.open(f"{page.url}?key={KEY}")
            await browser.until_seen("broker-one")
            await broker.crash()
            await browser.until_seen(
                "critical", "the broker does not answer", "What is shown is old"
            )


async def test_a_token_that_has_expired_is_a_sentence(
    etcd: Etcd, tmp_path: Path, console: Console
) -> None:
    auth = KeyedAuth.parse(CLOCK, "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=")
    token = auth.sign(Claims(Capability.ALL, EVERYTHING), -60.0)
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth) as broker, Browser() as browser:
        flags = (f"--broker.address={broker.endpoint}", f"--broker.auth-token={token}")
        async with console(*flags) as page:
            await browser.open(f"{page.url}?key={KEY}")
            for view in ("#/", "#/journals", "#/application", "#/shard/a", "#/trace/a/1"):
                await browser.open(f"{page.url}{view}")
                await browser.until_seen("token", "expired")


async def test_large_messages_and_queries_without_end_are_sentences(
    page: Page, browser: Browser, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    await consumed(broker, shop, "one")
    await append(broker, b"x" * (10 << 20) + b"\x00\xe2\x80\xae\n", b"\x07last\n", journal=LETTERS)
    await browser.open(f"{page.url}#/journal/{LETTERS.replace('/', '%2F')}")
    await browser.until_seen("10.0 MiB more", "\\u0007last")
    await browser.open(f"{page.url}#/shard/{SHARD}")
    await browser.until_seen("Rows: 1.")
    for sql, sentence in (
        (ENDLESS, "did not end within"),
        (HUNDRED_MILLION, "Rows: 1,000. There are more"),
        (f"SELECT count(*) FROM ({HUNDRED_MILLION})", "did not end within"),
        ("SELEC 1", "syntax error"),
    ):
        await browser.run("document.getElementById('sql').value = arguments[0]", sql)
        await browser.click("button", "Run")
        await browser.until_seen(sentence)
    await browser.run("document.getElementById('at').value = 'tomorrow'")
    await browser.click("button", "Go there")
    await browser.until_seen("not a time")
    assert [text for text in await browser.problems() if "status of " not in text] == []


async def test_pages_fit_a_phone_and_are_used_by_keyboard(
    console: Console, page: Page, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    await consumed(broker, shop, "one")
    async with Browser() as browser:
        await browser.open(f"{page.url}?key={KEY}")
        await browser.until_seen("Cluster")
        await browser.narrow(375)
        for address in ("#/", "#/journals", "#/application", f"#/shard/{SHARD}"):
            await browser.open(f"{page.url}{address}")
            await browser.until_seen("Gazette")
            wide = (
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert await browser.run(wide) <= 0, address
            # What reacts to a click can have the focus, and says what it is.
            unnamed = """
                const named = (one) =>
                    one.textContent || one.labels?.length || one.getAttribute("aria-label");
                return [...document.querySelectorAll("a, button, input, select, textarea")]
                    .filter((one) => one.tabIndex < 0 || !named(one)).map((one) => one.outerHTML);
            """
            assert await browser.run(unnamed) == [], address
